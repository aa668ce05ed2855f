//! Tests compiling with NVRTC: every architecture with a built-in record, the faults a user can meet, and determinism.
//!
//! Without NVRTC these tests say so and pass; with `MONOBLOC_REQUIRE_NVRTC=1` they fail.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use monobloc::codegen::KernelSource;
use monobloc::cuda::arch::Arch;
use monobloc::cuda::calibrate;
use monobloc::cuda::cubin;
use monobloc::cuda::nvrtc::{Nvrtc, NvrtcError};
use monobloc::error::{Fault, Tier};
use monobloc::target::CopyMechanism;

use super::skipped;

/// The library that `MONOBLOC_NVRTC` names, or else the one in `target/nvrtc`, or else any that is found.
pub fn nvrtc(test: &str) -> Option<&'static Nvrtc> {
    static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    let loaded = NVRTC.get_or_init(|| {
        let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/nvrtc");
        let is_named = std::env::var_os("MONOBLOC_NVRTC").is_some();
        let found = if is_named { Nvrtc::load() } else { Nvrtc::load_at(&installed).or_else(|_| Nvrtc::load()) };
        found.map_err(|error| Fault::from(error).to_string())
    });
    match loaded {
        Ok(nvrtc) => Some(nvrtc),
        Err(reason) if std::env::var_os("MONOBLOC_REQUIRE_NVRTC").is_some_and(|value| value == "1") => {
            panic!("`MONOBLOC_REQUIRE_NVRTC` is set, but {reason}")
        }
        Err(reason) => {
            skipped(test, "NVRTC", reason);
            None
        }
    }
}

