//! Tests of the lab itself: the incident appears as it did in the recordings, and what the lab counts
//! agrees with itself, with the kernel, with the applications and with a recording.

mod recording;

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Result;
use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use tuplewatch_tests::prelude::*;
use tuplewatch_tests::topology::MiddleboxCounters;

const SECOND: Duration = Duration::from_secs(1);
const POOL: usize = 200;

/// What a run of the incident left behind.
struct Run {
    load: LoadReport,
    served: ServeReport,
    clients: Counters,
    client_syn_retransmits: u64,
    server: HostTruth,
    middlebox: MiddleboxCounters,
}

/// Runs 40 connections a second over two clients until the pool has been handed out at least twice.
fn run(incident: &Incident) -> Result<Run> {
    let server = incident.serve()?;
    let mut load = LoadReport::default();
    for client in incident.load(20.0, 12 * SECOND)? {
        let report = client.wait()?;
        load.attempted += report.attempted;
        load.connected += report.connected;
        load.ok += report.ok;
        load.syn_retransmits += report.syn_retransmits;
        for (kind, count) in report.failed {
            *load.failed.entry(kind).or_insert(0) += count;
        }
    }
    incident.settle(SECOND, 30 * SECOND)?;
    let truth = incident.truth()?;
    let names = incident.client_names();
    let run = Run {
        load,
        served: server.stop()?,
        clients: truth.sum(&names),
        client_syn_retransmits: truth.kernel_sum(&names, "TcpExtTCPSynRetrans").try_into()?,
        server: truth.host("server").clone(),
        middlebox: incident.middlebox()?,
    };
    let c = &run.clients;
    println!(
        "attempted {} ok {} failed {:?}; SYN {} -> {}, repeats {}, SYN-ACK {} -> {}, bare ACK {} -> {}, \
         RST {} -> {}, distinct ports {}, TIME_WAIT peak {:?}, {:?}",
        run.load.attempted,
        run.load.ok,
        run.load.failed,
        c.syn_out,
        run.server.counters.syn_in,
        c.syn_repeat_out,
        run.server.counters.synack_out,
        c.synack_in,
        run.server.counters.bareack_to_syn_out,
        c.bareack_to_syn_in,
        c.rst_out,
        run.server.counters.rst_in,
        run.server.distinct_ports_in(incident.nat_address()),
        run.server.time_wait_peak.get(&incident.nat_address()),
        run.middlebox,
    );
    Ok(run)
}

/// What is true of every run, whatever the NAT drops.
fn check_common(incident: &Incident, run: &Run) {
    let (clients, server) = (&run.clients, &run.server.counters);
    // Against the applications and the kernel.
    // 40 a second for 12 s; a busy machine may miss slots at the end, and each port is still used again.
    assert!(
        (300..=480).contains(&run.load.attempted),
        "{} attempts",
        run.load.attempted
    );
    assert_eq!(
        clients.syn_out,
        run.load.attempted + run.client_syn_retransmits
    );
    assert_eq!(clients.syn_repeat_out, run.client_syn_retransmits);
    assert_eq!(clients.syn_repeat_same_port_out, run.client_syn_retransmits);
    assert_eq!(server.synack_out, run.served.accepted);
    assert_eq!(clients.synack_in, run.load.connected);
    assert_eq!(run.load.connected, run.served.accepted);
    // From end to end: the NAT loses only what it says it loses.
    assert_eq!(server.syn_in + run.middlebox.clash, clients.syn_out);
    assert_eq!(
        server.bareack_to_syn_out,
        clients.bareack_to_syn_in + run.middlebox.bareack_dropped
    );
    assert_eq!(server.rst_in + run.middlebox.rst_dropped, clients.rst_out);
    // Each bare ACK that arrives is answered by an RST, and there are no other RSTs.
    assert_eq!(clients.rst_to_syn_out, clients.bareack_to_syn_in);
    assert_eq!(clients.rst_out, clients.rst_to_syn_out);
    // The pool is used up, and nothing else is used.
    let ports = &run.server.source_ports_in[&incident.nat_address()];
    assert_eq!(ports.len(), POOL);
    assert_eq!((ports.first(), ports.last()), (Some(&2048), Some(&2247)));
    let peak = run.server.time_wait_peak[&incident.nat_address()];
    assert!((POOL / 2..=POOL).contains(&peak), "TIME_WAIT peak {peak}");
    // About half of the SYNs on used ports are refused; far fewer would make tests flaky.
    assert!(
        server.bareack_to_syn_out >= 40,
        "only {} bare ACKs",
        server.bareack_to_syn_out
    );
}

