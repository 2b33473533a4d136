import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { connect, createServer, type Server, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const MODULE = process.env.HOLDFAST_MODULE;
const PROGRAM = process.env.HOLDFAST_SERVER ?? 'redis-server';

/** Waits for a condition. */
export async function until<T>(what: string, probe: () => T | Promise<T>, ms = 60_000): Promise<NonNullable<T>> {
  const end = performance.now() + ms;
  for (;;) {
    const value = await Promise.resolve()
      .then(probe)
      .catch(() => undefined);
    if (value) return value;
    if (performance.now() > end) throw new Error(`not within ${ms} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

/** Waits until the time to live of a key was prolonged. */
export async function renewed(redis: Redis, key: string): Promise<void> {
  let least = Number.POSITIVE_INFINITY;
  await until(`${key} is renewed`, () => {
    const left = Number(redis.cli('PTTL', key));
    least = Math.min(least, left);
    return left > least + 500;
  });
}

/** A port that was just free, low enough for a cluster bus port 10,000 above it. */
export async function freePort(): Promise<number> {
  for (;;) {
    const port = await new Promise<number>((resolve) => {
      const server = createServer().listen(0, '127.0.0.1', () => {
        const { port } = server.address() as { port: number };
        server.close(() => resolve(port));
      });
    });
    if (port < 55_000) return port;
  }
}

/** A server with the module, in a folder of its own. */
export class Redis {
  readonly folder = mkdtempSync(join(tmpdir(), 'holdfast-'));
  readonly socket = join(this.folder, 'redis.sock');
  readonly port: number;
  readonly #process: ChildProcess;
  #ended = false;

  private constructor(port: number, args: string[]) {
    this.port = port;
    const where = ['--port', String(port), '--bind', '127.0.0.1', '--unixsocket', this.socket, '--dir', this.folder];
    const settings = ['--logfile', join(this.folder, 'log'), '--save', '', '--enable-debug-command', 'yes'];
    this.#process = spawn(PROGRAM, [...where, ...settings, ...args], { stdio: 'ignore' });
    this.#process.once('exit', () => {
      this.#ended = true;
    });
  }

  /** Starts a server. Takes another port if another process has taken this one, or that of the cluster bus, meanwhile. */
  static async start(args: string[] = [], options: { module?: boolean } = {}): Promise<Redis> {
    if (!MODULE) throw new Error('HOLDFAST_MODULE must name the module');
    const load = options.module === false ? [] : ['--loadmodule', MODULE];
    for (;;) {
      const redis = new Redis(await freePort(), [...load, ...args]);
      await until(`server on port ${redis.port}`, () => redis.#ended || redis.cli('PING') === 'PONG');
      if (!redis.#ended) return redis;
      const log = readFileSync(join(redis.folder, 'log'), 'utf8');
      redis.stop();
      if (!log.includes('Address already in use')) throw new Error(`the server did not start: ${log}`);
    }
  }

  static async sentinel(primary: Redis, name: string): Promise<{ port: number; stop(): void; pause(): void; resume(): void }> {
    const folder = mkdtempSync(join(tmpdir(), 'holdfast-'));
    const port = await freePort();
    const file = join(folder, 'sentinel.conf');
    const lines = [`port ${port}`, 'bind 127.0.0.1', `dir ${folder}`, `sentinel monitor ${name} 127.0.0.1 ${primary.port} 1`];
    writeFileSync(file, [...lines, `sentinel down-after-milliseconds ${name} 500`, `sentinel failover-timeout ${name} 3000`].join('\n'));
    const child = spawn(PROGRAM, [file, '--sentinel'], { stdio: 'ignore' });
    await until('sentinel', () => execFileSync('redis-cli', ['-p', String(port), 'PING'], { stdio: ['ignore', 'pipe', 'ignore'] }));
    const stop = (): void => {
      child.kill('SIGKILL');
      rmSync(folder, { recursive: true, force: true });
    };
    return { port, stop, pause: () => child.kill('SIGSTOP'), resume: () => child.kill('SIGCONT') };
  }

  cli(...args: string[]): string {
    return execFileSync('redis-cli', ['-s', this.socket, ...args], { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim();
  }

  pause(): void {
    this.#process.kill('SIGSTOP');
  }

  resume(): void {
    this.#process.kill('SIGCONT');
  }

  /** Throws if the module has logged an internal error. */
  stop(): void {
    this.#process.kill('SIGKILL');
    const errors = readFileSync(join(this.folder, 'log'), 'utf8').match(/.*internal error.*/g);
    rmSync(this.folder, { recursive: true, force: true });
    if (errors) throw new Error(errors.join('\n'));
  }
}

/** A proxy that cuts both sides of a connection after a number of messages. */
export class CuttingProxy {
  readonly port: number;
  /** After how many chunks, of all connections together, the connection of the next one is cut. */
  cutAfter = Number.POSITIVE_INFINITY;
  passed = 0;
  cuts = 0;
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();

  private constructor(server: Server, port: number) {
    this.#server = server;
    this.port = port;
  }

  static start(target: string): Promise<CuttingProxy> {
    return new Promise((resolve) => {
      const server = createServer((client) => {
        const upstream = connect(target);
        proxy.#sockets.add(client).add(upstream);
        const both = [
          [client, upstream],
          [upstream, client],
        ] as [Socket, Socket][];
        for (const [from, to] of both) {
          from.on('error', () => {});
          from.on('close', () => {
            proxy.#sockets.delete(from);
            to.destroy();
          });
          from.on('data', (data) => {
            if (++proxy.passed > proxy.cutAfter) {
              proxy.cutAfter = Number.POSITIVE_INFINITY;
              proxy.cuts++;
              from.destroy();
              to.destroy();
            } else to.write(data);
          });
        }
      }).listen(0, '127.0.0.1', () => resolve(proxy));
      const proxy = new CuttingProxy(server, 0);
      server.on('listening', () => {
        (proxy as { port: number }).port = (server.address() as { port: number }).port;
      });
    });
  }

  stop(): void {
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
  }
}
