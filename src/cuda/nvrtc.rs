//! Owns NVRTC: finding the library, its identity, and the arrow from kernel source to cubin.
//!
//! The loader is our own, over `libloading`. A binding that picks the library by name would compile with whatever
//! `libnvrtc` the process happens to find first, and the version of the compiler is part of the cache key. Status codes
//! are plain integers, because a code that a newer library adds must not be an invalid enum value.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::UNIX_EPOCH;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

use super::arch::{Arch, ArchError};
use super::cubin;
use crate::codegen::KernelSource;
use crate::error::Fault;

/// The package the project is tested with; the remedy of a missing library names it too.
const PIP_PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";

/// Names a library file, or a folder that holds one. When it is set, nothing else is tried.
const LIBRARY_VARIABLE: &str = "MONOBLOC_NVRTC";

/// Where the library lies below a folder that a person would name: itself, a `pip --target` folder, a toolkit.
const LIBRARY_FOLDERS: [&str; 5] = ["", "nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "lib64", "lib"];
/// Result of a compilation: an ELF image for the driver, and the compiler's messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// Warnings and the `ptxas -v` report, without its timings, so that the same source gives the same log.
    pub log: String,
}

/// Which compiler it is. The text form, `13.0.88`, is what keys and trials hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NvrtcVersion {
    pub major: u32,
    pub minor: u32,
    /// `nvrtcVersion` does not tell it, so it is read from a cubin; `None` where a cubin does not note it.
    pub patch: Option<u32>,
}

impl NvrtcVersion {
    /// Reads the text form.
    pub fn parse(text: &str) -> Option<NvrtcVersion> {
        let mut parts = text.splitn(3, '.');
        let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let patch = parts.next().map(|patch| patch.parse().ok());
        Some(NvrtcVersion { major, minor, patch: patch.map_or(Some(None), |patch| patch.map(Some))? })
    }
}

impl fmt::Display for NvrtcVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        self.patch.map_or(Ok(()), |patch| write!(f, ".{patch}"))
    }
}

/// The one option list of the project, part of the compile key. A function of its own, so that a key can be computed
/// without loading the library.
///
/// Fixed, because options such as `-Xptxas -v` reach the cubin: ptxas notes its command line in it.
pub fn options(version: NvrtcVersion, arch: Arch) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "-std=c++17".to_owned(),
        "-default-device".to_owned(),
        // Spilled bytes are reported nowhere else.
        "--ptxas-options=-v".to_owned(),
        // NVRTC would otherwise raise the stack limit of the whole process.
        "--modify-stack-limit=false".to_owned(),
    ];
    // Our cache is the only one; 12.9 is the first version that has another (NVRTC guide, "Caching").
    if (version.major, version.minor) >= (12, 9) {
        options.push("--no-cache".to_owned());
    }
    options
}

/// A place that was tried, and why it did not give a library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    pub place: PathBuf,
    pub reason: String,
}

