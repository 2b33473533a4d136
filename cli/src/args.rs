//! The arguments. The help, the completions and the man page are made from this.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::times;

/// Locks of Redis and Valkey servers with the Holdfast module: run a command under one, see who holds and who waits.
#[derive(Parser, Debug)]
#[command(name = "holdfast", version, max_term_width = 100)]
pub struct Args {
    /// Where the locks are.
    #[command(flatten)]
    pub place: Place,

    /// What to do.
    #[command(subcommand)]
    pub task: Task,
}

/// Where the locks are, and who we are there.
#[derive(clap::Args, Debug)]
pub struct Place {
    /// The server: redis://, rediss://, unix://, redis+cluster://host:port,host:port or
    /// redis+sentinel://host:port,host:port/master
    #[arg(long, global = true, env = "REDIS_URL", hide_env_values = true, default_value = "redis://127.0.0.1:6379")]
    pub url: String,
    /// The authorities that are trusted for rediss://, as a PEM file; the system's without it
    #[arg(long, global = true, env = "HOLDFAST_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// Our own certificate, as a PEM file, for servers that ask for one
    #[arg(long, global = true, env = "HOLDFAST_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Its key, as a PEM file
    #[arg(long, global = true, env = "HOLDFAST_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Read from the environment only: arguments are seen by everybody on the machine.
    #[arg(skip = passwords("HOLDFAST_PASSWORD"))]
    pub password: Option<String>,
    /// That of the Sentinels.
    #[arg(skip = passwords("HOLDFAST_SENTINEL_PASSWORD"))]
    pub sentinel_password: Option<String>,
}

fn passwords(variable: &str) -> Option<String> {
    std::env::var(variable).ok()
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Task {
    /// Runs a command under a lock
    Run(Run),
    /// Shows who holds a lock and who waits for it
    Show {
        /// The lock
        key: String,
        /// As JSON, in one line
        #[arg(long)]
        json: bool,
    },
    /// Lists locks that are held or waited for
    Ls {
        /// Which keys, as for SCAN
        #[arg(default_value = "*")]
        pattern: String,
        /// As JSON, one object a line
        #[arg(long)]
        json: bool,
    },
    /// Watches the locks that most clients wait for
    Top(Top),
    /// Breaks a lock: all its holders lose it
    Force {
        /// The lock
        key: String,
        /// Does not ask
        #[arg(long, short)]
        yes: bool,
    },
    /// Serves metrics for Prometheus
    Metrics(Metrics),
    /// Prints completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Prints the man page
    Man,
    /// Starts and ends the command of `run`, which starts this
    #[command(hide = true)]
    Supervise {
        /// Ends all that the command has started
        #[arg(long)]
        all: bool,
        /// The command
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
}

/// How a command is run.
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "holdfast run [OPTIONS] <KEY>... -- <COMMAND>...",
    after_help = "\
The exit code is the command's; 128 + N if signal N ended it; 126 or 127 if it can't be run; -E's if the lock was not \
granted; 69 if the server can't be used; 70 if a run around this one holds the lock, so that waiting would never end; 75 \
if the lock was lost while the command ran. The command may use these codes, too: whose it is stands in --report FILE, a \
word and a number: ended CODE or killed SIGNAL, if it is the command's own; not-started, not-granted, lost, failed and the \
code, or interrupted SIGNAL, if it is not.

The command has HOLDFAST_KEY, HOLDFAST_TOKEN and HOLDFAST_OWNER in its environment. Several keys stand there with a \
space in between. HOLDFAST_OWNERS has the owners of all runs around it, one a line."
)]
pub struct Run {
    /// Waits for at most this long (500ms, 10s, 5m, 2h; a number: seconds) instead of for as long as it takes
    #[arg(long, short, value_name = "TIME", value_parser = times::parse)]
    pub wait: Option<Duration>,
    /// Does not wait
    #[arg(long, short, conflicts_with = "wait")]
    pub no_wait: bool,
    /// How long the lock outlives this process, or a connection that is gone; the server's default without it
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    pub lease: Option<Duration>,
    /// Shares the lock with all others who ask so
    #[arg(long, short)]
    pub shared: bool,
    /// One of so many permits
    #[arg(long, value_name = "N", conflicts_with = "shared", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Begins when so many replicas have the lock
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub replicas: Option<u32>,
    /// The exit code if the lock was not granted
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub conflict_exit_code: u8,
    /// Releases the lock at once when the connection ends, and loses it by that
    #[arg(long)]
    pub ephemeral: bool,
    /// Nothing that the command has started outlives it, setsid and daemons included
    #[arg(long)]
    pub kill_group: bool,
    /// From TERM to KILL when the lock is lost
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = times::parse)]
    pub grace: Duration,
    /// Says in this file whether the exit code is the command's own
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// The lock; of several all are taken, or none
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
    /// The command and its arguments; no shell comes in between
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// What `top` shows.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Keys: arrows or j, k choose a lock; Enter looks into it, Esc goes back; s sorts by waiters, longest wait, longest hold, key; / \
shows the locks whose keys contain what is typed, Esc all; q ends. Where standard output is no terminal, the table is printed once.")]
pub struct Top {
    /// Prints the table once and ends
    #[arg(long)]
    pub once: bool,
    /// The same as JSON, one object a line
    #[arg(long)]
    pub json: bool,
    /// How many locks of each server
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub count: usize,
    /// How often it is looked
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = times::parse)]
    pub interval: Duration,
}

/// How metrics are served.
#[derive(clap::Args, Debug)]
pub struct Metrics {
    /// Where to listen; port 0: one that is free, told on standard error
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:19121")]
    pub listen: SocketAddr,
    /// So many of the longest queues of each server are shown by their key
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub queues: usize,
    /// Only the servers that clients are sent to, not their replicas
    #[arg(long)]
    pub no_replicas: bool,
    /// For so long a server that is gone is shown as down
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = times::parse)]
    pub forget: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn arguments_keep_their_order() {
        Args::command().debug_assert();
    }

    #[test]
    fn two_dashes_separate_keys_and_command() {
        let args =
            Args::try_parse_from(["holdfast", "run", "-w", "10s", "a", "b", "--", "echo", "-n", "--", "x"]).unwrap();
        let Task::Run(run) = args.task else { panic!() };
        assert_eq!(run.keys, ["a", "b"]);
        assert_eq!(run.command, ["echo", "-n", "--", "x"]);
        assert_eq!(run.wait, Some(Duration::from_secs(10)));
        assert_eq!((run.conflict_exit_code, run.grace), (1, Duration::from_secs(5)));
        for wrong in [
            &["run", "a", "echo"][..],
            &["run", "--", "echo"],
            &["run", "-w", "1", "-n", "a", "--", "b"],
            &["run", "--shared", "--limit", "2", "a", "--", "b"],
            &["run", "--limit", "0", "a", "--", "b"],
        ] {
            assert!(Args::try_parse_from([&["holdfast"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}
