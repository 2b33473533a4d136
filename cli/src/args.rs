//! The arguments. Help, completions and the man page are generated from them.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand};

use crate::times;

/// Locks of Redis and Valkey servers with the Holdfast module: run a command while holding one, show holders and waiters.
#[derive(Parser, Debug)]
#[command(name = "holdfast", version, max_term_width = 100)]
pub struct Args {
    /// The servers.
    #[command(flatten)]
    pub target: Target,

    /// The subcommand.
    #[command(subcommand)]
    pub task: Task,
}

/// Where help and man page show the options of all subcommands: after those of the subcommand.
const SERVER_OPTIONS: usize = 100;

/// The servers, and the login.
#[derive(clap::Args, Debug)]
pub struct Target {
    /// The server: redis://, rediss://, unix://, redis+cluster://host:port,host:port or
    /// redis+sentinel://host:port,host:port/master
    #[arg(long, global = true, display_order = SERVER_OPTIONS, env = "REDIS_URL", hide_env_values = true, default_value = "redis://127.0.0.1:6379")]
    pub url: String,
    /// The certificate authorities for rediss://, as a PEM file; default: the system's
    #[arg(long, global = true, display_order = SERVER_OPTIONS + 1, env = "HOLDFAST_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// The client certificate, as a PEM file, for servers that require one
    #[arg(long, global = true, display_order = SERVER_OPTIONS + 1, env = "HOLDFAST_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key, as a PEM file
    #[arg(long, global = true, display_order = SERVER_OPTIONS + 1, env = "HOLDFAST_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Read from the environment only: other users can see arguments.
    #[arg(skip = std::env::var_os("HOLDFAST_PASSWORD"))]
    pub password: Option<OsString>,
    /// The password of the Sentinels.
    #[arg(skip = std::env::var_os("HOLDFAST_SENTINEL_PASSWORD"))]
    pub sentinel_password: Option<OsString>,
}

/// The numbers of locks that the server can be asked for.
fn counts() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=2_147_483_647)
}

/// The subcommand.
#[derive(Subcommand, Debug)]
pub enum Task {
    /// Runs a command while holding a lock
    Run(Run),
    /// Shows the holders and waiters of a lock
    Show {
        /// The lock
        key: OsString,
        /// As JSON, in one line
        #[arg(long)]
        json: bool,
    },
    /// Lists locks that are held or waited for
    Ls {
        /// The pattern of the keys, as for SCAN
        #[arg(default_value = "*")]
        pattern: OsString,
        /// As JSON, one object per line
        #[arg(long)]
        json: bool,
    },
    /// Shows the locks with the longest queues, live
    Top(Top),
    /// Forces a lock free: all its holders lose it
    Force {
        /// The lock
        key: OsString,
        /// Does not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
    /// Serves metrics for Prometheus
    Metrics(Metrics),
    /// Prints completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Prints the man page
    Man,
    /// Starts and ends the command of `run`; `run` starts it
    #[command(hide = true)]
    Supervise {
        /// Ends all processes that the command has started
        #[arg(long)]
        all: bool,
        /// The command
        #[arg(required = true, last = true)]
        command: Vec<OsString>,
    },
}

/// The options of `run`.
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
    /// Waits for at most this long (500ms, 10s, 5m, 2h; a number: seconds); default: no limit
    #[arg(long, short, value_name = "TIME", value_parser = times::parse)]
    pub wait: Option<Duration>,
    /// Does not wait
    #[arg(long, short, conflicts_with = "wait")]
    pub no_wait: bool,
    /// How long the lock outlives this process, or a lost connection; default: the server's
    #[arg(long, value_name = "TIME", value_parser = times::parse)]
    pub lease: Option<Duration>,
    /// Shares the lock with all others that use --shared
    #[arg(long, short)]
    pub shared: bool,
    /// Acquires one of so many permits
    #[arg(long, value_name = "N", conflicts_with = "shared", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Starts the command when so many replicas have the lock
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub replicas: Option<u32>,
    /// The exit code if the lock was not granted
    #[arg(short = 'E', long, value_name = "CODE", default_value_t = 1)]
    pub conflict_exit_code: u8,
    /// Releases the lock immediately when the connection ends, which also loses it
    #[arg(long)]
    pub ephemeral: bool,
    /// Ends all processes that the command has started, setsid and daemons included
    #[arg(long)]
    pub kill_group: bool,
    /// The time from TERM to KILL when the lock is lost
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = times::parse)]
    pub grace: Duration,
    /// Writes to this file whether the exit code is the command's own
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// The lock; of several locks, all are acquired or none
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<OsString>,
    /// The command and its arguments, run without a shell
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The options of `top`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Keys: arrows or j, k choose a lock; Enter looks into it, Esc goes back; s sorts by waiters, longest wait, longest hold, key; / \
shows the locks whose keys contain what is typed, Esc all; q ends. Where standard output is no terminal, the table is printed once.")]
pub struct Top {
    /// Prints the table once and exits
    #[arg(long)]
    pub once: bool,
    /// The same as JSON, one object per line
    #[arg(long)]
    pub json: bool,
    /// The number of locks of each server
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = counts())]
    pub count: usize,
    /// The refresh interval
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = times::parse)]
    pub interval: Duration,
}

/// The options of `metrics`.
#[derive(clap::Args, Debug)]
pub struct Metrics {
    /// The address to listen on; port 0: a free one, printed on standard error
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:19121")]
    pub listen: SocketAddr,
    /// The number of longest queues of each server that have their own metrics
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = counts())]
    pub queues: usize,
    /// Only the servers that clients use, not their replicas
    #[arg(long)]
    pub no_replicas: bool,
    /// How long a server that is gone is shown as down
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
            &["top", "--count", "0"],
            &["metrics", "--queues", "0"],
            &["metrics", "--queues", "2147483648"],
        ] {
            assert!(Args::try_parse_from([&["holdfast"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}