#[derive(Debug, thiserror::Error)]
pub enum NvrtcError {
    #[error("the CUDA compiler library `libnvrtc` could not be loaded{}", listed(.tried))]
    NotFound { tried: Vec<Tried> },
    #[error(transparent)]
    Arch(#[from] ArchError),
    #[error("NVRTC {version} (`{}`) does not compile for `{arch}`; it knows {}", .library.display(), numbers(.supported))]
    ArchUnsupported { arch: Arch, version: NvrtcVersion, library: PathBuf, supported: BTreeSet<u32> },
    #[error("{what} of kernel `{kernel}` contains a NUL byte")]
    NulByte { kernel: String, what: String },
    #[error("kernel `{kernel}` does not compile for `{arch}`:\n{log}")]
    Compile { kernel: String, arch: Arch, log: String },
    /// Any other failing call: out of memory, a refused option, missing builtins.
    #[error("`{call}` of kernel `{kernel}` failed: {name} (code {code}){}", after_colon(.log))]
    Call { call: &'static str, kernel: String, code: i32, name: String, log: String },
    /// NVRTC reports success and no code at all for a virtual architecture.
    #[error("NVRTC gave an empty cubin for kernel `{kernel}`, `{arch}`")]
    EmptyCubin { kernel: String, arch: Arch },
}

fn listed(tried: &[Tried]) -> String {
    tried.iter().map(|t| format!("\n  tried `{}`: {}", t.place.display(), t.reason)).collect()
}

fn numbers(supported: &BTreeSet<u32>) -> String {
    supported.iter().map(|n| format!("sm_{n}")).collect::<Vec<_>>().join(" ")
}

fn after_colon(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!(":\n{log}") }
}

impl From<NvrtcError> for Fault {
    fn from(error: NvrtcError) -> Fault {
        let message = error.to_string();
        match error {
            NvrtcError::NotFound { .. } => Fault::environment(message).with_remedy(format!(
                "install it with `pip install {PIP_PACKAGE}`, or set `{LIBRARY_VARIABLE}` to the library or its folder"
            )),
            NvrtcError::ArchUnsupported { .. } => Fault::environment(message).with_remedy(format!(
                "install another version, for example `pip install {PIP_PACKAGE}`, and name it in `{LIBRARY_VARIABLE}`"
            )),
            NvrtcError::Call { .. } => Fault::environment(message).with_remedy(format!(
                "check the installation that `{LIBRARY_VARIABLE}` or `monobloc doctor` names; `pip install \
                 {PIP_PACKAGE}` is known to work"
            )),
            NvrtcError::Arch(_) => {
                Fault::input(message).with_remedy("write a real architecture in `arch` of the target record")
            }
            NvrtcError::NulByte { .. } | NvrtcError::Compile { .. } | NvrtcError::EmptyCubin { .. } => {
                Fault::internal(message).with_remedy("the source was generated by monobloc: please report it")
            }
        }
    }
}

type Program = *mut c_void;
type Status = c_int;
type Strings = *const *const c_char;
type SizeCall = unsafe extern "C" fn(Program, *mut usize) -> Status;
type BytesCall = unsafe extern "C" fn(Program, *mut c_char) -> Status;

/// Entry points of `nvrtc.h`, names without the `nvrtc` prefix.
#[derive(Clone, Copy)]
struct Api {
    create_program: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Strings, Strings) -> Status,
    compile_program: unsafe extern "C" fn(Program, c_int, Strings) -> Status,
    destroy_program: unsafe extern "C" fn(*mut Program) -> Status,
    program_log_size: SizeCall,
    program_log: BytesCall,
    cubin_size: SizeCall,
    cubin: BytesCall,
    ptx_size: SizeCall,
    ptx: BytesCall,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

/// How the file name of the other build begins, which NVIDIA ships beside `libnvrtc.so.N` for the sake of another allocator.
const ALTERNATIVE: &str = "libnvrtc.alt.so.";

/// `NVRTC_SUCCESS` and `NVRTC_ERROR_COMPILATION` of `nvrtc.h`.
const SUCCESS: Status = 0;
const ERROR_COMPILATION: Status = 6;

/// A loaded NVRTC. Compiles from any number of threads at once.
pub struct Nvrtc {
    api: Api,
    version: NvrtcVersion,
    path: PathBuf,
    supported: BTreeSet<u32>,
    is_quick: bool,
}

/// Identity of the library. The version goes into keys; the rest distinguishes two files of one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvrtcIdentity {
    pub version: NvrtcVersion,
    pub path: PathBuf,
    pub size_bytes: u64,
    /// Nanoseconds since 1970; 0 where the file system keeps none.
    pub modified_ns: u128,
}

impl Nvrtc {
    /// Loads the first library that works: `MONOBLOC_NVRTC`, or else a Python environment, a toolkit, the system.
    pub fn load() -> Result<Nvrtc, NvrtcError> {
        Nvrtc::load_first(&places(&|name| std::env::var_os(name)))
    }

