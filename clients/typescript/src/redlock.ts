import { EventEmitter } from 'node:events';
import { HoldfastError, LockLostError, NotAcquiredError } from './errors.js';
import { type Hold, LONGEST_LEASE } from './hold.js';
import type { Holdfast } from './holdfast.js';

/** Settings of node-redlock. `driftFactor` and `automaticExtensionThreshold` are accepted and have no effect: a hold is certain for 99 % of its lease, and renewed at each quarter. */
export interface Settings {
  /** How often node-redlock repeats a refused acquisition. Here, it waits in the queue for as long as that would take. Negative or infinite: without a limit. */
  readonly retryCount: number;
  /** The time between two of these repetitions, ms. */
  readonly retryDelay: number;
  /** The random part of that time, ms. */
  readonly retryJitter: number;
  readonly driftFactor: number;
  readonly automaticExtensionThreshold: number;
}

const DEFAULTS: Settings = { retryCount: 10, retryDelay: 200, retryJitter: 100, driftFactor: 0.01, automaticExtensionThreshold: 500 };

/** The vote of the only server. */
export interface ExecutionStats {
  readonly membershipSize: number;
  readonly quorumSize: number;
  readonly votesFor: ReadonlySet<Holdfast>;
  readonly votesAgainst: ReadonlyMap<Holdfast, Error>;
}

/** The attempts, of which there is one. */
export interface ExecutionResult {
  readonly attempts: readonly Promise<ExecutionStats>[];
}

/** Another owner holds the lock, or this one no longer does. The event `error` carries it, so that listeners can ignore it. */
export class ResourceLockedError extends HoldfastError {
  override name = 'ResourceLockedError';
  constructor(cause: Error) {
    super('RESOURCE_LOCKED', cause.message, { cause });
  }
}

/** The lock was not acquired, extended or released, or it was lost; `cause` is the reason. */
export class ExecutionError extends HoldfastError implements ExecutionResult {
  override name = 'ExecutionError';
  readonly attempts: readonly Promise<ExecutionStats>[];
  constructor(message: string, attempts: readonly Promise<ExecutionStats>[] = [], cause?: unknown) {
    super('EXECUTION', cause instanceof Error ? `${message}: ${cause.message}` : message, { cause });
    this.attempts = attempts;
  }
}

/** `error` is an {@link ExecutionError} once the signal has aborted. */
export type RedlockAbortSignal = AbortSignal & { readonly error?: Error };

/** A lock that is held. */
export class Lock implements ExecutionResult {
  readonly redlock: Redlock;
  readonly resources: string[];
  /** The owner. */
  readonly value: string;
  /** The fencing token, which node-redlock does not have. */
  readonly fence: number;
  readonly attempts: readonly Promise<ExecutionStats>[];
  /** Until when the lock is certain, by the wall clock, ms; 0: released, or extended by another object. */
  expiration: number;
  /** @internal */ readonly hold: Hold;

  /** @internal */
  constructor(redlock: Redlock, hold: Hold, attempts: readonly Promise<ExecutionStats>[]) {
    this.redlock = redlock;
    this.hold = hold;
    this.resources = [...hold.names];
    this.value = hold.owner;
    this.fence = hold.fence;
    this.attempts = attempts;
    this.expiration = Math.floor(Date.now() + hold.remaining);
  }

  /** As {@link Redlock.release}. */
  release(): Promise<ExecutionResult> {
    return this.redlock.release(this);
  }

  /** As {@link Redlock.extend}. */
  extend(duration: number): Promise<Lock> {
    return this.redlock.extend(this, duration);
  }
}

/**
 * The interface of node-redlock 5 to Holdfast: `new Redlock(holdfast)` instead of `new Redlock([redis])`. One server or cluster, fair, and with a
 * fencing token; not the Redlock algorithm. Durations are whole ms, and ten years at most. A failed call rejects with an {@link ExecutionError},
 * and the event `error` carries the cause. Unlike node-redlock:
 *
 * - an acquisition waits at the server: it counts as one attempt, and the event reports a lock that is held only once, when the time is over;
 * - an extension or a release is repeated until the server has answered, not `retryCount` times;
 * - releasing again resolves; `using` takes any duration, and rejects with the routine's error even if the release fails, too;
 * - an acquisition rejects if a resource is named twice, and with a `RangeError` for a duration below 1 ms or no resource;
 * - a program can't construct a `Lock`, such as to release that of another process, and there is no `clients`.
 */
export class Redlock extends EventEmitter {
  readonly settings: Settings;
  readonly #holdfast: Holdfast;

