//! Owns weight access: safetensors headers read and checked whole, tensor data mapped, synthetic tensors beside them. Headers of GGUF
//! files come from `crate::gguf`.
//!
//! [`Checkpoint::open`] reads headers and nothing else, so importing a 16 GB model touches a few hundred kilobytes.
//! [`Weights`] then gives rows by [`TensorId`]; the operating system brings in the pages that are used.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::marker::PhantomData;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::digest::{KeyPart, KeySink};
use crate::dtype::DType;
use crate::files::{self, FileError};
use crate::format::Format;
use crate::gguf::{GgufError, Header, Kind};
use crate::model::blocks::Blocks;
pub use crate::model::coded::CodedRow;
use crate::model::coded::{Component, Files, PartFault, Recipe, Stored as Coded};
use crate::model::graph::{Layer, Linear, Mixer, ModelGraph, Norm, RowView, Score, Tensor, TensorId};
use crate::model::rounding::round_row;
use crate::model::synthetic::SyntheticTensor;

/// Largest header accepted; the limit of the safetensors reference implementation. The largest published model (over
/// a million tensors) needs about 100 bytes per tensor.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest index file accepted: 200 bytes for each tensor that is.
pub const INDEX_BYTES_MAX: u64 = 64 << 20;
/// Most tensors of a checkpoint. A dense decoder has a dozen a layer; the largest mixtures of experts have about 150,000 where each matrix
/// is codes, scales and a shape (92 layers of 160 experts).
const TENSORS_MAX: usize = 1 << 18;
/// Longest name of a tensor or shard, bytes. Published ones stay below 150.
const NAME_BYTES_MAX: usize = 512;
/// JSON values in the entry of one tensor. A tensor has a type, two offsets and a few extents.
const ENTRY_VALUES_MAX: usize = 64;

/// Bytes of a tensor that an import reads, at most: one fp32 number for each pair of a head.
const SMALL_BYTES_MAX: u64 = 1 << 16;

pub const SINGLE_FILE: &str = "model.safetensors";
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// A fault of the weight files of a folder.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error("`{file}`: {error}")]
    Io { file: String, error: io::Error },
    #[error(transparent)]
    File(FileError),
    #[error("`{dir}` has no `{SINGLE_FILE}` and no `{INDEX_FILE}`")]
    NoWeights { dir: String },
    #[error("no safetensors, but `{file}`: name that file itself, `path:{file}`, or remove `config.json` beside it")]
    Gguf { file: String },
    #[error(transparent)]
    GgufFile(#[from] GgufError),
    #[error("`{file}` is a {format} checkpoint; only safetensors is read (a pickle file can run code)")]
    ForeignFormat { file: String, format: &'static str },
    #[error("`{SINGLE_FILE}` and `{INDEX_FILE}` are both there and may differ; remove one")]
    TwoLayouts,
    #[error("`{file}` is an adapter; merge it into the base model first")]
    Adapter { file: String },
    #[error("`{INDEX_FILE}`: {detail}")]
    IndexSyntax { detail: String },
    #[error("`{INDEX_FILE}` names shard `{shard}`, expected the name of a safetensors file in the same folder")]
    IndexShardName { shard: String },
    #[error("`{INDEX_FILE}` names shard `{shard}`, which is not there")]
    ShardMissing { shard: String },
    #[error("`{INDEX_FILE}` places tensor `{tensor}` in `{shard}`, which does not hold it")]
    IndexTensorMissing { tensor: String, shard: String },
    #[error("`{shard}` holds tensor `{tensor}`, which `{INDEX_FILE}` does not place there")]
    IndexTensorUnlisted { tensor: String, shard: String },
    #[error("tensor `{tensor}` is in both `{first}` and `{second}`")]
    DuplicateOverShards { tensor: String, first: String, second: String },
    #[error("`{file}`: expected at least 8 bytes of header length, found {bytes}")]
    TooShort { file: String, bytes: u64 },
    #[error("`{file}`: expected a header of at most {HEADER_BYTES_MAX} bytes, found a length of {bytes}")]
    HeaderTooLong { file: String, bytes: u64 },
    #[error("`{file}`: the header declares {declared} bytes, the file has {available} after its length field")]
    HeaderTruncated { file: String, declared: u64, available: u64 },
    #[error("`{file}`: the header is no safetensors header: {detail}")]
    HeaderSyntax { file: String, detail: String },
    #[error("`{file}`: the header names tensor `{tensor}` twice")]
    DuplicateInHeader { file: String, tensor: String },
    #[error("`{file}`: tensor `{tensor}`: {detail}")]
    TensorEntry { file: String, tensor: String, detail: String },
    #[error("`{file}`: tensor `{tensor}` of {dtype:?} {shape:?} needs {expected} bytes, its offsets span {found}")]
    ByteCount { file: String, tensor: String, dtype: Dtype, shape: Vec<usize>, expected: String, found: u64 },
    #[error("`{file}`: tensors `{first}` and `{second}` overlap: one ends at byte {end}, the next begins at {begin}")]
    Overlap { file: String, first: String, second: String, end: u64, begin: u64 },
    #[error("`{file}`: a hole of {bytes} bytes before tensor `{tensor}`")]
    Hole { file: String, tensor: String, bytes: u64 },
    #[error("`{file}`: tensor data ends at byte {expected} after the header, the file has {found}")]
    DataLength { file: String, expected: u64, found: u64 },
}

/// A tensor as a shard header declares it; rank and dtype are whatever the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTensor {
    /// The type of its values; of a GGUF file, fp32 where they are stored in blocks.
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// How a GGUF file stores it.
    pub kind: Option<Kind>,
    /// Index into [`Checkpoint::files`].
    file: usize,
    /// Byte range from the beginning of the file.
    range: Range<u64>,
}

/// The headers of a checkpoint folder, checked against themselves and each other.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: BTreeMap<String, HeaderTensor>,
    files: Vec<(PathBuf, u64)>,
    header_bytes_read: u64,
}

impl Checkpoint {
    /// Reads the headers of `model.safetensors`, or of every shard that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// Every fault found in any of the files, not only the first.
    pub fn open(dir: &Path) -> Result<Checkpoint, Vec<WeightsError>> {
        let mut checkpoint = Checkpoint { tensors: BTreeMap::new(), files: Vec::new(), header_bytes_read: 0 };
        let mut faults = Vec::new();
        for adapter in ["adapter_config.json", "adapter_model.safetensors"] {
            if dir.join(adapter).exists() {
                faults.push(WeightsError::Adapter { file: adapter.to_string() });
            }
        }
        match (dir.join(SINGLE_FILE).exists(), dir.join(INDEX_FILE).exists()) {
            (true, true) => faults.push(WeightsError::TwoLayouts),
            (true, false) => checkpoint.add_file(dir, SINGLE_FILE, &mut faults),
            (false, true) => checkpoint.add_shards(dir, &mut faults),
            (false, false) => faults.push(no_weights(dir)),
        }
        if faults.is_empty() { Ok(checkpoint) } else { Err(faults) }
    }

    /// The tensors of the parts of a GGUF model, whose headers were read.
    ///
    /// # Errors
    /// Types that are not read, and tensors that two parts have.
    pub fn of_gguf(parts: &[(PathBuf, Header)]) -> Result<Checkpoint, Vec<WeightsError>> {
        let mut checkpoint = Checkpoint { tensors: BTreeMap::new(), files: Vec::new(), header_bytes_read: 0 };
        let mut faults = Vec::new();
        for (file, (path, header)) in parts.iter().enumerate() {
            checkpoint.files.push((path.clone(), header.file_bytes));
            checkpoint.header_bytes_read += header.bytes;
            for tensor in &header.tensors {
                let dtype = match tensor.kind {
                    Kind::F16 => Dtype::F16,
                    Kind::Bf16 => Dtype::BF16,
                    Kind::Other(_) => {
                        let (file, tensor, kind) = (file_name(path), tensor.name.clone(), tensor.kind);
                        faults.push(WeightsError::GgufFile(GgufError::KindNotRead { file, tensor, kind }));
                        continue;
                    }
                    _ => Dtype::F32,
                };
                let (shape, range) = (tensor.shape.iter().map(|&n| n as usize).collect(), tensor.range.clone());
                let entry = HeaderTensor { dtype, shape, kind: Some(tensor.kind), file, range };
                if let Some(first) = checkpoint.tensors.insert(tensor.name.clone(), entry) {
                    let (first, second) = (file_name(&checkpoint.files[first.file].0), file_name(path));
                    faults.push(WeightsError::DuplicateOverShards { tensor: tensor.name.clone(), first, second });
                }
            }
        }
        if faults.is_empty() { Ok(checkpoint) } else { Err(faults) }
    }