    fn load_first(places: &[PathBuf]) -> Result<Nvrtc, NvrtcError> {
        let mut tried = vec![];
        for place in places {
            match Nvrtc::load_at(place) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(NvrtcError::NotFound { tried: more }) => tried.extend(more),
                Err(other) => return Err(other),
            }
        }
        Err(NvrtcError::NotFound { tried })
    }

    /// Loads from a file, from a folder, or (a bare file name) by the system's search.
    pub fn load_at(place: &Path) -> Result<Nvrtc, NvrtcError> {
        let refuse = |reason: String| NvrtcError::NotFound { tried: vec![Tried { place: place.to_owned(), reason }] };
        let is_bare_name = place.components().count() == 1 && !place.exists();
        let file = if is_bare_name || place.is_file() {
            place.to_owned()
        } else {
            library_in(place).ok_or_else(|| refuse("no `libnvrtc.so.*` there".to_owned()))?
        };
        let library = open(&file).map_err(&refuse)?;
        let file = if is_bare_name { mapped_path(&file).unwrap_or(file) } else { file };

        let (api, version, supported) = read_api(&library).map_err(&refuse)?;
        // The 13.0 wheel has no RPATH: unless its builtins are loaded already, the first compilation fails. A toolkit
        // finds them by itself, so their absence here is no fault.
        let is_alternative = file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(ALTERNATIVE));
        let kind = if is_alternative { ".alt" } else { "" };
        let builtins = file.with_file_name(format!("libnvrtc-builtins{kind}.so.{version}"));
        if builtins.is_file() {
            keep(open(&builtins).map_err(&refuse)?);
        }
        keep(library);
        let mut nvrtc = Nvrtc { api, version, path: file, supported, is_quick: false };
        // A library that loads and cannot compile (no builtins) must not hide the next place.
        nvrtc.version.patch = nvrtc.probe_patch().map_err(|error| refuse(error.to_string()))?;
        Ok(nvrtc)
    }

    /// A second compiler that optimises little and takes a third of the time: it finds the same errors of a text and of its PTX, but its
    /// registers and spills say nothing. `None` if this release has no such option, or no other build lies beside this one.
    ///
    /// It is another library because the option changes what later calls of the same library compile (seen with 13.0).
    pub fn quick(&self) -> Option<Nvrtc> {
        // NVRTC guide of 12.9, `--Ofast-compile`.
        if (self.version.major, self.version.minor) < (12, 9) {
            return None;
        }
        let name = self.path.file_name()?.to_str()?.replace("libnvrtc.so.", ALTERNATIVE);
        let other = self.path.with_file_name(name);
        let nvrtc = (other != self.path).then(|| Nvrtc::load_at(&other))?.ok()?;
        Some(Nvrtc { is_quick: true, ..nvrtc })
    }

    /// Compiles an empty kernel (30 ms) and reads the compiler's release from the note in its cubin.
    fn probe_patch(&self) -> Result<Option<u32>, NvrtcError> {
        let Some(lowest) = self.supported.first() else { return Ok(None) };
        let text = "extern \"C\" __global__ void probe() {}".to_owned();
        let source = KernelSource { name: "probe.cu".into(), text, headers: vec![], arch: format!("sm_{lowest}") };
        let compiled = self.compile(&source)?;
        let release = format!("V{}.{}.", self.version.major, self.version.minor);
        let note = cubin::tool_note(&compiled.cubin).unwrap_or_default();
        Ok(note
            .split_once(&release)
            .and_then(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()))
    }

    pub fn version(&self) -> NvrtcVersion {
        self.version
    }

    /// The library file; a bare name when the system found it and did not say where.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of the architectures it compiles for: 90 stands for `sm_90` and `sm_90a`.
    pub fn supported(&self) -> &BTreeSet<u32> {
        &self.supported
    }

    /// Version, path, size and time of the library file. Reads no more than its metadata.
    pub fn identity(&self) -> NvrtcIdentity {
        let metadata = std::fs::metadata(&self.path).ok();
        let modified = metadata.as_ref().and_then(|m| m.modified().ok()?.duration_since(UNIX_EPOCH).ok());
        NvrtcIdentity {
            version: self.version,
            path: self.path.clone(),
            size_bytes: metadata.map_or(0, |m| m.len()),
            modified_ns: modified.map_or(0, |m| m.as_nanos()),
        }
    }

    /// The options that this library is called with; see [`options`].
    pub fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = options(self.version, arch);
        if self.is_quick {
            options.push("--Ofast-compile=max".to_owned());
        }
        options
    }

    /// Compiles one translation unit to a cubin. Nothing is read from disk: headers come from the source alone.
    pub fn compile(&self, source: &KernelSource) -> Result<Compiled, NvrtcError> {
        let arch = Arch::parse(&source.arch)?;
        let (program, log) = self.compiled(source, arch, &self.options(arch))?;
        let cubin = self.fetch(&source.name, &program, ("nvrtcGetCUBIN", self.api.cubin_size, self.api.cubin))?;
        if cubin.is_empty() {
            return Err(NvrtcError::EmptyCubin { kernel: source.name.clone(), arch });
        }
        Ok(Compiled { cubin, log })
    }

    /// The PTX of one translation unit, with the options of [`Nvrtc::compile`] for the virtual architecture: what a reader of
    /// the memory model looks at, in less time than a cubin takes.
    pub fn ptx(&self, source: &KernelSource) -> Result<String, NvrtcError> {
        let arch = Arch::parse(&source.arch)?;
        let mut options = self.options(arch);
        options[0] = options[0].replace("=sm_", "=compute_");
        let (program, _) = self.compiled(source, arch, &options)?;
        let bytes = self.fetch(&source.name, &program, ("nvrtcGetPTX", self.api.ptx_size, self.api.ptx))?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    }

    /// The program of a translation unit after its compilation, and what the compiler said.
    fn compiled(
        &self,
        source: &KernelSource,
        arch: Arch,
        options: &[String],
    ) -> Result<(ProgramGuard<'_>, String), NvrtcError> {
        if !self.supported.contains(&arch.number()) {
            let (version, library, supported) = (self.version, self.path.clone(), self.supported.clone());
            return Err(NvrtcError::ArchUnsupported { arch, version, library, supported });
        }
        let kernel = &source.name;
        let c_string = |text: &str, what: &dyn Fn() -> String| {
            CString::new(text).map_err(|_| NvrtcError::NulByte { kernel: kernel.clone(), what: what() })
        };
        let text = c_string(&source.text, &|| "the text".to_owned())?;
        let name = c_string(&source.name, &|| "the name".to_owned())?;
        let mut header_names = vec![];
        let mut header_texts = vec![];
        for (header, text) in &source.headers {
            header_names.push(c_string(header, &|| format!("the name of header `{header}`"))?);
            header_texts.push(c_string(text, &|| format!("header `{header}`"))?);
        }
        let options: Vec<_> =
            options.iter().map(|option| c_string(option, &|| "an option".to_owned())).collect::<Result<_, _>>()?;

        let program = self.create(kernel, &text, &name, &header_names, &header_texts)?;
        let pointers = pointers(&options);
        // SAFETY: `program` is live until its guard drops; `pointers` holds `pointers.len()` NUL-terminated strings that
        // outlive the call.
        let status = unsafe { (self.api.compile_program)(program.handle, count(&pointers), pointers.as_ptr()) };
        let log = self.log(kernel, &program)?;
        match status {
            SUCCESS => Ok((program, log)),
            ERROR_COMPILATION => Err(NvrtcError::Compile { kernel: kernel.clone(), arch, log }),
            code => Err(self.failed("nvrtcCompileProgram", kernel, code, log)),
        }
    }

    fn create(
        &self,
        kernel: &str,
        text: &CStr,
        name: &CStr,
        header_names: &[CString],
        header_texts: &[CString],
    ) -> Result<ProgramGuard<'_>, NvrtcError> {
        let (names, texts) = (pointers(header_names), pointers(header_texts));
        let mut handle: Program = ptr::null_mut();
        // SAFETY: all strings are NUL-terminated and outlive the call, which copies them; both arrays have
        // `names.len()` entries.
        let status = unsafe {
            (self.api.create_program)(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                count(&names),
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if status != SUCCESS {
            return Err(self.failed("nvrtcCreateProgram", kernel, status, String::new()));
        }
        Ok(ProgramGuard { api: &self.api, handle })
    }

    fn log(&self, kernel: &str, program: &ProgramGuard<'_>) -> Result<String, NvrtcError> {
        let calls = ("nvrtcGetProgramLog", self.api.program_log_size, self.api.program_log);
        let bytes = self.fetch(kernel, program, calls)?;
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.trim_end_matches('\0').lines();
        Ok(lines.filter(|line| !line.contains("Compile time = ")).collect::<Vec<_>>().join("\n").trim().to_owned())
    }

    /// Reads a result that has a size call and a bytes call.
    fn fetch(
        &self,
        kernel: &str,
        program: &ProgramGuard<'_>,
        (call, size_call, bytes_call): (&'static str, SizeCall, BytesCall),
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut size_bytes = 0;
        // SAFETY: the program is live, and the call writes one `usize`.
        let status = unsafe { size_call(program.handle, &mut size_bytes) };
        if status != SUCCESS {
            return Err(self.failed(call, kernel, status, String::new()));
        }
        let mut bytes = vec![0; size_bytes];
        if size_bytes > 0 {
            // SAFETY: the program is live, and the buffer has exactly the size that the library asked for.
            let status = unsafe { bytes_call(program.handle, bytes.as_mut_ptr().cast()) };
            if status != SUCCESS {
                return Err(self.failed(call, kernel, status, String::new()));
            }
        }
        Ok(bytes)
    }

    fn failed(&self, call: &'static str, kernel: &str, code: Status, log: String) -> NvrtcError {
        // SAFETY: any code may be passed; the library answers with a static string, or null by its own fault.
        let name = unsafe { (self.api.error_string)(code) };
        let name = if name.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: checked for null; static and NUL-terminated by the contract of `nvrtcGetErrorString`.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        NvrtcError::Call { call, kernel: kernel.to_owned(), code, name, log }
    }
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).field("path", &self.path).finish_non_exhaustive()
    }
}

