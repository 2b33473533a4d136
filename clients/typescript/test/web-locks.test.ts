import { AsyncLocalStorage } from 'node:async_hooks';
import { getEventListeners } from 'node:events';
import { Redis as Ioredis } from 'ioredis';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Holdfast } from '../src/index.js';
import { fromIoredis } from '../src/ioredis.js';
import { LockManager, type LockManagerSnapshot, WebLock } from '../src/web-locks.js';
import { Redis, until } from './redis.js';

let redis: Redis;
let holdfast: Holdfast;
let other: Holdfast;
let locks: LockManager;
let foreign: LockManager;

beforeAll(async () => {
  redis = await Redis.start();
  const library = new Ioredis(redis.socket, { lazyConnect: true });
  holdfast = new Holdfast(fromIoredis(library));
  other = new Holdfast(fromIoredis(library));
  locks = new LockManager(holdfast, { lease: 10_000 });
  foreign = new LockManager(other, { lease: 10_000 });
});
afterAll(async () => {
  await holdfast.close();
  await other.close();
  redis.stop();
});

let count = 0;
const fresh = (): string => `name ${count++}`;
const never = new Promise<never>(() => {});

/** Acquires a lock, and holds it until `release` is called. */
async function holding(
  manager: LockManager,
  name: string,
  mode: 'exclusive' | 'shared' = 'exclusive',
): Promise<{ release(value?: unknown): void; released: Promise<unknown> }> {
  let release: (value?: unknown) => void = () => {};
  const until = new Promise((resolve) => {
    release = resolve;
  });
  let released: Promise<unknown> = never;
  await new Promise<void>((resolve, reject) => {
    released = manager.request(name, { mode }, () => {
      resolve();
      return until;
    });
    released.catch(reject);
  });
  return { release, released };
}
const named = (snapshot: LockManagerSnapshot, name: string): string =>
  `${snapshot.held.filter((lock) => lock.name === name).map((lock) => lock.mode)} | ${snapshot.pending.filter((lock) => lock.name === name).map((lock) => lock.mode)}`;

test('request_rejects_with_type_error_when_arguments_are_wrong', async () => {
  const request = locks.request.bind(locks) as (...args: unknown[]) => Promise<unknown>;
  const wrong: unknown[][] = [
    [],
    ['a'],
    ['a', undefined],
    ['a', null],
    ['a', 1],
    ['a', {}],
    ['a', {}, undefined],
    ['a', 1, () => {}],
    ['a', { mode: 'foo' }, () => {}],
    ['a', { mode: null }, () => {}],
    [Symbol(), () => {}],
    [{ toString: () => expect.unreachable() }],
  ];
  for (const args of wrong) await expect(request(...args), String(args.length)).rejects.toBeInstanceOf(TypeError);
  for (const signal of ['x', 12.34, false, {}, Symbol(), () => {}, globalThis, null]) {
    await expect(request('a', { signal }, () => {})).rejects.toBeInstanceOf(TypeError);
  }
});

test('request_rejects_with_not_supported_error', async () => {
  const { signal } = new AbortController();
  const request = locks.request.bind(locks) as (...args: unknown[]) => Promise<unknown>;
  for (const [name, options] of [
    ['-a', {}],
    ['-', {}],
    ['a', { steal: true, ifAvailable: true }],
    ['a', { steal: true, mode: 'shared' }],
    ['a', { steal: true, signal }],
    ['a', { ifAvailable: true, signal }],
    ['-a', { signal: AbortSignal.abort('why') }],
  ] as const) {
    await expect(request(name, options, () => {})).rejects.toMatchObject({ name: 'NotSupportedError' });
  }
});

test('callback_gets_the_lock_and_settles_the_request', async () => {
  const name = fresh();
  expect(await locks.request(name, (lock) => [lock.name, lock.mode, String(lock), lock instanceof WebLock])).toEqual([
    name,
    'exclusive',
    '[object Lock]',
    true,
  ]);
  expect(await locks.request(name, { mode: 'shared' }, async (lock) => lock.mode)).toBe('shared');
  // biome-ignore lint/suspicious/noThenProperty: a thenable is what is tested
  const error = { then: () => expect.unreachable() };
  await expect(
    locks.request(name, () => {
      throw error;
    }),
  ).rejects.toBe(error);
  await expect(locks.request(name, () => Promise.reject(error))).rejects.toBe(error);
  expect(await locks.request(name, { ifAvailable: true }, (lock) => lock?.name)).toBe(name);
});

