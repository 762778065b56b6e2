//! The kernel of this machine, which is in the page beside those of the virtual machines.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{folder, page};
use crate::{
    paths::Paths,
    step::{self, say},
};

/// What one types, and what it is called in `docs/kernels.md`.
pub const NAME: &str = "own";

/// Attaches everything here, and compares with the page or writes it.
///
/// # Errors
/// If the test fails (it takes root), or the page says something else of this very kernel.
pub fn run(paths: &Paths, agent: &Path) -> Result<()> {
    let out = folder(paths).join("runs").join(NAME);
    fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let mut cargo = paths.lab_cargo();
    cargo
        .args(["test", "--package", "tuplewatch-tests", "--test", "kernel"])
        .args(["--", "--exact", "verdicts"])
        .env("TUPLEWATCH_BIN", agent)
        .env("TUPLEWATCH_OUT", &out);
    step::shown(&mut cargo)?;
    let left = out.join(page::FILE);
    let found = fs::read(&left).with_context(|| left.display().to_string())?;
    let found = serde_json::from_slice(&found).with_context(|| left.display().to_string())?;
    if page::is_of(paths, NAME, &found)? {
        return page::record(paths, NAME, &found);
    }
    say!("vm: {NAME}: docs/kernels.md is of another machine's kernel, nothing to compare with");
    Ok(())
}
