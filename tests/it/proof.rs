//! Tests that each rule of the proof is broken by a mutation of a proven schedule that breaks no other rule, and that the message names the mutation.

use crate::mix::{at, moved, shared, with_states};
use crate::proof_support::*;
use monobloc::codegen::abi::Queues;
use monobloc::dtype::DType;
use monobloc::format::Format;
use monobloc::ir::op::{Op, Role};
use monobloc::ir::program::{Cols, Home, Rows};
use monobloc::ir::schedule::{Mechanism, Schedule, Scope, SmemKind, Source};
use monobloc::ir::variant::Variant;
use monobloc::ir::{BufferId, EventId, GridId, SmId, TableId, TaskId};
use monobloc::target::{Target, TargetKind};
use monobloc::validate::{Entity, Rule, Violation, check, validate};

struct Case {
    schedule: Schedule,
    target: Target,
    entity: Entity,
    mutate: fn(&mut Schedule, &mut Target),
}

fn on_toy(entity: Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    let (schedule, target) = toy();
    Case { schedule, target, entity, mutate }
}

fn on_two_devices(entity: Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    let (schedule, target) = two_devices();
    Case { schedule, target, entity, mutate }
}

/// Two rows a step, on a machine with the kernels' memory and without their limits.
fn on_two_rows(entity: Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    let (schedule, target) = two_rows();
    Case { schedule, target, entity, mutate }
}

fn on_words(entity: Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    let (schedule, target) = words();
    Case { schedule, target, entity, mutate }
}

fn on_states(entity: fn(&Schedule) -> Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    let (schedule, target) = with_states();
    Case { entity: entity(&schedule), schedule, target, mutate }
}

/// One regime, counters, 3 SMs.
fn on_counters(toy: Toy, entity: Entity, mutate: fn(&mut Schedule, &mut Target)) -> Case {
    Case { schedule: toy.schedule(&cpu(), &on_cpu(3)), target: cpu(), entity, mutate }
}

fn smem_part(schedule: &Schedule, kind: SmemKind) -> usize {
    schedule.machine.smem.iter().position(|p| p.kind == kind).expect("a part of each kind")
}

