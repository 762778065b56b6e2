//! Whether state could be kept, without keeping any.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::{SYSTEMD, directory, file};
use crate::config::StateDir;

/// What was found at the state directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Examined {
    /// Where it is.
    pub directory: PathBuf,
    /// Why nothing can be kept there.
    pub unusable: Option<String>,
    /// Why what an agent before has left would be put aside.
    pub damaged: Option<String>,
}

/// Looks at the directory that is meant; `None` if nothing is to be kept. Nothing is made or written
/// that stays.
#[must_use]
pub fn examine(wanted: &StateDir) -> Option<Examined> {
    let directory = directory(wanted, std::env::var(SYSTEMD).ok())?;
    Some(look(directory))
}

fn look(directory: PathBuf) -> Examined {
    let unusable = unusable(&directory);
    let damaged = file::read(&directory.join(file::NAME), &file::Stamp::now()).err();
    Examined {
        // Who cannot get there cannot read either: one word on it is enough.
        damaged: damaged
            .filter(|_| unusable.is_none())
            .map(|error| error.to_string()),
        unusable,
        directory,
    }
}

fn unusable(directory: &Path) -> Option<String> {
    // Whether it exists, and may be written to by this process: the agent would make what is missing.
    let nearest = directory.ancestors().find(|path| path.exists())?;
    let refused = |error: &dyn std::fmt::Display| {
        Some(format!("{} cannot be written to: {error}", nearest.display()))
    };
    if !nearest.is_dir() {
        return refused(&"it is not a directory");
    }
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    if let Err(error) = accessat(CWD, nearest, wanted, AtFlags::EACCESS) {
        return refused(&error);
    }
    // Rights are not all: the disk may be full.
    let probe = directory.join(format!(".doctor-{}", std::process::id()));
    if nearest == directory {
        let written = fs::write(&probe, [0; 4096]);
        let _ = fs::remove_file(&probe);
        if let Err(error) = written {
            return refused(&error);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: &Path) -> Examined {
        examine(&StateDir::At(path.to_owned())).unwrap()
    }

    #[test]
    fn nothing_stays_where_state_can_be_kept() {
        let folder = tempfile::tempdir().unwrap();
        let examined = at(folder.path());
        assert_eq!((examined.unusable, examined.damaged), (None, None));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = folder.path().join("not/yet");
        assert_eq!(at(&missing).unusable, None);
        assert!(!missing.exists());
        assert_eq!(examine(&StateDir::Off), None);
    }

    #[test]
    fn what_is_in_the_way_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let why = at(&file.join("state")).unusable.unwrap();
        assert!(why.ends_with("cannot be written to: it is not a directory"), "{why}");
        let why = at(Path::new("/proc/self")).unusable.unwrap();
        assert!(why.starts_with("/proc/self cannot be written to: "), "{why}");
        fs::write(folder.path().join(file::NAME), "{").unwrap();
        let damaged = at(folder.path()).damaged.unwrap();
        assert!(damaged.contains("damaged"), "{damaged}");
    }
}
