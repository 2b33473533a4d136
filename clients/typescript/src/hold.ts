import type { Connection } from './driver.js';
import { HoldfastError, LockLostError, type LossReason, ServerError, UnavailableError } from './errors.js';
import type { Request } from './exchange.js';
import { OTHER, RELEASE } from './pool.js';
import { lockInfo } from './replies.js';
import type { Server } from './server.js';
import { Alarm, now, silence, wallOffset, whole } from './time.js';
import type { Line, Turns } from './turns.js';

/** The terms of a request. Times in ms. */
export interface Terms {
  readonly names: readonly string[];
  readonly keys: readonly string[];
  readonly lease: number;
  readonly renewed: boolean;
  readonly ephemeral: boolean;
  readonly replicas: number;
  /** `['SHARED']`, `['LIMIT', n]` or nothing. */
  readonly limit: readonly string[];
  /** How long to wait; 0: not at all; infinite: without a limit. */
  readonly wait: number;
  /** The owner, without its random part at the end. */
  readonly prefix: string;
  /** For how long the request has waited already, ms. */
  readonly waited: number;
  /** Goes to the server even while another wait of this client for the mutex is there. */
  readonly urgent: boolean;
  /** Does not keep the process alive. */
  readonly background: boolean;
}

/** Counts work under way. */
export interface Work {
  begin(): void;
  end(): void;
}

/** The events of a client, for metrics and logs. Times in ms. A listener does not run within the work that it is notified of. */
export interface HoldfastEvents {
  acquired: [event: { names: readonly string[]; fence: number; waited: number }];
  lost: [event: { names: readonly string[]; fence: number; reason: LossReason }];
  released: [event: { names: readonly string[]; fence: number; held: number }];
  /** An error of work in the background, for which no caller waits. */
  warning: [error: unknown];
}

/** What a hold needs of its acquisition. */
export interface Origin {
  readonly client: Client;
  readonly terms: Terms;
  readonly owner: string;
  /** A connection broke under a request of this owner. */
  broke: boolean;
  /** A request of this owner may be in the server's queue, or on its way there. */
  readonly mayBeQueued: boolean;
}

/** The holds that are due at the same moment. */
export interface Bucket {
  /** By the monotonic clock, whole ms. */
  readonly at: number;
  readonly holds: Set<Hold>;
  readonly alarm: Alarm;
}

/** Renews what a client holds. */
export interface Renewals {
  readonly holds: Set<Hold>;
  /** Sees to the hold when it is due. */
  add(hold: Hold): void;
  remove(hold: Hold): void;
  renewNow(hold: Hold): void;
  /** Sends one renewal for each, and sees to them again when that is due. Calls `done` then. */
  send(batch: readonly Hold[], done?: () => void): void;
}

/** What acquisitions and holds need of their client. */
export interface Client {
  readonly server: Server;
  readonly renewer: Renewals;
  /** The waits for each mutex, of which only the oldest one is at the server. */
  readonly turns: Turns;
  /** The waits that have no connection of their own. */
  readonly polls: Line;
  /** The acquisitions whose calls have not settled. */
  readonly acquisitions: Set<{ cancel(reason: unknown): void }>;
  /** Keeps the process alive. */
  readonly foreground: Work;
  /** `close()` waits for it. */
  readonly background: Work;
  tell<K extends keyof HoldfastEvents>(event: K, detail: HoldfastEvents[K][0]): void;
}

/** 1 % for clocks that run at different speeds. */
const CERTAIN = 0.99;
/** How often an ephemeral hold is renewed at least, ms. */
const EPHEMERAL_RENEWAL = 2000;
/** How long `release()` waits for a confirmation unless the caller says otherwise, ms. */
const RELEASE_TIMEOUT = 5000;
/** How many holders LOCK.INFO shows at most. */
const SHOWN = 5000;

