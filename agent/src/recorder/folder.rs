//! The directory of the evidence files, and its bound.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// A file that is not whole yet ends so.
const UNFINISHED: &str = ".pcapng.tmp";
const FINISHED: &str = ".pcapng";

/// The directory, with the evidence files that are in it.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    limit: u64,
    /// Sizes by name, that is by age.
    files: BTreeMap<String, u64>,
}

impl Folder {
    /// Takes the directory, made first if it is missing; what is too much in it is deleted.
    pub(super) fn open(path: &Path, limit: u64) -> anyhow::Result<Self> {
        let shown = path.display();
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(path)
            .with_context(|| format!("{shown} cannot be made"))?;
        let mut folder = Self {
            path: path.to_owned(),
            limit,
            files: BTreeMap::new(),
        };
        // The rights alone do not tell: the file system may be read-only or full.
        let probe = path.join(format!(".probe-{}", std::process::id()));
        write(&probe, b"tuplewatch")
            .and_then(|()| fs::remove_file(&probe))
            .with_context(|| format!("no file can be written to {shown}"))?;
        folder
            .list()
            .and_then(|()| folder.make_room(0))
            .with_context(|| format!("{shown} cannot be kept below its bound"))?;
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Evidence files, and the bytes that they take.
    pub(super) fn usage(&self) -> (u64, u64) {
        (self.files.len() as u64, self.files.values().sum())
    }

    /// Writes a file as a whole, after the oldest ones have made room for it.
    ///
    /// # Errors
    /// It is larger than all files may be, or the system refuses.
    pub(super) fn store(&mut self, name: &str, bytes: &[u8]) -> io::Result<PathBuf> {
        let size = bytes.len() as u64;
        if size > self.limit {
            return Err(io::Error::other(format!(
                "{size} bytes are more than the {} of `recorder.size`",
                self.limit
            )));
        }
        // Somebody may have tidied up meanwhile.
        self.list()?;
        self.make_room(size)?;
        let path = self.path.join(name);
        let unfinished = path.with_extension("pcapng.tmp");
        let written = write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, &path));
        if let Err(error) = written {
            let _ = fs::remove_file(&unfinished);
            return Err(error);
        }
        self.files.insert(name.to_owned(), size);
        Ok(path)
    }

    /// Looks which of our files there are. What an agent before this one has left unfinished is deleted.
    fn list(&mut self) -> io::Result<()> {
        self.files.clear();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if !is_ours(&name) {
                continue;
            }
            if name.ends_with(UNFINISHED) {
                remove(&entry.path())?;
            } else {
                self.files.insert(name, entry.metadata()?.len());
            }
        }
        Ok(())
    }

    /// Deletes the oldest files until `size` more bytes are within the bound.
    fn make_room(&mut self, size: u64) -> io::Result<()> {
        let mut taken = size + self.usage().1;
        while taken > self.limit
            && let Some((name, bytes)) = self.files.pop_first()
        {
            remove(&self.path.join(name))?;
            taken -= bytes;
        }
        Ok(())
    }
}

/// A name that this module has given: nobody else's captures are counted or deleted.
fn is_ours(name: &str) -> bool {
    const TIME: &str = "00000000T000000.000Z-";
    let fits = |(c, like): (u8, u8)| match like {
        b'0' => c.is_ascii_digit(),
        like => c == like,
    };
    (name.ends_with(FINISHED) || name.ends_with(UNFINISHED))
        && name.len() > TIME.len()
        && name.bytes().zip(TIME.bytes()).all(fits)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a file that only its owner can read: it tells who talks to whom.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File = OpenOptions::new()
        .create(true)
        .write(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_data()
}
