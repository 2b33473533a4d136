//! What README.md and redis.conf.example show is what happens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use support::{Server, module_path, until, workspace};

const PROMPT: &str = "127.0.0.1:6379> ";
const SOON: Duration = Duration::from_secs(10);

#[test]
fn the_readme_session_runs_as_it_stands() {
    let server = Server::start();
    let readme = document("README.md");
    let blocks = blocks(&readme);
    assert!(blocks.len() > 5, "the session was found: {blocks:?}");
    let mut terminals: BTreeMap<&str, Terminal> = BTreeMap::new();
    let mut seen = Seen::default();
    for block in &blocks {
        let terminal = terminals.entry(block.terminal).or_insert_with(|| Terminal::open(&server));
        for step in &block.steps {
            terminal.run(step, &mut seen, &server);
        }
    }
    for (_, terminal) in terminals {
        terminal.close();
    }
}

#[test]
fn the_example_configuration_starts_a_server() {
    let dir = std::env::temp_dir().join(format!("holdfast-example-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("redis.conf");
    fs::write(&file, example_with(&module_path().display().to_string())).unwrap();
    // Without its own module argument: the file loads it.
    let server = Server::builder().without_module().dir(&dir).config_file(&file).start();
    for (name, value) in settings(&example_with("")) {
        if ["loadmodule", "bind", "port", "dir", "protected-mode"].contains(&name.as_str()) {
            continue;
        }
        let reply: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(&name).query(&mut server.connect()).unwrap();
        assert_eq!(reply.get(1).map(|got| plain(got)), Some(plain(&value)), "{name}");
    }
    let token: i64 = redis::cmd("LOCK.ACQUIRE").arg("key").arg("owner").query(&mut server.connect()).unwrap();
    assert!(token > 0);
    drop(server);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_example_configuration_has_every_setting_of_the_module_at_its_default() {
    let server = Server::start();
    let there: BTreeMap<String, String> =
        redis::cmd("CONFIG").arg("GET").arg("holdfast.*").query(&mut server.connect()).unwrap();
    let shown: BTreeMap<_, _> =
        settings(&example_with("")).into_iter().filter(|(name, _)| name.starts_with("holdfast.")).collect();
    assert_eq!(shown, there);
}

#[test]
fn the_documents_have_every_command_with_the_same_syntax() {
    let server = Server::start();
    let list: Vec<String> =
        redis::cmd("COMMAND").arg(&["LIST", "FILTERBY", "MODULE", "holdfast"]).query(&mut server.connect()).unwrap();
    let there: BTreeSet<_> = list.into_iter().map(|name| name.to_uppercase()).collect();
    let name = |syntax: &String| syntax.split(' ').next().unwrap_or_default().to_owned();
    let readme: BTreeSet<_> = table(&document("README.md"), "command").into_iter().map(|(syntax, _)| syntax).collect();
    let reference: BTreeSet<_> = document("docs/reference.md")
        .lines()
        .filter(|line| line.starts_with("    LOCK."))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let help: Vec<String> = redis::cmd("LOCK.HELP").query(&mut server.connect()).unwrap();
    let help: BTreeSet<_> = help.into_iter().filter(|line| line.starts_with("LOCK.")).collect();
    assert_eq!(readme, reference);
    assert_eq!(help, reference);
    assert_eq!(readme.iter().map(name).collect::<BTreeSet<_>>(), there);
}

#[test]
fn the_reference_has_every_setting_with_its_default() {
    let server = Server::start();
    let there: BTreeMap<String, String> =
        redis::cmd("CONFIG").arg("GET").arg("holdfast.*").query(&mut server.connect()).unwrap();
    let shown: BTreeMap<_, _> = table(&document("docs/reference.md"), "parameter").into_iter().collect();
    assert_eq!(shown, there);
}

#[test]
fn the_reference_has_every_field_of_info() {
    let server = Server::start();
    let info: String = redis::cmd("INFO").arg("holdfast").query(&mut server.connect()).unwrap();
    let fields = info.lines().filter_map(|line| line.split_once(':')).map(|(field, _)| field.to_owned());
    let shown = table(&document("docs/reference.md"), "field of `INFO`").into_iter().map(|(field, _)| field);
    assert_eq!(shown.collect::<BTreeSet<_>>(), fields.collect::<BTreeSet<_>>());
}

fn document(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap()
}

/// The first two columns of the table whose first column has this title, without their backticks.
fn table(text: &str, title: &str) -> Vec<(String, String)> {
    let rows = text.lines().skip_while(|line| !line.starts_with(&format!("| {title} |"))).skip(2);
    let rows: Vec<_> = rows.take_while(|line| line.starts_with('|')).map(row).collect();
    assert!(!rows.is_empty(), "there is a table with the column {title:?}");
    rows
}

fn row(line: &str) -> (String, String) {
    const BAR: &str = "\0";
    let line = line.replace("\\|", BAR);
    let mut cells = line.split('|').skip(1).map(|cell| cell.trim().trim_matches('`').replace(BAR, "|"));
    (cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
}

/// The example with the one change that its reader has to make.
fn example_with(module: &str) -> String {
    let example = document("redis.conf.example");
    assert_eq!(example.lines().filter(|line| line.starts_with("loadmodule ")).count(), 1);
    let line = |line: &str| match line.strip_prefix("loadmodule ") {
        Some(_) => format!("loadmodule {module}\n"),
        None => format!("{line}\n"),
    };
    example.lines().map(line).collect()
}

fn settings(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).map(|(name, value)| (name.into(), value.into())).collect()
}

/// A value as `CONFIG GET` tells it: memory in bytes.
fn plain(value: &str) -> String {
    match value.strip_suffix("mb").and_then(|number| number.parse::<u64>().ok()) {
        Some(number) => (number << 20).to_string(),
        None => value.to_owned(),
    }
}

/// What is typed in one terminal without leaving it.
#[derive(Debug)]
struct Block<'a> {
    terminal: &'a str,
    steps: Vec<Step<'a>>,
}

/// A line that is typed, if any, and what is printed then.
#[derive(Debug)]
struct Step<'a> {
    typed: Option<&'a str>,
    printed: Vec<&'a str>,
}

fn blocks(readme: &str) -> Vec<Block<'_>> {
    let fenced = readme.split("```").skip(1).step_by(2);
    fenced.filter_map(|text| block(text.strip_prefix("console ")?)).collect()
}

