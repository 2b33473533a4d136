//! Output: text and tables on standard output, messages on standard error. If a pipe is closed, nothing panics: after a panic the
//! command would run on without a check of its lock.

use std::fmt;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::failure::Failure;

/// Prints. If the pipe is closed (`holdfast ls | head`), the program exits without an error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::of("standard output", &error, "")),
    }
}

/// Prints a message on a line of its own, and ignores errors.
pub fn print_message(message: impl fmt::Display) {
    let _ = writeln!(stderr(), "holdfast: {message}");
}

/// The same for callers that must not block, since the reader of standard error may be stuck. Waits for a second at
/// most.
pub async fn print_aside(message: impl fmt::Display) {
    let message = message.to_string();
    let (sender, printed) = oneshot::channel();
    thread::spawn(move || {
        print_message(message);
        let _ = sender.send(());
    });
    let _ = timeout(Duration::from_secs(1), printed).await;
}

/// Rows under titles, with aligned columns.
pub fn table(titles: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = titles.iter().map(|title| title.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let line = |cells: Vec<&str>| {
        let cells = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    let body = rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
    std::iter::once(line(titles.to_vec())).chain(body).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["longer".to_owned(), String::new()]];
        assert_eq!(table(&["KEY", "N"], &rows), "KEY     N\na       1\nlonger\n");
    }
}