/// Destroys the program on every way out.
struct ProgramGuard<'a> {
    api: &'a Api,
    handle: Program,
}

impl Drop for ProgramGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from `nvrtcCreateProgram` and is destroyed once.
        unsafe { (self.api.destroy_program)(&mut self.handle) };
    }
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).collect()
}

fn count(pointers: &[*const c_char]) -> c_int {
    c_int::try_from(pointers.len()).unwrap_or(c_int::MAX)
}

/// Where to look, best first. Only the environment decides; nothing is opened here except folders being listed.
fn places(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(named) = folder(LIBRARY_VARIABLE) {
        return vec![named];
    }
    // The folders of `pip install`: the active environment, the prefix of the `python3` on PATH, the user's folder.
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| folder(name)).collect();
    let path = variable("PATH").unwrap_or_default();
    for python in std::env::split_paths(&path).map(|folder| folder.join("python3")).filter(|python| python.is_file()) {
        let real = python.canonicalize().unwrap_or_else(|_| python.clone());
        prefixes.extend([python, real].iter().filter_map(|p| Some(p.parent()?.parent()?.to_owned())));
    }
    prefixes.extend(folder("HOME").map(|home| home.join(".local")));
    prefixes.push("/usr/local".into());

    let mut places: Vec<PathBuf> = prefixes.iter().flat_map(|prefix| site_packages(prefix)).collect();
    places.extend(["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| folder(name)));
    places.push("/usr/local/cuda".into());
    places.extend(["libnvrtc.so.13", "libnvrtc.so.12"].map(PathBuf::from));
    let mut seen = BTreeSet::new();
    places.retain(|place| seen.insert(place.clone()));
    places
}

/// Package folders of a Python prefix that hold NVIDIA packages.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else { return vec![] };
    let mut pythons: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
        .collect();
    pythons.sort();
    pythons
        .iter()
        .flat_map(|python| ["site-packages", "dist-packages"].map(|packages| python.join(packages)))
        .filter(|packages| packages.join("nvidia").is_dir())
        .collect()
}

