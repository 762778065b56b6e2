//! Opens a capture: a file or standard input, packed with gzip or zstd or not.

use std::{
    error::Error,
    fs::File,
    io::{self, BufRead as _, BufReader, Cursor, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ruzstd::decoding::{
    BlockDecodingStrategy, FrameDecoder,
    errors::{FrameDecoderError, ReadFrameHeaderError},
};

/// An opened capture.
pub struct Input {
    /// What it unpacks to.
    pub bytes: Box<dyn Read + Send>,
    /// Length of the file in bytes, where it has one.
    pub length: Option<u64>,
    /// How many of them were read.
    pub read: Arc<AtomicU64>,
}

/// Bytes of a packed file read at once.
const PACKED: usize = 64 << 10;

/// Window of a packed stream that is accepted: what `zstd --long` makes. More memory is not given to
/// a file's word.
const ZSTD_WINDOW: u64 = 128 << 20;

impl Input {
    /// Opens a file; `-` is standard input.
    ///
    /// # Errors
    /// The error of the operating system, or of the unpacker on the first bytes.
    pub fn open(path: &Path) -> io::Result<Self> {
        if path == Path::new("-") {
            return Self::new(io::stdin(), None);
        }
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Err(rustix::io::Errno::ISDIR.into());
        }
        let length = metadata.is_file().then_some(metadata.len());
        Self::new(file, length)
    }

    /// Reads from anything.
    ///
    /// # Errors
    /// The error of reading the first bytes.
    pub fn new(mut source: impl Read + Send + 'static, length: Option<u64>) -> io::Result<Self> {
        let mut first = Vec::with_capacity(4);
        source.by_ref().take(4).read_to_end(&mut first)?;
        let read = Arc::new(AtomicU64::new(0));
        let counted = Counted {
            source: Cursor::new(first.clone()).chain(source),
            read: Arc::clone(&read),
        };
        let bytes: Box<dyn Read + Send> = match first.first_chunk::<4>() {
            Some([0x1f, 0x8b, _, _]) => {
                let source = BufReader::with_capacity(PACKED, counted);
                Box::new(flate2::bufread::MultiGzDecoder::new(source))
            }
            Some(magic) if is_zstd(u32::from_le_bytes(*magic)) => Box::new(Zstd::new(counted)),
            _ => Box::new(counted),
        };
        Ok(Self {
            bytes,
            length,
            read,
        })
    }
}

/// A frame, or one to be skipped (RFC 8878 section 3.1).
const fn is_zstd(magic: u32) -> bool {
    magic == 0xfd2f_b528 || magic & 0xffff_fff0 == 0x184d_2a50
}

struct Counted<R> {
    source: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.source.read(to)?;
        self.read.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// All frames of a zstd stream, one after the other.
struct Zstd<R> {
    source: BufReader<R>,
    decoder: FrameDecoder,
    /// A frame was begun and is not finished.
    within: bool,
    /// What is wrong with it; told after what it gave before.
    fault: Option<io::Error>,
}

/// A last block without content (RFC 8878 section 3.1.1.2), and a checksum that nobody looks at. The
/// decoder holds the last window back until a frame ends: this gets it out of one that is broken.
const LAST_BLOCK: [u8; 7] = [1, 0, 0, 0, 0, 0, 0];

impl<R: Read> Zstd<R> {
    fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(ZSTD_WINDOW);
        Self {
            source: BufReader::with_capacity(PACKED, source),
            decoder,
            within: false,
            fault: None,
        }
    }

    /// Begins the next frame; `false` at the end of the stream.
    fn begin_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.init(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let mut frame = self.source.by_ref().take(length);
                    if io::copy(&mut frame, &mut io::sink())? < length {
                        return Err(cut());
                    }
                }
                Err(error) => return Err(invalid(error)),
            }
        }
        Ok(false)
    }
}

fn cut() -> io::Error {
    let text = "the zstd stream ends too early";
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

fn invalid(error: FrameDecoderError) -> io::Error {
    let mut cause: Option<&dyn Error> = Some(&error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|e| e.kind() == io::ErrorKind::UnexpectedEof) {
            return cut();
        }
        cause = error.source();
    }
    let text = format!("the zstd stream is damaged: {error}");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl<R: Read> Read for Zstd<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.within {
                self.within = self.begin_frame()?;
                if !self.within {
                    return Ok(0);
                }
            }
            let one = || BlockDecodingStrategy::UptoBlocks(1);
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                if let Err(error) = self.decoder.decode_blocks(&mut self.source, one()) {
                    self.fault = Some(invalid(error));
                    self.decoder
                        .decode_blocks(LAST_BLOCK.as_slice(), one())
                        .map_err(invalid)?;
                }
            }
            let n = self.decoder.read(to)?;
            if n > 0 || to.is_empty() {
                return Ok(n);
            }
            if let Some(fault) = self.fault.take() {
                return Err(fault);
            }
            let told = self.decoder.get_checksum_from_data();
            if told.is_some() && told != self.decoder.get_calculated_checksum() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the checksum of a zstd frame is wrong",
                ));
            }
            self.within = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn unpack(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut input = Input::new(Cursor::new(bytes.to_vec()), None)?;
        let mut out = Vec::new();
        input.bytes.read_to_end(&mut out)?;
        assert_eq!(input.read.load(Ordering::Relaxed), bytes.len() as u64);
        Ok(out)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn whatever_it_is_packed_with() {
        let bytes: Vec<u8> = (0..200_000u32)
            .flat_map(|i| (i / 7).to_le_bytes())
            .collect();
        assert_eq!(unpack(&bytes).unwrap(), bytes);
        assert_eq!(unpack(&gzip(&bytes)).unwrap(), bytes);
        assert_eq!(unpack(&zstd(&bytes)).unwrap(), bytes);
        assert_eq!(unpack(b"ab").unwrap(), b"ab");
        assert_eq!(unpack(b"").unwrap(), b"");
    }

    #[test]
    fn several_members_are_one_stream() {
        let gz = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(unpack(&gz).unwrap(), b"one two");
        let skipped = [
            &0x184d_2a53u32.to_le_bytes()[..],
            &3u32.to_le_bytes(),
            b"xyz",
        ]
        .concat();
        let zst = [skipped.clone(), zstd(b"one "), skipped, zstd(b"two")].concat();
        assert_eq!(unpack(&zst).unwrap(), b"one two");
    }

    #[test]
    fn what_is_cut_is_an_error_after_what_can_be_read() {
        let bytes: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        for packed in [gzip(&bytes), zstd(&bytes)] {
            let half = packed[..packed.len() / 2].to_vec();
            let mut input = Input::new(Cursor::new(half), None).unwrap();
            let mut out = Vec::new();
            input.bytes.read_to_end(&mut out).unwrap_err();
            assert!(!out.is_empty() && bytes.starts_with(&out), "{}", out.len());
        }
    }
}
