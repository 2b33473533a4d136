import { randomFillSync } from 'node:crypto';
import type { Connection } from './driver.js';
import { NotAcquiredError, ServerError, UnavailableError } from './errors.js';
import { command, Hold, type Keeper, type Renewer, type Terms } from './hold.js';
import { OTHER, RELEASE } from './pool.js';
import { type Alarm, now, silence, whole } from './time.js';

/** What an acquisition needs of its client. */
export interface Acquirer extends Keeper {
  readonly renewer: Renewer;
  /** The waits for each mutex: the first one is at the server, the others wait here. */
  readonly queues: Map<string, (() => void)[]>;
  /** Runs `work` when no other wait without a connection of its own is being asked for. */
  alone<T>(work: () => Promise<T>): Promise<T>;
  granted(hold: Hold, waited: number): void;
  begun(acquisition: Acquisition): void;
  ended(acquisition: Acquisition): void;
  warn(error: unknown): void;
}

/** One request that was written, or will be as soon as there is a connection for it. */
interface Attempt {
  /** `sent`: that of the last writing, which a redirect may repeat. */
  sent: number;
  connection: Connection | undefined;
  /** The WAIT of the request ended when the caller's time did: nil is final. */
  final: boolean;
}

interface Outcome {
  attempt: Attempt;
  reply?: unknown;
  error?: unknown;
}

const HOUR = 3_600_000;
/** An ACQUIRE that waits is asked again after so long without an answer. */
const ASK_AGAIN = 2000;
/** A request that was superseded has to be answered within so long. */
const SUPERSEDED = 1000;
/** How long after the caller's time an answer may come. */
const GRACE = 250;

/** A call that asks for a lock, from its beginning until it has the lock or has left nothing behind. */
export class Acquisition {
  readonly terms: Terms;
  readonly owner: string;
  /** The hold; null: not acquired. */
  readonly outcome: Promise<Hold | null>;
  readonly #client: Acquirer;
  readonly #began = now();
  readonly #attempts = new Set<Attempt>();
  readonly #outcomes: Outcome[] = [];
  #notify: (() => void) | undefined;
  #settle!: { resolve(hold: Hold | null): void; reject(error: unknown): void };
  #settled = false;
  #hold: Hold | undefined;
  #lastSent: number | undefined;
  #broke = false;
  /** Something went wrong: what was asked for may still be on its way. */
  #failed = false;
  #queued = false;
  #cause: unknown;
  #withdrawing: Promise<void> | undefined;
  #lateToken = false;
  #leaveQueue: (() => void) | undefined;
  /** Gives up when the caller's time is over. */
  #timer: Alarm | undefined;
  /** Goes on if the first request does not end as usual. */
  #goOn: (() => void) | undefined;

  constructor(client: Acquirer, terms: Terms) {
    this.#client = client;
    this.terms = terms;
    this.owner = terms.prefix + random();
    this.outcome = new Promise((resolve, reject) => {
      this.#settle = { resolve, reject };
    });
    client.begun(this);
    this.#start();
  }

  /** Gives up: the caller is answered with `reason` at once, and the request is withdrawn in the background. */
  cancel(reason: unknown): void {
    if (this.#end(() => this.#settle.reject(reason))) this.withdraw();
  }

  /** Resolves when nothing of this acquisition is left on its way. */
  get withdrawn(): Promise<void> | undefined {
    return this.#withdrawing;
  }

  get #deadline(): number {
    const { wait, lease } = this.terms;
    // The time of a request that must not wait is the time that its answer may take.
    return this.#began + (wait > 0 ? wait : Math.max(silence(lease), GRACE) + this.#confirmation);
  }

  /** Sends the first request. If it is granted at once, as is usual, nothing else is needed. */
  #start(): void {
    const { alarms } = this.#client.server;
    const { wait } = this.terms;
    if (wait !== Number.POSITIVE_INFINITY) {
      const time = this.#deadline + (wait > 0 ? GRACE : 0) - this.#began;
      this.#timer = alarms.later(time, () => {
        if (this.#attempts.size > 0) this.#cause ??= new UnavailableError('the server did not answer', true);
        this.cancel(this.#notAcquired());
      });
    }
    const pool = this.#client.server.pool(this.terms.keys[0] as string);
    const turn = this.#turn();
    if (turn || (wait > 0 && !pool.reserveWait())) {
      void this.#run(turn);
      return;
    }
    const attempt = this.#send(wait > 0 ? this.#deadline - now() : 0, wait > 0 ? () => pool.endWait() : undefined);
    let alarm: Alarm;
    const watch = (left: number): void => {
      alarm = alarms.later(left, () => {
        const more = attempt.sent + this.#patience - now(); // It waited for its connection.
        if (more > 0) watch(more);
        else this.#goOn?.();
      });
    };
    watch(this.#patience);
    this.#goOn = () => {
      this.#goOn = undefined;
      alarms.cancel(alarm);
      if (!this.#settled) void this.#run(undefined, attempt);
    };
  }