    /// Every tensor of every file, by name.
    pub fn tensors(&self) -> &BTreeMap<String, HeaderTensor> {
        &self.tensors
    }

    /// Bytes read from weight files and their index; never any tensor data.
    pub fn header_bytes_read(&self) -> u64 {
        self.header_bytes_read
    }

    fn add_shards(&mut self, dir: &Path, faults: &mut Vec<WeightsError>) {
        let text = match files::read_bytes(&dir.join(INDEX_FILE), INDEX_BYTES_MAX) {
            Ok(text) => text,
            Err(error) => return faults.push(WeightsError::File(error)),
        };
        self.header_bytes_read += text.len() as u64;
        let placed: BTreeMap<String, String> = match serde_json::from_slice::<Index>(&text) {
            Ok(index) => index.weight_map.0.into_iter().collect(),
            Err(error) => return faults.push(WeightsError::IndexSyntax { detail: error.to_string() }),
        };
        if placed.is_empty() {
            faults.push(WeightsError::IndexSyntax { detail: "`weight_map` is empty".to_string() });
        }
        let mut shards: Vec<&String> = placed.values().collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            // The index is downloaded data: a name with a folder in it could reach outside the checkpoint.
            let plain = Path::new(shard).file_name().is_some_and(|name| name == shard.as_str());
            if !plain || shard.contains('\\') || !shard.ends_with(".safetensors") {
                faults.push(WeightsError::IndexShardName { shard: shard.clone() });
            } else if !dir.join(shard).exists() {
                faults.push(WeightsError::ShardMissing { shard: shard.clone() });
            } else {
                self.add_file(dir, shard, faults);
            }
        }
        if !faults.is_empty() {
            return; // Tensors of an unreadable shard would all be reported as missing from it.
        }
        let shard_of = |t: &HeaderTensor| file_name(&self.files[t.file].0);
        for (tensor, shard) in &placed {
            if self.tensors.get(tensor).is_none_or(|t| shard_of(t) != *shard) {
                faults.push(WeightsError::IndexTensorMissing { tensor: tensor.clone(), shard: shard.clone() });
            }
        }
        for (tensor, t) in &self.tensors {
            if !placed.contains_key(tensor) {
                faults.push(WeightsError::IndexTensorUnlisted { tensor: tensor.clone(), shard: shard_of(t) });
            }
        }
    }

    fn add_file(&mut self, dir: &Path, name: &str, faults: &mut Vec<WeightsError>) {
        let path = dir.join(name);
        let (header, file_bytes) = match read_header(&path, name) {
            Ok(read) => read,
            Err(fault) => return faults.push(fault),
        };
        self.header_bytes_read += 8 + header.len() as u64;
        let data_begin = 8 + header.len() as u64;
        let file = self.files.len();
        self.files.push((path, file_bytes));
        for (tensor, info) in parse_header(name, &header, file_bytes - data_begin, faults) {
            let (begin, end) = info.data_offsets;
            let range = data_begin + begin as u64..data_begin + end as u64;
            let entry = HeaderTensor { dtype: info.dtype, shape: info.shape, kind: None, file, range };
            if let Some(first) = self.tensors.get(&tensor) {
                let first = file_name(&self.files[first.file].0);
                faults.push(WeightsError::DuplicateOverShards { tensor, first, second: name.to_string() });
            } else {
                self.tensors.insert(tensor, entry);
            }
        }
    }

    /// Compares the bytes of two tensors: the one question import asks of tensor data, for a tied head that is stored
    /// beside its embedding. Reads both.
    pub fn same_bytes(&self, a: &str, b: &str) -> Result<bool, WeightsError> {
        let (Some(a), Some(b)) = (self.tensors.get(a), self.tensors.get(b)) else { return Ok(false) };
        if a.dtype != b.dtype || a.shape != b.shape {
            return Ok(false);
        }
        let (map_a, map_b) = (self.map(a.file)?, self.map(b.file)?);
        Ok(map_a.get(bytes_of(&a.range)) == map_b.get(bytes_of(&b.range)))
    }

    /// Whether every value of a tensor is zero, of either sign.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn is_zero(&self, name: &str) -> Result<bool, WeightsError> {
        let Some(tensor) = self.tensors.get(name) else { return Ok(false) };
        let map = self.map(tensor.file)?;
        let bytes = map.get(bytes_of(&tensor.range)).unwrap_or_default();
        // The sign is in the last byte.
        let is_sign = |byte: u8| byte & 0x7f == 0;
        let width = match tensor.dtype {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
            _ => return Ok(false),
        };
        let zero = |value: &[u8]| {
            value.split_last().is_some_and(|(last, rest)| is_sign(*last) && rest.iter().all(|b| *b == 0))
        };
        Ok(bytes.chunks(width).all(zero))
    }

    /// The values of a small tensor of fp32 numbers in a GGUF file, such as rotary factors; `None`: there is none.
    pub fn small_values(&self, name: &str) -> Result<Option<Vec<f32>>, WeightsError> {
        let Some(tensor) = self.tensors.get(name).filter(|tensor| tensor.kind == Some(Kind::F32)) else {
            return Ok(None);
        };
        let bytes = (tensor.range.end - tensor.range.start).min(SMALL_BYTES_MAX);
        let path = &self.files[tensor.file].0;
        let fault = |error| WeightsError::Io { file: file_name(path), error };
        let mut handle = files::open(path).map_err(WeightsError::File)?;
        handle.seek(SeekFrom::Start(tensor.range.start)).map_err(fault)?;
        let mut read = vec![0; bytes as usize];
        handle.read_exact(&mut read).map_err(fault)?;
        Ok(Some(read.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    }

    /// Maps the files and binds each graph tensor, by name, to its bytes.
    ///
    /// Tensors must be those the importer took from this checkpoint: present and of a supported dtype; or made of several by the recipe
    /// of their id, or stored in blocks. The matrices of `transposed` have rows and columns exchanged in their file.
    pub fn bind(
        self,
        tensors: &[Tensor],
        mut recipes: BTreeMap<TensorId, Recipe>,
        mut blocks: BTreeMap<TensorId, Blocks>,
        transposed: &BTreeSet<TensorId>,
    ) -> Result<Weights, WeightsError> {
        let maps = (0..self.files.len()).map(|file| self.map(file)).collect::<Result<Vec<_>, _>>()?;
        let stored = (0..)
            .map(TensorId)
            .zip(tensors)
            .map(|(id, t)| {
                if let Some(recipe) = recipes.remove(&id) {
                    return Stored::new(t, Source::Coded(Box::new(Coded::new(recipe))));
                }
                if let Some(blocks) = blocks.remove(&id) {
                    return Stored::new(t, Source::Blocks(Box::new(blocks)));
                }
                let header = &self.tensors[&t.name];
                let (file, bytes) = (header.file, bytes_of(&header.range));
                match (transposed.contains(&id), t.shape.as_slice()) {
                    (true, [.., rows, _]) => Stored::new(t, Source::Transposed { file, bytes, rows: *rows }),
                    _ => Stored::new(t, Source::Mapped { file, bytes }),
                }
            })
            .collect();
        Ok(Weights { tensors: stored, maps, files: self.files, seed: None })
    }

    fn map(&self, file: usize) -> Result<Mmap, WeightsError> {
        let (path, bytes) = &self.files[file];
        let fault = |error| WeightsError::Io { file: file_name(path), error };
        let handle = files::open(path).map_err(WeightsError::File)?;
        // SAFETY: a mapping is unsound only if the file changes under it. Weight files are treated as immutable, as
        // every reader of mapped checkpoints does; the length is compared so that a file replaced since its header
        // was checked is an error here and not a fault at first access.
        let map = unsafe { Mmap::map(&handle) }.map_err(fault)?;
        if map.len() as u64 != *bytes {
            return Err(fault(io::Error::other(format!("expected {bytes} bytes, found {}", map.len()))));
        }
        Ok(map)
    }
}

fn no_weights(dir: &Path) -> WeightsError {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| file_name(&e.path())).collect();
    names.sort_unstable();
    for name in names {
        let format = match name.rsplit_once('.') {
            Some(("pytorch_model", "bin")) => "pickle",
            Some((stem, "bin")) if stem.starts_with("pytorch_model-") => "pickle",
            Some((_, "pt" | "pth" | "ckpt" | "pkl")) => "pickle",
            Some((_, "gguf")) => return WeightsError::Gguf { file: name },
            Some((_, "h5" | "msgpack" | "onnx")) => "foreign",
            _ => continue,
        };
        return WeightsError::ForeignFormat { file: name, format };
    }
    WeightsError::NoWeights { dir: dir.display().to_string() }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

fn bytes_of(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Header bytes (without the length field) and file length.
fn read_header(path: &Path, name: &str) -> Result<(Vec<u8>, u64), WeightsError> {
    let file = || name.to_string();
    let io = |error| WeightsError::Io { file: file(), error };
    let mut handle = files::open(path).map_err(WeightsError::File)?;
    let file_bytes = handle.metadata().map_err(io)?.len();
    if file_bytes < 8 {
        return Err(WeightsError::TooShort { file: file(), bytes: file_bytes });
    }
    let mut length = [0; 8];
    handle.read_exact(&mut length).map_err(io)?;
    let declared = u64::from_le_bytes(length);
    if declared > HEADER_BYTES_MAX {
        return Err(WeightsError::HeaderTooLong { file: file(), bytes: declared });
    }
    if declared > file_bytes - 8 {
        return Err(WeightsError::HeaderTruncated { file: file(), declared, available: file_bytes - 8 });
    }
    let mut header = vec![0; declared as usize];
    handle.read_exact(&mut header).map_err(io)?;
    Ok((header, file_bytes))
}

/// What an index says: the shard of each tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: Pairs<String>,
}

/// Names of the shards in an index, each once.
///
/// # Errors
/// A text that is no index.
pub fn shards_of(index: &[u8]) -> Result<BTreeSet<String>, serde_json::Error> {
    let Index { weight_map } = serde_json::from_slice(index)?;
    Ok(weight_map.0.into_iter().map(|(_, shard)| shard).collect())
}

/// The key of a header that names no tensor.
const METADATA: &str = "__metadata__";

/// Reads the value of a name in an object.
trait Entry<'de>: Sized {
    fn read<A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error>;
}

