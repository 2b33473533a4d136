//! Plays the scenarios to all clients, and prints which of them each client passes.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use conformance::clock;
use conformance::driver::Manifest;
use conformance::fault::{Fault, Kind};
use conformance::golden;
use conformance::play::{ClientUnderTest, Drivers, play};
use conformance::random;
use conformance::rules;
use conformance::scenario::{Feature, Profile, Scenario, read_all};
use conformance::table::{self, Passed};

/// The number of scenarios that are played at once: they wait most of the time.
const AT_ONCE: usize = 16;

const HELP: &str = "\
conformance: plays scenarios to clients, through their drivers

  --client NAME      only this client (a folder of verification/conformance/drivers); may be repeated
  --scenario NAME    only this scenario; may be repeated
  --clean            without faults between the messages
  --fault KIND@N     with this fault only, at message N of each scenario (a failure prints these options)
  --rules            only prints which scenarios and vectors check which rule of docs/client-protocol.md
  --golden           only the golden tables
  --random SECONDS   instead, random calls of each pair of clients, for so long
  --fleet SECONDS    instead, random calls of all clients at once, for so long; processes and servers are also killed
  --with WHAT        in a fleet: failovers (the default), slots (that move), clock-steps, or redisson (on the same mutexes)
  --seed N           the seed of the random calls
  --history FOLDER   writes the clients' histories there (format: verification/histories/README.md)
  --python PROGRAM   the Python of the drivers in Python (python3)
  --table FILE       writes the tables of features and scenarios into this page, between its marks";

#[derive(Default)]
struct Arguments {
    clients: Vec<String>,
    scenarios: Vec<String>,
    clean: bool,
    fault: Option<Fault>,
    rules: bool,
    golden: bool,
    random: Option<u64>,
    fleet: Option<u64>,
    with: Option<random::Kind>,
    seed: Option<u64>,
    history: Option<PathBuf>,
    python: Option<String>,
    table: Option<PathBuf>,
}

/// The result of a scenario with a client.
#[derive(Debug, Default)]
struct Verdict {
    faults: Vec<String>,
    /// The file with the history of the first failure, and how to play it again.
    repeat: Option<String>,
    /// Whether it passed without a fault between the messages.
    passed_clean: bool,
    played: usize,
    positions: u64,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("conformance: {why}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, String> {
    let Some(arguments) = arguments()? else {
        println!("{HELP}");
        return Ok(true);
    };
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut scenarios = read_all(&here.join("scenarios"))?;
    if arguments.rules {
        let specification = here.join("../../docs/client-protocol.md");
        let specification = fs::read_to_string(specification).map_err(|why| why.to_string())?;
        let checks = rules::checks(&scenarios, &rules::vectors(&here.join("../vectors"))?);
        for rule in rules::of(&specification).keys().map(rules::name) {
            println!(
                "{rule}: {}",
                checks.get(&rule).map_or("no scenario or vector".to_owned(), |names| names.join("; "))
            );
        }
        return Ok(true);
    }
    scenarios.retain(|it| arguments.scenarios.is_empty() || arguments.scenarios.contains(&it.name));
    let mut manifests = Vec::new();
    for folder in folders(&here.join("drivers"))? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if arguments.clients.is_empty() || arguments.clients.contains(&name) {
            manifests.push(Manifest::read(&folder)?);
        }
    }
    // Clients of another protocol run no scenarios.
    let (foreign, manifests): (Vec<_>, Vec<_>) = manifests.into_iter().partition(|it| it.profile == Profile::Foreign);
    let beside = env::current_exe().map_err(|why| why.to_string())?.with_file_name("driver-rust");
    let python = arguments.python.unwrap_or_else(|| "python3".to_owned());
    let programs = BTreeMap::from([("driver-rust", beside.display().to_string()), ("python", python)]);

    if let Some(seconds) = arguments.random {
        let seed = arguments.seed.unwrap_or_else(clock::now);
        return play_pairs(&manifests, &programs, seed, Duration::from_secs(seconds), arguments.history.as_deref());
    }

    if let Some(seconds) = arguments.fleet {
        let (kind, seed) =
            (arguments.with.unwrap_or(random::Kind::Failovers), arguments.seed.unwrap_or_else(clock::now));
        let mut fleet: Vec<&Manifest> = manifests.iter().filter(|it| !it.fails.contains_key("random")).collect();
        match kind {
            random::Kind::Slots => fleet.retain(|it| it.has(Feature::Cluster)),
            random::Kind::Redisson => fleet.extend(foreign.iter().chain(&foreign)),
            _ => {}
        }
        return play_fleet(&fleet, &programs, kind, (seed, seconds), arguments.history.as_deref());
    }

