//! Tests the sampler against `sample::Request`: the source of the kernel, compiled for this CPU, chooses the same tokens from the same
//! logits, with the tables that a device gets.
//!
//! Needs a C++ compiler, and says so where there is none. NVRTC compiles the sampler for every record.

use std::collections::BTreeSet;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use monobloc::codegen::sampler::{ENTRY_POINT, ENTRY_POINT_RIVALS, SampleAnswer, THREADS, emit};
use monobloc::cuda::cubin;
use monobloc::cuda::sampler::{Asked, SampleTables, decided};
use monobloc::random::Random;
use monobloc::sample::{
    Decided, Penalties, Request, RequestSettings, SampleError, SampleSettings, TokenCounts, TokenSet,
};
use monobloc::target::Target;

use super::nvrtc::nvrtc;
use super::sampling::compiled;
use super::skipped;

const KINDS: usize = 12;

/// Logits of a kind. All but the first are hard: ties, few values, no numbers, a wide or a narrow range, edges of buckets.
fn logits(kind: usize, vocab: usize, random: &mut Random) -> Vec<f32> {
    let mut normal = || {
        let sum: f64 = (0..6).map(|_| random.unit()).sum();
        (sum - 3.0) * 1.4
    };
    let mut logits: Vec<f32> = (0..vocab).map(|_| normal() as f32 * 3.0).collect();
    match kind {
        0 => {}
        1 => logits.iter_mut().for_each(|logit| *logit = logit.round().clamp(-2.0, 2.0)),
        2 => logits.fill(random.unit() as f32),
        3 => {
            for logit in &mut logits {
                match random.below(8) {
                    0 => *logit = f32::NAN,
                    1 => *logit = f32::NEG_INFINITY,
                    2 => *logit = -0.0,
                    3 => *logit = 0.0,
                    _ => {}
                }
            }
        }
        4 => logits.iter_mut().for_each(|logit| *logit *= 1e3),
        5 => logits.iter_mut().for_each(|logit| *logit *= 1e-4),
        6 => logits.iter_mut().for_each(|logit| *logit *= 1e37),
        // Differences that are multiples of a bucket's width, some far below the best.
        7 => {
            logits.iter_mut().for_each(|logit| *logit = (*logit * 16.0).round() / 16.0 - random.below(2) as f32 * 32.0)
        }
        8 => {
            for logit in &mut logits {
                *logit = if random.below(40) == 0 { f32::INFINITY } else { *logit };
            }
        }
        9 => {
            logits.fill(f32::NEG_INFINITY);
            for _ in 0..random.below(4) {
                logits[random.below(vocab)] = random.unit() as f32;
            }
        }
        // Probabilities of 1/2, 1/4, 1/8 and so on, some of them several times: a cut by top-p falls on an edge.
        10 => {
            for (id, logit) in logits.iter_mut().enumerate() {
                *logit = -((id * 7 % vocab) as f32 / 3.0).floor() * std::f32::consts::LN_2;
            }
        }
        // Neighbouring numbers around a large one, where sums round.
        _ => {
            let base = [1e4_f32, 3e5, 1e7, 2e8, 5e9][random.below(5)];
            logits.iter_mut().for_each(|logit| *logit = f32::from_bits(base.to_bits() + random.below(60) as u32));
        }
    }
    logits
}

