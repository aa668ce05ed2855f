//! Tests steps of several rows over a paged cache: the interpreter, and the verdicts of both judges.

use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::dtype::{DType, Precision};
use monobloc::format::NAMED;
use monobloc::interp::{Arithmetic, Input, Interp, InterpError, Options, Order, Pack};
use monobloc::ir::EventId;
use monobloc::ir::op::{Attention, Op, Role};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::program::{Content, Home};
use monobloc::ir::schedule::{Event, Mechanism, Schedule, Scope, SmemKind, Task};
use monobloc::ir::table::{Fact, Holds};
use monobloc::ir::variant::Variant;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::model::graph::RopeId;
use monobloc::pack::pack;
use monobloc::pages::Pool;
use monobloc::random::Random;
use monobloc::rows::{Edit, Guard, PageId, Request, Row, SequenceId, Shape};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Rule, check, share_caches, validate};

use crate::formats::{ODD, all, rounded};
use crate::oracle::Kind;
use crate::oracle::contents::judge_shared;
use crate::oracle::explore::{Effort, Verdict, judge};
use crate::proof_support::{
    BF16, FP32, beyond_kernels, buffer, fresh_caches, h200, listed, looked_up, operand, over_one_cache,
    release_nothing_last, restream, swap_queued, task, two_devices, two_rows, words, words_of,
};
use crate::support::{Goldens, checkpoints, fixture, max_difference};

/// Ten pages, for two sequences that hold eight.
const BATCH: Batch = Batch { rows: 2, sequences: 3, pages: 10, page_rows: 4, words: false };
const CONTEXT_MAX: u32 = 24;
const FIRST: [u32; 11] = [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298];
const SECOND: [u32; 4] = [1, 432, 383, 286];
/// Steps that both sequences decode after their prompts.
const STEPS: u32 = 6;

fn place(imported: &Imported, precision: Precision, batch: Option<&Batch>) -> Schedule {
    let context_max = CONTEXT_MAX.min(imported.graph.positions_max);
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate {
        sms: 3,
        splits: 1,
        mechanism: Mechanism::Counter,
        ..Candidate::default_for(&imported.graph, &target, precision)
    };
    let program = match batch {
        Some(batch) => lower_batch(&imported.graph, "rows", precision, context_max, batch, &candidate),
        None => lower(&imported.graph, "rows", precision, context_max, &candidate),
    };
    let placed = schedule(program.unwrap(), &target, &candidate).unwrap();
    assert_eq!(check(&placed, &target), []);
    placed
}

fn packed(imported: &Imported, schedule: &Schedule) -> Pack {
    Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap())
}

/// Bits of the logits after each position, and the token of each.
pub type Run = Vec<(u32, Vec<u32>)>;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|value| value.to_bits()).collect()
}

fn row(sequence: SequenceId, position: u32) -> Row {
    Row { sequence, position, wants_logits: true }
}

/// Positions of a text that begins with `prompt`.
fn length(imported: &Imported, prompt: &[u32]) -> usize {
    (prompt.len() + STEPS as usize).min(CONTEXT_MAX.min(imported.graph.positions_max) as usize)
}

/// A sequence alone: its prompt, then what the schedule selects.
pub fn alone(imported: &Imported, precision: Precision, options: Options, prompt: &[u32]) -> Run {
    let schedule = place(imported, precision, None);
    let mut interp = Interp::new(&schedule, packed(imported, &schedule), options).unwrap();
    let mut run = vec![];
    interp.logits(prompt).unwrap().iter().zip(prompt).for_each(|(logits, &token)| run.push((token, bits(logits))));
    while run.len() < length(imported, prompt) {
        let token = interp.selected().unwrap();
        let logits = interp.step(Input::Token(token)).unwrap();
        run.push((token, bits(&logits)));
    }
    run
}

/// Both sequences at once. They begin together, one finishes its prompt long before the other, and they change rows on the
/// way. Pages are taken from both ends of the pool in turn.
fn together(imported: &Imported, precision: Precision, options: Options) -> [Run; 2] {
    let schedule = place(imported, precision, Some(&BATCH));
    let mut interp = Interp::new(&schedule, packed(imported, &schedule), options).unwrap();
    let mut guard = Guard::new(Shape::of(&schedule.program).expect("tables"));
    let sequences = [SequenceId(2), SequenceId(0)];
    let pages: [&[u32]; 2] = [&[9, 0, 7, 2, 5], &[1, 8, 3]];
    let edits = (0..2).flat_map(|s| {
        let of = (0..).zip(pages[s]);
        of.map(move |(block, &page)| Edit { sequence: sequences[s], block, page: Some(PageId(page)) })
    });
    let mut edits: Vec<Edit> = edits.collect();
    let mut runs: [Run; 2] = [vec![], vec![]];
    let prompts: [&[u32]; 2] = [&FIRST, &SECOND];
    // The second sequence waits at its last position while the first one reads its prompt: it is decoded there again.
    for step in 0..FIRST.len() {
        let order = if step % 3 == 0 { [0, 1] } else { [1, 0] };
        let at = |s: usize| step.min(prompts[s].len() - 1);
        let rows = order.map(|s| row(sequences[s], at(s) as u32)).to_vec();
        let tokens = order.map(|s| prompts[s][at(s)]);
        let steps = if step + 1 == FIRST.len() { 1 + STEPS } else { 1 };
        let request = Request { rows, steps, edits: std::mem::take(&mut edits) };
        let tables = guard.admit(&request).unwrap();
        let record = |result: &monobloc::interp::StepResult<'_>| {
            let run = &mut runs[order[result.row]];
            run.truncate(result.position as usize);
            run.push((result.token, bits(&result.logits.to_vec())));
        };
        interp.launch_rows(tables, &tokens, record).unwrap();
    }
    runs
}