fn block(text: &str) -> Option<Block<'_>> {
    let (terminal, lines) = text.split_once('\n')?;
    let mut steps: Vec<Step> = Vec::new();
    for line in lines.lines() {
        match (line.strip_prefix(PROMPT), steps.last_mut()) {
            (Some(typed), _) => steps.push(Step { typed: Some(typed), printed: Vec::new() }),
            // Only a reply that takes long: what redis-cli measured is not repeatable.
            (None, _) if is_elapsed(line) => {}
            (None, Some(step)) => step.printed.push(line),
            (None, None) => steps.push(Step { typed: None, printed: vec![line] }),
        }
    }
    Some(Block { terminal, steps })
}

/// `(4.32s)`, as redis-cli prints after half a second.
fn is_elapsed(line: &str) -> bool {
    let number = line.strip_prefix('(').and_then(|line| line.strip_suffix("s)"));
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

/// A `redis-cli`, typed into through a pipe.
struct Terminal {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Terminal {
    fn open(server: &Server) -> Self {
        let mut child = Command::new("redis-cli")
            .args(["--no-raw", "-h", &server.addr().ip().to_string(), "-p", &server.port().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("redis-cli can be run");
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, input, lines }
    }

    fn run(&mut self, step: &Step, seen: &mut Seen, server: &Server) {
        if let Some(typed) = step.typed {
            // What was given here, a token or a session, is what a later request names.
            writeln!(self.input, "{}", seen.translate(typed)).unwrap();
            if step.printed.is_empty() {
                until(SOON, "the request waits on the server", || {
                    server.info("clients", "blocked_clients").as_deref() == Some("1")
                });
            }
        }
        for expected in &step.printed {
            let printed = self.next_line();
            assert!(seen.fits(expected, &printed), "{:?}: {printed:?} instead of {expected:?}", step.typed);
        }
    }

    fn next_line(&self) -> String {
        loop {
            let line = self.lines.recv_timeout(SOON).expect("redis-cli prints as much as the README shows");
            if !is_elapsed(&line) {
                return line;
            }
        }
    }

    fn close(mut self) {
        drop(self.input);
        self.child.wait().unwrap();
        let rest: VecDeque<String> = self.lines.iter().filter(|line| !is_elapsed(line)).collect();
        assert!(rest.is_empty(), "redis-cli prints no more than the README shows: {rest:?}");
    }
}

/// The tokens of the README and those that were given for them, which must be in the same order; and its sessions and
/// theirs, in any order.
#[derive(Default)]
struct Seen {
    tokens: BTreeMap<u64, u64>,
    sessions: BTreeMap<String, String>,
}

impl Seen {
    /// Whether `printed` is what `expected` stands for: every word the same, but a token for a token, a session for a
    /// session and a time for a time.
    fn fits(&mut self, expected: &str, printed: &str) -> bool {
        let (expected, printed) = (words(expected), words(printed));
        expected.len() == printed.len()
            && expected.iter().zip(&printed).all(|(expected, printed)| self.word_fits(expected, printed))
    }

    fn word_fits(&mut self, expected: &str, printed: &str) -> bool {
        if expected == printed && !is_token(expected) {
            return true;
        }
        if is_session(expected) {
            return is_session(printed) && self.session_fits(bare(expected), bare(printed));
        }
        let (Some(shown), Some(given)) = (number(expected), number(printed)) else {
            return false;
        };
        if is_token(expected) { is_token(printed) && self.token_fits(shown, given) } else { shown >= 1000 }
    }

    fn token_fits(&mut self, shown: u64, given: u64) -> bool {
        let known = *self.tokens.entry(shown).or_insert(given);
        known == given && self.tokens.values().is_sorted_by(|earlier, later| earlier < later)
    }

    /// Each session of the README stands for one connection, and each connection for one session.
    fn session_fits(&mut self, shown: &str, given: &str) -> bool {
        let taken = self.sessions.iter().any(|(other, it)| other != shown && it == given);
        !taken && self.sessions.entry(shown.to_owned()).or_insert_with(|| given.to_owned()) == given
    }

    fn translate(&self, typed: &str) -> String {
        let token = |word: &str| number(word).and_then(|shown| self.tokens.get(&shown)).map(u64::to_string);
        let word = |word: &str| token(word).or_else(|| self.sessions.get(word).cloned());
        let words = typed.split(' ').map(|it| word(it).unwrap_or_else(|| it.to_owned()));
        words.collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn a_session_stands_for_one_connection() {
    const SHOWN: &str = "3f0c9a52-7d1e-4b86-a2f4-5e9d81c07b63:8";
    let of = |client: u32| format!("\"00000000-0000-4000-8000-000000000000:{client}\"");
    let mut seen = Seen::default();
    assert!(seen.fits(&format!("\"{SHOWN}\""), &of(5)));
    assert!(seen.fits(&format!("\"{SHOWN}\""), &of(5)), "it is told again");
    assert!(!seen.fits(&format!("\"{SHOWN}\""), &of(6)), "another connection");
    assert!(!seen.fits(&format!("\"{SHOWN}0\""), &of(5)), "another session");
    assert!(!seen.fits(&format!("\"{SHOWN}1\""), "\"no session\""));
    assert_eq!(
        seen.translate(&format!("LOCK.CANCEL key me SESSION {SHOWN}")),
        format!("LOCK.CANCEL key me SESSION {}", bare(&of(5))),
    );
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn bare(word: &str) -> &str {
    word.trim_matches('"')
}

fn number(word: &str) -> Option<u64> {
    bare(word).parse().ok()
}

fn is_token(word: &str) -> bool {
    bare(word).len() == 16 && number(word).is_some()
}

/// What `LOCK.OWNER` says: a UUID, a colon, a number.
fn is_session(word: &str) -> bool {
    bare(word).split_once(':').is_some_and(|(run, client)| {
        let parts: Vec<usize> = run.split('-').map(str::len).collect();
        let is_hex = run.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
        parts == [8, 4, 4, 4, 12] && is_hex && client.parse::<u64>().is_ok()
    })
}
