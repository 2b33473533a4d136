import type { Connection, Driver } from './driver.js';
import { ClientTooOldError, ClosedError, ModuleNotLoadedError, ServerError, ServerTooOldError, UnavailableError } from './errors.js';
import { record } from './replies.js';
import { type Alarm, type Alarms, now } from './time.js';

/** Who gets a connection first. */
export const RENEW = 0;
export const RELEASE = 1;
export const OTHER = 2;
export type Priority = typeof RENEW | typeof RELEASE | typeof OTHER;

const PROTOCOL = 4;
/** How long opening a connection may take, ms. */
const CONNECT = 2000;
const FIRST_PAUSE = 20;
const LONGEST_PAUSE = 1000;

interface Taker {
  resolve(connection: Connection): void;
  reject(error: Error): void;
  timer: Alarm;
}

/** The connections to one server. */
export class Pool {
  readonly address: string | undefined;
  /** The server's `replicas-timeout`, ms. */
  replicasTimeout = 1000;
  readonly #driver: Driver;
  readonly #alarms: Alarms;
  readonly #max: number;
  readonly #all = new Set<Connection>();
  readonly #idle: Connection[] = [];
  readonly #used = new WeakSet<Connection>();
  readonly #queues: [Set<Taker>, Set<Taker>, Set<Taker>] = [new Set(), new Set(), new Set()];
  readonly #slotWaiters = new Set<() => void>();
  #waits = 0;
  #opening = 0;
  #closed = false;
  /** The server has answered since a connection broke or could not be opened. Until it has, one attempt to connect is made at a time. */
  #proven = false;
  #replaced = false;
  #delay = 0;
  #until = 0;
  #shortestLease = Number.POSITIVE_INFINITY;
  #retry: Alarm | undefined;

  constructor(driver: Driver, alarms: Alarms, max: number, address?: string) {
    this.#driver = driver;
    this.#alarms = alarms;
    this.#max = max;
    this.address = address;
  }

