//! Tests models on several devices: they compute the bits of one device, both judges accept their schedules and refuse broken ones, and what is
//! not supported is refused by name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::encode;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::defaults::rows::{Room, place_one_row, place_rows};
use monobloc::interp::{Arithmetic, Interp, Options, Order};
use monobloc::ir::TaskId;
use monobloc::ir::layout::{Held, cache_row_bytes, chunk_rows, held, matrices, pack_bytes};
use monobloc::ir::op::{Op, Role};
use monobloc::ir::program::{Home, Space};
use monobloc::ir::schedule::{Mechanism, Schedule, Scope, Source};
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::model::config::{Imported, import, import_draft};
use monobloc::pack::pack;
use monobloc::schedule::{schedule, shards};
use monobloc::target::{DEVICES, Target};
use monobloc::validate::{Rule, share_caches, validate};

use crate::cli_support::{Place, manifest_text};
use crate::nvrtc::nvrtc;
use crate::oracle::Kind;
use crate::oracle::explore::Effort;
use crate::proof_support::*;
use crate::ptx::functions;
use crate::rows::both_judges;
use crate::serve::Server;
use crate::support::{checkpoints, fixture};
use serde_json::json;

const EFFORT: Effort = Effort { steps: 3, states_max: 20_000, walks: 24, stores: usize::MAX, seed: 1 };

/// The default schedule of a checkpoint on this number of devices of a CPU, proven.
fn placed(imported: &Imported, devices: u32) -> Schedule {
    let target = Target::builtin("cpu").expect("a record").on_devices(devices);
    let candidate = Candidate::default_for(&imported.graph, &target, FP32);
    let context_max = imported.graph.positions_max.min(64);
    let program = lower(&imported.graph, "test", FP32, context_max, &candidate).expect("it lowers");
    let placed = schedule(program, &target, &candidate).expect("it fits");
    validate(placed, &target).unwrap_or_else(|refused| panic!("{devices} devices: {refused}")).schedule().clone()
}

/// The bits of the logits after each token, and the tokens that follow.
fn computed(imported: &Imported, schedule: &Schedule, ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let options = Options { arithmetic: Arithmetic::Fast, order: Order::Threads(2) };
    let pack = Arc::new(pack(schedule, &imported.graph, &imported.weights).expect("a pack"));
    let mut interp = Interp::new(schedule, pack, options).expect("it runs");
    let logits = interp.logits(ids).expect("logits").concat().into_iter().map(f32::to_bits).collect();
    (logits, interp.greedy(ids, 8, |_| ControlFlow::Continue(())).expect("tokens"))
}

#[test]
fn several_devices_compute_the_bits_of_one() {
    let names = ["families", "dense", "experts", "hybrids"].map(checkpoints).concat();
    let mut compared = 0;
    for name in &names {
        let imported = import(&fixture(name)).expect("a checkpoint");
        let target = Target::builtin("cpu").expect("a record");
        let candidate = Candidate::default_for(&imported.graph, &target, FP32);
        // Some experts have shapes that no target has.
        if lower(&imported.graph, "test", FP32, imported.graph.positions_max.min(64), &candidate).is_err() {
            continue;
        }
        let ids = [3, 17, 4, 30, 9];
        let one = computed(&imported, &placed(&imported, 1), &ids);
        for devices in DEVICES.into_iter().filter(|devices| *devices > 1) {
            // A block without a unit of the head has no part in a step.
            if imported.graph.vocab.div_ceil(8) < devices {
                continue;
            }
            let several = placed(&imported, devices);
            assert_eq!(several.machine.devices, devices, "{name}");
            assert!(computed(&imported, &several, &ids) == one, "{name} on {devices} devices");
            compared += 1;
        }
    }
    assert!(compared >= 75, "{compared}");
}

