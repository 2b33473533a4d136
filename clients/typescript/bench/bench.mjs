// Holdfast against other locks for Node.js: an uncontended pair (acquire and release), and hand-off among eight clients.
//
//   REDIS=/path/of/redis.sock node bench.mjs [rounds]
//
// All use ioredis and one server, in turns, so that other load on the machine affects all of them.
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { Redis } from 'ioredis';
import { Mutex } from 'redis-semaphore';
import redlockPackage from 'redlock';
import { createLock, IoredisAdapter } from 'redlock-universal';

const Redlock = redlockPackage.default ?? redlockPackage;
const server = process.env.REDIS ?? 'redis://127.0.0.1:6379';
const rounds = Number(process.argv[2] ?? 5);
const PAIRS = 1000;
const CLIENTS = 8;
const SECONDS = 1;
const LEASE = 10_000;

/** For each library: makes a client, with a function that acquires a lock, waiting if needed, and resolves with the function that releases it. */
const contenders = {
  holdfast: () => {
    const holdfast = new Holdfast(fromIoredis(new Redis(server, { lazyConnect: true })));
    return {
      acquire: async (name) => {
        const hold = await holdfast.lock(name);
        return () => hold.release();
      },
      close: () => holdfast.close(),
    };
  },
  'node-redlock': () => {
    const redis = new Redis(server);
    const redlock = new Redlock([redis], { retryCount: 100_000 });
    return {
      acquire: async (name) => {
        const lock = await redlock.acquire([`redlock:${name}`], LEASE);
        return () => lock.release();
      },
      close: () => redis.disconnect(),
    };
  },
  'redis-semaphore': () => {
    const redis = new Redis(server);
    return {
      acquire: async (name) => {
        const mutex = new Mutex(redis, name, { lockTimeout: LEASE, acquireTimeout: 60_000 });
        await mutex.acquire();
        return () => mutex.release();
      },
      close: () => redis.disconnect(),
    };
  },
  'redlock-universal': () => {
    const redis = new Redis(server);
    const adapter = new IoredisAdapter(redis);
    return {
      acquire: async (name) => {
        const lock = createLock({ adapter, key: `universal:${name}`, ttl: LEASE, retryAttempts: 100_000 });
        const handle = await lock.acquire();
        return () => lock.release(handle);
      },
      close: () => redis.disconnect(),
    };
  },
};

const quantile = (values, q) => values.sort((a, b) => a - b)[Math.floor((values.length - 1) * q)];

async function pairs(client, count) {
  const times = [];
  for (let i = 0; i < count; i++) {
    const begun = performance.now();
    const release = await client.acquire('pair');
    await release();
    times.push((performance.now() - begun) * 1000);
  }
  return times;
}

async function handOff(make) {
  const clients = Array.from({ length: CLIENTS }, make);
  const counts = new Array(CLIENTS).fill(0);
  let changes = 0;
  let last = -1;
  const end = performance.now() + SECONDS * 1000;
  await Promise.all(
    clients.map(async (client, i) => {
      while (performance.now() < end) {
        const release = await client.acquire('contended');
        counts[i]++;
        if (last !== i) changes++;
        last = i;
        await release();
      }
    }),
  );
  for (const client of clients) await client.close();
  return { changes: changes / SECONDS, fairness: Math.max(...counts) / Math.max(1, Math.min(...counts)) };
}

const results = Object.fromEntries(Object.keys(contenders).map((name) => [name, { times: [], changes: [], fairness: [] }]));
const clients = Object.fromEntries(Object.entries(contenders).map(([name, make]) => [name, make()]));
for (const client of Object.values(clients)) await pairs(client, PAIRS);
for (let round = 0; round < rounds; round++) {
  // Short turns, in a different order each time.
  for (let turn = 0; turn < 10; turn++) {
    const names = Object.keys(clients);
    for (let i = 0; i < names.length; i++) {
      const name = names[(i + turn) % names.length];
      results[name].times.push(...(await pairs(clients[name], PAIRS / 10)));
    }
  }
  for (const [name, make] of Object.entries(contenders)) {
    const { changes, fairness } = await handOff(make);
    results[name].changes.push(changes);
    results[name].fairness.push(fairness);
  }
}
for (const client of Object.values(clients)) await client.close();
console.log('| contender | pair p50, µs | pair p99, µs | owner changes a second among 8 | most to fewest grants |');
console.log('|---|---:|---:|---:|---:|');
for (const [name, { times, changes, fairness }] of Object.entries(results)) {
  const row = [quantile(times, 0.5), quantile(times, 0.99), quantile(changes, 0.5)].map((value) => value.toFixed(0));
  console.log(`| ${name} | ${row.join(' | ')} | ${quantile(fairness, 0.5).toFixed(2)} |`);
}
