//! Debian's packages of other suites than this machine's, without touching its apt configuration.
//!
//! Where the archive is comes from apt's own sources at run time; each suite has a private configuration below
//! `target/vm/apt`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{packages, paths::Paths, step};

/// How old a list of packages may be before it is fetched again.
const FRESH: Duration = Duration::from_secs(20 * 3600);
/// Debian's key ring.
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Whose lists of packages are asked.
pub struct Suite {
    name: String,
    /// The private configuration; `None`: the machine's own.
    config: Option<PathBuf>,
}

impl Suite {
    /// Opens a suite of Debian, or with `None` the machine's own sources.
    ///
    /// # Errors
    /// If there is no apt, or it does not serve the suite.
    pub fn open(paths: &Paths, name: Option<&str>) -> Result<Self> {
        let Some(name) = name else {
            return Ok(Self {
                name: "apt's own sources".to_owned(),
                config: None,
            });
        };
        let folder = super::folder(paths).join("apt").join(name);
        let config = folder.join("apt.conf");
        let suite = Self {
            name: name.to_owned(),
            config: Some(config.clone()),
        };
        let fetched = fs::metadata(folder.join("fetched")).and_then(|file| file.modified());
        if fetched.is_ok_and(|at| at.elapsed().is_ok_and(|age| age < FRESH)) {
            return Ok(suite);
        }
        configure(&folder, &config, name)?;
        step::logged(
            &format!("apt-get update for {name}"),
            &paths.log(&format!("vm-{name}")),
            suite.apt_get().args(["update", "--error-on=any"]),
        )?;
        fs::write(folder.join("fetched"), "").context("noting the time")?;
        Ok(suite)
    }

    /// What a package depends on, alternatives and virtual packages left out.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let text = self.cache(&["depends", "--important", package])?;
        let names = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .filter(|name| !name.starts_with('<'));
        Ok(names.map(str::to_owned).collect())
    }

    /// Names of packages that match a regular expression.
    pub fn search(&self, pattern: &str) -> Result<Vec<String>> {
        let text = self.cache(&["search", "--names-only", pattern])?;
        let names = text.lines().filter_map(|line| line.split(' ').next());
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads a package into `folder` and returns the file.
    pub fn download(&self, paths: &Paths, package: &str, folder: &Path) -> Result<PathBuf> {
        step::logged(
            &format!("apt-get download {package}"),
            &paths.log(&format!("vm-{package}")),
            self.apt_get()
                .args(["download", package])
                .current_dir(folder),
        )?;
        let prefix = format!("{package}_");
        let files = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        files
            .flatten()
            .map(|file| file.path())
            .find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(&prefix) && name.ends_with(".deb")
            })
            .with_context(|| format!("apt-get download left no {prefix}*.deb"))
    }

    fn cache(&self, arguments: &[&str]) -> Result<String> {
        let mut cache = Command::new("apt-cache");
        step::clean(&mut cache);
        if let Some(config) = &self.config {
            cache.env("APT_CONFIG", config);
        }
        let output = cache
            .args(arguments)
            .output()
            .context("cannot start apt-cache")?;
        if !output.status.success() {
            bail!(
                "{} has no such package (apt-cache {})",
                self.name,
                arguments.join(" ")
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn apt_get(&self) -> Command {
        let mut apt = packages::apt();
        // The files lie where the user that apt changes to may not write.
        apt.args(["-o", "APT::Sandbox::User=root"]);
        if let Some(config) = &self.config {
            apt.env("APT_CONFIG", config);
        }
        apt
    }
}

/// Writes a private configuration with one suite in it.
fn configure(folder: &Path, config: &Path, suite: &str) -> Result<()> {
    for part in ["state/lists/partial", "cache/archives/partial"] {
        let path = folder.join(part);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    }
    let at = folder.display();
    let archive = archive()?;
    let keys = if Path::new(KEYS).exists() {
        format!("[signed-by={KEYS}] ")
    } else {
        String::new()
    };
    let files = [
        (
            folder.join("sources.list"),
            format!("deb {keys}{archive} {suite} main\n"),
        ),
        (folder.join("status"), String::new()),
        (
            config.to_owned(),
            format!(
                "Dir::Etc::sourcelist \"{at}/sources.list\";\nDir::Etc::sourceparts \"/dev/null\";\n\
                 Dir::State \"{at}/state\";\nDir::State::status \"{at}/status\";\nDir::Cache \"{at}/cache\";\n"
            ),
        ),
    ];
    for (path, text) in files {
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Where this machine's apt gets its own release of Debian from.
fn archive() -> Result<String> {
    let mut apt = packages::apt();
    let output = apt
        .args(["indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
        .args(["Created-By: Packages", "Origin: Debian"])
        .output()
        .context("cannot start apt-get")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    own_archive(&text, &release()?)
        .map(str::to_owned)
        .context("apt's sources do not name Debian's archive (or `apt-get update` has never run)")
}

/// The address of the line of a release.
fn own_archive<'a>(targets: &'a str, release: &str) -> Option<&'a str> {
    targets
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find_map(|(name, address)| (name == release).then_some(address))
}

/// The code name of this machine's release.
fn release() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .context("/etc/os-release names no VERSION_CODENAME")?;
    Ok(name.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::own_archive;

    #[test]
    fn the_archive_is_that_of_the_release_itself() {
        let targets = "one-security file:/security\none-updates file:/a\none file:/main\n";
        assert_eq!(own_archive(targets, "one"), Some("file:/main"));
        assert_eq!(own_archive(targets, "two"), None);
    }
}
