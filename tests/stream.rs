//! The replication stream: a hand-off must be one unit there, or a failover could lose half of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use redis::{Parser, Value};
use support::{Family, Raw, Server};

use crate::common::{Bytes, array, bytes, spelled_out};
use crate::waiter::{Commands, Waiter};

/// A server's replication stream, from its opening on.
struct Stream {
    from: BufReader<TcpStream>,
    // The parser reads ahead.
    parser: Parser,
}

/// Commands that a replica executes together: one, or those of a transaction.
type Step = Vec<Vec<Bytes>>;

impl Stream {
    /// Connects like a replica without partial synchronisation, and discards the copy.
    fn open(server: &Server) -> Self {
        let mut socket = TcpStream::connect(server.addr()).expect("connects");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a valid time");
        socket.write_all(b"SYNC\r\n").expect("sent");
        let mut from = BufReader::new(socket);
        let length = loop {
            let mut line = String::new();
            from.read_line(&mut line).expect("the copy comes");
            // Until then the server sends empty lines as keepalives.
            if let Some(length) = line.strip_prefix('$') {
                break length.trim_end().parse().expect("a length");
            }
        };
        std::io::copy(&mut from.by_ref().take(length), &mut std::io::sink()).expect("the copy comes");
        server.wait_replica_online();
        Self { from, parser: Parser::new() }
    }

    /// All that the server has written so far, as plain commands.
    fn steps(&mut self, client: &mut Raw) -> Vec<Step> {
        let plain = Server::builder().without_module().start();
        let mut plain = plain.raw();
        client.run_ok("SET the-end of-this-test");
        let mut steps = Vec::new();
        loop {
            let mut step = vec![self.command()];
            if step[0] == [b"MULTI"] {
                step.clear();
                loop {
                    match self.command() {
                        command if command == [b"EXEC"] => break,
                        command => step.push(command),
                    }
                }
            }
            if step.iter().any(|command| command.contains(&b"the-end".to_vec())) {
                return steps;
            }
            step = step.into_iter().flat_map(|command| spelled_out(&mut plain, command)).collect();
            step.retain(|command| {
                !["PING", "SELECT"].iter().any(|name| command[0].eq_ignore_ascii_case(name.as_bytes()))
            });
            if !step.is_empty() {
                steps.push(step);
            }
        }
    }

    fn command(&mut self) -> Vec<Bytes> {
        let value: Value = self.parser.parse_value(&mut self.from).expect("the stream goes on");
        array(&value).iter().map(|word| bytes(word).to_vec()).collect()
    }
}

/// The first unit with a command that contains all of the words.
fn place(steps: &[Step], words: &[&str]) -> usize {
    let holds = |command: &Vec<Bytes>| words.iter().all(|word| command.contains(&word.as_bytes().to_vec()));
    let place = steps.iter().position(|step| step.iter().any(holds));
    place.unwrap_or_else(|| panic!("nothing of {words:?} in {}", show(steps)))
}

fn show(steps: &[Step]) -> String {
    let command = |words: &Vec<Bytes>| words.join(&b' ').escape_ascii().to_string();
    steps.iter().map(|step| step.iter().map(command).collect::<Vec<_>>().join("; ")).collect::<Vec<_>>().join("\n")
}

/// The replication stream of a hand-off from `holder` to `waiter` that `commands` cause.
fn hand_off(commands: &[&str]) -> (Server, Vec<Step>, i64) {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut stream = Stream::open(&server);
    let mut waiter = Waiter::start(&server, "key", "waiter");
    client.send_lines(commands);
    let token = waiter.token();
    let steps = stream.steps(&mut server.raw());
    (server, steps, token)
}

/// The unit that grants also ends the hold of `holder`, and has owner, token and deadline.
#[track_caller]
fn assert_one_unit(steps: &[Step], token: i64) {
    let grant = place(steps, &["HSET", "key", "waiter"]);
    assert_eq!(grant, place(steps, &["key", &token.to_string()]));
    assert_eq!(grant, place(steps, &["PEXPIREAT", "key"]), "{}", show(steps));
    let freed = steps
        .iter()
        .position(|step| step.iter().any(|command| ends_hold(command)))
        .unwrap_or_else(|| panic!("{}", show(steps)));
    assert_eq!(grant, freed, "freed and granted in two units: {}", show(steps));
}

fn ends_hold(command: &[Bytes]) -> bool {
    let is = |name: &[u8]| command[0].eq_ignore_ascii_case(name);
    let key = || command[1] == b"key";
    (is(b"DEL") || is(b"UNLINK")) && key() || is(b"HDEL") && key() && command[2] == b"holder"
}

#[test]
fn release_and_grant_are_one_unit() {
    let (_server, steps, token) = hand_off(&["LOCK.RELEASE key holder"]);
    assert_one_unit(&steps, token);
}

#[test]
fn force_and_grant_are_one_unit() {
    let (_server, steps, token) = hand_off(&["LOCK.FORCE key"]);
    assert_one_unit(&steps, token);
}

#[test]
fn release_in_transaction_is_one_unit() {
    let (_server, steps, token) =
        hand_off(&["MULTI", "SET before x", "LOCK.RELEASE key holder", "SET after x", "EXEC"]);
    assert_one_unit(&steps, token);
    assert_eq!(place(&steps, &["before"]), place(&steps, &["after"]), "{}", show(&steps));
    assert_eq!(place(&steps, &["before"]), place(&steps, &["waiter"]), "{}", show(&steps));
}

/// If a module may write at the end of another command's unit, the grant is part of that unit. Otherwise it follows in a unit
/// of its own, and never precedes it.
#[test]
fn del_and_grant_reach_replica_in_order() {
    let (server, steps, token) = hand_off(&["DEL key"]);
    let version = server.version();
    if version.at_least(Family::Redis, 7, 2) || version.family == Family::Valkey {
        return assert_one_unit(&steps, token);
    }
    let grant = place(&steps, &["HSET", "key", "waiter"]);
    assert_eq!(grant, place(&steps, &["PEXPIREAT", "key"]), "{}", show(&steps));
    assert!(place(&steps, &["DEL", "key"]) < grant, "{}", show(&steps));
}

#[test]
fn expiry_reaches_replica_before_grant() {
    let (_server, steps, _) = hand_off(&["PEXPIRE key 50"]);
    let grant = place(&steps, &["HSET", "key", "waiter"]);
    let freed = steps
        .iter()
        .position(|step| step.iter().any(|command| ends_hold(command)))
        .unwrap_or_else(|| panic!("{}", show(&steps)));
    assert!(freed <= grant, "{}", show(&steps));
    let order: Vec<&Vec<Bytes>> = steps[grant].iter().collect();
    let granted = order.iter().position(|command| command[0] == b"HSET").expect("it is there");
    assert!(!order[granted..].iter().any(|command| ends_hold(command)), "{}", show(&steps));
}

/// Including refusals and failed attempts.
#[test]
fn requests_are_not_replicated() {
    let server = Server::start();
    let mut client = server.raw();
    client.get_token("LOCK.ACQUIRE key holder LEASE 60000");
    let mut stream = Stream::open(&server);
    let waiter = Waiter::start(&server, "key", "waiter");
    for line in
        ["LOCK.ACQUIRE key newcomer", "LOCK.RELEASE key newcomer", "LOCK.RENEW key newcomer", "LOCK.FORCE another"]
    {
        client.run_ok(line);
    }
    client.run_ok(&format!("CLIENT UNBLOCK {}", waiter.id));
    let steps = stream.steps(&mut client);
    assert!(steps.is_empty(), "{}", show(&steps));
}
