//! Owns `init`: a first manifest for a model of the hub, a folder, a config, or the built-in model.

use std::fs;
use std::path::{Path, PathBuf};

use super::Outcome;
use super::arguments::Init;
use super::builtin;
use super::session::Session;
use crate::cuda::driver::Device;
use crate::error::Fault;
use crate::files::read_text;
use crate::manifest::Manifest;
use crate::model::config;
use crate::target::Target;

/// Largest config that is read; the same bound as for one in a checkpoint.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// `context_max` of a new manifest, unless the model has fewer positions.
const CONTEXT: u32 = 2048;

pub fn init(session: &Session, asked: &Init) -> Result<Outcome, Fault> {
    let Init { source, out, target, force } = asked;
    let found = Found::of(source.as_deref(), out)?;
    let targets = if target.is_empty() { vec![target_here()] } else { target.clone() };
    let text = text(&found, &targets);
    // Names of targets come from the command line, so the manifest may be invalid.
    Manifest::parse(&text, out).map_err(|error| error.into_fault(session.terminal.style))?;
    if out.exists() && !force {
        return Err(Fault::input(format!("`{}` is already there", out.display()))
            .with_remedy("name another file with `--out`, or replace it with `--force`"));
    }
    fs::write(out, text).map_err(|error| {
        Fault::environment(format!("cannot write `{}`: {error}", out.display()))
            .with_remedy("name another file with `--out`")
    })?;
    let (out, targets) = (out.display(), targets.join(", "));
    session.terminal.say(&format!("wrote `{out}`: {} for {targets}", found.source));
    session.terminal.say(&match found.has_text {
        true => format!("next: monobloc generate {out} --prompt \"Once upon a time\""),
        false => format!("next: monobloc build {out}"),
    });
    Ok(Outcome::Done)
}

/// What a new manifest says about a model.
struct Found {
    source: String,
    dtype: &'static str,
    context_max: u32,
    /// Whether there is a tokenizer.
    has_text: bool,
}

impl Found {
    fn of(source: Option<&str>, out: &Path) -> Result<Found, Fault> {
        if let Some(name) = built_in(source) {
            let source = format!("{}{name}", builtin::SCHEME);
            return Ok(Found { source, dtype: "fp32", context_max: CONTEXT, has_text: true });
        }
        let source = source.unwrap_or_default();
        if source.starts_with("hf:") {
            return Ok(Found { source: source.to_string(), dtype: "bf16", context_max: CONTEXT, has_text: true });
        }
        let place = Path::new(source);
        let (imported, scheme) = if place.is_dir() {
            (config::import(place)?, "path:")
        } else if place.is_file() {
            (config::import_config_only(&read_text(place, CONFIG_BYTES_MAX)?, 0)?, "synthetic:")
        } else {
            let remedy = match source.split('/').count() {
                2 => format!("a model of the hub is named as `hf:{source}`"),
                _ => format!(
                    "name the folder of a checkpoint, a config.json, `hf:OWNER/NAME`, or the built-in model `{}`",
                    builtin::NAMES[0]
                ),
            };
            return Err(Fault::input(format!("no such folder or file: `{source}`")).with_remedy(remedy));
        };
        Ok(Found {
            source: format!("{scheme}{}", from_manifest(place, out)?.display()),
            dtype: "bf16",
            context_max: imported.graph.positions_max.min(CONTEXT),
            has_text: scheme == "path:",
        })
    }
}

/// The built-in model that is asked for: by default, by its source, or by its name unless a file has that name.
fn built_in(source: Option<&str>) -> Option<&str> {
    let Some(source) = source else { return Some(builtin::NAMES[0]) };
    let name = match source.strip_prefix(builtin::SCHEME) {
        Some(name) => name,
        None if Path::new(source).exists() => return None,
        None => source,
    };
    builtin::NAMES.contains(&name).then_some(name)
}

/// The path for a manifest at `out`: as typed if both are in the current folder, else absolute.
fn from_manifest(place: &Path, out: &Path) -> Result<PathBuf, Fault> {
    if place.is_absolute() || out.parent().is_none_or(|folder| folder.as_os_str().is_empty()) {
        return Ok(place.to_path_buf());
    }
    fs::canonicalize(place)
        .map_err(|error| Fault::environment(format!("the path of `{}` is not known: {error}", place.display())))
}

/// Name of the record that describes the first device that has one, else `cpu`.
fn target_here() -> String {
    let devices = Device::list().unwrap_or_default();
    let describes = |name: &&str| {
        Target::builtin(name).is_some_and(|target| devices.iter().any(|device| device.matches(&target).is_ok()))
    };
    Target::builtin_names().find(describes).unwrap_or("cpu").to_string()
}

fn text(found: &Found, targets: &[String]) -> String {
    let Found { source, dtype, context_max, .. } = found;
    let mut text = format!(
        "[model]
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
