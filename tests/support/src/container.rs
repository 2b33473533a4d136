//! A server in its own container: `HOLDFAST_CONTAINER=1`.
//!
//! `make test-containers` sets the variables: `HOLDFAST_IMAGE` is the image, `HOLDFAST_NETWORK` a private network, and
//! `HOLDFAST_MODULE` the module's path inside the image.

use std::env;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use crate::launch::{Launch, Running};

const PORT: u16 = 6379;
/// The server's directory in the container.
const DIR: &str = "/data";

/// A container, which is removed when this is dropped. `scripts/test-containers` removes those of tests that were
/// ended from outside.
pub(crate) struct Container {
    id: String,
    /// Read at each start: a container that has ended has no address.
    address: Mutex<SocketAddr>,
}

impl Container {
    /// Starts the server. It may not accept connections yet, or may have ended already.
    pub(crate) fn start(launch: &Launch) -> Self {
        let id = run(launch);
        let address = address_of(&id).unwrap_or_else(|| (IpAddr::from([127, 0, 0, 1]), PORT).into());
        Self { id, address: Mutex::new(address) }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = docker(&["rm", "--force", "--volumes", &self.id]);
    }
}

impl Running for Container {
    fn addr(&self) -> SocketAddr {
        *self.address.lock().expect("no thread panicked with the lock")
    }

    fn pid(&self) -> u32 {
        inspect("{{.State.Pid}}", &self.id).parse().expect("docker inspect returns the process id")
    }

    fn signal(&self, signal: i32) {
        let killed = docker(&["kill", "--signal", &signal.to_string(), &self.id]);
        assert!(killed.is_ok() || self.ended(), "{killed:?}");
    }

    fn ended(&self) -> bool {
        inspect("{{.State.Running}}", &self.id) == "false"
    }

    fn start_again(&self) {
        docker(&["start", &self.id]).expect("the container starts again");
        if let Some(address) = address_of(&self.id) {
            *self.address.lock().expect("no thread panicked with the lock") = address;
        }
    }

    fn log(&self) -> String {
        docker(&["logs", &self.id]).unwrap_or_else(|error| error)
    }
}

/// Starts a container, and returns its id.
fn run(launch: &Launch) -> String {
    let image = env::var("HOLDFAST_IMAGE").expect("HOLDFAST_IMAGE names the image");
    let (label, volume) = (format!("holdfast.test={}", std::process::id()), format!("{}:{DIR}", launch.dir.display()));
    // Tests connect to the container's own address: no port is published. The image's own health check would be another
    // client of the server, every few seconds. The files belong to this user, who deletes them.
    let mut command = vec!["run", "--detach", "--label", &label, "--volume", &volume, "--no-healthcheck"];
    let user = user();
    command.extend(["--user", &user, "--memory", "2g", "--cpus", "2"]);
    let network = env::var("HOLDFAST_NETWORK");
    command.extend(network.iter().flat_map(|network| ["--network", network]));
    let arguments = arguments(launch);
    command.push(&image);
    command.extend(arguments.iter().map(String::as_str));
    let id = docker(&command).unwrap_or_else(|error| panic!("can't start a container of {image}: {error}"));
    id.trim().to_owned()
}

fn arguments(launch: &Launch) -> Vec<String> {
    let mut arguments = vec!["redis-server".to_owned()];
    arguments.extend(launch.config_file.as_ref().map(|path| inside(launch, path)));
    let mut add = |name: &str, value: &str| arguments.extend([format!("--{name}"), value.to_owned()]);
    add("bind", "*");
    add("protected-mode", "no");
    add("port", &PORT.to_string());
    // "local" would mean inside the container.
    add("enable-debug-command", "yes");
    add("enable-module-command", "yes");
    for (name, value) in &launch.settings {
        add(name, value);
    }
    add("dir", DIR);
    if let Some(module) = &launch.module {
        add("loadmodule", &module.path.display().to_string());
        arguments.extend(module.arguments.iter().cloned());
    }
    arguments
}

/// The path of a server's file inside the container.
fn inside(launch: &Launch, path: &Path) -> String {
    let name = path.strip_prefix(&launch.dir).expect("a container sees only its own directory");
    Path::new(DIR).join(name).display().to_string()
}

fn user() -> String {
    // SAFETY: calls without arguments that can't fail.
    let (user, group) = unsafe { (libc::getuid(), libc::getgid()) };
    format!("{user}:{group}")
}

/// The container's own address, or `None` if it has ended.
fn address_of(id: &str) -> Option<SocketAddr> {
    let address: IpAddr = inspect("{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", id).parse().ok()?;
    Some((address, PORT).into())
}

fn inspect(format: &str, id: &str) -> String {
    docker(&["inspect", "--format", format, id]).expect("docker knows the container").trim().to_owned()
}

/// What docker prints; what it prints about an error if it fails. (The log of a container may be in either stream.)
fn docker(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("docker").args(arguments).output().expect("docker runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout) + &text(&output.stderr)) } else { Err(text(&output.stderr)) }
}
