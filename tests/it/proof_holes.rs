//! Tests every known way around the validator of the nearest prior system, and schedules that must not be refused.

use crate::nvrtc::nvrtc;
use crate::oracle::device::unproven;
use crate::oracle::entries::disagreement;
use crate::proof_support::*;
use monobloc::candidate::Candidate;
use monobloc::codegen::abi::encode;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::dtype::{DType, Precision};
use monobloc::error::{Fault, Tier};
use monobloc::ir::op::{Attention, Op, Role};
use monobloc::ir::program::{Cols, Space};
use monobloc::ir::schedule::{Event, Mechanism, Run, Schedule, SmemKind, Source, Wait};
use monobloc::ir::variant::Variant;
use monobloc::ir::{BufferId, EventId, GridId, SmId, TaskId};
use monobloc::target::{CopyMechanism, Spec, Target};
use monobloc::validate::{Entity, KEPT_PER_RULE, Rule, check, validate};

/// The rules that `mutate` breaks, in order of first appearance.
#[track_caller]
fn broken(mutate: impl FnOnce(&mut Schedule)) -> Vec<Rule> {
    let (mut schedule, target) = toy();
    mutate(&mut schedule);
    rules(&schedule, &target)
}

// ---- Large schedules: another validator did not look at races, coverage and aliasing above 8,000 tasks.

#[test]
fn more_than_8000_tasks_are_judged_like_few() {
    let deep = Toy { layers: 160, vocab: 512, ..TOY };
    let target = h200();
    let schedule = deep.schedule(&target, &on_h200(16));
    assert!(schedule.regimes[0].tasks.len() > 8001 && schedule.regimes[1].tasks.len() > 8001);
    assert_eq!(check(&schedule, &target), []);
    let last = schedule.regimes[0].tasks.len() - 1;
    let at_end = |mutate: &dyn Fn(&mut Schedule)| {
        let mut s = schedule.clone();
        mutate(&mut s);
        rules(&s, &target)
    };
    assert_eq!(at_end(&|s| s.regimes[0].tasks[last].waits.clear()), [Rule::MissingWait]);
    assert_eq!(at_end(&|s| s.regimes[0].tasks[last].hi -= 1), [Rule::LaunchMissing]);
    let aliased = buffer(&schedule, "act.159").index();
    assert_eq!(at_end(&|s| s.placement[aliased] = s.placement[aliased].map(|at| at - 256)), [Rule::PlacementOverlap]);
    let unfenced = |s: &mut Schedule| s.regimes.iter_mut().for_each(|r| r.events[0].mechanism = Mechanism::Packets);
    assert_eq!(at_end(&unfenced), [Rule::HistoryUnordered]);
}

#[test]
fn every_task_that_reads_what_no_task_writes_is_found() {
    let deep = Toy { layers: 120, ..TOY };
    let mut schedule = deep.schedule(&cpu(), &on_cpu(16));
    let never = BufferId::from(schedule.program.buffers.len());
    let mut like = schedule.program.buffers[buffer(&schedule, "x.0").index()].clone();
    like.name = "never".to_string();
    schedule.program.buffers.push(like);
    schedule.placement.push(Some(1 << 30));
    for grid in &mut schedule.program.grids {
        for operand in grid.operands.iter_mut().filter(|o| o.role == Role::X && o.cols.len == 64) {
            operand.buffer = never;
        }
    }
    let violations = check(&schedule, &cpu());
    let uncovered = |v: &&monobloc::validate::Violation| v.rule == Rule::Uncovered && v.entity == Entity::Buffer(never);
    assert_eq!(violations.iter().filter(uncovered).count(), 1, "{}", listed(&violations));
}

// ---- Deadlocks through the queues of several SMs, which that validator accepted.

#[test]
fn a_circle_through_two_queues_is_reported_as_one() {
    // sm1 would begin with layer 1, which waits for the other SMs, which wait for its part of layer 0.
    let (mut schedule, target) = toy();
    for r in 0..2 {
        let (a, b) = (task(&schedule, r, "qkv.0", 1), task(&schedule, r, "gate_up.1", 1));
        swap_queued(&mut schedule, r, a, b);
    }
    restream(&mut schedule);
    let violations = check(&schedule, &target);
    assert_eq!(rules(&schedule, &target), [Rule::Deadlock], "{}", listed(&violations));
    for violation in &violations {
        let story = &violation.witness;
        assert!(story.len() >= 2 && story.len() % 2 == 0, "{violation}");
        for pair in story.chunks(2) {
            assert!(pair[0].note.contains(" waits for ") && pair[1].note.contains(" signals "), "{violation}");
        }
        let sm = |note: &str| note.split_whitespace().nth(1).map(str::to_string);
        let last = story.last().and_then(|w| sm(&w.note));
        assert_eq!(sm(&story[0].note), last, "the story ends where it began\n{violation}");
    }
}