#[test]
fn a_kv_head_is_on_one_device() {
    let toy = Toy { heads: 6, kv_heads: 3, ..TOY };
    let s = toy.schedule(&h200().on_devices(2), &Candidate { split_from: 3, ..on_h200(4) });
    for regime in &s.regimes {
        let owners = regime.owners();
        let mut heads: Vec<Vec<u32>> = vec![vec![]; 3];
        for (task, owner) in regime.tasks.iter().zip(&owners) {
            let Op::Attention(a) = &s.program.grids[task.grid.index()].op else { continue };
            let kv_head = task.lo * a.heads_per_task / a.group;
            heads[kv_head as usize].push(s.machine.device_of(owner.expect("a queue").index()));
        }
        let all_on = |device: u32| move |on: &Vec<u32>| !on.is_empty() && on.iter().all(|at| *at == device);
        // Three heads of two devices: the first has two.
        assert!(heads[..2].iter().all(all_on(0)) && heads[2..].iter().all(all_on(1)), "{heads:?}");
    }
}

#[test]
fn each_device_streams_its_part_of_the_weights() {
    let imported = import(&fixture("tinystories-llama")).expect("a checkpoint");
    for devices in [2, 4] {
        let s = placed(&imported, devices);
        let bytes = monobloc::ir::layout::streamed_bytes(&s);
        let each = bytes.len() / devices as usize;
        let shares: Vec<u64> = bytes.chunks(each).map(|of_device| of_device.iter().sum()).collect();
        let (least, most) = (shares.iter().min().expect("shares"), shares.iter().max().expect("shares"));
        assert!(most - least <= most / 20, "{devices} devices stream {shares:?} bytes");
    }
}

#[test]
fn a_model_may_be_larger_than_one_device() {
    let place = |devices: u32, memory: u64| {
        let mut target = h200().on_devices(devices);
        target.spec.memory_bytes = memory;
        let s = TOY.schedule(&h200().on_devices(devices), &on_h200(4));
        let refused = validate(s.clone(), &target).err();
        let rules: Vec<Rule> = refused.iter().flat_map(|refused| &refused.violations).map(|v| v.rule).collect();
        (rules, pack_bytes(&s) - held(&s, 0).bytes, s)
    };
    // What one device needs, to the byte.
    let (fits, refuses) = (|of: &(Vec<Rule>, u64, Schedule)| of.0.is_empty(), vec![Rule::DeviceMemory]);
    let needs = (1..).map(|n| n << 10).find(|memory| fits(&place(1, *memory))).expect("some memory is enough");
    assert_eq!(place(1, needs - 1024).0, refuses);
    let (rules, elsewhere, _) = place(2, needs - 1024);
    assert!(rules.is_empty() && elsewhere > 4096, "{rules:?}, {elsewhere} bytes of the pack are elsewhere");
    // But each has its part.
    assert_eq!(place(2, needs - elsewhere - 2048).0, refuses);
}

#[test]
fn one_device_has_the_program_that_it_had() {
    let (s, _) = toy();
    assert_eq!(shards(s.program.clone(), 1), s.program);
    let two = shards(s.program.clone(), 2);
    let home = |space| match space {
        Space::Private => Home::Sm,
        Space::Weight => Home::Divided,
        _ => Home::Everywhere,
    };
    assert!(two.buffers.iter().all(|b| b.home == home(b.space)));
}

/// A small layer on SMs of several devices, as `schedule` places it.
fn on_devices(devices: u32) -> (Schedule, Target) {
    let toy =
        Toy { layers: 1, hidden: 32, heads: 2, kv_heads: 2, dim: 8, intermediate: 32, vocab: 32, context: 8, ..TOY };
    let candidate = Candidate { splits: 1, heads_per_task: 1, ..on_h200(4) };
    (toy.schedule(&h200().on_devices(devices), &candidate), beyond_kernels().on_devices(devices))
}

