//! Mamba-2 in waves: its convolution, states through the rows of a share, and the norm with the gate.

use monobloc::ir::op::{Op, Role, Scan};
use monobloc::ir::program::Grid;
use monobloc::model::graph::{Act, Mamba2};
use monobloc::reference::{MambaState, act, softplus};
use monobloc::waves::{Action, DivisionId, GateNorm, Over, Share, WorkId};

use super::{Caches, Rows, Step, operand};

/// The matrix of each head, and its past inputs, as programs have them.
pub fn state_by_head(op: &Mamba2, state: &MambaState) -> [Rows; 2] {
    let (dim, width, inner) = (op.head_dim as usize, op.state as usize, op.h.rows as usize);
    let matrix = |head: usize| {
        let of_column = move |n: usize| (0..dim).map(move |d| (head * dim + d) * width + n);
        (0..width).flat_map(of_column).map(|cell| state.matrices[cell]).collect()
    };
    let inputs = |head: usize| {
        let group = inner + head / (op.heads / op.groups) as usize * width;
        let c = group + op.b.rows as usize;
        let of = [head * dim..(head + 1) * dim, group..group + width, c..c + width];
        let of_position =
            |input: &Vec<f64>| -> Vec<f64> { of.clone().into_iter().flat_map(|of| input[of].to_vec()).collect() };
        state.conv.inputs.iter().flat_map(of_position).collect()
    };
    let heads = 0..op.heads as usize;
    [heads.clone().map(matrix).collect(), heads.map(inputs).collect()]
}

/// Brings rows `[state, x.len()]` of a state to the next position. Returns what it reads there.
fn advance(s: &mut [f64], [x, b, c]: [&[f64]; 3], (step, decay): (f64, f64)) -> Vec<f64> {
    let mut y = vec![0.0; x.len()];
    for ((row, b), c) in s.chunks_exact_mut(x.len()).zip(b).zip(c) {
        for ((s, x), y) in row.iter_mut().zip(x).zip(&mut y) {
            *s = decay * *s + step * b * x;
            *y += *s * c;
        }
    }
    y
}

