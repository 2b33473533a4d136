//! Checks histories with [`histories::intervals`], and prints the speed.
//!
//! `histories FILE...`: checks these files. `histories --speed N`: checks a generated history of N operations.

use std::fs::File;
use std::io::BufReader;
use std::process::ExitCode;

use histories::{Operation, Outcome, Request, intervals, read};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let histories: Vec<(String, std::io::Result<Vec<Operation>>)> = match &words[..] {
        [speed, count] if speed == "--speed" => match count.parse() {
            Ok(count) => vec![(speed.clone(), Ok(made(count)))],
            Err(_) => {
                eprintln!("--speed must be followed by a number of operations, got {count:?}");
                return ExitCode::from(2);
            }
        },
        files => {
            let history = |file: &String| (file.clone(), File::open(file).and_then(|it| read(BufReader::new(it))));
            files.iter().map(history).collect()
        }
    };
    let mut status = ExitCode::SUCCESS;
    for (name, history) in histories {
        let history = match history {
            Ok(history) => history,
            Err(why) => {
                eprintln!("{name}: {why}");
                return ExitCode::from(2);
            }
        };
        let begin = processor_seconds();
        let checked = intervals::check(&history);
        let seconds = processor_seconds() - begin;
        let (says, count) = (if checked.is_ok() { "no violation" } else { "VIOLATION" }, history.len());
        let speed = if seconds > 0.01 { format!(", {:.0} a second", count as f64 / seconds) } else { String::new() };
        println!("{name}: {says}: {count} operations in {seconds:.2} s of processor time{speed}");
        if let Err(violation) = checked {
            println!("{violation}");
            status = ExitCode::FAILURE;
        }
    }
    status
}

/// The processor time of this thread so far. Other load on the machine does not add to it.
fn processor_seconds() -> f64 {
    let statistics = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    statistics.split(' ').next().and_then(|it| it.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
}

/// Generates a history: eight processes acquire, renew and release sixteen mutexes and read-write locks, one after the
/// other.
fn made(count: usize) -> Vec<Operation> {
    let mut history = Vec::with_capacity(count);
    let mut turn = 0;
    while history.len() < count {
        let (process, key) = (format!("p{}", turn % 8), format!("k{}", turn % 16));
        // Each acquisition has its own owner, like those of the clients.
        let (owner, limit, at) = (format!("{process}/{turn}"), turn % 2, 100 * turn);
        let mut add = |request, from, outcome| {
            history.push(Operation::new(&process, &key, request, (from, from + 30), outcome));
        };
        add(Request::acquire(&owner, limit, Some(30_000_000)), at, Outcome::Token(turn + 1));
        add(Request::renew(&owner, Some(30_000_000)), at + 40, Outcome::Token(turn + 1));
        add(Request::release(&owner), at + 80, Outcome::Left(0));
        turn += 1;
    }
    history
}
