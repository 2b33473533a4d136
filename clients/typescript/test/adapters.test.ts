import { Redis as Ioredis } from 'ioredis';
import cron from 'node-cron';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Holdfast, LockLostError } from '../src/index.js';
import { fromIoredis } from '../src/ioredis.js';
import { runCoordinator } from '../src/node-cron.js';
import Redlock, { ExecutionError, Lock, ResourceLockedError } from '../src/redlock.js';
import { Redis, renewed, until } from './redis.js';

let redis: Redis;
let holdfast: Holdfast;
beforeAll(async () => {
  redis = await Redis.start();
  holdfast = new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true })));
});
afterAll(async () => {
  await holdfast.close();
  redis.stop();
});

test('redlock_acquires_extends_and_releases_several_resources', async () => {
  const redlock = new Redlock(holdfast, { retryCount: 0 });
  const lock = await redlock.acquire(['a', 'b'], 20_000);
  expect(lock.expiration).toBeGreaterThan(Date.now() + 10_000);
  expect(Number.isInteger(lock.expiration)).toBe(true);
  expect(Number(redis.cli('PTTL', 'a'))).toBeGreaterThan(10_000);
  await expect(redlock.acquire(['b', 'c'], 2000)).rejects.toBeInstanceOf(ExecutionError);
  const extended = await lock.extend(60_000);
  expect([lock.expiration, extended.fence]).toEqual([0, lock.fence]);
  expect(Number(redis.cli('PTTL', 'b'))).toBeGreaterThan(20_000);
  await expect(lock.extend(1000)).rejects.toThrow('Cannot extend an already-expired lock.');
  await extended.release();
  expect(redis.cli('EXISTS', 'a', 'b')).toBe('0');
  await expect(redlock.acquire(['a'], 1.5)).rejects.toThrow('Duration must be an integer');
});

test('redlock_waits_for_as_long_as_repetitions_would_take', async () => {
  const redlock = new Redlock(holdfast, { retryCount: 100, retryDelay: 600 });
  const lock = await redlock.acquire(['wait'], 60_000);
  const next = redlock.acquire(['wait'], 60_000);
  await lock.release();
  await (await next).release();
});

test('redlock_using_renews_and_reports_a_loss', async () => {
  const redlock = new Redlock(holdfast);
  expect(await redlock.using(['using'], 8000, async () => 'result')).toBe('result');
  await expect(redlock.using(['using'], 8000, {}, () => Promise.reject(new Error('mine')))).rejects.toThrow('mine');
  const errors: unknown[] = [];
  redlock.on('error', (error) => errors.push(error));
  const work = redlock.using(['using'], 8000, async (signal) => {
    await renewed(redis, 'using');
    expect(signal.aborted).toBe(false);
    await holdfast.force('using');
    await until('the loss is noticed', () => signal.aborted);
    expect(signal.error).toBe(signal.error);
    throw signal.error;
  });
  await expect(work).rejects.toSatisfy((error) => error instanceof ExecutionError && error.cause instanceof LockLostError);
  expect(errors).toEqual([expect.any(ResourceLockedError)]);
});

test('redlock_reports_a_held_lock_as_node_redlock_does', async () => {
  const redlock = new Redlock(holdfast, { retryCount: 0 });
  const errors: unknown[] = [];
  redlock.on('error', (error) => errors.push(error));
  const lock = await redlock.acquire(['told'], 20_000);
  expect(lock).toBeInstanceOf(Lock);
  expect([lock.redlock, lock.resources, (await lock.attempts[0])?.votesFor]).toEqual([redlock, ['told'], new Set([holdfast])]);
  const failure = await redlock.acquire(['told'], 20_000).catch((error: unknown) => error as ExecutionError);
  expect(failure).toBeInstanceOf(ExecutionError);
  const [vote] = await Promise.all(failure.attempts);
  expect(vote?.votesAgainst.get(holdfast)).toBe(errors[0]);
  expect(errors).toEqual([expect.any(ResourceLockedError)]);
  await lock.release();
  redis.cli('SET', 'told', 'x');
  await expect(redlock.acquire(['told'], 20_000)).rejects.toMatchObject({ name: 'ExecutionError', cause: { code: 'WRONGTYPE' } });
  expect(errors[1]).toMatchObject({ code: 'WRONGTYPE' });
});

test('redlock_accepts_settings_without_a_value_and_durations_of_any_length', async () => {
  const redlock = new Redlock(holdfast, { retryCount: undefined } as object);
  expect(redlock.settings.retryCount).toBe(10);
  const longest = Math.floor(Number.MAX_SAFE_INTEGER / 10);
  const lock = await redlock.acquire(['long'], longest, { retryDelay: undefined } as object);
  await (await lock.extend(3 * longest)).release();
  const endless = { retryCount: Number.POSITIVE_INFINITY, retryDelay: 0, retryJitter: 0 };
  await (await redlock.acquire(['long'], 1000, endless)).release();
  expect(await redlock.using(['long'], 1000, null as unknown as object, async () => 'done')).toBe('done');
  expect(redis.cli('EXISTS', 'long')).toBe('0');
});

test('run_coordinator_lets_one_process_run_each_run', async () => {
  const clients = [1, 2, 3].map(() => new Holdfast(fromIoredis(new Ioredis(redis.socket, { lazyConnect: true }))));
  const answers = await Promise.all(clients.map((client) => runCoordinator(client).shouldRun('job:2026', 3_600_000)));
  expect(answers.filter(Boolean)).toHaveLength(1);
  const runs: string[] = [];
  const tasks = clients.map((client, i) =>
    cron.schedule('* * * * * *', (context) => void runs.push(`${context.dateLocalIso} ${i}`), {
      name: 'second',
      distributed: true,
      distributedLease: 60_000,
      runCoordinator: runCoordinator(client),
    }),
  );
  await until('three runs', () => runs.length >= 3);
  for (const task of tasks) await task.destroy();
  await expect(runCoordinator(holdfast).shouldRun('job', -1)).rejects.toThrow('lease must be a number from 1');
  // The lock of a run stays after its process has ended.
  await Promise.all(clients.map((client) => client.close()));
  expect(redis.cli('EXISTS', 'cron:job:2026')).toBe('1');
  const times = runs.map((run) => run.split(' ')[0]);
  expect(new Set(times).size).toBe(times.length);
});
