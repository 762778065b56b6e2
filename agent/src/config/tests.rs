use std::collections::{BTreeMap, BTreeSet};

use super::{
    keys::{Key, Kind},
    *,
};
use crate::core::{finding::Verdict, time::Moment};

fn file(text: &str) -> Result<Config, Vec<String>> {
    let mut loaded = Loaded::default();
    let problems = loaded.file(text);
    if problems.is_empty() {
        return Ok(loaded.config);
    }
    let list = problems.into_iter().map(|problem| {
        let at = problem
            .at
            .map_or(String::new(), |at| format!("{}:{}: ", at.line, at.column));
        at + &problem.what
    });
    Err(list.collect())
}

fn problem(text: &str) -> String {
    let mut problems = file(text).unwrap_err();
    assert_eq!(problems.len(), 1, "{problems:?}");
    problems.remove(0)
}

#[test]
fn the_default_file_is_the_default_and_has_every_key() {
    let text = default_file();
    let mut loaded = Loaded::default();
    assert_eq!(loaded.file(&text), []);
    assert_eq!(loaded.config, Config::default());
    let names: BTreeSet<String> = keys::all().map(Key::name).collect();
    let lists = entries::LISTS.iter().map(|list| list.name.to_owned());
    let all: BTreeSet<String> = names.into_iter().chain(lists).collect();
    let read: BTreeSet<String> = loaded.origins.keys().cloned().collect();
    assert_eq!(read, all);
    assert!(text.lines().all(|line| line.chars().count() <= 160));
}

#[test]
fn the_examples_of_the_documentation_are_right() {
    for list in entries::LISTS {
        let example: String = list.example.lines().map(|l| format!("  {l}\n")).collect();
        let text = format!("{}:\n{example}", list.name);
        let config = file(&text).unwrap();
        assert_eq!((list.get)(&config).len(), 1, "{text}");
    }
}

#[test]
fn names_and_variables_are_each_for_one_setting() {
    let keys: Vec<Key> = keys::all().collect();
    let variables: BTreeSet<_> = keys.iter().map(|key| key.variable()).collect();
    assert_eq!(variables.len(), keys.len());
    for key in keys {
        assert_eq!(keys::find(&key.name()).unwrap().name(), key.name());
        // Kubernetes sets these for a service called tuplewatch.
        let variable = key.variable();
        assert!(
            !variable.ends_with("_PORT") && !variable.ends_with("_HOST"),
            "{variable}"
        );
    }
}

#[test]
fn every_setting_reads_back_what_it_shows() {
    for key in keys::all() {
        let mut config = Config::default();
        key.set(&mut config, key.get(&Config::default())).unwrap();
        assert_eq!(config, Config::default(), "{}", key.name());
        if key.kind() != Kind::Text {
            continue;
        }
        assert!(
            key.set(&mut config, Given::List(Vec::new())).is_err(),
            "{}",
            key.name()
        );
    }
}

