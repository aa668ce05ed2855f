//! Executes a plan of waves on the CPU: the second judge of plans, which knows nothing of how they are derived or proven.
//!
//! All SMs finish a wave before the next one begins, unless they do not meet between the two. Within a wave their shares run in any order. Activations are at the places of the
//! plan, as fp64 values without rounding; values that were not written are NaN. The same holds for keys and values. From one step to
//! the next only the best logits stay. A tail has its own arena, and reads the arena that the chunk before it left.

mod mamba;

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use monobloc::dtype::DType;
use monobloc::ir::op::{Attention, Combine, Convolve, Epilogue, MatVec, Mix, NormAttr, Op, QkNormAttr, Role};
use monobloc::ir::program::{Content, Grid, Part, Program};
use monobloc::ir::{BufferId, GridId};
use monobloc::model::config::Imported;
use monobloc::model::graph::{Act, Mixer, ModelGraph, QkNormSpan};
use monobloc::random::Random;
use monobloc::reference::{
    Session, act, choose, delta_rule, norm_values, query_factor, rope_apply, scores, sigmoid, slot_weights, softcap,
    softmax, softplus,
};
use monobloc::waves::{
    Action, Form, Input, Layout, NormOf, Over, Plan, Share, Slots, Splits, Sum, Target, Tiling, Wave, WorkId,
    group_channels, parts_of,
};

/// Keys or values of a layer: for each position, all KV heads.
pub type Rows = Vec<Vec<f64>>;

/// Tolerance for sums of fp64 in another order, with activations of up to some thousands.
pub const TOLERANCE: f64 = 1e-9;

/// A row of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub sequence: usize,
    /// Position in the first step; each later step adds one.
    pub position: usize,
    pub first: First,
}

/// The token of a row in the first step.
#[derive(Debug, Clone, Copy)]
pub enum First {
    Given(u32),
    /// The token that this row decided in the last step of the previous launch. For a tail: this row of the chunk.
    Decided(usize),
}

/// Keys or values of each sequence; of a recurrent state, what each value head has.
type Caches = BTreeMap<BufferId, Vec<Rows>>;

pub struct Executor<'a> {
    program: &'a Program,
    imported: &'a Imported,
    plan: &'a Plan,
    caches: Caches,
    /// One cell for 2 bytes of the arena. Wider values are in their first cell, and spoil the others.
    arena: Vec<f64>,
    random: Random,
}

/// One step of a launch.
struct Step<'a> {
    program: &'a Program,
    imported: &'a Imported,
    plan: &'a Plan,
    arena: Vec<f64>,
    /// For a tail: the arena of the chunk, from the residual of its first row on.
    taken: &'a [f64],
    /// Token, sequence and position of each row. `Err(from)`: the token is the one that row `from` decided.
    rows: Vec<(Result<u32, usize>, usize, usize)>,
    /// The tokens that the rows had.
    tokens: Vec<Option<u32>>,
}

impl<'a> Executor<'a> {
    /// Caches for sequences of at most `positions` positions.
    pub fn new(
        program: &'a Program,
        imported: &'a Imported,
        plan: &'a Plan,
        positions: &[usize],
        seed: u64,
    ) -> Executor<'a> {
        let mut caches = BTreeMap::new();
        for grid in &program.grids {
            if let Op::Mix(mix) = &grid.op {
                let empty = vec![vec![f64::NAN; mix.state_cols() as usize]; mix.value_heads as usize];
                caches.insert(operand(grid, Role::State), vec![empty; positions.len()]);
            }
            if let Op::Scan(scan) = &grid.op {
                let empty = vec![vec![f64::NAN; scan.state_cols() as usize]; scan.heads as usize];
                caches.insert(operand(grid, Role::State), vec![empty; positions.len()]);
            }
            if let Op::Convolve(convolve) = &grid.op {
                let empty = vec![vec![f64::NAN; (convolve.channels * convolve.past()) as usize]];
                caches.insert(operand(grid, Role::State), vec![empty; positions.len()]);
            }
            let Op::Attention(a) = &grid.op else { continue };
            let cols = (a.kv_heads() * a.head_dim) as usize;
            for role in [Role::AppendK, Role::AppendV] {
                let empty = positions.iter().map(|positions| vec![vec![f64::NAN; cols]; *positions]).collect();
                caches.insert(operand(grid, role), empty);
            }
        }
        let arena = vec![f64::NAN; plan.work_bytes() as usize / 2];
        Executor { program, imported, plan, caches, arena, random: Random::new(seed) }
    }

    /// Runs a launch. Returns the tokens with which the rows began each step, and the tokens that the last step decided.
    pub fn launch(&mut self, rows: &[Row], steps: usize) -> Vec<Vec<Option<u32>>> {
        let mut tokens = vec![];
        for step in 0..steps {
            let at = |(r, row): (usize, &Row)| {
                let token = match row.first {
                    _ if step > 0 => Err(r),
                    First::Given(token) => Ok(token),
                    First::Decided(from) => Err(from),
                };
                (token, row.sequence, row.position + step)
            };
            let rows: Vec<_> = rows.iter().enumerate().map(at).collect();
            let count = rows.len();
            let mut now = Step {
                program: self.program,
                imported: self.imported,
                plan: self.plan,
                arena: self.kept(),
                taken: &[],
                rows,
                tokens: vec![None; count],
            };
            now.run(&mut self.caches, &mut self.random);
            tokens.push(now.tokens.clone());
            if step + 1 == steps && self.plan.form == Form::Steps {
                tokens.push((0..count).map(|row| now.decided(row)).collect());
            }
            self.arena = now.arena;
        }
        tokens
    }

    /// Runs a tail after a launch of a chunk, whose residual begins at byte `taken`. Returns the tokens that its rows decided.
    pub fn end(&mut self, tail: &Plan, taken: u64, rows: &[Row]) -> Vec<Option<u32>> {
        let from = |row: &Row| match row.first {
            First::Decided(from) => (Err(from), row.sequence, row.position),
            First::Given(_) => panic!("a row of a tail with a token"),
        };
        let mut now = Step {
            program: self.program,
            imported: self.imported,
            plan: tail,
            arena: vec![f64::NAN; tail.work_bytes() as usize / 2],
            taken: &self.arena[taken as usize / 2..],
            rows: rows.iter().map(from).collect(),
            tokens: vec![None; rows.len()],
        };
        now.run(&mut self.caches, &mut self.random);
        (0..rows.len()).map(|row| now.decided(row)).collect()
    }

    /// The cells that stay from one step to the next.
    fn kept(&self) -> Vec<f64> {
        let mut arena = vec![f64::NAN; self.arena.len()];
        for work in self.plan.work.iter().filter(|work| work.layout == Layout::Best) {
            let first = work.place as usize / 2;
            let range = first..first + work.bytes(self.plan.rows) as usize / 2;
            arena[range.clone()].copy_from_slice(&self.arena[range]);
        }
        arena
    }

    /// Keys and values of a sequence, of every layer; then the states of all nets and of Mamba-2, by head: the matrix, and the past inputs. A short
    /// convolution has the latter alone, by channel.
    pub fn cached(&self, sequence: usize) -> Vec<[Rows; 2]> {
        let of = |grid: &Grid, role| self.caches[&operand(grid, role)][sequence].clone();
        let layers = self.program.grids.iter().filter(|grid| matches!(grid.op, Op::Attention(_)));
        let layers = layers.map(|grid| [of(grid, Role::AppendK), of(grid, Role::AppendV)]);
        let state = |grid: &Grid| match &grid.op {
            Op::Mix(mix) => Some(split_states(of(grid, Role::State), (mix.key_dim * mix.value_dim) as usize)),
            Op::Scan(scan) => Some(split_states(of(grid, Role::State), (scan.state * scan.head_dim) as usize)),
            Op::Convolve(_) => Some([of(grid, Role::State), of(grid, Role::State)]),
            _ => None,
        };
        layers.chain(self.program.grids.iter().filter_map(state)).collect()
    }
}

/// Keys and values in the cache of every layer after `plan` has read `chunks`.
pub fn execute(program: &Program, imported: &Imported, plan: &Plan, chunks: &[&[u32]], seed: u64) -> Vec<[Rows; 2]> {
    let positions: usize = chunks.iter().map(|chunk| chunk.len()).sum();
    let mut executor = Executor::new(program, imported, plan, &[positions], seed);
    let mut position = 0;
    for tokens in chunks {
        let rows: Vec<_> = (position..)
            .zip(*tokens)
            .map(|(position, token)| Row { sequence: 0, position, first: First::Given(*token) })
            .collect();
        executor.launch(&rows, 1);
        position += tokens.len();
    }
    executor.cached(0)
}

/// Keys and values of the reference after it has read the same tokens one by one.
pub fn expected(imported: &Imported, tokens: &[u32]) -> Vec<[Rows; 2]> {
    let mut session = Session::new(&imported.graph, &imported.weights);
    tokens.iter().for_each(|&token| drop(session.step_hidden(token)));
    cached_by(&session, &imported.graph)
}