fn check_healed(incident: &Incident, run: &Run) {
    check_common(incident, run);
    let (clients, server) = (&run.clients, &run.server.counters);
    assert_eq!(run.middlebox, MiddleboxCounters::default());
    assert_eq!(server.rst_to_syn_in, server.bareack_to_syn_out);
    // The RST has closed the NAT's mapping, so the repeat comes from another port of the pool.
    assert_eq!(server.syn_repeat_in, clients.syn_repeat_out);
    // (one that waited for seconds may meet the same port when the pool has come round)
    assert!(
        server.syn_repeat_same_port_in * 20 <= server.syn_repeat_in,
        "{} of {} repeats on the same port",
        server.syn_repeat_same_port_in,
        server.syn_repeat_in
    );
    // Few applications notice: those that met several bare ACKs within their 5 s.
    assert!(
        run.load.ok * 100 >= run.load.attempted * 95,
        "{:?}",
        run.load.failed
    );
}

fn check_unhealed(incident: &Incident, run: &Run) {
    check_common(incident, run);
    let server = &run.server.counters;
    assert_eq!(server.rst_in, 0);
    assert_eq!(run.middlebox.rst_dropped, run.clients.rst_out);
    // The mapping is kept, so the same SYN comes again on the same port.
    assert!(server.syn_repeat_same_port_in > 0);
    assert!(
        run.load.failed.get("app_timeout").is_some_and(|n| *n >= 20),
        "{:?}",
        run.load.failed
    );
}

#[test]
fn incident_healed_v4_agrees_with_a_recording() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("server.pcap");
    let tap = incident.tap(&incident.server, "eth0", &file)?;
    let run = run(&incident)?;
    let recording = tap.stop()?;
    check_healed(&incident, &run);
    assert_eq!(recording.dropped, 0);
    let (seen, healthy) = recording::count(&recording.file, incident.service())?;
    assert_eq!(seen, run.server.counters);
    println!("first bare ACK {healthy:?} after the first SYN");
    assert!(
        healthy < 10 * SECOND,
        "the pool is used up after {healthy:?}"
    );
    Ok(())
}

#[test]
fn incident_healed_v6() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        family: Family::V6,
        ..IncidentConfig::default()
    })?;
    let run = run(&incident)?;
    check_healed(&incident, &run);
    Ok(())
}

#[test]
fn incident_unhealed_v4() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        drop_client_rst: true,
        ..IncidentConfig::default()
    })?;
    let run = run(&incident)?;
    check_unhealed(&incident, &run);
    Ok(())
}

#[test]
fn incident_unhealed_v6_with_classic_timers() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        family: Family::V6,
        drop_client_rst: true,
        classic_syn_timers: true,
        syn_hold: 9 * SECOND,
        ..IncidentConfig::default()
    })?;
    let run = run(&incident)?;
    check_unhealed(&incident, &run);
    Ok(())
}

#[test]
fn incident_with_bare_acks_lost_looks_like_silence_to_the_clients() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        drop_bare_ack: true,
        ..IncidentConfig::default()
    })?;
    let run = run(&incident)?;
    check_common(&incident, &run);
    assert_eq!(run.clients.bareack_to_syn_in, 0);
    assert_eq!(
        run.middlebox.bareack_dropped,
        run.server.counters.bareack_to_syn_out
    );
    assert_eq!(run.clients.rst_out, 0);
    Ok(())
}