#[test]
fn a_task_that_waits_for_itself_is_refused() {
    let own = |s: &mut Schedule| {
        let task = &mut s.regimes[0].tasks[9];
        let event = task.signals[0];
        task.waits.push(Wait { event, count: 1 });
    };
    let rules = broken(own);
    assert!(rules.contains(&Rule::Carried), "{rules:?}");
}

// ---- Sizes, positions and attributes, which that validator did not check.

#[test]
fn operands_fit_the_shapes_of_their_buffers() {
    let k_too_long = |s: &mut Schedule| {
        let Op::MatVec(m) = &mut s.program.grids[7].op else { panic!("o.0") };
        m.k = 128;
    };
    assert_eq!(broken(k_too_long), [Rule::Shape]);
    assert_eq!(broken(|s| s.program.buffers[16].rows = 56), [Rule::Content, Rule::Shape]);
    assert_eq!(broken(|s| s.program.grids[3].n = 15), [Rule::Shape]);
    assert_eq!(broken(|s| s.program.grids[3].n = u32::MAX), [Rule::Shape]);
    assert_eq!(broken(|s| operand(s, "qkv.0", Role::Out).cols.limit = 256), [Rule::Shape]);
    assert_eq!(broken(|s| s.program.buffers[8].cols = 64), [Rule::OutOfBounds]);
}

#[test]
fn positions_and_tokens_fit_their_tables() {
    assert_eq!(broken(|s| s.program.context_max = 65), [Rule::OutOfBounds]);
    assert_eq!(broken(|s| s.program.context_max = u32::MAX), [Rule::Attribute, Rule::OutOfBounds]);
    assert_eq!(broken(|s| s.program.buffers[6].rows = 63), [Rule::OutOfBounds]);
    // A token is a row of the head: the table must have it.
    assert_eq!(broken(|s| s.program.buffers[5].rows = 199), [Rule::OutOfBounds]);
    assert_eq!(broken(|s| s.program.context_max = 0), [Rule::RegimeRange]);
}

#[test]
fn attributes_are_in_range() {
    let attention = |change: fn(&mut Attention)| {
        broken(move |s| {
            for g in [4, 5] {
                let Op::Attention(a) = &mut s.program.grids[g].op else { panic!("attention") };
                change(a);
            }
        })
    };
    let only_attributes: [fn(&mut Attention); 12] = [
        |a| a.head_dim = 15,
        |a| a.head_dim = 0,
        |a| a.group = 3,
        |a| a.group = 0,
        |a| a.heads = 0,
        |a| a.heads = u32::MAX,
        |a| a.heads_per_task = 0,
        |a| a.rotary = 18,
        |a| a.splits = 0,
        |a| a.window = Some(0),
        |a| a.scale = f32::INFINITY,
        |a| a.softcap = Some(0.0),
    ];
    for (i, change) in only_attributes.into_iter().enumerate() {
        assert!(attention(change).contains(&Rule::Attribute), "change {i}");
    }
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let rules = broken(|s| {
            let Op::MatVec(m) = &mut s.program.grids[3].op else { panic!("qkv.0") };
            m.norm.as_mut().expect("a norm").eps = eps;
        });
        assert_eq!(rules, [Rule::Attribute], "{eps}");
    }
}

#[test]
fn machines_that_no_device_is_are_refused() {
    assert_eq!(broken(|s| s.machine.sms = 0), [Rule::Counts]);
    assert_eq!(broken(|s| s.machine.sms = u32::MAX), [Rule::Counts]);
    let (schedule, mut target) = toy();
    target.spec.sm_count = 3;
    assert_eq!(rules(&schedule, &target), [Rule::SmCount]);
}

// ---- Parts of outputs, types, immutable buffers and shared memory of other SMs, which that validator did not check.

#[test]
fn every_column_of_an_output_has_a_writer() {
    let rules = broken(|s| {
        // The other units have no owner.
        let id = task(s, 0, "head", 3);
        s.regimes[0].tasks[id.index()].hi -= 1;
    });
    assert_eq!(rules, [Rule::LaunchMissing]);
    let rules = broken(|s| {
        let act = buffer(s, "act.1").index();
        s.program.buffers[act].cols = 104;
        s.placement[act] = Some(1 << 20);
    });
    assert_eq!(rules, [Rule::Uncovered]);
}

