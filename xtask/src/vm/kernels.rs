//! The kernels that are booted: which there are, which packages have them, and their unpacked files.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

use super::{folder, suites::Suite};
use crate::{paths::Paths, step};

/// A kernel of the matrix.
#[derive(Debug)]
pub struct Kernel {
    /// What one types, and what it is called in `docs/kernels.md`.
    pub name: &'static str,
    /// Debian's suite, `None` for the machine's own.
    suite: Option<&'static str>,
    /// `cloud-amd64` or `amd64`.
    flavour: &'static str,
    /// How the versions begin; `None`: the newest there is.
    series: Option<&'static str>,
    /// The package that always depends on the newest image; `None`: the images are searched.
    meta: Option<&'static str>,
    /// What is added to its command line.
    pub parameters: &'static str,
}

/// No program may read the kernel's memory (`kernel_lockdown(7)`).
pub const LOCKED: &str = "lockdown=confidentiality";

/// All, oldest first. Versions vanish from the archive as new ones come, so none is named.
pub const ALL: &[Kernel] = &[
    Kernel {
        name: "5.10",
        suite: Some("bullseye"),
        flavour: "cloud-amd64",
        series: Some("5.10."),
        meta: Some("linux-image-cloud-amd64"),
        parameters: "",
    },
    Kernel {
        name: "6.1",
        suite: None,
        flavour: "cloud-amd64",
        series: Some("6.1."),
        meta: Some("linux-image-cloud-amd64"),
        parameters: "",
    },
    Kernel {
        name: "6.1-generic",
        suite: None,
        flavour: "amd64",
        series: Some("6.1."),
        meta: Some("linux-image-amd64"),
        parameters: "",
    },
    Kernel {
        name: "6.12",
        suite: None,
        flavour: "cloud-amd64",
        series: Some("6.12."),
        meta: Some("linux-image-6.12-cloud-amd64"),
        parameters: "",
    },
    Kernel {
        name: "6.12-locked",
        suite: None,
        flavour: "cloud-amd64",
        series: Some("6.12."),
        meta: Some("linux-image-6.12-cloud-amd64"),
        parameters: LOCKED,
    },
    Kernel {
        name: "6.18",
        suite: Some("trixie-backports"),
        flavour: "cloud-amd64",
        series: Some("6.18."),
        meta: None,
        parameters: "",
    },
    Kernel {
        name: "newest",
        suite: Some("trixie-backports"),
        flavour: "cloud-amd64",
        series: None,
        meta: Some("linux-image-cloud-amd64"),
        parameters: "",
    },
];

/// A kernel's files.
pub struct Image {
    /// `6.1.0-57-cloud-amd64`.
    pub release: String,
    /// The kernel as an ELF file.
    pub vmlinux: PathBuf,
    /// Has `lib/modules`.
    root: PathBuf,
}

impl Kernel {
    /// Finds the packages, downloads and unpacks what is not there yet.
    ///
    /// # Errors
    /// If it is not served, or does not unpack.
    pub fn image(&self, paths: &Paths) -> Result<Image> {
        let suite = Suite::open(paths, self.suite)?;
        let image = self.package(&suite)?;
        let release = image
            .strip_prefix("linux-image-")
            .context("not an image")?
            .to_owned();
        let root = folder(paths).join("kernels").join(&release);
        if !root.join("complete").exists() {
            if root.exists() {
                fs::remove_dir_all(&root).with_context(|| root.display().to_string())?;
            }
            fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
            // Since 6.19 the image is a package that only depends on its parts.
            let parts: Vec<String> = suite
                .depends(&image)?
                .into_iter()
                .filter(|name| {
                    let part = name.strip_suffix(&release);
                    matches!(part, Some("linux-binary-" | "linux-modules-"))
                })
                .collect();
            let packages = if parts.is_empty() { vec![image] } else { parts };
            for package in packages {
                let archive = suite.download(paths, &package, &root)?;
                unpack(&archive, &root)?;
                fs::remove_file(&archive).with_context(|| archive.display().to_string())?;
            }
            complete(&root, &release)?;
        }
        Ok(Image {
            release,
            vmlinux: root.join("vmlinux"),
            root,
        })
    }

    /// The package of the newest image.
    fn package(&self, suite: &Suite) -> Result<String> {
        let candidates = match self.meta {
            Some(meta) => suite.depends(meta)?,
            None => {
                let series = self.series.unwrap_or_default().replace('.', "\\.");
                suite.search(&format!("^linux-image-{series}"))?
            }
        };
        newest(&candidates, self.flavour, self.series)
            .map(str::to_owned)
            .with_context(|| {
                format!(
                    "no image of {} among {}",
                    self.name,
                    if candidates.is_empty() {
                        "nothing".to_owned()
                    } else {
                        candidates.join(", ")
                    }
                )
            })
    }
}

/// The image of the highest version, of a flavour and a series.
fn newest<'a>(names: &'a [String], flavour: &str, series: Option<&str>) -> Option<&'a str> {
    let version = |name: &str| -> Option<Vec<u32>> {
        let release = name.strip_prefix("linux-image-")?;
        let version = release.strip_suffix(flavour)?.strip_suffix('-')?;
        if !version.starts_with(series.unwrap_or_default()) || version.ends_with("-cloud") {
            return None;
        }
        let numbers = version.split(|c: char| !c.is_ascii_digit());
        Some(numbers.filter_map(|n| n.parse().ok()).collect())
    };
    names
        .iter()
        .filter_map(|name| Some((version(name)?, name.as_str())))
        .max()
        .map(|(_, name)| name)
}

