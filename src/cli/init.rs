//! Owns `init` and the text of a first manifest, which commands also take for a model that is named in place of a manifest.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Outcome;
use super::arguments::Init;
use super::builtin;
use super::session::Session;
use crate::cuda::driver::Device;
use crate::error::{Fault, Tier};
use crate::fields::is_file_name;
use crate::files::{self, folder_of, read_text};
use crate::gguf;
use crate::manifest::Manifest;
use crate::model::config;
use crate::model::source::{self, Event, HubSettings, Outline, Source};
use crate::target::{Target, TargetRecord};
use crate::text::nearest;

/// The scheme of a model of the hub.
pub const HUB: &str = "hf:";
/// Largest config that is read; the same bound as for one in a checkpoint.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// `context_max` of a new manifest, unless the model has fewer positions.
const CONTEXT: u32 = 2048;

pub fn init(session: &Session, asked: &Init) -> Result<Outcome, Fault> {
    let Init { source, out, target, force, json } = asked;
    let mut targets = if target.is_empty() { vec![target_here()] } else { target.clone() };
    let mut seen = BTreeSet::new();
    targets.retain(|name| seen.insert(name.clone()));
    // Faults of names are told here: the manifest that they would be pointed out in is not written.
    for name in &targets {
        TargetRecord::load(name, &folder_of(out)).map_err(|error| error.into_fault(session.terminal.style))?;
    }
    if out.exists() && !force {
        return Err(Fault::input(format!("`{}` is already there", out.display()))
            .with_remedy("name another file with `--out`, or replace it with `--force`"));
    }
    let found = Found::of(source.as_deref().unwrap_or(builtin::NAMES[0]), Written::At(out))?;
    let stem = out.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let name = (!is_file_name(&stem)).then(|| file_name(&stem));
    let text = text(&found, name.as_deref(), &targets);
    Manifest::parse(&text, out).map_err(|error| error.into_fault(session.terminal.style))?;
    fs::write(out, text).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    if let Some(note) = &found.note {
        session.terminal.say(&format!("warning: {note}"));
    }
    if *json {
        let context_max = found.context_max;
        session.terminal.print_json(&json!({
            "manifest": out, "source": found.source, "targets": targets, "context_max": context_max,
        }))?;
        return Ok(Outcome::Done);
    }
    let (shown, targets) = (quoted(out), targets.join(", "));
    session.terminal.say(&format!("wrote `{}`: {} for {targets}", out.display(), found.source));
    session.terminal.say(&match found.has_text {
        true => format!("next: monobloc generate {shown} --prompt \"Once upon a time\""),
        false => format!("next: monobloc build {shown}"),
    });
    Ok(Outcome::Done)
}

/// A path as a shell reads it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    match text.chars().all(|c| c.is_alphanumeric() || "._-/~+,@".contains(c)) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// A name that [`is_file_name`] accepts, from any text.
pub fn file_name(text: &str) -> String {
    let legal = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = text.chars().map(legal).collect();
    let name: String = name.trim_matches(['.', '-']).chars().take(100).collect();
    if is_file_name(&name) { name } else { "model".to_string() }
}

/// Where the manifest will be.
#[derive(Debug, Clone, Copy)]
pub enum Written<'a> {
    At(&'a Path),
    /// Nowhere: a command takes the model in place of a manifest.
    Nowhere,
}

/// What a new manifest says about a model.
#[derive(Debug)]
pub struct Found {
    pub source: String,
    dtype: &'static str,
    context_max: u32,
    /// Whether there is a tokenizer.
    has_text: bool,
    /// What was not looked at, and why.
    note: Option<String>,
}

impl Found {
    /// Looks at the model that `source` names: `hf:OWNER/NAME`, a folder, a config.json, or a built-in model.
    ///
    /// # Errors
    /// A name of nothing; every reason why a model is refused. A hub that cannot be asked is an error only where nothing is written.
    pub fn of(source: &str, written: Written<'_>) -> Result<Found, Fault> {
        if let Some(name) = built_in(source) {
            let source = format!("{}{name}", builtin::SCHEME);
            return Ok(Found { source, dtype: "fp32", context_max: CONTEXT, has_text: true, note: None });
        }
        if source.starts_with(HUB) {
            return Found::of_hub(source, written);
        }
        let place = without_scheme(Path::new(source));
        let gguf = gguf(place);
        if let Some(gguf) = &gguf {
            is_named_gguf(gguf)?;
        }
        let (imported, scheme) = if place.is_dir() || gguf.is_some() {
            (config::import(place)?, "path:")
        } else if place.is_file() {
            (config::import_config_only(&config_text(place)?, 0)?, "synthetic:")
        } else {
            return Err(nothing(source));
        };
        Ok(Found {
            source: format!("{scheme}{}", from_manifest(place, written)?.display()),
            dtype: "bf16",
            context_max: imported.graph.positions_max.min(CONTEXT),
            has_text: gguf.is_some() || scheme == "path:" && place.join("tokenizer.json").is_file(),
            note: None,
        })
    }

    fn of_hub(source: &str, written: Written<'_>) -> Result<Found, Fault> {
        let found =
            |context_max, note| Found { source: source.to_string(), dtype: "bf16", context_max, has_text: true, note };
        match hub_outline(source, &mut |_| {}) {
            Ok(outline) => match outline.place() {
                Some(place) => Ok(found(config::import(place)?.graph.positions_max.min(CONTEXT), None)),
                None => Ok(found(CONTEXT, None)),
            },
            Err(fault) if fault.tier == Tier::Environment && matches!(written, Written::At(_)) => {
                Ok(found(CONTEXT, Some(format!("`{source}` was not looked at: {}", fault.message))))
            }
            Err(fault) => Err(fault),
        }
    }
}

