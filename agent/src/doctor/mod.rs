//! What works on this host, and what does not: facts are gathered once, and each file judges its own.

pub mod check;
mod hooks;
mod kernel;
mod pages;
mod ports;
mod rights;
mod services;

use std::time::{Duration, SystemTime};

use anyhow::Context as _;

pub use check::{Check, Left, Level, NAMES, Report};
pub use services::Configuration;

use crate::{
    config::Config,
    core::surroundings::LocalPorts,
    sink::{
        http::Listen,
        otlp::{self, Reached},
    },
    source::kernel::{self as source, Options, Trial},
    state::{self, Examined},
};

/// How long an OTLP receiver may take.
const RECEIVER_LIMIT: Duration = Duration::from_secs(5);

/// Everything that is judged.
struct Facts {
    configuration: Configuration,
    rights: rights::Rights,
    kernel: kernel::Kernel,
    trial: Trial,
    /// Interfaces were named.
    asked_for: bool,
    ports: Option<LocalPorts>,
    receivers: Result<Vec<Reached>, String>,
    listen: Listen,
    place: Option<pages::Place>,
    state: Option<Examined>,
}

/// Looks at everything that an agent with these settings would use. It takes a second or two, longer
/// where somebody does not answer, and leaves nothing behind.
///
/// # Errors
/// No thread can be started.
pub fn examine(
    configuration: Configuration,
    config: &Config,
    options: &Options,
) -> anyhow::Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("the async runtime cannot be started")?;
    let receivers = otlp::reach(&config.otlp(), RECEIVER_LIMIT, runtime.handle());
    let facts = Facts {
        configuration,
        rights: rights::Rights::read(),
        kernel: kernel::Kernel::read(),
        trial: source::trial(options),
        asked_for: !options.interfaces.include.is_empty(),
        ports: source::local_ports(),
        receivers: receivers.map_err(|error| error.to_string()),
        listen: config.http,
        place: pages::look(config.http),
        state: state::examine(&config.state_dir),
    };
    // A receiver that has not answered yet is not waited for.
    runtime.shutdown_background();
    let now = humantime::format_rfc3339_millis(SystemTime::now());
    Ok(judge(&facts, now.to_string()))
}

fn judge(facts: &Facts, time: String) -> Report {
    let Facts { trial, rights, .. } = facts;
    let mut checks = facts.configuration.judge();
    checks.extend(rights.judge());
    checks.extend(facts.kernel.judge(trial.map_memory));
    checks.extend(hooks::judge(trial, rights.suffice(), facts.asked_for));
    checks.push(ports::judge(facts.ports.as_ref()));
    checks.extend(services::receivers(&facts.receivers));
    checks.extend(pages::judge(facts.listen, facts.place.as_ref()));
    checks.push(services::state(facts.state.as_ref()));
    Report::new(time, hooks::left(trial, facts.asked_for), checks)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOC: &str = include_str!("../../../docs/doctor.md");

    fn facts() -> Facts {
        Facts {
            configuration: Configuration::default(),
            rights: rights::Rights::default(),
            kernel: kernel::Kernel::default(),
            trial: Trial::default(),
            asked_for: false,
            ports: None,
            receivers: Ok(Vec::new()),
            listen: Listen::Off,
            place: None,
            state: None,
        }
    }

    /// The names in the first column of a table.
    fn table<'a>(doc: &'a str, heading: &str) -> Vec<&'a str> {
        let start = doc.find(heading).unwrap() + heading.len();
        let section = doc[start..].split("\n## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
        rows.filter_map(|row| row.split('`').next()).collect()
    }

    #[test]
    fn the_documentation_has_every_check_in_its_order() {
        assert_eq!(table(DOC, "\n## Checks"), NAMES);
    }

    #[test]
    fn the_documentation_has_every_field() {
        let report = judge(&facts(), "2025-11-29T10:30:05.123Z".to_owned());
        let report = serde_json::to_value(&report).unwrap();
        let mut fields: Vec<String> = report.as_object().unwrap().keys().cloned().collect();
        let check = report["checks"][0].as_object().unwrap().keys();
        fields.extend(check.map(|field| format!("checks[].{field}")));
        fields.sort();
        let mut documented = table(DOC, "\n## JSON");
        documented.sort_unstable();
        assert_eq!(documented, fields);
    }

    #[test]
    fn the_worst_check_is_the_result_and_all_stand_in_order() {
        let mut facts = facts();
        let report = judge(&facts, String::new());
        assert_eq!(report.result, Level::Fail, "no rights at all");
        assert!(!report.is_fine());
        let place = |check: &Check| NAMES.iter().position(|name| *name == check.name).unwrap();
        assert!(report.checks.is_sorted_by_key(place));
        facts.rights.capabilities = u64::MAX;
        let report = judge(&facts, String::new());
        // No cgroups, no ports.
        assert_eq!(report.result, Level::Warn);
        assert!(report.is_fine());
        assert_eq!(report.count(Level::Fail), 0);
    }
}
