//! Tests that the judge that executes schedules agrees with the proof, on a part of the population of `docs/proof-report.md`; and that
//! the machine notices faults, without which its silence would mean nothing.

use crate::nvrtc::nvrtc;
use crate::oracle::Kind;
use crate::oracle::device::device_form;
use crate::oracle::entries::disagreement;
use crate::oracle::explore::{Effort, Verdict, judge};
use crate::oracle::population::{Size, judge_population};
use crate::proof_support::*;
use monobloc::candidate::Candidate;
use monobloc::codegen::abi::{Tables, encode};
use monobloc::ir::op::{Attention, Op, Role};
use monobloc::ir::schedule::{Mechanism, Regime, Schedule, Task, Wait};
use monobloc::ir::variant::Variant;
use monobloc::ir::{EventId, TaskId};
use monobloc::model::graph::QkNormSpan;
use monobloc::target::Target;
use monobloc::validate::{Entity, Rule, check, validate};
use std::collections::BTreeMap;

const EFFORT: Effort = Effort { steps: 3, states_max: 200_000, walks: 8, stores: usize::MAX, seed: 1 };

/// One layer on two SMs: every interleaving is walked.
fn tiny() -> Schedule {
    let toy =
        Toy { layers: 1, hidden: 16, heads: 2, kv_heads: 1, dim: 8, intermediate: 16, vocab: 24, context: 6, ..TOY };
    toy.schedule(&h200(), &Candidate { split_from: 3, ..on_h200(2) })
}

#[track_caller]
fn goes_wrong(kinds: &[Kind], mutate: impl FnOnce(&mut Schedule)) {
    let mut s = tiny();
    mutate(&mut s);
    match judge(&s, &h200(), &EFFORT) {
        Verdict::Unsafe(fault) => assert!(kinds.contains(&fault.kind), "expected {kinds:?}, found {fault}"),
        safe => panic!("expected {kinds:?}, found {safe:?}"),
    }
}

#[test]
fn the_machine_runs_what_is_right() {
    assert_eq!(judge(&tiny(), &h200(), &EFFORT), Verdict::Safe { exhaustive: true });
}

#[test]
fn the_machine_sees_what_is_wrong() {
    goes_wrong(&[Kind::Hang], |s| s.regimes[0].tasks[5].waits[0].count += 1);
    goes_wrong(&[Kind::Unwritten, Kind::Stale, Kind::Invisible], |s| {
        let id = task(s, 0, "o.0", 0);
        s.regimes[0].tasks[id.index()].waits.clear();
    });
    goes_wrong(&[Kind::Invisible], |s| {
        s.regimes.iter_mut().for_each(|r| r.events[0].mechanism = Mechanism::Packets);
    });
    goes_wrong(&[Kind::Invisible], |s| s.regimes.iter_mut().for_each(|r| r.events[0].proxy = false));
    goes_wrong(&[Kind::Clobbered, Kind::Stale], |s| {
        let (a, b) = (buffer(s, "x.0").index(), buffer(s, "act.0").index());
        s.placement[a] = s.placement[b];
    });
    goes_wrong(&[Kind::Ring], |s| s.regimes[0].streams[0].swap(0, 1));
    goes_wrong(&[Kind::OutOfBounds], |s| s.program.context_max += 1);
    goes_wrong(&[Kind::Occupancy], |s| s.machine.smem[1].offset -= 128);
}

/// Both judges refuse two regimes whose attention is no longer the same over the same caches.
#[track_caller]
fn depends_on_the_border(kind: Kind, rule: Rule, base: &Schedule, mutate: impl FnOnce(&mut Schedule)) {
    let mut s = base.clone();
    mutate(&mut s);
    match judge(&s, &h200(), &Effort { states_max: 0, ..EFFORT }) {
        Verdict::Unsafe(fault) => assert_eq!(fault.kind, kind, "{fault}"),
        safe => panic!("expected {kind:?}, found {safe:?}"),
    }
    assert_eq!(rules(&s, &h200()), [rule]);
}

fn exchange_caches(s: &mut Schedule, a: (&str, [Role; 2]), b: (&str, [Role; 2])) {
    for (of_a, of_b) in a.1.into_iter().zip(b.1) {
        let was = operand(s, a.0, of_a).buffer;
        let other = std::mem::replace(&mut operand(s, b.0, of_b).buffer, was);
        operand(s, a.0, of_a).buffer = other;
    }
}

