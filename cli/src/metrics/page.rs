//! The metrics page for Prometheus.

use std::fmt::Write;

use super::fields::{Info, NOW, OLDEST, SINCE, TIMES};
use super::scrape::ServerReport;
use crate::inspect::{Queue, shown};

/// One metric with all its values, so that type and help are written once.
struct Family {
    name: String,
    kind: Kind,
    help: String,
    values: Vec<Sample>,
}

/// The metric's type.
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

/// A sample: the suffix of the metric's name, the labels, the value.
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

    fn counter(&mut self, name: &str, help: &str, labels: String, value: f64) {
        self.add(name, Kind::Counter, help, Sample { suffix: "", labels, value });
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for Family { name, kind, help, values } in &self.0 {
            // Writing to a string can't fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
            for Sample { suffix, labels, value } in values {
                let _ = writeln!(text, "{name}{suffix}{{{labels}}} {value}");
            }
        }
        text
    }
}

/// The page for these servers.
pub fn text(reports: &[ServerReport]) -> String {
    let mut page = Page::default();
    let version = label("version", env!("CARGO_PKG_VERSION"));
    page.gauge("holdfast_build_info", "The version of `holdfast metrics`, as a label.", version, 1.0);
    for one in reports {
        let server = label("server", &one.server);
        add_state(&mut page, &server, one);
        if let Some(info) = &one.info {
            add_server(&mut page, &server, info);
            add_replicas(&mut page, &server, info);
            add_disk(&mut page, &server, info);
            for (field, value) in info.fields() {
                add_field(&mut page, &server, field, value);
            }
        }
        for queue in one.queues.iter().flatten() {
            add_queue(&mut page, &server, queue);
        }
    }
    page.text()
}

fn add_state(page: &mut Page, server: &str, reports: &ServerReport) {
    let help = "Whether the server can be used: it replies, has the module, and this user may read its state.";
    page.gauge("holdfast_up", help, server.to_owned(), bool_value(reports.queues.is_ok()));
    if let Err(reason) = reports.queues {
        let labels = format!("{server},{}", label("reason", reason.label()));
        page.gauge("holdfast_down", "Why a server can't be used, as a label.", labels, 1.0);
    }
    if let Some(chosen) = reports.chosen {
        let help = "Whether clients use this server: by its address, by Sentinel, or as a primary of the cluster.";
        page.gauge("holdfast_chosen", help, server.to_owned(), bool_value(chosen));
    }
}

fn add_server(page: &mut Page, server: &str, info: &Info) {
    let labels =
        [("role", info.role()), ("software", &info.software()), ("module_version", info.text("holdfast_version"))];
    let labels: Vec<_> = labels.iter().map(|(name, value)| label(name, value)).collect();
    let labels = format!("{server},{}", labels.join(","));
    page.gauge("holdfast_server_info", "The server's role and versions, as labels.", labels, 1.0);
    let policy = info.text("maxmemory_policy");
    if !policy.is_empty() {
        let help = "What the server does when its memory is full, as a label.";
        page.gauge("holdfast_maxmemory_policy", help, format!("{server},{}", label("policy", policy)), 1.0);
    }
    for (code, count) in info.errors() {
        let help = "Errors of this kind, of all commands.";
        let labels = format!("{server},{}", label("code", code));
        page.counter("holdfast_error_replies_total", help, labels, count as f64);
    }
    if info.is_primary() {
        for (reason, refuses) in info.refusals() {
            let help = "Whether this primary refuses writes, including releases and renewals, and why.";
            let labels = format!("{server},{}", label("reason", reason));
            page.gauge("holdfast_refuses_writes", help, labels, bool_value(refuses));
        }
    }
}

