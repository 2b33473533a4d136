// Two candidates: the first leads until it resigns, then the second does. A third client watches.
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { Redis } from 'ioredis';

const redis = new Redis(process.env.REDIS ?? 'redis://127.0.0.1:6379', { lazyConnect: true });
const holdfast = new Holdfast(fromIoredis(redis));

/** Whatever the leader writes carries its term, so that the receiver can refuse an older one. @param {number} term @param {string} what */
const send = (term, what) => process.env.VERBOSE && console.log(term, what);

/** @param {string} value */
function stand(value) {
  /** @type {(election: import('holdfast').Election) => void} */
  let elected = () => {};
  const leads = new Promise((resolve) => {
    elected = resolve;
  });
  const election = holdfast.elect('scheduler', {
    value,
    onElected: (hold) => {
      // `hold.signal` aborts with the loss.
      console.log(`${value} leads`);
      send(hold.fence, 'I lead');
      elected(election);
    },
    onLost: (reason) => console.log(`${value} leads no more: ${reason}`),
  });
  return { election, leads };
}

const first = stand('candidate 1');
await first.leads;
const second = stand('candidate 2');
console.log(`the leader is ${(await holdfast.leader('scheduler'))?.value}`);

await first.election.resign(); // Also at a normal exit; a killed leader is replaced when its lease is over, after 5 s.
await second.leads;
console.log(`the leader is ${(await holdfast.leader('scheduler'))?.value}`);

await second.election.resign();
await holdfast.close();