/** A lock that is held, until {@link Hold.release} or a loss, which aborts {@link Hold.signal}. */
export class Hold {
  /** The names of the lock, one or several. */
  readonly names: readonly string[];
  /** The owner, as `info()` shows it: unique for each acquisition. */
  readonly owner: string;
  /** Fencing token: greater than that of every earlier holder. Let storage refuse writes with a smaller one. */
  readonly fence: number;
  /** @internal */ readonly terms: Terms;
  /** @internal The connection of an ephemeral hold. */ readonly connection: Connection | undefined;
  /** @internal When it was granted. */ heldSince = 0;
  /** @internal When to renew, or when the hold is over, by the monotonic clock. */ due = 0;
  /** @internal The holds that are due together with it. */ bucket: Bucket | undefined;
  /** @internal A renewal is under way. */ renewing = false;
  /** @internal Called when it was released or lost. */ ended: (() => void) | undefined;
  /** @internal Called before the end of the program or of the client releases it. */ retire: (() => void) | undefined;
  readonly #acquisition: Origin;
  readonly #client: Client;
  #lease: number;
  /** The last lease that the server accepted. */
  #accepted: number;
  /** The lease that the newest renewal asked for, and the {@link wallOffset} then. */
  #asked = 0;
  #offset: number;
  #certain = 0;
  /** The same by the wall clock, which goes on while the machine is suspended. */
  #certainWall = 0;
  #over: LockLostError | 'released' | undefined;
  /** The calls of `renew()` that have not settled. */
  #renewals: { resolve(): void; reject(error: unknown): void }[] = [];
  #released: Promise<void> | undefined;
  /** Settles the call of `release()`. */
  #answerRelease: ((error?: unknown) => void) | undefined;
  /** The release was sent. */
  #isSent = false;
  #controller: AbortController | undefined;

  /** @internal `since`: when the lease began at the earliest, by the monotonic clock; `offset`: the {@link wallOffset} when it was asked for. */
  constructor(acquisition: Origin, token: number, since: number, offset: number, connection: Connection | undefined) {
    const { client, terms, owner } = acquisition;
    this.#acquisition = acquisition;
    this.#client = client;
    this.terms = terms;
    this.names = terms.names;
    this.owner = owner;
    this.fence = token;
    this.connection = connection;
    this.#lease = this.#accepted = terms.lease;
    this.#offset = offset;
    this.#setCertain(since + this.#lease * CERTAIN);
    this.#plan(since);
    if (connection) connection.onClose = () => this.lose('disconnected');
  }

  /** @internal Starts to renew it, and to watch for its end. */
  begin(): void {
    this.heldSince = now();
    this.#client.renewer.holds.add(this);
    this.#client.renewer.add(this);
  }

