//! Reads `struct sock` and its relatives by the offsets of [`crate::layout`].

use core::mem::MaybeUninit;

use aya_ebpf::{
    EbpfContext as _, Global,
    helpers::{bpf_get_current_task, generated::bpf_probe_read_kernel},
    programs::RawTracePointContext,
};
use tuplewatch_common::address::{FourTuple, v4_mapped};

use crate::{
    layout::{
        ABSENT, CGROUP_KN, KERNFS_ID, NET_INUM, NSPROXY_NET_NS, RESTRICT_NETNS, SK_CGROUP,
        SK_PROTOCOL, SK_PROTOCOL_BYTES, SKC_DADDR, SKC_DPORT, SKC_FAMILY, SKC_NET, SKC_NUM,
        SKC_RCV_SADDR, SKC_V6_DADDR, SKC_V6_RCV_SADDR, TASK_NSPROXY,
    },
    maps::NETNS,
};

/// `ESTABLISHED` of `include/net/tcp_states.h`, which is part of the user ABI (`tcp_info`).
pub const ESTABLISHED: u32 = 1;
/// `SYN_SENT`.
pub const SYN_SENT: u32 = 2;
/// `SYN_RECV`.
pub const SYN_RECV: u32 = 3;
/// `FIN_WAIT1`.
pub const FIN_WAIT1: u32 = 4;
/// `TIME_WAIT`.
pub const TIME_WAIT: u32 = 6;
/// `CLOSE`.
pub const CLOSE: u32 = 7;
/// `LISTEN`.
pub const LISTEN: u32 = 10;
/// `NEW_SYN_RECV`.
pub const NEW_SYN_RECV: u32 = 12;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const IPPROTO_TCP: u16 = 6;

/// An address in the kernel.
#[derive(Clone, Copy)]
pub struct Kernel(pub u64);

impl Kernel {
    /// Reads a value at a resolved offset; 0 where the kernel has no such field or the address is not mapped (the
    /// helper clears its destination), which no caller takes for a valid pointer, port or state.
    ///
    /// Offsets are constants to the verifier, which drops the branch that is not taken.
    #[inline(always)]
    pub fn read<T: Copy + Default>(self, offset: &Global<u32>) -> T {
        let offset = offset.load();
        if offset == ABSENT {
            return T::default();
        }
        self.read_at(offset as u64)
    }

    /// Reads a value at an offset in bytes.
    #[inline(always)]
    pub fn read_at<T: Copy + Default>(self, offset: u64) -> T {
        // Not cleared beforehand, which would be a call of `memset` for an address.
        let mut value = MaybeUninit::<T>::uninit();
        // The generated helper, not the wrapper returning a `Result`: with that one the verifier
        // sees an uninitialised register in loops.
        // SAFETY: the destination is a local of that size, which the helper writes to in any case; the
        // source may be any address; every caller reads integers.
        unsafe {
            bpf_probe_read_kernel(
                value.as_mut_ptr().cast(),
                size_of::<T>() as u32,
                (self.0 + offset) as *const _,
            );
            value.assume_init()
        }
    }
}

/// An argument of a tracepoint. The index is a constant, because the verifier refuses a computed offset
/// into the context; the user side attaches no program whose arguments BTF puts elsewhere.
#[inline(always)]
pub fn argument<const INDEX: usize>(ctx: &RawTracePointContext) -> u64 {
    // SAFETY: the verifier checks the bound.
    unsafe { *ctx.as_ptr().cast::<u64>().add(INDEX) }
}

/// Inode of the socket's network namespace.
#[inline(always)]
pub fn netns(sk: Kernel) -> u32 {
    Kernel(sk.read::<u64>(&SKC_NET)).read::<u32>(&NET_INUM)
}

/// The network namespace (`struct net`) of the current task.
#[inline(always)]
pub fn current_netns() -> Kernel {
    // SAFETY: a helper without arguments.
    let task = Kernel(unsafe { bpf_get_current_task() });
    Kernel(Kernel(task.read::<u64>(&TASK_NSPROXY)).read::<u64>(&NSPROXY_NET_NS))
}

/// Whether sockets of that namespace are to be counted.
#[inline(always)]
pub fn is_watched(netns: u32) -> bool {
    // SAFETY: the value is not used.
    RESTRICT_NETNS.load() == 0 || unsafe { NETNS.get(netns) }.is_some()
}

