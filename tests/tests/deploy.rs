//! What deploy/ promises: the unit and the manifest are valid, the rights that they give suffice, and
//! each of them is needed.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use support::SECOND;
use support::confined::{Binary, NOBODY};
use tuplewatch_tests::prelude::*;

/// Least confined that the unit may be, in tenths: what `systemd-analyze security` calls exposure.
const EXPOSURE: &str = "20";
/// Oldest and newest Kubernetes that the manifest is for, and one that many run.
const KUBERNETES: [&str; 3] = ["1.31", "1.33", "1.37"];

fn deploy(file: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(file);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The values of a key of the unit, of all its lines.
fn unit(key: &str) -> Result<Vec<String>> {
    let prefix = format!("{key}=");
    let text = deploy("tuplewatch.service")?;
    let values: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix))
        .flat_map(|values| values.split(' ').map(str::to_owned))
        .collect();
    ensure!(!values.is_empty(), "the unit has no {key}");
    Ok(values)
}

/// The documents of the manifest.
fn manifest() -> Result<Vec<Value>> {
    let documents = serde_saphyr::from_multiple(&deploy("kubernetes/daemonset.yaml")?);
    documents.context("deploy/kubernetes/daemonset.yaml")
}

/// The one container of the DaemonSet.
fn container() -> Result<Value> {
    let documents = manifest()?;
    let set = documents.iter().find(|d| d["kind"] == "DaemonSet");
    let containers = &set.context("no DaemonSet")?["spec"]["template"]["spec"]["containers"];
    ensure!(
        containers.as_array().is_some_and(|c| c.len() == 1),
        "{containers}"
    );
    Ok(containers[0].clone())
}

fn texts(value: &Value) -> Vec<String> {
    let values = value.as_array().into_iter().flatten();
    values
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

/// `BPF` as `bpf`, `CAP_BPF` as `bpf`.
fn plain(capabilities: &[String]) -> Vec<String> {
    let plain = capabilities
        .iter()
        .map(|c| c.trim_start_matches("CAP_").to_lowercase());
    plain.collect()
}

/// The states of all hooks once the agent is ready; its last words if it ends before.
fn hooks(agent: &Proc) -> Result<Vec<(String, String)>> {
    let ready = agent.find_stdout(0, 60 * SECOND, |line| line.contains("\"type\":\"ready\""));
    let Some((_, line)) = ready else {
        bail!("{}", agent.describe());
    };
    let ready: Value = serde_json::from_str(&line)?;
    let hooks = ready["hooks"].as_array().context("hooks")?.iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(hooks
        .map(|h| (text(&h["name"]), text(&h["state"])))
        .collect())
}

fn all_work(hooks: &[(String, String)]) -> bool {
    hooks.len() >= 6 && hooks.iter().all(|(_, state)| state == "ok")
}

/// Runs a checker; gives whether it was content and what it said.
fn checked(program: &Path, args: &[&str], file: &Path) -> Result<(bool, String)> {
    let output = Command::new(program)
        .args(args)
        .arg(file)
        .env("SYSTEMD_COLORS", "0")
        .output()
        .with_context(|| format!("{} does not start", program.display()))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    Ok((output.status.success(), said))
}

/// systemd takes the unit without a word, and what it would object to is noticed.
#[test]
fn the_unit_is_valid() -> Result<()> {
    let binary = Binary::new()?;
    let text = deploy("tuplewatch.service")?;
    let path = binary.path.display().to_string();
    // The program must exist.
    let text = text.replace("/usr/bin/tuplewatch", &path);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tuplewatch.service");
    let verify = |text: &str| -> Result<(bool, String)> {
        fs::write(&file, text)?;
        let analyze = Path::new("systemd-analyze");
        checked(analyze, &["verify", "--man=no"], &file)
    };
    assert_eq!(verify(&text)?, (true, String::new()));
    let (_, said) = verify(&text.replace("\nProtectHome=", "\nProtectHom="))?;
    assert!(said.contains("ProtectHom"), "a wrong key is told: {said}");
    Ok(())
}

/// No more exposed than was argued.
#[test]
fn the_unit_is_confined() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tuplewatch.service");
    let security = |text: &str| -> Result<(bool, String)> {
        fs::write(&file, text)?;
        let threshold = format!("--threshold={EXPOSURE}");
        let args = ["security", "--offline=true", "--no-pager", &threshold];
        checked(Path::new("systemd-analyze"), &args, &file)
    };
    let text = deploy("tuplewatch.service")?;
    let (passed, said) = security(&text)?;
    assert!(passed, "{said}");
    let (passed, _) = security(&text.replace("\nDynamicUser=", "\n#"))?;
    assert!(!passed, "as root it is more exposed");
    Ok(())
}