fn settings(random: &mut Random, vocab: usize, by_rivals: bool) -> RequestSettings {
    let one_of = |random: &mut Random, values: &[f32]| values[random.below(values.len())];
    let temperature = one_of(random, &[0.0, 0.001, 0.2, 0.7, 1.0, 1.0, 1.5, 4.0, 1000.0]);
    let top_k = [None, None, Some(1), Some(2), Some(5), Some(40), Some(300), Some(100_000)][random.below(8)];
    let top_p = [None, None, Some(1e-12), Some(0.1), Some(0.5), Some(0.75), Some(0.95), Some(0.999), Some(1.0)]
        [random.below(9)];
    let seed = random.word();
    let plain = RequestSettings::plain(SampleSettings { temperature, top_k, top_p, seed });
    let mut settings = RequestSettings { min_p: one_of(random, &[0.0, 0.0, 0.02, 0.3, 1.0]), ..plain };
    if random.below(2) == 0 {
        settings.penalties = Penalties {
            repetition: one_of(random, &[1.0, 1.3, 0.7]),
            presence: one_of(random, &[0.0, 0.6, -1.1]),
            frequency: one_of(random, &[0.0, 0.4, -0.3]),
        };
    }
    if random.below(3) == 0 {
        let biases =
            (0..1 + random.below(5)).map(|_| (random.below(vocab) as u32, one_of(random, &[100.0, -100.0, 2.5])));
        settings.logit_bias = biases.collect();
    }
    if random.below(3) == 0 {
        settings.min_tokens = random.below(5) as u32;
        settings.stop_ids = (0..random.below(4)).map(|_| random.below(vocab) as u32).collect();
        // Stop ids that a bias makes probable.
        settings.stop_ids.extend(settings.logit_bias.keys().take(1));
    }
    settings.logprobs = [None, None, Some(0), Some(3), Some(20)][random.below(5)];
    if by_rivals {
        let plain = RequestSettings::plain(SampleSettings { top_k: None, ..settings.sampling });
        settings = RequestSettings { penalties: settings.penalties, ..plain };
    }
    settings
}

/// A launch as sampler.cc reads it, and the token that each step has to decide for each row of the table.
struct Case {
    bytes: Vec<u8>,
    vocab: u32,
    expected: Vec<Vec<(Result<Decided, SampleError>, u32)>>,
    settings: Vec<RequestSettings>,
    logprobs: Vec<Option<u32>>,
    kind: usize,
}

fn case(size: u32, vocab: usize, kind: usize, by_rivals: bool, random: &mut Random) -> Case {
    case_with(size, vocab, kind, by_rivals, random, |random| settings(random, vocab, by_rivals))
}

fn case_with(
    size: u32,
    vocab: usize,
    kind: usize,
    by_rivals: bool,
    random: &mut Random,
    settings: impl Fn(&mut Random) -> RequestSettings,
) -> Case {
    let steps = 1 + random.below(3);
    let launch_rows = 1 + random.below(3);
    let mut rows: Vec<usize> = (0..launch_rows).filter(|_| random.below(3) > 0).collect();
    if rows.is_empty() {
        rows.push(launch_rows - 1);
    }
    if random.below(2) == 0 {
        rows.reverse();
    }
    let all: Vec<Vec<f32>> = (0..steps * launch_rows).map(|_| logits(kind, vocab, random)).collect();
    let settings: Vec<RequestSettings> = rows.iter().map(|_| settings(random)).collect();
    let eos = [random.below(vocab) as u32, 0];
    let resolve = |settings: &RequestSettings| settings.resolve(vocab as u32, &eos).expect("valid settings");
    let requests: Vec<Request> = settings.iter().map(resolve).collect();
    let mut counts: Vec<TokenCounts> = vec![];
    for _ in &rows {
        let prompt: Vec<u32> = (0..1 + random.below(40)).map(|_| random.below(vocab) as u32).collect();
        let mut of_row = TokenCounts::new(&prompt);
        let generated_max = [4, 30][random.below(2)];
        (0..random.below(generated_max)).for_each(|_| of_row.push(random.below(vocab.min(30)) as u32));
        counts.push(of_row);
    }
    // The allowed ids change with every token, so a mask is for one step.
    let masks: Vec<Option<TokenSet>> = rows
        .iter()
        .map(|_| {
            let share = [1, 2, 50, 10_000][random.below(4)];
            (steps == 1 && !by_rivals && random.below(3) == 0)
                .then(|| (0..vocab as u32).filter(|_| random.below(share) == 0).collect())
        })
        .collect();
    let asked: Vec<Asked<'_>> = (0..rows.len())
        .map(|at| Asked {
            row: rows[at] as u32,
            position: counts[at].position(),
            sampler: requests[at].sampler(),
            request: Some((&requests[at], &counts[at])),
            allowed: masks[at].as_ref(),
        })
        .collect();
    let tables = SampleTables::of(&asked, steps as u32, vocab as u32);
    let head = [
        size,
        by_rivals.into(),
        vocab as u32,
        launch_rows as u32,
        rows.len() as u32,
        steps as u32,
        tables.edits.len() as u32,
        tables.masks.len() as u32,
    ];
    let mut bytes: Vec<u8> = bytemuck::cast_slice(&head).to_vec();
    all.iter().for_each(|row| bytes.extend_from_slice(bytemuck::cast_slice(row)));
    bytes.extend_from_slice(bytemuck::cast_slice(&tables.rows));
    bytes.extend_from_slice(bytemuck::cast_slice(&tables.begins));
    bytes.extend_from_slice(bytemuck::cast_slice(&tables.edits));
    bytes.extend_from_slice(bytemuck::cast_slice(&tables.masks));
    let mut expected = vec![];
    for step in 0..steps {
        let mut of_step = vec![];
        for at in 0..rows.len() {
            let position = counts[at].position();
            let decided = requests[at].choose(&all[step * launch_rows + rows[at]], &counts[at], masks[at].as_ref());
            // After a step without a token the engine ends the request, so later steps are not compared.
            counts[at].push(decided.as_ref().map_or(0, |decided| decided.token));
            of_step.push((decided, position));
        }
        expected.push(of_step);
    }
    let logprobs = settings.iter().map(|settings| settings.logprobs).collect();
    Case { bytes, vocab: vocab as u32, expected, settings, logprobs, kind }
}

