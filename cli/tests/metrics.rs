//! `metrics`: the page shows every problem of the servers.

use std::io::Read;
use std::net::TcpStream;

use support::{Cluster, Server, Trio, until};

use crate::common::{SOON, contended, done, get, holdfast, holdfast_at, metrics_at, say};

/// Whether the page has this line.
fn has(page: &str, line: &str) -> bool {
    page.lines().any(|it| it == line)
}

#[test]
fn metrics_have_every_field_with_type_and_help() {
    let mut server = Server::start();
    let waiting = contended(&server);
    let (_metrics, address) = metrics_at(&mut holdfast(&server));
    let page = get(&address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
    let info: String = say(&server, "INFO holdfast");
    assert!(page.contains("module_version=\"0."), "{page}");
    for (field, _) in info.lines().filter_map(|line| line.split_once(':')).filter(|it| it.0 != "holdfast_version") {
        let (name, suffix) = match field.split_once("_usec_") {
            Some((_, "p50" | "p99" | "p999")) => continue,
            Some((name, "max")) => (format!("{name}_max_seconds"), ""),
            Some((name, "sum")) => (format!("{name}_seconds"), "_sum"),
            Some((name, "count")) => (format!("{name}_seconds"), "_count"),
            Some((name, _)) => (format!("{name}_seconds"), "_bucket"),
            None => (field.replace("_msec", "_seconds"), ""),
        };
        let shown =
            [name.clone(), format!("{name}_total")].into_iter().find(|name| page.contains(&format!("# TYPE {name} ")));
        let name = shown.unwrap_or_else(|| panic!("{field} is not shown: {page}"));
        for kind in ["HELP", "TYPE"] {
            assert_eq!(page.matches(&format!("# {kind} {name} ")).count(), 1, "{kind} {name}");
        }
        let value = format!("{name}{suffix}{{server=\"{}\"", server.addr());
        assert!(page.contains(&value), "{value}");
    }
    assert!(page.contains("policy=\"noeviction\"} 1"), "{page}");
    assert!(page.contains("holdfast_queue_waiters{") && page.contains("key=\"a\"} 1"), "{page}");
    assert!(page.contains("holdfast_up{") && page.contains("} 1"));
    assert!(get(&address, "/other").starts_with("HTTP/1.1 404"));
    assert!(get(&address, "/metrics?target=a").starts_with("HTTP/1.1 200"));
    drop(waiting);
    server.kill9();
    until(SOON, "the page shows the server as down", || {
        get(&address, "/metrics").contains(&format!("holdfast_up{{server=\"{}\"}} 0", server.addr()))
    });
    server.restart();
    until(SOON, "the page shows the server as up again", || {
        get(&address, "/metrics").contains(&format!("holdfast_up{{server=\"{}\"}} 1", server.addr()))
    });
    let taken = done(holdfast(&server).args(["metrics", "--listen", &address]));
    assert_eq!(taken.code, Some(69));
    assert!(taken.err.contains(&address) && taken.err.contains("--listen"), "{}", taken.err);
}

#[test]
fn metrics_name_every_server_when_one_is_down() {
    let mut cluster = Cluster::start(3);
    let addresses: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    let url = format!("redis+cluster://{}", addresses[0]);
    let (_metrics, address) = metrics_at(&mut holdfast_at(&url));
    let up = |page: &str, server: &str, up: u8| page.contains(&format!("holdfast_up{{server=\"{server}\"}} {up}\n"));
    let page = get(&address, "/metrics");
    assert!(addresses.iter().all(|server| up(&page, server, 1)), "{page}");
    assert_eq!(page.matches("# TYPE holdfast_waiters gauge\n").count(), 1);
    for server in &addresses {
        assert!(page.contains(&format!("holdfast_waiters{{server=\"{server}\"}} 0\n")), "{server}: {page}");
    }
    cluster.node_mut(1).kill9();
    until(SOON, "the page shows one server as down, and the others as before", || {
        let page = get(&address, "/metrics");
        [1, 0, 1].iter().zip(&addresses).all(|(alive, server)| up(&page, server, *alive))
    });
}

#[test]
fn server_that_grants_no_locks_is_down_with_reason() {
    let plain = Server::builder().without_module().start();
    let (_metrics, at) = metrics_at(&mut holdfast(&plain));
    let page = get(&at, "/metrics");
    let server = plain.addr();
    assert!(has(&page, &format!("holdfast_up{{server=\"{server}\"}} 0")), "{page}");
    assert!(has(&page, &format!("holdfast_down{{server=\"{server}\",reason=\"module not loaded\"}} 1")), "{page}");

    let closed = Server::start();
    let () = say(&closed, "ACL SETUSER stranger on >secret ~* -@all +info");
    let url = |login: &str| format!("redis://{login}@{}", closed.addr());
    for (login, reason) in [("stranger:secret", "no rights"), ("stranger:wrong", "login refused")] {
        let (_metrics, at) = metrics_at(&mut holdfast_at(&url(login)));
        let page = get(&at, "/metrics");
        let line = format!("holdfast_down{{server=\"{}\",reason=\"{reason}\"}} 1", closed.addr());
        assert!(has(&page, &line), "{line}: {page}");
    }
    let () = say(&closed, "CONFIG SET requirepass secret");
    let (_metrics, at) = metrics_at(&mut holdfast(&closed));
    assert!(get(&at, "/metrics").contains("reason=\"login refused\"} 1"));

    let (_metrics, at) = metrics_at(&mut holdfast_at("redis://127.0.0.1:1"));
    assert!(get(&at, "/metrics").contains("reason=\"unreachable\"} 1"));
}

#[test]
fn hanging_server_delays_no_other_server() {
    let cluster = Cluster::start(3);
    // The node that hangs is also the first one that is asked for the list of servers.
    let url = format!("redis+cluster://{},{}", cluster.node(0).addr(), cluster.node(1).addr());
    let (_metrics, at) = metrics_at(&mut holdfast_at(&url));
    let up = |page: &str, node: usize, up: u8| {
        has(page, &format!("holdfast_up{{server=\"{}\"}} {up}", cluster.node(node).addr()))
    };
    until(SOON, "all servers are up", || (0..3).all(|node| up(&get(&at, "/metrics"), node, 1)));
    cluster.node(0).stop();
    let page = get(&at, "/metrics");
    assert!(up(&page, 0, 0) && up(&page, 1, 1) && up(&page, 2, 1), "{page}");
    let reason = format!("holdfast_down{{server=\"{}\",reason=\"no answer in time\"}} 1", cluster.node(0).addr());
    assert!(has(&page, &reason), "{page}");
    // A new exporter also finds the others.
    let (_late, late) = metrics_at(&mut holdfast_at(&url));
    until(SOON, "the others are found", || {
        let page = get(&late, "/metrics");
        up(&page, 1, 1) && up(&page, 2, 1)
    });
    cluster.node(0).cont();
    until(SOON, "the server is up again", || up(&get(&at, "/metrics"), 0, 1));
}

#[test]
fn idle_scraper_delays_no_other_scraper() {
    let server = Server::start();
    let (_metrics, at) = metrics_at(&mut holdfast(&server));
    let mut idle: Vec<TcpStream> = (0..5).map(|_| TcpStream::connect(&at).unwrap()).collect();
    assert!(get(&at, "/metrics").starts_with("HTTP/1.1 200"));
    // Each connection is closed at the end.
    idle[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(idle[0].read(&mut [0]).unwrap(), 0);
}

#[test]
fn metrics_show_replicas_and_primary_that_refuses_writes() {
    let primary = Server::start();
    let mut replica = Server::start();
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let (_metrics, at) = metrics_at(&mut holdfast(&primary));
    let (m, r) = (primary.addr(), replica.addr());
    let page = get(&at, "/metrics");
    for line in [
        format!("holdfast_up{{server=\"{r}\"}} 1"),
        format!("holdfast_chosen{{server=\"{m}\"}} 1"),
        format!("holdfast_chosen{{server=\"{r}\"}} 0"),
        format!("holdfast_master_link_up{{server=\"{r}\"}} 1"),
        format!("holdfast_connected_replicas{{server=\"{m}\"}} 1"),
        format!("holdfast_good_replicas{{server=\"{m}\"}} 1"),
        format!("holdfast_refuses_writes{{server=\"{m}\",reason=\"replicas\"}} 0"),
        format!("holdfast_rdb_last_save_ok{{server=\"{m}\"}} 1"),
    ] {
        assert!(has(&page, &line), "{line}: {page}");
    }
    for start in [
        format!("holdfast_server_info{{server=\"{r}\",role=\"replica\",software=\""),
        format!("holdfast_replica_lag_seconds{{server=\"{m}\",replica=\"{r}\"}} "),
        format!("holdfast_replica_behind_bytes{{server=\"{m}\",replica=\"{r}\"}} "),
    ] {
        assert!(page.contains(&start), "{start}: {page}");
    }
    assert!(
        !page.contains(&format!("holdfast_refuses_writes{{server=\"{r}\"")),
        "a replica refuses all writes: {page}"
    );
    let (_alone, alone) = metrics_at(holdfast(&primary).arg("--no-replicas"));
    assert!(!get(&alone, "/metrics").contains(&format!("server=\"{r}\"")));

    // The replica is killed: the primary refuses writes, and the replica stays on the page.
    let () = say(&primary, "CONFIG SET min-replicas-to-write 1");
    replica.kill9();
    until(SOON, "the primary refuses writes, and the replica is shown as down", || {
        let page = get(&at, "/metrics");
        has(&page, &format!("holdfast_refuses_writes{{server=\"{m}\",reason=\"replicas\"}} 1"))
            && has(&page, &format!("holdfast_up{{server=\"{r}\"}} 0"))
            && has(&page, &format!("holdfast_down{{server=\"{r}\",reason=\"unreachable\"}} 1"))
    });
    let refused = done(holdfast(&primary).args(["run", "-n", "a", "--", "true"]));
    assert_eq!(refused.code, Some(69), "{refused:?}");
    assert!(refused.err.contains("refuses writes") && refused.err.contains("min-replicas-to-write"), "{refused:?}");
    assert!(!refused.err.contains("ask for fewer"), "{refused:?}");
    let page = get(&at, "/metrics");
    assert!(has(&page, &format!("holdfast_error_replies_total{{server=\"{m}\",code=\"NOREPLICAS\"}} 1")), "{page}");
}

#[test]
fn metrics_show_old_primary_after_failover() {
    let trio = Trio::start();
    let url = format!("redis+sentinel://{}/{}", trio.sentinel().addr(), trio.name());
    let (_metrics, at) = metrics_at(&mut holdfast_at(&url));
    let [old, new] = trio.servers();
    let role = |page: &str, server: &Server, role: &str| {
        page.contains(&format!("holdfast_server_info{{server=\"{}\",role=\"{role}\"", server.addr()))
    };
    let chosen = |page: &str, server: &Server, chosen: u8| {
        has(page, &format!("holdfast_chosen{{server=\"{}\"}} {chosen}", server.addr()))
    };
    let page = get(&at, "/metrics");
    assert!(role(&page, old, "master") && role(&page, new, "replica") && chosen(&page, old, 1), "{page}");
    trio.fail_over();
    until(SOON, "the new primary is shown as used, and the old one is shown", || {
        let page = get(&at, "/metrics");
        role(&page, new, "master") && chosen(&page, new, 1) && chosen(&page, old, 0)
    });
    // Without a reply of Sentinel, the known servers are still asked.
    trio.sentinel().stop();
    let page = get(&at, "/metrics");
    assert!(role(&page, new, "master") && has(&page, &format!("holdfast_up{{server=\"{}\"}} 1", new.addr())), "{page}");
    trio.sentinel().cont();
}
