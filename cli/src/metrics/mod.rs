//! `holdfast metrics`: the state of every server's locks, replicas and disk, for Prometheus.
//!
//! `scrape` reads the servers, in parallel and with timeouts; `fields` names the fields; `page` writes the page.

mod fields;
mod page;
mod scrape;

use std::sync::Arc;
use std::time::Duration;

use holdfast_client::Locks;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use self::scrape::Observer;
use crate::args::Metrics;
use crate::failure::Failure;
use crate::report::print_message;

/// A client that sends no request, or does not read the reply, within this time is disconnected.
const PATIENCE: Duration = Duration::from_secs(10);
/// The maximum length of a request.
const LONGEST_REQUEST: usize = 16 * 1024;

/// Serves until the process ends.
pub async fn serve(locks: Locks, task: &Metrics) -> Result<u8, Failure> {
    let listening = |error| Failure::of(&task.listen.to_string(), &error, "choose another address with --listen");
    let listener = TcpListener::bind(task.listen).await.map_err(listening)?;
    let address = listener.local_addr().map_err(listening)?;
    print_message(format_args!("metrics at http://{address}/metrics"));
    let observer = Arc::new(Observer::new(locks, task));
    loop {
        match listener.accept().await {
            // A task for each connection, so that a silent one does not delay the others.
            Ok((stream, _)) => drop(tokio::spawn(timeout(PATIENCE, answer(stream, observer.clone())))),
            // No descriptor is free, or the client has disconnected already.
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn answer(mut stream: TcpStream, observer: Arc<Observer>) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") && request.len() < LONGEST_REQUEST {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            length => request.extend_from_slice(buffer.get(..length).unwrap_or_default()),
        }
    }
    let mut words = request.split(|byte| *byte == b' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
    let (status, text) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => ("200 OK", page::text(&observer.scrape().await)),
        _ => ("404 Not Found", "see /metrics\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        text.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if method != b"HEAD" {
        stream.write_all(text.as_bytes()).await?;
    }
    stream.shutdown().await
}
