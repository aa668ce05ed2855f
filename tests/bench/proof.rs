//! Attacks the proof: prints figures and tables of `docs/proof-report.md`.
//!
//! `cargo bench --bench proof` runs all parts on all cores, `-- scale` those that are named: `population` (or a number of
//! schedules in place of 200,000), `scale`, `load`. A population goes on where the same program stopped; with `20m` no part of it begins
//! after 20 minutes. With `write` among the words each part also replaces its table in the report.

mod clock;
use clock::core_seconds;
use computed::oracle::population::{Count, Outcome, Size, judge_population};
use computed::proof_support::BF16;
use monobloc::candidate::Candidate;
use monobloc::codegen::abi::Queues;
use monobloc::digest::Digest;
use monobloc::ir::parse::parse;
use monobloc::ir::print::print;
use monobloc::ir::schedule::Schedule;
use monobloc::lower::lower;
use monobloc::model::config::{import, import_config_only};
use monobloc::model::graph::ModelGraph;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{check, validate};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Number of schedules in the report's population.
const POPULATION: usize = 200_000;

fn main() {
    // Cargo passes `--bench`.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let count = words.iter().find_map(|word| word.parse().ok());
    let minutes_of = |word: &String| word.strip_suffix('m')?.parse::<f64>().ok();
    let minutes = words.iter().find_map(minutes_of).unwrap_or(f64::INFINITY);
    if let Some(unknown) = words.iter().find(|w| {
        !["population", "scale", "load", "write"].contains(&w.as_str())
            && w.parse::<usize>().is_err()
            && minutes_of(w).is_none()
    }) {
        eprintln!(
            "no part `{unknown}`: expected population, scale, load, a number of schedules, minutes as `20m`, or write"
        );
        std::process::exit(2);
    }
    let asked = |part: &str| words.iter().any(|w| w == part);
    let all = !["population", "scale", "load"].into_iter().any(asked) && count.is_none();
    let put = |name: &str, text: String| {
        println!("{text}");
        if asked("write") {
            replace(name, &text);
        }
    };
    if all || asked("scale") {
        put("scale", scale());
    }
    if all || asked("load") {
        put("load", load());
    }
    if all || asked("population") || count.is_some() {
        let (text, fine) = population(count.unwrap_or(POPULATION), minutes);
        put("population", text);
        if !fine {
            std::process::exit(1);
        }
    }
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Replaces the text between `<!-- name -->` and `<!-- /name -->` in the report.
fn replace(name: &str, text: &str) {
    let path = root("docs/proof-report.md");
    let page = fs::read_to_string(&path).expect("the report");
    let (open, close) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let begin = page.find(&open).expect("its mark") + open.len();
    let end = page.find(&close).expect("its mark");
    fs::write(&path, format!("{}{}\n{}", &page[..begin], text.trim_end(), &page[end..])).expect("the report");
}

/// Linux; elsewhere the architecture has to do.
fn cpu_model() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    line.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_string()
}

fn graphs() -> Vec<(String, ModelGraph)> {
    let mut graphs = vec![];
    for folder in ["families", "variants", "experts", "hybrids"] {
        for entry in fs::read_dir(root("tests/fixtures").join(folder)).expect("fixtures") {
            let path = entry.expect("an entry").path();
            if let Ok(imported) = import(&path) {
                let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
                graphs.push((name, imported.graph));
            }
        }
    }
    graphs.sort_by(|a, b| a.0.cmp(&b.0));
    graphs
}

/// Parts of a population. Each that is done is kept below `target`, so that the same program goes on where it stopped.
const PARTS: usize = 128;

/// A part that was judged before, with its time in seconds.
fn stored(path: &Path) -> Option<(Outcome, f64)> {
    let text = fs::read_to_string(path).ok()?;
    let (seconds, rows) = text.split_once('\n')?;
    let mut outcome = Outcome::default();
    for row in rows.lines() {
        let (class, numbers) = row.split_once('\t')?;
        let numbers: Vec<usize> = numbers.split('\t').map(|n| n.parse().ok()).collect::<Option<_>>()?;
        let [judged, unsafe_, rejected, false_accepts, kernels, stricter, unnamed, exhaustive] =
            numbers.try_into().ok()?;
        let count = Count { judged, unsafe_, rejected, false_accepts, kernels, stricter, unnamed, exhaustive };
        outcome.classes.insert(class.to_string(), count);
    }
    Some((outcome, seconds.parse().ok()?))
}