#[test]
fn types_are_those_that_roles_read() {
    // fp32 activations with bf16 weights are a precision; one buffer of another type is not.
    assert_eq!(broken(|s| s.program.buffers[8].dtype = DType::F32), [Rule::DType]);
    assert_eq!(broken(|s| s.program.buffers[16].dtype = DType::F32), [Rule::DType]);
    assert_eq!(broken(|s| s.program.buffers[11].dtype = DType::F16), [Rule::DType]);
    assert_eq!(broken(|s| s.program.precision.weights = DType::I32), [Rule::DType]);
}

#[test]
fn writes_to_what_is_immutable_are_refused() {
    for name in ["o.0.weight", "qkv.0.norm_weight", "embed", "rope.r0"] {
        let rules = broken(|s| operand(s, "o.0", Role::Out).buffer = buffer(s, name));
        assert_eq!(rules, [Rule::Space], "{name}");
    }
    assert_eq!(broken(|s| s.program.buffers[16].space = Space::Constant), [Rule::Content, Rule::Space]);
    assert_eq!(broken(|s| operand(s, "o.0", Role::X).buffer = buffer(s, "k.0")), [Rule::Space]);
}

#[test]
fn two_grids_that_write_one_buffer_are_refused() {
    // `down.0` writes into the output of `o.0`, and no task writes the output of `down.0`.
    let rules = broken(|s| operand(s, "down.0", Role::Out).buffer = buffer(s, "x2.0"));
    assert_eq!(rules, [Rule::DoubleProducer, Rule::Uncovered]);
}

#[test]
fn private_data_of_another_sm_is_not_read() {
    // The token is on the SM of its `select`; a `report` on an SM whose select comes later reads nothing.
    let rules = broken(|s| {
        for regime in &mut s.regimes {
            regime.queues[0].swap(0, 1);
        }
    });
    assert_eq!(rules, [Rule::SelectFirst]);
    // A share of the residual is summed up on an SM that does not hold it.
    let rules = broken(|s| {
        for r in 0..2 {
            for layer in ["down.0", "down.1"] {
                let (a, b) = (task(s, r, layer, 1), task(s, r, layer, 2));
                swap_queued(s, r, a, b);
            }
        }
        restream(s);
    });
    assert_eq!(rules, [Rule::Uncovered]);
}

#[test]
fn events_count_the_signals_that_a_step_has() {
    // A counter that starts above zero is an event whose waiters ask for less.
    for count in [0, 1, 3] {
        let rules = broken(|s| {
            for task in &mut s.regimes[0].tasks {
                task.waits.iter_mut().filter(|w| w.event == EventId(1)).for_each(|w| w.count = count);
            }
        });
        assert_eq!(rules, [Rule::PartialJoin], "{count}");
    }
    assert_eq!(broken(|s| s.regimes[0].events[1].count = 0), [Rule::EventCount]);
}

// ---- Arenas.

#[test]
fn places_in_arenas_neither_overlap_nor_end_outside() {
    let place = |at: Option<u64>, name: &'static str| {
        broken(move |s| {
            let id = buffer(s, name).index();
            s.placement[id] = at;
        })
    };
    assert_eq!(place(None, "x.0"), [Rule::Placement]);
    assert_eq!(place(Some(0), "token"), [Rule::Placement]);
    assert_eq!(place(None, "o.0.weight"), [Rule::Placement]);
    assert_eq!(place(Some(0), "o.0.weight"), [Rule::PlacementOverlap]);
    assert_eq!(place(Some(16), "logits"), [Rule::Placement]);
    assert_eq!(place(Some(0), "v.0"), [Rule::PlacementOverlap]);
    assert_eq!(place(Some(u64::MAX - 255), "x.0"), [Rule::DeviceMemory]);
    // A place that is smaller than all phases of the buffer.
    let doubled = |s: &mut Schedule| {
        let id = buffer(s, "x.0").index();
        s.program.buffers[id].phases = 2;
    };
    assert_eq!(broken(doubled), [Rule::PlacementOverlap]);
}

// ---- Ids.