/// The library in a folder or in one of its usual subfolders: the highest `libnvrtc.so.N`.
fn library_in(folder: &Path) -> Option<PathBuf> {
    LIBRARY_FOLDERS.iter().find_map(|below| {
        let folder = folder.join(below);
        let entries = std::fs::read_dir(&folder).ok()?;
        let majors = entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_prefix("libnvrtc.so.")?.parse::<u32>().ok());
        majors.max().map(|major| folder.join(format!("libnvrtc.so.{major}")))
    })
}

fn open(file: &Path) -> Result<Library, String> {
    // SAFETY: runs the initialisers of a library that the user installed as NVRTC; that is what was asked for.
    unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_LOCAL) }
        // The reason that the system gives is only in the source of the error.
        .map_err(|error| error.source().map_or_else(|| error.to_string(), |source| source.to_string()))
}

/// Leaves the library loaded for the rest of the process: it keeps thread-local state, and `Api` holds its addresses.
fn keep(library: Library) {
    let _ = library.into_raw();
}

/// Where the system found a library that was opened by bare name.
fn mapped_path(name: &Path) -> Option<PathBuf> {
    let name = name.to_str()?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let mut found = paths.filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)));
    found.next().map(Path::to_owned)
}

fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: `read_api` gives each name the type that `nvrtc.h` declares for it.
    unsafe { library.get::<T>(name) }.map(|symbol| *symbol).map_err(|_| format!("it has no symbol `{name}`"))
}

