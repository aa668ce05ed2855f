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
use crate::speculate::{Begun, Left, Speculation};

use super::device_rows::{OneText, Prefill};
use super::runner::{OF_STEP, logits_after};

/// Told each token; `Break` ends the text.
type Tell<'a> = &'a mut dyn FnMut(&Decided) -> ControlFlow<()>;

/// What decodes a text with proposals: the interpreter, or kernels of a device.
trait Verifies {
    /// Keeps the recurrent state before `position`, where the next step begins.
    fn keep_state(&mut self, position: usize) -> Result<(), Fault>;

    /// Puts it back.
    fn go_back(&mut self) -> Result<(), Fault>;

    /// Decodes `last` from position `at` on, which ends with the last token of the text, and `tried` after it. Returns what is chosen after the last
    /// token, up to the first choice that was not tried. Where nothing is tried, it may choose up to `most` tokens, in as many steps.
    fn step(&mut self, at: usize, last: &[u32], tried: &[u32], most: usize) -> Result<Vec<Decided>, Fault>;

    /// What the model left of the first `rows` rows of the last step.
    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault>;

    /// Where that is until the next step, if it is on a device.
    fn left_in_place(&self, _rows: usize) -> Result<Option<Left>, Fault> {
        Ok(None)
    }
}

/// Rows of the last step that a draft was not shown yet: the position of the first one, and their number.
struct Unseen(Option<(usize, usize)>);

impl Unseen {
    /// Shows them, where they are if the draft reads them there. `asks`: it is asked for tokens next.
    fn show(&mut self, by: &dyn Verifies, speculation: &mut Speculation<'_>, asks: bool) -> Result<(), Fault> {
        let Some((first, rows)) = self.0.take() else { return Ok(()) };
        let left = if asks { by.left_in_place(rows)? } else { None };
        if !left.is_some_and(|left| speculation.see_in_place(first, left)) {
            speculation.see(first, by.left(rows)?);
        }
        Ok(())
    }
}

/// Continues a prompt after which `first` was chosen, with steps of at most `shape.rows` rows.
fn decide(
    by: &mut dyn Verifies,
    shape: &Shape,
    (prompt, first): (&[u32], &Decided),
    count: usize,
    speculation: &mut Speculation<'_>,
    tell: Tell<'_>,
) -> Result<Vec<u32>, Fault> {
    // The pages may suffice for the text, but not for proposed tokens after it.
    let positions_max = (shape.pages as usize * shape.page_rows as usize).min(shape.context_max as usize);
    let end = prompt.len() + count;
    let mut sequence = [prompt, &[first.token]].concat();
    let mut stopped = tell(first).is_break();
    let (mut begun, mut unseen) = (Begun::new(prompt.len(), shape.has_state), Unseen(None));
    while !stopped && sequence.len() < end {
        let (at, left) = (begun.at(), end - sequence.len());
        let again = sequence.len() - 1 - at;
        let room = (left - 1).min(positions_max.saturating_sub(sequence.len())).min(shape.rows as usize - 1 - again);
        unseen.show(by, speculation, speculation.asks(room))?;
        let proposal = speculation.propose(&sequence, room);
        let tried = if proposal.is_tried { proposal.tokens.as_slice() } else { &[] };
        if begun.wants_snapshot(tried) {
            by.keep_state(at)?;
        }
        let mut decided = by.step(at, &sequence[at..], tried, left.min(speculation.steps() as usize))?;
        if let Some(last) = decided.iter().position(|decided| tell(decided).is_break()) {
            decided.truncate(last + 1);
            stopped = true;
        }
        let chosen: Vec<u32> = decided.iter().map(|decided| decided.token).collect();
        if chosen.is_empty() {
            return Err(Fault::internal("a step decided no token"));
        }
        speculation.learn(&proposal, &chosen);
        if speculation.sees() {
            // Rows of tokens that were not chosen come last.
            unseen.0 = Some((at, again + chosen.len()));
        }
        sequence.extend(&chosen);
        if begun.ends(sequence.len(), chosen.len(), tried.len()) {
            by.go_back()?;
        }
    }
    Ok(sequence.split_off(prompt.len()))
}

/// The interpreter, and the request that chooses from the logits of each row.
struct OnCpu<'a> {
    interp: &'a mut Interp,
    request: &'a Request,
    counts: TokenCounts,
}

impl OnCpu<'_> {
    /// Reads a prompt from position 0 on: the logits after its last token. A draft that sees what the model leaves is shown each step of it.
    fn read(&mut self, prompt: &[u32], rows: usize, speculation: &mut Speculation<'_>) -> Result<Vec<f32>, Fault> {
        self.interp.reset();
        if !speculation.sees() {
            return logits_after(self.interp, prompt);
        }
        let (mut first, mut logits) = (0, vec![]);
        for chunk in prompt.chunks(rows.max(1)) {
            logits = logits_after(self.interp, &prompt[..first + chunk.len()])?;
            speculation.see(first, self.left(chunk.len())?);
            first += chunk.len();
        }
        Ok(logits)
    }
}