/// A compiler that finds the same errors in less time ([`Nvrtc::quick`]), or `nvrtc` itself where there is none.
pub fn quick(nvrtc: &'static Nvrtc) -> &'static Nvrtc {
    static QUICK: OnceLock<Option<Nvrtc>> = OnceLock::new();
    QUICK.get_or_init(|| nvrtc.quick()).as_ref().unwrap_or(nvrtc)
}

/// Compiles without a warning.
pub fn compiles(nvrtc: &Nvrtc, source: &KernelSource, what: &str) {
    let compiled = nvrtc.compile(source).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(!compiled.log.contains("warning"), "{what}: {}", compiled.log);
}

fn source(arch: &str, text: &str) -> KernelSource {
    KernelSource { name: "test.cu".into(), text: text.into(), headers: vec![], arch: arch.into() }
}

const ARCHS: [&str; 7] = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// A kernel with known resources: 100 words of shared memory, barrier 3, 64 threads, 16 bytes of parameters, one called function.
const COSTS: &str = r#"
#include "costs.cuh"
__device__ __noinline__ int called(const int* p, int k) {
    int a[64];
    for (int i = 0; i < 64; i++) a[i] = p[i * k];
    int sum = 0;
    for (int i = 0; i < k; i++) sum += a[(i * p[i]) & 63];
    return sum;
}
extern "C" __global__ void __launch_bounds__(64) costs(int* p, int k) {
    __shared__ int s[WORDS];
    s[threadIdx.x] = called(p, k);
    asm volatile("bar.sync 3, 64;");
    p[threadIdx.x] = s[(threadIdx.x + 1) % 64];
}
extern "C" __global__ void nothing() {}
"#;

fn costs(arch: &str) -> KernelSource {
    KernelSource { headers: vec![("costs.cuh".into(), "#define WORDS 100\n".into())], ..source(arch, COSTS) }
}

#[test]
fn every_architecture_compiles_and_reports_its_costs() {
    let Some(nvrtc) = nvrtc("every_architecture_compiles_and_reports_its_costs") else { return };
    for arch in ARCHS {
        let compiled = nvrtc.compile(&costs(arch)).unwrap_or_else(|error| panic!("{arch}: {error}"));
        let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap_or_else(|error| panic!("{arch}: {error}"));
        assert_eq!(resources.kernels.keys().collect::<Vec<_>>(), ["costs", "nothing"], "{arch}");
        let costs = &resources.kernels["costs"];
        assert_eq!((costs.smem_static_bytes, costs.barriers), (400, 4), "{arch}");
        assert_eq!((costs.parameter_bytes, costs.threads_max), (12, Some(64)), "{arch}");
        assert!((8..=255).contains(&costs.registers), "{arch}: {costs:?}");
        // The array of the called function is indexed by data, so it lives in local memory.
        assert!((256..1024).contains(&costs.stack_bytes), "{arch}: {costs:?}");
        assert_eq!(costs.spill_store_bytes, 0, "{arch}");
        let nothing = &resources.kernels["nothing"];
        assert!(nothing.code_bytes > 0 && nothing.code_bytes < costs.code_bytes, "{arch}");
        assert_eq!((nothing.barriers, nothing.stack_bytes, nothing.threads_max), (0, 0, None), "{arch}");
    }
}

#[test]
fn the_self_test_compiles_for_every_architecture() {
    let Some(nvrtc) = nvrtc("the_self_test_compiles_for_every_architecture") else { return };
    for arch in ARCHS {
        let compiled = nvrtc.compile(&source(arch, include_str!("../../src/cuda/self_test.cu")));
        let compiled = compiled.unwrap_or_else(|error| panic!("{arch}: {error}"));
        assert!(!compiled.log.contains("warning"), "{arch}: {}", compiled.log);
        let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
        assert!(resources.kernels.values().all(|kernel| kernel.stack_bytes == 0), "{arch}: {resources:?}");
    }
}

#[test]
fn the_calibration_compiles_for_every_architecture_and_copy_mechanism() {
    let Some(nvrtc) = nvrtc("the_calibration_compiles_for_every_architecture_and_copy_mechanism") else { return };
    let all = [(CopyMechanism::Plain, 0), (CopyMechanism::CpAsync, 80), (CopyMechanism::Bulk, 90)];
    for (arch, (copy, from)) in ARCHS.iter().flat_map(|arch| all.map(|copy| (*arch, copy))) {
        let number: u32 = arch.trim_start_matches("sm_").trim_end_matches('a').parse().unwrap();
        if number < from {
            continue;
        }
        let compiled =
            nvrtc.compile(&calibrate::source(copy, arch, 12)).unwrap_or_else(|error| panic!("{arch}: {error}"));
        assert!(!compiled.log.contains("warning"), "{arch}, {copy}: {}", compiled.log);
        let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
        assert!(resources.kernels.values().all(|kernel| kernel.stack_bytes == 0), "{arch}, {copy}: {resources:?}");
    }
}

#[test]
fn spills_are_counted() {
    let Some(nvrtc) = nvrtc("spills_are_counted") else { return };
    // 96 loaded values are live across a barrier, and with 1024 threads each has only 64 registers.
    let text = r#"
extern "C" __global__ void __launch_bounds__(1024, 1) spills(float* p) {
    float v[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) v[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) p[i * 1024 + 1023 - threadIdx.x] = v[i] * v[(i * 37 + 11) % 96];
}"#;
    let compiled = nvrtc.compile(&source("sm_90a", text)).unwrap();
    let resources = cubin::read(&compiled.cubin, &compiled.log).unwrap();
    let spills = &resources.kernels["spills"];
    assert!(spills.registers <= 64, "{spills:?}");
    assert!(spills.spill_store_bytes > 0 && spills.spill_load_bytes >= spills.spill_store_bytes, "{spills:?}");
    // Stack slots are reused, so the stack may be smaller than the stores.
    assert!(spills.stack_bytes > 0, "{spills:?}");
}

#[test]
fn the_same_source_gives_the_same_bytes_from_any_thread() {
    let Some(nvrtc) = nvrtc("the_same_source_gives_the_same_bytes_from_any_thread") else { return };
    let alone: Vec<_> = ARCHS.iter().map(|arch| nvrtc.compile(&costs(arch)).unwrap()).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = ARCHS.iter().map(|arch| scope.spawn(|| nvrtc.compile(&costs(arch)).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    let other_name = KernelSource { name: "other.cu".into(), ..costs("sm_90a") };
    assert_eq!(nvrtc.compile(&other_name).unwrap().cubin, alone[4].cubin);
    let other_header = KernelSource { headers: vec![("costs.cuh".into(), "#define WORDS 101\n".into())], ..other_name };
    assert_ne!(nvrtc.compile(&other_header).unwrap().cubin, alone[4].cubin);
}

/// The test of [`Nvrtc::quick`]: it compiles other code with the same errors, and what the whole compiler makes stays the same.
#[test]
fn a_quick_compiler_changes_nothing_of_the_whole_one() {
    let Some(nvrtc) = nvrtc("a_quick_compiler_changes_nothing_of_the_whole_one") else { return };
    let whole = nvrtc.compile(&costs("sm_90a")).unwrap();
    let Some(quick) = nvrtc.quick() else {
        return skipped("a_quick_compiler_changes_nothing_of_the_whole_one", "NVRTC", "there is no other build of it");
    };
    assert_ne!(quick.path(), nvrtc.path());
    assert_ne!(quick.compile(&costs("sm_90a")).unwrap().cubin, whole.cubin);
    for text in ["int x = ;", "asm volatile(\"no.instruction;\");", "static_assert(sizeof(int) == 8);"] {
        let wrong = source("sm_90a", &format!("extern \"C\" __global__ void k() {{\n  {text}\n}}"));
        let [expected, found] = [nvrtc, &quick].map(|nvrtc| nvrtc.compile(&wrong).unwrap_err());
        assert!(matches!(expected, NvrtcError::Compile { .. }), "{text}: {expected}");
        assert!(matches!(found, NvrtcError::Compile { .. }), "{text}: {found}");
    }
    assert_eq!(nvrtc.compile(&costs("sm_90a")).unwrap().cubin, whole.cubin);
}

#[test]
fn a_compile_error_is_our_fault_and_shows_the_line() {
    let Some(nvrtc) = nvrtc("a_compile_error_is_our_fault_and_shows_the_line") else { return };
    let error = nvrtc.compile(&source("sm_90a", "extern \"C\" __global__ void k() {\n  int x = ;\n}")).unwrap_err();
    let fault = Fault::from(error);
    assert_eq!(fault.tier, Tier::Internal);
    assert!(fault.message.starts_with("kernel `test.cu` does not compile for `sm_90a`:\n"), "{fault}");
    assert!(fault.message.contains("test.cu(2): error: expected an expression"), "{fault}");
}

#[test]
fn a_header_that_was_not_given_is_not_read_from_disk() {
    let Some(nvrtc) = nvrtc("a_header_that_was_not_given_is_not_read_from_disk") else { return };
    let error =
        nvrtc.compile(&source("sm_90a", "#include <stdint.h>\nextern \"C\" __global__ void k() {}")).unwrap_err();
    assert!(error.to_string().contains("stdint.h"), "{error}");
}

#[test]
fn architectures_that_cannot_work_are_refused_by_name() {
    let Some(nvrtc) = nvrtc("architectures_that_cannot_work_are_refused_by_name") else { return };
    let text = "extern \"C\" __global__ void k() {}";
    // NVRTC itself accepts a virtual architecture and returns nothing.
    let error = nvrtc.compile(&source("compute_90", text)).unwrap_err();
    assert_eq!(error.to_string(), "expected an architecture like `sm_90a`, found `compute_90`");
    let fault = Fault::from(nvrtc.compile(&source("sm_70", text)).unwrap_err());
    assert_eq!(fault.tier, Tier::Environment);
    assert!(fault.message.contains("does not compile for `sm_70`; it knows sm_75 "), "{fault}");
}

#[test]
fn text_with_a_nul_byte_is_refused() {
    let Some(nvrtc) = nvrtc("text_with_a_nul_byte_is_refused") else { return };
    let headers = vec![("a.cuh".to_owned(), "int x;\0".to_owned())];
    let error = nvrtc.compile(&KernelSource { headers, ..source("sm_90a", "") }).unwrap_err();
    assert_eq!(error.to_string(), "header `a.cuh` of kernel `test.cu` contains a NUL byte");
}

#[test]
fn the_identity_names_the_release() {
    let Some(nvrtc) = nvrtc("the_identity_names_the_release") else { return };
    let identity = nvrtc.identity();
    assert!(identity.version.patch.is_some(), "{identity:?}");
    assert!(identity.size_bytes > 1_000_000 && identity.modified_ns > 0, "{identity:?}");
    assert!(nvrtc.options(Arch::parse("sm_90a").unwrap()).contains(&"--gpu-architecture=sm_90a".to_owned()));
}

/// Runs this test again in a separate process, because a library that is already loaded cannot be missing.
#[test]
fn a_named_library_that_is_missing_is_not_replaced_by_another() {
    const CHILD: &str = "MONOBLOC_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        println!("{}", Fault::from(Nvrtc::load().unwrap_err()));
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "nvrtc::a_named_library_that_is_missing_is_not_replaced_by_another", "--nocapture"])
        .env(CHILD, "1")
        .env("MONOBLOC_NVRTC", "/no/such/folder")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = "the CUDA compiler library `libnvrtc` could not be loaded\n  \
        tried `/no/such/folder`: no `libnvrtc.so.*` there\n  \
        help: install it with `pip install nvidia-cuda-nvrtc==13.0.88`, \
        or set `MONOBLOC_NVRTC` to the library or its folder\n";
    assert!(text.contains(expected), "{text}");
}
