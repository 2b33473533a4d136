import { getEventListeners } from 'node:events';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { type Hold, Holdfast, type HoldfastOptions, LockLostError, NotAcquiredError, ServerError, UnavailableError } from '../src/index.js';
import { slotOf } from '../src/server.js';
import { VerrouStore } from '../src/verrou.js';
import { LockManager } from '../src/web-locks.js';
import { type Act, FakeServer, granted, reply, type Script, script, TOKEN } from './fake.js';

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  vi.useRealTimers();
});

function start(acts: Record<string, Act[]> | Script, options?: HoldfastOptions): { server: FakeServer; holdfast: Holdfast } {
  const server = new FakeServer(typeof acts === 'function' ? acts : script(acts));
  return { server, holdfast: new Holdfast(server, options) };
}

/** Advances the test's clock by `ms`, and returns the outcome that a promise has then. */
async function within<T>(ms: number, work: Promise<T>): Promise<T> {
  const settled = work.then(
    (value) => ({ value }),
    (error: unknown) => ({ error }),
  );
  await vi.advanceTimersByTimeAsync(ms);
  const late = { error: new Error(`not settled within ${ms} ms`) };
  const outcome: { value?: T; error?: unknown } = await Promise.race([
    settled,
    Promise.resolve()
      .then(() => Promise.resolve())
      .then(() => late),
  ]);
  if ('error' in outcome) throw outcome.error;
  return outcome.value as T;
}

const failing = [
  'LOADING x',
  'BUSY x',
  'TRYAGAIN x',
  'MASTERDOWN x',
  'MISCONF x',
  'NOREPLICAS x',
  'CLUSTERDOWN x',
  'OOM x',
  'UNCONFIRMED x',
  'READONLY x',
  'UNBLOCKED x',
];
const passing: [string, Act][] = [
  ...[...failing, 'ERR too many waiters', 'ERR another request is being confirmed', 'ERR max number of clients reached'].map(
    (text): [string, Act] => [text, reply(`-${text}`)],
  ),
  ['end of file', 'cut'],
];

// Waiting

test('lock_all_keeps_its_names_when_the_caller_changes_the_array', async () => {
  const { holdfast } = start({ MACQUIRE: [granted], MRENEW: [reply([TOKEN, null])], MRELEASE: [reply([1, 1])] });
  const names = ['a', 'b'];
  const hold = await within(10, holdfast.lockAll(names, { lease: 1000 }));
  names.length = 0;
  await vi.advanceTimersByTimeAsync(300);
  expect(hold.signal.reason).toMatchObject({ names: ['a', 'b'] });
});

test('lock_sends_terms_and_holds', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  const hold = await within(10, holdfast.lock('a', { wait: 5000, lease: 4000.2, limit: 3, replicas: 1 }));
  expect(hold.fence).toBe(TOKEN);
  expect(hold.isHeld).toBe(true);
  expect(server.sent).toEqual([
    expect.stringMatching(/^LOCK.ACQUIRE a O HOLDS 1 LEASE 4001 WAIT (49|50)\d\d REPLICAS 1 LIMIT 3 WITHWAITED$/),
  ]);
});

test('lock_repeats_waits_of_an_hour_when_it_has_no_limit', async () => {
  const { server, holdfast } = start((args) => (args.includes('WAITED') ? granted : reply(null, 1500)));
  await within(2500, holdfast.lock('a'));
  expect(server.sent[0]).toMatch(/ WAIT 3600000 /);
  expect(server.sent[1]).toMatch(/ WAIT 3600000 WAITED \d+ /);
});

test('lock_certainty_counts_from_grant_when_it_waited', async () => {
  const { holdfast } = start({ ACQUIRE: [reply([TOKEN, 1000], 1010)] });
  const hold = await within(1500, holdfast.lock('a', { lease: 10_000, renew: false }));
  expect(hold.remaining).toBeGreaterThan(9890 - 510);
  expect(hold.remaining).toBeLessThanOrEqual(9900);
});

test('lock_is_not_acquired_when_reply_is_nil', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply(null)] });
  await expect(within(10, holdfast.lock('a', { wait: 1000 }))).rejects.toBeInstanceOf(NotAcquiredError);
  expect(await within(10, holdfast.tryLock('a'))).toBeNull();
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.some((line) => line.includes('ALL'))).toBe(false);
});

test.each(passing)('lock_asks_again_after_%s', async (_, act) => {
  const { server, holdfast } = start({ ACQUIRE: [act, granted] });
  await within(1500, holdfast.lock('a', { wait: 5000 }));
  expect(server.sent[1]).toMatch(/^LOCK.ACQUIRE a O HOLDS 1 LEASE 10000 WAIT 49\d\d WAITED \d+ WITHWAITED$/);
});

test.each(passing)('lock_pauses_between_repetitions_after_%s', async (_, act) => {
  const { server, holdfast } = start({ ACQUIRE: [act] });
  await expect(within(6000, holdfast.lock('a', { wait: 5000 }))).rejects.toBeInstanceOf(NotAcquiredError);
  const count = server.sent.filter((line) => line.includes('ACQUIRE')).length;
  expect(count).toBeGreaterThan(5);
  expect(count).toBeLessThan(25);
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent.filter((line) => line.includes('ALL')).length).toBeGreaterThan(0);
});

test.each(['WRONGTYPE x', 'DEADLOCK x', 'NOPERM x', 'NOAUTH x', 'ERR syntax', 'NEWCODE x'])(
  'lock_rejects_with_fatal_error_%s',
  async (text) => {
    const { server, holdfast } = start({ ACQUIRE: [reply(`-${text}`)] });
    await expect(within(10, holdfast.lock('a'))).rejects.toMatchObject({ code: text.split(' ')[0], message: text });
    await vi.advanceTimersByTimeAsync(3000);
    expect(server.sent).toHaveLength(1);
  },
);

test.each(['MOVED 1 127.0.0.1:1', 'ASK 1 127.0.0.1:1'])(
  'lock_rejects_when_a_client_for_one_server_is_redirected_by_%s',
  async (redirect) => {
    const { server, holdfast } = start({ ACQUIRE: [reply(`-${redirect}`)] });
    const message = expect.stringMatching(`node of a cluster.*${redirect}`);
    await expect(within(10, holdfast.lock('a'))).rejects.toMatchObject({ code: 'ERR', message });
    await vi.advanceTimersByTimeAsync(3000);
    expect(server.sent).toHaveLength(1);
  },
);

test.each([['NONSENSE'], [[]], [['OK', 0]], [[TOKEN]]])('lock_asks_again_over_another_connection_when_reply_is_%j', async (nonsense) => {
  const { server, holdfast } = start({ ACQUIRE: [reply(nonsense), granted] });
  expect((await within(500, holdfast.lock('a'))).fence).toBe(TOKEN);
  expect(server.sent).toHaveLength(2);
  expect(server.connections.map(({ closed }) => closed)).toEqual([true, false]);
});

test('lock_is_not_acquired_when_nil_comes_a_little_after_its_time', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply(null, 2010)] });
  await expect(within(2100, holdfast.lock('a', { wait: 2000 }))).rejects.toBeInstanceOf(NotAcquiredError);
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent).toHaveLength(1);
});

test('lock_pauses_when_an_endless_wait_is_answered_nil_at_once', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply(null)] });
  holdfast.lock('a').catch(() => {});
  await vi.advanceTimersByTimeAsync(1000);
  expect(server.sent.length).toBeGreaterThan(2);
  expect(server.sent.length).toBeLessThan(100);
});

test('lock_sends_nothing_when_its_time_was_over_before_it_had_a_connection', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  server.delay = 1000;
  await expect(within(800, holdfast.lock('a', { wait: 500 }))).rejects.toBeInstanceOf(NotAcquiredError);
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent).toEqual([]);
});

test('lock_leaves_no_listener_on_its_signal_and_sends_nothing_when_that_is_aborted', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted, reply('-WRONGTYPE x'), reply(null)] });
  const { signal } = new AbortController();
  await within(10, holdfast.lock('a', { signal }));
  await expect(within(10, holdfast.lock('b', { signal }))).rejects.toMatchObject({ code: 'WRONGTYPE' });
  expect(await within(10, holdfast.tryLock('c', { signal }))).toBeNull();
  expect(getEventListeners(signal, 'abort')).toEqual([]);
  await expect(holdfast.lock('d', { signal: AbortSignal.abort('why') })).rejects.toBe('why');
  expect(server.sent).toHaveLength(3);
});

test('silence_of_a_wait_counts_from_when_it_was_sent', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent', granted] });
  server.delay = 1000;
  await within(5000, holdfast.lock('a', { wait: 60_000 }));
  expect(server.sent[1]).toMatch(/WAITED 40\d\d/);
});

test('try_lock_rejects_when_there_is_no_answer', async () => {
  const { holdfast } = start({ ACQUIRE: ['silent'] });
  await expect(within(3000, holdfast.tryLock('a'))).rejects.toMatchObject({ code: 'NOT_ACQUIRED', cause: { code: 'UNAVAILABLE' } });
});