/// Whether two logarithms are equal within the tolerance.
fn near(found: f64, expected: f64) -> bool {
    found == expected || (found - expected).abs() < 1e-6 || (found - expected).abs() < 1e-9 * expected.abs()
}

fn agree(found: &Decided, expected: &Decided) -> bool {
    let ids = |decided: &Decided| decided.top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    let logprob = match (found.logprob, expected.logprob) {
        (Some(found), Some(expected)) => near(found, expected),
        (found, expected) => found == expected,
    };
    let tops = found.top.iter().zip(&expected.top).all(|((_, found), (_, expected))| near(*found, *expected));
    found.token == expected.token && ids(found) == ids(expected) && logprob && tops
}

/// Cases of every kind: `rounds` of small parts, and one of the others if there are larger ones.
fn cases(rounds: usize, larger: bool, by_rivals: bool) -> Vec<Case> {
    let mut random = Random::new(17);
    let mut cases = vec![];
    for round in 0..rounds {
        for kind in 0..KINDS {
            // Vocabularies that are no multiple of 4, of 32, or of a part.
            let vocab: usize = [1000, 997, 480, 241, 64, 3, 1][(round + kind) % 7];
            let vocab = if by_rivals { vocab.next_multiple_of(4) } else { vocab };
            cases.push(case(0, vocab, kind, by_rivals, &mut random));
        }
    }
    for kind in (0..KINDS).filter(|_| larger) {
        cases.push(case(1, 2000 + 3 * usize::from(!by_rivals), kind, by_rivals, &mut random));
        cases.push(case(2, 4096 + 3 * usize::from(!by_rivals), kind, by_rivals, &mut random));
    }
    cases
}

/// The sampler with the kernels of a folder, as a program in `folder`. `None`: there is no compiler.
fn program(kernels: &Path, arguments: &[&str], folder: &Path) -> Option<Command> {
    compiled("sampler.cc", &[&["-O1"], arguments].concat(), kernels, folder)
}

/// Runs cases until one differs. Returns the number of expected tokens, of expected rows without one, and the first that is not.
fn run(program: &mut Command, cases: &[Case]) -> (usize, usize, Option<String>) {
    let input: Vec<u8> = cases.iter().flat_map(|case| case.bytes.iter().copied()).collect();
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let (mut tokens, mut none) = (0, 0);
    let differs = first_difference(cases, &mut stdout, &mut tokens, &mut none);
    if differs.is_none() {
        assert_eq!(stdout.bytes().next().transpose().unwrap(), None, "more answers than cases");
    } else {
        // Its other answers are not needed.
        child.kill().unwrap();
    }
    let status = child.wait().unwrap();
    let written = writer.join().unwrap();
    assert!(differs.is_some() || (status.success() && written.is_ok()), "{status:?}, {written:?}");
    (tokens, none, differs)
}

