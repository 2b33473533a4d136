//! `holdfast metrics`: `INFO holdfast` and the longest queues, as Prometheus reads them.

use std::fmt::Write;
use std::time::Duration;

use holdfast_client::Locks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::args::Metrics;
use crate::failure::Failure;
use crate::seen::{Queue, Server, each_server, shown};

/// A client that does not ask, or does not read, within this is not served.
const PATIENCE: Duration = Duration::from_secs(10);
/// A request is a line or two.
const LONGEST_REQUEST: usize = 16 * 1024;

/// Serves until it is ended.
pub async fn serve(locks: &Locks, task: &Metrics) -> Result<u8, Failure> {
    let listening = |error| Failure::of(&task.listen.to_string(), &error, "choose another address with --listen");
    let listener = TcpListener::bind(task.listen).await.map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    eprintln!("holdfast: metrics at http://{address}/metrics");
    loop {
        // One that goes before it was taken.
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = tokio::time::timeout(PATIENCE, answer(stream, locks, task.queues)).await;
    }
}

async fn answer(mut stream: TcpStream, locks: &Locks, queues: usize) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST_REQUEST {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            length => request.extend_from_slice(buffer.get(..length).unwrap_or_default()),
        }
    }
    let (status, text) = if request.starts_with(b"GET /metrics ") || request.starts_with(b"GET / ") {
        ("200 OK", page(locks, queues).await)
    } else {
        ("404 Not Found", "see /metrics\n".to_owned())
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await
}

/// What one server says.
struct Said {
    server: String,
    info: Vec<(String, String)>,
    queues: Vec<Queue>,
}

async fn page(locks: &Locks, queues: usize) -> String {
    let mut said = Vec::new();
    let mut up = Vec::new();
    let servers = each_server(locks).await.unwrap_or_else(|error| vec![Err(error)]);
    for server in servers {
        match server {
            Ok(mut server) => {
                let answered = ask(&mut server, queues).await;
                up.push((server.name, answered.is_some()));
                said.extend(answered);
            }
            Err(error) => {
                eprintln!("holdfast: {error}");
                if let holdfast_client::Error::Connection { server, .. } = error {
                    up.push((server, false));
                }
            }
        }
    }
    text(&up, &said)
}

async fn ask(server: &mut Server, queues: usize) -> Option<Said> {
    let info = server.info(&["holdfast", "memory"]).await;
    let queues = server.top(queues).await;
    match (info, queues) {
        (Ok(info), Ok(queues)) => Some(Said { server: server.name.clone(), info, queues }),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("holdfast: {}: {error}", server.name);
            None
        }
    }
}

/// One metric with all its values: so its type and its meaning stand there once.
struct Family {
    name: String,
    kind: Kind,
    help: String,
    values: Vec<Sample>,
}

/// What Prometheus calls the type of a metric.
#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A line: what stands behind the metric's name, the labels, the value.
struct Sample {
    suffix: &'static str,
    labels: String,
    value: f64,
}

#[derive(Default)]
struct Page(Vec<Family>);

impl Page {
    fn add(&mut self, name: &str, kind: Kind, help: &str, sample: Sample) {
        match self.0.iter_mut().find(|family| family.name == name) {
            Some(family) => family.values.push(sample),
            None => self.0.push(Family { name: name.to_owned(), kind, help: help.to_owned(), values: vec![sample] }),
        }
    }

    fn gauge(&mut self, name: &str, help: &str, labels: String, value: f64) {
        self.add(name, Kind::Gauge, help, Sample { suffix: "", labels, value });
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for Family { name, kind, help, values } in &self.0 {
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
            for Sample { suffix, labels, value } in values {
                let _ = writeln!(text, "{name}{suffix}{{{labels}}} {value}");
            }
        }
        text
    }
}