    let under_test = |client: usize| ClientUnderTest { manifest: &manifests[client], programs: &programs };
    if arguments.golden {
        return play_tables(&manifests, &under_test);
    }

    // First without faults: this counts the messages.
    let pairs: Vec<(usize, usize)> = (0..manifests.len())
        .flat_map(|client| (0..scenarios.len()).map(move |scenario| (client, scenario)))
        .filter(|(client, scenario)| can(&manifests[*client], &scenarios[*scenario]))
        .collect();
    let clean: Vec<_> = pairs.iter().map(|pair| (*pair, arguments.fault)).collect();
    let mut verdicts: BTreeMap<(usize, usize), Verdict> = BTreeMap::new();
    let begin = Instant::now();
    let history = arguments.history.clone().unwrap_or_else(|| env::temp_dir().join("holdfast-conformance"));
    let repeats = Repeats { manifests: &manifests, history: &history };
    play_all("without faults between the messages", &clean, &scenarios, &under_test, &repeats, &mut verdicts)?;
    let without_faults = begin.elapsed();
    if !arguments.clean && arguments.fault.is_none() {
        let mut with_faults = Vec::new();
        for (pair, verdict) in &verdicts {
            if verdict.faults.is_empty() && scenarios[pair.1].positions.is_some() {
                let drops = manifests[pair.0].has(Feature::Drop);
                let kinds = || Kind::ALL.into_iter().filter(|kind| drops || *kind != Kind::Drop);
                for at in 0..verdict.positions {
                    with_faults.extend(kinds().map(|kind| (*pair, Some(Fault { kind, at }))));
                }
            }
        }
        play_all("with faults", &with_faults, &scenarios, &under_test, &repeats, &mut verdicts)?;
    }
    let shown = if arguments.scenarios.is_empty() { 5 } else { usize::MAX };
    let mut as_expected = report(&verdicts, &manifests, &scenarios, (without_faults, begin.elapsed()), shown);
    if arguments.scenarios.is_empty() {
        as_expected &= play_tables(&manifests, &under_test)?;
    }
    if let Some(file) = arguments.table {
        let passed = |client: usize, scenario: usize| {
            let verdict = verdicts.get(&(client, scenario))?;
            Some(match (verdict.faults.is_empty(), verdict.passed_clean) {
                (true, _) => Passed::Always,
                (false, true) => Passed::WithoutFaults,
                (false, false) => Passed::Never,
            })
        };
        let wrong = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let page = fs::read_to_string(&file).map_err(|why| wrong(&why))?;
        let page = table::put_into(&page, &table::write(&manifests, &scenarios, passed))
            .ok_or_else(|| wrong(&"has no marks for the tables"))?;
        fs::write(&file, page).map_err(|why| wrong(&why))?;
    }
    Ok(as_expected)
}

fn arguments() -> Result<Option<Arguments>, String> {
    let mut all = Arguments::default();
    let mut words = env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--client" => all.clients.push(value()?),
            "--scenario" => all.scenarios.push(value()?),
            "--clean" => all.clean = true,
            "--fault" => all.fault = Some(value()?.parse()?),
            "--rules" => all.rules = true,
            "--golden" => all.golden = true,
            "--random" => all.random = Some(number(&value()?)?),
            "--fleet" => all.fleet = Some(number(&value()?)?),
            "--with" => {
                let name = value()?;
                let kind = random::Kind::FLEETS.into_iter().find(|it| it.name() == name);
                all.with = Some(kind.ok_or(format!("--with {name}? {HELP}"))?);
            }
            "--seed" => all.seed = Some(number(&value()?)?),
            "--history" => all.history = Some(value()?.into()),
            "--python" => all.python = Some(value()?),
            "--table" => all.table = Some(value()?.into()),
            "--help" => return Ok(None),
            _ => return Err(format!("{word}? {HELP}")),
        }
    }
    Ok(Some(all))
}

fn number(digits: &str) -> Result<u64, String> {
    digits.parse().map_err(|_| format!("{digits} is not a number"))
}

