//! Speed of the interpreter in tokens per second and in bytes per second, next to what this machine's memory gives.
//!
//! `cargo bench --bench interp`. Run it on an idle machine: spinning threads lose most to neighbours.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use monobloc::candidate::Candidate;
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Input, Interp, Options};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import, import_config_only, step_cache_bytes, step_weight_bytes};
use monobloc::pack::pack;
use monobloc::schedule::schedule;
use monobloc::target::Target;

fn root(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Half a GiB that all cores read in order, a part each.
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

fn target(name: &str) -> Target {
    let mut target = Target::builtin(name).unwrap();
    target.spec.threads_per_block_max = 1024;
    target
}

fn prepare(imported: &Imported, precision: Precision, name: &str, sms: u32, context_max: u32) -> Interp {
    let target = target(name);
    let candidate = Candidate { sms, ..Candidate::default_for(&imported.graph, &target, precision) };
    let program = lower(&imported.graph, "bench", precision, context_max, &candidate).unwrap();
    let schedule = schedule(program, &target, &candidate).unwrap();
    let begin = Instant::now();
    let pack = pack(&schedule, &imported.graph, &imported.weights).unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    println!("  {} tasks, pack {:.3} GB in {seconds:.2} s", schedule.task_count(), pack.bytes.len() as f64 / 1e9);
    Interp::new(&schedule, Arc::new(pack.bytes), Options::fast()).unwrap()
}

/// Seconds of `steps` steps from the current position, ascending.
fn step_seconds(interp: &mut Interp, steps: usize) -> Vec<f64> {
    let mut seconds = vec![];
    interp.launch(&[Input::Token(1)], |_| ControlFlow::Continue(())).unwrap();
    let inputs = vec![Input::Selected; steps];
    let mut begin = Instant::now();
    interp
        .launch(&inputs, |_| {
            seconds.push(begin.elapsed().as_secs_f64());
            begin = Instant::now();
            ControlFlow::Continue(())
        })
        .unwrap();
    seconds.sort_by(f64::total_cmp);
    seconds
}

fn main() {
    println!("{} cores; p50 is the median step, p10 what a busy machine leaves in its better moments", cores());
    let fp32 = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let tiny = import(&root("tests/fixtures/tinystories-llama")).unwrap();
    println!("tinystories-llama, fp32:");
    for (record, sms) in [("cpu", 1), ("cpu", cores() as u32), ("cpu", 4), ("h200", 128)] {
        let mut interp = prepare(&tiny, fp32, record, sms, 2048);
        for position in [0, 256, 1024] {
            interp.fill_cache(1, position).unwrap();
            let seconds = step_seconds(&mut interp, 512);
            let rate = |p: usize| 1.0 / seconds[seconds.len() * p / 100];
            println!("  {sms} SMs, position {position}: p50 {:.0} tokens/s, p10 {:.0}", rate(50), rate(10));
        }
    }

    let reader = Reader(vec![1; 1 << 26]);
    let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    let config = std::fs::read_to_string(root("manifests/configs/smollm2-135m.json")).unwrap();
    let smol = import_config_only(&config, 1).unwrap();
    println!("SmolLM2-135M shape, bf16:");
    for (record, sms) in [("cpu", cores() as u32), ("h200", 132)] {
        let mut interp = prepare(&smol, bf16, record, sms, 2048);
        for position in [0, 256, 1024] {
            // In turn, so that both see the same neighbours.
            let (mut seconds, mut bandwidth) = (vec![], vec![]);
            for _ in 0..8 {
                interp.fill_cache(1, position).unwrap();
                seconds.extend(step_seconds(&mut interp, 8));
                bandwidth.extend([reader.pass(), reader.pass()]);
            }
            seconds.sort_by(f64::total_cmp);
            bandwidth.sort_by(|a, b| b.total_cmp(a));
            let bytes = step_weight_bytes(&smol.graph, bf16) + step_cache_bytes(&smol.graph, bf16, position);
            for p in [50, 10] {
                let (step, read) = (seconds[seconds.len() * p / 100], bandwidth[bandwidth.len() * p / 100]);
                let rate = bytes as f64 / step;
                println!(
                    "  {sms} SMs, position {position}, p{p}: {:.1} tokens/s, {:.1} GB/s of {:.1} read, {:.0} %",
                    1.0 / step,
                    rate / 1e9,
                    read / 1e9,
                    100.0 * rate / read
                );
            }
        }
    }
}
