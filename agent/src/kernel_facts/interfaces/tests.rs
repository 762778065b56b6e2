//! The choice on invented hosts. `live.rs` reads real namespaces.

mod live;

use proptest::prelude::*;

use super::netlink::Messages;
use super::*;

const ETHER: u16 = libc::ARPHRD_ETHER;
const NO_HEADER: u16 = libc::ARPHRD_NONE;

/// A host that is put together link by link; numbers count up from 1, which is `lo`.
struct Host(Snapshot);

impl Host {
    fn new() -> Self {
        let mut host = Self(Snapshot::default());
        let index = host.add("lo", "");
        let lo = host.link(index);
        lo.loopback = true;
        lo.device_type = libc::ARPHRD_LOOPBACK;
        host
    }

    fn link(&mut self, index: u32) -> &mut Link {
        self.0.links.get_mut(&index).expect("a link")
    }

    /// An interface that is up; hardware if `kind` is empty.
    fn add(&mut self, name: &str, kind: &str) -> u32 {
        let index = u32::try_from(self.0.links.len()).unwrap() + 1;
        let link = Link {
            index,
            name: name.to_owned(),
            device_type: ETHER,
            up: true,
            kind: Some(kind.to_owned()).filter(|k| !k.is_empty()),
            ..Link::default()
        };
        self.0.links.insert(index, link);
        index
    }

    fn member(&mut self, name: &str, kind: &str, master: u32) -> u32 {
        let index = self.add(name, kind);
        self.link(index).master = Some(master);
        index
    }

    fn on(&mut self, name: &str, kind: &str, link: u32) -> u32 {
        let index = self.add(name, kind);
        self.link(index).link = Some(link);
        index
    }

    fn headerless(&mut self, name: &str, kind: &str, device_type: u16) -> u32 {
        let index = self.add(name, kind);
        self.link(index).device_type = device_type;
        index
    }

    fn route(&mut self, index: u32, table: u32) {
        self.0.routed.insert(index, table);
    }

    fn choose(&self) -> Choice {
        choose(&self.0, &Options::default())
    }

    fn asked(&self, include: &[&str], exclude: &[&str]) -> Choice {
        let owned = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        choose(
            &self.0,
            &Options {
                include: owned(include),
                exclude: owned(exclude),
            },
        )
    }
}

fn chosen(choice: &Choice) -> Vec<&str> {
    choice.chosen.iter().map(|i| i.name.as_str()).collect()
}

fn why<'a>(choice: &'a Choice, name: &str) -> &'a str {
    let unseen = choice.unseen.iter().find(|u| u.name == name);
    unseen.map_or("", |u| &u.reason)
}

#[test]
fn plain_host() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    host.route(eth0, 254);
    let choice = host.choose();
    assert_eq!(
        choice.chosen,
        [Interface {
            index: 2,
            name: "eth0".to_owned(),
            header: LinkHeader::Ethernet,
            kind: "physical".to_owned(),
            why: "a route in table 254 points to it".to_owned(),
        }]
    );
    assert_eq!(choice.covered, [2].into());
    assert!(why(&choice, "lo").contains("by its name"));
}

#[test]
fn bond_is_read_at_its_slaves() {
    let mut host = Host::new();
    let bond = host.add("bond0", "bond");
    host.member("eth0", "", bond);
    host.member("eth1", "", bond);
    host.route(bond, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "eth1"]);
    assert_eq!(
        choice.chosen[0].why,
        "below bond0 (a route in table 254 points to it)"
    );
    assert_eq!(choice.covered, [2, 3, 4].into());
}

#[test]
fn vlan_on_a_bond_is_read_at_the_slaves_and_a_slave_that_is_down_is_told() {
    let mut host = Host::new();
    let bond = host.add("bond0", "bond");
    host.member("eth0", "", bond);
    let eth1 = host.member("eth1", "", bond);
    host.link(eth1).up = false;
    let vlan = host.on("bond0.100", "vlan", bond);
    host.route(vlan, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0"]);
    assert_eq!(why(&choice, "eth1"), "it is down");
    assert_eq!(choice.covered, [bond, 3, vlan].into());
}

#[test]
fn aws_vpc_cni() {
    // Two network cards, the second with routes in table 2 only; pods on veths with a route each.
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let eth1 = host.add("eth1", "");
    host.route(eth0, 254);
    host.route(eth1, 2);
    for pod in 0..3 {
        let veth = host.add(&format!("eni{pod}"), "veth");
        host.route(veth, 254);
    }
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "eth1", "eni0", "eni1", "eni2"]);
    assert_eq!(choice.chosen[1].why, "a route in table 2 points to it");
    assert_eq!(choice.covered.len(), 5);
}

