//! Owns decoding with proposed tokens: on a CPU by the schedule that reads prompts in chunks, on a device by a kernel for rows beside the
//! kernel for one row.
//!
//! A recurrent state cannot take tokens back. So a step that verifies keeps a snapshot of the state before it. If not all proposed tokens are
//! chosen, the snapshot is put back, and the rows of the next step begin with those that were chosen. They need no step of their own:
//! a step of a few more rows takes about as long, because the weights are read once for all rows.

use std::ops::ControlFlow;

use crate::cuda::rows::{FirstToken, RowInput, RowLauncher};
use crate::cuda::session::Session;
use crate::engine::SEEN_MAX;
use crate::error::Fault;
use crate::interp::{Input, Interp};
use crate::rows::Shape;
use crate::sample::{Decided, Request, Sampler, TokenCounts};
use crate::speculate::Speculation;

use super::device_rows::{OneText, Prefill};
use super::runner::{OF_STEP, logits_after};

/// Told each token; `Break` ends the text.
type Tell<'a> = &'a mut dyn FnMut(&Decided) -> ControlFlow<()>;

/// Decodes the prompt, and takes the tokens that the request chooses from the logits of each row: those of [`Request::choose`] after
/// steps of one row, because a row has the bits that it has alone.
///
/// # Errors
/// Proposals of more tokens than a step has rows for; what the interpreter refuses; nothing that may come next.
pub(super) fn decide_on_cpu(
    interp: &mut Interp,
    prompt: &[u32],
    count: usize,
    request: &Request,
    speculation: &mut Speculation<'_>,
    tell: Tell<'_>,
) -> Result<Vec<u32>, Fault> {
    let shape = *interp.text_shape().ok_or_else(|| Fault::internal("a text without tables"))?;
    refuse_rows(speculation, shape.rows, ", or raise `decode.chunk_max`")?;
    if shape.has_state && interp.snapshots_max() == 0 {
        let message = "`--lookup` needs a snapshot of the recurrent state, and the export has no room for one";
        return Err(Fault::input(message).with_remedy("export the model again, or leave out `--lookup`"));
    }
    // The pages may suffice for the text, but not for proposed tokens after it.
    let positions_max = (shape.pages as usize * shape.page_rows as usize).min(shape.context_max as usize);
    let mut logits = read_on_cpu(interp, prompt, shape.rows as usize, speculation)?;
    let mut counts = TokenCounts::new(prompt);
    let mut sequence = prompt.to_vec();
    let end = prompt.len() + count;
    let first = request.choose(&logits, &counts, None)?;
    counts.push(first.token);
    sequence.push(first.token);
    let mut stopped = tell(&first).is_break();
    let mut begun = Begun::new(sequence.len() - 1, shape.has_state);
    while !stopped && sequence.len() < end {
        let again = sequence.len() - 1 - begun.at;
        let room = (end - sequence.len() - 1)
            .min(positions_max.saturating_sub(sequence.len()))
            .min(shape.rows as usize - 1 - again);
        let proposal = speculation.propose(&sequence, room);
        let tried = if proposal.is_tried { proposal.tokens.as_slice() } else { &[] };
        if begun.wants_snapshot(tried) {
            interp.keep_state(begun.at as u32, OF_STEP);
        }
        let rows: Vec<Input> = sequence[begun.at..].iter().chain(tried).copied().map(Input::Token).collect();
        let (mut chosen, mut failed) = (vec![], None);
        interp.launch(&rows, |step| {
            if (step.position as usize) + 1 < sequence.len() {
                return ControlFlow::Continue(());
            }
            step.logits.copy_to(&mut logits);
            match request.choose(&logits, &counts, None) {
                Ok(decided) => {
                    counts.push(decided.token);
                    stopped = tell(&decided).is_break();
                    chosen.push(decided.token);
                }
                Err(error) => failed = Some(error),
            }
            let goes_on = !stopped && failed.is_none() && tried.get(chosen.len() - 1) == chosen.last();
            if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        speculation.learn(&proposal, &chosen);
        // Rows of tokens that were not chosen come last.
        show(interp, begun.at, again + chosen.len(), speculation)?;
        sequence.extend(&chosen);
        if begun.ends(sequence.len(), chosen.len(), tried.len()) && !stopped {
            interp.go_back(OF_STEP)?;
        }
    }
    Ok(sequence.split_off(prompt.len()))
}

/// Decodes a prompt from position 0 on: the logits after its last token. A draft that sees what the model leaves is shown each step of it.
fn read_on_cpu(
    interp: &mut Interp,
    prompt: &[u32],
    rows: usize,
    speculation: &mut Speculation<'_>,
) -> Result<Vec<f32>, Fault> {
    interp.reset();
    if !speculation.sees() {
        return logits_after(interp, prompt);
    }
    let (mut first, mut logits) = (0, vec![]);
    for chunk in prompt.chunks(rows.max(1)) {
        logits = logits_after(interp, &prompt[..first + chunk.len()])?;
        show(interp, first, chunk.len(), speculation)?;
        first += chunk.len();
    }
    Ok(logits)
}

/// Shows a draft what the first `count` rows of the last step left, the first of which is at position `first`.
fn show(interp: &Interp, first: usize, count: usize, speculation: &mut Speculation<'_>) -> Result<(), Fault> {
    if !speculation.sees() {
        return Ok(());
    }
    let row = |row| interp.left(row).ok_or_else(|| Fault::internal("a schedule that publishes no last sum"));
    speculation.see(first, (0..count).map(row).collect::<Result<_, _>>()?);
    Ok(())
}

/// Where the next step of a text begins.
struct Begun {
    /// The position of its first row: that of the last token, or an earlier one to which the recurrent state went back.
    at: usize,
    has_state: bool,
    /// The position of the snapshot.
    kept: Option<usize>,
}

impl Begun {
    fn new(at: usize, has_state: bool) -> Begun {
        Begun { at, has_state, kept: None }
    }

    /// Whether the state is to be kept before a step that verifies `tried`. After it went back, it is there already.
    fn wants_snapshot(&mut self, tried: &[u32]) -> bool {
        self.has_state && !tried.is_empty() && self.kept.replace(self.at) != Some(self.at)
    }

    /// Notes that a step chose `chosen` tokens, after which the text has `length`. Whether the state has to go back: it has seen tokens that were
    /// not chosen.
    fn ends(&mut self, length: usize, chosen: usize, tried: usize) -> bool {
        let goes_back = self.has_state && chosen <= tried;
        if !goes_back {
            self.at = length - 1;
        }
        goes_back
    }
}

/// Refuses proposals that no step has rows for.
pub(super) fn refuse_rows(speculation: &Speculation<'_>, rows_max: u32, or: &str) -> Result<(), Fault> {
    let most = speculation.most();
    if most < rows_max as usize {
        return Ok(());
    }
    let rows = most + 1;
    let (option, asked) = if speculation.sees() {
        ("--draft mtp", format!("--draft mtp:{most}"))
    } else {
        ("--lookup", format!("--lookup {most}"))
    };
    let message = format!("`{asked}` needs steps of {rows} rows, found steps of at most {rows_max}");
    Err(Fault::input(message).with_remedy(format!("lower `{option}` below {rows_max}{or}")))
}

/// The kernel for one row, which decodes where nothing is proposed.
pub struct OneRow<'a> {
    pub session: &'a mut Session,
    pub steps_max: u32,
    /// Ids that end the text.
    pub ends: &'a [u32],
}

impl OneRow<'_> {
    /// Runs `steps` steps from `position` on, as the tables of `text` allow; the tokens of the positions after.
    fn run(&mut self, text: &mut OneText, position: u32, steps: u32) -> Result<Vec<u32>, Fault> {
        let tables = text.admit(position, 1, steps)?;
        let decided = self.session.run(position, steps, false)?.decided;
        tables.finish(decided.saturating_sub(position + 1));
        (position + 1..decided).map(|at| Ok(self.session.token(at)?)).collect()
    }
}

