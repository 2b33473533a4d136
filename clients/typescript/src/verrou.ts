import { UnavailableError } from './errors.js';
import { LONGEST_LEASE } from './hold.js';
import type { Holdfast } from './holdfast.js';
import { whole } from './time.js';
import { Turns } from './turns.js';

/** What this package uses of `@verrou/core`. */
export interface VerrouErrors {
  E_LOCK_NOT_OWNED: new () => Error;
}

/** How many tokens are kept: those of the locks that were saved last. */
const TOKENS = 10_000;

/**
 * A store for `@verrou/core`: `new Verrou({ default: 'holdfast', stores: { holdfast: { driver: { factory: () => new VerrouStore(holdfast, { E_LOCK_NOT_OWNED }) } } } })`,
 * with verrou's own error class. Verrou polls and does not renew, but other clients can wait in the queues of its locks.
 * Times are in ms. Every call rejects with the errors of `Holdfast.info`.
 */
export class VerrouStore {
  readonly #holdfast: Holdfast;
  readonly #errors: VerrouErrors;
  /** The tokens by name and owner, in JSON. */
  readonly #tokens = new Map<string, string>();
  readonly #turns = new Turns();

  constructor(holdfast: Holdfast, errors: VerrouErrors) {
    this.#holdfast = holdfast;
    this.#errors = errors;
  }

  /** Acquires the lock for `owner` if it is free. Returns whether it was. `ttl` null: ten years. */
  async save(name: string, owner: string, ttl: number | null): Promise<boolean> {
    // One at a time for each name: two requests over two connections have no order.
    let turn = (): void => {};
    await new Promise<void>((resolve) => {
      turn = resolve;
      if (this.#turns.join(name, turn)) resolve();
    });
    try {
      return await this.#save(name, owner, ttl);
    } finally {
      this.#turns.leave(name, turn);
    }
  }

  async #save(name: string, owner: string, ttl: number | null): Promise<boolean> {
    try {
      const token = await this.#holdfast.request(
        name,
        this.#command('ACQUIRE', name, owner, 'NEW', 'LEASE', whole(ttl ?? LONGEST_LEASE)),
        false,
      );
      if (token === null) return false;
      this.#tokens.set(JSON.stringify([name, owner]), String(token));
      const [oldest] = this.#tokens.keys();
      if (this.#tokens.size > TOKENS) this.#tokens.delete(oldest as string);
      return true;
    } catch (error) {
      if (!(error instanceof UnavailableError) || !error.sent) throw error;
      throw new UnavailableError('the lock may be held by this owner until its lease is over', true, error);
    }
  }

  /** Rejects with `E_LOCK_NOT_OWNED` if `owner` does not hold the lock. */
  async delete(name: string, owner: string): Promise<void> {
    const id = JSON.stringify([name, owner]);
    const token = this.#tokens.get(id);
    this.#tokens.delete(id);
    // Without the token, a repeated release could meet a later hold of this owner.
    const release = this.#command('RELEASE', name, owner, ...(token ? ['TOKEN', token] : []));
    let repeated = false;
    const reply = await this.#holdfast.request(name, release, token !== undefined, () => {
      repeated = true;
    });
    // A repetition finds nothing if the reply to the first request was lost.
    if (reply === null && !repeated) throw new this.#errors.E_LOCK_NOT_OWNED();
  }

  /** Takes the lock from its holder. */
  async forceDelete(name: string): Promise<void> {
    await this.#holdfast.force(name);
  }

  /** Whether the lock is held. */
  async exists(name: string): Promise<boolean> {
    const info = await this.#holdfast.info(name);
    return info !== null && info.holders.length > 0;
  }

  /** Renews the lease, with this duration. Rejects with `E_LOCK_NOT_OWNED` if `owner` does not hold the lock. */
  async extend(name: string, owner: string, duration: number): Promise<void> {
    const reply = await this.#holdfast.request(name, this.#command('RENEW', name, owner, 'LEASE', whole(duration)));
    if (reply === null) throw new this.#errors.E_LOCK_NOT_OWNED();
  }

  /** Does nothing: the client belongs to the program. */
  async disconnect(): Promise<void> {}

  #command(verb: string, name: string, owner: string, ...rest: string[]): string[] {
    return [`LOCK.${verb}`, this.#holdfast.key(name), owner, ...rest];
  }
}
