//! Runs the console blocks of the documents in `redis-cli`, and compares the output.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use support::{Server, module_path, until};

const SOON: Duration = Duration::from_secs(30);
/// The module's path and the servers' ports in the documents.
const MODULE: &str = "/usr/lib/redis/modules/libholdfast.so";
const PORTS: [&str; 2] = ["6379", "6380"];

/// Runs the `console` blocks of a text. The prompt names the server, and the block's name the terminal.
#[track_caller]
pub fn run(text: &str, servers: &[&Server]) {
    let mut text = text.replace(MODULE, &module_path().display().to_string());
    for (port, server) in PORTS.iter().zip(servers) {
        text = text.replace(port, &server.port().to_string());
    }
    let mut terminals: BTreeMap<&str, Terminal> = BTreeMap::new();
    let mut seen = Seen::default();
    let blocks = blocks(&text);
    assert!(!blocks.is_empty(), "the text has a console block");
    for block in &blocks {
        if !terminals.contains_key(block.terminal) {
            let port = block.port.expect("the block begins with a prompt").to_string();
            let at = servers.iter().find(|server| server.port().to_string() == port).expect("one of the servers");
            terminals.insert(block.terminal, Terminal::open(at));
        }
        let terminal = terminals.get_mut(block.terminal).expect("the terminal is open");
        block.steps.iter().for_each(|step| terminal.run(step, &mut seen));
    }
    terminals.into_values().for_each(Terminal::close);
}

/// A console block of one terminal.
#[derive(Debug)]
struct Block<'a> {
    terminal: &'a str,
    /// The port of its first prompt, if it has one.
    port: Option<&'a str>,
    steps: Vec<Step<'a>>,
}

/// An input line, if any, and its expected output.
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
    let mut port = None;
    for line in lines.lines() {
        match (prompt(line), steps.last_mut()) {
            (Some((at, typed)), _) => {
                port = Some(at);
                steps.push(Step { typed: Some(typed), printed: Vec::new() });
            }
            // The time that redis-cli prints after a slow reply is not repeatable.
            (None, _) if is_elapsed(line) => {}
            (None, Some(step)) => step.printed.push(line),
            (None, None) => steps.push(Step { typed: None, printed: vec![line] }),
        }
    }
    Some(Block { terminal, port, steps })
}

/// The port in a prompt, and the input behind it.
fn prompt(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("127.0.0.1:")?.split_once("> ")
}

/// `(4.32s)`, as redis-cli prints after half a second.
fn is_elapsed(line: &str) -> bool {
    let number = line.strip_prefix('(').and_then(|line| line.strip_suffix("s)"));
    number.is_some_and(|number| number.parse::<f64>().is_ok())
}

/// A `redis-cli` whose input is a pipe.
struct Terminal<'s> {
    server: &'s Server,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl<'s> Terminal<'s> {
    fn open(server: &'s Server) -> Self {
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
        Self { server, child, input, lines }
    }

    fn run(&mut self, step: &Step, seen: &mut Seen) {
        let blocked = || self.server.info("clients", "blocked_clients").and_then(|count| count.parse::<u32>().ok());
        let before = blocked();
        if let Some(typed) = step.typed {
            // A later line may name a token or a session that was returned here.
            writeln!(self.input, "{}", seen.translate(typed)).unwrap();
            if step.printed.is_empty() {
                until(SOON, "the request waits on the server", || blocked() > before);
            }
        }
        for expected in &step.printed {
            let printed = self.next_line();
            assert!(seen.fits(expected, &printed), "{:?}: {printed:?} instead of {expected:?}", step.typed);
        }
        if step.typed == Some("FAILOVER") {
            // A server reports itself as replica before the handshake. The link is up only afterwards.
            let replication = |field| self.server.info("replication", field);
            until(SOON, "the replica is in step", || {
                replication("role").as_deref() == Some("slave")
                    && replication("master_link_status").as_deref() == Some("up")
            });
        }
    }

    fn next_line(&self) -> String {
        loop {
            let line = self.lines.recv_timeout(SOON).expect("redis-cli prints all lines of the document");
            if !is_elapsed(&line) {
                return line;
            }
        }
    }

    fn close(mut self) {
        drop(self.input);
        self.child.wait().unwrap();
        let rest: VecDeque<String> = self.lines.iter().filter(|line| !is_elapsed(line)).collect();
        assert!(rest.is_empty(), "redis-cli prints only the lines of the document: {rest:?}");
    }
}

/// Tokens of a document and those that the server returned, which must be in the same order; and its sessions, in any
/// order.
#[derive(Default)]
struct Seen {
    tokens: BTreeMap<u64, u64>,
    sessions: BTreeMap<String, String>,
}

impl Seen {
    /// Whether `printed` matches `expected`: equal words, but any token for a token, any session for a session and any time
    /// for a time.
    fn fits(&mut self, expected: &str, printed: &str) -> bool {
        let (mut expected, mut printed) = (words(expected), words(printed));
        // Servers word these differently.
        if expected.last() == Some(&"…") {
            expected.pop();
            printed.truncate(expected.len());
        }
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

    /// Each session of the document stands for one connection, and each connection for one session.
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
fn console_session_uses_one_connection() {
    const SHOWN: &str = "3f0c9a52-7d1e-4b86-a2f4-5e9d81c07b63:8";
    let of = |client: u32| format!("\"00000000-0000-4000-8000-000000000000:{client}\"");
    let mut seen = Seen::default();
    assert!(seen.fits(&format!("\"{SHOWN}\""), &of(5)));
    assert!(seen.fits(&format!("\"{SHOWN}\""), &of(5)), "the same session again");
    assert!(!seen.fits(&format!("\"{SHOWN}\""), &of(6)), "another connection");
    assert!(!seen.fits(&format!("\"{SHOWN}0\""), &of(5)), "another session");
    assert!(!seen.fits(&format!("\"{SHOWN}1\""), "\"no session\""));
    assert_eq!(
        seen.translate(&format!("LOCK.RENEW key me SESSION {SHOWN}")),
        format!("LOCK.RENEW key me SESSION {}", bare(&of(5))),
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

/// A session id: a UUID, a colon, a number.
fn is_session(word: &str) -> bool {
    bare(word).split_once(':').is_some_and(|(run, client)| {
        let parts: Vec<usize> = run.split('-').map(str::len).collect();
        let is_hex = run.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
        parts == [8, 4, 4, 4, 12] && is_hex && client.parse::<u64>().is_ok()
    })
}
