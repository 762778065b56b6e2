//! Snapshots of real namespaces, made for the test and gone with its thread. They need root and iproute2; without
//! them a test says that it is skipped.

use std::os::fd::AsFd as _;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// Runs `test` on a thread with a network namespace of its own.
fn in_new_namespace(test: impl FnOnce() + Send) {
    let run = || {
        // SAFETY: gives this thread another network namespace; it has no memory effects.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            eprintln!("skipped: no right to make a network namespace");
            return;
        }
        if Command::new("ip").arg("-V").output().is_err() {
            eprintln!("skipped: iproute2 is not installed");
            return;
        }
        test();
    };
    thread::scope(|scope| {
        if let Err(panic) = scope.spawn(run).join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Runs `ip` in the namespace of the calling thread.
#[track_caller]
fn ip(command: &str) {
    let output = Command::new("ip")
        .args(command.split(' '))
        .output()
        .expect("ip runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {command}: {error}");
}

fn index_of(snapshot: &Snapshot, name: &str) -> u32 {
    let link = snapshot.links.values().find(|l| l.name == name);
    link.unwrap_or_else(|| panic!("no {name}")).index
}

#[test]
fn links_are_read_as_they_were_made() {
    in_new_namespace(|| {
        ip("link set lo up");
        ip("link add br0 type bridge");
        ip("link add p1 type veth peer name q1");
        ip("link add p2 type veth peer name q2");
        ip("link set p1 master br0");
        ip("link add mac0 link p2 type macvlan mode bridge");
        for name in ["br0", "p1", "q1", "p2", "mac0"] {
            ip(&format!("link set {name} up"));
        }
        let snapshot = Snapshot::read().unwrap();
        let link = |name| &snapshot.links[&index_of(&snapshot, name)];
        let index = |name| index_of(&snapshot, name);
        assert!(link("lo").loopback && link("lo").up && link("lo").kind.is_none());
        assert_eq!(link("lo").device_type, libc::ARPHRD_LOOPBACK);
        assert_eq!(link("br0").kind.as_deref(), Some("bridge"));
        assert_eq!(link("p1").kind.as_deref(), Some("veth"));
        assert_eq!(
            (link("p1").master, link("p1").link),
            (Some(index("br0")), Some(index("q1")))
        );
        assert_eq!(
            (link("q1").master, link("q1").link),
            (None, Some(index("p1")))
        );
        assert_eq!(link("mac0").kind.as_deref(), Some("macvlan"));
        assert_eq!(link("mac0").link, Some(index("p2")));
        assert!(!link("q2").up && link("p2").up);
        assert_eq!(link("q2").device_type, libc::ARPHRD_ETHER);
        // IPv6 gives every link that is up a route to fe80::/64: not one of them counts.
        assert!(snapshot.routed.is_empty(), "{:?}", snapshot.routed);
    });
}

#[test]
fn routes_of_all_tables_and_kinds_count() {
    in_new_namespace(|| {
        for (name, address) in [
            ("va", "10.1.0.1/24"),
            ("vb", "10.2.0.1/24"),
            ("vc", "10.3.0.1/24"),
            ("vd", ""),
            ("ve", ""),
            ("vg", ""),
        ] {
            ip(&format!("link add {name} type veth peer name {name}-peer"));
            ip(&format!("link set {name} up"));
            ip(&format!("link set {name}-peer up"));
            if !address.is_empty() {
                ip(&format!("addr add {address} dev {name} noprefixroute"));
            }
        }
        let routed = || {
            let snapshot = Snapshot::read().unwrap();
            let names = snapshot
                .routed
                .iter()
                .map(|(index, table)| (snapshot.name(*index), *table));
            names.collect::<Vec<(String, u32)>>()
        };
        let expect = |expected: &[(&str, u32)]| {
            let expected: Vec<_> = expected
                .iter()
                .map(|(n, t)| ((*n).to_owned(), *t))
                .collect();
            assert_eq!(routed(), expected);
        };
        // The addresses made routes in table local only.
        expect(&[]);
        ip("route add 10.1.0.0/24 dev va table 2");
        expect(&[("va", 2)]);
        ip("route add 10.1.0.0/24 dev va table 1000");
        ip("route add 192.0.2.0/24 table 300 nexthop dev vb nexthop dev vc");
        expect(&[("va", 2), ("vb", 300), ("vc", 300)]);
        ip("-6 route add 2001:db8::/32 dev vd table 77");
        expect(&[("va", 2), ("vb", 300), ("vc", 300), ("vd", 77)]);
        ip("route add blackhole 198.51.100.0/24");
        ip("route add broadcast 203.0.113.255 dev ve table 9");
        expect(&[("va", 2), ("vb", 300), ("vc", 300), ("vd", 77)]);
        ip("nexthop add id 5 dev vg");
        ip("route add 203.0.113.0/24 nhid 5 table 12");
        expect(&[("va", 2), ("vb", 300), ("vc", 300), ("vd", 77), ("vg", 12)]);
        // Of this namespace: the kernel gives the file by the network namespace of the one who opens it.
        std::fs::write("/proc/sys/net/ipv4/nexthop_compat_mode", "0").unwrap();
        expect(&[("va", 2), ("vb", 300), ("vc", 300), ("vd", 77), ("vg", 0)]);
    });
}

#[test]
fn node_with_pods_on_a_bridge() {
    in_new_namespace(|| {
        ip("link add uplink type veth peer name world");
        ip("link add cni0 type bridge");
        for pod in ["pod1", "pod2"] {
            ip(&format!("link add {pod} type veth peer name {pod}-in"));
            ip(&format!("link set {pod} master cni0"));
            ip(&format!("link set {pod} up"));
        }
        for (name, address) in [("uplink", "192.0.2.2/24"), ("cni0", "10.42.0.1/24")] {
            ip(&format!("link set {name} up"));
            ip(&format!("addr add {address} dev {name}"));
        }
        let snapshot = Snapshot::read().unwrap();
        let choice = choose(&snapshot, &Options::default());
        let mut names = chosen(&choice);
        names.sort_unstable();
        assert_eq!(names, ["pod1", "pod2", "uplink"]);
        assert!(choice.covered.contains(&index_of(&snapshot, "cni0")));
    });
}

#[test]
fn tunnel_device_has_no_header() {
    in_new_namespace(|| {
        if !std::path::Path::new("/dev/net/tun").exists() {
            eprintln!("skipped: no /dev/net/tun");
            return;
        }
        ip("tuntap add dev tun0 mode tun");
        ip("link set tun0 up");
        ip("addr add 10.8.0.1/24 dev tun0");
        // No program holds the device, so it has no carrier; switched on it is all the same.
        ip("route replace 10.9.0.0/24 dev tun0 table 5");
        let choice = choose(&Snapshot::read().unwrap(), &Options::default());
        assert_eq!(chosen(&choice), ["tun0"]);
        assert_eq!(
            (choice.chosen[0].header, choice.chosen[0].kind.as_str()),
            (LinkHeader::None, "tun")
        );
    });
}

/// A process with a network namespace of its own.
struct Pod(Child);

impl Pod {
    fn start() -> Self {
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let child = Command::new("unshare")
            .args(["-n", "sleep", "60"])
            .spawn()
            .expect("unshare runs");
        let pod = Self(child);
        let start = Instant::now();
        while std::fs::read_link(pod.namespace()).is_ok_and(|ns| ns == own) {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "unshare does nothing"
            );
            thread::sleep(Duration::from_millis(5));
        }
        pod
    }

    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.0.id())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn parent_in_another_namespace_is_not_mistaken_for_a_link_here() {
    in_new_namespace(|| {
        let pod = Pod::start();
        ip("link add p type veth peer name q");
        ip("link add mac0 link p type macvlan mode bridge");
        ip(&format!("link set mac0 netns {}", pod.0.id()));
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let namespace = std::fs::File::open(pod.namespace()).unwrap();
                let kind = Some(rustix::thread::LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).unwrap();
                ip("link set mac0 up");
                ip("addr add 10.1.0.2/24 dev mac0");
                Snapshot::read().unwrap()
            });
            let snapshot = inside.join().unwrap();
            assert_eq!(snapshot.links[&index_of(&snapshot, "mac0")].link, None);
            assert_eq!(chosen(&choose(&snapshot, &Options::default())), ["mac0"]);
        });
    });
}

