//! `show`, `ls`, `force`, `metrics`, `completions`, the man page.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;
use support::{Cluster, Server, until};

use crate::common::{Running, SOON, done, holdfast, holdfast_at, is_free, say, waiters};

fn contended(server: &Server) -> support::Raw {
    let _: i64 = say(server, "LOCK.ACQUIRE a alice LEASE 60000");
    let mut waiting = server.raw();
    waiting.send(&[b"LOCK.ACQUIRE", b"a", b"bob", b"WAIT", b"0"]).unwrap();
    until(SOON, "bob waits", || waiters(server, "a") == 1);
    waiting
}

#[test]
fn show_tells_who_holds_and_who_waits() {
    let server = Server::start();
    let _waiting = contended(&server);
    let text = done(holdfast(&server).args(["show", "a"]));
    assert_eq!(text.code, Some(0), "{}", text.err);
    for word in ["mutex", &server.addr().to_string(), "alice", "bob", "for ever", "59."] {
        assert!(text.out.contains(word), "{word}: {}", text.out);
    }
    let json = done(holdfast(&server).args(["show", "--json", "a"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(json["holders"][0]["owner"], "alice");
    assert_eq!(json["queue"][0]["owner"], "bob");
    let free = done(holdfast(&server).args(["show", "b"]));
    assert_eq!(free.code, Some(1));
    assert!(free.out.contains("b is free"), "{}", free.out);
}

#[test]
fn ls_finds_locks_among_other_keys() {
    let server = Server::start();
    let mut connection = server.connect();
    let mut all = redis::pipe();
    for number in 0..3000 {
        all.cmd("HSET").arg(format!("hash:{number}")).arg("field").arg("not a count").ignore();
    }
    for number in 0..50 {
        all.cmd("LOCK.ACQUIRE").arg(format!("lock:{number}")).arg("me").ignore();
    }
    all.exec(&mut connection).unwrap();
    let json = done(holdfast(&server).args(["ls", "--json"]));
    assert_eq!(json.out.lines().count(), 50, "{}", json.err);
    assert!(json.out.lines().all(|line| serde_json::from_str::<Value>(line).unwrap()["holders"][0]["owner"] == "me"));
    let text = done(holdfast(&server).args(["ls", "lock:1*"]));
    assert_eq!(text.out.lines().count(), 1 + 11, "{}", text.out);
    assert_eq!(text.err, "", "no progress where nobody sits");
}

#[test]
fn force_asks_or_is_told_not_to() {
    let server = Server::start();
    let _: i64 = say(&server, "LOCK.ACQUIRE a alice");
    let refused = done(holdfast(&server).args(["force", "a"]));
    assert_eq!(refused.code, Some(64));
    assert!(refused.err.contains("--yes") && !is_free(&server, "a"), "{}", refused.err);
    let broken = done(holdfast(&server).args(["force", "--yes", "a"]));
    assert_eq!((broken.code, broken.out.as_str()), (Some(0), "1\n"));
    assert!(is_free(&server, "a"));
    assert_eq!(done(holdfast(&server).args(["force", "--yes", "a"])).code, Some(1));
}

#[test]
fn top_once_is_a_table_or_json() {
    let server = Server::start();
    let _waiting = contended(&server);
    let text = done(holdfast(&server).args(["top", "--once"]));
    assert!(text.out.starts_with("KEY  WAITERS") && text.out.contains("alice"), "{}", text.out);
    let json = done(holdfast(&server).args(["top", "--once", "--json"]));
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((json[0]["key"].as_str(), json[0]["waiters"].as_i64()), (Some("a"), Some(1)));
    let no_terminal = done(holdfast(&server).arg("top"));
    assert_eq!(no_terminal.code, Some(64));
    assert!(no_terminal.err.contains("--once"), "{}", no_terminal.err);
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_have_every_field_with_type_and_help() {
    let mut server = Server::start();
    let waiting = contended(&server);
    let mut metrics = Running::start(holdfast(&server).args(["metrics", "--listen", "127.0.0.1:0"]));
    let line = metrics.error_line();
    let address = line.rsplit("http://").next().unwrap().trim_end_matches("/metrics").to_owned();
    let page = get(&address, "/metrics");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
    let info: String = say(&server, "INFO holdfast");
    for (field, _) in info.lines().filter_map(|line| line.split_once(':')) {
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
    drop(waiting);
    server.kill9();
    until(SOON, "it tells that the server is down", || {
        get(&address, "/metrics").contains(&format!("holdfast_up{{server=\"{}\"}} 0", server.addr()))
    });
    server.restart();
    until(SOON, "it tells that the server is up again", || {
        get(&address, "/metrics").contains(&format!("holdfast_up{{server=\"{}\"}} 1", server.addr()))
    });
    let taken = done(holdfast(&server).args(["metrics", "--listen", &address]));
    assert_eq!(taken.code, Some(69));
    assert!(taken.err.contains(&address) && taken.err.contains("--listen"), "{}", taken.err);
}

#[test]
fn metrics_name_every_server_also_when_one_is_gone() {
    let mut cluster = Cluster::start(3);
    let addresses: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    let url = format!("redis+cluster://{}", addresses[0]);
    let mut metrics = Running::start(holdfast_at(&url).args(["metrics", "--listen", "127.0.0.1:0"]));
    let line = metrics.error_line();
    let address = line.rsplit("http://").next().unwrap().trim_end_matches("/metrics").to_owned();
    let up = |page: &str, server: &str, up: u8| page.contains(&format!("holdfast_up{{server=\"{server}\"}} {up}\n"));
    let page = get(&address, "/metrics");
    assert!(addresses.iter().all(|server| up(&page, server, 1)), "{page}");
    assert_eq!(page.matches("# TYPE holdfast_waiters gauge\n").count(), 1);
    for server in &addresses {
        assert!(page.contains(&format!("holdfast_waiters{{server=\"{server}\"}} 0\n")), "{server}: {page}");
    }
    cluster.node_mut(1).kill9();
    until(SOON, "it tells that one is gone, and of the others as before", || {
        let page = get(&address, "/metrics");
        [1, 0, 1].iter().zip(&addresses).all(|(alive, server)| up(&page, server, *alive))
    });
}

#[test]
fn colours_are_for_terminals() {
    let server = Server::start();
    for arguments in [&["--help"][..], &["run", "--help"], &["no-such-command"], &["show", "a"], &["top", "--once"]] {
        let done = done(holdfast(&server).args(arguments));
        assert!(!done.out.contains('\x1b') && !done.err.contains('\x1b'), "{arguments:?}: {done:?}");
    }
}

#[test]
fn completions_complete() {
    let program = env!("CARGO_BIN_EXE_holdfast");
    let script = format!(
        "source <({program} completions bash); COMP_WORDS=(holdfast run --gr); COMP_CWORD=2; _holdfast holdfast --gr run; \
         echo ${{COMPREPLY[*]}}"
    );
    let bash = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&bash.stdout).trim(), "--grace", "{bash:?}");
}

#[test]
fn completions_and_the_man_page_have_every_command() {
    let server = Server::start();
    let man = done(holdfast(&server).arg("man"));
    for shell in ["bash", "zsh", "fish"] {
        let done = done(holdfast(&server).args(["completions", shell]));
        for word in ["run", "show", "ls", "top", "force", "metrics"] {
            assert!(done.out.contains(word), "{shell}: {word}");
            assert!(man.out.contains(word), "man: {word}");
        }
    }
    for word in [".TH holdfast", "grace", "HOLDFAST_TOKEN", "exit code", "REDIS_URL", "SSL_CERT_FILE"] {
        assert!(man.out.contains(word), "{word}: {}", man.out);
    }
    assert!(!man.out.contains("holdfast\\-run(1)"), "there is no other page: {}", man.out);
}
