import { type Connection, connectWithin, type Driver, libraryConnection } from './driver.js';

/** What is used of a `Redis` of ioredis or iovalkey. */
export interface IoredisClient {
  call(command: string, ...args: string[]): Promise<unknown>;
  // The generics of two versions do not assign to each other: hence `object` and `unknown`.
  duplicate(override: object): unknown;
}

/** What is used of a `Cluster` of ioredis or iovalkey. */
export interface IoredisCluster {
  nodes(role: 'master'): unknown[];
}

/** What a duplicate has, too. */
interface Duplicate extends IoredisClient {
  connect(): Promise<unknown>;
  disconnect(): void;
  on(event: string, listener: (cause?: unknown) => void): unknown;
  readonly stream?: { unref?(): unknown; remoteAddress?: string; remotePort?: number };
  readonly options: { host?: string | null; port?: number | null; sentinels?: unknown; tls?: object };
}

/** Our own connections do not reconnect, repeat or time out by themselves, and speak plain RESP. */
const OVERRIDES = {
  retryStrategy: () => null,
  sentinelRetryStrategy: () => null,
  reconnectOnError: null,
  autoResendUnfulfilledCommands: false,
  enableOfflineQueue: false,
  enableReadyCheck: false,
  enableAutoPipelining: false,
  maxRetriesPerRequest: null,
  commandTimeout: undefined,
  socketTimeout: undefined,
  blockingTimeout: undefined,
  failoverDetector: false,
  keyPrefix: '',
  readOnly: false,
  stringNumbers: false,
  autoSubscribe: false,
  monitor: false,
  lazyConnect: true,
};

/** Connections like those of a `Redis` (standalone, Sentinel, TLS, unix socket) or `Cluster` of ioredis or iovalkey. It need not be connected. */
export function fromIoredis(redis: IoredisClient | IoredisCluster): Driver {
  if ('nodes' in redis) return clusterDriver(redis);
  const { options } = redis as Duplicate;
  if (!options?.sentinels) return { connect: (timeout) => open(redis, timeout, {}) };
  let last: object | undefined;
  return {
    async connect(timeout) {
      // The last known address is used while the look-up hangs or fails; a former primary answers with -READONLY.
      const direct = last;
      const begun = performance.now();
      try {
        return await open(redis, direct ? timeout / 2 : timeout, {}, (stream) => {
          if (stream.remoteAddress) last = { sentinels: undefined, host: stream.remoteAddress, port: stream.remotePort };
        });
      } catch (error) {
        if (!direct) throw error;
        return open(redis, Math.max(1, timeout - (performance.now() - begun)), direct);
      }
    },
  };
}

function clusterDriver(cluster: IoredisCluster): Driver {
  const nodes = (): Duplicate[] => {
    const { status, connect } = cluster as { status?: string; connect?: () => Promise<unknown> };
    if (status === 'wait') connect?.call(cluster).catch(() => {});
    return cluster.nodes('master') as Duplicate[];
  };
  const seeds = new Map<string, Duplicate>();
  const addresses = (): string[] => {
    for (const node of nodes()) seeds.set(`${node.options.host}:${node.options.port}`, node);
    const current = nodes().map((node) => `${node.options.host}:${node.options.port}`);
    return current.length > 0 ? current : [...seeds.keys()];
  };
  return {
    addresses,
    connect(timeout, address = '') {
      addresses();
      const template = seeds.get(address) ?? [...seeds.values()][0];
      if (!template) return Promise.reject(new Error(address));
      const [, host, port] = /^(.*):(\d+)$/.exec(address) as unknown as [string, string, string];
      return open(template, timeout, { host, port: Number(port) });
    },
  };
}

async function open(
  template: IoredisClient,
  timeout: number,
  override: object,
  connected?: (stream: NonNullable<Duplicate['stream']>) => void,
): Promise<Connection> {
  const client = template.duplicate({ ...OVERRIDES, connectTimeout: timeout, ...override }) as Duplicate;
  let cause: unknown;
  client.on('error', (error) => {
    cause ??= error;
  });
  const opening = client.connect().catch((error) => {
    throw cause ?? error; // "Connection is closed." says less than the error before it.
  });
  client.stream?.unref?.();
  await connectWithin(timeout, opening, () => client.disconnect());
  client.stream?.unref?.();
  if (client.stream) connected?.(client.stream);
  return libraryConnection({
    call: ([command = '', ...args]) => client.call(command, ...args),
    destroy: () => client.disconnect(),
    onEnd: (listener) => {
      client.on('close', () => listener(cause));
      client.on('end', () => listener(cause));
    },
  });
}
