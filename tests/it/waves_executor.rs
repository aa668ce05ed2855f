//! Executes a plan of waves on the CPU: the second judge of plans, which knows nothing of how they are derived or proven.
//!
//! All SMs finish a wave before the next one begins. Within a wave their shares run in any order. Activations lie where the plan puts
//! them, as values of fp64 that nothing rounds; those that were not written are NaN. So are keys and values.

use std::collections::BTreeMap;

use monobloc::dtype::DType;
use monobloc::ir::op::{Attention, Epilogue, MatVec, NormAttr, Op, QkNormAttr, Role};
use monobloc::ir::program::{Content, Grid, Part, Program};
use monobloc::ir::{BufferId, GridId};
use monobloc::model::config::Imported;
use monobloc::random::Random;
use monobloc::reference::{Session, act, norm_values, rope_apply, softcap, softmax};
use monobloc::waves::{Action, BLOCK_ROWS, Layout, NormOf, Plan, Share, Sum, Target, Wave, WorkId};

/// Keys or values of a layer: of each position, all KV heads.
pub type Rows = Vec<Vec<f64>>;

/// Sums of fp64 in another order, of activations that are up to some thousands.
pub const TOLERANCE: f64 = 1e-9;

struct Chunk<'a> {
    program: &'a Program,
    imported: &'a Imported,
    plan: &'a Plan,
    /// One cell for 2 bytes of the arena. An fp32 value is in its first cell, and spoils the second.
    arena: Vec<f64>,
    tokens: &'a [u32],
    /// Position of the first token.
    position: usize,
}

/// Keys and values that `plan` leaves in the cache of every layer, after it has read `chunks`.
pub fn execute(program: &Program, imported: &Imported, plan: &Plan, chunks: &[&[u32]], seed: u64) -> Vec<[Rows; 2]> {
    let positions: usize = chunks.iter().map(|chunk| chunk.len()).sum();
    let mut caches = BTreeMap::new();
    let layers: Vec<_> = program.grids.iter().filter(|grid| matches!(grid.op, Op::Attention(_))).collect();
    for grid in &layers {
        let Op::Attention(a) = &grid.op else { unreachable!() };
        for role in [Role::AppendK, Role::AppendV] {
            let empty = vec![vec![f64::NAN; (a.kv_heads() * a.head_dim) as usize]; positions];
            caches.insert(operand(grid, role), empty);
        }
    }
    let mut random = Random::new(seed);
    let mut position = 0;
    for tokens in chunks {
        let arena = vec![f64::NAN; plan.work_bytes() as usize / 2];
        let mut chunk = Chunk { program, imported, plan, arena, tokens, position };
        for wave in &plan.waves {
            let division = &plan.divisions[wave.division.index()];
            let blocks = tokens.len().div_ceil(BLOCK_ROWS as usize);
            let mut shares = division.shares[blocks - 1].concat();
            for i in (1..shares.len()).rev() {
                shares.swap(i, random.below(i + 1));
            }
            chunk.wave(wave, &shares, &mut caches);
        }
        position += tokens.len();
    }
    let mut taken = |grid: &Grid, role| caches.remove(&operand(grid, role)).expect("a cache of its own");
    layers.into_iter().map(|grid| [taken(grid, Role::AppendK), taken(grid, Role::AppendV)]).collect()
}

/// What the reference has after it has read the same tokens one by one.
pub fn expected(imported: &Imported, tokens: &[u32]) -> Vec<[Rows; 2]> {
    let mut session = Session::new(&imported.graph, &imported.weights);
    tokens.iter().for_each(|&token| drop(session.step_hidden(token)));
    let cached = |layer| session.cached(layer).map(<[Vec<f64>]>::to_vec);
    (0..imported.graph.layers.len()).map(cached).collect()
}

