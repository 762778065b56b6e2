//! Connections that end in silence: a router that forgets and says nothing, and what only looks like it.

use std::process::Command;

use super::*;

/// New connections of the client, two in a second: an exchange on each.
fn newcomers(host: &Host, to: SocketAddr, fates: &Fates) -> JoinHandle<()> {
    let (host, fates) = (host.clone(), fates.clone());
    std::thread::spawn(move || {
        while !fates.over.load(Ordering::Relaxed) {
            let stream = host.in_ns(|| TcpStream::connect_timeout(&to, SECOND));
            if let Ok(Ok(mut stream)) = stream
                && stream.set_read_timeout(Some(SECOND)).is_ok()
            {
                let _ = exchange(&mut stream);
            }
            fates.sleep(SECOND / 2);
        }
    })
}

fn is_silent(line: &Value, state: &str) -> bool {
    line["type"] == "alert" && line["cause"] == "idle_killed" && line["state"] == state
}

fn all(fates: &Fates, clients: Vec<JoinHandle<()>>) {
    fates.over.store(true, Ordering::Relaxed);
    for client in clients {
        let _ = client.join();
    }
}

/// What a replay of the client's packets says of the cause.
fn replayed(binary: &std::path::Path, file: &std::path::Path) -> Result<Vec<Value>> {
    let mut command = Command::new(binary);
    command.args(["replay", "--format", "json"]).args(ARGS);
    let output = command.arg(file).output()?;
    let lines = String::from_utf8(output.stdout)?;
    let lines = lines.lines().map(serde_json::from_str);
    Ok(lines.collect::<Result<_, _>>()?)
}

#[test]
fn a_router_that_forgets_without_a_word_is_told_with_its_time_out() -> Result<()> {
    let net = forgetful("drop")?;
    let to = net.service();
    let dir = tempfile::tempdir()?;
    let tap = net.tap(&net.client, "eth0", &dir.path().join("client"))?;
    let _echo = Echo::new(&net.server, to, None)?;
    let agent = watch(&net.client, &ARGS)?;
    let fates = Fates::default();
    let mut clients = vec![newcomers(&net.client, to, &fates)];
    for (pauses, set) in [
        (&[9.0, 9.6, 2.0][..], plain as fn(&TcpStream) -> _),
        (&[9.4, 9.2, 9.6], plain),
        (&[9.5, 3.0, 9.3], plain),
        (&[10.4, 12.0, 10.8], plain),
        (&[11.0, 10.5, 13.0], plain),
        (&[10.6, 10.4, 10.6], plain),
    ] {
        clients.push(client(&net.client, to, &fates, pauses, set)?);
        std::thread::sleep(Duration::from_millis(700));
    }
    let told = agent.wait_alert(90 * SECOND, |line| is_told(line, 3))?;
    println!("{}\n{}", told["summary"], told["remedy"]);
    ensure!(told["severity"] == "critical", "{told}");
    let idle = &told["evidence"]["idle"];
    ensure!(
        number(idle, "in_silence") == number(idle, "killed"),
        "{idle}"
    );
    let timeout = idle["timeout_seconds"].as_f64().context("an estimate")?;
    ensure!((timeout / FORGETS - 1.0).abs() < 0.05, "{timeout}: {idle}");
    // One that waits still, and how its socket is set.
    let connections = idle["connections"].as_array().context("connections")?;
    let waits = connections.iter().find(|c| !c["close"].is_null());
    let waits = waits.with_context(|| format!("none waits: {idle}"))?;
    let port = number(waits, "client.port");
    let close = format!("ss -K dst 203.0.113.10 dport = 8080 src 10.79.1.2 sport = {port}");
    ensure!(waits["close"] == close.as_str(), "{waits}");
    ensure!(waits["in_silence"] == true && waits["probe"] == false);
    ensure!(waits["keep_alive"] == false && waits["keep_alive_seconds"] == 7200.0);
    ensure!(waits["user_timeout_seconds"] == 0.0, "{waits}");
    ensure!(waits["pid"] == std::process::id(), "{waits}");
    let remedy = told["remedy"].as_str().context("a text")?;
    ensure!(remedy.contains("tcp_keepalive_time=") && remedy.contains("TCP_USER_TIMEOUT"));
    let died = fates.killed();
    // The first ones were told as black holes: until three show after which time they come.
    let causes = |line: &Value| line["cause"] == "idle_killed" || line["cause"] == "black_holed";
    let others = agent.alerts()?;
    ensure!(others.iter().all(causes), "{others:#?}");
    agent.wait_alert(60 * SECOND, |line| {
        line["cause"] == "black_holed" && line["state"] == "resolved"
    })?;
    all(&fates, clients);
    println!("{died} had died, {} in the end", fates.killed());
    agent.wait_alert(90 * SECOND, |line| is_silent(line, "resolved"))?;
    let recording = tap.stop()?;
    ensure!(recording.dropped == 0, "{recording:?}");
    let binary = std::fs::read_link(format!("/proc/{}/exe", agent.pid()))?;
    let lines = replayed(&binary, &recording.file)?;
    let again = lines.iter().rfind(|line| is_silent(line, "firing"));
    let again = again.context("the replay tells it too")?;
    println!("{}", again["summary"]);
    let idle = &again["evidence"]["idle"];
    ensure!(number(idle, "in_silence") >= 3, "{idle}");
    let replayed = idle["timeout_seconds"].as_f64().context("an estimate")?;
    ensure!((replayed / FORGETS - 1.0).abs() < 0.05, "{replayed}");
    ensure!(
        lines.iter().any(|line| line["type"] == "evidence"),
        "the packets that show it"
    );
    Ok(())
}

