//! Owns `export`: a folder that a model runs from without a manifest, a checkpoint or a cache.

use serde_json::json;

use super::Outcome;
use super::arguments::Export;
use super::session::{Session, Talk, pick_target};
use super::terminal::interrupt;
use super::units::bytes_text;
use crate::error::Fault;
use crate::files::folder_of;
use crate::pipeline::{self, AskedSizes, Checking, Serving, Written};
use crate::target::TargetKind;
use crate::text::counted;

pub fn export(session: &Session, asked: &Export) -> Result<Outcome, Fault> {
    let mut manifest = session.manifest(&asked.manifest, asked.target.iter().map(String::as_str))?;
    if !asked.target.is_empty() {
        let picked = asked.target.iter().map(|name| pick_target(&manifest, Some(name)));
        let picked = picked.collect::<Result<Vec<_>, Fault>>()?;
        manifest.targets.retain(|target| picked.contains(target));
    }
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let _removed = interrupt::remove_at_end(folder_of(&asked.out), pipeline::temporary_prefix());
    let sizes = Serving::of_manifest(&manifest, TargetKind::Cpu, 1);
    let running_max = asked.max_batch.unwrap_or(sizes.running_max);
    let running_key = asked.max_batch.map(|_| "--max-batch").or(sizes.asked.running_max);
    let named = AskedSizes { running_max: running_key, ..sizes.asked };
    let serving = Serving { asked: named, running_max, cache_tokens: asked.cache_tokens, ..sizes };
    let checking = Checking::of(asked.checks.unchecked);
    let Some(written) = pipeline::export(&workspace, &manifest, &asked.out, &serving, checking, &interrupt::asked)?
    else {
        return Ok(Outcome::Interrupted);
    };
    let Written { digest, files, bytes, targets, unchecked } = written;
    let out = asked.out.display();
    if asked.json {
        let folder = out.to_string();
        let digest = digest.to_string();
        session.terminal.print_json(&json!({
            "folder": folder, "digest": digest, "files": files, "bytes": bytes, "targets": targets, "unchecked": unchecked,
        }))?;
        return Ok(Outcome::Done);
    }
    let (targets, files, size) = (targets.join(", "), counted(files as u64, "file"), bytes_text(bytes));
    session.terminal.say(&format!("exported {targets} to `{out}`: {files}, {size}, digest {digest}"));
    Ok(Outcome::Done)
}
