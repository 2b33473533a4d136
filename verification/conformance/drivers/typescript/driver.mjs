// The driver of the TypeScript client. ../../DRIVER.md describes its input and output. It uses the built package of the client.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(new URL('../../../../clients/typescript/package.json', import.meta.url));
const { ClosedError, DeadlockError, Holdfast, LockLostError, NotAcquiredError, ServerError, UnavailableError } = require('holdfast');
const { fromIoredis } = require('holdfast/ioredis');
const { Cluster, Redis } = require('ioredis');

let url;
let client;
let library;
const holds = new Map();
const cancels = new Map();

const write = (line) => process.stdout.write(`${JSON.stringify({ ...line, at: Number(process.hrtime.bigint() / 1000n) })}\n`);

/** The outcome of a call that failed with `error`. `tried`: the call did not wait, so an error reply may have ended it. */
function failure(error, tried) {
  const text = `${error?.name}: ${error?.message}`;
  if (error instanceof LockLostError) return { outcome: 'lost', reason: error.reason, text };
  if (error instanceof ClosedError || error?.name === 'AbortError') return { outcome: 'cancelled' };
  if (error instanceof DeadlockError) return { outcome: 'deadlock', text };
  const reply = error instanceof NotAcquiredError && tried ? error.cause : error;
  const kinds = { NOREPLICAS: 'no-replicas', UNCONFIRMED: 'no-replicas', WRONGTYPE: 'wrong-type' };
  if (reply instanceof ServerError) return { outcome: kinds[reply.code] ?? 'server', text };
  if (error instanceof NotAcquiredError && !(reply instanceof UnavailableError)) return { outcome: 'not-granted', text };
  return { outcome: error instanceof RangeError || error instanceof TypeError ? 'invalid' : 'connection', text };
}

const about = (hold) => holds.get(hold) ?? Promise.reject(new RangeError(`no hold ${hold}`));

const calls = {
  async open(server) {
    await calls.close();
    url = server.url;
    const { protocol, hostname: host, port, pathname } = new URL(url);
    const options = { lazyConnect: true };
    if (protocol === 'redis+cluster:') library = new Cluster([{ host, port: Number(port) }], options);
    else if (protocol === 'redis+sentinel:') library = new Redis({ sentinels: [{ host, port: Number(port) }], name: pathname.slice(1), ...options });
    else library = new Redis(url, options);
    library.on('error', console.error);
    client = new Holdfast(fromIoredis(library));
    client.on('warning', console.error);
    return { outcome: 'ok' };
  },
  async acquire({ hold, keys, wait, lease, watched, ...terms }) {
    const controller = new AbortController();
    cancels.set(hold, controller);
    if (!client) await calls.open({ url }); // After a close.
    const options = { ...terms, wait, lease, renew: watched || lease === undefined, signal: controller.signal };
    let held;
    try {
      held = wait === 0 && keys.length === 1 ? await client.tryLock(keys[0], options) : await client.lockAll(keys, options);
    } catch (error) {
      return failure(error, wait === 0);
    } finally {
      cancels.delete(hold);
    }
    if (!held) return { outcome: 'not-granted' };
    holds.set(hold, held);
    held.signal.addEventListener('abort', () => write({ lost: hold, reason: held.signal.reason.reason }));
    return { outcome: 'held', fence: held.fence };
  },
  async release({ hold }) {
    await (await about(hold)).release();
    return { outcome: 'released' };
  },
  async renew({ hold, lease }) {
    await (await about(hold)).renew(lease);
    return { outcome: 'renewed' };
  },
  async check({ hold }) {
    const held = await about(hold);
    try {
      return (await held.check()) ? { outcome: 'held' } : failure(held.signal.reason);
    } catch (error) {
      return { ...failure(error), outcome: 'uncertain' };
    }
  },
  async cancel({ hold }) {
    cancels.get(hold)?.abort();
    return { outcome: 'ok' };
  },
  async block({ time }) {
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, time);
    return { outcome: 'ok' };
  },
  async close() {
    await client?.close();
    library?.disconnect();
    client = library = undefined;
    return { outcome: 'ok' };
  },
  async threads() {
    return { outcome: 'ok', count: process.getActiveResourcesInfo().length };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { id, call, ...rest } = JSON.parse(line);
  const unknown = async () => ({ outcome: 'invalid', text: `this driver has no ${call}` });
  (calls[call] ?? unknown)(rest).catch(failure).then((outcome) => write({ id, ...outcome }));
}
// Waits would keep the program running. Its exit releases its holds.
process.exit();
