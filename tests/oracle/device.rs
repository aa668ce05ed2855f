//! Makes the form in which a schedule that is not proven runs on a device: the kernel with hooks, and queues that drive them.
//!
//! The library has no way to do this: this file makes a `Validated` of an unproven schedule, in one place.
//!
//! A device waits by polling; counts, signals and waits of a schedule are not in its queues. So the kernel is compiled with hooks that
//! make it follow them exactly. The wrong behaviour of a task is encoded in the upper bits of the event of its first wait, which
//! the kernel otherwise only reports. A task may not wait (a wait is missing or asks for too little), wait for ever (a wait asks
//! for too much, or for an event that is signalled after it), publish nothing (a signal is missing), or mistake the previous step
//! for this one, or this one for the previous step.

use monobloc::codegen::KernelSource;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::ir::EventId;
use monobloc::ir::op::Access;
use monobloc::ir::program::Space;
use monobloc::ir::schedule::{Event, Mechanism, Regime, Schedule, Task, Wait};
use monobloc::target::Target;
use monobloc::validate::Validated;

/// The wrong behaviour of a task, as bits above an event's id.
const HURRIES: u32 = 1;
const WAITS_FOR_EVER: u32 = 2;
const IS_SILENT: u32 = 4;
const TAKES_THE_STEP_BEFORE: u32 = 8;
const TAKES_THE_STEP_AFTER: u32 = 16;
const SHIFT: u32 = 24;

/// The hooks: each `from` occurs once.
const HOOKS: [(&str, &str, &str); 7] = [
    (
        "runtime/sync.cuh",
        "__device__ __forceinline__ void publish(u64* to, u32 payload, u32 tag) {\n",
        "__device__ __forceinline__ u32& mutation() {\n  __shared__ u32 bits;\n  return bits;\n}\n\
         __device__ __forceinline__ void publish(u64* to, u32 payload, u32 tag) {\n  if (mutation() & 4u) return;\n",
    ),
    (
        "runtime/sync.cuh",
        "                                            u64 (&b)[N], Waiter w) {\n",
        "                                            u64 (&b)[N], Waiter w) {\n  \
         const u32 bits = w.at.entry->event >> 24;\n  \
         tag += (bits & 2u ? 0x40000000u : 0u) - (bits & 8u ? 1u : 0u) + (bits & 16u ? 1u : 0u);\n",
    ),
    (
        "runtime/sync.cuh",
        "    if (__all_sync(~0u, done)) return;\n    if (--left == 0) {\n      u32 seen = tag;\n",
        "    if (__all_sync(~0u, done) || (bits & 1u)) return;\n    if (--left == 0) {\n      u32 seen = tag;\n",
    ),
    (
        "runtime/sync.cuh",
        "                                              Waiter w) {\n  u32 left = w.patience;\n",
        "                                              Waiter w) {\n  \
         u32 left = w.patience;\n  const u32 bits = w.at.entry->event >> 24;\n  \
         tag += (bits & 2u ? 0x40000000u : 0u) - (bits & 8u ? 1u : 0u) + (bits & 16u ? 1u : 0u);\n",
    ),
    (
        "runtime/sync.cuh",
        "    if (__all_sync(~0u, done)) break;\n    if (--left == 0) {\n      u32 seen = tag;\n",
        "    if (__all_sync(~0u, done) || (bits & 1u)) break;\n    if (--left == 0) {\n      u32 seen = tag;\n",
    ),
    (
        "runtime/kernel.cuh",
        "      D::run(c, now, queue.entry(c, i));",
        "      c.barrier();\n      if (c.tid() == 0) mutation() = queue.entry(c, i).event >> 24;\n      c.barrier();\n      D::run(c, now, queue.entry(c, i));",
    ),
    // A hang costs 60 ms: a step takes microseconds.
    ("runtime/kernel.cuh", "global_ns() + p.timeout_ns", "global_ns() + 60000000ull"),
];
/// Fences that are left out if the events of a mutant do not have them.
const PROXY_FENCE: &[&str] = &["fence.proxy.async.global;"];
const STEP_FENCES: &[&str] = &["fence.release.gpu;", "fence.acquire.gpu;", "fence.acq_rel.gpu;"];

/// An unproven schedule, in the type of a proven one.
pub fn unproven(schedule: &Schedule) -> &Validated {
    // SAFETY: `Validated` is `repr(transparent)` over `Schedule`. It is not proven, which is the purpose of this file; no memory
    // safety of the host depends on the proof.
    unsafe { &*std::ptr::from_ref(schedule).cast::<Validated>() }
}

