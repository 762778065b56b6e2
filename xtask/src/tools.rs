//! Other people's programs that the end-to-end tests hold the agent against. They are installed for this work tree only.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::{
    packages::{self, Missing},
    paths::{Paths, find_program},
    step::{self, say},
};

/// Debian's Python, whose `venv` the package python3-venv completes.
const PYTHON: &str = "/usr/bin/python3";

/// The programs that come as Python packages.
const FROM_PYPI: [Package; 2] = [
    // The receiver, a native program.
    Package {
        name: "rotel",
        version: "0.0.1a15",
        folder: "rotel",
        program: "rotel-agent",
        variable: "TUPLEWATCH_ROTEL",
        what: "the OTLP receiver",
        has_dependencies: false,
    },
    // Checks manifests against the schemas of many versions, which it carries.
    Package {
        name: "kubernetes-validate",
        version: "1.37.0",
        folder: "bin",
        program: "kubernetes-validate",
        variable: "TUPLEWATCH_KUBERNETES_VALIDATE",
        what: "the check of Kubernetes manifests",
        has_dependencies: true,
    },
];

/// A Python package with a program.
struct Package {
    name: &'static str,
    version: &'static str,
    /// `bin`, or the folder in `site-packages` where the program lies.
    folder: &'static str,
    program: &'static str,
    /// The environment variable by which the tests find it.
    variable: &'static str,
    /// What it is to the tests.
    what: &'static str,
    has_dependencies: bool,
}

/// The variable by which the tests find promtool.
const PROMTOOL: &str = "TUPLEWATCH_PROMTOOL";

/// The variables that tell the tests where the programs are; empty where one is not installed.
pub fn variables(paths: &Paths) -> Vec<(&'static str, PathBuf)> {
    let from_pypi = FROM_PYPI
        .iter()
        .map(|package| (package.variable, package.find(paths)));
    from_pypi
        .chain([(PROMTOOL, promtool(paths))])
        .map(|(variable, path)| (variable, path.unwrap_or_default()))
        .collect()
}

/// What Debian's packages must bring so that [`ensure`] can install the rest.
pub fn missing_packages(paths: &Paths) -> Option<Missing> {
    let wanted = FROM_PYPI
        .iter()
        .any(|package| package.find(paths).is_none());
    (wanted && !python_makes_environments()).then(|| Missing {
        what: format!("venv of {PYTHON}"),
        packages: &["python3", "python3-venv"],
    })
}

/// Installs what is not there.
///
/// # Errors
/// If something cannot be installed: what, and the remedy.
pub fn ensure(paths: &Paths) -> Result<()> {
    for package in &FROM_PYPI {
        package.ensure(paths)?;
    }
    ensure_promtool(paths)
}

