import { type Connection, type Driver, hostAndPort, openConnection, within } from './driver.js';
import { UnavailableError } from './errors.js';
import { now } from './time.js';

/** What this package uses of a client of node-redis. */
export interface NodeRedisClient {
  sendCommand(args: string[]): Promise<unknown>;
  // The generics of two versions do not assign to each other: hence `object` and `unknown`.
  duplicate(override: object): unknown;
  readonly options?: object | undefined;
}

/** What this package uses of a cluster of node-redis. */
export interface NodeRedisCluster {
  readonly masters: readonly { readonly address: string }[];
  nodeClient(node: never): unknown;
}

/** What this package uses of a Sentinel client of node-redis. */
export interface NodeRedisSentinel {
  getMasterNode(): { host: string; port: number } | undefined;
  _execute(readOnly: boolean, work: never): Promise<unknown>;
}

/** What this package uses of a duplicate. */
interface Duplicate extends NodeRedisClient {
  connect(): Promise<unknown>;
  destroy(): void;
  unref(): void;
  on(event: string, listener: (cause?: unknown) => void): unknown;
}

/** Opens connections as a client (standalone, TLS, unix socket), cluster or Sentinel client of node-redis does. A client need not be connected; a cluster and a Sentinel client must be. Throws a `TypeError` for anything else. */
export function fromNodeRedis(redis: NodeRedisClient | NodeRedisCluster | NodeRedisSentinel): Driver {
  if ('nodeClient' in redis) return clusterDriver(redis);
  if ('getMasterNode' in redis) return sentinelDriver(redis);
  if (!('duplicate' in redis) || 'call' in redis) throw new TypeError('fromNodeRedis needs a client of node-redis, not a pool');
  return { connect: (timeout) => open(redis, timeout, {}) };
}

function sentinelDriver(sentinel: NodeRedisSentinel): Driver {
  let template: NodeRedisClient | undefined;
  let last: { host: string; port: number } | undefined;
  return {
    async connect(timeout) {
      const end = now() + timeout;
      const same = ((client: unknown) => Promise.resolve(client)) as never;
      template ??= (await within(timeout, sentinel._execute(false, same))) as NodeRedisClient; // The library waits for a primary.
      last = sentinel.getMasterNode() ?? last; // The library looks for the primary in the background.
      return open(template, Math.max(1, end - now()), last ? { host: last.host, port: last.port } : {});
    },
  };
}

function clusterDriver(cluster: NodeRedisCluster): Driver {
  let template: NodeRedisClient | undefined;
  let known: string[] = [];
  return {
    addresses() {
      const current = cluster.masters.map((node) => node.address);
      if (current.length > 0) known = current;
      return known;
    },
    async connect(timeout, address = '') {
      const end = now() + timeout;
      const node = cluster.masters.find((node) => node.address === address) ?? cluster.masters[0];
      if (!template && !node) throw new UnavailableError('no node of the cluster is known: is the client connected?', false);
      template ??= (await within(timeout, Promise.resolve(cluster.nodeClient(node as never)))) as NodeRedisClient; // The library waits for the node.
      return open(template, Math.max(1, end - now()), hostAndPort(address));
    },
  };
}

function open(template: NodeRedisClient, timeout: number, address: object): Promise<Connection> {
  const { socket } = (template.options ?? {}) as { socket?: object };
  const client = template.duplicate({
    // The library has read the URL into the other options. A URL would override the address.
    url: undefined,
    socket: { ...socket, ...address, reconnectStrategy: false, connectTimeout: timeout, socketTimeout: undefined },
    pingInterval: undefined,
    disableOfflineQueue: true,
    commandOptions: { timeout: undefined },
    readonly: false,
    keyPrefix: undefined,
    clientSideCache: undefined,
    maintNotifications: 'disabled',
    commandsQueueMaxLength: undefined,
  }) as Duplicate;
  client.unref();
  const library = {
    connect: () => client.connect(),
    call: (args: readonly string[]) => client.sendCommand(args as string[]),
    destroy: () => {
      try {
        client.destroy();
      } catch {
        // It is closed already.
      }
    },
    on: (event: string, listener: (cause?: unknown) => void) => client.on(event, listener),
  };
  return openConnection(library, timeout, ['end', 'error', 'reconnecting', 'terminated']);
}
