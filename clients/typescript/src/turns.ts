/** Lines of tasks, of which the first one is served until it leaves. */
export class Turns {
  readonly #lines = new Map<unknown, Set<() => void>>();

  /** Joins a line. Returns whether it is its turn already; if not, `turn` is called when it is. */
  join(name: unknown, turn: () => void): boolean {
    const line = this.#lines.get(name) ?? new Set();
    this.#lines.set(name, line.add(turn));
    return line.values().next().value === turn;
  }

  leave(name: unknown, turn: () => void): void {
    const line = this.#lines.get(name);
    const wasFirst = line?.values().next().value === turn;
    if (!line?.delete(turn)) return;
    const [next] = line;
    if (!next) this.#lines.delete(name);
    else if (wasFirst) next();
  }
}
