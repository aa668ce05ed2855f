//! Tests the check of wave kernels of mixtures of experts on their generated text: it runs on a CPU (waves_kernel.cc) in place of the device. A right
//! kernel passes, with another rounding and another order of sums than the interpreter. One with a fault in its text or its tables is refused.

use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::check::{CheckError, Checked, ReadsChunks, check_chunks, check_rows};
use monobloc::codegen::abi;
use monobloc::codegen::waves::WaveTables;
use monobloc::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsLaunched};
use monobloc::cuda::session::SessionError;
use monobloc::cuda::waves::{ChunkRead, Last};
use monobloc::defaults::rows::{Room, place_rows};
use monobloc::interp::Pack;
use monobloc::ir::BufferId;
use monobloc::model::config::Imported;
use monobloc::pack::pack;
use monobloc::rows::{Row, Shape, Tables, runs};
use monobloc::validate::{Validated, validate};
use monobloc::waves::{Action, Form, Plan, Proven, WithTail};

use crate::launcher::queues_nothing;
use crate::proof_support::BF16;
use crate::skipped;
use crate::waves::{Built, Ran, proven, small, with_tail};
use crate::waves_convolve::convolving;
use crate::waves_experts::{of_layers, wide};
use crate::waves_mamba as mamba;
use crate::waves_nets::{MIXTURES, SHARED, hybrid};

/// Rows of the schedule, of a chunk, of its tail, and of a step.
const ROWS: u32 = 8;
const CHUNK_ROWS: u32 = 256;
const TAIL_ROWS: u32 = 16;
const STEP_ROWS: u32 = 32;
/// Layers of a model. A chunk has the experts of all but the last one.
const LAYERS: u32 = 3;

/// What is wrong of a kernel: text of its headers with what takes its place, and whether products of the first layer have the weights of the second.
#[derive(Debug, Clone, Copy)]
struct Fault {
    text: &'static [(&'static str, &'static str)],
    other_weights: bool,
}

const NONE: Fault = Fault { text: &[], other_weights: false };

impl Fault {
    fn build(self, imported: &Imported, proven: &Proven<'_>) -> Option<Built> {
        let change = |tables: &mut WaveTables| {
            if self.other_weights {
                // Two products a layer.
                let experts = of_experts(proven.plan());
                for (&of, &other) in experts.iter().zip(&experts[2..]).take(2) {
                    let other = tables.waves[other];
                    let wave = &mut tables.waves[of];
                    (wave.weight, wave.branch_bias, wave.row_scales) =
                        (other.weight, other.branch_bias, other.row_scales);
                }
            }
        };
        Built::of(imported, proven, self.text, &change)
    }
}

/// Products of experts, by their waves.
fn of_experts(plan: &Plan) -> Vec<usize> {
    let is_of = |w: &usize| matches!(plan.waves[*w].action, Action::Experts { .. });
    (0..plan.waves.len()).filter(is_of).collect()
}

/// A wave kernel on this CPU, and what its last launch left.
struct Loaded<'a> {
    built: Built,
    proven: Proven<'a>,
    ran: Ran,
}

impl<'a> Loaded<'a> {
    fn of(imported: &Imported, proven: &Proven<'a>, fault: Fault) -> Option<Loaded<'a>> {
        let ran = Ran { cache: vec![], others: vec![], work: vec![], tokens: vec![], logits: vec![] };
        Some(Loaded { built: fault.build(imported, proven)?, proven: proven.clone(), ran })
    }

    /// The ids that a row of the last launch chose; `None`: this kernel does not choose there.
    fn chosen(&self, buffer: BufferId, row: u32) -> Option<Vec<u32>> {
        let work = &self.proven.plan().work[self.proven.choices().get(&buffer)?.index()];
        let row_bytes = work.cols as usize * 4;
        let ids = &self.ran.work[work.place as usize + row as usize * row_bytes..][..row_bytes];
        Some(ids.chunks_exact(4).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect())
    }

    fn logits(&self, row: u32, vocab: u32) -> Vec<f32> {
        self.ran.logits[(row * vocab) as usize..][..vocab as usize].iter().map(|bits| f32::from_bits(*bits)).collect()
    }
}

/// Wave kernels over one cache.
struct Device<'a> {
    kernel: Loaded<'a>,
    /// Of chunks: the tail, and where it finds the residual of its chunk.
    tail: Option<(Loaded<'a>, u64)>,
    cache: Vec<u8>,
    shape: Shape,
    vocab: u32,
}

impl<'a> Device<'a> {
    fn of(imported: &Imported, proven: &Proven<'a>, tail: Option<&WithTail<'a>>, fault: Fault) -> Option<Device<'a>> {
        let tail = match tail {
            Some(both) => Some((Loaded::of(imported, both.tail(), fault)?, both.taken())),
            None => None,
        };
        let of_rows = Shape::of(&proven.validated().schedule().program).unwrap();
        let shape = Shape { rows: proven.plan().rows, ..of_rows };
        let kernel = Loaded::of(imported, proven, fault)?;
        let cache = vec![0xff; proven.validated().schedule().arena_bytes(monobloc::ir::program::Space::Cache) as usize];
        Some(Device { kernel, tail, cache, shape, vocab: imported.graph.vocab })
    }

