//! The file with every default, the configuration in effect, and `docs/configuration.md`.

use std::fmt::Write as _;

use serde_json::Value as Json;

use super::{
    Config,
    entries::LISTS,
    keys::{self, Given, Key},
    load::{Loaded, Origin},
};
use crate::core::threshold::SECTIONS;

/// Longest line of a comment.
const WIDTH: usize = 100;

/// A configuration file with every setting, its meaning and its default.
#[must_use]
pub fn default_file() -> String {
    let mut text = String::from(
        "# Configuration of tuplewatch, with every setting and its default. Keep what you change.\n\
         # The environment (TUPLEWATCH_…) goes before this file, flags go before both.\n",
    );
    let config = Config::default();
    let mut writer = Writer::new(&mut text);
    for key in keys::all() {
        writer.headings(&key.name(), true);
        writer.comment(key.help());
        if !key.takes().is_empty() {
            writer.comment(&sentence(key.takes()));
        }
        writer.setting(key, &config, None);
    }
    for list in LISTS {
        writer.headings(list.name, true);
        writer.comment(list.help);
        for line in list.example.lines() {
            writer.line(&format!("#   {line}"));
        }
        writer.line(&format!("{}: []", list.name));
    }
    text
}

impl Loaded {
    /// The configuration in effect, as a file. Secrets are masked; what is not by default says where it
    /// comes from.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = match &self.file {
            Some(file) => format!(
                "# The configuration in effect; the file is {}.\n",
                file.display()
            ),
            None => "# The configuration in effect; no file was read.\n".to_owned(),
        };
        let mut config = self.config.clone();
        mask(&mut config);
        let mut writer = Writer::new(&mut text);
        for key in keys::all() {
            let name = key.name();
            writer.headings(&name, false);
            writer.setting(key, &config, self.origins.get(&name));
        }
        for list in LISTS {
            let origin = self.origins.get(list.name);
            let from = origin.map_or(String::new(), |origin| format!("    # {origin}"));
            let entries = (list.get)(&config);
            writer.headings(list.name, false);
            if entries.is_empty() {
                writer.line(&format!("{}: []{from}", list.name));
                continue;
            }
            writer.line(&format!("{}:{from}", list.name));
            for entry in entries {
                // JSON is YAML.
                writer.line(&format!("  - {entry}"));
            }
        }
        text
    }
}

/// Nobody who reads the output learns a secret.
fn mask(config: &mut Config) {
    for (_, value) in &mut config.otlp.headers {
        "***".clone_into(value);
    }
    if let Some(endpoint) = &mut config.otlp.endpoint
        && let Some((scheme, rest)) = endpoint.split_once("://")
        && let Some((_, host)) = rest.rsplit_once('@')
    {
        *endpoint = format!("{scheme}://***@{host}");
    }
}

/// Writes settings as YAML, level by level.
struct Writer<'a> {
    text: &'a mut String,
    path: Vec<String>,
}

impl<'a> Writer<'a> {
    const fn new(text: &'a mut String) -> Self {
        Self {
            text,
            path: Vec::new(),
        }
    }

    fn indent(&self) -> usize {
        2 * self.path.len()
    }

    fn line(&mut self, line: &str) {
        let indent = self.indent();
        let _ = writeln!(self.text, "{:indent$}{line}", "");
    }

    /// Writes the levels above a setting that are new.
    fn headings(&mut self, name: &str, explained: bool) {
        let mut parts: Vec<&str> = name.split('.').collect();
        parts.pop();
        let same = self.path.iter().zip(&parts).take_while(|(a, b)| a == b);
        let same = same.count();
        self.path.truncate(same);
        if explained {
            self.text.push('\n');
        }
        for part in &parts[same..] {
            let section = SECTIONS.iter().find(|(section, _)| section == part);
            if let (true, Some((_, about))) = (explained, section) {
                self.comment(about.trim());
            }
            self.line(&format!("{part}:"));
            self.path.push((*part).to_owned());
        }
    }

    fn comment(&mut self, text: &str) {
        let width = WIDTH - self.indent() - 2;
        let mut line = String::new();
        for word in text.split_whitespace() {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                self.line(&format!("# {line}"));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            self.line(&format!("# {line}"));
        }
    }

    fn setting(&mut self, key: Key, config: &Config, origin: Option<&Origin>) {
        let name = key.name();
        let own = name.rsplit('.').next().unwrap_or(&name);
        let value = yaml(&key.get(config));
        let from = origin.map_or(String::new(), |origin| format!("    # {origin}"));
        self.line(&format!("{own}: {value}{from}"));
    }
}

/// A value as YAML on one line.
fn yaml(given: &Given) -> String {
    match given {
        Given::Text(text) => scalar(text),
        Given::List(list) => {
            let items: Vec<_> = list.iter().map(|text| scalar(text)).collect();
            format!("[{}]", items.join(", "))
        }
        Given::Pairs(pairs) => {
            let items: Vec<_> = pairs
                .iter()
                .map(|(name, value)| format!("{}: {}", scalar(name), scalar(value)))
                .collect();
            format!("{{{}}}", items.join(", "))
        }
        Given::Default => String::new(),
    }
}

/// A text that is read back as the same text: plain where nothing in it means anything to YAML.
fn scalar(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_./:%-".contains(c);
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
        && text.chars().all(plain)
        && !text.ends_with(':');
    if is_plain {
        text.to_owned()
    } else {
        Json::from(text).to_string()
    }
}