  /** Aborts when the lock is lost; its reason is a {@link LockLostError}. A release does not abort it. */
  get signal(): AbortSignal {
    this.#controller ??= new AbortController();
    if (this.#over instanceof LockLostError) this.#controller.abort(this.#over);
    return this.#controller.signal;
  }

  /** Whether no other client can hold the lock, by this machine's clocks. Does not ask the server. */
  get isHeld(): boolean {
    if (this.remaining === 0) return false;
    if (Date.now() < this.#certainWall) return true;
    if (this.terms.renewed) this.#client.renewer.renewNow(this); // The machine was suspended, or its clock was set.
    return false;
  }

  /** For how long the lock is certainly held if it is not renewed again, ms; 0: it is not held. */
  get remaining(): number {
    return this.#over ? 0 : Math.max(0, this.#certain - now());
  }

  /** The lease, ms: how long the server holds the lock after a renewal. */
  get lease(): number {
    return this.#lease;
  }

  /**
   * Renews the lease, with this length from now on, ms. Repeats the request until the server has answered or the lock is
   * lost. Rejects with a {@link LockLostError} after a loss, with a {@link HoldfastError} of code `RELEASED` after a release, with
   * a `RangeError` if `lease` is out of range, and with a {@link ServerError} if the server refuses this length: the former one stays.
   */
  async renew(lease = this.#lease): Promise<void> {
    if (this.#over) throw this.#end();
    this.#lease = checkLease(lease);
    const renewed = new Promise<void>((resolve, reject) => {
      this.#renewals.push({ resolve, reject });
    });
    this.#client.renewer.renewNow(this);
    return keepAlive(this.#client, renewed);
  }

  /**
   * Asks the server whether the lock is held; does not renew the lease. False after a loss or a release. Rejects with an {@link UnavailableError}
   * if there is no answer within `timeout` ms, and with a {@link ServerError}; the state of the lock is unknown then. Rejects with a
   * `RangeError` if `timeout` is no number from 0.
   */
  async check(timeout = 5000): Promise<boolean> {
    checkTimeout(timeout);
    if (this.#over) return false;
    const end = now() + timeout;
    const asked = this.terms.keys.map(async (key) => {
      const request: Request = {
        target: key,
        priority: OTHER,
        lease: this.#lease,
        timeout: Math.min(1000, timeout),
        commands: () => [['LOCK.INFO', key, 'COUNT', String(SHOWN)]],
        end: () => end,
      };
      const reply = await this.#client.server.ask(request).catch((error) => {
        if (!isOverwritten(error)) throw error;
        this.lose('changed');
      });
      const holders = lockInfo(reply)?.holders ?? [];
      // The server may have more holders than it shows.
      return holders.length >= SHOWN || holders.some(({ owner, token }) => owner === this.owner && token === this.fence);
    });
    const held = (await keepAlive(this.#client, Promise.all(asked))).every(Boolean);
    if (!held) this.lose('gone');
    return this.isActive;
  }

  /** Runs `work` and releases. Rejects with the error of `work` if there is one, else as {@link Hold.release} does. */
  async run<T>(work: (signal: AbortSignal, hold: this) => T | PromiseLike<T>): Promise<T> {
    let result: T;
    try {
      result = await work(this.signal, this);
    } catch (error) {
      await this.release().catch(() => {});
      throw error;
    }
    await this.release();
    return result;
  }

  /**
   * Releases the lock. Rejects with a {@link LockLostError} if it was no longer held, with a {@link ServerError} if the server refuses, and
   * with an {@link UnavailableError} if it did not confirm within `timeout` ms (5,000); then the release goes on in the background until the
   * lease is over. Later calls have the outcome of the first one. Rejects with a `RangeError`, and does nothing, if `timeout` is no number from 0.
   */
  async release(options: { timeout?: number } = {}): Promise<void> {
    this.#released ??= this.#release(checkTimeout(options.timeout ?? RELEASE_TIMEOUT));
    return this.#released;
  }

  /** As {@link Hold.release}; does nothing if that was called already. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#released) await this.release();
  }

  /** @internal Neither released nor lost. */
  get isActive(): boolean {
    return this.#over === undefined;
  }

  /** @internal Whether it is to be renewed. */
  get isRenewed(): boolean {
    return this.terms.renewed || this.#renewals.length > 0;
  }

  /** @internal Until when the hold is certain, by the monotonic clock. */
  get certain(): number {
    return this.#certain;
  }

  /** @internal Whether at least half of its lease is certain, by both clocks: a grant with less does not count. */
  get counts(): boolean {
    const half = this.#lease / 2;
    return this.isActive && this.#certain - now() >= half && this.#certainWall - Date.now() >= half;
  }

  /** @internal The renewal to write now. A shorter lease counts at once, even if the reply is lost. */
  renewal(sent: number): string[] {
    const { keys, replicas } = this.terms;
    this.#asked = this.#lease;
    this.#offset = wallOffset(sent);
    const certain = sent + this.#asked * CERTAIN;
    if (certain < this.#certain) this.#setCertain(certain);
    const more = replicas ? ['REPLICAS', String(replicas)] : [];
    return command('RENEW', keys, this.owner, 'TOKEN', String(this.fence), 'LEASE', whole(this.#asked), ...more);
  }

  /** @internal Whether this is the reply to a renewal that succeeded, of one or several names. */
  isRenewal(reply: unknown): boolean {
    return answersEach(this.terms.keys, reply, (token) => token === this.fence);
  }

  /** @internal A connection broke under a request of this owner. */
  broke(): void {
    this.#acquisition.broke = true;
  }

  /** @internal Takes the reply to the renewal that was written at `sent`. Returns false if the renewal has to be repeated. */
  takeRenewal(reply: unknown, sent: number): boolean {
    if (!this.isActive) return true; // It came late.
    if (isOverwritten(reply)) this.lose('changed');
    else if (reply instanceof ServerError) {
      if (!reply.passing && this.#asked === this.#lease && this.#asked !== this.#accepted) {
        this.#lease = this.#accepted;
        for (const { reject } of this.#renewals.splice(0)) reject(reply);
      }
      return false;
    } else if (isMissing(reply)) this.lose('gone');
    else {
      this.#setCertain(Math.max(this.#certain, sent + this.#asked * CERTAIN));
      this.#accepted = this.#asked;
      if (this.#asked === this.#lease) {
        for (const { resolve } of this.#renewals.splice(0)) resolve();
        this.#plan(sent);
      } else this.due = now(); // `renew()` has changed the lease meanwhile.
    }
    return true;
  }

  /** @internal Ends a hold that is lost. */
  lose(reason: LossReason): void {
    if (!this.isActive) return;
    const wasHeld = this.#client.renewer.holds.has(this);
    this.#lost(new LockLostError(this.names, reason));
    // Of several names, the others may still be held. A stale request may be granted later.
    if (wasHeld && (this.#acquisition.mayBeQueued || this.names.length > 1)) this.#send();
    this.connection?.close();
  }

  /** @internal The commands that release. The reply to the first one decides. */
  releases(): string[][] {
    const release = command('RELEASE', this.terms.keys, this.owner, 'TOKEN', String(this.fence));
    return this.#acquisition.mayBeQueued ? [release, command('RELEASE', this.terms.keys, this.owner, 'ALL')] : [release];
  }

  #setCertain(certain: number): void {
    this.#certain = certain;
    this.#certainWall = certain + this.#offset; // The offset of the request: the machine may have been suspended since.
  }

  /**
   * Sets when to renew: at a quarter of the lease, rounded down to a 40th of it, so that renewals are sent together. The connection of an ephemeral
   * hold must not be idle for longer than a server's `timeout`, of at least 3 s.
   */
  #plan(since: number): void {
    const every = Math.min(this.#lease / 4, this.connection ? EPHEMERAL_RENEWAL : Number.POSITIVE_INFINITY);
    const grain = Math.max(1, every / 10);
    this.due = this.terms.renewed ? Math.floor((since + every) / grain) * grain : this.#certain;
  }

  #end(): HoldfastError {
    return this.#over instanceof LockLostError ? this.#over : new HoldfastError('RELEASED', `lock ${this.names} was released`);
  }

  #lost(error: LockLostError): void {
    const { renewer, tell } = this.#client;
    this.#over = error;
    if (renewer.holds.delete(this)) tell('lost', { names: this.names, fence: this.fence, reason: error.reason });
    this.#stopRenewals();
    this.#controller?.abort(error);
  }

  #stopRenewals(): void {
    this.ended?.();
    this.#client.renewer.remove(this);
    for (const { reject } of this.#renewals.splice(0)) reject(this.#end());
  }

  #release(timeout: number): Promise<void> {
    const loss = this.#over;
    this.#over ??= 'released';
    this.#stopRenewals();
    this.#send();
    if (loss instanceof LockLostError) return Promise.reject(loss);
    const { foreground } = this.#client;
    foreground.begin();
    return new Promise((resolve, reject) => {
      const late = (): void =>
        this.#answerRelease?.(
          new UnavailableError(`the release was not confirmed within ${timeout} ms; it goes on until the lease is over`, true),
        );
      const alarm = new Alarm(timeout, late);
      this.#answerRelease = (error): void => {
        this.#answerRelease = undefined;
        alarm.cancel();
        foreground.end();
        if (error) reject(error);
        else resolve();
      };
    });
  }

  /** Sends the release in the background, once. */
  #send(): void {
    if (this.#isSent) return;
    this.#isSent = true;
    const { server, background } = this.#client;
    const timeout = silence(this.#lease);
    const earliestEnd = now() + timeout;
    let wasCertain: boolean | undefined;
    let isRepetition = false;
    const request: Request = {
      target: this.terms.keys[0] as string,
      priority: RELEASE,
      lease: this.#lease,
      timeout,
      own: this.connection,
      commands: (sent) => {
        wasCertain ??= sent < this.#certain;
        return this.releases();
      },
      isReply: (reply) => isRelease(this.terms.keys, reply),
      end: () => Math.max(this.#certain, earliestEnd),
      broke: () => {
        this.broke();
        isRepetition = true;
      },
    };
    background.begin();
    server.request(request, (reply) => {
      this.#takeRelease(reply, isRepetition && wasCertain === true);
      this.connection?.close();
      background.end();
    });
  }

  /** `mayBeMissing`: nil means released, because the reply to an earlier request was lost. */
  #takeRelease(reply: unknown, mayBeMissing: boolean): void {
    const { renewer, tell } = this.#client;
    const isGone = isMissing(reply) || isOverwritten(reply);
    // The server releases an ephemeral hold with its connection.
    const isReleased = isGone ? mayBeMissing : !(reply instanceof Error) || (this.connection && reply instanceof UnavailableError);
    if (isGone && !isReleased && this.#over === 'released')
      this.#lost(new LockLostError(this.names, isMissing(reply) ? 'gone' : 'changed'));
    const wasHeld = renewer.holds.delete(this);
    if (wasHeld && isReleased) tell('released', { names: this.names, fence: this.fence, held: now() - this.heldSince });
    this.#answerRelease?.(isReleased ? undefined : isGone ? this.#over : reply);
  }
}

/** Keeps the process alive until the work is done. */
export function keepAlive<T>({ foreground }: Client, work: Promise<T>): Promise<T> {
  foreground.begin();
  return work.finally(() => foreground.end());
}

/** Whether a reply has one element for each key, each nil or one that `confirms`. For one key it is that element. */
function answersEach(keys: readonly string[], reply: unknown, confirms: (element: unknown) => boolean): boolean {
  const elements = keys.length === 1 ? [reply] : reply;
  return Array.isArray(elements) && elements.length === keys.length && elements.every((element) => element === null || confirms(element));
}

/** Whether this is a reply to LOCK.RELEASE or LOCK.MRELEASE. */
export const isRelease = (keys: readonly string[], reply: unknown): boolean =>
  answersEach(keys, reply, (element) => typeof element === 'number');

/** Nil, or nil for one of several names. */
const isMissing = (reply: unknown): boolean => reply === null || (Array.isArray(reply) && reply.includes(null));

/** The key holds something that is not a lock. */
const isOverwritten = (reply: unknown): boolean => reply instanceof ServerError && reply.code === 'WRONGTYPE';

/** `LOCK.VERB key owner …`, or `LOCK.MVERB n key… owner …`. */
export function command(verb: string, keys: readonly string[], owner: string, ...rest: string[]): string[] {
  const [key = ''] = keys;
  return keys.length === 1 ? [`LOCK.${verb}`, key, owner, ...rest] : [`LOCK.M${verb}`, String(keys.length), ...keys, owner, ...rest];
}

/** The longest lease that the server accepts, ms: ten years. */
export const LONGEST_LEASE = 315_360_000_000;

/** Throws a `RangeError` unless the value is a number in this range. */
export function checkRange(what: string, value: number, least: number, most: number): number {
  if (typeof value === 'number' && value >= least && value <= most) return value;
  throw new RangeError(`${what} must be a number from ${least} to ${most}, got ${String(value)}`);
}

/** Throws a `RangeError` unless the value is a whole number that the server takes, and at least `least`. */
export function checkCount(what: string, value: number, least: number): number {
  if (Number.isInteger(checkRange(what, value, least, 2 ** 31 - 1))) return value;
  throw new RangeError(`${what} must be a whole number, got ${value}`);
}

/** Throws a `RangeError` unless the value is a lease, ms. */
export const checkLease = (value: number): number => checkRange('lease', value, 1, LONGEST_LEASE);

const checkTimeout = (value: number): number => checkRange('timeout', value, 0, Number.POSITIVE_INFINITY);

/** Throws a `TypeError` unless the value is a function or undefined. */
export function checkFunction(what: string, value: unknown): void {
  if (value !== undefined && typeof value !== 'function') throw new TypeError(`${what} must be a function, got ${String(value)}`);
}
