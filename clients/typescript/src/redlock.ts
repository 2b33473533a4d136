import { EventEmitter } from 'node:events';
import { HoldfastError, LockLostError } from './errors.js';
import type { Hold } from './hold.js';
import type { Holdfast } from './holdfast.js';

/** Settings of node-redlock. `driftFactor` and `automaticExtensionThreshold` are accepted and have no effect: a hold is certain for 99 % of its lease, and renewed at each quarter. */
export interface Settings {
  /** How often a refused acquisition was to be repeated; here it waits in the queue for as long as that would have taken. Negative: without a limit. */
  readonly retryCount: number;
  readonly retryDelay: number;
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

export type RedlockSignal = AbortSignal & { readonly error?: Error };

/** A lock of the facade. */
export class RedlockLock {
  readonly resources: readonly string[];
  /** The owner. */
  readonly value: string;
  /** Fencing token, which node-redlock has not. */
  readonly fence: number;
  readonly attempts: readonly Promise<never>[] = [];
  /** Until when the lock is certain, by the wall clock; 0: released, or extended by another object. */
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

  release(): Promise<{ attempts: readonly Promise<never>[] }> {
    return this.#redlock.release(this);
  }

  extend(duration: number): Promise<RedlockLock> {
    return this.#redlock.extend(this, duration);
  }
}

/** What programs use of node-redlock 5, on Holdfast. One server or cluster, fair, and with a fencing token; not the Redlock algorithm. */
export class Redlock extends EventEmitter {
  readonly settings: Settings;
  readonly #holdfast: Holdfast;

  constructor(holdfast: Holdfast, settings: Partial<Settings> = {}) {
    super();
    this.#holdfast = holdfast;
    this.settings = { ...DEFAULTS, ...settings };
    this.on('error', () => {}); // As there: an error event without another listener does not end the process.
  }

  async acquire(resources: readonly string[], duration: number, settings?: Partial<Settings>): Promise<RedlockLock> {
    return this.#acquire(resources, duration, settings, false);
  }

  async release(lock: RedlockLock, _settings?: Partial<Settings>): Promise<{ attempts: readonly Promise<never>[] }> {
    lock.expiration = 0;
    await this.#or('the lock was not released', lock.hold.release());
    return { attempts: [] };
  }

  /** Begins the lease anew. The lock that is returned replaces `existing`. */
  async extend(existing: RedlockLock, duration: number, _settings?: Partial<Settings>): Promise<RedlockLock> {
    if (existing.expiration < Date.now()) throw new ExecutionError('Cannot extend an already-expired lock.');
    integer(duration);
    await this.#or('the lock was not extended', existing.hold.renew(duration));
    existing.expiration = 0;
    return new RedlockLock(this, existing.hold);
  }

  /** Runs `routine` under a lock that is extended until it ends. Its signal aborts with the loss of the lock. */
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
    const { hold } = await this.#acquire(resources, duration, settings, true);
    const signal: AbortSignal & { error?: Error } = hold.signal;
    signal.addEventListener('abort', () => {
      signal.error = signal.reason;
    });
    return this.#or(
      'the lock was lost',
      hold.run(() => work(signal)),
      LockLostError,
    );
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

  async #or<T>(message: string, work: Promise<T>, kind: typeof HoldfastError | typeof LockLostError = HoldfastError): Promise<T> {
    try {
      return await work;
    } catch (error) {
      if (!(error instanceof kind)) throw error;
      const wrapped = new ExecutionError(message, error);
      this.emit('error', wrapped);
      throw wrapped;
    }
  }
}

function integer(duration: number): void {
  if (!Number.isInteger(duration)) throw new Error('Duration must be an integer value in milliseconds.');
}
