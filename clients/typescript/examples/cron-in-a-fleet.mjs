// Three schedulers stand for three machines of a fleet: each scheduled run is executed by one of them.
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { runCoordinator } from 'holdfast/node-cron';
import { Redis } from 'ioredis';
import cron from 'node-cron';

const redis = new Redis(process.env.REDIS ?? 'redis://127.0.0.1:6379', { lazyConnect: true });
const machines = ['a', 'b', 'c'].map((name) => ({ name, holdfast: new Holdfast(fromIoredis(redis)) }));

let left = 3;
/** @type {() => void} */
let finish = () => {};
const finished = new Promise((resolve) => {
  finish = () => resolve(undefined);
});

const tasks = machines.map(({ name, holdfast }) =>
  cron.schedule(
    '* * * * * *',
    (context) => {
      console.log(`machine ${name} runs the report of ${context.dateLocalIso}`);
      if (--left === 0) finish();
    },
    {
      name: 'report',
      distributed: true,
      // How long the lock of a run stays: longer than the clocks of the machines differ.
      distributedLease: 10_000,
      runCoordinator: runCoordinator(holdfast),
    },
  ),
);

await finished;
for (const task of tasks) await task.destroy();
for (const { holdfast } of machines) await holdfast.close();