fn tinystories() -> Imported {
    import(&fixture("tinystories-llama")).unwrap()
}

#[test]
fn a_paged_step_of_two_rows_is_two_steps_of_one() {
    let imported = tinystories();
    let fp32 = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    for precision in [fp32, bf16] {
        let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
        let expected = [&FIRST[..], &SECOND].map(|prompt| alone(&imported, precision, options, prompt));
        for order in [Order::Threads(1), Order::Threads(3), Order::Adversarial { seed: 4 }] {
            let found = together(&imported, precision, Options { arithmetic: Arithmetic::Fast, order });
            for (s, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let tokens = |run: &Run| run.iter().map(|at| at.0).collect::<Vec<_>>();
                assert_eq!(tokens(found), tokens(expected), "sequence {s}, {order:?}");
                let differs = found.iter().zip(expected).position(|(a, b)| a.1 != b.1);
                assert_eq!(differs, None, "bits of sequence {s}, {order:?}");
            }
        }
    }
}

/// A step of one row over pages: the same tasks and the same bits in any pages.
#[test]
fn a_paged_step_of_one_row_is_the_step_over_a_cache_of_its_own() {
    let imported = tinystories();
    for (precision, order) in [(FP32, Order::Threads(3)), (BF16, Order::Adversarial { seed: 4 })] {
        let options = Options { arithmetic: Arithmetic::Fast, order };
        let expected = [&FIRST[..], &SECOND].map(|prompt| alone(&imported, precision, options, prompt));
        let schedule = place(&imported, precision, Some(&Batch { rows: 1, ..BATCH }));
        let without = place(&imported, precision, None);
        assert_eq!((schedule.regimes, schedule.variants), (without.regimes, without.variants));
        let schedule = place(&imported, precision, Some(&Batch { rows: 1, ..BATCH }));
        let mut interp = Interp::new(&schedule, packed(&imported, &schedule), options).unwrap();
        let mut guard = Guard::new(Shape::of(&schedule.program).expect("tables"));
        let pages: [&[u32]; 2] = [&[9, 0, 7, 2, 5], &[1, 8, 3]];
        let edits = (0..2).flat_map(|s: usize| {
            let page = move |(block, &page)| Edit { sequence: SequenceId(s as u32), block, page: Some(PageId(page)) };
            (0..).zip(pages[s]).map(page)
        });
        let mut edits: Vec<Edit> = edits.collect();
        // The sequences take turns; a launch has several steps after the prompt.
        let prompts: [&[u32]; 2] = [&FIRST, &SECOND];
        let mut runs: [Run; 2] = [vec![], vec![]];
        for at in 0..FIRST.len() {
            for s in [1, 0].into_iter().filter(|&s| at < prompts[s].len()) {
                let steps = if at + 1 == prompts[s].len() { 1 + STEPS } else { 1 };
                let rows = vec![row(SequenceId(s as u32), at as u32)];
                let request = Request { rows, steps, edits: std::mem::take(&mut edits) };
                let record = |step: &monobloc::interp::StepResult<'_>| {
                    runs[s].push((step.token, bits(&step.logits.to_vec())));
                };
                interp.launch_rows(guard.admit(&request).unwrap(), &prompts[s][at..=at], record).unwrap();
            }
        }
        assert!(runs == expected, "{order:?}");
    }
}

/// Steps of up to 16 rows, for as many sequences.
const MANY: Batch = Batch { rows: 16, sequences: 16, pages: 96, page_rows: 4, words: false };

/// Sequences served together: each launch takes up to `chunk` tokens of each prompt, then one decoded token of each.
pub fn served(
    imported: &Imported,
    precision: Precision,
    options: Options,
    prompts: &[&[u32]],
    chunk: usize,
) -> Vec<Run> {
    let schedule = place(imported, precision, Some(&MANY));
    let mut interp = Interp::new(&schedule, packed(imported, &schedule), options).unwrap();
    let shape = Shape::of(&schedule.program).expect("tables");
    let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
    let mut texts: Vec<(SequenceId, Vec<u32>)> =
        prompts.iter().map(|prompt| (pool.open().unwrap(), prompt.to_vec())).collect();
    let mut runs: Vec<Run> = vec![vec![]; prompts.len()];
    loop {
        let (mut rows, mut tokens, mut of) = (vec![], vec![], vec![]);
        for (s, (sequence, text)) in texts.iter().enumerate() {
            let done = runs[s].len();
            let most = chunk.min(MANY.rows as usize - rows.len()).min(text.len() - done);
            pool.reserve(*sequence, (done + most) as u32).unwrap();
            for (position, &token) in (0..).zip(text).skip(done).take(most) {
                rows.push(row(*sequence, position));
                tokens.push(token);
                of.push(s);
            }
        }
        if rows.is_empty() {
            return runs;
        }
        let request = Request { rows, steps: 1, edits: pool.take_edits() };
        let record = |result: &monobloc::interp::StepResult<'_>| {
            let s = of[result.row];
            assert_eq!(runs[s].len(), result.position as usize);
            let logits = result.logits.to_vec();
            runs[s].push((result.token, bits(&logits)));
            let text = &mut texts[s].1;
            if runs[s].len() == text.len() && text.len() < length(imported, prompts[s]) {
                text.push(best(&logits));
            }
        };
        interp.launch_rows(guard.admit(&request).unwrap(), &tokens, record).unwrap();
    }
}

