// A holder that was paused for longer than its lease does not overwrite what the next holder wrote.
import { Holdfast } from 'holdfast';
import { fromNodeRedis } from 'holdfast/node-redis';
import { createClient } from 'redis';

const redis = createClient({ url: process.env.REDIS_URL ?? 'redis://127.0.0.1:6379' });
await redis.connect();
const holdfast = new Holdfast(fromNodeRedis(redis));

// The storage compares and writes in one step. In SQL: UPDATE … SET fence = $1, … WHERE id = $2 AND fence <= $1
const WRITE = `
  if tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) > tonumber(ARGV[1]) then return 0 end
  redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'text', ARGV[2])
  return 1`;
/** @param {import('holdfast').Hold} hold @param {string} text */
async function write(hold, text) {
  const done = await redis.eval(WRITE, { keys: ['document:1'], arguments: [String(hold.fence), text] });
  console.log(`${text}: ${done ? 'written' : 'refused'}`);
}

await redis.del('document:1');
// Not renewed, as if this process were paused.
const paused = await holdfast.lock('document:1:lock', { lease: 300, renew: false });
await write(paused, 'first');
const next = await holdfast.lock('document:1:lock', { wait: 5000 });
await write(next, 'second');
await write(paused, 'late');
console.log(`the first one is ${paused.isHeld ? 'held' : 'lost'}`);

await next.release();
await holdfast.close();
await redis.close();
