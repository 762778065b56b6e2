//! How the parser of [`tuplewatch_common`] reads an skb.

use aya_ebpf::{
    bindings::{__sk_buff, bpf_hdr_start_off::BPF_HDR_START_NET},
    cty::c_void,
    helpers::generated::{bpf_skb_load_bytes, bpf_skb_load_bytes_relative},
    programs::TcContext,
};
use tuplewatch_common::bytes::Bytes;

/// A way to read the packet that a program is run for.
pub trait Packet<'a>: Bytes {
    /// Looks at the skb of `ctx`.
    fn new(ctx: &'a TcContext) -> Self;

    /// Copies bytes of the packet; 0 if there were as many.
    ///
    /// # Safety
    /// `skb` is the program's own context, and `to` has room for so many bytes.
    #[inline(always)]
    unsafe fn load(skb: *mut __sk_buff, offset: u32, to: *mut c_void, len: u32) -> i64 {
        // SAFETY: the caller's.
        unsafe { bpf_skb_load_bytes(skb.cast(), offset, to, len) as i64 }
    }
}

/// Whether the data begin with the network header: true but for what a tunnel has taken out of its own
/// headers and has left there.
#[inline(always)]
pub fn is_network_at_data(ctx: &TcContext) -> bool {
    // Within these bytes are the lengths of IPv4 and of IPv6, and those of an outer header are greater.
    let (mut at_data, mut at_network) = (0_u64, 0_u64);
    let skb = ctx.skb.skb;
    // SAFETY: there is room for eight bytes each.
    unsafe {
        Anywhere::load(skb, 0, (&raw mut at_data).cast(), 8);
        FromNetwork::load(skb, 0, (&raw mut at_network).cast(), 8);
    }
    at_data == at_network
}

/// The linear part of an skb, read directly: 66 bytes in nearly every one.
pub struct Linear {
    skb: *mut __sk_buff,
    data: usize,
    wire_len: usize,
}

impl Packet<'_> for Linear {
    #[inline(always)]
    fn new(ctx: &TcContext) -> Self {
        Self {
            skb: ctx.skb.skb,
            data: ctx.data(),
            wire_len: ctx.len() as usize,
        }
    }
}

impl Linear {
    /// Where the field is, if it lies within the linear part.
    #[inline(always)]
    fn at(&self, offset: usize, size: usize) -> Option<usize> {
        // The end is read anew for each check. Otherwise the compiler proves some checks from earlier
        // ones (the TCP header lies behind the IP header) and drops them, while the verifier cannot
        // follow such a proof over offsets that vary.
        // SAFETY: `skb` is the program's own context.
        let end = unsafe { (&raw const (*self.skb).data_end).read_volatile() } as usize;
        let start = self.data + offset;
        // `start + 1 > end` would be compiled to `start >= end`, which at offset 0 tells the verifier
        // nothing; no header ends with its first byte, so two bytes are asked for.
        if start + if size == 1 { 2 } else { size } > end {
            None
        } else {
            Some(start)
        }
    }
}

macro_rules! load {
    ($name:ident, $width:literal, $type:ty) => {
        /// Loads a field in the byte order of the packet.
        ///
        /// The fields of a packet are not aligned. The target can load them all the same (the
        /// verifier sees to it that the machine can too), but the compiler, which does not know,
        /// would put each one together from single bytes.
        #[inline(always)]
        fn $name(&self, offset: usize) -> Option<$type> {
            let start = self.at(offset, size_of::<$type>())?;
            let value: u64;
            // SAFETY: the bytes lie within the packet, as the verifier sees from the check above. The
            // statement has side effects as far as the compiler knows, so it stays behind the check.
            unsafe {
                core::arch::asm!(
                    concat!("{value} = *(", $width, " *)({start} + 0)"),
                    value = out(reg) value,
                    start = in(reg) start,
                    options(nostack, readonly),
                );
            }
            Some(value as $type)
        }
    };
}

impl Linear {
    load!(load_u8, "u8", u8);
    load!(load_u16, "u16", u16);
    load!(load_u32, "u32", u32);
    load!(load_u64, "u64", u64);
}