/// The largest difference of a key or a value by the largest value of its kind and layer; infinite where one is no number.
pub fn difference(expected: &[[Rows; 2]], found: &[[Rows; 2]]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let mut most = 0.0f64;
    for (expected, found) in expected.iter().flatten().zip(found.iter().flatten()) {
        assert_eq!((expected.len(), expected[0].len()), (found.len(), found[0].len()));
        let scale = expected.iter().flatten().fold(0.0f64, |most, v| most.max(v.abs()));
        for (e, f) in expected.iter().flatten().zip(found.iter().flatten()) {
            let error = (e - f).abs() / scale;
            most = if error.is_nan() { f64::INFINITY } else { most.max(error) };
        }
    }
    most
}

/// In eight sums, which do not wait for each other.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let ((a8, a), (b8, b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a8.iter().zip(b8) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f64>() + a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>()
}

fn operand(grid: &Grid, role: Role) -> BufferId {
    grid.operand(role).unwrap_or_else(|| panic!("{} has no {}", grid.name, role.name())).buffer
}

impl Chunk<'_> {
    fn grid(&self, id: GridId) -> &Grid {
        &self.program.grids[id.index()]
    }

    /// Rows of the chunk that a share has.
    fn rows(&self, share: &Share) -> std::ops::Range<usize> {
        share.row as usize..((share.row + share.rows) as usize).min(self.tokens.len())
    }

    /// The cell of an element, as waves/context.cuh describes it.
    fn cell(&self, id: WorkId, row: usize, col: usize) -> usize {
        let work = &self.plan.work[id.index()];
        let (first, cols) = (work.place as usize / 2, work.cols as usize);
        assert!(col < cols, "column {col} of {}", work.name);
        first
            + match work.layout {
                Layout::Rows(DType::F32) => (row * cols + col) * 2,
                Layout::Rows(_) => row * cols + col,
                Layout::Operand => {
                    let tiles = cols.div_ceil(128) * 2;
                    let block = (row / 128 * tiles + col / 64) * 8192;
                    let (lane, half) = (row % 8 * 4 + col % 32 / 8, col % 8 / 4);
                    let in_lane = col % 4 / 2 * 4 + row % 16 / 8 * 2 + col % 2;
                    block + row % 128 / 16 * 1024 + col % 64 / 32 * 512 + half * 256 + lane * 8 + in_lane
                }
            }
    }

    fn read(&self, id: WorkId, row: usize) -> Vec<f64> {
        let work = &self.plan.work[id.index()];
        let cols = work.cols as usize;
        match work.layout {
            Layout::Rows(_) => {
                let step = if work.layout == Layout::Rows(DType::F32) { 2 } else { 1 };
                let first = self.cell(id, row, 0);
                self.arena[first..first + cols * step].iter().step_by(step).copied().collect()
            }
            Layout::Operand => (0..cols).map(|col| self.get(id, row, col)).collect(),
        }
    }

    fn get(&self, id: WorkId, row: usize, col: usize) -> f64 {
        self.arena.get(self.cell(id, row, col)).copied().unwrap_or(f64::NAN)
    }

    fn set(&mut self, id: WorkId, row: usize, col: usize, value: f64) {
        let (at, wide) = (self.cell(id, row, col), self.plan.work[id.index()].layout == Layout::Rows(DType::F32));
        let cells = [value, f64::NAN];
        for (cell, value) in self.arena.iter_mut().skip(at).zip(&cells[..1 + usize::from(wide)]) {
            *cell = *value;
        }
    }

    fn write(&mut self, id: WorkId, row: usize, values: &[f64]) {
        (0..).zip(values).for_each(|(col, value)| self.set(id, row, col, *value));
    }

    fn content(&self, id: BufferId) -> &Content {
        self.program.buffers[id.index()].content.as_ref().expect("a buffer of the pack")
    }

    /// A vector of the pack; of parts that take turns, one after another all the same.
    fn vector(&self, id: BufferId) -> Vec<f32> {
        let Content::Vectors { parts, offset, .. } = self.content(id) else { panic!("{id} is no vector") };
        let of_part = |part: &monobloc::ir::program::VectorPart| -> Vec<f32> {
            let Some(view) = &part.view else { return vec![0.0; part.len as usize] };
            let all = self.imported.weights.vector_f32(view.tensor);
            (0..part.len).map(|i| all[view.row(i) as usize] + offset).collect()
        };
        parts.iter().flat_map(of_part).collect()
    }

    /// Row `row` of a matrix whose parts lie one after another.
    fn matrix_row(&self, parts: &[Part], mut row: u32, out: &mut [f32]) {
        for part in parts {
            if row < part.rows {
                return self.imported.weights.read_row_f32(part.view.tensor, part.view.row(row), out);
            }
            row -= part.rows;
        }
        panic!("a row that the matrix does not have");
    }

    fn normed(&self, of: &NormOf, x: &[f64]) -> Vec<f64> {
        let NormAttr { kind, eps } = of.norm;
        let [weight, bias] = [of.weight, of.bias].map(|id| id.map(|id| self.vector(id)));
        norm_values(kind, eps, 0.0, weight.as_deref(), bias.as_deref(), x)
    }

    fn wave(&mut self, wave: &Wave, shares: &[Share], caches: &mut BTreeMap<BufferId, Rows>) {
        let grid = self.grid(wave.grid).clone();
        for share in shares {
            match (&wave.action, &grid.op) {
                (Action::Rows { .. }, _) => self.rows_wave(&wave.action, share),
                (&Action::MatMul { x, target, .. }, Op::MatVec(m)) => self.matmul(&grid, m, x, target, share),
                (&Action::Append { x, queries }, Op::Attention(a)) => {
                    self.append(&grid, a, x, queries, share, caches);
                }
                (&Action::Attend { queries, out, .. }, Op::Attention(a)) => {
                    self.attend(&grid, a, queries, out, share, caches);
                }
                _ => panic!("a wave of another op than its grid has"),
            }
        }
    }

    fn rows_wave(&mut self, action: &Action, share: &Share) {
        let &Action::Rows { residual, sum, out } = action else { unreachable!() };
        for row in self.rows(share) {
            let mut x = match sum {
                Some(Sum::Embed { table, scale }) => {
                    let Content::Tensor(table) = *self.content(table) else { panic!("a table") };
                    let mut x = vec![0.0; self.imported.weights.cols(table)];
                    self.imported.weights.read_row_f32(table, self.tokens[row], &mut x);
                    x.into_iter().map(|v| f64::from(v) * f64::from(scale)).collect()
                }
                _ => self.read(residual, row),
            };
            if let Some(Sum::Branch { branch, norm, scale }) = sum {
                let branch = self.normed(&norm, &self.read(branch, row));
                x.iter_mut().zip(branch).for_each(|(x, b)| *x += f64::from(scale) * b);
            }
            if sum.is_some() {
                self.write(residual, row, &x);
            }
            if let Some(out) = out {
                let y = out.norm.map_or(x.clone(), |norm| self.normed(&norm, &x));
                self.write(out.to, row, &y);
            }
        }
    }

    fn matmul(&mut self, grid: &Grid, m: &MatVec, x: WorkId, target: Target, share: &Share) {
        let Content::Rows { parts, .. } = self.content(operand(grid, Role::Weight)).clone() else { panic!("rows") };
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let inputs: Vec<_> = self.rows(share).map(|row| (row, self.read(x, row))).collect();
        let mut weights = vec![0.0; m.k as usize];
        // Products of all rows with row `r` of the matrix.
        let mut product = |chunk: &Self, r: u32| -> Vec<f64> {
            chunk.matrix_row(&parts, r, &mut weights);
            let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[r as usize]));
            let weights: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
            inputs.iter().map(|(_, x)| dot(x, &weights) + bias).collect()
        };
        let (cols, per_unit) = match m.epilogue {
            Epilogue::Gated(_) => (m.rows / 2, 4),
            _ => (m.rows, m.unit_rows),
        };
        for col in share.lo * per_unit..(share.hi * per_unit).min(cols) {
            let mut y = product(self, col);
            match m.epilogue {
                Epilogue::Gated(kind) => {
                    let up = product(self, cols + col);
                    y.iter_mut().zip(up).for_each(|(y, up)| *y = act(kind, *y) * up);
                }
                Epilogue::Act(kind) => y.iter_mut().for_each(|y| *y = act(kind, *y)),
                Epilogue::Residual { scale } => y.iter_mut().for_each(|y| *y *= f64::from(scale)),
                _ => {}
            }
            for ((row, _), y) in inputs.iter().zip(y) {
                match target {
                    Target::Out(out) => self.set(out, *row, col as usize, y),
                    Target::Residual(id) => self.set(id, *row, col as usize, self.get(id, *row, col as usize) + y),
                }
            }
        }
    }

    /// A head as attention uses it.
    fn head(&self, grid: &Grid, a: &Attention, key: bool, head: &[f64], position: usize) -> Vec<f64> {
        let (norm, role) = if key { (&a.k_norm, Role::KNormWeight) } else { (&a.q_norm, Role::QNormWeight) };
        let mut head = match norm {
            Some(QkNormAttr { norm, .. }) => {
                let weight = self.vector(operand(grid, role));
                norm_values(norm.kind, norm.eps, 0.0, Some(&weight), None, head)
            }
            None => head.to_vec(),
        };
        if a.rotary > 0 {
            let Content::RopeTable(rope) = *self.content(operand(grid, Role::Rope)) else { panic!("angles") };
            let rope = &self.imported.graph.ropes[rope.index()];
            assert_eq!((rope.inv_freq.len() as u32 * 2, rope.interleaved), (a.rotary, a.interleaved));
            rope_apply(rope, position as u32, &mut head);
        }
        head
    }

    fn append(
        &mut self,
        grid: &Grid,
        a: &Attention,
        x: WorkId,
        queries: WorkId,
        share: &Share,
        caches: &mut BTreeMap<BufferId, Rows>,
    ) {
        let (dim, heads, kv) = (a.head_dim as usize, a.heads as usize, a.kv_heads() as usize);
        for row in self.rows(share) {
            let (all, position) = (self.read(x, row), self.position + row);
            let of = |head: usize| &all[head * dim..(head + 1) * dim];
            let turned = |range: std::ops::Range<usize>, key| -> Vec<f64> {
                range.flat_map(|head| self.head(grid, a, key, of(head), position)).collect()
            };
            let (q, k) = (turned(0..heads, false), turned(heads..heads + kv, true));
            caches.get_mut(&operand(grid, Role::AppendK)).expect("keys")[position] = k;
            caches.get_mut(&operand(grid, Role::AppendV)).expect("values")[position] =
                all[(heads + kv) * dim..].to_vec();
            self.write(queries, row, &q);
        }
    }

    fn attend(
        &mut self,
        grid: &Grid,
        a: &Attention,
        queries: WorkId,
        out: WorkId,
        share: &Share,
        caches: &BTreeMap<BufferId, Rows>,
    ) {
        let dim = a.head_dim as usize;
        let [keys, values] = [Role::HistoryK, Role::HistoryV].map(|role| &caches[&operand(grid, role)]);
        for row in self.rows(share) {
            let end = self.position + row + 1;
            let first = a.window.map_or(0, |window| end.saturating_sub(window as usize));
            for head in share.lo * a.heads_per_task..share.hi * a.heads_per_task {
                let at = head as usize * dim;
                let kv = (head / a.group) as usize * dim;
                let q: Vec<f64> = (at..at + dim).map(|col| self.get(queries, row, col)).collect();
                let score = |key: &Vec<f64>| {
                    let score = f64::from(a.scale) * dot(&q, &key[kv..kv + dim]);
                    a.softcap.map_or(score, |cap| softcap(f64::from(cap), score))
                };
                let mut weights: Vec<f64> = keys[first..end].iter().map(score).collect();
                softmax(&mut weights);
                let mut y = vec![0.0; dim];
                for (weight, value) in weights.iter().zip(&values[first..end]) {
                    y.iter_mut().zip(&value[kv..]).for_each(|(y, v)| *y += weight * v);
                }
                (at..).zip(y).for_each(|(col, y)| self.set(out, row, col, y));
            }
        }
    }
}
