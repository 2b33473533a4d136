/** The monotonic clock, ms. It may stand while the machine is suspended: {@link Hold.isHeld} compares the wall clock, too. */
export const now = (): number => performance.now();

/** Something to be done at a time, unless it is cancelled. */
export interface Alarm {
  readonly at: number;
  ring(): void;
}

/** The alarms of a client. One timer serves them all, and does not keep the process alive: most are cancelled long before their time. */
export class Alarms {
  readonly #alarms = new Set<Alarm>();
  #armed = Number.POSITIVE_INFINITY;
  #timer: NodeJS.Timeout | undefined;

  later(ms: number, ring: () => void): Alarm {
    const alarm = { at: now() + ms, ring };
    this.#alarms.add(alarm);
    if (alarm.at < this.#armed) this.#arm(alarm.at);
    return alarm;
  }

  cancel(alarm: Alarm | undefined): void {
    if (alarm) this.#alarms.delete(alarm);
  }

  sleep(ms: number): Promise<void> {
    return new Promise((resolve) => this.later(ms, resolve));
  }

  #arm(at: number): void {
    clearTimeout(this.#timer);
    this.#armed = at;
    this.#timer = setTimeout(() => this.#tick(), Math.min(Math.max(1, Math.ceil(at - now())), 2 ** 31 - 1)).unref();
  }

  #tick(): void {
    this.#armed = Number.POSITIVE_INFINITY;
    const time = now();
    let next = Number.POSITIVE_INFINITY;
    for (const alarm of this.#alarms) {
      if (alarm.at <= time) {
        this.#alarms.delete(alarm);
        alarm.ring();
      } else next = Math.min(next, alarm.at);
    }
    if (next < this.#armed) this.#arm(next);
  }
}

/** A time as the commands take it: whole ms, at least 1 (0 would mean for ever). */
export const whole = (ms: number): string => String(Math.max(1, Math.ceil(ms)));

/** How long a request without WAIT may stay unanswered. */
export const silence = (lease: number): number => Math.min(Math.max(lease / 8, 50), 1000);
