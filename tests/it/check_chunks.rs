//! Tests the check of wave kernels of mixtures of experts, with an interpreter in place of the device: of prompts in chunks with a tail, and of steps
//! of more rows than the schedule has. A device whose router is nearly tied passes, whatever it chooses. One that chooses wrong experts, takes the
//! weights of another layer, or drops the factor of a slot is refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use monobloc::check::{CheckError, Checked, ReadsChunks, check_chunks, check_rows};
use monobloc::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsLaunched, given};
use monobloc::cuda::session::SessionError;
use monobloc::cuda::waves::{ChunkRead, Last};
use monobloc::dtype::{DType, Precision};
use monobloc::interp::{Interp, Options, Pack};
use monobloc::ir::BufferId;
use monobloc::ir::layout::matrices;
use monobloc::ir::op::Role;
use monobloc::ir::program::{Grid, Rows};
use monobloc::ir::schedule::Schedule;
use monobloc::model::config::{Imported, import_config_only};
use monobloc::pack::pack;
use monobloc::rows::{Edit, Guard, PageId, Request, Row, SequenceId, Shape, Tables};
use monobloc::target::Target;
use monobloc::validate::Validated;

use crate::check_choices::{model, one_ahead, other_ahead, other_pair, turn};
use crate::check_codes::{Fake, Says, as_computed, place_for};
use crate::launcher::queues_nothing;

const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };
/// Six experts, of which a row has two; a shared scale that a device may leave out.
const CONFIG: &str = r#"{"architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe","hidden_size":128,"intermediate_size":64,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"vocab_size":320,"rms_norm_eps":1e-6,
    "rope_theta":10000.0,"max_position_embeddings":256,"hidden_act":"silu","tie_word_embeddings":false,"num_experts":6,
    "num_experts_per_tok":2,"moe_intermediate_size":64,"norm_topk_prob":true,"decoder_sparse_step":1,"mlp_only_layers":[],
    "attention_bias":false,"sliding_window":null,"use_sliding_window":false}"#;
const CONTEXT_MAX: u32 = 256;
/// Rows of the schedule, and of a step of the device.
const ROWS: u32 = 8;
const STEP_ROWS: u32 = 32;

/// A device that has more rows in a launch than the schedule: an interpreter executes them in turn.
struct Wide {
    fake: Fake,
    guard: Guard,
    shape: Shape,
    /// The page of each block of each sequence, as the interpreter knows it.
    pages: BTreeMap<(SequenceId, u32), u32>,
    /// What rows of the last launch chose.
    chosen: BTreeMap<(BufferId, u32), Vec<f32>>,
    /// Of chunks: whether they have a tail.
    has_tail: bool,
    logits: Vec<Vec<f32>>,
}

impl Wide {
    fn new(fake: Fake, schedule: &Schedule, rows: u32, has_tail: bool) -> Wide {
        let of_interp = Shape::of(&schedule.program).unwrap();
        let (guard, shape) = (Guard::new(of_interp), Shape { rows, ..of_interp });
        Wide { fake, guard, shape, pages: BTreeMap::new(), chosen: BTreeMap::new(), has_tail, logits: vec![] }
    }

