/** A map reply, which libraries return as a flat array (RESP2), a `Map` or an object (RESP3). */
export function record(reply: unknown): Record<string, unknown> {
  if (reply instanceof Map) return Object.fromEntries(reply);
  if (!Array.isArray(reply)) return { ...(reply as object) };
  const pairs: Record<string, unknown> = {};
  for (let i = 0; i + 1 < reply.length; i += 2) pairs[String(reply[i])] = reply[i + 1];
  return pairs;
}

const number = (value: unknown): number | null => (value === null || value === undefined ? null : Number(value));
const list = (value: unknown): unknown[] => (Array.isArray(value) ? value : []);

/** One holder of a lock. Times in ms; `null`: there is none. */
export interface Holder {
  readonly owner: string;
  /** How many times it holds the lock: 1 for clients of this package. */
  readonly holds: number;
  /** Its fencing token. */
  readonly token: number | null;
  /** The time until its deadline; -1: it has none. */
  readonly ttl: number;
  /** The id of the connection that the hold is bound to. */
  readonly client: number | null;
  readonly ephemeral: boolean;
}

/** The state of a lock. */
export interface LockInfo {
  /** How many may hold it; 0: any number; null: it is free, and requests wait. */
  readonly limit: number | null;
  /** The newest token. */
  readonly fence: number | null;
  /** The time until the last deadline, ms; -1: there is none; null: it is free. */
  readonly ttl: number | null;
  readonly holders: readonly Holder[];
  /** How many requests wait. */
  readonly waiters: number;
}

/** A request that waits for a lock. Times in ms. */
export interface Waiter {
  readonly owner: string;
  /** The time since its first request. */
  readonly waited: number;
  /** The time until its wait ends; -1: it has no limit. */
  readonly remaining: number;
  /** How many it lets hold the lock; 0: any number. */
  readonly limit: number;
}

export function lockInfo(reply: unknown): LockInfo | null {
  if (reply === null || reply === undefined) return null;
  const info = record(reply);
  return {
    limit: number(info.limit),
    fence: number(info.fence),
    ttl: number(info.ttl),
    waiters: Number(info.waiters ?? 0),
    holders: list(info.holders).map((entry) => {
      const holder = record(entry);
      return {
        owner: String(holder.owner),
        holds: Number(holder.holds),
        token: number(holder.token),
        ttl: Number(holder.ttl),
        client: number(holder.client),
        ephemeral: Number(holder.ephemeral) === 1,
      };
    }),
  };
}

export function waiterList(reply: unknown): Waiter[] {
  return list(reply).map((entry) => {
    const waiter = record(entry);
    return {
      owner: String(waiter.owner),
      waited: Number(waiter.waited),
      remaining: Number(waiter.remaining),
      limit: Number(waiter.limit),
    };
  });
}
