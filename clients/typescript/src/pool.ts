import { ask, type Connection, type Driver } from './driver.js';
import { ClientTooOldError, ClosedError, ModuleNotLoadedError, ServerError, ServerTooOldError, UnavailableError } from './errors.js';
import { record } from './replies.js';
import { Alarm, now } from './time.js';
import { Line } from './turns.js';

/** Priorities: the lowest gets a connection first. */
export const RENEW = 0;
export const RELEASE = 1;
export const OTHER = 2;
export type Priority = typeof RENEW | typeof RELEASE | typeof OTHER;

const PROTOCOL = 4;
/** How long opening a connection may take, ms. */
const CONNECT = 2000;
const FIRST_PAUSE = 20;
const LONGEST_PAUSE = 1000;

/** A request that needs a connection. */
export interface Taker {
  readonly priority: Priority;
  /** The lease of its lock: it bounds the pauses. */
  readonly lease: number;
  /** Gets the connection, perhaps at once. */
  take(connection: Connection): void;
  /** Gets the outcome of an attempt to connect that failed. */
  fail(error: Error): void;
}

/** The connections to one server. */
export class Pool {
  readonly address: string | undefined;
  /** The server's `replicas-timeout`, ms. */
  replicasTimeout = 1000;
  /** The waits that may have a connection of their own: two connections are left for other requests. */
  readonly places: Line;
  readonly #driver: Driver;
  readonly #max: number;
  readonly #all = new Set<Connection>();
  readonly #idle: Connection[] = [];
  readonly #used = new WeakSet<Connection>();
  readonly #queues: [Set<Taker>, Set<Taker>, Set<Taker>] = [new Set(), new Set(), new Set()];
  #opening = 0;
  #closed = false;
  /** The server has answered since a connection broke or could not be opened. Until it has, one attempt to connect is made at a time. */
  #proven = false;
  #replaced = false;
  #delay = 0;
  #until = 0;
  #shortestLease = Number.POSITIVE_INFINITY;
  #retry: Alarm | undefined;
  /** Why the last attempt to connect failed. */
  #failure: unknown;

  constructor(driver: Driver, max: number, address?: string) {
    this.#driver = driver;
    this.#max = max;
    this.places = new Line(max - 2);
    this.address = address;
  }