#[test]
fn ids_that_name_nothing_are_refused() {
    let far = u32::MAX;
    let cases: [fn(&mut Schedule); 9] = [
        |s| s.program.grids[3].operands[0].buffer = BufferId(u32::MAX),
        |s| s.regimes[0].tasks[9].grid = GridId(u32::MAX),
        |s| s.regimes[0].tasks[9].waits[0].event = EventId(u32::MAX),
        |s| s.regimes[0].tasks[9].signals[0] = EventId(u32::MAX),
        |s| s.regimes[0].events[3].buffer = BufferId(u32::MAX),
        |s| s.regimes[0].streams[0][0].task = TaskId(u32::MAX),
        |s| s.regimes[1].queues[3].push(TaskId(u32::MAX)),
        |s| s.regimes[0].tasks[9].grid = GridId(s.program.grids.len() as u32),
        |s| s.regimes[0].events[3].buffer = BufferId(s.program.buffers.len() as u32),
    ];
    for (i, case) in cases.into_iter().enumerate() {
        assert_eq!(broken(case), [Rule::IdRange], "case {i}");
    }
    assert_eq!(broken(|s| s.regimes[0].tasks[9].lo = far), [Rule::LaunchRange]);
    assert_eq!(broken(|s| s.regimes.clear()), [Rule::Counts]);
    assert_eq!(broken(|s| s.program.grids.clear()).first(), Some(&Rule::IdRange));
}

/// Renumbers the tasks of a regime backwards, everywhere.
fn renumber(s: &mut Schedule, r: usize) {
    let regime = &mut s.regimes[r];
    let last = regime.tasks.len() as u32 - 1;
    regime.tasks.reverse();
    regime.queues.iter_mut().flatten().for_each(|id| *id = TaskId(last - id.0));
    regime.streams.iter_mut().flatten().for_each(|run| run.task = TaskId(last - run.task.0));
}

#[test]
fn the_numbers_of_tasks_mean_nothing() {
    let (mut schedule, target) = toy();
    (0..2).for_each(|r| renumber(&mut schedule, r));
    assert_eq!(check(&schedule, &target), []);
    let last = schedule.regimes[0].tasks.len() - 1;
    let racy = TaskId::from(last - 9);
    schedule.regimes[0].tasks[racy.index()].waits.clear();
    let violations = check(&schedule, &target);
    assert_eq!(
        violations.iter().map(|v| (v.rule, v.entity)).collect::<Vec<_>>(),
        [(Rule::MissingWait, Entity::Task(0, racy))]
    );
}

// ---- Schedules that must not be refused.

/// Replaces the one event about `x.0` by one for each share of it: readers wait for all of them.
fn one_event_a_tile(s: &mut Schedule) {
    for r in 0..s.regimes.len() {
        let whole = event(s, r, "x.0", 0, 64);
        let shares: Vec<TaskId> = (0..4).map(|nth| task(s, r, "embed", nth)).collect();
        let regime = &mut s.regimes[r];
        let first = regime.events.len();
        let buffer = regime.events[whole.index()].buffer;
        let tile = |nth: u32| Event { lo: 16 * nth, hi: 16 * nth + 16, count: 1, ..regime.events[whole.index()] };
        let tiles: Vec<Event> = (0..4).map(tile).collect();
        assert!(tiles.iter().all(|e| e.buffer == buffer));
        regime.events.extend(tiles);
        for (nth, id) in shares.into_iter().enumerate() {
            regime.tasks[id.index()].signals = vec![EventId::from(first + nth)];
        }
        for task in &mut regime.tasks {
            if task.waits.iter().any(|w| w.event == whole) {
                task.waits = (0..4).map(|nth| Wait { event: EventId::from(first + nth), count: 1 }).collect();
            }
        }
        // The event about all columns remains for the first tile: its producer signals it, and no task waits for it.
        regime.events[whole.index()] = regime.events[first];
        let signaller = regime.tasks.iter().position(|t| t.signals == [EventId::from(first)]).expect("the first share");
        regime.tasks[signaller].signals.push(whole);
    }
}

#[test]
fn disjoint_tiles_with_events_of_their_own_are_proven() {
    let (mut schedule, target) = toy();
    one_event_a_tile(&mut schedule);
    assert_eq!(check(&schedule, &target), []);
    // Without the wait for one tile, the schedule is refused.
    let reader = task(&schedule, 0, "qkv.0", 2);
    schedule.regimes[0].tasks[reader.index()].waits.remove(2);
    let violations = check(&schedule, &target);
    assert_eq!(violations.len(), 1, "{}", listed(&violations));
    assert_eq!((violations[0].rule, violations[0].entity), (Rule::MissingWait, Entity::Task(0, reader)));
    assert!(violations[0].message.contains("32..48"), "{}", violations[0]);
}

