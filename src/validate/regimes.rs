//! Group 1, regimes: the cross-regime invariants. The head of `validate` has the argument.

use super::wellformed::Writes;
use super::{Entity, Found, Rule, note};
use crate::ir::op::{Access, Attention, Op, PARTIAL_HEADER, Role};
use crate::ir::program::{Operand, Program, Space};
use crate::ir::schedule::{Regime, Schedule};
use crate::ir::{BufferId, GridId};
use std::collections::BTreeMap;

pub(super) fn check(schedule: &Schedule, writes: &[Writes], found: &mut Found) {
    outliving(schedule, writes, found);
    layouts(schedule, found);
    if !found.any() {
        results(schedule, found);
    }
}

/// Every regime writes the same columns of every cache and of all words. A row of the history was written by the regime of its
/// position, and any later regime may read it. A word is cleared by its owner in the step after the one that stored it, in whichever
/// regime that is.
fn outliving(schedule: &Schedule, writes: &[Writes], found: &mut Found) {
    for (b, buffer) in (0..).zip(&schedule.program.buffers) {
        let (rule, does) = match buffer.space {
            Space::Cache => (Rule::RegimeAppends, "appended"),
            Space::Exchange if buffer.words => (Rule::RegimeWords, "written, and so cleared,"),
            _ => continue,
        };
        let buffer = BufferId(b);
        let mut columns = writes.iter().map(|writes| merged_columns(writes, buffer));
        let expected = columns.next().unwrap_or_default();
        for (r, written) in (1..).zip(columns).filter(|(_, written)| *written != expected) {
            found.add_with(rule, Entity::Buffer(buffer), || {
                let message = format!(
                    "expected columns {} {does} in every regime, as in r0, found {} in r{r}",
                    listed(&expected),
                    listed(&written)
                );
                let writer =
                    [0, r].into_iter().find_map(|r| Some((r, writes.get(r as usize)?.buffer(buffer).first()?)));
                let does = if rule == Rule::RegimeAppends { "appends to it" } else { "writes them" };
                let writer = writer.map(|(r, region)| note(Entity::Task(r, region.task), does));
                (message, std::iter::once(note(Entity::Regime(r), "differs")).chain(writer).collect())
            });
        }
    }
}

/// The columns of `buffer` that a regime writes, as ascending ranges that do not touch.
fn merged_columns(writes: &Writes, buffer: BufferId) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = vec![];
    for region in writes.buffer(buffer) {
        match ranges.last_mut() {
            Some(last) if last.1 == region.lo => last.1 = region.hi,
            _ => ranges.push((region.lo, region.hi)),
        }
    }
    ranges
}

fn listed(ranges: &[(u32, u32)]) -> String {
    if ranges.is_empty() {
        return "none".to_string();
    }
    ranges.iter().map(|(lo, hi)| format!("{lo}..{hi}")).collect::<Vec<_>>().join(", ")
}

/// Grids that extend one cache lay out its rows alike: what one appends, the other reads.
fn layouts(schedule: &Schedule, found: &mut Found) {
    let mut first: BTreeMap<BufferId, (GridId, bool)> = BTreeMap::new();
    for (g, grid) in (0..).zip(&schedule.program.grids) {
        let id = GridId(g);
        let Some(variant) = schedule.attention_variant(id) else { continue };
        for cache in [Role::AppendK, Role::AppendV].into_iter().filter_map(|role| grid.operand(role)) {
            let (other, swizzled) = *first.entry(cache.buffer).or_insert((id, variant.swizzled));
            if swizzled != variant.swizzled {
                found.add_with(Rule::Alternatives, Entity::Grid(id), || {
                    let swizzled = u32::from(swizzled);
                    let message = format!("extends {}, expected `swizzled={swizzled}` as {other} has", cache.buffer);
                    (message, vec![note(Entity::Grid(other), "extends it too")])
                });
                break;
            }
        }
    }
}

/// Heads of an attention from `first` on, and the column where the first of them ends up. A merge that begins inside a
/// record makes none of them: then `first` counts values of records, and only the same merge is equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Heads {
    whole: bool,
    first: i64,
    count: u32,
    buffer: BufferId,
    column: u32,
}