  /** Gives a connection for one exchange: an idle one at once. */
  take(taker: Taker): void {
    this.#shortestLease = Math.min(this.#shortestLease, taker.lease);
    const idle = this.#idle.pop();
    if (idle) taker.take(idle);
    else if (this.#closed) queueMicrotask(() => taker.fail(new ClosedError()));
    else {
      this.#queues[taker.priority].add(taker);
      this.#pump();
    }
  }

  /** Removes a request that has waited for a connection. Returns the error that says why there was none. */
  leave(taker: Taker): UnavailableError {
    this.#queues[taker.priority].delete(taker);
    return new UnavailableError('no connection was free in time', false, this.#failure);
  }

  /** Takes back a connection whose replies have been read. */
  give(connection: Connection): void {
    if (!this.#all.has(connection)) return;
    this.#used.add(connection);
    this.#idle.push(connection);
    this.#pump();
  }

  /** Removes a connection that has ended, or that a hold keeps. */
  detach(connection: Connection): void {
    if (!this.#all.delete(connection)) return;
    this.#proven &&= this.#all.size > 0;
    this.#pump();
  }

  /** Closes a connection under which a command broke or was not answered. */
  broke(connection: Connection): void {
    this.#proven = false;
    // The idle ones may be dead, too, or lead to a former primary. To try one after the other could take longer than a lease.
    if (this.#used.has(connection)) this.dropIdle();
    // A dead idle connection is replaced at once, once.
    if (this.#used.has(connection) && !this.#replaced && now() >= this.#until) this.#replaced = true;
    else this.pause();
    connection.close();
  }

  /** Closes the idle connections: the server may not be the primary any more. */
  dropIdle(): void {
    for (const connection of this.#idle.splice(0)) connection.close();
  }

  succeeded(): void {
    this.#delay = this.#until = 0;
    this.#replaced = false;
    this.#shortestLease = Number.POSITIVE_INFINITY;
  }

  /** How long to wait, ms, before a request is repeated that was answered with an error. Doubles once for each outage, not for each request. */
  pause(): number {
    const at = now();
    if (at >= this.#until) {
      this.#delay = Math.min(this.#delay ? this.#delay * 2 : FIRST_PAUSE, LONGEST_PAUSE, Math.max(1, this.#shortestLease / 16));
      this.#until = at + this.#delay * (0.75 + Math.random() / 2);
    }
    return this.#until - at;
  }

  close(): void {
    this.#closed = true;
    this.#retry?.cancel();
    this.#rejectAll(new ClosedError());
    for (const connection of this.#all) connection.close();
  }

  /** Opens a connection if none is idle. */
  spare(): void {
    if (this.#idle.length === 0) this.#pump(1);
  }

  /** Writes a command while the process exits. Without an idle connection, all have it: the server does not read those on which a request waits. */
  sendAtExit(command: readonly string[]): void {
    for (const connection of this.#idle.length > 0 ? this.#idle.slice(-1) : this.#all) connection.send([command], () => {});
  }

  #pump(waiting = 0): void {
    for (const queue of this.#queues) {
      for (const taker of queue) {
        const connection = this.#idle.pop();
        if (!connection) break;
        queue.delete(taker);
        taker.take(connection);
      }
      waiting += queue.size;
    }
    while (waiting > this.#opening && this.#all.size + this.#opening < this.#max && !this.#closed) {
      if (!this.#proven) {
        if (this.#opening > 0) return;
        const left = this.#until - now();
        if (left > 0) {
          this.#retry?.cancel();
          this.#retry = new Alarm(left, () => this.#pump());
          return;
        }
      }
      void this.#open();
    }
  }

  async #open(): Promise<void> {
    this.#opening++;
    let opened: Connection | undefined;
    try {
      const connection = await this.#driver.connect(CONNECT, this.address);
      opened = connection;
      if (!this.#proven) await this.#check(connection);
      if (connection.closed) throw new UnavailableError('the connection broke', false);
      if (this.#closed) throw new ClosedError();
      this.#opening--;
      this.#proven = true;
      this.#failure = undefined;
      this.#all.add(connection);
      connection.onClose = () => {
        const at = this.#idle.indexOf(connection);
        if (at >= 0) this.#idle.splice(at, 1);
        this.detach(connection);
      };
      this.#idle.push(connection);
      this.#pump();
    } catch (error) {
      this.#opening--;
      opened?.close();
      this.#proven = false;
      this.pause();
      this.#failure = error instanceof UnavailableError ? (error.cause ?? error) : error;
      this.#rejectAll(error instanceof ServerError ? error : new UnavailableError('cannot connect', false, this.#failure));
    }
  }

  /** Checks that this client and the server's module have a protocol version in common. */
  async #check(connection: Connection): Promise<void> {
    const timer = new Alarm(CONNECT, () => connection.close());
    try {
      const reply = await ask(connection, ['LOCK.VERSION']);
      const speaks = `this client speaks protocol ${PROTOCOL}`;
      if (reply instanceof ModuleNotLoadedError) {
        // A module without LOCK.VERSION has LOCK.ACQUIRE, and refuses the number of arguments.
        if ((await ask(connection, ['LOCK.ACQUIRE'])) instanceof ModuleNotLoadedError) throw reply;
        throw new ServerTooOldError('SERVER_TOO_OLD', `the server's module is too old: it has no LOCK.VERSION, and ${speaks}`);
      }
      if (reply instanceof ServerError) {
        if (reply.code === 'NOPERM') return; // A user that only reads may have no right to this command.
        throw reply;
      }
      const version = record(reply);
      const [lowest = 0, highest = 0] = (version.protocol ?? []) as number[];
      const is = `${speaks}, the server's module ${version.version} ${lowest} to ${highest}`;
      if (highest < PROTOCOL) throw new ServerTooOldError('SERVER_TOO_OLD', `the server's module is too old: ${is}`);
      if (lowest > PROTOCOL) throw new ClientTooOldError('CLIENT_TOO_OLD', `this client is too old: ${is}`);
      this.replicasTimeout = Number(version['replicas-timeout'] ?? this.replicasTimeout);
    } finally {
      timer.cancel();
    }
  }

  #rejectAll(error: Error): void {
    for (const queue of this.#queues) {
      const takers = [...queue];
      queue.clear();
      for (const taker of takers) taker.fail(error);
    }
  }
}
