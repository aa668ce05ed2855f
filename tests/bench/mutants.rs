//! Runs mutants on a device: schedules that the proof refuses, each in its own process under the watchdog. The outcome is
//! compared with the prediction of the machine of `tests/oracle`.
//!
//! `cargo bench --bench mutants` runs as many mutants of every class as fit 240 seconds, `-- 60` as fit 60, and prints the
//! table of `docs/proof-report.md`. Without a device it says so and compares nothing.
//!
//! `tests/oracle/device.rs` explains how a mutant gets onto a device.

use computed::oracle::Kind;
use computed::oracle::device::{device_form, unproven};
use computed::oracle::explore::{Effort, Rng, Verdict, judge};
use computed::oracle::mutate::CLASSES;
use computed::proof_support::{BF16, FP32};
use monobloc::candidate::Candidate;
use monobloc::codegen::KernelSource;
use monobloc::codegen::abi::Queues;
use monobloc::codegen::emit::Trace;
use monobloc::cuda::driver::Device;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::cuda::session::{Session, SessionError};
use monobloc::digest::Digest;
use monobloc::interp::{Input, Interp, Options};
use monobloc::ir::schedule::Schedule;
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import_config_only};
use monobloc::pack::{PackError, pack};
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{check, validate};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Which weights a mutant gets; passed to the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Given {
    /// Those of the sound schedule, because a pack of the broken one would be meaningless.
    Sound,
    /// Packed for the mutant.
    Own,
}

impl Given {
    const ALL: [(Given, &str); 2] = [(Given::Sound, "sound"), (Given::Own, "own")];

    fn of(class: &str, prediction: Predicted) -> Given {
        match class {
            // Only the packer knows the type of the weights; queues and kernels do not.
            "dtype mismatch" => Given::Own,
            _ if prediction == Predicted::Anything => Given::Sound,
            _ => Given::Own,
        }
    }

    fn word(self) -> &'static str {
        Given::ALL.iter().find(|(given, _)| *given == self).map_or("", |(_, word)| word)
    }
}

/// Steps of a launch: both regimes, and a few changes of phase.
const STEPS: u32 = 24;
/// Most mutants of a class that are run.
const OF_A_CLASS: usize = 7;
/// Most mutants of a class that are generated: some of them are no change for a device.
const TRIED: usize = 60;
/// A child that runs longer is killed.
const DEADLINE: Duration = Duration::from_secs(20);

const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":200,
    "max_position_embeddings":64}"#;

/// The schedules that are mutated: one small decoder, with two precisions, on four SMs, its history split from position 12 on.
struct Base {
    target: Target,
    imported: Imported,
    schedule: Schedule,
}

fn bases(target: &Target) -> Vec<Base> {
    let make = |precision| {
        let imported = import_config_only(CONFIG, 3).expect("a model");
        let default = Candidate::default_for(&imported.graph, target, precision);
        let candidate = Candidate { sms: 4, splits: 2, split_from: 12, heads_per_task: 1, ..default };
        let program = lower(&imported.graph, "mutants", precision, 64, &candidate).expect("a program");
        let schedule = schedule(program, target, &candidate).expect("a schedule");
        assert!(check(&schedule, target).is_empty(), "the base is proven");
        Base { target: target.clone(), imported, schedule }
    };
    vec![make(FP32), make(BF16)]
}

/// One broken schedule, as a device gets it.
struct Case {
    class: &'static str,
    base: usize,
    /// The machine's prediction, if it was asked.
    prediction: Option<Verdict>,
    source: KernelSource,
    broken: Schedule,
    /// The schedule that is encoded: the events of first waits have bits for the changed behaviour of tasks.
    queued: Schedule,
}

/// Why there is nothing to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Spared {
    /// The class does not apply to this schedule, or did not break it.
    Sound,
    /// The kernel's source, the queues and the weights equal those of the sound schedule, byte for byte.
    SameBytes,
    /// A queue cannot express it: the encoder failed, or constants are at places where the base's pack has others.
    NotEncoded,
}