#[test]
fn a_file_is_read_by_levels() {
    let config = file(
        "top: 7\nsummary_interval: 2.5s\nmap_memory: 16\nring_buffer: 512KiB\nnetns: blue\n\
         interfaces: [eth0, \"veth*\"]\nstate_dir: /var/lib/x\nhttp: {listen: off}\n\
         otlp:\n  endpoint:\n  protocol: grpc\n  headers: {a: b, n: 7}\n  temporality: datadog\n\
         thresholds:\n  window: 30s\n  l4_reuse: {min_refused: 50}\n",
    )
    .unwrap();
    assert_eq!((config.top, config.ring_buffer), (7, 512 << 10));
    assert_eq!(config.summary_interval, Some(Duration::from_millis(2500)));
    assert_eq!(config.map_memory, Some(16 << 20));
    assert_eq!(
        (config.netns, config.interfaces.len()),
        (vec!["blue".to_owned()], 2)
    );
    assert_eq!(config.state_dir, StateDir::At("/var/lib/x".into()));
    assert_eq!(config.http, Listen::Off);
    assert_eq!(config.otlp.endpoint, None);
    let headers = [("a", "b"), ("n", "7")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(config.otlp.headers, headers);
    assert_eq!(config.otlp.temporality, Some(ExportedAs::Datadog));
    assert_eq!(
        config.otlp.temporality.map(Temporality::from),
        Some(Temporality::Delta)
    );
    assert_eq!(config.thresholds.window, Duration::from_secs(30));
    assert_eq!(config.thresholds.l4_reuse.min_refused, 50);
}

#[test]
fn unknown_keys_have_their_place_and_the_nearest_name() {
    assert_eq!(
        problem("top: 1\ntopp: 2\n"),
        "2:1: unknown key `topp`; did you mean `top`?"
    );
    assert_eq!(
        problem("otlp:\n  endpont: x\n"),
        "2:3: unknown key `endpont`; did you mean `endpoint`?"
    );
    assert_eq!(
        problem("thresholds:\n  l4_reuse:\n    min_refusd: 1\n"),
        "3:5: unknown key `min_refusd`; did you mean `min_refused`?"
    );
    assert_eq!(
        problem("endpoint: x\n"),
        "1:1: unknown key `endpoint` here; did you mean `otlp.endpoint`?"
    );
    let all = problem("http:\n  colour: x\n");
    assert_eq!(all, "2:3: unknown key `colour`; there are listen");
    assert_eq!(
        problem("mute:\n  - cause: forecast\n    reason: x\n"),
        "2:5: unknown key `cause`; did you mean `causes`?"
    );
    assert_eq!(
        problem("egress_groups:\n- name: a\n  destination: [0.0.0.0/0]\n"),
        "3:3: unknown key `destination`; did you mean `destinations`?"
    );
    assert_eq!(
        problem("destinations:\n- match: 10.0.0.0/8\n  thresholds:\n    alert: {pendin: 1s}\n"),
        "4:13: unknown key `pendin`; did you mean `pending`?"
    );
}

#[test]
fn wrong_values_have_their_place_and_say_what_would_be_right() {
    let at = |text: &str| problem(text);
    assert_eq!(
        at("top: many\n"),
        "1:6: top: `many` is not a whole number from 0 to 18446744073709551615"
    );
    assert_eq!(
        at("format: jsn\n"),
        "1:9: format: `jsn` is none of text, json; did you mean `json`?"
    );
    assert!(at("otlp:\n  interval: 1ms\n").starts_with("2:13: otlp.interval: it must be at least"));
    assert!(at("top: [1]\n").contains("one value is wanted"));
    assert!(at("otlp: 3\n").contains("a map is wanted here"));
    assert!(at("ring_buffer: 300KiB\n").contains("power of two"));
    assert!(at("state_dir: here\n").contains("absolute path"));
    assert!(at("log: tuplewatch=loud\n").contains("filter"));
    assert!(at("http:\n  listen: 127.0.0.1\n").starts_with("2:11: http.listen"));
    let far = at("destinations:\n- match: [10.0.0.0/8, 10.0.0.0/33]\n");
    assert!(
        far.starts_with("2:23: ") && far.contains("10.0.0.0/33"),
        "{far}"
    );
    let host = at("destinations:\n- match: 10.0.0.0/8\n  thresholds: {window: 5s}\n");
    assert!(
        host.starts_with("3:16: ") && host.contains("whole host"),
        "{host}"
    );
    let value = at("destinations:\n- match: '*'\n  thresholds:\n    alert: {pending: soon}\n");
    assert!(value.starts_with("4:22: alert.pending: "), "{value}");
    assert_eq!(
        at("mute:\n- causes: [forcast]\n  reason: x\n")
            .split("; ")
            .last(),
        Some("did you mean `forecast`?")
    );
    assert!(at("mute:\n- reason: x\n").starts_with("2:3: it would mute every alert"));
    assert!(at("mute:\n- causes: forecast\n").contains("`reason` is missing"));
    assert!(at("mute:\n- causes: forecast\n  reason: x\n  until: soon\n").starts_with("4:10: "));
    assert!(at("egress_groups:\n- name: a\n").contains("`destinations` is missing"));
}

#[test]
fn a_group_with_an_unknown_profile_is_an_error() {
    let text = "egress_groups:\n- {name: a, destinations: [0.0.0.0/0], profile: aws-nat-gatewy}\n";
    assert!(problem(text).contains("aws-nat-gatewy"));
}

#[test]
fn yaml_errors_have_their_place_too() {
    assert!(problem("a: 1\na: 2\n").starts_with("2:1: duplicate"));
    assert!(problem("top: [1, 2\n").contains(':'));
    assert!(problem("top: 1\n---\ntop: 2\n").contains("document"));
    assert!(problem("- 1\n").starts_with("1:"));
    assert_eq!(file("").unwrap(), Config::default());
    assert_eq!(file("# nothing\n").unwrap(), Config::default());
}

#[test]
fn every_problem_of_a_file_is_told() {
    let problems =
        file("topp: 1\nformat: xml\nmute:\n- reason: x\n- causes: nothing\n").unwrap_err();
    assert_eq!(problems.len(), 4, "{problems:#?}");
}

fn variables(list: &[(&str, &str)]) -> BTreeMap<String, String> {
    let list = list.iter();
    list.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

#[test]
fn the_environment_goes_before_the_file_and_flags_before_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.yaml");
    std::fs::write(&path, "top: 1\nformat: json\notlp: {interval: 5s}\n").unwrap();
    let variables = variables(&[
        ("TUPLEWATCH_TOP", "2"),
        ("TUPLEWATCH_OTLP_INTERVAL", "6s"),
        ("TUPLEWATCH_OTLP_HEADERS", "a=b=c, d = e"),
        ("TUPLEWATCH_NETNS", "one, two"),
        ("TUPLEWATCH_THRESHOLDS_ALERT_PENDING", "9s"),
        ("TUPLEWATCH_FORMAT", ""),
        ("TUPLEWATCH_PORT", "tcp://10.0.0.1:9464"),
        ("TUPLEWATCH_OTLP_ENDPONT", "x"),
    ]);
    let flags = vec![("top".to_owned(), Given::Text("3".into()))];
    let loaded = load(Some(&path), &variables, flags).unwrap();
    let config = &loaded.config;
    assert_eq!((config.top, config.format), (3, Format::Json));
    assert_eq!(config.otlp.interval, Some(Duration::from_secs(6)));
    assert_eq!(config.otlp.headers[0], ("a".to_owned(), "b=c".to_owned()));
    assert_eq!(config.netns, ["one", "two"]);
    assert_eq!(config.thresholds.alert.pending, Duration::from_secs(9));
    assert_eq!(loaded.warnings.len(), 1, "{:?}", loaded.warnings);
    assert!(loaded.warnings[0].contains("TUPLEWATCH_OTLP_ENDPOINT"));
    let shown = loaded.show();
    for line in [
        "top: 3    # the command line",
        "format: json    # line 2 of the file",
        "  interval: 6s    # TUPLEWATCH_OTLP_INTERVAL",
        "  headers: {a: \"***\", d: \"***\"}    # TUPLEWATCH_OTLP_HEADERS",
    ] {
        assert!(shown.lines().any(|l| l == line), "{line} in\n{shown}");
    }
    let mut read = Loaded::default();
    assert_eq!(read.file(&shown), [], "what is shown can be read");
}

#[test]
fn a_wrong_variable_is_named() {
    let wrong = variables(&[("TUPLEWATCH_TOP", "x"), ("TUPLEWATCH_CONFIG", "/dev/null")]);
    let problems = load(None, &wrong, Vec::new()).unwrap_err().to_string();
    assert!(problems.starts_with("TUPLEWATCH_TOP: `x`"), "{problems}");
}

#[test]
fn a_named_file_must_be_there() {
    let missing = Some(std::path::Path::new("/nonexistent/x.yaml"));
    let problems = load(missing, &BTreeMap::new(), Vec::new()).unwrap_err();
    assert!(
        problems
            .to_string()
            .starts_with("/nonexistent/x.yaml: it cannot be read")
    );
    let variable = variables(&[("TUPLEWATCH_CONFIG", "/nonexistent/y.yaml")]);
    let problems = load(None, &variable, Vec::new()).unwrap_err();
    assert!(problems.to_string().contains("y.yaml"));
}

#[test]
fn passwords_are_masked() {
    let mut loaded = Loaded::default();
    loaded.config.otlp.endpoint = Some("https://user:secret@host:4318/x".into());
    loaded.config.otlp.headers = vec![("dd-api-key".into(), "secret".into())];
    let shown = loaded.show();
    assert!(
        shown.contains("endpoint: \"https://***@host:4318/x\""),
        "{shown}"
    );
    assert!(!shown.contains("secret"));
}

#[test]
fn entries_become_rules() {
    let config = file(
        "thresholds: {l4_reuse: {min_ports: 9}}\n\
         destinations:\n- match: ['10.0.0.0/8:443']\n  thresholds: {l4_reuse: {min_refused: 50}}\n\
         mute:\n- causes: port_exhaustion\n  destinations: 192.0.2.1\n  until: 2026-12-31\n  reason: x\n\
         - causes: [forecast, nat_syn_drop]\n  reason: y\n",
    )
    .unwrap();
    let rules = config.rules(&WallClock::capture());
    let thresholds = &rules.destinations[0].thresholds.l4_reuse;
    assert_eq!((thresholds.min_refused, thresholds.min_ports), (50, 9));
    assert_eq!(rules.thresholds.l4_reuse.min_refused, 5);
    assert_eq!(rules.mutes[0].causes.len(), 5);
    assert_eq!(
        rules.mutes[0].until,
        Some(Moment(1_798_675_200_000_000_000))
    );
    assert_eq!(
        rules.mutes[1].causes,
        [Verdict::Forecast, Verdict::NatSynDrop]
    );
    assert_eq!(rules.mutes[1].until, None);
}

/// `docs/configuration.md` is what the tables say. `TUPLEWATCH_BLESS=1` writes it.
#[test]
fn configuration_doc_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let wanted = markdown();
    if std::env::var_os("TUPLEWATCH_BLESS").is_some() {
        std::fs::write(path, &wanted).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        there == wanted,
        "docs/configuration.md is out of date; run \
         TUPLEWATCH_BLESS=1 cargo test -p tuplewatch configuration_doc"
    );
}
