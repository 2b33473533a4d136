import { randomFillSync } from 'node:crypto';
import type { Pipeline } from './driver.js';
import { NotAcquiredError, UnavailableError } from './errors.js';
import type { Request, Sending } from './exchange.js';
import { type Client, command, Hold, isRelease, type Origin, type Terms } from './hold.js';
import { OTHER, type Pool, RELEASE } from './pool.js';
import { onAbort } from './signals.js';
import { Alarm, after, now, silence, sleep, wallOffset, whole } from './time.js';

/** The longest wait of one request, ms. */
const HOUR = 3_600_000;
/** How often a request is sent for a wait that has no connection of its own, ms. */
const POLL_EVERY = 1000;
/** After this time without an answer, a wait is sent again, ms. */
const ASK_AGAIN = 2000;
/** How long a request may stay unanswered after a newer one or the end of its call, ms. */
const SUPERSEDED = 1000;
/** For how long after the caller's time an answer still counts, ms. */
const GRACE = 250;
const SILENT = 'the server did not answer';

/** One request for the lock. */
interface Attempt {
  /** The longest time that it may wait at the server, ms. */
  readonly longest: number;
  /** When it was written; a redirect sets it again. */
  sent: number;
  /** The {@link wallOffset} then. */
  offset: number;
  sending: Sending | undefined;
  /** Rings when it has been silent for too long. */
  alarm: Alarm | undefined;
}

/**
 * A call that acquires a lock, from its beginning until it has the lock or the server has nothing of it any more.
 *
 * - `waiting`: it has no grant;
 * - `confirming`: it has one that came late, and a renewal decides whether it counts;
 * - `over`: the call has settled.
 */
export class Acquisition implements Origin {
  readonly client: Client;
  readonly terms: Terms;
  readonly owner: string;
  /** The hold; null: the lock is held by another owner, and the call does not wait. */
  readonly outcome: Promise<Hold | null>;
  /** The requests that were written and not answered. */
  readonly unanswered = new Set<Attempt>();
  broke = false;
  readonly #key: string;
  readonly #waits: boolean;
  readonly #began = now();
  readonly #deadline: number;
  #state: 'waiting' | 'confirming' | 'over' = 'waiting';
  #resolve!: (hold: Hold | null) => void;
  #reject!: (error: unknown) => void;
  #ignoreSignal: (() => void) | undefined;
  /** The newest request, until it is answered or silent; it may still wait for a connection. */
  #newest: Attempt | undefined;
  /** The request that was written last. */
  #last: Attempt | undefined;
  /** It has waited for other calls of this client. */
  #queued = false;
  /** The pool in which this wait has a place, or needs one. */
  #pool: Pool | undefined;
  #hasPlace = false;
  /** The grant, even if it does not count. */
  #hold: Hold | undefined;
  /** The last error, unless nil came after it. */
  #cause: unknown;
  /** Rings when the caller's time is over. */
  #timer: Alarm | undefined;
  /** `overtaken`: a token came after the request that withdraws. */
  #withdrawal: 'none' | 'sent' | 'overtaken' = 'none';
  /** Called with each answer. */
  #answered: (() => void) | undefined;

