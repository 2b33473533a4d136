// Holdfast in NestJS and BullMQ, without their decorators, so that this file runs without either package.
import { Holdfast, NotAcquiredError } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { Redis } from 'ioredis';

/**
 * A NestJS provider: `@Module({ providers: [holdfastProvider], exports: [Holdfast] })`, and `constructor(private readonly holdfast: Holdfast)`.
 * With `app.enableShutdownHooks()` Nest calls `onModuleDestroy`, which releases what is held.
 */
export const holdfastProvider = {
  provide: Holdfast,
  useFactory: () => {
    const redis = new Redis(process.env.REDIS_URL ?? 'redis://127.0.0.1:6379', { lazyConnect: true });
    const holdfast = new Holdfast(fromIoredis(redis));
    return Object.assign(holdfast, { onModuleDestroy: () => holdfast.close() });
  },
};

/**
 * A BullMQ processor whose jobs of one name exclude each other, over all workers and queues: `new Worker('mail', exclusively(holdfast, …))`. A job that does
 * not get its turn within `wait` fails, and BullMQ repeats it as its `attempts` say.
 *
 * @template {{ name: string, data: unknown }} Job
 * @template T
 * @param {Holdfast} holdfast
 * @param {(job: Job) => string} nameOf
 * @param {(job: Job, signal: AbortSignal, fence: number) => Promise<T>} work
 * @param {number} wait ms
 */
export function exclusively(holdfast, nameOf, work, wait = 30_000) {
  return (/** @type {Job} */ job) => holdfast.using(nameOf(job), (signal, hold) => work(job, signal, hold.fence), { wait });
}

const holdfast = holdfastProvider.useFactory();
const processor = exclusively(
  holdfast,
  (/** @type {{ name: string, data: { account: string } }} */ job) => `account:${job.data.account}`,
  async (job) => {
    console.log(`${job.name} begins`);
    await new Promise((resolve) => setTimeout(resolve, 20));
    console.log(`${job.name} ends`);
  },
);
const data = { account: '7' };
await Promise.all([processor({ name: 'debit', data }), processor({ name: 'credit', data })]);
await holdfast.using('account:7', async () => {
  await exclusively(
    holdfast,
    () => 'account:7',
    async () => {},
    50,
  )({ name: 'late', data }).catch((error) => {
    console.log(error instanceof NotAcquiredError ? 'late is to be repeated' : error);
  });
});
await holdfast.onModuleDestroy();
