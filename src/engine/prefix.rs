//! Owns which kept pages hold which tokens, and which of them was used longest ago.

use std::collections::BTreeMap;

use crate::digest::Digest;
use crate::pages::Pool;
use crate::rows::PageId;

/// Names all tokens from the first one to the end of a page. A digest, because tokens come from strangers: two different
/// prompts of one name would read each other's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chain(Digest);

impl Chain {
    /// The name of a page's tokens after those that `before` names; `None`: they are the first ones.
    pub fn of(before: Option<Chain>, tokens: &[u32]) -> Chain {
        let mut bytes = Vec::with_capacity(32 + 4 * tokens.len());
        if let Some(Chain(digest)) = &before {
            bytes.extend_from_slice(digest.as_bytes());
        }
        tokens.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
        Chain(Digest::of(&bytes))
    }
}

/// Pages that are kept for sequences to come, by what they hold.
#[derive(Debug, Default)]
pub struct Prefixes {
    pages: BTreeMap<Chain, PageId>,
    uses: BTreeMap<PageId, (Chain, u64)>,
    /// Oldest first.
    by_use: BTreeMap<u64, PageId>,
    clock: u64,
}

impl Prefixes {
    /// The page that holds the tokens of this name.
    pub fn find(&self, chain: Chain) -> Option<PageId> {
        self.pages.get(&chain).copied()
    }

    /// Keeps a full page under the name of its tokens, unless another page holds them.
    pub fn insert(&mut self, pool: &mut Pool, chain: Chain, page: PageId) {
        if !self.pages.contains_key(&chain) && pool.keep(page) {
            self.pages.insert(chain, page);
            self.uses.insert(page, (chain, 0));
            self.touch(page);
        }
    }

    /// Says that a page was used now.
    pub fn touch(&mut self, page: PageId) {
        let Some((_, last)) = self.uses.get_mut(&page) else { return };
        self.by_use.remove(last);
        self.clock += 1;
        *last = self.clock;
        self.by_use.insert(self.clock, page);
    }

    /// Frees the page that was used longest ago among those that no open sequence holds; what it held. `None`: there is none.
    pub fn free_one(&mut self, pool: &mut Pool) -> Option<Chain> {
        if pool.idle_pages() == 0 {
            return None;
        }
        let (&at, &page) = self.by_use.iter().find(|(_, page)| pool.holders(**page) == 1)?;
        self.by_use.remove(&at);
        let (chain, _) = self.uses.remove(&page)?;
        self.pages.remove(&chain);
        pool.let_go(page);
        Some(chain)
    }
}