#[test]
fn docker_bridge_is_read_at_its_ports() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let docker0 = host.add("docker0", "bridge");
    let one = host.member("veth1", "veth", docker0);
    host.member("veth2", "veth", docker0);
    host.route(eth0, 254);
    host.route(docker0, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "veth1", "veth2"]);
    assert!(
        choice.covered.contains(&docker0),
        "a segment from veth1 leaves by eth0 with ingress_ifindex of docker0"
    );

    host.link(one).up = false;
    assert!(
        host.choose().covered.contains(&docker0),
        "a port that is down carries nothing"
    );
}

#[test]
fn empty_bridge_is_unseen() {
    let mut host = Host::new();
    let docker0 = host.add("docker0", "bridge");
    host.route(docker0, 254);
    assert_eq!(why(&host.choose(), "docker0"), "it has no member");
    let port = host.member("veth1", "veth", docker0);
    host.link(port).up = false;
    assert_eq!(why(&host.choose(), "docker0"), "nothing below it is up");
}

#[test]
fn bridge_over_a_vlan_over_hardware() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let br0 = host.add("br0", "bridge");
    let vlan = host.on("eth0.7", "vlan", eth0);
    host.link(vlan).master = Some(br0);
    host.member("vnet0", "tun", br0);
    host.route(br0, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "vnet0"]);
    assert_eq!(choice.covered.len(), 4);
}

#[test]
fn macvlan_and_ipvlan_are_read_at_the_parent() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let mac = host.on("mac0", "macvlan", eth0);
    let ip = host.on("ipvl0", "ipvlan", eth0);
    host.route(mac, 254);
    host.route(ip, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0"]);
    assert_eq!(choice.covered, [eth0, mac, ip].into());
}

#[test]
fn macvlan_whose_parent_is_in_another_namespace_is_read_itself() {
    let mut host = Host::new();
    let mac = host.add("eth0", "macvlan");
    host.route(mac, 254);
    assert_eq!(chosen(&host.choose()), ["eth0"]);
}

#[test]
fn pod_with_a_plain_veth() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "veth");
    host.route(eth0, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0"]);
    assert_eq!(choice.chosen[0].kind, "veth");
}

#[test]
fn both_ends_of_a_veth_are_ends() {
    let mut host = Host::new();
    let a = host.add("a", "veth");
    let b = host.on("b", "veth", a);
    host.link(a).link = Some(b);
    host.route(a, 254);
    host.route(b, 254);
    assert_eq!(chosen(&host.choose()), ["a", "b"]);
}

#[test]
fn tunnels_are_read_beside_their_way_out() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let wg0 = host.headerless("wg0", "wireguard", NO_HEADER);
    let ipip = host.headerless("tunl1", "ipip", libc::ARPHRD_TUNNEL);
    host.link(ipip).link = Some(eth0);
    let vxlan = host.add("flannel.1", "vxlan");
    for index in [wg0, ipip, vxlan] {
        host.route(index, 254);
    }
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "wg0", "tunl1", "flannel.1"]);
    let headers: Vec<LinkHeader> = choice.chosen.iter().map(|i| i.header).collect();
    use LinkHeader::{Ethernet, None};
    assert_eq!(headers, [Ethernet, None, None, Ethernet]);
}

#[test]
fn unknown_link_layer_is_told() {
    let mut host = Host::new();
    let ib0 = host.headerless("ib0", "", libc::ARPHRD_INFINIBAND);
    let odd = host.headerless("can0", "", 280);
    host.route(ib0, 254);
    host.route(odd, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), Vec::<&str>::new());
    assert!(why(&choice, "ib0").contains("InfiniBand"));
    assert!(why(&choice, "can0").contains("280"));
}