/// The regime of a position writes its rows of the history, and the next regime reads them.
#[test]
fn a_regime_reads_the_rows_of_the_previous_one() {
    const KEYS: [Role; 2] = [Role::HistoryK, Role::AppendK];
    const VALUES: [Role; 2] = [Role::HistoryV, Role::AppendV];
    let (one, two) = (tiny(), toy().0);
    let normed = Toy { qk_norm: Some(QkNormSpan::Head), ..TOY }.schedule(&h200(), &on_h200(4));
    depends_on_the_border(Kind::Unwritten, Rule::RegimeAppends, &one, |s| fresh_caches(s, "attn_split.0"));
    depends_on_the_border(Kind::Unwritten, Rule::RegimeAppends, &two, |s| fresh_caches(s, "attn.1"));
    let swapped = |s: &mut Schedule| exchange_caches(s, ("attn_split.0", KEYS), ("attn_split.0", VALUES));
    depends_on_the_border(Kind::Border, Rule::Alternatives, &one, swapped);
    depends_on_the_border(Kind::Border, Rule::Alternatives, &two, |s| {
        exchange_caches(s, ("attn_split.0", KEYS), ("attn_split.1", KEYS));
        exchange_caches(s, ("attn_split.0", VALUES), ("attn_split.1", VALUES));
    });
    depends_on_the_border(Kind::Border, Rule::Alternatives, &normed, |s| {
        let gains = operand(s, "attn.0", Role::KNormWeight).buffer;
        operand(s, "attn_split.0", Role::QNormWeight).buffer = gains;
    });
    let attributes: [fn(&mut Attention); 5] = [
        |a| a.scale *= 2.0,
        |a| a.softcap = Some(30.0),
        |a| a.window = Some(2),
        |a| a.interleaved = true,
        |a| (a.scale, a.window) = (0.5, Some(4)),
    ];
    for change in attributes {
        depends_on_the_border(Kind::Border, Rule::Alternatives, &two, |s| {
            let g = grid(s, "attn_split.1").index();
            let Op::Attention(a) = &mut s.program.grids[g].op else { panic!("attention") };
            change(a);
        });
    }
}

/// Rows of one cache in two layouts: each kernel is sound, and the next regime reads the pieces of a row in another order.
#[test]
fn alternatives_lay_out_rows_alike() {
    let wide = Toy { heads: 2, kv_heads: 1, dim: 64, ..TOY }.schedule(&h200(), &on_h200(4));
    let both = |s: &mut Schedule, grids: &[&str]| {
        for name in grids {
            let id = grid(s, name);
            let Some(Variant::Attention(variant)) = s.variants.get_mut(&id) else { panic!("{name} is attention") };
            assert!(variant.swizzled);
            // Three do not divide the warps, so this is not for tensor cores.
            (variant.warps_per_head, variant.swizzled) = (3, false);
        }
    };
    depends_on_the_border(Kind::Border, Rule::Alternatives, &wide, |s| both(s, &["attn_split.0"]));
    let mut plain = wide.clone();
    both(&mut plain, &["attn.0", "attn_split.0"]);
    assert_eq!(check(&plain, &beyond_kernels()), []);
}

/// The first regime comes back after the second: with the same caches nothing is lost, else rows are.
#[test]
fn a_regime_between_two_alike() {
    let mut s = tiny();
    let third = Regime { from_position: 5, ..s.regimes[0].clone() };
    s.regimes.push(third);
    let target = beyond_kernels();
    assert_eq!(check(&s, &target), []);
    assert!(!judge(&s, &target, &Effort { states_max: 0, ..EFFORT }).is_unsafe());
    fresh_caches(&mut s, "attn_split.0");
    assert_eq!(rules(&s, &target), [Rule::RegimeAppends]);
    assert!(judge(&s, &target, &Effort { states_max: 0, ..EFFORT }).is_unsafe());
}

