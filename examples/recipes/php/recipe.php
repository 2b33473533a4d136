<?php
// A lock with phpredis and raw LOCK.* commands.  Usage: php recipe.php PORT KEY
// PHP has no timer beside the work: the lease covers all of it, or the work calls renew() between its steps.
const LEASE = 10_000; // ms; a killed process blocks others for at most this long
const SURE = LEASE / 100 * 99; // ms; a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
const PAUSE = 100_000; // µs

function now(): int
{
    return intdiv(hrtime(true), 1_000_000);
}

/** A connection that is opened again when it broke. `$timeout`: read timeout in s; -1: none. */
final class Connection
{
    private ?Redis $redis = null;

    public function __construct(private int $port, private float $timeout)
    {
    }

    public function send(string ...$command): mixed
    {
        try {
            if ($this->redis === null) {
                $redis = new Redis();
                $redis->connect('127.0.0.1', $this->port, 1.0);
                $redis->setOption(Redis::OPT_READ_TIMEOUT, $this->timeout);
                $redis->setOption(Redis::OPT_MAX_RETRIES, 0); // phpredis must not repeat a command by itself
                $this->redis = $redis;
            }
            $this->redis->clearLastError();
            $reply = $this->redis->rawCommand(...$command);
        } catch (RedisException $broken) {
            $this->redis = null;
            throw $broken;
        }
        if ($reply === false && ($error = $this->redis->getLastError()) !== null) {
            throw new RuntimeException($error); // an error reply
        }
        return $reply; // false: nil
    }
}

final class Lock
{
    private bool $broke = false;
    private int $token = 0;
    private int $certain = 0; // ms; until then no other client can hold the lock
    private string $owner;

    public function __construct(private Connection $waits, private Connection $short, private string $key)
    {
        $this->owner = bin2hex(random_bytes(16)); // unique for each acquisition
    }

    /** Returns the fencing token; 0: not acquired within `$wait` ms. */
    public function acquire(int $wait): int
    {
        $began = now();
        while (($waited = ($sent = now()) - $began) < $wait) {
            try { // WAITED keeps the place in the queue when the request is sent again
                $this->token = (int) $this->waits->send('LOCK.ACQUIRE', $this->key, $this->owner, 'HOLDS', '1', 'LEASE', (string) LEASE,
                    'WAIT', (string) ($wait - $waited), 'WAITED', (string) $waited);
                if ($this->token === 0) {
                    break;
                }
                $this->certain = $sent + SURE;
                if ($this->certain - now() < SURE / 2) { // the lease began during the wait, but it is not known when
                    $this->renewOnce();
                }
                if ($this->isHeld()) {
                    return $this->token;
                }
            } catch (RedisException) {
                $this->broke = true;
                usleep(PAUSE);
            }
        }
        if ($this->broke) { // a request may still be on its way
            $this->short->send('LOCK.RELEASE', $this->key, $this->owner, 'ALL');
        }
        return 0;
    }

    public function isHeld(): bool
    {
        return now() < $this->certain;
    }

    /** Returns false if the lock is lost. Tries again while the lease is certain. */
    public function renew(): bool
    {
        while ($this->isHeld()) {
            try {
                $this->renewOnce();
                break;
            } catch (RuntimeException) {
                usleep(PAUSE);
            }
        }
        return $this->isHeld();
    }

    private function renewOnce(): void
    {
        $sent = now();
        $renewed = $this->short->send('LOCK.RENEW', $this->key, $this->owner, 'TOKEN', (string) $this->token, 'LEASE', (string) LEASE);
        $this->certain = $renewed === false ? 0 : $sent + SURE; // nil: lost
    }

    public function release(): void
    {
        $deadline = now() + LEASE; // after that the lease has ended anyway
        for ($first = true; now() < $deadline; $first = false) {
            try {
                $released = $this->short->send('LOCK.RELEASE', $this->key, $this->owner, 'TOKEN', (string) $this->token);
                if ($this->broke) { // a request that was sent twice may still be in the queue
                    $this->short->send('LOCK.RELEASE', $this->key, $this->owner, 'ALL');
                }
                if ($released === false && $first) {
                    throw new RuntimeException("{$this->key} had been lost");
                }
                return; // nil to a repetition: the first reply was lost
            } catch (RedisException) {
                $this->broke = true;
                usleep(PAUSE);
            }
        }
    }
}

[, $port, $key] = $argv;
$short = new Connection((int) $port, LEASE / 8 / 1000);
$lock = new Lock(new Connection((int) $port, -1), $short, $key);
$token = $lock->acquire(30_000);
if ($token === 0) {
    fwrite(STDERR, "$key was not acquired\n");
    exit(1);
}
echo "held $token\n";
try {
    if ($short->send('INCR', "inside:$key") !== 1) {
        fwrite(STDERR, "two processes hold the lock\n");
        exit(3);
    }
    for ($step = 0; $step < 4; $step++) { // the work
        usleep(LEASE * 1000 / 8);
        if (!$lock->renew()) {
            fwrite(STDERR, "lost\n");
            exit(4);
        }
    }
    $short->send('DECR', "inside:$key");
} finally {
    $lock->release();
}
echo "released\n";