#[test]
fn two_tiles_of_one_update_on_one_sm_are_proven() {
    let (mut schedule, target) = toy();
    for r in 0..2 {
        let id = task(&schedule, r, "o.0", 1);
        let regime = &mut schedule.regimes[r];
        let new = TaskId::from(regime.tasks.len());
        let mut second = regime.tasks[id.index()].clone();
        let middle = second.lo + 1;
        (regime.tasks[id.index()].hi, second.lo) = (middle, middle);
        let event = second.signals[0];
        regime.tasks.push(second);
        regime.events[event.index()].count += 1;
        for task in &mut regime.tasks {
            task.waits.iter_mut().filter(|w| w.event == event).for_each(|w| w.count += 1);
        }
        let place = regime.queues[1].iter().position(|t| *t == id).expect("on sm1");
        regime.queues[1].insert(place + 1, new);
        let run = regime.streams[1].iter_mut().find(|run| run.task == id).expect("its weights");
        let Source::Units { buffer, hi, .. } = &mut run.source else { panic!("weights") };
        let source = Source::Units { buffer: *buffer, lo: middle, hi: *hi };
        *hi = middle;
        let run = Run { task: new, source, after: None };
        regime.streams[1].push(run);
    }
    restream(&mut schedule);
    assert_eq!(check(&schedule, &target), []);
}

#[test]
fn more_buffers_and_stronger_events_than_needed_are_proven() {
    let (mut schedule, _) = toy();
    let id = buffer(&schedule, "act.0").index();
    schedule.program.buffers[id].phases = 3;
    schedule.placement[id] = Some(1 << 20);
    for event in &mut schedule.regimes[0].events {
        if event.mechanism == Mechanism::Packets {
            event.mechanism = Mechanism::Fenced;
        }
    }
    assert_eq!(check(&schedule, &beyond_kernels()), []);
}

#[test]
fn one_copy_of_the_candidates_is_enough_where_every_sm_embeds() {
    let (mut schedule, _) = toy();
    schedule.program.buffers[0].phases = 1;
    assert_eq!(check(&schedule, &beyond_kernels()), []);
}

// ---- Rejections.

#[test]
fn a_list_is_bounded_and_counts_the_rest() {
    let deep = Toy { layers: 120, ..TOY };
    let mut schedule = deep.schedule(&cpu(), &on_cpu(4));
    let mut cleared = 0;
    for task in schedule.regimes[0].tasks.iter_mut().filter(|t| !t.waits.is_empty() && !t.signals.is_empty()) {
        task.signals.clear();
        cleared += 1;
    }
    let violations = check(&schedule, &cpu());
    let of = |rule: Rule| violations.iter().filter(move |v| v.rule == rule);
    assert!(cleared > 1000);
    assert_eq!(of(Rule::MissingSignal).count() as u32, KEPT_PER_RULE + 1);
    let rest = of(Rule::MissingSignal).next_back().expect("the rest");
    assert_eq!(rest.entity, Entity::Schedule);
    assert!(rest.message.ends_with(" more"), "{rest}");
}

#[test]
fn a_rejection_is_our_bug_and_says_where() {
    let (mut schedule, target) = toy();
    schedule.regimes[0].tasks[9].waits.clear();
    let rejected = validate(schedule.clone(), &target).expect_err("a wait is missing");
    assert_eq!(*rejected.schedule, schedule);
    assert_eq!(rejected.to_string(), "`toy` is not proven: `missing-wait` at t9 of r0");
    let fault = Fault::from(rejected);
    assert_eq!(fault.tier, Tier::Internal);
    assert!(fault.message.contains("missing-wait: t9 of r0: reads columns 0..64 of b7 without a wait"), "{fault}");
}