#[test]
fn vrf_and_open_vswitch_are_read_at_their_ports() {
    let mut host = Host::new();
    let vrf = host.add("blue", "vrf");
    host.member("eth0", "", vrf);
    let system = host.add("ovs-system", "openvswitch");
    host.link(system).up = false;
    host.member("eth1", "", system);
    let internal = host.add("br-ex", "openvswitch");
    host.route(vrf, 254);
    host.route(internal, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0", "eth1"]);
    assert!(choice.covered.contains(&vrf) && choice.covered.contains(&internal));
}

#[test]
fn virtual_function_below_a_synthetic_card_is_read_at_the_card() {
    // Azure: both are hardware, and SYNs may bypass the function.
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let function = host.member("enP1", "", eth0);
    host.route(eth0, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), ["eth0"]);
    assert!(choice.covered.contains(&function));
}

#[test]
fn interface_that_is_down_or_without_a_route_is_told() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    host.link(eth0).up = false;
    host.add("lxc1", "veth");
    let quiet = host.add("ifb0", "ifb");
    host.link(quiet).up = false;
    let choice = host.choose();
    assert_eq!(chosen(&choice), Vec::<&str>::new());
    assert_eq!(why(&choice, "eth0"), "it is down");
    assert_eq!(why(&choice, "lxc1"), "no route points to it");
    assert_eq!(why(&choice, "ifb0"), "", "nobody misses it");
}

#[test]
fn wishes_of_the_user() {
    let mut host = Host::new();
    let eth0 = host.add("eth0", "");
    let eth1 = host.add("eth1", "");
    let vlan = host.on("eth1.5", "vlan", eth1);
    for index in [eth0, eth1, vlan] {
        host.route(index, 254);
    }
    let choice = host.asked(&["lo", "eth0"], &[]);
    assert_eq!(chosen(&choice), ["lo", "eth0"]);
    assert_eq!(choice.chosen[0].header, LinkHeader::Ethernet);
    assert_eq!(why(&choice, "eth1"), "not asked for");

    assert_eq!(
        chosen(&host.asked(&["*"], &[])),
        ["eth0", "eth1"],
        "neither lo nor the VLAN above eth1"
    );
    assert_eq!(
        chosen(&host.asked(&["eth1.5"], &[])),
        ["eth1.5"],
        "as asked, although it is not the lowest"
    );
    assert_eq!(chosen(&host.asked(&["eth?"], &["eth0"])), ["eth1"]);
    assert_eq!(
        why(&host.asked(&["wlan*"], &[]), "wlan*"),
        "there is no such interface"
    );

    let choice = host.asked(&[], &["eth1"]);
    assert_eq!(chosen(&choice), ["eth0"]);
    assert_eq!(why(&choice, "eth1"), "excluded by `eth1`");
    assert!(!choice.covered.contains(&vlan));
}

#[test]
fn what_stands_on_an_excluded_interface_is_told() {
    let mut host = Host::new();
    let eth1 = host.add("eth1", "");
    let vlan = host.on("eth1.5", "vlan", eth1);
    host.route(vlan, 254);
    let choice = host.asked(&[], &["eth1"]);
    assert_eq!(chosen(&choice), Vec::<&str>::new());
    assert_eq!(why(&choice, "eth1.5"), "eth1 below it is not seen");
}

#[test]
fn circle_of_links_ends() {
    let mut host = Host::new();
    let a = host.add("a", "vlan");
    let b = host.on("b", "vlan", a);
    host.link(a).link = Some(b);
    host.route(a, 254);
    let choice = host.choose();
    assert_eq!(chosen(&choice), Vec::<&str>::new());
}

#[test]
fn patterns() {
    for (pattern, name, expected) in [
        ("eth0", "eth0", true),
        ("eth0", "eth01", false),
        ("eth*", "eth", true),
        ("eth*", "veth1", false),
        ("*", "anything", true),
        ("*.100", "eth0.100", true),
        ("e?h*0", "eth10", true),
        ("?", "", false),
        ("**", "", true),
        ("ü*", "über0", true),
    ] {
        assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
    }
}

proptest! {
    /// Whatever the kernel of the future sends, nothing panics or loops.
    #[test]
    fn messages_of_any_content_are_survived(data in prop::collection::vec(any::<u8>(), 0..300), length in 0_u32..400) {
        let mut snapshot = Snapshot::default();
        snapshot.add_link(&data);
        snapshot.add_route(&data);
        snapshot.add_next_hop(&data);
        let framed: Vec<u8> = length.to_ne_bytes().into_iter().chain(data).collect();
        for message in Messages(&framed) {
            snapshot.add_link(message.payload());
        }
        let _ = choose(&snapshot, &Options::default());
    }
}