/// The mutation that breaks a rule. A new rule does not compile until it has one.
fn case(rule: Rule) -> Case {
    let t = |t| Entity::Task(0, TaskId(t));
    let machine = Entity::Machine;
    match rule {
        Rule::IdRange => on_toy(t(9), |s, _| s.regimes[0].tasks[9].grid = GridId(99)),
        Rule::Counts => on_toy(Entity::Regime(1), |s, _| {
            s.regimes[1].streams.pop();
        }),
        Rule::TaskQueued => on_toy(t(52), |s, _| {
            s.regimes[0].queues[3].pop();
        }),
        Rule::RegimeRange => on_toy(Entity::Regime(1), |s, _| s.regimes[1].from_position = 64),
        Rule::LaunchRange => on_toy(t(12), |s, _| s.regimes[0].tasks[12].hi = 17),
        Rule::BufferExtent => on_toy(Entity::Buffer(BufferId(7)), |s, _| s.program.buffers[7].phases = 0),
        Rule::Content => on_toy(Entity::Buffer(BufferId(10)), |s, _| s.program.buffers[10].content = None),
        Rule::Name => on_toy(Entity::Grid(GridId(7)), |s, _| s.program.grids[7].name = "o.0\nint x;".to_string()),
        Rule::Attribute => on_toy(Entity::Grid(GridId(3)), |s, _| {
            let Op::MatVec(m) = &mut s.program.grids[3].op else { panic!("g3 is a matvec") };
            m.norm.as_mut().expect("a norm").eps = f32::NAN;
        }),
        Rule::Operand => on_toy(Entity::Grid(GridId(7)), |s, _| s.program.grids[7].operands.swap(0, 1)),
        Rule::Space => on_toy(Entity::Grid(GridId(7)), |s, _| {
            operand(s, "o.0", Role::X).buffer = buffer(s, "embed");
        }),
        Rule::Format => on_toy(Entity::Buffer(BufferId(5)), |s, _| {
            s.program.buffers[5].coded = Some(Format::plain(DType::Bf16));
        }),
        Rule::DType => on_toy(Entity::Buffer(BufferId(7)), |s, _| s.program.buffers[7].dtype = DType::F32),
        Rule::Rows => on_toy(Entity::Grid(GridId(4)), |s, _| operand(s, "attn.0", Role::Rope).rows = Rows::One),
        Rule::Shape => on_toy(Entity::Grid(GridId(7)), |s, _| operand(s, "o.0", Role::X).cols = Cols::all(32)),
        Rule::OutOfBounds => on_toy(Entity::Buffer(BufferId(11)), |s, _| s.program.buffers[11].rows = 63),
        Rule::Misaligned => on_toy(Entity::Grid(GridId(3)), |s, _| {
            let qkv = buffer(s, "qkv.0");
            s.program.buffers[qkv.index()].cols = 129;
            let cols = &mut operand(s, "qkv.0", Role::Out).cols;
            (cols.base, cols.limit) = (1, 129);
        }),
        Rule::MixedUse => on_toy(Entity::Grid(GridId(6)), |s, _| {
            // Records of one head for each task instead of two: as many bytes, in another order.
            let Op::AttentionMerge { heads_per_task, .. } = &mut s.program.grids[6].op else { panic!("g6 merges") };
            *heads_per_task = 1;
            operand(s, "attn_merge.0", Role::Partial).cols = Cols::blocks(36, 144);
        }),
        Rule::Alternatives => on_toy(Entity::Grid(GridId(4)), |s, _| {
            let Op::Attention(a) = &mut s.program.grids[4].op else { panic!("g4 is attention") };
            a.window = Some(8);
        }),
        // Rows of caches that the previous regime does not have.
        Rule::RegimeAppends => on_toy(Entity::Buffer(BufferId(11)), |s, _| fresh_caches(s, "attn_split.0")),
        // Records of the second regime, which no step of the first one clears.
        Rule::RegimeWords => {
            let (schedule, target) = (records_of_one_regime(&h200()), beyond_kernels());
            let records = buffer(&schedule, "partial.0");
            let mutate: fn(&mut Schedule, &mut Target) = |s, _| as_words(s, buffer(s, "partial.0"));
            Case { schedule, target, entity: Entity::Buffer(records), mutate }
        }
        Rule::LaunchMissing => on_toy(Entity::Grid(GridId(3)), |s, _| s.regimes[0].tasks[10].lo = 5),
        Rule::LaunchTwice => on_toy(t(10), |s, _| s.regimes[0].tasks[10].lo = 3),
        Rule::TaskWidth => on_toy(t(13), |s, _| s.regimes[0].tasks[13].hi = 2),
        Rule::SelectFirst => on_toy(t(0), |s, _| s.regimes[0].queues[0].swap(0, 1)),
        Rule::Uncovered => on_toy(t(17), |s, _| {
            // Two shares of the residual exchange their SMs, with their weights.
            for r in 0..2 {
                let (a, b) = (task(s, r, "o.0", 0), task(s, r, "o.0", 1));
                swap_queued(s, r, a, b);
            }
            restream(s);
        }),
        Rule::DoubleProducer => on_toy(t(13), |s, _| {
            for name in ["attn.0", "attn_split.0"] {
                for role in [Role::HistoryV, Role::AppendV] {
                    operand(s, name, role).buffer = buffer(s, "k.0");
                }
            }
        }),
        // A parallel block adds attention and MLP to the residual; only program order says which one first.
        Rule::PrivateOrder => {
            let parallel = Toy { parallel: true, gated: false, ..TOY };
            let s = parallel.schedule(&cpu(), &on_cpu(3));
            on_counters(parallel, Entity::Task(0, task(&s, 0, "down.0", 0)), |s, _| {
                let (a, b) = (task(s, 0, "o.0", 0), task(s, 0, "down.0", 0));
                swap_queued(s, 0, a, b);
                restream(s);
            })
        }
        Rule::Table => on_two_rows(Entity::Table(TableId(1)), |s, _| s.program.tables[1].bound = 9),
        Rule::TableFact => on_two_rows(Entity::Grid(GridId(4)), |s, _| s.program.tables[0].facts.clear()),
        Rule::Home => on_toy(Entity::Buffer(BufferId(3)), |s, _| s.program.buffers[3].home = Home::Device(0)),

        Rule::EventRegion => on_toy(Entity::Event(0, EventId(1)), |s, _| s.regimes[0].events[1].hi = 66),
        Rule::EventCount => on_toy(Entity::Event(0, EventId(1)), |s, _| s.regimes[0].events[1].count = 3),
        Rule::MissingSignal => on_toy(t(6), |s, _| s.regimes[0].tasks[6].signals.clear()),
        Rule::StraySignal => on_toy(t(9), |s, _| s.regimes[0].tasks[9].signals.push(EventId(1))),
        Rule::DoubleSignal => on_toy(t(6), |s, _| s.regimes[0].tasks[6].signals.push(EventId(1))),
        Rule::PartialJoin => on_toy(t(9), |s, _| s.regimes[0].tasks[9].waits[0].count = 3),
        Rule::UnreachableWait => on_toy(t(9), |s, _| s.regimes[0].tasks[9].waits[0].count = 5),
        Rule::MissingWait => on_toy(t(9), |s, _| s.regimes[0].tasks[9].waits.clear()),
        Rule::UnreadWait => on_toy(t(21), |s, _| {
            // The output of attention, which the MLP does not read.
            let waits = s.regimes[0].tasks[17].waits.clone();
            s.regimes[0].tasks[21].waits.extend(waits);
        }),
        Rule::Carried => on_toy(Entity::Event(0, EventId(1)), |s, _| s.regimes[0].events[1].carried = true),
        Rule::Scope => on_two_devices(Entity::Event(0, EventId(1)), |s, _| {
            let about = s.regimes[0].events[1].buffer;
            s.regimes[0].events.iter_mut().filter(|e| e.buffer == about).for_each(|e| e.scope = Scope::Device);
        }),
        Rule::StreamAfter => {
            let (schedule, target) = looked_up();
            let run = schedule.regimes[0].streams[1].iter().find(|run| run.after.is_some()).expect("a run that waits");
            Case {
                entity: Entity::Task(0, run.task),
                schedule,
                target,
                mutate: |s, _| {
                    s.regimes[0].streams[1].iter_mut().for_each(|run| run.after = None);
                },
            }
        }
        Rule::CarriedMatch => on_toy(Entity::Event(1, EventId(0)), |s, _| {
            s.regimes[1].events[0].mechanism = Mechanism::Packets;
        }),
        Rule::MixedMechanism => on_toy(Entity::Event(1, EventId(1)), |s, _| {
            s.regimes[1].events[1].mechanism = Mechanism::Counter;
        }),

        Rule::Words => on_words(Entity::Event(0, EventId(1)), |s, _| {
            s.regimes[0].events[1].mechanism = Mechanism::Packets;
        }),

        Rule::Deadlock => on_toy(t(21), |s, _| {
            for r in 0..2 {
                let (a, b) = (task(s, r, "o.0", 0), task(s, r, "gate_up.0", 0));
                swap_queued(s, r, a, b);
            }
            restream(s);
        }),
        Rule::StreamOrder => on_toy(t(17), |s, _| s.regimes[0].streams[0].swap(2, 3)),
        Rule::StreamBytes => on_toy(t(17), |s, _| {
            let Source::Units { hi, .. } = &mut s.regimes[0].streams[0][2].source else { panic!("weights") };
            *hi += 1;
        }),
        Rule::HistoryChunk => on_toy(t(13), |s, _| {
            s.regimes[0].streams[0][1].source = Source::History { rows: 24 };
        }),
        Rule::Variant => on_toy(Entity::Grid(GridId(3)), |s, _| {
            let Some(Variant::MatVec(variant)) = s.variants.get_mut(&GridId(3)) else { panic!("a matvec") };
            variant.chunk -= 1;
        }),
        Rule::RingShape => on_toy(machine, |s, _| s.machine.ring.slot_bytes = 16_000),
        Rule::RingCapacity => on_toy(Entity::Grid(GridId(4)), |s, _| {
            let ring = &mut s.machine.ring;
            (ring.slots, ring.flight_low, ring.flight_high, ring.flight_free) = (1, 1, 1, 1);
        }),
        Rule::RingArrivals => on_toy(machine, |s, _| s.machine.ring.arrivals = 4),
        Rule::Flight => on_toy(machine, |s, _| s.machine.ring.flight_low = 0),

        // A task after the head, for which no task waits, may still read while the next step writes.
        Rule::OverwriteUnread => on_toy(t(53), |s, _| add_extra(s, "head", [0, 0])),
        // The host's copy of the token moves to another SM with the regime, while the old writer comes after its head.
        Rule::OverwriteUnordered => on_toy(Entity::Task(1, TaskId(4)), |s, _| {
            let report = s.regimes[0].queues[0].remove(1);
            s.regimes[0].queues[0].push(report);
            let report = s.regimes[1].queues[0].remove(1);
            s.regimes[1].queues[1].insert(1, report);
        }),
        Rule::WordsUnseen => on_words(Entity::Sm(0, SmId(4)), |s, _| release_nothing_last(s)),
        Rule::HistoryUnordered => on_toy(t(13), |s, _| {
            for regime in &mut s.regimes {
                regime.events[0].mechanism = Mechanism::Packets;
            }
        }),

        Rule::Target => on_toy(machine, |s, _| s.machine.target = "h100".to_string()),
        Rule::SmCount => on_toy(machine, |_, target| target.spec.sm_count = 3),
        Rule::Threads => on_toy(machine, |s, _| {
            (s.machine.consumer_warps, s.machine.ring.arrivals) = (32, 32);
            s.machine.registers_per_thread = 56;
        }),
        Rule::Registers => on_toy(machine, |s, _| s.machine.registers_per_thread = 128),
        Rule::SmemPart => on_toy(Entity::SmemPart(3), |s, _| {
            let heads = smem_part(s, SmemKind::Heads);
            s.machine.smem[heads].kind = SmemKind::Queue;
        }),
        Rule::SmemOverlap => on_toy(Entity::SmemPart(2), |s, _| s.machine.smem[2].offset -= 128),
        Rule::SmemSize => on_toy(Entity::SmemPart(1), |s, _| s.machine.smem[1].bytes = 96 * 2 - 2),
        Rule::SmemCapacity => on_toy(machine, |s, _| {
            s.machine.smem.last_mut().expect("parts").bytes = 200_000;
        }),
        Rule::Placement => on_toy(Entity::Buffer(BufferId(34)), |s, _| {
            s.placement[34] = s.placement[34].map(|offset| offset + 8);
        }),
        Rule::PlacementOverlap => on_toy(Entity::Buffer(BufferId(8)), |s, _| s.placement[8] = s.placement[7]),
        Rule::DeviceMemory => on_toy(Entity::Schedule, |_, target| target.spec.memory_bytes = 1000),

        Rule::MissingProxy => on_toy(t(13), |s, _| s.regimes[0].events[0].proxy = false),
        Rule::FenceThread => on_toy(t(9), |s, _| s.regimes[0].events[1].proxy = true),
        Rule::Kernel => on_toy(Entity::Sm(0, SmId(0)), |s, _| {
            // The SM that stops expects the report after the select.
            s.regimes[0].queues[0].swap(1, 2);
        }),
        // Packets, although a batch kernel has words.
        Rule::State => on_states(|s| Entity::Grid(GridId::from(at(&s.program, "mix.2"))), |s, _| shared(s)),
        Rule::StateOwner => on_states(
            |s| {
                let grid = at(&s.program, "mix.0");
                let task = s.regimes[1].tasks.iter().position(|task| task.grid.index() == grid && task.lo == 0);
                Entity::Task(1, TaskId::from(task.unwrap()))
            },
            |s, _| moved(s),
        ),
        Rule::KernelRows => on_two_rows(Entity::Buffer(BufferId(7)), |_, target| target.kind = TargetKind::Cuda),
        Rule::KernelScope => on_toy(Entity::Event(0, EventId(1)), |s, _| {
            let about = s.regimes[0].events[1].buffer;
            let events = s.regimes.iter_mut().flat_map(|regime| &mut regime.events);
            events.filter(|e| e.buffer == about).for_each(|e| e.scope = Scope::System);
        }),
        _ => panic!("`{rule}` is about plans of waves"),
    }
}

