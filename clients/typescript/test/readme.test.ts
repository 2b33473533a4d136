import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { expect, test } from 'vitest';
import { Redis } from './redis.js';

const run = promisify(execFile);
const HERE = new URL('..', import.meta.url).pathname;
/** What the examples leave to their reader. */
const AROUND = `
declare const url: string;
const print = async (fence: number, signal: AbortSignal) => console.log(fence > 0 && !signal.aborted);
const work = async (_signal: AbortSignal) => {};
`;

function example(readme: string): string {
  const examples = readFileSync(join(HERE, readme), 'utf8').split('```ts\n');
  expect(examples).toHaveLength(2);
  return AROUND + String(examples[1]?.split('```')[0]);
}

test('readme_examples_compile_and_first_one_runs', async () => {
  const redis = await Redis.start();
  // In the package, which the examples import by its name.
  const folder = mkdtempSync(join(HERE, '.readme-'));
  try {
    // The default port belongs to the reader.
    const first = example('../../README.md').replace('new Redis()', `new Redis(${redis.port})`);
    writeFileSync(join(folder, 'first.ts'), `${first}\nprocess.exit();`);
    writeFileSync(join(folder, 'second.ts'), example('README.md'));
    writeFileSync(join(folder, 'tsconfig.json'), JSON.stringify({ extends: '../tsconfig.json', include: ['*.ts'] }));
    await run(join(HERE, 'node_modules/.bin/tsc'), ['-p', folder]);
    const { stdout } = await run(process.execPath, [join(folder, 'first.js')]);
    expect(stdout).toBe('true\n');
  } finally {
    rmSync(folder, { recursive: true, force: true });
    redis.stop();
  }
});