test('try_lock_rejects_when_it_gets_no_connection', async () => {
  const { server, holdfast } = start({});
  server.delay = 60_000;
  await expect(within(3000, holdfast.tryLock('a'))).rejects.toMatchObject({ code: 'NOT_ACQUIRED', cause: { code: 'UNAVAILABLE' } });
});

test('try_lock_gives_replicas_their_time_to_confirm', async () => {
  const { holdfast } = start({ ACQUIRE: [reply('-UNCONFIRMED 0 of 1 replicas confirmed within 1000 ms', 1500)] });
  await expect(within(3000, holdfast.tryLock('a', { replicas: 1 }))).rejects.toMatchObject({ cause: { code: 'UNCONFIRMED' } });
});

test('lock_withdraws_twice_when_it_fails_after_a_broken_connection', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['cut', reply('-WRONGTYPE x')] });
  await expect(within(500, holdfast.lock('a'))).rejects.toMatchObject({ code: 'WRONGTYPE' });
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent.filter((line) => line === 'LOCK.RELEASE a O ALL')).toHaveLength(2);
});

test('silent_wait_is_asked_again_over_another_connection_and_older_connection_is_closed', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent', granted] });
  await within(2100, holdfast.lock('a', { wait: 60_000 }));
  expect(server.connections).toHaveLength(2);
  expect(server.sent[1]).toMatch(/WAITED 200\d/);
  await vi.advanceTimersByTimeAsync(1100);
  expect(server.open()).toBe(1);
});

test('silent_wait_keeps_its_place_in_the_queue_when_all_places_of_the_pool_are_taken', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent', granted] }, { maxConnections: 3 });
  await within(2100, holdfast.lock('a', { wait: 60_000 }));
  expect(server.sent[1]).toMatch(/ WAIT 5\d{4} WAITED 20\d\d /);
});

test.each([
  [26, 40],
  [302, 5],
])('each_of_%i_waits_without_a_connection_polls_with_wait_%i_once_the_others_are_due', async (waits, wait) => {
  // The reply to a poll takes so long that all other waits are due when the second one is sent.
  const replies: Script = (args) => reply(args[0] === 'LOCK.ACQUIRE' ? null : 1, args.includes('WAIT') ? 1000 : 1);
  const { server, holdfast } = start(replies, { maxConnections: 3 });
  for (let i = 0; i <= waits; i++) holdfast.lock('k', { shared: true }).catch(() => {}); // One has a connection of its own.
  await vi.advanceTimersByTimeAsync(3000);
  const polls = server.sent.flatMap((line) => / WAIT (\d{1,3}) WAITED /.exec(line)?.[1] ?? []);
  expect(polls[1]).toBe(String(wait));
});

test('superseded_wait_with_replicas_has_their_time_to_be_answered', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent', granted] });
  await within(3100, holdfast.lock('a', { wait: 60_000, replicas: 1, renew: false }));
  expect(server.sent[1]).toMatch(/WAITED 300\d/);
  await vi.advanceTimersByTimeAsync(1700);
  expect(server.open()).toBe(2);
  await vi.advanceTimersByTimeAsync(400);
  expect(server.open()).toBe(1);
});

test('superseded_wait_has_its_time_to_be_answered_from_when_the_newer_one_was_sent', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent'] });
  server.delay = 1500;
  holdfast.lock('a').catch(() => {});
  await vi.advanceTimersByTimeAsync(5200);
  expect(server.sent).toHaveLength(2);
  expect(server.connections[0]?.closed).toBe(false);
  await vi.advanceTimersByTimeAsync(1100);
  expect(server.connections[0]?.closed).toBe(true);
});

test('superseded_connection_is_used_again', async () => {
  let first: (() => void) | undefined;
  const { server, holdfast } = start((args, connection) => {
    if (args[0] !== 'LOCK.ACQUIRE') return reply(1);
    if (!first) {
      first = () => connection.answer(args, '-SUPERSEDED x');
      return 'silent';
    }
    first();
    return granted;
  });
  const hold = await within(2100, holdfast.lock('a', { wait: 60_000 }));
  await vi.advanceTimersByTimeAsync(2000);
  expect(server.open()).toBe(2);
  await within(10, hold.release());
});

test('superseded_request_is_not_withdrawn_once_its_reply_is_read', async () => {
  let first: (() => void) | undefined;
  const { server, holdfast } = start((args, connection) => {
    if (args[0] !== 'LOCK.ACQUIRE') return reply(1);
    if (first) return granted;
    first = () => connection.answer(args, '-SUPERSEDED x');
    return 'silent';
  });
  const hold = await within(2100, holdfast.lock('a', { wait: 60_000 }));
  first?.();
  await vi.advanceTimersByTimeAsync(0);
  await within(10, hold.release());
  expect(server.sent.slice(2)).toEqual([`LOCK.RELEASE a O TOKEN ${TOKEN}`]);
});

test('lock_asks_again_when_its_only_request_is_superseded', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply('-SUPERSEDED x'), granted] });
  await within(100, holdfast.lock('a', { wait: 1000 }));
  expect(server.sent).toHaveLength(2);
});

test('older_request_may_bring_the_token', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 2400], 2500), 'silent'] });
  const hold = await within(2600, holdfast.lock('a', { wait: 60_000, lease: 10_000 }));
  await within(100, hold.release());
  expect(server.sent.slice(2)).toEqual([`LOCK.RELEASE a O TOKEN ${TOKEN}`, 'LOCK.RELEASE a O ALL']);
});

test('late_token_after_release_is_released', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 2500), reply([TOKEN + 1, 0], 900)] });
  const hold = await within(2600, holdfast.lock('a', { wait: 60_000 }));
  await within(100, hold.release());
  await vi.advanceTimersByTimeAsync(1000);
  expect(server.sent.filter((line) => line === 'LOCK.RELEASE a O ALL').length).toBeGreaterThanOrEqual(2);
});

test('late_token_of_the_same_grant_is_not_withdrawn_while_the_lock_is_released', async () => {
  const acts = { ACQUIRE: [reply([TOKEN, 2400], 2500), reply([TOKEN, 0], 700)], RELEASE: [reply(1, 300)] };
  const { server, holdfast } = start(acts);
  const hold = await within(2600, holdfast.lock('a', { wait: 60_000 }));
  await within(1000, hold.release());
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent.slice(2)).toEqual([`LOCK.RELEASE a O TOKEN ${TOKEN}`, 'LOCK.RELEASE a O ALL']);
});

test('lock_gives_up_250_ms_after_its_time_and_withdraws', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent'] });
  const work = holdfast.lock('a', { wait: 1000 });
  work.catch(() => {});
  await vi.advanceTimersByTimeAsync(1200);
  expect(server.sent).toHaveLength(1);
  await expect(within(60, work)).rejects.toBeInstanceOf(NotAcquiredError);
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.sent.filter((line) => line.includes('ACQUIRE'))).toHaveLength(1);
  expect(server.sent.filter((line) => line === 'LOCK.RELEASE a O ALL')).toHaveLength(2);
});

test('try_lock_ends_and_withdraws_when_the_server_is_silent', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent'] });
  await expect(within(1100, holdfast.tryLock('a'))).rejects.toBeInstanceOf(NotAcquiredError);
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent[0]).toBe('LOCK.ACQUIRE a O HOLDS 1 LEASE 10000 WITHWAITED');
  expect(server.sent.filter((line) => line.includes('ACQUIRE'))).toHaveLength(1);
  expect(server.sent.filter((line) => line.includes('ALL'))).toHaveLength(2);
});

test('late_grant_is_renewed_before_it_counts', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 600)], RENEW: [reply(TOKEN)] });
  await within(800, holdfast.lock('a', { lease: 1000 }));
  expect(server.sent[1]).toBe(`LOCK.RENEW a O TOKEN ${TOKEN} LEASE 1000`);
});

test('lock_asks_again_when_the_renewal_of_a_late_grant_is_nil', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 600), reply([TOKEN + 1, 0])], RENEW: [reply(null)] });
  const hold = await within(1000, holdfast.lock('a', { lease: 1000 }));
  expect(hold.fence).toBe(TOKEN + 1);
  expect(server.sent.map((line) => line.split(' ')[0]).slice(0, 3)).toEqual(['LOCK.ACQUIRE', 'LOCK.RENEW', 'LOCK.ACQUIRE']);
});

test('late_grant_is_withdrawn_when_the_caller_aborts_before_it_counts', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 600)], RENEW: ['silent'] });
  const controller = new AbortController();
  const lock = holdfast.lock('a', { lease: 1000, signal: controller.signal });
  lock.catch(() => {});
  await vi.advanceTimersByTimeAsync(700);
  expect(server.sent[1]).toMatch(/RENEW/);
  controller.abort('why');
  await expect(within(10, lock)).rejects.toBe('why');
  await vi.advanceTimersByTimeAsync(100);
  expect(server.sent[2]).toBe('LOCK.RELEASE a O ALL');
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.filter((line) => line.includes('RENEW'))).toHaveLength(1);
});

