//! Infers the pool of source ports that an initiator address uses.

use super::{finding::Pool, ports::Ports, threshold::PoolInference};

/// The pool, once the count of distinct ports has levelled off.
///
/// A pool is the longest run of ports without a gap that is out of proportion: a device hands out a
/// range, and one stray connection from far outside (a scan, a health check) must not widen it. A
/// pool that is handed out in sequence looks full in its first second; until its ports come again
/// nothing is said.
#[must_use]
pub fn infer(ports: &Ports, rules: &PoolInference) -> Option<Pool> {
    if ports.distinct() < rules.min_ports || ports.news_share()? > rules.plateau {
        return None;
    }
    densest(&ports.sorted(), rules)
}

/// The longest run of sorted ports whose gaps stay within proportion.
fn densest(sorted: &[u16], rules: &PoolInference) -> Option<Pool> {
    let gaps: Vec<u32> = sorted
        .windows(2)
        .map(|w| u32::from(w[1]) - u32::from(w[0]))
        .collect();
    let mut ordered = gaps.clone();
    ordered.sort_unstable();
    // The middle gap tells how densely the pool is used, whatever a few strays do to the mean.
    let typical = f64::from(*ordered.get(ordered.len() / 2)?);
    let widest = typical * rules.max_gap;
    let mut best: Option<(usize, usize)> = None;
    let mut start = 0;
    for end in 0..sorted.len() {
        if end > 0 && f64::from(gaps[end - 1]) > widest {
            start = end;
        }
        if best.is_none_or(|(s, e)| end - start > e - s) {
            best = Some((start, end));
        }
    }
    let (start, end) = best?;
    let seen = u32::try_from(end - start + 1).ok()?;
    (seen >= rules.min_ports).then_some(Pool {
        first: sorted[start],
        last: sorted[end],
        seen,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::{threshold::Thresholds, time::Moment};

    fn rules() -> PoolInference {
        Thresholds::default().pool
    }

    /// Feeds ports ten at a time, one tick each.
    fn feed(ports: &mut Ports, all: impl Iterator<Item = u16>, from: u64) -> u64 {
        let all: Vec<u16> = all.collect();
        let mut established = from;
        for chunk in all.chunks(10) {
            established += chunk.len() as u64;
            ports.note(
                Moment(established * 100_000_000),
                chunk,
                established,
                usize::MAX,
            );
        }
        established
    }

    #[test]
    fn sequential_pool_is_not_full_before_it_comes_round() {
        let mut ports = Ports::default();
        let n = feed(&mut ports, 2048..2248, 0);
        assert_eq!(infer(&ports, &rules()), None);
        feed(&mut ports, 2048..2248, n);
        let pool = infer(&ports, &rules()).unwrap();
        assert_eq!((pool.first, pool.last, pool.seen), (2048, 2247, 200));
    }

    #[test]
    fn a_stray_port_does_not_widen_the_pool() {
        let mut ports = Ports::default();
        let n = feed(&mut ports, (2048..2248).chain([51_234]), 0);
        feed(&mut ports, (2048..2248).chain(2048..2248), n);
        let pool = infer(&ports, &rules()).unwrap();
        assert_eq!((pool.first, pool.last), (2048, 2247));
        assert_eq!(ports.distinct(), 201);
    }

    #[test]
    fn random_allocation_levels_off() {
        let mut ports = Ports::default();
        // A linear congruential generator over 400 ports: every port within some rounds.
        let mut x = 7u32;
        let random = std::iter::repeat_with(move || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            30_000 + (x >> 16) as u16 % 400
        });
        let mut n = 0;
        for (i, port) in random.take(6000).enumerate() {
            n += 1;
            ports.note(Moment(n * 10_000_000), &[port], n, usize::MAX);
            if i == 200 {
                assert_eq!(infer(&ports, &rules()), None, "most ports are still new");
            }
        }
        let pool = infer(&ports, &rules()).unwrap();
        assert_eq!((pool.first, pool.last), (30_000, 30_399));
    }

    #[test]
    fn old_ports_are_forgotten() {
        let mut ports = Ports::default();
        feed(&mut ports, 1000..1100, 0);
        ports.age(Moment(10_000_000_000_000), Duration::from_secs(300));
        assert_eq!(ports.distinct(), 0);
        assert!(ports.sorted().is_empty());
    }
}
