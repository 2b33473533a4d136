import { ask, type Connection, type Driver } from './driver.js';
import { ServerError, UnavailableError } from './errors.js';
import { Pool, type Priority } from './pool.js';
import { Alarm, now, sleep } from './time.js';

/** The commands of one pipeline, made right before they are written; none: they are not wanted any more. */
export type Commands = (sent: number) => readonly (readonly string[])[];

export interface Exchange {
  priority: Priority;
  /** The lease that the request is about: it bounds the pauses. */
  lease: number;
  /** How long to wait for a connection and the replies, ms. */
  timeout: number;
  /** Only the connection is waited for within `timeout`; the sender of the request decides how long it may take. */
  patient?: boolean;
  /** The connection to use instead of one of the pool. */
  connection?: Connection | undefined;
  /** Called when the commands are written. */
  written?: (connection: Connection) => void;
  /** Whether the connection, after these replies, stays with the caller. */
  keep?: (replies: readonly unknown[]) => boolean;
  /** Whether it may be sent again after a lost reply. Default true. If not, the connection has to show first that it answers. */
  repeatable?: boolean;
}

export interface Request extends Exchange {
  /** When to give up, by the monotonic clock. It is sent once at least. */
  end: () => number;
  /** Called when a reply was lost. */
  broke?: () => void;
}

/** Sends requests to the server that serves a key: the only one, or a node of a cluster. */
export class Server {
  readonly #driver: Driver;
  readonly #max: number;
  readonly #pools = new Map<string | undefined, Pool>();
  readonly #slots = new Map<number, string>();
  /** Which node is asked about slots that are not known, by its place in the addresses. */
  #guide = 0;

  constructor(driver: Driver, maxConnections: number) {
    this.#driver = driver;
    this.#max = maxConnections;
  }

