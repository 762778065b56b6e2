//! How the parser of [`tuplewatch_common`] reads an skb.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use tuplewatch_common::bytes::Bytes;

/// The linear part of an skb, read directly: 66 bytes in nearly every one.
pub struct Linear {
    skb: *mut __sk_buff,
    data: usize,
    wire_len: usize,
}

impl Linear {
    /// Looks at the skb of `ctx`.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self {
            skb: ctx.skb.skb,
            data: ctx.data(),
            wire_len: ctx.len() as usize,
        }
    }

    #[inline(always)]
    fn at<T: Copy>(&self, offset: usize) -> Option<T> {
        // The end is read anew for each check. Otherwise the compiler proves some checks from earlier
        // ones (the TCP header lies behind the IP header) and drops them, while the verifier cannot
        // follow such a proof over offsets that vary.
        // SAFETY: `skb` is the program's own context.
        let end = unsafe { (&raw const (*self.skb).data_end).read_volatile() } as usize;
        let start = self.data + offset;
        // `start + 1 > end` would be compiled to `start >= end`, which at offset 0 tells the verifier
        // nothing; no header ends with its first byte, so two bytes are asked for.
        let size = if size_of::<T>() == 1 {
            2
        } else {
            size_of::<T>()
        };
        if start + size > end {
            return None;
        }
        // SAFETY: the bytes lie within the packet, as the verifier sees from the check above.
        Some(unsafe { core::ptr::read_unaligned(start as *const T) })
    }
}

impl Bytes for Linear {
    #[inline(always)]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.at(offset)
    }
    #[inline(always)]
    fn u16(&self, offset: usize) -> Option<u16> {
        self.at(offset).map(u16::from_be)
    }
    #[inline(always)]
    fn u32(&self, offset: usize) -> Option<u32> {
        self.at(offset).map(u32::from_be)
    }
    #[inline(always)]
    fn array4(&self, offset: usize) -> Option<[u8; 4]> {
        self.at(offset)
    }
    #[inline(always)]
    fn array16(&self, offset: usize) -> Option<[u8; 16]> {
        self.at(offset)
    }
    #[inline(always)]
    fn wire_len(&self) -> usize {
        self.wire_len
    }
}

/// An skb read by one helper call per field: slow, for the rare one whose headers are not linear.
pub struct Anywhere<'a>(pub &'a TcContext);

impl Bytes for Anywhere<'_> {
    #[inline(always)]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.0.load(offset).ok()
    }
    #[inline(always)]
    fn u16(&self, offset: usize) -> Option<u16> {
        self.0.load(offset).ok().map(u16::from_be)
    }
    #[inline(always)]
    fn u32(&self, offset: usize) -> Option<u32> {
        self.0.load(offset).ok().map(u32::from_be)
    }
    #[inline(always)]
    fn array4(&self, offset: usize) -> Option<[u8; 4]> {
        self.0.load(offset).ok()
    }
    #[inline(always)]
    fn array16(&self, offset: usize) -> Option<[u8; 16]> {
        self.0.load(offset).ok()
    }
    #[inline(always)]
    fn wire_len(&self) -> usize {
        self.0.len() as usize
    }
}