/// Keeps a part without a forbidden result.
fn store(path: &Path, outcome: &Outcome, seconds: f64) {
    let mut text = format!("{seconds}\n");
    for (class, count) in &outcome.classes {
        let Count { judged, unsafe_, rejected, false_accepts, kernels, stricter, unnamed, exhaustive } = *count;
        let numbers = [judged, unsafe_, rejected, false_accepts, kernels, stricter, unnamed, exhaustive];
        let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
        let _ = writeln!(text, "{class}\t{}", numbers.join("\t"));
    }
    // Whole, or not at all.
    let new = path.with_extension("new");
    fs::write(&new, text).and_then(|()| fs::rename(&new, path)).expect("a part in `target`");
}

/// Judges one part of `each` schedules.
fn judge_part(part: usize, each: usize, graphs: &[(String, ModelGraph)]) -> Outcome {
    let (real, double, random, waves) = (each * 15 / 100, each * 25 / 100, each / 10, each / 10);
    let single = each - real - double - random - waves;
    judge_population(&Size { real, single, double, random, waves, seed: part as u64 + 1 }, graphs)
}

/// The table of both judges, and whether it has no forbidden result. No part begins after `minutes`.
fn population(total: usize, minutes: f64) -> (String, bool) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let graphs = graphs();
    let begin = Instant::now();
    // Another program has other judges.
    let program = fs::read(std::env::current_exe().expect("this program")).expect("this program");
    let folder = root("target/proof-parts").join(format!("{}-{total}", Digest::of(&program).short()));
    fs::create_dir_all(&folder).expect("a folder in `target`");
    let next = AtomicUsize::new(0);
    let (mut all, mut seconds, mut done) = (Outcome::default(), 0.0, 0);
    std::thread::scope(|scope| {
        let work = || {
            let mut mine = vec![];
            loop {
                let part = next.fetch_add(1, Ordering::Relaxed);
                if part >= PARTS {
                    return mine;
                }
                let path = folder.join(part.to_string());
                if let Some(known) = stored(&path) {
                    mine.push(known);
                    continue;
                }
                if begin.elapsed().as_secs_f64() > minutes * 60.0 {
                    continue;
                }
                let begun = Instant::now();
                let outcome = judge_part(part, total / PARTS, &graphs);
                let took = begun.elapsed().as_secs_f64();
                if outcome.faults.is_empty() {
                    store(&path, &outcome, took);
                }
                mine.push((outcome, took));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for (outcome, took) in workers.into_iter().flat_map(|worker| worker.join().expect("a worker")) {
            all.merge(outcome);
            (seconds, done) = (seconds + took, done + 1);
        }
    });
    for fault in all.faults.iter().take(10) {
        eprintln!("----\n{fault}");
    }
    let count = all.total();
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} schedules, {done} of {PARTS} parts, in {seconds:.0} s of a thread of {}.\n\n{}",
        count.judged,
        cpu_model(),
        all.table()
    );
    (text, count.false_accepts + count.unnamed == 0 && all.faults.is_empty())
}

/// A field of `/proc/self/status`, bytes; `None` where there is no such file.
fn status_bytes(field: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A Llama of one layer, repeated: every layer on the same weights, which the proof does not ask about.
fn layered(sms: u32, layers: usize) -> ModelGraph {
    let hidden = sms * 16;
    let config = format!(
        r#"{{"architectures":["LlamaForCausalLM"],"hidden_size":{hidden},"intermediate_size":{hidden},
        "num_hidden_layers":1,"num_attention_heads":{},"num_key_value_heads":{},"head_dim":16,"vocab_size":{}}}"#,
        hidden / 16,
        hidden / 32,
        hidden * 2
    );
    let mut graph = import_config_only(&config, 0).expect("a model").graph;
    let layer = graph.layers[0].clone();
    graph.layers = (0..layers).map(|_| layer.clone()).collect();
    graph
}

