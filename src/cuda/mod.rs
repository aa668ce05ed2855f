//! The CUDA side: finding and calling NVRTC, reading cubins, driving a device. Most of the crate's `unsafe`
//! is here; `tests/it/tidy.rs` lists the few files beside it.
//!
//! `nvrtc` and `cubin` run on any machine that has the compiler library. The rest needs a driver, loads it when it is
//! first used, and says `NoDriverLib` if there is none. Only `kernel` and the files that launch kernels of schedules (`session` and
//! `one_row` for one row, `rows` and `turns` for several, `waves`) know schedules: they upload the tables of a proven one. `sampler`
//! chooses tokens from the logits that a launch leaves, `states` copies recurrent states between launches. The other files take source and bytes, and give bytes and numbers.
//!
//! No CUDA library is linked. Libraries are loaded at first use, and a missing one is an ordinary error.

mod api;
pub mod arch;
pub mod calibrate;
pub mod cubin;
pub mod driver;
mod given;
mod kernel;
pub mod links;
pub mod memory;
pub mod module;
pub mod nvml;
pub mod nvrtc;
pub mod one_row;
mod peers;
pub mod rows;
mod rows_peers;
pub mod sampler;
pub mod self_test;
pub mod session;
pub mod staging;
pub mod states;
mod step_memory;
pub mod stream;
mod tables;
mod tensor_map;
pub mod turns;
pub mod waves;
