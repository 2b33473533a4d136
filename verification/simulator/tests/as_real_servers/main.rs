//! The simulated server behaves as real servers: the same script on both gives the same replies, events and replication
//! stream. Uses this machine's Redis, or the server that `HOLDFAST_SERVER` names.

mod observed;
mod real;
mod replica;

mod clock_steps;
mod network;
mod other_commands;
mod random;
mod roles;
mod sessions;
mod slots;
mod waits;

use observed::Observed;
use real::Target;
use simulator::play::play;
use simulator::redis::Generation;
use simulator::script::{Line, parse, print};
use support::{Family, Server, skip};

/// Tests that play a script on both and compare.
macro_rules! scripts {
    ($($(#[doc = $doc:literal])* $name:ident: $text:literal;)*) => {
        $($(#[doc = $doc])* #[test] fn $name() { crate::same($text); })*
    };
}
pub(crate) use scripts;

/// Plays a script on both servers and compares the observations.
#[track_caller]
fn same(script: &str) {
    let lines = parse(script);
    let Some(target) = Target::of(&lines) else { return skip("a library that is preloaded is not in the container") };
    let version = target.server().version();
    // These behave nearly as Redis 7.2, and are not simulated by themselves.
    let other = match version.family {
        Family::Valkey if version.major == 8 => Some("Valkey 8"),
        Family::Redis if version.at_least(Family::Redis, 8, 4) => Some("Redis 8.4"),
        _ => None,
    };
    let begin = other.map(|server| format!("// not on {server}: "));
    match begin.and_then(|begin| script.lines().find_map(|line| line.trim().strip_prefix(&begin))) {
        Some(reason) => skip(reason),
        None => same_on(&target, &lines, |_| true),
    }
}

/// The same without comparing which commands a replica gets in one unit. On a server that is paused in the middle of
/// its work, the module leaves the rest to the next iteration.
#[track_caller]
fn same_but_for_steps(script: &str) {
    let lines = parse(script);
    let target = Target::of(&lines).expect("the script needs no special server");
    same_on(&target, &lines, |line| !["stream: MULTI", "stream: EXEC"].contains(&line));
}

/// Plays a script on both and compares the lines that `counts` selects.
#[track_caller]
fn same_on(target: &Target, lines: &[Line], counts: fn(&str) -> bool) {
    let server = target.server();
    assert!(matches!(lines.last(), Some(Line::Pass(_))), "a script must end with a `+` line");
    let generation = generation(server);
    let run = play(generation, lines, true).unwrap_or_else(|failure| panic!("{}", failure.violation));
    let simulated = Observed::of_run(&run, lines);
    let real = real::play(target, lines, &simulated);
    let plain = |observed: &Observed| observed.plain().into_iter().filter(|line| counts(line)).collect::<Vec<_>>();
    let (simulated, real) = (plain(&simulated), plain(&real));
    assert!(
        simulated == real,
        "{generation:?}, {}\n{}\n- simulated, + real\n{}",
        server.version(),
        print(lines),
        differences(&simulated, &real)
    );
}

fn generation(server: &Server) -> Generation {
    let version = server.version();
    if version.at_least(Family::Valkey, 9, 0) {
        Generation::Valkey9
    } else if version.family == Family::Valkey || version.at_least(Family::Redis, 7, 2) {
        Generation::Redis72
    } else {
        Generation::Redis70
    }
}

/// Both sides, line by line: `-` marks lines of the simulated server only, `+` those of the real one only.
fn differences(simulated: &[String], real: &[String]) -> String {
    // The longest common subsequence of the remaining lines.
    let mut common = vec![vec![0; real.len() + 1]; simulated.len() + 1];
    for (i, one) in simulated.iter().enumerate().rev() {
        for (j, other) in real.iter().enumerate().rev() {
            common[i][j] = if one == other { common[i + 1][j + 1] + 1 } else { common[i + 1][j].max(common[i][j + 1]) };
        }
    }
    let (mut i, mut j, mut text) = (0, 0, String::new());
    while i < simulated.len() || j < real.len() {
        let (one, other) = (simulated.get(i), real.get(j));
        let (mark, line) = match (one, other) {
            (Some(line), other) if one == other => (' ', line),
            (Some(line), None) => ('-', line),
            (Some(line), _) if common[i + 1][j] >= common[i][j + 1] => ('-', line),
            (_, Some(line)) => ('+', line),
            (None, None) => break,
        };
        i += usize::from(mark != '+');
        j += usize::from(mark != '-');
        text += &format!("  {mark} {line}\n");
    }
    text
}
