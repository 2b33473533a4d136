// What both Node recipes share: `connect()` opens a connection with `send(...command)`, which rejects when it breaks, and `close()`.
import { randomBytes } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'

const LEASE = 10_000 // ms; a killed process blocks others for at most this long
const PAUSE = 100 // ms

/** Sends a command over a new connection if the last one broke. */
class Connection {
  constructor(open) { this.open = open }
  async send(...command) {
    const connection = await (this.current ??= this.open())
    try {
      return await connection.send(...command)
    } catch (error) {
      if (!isReply(error)) { this.close() }
      throw error
    }
  }
  close() {
    this.current?.then((it) => it.close()).catch(() => {})
    this.current = undefined
  }
}

// An error reply begins with its code in capitals; everything else means that the connection broke or could not be opened.
const isReply = (error) => /^[A-Z]+ /.test(error.message)

/** Runs `work(token, lost)` while the lock is held; `lost.aborted` says that it is not held any more. Waits for at most `wait` ms. */
export async function withLock(connect, key, wait, work) {
  const waits = new Connection(connect), short = new Connection(connect)
  const owner = randomBytes(16).toString('hex') // unique for each acquisition
  const lost = new AbortController()
  try {
    const { token, broke } = await acquire(waits, short, key, owner, wait)
    let certain = performance.now() + LEASE
    const timer = setInterval(async () => {
      const sent = performance.now()
      try {
        if (await short.send('LOCK.RENEW', key, owner, 'TOKEN', token, 'LEASE', LEASE) === null) { lost.abort() }
        else { certain = sent + LEASE }
      } catch { /* asked again while the lease is certain */ }
      if (performance.now() >= certain) { lost.abort() }
    }, LEASE / 4)
    try {
      return await work(token, lost.signal)
    } finally {
      clearInterval(timer)
      await release(short, key, owner, token, broke)
    }
  } finally {
    waits.close()
    short.close()
  }
}

async function acquire(waits, short, key, owner, wait) {
  const began = performance.now()
  let broke = false
  for (;;) {
    const waited = Math.floor(performance.now() - began) // keeps the place in the queue when the request is sent again
    if (waited >= wait) { break }
    try {
      const token = await waits.send('LOCK.ACQUIRE', key, owner, 'HOLDS', 1, 'LEASE', LEASE, 'WAIT', wait - waited, 'WAITED', waited)
      if (token !== null) { return { token: Number(token), broke } }
      break
    } catch (error) {
      if (isReply(error)) { throw error }
      broke = true
      await sleep(PAUSE)
    }
  }
  if (broke) { await short.send('LOCK.RELEASE', key, owner, 'ALL') } // a request may still be on its way
  throw new Error(`${key} was not acquired within ${wait} ms`)
}

async function release(short, key, owner, token, broke) {
  let isFirst = true
  const deadline = performance.now() + LEASE // after that the lease has ended anyway
  while (performance.now() < deadline) {
    try {
      const released = await short.send('LOCK.RELEASE', key, owner, 'TOKEN', token)
      if (broke) { await short.send('LOCK.RELEASE', key, owner, 'ALL') } // a request that was sent twice may still be in the queue
      if (released === null && isFirst) { throw new Error(`${key} had been lost`) }
      return // nil to a repetition: the first reply was lost
    } catch (error) {
      if (/had been lost/.test(error.message) || isReply(error)) { throw error }
      isFirst = false
      broke = true
      await sleep(PAUSE)
    }
  }
}

export async function main(connect, key) {
  const others = new Connection(connect)
  await withLock(connect, key, 30_000, async (token, lost) => {
    console.log('held', token)
    if (Number(await others.send('INCR', `inside:${key}`)) !== 1) { throw new Error('two processes hold the lock') }
    await sleep(LEASE / 2) // the work
    if (lost.aborted) { throw new Error('lost') }
    await others.send('DECR', `inside:${key}`)
  })
  others.close()
  console.log('released')
}