#[test]
fn names_of_rules_are_unique_and_kebab_case() {
    for (i, rule) in Rule::ALL.iter().enumerate() {
        assert_eq!(Rule::parse(rule.name()), Some(*rule));
        assert!(rule.name().bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{rule}");
        assert!(Rule::ALL[..i].iter().all(|other| other.name() != rule.name()), "{rule}");
        assert!((1..=8).contains(&rule.group()));
    }
    assert_eq!(Rule::parse("no-such-rule"), None);
}

// ---- Kernels: parts of the language that a GPU's kernels do not support.

#[test]
fn kernels_refuse_what_they_would_ignore() {
    let (schedule, target) = toy();
    let refused = |mutate: fn(&mut Schedule)| {
        let mut s = schedule.clone();
        mutate(&mut s);
        assert_eq!(rules(&s, &beyond_kernels()), [], "the language allows it");
        rules(&s, &target)
    };
    fn variant<'a>(s: &'a mut Schedule, name: &str) -> Option<&'a mut Variant> {
        s.variants.get_mut(&grid(s, name))
    }
    let cases: [fn(&mut Schedule); 13] = [
        // A queue that outgrows its place in shared memory.
        |s| {
            let queue = s.machine.smem.iter().position(|p| p.kind == SmemKind::Queue).expect("a queue");
            s.machine.smem[queue].bytes = 64;
        },
        // Counters, and fences in the middle of a step.
        |s| s.regimes[0].events[1].mechanism = Mechanism::Fenced,
        // One copy of the candidates, or two of an activation.
        |s| s.program.buffers[0].phases = 1,
        |s| {
            s.program.buffers[7].phases = 2;
            s.placement[7] = Some(1 << 20);
        },
        // Fewer rows a chunk than the kernel was compiled for.
        |s| s.regimes[0].streams[0][1].source = Source::History { rows: 256 },
        // Columns in the middle of a buffer.
        |s| add_extra(s, "qkv.0", [0, 0]),
        // A norm without weights.
        |s| s.program.grids[3].operands.retain(|o| o.role != Role::NormWeight),
        // Parts of shared memory in other places.
        |s| {
            let ring = s.machine.smem.remove(0);
            let end = s.machine.smem.last().map_or(0, |p| p.offset + p.bytes);
            s.machine.smem.push(monobloc::ir::schedule::SmemPart { offset: end, ..ring });
        },
        // A third regime.
        |s| {
            let mut third = s.regimes[1].clone();
            third.from_position = 48;
            s.regimes.push(third);
        },
        // Variants of ops that no kernel has: more units than there are, more pairs, a third of the warps, no sums.
        |s| {
            if let Some(Variant::MatVec(variant)) = variant(s, "qkv.0") {
                variant.units_per_warp = 99;
            }
        },
        |s| {
            if let Some(Variant::MatVec(variant)) = variant(s, "down.0") {
                variant.poll_batch = 0;
            }
        },
        |s| {
            if let Some(Variant::Attention(variant)) = variant(s, "attn.0") {
                variant.warps_per_head = 3;
            }
        },
        |s| s.machine.reduce_batch = 0,
    ];
    for (i, case) in cases.into_iter().enumerate() {
        assert_eq!(refused(case), [Rule::Kernel], "case {i}");
    }
    // Keys after values: the interpreter follows the operands, but attention.cuh expects a fixed order.
    let swapped = |s: &mut Schedule| {
        for name in ["attn.0", "attn_split.0"] {
            let (k, v) = (operand(s, name, Role::K).cols, operand(s, name, Role::V).cols);
            operand(s, name, Role::K).cols = Cols { only_j: k.only_j, ..v };
            operand(s, name, Role::V).cols = Cols { only_j: v.only_j, ..k };
        }
    };
    let mut s = schedule.clone();
    swapped(&mut s);
    assert_eq!(rules(&s, &target), [Rule::Kernel]);
}

/// Units of two granules in chunks of 32: a warp that waits at a barrier holds a chunk while others need the next.
#[test]
fn one_slot_is_enough_for_weights() {
    let only_head = Toy { vocab: 2048, layers: 0, ..TOY };
    let with_one_slot = |sms: u32| {
        let mut s = only_head.schedule(&h200(), &on_h200(sms));
        let ring = &mut s.machine.ring;
        (ring.slots, ring.flight_low, ring.flight_high, ring.flight_free) = (1, 1, 1, 1);
        rules(&s, &h200())
    };
    // A warp gives a chunk back before it takes the next one, with many chunks for each SM and with one.
    assert_eq!(with_one_slot(2), []);
    assert_eq!(with_one_slot(16), []);
}

/// A block that copies while it works has a window of a long queue in shared memory, and the whole of a short one.
#[test]
fn a_long_queue_has_a_window() {
    let target = h200();
    let schedule = Toy { layers: 48, ..TOY }.schedule(&target, &on_h200(4));
    assert_eq!((schedule.queue_window(), toy().0.queue_window()), (Some(64), None));
    assert_eq!(check(&schedule, &target), []);
    let source = emit(unproven(&schedule), &target, Trace::Off);
    assert!(source.text.contains("QUEUE_WINDOW = 64"), "{}", source.text);

    let queue = schedule.machine.smem.iter().position(|part| part.kind == SmemKind::Queue).expect("a queue");
    let mut shorter = schedule.clone();
    shorter.machine.smem[queue].bytes /= 2;
    assert_eq!(rules(&shorter, &target), [Rule::Kernel]);
    let copy = CopyMechanism::Plain;
    let waits = Target { spec: Spec { copy, ..target.spec.clone() }, ..target };
    assert!(rules(&schedule, &waits).contains(&Rule::Kernel));
    let whole = Toy { layers: 48, ..TOY }.schedule(&waits, &on_h200(4));
    assert_eq!((whole.queue_window(), rules(&whole, &waits)), (None, vec![]));
}

