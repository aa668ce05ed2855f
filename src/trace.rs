//! Owns the evaluation of a traced launch's time stamps: a timeline of every SM, and a table of where a step's time goes.
//!
//! The first consumer warp of each SM stamps each of its tasks: when it began, when its inputs had arrived, when its sums
//! were done, when it ended, and how long it waited for ring slots. So a task's time has four parts
//!
//! ```text
//! wait      from its begin until its inputs from other SMs have arrived
//! starved   after that, waiting for chunks of weights or history
//! compute   the rest until its sums are done
//! finish    reduction across warps, epilogue, publishing
//! ```
//!
//! and a fifth, the `gap` until the next task of the SM begins. An op without inputs or without sums leaves those stamps out.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::ir::schedule::Schedule;
use crate::ir::{EventId, SmId, TaskId};

/// Words of one task: begin, inputs, sums and end, in nanoseconds of the device's clock, and the nanoseconds starved. 0 is a stamp
/// that the op leaves out. Equals `STAMP_WORDS` of kernels/runtime/context.cuh.
pub const STAMP_WORDS: usize = 5;

/// Stamps of a launch as the device wrote them, `[steps][sms][tasks_max][STAMP_WORDS]`.
#[derive(Debug, Clone, Copy)]
pub struct Stamps<'a> {
    pub words: &'a [u64],
    /// Most tasks of one SM and step for which there is room.
    pub tasks_max: usize,
    /// Position of the first step.
    pub position: u32,
    pub steps: u32,
}

/// One task of one SM in one step. Times in nanoseconds since the first stamp of the launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    pub step: u32,
    pub sm: SmId,
    pub task: TaskId,
    /// Name of the grid without its layer: `gate_up` of `gate_up.3`.
    pub kind: String,
    /// Name of the grid: `gate_up.3`.
    pub grid: String,
    /// The event that the watchdog would name, and its buffer without the layer.
    pub event: Option<(EventId, String)>,
    pub begin_ns: u64,
    pub inputs_ns: u64,
    pub sums_ns: u64,
    pub end_ns: u64,
    pub starved_ns: u64,
}

impl Span {
    /// wait, starved, compute, finish.
    fn parts_ns(&self) -> [u64; 4] {
        let busy = self.sums_ns - self.inputs_ns;
        let starved = self.starved_ns.min(busy);
        [self.inputs_ns - self.begin_ns, starved, busy - starved, self.end_ns - self.sums_ns]
    }
}

/// Why there is no timeline.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    #[error("expected {expected} words of stamps, found {found}")]
    Words { expected: usize, found: usize },
    #[error("{sm}, step {step}: {task} has no {stamp} stamp: the launch did not finish")]
    Missing { sm: SmId, step: u32, task: TaskId, stamp: &'static str },
    #[error("{sm}, step {step}: {task} has stamps out of order")]
    Order { sm: SmId, step: u32, task: TaskId },
}