/// The most likely token, of equal ones the first.
fn best(logits: &[f32]) -> u32 {
    (0..).zip(logits).reduce(|a, b| if b.1 > a.1 { b } else { a }).expect("logits").0
}

#[test]
fn a_prompt_in_chunks_beside_other_rows_is_the_prompt_alone() {
    let imported = tinystories();
    let prompts: [&[u32]; 3] = [&FIRST, &SECOND, &FIRST[2..9]];
    let fp32 = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    for precision in [fp32, bf16, Precision { cache: DType::E4m3, ..bf16 }] {
        let options = |order| Options { arithmetic: Arithmetic::Fast, order };
        let expected = prompts.map(|prompt| alone(&imported, precision, options(Order::Threads(2)), prompt));
        let orders = [Order::Threads(1), Order::Threads(3), Order::Adversarial { seed: 5 }];
        for (order, chunk) in orders.iter().flat_map(|order| [1, 3, 7, 16].map(|chunk| (*order, chunk))) {
            let found = served(&imported, precision, options(order), &prompts, chunk);
            assert!(found == expected, "{precision:?}, {order:?}, chunks of {chunk}");
        }
    }
}

#[test]
fn a_row_has_the_bits_that_it_has_alone_in_batches_of_2_5_and_16() {
    let imported = tinystories();
    let prompts: Vec<Vec<u32>> =
        (0..16).map(|s| FIRST.iter().map(|id| (id + 7 * s) % 512).take(3 + s as usize % 8).collect()).collect();
    let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
    for dtype in [DType::F32, DType::Bf16] {
        let precision = Precision { weights: dtype, cache: dtype, wire: dtype };
        let expected: Vec<Run> = prompts.iter().map(|prompt| alone(&imported, precision, options, prompt)).collect();
        for (count, chunk) in [(2, 1), (5, 7), (16, 1), (16, 16)] {
            let of: Vec<&[u32]> = prompts[..count].iter().map(Vec::as_slice).collect();
            let found = served(&imported, precision, options, &of, chunk);
            assert!(found == expected[..count], "{dtype}, {count} sequences, chunks of {chunk}");
        }
    }
}

/// fp32 against fp32 in another order (tests/fixtures/README.md).
const LOGITS_TOLERANCE: f32 = 3e-4;

