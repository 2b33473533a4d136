//! The simulated server does what real servers do: the same script on both gives the same replies, events and stream to
//! the replicas. On this machine's Redis, or on the server that `HOLDFAST_SERVER` names.

mod real;
mod replica;
mod told;

mod clocks;
mod network;
mod random;
mod roles;
mod sessions;
mod slots;
mod strangers;
mod waits;

use real::Scene;
use simulator::play::play;
use simulator::redis::Generation;
use simulator::script::{Line, parse, print};
use support::{Family, Server, skip};
use told::Told;

/// Tests that play a script to both and compare.
macro_rules! scripts {
    ($($(#[doc = $doc:literal])* $name:ident: $text:literal;)*) => {
        $($(#[doc = $doc])* #[test] fn $name() { crate::same($text); })*
    };
}
pub(crate) use scripts;

/// Plays a script to both servers, and compares what came of it.
#[track_caller]
fn same(script: &str) {
    let lines = parse(script);
    let Some(scene) = Scene::of(&lines) else { return skip("a library that is preloaded is not in the container") };
    let version = scene.server().version();
    // These are nearly as Redis 7.2, and not simulated by themselves.
    let other = match version.family {
        Family::Valkey if version.major == 8 => Some("Valkey 8"),
        Family::Redis if version.at_least(Family::Redis, 8, 4) => Some("Redis 8.4"),
        _ => None,
    };
    let begin = other.map(|server| format!("// not on {server}: "));
    match begin.and_then(|begin| script.lines().find_map(|line| line.trim().strip_prefix(&begin))) {
        Some(why) => skip(why),
        None => same_on(&scene, &lines, |_| true),
    }
}

/// The same without comparing what the replicas get in one step: on a server that comes to a stand in the middle of its
/// work, the module leaves the rest to the next turn.
#[track_caller]
fn same_but_for_steps(script: &str) {
    let lines = parse(script);
    let scene = Scene::of(&lines).expect("it needs nothing special");
    same_on(&scene, &lines, |line| !["stream: MULTI", "stream: EXEC"].contains(&line));
}

/// Plays a script to both and compares those lines that count.
#[track_caller]
fn same_on(scene: &Scene, lines: &[Line], counts: fn(&str) -> bool) {
    let server = scene.server();
    assert!(matches!(lines.last(), Some(Line::Pass(_))), "a script ends with a turn");
    let generation = generation(server);
    let run = play(generation, lines, true).unwrap_or_else(|broken| panic!("{}", broken.violation));
    let simulated = Told::by_run(&run, lines);
    let real = real::play(scene, lines, &simulated);
    let plain = |told: &Told| told.plain().into_iter().filter(|line| counts(line)).collect::<Vec<_>>();
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

/// Both sides, line by line: what only the simulated server said with `-`, what only the real one said with `+`.
fn differences(simulated: &[String], real: &[String]) -> String {
    // How many lines of what is left of both can stand side by side.
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