/// A shard.
impl<'de> Entry<'de> for String {
    fn read<A: MapAccess<'de>>(_: &str, map: &mut A) -> Result<String, A::Error> {
        let shard: String = map.next_value()?;
        short::<A::Error>(&shard)?;
        Ok(shard)
    }
}

/// A tensor, or what is wrong with its entry; `None`: the metadata.
impl<'de> Entry<'de> for Option<Result<TensorInfo, String>> {
    fn read<A: MapAccess<'de>>(name: &str, map: &mut A) -> Result<Self, A::Error> {
        if name == METADATA {
            return map.next_value::<IgnoredAny>().map(|_| None);
        }
        // By way of a value, so that a bad entry is a fault of its tensor and reading goes on.
        let value = map.next_value_seed(Few(&mut ENTRY_VALUES_MAX.clone()))?;
        Ok(Some(TensorInfo::deserialize(&value).map_err(|error| {
            // serde lists all 21 known dtypes after the first comma; the offender is enough.
            error.to_string().split(", expected").next().unwrap_or_default().to_string()
        })))
    }
}

/// An object of at most [`TENSORS_MAX`] short names: in file order, repeated ones kept.
struct Pairs<T>(Vec<(String, T)>);

impl<'de, T: Entry<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PairsVisitor<T>(PhantomData<T>);
        impl<'de, T: Entry<'de>> Visitor<'de> for PairsVisitor<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    short::<A::Error>(&name)?;
                    if pairs.len() == TENSORS_MAX {
                        return Err(A::Error::custom(format!("expected at most {TENSORS_MAX} tensors, found more")));
                    }
                    let value = T::read(&name, &mut map)?;
                    pairs.push((name, value));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

fn short<E: serde::de::Error>(name: &str) -> Result<(), E> {
    if name.len() <= NAME_BYTES_MAX {
        return Ok(());
    }
    let start: String = name.chars().take(40).collect();
    let bytes = name.len();
    Err(E::custom(format!("expected names of at most {NAME_BYTES_MAX} bytes, found one of {bytes}: `{start}...`")))
}

/// Reads a JSON value of at most so many values, itself and those inside it. Bounded, because a value in memory takes more bytes than
/// its text.
struct Few<'n>(&'n mut usize);

impl Few<'_> {
    fn one<E: serde::de::Error>(self, value: Value) -> Result<Value, E> {
        match self.0.checked_sub(1) {
            Some(left) => {
                *self.0 = left;
                Ok(value)
            }
            None => Err(E::custom(format!("expected at most {ENTRY_VALUES_MAX} values in the entry of a tensor"))),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Few<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Few<'_> {
    type Value = Value;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("the entry of a tensor")
    }
    fn visit_unit<E: serde::de::Error>(self) -> Result<Value, E> {
        self.one(Value::Null)
    }
    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Value, E> {
        self.one(value.into())
    }
    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Value, E> {
        self.one(value.into())
    }
    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Value, E> {
        self.one(value.into())
    }
    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        self.one(value.into())
    }
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        short::<E>(value)?;
        self.one(value.into())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(Few(self.0))? {
            values.push(value);
        }
        self.one(Value::Array(values))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = serde_json::Map::new();
        while let Some(key) = map.next_key::<String>()? {
            short::<A::Error>(&key)?;
            values.insert(key, map.next_value_seed(Few(self.0))?);
        }
        self.one(Value::Object(values))
    }
}

/// Entries of one header that are sound by themselves; `data_bytes` is what the file holds after its header.
fn parse_header(
    file: &str,
    header: &[u8],
    data_bytes: u64,
    faults: &mut Vec<WeightsError>,
) -> Vec<(String, TensorInfo)> {
    let file = || file.to_string();
    let pairs: Pairs<Option<Result<TensorInfo, String>>> = match serde_json::from_slice(header) {
        Ok(pairs) => pairs,
        Err(error) => {
            faults.push(WeightsError::HeaderSyntax { file: file(), detail: error.to_string() });
            return Vec::new();
        }
    };
    let faults_before = faults.len();
    let mut seen = HashSet::new();
    let mut entries = Vec::new();
    for (tensor, entry) in pairs.0 {
        if !seen.insert(tensor.clone()) {
            faults.push(WeightsError::DuplicateInHeader { file: file(), tensor });
            continue;
        }
        let info = match entry {
            None => continue,
            Some(Ok(info)) => info,
            Some(Err(detail)) => {
                faults.push(WeightsError::TensorEntry { file: file(), tensor, detail });
                continue;
            }
        };
        let (begin, end) = info.data_offsets;
        if begin > end || end as u64 > data_bytes {
            let detail = format!("offsets {begin}..{end} are outside the {data_bytes} bytes of data");
            faults.push(WeightsError::TensorEntry { file: file(), tensor, detail });
            continue;
        }
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &extent| n.checked_mul(extent));
        let expected = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
        if expected != Some(end - begin) {
            let expected = expected.map_or("more than 2^64".to_string(), |bytes| bytes.to_string());
            let (dtype, shape, found) = (info.dtype, info.shape, (end - begin) as u64);
            faults.push(WeightsError::ByteCount { file: file(), tensor, dtype, shape, expected, found });
            continue;
        }
        entries.push((tensor, info));
    }
    if faults.len() > faults_before {
        return entries; // A dropped entry would show up again as a hole.
    }
    entries.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let mut end = 0;
    let mut previous = "";
    for (tensor, info) in &entries {
        let begin = info.data_offsets.0 as u64;
        if begin < end {
            let (first, second) = (previous.to_string(), tensor.clone());
            faults.push(WeightsError::Overlap { file: file(), first, second, end, begin });
        } else if begin > end {
            faults.push(WeightsError::Hole { file: file(), tensor: tensor.clone(), bytes: begin - end });
        }
        end = end.max(info.data_offsets.1 as u64);
        previous = tensor;
    }
    if end != data_bytes {
        faults.push(WeightsError::DataLength { file: file(), expected: end, found: data_bytes });
    }
    entries
}

/// The weights of one model, addressed by the tensors of its graph. Shared freely between threads.
#[derive(Debug)]
pub struct Weights {
    tensors: Vec<Stored>,
    maps: Vec<Mmap>,
    files: Vec<(PathBuf, u64)>,
    seed: Option<u64>,
}

