//! One server for one test.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use redis::{Client, Connection, ConnectionAddr, IntoConnectionInfo, ProtocolVersion, RedisConnectionInfo, Value};

use crate::dir::Dir;
use crate::environment::{in_containers, io_threads, module_path, server_program};
use crate::launch::{Launch, Module, Running};
use crate::process::Process;
use crate::raw::Raw;
use crate::socket::Socket;
use crate::until::{eventually, until};
use crate::version::{Feature, Version};

/// Timeout for the start, including the loading of data.
const START: Duration = Duration::from_secs(60);
/// Timeout for everything else that a server does by itself.
const SOON: Duration = Duration::from_secs(30);
/// How many ports are tried when other processes take them first.
const PORTS: usize = 20;
/// After this time a server is contacted even if its log does not report it ready (the log level may be too high).
const QUIET: Duration = Duration::from_secs(2);

/// The settings of a new server. Made by [`Server::builder`].
pub struct Builder {
    program: PathBuf,
    config_file: Option<PathBuf>,
    settings: Vec<(String, String)>,
    sentinel: bool,
    module: Option<Module>,
    dir: Option<PathBuf>,
}

impl Builder {
    /// Sets a configuration directive. The last one of a name counts.
    pub fn arg(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts from this configuration file. Only address, directory and the settings of this builder precede it, so `CONFIG
    /// REWRITE` works.
    pub fn config_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.config_file = Some(path.into());
        self
    }

    /// Starts a sentinel, with this file.
    pub fn sentinel(mut self, path: impl Into<PathBuf>) -> Self {
        self.sentinel = true;
        self.without_module().config_file(path)
    }

    /// Starts a server without the module.
    pub fn without_module(mut self) -> Self {
        self.module = None;
        self
    }

    /// Passes these arguments to the module.
    pub fn module_args(mut self, arguments: &[&str]) -> Self {
        let module = self.module.get_or_insert_with(|| Module { path: module_path(), arguments: Vec::new() });
        module.arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        self
    }

    /// Uses this directory for the server's files, and leaves them there.
    pub fn dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.dir = Some(path.into());
        self
    }

    /// Starts this program. Not in a container, which runs the image's program.
    pub fn program(mut self, path: impl Into<PathBuf>) -> Self {
        self.program = path.into();
        self
    }

    /// Starts the server and waits until it replies.
    ///
    /// # Panics
    ///
    /// With the server's log, if it ends instead.
    #[track_caller]
    pub fn start(self) -> Server {
        match self.try_start() {
            Ok(server) => server,
            Err(log) => panic!("the server does not start; its log:\n{log}"),
        }
    }

    /// Starts the server and waits until it replies. The error is the server's log.
    pub fn try_start(self) -> Result<Server, String> {
        let dir = self.dir.map_or_else(Dir::private, Dir::Given);
        let launch = Launch {
            program: self.program,
            settings: defaults(self.config_file.as_deref()).chain(self.settings).collect(),
            config_file: self.config_file,
            sentinel: self.sentinel,
            module: self.module,
            dir: dir.path().to_owned(),
        };
        let mut log = String::new();
        for _ in 0..PORTS {
            let running = launch.start();
            match wait_until_ready(running.as_ref(), 0) {
                Ok(()) => {
                    return Ok(Server { running, version: OnceLock::new(), dir });
                }
                Err(NotReady::PortTaken) => log = running.log(),
                Err(NotReady::Ended | NotReady::Silent) => return Err(running.log()),
            }
        }
        Err(log)
    }
}

/// Settings of servers without a configuration file: no persistence, and no delay for replicas.
fn defaults(config_file: Option<&Path>) -> impl Iterator<Item = (String, String)> {
    let settings = [("save", ""), ("appendonly", "no"), ("repl-diskless-sync-delay", "0")];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter();
    let threads = io_threads().map(|count| ("io-threads".to_owned(), count));
    settings.chain(threads).filter(move |_| config_file.is_none())
}

impl Launch {
    fn start(&self) -> Box<dyn Running> {
        if in_containers() {
            Box::new(crate::container::Container::start(self))
        } else {
            Box::new(Process::start(self))
        }
    }
}

/// A running server for one test. Dropping it ends the server and deletes its directory.
///
/// Dropped during a panic, it prints the end of the log and keeps the directory.
pub struct Server {
    // Fields are dropped in this order: the server before its directory.
    running: Box<dyn Running>,
    version: OnceLock<Version>,
    dir: Dir,
}

impl Server {
    /// A server with the module and default settings.
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// A server with other settings.
    pub fn builder() -> Builder {
        Builder {
            program: server_program(),
            config_file: None,
            sentinel: false,
            settings: Vec::new(),
            module: Some(Module { path: module_path(), arguments: Vec::new() }),
            dir: None,
        }
    }

