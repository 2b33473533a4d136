import { ServerError, UnavailableError } from './errors.js';

/** A connection of our own to one server. At most one request, or one pipeline, is under way on it. */
export interface Connection {
  /** Resolves with the reply. Rejects with a {@link ServerError} if the reply is an error, else with an {@link UnavailableError}. */
  send(args: readonly string[]): Promise<unknown>;
  readonly closed: boolean;
  /** Called once when the connection has ended, on either side. */
  onClose: (() => void) | undefined;
  close(): void;
}

/** Opens connections as the application's Redis client opens its own. */
export interface Driver {
  /** Opens a connection, within `timeout` ms; of a cluster, to the node at `address` (`host:port`). Never repeats a request by itself. */
  connect(timeout: number, address?: string): Promise<Connection>;
  /** Of a cluster: the addresses of the primaries that the Redis client knows. */
  addresses?(): string[];
}

/** What the adapters of Redis libraries give to {@link libraryConnection}. */
export interface LibraryClient {
  call(args: readonly string[]): Promise<unknown>;
  /** Closes the socket at once. */
  destroy(): void;
  /** Registers a listener for every event that says that the socket is gone. */
  onEnd(listener: (cause?: unknown) => void): void;
}

/** Whether an error of a Redis library is an error reply: `CODE words…`. Errors of connections are not written so. */
const isReply = (error: unknown): error is Error => error instanceof Error && /^[A-Z][A-Z0-9]+ /.test(error.message);

/** The error of a library as one of ours. */
export function translate(error: unknown, sent: boolean): ServerError | UnavailableError {
  if (error instanceof ServerError || error instanceof UnavailableError) return error;
  return isReply(error) ? ServerError.from(error.message) : new UnavailableError('the connection broke', sent, error);
}

/** A connection over a client of a Redis library that serves nobody else. Requests under way fail when the socket ends: not every library sees to that. */
export function libraryConnection(client: LibraryClient): Connection {
  const pending = new Set<(error: UnavailableError) => void>();
  const connection = {
    closed: false,
    onClose: undefined as (() => void) | undefined,
    send: (args: readonly string[]): Promise<unknown> =>
      new Promise((resolve, reject) => {
        if (connection.closed) return reject(new UnavailableError('the connection is closed', false));
        pending.add(reject);
        const settle = (): boolean => pending.delete(reject);
        client.call(args).then(
          (reply) => settle() && resolve(reply),
          (error) => settle() && reject(translate(error, true)),
        );
      }),
    close(): void {
      end();
      client.destroy();
    },
  };
  const end = (cause?: unknown): void => {
    if (connection.closed) return;
    connection.closed = true;
    for (const reject of pending) reject(new UnavailableError('the connection broke', true, cause));
    pending.clear();
    connection.onClose?.();
  };
  client.onEnd(end);
  return connection;
}

/** Ends `opening` after `timeout` ms: the client is destroyed, and what it says later is ignored. */
export async function connectWithin(timeout: number, opening: Promise<unknown>, destroy: () => void): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new UnavailableError(`no connection within ${timeout} ms`, false)), timeout);
    timer.unref();
  });
  try {
    await Promise.race([opening, late]);
  } catch (error) {
    destroy();
    throw translate(error, false);
  } finally {
    clearTimeout(timer);
  }
}
