import { setMaxListeners } from 'node:events';

/** Throws a `TypeError` unless the value is an `AbortSignal`, undefined or null. */
export function checkSignal(signal: AbortSignal | null | undefined): void {
  if (signal === undefined || signal === null || typeof signal.throwIfAborted === 'function') return;
  throw new TypeError(`signal must be an AbortSignal, got ${String(signal)}`);
}

/** Calls `listener` when the signal aborts, unless the function that is returned has been called. */
export function onAbort(signal: AbortSignal, listener: () => void): () => void {
  try {
    setMaxListeners(0, signal); // A program has one signal for many locks: that is no leak.
  } catch {
    // Another library's AbortSignal has no such limit.
  }
  signal.addEventListener('abort', listener, { once: true });
  return () => signal.removeEventListener('abort', listener);
}
