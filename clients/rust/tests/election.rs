//! Leader election.

use std::time::Duration;

use holdfast_client::{Error, LossReason};
use support::Server;

use crate::common::{SOON, holder, is_free, locks, say, sessions, soon, waiters};

#[tokio::test]
async fn election_hands_over_when_leader_resigns() {
    let server = Server::start();
    let (first, second) = (locks(&server), locks(&server));
    let mut observer = first.observe("e", Duration::from_millis(20));
    assert_eq!(observer.next().await.unwrap(), None);
    let leads = first.elect("e", "a:1#%").unwrap().acquire().await.unwrap().unwrap();
    let seen = observer.next().await.unwrap().unwrap();
    assert_eq!((seen.value.as_str(), seen.fence), ("a:1#%", Some(leads.fence())));
    let candidate = second.elect("e", "").unwrap();
    let stands = tokio::spawn(async move { candidate.acquire().await.unwrap().unwrap() });
    soon("the second candidate waits", || waiters(&server, "e") == 1).await;
    leads.release().await.unwrap();
    let leads = stands.await.unwrap();
    let seen = observer.next().await.unwrap().unwrap();
    assert_eq!((seen.value.as_str(), seen.fence), ("", Some(leads.fence())));
    // A leader that loses the lock is notified. The observer sees that there is no leader.
    assert_eq!(first.force("e").await.unwrap(), 1);
    assert_eq!(tokio::time::timeout(SOON, leads.lost()).await.unwrap(), LossReason::Forced);
    assert_eq!(observer.next().await.unwrap(), None);
}

#[tokio::test]
async fn candidate_within_another_lock_has_its_value() {
    let server = Server::start();
    let locks = locks(&server);
    let mut outer = locks.lock("a").try_acquire().await.unwrap().unwrap();
    for value in ["", "b:1:"] {
        let leads = outer.try_acquire(&locks.elect("e", value).unwrap()).await.unwrap().unwrap();
        assert_eq!(locks.leader("e").await.unwrap().unwrap().value, value);
        leads.release().await.unwrap();
    }
}

#[tokio::test]
async fn observer_without_interval_pauses() {
    let server = Server::start();
    let locks = locks(&server);
    let mut observer = locks.observe("e", Duration::ZERO);
    assert_eq!(observer.next().await.unwrap(), None);
    let _: String = say(&server, "CONFIG RESETSTAT");
    let _late = tokio::time::timeout(Duration::from_millis(200), observer.next()).await.unwrap_err();
    let stats: String = say(&server, "INFO commandstats");
    let asked = stats.lines().find_map(|line| line.strip_prefix("cmdstat_lock.info:calls=")?.split(',').next());
    assert!(asked.map_or(0, |asked| asked.parse::<u32>().unwrap()) <= 10, "{stats}");
}

#[tokio::test]
async fn observer_sees_a_change_between_cancelled_calls() {
    const INTERVAL: Duration = Duration::from_millis(200);
    let server = Server::start();
    let locks = locks(&server);
    let mut observer = locks.observe("e", INTERVAL);
    assert_eq!(observer.next().await.unwrap(), None);
    let leads = locks.elect("e", "a").unwrap().try_acquire().await.unwrap().unwrap();
    let seen = async {
        loop {
            if let Ok(seen) = tokio::time::timeout(INTERVAL / 4, observer.next()).await {
                return seen.unwrap();
            }
        }
    };
    assert_eq!(tokio::time::timeout(SOON, seen).await.unwrap().unwrap().value, "a");
    leads.release().await.unwrap();
}

#[tokio::test]
async fn ephemeral_leader_is_replaced_when_its_connection_ends() {
    let server = Server::start();
    let (first, second) = (locks(&server), locks(&server));
    // Its lease outlasts the test: only the end of the connection ends the term.
    let candidate = first.elect("e", "a").unwrap().watched(Duration::from_secs(600)).ephemeral();
    let leads = candidate.acquire().await.unwrap().unwrap();
    soon("the session reads", || sessions(&server).len() == 1).await;
    let session = sessions(&server)[0];
    let candidate = second.elect("e", "b").unwrap().ephemeral();
    let stands = tokio::spawn(async move { candidate.acquire().await.unwrap().unwrap() });
    soon("the second candidate waits", || waiters(&server, "e") == 1).await;
    let _: i64 = say(&server, &format!("CLIENT KILL ID {session}"));
    let next = tokio::time::timeout(SOON, stands).await.unwrap().unwrap();
    assert_eq!(tokio::time::timeout(SOON, leads.lost()).await.unwrap(), LossReason::Disconnected);
    assert!(next.fence() > leads.fence());
    assert_eq!(first.leader("e").await.unwrap().unwrap().value, "b");
    next.release().await.unwrap();
    assert!(is_free(&server, "e"));
}

#[tokio::test]
async fn election_with_replicas_needs_the_replica() {
    let (primary, replica) = (Server::start(), Server::start());
    replica.replica_of(&primary);
    primary.wait_replica_online();
    let locks = locks(&primary);
    let candidate = locks.elect("e", "a").unwrap().watched(Duration::from_secs(60)).replicas(1);
    let leads = candidate.acquire().await.unwrap().unwrap();
    let known: u64 = say(&replica, "HGET e #fence");
    assert_eq!(known, leads.fence());
    leads.release().await.unwrap();
    replica.stop();
    // One that waits asks again until its time is over.
    let error = candidate.try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::NoReplicas { .. }), "{error}");
    assert!(is_free(&primary, "e"));
}

#[tokio::test]
async fn candidates_owner_begins_with_its_escaped_value() {
    let server = Server::start();
    let leads = locks(&server).elect("e", "50%#1").unwrap().try_acquire().await.unwrap().unwrap();
    let owner = holder(&server, "e").unwrap();
    let (value, random) = owner.rsplit_once('#').unwrap();
    assert_eq!(value, "50%25%231");
    assert!(random.len() > 32, "{owner}");
    leads.release().await.unwrap();
}

#[tokio::test]
async fn candidates_value_has_at_most_400_bytes() {
    let server = Server::start();
    let locks = locks(&server);
    assert!(locks.elect("e", &"x".repeat(400)).is_ok());
    let Err(error) = locks.elect("e", &"#".repeat(200)) else { panic!("the value is allowed") };
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}