/// The kernel for the rows of the last token and of those that are proposed after it.
pub struct Verifier<'a> {
    pub rows: &'a mut dyn RowLauncher,
    pub sampler: Sampler,
}

impl Verifier<'_> {
    /// Decodes tokens from `position` on, the last of which is that of the text, and `proposed` after them. The tokens that are chosen after the last
    /// one, up to the first one that was not proposed.
    fn run(&mut self, text: &mut OneText, position: u32, last: &[u32], proposed: &[u32]) -> Result<Vec<u32>, Fault> {
        let Verifier { rows, sampler } = self;
        let (inverse_temperature, seed) = sampler.temperature_of_rows();
        let first = |&token: &u32| FirstToken::Given(token);
        let input = |token| RowInput { first: first(token), steps: 1, inverse_temperature, seed };
        let inputs: Vec<RowInput> = last.iter().chain(proposed).map(input).collect();
        // Kernels for rows have neither top-k nor top-p.
        let on_host = sampler.is_filtered();
        let tables = text.admit(position, inputs.len() as u32, 1)?;
        let launched = rows.run_whole(tables, &inputs, on_host)?;
        let decided = launched.tokens.get(1).ok_or_else(|| Fault::internal("a launch decided no token"))?;
        let mut chosen = vec![];
        let again = last.len() - 1;
        for (row, &decided) in (0..).zip(decided).skip(again) {
            let token = match on_host {
                true => sampler.choose(&rows.logits(row)?, position + row + 1)?,
                false => decided,
            };
            chosen.push(token);
            if proposed.get(row as usize - again) != Some(&token) {
                break;
            }
        }
        Ok(chosen)
    }
}

