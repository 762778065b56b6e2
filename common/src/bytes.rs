//! How the parser reads a packet, whatever holds it.

/// Bounds-checked, big-endian access to the bytes of a packet.
///
/// In the kernel this is direct access to the linear part of an skb or a copy of its head; in the
/// capture reader it is a slice.
pub trait Bytes {
    /// The byte at `offset`.
    fn u8(&self, offset: usize) -> Option<u8>;
    /// Two bytes in network byte order.
    fn u16(&self, offset: usize) -> Option<u16>;
    /// Four bytes in network byte order.
    fn u32(&self, offset: usize) -> Option<u32>;
    /// Four bytes as they stand.
    fn array4(&self, offset: usize) -> Option<[u8; 4]>;
    /// Sixteen bytes as they stand.
    fn array16(&self, offset: usize) -> Option<[u8; 16]>;
    /// Length of the whole packet on the wire, which may exceed what can be read.
    fn wire_len(&self) -> usize;
}

/// A captured packet: the bytes at hand and the length it had on the wire.
#[derive(Clone, Copy, Debug)]
pub struct Captured<'a> {
    /// What the snap length left.
    pub data: &'a [u8],
    /// Original length in bytes.
    pub wire_len: usize,
}

impl<'a> Captured<'a> {
    /// A packet that was captured whole.
    #[must_use]
    pub const fn whole(data: &'a [u8]) -> Self {
        Self {
            data,
            wire_len: data.len(),
        }
    }

    #[inline]
    fn array<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.data.get(offset..)?.first_chunk::<N>().copied()
    }
}

impl Bytes for Captured<'_> {
    #[inline]
    fn u8(&self, offset: usize) -> Option<u8> {
        self.data.get(offset).copied()
    }
    #[inline]
    fn u16(&self, offset: usize) -> Option<u16> {
        self.array(offset).map(u16::from_be_bytes)
    }
    #[inline]
    fn u32(&self, offset: usize) -> Option<u32> {
        self.array(offset).map(u32::from_be_bytes)
    }
    #[inline]
    fn array4(&self, offset: usize) -> Option<[u8; 4]> {
        self.array(offset)
    }
    #[inline]
    fn array16(&self, offset: usize) -> Option<[u8; 16]> {
        self.array(offset)
    }
    #[inline]
    fn wire_len(&self) -> usize {
        self.wire_len
    }
}