  /** A connection for one exchange. Rejects after `timeout` ms, or with the outcome of the attempt to connect that it shared. */
  take(priority: Priority, lease: number, timeout: number): Connection | Promise<Connection> {
    this.#shortestLease = Math.min(this.#shortestLease, lease);
    const idle = this.#idle.pop();
    if (idle) return idle;
    return new Promise((resolve, reject) => {
      if (this.#closed) return reject(new ClosedError());
      const queue = this.#queues[priority];
      const timer = this.#alarms.later(timeout, () => {
        queue.delete(taker);
        reject(new UnavailableError('no connection was free in time', false));
      });
      const taker = { resolve, reject, timer };
      queue.add(taker);
      this.#pump();
    });
  }

  /** Takes a connection back whose reply has been read. */
  give(connection: Connection): void {
    if (!this.#all.has(connection)) return;
    this.#used.add(connection);
    this.#idle.push(connection);
    this.#pump();
  }

  /** Lets a connection go that a hold keeps. */
  detach(connection: Connection): void {
    if (!this.#all.delete(connection)) return;
    this.#proven &&= this.#all.size > 0;
    this.#pump();
  }

  /** Closes a connection under which a command broke or was not answered. */
  broke(connection: Connection): void {
    this.#proven = false;
    this.#lengthen(this.#used.has(connection));
    connection.close();
  }

  /** Closes the idle connections: the server is not the primary any more. */
  dropIdle(): void {
    for (const connection of this.#idle.splice(0)) connection.close();
  }

  succeeded(): void {
    this.#delay = this.#until = 0;
    this.#replaced = false;
    this.#shortestLease = Number.POSITIVE_INFINITY;
  }

  /** Waits before a request is repeated that was answered with an error. */
  pause(): Promise<void> {
    this.#lengthen(false);
    return this.#alarms.sleep(this.#until - now());
  }

  /** Reserves a connection for a wait; two are left free for everything else. */
  reserveWait(): boolean {
    if (this.#waits >= Math.max(1, this.#max - 2)) return false;
    this.#waits++;
    return true;
  }

  endWait(): void {
    this.#waits--;
    const [first] = this.#slotWaiters;
    first?.();
  }

  /** Resolves when a connection for a wait may be free, at the latest after `ms`. */
  waitFree(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const done = (): void => {
        this.#alarms.cancel(timer);
        this.#slotWaiters.delete(done);
        resolve();
      };
      const timer = this.#alarms.later(ms, done);
      this.#slotWaiters.add(done);
    });
  }

  close(): void {
    this.#closed = true;
    this.#alarms.cancel(this.#retry);
    this.#rejectAll(new ClosedError());
    for (const connection of this.#all) connection.close();
  }

  /** An idle connection, for the last words of a process that exits. */
  idle(): Connection | undefined {
    return this.#idle.at(-1);
  }

  #lengthen(free: boolean): void {
    const at = now();
    if (at < this.#until) return; // Once for each outage, not for each request.
    if (free && !this.#replaced) {
      this.#replaced = true; // A dead idle connection is replaced at once, once.
      return;
    }
    this.#delay = Math.min(this.#delay ? this.#delay * 2 : FIRST_PAUSE, LONGEST_PAUSE, Math.max(1, this.#shortestLease / 16));
    this.#until = at + this.#delay * (0.75 + Math.random() / 2);
  }

  #pump(): void {
    let waiting = 0;
    for (const queue of this.#queues) {
      for (const taker of queue) {
        const connection = this.#idle.pop();
        if (!connection) break;
        queue.delete(taker);
        this.#alarms.cancel(taker.timer);
        taker.resolve(connection);
      }
      waiting += queue.size;
    }
    while (waiting > this.#opening && this.#all.size + this.#opening < this.#max && !this.#closed) {
      if (!this.#proven) {
        if (this.#opening > 0) return;
        const left = this.#until - now();
        if (left > 0) {
          this.#alarms.cancel(this.#retry);
          this.#retry = this.#alarms.later(left, () => this.#pump());
          return;
        }
      }
      void this.#open();
    }
  }

  async #open(): Promise<void> {
    this.#opening++;
    try {
      const connection = await this.#driver.connect(CONNECT, this.address);
      if (!this.#proven) await this.#check(connection);
      if (this.#closed) return connection.close();
      if (connection.closed) throw new UnavailableError('the connection broke', false);
      this.#proven = true;
      this.#all.add(connection);
      connection.onClose = () => {
        const at = this.#idle.indexOf(connection);
        if (at >= 0) this.#idle.splice(at, 1);
        this.detach(connection);
      };
      this.#opening--;
      this.#idle.push(connection);
      this.#pump();
    } catch (error) {
      this.#opening--;
      this.#proven = false;
      this.#lengthen(false);
      this.#rejectAll(error instanceof ServerError ? error : new UnavailableError('cannot connect', false, error));
    }
  }

  /** Asks whether this client and the server's module understand each other. */
  async #check(connection: Connection): Promise<void> {
    const timer = this.#alarms.later(CONNECT, () => connection.close());
    try {
      const version = record(await connection.send(['LOCK.VERSION']));
      const [lowest, highest] = (version.protocol ?? []) as number[];
      const is = `this client speaks protocol ${PROTOCOL}, the server's module ${version.version} ${lowest} to ${highest}`;
      if (lowest === undefined || highest === undefined || highest < PROTOCOL)
        throw new ServerTooOldError('SERVER_TOO_OLD', `the server's module is too old: ${is}`);
      if (lowest > PROTOCOL) throw new ClientTooOldError('CLIENT_TOO_OLD', `this client is too old: ${is}`);
      this.replicasTimeout = Number(version['replicas-timeout'] ?? this.replicasTimeout);
    } catch (error) {
      if (error instanceof ModuleNotLoadedError) {
        // A module without LOCK.VERSION says how LOCK.ACQUIRE is to be called.
        const known = await connection
          .send(['LOCK.ACQUIRE'])
          .catch((reply) => !(reply instanceof ModuleNotLoadedError) && reply instanceof ServerError);
        connection.close();
        if (known)
          throw new ServerTooOldError(
            'SERVER_TOO_OLD',
            `the server's module is too old: it has no LOCK.VERSION, and this client speaks protocol ${PROTOCOL}`,
          );
      }
      connection.close();
      throw error;
    } finally {
      this.#alarms.cancel(timer);
    }
  }

  #rejectAll(error: Error): void {
    for (const queue of this.#queues) {
      for (const taker of queue) {
        this.#alarms.cancel(taker.timer);
        taker.reject(error);
      }
      queue.clear();
    }
  }
}