  /** How much longer an answer may take for which replicas have to confirm, ms. */
  get #confirmation(): number {
    const { keys, replicas } = this.terms;
    return replicas ? this.#client.server.pool(keys[0] as string).replicasTimeout : 0;
  }

  /** How long a request with WAIT may stay unanswered, ms. */
  get #patience(): number {
    return ASK_AGAIN + this.#confirmation;
  }

  async #run(turn?: Promise<void>, first?: Attempt): Promise<void> {
    const { wait } = this.terms;
    try {
      await turn;
      const hold = this.#settled ? undefined : await this.#ask(first);
      if (hold && this.#end(() => this.#settle.resolve(hold))) {
        this.#client.granted(hold, now() - this.#began);
        return;
      }
      const refuse = (): void => (wait > 0 || this.#cause ? this.#settle.reject(this.#notAcquired()) : this.#settle.resolve(null));
      if (!hold && this.#end(refuse) && this.#failed) this.withdraw();
    } catch (error) {
      if (this.#end(() => this.#settle.reject(error)) && (this.#broke || this.#attempts.size > 0)) this.withdraw();
    }
  }

  #notAcquired(): NotAcquiredError {
    return new NotAcquiredError(this.terms.names, this.#cause);
  }

  /** Of the waits of this client for one mutex, only the oldest asks the server. */
  #turn(): Promise<void> | undefined {
    const { keys, limit, wait } = this.terms;
    const [key] = keys as [string];
    if (wait === 0 || keys.length > 1 || limit.length > 0 || this.terms.urgent) return undefined;
    const { queues } = this.#client;
    let queue = queues.get(key);
    const next = (): void => {
      const first = queue?.shift();
      if (first) first();
      else queues.delete(key);
    };
    if (!queue) {
      queue = [];
      queues.set(key, queue);
      this.#leaveQueue = next;
      return undefined;
    }
    this.#queued = true;
    return new Promise((resolve) => {
      const go = (): void => {
        this.#leaveQueue = next;
        resolve();
      };
      queue?.push(go);
      this.#leaveQueue = () => {
        const at = queue?.indexOf(go) ?? -1;
        if (at >= 0) queue?.splice(at, 1);
        resolve();
      };
    });
  }

  /** Asks until there is an answer that counts; undefined: not acquired. `sent`: the request that was sent and was silent, or has an outcome. */
  async #ask(sent: Attempt | undefined): Promise<Hold | undefined> {
    const { server } = this.#client;
    const pool = server.pool(this.terms.keys[0] as string);
    const waits = this.terms.wait > 0;
    let attempt = sent;
    for (let first = true; !this.#settled; first = false) {
      if (first && attempt) {
        const outcome = await this.#answer(attempt, () => 0);
        const result = outcome ? await this.#judge(outcome) : this.#silent(attempt);
        if (result !== 'again') return result;
        continue;
      }
      if (now() >= this.#deadline && (waits || !first)) {
        // Nothing is sent any more, but the last answer may be on its way.
        const end = now() + GRACE;
        const last = attempt && (await this.#answer(attempt, () => end));
        const result = last && !this.#settled ? await this.#judge(last) : undefined;
        return result === 'again' ? undefined : result;
      }
      if (!waits) attempt = this.#send(0);
      else if (pool.reserveWait()) attempt = this.#send(this.#deadline - now(), () => pool.endWait());
      else {
        const hold = await this.#askWithoutPlace(first);
        if (hold) return hold;
        if (now() < this.#deadline) await pool.waitFree(Math.min(1000, this.#deadline - now()));
        continue;
      }
      const last = attempt;
      const outcome = await this.#answer(last, () => last.sent + this.#patience);
      if (this.#settled) return undefined;
      const result = outcome ? await this.#judge(outcome) : this.#silent(attempt);
      if (result !== 'again') return result;
    }
    return undefined;
  }

  /** The next request takes over the place in the queue, and this one has to be answered then. */
  #silent(attempt: Attempt): 'again' {
    this.#failed = true;
    this.#client.server.alarms.later(SUPERSEDED, () => this.#abandon(attempt));
    return 'again';
  }

  /** No connection is free for a wait: asks over the two that are left for everything else, at first without waiting. */
  async #askWithoutPlace(first: boolean): Promise<Hold | undefined> {
    const ask = async (): Promise<Hold | undefined> => {
      if (this.#settled || (!first && now() >= this.#deadline)) return undefined;
      const attempt = this.#send(first ? 0 : Math.min(100, this.#deadline - now()));
      attempt.final = false;
      const outcome = await this.#answer(attempt, () => attempt.sent + ASK_AGAIN);
      if (!outcome) this.#abandon(attempt);
      const result = outcome && !this.#settled ? await this.#judge(outcome) : 'again';
      return result === 'again' ? undefined : result;
    };
    return first ? ask() : this.#client.alone(ask);
  }

  /** What an outcome means: a hold, undefined for "not acquired", or that the request is to be sent again. */
  async #judge({ attempt, reply, error }: Outcome): Promise<Hold | undefined | 'again'> {
    const pool = this.#client.server.pool(this.terms.keys[0] as string);
    if (error !== undefined || reply instanceof ServerError) this.#failed = true;
    if (error !== undefined) {
      if (!(error instanceof UnavailableError)) throw error;
      this.#cause = error;
      return this.terms.wait > 0 || !error.sent ? 'again' : undefined;
    }
    if (reply instanceof ServerError) {
      if (!reply.passing) throw reply;
      if (reply.code !== 'SUPERSEDED') this.#cause = reply;
      if (this.terms.wait === 0 && !/^(MOVED|ASK)$/.test(reply.code)) return undefined;
      await pool.pause();
      return 'again';
    }
    if (reply === null) {
      this.#cause = undefined;
      return attempt.final ? undefined : 'again';
    }
    const [token, waited] = reply as [number, number];
    return await this.#take(attempt, Number(token), Number(waited));
  }

  #grant(attempt: Attempt, token: number, waited: number): Hold {
    const connection = this.terms.ephemeral ? attempt.connection : undefined;
    const hold = new Hold(this.#client, this.terms, this.owner, token, attempt.sent + waited, connection);
    this.#hold = hold;
    hold.stale = this.#broke || this.#attempts.size > 0;
    return hold;
  }

  /** The lock was granted: it counts if half the lease is certain still, or becomes so by a renewal. */
  async #take(attempt: Attempt, token: number, waited: number): Promise<Hold | 'again' | undefined> {
    const { lease, wait } = this.terms;
    const hold = this.#grant(attempt, token, waited);
    for (let tries = 0; hold.certain - now() < lease / 2; tries++) {
      if (this.#settled || (tries > 0 && (wait === 0 || now() >= this.#deadline))) break;
      await this.#client.server.pool(this.terms.keys[0] as string).pause();
      if (hold.isActive && now() >= hold.certain) break;
      await this.#client.renewer.once([hold]);
      if (!hold.isActive) break;
    }
    this.#client.unschedule(hold);
    if (this.#settled) return undefined;
    if (hold.isActive && hold.certain - now() >= lease / 2) return hold;
    this.#cause ??= new UnavailableError('the grant came too late to count', true);
    this.#hold = undefined;
    if (wait > 0 && now() < this.#deadline) return 'again';
    return undefined;
  }

  /** Sends the request in the background; its outcome comes by {@link #answer}, or late. */
  #send(wait: number, ended?: () => void): Attempt {
    const { terms } = this;
    const begun = now();
    const attempt: Attempt = { sent: begun, connection: undefined, final: wait <= HOUR };
    const counts = this.#queued || this.#failed || this.#lastSent !== undefined || terms.waited > 0;
    let sends = 0;
    const build = (sent: number): string[][] => {
      const request = command('ACQUIRE', terms.keys, this.owner, 'HOLDS', '1', 'LEASE', whole(terms.lease));
      if (wait > 0) request.push('WAIT', whole(Math.min(wait - (sent - begun), HOUR)));
      if (wait > 0 && (counts || sends > 0)) request.push('WAITED', whole(sent - this.#began + terms.waited));
      if (terms.ephemeral) request.push('EPHEMERAL');
      if (terms.replicas) request.push('REPLICAS', String(terms.replicas));
      request.push(...terms.limit, 'WITHWAITED');
      attempt.sent = this.#lastSent = sent;
      sends++;
      return [request];
    };
    const [key] = terms.keys as [string];
    this.#attempts.add(attempt);
    const timeout = wait > 0 ? ASK_AGAIN : Math.max(1, this.#deadline - now());
    const pool = this.#client.server.pool(key);
    const exchange = this.#client.server.exchange(key, build, {
      priority: OTHER,
      lease: terms.lease,
      timeout,
      patient: wait > 0,
      onSent: (connection) => {
        attempt.connection = connection;
      },
      keep: ([reply]) => terms.ephemeral && Array.isArray(reply) && !this.#settled,
    });
    const done = (outcome: Outcome): void => {
      this.#attempts.delete(attempt);
      ended?.();
      if (outcome.error instanceof UnavailableError && outcome.error.sent) this.#broke = this.#failed = true;
      if (this.#settled) this.#late(outcome);
      else if (!this.#goOn || !this.#granted(outcome)) {
        this.#outcomes.push(outcome);
        this.#goOn?.();
      }
      this.#notify?.();
    };
    exchange.then(
      ({ replies: [reply] }) => {
        if (reply === null || Array.isArray(reply) || reply instanceof ServerError) return done({ attempt, reply });
        if (attempt.connection) pool.broke(attempt.connection);
        done({ attempt, error: new UnavailableError(`the server answered neither a token nor nil: ${reply}`, true) });
      },
      (error) => done({ attempt, error }),
    );
    return attempt;
  }

  /** Whether the first request brought a hold that counts. */
  #granted({ attempt, reply }: Outcome): boolean {
    if (!Array.isArray(reply)) return false;
    const hold = this.#grant(attempt, Number(reply[0]), Number(reply[1]));
    if (hold.certain - now() < this.terms.lease / 2) return false;
    this.#end(() => this.#settle.resolve(hold));
    this.#client.granted(hold, now() - this.#began);
    return true;
  }

  /** The next outcome that counts: that of `newest`, or a token of an older request; undefined at `end`, which is later if the request is sent later. */
  async #answer(newest: Attempt, end: () => number): Promise<Outcome | undefined> {
    for (;;) {
      for (let outcome = this.#outcomes.shift(); outcome; outcome = this.#outcomes.shift()) {
        if (outcome.attempt === newest) return outcome;
        // The server answers the newer request of an ephemeral hold, too, and binds it to that connection.
        if (Array.isArray(outcome.reply)) {
          if (!this.terms.ephemeral) return outcome;
          outcome.attempt.connection?.close();
        }
      }
      const left = end() - now();
      if (this.#settled || left <= 0) return undefined;
      const { alarms } = this.#client.server;
      let timer: Alarm | undefined;
      await new Promise<void>((resolve) => {
        this.#notify = resolve;
        timer = alarms.later(left, resolve);
      });
      alarms.cancel(timer);
      this.#notify = undefined;
    }
  }

  /** Closes the connection of a request that is not answered, which counts as broken. */
  #abandon(attempt: Attempt): void {
    if (!this.#attempts.has(attempt)) return;
    this.#broke = this.#failed = true;
    attempt.connection?.close();
  }

  /** The outcome of a request of which nobody waits for the answer any more. */
  #late({ reply }: Outcome): void {
    if (!Array.isArray(reply)) return;
    if (this.#hold?.isActive && this.#hold.fence === Number(reply[0])) return;
    this.#lateToken = true;
    this.withdraw();
  }

  #end(settle: () => void): boolean {
    if (this.#settled) return false;
    this.#settled = true;
    settle();
    this.#client.server.alarms.cancel(this.#timer);
    this.#goOn?.();
    this.#notify?.();
    this.#leaveQueue?.();
    this.#client.ended(this);
    return true;
  }

  /** Releases whatever this acquisition holds or waits for, in the background. */
  withdraw(): void {
    if (this.#lastSent === undefined) return;
    this.#withdrawing ??= this.#withdraw()
      .catch((error) => this.#client.warn(error))
      .finally(() => {
        this.#withdrawing = undefined;
      });
  }

  async #withdraw(): Promise<void> {
    const { server } = this.#client;
    const { keys, lease } = this.terms;
    const [key] = keys as [string];
    let answers = 0;
    while (now() < (this.#lastSent as number) + lease || answers === 0) {
      this.#lateToken = false;
      try {
        const { replies } = await server.exchange(key, () => [command('RELEASE', keys, this.owner, 'ALL')], {
          priority: RELEASE,
          lease,
          timeout: silence(lease),
        });
        const [reply] = replies;
        if (reply instanceof ServerError) {
          if (!reply.passing) throw reply;
          await server.pool(key).pause();
          continue;
        }
      } catch (error) {
        if (!(error instanceof UnavailableError)) throw error;
        if (now() >= (this.#lastSent as number) + lease) throw error;
        continue;
      }
      answers++;
      const second = now() + SUPERSEDED;
      while (this.#attempts.size > 0 && now() < second && !this.#lateToken) {
        await new Promise<void>((resolve) => {
          this.#notify = resolve;
          server.alarms.later(second - now(), resolve);
        });
      }
      if (this.#lateToken) continue;
      for (const attempt of this.#attempts) this.#abandon(attempt);
      if (!this.#broke || answers > 1) return;
      await server.alarms.sleep(second - now());
    }
  }
}

/** 128 bits of the operating system's generator, in hexadecimal digits; it is asked for many at once. */
function random(): string {
  if (at === pool.length) at = 0;
  if (at === 0) randomFillSync(pool);
  at += 16;
  return pool.toString('hex', at - 16, at);
}
const pool = Buffer.alloc(4096);
let at = 0;
