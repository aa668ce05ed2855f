//! Prints figures of the host side as a table: passes and proof, import, interpreter, and builds without work.
//!
//! `cargo bench` runs all parts, `cargo bench -- passes import` those that are named: `passes`, `load`, `rows`, `compile`, `validator`,
//! `import`, `generate`, `streams`, `builds`. `compile` needs NVRTC, and says if there is none. Run it on an idle machine, because spinning threads suffer most from other work. These are figures to look at,
//! not tests; `docs/host-bench.md` has those of one machine, with their targets.

mod clock;

use clock::core_seconds;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use monobloc::candidate::Candidate;
use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::{Trace, emit};
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::digest::Digest;
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Input, Interp, Options};
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::{Batch, lower, lower_batch};
use monobloc::manifest::Manifest;
use monobloc::model::config::{Imported, import, import_config_only, step_cache_bytes, step_weight_bytes};
use monobloc::model::graph::ModelGraph;
use monobloc::model::source::{Resolved, Source, resolve};
use monobloc::pack::pack;
use monobloc::pages::Pool;
use monobloc::rows::{Guard, Request, Row, SequenceId, Shape};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{check, validate};

const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

/// The parts, in the order in which they run.
const PARTS: [(&str, fn()); 9] = [
    ("passes", passes),
    ("load", load),
    ("rows", rows),
    ("compile", compile),
    ("validator", validator),
    ("import", sparse_import),
    ("generate", generate),
    ("streams", streams),
    ("builds", builds),
];

fn main() {
    // Cargo passes `--bench`.
    let asked: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    if let Some(unknown) = asked.iter().find(|word| PARTS.iter().all(|(name, _)| name != word)) {
        eprintln!("no part `{unknown}`: expected {}", PARTS.map(|(name, _)| name).join(", "));
        std::process::exit(2);
    }
    println!("Machine: {}, {} cores\n", cpu_model(), cores());
    println!("| what | figure |\n| --- | --- |");
    for (name, part) in PARTS {
        if asked.is_empty() || asked.iter().any(|word| word == name) {
            part();
        }
    }
}

