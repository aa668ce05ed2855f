//! Owns `import`: prints what a checkpoint is, or every reason why it is refused.

use serde_json::json;

use super::Outcome;
use super::arguments::Import;
use super::init;
use super::session::Session;
use crate::dtype::{DType, Precision};
use crate::error::Fault;
use crate::model::config::{self, ImportError, Imported, Reason, describe, step_cache_bytes, step_weight_bytes};
use crate::text::counted;

/// Reasons printed; a header may name 100,000 tensors that no family has.
const REASONS_SHOWN: usize = 200;

pub fn import(session: &Session, asked: &Import) -> Result<Outcome, Fault> {
    let place = init::without_scheme(&asked.place);
    let text = place.to_string_lossy();
    let imported = if text.starts_with(init::HUB) && !place.exists() {
        let outline = init::hub_outline(&text, &mut |_| {})?;
        config::import(outline.place().ok_or_else(|| init::not_here(&text))?)
    } else if let Some(gguf) = init::gguf(place) {
        init::is_named_gguf(&gguf)?;
        config::import(place)
    } else if place.is_file() {
        config::import_config_only(&init::config_text(place)?, 0)
    } else if place.is_dir() {
        config::import(place)
    } else {
        return Err(init::nothing(&text));
    };
    match imported {
        Ok(imported) if asked.json => session.terminal.print_json(&accepted(&imported))?,
        Ok(imported) => {
            let mut text = describe(&imported.graph);
            for note in &imported.notes {
                text.push_str(&format!("note: {note}\n"));
            }
            text.push_str(&format!("read {} bytes of weight headers\n", imported.header_bytes_read));
            session.terminal.print(&text)?;
        }
        Err(ImportError::Refused { reasons, .. }) => {
            let listed: Vec<String> = reasons.iter().map(Reason::shown).collect();
            if asked.json {
                session.terminal.print_json(&json!({ "accepted": false, "reasons": listed }))?;
            } else {
                // The error of a build shows fewer of them, and `--json` shows all.
                let shown = listed.iter().take(REASONS_SHOWN);
                shown.into_iter().try_for_each(|reason| session.terminal.print(&format!("- {reason}\n")))?;
                if listed.len() > REASONS_SHOWN {
                    let more = listed.len() - REASONS_SHOWN;
                    session.terminal.print(&format!("- and {more} more, which `--json` lists\n"))?;
                }
            }
            let count = counted(reasons.len() as u64, "reason");
            let remedy = match reasons.iter().any(Reason::is_incomplete) {
                true => config::FETCH_AGAIN,
                false => "`monobloc schema` lists what is modelled; what is not might change the result",
            };
            return Err(
                Fault::input(format!("`{}` cannot be imported, for {count}", place.display())).with_remedy(remedy)
            );
        }
        Err(error) => return Err(error.into()),
    }
    Ok(Outcome::Done)
}

fn accepted(imported: &Imported) -> serde_json::Value {
    let Imported { graph, weights: _, header_bytes_read, config_text: _, notes } = imported;
    let context = graph.positions_max.min(1024);
    let step = |dtype| {
        let precision = Precision { weights: dtype, cache: dtype, wire: DType::F32 };
        json!({
            "weight_bytes": step_weight_bytes(graph, precision),
            "cache_bytes": step_cache_bytes(graph, precision, context),
        })
    };
    json!({
        "accepted": true,
        "reasons": [],
        "family": graph.family,
        "parameters": graph.parameter_count(),
        "stored_bytes": graph.stored_bytes(),
        "layers": graph.layers.len(),
        "hidden": graph.hidden,
        "vocab": graph.vocab,
        "positions_max": graph.positions_max,
        "step": { "context": context, "bf16": step(DType::Bf16), "fp32": step(DType::F32) },
        "header_bytes_read": header_bytes_read,
        "notes": notes,
        "description": describe(graph).lines().collect::<Vec<_>>(),
    })
}
