import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Redis } from './redis.js';

let redis: Redis;
beforeAll(async () => {
  redis = await Redis.start();
});
afterAll(() => redis.stop());

/** Runs an example to its end; needs the built package. examples/run-tests runs those that are killed: cron-in-a-fleet, leader-election. */
async function output(name: string): Promise<string[]> {
  const file = new URL(`../examples/${name}.mjs`, import.meta.url).pathname;
  const { stdout } = await promisify(execFile)(process.execPath, [file], {
    env: { ...process.env, REDIS_URL: `redis://127.0.0.1:${redis.port}` },
  });
  return stdout.trim().split('\n');
}

test('example_fenced_write_runs', async () => {
  expect(await output('fenced-write')).toEqual(['first: written', 'second: written', 'late: refused', 'the first one is lost']);
});
test('example_upload_service_runs', async () => {
  const lines = ['part 1 of the first client: stored', 'part 1 of the second client: stored', 'part 2 of the first client: refused'];
  expect(await output('upload-service')).toEqual([...lines, expect.stringContaining('the first client: lock "upload:/video" was lost')]);
});
test('example_nestjs_bullmq_runs', async () => {
  const lines = await output('nestjs-bullmq');
  expect(lines.slice(0, 4)).toEqual(['debit begins', 'debit ends', 'credit begins', 'credit ends']);
  expect(lines[4]).toBe('late is to be repeated');
});
