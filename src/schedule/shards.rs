//! Owns `shards`, the pass that gives a program to several devices, and which device has which head.
//!
//! SMs of all devices are one machine, and units of every matrix are divided among all of them, as on one device. So a device reads its part
//! of each matrix, and no sum is over devices: the bits are those of one device. What SMs exchange lies in the memory of each device: an SM
//! stores its packets into all of them and polls its own. Keys and values do not cross: a KV head is on one device
//! (docs/decisions/0069-devices-are-one-machine.md).

use super::Share;
use crate::ir::op::{Attention, Op};
use crate::ir::program::{Grid, Home, Program, Space};
use crate::target::{Target, TargetKind};

/// The same program on `devices` devices: each has a copy of every buffer that is not in an SM.
pub fn shards(mut program: Program, devices: u32) -> Program {
    if devices > 1 {
        for buffer in program.buffers.iter_mut().filter(|buffer| buffer.space != Space::Private) {
            buffer.home = Home::Everywhere;
        }
    }
    program
}

/// What of a program several devices do not have yet; `None`: nothing.
pub(super) fn refuses(program: &Program, target: &Target) -> Option<String> {
    let is_other = |grid: &&Grid| {
        matches!(grid.op, Op::Route(_) | Op::Combine(_) | Op::Mix(_) | Op::Scan(_) | Op::Convolve(_) | Op::GroupNorm(_))
    };
    if let Some(grid) = program.grids.iter().find(is_other) {
        return Some(format!("`{}`, a grid of experts or of recurrent states,", grid.name));
    }
    if program.buffers.iter().any(|buffer| buffer.words) {
        return Some("the batch kernel".to_string());
    }
    if target.kind == TargetKind::Cuda && !program.tables.is_empty() {
        return Some("a kernel over pages".to_string());
    }
    None
}

/// The device of a launch index of attention: that of its KV head. Devices have as many KV heads as others, or one more; with fewer KV heads
/// than devices, some have none.
fn device_of(a: &Attention, index: u32, devices: u32) -> u32 {
    let kv_head = index / (a.group / a.heads_per_task.max(1)).max(1);
    (u64::from(kv_head) * u64::from(devices) / u64::from(a.kv_heads().max(1))) as u32
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
    let mut out = vec![];
    for device in 0..devices {
        let own: Vec<u32> = (0..grid.n).filter(|index| device_of(a, *index, devices) == device).collect();
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
