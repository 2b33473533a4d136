import { AsyncLocalStorage } from 'node:async_hooks';
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Cluster, Redis as Ioredis } from 'ioredis';
import { Redis as Iovalkey } from 'iovalkey';
import { createClient, createClientPool, createCluster, createSentinel } from 'redis';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type Driver, Holdfast, NotAcquiredError } from '../src/index.js';
import { fromIoredis } from '../src/ioredis.js';
import { fromNodeRedis } from '../src/node-redis.js';
import { CuttingProxy, freePort, Redis, until } from './redis.js';

test('node_redis_driver_rejects_in_time_when_the_library_waits_for_a_node', async () => {
  const template = createClient();
  const masters = [{ address: 'down:1' }, { address: '127.0.0.1:1' }];
  const nodeClient = async ({ address }: { address: string }): Promise<unknown> =>
    address === 'down:1' ? new Promise(() => {}) : template;
  const cluster = fromNodeRedis({ masters, nodeClient });
  await expect(cluster.connect(100, 'down:1')).rejects.toMatchObject({ code: 'UNAVAILABLE', message: 'no connection within 100 ms' });
  await expect(cluster.connect(60_000, '127.0.0.1:1')).rejects.toThrow('ECONNREFUSED');
  const sentinel = fromNodeRedis({ getMasterNode: () => undefined, _execute: () => new Promise(() => {}) });
  await expect(sentinel.connect(100)).rejects.toMatchObject({ code: 'UNAVAILABLE', message: 'no connection within 100 ms' });
});

test.each([
  ['ioredis', () => fromIoredis({ nodes: () => [] })],
  ['node_redis', () => fromNodeRedis({ masters: [], nodeClient: () => {} })],
])('call_rejects_with_the_reason_when_%s_knows_no_node_of_the_cluster', async (_, driver) => {
  const holdfast = new Holdfast(driver());
  await expect(holdfast.lock('a', { wait: 100 })).rejects.toThrow('in time: cannot connect: no node of the cluster is known');
  await holdfast.close();
});

test('driver_refuses_a_client_of_another_library', () => {
  const [ours, theirs] = [createClient(), new Ioredis({ lazyConnect: true })];
  for (const client of [theirs, createClientPool(), ours.legacy()] as unknown as (typeof ours)[])
    expect(() => fromNodeRedis(client)).toThrow('fromNodeRedis needs a client');
  expect(() => fromIoredis(ours as unknown as Ioredis)).toThrow('fromIoredis needs a Redis');
});

/** Uses the features that every kind of connection must have. */
async function exercise(holdfast: Holdfast, names: readonly string[]): Promise<void> {
  for (const name of names) {
    const hold = await holdfast.lock(name, { wait: 60_000 });
    expect(await holdfast.tryLock(name)).toBeNull();
    const next = holdfast.lock(name, { wait: 60_000 });
    await until('it waits', async () => (await holdfast.waiters(name)).length === 1);
    expect(await hold.check()).toBe(true);
    await hold.renew();
    await hold.release();
    const second = await next;
    expect(second.fence).toBeGreaterThan(hold.fence);
    expect((await holdfast.info(name))?.holders[0]).toMatchObject({ owner: second.owner, token: second.fence });

    const controller = new AbortController();
    const cancelled = holdfast.lock(name, { signal: controller.signal });
    await until('it waits', async () => (await holdfast.waiters(name)).length === 1);
    controller.abort('why');
    await expect(cancelled).rejects.toBe('why');
    await until('it was withdrawn', async () => (await holdfast.waiters(name)).length === 0);

    expect(await holdfast.force(name)).toBe(1);
    await expect(second.release()).rejects.toMatchObject({ code: 'LOCK_LOST' });
    const ephemeral = await holdfast.lock(name, { ephemeral: true });
    expect((await holdfast.info(name))?.holders[0]?.ephemeral).toBe(true);
    await ephemeral.release();
    expect(await holdfast.info(name)).toBeNull();
  }
  await expect(holdfast.using('{tag}a', () => holdfast.lock('{tag}a', { wait: 50 }))).rejects.toBeInstanceOf(NotAcquiredError);
  await holdfast.using(['{tag}a', '{tag}b'], async (signal) => expect(signal.aborted).toBe(false));
  const { read, write } = holdfast.readWriteLock('{tag}rw');
  await read.using(async () => {
    await read.using(async () => expect(await write.tryLock()).toBeNull());
  });
  const semaphore = holdfast.semaphore('{tag}s', 2);
  await using first = await semaphore.lock();
  await using second = await semaphore.lock();
  expect([first.isHeld, second.isHeld, await semaphore.tryLock()]).toEqual([true, true, null]);
}