/// Compares answers as the program gives them, and counts those that are as expected. A program that ends early differs, too.
fn first_difference(cases: &[Case], answers: &mut impl Read, tokens: &mut usize, none: &mut usize) -> Option<String> {
    for (n, case) in cases.iter().enumerate() {
        let mut ended = vec![false; case.settings.len()];
        for (step, of_step) in case.expected.iter().enumerate() {
            for (at, (expected, position)) in of_step.iter().enumerate() {
                let mut bytes = [0; size_of::<SampleAnswer>()];
                if let Err(error) = answers.read_exact(&mut bytes) {
                    return Some(format!("case {n}: {error}"));
                }
                if ended[at] {
                    continue;
                }
                let answer: SampleAnswer = bytemuck::pod_read_unaligned(&bytes);
                let found = decided(&answer, *position, case.vocab, case.logprobs[at]);
                let same = match (&found, expected) {
                    (Ok(found), Ok(expected)) => agree(found, expected),
                    (found, expected) => found == expected,
                };
                if !same {
                    return Some(format!(
                        "case {n}, kind {}, vocab {}, step {step}, row {at}: {found:?}\n{expected:?}\n{:?}",
                        case.kind, case.vocab, case.settings[at]
                    ));
                }
                ended[at] = expected.is_err();
                *(if expected.is_ok() { &mut *tokens } else { &mut *none }) += 1;
            }
        }
    }
    None
}

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

#[test]
fn the_sampler_chooses_what_a_request_chooses() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut program) = program(&kernels(), &[], folder.path()) else {
        const NAME: &str = "the_sampler_chooses_what_a_request_chooses";
        return skipped(NAME, "C++ compiler", "`c++` compiles kernels for this CPU");
    };
    for (by_rivals, rounds) in [(false, 150), (true, 50)] {
        let (tokens, none, differs) = run(&mut program, &cases(rounds, true, by_rivals));
        assert_eq!(differs, None, "by rivals: {by_rivals}");
        assert!(tokens > 25 * rounds && none * 3 > rounds, "{tokens} tokens, {none} rows without one");
    }
}

