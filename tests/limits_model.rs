//! Random requests with limits 1, 2, 3 and none, with leases that expire and connections that break. A server and a plain
//! model never differ. Half of the owners block, the other half requests through sessions, in the same queues.

use support::{Random, Server};

use crate::lines::setting;
use crate::random_run::{Mix, Run};

const MIX: Mix =
    Mix { owners: 12, keys: 6, release: 45, rare: 4, crash: 2, unblock: 15, several: 12, wait: 60, sessions: 3 };

#[test]
fn server_agrees_with_model() {
    let steps = setting("HOLDFAST_STEPS", 20_000);
    let server = Server::builder().arg("appendonly", "yes").arg("appendfsync", "no").start();
    let mut run = Run::new(server, MIX, Random::new());
    for step in 0..steps {
        if step == steps / 2 {
            run.restart();
        }
        run.step();
    }
    run.compare_all();
    println!("{steps} steps: {:?}", run.coverage);
    let all = ["granted", "refused", "waits", "served", "released", "expired", "crash", "deadlock", "other limit"];
    let of_sessions = ["served by an event", "session crash", "repeated", "cancelled"];
    for what in all.into_iter().chain(of_sessions) {
        assert!(run.coverage.count(what) > steps / 1000, "the run had too few of: {what}");
    }
    for what in ["read a loss", "read a timeout"] {
        assert!(run.coverage.count(what) > steps / 20_000, "the run had too few of: {what}");
    }
}