#[derive(Debug)]
struct Stored {
    dtype: DType,
    rows: u32,
    cols: usize,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Mapped {
        file: usize,
        bytes: Range<usize>,
    },
    Synthetic(SyntheticTensor),
    /// A router: row `i` is multiplied by `e^(skew * NORMAL)`, a value of `gains`.
    Skewed {
        tensor: SyntheticTensor,
        gains: SyntheticTensor,
        skew: f32,
    },
    /// Matrices of `rows` rows one after another, each of which the file has transposed, its columns one after another.
    Transposed {
        file: usize,
        bytes: Range<usize>,
        rows: u32,
    },
    /// Codes and scales in several tensors.
    Coded(Box<Coded>),
    /// Rows of a GGUF file.
    Blocks(Box<Blocks>),
    /// Values, rounded to codes when they are read.
    Rounded(Box<Source>, Format),
    /// The values of another tensor.
    Same(TensorId),
}

/// How every tensor is made of the bytes of the files: what the headers, the names of the graph and `quantization_config` say of them.
/// With the content of the files it decides every value.
impl KeyPart for Weights {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { tensors, maps: _, files: _, seed } = self;
        key.list("seed", seed);
        for tensor in tensors {
            key.nested("tensor", tensor);
        }
    }
}

impl KeyPart for Stored {
    fn write(&self, key: &mut dyn KeySink) {
        let Self { dtype, rows, cols, source } = self;
        key.value("dtype", dtype);
        key.value("rows", rows);
        key.value("cols", cols);
        source.write(key);
    }
}

impl KeyPart for Source {
    fn write(&self, key: &mut dyn KeySink) {
        match self {
            Source::Mapped { file, bytes } => {
                key.nested("mapped", &Component { file: *file, bytes: bytes.clone() });
            }
            Source::Synthetic(tensor) => key.text("synthetic", &format!("{tensor:?}")),
            Source::Skewed { tensor, gains, skew } => key.text("skewed", &format!("{tensor:?} {gains:?} {skew:?}")),
            Source::Transposed { file, bytes, rows } => {
                key.nested("transposed", &Component { file: *file, bytes: bytes.clone() });
                key.value("rows", rows);
            }
            Source::Coded(coded) => key.nested("coded", &coded.recipe),
            Source::Blocks(blocks) => key.nested("blocks", blocks.as_ref()),
            Source::Rounded(values, format) => {
                key.nested("rounded", values.as_ref());
                key.text("format", &format!("{format:?}"));
            }
            Source::Same(id) => key.value("same", id),
        }
    }
}

impl HeaderTensor {
    /// Where its bytes are.
    pub fn component(&self) -> Component {
        Component { file: self.file, bytes: bytes_of(&self.range) }
    }
}

impl Files for Vec<Mmap> {
    fn bytes(&self, of: &Component) -> &[u8] {
        &self[of.file][of.bytes.clone()]
    }
}

impl Stored {
    /// A tensor of rank 1 is one row, one of rank 0 a row of one value.
    fn new(tensor: &Tensor, source: Source) -> Stored {
        let (rows, cols) = match *tensor.shape.as_slice() {
            [] => (1, 1),
            [cols] => (1, cols),
            // Stacked matrices are one of all their rows.
            [ref rows @ .., cols] => (rows.iter().product(), cols),
        };
        Stored { dtype: tensor.dtype, rows, cols: cols as usize, source }
    }
}

/// All values of one tensor, row-major, without a copy.
#[derive(Debug, Clone, Copy)]
pub enum TensorView<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    /// Little-endian values of `dtype` that the file does not align to their size: legal, and rare.
    Unaligned {
        dtype: DType,
        bytes: &'a [u8],
    },
    Synthetic(&'a SyntheticTensor),
}

impl TensorView<'_> {
    /// Elements `first..first + out.len()` as fp32; exact for every stored type.
    pub fn read_f32(&self, first: usize, out: &mut [f32]) {
        let range = first..first + out.len();
        match self {
            TensorView::F32(values) => out.copy_from_slice(&values[range]),
            TensorView::Bf16(values) => widen(&values[range], out),
            TensorView::F16(values) => out.iter_mut().zip(&values[range]).for_each(|(o, v)| *o = v.to_f32()),
            TensorView::Synthetic(tensor) => tensor.fill_f32(first as u64, out),
            TensorView::Unaligned { dtype, bytes } => {
                let bytes = &bytes[range.start * dtype.bytes()..range.end * dtype.bytes()];
                match dtype {
                    DType::F32 => chunks(bytes, out, f32::from_le_bytes),
                    DType::Bf16 => chunks(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
                    DType::F16 => chunks(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
                    DType::I32 | DType::E4m3 => unreachable!("no weight is of type {dtype}"),
                }
            }
        }
    }

    /// Row `row` of matrices of `rows` rows, each of which lies transposed: a value in every `rows`.
    fn read_column_f32(&self, row: u32, rows: u32, out: &mut [f32]) {
        let (matrix, column, stride) = (row / rows, row % rows, rows as usize);
        let first = matrix as usize * stride * out.len() + column as usize;
        let places = (first..).step_by(stride);
        match self {
            TensorView::F32(values) => out.iter_mut().zip(places).for_each(|(o, at)| *o = values[at]),
            TensorView::Bf16(values) => out.iter_mut().zip(places).for_each(|(o, at)| *o = values[at].to_f32()),
            TensorView::F16(values) => out.iter_mut().zip(places).for_each(|(o, at)| *o = values[at].to_f32()),
            TensorView::Synthetic(_) | TensorView::Unaligned { .. } => {
                out.iter_mut().zip(places).for_each(|(o, at)| self.read_f32(at, std::slice::from_mut(o)));
            }
        }
    }

    /// Elements `first..first + out.len()` as bf16: a copy from bf16, else rounded to nearest even from fp32.
    pub fn read_bf16(&self, first: usize, out: &mut [bf16]) {
        let range = first..first + out.len();
        match self {
            TensorView::F32(values) => out.iter_mut().zip(&values[range]).for_each(|(o, v)| *o = bf16::from_f32(*v)),
            TensorView::Bf16(values) => out.copy_from_slice(&values[range]),
            TensorView::F16(values) => {
                out.iter_mut().zip(&values[range]).for_each(|(o, v)| *o = bf16::from_f32(v.to_f32()));
            }
            TensorView::Synthetic(tensor) => tensor.fill_bf16(first as u64, out),
            TensorView::Unaligned { dtype, bytes } => {
                let bytes = &bytes[range.start * dtype.bytes()..range.end * dtype.bytes()];
                match dtype {
                    DType::F32 => chunks(bytes, out, |b| bf16::from_f32(f32::from_le_bytes(b))),
                    DType::Bf16 => chunks(bytes, out, bf16::from_le_bytes),
                    DType::F16 => chunks(bytes, out, |b| bf16::from_f32(f16::from_le_bytes(b).to_f32())),
                    DType::I32 | DType::E4m3 => unreachable!("no weight is of type {dtype}"),
                }
            }
        }
    }
}

/// bf16 is the upper half of fp32; written as a shift so that the loop vectorises.
fn widen(values: &[bf16], out: &mut [f32]) {
    for (o, v) in out.iter_mut().zip(values) {
        *o = f32::from_bits(u32::from(v.to_bits()) << 16);
    }
}

fn chunks<const N: usize, T>(bytes: &[u8], out: &mut [T], convert: impl Fn([u8; N]) -> T) {
    for (o, chunk) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *o = convert(*chunk);
    }
}

