//! Waiting for a condition, with a limit.

use std::time::{Duration, Instant};

/// How long to sleep between two looks at a condition.
const STEP: Duration = Duration::from_millis(20);

/// Looks at `condition` every 20 ms until it is true or `timeout` has passed; true if it became true.
pub fn wait_for(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    wait_some(timeout, || condition().then_some(())).is_some()
}

/// Calls `look` every 20 ms until it returns something or `timeout` has passed.
pub fn wait_some<T>(timeout: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + timeout;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(STEP);
    }
}

/// How many times longer than on a machine of one's own a test waits for others: `$LAB_PATIENCE`, else 1. An emulated
/// machine is 4 to 30 times slower.
#[must_use]
pub fn patience() -> u32 {
    std::env::var("LAB_PATIENCE")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1)
}