/// Keys and values of each layer in a session of the reference, then the states of all nets, as [`Executor::cached`].
pub fn cached_by(session: &Session<'_>, graph: &ModelGraph) -> Vec<[Rows; 2]> {
    let has_state = |layer: &usize| {
        session.state(*layer).is_some() || session.inputs(*layer).is_some() || session.mamba(*layer).is_some()
    };
    let attends = |layer: &usize| matches!(graph.layers[*layer].mixer, Mixer::Attention(_) | Mixer::SideBySide(_));
    let layers = (0..graph.layers.len()).filter(attends);
    let of = |layer| session.cached(layer).map(<[Vec<f64>]>::to_vec);
    let state = |layer: usize| {
        if let Some(inputs) = session.inputs(layer) {
            let channels = inputs.inputs.first().map_or(0, Vec::len);
            let of_channel = |channel: usize| inputs.inputs.iter().map(move |input| input[channel]);
            let inputs: Rows = vec![(0..channels).flat_map(of_channel).collect()];
            return [inputs.clone(), inputs];
        }
        if let (Some(state), Mixer::Mamba2(op)) = (session.mamba(layer), &graph.layers[layer].mixer) {
            return mamba::state_by_head(op, state);
        }
        if let (Some(state), Mixer::SideBySide(both)) = (session.mamba(layer), &graph.layers[layer].mixer) {
            return mamba::state_by_head(&both.mamba, state);
        }
        let (Some(state), Mixer::GatedDelta(net)) = (session.state(layer), &graph.layers[layer].mixer) else {
            panic!("a net with a state")
        };
        let (key_dim, value_dim, keys) = (net.key_dim as usize, net.value_dim as usize, net.q.rows as usize);
        let matrices = state.matrices.chunks_exact(key_dim * value_dim).map(<[f64]>::to_vec).collect();
        let inputs = |head: usize| {
            let key = head / (net.value_heads / net.key_heads) as usize * key_dim;
            let value = 2 * keys + head * value_dim;
            let of = [key..key + key_dim, keys + key..keys + key + key_dim, value..value + value_dim];
            let of_position = |input: &Vec<f64>| of.clone().into_iter().flat_map(|of| input[of].to_vec()).collect();
            state.inputs.iter().flat_map(|input| -> Vec<f64> { of_position(input) }).collect()
        };
        [matrices, (0..net.value_heads as usize).map(inputs).collect()]
    };
    layers.map(of).chain((0..graph.layers.len()).filter(has_state).map(state)).collect()
}

/// The matrix of each head, and its past inputs.
pub fn split_states(heads: Rows, matrix: usize) -> [Rows; 2] {
    let halves = heads.iter().map(|values| values.split_at(matrix));
    let (matrices, inputs) = halves.map(|(matrix, inputs)| (matrix.to_vec(), inputs.to_vec())).unzip();
    [matrices, inputs]
}

/// The largest difference of a key or a value divided by the largest value of its kind and layer; infinite for NaN.
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

/// A dot product in eight independent sums.
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

/// Positions of each split of a row that sees `first..=position`; `None` if it has one. Its history begins with a whole tile.
fn cuts(splits: Option<Splits>, first: usize, position: usize, tile: u32) -> Option<Vec<RangeInclusive<usize>>> {
    let (length, begin) = (splits?.positions as usize, first / tile as usize * tile as usize);
    let count = (position - begin).div_ceil(length);
    let cut = |split: usize| {
        let end = if split + 1 == count { position } else { begin + (split + 1) * length - 1 };
        first.max(begin + split * length)..=end
    };
    (count > 1).then(|| (0..count).map(cut).collect())
}

fn score(a: &Attention, q: &[f64], key: &[f64]) -> f64 {
    let score = f64::from(a.scale) * dot(q, key);
    a.softcap.map_or(score, |cap| softcap(f64::from(cap), score))
}

/// Attention of a query over keys and values, with the sink of its head.
fn attended(a: &Attention, sink: Option<f64>, q: &[f64], seen: &[(Vec<f64>, Vec<f64>)]) -> Vec<f64> {
    let mut weights: Vec<f64> = seen.iter().map(|(key, _)| score(a, q, key)).chain(sink).collect();
    softmax(&mut weights);
    let mut y = vec![0.0; q.len()];
    for (weight, (_, value)) in weights.iter().zip(seen) {
        y.iter_mut().zip(value).for_each(|(y, v)| *y += weight * v);
    }
    y
}

/// The inputs of a part of k, by row, and the matrix with which they are multiplied.
struct Multiplied {
    part: usize,
    inputs: Vec<Vec<f64>>,
    of_k: Range<usize>,
    tensors: Vec<Part>,
    /// A row of the matrix.
    weights: Vec<f32>,
}

/// What a block of a pair has multiplied: its part of k, its first column, and the sums of each column and row.
type OfBlock = (usize, usize, Vec<Vec<f64>>);

impl Multiplied {
    /// Products of all rows with row `r` of the matrix.
    fn with_row(&mut self, step: &Step<'_>, r: u32) -> Vec<f64> {
        step.matrix_row(&self.tensors, r, &mut self.weights);
        let weights: Vec<f64> = self.weights[self.of_k.clone()].iter().map(|w| f64::from(*w)).collect();
        self.inputs.iter().map(|x| dot(x, &weights)).collect()
    }
}