test.each(['', 'ordinary', '\u0000', 'a\\b', '%0041', '\ud800', '\udc00', 'é😀', '*?[a]', '{tag}'])(
  'names_are_distinct_strings_%j',
  async (name) => {
    await locks.request(name, async () => {
      const snapshot = await foreign.query();
      expect(snapshot.held.filter((lock) => lock.name === name)).toHaveLength(1);
      expect(snapshot.held).toHaveLength(1);
    });
  },
);

test('callback_is_not_called_synchronously', async () => {
  let isRequesting = true;
  const work = locks.request(fresh(), () => isRequesting);
  isRequesting = false;
  expect(await work).toBe(false);
});

test('callback_runs_in_the_async_context_of_its_request', async () => {
  const storage = new AsyncLocalStorage<number>();
  const name = fresh();
  const request = (n: number, options = {}) => storage.run(n, () => locks.request(name, options, async () => storage.getStore()));
  expect(await Promise.all([request(1), request(2, { ifAvailable: true }), request(3), request(4, { mode: 'shared' })])).toEqual([
    1, 2, 3, 4,
  ]);
});

test('request_has_the_length_that_the_specification_gives_it', () => {
  expect([LockManager.prototype.request.length, LockManager.prototype.query.length]).toEqual([2, 0]);
});

