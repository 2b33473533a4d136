// An upload service: one client at a time writes the parts of a file. An operator forces the lock of a client that hangs; the second client takes over, and a
// late write of the first one is refused by its fence.
import { createServer } from 'node:http';
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { Redis } from 'ioredis';

const redis = new Redis(process.env.REDIS_URL ?? 'redis://127.0.0.1:6379', { lazyConnect: true });

/** The storage: accepts a part only with the greatest fence that it has seen for the file. */
const files = new Map();
const service = createServer(async (request, response) => {
  const { pathname, searchParams } = new URL(request.url ?? '/', 'http://localhost');
  const fence = Number(searchParams.get('fence'));
  const file = files.get(pathname) ?? { fence: 0, parts: [] };
  let part = '';
  for await (const chunk of request) part += chunk;
  if (fence < file.fence) {
    response.writeHead(409).end(`fence ${fence} is older than ${file.fence}`);
    return;
  }
  files.set(pathname, { fence, parts: [...file.parts, part] });
  response.writeHead(204).end();
});
await new Promise((resolve) => service.listen(0, '127.0.0.1', () => resolve(undefined)));
const { port } = /** @type {import('node:net').AddressInfo} */ (service.address());

/** @param {import('holdfast').Hold} hold @param {string} part */
async function upload(hold, part) {
  const { status } = await fetch(`http://127.0.0.1:${port}/video?fence=${hold.fence}`, { method: 'PUT', body: part });
  console.log(`${part}: ${status === 204 ? 'stored' : 'refused'}`);
}

const first = new Holdfast(fromIoredis(redis));
const second = new Holdfast(fromIoredis(redis));

const hanging = await first.lock('upload:/video', { lease: 2000 });
await upload(hanging, 'part 1 of the first client');

const waiting = second.lock('upload:/video', { wait: 10_000 });
await second.force('upload:/video'); // What an operator does, or `LOCK.FORCE` by hand.
const hold = await waiting;
await upload(hold, 'part 1 of the second client');

await upload(hanging, 'part 2 of the first client');
await hanging.release().catch((error) => console.log(`the first client: ${error.message}`));

await hold.release();
await first.close();
await second.close();
service.close();
