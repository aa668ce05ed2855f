//! Owns which slot holds the recurrent state after which tokens, and which of them was used longest ago.

use std::collections::BTreeMap;

use super::prefix::Chain;
use crate::rows::SequenceId;

/// Snapshots of recurrent states, each at the end of a page and under the name of all tokens up to there.
#[derive(Debug, Default)]
pub struct Snapshots {
    slots: BTreeMap<Chain, (SequenceId, u64)>,
    /// Oldest first.
    by_use: BTreeMap<u64, Chain>,
    free: Vec<SequenceId>,
    clock: u64,
}

impl Snapshots {
    /// No snapshot yet; room for one in each of `slots`.
    pub fn over(slots: impl Iterator<Item = SequenceId>) -> Snapshots {
        let mut free: Vec<SequenceId> = slots.collect();
        free.reverse();
        Snapshots { free, ..Snapshots::default() }
    }

    /// Snapshots that are kept.
    pub fn kept(&self) -> usize {
        self.slots.len()
    }

    /// Snapshots that there is room for.
    pub fn most(&self) -> usize {
        self.slots.len() + self.free.len()
    }

    /// The slot with the state after the tokens of this name.
    pub fn find(&self, chain: Chain) -> Option<SequenceId> {
        self.slots.get(&chain).map(|(slot, _)| *slot)
    }

    /// Says that a snapshot was used now.
    pub fn touch(&mut self, chain: Chain) {
        let Some((_, last)) = self.slots.get_mut(&chain) else { return };
        self.by_use.remove(last);
        self.clock += 1;
        *last = self.clock;
        self.by_use.insert(self.clock, chain);
    }

    /// A slot for the state after the tokens of this name: a free one, or the one that was used longest ago. `None`: their state is kept
    /// already, or there are no slots.
    pub fn insert(&mut self, chain: Chain) -> Option<SequenceId> {
        if self.slots.contains_key(&chain) {
            self.touch(chain);
            return None;
        }
        if self.free.is_empty() {
            let (_, oldest) = self.by_use.first_key_value()?;
            self.forget(*oldest);
        }
        let slot = self.free.pop()?;
        self.slots.insert(chain, (slot, 0));
        self.touch(chain);
        Some(slot)
    }

    /// Drops a snapshot, if there is one.
    pub fn forget(&mut self, chain: Chain) {
        if let Some((slot, last)) = self.slots.remove(&chain) {
            self.by_use.remove(&last);
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_snapshot_used_longest_ago_makes_room() {
        let [a, b, c] = [1, 2, 3].map(|token| Chain::of(None, &[token]));
        let mut snapshots = Snapshots::over((4..6).map(SequenceId));
        assert_eq!([a, b].map(|chain| snapshots.insert(chain)), [Some(SequenceId(4)), Some(SequenceId(5))]);
        // What is kept already takes no slot, and counts as used.
        assert_eq!(snapshots.insert(a), None);
        assert_eq!(snapshots.insert(c), Some(SequenceId(5)));
        assert_eq!([a, b, c].map(|chain| snapshots.find(chain).is_some()), [true, false, true]);
        snapshots.forget(a);
        assert_eq!((snapshots.kept(), snapshots.most(), snapshots.insert(b)), (1, 2, Some(SequenceId(4))));
        assert_eq!(Snapshots::over(std::iter::empty()).insert(a), None);
    }
}
