//! Owns the draft of a plan: the layer that predicts further tokens (MTP), with the embedding and the head of the model, as a graph of its own.

use std::collections::BTreeMap;

use super::{Assembled, Assembly, Collector, LayerPlan, Plan, Prefix, assemble_layer};
use crate::model::config::quantised::Quantisation;
use crate::model::config::reason::Reason;
use crate::model::graph::{Joined, Linear, RowView};
use crate::model::weights::HeaderTensor;

/// The graph of the draft of a plan over the tensors of `files`: one layer with attention, and what of the layers is the same in all. `None`: the
/// family has none, or not in this form.
///
/// # Errors
/// Why the tensors that `files` has are no such draft.
pub fn assemble_draft(
    plan: &Plan,
    files: &BTreeMap<String, HeaderTensor>,
    quantisation: Option<&Quantisation>,
) -> Option<Result<Assembled, Vec<Reason>>> {
    let prefix = plan.ahead.prefix.filter(|_| plan.ahead.is_joined)?;
    let has =
        |module: &str| files.keys().any(|name| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(module)));
    // A second layer, or an embedding of its own, is another form.
    if !has("fc.") || !has("layers.0.") || has("layers.1.") || has("embed_tokens.") || has("lm_head.") {
        return None;
    }
    let layer = plan.layers.last()?;
    let own = Plan {
        prefix: Prefix { model: prefix, head: "" },
        layers: vec![LayerPlan { ..*layer }],
        experts: plan.experts.clone().map(|mut experts| {
            experts.layers = vec![experts.layers.last().copied().unwrap_or_default()];
            experts
        }),
        delta: None,
        ..plan.clone()
    };
    let hidden = plan.hidden;
    let mut c = Collector::new(plan, Some(files), quantisation);
    let embed = c.want(plan.prefix.of(plan.names.embed), &[plan.vocab, hidden]);
    let embedding_norm = c.norm(&format!("{prefix}pre_fc_norm_embedding"), plan.norm, hidden);
    let given_norm = c.norm(&format!("{prefix}pre_fc_norm_hidden"), plan.norm, hidden);
    // A row of the checkpoint has the weights of the embedding, then those of what is given.
    let both = c.want_as(format!("{prefix}fc.weight"), &[2 * hidden, hidden], &[hidden, 2 * hidden]);
    let half = |first| Linear {
        weight: RowView { tensor: both, first, block: 1, stride: 2 },
        bias: None,
        rows: hidden,
        cols: hidden,
    };
    let joined = Joined { embedding_norm, given_norm, of_embedding: half(0), of_given: half(1) };
    let layers = vec![assemble_layer(&mut c, &own, 0)];
    let final_norm = c.norm(&format!("{prefix}norm"), plan.norm, hidden);
    let head = c.head(plan, embed);
    let assembled = c.finish(plan, Assembly { embed, joined: Some(Box::new(joined)), layers, final_norm, head });
    Some(if assembled.reasons.is_empty() { Ok(assembled) } else { Err(assembled.reasons) })
}
