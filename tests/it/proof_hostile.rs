//! Tests absurd numbers: the proof neither panics on them nor accepts a wrong schedule.

use crate::proof_support::*;
use monobloc::dtype::DType;
use monobloc::ir::op::{Access, GroupNorm, Mix, Op, Role, Scan};
use monobloc::ir::program::{Rows, Second, Space};
use monobloc::ir::schedule::{Mechanism, Schedule, Source};
use monobloc::ir::{BufferId, EventId, GridId, TaskId};
use monobloc::validate::check;

fn pick<'a, T>(random: &mut Random, list: &'a mut [T]) -> Option<(usize, &'a mut T)> {
    if list.is_empty() {
        return None;
    }
    let i = random.below(list.len());
    Some((i, &mut list[i]))
}

/// Another value for a number: an extreme, a neighbour, or a small one.
fn other(random: &mut Random, value: u32) -> u32 {
    match random.below(9) {
        0 => 0,
        1 => u32::MAX,
        2 => 1 << 31,
        3 => value.wrapping_add(1),
        4 => value.wrapping_sub(1),
        5 => value.wrapping_mul(2),
        6 => value / 2,
        7 => 1 << 28,
        _ => random.below(70) as u32,
    }
}

/// Changes one scalar anywhere in the schedule, and returns its name.
fn scramble(s: &mut Schedule, random: &mut Random) -> Option<String> {
    let r = random.below(s.regimes.len());
    let said = match random.below(24) {
        0 => {
            let fields = [&mut s.machine.sms, &mut s.machine.consumer_warps];
            let field = fields.into_iter().nth(random.below(2))?;
            *field = other(random, *field);
            format!("machine {field}")
        }
        1 => {
            let ring = &mut s.machine.ring;
            let fields = [&mut ring.slots, &mut ring.slot_bytes, &mut ring.arrivals];
            let i = random.below(3);
            let field = fields.into_iter().nth(i)?;
            *field = other(random, *field);
            format!("ring field {i} {field}")
        }
        2 => {
            let ring = &mut s.machine.ring;
            let i = random.below(3);
            let field = [&mut ring.flight_high, &mut ring.flight_low, &mut ring.flight_free].into_iter().nth(i)?;
            *field = other(random, *field);
            format!("flight {i} {field}")
        }
        3 => {
            let (i, part) = pick(random, &mut s.machine.smem)?;
            let field = if random.below(2) == 0 { &mut part.offset } else { &mut part.bytes };
            *field = other(random, *field);
            format!("smem {i} {field}")
        }
        4 => {
            let (i, place) = pick(random, &mut s.placement)?;
            *place = [None, Some(0), Some(u64::MAX), Some(8), Some(1 << 40)][random.below(5)];
            format!("placement b{i} {place:?}")
        }
        5 => {
            let from = &mut s.regimes[r].from_position;
            *from = other(random, *from);
            format!("r{r} from {from}")
        }
        6 => {
            s.program.context_max = other(random, s.program.context_max);
            format!("context_max {}", s.program.context_max)
        }
        7 => {
            let (i, b) = pick(random, &mut s.program.buffers)?;
            let field = [&mut b.rows, &mut b.cols, &mut b.phases].into_iter().nth(random.below(3))?;
            *field = other(random, *field);
            format!("buffer b{i} extent {field}")
        }
        8 => {
            let (i, b) = pick(random, &mut s.program.buffers)?;
            b.space = Space::ALL[random.below(6)];
            format!("b{i} space {}", b.space.name())
        }
        9 => {
            let (i, b) = pick(random, &mut s.program.buffers)?;
            b.dtype = [DType::F32, DType::Bf16, DType::F16, DType::I32][random.below(4)];
            format!("b{i} dtype {}", b.dtype)
        }
        10 => {
            let (i, g) = pick(random, &mut s.program.grids)?;
            g.n = other(random, g.n);
            format!("g{i} n {}", g.n)
        }
        11 => {
            let (i, g) = pick(random, &mut s.program.grids)?;
            let extent = other(random, g.second.extent());
            g.second = [Second::Axis, Second::Ordinal, Second::Dealt][random.below(3)](extent);
            format!("g{i} second {:?}", g.second)
        }
        12 => {
            let (i, g) = pick(random, &mut s.program.grids)?;
            let k = random.below(7);
            match &mut g.op {
                Op::MatVec(m) if k == 6 => m.own_input = !m.own_input,
                Op::MatVec(m) if k < 4 => m.rows = other(random, m.rows),
                Op::MatVec(m) => m.k = other(random, m.k),
                Op::Attention(a) => {
                    let fields = [
                        &mut a.heads_per_task,
                        &mut a.group,
                        &mut a.heads,
                        &mut a.head_dim,
                        &mut a.rotary,
                        &mut a.splits,
                        a.window.get_or_insert(4),
                    ];
                    let field = fields.into_iter().nth(k)?;
                    *field = other(random, *field);
                }
                Op::AttentionMerge { gate, .. } if k > 5 => *gate = !*gate,
                Op::AttentionMerge { head_dim, splits, heads_per_task, .. } => {
                    let field = [head_dim, splits, heads_per_task].into_iter().nth(k % 3)?;
                    *field = other(random, *field);
                }
                Op::Embed { everywhere, .. } | Op::NormAdd { everywhere, .. } if k > 3 => *everywhere = !*everywhere,
                Op::NormAdd { width, .. } => *width = other(random, *width),
                Op::Embed { scale, .. } | Op::Join { scale } => *scale = [f32::NAN, f32::INFINITY, 2.0][k % 3],
                Op::Route(route) if k < 3 => route.experts = other(random, route.experts),
                Op::Route(route) => route.top_k = other(random, route.top_k),
                Op::Mix(mix) => {
                    let Mix { key_heads, value_heads, key_dim, value_dim, kernel, .. } = mix;
                    let field = [key_heads, value_heads, key_dim, value_dim, kernel].into_iter().nth(k % 5)?;
                    *field = other(random, *field);
                }
                Op::Convolve(convolve) if k < 3 => convolve.channels = other(random, convolve.channels),
                Op::Convolve(convolve) => convolve.kernel = other(random, convolve.kernel),
                Op::Scan(scan) => {
                    let Scan { heads, head_dim, groups, state, kernel, .. } = scan;
                    let field = [heads, head_dim, groups, state, kernel].into_iter().nth(k % 5)?;
                    *field = other(random, *field);
                }
                Op::GroupNorm(GroupNorm { width, groups, .. }) => {
                    let field = [width, groups].into_iter().nth(k % 2)?;
                    *field = other(random, *field);
                }
                Op::Combine(combine) if k < 3 => combine.width = other(random, combine.width),
                Op::Combine(combine) if k < 6 => combine.slots = other(random, combine.slots),
                Op::Combine(combine) => combine.shared = combine.shared.is_none().then_some(1.0),
                Op::Select | Op::Report => g.op = Op::Select,
            }
            format!("g{i} op {:?}", g.op)
        }
        13 => {
            let (i, g) = pick(random, &mut s.program.grids)?;
            let (_, o) = pick(random, &mut g.operands)?;
            let c = &mut o.cols;
            let k = random.below(6);
            let field = [&mut c.base, &mut c.stride, &mut c.div, &mut c.stride_j, &mut c.len, &mut c.limit];
            let field = field.into_iter().nth(k)?;
            *field = other(random, *field);
            format!("g{i} {} cols {:?}", o.role.name(), o.cols)
        }
        14 => {
            let (i, g) = pick(random, &mut s.program.grids)?;
            let (_, o) = pick(random, &mut g.operands)?;
            match random.below(5) {
                0 => o.role = Role::ALL[random.below(Role::ALL.len())],
                1 => o.access = [Access::Read, Access::Write, Access::Update, Access::Stream][random.below(4)],
                2 => o.rows = Rows::ALL[random.below(5)],
                3 => o.cols.first = !o.cols.first,
                _ => o.cols.only_j = [None, Some(0), Some(1), Some(9)][random.below(4)],
            }
            format!("g{i} operand {o:?}")
        }
        15 => {
            let buffers = s.program.buffers.len() as u32;
            let (i, g) = pick(random, &mut s.program.grids)?;
            let (_, o) = pick(random, &mut g.operands)?;
            o.buffer = BufferId(random.below(buffers as usize + 1) as u32);
            format!("g{i} {} {}", o.role.name(), o.buffer)
        }
        16 => {
            let (i, t) = pick(random, &mut s.regimes[r].tasks)?;
            let field = [&mut t.lo, &mut t.hi, &mut t.j, &mut t.grid.0].into_iter().nth(random.below(4))?;
            *field = other(random, *field);
            format!("r{r} t{i} {t:?}")
        }
        17 => {
            let (i, t) = pick(random, &mut s.regimes[r].tasks)?;
            let (_, w) = pick(random, &mut t.waits)?;
            if random.below(2) == 0 {
                w.count = other(random, w.count);
            } else {
                w.event = EventId(other(random, w.event.0));
            }
            format!("r{r} t{i} wait {w:?}")
        }
        18 => {
            let (i, t) = pick(random, &mut s.regimes[r].tasks)?;
            if random.below(2) == 0 {
                t.signals.pop();
            } else {
                t.signals.push(EventId(random.below(30) as u32));
            }
            format!("r{r} t{i} signals {:?}", t.signals)
        }
        19 => {
            let (i, e) = pick(random, &mut s.regimes[r].events)?;
            let field = [&mut e.lo, &mut e.hi, &mut e.count, &mut e.buffer.0].into_iter().nth(random.below(4))?;
            *field = other(random, *field);
            format!("r{r} e{i} {e:?}")
        }
        20 => {
            let (i, e) = pick(random, &mut s.regimes[r].events)?;
            match random.below(3) {
                0 => e.carried = !e.carried,
                1 => e.proxy = !e.proxy,
                _ => e.mechanism = Mechanism::ALL[random.below(3)],
            }
            format!("r{r} e{i} {e:?}")
        }
        21 => {
            let tasks = s.regimes[r].tasks.len();
            let (i, q) = pick(random, &mut s.regimes[r].queues)?;
            match random.below(3) {
                0 => drop(q.pop()),
                1 => q.push(TaskId(random.below(tasks + 1) as u32)),
                _ => {
                    let (a, b) = (random.below(q.len()), random.below(q.len()));
                    q.swap(a, b);
                }
            }
            format!("r{r} queue {i} {q:?}")
        }
        22 => {
            let (i, stream) = pick(random, &mut s.regimes[r].streams)?;
            let (_, run) = pick(random, stream)?;
            match &mut run.source {
                _ if random.below(4) == 0 => run.task = TaskId(random.below(70) as u32),
                Source::Units { buffer, lo, hi } => match random.below(3) {
                    0 => *buffer = BufferId(other(random, buffer.0)),
                    1 => *lo = other(random, *lo),
                    _ => *hi = other(random, *hi),
                },
                Source::History { rows } => *rows = other(random, *rows),
            }
            format!("r{r} stream {i} {run:?}")
        }
        _ => {
            let (i, t) = pick(random, &mut s.regimes[r].tasks)?;
            if random.below(2) == 0 {
                t.waits.pop();
            } else {
                t.grid = GridId(random.below(20) as u32);
            }
            format!("r{r} t{i} {t:?}")
        }
    };
    Some(said)
}

#[test]
fn no_number_makes_the_proof_panic() {
    let (base, target) = toy();
    let mut random = Random(7);
    let mut rejected = 0;
    for round in 0..10_000 {
        let mut s = base.clone();
        let said: Vec<String> = (0..1 + random.below(3)).filter_map(|_| scramble(&mut s, &mut random)).collect();
        let violations = check(&s, &target);
        rejected += u32::from(!violations.is_empty());
        for v in &violations {
            assert!(!v.message.is_empty(), "round {round}, {said:?}: {v}");
        }
    }
    // Most numbers matter; a proof that ignored some would accept more.
    assert!(rejected > 9_000, "only {rejected} of 10000 are rejected");
}
