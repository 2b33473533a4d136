import { AsyncResource } from 'node:async_hooks';
import { randomUUID } from 'node:crypto';
import type { Acquisition } from './acquisition.js';
import { LockLostError, NotAcquiredError, ServerError } from './errors.js';
import type { Hold } from './hold.js';
import type { Holdfast } from './holdfast.js';
import type { LockInfo, Waiter } from './replies.js';
import { onAbort } from './signals.js';

export type LockMode = 'exclusive' | 'shared';
/** The options of a request, as the Web Locks specification has them. */
export interface LockRequestOptions {
  /** Default `exclusive`. */
  mode?: LockMode | undefined;
  /** Calls the callback with null if the lock is not free now. */
  ifAvailable?: boolean | undefined;
  /** Takes the lock from its holders; their requests reject with an `AbortError`. */
  steal?: boolean | undefined;
  /** Gives up waiting when it aborts; the request rejects with its reason. */
  signal?: AbortSignal | undefined;
}
/** A lock that is held or waited for. */
export interface LockRecord {
  readonly name: string;
  readonly mode: LockMode;
  /** The manager whose request it is. */
  readonly clientId: string;
}
/** The result of {@link LockManager.query}. */
export interface LockManagerSnapshot {
  readonly held: LockRecord[];
  readonly pending: LockRecord[];
}

/** The argument of a request's callback. */
export class WebLock {
  readonly #name: string;
  readonly #mode: LockMode;
  /** @internal */
  constructor(name: string, mode: LockMode) {
    this.#name = name;
    this.#mode = mode;
  }
  get name(): string {
    return this.#name;
  }
  get mode(): LockMode {
    return this.#mode;
  }
  get [Symbol.toStringTag](): string {
    return 'Lock';
  }
}

type Callback<L, T> = (lock: L) => T | PromiseLike<T>;

/** A request of this manager. */
interface Request {
  readonly name: string;
  readonly mode: LockMode;
  readonly ifAvailable: boolean;
  readonly steal: boolean;
  readonly since: number;
  /** `trying`: the manager is asking whether it can be granted; `waiting`: it can't yet. */
  state: 'queued' | 'trying' | 'waiting' | 'held' | 'over';
  hold?: Hold;
  /** Its acquisition, from when the server is asked. */
  acquisition?: Acquisition;
  /** Called when it is known whether it can be granted. */
  decided(): void;
  grant(hold: Hold | null): void;
  reject(reason: unknown): void;
}

const stolen = (cause?: unknown): DOMException => Object.assign(new DOMException('The lock was stolen or lost', 'AbortError'), { cause });

/** How long a request that steals claims to have waited, ms: that puts it at the head of the queue. */
const A_DAY = 86_400_000;

/** How many requests of a manager wait at the server besides the oldest one for each name: each needs a connection. */
const MOST_BEHIND = 8;

/**
 * `navigator.locks` between processes: the Web Locks specification, on Holdfast. Managers with the same `prefix` share their locks. The holder of a stolen
 * lock notices when it renews, within a quarter of the lease, or at once in the same manager. A lock that was lost counts as stolen. The oldest request
 * of a manager for each name waits at the server, and eight more do. Other managers do not see the rest, and their later requests may be granted earlier:
 * so may they if more requests wait than `maxConnections` lets wait at the server.
 */
export class LockManager {
  readonly #holdfast: Holdfast;
  readonly #prefix: string;
  readonly #lease: number;
  readonly #clientId = randomUUID();
  readonly #requests = new Map<string, Request[]>();
  #changed: (() => void)[] = [];
  /** Resolves when all requests made until now are decided. */
  #decided = Promise.resolve();
  /** How many requests wait at the server, or are about to, behind others of this manager. */
  #behind = 0;

  /** `lease`, ms: how long a killed process blocks others at most; default 5,000. `prefix`: of all names; default `web-locks:`. */
  constructor(holdfast: Holdfast, options: { prefix?: string; lease?: number } = {}) {
    this.#holdfast = holdfast;
    this.#prefix = options.prefix ?? 'web-locks:';
    this.#lease = options.lease ?? 5000;
  }

  get [Symbol.toStringTag](): string {
    return 'LockManager';
  }