/// The socket's protocol is TCP itself (an MPTCP socket reports its own state changes too).
#[inline(always)]
pub fn is_tcp(sk: Kernel) -> bool {
    let protocol = if SK_PROTOCOL_BYTES.load() == 1 {
        sk.read::<u8>(&SK_PROTOCOL) as u16
    } else {
        sk.read::<u16>(&SK_PROTOCOL)
    };
    protocol == IPPROTO_TCP
}

/// The socket's connection, as if the local end were the initiator. `None` for other families.
///
/// Works on `struct sock_common`, which full sockets, request sockets and TIME_WAIT sockets begin with.
#[inline(always)]
pub fn tuple(sk: impl Fields) -> Option<FourTuple> {
    let [port, number, family] = sk.ports();
    let (initiator, responder) = match family {
        AF_INET => {
            let [remote, local] = sk.addresses();
            (
                v4_mapped(local.to_ne_bytes()),
                v4_mapped(remote.to_ne_bytes()),
            )
        }
        // A dual-stack socket keeps IPv4 as v4-mapped addresses, which is our own form.
        AF_INET6 => (sk.read(&SKC_V6_RCV_SADDR), sk.read(&SKC_V6_DADDR)),
        _ => return None,
    };
    Some(FourTuple {
        initiator,
        responder,
        responder_port: u16::from_be(port),
        initiator_port: number,
        pad: 0,
    })
}

/// Fields of a socket, wherever they are read from.
pub trait Fields: Copy {
    /// As [`Kernel::read`].
    fn read<T: Copy + Default>(self, offset: &Global<u32>) -> T;

    /// `skc_dport`, `skc_num` and `skc_family`.
    #[inline(always)]
    fn ports(self) -> [u16; 3] {
        [
            self.read(&SKC_DPORT),
            self.read(&SKC_NUM),
            self.read(&SKC_FAMILY),
        ]
    }

    /// `skc_daddr` and `skc_rcv_saddr`.
    #[inline(always)]
    fn addresses(self) -> [u32; 2] {
        [self.read(&SKC_DADDR), self.read(&SKC_RCV_SADDR)]
    }
}

impl Fields for Kernel {
    #[inline(always)]
    fn read<T: Copy + Default>(self, offset: &Global<u32>) -> T {
        Self::read(self, offset)
    }

    /// They lie side by side on every kernel known: one read then, else three. The offsets are constants to
    /// the verifier, which drops the other branch.
    #[inline(always)]
    fn ports(self) -> [u16; 3] {
        let at = SKC_DPORT.load();
        if SKC_NUM.load() == at + 2 && SKC_FAMILY.load() == at + 4 {
            let all = self.read::<u64>(&SKC_DPORT).to_ne_bytes();
            let half = |i: usize| u16::from_ne_bytes([all[i], all[i + 1]]);
            [half(0), half(2), half(4)]
        } else {
            [
                self.read(&SKC_DPORT),
                self.read(&SKC_NUM),
                self.read(&SKC_FAMILY),
            ]
        }
    }

    /// Likewise.
    #[inline(always)]
    fn addresses(self) -> [u32; 2] {
        if SKC_RCV_SADDR.load() == SKC_DADDR.load() + 4 {
            let all = self.read::<u64>(&SKC_DADDR).to_ne_bytes();
            [
                u32::from_ne_bytes([all[0], all[1], all[2], all[3]]),
                u32::from_ne_bytes([all[4], all[5], all[6], all[7]]),
            ]
        } else {
            [self.read(&SKC_DADDR), self.read(&SKC_RCV_SADDR)]
        }
    }
}

/// Inode of the socket's control group directory, 0 if the kernel does not say.
#[inline(always)]
pub fn cgroup(sk: Kernel) -> u64 {
    if SK_CGROUP.load() == ABSENT {
        return 0;
    }
    // Before 5.15 the low bits of this word are flags of cgroup v1.
    let cgroup = sk.read::<u64>(&SK_CGROUP) & !3;
    if cgroup == 0 {
        return 0;
    }
    let node = Kernel(cgroup).read::<u64>(&CGROUP_KN);
    if node == 0 {
        0
    } else {
        Kernel(node).read(&KERNFS_ID)
    }
}
