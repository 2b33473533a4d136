//! Server addresses, and the errors if a server is missing.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use support::{Builder, Cluster, Server, Trio, skip, until};

use crate::common::{SOON, done, get, holdfast, holdfast_at, metrics_at, say, waiters};

#[test]
fn cluster_sentinel_and_socket_are_accepted_as_addresses() {
    let cluster = Cluster::start(3);
    let url = format!("redis+cluster://{},{}", cluster.node(0).addr(), cluster.node(1).addr());
    for key in ["a", "b", "c", "d"] {
        assert_eq!(done(holdfast_at(&url).args(["run", key, "--", "echo", "ran"])).out, "ran\n");
        let held = done(holdfast_at(&url).args(["run", key, "--", env!("CARGO_BIN_EXE_holdfast"), "ls", "--json"]));
        assert_eq!(held.out.lines().count(), 1, "{held:?}");
    }
    let slots = done(holdfast_at(&url).args(["run", "a", "b", "--", "true"]));
    assert_eq!(slots.code, Some(69));
    assert!(slots.err.contains("CROSSSLOT") && slots.err.contains("{name}a"), "{}", slots.err);
    let node = format!("redis://{}", cluster.node(0).addr());
    let elsewhere = ["a", "b", "c", "d"].map(|key| done(holdfast_at(&node).args(["run", key, "--", "true"])));
    assert!(
        elsewhere.iter().any(|run| run.err.contains("MOVED") && run.err.contains("redis+cluster://")),
        "{elsewhere:?}"
    );

    let trio = Trio::start();
    let url = format!("redis+sentinel://{}/{}", trio.sentinel().addr(), trio.name());
    assert_eq!(done(holdfast_at(&url).args(["run", "a", "--", "echo", "ran"])).out, "ran\n");
    let wrong = format!("redis+sentinel://{}/nobody", trio.sentinel().addr());
    let wrong = done(holdfast_at(&wrong).args(["run", "a", "--", "true"]));
    let sentinel = trio.sentinel().addr().to_string();
    assert!(
        wrong.code == Some(69) && wrong.err.contains(&sentinel) && wrong.err.contains("SENTINEL MASTERS"),
        "{wrong:?}"
    );

    let server = Server::start();
    let socket = server.dir().join("socket");
    drop(server);
    let server = Server::builder().arg("unixsocket", &socket.display().to_string());
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let _server = server.start();
    let url = format!("unix://{}", socket.display());
    assert_eq!(done(holdfast_at(&url).args(["run", "a", "--", "echo", "ran"])).out, "ran\n");
    std::fs::remove_dir_all(socket.parent().unwrap()).unwrap();
}

#[test]
fn option_takes_precedence_over_environment() {
    let server = Server::start();
    let url = format!("redis://{}", server.addr());
    let done = done(holdfast_at("redis://127.0.0.1:1").args(["--url", &url, "run", "a", "--", "echo", "ran"]));
    assert_eq!(done.out, "ran\n");
}

#[test]
fn error_names_server_key_and_remedy() {
    let mut server = Server::start();
    let () = say(&server, "SET text value");
    let says = |command: &mut Command, code: i32, words: &[&str]| {
        let done = done(command);
        assert_eq!(done.code, Some(code), "{done:?}");
        for word in words {
            assert!(done.err.contains(word), "{word}: {}", done.err);
        }
        assert!(done.err.lines().count() <= 2, "{}", done.err);
    };
    let address = server.addr().to_string();
    says(holdfast(&server).args(["run", "text", "--", "true"]), 69, &["\"text\"", "WRONGTYPE", "another key"]);
    says(holdfast(&server).args(["show", "text"]), 69, &[&address, "text", "WRONGTYPE"]);
    let () = say(&server, "CONFIG SET requirepass secret");
    says(holdfast(&server).args(["run", "a", "--", "true"]), 69, &[&address, "NOAUTH", "--url"]);
    server.kill9();
    says(holdfast(&server).args(["run", "a", "--", "true"]), 69, &[&address, "\"a\"", "that the server runs"]);
    says(holdfast_at("http://x").args(["show", "a"]), 64, &["http://x", "redis+sentinel://"]);
    let closed_ports = "127.0.0.1:1,127.0.0.1:2";
    for task in [&["run", "a", "--", "true"][..], &["show", "a"], &["ls"], &["top", "--once"], &["force", "-y", "a"]] {
        says(
            holdfast_at(&format!("redis+sentinel://me:secret@{closed_ports}/locks")).args(task),
            69,
            &[closed_ports, "/locks", "runs"],
        );
        says(holdfast_at(&format!("redis+cluster://{closed_ports}")).args(task), 69, &["127.0.0.1:2", "runs"]);
    }
    for looks in [&["show", "a"][..], &["ls"], &["top", "--once"]] {
        let said = done(holdfast(&server).args(looks));
        assert!(!said.err.contains(": :") && !said.err.contains("\"\""), "no empty part: {}", said.err);
    }
    let plain = Server::builder().without_module().start();
    says(holdfast(&plain).args(["run", "a", "--", "true"]), 69, &["not loaded", "loadmodule"]);
}

