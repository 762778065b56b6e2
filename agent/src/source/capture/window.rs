//! A window on a stream of bytes that knows where it stands.

use std::{
    io::{self, Read},
    ops::Range,
};

/// Bytes asked for at once: a piece that stays in the second-level cache.
const PIECE: usize = 256 << 10;

/// A window on a stream.
pub(super) struct Window<R> {
    input: R,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Offset of the buffer's first byte in the stream.
    base: u64,
    ended: bool,
}

impl<R: Read> Window<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input,
            buffer: vec![0; PIECE],
            start: 0,
            end: 0,
            base: 0,
            ended: false,
        }
    }

    /// Offset of the next byte in the stream.
    pub(super) const fn offset(&self) -> u64 {
        self.base + self.start as u64
    }

    /// Whether `n` more bytes are at hand, reading on if need be; `false` at the end of the stream.
    #[inline]
    pub(super) fn has(&mut self, n: usize) -> io::Result<bool> {
        if self.end - self.start >= n {
            return Ok(true);
        }
        self.refill(n)
    }

    #[cold]
    fn refill(&mut self, n: usize) -> io::Result<bool> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.base += self.start as u64;
        self.end -= self.start;
        self.start = 0;
        if self.buffer.len() < n {
            self.buffer.resize(n, 0);
        }
        while self.end < n && !self.ended {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.ended = true,
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(self.end >= n)
    }

    /// How many bytes are there without reading on.
    #[inline]
    pub(super) const fn at_hand(&self) -> usize {
        self.end - self.start
    }

    /// Whether nothing is left.
    pub(super) fn is_empty(&mut self) -> io::Result<bool> {
        Ok(!self.has(1)?)
    }

    /// The next `n` bytes, which [`Window::has`] has found.
    #[inline]
    pub(super) fn peek(&self, n: usize) -> &[u8] {
        &self.buffer[self.start..self.start + n]
    }

    /// Goes past the next `n` bytes, which [`Window::has`] has found, and says where they are until the
    /// next call of it.
    #[inline]
    pub(super) const fn pass(&mut self, n: usize) -> Range<usize> {
        let from = self.start;
        self.start += n;
        from..self.start
    }

    /// What [`Window::pass`] went past.
    #[inline]
    pub(super) fn passed(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[range]
    }

    /// Goes past `n` bytes without keeping them; `false` if the stream ends before.
    pub(super) fn skip(&mut self, mut n: usize) -> io::Result<bool> {
        while n > 0 {
            let step = n.min(PIECE);
            if !self.has(step)? {
                return Ok(false);
            }
            self.start += step;
            n -= step;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let n = self.0.len().min(to.len()).min(1);
            to[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    #[test]
    fn it_knows_where_it_stands() {
        let bytes: Vec<u8> = (0..=255).cycle().take(3 * PIECE + 5).collect();
        let mut window = Window::new(Drip(&bytes));
        assert!(window.has(4).unwrap());
        assert_eq!(window.peek(4), &bytes[..4]);
        let range = window.pass(4);
        assert_eq!(window.passed(range), &bytes[..4]);
        assert_eq!(window.offset(), 4);
        assert!(window.skip(PIECE * 2 + 1).unwrap());
        assert_eq!(window.offset(), 2 * PIECE as u64 + 5);
        assert!(window.has(PIECE).unwrap());
        assert!(!window.has(PIECE + 1).unwrap());
        assert!(!window.skip(PIECE + 1).unwrap());
        assert!(window.is_empty().unwrap());
    }
}