/// The `index`th mutant.
fn case(index: usize, bases: &[Base], predict: bool) -> Result<Case, Spared> {
    let (class, mutate) = CLASSES[index % CLASSES.len()];
    let base = index / CLASSES.len() % bases.len();
    let Base { target, schedule: sound, imported } = &bases[base];
    let (mut broken, mut machine) = (sound.clone(), target.clone());
    let mut random = Rng((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    mutate(&mut broken, &mut machine, &mut random).ok_or(Spared::Sound)?;
    if check(&broken, &machine).is_empty() {
        return Err(Spared::Sound);
    }
    if machine != *target {
        // The GPU cannot change, so there are more blocks than SMs instead of fewer SMs than blocks.
        broken.machine.sms = 8 * target.spec.sm_count;
        for regime in &mut broken.regimes {
            regime.queues.resize(broken.machine.sms as usize, vec![]);
            regime.streams.resize(broken.machine.sms as usize, vec![]);
        }
    }
    let effort = Effort { steps: 4, states_max: 0, walks: 8, stores: 16, seed: index as u64 + 1 };
    let prediction = predict.then(|| judge(&broken, &machine, &effort));
    let form = |schedule: &Schedule| catch_unwind(AssertUnwindSafe(|| device_form(schedule, sound, target))).ok();
    let (source, queued) = form(&broken).ok_or(Spared::NotEncoded)?;
    let (sound_source, sound_queued) = form(sound).ok_or(Spared::NotEncoded)?;
    let queues = |queued: &Schedule| {
        let digest = catch_unwind(AssertUnwindSafe(|| Queues::of(unproven(queued)).digest()));
        digest.map_err(|_| Spared::NotEncoded)
    };
    let same_code = source == sound_source && queues(&queued)? == queues(&sound_queued)?;
    let given = Given::of(class, prediction.as_ref().map_or(Predicted::Nothing, |verdict| predicted(Some(verdict))));
    match class {
        "dtype mismatch" => {
            let weights = |schedule: &Schedule| {
                let packed = catch_unwind(AssertUnwindSafe(|| image(given, imported, sound, schedule)));
                packed.ok().and_then(Result::ok)
            };
            if same_code && weights(&broken) == weights(sound) {
                return Err(Spared::SameBytes);
            }
        }
        _ if same_code => return Err(Spared::SameBytes),
        // For any schedule.
        _ => {}
    }
    Ok(Case { class, base, prediction, source, broken, queued })
}

/// The weights of a mutant as they lie on the device.
fn image(given: Given, imported: &Imported, sound: &Schedule, broken: &Schedule) -> Result<Vec<u8>, PackError> {
    let schedule = if given == Given::Sound { sound } else { broken };
    pack(schedule, &imported.graph, &imported.weights)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    // A mutant may make code generation panic: that is an outcome, and is not printed.
    std::panic::set_hook(Box::new(|_| {}));
    let result = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["child", folder, index, given] => {
            let given = Given::ALL.iter().find(|(_, word)| *word == given).map(|(given, _)| *given);
            child(Path::new(folder), index.parse().expect("an index"), given.expect("which weights"))
        }
        [] => parent(Duration::from_secs(240)),
        [seconds] if seconds.parse::<u64>().is_ok() => parent(Duration::from_secs(seconds.parse().unwrap_or(240))),
        _ => Err("expected seconds, or nothing".to_string()),
    };
    if let Err(error) = result {
        // The parent reads a child's output.
        println!("{error}");
        std::process::exit(2);
    }
}

/// The first device that a builtin record describes.
fn device() -> Result<(u32, Target), String> {
    let devices = Device::list().map_err(|e| e.to_string())?;
    let records = Target::builtin_names().filter_map(Target::builtin);
    for record in records {
        if let Some(found) = devices.iter().find(|d| d.matches(&record).is_ok()) {
            return Ok((found.ordinal, record));
        }
    }
    Err("no builtin record describes a device of this machine".to_string())
}

/// How a mutant's run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// The watchdog reported which task waits for what.
    Hang,
    /// Logits differ.
    Mismatch,
    /// An illegal access, or a kernel that did not end: only this process is lost.
    Killed,
    /// The compiler or the driver refused it.
    Refused,
    /// The logits are those of the sound schedule.
    Match,
}