    /// Runs one step.
    fn launch(&mut self, rows: Vec<abi::Row>, pages: &[u32]) {
        self.kernel.ran = self.kernel.built.run(&[(rows, 1)], pages, Some(&self.cache), None);
        self.cache = self.kernel.ran.cache.clone();
    }

    fn words(&self, at: u64, bytes: usize) -> Vec<u16> {
        let words = self.cache[at as usize..][..bytes].chunks_exact(2);
        words.map(|word| u16::from_le_bytes([word[0], word[1]])).collect()
    }
}

/// The rows of a step as a kernel reads them, and the pages of their sequences.
fn encoded(tables: &Tables<'_>, tokens: &[u32]) -> (Vec<abi::Row>, Vec<u32>) {
    let (mut rows, mut pages) = (vec![], vec![]);
    for (sequence, run) in (0..).zip(runs(tables.rows())) {
        pages.extend(tables.pages(run.first));
        let of_run = tables.rows().iter().zip(tokens).skip(run.first).take(run.rows as usize);
        let row = |(&Row { position, .. }, &token): (&Row, &u32)| {
            let (token, first, slot) = (token as i32, run.first as u32, run.sequence.0);
            abi::Row { sequence, position, token, first, slot, steps: 1, ..bytemuck::Zeroable::zeroed() }
        };
        rows.extend(of_run.map(row));
    }
    (rows, pages)
}

impl ReadsChunks for Device<'_> {
    fn shape(&self) -> &Shape {
        &self.shape
    }
    fn decides(&self) -> bool {
        self.tail.is_some()
    }
    fn read(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<ChunkRead, SessionError> {
        let (rows, pages) = encoded(&tables, tokens);
        let of_tail = abi::Row { token: -1, from: rows.len() as u32 - 1, first: 0, ..*rows.last().unwrap() };
        self.launch(rows, &pages);
        let mut token = None;
        let decides = !matches!(last, Last::Nothing);
        if let Some((tail, taken)) = self.tail.as_mut().filter(|_| decides) {
            let taken = &self.kernel.ran.work[*taken as usize..];
            tail.ran = tail.built.run(&[(vec![of_tail], 1)], &pages, Some(&self.cache), Some(taken));
            self.cache = tail.ran.cache.clone();
            token = Some(tail.ran.tokens[1] as u32);
        }
        tables.finish(1);
        Ok(ChunkRead { chunk_us: 1.0, tail_us: 1.0, token })
    }
    fn logits(&self) -> Result<Vec<f32>, SessionError> {
        let (tail, _) = self.tail.as_ref().unwrap();
        Ok(tail.logits(0, self.vocab))
    }
    fn chosen(&self, buffer: BufferId, row: u32, is_last: bool) -> Result<Vec<u32>, SessionError> {
        let of_tail = || self.tail.as_ref().filter(|_| is_last)?.0.chosen(buffer, 0);
        Ok(self.kernel.chosen(buffer, row).or_else(of_tail).unwrap())
    }
    fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(())
    }
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.words(at, bytes))
    }
}

impl RowLauncher for Device<'_> {
    fn shape(&self) -> &Shape {
        &self.shape
    }
    fn vocab(&self) -> u32 {
        self.vocab
    }
    fn steps_max(&self) -> u32 {
        1
    }
    fn run_whole(&mut self, tables: Tables<'_>, inputs: &[RowInput], _: bool) -> Result<RowsLaunched, SessionError> {
        let token = |input: &RowInput| if let FirstToken::Given(token) = input.first { token } else { panic!() };
        let tokens: Vec<u32> = inputs.iter().map(token).collect();
        let (rows, pages) = encoded(&tables, &tokens);
        self.launch(rows, &pages);
        tables.finish(1);
        let decided = self.kernel.ran.tokens[tokens.len()..].iter().map(|&token| token as u32).collect();
        Ok(RowsLaunched { device_us: 1.0, steps: 1, tokens: vec![tokens, decided] })
    }
    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.kernel.logits(row, self.vocab))
    }
    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.kernel.chosen(buffer, row).unwrap().into_iter().map(f32::from_bits).collect())
    }
    fn poison_logits(&mut self) -> Result<(), SessionError> {
        Ok(())
    }
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.words(at, bytes))
    }
    queues_nothing!();
}