#[test]
fn changes_are_told() {
    in_new_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut changes = Changes::open().unwrap();
            let quiet = Duration::from_millis(300);
            let soon = Duration::from_secs(5);
            assert!(
                tokio::time::timeout(quiet, changes.next()).await.is_err(),
                "nothing happened"
            );

            ip("link add va type veth peer name vb");
            let change = tokio::time::timeout(soon, changes.next())
                .await
                .expect("in time")
                .unwrap();
            assert!(change.links && !change.lost, "{change:?}");
            ip("link set va up");
            ip("link set vb up");
            // IPv6 makes routes for seconds to come: wait for the one that only the next command makes.
            ip("addr add 10.1.0.1/24 dev va");
            let routes = async { while !changes.next().await.unwrap().routes {} };
            tokio::time::timeout(soon, routes).await.expect("in time");
            let links = async {
                ip("link del va");
                while !changes.next().await.unwrap().links {}
            };
            tokio::time::timeout(soon, links).await.expect("in time");
        });
    });
}

#[test]
fn overflow_is_told_and_the_socket_goes_on() {
    in_new_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut changes = Changes::open().unwrap();
            ip("link add va type veth peer name vb");
            ip("link set va up");
            ip("link set vb up");
            // One command that makes 4,000 messages, more than the socket's buffer holds.
            let file =
                std::env::temp_dir().join(format!("tuplewatch-routes-{}", std::process::id()));
            let lines =
                (0..4000).map(|n| format!("route add 10.{}.{}.0/24 dev va\n", n / 250, n % 250));
            std::fs::write(&file, lines.collect::<String>()).unwrap();
            ip(&format!("-batch {}", file.display()));
            std::fs::remove_file(&file).unwrap();
            let soon = Duration::from_secs(5);
            let lost = async { while !changes.next().await.unwrap().lost {} };
            tokio::time::timeout(soon, lost).await.expect("an overflow");
            assert_eq!(Snapshot::read().unwrap().routed.len(), 1);
            let links = async {
                ip("link del va");
                while !changes.next().await.unwrap().links {}
            };
            tokio::time::timeout(soon, links).await.expect("in time");
        });
    });
}

