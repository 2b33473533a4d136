//! `holdfast metrics`: `INFO holdfast` and the longest queues, as Prometheus reads them.

use std::fmt::Write;
use std::time::Duration;

use holdfast_client::Locks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::args::Metrics;
use crate::failure::Failure;
use crate::seen::{Queue, Server, servers, shown};

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
    match servers(locks).await {
        Ok(servers) => {
            for mut server in servers {
                let answered = ask(&mut server, queues).await;
                up.push((server.name, answered.is_some()));
                said.extend(answered);
            }
        }
        Err(error) => {
            eprintln!("holdfast: {error}");
            if let holdfast_client::Error::Connection { server, .. } = error {
                up.push((server, false));
            }
        }
    }
    text(&up, &said)
}

async fn ask(server: &mut Server, queues: usize) -> Option<Said> {
    let info = server.info("holdfast").await;
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
    kind: &'static str,
    help: String,
    values: Vec<(String, f64)>,
}

fn text(up: &[(String, bool)], said: &[Said]) -> String {
    let mut families: Vec<Family> = Vec::new();
    let mut add = |name: String, kind, help: String, labels: String, value: f64| match families
        .iter_mut()
        .find(|family| family.name == name)
    {
        Some(family) => family.values.push((labels, value)),
        None => families.push(Family { name, kind, help, values: vec![(labels, value)] }),
    };
    for (server, up) in up {
        let help = "Whether the server answers.".to_owned();
        add("holdfast_up".to_owned(), "gauge", help, label("server", server), f64::from(u8::from(*up)));
    }
    for one in said {
        let server = label("server", &one.server);
        for (field, value) in &one.info {
            let Ok(value) = value.parse::<f64>() else { continue };
            let metric = metric(field);
            let labels = match metric.quantile {
                Some(quantile) => format!("{server},{}", label("quantile", quantile)),
                None => server.clone(),
            };
            add(metric.name, metric.kind, metric.help, labels, value * metric.factor);
        }
        for queue in &one.queues {
            let labels = format!("{server},{}", label("key", &shown(&queue.key)));
            let help = "Requests that wait for one of the locks with the longest queues.".to_owned();
            add("holdfast_queue_waiters".to_owned(), "gauge", help, labels.clone(), queue.waiters as f64);
            let help = "How long the first in one of the longest queues has waited.".to_owned();
            add("holdfast_queue_oldest_seconds".to_owned(), "gauge", help, labels, queue.oldest as f64 / 1000.0);
        }
    }
    let mut text = String::new();
    for Family { name, kind, help, values } in families {
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    }
    text
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// A field of `INFO holdfast` as a metric.
struct Metric {
    name: String,
    kind: &'static str,
    help: String,
    quantile: Option<&'static str>,
    factor: f64,
}

/// What is there now. Every other field counts since the module was loaded, or is a time.
const NOW: [&str; 8] =
    ["waiters", "contended_locks", "tied_holds", "confirming", "sessions", "session_waits", "unread_events", "keys"];
const QUANTILES: [(&str, &str); 4] =
    [("_usec_p50", "0.5"), ("_usec_p999", "0.999"), ("_usec_p99", "0.99"), ("_usec_max", "1")];

fn metric(field: &str) -> Metric {
    let words = field.trim_start_matches("holdfast_").replace('_', " ");
    for (ending, quantile) in QUANTILES {
        if let Some(name) = field.strip_suffix(ending) {
            let help = format!(
                "{} time, since the module was loaded; quantile 1 is the longest.",
                words.split(' ').next().unwrap_or_default()
            );
            return Metric {
                name: format!("{name}_seconds"),
                kind: "gauge",
                help,
                quantile: Some(quantile),
                factor: 1e-6,
            };
        }
    }
    let short = field.trim_start_matches("holdfast_");
    if NOW.contains(&short) || short.contains("session") && short.ends_with('s') || short.contains("unread") {
        return Metric {
            name: field.to_owned(),
            kind: "gauge",
            help: format!("{words}, now."),
            quantile: None,
            factor: 1.0,
        };
    }
    let help = format!("{words}, since the module was loaded.");
    Metric { name: format!("{field}_total"), kind: "counter", help, quantile: None, factor: 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_and_help_stand_there_once_for_all_servers() {
        let said = |server: &str| Said {
            server: server.to_owned(),
            info: [("holdfast_waiters", "3"), ("holdfast_forced", "1"), ("holdfast_wait_usec_p99", "1500")]
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .to_vec(),
            queues: Vec::new(),
        };
        let up = [("a".to_owned(), true), ("b".to_owned(), true), ("c".to_owned(), false)];
        let text = text(&up, &[said("a"), said("b")]);
        assert_eq!(text.matches("# TYPE holdfast_waiters gauge\n").count(), 1);
        assert_eq!(text.matches("# HELP holdfast_forced_total ").count(), 1);
        assert!(text.contains("holdfast_up{server=\"c\"} 0\n"));
        assert!(text.contains("holdfast_waiters{server=\"b\"} 3\n"));
        assert!(text.contains("holdfast_wait_seconds{server=\"a\",quantile=\"0.99\"} 0.0015\n"), "{text}");
    }

    #[test]
    fn labels_are_quoted() {
        assert_eq!(label("key", "a\"b\\c\nd"), r#"key="a\"b\\c\nd""#);
    }
}
