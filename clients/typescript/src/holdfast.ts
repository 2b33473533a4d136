import { EventEmitter } from 'node:events';
import { Acquisition } from './acquisition.js';
import type { Driver } from './driver.js';
import { Election, type ElectionOptions, type Leader, leaderOf, observe } from './election.js';
import { ClosedError, NotAcquiredError, ServerError } from './errors.js';
import {
  type Client,
  checkCount,
  checkFunction,
  checkLease,
  checkRange,
  type Hold,
  type HoldfastEvents,
  keepAlive,
  type Terms,
  type Work,
} from './hold.js';
import { OTHER, type Pool } from './pool.js';
import { Renewer } from './renewer.js';
import { type LockInfo, lockInfo, type Waiter, waiterList } from './replies.js';
import { Server } from './server.js';
import { checkSignal } from './signals.js';
import { now, sleep } from './time.js';
import { Line, Turns } from './turns.js';

export interface HoldfastOptions {
  /** The lease of locks that name none, ms. Default 10,000: a killed process blocks others for at most that long. */
  lease?: number | undefined;
  /**
   * How many connections to one server at most. Default 32; at least 3, of which waits leave two free. Waits for which there is none are polled in turn:
   * other clients may overtake them, and a hand-off takes up to three seconds, and longer with more than 200 of them.
   */
  maxConnections?: number | undefined;
  /** The prefix of all keys. Default: none. A `keyPrefix` of the Redis client is not used. */
  prefix?: string | undefined;
  /**
   * Names the task that acquires now, so that the server can refuse a cycle of waits (`DeadlockError`). Only this task may release the lock, and no
   * other task of any process may have the same name. An `AsyncLocalStorage` can provide it: `actor: () => storage.getStore()`.
   */
  actor?: (() => string | undefined) | undefined;
}

/** The options of an acquisition. Times in ms. */
export interface LockOptions {
  /** How long to wait at most. Default: until it is granted. 0: not at all. */
  wait?: number | undefined;
  /** Gives up when it aborts; the promise rejects with its reason. */
  signal?: AbortSignal | undefined;
  /** For how long the server keeps the lock after the last renewal. */
  lease?: number | undefined;
  /** Whether the lease is renewed for as long as this process lives. Default true. */
  renew?: boolean | undefined;
  /** The server releases the lock as soon as its connection ends. Such a hold is never certain by time: guard by the fence. */
  ephemeral?: boolean | undefined;
  /** How many replicas must confirm the grant and each renewal. */
  replicas?: number | undefined;
  /** How many may hold the lock at once. Default 1. */
  limit?: number | undefined;
  /** Any number of holders at once, but not beside an exclusive one. */
  shared?: boolean | undefined;
}

/** A lock with a fixed kind. Its methods take the other options of {@link Holdfast.lock}, and reject as that does. */
export interface Lock {
  lock(options?: KindOptions): Promise<Hold>;
  /** As {@link Holdfast.tryLock}. */
  tryLock(options?: KindOptions): Promise<Hold | null>;
  /** As {@link Holdfast.using}. */
  using<T>(work: (signal: AbortSignal, hold: Hold) => T | PromiseLike<T>, options?: KindOptions): Promise<T>;
}
export type KindOptions = Omit<LockOptions, 'limit' | 'shared'>;

const NO_LIMIT: readonly string[] = [];
const checkLimit = (value: number): number => checkCount('limit', value, 1);
/** How many names the server takes in one request. */
const MOST_NAMES = 128;
/** How long `close()` waits for the server, ms. */
const CLOSE_TIMEOUT = 5000;

/** The open clients: a normal exit releases their holds. */
const open = new Set<Holdfast>();
const releaseAll = (): void => {
  for (const client of open) client.releaseAll();
};
/** For `process.exit()`, which waits for nothing: no more `setImmediate` is served, in which node-redis would write. */
const releaseNow = (): void => {
  const later = globalThis.setImmediate;
  globalThis.setImmediate = ((work: () => void) => work()) as typeof later;
  for (const client of open) client.releaseNow();
  globalThis.setImmediate = later;
};

/** Counts work under way. */
class Count implements Work {
  #count = 0;
  readonly #first: () => void;
  #last: () => void;