fn read_api(library: &Library) -> Result<(Api, NvrtcVersion, BTreeSet<u32>), String> {
    let api = Api {
        create_program: symbol(library, "nvrtcCreateProgram")?,
        compile_program: symbol(library, "nvrtcCompileProgram")?,
        destroy_program: symbol(library, "nvrtcDestroyProgram")?,
        program_log_size: symbol(library, "nvrtcGetProgramLogSize")?,
        program_log: symbol(library, "nvrtcGetProgramLog")?,
        cubin_size: symbol(library, "nvrtcGetCUBINSize")?,
        cubin: symbol(library, "nvrtcGetCUBIN")?,
        ptx_size: symbol(library, "nvrtcGetPTXSize")?,
        ptx: symbol(library, "nvrtcGetPTX")?,
        error_string: symbol(library, "nvrtcGetErrorString")?,
    };
    let version_call: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status = symbol(library, "nvrtcVersion")?;
    let arch_count_call: unsafe extern "C" fn(*mut c_int) -> Status = symbol(library, "nvrtcGetNumSupportedArchs")?;
    let archs_call: unsafe extern "C" fn(*mut c_int) -> Status = symbol(library, "nvrtcGetSupportedArchs")?;
    let (mut major, mut minor, mut arch_count) = (0, 0, 0);
    // SAFETY: the calls write the integers they are given.
    let (version_status, count_status) =
        unsafe { (version_call(&mut major, &mut minor), arch_count_call(&mut arch_count)) };
    // No release knows more than a few dozen: a larger count is a broken library, not a reason to allocate.
    let arch_count = usize::try_from(arch_count).ok().filter(|count| (1..=1024).contains(count));
    let (Some(arch_count), SUCCESS, SUCCESS) = (arch_count, version_status, count_status) else {
        return Err("it does not tell its version and architectures".to_owned());
    };
    let mut archs = vec![0; arch_count];
    // SAFETY: the buffer has as many integers as the library said it writes.
    if unsafe { archs_call(archs.as_mut_ptr()) } != SUCCESS {
        return Err("it does not tell its architectures".to_owned());
    }
    let unsigned = |value: c_int| u32::try_from(value).unwrap_or(0);
    let version = NvrtcVersion { major: unsigned(major), minor: unsigned(minor), patch: None };
    Ok((api, version, archs.into_iter().map(unsigned).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places_with(variables: &[(&str, &Path)]) -> Vec<PathBuf> {
        places(&|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_os_str().to_owned()))
    }

    #[test]
    fn the_named_library_is_the_only_place() {
        let named = Path::new("/opt/somewhere");
        assert_eq!(places_with(&[(LIBRARY_VARIABLE, named), ("CUDA_HOME", Path::new("/opt/cuda"))]), [named]);
    }

    #[test]
    fn finds_where_pip_put_it_before_the_toolkit() {
        let prefix = tempfile::tempdir().unwrap();
        let packages = prefix.path().join("lib/python3.11/site-packages");
        std::fs::create_dir_all(packages.join("nvidia/cu13/lib")).unwrap();
        let places = places_with(&[("VIRTUAL_ENV", prefix.path()), ("CUDA_HOME", Path::new("/opt/cuda"))]);
        let index = |path: &Path| places.iter().position(|place| place == path).unwrap();
        assert!(index(&packages) < index(Path::new("/opt/cuda")));
        assert_eq!(places.last().unwrap(), Path::new("libnvrtc.so.12"));
    }

    #[test]
    fn takes_the_highest_major_and_no_alternative_build() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        assert_eq!(library_in(folder.path()), None);
        for name in ["libnvrtc.so", "libnvrtc.so.9", "libnvrtc.so.13", "libnvrtc.so.13.0.88", "libnvrtc.alt.so.14"] {
            std::fs::write(lib.join(name), "").unwrap();
        }
        assert_eq!(library_in(folder.path()).unwrap(), lib.join("libnvrtc.so.13"));
    }

    #[test]
    fn a_missing_library_says_what_was_tried_and_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("libnvrtc.so.13");
        std::fs::write(&broken, "not a library").unwrap();
        let empty = folder.path().join("empty");
        let error = Nvrtc::load_first(&[empty.clone(), broken.clone()]).unwrap_err();
        let fault = Fault::from(error);
        assert_eq!(fault.tier, crate::error::Tier::Environment);
        let text = fault.to_string();
        assert!(text.starts_with("the CUDA compiler library `libnvrtc` could not be loaded\n"), "{text}");
        assert!(text.contains(&format!("tried `{}`: no `libnvrtc.so.*` there", empty.display())), "{text}");
        assert!(text.contains(&format!("tried `{}`: ", broken.display())), "{text}");
        assert!(text.contains("file too short") || text.contains("invalid ELF header"), "{text}");
        assert!(text.contains("`pip install nvidia-cuda-nvrtc==13.0.88`"), "{text}");
        assert!(text.contains("set `MONOBLOC_NVRTC`"), "{text}");
    }

    #[test]
    fn a_library_that_is_not_nvrtc_is_refused_by_its_missing_symbol() {
        let error = Nvrtc::load_at(Path::new("libc.so.6")).unwrap_err().to_string();
        assert!(error.contains("tried `libc.so.6`: it has no symbol `nvrtcCreateProgram`"), "{error}");
    }
}
