//! A server in its own container: `HOLDFAST_CONTAINER=1`.
//!
//! `make test-containers` sets the variables: `HOLDFAST_IMAGE` is the image, `HOLDFAST_NETWORK` a private network, and
//! `HOLDFAST_MODULE` the module's path inside the image.

use std::env;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;

use testcontainers::core::{Healthcheck, Mount};
use testcontainers::runners::SyncRunner;
use testcontainers::{GenericImage, ImageExt};

use crate::launch::{Launch, Running};

type Started = testcontainers::Container<GenericImage>;

const PORT: u16 = 6379;
/// The server's directory in the container.
const DIR: &str = "/data";
const MEMORY: i64 = 2 << 30;
const CPU_NANOS: i64 = 2_000_000_000;

pub(crate) struct Container {
    started: Started,
    /// Read at each start: a container that has ended has no address.
    address: Mutex<SocketAddr>,
}

impl Container {
    /// Starts the server. It may not accept connections yet, or may have ended already.
    pub(crate) fn start(launch: &Launch) -> Self {
        let started = run(launch);
        let address = Mutex::new(address_of(&started).unwrap_or_else(|| (IpAddr::from([127, 0, 0, 1]), PORT).into()));
        Self { started, address }
    }

    fn docker(&self, arguments: &[&str]) -> Output {
        docker(&[arguments, &[self.started.id()]].concat())
    }
}

impl Running for Container {
    fn addr(&self) -> SocketAddr {
        *self.address.lock().expect("no thread panicked with the lock")
    }

    fn pid(&self) -> u32 {
        let output = self.docker(&["inspect", "--format", "{{.State.Pid}}"]);
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().expect("docker inspect returns the process id")
    }

    fn signal(&self, signal: i32) {
        let output = self.docker(&["kill", "--signal", &signal.to_string()]);
        assert!(output.status.success() || self.ended(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn ended(&self) -> bool {
        !self.started.is_running().expect("docker reports whether it runs")
    }

    fn start_again(&self) {
        self.started.start().expect("the container starts again");
        if let Some(address) = address_of(&self.started) {
            *self.address.lock().expect("no thread panicked with the lock") = address;
        }
    }

    fn log(&self) -> String {
        let bytes = [self.started.stdout_to_vec(), self.started.stderr_to_vec()].into_iter().flatten().flatten();
        String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
    }
}

fn run(launch: &Launch) -> Started {
    let image = env::var("HOLDFAST_IMAGE").expect("HOLDFAST_IMAGE names the image");
    let (name, tag) = image.split_once(':').unwrap_or((&image, "latest"));
    let request = GenericImage::new(name, tag)
        .with_cmd(arguments(launch))
        .with_mount(Mount::bind_mount(launch.dir.display().to_string(), DIR))
        .with_label("holdfast.test", std::process::id().to_string())
        // The image's own health check would be another client of the server, every few seconds.
        .with_health_check(Healthcheck::none())
        // The files belong to this user, who deletes them.
        .with_user(user())
        .with_host_config_modifier(|host| {
            // Tests connect to the container's own address: no port is published.
            host.publish_all_ports = Some(false);
            host.memory = Some(MEMORY);
            host.nano_cpus = Some(CPU_NANOS);
        });
    let request = match env::var("HOLDFAST_NETWORK") {
        Ok(network) => request.with_network(network),
        Err(_) => request,
    };
    request.start().unwrap_or_else(|error| panic!("can't start a container of {image}: {error}"))
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
fn address_of(started: &Started) -> Option<SocketAddr> {
    Some((started.get_bridge_ip_address().ok()?, PORT).into())
}

fn docker(arguments: &[&str]) -> Output {
    Command::new("docker").args(arguments).output().expect("docker runs")
}
