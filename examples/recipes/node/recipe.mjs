// What both Node recipes share: `connect()` opens a connection with `send(...command)`, which rejects when it breaks, and `close()`.
import { randomBytes } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'

const LEASE = 10_000 // ms; a killed process blocks others for at most this long
const SURE = LEASE * 0.99 // ms; a lease counts for this long, from before its request was sent: two clocks may differ by 1 %
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

class Hold {
  constructor(key, owner, token, sent) {
    Object.assign(this, { key, owner, token, certain: sent + SURE }) // until `certain`, no other client can hold the lock
  }
  isHeld() { return performance.now() < this.certain }
  async renew(short) {
    const sent = performance.now()
    const renewed = await short.send('LOCK.RENEW', this.key, this.owner, 'TOKEN', this.token, 'LEASE', LEASE)
    this.certain = renewed === null ? 0 : sent + SURE // nil: lost
  }
}

/** Runs `work(hold)` while the lock is held. Waits for at most `wait` ms. */
export async function withLock(connect, key, wait, work) {
  const waits = new Connection(connect), short = new Connection(connect)
  const owner = randomBytes(16).toString('hex') // unique for each acquisition
  try {
    const { hold, broke } = await acquire(waits, short, key, owner, wait)
    const done = new AbortController()
    const renewals = renewUntil(done.signal, short, hold)
    try {
      return await work(hold)
    } finally {
      done.abort()
      await renewals
      await release(short, key, owner, hold.token, broke)
    }
  } finally {
    waits.close()
    short.close()
  }
}

async function renewUntil(done, short, hold) {
  for (let pause = LEASE / 4; hold.isHeld(); ) {
    await sleep(pause, null, { signal: done }).catch(() => {})
    if (done.aborted) { return }
    try {
      await hold.renew(short)
      pause = LEASE / 4
    } catch {
      pause = PAUSE // asked again while the lease is certain
    }
  }
}

async function acquire(waits, short, key, owner, wait) {
  const began = performance.now()
  let broke = false
  for (;;) {
    const sent = performance.now()
    const waited = Math.floor(sent - began) // keeps the place in the queue when the request is sent again
    if (waited >= wait) { break }
    try {
      const token = await waits.send('LOCK.ACQUIRE', key, owner, 'HOLDS', 1, 'LEASE', LEASE, 'WAIT', wait - waited, 'WAITED', waited)
      if (token === null) { break }
      const hold = new Hold(key, owner, Number(token), sent)
      // The lease began during the wait, but it is not known when.
      if (hold.certain - performance.now() < SURE / 2) { await hold.renew(short) }
      if (hold.isHeld()) { return { hold, broke } }
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
  await withLock(connect, key, 30_000, async (hold) => {
    console.log('held', hold.token)
    if (Number(await others.send('INCR', `inside:${key}`)) !== 1) { throw new Error('two processes hold the lock') }
    await sleep(LEASE / 2) // the work
    if (!hold.isHeld()) { throw new Error('lost') }
    await others.send('DECR', `inside:${key}`)
  })
  others.close()
  console.log('released')
}
