export type { Connection, Driver } from './driver.js';
export { Election, type ElectionOptions, type Leader } from './election.js';
export {
  ClientTooOldError,
  ClosedError,
  DeadlockError,
  HoldfastError,
  LockLostError,
  type LossReason,
  ModuleNotLoadedError,
  NotAcquiredError,
  ServerError,
  ServerTooOldError,
  UnavailableError,
} from './errors.js';
export { Hold, type HoldfastEvents } from './hold.js';
export { Holdfast, type HoldfastOptions, type KindOptions, type Lock, type LockOptions } from './holdfast.js';
export type { Holder, LockInfo, Waiter } from './replies.js';