  constructor(holdfast: Holdfast, settings: Partial<Settings> = {}) {
    super();
    this.#holdfast = holdfast;
    this.settings = { ...DEFAULTS, ...given(settings) };
    this.on('error', () => {}); // As in node-redlock, an error event without another listener does not end the process.
  }

  /** Acquires the lock for `duration`, without renewals. */
  acquire(resources: readonly string[], duration: number, settings?: Partial<Settings>): Promise<Lock> {
    return this.#acquire(resources, duration, settings, false);
  }

  async release(lock: Lock, _settings?: Partial<Settings>): Promise<ExecutionResult> {
    lock.expiration = 0;
    await this.#or('the lock was not released', lock.hold.release());
    return { attempts: this.#vote() };
  }

  /** Renews the lease, with this duration. The returned lock replaces `existing`. */
  async extend(existing: Lock, duration: number, _settings?: Partial<Settings>): Promise<Lock> {
    const lease = whole(duration);
    if (existing.expiration < Date.now()) throw new ExecutionError('Cannot extend an already-expired lock.');
    await this.#or('the lock was not extended', existing.hold.renew(lease));
    existing.expiration = 0;
    return new Lock(this, existing.hold, this.#vote());
  }

  /** Runs `routine` under a lock that is renewed until it ends. Its signal aborts when the lock is lost. Rejects with the error of the routine if there is one. */
  async using<T>(
    resources: readonly string[],
    duration: number,
    settings: Partial<Settings> | undefined,
    routine: (signal: RedlockAbortSignal) => Promise<T>,
  ): Promise<T>;
  async using<T>(resources: readonly string[], duration: number, routine: (signal: RedlockAbortSignal) => Promise<T>): Promise<T>;
  async using<T>(
    resources: readonly string[],
    duration: number,
    settingsOrRoutine: Partial<Settings> | undefined | ((signal: RedlockAbortSignal) => Promise<T>),
    routine?: (signal: RedlockAbortSignal) => Promise<T>,
  ): Promise<T> {
    const [settings, work] = typeof settingsOrRoutine === 'function' ? [undefined, settingsOrRoutine] : [settingsOrRoutine, routine];
    if (typeof work !== 'function') throw new TypeError('routine must be a function');
    const lock = await this.#acquire(resources, duration, settings, true);
    const { signal } = lock.hold;
    let loss: Error | undefined;
    const error = (): Error | undefined => {
      if (signal.aborted) loss ??= new ExecutionError('the lock was lost', this.#vote(signal.reason), signal.reason);
      return loss;
    };
    let result: T;
    try {
      result = await work(Object.defineProperty(signal, 'error', { get: error }));
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

  async #acquire(names: readonly string[], duration: number, more: Partial<Settings> | undefined, renew: boolean): Promise<Lock> {
    const lease = whole(duration);
    const { retryCount, retryDelay, retryJitter } = { ...this.settings, ...given(more) };
    const wait = retryCount < 0 || retryCount === Number.POSITIVE_INFINITY ? undefined : retryCount * (retryDelay + retryJitter);
    const hold = await this.#or('the lock was not acquired', this.#holdfast.lockAll(names, { lease, renew, wait }));
    return new Lock(this, hold, this.#vote());
  }

  async #or<T>(message: string, work: Promise<T>): Promise<T> {
    try {
      return await work;
    } catch (error) {
      if (!(error instanceof HoldfastError)) throw error;
      const isLocked = error instanceof LockLostError || (error instanceof NotAcquiredError && !error.cause);
      const vote = isLocked ? new ResourceLockedError(error) : error;
      this.emit('error', vote);
      throw new ExecutionError(message, this.#vote(vote), error);
    }
  }

  #vote(error?: Error): Promise<ExecutionStats>[] {
    const votesFor = new Set(error ? [] : [this.#holdfast]);
    return [Promise.resolve({ membershipSize: 1, quorumSize: 1, votesFor, votesAgainst: new Map(error && [[this.#holdfast, error]]) })];
  }
}

export default Redlock;

/** The settings that are numbers: as node-redlock does, all others are ignored. */
const given = (settings?: Partial<Settings> | null): Partial<Settings> =>
  Object.fromEntries(Object.entries(settings ?? {}).filter(([, value]) => typeof value === 'number'));

function whole(duration: number): number {
  if (!Number.isInteger(duration)) throw new Error('Duration must be an integer value in milliseconds.');
  return Math.min(duration, LONGEST_LEASE);
}