fn add_replicas(page: &mut Page, server: &str, info: &Info) {
    if let Some(up) = info.has_word("master_link_status", "up") {
        let help = "Whether this replica is connected to its primary.";
        page.gauge("holdfast_master_link_up", help, server.to_owned(), bool_value(up));
    }
    if !info.is_primary() {
        return;
    }
    let connected = info.number("connected_slaves").unwrap_or(0);
    page.gauge("holdfast_connected_replicas", "Replicas of this primary.", server.to_owned(), connected as f64);
    let help = "Replicas of this primary that would confirm a write now: online, and heard from within min-replicas-max-lag, \
                or ten seconds where min-replicas-to-write is 0.";
    page.gauge("holdfast_good_replicas", help, server.to_owned(), info.good_replicas() as f64);
    let written = info.number("master_repl_offset").unwrap_or(0);
    for replica in info.replicas() {
        let labels = format!("{server},{}", label("replica", &format!("{}:{}", replica.host, replica.port)));
        let help = "How long ago this replica was last heard from.";
        page.gauge("holdfast_replica_lag_seconds", help, labels.clone(), replica.lag as f64);
        let help = "Bytes of the replication stream that this replica has not acknowledged.";
        let behind = written.saturating_sub(replica.offset);
        page.gauge("holdfast_replica_behind_bytes", help, labels, behind as f64);
    }
}

fn add_disk(page: &mut Page, server: &str, info: &Info) {
    let states = [
        ("holdfast_aof_enabled", "aof_enabled", "1", "Whether the append-only file is enabled."),
        ("holdfast_aof_last_write_ok", "aof_last_write_status", "ok", "Whether the last write to that file succeeded."),
        ("holdfast_aof_last_rewrite_ok", "aof_last_bgrewrite_status", "ok", "Whether its last rewrite succeeded."),
        ("holdfast_rdb_last_save_ok", "rdb_last_bgsave_status", "ok", "Whether the last snapshot (RDB) succeeded."),
    ];
    for (name, field, word, help) in states {
        if let Some(fine) = info.has_word(field, word) {
            page.gauge(name, help, server.to_owned(), bool_value(fine));
        }
    }
    if let Some(count) = info.number("aof_delayed_fsync") {
        let help = "How often a write waited because the disk was slow (appendfsync everysec).";
        page.counter("holdfast_aof_delayed_fsync_total", help, server.to_owned(), count as f64);
    }
}

fn add_queue(page: &mut Page, server: &str, queue: &Queue) {
    let labels = format!("{server},{}", label("key", &shown(&queue.key)));
    let help = "Waiters of one of the locks with the longest queues, in the database of the address.";
    page.gauge("holdfast_queue_waiters", help, labels.clone(), queue.waiters as f64);
    let help = "How long the first waiter of one of the longest queues has waited.";
    page.gauge("holdfast_queue_oldest_seconds", help, labels, queue.oldest as f64 / 1000.0);
}

fn bool_value(it: bool) -> f64 {
    f64::from(u8::from(it))
}

fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// Adds a field of `INFO holdfast`. Times are histograms, from which Prometheus computes percentiles of any period, so those of
/// `INFO` are left out. Fields of a newer module are left out as well, because their type is unknown.
fn add_field(page: &mut Page, server: &str, field: &str, value: &str) {
    let Some(short) = field.strip_prefix("holdfast_") else { return };
    if let Some((what, which)) = short.split_once("_usec_") {
        return add_times(page, server, what, which, value);
    }
    let Ok(value) = value.parse::<f64>() else { return };
    let words = |list: &[(&str, &'static str)]| list.iter().find(|(name, _)| *name == short).map(|(_, words)| *words);
    if short == OLDEST.0 {
        let help = format!("Now: {}; 0: no request waits.", OLDEST.1);
        page.gauge("holdfast_oldest_wait_seconds", &help, server.to_owned(), value / 1e3);
    } else if let Some(words) = words(&NOW) {
        page.gauge(field, &format!("Now: {words}."), server.to_owned(), value);
    } else if let Some(words) = words(&SINCE) {
        page.counter(
            &format!("{field}_total"),
            &format!("Since the module was loaded: {words}."),
            server.to_owned(),
            value,
        );
    }
}

fn add_times(page: &mut Page, server: &str, what: &str, which: &str, value: &str) {
    let Some((_, words)) = TIMES.iter().find(|(name, _)| *name == what) else { return };
    let mut sample = |suffix, labels, value| {
        let help = format!("Since the module was loaded: {words}.");
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
            let help = format!("The longest since the module was loaded: {words}.");
            page.gauge(&format!("holdfast_{what}_max_seconds"), &help, server.to_owned(), micros / 1e6);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::scrape::Reason;

    fn reports(server: &str) -> ServerReport {
        let info = [
            ("role", "master"),
            ("redis_version", "7.0.15"),
            ("holdfast_version", "0.2.0"),
            ("holdfast_waiters", "3"),
            ("holdfast_forced", "1"),
            ("holdfast_of_tomorrow", "1"),
            ("holdfast_oldest_wait_msec", "1500"),
            ("holdfast_wait_usec_p99", "1500"),
            ("holdfast_wait_usec_max", "1700"),
            ("holdfast_wait_usec_sum", "2500000"),
            ("holdfast_wait_usec_count", "7"),
            ("holdfast_wait_usec_buckets", "10=0,20000=6"),
            ("maxmemory_policy", "noeviction"),
            ("used_memory", "1000"),
            ("connected_slaves", "1"),
            ("slave0", "ip=r,port=1,state=online,offset=60,lag=2"),
            ("master_repl_offset", "100"),
            ("aof_last_write_status", "err"),
            ("errorstat_MISCONF", "count=5"),
        ];
        let info = info.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        ServerReport {
            server: server.to_owned(),
            chosen: Some(true),
            info: Some(Info::new(info)),
            queues: Ok(Vec::new()),
        }
    }

    #[test]
    fn type_and_help_appear_once_for_all_servers() {
        let down = ServerReport { server: "c".to_owned(), chosen: None, info: None, queues: Err(Reason::NoModule) };
        let text = text(&[reports("a"), reports("b"), down]);
        assert_eq!(text.matches("# TYPE holdfast_waiters gauge\n").count(), 1);
        assert_eq!(text.matches("# TYPE holdfast_wait_seconds histogram\n").count(), 1);
        assert_eq!(text.matches("# HELP holdfast_forced_total ").count(), 1);
        for line in [
            concat!("holdfast_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            "holdfast_up{server=\"a\"} 1",
            "holdfast_up{server=\"c\"} 0",
            "holdfast_down{server=\"c\",reason=\"module not loaded\"} 1",
            "holdfast_chosen{server=\"a\"} 1",
            "holdfast_server_info{server=\"a\",role=\"master\",software=\"redis 7.0.15\",module_version=\"0.2.0\"} 1",
            "holdfast_refuses_writes{server=\"a\",reason=\"disk\"} 1",
            "holdfast_refuses_writes{server=\"a\",reason=\"replicas\"} 0",
            "holdfast_good_replicas{server=\"a\"} 1",
            "holdfast_replica_lag_seconds{server=\"a\",replica=\"r:1\"} 2",
            "holdfast_replica_behind_bytes{server=\"a\",replica=\"r:1\"} 40",
            "holdfast_aof_last_write_ok{server=\"a\"} 0",
            "holdfast_error_replies_total{server=\"a\",code=\"MISCONF\"} 5",
            "holdfast_error_replies_total{server=\"a\",code=\"OOM\"} 0",
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
        assert!(!text.contains("used_memory") && !text.contains("p99") && !text.contains("tomorrow"), "{text}");
        assert!(!text.contains("holdfast_chosen{server=\"c\"}"), "unknown: {text}");
    }

    #[test]
    fn labels_are_quoted() {
        assert_eq!(label("key", "a\"b\\c\nd"), r#"key="a\"b\\c\nd""#);
    }
}