    /// Runs the rows of a launch: the tokens that those with logits decide.
    fn run(&mut self, tables: Tables<'_>, tokens: &[u32]) -> Vec<u32> {
        let rows = tables.rows().to_vec();
        let (mut dropped, mut edits) = (vec![], vec![]);
        for (at, row) in rows.iter().enumerate() {
            for (block, page) in (0..=row.position / self.shape.page_rows).zip(tables.pages(at)) {
                let key = (row.sequence, block);
                if self.pages.get(&key) == Some(&page) {
                    continue;
                }
                // Another sequence, which is closed, had it.
                let held =
                    self.pages.iter().filter(|(_, of)| **of == page).map(|(&(sequence, block), _)| (sequence, block));
                dropped.extend(held.map(|(sequence, block)| Edit { sequence, block, page: None }));
                self.pages.retain(|_, of| *of != page);
                self.pages.insert(key, page);
                edits.push(Edit { sequence: row.sequence, block, page: Some(PageId(page)) });
            }
        }
        tables.finish(1);
        let mut edits = [dropped, edits].concat();
        let (mut at, mut decided) = (0, vec![]);
        self.chosen.clear();
        self.logits = vec![vec![]; rows.len()];
        while at < rows.len() {
            let alike = rows[at..].iter().take_while(|row| row.wants_logits == rows[at].wants_logits).count();
            let of_launch: Vec<Row> = rows[at..][..alike.min(ROWS as usize)].to_vec();
            let (count, wants) = (of_launch.len(), of_launch[0].wants_logits);
            let request = Request { rows: of_launch, steps: 1, edits: std::mem::take(&mut edits) };
            let admitted = self.guard.admit(&request).unwrap();
            let ran = self.fake.run_whole(admitted, &given(&tokens[at..][..count]), wants).unwrap();
            decided.extend(ran.tokens[1].iter().filter(|_| wants));
            for row in 0..count {
                for buffer in self.fake.routers() {
                    let ids = self.fake.exchanged(buffer, row as u32).unwrap();
                    self.chosen.insert((buffer, (at + row) as u32), ids);
                }
                self.logits[at + row] = self.fake.logits(row as u32).unwrap();
            }
            at += count;
        }
        decided
    }
}

impl ReadsChunks for Wide {
    fn shape(&self) -> &Shape {
        &self.shape
    }
    fn decides(&self) -> bool {
        self.has_tail
    }
    fn read(&mut self, tables: Tables<'_>, tokens: &[u32], last: Last<'_>) -> Result<ChunkRead, SessionError> {
        assert!(matches!(last, Last::Token { with_logits: true, .. }) == self.has_tail);
        let token = self.run(tables, tokens).last().copied();
        Ok(ChunkRead { chunk_us: 1.0, tail_us: 1.0, token })
    }
    fn logits(&self) -> Result<Vec<f32>, SessionError> {
        Ok(self.logits.last().unwrap().clone())
    }
    fn chosen(&self, buffer: BufferId, row: u32, _: bool) -> Result<Vec<u32>, SessionError> {
        Ok(self.chosen[&(buffer, row)].iter().map(|id| id.to_bits()).collect())
    }
    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.logits.clear();
        Ok(())
    }
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        RowLauncher::read_cache(&self.fake, at, bytes)
    }
}

impl RowLauncher for Wide {
    fn shape(&self) -> &Shape {
        &self.shape
    }
    fn vocab(&self) -> u32 {
        self.fake.vocab()
    }
    fn steps_max(&self) -> u32 {
        1
    }
    fn run_whole(
        &mut self,
        tables: Tables<'_>,
        inputs: &[RowInput],
        with_logits: bool,
    ) -> Result<RowsLaunched, SessionError> {
        let token = |input: &RowInput| if let FirstToken::Given(token) = input.first { token } else { panic!() };
        let tokens: Vec<u32> = inputs.iter().map(token).collect();
        let decided = self.run(tables, &tokens);
        assert_eq!(decided.len(), if with_logits { tokens.len() } else { 0 });
        Ok(RowsLaunched { device_us: 1.0, steps: 1, tokens: vec![tokens, decided] })
    }
    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.logits[row as usize].clone())
    }
    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.chosen[&(buffer, row)].clone())
    }
    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.logits.clear();
        Ok(())
    }
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        RowLauncher::read_cache(&self.fake, at, bytes)
    }
    queues_nothing!();
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kernel {
    Chunks,
    ChunksAndTail,
    Steps,
}

const KERNELS: [Kernel; 3] = [Kernel::Chunks, Kernel::ChunksAndTail, Kernel::Steps];

/// A device that has weights, and executes a program, of its own.
struct Device<'a> {
    imported: &'a Imported,
    /// Changes its pack.
    change: &'a dyn Fn(&Schedule, &mut Vec<u8>),
    says: Says,
}

fn placed(imported: &Imported) -> Validated {
    place_for(imported, &Target::builtin("h200").unwrap(), BF16, ROWS, 4 * u64::from(CONTEXT_MAX), CONTEXT_MAX)
}

