//! The scenarios to run, and for how long.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

/// The options of every scenario.
#[derive(Clone, Debug)]
pub struct Options {
    /// The short form, for CI: enough to show that each scenario works.
    pub short: bool,
    /// About how long this scenario may take.
    pub budget: Duration,
    /// The seed of all random choices.
    pub seed: u64,
    /// The module under test.
    pub module: PathBuf,
    /// Version 0.3 of the module, for a rolling upgrade from it.
    pub old_module: Option<PathBuf>,
    /// The module with the next version number, for a rolling upgrade to it.
    pub next_module: Option<PathBuf>,
    /// The image of the containers.
    pub image: String,
    /// A Python with redis-py, for the clients in `verification/lab/clients`.
    pub python: PathBuf,
}

/// The command line and the environment.
#[derive(Debug)]
pub struct Invocation {
    /// Options with the budget of the whole lab.
    pub options: Options,
    /// Names of the scenarios to run; empty: the usual ones.
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

/// The root of the workspace.
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
