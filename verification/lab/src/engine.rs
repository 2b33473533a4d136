//! Containers with their own addresses, on a network of their own, and faults in them.
//!
//! No port is published: the lab reaches the containers through the bridge. Everything has the label `holdfast-lab`, limited
//! memory and time, and is removed when its [`Site`] is dropped. (If the lab itself was killed, `scripts/lab` removes the rest
//! by the label.)

use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Output, Stdio};
use std::time::Duration;

use redis::Connection;

use crate::clock::until;
use crate::options::{Options, workspace};

/// Why a scenario could not be run.
#[derive(Debug)]
pub struct LabError(pub String);

impl fmt::Display for LabError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for LabError {
    fn from(error: io::Error) -> LabError {
        LabError(error.to_string())
    }
}

impl From<redis::RedisError> for LabError {
    fn from(error: redis::RedisError) -> LabError {
        LabError(error.to_string())
    }
}

/// The result of an operation that may fail with [`LabError`].
pub type Result<T> = std::result::Result<T, LabError>;

/// The module's path inside a container.
pub const MODULE: &str = "/holdfast/libholdfast.so";
/// The path of an older build of it, if there is one.
pub const OLD_MODULE: &str = "/holdfast/old.so";
/// The path of another server than the image's.
const SERVER: &str = "/holdfast/server";

/// What the containers of a site have in addition to the image.
#[derive(Clone, Debug, Default)]
pub struct Equipment {
    /// Another server: a program that runs with the image's C library.
    pub server: Option<PathBuf>,
    /// An older build of the module.
    pub old_module: Option<PathBuf>,
}

impl Equipment {
    /// The Valkey 9.1 that `scripts/servers` has unpacked.
    pub fn valkey_9_1() -> Equipment {
        let server = Some(workspace().join(".servers/valkey-9.1/bin/valkey-server"));
        Equipment { server, ..Equipment::default() }
    }

    /// The files to mount, and where.
    fn mounts(&self) -> Result<Vec<String>> {
        let mount = |(file, place): (&PathBuf, &str)| {
            let file = fs::canonicalize(file).map_err(|why| LabError(format!("{}: {why}", file.display())))?;
            Ok(format!("{}:{place}:ro", file.display()))
        };
        let server = self.server.iter().map(|file| (file, SERVER));
        server.chain(self.old_module.iter().map(|file| (file, OLD_MODULE))).map(mount).collect()
    }

    fn program(&self) -> &'static str {
        if self.server.is_some() { SERVER } else { "redis-server" }
    }
}

/// The lifetime of a container if the lab fails to remove it.
const LONGEST_LIFE: &str = "7200";

/// The lab's own timeout for a server.
const SOON: Duration = Duration::from_millis(1_500);
/// How many lines of a log are shown after a failure.
const LAST_LINES: usize = 12;

/// Containers on one network.
#[derive(Debug)]
pub struct Site {
    network: String,
    folder: PathBuf,
    equipment: Equipment,
    /// The nodes, in the order of their addresses.
    pub nodes: Vec<Node>,
}

/// A container with its own address. [`Node::start`] starts its servers.
#[derive(Debug)]
pub struct Node {
    name: String,
    network: String,
    /// Its address.
    pub ip: String,
    init: String,
    folder: PathBuf,
    program: &'static str,
}

impl Site {
    /// Creates a network with `size` containers, in which nothing runs yet.
    pub fn new(purpose: &str, size: usize, equipment: Equipment, options: &Options) -> Result<Site> {
        let name = format!("holdfast-lab-{}-{purpose}", process::id());
        let subnet = make_network(&name)?;
        let mut site = Site {
            folder: std::env::temp_dir().join(format!("lab-{}-{purpose}", process::id())),
            network: name,
            equipment,
            nodes: Vec::new(),
        };
        fs::create_dir_all(&site.folder)?;
        let module = fs::canonicalize(&options.module)
            .map_err(|why| LabError(format!("{}: {why}", options.module.display())))?;
        for index in 0..size {
            let node = site.start_node(&format!("{subnet}.{}", 11 + index), &module, &options.image)?;
            site.nodes.push(node);
        }
        Ok(site)
    }