  pool(target: string | Pool): Pool {
    if (target instanceof Pool) return target;
    if (!this.#driver.addresses) return this.#at(undefined);
    const known = this.#slots.get(slotOf(target));
    if (known !== undefined) return this.#at(known);
    const addresses = this.#driver.addresses();
    return this.#at(addresses[this.#guide % addresses.length] ?? 'no node of the cluster is known');
  }

  /** A pool for each primary. */
  primaries(): Pool[] {
    return this.#driver.addresses?.().map((address) => this.#at(address)) ?? [this.#at(undefined)];
  }

  /**
   * Sends commands in one pipeline, once, and resolves with their replies; an error reply is an element of these. Follows one redirect.
   * Rejects with an {@link UnavailableError} if there is no answer, and with a {@link ServerError} if the server refuses connections.
   */
  async exchange(target: string | Pool, commands: Commands, options: Exchange): Promise<{ replies: readonly unknown[]; sent: number }> {
    const end = now() + options.timeout;
    let asking: Pool | undefined;
    for (let redirected = false; ; redirected = true) {
      const pool = asking ?? this.pool(target);
      let connection = options.connection;
      let replies: unknown[] = [];
      let sent = 0;
      try {
        // An idle connection is written to at once: what else there is to do is done while the server works.
        const taken = connection ?? pool.take(options.priority, options.lease, end - now());
        connection = taken instanceof Promise ? await taken : taken;
        if (connection.closed) throw new UnavailableError('the connection is closed', false);
        if (options.repeatable === false)
          await send(connection, [['PING']], end - now()).catch((error) => {
            throw new UnavailableError('the connection broke', false, error);
          });
        sent = now();
        const list = commands(sent);
        const written = asking ? list.flatMap((command) => [['ASKING'], command]) : list;
        if (list.length > 0) {
          const answered = send(connection, written, options.patient ? undefined : end - sent);
          options.written?.(connection);
          replies = await answered;
        }
        if (asking) replies = replies.filter((_, i) => i % 2 === 1);
      } catch (error) {
        if (options.connection) options.connection.close();
        else if (connection) pool.broke(connection);
        this.#forget(pool);
        throw error;
      }
      const failed = replies.filter((reply): reply is ServerError => reply instanceof ServerError);
      if (replies.length > 0 && failed.length === 0) pool.succeeded();
      if (failed.some(({ code }) => code === 'READONLY' || code === 'UNBLOCKED')) {
        pool.dropIdle();
        connection.close();
        this.#forget(pool);
      }
      if (!options.connection) {
        if (options.keep?.(replies)) pool.detach(connection);
        else pool.give(connection);
      }
      const redirects = this.#driver.addresses ? failed.filter(({ code }) => code === 'MOVED' || code === 'ASK') : [];
      // A node that was cut off from its cluster may have lost its slots.
      if (failed.some(({ code }) => code === 'CLUSTERDOWN')) this.#forget(pool);
      else if (failed.length > redirects.length) this.#avoid(pool);
      asking = undefined;
      for (const { message } of redirects) {
        const [kind, slot, address = ''] = message.split(' ');
        // Without a host, it is that of the node that answered.
        const node = /^:\d+$/.test(address) ? `${pool.address?.replace(/:\d+$/, '')}${address}` : address;
        if (kind === 'ASK') asking = this.#at(node);
        else this.#slots.set(Number(slot), node);
      }
      if (redirected || redirects.length === 0 || redirects.length < replies.length) return { replies, sent };
    }
  }

  /**
   * Sends commands until the first one is answered: again after an error that passes, and after a lost reply. Rejects with the last error.
   */
  async request(target: string | Pool, commands: Commands, options: Request): Promise<unknown> {
    let exchange: Exchange = options;
    for (;;) {
      let failure: unknown;
      try {
        const [reply] = (await this.exchange(target, commands, exchange)).replies;
        if (!(reply instanceof ServerError)) return reply;
        failure = reply;
      } catch (error) {
        failure = error;
      }
      if (failure instanceof UnavailableError) {
        if (failure.sent) options.broke?.();
        if (options.connection || (failure.sent && options.repeatable === false)) throw failure;
      } else if (failure instanceof ServerError && failure.passing) {
        await sleep(Math.min(this.pool(target).pause(), Math.max(0, options.end() - now())));
      } else throw failure;
      const left = options.end() - now();
      if (left <= 0) throw failure;
      exchange = { ...options, timeout: Math.min(options.timeout, left) };
    }
  }

  /** Writes a last command on an idle connection's way out, without waiting for its reply. */
  lastWords(key: string, command: readonly string[]): void {
    this.pool(key)
      .idle()
      ?.send(command)
      .catch(() => {});
  }

  close(): void {
    for (const pool of this.#pools.values()) pool.close();
  }

  #at(address: string | undefined): Pool {
    let pool = this.#pools.get(address);
    if (!pool) {
      pool = new Pool(this.#driver, this.#max, address);
      this.#pools.set(address, pool);
    }
    return pool;
  }

  /** The node did not answer: another one knows who serves its slots now. One at a time, they would outlast the leases of a pipeline. */
  #forget(pool: Pool): void {
    for (const [slot, address] of this.#slots) if (address === pool.address) this.#slots.delete(slot);
    this.#avoid(pool);
  }

  /** Asks another node about unknown slots. Requests that fail at one node together change it once. */
  #avoid(pool: Pool): void {
    const addresses = this.#driver.addresses?.() ?? [];
    if (addresses[this.#guide % addresses.length] === pool.address) this.#guide++;
  }
}

/** Writes commands and collects their replies; an error reply is one of them. */
function send(connection: Connection, commands: readonly (readonly string[])[], timeout: number | undefined): Promise<unknown[]> {
  return new Promise((resolve, reject) => {
    const replies: unknown[] = [];
    let missing = commands.length;
    let alarm: Alarm | undefined;
    const fail = (error: unknown): void => {
      alarm?.cancel();
      reject(error);
    };
    commands.forEach((command, i) => {
      ask(connection, command).then((reply) => {
        replies[i] = reply;
        if (--missing > 0) return;
        alarm?.cancel();
        resolve(replies);
      }, fail);
    });
    if (timeout !== undefined)
      alarm = new Alarm(timeout, () => fail(new UnavailableError(`no reply within ${Math.round(timeout)} ms`, true)));
  });
}

/** The slot of a cluster that a key is in (CRC16/XMODEM of the key, or of its hash tag). */
export function slotOf(key: string): number {
  const open = key.indexOf('{');
  const shut = open < 0 ? -1 : key.indexOf('}', open + 1);
  const tag = shut > open + 1 ? key.slice(open + 1, shut) : key;
  let crc = 0;
  for (const byte of new TextEncoder().encode(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = (crc & 0x8000 ? (crc << 1) ^ 0x1021 : crc << 1) & 0xffff;
  }
  return crc & 16383;
}
