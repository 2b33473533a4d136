import { UnavailableError } from './errors.js';
import type { Bucket, Hold, Renewals } from './hold.js';
import { RENEW } from './pool.js';
import type { Server } from './server.js';
import { Alarm, now, silence } from './time.js';

/** How many renewals go together at most. */
const PIPELINE = 256;

/** Renews what a client holds, and finds that the time of a hold is over. */
export class Renewer implements Renewals {
  readonly holds = new Set<Hold>();
  readonly #server: Server;
  /** The holds of each moment in which something is due. */
  readonly #buckets = new Map<number, Bucket>();

  constructor(server: Server) {
    this.#server = server;
  }

  add(hold: Hold): void {
    this.remove(hold);
    if (!hold.isActive || !this.holds.has(hold)) return;
    const at = Math.ceil(hold.due);
    let bucket = this.#buckets.get(at);
    if (!bucket) {
      bucket = { at, holds: new Set(), alarm: new Alarm(at - now(), () => this.#ring(at)) };
      this.#buckets.set(at, bucket);
    }
    bucket.holds.add(hold);
    hold.bucket = bucket;
  }

  remove(hold: Hold): void {
    const { bucket } = hold;
    if (!bucket?.holds.delete(hold) || bucket.holds.size > 0 || this.#buckets.get(bucket.at) !== bucket) return;
    // Without renewals it may be due only in years: released holds must leave no timers.
    bucket.alarm.cancel();
    this.#buckets.delete(bucket.at);
  }

  renewNow(hold: Hold): void {
    if (hold.renewing) return;
    this.remove(hold);
    this.send([hold]);
  }

  send(batch: readonly Hold[], done?: () => void): void {
    const [head] = batch as [Hold];
    const target = head.terms.keys[0] as string;
    const pool = this.#server.pool(target);
    const lease = Math.min(...batch.map((hold) => hold.lease));
    const left = Math.min(lease, ...batch.map((hold) => hold.certain - now()));
    const timeout = silence(lease) + (head.terms.replicas ? pool.replicasTimeout : 0);
    let asked: Hold[] = [];
    for (const hold of batch) hold.renewing = true;
    this.#server.exchange({
      target,
      priority: RENEW,
      lease,
      timeout: Math.max(1, Math.min(timeout, left)),
      own: head.connection,
      commands: (sent) => {
        // Once a release has begun, nothing is renewed.
        asked = batch.filter((hold) => hold.isActive);
        return asked.map((hold) => hold.renewal(sent));
      },
      isReply: (reply, place) => (asked[place] as Hold).isRenewal(reply),
      done: (outcome, sent) => {
        let failed = batch;
        if (!(outcome instanceof Error)) failed = asked.filter((hold, i) => !hold.takeRenewal(outcome[i], sent));
        else if (outcome instanceof UnavailableError && outcome.sent) for (const hold of asked) hold.broke();
        const pause = failed.length > 0 && !(outcome instanceof UnavailableError) ? pool.pause() : 0;
        for (const hold of failed) hold.due = hold.isRenewed ? Math.min(now() + pause, hold.certain) : hold.certain;
        for (const hold of batch) {
          hold.renewing = false;
          this.add(hold);
        }
        done?.();
      },
    });
  }

  #ring(at: number): void {
    const due = this.#buckets.get(at)?.holds ?? [];
    this.#buckets.delete(at);
    const groups = new Map<unknown, Hold[]>();
    for (const hold of due) {
      if (now() >= hold.certain) hold.lose('expired');
      else if (!hold.isRenewed) this.add(hold);
      else {
        // A renewal that waits for replicas would hold up those behind it.
        const target = hold.terms.replicas ? hold : (hold.connection ?? this.#server.pool(hold.terms.keys[0] as string));
        const group = groups.get(target);
        if (group) group.push(hold);
        else groups.set(target, [hold]);
      }
    }
    for (const holds of groups.values()) for (let i = 0; i < holds.length; i += PIPELINE) this.send(holds.slice(i, i + PIPELINE));
  }
}