/// The documentation of all settings, as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = HEAD.to_owned();
    let config = Config::default();
    let row = |key: Key, text: &mut String| {
        let default = match yaml(&key.get(&config)).as_str() {
            "" => String::new(),
            value => format!("`{value}`"),
        };
        let takes = match key.takes() {
            "" => String::new(),
            takes => format!(" Takes {takes}."),
        };
        let (name, variable, flag) = (key.name(), key.variable(), key.flag());
        let _ = writeln!(
            text,
            "| `{name}` | {default} | {}{takes} | `{variable}` | `{flag}` |",
            key.help()
        );
    };
    for key in keys::all().filter(|key| matches!(key, Key::Own(_))) {
        row(key, &mut text);
    }
    text.push_str(THRESHOLDS);
    for key in keys::all().filter(|key| matches!(key, Key::Threshold(_))) {
        let Key::Threshold(setting) = key else {
            continue;
        };
        let default = (setting.get)(&config.thresholds);
        let scope = if setting.per_destination { "yes" } else { "no" };
        let _ = writeln!(
            text,
            "| `{}` | `{default}` | {scope} | {} |",
            setting.name,
            setting.help()
        );
    }
    text.push_str("\n## Lists\n\nThey are in the file only.\n");
    for list in LISTS {
        let example: String = list.example.lines().map(|l| format!("  {l}\n")).collect();
        let _ = write!(
            text,
            "\n### {}\n\n{}\n\n```yaml\n{}:\n{example}```\n",
            list.name, list.help, list.name
        );
    }
    text.push_str(TAIL);
    text
}

fn sentence(text: &str) -> String {
    format!("Takes {text}.")
}

const HEAD: &str = "\
# Configuration

<!-- Generated from agent/src/config/. Do not edit; run
     TUPLEWATCH_BLESS=1 cargo test -p tuplewatch configuration_doc -->

Nothing needs to be configured. What is, comes from three places, and what comes later wins:

1. the file `/etc/tuplewatch/config.yaml`, if it is there, or the one that `--config` or `TUPLEWATCH_CONFIG` names,
   which must be there;
2. environment variables `TUPLEWATCH_…`;
3. flags of `tuplewatch run`.

The standard variables of others (`OTEL_*`, `RUST_LOG`) fill in what none of the three says: they are set for everything
on a host, our own settings are meant for this agent.

An unknown key or a wrong value is an error with its line and column; the agent does not start then and exits with 78.
An unknown variable is not: Kubernetes sets `TUPLEWATCH_SERVICE_HOST` and the like for a service of that name. One that
is a letter or two off a setting is warned of.

| command | |
|---|---|
| `tuplewatch config default` | prints a file with every setting, its meaning and its default |
| `tuplewatch config check [FILE]` | says what is wrong with a file, or `ok`; exits with 78 or 0 |
| `tuplewatch config show [FLAGS]` | prints the configuration in effect and where each value comes from; secrets are masked |

## Settings

Names with a point are levels of the file: `otlp.endpoint` is `endpoint` below `otlp`. Durations are written `500ms`,
`10s`, `5m`, `1h`, `7d`; sizes `256KiB`, `16MiB`. In a variable or flag a list is separated by commas, and names with
values are written `name=value,name=value`; flags of lists can be repeated.

| setting | default | meaning | variable | flag |
|---|---|---|---|---|
";

const THRESHOLDS: &str = "
## Thresholds

In the file they are below `thresholds`, so `l4_reuse.min_refused` is:

```yaml
thresholds:
  l4_reuse:
    min_refused: 50
```

The variable of that one is `TUPLEWATCH_THRESHOLDS_L4_REUSE_MIN_REFUSED`, the flag `--set l4_reuse.min_refused=50`. Those
that say so can differ by destination (see `destinations` below). `docs/rules.md` says what the rules do with them.

| threshold | default | by destination | meaning |
|---|---|---|---|
";

const TAIL: &str = "
## Alerts one can live with

An alert belongs to one port space and one cause, and keeps one identity. It is *pending* until its condition has lasted
for `alert.pending`, *firing* then, and *resolved* once there was no symptom for `alert.resolve`: the condition to fire
need not hold all the time. A severity once reached stays until the end. While it fires it is told again every
`alert.repeat`, with its latest figures, and at once when it gets worse. Its history (how often it fired, since when,
how bad it was at worst, the latest eight times) is kept for `alert.remember` after its end.

A muted alert goes the same way, and nobody is told: it is in the summary and on `/status` as muted, with the reason.
When the mute ends while the alert fires, it is told then. When a mute begins while it fires, its end is still told:
whoever was told that it fires must not wait for ever.

Time in which the agent did not look (it was stopped, or the machine was) counts as nothing: neither do symptoms
counted then make an alert, nor does the time without a look resolve one.

## State

With a state directory, firing alerts, the history of alerts, and inferred pools are kept in `state.json` there: at once
when an alert changes, and else at most once a minute. After a restart or a crash an alert goes on under the same
identity and since the same time, and nobody is told of it as new; if its condition is over, it is resolved once it had no
symptom for `alert.resolve`. Times are kept by the time of day and set right where that was stepped meanwhile. The counts
of its evidence begin again at the restart.

systemd sets the directory by `StateDirectory=`. Elsewhere it must be named: a run by hand would otherwise leave files
behind and take up the alerts of a service. A directory that cannot be used, or is in use by another agent, is warned of,
and the agent runs without. A file that cannot be read is kept beside as `state.json.bad` and warned of.
";