fn folders(of: &Path) -> Result<Vec<PathBuf>, String> {
    let why = |error: std::io::Error| format!("{}: {error}", of.display());
    let entries = fs::read_dir(of).map_err(why)?.collect::<Result<Vec<_>, _>>().map_err(why)?;
    let mut folders: Vec<PathBuf> =
        entries.into_iter().map(|it| it.path()).filter(|it| it.join("driver.yaml").is_file()).collect();
    folders.sort();
    Ok(folders)
}

/// Random runs of all pairs of clients that support them, concurrently. Writes their histories into a folder.
fn play_pairs(
    manifests: &[Manifest],
    programs: &BTreeMap<&'static str, String>,
    seed: u64,
    time: Duration,
    histories: Option<&Path>,
) -> Result<bool, String> {
    let can: Vec<&Manifest> = manifests.iter().filter(|it| !it.fails.contains_key("random")).collect();
    let others = |index: usize| can.iter().skip(if can.len() > 1 { index + 1 } else { index });
    let under_test = |manifest| ClientUnderTest { manifest, programs };
    thread::scope(|threads| {
        let mut pairs = Vec::new();
        for (index, one) in can.iter().enumerate() {
            for other in others(index) {
                let named = [("X".to_owned(), under_test(one)), ("Y".to_owned(), under_test(other))];
                let run = move || random::run(random::Kind::Pair, seed, time, &named);
                pairs.push((one, other, threads.spawn(run)));
            }
        }
        let mut all_well = true;
        for (one, other, run) in pairs {
            let report = run.join().map_err(|_| "a run panicked")??;
            let says = if report.faults.is_empty() { "passed" } else { "FAILED" };
            let granted = report.granted;
            println!("{} and {}: random, seed {seed}: {says}, {granted} grants", one.client, other.client);
            report.faults.iter().for_each(|why| println!("    {why}"));
            all_well &= report.faults.is_empty();
            if let Some(folder) = histories {
                write_history(&report, folder, &format!("{} and {}, {seed}.jsonl", one.client, other.client))?;
            }
        }
        Ok(all_well)
    })
}

fn write_history(report: &random::Report, folder: &Path, name: &str) -> Result<(), String> {
    let file = folder.join(name);
    let written = fs::create_dir_all(folder).and_then(|()| report.history.write(fs::File::create(&file)?));
    written.map_err(|why| format!("{}: {why}", file.display()))
}

/// Runs all clients at once, at random, and prints what they did and which faults were injected.
fn play_fleet(
    manifests: &[&Manifest],
    programs: &BTreeMap<&'static str, String>,
    kind: random::Kind,
    (seed, seconds): (u64, u64),
    histories: Option<&Path>,
) -> Result<bool, String> {
    let mut named: Vec<(String, ClientUnderTest)> = Vec::new();
    for manifest in manifests {
        let mut name = manifest.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        while named.iter().any(|(other, _)| *other == name) {
            name += "-2";
        }
        named.push((name, ClientUnderTest { manifest, programs }));
    }
    let report = random::run(kind, seed, Duration::from_secs(seconds), &named)?;
    let says = if report.faults.is_empty() { "passed" } else { "FAILED" };
    let (operations, calls) = (report.history.operations(), report.calls.values().map(|it| it.0).sum::<u64>());
    println!(
        "fleet with {}, seed {seed}, {seconds} s: {says}, {calls} calls, {} grants, {operations} operations in the history",
        kind.name(),
        report.granted
    );
    for (client, (calls, granted)) in &report.calls {
        println!("    {client}: {calls} calls, {granted} grants");
    }
    for (fault, times) in &report.injected_faults {
        println!("    {times} times: {fault}");
    }
    report.faults.iter().for_each(|why| println!("    {why}"));
    println!("again: scripts/conformance --fleet {seconds} --with {} --seed {seed}", kind.name());
    if let Some(folder) = histories {
        write_history(&report, folder, &format!("fleet with {}, {seed}.jsonl", kind.name()))?;
    }
    Ok(report.faults.is_empty())
}

fn can(client: &Manifest, scenario: &Scenario) -> bool {
    scenario.profile.is_none_or(|it| it == client.profile) && scenario.needs.iter().all(|it| client.has(*it))
}

/// The folder for histories of failures, and the names of the clients on the command line.
struct Repeats<'a> {
    manifests: &'a [Manifest],
    history: &'a Path,
}