/// The kernel's source with its hooks, and the schedule whose first waits encode how tasks behave differently than in `sound`.
pub fn device_form(schedule: &Schedule, sound: &Schedule, target: &Target) -> (KernelSource, Schedule) {
    let mut source = emit(unproven(schedule), target, Trace::Off);
    let header = |source: &mut KernelSource, name: &str, edit: &dyn Fn(&str) -> String| {
        let (_, text) = source.headers.iter_mut().find(|(n, _)| n == name).expect("the header");
        *text = edit(text);
    };
    for (name, from, to) in HOOKS {
        header(&mut source, name, &|text| {
            assert_eq!(text.matches(from).count(), 1, "`{name}` has changed: where is `{from}`?");
            text.replace(from, to)
        });
    }
    let closes = |s: &Schedule, holds: fn(&Event) -> bool| {
        s.regimes.iter().all(|r| r.events.iter().filter(|e| e.carried).all(holds))
    };
    for (fences, holds) in
        [(PROXY_FENCE, (|e| e.proxy) as fn(&Event) -> bool), (STEP_FENCES, |e| e.mechanism != Mechanism::Packets)]
    {
        if closes(sound, holds) && !closes(schedule, holds) {
            for fence in fences {
                header(&mut source, "runtime/sync.cuh", &|all| {
                    let line = format!("  asm volatile(\"{fence}\" ::: \"memory\");\n");
                    assert!(all.contains(&line), "`runtime/sync.cuh` has changed: where is `{fence}`?");
                    all.replace(&line, "")
                });
            }
        }
    }
    let phases = |s: &Schedule| s.program.buffers.iter().map(|b| b.phases).max();
    if phases(schedule) < phases(sound) {
        // The copy that the host fills before the first step; places are those of two.
        header(&mut source, "ops/select.cuh", &|all| all.replace("(tag & 1) *", "1u *"));
        header(&mut source, "ops/matvec.cuh", &|all| all.replace("(c.tag & 1) *", "1u *"));
    }
    let mut queued = schedule.clone();
    for (r, regime) in schedule.regimes.iter().enumerate() {
        let bits = manners(schedule, regime, sound.regimes.get(r));
        for (task, bits) in queued.regimes[r].tasks.iter_mut().zip(bits) {
            let event = task.waits.first().map_or((1 << SHIFT) - 1, |w| w.event.0);
            task.waits = vec![Wait { event: EventId(bits << SHIFT | event), count: 0 }];
        }
    }
    (source, queued)
}

/// The wrong behaviour of each task of a regime.
fn manners(s: &Schedule, regime: &Regime, sound: Option<&Regime>) -> Vec<u32> {
    let mut signals = vec![0u32; regime.events.len()];
    regime.tasks.iter().flat_map(|t| &t.signals).for_each(|e| signals[e.index()] += 1);
    let stuck = stuck(regime);
    let writers = |event: &Event| {
        let writes = |task: &Task| {
            s.program.grids[task.grid.index()].operands.iter().any(|o| {
                let (lo, hi) = o.cols.range(task.lo, task.hi, task.j);
                o.access == Access::Write && o.buffer == event.buffer && lo < event.hi.into() && hi > event.lo.into()
            })
        };
        regime.tasks.iter().filter(|task| writes(task)).count() as u32
    };
    let needs: Vec<u32> = regime.events.iter().map(writers).collect();
    let same =
        sound.filter(|sound| sound.tasks.len() == regime.tasks.len() && sound.events.len() == regime.events.len());
    let mut all = vec![];
    for (t, task) in regime.tasks.iter().enumerate() {
        let mut bits = 0;
        let mut covered: Vec<(u32, u64, u64)> = vec![];
        for wait in &task.waits {
            let event = &regime.events[wait.event.index()];
            // It waits by itself for the data that it polls, but not for data that it writes, nor for other columns of its inputs.
            let mut operands = s.program.grids[task.grid.index()].operands.iter();
            let polls = operands.any(|o| {
                let (lo, hi) = o.cols.range(task.lo, task.hi, task.j);
                o.access == Access::Read && o.buffer == event.buffer && lo <= event.lo.into() && hi >= event.hi.into()
            });
            let never = stuck[t].is_some_and(|by| by == wait.event) && !polls;
            if wait.count > signals[wait.event.index()] || never {
                bits |= WAITS_FOR_EVER;
            }
            if let Some(was) = same.map(|sound| sound.events[wait.event.index()].carried) {
                match (was, event.carried) {
                    (false, true) => bits |= TAKES_THE_STEP_BEFORE,
                    (true, false) => bits |= TAKES_THE_STEP_AFTER,
                    _ => {}
                }
            }
            // A surplus signal has no effect on a reader of packets.
            if wait.count >= needs[wait.event.index()] {
                covered.push((event.buffer.0, event.lo.into(), event.hi.into()));
            }
        }
        covered.sort_unstable();
        for operand in &s.program.grids[task.grid.index()].operands {
            let shared = s.program.buffers.get(operand.buffer.index()).is_some_and(|b| b.space == Space::Exchange);
            let (mut at, hi) = operand.cols.range(task.lo, task.hi, task.j);
            if !shared || operand.access != Access::Read || at >= hi {
                continue;
            }
            for &(_, from, to) in covered.iter().filter(|c| c.0 == operand.buffer.0) {
                if from <= at {
                    at = at.max(to);
                }
            }
            // A task that waits forever for one event never reaches a read without a wait.
            if at < hi && bits & WAITS_FOR_EVER == 0 {
                bits |= HURRIES;
            }
        }
        if let Some(sound) = same
            && sound.tasks[t].signals.iter().any(|e| !task.signals.contains(e))
        {
            bits |= IS_SILENT;
        }
        all.push(bits);
    }
    all
}

/// The tasks at the heads of queues when no task of a step can run, and the event that each waits for.
fn stuck(regime: &Regime) -> Vec<Option<EventId>> {
    let mut signalled = vec![0u32; regime.events.len()];
    let mut next = vec![0usize; regime.queues.len()];
    let mut stuck = vec![None; regime.tasks.len()];
    loop {
        let mut moved = false;
        for (sm, queue) in regime.queues.iter().enumerate() {
            while let Some(id) = queue.get(next[sm]) {
                let task = &regime.tasks[id.index()];
                let waits = |w: &&Wait| !regime.events[w.event.index()].carried && signalled[w.event.index()] < w.count;
                stuck[id.index()] = task.waits.iter().find(waits).map(|w| w.event);
                if stuck[id.index()].is_some() {
                    break;
                }
                task.signals.iter().for_each(|e| signalled[e.index()] += 1);
                next[sm] += 1;
                moved = true;
            }
        }
        if !moved {
            return stuck;
        }
    }
}
