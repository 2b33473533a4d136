//! Random scripts in which nothing depends on time. Leases are long, and no two requests name the same one. No session
//! with watched holds waits for events, since such a wait ends by itself (`events_returns_in_time_for_renewal`).

use std::fmt::Write;

/// A source of random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len() as u64) as usize]
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

const CLIENTS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// Watched holds are bound to the second session, and only the first one waits for events.
const SESSIONS: [&str; 2] = ["s", "t"];
const WAITS: &str = SESSIONS[0];
const WATCHES: &str = SESSIONS[1];
const KEYS: [&str; 3] = ["k", "l", "m"];

/// Writes a script.
struct Author {
    random: Random,
    leases: u64,
}

impl Author {
    /// A script of this many polls.
    fn script(seed: u64, polls: usize) -> String {
        let mut author = Self { random: Random(0x9e37_79b9_7f4a_7c15 ^ (seed << 20 | seed)), leases: 0 };
        let mut script = String::from("!replicas never\n");
        for _ in 0..polls {
            for _ in 0..1 + author.random.below(4) {
                let line = author.line();
                let _ = writeln!(script, "{line}");
            }
            script += "+2\n";
        }
        script
    }

    /// A lease that no other request has, so that no change depends on the millisecond.
    fn lease(&mut self) -> String {
        self.leases += 1;
        let up = self.leases * 1_000_000;
        format!("LEASE {}", if self.random.chance(50) { 10_000_000_000 + up } else { 20_000_000_000 - up })
    }

    fn line(&mut self) -> String {
        let client = self.random.pick(&CLIENTS);
        match self.random.below(100) {
            0..4 => format!("{} !end", self.random.pick(&["a", "b", "c", "d", "s"])),
            4..8 => format!("{} LOCK.EVENTS", self.random.pick(&SESSIONS)),
            8..11 => format!("{WAITS} LOCK.EVENTS WAIT 0"),
            11..17 => self.other_command(),
            17..22 => self.transaction(),
            22..26 => format!("g {} {}", self.random.pick(&["LOCK.INFO", "LOCK.WAITERS"]), self.random.pick(&KEYS)),
            26..28 => "g LOCK.TOP".into(),
            _ => format!("{client} {}", self.request()),
        }
    }

    fn owner(&mut self) -> &'static str {
        self.random.pick(&["o1", "o2", "o3", "o4", "*"])
    }

    fn request(&mut self) -> String {
        let (key, owner) = (self.random.pick(&KEYS), self.owner());
        match self.random.below(100) {
            0..45 => self.acquire(key, owner),
            45..70 => {
                let rest = self.random.pick(&["", "", " ALL", " HOLDS 1"]);
                format!("LOCK.RELEASE {key} {owner}{rest}")
            }
            70..76 => {
                let (lease, binding) = (self.lease(), self.random.pick(&["", " EPHEMERAL", " WATCHDOG"]));
                format!("LOCK.RENEW {key} {owner} {lease}{binding}{}", self.session(50, binding))
            }
            76..82 => {
                let (lease, wait, binding) = (self.lease(), self.wait(), self.random.pick(&["", " EPHEMERAL"]));
                format!("LOCK.MACQUIRE 2 {} {owner} {lease}{wait}{binding}{}", self.two(), self.session(50, binding))
            }
            82..86 => format!("LOCK.MRELEASE 2 {} {owner}{}", self.two(), self.random.pick(&["", " ALL"])),
            86..88 => {
                let lease = self.lease();
                format!("LOCK.MRENEW 2 {} {owner} {lease}", self.two())
            }
            88..92 => format!("LOCK.FORCE {key}"),
            _ => format!("LOCK.RELEASE {key} {owner} ALL"),
        }
    }

    fn acquire(&mut self, key: &str, owner: &str) -> String {
        let limit = match key {
            "k" => "",
            "l" => self.random.pick(&[" LIMIT 2", " LIMIT 2", " LIMIT 3", ""]),
            _ => self.random.pick(&[" SHARED", " SHARED", ""]),
        };
        let (lease, wait) = (self.lease(), self.wait());
        let binding = self.random.pick(&["", "", " EPHEMERAL", " WATCHDOG"]);
        let holds = self.random.pick(&["", "", "", " HOLDS 1", " HOLDS 2"]);
        format!("LOCK.ACQUIRE {key} {owner} {lease}{wait}{limit}{binding}{holds}{}", self.session(40, binding))
    }

    fn wait(&mut self) -> &'static str {
        self.random.pick(&["", " WAIT 0", " WAIT 0"])
    }

    fn session(&mut self, percent: u64, binding: &str) -> String {
        if !self.random.chance(percent) {
            return String::new();
        }
        let session = self.random.pick(&SESSIONS);
        format!(" SESSION ${}", if binding == " WATCHDOG" { WATCHES } else { session })
    }

    fn two(&mut self) -> &'static str {
        self.random.pick(&["k l", "l k", "k m", "l m"])
    }

    /// Commands of other clients on keys and connections.
    fn other_command(&mut self) -> String {
        let (key, other) = (self.random.pick(&KEYS), self.random.pick(&["a", "b", "c", "d", "s", "t"]));
        match self.random.below(14) {
            0 => format!("g DEL {key}"),
            1 => "g DEL k l m".into(),
            2 => format!("g HDEL {key} o1"),
            3 => format!("g HSET {key} o2 3"),
            4 => format!("g SET {key} x"),
            5 => format!("g PERSIST {key}"),
            6 => format!("g PEXPIRE {key} {}", 1_000_000 * (30_000 + self.leases)),
            7 => "g FLUSHDB".into(),
            8 => "g SWAPDB 0 1".into(),
            9 => format!("g RENAME {key} {}", self.random.pick(&KEYS)),
            10 => format!("g CLIENT UNBLOCK #{other}"),
            11 => format!("g CLIENT UNBLOCK #{other} ERROR"),
            _ => format!("g CLIENT KILL ID #{other}"),
        }
    }

    fn transaction(&mut self) -> String {
        let client = "h";
        let mut lines = format!("{client} MULTI\n");
        for _ in 0..1 + self.random.below(3) {
            let inside = if self.random.chance(30) { self.other_command()[2..].to_owned() } else { self.request() };
            let _ = writeln!(lines, "{client} {inside}");
        }
        lines + client + " EXEC"
    }
}

macro_rules! seeds {
    ($($name:ident: $seeds:expr;)*) => {
        $(#[test] fn $name() { $seeds.for_each(|seed| crate::same_but_for_steps(&Author::script(seed, 40))); })*
    };
}

seeds! {
    seeds_1: 1..3;
    seeds_2: 3..5;
    seeds_3: 5..7;
    seeds_4: 7..9;
}
