//! The examples of the client's README and of the project's README: the same code runs here.

use std::time::Duration;

use holdfast_client::{Error, Event, Locks, LossReason, MultiLock, RedLock, block_on};
use support::{Server, workspace};

use crate::common::say;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn server() -> (Server, Locks, String) {
    let server = Server::start();
    let url = format!("redis://{}", server.addr());
    let locks = Locks::open(&url).unwrap();
    (server, locks, url)
}

#[rustfmt::skip]
#[tokio::test]
async fn first_example_runs() -> Outcome {
    let (_server, _, url) = server();
    async fn print(fence: u64) -> Result<(), std::io::Error> {
        assert!(fence > 0);
        Ok(())
    }
use holdfast_client::{Locks, redis};
use std::time::Duration;

let locks = Locks::new(redis::Client::open(url)?);
let Some(guard) = locks.lock("printer").wait(Duration::from_secs(10)).acquire().await? else {
    return Err("the printer is busy".into());
};
guard.while_held(print(guard.fence())).await??;
guard.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn mutex_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let lock = locks.lock("a");
let guard = lock.try_acquire().await?.expect("the lock is free");
assert!(lock.try_acquire().await?.is_none());
assert!(lock.clone().wait(Duration::from_millis(20)).acquire().await?.is_none());
guard.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn events_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let mut events = locks.events();
let guard = locks.lock("a").try_acquire().await?.expect("the lock is free");
assert!(matches!(events.recv().await?, Event::Acquired { .. }));
guard.release().await?;
assert!(matches!(events.recv().await?, Event::Released { .. }));
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn guard_example_runs() -> Outcome {
    let (server, locks, _) = server();
let guard = locks.lock("a").try_acquire().await?.expect("the lock is free");
tokio::spawn(async move { drop(guard) }).await?;
locks.settle().await;
    assert!(crate::common::is_free(&server, "a"));
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn fence_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let first = locks.lock("a").try_acquire().await?.expect("the lock is free");
let fence = first.fence();
first.release().await?;
let second = locks.lock("a").try_acquire().await?.expect("the lock is free");
assert!(second.fence() > fence);
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn lease_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let job = locks.lock("job").ephemeral().try_acquire().await?.expect("the lock is free");
let short = locks.lock("short").lease(Duration::from_secs(5)).try_acquire().await?.expect("the lock is free");
short.renew(Duration::from_secs(10)).await?;
    job.check().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn readers_and_permits_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let readers = [
    locks.lock("report").shared().try_acquire().await?.expect("no writer"),
    locks.lock("report").shared().try_acquire().await?.expect("no writer"),
];
assert!(locks.lock("report").try_acquire().await?.is_none());
let permit = locks.lock("licences").limit(5).try_acquire().await?.expect("one of five");
    permit.check().await?;
    drop(readers);
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn several_keys_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let both = locks.lock_all(["account:1", "account:2"]).try_acquire().await?.expect("both are free");
both.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn second_lock_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let mut from = locks.lock("account:1").try_acquire().await?.expect("the lock is free");
let to = from.acquire(&locks.lock("account:2").wait_forever()).await?.expect("it waits for it");
to.release().await?;
let again = from.acquire(&locks.lock("account:1")).await?.expect("a re-entry succeeds");
again.release().await?;
from.check().await?;
    Ok(())
}

#[rustfmt::skip]
#[test]
fn block_on_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let guard = block_on(locks.lock("printer").wait(Duration::from_secs(10)).acquire())?.expect("granted in time");
std::thread::scope(|scope| {
    scope.spawn(|| println!("lost: {}", block_on(guard.lost())));
    block_on(guard.check())?;
    assert_eq!(block_on(locks.force("printer"))?, 1);
    Ok::<_, Error>(())
})?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn replicas_example_runs() {
    let (_server, locks, _) = server();
let guard = locks.lock("a").replicas(1).try_acquire().await;
assert!(matches!(guard, Err(Error::NoReplicas { .. })), "this server has none");
}

#[rustfmt::skip]
#[tokio::test]
async fn election_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let candidate = locks.elect("scheduler", "host-1:8080")?;
let guard = candidate.acquire().await?.expect("it waits without a limit");
let leader = locks.leader("scheduler").await?.expect("this process leads");
assert_eq!((leader.value.as_str(), leader.fence), ("host-1:8080", Some(guard.fence())));
let mut observer = locks.observe("scheduler", Duration::from_secs(1));
assert_eq!(observer.next().await?, Some(leader));
guard.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn info_and_force_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let mine = locks.lock("a").try_acquire().await?.expect("the lock is free");
assert!(locks.locked("a").await?);
let info = locks.info("a").await?.expect("it is held");
assert_eq!(info.holders[0].owner, *mine.owner());
assert_eq!(locks.force("a").await?, 1);
assert_eq!(mine.lost().await, LossReason::Forced);
    Ok(())
}