/// The tasks of a grid on a device of two.
fn tasks_on(s: &Schedule, grid_name: &str, device: u32) -> Vec<TaskId> {
    let (id, owners) = (grid(s, grid_name), s.regimes[0].owners());
    let tasks = (0..s.regimes[0].tasks.len()).map(TaskId::from);
    let here = |t: &TaskId| owners[t.index()].is_some_and(|sm| s.machine.device_of(sm.index()) == device);
    tasks.filter(|t| s.regimes[0].tasks[t.index()].grid == id).filter(here).collect()
}

#[test]
fn both_judges_know_a_model_on_two_devices() {
    const UNSEEN: &[Kind] = &[Kind::Unwritten, Kind::Stale, Kind::Invisible];
    both_judges(
        on_devices(2),
        &EFFORT,
        &[
            ("packets that one device lacks", Rule::Home, UNSEEN, |s| {
                let act = buffer(s, "act.0");
                s.program.buffers[act.index()].home = Home::Device(0);
            }),
            ("a vector without the part of a device", Rule::MissingSignal, UNSEEN, |s| {
                let x2 = event(s, 0, "x2.0", 0, 32);
                let silent = tasks_on(s, "o.0", 1);
                let count = s.regimes[0].events[x2.index()].count - silent.len() as u32;
                s.regimes[0].events[x2.index()].count = count;
                for id in silent {
                    s.regimes[0].tasks[id.index()].signals.retain(|event| *event != x2);
                }
                let waits = s.regimes[0].tasks.iter_mut().flat_map(|task| &mut task.waits);
                waits.filter(|wait| wait.event == x2).for_each(|wait| wait.count = count);
            }),
            (
                "a place that the other device still reads",
                Rule::PlacementOverlap,
                &[Kind::Clobbered, Kind::Stale],
                |s| {
                    let (x, act) = (buffer(s, "x.0").index(), buffer(s, "act.0").index());
                    s.placement[act] = s.placement[x];
                },
            ),
            ("a scope of one device", Rule::Scope, &[Kind::Invisible], |s| {
                let events = s.regimes[0].events.iter_mut();
                events.filter(|event| !event.carried).for_each(|event| event.scope = Scope::Device);
            }),
            ("a device one step ahead", Rule::MissingWait, UNSEEN, |s| {
                for id in tasks_on(s, "select", 1) {
                    s.regimes[0].tasks[id.index()].waits.clear();
                }
            }),
            ("units that another device holds", Rule::Home, &[Kind::Unwritten], |s| {
                let [a, b] = [0, 1].map(|device| tasks_on(s, "gate_up.0", device)[0]);
                swap_queued(s, 0, a, b);
                restream(s);
            }),
            ("a head that another device appends", Rule::Home, UNSEEN, |s| {
                let [a, b] = [0, 1].map(|device| tasks_on(s, "attn.0", device)[0]);
                let mut other = s.clone();
                other.regimes[0].from_position = 4;
                swap_queued(&mut other, 0, a, b);
                restream(&mut other);
                s.regimes.push(other.regimes.remove(0));
            }),
        ],
    );
}

/// Steps of two rows over pages, as a batch kernel runs them: what crosses is words.
fn words_on_two() -> (Schedule, Target) {
    let toy =
        Toy { layers: 1, hidden: 32, heads: 2, kv_heads: 2, dim: 8, intermediate: 32, vocab: 32, context: 8, ..TOY };
    let candidate = Candidate { splits: 1, heads_per_task: 1, ..on_h200(4) };
    let page_rows = chunk_rows(candidate.slot_bytes, cache_row_bytes(toy.dim, toy.precision.cache));
    let batch = Batch { rows: 2, sequences: 2, pages: 3, page_rows, words: true };
    let program =
        lower_batch(&toy.graph(), "words", toy.precision, toy.context, &batch, &candidate).expect("it lowers");
    let target = h200().on_devices(2);
    (schedule(program, &target, &candidate).expect("it fits"), target)
}

