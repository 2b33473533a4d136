//! README.md and redis.conf.example: what they show is what happens.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::{Server, module_path, workspace};

use crate::console;

#[test]
fn readme_session_runs_as_printed() {
    console::run(&document("README.md"), &[&Server::start()]);
}

#[test]
fn tutorial_runs_as_printed() {
    console::run(&document("docs/tutorial.md"), &[&Server::start()]);
}

#[test]
fn example_configuration_starts_server() {
    let dir = std::env::temp_dir().join(format!("holdfast-example-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("redis.conf");
    fs::write(&file, example_with(&module_path().display().to_string())).unwrap();
    // Without the module argument: the file loads the module.
    let server = Server::builder().without_module().dir(&dir).config_file(&file).start();
    for (name, value) in settings(&example_with("")) {
        if ["loadmodule", "bind", "port", "dir", "protected-mode"].contains(&name.as_str()) {
            continue;
        }
        let reply: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(&name).query(&mut server.connect()).unwrap();
        assert_eq!(reply.get(1).map(|got| plain(got)), Some(plain(value.trim_matches('"'))), "{name}");
    }
    let token: i64 = redis::cmd("LOCK.ACQUIRE").arg("key").arg("owner").query(&mut server.connect()).unwrap();
    assert!(token > 0);
    drop(server);
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn example_configuration_has_every_setting_at_its_default() {
    let server = Server::start();
    let there: BTreeMap<String, String> =
        redis::cmd("CONFIG").arg("GET").arg("holdfast.*").query(&mut server.connect()).unwrap();
    let shown: BTreeMap<_, _> =
        settings(&example_with("")).into_iter().filter(|(name, _)| name.starts_with("holdfast.")).collect();
    assert_eq!(shown, there);
}

#[test]
fn reference_has_every_command_with_syntax_of_help() {
    let server = Server::start();
    let list: Vec<String> =
        redis::cmd("COMMAND").arg(&["LIST", "FILTERBY", "MODULE", "holdfast"]).query(&mut server.connect()).unwrap();
    // (LOCK.OWNER only returns an error to clients of earlier versions.)
    let there: BTreeSet<_> =
        list.into_iter().map(|name| name.to_uppercase()).filter(|name| name != "LOCK.OWNER").collect();
    let name = |syntax: &String| syntax.split(' ').next().unwrap_or_default().to_owned();
    let reference: BTreeSet<_> = document("docs/reference.md")
        .lines()
        .filter(|line| line.starts_with("    LOCK."))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let help: Vec<String> = redis::cmd("LOCK.HELP").query(&mut server.connect()).unwrap();
    let help: BTreeSet<_> = help.into_iter().filter(|line| line.starts_with("LOCK.")).collect();
    assert_eq!(help, reference);
    assert_eq!(reference.iter().map(name).collect::<BTreeSet<_>>(), there);
}

#[test]
fn reference_has_every_setting_with_its_default() {
    let server = Server::start();
    let there: BTreeMap<String, String> =
        redis::cmd("CONFIG").arg("GET").arg("holdfast.*").query(&mut server.connect()).unwrap();
    let shown: BTreeMap<_, _> = table(&document("docs/reference.md"), "parameter").into_iter().collect();
    assert_eq!(shown, there);
}

#[test]
fn reference_has_every_field_of_info() {
    let server = Server::start();
    let info: String = redis::cmd("INFO").arg("holdfast").query(&mut server.connect()).unwrap();
    let fields = info.lines().filter_map(|line| line.split_once(':')).map(|(field, _)| field.to_owned());
    let shown = table(&document("docs/reference.md"), "field of `INFO`").into_iter().map(|(field, _)| field);
    assert_eq!(shown.collect::<BTreeSet<_>>(), fields.collect::<BTreeSet<_>>());
}

#[test]
fn reference_has_every_event_of_sessions() {
    let code = document("src/replies.rs");
    let after =
        |mark| code.split(mark).skip(1).filter_map(|rest: &str| rest.split_once('"')).map(|(name, _)| name.to_owned());
    let events = after("=> (\"").chain(after("write_event(ctx, \""));
    let shown = table(&document("docs/reference.md"), "kind").into_iter().map(|(kind, _)| kind);
    assert_eq!(shown.collect::<BTreeSet<_>>(), events.collect::<BTreeSet<_>>());
}

#[test]
fn links_in_documents_resolve() {
    let listed =
        Command::new("git").args(["ls-files", "-co", "--exclude-standard", "*.md"]).current_dir(workspace()).output();
    let listed = String::from_utf8(listed.expect("git lists the documents").stdout).expect("UTF-8");
    let mut links = 0;
    for file in listed.lines() {
        let text = document(file);
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        for target in targets.filter(|target| !target.contains("://") && !target.contains(' ')) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let folder = Path::new(file).parent().expect("a folder");
            let path = if path.is_empty() { PathBuf::from(file) } else { folder.join(path) };
            assert!(workspace().join(&path).exists(), "{file} links to {target}");
            if !anchor.is_empty() {
                let there = document(path.to_str().expect("UTF-8"));
                assert!(there.lines().filter_map(heading).any(|it| it == anchor), "{file} links to {target}");
            }
            links += 1;
        }
    }
    assert!(links > 50, "{links}");
}

/// A script that took the word for a name would build something, or start a server.
#[test]
fn scripts_only_show_help_when_asked_for_it() {
    let mut scripts = vec![workspace().join(".ci/run")];
    let files = fs::read_dir(workspace().join("scripts")).expect("scripts/").map(|file| file.expect("a file").path());
    scripts.extend(files.filter(|file| file.is_file() && file.extension().is_none()));
    assert!(scripts.len() > 15, "{scripts:?}");
    for script in scripts {
        let text = fs::read_to_string(&script).expect("text");
        let first = text.lines().nth(1).expect("a second line").trim_start_matches(['#', '"', ' ']);
        let output = Command::new(&script).arg("--help").output().expect("the script runs");
        let shown = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(output.status.success() && shown.starts_with(first), "{}: {shown}", script.display());
        assert!(output.stderr.is_empty(), "{}: {}", script.display(), String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn table_of_bounds_names_existing_tests() {
    let reference = document("docs/reference.md");
    let rows = reference.lines().skip_while(|line| !line.starts_with("| what | filled by | limit |")).skip(2);
    let rows: Vec<_> = rows.take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 10, "{rows:?}");
    let sources: String = ["tests", "src"].iter().flat_map(|folder| sources(&workspace().join(folder))).collect();
    for row in rows {
        let names = row.rsplit('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2);
        let tests: Vec<_> = names.filter_map(|name| name.rsplit("::").next()).collect();
        assert!(!tests.is_empty(), "{row}");
        for test in tests {
            assert!(sources.contains(&format!("fn {test}(")), "{test}");
        }
    }
}

/// The contents of each source file in a directory.
fn sources(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| match path.extension() {
            _ if path.is_dir() => sources(&path),
            Some(extension) if extension == "rs" => vec![fs::read_to_string(&path).unwrap()],
            _ => Vec::new(),
        })
        .collect()
}

/// The anchor of a heading, or `None` for other lines.
fn heading(line: &str) -> Option<String> {
    let text = line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' ')?;
    let kept = text.to_lowercase().replace(' ', "-");
    Some(kept.chars().filter(|it| it.is_alphanumeric() || ['-', '_'].contains(it)).collect())
}

/// The text of a document.
pub fn document(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap()
}

/// The first two columns of the table whose first column has this title, without their backticks.
fn table(text: &str, title: &str) -> Vec<(String, String)> {
    let rows = text.lines().skip_while(|line| !line.starts_with(&format!("| {title} |"))).skip(2);
    let rows: Vec<_> = rows.take_while(|line| line.starts_with('|')).map(row).collect();
    assert!(!rows.is_empty(), "there is a table with the column {title:?}");
    rows
}

fn row(line: &str) -> (String, String) {
    const BAR: &str = "\0";
    let line = line.replace("\\|", BAR);
    let mut cells = line.split('|').skip(1).map(|cell| cell.trim().trim_matches('`').replace(BAR, "|"));
    (cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
}

/// The example, with the module path that its reader has to set.
fn example_with(module: &str) -> String {
    let example = document("redis.conf.example");
    assert_eq!(example.lines().filter(|line| line.starts_with("loadmodule ")).count(), 1);
    let line = |line: &str| match line.strip_prefix("loadmodule ") {
        Some(_) => format!("loadmodule {module}\n"),
        None => format!("{line}\n"),
    };
    example.lines().map(line).collect()
}

fn settings(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).map(|(name, value)| (name.into(), value.into())).collect()
}

/// A value as `CONFIG GET` returns it: memory in bytes.
fn plain(value: &str) -> String {
    match value.strip_suffix("mb").and_then(|number| number.parse::<u64>().ok()) {
        Some(number) => (number << 20).to_string(),
        None => value.to_owned(),
    }
}