    fn start_node(&self, ip: &str, module: &Path, image: &str) -> Result<Node> {
        let index = self.nodes.len();
        let name = format!("{}-{index}", self.network);
        let folder = self.folder.join(index.to_string());
        fs::create_dir_all(&folder)?;
        let user = rustix::process::getuid().as_raw().to_string();
        let (label, shared) = (label(), format!("{}:/lab", folder.display()));
        let module = format!("{}:{MODULE}:ro", module.display());
        let mut command = vec![
            "run",
            "--detach",
            "--rm",
            "--init",
            // The image's own health check uses a server that the lab starts, stops and pauses.
            "--no-healthcheck",
            "--name",
            &name,
            "--label",
            &label,
            "--network",
            &self.network,
            "--ip",
            ip,
            "--memory",
            "256m",
            "--pids-limit",
            "100",
            // So that both sides can read and delete the other's files in the shared folder.
            "--user",
            &user,
            "--volume",
            &module,
            "--volume",
            &shared,
        ];
        let mounts = self.equipment.mounts()?;
        command.extend(mounts.iter().flat_map(|mount| ["--volume", mount]));
        command.extend(["--entrypoint", "sleep", image, LONGEST_LIFE]);
        docker(&command)?;
        let init = docker(&["inspect", "--format", "{{.State.Pid}}", &name])?;
        let program = self.equipment.program();
        Ok(Node { name, network: self.network.clone(), ip: ip.to_owned(), init, folder, program })
    }

    /// Drops what one node sends to the others. Clients reach it.
    pub fn cut_from_peers(&self, cut: usize) -> Result<()> {
        self.peers_of(cut).try_for_each(|peer| self.nodes[cut].black_hole("add", peer))
    }

    /// Ends [`Site::cut_from_peers`].
    pub fn join_peers(&self, cut: usize) -> Result<()> {
        self.peers_of(cut).try_for_each(|peer| self.nodes[cut].black_hole("del", peer))
    }

    /// Drops what the others send to one node. Clients reach it.
    pub fn cut_incoming(&self, node: usize) -> Result<()> {
        self.peers_of(node).try_for_each(|peer| peer.black_hole("add", &self.nodes[node]))
    }

    /// Ends [`Site::cut_incoming`].
    pub fn join_incoming(&self, node: usize) -> Result<()> {
        self.peers_of(node).try_for_each(|peer| peer.black_hole("del", &self.nodes[node]))
    }

    fn peers_of(&self, node: usize) -> impl Iterator<Item = &Node> {
        self.nodes.iter().enumerate().filter(move |(index, _)| *index != node).map(|(_, peer)| peer)
    }

