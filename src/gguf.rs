//! Owns the container of GGUF files: metadata and the table of tensors, read and checked whole. The data of a tensor is never read.
//!
//! The layout is that of `docs/gguf.md` of ggml, versions 2 and 3: counts, then key-value pairs, then an entry for each tensor, then
//! padding, then the data. Numbers are little-endian.
//!
//! Files are not trusted. Every count, length and offset is compared with what the file has before anything is allocated for it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::files::{self, FileError};

/// How every file begins.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// How names of files end.
pub const EXTENSION: &str = "gguf";
/// Largest header. The vocabulary of Gemma 3 (262,144 tokens) with scores and types takes 8 MB; 500,000 merges take another 10 MB.
const HEADER_BYTES_MAX: u64 = 128 << 20;
/// Most tensors of a file, as for safetensors.
const TENSORS_MAX: u64 = 1 << 17;
/// Most key-value pairs. Published files have about 50.
const KEYS_MAX: u64 = 1 << 14;
/// Most elements of all lists together. The largest published vocabularies have about a million, merges included.
const ELEMENTS_MAX: u64 = 1 << 23;
/// Longest name of a key or tensor, bytes. The format allows 65535 for keys and 64 for tensors.
const NAME_BYTES_MAX: u64 = 512;
/// Most extents of a tensor.
const RANK_MAX: u32 = 4;
/// Where data begins, and each tensor of it, where `general.alignment` says nothing else; bytes.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Most parts of a model; the largest published ones have about 30.
const PARTS_MAX: u32 = 1000;
/// Largest alignment. Published files have 32.
const ALIGNMENT_MAX: u64 = 1 << 20;

/// A file that is no GGUF file, or whose header cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error(transparent)]
    File(FileError),
    #[error("`{file}`: {error}")]
    Io { file: String, error: io::Error },
    #[error("`{file}` is no GGUF file: expected `GGUF` as its first four bytes")]
    Magic { file: String },
    #[error(
        "`{file}` is written for machines with the highest byte first; convert the model again for little-endian ones"
    )]
    BigEndian { file: String },
    #[error(
        "`{file}` has version {version} of GGUF, expected 2 or 3; convert the model again with a current llama.cpp"
    )]
    Version { file: String, version: u32 },
    #[error("`{file}`: {what} takes {needed} bytes from byte {at} on, the file ends at byte {end}; it may be cut off")]
    Truncated { file: String, what: &'static str, at: u64, needed: u64, end: u64 },
    #[error("`{file}`: expected a header of at most {HEADER_BYTES_MAX} bytes, found more")]
    HeaderTooLong { file: String },
    #[error("`{file}`: expected at most {most} {what}, found {found}")]
    Count { file: String, what: &'static str, most: u64, found: u64 },
    #[error("`{file}`: expected UTF-8 in {what} at byte {at}, found other bytes")]
    NotUtf8 { file: String, what: &'static str, at: u64 },
    #[error("`{file}`: key `{key}` has type {found}, expected 0 to 12")]
    ValueType { file: String, key: String, found: u32 },
    #[error("`{file}`: key `{key}` is a list of lists, which no key has")]
    NestedList { file: String, key: String },
    #[error("`{file}`: key `{key}`: expected 0 or 1 for a truth value, found {found}")]
    Truth { file: String, key: String, found: u8 },
    #[error("`{file}`: key `{key}` has an integer above 2^63 in a list")]
    LargeElement { file: String, key: String },
    #[error("`{file}` names key `{key}` twice")]
    KeyTwice { file: String, key: String },
    #[error("`{file}`: `general.alignment` is {found}, expected a power of two from 1 to {ALIGNMENT_MAX}")]
    Alignment { file: String, found: String },
    #[error("`{file}` names tensor `{tensor}` twice")]
    TensorTwice { file: String, tensor: String },
    #[error("`{file}`: tensor `{tensor}` has {found} extents, expected at most {RANK_MAX}")]
    Rank { file: String, tensor: String, found: u32 },
    #[error("`{file}`: tensor `{tensor}` has type {found}, which is none of ggml")]
    TensorType { file: String, tensor: String, found: u32 },
    #[error(
        "`{file}`: tensor `{tensor}` of {kind} {shape:?} has rows of {cols} values, expected a multiple of {block}"
    )]
    Row { file: String, tensor: String, kind: Kind, shape: Vec<u64>, cols: u64, block: u64 },
    #[error("`{file}`: tensor `{tensor}` of {kind} {shape:?} takes more than 2^63 bytes")]
    TensorSize { file: String, tensor: String, kind: Kind, shape: Vec<u64> },
    #[error("`{file}`: tensor `{tensor}` begins at byte {offset} of the data, expected a multiple of {alignment}")]
    Offset { file: String, tensor: String, offset: u64, alignment: u64 },
    #[error(
        "`{file}`: tensor `{tensor}` takes {bytes} bytes from byte {offset} of the data on, the file has {data_bytes} bytes of data"
    )]
    Outside { file: String, tensor: String, offset: u64, bytes: u64, data_bytes: u64 },
    #[error(
        "`{file}`: tensors `{first}` and `{second}` overlap: one ends at byte {end} of the data, the next begins at {begin}"
    )]
    Overlap { file: String, first: String, second: String, end: u64, begin: u64 },
    #[error("`{file}`: a hole of {bytes} bytes before tensor `{tensor}`")]
    Hole { file: String, tensor: String, bytes: u64 },
    #[error("`{first}` and `{second}` are two models in one folder: name one of them, as `path:FOLDER/{first}`")]
    SeveralModels { first: String, second: String },
    #[error("`{file}` is not there, which is a part of the model of `{name}`")]
    PartMissing { file: String, name: String },
    #[error("`{file}` is part {found} of a model of {count} parts, expected part {expected}, as its name says")]
    Part { file: String, expected: u64, found: u64, count: u64 },
    #[error("`{file}` says that its model has {found} parts, expected {expected}, as its name says")]
    Parts { file: String, expected: u64, found: u64 },
    #[error("the parts of the model hold {found} tensors, expected {expected}, as `split.tensors.count` says")]
    PartTensors { expected: u64, found: u64 },
    #[error(
        "`{file}`: tensor `{tensor}` is stored as {kind}, which is not read: expected {}; quantise the model again to one of these",
        readable()
    )]
    KindNotRead { file: String, tensor: String, kind: Kind },
}

