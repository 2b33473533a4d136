import { once } from 'node:events';
import { setTimeout as pause } from 'node:timers/promises';
import { ClosedError, LockLostError, type LossReason } from './errors.js';
import { checkCount, checkFunction, checkLease, checkRange, type Hold } from './hold.js';
import type { LockInfo } from './replies.js';
import { checkSignal, onAbort } from './signals.js';

export interface ElectionOptions {
  /** What {@link Holdfast.leader} says of this candidate, such as its address; at most about 400 bytes. */
  value?: string | undefined;
  /** How long a leader that was killed blocks the next one, ms. Default 5,000. */
  lease?: number | undefined;
  /** A killed leader is replaced at once. Guard by the term: the server may see the end of its connection before it does. */
  ephemeral?: boolean | undefined;
  /** How many replicas must confirm a term, and each of its renewals, so that it survives a failover to one of them. */
  replicas?: number | undefined;
  /** Resigns when it aborts. */
  signal?: AbortSignal | undefined;
  /** Called when this process leads. `hold.fence` is the term; `hold.signal` aborts when leadership is lost. Releasing `hold` ends the term, and the candidacy goes on. An error that it throws is an unhandled rejection. */
  onElected?: ((hold: Hold) => void | PromiseLike<void>) | undefined;
  /** Called when leadership was lost; not after a resignation. An error that it throws is an unhandled rejection. */
  onLost?: ((reason: LossReason) => void | PromiseLike<void>) | undefined;
}

/** A leader. */
export interface Leader {
  /** What the leader named as its value. */
  readonly value: string;
  /** The term: the fencing token of the leader's lock. */
  readonly fence: number | null;
}

/** What elections need of their client. */
interface Client {
  key(name: string): string;
  acquire(
    names: readonly string[],
    options: Pick<ElectionOptions, 'lease' | 'ephemeral' | 'replicas' | 'signal'>,
    more: { prefix: string; background: boolean },
  ): { readonly outcome: Promise<Hold | null> };
  leader(name: string): Promise<Leader | null>;
  emit(event: 'warning', error: unknown): boolean;
}

/** How long a candidate pauses after an error, ms. */
const PAUSE = 1000;

/** A candidacy. After an error of the server, the client emits a `warning`, and the candidacy goes on. */
export class Election {
  readonly #holdfast: Client;
  readonly #name: string;
  readonly #options: ElectionOptions;
  readonly #ending = new AbortController();
  readonly #done: Promise<void>;
  #hold: Hold | undefined;

  /** @internal */
  constructor(holdfast: Client, name: string, options: ElectionOptions) {
    this.#holdfast = holdfast;
    this.#name = name;
    this.#options = options;
    const { signal, value = '' } = options;
    checkLease(options.lease ?? 5000);
    checkCount('replicas', options.replicas ?? 0, 0);
    checkSignal(signal);
    if (typeof value !== 'string') throw new TypeError(`value must be a string, got ${String(value)}`);
    checkFunction('onElected', options.onElected);
    checkFunction('onLost', options.onLost);
    holdfast.key(name);
    const abort = (): void => this.#ending.abort();
    const ignoreSignal = signal && onAbort(signal, abort);
    if (signal?.aborted) abort();
    this.#done = this.#run().finally(ignoreSignal);
  }

  /** Whether this process leads. */
  get isLeader(): boolean {
    return this.#hold?.isHeld ?? false;
  }

  /** The term while this process leads. */
  get term(): number | undefined {
    return this.isLeader ? this.#hold?.fence : undefined;
  }

  /** Ends the candidacy; a leader hands over at once. Resolves when the server has confirmed that, or after 5 s. Never rejects. */
  async resign(): Promise<void> {
    this.#ending.abort();
    await this.#done;
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.resign();
  }

  async #run(): Promise<void> {
    const { signal } = this.#ending;
    const { value = '', lease = 5000, ephemeral, replicas, onElected, onLost } = this.#options;
    const prefix = value === '' ? '' : `${value.replace(/[%#]/g, (c) => (c === '%' ? '%25' : '%23'))}#`;
    while (!signal.aborted) {
      try {
        // In the background: a candidate does not keep the process alive.
        const { outcome } = this.#holdfast.acquire([this.#name], { lease, ephemeral, replicas, signal }, { prefix, background: true });
        const hold = (await outcome) as Hold;
        this.#hold = hold;
        this.#call(() => onElected?.(hold));
        const over = new AbortController();
        hold.ended = () => over.abort();
        hold.retire = () => this.#ending.abort();
        if (hold.isActive) await once(over.signal, 'abort', { signal }).catch(() => {});
        const loss: unknown = hold.signal.reason;
        this.#hold = undefined;
        await hold.release().catch((error) => {
          if (!(error instanceof LockLostError)) throw error;
        });
        if (loss instanceof LockLostError) this.#call(() => onLost?.(loss.reason));
      } catch (error) {
        if (signal.aborted && error === signal.reason) return;
        process.nextTick(() => this.#holdfast.emit('warning', error));
        if (error instanceof ClosedError) return;
        await pause(PAUSE, undefined, { signal, ref: false }).catch(() => {});
      }
    }
  }

  /** An error of a callback is an unhandled rejection: it ends the process unless the program handles it. */
  #call(callback: () => void | PromiseLike<void>): void {
    void Promise.resolve().then(callback);
  }
}

/** The leader, from the state of its lock. */
export function leaderOf(info: LockInfo | null): Leader | null {
  const holder = info?.holders[0];
  if (!holder) return null;
  const value = holder.owner.includes('#') ? holder.owner.slice(0, holder.owner.lastIndexOf('#')) : '';
  return { value: decodeURIComponent(value.replace(/%(?!2[35])/g, '%25')), fence: holder.token };
}

export async function* observe(
  holdfast: Client,
  name: string,
  options: { signal?: AbortSignal | undefined; interval?: number | undefined },
): AsyncGenerator<Leader | null, void, undefined> {
  const { signal } = options;
  const interval = checkRange('interval', options.interval ?? 1000, 1, 2 ** 31 - 1); // With more, a timer would fire at once.
  checkSignal(signal);
  let last: string | undefined;
  while (!signal?.aborted) {
    const leader = await holdfast.leader(name);
    const state = JSON.stringify(leader);
    if (state !== last) yield leader;
    last = state;
    await pause(interval, undefined, { signal: signal ?? undefined }).catch(() => {});
  }
}
