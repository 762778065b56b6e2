//! Arithmetic of totals.

use tuplewatch_common::{
    histogram::{HANDSHAKE_UNIT_NS, bucket},
    record::PortSpace,
};

use super::report::Totals;

macro_rules! totals {
    ($($field:ident),*; $($more:ident from $of:ident),*) => {
        impl From<&PortSpace> for Totals {
            fn from(raw: &PortSpace) -> Self {
                Self { $($field: raw.$field,)* $($more: $of(raw),)* }
            }
        }

        impl Totals {
            /// How many there are.
            pub const COUNT: usize = [$(stringify!($field),)* $(stringify!($more),)*].len();

            /// What was counted since `earlier`.
            #[must_use]
            pub fn minus(&self, earlier: &Self) -> Self {
                Self {
                    $($field: self.$field.saturating_sub(earlier.$field),)*
                    $($more: self.$more.saturating_sub(earlier.$more),)*
                }
            }

            /// Both together.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self {
                    $($field: self.$field + other.$field,)*
                    $($more: self.$more + other.$more,)*
                }
            }

            /// All of them, in order.
            #[must_use]
            pub const fn words(&self) -> [u64; Self::COUNT] {
                [$(self.$field,)* $(self.$more,)*]
            }

            /// Those that [`Totals::words`] gave.
            #[must_use]
            pub const fn from_words(words: &[u64; Self::COUNT]) -> Self {
                let [$($field,)* $($more,)*] = *words;
                Self { $($field,)* $($more,)* }
            }
        }
    };
}

totals!(
    opens,
    established,
    refused,
    syn_timeouts,
    abandoned,
    half_open,
    no_local_port,
    failed,
    syn_retransmits,
    bare_acks,
    bare_acks_closed,
    bare_acks_open,
    bare_acks_half_open,
    bare_acks_unknown,
    duplicate_syns,
    no_listener,
    rsts_after_bare_ack,
    healed,
    unhealed,
    reuse_accepted,
    resets_received,
    resets_sent,
    data_retransmits;
    late from late
);

/// The first bucket of the histogram of handshake durations that [`Totals::late`] counts.
const LATE: usize = bucket(600_000_000, HANDSHAKE_UNIT_NS);

fn late(raw: &PortSpace) -> u64 {
    raw.handshake_duration[LATE..].iter().sum()
}