/// Records of attention that only one regime has. As packets they carry the tag of their step; as words the other regime does not clear them.
#[test]
fn words_that_one_regime_does_not_clear() {
    let (mut s, target) = (records_of_one_regime(&h200()), beyond_kernels());
    let effort = Effort { states_max: 0, ..EFFORT };
    let x = buffer(&s, "x.0");
    as_words(&mut s, x);
    assert_eq!(check(&s, &target), [], "both regimes have x.0");
    assert!(!judge(&s, &target, &effort).is_unsafe());
    let records = buffer(&s, "partial.0");
    as_words(&mut s, records);
    assert_eq!(rules(&s, &target), [Rule::RegimeWords]);
    match judge(&s, &target, &effort) {
        Verdict::Unsafe(fault) => assert_eq!(fault.kind, Kind::Stale, "{fault}"),
        safe => panic!("words that nothing clears: {safe:?}"),
    }
}

/// Attention in two splits on sm0 and sm1, merged on sm2 from position `phases + 2` on and not before. The split of sm0 moves
/// to sm2 where the merge begins. Records have `phases` copies. SMs learn by packets that a step of another SM is done; for
/// sm1, which appends to the cache, by a fence.
fn unread_partials(moves: bool, all_fenced: bool, phases: u32) -> Schedule {
    let border = phases + 2;
    let toy = Toy {
        layers: 1,
        hidden: 16,
        heads: 1,
        kv_heads: 1,
        dim: 16,
        intermediate: 16,
        vocab: 24,
        context: 2 * border,
        ..TOY
    };
    let candidate = Candidate { splits: 2, split_from: 0, heads_per_task: 1, ..on_h200(3) };
    let mut s = toy.schedule(&h200(), &candidate);
    assert_eq!(s.regimes.len(), 1);
    // o.0 multiplies x.0, which has as many columns, so that nothing waits for the merge.
    let (x, attn, partial) = (buffer(&s, "x.0"), buffer(&s, "attn.0"), buffer(&s, "partial.0"));
    operand(&mut s, "o.0", Role::X).buffer = x;
    let regime = &mut s.regimes[0];
    let about_x = EventId::from(regime.events.iter().position(|e| e.buffer == x).expect("an event"));
    let about_attn = EventId::from(regime.events.iter().position(|e| e.buffer == attn).expect("an event"));
    let count = regime.events[about_x.index()].count;
    for wait in regime.tasks.iter_mut().flat_map(|t| &mut t.waits).filter(|w| w.event == about_attn) {
        *wait = Wait { event: about_x, count };
    }
    // The arg-max pair of each SM has its own event.
    let all = regime.events[0];
    let heads: Vec<usize> =
        (0..regime.tasks.len()).filter(|&t| regime.tasks[t].signals.contains(&EventId(0))).collect();
    assert_eq!((all.carried, heads.len()), (true, 3));
    let appends = attention(&s, 0, 1);
    let owners = s.regimes[0].owners();
    let regime = &mut s.regimes[0];
    let ids = [0, regime.events.len() as u32, regime.events.len() as u32 + 1].map(EventId);
    regime.events.extend([all, all]);
    for t in heads {
        let j = regime.tasks[t].j;
        let id = ids[j as usize];
        let event = &mut regime.events[id.index()];
        (event.lo, event.hi, event.count) = (2 * j, 2 * j + 2, 1);
        let fenced = all_fenced || owners[t] == owners[appends.index()];
        (event.mechanism, event.proxy) = if fenced { (Mechanism::Fenced, true) } else { (Mechanism::Packets, false) };
        regime.tasks[t].signals.retain(|e| *e != EventId(0));
        regime.tasks[t].signals.push(id);
    }
    for task in regime.tasks.iter_mut().filter(|t| t.waits.iter().any(|w| w.event == EventId(0))) {
        task.waits.retain(|w| w.event != EventId(0));
        task.waits.extend(ids.map(|event| Wait { event, count: 1 }));
    }
    // The same without a merge, from position 0 on.
    let mut first = s.regimes[0].clone();
    let merge = grid(&s, "attn_merge.0");
    s.regimes[0].from_position = border;
    let kept: Vec<usize> = (0..first.tasks.len()).filter(|&t| first.tasks[t].grid != merge).collect();
    let to = |id: TaskId| TaskId::from(kept.iter().position(|&t| t == id.index()).expect("a task that was kept"));
    let of_merge = |id: &TaskId| first.tasks[id.index()].grid == merge;
    first.queues.iter_mut().for_each(|q| q.retain(|id| !of_merge(id)));
    first.queues.iter_mut().flatten().for_each(|id| *id = to(*id));
    first.streams.iter_mut().flatten().for_each(|run| run.task = to(run.task));
    first.tasks = kept.iter().map(|&t| first.tasks[t].clone()).collect();
    // The output of the merge has no producer left.
    let last = EventId::from(first.events.len() - 1);
    for event in first.tasks.iter_mut().flat_map(|t| {
        let waits = t.waits.iter_mut().map(|w| &mut w.event);
        waits.chain(&mut t.signals)
    }) {
        if *event == last {
            *event = about_attn;
        }
    }
    first.events.swap_remove(about_attn.index());
    s.regimes.insert(0, first);
    let share = attention(&s, 0, 0);
    let from = s.regimes[0].owners()[share.index()].expect("an owner").index();
    if moves {
        let to = (0..3).find(|&sm| {
            sm != from && Some(sm) != s.regimes[0].owners()[attention(&s, 0, 1).index()].map(|sm| sm.index())
        });
        let to = to.expect("a third SM");
        let place = s.regimes[0].queues[from].iter().position(|id| *id == share).expect("its place");
        s.regimes[0].queues[from].remove(place);
        let queue = &mut s.regimes[0].queues[to];
        queue.insert(place.min(queue.len()), share);
        restream(&mut s);
    }
    s.program.buffers[partial.index()].phases = phases;
    s.placement[partial.index()] = Some(1 << 20);
    s
}

