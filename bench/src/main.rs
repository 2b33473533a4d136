//! Compares Holdfast with other lock implementations, in one run on the same servers, interleaved. See `bench/README.md`.

mod alarm;
mod client;
mod client_pool;
mod clients;
mod contenders;
mod crash;
mod figures;
mod handoff;
mod herd;
mod keep;
mod machine;
mod memory;
mod neighbours;
mod pair;
mod plot;
mod process;
mod redis_py;
mod relay;
mod replicas;
mod report;
mod server;
mod service;
mod sessions;
mod settings;
mod stats;
mod worst;

use anyhow::{Context, Result, bail};

use machine::Machine;
use report::Findings;
use server::Program;
use settings::{Settings, USAGE};

type Section = fn(&Settings, &[Program]) -> Result<Findings>;

/// This section takes as long as all others together: it is measured on request, and in the quick form.
const WORST: &str = "worst";

const SECTIONS: [(&str, Section); 12] = [
    ("pair", pair::run),
    ("handoff", handoff::run),
    ("crash", crash::run),
    ("memory", memory::run),
    ("neighbours", neighbours::run),
    ("replicas", replicas::run),
    ("sessions", sessions::run),
    ("clients", clients::run),
    ("service", service::run),
    ("herd", herd::run),
    ("keep", keep::run),
    (WORST, worst::run),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.next_if(|first| first == crash::HOLDER).is_some() {
        return crash::hold_until_killed(arguments);
    }
    if arguments.next_if(|first| first == herd::PROCESS).is_some() {
        return herd::run_process(arguments);
    }
    if arguments.next_if(|first| first == keep::PROCESS).is_some() {
        return keep::run_process(arguments);
    }
    let settings = Settings::parse(arguments)?;
    let sections = chosen(&settings)?;
    machine::allow_many_connections();
    machine::pin_clients();
    let machine = Machine::look();
    let programs = settings.servers.iter().map(|path| Program::ask(path)).collect::<Result<Vec<_>>>()?;
    let mut goals = Vec::new();
    for (name, section) in sections {
        eprintln!("{name} …");
        let findings = section(&settings, &programs).with_context(|| name)?;
        findings.publish(&machine, settings.scale.judged, &settings.out)?;
        goals.extend(findings.goals);
    }
    if settings.scale.judged && !goals.is_empty() {
        println!("{}", report::goals(&goals).markdown());
    }
    eprintln!("results are in {}", settings.out.display());
    Ok(())
}

fn chosen(settings: &Settings) -> Result<Vec<(&'static str, Section)>> {
    if let Some(unknown) = settings.sections.iter().find(|name| !SECTIONS.iter().any(|(known, _)| known == name)) {
        bail!("unknown section {unknown}\n{USAGE}");
    }
    let by_itself = |name: &str| !settings.scale.judged || name != WORST;
    let wanted = |name: &str| match settings.sections.as_slice() {
        [] => by_itself(name),
        sections => sections.iter().any(|wanted| wanted == name),
    };
    Ok(SECTIONS.into_iter().filter(|(name, _)| wanted(name)).collect())
}