#[test]
fn every_rule_is_broken_by_a_mutation_that_breaks_no_other() {
    // Those of plans of waves have `waves`.
    for &rule in Rule::ALL.iter().filter(|rule| rule.group() <= 7) {
        let Case { mut schedule, mut target, entity, mutate } = case(rule);
        let before = check(&schedule, &target);
        assert!(before.is_empty(), "{rule}: before the mutation\n{}", listed(&before));
        mutate(&mut schedule, &mut target);
        let violations = check(&schedule, &target);
        assert!(!violations.is_empty(), "{rule}: the mutated schedule is accepted");
        assert!(violations.iter().all(|v| v.rule == rule), "expected only `{rule}`, found\n{}", listed(&violations));
        let named = |v: &Violation| v.entity == entity || v.witness.iter().any(|w| w.entity == entity);
        assert!(violations.iter().any(named), "{rule}: expected {entity} in\n{}", listed(&violations));
    }
}

#[test]
fn attention_entries_carry_the_row_of_their_task() {
    let (schedule, target) = words();
    let proven = validate(schedule, &target).expect("two rows are proven");
    let queues = Queues::of(&proven);
    let (regime, tables) = (&proven.schedule().regimes[0], queues.tables());
    let mut rows = vec![];
    for (sm, queue) in regime.queues.iter().enumerate() {
        for (id, entry) in queue.iter().zip(&tables.entries[tables.entry_index[sm] as usize..]) {
            let task = &regime.tasks[id.index()];
            if matches!(proven.schedule().program.grids[task.grid.index()].op, Op::Attention(_)) {
                assert_eq!(entry.row_scales_or_row, task.row, "{id}");
                rows.push(task.row);
            }
        }
    }
    rows.sort_unstable();
    rows.dedup();
    assert_eq!(rows, [0, 1]);
}

