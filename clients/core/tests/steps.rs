//! The scripts of `steps/`: what happens, and behind `>` what the core does. They judge the cores of other languages, too.

use holdfast_core::{Core, Input, Settings};
use std::fmt::Write;

/// Plays a script, and writes it down again with what the core really does.
fn played(script: &str) -> String {
    let mut core = Core::new(Settings::default());
    let mut played = String::new();
    for line in script.lines().filter(|line| !line.starts_with('>')) {
        let _ = writeln!(played, "{line}");
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(settings) = Settings::parse(line) {
            core = Core::new(settings);
            continue;
        }
        let (now, input) = Input::parse(line).unwrap_or_else(|| panic!("not a step: {line}"));
        core.step(now, input);
        while let Some(output) = core.take() {
            let _ = writeln!(played, "> {output}");
        }
    }
    played
}

/// `STEPS=write cargo test -p holdfast-core --test computing` writes down what the core does now.
#[test]
fn the_core_does_what_the_scripts_say() {
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
