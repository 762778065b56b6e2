//! The configuration, the OTLP receivers and the state directory.

use std::path::PathBuf;

use super::check::{Check, Level};
use crate::{sink::otlp::Reached, state::Examined};

/// What came of reading the configuration.
#[derive(Clone, Debug, Default)]
pub struct Configuration {
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// What is wrong, each with its place; the other checks go by the defaults then.
    pub problems: Vec<String>,
    /// What is not wrong but worth a word.
    pub warnings: Vec<String>,
}

const NO_START: &str = "the agent does not start (exit code 78)";

impl Configuration {
    /// What is to be said of it.
    #[must_use]
    pub fn judge(&self) -> Vec<Check> {
        let mut checks: Vec<_> = self
            .problems
            .iter()
            .map(|problem| {
                let remedy = "set it right; `tuplewatch config default` shows every setting";
                Check::bad(Level::Fail, "config", problem, NO_START, remedy)
            })
            .collect();
        checks.extend(self.warnings.iter().map(|warning| {
            let lost = "what was meant by it is not in effect";
            let remedy = "set it right; docs/configuration.md has all names";
            Check::bad(Level::Warn, "config", warning, lost, remedy)
        }));
        if checks.is_empty() {
            let found = match &self.file {
                Some(file) => format!("{} is valid", file.display()),
                None => "no file: defaults, variables and flags".to_owned(),
            };
            checks.push(Check::ok("config", found));
        }
        checks
    }
}

/// What is to be said of the receivers: those that were asked, or why they cannot be.
#[must_use]
pub fn receivers(reached: &Result<Vec<Reached>, String>) -> Vec<Check> {
    let reached = match reached {
        Ok(reached) if reached.is_empty() => {
            let found = "nothing is sent: no endpoint is configured";
            return vec![Check::ok("otlp", found)];
        }
        Ok(reached) => reached,
        Err(why) => {
            let remedy = "set it right; docs/metrics.md has the variables";
            return vec![Check::bad(Level::Fail, "otlp", why, NO_START, remedy)];
        }
    };
    let checks = reached.iter().map(|one| {
        let Reached {
            signal,
            endpoint,
            protocol,
            answer,
        } = one;
        let check = match answer {
            Ok(took) => {
                let took = took.as_secs_f64() * 1000.0;
                Check::ok(
                    "otlp",
                    format!("{endpoint} ({protocol}) takes {signal}: {took:.0} ms"),
                )
            }
            Err(why) => {
                let lost = match *signal {
                    "logs" => "alerts wait in memory until it can be reached (10,000 at most)",
                    _ => "metrics are missing there as long as it cannot be reached",
                };
                let remedy = "see that it runs and speaks this protocol (`otlp.protocol`), and that \
                              name, port, certificate and headers are right";
                let found = format!("{endpoint} ({protocol}): {why}");
                Check::bad(Level::Fail, "otlp", found, lost, remedy)
            }
        };
        check.of(*signal)
    });
    checks.collect()
}

/// What is to be said of the state directory.
#[must_use]
pub fn state(examined: Option<&Examined>) -> Check {
    const NAME: &str = "state_dir";
    let Some(examined) = examined else {
        let found = "none: firing alerts are told anew after a restart (the systemd unit has one)";
        return Check::ok(NAME, found);
    };
    let directory = examined.directory.display();
    if let Some(why) = &examined.unusable {
        let lost = "alerts will be forgotten at the next restart";
        let remedy = "`state_dir` (--state-dir) names another directory or `off`";
        return Check::bad(
            Level::Warn,
            NAME,
            format!("{directory}: {why}"),
            lost,
            remedy,
        );
    }
    if let Some(why) = &examined.damaged {
        let lost =
            "nothing will be known of alerts before; the file is put aside at the next start";
        let found = format!("{directory}/state.json: {why}");
        return Check::bad(Level::Warn, NAME, found, lost, "none is needed");
    }
    Check::ok(NAME, format!("{directory} can be written to by this user"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_problem_of_the_configuration_fails_and_a_warning_does_not() {
        let mut configuration = Configuration {
            file: Some("/etc/x.yaml".into()),
            ..Configuration::default()
        };
        let level = |c: &Configuration| c.judge().iter().map(|c| c.level).collect::<Vec<_>>();
        assert_eq!(level(&configuration), [Level::Ok]);
        configuration.warnings = vec!["TUPLEWATCH_TOPP is not a setting".to_owned()];
        assert_eq!(level(&configuration), [Level::Warn]);
        configuration.problems = vec!["/etc/x.yaml:3:1: no".to_owned(), "two".to_owned()];
        assert_eq!(
            level(&configuration),
            [Level::Fail, Level::Fail, Level::Warn]
        );
        assert!(configuration.judge()[0].found.contains(":3:1:"));
    }

    #[test]
    fn a_receiver_that_does_not_answer_fails() {
        let one = |signal, answer| Reached {
            signal,
            endpoint: "http://127.0.0.1:4318".to_owned(),
            protocol: "grpc".to_owned(),
            answer,
        };
        let checks = receivers(&Ok(vec![
            one("metrics", Ok(Duration::from_millis(3))),
            one("logs", Err("connection refused".to_owned())),
        ]));
        let told: Vec<_> = checks.iter().map(|c| (c.of.as_deref(), c.level)).collect();
        let expected = [(Some("metrics"), Level::Ok), (Some("logs"), Level::Fail)];
        assert_eq!(told, expected);
        assert_eq!(receivers(&Ok(Vec::new()))[0].level, Level::Ok);
        assert_eq!(receivers(&Err("no URL".to_owned()))[0].level, Level::Fail);
    }

    #[test]
    fn state_that_cannot_be_kept_warns() {
        let mut examined = Examined {
            directory: "/var/lib/x".into(),
            unusable: None,
            damaged: None,
        };
        assert_eq!(state(None).level, Level::Ok);
        assert_eq!(state(Some(&examined)).level, Level::Ok);
        examined.damaged = Some("it is damaged".to_owned());
        assert_eq!(state(Some(&examined)).level, Level::Warn);
        examined.unusable = Some("read-only".to_owned());
        let check = state(Some(&examined));
        assert_eq!(check.level, Level::Warn);
        assert!(check.found.contains("read-only"));
    }
}
