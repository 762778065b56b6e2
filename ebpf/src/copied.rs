//! Neighbouring fields of a socket, copied by one call.
//!
//! A call costs a third of a miss of the cache, and one call that copies several cache lines waits for all of
//! them together, where a call for each field waits for one after the other.

use aya_ebpf::{Global as Offset, helpers::generated::bpf_probe_read_kernel};

use crate::socket::{Fields, Kernel};

/// Words that are copied at most: fields that lie farther apart are read one by one.
pub const WORDS: usize = 96;

/// Where some fields lie, from the first one to the end of the last one: `span!(OFFSET: BYTES, …)`.
macro_rules! span {
    ($($offset:ident: $bytes:literal),+ $(,)?) => {{
        let mut span = $crate::copied::Span { first: u64::MAX, end: 0 };
        $(
            let at = $offset.load() as u64;
            if at < span.first {
                span.first = at;
            }
            if at + $bytes > span.end {
                span.end = at + $bytes;
            }
        )+
        span
    }};
}
pub(crate) use span;

/// See [`span!`]. All of it are constants to the verifier.
#[derive(Clone, Copy)]
pub struct Span {
    /// Offset of the first field.
    pub first: u64,
    /// Where the last one ends; far away if the kernel lacks one of them.
    pub end: u64,
}

/// A part of a socket.
#[derive(Clone, Copy)]
pub struct Copied<'a> {
    sk: Kernel,
    words: &'a [u64; WORDS],
    /// Offset of the first word.
    base: u64,
    /// The span was not too long; a constant to the verifier, which drops the other branch.
    is_copied: bool,
}

impl<'a> Copied<'a> {
    /// Copies a part of a socket.
    #[inline(always)]
    pub fn new(sk: Kernel, span: Span, to: &'a mut [u64; WORDS]) -> Self {
        // Words of the copy lie as those of the socket do.
        let base = span.first & !7;
        let bytes = span.end - base;
        let is_copied = bytes <= size_of::<[u64; WORDS]>() as u64;
        if is_copied {
            // SAFETY: there is room for so many bytes, as the verifier checks; the source may be any
            // address (what cannot be read is cleared).
            unsafe {
                bpf_probe_read_kernel(
                    to.as_mut_ptr().cast(),
                    bytes as u32,
                    (sk.0 + base) as *const _,
                );
            }
        }
        Self {
            sk,
            words: to,
            base,
            is_copied,
        }
    }
}

impl Fields for Copied<'_> {
    /// A field of the span.
    #[inline(always)]
    fn read<T: Copy + Default>(self, offset: &Offset<u32>) -> T {
        if !self.is_copied {
            return self.sk.read(offset);
        }
        let at = (offset.load() as u64).wrapping_sub(self.base);
        // SAFETY: the field lies within the copy, as the verifier checks, and is aligned as in the socket.
        unsafe {
            self.words
                .as_ptr()
                .cast::<u8>()
                .add(at as usize)
                .cast::<T>()
                .read()
        }
    }
}
