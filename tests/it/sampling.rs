//! Tests the kernel's sampling against `sample`: the source of the kernel, compiled for this CPU, makes the same choices.
//!
//! Needs a C++ compiler, and says so where there is none.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use monobloc::sample::{SampleSettings, Sampler, exp_f32, gumbel, philox4x32_10};

use super::skipped;

/// As `block.cc` has them.
const VOCAB: usize = 1000;
/// Scratch of a block: room for a few ids, for some hundreds, and for all.
const SCRATCH_KB: [u32; 3] = [1, 4, 16];
/// Other values in its place: the choice at the head, without filters; and a sum over the bits of the functions.
const AT_HEAD: u32 = 0;
const FUNCTIONS: u32 = 2;

/// A program of this folder, or at an absolute path, with the kernels of a folder, compiled for this CPU. `arguments` may have an optimisation
/// level, which changes no number. `None` without a compiler.
pub fn compiled(source: impl AsRef<Path>, arguments: &[&str], kernels: &Path, folder: &Path) -> Option<Command> {
    let program = folder.join("block");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-ffp-contract=off", "-w"]).args(arguments).arg("-I").arg(kernels);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(source);
    let output = compiler.arg(source).arg("-o").arg(&program).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(Command::new(program))
}

/// Logits of a kind: spread out, with many ties, with signed zeros, infinities and NaN, or nearly flat.
fn logits(kind: usize, seed: u32) -> Vec<f32> {
    let word = |id: usize| philox4x32_10([id as u32, seed, kind as u32, 9], [3, 4])[0];
    let uniform = |id: usize| f64::from(word(id)) / f64::from(u32::MAX);
    (0..VOCAB)
        .map(|id| match kind {
            0 => (-(-uniform(id).max(1e-9).ln()).ln() * 3.0) as f32,
            1 => (word(id) % 7) as f32 - 3.0,
            2 => match word(id) % 9 {
                0 => f32::NAN,
                1 => f32::NEG_INFINITY,
                2 => -0.0,
                3 => 0.0,
                _ => (uniform(id) * 2.0 - 1.0) as f32,
            },
            _ => (uniform(id) * 1e-3) as f32,
        })
        .collect()
}

/// A case as `block.cc` reads it.
fn case(scratch_kb: u32, position: u32, seed: u64, sampler: &Sampler, logits: &[f32]) -> Vec<u8> {
    let top_p_q32 = u32::try_from(sampler.top_p_q32().max(1)).unwrap_or(0);
    let mut bytes: Vec<u8> =
        [scratch_kb, position, sampler.top_k(), top_p_q32].into_iter().flat_map(u32::to_le_bytes).collect();
    bytes.extend(seed.to_le_bytes());
    bytes.extend(sampler.inv_temperature().to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
    bytes
}

#[test]
fn the_kernels_choose_what_is_specified() {
    let folder = tempfile::tempdir().unwrap();
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let Some(mut program) = compiled("block.cc", &["-O1"], &kernels, folder.path()) else {
        return skipped("the_kernels_choose_what_is_specified", "C++ compiler", "`c++` compiles kernels for this CPU");
    };
    let filters: [(Option<u32>, Option<f32>); 14] = [
        (Some(1), None),
        (Some(5), None),
        (Some(23), None),
        (Some(24), None),
        (Some(25), None),
        (Some(400), None),
        (Some(5000), None),
        (None, Some(1e-12)),
        (None, Some(0.3)),
        (None, Some(0.9)),
        (None, Some(0.999_999_9)),
        (Some(40), Some(0.5)),
        (Some(3), Some(0.99)),
        (Some(500), Some(0.95)),
    ];
    let mut cases = vec![];
    let mut expected = vec![];
    for (round, kind) in [0, 1, 2, 3, 0, 1].into_iter().enumerate() {
        for (n, temperature) in [0.02_f32, 0.7, 1.0, 5.0].into_iter().enumerate() {
            let row = logits(kind, round as u32);
            let position = (round * 40 + n) as u32;
            let seed = 0x0123_4567_89AB_CDEF ^ (round as u64) << 40;
            let mut push = |scratch_kb: u32, position: u32, top_k: Option<u32>, top_p: Option<f32>| {
                let sampler = SampleSettings { temperature, top_k, top_p, seed }.resolve().unwrap();
                cases.extend(case(scratch_kb, position, seed, &sampler, &row));
                let token = sampler.choose(&row, position).unwrap();
                expected.push((token, format!("scratch {scratch_kb}, logits {kind}, {sampler:?}")));
            };
            push(AT_HEAD, position, None, None);
            for (k, (top_k, top_p)) in filters.into_iter().enumerate() {
                push(SCRATCH_KB[(k + n + round) % 3], position, top_k, top_p);
            }
            // The cut lies among zeros of both signs, which are equal.
            if kind == 2 && temperature > 1.0 {
                (0..20).for_each(|more| push(16, 1000 + more, Some(400), None));
            }
        }
    }
    for part in 0..30 {
        let numbers: Vec<f32> = (0..VOCAB).map(|n| -((part * VOCAB + n) as f32) * 1.003e-3).collect();
        cases.extend(case(FUNCTIONS, 0, 0, &Sampler::greedy(), &numbers));
        let bits = |sum: u32, &x: &f32| {
            let sum = sum.wrapping_mul(31).wrapping_add(exp_f32(x).to_bits());
            sum.wrapping_mul(31).wrapping_add(gumbel(x.to_bits()).to_bits())
        };
        expected.push((numbers.iter().fold(0, bits), format!("bits of functions from {} on", numbers[0])));
    }
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&cases));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let found: Vec<u32> = output.stdout.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    assert_eq!(found.len(), expected.len());
    for (found, (token, case)) in found.iter().zip(&expected) {
        assert_eq!(found, token, "{case}");
    }
}