impl GgufError {
    /// Whether a file is not what its publisher has: no GGUF file, cut off, or without its parts.
    pub fn is_incomplete(&self) -> bool {
        use GgufError::{Magic, Outside, Part, PartMissing, PartTensors, Parts, Truncated};
        matches!(
            self,
            Magic { .. }
                | Truncated { .. }
                | Outside { .. }
                | PartMissing { .. }
                | Part { .. }
                | Parts { .. }
                | PartTensors { .. }
        )
    }
}

/// Names of the types whose values are read.
fn readable() -> String {
    let names: Vec<&str> = Kind::READ.iter().map(|kind| kind.name()).collect();
    names.join(", ")
}

/// How the values of a tensor are stored: a type of ggml.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
    Bf16,
    Mxfp4,
    /// A type whose values are not read, by its number.
    Other(u32),
}

/// Number, name, values of a block and its bytes, of every type of ggml.
const KINDS: [(u32, &str, u64, u64); 34] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

impl Kind {
    /// Types whose values are read.
    pub const READ: [Kind; 12] = [
        Kind::F32,
        Kind::F16,
        Kind::Bf16,
        Kind::Q8_0,
        Kind::Q4_0,
        Kind::Q4_1,
        Kind::Q5_0,
        Kind::Q5_1,
        Kind::Q4K,
        Kind::Q5K,
        Kind::Q6K,
        Kind::Mxfp4,
    ];

    fn number(self) -> u32 {
        match self {
            Kind::F32 => 0,
            Kind::F16 => 1,
            Kind::Q4_0 => 2,
            Kind::Q4_1 => 3,
            Kind::Q5_0 => 6,
            Kind::Q5_1 => 7,
            Kind::Q8_0 => 8,
            Kind::Q4K => 12,
            Kind::Q5K => 13,
            Kind::Q6K => 14,
            Kind::Bf16 => 30,
            Kind::Mxfp4 => 39,
            Kind::Other(number) => number,
        }
    }

    /// The type with this number; `None`: ggml has none.
    fn of(number: u32) -> Option<Kind> {
        KINDS.iter().find(|(own, ..)| *own == number)?;
        Some(Kind::READ.into_iter().find(|kind| kind.number() == number).unwrap_or(Kind::Other(number)))
    }