/// Checks a device against `reference`. `parameters`: as many as the check counts.
fn checked(reference: &Imported, device: &Device<'_>, kernel: Kernel, parameters: u64) -> Result<Checked, CheckError> {
    let (validated, computes) = (placed(reference), placed(device.imported));
    let (schedule, computes) = (validated.schedule(), computes.schedule());
    let right: Pack = Arc::new(pack(schedule, &reference.graph, &reference.weights).unwrap());
    let mut of_device = pack(computes, &device.imported.graph, &device.imported.weights).unwrap();
    (device.change)(computes, &mut of_device);
    let shapes = Interp::new(schedule, right.clone(), Options::fast()).unwrap();
    let mut fake = Fake::new(schedule, computes, Arc::new(of_device), &shapes, Options::fast(), as_computed);
    fake.says = device.says;
    match kernel {
        Kernel::Steps => {
            let mut wide = Wide::new(fake, schedule, STEP_ROWS, false);
            check_rows(&validated, right, parameters, &mut wide)
        }
        _ => {
            let mut wide = Wide::new(fake, schedule, 512, kernel == Kernel::ChunksAndTail);
            check_chunks(&validated, right, parameters, &mut wide)
        }
    }
}

const UNCHANGED: &dyn Fn(&Schedule, &mut Vec<u8>) = &|_, _| ();

fn right(imported: &Imported) -> Device<'_> {
    Device { imported, change: UNCHANGED, says: |_, _| () }
}

/// So many that only some rows of a chunk are executed.
const MANY: u64 = u64::MAX;

#[test]
fn a_right_wave_kernel_passes_whatever_it_chose() {
    let (reference, other) = (model(one_ahead), model(other_ahead));
    for kernel in KERNELS {
        for parameters in [1, MANY] {
            let found = checked(&reference, &right(&other), kernel, parameters);
            let figures = found.unwrap_or_else(|error| panic!("{kernel:?}: {error}")).figures();
            // Three chunks: 200 rows, one, and what is left.
            let positions = if kernel == Kernel::ChunksAndTail { 3 } else { 0 };
            assert!(figures.positions == positions || kernel == Kernel::Steps, "{kernel:?}: {figures:?}");
            assert!(figures.error_rel_l2 < 0.03 && figures.of_tolerance < 1.0, "{kernel:?}: {figures:?}");
        }
    }
}

#[test]
fn wrong_choices_of_wave_kernels_are_refused_by_name() {
    let (reference, other) = (model(one_ahead), model(other_pair));
    for kernel in KERNELS {
        let error = checked(&reference, &right(&other), kernel, 1).expect_err("other experts");
        assert!(matches!(error, CheckError::Routed { position: 0, layer: 0, .. }), "{kernel:?}: {error}");
    }
    // An expert that there is not, told by one row.
    let of = |kernel, says| {
        let reference = model(one_ahead);
        checked(&reference, &Device { says, ..right(&reference) }, kernel, 1).expect_err("no expert")
    };
    let error = of(Kernel::Chunks, |row, ids| ids.iter_mut().filter(|_| row == 5).for_each(|id| *id = u32::MAX));
    assert!(error.to_string().starts_with("position 5: layer 0: experts were chosen"), "{error}");
    let error = of(Kernel::Steps, |row, ids| ids.iter_mut().filter(|_| row == 5).for_each(|id| *id = u32::MAX));
    assert!(error.to_string().starts_with("position 0, row 5 of the step: layer 0: experts"), "{error}");
}

#[test]
fn a_wave_kernel_that_computes_other_experts_than_it_says_is_refused() {
    let (reference, other) = (model(one_ahead), model(other_ahead));
    let twin: Says = |row, ids| ids.iter_mut().filter(|_| row % 8 == 0).for_each(|id| *id ^= 1);
    for kernel in KERNELS {
        let error = checked(&reference, &Device { says: twin, ..right(&other) }, kernel, 1).expect_err("other experts");
        let wrong = match error {
            CheckError::Routed { layer, .. } | CheckError::Cached { layer, .. } => layer == 1,
            _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }),
        };
        assert!(wrong, "{kernel:?}: {error}");
    }
}