impl Image {
    /// The modules with what they need, in the order in which they are loaded. Those that this kernel does not have, or has
    /// built in, are left out.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut files: Vec<PathBuf> = Vec::new();
        for name in names {
            let output = Command::new("modprobe")
                .arg("-d")
                .arg(&self.root)
                .args(["-S", &self.release, "--show-depends", name])
                .stderr(Stdio::null())
                .output()
                .context("cannot start modprobe")?;
            let text = String::from_utf8_lossy(&output.stdout);
            for line in text.lines() {
                // Behind the path stand this machine's own parameters, if it has any.
                let mut words = line.split_whitespace();
                if let (Some("insmod"), Some(path)) = (words.next(), words.next()) {
                    let path = PathBuf::from(path);
                    if !files.contains(&path) {
                        files.push(path);
                    }
                }
            }
        }
        ensure!(!files.is_empty(), "{} has no modules", self.release);
        Ok(files)
    }
}

fn unpack(archive: &Path, root: &Path) -> Result<()> {
    let script = "dpkg-deb --fsys-tarfile \"$1\" | tar -x --exclude=./usr/share";
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, "sh"])
        .arg(archive)
        .current_dir(root);
    step::shown(&mut shell).with_context(|| format!("cannot unpack {}", archive.display()))
}

/// Takes the ELF file out of the image and lists the modules' dependencies.
fn complete(root: &Path, release: &str) -> Result<()> {
    let compressed = [
        root.join(format!("boot/vmlinuz-{release}")),
        root.join(format!("usr/lib/modules/{release}/vmlinuz")),
    ]
    .into_iter()
    .find(|path| path.exists())
    .context("the packages have no vmlinuz")?;
    let image = fs::read(&compressed).with_context(|| compressed.display().to_string())?;
    let elf = elf(&image).with_context(|| compressed.display().to_string())?;
    fs::write(root.join("vmlinux"), elf).context("writing vmlinux")?;
    // Newer packages have the modules below usr.
    if !root.join("lib").exists() {
        std::os::unix::fs::symlink("usr/lib", root.join("lib")).context("linking lib")?;
    }
    step::shown(Command::new("depmod").arg("-b").arg(root).arg(release))?;
    fs::write(root.join("complete"), "").context("noting that it is complete")
}

/// The kernel as an ELF file, out of a bzImage: it boots without the decompressor, which takes 3 to 8 s when emulated.
///
/// Offsets are those of Documentation/arch/x86/boot.rst.
fn elf(image: &[u8]) -> Result<Vec<u8>> {
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("too short")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let sectors = match image.get(0x1f1).context("too short")? {
        0 => 4,
        n => usize::from(*n),
    };
    let begin = (sectors + 1) * 512 + word(0x248)?;
    // The last four bytes are the length when unpacked.
    let end = begin + word(0x24c)? - 4;
    let payload = image.get(begin..end).context("its payload lies outside")?;
    let elf = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => filter("zstd", &["-dcq"], payload)?,
        [0x02, 0x21, 0x4c, 0x18, ..] => filter("lz4", &["-dcq"], payload)?,
        [0xfd, b'7', b'z', b'X', b'Z', ..] => filter("xz", &["-dcq", "--single-stream"], payload)?,
        [0x1f, 0x8b, ..] => filter("gzip", &["-dcq"], payload)?,
        _ => bail!("its compression is not known"),
    };
    ensure!(elf.starts_with(b"\x7fELF"), "it holds no ELF file");
    Ok(elf)
}

/// A module's bytes, unpacked.
pub fn module(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => filter("xz", &["-dcq"], &bytes),
        Some("zst") => filter("zstd", &["-dcq"], &bytes),
        Some("gz") => filter("gzip", &["-dcq"], &bytes),
        _ => Ok(bytes),
    }
}

/// What a program makes of its input. Its exit code is not asked: what it unpacks may be followed by something else.
fn filter(program: &str, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
    use std::io::Write as _;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let mut stdin = child.stdin.take().context("just piped")?;
    let output = std::thread::scope(|scope| {
        // It may end before all is written.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output()
    })?;
    ensure!(!output.stdout.is_empty(), "{program} unpacks nothing");
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::newest;

    #[test]
    fn versions_are_compared_as_numbers() {
        let names = [
            "linux-base",
            "linux-image-6.18.9+deb13-cloud-amd64",
            "linux-image-6.18.15+deb13-cloud-amd64",
            "linux-image-6.18.16+deb13-amd64",
            "linux-image-6.18.17+deb13-cloud-amd64-dbg",
            "linux-image-6.19.1+deb13-cloud-amd64",
        ]
        .map(str::to_owned);
        let find = |flavour, series| newest(&names, flavour, series);
        assert_eq!(
            find("cloud-amd64", Some("6.18.")),
            Some("linux-image-6.18.15+deb13-cloud-amd64")
        );
        assert_eq!(
            find("cloud-amd64", None),
            Some("linux-image-6.19.1+deb13-cloud-amd64")
        );
        assert_eq!(find("amd64", None), Some("linux-image-6.18.16+deb13-amd64"));
        assert_eq!(find("amd64", Some("6.1.")), None);
    }
}