    /// Makes the network of every node unreliable until the result is dropped.
    pub fn bad_network(&self, network_faults: NetworkFaults, seed: u64) -> Result<Vec<BadNetwork>> {
        self.nodes.iter().zip(seed..).map(|(node, seed)| node.bad_network(network_faults, seed)).collect()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for node in &self.nodes {
            let _ = docker(&["rm", "--force", "--volumes", &node.name]);
        }
        let _ = docker(&["network", "rm", &self.network]);
        if std::env::var_os("LAB_KEEP").is_none() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

impl Node {
    /// Writes a configuration and starts a server with it, as a daemon named `process`.
    pub fn start(&self, process: &str, configuration: &str, flags: &[&str]) -> Result<()> {
        let common = format!(
            "daemonize yes\npidfile /lab/{process}.pid\nlogfile /lab/{process}.log\ndir /lab\nprotected-mode no\n"
        );
        fs::write(self.folder.join(format!("{process}.conf")), common + configuration)?;
        let _ = fs::remove_file(self.folder.join(format!("{process}.pid")));
        let file = format!("/lab/{process}.conf");
        let mut command = vec!["exec", &self.name, self.program, &file];
        command.extend(flags);
        docker(&command)?;
        let pid_file = self.folder.join(format!("{process}.pid"));
        if until(Duration::from_secs(5), || pid_file.exists()) {
            Ok(())
        } else {
            Err(LabError(format!("{process} on {} did not start:\n{}", self.ip, self.log(process))))
        }
    }

    /// Sends a signal (`KILL`, `STOP`, `CONT`) to a server.
    pub fn signal(&self, process: &str, signal: &str) -> Result<()> {
        let script = format!("kill -{signal} $(cat /lab/{process}.pid)");
        self.inside(&["--mount", "--pid"], &["sh", "-c", &script])
    }

    /// Takes the node off the network: neither peers nor clients reach it.
    pub fn cut(&self) -> Result<()> {
        docker(&["network", "disconnect", &self.network, &self.name]).map(drop)
    }

    /// Ends [`Node::cut`]. The address stays the same.
    pub fn join(&self) -> Result<()> {
        docker(&["network", "connect", "--ip", &self.ip, &self.network, &self.name]).map(drop)
    }

    fn black_hole(&self, verb: &str, to: &Node) -> Result<()> {
        self.inside(&["--net"], &["ip", "route", verb, "blackhole", &format!("{}/32", to.ip)])
    }

    fn bad_network(&self, network_faults: NetworkFaults, seed: u64) -> Result<BadNetwork> {
        let script = workspace().join("verification/lab/net/bad_network.py");
        let numbers = [network_faults.loss_percent, network_faults.delay_ms, network_faults.jitter_ms]
            .map(|number| number.to_string());
        let mut child = Command::new("nsenter")
            .args(["--target", &self.init, "--net", "--", "python3"])
            .arg(script)
            .args(numbers)
            .arg(seed.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let network = BadNetwork { child };
        if line.trim() == "ready" { Ok(network) } else { Err(LabError("the network faults can't be set up".into())) }
    }

    /// A connection for the lab itself, with a short timeout.
    pub fn connect(&self, port: u16) -> Result<Connection> {
        let client = redis::Client::open((self.ip.as_str(), port))?;
        let connection = client.get_connection_with_timeout(SOON)?;
        connection.set_read_timeout(Some(SOON))?;
        connection.set_write_timeout(Some(SOON))?;
        Ok(connection)
    }

    /// Lines of a server's log that report a crash, a panic or a failed assertion.
    pub fn crashes(&self, process: &str) -> Vec<String> {
        const SIGNS: [&str; 4] = ["crashed by signal", "ASSERTION FAILED", "panicked at", "BUG REPORT START"];
        let log = self.log(process);
        log.lines().filter(|line| SIGNS.iter().any(|sign| line.contains(sign))).map(str::to_owned).collect()
    }

    /// The end of a server's log, with a heading.
    pub fn last_words(&self, process: &str) -> String {
        let log = self.log(process);
        let lines: Vec<_> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        format!("\n-- {process} on {}\n{}", self.ip, last.join("\n"))
    }

    /// The server's log so far.
    pub fn log(&self, process: &str) -> String {
        fs::read(self.folder.join(format!("{process}.log")))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Runs a program in some of the container's namespaces. It is faster than `docker exec`, and the network needs no program
    /// inside the image.
    fn inside(&self, namespaces: &[&str], command: &[&str]) -> Result<()> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &self.init]).args(namespaces);
        run(nsenter.arg("--").args(command)).map(drop)
    }
}

/// The faults for each packet that a node sends.
#[derive(Clone, Copy, Debug)]
pub struct NetworkFaults {
    /// The percentage of lost packets.
    pub loss_percent: u32,
    /// The delay of the others.
    pub delay_ms: u32,
    /// The variation of the delay, so that packets overtake each other.
    pub jitter_ms: u32,
}

/// The network of a node is unreliable until this is dropped.
pub struct BadNetwork {
    child: Child,
}

impl Drop for BadNetwork {
    fn drop(&mut self) {
        // Closing its input tells the program to remove the faults.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The label of this lab's containers and networks.
fn label() -> String {
    let id = std::env::var("LAB_ID").unwrap_or_else(|_| process::id().to_string());
    format!("holdfast-lab={id}")
}

/// Tries subnets until one is free: the engine refuses those that overlap another network of the machine.
fn make_network(name: &str) -> Result<String> {
    let first = process::id() % 200;
    let mut last = LabError("no subnet tried".into());
    for step in 0..8 {
        let subnet = format!("10.213.{}", (first + 25 * step) % 250);
        let range = format!("{subnet}.0/24");
        let made = docker(&["network", "create", "--internal", "--label", &label(), "--subnet", &range, name]);
        match made {
            Ok(_) => return Ok(subnet),
            Err(why) => last = why,
        }
    }
    Err(last)
}

fn docker(arguments: &[&str]) -> Result<String> {
    let output = run(Command::new("docker").args(arguments))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn run(command: &mut Command) -> Result<Output> {
    let output = command.output().map_err(|why| LabError(format!("{:?}: {why}", command.get_program())))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(LabError(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())))
    }
}