#[test]
fn both_judges_know_a_batch_on_two_devices() {
    const UNSEEN: &[Kind] = &[Kind::Unwritten, Kind::Stale, Kind::Invisible, Kind::Clobbered];
    let (s, target) = words_on_two();
    let proven = validate(s, &target).unwrap_or_else(|refused| panic!("{refused}"));
    both_judges(
        (proven.schedule().clone(), target),
        &Effort { walks: 8, ..EFFORT },
        &[
            ("words that one device lacks", Rule::Home, UNSEEN, |s| {
                let act = buffer(s, "act.0");
                s.program.buffers[act.index()].home = Home::Device(0);
            }),
            ("a place that the other device still reads", Rule::PlacementOverlap, CLOBBERED, |s| {
                let (x, act) = (buffer(s, "x.0").index(), buffer(s, "act.0").index());
                s.placement[act] = s.placement[x];
            }),
            ("words of one device's scope", Rule::Scope, &[Kind::Invisible], |s| {
                let x = buffer(s, "x.0");
                s.regimes[0].events.iter_mut().filter(|e| e.buffer == x).for_each(|e| e.scope = Scope::Device);
            }),
            ("a device one step ahead", Rule::MissingWait, UNSEEN, |s| {
                for id in tasks_on(s, "select", 1) {
                    s.regimes[0].tasks[id.index()].waits.clear();
                }
            }),
            ("an event that misses a device", Rule::MissingSignal, UNSEEN, |s| {
                let x2 = event(s, 0, "x2.0", 0, 32);
                let silent = tasks_on(s, "o.0", 1);
                let count = s.regimes[0].events[x2.index()].count - silent.len() as u32;
                s.regimes[0].events[x2.index()].count = count;
                for id in silent {
                    s.regimes[0].tasks[id.index()].signals.retain(|event| *event != x2);
                }
                let waits = s.regimes[0].tasks.iter_mut().flat_map(|task| &mut task.waits);
                waits.filter(|wait| wait.event == x2).for_each(|wait| wait.count = count);
            }),
            ("units that another device holds", Rule::Home, &[Kind::Unwritten], |s| {
                let [a, b] = [0, 1].map(|device| tasks_on(s, "gate_up.0", device)[0]);
                swap_queued(s, 0, a, b);
                restream(s);
            }),
        ],
    );
}

/// What a place that is used too early does.
const CLOBBERED: &[Kind] = &[Kind::Clobbered, Kind::Stale];

#[test]
fn both_judges_know_experts_on_two_devices() {
    let candidate = Candidate { splits: 1, ..on_h200(2) };
    let s = small_mixture(MIXTURE).schedule(&h200().on_devices(2), &candidate);
    // Each device has half of the units of an expert, whichever slot chooses it.
    for device in [0, 1] {
        let of = tasks_on(&s, "gate_up.0", device);
        let slots: BTreeSet<u32> = of.iter().map(|task| s.regimes[0].tasks[task.index()].j).collect();
        assert_eq!(slots.len(), 2, "device {device}: {of:?}");
    }
    both_judges(
        (s, beyond_kernels().on_devices(2)),
        &Effort { walks: 8, ..EFFORT },
        &[("units that another device holds", Rule::Home, &[Kind::Unwritten], |s| {
            let [a, b] = [0, 1].map(|device| tasks_on(s, "gate_up.0", device)[0]);
            swap_queued(s, 0, a, b);
            restream(s);
        })],
    );
}

