//! Which tests run in a guest.

use super::kernels::{Kernel, LOCKED};

/// Some tests of one binary.
pub struct Job {
    /// What it is called.
    pub name: &'static str,
    /// The binary.
    pub test: &'static str,
    /// Names of its tests.
    tests: &'static [&'static str],
    /// The kernels on which it runs with every `cargo xtask test`.
    always: &'static [&'static str],
    /// What must be in the command line of a kernel that it runs on; without, it runs on those to which nothing is added.
    pub parameters: &'static str,
    /// Seconds it may take. An emulated machine is 4 to 30 times slower.
    limit: u32,
}

/// The kernels that `cargo xtask test` boots.
const EVERYWHERE: &[&str] = &["6.1", "6.12", "newest"];

/// All, the most telling first.
pub const ALL: &[Job] = &[
    Job {
        name: "kernel",
        test: "kernel",
        tests: &["verdicts"],
        always: EVERYWHERE,
        parameters: "",
        limit: 300,
    },
    Job {
        name: "content",
        test: "kernel",
        tests: &["content_ipv4", "content_ipv6"],
        always: &["6.1"],
        parameters: "",
        limit: 300,
    },
    Job {
        name: "incident",
        test: "incident",
        tests: &["healed"],
        always: &["6.1"],
        parameters: "",
        limit: 500,
    },
    Job {
        name: "incident-ipv6",
        test: "incident",
        tests: &["healed_ipv6"],
        always: &["6.12"],
        parameters: "",
        limit: 500,
    },
    Job {
        name: "loopback",
        test: "loopback",
        tests: &["counts_once"],
        always: &[],
        parameters: "",
        limit: 120,
    },
    Job {
        name: "local-ports",
        test: "exhaustion",
        tests: &["host::connect_finds_no_port"],
        always: &[],
        parameters: "",
        limit: 300,
    },
    Job {
        name: "foreign",
        test: "foreign",
        tests: &["a_clsact_filter_before_us", "a_clsact_filter_after_us"],
        always: &[],
        parameters: "",
        limit: 300,
    },
    Job {
        name: "guard",
        test: "guard",
        tests: &[
            "killed_three_times_it_leaves_only_others",
            "a_qdisc_of_its_own_goes_with_it",
            "signals_to_all_do_not_end_the_guard",
            "a_killed_guard_is_replaced",
            "the_next_agent_is_left_alone",
        ],
        always: &[],
        parameters: "",
        limit: 600,
    },
    Job {
        name: "stacked",
        test: "stacked",
        tests: &["vlans_one_within_another", "tunnels"],
        always: &[],
        parameters: "",
        limit: 200,
    },
    Job {
        name: "lockdown",
        test: "lockdown",
        tests: &["packets_are_left"],
        always: &[],
        parameters: LOCKED,
        limit: 200,
    },
    Job {
        name: "namespaces",
        test: "namespaces",
        tests: &[
            "an_interface_removed_and_added_again",
            "a_restricted_agent_sees_its_own_only",
            "an_interface_that_comes_later",
        ],
        always: &[],
        parameters: "",
        limit: 300,
    },
];

impl Job {
    /// As the guest reads it.
    pub fn line(&self, program: &str, patience: u32) -> String {
        let mut words = vec![
            self.name.to_owned(),
            (self.limit * patience).to_string(),
            program.to_owned(),
        ];
        // Some are ignored elsewhere, because they need what these kernels have.
        let options = ["--exact", "--include-ignored", "--test-threads", "1"];
        words.extend(options.map(str::to_owned));
        words.extend(self.tests.iter().map(|test| (*test).to_owned()));
        words.join("\t")
    }

    /// Whether it can run on a kernel.
    pub fn is_for(&self, kernel: &Kernel) -> bool {
        self.parameters == kernel.parameters
    }

    /// Whether it runs on a kernel with every `cargo xtask test`.
    pub fn is_always_for(&self, kernel: &Kernel) -> bool {
        self.always.contains(&kernel.name)
    }

    /// Whether it runs on some kernel with every `cargo xtask test`.
    pub fn is_usual(&self) -> bool {
        !self.always.is_empty()
    }

    /// How many tests it has.
    pub fn count(&self) -> u64 {
        self.tests.len() as u64
    }

    /// The longest it may take in seconds.
    pub fn limit(&self) -> u64 {
        u64::from(self.limit)
    }
}