  constructor(first = (): void => {}, last = (): void => {}) {
    this.#first = first;
    this.#last = last;
  }

  begin(): void {
    if (this.#count++ === 0) this.#first();
  }

  end(): void {
    if (--this.#count === 0) this.#last();
  }

  /** Resolves when there is none. */
  none(): Promise<void> {
    return new Promise((resolve) => {
      if (this.#count === 0) resolve();
      else this.#last = resolve;
    });
  }
}

/** The client of one server or cluster with the Holdfast module. A process needs one, and closes it. */
export class Holdfast extends EventEmitter<HoldfastEvents> {
  readonly #options: HoldfastOptions;
  readonly #client: Client;
  readonly #anchor = setInterval(() => {}, 2 ** 30).unref();
  /** What `close()` waits for. */
  readonly #background = new Count();
  #closing: Promise<void> | undefined;

  /** Connects when it is first used. Throws a `RangeError` if an option is out of range, and a `TypeError` if `driver` or `actor` is invalid. */
  constructor(driver: Driver, options: HoldfastOptions = {}) {
    super();
    this.#options = options;
    if (typeof driver?.connect !== 'function' || 'duplicate' in driver)
      throw new TypeError('driver must come from fromIoredis or fromNodeRedis');
    checkLease(options.lease ?? 1);
    checkFunction('actor', options.actor);
    const maxConnections = checkRange('maxConnections', options.maxConnections ?? 32, 3, Number.POSITIVE_INFINITY);
    const server = new Server(driver, Math.floor(maxConnections));
    this.#client = {
      server,
      renewer: new Renewer(server),
      turns: new Turns(),
      polls: new Line(1),
      acquisitions: new Set(),
      foreground: new Count(
        () => this.#anchor.ref(),
        () => this.#anchor.unref(),
      ),
      background: this.#background,
      tell: <K extends keyof HoldfastEvents>(event: K, detail: HoldfastEvents[K][0]) => {
        if (this.listenerCount(event) > 0)
          process.nextTick(() => (this.emit as (event: K, detail: HoldfastEvents[K][0]) => boolean).call(this, event, detail));
      },
    };
    open.add(this);
    if (open.size === 1) process.on('beforeExit', releaseAll).on('exit', releaseNow);
  }

  /**
   * Acquires the lock, after all earlier requests. Rejects with a {@link NotAcquiredError} when the time is over, with the signal's reason when it
   * aborts, with a {@link DeadlockError}, with another {@link ServerError} if the server cannot do it, with a {@link ClosedError}, and with a
   * `RangeError` or `TypeError` if an argument is invalid.
   */
  lock(name: string, options: LockOptions = {}): Promise<Hold> {
    return this.lockAll([name], options);
  }

  /** Acquires the lock if it is free, else resolves with null. Rejects as {@link Holdfast.lock}; with a {@link NotAcquiredError} if the server gave no answer. */
  async tryLock(name: string, options: LockOptions = {}): Promise<Hold | null> {
    return await this.acquire([name], { ...options, wait: 0 }).outcome;
  }

  /** Acquires several locks, 128 at most, in one step, all or none; in a cluster they must be in one slot. Rejects as {@link Holdfast.lock}. */
  async lockAll(names: readonly string[], options: LockOptions = {}): Promise<Hold> {
    const hold = await this.acquire(names, options).outcome;
    if (!hold) throw new NotAcquiredError(names);
    return hold;
  }

  /** Runs `work` under the lock. Rejects with the error of `work` if there is one, else with a {@link LockLostError} if the lock was lost. */
  async using<T>(
    name: string | readonly string[],
    work: (signal: AbortSignal, hold: Hold) => T | PromiseLike<T>,
    options: LockOptions = {},
  ): Promise<T> {
    checkFunction('work', work ?? null);
    const hold = await this.lockAll(typeof name === 'string' ? [name] : name, options);
    return hold.run(work);
  }

  /** A lock that any number of readers, or one writer, may hold. First come, first served. */
  readWriteLock(name: string): { read: Lock; write: Lock } {
    return { read: this.#kind(name, { shared: true }), write: this.#kind(name, {}) };
  }

  /** A lock that `limit` holders may hold at once. All clients must name the same limit. Throws a `RangeError` if it is less than 1. */
  semaphore(name: string, limit: number): Lock {
    return this.#kind(name, { limit: checkLimit(limit) });
  }

  /**
   * Starts a candidacy. It leads as soon as no other candidate does, until it resigns or loses the leadership; after a loss it is a candidate again.
   * Throws a `RangeError` or `TypeError` if an argument is invalid.
   */
  elect(name: string, options: ElectionOptions = {}): Election {
    return new Election(this, name, options);
  }

  /** The leader; null: there is none. Rejects as {@link Holdfast.info}. */
  async leader(name: string): Promise<Leader | null> {
    return leaderOf(await this.info(name));
  }

  /** Yields the leader now, and at each change, until the signal aborts. Asks every `interval` ms (1,000; 1 to 2^31 - 1). Throws if that fails. */
  observe(
    name: string,
    options: { signal?: AbortSignal | undefined; interval?: number | undefined } = {},
  ): AsyncGenerator<Leader | null, void, undefined> {
    return observe(this, name, options);
  }

  /**
   * The holders of the lock (1,000 at most), and the number of waiters; null: it has neither. Rejects with an {@link UnavailableError} if there is no answer within
   * 5 s, with a {@link ServerError}, and with a {@link ClosedError}.
   */
  async info(name: string): Promise<LockInfo | null> {
    return lockInfo(await this.request(name, ['LOCK.INFO', this.key(name)]));
  }

  /** The requests that wait for the lock, in their order: the first 1,000. Rejects as {@link Holdfast.info}. */
  async waiters(name: string): Promise<Waiter[]> {
    return waiterList(await this.request(name, ['LOCK.WAITERS', this.key(name)]));
  }

  /** Takes the lock from its holders, and resolves with their number. Their clients notice when they renew. Rejects as {@link Holdfast.info}. */
  async force(name: string): Promise<number> {
    return Number(await this.request(name, ['LOCK.FORCE', this.key(name)], false));
  }

  /** The key of a lock. Throws a `TypeError` if the name is no string. The libraries send a lone surrogate as U+FFFD. */
  key(name: string): string {
    if (typeof name !== 'string') throw new TypeError(`the name of a lock must be a string, got ${String(name)}`);
    return (this.#options.prefix ?? '') + name;
  }

  /**
   * Sends one command about the lock `name`, for adapters. It is sent again after a lost reply only if it is `repeatable` (the default). `broke` is
   * called when a reply was lost. Rejects as {@link Holdfast.info}, and with a `TypeError` if an argument is no string.
   */
  async request(name: string, command: readonly string[], repeatable = true, broke?: () => void): Promise<unknown> {
    // node-redis would break the connection, and the request would be repeated.
    for (const word of command) if (typeof word !== 'string') throw new TypeError(`a command must be of strings, got ${String(word)}`);
    return this.#request(this.key(name), command, repeatable, broke);
  }

  /** The names of all locks whose name begins with `start`: looks at every key of the database. Rejects as {@link Holdfast.info}. */
  async scan(start: string): Promise<string[]> {
    const names = new Set<string>();
    const pattern = `${this.key(start).replace(/[[\]*?\\]/g, '\\$&')}*`;
    const work = this.#client.server.primaries().map(async (pool) => {
      for (let cursor = '0', first = true; first || cursor !== '0'; first = false) {
        const page = await this.#request(pool, ['SCAN', cursor, 'MATCH', pattern, 'COUNT', '1000', 'TYPE', 'hash'], true);
        const [next, keys] = page as [unknown, string[]];
        cursor = String(next);
        for (const key of keys) names.add(key.slice(this.key('').length));
      }
    });
    await Promise.all(work);
    return [...names];
  }

  /** Cancels all waits, releases all holds, and closes the connections, within 5 s even if the server does not answer. Never rejects. */
  close(): Promise<void> {
    this.#closing ??= keepAlive(this.#client, this.#close());
    return this.#closing;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /**
   * @internal Begins an acquisition. `waited`: for how long it has waited already, ms; `prefix`: the first part of its owner; `urgent`: it does not
   * queue behind other waits of this client; `background`: it does not keep the process alive.
   */
  acquire(
    names: readonly string[],
    options: LockOptions,
    more: { waited?: number; prefix?: string; urgent?: boolean; background?: boolean } = {},
  ): Acquisition {
    if (this.#closing) throw new ClosedError();
    if (typeof options !== 'object') throw new TypeError(`options must be an object, got ${String(options)}`);
    const { signal, limit, shared, wait = Number.POSITIVE_INFINITY } = options;
    checkSignal(signal);
    signal?.throwIfAborted();
    const actor = this.#options.actor?.();
    if (!Array.isArray(names) || names.length === 0)
      throw new RangeError(`names must be an array of at least one name, got ${String(names)}`);
    // With very many arguments, ioredis throws while it has the connection.
    if (names.length > MOST_NAMES) throw new RangeError(`names must be at most ${MOST_NAMES}, got ${names.length}`);
    if (names.length > 1 && (shared || limit !== undefined)) throw new TypeError("several names can't be combined with limit or shared");
    if (shared && limit !== undefined) throw new TypeError("shared and limit can't be combined");
    const terms: Terms = {
      names: [...names], // The caller may change its array.
      keys: names.map((name) => this.key(name)),
      lease: checkLease(options.lease ?? this.#options.lease ?? 10_000),
      renewed: options.renew ?? true,
      ephemeral: options.ephemeral ?? false,
      replicas: checkCount('replicas', options.replicas ?? 0, 0),
      limit: shared ? ['SHARED'] : limit !== undefined && limit !== 1 ? ['LIMIT', String(checkLimit(limit))] : NO_LIMIT,
      wait: checkRange('wait', wait, 0, Number.POSITIVE_INFINITY),
      prefix: more.prefix ?? (actor === undefined ? '' : `${actor}##`),
      waited: more.waited ?? 0,
      urgent: more.urgent ?? false,
      background: more.background ?? false,
    };
    return new Acquisition(this.#client, terms, signal);
  }

  #kind(name: string, kind: LockOptions): Lock {
    return {
      lock: (options) => this.lock(name, { ...options, ...kind }),
      tryLock: (options) => this.tryLock(name, { ...options, ...kind }),
      using: (work, options) => this.using(name, work, { ...options, ...kind }),
    };
  }

  async #request(target: string | Pool, command: readonly string[], repeatable: boolean, broke = (): void => {}): Promise<unknown> {
    if (this.#closing) throw new ClosedError();
    const { server } = this.#client;
    const end = now() + 5000;
    const ask = (command: readonly string[], more = {}): Promise<unknown> =>
      server.ask({ target, priority: OTHER, lease: 5000, timeout: 1000, commands: () => [command], end: () => end, ...more });
    // A command that must not be repeated goes over a connection that has just answered, if only with an error.
    const proven = repeatable
      ? undefined
      : ask(['PING']).catch((error) => {
          if (!(error instanceof ServerError)) throw error;
        });
    const reply = proven ? proven.then(() => ask(command, { repeatable, broke })) : ask(command, { broke });
    return keepAlive(this.#client, reply);
  }

  /** @internal Releases all holds. A leader does not become a candidate again. */
  releaseAll(): void {
    for (const hold of this.#client.renewer.holds) {
      hold.retire?.();
      hold.release({ timeout: CLOSE_TIMEOUT }).catch(() => {});
    }
  }

  /** @internal Writes the releases without waiting for the replies. */
  releaseNow(): void {
    for (const hold of this.#client.renewer.holds)
      this.#client.server.pool(hold.terms.keys[0] as string).sendAtExit(hold.releases()[0] as string[]);
  }

  async #close(): Promise<void> {
    open.delete(this);
    if (open.size === 0) process.off('beforeExit', releaseAll).off('exit', releaseNow);
    // The newest one first: otherwise each one that ends would let the next one ask the server.
    for (const acquisition of [...this.#client.acquisitions].reverse()) acquisition.cancel(new ClosedError());
    this.releaseAll();
    await Promise.race([this.#background.none(), sleep(CLOSE_TIMEOUT)]);
    this.#client.server.close();
    clearInterval(this.#anchor);
  }
}