impl Step<'_> {
    pub(super) fn scan_wave(
        &mut self,
        grid: &Grid,
        scan: &Scan,
        (action, division): (&Action, DivisionId),
        share: &Share,
        caches: &mut Caches,
    ) {
        match *action {
            Action::Convolve { x, out, .. } => self.scan_turn(grid, scan, (x, out), share, caches),
            Action::Mix { turned, x, out } => {
                let Over::States { n } = self.plan.divisions[division.index()].over else {
                    panic!("states that are not divided over their columns")
                };
                self.scan_carry(grid, scan, (turned, x, out), (n / scan.heads) as usize, share, caches);
            }
            Action::MixRow { x, out, .. } => self.scan_row(grid, scan, (x, out), share, caches),
            _ => panic!("a wave of another op than its grid has"),
        }
    }

    /// x, b and c of a head, before their convolution, at a row of a run that begins at row `first`; before that row those that its state has.
    fn scan_inputs(&self, scan: &Scan, x: WorkId, (first, row): (usize, i64), head: usize, state: &[f64]) -> Vec<f64> {
        let (dim, width, channels) = (scan.head_dim as usize, scan.state as usize, scan.head_channels() as usize);
        let before = row - first as i64;
        if before < 0 {
            if self.rows[first].2 == 0 {
                return vec![0.0; channels];
            }
            let past = i64::from(scan.kernel) - 1 + before;
            return state[dim * width + past as usize * channels..][..channels].to_vec();
        }
        let (inner, grouped) = (scan.inner() as usize, (scan.groups * scan.state) as usize);
        let group = 2 * inner + head / scan.group() as usize * width;
        let c = group + grouped;
        let of = [inner + head * dim..inner + (head + 1) * dim, group..group + width, c..c + width];
        let of = of.into_iter().zip(scan.scales);
        of.flat_map(|(of, by)| self.read_of(x, row as usize, of).into_iter().map(move |x| f64::from(by) * x)).collect()
    }

    /// The same after the convolution.
    fn scan_head(
        &self,
        grid: &Grid,
        scan: &Scan,
        x: WorkId,
        at: (usize, i64),
        head: usize,
        state: &[f64],
    ) -> [Vec<f64>; 3] {
        let (dim, width, kernel) = (scan.head_dim as usize, scan.state as usize, scan.kernel as usize);
        let (inner, grouped) = (scan.inner() as usize, (scan.groups * scan.state) as usize);
        let group = inner + head / scan.group() as usize * width;
        let channels = (head * dim..(head + 1) * dim).chain(group..group + width);
        let channels = channels.chain(group + grouped..group + grouped + width);
        let taps = self.vector(operand(grid, Role::Conv));
        let bias = grid.operand(Role::Bias).map(|bias| self.vector(bias.buffer));
        let inputs: Vec<Vec<f64>> = (0..kernel)
            .map(|tap| self.scan_inputs(scan, x, (at.0, at.1 - (kernel - 1 - tap) as i64), head, state))
            .collect();
        let of_channel = |(i, channel): (usize, usize)| {
            let sum: f64 = (0..kernel).map(|tap| inputs[tap][i] * f64::from(taps[channel * kernel + tap])).sum();
            act(Act::Silu, sum + bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel])))
        };
        let all: Vec<f64> = channels.enumerate().map(of_channel).collect();
        let (x, rest) = all.split_at(dim);
        let (b, c) = rest.split_at(width);
        [x, b, c].map(<[f64]>::to_vec)
    }

    /// The step and the decay of a head at a row.
    fn scan_step(&self, grid: &Grid, scan: &Scan, x: WorkId, row: usize, head: usize) -> (f64, f64) {
        let column = operand_base(grid, Role::Step) + head;
        let [a_log, bias] = [Role::ALog, Role::DtBias].map(|role| f64::from(self.vector(operand(grid, role))[head]));
        let step = softplus(f64::from(scan.scales[3]) * self.read_of(x, row, column..column + 1)[0] + bias);
        (step, (-a_log.exp() * step).exp())
    }

    fn scan_turn(&mut self, grid: &Grid, scan: &Scan, (x, out): (WorkId, WorkId), share: &Share, caches: &Caches) {
        let (dim, width, inner) = (scan.head_dim as usize, scan.state as usize, scan.inner() as usize);
        let heads = scan.heads as usize;
        for (row, head) in self.rows(share).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let state = &caches[&operand(grid, Role::State)][self.rows[row].1][head];
            let [of_x, b, c] = self.scan_head(grid, scan, x, (0, row as i64), head, state);
            let (step, decay) = self.scan_step(grid, scan, x, row, head);
            let group = inner + head / scan.group() as usize * width;
            let end = scan.channels() as usize + head;
            let all = [(head * dim, of_x), (group, b), (group + (scan.groups * scan.state) as usize, c)];
            for (first, of) in all.into_iter().chain([(end, vec![step]), (end + heads, vec![decay])]) {
                (first..).zip(of).for_each(|(col, value)| self.set(out, row, col, value));
            }
        }
    }

    /// Stores columns of a head from column `first` on: for a norm as they are, else gated.
    fn put_scanned(&mut self, scan: &Scan, (x, out): (WorkId, WorkId), row: usize, first: usize, y: Vec<f64>) {
        let gate = scan.gate.filter(|_| self.plan.work[out.index()].layout.is_input());
        let gates = self.read_of(x, row, first..first + y.len());
        for ((col, y), z) in (first..).zip(y).zip(gates) {
            self.set(out, row, col, gate.map_or(y, |by| y * act(Act::Silu, f64::from(by) * z)));
        }
    }

    /// Columns of a state through the rows of a share. The first columns of a head keep its last inputs, too.
    fn scan_carry(
        &mut self,
        grid: &Grid,
        scan: &Scan,
        (turned, x, out): (WorkId, WorkId, WorkId),
        parts: usize,
        share: &Share,
        caches: &mut Caches,
    ) {
        let (dim, width, inner) = (scan.head_dim as usize, scan.state as usize, scan.inner() as usize);
        let (rows, wide) = (self.rows(share), dim / parts);
        let Some(last) = rows.clone().last() else { return };
        let skips = self.vector(operand(grid, Role::D));
        for index in share.lo as usize..share.hi as usize {
            let (head, part) = (index / parts, index % parts);
            let (_, sequence, position) = self.rows[rows.start];
            let state = &mut caches.get_mut(&operand(grid, Role::State)).expect("a state")[sequence][head];
            let of = |row: usize| row * dim + part * wide;
            let mut s: Vec<f64> = (0..width).flat_map(|row| state[of(row)..of(row) + wide].to_vec()).collect();
            if position == 0 {
                s.fill(0.0);
            }
            let group = inner + head / scan.group() as usize * width;
            let (first, scalars) = (head * dim + part * wide, scan.channels() as usize + head);
            for row in rows.clone() {
                let read = |first: usize, count: usize| self.read_of(turned, row, first..first + count);
                let of_x = read(first, wide);
                let (b, c) = (read(group, width), read(group + (scan.groups * scan.state) as usize, width));
                let by = (read(scalars, 1)[0], read(scalars + scan.heads as usize, 1)[0]);
                let mut y = advance(&mut s, [&of_x, &b, &c], by);
                y.iter_mut().zip(&of_x).for_each(|(y, x)| *y += f64::from(skips[head]) * x);
                self.put_scanned(scan, (x, out), row, first, y);
            }
            (0..width).for_each(|row| state[of(row)..of(row) + wide].copy_from_slice(&s[row * wide..][..wide]));
            if part == 0 {
                let past = i64::from(scan.kernel) - 1;
                let at = |t: i64| (rows.start, last as i64 + 1 - past + t);
                let kept = (0..past).flat_map(|t| self.scan_inputs(scan, x, at(t), head, state)).collect::<Vec<f64>>();
                state[dim * width..].copy_from_slice(&kept);
            }
        }
    }

    /// The heads of a share for all rows of the sequence that begins at its row; nothing if an earlier row is of the same sequence.
    fn scan_row(&mut self, grid: &Grid, scan: &Scan, (x, out): (WorkId, WorkId), share: &Share, caches: &mut Caches) {
        let (dim, matrix) = (scan.head_dim as usize, (scan.state * scan.head_dim) as usize);
        for first in self.rows(share) {
            let (_, sequence, position) = self.rows[first];
            if first > 0 && self.rows[first - 1].1 == sequence {
                continue;
            }
            let run = (first..self.rows.len()).take_while(|row| self.rows[*row].1 == sequence).count();
            for head in share.lo as usize..share.hi as usize {
                let at = (operand(grid, Role::State), sequence, head);
                let skip = f64::from(self.vector(operand(grid, Role::D))[head]);
                let mut state = caches[&at.0][at.1][at.2].clone();
                let mut s = state[..matrix].to_vec();
                if position == 0 {
                    s.fill(0.0);
                }
                for row in first..first + run {
                    let [of_x, b, c] = self.scan_head(grid, scan, x, (first, row as i64), head, &state);
                    let by = self.scan_step(grid, scan, x, row, head);
                    let mut y = advance(&mut s, [&of_x, &b, &c], by);
                    y.iter_mut().zip(&of_x).for_each(|(y, x)| *y += skip * x);
                    self.put_scanned(scan, (x, out), row, head * dim, y);
                }
                let past = i64::from(scan.kernel) - 1;
                let at_row = |t: i64| (first, (first + run) as i64 - past + t);
                let kept =
                    (0..past).flat_map(|t| self.scan_inputs(scan, x, at_row(t), head, &state)).collect::<Vec<f64>>();
                state[..matrix].copy_from_slice(&s);
                state[matrix..].copy_from_slice(&kept);
                caches.get_mut(&at.0).expect("a state")[at.1][at.2] = state;
            }
        }
    }

    /// Rows of what Mamba-2 gives, normed by groups, and gated before or after that.
    pub(super) fn gate_norm(&mut self, grid: &Grid, (mixed, x, out): (WorkId, WorkId, WorkId), share: &Share) {
        let GateNorm { scan, width, groups, eps, scale, first } =
            GateNorm::of(self.program, grid).expect("a norm of Mamba-2");
        assert!(matches!(self.grid(scan).op, Op::Scan(_)));
        let gains = self.vector(operand(grid, Role::NormWeight));
        let group = (width / groups) as usize;
        for row in self.rows(share) {
            let gates = self.read_of(x, row, 0..width as usize);
            let gates: Vec<f64> = gates.into_iter().map(|z| act(Act::Silu, f64::from(scale) * z)).collect();
            let mut y = self.read(mixed, row);
            if !first {
                y.iter_mut().zip(&gates).for_each(|(y, gate)| *y *= gate);
            }
            for of in y.chunks_exact_mut(group) {
                let mean = of.iter().map(|y| y * y).sum::<f64>() / group as f64;
                of.iter_mut().for_each(|y| *y /= (mean + f64::from(eps)).sqrt());
            }
            for (col, y) in y.into_iter().enumerate() {
                self.set(out, row, col, y * f64::from(gains[col]) * if first { gates[col] } else { 1.0 });
            }
        }
    }
}

/// The first column of an operand.
fn operand_base(grid: &Grid, role: Role) -> usize {
    grid.operand(role).expect("a column").cols.base as usize
}
