//! Paths that lose packets by chance, connection by connection and transmission by transmission.

use super::*;
use crate::core::stalled::Recovered;

/// xorshift64*.
struct Dice(u64);

impl Dice {
    fn is(&mut self, chance: f64) -> bool {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let n = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
        (n as f64) < chance * (1u64 << 53) as f64
    }
}

/// A first transmission, and when it is sent again: after 0.2 s of data, 1 s of a SYN, doubled each time.
struct Sending {
    began_ms: u64,
    first_ms: u64,
    times: u32,
}

impl Sending {
    const fn new(now_ms: u64, first_ms: u64) -> Self {
        Self {
            began_ms: now_ms,
            first_ms,
            times: 0,
        }
    }

    /// The time-outs until then, each with a transmission; whether one of them got through.
    fn until(&mut self, now_ms: u64, mut is_lost: impl FnMut() -> bool) -> bool {
        while self.began_ms + self.first_ms * ((2 << self.times) - 1) <= now_ms {
            self.times += 1;
            if !is_lost() {
                return true;
            }
        }
        false
    }
}

/// What such a path carries.
#[derive(Clone, Copy)]
struct Traffic {
    /// Of both ways together.
    lost: f64,
    /// Connections that are kept.
    connections: u16,
    /// Requests that each of them sends in a second, in thousandths.
    per_mille: u64,
    /// Opens in a second, likewise.
    opens_per_mille: u64,
}

/// So many minutes of it; every second of the script must pass `each`.
fn carry(traffic: Traffic, minutes: u64, seed: u64, mut each: impl FnMut(&mut Script, u64)) {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut dice = Dice(seed);
    let mut host = Script::new();
    let mut kept: Vec<Option<Sending>> = (0..traffic.connections).map(|_| None).collect();
    let mut opening: Vec<Sending> = Vec::new();
    host.run(60 * minutes, |h, second| {
        let now_ms = (second + 1) * 1000;
        // Ten times in a second each may begin to send something.
        for ms in (0..10).map(|n| second * 1000 + n * 100) {
            if dice.is(traffic.opens_per_mille as f64 / 10_000.0) {
                h.space(key).opens += 1;
                if dice.is(traffic.lost) {
                    opening.push(Sending::new(ms, 1000));
                } else {
                    h.space(key).established += 1;
                }
            }
            for (port, sending) in (0..).zip(&mut kept) {
                if let Some(waits) = sending {
                    if waits.until(ms, || dice.is(traffic.lost)) {
                        if waits.times >= 2 {
                            let rtos = waits.times;
                            let connection = stalled(&key, port, 0, 0).connection;
                            h.recovered.push(Recovered {
                                space: key,
                                connection,
                                rtos,
                            });
                        }
                        *sending = None;
                    }
                } else if dice.is(traffic.per_mille as f64 / 10_000.0) && dice.is(traffic.lost) {
                    *sending = Some(Sending::new(ms, 200 + u64::from(port)));
                }
            }
        }
        opening.retain_mut(|syn| {
            let before = syn.times;
            let is_open = syn.until(now_ms, || dice.is(traffic.lost));
            let h = h.space(key);
            h.syn_retransmits += u64::from(syn.times - before);
            h.established += u64::from(is_open);
            !is_open
        });
        let begin = Moment(BEGIN * S);
        let waits = (0..).zip(&kept);
        h.stalled = waits
            .filter_map(|(port, sending)| {
                let sending = sending.as_ref().filter(|sending| sending.times >= 2)?;
                Some(Stalled {
                    since: begin + Duration::from_millis(sending.began_ms),
                    rtos: sending.times,
                    ..stalled(&key, port, 0, 0)
                })
            })
            .collect();
        each(h, second);
    });
}

fn is_quiet(host: &Script) -> bool {
    let said = host.verdicts();
    let ours = [
        Verdict::BlackHoled,
        Verdict::PathDown,
        Verdict::MtuBlackHole,
    ];
    !ours.iter().any(|verdict| said.contains(verdict))
}

/// Twenty minutes of each, from 1 % each way to 23 %.
#[test]
fn loss_by_chance_is_never_a_black_hole() {
    for percent in [2u32, 4, 6, 10, 20, 30, 36, 40] {
        let lost = f64::from(percent) / 100.0;
        for (connections, per_mille, opens_per_mille) in [
            (16, 4000, 2000),
            (16, 1000, 200),
            (100, 500, 5000),
            (4, 1000, 1000),
        ] {
            let traffic = Traffic {
                lost,
                connections,
                per_mille,
                opens_per_mille,
            };
            carry(
                traffic,
                20,
                0x9e37_79b9 + u64::from(percent),
                |host, second| {
                    assert!(
                        is_quiet(host),
                        "{percent} %, {connections} connections, second {second}: {:?}",
                        host.findings()
                            .iter()
                            .map(|f| &f.ruled_out)
                            .collect::<Vec<_>>()
                    );
                },
            );
        }
    }
}

/// One that is really dead on such a path is told in the end, as long as the kernel tries.
#[test]
fn a_dead_one_on_a_lossy_path_is_told_later() {
    let key = space(Role::Initiator, [10, 0, 0, 1]);
    let mut told = Vec::new();
    for percent in [0, 2, 6, 20] {
        let traffic = Traffic {
            lost: f64::from(percent) / 100.0,
            connections: 16,
            per_mille: 2000,
            opens_per_mille: 2000,
        };
        let mut after = None;
        carry(traffic, 16, 77, |host, second| {
            if second >= 100 {
                let dead = stalled(&key, 999, 100, second + 1);
                if dead.rtos >= 2 {
                    host.stalled.push(dead);
                }
            }
            if after.is_none() && host.verdicts().contains(&Verdict::BlackHoled) {
                after = Some(second - 100);
            }
        });
        told.push(after.unwrap_or_else(|| panic!("{percent} %: it is never told")));
    }
    println!("told after {told:?} s");
    assert!(told[0] <= 6, "{told:?}");
    assert!(
        told.is_sorted() && told[1] <= 30 && told[3] <= 800,
        "{told:?}"
    );
}
