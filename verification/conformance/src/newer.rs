//! A server of a later version, as a current client may see it.

use std::str;

use support::{Direction, Fate, Proxy};

/// An event of an unknown kind.
const UNKNOWN: &str = "*7\r\n$4\r\nmore\r\n:0\r\n*1\r\n$1\r\nk\r\n$5\r\nowner\r\n:1\r\n$4\r\nmore\r\n*0\r\n";
/// The beginning of a current heartbeat event.
const HEARTBEAT: &str = "*6\r\n$9\r\nheartbeat\r\n";

/// From now on, every reply with events begins with an unknown event, and its heartbeat has more numbers and one more element.
pub fn speaks(proxy: &Proxy) {
    proxy.rule(|toward, message| match newer(message).filter(|_| toward == Direction::Client) {
        Some(more) => Fate::Instead(more),
        None => Fate::Pass,
    });
}

/// Every reply to `LOCK.EVENTS ... HEARTBEAT` ends with a heartbeat, whose numbers are one string.
fn newer(message: &[u8]) -> Option<Vec<u8>> {
    let (count, rest) = str::from_utf8(message).ok()?.strip_prefix('*')?.split_once("\r\n")?;
    let (events, alive) = rest.rsplit_once(HEARTBEAT)?;
    let (between, numbers) = alive.strip_suffix("\r\n")?.rsplit_once("\r\n")?;
    let (between, _) = between.rsplit_once('$')?;
    let (count, numbers) = (count.parse::<usize>().ok()? + 1, format!("{numbers} 1 2"));
    let length = numbers.len();
    let alive = format!("*7\r\n$9\r\nheartbeat\r\n{between}${length}\r\n{numbers}\r\n$4\r\nmore\r\n");
    Some(format!("*{count}\r\n{UNKNOWN}{events}{alive}").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_server_adds_fields_to_events() {
        let alive = format!("{HEARTBEAT}:0\r\n*0\r\n$-1\r\n$-1\r\n$14\r\n250 2000 666 1\r\n");
        let more = newer(format!("*1\r\n{alive}").as_bytes()).unwrap();
        let redis::Value::Array(events) = redis::parse_redis_value(&more).unwrap() else { panic!() };
        let lengths: Vec<usize> = events.iter().map(|it| it.as_sequence().unwrap().len()).collect();
        assert_eq!(lengths, [7, 7]);
        let numbers: String = redis::from_redis_value(events[1].as_sequence().unwrap()[5].clone()).unwrap();
        assert_eq!(numbers, "250 2000 666 1 1 2");
        assert_eq!(newer(b":17\r\n"), None);
    }
}