#[test]
fn every_sm_is_named_by_its_own_queue() {
    let (mut schedule, target) = toy();
    schedule.regimes[1].queues[2].clear();
    let violations = check(&schedule, &target);
    assert!(violations.iter().all(|v| v.rule == Rule::TaskQueued), "{}", listed(&violations));
    let schedule = TOY.schedule(&target, &Candidate { sms: 4, ..on_h200(4) });
    let mut broken = schedule.clone();
    broken.regimes[0].streams[2].swap(0, 1);
    let violations = check(&broken, &target);
    assert_eq!(
        violations.iter().map(|v| (v.rule, v.entity)).collect::<Vec<_>>(),
        [(Rule::StreamOrder, Entity::Sm(0, SmId(2)))]
    );
}

// ---- Behaviour of kernels that the language does not express, found by attempts to break the proof.

/// A queue entry adds a column to the place of a buffer in 32 bits. A buffer that begins below the last packet of 32 bits and ends
/// beyond it would be read at the place of another buffer.
#[test]
fn no_place_ends_where_an_entry_cannot_point() {
    let (schedule, target) = toy();
    let last = buffer(&schedule, "qkv.0").index();
    let placed = |place: u64| {
        let mut s = schedule.clone();
        s.placement[last] = Some(place);
        // The judge that reads the queues back notices it, too.
        let wraps = disagreement(&s, &encode(unproven(&s))).is_some_and(|what| what.contains("which wraps"));
        let rules = rules(&s, &target);
        assert_eq!(wraps, !rules.is_empty());
        rules
    };
    // 128 values of 16 bits are 64 packets of 8 bytes.
    assert_eq!(placed((8 << 32) - 512), []);
    assert_eq!(placed((8 << 32) - 256), [Rule::Kernel]);
    // The number of the last unit of 256 bytes means "none".
    let cached = schedule.program.buffers.iter().position(|b| b.space == Space::Cache).expect("a cache");
    let roomy = Target { spec: Spec { memory_bytes: 4 << 40, ..target.spec.clone() }, ..target };
    let mut s = schedule.clone();
    s.placement[cached] = Some((256 << 32) - 256);
    assert_eq!(rules(&s, &roomy), [Rule::Kernel]);
}

/// A block keeps one residual, from the lowest column that it owns. Two buffers of it would overlap.
#[test]
fn a_second_residual_is_refused_where_kernels_have_one() {
    let (schedule, target) = toy();
    let mut s = schedule.clone();
    let like = |s: &mut Schedule, name: &str| {
        let copy = monobloc::ir::program::Buffer {
            name: format!("{name} again"),
            ..s.program.buffers[buffer(s, name).index()].clone()
        };
        s.placement.push((copy.space == Space::Exchange).then_some(1 << 20));
        s.program.buffers.push(copy);
        BufferId::from(s.program.buffers.len() - 1)
    };
    let (residual, out) = (like(&mut s, "residual"), like(&mut s, "x.0"));
    let mut embed = s.program.grids[grid(&s, "embed").index()].clone();
    embed.name = "embed again".to_string();
    for operand in &mut embed.operands {
        match operand.role {
            Role::Residual => operand.buffer = residual,
            Role::Out => operand.buffer = out,
            _ => {}
        }
    }
    let (first, again) = (grid(&s, "embed"), GridId::from(s.program.grids.len()));
    s.program.grids.push(embed);
    for regime in &mut s.regimes {
        for queue in &mut regime.queues {
            // Right after the first one, whose residual it would overwrite.
            let at = queue.iter().position(|id| regime.tasks[id.index()].grid == first).expect("an embed");
            let task = monobloc::ir::schedule::Task {
                grid: again,
                waits: vec![],
                signals: vec![],
                ..regime.tasks[queue[at].index()].clone()
            };
            queue.insert(at + 1, TaskId::from(regime.tasks.len()));
            regime.tasks.push(task);
        }
    }
    // Room for one more entry.
    let queue = s.machine.smem.iter().position(|part| part.kind == SmemKind::Queue).expect("a queue");
    s.machine.smem[queue].bytes += 64;
    s.machine.smem[queue + 1..].iter_mut().for_each(|part| part.offset += 64);
    let violations = check(&s, &target);
    assert!(violations.iter().all(|v| v.message.contains("one buffer of residuals")), "{}", listed(&violations));
    assert_eq!(violations.len(), 1, "{}", listed(&violations));
    assert_eq!(rules(&s, &beyond_kernels()), [Rule::Kernel; 0], "the language allows it");
    let said = disagreement(&s, &encode(unproven(&s)));
    assert!(said.as_ref().is_some_and(|what| what.contains("lies over that of")), "{said:?}");
}

