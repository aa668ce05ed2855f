//! Generated kernels: that each copy mechanism, with and without time stamps, is CUDA C++ that compiles cleanly.

use monobloc::candidate::Candidate;
use monobloc::codegen::emit::{ENTRY_POINT, Trace, emit};
use monobloc::cuda::cubin;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::target::Target;
use monobloc::validate::{Validated, validate};

use crate::nvrtc::nvrtc;
use crate::proof_support::{TOY, Toy};

fn proven(toy: &Toy, target: &Target) -> Validated {
    let candidate = Candidate::default_for(&toy.graph(), target, toy.precision);
    validate(toy.schedule(target, &candidate), target).unwrap_or_else(|rejected| panic!("{rejected}"))
}

/// Compiles without a warning and without a spill.
fn compiles(nvrtc: &Nvrtc, validated: &Validated, target: &Target, trace: Trace) {
    let source = emit(validated, target, trace);
    let compiled = nvrtc.compile(&source).unwrap_or_else(|error| panic!("{}, {trace:?}: {error}", target.name));
    assert!(!compiled.log.contains("warning"), "{}, {trace:?}: {}", target.name, compiled.log);
    let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
    let kernel = &resources.kernels[ENTRY_POINT];
    assert_eq!(kernel.spill_store_bytes, 0, "{}, {trace:?}: {kernel:?}", target.name);
}

#[test]
fn every_copy_mechanism_compiles_with_and_without_stamps() {
    let Some(nvrtc) = nvrtc("every_copy_mechanism_compiles_with_and_without_stamps") else { return };
    // Plain loads, cp.async and bulk copies; fp32 products and tensor cores.
    for (name, trace) in [("t4", Trace::On), ("a100", Trace::On), ("h200", Trace::Off), ("h200", Trace::On)] {
        let target = Target::builtin(name).unwrap();
        compiles(nvrtc, &proven(&TOY, &target), &target, trace);
    }
}