/** Runs `exercise` with a driver, and closes the client. */
async function run(driver: Driver, names: readonly string[] = ['a'], then?: (holdfast: Holdfast) => Promise<void>): Promise<void> {
  const holdfast = new Holdfast(driver);
  try {
    await exercise(holdfast, names);
    await then?.(holdfast);
  } finally {
    await holdfast.close();
  }
}

describe('standalone', () => {
  let redis: Redis;
  /** Undefined if this server was built without TLS. */
  let certificates: { ca: string; port: number } | undefined;
  beforeAll(async () => {
    const tlsPort = await freePort();
    redis = await Redis.start();
    const file = (name: string): string => join(redis.folder, name);
    execFileSync(
      'openssl',
      [
        'req',
        '-x509',
        '-newkey',
        'rsa:2048',
        '-nodes',
        '-days',
        '2',
        '-subj',
        '/CN=localhost',
        '-addext',
        'subjectAltName=DNS:localhost,IP:127.0.0.1',
        '-keyout',
        file('key'),
        '-out',
        file('crt'),
      ],
      { stdio: 'ignore' },
    );
    const settings = { 'tls-cert-file': 'crt', 'tls-key-file': 'key', 'tls-ca-cert-file': 'crt' };
    try {
      for (const [name, value] of Object.entries(settings)) redis.cli('CONFIG', 'SET', name, file(value));
      redis.cli('CONFIG', 'SET', 'tls-auth-clients', 'no');
      redis.cli('CONFIG', 'SET', 'tls-port', String(tlsPort));
      certificates = { ca: readFileSync(file('crt'), 'utf8'), port: tlsPort };
    } catch {
      certificates = undefined;
      redis.stop(); // Valkey 9.1 without TLS exits when the setting is changed.
      redis = await Redis.start();
    }
    redis.cli('ACL', 'SETUSER', 'locker', 'on', '>secret', '~*', '&*', '+@all');
  });
  afterAll(() => redis.stop());

  test('ioredis_works_over_a_unix_socket', () => run(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true, keyPrefix: 'ignored:' }))));
  test('iovalkey_works_over_a_unix_socket', () => run(fromIoredis(new Iovalkey(redis.socket, { lazyConnect: true }))));
  test('node_redis_works_over_a_unix_socket', () => run(fromNodeRedis(createClient({ socket: { path: redis.socket, tls: false } }))));
  test('ioredis_uses_its_user_and_database', async () => {
    const library = new Ioredis(redis.port, { username: 'locker', password: 'secret', db: 3, lazyConnect: true, stringNumbers: true });
    await run(fromIoredis(library), ['db'], async (holdfast) => {
      await using _ = await holdfast.lock('three');
      expect(redis.cli('-n', '3', 'EXISTS', 'three')).toBe('1');
    });
  });
  test('node_redis_uses_its_user_and_database', async () => {
    const library = createClient({ url: `redis://locker:secret@127.0.0.1:${redis.port}/4` });
    await run(fromNodeRedis(library), ['db'], async (holdfast) => {
      await using _ = await holdfast.lock('four');
      expect(redis.cli('-n', '4', 'EXISTS', 'four')).toBe('1');
    });
  });
  test('node_redis_works_with_resp2', () => run(fromNodeRedis(createClient({ RESP: 2, socket: { port: redis.port } }))));
  test('ioredis_works_over_tls', async ({ skip }) => {
    if (!certificates) return skip('this server was built without TLS');
    const { ca, port } = certificates;
    await run(fromIoredis(new Ioredis({ port, tls: { ca, servername: 'localhost' }, lazyConnect: true })));
  });
  test('node_redis_works_over_tls', async ({ skip }) => {
    if (!certificates) return skip('this server was built without TLS');
    const { ca, port } = certificates;
    await run(fromNodeRedis(createClient({ socket: { host: 'localhost', port, tls: true, ca } })));
  });

  test.each([
    ['ioredis', () => fromIoredis(new Ioredis(redis.port, { username: 'locker', password: 'wrong', lazyConnect: true }))],
    ['node_redis', () => fromNodeRedis(createClient({ url: `redis://locker:wrong@127.0.0.1:${redis.port}` }))],
  ])('wrong_password_is_reported_by_%s', async (_, driver) => {
    const holdfast = new Holdfast(driver());
    await expect(holdfast.lock('a', { wait: 60_000 })).rejects.toMatchObject({ code: 'WRONGPASS' });
    await holdfast.close();
  });

  test.each([
    ['ioredis', (port: number) => fromIoredis(new Ioredis(port, { lazyConnect: true }))],
    ['node_redis', (port: number) => fromNodeRedis(createClient({ socket: { host: '127.0.0.1', port } }))],
  ])('nothing_is_left_when_%s_connections_are_cut_at_every_message', async (name, driver) => {
    const proxy = await CuttingProxy.start(redis.socket);
    try {
      for (let cutAfter = 0, done = false; !done; cutAfter++) {
        proxy.passed = 0;
        proxy.cutAfter = cutAfter;
        const cuts = proxy.cuts;
        const holdfast = new Holdfast(driver(proxy.port), { lease: 60_000 });
        const key = `${name}${cutAfter}`;
        const hold = await holdfast.lock(key, { wait: 60_000 });
        const next = holdfast.lock(key, { wait: 60_000 });
        await hold.renew();
        await hold.release();
        await (await next).release();
        await holdfast.close();
        await until('everything is released', () => redis.cli('EXISTS', key) === '0');
        expect(redis.cli('LOCK.WAITERS', key)).toBe('');
        done = proxy.cuts === cuts;
        if (cutAfter > 60) throw new Error('there is no end');
      }
    } finally {
      proxy.stop();
    }
  });

  test('hold_survives_a_pause_of_the_server_within_its_lease', async () => {
    const holdfast = new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })));
    const holds = await Promise.all(Array.from({ length: 20 }, (_, i) => holdfast.lock(`paused${i}`, { lease: 8000 })));
    redis.pause();
    const wait = holdfast.lock('paused0', { wait: 60_000 });
    // The first renewals are due after 2 s, and get no answer.
    await new Promise((resolve) => setTimeout(resolve, 2200));
    redis.resume();
    await until('they are renewed', () => holds.every((hold) => hold.remaining > 6500));
    await Promise.all(holds.map((hold) => hold.release()));
    await (await wait).release();
    await holdfast.close();
  });

  test.each(['actor', 'no_actor'])('cycle_of_waits_with_%s_of_async_local_storage_ends', async (option) => {
    const storage = new AsyncLocalStorage<string>();
    const options = option === 'actor' ? { actor: () => storage.getStore() } : {};
    const holdfast = new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })), options);
    const task = (actor: string, first: string, second: string): Promise<unknown> =>
      storage.run(actor, async () => {
        await using _ = await holdfast.lock(first);
        await until('both hold one', async () => (await holdfast.info(second)) !== null);
        return await holdfast.using(second, async () => 'both', { wait: 1000 }).catch((error) => error.code);
      });
    const outcomes = await Promise.all([task('1', 'x', 'y'), task('2', 'y', 'x')]);
    expect(outcomes.includes('DEADLOCK')).toBe(option === 'actor');
    expect(outcomes.includes('NOT_ACQUIRED')).toBe(option === 'no_actor');
    await holdfast.close();
  });

  test('abort_signal_any_cancels_a_wait_and_reports_a_loss', async () => {
    const holdfast = new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })));
    const hold = await holdfast.lock('any');
    const controller = new AbortController();
    const wait = holdfast.lock('any', { signal: AbortSignal.any([controller.signal, hold.signal]) });
    await until('it waits', async () => (await holdfast.waiters('any')).length === 1);
    controller.abort('why');
    await expect(wait).rejects.toBe('why');
    const either = AbortSignal.any([hold.signal, new AbortController().signal]);
    await holdfast.force('any');
    expect([await hold.check(), either.reason.code]).toEqual([false, 'LOCK_LOST']);
    await holdfast.close();
  });

  test('lock_rejects_when_the_server_lacks_the_module', async () => {
    const plain = await Redis.start([], { module: false });
    const holdfast = new Holdfast(fromIoredis(new Ioredis(plain.socket, { lazyConnect: true })));
    await expect(holdfast.lock('a')).rejects.toMatchObject({ code: 'MODULE_NOT_LOADED' });
    await holdfast.close();
    plain.stop();
  });

  test('ephemeral_leader_is_replaced_when_its_connection_ends', async () => {
    const [first, second] = [1, 2].map(() => new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })))) as [
      Holdfast,
      Holdfast,
    ];
    const events: string[] = [];
    // The lease is longer than the test: only the end of the connection ends the term.
    const a = first.elect('ephemeral', {
      ephemeral: true,
      lease: 3_600_000,
      onElected: () => void events.push('a'),
      onLost: (reason) => void events.push(reason),
    });
    await until('a leads', () => a.isLeader);
    const b = second.elect('ephemeral', { ephemeral: true, onElected: () => void events.push('b') });
    await until('b waits', async () => (await second.waiters('ephemeral')).length === 1);
    const holder = /client\n(\d+)/.exec(redis.cli('LOCK.INFO', 'ephemeral'))?.[1] ?? '';
    redis.cli('CLIENT', 'KILL', 'ID', holder);
    await until('b leads', () => b.isLeader);
    await until('a knows', () => events.includes('disconnected'));
    await b.resign();
    await until('a leads again', () => a.isLeader);
    expect(events.filter((event) => event !== 'disconnected')).toEqual(['a', 'b', 'a']);
    await a.resign();
    expect(await second.leader('ephemeral')).toBeNull();
    await Promise.all([first.close(), second.close()]);
  });

  test('leader_with_replicas_is_known_to_the_replica_and_nobody_is_elected_without_it', async () => {
    const primary = await Redis.start();
    const replica = await Redis.start(['--replicaof', '127.0.0.1', String(primary.port), '--repl-diskless-sync-delay', '0']);
    await until('the replica follows', () => /state=online/.test(primary.cli('INFO', 'replication')));
    const holdfast = new Holdfast(fromIoredis(new Ioredis(primary.socket, { lazyConnect: true })));
    const terms: number[] = [];
    const stand = () => holdfast.elect('leader', { replicas: 1, lease: 60_000, onElected: (hold) => void terms.push(hold.fence) });
    const first = stand();
    await until('it leads', () => terms.length === 1);
    expect(replica.cli('HGET', 'leader', '#fence')).toBe(String(terms[0]));
    await first.resign();
    replica.stop();
    const asked = (): number => Number(/cmdstat_lock\.acquire:calls=(\d+)/.exec(primary.cli('INFO', 'commandstats'))?.[1]);
    const before = asked();
    const second = stand();
    await until('it was refused, and has asked again', () => asked() >= before + 2);
    expect([terms.length, second.isLeader]).toEqual([1, false]);
    await second.resign();
    await holdfast.close();
    primary.stop();
  });

  test('elect_hands_over_at_once_when_leader_resigns', async () => {
    const [first, second] = [1, 2].map(() => new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })))) as [
      Holdfast,
      Holdfast,
    ];
    const events: string[] = [];
    const controller = new AbortController();
    const seen: unknown[] = [];
    const watching = (async () => {
      for await (const leader of first.observe('leader', { interval: 20, signal: controller.signal })) seen.push(leader?.value ?? null);
    })();
    const a = first.elect('leader', { value: 'a:1#%', onElected: () => void events.push('a') });
    await until('a leads', () => a.isLeader);
    expect(await second.leader('leader')).toEqual({ value: 'a:1#%', fence: a.term });
    const b = second.elect('leader', {
      value: 'b',
      lease: 5000,
      onElected: () => void events.push('b'),
      onLost: (reason) => void events.push(reason),
    });
    await until('b waits', async () => (await first.waiters('leader')).length === 1);
    await until('the observer has seen it', () => seen.includes('a:1#%'));
    const { term = 0 } = a;
    await a.resign();
    await until('b leads', () => b.isLeader);
    expect(b.term).toBeGreaterThan(term);
    await first.force('leader');
    await until('b leads again', () => events.length === 4);
    expect(events).toEqual(['a', 'b', 'gone', 'b']);
    await until('the observer has seen it', () => seen.includes('b'));
    await b.resign();
    await until('nobody leads', () => seen.at(-1) === null);
    controller.abort();
    await watching;
    expect(seen.filter((value) => value !== null)).toEqual(expect.arrayContaining(['a:1#%', 'b']));
    await Promise.all([first.close(), second.close()]);
  });
});

