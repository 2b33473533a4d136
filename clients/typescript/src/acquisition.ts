import { randomFillSync } from 'node:crypto';
import type { Connection } from './driver.js';
import { NotAcquiredError, ServerError, UnavailableError } from './errors.js';
import { type Client, command, Hold, type Terms } from './hold.js';
import { OTHER, type Pool, RELEASE } from './pool.js';
import { Alarm, now, silence, sleep, wallOffset, whole } from './time.js';

/** One request, until its reply has been read. */
interface Attempt {
  /** When it was written; a redirect repeats that. */
  sent: number;
  /** The {@link wallOffset} then. */
  offset: number;
  connection: Connection | undefined;
  /** The pool let the connection go, for an ephemeral hold. */
  kept: boolean;
  /** How long it waits at the server at most, ms. */
  readonly longest: number;
  /** Rings when it has been silent for too long. */
  alarm: Alarm | undefined;
}

/** The longest wait of one request, ms. */
const HOUR = 3_600_000;
/** The wait of a request that found no connection for a longer one, ms, and how often it is sent; one at a time in a client. */
const POLL = 100;
const POLL_EVERY = 1000;
const POLLS = Symbol();
/** A request that waits is sent again after so long without an answer, ms. */
const ASK_AGAIN = 2000;
/** A request that was superseded has to be answered within so long, ms. */
const SUPERSEDED = 1000;
/** How long after the caller's time an answer may come, ms. */
const GRACE = 250;

/** A call that asks for a lock, from its beginning until it has the lock or has left nothing behind. */
export class Acquisition {
  readonly owner: string;
  /** The hold; null: the lock is held by another owner, and the call does not wait. */
  readonly outcome: Promise<Hold | null>;
  readonly #client: Client;
  readonly #terms: Terms;
  readonly #key: string;
  readonly #waits: boolean;
  readonly #began = now();
  readonly #deadline: number;
  #settle!: { resolve(hold: Hold | null): void; reject(error: unknown): void };
  #settled = false;
  /** The requests that were written and not answered. */
  readonly #attempts = new Set<Attempt>();
  /** The one that was made last, if it is under way. */
  #newest: Attempt | undefined;
  #lastSent: number | undefined;
  /** The next request is not the first one, or waited in this client. */
  #queued = false;
  /** The pool in which this wait has a place, or needs one. */
  #place: Pool | undefined;
  #hasPlace = false;
  /** What was granted, even if it does not count yet. */
  #hold: Hold | undefined;
  /** A connection broke under a request: a stale one may still be on its way. */
  #broke = false;
  /** Something went wrong: what was asked for may still be on its way. */
  #failed = false;
  #cause: unknown;
  /** Gives up when the caller's time is over. */
  #timer: Alarm | undefined;
  #withdrawing = false;
  /** A token came after the withdrawal. */
  #lateToken = false;
  /** Called with each answer. */
  #answered: (() => void) | undefined;

  constructor(client: Client, terms: Terms) {
    this.#client = client;
    this.#terms = terms;
    this.#key = terms.keys[0] as string;
    this.#waits = terms.wait > 0;
    this.owner = terms.prefix + random();
    // The time of a request that must not wait is the time that its answer may take.
    this.#deadline = this.#began + (this.#waits ? terms.wait : Math.max(silence(terms.lease), GRACE) + this.#confirmation);
    this.outcome = new Promise((resolve, reject) => {
      this.#settle = { resolve, reject };
    });
    client.acquisitions.add(this);
    if (this.#deadline < Number.POSITIVE_INFINITY) this.#timer = new Alarm(this.#deadline - this.#began, () => this.#timeOver());
    // Of the waits of this client for one mutex, only the oldest asks the server.
    const isMutex = terms.keys.length === 1 && terms.limit.length === 0;
    this.#queued = this.#waits && isMutex && !terms.urgent && !client.turns.join(this.#key, this.#ask);
    if (!this.#queued) this.#ask();
  }

  /** Gives up: the caller is answered with `reason` at once, and the request is withdrawn in the background. */
  cancel(reason: unknown): void {
    this.#end(() => this.#settle.reject(reason), true);
  }

  get #pool(): Pool {
    return this.#client.server.pool(this.#key);
  }

  /** How much longer an answer may take for which replicas have to confirm, ms. */
  get #confirmation(): number {
    return this.#terms.replicas ? this.#pool.replicasTimeout : 0;
  }