test('exclusive_locks_are_granted_in_order', async () => {
  const name = fresh();
  const order: number[] = [];
  await Promise.all(
    [1, 2, 3, 4, 5].map((n) =>
      locks.request(name, async () => {
        order.push(n);
        await new Promise((resolve) => setTimeout(resolve, 5));
        order.push(n);
      }),
    ),
  );
  expect(order).toEqual([1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
});

test('shared_locks_are_held_together_and_not_beside_an_exclusive_one', async () => {
  const name = fresh();
  const first = await holding(locks, name, 'shared');
  const second = await holding(foreign, name, 'shared');
  const third = await holding(locks, name, 'shared');
  let exclusive = false;
  const writer = locks.request(name, () => {
    exclusive = true;
  });
  const late = locks.request(name, { mode: 'shared' }, () => exclusive);
  expect(await locks.request(name, { ifAvailable: true, mode: 'shared' }, (lock) => lock)).toBeNull();
  expect(named(await locks.query(), name)).toBe('shared,shared,shared | exclusive,shared');
  for (const holder of [first, second, third]) holder.release();
  await writer;
  expect(await late).toBe(true);
});

test('callbacks_are_called_in_the_order_of_requests_of_several_names', async () => {
  const [name, free] = [fresh(), fresh()];
  const order: string[] = [];
  let unblock: () => void = () => {};
  const blocked = new Promise<void>((resolve) => {
    unblock = resolve;
  });
  const readers = [1, 2, 3].map((n) =>
    locks.request(name, { mode: 'shared' }, () => {
      order.push(`reader ${n}`);
      return blocked;
    }),
  );
  const writer = locks.request(name, () => order.push('writer'));
  await locks.request(free, () => order.push('free'));
  expect(order).toEqual(['reader 1', 'reader 2', 'reader 3', 'free']);
  unblock();
  await Promise.all([...readers, writer]);
  expect(order).toEqual(['reader 1', 'reader 2', 'reader 3', 'free', 'writer']);
});

test('if_available_gets_null_when_lock_is_held_and_lock_when_it_is_free', async () => {
  const name = fresh();
  const holder = await holding(locks, name);
  for (const manager of [locks, foreign]) {
    expect(await manager.request(name, { ifAvailable: true }, (lock) => lock)).toBeNull();
    expect(await manager.request(name, { ifAvailable: true, mode: 'shared' }, (lock) => lock)).toBeNull();
    expect(await manager.request(fresh(), { ifAvailable: true }, (lock) => lock?.mode)).toBe('exclusive');
  }
  holder.release('x');
  expect(await holder.released).toBe('x');
  expect(await foreign.request(name, { ifAvailable: true }, (lock) => lock !== null)).toBe(true);
});

test('if_available_is_decided_in_its_place_in_the_queue', async () => {
  const name = fresh();
  const results = await Promise.all([
    locks.request(name, { mode: 'shared' }, async () => 'first'),
    locks.request(name, { mode: 'shared', ifAvailable: true }, async (lock) => lock?.mode),
    locks.request(name, { ifAvailable: true }, async (lock) => lock),
  ]);
  expect(results.slice(0, 2)).toEqual(['first', 'shared']);
});

test('query_lists_held_and_pending_requests_with_client_ids', async () => {
  const name = fresh();
  const mine = await holding(locks, name, 'shared');
  const theirs = await holding(foreign, name, 'shared');
  const waits = foreign.request(name, () => {});
  const queued = locks.request(name, () => {});
  await until('both wait', async () => named(await locks.query(), name) === 'shared,shared | exclusive,exclusive');
  const snapshot = await locks.query();
  const ids = snapshot.held.filter((lock) => lock.name === name).map((lock) => lock.clientId);
  expect(new Set(ids).size).toBe(2);
  expect(new Set(snapshot.pending.filter((lock) => lock.name === name).map((lock) => lock.clientId))).toEqual(new Set(ids));
  expect(Object.keys(snapshot.held[0] ?? {}).sort()).toEqual(['clientId', 'mode', 'name']);
  mine.release();
  theirs.release();
  await Promise.all([waits, queued]);
  expect(named(await locks.query(), name)).toBe(' | ');
});

test('query_lists_requests_of_all_managers_in_their_order', async () => {
  const name = fresh();
  const holder = await holding(locks, name);
  const first = foreign.request(name, () => {});
  await until('it waits', async () => (await holdfast.waiters(`web-locks:${name}`)).length === 1);
  const second = locks.request(name, () => {});
  for (const manager of [locks, foreign]) {
    const { held, pending } = await manager.query();
    const own = held.find((lock) => lock.name === name)?.clientId;
    expect(pending.filter((lock) => lock.name === name).map(({ clientId }) => clientId === own)).toEqual([false, true]);
  }
  holder.release();
  await Promise.all([first, second]);
});

test('query_lists_held_locks_in_the_order_in_which_they_were_granted', async () => {
  const names = [fresh(), fresh(), fresh(), fresh()];
  const holders = await Promise.all(names.map((name) => holding(locks, name)));
  const next = names.map((name, at) => holding(at === 1 ? foreign : locks, name));
  const order = [2, 1, 3, 0];
  for (const at of order) {
    holders[at]?.release();
    await next[at];
  }
  for (const manager of [locks, foreign]) {
    const { held } = await manager.query();
    expect(held.map(({ name }) => names.indexOf(name))).toEqual(order);
  }
  for (const { release } of await Promise.all(next)) release();
});

test('query_skips_what_is_no_lock', async () => {
  const name = fresh();
  redis.cli('HSET', `web-locks:${name}`, 'field', 'value');
  const held = await locks.request(fresh(), async () => (await foreign.query()).held.map((lock) => lock.name));
  expect(held).toHaveLength(1);
  redis.cli('DEL', `web-locks:${name}`);
});

test('requests_of_several_managers_are_granted_in_the_order_of_their_calls', async () => {
  const name = fresh();
  const holder = await holding(locks, name);
  const order: number[] = [];
  const requests: Promise<unknown>[] = [];
  for (let at = 0; at < 6; at++) {
    const manager = at % 3 === 2 ? foreign : locks;
    requests.push(manager.request(name, { mode: at % 2 === 0 ? 'shared' : 'exclusive' }, () => order.push(at)));
    const seen = 'shared,exclusive,shared,exclusive,shared,exclusive'.split(',').slice(0, at + 1);
    const observer = manager === foreign ? locks : foreign;
    await until(`${at + 1} wait`, async () => named(await observer.query(), name) === `exclusive | ${seen}`);
  }
  holder.release();
  await Promise.all(requests);
  expect(order).toEqual([0, 1, 2, 3, 4, 5]);
});

test('requests_are_granted_in_order_when_they_need_too_many_connections', async () => {
  const name = fresh();
  const holder = await holding(locks, name);
  const order: number[] = [];
  const requests = Array.from({ length: 40 }, (_, at) => locks.request(name, () => order.push(at)));
  const theirs = foreign.request(name, () => {});
  await until('nine of them wait at the server', async () => (await other.waiters(`web-locks:${name}`)).length === 10);
  holder.release();
  await Promise.all([...requests, theirs]);
  expect(order).toEqual(Array.from({ length: 40 }, (_, at) => at));
});

test('aborted_request_leaves_the_queue_between_others', async () => {
  const name = fresh();
  const holder = await holding(locks, name);
  const order: number[] = [];
  const controller = new AbortController();
  const first = locks.request(name, () => order.push(1));
  const aborted = locks.request(name, { signal: controller.signal }, () => order.push(2));
  const last = locks.request(name, () => order.push(3));
  await until('all wait', async () => (await other.waiters(`web-locks:${name}`)).length === 3);
  controller.abort(new Error('enough'));
  await expect(aborted).rejects.toThrow('enough');
  await until('it has left', async () => (await other.waiters(`web-locks:${name}`)).length === 2);
  holder.release();
  await Promise.all([first, last]);
  expect(order).toEqual([1, 3]);
});

test('query_lists_requests_that_a_release_has_granted', async () => {
  const name = fresh();
  const writer = await holding(locks, name);
  const readers = [1, 2, 3].map(() => holding(locks, name, 'shared'));
  expect(named(await locks.query(), name)).toBe('exclusive | shared,shared,shared');
  writer.release();
  await writer.released;
  expect(named(await locks.query(), name)).toBe('shared,shared,shared | ');
  const next = await Promise.all(readers);
  const last = holding(locks, name);
  for (const { release } of next) release();
  await Promise.all(next.map(({ released }) => released));
  expect(named(await locks.query(), name)).toBe('exclusive | ');
  (await last).release();
});

test('query_lists_requests_of_the_same_tick', async () => {
  const name = fresh();
  const controller = new AbortController();
  const held = locks.request(name, () => never).catch(() => {});
  const pending = locks.request(name, { signal: controller.signal }, () => expect.unreachable());
  pending.catch(() => {});
  expect(named(await locks.query(), name)).toBe('exclusive | exclusive');
  controller.abort();
  await expect(pending).rejects.toMatchObject({ name: 'AbortError' });
  expect(named(await locks.query(), name)).toBe('exclusive | ');
  await locks.request(name, { steal: true }, () => {});
  await held;
});

test('signal_aborts_a_request_and_not_a_lock', async () => {
  const name = fresh();
  await expect(locks.request(name, { signal: AbortSignal.abort('why') }, () => {})).rejects.toBe('why');
  const sync = new AbortController();
  const work = locks.request(name, { signal: sync.signal }, () => expect.unreachable());
  work.catch(() => {});
  const next = locks.request(name, () => 'next');
  sync.abort();
  await expect(work).rejects.toBe(sync.signal.reason);
  expect(await next).toBe('next');

  const holder = await holding(foreign, name);
  const later = new AbortController();
  const waits = locks.request(name, { signal: later.signal }, () => expect.unreachable());
  waits.catch(() => {});
  await until('it waits', async () => (await holdfast.waiters(`web-locks:${name}`)).length === 1);
  later.abort('cat');
  await expect(waits).rejects.toBe('cat');
  await until('it was withdrawn', async () => (await holdfast.waiters(`web-locks:${name}`)).length === 0);
  holder.release();
  await holder.released;

  const granted = new AbortController();
  const result = locks.request(name, { signal: granted.signal }, async () => {
    granted.abort();
    return 'done';
  });
  expect(await result).toBe('done');
});

test('steal_rejects_the_holder_and_goes_ahead_of_requests_that_wait', async () => {
  const name = fresh();
  const first = locks.request(name, () => never);
  const order: string[] = [];
  const waits = locks.request(name, () => order.push('waited'));
  const theirs = foreign.request(name, () => order.push('foreign'));
  first.catch(() => {});
  await until('both wait', async () => named(await locks.query(), name) === 'exclusive | exclusive,exclusive');
  await locks.request(name, { steal: true }, (lock) => {
    expect(lock.name).toBe(name);
    order.push('stolen');
  });
  await expect(first).rejects.toMatchObject({ name: 'AbortError' });
  await Promise.all([waits, theirs]);
  expect(order[0]).toBe('stolen');
  expect(order).toHaveLength(3);
});

test('steal_overtakes_requests_of_the_same_tick', async () => {
  const name = fresh();
  const first = locks.request(name, () => never).catch((error: Error) => error.name);
  const order: string[] = [];
  const waits = locks.request(name, () => order.push('waited'));
  const thief = locks.request(name, { steal: true }, () => order.push('stolen'));
  expect(await locks.request(name, { ifAvailable: true }, (lock) => lock)).toBeNull();
  await Promise.all([thief, waits]);
  expect(await first).toBe('AbortError');
  expect(order).toEqual(['stolen', 'waited']);
});

test('steal_takes_locks_that_are_granted_in_the_same_tick', async () => {
  const name = fresh();
  const request = (mode: 'shared' | 'exclusive'): Promise<unknown> =>
    locks.request(name, { mode }, () => never).catch((error: Error) => error.name);
  const victims = [request('shared'), request('shared')];
  expect(await locks.request(name, { steal: true }, () => 'stolen')).toBe('stolen');
  expect(await Promise.all(victims)).toEqual(['AbortError', 'AbortError']);
});

test('steal_takes_a_free_lock_and_loses_it_to_a_later_steal', async () => {
  const name = fresh();
  expect(await locks.request(name, { steal: true }, () => 'free')).toBe('free');
  const first = locks.request(name, { steal: true }, () => never);
  const settled = first.then(
    () => 'resolved',
    (error: Error) => error.name,
  );
  expect(await locks.request(name, { steal: true }, () => 'last')).toBe('last');
  expect(await settled).toBe('AbortError');
});

test('steal_rejects_the_holder_of_another_manager_when_it_renews', async () => {
  const name = fresh();
  const { released } = await holding(foreign, name);
  const settled = released.then(
    () => 'resolved',
    (error: Error) => error.name,
  );
  expect(await locks.request(name, { steal: true }, () => 'mine')).toBe('mine');
  expect(await settled).toBe('AbortError');
});

test('request_that_fails_leaves_no_listener_on_its_signal', async () => {
  const name = fresh();
  redis.cli('SET', `web-locks:${name}`, 'x');
  const { signal } = new AbortController();
  await expect(locks.request(name, { signal }, () => {})).rejects.toMatchObject({ code: 'WRONGTYPE' });
  expect(getEventListeners(signal, 'abort')).toEqual([]);
  redis.cli('DEL', `web-locks:${name}`);
});

test('steal_that_fails_holds_nothing_later', async () => {
  const name = fresh();
  redis.cli('ACL', 'SETUSER', 'gentle', 'on', '>secret', '~*', '+@all', '-lock.force');
  const client = new Holdfast(fromIoredis(new Ioredis(redis.socket, { username: 'gentle', password: 'secret', lazyConnect: true })));
  const gentle = new LockManager(client, { lease: 10_000 });
  const holder = await holding(locks, name);
  await expect(gentle.request(name, { steal: true }, () => expect.unreachable())).rejects.toMatchObject({ code: 'NOPERM' });
  holder.release();
  await holder.released;
  await until('nobody holds it', () => redis.cli('EXISTS', `web-locks:${name}`) === '0');
  expect(await locks.request(name, () => 'mine')).toBe('mine');
  await client.close();
});

test('steal_takes_all_shared_locks', async () => {
  const name = fresh();
  const holders = await Promise.all([holding(locks, name, 'shared'), holding(locks, name, 'shared')]);
  const settled = holders.map(({ released }) => released.catch((error: Error) => error.name));
  await locks.request(name, { steal: true }, () => {});
  expect(await Promise.all(settled)).toEqual(['AbortError', 'AbortError']);
});