describe('cluster', () => {
  let nodes: Redis[];
  beforeAll(async () => {
    nodes = await Promise.all([1, 2].map(() => Redis.start(['--cluster-enabled', 'yes'])));
    const [a, b] = nodes as [Redis, Redis];
    a.cli('CLUSTER', 'ADDSLOTSRANGE', '0', '8191');
    b.cli('CLUSTER', 'ADDSLOTSRANGE', '8192', '16383');
    a.cli('CLUSTER', 'MEET', '127.0.0.1', String(b.port));
    for (const node of nodes)
      await until(
        'the cluster is well',
        () => /cluster_state:ok/.test(node.cli('CLUSTER', 'INFO')) && /cluster_known_nodes:2/.test(node.cli('CLUSTER', 'INFO')),
      );
  });
  afterAll(() => {
    for (const node of nodes) node.stop();
  });

  /** Moves the slot of a key to the other node, while the lock is held and a request waits for it. */
  async function move(holdfast: Holdfast, name: string): Promise<void> {
    const [a, b] = nodes as [Redis, Redis];
    const slot = a.cli('CLUSTER', 'KEYSLOT', name);
    const [from, to] = (Number(slot) < 8192 ? [a, b] : [b, a]) as [Redis, Redis];
    const hold = await holdfast.lock(name, { wait: 60_000 });
    const next = holdfast.lock(name, { wait: 60_000 });
    await until('it waits', async () => (await holdfast.waiters(name)).length === 1);
    const [source, target] = [from.cli('CLUSTER', 'MYID'), to.cli('CLUSTER', 'MYID')];
    to.cli('CLUSTER', 'SETSLOT', slot, 'IMPORTING', source);
    from.cli('CLUSTER', 'SETSLOT', slot, 'MIGRATING', target);
    from.cli('MIGRATE', '127.0.0.1', String(to.port), name, '0', '5000');
    for (const node of [to, from]) node.cli('CLUSTER', 'SETSLOT', slot, 'NODE', target);
    await hold.renew();
    await hold.release();
    await (await next).release();
  }

  test('ioredis', async () => {
    const library = new Cluster([{ host: '127.0.0.1', port: (nodes[0] as Redis).port }]);
    await run(fromIoredis(library), ['a', 'b', 'c', 'd'], async (holdfast) => {
      await move(holdfast, 'moving1');
      await Promise.all(Array.from({ length: 20 }, (_, i) => holdfast.using(`k${i}`, async () => {})));
      expect(await holdfast.scan('none')).toEqual([]);
    });
    library.disconnect();
  });

  test('node_redis', async () => {
    const library = createCluster({ rootNodes: [{ socket: { host: '127.0.0.1', port: (nodes[0] as Redis).port } }] });
    library.on('error', () => {});
    await library.connect();
    await run(fromNodeRedis(library), ['a', 'b', 'c', 'd'], async (holdfast) => {
      await move(holdfast, 'moving2');
      await Promise.all(Array.from({ length: 20 }, (_, i) => holdfast.using(`k${i}`, async () => {})));
      await using _ = await holdfast.lockAll(['{s}1', '{s}2']);
      expect((await holdfast.scan('{s}')).sort()).toEqual(['{s}1', '{s}2']);
    });
    library.destroy();
  });
});

