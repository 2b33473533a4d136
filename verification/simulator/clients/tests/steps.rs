//! The scripts of `steps/`: inputs, and after `>` the outputs of the core.

use holdfast_core::{Core, Input, Output, Settings};
use simulator_clients::text::{Text, parse_input, parse_settings};
use std::fmt::Write;

/// Plays a script, and returns it with the core's real outputs.
fn played(script: &str) -> String {
    let mut core = Core::new(Settings::default());
    let mut played = String::new();
    for line in script.lines().filter(|line| !line.starts_with('>')) {
        let _ = writeln!(played, "{line}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(settings) = parse_settings(line) {
            core = Core::new(settings);
            continue;
        }
        let (now, input) = parse_input(line).unwrap_or_else(|| panic!("not a step: {line}"));
        core.step(now, input);
        while let Some(output) = core.take() {
            let _ = writeln!(played, "> {}", Text(&output));
        }
    }
    played
}

/// `STEPS=write cargo test -p simulator_clients --test computing` writes the current outputs into the scripts.
#[test]
fn core_outputs_match_scripts() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/steps");
    let mut scripts = 0;
    for entry in std::fs::read_dir(folder).expect("there are scripts") {
        let path = entry.expect("it can be read").path();
        let script = std::fs::read_to_string(&path).expect("it can be read");
        let played = played(&script);
        if std::env::var("STEPS").is_ok_and(|it| it == "write") {
            std::fs::write(&path, &played).expect("it can be written");
        } else {
            assert_eq!(played, script, "{}", path.display());
        }
        scripts += 1;
    }
    assert!(scripts >= 5, "{scripts} scripts");
}

/// Two cores of a cluster, one for each of its nodes.
struct Cluster {
    cores: [Core; 2],
}

impl Cluster {
    fn new() -> Self {
        Self { cores: [Core::in_cluster(Settings::default()), Core::in_cluster(Settings::default())] }
    }

    /// Gives a core this input, and returns its outputs. A claim that leaves it goes to the other one.
    fn step(&mut self, at: usize, line: &str) -> Vec<String> {
        let (now, input) = parse_input(line).unwrap_or_else(|| panic!("not a step: {line}"));
        self.give_input(at, now, input)
    }

    fn give_input(&mut self, at: usize, now: u64, input: Input) -> Vec<String> {
        self.cores[at].step(now, input);
        let mut done = Vec::new();
        while let Some(output) = self.cores[at].take() {
            if !matches!(output, Output::Wake { .. }) {
                done.push(format!("{at} {}", Text(&output)));
            }
            if let Output::Moved { moved, .. } = output {
                done.extend(self.give_input(1 - at, now, Input::Take { moved }));
            }
        }
        done
    }

    fn open(&mut self, at: usize, now: u64) {
        self.step(at, &format!("{now} opened 1"));
        let heartbeat = "*1\\r\\n*6\\r\\n$9\\r\\nheartbeat\\r\\n:0\\r\\n*0\\r\\n$-1\\r\\n$-1\\r\\n$16\\r\\n3750\\x2030000\\x20667\\x201\\r\\n";
        let session = "*6\\r\\n$2\\r\\nid\\r\\n$5\\r\\nrun:{at}\\r\\n$8\\r\\nprotocol\\r\\n*2\\r\\n:4\\r\\n:4\\r\\n$7\\r\\nversion\\r\\n$5\\r\\n0.4.0\\r\\n".replace("{at}", &at.to_string());
        for reply in [&session, heartbeat] {
            self.step(at, &format!("{now} replied 1 session {reply}"));
        }
    }
}

#[test]
fn moved_claim_continues_at_other_node_with_its_calls() {
    let mut cluster = Cluster::new();
    cluster.step(0, "0 acquire 1 by a## keys k wait 5000 lease 9000 watchdog");
    cluster.open(0, 5);
    let moved = cluster.step(0, "9 replied 1 requests -MOVED\\x207\\x20b:1\\r\\n");
    assert_eq!(moved, ["0 moved 1 MOVED 7 b:1", "1 open 1"]);
    cluster.open(1, 20);
    // Later requests may be queued already, so the request for the other node names how long it has waited.
    let granted = cluster.step(1, "30 replied 1 requests :7\\r\\n");
    assert_eq!(granted, ["1 ended 1 granted 7"]);
    // The slot returns: the hold moves with its token, and so does the call that waits for its release.
    let asked = cluster.step(1, "40 release 2 hold 1 within 1000");
    assert_eq!(asked, ["1 send 1 requests LOCK.RELEASE k a##1 ALL"]);
    let back = cluster.step(1, "50 replied 1 requests -ASK\\x207\\x20a:1\\r\\n");
    assert_eq!(back, ["1 moved 1 ASK 7 a:1", "0 send 1 requests ASKING", "0 send 1 requests LOCK.RELEASE k a##1 ALL"]);
    assert!(!cluster.cores[0].is_settled() && cluster.cores[1].is_settled());
    cluster.step(0, "60 replied 1 requests +OK\\r\\n");
    let released = cluster.step(0, "60 replied 1 requests :1\\r\\n");
    assert_eq!(released, ["0 ended 2 released"]);
}

#[test]
fn redirection_loop_is_followed_with_pauses() {
    let mut cluster = Cluster::new();
    cluster.step(0, "0 acquire 1 by a## keys k wait forever watchdog");
    cluster.open(0, 5);
    cluster.step(0, "9 replied 1 requests -MOVED\\x207\\x20b:1\\r\\n");
    cluster.open(1, 20);
    let back = cluster.step(1, "30 replied 1 requests -MOVED\\x207\\x20a:1\\r\\n");
    assert_eq!(back, ["1 moved 1 MOVED 7 a:1"], "not asked at once");
    let again = cluster.step(0, "130 wake");
    assert_eq!(
        again,
        ["0 send 1 requests LOCK.ACQUIRE k a##1 WAIT 0 WAITED 130 HOLDS 1 LEASE 30000 WATCHDOG SESSION run:0"]
    );
}

#[test]
fn late_reply_to_moved_claim_is_ignored() {
    let mut cluster = Cluster::new();
    cluster.step(0, "0 acquire 1 by a## keys k wait forever lease 9000 watchdog");
    cluster.open(0, 5);
    cluster.open(1, 6);
    let left = cluster.step(0, "10 leave 1");
    assert_eq!(left[0], "0 moved 1 MOVED");
    let late = cluster.step(0, "11 replied 1 requests :7\\r\\n");
    assert!(late.is_empty(), "{late:?}");
}

#[test]
fn cached_hold_moves_with_its_slot() {
    let mut cluster = Cluster::new();
    cluster.step(0, "0 acquire 1 by a: keys k watchdog kept");
    cluster.open(0, 5);
    cluster.step(0, "9 replied 1 requests :7\\r\\n");
    cluster.step(0, "10 keep 1 for 5000");
    let left = cluster.step(0, "20 leave 1");
    assert_eq!(left, ["0 moved 1 MOVED", "1 open 1"]);
    cluster.open(1, 30);
    let used = cluster.step(1, "40 use 2 hold 1 most 1");
    assert_eq!(used, ["1 ended 2 held"]);
    cluster.step(1, "41 replied 1 requests :7\\r\\n");
    cluster.step(1, "50 keep 1 for 5000");
    // Its caching time also applies at the other node.
    cluster.step(1, "60 leave 1");
    cluster.step(0, "61 replied 1 requests :7\\r\\n");
    let over = cluster.step(0, "5050 wake");
    assert_eq!(over, ["0 send 1 requests LOCK.RELEASE k a:1 ALL"]);
}
