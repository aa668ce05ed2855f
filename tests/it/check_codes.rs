//! Tests the check of devices whose cache has codes of fp8, with an interpreter in place of the device. A correct kernel with another order
//! of sums passes, and each fault of a kernel is refused by the comparison that is meant to find it.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::check::{CacheContents, CheckError, Checked, DeviceCaches, Figures, OneRow, Subject};
use monobloc::check::{check_cpu, check_rows, compare_codes, expect_steps};
use monobloc::cuda::rows::{FirstToken, RowInput, RowLauncher, RowsLaunched};
use monobloc::cuda::session::SessionError;
use monobloc::defaults::rows::{Room, place_one_row, place_rows};
use monobloc::dtype::{DType, Precision};
use monobloc::format::{e4m3, to_e4m3};
use monobloc::interp::{CacheShape, Input, Interp, Options, Pack};
use monobloc::ir::op::{Op, Role};
use monobloc::ir::program::{Buffer, Grid};
use monobloc::ir::schedule::Schedule;
use monobloc::ir::variant::swizzled_piece;
use monobloc::ir::{BufferId, GridId};
use monobloc::lower::lower;
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::pack::pack;
use monobloc::rows::{Shape, Tables};
use monobloc::sample::argmax;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::{Validated, validate};

use crate::formats::ODD;
use crate::launcher::queues_nothing;
use crate::support::{checkpoints, fixture};

const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::E4m3, wire: DType::Bf16 };
const FP32: Precision = Precision { weights: DType::F32, cache: DType::E4m3, wire: DType::F32 };
/// Two KV heads of 64 dimensions, which tensor cores take, so that rows of the cache are swizzled.
const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":128,"intermediate_size":192,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64,"vocab_size":320,"rms_norm_eps":1e-5,
    "rope_theta":10000.0,"max_position_embeddings":256,"hidden_act":"silu","tie_word_embeddings":false}"#;
const CONTEXT_MAX: u32 = 128;

fn model() -> (Imported, Target) {
    (import_config_only(CONFIG, 3).unwrap(), Target::builtin("h200").unwrap())
}

/// Places a kernel for one row over its own cache if `rows` is 0. Otherwise places one for `rows` over pages that hold `positions`.
pub(crate) fn place(
    imported: &Imported,
    target: &Target,
    precision: Precision,
    rows: u32,
    positions: u64,
) -> Validated {
    place_for(imported, target, precision, rows, positions, CONTEXT_MAX)
}

