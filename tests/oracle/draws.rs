//! Makes tables that the host may write: any that keep the facts that a program declares, and no others.
//!
//! The proof argues from facts. This judge makes tables instead: one that keeps all facts, with pages out of order and up to the
//! bound, and for each fact that is not declared one that breaks it. If a run then goes wrong, the program is wrong, because
//! the host may write these tables.

use super::{Fault, Kind};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::table::{Fact, Holds};

/// The tables of the launch of one window, by row of the step.
#[derive(Debug, Clone)]
pub struct Draw {
    /// Positions in the first step of the window.
    pub positions: Vec<u32>,
    pub sequences: Vec<u32>,
    /// Positions below this are written.
    pub filled: Vec<u32>,
    /// Most steps of the launch.
    pub steps: u32,
    /// Pages by block of positions, and the rows of a page; `None`: a row for each position.
    pub pages: Option<(Vec<Vec<u32>>, u32)>,
}

impl Draw {
    /// The end of the history of row `row` in the first step: the position of the first row of its run, which is the rows of one
    /// sequence at consecutive positions up to this row.
    pub fn past(&self, row: usize) -> u32 {
        let leads = |r: &usize| {
            self.sequences[r - 1] == self.sequences[*r]
                && self.positions[r - 1].checked_add(1) == Some(self.positions[*r])
        };
        self.positions[row] - (1..=row).rev().take_while(leads).count() as u32
    }

    /// The first rows alone, as many as `rows`.
    fn first(mut self, rows: usize) -> Draw {
        self.positions.truncate(rows);
        self.sequences.truncate(rows);
        self.filled.truncate(rows);
        self.pages.iter_mut().for_each(|(pages, _)| pages.truncate(rows));
        self
    }

    /// What the rows choose in a step of the window: `slots` of `parts`, each once. By step, other experts: those of all rows differ, or are
    /// the same, or some are.
    pub fn choices(&self, step: usize, parts: u32, slots: u32) -> Vec<Vec<u32>> {
        let apart = match self.sequences.first() == self.sequences.last() {
            // One text, whose rows chose the same.
            true => 0,
            false => 1 + step as u32 % slots.max(1),
        };
        let of_row =
            |row: usize| (0..slots).map(|slot| (slot + row as u32 * apart + step as u32) % parts.max(1)).collect();
        (0..self.positions.len()).map(of_row).collect()
    }

    /// The cache row that holds `position` for row `row` of the step.
    pub fn place(&self, row: usize, position: u32) -> u64 {
        match &self.pages {
            Some((pages, rows)) => {
                let page = pages[row][(position / rows) as usize];
                u64::from(page) * u64::from(*rows) + u64::from(position % rows)
            }
            None => u64::from(position),
        }
    }
}

/// Tables for a window whose largest position begins at `from`.
pub fn draws(s: &Schedule, from: u32) -> Result<Vec<Draw>, Fault> {
    let p = &s.program;
    let rows = p.rows as usize;
    let paging = p.buffers.iter().find_map(|b| b.paging);
    let mut lawful = Draw {
        positions: (0..p.rows).map(|row| from.saturating_sub(2 * row)).collect(),
        sequences: (0..p.rows).collect(),
        filled: vec![],
        steps: u32::MAX,
        pages: None,
    };
    lawful.filled = lawful.positions.clone();
    let Some(paging) = paging else {
        if rows > 1 {
            return Err(Fault::new(Kind::Clobbered, "rows of different sequences in one place"));
        }
        return Ok(vec![lawful]);
    };
    let table = |holds: Holds| p.tables.iter().find(|t| t.holds == holds);
    let declared = |holds: Holds, fact: Fact| table(holds).is_some_and(|t| t.facts.contains(&fact));
    let blocks = p.context_max.div_ceil(paging.rows.max(1)) as usize;
    let Some(pages) = table(Holds::Pages).filter(|t| t.cols as usize >= blocks && paging.rows > 0) else {
        return Err(Fault::new(Kind::OutOfBounds, "pages beyond the table"));
    };
    if table(Holds::Positions).is_some_and(|t| t.bound != p.context_max) {
        return Err(Fault::new(Kind::OutOfBounds, "positions beyond the context"));
    }
    if (pages.bound as usize) < blocks * rows {
        return Err(Fault::new(Kind::Malformed, "too few pages for this judge"));
    }
    let page = |row: usize, block: usize| pages.bound - 1 - (block * rows + row) as u32;
    let all = (0..rows).map(|row| (0..blocks).map(|block| page(row, block)).collect()).collect();
    lawful.pages = Some((all, paging.rows));
    let mut draws = vec![lawful.clone()];
    if rows > 1 {
        // A launch of fewer rows.
        draws.push(lawful.clone().first(1));
        // Part of a prompt in all rows.
        let from = from.max(p.rows - 1);
        let (mut chunk, first) = (lawful.clone(), from - (p.rows - 1));
        chunk.positions = (first..=from).collect();
        chunk.sequences.fill(0);
        chunk.filled.fill(first);
        chunk.steps = 1;
        chunk.pages.iter_mut().for_each(|(pages, _)| {
            let of_first = pages[0].clone();
            pages.fill(of_first);
        });
        draws.push(chunk);
    }
    let mut broken = |fact: bool, change: &dyn Fn(&mut Draw, &mut Vec<Vec<u32>>) -> bool| {
        let mut draw = lawful.clone();
        let Some((mut pages, rows)) = draw.pages.take() else { return };
        if !fact && change(&mut draw, &mut pages) {
            draws.push(Draw { pages: Some((pages, rows)), ..draw });
        }
    };
    let each = paging.rows;
    if rows > 1 {
        // One sequence, the later position first.
        broken(declared(Holds::Sequences, Fact::Consecutive), &|draw, pages| {
            (draw.sequences[1], pages[1]) = (draw.sequences[0], pages[0].clone());
            draw.positions[1] = from.saturating_sub(1);
            draw.filled = vec![draw.positions[1]; rows];
            from > 0
        });
        // Two sequences at one position of one page.
        broken(declared(Holds::Pages, Fact::Distinct), &|draw, pages| {
            pages[1] = pages[0].clone();
            draw.positions[1] = from;
            draw.filled[1] = from;
            true
        });
        // One sequence reads, as its history, a page that the other one writes.
        broken(declared(Holds::Pages, Fact::Unshared), &|draw, pages| {
            pages[0][0] = pages[1][0];
            draw.positions[1] = from.saturating_sub(each).min(each - 1);
            draw.filled[1] = draw.positions[1];
            from >= each
        });
    }
    broken(declared(Holds::Positions, Fact::Filled), &|draw, _| {
        draw.filled[0] = draw.positions[0].saturating_sub(1);
        draw.positions[0] > 0
    });
    Ok(draws)
}
