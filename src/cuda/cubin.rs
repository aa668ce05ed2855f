//! Owns the costs of a cubin, read without NVIDIA's tools: registers, stack, shared memory, spills and code of each kernel.
//!
//! A cubin is an ELF file of machine `EM_CUDA`. Spilled bytes and shared memory without the driver's own share come from
//! the `ptxas -v` log; all else from sections (`.text.K`) and attributes (`.nv.info`, `.nv.info.K`). The attribute codes
//! are not documented: they are those that agree with `cuobjdump --dump-resource-usage` from sm_75 to sm_120a. What both
//! sources tell is compared.

use std::collections::BTreeMap;

use object::elf::{EM_CUDA, FileHeader64, SHT_SYMTAB};
use object::read::SymbolIndex;
use object::read::elf::{FileHeader, SectionHeader, SectionTable, Sym, SymbolTable};
use object::{Endianness, elf};
use serde::{Deserialize, Serialize};

use crate::error::Fault;

/// Costs of the kernels of one cubin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    pub kernels: BTreeMap<String, KernelResources>,
}

/// Costs of one kernel. Registers and stack are per thread, shared memory and barriers per block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelResources {
    pub registers: u32,
    /// Local memory of the deepest call: spills, local arrays, call frames.
    pub stack_bytes: u32,
    /// Bytes stored by spilling, the functions that it calls included.
    pub spill_store_bytes: u32,
    pub spill_load_bytes: u32,
    /// Shared memory declared with a size, without the 1024 bytes that the driver keeps from sm_90 on.
    pub smem_static_bytes: u32,
    /// Named barriers (`bar.sync N`): the highest number used, plus one.
    pub barriers: u32,
    /// Machine code, the functions that it calls included.
    pub code_bytes: u64,
    /// Size of all kernel parameters.
    pub parameter_bytes: u32,
    /// Threads per block that `__launch_bounds__` allows.
    pub threads_max: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CubinError {
    #[error("the cubin is malformed in {place}: {reason}")]
    Malformed { place: String, reason: String },
    #[error("expected a cubin (ELF machine 190), found ELF machine {machine}")]
    NotCubin { machine: u16 },
    #[error("the cubin holds no kernel")]
    NoKernel,
    #[error("the `ptxas -v` log does not report kernel `{kernel}`")]
    NotInLog { kernel: String },
    #[error("expected `{expected}` in the `ptxas -v` log, found `{line}`")]
    LogLine { expected: &'static str, line: String },
    #[error("kernel `{kernel}` has {in_cubin} {what} by the cubin, {in_log} by the `ptxas -v` log")]
    Disagree { kernel: String, what: &'static str, in_cubin: u32, in_log: u32 },
}

impl From<CubinError> for Fault {
    fn from(error: CubinError) -> Fault {
        Fault::internal(error.to_string()).with_remedy("a compiler that monobloc does not know yet may cause this")
    }
}

/// Reads the costs of every kernel, from the cubin and from the log of the same compilation.
pub fn read(cubin: &[u8], log: &str) -> Result<Resources, CubinError> {
    let in_cubin = read_elf(cubin)?;
    if in_cubin.is_empty() {
        return Err(CubinError::NoKernel);
    }
    let mut in_log = read_log(log)?;
    let mut kernels = BTreeMap::new();
    for (kernel, elf) in in_cubin {
        let log = in_log.remove(&kernel).ok_or_else(|| CubinError::NotInLog { kernel: kernel.clone() })?;
        for (what, in_cubin, in_log) in
            [("registers", elf.registers, log.registers), ("barriers", elf.barriers, log.barriers)]
        {
            if in_cubin != in_log {
                return Err(CubinError::Disagree { kernel, what, in_cubin, in_log });
            }
        }
        let resources = KernelResources {
            registers: elf.registers,
            stack_bytes: elf.stack_bytes,
            spill_store_bytes: log.spill_store_bytes,
            spill_load_bytes: log.spill_load_bytes,
            smem_static_bytes: log.smem_static_bytes,
            barriers: elf.barriers,
            code_bytes: elf.code_bytes,
            parameter_bytes: elf.parameter_bytes,
            threads_max: elf.threads_max,
        };
        kernels.insert(kernel, resources);
    }
    Ok(Resources { kernels })
}

/// The assembler's note about itself: name, release, command line; strings joined with spaces.
///
/// `None` when the image is no cubin or holds no note (compilers before 12.8).
pub fn tool_note(cubin: &[u8]) -> Option<String> {
    let header = FileHeader64::<Endianness>::parse(cubin).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, cubin).ok()?;
    let (_, section) = sections.section_by_name(endian, b".note.nv.tkinfo")?;
    let bytes = section.data(endian, cubin).ok()?;
    let strings = bytes.split(|byte| !(b' '..=b'~').contains(byte)).filter(|string| string.len() > 1);
    Some(strings.map(String::from_utf8_lossy).collect::<Vec<_>>().join(" "))
}

#[derive(Debug, Default)]
struct InCubin {
    registers: u32,
    stack_bytes: u32,
    barriers: u32,
    code_bytes: u64,
    parameter_bytes: u32,
    threads_max: Option<u32>,
}

/// `STO_CUDA_ENTRY`: set in `st_other` of a symbol that the host may launch.
const SYMBOL_IS_KERNEL: u8 = 0x10;

/// Attribute codes of `.nv.info` sections (`EIATTR_*` in the output of `cuobjdump -elf`).
const ATTRIBUTE_MAX_THREADS: u8 = 0x05;
const ATTRIBUTE_MIN_STACK_SIZE: u8 = 0x12;
const ATTRIBUTE_PARAMETER_BYTES: u8 = 0x19;
const ATTRIBUTE_REGISTER_COUNT: u8 = 0x2f;
const ATTRIBUTE_BARRIER_COUNT: u8 = 0x4c;

/// Format byte of an attribute whose 16-bit value is the size of a payload that follows.
const FORMAT_SIZED: u8 = 4;

type Elf = FileHeader64<Endianness>;

fn malformed(place: impl Into<String>) -> impl FnOnce(object::read::Error) -> CubinError {
    let place = place.into();
    move |error| CubinError::Malformed { place, reason: error.to_string() }
}

fn read_elf(cubin: &[u8]) -> Result<BTreeMap<String, InCubin>, CubinError> {
    let header = Elf::parse(cubin).map_err(malformed("the ELF header"))?;
    let endian = header.endian().map_err(malformed("the ELF header"))?;
    if header.e_machine(endian) != EM_CUDA {
        return Err(CubinError::NotCubin { machine: header.e_machine(endian).0 });
    }
    let sections = header.sections(endian, cubin).map_err(malformed("the section table"))?;
    let symbols = sections.symbols(endian, cubin, SHT_SYMTAB).map_err(malformed("the symbol table"))?;

    let mut kernels = BTreeMap::new();
    for symbol in symbols.iter().filter(|s| s.st_type() == elf::STT_FUNC && s.st_other().0 & SYMBOL_IS_KERNEL != 0) {
        let name = symbol.name(endian, symbols.strings()).map_err(malformed("a symbol name"))?;
        kernels.insert(String::from_utf8_lossy(name).into_owned(), InCubin::default());
    }
    for section in sections.iter() {
        read_section(&mut kernels, cubin, endian, &sections, &symbols, section)?;
    }
    Ok(kernels)
}

fn read_section<'data>(
    kernels: &mut BTreeMap<String, InCubin>,
    cubin: &'data [u8],
    endian: Endianness,
    sections: &SectionTable<'data, Elf>,
    symbols: &SymbolTable<'data, Elf>,
    section: &'data elf::SectionHeader64<Endianness>,
) -> Result<(), CubinError> {
    let name = sections.section_name(endian, section).map_err(malformed("a section name"))?;
    let name = String::from_utf8_lossy(name);
    if let Some(kernel) = name.strip_prefix(".text.").and_then(|kernel| kernels.get_mut(kernel)) {
        kernel.code_bytes = section.sh_size(endian);
    } else if name == ".nv.info" {
        let data = section.data(endian, cubin).map_err(malformed(&*name))?;
        for attribute in attributes(&name, data)? {
            // The payload is a pair: symbol index, value.
            let (Some(index), Some(value)) = (attribute.word(0), attribute.word(1)) else { continue };
            let Ok(symbol) = symbols.symbol(SymbolIndex(index as usize)) else { continue };
            let symbol = symbol.name(endian, symbols.strings()).map_err(malformed("a symbol name"))?;
            let Some(kernel) = kernels.get_mut(&*String::from_utf8_lossy(symbol)) else { continue };
            match attribute.code {
                ATTRIBUTE_REGISTER_COUNT => kernel.registers = value,
                ATTRIBUTE_MIN_STACK_SIZE => kernel.stack_bytes = value,
                _ => {}
            }
        }
    } else if let Some(kernel) = name.strip_prefix(".nv.info.").and_then(|kernel| kernels.get_mut(kernel)) {
        let data = section.data(endian, cubin).map_err(malformed(&*name))?;
        for attribute in attributes(&name, data)? {
            match attribute.code {
                ATTRIBUTE_PARAMETER_BYTES => kernel.parameter_bytes = u32::from(attribute.value),
                ATTRIBUTE_BARRIER_COUNT => kernel.barriers = u32::from(attribute.value & 0xff),
                ATTRIBUTE_MAX_THREADS => {
                    let sides = [attribute.word(0), attribute.word(1), attribute.word(2)];
                    kernel.threads_max = sides.into_iter().try_fold(1_u32, |product, side| product.checked_mul(side?));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// One entry of an attribute section: format byte, code byte, 16-bit value, and a payload for `FORMAT_SIZED`.
struct Attribute<'data> {
    code: u8,
    value: u16,
    payload: &'data [u8],
}

impl Attribute<'_> {
    fn word(&self, index: usize) -> Option<u32> {
        let bytes = self.payload.get(index * 4..index * 4 + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}

fn attributes<'data>(section: &str, mut data: &'data [u8]) -> Result<Vec<Attribute<'data>>, CubinError> {
    let mut attributes = vec![];
    while let [format, code, low, high, rest @ ..] = data {
        let value = u16::from_le_bytes([*low, *high]);
        let payload_bytes = if *format == FORMAT_SIZED { usize::from(value) } else { 0 };
        let Some((payload, rest)) = rest.split_at_checked(payload_bytes) else {
            let reason = format!("attribute {code:#04x} wants {payload_bytes} bytes, {} are left", rest.len());
            return Err(CubinError::Malformed { place: section.to_owned(), reason });
        };
        attributes.push(Attribute { code: *code, value, payload });
        data = rest;
    }
    Ok(attributes)
}

#[derive(Debug, Default)]
struct InLog {
    registers: u32,
    barriers: u32,
    smem_static_bytes: u32,
    spill_store_bytes: u32,
    spill_load_bytes: u32,
}

/// Reads the `ptxas -v` report. A kernel's part starts at `Compiling entry function` and holds its callees.
fn read_log(log: &str) -> Result<BTreeMap<String, InLog>, CubinError> {
    let mut kernels: BTreeMap<String, InLog> = BTreeMap::new();
    let mut current = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let expected = "Compiling entry function 'NAME' for 'ARCH'";
            let (name, _) = rest.split_once('\'').ok_or_else(|| log_line(expected, line))?;
            current = Some(kernels.entry(name.to_owned()).or_default());
        }
        let Some(kernel) = current.as_deref_mut() else { continue };
        if line.contains("bytes spill stores") {
            let expected = "N bytes spill stores, N bytes spill loads";
            let spilled = |what| number_before(line, what).ok_or_else(|| log_line(expected, line));
            kernel.spill_store_bytes = kernel.spill_store_bytes.saturating_add(spilled(" bytes spill stores")?);
            kernel.spill_load_bytes = kernel.spill_load_bytes.saturating_add(spilled(" bytes spill loads")?);
        } else if let Some((_, used)) = line.split_once(": Used ") {
            let expected = "Used N registers, used N barriers";
            kernel.registers = number_before(used, " registers").ok_or_else(|| log_line(expected, line))?;
            // Both are left out by compilers that have nothing to tell.
            kernel.barriers = number_before(used, " barriers").unwrap_or(0);
            kernel.smem_static_bytes = number_before(used, " bytes smem").unwrap_or(0);
        }
    }
    Ok(kernels)
}

fn log_line(expected: &'static str, line: &str) -> CubinError {
    CubinError::LogLine { expected, line: line.to_owned() }
}

/// The number that ends right before `what`: 12 in `used 12 barriers` for ` barriers`.
fn number_before(line: &str, what: &str) -> Option<u32> {
    let (before, _) = line.split_once(what)?;
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
kernel.cu(3): warning #177-D: variable \"x\" was declared but never referenced
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     232 bytes stack frame, 228 bytes spill stores, 224 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 232 bytes cumulative stack size, 400 bytes smem
ptxas info    : Function properties for callee
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 6 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 1 registers, used 0 barriers";

    #[test]
    fn the_log_is_read_per_kernel_with_its_callees() {
        let kernels = read_log(LOG).unwrap();
        let first = &kernels["first"];
        assert_eq!((first.registers, first.barriers, first.smem_static_bytes), (255, 3, 400));
        assert_eq!((first.spill_store_bytes, first.spill_load_bytes), (232, 230));
        let second = &kernels["second"];
        assert_eq!((second.registers, second.spill_store_bytes, second.smem_static_bytes), (1, 0, 0));
    }

    #[test]
    fn a_log_line_without_its_number_is_named() {
        let log = "x Compiling entry function 'k' for 'sm_90'\nptxas info : Used many registers";
        let error = read_log(log).unwrap_err().to_string();
        assert_eq!(
            error,
            "expected `Used N registers, used N barriers` in the `ptxas -v` log, \
             found `ptxas info : Used many registers`"
        );
    }

    #[test]
    fn an_image_that_is_no_cubin_is_refused() {
        assert!(matches!(read(b"", ""), Err(CubinError::Malformed { .. })));
        assert!(matches!(read(&[0x7f; 4096], ""), Err(CubinError::Malformed { .. })));
        let this_test = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(matches!(read(&this_test, ""), Err(CubinError::NotCubin { .. })));
        assert_eq!(tool_note(&this_test), None);
    }

    #[test]
    fn an_attribute_longer_than_its_section_is_refused() {
        assert_eq!(attributes(".nv.info", &[4, 0x2f, 4, 0, 1, 2, 3, 4]).unwrap().len(), 1);
        let error = attributes(".nv.info", &[4, 0x2f, 8, 0, 1, 2, 3, 4]).err().unwrap();
        assert_eq!(error.to_string(), "the cubin is malformed in .nv.info: attribute 0x2f wants 8 bytes, 4 are left");
    }
}
