// Runs, unmodified, the suite that verrou exports for stores of other packages.
import { assert } from '@japa/assert';
import { configure, run } from '@japa/runner';

configure({ files: () => [new URL('suite.mjs', import.meta.url)], plugins: [assert()], forceExit: true });
run();
