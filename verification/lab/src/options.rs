//! What is to be run, and for how long.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

/// What every scenario is told.
#[derive(Clone, Debug)]
pub struct Options {
    /// The short form: enough to see that each scenario works, for CI.
    pub short: bool,
    /// About how long this scenario may take.
    pub budget: Duration,
    /// Where every random choice comes from: the same seed makes the same choices.
    pub seed: u64,
    /// The module under test.
    pub module: PathBuf,
    /// Version 0.3 of it, for a rolling upgrade from there.
    pub old_module: Option<PathBuf>,
    /// The same as the next version, for a rolling upgrade to there.
    pub next_module: Option<PathBuf>,
    /// The image that containers are made of.
    pub image: String,
    /// A Python that has redis-py, for the clients in `verification/lab/clients`.
    pub python: PathBuf,
}

/// The command line and the environment, read.
#[derive(Debug)]
pub struct Invocation {
    /// Options with the budget of the whole lab.
    pub options: Options,
    /// Names of the scenarios asked for; none: all.
    pub wanted: Vec<String>,
}

const SHORT: Duration = Duration::from_secs(4 * 60);
const LONG: Duration = Duration::from_secs(50 * 60);

impl Invocation {
    /// Reads `[--short] [SCENARIO…]` and the environment: `LAB_MINUTES`, `LAB_SEED`, `LAB_IMAGE`, `LAB_PYTHON`, `HOLDFAST_MODULE`,
    /// `HOLDFAST_OLD_MODULE`, `HOLDFAST_NEXT_MODULE`.
    pub fn read(arguments: impl Iterator<Item = String>) -> Result<Invocation, String> {
        let (flags, wanted): (Vec<_>, Vec<_>) = arguments.partition(|word| word.starts_with("--"));
        if let Some(unknown) = flags.iter().find(|flag| *flag != "--short") {
            return Err(format!("{unknown} is not known; usage: lab [--short] [SCENARIO…]"));
        }
        let short = !flags.is_empty();
        let budget = match number("LAB_MINUTES")? {
            Some(minutes) => Duration::from_secs(60 * minutes.clamp(1, 24 * 60)),
            None if short => SHORT,
            None => LONG,
        };
        let options = Options {
            short,
            budget,
            seed: number("LAB_SEED")?.unwrap_or(1),
            module: path("HOLDFAST_MODULE").unwrap_or_else(|| release_file("libholdfast.so")),
            old_module: path("HOLDFAST_OLD_MODULE"),
            next_module: path("HOLDFAST_NEXT_MODULE"),
            image: env::var("LAB_IMAGE").unwrap_or_else(|_| "holdfast-test:redis-8.0".into()),
            python: path("LAB_PYTHON").unwrap_or_else(|| "python3".into()),
        };
        Ok(Invocation { options, wanted })
    }
}

/// The workspace's folder, where this crate was built.
pub fn workspace() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn release_file(name: &str) -> PathBuf {
    workspace().join("target/release").join(name)
}

fn path(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from)
}

fn number(variable: &str) -> Result<Option<u64>, String> {
    match env::var(variable) {
        Ok(text) => text.parse().map(Some).map_err(|_| format!("{variable} must be a whole number, got {text:?}")),
        Err(_) => Ok(None),
    }
}
