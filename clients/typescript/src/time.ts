/** The monotonic clock, ms. It may stand while the machine is suspended: {@link Hold.isHeld} compares the wall clock, too. */
export const now = (): number => performance.now();

/** A timer that does not keep the process alive. `ms` may be longer than a timer of Node can be. */
export function later(ms: number, callback: () => void): NodeJS.Timeout {
  return setTimeout(callback, Math.min(Math.max(ms, 0), 2 ** 31 - 1)).unref();
}

export const sleep = (ms: number): Promise<void> => new Promise((resolve) => later(ms, resolve));

/** A time as the commands take it: whole ms, at least 1 (0 would mean for ever). */
export const whole = (ms: number): string => String(Math.max(1, Math.ceil(ms)));

/** How long a request without WAIT may stay unanswered. */
export const silence = (lease: number): number => Math.min(Math.max(lease / 8, 50), 1000);
