//! The one thread that starts every child process of the lab.
//!
//! The kernel delivers `PR_SET_PDEATHSIG` when the *thread* that forked the child ends. A test
//! thread may end, or hand its lab to another thread, long before the test process does. This
//! thread never ends on its own, so the signal comes exactly when the process dies.

use std::io;
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

type Job = (Command, Sender<io::Result<Child>>);

fn jobs() -> &'static Mutex<Sender<Job>> {
    static JOBS: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    JOBS.get_or_init(|| {
        let (sender, receiver) = channel::<Job>();
        std::thread::Builder::new()
            .name("lab-spawner".into())
            .spawn(move || {
                for (mut command, answer) in receiver {
                    // The asker waits for the answer; if it is gone the child is reaped by nobody
                    // but dies with this process.
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        Mutex::new(sender)
    })
}

/// Starts `command` from the spawner thread.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    let (sender, receiver) = channel();
    jobs()
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .send((command, sender))
        .map_err(|_| io::Error::other("the lab's spawner thread is gone"))?;
    receiver
        .recv()
        .map_err(|_| io::Error::other("the lab's spawner thread is gone"))?
}
