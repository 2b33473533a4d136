import { EventEmitter } from 'node:events';
import { HoldfastError } from './errors.js';
import type { Hold } from './hold.js';
import type { Holdfast } from './holdfast.js';

/** Settings of node-redlock. `driftFactor` and `automaticExtensionThreshold` are accepted and have no effect: a hold is certain for 99 % of its lease, and renewed at each quarter. */
export interface Settings {
  /** How often a refused acquisition was to be repeated; here it waits in the queue for as long as that would have taken. Negative: without a limit. */
  readonly retryCount: number;
  /** ms. */
  readonly retryDelay: number;
  /** ms. */
  readonly retryJitter: number;
  readonly driftFactor: number;
  readonly automaticExtensionThreshold: number;
}

const DEFAULTS: Settings = { retryCount: 10, retryDelay: 200, retryJitter: 100, driftFactor: 0.01, automaticExtensionThreshold: 500 };

/** The lock was not acquired, extended or released; `cause` says why. */
export class ExecutionError extends HoldfastError {
  override name = 'ExecutionError';
  readonly attempts: readonly Promise<never>[] = [];
  constructor(message: string, cause?: unknown) {
    super('EXECUTION', cause instanceof Error ? `${message}: ${cause.message}` : message, { cause });
  }
}

/** `error` is the reason of the signal. */
export type RedlockSignal = AbortSignal & { readonly error?: Error };

/** What a release resolves with, for programs that look at it. */
export interface ExecutionResult {
  readonly attempts: readonly Promise<never>[];
}

/** A lock of the facade. */
export class RedlockLock {
  readonly resources: readonly string[];
  /** The owner. */
  readonly value: string;
  /** Fencing token, which node-redlock has not. */
  readonly fence: number;
  readonly attempts: readonly Promise<never>[] = [];
  /** Until when the lock is certain, by the wall clock, ms; 0: released, or extended by another object. */
  expiration: number;
  readonly #redlock: Redlock;
  /** @internal */ readonly hold: Hold;

  /** @internal */
  constructor(redlock: Redlock, hold: Hold) {
    this.#redlock = redlock;
    this.hold = hold;
    this.resources = hold.names;
    this.value = hold.owner;
    this.fence = hold.fence;
    this.expiration = Date.now() + hold.remaining;
  }

  /** As {@link Redlock.release}. */
  release(): Promise<ExecutionResult> {
    return this.#redlock.release(this);
  }

  /** As {@link Redlock.extend}. */
  extend(duration: number): Promise<RedlockLock> {
    return this.#redlock.extend(this, duration);
  }
}

/**
 * What programs use of node-redlock 5, on Holdfast. One server or cluster, fair, and with a fencing token; not the Redlock algorithm. Durations are
 * whole ms. What fails rejects with an {@link ExecutionError}, which the event `error` tells, too.
 */
export class Redlock extends EventEmitter {
  readonly settings: Settings;
  readonly #holdfast: Holdfast;

  constructor(holdfast: Holdfast, settings: Partial<Settings> = {}) {
    super();
    this.#holdfast = holdfast;
    this.settings = { ...DEFAULTS, ...settings };
    this.on('error', () => {}); // As there: an error event without another listener does not end the process.
  }

  /** Acquires the lock for `duration`, without renewals. */
  acquire(resources: readonly string[], duration: number, settings?: Partial<Settings>): Promise<RedlockLock> {
    return this.#acquire(resources, duration, settings, false);
  }

  async release(lock: RedlockLock, _settings?: Partial<Settings>): Promise<ExecutionResult> {
    lock.expiration = 0;
    await this.#or('the lock was not released', lock.hold.release());
    return { attempts: [] };
  }

  /** Begins the lease anew. The lock that is returned replaces `existing`. */
  async extend(existing: RedlockLock, duration: number, _settings?: Partial<Settings>): Promise<RedlockLock> {
    integer(duration);
    if (existing.expiration < Date.now()) throw new ExecutionError('Cannot extend an already-expired lock.');
    await this.#or('the lock was not extended', existing.hold.renew(duration));
    existing.expiration = 0;
    return new RedlockLock(this, existing.hold);
  }

  /** Runs `routine` under a lock that is renewed until it ends. Its signal aborts with the loss of the lock. An error of the routine goes first. */
  async using<T>(
    resources: readonly string[],
    duration: number,
    settings: Partial<Settings>,
    routine: (signal: RedlockSignal) => Promise<T>,
  ): Promise<T>;
  async using<T>(resources: readonly string[], duration: number, routine: (signal: RedlockSignal) => Promise<T>): Promise<T>;
  async using<T>(
    resources: readonly string[],
    duration: number,
    settingsOrRoutine: Partial<Settings> | ((signal: RedlockSignal) => Promise<T>),
    routine?: (signal: RedlockSignal) => Promise<T>,
  ): Promise<T> {
    const [settings, work] = typeof settingsOrRoutine === 'function' ? [undefined, settingsOrRoutine] : [settingsOrRoutine, routine];
    if (!work) throw new TypeError('routine must be a function');
    const lock = await this.#acquire(resources, duration, settings, true);
    const { signal } = lock.hold;
    Object.defineProperty(signal, 'error', { get: () => signal.reason });
    let result: T;
    try {
      result = await work(signal);
    } catch (error) {
      await lock.release().catch(() => {});
      throw error;
    }
    await lock.release();
    return result;
  }

  /** Closes the client. */
  async quit(): Promise<void> {
    await this.#holdfast.close();
  }

  async #acquire(names: readonly string[], duration: number, more: Partial<Settings> | undefined, renew: boolean): Promise<RedlockLock> {
    integer(duration);
    const { retryCount, retryDelay, retryJitter } = { ...this.settings, ...more };
    const wait = retryCount < 0 ? undefined : retryCount * (retryDelay + retryJitter);
    const work = this.#holdfast.lockAll(names, { lease: duration, renew, wait });
    return new RedlockLock(this, await this.#or('the lock was not acquired', work));
  }

  async #or<T>(message: string, work: Promise<T>): Promise<T> {
    try {
      return await work;
    } catch (error) {
      if (!(error instanceof HoldfastError)) throw error;
      const failure = new ExecutionError(message, error);
      this.emit('error', failure);
      throw failure;
    }
  }
}

function integer(duration: number): void {
  if (!Number.isInteger(duration)) throw new Error('Duration must be an integer value in milliseconds.');
}
