//! `holdfast`: runs a command while holding a lock, shows holders and waiters, serves metrics. See the README.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
// Both panic if the pipe is closed. `report` has functions that don't.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod child;
mod failure;
mod force;
mod inspect;
mod list;
mod login;
mod metrics;
mod nested_runs;
mod report;
mod run;
mod show;
mod signals;
mod supervisor;
mod times;
mod top;

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::{Args, Task};
use crate::failure::Failure;

fn main() -> ExitCode {
    let args = Args::parse();
    match args.task {
        Task::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "holdfast", &mut script);
            return ended(report::print(&String::from_utf8_lossy(&script)).map(|()| 0));
        }
        Task::Man => return ended(man_page().map(|()| 0)),
        Task::Supervise { all, command } => return ended(supervisor::supervise(&command, all)),
        _ => {}
    }
    // Fails only if a provider is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(perform(&args)),
        Err(error) => Err(Failure::here(&error)),
    };
    ended(outcome)
}

fn ended(outcome: Result<u8, Failure>) -> ExitCode {
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            report::print_message(&failure);
            ExitCode::from(failure.code())
        }
    }
}

async fn perform(args: &Args) -> Result<u8, Failure> {
    if let Task::Run(task) = &args.task {
        return run::run(&args.target, task).await;
    }
    let locks = login::open(&args.target)?;
    match &args.task {
        Task::Show { key, json } => show::show(&locks, key.as_bytes(), *json).await,
        Task::Ls { pattern, json } => list::list(&locks, pattern.as_bytes(), *json).await,
        Task::Force { key, yes } => force::force(&locks, key.as_bytes(), *yes).await,
        Task::Metrics(task) => metrics::serve(locks, task).await,
        Task::Top(task) => top::top(&locks, task).await,
        // Handled before, or without a server.
        Task::Run(_) | Task::Completions { .. } | Task::Man | Task::Supervise { .. } => Ok(0),
    }
}

fn man_page() -> Result<(), Failure> {
    let mut page = Vec::new();
    pages(&mut page).map_err(|error| Failure::here(&error))?;
    report::print(&String::from_utf8_lossy(&page))
}

/// One page for the program and all its subcommands.
fn pages(out: &mut Vec<u8>) -> std::io::Result<()> {
    let mut command = Args::command();
    command.build();
    let page = clap_mangen::Man::new(command.clone());
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_options_section(out)?;
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        writeln!(out, ".SH HOLDFAST {}", subcommand.get_name().to_uppercase())?;
        let page = clap_mangen::Man::new(subcommand.clone());
        page.render_synopsis_section(out)?;
        page.render_description_section(out)?;
        page.render_options_section(out)?;
        if subcommand.get_after_help().is_some() {
            page.render_extra_section(out)?;
        }
    }
    out.write_all(ENVIRONMENT)?;
    page.render_version_section(out)
}

/// The variables that the program reads. Those that `run` sets are described with it.
const ENVIRONMENT: &[u8] = b".SH ENVIRONMENT
.TP
REDIS_URL
The server, where \\-\\-url does not name it.
.TP
HOLDFAST_PASSWORD
The password, where the address names none. Unlike an address, it needs no encoding.
.TP
HOLDFAST_SENTINEL_PASSWORD
The password of the Sentinels, where the address names none.
.TP
HOLDFAST_TLS_CA, HOLDFAST_TLS_CERT, HOLDFAST_TLS_KEY
As \\-\\-tls\\-ca, \\-\\-tls\\-cert, \\-\\-tls\\-key.
.TP
SSL_CERT_FILE
The certificates of the authorities that are trusted for rediss://, in place of the system's.
";