impl Weights {
    /// Weights that exist as a function only: see [`SyntheticTensor`] for the values.
    ///
    /// The statistics keep a random model alive: linear weights have deviation `1 / sqrt(fan_in)`, an untied embedding
    /// 1 after its scale, the head such that logits have deviation 2 before the softcap, biases 0.3, norm gains
    /// 1 +- 0.25 (stored around `1 - weight_offset`), sinks deviation 1, so that a bias or a gain that is ignored is visible; taps of
    /// convolutions have deviation `1 / sqrt(taps)`.
    ///
    /// Routers choose their experts about alike. A seed of `n * 2^32 + s` skews those of seed `s` and leaves all else: the rows of a router
    /// are multiplied by numbers whose logarithms have deviation `n / 10`, so that some experts are chosen much more often.
    pub fn synthetic(graph: &ModelGraph, seed: u64) -> Weights {
        let mut moments = vec![(0.0, 1.0); graph.tensors.len()];
        let mut set = |id: TensorId, mean: f64, std: f64| moments[id.index()] = (mean, std);
        let head_std = 2.0 / (f64::from(graph.hidden).sqrt() * f64::from(graph.logits_scale).abs());
        set(graph.embed, 0.0, 1.0 / f64::from(graph.embed_scale).abs());
        for layer in &graph.layers {
            for linear in layer.linears() {
                set(linear.weight.tensor, 0.0, 1.0 / f64::from(linear.cols).sqrt());
                linear.bias.iter().for_each(|bias| set(bias.tensor, 0.0, 0.3));
            }
        }
        for experts in graph.layers.iter().filter_map(|layer| layer.feed.experts()) {
            let router = &experts.router;
            // A part of how far scores are apart, so that it turns some choices and decides none alone.
            let spread = if router.score == Score::Sigmoid { 1.0 } else { 1.0 / experts.experts.len() as f64 };
            router.correction.iter().for_each(|&id| set(id, 0.0, 0.1 * spread));
        }
        for norm in norms(graph) {
            norm.weight.iter().for_each(|&id| set(id, 1.0 - f64::from(norm.weight_offset), 0.25));
            norm.bias.iter().for_each(|&id| set(id, 0.0, 0.3));
        }
        let attentions = graph.layers.iter().filter_map(Layer::history);
        for norm in attentions.flat_map(|attention| [&attention.q_norm, &attention.k_norm]).flatten() {
            norm.weights.iter().for_each(|&id| set(id, 1.0 - f64::from(norm.weight_offset), 0.25));
        }
        for layer in &graph.layers {
            layer.history().into_iter().flat_map(|attention| attention.sinks).for_each(|sinks| set(sinks, 0.0, 1.0));
            let taps = |kernel: u32| 1.0 / f64::from(kernel).sqrt();
            // Most decays are above 0.7: states reach far, and steps differ.
            let (decay, step) = ((0.0, 0.5), (-2.0, 0.5));
            match &layer.mixer {
                Mixer::Attention(_) => {}
                Mixer::GatedDelta(net) => {
                    net.conv.iter().for_each(|&id| set(id, 0.0, taps(net.kernel)));
                    set(net.a_log, decay.0, decay.1);
                    set(net.dt_bias, step.0, step.1);
                }
                Mixer::ShortConv(conv) => {
                    set(conv.conv, 0.0, taps(conv.kernel));
                    conv.conv_bias.iter().for_each(|&bias| set(bias, 0.0, 0.3));
                }
                Mixer::Mamba2(_) | Mixer::SideBySide(_) => {
                    if let Some(mamba) = layer.mamba() {
                        set(mamba.conv, 0.0, taps(mamba.kernel));
                        mamba.conv_bias.iter().for_each(|&bias| set(bias, 0.0, 0.3));
                        set(mamba.a_log, decay.0, decay.1);
                        set(mamba.dt_bias, step.0, step.1);
                        set(mamba.d, 1.0, 0.25);
                    }
                }
            }
        }
        // Last: a tied table is shaped by its use as the head, since the first norm makes up for its size as input.
        set(graph.head.weight.tensor, 0.0, head_std);
        graph.head.bias.iter().for_each(|bias| set(bias.tensor, 0.0, 0.3));
        let routers = graph.layers.iter().filter_map(|layer| Some(layer.feed.experts()?.router.linear.weight.tensor));
        let routers: BTreeSet<TensorId> = routers.collect();
        let (skew, own) = match routers.is_empty() {
            true => (0.0, seed),
            false => ((seed >> 32) as f32 / 10.0, seed & u64::from(u32::MAX)),
        };
        let of = |((id, t), (mean, std)): ((TensorId, &Tensor), (f64, f64))| {
            let tensor = SyntheticTensor::new(own, &t.name, mean as f32, std as f32);
            if skew == 0.0 || !routers.contains(&id) {
                return Stored::new(t, Source::Synthetic(tensor));
            }
            let gains = SyntheticTensor::new(own, &format!("{}.skew", t.name), 0.0, 1.0);
            Stored::new(t, Source::Skewed { tensor, gains, skew })
        };
        let tensors = (0..).map(TensorId).zip(&graph.tensors).zip(moments).map(of).collect();
        Weights { tensors, maps: Vec::new(), files: Vec::new(), seed: Some(seed) }
    }

    /// Path and length of every weight file, in the order of the index: what identifies the weights, with their
    /// content. Empty for synthetic weights.
    pub fn files(&self) -> &[(PathBuf, u64)] {
        &self.files
    }

    /// How the matrices of codes are read, each way once, for people.
    pub fn readings(&self) -> BTreeSet<String> {
        let of = |source: &Source| match source {
            Source::Coded(coded) => Some(coded.recipe.reading()),
            Source::Blocks(blocks) => Some(blocks.reading()),
            Source::Transposed { .. } => Some("values of transposed matrices".to_string()),
            Source::Mapped { .. }
            | Source::Synthetic(_)
            | Source::Skewed { .. }
            | Source::Rounded(..)
            | Source::Same(_) => None,
        };
        self.tensors.iter().filter_map(|tensor| of(&tensor.source)).collect()
    }

    /// The recipe of a matrix of codes, to be changed by a test.
    #[cfg(test)]
    pub fn recipe_mut(&mut self, id: TensorId) -> Option<&mut Recipe> {
        match &mut self.tensors[id.index()].source {
            Source::Coded(coded) => Some(&mut coded.recipe),
            _ => None,
        }
    }

    /// The seed of synthetic weights; with the graph it identifies them.
    pub fn synthetic_seed(&self) -> Option<u64> {
        self.seed
    }

    /// Rows of the tensor: 1 for rank 1.
    pub fn rows(&self, id: TensorId) -> u32 {
        self.tensors[id.index()].rows
    }

    /// Values in a row.
    pub fn cols(&self, id: TensorId) -> usize {
        self.tensors[id.index()].cols
    }

    /// Adds a matrix with the values of `of` rounded to `format`, and returns its id: the next one of the graph.
    pub fn rounded_copy(&mut self, of: TensorId, format: Format) -> TensorId {
        let Stored { dtype, rows, cols, .. } = self.tensors[of.index()];
        let id = TensorId::from(self.tensors.len());
        self.tensors.push(Stored { dtype, rows, cols, source: Source::Rounded(Box::new(Source::Same(of)), format) });
        id
    }

    /// Rounds the values of a matrix to `format` whenever they are read.
    pub fn round(&mut self, id: TensorId, format: Format) {
        let source = &mut self.tensors[id.index()].source;
        let values = std::mem::replace(source, Source::Same(id));
        *source = Source::Rounded(Box::new(values), format);
    }

    /// How a matrix is coded; `None`: its values are stored.
    pub fn format(&self, id: TensorId) -> Option<Format> {
        match &self.tensors[id.index()].source {
            Source::Coded(coded) => Some(coded.recipe.format),
            Source::Blocks(blocks) => blocks.format(),
            Source::Rounded(_, format) => Some(*format),
            Source::Mapped { .. }
            | Source::Synthetic(_)
            | Source::Skewed { .. }
            | Source::Transposed { .. }
            | Source::Same(_) => None,
        }
    }

    /// The first value of a part of a matrix that contradicts the config, or leads nowhere.
    pub fn part_fault(&self, id: TensorId) -> Option<PartFault> {
        match &self.tensors[id.index()].source {
            Source::Coded(coded) => coded.fault(&self.maps),
            _ => None,
        }
    }

    /// Row `row` of a matrix of codes.
    ///
    /// # Panics
    /// If the tensor has no format, or a plain one.
    pub fn read_row_coded(&self, id: TensorId, row: u32, out: &mut CodedRow) {
        match &self.tensors[id.index()].source {
            Source::Coded(coded) => coded.read_coded(&self.maps, row, out),
            Source::Blocks(blocks) => blocks.read_coded(&self.maps, row, out),
            Source::Rounded(source, format) => {
                let mut values = vec![0.0; self.cols(id)];
                let first = self.row_begin(id, row, values.len());
                match &**source {
                    Source::Blocks(blocks) => blocks.read_values(&self.maps, row, &mut values),
                    Source::Same(of) => self.read_row_f32(*of, row, &mut values),
                    Source::Transposed { file, bytes, rows } => {
                        let values_of = self.values_of(*file, bytes, self.tensors[id.index()].dtype);
                        values_of.read_column_f32(row, *rows, &mut values);
                    }
                    source => self.view_of(source, self.tensors[id.index()].dtype).read_f32(first, &mut values),
                }
                round_row(*format, &values, out);
            }
            Source::Mapped { .. }
            | Source::Synthetic(_)
            | Source::Skewed { .. }
            | Source::Transposed { .. }
            | Source::Same(_) => {
                panic!("{id} is stored as values")
            }
        }
    }

