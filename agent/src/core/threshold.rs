//! Every threshold of every rule, in one place, with the reason for its default.
//!
//! A threshold is declared once, at the end of this file's macro call: the declaration makes the field,
//! its name for `--set` and the configuration file, its default and its documentation.

use std::time::Duration;

use super::value::Value;

/// One threshold that can be set by name.
pub struct Setting {
    /// Its name, such as `l4_reuse.min_refused`.
    pub name: &'static str,
    help: &'static str,
    /// Whether it can differ by destination.
    pub per_destination: bool,
    /// Reads it as text.
    pub get: fn(&Thresholds) -> String,
    /// Writes it from text.
    pub set: fn(&mut Thresholds, &str) -> Result<(), String>,
}

impl Setting {
    /// What it means, and why the default is what it is.
    #[must_use]
    pub fn help(&self) -> &'static str {
        self.help.trim()
    }
}

/// Declares sections of thresholds. `per destination` sections can be set for some destinations only;
/// those `of the host` cannot: what is remembered depends on them.
macro_rules! thresholds {
    ($(
        $(#[doc = $about:literal])+
        $section:ident: $Section:ident, $scope:tt {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $kind:ty = $default:expr;
            )+
        }
    )+) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Section {
                $( $(#[doc = $doc])+ pub $field: $kind, )+
            }

            impl Default for $Section {
                fn default() -> Self {
                    Self { $( $field: $default, )+ }
                }
            }
        )+

        /// Thresholds of all rules.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Thresholds {
            /// Length of the window that rules look at.
            pub window: Duration,
            $( $(#[doc = $about])+ pub $section: $Section, )+
        }

        impl Default for Thresholds {
            fn default() -> Self {
                Self {
                    window: Duration::from_secs(60),
                    $( $section: $Section::default(), )+
                }
            }
        }

        /// All thresholds that can be set by name.
        pub const SETTINGS: &[Setting] = &[
            Setting {
                name: "window",
                help: "Length of the window that rules look at. Domain practice and the recordings: a \
                       burst of refused SYNs lasts tens of seconds, TIME_WAIT 60 s.",
                per_destination: false,
                get: |t| t.window.show(),
                set: |t, text| { t.window = Value::parse(text)?; Ok(()) },
            },
            $( $( Setting {
                name: concat!(stringify!($section), ".", stringify!($field)),
                help: concat!($($doc),+),
                per_destination: thresholds!(@scope $scope),
                get: |t| t.$section.$field.show(),
                set: |t, text| { t.$section.$field = Value::parse(text)?; Ok(()) },
            }, )+ )+
        ];

        /// Sections of [`SETTINGS`] and what they are about.
        pub const SECTIONS: &[(&str, &str)] = &[
            $( (stringify!($section), concat!($($about),+)), )+
        ];
    };
    (@scope per_destination) => { true };
    (@scope of_the_host) => { false };
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

thresholds! {
    /// Cause `l4_reuse_in_time_wait`.
    l4_reuse: L4Reuse, per_destination {
        /// Refused SYNs in the window that make a finding: fewer may be chance.
        min_refused: u64 = 5;
        /// Refused SYNs per open that make a finding. A healthy site in the literature had 0.003 %, a
        /// sick one 0.144 %.
        min_ratio: f64 = 0.0005;
        /// Distinct source ports that make a finding: one or two are somebody's fixed ports.
        min_ports: u32 = 3;
        /// Unhealed opens in the window that make it critical: connections fail, not only wait.
        critical_unhealed: u64 = 3;
    }

    /// Cause `nat_syn_drop`.
    nat_syn_drop: NatSynDrop, per_destination {
        /// Opens in the window: with fewer the share of lost ones says little.
        min_opens: u64 = 20;
        /// Lost opens, or SYNs sent again, per open. The incidents in the literature lose from 5 % up;
        /// ordinary loss stays below 1 %.
        min_ratio: f64 = 0.05;
        /// Share of the device's ports that is taken. Devices that search a free port at random or in
        /// turn begin to fail before all are taken, and what other hosts take is not seen.
        min_utilization: f64 = 0.8;
        /// Lost opens in the window that make it critical: connections fail, not only wait.
        critical_lost: u64 = 3;
    }

    /// Cause `local_ephemeral`.
    local: LocalEphemeral, per_destination {
        /// Share of this host's source ports to one destination that is taken: from half on every
        /// connect() searches long, and little is left for a burst.
        warn_utilization: f64 = 0.7;
        /// … that makes it critical: the last ports are found by luck, and a burst fails.
        critical_utilization: f64 = 0.9;
        /// … below which an alert that fires may end.
        clear_utilization: f64 = 0.6;
        /// Median time that connect() searches for a source port. Measured: 10 to 15 microseconds while
        /// less than half of the range is taken, 2 to 4 ms from there on.
        slow_search: Duration = Duration::from_micros(500);
        /// … in multiples of what it was before: a slow machine is slow always.
        slow_search_factor: f64 = 20.0;
    }

    /// Cause `forecast`.
    forecast: Forecast, per_destination {
        /// How far ahead to warn. A line through a minute of counting says little about an hour.
        horizon: Duration = seconds(600);
        /// Share of the variance that a straight line must explain for a rise to be believed: a step to
        /// a new level comes to 0.75.
        min_fit: f64 = 0.9;
    }

    /// Cause `tuple_collision`.
    collision: Collision, per_destination {
        /// Connections in the window that were reset because a SYN met them.
        min_resets: u32 = 10;
        /// Distinct source ports among them: an initiator that lost its state comes back on the ports
        /// that it fixed, and nothing known fixes as many.
        min_ports: u32 = 10;
        /// A connection without traffic for this long was not live any more for the NAT in between:
        /// AWS gateways and balancers forget after 350 s, and nothing common forgets later than Google's
        /// 20 min.
        stale: Duration = seconds(350);
    }

    /// Cause `pinned_5xx`.
    pinned: Pinned, per_destination {
        /// Failures (5xx) in a row on one connection, within the window. In the incident behind this
        /// cause one connection got four in 10 s; fewer happen while a server restarts.
        min_failures: u32 = 4;
        /// Newer connections that were answered well meanwhile: one may be chance.
        min_better: u32 = 2;
        /// If newer connections fail as well, the chance that so many of the newest in a row would do
        /// well all the same, each with the share of those that do. Above it a part of all requests
        /// fails, whatever the connection: one broken backend that still gets its part, or one client
        /// among many.
        max_chance: f64 = 0.001;
    }

    /// Cause `black_holed`.
    black_holed: BlackHoled, per_destination {
        /// Retransmission time-outs in a row without an acknowledgement: fewer are nothing special.
        min_rtos: u32 = 3;
        /// Probes in a row (keep-alive, or of a closed window) without an answer.
        min_probes: u32 = 2;
        /// How many connections of a port space may come so far by chance, with what the path to the peer was
        /// measured to lose in the last minute. Where nothing is lost five transmissions in vain are less likely,
        /// which takes 4 s; where those of others are lost as well, it takes more of them.
        max_chance: f64 = 0.0001;
        /// How long nothing was acknowledged before anybody is told. Paths are switched within seconds.
        warn_after: Duration = seconds(3);
        /// … that makes it critical: requests have timed out by then.
        critical_after: Duration = seconds(10);
        /// Connections at once that make it critical.
        critical_sockets: u32 = 3;
        /// Connections that were established after the stall began, more than stall themselves.
        min_newer: u64 = 1;
        /// At the responder: connections at once, if the initiator's address is public. Behind it may be
        /// many hosts, of which some always vanish while others open connections.
        min_public: u32 = 10;
        /// How long a peer keeps its window closed before it is named: a slow reader.
        zero_window_after: Duration = seconds(10);
    }

    /// Cause `idle_killed`.
    idle_killed: IdleKilled, per_destination {
        /// How far back idle times are compared: devices forget after minutes, so that a minute shows few.
        window: Duration = seconds(600);
        /// Connections reset after a longer idle time than any other survived. With a known device's
        /// time-out just passed one is enough.
        min_killed: u32 = 3;
        /// Shorter idle times are not looked at: no device forgets as soon, and servers that close so
        /// early do it by FIN.
        min_idle: Duration = seconds(5);
        /// How near a known device's time-out must be, and how near the longest idle time survived and
        /// the shortest one killed must be for a time-out to be estimated between them (in units of five
        /// times as much).
        tolerance: f64 = 0.05;
    }

    /// Cause `draining`.
    draining: Draining, per_destination {
        /// Opens refused, or without answer, since the first of them, with none that got through.
        min_refused: u64 = 3;
        /// Nothing is said before: a network balancer takes three minutes to send new connections elsewhere.
        grace: Duration = seconds(180);
        /// Where a change of placement is known (`placements`): nothing is said before. Balancers drain for
        /// 300 s by default.
        placed: Duration = seconds(300);
        /// An old connection was used so lately that requests still ride on it.
        quiet: Duration = seconds(60);
    }

    /// Cause `pinned_suspect`.
    pinned_suspect: PinnedSuspect, per_destination {
        /// Responses in a row that are equally long and begin at once, on a connection whose neighbours' are
        /// neither: 0 looks for none. It is a suspicion only; 6 is a good number to ask for. Live it needs
        /// `http_sniff`.
        min_responses: u32 = 0;
    }

    /// Names for opens that get no answer.
    loss: LossNames, per_destination {
        /// Lost opens, or SYNs sent again, in the window: fewer may be chance.
        min_lost: u64 = 5;
        /// … per open: the Internet loses up to 1 %.
        min_ratio: f64 = 0.02;
        /// Nothing gets through for this long: a SYN that was lost by chance was sent three times by
        /// then.
        silence: Duration = seconds(10);
    }

    /// Name `slow_server`.
    slow: SlowServer, per_destination {
        /// Connections that wait for an answer for a second or more: fewer may be who polls, or a report
        /// that takes its time.
        min_waiting: u32 = 8;
        /// … of those that wait at all or were answered within the last second: else it is a few kinds of
        /// requests that take long.
        min_share: f64 = 0.5;
        /// Opens in the window: who polls opens few connections and keeps them.
        min_opens: u64 = 20;
        /// It has lasted for this long: a restart or a pause of the server's memory management is over
        /// sooner.
        lasts: Duration = seconds(10);
    }

    /// SYN floods and port scans.
    strangers: StrangerNames, of_the_host {
        /// SYNs of no known port space in the window that may be a flood.
        flood_syns: u64 = 500;
        /// Half-open connections at one listener that may be a flood: half of the smallest SYN queue
        /// that kernels choose by themselves (128).
        flood_half_open: u32 = 64;
        /// Ports of one host tried without success that are a scan: no application has so many.
        scan_ports: u32 = 50;
        /// Opens per such port at most: who opens more wants that port.
        scan_opens: u64 = 3;
    }

    /// Inference of a pool at the responder.
    pool: PoolInference, of_the_host {
        /// A port not seen for this long is forgotten.
        ageing: Duration = seconds(300);
        /// Fewest distinct ports to speak of a pool.
        min_ports: u32 = 16;
        /// The count has levelled off when at most this share of the latest completed handshakes (half
        /// as many as there are ports) came from a port not seen before.
        plateau: f64 = 0.02;
        /// A gap between neighbouring ports of more than this many times the typical distance ends the
        /// pool: one scan from port 51234 must not widen it.
        max_gap: f64 = 32.0;
    }

    /// Life cycle of alerts.
    alert: AlertTiming, per_destination {
        /// A finding must last this long to fire.
        pending: Duration = seconds(1);
        /// A firing alert is resolved after this long without a symptom.
        resolve: Duration = seconds(60);
        /// A firing alert is reported again with its latest figures after this long.
        repeat: Duration = seconds(30);
        /// Fewest opens in the window for an alert to begin: with fewer, no pool of a device can be
        /// used up. It does not hold back `local_ephemeral`, whose failed connect() needs no second
        /// witness, nor `tuple_collision`, which is not about volume.
        min_opens: u64 = 20;
        /// The history of an alert that is resolved is kept for this long after its end.
        remember: Duration = seconds(24 * 3600);
    }
}

impl Thresholds {
    /// Sets one threshold from `name=value`.
    ///
    /// # Errors
    /// Says which part is wrong, and for an unknown name which one is near or which ones there are.
    pub fn set(&mut self, assignment: &str) -> Result<(), String> {
        let (name, value) = assignment
            .split_once('=')
            .ok_or_else(|| format!("`{assignment}` is not of the form name=value"))?;
        let setting = SETTINGS.iter().find(|s| s.name == name).ok_or_else(|| {
            let names: Vec<_> = SETTINGS.iter().map(|s| s.name).collect();
            format!(
                "there is no threshold `{name}`; there are {}",
                names.join(", ")
            )
        })?;
        (setting.set)(self, value).map_err(|e| format!("{name}: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_set_and_refused_by_name() {
        let mut t = Thresholds::default();
        t.set("alert.resolve=1500ms").unwrap();
        assert_eq!(t.alert.resolve, Duration::from_millis(1500));
        t.set("l4_reuse.min_refused=7").unwrap();
        assert_eq!(t.l4_reuse.min_refused, 7);
        assert!(
            t.set("alert.resolv=1s")
                .unwrap_err()
                .contains("alert.resolve")
        );
        assert!(t.set("alert.resolve=1 fortnight").is_err());
        assert!(t.set("window").is_err());
        assert!(t.set("window=-1s").is_err());
        assert!(t.set("pool.plateau=NaN").is_err());
        for s in SETTINGS {
            let shown = (s.get)(&t);
            (s.set)(&mut t, &shown).unwrap();
            assert_eq!((s.get)(&t), shown, "{}", s.name);
        }
        assert_eq!(t.l4_reuse.min_refused, 7);
    }

    #[test]
    fn each_setting_has_a_name_of_its_own_and_says_what_it_means() {
        let names: std::collections::BTreeSet<_> = SETTINGS.iter().map(|s| s.name).collect();
        assert_eq!(names.len(), SETTINGS.len());
        for s in SETTINGS {
            assert!(s.help().len() > 20, "{}: {}", s.name, s.help());
        }
    }
}