/// Reads the stamps of a launch of `schedule`: SM by SM, in the order of execution.
///
/// # Errors
/// Too few words, a task that was not executed, a clock that runs backwards.
pub fn spans(schedule: &Schedule, stamps: Stamps<'_>) -> Result<Vec<Span>, TraceError> {
    let sms = schedule.machine.sms as usize;
    let expected = stamps.steps as usize * sms * stamps.tasks_max * STAMP_WORDS;
    if stamps.words.len() != expected {
        return Err(TraceError::Words { expected, found: stamps.words.len() });
    }
    let mut spans = vec![];
    for sm in 0..sms {
        for step in 0..stamps.steps {
            let regime = schedule.regime_at(stamps.position + step);
            let Some(queue) = regime.queues.get(sm) else { continue };
            for (at, &task) in queue.iter().enumerate().take(stamps.tasks_max) {
                let place = ((step as usize * sms + sm) * stamps.tasks_max + at) * STAMP_WORDS;
                let [begin, inputs, sums, end, starved] = std::array::from_fn(|word| stamps.words[place + word]);
                let sm = SmId::from(sm);
                for (stamp, value) in [("first", begin), ("last", end)] {
                    if value == 0 {
                        return Err(TraceError::Missing { sm, step, task, stamp });
                    }
                }
                // A part without a stamp takes no time. If only the sums have a stamp, inputs were waited for until then.
                let inputs = match (inputs, sums) {
                    (0, 0) => begin,
                    (0, sums) => sums,
                    (inputs, _) => inputs,
                };
                let sums = sums.max(inputs);
                if begin > inputs || sums > end {
                    return Err(TraceError::Order { sm, step, task });
                }
                let of = &regime.tasks[task.index()];
                let grid = schedule.program.grids[of.grid.index()].name.clone();
                let event = of.waits.first().map(|wait| {
                    let buffer = regime.events[wait.event.index()].buffer;
                    (wait.event, kind(&schedule.program.buffers[buffer.index()].name))
                });
                spans.push(Span {
                    step,
                    sm,
                    task,
                    kind: kind(&grid),
                    grid,
                    event,
                    begin_ns: begin,
                    inputs_ns: inputs,
                    sums_ns: sums,
                    end_ns: end,
                    starved_ns: starved,
                });
            }
        }
    }
    from_zero(std::slice::from_mut(&mut spans));
    Ok(spans)
}

/// Stamps of a launch of waves as the device wrote them.
#[derive(Debug, Clone, Copy)]
pub struct WaveStamps<'a> {
    /// The kind and the grid of each wave of a step.
    pub names: &'a [(&'a str, &'a str)],
    pub steps: u32,
    /// `[sms][steps][waves][STAMP_WORDS]`.
    pub words: &'a [u64],
}

/// Reads the stamps of launches that followed one another: of each launch SM by SM, in order. Times count from the first stamp of
/// all. After the wait for the previous wave, a wave computes, except while it starves.
///
/// # Errors
/// Words that are no whole number of SMs, a wave that was not executed, a clock that runs backwards.
pub fn wave_spans<const N: usize>(launches: [WaveStamps<'_>; N]) -> Result<[Vec<Span>; N], TraceError> {
    let mut spans = [const { vec![] }; N];
    for (spans, launch) in spans.iter_mut().zip(launches) {
        *spans = spans_on_clock(launch)?;
    }
    from_zero(&mut spans);
    Ok(spans)
}

/// As [`wave_spans`], with times of the device's clock.
fn spans_on_clock(WaveStamps { names, steps, words }: WaveStamps<'_>) -> Result<Vec<Span>, TraceError> {
    let of_step = names.len() * STAMP_WORDS;
    let of_sm = of_step * steps as usize;
    if of_sm == 0 || !words.len().is_multiple_of(of_sm) {
        return Err(TraceError::Words { expected: of_sm, found: words.len() });
    }
    let mut spans = vec![];
    for (i, words) in words.chunks_exact(of_step).enumerate() {
        let (sm, step) = (SmId::from(i / steps as usize), i as u32 % steps);
        for (wave, (&(does, grid), words)) in names.iter().zip(words.chunks_exact(STAMP_WORDS)).enumerate() {
            let task = TaskId::from(wave);
            let [begin_ns, inputs_ns, end_ns, starved_ns] = [words[0], words[1], words[3], words[4]];
            if end_ns == 0 {
                return Err(TraceError::Missing { sm, step, task, stamp: "last" });
            }
            if begin_ns > inputs_ns || inputs_ns > end_ns {
                return Err(TraceError::Order { sm, step, task });
            }
            let kind = format!("{} {does}", kind(grid));
            let grid = format!("{grid} {does}");
            spans.push(Span {
                step,
                sm,
                task,
                kind,
                grid,
                event: None,
                begin_ns,
                inputs_ns,
                sums_ns: end_ns,
                end_ns,
                starved_ns,
            });
        }
    }
    Ok(spans)
}

/// Shifts all times so that the first one is 0.
fn from_zero(launches: &mut [Vec<Span>]) {
    let first = launches.iter().flatten().map(|span| span.begin_ns).min().unwrap_or(0);
    for span in launches.iter_mut().flatten() {
        for time in [&mut span.begin_ns, &mut span.inputs_ns, &mut span.sums_ns, &mut span.end_ns] {
            *time -= first;
        }
    }
}

/// A name without the number of its layer: `o.add` of `o.3.add`.
fn kind(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| part.parse::<u32>().is_err()).collect();
    parts.join(".")
}

