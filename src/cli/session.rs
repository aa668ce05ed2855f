//! Owns what every command starts with: the paths of the command line, the manifest, and the target.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Outcome;
use super::arguments::{self, Checks, Global};
use super::builtin;
use super::init::{self, Found, Written};
use super::places;
use super::terminal::{self, Terminal};
use crate::address::RemotePlace;
use crate::cache::{Cache, Note, Places};
use crate::error::Fault;
use crate::files;
use crate::manifest::{Manifest, ManifestError};
use crate::model::source::{self, Event, Resolved, Source};
use crate::pipeline::{self, Checking, Exported, Given, Ready, Tokens, Workspace};
use crate::report::Report;
use crate::target::{Target, TargetRecord};
use crate::text::{Style, nearest, one_of};

pub struct Session {
    pub terminal: Terminal,
    pub places: Places,
    /// File of the trials.
    pub trials: PathBuf,
    /// `--verbose` and `--quiet`.
    verbose: bool,
    quiet: bool,
    /// Whether a failure of the shared cache was told.
    told_of_share: Arc<AtomicBool>,
    /// The remote cache of the manifest that was read last.
    remote: RefCell<Option<RemotePlace>>,
}

/// What a command prints while it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Talk {
    /// Stages that do work; with `--verbose` all stages, with `--quiet` none.
    Work,
    Nothing,
}

impl Session {
    /// Errors are printed as JSON if the results are (`json`).
    pub fn new(global: Global, json: bool) -> Session {
        let Global { cache, trials, verbose, quiet, jobs: _, color } = global;
        let mut places = Places::from_environment(&places::cache_root());
        places.root = cache.unwrap_or(places.root);
        let trials = trials.unwrap_or_else(places::trials_file);
        Session {
            terminal: Terminal::new(color, json),
            places,
            trials,
            verbose,
            quiet,
            told_of_share: Arc::default(),
            remote: RefCell::default(),
        }
    }

    /// Opens the cache and the rest of what a build works with.
    pub fn workspace(&self, talk: Talk) -> Result<Workspace, Fault> {
        Ok(Workspace { cache: self.open_cache()?, report: self.report(talk), trials: self.trials.clone() })
    }

    /// Whether only results and errors are printed.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Whether more than usual is printed.
    pub fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Says how a command went, unless `--quiet` is given.
    pub fn tell(&self, text: &str) {
        if !self.quiet {
            self.terminal.say(text);
        }
    }

    fn report(&self, talk: Talk) -> Report {
        report_of(self.talks(talk))
    }

    fn talks(&self, talk: Talk) -> Talks {
        match talk {
            Talk::Work if self.quiet => Talks::Nothing,
            Talk::Work if self.verbose => Talks::All,
            Talk::Work => Talks::Work,
            Talk::Nothing => Talks::Nothing,
        }
    }

    /// As [`read_given`].
    pub fn given(&self, path: &Path, target: Option<&str>) -> Result<Given, Fault> {
        let given = read_given(path, target, &self.places.root, self.terminal.style)?;
        self.remote.replace(given.manifest.remote.clone());
        Ok(given)
    }

    /// Builds a model up to the proof. An export is taken as it is: no cache is opened, unless one of its kernels has to be checked here.
    pub fn ready(&self, given: &Given, target: &Target, talk: Talk, checks: &Checks) -> Result<Ready, Fault> {
        let ready = match &given.exported {
            Some(exported) => {
                let (places, trials, talks) = (self.places_of_manifest(), self.trials.clone(), self.talks(talk));
                let told = Arc::clone(&self.told_of_share);
                let open = move || {
                    Ok(Workspace {
                        cache: open_cache(&places, &told)?,
                        report: report_of(talks),
                        trials: trials.clone(),
                    })
                };
                Ready::exported(self.report(talk), exported.clone(), target)?.checks_in(Box::new(open))
            }
            None => Ready::built(self.workspace(talk)?, &given.manifest, target)?,
        };
        Ok(ready.checking(Checking::of(checks.unchecked)))
    }

    pub fn open_cache(&self) -> Result<Cache, Fault> {
        open_cache(&self.places_of_manifest(), &self.told_of_share)
    }

