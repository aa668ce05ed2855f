//! Owns the pass `shards`: where the buffers of a program lie, and which device serves which head, if several devices of one host run it.
//!
//! The SMs of all devices are one machine, each device with as many consecutive ones. The units of each matrix are divided into as many runs as there
//! are devices, and each among the SMs of its device, so each device holds and reads its part of every matrix, and of every expert. What SMs exchange
//! crosses, and lies on each device. Keys, values and recurrent states do not cross: a KV head and a state are on one device, in every regime and in
//! every kernel.

use super::Share;
use crate::ir::op::Attention;
use crate::ir::program::{Grid, Home, Program, Space};
use crate::target::{Target, TargetKind};

/// The same program on `devices` devices: each has its part of every matrix, and a copy of every other buffer that is not in an SM.
pub fn shards(mut program: Program, devices: u32) -> Program {
    if devices > 1 {
        for buffer in program.buffers.iter_mut().filter(|buffer| buffer.space != Space::Private) {
            buffer.home = if buffer.space == Space::Weight { Home::Divided } else { Home::Everywhere };
        }
    }
    program
}

/// What of a program several devices do not have yet; `None`: nothing.
pub(super) fn refuses(program: &Program, target: &Target) -> Option<String> {
    (target.kind == TargetKind::Cuda && program.joins()).then(|| "the kernel of a draft".to_string())
}

/// The device of launch index `index` of `n`: devices have as many as others, or one more. With fewer than devices, some have none.
fn device_of(index: u32, n: u32, devices: u32) -> u32 {
    (u64::from(index) * u64::from(devices) / u64::from(n.max(1))) as u32
}

/// Divides the launch indices of an attention: each goes to the device of its KV head, and there one launch index a task is spread over the
/// SMs, from `start` on. On one device as `even_shares` does elsewhere.
pub(super) fn attention_shares(
    a: &Attention,
    grid: &Grid,
    rows: u32,
    sms: usize,
    devices: u32,
    start: usize,
) -> Vec<Share> {
    let (shares, rows) = (grid.second.extent(), if grid.per_row { rows } else { 1 });
    let each = sms / devices as usize;
    let tasks_of_head = (a.group / a.heads_per_task.max(1)).max(1);
    let mut out = vec![];
    for device in 0..devices {
        let is_own = |index: &u32| device_of(index / tasks_of_head, a.kv_heads(), devices) == device;
        let own: Vec<u32> = (0..grid.n).filter(is_own).collect();
        let total = own.len() * shares as usize * rows as usize;
        let turns = (0..rows).flat_map(|row| own.iter().flat_map(move |&i| (0..shares).map(move |j| (i, j, row))));
        for (index, (i, j, row)) in turns.enumerate() {
            let turn = if total <= each { index * each / total } else { index };
            let sm = device as usize * each + (start + turn) % each;
            out.push(Share { sm, lo: i, hi: i + 1, j, row });
        }
    }
    out
}

/// Divides the launch indices of a grid with states, and the parts of its sequences: a head goes to one device, whichever other grids there are.
/// There the tasks are spread over the SMs, from that of the layer on.
pub(super) fn state_shares(grid: &Grid, sms: usize, devices: u32) -> Vec<Share> {
    let start = grid.site.and_then(|site| site.layer).map_or(0, |layer| layer.index());
    let (parts, each) = (grid.second.extent(), sms / devices as usize);
    let mut out = vec![];
    for device in 0..devices {
        let own: Vec<u32> = (0..grid.n).filter(|index| device_of(*index, grid.n, devices) == device).collect();
        let total = own.len() * parts as usize;
        for (index, (i, j)) in own.iter().flat_map(|&i| (0..parts).map(move |j| (i, j))).enumerate() {
            let turn = if total <= each { index * each / total } else { index };
            out.push(Share { sm: device as usize * each + (start + turn) % each, lo: i, hi: i + 1, j, row: 0 });
        }
    }
    out
}
