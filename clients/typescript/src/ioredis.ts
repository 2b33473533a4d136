import { type Connection, type Driver, hostAndPort, openConnection } from './driver.js';
import { UnavailableError } from './errors.js';

/** What this package uses of a `Redis` of ioredis or iovalkey. */
export interface IoredisClient {
  call(command: string, ...args: string[]): Promise<unknown>;
  // The generics of two versions do not assign to each other: hence `object` and `unknown`.
  duplicate(override: object): unknown;
}

/** What this package uses of a `Cluster` of ioredis or iovalkey. */
export interface IoredisCluster {
  nodes(role: 'master'): unknown[];
}

/** What this package uses of a duplicate. */
interface Duplicate extends IoredisClient {
  connect(): Promise<unknown>;
  disconnect(): void;
  on(event: string, listener: (cause?: unknown) => void): unknown;
  readonly stream?: { unref?(): unknown; remoteAddress?: string; remotePort?: number };
  readonly options: { host?: string | null; port?: number | null; sentinels?: unknown };
}

/** Settings of our connections: they do not reconnect, repeat or time out by themselves, and change no key or reply. */
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

/** Opens connections as a `Redis` (standalone, Sentinel, TLS, unix socket) or `Cluster` of ioredis or iovalkey does. It need not be connected. Throws a `TypeError` for anything else. */
export function fromIoredis(redis: IoredisClient | IoredisCluster): Driver {
  if ('nodes' in redis) return clusterDriver(redis);
  if (!('call' in redis)) throw new TypeError('fromIoredis needs a Redis or a Cluster of ioredis');
  if (!(redis as Duplicate).options?.sentinels) return { connect: async (timeout) => (await open(redis, timeout, {})).connection };
  let last: object | undefined;
  return {
    async connect(timeout) {
      // If the look-up hangs or fails, the last known address is used; a former primary answers with -READONLY.
      const direct = last;
      const begun = performance.now();
      try {
        const { connection, stream } = await open(redis, direct ? timeout / 2 : timeout, {});
        if (stream?.remoteAddress) last = { sentinels: undefined, host: stream.remoteAddress, port: stream.remotePort };
        return connection;
      } catch (error) {
        if (!direct) throw error;
        return (await open(redis, Math.max(1, timeout - (performance.now() - begun)), direct)).connection;
      }
    },
  };
}

function clusterDriver(cluster: IoredisCluster): Driver {
  const known = new Map<string, Duplicate>();
  const addresses = (): string[] => {
    const { status, connect } = cluster as { status?: string; connect?: () => Promise<unknown> };
    if (status === 'wait') connect?.call(cluster).catch(() => {});
    const current = (cluster.nodes('master') as Duplicate[]).map((node) => {
      const address = `${node.options.host}:${node.options.port}`;
      known.set(address, node);
      return address;
    });
    return current.length > 0 ? current : [...known.keys()];
  };
  return {
    addresses,
    async connect(timeout, address = '') {
      const [any] = known.values();
      const template = known.get(address) ?? any;
      if (!template) throw new UnavailableError('no node of the cluster is known', false);
      return (await open(template, timeout, hostAndPort(address))).connection;
    },
  };
}

async function open(
  template: IoredisClient,
  timeout: number,
  override: object,
): Promise<{ connection: Connection; stream: Duplicate['stream'] }> {
  const client = template.duplicate({ ...OVERRIDES, connectTimeout: timeout, ...override }) as Duplicate;
  const library = {
    connect: async (): Promise<void> => {
      await client.connect();
      client.stream?.unref?.();
    },
    call: ([command = '', ...args]: readonly string[]) => client.call(command, ...args),
    destroy: () => client.disconnect(),
    on: (event: string, listener: (cause?: unknown) => void) => client.on(event, listener),
  };
  return { connection: await openConnection(library, timeout, ['close', 'end']), stream: client.stream };
}