const ENDS: [(End, &str); 5] = [
    (End::Hang, "hang"),
    (End::Mismatch, "mismatch"),
    (End::Killed, "killed"),
    (End::Refused, "refused"),
    (End::Match, "match"),
];

/// Outcomes that a prediction allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Predicted {
    Hang,
    /// A wrong value in some orders of events, but not in others.
    Race,
    /// The schedule is meaningless, so any outcome is allowed, in one process.
    Anything,
    Nothing,
}

fn predicted(verdict: Option<&Verdict>) -> Predicted {
    match verdict {
        None | Some(Verdict::Safe { .. }) => Predicted::Nothing,
        Some(Verdict::Unsafe(fault)) => match fault.kind {
            Kind::Hang => Predicted::Hang,
            Kind::Unwritten | Kind::Stale | Kind::Clobbered | Kind::Invisible | Kind::Border => Predicted::Race,
            Kind::Malformed | Kind::Undeclared | Kind::OutOfBounds | Kind::Occupancy | Kind::Ring => {
                Predicted::Anything
            }
        },
    }
}

fn told(verdict: &Option<Verdict>) -> String {
    match verdict {
        Some(Verdict::Unsafe(fault)) => fault.to_string(),
        _ => "nothing".to_string(),
    }
}

fn agrees(predicted: Predicted, end: End) -> bool {
    match predicted {
        Predicted::Hang => end == End::Hang,
        // A task that happens to be late is right; a task that waits for an overwritten tag hangs.
        Predicted::Race => matches!(end, End::Mismatch | End::Hang | End::Match),
        Predicted::Anything => true,
        Predicted::Nothing => end == End::Match,
    }
}

fn parent(budget: Duration) -> Result<(), String> {
    let begun = Instant::now();
    let found = device();
    let target = match &found {
        Ok((_, record)) => record.clone(),
        Err(_) => Target::builtin("h200").expect("a record"),
    };
    let bases = bases(&target);
    let (cases, spared) = chosen(&bases);
    let sound: Vec<KernelSource> =
        bases.iter().map(|base| device_form(&base.schedule, &base.schedule, &target).0).collect();
    let mut sources: BTreeMap<Digest, &KernelSource> = BTreeMap::new();
    for source in cases.iter().map(|(_, case)| &case.source).chain(&sound) {
        sources.insert(name_of(source), source);
    }
    println!("{} mutants of {} classes, {} kernels", cases.len(), classes(&cases).len(), sources.len());
    for class in CLASSES.iter().map(|c| c.0).filter(|class| !classes(&cases).contains(class)) {
        let of = |why| spared.get(&(class, why)).copied().unwrap_or(0);
        println!(
            "nothing else to a device: {class}: of {} that the proof refuses, {} are the same kernel, queues and weights, byte \
             for byte, and {} cannot be encoded",
            of(Spared::SameBytes) + of(Spared::NotEncoded),
            of(Spared::SameBytes),
            of(Spared::NotEncoded)
        );
    }
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let nvrtc = Nvrtc::load().map_err(|e| e.to_string())?;
    let refused = compile(&nvrtc, &sources, folder.path());
    println!("compiled in {:.0} s, {} refused by the compiler", begun.elapsed().as_secs_f64(), refused.len());
    if let Some(why) = sound.iter().find_map(|source| refused.get(&name_of(source))) {
        return Err(format!("the kernel of the sound schedule does not compile:\n{why}"));
    }
    if let Err(reason) = found {
        println!("SKIPPED (no GPU): {reason}");
        return Ok(());
    }
    for (b, base) in bases.iter().enumerate() {
        let logits = interpreted(base)?;
        fs::write(folder.path().join(format!("expected-{b}")), bytemuck::cast_slice(&logits))
            .map_err(|e| e.to_string())?;
    }
    let mut ends: BTreeMap<&'static str, BTreeMap<(Predicted, End), usize>> = BTreeMap::new();
    let (mut ran, mut against) = (0, vec![]);
    for (index, case) in &cases {
        let prediction = predicted(case.prediction.as_ref());
        let (end, detail) = match refused.get(&name_of(&case.source)) {
            Some(why) => (End::Refused, why.lines().next().unwrap_or_default().to_string()),
            None if begun.elapsed() > budget => continue,
            None => run_child(folder.path(), *index, Given::of(case.class, prediction))?,
        };
        ran += 1;
        *ends.entry(case.class).or_default().entry((prediction, end)).or_default() += 1;
        let line = format!("{index} {}: predicted {}, {end:?} {detail}", case.class, told(&case.prediction));
        println!("{line}");
        if !agrees(prediction, end) {
            against.push(line);
        }
    }
    // The sound schedule once more, without a mutant.
    run_child(folder.path(), usize::MAX, Given::Sound)?;
    println!("\n{}", table(&ends));
    println!(
        "{ran} mutants in {:.0} s; the sound schedules were right before each and after the last",
        begun.elapsed().as_secs_f64()
    );
    println!("against the prediction: {}", against.len());
    against.iter().for_each(|line| println!("  {line}"));
    if against.is_empty() { Ok(()) } else { Err("the device and the machine disagree".to_string()) }
}

