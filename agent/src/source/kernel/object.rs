//! The eBPF object that the binary carries, and the memory that it takes.

use rustix::mm::{Advice, madvise};

/// The eBPF object, built beforehand (`cargo xtask build`).
pub(super) static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("TUPLEWATCH_EBPF_OBJECT"));

/// Once its programs are loaded nobody reads the object: its pages need not stay in memory. Whoever reads it all the
/// same gets them from the file again.
pub fn forget_object() {
    let page = rustix::param::page_size();
    let before = OBJECT.as_ptr().align_offset(page);
    let whole = OBJECT.get(before..).unwrap_or_default();
    let whole = &whole[..whole.len() / page * page];
    // SAFETY: these are whole pages of a constant, a private map of the binary that nobody can have written to, so that
    // what the file says is what was there. It may be refused where memory is locked; then it stays.
    let _ = unsafe {
        madvise(
            whole.as_ptr().cast_mut().cast(),
            whole.len(),
            Advice::LinuxDontNeed,
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kilobytes of the object that are resident, by `/proc/self/smaps`: of the map that has it.
    fn resident() -> u64 {
        let at = OBJECT.as_ptr() as usize;
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut has_it = false;
        for line in smaps.lines() {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let range = range.and_then(|(from, to)| {
                let number = |text| usize::from_str_radix(text, 16).ok();
                Some(number(from)?..number(to)?)
            });
            if let Some(range) = range {
                has_it = range.contains(&at);
            } else if has_it && let Some(rss) = line.strip_prefix("Rss:") {
                return rss.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        panic!("no map has the object");
    }

    #[test]
    fn the_object_is_forgotten_and_still_there() {
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        let before = sum(OBJECT);
        let (read, size) = (resident(), OBJECT.len() as u64 >> 10);
        // Other tests may read it at the same time.
        let forgotten = (0..100).any(|_| {
            forget_object();
            let is_gone = resident() + size * 9 / 10 < read;
            if !is_gone {
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            is_gone
        });
        assert!(forgotten, "{read} kB, then {} kB of {size} kB", resident());
        assert_eq!(sum(OBJECT), before);
    }
}