/// The bytes of the matrix of one expert, in the product of a layer.
fn of_expert(schedule: &Schedule, product: &str, expert: u32) -> std::ops::Range<usize> {
    let program = &schedule.program;
    let grid = program.grids.iter().find(|grid: &&Grid| grid.name == product).unwrap_or_else(|| panic!("{product}"));
    let weight = grid.operand(Role::Weight).unwrap();
    let Rows::Lookup(table) = weight.rows else { panic!("{product} has one matrix") };
    let each = matrices(program)[weight.buffer.index()].unwrap().units_bytes() as usize
        / program.tables[table.index()].bound as usize;
    let first = schedule.placement[weight.buffer.index()].unwrap() as usize + expert as usize * each;
    first..first + each
}

#[test]
fn weights_of_another_layer_or_expert_are_refused() {
    let imported = import_config_only(CONFIG, 3).unwrap();
    checked(&imported, &right(&imported), Kernel::ChunksAndTail, 1).unwrap();
    for (product, from, expert) in [("gate_up.0", "gate_up.1", 2), ("down.0", "down.1", 2), ("down.0", "down.0", 3)] {
        let change = |schedule: &Schedule, bytes: &mut Vec<u8>| {
            let (to, from) = (of_expert(schedule, product, 2), of_expert(schedule, from, expert));
            bytes.copy_within(from, to.start);
        };
        for (kernel, parameters) in KERNELS.into_iter().flat_map(|kernel| [(kernel, 1), (kernel, MANY)]) {
            let error = checked(&imported, &Device { change: &change, ..right(&imported) }, kernel, parameters);
            let error = error.expect_err(product);
            // What the layer made reaches the keys and values, the scores and the logits after it.
            let wrong = match error {
                CheckError::Routed { layer, .. } | CheckError::Cached { layer, .. } => layer == 1,
                _ => matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }),
            };
            assert!(wrong, "{product} of {from}, {kernel:?}: {error}");
        }
    }
    // Of the last layer nothing but the logits tell, which chunks alone do not have.
    let change = |schedule: &Schedule, bytes: &mut Vec<u8>| {
        for expert in 0..6 {
            let (to, from) = (of_expert(schedule, "down.1", expert), of_expert(schedule, "down.0", expert));
            bytes.copy_within(from, to.start);
        }
    };
    for kernel in [Kernel::ChunksAndTail, Kernel::Steps] {
        let error = checked(&imported, &Device { change: &change, ..right(&imported) }, kernel, 1).expect_err("logits");
        assert!(matches!(error, CheckError::Wrong { .. } | CheckError::Argmax { .. }), "{kernel:?}: {error}");
    }
}

#[test]
fn shares_that_a_wave_kernel_does_not_normalise_are_refused() {
    let imported = import_config_only(CONFIG, 3).unwrap();
    let other = import_config_only(&CONFIG.replace("\"norm_topk_prob\":true", "\"norm_topk_prob\":false"), 3).unwrap();
    for kernel in KERNELS {
        let error = checked(&imported, &right(&other), kernel, 1).expect_err("other shares");
        assert!(!matches!(error, CheckError::Routed { layer: 0, .. }), "{kernel:?}: {error}");
    }
}

/// Rows that are not executed have keys and values that others read.
#[test]
fn prompts_are_checked_to_their_end() {
    let reference = model(one_ahead);
    for (from, parameters) in [(40, 1), (199, MANY), (230, 1), (250, MANY)] {
        let change = move |schedule: &Schedule, bytes: &mut Vec<u8>| turn(schedule, bytes, from);
        let error = checked(&reference, &Device { change: &change, ..right(&reference) }, Kernel::Chunks, parameters);
        let CheckError::Cached { position, layer: 0, what: "keys", .. } = error.expect_err("other angles") else {
            panic!("keys")
        };
        assert!((from as u32..from as u32 + 3).contains(&position), "{from}: {position}");
    }
}