/// As the unit starts it: a user of no standing with these rights. Without any one of them something
/// does not work, and the agent says what and what would help.
#[test]
fn the_rights_of_the_unit_suffice_and_none_can_be_spared() -> Result<()> {
    let rights = plain(&unit("CapabilityBoundingSet")?);
    assert_eq!(rights, plain(&unit("AmbientCapabilities")?));
    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let start = |rights: &[String]| {
        let mut command = binary.confined(NOBODY, rights);
        command.args(["run", "--format", "json", "--summary-interval", "1s"]);
        pair.server.spawn("tuplewatch", command)
    };
    let agent = start(&rights)?;
    let state = hooks(&agent)?;
    assert!(all_work(&state), "{state:?}");
    let _server = pair
        .server
        .serve(&ServeConfig::closing_first(pair.service()))?;
    let load = LoadConfig {
        count: Some(20),
        rate: 50.0,
        ..LoadConfig::new(pair.service())
    };
    assert_eq!(pair.client.load(&load)?.wait()?.ok, 20);
    // Seen on the wire, and counted by the census.
    let counted = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap_or_default();
        let spaces = line["spaces"].as_array().into_iter().flatten();
        let mut wire = spaces.filter(|s| s["point"] == "wire" && s["server.port"] == 8080);
        wire.any(|s| s["totals"]["opens"] == 20 && s["time_wait"]["total"] == 20)
    };
    ensure!(
        agent.find_stdout(0, 20 * SECOND, counted).is_some(),
        "{}",
        agent.describe()
    );
    assert!(agent.terminate(10 * SECOND)?.success());
    assert_eq!(agent.stderr(), Vec::<String>::new());

    for missing in &rights {
        let rest: Vec<_> = rights.iter().filter(|r| *r != missing).cloned().collect();
        let agent = start(&rest)?;
        match hooks(&agent) {
            Ok(state) => {
                assert!(!all_work(&state), "without {missing} all works: {state:?}");
                assert!(agent.terminate(10 * SECOND)?.success());
            }
            Err(_) => {
                let status = agent.wait(SECOND)?;
                assert!(!status.success(), "without {missing}");
                let said = agent.stderr().join("\n");
                assert!(
                    said.contains(&format!("CAP_{}", missing.to_uppercase())),
                    "{said}"
                );
            }
        }
    }
    Ok(())
}

/// Kubernetes takes the manifest, and what it would refuse is noticed.
#[test]
fn the_manifest_is_valid() -> Result<()> {
    const REMEDY: &str = "run `cargo xtask setup` and the tests by `cargo xtask test`, or set \
                          TUPLEWATCH_KUBERNETES_VALIDATE to the path of kubernetes-validate";
    let tool = std::env::var_os("TUPLEWATCH_KUBERNETES_VALIDATE").filter(|path| !path.is_empty());
    let tool = PathBuf::from(tool.context(REMEDY)?);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("daemonset.yaml");
    let validate = |version: &str, text: &str| -> Result<(bool, String)> {
        fs::write(&file, text)?;
        checked(&tool, &["--strict", "--quiet", "-k", version], &file).context(REMEDY)
    };
    let text = deploy("kubernetes/daemonset.yaml")?;
    for version in KUBERNETES {
        let (passed, said) = validate(version, &text)?;
        assert!(passed && said.is_empty(), "{version}: {said}");
        let (passed, said) = validate(version, &text.replace("hostNetwork:", "hostNetworkk:"))?;
        assert!(
            !passed && said.contains("hostNetworkk"),
            "{version}: {said}"
        );
    }
    Ok(())
}

/// The container runs with the arguments, the user and the rights that the manifest gives it, and its
/// probes are answered.
#[test]
fn the_container_of_the_manifest_works() -> Result<()> {
    let container = container()?;
    let security = &container["securityContext"];
    assert_eq!(security["privileged"], false);
    assert_eq!(security["allowPrivilegeEscalation"], false);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(texts(&security["capabilities"]["drop"]), ["ALL"]);
    let rights = plain(&texts(&security["capabilities"]["add"]));
    assert_eq!(
        rights,
        plain(&unit("CapabilityBoundingSet")?),
        "as the unit has"
    );
    let uid = u32::try_from(security["runAsUser"].as_u64().context("runAsUser")?)?;

    let pair = Pair::new(PairConfig::default())?;
    let binary = Binary::new()?;
    let mut command = binary.confined(uid, &rights);
    command.args(texts(&container["args"]));
    let agent = pair.server.spawn("tuplewatch", command)?;
    let state = hooks(&agent)?;
    assert!(all_work(&state), "{state:?}");
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let get = &container[probe]["httpGet"];
        let port = container["ports"]
            .as_array()
            .and_then(|ports| ports.iter().find(|p| p["name"] == get["port"]))
            .and_then(|port| port["containerPort"].as_u64());
        let (host, path) = (get["host"].as_str(), get["path"].as_str());
        let (host, port) = (host.context("host")?, port.context("port")?);
        let url = format!("http://{host}:{port}{}", path.context("path")?);
        let answered = || fetch(&pair.server, &url).is_ok_and(|code| code == 200);
        ensure!(
            wait_for(5 * SECOND, answered),
            "{probe} {url}: {}",
            agent.describe()
        );
    }
    assert!(agent.terminate(10 * SECOND)?.success());
    Ok(())
}

/// The status code of an answer, asked for from inside `host`.
fn fetch(host: &Host, url: &str) -> Result<u16> {
    use std::io::{Read as _, Write as _};
    let rest = url.strip_prefix("http://").context("http")?;
    let (address, path) = rest.split_once('/').context("path")?;
    host.in_ns(|| {
        let mut stream = std::net::TcpStream::connect(address)?;
        write!(stream, "GET /{path} HTTP/1.1\r\nHost: {address}\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let code = answer.split(' ').nth(1).context("no status code")?;
        Ok(code.parse()?)
    })?
}
