//! A cron job that runs once in a fleet: every host's cron starts this at the same time, and one of them does the work.
//!
//! `cron-once PERIOD COMMAND [ARGUMENT...]`: PERIOD names the run, such as the day. A host whose clock is late finds
//! that the work is done. If the host that works is killed, its lock ends a lease later, and the next start does the
//! work: at least once, and never twice at the same time. (`holdfast run` does the same without the period.)

use std::process::ExitCode;
use std::time::Duration;

use holdfast_client::{Error, Locks, redis};
use tokio::process::Command;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (period, command) = (arguments.next().ok_or("a period")?, arguments.next().ok_or("a command")?);
    let client =
        redis::Client::open(std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned()))?;
    let mut data = client.get_multiplexed_async_connection().await?;
    let locks = Locks::new(client);

    let Some(guard) = locks.lock("cron:report").watched(Duration::from_secs(5)).try_acquire().await? else {
        println!("another host is at it");
        return Ok(ExitCode::SUCCESS);
    };
    let last: Option<String> = redis::cmd("GET").arg("cron:report:done").query_async(&mut data).await?;
    if last.as_deref() == Some(&period) {
        println!("{period} is done");
        guard.release().await?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut work = Command::new(command).args(arguments).kill_on_drop(true).spawn()?;
    // A lock that is lost ends the work: another host may have begun it.
    let status = guard.while_held(work.wait()).await??;
    if status.success() {
        let () = redis::cmd("SET").arg("cron:report:done").arg(&period).query_async(&mut data).await?;
    }
    match guard.release().await {
        Ok(()) | Err(Error::Connection { .. }) => {}
        Err(lost) => return Err(lost.into()),
    }
    Ok(status.code().map_or(ExitCode::FAILURE, |code| ExitCode::from(u8::try_from(code).unwrap_or(1))))
}
