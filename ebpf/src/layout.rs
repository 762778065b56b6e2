//! Where things lie in the running kernel: offsets given by the user side at load time, from BTF.
//!
//! Each name is that of a field of the user side's `Layout`, in capitals. The verifier sees constants. Nothing about a kernel is compiled in.

use aya_ebpf::Global;

/// What the user side gives for something that the running kernel does not have.
pub const ABSENT: u32 = u32::MAX;

macro_rules! offsets {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])* #[unsafe(no_mangle)] pub static $name: Global<u32> = Global::new(0);)*
    };
}

offsets! {
    /// `sock_common.skc_daddr` (`skc_rcv_saddr` follows it).
    SKC_DADDR,
    /// `sock_common.skc_rcv_saddr`.
    SKC_RCV_SADDR,
    /// `sock_common.skc_dport`.
    SKC_DPORT,
    /// `sock_common.skc_num`.
    SKC_NUM,
    /// `sock_common.skc_family`.
    SKC_FAMILY,
    /// `sock_common.skc_state`.
    SKC_STATE,
    /// `sock_common.skc_net`.
    SKC_NET,
    /// `sock_common.skc_v6_daddr`.
    SKC_V6_DADDR,
    /// `sock_common.skc_v6_rcv_saddr`.
    SKC_V6_RCV_SADDR,
    /// `sock_common.skc_nulls_node`.
    SKC_NULLS_NODE,
    /// `net.ns.inum`.
    NET_INUM,
    /// `inet_sock.inet_sport`.
    INET_SPORT,
    /// `sock.sk_protocol`.
    SK_PROTOCOL,
    /// Width of `sock.sk_protocol` in bytes (1 or 2).
    SK_PROTOCOL_BYTES,
    /// `sock.sk_err`.
    SK_ERR,
    /// The cgroup pointer in `sock.sk_cgrp_data`.
    SK_CGROUP,
    /// `cgroup.kn`.
    CGROUP_KN,
    /// `kernfs_node.id`.
    KERNFS_ID,
    /// `tcp_sock.snd_una`.
    SND_UNA,
    /// `sk_buff.head`.
    SKB_HEAD,
    /// `sk_buff.transport_header`.
    SKB_TRANSPORT_HEADER,
    /// `task_struct.nsproxy`.
    TASK_NSPROXY,
    /// `nsproxy.net_ns`.
    NSPROXY_NET_NS,
    /// `net.ipv4.tcp_death_row`.
    NET_TCP_DEATH_ROW,
    /// 1 if that is a pointer.
    NET_TCP_DEATH_ROW_IS_POINTER,
    /// `inet_timewait_death_row.hashinfo`.
    DEATH_ROW_HASHINFO,
    /// `inet_hashinfo.ehash`.
    HASHINFO_EHASH,
    /// `inet_hashinfo.ehash_mask`.
    HASHINFO_EHASH_MASK,
    /// `sizeof(struct inet_ehash_bucket)`.
    EHASH_BUCKET_SIZE,
    /// `inet_hashinfo.lhash2`.
    HASHINFO_LHASH2,
    /// `inet_hashinfo.lhash2_mask`.
    HASHINFO_LHASH2_MASK,
    /// `sizeof(struct inet_listen_hashbucket)`.
    LISTEN_BUCKET_SIZE,
    /// The head of the list in a bucket of `lhash2`.
    LISTEN_BUCKET_FIRST,
    /// The list node in a listening socket.
    LISTEN_NODE,
    /// The head of the list in a bucket of `ehash`.
    EHASH_BUCKET_CHAIN,
    /// `inet_timewait_sock.tw_timer.expires`.
    TW_EXPIRES,
    /// `inet_timewait_sock.tw_substate`.
    TW_SUBSTATE,
    /// `net.list.next`.
    NET_LIST,
    /// `net.ipv4.sysctl_tcp_tw_reuse`.
    NET_TW_REUSE,
    /// `net.ipv4.sysctl_tcp_tw_reuse_delay`, or [`ABSENT`].
    NET_TW_REUSE_DELAY,
    /// `net.ipv4.sysctl_tcp_timestamps`.
    NET_TIMESTAMPS,
    /// `net.ipv4.ip_local_ports.range`.
    NET_LOCAL_PORTS,
    /// Its size: 8, or 4 for one number.
    NET_LOCAL_PORTS_BYTES,
    /// `net.ipv4.sysctl_local_reserved_ports`.
    NET_RESERVED_PORTS,
    /// `inet_connection_sock.icsk_bind_hash`.
    ICSK_BIND_HASH,
    /// `inet_timewait_sock.tw_tb`.
    TW_TB,
    /// `inet_bind_bucket.fastreuse`.
    BIND_FASTREUSE,
    /// `tcp_sock.write_seq`.
    WRITE_SEQ,
    /// `tcp_sock.lsndtime`.
    LSNDTIME,
    /// `inet_connection_sock.icsk_ack.lrcvtime`.
    LRCVTIME,
    /// `tcp_sock.snd_nxt`.
    SND_NXT,
    /// `tcp_sock.snd_wnd`.
    SND_WND,
    /// `tcp_sock.mss_cache`.
    MSS_CACHE,
    /// `tcp_sock.bytes_acked`.
    BYTES_ACKED,
    /// `tcp_sock.bytes_received`.
    BYTES_RECEIVED,
    /// `tcp_sock.rcv_tstamp`.
    RCV_TSTAMP,
    /// `tcp_sock.keepalive_intvl`.
    KEEPALIVE_INTVL,
    /// `net.ipv4.sysctl_tcp_keepalive_intvl`.
    NET_KEEPALIVE_INTVL,
    /// `inet_connection_sock.icsk_retransmits`.
    ICSK_RETRANSMITS,
    /// `inet_connection_sock.icsk_backoff`.
    ICSK_BACKOFF,
    /// `inet_connection_sock.icsk_probes_out`.
    ICSK_PROBES_OUT,
    /// `inet_connection_sock.icsk_rto`.
    ICSK_RTO,
    /// `inet_connection_sock.icsk_user_timeout`.
    ICSK_USER_TIMEOUT,
    /// `tcp_sock.packets_out`.
    PACKETS_OUT,
    /// `tcp_sock.data_segs_in`.
    DATA_SEGS_IN,
    /// `tcp_sock.data_segs_out`.
    DATA_SEGS_OUT,
    /// `sock.sk_socket`.
    SK_SOCKET,
    /// `sock_common.skc_flags`.
    SKC_FLAGS,
    /// Number of the flag `SOCK_KEEPOPEN` there, or [`ABSENT`].
    SOCK_KEEPOPEN,
    /// `tcp_sock.keepalive_time`.
    KEEPALIVE_TIME,
    /// `net.ipv4.sysctl_tcp_keepalive_time`.
    NET_KEEPALIVE_TIME,
    /// Sets of [`crate::maps::MEMORY`]; a power of two.
    MEMORY_SETS,
    /// Sets of [`crate::maps::HANDSHAKES`]; a power of two.
    HANDSHAKE_SETS,
    /// Sets of [`crate::maps::OPEN_SOCKETS`]; a power of two.
    SOCKET_SETS,
    /// Sections of [`crate::maps::RECORDER`], one for each CPU; a power of two.
    RECORDER_SECTIONS,
    /// Places in each of them, a power of two; 0 if nothing is recorded.
    RECORDER_SLOTS,
    /// Sets of [`crate::maps::TALKS`]; a power of two.
    TALK_SETS,
    /// 1 if the begin of data segments is looked at for HTTP/1.
    HTTP_SNIFF,
    /// Entries of [`crate::maps::LOOKS`]; a power of two.
    LOOKS_LEN,
    /// Sets of [`crate::maps::EXCHANGES`], a power of two; 0 if nothing is counted there.
    EXCHANGE_SETS,
    /// 1 if the kernel has the helper `bpf_ktime_get_coarse_ns` (5.11).
    COARSE_CLOCK,
    /// Ticks per second.
    HZ,
    /// 1 if the socket hooks are restricted to the namespaces in [`crate::maps::NETNS`].
    RESTRICT_NETNS,
}

/// How many connections being opened may belong to no known port space: a part of
/// [`crate::maps::HANDSHAKES`], so that a flood never fills it.
#[unsafe(no_mangle)]
pub static STRANGERS_MAX: Global<u32> = Global::new(3584);
