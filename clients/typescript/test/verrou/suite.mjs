import { test } from '@japa/runner';
import { E_LOCK_NOT_OWNED } from '@verrou/core';
import { registerStoreTestSuite } from '@verrou/core/test_suite';
import { Holdfast } from 'holdfast';
import { fromIoredis } from 'holdfast/ioredis';
import { VerrouStore } from 'holdfast/verrou';
import { Redis } from 'ioredis';

const redis = new Redis(process.env.REDIS_SOCKET ?? '');
const holdfast = new Holdfast(fromIoredis(redis));

test.group('verrou', (group) => {
  // All tests lock the same names.
  group.each.setup(async () => {
    await redis.del('foo', 'foo1');
  });
  registerStoreTestSuite({ test, createStore: () => new VerrouStore(holdfast, { E_LOCK_NOT_OWNED }) });
});