impl Verifies for OnCpu<'_> {
    fn keep_state(&mut self, position: usize) -> Result<(), Fault> {
        self.interp.keep_state(position as u32, OF_STEP);
        Ok(())
    }

    fn go_back(&mut self) -> Result<(), Fault> {
        Ok(self.interp.go_back(OF_STEP)?)
    }

    fn step(&mut self, at: usize, last: &[u32], tried: &[u32], _: usize) -> Result<Vec<Decided>, Fault> {
        let rows: Vec<Input> = last.iter().chain(tried).copied().map(Input::Token).collect();
        let (mut chosen, mut failed, mut logits) = (vec![], None, vec![]);
        let OnCpu { interp, request, counts } = self;
        interp.launch(&rows, |step| {
            if (step.position as usize) + 1 < at + last.len() {
                return ControlFlow::Continue(());
            }
            step.logits.copy_to(&mut logits);
            match request.choose(&logits, counts, None) {
                Ok(decided) => {
                    counts.push(decided.token);
                    let was_tried = tried.get(chosen.len()) == Some(&decided.token);
                    chosen.push(decided);
                    if was_tried { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
                }
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        })?;
        failed.map_or(Ok(chosen), |error| Err(error.into()))
    }

    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault> {
        let none = || Fault::internal("a schedule that publishes no last sum");
        (0..rows).map(|row| self.interp.left(row).ok_or_else(none)).collect()
    }
}

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
    let mut by = OnCpu { interp, request, counts: TokenCounts::new(prompt) };
    let logits = by.read(prompt, shape.rows as usize, speculation)?;
    let first = request.choose(&logits, &by.counts, None)?;
    by.counts.push(first.token);
    decide(&mut by, &shape, (prompt, &first), count, speculation, tell)
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

/// Both kernels, over one text.
struct OnDevice<'a, 'v> {
    one: OneRow<'a>,
    verifier: Verifier<'v>,
    text: OneText,
    /// The decode kernel needs the new position.
    moved: bool,
    /// A draft reads what steps leave. The decode kernel keeps nothing of the steps before its last one.
    sees: bool,
}

impl Verifies for OnDevice<'_, '_> {
    fn keep_state(&mut self, _: usize) -> Result<(), Fault> {
        let copied = self.one.session.keep_state_soon(OF_STEP)?;
        Ok(copied.map_or(Ok(()), |copied| self.verifier.rows.follow(copied))?)
    }

    fn go_back(&mut self) -> Result<(), Fault> {
        let (before, copied) = self.one.session.go_back_soon(OF_STEP)?;
        copied.map_or(Ok(()), |copied| self.verifier.rows.follow(copied))?;
        self.text.state_is_before(before);
        Ok(())
    }

    fn step(&mut self, at: usize, last: &[u32], tried: &[u32], most: usize) -> Result<Vec<Decided>, Fault> {
        let OnDevice { one, verifier, text, moved, sees } = self;
        let position = at as u32;
        let tokens = match last {
            &[last] if tried.is_empty() && !*sees => {
                if std::mem::take(moved) {
                    one.session.go_on(position, last)?;
                }
                one.run(text, position, one.steps_max.min(most as u32))?
            }
            _ => {
                *moved = true;
                let tokens = verifier.run(text, position, last, tried)?;
                one.session.state_is_before(position + (last.len() + tried.len()) as u32);
                tokens
            }
        };
        Ok(tokens.into_iter().map(chosen_by_kernel).collect())
    }

    fn left(&self, rows: usize) -> Result<Vec<Vec<f32>>, Fault> {
        Ok(self.verifier.rows.left(rows)?)
    }

    fn left_in_place(&self, rows: usize) -> Result<Option<Left>, Fault> {
        Ok(self.verifier.rows.left_in_place(rows)?)
    }
}

/// Of a kernel's choice the token is known.
fn chosen_by_kernel(token: u32) -> Decided {
    Decided { token, logprob: None, top: vec![] }
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
    let (text, first, moved) = if sees {
        refuse_unseen(speculation, verifier.rows)?;
        read_seen(&mut one, &mut verifier, prefill, prompt, speculation)?
    } else {
        read_prompt(&mut one, (shape, &verifier.sampler), prefill, prompt)?
    };
    let mut by = OnDevice { one, verifier, text, moved, sees };
    decide(&mut by, &shape, (prompt, &chosen_by_kernel(first)), count, speculation, tell)
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
        speculation.see(position, by.rows.left(chunk.len())?);
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
