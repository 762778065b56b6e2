//! The programs that run in the hosts of the lab: `lab-peer <subcommand>`, see [`tuplewatch_tests::peer`].

use std::process::ExitCode;

fn main() -> ExitCode {
    match tuplewatch_tests::peer::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-peer: {error:#}");
            ExitCode::FAILURE
        }
    }
}