    fn row(self) -> (u32, &'static str, u64, u64) {
        let number = self.number();
        KINDS.into_iter().find(|(own, ..)| *own == number).unwrap_or((number, "unknown", 1, 0))
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Values of a block.
    pub fn block(self) -> u64 {
        self.row().2
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.row().3
    }

    pub fn is_read(self) -> bool {
        !matches!(self, Kind::Other(_))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The value of a key. Integers and floats of all widths are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    /// Exact for fp32.
    Float(f64),
    Truth(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Truths(Vec<bool>),
    Texts(Texts),
}

impl Value {
    /// As an integer, if it is one.
    pub fn integer(&self) -> Option<i64> {
        match self {
            Value::Unsigned(n) => i64::try_from(*n).ok(),
            Value::Signed(n) => Some(*n),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn truth(&self) -> Option<bool> {
        match self {
            Value::Truth(truth) => Some(*truth),
            _ => None,
        }
    }
}

/// For messages: long texts and lists are shortened.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(n) => write!(f, "{n}"),
            Value::Signed(n) => write!(f, "{n}"),
            Value::Float(x) => write!(f, "{x}"),
            Value::Truth(truth) => write!(f, "{truth}"),
            Value::Text(text) => {
                let start: String = text.chars().take(80).collect();
                write!(f, "\"{start}{}\"", if start.len() < text.len() { "..." } else { "" })
            }
            Value::Integers(list) => write!(f, "a list of {} integers", list.len()),
            Value::Floats(list) => write!(f, "a list of {} floats", list.len()),
            Value::Truths(list) => write!(f, "a list of {} truth values", list.len()),
            Value::Texts(list) => write!(f, "a list of {} strings", list.len()),
        }
    }
}

/// Strings, one after another in one allocation: a vocabulary has hundreds of thousands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    all: String,
    /// Where each string ends in `all`.
    ends: Vec<u32>,
}

impl Texts {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        self.all.get(begin..end)
    }

    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

/// A tensor as the table declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub kind: Kind,
    /// The last extent is that of a row, as in safetensors; files have the order reversed.
    pub shape: Vec<u64>,
    /// Byte range from the beginning of the file.
    pub range: Range<u64>,
}

/// Everything before the data.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    pub metadata: BTreeMap<String, Value>,
    /// In the order of their data.
    pub tensors: Vec<Entry>,
    /// Length of the header, without the padding after it.
    pub bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
}

impl Header {
    /// Reads the header of the file at `path`, and nothing after it.
    ///
    /// # Errors
    /// The first fault of the bytes, or every fault of the table of tensors.
    pub fn read(path: &Path) -> Result<Header, Vec<GgufError>> {
        let file = name_of(path);
        let handle = files::open(path).map_err(|error| vec![GgufError::File(error)])?;
        let length = handle.metadata().map_err(|error| vec![GgufError::Io { file: file.clone(), error }])?.len();
        Header::parse(&file, BufReader::new(handle), length)
    }

    /// Reads the header of a file of `file_bytes`.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn parse(file: &str, input: impl Read, file_bytes: u64) -> Result<Header, Vec<GgufError>> {
        let mut bytes = Bytes { input, file, at: 0, end: file_bytes, elements: 0 };
        let (metadata, entries) = bytes.header().map_err(|fault| vec![fault])?;
        let header_bytes = bytes.at;
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT_DEFAULT,
            Some(value) => match value.integer().and_then(|n| u64::try_from(n).ok()) {
                Some(n) if n.is_power_of_two() && n <= ALIGNMENT_MAX => n,
                _ => return Err(vec![GgufError::Alignment { file: file.to_string(), found: value.to_string() }]),
            },
        };
        let data_begin = header_bytes.next_multiple_of(alignment);
        let tensors = placed(file, entries, alignment, data_begin, file_bytes)?;
        Ok(Header { metadata, tensors, bytes: header_bytes, file_bytes })
    }
}

/// Whether a file is named as a GGUF file.
pub fn is_named(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case(EXTENSION))
}

