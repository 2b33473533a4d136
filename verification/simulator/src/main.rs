//! Simulation runs of the module, one after another, from seeds.
//!
//! `simulate [--seed N] [--minutes M] [--runs N] [--all]`: runs from this seed on, for this long or this many; stops at
//! the first violation and prints its reduced script (`--all`: continues, and prints each kind of violation once).
//! `simulate --history FILE [--seed N]`: writes what the clients of this run observed
//! (`verification/histories/README.md`), without the lines that a history can't express; a violation does not end the
//! run. With `--runs N`, the histories of this many runs into the folder FILE. `simulate --thin [--seed N] [--minutes
//! M] [--runs N]`: runs of clients of the basic profile (`simulator::thin`) instead. `simulate --play FILE
//! [GENERATION]`: plays a script and prints the replies of each client.

use simulator::play::{self, play};
use simulator::redis::Generation;
use simulator::{history, script, seed, shrink, thin};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Options {
    seed: u64,
    lasts: Option<Duration>,
    runs: u64,
    all: bool,
}

fn main() -> ExitCode {
    let mut options = Options { seed: 1, lasts: None, runs: u64::MAX, all: false };
    let (mut history, mut is_thin) = (None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_default();
        match arg.as_str() {
            "--seed" => options.seed = value().parse().unwrap_or(1),
            "--minutes" => options.lasts = Some(Duration::from_secs_f64(value().parse::<f64>().unwrap_or(1.0) * 60.0)),
            "--runs" => options.runs = value().parse().unwrap_or(1),
            "--all" => options.all = true,
            "--thin" => is_thin = true,
            "--history" => history = Some(value()),
            "--play" => return play_file(&value(), args.next().as_deref()),
            _ => {
                eprintln!(
                    "simulate [--seed N] [--minutes M] [--runs N] [--all] | simulate --history FILE [--seed N] | simulate --play FILE [GENERATION]"
                );
                return ExitCode::from(2);
            }
        }
    }
    // A panic of the module is reported as a violation.
    std::panic::set_hook(Box::new(|_| {}));
    if let Some(folder) = history {
        return write_histories(&folder, &options);
    }
    if is_thin { thin_clients(&options) } else { simulate(&options) }
}

fn thin_clients(options: &Options) -> ExitCode {
    let begin = Instant::now();
    let (mut seed, mut runs, mut requests) = (options.seed, 0, 0);
    while runs < options.runs && options.lasts.is_none_or(|lasts| begin.elapsed() < lasts) {
        match thin::play(seed, None) {
            Ok(count) => requests += count,
            Err(violation) => {
                println!("seed {seed}, after {runs} runs: {violation}");
                return ExitCode::FAILURE;
            }
        }
        (seed, runs) = (seed.wrapping_add(1), runs + 1);
    }
    println!("{runs} runs of thin clients, {requests} messages in {:.1} s", begin.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}

fn simulate(options: &Options) -> ExitCode {
    let begin = Instant::now();
    let (mut commands, mut iterations, mut runs) = (0_u64, 0_u64, 0_u64);
    let mut known: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut seed = options.seed;
    while runs < options.runs && options.lasts.is_none_or(|lasts| begin.elapsed() < lasts) {
        let run = seed::from_seed(seed);
        runs += 1;
        match play(run.generation, &run.lines, false) {
            Ok(run) => {
                commands += run.commands;
                iterations += run.iterations;
            }
            Err(broken) => {
                commands += broken.run.commands;
                iterations += broken.run.iterations;
                let times = known.entry(broken.violation.rule.into()).or_default();
                times.push(seed);
                if times.len() == 1 || !options.all {
                    let (lines, broken) = shrink::shrink(run.generation, &run.lines, broken);
                    println!(
                        "seed {seed}, {:?}, after {commands} commands in {runs} runs and {:.1} s:\n  {}\n\n{}",
                        run.generation,
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
        "seeds {} to {}: {runs} runs, {commands} commands, {iterations} iterations in {seconds:.1} s: {:.0} commands a second",
        options.seed,
        seed.wrapping_sub(1),
        commands as f64 / seconds
    );
    for (rule, seeds) in &known {
        println!("  {} times: {rule}: seeds {:?}", seeds.len(), &seeds[..seeds.len().min(20)]);
    }
    if known.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write_histories(folder: &str, options: &Options) -> ExitCode {
    let runs = if options.runs == u64::MAX { 1 } else { options.runs };
    for seed in options.seed..options.seed.saturating_add(runs) {
        let run = seed::from_seed(seed);
        let lines: Vec<_> = run.lines.into_iter().filter(history::is_expressible).collect();
        let path = if runs == 1 { folder.to_owned() } else { format!("{folder}/{seed}.jsonl") };
        if let Err(error) = std::fs::write(&path, play::history(run.generation, &lines)) {
            eprintln!("{path}: {error}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
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
            Ok(run) => run.replies.iter().for_each(|(name, reply)| println!("  {name} {reply:?}")),
            Err(broken) => {
                failed = true;
                broken.run.replies.iter().for_each(|(name, reply)| println!("  {name} {reply:?}"));
                println!("  {} (line {})", broken.violation, broken.lines);
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