  /** Nothing is to be sent any more. */
  get #isOver(): boolean {
    return this.#settled || this.#hold !== undefined || now() >= this.#deadline;
  }

  /** Sends a request, unless one is under way. */
  readonly #ask = (): void => {
    if (this.#isOver || this.#newest) return;
    const pool = this.#pool;
    if (this.#waits && this.#place !== pool) {
      this.#place?.leavePlace(this.#gotPlace);
      this.#place = pool;
      this.#hasPlace = pool.takePlace(this.#gotPlace);
    }
    if (this.#hasPlace) this.#send(HOUR);
    else if (!this.#waits || this.#lastSent === undefined) this.#send(0);
    else if (this.#client.turns.join(POLLS, this.#poll)) this.#poll();
  };

  readonly #gotPlace = (): void => {
    this.#hasPlace = true;
    this.#client.turns.leave(POLLS, this.#poll);
    this.#ask();
  };

  /** Asks with a short wait, when it is its turn. */
  readonly #poll = (): void => {
    if (this.#isOver || this.#newest) this.#client.turns.leave(POLLS, this.#poll);
    else this.#send(POLL);
  };

  /** Sends the request in the background. `longest`: how long it may wait at the server, ms. */
  #send(longest: number): void {
    const { lease, ephemeral } = this.#terms;
    const attempt: Attempt = { sent: 0, offset: 0, connection: undefined, kept: false, longest, alarm: undefined };
    this.#newest = attempt;
    const answered = (reply: unknown): void => this.#take(attempt, reply);
    this.#client.server
      .exchange(this.#key, (sent) => this.#request(attempt, sent), {
        priority: OTHER,
        lease,
        timeout: this.#waits ? ASK_AGAIN : Math.max(1, this.#deadline - now()),
        patient: true,
        written: (connection) => this.#written(attempt, connection),
        keep: ([reply]) => {
          attempt.kept = ephemeral && Array.isArray(reply) && !this.#settled && !this.#hold;
          return attempt.kept;
        },
      })
      .then(({ replies }) => answered(replies[0]), answered);
  }

  #request(attempt: Attempt, sent: number): string[][] {
    if (this.#isOver || this.#newest !== attempt) return [];
    const { keys, lease, limit, ephemeral, replicas, waited } = this.#terms;
    const { longest } = attempt;
    const left = this.#deadline - sent;
    const request = command('ACQUIRE', keys, this.owner, 'HOLDS', '1', 'LEASE', whole(lease));
    if (longest > 0) {
      request.push('WAIT', whole(Math.min(left, longest)));
      if (this.#queued || this.#lastSent !== undefined || waited > 0) request.push('WAITED', whole(sent - this.#began + waited));
    }
    if (ephemeral) request.push('EPHEMERAL');
    if (replicas) request.push('REPLICAS', String(replicas));
    attempt.sent = this.#lastSent = sent;
    attempt.offset = wallOffset();
    return [[...request, ...limit, 'WITHWAITED']];
  }

  #written(attempt: Attempt, connection: Connection): void {
    const { longest } = attempt;
    attempt.connection = connection;
    attempt.alarm?.cancel();
    const patience = (longest === 0 ? silence(this.#terms.lease) : ASK_AGAIN) + this.#confirmation;
    attempt.alarm = new Alarm(patience, () => (longest === HOUR ? this.#askAgain(attempt) : this.#abandon(attempt)));
    this.#attempts.add(attempt);
    for (const older of this.#attempts) {
      if (older === attempt) continue;
      older.alarm?.cancel();
      older.alarm = new Alarm(SUPERSEDED + this.#confirmation, () => this.#abandon(older));
    }
  }

  /** A request is silent: the next one takes over its place in the queue, and it has to be answered then. */
  #askAgain(attempt: Attempt): void {
    if (this.#settled) this.#abandon(attempt);
    else if (this.#isOver) attempt.alarm = new Alarm(SUPERSEDED, () => this.#askAgain(attempt));
    else if (this.#newest === attempt) {
      this.#failed = true;
      this.#newest = undefined;
      this.#ask();
    }
  }

  /** Closes the connection of a request that is not answered. */
  #abandon(attempt: Attempt): void {
    if (!this.#attempts.has(attempt)) return;
    this.#broke = this.#failed = true;
    attempt.connection?.close();
  }

  /** Takes the reply to a request, or the error that came instead of one. */
  #take(attempt: Attempt, reply: unknown): void {
    attempt.alarm?.cancel();
    this.#attempts.delete(attempt);
    this.#client.turns.leave(POLLS, this.#poll);
    const isNewest = this.#newest === attempt;
    if (isNewest) this.#newest = undefined;
    if (reply instanceof UnavailableError && reply.sent) {
      this.#broke = this.#failed = true;
      if (this.#hold) this.#hold.stale = true;
    }
    if (Array.isArray(reply)) this.#granted(attempt, Number(reply[0]), Number(reply[1]));
    else if (isNewest && !this.#settled && !this.#hold && reply !== undefined) this.#refused(attempt, reply);
    this.#answered?.();
  }

  /** The newest request brought no token. */
  #refused(attempt: Attempt, answer: unknown): void {
    let reply = answer;
    if (reply === null) {
      this.#cause = undefined;
      // Its wait ended when the caller's time does.
      if (!this.#waits || (attempt.longest === HOUR && this.#deadline - attempt.sent <= HOUR)) this.#refuse();
      else if (!this.#hasPlace) this.#again(POLL_EVERY);
      else this.#again(attempt.longest === HOUR ? this.#pool.pause() : 0);
      return;
    }
    if (!(reply instanceof Error)) {
      if (attempt.connection) this.#pool.broke(attempt.connection);
      this.#broke = this.#failed = true;
      reply = new UnavailableError(`the server answered neither a token nor nil: ${reply}`, true);
    }
    if (reply instanceof UnavailableError) {
      this.#cause = reply;
      if (this.#waits || !reply.sent) this.#again(0);
      else this.#refuse();
    } else if (reply instanceof ServerError && reply.passing) {
      this.#failed = true;
      if (reply.code !== 'SUPERSEDED') this.#cause = reply;
      if (this.#waits || /^(MOVED|ASK)$/.test(reply.code)) this.#again(this.#pool.pause());
      else this.#refuse();
    } else this.#end(() => this.#settle.reject(reply), this.#broke || this.#attempts.size > 0);
  }

  #again(pause: number): void {
    if (now() >= this.#deadline) this.#refuse();
    else if (pause > 0) new Alarm(pause, this.#ask);
    else this.#ask();
  }

  #granted(attempt: Attempt, token: number, waited: number): void {
    if (this.#settled) {
      if (attempt.kept) attempt.connection?.close(); // Cancelled since the reply was read.
      // The same grant again: whatever ends the hold ends it, too.
      if (this.#hold?.fence === token) return;
      this.#hold?.lose('gone');
      this.#lateToken = true;
      this.#withdraw();
      return;
    }
    if (this.#hold) return;
    const { lease, ephemeral } = this.#terms;
    if (ephemeral && this.#newest && this.#attempts.has(this.#newest)) {
      // The server answers the newer request, too, and binds the hold to that connection.
      attempt.connection?.close();
      return;
    }
    const connection = ephemeral ? attempt.connection : undefined;
    const hold = new Hold(this.#client, this.#terms, this.owner, token, attempt.sent + waited, attempt.offset, connection);
    this.#hold = hold;
    hold.stale = this.#broke;
    hold.unanswered = this.#attempts;
    if (hold.left >= lease / 2) this.#held(hold);
    else void this.#confirm(hold);
  }

  #held(hold: Hold): void {
    const { renewer, tell } = this.#client;
    this.#end(() => this.#settle.resolve(hold), false);
    hold.heldSince = now();
    renewer.holds.add(hold);
    renewer.add(hold);
    tell('acquired', { names: hold.names, fence: hold.fence, waited: hold.heldSince - this.#began });
  }

  /** Less than half of the lease is certain: a renewal decides. Without a wait, there is one attempt. */
  async #confirm(hold: Hold): Promise<void> {
    do {
      await sleep(this.#pool.pause());
      if (this.#settled || now() >= hold.certain) break;
      await this.#client.renewer.send([hold]);
      if (!this.#settled && hold.isActive && hold.left >= hold.lease / 2) return this.#held(hold);
    } while (!this.#settled && hold.isActive && this.#waits && now() < this.#deadline);
    if (this.#settled) return;
    hold.connection?.close();
    this.#hold = undefined;
    this.#failed = true;
    this.#cause ??= new UnavailableError('the grant came too late to count', true);
    if (this.#isOver || !this.#waits) this.#refuse();
    else this.#ask();
  }

  /** The caller's time is over. An answer may be on its way. */
  #timeOver(): void {
    const giveUp = (): void => {
      const sent = this.#attempts.size > 0;
      if (sent || this.#newest) this.#cause ??= new UnavailableError('the server did not answer', sent);
      this.cancel(this.#notAcquired());
    };
    if (this.#waits && (this.#attempts.size > 0 || this.#hold)) this.#timer = new Alarm(GRACE, giveUp);
    else giveUp();
  }

  #notAcquired(): NotAcquiredError {
    return new NotAcquiredError(this.#terms.names, this.#cause);
  }

  #refuse(): void {
    const { resolve, reject } = this.#settle;
    this.#end(() => (this.#waits || this.#cause ? reject(this.#notAcquired()) : resolve(null)), this.#failed);
  }

  #end(settle: () => void, withdraw: boolean): void {
    if (this.#settled) return;
    this.#settled = true;
    settle();
    this.#timer?.cancel();
    this.#place?.leavePlace(this.#gotPlace);
    this.#client.turns.leave(POLLS, this.#poll);
    this.#client.turns.leave(this.#key, this.#ask);
    this.#client.acquisitions.delete(this);
    if (withdraw) this.#withdraw();
  }

  /** Releases whatever this acquisition holds or waits for, in the background. */
  #withdraw(): void {
    if (this.#lastSent === undefined || this.#withdrawing) return;
    this.#withdrawing = true;
    this.#hold?.connection?.close();
    const work = this.#sendWithdrawal(this.#lastSent + this.#terms.lease).catch((error) => this.#client.tell('warning', error));
    this.#client.background(
      work.finally(() => {
        this.#withdrawing = false;
        // If it failed, the server cancels what waits when the connection ends.
        for (const attempt of this.#attempts) this.#abandon(attempt);
      }),
    );
  }

  async #sendWithdrawal(end: number): Promise<void> {
    const { keys, lease } = this.#terms;
    const withdrawal = command('RELEASE', keys, this.owner, 'ALL');
    let answers = 0;
    do {
      this.#lateToken = false;
      await this.#client.server.request(this.#key, () => [withdrawal], {
        priority: RELEASE,
        lease,
        timeout: silence(lease),
        end: () => end,
      });
      answers++;
      const second = now() + SUPERSEDED;
      while (this.#attempts.size > 0 && now() < second && !this.#lateToken) {
        await new Promise<void>((resolve) => {
          const alarm = new Alarm(second - now(), resolve);
          this.#answered = () => {
            alarm.cancel();
            resolve();
          };
        });
      }
      if (this.#lateToken) {
        answers = 0; // The withdrawal had overtaken the request.
        continue;
      }
      for (const attempt of this.#attempts) this.#abandon(attempt);
      if (!this.#broke || answers > 1) return;
      await sleep(second - now());
    } while (this.#lateToken || now() < end);
  }
}

/** Bits of the operating system's generator: for 256 owners at once, since asking for them costs as much as a request. */
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