fn text(up: &[(String, bool)], said: &[Said]) -> String {
    let mut page = Page::default();
    for (server, up) in up {
        let answers = f64::from(u8::from(*up));
        page.gauge("holdfast_up", "Whether the server answers.", label("server", server), answers);
    }
    for one in said {
        let server = label("server", &one.server);
        for (field, value) in &one.info {
            add_field(&mut page, &server, field, value);
        }
        for queue in &one.queues {
            let labels = format!("{server},{}", label("key", &shown(&queue.key)));
            let help = "Requests that wait for one of the locks with the longest queues.";
            page.gauge("holdfast_queue_waiters", help, labels.clone(), queue.waiters as f64);
            let help = "How long the first in one of the longest queues has waited.";
            page.gauge("holdfast_queue_oldest_seconds", help, labels, queue.oldest as f64 / 1000.0);
        }
    }
    page.text()
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// What is there now. Every other number counts since the module was loaded, or is a time.
const NOW: [&str; 7] =
    ["waiters", "contended_locks", "tied_holds", "confirming", "sessions", "session_waits", "unread_events"];

/// Adds what a field of `INFO` says. Times since the module was loaded come as a histogram, of which Prometheus
/// makes the percentiles of any span: those that `INFO` has of the whole time are left out.
fn add_field(page: &mut Page, server: &str, field: &str, value: &str) {
    if field == "maxmemory_policy" {
        let help = "What the server does when its memory is full, as a label.";
        return page.gauge("holdfast_maxmemory_policy", help, format!("{server},{}", label("policy", value)), 1.0);
    }
    let Some(short) = field.strip_prefix("holdfast_") else { return };
    if let Some((what, which)) = short.split_once("_usec_") {
        return add_times(page, server, what, which, value);
    }
    let Ok(value) = value.parse::<f64>() else { return };
    let words = short.replace('_', " ");
    if let Some(name) = field.strip_suffix("_msec") {
        let help = format!("{}, now.", words.trim_end_matches(" msec"));
        page.gauge(&format!("{name}_seconds"), &help, server.to_owned(), value / 1e3);
    } else if NOW.contains(&short) {
        page.gauge(field, &format!("{words}, now."), server.to_owned(), value);
    } else {
        let help = format!("{words}, since the module was loaded.");
        let sample = Sample { suffix: "", labels: server.to_owned(), value };
        page.add(&format!("{field}_total"), Kind::Counter, &help, sample);
    }
}

fn add_times(page: &mut Page, server: &str, what: &str, which: &str, value: &str) {
    let mut sample = |suffix, labels, value| {
        let help = format!("{what} times, since the module was loaded.");
        page.add(&format!("holdfast_{what}_seconds"), Kind::Histogram, &help, Sample { suffix, labels, value });
    };
    let number = value.parse::<f64>().ok();
    match (which, number) {
        ("buckets", _) => {
            let buckets = value.split(',').filter_map(|bucket| bucket.split_once('='));
            for (bound, count) in buckets {
                let (Ok(bound), Ok(count)) = (bound.parse::<f64>(), count.parse::<f64>()) else { continue };
                sample("_bucket", format!("{server},{}", label("le", &(bound / 1e6).to_string())), count);
            }
        }
        ("sum", Some(micros)) => sample("_sum", server.to_owned(), micros / 1e6),
        ("count", Some(count)) => {
            sample("_bucket", format!("{server},{}", label("le", "+Inf")), count);
            sample("_count", server.to_owned(), count);
        }
        ("max", Some(micros)) => {
            let help = format!("The longest {what} time since the module was loaded.");
            page.gauge(&format!("holdfast_{what}_max_seconds"), &help, server.to_owned(), micros / 1e6);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_and_help_stand_there_once_for_all_servers() {
        let said = |server: &str| Said {
            server: server.to_owned(),
            info: [
                ("holdfast_waiters", "3"),
                ("holdfast_forced", "1"),
                ("holdfast_oldest_wait_msec", "1500"),
                ("holdfast_wait_usec_p99", "1500"),
                ("holdfast_wait_usec_max", "1700"),
                ("holdfast_wait_usec_sum", "2500000"),
                ("holdfast_wait_usec_count", "7"),
                ("holdfast_wait_usec_buckets", "10=0,20000=6"),
                ("maxmemory_policy", "noeviction"),
                ("used_memory", "1000"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
            queues: Vec::new(),
        };
        let up = [("a".to_owned(), true), ("b".to_owned(), true), ("c".to_owned(), false)];
        let text = text(&up, &[said("a"), said("b")]);
        assert_eq!(text.matches("# TYPE holdfast_waiters gauge\n").count(), 1);
        assert_eq!(text.matches("# TYPE holdfast_wait_seconds histogram\n").count(), 1);
        assert_eq!(text.matches("# HELP holdfast_forced_total ").count(), 1);
        for line in [
            "holdfast_up{server=\"c\"} 0",
            "holdfast_waiters{server=\"b\"} 3",
            "holdfast_oldest_wait_seconds{server=\"a\"} 1.5",
            "holdfast_wait_seconds_bucket{server=\"a\",le=\"0.02\"} 6",
            "holdfast_wait_seconds_bucket{server=\"a\",le=\"+Inf\"} 7",
            "holdfast_wait_seconds_sum{server=\"a\"} 2.5",
            "holdfast_wait_seconds_count{server=\"b\"} 7",
            "holdfast_wait_max_seconds{server=\"a\"} 0.0017",
            "holdfast_maxmemory_policy{server=\"a\",policy=\"noeviction\"} 1",
        ] {
            assert!(text.contains(&format!("\n{line}\n")), "{line}:\n{text}");
        }
        assert!(!text.contains("used_memory") && !text.contains("p99"), "{text}");
    }

    #[test]
    fn labels_are_quoted() {
        assert_eq!(label("key", "a\"b\\c\nd"), r#"key="a\"b\\c\nd""#);
    }
}
