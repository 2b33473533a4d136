import type { Connection, Driver, Outcome, Pipeline } from '../src/driver.js';
import { ServerError, UnavailableError } from '../src/errors.js';

/** What the fake server does with a request: it replies (after so many ms), stays silent, or cuts the connection. */
export type Act = { reply: unknown; after?: number } | 'silent' | 'cut';
export type Script = (args: readonly string[], connection: FakeConnection) => Act;

export class FakeConnection implements Connection {
  closed = false;
  onClose: (() => void) | undefined;
  readonly id: number;
  readonly address: string | undefined;
  readonly #server: FakeServer;
  readonly #pending = new Set<{ args: readonly string[]; take(reply: unknown): void; fail(error: UnavailableError): void }>();

  constructor(server: FakeServer, id: number, address?: string) {
    this.#server = server;
    this.id = id;
    this.address = address;
  }

  send(pipeline: Pipeline, done: (outcome: Outcome) => void): void {
    const replies: unknown[] = [];
    let missing = pipeline.length;
    let settled = false;
    const finish = (outcome: Outcome): void => {
      if (!settled) done(outcome);
      settled = true;
    };
    pipeline.forEach((args, i) => {
      const take = (reply: unknown): void => {
        replies[i] = reply;
        if (--missing === 0) finish(replies);
      };
      this.#pending.add({ args, take, fail: finish });
      this.#server.log.push(args.join(' '));
      const act = this.#server.act(args, this);
      if (act === 'cut') setTimeout(() => this.close(), 1);
      else if (act !== 'silent') setTimeout(() => this.answer(args, act.reply), act.after ?? 1);
    });
  }

  /** Answers the oldest pending request with these arguments. */
  answer(args: readonly string[], reply: unknown): void {
    for (const entry of this.#pending) {
      if (entry.args !== args) continue;
      this.#pending.delete(entry);
      entry.take(typeof reply === 'string' && reply.startsWith('-') ? ServerError.from(reply.slice(1)) : reply);
      return;
    }
  }

  close(reason = new UnavailableError('broke', true)): void {
    if (this.closed) return;
    this.closed = true;
    this.onClose?.();
    for (const { fail } of this.#pending) fail(reason);
    this.#pending.clear();
  }
}

/** A server that follows a script. Times are those of the test's clock. */
export class FakeServer implements Driver {
  readonly log: string[] = [];
  readonly connections: FakeConnection[] = [];
  /** The error of an attempt to connect; undefined: it succeeds. */
  refuse: ((address?: string) => Error | undefined) | undefined;
  /** Of a cluster: the addresses of the primaries. */
  addresses?: () => string[];
  /** Called with each connection that was opened. */
  accepted: ((connection: FakeConnection) => void) | undefined;
  attempts = 0;
  /** How long opening a connection takes, ms. */
  delay = 1;
  script: Script;
  version: unknown = ['protocol', [4, 4], 'version', '0.4.0', 'replicas-timeout', 1000];

  constructor(script: Script) {
    this.script = script;
  }

  /** `address`: of a node, if `addresses` makes this a cluster. */
  async connect(_timeout?: number, address?: string): Promise<Connection> {
    this.attempts++;
    await new Promise((resolve) => setTimeout(resolve, this.delay));
    const error = this.refuse?.(address);
    if (error) throw error;
    const connection = new FakeConnection(this, this.connections.length, address);
    this.connections.push(connection);
    this.accepted?.(connection);
    return connection;
  }

  act(args: readonly string[], connection: FakeConnection): Act {
    return args[0] === 'LOCK.VERSION' ? { reply: this.version } : this.script(args, connection);
  }

  /** What was sent, without owners and LOCK.VERSION. */
  get sent(): string[] {
    return this.log.filter((line) => line !== 'LOCK.VERSION').map((line) => line.replace(/[0-9a-f]{32}/, 'O'));
  }

  open(): number {
    return this.connections.filter((connection) => !connection.closed).length;
  }
}

/** Answers the n-th request of a verb with the n-th act, the later ones with the last. */
export function script(acts: Record<string, Act[]>): Script {
  const counts: Record<string, number> = {};
  return (args) => {
    const verb = (args[0] as string).replace('LOCK.', '') + (args[0] === 'LOCK.RELEASE' && args.includes('ALL') ? ' ALL' : '');
    const n = counts[verb] ?? 0;
    counts[verb] = n + 1;
    const list = acts[verb] ?? acts['*'] ?? [{ reply: 1 }];
    return list[Math.min(n, list.length - 1)] as Act;
  };
}

export const reply = (value: unknown, after?: number): Act => (after === undefined ? { reply: value } : { reply: value, after });
export const TOKEN = 1_700_000_000_000_000;
export const granted: Act = { reply: [TOKEN, 0] };