/// Reads the prompt from position 0 on, and takes the tokens that the kernels choose. Without a proposal a step is the one of the kernel for
/// one row.
///
/// # Errors
/// Proposals of more tokens than the verifier has rows for; what the device refuses; a launch that gave up.
pub fn decide_on_device(
    mut one: OneRow<'_>,
    mut verifier: Verifier<'_>,
    prefill: Option<&mut Prefill>,
    prompt: &[u32],
    count: usize,
    speculation: &mut Speculation<'_>,
    tell: Tell<'_>,
) -> Result<Vec<u32>, Fault> {
    let shape = *verifier.rows.shape();
    refuse_rows(speculation, shape.rows, "")?;
    let sees = speculation.sees();
    // `moved`: whether the kernel for one row needs the new position.
    let (mut text, first, mut moved) = if sees {
        refuse_unseen(speculation, verifier.rows)?;
        read_seen(&mut one, &mut verifier, prefill, prompt, speculation)?
    } else {
        read_prompt(&mut one, (shape, &verifier.sampler), prefill, prompt)?
    };
    let mut sequence = prompt.to_vec();
    let end = prompt.len() + count;
    let mut take = |sequence: &mut Vec<u32>, chosen: &[u32]| {
        chosen.iter().any(|&token| {
            sequence.push(token);
            tell(&Decided { token, logprob: None, top: vec![] }).is_break()
        })
    };
    let mut stopped = take(&mut sequence, &[first]);
    let mut begun = Begun::new(sequence.len() - 1, shape.has_state);
    while !stopped && sequence.len() < end {
        let (position, last) = (sequence.len() as u32 - 1, sequence[sequence.len() - 1]);
        let left = end - sequence.len();
        let again = sequence.len() - 1 - begun.at;
        let proposal = speculation.propose(&sequence, (left - 1).min(shape.rows as usize - 1 - again));
        let tried = if proposal.is_tried { proposal.tokens.as_slice() } else { &[] };
        // The decode kernel keeps nothing of the steps before its last one.
        let chosen = if proposal.is_tried || again > 0 || sees {
            moved = true;
            if begun.wants_snapshot(tried) {
                one.session.keep_state(OF_STEP)?;
            }
            verifier.run(&mut text, begun.at as u32, &sequence[begun.at..], tried)?
        } else {
            if std::mem::take(&mut moved) {
                one.session.go_on(position, last)?;
            }
            one.run(&mut text, position, speculation.steps().min(one.steps_max).min(left as u32))?
        };
        if chosen.is_empty() {
            return Err(Fault::internal("a launch decided no token"));
        }
        speculation.learn(&proposal, &chosen);
        show_left(verifier.rows, begun.at, again + chosen.len(), speculation)?;
        let seen = sequence.len() + tried.len();
        stopped = take(&mut sequence, &chosen);
        if begun.ends(sequence.len(), chosen.len(), tried.len()) {
            text.state_is_before(one.session.go_back(OF_STEP)?);
        } else if moved {
            one.session.state_is_before(seen as u32);
        }
    }
    Ok(sequence.split_off(prompt.len()))
}