/// The same with another context.
pub(crate) fn place_for(
    imported: &Imported,
    target: &Target,
    precision: Precision,
    rows: u32,
    positions: u64,
    context_max: u32,
) -> Validated {
    let candidate = Candidate::default_for(&imported.graph, target, precision).for_context(context_max);
    let placed = if rows == 0 {
        let program = lower(&imported.graph, "test", precision, context_max, &candidate).unwrap();
        schedule(program, target, &candidate).unwrap()
    } else {
        let room = Room { rows, sequences: rows.max(2), positions };
        let place = if rows == 1 { place_one_row } else { place_rows };
        place(&imported.graph, "test", precision, context_max, target, &candidate, room).unwrap()
    };
    validate(placed, target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Scales of keys and values in a pack, by KV head, layer by layer.
fn change_scales(schedule: &Schedule, bytes: &mut [u8], change: impl Fn(&mut [[f32; 2]])) {
    let before = bytes.to_vec();
    for grid in &schedule.program.grids {
        let Some(scales) = grid.operand(Role::CacheScales) else { continue };
        let Op::Attention(attention) = &grid.op else { panic!("scales of another op") };
        let at = schedule.placement[scales.buffer.index()].unwrap() as usize;
        let bytes = &mut bytes[at..at + 8 * attention.kv_heads() as usize];
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        let mut scales: Vec<[f32; 2]> = bytes.chunks(8).map(|pair| [value(&pair[..4]), value(&pair[4..])]).collect();
        change(&mut scales);
        let changed = scales.iter().flatten().flat_map(|scale| scale.to_le_bytes());
        bytes.iter_mut().zip(changed).for_each(|(byte, changed)| *byte = changed);
    }
    assert!(bytes != before, "the pack has these scales anyway");
}

/// The bytes that a device stores for a row, from the bytes that it computed for its columns.
pub(crate) type Store = fn(&CacheShape, &[u8]) -> Vec<u8>;

pub(crate) fn as_computed(_: &CacheShape, bytes: &[u8]) -> Vec<u8> {
    bytes.to_vec()
}

/// What a device says of the experts that a row has chosen.
pub(crate) type Says = fn(usize, &mut [u32]);

/// A device: its cache arena, and an interpreter that computes what the device would.
pub(crate) struct Fake {
    schedule: Schedule,
    interp: Interp,
    /// Changes what rows have chosen before it is told.
    pub says: Says,
    /// Rows of a turn: the exchange has those of the last one.
    pub turn: usize,
    /// Of the last launch: its rows, and whether it only filled the cache.
    launched: (usize, bool),
    /// Shapes as the check has them, because an interpreter with a cache in fp32 has no scales.
    shapes: Vec<CacheShape>,
    arena: Vec<u8>,
    store: Store,
    logits: Vec<Vec<f32>>,
    shape: Option<Shape>,
}

impl Fake {
    /// `schedule` is checked; `computes` is what the device executes.
    pub fn new(
        schedule: &Schedule,
        computes: &Schedule,
        pack: Pack,
        shapes: &Interp,
        options: Options,
        store: Store,
    ) -> Fake {
        let of_buffer = |(buffer, place): (&Buffer, &Option<u64>)| {
            Some((*place)? + u64::from(buffer.rows) * u64::from(buffer.cols) * buffer.dtype.bytes() as u64)
        };
        let bytes = schedule.program.buffers.iter().zip(&schedule.placement).filter_map(of_buffer);
        Fake {
            arena: vec![0xff; bytes.max().unwrap() as usize],
            interp: Interp::new(computes, pack, options).unwrap(),
            shapes: shapes.caches().to_vec(),
            logits: vec![],
            says: |_, _| (),
            turn: usize::MAX,
            launched: (1, false),
            shape: Shape::of(&schedule.program),
            schedule: schedule.clone(),
            store,
        }
    }

    /// Copies a row of the cache to its place in a kernel's cache.
    fn keep(&mut self, row: usize, position: u32) {
        for (cache, shape) in self.shapes.iter().enumerate() {
            let codes = (self.store)(shape, &self.interp.read_cache(cache, row));
            let grids = (0..).map(GridId).zip(&self.schedule.program.grids);
            let reads = |role, grid: &Grid| grid.operand(role).is_some_and(|o| o.buffer == shape.buffer);
            let (id, _) = grids
                .into_iter()
                .find(|(_, grid)| reads(Role::HistoryK, grid) || reads(Role::HistoryV, grid))
                .expect("an attention over each cache");
            let variant = self.schedule.attention_variant(id).unwrap();
            let row_bytes = variant.pitch as usize * shape.dtype.bytes();
            let at = self.schedule.placement[shape.buffer.index()].unwrap() as usize;
            for (head, codes) in codes.chunks(row_bytes).enumerate() {
                let row = at + (head * shape.rows + row) * row_bytes;
                for (piece, codes) in codes.chunks(16).enumerate() {
                    let swizzled = swizzled_piece(position, piece as u32, row_bytes as u32) as usize;
                    let piece = if variant.swizzled { swizzled } else { piece };
                    self.arena[row + piece * 16..][..16].copy_from_slice(codes);
                }
            }
        }
    }

    /// Where rows choose, by layer.
    pub fn routers(&self) -> Vec<BufferId> {
        self.interp.routers().iter().map(|router| router.buffer).collect()
    }

    fn chosen(&self, buffer: BufferId, row: usize) -> Vec<u32> {
        let mut ids: Vec<u32> = self.interp.exchanged(buffer, row).into_iter().map(f32::to_bits).collect();
        (self.says)(row, &mut ids);
        ids
    }

    fn words(&self, at: u64, bytes: usize) -> Vec<u16> {
        let words = self.arena[at as usize..][..bytes].chunks_exact(2);
        words.map(|word| u16::from_le_bytes([word[0], word[1]])).collect()
    }
}

impl OneRow for Fake {
    fn decode(&mut self, _: Figures, ids: &[u32], first: u32, wanted: &[u32]) -> Result<Vec<Vec<f32>>, CheckError> {
        self.interp.seek(first).unwrap();
        let inputs: Vec<Input> = ids[first as usize..].iter().copied().map(Input::Token).collect();
        let mut logits = vec![];
        self.interp.launch(&inputs, |step| {
            if wanted.contains(&step.position) {
                logits.push(step.logits.to_vec());
            }
            ControlFlow::Continue(())
        })?;
        (first..ids.len() as u32).for_each(|position| self.keep(position as usize, position));
        Ok(logits)
    }

    fn fill(&mut self, cache: &CacheContents<'_>) -> Result<(), CheckError> {
        self.interp.reset();
        Ok(cache.put(&mut self.interp)?)
    }

    fn choices(&mut self, ids: &[u32], first: u32) -> Result<Vec<Vec<Vec<u32>>>, CheckError> {
        self.interp.seek(first).unwrap();
        let of_position = |&id: &u32| {
            self.interp.launch(&[Input::Token(id)], |_| ControlFlow::Continue(())).unwrap();
            self.interp.routers().iter().map(|router| self.chosen(router.buffer, 0)).collect()
        };
        Ok(ids[first as usize..].iter().map(of_position).collect())
    }

    fn codes(&self, caches: &DeviceCaches, position: u32) -> Result<Vec<Vec<u8>>, SessionError> {
        caches.read(u64::from(position), position, &|at, bytes| Ok(self.words(at, bytes)))
    }
}

impl RowLauncher for Fake {
    fn shape(&self) -> &Shape {
        self.shape.as_ref().unwrap()
    }
    fn vocab(&self) -> u32 {
        self.interp.vocab() as u32
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
        let page_rows = tables.shape().page_rows;
        let of_row = |(row, of): (usize, &monobloc::rows::Row)| {
            let page = tables.pages(row).nth((of.position / page_rows) as usize).unwrap();
            ((page * page_rows + of.position % page_rows) as usize, of.position)
        };
        let rows: Vec<(usize, u32)> = tables.rows().iter().enumerate().map(of_row).collect();
        let tokens: Vec<u32> = inputs
            .iter()
            .map(|input| if let FirstToken::Given(token) = input.first { token } else { panic!() })
            .collect();
        let mut logits = vec![vec![]; rows.len()];
        self.interp.launch_rows(tables, &tokens, |step| logits[step.row] = step.logits.to_vec()).unwrap();
        rows.iter().for_each(|&(row, position)| self.keep(row, position));
        let decided = logits.iter().map(|logits| argmax(logits).unwrap_or(0)).collect();
        self.logits = logits;
        self.launched = (rows.len(), !with_logits);
        Ok(RowsLaunched { device_us: 1.0, steps: 1, tokens: vec![tokens, decided] })
    }
    fn logits(&self, row: u32) -> Result<Vec<f32>, SessionError> {
        Ok(self.logits[row as usize].clone())
    }
    fn exchanged(&self, buffer: BufferId, row: u32) -> Result<Vec<f32>, SessionError> {
        let ((rows, only_filled), row) = (self.launched, row as usize);
        let last_turn = (rows - 1) / self.turn * self.turn;
        let router = self.interp.routers().iter().find(|router| router.buffer == buffer).unwrap();
        let is_there = last_turn + row < rows && (router.fills || !only_filled);
        let ids = self.chosen(buffer, last_turn + row);
        Ok(ids.into_iter().map(|id| if is_there { f32::from_bits(id) } else { f32::NAN }).collect())
    }
    fn rows_kept(&self) -> u32 {
        self.shape().rows.min(self.turn as u32)
    }
    fn poison_logits(&mut self) -> Result<(), SessionError> {
        self.logits.clear();
        Ok(())
    }
    fn read_cache(&self, at: u64, bytes: usize) -> Result<Vec<u16>, SessionError> {
        Ok(self.words(at, bytes))
    }
    queues_nothing!();
}

/// Behaviour of a fake device: its arithmetic, its pack, and what it stores.
struct Device {
    options: Options,
    /// It computes with keys and values that are not rounded to codes.
    unrounded: bool,
    change: Option<fn(&mut [[f32; 2]])>,
    store: Store,
}

fn right() -> Device {
    Device { options: Options::fast(), unrounded: false, change: None, store: as_computed }
}

/// Checks `device` with a kernel for `rows` rows; 0: for one row over its own cache.
fn checked(precision: Precision, rows: u32, device: &Device) -> Result<Checked, CheckError> {
    checked_with_pages(precision, rows, 1024, device)
}

/// The same over pages that hold `positions` of all sequences together.
fn checked_with_pages(precision: Precision, rows: u32, positions: u64, device: &Device) -> Result<Checked, CheckError> {
    let (imported, target) = model();
    let validated = place(&imported, &target, precision, rows, positions);
    let schedule = validated.schedule();
    let packed = pack(schedule, &imported.graph, &imported.weights).unwrap();
    let right: Pack = Arc::new(packed.clone());
    let of_interp = Interp::new(schedule, right.clone(), Options::fast()).unwrap();
    let plain = Precision { cache: DType::F32, ..precision };
    let unrounded = device.unrounded.then(|| place(&imported, &target, plain, rows, positions));
    let (computes, of_device) = match (&unrounded, device.change) {
        (Some(unrounded), _) => {
            let schedule = unrounded.schedule();
            (schedule, Arc::new(pack(schedule, &imported.graph, &imported.weights).unwrap()) as Pack)
        }
        (None, None) => (schedule, right.clone()),
        (None, Some(change)) => {
            let mut bytes = packed;
            change_scales(schedule, &mut bytes, change);
            (schedule, Arc::new(bytes) as Pack)
        }
    };
    let mut fake = Fake::new(schedule, computes, of_device, &of_interp, device.options, device.store);
    if rows > 0 {
        return check_rows(&validated, right, imported.graph.parameter_count(), &mut fake);
    }
    let subject = Subject {
        validated: &validated,
        target: &target,
        graph: &imported.graph,
        weights: &imported.weights,
        pack: right,
        positions: &[0, 1, 9, 40],
        alone: None,
    };
    compare_codes(&subject, &mut fake, &|| {})
}

/// Kernels for one row, for one row over pages, and for eight.
const KERNELS: [u32; 3] = [0, 1, 8];

#[test]
fn a_right_device_passes_whatever_its_order_of_sums() {
    for rows in KERNELS {
        for options in [Options::fast(), Options::spec()] {
            for (precision, error_max) in [(BF16, 0.02), (FP32, 1e-5)] {
                let found = checked(precision, rows, &Device { options, ..right() });
                let figures = found.unwrap_or_else(|error| panic!("{rows} rows, {precision:?}: {error}")).figures();
                assert!(figures.positions >= 4 && figures.error_rel_l2 < error_max, "{rows} rows: {figures:?}");
            }
        }
    }
}

/// `bench --rows 1 --position 32` of a small model ended as a fault of monobloc: its check wanted more pages than it had made.
#[test]
fn a_check_takes_the_pages_that_there_are() {
    // Pages of 64 positions, half of the context.
    let precision = Precision { cache: DType::F32, ..FP32 };
    let positions = |room| checked_with_pages(precision, 1, room, &right()).unwrap().figures().positions;
    let (few, many) = (positions(1), positions(1024));
    assert!(few > 20 && few < many, "{few} and {many} positions");
}

/// The codes of a row in the order of its columns.
fn changed(bytes: &[u8], change: impl Fn(usize, u8) -> u8) -> Vec<u8> {
    bytes.iter().enumerate().map(|(i, &code)| change(i, code)).collect()
}

#[test]
fn codes_that_are_not_those_of_the_computed_values_are_refused() {
    let scales = |change| Device { change: Some(change), ..right() };
    let stores = |store| Device { store, ..right() };
    let faults = [
        ("scales twice as large", scales(|all| all.iter_mut().flatten().for_each(|scale| *scale *= 2.0))),
        ("keys and values changed places", scales(|all| all.iter_mut().for_each(|scales| scales.swap(0, 1)))),
        ("the scale of one head", scales(|all| all[1][1] *= 4.0)),
        ("the order of a pair", stores(|_, bytes| changed(bytes, |i, _| bytes[i ^ 1]))),
        ("another head", stores(|_, bytes| changed(bytes, |i, _| bytes[i ^ 64]))),
        ("the half of a head", stores(|_, bytes| changed(bytes, |i, _| bytes[i ^ 32]))),
        ("one dimension of a head", stores(|_, bytes| changed(bytes, |i, code| if i == 70 { 0 } else { code }))),
        ("signs", stores(|_, bytes| changed(bytes, |_, code| code & 0x7f))),
        ("no numbers", stores(|_, bytes| changed(bytes, |i, code| if i == 5 { 0x7f } else { code }))),
    ];
    for rows in KERNELS {
        for precision in [BF16, FP32] {
            for (name, device) in &faults {
                let error = checked(precision, rows, device).expect_err(name);
                assert!(
                    matches!(error, CheckError::Cached { position: 0, layer: 0, .. }),
                    "{rows} rows: {name}: {error}"
                );
            }
        }
    }
}

/// The bytes of a cache in fp32 as codes, by `code` of the value in units of the scale.
fn coded(shape: &CacheShape, bytes: &[u8], code: fn(f32) -> u8) -> Vec<u8> {
    let values = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
    (0..).zip(values).map(|(column, value)| code(value / shape.scale_of(column).unwrap())).collect()
}

#[test]
fn a_device_that_cuts_codes_off_or_attends_to_other_values_is_refused() {
    let towards_zero = |shape: &CacheShape, bytes: &[u8]| {
        coded(shape, bytes, |value| {
            let code = to_e4m3(value);
            code - u8::from(e4m3(code).abs() > value.abs())
        })
    };
    let nearest = |shape: &CacheShape, bytes: &[u8]| coded(shape, bytes, to_e4m3);
    // Pages of a cache in fp32 have fewer rows, so this is a kernel without pages.
    for precision in [BF16, FP32] {
        let error =
            checked(precision, 0, &Device { unrounded: true, store: towards_zero, ..right() }).expect_err("cut off");
        assert!(matches!(error, CheckError::Cached { position: 0, .. }), "{error}");
    }
    // Its codes are right, but its attention does not read them, so outputs of the first layer differ.
    let error = checked(FP32, 0, &Device { unrounded: true, store: nearest, ..right() }).expect_err("other values");
    assert!(matches!(error, CheckError::Cached { position: 0, layer: 1, .. }), "{error}");
}

/// Checks the interpreter's fast path with a pack that `change` has changed, of whole models and of one op alone.
fn checked_on_cpu(
    imported: &Imported,
    precision: Precision,
    positions: &[u32],
    alone: bool,
    change: impl Fn(&Schedule, &mut Vec<u8>),
) -> Result<Figures, CheckError> {
    let target = Target::builtin("cpu").unwrap();
    let validated = place(imported, &target, precision, 0, 1024);
    let Imported { graph, weights, .. } = imported;
    let mut bytes = pack(validated.schedule(), graph, weights).unwrap();
    change(validated.schedule(), &mut bytes);
    let (pack, alone) = (Arc::new(bytes) as Pack, alone.then(Vec::new));
    let subject = Subject { validated: &validated, target: &target, graph, weights, pack, positions, alone };
    let steps = Cell::new(0);
    let checked = check_cpu(&subject, &|| steps.set(steps.get() + 1))?;
    assert_eq!(steps.get(), expect_steps(&subject, false));
    Ok(checked.figures())
}

#[test]
fn every_family_passes_the_check_of_the_interpreter_with_such_a_cache() {
    for name in checkpoints("families") {
        let imported = import(&fixture(&name)).unwrap();
        for (precision, error_max) in [(BF16, 0.04), (FP32, 3e-4)] {
            let found = checked_on_cpu(&imported, precision, &[0, 1, 31, 63], false, |_, _| ());
            let figures = found.unwrap_or_else(|error| panic!("{name}, {precision:?}: {error}"));
            assert!(figures.positions == 4 && figures.error_rel_l2 < error_max, "{name}, {precision:?}: {figures:?}");
        }
    }
    // The rows of these heads are padded.
    let odd = import_config_only(ODD, 3).unwrap();
    checked_on_cpu(&odd, FP32, &[0, 31], false, |_, _| ()).unwrap_or_else(|error| panic!("{error}"));
    checked_on_cpu(&odd, FP32, &[0, 31], true, |_, _| ()).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_pack_of_the_interpreter_with_a_fault_is_refused() {
    let (imported, _) = model();
    for precision in [BF16, FP32] {
        let error = checked_on_cpu(&imported, precision, &[0, 9], false, |schedule, bytes| {
            change_scales(schedule, bytes, |all| all.iter_mut().flatten().for_each(|scale| *scale *= 2.0));
        });
        let error = error.expect_err("scales that are not those of the model");
        assert!(matches!(error, CheckError::Cached { position: 0, layer: 0, what: "keys", .. }), "{error}");
        // The exponent of one weight: of a query, which changes no code of its layer, and of a key.
        for row in [0, 4 * 64] {
            let error = checked_on_cpu(&imported, precision, &[0, 9], false, |schedule, bytes| {
                let buffers = &schedule.program.buffers;
                let matrix = buffers.iter().position(|buffer| buffer.name == "qkv.0.weight").unwrap();
                let bytes_of_row = buffers[matrix].cols as usize * buffers[matrix].dtype.bytes();
                let at = schedule.placement[matrix].unwrap() as usize + row * bytes_of_row;
                bytes[at + buffers[matrix].dtype.bytes() - 1] ^= 0x40;
            });
            let error = error.expect_err("a weight that is not that of the checkpoint");
            let layer = u32::from(row == 0);
            assert!(matches!(error, CheckError::Cached { layer: found, .. } if found == layer), "{row}: {error}");
        }
    }
}