/// The files of the model at a place, in the order of its parts; `None`: it is no GGUF model.
///
/// A place is a file, any part of a model in parts, or a folder of one such model without a `config.json`.
///
/// # Errors
/// A folder of several models, and parts that are not there.
pub fn files_of(place: &Path) -> Result<Option<Vec<PathBuf>>, GgufError> {
    if !place.is_dir() {
        return if is_named(place) { parts_of(place).map(Some) } else { Ok(None) };
    }
    if place.join("config.json").exists() {
        return Ok(None);
    }
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| is_named(path)).collect();
    found.sort_unstable();
    let Some(first) = found.first() else { return Ok(None) };
    let parts = parts_of(first)?;
    match found.iter().find(|path| !parts.contains(path)) {
        None => Ok(Some(parts)),
        Some(other) => Err(GgufError::SeveralModels { first: name_of(first), second: name_of(other) }),
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The beginning of the name of a part and the count of parts, of `NAME-00001-of-00003.gguf`.
pub fn part_of(name: &str) -> Option<(&str, u32)> {
    let stem = name.get(..name.len().checked_sub(EXTENSION.len() + 1)?)?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (begin, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| (digits.len() == 5).then(|| digits.parse::<u32>().ok()).flatten();
    five(number)?;
    Some((begin, five(count).filter(|count| (1..=PARTS_MAX).contains(count))?))
}

/// The name of part `part`, from 1 on.
pub fn part_name(begin: &str, part: u32, count: u32) -> String {
    format!("{begin}-{part:05}-of-{count:05}.{EXTENSION}")
}

fn parts_of(path: &Path) -> Result<Vec<PathBuf>, GgufError> {
    let name = name_of(path);
    let Some((begin, count)) = part_of(&name) else { return Ok(vec![path.to_path_buf()]) };
    let parts: Vec<PathBuf> = (1..=count).map(|part| path.with_file_name(part_name(begin, part, count))).collect();
    match parts.iter().find(|part| !part.exists()) {
        Some(missing) => Err(GgufError::PartMissing { file: name_of(missing), name: name.clone() }),
        None => Ok(parts),
    }
}

/// Reads the headers of the parts of a model. The first has the metadata of all.
///
/// # Errors
/// Headers that cannot be trusted, and parts that are none of one model.
pub fn read_parts(paths: &[PathBuf]) -> Result<Vec<(PathBuf, Header)>, Vec<GgufError>> {
    let mut faults = vec![];
    let mut headers = vec![];
    for path in paths {
        match Header::read(path) {
            Ok(header) => headers.push((path.clone(), header)),
            Err(found) => faults.extend(found),
        }
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    let number = |header: &Header, key: &str| {
        let value = header.metadata.get(key).and_then(Value::integer);
        value.map(|n| u64::try_from(n).unwrap_or(u64::MAX))
    };
    let count = paths.len() as u64;
    for (expected, (path, header)) in (1u64..).zip(&headers) {
        let file = name_of(path);
        let found = number(header, "split.count").unwrap_or(1).max(1);
        if found != count {
            faults.push(GgufError::Parts { file: file.clone(), expected: count, found });
        }
        let found = number(header, "split.no").unwrap_or(0).saturating_add(1);
        if found != expected {
            faults.push(GgufError::Part { file, expected, found, count });
        }
    }
    let found = headers.iter().map(|(_, header)| header.tensors.len() as u64).sum();
    let all = headers.first().and_then(|(_, header)| number(header, "split.tensors.count"));
    if let Some(expected) = all.filter(|expected| *expected > 0 && *expected != found) {
        faults.push(GgufError::PartTensors { expected, found });
    }
    if faults.is_empty() { Ok(headers) } else { Err(faults) }
}

/// An entry whose place was not looked at.
struct Declared {
    name: String,
    number: u32,
    shape: Vec<u64>,
    offset: u64,
}

/// Bytes of a header, counted.
struct Bytes<'a, R> {
    input: R,
    file: &'a str,
    at: u64,
    /// Length of the file.
    end: u64,
    /// Elements of lists so far.
    elements: u64,
}

impl<R: Read> Bytes<'_, R> {
    fn file(&self) -> String {
        self.file.to_string()
    }

    /// Whether `count` more bytes can be there.
    fn has(&self, what: &'static str, count: u64) -> Result<(), GgufError> {
        if count > self.end.saturating_sub(self.at) {
            return Err(GgufError::Truncated { file: self.file(), what, at: self.at, needed: count, end: self.end });
        }
        if self.at.saturating_add(count) > HEADER_BYTES_MAX {
            return Err(GgufError::HeaderTooLong { file: self.file() });
        }
        Ok(())
    }

    fn fill(&mut self, what: &'static str, out: &mut [u8]) -> Result<(), GgufError> {
        self.has(what, out.len() as u64)?;
        self.input.read_exact(out).map_err(|error| GgufError::Io { file: self.file(), error })?;
        self.at += out.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        self.fill(what, &mut out)?;
        Ok(out)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &'static str) -> Result<String, GgufError> {
        let bytes = self.u64(what)?;
        self.text(what, bytes)
    }

    fn text(&mut self, what: &'static str, bytes: u64) -> Result<String, GgufError> {
        self.has(what, bytes)?;
        let at = self.at;
        let mut out = vec![0; bytes as usize];
        self.fill(what, &mut out)?;
        String::from_utf8(out).map_err(|_| GgufError::NotUtf8 { file: self.file(), what, at })
    }

    fn name(&mut self, what: &'static str) -> Result<String, GgufError> {
        let found = self.u64(what)?;
        self.at_most("bytes in the name of a key or tensor", NAME_BYTES_MAX, found)?;
        self.text(what, found)
    }

    fn at_most(&self, what: &'static str, most: u64, found: u64) -> Result<(), GgufError> {
        if found <= most { Ok(()) } else { Err(GgufError::Count { file: self.file(), what, most, found }) }
    }

    fn header(&mut self) -> Result<(BTreeMap<String, Value>, Vec<Declared>), GgufError> {
        if self.end < 4 || self.array("its magic")? != MAGIC {
            return Err(GgufError::Magic { file: self.file() });
        }
        let version = self.u32("its version")?;
        if (1..=16).contains(&version.swap_bytes()) {
            return Err(GgufError::BigEndian { file: self.file() });
        }
        if !matches!(version, 2 | 3) {
            return Err(GgufError::Version { file: self.file(), version });
        }
        let (tensors, keys) = (self.u64("the count of tensors")?, self.u64("the count of keys")?);
        self.at_most("tensors", TENSORS_MAX, tensors)?;
        self.at_most("keys", KEYS_MAX, keys)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = self.name("the name of a key")?;
            let value = self.value(&key)?;
            if metadata.contains_key(&key) {
                return Err(GgufError::KeyTwice { file: self.file(), key });
            }
            metadata.insert(key, value);
        }
        let entries = (0..tensors).map(|_| self.entry()).collect::<Result<_, _>>()?;
        Ok((metadata, entries))
    }

    fn entry(&mut self) -> Result<Declared, GgufError> {
        let name = self.name("the name of a tensor")?;
        let rank = self.u32("the rank of a tensor")?;
        if rank > RANK_MAX {
            return Err(GgufError::Rank { file: self.file(), tensor: name, found: rank });
        }
        let mut shape = (0..rank).map(|_| self.u64("an extent")).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let (number, offset) = (self.u32("the type of a tensor")?, self.u64("the offset of a tensor")?);
        Ok(Declared { name, number, shape, offset })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        const WHAT: &str = "the value of a key";
        let kind = self.u32(WHAT)?;
        Ok(match kind {
            0 => Value::Unsigned(u64::from(self.array::<1>(WHAT)?[0])),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(WHAT)?))),
            4 => Value::Unsigned(u64::from(self.u32(WHAT)?)),
            10 => Value::Unsigned(self.u64(WHAT)?),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(WHAT)?))),
            12 => Value::Float(f64::from_le_bytes(self.array(WHAT)?)),
            7 => Value::Truth(self.truth(key)?),
            8 => Value::Text(self.string(WHAT)?),
            9 => {
                let (element, count) = (self.u32(WHAT)?, self.u64(WHAT)?);
                self.list(key, element, count)?
            }
            1 | 3 | 5 | 11 => Value::Signed(self.signed(key, kind)?),
            found => return Err(GgufError::ValueType { file: self.file(), key: key.to_string(), found }),
        })
    }

    fn truth(&mut self, key: &str) -> Result<bool, GgufError> {
        match self.array::<1>("a truth value")?[0] {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(GgufError::Truth { file: self.file(), key: key.to_string(), found }),
        }
    }

    /// An integer of a type of integers that fits 64 bits with a sign.
    fn signed(&mut self, key: &str, kind: u32) -> Result<i64, GgufError> {
        const WHAT: &str = "an integer";
        Ok(match kind {
            0 => i64::from(self.array::<1>(WHAT)?[0]),
            1 => i64::from(i8::from_le_bytes(self.array(WHAT)?)),
            2 => i64::from(u16::from_le_bytes(self.array(WHAT)?)),
            3 => i64::from(i16::from_le_bytes(self.array(WHAT)?)),
            4 => i64::from(self.u32(WHAT)?),
            5 => i64::from(i32::from_le_bytes(self.array(WHAT)?)),
            11 => i64::from_le_bytes(self.array(WHAT)?),
            _ => i64::try_from(self.u64(WHAT)?)
                .map_err(|_| GgufError::LargeElement { file: self.file(), key: key.to_string() })?,
        })
    }

    fn list(&mut self, key: &str, element: u32, count: u64) -> Result<Value, GgufError> {
        const WHAT: &str = "the list of a key";
        let element_bytes: u64 = match element {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            // The length of a string.
            8 | 10..=12 => 8,
            9 => return Err(GgufError::NestedList { file: self.file(), key: key.to_string() }),
            found => return Err(GgufError::ValueType { file: self.file(), key: key.to_string(), found }),
        };
        self.has(WHAT, count.saturating_mul(element_bytes))?;
        self.elements = self.elements.saturating_add(count);
        self.at_most("elements in all lists", ELEMENTS_MAX, self.elements)?;
        Ok(match element {
            7 => Value::Truths((0..count).map(|_| self.truth(key)).collect::<Result<_, _>>()?),
            6 => Value::Floats((0..count).map(|_| self.array(WHAT).map(f32::from_le_bytes)).collect::<Result<_, _>>()?),
            12 => Value::Floats(
                (0..count).map(|_| self.array(WHAT).map(|b| f64::from_le_bytes(b) as f32)).collect::<Result<_, _>>()?,
            ),
            8 => {
                let mut texts = Texts::default();
                for _ in 0..count {
                    texts.all.push_str(&self.string("a string of a list")?);
                    // At most the bytes of a header.
                    texts.ends.push(texts.all.len() as u32);
                }
                Value::Texts(texts)
            }
            integer => Value::Integers((0..count).map(|_| self.signed(key, integer)).collect::<Result<_, _>>()?),
        })
    }
}

