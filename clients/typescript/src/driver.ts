import { ServerError, UnavailableError } from './errors.js';
import { Alarm } from './time.js';

/** Commands that are written together. */
export type Pipeline = readonly (readonly string[])[];
/** The replies to a pipeline, an error reply as a {@link ServerError}; or why there are none. */
export type Outcome = readonly unknown[] | UnavailableError;

/** A connection to one server that only this package uses. */
export interface Connection {
  /** Writes a pipeline, and calls `done` once, later. */
  send(pipeline: Pipeline, done: (outcome: Outcome) => void): void;
  /** Whether it has ended, on either side. */
  readonly closed: boolean;
  /** Called once when the connection has ended, on either side. */
  onClose: (() => void) | undefined;
  /** Ends it at once. Pipelines under way fail, with `reason` if there is one. */
  close(reason?: UnavailableError): void;
}

/** Opens connections as the application's Redis client opens its own. */
export interface Driver {
  /**
   * Opens a connection, within `timeout` ms; of a cluster, to the node at `address` (`host:port`). The connection never repeats a request by itself.
   * Rejects with a {@link ServerError} if the server refuses, else with an {@link UnavailableError}.
   */
  connect(timeout: number, address?: string): Promise<Connection>;
  /** Of a cluster: the addresses (`host:port`) of the primaries that the Redis client knows. */
  addresses?(): string[];
}

/** What this package uses of a Redis library's client, of which it is the only user. */
export interface LibraryClient {
  connect(): Promise<unknown>;
  call(args: readonly string[]): Promise<unknown>;
  /** Closes the socket at once. */
  destroy(): void;
  on(event: string, listener: (cause?: unknown) => void): unknown;
}

/** Whether an error of a Redis library is an error reply: `CODE words…`. Errors of connections have another form. */
const isReply = (error: unknown): error is Error => error instanceof Error && /^[A-Z][A-Z0-9]+ /.test(error.message);

/** A library's error as one of this package. */
export function translate(error: unknown, sent: boolean): ServerError | UnavailableError {
  if (error instanceof ServerError || error instanceof UnavailableError) return error;
  return isReply(error) ? ServerError.from(error.message) : new UnavailableError('the connection broke', sent, error);
}

/** The reply to a command, which may be an error. Rejects with an {@link UnavailableError}. */
export const ask = (connection: Connection, command: readonly string[]): Promise<unknown> =>
  new Promise((resolve, reject) => {
    connection.send([command], (outcome) => (outcome instanceof Error ? reject(outcome) : resolve(outcome[0])));
  });

/** The parts of `host:port`. */
export function hostAndPort(address: string): { host: string; port: number } {
  const colon = address.lastIndexOf(':');
  return { host: address.slice(0, colon), port: Number(address.slice(colon + 1)) };
}

/** Rejects with an {@link UnavailableError} if this work, a part of connecting, takes longer than `timeout` ms. */
export function within<T>(timeout: number, work: Promise<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    const alarm = new Alarm(timeout, () => reject(new UnavailableError(`no connection within ${timeout} ms`, false)));
    void work.then(resolve, reject).finally(() => alarm.cancel());
  });
}

/**
 * Opens a connection with a client of a Redis library, within `timeout` ms. `ends`: the events that say that the socket has ended.
 * Requests under way fail then: not every library does that itself.
 */
export async function openConnection(client: LibraryClient, timeout: number, ends: readonly string[]): Promise<Connection> {
  // "Connection is closed." says less than the error before it.
  let cause: unknown;
  client.on('error', (error) => {
    cause ??= error;
  });
  try {
    await within(timeout, client.connect());
  } catch (error) {
    client.destroy();
    throw translate(cause ?? error, false);
  }
  const pending = new Set<(outcome: Outcome) => void>();
  const connection = {
    closed: false,
    onClose: undefined as (() => void) | undefined,
    send(pipeline: Pipeline, done: (outcome: Outcome) => void): void {
      const replies: unknown[] = [];
      let missing = pipeline.length;
      const finish = (outcome: Outcome): void => {
        if (pending.delete(finish)) done(outcome);
      };
      pending.add(finish);
      pipeline.forEach((command, i) => {
        const take = (reply: unknown): void => {
          replies[i] = reply;
          if (--missing === 0) finish(replies);
        };
        client.call(command).then(take, (error) => {
          const known = translate(error, true);
          if (known instanceof ServerError) take(known);
          else finish(known);
        });
      });
    },
    close(reason?: UnavailableError): void {
      end(reason);
      client.destroy();
    },
  };
  const end = (reason = new UnavailableError('the connection broke', true, cause)): void => {
    if (connection.closed) return;
    connection.closed = true;
    connection.onClose?.();
    for (const finish of pending) finish(reason);
  };
  for (const event of ends) client.on(event, () => end());
  return connection;
}
