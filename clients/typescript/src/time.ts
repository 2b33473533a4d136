/** The monotonic clock, ms. It may stand while the machine is suspended: {@link Hold.isHeld} compares the wall clock, too. */
export const now = (): number => performance.now();

/** The wall clock, ms, minus the monotonic one, which is `at` now: grows while the machine is suspended. */
export const wallOffset = (at: number): number => Date.now() - at;

/** Something to be done in `ms`, unless it is cancelled. It does not keep the process alive. */
export class Alarm {
  #timer: NodeJS.Timeout | undefined;

  constructor(ms: number, ring: () => void) {
    this.#arm(ms, now() + ms, ring);
  }

  cancel(): void {
    clearTimeout(this.#timer);
  }

  /** A timer may ring early, and takes no more than 24 days. */
  #arm(ms: number, at: number, ring: () => void): void {
    const tick = (): void => {
      const left = at - now();
      if (left > 0) this.#arm(left, at, ring);
      else ring();
    };
    this.#timer = setTimeout(tick, Math.min(Math.ceil(ms), 2 ** 31 - 1)).unref();
  }
}

/** Does something in `ms`; at once, if that is no time. */
export const after = (ms: number, work: () => void): void => {
  if (ms > 0) new Alarm(ms, work);
  else work();
};

export const sleep = (ms: number): Promise<void> =>
  new Promise((resolve) => {
    new Alarm(ms, resolve);
  });

/** A time as the commands take it: whole ms, at least 1 (0 would mean for ever). */
export const whole = (ms: number): string => String(Math.max(1, Math.ceil(ms)));

/** How long a request without WAIT may stay unanswered, ms. */
export const silence = (lease: number): number => Math.min(Math.max(lease / 8, 50), 1000);
