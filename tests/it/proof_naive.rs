//! Tests that the proof and a second judge for order, races and proxies (`computed::naive`) agree on thousands of random mutants.

use crate::proof_support::*;
use computed::naive::race_free;
use monobloc::candidate::Candidate;
use monobloc::ir::TaskId;
use monobloc::ir::op::Op;
use monobloc::ir::program::Space;
use monobloc::ir::schedule::{Mechanism, Schedule, Task};
use monobloc::validate::{Rule, check};

/// Mutations that keep a schedule well-formed and its events whole, and may or may not break order.
fn mutate(s: &mut Schedule, random: &mut Random) {
    match random.below(8) {
        // Two tasks of one SM, the same in all regimes where both are there.
        0 | 1 => {
            let sm = random.below(s.regimes[0].queues.len());
            let queue = &s.regimes[0].queues[sm];
            let (a, b) = (queue[random.below(queue.len())], queue[random.below(queue.len())]);
            let name = |id: TaskId| s.regimes[0].tasks[id.index()].clone();
            let (a, b) = (name(a), name(b));
            for r in 0..s.regimes.len() {
                let find = |t: &Task| {
                    let mut tasks = s.regimes[r].tasks.iter();
                    tasks.position(|o| (o.grid, o.lo, o.j) == (t.grid, t.lo, t.j)).map(TaskId::from)
                };
                if let (Some(a), Some(b)) = (find(&a), find(&b)) {
                    swap_queued(s, r, a, b);
                }
            }
        }
        // Moves a task without a stream to any place of any SM.
        2 => {
            let r = random.below(s.regimes.len());
            let grids = &s.program.grids;
            let free = |t: &Task| matches!(grids[t.grid.index()].op, Op::Report | Op::AttentionMerge { .. });
            let tasks: Vec<usize> = (0..s.regimes[r].tasks.len()).filter(|&t| free(&s.regimes[r].tasks[t])).collect();
            let id = TaskId::from(tasks[random.below(tasks.len())]);
            let queues = &mut s.regimes[r].queues;
            queues.iter_mut().for_each(|q| q.retain(|t| *t != id));
            let sm = random.below(queues.len());
            let place = 1 + random.below(queues[sm].len());
            queues[sm].insert(place, id);
        }
        3 => {
            let buffers: Vec<usize> =
                (0..s.program.buffers.len()).filter(|&b| s.program.buffers[b].space == Space::Exchange).collect();
            let b = buffers[random.below(buffers.len())];
            let phases = 1 + random.below(3) as u32;
            s.program.buffers[b].phases = phases;
            s.placement[b] = Some((1 + b as u64) << 20);
        }
        4 => {
            let mechanism = [Mechanism::Packets, Mechanism::Fenced][random.below(2)];
            for regime in &mut s.regimes {
                regime.events.iter_mut().filter(|e| e.carried).for_each(|e| e.mechanism = mechanism);
            }
        }
        5 => {
            let r = random.below(s.regimes.len());
            let e = random.below(s.regimes[r].events.len());
            let event = &mut s.regimes[r].events[e];
            if event.carried {
                event.proxy = !event.proxy;
            } else if random.below(2) == 0 {
                event.mechanism = Mechanism::Fenced;
            }
        }
        6 if !s.program.grids.iter().any(|g| g.name == "extra")
            && s.program.buffers.iter().any(|b| b.name == "x.0") =>
        {
            let after = ["embed", "qkv.0", "o.0", "gate_up.1", "head"][random.below(5)];
            let sm = random.below(4);
            add_extra(s, after, [sm, sm]);
        }
        _ => {
            // Moves heads and splits of attention to other SMs, which read history that other SMs appended.
            let r = random.below(s.regimes.len());
            let grids = &s.program.grids;
            let attention = |t: &Task| matches!(grids[t.grid.index()].op, Op::Attention(_));
            let tasks: Vec<usize> =
                (0..s.regimes[r].tasks.len()).filter(|&t| attention(&s.regimes[r].tasks[t])).collect();
            let (a, b) = (tasks[random.below(tasks.len())], tasks[random.below(tasks.len())]);
            if s.regimes[r].tasks[a].grid == s.regimes[r].tasks[b].grid {
                swap_queued(s, r, TaskId::from(a), TaskId::from(b));
            }
        }
    }
    restream(s);
}

/// The rules that the second judge checks.
const JUDGED: [Rule; 5] =
    [Rule::Deadlock, Rule::OverwriteUnread, Rule::OverwriteUnordered, Rule::HistoryUnordered, Rule::MissingProxy];

#[test]
fn two_judges_agree_on_random_mutants() {
    let target = beyond_kernels();
    let base = Candidate { split_from: 4, ..on_h200(4) };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut safe, mut unsafe_, mut other) = ([0; 2], [0; 2], 0);
    for round in 0..1000 {
        // One position of either regime, or several of both.
        let split_from = [1, 3, 6][round % 3];
        // With a narrow residual, half of the SMs own none of it and are less tightly bound to the others.
        let hidden = [64, 16, 24][random.below(3)];
        // If every SM has all of it, fewer exchanges order the steps.
        let everywhere = random.below(3) == 0;
        let toy = Toy { context: 7, hidden, post_norms: everywhere, ..TOY };
        let candidate = Candidate { split_from, sums_everywhere: u32::from(everywhere), ..base.clone() };
        let mut s = toy.schedule(&h200(), &candidate);
        for _ in 0..1 + random.below(4) {
            mutate(&mut s, &mut random);
        }
        let violations = check(&s, &target);
        if violations.iter().any(|v| !JUDGED.contains(&v.rule)) {
            other += 1;
            continue;
        }
        let fine = race_free(&s, &target);
        assert_eq!(violations.is_empty(), fine, "round {round}: the second judge says {fine}\n{}", listed(&violations));
        let count = if fine { &mut safe } else { &mut unsafe_ };
        count[usize::from(everywhere)] += 1;
    }
    let counts = format!("{safe:?} safe, {unsafe_:?} unsafe, {other} broken otherwise");
    assert!(
        safe[0].min(unsafe_[0]) > 150 && safe[1].min(unsafe_[1]) > 50,
        "the mutants do not exercise both answers: {counts}"
    );
}