impl Step<'_> {
    /// All waves in order; the shares of each in any order.
    fn run(&mut self, caches: &mut Caches, random: &mut Random) {
        let plan = self.plan;
        let mut waves = plan.waves.iter().peekable();
        while let Some(wave) = waves.next() {
            // If two waves cannot wait for each other, nothing is known of what they write.
            let mut lost = !wave.meets;
            match waves.next_if(|next| !next.meets) {
                Some(next) => {
                    self.at_once([wave, next], caches, random);
                    lost |= waves.peek().is_some_and(|third| !third.meets);
                }
                None => self.wave(wave, &self.shares(wave, random), caches),
            }
            if lost {
                self.arena.fill(f64::NAN);
            }
        }
    }

    /// Blocks of rows of the launch.
    fn blocks(&self) -> u32 {
        (self.rows.len() as u32).div_ceil(self.plan.block_rows)
    }

    /// The shares of a wave and their SMs, in any order.
    fn shares(&self, wave: &Wave, random: &mut Random) -> Vec<(usize, Share)> {
        let division = &self.plan.divisions[wave.division.index()];
        let of_sms = division.shares[self.blocks() as usize - 1].iter().enumerate();
        let mut shares: Vec<_> = of_sms.flat_map(|(sm, shares)| shares.iter().map(move |share| (sm, *share))).collect();
        for i in (1..shares.len()).rev() {
            shares.swap(i, random.below(i + 1));
        }
        shares
    }

    /// Two waves between which SMs do not meet. The second waits for packets of the first. Whatever else one of them writes is not a number for the other
    /// one, and neither is there afterwards what both have written.
    fn at_once(&mut self, [first, second]: [&Wave; 2], caches: &mut Caches, random: &mut Random) {
        let same = |a: &f64, b: &f64| a.to_bits() == b.to_bits();
        let [of_first, of_second] = [first, second].map(|wave| self.shares(wave, random));
        let before = self.arena.clone();
        let mut kept = caches.clone();
        self.wave(first, &of_first, caches);
        let after_first = self.arena.clone();
        let packets = self.plan.packets();
        for (at, cell) in self.arena.iter_mut().enumerate() {
            if !same(cell, &before[at]) && !packets.iter().any(|bytes| bytes.contains(&(at as u64 * 2))) {
                *cell = f64::NAN;
            }
        }
        let seen = self.arena.clone();
        self.wave(second, &of_second, caches);
        let after_second = std::mem::replace(&mut self.arena, before.clone());
        let written = |at: usize| !same(&after_second[at], &seen[at]);
        for at in (0..self.arena.len()).filter(|at| written(*at)) {
            self.arena[at] = f64::NAN;
        }
        self.wave(first, &of_first, &mut kept);
        for at in 0..self.arena.len() {
            let by_first = !same(&after_first[at], &before[at]);
            self.arena[at] = match (by_first, written(at)) {
                (true, true) => f64::NAN,
                (false, true) => after_second[at],
                // Not a number either, if the first wave has read what the second one wrote.
                (true, false) => self.arena[at],
                (false, false) => before[at],
            };
        }
    }

    fn grid(&self, id: GridId) -> &Grid {
        &self.program.grids[id.index()]
    }

    /// Rows of the launch that a share has.
    fn rows(&self, share: &Share) -> Range<usize> {
        share.row as usize..((share.row + share.rows) as usize).min(self.rows.len())
    }

    /// The token that a row decided: the best logit of all SMs; of equal ones the first id.
    fn decided(&self, row: usize) -> Option<u32> {
        let id = self.plan.best()?;
        let cols = self.plan.work[id.index()].cols as usize;
        let of = |sm| {
            let at = self.cell(id, row, sm);
            (self.arena[at], self.arena[at + 2])
        };
        // A best logit that is NaN was not written.
        let all: Option<Vec<(f64, f64)>> = (0..cols).map(|sm| Some(of(sm)).filter(|of| !of.1.is_nan())).collect();
        let best = all?.into_iter().reduce(|a, b| if b.0 > a.0 || b.0 == a.0 && b.1 < a.1 { b } else { a })?;
        Some(best.1 as u32)
    }

    /// The cell of an element, as waves/context.cuh describes it.
    fn cell(&self, id: WorkId, row: usize, col: usize) -> usize {
        let work = &self.plan.work[id.index()];
        let (first, cols) = (work.place as usize / 2, work.cols as usize);
        let most = if let Layout::Squares { groups, .. } = work.layout { groups as usize } else { cols };
        assert!(col < most, "column {col} of {}", work.name);
        first
            + match work.layout {
                Layout::Rows(DType::F32 | DType::I32) => (row * cols + col) * 2,
                Layout::Groups(_) | Layout::Sources(_) => (row * cols + col) * 2,
                // Every place has columns of its own. In which order warpgroups read them is a matter of the kernel.
                Layout::Grouped(_) => row * cols.next_multiple_of(128) + col,
                Layout::Placed(_) => row * cols + col,
                Layout::Rows(_) => row * cols + col,
                Layout::Parts(_) | Layout::Packets(_) => self.part_cell(id, 0, row, col),
                // Four rows side by side; `col` is a group of columns.
                Layout::Squares { groups, .. } => ((row / 4 * groups as usize + col) * 4 + row % 4) * 2,
                Layout::Splits(most) => (row * most as usize * cols + col) * 2,
                Layout::Best => (row * cols + col) * 4,
                Layout::Operand | Layout::Tiles => {
                    let (tiles, rows) = (cols.div_ceil(128) * 2, self.plan.block_rows as usize);
                    let block = (row / rows * tiles + col / 64) * rows * 64;
                    let (lane, half) = (row % 8 * 4 + col % 32 / 8, col % 8 / 4);
                    let in_lane = col % 4 / 2 * 4 + row % 16 / 8 * 2 + col % 2;
                    block + row % rows / 16 * 1024 + col % 64 / 32 * 512 + half * 256 + lane * 8 + in_lane
                }
            }
    }

    /// From the first cell of the buffer on. A packet has four cells, of which the tag takes two.
    fn part_cell(&self, id: WorkId, part: usize, row: usize, col: usize) -> usize {
        let work = &self.plan.work[id.index()];
        let cells = if self.plan.holds_packets(id) { 4 } else { 2 };
        let pitch = (self.blocks().next_power_of_two() * self.plan.block_rows) as usize;
        ((part * pitch + row) * work.cols as usize + col) * cells
    }

    /// Writes an element of one of several parts.
    fn put_part(&mut self, id: WorkId, part: usize, row: usize, col: usize, value: f64) {
        let work = &self.plan.work[id.index()];
        let holds = matches!(work.layout, Layout::Parts(parts) | Layout::Packets(parts) if part < parts as usize);
        assert!(holds, "part {part} of {}", work.name);
        let at = self.cell(id, 0, 0) + self.part_cell(id, part, row, col);
        self.put(at, value, 2);
    }

    fn read(&self, id: WorkId, row: usize) -> Vec<f64> {
        self.read_of(id, row, 0..self.plan.work[id.index()].cols as usize)
    }

    /// Some columns of a row.
    fn read_of(&self, id: WorkId, row: usize, cols: Range<usize>) -> Vec<f64> {
        match self.plan.work[id.index()].layout {
            Layout::Parts(parts) | Layout::Packets(parts) => {
                let first = self.cell(id, 0, 0);
                let of = |part, col| first + self.part_cell(id, part, row, col);
                let value = |part, col| self.arena.get(of(part, col)).copied().unwrap_or(f64::NAN);
                let parts = parts_of(parts, self.blocks()) as usize;
                cols.map(|col| (0..parts).map(|part| value(part, col)).sum()).collect()
            }
            Layout::Squares { groups, .. } => (0..groups as usize).map(|group| self.get(id, row, group)).collect(),
            Layout::Rows(_)
            | Layout::Operand
            | Layout::Tiles
            | Layout::Best
            | Layout::Splits(_)
            | Layout::Groups(_)
            | Layout::Sources(_)
            | Layout::Grouped(_)
            | Layout::Placed(_) => cols.map(|col| self.get(id, row, col)).collect(),
        }
    }

    fn get(&self, id: WorkId, row: usize, col: usize) -> f64 {
        self.arena.get(self.cell(id, row, col)).copied().unwrap_or(f64::NAN)
    }

    fn set(&mut self, id: WorkId, row: usize, col: usize, value: f64) {
        let layout = self.plan.work[id.index()].layout;
        let wide = matches!(
            layout,
            Layout::Rows(DType::F32 | DType::I32) | Layout::Squares { .. } | Layout::Groups(_) | Layout::Sources(_)
        );
        self.put(self.cell(id, row, col), value, if wide { 2 } else { 1 });
    }

    /// Writes a value that takes `cells` cells.
    fn put(&mut self, at: usize, value: f64, cells: usize) {
        for (i, cell) in self.arena.iter_mut().skip(at).take(cells).enumerate() {
            *cell = if i == 0 { value } else { f64::NAN };
        }
    }

    fn write(&mut self, id: WorkId, row: usize, values: &[f64]) {
        (0..).zip(values).for_each(|(col, value)| self.set(id, row, col, *value));
    }

    fn content(&self, id: BufferId) -> &Content {
        self.program.buffers[id.index()].content.as_ref().expect("a buffer of the pack")
    }

    /// A vector of the pack. Interleaved parts are returned one after another.
    fn vector(&self, id: BufferId) -> Vec<f32> {
        let Content::Vectors { parts, offset, scale, .. } = self.content(id) else { panic!("{id} is no vector") };
        let of_part = |part: &monobloc::ir::program::VectorPart| -> Vec<f32> {
            let Some(view) = &part.view else { return vec![0.0; part.len as usize] };
            let all = self.imported.weights.vector_f32(view.tensor);
            (0..part.len).map(|i| (all[view.row(i) as usize] + offset) * scale).collect()
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

    fn wave(&mut self, wave: &Wave, shares: &[(usize, Share)], caches: &mut Caches) {
        let grid = self.grid(wave.grid).clone();
        // Every block writes its best logit of every row, even if it has none.
        let sms = self.plan.machine.sms as usize;
        if let (&Action::MatMul { target: Target::Residual(_), .. }, Op::MatVec(m)) = (&wave.action, &grid.op)
            && matches!(self.plan.divisions[wave.division.index()].over, Over::Units { parts: 2.., .. })
        {
            return self.pairs(wave, &grid, m, shares);
        }
        if let (&Action::Experts { x, groups, out, pass, .. }, Op::MatVec(m)) = (&wave.action, &grid.op) {
            return self.experts(&grid, m, (x, groups, out), m.units().div_ceil(pass));
        }
        if let Action::Fill { x, groups, sources, out } = wave.action {
            return self.fill((x, groups, sources, out));
        }
        let mut best = vec![vec![(f64::NEG_INFINITY, f64::from(i32::MAX)); self.plan.rows as usize]; sms];
        for (sm, share) in shares {
            match (&wave.action, &grid.op) {
                (Action::Rows { .. }, _) => {
                    let parts = match self.plan.divisions[wave.division.index()].over {
                        Over::Rows { parts } => parts,
                        Over::Sums { .. } => 1,
                        _ => panic!("rows that are not divided over rows"),
                    };
                    self.rows_wave(&grid, &wave.action, share, parts);
                }
                (&Action::MatMul { x, squares, target, then, .. }, Op::MatVec(m)) => {
                    let Over::Units { n, parts, .. } = self.plan.divisions[wave.division.index()].over else {
                        panic!("a product that is not divided over units")
                    };
                    let parts = parts_of(parts, self.blocks());
                    self.matmul(&grid, m, (x, squares, target), (n, parts), share, &mut best[*sm]);
                    if let (Target::Sums { residual, .. }, Some(then), 1) = (target, then, parts) {
                        self.leave_input(m, residual, then, n, share);
                    }
                }
                (&Action::NormHeads { x, out }, Op::Attention(a)) => self.norm_heads(&grid, a, (x, out), share),
                (&Action::Append { x, queries }, Op::Attention(a)) => {
                    self.append(&grid, a, x, queries, share, caches);
                }
                (&Action::Attend { queries, out, gate, .. }, Op::Attention(a)) => {
                    self.attend(&grid, a, (queries, out, gate), share, caches);
                }
                (&Action::AttendRow { x, out, tile, splits }, Op::Attention(a)) => {
                    self.attend_row(&grid, a, (x, out, tile, splits), share, caches);
                }
                (&Action::Merge { out, splits, gate }, Op::Attention(a)) => self.merge(a, (out, gate), splits, share),
                (&Action::Scores { x, out }, Op::MatVec(m)) => self.scores(&grid, m, (x, out), share),
                (&Action::Route { scores, choices, shares }, _) => {
                    self.route(wave.grid, (scores, choices, shares), share);
                }
                (&Action::Gather { x, choices, groups, places, out }, _) => {
                    self.gather(Some(x), choices, (groups, places, out), share);
                }
                (&Action::Places { choices, groups, places, sources }, _) => {
                    self.gather(None, choices, (groups, places, sources), share);
                }
                (&Action::Combine { slots, out }, Op::Combine(combine)) => {
                    for row in self.rows(share) {
                        let y = self.slots(&grid, combine, slots, row);
                        y.into_iter().enumerate().for_each(|(col, y)| self.put_part(out, 0, row, col, y));
                    }
                }
                (&Action::Convolve { x, scalars, out }, Op::Mix(mix)) => {
                    self.convolve(&grid, mix, (x, scalars, out), share, caches);
                }
                (&Action::Mix { turned, x, out }, Op::Mix(mix)) => {
                    let Over::States { n } = self.plan.divisions[wave.division.index()].over else {
                        panic!("states that are not divided over their columns")
                    };
                    self.carry(&grid, mix, (turned, x, out), n, share, caches);
                }
                (&Action::Gated { mixed, x, out }, Op::Mix(mix)) => {
                    for row in self.rows(share) {
                        let y = self.read(mixed, row);
                        self.gate_heads(&grid, mix, (x, out), row, 0..mix.value_heads as usize, &y);
                    }
                }
                (&Action::ShortConv { x, out }, Op::Convolve(convolve)) => {
                    self.short_conv(&grid, convolve, (x, out), share, caches);
                }
                (&Action::MixRow { x, scalars, out }, Op::Mix(mix)) => {
                    self.mix_row(&grid, mix, (x, scalars, out), share, caches);
                }
                (action, Op::Scan(scan)) => self.scan_wave(&grid, scan, (action, wave.division), share, caches),
                (Action::Gated { mixed, x, out }, _) => self.gate_norm(&grid, (*mixed, *x, *out), share),
                _ => panic!("a wave of another op than its grid has"),
            }
        }
        if let Action::MatMul { target: Target::Best(id), .. } = wave.action {
            for (sm, rows) in best.into_iter().enumerate() {
                for (row, (score, token)) in rows.into_iter().enumerate() {
                    let at = self.cell(id, row, sm);
                    self.put(at, score, 2);
                    self.put(at + 2, token, 2);
                }
            }
        }
    }

    /// Columns of scores, 32 for each launch index.
    fn scores(&mut self, grid: &Grid, m: &MatVec, (x, out): (WorkId, WorkId), share: &Share) {
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let mut multiplied = self.multiplied(grid, m, (x, None), (u32::MAX, 1), share);
        for col in share.lo * 32..(share.hi * 32).min(m.rows) {
            let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[col as usize]));
            let y = multiplied.with_row(self, col);
            self.rows(share).zip(y).for_each(|(row, y)| self.set(out, row, col as usize, y + bias));
        }
    }

    /// What the router of the layer says, which has as many routers before it as the grid.
    fn route(&mut self, grid: GridId, (from, choices, shares): (WorkId, WorkId, WorkId), share: &Share) {
        let before = self.program.grids[..grid.index()].iter().filter(|grid| matches!(grid.op, Op::Route(_))).count();
        let experts = self.imported.graph.layers.iter().filter_map(|layer| layer.feed.experts()).nth(before);
        let (router, weights) = (&experts.expect("a router").router, &self.imported.weights);
        for row in self.rows(share) {
            let logits = self.read_of(from, row, 0..router.linear.rows as usize);
            let by = scores(router, &logits);
            let chosen = choose(weights, router, &by);
            self.write(choices, row, &chosen.iter().map(|id| f64::from(*id)).collect::<Vec<_>>());
            self.write(shares, row, &slot_weights(router, &by, &chosen));
        }
    }

    /// Finds the places of all slots in the order of experts, rows and slots; stores those of its rows, and copies these there.
    fn gather(
        &mut self,
        x: Option<WorkId>,
        choices: WorkId,
        (groups, places, out): (WorkId, WorkId, WorkId),
        share: &Share,
    ) {
        let (Layout::Grouped(Tiling { rows: tile, most }) | Layout::Sources(Tiling { rows: tile, most })) =
            self.plan.work[out.index()].layout
        else {
            panic!("rows that are gathered elsewhere")
        };
        let mut of: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
        for row in 0..self.rows.len() {
            for (slot, id) in self.read(choices, row).into_iter().enumerate() {
                of.entry(id as usize).or_default().push((row, slot));
            }
        }
        let own = self.rows(share);
        let mut first = 0;
        for (expert, pairs) in of {
            let tiles = pairs.len().div_ceil(tile as usize);
            for (n, (row, slot)) in pairs.iter().copied().enumerate().filter(|(_, (row, _))| own.contains(row)) {
                let place = first * tile as usize + n;
                self.set(places, row, slot, place as f64);
                match x {
                    Some(x) => {
                        let x = self.read(x, row);
                        self.write(out, place, &x);
                    }
                    None => self.set(out, place, 0, row as f64),
                }
            }
            if share.row == 0 {
                let record = [expert, first, tiles, pairs.len()].map(|value| value as f64);
                (first..first + tiles).for_each(|tile| self.write(groups, 1 + tile, &record));
            }
            first += tiles;
        }
        assert!(first <= most as usize, "{first} tiles, room for {most}");
        if share.row == 0 {
            self.set(groups, 0, 0, first as f64);
        }
    }

    /// Every place that has a row, whichever SM fills it.
    fn fill(&mut self, (x, groups, sources, out): (WorkId, WorkId, WorkId, WorkId)) {
        let Layout::Grouped(Tiling { rows: of_tile, .. }) = self.plan.work[out.index()].layout else {
            panic!("rows that are copied elsewhere")
        };
        for tile in 0..self.get(groups, 0, 0) as usize {
            let record = self.read(groups, 1 + tile);
            let before = (tile - record[1] as usize) * of_tile as usize;
            for place in 0..(record[3] as usize - before).min(of_tile as usize) {
                let place = tile * of_tile as usize + place;
                let row = self.get(sources, place, 0) as usize;
                let x = self.read(x, row);
                self.write(out, place, &x);
            }
        }
    }

    /// Every item, whichever SM has it. Units are in `parts` nearly equal parts.
    fn experts(&mut self, grid: &Grid, m: &MatVec, (x, groups, out): (WorkId, WorkId, WorkId), parts: u32) {
        let Content::Rows { parts: tensors, .. } = self.content(operand(grid, Role::Weight)).clone() else {
            panic!("rows")
        };
        let Layout::Grouped(Tiling { rows: tile, .. }) = self.plan.work[x.index()].layout else {
            panic!("rows by place")
        };
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let mut weights = vec![0.0; m.k as usize];
        let items = self.get(groups, 0, 0) as u32 * parts;
        let (cols, per_unit) = if m.epilogue.is_gated() { (m.rows / 2, 4) } else { (m.rows, m.unit_rows) };
        for n in 0..items {
            let record: Vec<u32> = self.read(groups, 1 + (n / parts) as usize).into_iter().map(|v| v as u32).collect();
            let [expert, first, tiles, slots] = record[..] else { panic!("a record") };
            let within = n - first * parts;
            let (part, at) = (within / tiles, within % tiles);
            let places = (first + at) * tile..(first + at) * tile + (slots - at * tile).min(tile);
            let inputs: Vec<Vec<f64>> = places.clone().map(|place| self.read(x, place as usize)).collect();
            let mut product = |step: &Self, r: u32| -> Vec<f64> {
                let row = expert * m.rows + r;
                step.matrix_row(&tensors, row, &mut weights);
                let weights: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[row as usize]));
                inputs.iter().map(|x| dot(x, &weights) + bias).collect()
            };
            let [lo, hi] = [part, part + 1].map(|part| m.units() * part / parts * per_unit);
            for col in lo..hi.min(cols) {
                let mut y = product(self, col);
                match m.epilogue {
                    Epilogue::Gated(kind) => {
                        let up = product(self, cols + col);
                        y.iter_mut().zip(up).for_each(|(y, up)| *y = act(kind, *y) * up);
                    }
                    Epilogue::Clamped(swiglu) => {
                        let (alpha, limit) = (f64::from(swiglu.alpha), f64::from(swiglu.limit));
                        let up = product(self, cols + col);
                        y.iter_mut().zip(up).for_each(|(y, up)| {
                            let gate = y.min(limit);
                            *y = (up.clamp(-limit, limit) + 1.0) * gate * sigmoid(alpha * gate);
                        });
                    }
                    Epilogue::Act(kind) => y.iter_mut().for_each(|y| *y = act(kind, *y)),
                    _ => {}
                }
                places.clone().zip(y).for_each(|(place, y)| self.set(out, place as usize, col as usize, y));
            }
        }
    }

    /// The slots of a row in their order, each at its place, then the shared expert.
    fn slots(&self, grid: &Grid, combine: &Combine, slots: Slots, row: usize) -> Vec<f64> {
        let Slots { x, places, shares, shared, gate } = slots;
        let mut sum = vec![0.0; combine.width as usize];
        let mut add = |by: f64, y: Vec<f64>| sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += by * y);
        for (place, by) in self.read(places, row).into_iter().zip(self.read(shares, row)) {
            add(by, self.read(x, place as usize));
        }
        if let Some((of, scale)) = shared.zip(combine.shared) {
            let column = grid.operand(Role::Gate).map_or(0, |gate| gate.cols.base as usize);
            let by = gate.map_or(1.0, |gate| sigmoid(self.get(gate, row, column)));
            add(f64::from(scale) * by, self.read(of, row));
        }
        sum.iter_mut().for_each(|y| *y *= f64::from(combine.scale));
        sum
    }

    /// `parts`: the parts of a row, of which a share has some.
    fn rows_wave(&mut self, grid: &Grid, action: &Action, share: &Share, parts: u32) {
        let &Action::Rows { residual, sum, out } = action else { unreachable!() };
        let cols = self.plan.work[residual.index()].cols as usize;
        let length = cols.div_ceil(parts as usize).next_multiple_of(8);
        for (row, part) in self.rows(share).flat_map(|row| (share.lo..share.hi).map(move |part| (row, part as usize))) {
            let own = (part * length).min(cols)..((part + 1) * length).min(cols);
            let mut x = match sum {
                Some(Sum::Embed { table, scale, .. }) => {
                    let Content::Tensor(table) = *self.content(table) else { panic!("a table") };
                    let mut x = vec![0.0; self.imported.weights.cols(table)];
                    let token = self.rows[row].0.map_or_else(|from| self.decided(from), Some);
                    self.tokens[row] = token;
                    match token {
                        Some(token) => self.imported.weights.read_row_f32(table, token, &mut x),
                        None => x.fill(f32::NAN),
                    }
                    x.into_iter().map(|v| f64::from(v) * f64::from(scale)).collect()
                }
                Some(Sum::Taken) => {
                    let Err(from) = self.rows[row].0 else { panic!("a row of no chunk") };
                    let value = |col| self.taken.get((from * cols + col) * 2).copied().unwrap_or(f64::NAN);
                    (0..cols).map(value).collect()
                }
                _ => self.read(residual, row),
            };
            if let Some(Sum::Branch { branch, norm, scale }) = sum {
                let branch = self.read(branch, row);
                let branch = norm.map_or(branch.clone(), |norm| self.normed(&norm, &branch));
                x.iter_mut().zip(branch).for_each(|(x, b)| *x += f64::from(scale) * b);
            }
            if let (Some(Sum::Slots(slots)), Op::Combine(combine)) = (sum, &grid.op) {
                x.iter_mut().zip(self.slots(grid, combine, slots, row)).for_each(|(x, y)| *x += y);
            }
            // Another share may or may not have added its part, so a norm over them would be undefined.
            if parts > 1 {
                x.iter_mut().enumerate().filter(|(col, _)| !own.contains(col)).for_each(|(_, x)| *x = f64::NAN);
            }
            if sum.is_some() {
                own.clone().for_each(|col| self.set(residual, row, col, x[col]));
            }
            let Some(out) = out else { continue };
            let y = match out.squares {
                Some(squares) => {
                    self.put_part(squares, part, row, 0, x[own.clone()].iter().map(|x| x * x).sum());
                    let weight = out.norm.and_then(|norm| norm.weight).map(|weight| self.vector(weight));
                    let weight = |col: usize| weight.as_ref().map_or(1.0, |weight| f64::from(weight[col]));
                    x.iter().enumerate().map(|(col, x)| x * weight(col)).collect()
                }
                None => out.norm.map_or(x.clone(), |norm| self.normed(&norm, &x)),
            };
            for to in [Some(out.to), out.rows].into_iter().flatten() {
                own.clone().for_each(|col| self.set(to, row, col, y[col]));
            }
        }
    }

    /// The part of k of a share, for its rows.
    fn multiplied(
        &self,
        grid: &Grid,
        m: &MatVec,
        (x, squares): (WorkId, Option<WorkId>),
        (n, parts): (u32, u32),
        share: &Share,
    ) -> Multiplied {
        let Content::Rows { parts: tensors, .. } = self.content(operand(grid, Role::Weight)).clone() else {
            panic!("rows")
        };
        // Parts of k are whole granules, and whole blocks of 64 columns.
        let step = (self.program.format_of(grid).granule_k() * m.parts()).max(64);
        let length = (m.k.div_ceil(step).div_ceil(parts) * step) as usize;
        let part = (share.lo / n) as usize;
        let of_k = part * length..((part + 1) * length).min(m.k as usize);
        let of_k = of_k.start.min(of_k.end)..of_k.end;
        // The factor that the norm of the input left out.
        let factor = |row: usize| {
            let (Some(squares), Some(norm)) = (squares, m.norm) else { return 1.0 };
            if matches!(self.plan.work[squares.index()].layout, Layout::Squares { parts, .. } if parts_of(parts, self.blocks()) > 1)
            {
                return 1.0;
            }
            (self.read(squares, row).iter().sum::<f64>() / f64::from(m.k) + f64::from(norm.eps)).sqrt().recip()
        };
        let input = |row: usize| {
            let factor = factor(row);
            self.read_of(x, row, of_k.clone()).into_iter().map(|x| x * factor).collect()
        };
        let inputs = self.rows(share).map(input).collect();
        Multiplied { part, inputs, of_k, tensors, weights: vec![0.0; m.k as usize] }
    }

    /// A product in pairs. Each block has the sums of its own share alone. It sends the other one those of eight rows of every 16, in the order of
    /// its units, and ends the other eight with what it is sent. Pairs run in any order, and a block sees nothing else of another one.
    fn pairs(&mut self, wave: &Wave, grid: &Grid, m: &MatVec, shares: &[(usize, Share)]) {
        let Action::MatMul { x, squares, target: Target::Residual(residual), then, pass, .. } = wave.action else {
            panic!("a product that adds")
        };
        let Over::Units { n, parts, .. } = self.plan.divisions[wave.division.index()].over else {
            panic!("a product that is not divided over units")
        };
        let mut order: Vec<usize> = vec![];
        for pair in shares.iter().map(|(sm, _)| sm / 2).chain(0..self.plan.machine.sms as usize / 2) {
            if !order.contains(&pair) {
                order.push(pair);
            }
        }
        for pair in order {
            let sums: [Option<OfBlock>; 2] = [2 * pair, 2 * pair + 1].map(|sm| {
                let (_, share) = shares.iter().find(|(of, _)| *of == sm)?;
                let mut multiplied = self.multiplied(grid, m, (x, squares), (n, parts), share);
                let first = share.lo % n * m.unit_rows;
                let end = ((share.lo % n + (share.hi - share.lo).min(pass)) * m.unit_rows).min(m.rows);
                let all: Vec<Vec<f64>> = (first..end).map(|col| multiplied.with_row(self, col)).collect();
                Some((multiplied.part, first as usize, all))
            });
            for rank in 0..2 {
                self.end_of_pair(grid, m, (residual, then), (pair, rank), &sums);
            }
        }
    }

    /// `sums`: of both blocks of the pair.
    fn end_of_pair(
        &mut self,
        grid: &Grid,
        m: &MatVec,
        (residual, then): (WorkId, Option<Input>),
        (pair, rank): (usize, usize),
        sums: &[Option<OfBlock>; 2],
    ) {
        let Epilogue::Residual { scale } = m.epilogue else { panic!("a product that adds") };
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let weight = then.and_then(|then| then.norm?.weight).map(|weight| self.vector(weight));
        let Some((part, first, own)) = &sums[rank] else {
            // A block without a share leaves zeros.
            if let Some(squares) = then.and_then(|then| then.squares) {
                (0..self.rows.len()).filter(|row| row % 16 / 8 == rank).for_each(|row| {
                    self.put_part(squares, pair, row, 0, 0.0);
                });
            }
            return;
        };
        // What the other block does not send is never there: the rows that it ends itself, and units that it does not have.
        let sent = |at: usize, row: usize| -> f64 {
            let other = sums[1 - rank].as_ref().filter(|(part, ..)| row % 16 / 8 != *part);
            other.and_then(|(.., all)| all.get(at)).map_or(f64::NAN, |of_col| of_col[row])
        };
        for row in (0..self.rows.len()).filter(|row| row % 16 / 8 == *part) {
            let mut square = 0.0;
            for (at, of_col) in own.iter().enumerate() {
                let col = first + at;
                let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[col]));
                let y = of_col[row] + sent(at, row) + bias;
                let sum = self.get(residual, row, col) + f64::from(scale) * y;
                self.set(residual, row, col, sum);
                square += sum * sum;
                if let Some(then) = then {
                    let weight = weight.as_ref().map_or(1.0, |weight| f64::from(weight[col]));
                    self.set(then.to, row, col, sum * weight);
                }
            }
            // The rows of these are those of the place of the block in its pair.
            if let Some(squares) = then.and_then(|then| then.squares) {
                self.put_part(squares, pair, row / 16 * 16 + rank * 8 + row % 8, 0, square);
            }
        }
    }

    /// `best`: the best logit of this SM for each row.
    fn matmul(
        &mut self,
        grid: &Grid,
        m: &MatVec,
        (x, squares, target): (WorkId, Option<WorkId>, Target),
        (n, parts): (u32, u32),
        share: &Share,
        best: &mut [(f64, f64)],
    ) {
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let mut multiplied = self.multiplied(grid, m, (x, squares), (n, parts), share);
        let part = multiplied.part;
        let mut product = |step: &Self, r: u32| -> Vec<f64> {
            let bias = bias.as_ref().filter(|_| part == 0).map_or(0.0, |bias| f64::from(bias[r as usize]));
            multiplied.with_row(step, r).into_iter().map(|y| y + bias).collect()
        };
        let (cols, per_unit) = match m.epilogue {
            Epilogue::Gated(_) | Epilogue::GatedBy { .. } => (m.rows / 2, 4),
            _ => (m.rows, m.unit_rows),
        };
        let (lo, hi) = (share.lo % n, share.lo % n + (share.hi - share.lo));
        for col in lo * per_unit..(hi * per_unit).min(cols) {
            let mut y = product(self, col);
            match m.epilogue {
                Epilogue::Gated(kind) => {
                    let up = product(self, cols + col);
                    y.iter_mut().zip(up).for_each(|(y, up)| *y = act(kind, *y) * up);
                }
                Epilogue::GatedBy { act: kind, scale } => {
                    let up = product(self, cols + col);
                    y.iter_mut().zip(up).for_each(|(y, up)| *y = act(kind, f64::from(scale) * *y) * up);
                }
                Epilogue::Act(kind) => y.iter_mut().for_each(|y| *y = act(kind, *y)),
                Epilogue::Residual { scale } if target.residual().is_some() && parts == 1 => {
                    y.iter_mut().for_each(|y| *y *= f64::from(scale));
                }
                Epilogue::Logits { scale, softcap: cap } => y.iter_mut().for_each(|y| {
                    *y *= f64::from(scale);
                    *y = cap.map_or(*y, |cap| softcap(f64::from(cap), *y));
                }),
                _ => {}
            }
            for (row, y) in self.rows(share).zip(y) {
                let col = col as usize;
                match target {
                    Target::Out(out) => match self.plan.work[out.index()].layout {
                        Layout::Parts(_) | Layout::Packets(_) => self.put_part(out, part, row, col, y),
                        _ => self.set(out, row, col, y),
                    },
                    Target::Sums { branch, .. } if parts > 1 => {
                        self.put_part(branch.expect("sums of parts"), part, row, col, y);
                    }
                    Target::Residual(id) | Target::Sums { residual: id, .. } => {
                        self.set(id, row, col, self.get(id, row, col) + y);
                    }
                    Target::Best(_) => {
                        if y > best[row].0 {
                            best[row] = (y, col as f64);
                        }
                    }
                }
            }
        }
    }

    /// What a product that leaves sums has of the input of the next one: its columns, and a sum of squares of each of its groups of columns.
    fn leave_input(&mut self, m: &MatVec, residual: WorkId, then: Input, n: u32, share: &Share) {
        let weight = then.norm.and_then(|norm| norm.weight).map(|weight| self.vector(weight));
        let squares = then.squares.expect("sums of squares");
        let (lo, hi) = (share.lo % n, share.lo % n + (share.hi - share.lo));
        let units = (hi - lo).div_ceil(8);
        for row in self.rows(share) {
            for group in 0..units {
                let first = (lo + group * 8) * m.unit_rows;
                let end = ((lo + group * 8 + 8).min(hi) * m.unit_rows).min(m.rows);
                let mut square = 0.0;
                for col in first as usize..end as usize {
                    let sum = self.get(residual, row, col);
                    square += sum * sum;
                    let weight = weight.as_ref().map_or(1.0, |weight| f64::from(weight[col]));
                    self.set(then.to, row, col, sum * weight);
                }
                self.set(squares, row, ((lo + group * 8) / 8) as usize, square);
            }
        }
    }

    /// A head after norm and rotation, in the order of the model, as attention uses it. Queries are scaled.
    fn head(&self, grid: &Grid, a: &Attention, key: bool, head: &[f64], position: usize) -> Vec<f64> {
        let (norm, role) = if key { (&a.k_norm, Role::KNormWeight) } else { (&a.q_norm, Role::QNormWeight) };
        let normed = |head: Vec<f64>| match norm {
            // A wave before has normalised all heads.
            Some(QkNormAttr { span: QkNormSpan::Projection, .. }) => head,
            Some(QkNormAttr { norm, .. }) => {
                let weight = self.vector(operand(grid, role));
                norm_values(norm.kind, norm.eps, 0.0, Some(&weight), None, &head)
            }
            None => head,
        };
        let mut head = if a.norm_after_rope { head.to_vec() } else { normed(head.to_vec()) };
        if a.rotary > 0 {
            let Content::RopeTable(rope) = *self.content(operand(grid, Role::Rope)) else { panic!("angles") };
            let rope = &self.imported.graph.ropes[rope.index()];
            assert_eq!((rope.inv_freq.len() as u32 * 2, rope.interleaved), (a.rotary, a.interleaved));
            rope_apply(rope, position as u32, &mut head);
        }
        if a.norm_after_rope {
            head = normed(head);
        }
        if let Some(scale) = a.query_scale.filter(|_| !key) {
            let factor = query_factor(scale, position as u32);
            head.iter_mut().for_each(|q| *q *= factor);
        }
        head
    }

    fn sink(&self, grid: &Grid, a: &Attention, head: usize) -> Option<f64> {
        a.sinks.then(|| f64::from(self.vector(operand(grid, Role::Sinks))[head]))
    }

    /// Writes columns of a head, times the gates that `gate` has of them, if it is there.
    fn put_head(&mut self, a: &Attention, (out, gate): (WorkId, Option<WorkId>), row: usize, head: usize, y: Vec<f64>) {
        let dim = a.head_dim as usize;
        let first = (a.heads + 2 * a.kv_heads()) as usize + head;
        let gates = gate.map(|gate| self.read_of(gate, row, first * dim..(first + 1) * dim));
        for (i, y) in y.into_iter().enumerate() {
            let by = gates.as_ref().map_or(1.0, |gates| 1.0 / (1.0 + (-gates[i]).exp()));
            self.set(out, row, head * dim + i, y * by);
        }
    }

    fn norm_heads(&mut self, grid: &Grid, a: &Attention, (x, out): (WorkId, WorkId), share: &Share) {
        let (q, k) = ((a.heads * a.head_dim) as usize, (a.kv_heads() * a.head_dim) as usize);
        for row in self.rows(share) {
            let mut all = self.read(x, row);
            for (norm, role, cols) in [(&a.q_norm, Role::QNormWeight, 0..q), (&a.k_norm, Role::KNormWeight, q..q + k)] {
                let Some(QkNormAttr { norm, span: QkNormSpan::Projection }) = norm else { continue };
                let weight = self.vector(operand(grid, role));
                let normed = norm_values(norm.kind, norm.eps, 0.0, Some(&weight), None, &all[cols.clone()]);
                all[cols].copy_from_slice(&normed);
            }
            self.write(out, row, &all);
        }
    }

    fn append(&mut self, grid: &Grid, a: &Attention, x: WorkId, queries: WorkId, share: &Share, caches: &mut Caches) {
        let (dim, heads, kv) = (a.head_dim as usize, a.heads as usize, a.kv_heads() as usize);
        for row in self.rows(share) {
            let (all, (_, sequence, position)) = (self.read(x, row), self.rows[row]);
            let of = |head: usize| &all[head * dim..(head + 1) * dim];
            let turned = |range: Range<usize>, key| -> Vec<f64> {
                range.flat_map(|head| self.head(grid, a, key, of(head), position)).collect()
            };
            let (q, k) = (turned(0..heads, false), turned(heads..heads + kv, true));
            caches.get_mut(&operand(grid, Role::AppendK)).expect("keys")[sequence][position] = k;
            caches.get_mut(&operand(grid, Role::AppendV)).expect("values")[sequence][position] =
                all[(heads + kv) * dim..(heads + 2 * kv) * dim].to_vec();
            self.write(queries, row, &q);
        }
    }

    /// Attention of the heads of one row that a share has. It reads the cache up to the first position of the row's sequence in this step,
    /// then the rows of the step from `x`. The share with the first query heads of a KV head appends.
    fn attend_row(
        &mut self,
        grid: &Grid,
        a: &Attention,
        (x, out, tile, splits): (WorkId, WorkId, u32, Option<Splits>),
        share: &Share,
        caches: &mut Caches,
    ) {
        let (dim, heads, kv_heads) = (a.head_dim as usize, a.heads as usize, a.kv_heads() as usize);
        for row in self.rows(share) {
            let (_, sequence, position) = self.rows[row];
            let lead = (0..row).rev().take_while(|&before| self.rows[before].1 == sequence).count();
            let first = a.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let per_task = a.heads_per_task as usize;
            let mut left = vec![];
            for head in share.lo as usize * per_task..share.hi as usize * per_task {
                let kv = head / a.group as usize;
                // A head of q, of k or of v of a row of the step.
                let of = |row: usize, head: usize| self.read_of(x, row, head * dim..(head + 1) * dim);
                let new = |row: usize| {
                    let key = self.head(grid, a, true, &of(row, heads + kv), self.rows[row].2);
                    (key, of(row, heads + kv_heads + kv))
                };
                let [keys, values] =
                    [Role::HistoryK, Role::HistoryV].map(|role| &caches[&operand(grid, role)][sequence]);
                let seen = |at: usize| match (at + lead).checked_sub(position) {
                    Some(after) => new(row - lead + after),
                    None => (keys[at][kv * dim..][..dim].to_vec(), values[at][kv * dim..][..dim].to_vec()),
                };
                let q = self.head(grid, a, false, &of(row, head), position);
                let y = match cuts(splits, first, position, tile) {
                    Some(cuts) => {
                        let all: Vec<Vec<_>> = cuts.into_iter().map(|cut| cut.map(seen).collect()).collect();
                        left.push((row, head, q, all));
                        None
                    }
                    None => {
                        let seen: Vec<_> = (first..=position).map(seen).collect();
                        Some(attended(a, self.sink(grid, a, head), &q, &seen))
                    }
                };
                if head.is_multiple_of(a.group as usize) {
                    let (key, value) = new(row);
                    for (role, own) in [(Role::AppendK, key), (Role::AppendV, value)] {
                        let cache = caches.get_mut(&operand(grid, role)).expect("a cache");
                        cache[sequence][position][kv * dim..][..dim].copy_from_slice(&own);
                    }
                }
                if let Some(y) = y {
                    self.put_head(a, (out, a.gate.then_some(x)), row, head, y);
                }
            }
            for (row, head, q, all) in left {
                for (split, seen) in all.iter().enumerate() {
                    // The split with the row's own position has the sink.
                    let sink = self.sink(grid, a, head).filter(|_| split + 1 == all.len());
                    let splits = splits.expect("a plan that cuts histories");
                    self.leave(a, splits, (row, split, head), sink, &q, seen);
                }
            }
        }
    }

    /// What a split leaves of a head. The values are not divided by the sum.
    fn leave(
        &mut self,
        a: &Attention,
        splits: Splits,
        (row, split, head): (usize, usize, usize),
        sink: Option<f64>,
        q: &[f64],
        seen: &[(Vec<f64>, Vec<f64>)],
    ) {
        let scores: Vec<f64> = seen.iter().map(|(key, _)| score(a, q, key)).collect();
        let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let mut left = vec![0.0; q.len() + 2];
        (left[0], left[1]) = (most, sink.map_or(0.0, |sink| (sink - most).exp()));
        for (score, (_, value)) in scores.iter().zip(seen) {
            let weight = (score - most).exp();
            left[1] += weight;
            left[2..].iter_mut().zip(value).for_each(|(y, v)| *y += weight * v);
        }
        for (i, value) in left.into_iter().enumerate() {
            let at = self.left_cell(a, splits, (row, split, head), i);
            self.put(at, value, 2);
        }
    }

    fn left_cell(&self, a: &Attention, splits: Splits, (row, split, head): (usize, usize, usize), i: usize) -> usize {
        let per_head = a.head_dim as usize + 2;
        let cols = self.plan.work[splits.left.index()].cols as usize;
        self.cell(splits.left, row, 0) + (split * cols + head * per_head + i) * 2
    }

    /// Rows with one split have their output.
    fn merge(&mut self, a: &Attention, to: (WorkId, Option<WorkId>), splits: Splits, share: &Share) {
        let dim = a.head_dim as usize;
        for row in self.rows(share) {
            let position = self.rows[row].2;
            let first = a.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let tile = self.plan.waves.iter().find_map(|wave| match wave.action {
                Action::AttendRow { tile, splits: Some(of), .. } if of == splits => Some(tile),
                _ => None,
            });
            let Some(cuts) = cuts(Some(splits), first, position, tile.unwrap_or(1)) else { continue };
            for head in (share.lo * a.heads_per_task) as usize..(share.hi * a.heads_per_task) as usize {
                let of = |split: usize, i: usize| {
                    let at = self.left_cell(a, splits, (row, split, head), i);
                    self.arena.get(at).copied().unwrap_or(f64::NAN)
                };
                let most = (0..cuts.len()).map(|split| of(split, 0)).fold(f64::NEG_INFINITY, f64::max);
                let sum =
                    |i: usize| -> f64 { (0..cuts.len()).map(|split| (of(split, 0) - most).exp() * of(split, i)).sum() };
                let all = sum(1);
                let y: Vec<f64> = (0..dim).map(|col| sum(col + 2) / all).collect();
                self.put_head(a, to, row, head, y);
            }
        }
    }

    /// The inputs that a value head has at a row of a run that begins at row `first`; before that row those that its state has.
    fn net_inputs(&self, mix: &Mix, x: WorkId, (first, row): (usize, i64), head: usize, state: &[f64]) -> Vec<f64> {
        let (dim, values, keys) =
            (mix.key_dim as usize, mix.value_dim as usize, (mix.key_heads * mix.key_dim) as usize);
        let before = row - first as i64;
        if before < 0 {
            if self.rows[first].2 == 0 {
                return vec![0.0; mix.channels() as usize];
            }
            let (matrix, past) = (dim * values, i64::from(mix.kernel) - 1);
            return state[matrix + (past + before) as usize * mix.channels() as usize..][..mix.channels() as usize]
                .to_vec();
        }
        let (key, value) = (head / mix.group() as usize * dim, 2 * keys + head * values);
        let of = [key..key + dim, keys + key..keys + key + dim, value..value + values];
        of.into_iter().flat_map(|of| self.read_of(x, row as usize, of)).collect()
    }

    /// q, k and v of a value head at a row: convolved, q and k of unit length, q divided by the root of their number.
    fn net_head(
        &self,
        grid: &Grid,
        mix: &Mix,
        x: WorkId,
        at: (usize, i64),
        head: usize,
        state: &[f64],
    ) -> [Vec<f64>; 3] {
        let (dim, values, keys) =
            (mix.key_dim as usize, mix.value_dim as usize, (mix.key_heads * mix.key_dim) as usize);
        let taps = self.vector(operand(grid, Role::Conv));
        let key = head / mix.group() as usize * dim;
        let channels = (key..key + dim).chain(keys + key..keys + key + dim);
        let channels = channels.chain(2 * keys + head * values..2 * keys + (head + 1) * values);
        let kernel = mix.kernel as usize;
        let inputs: Vec<Vec<f64>> = (0..kernel)
            .map(|tap| self.net_inputs(mix, x, (at.0, at.1 - (kernel - 1 - tap) as i64), head, state))
            .collect();
        let of_channel = |(i, channel): (usize, usize)| {
            let sum = (0..kernel).map(|tap| inputs[tap][i] * f64::from(taps[channel * kernel + tap])).sum();
            act(Act::Silu, sum)
        };
        let all: Vec<f64> = channels.enumerate().map(of_channel).collect();
        let unit = |x: &[f64], scale: f64| -> Vec<f64> {
            let square: f64 = x.iter().map(|x| x * x).sum();
            x.iter().map(|x| x * scale / (square + f64::from(Mix::L2_EPS)).sqrt()).collect()
        };
        let scale = 1.0 / (dim as f64).sqrt();
        [unit(&all[..dim], scale), unit(&all[dim..2 * dim], 1.0), all[2 * dim..].to_vec()]
    }

    /// Beta and the decay of a head at a row.
    fn net_scalars(&self, grid: &Grid, mix: &Mix, scalars: WorkId, row: usize, head: usize) -> (f64, f64) {
        let column = |role| grid.operand(role).expect("a column").cols.base as usize + head;
        let [b, a] =
            [Role::Beta, Role::Decay].map(|role| self.read_of(scalars, row, column(role)..column(role) + 1)[0]);
        let [a_log, bias] = [Role::ALog, Role::DtBias].map(|role| f64::from(self.vector(operand(grid, role))[head]));
        let beta = sigmoid(b) * if mix.doubles { 2.0 } else { 1.0 };
        (beta, (-a_log.exp() * softplus(a + bias)).exp())
    }

    fn convolve(
        &mut self,
        grid: &Grid,
        mix: &Mix,
        (x, scalars, out): (WorkId, WorkId, WorkId),
        share: &Share,
        caches: &Caches,
    ) {
        let (dim, values, keys) =
            (mix.key_dim as usize, mix.value_dim as usize, (mix.key_heads * mix.key_dim) as usize);
        for (row, head) in self.rows(share).flat_map(|row| (0..mix.value_heads as usize).map(move |head| (row, head))) {
            let state = &caches[&operand(grid, Role::State)][self.rows[row].1][head];
            let [q, k, v] = self.net_head(grid, mix, x, (0, row as i64), head, state);
            let key = head / mix.group() as usize * dim;
            let (beta, decay) = self.net_scalars(grid, mix, scalars, row, head);
            let end = mix.qkv_cols() as usize + head;
            let all = [(key, q), (keys + key, k), (2 * keys + head * values, v), (end, vec![beta])];
            for (first, of) in all.into_iter().chain([(end + mix.value_heads as usize, vec![decay])]) {
                (first..).zip(of).for_each(|(col, value)| self.set(out, row, col, value));
            }
        }
    }

    /// Columns of a state through the rows of a share. The first columns of a head keep its last inputs, too.
    fn carry(
        &mut self,
        grid: &Grid,
        mix: &Mix,
        (turned, x, out): (WorkId, WorkId, WorkId),
        n: u32,
        share: &Share,
        caches: &mut Caches,
    ) {
        let (dim, values, keys) =
            (mix.key_dim as usize, mix.value_dim as usize, (mix.key_heads * mix.key_dim) as usize);
        let (parts, rows) = ((n / mix.value_heads) as usize, self.rows(share));
        let (Some(last), wide) = (rows.clone().last(), values / parts) else { return };
        for index in share.lo as usize..share.hi as usize {
            let (head, part) = (index / parts, index % parts);
            let (_, sequence, position) = self.rows[rows.start];
            let state = &mut caches.get_mut(&operand(grid, Role::State)).expect("a state")[sequence][head];
            let of = |row: usize| row * values + part * wide;
            let mut s: Vec<f64> = (0..dim).flat_map(|row| state[of(row)..of(row) + wide].to_vec()).collect();
            if position == 0 {
                s.fill(0.0);
            }
            for row in rows.clone() {
                let read = |first: usize, count: usize| self.read_of(turned, row, first..first + count);
                let key = head / mix.group() as usize * dim;
                let scalar = |at: usize| read(mix.qkv_cols() as usize + at, 1)[0];
                let (beta, decay) = (scalar(head), scalar(mix.value_heads as usize + head));
                let (q, k, v) =
                    (read(key, dim), read(keys + key, dim), read(2 * keys + head * values + part * wide, wide));
                let mut y = vec![0.0; wide];
                delta_rule(&mut s, &q, &k, &v, decay, beta, &mut y);
                (head * values + part * wide..).zip(y).for_each(|(col, y)| self.set(out, row, col, y));
            }
            (0..dim).for_each(|row| state[of(row)..of(row) + wide].copy_from_slice(&s[row * wide..][..wide]));
            if part == 0 {
                let past = i64::from(mix.kernel) - 1;
                let kept = (0..past)
                    .flat_map(|t| self.net_inputs(mix, x, (rows.start, last as i64 + 1 - past + t), head, state));
                let kept: Vec<f64> = kept.collect();
                state[dim * values..].copy_from_slice(&kept);
            }
        }
    }

    /// Writes heads of a row, normed and gated; `y` has them.
    fn gate_heads(
        &mut self,
        grid: &Grid,
        mix: &Mix,
        (x, out): (WorkId, WorkId),
        row: usize,
        heads: Range<usize>,
        y: &[f64],
    ) {
        let (values, gains) = (mix.value_dim as usize, self.vector(operand(grid, Role::NormWeight)));
        let first = mix.qkv_cols() as usize;
        for (head, y) in heads.zip(y.chunks_exact(values)) {
            let gate = self.read_of(x, row, first + head * values..first + (head + 1) * values);
            let mean = y.iter().map(|y| y * y).sum::<f64>() / values as f64;
            for (i, (y, gate)) in y.iter().zip(gate).enumerate() {
                let y = y / (mean + f64::from(mix.eps)).sqrt() * f64::from(gains[i]) * act(Act::Silu, gate);
                self.set(out, row, head * values + i, y);
            }
        }
    }

    /// The heads of a share for all rows of the sequence that begins at its row; nothing if an earlier row is of the same sequence.
    fn mix_row(
        &mut self,
        grid: &Grid,
        mix: &Mix,
        (x, scalars, out): (WorkId, WorkId, WorkId),
        share: &Share,
        caches: &mut Caches,
    ) {
        let matrix = (mix.key_dim * mix.value_dim) as usize;
        for first in self.rows(share) {
            let (_, sequence, position) = self.rows[first];
            if first > 0 && self.rows[first - 1].1 == sequence {
                continue;
            }
            for head in share.lo as usize..share.hi as usize {
                let at = (operand(grid, Role::State), sequence, head);
                let mut state = caches[&at.0][at.1][at.2].clone();
                let mut s = state[..matrix].to_vec();
                if position == 0 {
                    s.fill(0.0);
                }
                let run = (first..self.rows.len()).take_while(|row| self.rows[*row].1 == sequence);
                let mut last = first;
                for row in run.collect::<Vec<_>>() {
                    let [q, k, v] = self.net_head(grid, mix, x, (first, row as i64), head, &state);
                    let (beta, decay) = self.net_scalars(grid, mix, scalars, row, head);
                    let mut y = vec![0.0; v.len()];
                    delta_rule(&mut s, &q, &k, &v, decay, beta, &mut y);
                    self.gate_heads(grid, mix, (x, out), row, head..head + 1, &y);
                    last = row;
                }
                let past = i64::from(mix.kernel) - 1;
                let kept =
                    (0..past).flat_map(|t| self.net_inputs(mix, x, (first, last as i64 + 1 - past + t), head, &state));
                let kept: Vec<f64> = kept.collect();
                state[..matrix].copy_from_slice(&s);
                state[matrix..].copy_from_slice(&kept);
                caches.get_mut(&at.0).expect("a state")[at.1][at.2] = state;
            }
        }
    }

    /// The channels of a share for all rows of the sequence that begins at its row; nothing if an earlier row is of the same sequence.
    fn short_conv(
        &mut self,
        grid: &Grid,
        convolve: &Convolve,
        (x, out): (WorkId, WorkId),
        share: &Share,
        caches: &mut Caches,
    ) {
        let (channels, past) = (convolve.channels as usize, convolve.past() as usize);
        let (group, taps) = (group_channels(self.plan.form), self.vector(operand(grid, Role::Conv)));
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let of_share = (share.lo * group) as usize..((share.hi * group) as usize).min(channels);
        for first in self.rows(share) {
            let (_, sequence, position) = self.rows[first];
            if first > 0 && self.rows[first - 1].1 == sequence {
                continue;
            }
            let run = (first..self.rows.len()).take_while(|row| self.rows[*row].1 == sequence).count();
            let all: Vec<Vec<f64>> = (first..first + run).map(|row| self.read(x, row)).collect();
            for channel in of_share.clone() {
                let state = &mut caches.get_mut(&operand(grid, Role::State)).expect("a state")[sequence][0]
                    [channel * past..][..past];
                let before = state.iter().map(|kept| if position == 0 { 0.0 } else { *kept });
                let own = all.iter().map(|row| row[channel] * row[2 * channels + channel]);
                let inputs: Vec<f64> = before.chain(own).collect();
                state.copy_from_slice(&inputs[run..]);
                for (row, seen) in inputs.windows(past + 1).enumerate() {
                    let of_channel = &taps[channel * (past + 1)..][..past + 1];
                    let sum: f64 = seen.iter().zip(of_channel).map(|(u, tap)| u * f64::from(*tap)).sum();
                    let sum = sum + bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]));
                    self.set(out, first + row, channel, all[row][channels + channel] * sum);
                }
            }
        }
    }

    fn attend(
        &mut self,
        grid: &Grid,
        a: &Attention,
        (queries, out, gate): (WorkId, WorkId, Option<WorkId>),
        share: &Share,
        caches: &Caches,
    ) {
        let dim = a.head_dim as usize;
        for row in self.rows(share) {
            let (_, sequence, position) = self.rows[row];
            let [keys, values] = [Role::HistoryK, Role::HistoryV].map(|role| &caches[&operand(grid, role)][sequence]);
            let end = position + 1;
            let first = a.window.map_or(0, |window| end.saturating_sub(window as usize));
            for head in share.lo * a.heads_per_task..share.hi * a.heads_per_task {
                let at = head as usize * dim;
                let kv = (head / a.group) as usize * dim;
                let q: Vec<f64> = (at..at + dim).map(|col| self.get(queries, row, col)).collect();
                let of = |at: usize| (keys[at][kv..kv + dim].to_vec(), values[at][kv..kv + dim].to_vec());
                let sink = self.sink(grid, a, head as usize);
                let y = attended(a, sink, &q, &(first..end).map(of).collect::<Vec<_>>());
                self.put_head(a, (out, gate), row, head as usize, y);
            }
        }
    }
}