test('force_needs_no_right_to_ping', async () => {
  const { server, holdfast } = start({ PING: [reply("-NOPERM this user has no permissions to run the 'ping' command")] });
  expect(await within(100, holdfast.force('a'))).toBe(1);
  expect(server.sent).toEqual(['PING', 'LOCK.FORCE a']);
});

test('force_is_not_repeated_after_a_lost_reply', async () => {
  const { server, holdfast } = start({ FORCE: ['cut'] });
  await expect(within(500, holdfast.force('a'))).rejects.toMatchObject({ code: 'UNAVAILABLE', sent: true });
  expect(server.sent.filter((line) => line.includes('FORCE'))).toHaveLength(1);
});

// Withdrawing

test('cancel_answers_at_once_and_withdraws_over_another_connection', async () => {
  let end: (() => void) | undefined;
  const { server, holdfast } = start((args, connection) => {
    if (args[0] === 'LOCK.ACQUIRE') {
      end = () => connection.answer(args, null);
      return 'silent';
    }
    setTimeout(() => end?.(), 1);
    return reply(1);
  });
  const controller = new AbortController();
  const work = holdfast.lock('a', { signal: controller.signal });
  work.catch(() => {});
  await vi.advanceTimersByTimeAsync(100);
  controller.abort('why');
  await expect(work).rejects.toBe('why');
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.slice(1)).toEqual(['LOCK.RELEASE a O ALL']);
  expect(server.open()).toBe(2);
});

test('withdrawal_repeats_when_token_arrives_after_it', async () => {
  let end: (() => void) | undefined;
  const { server, holdfast } = start((args, connection) => {
    if (args[0] === 'LOCK.ACQUIRE') {
      end = () => connection.answer(args, [TOKEN, 0]);
      return 'silent';
    }
    setTimeout(() => end?.(), 20);
    return reply(null);
  });
  const controller = new AbortController();
  holdfast.lock('a', { signal: controller.signal }).catch(() => {});
  await vi.advanceTimersByTimeAsync(100);
  controller.abort();
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.slice(1)).toEqual(['LOCK.RELEASE a O ALL', 'LOCK.RELEASE a O ALL']);
});

test.each(passing)('withdrawal_goes_on_after_%s', async (_, act) => {
  const { server, holdfast } = start({ ACQUIRE: [reply(null, 300)], 'RELEASE ALL': [act, reply(1)] });
  const controller = new AbortController();
  holdfast.lock('a', { signal: controller.signal }).catch(() => {});
  await vi.advanceTimersByTimeAsync(100);
  controller.abort();
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.slice(1)).toEqual(['LOCK.RELEASE a O ALL', 'LOCK.RELEASE a O ALL']);
});

test('withdrawal_ends_one_lease_after_the_last_request', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['cut'], 'RELEASE ALL': ['cut'] });
  const warnings: unknown[] = [];
  holdfast.on('warning', (error) => warnings.push(error));
  await expect(within(1000, holdfast.lock('a', { lease: 2000, wait: 500 }))).rejects.toBeInstanceOf(NotAcquiredError);
  await vi.advanceTimersByTimeAsync(3000);
  const count = server.sent.length;
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.sent.length).toBe(count);
  expect(warnings).toHaveLength(1);
});

test('withdrawal_that_fails_closes_the_connection_of_a_silent_wait', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent'], 'RELEASE ALL': [reply('-NOPERM x')] });
  const controller = new AbortController();
  holdfast.lock('a', { signal: controller.signal }).catch(() => {});
  await vi.advanceTimersByTimeAsync(10);
  server.delay = 1500;
  await vi.advanceTimersByTimeAsync(2500); // The request is silent, and the next one still waits for a connection.
  controller.abort();
  await vi.advanceTimersByTimeAsync(20_000);
  expect(server.connections[0]?.closed).toBe(true);
});

test('cancel_before_anything_was_sent_sends_nothing', async () => {
  const { server, holdfast } = start({});
  server.refuse = () => new Error('refused');
  const controller = new AbortController();
  holdfast.lock('a', { signal: controller.signal }).catch(() => {});
  await vi.advanceTimersByTimeAsync(100);
  controller.abort();
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent).toEqual([]);
});

// Held and renewing

test('hold_is_renewed_at_each_quarter_of_its_lease', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, replicas: 2 }));
  await vi.advanceTimersByTimeAsync(2000);
  expect(hold.isHeld).toBe(true);
  expect(server.sent.slice(1)).toHaveLength(8);
  expect(server.sent[1]).toBe(`LOCK.RENEW a O TOKEN ${TOKEN} LEASE 1000 REPLICAS 2`);
});

test.each([
  ['nil', reply(null), 'gone'],
  ['WRONGTYPE', reply('-WRONGTYPE x'), 'changed'],
] as [string, Act, string][])('hold_is_lost_when_renewal_says_%s', async (_, act, reason) => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [act], RELEASE: [reply(null)] });
  const lost: unknown[] = [];
  holdfast.on('lost', (event) => lost.push(event));
  const hold = await within(10, holdfast.lock('a', { lease: 1000 }));
  const { signal } = hold;
  await vi.advanceTimersByTimeAsync(300);
  expect(signal.reason).toMatchObject({ code: 'LOCK_LOST', reason });
  expect(hold.isHeld).toBe(false);
  expect(hold.remaining).toBe(0);
  await expect(within(10, hold.release())).rejects.toBeInstanceOf(LockLostError);
  expect(server.sent.at(-1)).toBe(`LOCK.RELEASE a O TOKEN ${TOKEN}`);
  expect(lost).toEqual([{ names: ['a'], fence: TOKEN, reason }]);
});

test.each([...passing, ['silence', 'silent'], ['NOPERM', reply('-NOPERM x')], ['ERR', reply('-ERR x')]] as [string, Act][])(
  'renewal_is_repeated_after_%s',
  async (_, act) => {
    const { holdfast } = start({ ACQUIRE: [granted], RENEW: [act, act, reply(TOKEN)] });
    const hold = await within(10, holdfast.lock('a', { lease: 2000 }));
    await vi.advanceTimersByTimeAsync(6000);
    expect(hold.isHeld).toBe(true);
  },
);

test.each([...passing, ['silence', 'silent']] as [string, Act][])('hold_is_lost_when_its_certainty_is_over_after_%s', async (_, act) => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [act] });
  const hold = await within(10, holdfast.lock('a', { lease: 2000 }));
  const begun = performance.now();
  let at = 0;
  hold.signal.addEventListener('abort', () => {
    at = performance.now() - begun;
  });
  await vi.advanceTimersByTimeAsync(2500);
  expect(hold.signal.reason).toMatchObject({ reason: 'expired' });
  expect(at).toBeGreaterThan(1900);
  expect(at).toBeLessThan(2000);
  expect(server.sent.filter((line) => line.includes('RENEW')).length).toBeLessThan(60);
});

test('hold_without_renewal_is_lost_when_its_certainty_is_over', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, renew: false }));
  await vi.advanceTimersByTimeAsync(970);
  expect(hold.isHeld).toBe(true);
  await vi.advanceTimersByTimeAsync(30);
  expect(hold.signal.reason).toMatchObject({ reason: 'expired' });
  expect(server.sent).toHaveLength(1);
});

test('released_holds_without_renewal_leave_no_timers', async () => {
  const { holdfast } = start({ ACQUIRE: [granted, granted], RELEASE: [reply(1), reply(1)] });
  const options = { renew: false, lease: 3_600_000 };
  const holds = await within(10, Promise.all([holdfast.lock('a', options), holdfast.lock('b', options)]));
  const before = vi.getTimerCount();
  expect(before).toBeGreaterThan(1);
  await within(10, Promise.all(holds.map((hold) => hold.release())));
  expect(vi.getTimerCount()).toBe(1); // That of the client.
  expect(holds.map((hold) => hold.isHeld)).toEqual([false, false]);
});

test('renew_restarts_the_lease', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN), reply(null)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, renew: false }));
  await vi.advanceTimersByTimeAsync(500);
  await within(10, hold.renew(3000));
  expect(hold.remaining).toBeGreaterThan(2900);
  expect(server.sent[1]).toBe(`LOCK.RENEW a O TOKEN ${TOKEN} LEASE 3000`);
  await expect(within(10, hold.renew())).rejects.toBeInstanceOf(LockLostError);
});

test('renew_with_a_shorter_lease_shortens_the_certainty_when_its_reply_is_lost', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RENEW: ['silent'] });
  const hold = await within(10, holdfast.lock('a', { renew: false }));
  const renewal = hold.renew(1000);
  renewal.catch(() => {});
  await vi.advanceTimersByTimeAsync(1000);
  expect(hold.isHeld).toBe(false);
  await expect(renewal).rejects.toMatchObject({ reason: 'expired' });
});