fn classes(cases: &[(usize, Case)]) -> BTreeSet<&'static str> {
    cases.iter().map(|(_, case)| case.class).collect()
}

/// Mutants ordered so that every prefix has all classes; and how many of each class are not run, by reason.
#[allow(clippy::type_complexity)] // Said once.
fn chosen(bases: &[Base]) -> (Vec<(usize, Case)>, BTreeMap<(&'static str, Spared), usize>) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = AtomicUsize::new(0);
    let mut of_class: Vec<Vec<(usize, Case)>> = CLASSES.iter().map(|_| vec![]).collect();
    let mut spared: BTreeMap<(&'static str, Spared), usize> = BTreeMap::new();
    std::thread::scope(|scope| {
        let work = || {
            let mut mine = vec![];
            loop {
                let class = next.fetch_add(1, Ordering::Relaxed);
                if class >= CLASSES.len() {
                    return mine;
                }
                let (mut cases, mut without) = (vec![], vec![]);
                for index in (0..TRIED).map(|nth| nth * CLASSES.len() + class) {
                    match case(index, bases, true) {
                        Ok(case) => cases.push((index, case)),
                        Err(why) => without.push(why),
                    }
                    if cases.len() == OF_A_CLASS {
                        break;
                    }
                }
                mine.push((class, cases, without));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            for (class, cases, without) in worker.join().expect("a worker") {
                of_class[class] = cases;
                without.into_iter().for_each(|why| *spared.entry((CLASSES[class].0, why)).or_default() += 1);
            }
        }
    });
    let mut all: Vec<(usize, (usize, Case))> =
        of_class.into_iter().flat_map(|cases| cases.into_iter().enumerate()).collect();
    all.sort_by_key(|(nth, (index, _))| (*nth, *index));
    (all.into_iter().map(|(_, case)| case).collect(), spared)
}

fn name_of(source: &KernelSource) -> Digest {
    Digest::of(format!("{source:?}").as_bytes())
}

/// Compiles on all cores; returns the refused kernels with the reason.
fn compile(nvrtc: &Nvrtc, sources: &BTreeMap<Digest, &KernelSource>, folder: &Path) -> BTreeMap<Digest, String> {
    let list: Vec<(&Digest, &KernelSource)> = sources.iter().map(|(d, s)| (d, *s)).collect();
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut refused = BTreeMap::new();
    std::thread::scope(|scope| {
        let work = || {
            let mut mine = vec![];
            while let Some((name, source)) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                match nvrtc.compile(source) {
                    Ok(compiled) => fs::write(folder.join(name.to_string()), compiled.cubin).expect("a file"),
                    Err(error) => mine.push((**name, error.to_string())),
                }
            }
            mine
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            refused.extend(worker.join().expect("a worker"));
        }
    });
    refused
}

/// Tokens that the launch is given: one a step.
fn ids() -> Vec<u32> {
    (0..STEPS).map(|p| (p * 37 + 11) % 200).collect()
}

/// Logits of the sound schedule, in f64.
fn interpreted(base: &Base) -> Result<Vec<f32>, String> {
    let proven = validate(base.schedule.clone(), &base.target).map_err(|e| e.to_string())?;
    let packed = pack(proven.schedule(), &base.imported.graph, &base.imported.weights).map_err(|e| e.to_string())?;
    let mut interp = Interp::new(proven.schedule(), Arc::new(packed), Options::spec()).map_err(|e| e.to_string())?;
    let inputs: Vec<Input> = ids().into_iter().map(Input::Token).collect();
    let (mut all, mut row) = (vec![], vec![]);
    interp
        .launch(&inputs, |step| {
            step.logits.copy_to(&mut row);
            all.extend_from_slice(&row);
            ControlFlow::Continue(())
        })
        .map_err(|e| e.to_string())?;
    Ok(all)
}

fn run_child(folder: &Path, index: usize, given: Given) -> Result<(End, String), String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let out = folder.join("said");
    let file = fs::File::create(&out).map_err(|e| e.to_string())?;
    let mut child = Command::new(program)
        .arg("child")
        .arg(folder)
        .arg(index.to_string())
        .arg(given.word())
        .stdout(file)
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| e.to_string())?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().map_err(|e| e.to_string())? {
            break Some(status);
        }
        if begun.elapsed() > DEADLINE {
            child.kill().and_then(|()| child.wait()).map_err(|e| e.to_string())?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let said = fs::read_to_string(&out).unwrap_or_default();
    if !said.contains("sound\n") {
        return Err(format!("before mutant {index} the sound schedule was not right on the device: {said}{status:?}"));
    }
    let told = ENDS.iter().find_map(|(end, name)| Some((*end, said.lines().find_map(|l| l.strip_prefix(name))?)));
    Ok(match (told, status) {
        (Some((end, detail)), _) => (end, detail.to_string()),
        (None, None) => (End::Killed, "by its deadline".to_string()),
        (None, Some(status)) => (End::Killed, status.to_string()),
    })
}

/// Runs the sound schedule, then one mutant. Prints `sound` if the first was right, then how the second ended.
fn child(folder: &Path, index: usize, given: Given) -> Result<(), String> {
    let (ordinal, target) = device()?;
    let bases = bases(&target);
    let mutant = (index != usize::MAX).then(|| case(index, &bases, false).map_err(|_| "no such mutant")).transpose()?;
    let base = mutant.as_ref().map_or(0, |case| case.base);
    let device = Device::open(ordinal).map_err(|e| e.to_string())?;
    let sound = &bases[base];
    let (source, queued) = device_form(&sound.schedule, &sound.schedule, &target);
    let bytes = fs::read(folder.join(format!("expected-{base}"))).map_err(|e| e.to_string())?;
    let expected: Vec<f32> = bytes.as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four)).collect();
    let weights = image(Given::Sound, &sound.imported, &sound.schedule, &sound.schedule).map_err(|e| e.to_string())?;
    let logits = run(&device, folder, &weights, &source, &queued).map_err(|e| format!("{e:?}"))?;
    // bf16 rounds the staged input too, which the interpreter does not.
    let tolerance = if base == 0 { 1e-4 } else { 5e-2 };
    if difference(&expected, &logits) > tolerance {
        return Err(format!("the sound schedule differs by {}", difference(&expected, &logits)));
    }
    println!("sound");
    let Some(case) = mutant else { return Ok(()) };
    let mutant = || {
        let weights = image(given, &sound.imported, &sound.schedule, &case.broken).unwrap_or_else(|e| panic!("{e}"));
        run(&device, folder, &weights, &case.source, &case.queued)
    };
    match catch_unwind(AssertUnwindSafe(mutant)) {
        Err(_) => println!("refused by the host"),
        Ok(Ok(found)) => {
            let by = difference(&logits, &found);
            let name = if by <= 1e-5 { "match" } else { "mismatch" };
            println!("{name} by {by:.1e}");
        }
        Ok(Err(SessionError::Hung { stuck, .. })) => {
            // Ids of events have the bits of hooks.
            let first = stuck.first().map(|s| format!("{}: {:?} at {:?} of step {}", s.sm, s.kind, s.task, s.step));
            println!("hang {}", first.unwrap_or_default());
        }
        Ok(Err(SessionError::Lost)) => println!("killed: did not leave"),
        Ok(Err(SessionError::Driver(error))) if error.is_crash() => println!("killed: {error}"),
        Ok(Err(error)) => println!("refused: {error}"),
    }
    // Resources of a lost context cannot be freed in order.
    std::process::exit(0);
}