/// Refuses a kernel that does not keep what a draft reads.
fn refuse_unseen(speculation: &Speculation<'_>, rows: &dyn RowLauncher) -> Result<(), Fault> {
    if rows.keeps_left() {
        return Ok(());
    }
    let (most, step) = (speculation.most(), speculation.most() + 1);
    let message =
        format!("`--draft mtp:{most}` needs one batch kernel for steps of {step} rows, and the target has none");
    Err(Fault::input(message).with_remedy("lower `--draft mtp`, or propose with `--lookup`"))
}

/// Shows a draft what the first `count` rows of the last step left, the first of which is at position `first`.
fn show_left(
    rows: &dyn RowLauncher,
    first: usize,
    count: usize,
    speculation: &mut Speculation<'_>,
) -> Result<(), Fault> {
    if speculation.sees() {
        speculation.see(first, rows.left(count)?);
    }
    Ok(())
}

/// As [`read_prompt`], and shows a draft what the last tokens left.
fn read_seen(
    one: &mut OneRow<'_>,
    verifier: &mut Verifier<'_>,
    prefill: Option<&mut Prefill>,
    prompt: &[u32],
    speculation: &mut Speculation<'_>,
) -> Result<(OneText, u32, bool), Fault> {
    let (shape, sampler) = (*verifier.rows.shape(), verifier.sampler);
    let mut by = Verifier { rows: &mut *verifier.rows, sampler };
    let (mut text, mut position) = (OneText::new(shape), 0);
    one.session.start(prompt, one.ends)?;
    if let Some(prefill) = prefill {
        text = OneText::new(Shape { rows: shape.rows.max(prefill.shape().rows), ..shape });
        position = prompt.len().saturating_sub(SEEN_MAX as usize);
        if position > 0 {
            prefill.read_text(&mut text, &prompt[..position])?;
        }
        by.rows = prefill.rows();
    }
    let mut first = None;
    for chunk in prompt[position..].chunks(by.rows.shape().rows as usize) {
        first = by.run(&mut text, position as u32, chunk, &[])?.pop();
        show_left(by.rows, position, chunk.len(), speculation)?;
        position += chunk.len();
    }
    one.session.state_is_before(position as u32);
    let first = first.ok_or_else(|| Fault::internal("a prompt decided no token"))?;
    Ok((text, first, true))
}

/// Reads the prompt into the cache, with `prefill` if it is given. Returns the text with what is written of it, the token that follows, and
/// whether another kernel than `one` decided it.
fn read_prompt(
    one: &mut OneRow<'_>,
    (shape, sampler): (Shape, &Sampler),
    mut prefill: Option<&mut Prefill>,
    prompt: &[u32],
) -> Result<(OneText, u32, bool), Fault> {
    let rows = prefill.as_mut().map_or(0, |prefill| prefill.shape().rows);
    let mut text = OneText::new(Shape { rows: shape.rows.max(rows), ..shape });
    one.session.start(prompt, one.ends)?;
    let mut position = 0;
    if let Some(prefill) = prefill {
        let first = prefill.decide_text(&mut text, prompt, sampler)?;
        position = prompt.len() - usize::from(first.is_none());
        one.session.state_is_before(position as u32);
        if let Some(first) = first {
            return Ok((text, first, true));
        }
    }
    let mut decided = vec![];
    while position < prompt.len() {
        let steps = (one.steps_max as usize).min(prompt.len() - position);
        decided = one.run(&mut text, position as u32, steps as u32)?;
        position += steps;
    }
    // The tokens before the last one are those of the prompt.
    let first = decided.pop().ok_or_else(|| Fault::internal("a prompt decided no token"))?;
    Ok((text, first, false))
}
