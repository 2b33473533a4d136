import type { Connection } from './driver.js';
import { LockLostError, type LossReason, ServerError, UnavailableError } from './errors.js';
import { RELEASE, RENEW } from './pool.js';
import { lockInfo } from './replies.js';
import type { Server } from './server.js';
import { now, silence, whole } from './time.js';

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
  /** What stands before the random part of the owner. */
  readonly prefix: string;
  /** For how long the request has waited already. */
  readonly waited: number;
  /** Goes to the server even if another wait of this client for the mutex is there. */
  readonly urgent: boolean;
}

/** What a hold needs of its client. */
export interface Keeper {
  readonly server: Server;
  /** Renews the hold when its time comes, or finds that its time is over. */
  schedule(hold: Hold): void;
  unschedule(hold: Hold): void;
  /** Renews now; resolves when the outcome is known, at the latest when the hold is lost. */
  renewNow(hold: Hold): Promise<void>;
  lost(hold: Hold, error: LockLostError): void;
  released(hold: Hold): void;
  foreground<T>(work: Promise<T>): Promise<T>;
}

/** 1 % for clocks that run at different speeds. */
const CERTAIN = 0.99;
/** How long `release()` waits for a confirmation unless the caller says otherwise, ms. */
const RELEASE_TIMEOUT = 5000;

/** A lock that is held. Ends by {@link Hold.release}, or by a loss, of which {@link Hold.signal} tells. */
export class Hold {
  readonly names: readonly string[];
  readonly owner: string;
  /** Fencing token: greater than that of every earlier holder. Let storage refuse writes with a smaller one. */
  readonly fence: number;
  /** @internal */ readonly terms: Terms;
  /** @internal That of an ephemeral hold. */ readonly connection: Connection | undefined;
  /** @internal When to renew, or when the hold is over, by the monotonic clock. */ due = 0;
  /** @internal A stale request of this acquisition may be in the server's queue. */ stale = false;
  /** @internal The renewal under way. */ renewal: Promise<void> | undefined;
  readonly #keeper: Keeper;
  #lease: number;
  #certain = 0;
  /** The same by the wall clock, which goes on while the machine is suspended. */
  #certainWall = 0;
  #over: LockLostError | 'releasing' | undefined;
  #released: Promise<void> | undefined;
  #controller: AbortController | undefined;

  /** @internal `since`: when the lease began at the earliest, by the monotonic clock. */
  constructor(keeper: Keeper, terms: Terms, owner: string, token: number, since: number, connection: Connection | undefined) {
    this.#keeper = keeper;
    this.terms = terms;
    this.names = terms.names;
    this.owner = owner;
    this.fence = token;
    this.connection = connection;
    this.#lease = terms.lease;
    this.#extend(since);
    if (connection) connection.onClose = () => this.lose('disconnected');
  }