/// Texts of `sample/sampler.cuh`, and what stands there in a program of all mutants; `MUTANT` is the number of each.
const MUTANTS: [(&str, &str); 19] = [
    // Ids with the probability at the edge, and those of the bucket of the k-th id.
    ("has && before < need ?", "has && before + (mutant == MUTANT ? adds[thread] : 0) < need ?"),
    ("row.top_k - cuts.k_before", "row.top_k - cuts.k_before + (mutant == MUTANT)"),
    (
        "total = cuts.k_weight + block_sum(sum, thread);",
        "if (const u64 all = cuts.k_weight + block_sum(sum, thread); mutant != MUTANT) total = all;",
    ),
    // A narrowed search continues below the buckets that it passed.
    ("need -= found[1];", "need -= mutant == MUTANT ? found[1] / 2 : found[1];"),
    // Of equal scores the lowest id is the best.
    ("if (best > most) most", "if (mutant == MUTANT ? best >= most : best > most) most"),
    // Tokens of earlier steps count.
    (
        "seen[from + n * THREADS].y = entries[n].y + 1;",
        "if (mutant != MUTANT) seen[from + n * THREADS].y = entries[n].y + 1;",
    ),
    ("seen[count] = make_uint2(token, 1u);", "if (mutant != MUTANT) seen[count] = make_uint2(token, 1u);"),
    ("own_row().seen + p.step", "own_row().seen + (mutant == MUTANT ? 0 : p.step)"),
    ("p.step < row.banned_steps", "(mutant == MUTANT || p.step < row.banned_steps)"),
    (
        "noise(seed_of(row), row.position + p.step, id)),",
        "noise(seed_of(row), row.position + (mutant == MUTANT ? 0 : p.step), id)),",
    ),
    ("own_position = row.position + p.step", "own_position = row.position + (mutant == MUTANT ? 5 : p.step)"),
    ("least = bound - 0.1f;", "least = bound - (mutant == MUTANT ? -2.f : 0.1f);"),
    (
        "return (__float_as_uint(fminf(",
        "return mutant == MUTANT && distance < -4.f ? SAMPLE_BUCKETS : (__float_as_uint(fminf(",
    ),
    ("if (!(bits >> i & 1))", "if (mutant != MUTANT && !(bits >> i & 1))"),
    // An id in the buckets where filters cut: all are admitted, none is, or it is not even considered.
    (
        "return winner_at_cut(p, at, cuts, most, cuts.chosen, thread);",
        "return mutant == MUTANT ? cuts.challenger : winner_at_cut(p, at, cuts, most, cuts.chosen, thread);",
    ),
    ("if (cuts.challenger <= cuts.chosen) return", "if (mutant == MUTANT || cuts.challenger <= cuts.chosen) return"),
    (
        "for (u32 b = cuts.first; b <= cuts.last &&",
        "for (u32 b = cuts.first; (mutant == MUTANT ? b < cuts.last : b <= cuts.last) &&",
    ),
    (
        "__ballot_sync(~0u, weight != 0 || count != 0)",
        "__ballot_sync(~0u, weight != 0 || (mutant != MUTANT && count != 0))",
    ),
    ("most[i] = 22.180710f - log_fast", "most[i] = (mutant == MUTANT ? 19.f : 22.180710f) - log_fast"),
];

/// The same of `sample/rivals.cuh`, with numbers that follow.
const RIVAL_MUTANTS: [(&str, &str); 13] = [
    // No search: the last test looks for cases that need none.
    ("winner = search(p, at, refused, thread);", "winner = mutant == MUTANT ? 0 : search(p, at, refused, thread);"),
    // Sums that are not told, because their thread has a better one, or the part has told two.
    (
        "of.second = fmaxf(of.second, fminf(most, of.top));",
        "if (mutant != MUTANT) of.second = fmaxf(of.second, fminf(most, of.top));",
    ),
    ("if (ranks[OF_PART] != 0) bound", "if (mutant != MUTANT && ranks[OF_PART] != 0) bound"),
    ("(LN_2_32 + 0.01f", "((mutant == MUTANT ? 19.f : LN_2_32) + 0.01f"),
    ("u32 own_position = row.position + p.step", "u32 own_position = row.position + (mutant == MUTANT ? 5 : p.step)"),
    // Of equal scores, lower ids are above a rival: in its own four, and elsewhere.
    ("(own > 1 && four[1] == score)", "(mutant != MUTANT && own > 1 && four[1] == score)"),
    ("i < places[r] ? lower[r] : limits[r]", "i < places[r] && mutant != MUTANT ? lower[r] : limits[r]"),
    // A sum of weights at the edge, whose error may decide.
    ("|| above < low) return rank;", "|| above < (mutant == MUTANT ? high : low)) return rank;"),
    ("if (!(above > high)) break;", "if (!(above > (mutant == MUTANT ? low : high))) break;"),
    (
        "if (*second < (need ? need : 1)) return last;",
        "if (*second < (need ? need : 1) + (mutant == MUTANT)) return last;",
    ),
    ("above += own > rival ? weight : 0;", "above += own > rival || (mutant == MUTANT && own == rival) ? weight : 0;"),
    (
        "if (__ldcg(logits + id) > NEGATIVE_INFINITY)",
        "if (mutant == MUTANT || __ldcg(logits + id) > NEGATIVE_INFINITY)",
    ),
    (
        "for (u32 n = thread; n < seen_max(p, part.at); n",
        "for (u32 n = mutant == MUTANT ? THREADS : thread; n < seen_max(p, part.at); n",
    ),
];