/// A model of `context_max` positions, as its batch kernel has it.
fn placed(imported: &Imported, context_max: u32) -> Validated {
    let target = small();
    let base = Candidate::default_for(&imported.graph, &target, BF16);
    let room = Room { rows: ROWS, sequences: ROWS, positions: 4 * u64::from(context_max) };
    let placed = place_rows(&imported.graph, "waves", BF16, context_max, &target, &base, room).unwrap();
    validate(placed, &target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Checks chunks and their tail over `positions` positions. `None` without a compiler.
fn check_prompt(imported: &Imported, positions: u32, fault: Fault) -> Option<Result<Checked, CheckError>> {
    let validated = placed(imported, positions);
    let right: Pack = Arc::new(pack(validated.schedule(), &imported.graph, &imported.weights).unwrap());
    let both = with_tail(&validated, &small(), CHUNK_ROWS, TAIL_ROWS).unwrap();
    let mut device = Device::of(imported, both.chunk(), Some(&both), fault)?;
    Some(check_chunks(&validated, right, imported.graph.parameter_count(), &mut device))
}

/// Checks steps of sequences of `positions` positions.
fn check_steps(imported: &Imported, positions: u32, fault: Fault) -> Option<Result<Checked, CheckError>> {
    let validated = placed(imported, positions);
    let right: Pack = Arc::new(pack(validated.schedule(), &imported.graph, &imported.weights).unwrap());
    let proven = proven(&validated, &small(), Form::Steps, STEP_ROWS).unwrap();
    let mut device = Device::of(imported, &proven, None, fault)?;
    Some(check_rows(&validated, right, imported.graph.parameter_count(), &mut device))
}

#[test]
fn a_generated_kernel_of_experts_passes_its_check() {
    // Two blocks of rows, and experts with several tiles; then one.
    let layers = Some(LAYERS);
    for (name, imported, positions) in [
        ("experts/qwen2-moe-shared", of_layers("experts/qwen2-moe-shared", layers), 230),
        ("experts/qwen3-moe", of_layers("experts/qwen3-moe", layers), 40),
        ("experts/olmoe", of_layers("experts/olmoe", layers), 40),
        ("experts/qwen3-moe, wide", wide("experts/qwen3-moe", layers), 230),
    ] {
        let Some(found) = check_prompt(&imported, positions, NONE) else {
            return skipped("a_generated_kernel_of_experts_passes_its_check", "C++ compiler", "`c++`");
        };
        let figures = found.unwrap_or_else(|error| panic!("{name}: {error}")).figures();
        // Far from the limit, and not by chance the same numbers.
        assert!(figures.positions >= 1 && (0.01..0.5).contains(&figures.of_tolerance), "{name}: {figures:?}");
        let found = check_steps(&imported, 4, NONE).unwrap();
        let figures = found.unwrap_or_else(|error| panic!("{name}, steps: {error}")).figures();
        assert!(figures.positions >= 38 && (0.01..0.5).contains(&figures.of_tolerance), "{name}: {figures:?}");
    }
}

/// The share of a slot, and 1 in place of that of the second one.
const SHARE_OF_ONE: &[(&str, &str)] = &[(
    "share[s] = c.template work<float>(e.squares_out)[row * G::SLOTS + s];",
    "share[s] = s == 1 ? 1.f : c.template work<float>(e.squares_out)[row * G::SLOTS + s];",
)];
/// How a row chooses.
const CHOICE: &str = "const ExpertChoice<G> choice(lane, x, c.template constant<float>(e.bias), reinterpret_cast<u32*>(c.scratch()) + c.warp() * WORDS, id);";
/// Every fourth row takes the best expert that is not for it in place of the last one that is.
const NEXT: &str = "const ExpertChoice<G> right(lane, x, c.template constant<float>(e.bias), reinterpret_cast<u32*>(c.scratch()) + c.warp() * WORDS, id);
    const u32 last = __shfl_sync(~0u, right.expert, G::TOP_K - 1);
    float y[EACH];
    for (int k = 0; k < EACH; k++) y[k] = row % 4 == 1 && u32(id(k)) == last ? NEGATIVE_INFINITY : x[k];
    const ExpertChoice<G> choice(lane, y, c.template constant<float>(e.bias), reinterpret_cast<u32*>(c.scratch()) + c.warp() * WORDS, id);";

#[test]
fn a_wrong_kernel_of_experts_does_not_pass_its_check() {
    let imported = of_layers("experts/qwen3-moe", Some(LAYERS));
    let faults: [(&str, Fault); 4] = [
        ("choice", Fault { text: &[(CHOICE, NEXT)], ..NONE }),
        ("weights of another layer", Fault { other_weights: true, ..NONE }),
        ("the factor of a slot", Fault { text: SHARE_OF_ONE, ..NONE }),
        ("experts of a tile", Fault { text: &[("unit = of.x * UNITS", "unit = (of.x ^ 1) * UNITS")], ..NONE }),
    ];
    for (what, fault) in faults {
        let Some(found) = check_prompt(&imported, 20, fault) else {
            return skipped("a_wrong_kernel_of_experts_does_not_pass_its_check", "C++ compiler", "`c++`");
        };
        for found in [found, check_steps(&imported, 3, fault).unwrap()] {
            let error = found.expect_err(what);
            let is_found = match error {
                CheckError::Routed { position, row, .. } if what == "choice" => row.unwrap_or(position) % 4 == 1,
                CheckError::Routed { layer, .. } | CheckError::Cached { layer, .. } => layer >= 1,
                _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }),
            };
            assert!(is_found, "{what}: {error}");
        }
    }
}