    /// The places of the command line and the environment, with the remote cache of the manifest that was read last.
    fn places_of_manifest(&self) -> Places {
        self.places.clone().with_remote_of(self.remote.borrow().as_ref())
    }

    /// As [`resolved_manifest`].
    pub fn manifest<'a>(&self, path: &Path, targets: impl IntoIterator<Item = &'a str>) -> Result<Manifest, Fault> {
        let targets: Vec<&str> = targets.into_iter().collect();
        let manifest = resolved_manifest(path, &targets, &self.places.root, self.terminal.style)?;
        self.remote.replace(manifest.remote.clone());
        Ok(manifest)
    }
}

/// What a report prints.
#[derive(Debug, Clone, Copy)]
enum Talks {
    Nothing,
    Work,
    All,
}

fn report_of(talks: Talks) -> Report {
    match talks {
        Talks::Nothing => Report::quiet(),
        Talks::Work => Report::to_stderr().without_cached(),
        Talks::All => Report::to_stderr(),
    }
}

fn open_cache(places: &Places, told_of_share: &Arc<AtomicBool>) -> Result<Cache, Fault> {
    // Notes come from threads that have no report. They tell of damage and waiting, so `--quiet` does not hide them. A share that
    // cannot be used fails for every entry, and is told once.
    let told = Arc::clone(told_of_share);
    Ok(Cache::open_places(places, move |note| {
        let again = matches!(note, Note::Shared { .. }) && told.swap(true, Ordering::Relaxed);
        if !again {
            terminal::say(&format!("  note {note}"), Style::Plain);
        }
    })?)
}

/// Reads the source of a model: the folder of an export, or what [`resolved_manifest`] takes.
pub fn read_given(path: &Path, target: Option<&str>, root: &Path, style: Style) -> Result<Given, Fault> {
    let path = init::without_scheme(path);
    match Exported::is_at(path) {
        true => Ok(Given::exported(Exported::open(path)?)),
        false => Ok(Given::built(resolved_manifest(path, target.as_slice(), root, style)?)),
    }
}

/// Reads a manifest, the built-in one of that name, or the one that `init` would write for a model that is named in its place: for
/// `targets`, else for this machine. Finds the files of the manifest on this machine first: nothing is created for a manifest
/// that cannot be built. A built-in model is written below `root`, the folder of the cache.
fn resolved_manifest(path: &Path, targets: &[&str], root: &Path, style: Style) -> Result<Manifest, Fault> {
    let styled = |error: ManifestError| error.into_fault(style);
    let path = init::without_scheme(path);
    let mut manifest = match builtin::manifest(path) {
        Some(text) if !path.exists() => Manifest::parse(&text, &path.with_extension("toml")).map_err(styled)?,
        _ if is_model(path) => unwritten(path, targets, style)?,
        _ => read_manifest(path)?.map_err(styled)?,
    };
    if let Some(name) = manifest.source.strip_prefix(builtin::SCHEME) {
        let folder = builtin::checkpoint(name, root)?;
        // A source is text, and the path of the current folder may be none.
        let absolute = std::path::absolute(&folder).ok().filter(|folder| folder.to_str().is_some());
        manifest.source = format!("path:{}", absolute.unwrap_or(folder).display());
    }
    for scheme in ["path:", "synthetic:"] {
        if let Some(named) = manifest.source.strip_prefix(scheme) {
            let found = files::find(named, &manifest.base_dir)?;
            if let Some(gguf) = init::gguf(&found) {
                init::is_named_gguf(&gguf)?;
            }
        }
    }
    Ok(manifest)
}

/// Whether a path names a model in place of a manifest: one of the hub, the folder of a checkpoint, or a GGUF file.
fn is_model(path: &Path) -> bool {
    let is_checkpoint = path.join("config.json").is_file() && !path.join("monobloc.toml").exists();
    (path.to_str().is_some_and(|text| text.starts_with(init::HUB)) && !path.exists())
        || (is_checkpoint && !Exported::is_at(path))
        || init::gguf(path).is_some()
}