#[test]
fn a_state_is_on_one_device_in_every_kernel() {
    let graph = import(&fixture("hybrids/qwen35")).expect("a checkpoint").graph;
    let target = h200().on_devices(2);
    let device_of_heads = |s: &Schedule| {
        let mut heads: BTreeMap<(String, u32), BTreeSet<u32>> = BTreeMap::new();
        for (task, owner) in s.regimes[0].tasks.iter().zip(s.regimes[0].owners()) {
            let grid = &s.program.grids[task.grid.index()];
            if grid.operand(Role::State).is_some() {
                let device = s.machine.device_of(owner.expect("a queue").index());
                heads.entry((grid.name.clone(), task.lo)).or_default().insert(device);
            }
        }
        heads
    };
    let place = |rows: u32, sms: u32, target: &Target| {
        let candidate = Candidate { sms, ..Candidate::default_for(&graph, target, FP32).for_context(64) };
        let room = Room { rows, sequences: 4, positions: 256 };
        let placed = match rows {
            1 => place_one_row(&graph, "states", FP32, 64, target, &candidate, room),
            _ => place_rows(&graph, "states", FP32, 64, target, &candidate, room),
        };
        validate(placed.expect("it fits"), target).unwrap_or_else(|refused| panic!("{refused}"))
    };
    let (one, other, rows) = (place(1, 4, &target), place(1, 8, &target), place(8, 8, &target));
    let heads = device_of_heads(one.schedule());
    assert!(heads.values().all(|devices| devices.len() == 1) && heads.len() > 1, "{heads:?}");
    assert_eq!(heads, device_of_heads(other.schedule()));
    assert_eq!(heads, device_of_heads(rows.schedule()));
    share_caches(&one, &rows).expect("one cache");
    let refused = share_caches(&place(1, 4, &h200()), &rows).expect_err("a kernel of one device");
    assert_eq!(refused.what, "states on other devices");
}

#[test]
fn a_device_holds_its_part_of_a_pack() {
    let imported = import(&fixture("experts/olmoe")).expect("a checkpoint");
    let whole = placed(&imported, 1);
    let of_one = held(&whole, 0);
    assert_eq!(of_one.bytes, pack_bytes(&whole));
    assert!(of_one.ranges.iter().all(|(range, at)| range.start == *at), "{:?}", of_one.ranges);
    for devices in [2, 4] {
        let s = placed(&imported, devices);
        // The pack is that of one device.
        let packed = |s: &Schedule| -> Vec<Option<u64>> {
            let places = s.program.buffers.iter().zip(&s.placement);
            places.filter(|(buffer, _)| buffer.space.immutable()).map(|(_, place)| *place).collect()
        };
        assert_eq!(packed(&s), packed(&whole));
        let parts: Vec<Held> = (0..devices).map(|device| held(&s, device)).collect();
        let matrices = matrices(&s.program);
        for (b, matrix) in matrices.iter().enumerate() {
            let Some(matrix) = matrix else { continue };
            let kept: u64 = parts.iter().map(|held| u64::from(held.units[b].end - held.units[b].start)).sum();
            let of_pack = |held: &Held| -> u64 {
                let place = s.placement[b].expect("a place");
                let units = place..place + matrix.units_bytes();
                held.ranges.iter().map(|(r, _)| r.end.min(units.end).saturating_sub(r.start.max(units.start))).sum()
            };
            // All devices together have each unit once.
            assert_eq!(parts.iter().map(of_pack).sum::<u64>(), matrix.units_bytes());
            assert!(kept > 0 && u64::from(matrix.units) % kept == 0);
        }
        for held in &parts {
            assert!(held.bytes < pack_bytes(&whole), "{}", held.bytes);
            // No two ranges lie at one place.
            let mut at: Vec<(u64, u64)> = held.ranges.iter().map(|(r, at)| (*at, at + r.end - r.start)).collect();
            at.sort_unstable();
            assert!(at.windows(2).all(|pair| pair[0].1 <= pair[1].0) && at.iter().all(|(_, end)| *end <= held.bytes));
        }
    }
}

