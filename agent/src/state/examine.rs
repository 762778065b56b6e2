//! Whether state could be kept, without keeping any.

use std::{
    fs,
    path::{Path, PathBuf},
};

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

/// By trying: rights are not all, the disk may be full or the file system read-only.
fn unusable(directory: &Path) -> Option<String> {
    let missing: Vec<_> = directory.ancestors().take_while(|p| !p.exists()).collect();
    let probe = directory.join(format!(".doctor-{}", std::process::id()));
    let refused = match fs::create_dir_all(directory) {
        Ok(()) => fs::write(&probe, [0; 4096])
            .err()
            .map(|error| format!("it cannot be written to: {error}")),
        Err(error) => Some(format!("it cannot be made: {error}")),
    };
    let _ = fs::remove_file(&probe);
    for made in missing {
        // Only if it is empty.
        let _ = fs::remove_dir(made);
    }
    refused
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
        assert!(!folder.path().join("not").exists());
        assert_eq!(examine(&StateDir::Off), None);
    }

    #[test]
    fn what_is_in_the_way_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let why = at(&file.join("state")).unusable.unwrap();
        assert!(
            why.starts_with("it cannot be made: Not a directory"),
            "{why}"
        );
        let why = at(Path::new("/proc/self")).unusable.unwrap();
        assert!(why.starts_with("it cannot be written to: "), "{why}");
        fs::write(folder.path().join(file::NAME), "{").unwrap();
        let damaged = at(folder.path()).damaged.unwrap();
        assert!(damaged.contains("damaged"), "{damaged}");
    }
}