#[test]
fn entries_find_constants_where_the_pack_has_them() {
    let (schedule, target) = toy();
    let proven = validate(schedule, &target).expect("the toy is proven");
    let queues = Queues::of(&proven);
    let (regime, tables) = (&proven.schedule().regimes[0], queues.tables());
    let mut compared = 0;
    for (sm, queue) in regime.queues.iter().enumerate() {
        for (task, entry) in queue.iter().zip(&tables.entries[tables.entry_index[sm] as usize..]) {
            let grid = &proven.schedule().program.grids[regime.tasks[task.index()].grid.index()];
            for (role, place) in [(Role::NormWeight, entry.norm_weight), (Role::Table, entry.table)] {
                if let Some(operand) = grid.operand(role) {
                    let packed = proven.schedule().placement[operand.buffer.index()];
                    assert_eq!(Some(u64::from(place) * 256), packed, "{task} `{}`", role.name());
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 8, "{compared}");
}

#[test]
fn a_launch_that_only_fills_the_cache_ends_with_the_last_append() {
    let (schedule, target) = words();
    let proven = validate(schedule.clone(), &target).expect("two rows are proven");
    let queues = Queues::of(&proven);
    let regime = &schedule.regimes[0];
    let last = schedule.program.grids.iter().rposition(|grid| matches!(grid.op, Op::Attention(_))).unwrap();
    let is_later = |task: &TaskId| regime.tasks[task.index()].grid.index() > last;
    for (sm, (queue, [entries, runs])) in regime.queues.iter().zip(&queues.tables().fills).enumerate() {
        let (kept, left) = queue.split_at(*entries as usize);
        assert!(!kept.iter().any(is_later) && left.iter().all(is_later), "sm{sm}: {kept:?} {left:?}");
        let (kept, left) = regime.streams[sm].split_at(*runs as usize);
        assert!(!kept.iter().any(|run| is_later(&run.task)) && left.iter().all(|run| is_later(&run.task)), "sm{sm}");
    }
}