test('renew_with_a_longer_lease_while_a_renewal_is_under_way_resolves_when_the_server_has_confirmed_it', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN, 50)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000 }));
  await vi.advanceTimersByTimeAsync(270);
  const renewal = hold.renew(60_000);
  await vi.advanceTimersByTimeAsync(10);
  expect(hold.remaining).toBeLessThan(1000);
  await within(200, renewal);
  expect(hold.remaining).toBeGreaterThan(50_000);
  expect(server.sent.slice(1)).toEqual([1000, 60_000].map((lease) => `LOCK.RENEW a O TOKEN ${TOKEN} LEASE ${lease}`));
});

test('renew_rejects_when_the_lease_is_out_of_range_or_the_lock_was_released', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  const hold = await within(10, holdfast.lock('a'));
  for (const lease of [0, -1, Number.NaN, Number.POSITIVE_INFINITY, 315_360_000_001])
    await expect(hold.renew(lease)).rejects.toThrow(`lease must be a number from 1 to 315360000000, got ${lease}`);
  expect(hold.isHeld).toBe(true);
  await within(10, hold.release());
  await expect(hold.renew()).rejects.toMatchObject({ code: 'RELEASED' });
  expect(server.sent).toHaveLength(2);
});

test.each([true, false])('renew_keeps_the_former_lease_when_the_server_refuses_the_new_one_and_renew_is_%s', async (renew) => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply('-ERR LEASE must be between 1 and 60000 ms'), reply(TOKEN)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, renew }));
  await expect(within(10, hold.renew(3_600_000))).rejects.toThrow('LEASE must be between 1 and 60000 ms');
  expect(hold.lease).toBe(1000);
  await vi.advanceTimersByTimeAsync(1000);
  expect(hold.isHeld).toBe(renew);
  const leases = server.sent.slice(1).map((command) => command.split(' LEASE ')[1]);
  expect(leases.slice(0, 2)).toEqual(renew ? ['3600000', '1000'] : ['3600000']);
});

test('call_rejects_with_the_reason_when_the_server_is_down', async () => {
  const { server, holdfast } = start({});
  server.refuse = () => new UnavailableError('the connection broke', false, new Error('connect ECONNREFUSED 127.0.0.1:1'));
  await expect(within(5300, holdfast.info('a'))).rejects.toThrow(/: connect ECONNREFUSED/);
  await expect(within(1300, holdfast.lock('a', { wait: 1000 }))).rejects.toThrow('in time: cannot connect: connect ECONNREFUSED');
});

test('hold_with_a_lease_of_months_is_not_lost_before_it_is_over', async () => {
  const day = 86_400_000;
  const { holdfast } = start({ ACQUIRE: [granted] });
  const hold = await within(10, holdfast.lock('a', { lease: 100 * day, renew: false }));
  await vi.advanceTimersByTimeAsync(98 * day);
  expect(hold.isHeld).toBe(true);
  await vi.advanceTimersByTimeAsync(2 * day);
  expect(hold.signal.reason).toMatchObject({ reason: 'expired' });
});

test('hold_is_renewed_while_another_one_waits_for_replicas', async () => {
  const { holdfast } = start((args) => (args[0] === 'LOCK.ACQUIRE' ? granted : args.includes('REPLICAS') ? 'silent' : reply(TOKEN)));
  const both = [holdfast.lock('slow', { lease: 2000, replicas: 1 }), holdfast.lock('fast', { lease: 2000 })];
  const [slow, fast] = await within(10, Promise.all(both));
  await vi.advanceTimersByTimeAsync(5000);
  expect([slow?.isHeld, fast?.isHeld]).toEqual([false, true]);
});

test('is_held_is_false_and_renews_when_only_the_wall_clock_is_over', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] });
  const hold = await within(10, holdfast.lock('a'));
  vi.setSystemTime(Date.now() + 60_000);
  expect(hold.isHeld).toBe(false);
  await vi.advanceTimersByTimeAsync(10);
  expect(server.sent[1]).toMatch(/RENEW/);
  expect(hold.isHeld).toBe(true);
});

test('grant_does_not_count_when_the_machine_was_suspended_before_its_reply_was_read', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 100), reply([TOKEN + 1, 0])], RENEW: [reply(null)] });
  const lock = holdfast.lock('a');
  await vi.advanceTimersByTimeAsync(50);
  vi.setSystemTime(Date.now() + 60_000);
  expect((await within(500, lock)).fence).toBe(TOKEN + 1);
  expect(server.sent[1]).toMatch(/RENEW/);
});

test('is_held_is_false_when_the_machine_was_suspended_before_the_reply_to_a_renewal_was_read', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN, 100), 'silent'] });
  const hold = await within(10, holdfast.lock('a'));
  const renewed = hold.renew();
  await vi.advanceTimersByTimeAsync(50);
  vi.setSystemTime(Date.now() + 60_000);
  await within(100, renewed);
  expect(hold.isHeld).toBe(false);
});

test('renewals_that_are_due_together_share_a_connection', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] });
  await within(50, Promise.all(Array.from({ length: 300 }, (_, i) => holdfast.lock(`a${i}`))));
  const used = new Set<number>();
  server.script = (_, connection) => {
    used.add(connection.id);
    return reply(TOKEN);
  };
  await vi.advanceTimersByTimeAsync(2600);
  expect(server.sent.filter((line) => line.includes('RENEW'))).toHaveLength(300);
  expect(used.size).toBeLessThanOrEqual(4);
});

test('hold_is_renewed_while_another_of_its_pipeline_is_refused', async () => {
  const { holdfast } = start((args) => (args[0] === 'LOCK.RENEW' ? reply(args[1] === 'bad' ? '-NOPERM x' : TOKEN) : granted));
  const [good, bad] = await within(10, Promise.all(['good', 'bad'].map((name) => holdfast.lock(name, { lease: 2000 }))));
  await vi.advanceTimersByTimeAsync(9000);
  expect([good?.isHeld, bad?.isHeld]).toEqual([true, false]);
});

test.each([
  ['lock', reply('NONSENSE')],
  ['lock', reply(TOKEN + 1)],
  ['lock', reply([TOKEN])],
  ['lockAll', reply(TOKEN)],
  ['lockAll', reply([TOKEN])],
] as ['lock' | 'lockAll', Act][])(
  'renewal_of_%s_is_repeated_over_another_connection_when_reply_is_neither_token_nor_nil',
  async (call, act) => {
    const { server, holdfast } = start({ ACQUIRE: [granted], MACQUIRE: [granted], '*': [act] });
    const hold = await within(10, call === 'lock' ? holdfast.lock('a', { lease: 2000 }) : holdfast.lockAll(['a', 'b'], { lease: 2000 }));
    await vi.advanceTimersByTimeAsync(1000);
    expect(server.connections[0]?.closed).toBe(true);
    expect(hold.remaining).toBeGreaterThan(0);
    await vi.advanceTimersByTimeAsync(1000);
    expect(hold.signal.reason).toMatchObject({ reason: 'expired' });
  },
);

test('check_does_not_renew_and_finds_a_loss', async () => {
  let held = true;
  const { holdfast } = start((args) => {
    if (args[0] === 'LOCK.ACQUIRE') return granted;
    return reply(held ? ['limit', 1, 'new-field', 'x', 'holders', [['owner', args[1] === 'a' ? owner() : '', 'token', TOKEN]]] : null);
  });
  const hold = await within(10, holdfast.lock('a'));
  const owner = (): string => hold.owner;
  await vi.advanceTimersByTimeAsync(100);
  const { remaining } = hold;
  expect(await within(2, hold.check())).toBe(true);
  expect(hold.remaining).toBeLessThan(remaining);
  held = false;
  expect(await within(2, hold.check())).toBe(false);
  expect(hold.signal.reason).toMatchObject({ reason: 'gone' });
});

test('check_gives_a_repetition_shortly_before_its_end_time_for_an_answer', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], INFO: [reply('-LOADING x', 70), reply(null, 20)] });
  const hold = await within(10, holdfast.lock('a'));
  expect(await within(200, hold.check(100))).toBe(false);
  expect(server.open()).toBe(1);
});

test('check_finds_that_the_key_was_overwritten', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], INFO: [reply('-WRONGTYPE x')] });
  const hold = await within(10, holdfast.lock('a'));
  expect(await within(10, hold.check())).toBe(false);
  expect(hold.signal.reason).toMatchObject({ reason: 'changed' });
});

test('check_finds_no_loss_when_there_are_more_holders_than_the_server_shows', async () => {
  const holders = Array.from({ length: 5000 }, (_, i) => ['owner', `other${i}`, 'token', i]);
  const { holdfast } = start({ ACQUIRE: [granted], INFO: [reply(['limit', 0, 'holders', holders])] });
  const hold = await within(10, holdfast.lock('a', { shared: true }));
  expect(await within(10, hold.check())).toBe(true);
});

// Releasing