/// Runs `tc` in the namespace of the calling thread; `last` is one more argument.
#[track_caller]
fn tc(command: &str, last: &str) {
    let arguments = command.split(' ').chain([last]);
    let output = Command::new("tc").args(arguments).output();
    let output = output.expect("tc runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tc {command} {last}: {error}");
}

#[test]
fn filters_are_listed_and_an_empty_clsact_is_removed() {
    use clsact::{Side, filters, is_there, remove_filter, remove_if_empty};
    in_new_namespace(|| {
        ip("link add p type veth peer name q");
        let index = index_of(&Snapshot::read().unwrap(), "p");
        assert!(!is_there(index).unwrap());
        assert_eq!(filters(index, Side::Ingress).unwrap(), []);
        tc("qdisc add dev p", "clsact");
        // A classic program that returns at once.
        let filter = "filter add dev p egress prio 7 protocol all bpf bytecode";
        tc(filter, "1,6 0 0 4294967295,");
        assert!(is_there(index).unwrap());
        assert_eq!(filters(index, Side::Ingress).unwrap(), []);
        let found = filters(index, Side::Egress).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].kind.as_str(), found[0].priority), ("bpf", 7));
        assert_eq!((&found[0].name, found[0].program), (&None, None));
        remove_if_empty(index).unwrap();
        assert!(is_there(index).unwrap(), "somebody's filter is on it");
        remove_filter(index, Side::Egress, &found[0]).unwrap();
        assert_eq!(filters(index, Side::Egress).unwrap(), []);
        remove_if_empty(index).unwrap();
        assert!(!is_there(index).unwrap());
        remove_if_empty(index).expect("where there is none, nothing is to be done");
    });
}