/// Every chunk of weights that an SM streams has, in the memory of its device, the bytes that it has in the whole pack.
#[test]
fn queues_find_weights_in_the_part_of_their_device() {
    let imported = import(&fixture("experts/olmoe")).expect("a checkpoint");
    let on = |devices: u32| {
        let target = h200().on_devices(devices);
        let candidate = Candidate { sms: 8, ..Candidate::default_for(&imported.graph, &target, FP32).for_context(64) };
        let program = lower(&imported.graph, "test", FP32, 64, &candidate).expect("it lowers");
        let placed = schedule(program, &target, &candidate).expect("it fits");
        validate(placed, &target).unwrap_or_else(|refused| panic!("{refused}"))
    };
    let two = on(2);
    let s = two.schedule();
    let bytes = pack(s, &imported.graph, &imported.weights).expect("a pack");
    let tables = encode(&two);
    let matrices = matrices(&s.program);
    let mut judged = 0;
    for device in [0, 1] {
        let (held, own) = (held(s, device), tables.of_device(&s.machine, device));
        let mut memory = vec![0; held.bytes as usize];
        for (range, at) in &held.ranges {
            let (from, at) = (range.start as usize..range.end as usize, *at as usize);
            memory[at..at + from.len()].copy_from_slice(&bytes[from]);
        }
        let each = s.machine.sms as usize / 2;
        let streams = &s.regimes[0].streams[device as usize * each..][..each];
        for (run, encoded) in streams.iter().flatten().zip(&own.runs) {
            let Source::Units { buffer, lo, hi } = run.source else { continue };
            let (matrix, place) = (matrices[buffer.index()].expect("a matrix"), s.placement[buffer.index()]);
            let grid = &s.program.grids[s.regimes[0].tasks[run.task.index()].grid.index()];
            let begin = u64::from(encoded.head_j) * 256 + u64::from(encoded.splits >> 16);
            for part in 0..u64::from(encoded.rows & 0xffff).max(1) {
                let from = place.expect("a place") + (part * u64::from(grid.n) + u64::from(lo)) * matrix.unit_bytes;
                let at = (begin + part * u64::from(encoded.row_bytes) * 16) as usize;
                let count = (u64::from(hi - lo) * matrix.unit_bytes) as usize;
                assert!(memory[at..at + count] == bytes[from as usize..from as usize + count], "{}", grid.name);
                judged += 1;
            }
        }
    }
    assert!(judged > 100, "{judged}");
}

#[test]
fn both_judges_know_a_model_on_four_devices() {
    both_judges(
        on_devices(4),
        &EFFORT,
        &[("an event of one device", Rule::Scope, &[Kind::Invisible], |s| {
            let x = buffer(s, "x.0");
            s.regimes[0].events.iter_mut().filter(|e| e.buffer == x).for_each(|e| e.scope = Scope::Device);
        })],
    );
}

#[test]
fn what_devices_do_not_have_is_refused() {
    let target = cpu().on_devices(2);
    let refused = |name: &str, candidate: &dyn Fn(Candidate) -> Candidate| {
        let imported = import(&fixture(name)).expect("a checkpoint");
        let candidate = candidate(Candidate::default_for(&imported.graph, &target, FP32));
        let program = lower(&imported.graph, "test", FP32, 32, &candidate).expect("it lowers");
        schedule(program, &target, &candidate).expect_err("refused").to_string()
    };
    assert_eq!(
        refused("tinystories-llama", &|c| Candidate { sms: 3, ..c }),
        "`sms` is 3, expected a multiple of 2, for devices have equal numbers of SMs"
    );
    assert_eq!(
        refused("tinystories-llama", &|c| Candidate { mechanism: Mechanism::Counter, ..c }),
        "`mechanism` is counter, expected packets on `cpu-x2`, which has 2 devices"
    );
    let draft = import_draft(&fixture("mtp/qwen35")).expect("a draft").graph;
    let (target, candidate) = (h200().on_devices(2), Candidate::default_for(&draft, &h200(), FP32).for_context(64));
    let program = lower(&draft, "draft", FP32, 64, &candidate).expect("it lowers");
    let refused = schedule(program, &target, &candidate).expect_err("refused").to_string();
    assert_eq!(refused, "the kernel of a draft cannot be divided among the 2 devices of `h200-x2`");
}