#[test]
fn random_allocation_and_timestamps_show_the_incident_too() -> Result<()> {
    let incident = Incident::new(IncidentConfig {
        allocation: Allocation::Random,
        timestamps: true,
        ..IncidentConfig::default()
    })?;
    let _server = incident.serve()?;
    for load in incident.load(20.0, 12 * SECOND)? {
        load.wait()?;
    }
    incident.settle(SECOND, 30 * SECOND)?;
    let truth = incident.truth()?;
    let server = truth.host("server");
    println!("bare ACKs {}", server.counters.bareack_to_syn_out);
    assert!(server.counters.bareack_to_syn_out >= 20);
    let ports = &server.source_ports_in[&incident.nat_address()];
    assert!(ports.iter().all(|port| incident.config.pool.contains(port)));
    Ok(())
}

#[test]
fn the_same_load_through_a_pool_is_healthy() -> Result<()> {
    let incident = Incident::new(IncidentConfig::default())?;
    let server = incident.serve()?;
    let pools: Vec<Pool> = incident
        .clients
        .iter()
        .map(|client| {
            let config = PoolConfig {
                rate: 20.0,
                seconds: 8.0,
                ..PoolConfig::new(incident.service())
            };
            client.pool(&config)
        })
        .collect::<Result<_>>()?;
    for pool in pools {
        let report = pool.wait()?;
        assert_eq!((report.requests, report.ok, report.failed), (160, 160, 0));
        assert_eq!(report.connections, 8);
    }
    incident.settle(SECOND, 10 * SECOND)?;
    let truth = incident.truth()?;
    let counters = truth.host("server").counters;
    assert_eq!(
        (
            counters.syn_in,
            counters.bareack_to_syn_out,
            counters.rst_in
        ),
        (16, 0, 0)
    );
    assert_eq!(server.stop()?.responses, 320);
    Ok(())
}

/// A slow machine sends its SYN again before the answer to the first has come: each bare ACK answers one of
/// them, and one more answers nothing.
#[test]
fn each_bare_ack_answers_a_syn_of_its_own() -> Result<()> {
    const WRONG: u32 = 4242;
    let (own, service) = (Ipv4Addr::new(10, 90, 0, 1), Ipv4Addr::new(10, 90, 0, 2));
    let lab = Lab::new()?;
    let client = lab.host("client")?;
    let mut tun = client.tun("tun0", own)?;
    lab.count(&client, &[8080])?;
    let load = client.load(&LoadConfig {
        count: Some(1),
        ..LoadConfig::new((service, 8080).into())
    })?;
    let mut ports = Vec::new();
    let sent_twice = wait_for(20 * SECOND, || {
        while let Ok(Some(packet)) = tun.receive() {
            if let Ok(packet) = SlicedPacket::from_ip(&packet)
                && let Some(TransportSlice::Tcp(tcp)) = packet.transport
                && tcp.syn()
            {
                ports.push(tcp.source_port());
            }
        }
        ports.len() == 2
    });
    assert!(sent_twice, "{ports:?}");
    let mut bare_ack = Vec::new();
    PacketBuilder::ipv4(service.octets(), own.octets(), 64)
        .tcp(8080, ports[0], 1, 1000)
        .ack(WRONG)
        .write(&mut bare_ack, &[])?;
    for n in 1..=3 {
        tun.send(&bare_ack)?;
        let counted = || Some(lab.truth().ok()?.host("client").counters.rst_out == n);
        assert!(wait_for(10 * SECOND, || counted() == Some(true)), "RST {n}");
    }
    let counters = lab.truth()?.host("client").counters;
    load.stop()?;
    assert_eq!(
        (
            counters.syn_out,
            counters.bareack_to_syn_in,
            counters.rst_to_syn_out
        ),
        (2, 2, 2),
        "{counters:?}"
    );
    Ok(())
}