/// The manifest that `init` would write for a model. Its place, which names the model for `explain` and `clean`, is that of the
/// checkpoint, whatever the current folder is.
fn unwritten(path: &Path, targets: &[&str], style: Style) -> Result<Manifest, Fault> {
    let Some(source) = path.to_str() else {
        return Err(Fault::input(format!("the path `{}` is not UTF-8 text", path.display())).with_remedy("rename it"));
    };
    for name in targets {
        if Target::builtin(name).is_none() {
            let record = TargetRecord::load(name, Path::new(".")).map_err(|error| error.into_fault(style))?.target.name;
            return Err(Fault::input(format!("`{source}` has no manifest that names the record of `{record}`"))
                .with_remedy(format!("`monobloc init {source} --target {name}` writes one")));
        }
    }
    let found = Found::of(source, Written::Nowhere)?;
    let targets = match targets {
        [] => vec![init::target_here()],
        named => named.iter().map(|name| name.to_string()).collect(),
    };
    let named = found.source.trim_end_matches('/').split_once(':').map_or("", |(_, named)| named);
    let (folder, name) = named.rsplit_once('/').unwrap_or(("", named));
    let text = init::text(&found, Some(&init::file_name(name)), &targets);
    let folder =
        if found.source.starts_with(init::HUB) { format!("{}{folder}", init::HUB) } else { format!("{folder}/") };
    Manifest::parse(&text, &Path::new(&folder).join("monobloc.toml")).map_err(|error| error.into_fault(style))
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
        return Err(Fault::input(format!("`{shown}` is a folder, expected a manifest or a checkpoint")).with_remedy(
            match inside.exists() {
                true => format!("did you mean `{}`?", inside.display()),
                false => "a checkpoint has a config.json and safetensors weights".to_string(),
            },
        ));
    }
    if !path.exists() {
        let text = path.display().to_string();
        let named =
            Source::parse(&format!("{}{text}", init::HUB), "main", 0).is_ok().then(|| format!("{}{text}", init::HUB));
        let suffix = path.extension().and_then(|suffix| suffix.to_str()).unwrap_or_default().to_lowercase();
        if suffix == "gguf" {
            return Err(Fault::input(format!("no such file: `{shown}`"))
                .with_remedy("name a `.gguf` file that is there, or one of the hub: `hf:OWNER/NAME:FILE`"));
        }
        let remedy = match source::hub_page(&text).or(named.filter(|_| suffix != "toml")) {
            Some(meant) => format!("a model of the hub is named as `{meant}`"),
            None => format!(
                "`monobloc init` writes one; `hf:OWNER/NAME`, a `.gguf` file, the folder of a checkpoint and {}, which is built in, need none",
                one_of(builtin::NAMES)
            ),
        };
        return Err(Fault::input(format!("no such manifest: `{shown}`")).with_remedy(remedy));
    }
    if path.extension().is_some_and(|suffix| suffix == "json") {
        return Err(Fault::input(format!("`{shown}` is a config, expected a manifest")).with_remedy(format!(
            "name its folder, which has the weights; `monobloc init {shown}` writes a manifest with random weights"
        )));
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

/// The target called `name`. Without a name, the manifest's first target that this machine can run, else its first.
pub fn choose_target(manifest: &Manifest, name: Option<&str>) -> Result<Target, Fault> {
    let here = || manifest.targets.iter().find(|target| pipeline::runs_here(target)).cloned();
    match name {
        None => here().map_or_else(|| pick_target(manifest, None), Ok),
        Some(_) => pick_target(manifest, name),
    }
}

/// The program that runs, to be started here once more. On Linux that is the file that it was started from, even if another one has its name by now: a server outlives
/// an update.
///
/// # Errors
/// The system does not say.
fn running_program() -> Result<PathBuf, Fault> {
    let itself = Path::new("/proc/self/exe");
    if cfg!(target_os = "linux") && itself.exists() { Ok(itself.to_path_buf()) } else { program_path() }
}

/// The path of the program that runs, for other machines, too.
///
/// # Errors
/// As [`running_program`].
pub fn program_path() -> Result<PathBuf, Fault> {
    std::env::current_exe()
        .map_err(|error| Fault::environment(format!("the path of the running program is not known: {error}")))
}

/// The tokenizer of a manifest, in a process of its own, because files of a checkpoint are not trusted.
pub fn tokenizer(manifest: &Manifest) -> Result<Tokens, Fault> {
    let program = running_program()?;
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
