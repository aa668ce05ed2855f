//! Owns what every command starts with: the paths of the command line, the manifest, and the target.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Outcome;
use super::arguments::{self, Global};
use super::builtin;
use super::places;
use super::terminal::{self, Terminal};
use crate::cache::{Cache, Places};
use crate::error::Fault;
use crate::files;
use crate::manifest::{Manifest, ManifestError};
use crate::model::source::{self, Event, Resolved, Source};
use crate::pipeline::{self, Exported, Given, Ready, Tokens, Workspace};
use crate::report::Report;
use crate::target::Target;
use crate::text::{Style, nearest, one_of};

pub struct Session {
    pub terminal: Terminal,
    pub places: Places,
    /// File of the trials.
    pub trials: PathBuf,
    /// `--verbose` and `--quiet`.
    verbose: bool,
    quiet: bool,
}

/// What a command prints while it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Talk {
    /// Stages that do work; with `--verbose` all stages, with `--quiet` none.
    Work,
    Nothing,
}

impl Session {
    pub fn new(global: Global) -> Session {
        let Global { cache, trials, verbose, quiet, jobs: _, color } = global;
        let mut places = Places::from_environment(&places::cache_root());
        places.root = cache.unwrap_or(places.root);
        let trials = trials.unwrap_or_else(places::trials_file);
        Session { terminal: Terminal::new(color), places, trials, verbose, quiet }
    }

    /// Opens the cache and the rest of what a build works with.
    pub fn workspace(&self, talk: Talk) -> Result<Workspace, Fault> {
        Ok(Workspace { cache: self.open_cache()?, report: self.report(talk), trials: self.trials.clone() })
    }

    /// Says how a command went, unless `--quiet` is given.
    pub fn tell(&self, text: &str) {
        if !self.quiet {
            self.terminal.say(text);
        }
    }

    fn report(&self, talk: Talk) -> Report {
        match talk {
            Talk::Work if self.quiet => Report::quiet(),
            Talk::Work if self.verbose => Report::to_stderr(),
            Talk::Work => Report::to_stderr().without_cached(),
            Talk::Nothing => Report::quiet(),
        }
    }

    /// As [`read_given`].
    pub fn given(&self, path: &Path) -> Result<Given, Fault> {
        read_given(path, &self.places.root, self.terminal.style)
    }

    /// Builds a model up to the proof. An export is taken as it is: no cache is opened.
    pub fn ready(&self, given: &Given, target: &Target, talk: Talk) -> Result<Ready, Fault> {
        match &given.exported {
            Some(exported) => Ready::exported(self.report(talk), exported.clone(), target),
            None => Ready::built(self.workspace(talk)?, &given.manifest, target),
        }
    }

    pub fn open_cache(&self) -> Result<Cache, Fault> {
        // Notes come from threads that have no report. They tell of damage and waiting, so `--quiet` does not hide them.
        Ok(Cache::open_places(&self.places, |note| terminal::say(&format!("  note {note}"), Style::Plain))?)
    }

    /// Reads a manifest, or the built-in one of that name.
    pub fn manifest(&self, path: &Path) -> Result<Manifest, Fault> {
        resolved_manifest(path, &self.places.root, self.terminal.style)
    }
}

/// Reads the source of a model: the folder of an export, or what [`resolved_manifest`] takes.
pub fn read_given(path: &Path, root: &Path, style: Style) -> Result<Given, Fault> {
    match Exported::is_at(path) {
        true => Ok(Given::exported(Exported::open(path)?)),
        false => Ok(Given::built(resolved_manifest(path, root, style)?)),
    }
}

/// Reads a manifest, or the built-in one of that name, and finds its files on this machine first: nothing is created for a
/// manifest that cannot be built. A built-in model is written below `root`, the folder of the cache.
fn resolved_manifest(path: &Path, root: &Path, style: Style) -> Result<Manifest, Fault> {
    let styled = |error: ManifestError| error.into_fault(style);
    let mut manifest = match builtin::manifest(path) {
        Some(text) if !path.exists() => Manifest::parse(&text, &path.with_extension("toml")).map_err(styled)?,
        _ => read_manifest(path)?.map_err(styled)?,
    };
    if let Some(name) = manifest.source.strip_prefix(builtin::SCHEME) {
        let folder = builtin::checkpoint(name, root)?;
        let folder = std::path::absolute(&folder).unwrap_or(folder);
        manifest.source = format!("path:{}", folder.display());
    }
    for scheme in ["path:", "synthetic:"] {
        if let Some(named) = manifest.source.strip_prefix(scheme) {
            files::find(named, &manifest.base_dir)?;
        }
    }
    Ok(manifest)
}

