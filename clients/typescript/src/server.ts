import type { Connection, Driver } from './driver.js';
import { ServerError, UnavailableError } from './errors.js';
import { type Exchange, type Request, type Router, Sending } from './exchange.js';
import { Pool } from './pool.js';
import { after, now } from './time.js';

/** The least time that a repetition has, ms: with less, a connection would count as silent before it can answer. */
const LEAST_TIME = 50;

/** Sends requests to the server that serves a key: the only one, or a node of a cluster. */
export class Server implements Router {
  readonly #driver: Driver;
  readonly #max: number;
  readonly #pools = new Map<string | undefined, Pool>();
  readonly #slots = new Map<number, string>();
  /** The index, among the addresses, of the node that is asked about slots that are not known. */
  #guide = 0;

  constructor(driver: Driver, maxConnections: number) {
    this.#driver = driver;
    this.#max = maxConnections;
  }

  pool(target: string | Pool): Pool {
    if (target instanceof Pool) return target;
    if (!this.#driver.addresses) return this.#at(undefined);
    const known = this.#slots.get(slotOf(target));
    if (known !== undefined) return this.#at(known);
    const addresses = this.#driver.addresses();
    return this.#at(addresses[this.#guide % addresses.length] ?? ''); // Without a known node, the driver rejects.
  }

  /** A pool for each primary. */
  primaries(): Pool[] {
    return this.#driver.addresses?.().map((address) => this.#at(address)) ?? [this.#at(undefined)];
  }

  /** Sends a pipeline once, in the background. */
  exchange(exchange: Exchange): Sending {
    return new Sending(this, exchange);
  }

  /** Sends a pipeline until its first command is answered, in the background. Calls `done` with that reply, or with the last error. */
  request(request: Request, done: (reply: unknown) => void, timeout = request.timeout): void {
    const { target, priority, lease, own, commands, isReply, repeatable = true } = request;
    const take = (outcome: readonly unknown[] | Error): void => {
      const reply = outcome instanceof Error ? outcome : outcome[0];
      const pause = reply instanceof Error ? this.pauseAfter(reply, target) : undefined;
      const wasLost = reply instanceof UnavailableError && reply.sent;
      if (wasLost) request.broke?.();
      const isLast = reply instanceof UnavailableError && (own || (wasLost && !repeatable));
      if (pause === undefined || isLast || now() + pause >= request.end()) done(reply);
      else after(pause, () => this.request(request, done, Math.max(LEAST_TIME, Math.min(request.timeout, request.end() - now()))));
    };
    this.exchange({ target, priority, lease, timeout, own, commands, isReply, done: take });
  }

  /** As {@link Server.request}: resolves with the reply, or rejects with the error. */
  ask(request: Request): Promise<unknown> {
    return new Promise((resolve, reject) => {
      this.request(request, (reply) => (reply instanceof Error ? reject(reply) : resolve(reply)));
    });
  }

  /** How long to wait before a failed request is repeated, ms; undefined: it would fail again. */
  pauseAfter(failure: Error, target: string | Pool): number | undefined {
    if (failure instanceof UnavailableError) return 0; // The pool pauses before it connects again.
    return failure instanceof ServerError && failure.passing ? this.pool(target).pause() : undefined;
  }

  close(): void {
    for (const pool of this.#pools.values()) pool.close();
  }

  checked(reply: unknown): unknown {
    const isRedirect = reply instanceof ServerError && (reply.code === 'MOVED' || reply.code === 'ASK');
    if (!isRedirect || this.#driver.addresses) return reply;
    return ServerError.from(`ERR this server is a node of a cluster: give Holdfast a client for a cluster (redirect: ${reply.message})`);
  }

  learn(target: string | Pool, pool: Pool, connection: Connection, replies: readonly unknown[]): ReturnType<Router['learn']> {
    const failed = replies.filter((reply): reply is ServerError => reply instanceof ServerError);
    const redirects = this.#driver.addresses ? failed.filter(({ code }) => code === 'MOVED' || code === 'ASK') : [];
    if (failed.some(({ code }) => code === 'READONLY' || code === 'UNBLOCKED')) {
      pool.dropIdle();
      connection.close();
      this.forget(pool);
    }
    // A node that was cut off from its cluster may have lost its slots.
    if (failed.some(({ code }) => code === 'CLUSTERDOWN')) this.forget(pool);
    else if (failed.length > redirects.length) this.#avoid(pool);
    let asking: Pool | undefined;
    for (const { message } of redirects) {
      const [kind, slot, address = ''] = message.split(' ');
      // Without a host, it is that of the node that answered.
      const node = /^:\d+$/.test(address) ? `${pool.address?.replace(/:\d+$/, '')}${address}` : address;
      if (kind === 'ASK') asking = this.#at(node);
      else this.#slots.set(Number(slot), node);
    }
    return redirects.length === replies.length ? { pool: asking ?? this.pool(target), isAsking: asking !== undefined } : undefined;
  }

  #at(address: string | undefined): Pool {
    let pool = this.#pools.get(address);
    if (!pool) {
      pool = new Pool(this.#driver, this.#max, address);
      this.#pools.set(address, pool);
    }
    return pool;
  }

  /** A node did not answer: all its slots are asked for at another one. Slot by slot, that would take longer than a lease. */
  forget(pool: Pool): void {
    for (const [slot, address] of this.#slots) if (address === pool.address) this.#slots.delete(slot);
    this.#avoid(pool);
  }

  /** Lets another node be asked about unknown slots. Requests that fail together at one node change that once. */
  #avoid(pool: Pool): void {
    const addresses = this.#driver.addresses?.() ?? [];
    if (addresses[this.#guide % addresses.length] === pool.address) this.#guide++;
  }
}

/** The cluster slot of a key: CRC16/XMODEM of the key, or of its hash tag. */
export function slotOf(key: string): number {
  const open = key.indexOf('{');
  const shut = open < 0 ? -1 : key.indexOf('}', open + 1);
  const tag = shut > open + 1 ? key.slice(open + 1, shut) : key;
  let crc = 0;
  for (const byte of new TextEncoder().encode(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = (crc & 0x8000 ? (crc << 1) ^ 0x1021 : crc << 1) & 0xffff;
  }
  return crc & 16383;
}