impl Bytes for Linear {
    #[inline(always)]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.load_u8(offset)
    }
    #[inline(always)]
    fn u16(&self, offset: usize) -> Option<u16> {
        self.load_u16(offset).map(u16::from_be)
    }
    #[inline(always)]
    fn u32(&self, offset: usize) -> Option<u32> {
        self.load_u32(offset).map(u32::from_be)
    }
    #[inline(always)]
    fn array4(&self, offset: usize) -> Option<[u8; 4]> {
        self.load_u32(offset).map(u32::to_ne_bytes)
    }
    #[inline(always)]
    fn array16(&self, offset: usize) -> Option<[u8; 16]> {
        let low = self.load_u64(offset)? as u128;
        let high = self.load_u64(offset + 8)? as u128;
        Some((low | high << 64).to_ne_bytes())
    }
    #[inline(always)]
    fn wire_len(&self) -> usize {
        self.wire_len
    }
}

/// An skb read by one helper call per field: slow, for the rare one whose headers are not linear.
pub struct Anywhere<'a>(&'a TcContext);

/// An skb read by one helper call per field, from its network header on wherever its data begin: slow, for
/// what a tunnel has unpacked and left its own headers in front of. (sit, ipip and GRE did so before Linux 5.14, and
/// GRE without a fixed peer still does.) The helper reads the linear part only. HTTP/1 is not looked
/// for there, as nothing tells how far the payload is from the data.
pub struct FromNetwork<'a>(&'a TcContext);

impl<'a> Packet<'a> for Anywhere<'a> {
    #[inline(always)]
    fn new(ctx: &'a TcContext) -> Self {
        Self(ctx)
    }
}

impl<'a> Packet<'a> for FromNetwork<'a> {
    #[inline(always)]
    fn new(ctx: &'a TcContext) -> Self {
        Self(ctx)
    }

    #[inline(always)]
    unsafe fn load(skb: *mut __sk_buff, offset: u32, to: *mut c_void, len: u32) -> i64 {
        // SAFETY: the caller's.
        unsafe {
            bpf_skb_load_bytes_relative(skb.cast(), offset, to, len, BPF_HDR_START_NET) as i64
        }
    }
}

/// Four bytes in network byte order, above 32 bits for a failure. A function of its own, so that there is
/// one local for the helper to write to instead of one per field.
#[inline(never)]
fn word<'a, B: Packet<'a>>(ctx: &'a TcContext, offset: usize) -> u64 {
    let mut word = 0_u32;
    // SAFETY: there is room for four bytes.
    let result = unsafe { B::load(ctx.skb.skb, offset as u32, (&raw mut word).cast(), 4) };
    if result == 0 {
        u32::from_be(word) as u64
    } else {
        u64::MAX
    }
}

macro_rules! bytes_by_calls {
    ($name:ident) => {
        impl $name<'_> {
            /// Everything that is read stands at least four bytes before the end of its header, so
            /// shorter fields are cut out of four.
            #[inline(always)]
            fn word(&self, offset: usize) -> Option<u32> {
                u32::try_from(word::<Self>(self.0, offset)).ok()
            }
        }

        impl Bytes for $name<'_> {
            #[inline(always)]
            fn u8(&self, offset: usize) -> Option<u8> {
                self.word(offset).map(|w| (w >> 24) as u8)
            }
            #[inline(always)]
            fn u16(&self, offset: usize) -> Option<u16> {
                self.word(offset).map(|w| (w >> 16) as u16)
            }
            #[inline(always)]
            fn u32(&self, offset: usize) -> Option<u32> {
                self.word(offset)
            }
            #[inline(always)]
            fn array4(&self, offset: usize) -> Option<[u8; 4]> {
                self.word(offset).map(u32::to_be_bytes)
            }
            #[inline(always)]
            fn array16(&self, offset: usize) -> Option<[u8; 16]> {
                let [a, b] = [self.array4(offset)?, self.array4(offset + 4)?];
                let [c, d] = [self.array4(offset + 8)?, self.array4(offset + 12)?];
                Some([
                    a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0],
                    d[1], d[2], d[3],
                ])
            }
            #[inline(always)]
            fn wire_len(&self) -> usize {
                self.0.len() as usize
            }
        }
    };
}

bytes_by_calls!(Anywhere);
bytes_by_calls!(FromNetwork);