test.each([
  ['lock', reply('OK')],
  ['lock', reply([1])],
  ['lockAll', reply(1)],
  ['lockAll', reply([1])],
  ['lockAll', reply([1, 'OK'])],
  ['lockAll', reply([1, 1, 1])],
] as ['lock' | 'lockAll', Act][])(
  'release_of_%s_is_repeated_over_another_connection_when_reply_is_neither_number_nor_nil',
  async (call, act) => {
    const { server, holdfast } = start({
      ACQUIRE: [granted],
      MACQUIRE: [granted],
      RELEASE: [act, reply(1)],
      MRELEASE: [act, reply([1, 1])],
    });
    const hold = await within(10, call === 'lock' ? holdfast.lock('a') : holdfast.lockAll(['a', 'b']));
    await within(500, hold.release());
    expect(server.sent.filter((line) => line.includes('RELEASE') && line.includes('TOKEN'))).toHaveLength(2);
    expect(server.connections[0]?.closed).toBe(true);
  },
);

test('withdrawal_is_repeated_when_reply_is_neither_number_nor_nil', async () => {
  const { server, holdfast } = start({ ACQUIRE: ['silent'], 'RELEASE ALL': [reply('OK'), reply(1)] });
  const controller = new AbortController();
  const acquired = holdfast.lock('a', { signal: controller.signal });
  await vi.advanceTimersByTimeAsync(10);
  controller.abort();
  await expect(within(10, acquired)).rejects.toBeDefined();
  await vi.advanceTimersByTimeAsync(500);
  expect(server.sent.filter((line) => line.includes('RELEASE'))).toHaveLength(2);
});

test('release_is_confirmed_and_sent_once', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  const hold = await within(10, holdfast.lock('a'));
  await within(10, hold.release());
  await within(10, hold.release());
  expect(hold.isHeld).toBe(false);
  expect(hold.signal.aborted).toBe(false);
  expect(server.sent.slice(1)).toEqual([`LOCK.RELEASE a O TOKEN ${TOKEN}`]);
  await vi.advanceTimersByTimeAsync(20_000);
  expect(server.sent).toHaveLength(2);
});

test('release_rejects_when_first_reply_is_nil', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(null)] });
  const hold = await within(10, holdfast.lock('a'));
  const events: unknown[] = [];
  holdfast.on('lost', (event) => events.push(event)).on('released', (event) => events.push(event));
  await expect(within(10, hold.release())).rejects.toMatchObject({ code: 'LOCK_LOST', reason: 'gone' });
  expect(hold.signal.aborted).toBe(true);
  expect(events).toEqual([{ names: ['a'], fence: TOKEN, reason: 'gone' }]);
});

test('release_is_repeated_with_all_after_a_broken_connection_and_nil_means_released', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: ['cut', reply(null)] });
  const hold = await within(10, holdfast.lock('a'));
  await within(500, hold.release());
  expect(server.sent.slice(1)).toEqual([`LOCK.RELEASE a O TOKEN ${TOKEN}`, `LOCK.RELEASE a O TOKEN ${TOKEN}`, 'LOCK.RELEASE a O ALL']);
});

test('release_that_was_not_sent_is_no_attempt', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(null)] });
  const hold = await within(10, holdfast.lock('a'));
  for (const connection of server.connections) connection.close();
  server.refuse = () => (server.attempts < 4 ? new Error('refused') : undefined);
  await expect(within(2000, hold.release())).rejects.toMatchObject({ code: 'LOCK_LOST' });
});

test.each(passing)('release_is_repeated_after_%s', async (_, act) => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [act, act, reply(1)] });
  const hold = await within(10, holdfast.lock('a'));
  await within(2000, hold.release());
});

test('release_rejects_with_fatal_error', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply('-NOPERM x')] });
  const hold = await within(10, holdfast.lock('a'));
  await expect(within(10, hold.release())).rejects.toMatchObject({ code: 'NOPERM' });
});

test('release_rejects_with_a_loss_when_the_key_was_overwritten', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply('-WRONGTYPE x')] });
  const hold = await within(10, holdfast.lock('a'));
  await expect(within(10, hold.release())).rejects.toMatchObject({ code: 'LOCK_LOST', reason: 'changed' });
});

test('release_is_bounded_and_goes_on_in_the_background', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: ['silent'] });
  const hold = await within(10, holdfast.lock('a'));
  await expect(within(700, hold.release({ timeout: 600 }))).rejects.toMatchObject({ code: 'UNAVAILABLE' });
  const count = server.sent.length;
  await vi.advanceTimersByTimeAsync(5000);
  expect(server.sent.length).toBeGreaterThan(count);
  await vi.advanceTimersByTimeAsync(10_000);
  const end = server.sent.length;
  await vi.advanceTimersByTimeAsync(20_000);
  expect(server.sent.length).toBe(end);
});

test('late_reply_to_renewal_is_ignored_after_release', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(null, 100)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000 }));
  await vi.advanceTimersByTimeAsync(250);
  await within(10, hold.release());
  await vi.advanceTimersByTimeAsync(2000);
  expect(hold.signal.aborted).toBe(false);
});

// Several names, ephemeral holds

test('several_names_are_one_hold_and_one_nil_is_its_loss', async () => {
  const { server, holdfast } = start({
    MACQUIRE: [granted],
    MRENEW: [reply([TOKEN, TOKEN]), reply([TOKEN, null])],
    MRELEASE: [reply([1, 1])],
  });
  const hold = await within(10, holdfast.lockAll(['a', 'b'], { lease: 1000 }));
  await vi.advanceTimersByTimeAsync(600);
  expect(hold.signal.reason).toMatchObject({ reason: 'gone', names: ['a', 'b'] });
  // The other name may still be held: it is released even if the caller does not release.
  expect(server.sent.slice(3)).toEqual([`LOCK.MRELEASE 2 a b O TOKEN ${TOKEN}`]);
  await expect(hold.release()).rejects.toMatchObject({ reason: 'gone' });
  expect(server.sent[0]).toBe('LOCK.MACQUIRE 2 a b O HOLDS 1 LEASE 1000 WAIT 3600000 WITHWAITED');
  expect(server.sent[1]).toBe(`LOCK.MRENEW 2 a b O TOKEN ${TOKEN} LEASE 1000`);
});

test('ephemeral_hold_keeps_its_connection_and_is_lost_with_it', async () => {
  const users: number[] = [];
  const { server, holdfast } = start((args, connection) => {
    users.push(connection.id);
    return args[0] === 'LOCK.ACQUIRE' ? granted : reply(TOKEN);
  });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, ephemeral: true }));
  await within(10, holdfast.lock('b', { renew: false }));
  await vi.advanceTimersByTimeAsync(300);
  expect(server.sent[0]).toMatch(/EPHEMERAL/);
  expect(users).toEqual([0, 1, 0]);
  server.connections[0]?.close();
  expect(hold.signal.reason).toMatchObject({ reason: 'disconnected' });
});

test('ephemeral_hold_is_renewed_every_2_s_so_that_its_connection_is_not_idle', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] });
  await within(10, Promise.all([holdfast.lock('a', { lease: 3_600_000, ephemeral: true }), holdfast.lock('b', { lease: 3_600_000 })]));
  let renewals = 0;
  for (let s = 0; s < 10; s += 2) {
    await vi.advanceTimersByTimeAsync(2000);
    expect(server.sent.filter((line) => line.includes('RENEW a'))).toHaveLength(++renewals);
  }
  expect(server.sent.filter((line) => line.includes('RENEW b'))).toEqual([]);
});

test('ephemeral_hold_closes_its_connection_when_it_is_lost', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(null)] });
  const hold = await within(10, holdfast.lock('a', { lease: 1000, ephemeral: true }));
  await vi.advanceTimersByTimeAsync(300);
  expect(hold.signal.reason).toMatchObject({ reason: 'gone' });
  expect(server.open()).toBe(0);
});

test('ephemeral_grant_that_is_cancelled_while_it_is_read_leaves_no_connection', async () => {
  for (let ticks = 0; ticks < 15; ticks++) {
    let answer = (): void => {};
    const { server, holdfast } = start((args, connection) => {
      if (args[0] !== 'LOCK.ACQUIRE') return reply(1);
      answer = () => connection.answer(args, [TOKEN, 0]);
      return 'silent';
    });
    const controller = new AbortController();
    const lock = holdfast.lock('a', { ephemeral: true, signal: controller.signal }).catch(() => {});
    await vi.advanceTimersByTimeAsync(10);
    answer();
    for (let i = 0; i < ticks; i++) await Promise.resolve();
    controller.abort();
    await vi.advanceTimersByTimeAsync(3000);
    await lock;
    await within(5100, holdfast.close());
    expect(server.open(), `${ticks} ticks`).toBe(0);
  }
});