/// A manifest of the small trained Llama with these lines in its target.
fn manifest(place: &Place, name: &str, target: &str) {
    let checkpoint = fixture("tinystories-llama");
    let text = format!(
        "[model]\nsource = \"path:{}\"\n\n[precision]\nweights = \"fp32\"\n\n[decode]\ncontext_max = 96\n\n\
         [[target]]\n{target}\n",
        checkpoint.display()
    );
    place.write(name, text);
}

#[test]
fn commands_on_two_devices_answer_as_on_one() {
    let place = Place::new();
    manifest(&place, "one.toml", "record = \"cpu\"");
    manifest(&place, "two.toml", "record = \"cpu\"\ndevices = 2");
    let of =
        |command: &str, manifest: &str, rest: &str| place.run(&format!("{command} {manifest} {rest}")).code(0).stdout;
    for (command, rest) in [
        ("generate", "--ids 1,40,7,300 --max-tokens 24"),
        ("generate", "--ids 1,40,7 --max-tokens 12 --temperature 0.8 --seed 7"),
    ] {
        assert_eq!(of(command, "one.toml", rest), of(command, "two.toml", rest), "{command} {rest}");
    }
    for (manifest, file) in [("one.toml", "one.logits"), ("two.toml", "two.logits")] {
        place.run(&format!("logits {manifest} --ids 1,40,7,300,12 --out {file}")).code(0);
    }
    let [one, two] = ["one.logits", "two.logits"].map(|file| fs::read(place.path(file)).expect("logits"));
    assert!(!one.is_empty() && one == two);
    let built = place.run("build two.toml").code(0);
    assert!(built.stderr.contains("cpu-x2") || built.stdout.contains("cpu-x2"), "{} {}", built.stdout, built.stderr);
    let shown = of("show", "schedule two.toml", "");
    assert!(shown.contains("machine \"cpu-x2\" sms=8 devices=2 "), "{}", &shown[..400]);
    let file = place.write("two.mkir", shown);
    let proven = place.run(&format!("validate {}", file.display())).code(0);
    assert!(proven.stdout.contains("for target `cpu-x2`"), "{}", proven.stdout);
}