    /// Every value of a tensor that is stored as values.
    ///
    /// # Panics
    /// If it is stored as codes, or transposed.
    pub fn view(&self, id: TensorId) -> TensorView<'_> {
        let stored = &self.tensors[id.index()];
        self.view_of(&stored.source, stored.dtype)
    }

    fn view_of<'a>(&'a self, source: &'a Source, dtype: DType) -> TensorView<'a> {
        match source {
            Source::Coded(_)
            | Source::Blocks(_)
            | Source::Rounded(..)
            | Source::Transposed { .. }
            | Source::Skewed { .. } => {
                panic!("only values that are used as they lie have a view")
            }
            Source::Same(id) => self.view(*id),
            Source::Synthetic(tensor) => TensorView::Synthetic(tensor),
            Source::Mapped { file, bytes } => self.values_of(*file, bytes, dtype),
        }
    }

    /// The values of a file as they lie there.
    fn values_of(&self, file: usize, bytes: &Range<usize>, dtype: DType) -> TensorView<'_> {
        let bytes = &self.maps[file][bytes.clone()];
        let view = match dtype {
            DType::F32 => bytemuck::try_cast_slice(bytes).ok().map(TensorView::F32),
            DType::Bf16 => bytemuck::try_cast_slice(bytes).ok().map(TensorView::Bf16),
            DType::F16 => bytemuck::try_cast_slice(bytes).ok().map(TensorView::F16),
            DType::I32 | DType::E4m3 => None,
        };
        view.unwrap_or(TensorView::Unaligned { dtype, bytes })
    }

    /// Row `row` of the tensor, `out` of length [`cols`](Self::cols); a tensor of rank 1 is row 0.
    ///
    /// # Panics
    /// If the row or the length is not the tensor's: a fault of the caller, since the graph holds both.
    pub fn read_row_f32(&self, id: TensorId, row: u32, out: &mut [f32]) {
        let first = self.row_begin(id, row, out.len());
        match &self.tensors[id.index()].source {
            Source::Coded(coded) => coded.read_values(&self.maps, row, out),
            Source::Blocks(blocks) => blocks.read_values(&self.maps, row, out),
            Source::Rounded(_, format) => {
                let mut codes = CodedRow::default();
                self.read_row_coded(id, row, &mut codes);
                codes.values(*format, out);
            }
            Source::Transposed { file, bytes, rows } => {
                self.values_of(*file, bytes, self.tensors[id.index()].dtype).read_column_f32(row, *rows, out);
            }
            Source::Skewed { tensor, gains, skew } => {
                tensor.fill_f32(first as u64, out);
                let gain = (gains.value(u64::from(row)).to_f32() * skew).exp();
                out.iter_mut().for_each(|value| *value = bf16::from_f32(*value * gain).to_f32());
            }
            Source::Same(of) => self.read_row_f32(*of, row, out),
            Source::Mapped { .. } | Source::Synthetic(_) => self.view(id).read_f32(first, out),
        }
    }

    /// As [`read_row_f32`](Self::read_row_f32), in bf16: a copy from bf16, rounded to nearest even from fp32.
    pub fn read_row_bf16(&self, id: TensorId, row: u32, out: &mut [bf16]) {
        let first = self.row_begin(id, row, out.len());
        if matches!(self.tensors[id.index()].source, Source::Mapped { .. } | Source::Synthetic(_)) {
            return self.view(id).read_bf16(first, out);
        }
        let mut values = vec![0.0; out.len()];
        self.read_row_f32(id, row, &mut values);
        out.iter_mut().zip(values).for_each(|(out, value)| *out = bf16::from_f32(value));
    }

    fn row_begin(&self, id: TensorId, row: u32, len: usize) -> usize {
        let stored = &self.tensors[id.index()];
        assert!(row < stored.rows && len == stored.cols, "row {row} of {len} values of {id}: {stored:?}");
        row as usize * stored.cols
    }

    /// All values of a small tensor: a vector, or the rows of a matrix one after another.
    pub fn vector_f32(&self, id: TensorId) -> Vec<f32> {
        let cols = self.cols(id);
        let mut out = vec![0.0; self.rows(id) as usize * cols];
        (0..).zip(out.chunks_exact_mut(cols.max(1))).for_each(|(row, out)| self.read_row_f32(id, row, out));
        out
    }

    /// Row `row` of a linear, through its view; `out` of length `linear.cols`.
    pub fn linear_row_f32(&self, linear: &Linear, row: u32, out: &mut [f32]) {
        self.read_row_f32(linear.weight.tensor, linear.weight.row(row), out);
    }

    /// The bias of a linear through its view, one value per output row; `None` where there is none.
    pub fn bias_f32(&self, linear: &Linear) -> Option<Vec<f32>> {
        let view: &RowView = linear.bias.as_ref()?;
        // Biases of stacked experts are rows of one tensor. Only those that the view reaches are read; the places of a view ascend.
        let cols = self.cols(view.tensor).max(1);
        let row_of = |row: u32| view.row(row) / cols as u32;
        let (first, last) = (row_of(0), row_of(linear.rows.saturating_sub(1)));
        let mut values = vec![0.0; (last - first + 1) as usize * cols];
        (first..).zip(values.chunks_exact_mut(cols)).for_each(|(row, out)| self.read_row_f32(view.tensor, row, out));
        let begin = first as usize * cols;
        Some((0..linear.rows).map(|row| values[view.row(row) as usize - begin]).collect())
    }
}

