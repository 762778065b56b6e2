#[path = "../../../../agent/src/source/capture/mod.rs"]
pub mod capture;