/// Faults of waves/experts_shared.cuh in prompts: what is wrong, and its text with what takes its place.
const FAULTS_OF_SHARED: [(&str, &[(&str, &str)]); 3] = [
    ("weights of another expert", &[("item.unit = expert * UNITS", "item.unit = (expert ^ 1) * UNITS")]),
    (
        "the second 64 of k of a slot, of a tile with few rows",
        &[("w + span / SPANS * (PASS * UNIT_BYTES)", "w + 0 * (PASS * UNIT_BYTES)")],
    ),
    (
        "the first unit of a warp twice",
        &[("const float2 y = settled(i % 2, j + i / 2)", "const float2 y = settled(0, j + i / 2)")],
    ),
];

#[test]
fn wrong_experts_in_shared_memory_do_not_pass() {
    let imported = wide("experts/qwen3-moe", Some(LAYERS));
    for (what, text) in FAULTS_OF_SHARED {
        let Some(found) = check_prompt(&imported, 150, Fault { text, ..NONE }) else {
            return skipped("wrong_experts_in_shared_memory_do_not_pass", "C++ compiler", "`c++`");
        };
        let error = found.expect_err(what);
        let is_found = match error {
            CheckError::Routed { layer, .. } | CheckError::Cached { layer, .. } => layer >= 1,
            _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }),
        };
        assert!(is_found, "{what}: {error}");
    }
}

/// A net, attention, and both again. A chunk ends with the second attention.
fn mixture_with_nets(name: &str) -> Imported {
    hybrid(name, SHARED, &[true, false, true, false])
}

#[test]
fn a_generated_kernel_of_states_beside_experts_passes_its_check() {
    // Two blocks of rows, one row, and some; then a part of one.
    let nets = MIXTURES.map(|name| (name, mixture_with_nets(name)));
    let [granite, nemotron] = mamba::MIXTURES.map(|name| (name, mamba::ending_in_attention(name)));
    let models = nets.into_iter().chain([("hybrids/lfm2-moe", convolving("hybrids/lfm2-moe")), granite, nemotron]);
    for ((name, imported), positions) in models.zip([230, 40, 40, 100, 40]) {
        let Some(found) = check_prompt(&imported, positions, NONE) else {
            let test = "a_generated_kernel_of_states_beside_experts_passes_its_check";
            return skipped(test, "C++ compiler", "`c++`");
        };
        let figures = found.unwrap_or_else(|error| panic!("{name}: {error}")).figures();
        assert!(figures.positions >= 1 && (0.01..0.6).contains(&figures.of_tolerance), "{name}: {figures:?}");
        let found = check_steps(&imported, 4, NONE).unwrap();
        let figures = found.unwrap_or_else(|error| panic!("{name}, steps: {error}")).figures();
        assert!(figures.positions >= 38 && (0.01..0.6).contains(&figures.of_tolerance), "{name}: {figures:?}");
    }
}