  /**
   * Calls `callback` under the lock, and settles as it does, once the lock was released. Rejects with a `TypeError` or a `NotSupportedError` if
   * an argument is invalid, with an `AbortError` if the lock was stolen or lost, with the signal's reason, and with the errors of
   * `Holdfast.lock`.
   */
  request<T>(name: string, callback: Callback<WebLock, T>): Promise<Awaited<T>>;
  request<T>(name: string, options: LockRequestOptions & { ifAvailable: true }, callback: Callback<WebLock | null, T>): Promise<Awaited<T>>;
  request<T>(
    name: string,
    options: LockRequestOptions & { ifAvailable?: false | undefined },
    callback: Callback<WebLock, T>,
  ): Promise<Awaited<T>>;
  request<T>(name: string, options: LockRequestOptions, callback: Callback<WebLock | null, T>): Promise<Awaited<T>>;
  async request(given: unknown, second: unknown, ...third: unknown[]): Promise<unknown> {
    // biome-ignore lint/complexity/noArguments: `request.length` must be 2
    if (arguments.length < 2) throw new TypeError(`request needs at least 2 arguments, got ${arguments.length}`);
    const name = `${given}`;
    const [options, callback] = third.length > 0 ? [second, third[0]] : [undefined, second];
    const { mode, ifAvailable, steal, signal } = dictionary(options);
    if (typeof callback !== 'function') throw new TypeError('callback is not a function');
    const not = (what: string): DOMException => new DOMException(what, 'NotSupportedError');
    if (name.startsWith('-')) throw not("a name must not begin with '-'");
    if (steal && ifAvailable) throw not("steal can't be combined with ifAvailable");
    if (steal && mode !== 'exclusive') throw not('only exclusive locks can be stolen');
    if (signal && (steal || ifAvailable)) throw not("a signal can't be combined with steal or ifAvailable");
    signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      const before = this.#decided;
      let decided = (): void => {};
      const known = new Promise<void>((done) => {
        decided = done;
      });
      this.#decided = before.then(() => known);
      const lose = (cause: unknown): void => {
        this.#finish(request);
        reject(stolen(cause));
      };
      const abort = (): void => {
        request.acquisition?.cancel(new DOMException('cancelled', 'AbortError'));
        request.hold?.release().catch(() => {});
        this.#finish(request);
        reject(signal?.reason);
      };
      // The lock may be granted in the async context of another request.
      const grant = AsyncResource.bind(async (hold: Hold | null): Promise<void> => {
        hold?.signal.addEventListener('abort', () => lose(hold.signal.reason), { once: true });
        await before; // Callbacks are called in the order of the requests, also if these have different names.
        ignoreSignal?.();
        if (hold?.signal.aborted) lose(hold.signal.reason);
        if (signal?.aborted || hold?.signal.aborted) return;
        let settle: () => void;
        try {
          const value = await (callback as Callback<WebLock | null, unknown>)(hold && new WebLock(name, mode));
          settle = () => resolve(value);
        } catch (error) {
          settle = () => reject(error);
        }
        await hold?.release().catch((error: unknown) => {
          if (error instanceof LockLostError) lose(error);
        });
        this.#finish(request);
        settle();
      });
      const fail = (reason: unknown): void => {
        ignoreSignal?.();
        reject(reason);
      };
      const request: Request = { name, mode, ifAvailable, steal, since: performance.now(), state: 'queued', decided, grant, reject: fail };
      const ignoreSignal = signal && onAbort(signal, abort);
      const requests = this.#requests.get(name) ?? [];
      this.#requests.set(name, requests);
      requests.push(request);
      if (steal) void this.#steal(request, requests, before);
      this.#pump(name);
    });
  }

  /**
   * The locks and the requests at the server of all managers with this prefix, and all requests of this manager. Looks at every key of the database. Rejects
   * with the errors of `Holdfast.info`.
   */
  async query(): Promise<LockManagerSnapshot> {
    await Promise.all([...this.#requests.values()].flat().map(({ hold }) => hold?.check()));
    await this.#settled();
    const held: { fence: number; record: LockRecord }[] = [];
    const own = new Map<string, Request[]>();
    const record = ({ name, mode }: Request): LockRecord => ({ name, mode, clientId: this.#clientId });
    for (const [name, requests] of this.#requests) {
      own.set(
        this.#prefix + encode(name),
        requests.filter(({ hold, ifAvailable }) => !hold && !ifAvailable),
      );
      for (const request of requests) if (request.hold) held.push({ fence: request.hold.fence, record: record(request) });
    }
    const pending: { since: number; record: LockRecord }[] = [];
    const add = async (key: string): Promise<void> => {
      const [info, waiters] = await this.#state(key);
      const at = performance.now();
      const foreign = (owner: string, limit: number | null): LockRecord[] => {
        const [clientId = ''] = owner.split('#');
        const mode = limit === 0 ? 'shared' : 'exclusive';
        return clientId === this.#clientId ? [] : [{ name: decode(key.slice(this.#prefix.length)), mode, clientId }];
      };
      for (const { owner, token } of info?.holders ?? [])
        held.push(...foreign(owner, info?.limit ?? 1).map((record) => ({ fence: token ?? 0, record })));
      const requests = new Set(own.get(key));
      const queue = waiters.flatMap(({ owner, limit, waited }) => {
        const request = [...requests].find(({ acquisition }) => acquisition?.owner === owner);
        if (!request) return foreign(owner, limit).map((record) => ({ since: at - waited, record }));
        requests.delete(request);
        return { since: request.since, record: record(request) };
      });
      for (const request of requests) queue.push({ since: request.since, record: record(request) }); // The server does not have it yet.
      // The server knows the order for one name; the times of others are too late by that of the reply.
      let next = Number.POSITIVE_INFINITY;
      for (const entry of [...queue].reverse()) {
        next = Math.min(next, entry.since);
        entry.since = next;
      }
      pending.push(...queue);
    };
    await Promise.all([...new Set([...own.keys(), ...(await this.#holdfast.scan(this.#prefix))])].map(add));
    return {
      held: held.sort((a, b) => a.fence - b.fence).map(({ record }) => record),
      pending: pending.sort((a, b) => a.since - b.since).map(({ record }) => record),
    };
  }

  /** The holders and the waiters of a lock; none if the key holds something else. */
  #state(key: string): Promise<[LockInfo | null, Waiter[]]> {
    return Promise.all([this.#holdfast.info(key), this.#holdfast.waiters(key)]).catch((error) => {
      if (error instanceof ServerError && error.code === 'WRONGTYPE') return [null, []];
      throw error;
    });
  }

  /** Resolves when the states of this manager's requests are those at the server. */
  async #settled(): Promise<void> {
    const change = (): Promise<void> => new Promise((resolve) => this.#changed.push(resolve));
    for (;;) {
      const firsts = [...this.#requests.values()].flatMap((requests) => requests.find(({ state }) => state !== 'held') ?? []);
      if (firsts.some(({ state }) => state !== 'waiting')) {
        await change();
        continue;
      }
      // The server may have granted a request that waits here: its reply is not here yet.
      const granted = await Promise.all(
        firsts.map(async ({ name, acquisition }) => {
          const info = await this.#holdfast.info(this.#prefix + encode(name));
          return info?.holders.some(({ owner }) => owner === acquisition?.owner) ?? false;
        }),
      );
      if (!granted.includes(true)) return;
      if (firsts.every(({ state }, i) => !granted[i] || state === 'waiting')) await change();
    }
  }

  /**
   * Sends the first request that is not held. While it waits, the later ones have to wait, too, as the specification says: they are sent one after
   * the other.
   */
  #pump(name: string): void {
    const requests = this.#requests.get(name) ?? [];
    const open = requests.filter(({ state }) => state !== 'held');
    const [next] = open;
    if (next?.state === 'queued') void this.#ask(next);
    else if (next?.state === 'waiting' || next?.steal) {
      // No request behind it can be granted now.
      for (const request of open) {
        if (request.state !== 'trying') request.decided();
        if (request.ifAvailable && request.state === 'queued') this.#refuse(request);
      }
      const at = open.findIndex(({ state }) => state === 'queued');
      const before = open[at - 1];
      if (before?.state === 'waiting' && this.#behind < MOST_BEHIND) {
        this.#behind++;
        void this.#ask(open[at] as Request, before).finally(() => {
          this.#behind--;
          this.#pump(name);
        });
      }
    }
    for (const changed of this.#changed.splice(0)) changed();
  }

  /** Sends a request: behind `before`, to wait; else first without a wait. */
  async #ask(request: Request, before?: Request): Promise<void> {
    request.state = 'trying';
    try {
      const waited = before && (await this.#waited(before));
      if (before && waited === undefined) {
        if ((request.state as string) === 'over') return;
        request.state = 'queued';
        return this.#pump(request.name);
      }
      const hold = (before ? null : await this.#try(request)) ?? (request.ifAvailable ? null : await this.#wait(request, waited));
      if ((request.state as string) === 'over') return void hold?.release().catch(() => {});
      if (hold) this.#grant(request, hold);
      else this.#refuse(request);
    } catch (error) {
      this.#finish(request);
      request.reject(error);
    }
  }

  /** Asks without a wait. If the server gives no answer, the request waits for it, unless it must not wait. */
  #try(request: Request): Promise<Hold | null> {
    return this.#acquire(request, 0).catch((error) => {
      if (request.ifAvailable || !(error instanceof NotAcquiredError)) throw error;
      return null;
    });
  }

  /** Waits until a request is in the server's queue. Returns for how long it has waited, ms; undefined: it no longer waits. */
  async #waited(request: Request): Promise<number | undefined> {
    for (let ms = 5; request.state === 'waiting'; ms = Math.min(2 * ms, 1000)) {
      // After an error, the server is asked again.
      const waiters = await this.#holdfast.waiters(this.#prefix + encode(request.name)).catch(() => []);
      const place = waiters.find(({ owner }) => owner === request.acquisition?.owner);
      if (place) return place.waited;
      await pause(ms);
    }
  }

  /** Waits at the server. `most`: for how long the request before it has waited. */
  async #wait(request: Request, most?: number): Promise<Hold | null> {
    if (request.state === 'over') return null;
    request.state = 'waiting';
    // It must claim less than the one before it, also in the server's whole milliseconds: it would overtake that one.
    const behind = most === undefined ? {} : { urgent: true, waited: Math.max(0, Math.min(waitedSince(request), most - 2)) };
    const hold = this.#acquire(request, undefined, behind);
    this.#pump(request.name);
    return hold;
  }

  #acquire(request: Request, wait: number | undefined, more: { urgent?: boolean; waited?: number } = {}): Promise<Hold | null> {
    const options = { lease: this.#lease, shared: request.mode === 'shared', wait };
    request.acquisition = this.#holdfast.acquire([this.#prefix + encode(request.name)], options, {
      prefix: `${this.#clientId}#`,
      waited: waitedSince(request),
      ...more,
    });
    return request.acquisition.outcome;
  }

  #grant(request: Request, hold: Hold): void {
    request.state = 'held';
    request.hold = hold;
    request.decided();
    request.grant(hold);
    this.#pump(request.name);
  }

  #refuse(request: Request): void {
    this.#finish(request);
    request.grant(null);
  }

  #finish(request: Request): void {
    request.state = 'over';
    request.decided();
    const requests = this.#requests.get(request.name) ?? [];
    const at = requests.indexOf(request);
    if (at >= 0) requests.splice(at, 1);
    if (requests.length === 0) this.#requests.delete(request.name);
    this.#pump(request.name);
  }

  /** Waits at the head of the queue, and then takes the lock from its holders. */
  async #steal(thief: Request, requests: Request[], before: Promise<void>): Promise<void> {
    const name = this.#prefix + encode(thief.name);
    thief.state = 'trying';
    let result: Promise<Hold | null> | undefined;
    try {
      await before; // A lock that it has to steal may be about to be granted.
      requests.unshift(...requests.splice(requests.indexOf(thief), 1));
      let hold = await this.#try(thief);
      while (!hold?.isHeld) {
        result = this.#acquire(thief, undefined, { urgent: true, waited: A_DAY });
        let waits = true;
        const done = (): void => {
          waits = false;
        };
        result.then(done, done);
        while (waits) {
          const [first] = await this.#holdfast.waiters(name);
          if (first?.owner === thief.acquisition?.owner) await this.#holdfast.force(name);
          await pause(5); // Also after FORCE, whatever the server has answered: there is no loop without a pause.
        }
        hold = await result;
        await hold?.check(); // Our own FORCE may have hit this hold, if it was granted right before.
      }
      for (const victim of requests.filter(({ state }) => state === 'held')) {
        this.#finish(victim);
        victim.reject(stolen());
      }
      this.#grant(thief, hold);
    } catch (error) {
      // The rejected request must not be granted later.
      thief.acquisition?.cancel(error);
      result?.then((late) => late?.release()).catch(() => {});
      this.#finish(thief);
      thief.reject(error);
    }
  }
}