  /** Aborts when the lock is lost; its reason is a {@link LockLostError}. A release does not abort it. */
  get signal(): AbortSignal {
    this.#controller ??= new AbortController();
    if (this.#over instanceof LockLostError) this.#controller.abort(this.#over);
    return this.#controller.signal;
  }

  /** Whether no other client can hold the lock, as far as this process knows. Asks nobody. */
  get isHeld(): boolean {
    if (this.#over || now() >= this.#certain) return false;
    if (Date.now() < this.#certainWall) return true;
    if (this.terms.renewed) void this.#keeper.renewNow(this); // The machine was suspended, or its clock was set.
    return false;
  }

  /** For how long the lock is certainly held without a renewal, ms; 0: it is not. */
  get remaining(): number {
    return this.#over ? 0 : Math.max(0, this.#certain - now());
  }

  /** The lease, ms. */
  get lease(): number {
    return this.#lease;
  }

  /** Begins the lease anew, with another length if given; the server's answer decides. Rejects with a {@link LockLostError} after a loss. */
  async renew(lease?: number): Promise<void> {
    await this.renewal;
    if (lease !== undefined) this.#lease = lease;
    if (!this.#over) await this.#keeper.foreground(this.#keeper.renewNow(this));
    if (this.#over instanceof LockLostError) throw this.#over;
    if (this.#over) throw new LockLostError(this.names, 'gone');
  }

  /** Asks the server whether the lock is held; lengthens nothing. After a loss it is false. */
  async check(timeout = 5000): Promise<boolean> {
    if (this.#over) return false;
    const asked = this.terms.keys.map(async (key) => {
      const info = lockInfo(await this.#keeper.server.request(key, ['LOCK.INFO', key, 'COUNT', '5000'], timeout, true));
      return info?.holders.some((holder) => holder.owner === this.owner && holder.token === this.fence) ?? false;
    });
    const held = (await this.#keeper.foreground(Promise.all(asked))).every(Boolean);
    if (!held && this.isActive) this.lose('gone');
    return held && this.isActive;
  }

  /** Runs `work` and releases. An error of `work` goes first; otherwise a loss rejects with a {@link LockLostError}. */
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
   * Releases the lock. Rejects with a {@link LockLostError} if it was not held any more, and with an {@link UnavailableError} if the
   * server did not confirm within `timeout` ms; then it goes on in the background until the lease is over. Safe to call again.
   */
  release(options: { timeout?: number } = {}): Promise<void> {
    this.#released ??= this.#keeper.foreground(this.#release(options.timeout ?? RELEASE_TIMEOUT));
    return this.#released;
  }

  /** As {@link Hold.release}; does nothing if that was called already. */
  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#released) await this.release();
  }

  /** @internal */
  get isActive(): boolean {
    return this.#over === undefined;
  }

  /** @internal Until when the hold is certain, by the monotonic clock. */
  get certain(): number {
    return this.#certain;
  }

  /** @internal */
  renewCommand(): string[] {
    const { replicas } = this.terms;
    return this.#command(
      'RENEW',
      'TOKEN',
      String(this.fence),
      'LEASE',
      whole(this.#lease),
      ...(replicas ? ['REPLICAS', String(replicas)] : []),
    );
  }

  /** @internal Takes the reply to a RENEW that was sent at `sent`; returns whether to ask again. */
  renewed(reply: unknown, sent: number): boolean {
    if (this.#over) return false; // It came late.
    if (reply instanceof ServerError) {
      if (reply.code !== 'WRONGTYPE') return true;
      this.lose('changed');
    } else if (reply === null || (Array.isArray(reply) && reply.includes(null))) this.lose('gone');
    else {
      this.#extend(sent);
      this.renewal = undefined; // Others of the same pipeline may be asked for again.
      this.#keeper.schedule(this);
    }
    return false;
  }

  /** @internal */
  lose(reason: LossReason): void {
    if (this.#over) return;
    this.#over = new LockLostError(this.names, reason);
    this.#keeper.unschedule(this);
    this.#keeper.lost(this, this.#over);
    this.#controller?.abort(this.#over);
  }

  /** @internal The commands that release; the reply to the first one is the verdict. */
  releaseCommands(): string[][] {
    const release = this.#command('RELEASE', 'TOKEN', String(this.fence));
    return this.stale ? [release, this.#command('RELEASE', 'ALL')] : [release];
  }

  #command(verb: string, ...rest: string[]): string[] {
    return command(verb, this.terms.keys, this.owner, ...rest);
  }

  #extend(since: number): void {
    const length = this.#lease * CERTAIN;
    this.#certain = since + length;
    this.#certainWall = Date.now() - (now() - since) + length;
    this.due = this.terms.renewed ? since + this.#lease / 4 : this.#certain;
  }

  #release(timeout: number): Promise<void> {
    const loss = this.#over;
    this.#over ??= 'releasing';
    this.#keeper.unschedule(this);
    const work = this.#sendRelease();
    return new Promise((resolve, reject) => {
      const { alarms } = this.#keeper.server;
      const late = `the release was not confirmed within ${timeout} ms; it goes on until the lease is over`;
      const alarm = alarms.later(timeout, () => reject(new UnavailableError(late, true)));
      const settle = (error?: unknown): void => {
        alarms.cancel(alarm);
        if (error) reject(error);
        else resolve();
      };
      if (loss instanceof LockLostError) settle(loss);
      work.then(() => settle(), settle);
    });
  }

  async #sendRelease(): Promise<void> {
    const { server } = this.#keeper;
    const [key] = this.terms.keys as [string];
    let first = true;
    let certainAtFirst = false;
    let failure: unknown;
    try {
      do {
        const at = now();
        try {
          const { replies } = await server.exchange(key, () => this.releaseCommands(), {
            priority: RELEASE,
            lease: this.#lease,
            timeout: silence(this.#lease),
            connection: this.connection,
          });
          const [reply] = replies;
          const overwritten = reply instanceof ServerError && reply.code === 'WRONGTYPE';
          if (overwritten || !(reply instanceof ServerError)) {
            const missing = overwritten || reply === null || (Array.isArray(reply) && reply.includes(null));
            if (missing && (first || !certainAtFirst)) throw new LockLostError(this.names, overwritten ? 'changed' : 'gone');
            return this.#keeper.released(this);
          }
          if (!reply.passing) throw reply;
          failure = reply;
          await server.pool(key).pause();
        } catch (error) {
          if (!(error instanceof UnavailableError)) throw error;
          failure = error;
          if (error.sent) {
            if (first) certainAtFirst = at < this.#certain;
            first = false;
            this.stale = true;
          }
          if (this.connection) return this.#keeper.released(this); // The server releases it with the connection.
        }
      } while (now() < this.#certain);
      throw failure;
    } catch (error) {
      if (error instanceof LockLostError && !(this.#over instanceof LockLostError)) {
        this.#over = error;
        this.#keeper.lost(this, error);
        this.#controller?.abort(error);
      }
      throw error;
    } finally {
      this.connection?.close();
    }
  }
}

/** `LOCK.VERB key owner …`, or `LOCK.MVERB n key… owner …`. */
export function command(verb: string, keys: readonly string[], owner: string, ...rest: string[]): string[] {
  return keys.length === 1 ? [`LOCK.${verb}`, ...keys, owner, ...rest] : [`LOCK.M${verb}`, String(keys.length), ...keys, owner, ...rest];
}

/** Renews holds when their time comes. */
export class Renewer {
  readonly #server: Server;
  /** The holds of each moment in which something is due. */
  readonly #buckets = new Map<number, Set<Hold>>();
  readonly #places = new Map<Hold, Set<Hold>>();

  constructor(server: Server) {
    this.#server = server;
  }

  add(hold: Hold): void {
    this.remove(hold);
    // Renewals of one 40th of the lease go together, none later than it is due.
    const grain = hold.terms.renewed ? Math.max(1, hold.lease / 40) : 1;
    const at = hold.terms.renewed ? Math.floor(hold.due / grain) * grain : Math.ceil(hold.due);
    let bucket = this.#buckets.get(at);
    if (!bucket) {
      bucket = new Set();
      this.#buckets.set(at, bucket);
      this.#server.alarms.later(at - now(), () => this.#fire(at));
    }
    bucket.add(hold);
    this.#places.set(hold, bucket);
  }

  remove(hold: Hold): void {
    this.#places.get(hold)?.delete(hold);
    this.#places.delete(hold);
  }

  /** Renews until each is renewed or lost. Rejects never. */
  async renew(holds: readonly Hold[]): Promise<void> {
    let batch = holds;
    for (;;) {
      const at = now();
      batch = batch.filter((hold) => hold.isActive && (at < hold.certain || hold.lose('expired')));
      if (batch.length === 0) return;
      batch = await this.once(batch);
    }
  }

  /** Sends one RENEW for each; resolves with those that are to be asked for again. */
  async once(batch: readonly Hold[]): Promise<Hold[]> {
    const [head] = batch as [Hold];
    const [key] = head.terms.keys as [string];
    const pool = this.#server.pool(key);
    const lease = Math.min(...batch.map((hold) => hold.lease));
    const extra = batch.some((hold) => hold.terms.replicas) ? pool.replicasTimeout : 0;
    const left = Math.min(...batch.map((hold) => hold.certain)) - now();
    const timeout = Math.max(1, Math.min(silence(lease) + extra, left));
    try {
      const { replies, sent } = await this.#server.exchange(key, () => batch.map((hold) => hold.renewCommand()), {
        priority: RENEW,
        lease,
        timeout,
        connection: head.connection,
      });
      const again = batch.filter((hold, i) => hold.renewed(replies[i], sent));
      if (again.length > 0) await Promise.race([pool.pause(), this.#server.alarms.sleep(left)]);
      return again;
    } catch (error) {
      if (error instanceof UnavailableError) {
        if (error.sent) for (const hold of batch) hold.stale = true;
      } else await Promise.race([pool.pause(), this.#server.alarms.sleep(left)]);
      return [...batch];
    }
  }

  #fire(at: number): void {
    const due = this.#buckets.get(at) ?? new Set();
    this.#buckets.delete(at);
    const groups = new Map<unknown, Hold[][]>();
    for (const hold of due) {
      this.#places.delete(hold);
      if (!hold.terms.renewed) {
        if (now() < hold.certain) this.add(hold);
        else hold.lose('expired');
        continue;
      }
      if (hold.renewal) continue;
      const target = hold.connection ?? this.#server.pool(hold.terms.keys[0] as string);
      const batches = groups.get(target) ?? [];
      groups.set(target, batches);
      const last = batches.at(-1);
      if (last && last.length < PIPELINE) last.push(hold);
      else batches.push([hold]);
    }
    for (const batches of groups.values()) for (const batch of batches) void this.start(batch);
  }

  /** Renews, and notes it at the holds. */
  start(batch: readonly Hold[]): Promise<void> {
    const work = this.renew(batch).finally(() => {
      for (const hold of batch) if (hold.renewal === work) hold.renewal = undefined;
    });
    for (const hold of batch) hold.renewal = work;
    return work;
  }
}

/** How many renewals go together at most. */
const PIPELINE = 256;
