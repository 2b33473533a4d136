import fc from 'fast-check';
import { afterEach, beforeEach, expect, test, vi } from 'vitest';
import { type Hold, Holdfast } from '../src/index.js';
import { type FakeConnection, FakeServer } from './fake.js';

/** A model of the module: a mutex with a queue, for one key. */
class LockServer {
  owner: string | undefined;
  token = 0;
  deadline = 0;
  queue: { owner: string; lease: number; since: number; grant(): void; answer(reply: unknown): void }[] = [];
  readonly network: { delay(): number; cut(): boolean };
  readonly server: FakeServer;
  readonly #seen = new WeakSet<FakeConnection>();

  constructor(network: { delay(): number; cut(): boolean }) {
    this.network = network;
    this.server = new FakeServer((args, connection) => {
      // When a connection ends, its request leaves the queue.
      if (!this.#seen.has(connection)) {
        this.#seen.add(connection);
        const { onClose } = connection;
        connection.onClose = () => {
          onClose?.();
          this.queue = this.queue.filter((entry) => entry.answer !== answers.get(connection));
        };
      }
      if (network.cut()) {
        // The request may have arrived.
        if (network.cut()) setTimeout(() => this.#execute(args, () => {}), network.delay());
        return 'cut';
      }
      const answer = (reply: unknown): void => {
        setTimeout(() => (network.cut() ? connection.close() : connection.answer(args, reply)), network.delay());
      };
      answers.set(connection, answer);
      setTimeout(() => this.#execute(args, answer), network.delay());
      return 'silent';
    });
    const answers = new WeakMap<FakeConnection, (reply: unknown) => void>();
  }

  #value(args: readonly string[], name: string): number | undefined {
    const at = args.indexOf(name);
    return at < 0 ? undefined : Number(args[at + 1]);
  }

  #execute(args: readonly string[], answer: (reply: unknown) => void): void {
    const now = performance.now();
    this.#expire();
    const owner = args[2] as string;
    const mine = this.owner === owner;
    switch (args[0]) {
      case 'LOCK.ACQUIRE': {
        const lease = this.#value(args, 'LEASE') as number;
        const wait = this.#value(args, 'WAIT');
        const old = this.queue.findIndex((entry) => entry.owner === owner);
        const request = {
          owner,
          lease,
          since: now,
          grant: () => answer([this.token, now === performance.now() ? 0 : Math.floor(performance.now() - now)]),
          answer,
        };
        if (mine) {
          this.deadline = Math.max(this.deadline, now + lease);
          this.#arm();
          request.grant();
          return;
        }
        if (old >= 0) {
          this.queue[old]?.answer('-SUPERSEDED x');
          this.queue[old] = request;
        } else this.queue.push(request);
        this.#serve();
        if (this.owner === owner) return;
        const leave = (): void => {
          const at = this.queue.indexOf(request);
          if (at < 0) return;
          this.queue.splice(at, 1);
          answer(null);
        };
        if (wait === undefined) leave();
        else setTimeout(leave, wait);
        return;
      }
      case 'LOCK.RENEW':
        if (!mine || this.token !== this.#value(args, 'TOKEN')) {
          answer(null);
          return;
        }
        this.deadline = now + (this.#value(args, 'LEASE') as number);
        this.#arm();
        answer(this.token);
        return;
      case 'LOCK.RELEASE': {
        const all = args.includes('ALL');
        const at = all ? this.queue.findIndex((entry) => entry.owner === owner) : -1;
        const [waiting] = at >= 0 ? this.queue.splice(at, 1) : [];
        waiting?.answer(null);
        const releases = mine && (all || this.token === this.#value(args, 'TOKEN'));
        if (releases) this.owner = undefined;
        this.#serve();
        answer(releases || waiting ? 1 : null);
      }
    }
  }

  #expire(): void {
    if (this.owner !== undefined && performance.now() >= this.deadline) {
      this.owner = undefined;
      this.#serve();
    }
  }

  #arm(): void {
    setTimeout(() => this.#expire(), this.deadline - performance.now());
  }

  #serve(): void {
    if (this.owner !== undefined) return;
    const next = this.queue.shift();
    if (!next) return;
    this.owner = next.owner;
    this.token++;
    this.deadline = performance.now() + next.lease;
    this.#arm();
    next.grant();
  }
}

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  vi.useRealTimers();
});

const action = fc.record({
  at: fc.nat(6000),
  client: fc.nat(2),
  wait: fc.oneof(fc.constant(0), fc.nat(4000)),
  work: fc.nat(2500),
  lease: fc.constantFrom(800, 2000, 5000),
  renew: fc.boolean(),
  cancelAfter: fc.option(fc.nat(3000), { nil: undefined }),
});

/** A time in which nothing arrives; what was sent arrives after it. */
const outage = fc.record({ from: fc.nat(8000), length: fc.nat(6000) });

test('lock_has_one_holder_at_a_time_and_nothing_is_left_when_the_network_fails', async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(action, { minLength: 1, maxLength: 8 }),
      fc.array(outage, { maxLength: 3 }),
      fc.infiniteStream(fc.nat(999)),
      async (actions, outages, chance) => {
        const begun = performance.now();
        let healthy = false;
        const next = (): number => chance.next().value;
        const network = {
          delay: () => {
            const at = performance.now() - begun;
            const down = outages.find(({ from, length }) => at >= from && at < from + length);
            return healthy ? 1 : (down ? down.from + down.length - at : 0) + (next() < 950 ? (next() % 20) + 1 : next() * 4);
          },
          cut: () => !healthy && next() < 40,
        };
        const model = new LockServer(network);
        const clients = [0, 1, 2].map(() => new Holdfast(model.server));
        const holds = new Set<Hold>();
        const check = (): void => {
          const held = [...holds].filter((hold) => hold.isHeld);
          expect(held.length).toBeLessThanOrEqual(1);
          if (held[0]) expect(held[0].owner).toBe(model.owner);
        };
        const runs = actions.map(async ({ at, client, wait, work, lease, renew, cancelAfter }) => {
          await new Promise((resolve) => setTimeout(resolve, at));
          const controller = new AbortController();
          if (cancelAfter !== undefined) setTimeout(() => controller.abort(), cancelAfter);
          const asked = performance.now();
          const hold = await (clients[client] as Holdfast).lock('key', { wait, lease, renew, signal: controller.signal }).catch(() => null);
          expect(performance.now() - asked).toBeLessThanOrEqual(Math.max(wait, 1000) + 260);
          if (!hold) return;
          holds.add(hold);
          check();
          await new Promise((resolve) => setTimeout(resolve, work));
          check();
          await hold.release().catch(() => {});
          holds.delete(hold);
        });
        const watch = setInterval(check, 25);
        await vi.advanceTimersByTimeAsync(20_000);
        healthy = true;
        await vi.advanceTimersByTimeAsync(15_000);
        await Promise.all(runs);
        clearInterval(watch);
        expect(model.owner).toBeUndefined();
        expect(model.queue).toHaveLength(0);
        await Promise.all([...clients.map((client) => client.close()), vi.advanceTimersByTimeAsync(10)]);
        expect(performance.now() - begun).toBeLessThan(40_000);
      },
    ),
    { numRuns: 30, endOnFailure: true },
  );
});
