// A lock with node-redis and raw LOCK.* commands.  Usage: node node-redis.mjs PORT KEY
import { createClient } from 'redis'
import { main } from './recipe.mjs'

// node-redis sends all commands of a client over one connection, so a wait needs a client of its own.
async function connect() {
  const client = createClient({ socket: { port: Number(process.argv[2]), reconnectStrategy: false }, disableOfflineQueue: true })
  client.on('error', () => {})
  await client.connect()
  return { send: (...command) => client.sendCommand(command.map(String)), close: () => client.destroy() }
}

await main(connect, process.argv[3])