#[rustfmt::skip]
#[test]
fn addresses_example_runs() -> Outcome {
Locks::open("redis+cluster://10.0.0.1:7000,10.0.0.2:7000")?;
Locks::open("redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster")?;
Locks::open("unix:///run/redis.sock")?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn several_servers_example_runs() -> Outcome {
    let ((_one, paris, _), (_other, berlin, _)) = (server(), server());
let transfer = MultiLock::new([paris.lock("account:1"), berlin.lock("account:2"), paris.lock("account:3")]);
let all = transfer.wait(Duration::from_secs(10)).acquire().await?.expect("granted in time");
for part in all.parts() {
    println!("{} under {}", part.keys(), part.fence());
}
all.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn redlock_example_runs() -> Outcome {
    let several = [server(), server(), server()];
    let urls: Vec<_> = several.iter().map(|(_, _, url)| url.clone()).collect();
    async fn print(fence: u64) -> Result<(), std::io::Error> {
        assert!(fence > 0);
        Ok(())
    }
let servers = urls.iter().map(|url| Locks::open(url)).collect::<Result<Vec<_>, _>>()?;
let printer = RedLock::new(servers, "printer").wait(Duration::from_secs(10));
let guard = printer.acquire().await?.expect("granted in time");
guard.while_held(print(guard.fence())).await??;
assert!(guard.valid_until().is_some());
guard.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn caching_example_runs() -> Outcome {
    let (_server, locks, _) = server();
let account = locks.lock("account:7").keep(Duration::from_secs(5)).wait(Duration::from_secs(10));
let first = account.acquire().await?.expect("granted in time");
let fence = first.fence();
first.release().await?;
let second = account.acquire().await?.expect("the lock is cached");
assert_eq!(second.fence(), fence, "all uses in between are one hold");
second.release().await?;
    Ok(())
}

#[rustfmt::skip]
#[tokio::test]
async fn loss_example_runs() -> Outcome {
    let (server, locks, _) = server();
    let break_it = async |key: &str| assert_eq!(say::<i64>(&server, &format!("LOCK.FORCE {key}")), 1);
let guard = locks.lock("a").try_acquire().await?.expect("the lock is free");
break_it("a").await;
let stopped = guard.while_held(std::future::pending::<()>()).await;
assert!(matches!(stopped, Err(Error::Lost { why: LossReason::Forced, .. })));
assert_eq!(guard.lost().await, LossReason::Forced);
assert!(guard.check().await.is_err());
let error = guard.release().await.unwrap_err();
assert!(error.to_string().contains("forced"));
    Ok(())
}

#[test]
fn every_readme_example_is_run() {
    let here = include_str!("readme.rs");
    for (readme, number) in [("docs/clients/rust.md", 18), ("clients/rust/README.md", 1), ("README.md", 1)] {
        let readme = std::fs::read_to_string(workspace().join(readme)).unwrap();
        let examples: Vec<_> = readme.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert_eq!(examples.len(), number);
        for example in examples {
            assert!(here.contains(example), "not run:\n{example}");
        }
    }
}