    /// The address that it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.running.addr()
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.addr().port()
    }

    /// Its process id on this machine, also if it runs in a container.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// Its directory, with its persistence files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        self.running.log()
    }

    /// Whether it runs in a container.
    pub fn is_container(&self) -> bool {
        in_containers()
    }

    /// A client library that uses RESP2.
    pub fn client(&self) -> Client {
        self.client_with(ProtocolVersion::RESP2)
    }

    /// A new connection with RESP2. Reads time out after a minute.
    #[track_caller]
    pub fn connect(&self) -> Connection {
        self.connect_with(ProtocolVersion::RESP2)
    }

    /// A new connection with RESP3. Reads time out after a minute.
    #[track_caller]
    pub fn connect3(&self) -> Connection {
        self.connect_with(ProtocolVersion::RESP3)
    }

    /// A new bare connection.
    #[track_caller]
    pub fn raw(&self) -> Raw {
        Raw::connect(self.addr()).expect("server accepts the connection")
    }

    /// Its family and version.
    #[track_caller]
    pub fn version(&self) -> Version {
        *self.version.get_or_init(|| {
            let info: String = redis::cmd("INFO").arg("server").query(&mut self.connect()).expect("INFO server");
            Version::from_info(&info).expect("INFO server tells the version")
        })
    }

    /// Whether this server, where it runs, has `feature`. A missing one is a reason for [`skip`](crate::skip).
    pub fn can(&self, feature: Feature) -> bool {
        let here = feature != Feature::HostFiles || !self.is_container();
        here && self.version().has(feature)
    }

    /// A field of a section of `INFO`.
    ///
    /// Tests poll this, and a closed connection would keep its port for a minute: this one is reset.
    #[track_caller]
    pub fn info(&self, section: &str, field: &str) -> Option<String> {
        let mut connection = self.raw();
        let reply = connection.call(&[b"INFO", section.as_bytes()]);
        connection.reset();
        let info: String = redis::from_redis_value(reply).expect("INFO");
        let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        Some(value.trim_end().to_owned())
    }

    /// Kills it with SIGKILL and waits until it has ended.
    pub fn kill9(&mut self) {
        self.running.signal(libc::SIGKILL);
        self.wait_until_ended();
    }

    /// Pauses it with SIGSTOP, and waits until it has stopped.
    #[track_caller]
    pub fn stop(&self) {
        self.running.signal(libc::SIGSTOP);
        let state = format!("/proc/{}/stat", self.pid());
        until(SOON, "the server has stopped", || {
            // The state follows the name in parentheses, which may contain anything.
            fs::read_to_string(&state)
                .is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")))
        });
    }

    /// The server's end of a connection, by the kernel's account. The server runs as a process of this machine, and may be paused.
    #[track_caller]
    pub fn socket(&self, connection: SocketAddr) -> Option<Socket> {
        let (SocketAddr::V4(here), SocketAddr::V4(there)) = (self.addr(), connection) else { panic!("IPv4 only") };
        Socket::find(here, there).expect("the kernel tells of its connections")
    }

    /// Whether the disconnect of `connection` has reached the server's side, by the kernel's account. The server may be paused.
    #[track_caller]
    pub fn has_lost(&self, connection: SocketAddr) -> bool {
        if !self.is_container() {
            return !self.socket(connection).is_some_and(Socket::is_established);
        }
        let table = fs::read_to_string(format!("/proc/{}/net/tcp", self.pid())).expect("the container's connections");
        let port = |port: u16| format!(":{port:04X}");
        let (here, there, established) = (port(self.port()), port(connection.port()), "01");
        !table.lines().any(|line| {
            // number, local address, remote address, state
            let words: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
            matches!(*words, [_, local, remote, state]
                if local.ends_with(&here) && remote.ends_with(&there) && state == established)
        })
    }

    /// Continues a paused server: SIGCONT.
    pub fn cont(&self) {
        self.running.signal(libc::SIGCONT);
    }

    /// Shuts it down with `SHUTDOWN`, which saves as configured, and waits until it has ended.
    ///
    /// # Panics
    ///
    /// If it refuses.
    #[track_caller]
    pub fn shutdown(&mut self) {
        // A server that shuts down closes the connection. A reply is an error.
        let reply: redis::RedisResult<Value> = redis::cmd("SHUTDOWN").query(&mut self.connect());
        if let Err(error) = &reply
            && !error.is_io_error()
        {
            panic!("SHUTDOWN: {error}");
        }
        self.wait_until_ended();
        self.has_no_internal_errors();
    }

    /// Whether it has ended, for any reason.
    pub fn ended(&self) -> bool {
        self.running.ended()
    }

    /// Waits until it has ended.
    #[track_caller]
    pub fn wait_until_ended(&self) {
        until(SOON, "the server has ended", || self.running.ended());
    }

    /// Starts it again with the same port, directory and arguments, and waits until it replies. If it runs, it is shut down
    /// first.
    ///
    /// # Panics
    ///
    /// With the server's log, if it does not start.
    #[track_caller]
    pub fn restart(&mut self) {
        if !self.running.ended() {
            self.shutdown();
        }
        let end = Instant::now() + SOON;
        loop {
            let seen = self.running.log().len();
            self.running.start_again();
            match wait_until_ready(self.running.as_ref(), seen) {
                Ok(()) => return,
                // Another connection may use the port for a moment.
                Err(NotReady::PortTaken) if Instant::now() < end => thread::sleep(Duration::from_millis(50)),
                Err(_) => panic!("the server does not start again; its log:\n{}", self.log()),
            }
        }
    }

    /// Makes it a replica of `primary` and waits until the link is up and the first copy is loaded.
    #[track_caller]
    pub fn replica_of(&self, primary: &Server) {
        let address = primary.addr();
        redis::cmd("REPLICAOF")
            .arg(address.ip().to_string())
            .arg(address.port())
            .exec(&mut self.connect())
            .expect("REPLICAOF");
        until(SOON, "the replica's link to its primary is up", || {
            self.info("replication", "master_link_status").as_deref() == Some("up")
        });
    }

    /// Makes it a primary.
    #[track_caller]
    pub fn replica_of_no_one(&self) {
        redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut self.connect()).expect("REPLICAOF NO ONE");
    }

    /// Waits until this primary has a replica online.
    #[track_caller]
    pub fn wait_replica_online(&self) {
        self.wait_replicas_online(1);
    }

    /// Waits until this primary has `count` replicas online.
    #[track_caller]
    pub fn wait_replicas_online(&self, count: usize) {
        until(SOON, "the primary's replicas are online", || {
            let info: String = redis::cmd("INFO").arg("replication").query(&mut self.connect()).expect("INFO");
            info.lines().filter(|line| line.starts_with("slave") && line.contains("state=online")).count() >= count
        });
    }

    /// Waits until `replica` has received all that this primary has written so far.
    #[track_caller]
    pub fn wait_for_replica(&self, replica: &Server) {
        let offset = |server: &Server, field: &str| -> Option<i64> { server.info("replication", field)?.parse().ok() };
        let written = offset(self, "master_repl_offset").expect("a master has an offset");
        until(SOON, "the replica is in step", || {
            offset(replica, "slave_repl_offset").is_some_and(|taken| taken >= written)
        });
    }

    /// Asserts that the module has reported no internal error. The log has the first one of each kind.
    #[track_caller]
    fn has_no_internal_errors(&self) {
        let log = self.log();
        let error = log.lines().find(|line| line.contains("holdfast: internal error"));
        assert!(error.is_none(), "the server on {} reports: {}", self.addr(), error.unwrap_or_default());
    }

    fn client_with(&self, protocol: ProtocolVersion) -> Client {
        let address = ConnectionAddr::Tcp(self.addr().ip().to_string(), self.port());
        // No CLIENT SETINFO: tests count commands and errors.
        let settings = RedisConnectionInfo::default().set_protocol(protocol).set_skip_set_lib_name();
        let info = address.into_connection_info().expect("the address is valid").set_redis_settings(settings);
        Client::open(info).expect("address is valid")
    }

    #[track_caller]
    fn connect_with(&self, protocol: ProtocolVersion) -> Connection {
        let connection = self.client_with(protocol).get_connection().expect("server accepts the connection");
        connection.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout is valid");
        connection
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            const LINES: usize = 30;
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let end = &lines[lines.len().saturating_sub(LINES)..];
            eprintln!("the end of the log of the server on {}:\n{}", self.addr(), end.join("\n"));
        } else {
            self.has_no_internal_errors();
        }
    }
}

