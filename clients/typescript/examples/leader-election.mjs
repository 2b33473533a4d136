// Leader election with a fenced write: of all processes that run this, one leads and writes, and the late write of a former leader is refused.
//
//     node leader-election.mjs NAME
//
// A leader that exits hands over at once; one that is killed is replaced a lease (5 s) later. One that was paused may wake up and write before it learns
// that it no longer leads: the fence of its term is lower than the new leader's, and the storage refuses it.
import { setTimeout as sleep } from 'node:timers/promises';
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { Redis } from 'ioredis';

const name = process.argv[2] ?? 'nameless';
const redis = new Redis(process.env.REDIS_URL ?? 'redis://127.0.0.1:6379');
const holdfast = new Holdfast(fromIoredis(redis));

// The storage keeps the highest fence that it has seen, and takes no lower one.
const WRITE = `
  if tonumber(ARGV[1]) < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then return 0 end
  redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'by', ARGV[2])
  return 1`;

const election = holdfast.elect('scheduler', {
  value: name,
  onElected: async (hold) => {
    console.log(`${name} leads, term ${hold.fence}`);
    while (hold.isHeld) {
      if (!(await redis.eval(WRITE, 1, 'schedule', hold.fence, name))) {
        console.log(`${name}: refused, the term is over`);
        return;
      }
      await sleep(200);
    }
  },
  onLost: (reason) => console.log(`${name}: ${reason}`),
});

for (const signal of /** @type {const} */ (['SIGINT', 'SIGTERM']))
  process.once(signal, async () => {
    await election.resign();
    await holdfast.close();
    await redis.quit();
  });
