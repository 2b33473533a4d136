import type { Connection, Outcome, Pipeline } from './driver.js';
import { ServerError, UnavailableError } from './errors.js';
import type { Pool, Priority, Taker } from './pool.js';
import { Alarm, now } from './time.js';

/** A pipeline that is sent once. */
export interface Exchange {
  /** The key whose server it goes to, or that server's pool. */
  readonly target: string | Pool;
  readonly priority: Priority;
  /** The lease that it is about: it bounds the pauses. */
  readonly lease: number;
  /** How long to wait for a connection and the replies, ms. */
  readonly timeout: number;
  /** The connection to use instead of one of the pool. */
  readonly own?: Connection | undefined;
  /** The commands, asked for right before they are written; none: they are not wanted any more. */
  commands(sent: number): Pipeline;
  /** Called when they are written. The sender decides then how long the replies may take: `timeout` is for the connection only. */
  written?(): void;
  /** Whether this is a reply to the command at this place, if it is neither nil nor an error. If not, the connection counts as broken. */
  readonly isReply?: ((reply: unknown, place: number) => boolean) | undefined;
  /** Whether the connection, after these replies, stays with the sender. */
  keeps?(replies: readonly unknown[]): boolean;
  /**
   * Called once: with the replies, an error reply as a {@link ServerError}; with an {@link UnavailableError} if there is no answer; with a
   * {@link ServerError} if the server refuses connections.
   */
  done(outcome: readonly unknown[] | Error, sent: number): void;
}

/** A pipeline that is sent again after an error that passes, and after a lost reply. */
export interface Request extends Pick<Exchange, 'target' | 'priority' | 'lease' | 'timeout' | 'own' | 'commands' | 'isReply'> {
  /** When to give up, by the monotonic clock. It is sent once at least. */
  end(): number;
  /** Called when a reply was lost. */
  broke?(): void;
  /** Whether it may be sent again then. Default true. */
  readonly repeatable?: boolean;
}

/** Knows which server serves what. */
export interface Router {
  pool(target: string | Pool): Pool;
  /** The reply; of a client for one server, a fatal error in place of a redirect, since no repetition would end otherwise. */
  checked(reply: unknown): unknown;
  /** Learns from error replies. Returns where to send the pipeline again, if all of them are redirects. */
  learn(
    target: string | Pool,
    pool: Pool,
    connection: Connection,
    replies: readonly unknown[],
  ): { pool: Pool; isAsking: boolean } | undefined;
  /** A server did not answer. */
  forget(pool: Pool): void;
}

/** An exchange under way. Follows one redirect. */
export class Sending implements Taker {
  readonly priority: Priority;
  readonly lease: number;
  readonly #router: Router;
  readonly #exchange: Exchange;
  readonly #end: number;
  #pool!: Pool;
  #connection: Connection | undefined;
  #sent = 0;
  /** Rings when the time for the connection or for the replies is over. */
  #alarm: Alarm | undefined;
  #isRedirected = false;
  #isAsking = false;

  constructor(router: Router, exchange: Exchange) {
    this.#router = router;
    this.#exchange = exchange;
    this.priority = exchange.priority;
    this.lease = exchange.lease;
    this.#end = now() + exchange.timeout;
    this.#start(router.pool(exchange.target));
  }

  take(connection: Connection): void {
    const { commands, written } = this.#exchange;
    this.#alarm?.cancel();
    this.#connection = connection;
    this.#sent = now();
    const pipeline = connection.closed ? [] : commands(this.#sent);
    if (pipeline.length === 0) {
      queueMicrotask(() => this.#answer(connection.closed ? new UnavailableError('the connection is closed', false) : []));
      return;
    }
    connection.send(this.#isAsking ? pipeline.flatMap((command) => [['ASKING'], command]) : pipeline, (outcome) => this.#answer(outcome));
    if (written) written();
    else {
      const left = this.#end - this.#sent;
      const silent = (): void => connection.close(new UnavailableError(`no reply within ${Math.round(left)} ms`, true));
      this.#alarm = new Alarm(left, silent);
    }
  }

  /** The connection that it was written to last; undefined while it waits for one. */
  get connection(): Connection | undefined {
    return this.#connection;
  }

  /** Ends it before it is answered. */
  abandon(reason: UnavailableError): void {
    if (this.#connection) this.#connection.close(reason);
    else this.fail(this.#pool.leave(this));
  }

  fail(error: Error): void {
    this.#alarm?.cancel();
    this.#router.forget(this.#pool);
    this.#exchange.done(error, this.#sent);
  }

  #start(pool: Pool): void {
    const { own } = this.#exchange;
    this.#pool = pool;
    this.#connection = own;
    // An idle connection is written to at once: what else there is to do is done while the server works.
    if (own) this.take(own);
    else pool.take(this);
    if (!this.#connection) this.#alarm = new Alarm(this.#end - now(), () => this.fail(pool.leave(this)));
  }

  #answer(outcome: Outcome): void {
    const { target, own, isReply, keeps, done } = this.#exchange;
    const connection = this.#connection as Connection;
    this.#alarm?.cancel();
    if (outcome instanceof Error) {
      this.#broke(connection, outcome);
      return;
    }
    const replies = (this.#isAsking ? outcome.filter((_, i) => i % 2 === 1) : outcome).map((reply) => this.#router.checked(reply));
    const isError = (reply: unknown): boolean => reply instanceof ServerError;
    if (isReply && !replies.every((reply, i) => reply === null || isError(reply) || isReply(reply, i))) {
      this.#broke(connection, new UnavailableError('the server answered what is no reply to this request', true));
      return;
    }
    const hasFailed = replies.some(isError);
    if (!hasFailed && replies.length > 0) this.#pool.succeeded();
    const next = hasFailed ? this.#router.learn(target, this.#pool, connection, replies) : undefined;
    if (keeps?.(replies)) this.#pool.detach(connection);
    else if (!own) this.#pool.give(connection);
    if (next && !this.#isRedirected) {
      this.#isRedirected = true;
      this.#isAsking = next.isAsking;
      this.#start(next.pool);
    } else done(replies, this.#sent);
  }

  #broke(connection: Connection, error: UnavailableError): void {
    if (this.#exchange.own) connection.close();
    else this.#pool.broke(connection);
    this.fail(error);
  }
}