/// Reads a manifest file. The error for a missing path or a folder has a remedy.
fn read_manifest(path: &Path) -> Result<Result<Manifest, ManifestError>, Fault> {
    let shown = path.display();
    if path.is_dir() {
        if Exported::is_at(path) {
            return Err(Fault::input(format!("`{shown}` is an export, which this command cannot use")).with_remedy(
                "name the manifest; `generate`, `chat`, `serve`, `perplexity` and `logits` take an export",
            ));
        }
        let inside = path.join("monobloc.toml");
        return Err(Fault::input(format!("`{shown}` is a folder, expected a manifest")).with_remedy(
            match inside.exists() {
                true => format!("did you mean `{}`?", inside.display()),
                false => format!("`monobloc init {shown}` writes a manifest for a checkpoint there"),
            },
        ));
    }
    if !path.exists() {
        return Err(Fault::input(format!("no such manifest: `{shown}`"))
            .with_remedy(format!("`monobloc init` writes one; {} is built in", one_of(builtin::NAMES))));
    }
    Ok(Manifest::load(path))
}

/// The manifest's target called `name`; without a name, its first target.
pub fn pick_target(manifest: &Manifest, name: Option<&str>) -> Result<Target, Fault> {
    let names = || manifest.targets.iter().map(|target| target.name.as_str());
    let Some(name) = name else {
        return manifest.targets.first().cloned().ok_or_else(|| Fault::internal("a manifest without targets"));
    };
    manifest.targets.iter().find(|target| target.name == name).cloned().ok_or_else(|| {
        let expected = one_of(names());
        let fault = Fault::input(format!("manifest `{}` has no target `{name}`: expected {expected}", manifest.name));
        match (nearest(name, names()), Target::builtin(name)) {
            (Some(meant), None) => fault.with_remedy(format!("did you mean `{meant}`?")),
            (_, Some(_)) => fault.with_remedy(format!("add a `[[target]]` with `record = \"{name}\"` to the manifest")),
            (None, None) => fault,
        }
    })
}

/// The tokenizer of a manifest, in a process of its own, because files of a checkpoint are not trusted.
pub fn tokenizer(manifest: &Manifest) -> Result<Tokens, Fault> {
    let program = std::env::current_exe()
        .map_err(|error| Fault::environment(format!("the path of the running program is not known: {error}")))?;
    let command = move || {
        let mut command = Command::new(&program);
        command.arg("tokens");
        command
    };
    tokenizer_of(command, manifest)
}

/// As [`tokenizer`], served by `program`, which gets the tokenizer's folder as its last argument.
pub fn tokenizer_of(program: impl Fn() -> Command + 'static, manifest: &Manifest) -> Result<Tokens, Fault> {
    Tokens::load(program, &tokenizer_dir(manifest)?)
}

/// As [`tokenizer`], for commands without `--ids`: the remedies of its faults do not name that option.
pub fn text_tokenizer(manifest: &Manifest) -> Result<Tokens, Fault> {
    tokenizer(manifest).map_err(|fault| match &fault.remedy {
        Some(remedy) if remedy.contains("`--ids`") => {
            fault.with_remedy("use a checkpoint with a tokenizer of its own; `monobloc generate --ids` needs none")
        }
        _ => fault,
    })
}

/// Serves a tokenizer on stdin and stdout: the child process that [`tokenizer`] starts.
pub(super) fn serve_tokens(asked: &arguments::Tokens) -> Result<Outcome, Fault> {
    pipeline::serve_tokens(&asked.dir, std::io::stdin().lines(), std::io::stdout().lock())?;
    Ok(Outcome::Done)
}

/// Whether text can be turned into token ids: a model with synthetic weights has no tokenizer.
///
/// # Errors
/// A source that cannot be read.
pub fn has_tokenizer(given: &Given) -> Result<bool, Fault> {
    if let Some(exported) = &given.exported {
        return Ok(exported.has_tokenizer());
    }
    let Manifest { source, revision, seed, .. } = &given.manifest;
    Ok(!matches!(Source::parse(source, revision, *seed)?, Source::Synthetic { .. }))
}

/// The folder that a manifest's tokenizer is in.
fn tokenizer_dir(manifest: &Manifest) -> Result<PathBuf, Fault> {
    let source = Source::parse(&manifest.source, &manifest.revision, manifest.seed)?;
    let mut unheard = |_: Event| {};
    match source::resolve(&source, &manifest.base_dir, &mut unheard)? {
        Resolved::Checkpoint { dir, .. } => Ok(dir),
        Resolved::Synthetic { .. } => Err(Fault::input(format!(
            "`{}` has synthetic weights and no tokenizer, so text cannot be turned into token ids",
            manifest.source
        ))
        .with_remedy("pass token ids with `--ids`")),
    }
}
