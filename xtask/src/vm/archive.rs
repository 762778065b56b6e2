//! A cpio archive as the kernel unpacks it at boot (format `newc`, Documentation/driver-api/early-userspace).

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const CHARACTERS: u32 = 0o020_600;

/// An archive in the making.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    names: BTreeSet<PathBuf>,
}

impl Archive {
    /// Adds a directory and those above it.
    pub fn directory(&mut self, path: &Path) {
        let mut parent = PathBuf::new();
        for part in path.components() {
            if let Component::Normal(name) = part {
                parent.push(name);
                if self.names.insert(parent.clone()) {
                    self.entry(&parent.clone(), DIRECTORY, (0, 0), &[]);
                }
            }
        }
    }

    /// Adds a file, unless there is one.
    pub fn bytes(&mut self, path: &str, mode: u32, bytes: &[u8]) {
        let path = Path::new(path.trim_start_matches('/'));
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        if self.names.insert(path.to_owned()) {
            self.entry(path, FILE | mode, (0, 0), bytes);
        }
    }

    /// Adds a copy of a file of this machine.
    pub fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        let bytes = fs::read(from).with_context(|| from.display().to_string())?;
        let mode = fs::metadata(from)
            .with_context(|| from.display().to_string())?
            .permissions()
            .mode();
        self.bytes(to, mode & 0o777, &bytes);
        Ok(())
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, number: (u32, u32)) {
        let path = Path::new(path.trim_start_matches('/'));
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        self.entry(path, CHARACTERS, number, &[]);
    }

    /// The archive with its end. Several of them may stand in one file.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(Path::new("TRAILER!!!"), 0, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn entry(&mut self, path: &Path, mode: u32, device: (u32, u32), content: &[u8]) {
        let name = path.as_os_str().as_encoded_bytes();
        let number = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_length = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        let fields = [
            number,
            mode,
            0,
            0,
            1,
            0,
            length,
            0,
            0,
            device.0,
            device.1,
            name_length,
            0,
        ];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend(name);
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_first_and_once() {
        let mut archive = Archive::default();
        archive.bytes("/a/b/one", 0o644, b"1");
        archive.bytes("/a/b/two", 0o755, b"22");
        archive.device("/dev/console", (5, 1));
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);
        let text = String::from_utf8_lossy(&bytes);
        let at = |name: &str| text.find(&format!("{name}\0")).unwrap();
        assert!(at("a") < at("a/b") && at("a/b") < at("a/b/one") && at("a/b/one") < at("a/b/two"));
        // a, a/b, one, two, dev, console, the end
        assert_eq!(text.matches("070701").count(), 7);
        assert!(text.contains("0000000500000001"));
    }
}
