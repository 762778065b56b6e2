//! Adds to findings what the core cannot know, at the edge: names behind numbers.

pub mod cgroup;
