// A node-cron job that runs once in a fleet: the scheduler of each host starts at the same time, and one of them executes the job.
//
//     node cron-in-a-fleet.mjs NAME
//
// Each run has a name and a lock of its own, which stays for `distributedLease`. If the process that executes a run is killed, that run is not repeated; the
// others execute the next one.
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { runCoordinator } from 'holdfast/node-cron';
import { Redis } from 'ioredis';
import cron from 'node-cron';

const name = process.argv[2] ?? 'nameless';
const redis = new Redis(process.env.REDIS_URL ?? 'redis://127.0.0.1:6379');
const holdfast = new Holdfast(fromIoredis(redis));

const task = cron.schedule(
  '* * * * * *',
  async (context) => {
    console.log(`${name} makes the report of ${context.dateLocalIso}`);
    await redis.rpush('report:log', context.dateLocalIso);
  },
  {
    name: 'report',
    distributed: true,
    // How long the lock of a run stays: longer than the clocks of the hosts differ.
    distributedLease: 30_000,
    runCoordinator: runCoordinator(holdfast),
  },
);

process.once('SIGINT', async () => {
  await task.destroy();
  await holdfast.close();
  await redis.quit();
});