/// As in a container that sets it.
#[test]
fn password_is_read_from_environment() {
    let server = Server::start();
    let () = say(&server, "CONFIG SET requirepass s$cret#%/@:y");
    let with = |url: &str, password: &str| {
        done(holdfast_at(url).env("HOLDFAST_PASSWORD", password).args(["run", "a", "--", "echo", "ran"]))
    };
    let url = format!("redis://{}", server.addr());
    assert_eq!(with(&url, "s$cret#%/@:y").out, "ran\n");
    let wrong = with(&url, "wrong");
    assert!(wrong.code == Some(69) && wrong.err.contains("HOLDFAST_PASSWORD"), "{wrong:?}");
    assert!(!wrong.err.contains("wrong@") && !wrong.err.contains(":wrong"), "{wrong:?}");
    // A password is not dropped silently.
    let mut encoded = holdfast_at(&url);
    encoded.env("HOLDFAST_PASSWORD", OsStr::from_bytes(b"\xff"));
    let encoded = done(encoded.args(["run", "a", "--", "echo", "ran"]));
    assert!(encoded.code == Some(64) && encoded.err.contains("UTF-8"), "{encoded:?}");
    // The address has precedence.
    let url = format!("redis://:s%24cret%23%25%2F%40%3Ay@{}", server.addr());
    assert_eq!(with(&url, "wrong").out, "ran\n");
}

#[test]
fn sentinel_password_is_used() {
    let trio = Trio::start();
    let () = say(trio.sentinel(), "ACL SETUSER default resetpass >sentinels");
    let url = format!("redis+sentinel://{}/{}", trio.sentinel().addr(), trio.name());
    let without = done(holdfast_at(&url).args(["run", "a", "--", "echo", "ran"]));
    assert_eq!(without.code, Some(69), "{without:?}");
    let with =
        done(holdfast_at(&url).env("HOLDFAST_SENTINEL_PASSWORD", "sentinels").args(["run", "a", "--", "echo", "ran"]));
    assert_eq!(with.out, "ran\n", "{with:?}");
    let url = format!("{url}?sentinel_password=sentinels");
    assert_eq!(done(holdfast_at(&url).args(["run", "a", "--", "echo", "ran"])).out, "ran\n");
}

#[test]
fn tls_address_is_accepted() {
    let keys = Server::start();
    let dir = keys.dir();
    if !certificates(dir) {
        return skip("openssl is not installed");
    }
    let file = |name: &str| dir.join(name).display().to_string();
    let Ok(server) = with_tls(Server::builder(), dir, 0).try_start() else { return skip("this server has no TLS") };
    let Some(port) = listens_for_tls(&server) else { return skip("this server has no TLS") };
    let url = format!("rediss://127.0.0.1:{port}");
    let trusted = done(holdfast_at(&url).env("SSL_CERT_FILE", file("ca.pem")).args(["run", "a", "--", "echo", "ran"]));
    assert_eq!((trusted.code, trusted.out.as_str()), (Some(0), "ran\n"), "{}", trusted.err);
    let untrusted =
        done(holdfast_at(&url).env("SSL_CERT_FILE", file("other.pem")).args(["run", "a", "--", "echo", "ran"]));
    assert_eq!(untrusted.code, Some(69), "{}", untrusted.err);
    assert!(untrusted.err.contains("--tls-ca"), "{}", untrusted.err);
    // As options, and from the environment.
    let ca = file("ca.pem");
    let trusted = done(holdfast_at(&url).args(["--tls-ca", &ca, "run", "a", "--", "echo", "ran"]));
    assert_eq!((trusted.code, trusted.out.as_str()), (Some(0), "ran\n"), "{}", trusted.err);
    let plain = done(holdfast(&keys).args(["--tls-ca", &ca, "show", "a"]));
    assert_eq!(plain.code, Some(64), "{}", plain.err);
    assert!(plain.err.contains("rediss://"), "{}", plain.err);
    let nothing = done(holdfast_at(&url).args(["--tls-ca", "/no/such.pem", "show", "a"]));
    assert!(nothing.code == Some(69) && nothing.err.contains("/no/such.pem"), "{}", nothing.err);

    // A server that requires client certificates, which is Redis' default.
    let mut connection = server.connect();
    let () = redis::cmd("CONFIG").arg("SET").arg("tls-auth-clients").arg("yes").query(&mut connection).unwrap();
    let uncertified = done(holdfast_at(&url).args(["--tls-ca", &ca, "show", "a"]));
    assert_eq!(uncertified.code, Some(69), "{}", uncertified.err);
    assert!(uncertified.err.contains("--tls-cert"), "{}", uncertified.err);
    let mut known = holdfast_at(&url);
    known.env("HOLDFAST_TLS_CA", &ca).env("HOLDFAST_TLS_CERT", file("server.pem"));
    let known = done(known.args(["--tls-key", &file("server.key"), "run", "a", "--", "echo", "ran"]));
    assert_eq!((known.code, known.out.as_str()), (Some(0), "ran\n"), "{}", known.err);
    until(SOON, "no request waits", || waiters(&server, "a") == 0);
}

