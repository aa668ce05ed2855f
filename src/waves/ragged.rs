//! Owns the choice between a wave kernel without KV splits and one with KV splits.

use super::{Action, Over, Plan};
use crate::ir::op::Op;
use crate::ir::program::Program;

/// Number of KV splits by which the longest history must exceed the mean of an SM. From there on, a kernel with KV splits is faster than one
/// without, for the same number of rows.
///
/// One SM reads a split of one KV head alone in about 6.5 us: 1.6 ms for 16,000 positions in 16 layers (docs/perf-log.md, entry 29). The deal and
/// the merge cost about 5 us a layer. At Llama-3.2-1B these bounds choose the faster kernel but for narrow ranges: at one above the average, a
/// kernel for 32 rows already gains 3 % by splits, and in place of the kernel for 8 rows it gains 6 % at three (entry 30).
pub(super) const MERGE_SPLITS: u32 = 2;

/// The same of a kernel for `rows` rows and one for fewer, whose tasks wait for words. Of 8 rows of Llama-3.2-1B a wave kernel for 32 takes 15 us a
/// layer longer than that, and one for 64 takes 24 us; of Llama-3.1-8B it is 12 and 32 us (entries 20 and 29).
fn gain_splits(rows: u32, others: u32) -> u32 {
    if others < rows { MERGE_SPLITS + rows / 16 } else { MERGE_SPLITS }
}

/// Says for which launches a plan with KV splits is faster than a kernel without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ragged {
    /// The different ways in which waves of attention cut histories, and the number of waves for each.
    cuts: Vec<(Cut, u32)>,
    /// Waves of attention, also those that cut no history: each adds to the cost of the kernel.
    attends: u32,
    sms: u32,
    rows: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// The window: positions that a row sees. `None`: all before it.
    window: Option<u32>,
    /// Positions of a split.
    split: u32,
    /// Tasks of a row: one for each group of heads.
    tasks: u32,
}

impl Ragged {
    /// `None`: the plan cuts no history of `program`.
    pub(super) fn of(plan: &Plan, program: &Program) -> Option<Ragged> {
        let (mut cuts, mut attends): (Vec<(Cut, u32)>, u32) = (vec![], 0);
        for wave in &plan.waves {
            let Action::AttendRow { splits, .. } = &wave.action else { continue };
            attends += 1;
            let over = plan.divisions.get(wave.division.index()).map(|division| &division.over);
            let op = program.grids.get(wave.grid.index()).map(|grid| &grid.op);
            let (Some(splits), Some(&Over::Heads { n: tasks, .. }), Some(Op::Attention(a))) = (splits, over, op) else {
                continue;
            };
            let cut = Cut { window: a.window, split: splits.positions, tasks };
            match cuts.iter_mut().find(|(of, _)| *of == cut) {
                Some((_, count)) => *count += 1,
                None => cuts.push((cut, 1)),
            }
        }
        (!cuts.is_empty()).then_some(Ragged { cuts, attends, sms: plan.machine.sms, rows: plan.rows })
    }

    /// Positions of the longest KV split.
    pub fn split_max(&self) -> u32 {
        self.cuts.iter().map(|(cut, _)| cut.split).max().unwrap_or(0)
    }

    /// Whether a launch of rows at `positions` is faster on this kernel than on one for `others` rows. Without splits, the wave ends
    /// when the SM with the longest history is done. With splits, it ends after the mean work per SM.
    pub fn gains(&self, positions: &[u32], others: u32) -> bool {
        let saved = |&(Cut { window, split, tasks }, count): &(Cut, u32)| {
            let seen = |position: u32| u64::from(window.map_or(position, |window| position.min(window)));
            let all: u64 = positions.iter().map(|&position| seen(position)).sum();
            let longest = positions.iter().map(|&position| seen(position)).max().unwrap_or(0);
            let average = all * u64::from(tasks) / u64::from(self.sms.max(1));
            longest.saturating_sub(average) / u64::from(split.max(1)) * u64::from(count)
        };
        let splits: u64 = self.cuts.iter().map(saved).sum();
        splits >= u64::from(gain_splits(self.rows, others)) * u64::from(self.attends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 layers of 8 groups of heads on 132 SMs, in splits of 1024 positions.
    fn alike(rows: u32) -> Ragged {
        Ragged { cuts: vec![(Cut { window: None, split: 1024, tasks: 8 }, 16)], attends: 16, sms: 132, rows }
    }

    /// One row at a position, and others at another one.
    fn mixed(long: u32, others: u32, count: usize) -> Vec<u32> {
        std::iter::once(long).chain(std::iter::repeat_n(others, count)).collect()
    }

    #[test]
    fn one_long_history_beside_short_ones_gains() {
        assert!(alike(32).gains(&mixed(100_000, 300, 16), 32));
        assert!(alike(32).gains(&mixed(16_000, 300, 7), 8));
        assert!(alike(64).gains(&mixed(100_000, 300, 63), 64));
        // Wherever it stands.
        let mut last = mixed(16_000, 300, 7);
        last.reverse();
        assert!(alike(32).gains(&last, 8));
    }

    #[test]
    fn histories_that_keep_all_sms_busy_do_not_gain() {
        assert!(!alike(32).gains(&[], 8));
        assert!(!alike(32).gains(&[300; 17], 32));
        assert!(!alike(32).gains(&[16_000; 17], 32));
        assert!(!alike(64).gains(&[1_000_000; 64], 64));
        // Few rows leave SMs idle, however alike they are.
        assert!(alike(32).gains(&[16_000; 4], 8));
    }

    #[test]
    fn a_longer_step_must_save_more() {
        // What an SM has on average: (long + 7 * 300) * 8 / 132 positions.
        let least = |rows, others| (0..200_000).find(|&long| alike(rows).gains(&mixed(long, 300, 7), others)).unwrap();
        assert_eq!([least(32, 32), least(64, 64), least(32, 8), least(64, 8)], [2315, 2315, 4495, 6675]);
    }

    /// Layers with a window save nothing beyond it, and cost as much as others.
    #[test]
    fn layers_with_a_window_count_by_what_they_see() {
        let cut = |window| Cut { window, split: 256, tasks: 4 };
        let of = |full: u32, windows: u32| Ragged {
            cuts: vec![(cut(None), full), (cut(Some(2048)), windows)],
            attends: 24,
            sms: 132,
            rows: 32,
        };
        let least = |of: Ragged| (0..1_000_000).find(|&long| of.gains(&mixed(long, 100, 7), 8)).unwrap();
        assert_eq!([least(of(24, 0)), least(of(4, 20)), least(of(4, 0))], [1077, 1077, 6357]);
    }
}