fn run(
    device: &Device,
    folder: &Path,
    weights: &[u8],
    source: &KernelSource,
    queued: &Schedule,
) -> Result<Vec<f32>, SessionError> {
    let cubin = fs::read(folder.join(name_of(source).to_string())).unwrap_or_else(|e| panic!("{e}"));
    let queues = Queues::of(unproven(queued));
    let mut session =
        Session::load(device, &queues, &cubin, Trace::Off, STEPS, |stream, to| Ok(to.upload(stream, 0, weights)?))?;
    session.poison_logits()?;
    session.start(&ids(), &[])?;
    session.run(0, STEPS, true)?;
    session.logits(STEPS)
}

/// Largest difference divided by the largest expected value; infinite for NaN.
fn difference(expected: &[f32], found: &[f32]) -> f32 {
    if expected.len() != found.len() {
        return f32::INFINITY;
    }
    let scale = expected.iter().fold(1e-6f32, |most, x| most.max(x.abs()));
    let worst = |most: f32, (e, f): (&f32, &f32)| {
        let by = (e - f).abs() / scale;
        if by.is_nan() { f32::INFINITY } else { most.max(by) }
    };
    expected.iter().zip(found).fold(0.0, worst)
}

fn table(ends: &BTreeMap<&'static str, BTreeMap<(Predicted, End), usize>>) -> String {
    let mut text = "| class | mutants | predicted: hang | race | anything | nothing | device: hang | mismatch | killed | \
                    refused | match | against |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_string();
    let mut total: BTreeMap<(Predicted, End), usize> = BTreeMap::new();
    ends.values().flatten().for_each(|(key, count)| *total.entry(*key).or_default() += count);
    for (class, counts) in ends.iter().map(|(class, counts)| (*class, counts)).chain([("all", &total)]) {
        let sum = |wanted: &dyn Fn(&(Predicted, End)) -> bool| -> usize {
            counts.iter().filter(|(key, _)| wanted(key)).map(|(_, count)| count).sum()
        };
        let mut cells = vec![class.to_string(), sum(&|_| true).to_string()];
        for p in [Predicted::Hang, Predicted::Race, Predicted::Anything, Predicted::Nothing] {
            cells.push(sum(&|key| key.0 == p).to_string());
        }
        for (end, _) in ENDS {
            cells.push(sum(&|key| key.1 == end).to_string());
        }
        cells.push(sum(&|key| !agrees(key.0, key.1)).to_string());
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    }
    text
}