/// The host reads the number of tokens from one word, which a second writer would set back.
#[test]
fn a_second_report_is_refused_where_kernels_have_one() {
    let (mut s, target) = toy();
    let copy = monobloc::ir::program::Buffer {
        name: "report again".to_string(),
        ..s.program.buffers[buffer(&s, "report").index()].clone()
    };
    s.program.buffers.push(copy);
    s.placement.push(Some(1 << 20));
    let mut again = s.program.grids[grid(&s, "report").index()].clone();
    again.name = "report again".to_string();
    again.operands.iter_mut().find(|o| o.role == Role::Out).expect("an output").buffer =
        BufferId::from(s.program.buffers.len() - 1);
    let id = GridId::from(s.program.grids.len());
    s.program.grids.push(again);
    for regime in &mut s.regimes {
        let task =
            monobloc::ir::schedule::Task { grid: id, lo: 0, hi: 1, j: 0, row: 0, waits: vec![], signals: vec![] };
        regime.queues[3].push(TaskId::from(regime.tasks.len()));
        regime.tasks.push(task);
    }
    let violations = check(&s, &target);
    assert_eq!(rules(&s, &target), [Rule::Kernel], "{}", listed(&violations));
}

// ---- Schedules for which kernels do not compile.

fn does_not_compile(test: &str, schedule: &Schedule) {
    if let Some(nvrtc) = nvrtc(test) {
        let source = emit(unproven(schedule), &h200(), Trace::Off);
        assert!(nvrtc.compile(&source).is_err(), "a rule for nothing");
    }
}

#[test]
fn a_granule_of_more_pairs_than_lanes() {
    // Four parts of 32 bf16 weights, and packets of one fp32 value: 64 pairs.
    let toy = Toy { gated: false, precision: Precision { wire: DType::F32, ..BF16 }, hidden: 128, vocab: 512, ..TOY };
    let knobs = Candidate { unit_rows: 4, ..on_h200(64) };
    let mut schedule = toy.schedule(&h200(), &knobs);
    assert_eq!(rules(&schedule, &h200()), []);
    let Op::MatVec(m) = &schedule.program.grids[3].op else { panic!("qkv.0") };
    assert_eq!((m.unit_rows, m.k), (4, 128));
    // A candidate that asks for units of two rows gets four.
    assert_eq!(toy.schedule(&h200(), &Candidate { unit_rows: 2, ..knobs.clone() }), schedule);
    // bf16 packets hold twice as many values.
    let narrow = Toy { precision: BF16, ..toy };
    schedule = narrow.schedule(&h200(), &Candidate { unit_rows: 2, ..knobs });
    assert_eq!(rules(&schedule, &h200()), []);
    let Op::MatVec(m) = &schedule.program.grids[3].op else { panic!("qkv.0") };
    assert_eq!(m.unit_rows, 2);
    schedule.program.precision.wire = DType::F32;
    for buffer in schedule.program.buffers.iter_mut().filter(|b| b.space == Space::Exchange) {
        buffer.dtype = if buffer.dtype == DType::Bf16 { DType::F32 } else { buffer.dtype };
    }
    for (i, place) in (0..).zip(schedule.placement.iter_mut()) {
        *place = place.map(|_| i << 20);
    }
    assert_eq!(rules(&schedule, &h200()), [Rule::Kernel]);
    does_not_compile("a_granule_of_more_pairs_than_lanes", &schedule);
}

#[test]
fn a_token_is_drawn_in_the_scratch_of_tasks() {
    let toy = Toy { layers: 1, hidden: 32, heads: 1, kv_heads: 1, dim: 8, intermediate: 32, vocab: 1056, ..TOY };
    let knobs = Candidate { consumer_warps: 4, sum_units: 1, splits: 1, ..on_h200(132) };
    let mut schedule = toy.schedule(&h200(), &knobs);
    assert_eq!(rules(&schedule, &h200()), []);
    let reduce = schedule.machine.smem.iter_mut().find(|part| part.kind == SmemKind::Reduce).expect("the part");
    // More than sums and attention need.
    reduce.bytes = 512;
    assert_eq!(rules(&schedule, &h200()), [Rule::Kernel]);
    does_not_compile("a_token_is_drawn_in_the_scratch_of_tasks", &schedule);
}