/// The task of share `j` of the first layer's attention.
fn attention(s: &Schedule, regime: usize, j: u32) -> TaskId {
    let tasks = s.regimes[regime].tasks.iter();
    let is = |t: &Task| matches!(s.program.grids[t.grid.index()].op, Op::Attention(_)) && t.j == j;
    TaskId::from(tasks.enumerate().find(|(_, t)| is(t)).expect("a share").0)
}

/// Seeing one packet of a task says nothing about packets without a reader: they may land over later writes.
#[test]
fn packets_without_a_reader_may_land_late() {
    for phases in [1, 2, 3, 4, 8] {
        late_packets(phases);
    }
}

#[track_caller]
fn late_packets(phases: u32) {
    let target = beyond_kernels();
    let effort = Effort { states_max: 0, ..EFFORT };
    for (moves, all_fenced) in [(false, false), (true, true)] {
        let s = unread_partials(moves, all_fenced, phases);
        assert_eq!(check(&s, &target), [], "{moves} {all_fenced} {phases}");
        let verdict = judge(&s, &target, &effort);
        assert_eq!(verdict, Verdict::Safe { exhaustive: false }, "{moves} {all_fenced} {phases}");
    }
    let s = unread_partials(true, false, phases);
    match judge(&s, &target, &effort) {
        Verdict::Unsafe(fault) => assert_eq!(fault.kind, Kind::Clobbered, "{fault}"),
        safe => panic!("with {phases} phases a store that lands late is not seen: {safe:?}"),
    }
    let violations = check(&s, &target);
    assert!(!violations.is_empty(), "{phases} phases");
    for violation in &violations {
        assert_eq!(violation.rule, Rule::OverwriteUnordered, "{violation}");
        assert!(violation.message.contains("packets without a reader"), "{violation}");
        assert_eq!(violation.entity, Entity::Task(1, attention(&s, 1, 0)), "{violation}");
        assert_eq!(violation.witness[0].entity, Entity::Task(0, attention(&s, 0, 0)), "{violation}");
    }
}

