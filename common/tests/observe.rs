//! What scripts of segments do to the tables.

mod support;

#[path = "observe/http.rs"]
mod http;
#[path = "observe/interleaving.rs"]
mod interleaving;
#[path = "observe/outcomes.rs"]
mod outcomes;
#[path = "observe/reuse.rs"]
mod reuse;
#[path = "observe/surroundings.rs"]
mod surroundings;
