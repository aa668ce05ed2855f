//! The CUDA side: finding and calling NVRTC, reading cubins, driving a device. The only module with `unsafe`.

pub mod arch;
pub mod cubin;
pub mod nvrtc;
