/**
 * Base class of all errors of this package. Messages may change, `code` does not: `NOT_ACQUIRED`, `LOCK_LOST`, `RELEASED`, `UNAVAILABLE`, `CLOSED`,
 * `MODULE_NOT_LOADED`, `SERVER_TOO_OLD`, `CLIENT_TOO_OLD`, of `holdfast/redlock` `EXECUTION` and `RESOURCE_LOCKED`, or the first word of an error
 * reply, such as `DEADLOCK` or `WRONGTYPE`.
 */
export class HoldfastError extends Error {
  override name = 'HoldfastError';
  readonly code: string;
  constructor(code: string, message: string, options?: ErrorOptions) {
    super(message, options);
    this.code = code;
  }
}

/** The lock was not granted within the caller's time. `cause` is the last error, unless the server's last answer was that the lock is held. */
export class NotAcquiredError extends HoldfastError {
  override name = 'NotAcquiredError';
  readonly names: readonly string[];
  constructor(names: readonly string[], cause?: unknown) {
    const why = cause instanceof Error ? `: ${cause.message}` : '';
    super('NOT_ACQUIRED', `lock ${quote(names)} was not acquired in time${why}`, { cause });
    this.names = names;
  }
}

/**
 * Why a hold was lost.
 *
 * - `expired`: no renewal succeeded, and the lease may be over;
 * - `gone`: the server answered that this owner does not hold the lock (its lease ended, or it was forced or deleted);
 * - `changed`: the key holds something else;
 * - `disconnected`: the connection of an ephemeral hold broke.
 */
export type LossReason = 'expired' | 'gone' | 'changed' | 'disconnected';

/** The lock is no longer held, although it was not released: the reason of `hold.signal`, and the error of `release()` and `renew()`. */
export class LockLostError extends HoldfastError {
  override name = 'LockLostError';
  readonly names: readonly string[];
  readonly reason: LossReason;
  constructor(names: readonly string[], reason: LossReason) {
    super('LOCK_LOST', `lock ${quote(names)} was lost: ${reason}`);
    this.names = names;
    this.reason = reason;
  }
}

/** The codes of errors after which the same request may succeed, at this server or at another one. */
const PASSING =
  /^(LOADING|BUSY|TRYAGAIN|MASTERDOWN|MISCONF|NOREPLICAS|CLUSTERDOWN|OOM|UNCONFIRMED|READONLY|UNBLOCKED|SUPERSEDED|MOVED|ASK)$/;

/** The server answered with an error. `code` is the first word of the reply, such as `WRONGTYPE`. */
export class ServerError extends HoldfastError {
  override name = 'ServerError';
  /** The error of an error reply, given without its leading `-`. */
  static from(message: string): ServerError {
    const code = /^[A-Z]+/.exec(message)?.[0] ?? 'ERR';
    if (code === 'DEADLOCK') return new DeadlockError(code, message);
    if (/^ERR unknown command .?LOCK\./i.test(message)) return new ModuleNotLoadedError();
    return new ServerError(code, message);
  }
  /** Whether the same request may succeed later. */
  get passing(): boolean {
    if (this.code === 'ERR') return /too many waiters|being confirmed|max number of clients/.test(this.message);
    return PASSING.test(this.code);
  }
}

/** Waiting would close a cycle of waits. */
export class DeadlockError extends ServerError {
  override name = 'DeadlockError';
}

/** The server does not have the module. */
export class ModuleNotLoadedError extends ServerError {
  override name = 'ModuleNotLoadedError';
  constructor() {
    super('MODULE_NOT_LOADED', 'the Holdfast module is not loaded: start the server with --loadmodule libholdfast.so, or run MODULE LOAD');
  }
}

/** The server's module only has older protocol versions than this client. */
export class ServerTooOldError extends ServerError {
  override name = 'ServerTooOldError';
}

/** The server's module no longer has the protocol version of this client. */
export class ClientTooOldError extends ServerError {
  override name = 'ClientTooOldError';
}

/** There was no answer: no connection, a broken one, or a silent server. `sent`: the server may have executed the request. */
export class UnavailableError extends HoldfastError {
  override name = 'UnavailableError';
  readonly sent: boolean;
  constructor(message: string, sent: boolean, cause?: unknown) {
    super('UNAVAILABLE', cause instanceof Error ? `${message}: ${cause.message}` : message, { cause });
    this.sent = sent;
  }
}

/** The client was closed. */
export class ClosedError extends HoldfastError {
  override name = 'ClosedError';
  constructor() {
    super('CLOSED', 'the client is closed');
  }
}

const quote = (names: readonly string[]) => names.map((name) => JSON.stringify(name)).join(', ');