impl Repeats<'_> {
    /// Writes the history of a failure. Returns how to play it again.
    fn note(&self, client: usize, scenario: &str, fault: Option<Fault>, history: &[u8]) -> String {
        let name = self.manifests[client].folder.file_name().unwrap_or_default().to_string_lossy();
        let (of, how) = fault.map_or_else(
            || (String::new(), "--clean".to_owned()),
            |fault| (format!("-{fault}"), format!("--fault {fault}")),
        );
        let file = self.history.join(format!("{name}-{scenario}{of}.jsonl"));
        let written = fs::create_dir_all(self.history).and_then(|()| fs::write(&file, history));
        let where_to = written.map_or_else(|why| why.to_string(), |()| file.display().to_string());
        format!("scripts/conformance --client {name} --scenario {scenario} {how}; history: {where_to}")
    }
}

/// The interval of progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

type Task = ((usize, usize), Option<Fault>);

/// Plays all of these, several at once, and reports the progress on standard error.
fn play_all<'a>(
    what: &str,
    tasks: &[Task],
    scenarios: &[Scenario],
    under_test: &(impl Fn(usize) -> ClientUnderTest<'a> + Sync),
    repeats: &Repeats,
    verdicts: &mut BTreeMap<(usize, usize), Verdict>,
) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let begin = Instant::now();
    let progress = |played: usize, failed: usize| {
        eprintln!(
            "conformance: {what}: {played} of {} played, {failed} failed, {} s",
            tasks.len(),
            begin.elapsed().as_secs()
        );
    };
    progress(0, 0);
    // The results, the failure that ends the run, how many were played and failed, and when that was last reported.
    let results = Mutex::new((verdicts, None, (0, 0), begin));
    thread::scope(|threads| {
        for _ in 0..AT_ONCE {
            threads.spawn(|| {
                let mut drivers: BTreeMap<usize, Drivers> = BTreeMap::new();
                while let Some((pair @ (client, scenario), fault)) = tasks.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let drivers = drivers.entry(*client).or_default();
                    let played = play(&scenarios[*scenario], *fault, &under_test(*client), drivers);
                    let mut results = results.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    match played {
                        Ok(report) => {
                            let repeat = report
                                .faults
                                .first()
                                .map(|_| repeats.note(*client, &scenarios[*scenario].name, *fault, &report.history));
                            let verdict = results.0.entry(*pair).or_default();
                            verdict.repeat = verdict.repeat.take().or_else(|| repeat.clone());
                            let place =
                                fault.map_or_else(String::new, |it| format!("{:?} at message {}: ", it.kind, it.at));
                            verdict.faults.extend(report.faults.into_iter().map(|why| format!("{place}{why}")));
                            verdict.played += 1;
                            let failed = repeat.is_some();
                            if fault.is_none() {
                                verdict.passed_clean = verdict.faults.is_empty();
                                verdict.positions = report.messages;
                            }
                            let why = verdict.faults.last().filter(|_| failed).cloned();
                            results.2.1 += usize::from(failed);
                            if let Some(why) = why {
                                let client = &repeats.manifests[*client].client;
                                eprintln!("conformance: failed: {client}: {}: {why}", scenarios[*scenario].name);
                            }
                        }
                        Err(why) => results.1 = Some(why),
                    }
                    results.2.0 += 1;
                    if results.3.elapsed() > PROGRESS_INTERVAL || results.2.0 == tasks.len() {
                        results.3 = Instant::now();
                        progress(results.2.0, results.2.1);
                    }
                }
            });
        }
    });
    let (_, failure, ..) = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    failure.map_or(Ok(()), Err)
}