/// A folder with the kernels, in which the samplers are every mutant.
fn with_mutants() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in walkdir::WalkDir::new(kernels()) {
        let entry = entry.unwrap();
        let copy = folder.path().join(entry.path().strip_prefix(kernels()).unwrap());
        if entry.file_type().is_dir() {
            std::fs::create_dir_all(copy).unwrap();
            continue;
        }
        let mut text = std::fs::read_to_string(entry.path()).unwrap();
        for (file, mutants, first) in
            [("sample/sampler.cuh", &MUTANTS[..], 1), ("sample/rivals.cuh", &RIVAL_MUTANTS, 1 + MUTANTS.len())]
        {
            for (n, (from, to)) in (first..).zip(mutants).filter(|_| entry.path().ends_with(file)) {
                assert_eq!(text.matches(from).count(), 1, "where is `{from}`?");
                text = text.replace(from, &to.replace("MUTANT", &n.to_string()));
            }
        }
        std::fs::write(copy, text).unwrap();
    }
    folder
}

/// A wrong sampler is found: the cases reach each of these lines. All are in one program, because to compile it takes longer than to run it.
#[test]
fn a_sampler_that_chooses_something_else_is_found() {
    let (kernels, folder) = (with_mutants(), tempfile::tempdir().unwrap());
    let Some(mut program) = program(kernels.path(), &["-DSMALL_ALONE"], folder.path()) else {
        const NAME: &str = "a_sampler_that_chooses_something_else_is_found";
        return skipped(NAME, "C++ compiler", "`c++` compiles kernels for this CPU");
    };
    let mut differs = |mutant: usize, cases: &[Case]| run(program.env("MUTANT", mutant.to_string()), cases).2;
    let first_rival = 1 + MUTANTS.len();
    for (mutants, first, rounds, by_rivals) in [(&MUTANTS[..], 1, 25, false), (&RIVAL_MUTANTS, first_rival, 100, true)]
    {
        let cases = cases(rounds, false, by_rivals);
        assert_eq!(differs(0, &cases), None, "the program without an edit is the sampler");
        for (n, (from, to)) in (first..).zip(mutants) {
            assert!(differs(n, &cases).is_some(), "`{to}` instead of `{from}` changes no token");
        }
    }
    // Usual requests find their tokens without a search, which is slow.
    let mut random = Random::new(19);
    let usual: Vec<Case> = (0..60)
        .map(|_| {
            case_with(0, 1000, 0, true, &mut random, |random| {
                let settings = settings(random, 1000, true);
                let sampling = SampleSettings { temperature: 0.8, top_p: Some(0.95), ..settings.sampling };
                RequestSettings { sampling, ..settings }
            })
        })
        .collect();
    assert_eq!(differs(first_rival, &usual), None);
}

#[test]
fn the_sampler_compiles_for_every_record() {
    let Some(nvrtc) = nvrtc("the_sampler_compiles_for_every_record") else { return };
    let mut seen = BTreeSet::new();
    for name in Target::builtin_names().filter(|name| *name != "cpu") {
        let source = emit(&Target::builtin(name).unwrap());
        let (_, code) = source.text.split_once('\n').expect("a line that names the GPU");
        // For two GPUs of one architecture it is the same.
        if !seen.insert((source.arch.clone(), code.to_owned())) {
            continue;
        }
        let compiled = nvrtc.compile(&source).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!compiled.log.contains("warning"), "{name}: {}", compiled.log);
        let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
        for kernel in [ENTRY_POINT, ENTRY_POINT_RIVALS].map(|name| &resources.kernels[name]) {
            println!("{name}: {} registers, {} bytes spilled", kernel.registers, kernel.spill_store_bytes);
            assert_eq!((kernel.threads_max, kernel.smem_static_bytes), (Some(THREADS), 0), "{name}: {kernel:?}");
            // What functions that are called once for each row save for their callers.
            assert!(kernel.spill_store_bytes < 64, "{name}: {kernel:?}");
        }
    }
}
