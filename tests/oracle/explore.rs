//! Walks the machine: every interleaving of a small schedule, adversarial random ones of a large one.

use super::draws::draws;
use super::machine::{Plan, Poll, State, Window};
use super::{Fault, contents, states};
use monobloc::ir::schedule::Schedule;
use monobloc::target::Target;
use std::collections::HashSet;

/// Limits of a judgement.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Steps of a window.
    pub steps: u32,
    /// Most states of an exhaustive walk of one window; 0: no such walk.
    pub states_max: usize,
    /// Random walks of each window.
    pub walks: u32,
    /// Number of stores of each window that land as late as possible, one for each walk.
    pub stores: usize,
    pub seed: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// There is an execution that goes wrong.
    Unsafe(Fault),
    /// No walk went wrong; `exhaustive`: all walks were tried.
    Safe { exhaustive: bool },
}

impl Verdict {
    pub fn is_unsafe(&self) -> bool {
        matches!(self, Verdict::Unsafe(_))
    }
}

/// Late stores of a long window.
const STORES_OF_LONG: usize = 48;

/// Judges a schedule by running it.
pub fn judge(schedule: &Schedule, target: &Target, effort: &Effort) -> Verdict {
    match walk_all(schedule, target, effort) {
        Ok(exhaustive) => Verdict::Safe { exhaustive },
        Err(fault) => Verdict::Unsafe(fault),
    }
}

fn walk_all(schedule: &Schedule, target: &Target, effort: &Effort) -> Result<bool, Fault> {
    let plan = Plan::new(schedule, target)?;
    contents::judge(schedule)?;
    states::judge(schedule, plan.feet())?;
    let mut windows = vec![];
    for from in plan.windows(effort.steps) {
        for draw in draws(schedule, from)? {
            windows.push(Window::new(&plan, from, effort.steps, &draw)?);
        }
    }
    let long = plan.long_windows(effort.steps);
    let short = windows.len();
    for &(from, steps) in &long {
        for draw in draws(schedule, from)? {
            windows.push(Window::new(&plan, from, steps, &draw)?);
        }
    }
    // Cheap walks first, because they find most faults.
    let mut random = Rng(effort.seed | 1);
    for window in &mut windows {
        for nth in 0..effort.walks {
            for poll in [Poll::Counts, Poll::Tags] {
                window.poll = poll;
                walk(window, nth, &mut random)?;
            }
        }
    }
    for (at, window) in windows.iter_mut().enumerate() {
        let mut stores = window.stores();
        // In a long window, those without a reader come first.
        let most = if at < short { effort.stores } else { effort.stores.min(STORES_OF_LONG) };
        for nth in 0..most.min(stores.len()) {
            if at < short {
                let other = nth + random.below(stores.len() - nth);
                stores.swap(nth, other);
            }
            window.late = Some(stores[nth]);
            walk(window, nth as u32, &mut random)?;
        }
        window.late = None;
    }
    let mut exhaustive = effort.states_max > 0 && long.is_empty();
    windows.truncate(short);
    for window in windows.iter_mut().filter(|_| effort.states_max > 0) {
        for poll in [Poll::Counts, Poll::Tags] {
            window.poll = poll;
            exhaustive &= every_interleaving(window, effort.states_max)?;
        }
    }
    Ok(exhaustive)
}

/// Visits every reachable state; false if there are more than `states_max`.
pub fn every_interleaving(window: &Window, states_max: usize) -> Result<bool, Fault> {
    let mut seen: HashSet<u128> = HashSet::new();
    let start = window.start();
    seen.insert(hash(&start));
    let mut open: Vec<State> = vec![start];
    while let Some(state) = open.pop() {
        let mut stuck = true;
        for mover in 0..window.movers() {
            if !window.enabled(&state, mover) {
                continue;
            }
            stuck = false;
            let mut next = state.clone();
            window.apply(&mut next, mover)?;
            if seen.insert(hash(&next)) {
                if seen.len() > states_max {
                    return Ok(false);
                }
                open.push(next);
            }
        }
        if stuck && !window.over(&state) {
            return Err(window.hang(&state));
        }
    }
    Ok(true)
}

/// A 128-bit hash of a state. Two states with one hash would count as one, which was never observed.
fn hash(state: &State) -> u128 {
    let (mut a, mut b) = (0x9e37_79b9_7f4a_7c15u64, 0xc2b2_ae3d_27d4_eb4fu64);
    for &word in &state.0 {
        a = (a ^ u64::from(word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
        b = (b.rotate_left(31) ^ u64::from(word)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    }
    u128::from(a ^ (b >> 32)) << 64 | u128::from(b ^ (a >> 29))
}

/// xorshift64*.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize) % n.max(1)
    }
}

/// One run to the end in an adversarial order. Kinds of orders, by `nth`: any order; one block held back as long as any
/// other can move; fixed priorities with a few changes; one block held back after it passed its waits, before it reads.
fn walk(window: &Window, nth: u32, random: &mut Rng) -> Result<(), Fault> {
    // The late store moves when nothing else can.
    let movers = window.movers() - 1;
    let blocks = movers / 2;
    let mut state = window.start();
    let mut priority: Vec<usize> = (0..movers).collect();
    for i in (1..movers).rev() {
        priority.swap(i, random.below(i + 1));
    }
    let victim = random.below(blocks);
    let total: u32 = (0..blocks).map(|sm| window.progress(&state, sm).1).max().unwrap_or(0);
    let hold = random.below(total.max(1) as usize) as u32;
    let mut moves = 0usize;
    loop {
        // Late, but not so late that it does no harm.
        if window.overtaken(&state) {
            window.apply(&mut state, movers)?;
        }
        let held = |state: &State, mover: usize| {
            mover == victim
                && match nth % 4 {
                    1 => window.progress(state, victim).0 >= hold,
                    3 => window.progress(state, victim).0 >= hold && window.progress(state, victim).0 % 3 == 1,
                    _ => false,
                }
        };
        match nth % 4 {
            0 => {
                let i = random.below(movers);
                priority.swap(0, i);
                // The others follow in the order of their places.
                let j = random.below(movers);
                priority.swap(movers - 1, j);
            }
            _ if moves.is_multiple_of(97) => {
                let (i, j) = (random.below(movers), random.below(movers));
                priority.swap(i, j);
            }
            _ => {}
        }
        let free = priority.iter().copied().find(|&m| !held(&state, m) && window.enabled(&state, m));
        let any = priority.iter().copied().chain([movers]).find(|&m| window.enabled(&state, m));
        let Some(mover) = free.or(any) else {
            if window.over(&state) {
                return Ok(());
            }
            return Err(window.hang(&state));
        };
        window.apply(&mut state, mover)?;
        moves += 1;
    }
}