test('lock_manager_claims_no_more_than_its_request_has_waited', async () => {
  const waited: (string | undefined)[] = [];
  const { holdfast } = start((args) => {
    if (args[0] !== 'LOCK.ACQUIRE') return reply(args[0] === 'LOCK.INFO' ? null : 1);
    const at = args.indexOf('WAITED');
    if (args.includes('WAIT')) waited.push(at < 0 ? undefined : args[at + 1]);
    return args.includes('WAIT') ? granted : reply(null, 5);
  });
  const work = new LockManager(holdfast).request('a', () => {});
  await vi.advanceTimersByTimeAsync(20);
  await work;
  // It took 7 ms, perhaps rounded up. Claiming 7 could overtake a request that another manager made right before.
  expect(waited).toEqual(['6']);
});

test('query_lists_pending_requests_in_the_order_of_the_server', async () => {
  const owners: string[] = [];
  const { holdfast } = start((args) => {
    const [command, , owner = ''] = args;
    if (command === 'SCAN') return reply(['0', ['web-locks:a']]);
    if (command === 'LOCK.INFO') return reply(['holders', [['owner', 'first#x', 'token', 1]]]);
    if (command === 'LOCK.ACQUIRE' && args.includes('WAIT')) owners.push(owner);
    if (command === 'LOCK.ACQUIRE') return args.includes('WAIT') ? 'silent' : reply(null);
    const queue = ['second#x', owners[0], 'third#x'];
    return reply(
      queue.map((owner) => ['owner', owner, 'waited', 1, 'limit', 1]),
      200,
    );
  });
  const locks = new LockManager(holdfast);
  for (let i = 0; i < 2; i++) locks.request('a', () => {}).catch(() => {});
  await vi.advanceTimersByTimeAsync(20);
  const { held, pending } = await within(500, locks.query());
  const [own] = (owners[0] as string).split('#');
  expect(held.map(({ clientId }) => clientId)).toEqual(['first']);
  expect(pending.map(({ clientId }) => clientId)).toEqual(['second', own, 'third', own]);
  await within(5100, holdfast.close());
});

// A cluster

test.each([[['a:1', 'b:2']], [['b:2', 'a:1']], [['b:2', 'a:1', 'c:3']], [['b:2', 'c:3', 'd:4', 'a:1']]])(
  'holds_in_many_slots_outlast_the_failover_of_a_node_of_%j',
  async (nodes) => {
    let primary = 'a:1';
    const slots = (args: readonly string[], { address }: { address: string | undefined }): Act =>
      address === primary ? (args[0] === 'LOCK.ACQUIRE' ? granted : reply(TOKEN)) : reply(`-MOVED ${slotOf(args[1] as string)} ${primary}`);
    const { server, holdfast } = start({});
    server.script = slots;
    server.addresses = () => nodes;
    const holds = await within(500, Promise.all(Array.from({ length: 100 }, (_, i) => holdfast.lock(`name${i}`, { lease: 5000 }))));
    primary = 'b:2';
    server.refuse = (address) => (address === 'a:1' ? new Error('refused') : undefined);
    for (const connection of server.connections) if (connection.address === 'a:1') connection.close();
    await vi.advanceTimersByTimeAsync(20_000);
    expect(holds.filter(({ isHeld }) => isHeld)).toHaveLength(100);
  },
);

test('lock_asks_another_node_when_one_was_cut_off_from_its_cluster', async () => {
  let primary = 'a:1';
  const { server, holdfast } = start({});
  server.addresses = () => ['b:2', 'a:1'];
  server.script = ([command], { address }) =>
    address === primary
      ? command === 'LOCK.ACQUIRE'
        ? granted
        : reply(TOKEN)
      : reply(address === 'a:1' ? '-CLUSTERDOWN x' : '-MOVED 15495 a:1');
  await within(100, holdfast.info('a')); // Its slot is known now.
  primary = 'b:2';
  await within(1000, holdfast.lock('a'));
});

test.each(['RENEW', 'RELEASE', 'INFO'])('%s_follows_ask_also_from_a_pipeline', async (verb) => {
  let asking = false;
  const { server, holdfast } = start({});
  server.addresses = () => ['a:1'];
  server.script = ([command, key], { address }) => {
    const asked = asking;
    asking = command === 'ASKING';
    if (command === 'LOCK.ACQUIRE') return granted;
    if (address === 'a:1' && command === `LOCK.${verb}` && key !== 'stays') return reply(`-ASK ${slotOf(key as string)} ${key}:2`);
    if (address !== 'a:1' && !asking && !asked) return reply(`-MOVED ${slotOf(key as string)} a:1`);
    return reply(command === 'LOCK.INFO' ? ['holders', [['owner', hold.owner, 'token', TOKEN]]] : TOKEN);
  };
  const all = Promise.all(['moves', 'goes', 'stays'].map((name) => holdfast.lock(name, { lease: 2000 })));
  const [hold, second] = (await within(20, all)) as [Hold, Hold];
  await vi.advanceTimersByTimeAsync(5000);
  expect([hold.isHeld, second.isHeld]).toEqual([true, true]);
  expect(await within(100, hold.check())).toBe(true);
  await within(100, hold.release());
});

test('late_answer_of_a_former_node_keeps_the_place_of_a_wait_that_polls', async () => {
  const { server, holdfast } = start({}, { maxConnections: 3 });
  server.addresses = () => ['a:1', 'b:2'];
  server.script = ([command, key = '', ...args], { address }) => {
    if (address === 'a:1' && (key === 'waits' || key === 'polls')) return reply(`-MOVED ${slotOf(key)} b:2`);
    if (address === 'a:1' && key === 'lost') return reply('-CLUSTERDOWN x');
    if (command !== 'LOCK.ACQUIRE' || key === 'polls') return reply(null, args.includes('WAIT') ? 1900 : 1);
    return key === 'waits' || address === 'a:1' ? 'silent' : granted;
  };
  for (const name of ['waits', 'polls']) await within(100, holdfast.info(name)); // Their slots are known now.
  holdfast.lock('waits').catch(() => {}); // It has the only place at its node for waits.
  holdfast.lock('polls').catch(() => {}); // It asks there again and again.
  const lock = holdfast.lock('moves');
  await within(600, holdfast.info('lost')); // Unknown slots are looked for at the other node from now on.
  await vi.advanceTimersByTimeAsync(1800);
  for (const connection of server.connections) if (connection.address === 'a:1') connection.close();
  await within(3000, lock);
});

test('connection_that_has_redirected_a_request_is_not_closed_for_its_silence', async () => {
  const { server, holdfast } = start({});
  server.addresses = () => ['a:1', 'b:2'];
  server.script = ([command, key]) => {
    if (key === 'moves') return reply(`-MOVED ${slotOf(key)} b:2`);
    return command === 'LOCK.ACQUIRE' ? granted : reply(command === 'LOCK.INFO' ? null : TOKEN);
  };
  await within(100, holdfast.info('a')); // It opens a connection.
  server.delay = 60_000;
  const moves = holdfast.lock('moves', { wait: 100 }).catch((error) => error);
  await vi.advanceTimersByTimeAsync(5);
  const hold = await within(5, holdfast.lock('stays', { ephemeral: true }));
  expect(await within(10_000, moves)).toBeInstanceOf(NotAcquiredError);
  expect([server.connections.length, hold.isHeld]).toEqual([1, true]);
});

// The pool

test.each(['refuses', 'accepts_and_closes'])('outage_costs_at_most_40_attempts_in_10_s_when_server_%s', async (how) => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] });
  await within(10, holdfast.lock('before'));
  const begun = performance.now();
  const down = (): boolean => performance.now() - begun < 10_000;
  if (how === 'refuses') server.refuse = () => (down() ? new Error('refused') : undefined);
  else server.accepted = (connection) => void (down() && setTimeout(() => connection.close(), 1));
  for (const connection of server.connections) connection.close();
  server.attempts = 0;
  const work = Promise.all(Array.from({ length: 200 }, (_, i) => holdfast.lock(`a${i}`)));
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.attempts).toBeGreaterThan(10);
  expect(server.attempts).toBeLessThanOrEqual(40);
  await within(3000, work);
});

test('hold_outlasts_a_failover_that_leaves_many_idle_connections_silent', async () => {
  let primary = 0;
  const { server, holdfast } = start((args, { id }) =>
    id < primary ? 'silent' : args[0] === 'LOCK.ACQUIRE' ? granted : reply(args[0] === 'LOCK.INFO' ? null : TOKEN, 5),
  );
  const hold = await within(20, holdfast.lock('a', { lease: 4000 }));
  await within(100, Promise.all(Array.from({ length: 20 }, (_, i) => holdfast.info(`b${i}`))));
  primary = server.connections.length;
  expect(primary).toBeGreaterThan(10);
  await vi.advanceTimersByTimeAsync(8000);
  expect(hold.isHeld).toBe(true);
});

test('waits_leave_two_connections_free', async () => {
  const { server, holdfast } = start((args) => (args.includes('WAIT') ? 'silent' : args[0] === 'LOCK.ACQUIRE' ? reply(null) : reply(1)), {
    maxConnections: 6,
  });
  for (let i = 0; i < 20; i++) holdfast.lock(`a${i}`).catch(() => {});
  await vi.advanceTimersByTimeAsync(500);
  expect(server.open()).toBeLessThanOrEqual(6);
  expect(await within(20, holdfast.tryLock('b'))).toBeNull();
  await vi.advanceTimersByTimeAsync(3000);
  expect(server.sent.filter((line) => / WAIT 100 /.test(line)).length).toBeGreaterThan(0);
});