/// Plays the golden tables to all clients, all at once, and prints the differences. Returns whether they agree with the
/// manifests.
fn play_tables<'a>(
    manifests: &[Manifest],
    under_test: &(impl Fn(usize) -> ClientUnderTest<'a> + Sync),
) -> Result<bool, String> {
    thread::scope(|threads| {
        let mut running = Vec::new();
        for (index, manifest) in manifests.iter().enumerate() {
            for (name, play) in golden::TABLES {
                running.push((manifest, name, threads.spawn(move || play(&under_test(index)))));
            }
        }
        let mut as_expected = true;
        for (manifest, name, table) in running {
            let played = table.join().map_err(|_| format!("{}: golden {name} panicked", manifest.client))?;
            let (rows, mut differences) =
                played.map_or_else(|why| (0, vec![(String::new(), why)]), |it| (it.rows, it.differences));
            // A manifest names a table, or a row of it.
            let is_known = |fails: &str, row: &str| {
                fails.strip_prefix(name).is_some_and(|it| it.is_empty() || it == format!("/{row}"))
            };
            let known: Vec<&String> = manifest.fails.keys().filter(|it| it.split('/').next() == Some(name)).collect();
            let over = known.iter().filter(|it| !differences.iter().any(|(row, _)| is_known(it, row)));
            let over: Vec<String> =
                over.map(|it| format!("    {it} PASSES, but the manifest lists it as failing\n")).collect();
            differences.retain(|(row, _)| !known.iter().any(|it| is_known(it, row)));
            let says = match (differences.len() + over.len(), known.len()) {
                (0, 0) if rows == 0 => "can't".to_owned(),
                (0, 0) => format!("passed, {rows} rows"),
                (0, known) => format!("passed, {rows} rows, except {known} known differences"),
                _ => "NOT AS GOLDEN".to_owned(),
            };
            println!("{}: {name}: {says}", manifest.client);
            differences.iter().for_each(|(row, why)| println!("    {row}: {why}"));
            over.iter().for_each(|why| print!("{why}"));
            as_expected &= differences.is_empty() && over.is_empty();
        }
        Ok(as_expected)
    })
}

/// Prints all verdicts, with this many faults of each. Returns whether each agrees with the client's manifest.
fn report(
    verdicts: &BTreeMap<(usize, usize), Verdict>,
    manifests: &[Manifest],
    scenarios: &[Scenario],
    (without_faults, took): (Duration, Duration),
    shown: usize,
) -> bool {
    let mut as_expected = true;
    for ((client, scenario), verdict) in verdicts {
        let (manifest, scenario) = (&manifests[*client], &scenarios[*scenario]);
        let between = manifest.fails_between.get(&scenario.name).filter(|_| verdict.passed_clean);
        let known = manifest.fails.get(&scenario.name).or(between.filter(|_| !verdict.faults.is_empty()));
        let of_positions = match verdict.played {
            0 | 1 => String::new(),
            played => format!(", {} positions, {} faults", verdict.positions, played - 1),
        };
        let says = match (verdict.faults.is_empty(), known) {
            (true, None) => "passed".to_owned(),
            (true, Some(_)) => "PASSED, but the manifest lists it as failing".to_owned(),
            (false, Some(why)) => format!("failed, as known: {why}"),
            (false, None) => "NOT KEPT".to_owned(),
        };
        println!("{}: {}: {says}{of_positions}", manifest.client, scenario.name);
        if verdict.faults.is_empty() != known.is_none() {
            as_expected = false;
        }
        if known.is_none() {
            verdict.faults.iter().take(shown).for_each(|why| println!("    {why}"));
            if let more @ 1.. = verdict.faults.len().saturating_sub(shown) {
                println!("    and {more} more");
            }
            verdict.repeat.iter().for_each(|how| println!("    again: {how}"));
        }
    }
    println!();
    println!("{:<28} {:>9} {:>6} {:>9} {:>6} {:>7}", "client", "scenarios", "passed", "failed", "known", "faults");
    for (index, manifest) in manifests.iter().enumerate() {
        let of: Vec<_> = verdicts.iter().filter(|((client, _), _)| *client == index).collect();
        let passed = of.iter().filter(|(_, it)| it.faults.is_empty()).count();
        let is_known = |scenario: usize| {
            let name = &scenarios[scenario].name;
            manifest.fails.contains_key(name) || manifest.fails_between.contains_key(name)
        };
        let known = of.iter().filter(|((_, scenario), it)| !it.faults.is_empty() && is_known(*scenario)).count();
        let faults: usize = of.iter().map(|(_, it)| it.played.saturating_sub(1)).sum();
        let bad = of.len() - passed - known;
        println!("{:<28} {:>9} {passed:>6} {bad:>9} {known:>6} {faults:>7}", manifest.client, of.len());
    }
    let faults: usize = verdicts.values().map(|it| it.played.saturating_sub(1)).sum();
    let positions: u64 = verdicts.values().filter(|it| it.played > 1).map(|it| it.positions).sum();
    println!(
        "{} scenarios played in {} s; at {positions} positions between messages, {faults} times with a fault, in {} s",
        verdicts.len(),
        without_faults.as_secs(),
        (took - without_faults).as_secs()
    );
    as_expected
}