/// Enables TLS, and returns the port; `None`: the server has no TLS. Another process may take a port first that the system reports as free.
fn listens_for_tls(server: &Server) -> Option<u16> {
    let mut connection = server.connect();
    loop {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        match redis::cmd("CONFIG").arg("SET").arg("tls-port").arg(port).exec(&mut connection) {
            Ok(()) => return Some(port),
            Err(error) if error.to_string().contains("Unable to listen") => {}
            Err(_) => return None,
        }
    }
}

/// A server with TLS, for its replicas, too.
fn with_tls(server: Builder, certificates: &Path, port: u16) -> Builder {
    let file = |name: &str| certificates.join(name).display().to_string();
    server
        .arg("tls-port", &port.to_string())
        .arg("tls-cert-file", &file("server.pem"))
        .arg("tls-key-file", &file("server.key"))
        .arg("tls-ca-cert-file", &file("ca.pem"))
        .arg("tls-auth-clients", "no")
        .arg("tls-replication", "yes")
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn tls_reaches_replicas_sentinels_and_clusters() {
    let keys = Server::start();
    let dir = keys.dir();
    if !certificates(dir) {
        return skip("openssl is not installed");
    }
    // Each port is chosen right before its server takes it, because another process may take it.
    let primary_port = free_port();
    let Ok(primary) = with_tls(Server::builder(), dir, primary_port).try_start() else {
        return skip("this server has no TLS");
    };
    let replica_port = free_port();
    let replica = with_tls(Server::builder(), dir, replica_port).start();
    let () = say(&replica, &format!("REPLICAOF 127.0.0.1 {primary_port}"));
    primary.wait_replica_online();
    let file = dir.join("sentinel.conf");
    let settings = format!("sentinel monitor locks 127.0.0.1 {primary_port} 1\n");
    std::fs::write(&file, settings).unwrap();
    let sentinel_port = free_port();
    let _sentinel = with_tls(Server::builder().sentinel(file), dir, sentinel_port).start();
    let node_port = free_port();
    let cluster = Cluster::start_with(1, |node| with_tls(node, dir, node_port).arg("tls-cluster", "yes"));
    cluster.wait_until_ok();

    let ca = dir.join("ca.pem").display().to_string();
    let of_all = [
        (format!("rediss+sentinel://127.0.0.1:{sentinel_port}/locks"), vec![primary_port, replica_port]),
        (format!("rediss+cluster://127.0.0.1:{node_port}"), vec![node_port]),
    ];
    for (url, servers) in of_all {
        let mut run = holdfast_at(&url);
        let ran = done(run.args(["--tls-ca", &ca, "run", "a", "--", "echo", "ran"]));
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "ran\n"), "{url}: {}", ran.err);
        let (_metrics, at) = metrics_at(holdfast_at(&url).env("HOLDFAST_TLS_CA", &ca));
        until(SOON, "all servers are up", || {
            let page = get(&at, "/metrics");
            servers.iter().all(|port| page.contains(&format!("holdfast_up{{server=\"127.0.0.1:{port}\"}} 1\n")))
        });
    }
}

/// Makes a certificate for 127.0.0.1 with its authority, and another authority.
fn certificates(dir: &Path) -> bool {
    let script = "set -e
        authority() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=$1 -keyout $1.key -out $1.pem; }
        authority ca; authority other
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=server -keyout server.key -out server.csr
        printf 'subjectAltName=IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n' > server.ext
        openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile server.ext -out server.pem";
    let made = Command::new("bash").args(["-c", script]).current_dir(dir).output();
    made.is_ok_and(|made| made.status.success())
}