/// Clients that asked a few times and then rest, for longer than any has rested before.
const THEN_REST: [&[f64]; 5] = [
    &[2.0, 3.0, 2.5, 14.0],
    &[3.0, 2.0, 1.5, 15.0],
    &[2.5, 2.5, 2.5, 13.5],
    &[1.5, 3.5, 2.0, 14.5],
    &[2.2, 2.8, 1.8, 16.0],
];

/// Everybody rests when `happens` takes place.
fn while_all_rest(happens: impl Fn(&Routed) -> Result<()>) -> Result<(Routed, Agent)> {
    let net = Routed::new(RoutedConfig::default())?;
    // Makes the router track connections.
    net.router.nft(
        "table ip lost {
  chain marking { type filter hook prerouting priority mangle; ct state new ct mark set 0x1; }
  chain passing { type filter hook forward priority 0; }
}
",
    )?;
    let to = net.service();
    let _echo = Echo::new(&net.server, to, None)?;
    let agent = watch(&net.client, &ARGS)?;
    let fates = Fates::default();
    let mut clients = vec![newcomers(&net.client, to, &fates)];
    for pauses in THEN_REST {
        clients.push(client(&net.client, to, &fates, pauses, plain)?);
    }
    std::thread::sleep(11 * SECOND);
    happens(&net)?;
    std::thread::sleep(20 * SECOND);
    all(&fates, clients);
    println!("{} were lost", fates.killed());
    Ok((net, agent))
}

/// The server dies while all rest, another one takes its place: what was sent to the first one vanishes.
#[test]
fn a_server_that_died_meanwhile_has_no_time_out() -> Result<()> {
    let (_net, agent) = while_all_rest(|net| {
        net.router.nft(
            "flush chain ip lost marking
add rule ip lost marking ct state new ct mark set 0x2
add rule ip lost passing ct mark 0x1 drop
",
        )
    })?;
    let alerts = agent.alerts()?;
    let told = |cause: &str| alerts.iter().any(|alert| alert["cause"] == cause);
    ensure!(told("black_holed"), "{alerts:#?}");
    ensure!(!told("idle_killed"), "{alerts:#?}");
    Ok(())
}

/// Nothing passes for a while, new connections neither.
#[test]
fn a_path_that_was_down_meanwhile_has_no_time_out() -> Result<()> {
    let (_net, agent) = while_all_rest(|net| {
        net.router.nft("add rule ip lost passing drop\n")?;
        std::thread::sleep(18 * SECOND);
        net.router.nft("flush chain ip lost passing\n")
    })?;
    ensure!(look_alikes(&agent)?.contains("path_down"));
    agent.expect_no_alert(SECOND, |_| true)?;
    Ok(())
}