describe('sentinel', () => {
  const started: { stop(): void }[] = [];
  afterAll(() => {
    for (const one of started) one.stop();
  });

  async function deployment(): Promise<{
    sentinel: Awaited<ReturnType<typeof Redis.sentinel>>;
    primary: Redis;
    failover(): Promise<void>;
  }> {
    const primary = await Redis.start();
    const replica = await Redis.start(['--replicaof', '127.0.0.1', String(primary.port)]);
    await until('the replica follows', () => /master_link_status:up/.test(replica.cli('INFO', 'replication')));
    const sentinel = await Redis.sentinel(primary, 'mine');
    started.push(primary, replica, sentinel);
    const ask = (...args: string[]): string => execFileSync('redis-cli', ['-p', String(sentinel.port), ...args], { encoding: 'utf8' });
    await until('the sentinel knows both', () => ask('SENTINEL', 'REPLICAS', 'mine').includes(String(replica.port)));
    const failover = async (): Promise<void> => {
      await until('the failover begins', () => ask('SENTINEL', 'FAILOVER', 'mine').startsWith('OK'));
      await until('the replica is the primary', () => /role:master/.test(replica.cli('INFO', 'replication')));
      await until('the sentinel says so', () => ask('SENTINEL', 'GET-MASTER-ADDR-BY-NAME', 'mine').includes(String(replica.port)));
    };
    return { sentinel, primary, failover };
  }

  test('ioredis', async () => {
    const { sentinel, primary, failover } = await deployment();
    const library = new Ioredis({ sentinels: [{ host: '127.0.0.1', port: sentinel.port }], name: 'mine', lazyConnect: true });
    await run(fromIoredis(library), ['a'], async (holdfast) => {
      const hold = await holdfast.lock('kept', { lease: 20_000 });
      // While the Sentinel hangs, the last known address is used.
      sentinel.pause();
      primary.cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
      await hold.renew();
      sentinel.resume();
      await failover();
      await holdfast.using('after', async () => {}, { wait: 60_000 });
      await hold.release().catch((error) => expect(error).toMatchObject({ code: 'LOCK_LOST' }));
    });
    library.disconnect();
  });

  test('node_redis', async () => {
    const { sentinel, failover } = await deployment();
    const library = createSentinel({ name: 'mine', sentinelRootNodes: [{ host: '127.0.0.1', port: sentinel.port }] });
    library.on('error', () => {});
    await library.connect();
    await run(fromNodeRedis(library), ['a'], async (holdfast) => {
      await failover();
      await holdfast.using('after', async () => {}, { wait: 60_000 });
    });
    await library.destroy();
  });
});