/// Mean, minimum and maximum over SMs, in microseconds of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize)]
pub struct OverSms {
    pub mean_us: f64,
    pub min_us: f64,
    pub max_us: f64,
}

impl OverSms {
    fn of(per_sm_ns: impl Iterator<Item = u64> + Clone, steps: u32) -> OverSms {
        let us = |ns: f64| ns / 1e3 / f64::from(steps.max(1));
        let count = per_sm_ns.clone().count().max(1);
        OverSms {
            mean_us: us(per_sm_ns.clone().sum::<u64>() as f64 / count as f64),
            min_us: us(per_sm_ns.clone().min().unwrap_or(0) as f64),
            max_us: us(per_sm_ns.max().unwrap_or(0) as f64),
        }
    }
}

/// Where a step's time goes in tasks of one kind. SMs without such a task count, too.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Row {
    pub kind: String,
    /// Buffers that its tasks wait for.
    pub waits_for: Vec<String>,
    /// Tasks of all SMs in one step.
    pub tasks: f64,
    pub wait: OverSms,
    pub starved: OverSms,
    pub compute: OverSms,
    pub finish: OverSms,
    /// From the end of a task until the next one of the SM begins.
    pub gap: OverSms,
}

/// Where a step's time goes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Table {
    /// From the first stamp of the launch to the last, over the steps.
    pub step_us: f64,
    /// In the order of execution within a step.
    pub rows: Vec<Row>,
    /// All rows together.
    pub all: Row,
}

/// Adds up the spans of a launch by kind. `spans` is the result of [`spans`] for one launch.
pub fn table(spans: &[Span], sms: u32, steps: u32) -> Table {
    const PARTS: usize = 5;
    struct Sum {
        first_ns: u64,
        tasks: u64,
        waits_for: Vec<String>,
        per_sm: Vec<[u64; PARTS]>,
    }
    let empty = || Sum { first_ns: u64::MAX, tasks: 0, waits_for: vec![], per_sm: vec![[0; PARTS]; sms as usize] };
    let mut kinds: BTreeMap<&str, Sum> = BTreeMap::new();
    let mut all = empty();
    for (at, span) in spans.iter().enumerate() {
        // The next span of the same SM; the last one of a launch has no gap.
        let next = spans.get(at + 1).filter(|next| next.sm == span.sm);
        let gap = next.map_or(0, |next| next.begin_ns.saturating_sub(span.end_ns));
        let [wait, starved, compute, finish] = span.parts_ns();
        for sum in [kinds.entry(&span.kind).or_insert_with(empty), &mut all] {
            sum.first_ns = sum.first_ns.min(span.begin_ns);
            sum.tasks += 1;
            for (total, part) in sum.per_sm[span.sm.index()].iter_mut().zip([wait, starved, compute, finish, gap]) {
                *total += part;
            }
            if let Some((_, buffer)) = &span.event
                && !sum.waits_for.contains(buffer)
            {
                sum.waits_for.push(buffer.clone());
            }
        }
    }
    let row = |kind: &str, sum: &Sum| {
        let part = |index: usize| OverSms::of(sum.per_sm.iter().map(move |parts| parts[index]), steps);
        Row {
            kind: kind.to_string(),
            waits_for: sum.waits_for.clone(),
            tasks: sum.tasks as f64 / f64::from(steps.max(1)),
            wait: part(0),
            starved: part(1),
            compute: part(2),
            finish: part(3),
            gap: part(4),
        }
    };
    let mut order: Vec<(&str, Sum)> = kinds.into_iter().collect();
    order.sort_by_key(|(_, sum)| sum.first_ns);
    let first = spans.iter().map(|span| span.begin_ns).min().unwrap_or(0);
    let last = spans.iter().map(|span| span.end_ns).max().unwrap_or(0);
    Table {
        step_us: (last - first) as f64 / 1e3 / f64::from(steps.max(1)),
        rows: order.iter().map(|(kind, sum)| row(kind, sum)).collect(),
        all: row("all", &all),
    }
}

