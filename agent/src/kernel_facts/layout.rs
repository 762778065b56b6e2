//! Where the running kernel keeps the fields that the programs read: one table, one line for each fact.
//!
//! A line names the struct, the member, its expected size and the hooks that read it. `resolve.rs` looks the lines
//! up and adds the few facts that take more than one look-up.

use super::hook::{Hook, Needs};

/// Value of a field that this kernel does not have, or has in another size than the programs can read.
pub const ABSENT: u32 = u32::MAX;

/// One line of the table: a member whose offset is read from BTF as it stands.
pub struct Fact {
    /// Name of the field in [`Layout`].
    pub name: &'static str,
    /// Kernel struct.
    pub structure: &'static str,
    /// Member, dotted through embedded structs.
    pub path: &'static str,
    /// Size that the programs read, in bytes. Another size on the running kernel makes the fact missing.
    pub size: u32,
    pub(super) needs: Needs,
    pub(super) field: fn(&mut Layout) -> &mut u32,
}

macro_rules! layout {
    (
        members { $($(#[$doc:meta])* $name:ident: $structure:ident $path:literal $size:literal $needs:expr;)* }
        derived { $($(#[$other_doc:meta])* $other:ident;)* }
    ) => {
        /// Offsets in bytes and a few other numbers of the running kernel; [`ABSENT`] where it has no such thing.
        /// Little-endian, 64 bit.
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Layout {
            $(
                $(#[$doc])*
                ///
                #[doc = concat!("Offset of `", $path, "` (", $size, " bytes) in `struct ", stringify!($structure), "`.")]
                pub $name: u32,
            )*
            $($(#[$other_doc])* pub $other: u32,)*
        }

        impl Layout {
            /// A layout in which everything is [`ABSENT`].
            pub const UNKNOWN: Self = Self { $($name: ABSENT,)* $($other: ABSENT,)* };

            /// The table: members whose offset is read as it stands.
            pub const FACTS: &'static [Fact] = &[$(Fact {
                name: stringify!($name),
                structure: stringify!($structure),
                path: $path,
                size: $size,
                needs: $needs,
                field: |layout| &mut layout.$name,
            },)*];

            /// All fields with their names, in the order of the struct: for logs, and for globals set one by one.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u32)> {
                [$((stringify!($name), self.$name),)* $((stringify!($other), self.$other),)*].into_iter()
            }
        }
    };
}

use Hook::{Census, Lifecycle, ReceiveReset, Retransmit, SendReset};

/// All that begin with a connection's four-tuple. (`tcp_send_reset` finds its connection by the socket's address.)
const CONNECTION: &[Hook] = &[Lifecycle, Retransmit, ReceiveReset, Census];
/// All that look at a socket that has got its four-tuple before.
const LATER: &[Hook] = &[Retransmit, SendReset, ReceiveReset, Census];
/// None of them can say anything without the four-tuple.
const TUPLE: Needs = Needs::essential(CONNECTION);
/// A kernel without IPv6 or without network namespaces has no such member, and nothing is lost.
const TUPLE_DETAIL: Needs = Needs::detail(CONNECTION);
const CGROUP: Needs = Needs::detail(&[Lifecycle]);
const PROGRESS: Needs = Needs::detail(&[Retransmit, Census]);
const IDLE: Needs = Needs::detail(&[Retransmit, ReceiveReset, Census]);
const WALK: Needs = Needs::essential(&[Census]);
const ROW: Needs = Needs::detail(&[Census]);

layout! {
    members {
        // struct sock_common: the start of every row, full socket, TIME_WAIT or request alike.

        /// Peer's IPv4 address, network order.
        skc_daddr: sock_common "skc_daddr" 4 TUPLE;
        /// Own IPv4 address, network order.
        skc_rcv_saddr: sock_common "skc_rcv_saddr" 4 TUPLE;
        /// Peer's port, network order.
        skc_dport: sock_common "skc_dport" 2 TUPLE;
        /// Own port, host order. 0 while a port is being searched, and again once the port is given back.
        skc_num: sock_common "skc_num" 2 TUPLE;
        /// `AF_INET` or `AF_INET6`.
        skc_family: sock_common "skc_family" 2 TUPLE;
        /// TCP state, `TCP_ESTABLISHED` = 1 … `TCP_NEW_SYN_RECV` = 12.
        skc_state: sock_common "skc_state" 1 Needs::essential(LATER);
        /// Pointer to the `struct net` of the socket.
        skc_net: sock_common "skc_net.net" 8 TUPLE_DETAIL;
        /// Peer's IPv6 address.
        skc_v6_daddr: sock_common "skc_v6_daddr" 16 TUPLE_DETAIL;
        /// Own IPv6 address.
        skc_v6_rcv_saddr: sock_common "skc_v6_rcv_saddr" 16 TUPLE_DETAIL;
        /// Node by which a row hangs in the established hash (and, since 5.19, a listener in `lhash2`). The chain
        /// ends in an odd pointer.
        skc_nulls_node: sock_common "skc_nulls_node" 16 WALK;
        /// Flags of the socket, by the numbers of `enum sock_flags`.
        skc_flags: sock_common "skc_flags" 8 IDLE;
        // struct inet_sock, struct tcp_sock, struct inet_connection_sock: full sockets only.

        /// Own port, network order. It is still 0 at SYN_SENT → CLOSE only if connect() found no port.
        inet_sport: inet_sock "inet_sport" 2 Needs::essential(&[Lifecycle, SendReset]);
        /// Error of the socket (`errno`), why connect() failed.
        sk_err: sock "sk_err" 4 Needs::detail(&[Lifecycle]);
        /// First byte not acknowledged yet; ISN + 1 at SYN_SENT → ESTABLISHED.
        snd_una: tcp_sock "snd_una" 4 Needs::detail(LATER);
        /// Next byte to be sent.
        snd_nxt: tcp_sock "snd_nxt" 4 IDLE;
        /// End of the data in the send queue; the ISN right after connect() chose it.
        write_seq: tcp_sock "write_seq" 4 Needs::detail(&[Lifecycle, Retransmit, Census]);
        /// Bytes that the peer lets us send.
        snd_wnd: tcp_sock "snd_wnd" 4 PROGRESS;
        /// Bytes of data that fit into a segment on this path.
        mss_cache: tcp_sock "mss_cache" 4 PROGRESS;
        /// Bytes that the peer has acknowledged; the SYN counts for one.
        bytes_acked: tcp_sock "bytes_acked" 8 PROGRESS;
        /// Bytes of data received.
        bytes_received: tcp_sock "bytes_received" 8 PROGRESS;
        /// Time between two keep-alive probes in jiffies, 0 for that of the namespace.
        keepalive_intvl: tcp_sock "keepalive_intvl" 4 PROGRESS;
        /// Segments sent and not acknowledged.
        packets_out: tcp_sock "packets_out" 4 ROW;
        /// Time of the last ACK received, low 32 bits of jiffies.
        rcv_tstamp: tcp_sock "rcv_tstamp" 4 IDLE;
        /// Time of the last data sent, low 32 bits of jiffies.
        lsndtime: tcp_sock "lsndtime" 4 IDLE;
        /// Time of the last data received, low 32 bits of jiffies.
        lrcvtime: inet_connection_sock "icsk_ack.lrcvtime" 4 IDLE;
        /// Segments with data received.
        data_segs_in: tcp_sock "data_segs_in" 4 ROW;
        /// Segments with data sent.
        data_segs_out: tcp_sock "data_segs_out" 4 ROW;
        /// Pointer to the `struct socket`, NULL until accept().
        sk_socket: sock "sk_socket" 8 ROW;
        /// Timeouts in a row without an answer.
        icsk_retransmits: inet_connection_sock "icsk_retransmits" 1 IDLE;
        /// Doublings of the timeout.
        icsk_backoff: inet_connection_sock "icsk_backoff" 1 PROGRESS;
        /// Window or keep-alive probes in a row without an answer.
        icsk_probes_out: inet_connection_sock "icsk_probes_out" 1 IDLE;
        /// Idle time before the first keep-alive probe in jiffies, 0 for that of the namespace.
        keepalive_time: tcp_sock "keepalive_time" 4 IDLE;

        /// The retransmission time-out in jiffies, doubled as often as `icsk_backoff` says.
        icsk_rto: inet_connection_sock "icsk_rto" 4 PROGRESS;
        /// `TCP_USER_TIMEOUT` in milliseconds (jiffies before 4.19), 0 for none.
        icsk_user_timeout: inet_connection_sock "icsk_user_timeout" 4 IDLE;

        // struct inet_timewait_sock: rows in state TCP_TIME_WAIT.

        /// `TCP_TIME_WAIT` or `TCP_FIN_WAIT2` (a row that waits for the peer's FIN).
        tw_substate: inet_timewait_sock "tw_substate" 1 ROW;
        /// When the row ends, jiffies.
        tw_expires: inet_timewait_sock "tw_timer.expires" 8 ROW;
        // The way to the tables: current task → namespace → tcp_death_row → hashinfo.

        /// Pointer to the namespaces of a task.
        task_nsproxy: task_struct "nsproxy" 8 WALK;
        /// Pointer to the network namespace.
        nsproxy_net_ns: nsproxy "net_ns" 8 WALK;
        /// Number of the network namespace, as in `/proc/<pid>/ns/net`.
        net_inum: net "ns.inum" 4 TUPLE_DETAIL;
        /// The next namespace in the list of all of them.
        net_list: net "list.next" 8 ROW;
        /// `net.ipv4.tcp_tw_reuse` of the namespace.
        net_tw_reuse: net "ipv4.sysctl_tcp_tw_reuse" 1 ROW;
        /// `net.ipv4.tcp_timestamps` of the namespace.
        net_timestamps: net "ipv4.sysctl_tcp_timestamps" 1 ROW;
        /// `net.ipv4.tcp_keepalive_intvl` of the namespace, in jiffies.
        net_keepalive_intvl: net "ipv4.sysctl_tcp_keepalive_intvl" 4 PROGRESS;
        /// `net.ipv4.tcp_keepalive_time` of the namespace, in jiffies.
        net_keepalive_time: net "ipv4.sysctl_tcp_keepalive_time" 4 IDLE;
        /// Pointer to the bitmap of `net.ipv4.ip_local_reserved_ports`.
        net_reserved_ports: net "ipv4.sysctl_local_reserved_ports" 8 ROW;
        /// Pointer to the bind bucket of a socket's port.
        icsk_bind_hash: inet_connection_sock "icsk_bind_hash" 8 ROW;
        /// The same of a row in TIME_WAIT.
        tw_tb: inet_timewait_sock "tw_tb" 8 ROW;
        /// −1 if connect() took the port, else bind() (`__inet_hash_connect`, `inet_csk_get_port`).
        bind_fastreuse: inet_bind_bucket "fastreuse" 1 ROW;
        /// Pointer to the array of buckets of the established hash.
        hashinfo_ehash: inet_hashinfo "ehash" 8 WALK;
        /// Number of buckets less one.
        hashinfo_ehash_mask: inet_hashinfo "ehash_mask" 4 WALK;
        /// First pointer of a bucket's chain.
        ehash_bucket_chain: inet_ehash_bucket "chain.first" 8 WALK;
        /// Pointer to the array of buckets of the listeners' hash (by address and port).
        hashinfo_lhash2: inet_hashinfo "lhash2" 8 ROW;
        /// Number of buckets less one.
        hashinfo_lhash2_mask: inet_hashinfo "lhash2_mask" 4 ROW;

        // Control groups.

        /// Pointer to the kernfs node of a cgroup.
        cgroup_kn: cgroup "kn" 8 CGROUP;
        /// Its number: the inode of the cgroup's directory.
        kernfs_id: kernfs_node "id" 8 CGROUP;

        // struct sk_buff: the segment that is answered by a reset.

        /// Start of the buffer.
        skb_head: sk_buff "head" 8 Needs::essential(&[SendReset]);
        /// TCP header, bytes from the start of the buffer.
        skb_transport_header: sk_buff "transport_header" 2 Needs::essential(&[SendReset]);
    }
    derived {
        /// Byte of `sock.sk_protocol`.
        sk_protocol;
        /// Its width: 2 bytes, 1 before 5.6 (a bitfield of 8 bits).
        sk_protocol_bytes;
        /// 8-byte word in `struct sock` that points to its `struct cgroup` (`sk_cgrp_data.cgroup`, before 5.15
        /// `sk_cgrp_data.val`).
        sk_cgroup;
        /// 1 if the word is `val`: it is a pointer only if its two low bits are clear.
        sk_cgroup_is_tagged;
        /// Offset of `ipv4.tcp_death_row` in `struct net`.
        net_tcp_death_row;
        /// 1 if there is a pointer to the `struct inet_timewait_death_row` (5.18 to 6.0), 0 if it is embedded.
        net_tcp_death_row_is_pointer;
        /// Offset of `ipv4.ip_local_ports.range` in `struct net`.
        net_local_ports;
        /// Its size: 8 for two numbers, since 6.8 4 for one, the last port above the first.
        net_local_ports_bytes;
        /// Offset of `ipv4.sysctl_tcp_tw_reuse_delay` in `struct net` (6.14 and later, else [`ABSENT`]).
        net_tw_reuse_delay;
        /// Offset of the pointer `hashinfo` in `struct inet_timewait_death_row`.
        death_row_hashinfo;
        /// Byte `inet_hashinfo.pernet` (6.1 and later, else [`ABSENT`]): not 0 if the namespace has its own table.
        hashinfo_pernet;
        /// Size of `struct inet_ehash_bucket`.
        ehash_bucket_size;
        /// Size of `struct inet_listen_hashbucket`.
        listen_bucket_size;
        /// Offset of the first pointer of its chain: `nulls_head.first`, before 5.19 `head.first`.
        listen_bucket_first;
        /// Offset in the socket of the node by which a listener hangs in `lhash2`: `skc_nulls_node`, before 5.19
        /// `inet_connection_sock.icsk_listen_portaddr_node`.
        listen_node;
        /// 1 if that chain ends in an odd pointer (nulls marker), 0 if in NULL.
        listen_chain_is_nulls;
        /// Number of arguments of raw tracepoint `inet_sock_set_state`; [`ABSENT`] without the tracepoint.
        set_state_args;
        /// Index of the argument `struct sock *`; old and new state are the two that follow.
        set_state_sk;
        /// Number of arguments of raw tracepoint `tcp_retransmit_skb`.
        retransmit_args;
        /// Index of the argument `struct sock *`.
        retransmit_sk;
        /// Index of the argument `struct sk_buff *`.
        retransmit_skb;
        /// Number of arguments of raw tracepoint `tcp_send_reset`.
        send_reset_args;
        /// Index of the argument `struct sock *` (the pointer may be NULL since 6.12).
        send_reset_sk;
        /// Index of the argument `struct sk_buff *`: the segment that is answered.
        send_reset_skb;
        /// Number of arguments of raw tracepoint `tcp_receive_reset`.
        receive_reset_args;
        /// Index of the argument `struct sock *`.
        receive_reset_sk;
    }
}