  constructor(client: Client, terms: Terms, signal?: AbortSignal) {
    this.client = client;
    this.terms = terms;
    this.#key = terms.keys[0] as string;
    this.#waits = terms.wait > 0;
    this.owner = terms.prefix + random();
    // A call that does not wait ends when its answer has taken too long.
    this.#deadline = this.#began + (this.#waits ? terms.wait : Math.max(silence(terms.lease), GRACE) + this.#confirmation);
    this.outcome = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    client.acquisitions.add(this);
    if (!terms.background) client.foreground.begin();
    if (signal) this.#ignoreSignal = onAbort(signal, () => this.cancel(signal.reason));
    if (this.#deadline < Number.POSITIVE_INFINITY) this.#timer = new Alarm(this.#deadline - this.#began, () => this.#timeOver());
    // Of the waits of this client for one mutex, only the oldest asks the server.
    const isMutex = terms.keys.length === 1 && terms.limit.length === 0;
    this.#queued = this.#waits && isMutex && !terms.urgent && !client.turns.join(this.#key, this.#ask);
    if (!this.#queued) this.#ask();
  }

  /** Cancels the call: it rejects with `reason` at once, and its request is withdrawn in the background. */
  cancel(reason: unknown): void {
    if (this.#state === 'over') return;
    this.#end();
    this.#reject(reason);
  }

  get mayBeQueued(): boolean {
    return this.broke || this.unanswered.size > 0;
  }

  /** How much longer an answer may take if replicas have to confirm, ms. */
  get #confirmation(): number {
    return this.terms.replicas ? this.client.server.pool(this.#key).replicasTimeout : 0;
  }

  /** Sends a request, unless one is under way. */
  readonly #ask = (): void => {
    if (this.#state !== 'waiting' || this.#newest) return;
    const pool = this.client.server.pool(this.#key);
    if (this.#waits && this.#pool !== pool) {
      this.#pool?.places.leave(this.#gotPlace);
      this.#pool = pool;
      this.#hasPlace = pool.places.join(this.#gotPlace);
    }
    if (this.#hasPlace) this.#send(HOUR);
    else if (!this.#waits || !this.#last) this.#send(0);
    else if (this.client.polls.join(this.#poll)) this.#poll();
  };

  readonly #gotPlace = (): void => {
    this.#hasPlace = true;
    this.client.polls.leave(this.#poll);
    this.#ask();
  };

  /** Asks with a short wait, in its turn among the waits without a connection. The more are due, the shorter it is: each is soon sent. */
  readonly #poll = (): void => {
    const { polls } = this.client;
    if (this.#state === 'waiting' && !this.#newest) this.#send(Math.max(5, Math.min(100, 1000 / polls.size)));
    else polls.leave(this.#poll);
  };

  /** Sends the request in the background. `longest`: how long it may wait at the server, ms. */
  #send(longest: number): void {
    const attempt: Attempt = { longest, sent: 0, offset: 0, sending: undefined, alarm: undefined };
    const { lease, ephemeral } = this.terms;
    this.#newest = attempt;
    attempt.sending = this.client.server.exchange({
      target: this.#key,
      priority: OTHER,
      lease,
      timeout: this.#waits ? ASK_AGAIN : Math.max(1, this.#deadline - now()),
      commands: (sent) => this.#commands(attempt, sent),
      written: () => this.#written(attempt),
      isReply: isGrant,
      // A newer request is answered, too, and binds an ephemeral hold to its connection.
      keeps: ([reply]) => ephemeral && isGrant(reply) && this.#state === 'waiting' && attempt === this.#last,
      done: (outcome) => this.#take(attempt, outcome instanceof Error ? outcome : outcome[0]),
    });
  }

  #commands(attempt: Attempt, sent: number): Pipeline {
    if (this.#state !== 'waiting' || this.#newest !== attempt || sent >= this.#deadline) return [];
    const { keys, lease, limit, ephemeral, replicas, waited } = this.terms;
    const request = command('ACQUIRE', keys, this.owner, 'HOLDS', '1', 'LEASE', whole(lease));
    if (attempt.longest > 0) {
      request.push('WAIT', whole(Math.min(this.#deadline - sent, attempt.longest)));
      if (this.#queued || this.#last || waited > 0) request.push('WAITED', whole(sent - this.#began + waited));
    }
    if (ephemeral) request.push('EPHEMERAL');
    if (replicas) request.push('REPLICAS', String(replicas));
    request.push(...limit, 'WITHWAITED');
    attempt.sent = sent;
    attempt.offset = wallOffset(sent);
    this.#last = attempt;
    return [request];
  }

  #written(attempt: Attempt): void {
    this.#hurry();
    this.unanswered.add(attempt);
    const { renewer, server } = this.client;
    // A release at the exit of the process has no time to connect, and is not read on the connection of a wait.
    if (attempt.longest > 0 && renewer.holds.size > 0) server.pool(this.#key).spare();
    const patience = (attempt.longest === 0 ? silence(this.terms.lease) : ASK_AGAIN) + this.#confirmation;
    this.#watch(attempt, patience, () => (attempt.longest === HOUR ? this.#askAgain(attempt) : abandon(attempt)));
  }

  #watch(attempt: Attempt, patience: number, silent: () => void): void {
    attempt.alarm?.cancel();
    attempt.alarm = new Alarm(patience, silent);
  }

  /** Limits the time of unanswered requests: the call no longer depends on them. */
  #hurry(): void {
    for (const attempt of this.unanswered) this.#watch(attempt, SUPERSEDED + this.#confirmation, () => abandon(attempt));
  }

  /** Sends a new request if this one is silent. The new one takes over its place in the queue. */
  #askAgain(attempt: Attempt): void {
    if (this.#newest !== attempt || now() >= this.#deadline) return;
    this.#newest = undefined;
    this.#ask();
  }

  /** Takes the reply to a request, or the error that came instead of one. */
  #take(attempt: Attempt, reply: unknown): void {
    attempt.alarm?.cancel();
    this.unanswered.delete(attempt);
    const isNewest = this.#newest === attempt;
    if (isNewest) {
      this.#newest = undefined;
      this.client.polls.leave(this.#poll);
    }
    if (reply instanceof UnavailableError && reply.sent) this.broke = true;
    if (isGrant(reply)) this.#granted(attempt, reply[0], reply[1]);
    else if (isNewest && this.#state === 'waiting') {
      if (reply instanceof Error) this.#failed(reply);
      else if (reply === null) this.#refused(attempt);
    }
    this.#answered?.();
  }

  #refused(attempt: Attempt): void {
    this.#cause = undefined;
    // The wait has ended because the caller's time is over.
    if (!this.#waits || (attempt.longest === HOUR && this.#deadline - attempt.sent <= HOUR)) this.#giveUp();
    else this.#again(this.#hasPlace ? this.client.server.pool(this.#key).pause() : POLL_EVERY);
  }

  #failed(error: Error): void {
    const pause = this.client.server.pauseAfter(error, this.#key);
    const code = 'code' in error ? error.code : '';
    const mayRepeat = this.#waits || code === 'MOVED' || code === 'ASK' || (error instanceof UnavailableError && !error.sent);
    if (pause !== undefined && code !== 'SUPERSEDED') this.#cause = error;
    if (pause === undefined) this.cancel(error);
    else if (mayRepeat) this.#again(pause);
    else this.#giveUp();
  }

  #again(pause: number): void {
    if (now() >= this.#deadline) this.#giveUp();
    else after(pause, this.#ask);
  }

  #granted(attempt: Attempt, token: number, waited: number): void {
    if (this.#state === 'over') {
      // The same grant again: it ends with the hold.
      if (this.#hold?.fence === token) return;
      this.#hold?.lose('gone');
      this.#withdraw();
      return;
    }
    const { ephemeral } = this.terms;
    if (this.#state === 'confirming' || (ephemeral && attempt !== this.#last)) return;
    const hold = new Hold(this, token, attempt.sent + waited, attempt.offset, ephemeral ? attempt.sending?.connection : undefined);
    this.#hold = hold;
    if (hold.counts) this.#held(hold);
    else {
      this.#state = 'confirming';
      this.client.renewer.send([hold], () => this.#confirmed(hold));
    }
  }

  #confirmed(hold: Hold): void {
    if (this.#state === 'over') return;
    if (hold.counts) this.#held(hold);
    else {
      this.#state = 'waiting';
      this.#hold = undefined;
      this.#cause = new UnavailableError('the grant came too late to count', true);
      hold.connection?.close();
      if (this.#waits) this.#again(this.client.server.pool(this.#key).pause());
      else this.#giveUp();
    }
  }

  #held(hold: Hold): void {
    this.#end(hold);
    hold.begin();
    this.client.tell('acquired', { names: hold.names, fence: hold.fence, waited: hold.heldSince - this.#began });
    this.#resolve(hold);
  }

  /** The caller's time is over. An answer may be on its way. */
  #timeOver(): void {
    const giveUp = (): void => {
      const sent = this.unanswered.size > 0;
      if (sent || this.#newest) this.#cause ??= new UnavailableError(SILENT, sent);
      this.#giveUp();
    };
    if (this.#waits && (this.unanswered.size > 0 || this.#state === 'confirming')) this.#timer = new Alarm(GRACE, giveUp);
    else giveUp();
  }

  /** Answers the caller that the lock was not acquired. */
  #giveUp(): void {
    if (this.#waits || this.#cause) this.cancel(new NotAcquiredError(this.terms.names, this.#cause));
    else {
      this.#end();
      this.#resolve(null);
    }
  }

  /** Ends the call. Without a hold, what the server may have of it is withdrawn. */
  #end(hold?: Hold): void {
    const { turns, polls, acquisitions, foreground } = this.client;
    this.#state = 'over';
    this.#ignoreSignal?.();
    this.#timer?.cancel();
    this.#pool?.places.leave(this.#gotPlace);
    polls.leave(this.#poll);
    turns.leave(this.#key, this.#ask);
    acquisitions.delete(this);
    if (!this.terms.background) foreground.end();
    this.#hurry();
    if (!hold && (this.mayBeQueued || this.#cause || this.#hold)) this.#withdraw();
  }

  /** Releases what the server may have of this acquisition, in the background. */
  #withdraw(): void {
    if (this.#withdrawal !== 'none') {
      this.#withdrawal = 'overtaken';
      return;
    }
    if (!this.#last) return;
    this.#hold?.connection?.close();
    this.#withdrawal = 'sent';
    this.client.background.begin();
    this.#sendWithdrawals(this.#last.sent + this.terms.lease)
      .catch((error) => this.client.tell('warning', error))
      .finally(() => {
        this.#withdrawal = 'none';
        this.client.background.end();
      });
  }

  /** Repeats the withdrawal until nothing can be left: if a token came after it, and a second later if a connection broke. `end`: when the last lease is over. */
  async #sendWithdrawals(end: number): Promise<void> {
    const { keys, lease } = this.terms;
    const withdrawal = [command('RELEASE', keys, this.owner, 'ALL')];
    const timeout = silence(lease);
    const request: Request = {
      target: this.#key,
      priority: RELEASE,
      lease,
      timeout,
      commands: () => withdrawal,
      isReply: (reply) => isRelease(keys, reply),
      end: () => end,
    };
    for (let answers = 1; ; answers++) {
      this.#withdrawal = 'sent';
      await this.client.server.ask(request);
      const second = now() + SUPERSEDED;
      while (this.unanswered.size > 0 && !this.#isOvertaken)
        await new Promise<void>((resolve) => {
          this.#answered = resolve;
        });
      if (this.#isOvertaken) answers = 0;
      else if (!this.broke || answers > 1 || second >= end) return;
      else await sleep(second - now());
    }
  }

  get #isOvertaken(): boolean {
    return this.#withdrawal === 'overtaken';
  }
}

/** Whether this is a token, and for how long the request waited, ms. */
const isGrant = (reply: unknown): reply is [number, number] =>
  Array.isArray(reply) && typeof reply[0] === 'number' && typeof reply[1] === 'number';

/** Gives up waiting for an answer. */
const abandon = (attempt: Attempt): void => attempt.sending?.abandon(new UnavailableError(SILENT, true));

/** Random bits of the operating system, for 256 owners at once: each call for them costs as much as a request. */
const bits = Buffer.alloc(4096);
let used = bits.length;

/** 128 bits, in hexadecimal digits. */
function random(): string {
  if (used === bits.length) {
    randomFillSync(bits);
    used = 0;
  }
  used += 16;
  return bits.toString('hex', used - 16, used);
}
