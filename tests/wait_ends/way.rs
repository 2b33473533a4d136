//! The ways to run commands. The queue must be served after each of them.

use redis::Value;
use support::Raw;

use crate::waiter::Commands;

/// How commands are run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    Plainly,
    InATransaction,
    InAScript,
}

/// Runs the commands, none of which may fail, and returns the last reply.
#[track_caller]
pub(super) fn run(client: &mut Raw, way: Way, commands: &[&str]) -> Value {
    let commands: Vec<Vec<&[u8]>> = commands.iter().map(|line| crate::common::words(line)).collect();
    run_bytes(client, way, &commands)
}

/// The same with binary arguments.
#[track_caller]
pub(super) fn run_bytes(client: &mut Raw, way: Way, commands: &[Vec<&[u8]>]) -> Value {
    let reply = match way {
        Way::Plainly => commands.iter().map(|command| client.call(command)).inspect(check).last(),
        Way::InATransaction => transaction(client, commands),
        Way::InAScript => Some(script(client, commands)),
    };
    let reply = reply.expect("at least one command");
    check(&reply);
    reply
}

fn transaction(client: &mut Raw, commands: &[Vec<&[u8]>]) -> Option<Value> {
    client.run_ok("MULTI");
    for command in commands {
        check(&client.call(command));
    }
    let replies = client.run_ok("EXEC");
    let Value::Array(replies) = replies else { panic!("EXEC: {replies:?}") };
    replies.iter().for_each(check);
    replies.into_iter().next_back()
}

fn script(client: &mut Raw, commands: &[Vec<&[u8]>]) -> Value {
    const EACH: &[u8] = b"\
local i, last = 1, false
while i <= #ARGV do
  local count = tonumber(ARGV[i])
  last = redis.call(unpack(ARGV, i + 1, i + count))
  i = i + count + 1
end
return last";
    let counts: Vec<String> = commands.iter().map(|command| command.len().to_string()).collect();
    let mut call: Vec<&[u8]> = vec![b"EVAL", EACH, b"0"];
    for (command, count) in commands.iter().zip(&counts) {
        call.push(count.as_bytes());
        call.extend(command);
    }
    client.call(&call)
}

#[track_caller]
fn check(reply: &Value) {
    assert!(!matches!(reply, Value::ServerError(_)), "{reply:?}");
}

/// Defines a test for each way: `name: expression that takes the way;`.
macro_rules! in_every_way {
    ($($name:ident: $test:expr;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            fn queue_is_served_after_plain_command() {
                $test(Way::Plainly);
            }

            #[test]
            fn queue_is_served_after_transaction() {
                $test(Way::InATransaction);
            }

            #[test]
            fn queue_is_served_after_script() {
                $test(Way::InAScript);
            }
        }
    )*};
}
pub(super) use in_every_way;
