import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { Redis } from './redis.js';

test('verrou_store_passes_the_exported_suite', async () => {
  const redis = await Redis.start();
  try {
    const script = new URL('verrou/run.mjs', import.meta.url).pathname;
    const { stdout } = await promisify(execFile)(process.execPath, [script], {
      env: { ...process.env, NO_COLOR: '1', REDIS_SOCKET: redis.socket },
    });
    expect(stdout).toMatch(/25 passed/);
    expect(stdout).not.toMatch(/failed/);
  } finally {
    redis.stop();
  }
});
