//! Containers with addresses of their own, on a network of their own, and what can be done to them.
//!
//! Nothing is published: the lab reaches the containers through the bridge. Everything carries the label
//! `holdfast-lab`, is limited in memory and time, and is removed when a [`Site`] goes. (What a lab leaves behind that was
//! itself killed, `scripts/lab` removes by the label.)

use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Output, Stdio};
use std::time::Duration;

use redis::Connection;

use crate::clock::until;
use crate::options::{Options, workspace};

/// What kept a scenario from being run.
#[derive(Debug)]
pub struct Trouble(pub String);

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Trouble {
        Trouble(error.to_string())
    }
}

impl From<redis::RedisError> for Trouble {
    fn from(error: redis::RedisError) -> Trouble {
        Trouble(error.to_string())
    }
}

/// Shorthand for what may run into [`Trouble`].
pub type Result<T> = std::result::Result<T, Trouble>;

/// Where the module lies inside a container.
pub const MODULE: &str = "/holdfast/libholdfast.so";
/// Where an older build of it lies, if one was asked for.
pub const OLD_MODULE: &str = "/holdfast/old.so";
/// Where another server than the image's lies.
const SERVER: &str = "/holdfast/server";

/// What the containers of a site have that the image has not.
#[derive(Clone, Debug, Default)]
pub struct Equipment {
    /// Another server: a program that the image's C library can run.
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

    /// What is to be mounted, and where.
    fn mounts(&self) -> Result<Vec<String>> {
        let mount = |(file, place): (&PathBuf, &str)| {
            let file = fs::canonicalize(file).map_err(|why| Trouble(format!("{}: {why}", file.display())))?;
            Ok(format!("{}:{place}:ro", file.display()))
        };
        let server = self.server.iter().map(|file| (file, SERVER));
        server.chain(self.old_module.iter().map(|file| (file, OLD_MODULE))).map(mount).collect()
    }

    fn program(&self) -> &'static str {
        if self.server.is_some() { SERVER } else { "redis-server" }
    }
}

/// The longest that a container lives, whatever happens to the lab: a backstop, not a plan.
const LONGEST_LIFE: &str = "7200";

/// How long the lab itself waits for a server.
const SOON: Duration = Duration::from_millis(1_500);
/// How much of a log is shown when something goes wrong.
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

/// A container with an address of its own; its servers are started with [`Node::start`].
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
    /// Makes a network and `size` containers on it, in which nothing runs yet.
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
        let module =
            fs::canonicalize(&options.module).map_err(|why| Trouble(format!("{}: {why}", options.module.display())))?;
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
            // The image's own asks a server that the lab starts, stops and freezes as it likes.
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
            // So that both sides can read and remove what the other wrote into the shared folder.
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

    /// Lets nothing of what one node sends reach the others. Clients reach it.
    pub fn cut_from_peers(&self, cut: usize) -> Result<()> {
        self.peers_of(cut).try_for_each(|peer| self.nodes[cut].black_hole("add", peer))
    }

    /// Ends [`Site::cut_from_peers`].
    pub fn join_peers(&self, cut: usize) -> Result<()> {
        self.peers_of(cut).try_for_each(|peer| self.nodes[cut].black_hole("del", peer))
    }

    /// Lets nothing of what the others send reach one node. Clients reach it.
    pub fn deafen(&self, deaf: usize) -> Result<()> {
        self.peers_of(deaf).try_for_each(|peer| peer.black_hole("add", &self.nodes[deaf]))
    }

    /// Ends [`Site::deafen`].
    pub fn hear(&self, deaf: usize) -> Result<()> {
        self.peers_of(deaf).try_for_each(|peer| peer.black_hole("del", &self.nodes[deaf]))
    }

    fn peers_of(&self, node: usize) -> impl Iterator<Item = &Node> {
        self.nodes.iter().enumerate().filter(move |(index, _)| *index != node).map(|(_, peer)| peer)
    }

    /// Makes the network of every node a bad one, until what this returns is dropped.
    pub fn bad_network(&self, weather: Weather, seed: u64) -> Result<Vec<BadNetwork>> {
        self.nodes.iter().zip(seed..).map(|(node, seed)| node.bad_network(weather, seed)).collect()
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
    /// Writes a configuration and starts a server with it, as a daemon known as `process`.
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
            Err(Trouble(format!("{process} on {} did not start:\n{}", self.ip, self.log(process))))
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

    /// Ends [`Node::cut`], under the old address.
    pub fn join(&self) -> Result<()> {
        docker(&["network", "connect", "--ip", &self.ip, &self.network, &self.name]).map(drop)
    }

    fn black_hole(&self, verb: &str, to: &Node) -> Result<()> {
        self.inside(&["--net"], &["ip", "route", verb, "blackhole", &format!("{}/32", to.ip)])
    }

    fn bad_network(&self, weather: Weather, seed: u64) -> Result<BadNetwork> {
        let script = workspace().join("verification/lab/net/bad_network.py");
        let numbers = [weather.loss_percent, weather.delay_ms, weather.jitter_ms].map(|number| number.to_string());
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
        if line.trim() == "ready" { Ok(network) } else { Err(Trouble("the network can't be made a bad one".into())) }
    }

    /// A connection for the lab itself, which gives up soon.
    pub fn connect(&self, port: u16) -> Result<Connection> {
        let client = redis::Client::open((self.ip.as_str(), port))?;
        let connection = client.get_connection_with_timeout(SOON)?;
        connection.set_read_timeout(Some(SOON))?;
        connection.set_write_timeout(Some(SOON))?;
        Ok(connection)
    }

    /// Lines of a server's log that tell of a crash, a panic or a failed assertion.
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

    /// What a server has printed so far.
    pub fn log(&self, process: &str) -> String {
        fs::read(self.folder.join(format!("{process}.log")))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Runs a program in some of the container's namespaces: faster than `docker exec`, and the network needs no
    /// program inside the image.
    fn inside(&self, namespaces: &[&str], command: &[&str]) -> Result<()> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--target", &self.init]).args(namespaces);
        run(nsenter.arg("--").args(command)).map(drop)
    }
}

/// What a bad network does to each packet that leaves a node.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// How many in a hundred are lost.
    pub loss_percent: u32,
    /// How late the others come.
    pub delay_ms: u32,
    /// By how much more or less than that, so that one overtakes the other.
    pub jitter_ms: u32,
}

/// The network of a node is a bad one while this lives.
pub struct BadNetwork {
    child: Child,
}

impl Drop for BadNetwork {
    fn drop(&mut self) {
        // Closing its input tells it to put the network right.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// What marks containers and networks as this lab's.
fn label() -> String {
    let id = std::env::var("LAB_ID").unwrap_or_else(|_| process::id().to_string());
    format!("holdfast-lab={id}")
}

/// A free subnet is found by trying: the engine refuses one that overlaps another network of the machine.
fn make_network(name: &str) -> Result<String> {
    let first = process::id() % 200;
    let mut last = Trouble("no subnet tried".into());
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
    let output = command.output().map_err(|why| Trouble(format!("{:?}: {why}", command.get_program())))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(Trouble(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())))
    }
}