fn row(what: &str, figure: &str) {
    println!("| {what} | {figure} |");
    // Flushed, so that a row is visible at once, also through a pipe.
    std::io::stdout().flush().expect("stdout");
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Linux; elsewhere the architecture has to do.
fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    line.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string()
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A manifest of this repository and its model.
fn model(manifest: &str) -> (Manifest, Imported) {
    let manifest = Manifest::load(&root(&format!("manifests/{manifest}.toml"))).unwrap_or_else(|e| panic!("{e}"));
    let source = Source::parse(&manifest.source, &manifest.revision, manifest.seed).unwrap();
    let imported = match resolve(&source, &manifest.base_dir, &mut |_| {}).unwrap_or_else(|e| panic!("{e}")) {
        Resolved::Checkpoint { dir, .. } => import(&dir).unwrap(),
        Resolved::Synthetic { config, seed } => import_config_only(&fs::read_to_string(config).unwrap(), seed).unwrap(),
    };
    (manifest, imported)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A field of `/proc/self/status`, bytes; `None` where there is no such file.
fn status_bytes(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Resets the peak of resident memory.
fn reset_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

fn mib(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".to_string(), |bytes| format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64))
}

fn place(graph: &ModelGraph, precision: Precision, context_max: u32, target: &Target, c: &Candidate) -> Schedule {
    schedule(lower(graph, "bench", precision, context_max, c).unwrap(), target, c).unwrap()
}

/// Lower, schedule and validate at the shape of an 8B model, on one core, in processor time.
fn passes() {
    let (manifest, imported) = model("llama-3.1-8b-synthetic");
    let target = &manifest.targets[0];
    let candidate = Candidate::default_for(&imported.graph, target, manifest.precision);
    let context_max = manifest.decode.context_max;
    let (mut lowers, mut schedules, mut validates, mut totals) = (vec![], vec![], vec![], vec![]);
    reset_peak();
    let mut tasks = 0;
    for _ in 0..15 {
        let begin = core_seconds();
        let program = lower(&imported.graph, &manifest.name, manifest.precision, context_max, &candidate).unwrap();
        let lowered = core_seconds();
        let placed = schedule(program, target, &candidate).unwrap();
        let scheduled = core_seconds();
        tasks = placed.task_count();
        validate(placed, target).unwrap();
        let proven = core_seconds();
        lowers.push(lowered - begin);
        schedules.push(scheduled - lowered);
        validates.push(proven - scheduled);
        totals.push(proven - begin);
    }
    let what = format!("lower + schedule + validate, Llama-3.1-8B on {} SMs, {tasks} tasks", candidate.sms);
    let parts = [lowers, schedules, validates].map(|seconds| format!("{:.0}", median(seconds) * 1e3));
    row(&what, &format!("{:.0} ms ({})", median(totals) * 1e3, parts.join(" + ")));
    row("... peak of resident memory, whole process", &mib(status_bytes("VmHWM")));
}

/// Llama-3.1-8B on the first target of its manifest: the default schedules of its decode kernel and of its batch kernel for 16 rows.
fn both_kernels() -> (Target, [(&'static str, Schedule); 2]) {
    let (manifest, imported) = model("llama-3.1-8b-synthetic");
    let (graph, precision, context_max) = (&imported.graph, manifest.precision, manifest.decode.context_max);
    let target = manifest.targets[0].clone();
    let candidate = Candidate::default_for(graph, &target, precision);
    let one = place(graph, precision, context_max, &target, &candidate);
    let room = Room { rows: 16, sequences: 16, positions: 16 * u64::from(context_max) };
    let rows = place_rows(graph, "bench", precision, context_max, &target, &candidate, room).unwrap();
    (target, [("one row", one), ("16 rows", rows)])
}

/// The work of a process on stored schedules before it launches their kernels, on one core: digest, parse, prove, encode. In processor
/// time.
fn load() {
    let (target, kernels) = both_kernels();
    let mut both = 0.0;
    for (what, schedule) in kernels {
        let text = print(&schedule);
        let mut parts = [const { vec![] }; 5];
        for _ in 0..15 {
            // On several threads.
            let begin = Instant::now();
            std::hint::black_box(Digest::of(text.as_bytes()));
            parts[0].push(begin.elapsed().as_secs_f64());
            let mut last = core_seconds();
            let mut split = |part: usize| {
                let now = core_seconds();
                parts[part].push(now - last);
                last = now;
            };
            let parsed = parse(&text).unwrap();
            split(1);
            let validated = validate(parsed, &target).unwrap();
            split(2);
            std::hint::black_box(Queues::of(&validated));
            split(3);
            std::hint::black_box(print(validated.schedule()));
            split(4);
        }
        let parts = parts.map(|seconds| median(seconds) * 1e3);
        let bytes = text.len() as f64 / 1e6;
        let what = format!(
            "guard at load, Llama-3.1-8B, {what}, {bytes:.1} MB of text: digest, parse, validate, encode, print"
        );
        let ms: f64 = parts.iter().sum();
        both += ms;
        row(&what, &format!("{ms:.1} ms ({})", parts.map(|ms| format!("{ms:.1}")).join(" + ")));
    }
    row("... both kernels", &format!("{both:.1} ms"));
}

/// NVRTC on the decode kernel and the batch kernel for 16 rows, at once, on as many cores as there are.
fn compile() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) => return row("NVRTC", &format!("not measured: {error}")),
    };
    let (target, kernels) = both_kernels();
    let sources =
        kernels.map(|(what, schedule)| (what, emit(&validate(schedule, &target).unwrap(), &target, Trace::Off)));
    let begin = Instant::now();
    let each: Vec<(&str, f64)> = std::thread::scope(|scope| {
        let timed = |(what, source): &(&'static str, KernelSource)| {
            nvrtc.compile(source).unwrap();
            (*what, begin.elapsed().as_secs_f64())
        };
        let threads: Vec<_> = sources.iter().map(|source| scope.spawn(move || timed(source))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let most = begin.elapsed().as_secs_f64();
    let each: Vec<String> = each.into_iter().map(|(what, seconds)| format!("{what} {seconds:.1}")).collect();
    row("NVRTC, both kernels of Llama-3.1-8B at once", &format!("{most:.1} s ({})", each.join(", ")));
}

/// The proofs of the decode kernel and the batch kernel for 16 rows at the shape of an 8B model, and the tables of 64 rows deep in their histories.
fn rows() {
    let (target, kernels) = both_kernels();
    let mut all = 0.0;
    let each = kernels.map(|(what, schedule)| {
        let prove = |_| {
            let schedule = schedule.clone();
            let begin = core_seconds();
            validate(schedule, &target).unwrap();
            core_seconds() - begin
        };
        let ms = median((0..15).map(prove).collect()) * 1e3;
        all += ms;
        format!("{what} {ms:.0}")
    });
    row("validate, both kernels of Llama-3.1-8B", &format!("{all:.0} ms ({})", each.join(", ")));

    const ROWS: u32 = 64;
    const POSITIONS: u32 = 8192;
    let shape = Shape {
        rows: ROWS,
        sequences: ROWS,
        context_max: 1 << 17,
        page_rows: 64,
        pages: 1 << 15,
        window: None,
        has_state: false,
    };
    let (mut pool, mut guard) = (Pool::new(shape), Guard::new(shape));
    let sequences: Vec<SequenceId> = (0..ROWS).map(|_| pool.open().unwrap()).collect();
    let launch = |pool: &mut Pool, position: u32, steps: u32| {
        sequences.iter().for_each(|&sequence| pool.reserve(sequence, position + steps).unwrap());
        let rows = sequences.iter().map(|&sequence| Row { sequence, position, wants_logits: true }).collect();
        Request { rows, steps, edits: pool.take_edits() }
    };
    guard.admit(&launch(&mut pool, 0, POSITIONS)).unwrap().finish(POSITIONS);
    let [mut usual, mut with_pages] = [const { vec![] }; 2];
    for position in POSITIONS..POSITIONS + 4096 {
        let request = launch(&mut pool, position, 1);
        let times = if request.edits.is_empty() { &mut usual } else { &mut with_pages };
        let begin = Instant::now();
        let tables = guard.admit(&request).unwrap();
        times.push(begin.elapsed().as_secs_f64());
        tables.finish(1);
    }
    let what = format!("guard of a launch's tables, {ROWS} rows, {POSITIONS} positions each");
    let [usual, with_pages] = [usual, with_pages].map(|seconds| median(seconds) * 1e6);
    row(&what, &format!("{usual:.1} us, with a new page for each row {with_pages:.1} us"));
}

/// A Llama of one layer, repeated: every layer on the same weights, which the proof does not ask about.
fn layered(hidden: u32, layers: usize) -> ModelGraph {
    let config = format!(
        r#"{{"architectures":["LlamaForCausalLM"],"hidden_size":{hidden},"intermediate_size":{hidden},
        "num_hidden_layers":1,"num_attention_heads":{},"num_key_value_heads":{},"head_dim":16,"vocab_size":{}}}"#,
        hidden / 16,
        hidden / 32,
        hidden * 2
    );
    let mut graph = import_config_only(&config, 0).unwrap().graph;
    let layer = graph.layers[0].clone();
    graph.layers = (0..layers).map(|_| layer.clone()).collect();
    graph
}

fn candidate(graph: &ModelGraph, target: &Target, sms: u32, splits: u32) -> Candidate {
    Candidate { sms, splits, ..Candidate::default_for(graph, target, BF16) }
}

/// The proof alone: many small schedules, and one ever larger.
fn validator() {
    let target = Target::builtin("h200").unwrap();
    let toy = layered(64, 2);
    for splits in [1, 2] {
        let c = Candidate { split_from: 32, ..candidate(&toy, &target, 4, splits) };
        let placed = place(&toy, BF16, 64, &target, &c);
        let regimes = placed.regimes.len();
        let counted = 2000;
        let rates = (0..5)
            .map(|_| {
                let begin = Instant::now();
                for _ in 0..counted {
                    assert!(check(std::hint::black_box(&placed), &target).is_empty());
                }
                f64::from(counted) / begin.elapsed().as_secs_f64()
            })
            .collect();
        let what = format!("validate, 2-layer toy, {} tasks, {regimes} regime(s)", placed.task_count());
        row(&what, &format!("{:.0} schedules/s", median(rates)));
    }
    // Queues of a model with thousands of layers do not fit any GPU's shared memory; the proof costs the same.
    let mut target = target;
    target.spec.smem_bytes_per_block_max = 64 << 20;
    for (sms, layers) in [(16, 12), (16, 120), (16, 1200), (16, 12000), (132, 2), (132, 15), (132, 150), (132, 1500)] {
        let graph = layered(sms * 16, layers);
        let placed = place(&graph, BF16, 64, &target, &candidate(&graph, &target, sms, 1));
        let tasks = placed.task_count();
        let runs = (200_000 / tasks).clamp(1, 5);
        reset_peak();
        let resident = status_bytes("VmRSS");
        let seconds = (0..runs)
            .map(|_| {
                let begin = Instant::now();
                assert!(check(&placed, &target).is_empty());
                begin.elapsed().as_secs_f64()
            })
            .collect();
        let seconds = median(seconds);
        let more = status_bytes("VmHWM").zip(resident).map(|(peak, before)| peak.saturating_sub(before));
        let per_task = seconds / tasks as f64 * 1e9;
        let per_cell = per_task / f64::from(sms);
        let what = format!("validate, {tasks} tasks in {sms} queues");
        row(
            &what,
            &format!(
                "{:.2} ms, {per_task:.0} ns a task, {per_cell:.1} a task and queue, {} more",
                seconds * 1e3,
                mib(more)
            ),
        );
    }
}

/// Import of 16 GB in sparse shards: only headers are read.
fn sparse_import() {
    let config = fs::read_to_string(root("manifests/configs/llama-3.1-8b.json")).unwrap();
    let graph = import_config_only(&config, 0).unwrap().graph;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), &config).unwrap();
    let (mut index, mut bytes_total) = (vec![], 0);
    for (shard, tensors) in graph.tensors.chunks(graph.tensors.len().div_ceil(4)).enumerate() {
        let name = format!("model-{shard}.safetensors");
        let (mut entries, mut end) = (vec![], 0u64);
        for tensor in tensors {
            let begin = end;
            end += tensor.shape.iter().map(|&n| u64::from(n)).product::<u64>() * 2;
            let (shape, offsets) = (&tensor.shape, [begin, end]);
            let entry = format!(r#""{}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":{offsets:?}}}"#, tensor.name);
            entries.push(entry);
            index.push(format!(r#""{}":"{name}""#, tensor.name));
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut file = fs::File::create(dir.path().join(&name)).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + end).unwrap();
        bytes_total += end;
    }
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, index.join(","));
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let before = bytes_read();
    let begin = Instant::now();
    let imported = import(dir.path()).unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    let by_kernel = before.zip(bytes_read()).map(|(before, after)| after - before);
    let told = by_kernel.map_or(String::new(), |bytes| format!(", {bytes} by the kernel's count of all files"));
    row(
        &format!("import of {:.2} GB in 4 sparse shards, {} tensors", bytes_total as f64 / 1e9, graph.tensors.len()),
        &format!("{:.1} ms, {} bytes of weight files read{told}", seconds * 1e3, imported.header_bytes_read),
    );
}

/// Bytes that this process has read by system calls.
fn bytes_read() -> Option<u64> {
    let io = fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok())
}

/// Half a GiB. All cores read it in order, each a part.
struct Reader(Vec<u64>);

impl Reader {
    /// Bytes per second of one pass.
    fn pass(&self) -> f64 {
        let threads = cores();
        let share = self.0.len() / threads;
        let read = |part: &[u64]| {
            let mut lanes = [0u64; 16];
            for chunk in part.as_chunks::<16>().0 {
                lanes.iter_mut().zip(chunk).for_each(|(lane, word)| *lane = lane.wrapping_add(*word));
            }
            lanes.iter().sum::<u64>()
        };
        let begin = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let workers: Vec<_> = self.0.chunks_exact(share).map(|part| scope.spawn(move || read(part))).collect();
            workers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        assert_eq!(std::hint::black_box(sum), (share * threads) as u64);
        (share * threads * 8) as f64 / begin.elapsed().as_secs_f64()
    }
}

/// The model on the `cpu` target with the default candidate, as `generate` runs it.
fn interpreter(manifest: &Manifest, imported: &Imported) -> Interp {
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate::default_for(&imported.graph, &target, manifest.precision);
    let placed = place(&imported.graph, manifest.precision, manifest.decode.context_max, &target, &candidate);
    let packed = pack(&placed, &imported.graph, &imported.weights).unwrap();
    Interp::new(&placed, Arc::new(packed), Options::fast()).unwrap()
}

/// Seconds of each of `steps` greedy steps from the current position on.
fn step_seconds(interp: &mut Interp, steps: usize) -> Vec<f64> {
    let mut seconds = vec![];
    interp.launch(&[Input::Token(1)], |_| ControlFlow::Continue(())).unwrap();
    let mut begin = Instant::now();
    interp
        .launch(&vec![Input::Selected; steps], |_| {
            seconds.push(begin.elapsed().as_secs_f64());
            begin = Instant::now();
            ControlFlow::Continue(())
        })
        .unwrap();
    seconds
}

/// Tokens per second of the interpreter with several rows a step: a prompt in chunks, and texts that are decoded together.
fn streams() {
    const POSITIONS: u32 = 192;
    let (manifest, imported) = model("tinystories");
    let target = Target::builtin("cpu").unwrap();
    let candidate = Candidate::default_for(&imported.graph, &target, manifest.precision);
    let batch = Batch { rows: 16, sequences: 16, pages: 16 * 16, page_rows: 16, words: false };
    let program = lower_batch(&imported.graph, "rows", manifest.precision, 256, &batch, &candidate).unwrap();
    let placed = schedule(program, &target, &candidate).unwrap();
    let packed = Arc::new(pack(&placed, &imported.graph, &imported.weights).unwrap());
    let mut interp = Interp::new(&placed, packed, Options::fast()).unwrap();
    let mut one = interpreter(&manifest, &imported);
    let inputs: Vec<Input> = (0..POSITIONS).map(Input::Token).collect();
    let mut alone = || {
        one.reset();
        let begin = Instant::now();
        one.launch(&inputs, |_| ControlFlow::Continue(())).unwrap();
        f64::from(POSITIONS) / begin.elapsed().as_secs_f64()
    };
    let figure = |rates: &mut Vec<f64>| format!("{:.0} tokens/s", median(std::mem::take(rates)));
    let mut rates: Vec<f64> = (0..8).map(|_| alone()).collect();
    row("rows, tinystories, fp32, one row without tables", &figure(&mut rates));
    let shape = Shape::of(&placed.program).expect("tables");
    // Positions of a prompt in chunks, then steps of several texts.
    for (streams, chunk) in [(1, 1), (1, 4), (1, 16), (2, 1), (8, 1), (16, 1)] {
        for _ in 0..8 {
            let (mut guard, mut pool) = (Guard::new(shape), Pool::new(shape));
            let open: Vec<SequenceId> = (0..streams).map(|_| pool.open().unwrap()).collect();
            let begin = Instant::now();
            for first in (0..POSITIONS).step_by(chunk as usize) {
                let mut rows = vec![];
                for &sequence in &open {
                    pool.reserve(sequence, first + chunk).unwrap();
                    let of = first..first + chunk;
                    rows.extend(of.map(|position| Row { sequence, position, wants_logits: chunk == 1 }));
                }
                let tokens: Vec<u32> = rows.iter().map(|row| row.position).collect();
                let request = Request { rows, steps: 1, edits: pool.take_edits() };
                interp.launch_rows(guard.admit(&request).unwrap(), &tokens, |_| ()).unwrap();
            }
            rates.push(f64::from(POSITIONS * streams) / begin.elapsed().as_secs_f64());
        }
        let what = match chunk {
            1 => format!("rows, tinystories, fp32, {streams} texts together"),
            _ => format!("rows, tinystories, fp32, a prompt in chunks of {chunk}"),
        };
        row(&what, &figure(&mut rates));
    }
}

/// Tokens per second of the interpreter, and the share of the memory's bandwidth that it uses.
fn generate() {
    let (manifest, imported) = model("tinystories");
    let mut interp = interpreter(&manifest, &imported);
    for position in [0, 256, 1024] {
        interp.fill_cache(1, position).unwrap();
        let mut seconds = step_seconds(&mut interp, 512);
        seconds.sort_by(f64::total_cmp);
        let rate = |percent: usize| 1.0 / seconds[seconds.len() * percent / 100];
        let what = format!("generate, tinystories, fp32, from position {position}");
        row(&what, &format!("{:.0} tokens/s (best tenth {:.0})", rate(50), rate(10)));
    }
    drop(interp);
    let reader = Reader(vec![1; 1 << 26]);
    let (manifest, imported) = model("smollm2-135m-synthetic");
    let mut interp = interpreter(&manifest, &imported);
    for position in [0, 256, 1024] {
        let bytes = step_weight_bytes(&imported.graph, manifest.precision)
            + step_cache_bytes(&imported.graph, manifest.precision, position);
        let (mut steps, mut reads, mut shares) = (vec![], vec![], vec![]);
        for _ in 0..12 {
            interp.fill_cache(1, position).unwrap();
            // The steps run between two passes over memory, so that both are measured beside the same other work.
            let before = reader.pass();
            let step = median(step_seconds(&mut interp, 8));
            let read = (before + reader.pass()) / 2.0;
            shares.push(bytes as f64 / step / read);
            steps.push(step);
            reads.push(read);
        }
        let (step, read, share) = (median(steps), median(reads), median(shares));
        row(
            &format!("generate, SmolLM2-135M shape, bf16, from position {position}"),
            &format!(
                "{:.1} tokens/s, {:.1} GB/s; {:.0} % of what memory gives ({:.1} GB/s)",
                1.0 / step,
                bytes as f64 / step / 1e9,
                100.0 * share,
                read / 1e9,
            ),
        );
    }
}

/// Whole commands: the first build, and builds that have no work to do.
fn builds() {
    for manifest in ["tinystories", "llama-3.1-8b-synthetic"] {
        let place = tempfile::tempdir().unwrap();
        let build = || {
            let begin = Instant::now();
            let output = Command::new(env!("CARGO_BIN_EXE_monobloc"))
                .current_dir(root(""))
                .arg("build")
                .arg(format!("manifests/{manifest}.toml"))
                .arg("--cache")
                .arg(place.path().join("cache"))
                .arg("--trials")
                .arg(place.path().join("trials.csv"))
                .output()
                .unwrap();
            let seconds = begin.elapsed().as_secs_f64();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{said}");
            (seconds, said.lines().last().unwrap_or_default().to_string())
        };
        let (first, said) = build();
        row(&format!("build {manifest}, nothing cached"), &format!("{first:.2} s, `{said}`"));
        let again: Vec<_> = (0..9).map(|_| build()).collect();
        let said = &again[0].1;
        let seconds = median(again.iter().map(|(seconds, _)| *seconds).collect());
        row(&format!("build {manifest}, again"), &format!("{:.0} ms, `{said}`", seconds * 1e3));
    }
}
