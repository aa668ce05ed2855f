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

/// Best of several sequential reads of 1 GiB by all cores, bytes per second.
fn read_bandwidth() -> f64 {
    let words = vec![1u64; 1 << 27];
    let threads = cores();
    let share = words.len() / threads;
    let mut best = 0.0f64;
    for _ in 0..7 {
        let begin = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let read = |part: &[u64]| {
                let mut lanes = [0u64; 16];
                for chunk in part.as_chunks::<16>().0 {
                    lanes.iter_mut().zip(chunk).for_each(|(lane, word)| *lane = lane.wrapping_add(*word));
                }
                lanes.iter().sum::<u64>()
            };
            let workers: Vec<_> = words.chunks_exact(share).map(|part| scope.spawn(move || read(part))).collect();
            workers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        assert_eq!(std::hint::black_box(sum), (share * threads) as u64);
        best = best.max((share * threads * 8) as f64 / begin.elapsed().as_secs_f64());
    }
    best
}

fn cpu() -> Target {
    let mut target = Target::builtin("cpu").unwrap();
    target.spec.threads_per_block_max = 1024;
    target
}

fn prepare(imported: &Imported, precision: Precision, sms: u32, context_max: u32) -> Interp {
    let target = cpu();
    let candidate = Candidate { sms, ..Candidate::default_for(&imported.graph, &target, precision) };
    let program = lower(&imported.graph, "bench", precision, context_max, &candidate).unwrap();
    let schedule = schedule(program, &target, &candidate).unwrap();
    let begin = Instant::now();
    let pack = pack(&schedule, &imported.graph, &imported.weights).unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    println!("  {} tasks, pack {:.3} GB in {seconds:.2} s", schedule.task_count(), pack.bytes.len() as f64 / 1e9);
    Interp::new(&schedule, Arc::new(pack.bytes), Options::fast()).unwrap()
}

/// Median seconds of a step over `steps` steps from the current position.
fn step_seconds(interp: &mut Interp, steps: usize) -> f64 {
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
    seconds[seconds.len() / 2]
}

fn main() {
    let bandwidth = read_bandwidth();
    println!("{} cores, reading 1 GiB: {:.1} GB/s", cores(), bandwidth / 1e9);

    let fp32 = Precision { weights: DType::F32, cache: DType::F32, wire: DType::F32 };
    let tiny = import(&root("tests/fixtures/tinystories-llama")).unwrap();
    println!("tinystories-llama, fp32:");
    for sms in [1, cores() as u32, 4] {
        let mut interp = prepare(&tiny, fp32, sms, 2048);
        for position in [0, 256, 1024] {
            interp.fill_cache(1, position).unwrap();
            let seconds = step_seconds(&mut interp, 256);
            println!("  {sms} SMs, position {position}: {:.0} tokens/s", 1.0 / seconds);
        }
    }

    let bf16 = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
    let config = std::fs::read_to_string(root("manifests/configs/smollm2-135m.json")).unwrap();
    let smol = import_config_only(&config, 1).unwrap();
    println!("SmolLM2-135M shape, bf16:");
    for sms in [cores() as u32, 4] {
        let mut interp = prepare(&smol, bf16, sms, 2048);
        for position in [0, 256, 1024] {
            interp.fill_cache(1, position).unwrap();
            let seconds = step_seconds(&mut interp, 32);
            let bytes = step_weight_bytes(&smol.graph, bf16) + step_cache_bytes(&smol.graph, bf16, position);
            let rate = bytes as f64 / seconds;
            println!(
                "  {sms} SMs, position {position}: {:.1} tokens/s, {:.1} GB/s, {:.0} % of the read bandwidth",
                1.0 / seconds,
                rate / 1e9,
                100.0 * rate / bandwidth
            );
        }
    }
}