/// Faults of waves/mix.cuh in prompts: what is wrong, and its text with what takes its place.
const FAULTS_OF_NETS: [(&str, &[(&str, &str)]); 6] = [
    (
        "a state that does not decay from 32 positions to the next",
        &[("const float decay = line(c, 2)[ROWS - 1];", "const float decay = 1.f;")],
    ),
    ("a chunk that forgets the one before", &[("const bool begins = c.p.position == 0;", "const bool begins = true;")]),
    (
        "the last state of a head, which no row reads",
        &[("*there = *here; });", "if (task.head != 3 || c.p.position < 201) *there = *here; });")],
    ),
    (
        "past inputs of one position before",
        &[("const int row = rows - N::PAST + t;", "const int row = rows - 1 - N::PAST + t;")],
    ),
    ("beta of the second block of rows", &[("to[0] = N::beta(", "to[0] = (row < 128 ? 1.f : 0.5f) * N::beta(")]),
    (
        "a factor that depends on the rows of the chunk",
        &[("to[0] = N::beta(", "to[0] = (c.p.row_count > 100 ? 0.99f : 1.f) * N::beta(")],
    ),
];

#[test]
fn a_wrong_net_beside_experts_does_not_pass_its_check() {
    let imported = mixture_with_nets("hybrids/qwen35-moe");
    for (what, text) in FAULTS_OF_NETS {
        let Some(found) = check_prompt(&imported, 208, Fault { text, ..NONE }) else {
            return skipped("a_wrong_net_beside_experts_does_not_pass_its_check", "C++ compiler", "`c++`");
        };
        let error = found.expect_err(what);
        let is_found = match error {
            _ if what.starts_with("the last state") => {
                matches!(error, CheckError::Cached { position: 207, layer: 0, what: "recurrent states", .. })
            }
            CheckError::Cached { layer, .. } | CheckError::Routed { layer, .. } => layer <= 3,
            CheckError::CutsDiffer { position: 0, end: 93, .. } => what.starts_with("a factor that depends"),
            _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }),
        };
        assert!(is_found, "{what}: {error}");
    }
    // The faults of experts are found, too.
    let factor = Fault { text: SHARE_OF_ONE, ..NONE };
    for fault in [factor, Fault { other_weights: true, ..NONE }] {
        let error = check_prompt(&imported, 20, fault).unwrap().expect_err("experts");
        assert!(!matches!(error, CheckError::CutsDiffer { .. } | CheckError::Interp(_)), "{error}");
    }
}

/// Faults of waves/scan.cuh and of what it shares: what is wrong, and its text with what takes its place.
const FAULTS_OF_MAMBA: [(&str, &[(&str, &str)]); 6] = [
    (
        "a state that does not decay from 32 positions to the next",
        &[("const float decay = line(c, 2)[ROWS - 1];", "const float decay = 1.f;")],
    ),
    ("steps that the state does not have", &[("(SOLVES ? 1.f : a.factor)", "1.f")]),
    ("a step of the second block of rows", &[("to[0] = step;", "to[0] = (row < 128 ? 1.f : 0.5f) * step;")]),
    ("d", &[("x + skip * own.x, z + skip * own.y", "x, z")]),
    (
        "past inputs of one position before",
        &[("const int row = rows - N::PAST + t;", "const int row = rows - 1 - N::PAST + t;")],
    ),
    (
        "the gate of the row before",
        &[(
            "wave_columns<G::X_PARTS, G::COLS>(c, e.gate, row, col)",
            "wave_columns<G::X_PARTS, G::COLS>(c, e.gate, max(row - 1, 0), col)",
        )],
    ),
];

#[test]
fn wrong_mamba_beside_experts_does_not_pass_its_check() {
    let imported = mamba::ending_in_attention(mamba::MIXTURES[0]);
    for (what, text) in FAULTS_OF_MAMBA {
        let Some(found) = check_prompt(&imported, 208, Fault { text, ..NONE }) else {
            return skipped("wrong_mamba_beside_experts_does_not_pass_its_check", "C++ compiler", "`c++`");
        };
        let error = found.expect_err(what);
        let is_found = matches!(
            error,
            CheckError::Cached { .. }
                | CheckError::Routed { .. }
                | CheckError::Wrong { .. }
                | CheckError::CutsDiffer { .. }
                | CheckError::Argmax { .. }
        );
        assert!(is_found, "{what}: {error}");
    }
}
