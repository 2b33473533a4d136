import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Redis, until } from './redis.js';

let redis: Redis;
beforeAll(async () => {
  redis = await Redis.start();
});
afterAll(() => redis.stop());

const LIBRARIES = {
  ioredis: `
    import { Redis } from 'ioredis';
    import { fromIoredis } from 'holdfast/ioredis';
    const holdfast = new Holdfast(fromIoredis(new Redis(process.env.SOCKET, { lazyConnect: true })));`,
  node_redis: `
    import { createClient } from 'redis';
    import { fromNodeRedis } from 'holdfast/node-redis';
    const holdfast = new Holdfast(fromNodeRedis(createClient({ socket: { path: process.env.SOCKET, tls: false } })));`,
};

/** Runs a program with a client of its own. It uses the built package. */
function program(
  library: keyof typeof LIBRARIES,
  code: string,
): { child: ChildProcess; output: () => string; ended: Promise<number | null> } {
  const text = `import { Holdfast } from 'holdfast'; ${LIBRARIES[library]} ${code}`;
  const child = spawn(process.execPath, ['--input-type=module', '-e', text], {
    env: { ...process.env, SOCKET: redis.socket },
    cwd: new URL('.', import.meta.url).pathname,
  });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream?.on('data', (data) => {
      output += data;
    });
  }
  const ended = new Promise<number | null>((resolve) => {
    child.on('exit', resolve);
  });
  return { child, output: () => output, ended };
}
const held = (name: string): boolean => redis.cli('EXISTS', name) === '1';

test.each(['ioredis', 'node_redis'] as const)('program_with_%s_ends_while_it_holds_a_lock_and_releases_it', async (library) => {
  const { ended, output } = program(library, `await holdfast.lock('normal'); console.log('held');`);
  expect(await ended).toBe(0);
  expect(output()).toBe('held\n');
  expect(held('normal')).toBe(false);
});

test.each(['ioredis', 'node_redis'] as const)('program_with_%s_releases_when_it_calls_exit', async (library) => {
  const { ended } = program(library, `await holdfast.lock('exit', { lease: 600_000 }); process.exit(3);`);
  expect(await ended).toBe(3);
  await until('it is released', () => !held('exit'));
});

test.each(['ioredis', 'node_redis'] as const)('program_with_%s_stays_alive_while_a_call_waits', async (library) => {
  redis.cli('LOCK.ACQUIRE', 'waits', 'somebody', 'LEASE', '60000');
  const { ended, output } = program(library, `const hold = await holdfast.lock('waits'); console.log('got it'); await hold.release();`);
  await until('it waits', () => redis.cli('LOCK.WAITERS', 'waits') !== '');
  redis.cli('LOCK.FORCE', 'waits');
  expect(await ended).toBe(0);
  expect(output()).toBe('got it\n');
});

test.each([
  ['wait_for_each_other', `await Promise.all(Array.from({ length: 6 }, () => locks.request('own', async () => {})));`],
  ['steal', `for (const n of [1, 2, 3, 4, 5]) await holdfast.lock('web-locks:' + n), await locks.request(n, { steal: true }, () => {});`],
])('program_stays_alive_while_requests_of_its_lock_manager_%s', async (_, code) => {
  const locks = `import { LockManager } from 'holdfast/web-locks'; const locks = new LockManager(holdfast);`;
  const { ended, output } = program('ioredis', `${locks} ${code} console.log('done');`);
  expect([await ended, output()]).toEqual([0, 'done\n']);
});

test('killed_program_holds_for_at_most_its_lease', async () => {
  const { child, output, ended } = program(
    'ioredis',
    `await holdfast.lock('killed', { lease: 700 }); console.log('held'); setInterval(() => {}, 1000);`,
  );
  await until('it is held', () => output() === 'held\n');
  child.kill('SIGKILL');
  await ended;
  await until('its lease is over', () => !held('killed'));
});

test('candidate_does_not_keep_the_program_alive_and_a_leader_hands_over', async () => {
  const leads = `await new Promise((resolve) => holdfast.elect('led', { value: 'x', onElected: (hold) => (console.log('term', hold.fence > 0), resolve()) }));`;
  // A candidacy does not keep the program alive: the timer does, until the callback was called.
  const { ended, output } = program('ioredis', `const live = setInterval(() => {}, 1000); ${leads} clearInterval(live);`);
  expect(await ended).toBe(0);
  expect(output()).toBe('term true\n');
  expect(held('led')).toBe(false);
});

test('error_of_a_listener_is_an_uncaught_error_of_the_program', async () => {
  const { ended, output } = program(
    'ioredis',
    `holdfast.on('acquired', () => { throw new Error('mine'); }); await holdfast.lock('throws');`,
  );
  expect(await ended).toBe(1);
  expect(output()).toMatch(/Error: mine/);
});

test('package_loads_as_es_module_and_as_commonjs', () => {
  const cwd = new URL('.', import.meta.url).pathname;
  const names = [
    'holdfast',
    'holdfast/ioredis',
    'holdfast/node-redis',
    'holdfast/web-locks',
    'holdfast/verrou',
    'holdfast/node-cron',
    'holdfast/redlock',
  ];
  const list = JSON.stringify(names);
  const common = execFileSync(
    process.execPath,
    ['--input-type=commonjs', '-e', `for (const name of ${list}) console.log(Object.keys(require(name)).sort().join());`],
    { cwd, encoding: 'utf8' },
  );
  const modules = execFileSync(
    process.execPath,
    ['--input-type=module', '-e', `for (const name of ${list}) console.log(Object.keys(await import(name)).sort().join());`],
    { cwd, encoding: 'utf8' },
  );
  expect(common).toBe(modules);
  expect(common.split('\n')).toHaveLength(names.length + 1);
});