/// Norms of the residual stream and of mixers.
fn norms(graph: &ModelGraph) -> impl Iterator<Item = &Norm> {
    graph
        .layers
        .iter()
        .flat_map(|layer| {
            let around = [&layer.attn_norm, &layer.attn_post_norm, &layer.mlp_norm, &layer.mlp_post_norm];
            let own = match &layer.mixer {
                Mixer::GatedDelta(net) => Some(&net.norm),
                _ => layer.mamba().and_then(|mamba| Some(&mamba.norm.as_ref()?.norm)),
            };
            around.into_iter().flatten().chain(own)
        })
        .chain([&graph.final_norm])
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::model::config;
    use crate::reference;

    /// A safetensors file from its header text and data.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    }

    /// Every fault of a folder, one per line.
    fn faults(files: &[(&str, Vec<u8>)]) -> String {
        let faults = Checkpoint::open(folder(files).path()).unwrap_err();
        faults.iter().map(|fault| format!("{fault}\n")).collect()
    }

    fn single(header: &str, data_bytes: usize) -> String {
        faults(&[(SINGLE_FILE, file(header, &vec![0; data_bytes]))])
    }

    const TWO: &str = concat!(
        r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
        r#""b":{"dtype":"BF16","shape":[2,2],"data_offsets":[8,16]}}"#
    );

    #[test]
    fn headers_are_refused_by_name() {
        let expect = |found: String, expected: &str| assert_eq!(found, format!("{expected}\n"));
        let broken = |bytes: &[u8]| faults(&[(SINGLE_FILE, bytes.to_vec())]);
        expect(broken(b"\x01\0\0"), "`model.safetensors`: expected at least 8 bytes of header length, found 3");
        expect(
            broken(&[&u64::MAX.to_le_bytes()[..], b"{}"].concat()),
            "`model.safetensors`: expected a header of at most 100000000 bytes, found a length of 18446744073709551615",
        );
        let whole = file(TWO, &[0; 16]);
        expect(
            broken(&whole[..40]),
            "`model.safetensors`: the header declares 111 bytes, the file has 32 after its length field",
        );
        expect(
            broken(&whole[..whole.len() - 3]),
            "`model.safetensors`: tensor `b`: offsets 8..16 are outside the 13 bytes of data",
        );
        expect(single(TWO, 17), "`model.safetensors`: tensor data ends at byte 16 after the header, the file has 17");
        assert!(single("[1]", 0).contains("is no safetensors header"));
        assert!(single(&TWO[..60], 16).contains("is no safetensors header"));
        let tensor = |dtype: &str, shape: &str, offsets: &str| {
            single(&format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), 8)
        };
        expect(
            tensor("F32", "[3]", "[0,8]"),
            "`model.safetensors`: tensor `t` of F32 [3] needs 12 bytes, its offsets span 8",
        );
        expect(
            tensor("F32", "[4294967296,4294967296]", "[0,8]"),
            "`model.safetensors`: tensor `t` of F32 [4294967296, 4294967296] needs more than 2^64 bytes, \
             its offsets span 8",
        );
        expect(tensor("F7", "[2]", "[0,8]"), "`model.safetensors`: tensor `t`: unknown variant `F7`");
        expect(
            tensor("F32", "[2]", "[8,0]"),
            "`model.safetensors`: tensor `t`: offsets 8..0 are outside the 8 bytes of data",
        );
        assert!(tensor("F32", "[-1]", "[0,8]").contains("tensor `t`: invalid value: integer `-1`"));
        let two = |a: &str, b: &str, bytes| {
            let entry = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
            single(&format!(r#"{{"a":{},"b":{}}}"#, entry(a), entry(b)), bytes)
        };
        expect(
            two("[0,8]", "[4,12]", 12),
            "`model.safetensors`: tensors `a` and `b` overlap: one ends at byte 8, the next begins at 4",
        );
        expect(two("[0,8]", "[12,20]", 20), "`model.safetensors`: a hole of 4 bytes before tensor `b`");
        expect(two("[4,12]", "[12,20]", 20), "`model.safetensors`: a hole of 4 bytes before tensor `a`");
        let twice = TWO.replace("\"b\"", "\"a\"");
        expect(single(&twice, 16), "`model.safetensors`: the header names tensor `a` twice");
    }

    /// What a small file can make a reader hold or print is bounded.
    #[test]
    fn headers_and_indices_are_bounded_in_names_and_values() {
        let empty = |name: &str| format!(r#""{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#);
        let many: Vec<String> = (0..=TENSORS_MAX).map(|i| empty(&i.to_string())).collect();
        let found = single(&format!("{{{}}}", many.join(",")), 0);
        let expected =
            "`model.safetensors`: the header is no safetensors header: expected at most 262144 tensors, found more";
        assert!(found.starts_with(expected) && found.len() < 200, "{found}");
        let at_most = format!("{{{}}}", many[1..].join(","));
        assert_eq!(
            Checkpoint::open(folder(&[(SINGLE_FILE, file(&at_most, &[]))]).path()).unwrap().tensors().len(),
            TENSORS_MAX
        );

        let long = "n".repeat(NAME_BYTES_MAX + 1);
        let found = single(&format!("{{{}}}", empty(&long)), 0);
        assert!(
            found.contains("expected names of at most 512 bytes, found one of 513: `nnn") && found.len() < 250,
            "{found}"
        );
        let deep = format!(r#"{{"t":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,0]}}}}"#, "1,".repeat(100_000));
        let found = single(&deep, 0);
        assert!(found.contains("expected at most 64 values in the entry of a tensor"), "{found}");
        let metadata = format!(r#"{{"__metadata__":{{"k":[{}1]}},{}}}"#, "1,".repeat(1000), empty("t"));
        assert!(Checkpoint::open(folder(&[(SINGLE_FILE, file(&metadata, &[]))]).path()).is_ok());

        let index = |text: String| faults(&[(INDEX_FILE, text.into_bytes())]);
        let many: Vec<String> = (0..=TENSORS_MAX).map(|i| format!(r#""{i}":"a.safetensors""#)).collect();
        let found = index(format!(r#"{{"weight_map":{{{}}}}}"#, many.join(",")));
        assert!(found.contains("expected at most 262144 tensors, found more"), "{found}");
        let found = index(format!(r#"{{"weight_map":{{"t":"{long}.safetensors"}}}}"#));
        assert!(found.contains("expected names of at most 512 bytes") && found.len() < 250, "{found}");
        let sparse = tempfile::tempdir().unwrap();
        File::create(sparse.path().join(INDEX_FILE)).unwrap().set_len(1 << 40).unwrap();
        let found = Checkpoint::open(sparse.path()).unwrap_err();
        assert!(found[0].to_string().contains("expected at most 67108864 bytes"), "{found:?}");
    }

    #[test]
    fn folders_are_refused_by_name() {
        let one =
            |name: &str| file(&format!(r#"{{"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#), &[0; 8]);
        let index = |entries: &str| format!(r#"{{"metadata":{{}},"weight_map":{{{entries}}}}}"#).into_bytes();
        let (s1, s2) = ("m-1.safetensors", "m-2.safetensors");
        let whole = index(r#""a":"m-1.safetensors","b":"m-2.safetensors""#);

        let found = faults(&[(INDEX_FILE, whole.clone()), (s1, one("a"))]);
        assert_eq!(found, "`model.safetensors.index.json` names shard `m-2.safetensors`, which is not there\n");
        let found = faults(&[(INDEX_FILE, whole.clone()), (s1, one("a")), (s2, one("a"))]);
        assert_eq!(found, "tensor `a` is in both `m-1.safetensors` and `m-2.safetensors`\n");
        let found = faults(&[(INDEX_FILE, whole.clone()), (s1, one("a")), (s2, one("c"))]);
        let lacks = "`model.safetensors.index.json` places tensor `b` in `m-2.safetensors`, which does not hold it\n";
        let unlisted =
            "`m-2.safetensors` holds tensor `c`, which `model.safetensors.index.json` does not place there\n";
        assert_eq!(found, format!("{lacks}{unlisted}"));
        for name in ["../m.safetensors", "/etc/m.safetensors", "sub/m.safetensors", "m.bin", ".."] {
            let found = faults(&[(INDEX_FILE, index(&format!(r#""a":"{name}""#)))]);
            assert!(found.contains(&format!("names shard `{name}`, expected the name of")), "{found}");
        }
        assert!(faults(&[(INDEX_FILE, b"{}".to_vec())]).contains("missing field `weight_map`"));
        assert!(faults(&[(INDEX_FILE, index(""))]).contains("`weight_map` is empty"));
        let found = faults(&[(INDEX_FILE, whole), (SINGLE_FILE, one("a"))]);
        assert!(found.contains("are both there"), "{found}");
        let found = faults(&[("pytorch_model-00001-of-00002.bin", vec![])]);
        assert!(found.starts_with("`pytorch_model-00001-of-00002.bin` is a pickle checkpoint"), "{found}");
        assert!(faults(&[("model.gguf", vec![])]).starts_with("no safetensors, but `model.gguf`"));
        assert!(faults(&[]).contains("has no `model.safetensors`"));
        let found = faults(&[(SINGLE_FILE, one("a")), ("adapter_config.json", vec![])]);
        assert!(found.starts_with("`adapter_config.json` is an adapter"), "{found}");
    }

    /// Rows of the same values in every stored type, aligned and not.
    #[test]
    fn rows_are_read_from_every_type_and_alignment() {
        let values = [1.0f32, -2.5, 0.337_890_63, 1e-3, 65504.0, 3.0];
        for pad in 0..4 {
            for dtype in [DType::F32, DType::Bf16, DType::F16] {
                let (name, data): (&str, Vec<u8>) = match dtype {
                    DType::F32 => ("F32", values.iter().flat_map(|v| v.to_le_bytes()).collect()),
                    DType::Bf16 => ("BF16", values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()),
                    _ => ("F16", values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()),
                };
                let mut header =
                    format!(r#"{{"t":{{"dtype":"{name}","shape":[3,2],"data_offsets":[0,{}]}}}}"#, data.len());
                header.push_str(&" ".repeat((8 - header.len() % 8) % 8 + pad));
                let dir = folder(&[(SINGLE_FILE, file(&header, &data))]);
                let tensor = Tensor { name: "t".to_string(), dtype, shape: vec![3, 2] };
                let weights = Checkpoint::open(dir.path())
                    .unwrap()
                    .bind(&[tensor], BTreeMap::new(), BTreeMap::new(), &BTreeSet::new())
                    .unwrap();
                let aligned = !matches!(weights.view(TensorId(0)), TensorView::Unaligned { .. });
                assert_eq!(aligned, pad % dtype.bytes() == 0, "{name} {pad}");
                for row in 0..3 {
                    let given = &values[2 * row as usize..2 * row as usize + 2];
                    let exact: Vec<f32> = match dtype {
                        DType::F32 => given.to_vec(),
                        DType::Bf16 => given.iter().map(|v| bf16::from_f32(*v).to_f32()).collect(),
                        _ => given.iter().map(|v| f16::from_f32(*v).to_f32()).collect(),
                    };
                    let (mut wide, mut narrow) = ([0.0; 2], [bf16::ZERO; 2]);
                    weights.read_row_f32(TensorId(0), row, &mut wide);
                    weights.read_row_bf16(TensorId(0), row, &mut narrow);
                    assert_eq!(wide.to_vec(), exact);
                    assert_eq!(narrow.to_vec(), exact.iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn fp32_rounds_to_bf16_to_nearest_even() {
        let data: Vec<u8> = [0x3F80_8000u32, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF]
            .iter()
            .flat_map(|bits| bits.to_le_bytes())
            .collect();
        let header = r#"{"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
        let dir = folder(&[(SINGLE_FILE, file(header, &data))]);
        let tensor = Tensor { name: "t".to_string(), dtype: DType::F32, shape: vec![4] };
        let weights = Checkpoint::open(dir.path())
            .unwrap()
            .bind(&[tensor], BTreeMap::new(), BTreeMap::new(), &BTreeSet::new())
            .unwrap();
        let mut row = [bf16::ZERO; 4];
        weights.read_row_bf16(TensorId(0), 0, &mut row);
        assert_eq!(row.map(bf16::to_bits), [0x3F80, 0x3F82, 0x3F81, 0x3F80]);
    }

    const LLAMA_8B: &str = r#"{"architectures":["LlamaForCausalLM"],"hidden_size":4096,"intermediate_size":14336,
        "num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"vocab_size":128256}"#;

    /// 16 GB in four sparse shards: only headers may be read, and a row in the middle is still there.
    #[test]
    fn importing_a_large_model_reads_headers_only() {
        let graph = config::import_config_only(LLAMA_8B, 0).unwrap().graph;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), LLAMA_8B).unwrap();
        let mut index = Vec::new();
        let (mut headers, mut bytes_total) = (0, 0);
        for (shard, tensors) in graph.tensors.chunks(graph.tensors.len().div_ceil(4)).enumerate() {
            let name = format!("model-{shard}.safetensors");
            let (mut entries, mut end) = (Vec::new(), 0u64);
            for t in tensors {
                let begin = end;
                end += t.shape.iter().map(|&n| u64::from(n)).product::<u64>() * 2;
                let shape = &t.shape;
                let offsets = [begin, end];
                entries
                    .push(format!(r#""{}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":{offsets:?}}}"#, t.name));
                index.push(format!(r#""{}":"{name}""#, t.name));
            }
            let header = file(&format!("{{{}}}", entries.join(",")), &[]);
            std::fs::write(dir.path().join(&name), &header).unwrap();
            let handle = File::options().write(true).open(dir.path().join(&name)).unwrap();
            handle.set_len(header.len() as u64 + end).unwrap();
            headers += header.len() as u64;
            bytes_total += end;
        }
        let index = format!(r#"{{"weight_map":{{{}}}}}"#, index.join(","));
        std::fs::write(dir.path().join(INDEX_FILE), &index).unwrap();
        let imported = config::import(dir.path()).unwrap();
        assert_eq!(bytes_total, 16_060_522_496);
        assert_eq!(imported.header_bytes_read, headers + index.len() as u64);
        assert!(imported.header_bytes_read < 100_000);
        assert_eq!(imported.graph, graph);
        let mut row = vec![1.0; 4096];
        imported.weights.read_row_f32(graph.layers[20].attention().unwrap().q.weight.tensor, 4095, &mut row);
        assert_eq!(row, vec![0.0; 4096]);
    }

    /// A file changed in any one byte of its header is imported or refused; it never panics or allocates at will.
    #[test]
    fn damaged_headers_never_panic() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/variants/llama-defaults");
        let whole = std::fs::read(folder.join(SINGLE_FILE)).unwrap();
        let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(folder.join("config.json"), dir.path().join("config.json")).unwrap();
        let path = dir.path().join(SINGLE_FILE);
        let mut refused = 0;
        for i in 0..600usize {
            let mut bytes = whole.clone();
            let at = i.wrapping_mul(2_654_435_761) % header_end;
            bytes[at] ^= 1 << (i % 8);
            std::fs::write(&path, &bytes).unwrap();
            refused += usize::from(config::import(dir.path()).is_err());
        }
        for length in (0..header_end + 100).step_by(37) {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(config::import(dir.path()).is_err());
        }
        // Whitespace and the metadata may change without harm, and nothing else.
        assert!(refused > 560, "{refused}");
    }

    /// Of 512 rows of a normed input: how many choose the busiest eighth of the experts, of all choices.
    fn busiest(seed: u64) -> f64 {
        let config = include_str!("../../manifests/configs/qwen3-30b-a3b.json");
        let imported = config::import_config_only(config, seed).unwrap();
        let (graph, weights) = (&imported.graph, &imported.weights);
        let router = &graph.layers[3].feed.experts().unwrap().router;
        let inputs = SyntheticTensor::new(5, "inputs", 0.0, 1.0);
        let mut counts = vec![0u32; 128];
        let mut input = vec![0.0; graph.hidden as usize];
        for row in 0..512 {
            inputs.fill_f32(row * u64::from(graph.hidden), &mut input);
            let wide: Vec<f64> = input.iter().map(|&x| f64::from(x)).collect();
            let scores = reference::scores(router, &reference::linear(weights, &router.linear, &wide));
            reference::choose(weights, router, &scores).into_iter().for_each(|e| counts[e as usize] += 1);
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        f64::from(counts[..16].iter().sum::<u32>()) / f64::from(counts.iter().sum::<u32>())
    }

    #[test]
    fn seeds_above_32_bits_skew_routers() {
        let [uniform, skewed, more] = [7, 10 << 32 | 7, 20 << 32 | 7].map(busiest);
        assert!((0.125..0.2).contains(&uniform), "{uniform}");
        assert!((0.35..0.75).contains(&skewed), "{skewed}");
        assert!(more > skewed + 0.1, "{skewed} {more}");
        // Nothing else differs.
        let config = include_str!("../../manifests/configs/olmoe-1b-7b.json");
        let values = |seed: u64, name: &str| {
            let imported = config::import_config_only(config, seed).unwrap();
            let at = imported.graph.tensors.iter().position(|tensor| tensor.name == name).unwrap();
            let mut row = vec![0.0; imported.weights.cols(TensorId::from(at))];
            imported.weights.read_row_f32(TensorId::from(at), 1, &mut row);
            row
        };
        let names = ["model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.gate.weight"];
        let same = names.map(|name| values(9, name) == values(10 << 32 | 9, name));
        assert_eq!(same, [true, false]);
    }

    #[test]
    fn synthetic_weights_have_the_statistics_they_promise() {
        let config = r#"{"architectures":["Gemma2ForCausalLM"],"hidden_size":128,"intermediate_size":256,
            "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":512,"head_dim":32}"#;
        let imported = config::import_config_only(config, 5).unwrap();
        let (graph, weights) = (&imported.graph, &imported.weights);
        assert_eq!((weights.synthetic_seed(), weights.files().len()), (Some(5), 0));
        let moments = |id: TensorId| {
            let (rows, cols) = (weights.rows(id), weights.cols(id));
            let mut values = vec![0.0; rows as usize * cols];
            for (row, out) in values.chunks_exact_mut(cols).enumerate() {
                weights.read_row_f32(id, row as u32, out);
                let mut narrow = vec![bf16::ZERO; cols];
                weights.read_row_bf16(id, row as u32, &mut narrow);
                assert!(narrow.iter().zip(&*out).all(|(n, w)| n.to_f32() == *w));
            }
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            let var = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / values.len() as f32;
            (mean, var.sqrt())
        };
        let close = |found: (f32, f32), mean: f32, std: f32| {
            assert!((found.0 - mean).abs() < 0.3 * std && (found.1 / std - 1.0).abs() < 0.2, "{found:?} {mean} {std}");
        };
        close(moments(graph.layers[0].attention().unwrap().q.weight.tensor), 0.0, 128f32.powf(-0.5));
        close(moments(graph.layers[1].feed.dense().unwrap().down.weight.tensor), 0.0, 256f32.powf(-0.5));
        close(moments(graph.final_norm.weight.unwrap()), 0.0, 0.25);
        close(moments(graph.embed), 0.0, 2.0 / 128f32.sqrt());
        let ids: Vec<u32> = (0..16).map(|i| i * 31).collect();
        let logits = crate::reference::forward(graph, weights, &ids);
        let last: Vec<f64> = logits.iter().flatten().map(|&l| f64::from(l)).collect();
        let std = (last.iter().map(|l| l * l).sum::<f64>() / last.len() as f64).sqrt();
        assert!((1.0..4.0).contains(&std), "{std}");
    }
}
