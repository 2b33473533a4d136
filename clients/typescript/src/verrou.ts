import { UnavailableError } from './errors.js';
import type { Holdfast } from './holdfast.js';
import { lockInfo } from './replies.js';
import { whole } from './time.js';

/** What is used of the exports of `@verrou/core`. */
export interface VerrouErrors {
  E_LOCK_NOT_OWNED: new () => Error;
}

/** Ten years: the longest lease that the server accepts. */
const FOR_EVER = 315_360_000_000;
/** How many tokens are remembered: those of the locks that were saved last. */
const TOKENS = 10_000;
/** A lock is asked for over a connection that has answered within so many ms: the request cannot be repeated. */
const PROVEN = 50;

/**
 * A store for `@verrou/core`: `new Verrou({ default: 'holdfast', stores: { holdfast: { driver: { factory: () => new VerrouStore(holdfast, { E_LOCK_NOT_OWNED }) } } } })`,
 * with verrou's own error class. Verrou polls and does not renew; what it gains is the module's locks, which other clients can wait for.
 */
export class VerrouStore {
  readonly #holdfast: Holdfast;
  readonly #errors: VerrouErrors;
  readonly #tokens = new Map<string, string>();

  constructor(holdfast: Holdfast, errors: VerrouErrors) {
    this.#holdfast = holdfast;
    this.#errors = errors;
  }

  async save(name: string, owner: string, ttl: number | null): Promise<boolean> {
    const command = ['LOCK.ACQUIRE', this.#holdfast.key(name), owner, 'NEW', 'LEASE', whole(ttl ?? FOR_EVER)];
    try {
      const token = await this.#holdfast.request(name, command, { repeatable: false, proven: PROVEN });
      if (token === null) return false;
      this.#tokens.set(this.#id(name, owner), String(token));
      if (this.#tokens.size > TOKENS) for (const [oldest] of this.#tokens) if (this.#tokens.delete(oldest)) break;
      return true;
    } catch (error) {
      if (!(error instanceof UnavailableError) || !error.sent) throw error;
      throw new UnavailableError('the lock may be held by this owner until its lease is over', true, error);
    }
  }

  async delete(name: string, owner: string): Promise<void> {
    const token = this.#tokens.get(this.#id(name, owner));
    this.#tokens.delete(this.#id(name, owner));
    const command = ['LOCK.RELEASE', this.#holdfast.key(name), owner];
    // Without the token, a repeated release could meet a later hold of this owner.
    const reply = token
      ? await this.#holdfast.request(name, [...command, 'TOKEN', token])
      : await this.#holdfast.request(name, command, { repeatable: false });
    if (reply === null) throw new this.#errors.E_LOCK_NOT_OWNED();
  }

  async forceDelete(name: string): Promise<void> {
    await this.#holdfast.force(name);
  }

  async exists(name: string): Promise<boolean> {
    const info = lockInfo(await this.#holdfast.request(name, ['LOCK.INFO', this.#holdfast.key(name)]));
    return (info?.holders.length ?? 0) > 0;
  }

  async extend(name: string, owner: string, duration: number): Promise<void> {
    const reply = await this.#holdfast.request(name, ['LOCK.RENEW', this.#holdfast.key(name), owner, 'LEASE', whole(duration)]);
    if (reply === null) throw new this.#errors.E_LOCK_NOT_OWNED();
  }

  /** Closes nothing: the client belongs to the program. */
  async disconnect(): Promise<void> {}

  #id(name: string, owner: string): string {
    return JSON.stringify([name, owner]);
  }
}