/// The time between reading the parts of an 8B model's kernel and uploading them; and the time to make them.
fn load() -> String {
    let target = Target::builtin("h200").expect("a record");
    let config = fs::read_to_string(root("manifests/configs/llama-3.1-8b.json")).expect("a config");
    let graph = import_config_only(&config, 0).expect("a model").graph;
    let candidate = Candidate::default_for(&graph, &target, BF16);
    let program = lower(&graph, "load", BF16, 8192, &candidate).expect("a program");
    let placed = schedule(program, &target, &candidate).expect("a schedule");
    let (text, tasks) = (print(&placed), placed.task_count());
    let mut parts = [vec![], vec![], vec![], vec![], vec![], vec![]];
    for _ in 0..9 {
        // On several threads.
        let begin = Instant::now();
        std::hint::black_box(Digest::of(text.as_bytes()));
        parts[0].push(begin.elapsed().as_secs_f64() * 1e3);
        let mut last = core_seconds();
        let mut lap = |part: &mut Vec<f64>| {
            part.push((core_seconds() - last) * 1e3);
            last = core_seconds();
        };
        let parsed = parse(&text).unwrap_or_else(|e| panic!("{e}"));
        lap(&mut parts[1]);
        let proven = validate(parsed, &target).unwrap_or_else(|e| panic!("{e}"));
        lap(&mut parts[2]);
        std::hint::black_box(Queues::of(&proven).digest());
        lap(&mut parts[3]);
        std::hint::black_box(Digest::of(print(proven.schedule()).as_bytes()));
        lap(&mut parts[4]);
        let program = lower(&graph, "load", BF16, 8192, &candidate).expect("a program");
        std::hint::black_box(schedule(program, &target, &candidate).expect("a schedule"));
        lap(&mut parts[5]);
    }
    let medians = parts.map(|mut ms| {
        ms.sort_by(f64::total_cmp);
        ms[ms.len() / 2]
    });
    let mut table = format!(
        "Llama-3.1-8B on {} SMs, {tasks} tasks, a schedule of {:.1} MB of text; one core of {}; processor time, medians of 9.\n\n\
         | what | time |\n| --- | --- |\n",
        candidate.sms,
        text.len() as f64 / 1e6,
        cpu_model()
    );
    let names = [
        "digest of the stored schedule, compared with its link",
        "parse",
        "prove",
        "encode the queues, digest every byte",
        "print the proven schedule, and find the link of its queues by the digest",
    ];
    for (name, ms) in names.iter().zip(medians) {
        let _ = writeln!(table, "| {name} | {ms:.1} ms |");
    }
    let [.., prove, _, _, made] = medians;
    let _ = writeln!(table, "| all | {:.1} ms |", medians.iter().sum::<f64>() - made);
    let _ = writeln!(table, "| when it is built: lower, schedule and prove | {:.1} ms |", made + prove);
    table
}

/// The proof over ever larger schedules: proven ones, and one that is refused for its last task.
fn scale() -> String {
    // No GPU has queues of thousands of tasks in shared memory; the proof costs the same.
    let mut target = Target::builtin("h200").expect("a record");
    target.spec.smem_bytes_per_block_max = 64 << 20;
    target.spec.sm_count = 148;
    let mut text = format!(
        "One core of {}; processor time, the median of up to 5 runs. Memory is the peak of the proof, without the schedule.\n\n\
         | tasks | queues | regimes | verdict | time | a task | memory |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
        cpu_model()
    );
    let sizes = [(148, 2), (148, 14), (148, 135), (148, 1350), (64, 3125), (16, 12_500)];
    for (sms, layers) in sizes {
        for splits in [1, 2] {
            // Two regimes have their tasks twice.
            let graph = layered(sms, if splits == 1 { layers } else { (layers / 2).max(1) });
            let default = Candidate::default_for(&graph, &target, BF16);
            let candidate = Candidate { sms, splits, split_from: 32, heads_per_task: 1, ..default };
            let program = lower(&graph, "scale", BF16, 64, &candidate).expect("a program");
            let mut placed = schedule(program, &target, &candidate).expect("a schedule");
            measure(&mut text, &placed, &target, "proven");
            if splits == 1 && layers == 1350 {
                let regime = &mut placed.regimes[0];
                let last = regime.tasks.len() - 1;
                regime.tasks[last].waits.clear();
                measure(&mut text, &placed, &target, "last wait dropped: refused");
            }
        }
    }
    text
}

fn measure(text: &mut String, placed: &Schedule, target: &Target, verdict: &str) {
    let tasks = placed.task_count();
    let _ = fs::write("/proc/self/clear_refs", "5");
    let resident = status_bytes("VmRSS");
    let runs = (1_000_000 / tasks).clamp(3, 5);
    // The processor time of a thread has a resolution of some milliseconds.
    let times = (200_000 / tasks).max(1);
    let mut seconds: Vec<f64> = (0..runs)
        .map(|_| {
            let begin = core_seconds();
            for _ in 0..times {
                assert_eq!(check(placed, target).is_empty(), verdict == "proven");
            }
            (core_seconds() - begin) / times as f64
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let seconds = seconds[seconds.len() / 2];
    let more = status_bytes("VmHWM").zip(resident).map(|(peak, before)| peak.saturating_sub(before));
    let more = more.map_or("unknown".to_string(), |bytes| format!("{:.0} MiB", bytes as f64 / (1 << 20) as f64));
    let _ = writeln!(
        text,
        "| {tasks} | {} | {} | {verdict} | {:.2} ms | {:.0} ns | {more} |",
        placed.machine.sms,
        placed.regimes.len(),
        seconds * 1e3,
        seconds / tasks as f64 * 1e9,
    );
}