/// Alternatives leave their heads in the same columns, directly or through a merge of their records. What no grid reads
/// is no result.
fn results(schedule: &Schedule, found: &mut Found) {
    let program = &schedule.program;
    let mut is_read = vec![false; program.buffers.len()];
    let reads = program.grids.iter().flat_map(|grid| &grid.operands).filter(|o| o.access == Access::Read);
    reads.for_each(|o| is_read[o.buffer.index()] = true);
    let mut first: BTreeMap<(BufferId, u32), (GridId, Vec<Heads>)> = BTreeMap::new();
    for (r, regime) in (0..).zip(&schedule.regimes) {
        let launched = launched(program, regime);
        let merges: Vec<Merge> = launched.iter().filter_map(|&id| Merge::of(id, program)).collect();
        for &id in &launched {
            let grid = &program.grids[id.index()];
            let (Op::Attention(a), Some(keys), Some(out)) =
                (&grid.op, grid.operand(Role::AppendK), grid.operand(Role::Out))
            else {
                continue;
            };
            let mut results = if a.splits == 1 {
                vec![Heads { whole: true, first: 0, count: a.heads, buffer: out.buffer, column: out.cols.base }]
            } else {
                merged_heads(a, out, &merges)
            };
            results.retain(|heads| is_read[heads.buffer.index()]);
            // Every regime appends to the same caches, so that each alternative has one in the first regime.
            let (other, expected) = first.entry((keys.buffer, keys.cols.base)).or_insert_with(|| (id, results.clone()));
            if *expected != results {
                found.add_with(Rule::Alternatives, Entity::Grid(id), || {
                    let message = format!(
                        "expected its result in r{r} where {other} leaves it in r0, {}, found {}",
                        places(expected),
                        places(&results)
                    );
                    (message, vec![note(Entity::Grid(*other), "extends the same cache")])
                });
            }
        }
    }
}

fn places(results: &[Heads]) -> String {
    if results.is_empty() {
        return "nowhere".to_string();
    }
    let place = |h: &Heads| {
        let Heads { whole, first, count, buffer, column } = *h;
        let what = if whole { "heads" } else { "heads that begin inside its records," };
        format!("{what} {first}..{} from column {column} of {buffer}", first + i64::from(count))
    };
    results.iter().map(place).collect::<Vec<_>>().join(", ")
}

/// The grids that have tasks in a regime, ascending.
fn launched(program: &Program, regime: &Regime) -> Vec<GridId> {
    let mut has_tasks = vec![false; program.grids.len()];
    regime.tasks.iter().for_each(|task| has_tasks[task.grid.index()] = true);
    (0..has_tasks.len()).filter(|&g| has_tasks[g]).map(GridId::from).collect()
}

/// A merge, as columns of records and columns of heads.
struct Merge<'a> {
    partial: &'a Operand,
    out: &'a Operand,
    heads: u32,
}

impl Merge<'_> {
    fn of(id: GridId, program: &Program) -> Option<Merge<'_>> {
        let grid = &program.grids[id.index()];
        let Op::AttentionMerge { .. } = grid.op else { return None };
        Some(Merge { partial: grid.operand(Role::Partial)?, out: grid.operand(Role::Out)?, heads: grid.n })
    }
}

/// Where the merges of a regime leave the heads whose records `out` begins with. That both mean the same records is
/// judged (`mixed-use`).
fn merged_heads(a: &Attention, out: &Operand, merges: &[Merge]) -> Vec<Heads> {
    // The records of one task's heads, over all shares. Sizes are judged to fit 32 bits.
    let records = i64::from(a.splits * a.heads_per_task * (a.head_dim + PARTIAL_HEADER));
    let mut results: Vec<Heads> = vec![];
    for merge in merges.iter().filter(|merge| merge.partial.buffer == out.buffer) {
        let (buffer, column) = (merge.out.buffer, merge.out.cols.base);
        let apart = i64::from(out.cols.base) - i64::from(merge.partial.cols.base);
        if apart % records != 0 {
            results.push(Heads { whole: false, first: apart, count: merge.heads, buffer, column });
            continue;
        }
        // The heads of this attention, counted as the merge counts.
        let begins = apart / records * i64::from(a.heads_per_task);
        let (lo, hi) = (begins.max(0), (begins + i64::from(a.heads)).min(i64::from(merge.heads)));
        if lo < hi {
            let column = column + lo as u32 * a.head_dim;
            results.push(Heads { whole: true, first: lo - begins, count: (hi - lo) as u32, buffer, column });
        }
    }
    results.sort_unstable();
    // Several merges may continue one another.
    results.dedup_by(|next, last| {
        let continues = next.whole
            && last.whole
            && next.first == last.first + i64::from(last.count)
            && next.buffer == last.buffer
            && next.column == last.column + last.count * a.head_dim;
        last.count += if continues { next.count } else { 0 };
        continues
    });
    results
}
