//! Judges words on both sides of every border: the next step clears the words of a step, in any two regimes.

use super::footprint::Foot;
use super::{Fault, Kind};
use monobloc::ir::BufferId;
use monobloc::ir::schedule::Schedule;
use std::collections::BTreeSet;

/// A word, by its first column: buffer, row of the step, column.
type Word = (BufferId, u32, u32);

/// Runs three steps of any two regimes in turn, because a launch may end in any regime, and the next one may begin in any. The first
/// and the third step have the same phase, so words of the first must be cleared where a task of the third one polls.
pub fn judge(s: &Schedule, feet: &[Vec<Foot>]) -> Result<(), Fault> {
    for (first, second) in (0..feet.len()).flat_map(|a| (0..feet.len()).map(move |b| (a, b))) {
        let mut phases: [BTreeSet<Word>; 2] = Default::default();
        for (step, r) in [first, second, first].into_iter().enumerate() {
            let (own, other) = (step % 2, 1 - step % 2);
            let polled = words(s, &feet[r], |foot| foot.reads.iter());
            if let Some((buffer, row, col)) = polled.intersection(&phases[own]).next() {
                let what = format!(
                    "in r{r} a task polls column {col} of row {row} of {buffer}, which a step of r{first} has stored and one of \
                     r{second} has not cleared"
                );
                return Err(Fault::new(Kind::Stale, what));
            }
            let stored = words(s, &feet[r], |foot| foot.writes.iter());
            phases[other].retain(|word| !stored.contains(word));
            phases[own].extend(stored);
        }
    }
    Ok(())
}

fn words<'a, I: Iterator<Item = &'a super::footprint::Touch>>(
    s: &Schedule,
    feet: &'a [Foot],
    touched: impl Fn(&'a Foot) -> I,
) -> BTreeSet<Word> {
    let of_words = feet.iter().flat_map(touched).filter(|touch| s.program.buffers[touch.buffer.index()].words);
    of_words.flat_map(|touch| (touch.lo..touch.hi).map(|col| (touch.buffer, touch.row, col))).collect()
}