/// The text of a config; a manifest in its place is named.
///
/// # Errors
/// A file that cannot be read, a manifest.
pub fn config_text(place: &Path) -> Result<String, Fault> {
    if place.extension().is_some_and(|suffix| suffix == "toml") {
        let shown = place.display();
        return Err(Fault::input(format!("`{shown}` is a manifest, expected a config.json or a folder"))
            .with_remedy(format!("`monobloc build {shown}` imports its model")));
    }
    Ok(read_text(place, CONFIG_BYTES_MAX)?)
}

/// What an import reads of a model of the hub.
///
/// # Errors
/// A name that is none, a model that is not there or has no weights, a hub that cannot be asked.
pub fn hub_outline(source: &str, progress: &mut dyn FnMut(Event<'_>)) -> Result<Outline, Fault> {
    let Source::Hub { repo, revision, file } = Source::parse(source, "main", 0)? else {
        return Err(Fault::internal(format!("`{source}` was taken for a model of the hub")));
    };
    Ok(source::outline(&repo, &revision, file.as_deref(), &HubSettings::from_env(), progress)?)
}

/// The fault for a look at a GGUF file that the hub has.
pub fn not_here(source: &str) -> Fault {
    Fault::input(format!("`{source}` is a GGUF file of the hub, which is not looked at before it is here"))
        .with_remedy(format!("`monobloc build {source}` downloads it, and says why it is refused if it is"))
}

/// The fault for a word that names no model and no manifest.
pub fn nothing(source: &str) -> Fault {
    let expected = format!(
        "name the folder of a checkpoint, a GGUF file, a config.json, `hf:OWNER/NAME`, or the built-in model `{}`",
        builtin::NAMES[0]
    );
    let remedy = match (source::hub_page(source), source.split('/').count()) {
        (Some(meant), _) => format!("a model of the hub is named as `{meant}`"),
        (None, 2) if Source::parse(&format!("{HUB}{source}"), "main", 0).is_ok() => {
            format!("a model of the hub is named as `{HUB}{source}`")
        }
        _ => match nearest(source, builtin::NAMES) {
            Some(meant) => format!("did you mean `{meant}`?"),
            None => expected,
        },
    };
    Fault::input(format!("no such folder or file: `{source}`")).with_remedy(remedy)
}

/// The GGUF file that `place` is, or the first one in a folder without a config.json.
pub fn gguf(place: &Path) -> Option<PathBuf> {
    let has_suffix = |path: &Path| path.extension().is_some_and(|suffix| suffix.eq_ignore_ascii_case("gguf"));
    if place.is_dir() && !place.join("config.json").exists() {
        let mut files: Vec<PathBuf> = fs::read_dir(place).ok()?.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.sort();
        return files.into_iter().find(|path| has_suffix(path) && path.is_file());
    }
    let has_magic = || {
        let mut magic = [0; 4];
        files::open(place).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok()) && magic == *b"GGUF"
    };
    (place.is_file() && (has_suffix(place) || has_magic())).then(|| place.to_path_buf())
}

/// A path that may be named as a manifest names it: `path:model.gguf`.
pub fn without_scheme(path: &Path) -> &Path {
    let named = path.to_str().and_then(|text| text.strip_prefix("path:")).filter(|_| !path.exists());
    named.map_or(path, Path::new)
}

/// A file of another name may be part of any checkpoint.
///
/// # Errors
/// A GGUF file whose name does not say so.
pub fn is_named_gguf(path: &Path) -> Result<(), Fault> {
    if gguf::is_named(path) {
        return Ok(());
    }
    Err(Fault::input(format!("`{}` is a GGUF file, and its name does not say so", path.display()))
        .with_remedy("let its name end in `.gguf`"))
}

/// The built-in model of a source, or of a name unless a file has that name.
fn built_in(source: &str) -> Option<&str> {
    let name = match source.strip_prefix(builtin::SCHEME) {
        Some(name) => name,
        None if Path::new(source).exists() => return None,
        None => source,
    };
    builtin::NAMES.contains(&name).then_some(name)
}

/// The path for a manifest: as typed if it and the manifest are in the current folder, else absolute.
fn from_manifest(place: &Path, written: Written<'_>) -> Result<PathBuf, Fault> {
    match written {
        Written::At(out) if out.parent().is_none_or(|folder| folder.as_os_str().is_empty()) => Ok(place.to_path_buf()),
        _ if place.is_absolute() => Ok(place.to_path_buf()),
        _ => fs::canonicalize(place)
            .map_err(|error| Fault::environment(format!("the path of `{}` is not known: {error}", place.display()))),
    }
}

/// Name of the record that describes the first device that has one, else `cpu`.
pub fn target_here() -> String {
    let devices = Device::list().unwrap_or_default();
    let describes = |name: &&str| {
        Target::builtin(name).is_some_and(|target| devices.iter().any(|device| device.matches(&target).is_ok()))
    };
    Target::builtin_names().find(describes).unwrap_or("cpu").to_string()
}

/// The text of a manifest. `name` is left out if it is that of the file.
pub fn text(found: &Found, name: Option<&str>, targets: &[String]) -> String {
    let Found { source, dtype, context_max, .. } = found;
    let name = name.map(|name| format!("name = {name:?}\n\n")).unwrap_or_default();
    let mut text = format!(
        "{name}[model]
source = {source:?}

[precision]
weights = \"{dtype}\"

[decode]
context_max = {context_max}

[search]
# Candidates that `monobloc build` measures beyond the default: raise it for a faster kernel.
trials = 0
"
    );
    for target in targets {
        text.push_str(&format!("\n[[target]]\nrecord = {target:?}\n"));
    }
    text
}