test('nested_locks_do_not_block_the_pool', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RENEW: [reply(TOKEN)] }, { maxConnections: 4 });
  const nested = Array.from({ length: 40 }, async (_, i) => {
    const outer = await holdfast.lock(`outer${i}`);
    const inner = await holdfast.lock(`inner${i}`);
    await inner.release();
    await outer.release();
  });
  await within(2000, Promise.all(nested));
});

test('only_the_oldest_wait_for_a_mutex_is_at_the_server', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 50)] });
  const work = Promise.all(Array.from({ length: 3 }, () => holdfast.lock('a', { renew: false })));
  await vi.advanceTimersByTimeAsync(20);
  expect(server.sent).toHaveLength(1);
  await within(200, work);
  expect(server.sent[2]).toMatch(/ WAITED 10\d /);
});

test('cancelled_wait_leaves_the_local_queue', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply([TOKEN, 0], 50)] });
  const controller = new AbortController();
  const first = holdfast.lock('a', { renew: false });
  const second = holdfast.lock('a', { signal: controller.signal });
  const third = holdfast.lock('a', { renew: false });
  second.catch(() => {});
  controller.abort();
  await within(200, Promise.all([first, third]));
  expect(server.sent.filter((line) => line.includes('ACQUIRE'))).toHaveLength(2);
});

test('close_cancels_waits_and_releases_holds', async () => {
  const { server, holdfast } = start((args) => (args[0] !== 'LOCK.ACQUIRE' ? reply(1) : args[1] === 'a' ? granted : 'silent'));
  await within(10, holdfast.lock('a'));
  const wait = holdfast.lock('b');
  wait.catch(() => {});
  await vi.advanceTimersByTimeAsync(10);
  await within(5100, holdfast.close());
  await expect(wait).rejects.toMatchObject({ code: 'CLOSED' });
  expect(server.sent).toContain(`LOCK.RELEASE a O TOKEN ${TOKEN}`);
  expect(server.sent).toContain('LOCK.RELEASE b O ALL');
  expect(server.open()).toBe(0);
  await expect(holdfast.lock('c')).rejects.toMatchObject({ code: 'CLOSED' });
});

test('close_sends_nothing_for_waits_that_the_server_does_not_know', async () => {
  const { server, holdfast } = start((args) => (args[0] === 'LOCK.ACQUIRE' ? 'silent' : reply(null)));
  for (let i = 0; i < 5; i++) holdfast.lock('a').catch(() => {});
  await vi.advanceTimersByTimeAsync(10);
  expect(await within(10, holdfast.info('a'))).toBeNull(); // Its connection is idle.
  await within(5100, holdfast.close());
  expect(server.sent.filter((line) => line.includes('ACQUIRE'))).toHaveLength(1);
});

test('close_waits_for_the_withdrawal_of_a_wait_that_was_cancelled_before', async () => {
  const { server, holdfast } = start((args) => (args[0] === 'LOCK.ACQUIRE' ? 'silent' : reply(1)));
  const controller = new AbortController();
  holdfast.lock('a', { signal: controller.signal }).catch(() => {});
  await vi.advanceTimersByTimeAsync(100);
  controller.abort();
  await within(5100, holdfast.close());
  expect(server.sent).toContain('LOCK.RELEASE a O ALL');
});

test('close_waits_for_a_release_that_goes_on_in_the_background', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(1, 300)] });
  const released: unknown[] = [];
  holdfast.on('released', (event) => released.push(event));
  const hold = await within(10, holdfast.lock('a'));
  await expect(within(20, hold.release({ timeout: 10 }))).rejects.toMatchObject({ code: 'UNAVAILABLE' });
  await within(1000, holdfast.close());
  expect(released).toMatchObject([{ names: ['a'], fence: TOKEN }]);
});

test('close_is_bounded_when_a_release_with_a_longer_time_is_under_way', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: ['silent'] });
  const hold = await within(10, holdfast.lock('a', { lease: 600_000 }));
  hold.release({ timeout: 600_000 }).catch(() => {});
  await within(5100, holdfast.close());
  expect(server.open()).toBe(0);
});

test('exit_of_the_program_releases_while_the_last_idle_connection_was_taken_by_a_wait', async () => {
  const waiting = new Set<unknown>();
  const executed: string[] = [];
  const { server, holdfast } = start((args, connection) => {
    if (!waiting.has(connection)) executed.push(args.join(' ')); // A server reads nothing of a client that waits.
    if (args[1] === 'taken') waiting.add(connection);
    return args[1] === 'taken' ? 'silent' : granted;
  });
  const hold = await within(10, holdfast.lock('a'));
  holdfast.lock('taken').catch(() => {});
  await vi.advanceTimersByTimeAsync(10);
  holdfast.releaseNow(); // As the event `exit` does.
  expect(executed.at(-1)).toBe(`LOCK.RELEASE a ${hold.owner} TOKEN ${TOKEN}`);
  expect(server.connections).toHaveLength(2);
});

test('exit_of_the_program_releases_while_the_only_connection_is_in_use', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  await within(10, holdfast.lock('a'));
  holdfast.info('a').catch(() => {});
  holdfast.releaseNow(); // As the event `exit` does.
  expect(server.sent.at(-1)).toBe(`LOCK.RELEASE a O TOKEN ${TOKEN}`);
  await within(10, holdfast.close());
});

test('one_connection_is_enough_for_locks_one_after_the_other', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(1)] });
  for (const name of ['a', 'b', 'c'])
    await within(
      10,
      holdfast.using(name, () => {}),
    );
  expect(server.connections).toHaveLength(1);
});

test('election_resigns_at_once_while_it_pauses_after_an_error', async () => {
  const { holdfast } = start({ ACQUIRE: [reply('-NOPERM x')] });
  const warnings: unknown[] = [];
  holdfast.on('warning', (error) => warnings.push(error));
  const election = holdfast.elect('a', {});
  await vi.advanceTimersByTimeAsync(10);
  expect(warnings).toMatchObject([{ code: 'NOPERM' }]);
  await within(10, election.resign());
});

test('candidacy_goes_on_when_the_leader_releases_its_hold', async () => {
  const { holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(TOKEN)] });
  const terms: Hold[] = [];
  const election = holdfast.elect('a', { onElected: (hold) => void terms.push(hold) });
  await vi.advanceTimersByTimeAsync(10);
  await within(10, (terms[0] as Hold).release());
  await vi.advanceTimersByTimeAsync(10);
  expect([terms.length, election.isLeader]).toEqual([2, true]);
  await within(10, election.resign());
});

test('candidacy_ends_when_the_end_of_the_program_releases_the_leader', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(TOKEN)] });
  const election = holdfast.elect('a', {});
  await vi.advanceTimersByTimeAsync(10);
  holdfast.releaseAll(); // As the event `beforeExit` does.
  await vi.advanceTimersByTimeAsync(10_000);
  expect(server.sent.map((line) => line.split(' ')[0])).toEqual(['LOCK.ACQUIRE', 'LOCK.RELEASE']);
  await within(10, election.resign());
});

test('election_leaves_no_listener_when_it_resigned_or_the_client_was_closed', async () => {
  const { holdfast } = start({ ACQUIRE: [granted, 'silent'] });
  const { signal } = new AbortController();
  const first = holdfast.elect('a', { signal });
  await vi.advanceTimersByTimeAsync(10);
  expect(first.isLeader).toBe(true);
  holdfast.elect('b', { signal });
  expect(getEventListeners(signal, 'abort')).toHaveLength(2);
  await within(10, first.resign());
  expect(getEventListeners(signal, 'abort')).toHaveLength(1);
  await within(5100, holdfast.close());
  expect(getEventListeners(signal, 'abort')).toHaveLength(0);
});

test('web_lock_waits_when_the_server_gives_no_answer_unless_it_must_not_wait', async () => {
  const { holdfast } = start({ ACQUIRE: ['silent', granted, 'silent'] });
  const locks = new LockManager(holdfast);
  expect(
    await within(
      3000,
      locks.request('a', () => 'done'),
    ),
  ).toBe('done');
  await expect(
    within(
      3000,
      locks.request('b', { ifAvailable: true }, () => {}),
    ),
  ).rejects.toBeInstanceOf(NotAcquiredError);
});

test('steal_pauses_when_the_lock_stays_held_after_force', async () => {
  let owner: string | undefined;
  const { server, holdfast } = start(([command, , name, ...more]) => {
    if (command !== 'LOCK.ACQUIRE') return reply(command === 'LOCK.WAITERS' ? [['owner', owner]] : command === 'LOCK.FORCE' ? 0 : 1);
    owner = name;
    return more.includes('WAIT') ? 'silent' : reply(null);
  });
  const thief = new LockManager(holdfast).request('a', { steal: true }, () => {});
  thief.catch(() => {});
  await vi.advanceTimersByTimeAsync(1000);
  expect(server.sent.filter((line) => line.includes('FORCE')).length).toBeLessThan(150);
  await within(5100, holdfast.close());
});

