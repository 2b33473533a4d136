// The Node part of the league: locks with node-redlock or redis-semaphore as league.py tells it on standard input.
//
//     node contender.mjs redlock|redis-semaphore LEAGUE ENDPOINT,ENDPOINT…
import { writeFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { setTimeout as sleep } from 'node:timers/promises'
import { Redis } from 'ioredis'
import semaphore from 'redis-semaphore'
import Redlock from 'redlock'

const [contender, , endpoints] = process.argv.slice(2)
const lease = 10_000 // node-redlock leaves the choice to its user; it is redis-semaphore's default

const connect = () =>
  endpoints.split(',').map((endpoint) => {
    const [host, port] = endpoint.split(':')
    return new Redis(Number(port), host)
  })

// Each makes a client with connections of its own: a function that waits for a lock. Neither has tokens.
const contenders = {
  redlock() {
    const redlock = new Redlock(connect(), { retryCount: -1 })
    redlock.on('error', () => {}) // it reports each try that found the lock held
    return async (key) => {
      const lock = await redlock.acquire([key], lease)
      return { token: 0, unlock: () => lock.release() }
    }
  },
  'redis-semaphore'() {
    const servers = connect()
    const options = { lockTimeout: lease, acquireTimeout: 3_600_000, onLockLost: () => {} }
    return async (key) => {
      const mutex = servers.length > 1 ? new semaphore.RedlockMutex(servers, key, options) : new semaphore.Mutex(servers[0], key, options)
      await mutex.acquire()
      return {
        token: 0,
        unlock: async () => {
          if (!mutex.isAcquired) throw new Error('the lock is lost')
          await mutex.release()
        },
      }
    }
  },
}

const monotonic = () => Number(process.hrtime.bigint())
const say = (...words) => process.stdout.write(`${words.join(' ')}\n`)
const clients = []
const unlocks = new Map()

const requests = {
  async lock([key]) {
    try {
      const { token, unlock } = await clients[0](key)
      unlocks.set(key, unlock)
      say('held', monotonic(), token)
    } catch (why) {
      say('failed', why.message)
    }
  },

  async unlock([key]) {
    try {
      await unlocks.get(key)()
      say('released')
    } catch (why) {
      say('failed', why.message)
    }
  },

  wait([key]) {
    for (const lock of clients) lock(key)
    say('waiting')
  },

  async run(words, numbers) {
    const inside = Array(numbers.keys).fill(0)
    const samples = []
    let stopped = false
    let overlaps = 0
    let failures = 0
    const work = async (number) => {
      const key = number % numbers.keys
      const name = `league:${numbers.round}:${key}`
      while (!stopped) {
        const asked = monotonic()
        try {
          const { token, unlock } = await clients[number](name)
          const granted = monotonic()
          inside[key] += 1
          if (inside[key] > 1) overlaps += 1
          // Others run while this one is inside, as they would if there were work to do.
          await undefined
          inside[key] -= 1
          const releasing = monotonic()
          await unlock()
          samples.push([number, key, 0, asked, granted, releasing, monotonic(), token].join(' '))
        } catch (why) {
          console.error('contender.mjs:', why.message)
          failures += 1
        }
      }
    }
    const running = Array.from({ length: numbers.clients }, (_, number) => work(number))
    await sleep(numbers.warm)
    say('begin', monotonic())
    await sleep(numbers.ms)
    say('end', monotonic())
    stopped = true
    await Promise.all(running)
    writeFileSync(words.at(-1), samples.map((sample) => `${sample}\n`).join(''))
    say('done', overlaps, failures)
  },
}

say('ready')
for await (const line of createInterface({ input: process.stdin })) {
  const [verb, ...words] = line.trim().split(' ')
  const numbers = Object.fromEntries(words.filter((word) => /=\d+$/.test(word)).map((word) => [word.split('=')[0], Number(word.split('=')[1])]))
  while (clients.length < (numbers.clients ?? 1)) clients.push(contenders[contender]())
  await requests[verb](words, numbers)
}
