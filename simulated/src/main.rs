//! Lives of the module, one after another, from seeds.
//!
//! `simulate [--seed N] [--minutes M] [--lives N] [--all]`: lives from this seed on, for so long or so many; stops at the
//! first that breaks a rule, with its script cut down (`--all`: goes on, and tells each kind of violation once).
//! `simulate --history FILE [--seed N]`: writes what the clients of this life saw (`histories/README.md`), without the lines
//! that a history can't tell.
//! `simulate --thin [--seed N] [--minutes M] [--lives N]`: lives of clients of the basic profile (`simulated::thin`) instead.
//! `simulate --play FILE [GENERATION]`: plays a script and prints what each client is told.

use simulated::play::play;
use simulated::redis::Generation;
use simulated::{history, script, seed, shrink, thin};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Options {
    seed: u64,
    lasts: Option<Duration>,
    lives: u64,
    all: bool,
}

fn main() -> ExitCode {
    let mut options = Options { seed: 1, lasts: None, lives: u64::MAX, all: false };
    let (mut history, mut is_thin) = (None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_default();
        match arg.as_str() {
            "--seed" => options.seed = value().parse().unwrap_or(1),
            "--minutes" => options.lasts = Some(Duration::from_secs_f64(value().parse::<f64>().unwrap_or(1.0) * 60.0)),
            "--lives" => options.lives = value().parse().unwrap_or(1),
            "--all" => options.all = true,
            "--thin" => is_thin = true,
            "--history" => history = Some(value()),
            "--play" => return play_file(&value(), args.next().as_deref()),
            _ => {
                eprintln!(
                    "simulate [--seed N] [--minutes M] [--lives N] [--all] | simulate --history FILE [--seed N] | simulate --play FILE [GENERATION]"
                );
                return ExitCode::from(2);
            }
        }
    }
    if let Some(path) = history {
        return write_history(&path, options.seed);
    }
    // A panic of the module is a violation, and is told as one.
    std::panic::set_hook(Box::new(|_| {}));
    if is_thin { thin_clients(&options) } else { simulate(&options) }
}

fn thin_clients(options: &Options) -> ExitCode {
    let begin = Instant::now();
    let (mut seed, mut lives, mut requests) = (options.seed, 0, 0);
    while lives < options.lives && options.lasts.is_none_or(|lasts| begin.elapsed() < lasts) {
        match thin::play(seed, None) {
            Ok(count) => requests += count,
            Err(violation) => {
                println!("seed {seed}, after {lives} lives: {violation}");
                return ExitCode::FAILURE;
            }
        }
        (seed, lives) = (seed.wrapping_add(1), lives + 1);
    }
    println!("{lives} lives of thin clients, {requests} messages in {:.1} s", begin.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}

fn simulate(options: &Options) -> ExitCode {
    let begin = Instant::now();
    let (mut commands, mut turns, mut lives) = (0_u64, 0_u64, 0_u64);
    let mut known: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut seed = options.seed;
    while lives < options.lives && options.lasts.is_none_or(|lasts| begin.elapsed() < lasts) {
        let life = seed::life(seed);
        lives += 1;
        match play(life.generation, &life.lines, false) {
            Ok(life) => {
                commands += life.commands;
                turns += life.turns;
            }
            Err(broken) => {
                commands += broken.life.commands;
                turns += broken.life.turns;
                let times = known.entry(broken.violation.rule.into()).or_default();
                times.push(seed);
                if times.len() == 1 || !options.all {
                    let (lines, broken) = shrink::shrink(life.generation, &life.lines, broken);
                    println!(
                        "seed {seed}, {:?}, after {commands} commands in {lives} lives and {:.1} s:\n  {}\n\n{}",
                        life.generation,
                        begin.elapsed().as_secs_f64(),
                        broken.violation,
                        script::print(&lines)
                    );
                }
                if !options.all {
                    return ExitCode::FAILURE;
                }
            }
        }
        seed = seed.wrapping_add(1);
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "seeds {} to {}: {lives} lives, {commands} commands, {turns} turns in {seconds:.1} s: {:.0} commands a second",
        options.seed,
        seed.wrapping_sub(1),
        commands as f64 / seconds
    );
    for (rule, seeds) in &known {
        println!("  {} times: {rule}: seeds {:?}", seeds.len(), &seeds[..seeds.len().min(20)]);
    }
    if known.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write_history(path: &str, seed: u64) -> ExitCode {
    let life = seed::life(seed);
    let lines: Vec<_> = life.lines.into_iter().filter(history::can_tell).collect();
    let history = play(life.generation, &lines, true).map_or_else(|broken| broken.life.history, |life| life.history);
    match std::fs::write(path, history) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{path}: {error}");
            ExitCode::from(2)
        }
    }
}

fn play_file(path: &str, generation: Option<&str>) -> ExitCode {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("{path}: {error}");
            return ExitCode::from(2);
        }
    };
    let lines = script::parse(&text);
    let mut failed = false;
    for one in Generation::ALL {
        if generation.is_some_and(|name| !format!("{one:?}").eq_ignore_ascii_case(name)) {
            continue;
        }
        println!("{one:?}");
        match play(one, &lines, true) {
            Ok(life) => life.told.iter().for_each(|(name, reply)| println!("  {name} {reply:?}")),
            Err(broken) => {
                failed = true;
                broken.life.told.iter().for_each(|(name, reply)| println!("  {name} {reply:?}"));
                println!("  {} (line {})", broken.violation, broken.lines);
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