test('observe_pauses_when_its_signal_is_null', async () => {
  vi.useRealTimers(); // They do not replace those of node:timers/promises.
  const { server, holdfast } = start({ INFO: [reply(null), reply(null), reply(null)] });
  const observation = holdfast.observe('a', { signal: null as unknown as AbortSignal });
  await observation.next();
  const next = observation.next();
  await new Promise((resolve) => setTimeout(resolve, 100));
  expect(server.sent).toEqual(['LOCK.INFO a']);
  await holdfast.close();
  await expect(next).rejects.toMatchObject({ code: 'CLOSED' });
  const wrong = holdfast.observe('a', { signal: {} as AbortSignal });
  await expect(wrong.next()).rejects.toThrow('signal must be an AbortSignal');
});

test('release_and_check_refuse_a_time_out_of_range', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted], RELEASE: [reply(1)] });
  const hold = await within(10, holdfast.lock('a'));
  for (const timeout of [Number.NaN, -1, '5'] as number[]) {
    await expect(hold.release({ timeout })).rejects.toThrow('timeout must be a number from 0 to Infinity');
    await expect(hold.check(timeout)).rejects.toThrow('timeout must be a number from 0 to Infinity');
  }
  expect(server.sent).toHaveLength(1);
  await within(10, hold.release());
});

test('observe_refuses_an_interval_that_no_timer_takes', async () => {
  const { holdfast } = start({});
  for (const interval of [0, 2 ** 31, Number.POSITIVE_INFINITY, Number.NaN])
    await expect(holdfast.observe('a', { interval }).next()).rejects.toThrow('interval must be a number from 1 to 2147483647');
});

test('verrou_delete_succeeds_when_the_reply_to_its_repetition_is_nil', async () => {
  const { holdfast } = start({ ACQUIRE: [reply(TOKEN)], RELEASE: ['cut', reply(null)] });
  const store = new VerrouStore(holdfast, { E_LOCK_NOT_OWNED: RangeError });
  await within(10, store.save('a', 'me', 1000));
  await within(100, store.delete('a', 'me'));
  await within(10, store.save('a', 'me', 1000));
  await expect(within(100, store.delete('a', 'me'))).rejects.toBeInstanceOf(RangeError);
});

// Versions

test.each([
  [['protocol', [5, 6], 'version', '1.0.0'], 'CLIENT_TOO_OLD'],
  [['protocol', [2, 3], 'version', '0.3.0'], 'SERVER_TOO_OLD'],
])('lock_rejects_when_versions_do_not_overlap', async (version, code) => {
  const { server, holdfast } = start({});
  server.version = version;
  await expect(within(100, holdfast.lock('a'))).rejects.toMatchObject({ code });
});

test('lock_says_that_the_module_is_not_loaded_or_too_old', async () => {
  const { server, holdfast } = start({ ACQUIRE: [reply("-ERR unknown command 'LOCK.ACQUIRE', with args beginning with: ")] });
  server.version = "-ERR unknown command 'LOCK.VERSION', with args beginning with: ";
  await expect(within(100, holdfast.lock('a'))).rejects.toMatchObject({ code: 'MODULE_NOT_LOADED' });
  server.script = script({ ACQUIRE: [reply("-ERR wrong number of arguments for 'LOCK.ACQUIRE' command")] });
  await expect(within(100, holdfast.lock('a'))).rejects.toMatchObject({ code: 'SERVER_TOO_OLD' });
  server.refuse = () => ServerError.from("ERR unknown command 'HELLO', with args beginning with: '3' ");
  await expect(within(100, new Holdfast(server).lock('a'))).rejects.toMatchObject({ code: 'ERR' });
});

test('info_works_when_the_user_may_not_ask_for_the_version', async () => {
  const { server, holdfast } = start({ INFO: [reply(null)] });
  server.version = '-NOPERM this user has no permissions';
  expect(await within(100, holdfast.info('a'))).toBeNull();
});

test('invalid_terms_are_refused', async () => {
  const { holdfast } = start({});
  expect(() => start({}, { maxConnections: 2 })).toThrow(RangeError);
  await expect(holdfast.lockAll([])).rejects.toBeInstanceOf(RangeError);
  await expect(holdfast.lock('a', { shared: true, limit: 2 })).rejects.toBeInstanceOf(TypeError);
  await expect(holdfast.lockAll(Array.from({ length: 129 }, (_, i) => `${i}`))).rejects.toThrow('names must be at most 128, got 129');
  await expect(holdfast.lock('a', { replicas: 0.5 })).rejects.toThrow('replicas must be a whole number, got 0.5');
  expect(() => holdfast.semaphore('a', 1.5)).toThrow('limit must be a whole number, got 1.5');
  await expect(holdfast.lockAll(['a', 'b'], { shared: true })).rejects.toBeInstanceOf(TypeError);
  expect(() => holdfast.semaphore('a', 0)).toThrow(RangeError);
  expect(() => holdfast.elect('a', { lease: 0 })).toThrow(RangeError);
  expect(() => holdfast.elect('a', { replicas: -1 })).toThrow(RangeError);
  expect(() => holdfast.elect('a', { value: 5 as unknown as string })).toThrow('value must be a string, got 5');
});

test.each(['wait', 'lease', 'limit', 'replicas'])('lock_refuses_a_%s_that_is_no_number_of_its_range', async (option) => {
  const { server, holdfast } = start({});
  for (const value of [-1, Number.NaN, Number.NEGATIVE_INFINITY, '5', {}, true, 1n, Symbol('s')]) {
    const lock = holdfast.lock('a', { [option]: value } as object);
    await expect(lock).rejects.toThrow(new RegExp(`^${option} must be a number from [01] to \\w+, got `));
    await expect(lock).rejects.toThrow(`got ${String(value)}`);
  }
  expect(server.sent).toEqual([]);
});

test('lock_refuses_what_typescript_would', async () => {
  const { server, holdfast } = start({});
  for (const name of [undefined, null, 5, {}, ['a'], Buffer.from('a'), Symbol('s')] as unknown as string[]) {
    await expect(holdfast.lock(name)).rejects.toThrow('the name of a lock must be a string');
    await expect(holdfast.lockAll(['a', name])).rejects.toThrow('the name of a lock must be a string');
    await expect(holdfast.info(name)).rejects.toThrow('the name of a lock must be a string');
    expect(() => holdfast.elect(name)).toThrow('the name of a lock must be a string');
  }
  for (const names of ['ab', undefined, new Set(['a'])] as unknown as string[][])
    await expect(holdfast.lockAll(names)).rejects.toThrow('names must be an array');
  await expect(holdfast.lock('a', 5000 as unknown as object)).rejects.toThrow('options must be an object, got 5000');
  await expect(holdfast.lock('a', { signal: new AbortController() as unknown as AbortSignal })).rejects.toThrow(
    'signal must be an AbortSignal',
  );
  await expect(holdfast.request('a', ['LOCK.INFO', undefined as unknown as string])).rejects.toThrow('a command must be of strings');
  for (const driver of [undefined, {}, { connect() {}, duplicate() {} }] as unknown as FakeServer[])
    expect(() => new Holdfast(driver)).toThrow('driver must come from fromIoredis or fromNodeRedis');
  expect(server.sent).toEqual([]);
});

test('callbacks_that_are_no_functions_are_refused_before_anything_is_sent', async () => {
  const { server, holdfast } = start({ ACQUIRE: [granted] });
  const work = 'work' as unknown as () => void;
  await expect(holdfast.using('a', work)).rejects.toThrow('work must be a function, got work');
  await expect(holdfast.semaphore('a', 2).using(work)).rejects.toThrow('work must be a function, got work');
  expect(() => holdfast.elect('a', { onElected: work })).toThrow('onElected must be a function, got work');
  expect(() => holdfast.elect('a', { onLost: work })).toThrow('onLost must be a function, got work');
  expect(() => start({}, { actor: work as unknown as () => string })).toThrow('actor must be a function, got work');
  await vi.advanceTimersByTimeAsync(100);
  expect(server.sent).toEqual([]);
});

test('hundred_calls_may_share_a_signal', async () => {
  const { holdfast } = start({});
  const warnings: unknown[] = [];
  const warn = (warning: unknown): unknown => warnings.push(warning);
  process.on('warning', warn);
  const controller = new AbortController();
  const calls = Array.from({ length: 100 }, (_, i) => holdfast.lock(`${i}`, { signal: controller.signal }));
  controller.abort('why');
  for (const call of calls) await expect(call).rejects.toBe('why');
  vi.useRealTimers();
  await new Promise((resolve) => setImmediate(resolve)); // Warnings are emitted in the next tick.
  process.off('warning', warn);
  expect(warnings).toEqual([]);
});
