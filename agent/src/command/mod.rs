//! The commands of the binary.

pub mod config;
pub mod doctor;
mod flags;
pub mod replay;
pub mod run;
mod watch;

/// An error and the exit code that tells its kind.
#[derive(Debug)]
pub struct Failure {
    /// 1 for a failure at run time, 77 (`EX_NOPERM`) for a missing right, 78 (`EX_CONFIG`) for a
    /// wrong setting.
    pub code: u8,
    /// What happened and what to do.
    pub error: anyhow::Error,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            code: 1,
            error: error.into(),
        }
    }
}