/// The timeline of launches in the Trace Event Format that Perfetto and chrome://tracing open: a thread for each SM, a slice for each
/// task, and below it one for each of its parts that took time.
pub fn perfetto<'a>(spans: impl IntoIterator<Item = &'a Span>, process: &str) -> Value {
    let us = |ns: u64| ns as f64 / 1e3;
    let mut events = vec![json!({ "ph": "M", "pid": 1, "name": "process_name", "args": { "name": process } })];
    let mut named = BTreeSet::new();
    for span in spans {
        let thread = span.sm.index();
        if named.insert(thread) {
            let name = span.sm.to_string();
            events.push(json!({ "ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": { "name": name } }));
        }
        let slice = |name: &str, category: &str, begin: u64, end: u64, args: Value| {
            json!({
                "ph": "X", "pid": 1, "tid": thread, "name": name, "cat": category,
                "ts": us(begin), "dur": us(end - begin), "args": args,
            })
        };
        let args = json!({ "task": span.task.to_string(), "step": span.step, "starved_us": us(span.starved_ns) });
        events.push(slice(&span.grid, "task", span.begin_ns, span.end_ns, args));
        let wait = match &span.event {
            Some((event, buffer)) => format!("wait {buffer} ({event})"),
            None => "wait".to_string(),
        };
        for (name, category, begin, end) in [
            (wait.as_str(), "wait", span.begin_ns, span.inputs_ns),
            ("stream and compute", "compute", span.inputs_ns, span.sums_ns),
            ("finish", "finish", span.sums_ns, span.end_ns),
        ] {
            if end > begin {
                events.push(slice(name, category, begin, end, json!({})));
            }
        }
    }
    json!({ "displayTimeUnit": "ns", "traceEvents": events })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::candidate::Candidate;
    use crate::dtype::{DType, Precision};
    use crate::lower::lower;
    use crate::model::config::import_config_only;
    use crate::schedule::schedule;
    use crate::target::Target;

    /// A real schedule with two regimes on a few SMs.
    fn placed() -> Schedule {
        let config = include_str!("../manifests/configs/smollm2-135m.json");
        let graph = import_config_only(config, 0).unwrap().graph;
        let precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
        let target = Target::builtin("t4").unwrap();
        let candidate = Candidate::default_for(&graph, &target, precision);
        let program = lower(&graph, "smollm2", precision, 1024, &candidate).unwrap();
        schedule(program, &target, &candidate).unwrap()
    }

    /// Stamps of a launch in which the parts of every task take the times of `parts`, and a gap of 7 ns follows.
    fn stamped(schedule: &Schedule, position: u32, steps: u32, parts: [u64; 4]) -> (Vec<u64>, usize) {
        let sms = schedule.machine.sms as usize;
        let tasks_max = schedule.queue_max();
        let mut words = vec![0; steps as usize * sms * tasks_max * STAMP_WORDS];
        for sm in 0..sms {
            let mut clock = 1_000_000;
            for step in 0..steps {
                let queue = &schedule.regime_at(position + step).queues[sm];
                for at in 0..queue.len() {
                    let place = ((step as usize * sms + sm) * tasks_max + at) * STAMP_WORDS;
                    let [wait, starved, compute, finish] = parts;
                    let inputs = clock + wait;
                    let sums = inputs + starved + compute;
                    words[place..place + STAMP_WORDS].copy_from_slice(&[clock, inputs, sums, sums + finish, starved]);
                    clock = sums + finish + 7;
                }
            }
        }
        (words, tasks_max)
    }

    #[test]
    fn a_table_adds_up_and_keeps_the_order_of_a_step() {
        let schedule = placed();
        let (words, tasks_max) = stamped(&schedule, 3, 2, [100, 20, 300, 40]);
        let stamps = Stamps { words: &words, tasks_max, position: 3, steps: 2 };
        let spans = spans(&schedule, stamps).unwrap();
        let sms = schedule.machine.sms;
        let table = table(&spans, sms, 2);
        let kinds: Vec<&str> = table.rows.iter().map(|row| row.kind.as_str()).collect();
        let order = ["select", "qkv", "attn", "o", "gate_up", "down", "head"];
        let places: Vec<usize> = order
            .iter()
            .map(|kind| kinds.iter().position(|k| k == kind).unwrap_or_else(|| panic!("{kind} of {kinds:?}")))
            .collect();
        assert!(places.is_sorted(), "{kinds:?}");
        for part in ["wait", "starved", "compute", "finish"] {
            let mean = |row: &Row| match part {
                "wait" => row.wait.mean_us,
                "starved" => row.starved.mean_us,
                "compute" => row.compute.mean_us,
                _ => row.finish.mean_us,
            };
            let sum: f64 = table.rows.iter().map(mean).sum();
            assert!((sum - mean(&table.all)).abs() < 1e-9, "{part}: {sum} of {}", mean(&table.all));
        }
        let queue = |sm: usize| schedule.regime_at(3).queues[sm].len() as f64;
        let longest = (0..sms as usize).map(queue).fold(0.0, f64::max);
        assert!((table.all.wait.max_us - longest * 0.1).abs() < 1e-9);
        assert!((table.all.starved.max_us - longest * 0.02).abs() < 1e-9);
        // The last task of a launch has no gap, the others 7 ns.
        assert!((table.step_us - (longest * 2.0 * 0.467 - 0.007) / 2.0).abs() < 1e-9, "{}", table.step_us);
        let gate_up = table.rows.iter().find(|row| row.kind == "gate_up").unwrap();
        assert_eq!(gate_up.waits_for, ["x2"]);
    }

    #[test]
    fn a_change_of_regime_inside_a_launch_is_followed() {
        let schedule = placed();
        let split_from = schedule.regimes[1].from_position;
        let (words, tasks_max) = stamped(&schedule, split_from - 1, 2, [1, 0, 1, 1]);
        let stamps = Stamps { words: &words, tasks_max, position: split_from - 1, steps: 2 };
        let spans = spans(&schedule, stamps).unwrap();
        assert!(spans.iter().any(|span| span.step == 0 && span.kind == "attn"));
        assert!(spans.iter().any(|span| span.step == 1 && span.kind == "attn_split"));
        assert!(!spans.iter().any(|span| span.step == 1 && span.kind == "attn"));
    }

    #[test]
    fn stamps_that_ops_leave_out_take_no_time() {
        let schedule = placed();
        let (mut words, tasks_max) = stamped(&schedule, 0, 1, [100, 0, 300, 40]);
        words[1] = 0; // the first task has no inputs stamp: it waited until its sums
        words[STAMP_WORDS + 1] = 0;
        words[STAMP_WORDS + 2] = 0; // the second has neither
        fn stamps(words: &[u64], tasks_max: usize) -> Stamps<'_> {
            Stamps { words, tasks_max, position: 0, steps: 1 }
        }
        let found = spans(&schedule, stamps(&words, tasks_max)).unwrap();
        assert_eq!((found[0].parts_ns(), found[1].parts_ns()), ([400, 0, 0, 40], [0, 0, 0, 440]));
        words[0] = 0;
        let error = spans(&schedule, stamps(&words, tasks_max)).unwrap_err();
        let queue = schedule.regime_at(0).queues[0][0];
        assert_eq!(error.to_string(), format!("sm0, step 0: {queue} has no first stamp: the launch did not finish"));
        let error = spans(&schedule, stamps(&words[1..], tasks_max)).unwrap_err();
        assert!(matches!(error, TraceError::Words { .. }));
    }

    #[test]
    fn launches_that_follow_one_another_have_one_clock_and_a_table_each() {
        let names = [("append", "attn.0"), ("matmul", "head")];
        // Two SMs; a wave waits for 10 ns and computes for 90, of which it starves for 30.
        let words = |from: u64, waves: u64| -> Vec<u64> {
            let stamp = |wave: u64| [0, 10, 0, 100, 0].map(|at| from + 100 * wave + at);
            let of_sm: Vec<u64> = (0..waves).flat_map(stamp).collect();
            let of_sm = of_sm.iter().enumerate().map(|(at, &word)| if at % STAMP_WORDS == 4 { 30 } else { word });
            of_sm.clone().chain(of_sm).collect()
        };
        let (chunk, tail) = (words(7_000, 2), words(7_600, 1));
        let launches = [(&names[..], &chunk), (&names[1..], &tail)];
        let stamps = launches.map(|(names, words)| WaveStamps { names, steps: 1, words });
        let [chunk, tail] = wave_spans(stamps).unwrap();
        let times = |spans: &[Span]| spans.iter().map(|span| (span.begin_ns, span.end_ns)).collect::<Vec<_>>();
        assert_eq!(times(&chunk), [(0, 100), (100, 200), (0, 100), (100, 200)]);
        assert_eq!(times(&tail), [(600, 700), (600, 700)]);
        let tables = [&chunk, &tail].map(|spans| table(spans, 2, 1));
        let steps = tables.each_ref().map(|table| (table.step_us * 1e3).round());
        assert_eq!(steps, [200.0, 100.0]);
        let kinds = tables.map(|table| table.rows.into_iter().map(|row| row.kind).collect::<Vec<_>>());
        assert_eq!(kinds, [vec!["attn append", "head matmul"], vec!["head matmul"]]);
        let timeline = perfetto(chunk.iter().chain(&tail), "both");
        let events = timeline["traceEvents"].as_array().unwrap();
        assert_eq!(events.iter().filter(|event| event["name"] == "thread_name").count(), 2);
        assert_eq!(events.iter().filter(|event| event["cat"] == "task").count(), 6);
        let error = wave_spans([WaveStamps { names: &names[1..], steps: 1, words: &[1, 1, 1, 0, 0] }]).unwrap_err();
        assert_eq!(error.to_string(), "sm0, step 0: t0 has no last stamp: the launch did not finish");
    }

    #[test]
    fn the_timeline_is_nested_and_names_what_was_waited_for() {
        let schedule = placed();
        let (words, tasks_max) = stamped(&schedule, 0, 1, [100, 20, 300, 0]);
        let spans = spans(&schedule, Stamps { words: &words, tasks_max, position: 0, steps: 1 }).unwrap();
        let trace = perfetto(&spans, "smollm2");
        let events = trace["traceEvents"].as_array().unwrap();
        let threads = events.iter().filter(|event| event["name"] == "thread_name").count();
        assert_eq!(threads, schedule.machine.sms as usize);
        let mut tasks = 0;
        let mut outer = (0.0, 0.0);
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let (begin, end) =
                (event["ts"].as_f64().unwrap(), event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap());
            if event["cat"] == "task" {
                (tasks, outer) = (tasks + 1, (begin, end));
            } else {
                assert!(outer.0 <= begin && end <= outer.1 + 1e-9, "{event} lies in {outer:?}");
                assert_ne!(event["cat"], "finish", "what took no time has no slice");
            }
        }
        assert_eq!(tasks, spans.len());
        assert!(events.iter().any(|e| e["name"].as_str().is_some_and(|name| name.starts_with("wait x2 (e"))));
    }
}
