import type { Connection, Driver } from './driver.js';
import { translate } from './driver.js';
import { ServerError, UnavailableError } from './errors.js';
import { OTHER, Pool, type Priority } from './pool.js';
import { Alarms, now } from './time.js';

/** A reply, or the error that the server answered with. */
export type Reply = unknown;

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
  /** The connection must have answered within this many ms, or is asked first. */
  proven?: number;
  /** Called right before the request is written. */
  onSent?: (connection: Connection, sent: number) => void;
  /** Whether the connection, after these replies, stays with the caller. */
  keep?: (replies: readonly Reply[]) => boolean;
}

export interface Answer {
  replies: readonly Reply[];
  sent: number;
  connection: Connection | undefined;
}

/** Sends requests to the server that serves a key: the only one, or a node of a cluster. */
export class Server {
  readonly alarms = new Alarms();
  readonly #driver: Driver;
  readonly #max: number;
  readonly #pools = new Map<string | undefined, Pool>();
  readonly #slots = new Map<number, string>();
  readonly #answered = new WeakMap<Connection, number>();
  #next = 0;

  constructor(driver: Driver, maxConnections: number) {
    this.#driver = driver;
    this.#max = maxConnections;
  }

  pool(key: string): Pool {
    if (!this.#driver.addresses) return this.#at(undefined);
    const known = this.#slots.get(slotOf(key));
    if (known !== undefined) return this.#at(known);
    const addresses = this.#driver.addresses();
    return this.#at(addresses[this.#next++ % addresses.length] ?? 'no node of the cluster is known');
  }

  /** A pool for each primary. */
  primaries(): Pool[] {
    return this.#driver.addresses?.().map((address) => this.#at(address)) ?? [this.#at(undefined)];
  }

  /**
   * Sends commands in one pipeline, once, and resolves with their replies; an error reply is an element of these. Follows one redirect.
   * Rejects with an {@link UnavailableError} if there is no answer.
   */
  async exchange(target: string | Pool, commands: (sent: number) => readonly (readonly string[])[], options: Exchange): Promise<Answer> {
    const end = now() + options.timeout;
    let asking: Pool | undefined;
    for (let redirected = false; ; redirected = true) {
      const pool = asking ?? (typeof target === 'string' ? this.pool(target) : target);
      let connection: Connection;
      try {
        connection = options.connection ?? (await pool.take(options.priority, options.lease, end - now()));
        if (connection.closed) throw new UnavailableError('the connection is closed', false);
      } catch (error) {
        if (typeof target === 'string') this.#forget(target, pool);
        // The server answered the attempt to connect with an error: nothing was executed.
        if (error instanceof ServerError) return { replies: commands(now()).map(() => error), sent: now(), connection: undefined };
        throw error;
      }
      let replies: Reply[];
      let sent = now();
      try {
        if (options.proven !== undefined && sent - (this.#answered.get(connection) ?? 0) > options.proven) {
          await send(this.alarms, connection, [['PING']], end - now()).catch((error) => {
            throw new UnavailableError('the connection broke', false, error);
          });
          sent = now();
        }
        options.onSent?.(connection, sent);
        const list = commands(sent);
        const written = asking ? list.flatMap((command) => [['ASKING'], command]) : list;
        replies = await send(this.alarms, connection, written, options.patient ? Number.POSITIVE_INFINITY : end - now());
        if (asking) replies = replies.filter((_, i) => i % 2 === 1);
      } catch (error) {
        if (options.connection) connection.close();
        else pool.broke(connection);
        if (typeof target === 'string') this.#forget(target, pool);
        throw error;
      }
      if (options.proven !== undefined) this.#answered.set(connection, now());
      const failed = replies.find((reply): reply is ServerError => reply instanceof ServerError);
      if (!failed) pool.succeeded();
      else if (/^(READONLY|UNBLOCKED)$/.test(failed.code)) {
        pool.dropIdle();
        connection.close();
        if (typeof target === 'string') this.#forget(target, pool);
      }
      if (!options.connection) {
        if (options.keep?.(replies)) pool.detach(connection);
        else pool.give(connection);
      }
      const redirect = failed && /^(MOVED|ASK) (\d+) (\S*):(\d+)$/.exec(failed.message);
      if (redirect && this.#driver.addresses) {
        const address = `${redirect[3] || pool.address?.replace(/:\d+$/, '')}:${redirect[4]}`;
        if (redirect[1] === 'MOVED') this.#slots.set(Number(redirect[2]), address);
        asking = redirect[1] === 'ASK' ? this.#at(address) : undefined;
        if (!redirected && replies.length === 1) continue;
      }
      return { replies, sent, connection };
    }
  }

  /** Sends one command until it is answered: again after an error that passes; after a lost reply only if `repeatable`. */
  async request(
    target: string | Pool,
    command: readonly string[],
    timeout: number,
    repeatable: boolean,
    more?: Partial<Exchange>,
  ): Promise<unknown> {
    const end = now() + timeout;
    for (;;) {
      try {
        const left = Math.max(1, end - now());
        const [reply] = (
          await this.exchange(target, () => [command], { priority: OTHER, lease: timeout, timeout: Math.min(1000, left), ...more })
        ).replies;
        if (!(reply instanceof ServerError)) return reply;
        if (!reply.passing || now() >= end) throw reply;
        await (typeof target === 'string' ? this.pool(target) : target).pause();
      } catch (error) {
        if (!(error instanceof UnavailableError) || now() >= end || (error.sent && !repeatable)) throw error;
      }
    }
  }

  /** Writes a last command on every idle connection's way out, without waiting for its reply. */
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
      pool = new Pool(this.#driver, this.alarms, this.#max, address);
      this.#pools.set(address, pool);
    }
    return pool;
  }

  /** The node did not answer: another one knows who serves the key now. */
  #forget(key: string, pool: Pool): void {
    if (!this.#driver.addresses) return;
    const slot = slotOf(key);
    if (this.#slots.get(slot) === pool.address) this.#slots.delete(slot);
  }
}

/** Writes commands and collects their replies; an error reply is one of them. */
function send(alarms: Alarms, connection: Connection, commands: readonly (readonly string[])[], timeout: number): Promise<Reply[]> {
  return new Promise((resolve, reject) => {
    const replies: Reply[] = new Array(commands.length);
    let missing = commands.length;
    const timer =
      timeout === Number.POSITIVE_INFINITY
        ? undefined
        : alarms.later(timeout, () => reject(new UnavailableError(`no reply within ${Math.round(timeout)} ms`, true)));
    const settle = (i: number, reply: Reply): void => {
      replies[i] = reply;
      if (--missing > 0) return;
      alarms.cancel(timer);
      resolve(replies);
    };
    commands.forEach((command, i) => {
      connection.send(command).then(
        (reply) => settle(i, reply),
        (error) => {
          if (error instanceof ServerError) return settle(i, error);
          alarms.cancel(timer);
          reject(translate(error, true));
        },
      );
    });
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