enum NotReady {
    PortTaken,
    Ended,
    Silent,
}

/// Waits until a new server replies. `seen` is the length of its log before this start.
fn wait_until_ready(running: &dyn Running, seen: usize) -> Result<(), NotReady> {
    let begin = Instant::now();
    let mut outcome = Err(NotReady::Silent);
    eventually(START, || {
        if running.ended() {
            let taken = running.log().get(seen..).is_some_and(|log| log.contains("Address already in use"));
            outcome = Err(if taken { NotReady::PortTaken } else { NotReady::Ended });
            return true;
        }
        // Not contacted before it is ready: a connection attempt to a free port of the ephemeral range can connect to itself, and
        // then the server finds its port taken.
        let is_ready = running.log().get(seen..).is_some_and(|log| log.contains("Ready to accept connections"));
        if (is_ready || begin.elapsed() > QUIET) && answers(running.addr()) {
            outcome = Ok(());
        }
        outcome.is_ok()
    });
    outcome
}

/// Whether a server has loaded its data and executes commands. It may require a password.
fn answers(address: SocketAddr) -> bool {
    let ping = || {
        let mut raw = Raw::connect(address).ok()?;
        raw.send(&[b"PING"]).ok()?;
        raw.read_timeout(Duration::from_secs(1)).ok()?
    };
    match ping() {
        Some(Value::ServerError(error)) => error.code() == "NOAUTH",
        Some(Value::SimpleString(_)) => true,
        // `None`, or its own command: connected to itself.
        _ => false,
    }
}
