// A lock with ioredis and raw LOCK.* commands.  Usage: node ioredis.mjs PORT KEY
import { Redis } from 'ioredis'
import { main } from './recipe.mjs'

// ioredis sends all commands over one connection, so a wait needs a connection of its own. It must neither be replayed after
// a reconnect nor be queued while there is no connection.
const options = { port: Number(process.argv[2]), enableOfflineQueue: false, autoResendUnfulfilledCommands: false,
  maxRetriesPerRequest: null, retryStrategy: () => null, lazyConnect: true, keyPrefix: '' }

async function connect() {
  const redis = new Redis(options)
  let ended
  const end = new Promise((_, reject) => { ended = reject })
  end.catch(() => {})
  redis.on('error', () => {})
  redis.on('end', () => ended(new Error('the connection broke'))) // a command under way is not settled by ioredis itself
  await redis.connect()
  return { send: (...command) => Promise.race([redis.call(...command.map(String)), end]), close: () => redis.disconnect() }
}

await main(connect, process.argv[3])