/// Windows, softcaps, parallel blocks, post norms, biases, norms of q and k, matrices of codes: every checkpoint computes the same in
/// rows and chunks as one position at a time, and agrees with transformers.
#[test]
fn every_checkpoint_has_the_same_bits_in_rows_and_chunks() {
    let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(1) };
    let mut wrong = vec![];
    for name in ["families", "variants", "experts", "quantised"].map(checkpoints).concat() {
        let imported = import(&fixture(&name)).unwrap();
        let goldens = Goldens::open(&name);
        let ids = goldens.ids("input_ids");
        let ids = &ids[..ids.len().min(CONTEXT_MAX as usize - 4)];
        let prompts = [ids, &ids[ids.len().min(3)..]];
        let prompts: Vec<&[u32]> = prompts.into_iter().filter(|prompt| !prompt.is_empty()).collect();
        for dtype in [DType::F32, DType::Bf16] {
            let precision = Precision { weights: dtype, cache: dtype, wire: dtype };
            let expected: Vec<Run> =
                prompts.iter().map(|prompt| alone(&imported, precision, options, prompt)).collect();
            for chunk in [1, 7, 16] {
                let found = served(&imported, precision, options, &prompts, chunk);
                if found != expected {
                    wrong.push(format!("{name} in {dtype}, chunks of {chunk}"));
                }
                let logits: Vec<f32> =
                    found[0][..ids.len()].iter().flat_map(|at| &at.1).copied().map(f32::from_bits).collect();
                let difference = max_difference(&logits, &goldens.floats("logits")[..logits.len()]);
                if dtype == DType::F32 && difference > LOGITS_TOLERANCE {
                    wrong.push(format!("{name} in chunks of {chunk} differs from its golden by {difference}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Every format that weights are rounded to, with and without scales of rows and of groups.
#[test]
fn matrices_of_codes_have_the_same_bits_in_rows_and_chunks() {
    let precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    let prompts: Vec<Vec<u32>> = (1..10).map(|n| (0..n + 3).map(|at| at * (n + 6) % 61).collect()).collect();
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    for (name, format) in NAMED {
        let imported = rounded(import_config_only(ODD, 3).unwrap(), &all(format));
        for order in [Order::Threads(2), Order::Adversarial { seed: 7 }] {
            let options = Options { arithmetic: Arithmetic::Fast, order };
            let expected: Vec<Run> =
                prompts.iter().map(|prompt| alone(&imported, precision, options, prompt)).collect();
            for chunk in [1, 7] {
                let found = served(&imported, precision, options, &prompts, chunk);
                assert!(found == expected, "{name}, {order:?}, chunks of {chunk}");
            }
        }
    }
}

/// A text of the session below.
struct Open {
    sequence: SequenceId,
    text: Vec<u32>,
    /// Positions that are decoded.
    filled: usize,
    /// Tokens that were given; the rest was decided.
    given: usize,
    most: usize,
}

/// Thousands of launches in which sequences join, leave, fork and are cancelled at any time. Each text gets the same tokens as
/// alone, with one step or several in a launch.
#[test]
fn forks_and_cancels_do_not_change_other_sequences() {
    const ROWS: usize = 8;
    for (name, seed) in [("families/llama-gqa", 1), ("families/mistral-swa", 2)] {
        let imported = import(&fixture(name)).unwrap();
        let vocab = imported.graph.vocab as usize;
        let precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
        let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(1) };
        let batch = Batch { rows: ROWS as u32, sequences: 6, pages: 26, page_rows: 4, words: false };
        let (schedule, one) = (place(&imported, precision, Some(&batch)), place(&imported, precision, None));
        let mut interp = Interp::new(&schedule, packed(&imported, &schedule), options).unwrap();
        let mut alone = Interp::new(&one, packed(&imported, &one), options).unwrap();
        let shape = Shape::of(&schedule.program).unwrap();
        let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
        let mut random = Random::new(seed);
        let mut open: Vec<Open> = vec![];
        let (mut launches, mut decided, mut forks, mut cancels, mut chunks, mut several) = (0, 0, 0, 0, 0, 0);
        let mut check = |open: &Open, decided: &mut usize| {
            if open.filled > 0 {
                let logits = alone.logits(&open.text[..open.filled]).unwrap();
                let expected = logits.iter().map(|logits| best(logits)).skip(open.given - 1);
                let found = &open.text[open.given..];
                assert!(expected.take(found.len()).eq(found.iter().copied()), "{name}: {:?}", open.text);
                *decided += found.len();
            }
        };
        while launches < 3000 {
            let some = |random: &mut Random| -> Vec<u32> {
                (0..1 + random.below(10)).map(|_| random.below(vocab) as u32).collect()
            };
            match random.below(16) {
                0..4 => {
                    if let Ok(sequence) = pool.open() {
                        let text = some(&mut random);
                        let (given, most) = (text.len(), text.len() + random.below(CONTEXT_MAX as usize - text.len()));
                        open.push(Open { sequence, text, filled: 0, given, most });
                    }
                }
                4 if !open.is_empty() => {
                    let parent = &open[random.below(open.len())];
                    let shared = parent.filled / 4 * 4;
                    if shared + 11 <= CONTEXT_MAX as usize
                        && let Ok(sequence) = pool.fork(parent.sequence, shared as u32)
                    {
                        let text = [parent.text[..shared].to_vec(), some(&mut random)].concat();
                        let (given, most) =
                            (text.len(), text.len() + random.below(1 + CONTEXT_MAX as usize - text.len()));
                        forks += u32::from(shared > 0);
                        open.push(Open { sequence, text, filled: shared, given, most });
                    }
                }
                5 if !open.is_empty() => {
                    let left = open.swap_remove(random.below(open.len()));
                    pool.close(left.sequence).unwrap();
                    check(&left, &mut decided);
                    cancels += 1;
                }
                _ => {}
            }
            // Some launches have several steps, for sequences that decode and have room.
            let steps = if random.below(6) == 0 { 2 + random.below(2) } else { 1 };
            let (mut rows, mut tokens, mut of) = (vec![], vec![], vec![]);
            let first = random.below(open.len().max(1));
            for at in (0..open.len()).map(|at| (first + at) % open.len()) {
                let Open { sequence, text, filled, .. } = &open[at];
                let pending = text.len() - filled;
                let count = if steps > 1 { usize::from(pending == 1) } else { 1 + random.below(pending) };
                let count = count.min(ROWS - rows.len());
                let end = filled + count + steps - 1;
                if count == 0 || random.below(8) == 0 || end > CONTEXT_MAX as usize {
                    continue;
                }
                pool.drop_behind(*sequence, *filled as u32).unwrap();
                if pool.reserve(*sequence, end as u32).is_err() {
                    continue;
                }
                chunks += u32::from(count > 1);
                for (position, &token) in text.iter().enumerate().skip(*filled).take(count) {
                    let wants_logits = steps > 1 || position + 1 == text.len() || random.below(2) == 0;
                    rows.push(Row { wants_logits, ..row(*sequence, position as u32) });
                    tokens.push(token);
                    of.push(at);
                }
            }
            if rows.is_empty() {
                continue;
            }
            let request = Request { rows, steps: steps as u32, edits: pool.take_edits() };
            let record = |result: &monobloc::interp::StepResult<'_>| {
                let of = &mut open[of[result.row]];
                assert_eq!((of.filled, of.text[of.filled]), (result.position as usize, result.token));
                of.filled += 1;
                if of.filled == of.text.len() {
                    of.text.push(best(&result.logits.to_vec()));
                }
            };
            interp.launch_rows(guard.admit(&request).unwrap(), &tokens, record).unwrap();
            launches += 1;
            several += u32::from(steps > 1);
            for done in open.extract_if(.., |open| open.text.len() > open.most.max(open.given)) {
                pool.close(done.sequence).unwrap();
                check(&done, &mut decided);
            }
        }
        let counts = format!(
            "{name}: {decided} decided, {forks} forks, {cancels} cancels, {chunks} chunks, {several} of several steps"
        );
        assert!(decided > 1500 && forks > 10 && cancels > 50 && chunks > 200 && several > 100, "{counts}");
    }
}

#[test]
fn a_text_in_chunks_continues_from_any_position() {
    let imported = tinystories();
    for dtype in [DType::F32, DType::Bf16] {
        let precision = Precision { weights: dtype, cache: dtype, wire: dtype };
        let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
        let batch = Batch { rows: 4, sequences: 1, pages: 6, page_rows: 4, words: false };
        let (one, rows) = (place(&imported, precision, None), place(&imported, precision, Some(&batch)));
        // One pack for both.
        let pack = packed(&imported, &one);
        assert!((*pack).as_ref() == (*packed(&imported, &rows)).as_ref());
        let mut expected = Interp::new(&one, pack.clone(), options).unwrap();
        let mut text = Interp::of_text(&rows, pack, options).unwrap();
        assert_eq!(text.logits(&FIRST), expected.logits(&FIRST));
        assert_eq!((text.position(), text.selected()), (expected.position(), expected.selected()));
        let go_on = |_| std::ops::ControlFlow::Continue(());
        assert_eq!(text.greedy(&SECOND, 12, go_on), expected.greedy(&SECOND, 12, go_on));
        // A text continues from any of its positions.
        for interp in [&mut text, &mut expected] {
            interp.seek(2).unwrap();
        }
        let input = Input::Token(77);
        assert_eq!(text.step(input), expected.step(input));
        let chosen = |interp: &mut Interp| interp.generate(&FIRST, 5, |logits| Some(best(logits)));
        assert_eq!(chosen(&mut text), chosen(&mut expected));
        // A caller that stops inside a chunk continues after the last row that it saw.
        text.reset();
        let inputs: Vec<Input> = FIRST.iter().copied().map(Input::Token).collect();
        let stop = |step: &monobloc::interp::StepResult<'_>| match step.position {
            5 => std::ops::ControlFlow::Break(()),
            _ => std::ops::ControlFlow::Continue(()),
        };
        text.launch(&inputs, stop).unwrap();
        assert_eq!((text.position(), text.selected()), (6, None));
        expected.logits(&FIRST[..6]).unwrap();
        assert_eq!(text.step(input), expected.step(input));
        let beyond = text.seek(CONTEXT_MAX);
        assert!(matches!(beyond, Err(InterpError::Position { .. })), "{beyond:?}");
        text.seek(20).unwrap();
        assert!(matches!(text.step(input), Err(InterpError::Refused(_))), "positions that were never written");
    }
}

#[test]
fn the_head_is_computed_for_rows_that_want_logits() {
    let imported = tinystories();
    let precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    for order in [Order::Threads(2), Order::Adversarial { seed: 6 }] {
        let options = Options { arithmetic: Arithmetic::Fast, order };
        let schedule = place(&imported, precision, Some(&MANY));
        let mut interp = Interp::new(&schedule, packed(&imported, &schedule), options).unwrap();
        let mut guard = Guard::new(Shape::of(&schedule.program).unwrap());
        let edits = (0..3).map(|page| Edit { sequence: SequenceId(1), block: page, page: Some(PageId(page)) });
        let rows = (0..11).map(|at| Row { wants_logits: at == 10, ..row(SequenceId(1), at) });
        let request = Request { rows: rows.collect(), steps: 1, edits: edits.collect() };
        let mut found = vec![];
        let record = |result: &monobloc::interp::StepResult<'_>| found.push(bits(&result.logits.to_vec()));
        interp.launch_rows(guard.admit(&request).unwrap(), &FIRST, record).unwrap();
        assert!(found[..10].iter().all(Vec::is_empty));
        assert_eq!(found[10], alone(&imported, precision, options, &FIRST)[10].1);
    }
}

#[test]
fn a_program_with_tables_runs_with_its_own_tables_only() {
    let imported = tinystories();
    let precision = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(1) };
    let schedule = place(&imported, precision, Some(&BATCH));
    let shape = Shape::of(&schedule.program).unwrap();
    assert_eq!(
        shape,
        Shape {
            rows: 2,
            sequences: 3,
            context_max: CONTEXT_MAX,
            page_rows: 4,
            pages: 10,
            window: None,
            has_state: false
        }
    );
    let pack = packed(&imported, &schedule);
    let mut interp = Interp::new(&schedule, pack, options).unwrap();
    let tables = |error: Result<(), InterpError>| matches!(error, Err(InterpError::Tables { .. }));
    assert!(tables(interp.step(Input::Token(1)).map(|_| ())));
    assert!(tables(interp.seek(3)));
    let row = |s: u32| row(SequenceId(s), 0);
    let page = |s: u32| Edit { sequence: SequenceId(s), block: 0, page: Some(PageId(s)) };
    let request = Request { rows: vec![row(0), row(1)], steps: 1, edits: vec![page(0), page(1)] };
    let mut other = Guard::new(Shape { pages: 11, ..shape });
    assert!(tables(interp.launch_rows(other.admit(&request).unwrap(), &[1, 1], |_| ())));
    let mut guard = Guard::new(shape);
    assert!(tables(interp.launch_rows(guard.admit(&request).unwrap(), &[1], |_| ())));
    let again = Request { edits: vec![], ..request };
    let beyond = interp.launch_rows(guard.admit(&again).unwrap(), &[1, 1 << 20], |_| ());
    assert!(matches!(beyond, Err(InterpError::Token { .. })), "{beyond:?}");
    assert_eq!(interp.launch_rows(guard.admit(&again).unwrap(), &[1, 1], |_| ()), Ok(()));
}

/// Every interleaving, if there are few enough.
const EFFORT: Effort = Effort { steps: 3, states_max: 20_000, walks: 8, stores: 40, seed: 1 };

/// A class of mutants: its name, the rule that refuses it, the kinds of fault if it is executed anyway, and the mutation.
type Class = (&'static str, Rule, &'static [Kind], fn(&mut Schedule));

/// Asserts that the schedule is proven and runs, and that each class of mutants is refused and goes wrong.
#[track_caller]
pub fn both_judges((schedule, target): (Schedule, Target), effort: &Effort, classes: &[Class]) {
    assert_eq!(parse(&print(&schedule)).as_ref(), Ok(&schedule));
    let violations = check(&schedule, &target);
    assert!(violations.is_empty(), "{}", listed(&violations));
    let verdict = judge(&schedule, &target, effort);
    assert!(!verdict.is_unsafe(), "{verdict:?}");
    for (name, rule, kinds, mutate) in classes {
        let mut broken = schedule.clone();
        mutate(&mut broken);
        let violations = check(&broken, &target);
        assert!(
            violations.iter().any(|v| v.rule == *rule),
            "{name}: expected `{rule}`, found\n{}",
            listed(&violations)
        );
        match judge(&broken, &target, effort) {
            Verdict::Unsafe(fault) => assert!(kinds.contains(&fault.kind), "{name}: expected {kinds:?}, found {fault}"),
            safe => panic!("{name}: expected {kinds:?}, found {safe:?}"),
        }
    }
}

fn without(s: &mut Schedule, fact: Fact) {
    s.program.tables.iter_mut().for_each(|table| table.facts.retain(|other| *other != fact));
}

#[test]
fn both_judges_know_two_rows_with_pages() {
    both_judges(
        two_rows(),
        &EFFORT,
        &[
            ("one sequence in both rows", Rule::TableFact, &[Kind::Invisible], |s| without(s, Fact::Consecutive)),
            ("one page for both rows", Rule::TableFact, &[Kind::Clobbered], |s| without(s, Fact::Distinct)),
            ("a page of the past", Rule::TableFact, &[Kind::Clobbered], |s| without(s, Fact::Unshared)),
            ("a past that is not written", Rule::TableFact, &[Kind::Unwritten], |s| without(s, Fact::Filled)),
            ("pages beyond the cache", Rule::OutOfBounds, &[Kind::OutOfBounds], |s| s.program.tables[2].bound += 1),
            ("the event of the other row", Rule::MissingWait, &[Kind::Unwritten, Kind::Stale, Kind::Invisible], |s| {
                let qkv = buffer(s, "qkv.0");
                let events = s.regimes[0].events.iter_mut();
                events.filter(|e| e.buffer == qkv && e.row == Some(1)).for_each(|e| e.row = Some(0));
            }),
            ("a row without a task", Rule::LaunchMissing, &[Kind::Malformed], |s| {
                let tasks = s.regimes[0].tasks.iter_mut();
                tasks.filter(|task| task.row == 1).for_each(|task| task.row = 0);
            }),
        ],
    );
}

#[test]
fn both_judges_know_words() {
    both_judges(
        words(),
        &Effort { stores: usize::MAX, ..EFFORT },
        &[
            ("an SM that does not release what it cleared", Rule::WordsUnseen, &[Kind::Stale], release_nothing_last),
            ("a reader that does not wait", Rule::MissingWait, &[Kind::Unwritten, Kind::Stale, Kind::Invisible], |s| {
                let reader = task(s, 0, "gate_up.0", 0);
                s.regimes[0].tasks[reader.index()].waits.clear();
            }),
            ("words of one phase", Rule::Words, &[Kind::Malformed], |s| {
                let qkv = buffer(s, "qkv.0");
                s.program.buffers[qkv.index()].phases = 1;
            }),
            ("packets about words", Rule::Words, &[Kind::Malformed], |s| {
                let qkv = buffer(s, "qkv.0");
                let events = s.regimes[0].events.iter_mut();
                events.filter(|e| e.buffer == qkv).for_each(|e| e.mechanism = Mechanism::Packets);
            }),
        ],
    );
}

/// Formats change the streamed bytes, but no wait.
#[test]
fn both_judges_know_words_of_matrices_of_codes() {
    for format in [NAMED[2].1, NAMED[6].1] {
        both_judges(
            words_of(Some(format)),
            &Effort { stores: usize::MAX, ..EFFORT },
            &[(
                "a reader that does not wait",
                Rule::MissingWait,
                &[Kind::Unwritten, Kind::Stale, Kind::Invisible],
                |s| {
                    let reader = task(s, 0, "gate_up.0", 0);
                    s.regimes[0].tasks[reader.index()].waits.clear();
                },
            )],
        );
    }
}

/// One table of pages with two sizes of pages. The lookup knows one size, and would access memory beyond the smaller cache.
#[test]
fn both_judges_know_one_size_of_pages() {
    let halves = |s: &mut Schedule| {
        let values = buffer(s, "v.0").index();
        let cache = &mut s.program.buffers[values];
        let paging = cache.paging.as_mut().expect("pages");
        paging.rows /= 2;
        cache.rows /= 2;
        s.program.tables[paging.table.index()].cols *= 2;
    };
    for base in [two_rows(), words()] {
        both_judges(base, &EFFORT, &[("values in smaller pages", Rule::Table, &[Kind::OutOfBounds], halves)]);
    }
}

/// A block owns columns of the residual by several tasks of a grid. Each row of the block begins after all of its columns.
#[test]
fn rows_of_a_residual_do_not_overlap() {
    let (mut s, target) = words();
    let cols = |s: &Schedule| {
        let proven = validate(s.clone(), &target).unwrap_or_else(|rejected| panic!("{rejected}"));
        let text = emit(&proven, &target, Trace::Off).text;
        let (_, rest) = text.split_once("RESIDUAL_COLS = ").expect("the columns of a row");
        rest.chars().take_while(char::is_ascii_digit).collect::<String>()
    };
    assert_eq!(cols(&s), "8");
    for name in ["embed", "o.0", "down.0"] {
        let (first, second) = (task(&s, 0, name, 0), task(&s, 0, name, 1));
        let queues = &mut s.regimes[0].queues;
        queues.iter_mut().for_each(|queue| queue.retain(|id| *id != second));
        let (queue, at) =
            queues.iter_mut().find_map(|q| q.iter().position(|id| *id == first).map(|at| (q, at))).expect("its place");
        queue.insert(at + 1, second);
    }
    restream(&mut s);
    let mut end = 0;
    for part in &mut s.machine.smem {
        let more = if matches!(part.kind, SmemKind::Residual | SmemKind::Queue) { 1024 } else { 0 };
        (part.offset, part.bytes) = (end, part.bytes + more);
        end += part.bytes.next_multiple_of(128);
    }
    let rejected = validate(s.clone(), &target).expect_err("too few columns").violations;
    assert!(rejected.iter().all(|violation| violation.rule == Rule::KernelRows), "{rejected:?}");
    s.machine.residual_cols = 16;
    assert_eq!(cols(&s), "16");
}

/// A fault of the second of two kernels over one cache; alone, each kernel is proven.
type BrokenBeside = (&'static str, &'static str, &'static [Kind], fn(&mut Schedule));

#[test]
fn both_judges_know_kernels_over_one_cache() {
    let target = h200();
    let proven = |s: &Schedule| validate(s.clone(), &target).unwrap_or_else(|rejected| panic!("{rejected}"));
    let sound = over_one_cache();
    let [one, two] = sound.each_ref().map(proven);
    assert_eq!((share_caches(&one, &two), share_caches(&two, &one)), (Ok(()), Ok(())));
    let [a, b] = &sound;
    assert_eq!((judge_shared(a, b), judge_shared(b, a)), (Ok(()), Ok(())));
    const PLACES: &str = "caches at other places or of other sizes";
    const KEYS: &str = "keys at other places";
    let broken: [BrokenBeside; 10] = [
        ("keys as values", KEYS, &[Kind::Border], |s| {
            for (keys, values) in [(Role::HistoryK, Role::HistoryV), (Role::AppendK, Role::AppendV)] {
                let [k, v] = [keys, values].map(|role| operand(s, "attn.1", role).buffer);
                operand(s, "attn.1", keys).buffer = v;
                operand(s, "attn.1", values).buffer = k;
            }
        }),
        ("caches of the other layer", "keys or values by other weights", &[Kind::Border], |s| {
            for role in [Role::HistoryK, Role::HistoryV, Role::AppendK, Role::AppendV] {
                let [first, second] = ["attn.0", "attn.1"].map(|grid| operand(s, grid, role).buffer);
                operand(s, "attn.0", role).buffer = second;
                operand(s, "attn.1", role).buffer = first;
            }
        }),
        ("caches of its own", KEYS, &[Kind::Unwritten], |s| fresh_caches(s, "attn.0")),
        ("values elsewhere", PLACES, &[Kind::Unwritten], |s| {
            let values = buffer(s, "v.1").index();
            s.placement[values] = Some(1 << 24);
        }),
        ("larger pages", PLACES, &[Kind::Unwritten], |s| {
            s.program.buffers.iter_mut().filter_map(|b| b.paging.as_mut()).for_each(|paging| paging.rows *= 2);
            let pages = s.program.tables.iter_mut().find(|table| table.holds == Holds::Pages).expect("pages");
            pages.bound /= 2;
        }),
        ("more rows of a head", PLACES, &[Kind::Unwritten], |s| {
            let last = s.program.buffers.iter_mut().rfind(|b| b.paging.is_some()).expect("a cache");
            last.rows += 32;
        }),
        ("another window", "other attributes", &[Kind::Border], |s| attention(s, 1).window = Some(7)),
        ("another scale", "other attributes", &[Kind::Border], |s| attention(s, 1).scale *= 2.0),
        ("half of a head turned", "other attributes", &[Kind::Border], |s| attention(s, 0).interleaved = true),
        ("another rope", "other norms or another rope", &[Kind::Border], |s| {
            let rope = operand(s, "attn.0", Role::Rope).buffer.index();
            s.program.buffers[rope].content = Some(Content::RopeTable(RopeId(7)));
        }),
    ];
    for (name, what, kinds, change) in broken {
        let mut other = sound[1].clone();
        change(&mut other);
        let differs = share_caches(&one, &proven(&other)).expect_err(name);
        assert_eq!(differs.what, what, "{name}: {differs}");
        let fault = judge_shared(a, &other).expect_err(name);
        assert!(kinds.contains(&fault.kind), "{name}: {fault}");
    }
    // Rows in two layouts.
    let mut other = sound[0].clone();
    for variant in other.variants.values_mut() {
        if let Variant::Attention(variant) = variant {
            assert!(variant.swizzled);
            // Three do not divide the warps, so this is not for tensor cores.
            (variant.warps_per_head, variant.swizzled) = (3, false);
        }
    }
    let other_proven = validate(other.clone(), &beyond_kernels()).unwrap_or_else(|rejected| panic!("{rejected}"));
    assert_eq!(share_caches(&other_proven, &two).expect_err("two layouts").what, "rows of another layout");
    assert_eq!(judge_shared(&other, b).expect_err("two layouts").kind, Kind::Border);
}

fn attention(s: &mut Schedule, nth: usize) -> &mut Attention {
    let grids = s.program.grids.iter_mut();
    let mut all = grids.filter_map(|grid| if let Op::Attention(a) = &mut grid.op { Some(a) } else { None });
    all.nth(nth).expect("attention")
}

#[test]
fn the_story_of_a_deadlock_names_the_choice() {
    let (mut s, target) = looked_up();
    let (expert, route) = (task(&s, 0, "gate_up.0", 1), task(&s, 0, "route.0", 0));
    swap_queued(&mut s, 0, expert, route);
    restream(&mut s);
    let violations = check(&s, &target);
    let story: Vec<String> = violations[0].witness.iter().map(|w| format!("{}: {}", w.entity, w.note)).collect();
    assert!(story.iter().any(|line| line.starts_with(&format!("{expert} of r0: on sm1 waits"))), "{story:?}");
    assert!(story.iter().any(|line| line.starts_with(&format!("{route} of r0: on sm1 signals"))), "{story:?}");
}

#[test]
fn both_judges_know_an_event_between_two_devices() {
    both_judges(
        two_devices(),
        &EFFORT,
        &[
            ("an event of one device", Rule::Scope, &[Kind::Invisible], |s| {
                let x = buffer(s, "x.0");
                let events = s.regimes[0].events.iter_mut();
                events.filter(|e| e.buffer == x).for_each(|e| e.scope = Scope::Device);
            }),
            // Each event alone would be right, because its signallers and waiters are on one device. The words are not.
            ("words of two scopes", Rule::Scope, &[Kind::Invisible], |s| {
                let qkv = buffer(s, "qkv.0");
                let at = s.regimes[0].events.iter().position(|e| e.buffer == qkv).expect("an event");
                let (all, half) = (s.regimes[0].events[at], 8);
                let narrow = EventId::from(s.regimes[0].events.len());
                let first = |t: &Task, s: &Schedule| {
                    let out = s.program.grids[t.grid.index()].operand(Role::Out);
                    out.is_some_and(|o| o.buffer == qkv && o.cols.range(t.lo, t.hi, t.j).0 < half)
                };
                let signals: Vec<bool> = s.regimes[0].tasks.iter().map(|t| first(t, s)).collect();
                let count = signals.iter().filter(|s| **s).count() as u32;
                s.regimes[0].events.push(Event { lo: 0, hi: half as u32, count, scope: Scope::Block, ..all });
                for (task, signals) in s.regimes[0].tasks.iter_mut().zip(signals) {
                    task.signals.extend(signals.then_some(narrow));
                }
            }),
            ("packets that land elsewhere", Rule::Home, &[Kind::Unwritten], |s| {
                let act = buffer(s, "act.0");
                s.program.buffers[act.index()].home = Home::Device(0);
            }),
            ("a cache that crosses", Rule::Home, &[Kind::Unwritten], |s| {
                let keys = buffer(s, "k.0");
                s.program.buffers[keys.index()].home = Home::Device(1);
            }),
        ],
    );
}
