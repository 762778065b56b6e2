//! What must not cry wolf: traffic that fails or looks strange for other reasons than a want of source
//! ports. Each trouble gets its own name and raises no alert in any state; what is no trouble gets none.
//!
//! Those that show as a bare ACK are in `look_alikes.rs`. A lab cannot make the allowances of an ENA device:
//! that rule has unit tests.

mod support;

#[path = "wolf/busy.rs"]
mod busy;
#[path = "wolf/loss.rs"]
mod loss;
#[path = "wolf/paused.rs"]
mod paused;
#[path = "wolf/server.rs"]
mod server;
#[path = "wolf/strangers.rs"]
mod strangers;
#[path = "wolf/tracked.rs"]
mod tracked;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use support::{Place, look_alikes, no_alert};
use tuplewatch_tests::prelude::*;

/// Long enough for any rule to have looked several times.
const LONG: std::time::Duration = std::time::Duration::from_secs(40);

/// The line of a look-alike that begins at a place.
fn named(agent: &Agent, name: &str, place: &Place<'_>) -> Result<Value> {
    let line = agent
        .wait_line(LONG, |line| {
            line["type"] == "look_alike" && line["name"] == name && place.is(line)
        })
        .with_context(|| format!("{name} is not named at {place:?}"))?;
    println!("{}", line["summary"]);
    Ok(line)
}

/// No alert in any state, and no look-alike but these.
fn only(agent: &Agent, names: &[&str]) -> Result<()> {
    no_alert(agent)?;
    let told = look_alikes(agent)?;
    ensure!(
        told.iter().all(|name| names.contains(&name.as_str())),
        "{told:?}: {:#?}",
        agent.of_type("look_alike")?
    );
    Ok(())
}

/// A load that does not care how it fares: so many connections a second for so many seconds.
fn load(to: std::net::SocketAddr, rate: f64, seconds: u64, patience_ms: u64) -> LoadConfig {
    LoadConfig {
        rate,
        seconds: std::time::Duration::from_secs(seconds).as_secs_f64(),
        connect_timeout_ms: patience_ms,
        response_timeout_ms: patience_ms,
        ..LoadConfig::new(to)
    }
}