/// Whether Debian's Python can make virtual environments with pip in them.
fn python_makes_environments() -> bool {
    Command::new(PYTHON)
        .args(["-c", "import venv, ensurepip"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

impl Package {
    fn environment(&self, paths: &Paths) -> PathBuf {
        paths.tools().join(self.name)
    }

    /// Its program, if this version of it is installed.
    fn find(&self, paths: &Paths) -> Option<PathBuf> {
        let environment = self.environment(paths);
        let info = format!("{}-{}.dist-info", self.name.replace('-', "_"), self.version);
        let libraries = fs::read_dir(environment.join("lib")).ok()?;
        libraries
            .flatten()
            .map(|python| python.path().join("site-packages"))
            .filter(|packages| packages.join(&info).is_dir())
            .map(|packages| match self.folder {
                "bin" => environment.join("bin"),
                folder => packages.join(folder),
            })
            .map(|folder| folder.join(self.program))
            .find(|program| program.is_file())
    }

    fn ensure(&self, paths: &Paths) -> Result<()> {
        let (name, version) = (self.name, self.version);
        if let Some(program) = self.find(paths) {
            say!("setup: {name}: {version} at {}", program.display());
            return Ok(());
        }
        say!(
            "setup: {name}: {version} missing ({} of the end-to-end tests)",
            self.what
        );
        let environment = self.environment(paths);
        step::logged(
            "python3 -m venv",
            &paths.log(&format!("{name}-venv")),
            Command::new(PYTHON)
                .args(["-m", "venv", "--clear"])
                .arg(&environment),
        )?;
        let mut pip = Command::new(environment.join("bin/python"));
        pip.args([
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--only-binary=:all:",
        ]);
        if !self.has_dependencies {
            pip.arg("--no-deps");
        }
        step::logged(
            &format!("pip install {name}=={version}"),
            &paths.log(&format!("{name}-pip")),
            pip.arg(format!("{name}=={version}")),
        )
        .with_context(|| {
            format!(
                "{name} does not install\n  remedy: it needs a network with PyPI, and Python 3.10 or newer on x86-64 or arm64"
            )
        })?;
        match self.find(paths) {
            Some(program) => say!("setup: {name}: {version} at {}", program.display()),
            None => bail!(
                "{name} {version} was installed, but its program is not in {}",
                environment.display()
            ),
        }
        Ok(())
    }
}

/// Prometheus' promtool: the machine's own, else the one that setup has taken out of Debian's package.
fn promtool(paths: &Paths) -> Option<PathBuf> {
    let ours = promtool_folder(paths).join("usr/bin/promtool");
    find_program("promtool").or_else(|| ours.is_file().then_some(ours))
}

fn promtool_folder(paths: &Paths) -> PathBuf {
    paths.tools().join("promtool")
}

/// Takes promtool out of Debian's package, which is not installed: it would start a Prometheus.
fn ensure_promtool(paths: &Paths) -> Result<()> {
    const REMEDY: &str = "promtool, which checks /metrics in the end-to-end tests, is missing\n  remedy: put it into PATH; \
                          Debian 12 has it in the package prometheus, later ones in the package promtool";
    if let Some(program) = promtool(paths) {
        say!("setup: promtool: {}", program.display());
        return Ok(());
    }
    if find_program("apt-get").is_none() || find_program("dpkg-deb").is_none() {
        bail!(REMEDY);
    }
    say!("setup: promtool: missing (the check of /metrics of the end-to-end tests)");
    let package = debian_package(paths).context(REMEDY)?;
    let folder = promtool_folder(paths);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    step::logged(
        &format!("apt-get download {package}"),
        &paths.log("promtool-download"),
        packages::apt()
            .args(["download", package])
            .current_dir(&folder),
    )
    .context(REMEDY)?;
    let archive = downloaded(&folder, package).context(REMEDY)?;
    // Of some 90 MB in Debian 12's package this is half.
    step::logged(
        "taking promtool out of it",
        &paths.log("promtool-extract"),
        Command::new("sh")
            .args([
                "-c",
                "dpkg-deb --fsys-tarfile \"$1\" | tar -xf - ./usr/bin/promtool",
                "sh",
            ])
            .arg(&archive)
            .current_dir(&folder),
    )
    .context(REMEDY)?;
    fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))?;
    match promtool(paths) {
        Some(program) => say!("setup: promtool: {}", program.display()),
        None => bail!("Debian's package {package} has no usr/bin/promtool"),
    }
    Ok(())
}

/// The package that has promtool here.
fn debian_package(paths: &Paths) -> Option<&'static str> {
    let known = || {
        ["promtool", "prometheus"].into_iter().find(|package| {
            let mut cache = Command::new("apt-cache");
            step::clean(&mut cache);
            let output = cache.args(["--quiet", "policy", package]).output();
            output.is_ok_and(|output| {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                text.contains("Candidate: ") && !text.contains("Candidate: (none)")
            })
        })
    };
    known().or_else(|| {
        // A machine that has never looked. What counts is whether the package is known then.
        let update = step::logged(
            "apt-get update",
            &paths.log("apt-update"),
            packages::apt().arg("update"),
        );
        if let Err(error) = update {
            say!("  note: {error}");
        }
        known()
    })
}

/// The file that `apt-get download` left.
fn downloaded(folder: &Path, package: &str) -> Option<PathBuf> {
    let prefix = format!("{package}_");
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|file| file.path())
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(&prefix) && name.ends_with(".deb")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_download_is_told_from_other_files() {
        let folder = std::env::temp_dir().join(format!("xtask-promtool-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        assert_eq!(downloaded(&folder, "prometheus"), None);
        for name in [
            "prometheus-node-exporter_1_amd64.deb",
            "prometheus_2.42.0_amd64.deb",
            "prometheus_2.txt",
        ] {
            fs::write(folder.join(name), "").unwrap();
        }
        let found = downloaded(&folder, "prometheus");
        assert_eq!(found, Some(folder.join("prometheus_2.42.0_amd64.deb")));
        fs::remove_dir_all(&folder).unwrap();
    }
}