#[test]
fn a_server_on_two_devices_answers_as_on_one() {
    let source = format!("path:{}", fixture("tinystories-llama").display());
    let one = manifest_text(&source, 128);
    let two = one.replace("record = \"cpu\"", "record = \"cpu\"\ndevices = 2");
    let asked = |seed: u32| json!({ "prompt": ["Once upon a time", "The cat", "Tom and"], "max_tokens": 12, "temperature": 0.8, "seed": seed });
    let answers = [one, two].map(|manifest| {
        let server = Server::start_of_manifest(Place::new(), &manifest, "--max-batch 3", |_| {});
        [1, 2].map(|seed| server.ok("/v1/completions", &asked(seed))["choices"].clone())
    });
    assert!(answers[0][0].as_array().is_some_and(|choices| choices.len() == 3), "{}", answers[0][0]);
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn manifests_with_devices_are_refused_by_name() {
    let place = Place::new();
    manifest(&place, "three.toml", "record = \"cpu\"\ndevices = 3");
    place
        .run("build three.toml")
        .fault(2, &["`target.devices` is out of range", "expected 1, 2, 4 or 8 devices, found 3"]);
    manifest(&place, "twice.toml", "record = \"cpu\"\ndevices = 2\n\n[[target]]\nrecord = \"cpu\"\ndevices = 2");
    place.run("build twice.toml").fault(2, &["duplicate target `cpu-x2`"]);
}

#[test]
fn a_batch_kernel_of_two_devices_reaches_both() {
    let Some(nvrtc) = nvrtc("a_batch_kernel_of_two_devices_reaches_both") else { return };
    let (graph, target) = (Toy { precision: BF16, dim: 64, hidden: 128, ..TOY }.graph(), h200().on_devices(2));
    let candidate = Candidate { sms: 8, ..Candidate::default_for(&graph, &target, BF16).for_context(128) };
    for rows in [1, 8, 16] {
        let room = Room { rows, sequences: 4, positions: 256 };
        let placed = match rows {
            1 => place_one_row(&graph, "toy", BF16, 128, &target, &candidate, room),
            _ => place_rows(&graph, "toy", BF16, 128, &target, &candidate, room),
        };
        let proven = validate(placed.expect("it fits"), &target).unwrap_or_else(|refused| panic!("{refused}"));
        let ptx = nvrtc.ptx(&emit(&proven, &target, Trace::Off)).unwrap_or_else(|error| panic!("{rows} rows: {error}"));
        let functions = functions(&ptx);
        let codes: Vec<&str> = functions.iter().flat_map(|f| &f.statements).map(|s| s.opcode.as_str()).collect();
        let relaxed = |code: &&&str| code.contains(".relaxed") && code.contains(".global");
        let stores = codes.iter().filter(relaxed).filter(|code| code.starts_with("st.")).count();
        assert!(codes.iter().filter(relaxed).all(|code| code.contains(".sys")), "{rows} rows");
        assert!(stores > 0 && stores % 2 == 0, "{rows} rows: {stores} stores");
        assert!(codes.contains(&"fence.release.sys") && codes.contains(&"fence.acquire.sys"), "{rows} rows");
    }
}

/// The kernel of a toy on this number of devices of an H200.
fn kernel(toy: &Toy, devices: u32, sms: u32) -> (KernelSource, monobloc::validate::Validated) {
    let target = h200().on_devices(devices);
    let placed = toy.schedule(&target, &Candidate { splits: 2, ..on_h200(sms) });
    let proven = validate(placed, &target).unwrap_or_else(|refused| panic!("{refused}"));
    (emit(&proven, &target, Trace::Off), proven)
}

#[test]
fn a_kernel_of_several_devices_reaches_all_of_them() {
    let Some(nvrtc) = nvrtc("a_kernel_of_several_devices_reaches_all_of_them") else { return };
    let accesses = |source: &KernelSource| -> BTreeMap<String, usize> {
        let mut found = BTreeMap::new();
        let ptx = nvrtc.ptx(source).unwrap_or_else(|error| panic!("{error}"));
        for function in functions(&ptx) {
            let orders = |code: &&str| {
                ["relaxed", "fence.acquire", "fence.release", "fence.acq_rel"].iter().any(|word| code.contains(word))
            };
            let of_memory = |code: &&str| code.contains(".global") || code.starts_with("fence");
            let codes = function.statements.iter().map(|statement| statement.opcode.as_str());
            for code in codes.filter(orders).filter(of_memory) {
                *found.entry(code.to_string()).or_default() += 1;
            }
        }
        found
    };
    let toy = Toy { precision: BF16, ..TOY };
    let [one, two, four] = [(1, 4), (2, 4), (4, 8)].map(|(devices, sms)| accesses(&kernel(&toy, devices, sms).0));
    for of_several in [&two, &four] {
        assert!(of_several.keys().all(|code| code.contains(".sys") && !code.contains(".gpu")), "{of_several:?}");
    }
    assert!(one.keys().all(|code| !code.contains(".sys")), "{one:?}");
    // Each packet is stored once for each device.
    let stores = |of: &BTreeMap<String, usize>| {
        of.iter().filter(|(code, _)| code.starts_with("st.")).map(|(_, n)| n).sum::<usize>()
    };
    assert_eq!((stores(&two), stores(&four)), (2 * stores(&one), 4 * stores(&one)), "{one:?} {two:?} {four:?}");
}
