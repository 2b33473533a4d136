//! Histories written by hand. The first line of each says what is wrong in it. `verification/histories/porcupine` reads
//! the same files.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;

use histories::{Operation, check, intervals, read};

/// The histories in a folder, with their files.
fn histories(folder: &str) -> Vec<(PathBuf, Vec<Operation>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = fs::read_dir(folder).expect("the folder is there").map(|file| file.expect("it can be read").path());
    let with_history = files.map(|file| {
        let text = fs::read_to_string(&file).expect("it is text");
        assert!(text.starts_with("# "), "{}: the first line says what it is about", file.display());
        let history = read(BufReader::new(File::open(&file).expect("it is there"))).expect("it is in the format");
        (file, history)
    });
    with_history.collect()
}

#[test]
fn checkers_refuse_histories_that_are_wrong() {
    let all = histories("wrong");
    assert!(all.len() >= 12, "{} histories only", all.len());
    for (file, history) in all {
        assert!(intervals::check(&history).is_err(), "{}: accepted by the intervals", file.display());
        assert!(check(&history).is_err(), "{}: accepted by the search", file.display());
    }
}

#[test]
fn checkers_accept_histories_that_are_right() {
    for (file, history) in histories("right") {
        for checked in [intervals::check(&history), check(&history)] {
            if let Err(violation) = checked {
                panic!("{}: {violation}", file.display());
            }
        }
    }
}
