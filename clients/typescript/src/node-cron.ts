import { randomBytes } from 'node:crypto';
import { checkLease } from './hold.js';
import type { Holdfast } from './holdfast.js';
import { whole } from './time.js';

/**
 * A `RunCoordinator` for node-cron: one process of a fleet executes each scheduled run. The lock of a run stays for its time to live (`distributedLease`), even
 * after this process has exited, so that a process whose clock is late does not execute it again. Choose it longer than clocks may differ.
 * `shouldRun` takes ms, and rejects with the errors of `Holdfast.info`, and with a `RangeError`.
 */
export function runCoordinator(
  holdfast: Holdfast,
  options: { prefix?: string } = {},
): { shouldRun(key: string, ttlMs: number): Promise<boolean> } {
  const { prefix = 'cron:' } = options;
  return {
    async shouldRun(key, ttlMs) {
      // The key names one run. Its lock is never released or renewed, so it needs no hold.
      const owner = randomBytes(16).toString('hex');
      const name = prefix + key;
      const command = ['LOCK.ACQUIRE', holdfast.key(name), owner, 'HOLDS', '1', 'LEASE', whole(checkLease(ttlMs))];
      return (await holdfast.request(name, command)) !== null;
    },
  };
}