/// Needs no GPU: the kernel of the mutants still compiles, and the hooks of a sound schedule do nothing.
#[test]
fn the_hooks_of_mutants_fit_the_kernels() {
    let (s, target) = (tiny(), h200());
    let (source, queued) = device_form(&s, &s, &target);
    let bits = |s: &Schedule| -> Vec<u32> {
        s.regimes.iter().flat_map(|r| &r.tasks).map(|t| t.waits[0].event.0 >> 24).collect()
    };
    assert!(bits(&queued).iter().all(|bits| *bits == 0), "{:?}", bits(&queued));
    for (expected, mutate) in [
        (1, (|t| t.waits.clear()) as fn(&mut Task)),
        (1, |t| t.waits[0].count -= 1),
        (2, |t| t.waits[0].count += 1),
        (4, |t| t.signals.clear()),
    ] {
        let mut broken = s.clone();
        let id = task(&broken, 0, "o.0", 0).index();
        mutate(&mut broken.regimes[0].tasks[id]);
        let found = device_form(&broken, &s, &target).1.regimes[0].tasks[id].waits[0].event.0 >> 24;
        assert_eq!(found, expected);
    }
    // The task waits for an event that is signalled after it, instead of the event of its input, so it hangs.
    let mut broken = s.clone();
    let (id, last) = (task(&broken, 0, "o.0", 0).index(), broken.regimes[0].events.len() - 1);
    let count = broken.regimes[0].events[last].count;
    broken.regimes[0].tasks[id].waits = vec![Wait { event: EventId::from(last), count }];
    assert!(matches!(judge(&broken, &target, &EFFORT), Verdict::Unsafe(fault) if fault.kind == Kind::Hang));
    assert_eq!(device_form(&broken, &s, &target).1.regimes[0].tasks[id].waits[0].event.0 >> 24, 2);
    if let Some(nvrtc) = nvrtc("the_hooks_of_mutants_fit_the_kernels") {
        nvrtc.compile(&source).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn both_judges_agree_on_a_slice_of_the_population() {
    let size = |seed| Size { real: 0, single: 450, double: 100, random: 100, waves: 60, seed };
    let mut outcome = judge_population(&size(11), &[]);
    outcome.merge(judge_population(&size(12), &[]));
    let total = outcome.total();
    assert_eq!(total.false_accepts, 0, "{}\n{:?}", outcome.table(), outcome.faults);
    assert_eq!(total.unnamed, 0, "{}\n{:?}", outcome.table(), outcome.faults);
    assert!(total.unsafe_ > 500 && total.exhaustive > 50, "{}", outcome.table());
    let random = outcome.classes["random program"];
    // For example a queue whose `select` is not first, or a sum made in two ways: sometimes that does no harm.
    assert!(random.stricter * 50 <= random.judged, "random programs are rejected where they are unsafe: {random:?}");
}

/// Every word of the queues counts: each is flipped, and the third judge reports that it differs from the proven schedule.
#[test]
fn every_word_of_a_queue_is_read_back() {
    let owned = Toy { qk_norm: Some(QkNormSpan::Head), bias: true, window: Some(9), ..TOY };
    let whole = Toy { post_norms: true, ..owned };
    let mixture = Some(Mixture { corrected: true, shared: Some(true), ..MIXTURE });
    let mixed = Toy { mixture, ..owned };
    for (toy, sums_everywhere) in [(owned, 0), (whole, 0), (whole, 1), (mixed, 0)] {
        every_word_is_read_back(&toy.schedule(&h200(), &Candidate { sums_everywhere, ..on_h200(4) }), &h200());
    }
}

#[track_caller]
fn every_word_is_read_back(schedule: &Schedule, target: &Target) {
    let validated = validate(schedule.clone(), target).expect("a proof");
    let sound = encode(&validated);
    assert_eq!(disagreement(schedule, &sound), None);
    let words = |tables: &Tables| tables.entries.len() * 16;
    let mut unread = BTreeMap::new();
    for at in 0..words(&sound) {
        let mut tables = sound.clone();
        let word = &mut bytemuck::cast_slice_mut::<_, u32>(&mut tables.entries)[at];
        *word ^= 64;
        if disagreement(schedule, &tables).is_none() {
            *unread.entry(at % 16).or_insert(0) += 1;
        }
    }
    // The event that a watchdog would name, and the padding of an entry.
    assert_eq!(unread.keys().copied().collect::<Vec<usize>>(), [2, 9], "{unread:?}");
    for at in 0..sound.runs.len() * 8 {
        let mut tables = sound.clone();
        bytemuck::cast_slice_mut::<_, u32>(&mut tables.runs)[at] ^= 1 << 20;
        let weights = sound.runs[at / 8].bytes > 0;
        // In the place of shares, weights have the bytes from an aligned place on. Some are of a part that the step chooses: then they have its packet,
        // its size and the parts.
        let chosen = weights && sound.runs[at / 8].window > 0;
        let read = !weights || at % 8 < 6 || chosen && at % 8 > 5;
        assert_eq!(disagreement(schedule, &tables).is_some(), read, "word {at}: {:?}", sound.runs[at / 8]);
    }
    let begins: [fn(&mut Tables); 2] = [|t| t.entry_index[1] += 1, |t| t.run_index[1] += 1];
    for late in begins {
        let mut tables = sound.clone();
        late(&mut tables);
        assert!(disagreement(schedule, &tables).is_some());
    }
}
