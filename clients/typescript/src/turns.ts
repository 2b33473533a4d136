/** A queue of tasks, of which the first `capacity` are served until they leave. */
export class Line {
  readonly #capacity: number;
  readonly #tasks = new Set<() => void>();

  constructor(capacity: number) {
    this.#capacity = capacity;
  }

  get size(): number {
    return this.#tasks.size;
  }

  /** Joins the queue. Returns whether the task is served at once; if not, `turn` is called when it is. */
  join(turn: () => void): boolean {
    return this.#tasks.add(turn).size <= this.#capacity;
  }

  leave(turn: () => void): void {
    if (!this.#tasks.has(turn)) return;
    let place = 0;
    let wasServed = false;
    let next: (() => void) | undefined;
    for (const task of this.#tasks) {
      if (place++ === this.#capacity) next = task;
      else wasServed ||= task === turn;
      if (next) break;
    }
    this.#tasks.delete(turn);
    if (wasServed) next?.();
  }
}

/** Queues by name, in each of which one task at a time is served. */
export class Turns {
  readonly #lines = new Map<string, Line>();

  /** As {@link Line.join}. */
  join(name: string, turn: () => void): boolean {
    const line = this.#lines.get(name) ?? new Line(1);
    this.#lines.set(name, line);
    return line.join(turn);
  }

  leave(name: string, turn: () => void): void {
    const line = this.#lines.get(name);
    line?.leave(turn);
    if (line?.size === 0) this.#lines.delete(name);
  }
}