/// The entries with their places in the file, in the order of their data: each inside it, none over another, and no more between two of
/// them than padding.
fn placed(
    file: &str,
    entries: Vec<Declared>,
    alignment: u64,
    data_begin: u64,
    file_bytes: u64,
) -> Result<Vec<Entry>, Vec<GgufError>> {
    let file = || file.to_string();
    let data_bytes = file_bytes.saturating_sub(data_begin);
    let mut faults = vec![];
    let mut names = std::collections::BTreeSet::new();
    let mut tensors = vec![];
    for Declared { name, number, shape, offset } in entries {
        if !names.insert(name.clone()) {
            faults.push(GgufError::TensorTwice { file: file(), tensor: name });
            continue;
        }
        let Some(kind) = Kind::of(number) else {
            faults.push(GgufError::TensorType { file: file(), tensor: name, found: number });
            continue;
        };
        let (cols, block) = (shape.last().copied().unwrap_or(1), kind.block());
        if !cols.is_multiple_of(block) {
            faults.push(GgufError::Row { file: file(), tensor: name, kind, shape, cols, block });
            continue;
        }
        let values = shape.iter().try_fold(1u64, |n, &extent| n.checked_mul(extent));
        let bytes = values.and_then(|n| (n / block).checked_mul(kind.block_bytes())).filter(|n| *n < 1 << 63);
        let Some(bytes) = bytes else {
            faults.push(GgufError::TensorSize { file: file(), tensor: name, kind, shape });
            continue;
        };
        if !offset.is_multiple_of(alignment) {
            faults.push(GgufError::Offset { file: file(), tensor: name, offset, alignment });
        } else if offset > data_bytes || bytes > data_bytes - offset {
            faults.push(GgufError::Outside { file: file(), tensor: name, offset, bytes, data_bytes });
        } else {
            tensors.push(Entry { name, kind, shape, range: offset..offset + bytes });
        }
    }
    if !faults.is_empty() {
        return Err(faults); // A dropped entry would show up again as a hole.
    }
    tensors.sort_by(|a, b| (a.range.start, a.range.end, &a.name).cmp(&(b.range.start, b.range.end, &b.name)));
    let (mut end, mut previous) = (0, "");
    for Entry { name, range, .. } in &tensors {
        let begin = range.start;
        if begin < end {
            let (first, second) = (previous.to_string(), name.clone());
            faults.push(GgufError::Overlap { file: file(), first, second, end, begin });
        } else if begin > end.next_multiple_of(alignment) {
            faults.push(GgufError::Hole { file: file(), tensor: name.clone(), bytes: begin - end });
        }
        (end, previous) = (end.max(range.end), name);
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    for tensor in &mut tensors {
        tensor.range = tensor.range.start + data_begin..tensor.range.end + data_begin;
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests;
