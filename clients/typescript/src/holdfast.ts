import { EventEmitter } from 'node:events';
import { type Acquirer, Acquisition } from './acquisition.js';
import type { Driver } from './driver.js';
import { Election, type ElectionOptions, type Leader, leaderOf, observe } from './election.js';
import { ClosedError, type LockLostError, type LossReason, NotAcquiredError } from './errors.js';
import { type Hold, Renewer, type Terms } from './hold.js';
import { type LockInfo, lockInfo, type Waiter, waiterList } from './replies.js';
import { Server } from './server.js';
import { now } from './time.js';

export interface HoldfastOptions {
  /** The lease of locks that name none, ms. Default 10,000: a killed process blocks others for at most that long. */
  lease?: number | undefined;
  /** How many connections to one server at most. Default 32. */
  maxConnections?: number | undefined;
  /** What stands before each name in the keys. Default: nothing. */
  prefix?: string | undefined;
  /**
   * Names the only task that can release what is acquired now, so that the server can refuse a wait for itself (`DeadlockError`). Use it only where
   * each task has a name of its own that no other process uses, for instance with an `AsyncLocalStorage`: `actor: () => storage.getStore()`.
   */
  actor?: (() => string | undefined) | undefined;
}

/** How a lock is asked for. Times in ms. */
export interface LockOptions {
  /** How long to wait at most. Default: until it is granted. 0: not at all. */
  wait?: number | undefined;
  /** Gives up when it aborts; the promise rejects with its reason. */
  signal?: AbortSignal | undefined;
  /** How long the lock is held at most after the last renewal. */
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

/** What `on` and `once` tell, for metrics and logs. Listeners run apart from the work that they hear of. */
export interface HoldfastEvents {
  acquired: [event: { names: readonly string[]; fence: number; waited: number }];
  lost: [event: { names: readonly string[]; fence: number; reason: LossReason }];
  released: [event: { names: readonly string[]; fence: number; held: number }];
  /** Something failed in the background that no caller waits for. */
  warning: [error: unknown];
}

/** A lock of a kind: takes the same options as {@link Holdfast.lock}, but for the kind. */
export interface Lock {
  lock(options?: KindOptions): Promise<Hold>;
  tryLock(options?: KindOptions): Promise<Hold | null>;
  using<T>(work: (signal: AbortSignal, hold: Hold) => T | PromiseLike<T>, options?: KindOptions): Promise<T>;
}
export type KindOptions = Omit<LockOptions, 'limit' | 'shared'>;

const NO_LIMIT: readonly string[] = [];
/** How long `close()` waits for the server, ms. */
const CLOSE_TIMEOUT = 5000;

/** The clients that are open: a normal exit releases what they hold. */
const open = new Set<Holdfast>();
const releaseAll = (): void => {
  for (const client of open) void client.releaseAll();
};
/** For `process.exit()`, which waits for nothing: of use where the library writes at once. */
const releaseNow = (): void => {
  for (const client of open) client.releaseNow();
};

/** Locks of one server or cluster that has the Holdfast module. Make one for a process, and close it. */
export class Holdfast extends EventEmitter<HoldfastEvents> {
  /** @internal */ readonly server: Server;
  readonly #options: HoldfastOptions;
  readonly #client: Acquirer;
  readonly #holds = new Map<Hold, number>();
  readonly #acquisitions = new Set<Acquisition>();
  readonly #anchor = setInterval(() => {}, 2 ** 30).unref();
  #foreground = 0;
  #alone: Promise<unknown> = Promise.resolve();
  #closing: Promise<void> | undefined;
  constructor(driver: Driver, options: HoldfastOptions = {}) {
    super();
    this.#options = options;
    this.server = new Server(driver, positive('maxConnections', options.maxConnections ?? 32));
    positive('lease', options.lease ?? 1);
    const renewer = new Renewer(this.server);
    this.#client = {
      server: this.server,
      renewer,
      queues: new Map(),
      granted: (hold, waited) => {
        this.#holds.set(hold, now());
        renewer.add(hold);
        this.#tell('acquired', { names: hold.names, fence: hold.fence, waited });
      },
      schedule: (hold) => this.#holds.has(hold) && renewer.add(hold),
      unschedule: (hold) => renewer.remove(hold),
      renewNow: (hold) => hold.renewal ?? renewer.start([hold]),
      lost: (hold, error: LockLostError) => {
        if (this.#holds.delete(hold)) this.#tell('lost', { names: hold.names, fence: hold.fence, reason: error.reason });
      },
      released: (hold) => {
        const since = this.#holds.get(hold);
        if (this.#holds.delete(hold)) this.#tell('released', { names: hold.names, fence: hold.fence, held: now() - (since as number) });
      },
      foreground: (work) => this.#foregroundWork(work),
      alone: (work) => {
        const turn = this.#alone.then(work);
        this.#alone = turn.catch(() => {});
        return turn;
      },
      begun: (acquisition) => this.#acquisitions.add(acquisition),
      ended: (acquisition) => this.#acquisitions.delete(acquisition),
      warn: (error) => this.#tell('warning', error),
    };
    open.add(this);
    if (open.size === 1) process.on('beforeExit', releaseAll).on('exit', releaseNow);
  }

  /**
   * Acquires the lock, after those who asked earlier. Rejects with a {@link NotAcquiredError} when the time is over, with the signal's reason when it
   * aborts, with a {@link DeadlockError}, and with a {@link ServerError} if the server cannot do it.
   */
  async lock(name: string, options: LockOptions = {}): Promise<Hold> {
    return (await this.acquire([name], options).result) ?? refused([name]);
  }

  /** Acquires the lock if it is free; otherwise null. Rejects with a {@link NotAcquiredError} if the server gave no answer. */
  async tryLock(name: string, options: LockOptions = {}): Promise<Hold | null> {
    return await this.acquire([name], { ...options, wait: 0 }).result;
  }

  /** Acquires several locks in one step, all or none; in a cluster they must be in one slot. */
  async lockAll(names: readonly string[], options: LockOptions = {}): Promise<Hold> {
    return (await this.acquire(names, options).result) ?? refused(names);
  }

  /** Runs `work` under the lock. An error of `work` goes first; a loss rejects with a {@link LockLostError} after `work` has ended. */
  async using<T>(
    name: string | readonly string[],
    work: (signal: AbortSignal, hold: Hold) => T | PromiseLike<T>,
    options: LockOptions = {},
  ): Promise<T> {
    const hold = await this.lockAll(typeof name === 'string' ? [name] : name, options);
    return hold.run(work);
  }

  /** A lock that any number of readers, or one writer, may hold. First come, first served. */
  readWriteLock(name: string): { read: Lock; write: Lock } {
    return { read: this.#kind(name, { shared: true }), write: this.#kind(name, {}) };
  }

  /** A lock that `limit` may hold at once. Every user must name the same limit. */
  semaphore(name: string, limit: number): Lock {
    return this.#kind(name, { limit: positive('limit', limit) });
  }

  /** Stands for leadership from now on: leads, as soon as no other does, until it resigns or loses it, and stands again after a loss. */
  elect(name: string, options: ElectionOptions): Election {
    return new Election(this, name, options);
  }

  /** Who leads; null: nobody. */
  async leader(name: string): Promise<Leader | null> {
    return leaderOf(await this.info(name));
  }

  /** Tells who leads now, and each change, until the signal aborts; asks every `interval` ms (1,000). */
  observe(
    name: string,
    options: { signal?: AbortSignal | undefined; interval?: number | undefined } = {},
  ): AsyncGenerator<Leader | null, void, undefined> {
    return observe(this, name, options);
  }

  /** Who holds the lock, and how many wait; null: nobody does either. */
  async info(name: string): Promise<LockInfo | null> {
    return lockInfo(await this.request(name, ['LOCK.INFO', this.key(name)]));
  }

  /** Who waits for the lock, in their order. */
  async waiters(name: string): Promise<Waiter[]> {
    return waiterList(await this.request(name, ['LOCK.WAITERS', this.key(name)]));
  }

  /** Takes the lock from its holders; resolves with their number. Their clients learn of it when they renew. */
  async force(name: string): Promise<number> {
    return Number(await this.request(name, ['LOCK.FORCE', this.key(name)], { repeatable: false }));
  }

  /** The key of a lock. */
  key(name: string): string {
    return (this.#options.prefix ?? '') + name;
  }

  /** Sends one command about the lock `name`, for adapters. It is sent again after a lost reply only if it is `repeatable` (the default). */
  request(
    name: string,
    command: readonly string[],
    options: { timeout?: number; repeatable?: boolean; proven?: number } = {},
  ): Promise<unknown> {
    if (this.#closing) return Promise.reject(new ClosedError());
    const { timeout = 5000, repeatable = true, proven } = options;
    return this.#foregroundWork(this.server.request(this.key(name), command, timeout, repeatable, proven === undefined ? {} : { proven }));
  }

  /** The names of all locks whose name begins with `start`: looks at every key of the database. */
  async scan(start: string): Promise<string[]> {
    const names = new Set<string>();
    const pattern = `${this.key(start).replace(/[[\]*?\\]/g, '\\$&')}*`;
    const work = this.server.primaries().map(async (pool) => {
      for (let cursor = '0', first = true; first || cursor !== '0'; first = false) {
        const page = await this.server.request(pool, ['SCAN', cursor, 'MATCH', pattern, 'COUNT', '1000', 'TYPE', 'hash'], 5000, true);
        const [next, keys] = page as [unknown, string[]];
        cursor = String(next);
        for (const key of keys) names.add(key.slice(this.key('').length));
      }
    });
    await this.#foregroundWork(Promise.all(work));
    return [...names];
  }

  /** Cancels what waits, releases what is held, and closes the connections; within 5 s, whatever the server does. */
  close(): Promise<void> {
    this.#closing ??= this.#foregroundWork(this.#close());
    return this.#closing;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  /** @internal Begins an acquisition. `waited`: for how long it has waited already; `prefix`: what its owner begins with; `urgent`: not behind other waits of this client. */
  acquire(
    names: readonly string[],
    options: LockOptions,
    more: { waited?: number; prefix?: string; urgent?: boolean } = {},
  ): { acquisition: Acquisition; result: Promise<Hold | null> } {
    if (this.#closing) throw new ClosedError();
    options.signal?.throwIfAborted();
    const actor = this.#options.actor?.();
    const { limit, shared, replicas = 0, wait = Number.POSITIVE_INFINITY } = options;
    if (names.length === 0) throw new RangeError('a lock needs a name');
    if (names.length > 1 && (shared || limit !== undefined)) throw new TypeError('several locks at once are exclusive ones');
    if (!(wait >= 0)) throw new RangeError(`wait must be at least 0 ms, got ${wait}`);
    const terms: Terms = {
      names,
      keys: this.#options.prefix ? names.map((name) => this.key(name)) : names,
      lease: positive('lease', options.lease ?? this.#options.lease ?? 10_000),
      renewed: options.renew ?? true,
      ephemeral: options.ephemeral ?? false,
      replicas,
      limit: shared ? ['SHARED'] : limit !== undefined && limit !== 1 ? ['LIMIT', String(positive('limit', limit))] : NO_LIMIT,
      wait,
      prefix: more.prefix ?? (actor === undefined ? '' : `${actor}##`),
      waited: more.waited ?? 0,
      urgent: more.urgent ?? false,
    };
    const acquisition = new Acquisition(this.#client, terms);
    const { signal } = options;
    if (!signal) return { acquisition, result: this.#foregroundWork(acquisition.outcome) };
    const abort = (): void => acquisition.cancel(signal.reason);
    signal.addEventListener('abort', abort, { once: true });
    const result = acquisition.outcome.finally(() => signal.removeEventListener('abort', abort));
    return { acquisition, result: this.#foregroundWork(result) };
  }

  #kind(name: string, kind: LockOptions): Lock {
    return {
      lock: (options) => this.lock(name, { ...options, ...kind }),
      tryLock: (options) => this.tryLock(name, { ...options, ...kind }),
      using: (work, options) => this.using(name, work, { ...options, ...kind }),
    };
  }

  /** Nothing of a client keeps the process alive, but for what somebody waits for. */
  #foregroundWork<T>(work: Promise<T>): Promise<T> {
    if (this.#foreground++ === 0) this.#anchor.ref();
    const done = (): void => {
      if (--this.#foreground === 0) this.#anchor.unref();
    };
    work.then(done, done);
    return work;
  }

  #tell<K extends keyof HoldfastEvents>(event: K, detail: HoldfastEvents[K][0]): void {
    if (this.listenerCount(event) > 0)
      process.nextTick(() => (this.emit as (event: K, detail: HoldfastEvents[K][0]) => boolean).call(this, event, detail));
  }

  /** @internal Releases what is held. */
  async releaseAll(): Promise<void> {
    await Promise.allSettled([...this.#holds.keys()].map((hold) => hold.release({ timeout: CLOSE_TIMEOUT })));
  }

  /** @internal Writes the releases without waiting for the replies. */
  releaseNow(): void {
    for (const hold of this.#holds.keys()) this.server.lastWords(hold.terms.keys[0] as string, hold.releaseCommands()[0] as string[]);
  }

  async #close(): Promise<void> {
    open.delete(this);
    if (open.size === 0) process.off('beforeExit', releaseAll).off('exit', releaseNow);
    const acquisitions = [...this.#acquisitions];
    for (const acquisition of acquisitions) acquisition.cancel(new ClosedError());
    const withdrawn = Promise.all(acquisitions.map((acquisition) => acquisition.withdrawn));
    await Promise.all([this.releaseAll(), Promise.race([withdrawn, this.server.alarms.sleep(CLOSE_TIMEOUT)])]);
    this.server.close();
    clearInterval(this.#anchor);
  }
}

function refused(names: readonly string[]): never {
  throw new NotAcquiredError(names);
}

function positive(what: string, value: number): number {
  if (!(value >= 1 && value < Number.POSITIVE_INFINITY)) throw new RangeError(`${what} must be at least 1, got ${value}`);
  return value;
}
