//! The arguments. The help, the completions and the man page are made from this.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::times;

/// Locks of Redis and Valkey servers with the Holdfast module: run a command under one, see who holds and who waits.
#[derive(Parser, Debug)]
#[command(name = "holdfast", version, max_term_width = 100)]
pub struct Args {
    /// The server: redis://, rediss://, unix://, redis+cluster://host:port,host:port or
    /// redis+sentinel://host:port,host:port/master
    #[arg(long, global = true, env = "REDIS_URL", hide_env_values = true, default_value = "redis://127.0.0.1:6379")]
    pub url: String,

    /// What to do.
    #[command(subcommand)]
    pub task: Task,
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
        /// As JSON
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
    /// Breaks a lock, whoever holds it
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
    #[command(hide = true)]
    Man,
}

/// How a command is run.
#[derive(clap::Args, Debug)]
#[command(
    override_usage = "holdfast run [OPTIONS] <KEY>... -- <COMMAND>...",
    after_help = "\
The exit code is the command's; 128 + N if signal N ended it; 126 or 127 if it can't be run; -E's if the lock was not \
granted; 69 if the server can't be used; 75 if the lock was lost while the command ran.

The command has HOLDFAST_KEY, HOLDFAST_TOKEN and HOLDFAST_OWNER in its environment. Several keys stand there with a \
space in between."
)]
pub struct Run {
    /// Waits for at most this long (500ms, 10s, 5m, 2h; a number: seconds) instead of for as long as it takes
    #[arg(long, short, value_name = "TIME", value_parser = times::parse)]
    pub wait: Option<Duration>,
    /// Does not wait
    #[arg(long, short, conflicts_with = "wait")]
    pub no_wait: bool,
    /// How long the lock outlives a server that is cut off from us; the server's default without it
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
    /// From TERM to KILL when the lock is lost
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = times::parse)]
    pub grace: Duration,
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
Keys: arrows or j, k choose a lock; Enter looks into it, Esc goes back; s sorts by waiters, longest wait, key; q ends.")]
pub struct Top {
    /// Prints the table once and ends
    #[arg(long)]
    pub once: bool,
    /// As JSON, with --once
    #[arg(long, requires = "once")]
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
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9121")]
    pub listen: SocketAddr,
    /// So many of the longest queues of each server are shown by their key
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub queues: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_in_order() {
        Args::command().debug_assert();
    }

    #[test]
    fn keys_and_command_are_parted_by_two_dashes() {
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
            &["top", "--json"],
        ] {
            assert!(Args::try_parse_from([&["holdfast"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}
