//! Simulation runs of many clients and one server.
//!
//! `clients [--seed N] [--runs N | --minutes M] [--all]`: runs from this seed on; stops at the first violation and
//! prints the reduced run (`--all`: continues, and prints each invariant once).
//! `clients --seed N --steps FOLDER`: writes the steps of each client of this run as text (`text.rs`).

use simulator_clients::{Plan, RunResult, plan, play};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let (mut seed, mut runs, mut lasts, mut all, mut steps) = (1_u64, u64::MAX, None, false, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().unwrap_or_default();
        match arg.as_str() {
            "--seed" => seed = value().parse().unwrap_or(1),
            "--runs" => runs = value().parse().unwrap_or(1),
            "--minutes" => lasts = Some(Duration::from_secs_f64(value().parse::<f64>().unwrap_or(1.0) * 60.0)),
            "--all" => all = true,
            "--steps" => steps = Some(value()),
            _ => {
                eprintln!("clients [--seed N] [--runs N | --minutes M] [--all] | clients --seed N --steps FOLDER");
                return ExitCode::from(2);
            }
        }
    }
    std::panic::set_hook(Box::new(|_| {}));
    if let Some(folder) = steps {
        return write_steps(&folder, seed);
    }
    let (begin, first) = (Instant::now(), seed);
    let (mut ran, mut done, mut commands) = (0_u64, 0_u64, 0_u64);
    let mut known: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    while ran < runs && lasts.is_none_or(|lasts| begin.elapsed() < lasts) {
        let plan = plan(seed);
        let run = play(&plan, false);
        (ran, done, commands) = (ran + 1, done + run.steps, commands + run.commands);
        if let Some(violation) = &run.violation {
            let seeds = known.entry(violation.rule).or_default();
            seeds.push(seed);
            if seeds.len() == 1 {
                let (plan, run) = shrink(plan, run);
                println!("after {ran} runs, {done} steps, {:.1} s:", begin.elapsed().as_secs_f64());
                println!("{}{plan}", run.violation.map(|it| format!("{it}\n")).unwrap_or_default());
            }
            if !all {
                return ExitCode::FAILURE;
            }
        }
        seed = seed.wrapping_add(1);
    }
    let seconds = begin.elapsed().as_secs_f64();
    println!(
        "seeds {first} to {}: {ran} runs, {done} steps, {commands} commands in {seconds:.1} s",
        seed.wrapping_sub(1)
    );
    for (rule, seeds) in &known {
        println!("  {} times: {rule}: seeds {:?}", seeds.len(), &seeds[..seeds.len().min(20)]);
    }
    if known.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Removes what the run does not need to violate the same invariant.
fn shrink(mut plan: Plan, mut run: RunResult) -> (Plan, RunResult) {
    let Some(rule) = run.violation.as_ref().map(|it| it.rule) else { return (plan, run) };
    let mut position = plan.acts.len();
    while position > 0 {
        position -= 1;
        let mut less = plan.clone();
        less.acts.remove(position);
        let ran = play(&less, false);
        if ran.violation.as_ref().is_some_and(|it| it.rule == rule) {
            (plan, run) = (less, ran);
            position = position.min(plan.acts.len());
        }
    }
    (plan, run)
}

fn write_steps(folder: &str, seed: u64) -> ExitCode {
    let written = std::fs::create_dir_all(folder).and_then(|()| {
        let plan = plan(seed);
        let run = play(&plan, false);
        // The reduced run, if it violates an invariant.
        let (plan, _) = shrink(plan, run);
        play(&plan, true).scripts.iter().try_for_each(|(by, steps)| {
            let name = by.trim_end_matches(':');
            std::fs::write(format!("{folder}/{seed}-{name}.txt"), steps.join("\n") + "\n")
        })
    });
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{folder}: {error}");
            ExitCode::from(2)
        }
    }
}
