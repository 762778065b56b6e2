//! Tells the agent's source where the eBPF object lies that it embeds: `env!("TUPLEWATCH_EBPF_OBJECT")`.
//!
//! The object is built for another target with another compiler, thus not by cargo on the way: `cargo xtask build` does it
//! first. Whoever has built it elsewhere gives its path in the environment variable of the same name.

use std::{env, path::PathBuf};

const VARIABLE: &str = "TUPLEWATCH_EBPF_OBJECT";

fn main() {
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let object = env::var_os(VARIABLE).map_or_else(in_target, PathBuf::from);
    println!("cargo::rerun-if-changed={}", object.display());
    match object.canonicalize() {
        Ok(object) => println!("cargo::rustc-env={VARIABLE}={}", object.display()),
        Err(error) => println!(
            "cargo::error=cannot embed the eBPF object {}: {error}. Build it with `cargo xtask build --ebpf-only`, or give \
             another one's path in {VARIABLE}",
            object.display()
        ),
    }
}

/// Where `cargo xtask build` puts it.
fn in_target() -> PathBuf {
    let package = PathBuf::from(
        env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR for build scripts"),
    );
    package.join("../target/bpf/tuplewatch-ebpf.o")
}