/** Unlike the client's own timers, this one keeps the process alive: a caller waits for it. */
const pause = (ms: number): Promise<void> =>
  new Promise((resolve) => {
    setTimeout(resolve, ms);
  });

/** For how long a request has waited, ms, less 1: WAITED is rounded up, and it must not overtake a request that another manager made right before it. */
const waitedSince = ({ since }: Request): number => Math.max(0, performance.now() - since - 1);

/** The options as the bindings of a browser would read them. */
function dictionary(value: unknown): { mode: LockMode; ifAvailable: boolean; steal: boolean; signal: AbortSignal | undefined } {
  if (value !== undefined && value !== null && typeof value !== 'object' && typeof value !== 'function')
    throw new TypeError('options is not an object');
  const options = (value ?? {}) as Record<string, unknown>;
  const ifAvailable = Boolean(options.ifAvailable);
  const given = options.mode;
  const mode = given === undefined ? 'exclusive' : `${given}`;
  if (mode !== 'exclusive' && mode !== 'shared') throw new TypeError(`mode must be 'exclusive' or 'shared', got '${mode}'`);
  const { signal } = options;
  if (signal !== undefined && !(signal instanceof AbortSignal)) throw new TypeError('signal is not an AbortSignal');
  return { mode, ifAvailable, steal: Boolean(options.steal), signal };
}

/** Names may have lone surrogates, which UTF-8 can't encode. */
const encode = (name: string): string =>
  name.replace(/%|\p{Surrogate}/gu, (char) => `%${char.charCodeAt(0).toString(16).padStart(4, '0')}`);
const decode = (name: string): string => name.replace(/%([0-9a-f]{4})/g, (_, hex: string) => String.fromCharCode(Number.parseInt(hex, 16)));
