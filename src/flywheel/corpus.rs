//! Owns the corpus file: appending rows, reading them back, and merging corpora.
//!
//! The executable includes a compressed corpus of shared measurements. The user's file is only ever appended to. A row is one
//! line and one `write(2)` under an exclusive lock, so any number of processes may append at once. A row that a crash cut is
//! marked by the next writer and reported by every reader. A row for which the disk has no room is removed again. The reader
//! trusts nothing: a line that is not a whole row of a known schema is reported with its number and skipped, and the
//! other lines are still read.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{fmt, mem};

use super::known::{Known, KnownRows};
use super::trial::{
    ADDED_IN_2, ADDED_IN_3, ADDED_IN_4, COLUMNS, DECODE_KERNEL, Decision, Proposer, SCHEMA, Timing, Trial,
};
use crate::cache::lock::{LockError, Wait, lock_path};
use crate::digest::Digest;
use crate::error::Fault;
use crate::files::{self, FileError};

/// Rows that come with the executable; a folder `corpus/` beside the user's trials takes their place.
const SHIPPED: &[u8] = include_bytes!("../../flywheel/corpus/h200.csv.zst");
/// Name of the built-in corpus in messages.
const SHIPPED_NAME: &str = "shipped corpus";
/// End of the file name of a compressed corpus.
const COMPRESSED: &str = ".csv.zst";
/// Limit for decompressed text, because a small compressed file can expand to any size.
const TEXT_BYTES_MAX: u64 = 1 << 30;
/// The best level of `zstd` that does not need more memory to decompress.
const COMPRESSION_LEVEL: i32 = 19;
/// Longest line that is read as a row; a row takes about 1.5 kB.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Ends a line that a crash cut. Before this mark the writer adds a closing quote, if one is open, and a comma for every column.
/// Then the line has too many cells for any reader of CSV, so it can neither pass for a row nor swallow the next one.
const TORN_MARK: &str = ",torn by a crash";

/// A corpus that cannot be read or written. Broken rows are no error.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    #[error("cannot append to `{}`: {source}", path.display())]
    Full { path: PathBuf, source: io::Error },
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// A pipe, a device or a folder in place of a file.
    #[error(transparent)]
    NotRegular(FileError),
    #[error("cannot lock `{}`: {source}", path.display())]
    Lock { path: PathBuf, source: io::Error },
    #[error("cannot append to `{}`: its first line {reason}", path.display())]
    Header { path: PathBuf, reason: String },
}

impl CorpusError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> CorpusError {
        let path = path.to_path_buf();
        let source = match source.downcast::<FileError>() {
            Ok(error) => return CorpusError::NotRegular(error),
            Err(source) => source,
        };
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                CorpusError::Full { path, source }
            }
            _ => CorpusError::Io { action, path, source },
        }
    }
}

impl From<CorpusError> for Fault {
    fn from(error: CorpusError) -> Fault {
        let message = error.to_string();
        match error {
            CorpusError::Full { .. } => {
                Fault::environment(message).with_remedy("free space on that disk; the file is as it was before the row")
            }
            CorpusError::Io { .. } => {
                Fault::environment(message).with_remedy("check that the path is a file this user may read and write")
            }
            CorpusError::NotRegular(error) => Fault::from(error),
            CorpusError::Lock { .. } => Fault::environment(message).with_remedy(
                "keep the corpus on a file system with locks: without them, rows of two processes could mix",
            ),
            CorpusError::Header { .. } => Fault::input(message).with_remedy(
                "rename the file, and bring its rows into a new one with `monobloc flywheel merge RENAMED.csv`",
            ),
        }
    }
}

/// A line that is not a row, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenRow {
    pub path: PathBuf,
    /// From 1; the header is line 1.
    pub line: u64,
    pub reason: String,
}

impl fmt::Display for BrokenRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path.display(), self.line, self.reason)
    }
}

/// The trials of one file or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Corpus {
    /// In file order, each id once.
    pub trials: Vec<Trial>,
    pub broken: Vec<BrokenRow>,
    /// Digest of the bytes read, file by file.
    pub digest: Digest,
}

impl Corpus {
    /// Reads corpora as one. A file that does not exist is an empty corpus: the first trial creates it.
    pub fn read<P: AsRef<Path>>(paths: &[P]) -> Result<Corpus, CorpusError> {
        let mut reader = Reader::<Kept>::default();
        for path in paths {
            reader.read(path.as_ref())?;
        }
        Ok(reader.finish())
    }

    /// Reads all rows for the owner of `trials`: first the corpora in the folder `corpus/` beside that file, or the built-in corpus if
    /// there is no such folder; then the file itself. Nothing is written to a corpus.
    pub fn known(trials: &Path) -> Result<Corpus, CorpusError> {
        let mut reader = Reader::<Kept>::default();
        match corpora(trials) {
            Some(paths) => paths.iter().try_for_each(|path| reader.read(path))?,
            None => reader.read_lines(Path::new(SHIPPED_NAME), decompressed(SHIPPED))?,
        }
        reader.read(trials)?;
        Ok(reader.finish())
    }
}

/// The corpora beside a file of trials; `None` if there is no folder for them.
fn corpora(trials: &Path) -> Option<Vec<PathBuf>> {
    let folder = fs::read_dir(trials.with_file_name("corpus")).ok()?;
    let is_corpus =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "csv") || is_compressed(path);
    let mut paths: Vec<PathBuf> = folder.filter_map(|entry| Some(entry.ok()?.path())).filter(is_corpus).collect();
    paths.sort();
    Some(paths)
}

fn is_compressed(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(COMPRESSED))
}

/// Decompresses a corpus while it is read.
fn decompressed<'a>(from: impl Read + 'a) -> Box<dyn BufRead + 'a> {
    match zstd::Decoder::new(from) {
        Ok(decoder) => Box::new(BufReader::with_capacity(1 << 17, decoder.take(TEXT_BYTES_MAX))),
        Err(error) => Box::new(BufReader::new(Failing(Some(error)))),
    }
}

/// A reader that returns its error once, for a decompressor that cannot be made.
struct Failing(Option<io::Error>);

impl Read for Failing {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}

/// The bytes of a corpus for a file called `name`: compressed if the name ends in `.csv.zst`.
pub fn encoded(name: &Path, text: &str) -> io::Result<Vec<u8>> {
    match is_compressed(name) {
        true => zstd::encode_all(text.as_bytes(), COMPRESSION_LEVEL),
        false => Ok(text.as_bytes().to_vec()),
    }
}

/// Appends rows, creating file and header if needed. All rows before a failure are in the file, whole.
pub fn append(path: &Path, trials: &[Trial]) -> Result<(), CorpusError> {
    append_locked(path, |_, append| append(trials))
}

/// Result of a merge.
#[derive(Debug, Clone, PartialEq)]
pub struct MergeReport {
    pub rows_added: u64,
    /// Rows of the inputs whose id is already in the output or in an earlier input.
    pub duplicates: u64,
    /// Broken rows in the inputs and the output; none was copied or removed.
    pub broken: Vec<BrokenRow>,
}

/// Appends to `output` every row of `inputs` that it does not have, in their order. Nothing in `output` is rewritten. One row is in
/// memory at a time; the ids of all rows are on the disk of `output`. All rows before a failure are in the file, whole.
pub fn merge<P: AsRef<Path>>(inputs: &[P], output: &Path) -> Result<MergeReport, CorpusError> {
    for input in inputs {
        let input = input.as_ref();
        // A missing input of a merge is a mistake, unlike a corpus that has no trial yet.
        fs::metadata(input).map_err(|source| CorpusError::io("read", input, source))?;
    }
    let mut report = MergeReport { rows_added: 0, duplicates: 0, broken: Vec::new() };
    append_locked(output, |file, append| {
        let known = KnownRows::new_in(folder_of(output).unwrap_or(Path::new(".")));
        let known = known.map_err(|source| CorpusError::io("list the ids of", output, source))?;
        let mut present = Reader::of(Merged { output, known, append: None });
        present.read_open(output, file)?;
        let known = present.rows.known;
        let rows_before = known.count();
        let mut reader = Reader::of(Merged { output, known, append: Some(append) });
        for input in inputs {
            let input = input.as_ref();
            // It is locked, and its rows are known.
            match is_same_file(file, input) {
                true => reader.duplicates += rows_before,
                false => reader.read(input)?,
            }
        }
        report.rows_added = reader.rows.known.count() - rows_before;
        report.duplicates = reader.duplicates;
        report.broken = [reader.broken, present.broken].concat();
        Ok(())
    })?;
    Ok(report)
}

/// The folder that a path names; `None` is the current one.
fn folder_of(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| !folder.as_os_str().is_empty())
}

fn is_same_file(open: &File, path: &Path) -> bool {
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let (open, named) = (open.metadata().map(identity).ok(), fs::metadata(path).map(identity).ok());
    open.is_some() && open == named
}

/// Digest of all cells of a row.
fn content(trial: &Trial) -> Digest {
    let cells = trial.cells().into_iter().map(|(name, cell)| format!("{name} {} {cell}\n", cell.len()));
    Digest::of(cells.collect::<String>().as_bytes())
}

/// Appends rows to a locked corpus.
type Append<'a> = dyn FnMut(&[Trial]) -> Result<(), CorpusError> + 'a;

/// Locks the corpus and runs `work`, which appends rows with its second argument.
fn append_locked(
    path: &Path,
    work: impl FnOnce(&File, &mut Append<'_>) -> Result<(), CorpusError>,
) -> Result<(), CorpusError> {
    let fault = |source| CorpusError::io("append to", path, source);
    if let Some(folder) = folder_of(path) {
        fs::create_dir_all(folder).map_err(|source| CorpusError::io("create", folder, source))?;
    }
    let open = |path: &Path| Ok(files::open_with(path, OpenOptions::new().create(true).append(true).read(true))?);
    let file = lock_path(path, open, Wait::Silently).map_err(|error| match error {
        LockError::Open { path, source } => CorpusError::io("open", &path, source),
        LockError::Lock { path, source } => CorpusError::Lock { path, source },
    })?;
    let columns = match header(&file).map_err(fault)? {
        Header::Columns(columns) => columns,
        Header::Torn => {
            file.set_len(0).map_err(fault)?;
            write_line(&file, &header_line()).map_err(fault)?;
            COLUMNS.map(|column| column.name.to_string()).to_vec()
        }
        Header::Unusable(reason) => return Err(CorpusError::Header { path: path.to_path_buf(), reason }),
    };
    end_torn_line(&file, columns.len()).map_err(fault)?;
    let has_kernel = columns.iter().any(|name| name == "kernel");
    let mut append = |rows: &[Trial]| {
        // It would pass for a row of the decode kernel.
        if let Some(other) = rows.iter().find(|row| !has_kernel && row.facts().model.kernel != DECODE_KERNEL) {
            let reason = format!("lacks `kernel`, and the row is of `{}`", other.facts().model.kernel);
            return Err(CorpusError::Header { path: path.to_path_buf(), reason });
        }
        rows.iter().try_for_each(|trial| write_line(&file, &row_line(&columns, trial)?)).map_err(fault)
    };
    let worked = work(&file, &mut append);
    file.sync_data().map_err(fault)?;
    worked
}

enum Header {
    /// Names in file order. Appended rows use that order, so a file may have its columns in any order.
    Columns(Vec<String>),
    /// An empty file, or a part of our own first line, left by a crash.
    Torn,
    Unusable(String),
}

fn header(file: &File) -> io::Result<Header> {
    let mut start = vec![0; LINE_BYTES_MAX.min(usize::try_from(file.metadata()?.len()).unwrap_or(LINE_BYTES_MAX))];
    file.read_exact_at(&mut start, 0)?;
    let Some(line) = start.split_inclusive(|byte| *byte == b'\n').next().and_then(|line| line.strip_suffix(b"\n"))
    else {
        let torn = header_line().as_bytes().starts_with(&start);
        return Ok(if torn { Header::Torn } else { Header::Unusable("is not the header of a corpus".to_string()) });
    };
    let columns = cells(line).map(|columns| header_columns(&columns));
    Ok(match columns {
        None => Header::Unusable("is not text".to_string()),
        Some(Err(reason)) => Header::Unusable(reason),
        // Files of schema 1 are read, but not appended to: rows of this schema would lose the content of the columns they lack.
        Some(Ok(columns)) => match ADDED_IN_2.into_iter().find(|added| !columns.iter().any(|name| name == added)) {
            Some(added) => Header::Unusable(format!("lacks {added}: it is of schema 1")),
            None => Header::Columns(columns),
        },
    })
}

/// The names of a header, if it has every column that all schemas share, and no column twice.
fn header_columns(names: &[String]) -> Result<Vec<String>, String> {
    let mut names = names.to_vec();
    if let Some(first) = names.first_mut() {
        // Spreadsheets start a file with a byte order mark.
        *first = first.trim_start_matches('\u{feff}').to_string();
    }
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(format!("names the column `{twice}` twice"));
    }
    let added = |name: &&str| [&ADDED_IN_2[..], &ADDED_IN_3, &ADDED_IN_4].concat().contains(name);
    let needed = COLUMNS.iter().map(|column| column.name).filter(|name| !added(name));
    let missing: Vec<&str> = needed.filter(|name| !seen.contains(name)).collect();
    match missing.as_slice() {
        [] => Ok(names),
        [one, rest @ ..] if rest.len() < 3 => Err(format!("lacks {}", [&[*one], rest].concat().join(", "))),
        [one, rest @ ..] => Err(format!("lacks {one} and {} more columns", rest.len())),
    }
}

fn header_line() -> String {
    // No name needs quotes (a test holds that).
    COLUMNS.map(|column| column.name).join(",") + "\n"
}

fn row_line(columns: &[String], trial: &Trial) -> io::Result<String> {
    let own = trial.cells();
    let own: HashMap<&str, &str> = own.iter().map(|(name, cell)| (*name, cell.as_str())).collect();
    let mut writer = csv::WriterBuilder::new().from_writer(Vec::new());
    writer.write_record(columns.iter().map(|name| own.get(name.as_str()).copied().unwrap_or_default()))?;
    let line = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    String::from_utf8(line).map_err(io::Error::other)
}

/// Appends one line, whole or not at all.
fn write_line(mut file: &File, line: &str) -> io::Result<()> {
    let before = file.metadata()?.len();
    // One `write(2)`, unless the disk takes only a part; the write of the rest then fails with the reason.
    file.write_all(line.as_bytes()).or_else(|error| {
        file.set_len(before)?;
        Err(error)
    })
}

/// Closes the line that a crash cut in the middle.
fn end_torn_line(file: &File, columns: usize) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut tail = vec![0; LINE_BYTES_MAX.min(usize::try_from(length).unwrap_or(LINE_BYTES_MAX))];
    let start = length - tail.len() as u64;
    file.read_exact_at(&mut tail, start)?;
    let torn = tail.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    if torn.is_empty() {
        return Ok(());
    }
    let quote = if torn.iter().filter(|byte| **byte == b'"').count() % 2 == 1 { "\"" } else { "" };
    write_line(file, &format!("{quote}{}{TORN_MARK}\n", ",".repeat(columns)))
}

/// The cells of one line; `None` if it is not UTF-8 or not CSV.
fn cells(line: &[u8]) -> Option<Vec<String>> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).buffer_capacity(line.len() + 1).from_reader(line);
    let mut record = csv::StringRecord::new();
    match reader.read_record(&mut record) {
        Ok(true) => Some(record.iter().map(str::to_string).collect()),
        _ => None,
    }
}

/// Takes the rows of a [`Reader`].
trait Rows {
    fn take(&mut self, trial: Trial) -> Result<Known, CorpusError>;
}

/// Keeps rows in memory.
#[derive(Default)]
struct Kept {
    trials: Vec<Trial>,
    /// Index of an id in `trials`.
    known: HashMap<Digest, usize>,
}

impl Rows for Kept {
    fn take(&mut self, trial: Trial) -> Result<Known, CorpusError> {
        Ok(match self.known.get(&trial.trial_id()).and_then(|at| self.trials.get(*at)) {
            None => {
                self.known.insert(trial.trial_id(), self.trials.len());
                self.trials.push(trial);
                Known::New
            }
            Some(first) if *first == trial => Known::Same,
            Some(_) => Known::Other,
        })
    }
}

/// Appends rows that are not known yet; without `append` they only become known.
struct Merged<'a> {
    output: &'a Path,
    known: KnownRows,
    append: Option<&'a mut Append<'a>>,
}

impl Rows for Merged<'_> {
    fn take(&mut self, trial: Trial) -> Result<Known, CorpusError> {
        let added = self.known.add(trial.trial_id(), content(&trial));
        let known = added.map_err(|source| CorpusError::io("list the ids of", self.output, source))?;
        if let (Some(append), Known::New) = (&mut self.append, known) {
            append(&[trial])?;
        }
        Ok(known)
    }
}

/// Reads the rows of several files.
#[derive(Default)]
struct Reader<R> {
    rows: R,
    broken: Vec<BrokenRow>,
    duplicates: u64,
    digests: Vec<u8>,
}

impl Reader<Kept> {
    fn finish(self) -> Corpus {
        Corpus { trials: self.rows.trials, broken: self.broken, digest: Digest::of(&self.digests) }
    }
}

impl<R: Rows> Reader<R> {
    fn of(rows: R) -> Reader<R> {
        Reader { rows, broken: vec![], duplicates: 0, digests: vec![] }
    }

    fn read(&mut self, path: &Path) -> Result<(), CorpusError> {
        let file = match files::open(path).map_err(io::Error::from) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(CorpusError::io("read", path, source)),
        };
        // Waits for a row that is being written. Without locks such a row is reported as torn, and is whole the next time.
        let locked = file.lock_shared().is_ok();
        let result = self.read_open(path, &file);
        if locked {
            let _ = file.unlock();
        }
        result
    }

    fn read_open(&mut self, path: &Path, file: &File) -> Result<(), CorpusError> {
        let bytes = AtStart { file, offset: 0 };
        match is_compressed(path) {
            true => self.read_lines(path, decompressed(bytes)),
            false => self.read_lines(path, BufReader::with_capacity(1 << 17, bytes)),
        }
    }

    fn read_lines(&mut self, path: &Path, from: impl BufRead) -> Result<(), CorpusError> {
        let fault = |source| CorpusError::io("read", path, source);
        let mut lines = Lines { from, hasher: blake3::Hasher::new() };
        let mut header: Option<FileColumns> = None;
        let mut number = 0;
        while let Some(line) = lines.next().map_err(fault)? {
            number += 1;
            let broken = |reason: String| BrokenRow { path: path.to_path_buf(), line: number, reason };
            match &header {
                None => {
                    let names = line.text().and_then(|text| cells(text).ok_or("is not text".to_string()));
                    match names.and_then(|names| header_columns(&names)) {
                        Ok(names) => header = Some(FileColumns::of(names)),
                        Err(reason) => {
                            self.broken.push(broken(format!("the header {reason}; none of the rows was read")));
                            // The rest is read for the digest alone.
                            while lines.next().map_err(fault)?.is_some() {}
                        }
                    }
                }
                Some(header) => match line.text().and_then(|text| row(header, text)) {
                    Ok(None) => {}
                    Ok(Some(trial)) => self.add(trial, broken)?,
                    Err(reason) => self.broken.push(broken(reason)),
                },
            }
        }
        self.digests.extend_from_slice(lines.hasher.finalize().as_bytes());
        Ok(())
    }

    fn add(&mut self, trial: Trial, broken: impl FnOnce(String) -> BrokenRow) -> Result<(), CorpusError> {
        let id = trial.trial_id();
        match self.rows.take(trial)? {
            Known::New => {}
            Known::Same => self.duplicates += 1,
            Known::Other => self.broken.push(broken(format!(
                "another row has the id {}, with other values; the first one counts",
                id.short()
            ))),
        }
        Ok(())
    }
}

/// The columns of one file.
struct FileColumns {
    /// Index of each column.
    at: HashMap<String, usize>,
    /// Columns that only a newer schema knows; rows of this schema leave them empty.
    unknown: Vec<String>,
}

impl FileColumns {
    fn of(names: Vec<String>) -> FileColumns {
        let own: HashSet<&str> = COLUMNS.iter().map(|column| column.name).collect();
        let unknown = names.iter().filter(|name| !own.contains(name.as_str())).cloned().collect();
        FileColumns { at: names.into_iter().enumerate().map(|(at, name)| (name, at)).collect(), unknown }
    }
}

/// One line as a row. `Ok(None)` for a blank line.
fn row(columns: &FileColumns, line: &[u8]) -> Result<Option<Trial>, String> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    // A fast path: most of the many rows have no quotes.
    let plain = std::str::from_utf8(line).ok().filter(|text| !text.contains('"'));
    let quoted = if plain.is_none() { cells(line) } else { None };
    let cells: Vec<&str> = match (plain, &quoted) {
        (Some(text), _) => text.split(',').collect(),
        (None, Some(cells)) => cells.iter().map(String::as_str).collect(),
        (None, None) => return Err("is not UTF-8 text".to_string()),
    };
    let FileColumns { at, unknown } = columns;
    let by_name = |name: &str| at.get(name).and_then(|at| cells.get(*at)).copied();
    if let Some(schema) = by_name("schema").and_then(|schema| schema.parse::<u32>().ok()).filter(|n| *n > SCHEMA) {
        return Err(format!("written by a newer monobloc: schema {schema}, this one reads {SCHEMA}"));
    }
    if line.ends_with(TORN_MARK.as_bytes()) {
        return Err("torn: a crash cut this row while it was written".to_string());
    }
    if cells.len() != at.len() {
        return Err(format!("expected {} cells, found {}", at.len(), cells.len()));
    }
    for name in unknown {
        if by_name(name).is_some_and(|cell| !cell.is_empty()) {
            return Err(format!("column `{name}` is not one of schema {SCHEMA}, and has a value"));
        }
    }
    Trial::from_cells(at, &cells).map(Some).map_err(|fault| fault.to_string())
}

/// Reads a shared descriptor from the start, whatever its own offset.
struct AtStart<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for AtStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

enum Line {
    Whole(Vec<u8>),
    /// The last line has no end: it was cut, perhaps within a number.
    NoEnd,
    TooLong,
}

impl Line {
    fn text(&self) -> Result<&[u8], String> {
        match self {
            Line::Whole(text) => Ok(text.strip_suffix(b"\r").unwrap_or(text)),
            Line::NoEnd => Err("has no line end: a crash cut it, or an editor left it out".to_string()),
            Line::TooLong => Err(format!("is longer than {LINE_BYTES_MAX} bytes")),
        }
    }
}

struct Lines<R> {
    from: R,
    hasher: blake3::Hasher,
}

impl<R: BufRead> Lines<R> {
    /// The next line, without its end; holds at most `LINE_BYTES_MAX` bytes of it.
    fn next(&mut self) -> io::Result<Option<Line>> {
        let mut text = Vec::new();
        let mut too_long = false;
        loop {
            let mut run = Vec::new();
            (&mut self.from).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut run)?;
            self.hasher.update(&run);
            let ended = run.last() == Some(&b'\n');
            let at_end = !ended && run.len() < LINE_BYTES_MAX;
            if at_end && run.is_empty() && text.is_empty() && !too_long {
                return Ok(None);
            }
            run.truncate(run.len() - usize::from(ended));
            too_long |= text.len() + run.len() > LINE_BYTES_MAX;
            if too_long {
                text.clear()
            } else {
                text.append(&mut run)
            }
            match (ended, at_end) {
                _ if !ended && !at_end => {}
                _ if too_long => return Ok(Some(Line::TooLong)),
                (true, _) => return Ok(Some(Line::Whole(mem::take(&mut text)))),
                (false, _) => return Ok(Some(Line::NoEnd)),
            }
        }
    }
}

/// Contents of a corpus, for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CorpusStats {
    pub rows: u64,
    /// Rows by verdict; verdicts without rows are absent.
    pub verdicts: BTreeMap<&'static str, u64>,
    /// Rows by name of the target record.
    pub targets: BTreeMap<String, u64>,
    /// Rows by manifest.
    pub manifests: BTreeMap<String, u64>,
    pub models: u64,
    pub candidates: u64,
    /// Names of devices that took part.
    pub devices: BTreeSet<String>,
    /// Times of the first and the last row.
    pub utc: Option<(String, String)>,
}

pub fn stats(trials: &[Trial]) -> CorpusStats {
    let mut stats = CorpusStats { rows: trials.len() as u64, ..CorpusStats::default() };
    let (mut models, mut candidates) = (HashSet::new(), HashSet::new());
    for trial in trials {
        let facts = trial.facts();
        *stats.verdicts.entry(trial.verdict().name()).or_default() += 1;
        *stats.targets.entry(facts.machine.target.clone()).or_default() += 1;
        *stats.manifests.entry(facts.manifest.clone()).or_default() += 1;
        models.insert(facts.model.model_graph);
        candidates.insert((facts.model.model_graph, &facts.machine.target, facts.point.candidate_digest));
        if !facts.machine.device_name.is_empty() {
            stats.devices.insert(facts.machine.device_name.clone());
        }
    }
    stats.models = models.len() as u64;
    stats.candidates = candidates.len() as u64;
    let times = || trials.iter().map(Trial::utc);
    stats.utc = times().min().zip(times().max()).map(|(first, last)| (first.to_string(), last.to_string()));
    stats
}

/// The fastest row of its kind.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BestTrial<'a> {
    pub trial: &'a Trial,
    pub timing: &'a Timing,
    /// Rows of the same kind with the verdict `ok`, this one included.
    pub compared: u64,
    /// The default candidate of its search, as its row has it.
    pub default: Option<&'a str>,
}

impl BestTrial<'_> {
    /// Knobs that differ from the default of its search, `default` where none does; all knobs where the default is not known.
    pub fn changed(&self) -> String {
        let point = &self.trial.facts().point;
        let default = match (self.default, point.proposer) {
            (Some(default), _) => default,
            (None, Proposer::Default) => &point.candidate,
            (None, _) => return point.candidate.clone(),
        };
        let same: Vec<&str> = default.split(';').collect();
        let knobs: Vec<&str> = point.candidate.split(';').filter(|knob| !same.contains(knob)).collect();
        if knobs.is_empty() { "default".to_string() } else { knobs.join(";") }
    }
}

/// The row of least median latency for each model, precision, target, device and position. Trials that a search reverted are left
/// out: the smallest of many noisy times would be one of them. Latencies of different sessions are compared as they are; only
/// `ratio_*` compares two candidates under the same conditions.
pub fn best(trials: &[Trial]) -> Vec<BestTrial<'_>> {
    let mut kinds: BTreeMap<_, BestTrial<'_>> = BTreeMap::new();
    for trial in trials {
        let Some(timing) = trial.verdict().timing() else { continue };
        if trial.facts().point.decision == Some(Decision::Reverted) {
            continue;
        }
        let (model, machine) = (&trial.facts().model, &trial.facts().machine);
        let precision = (&model.weights_dtype, &model.cache_dtype, &model.wire_dtype);
        let kind = (
            &trial.facts().manifest,
            (model.model_graph, &model.kernel),
            precision,
            &machine.target,
            &machine.device_name,
            timing.position,
        );
        let best = kinds.entry(kind).or_insert(BestTrial { trial, timing, compared: 0, default: None });
        best.compared += 1;
        if timing.latency_us_p50 < best.timing.latency_us_p50 {
            (best.trial, best.timing) = (trial, timing);
        }
    }
    let point = |trial: &Trial| (trial.facts().point.campaign, trial.facts().point.proposer);
    let defaults: BTreeMap<Digest, &str> = trials
        .iter()
        .filter_map(|trial| match point(trial) {
            (Some(campaign), Proposer::Default) => Some((campaign, trial.facts().point.candidate.as_str())),
            _ => None,
        })
        .collect();
    let of = |trial: &Trial| point(trial).0.and_then(|campaign| defaults.get(&campaign).copied());
    kinds.into_values().map(|best| BestTrial { default: of(best.trial), ..best }).collect()
}

/// The columns as a table, as `flywheel/README.md` shows them.
pub fn column_table() -> String {
    let mut table = String::from("| column | unit | meaning |\n| --- | --- | --- |\n");
    for column in COLUMNS {
        table += &format!("| `{}` | {} | {} |\n", column.name, column.unit, column.meaning);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::trial::tests::{check_figures, ok, trial, verdicts};
    use super::super::trial::{Verdict, fresh_nonce};
    use super::*;
    use proptest::prelude::*;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use crate::error::Tier;

    const CHILD: &str = "MONOBLOC_CORPUS_TEST_CHILD";
    const CHILD_PATH: &str = "MONOBLOC_CORPUS_TEST_PATH";
    const ROWS_PER_CHILD: u64 = 40;

    fn row_of(nonce: u64) -> Trial {
        trial(ok(32, 80.0 + nonce as f64), nonce)
    }

    fn one(path: &Path) -> Corpus {
        Corpus::read(&[path]).unwrap()
    }

    fn reasons(corpus: &Corpus) -> Vec<(u64, &str)> {
        corpus.broken.iter().map(|row| (row.line, row.reason.as_str())).collect()
    }

    #[test]
    fn rows_read_back_in_order_and_the_digest_follows_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/trials.csv");
        let empty = one(&path);
        assert_eq!((empty.trials.len(), empty.broken.len()), (0, 0), "a corpus that does not exist yet is empty");
        let crash = trial(Verdict::Crash { detail: "lost, \"lost\"\nlost".into(), check: None }, 3);
        append(&path, &[row_of(1), row_of(2)]).unwrap();
        let before = one(&path).digest;
        append(&path, &[crash]).unwrap();
        let corpus = one(&path);
        assert_eq!(corpus.trials[..2], [row_of(1), row_of(2)]);
        assert_eq!(corpus.trials[2].verdict().detail(), "lost, \"lost\" lost");
        assert_eq!(corpus.broken, []);
        assert_ne!(corpus.digest, before);
        assert_eq!(one(&path).digest, corpus.digest);
        assert_ne!(empty.digest, before);
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 4);
        assert_eq!(text.lines().next(), Some(COLUMNS.map(|column| column.name).join(",").as_str()));
        assert!(COLUMNS.iter().all(|column| column.name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_')));
    }

    /// A crash may cut the file after any byte of the last row. Earlier rows must stay, and later rows must be readable.
    #[test]
    fn a_row_cut_anywhere_is_reported_and_the_next_row_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        append(&path, &[row_of(1)]).unwrap();
        let start = fs::read(&path).unwrap();
        append(&path, &[row_of(2)]).unwrap();
        let whole = fs::read(&path).unwrap();
        for cut in start.len()..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let torn = one(&path);
            assert_eq!(torn.trials, [row_of(1)], "cut at {cut}");
            assert_eq!(torn.broken.len(), usize::from(cut > start.len()));
            append(&path, &[row_of(3)]).unwrap();
            let repaired = one(&path);
            assert_eq!(repaired.trials, [row_of(1), row_of(3)], "cut at {cut}");
            if cut > start.len() {
                assert_eq!(reasons(&repaired), [(3, "torn: a crash cut this row while it was written")]);
            }
            // Other readers of CSV see one line with too many cells, and the next row whole.
            let mut reader = csv::ReaderBuilder::new().flexible(true).from_path(&path).unwrap();
            let counts: Vec<usize> = reader.records().map(|record| record.unwrap().len()).collect();
            let torn = counts.get(1).is_some_and(|count| *count > COLUMNS.len());
            assert!(counts == [75, 75] || (torn && counts.len() == 3 && counts[2] == 75), "cut at {cut}: {counts:?}");
        }
    }

    #[test]
    fn a_header_cut_anywhere_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        let header = header_line();
        for cut in (0..header.len()).step_by(7).chain([header.len() - 1]) {
            fs::write(&path, &header[..cut]).unwrap();
            append(&path, &[row_of(1)]).unwrap();
            let corpus = one(&path);
            assert_eq!((corpus.trials, corpus.broken), (vec![row_of(1)], vec![]), "cut at {cut}");
        }
    }

    #[test]
    fn a_file_that_is_no_corpus_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        for (text, reason) in [
            ("dear diary", "is not the header of a corpus"),
            ("dear,diary\n1,2\n", "lacks schema and 63 more columns"),
            (&header_line().replace("kv_heads,", ""), "lacks kv_heads"),
            (&header_line().replace("kv_heads,", "kv_heads,heads,"), "names the column `heads` twice"),
        ] {
            fs::write(&path, text).unwrap();
            let error = append(&path, &[row_of(1)]).unwrap_err();
            assert!(error.to_string().ends_with(&format!("its first line {reason}")), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            let corpus = one(&path);
            assert!(corpus.trials.is_empty() && corpus.broken.len() == 1 && corpus.broken[0].line == 1, "{corpus:?}");
        }
    }

    #[test]
    fn rows_of_schema_1_are_read_and_brought_over_by_a_merge() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new] = ["old.csv", "new.csv"].map(|name| folder.path().join(name));
        append(&new, &[row_of(1)]).unwrap();
        let later = |at: &usize| [&ADDED_IN_2[..], &ADDED_IN_3, &ADDED_IN_4].concat().contains(&COLUMNS[*at].name);
        let kept: Vec<usize> = (0..COLUMNS.len()).filter(|at| !later(at)).collect();
        let mut reader = csv::ReaderBuilder::new().has_headers(false).from_path(&new).unwrap();
        let mut writer = csv::Writer::from_path(&old).unwrap();
        for record in reader.records() {
            let record = record.unwrap();
            let cells: Vec<&str> = kept
                .iter()
                .map(|at| if COLUMNS[*at].name == "schema" && record[*at] == *"4" { "1" } else { &record[*at] })
                .collect();
            writer.write_record(cells).unwrap();
        }
        drop(writer);
        let read = one(&old);
        assert_eq!((read.trials.len(), &read.broken), (1, &vec![]));
        let point = &read.trials[0].facts().point;
        assert_eq!((point.campaign, point.trial, point.decision), (None, None, None));
        assert_eq!(read.trials[0].trial_id(), row_of(1).trial_id());

        let before = fs::read(&old).unwrap();
        let fault = Fault::from(append(&old, &[row_of(2)]).unwrap_err());
        assert!(fault.message.ends_with("its first line lacks campaign: it is of schema 1"), "{fault}");
        assert!(fault.remedy.unwrap().contains("monobloc flywheel merge"));
        assert_eq!(fs::read(&old).unwrap(), before);
        fs::remove_file(&new).unwrap();
        merge(&[&old], &new).unwrap();
        append(&new, &[row_of(2)]).unwrap();
        assert_eq!(one(&new).trials, [read.trials[0].clone(), row_of(2)]);
    }

    /// Copies a file as one of schema 3, without a column.
    fn copy_without(column: &str, from: &Path, to: &Path) {
        let at = COLUMNS.iter().position(|known| known.name == column).unwrap();
        let mut reader = csv::ReaderBuilder::new().has_headers(false).from_path(from).unwrap();
        let mut writer = csv::Writer::from_path(to).unwrap();
        for record in reader.records() {
            let record = record.unwrap();
            let cells = record.iter().enumerate().filter(|(column, _)| *column != at);
            writer.write_record(cells.map(|(_, cell)| if cell == "4" { "3" } else { cell })).unwrap();
        }
    }

    #[test]
    fn rows_without_devices_have_them_in_the_name_of_their_target() {
        for (target, devices) in [("h200", 1), ("h200-x2", 2), ("my-x", 1)] {
            let folder = tempfile::tempdir().unwrap();
            let [old, new] = ["old.csv", "new.csv"].map(|name| folder.path().join(name));
            let mut facts = row_of(1).facts().clone();
            (facts.machine.target, facts.machine.devices) = (target.to_string(), devices);
            let of =
                |facts| Trial::new(facts, row_of(1).verdict().clone(), std::time::SystemTime::UNIX_EPOCH, 3).unwrap();
            append(&new, &[of(facts.clone())]).unwrap();
            copy_without("devices", &new, &old);
            for path in [&new, &old] {
                let found: Vec<u32> = one(path).trials.iter().map(|trial| trial.facts().machine.devices).collect();
                assert_eq!(found, [devices], "{target}");
            }
            let id = of(facts.clone()).trial_id();
            facts.machine.devices += 1;
            assert_ne!(of(facts).trial_id(), id, "devices are part of what names a row");
        }
    }

    /// A file of schema 3 has no column `kernel`.
    #[test]
    fn rows_without_a_kernel_are_of_the_decode_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let [old, new] = ["old.csv", "new.csv"].map(|name| folder.path().join(name));
        append(&new, &[row_of(1)]).unwrap();
        copy_without("kernel", &new, &old);
        append(&old, &[row_of(2)]).unwrap();
        let kernels = |path: &Path| {
            let trials = one(path).trials.into_iter();
            trials.map(|trial| trial.facts().model.kernel.clone()).collect::<Vec<_>>()
        };
        assert_eq!(kernels(&old), [DECODE_KERNEL; 2]);

        let mut facts = row_of(3).facts().clone();
        facts.model.kernel = "chunk".to_string();
        let chunk = Trial::new(facts, row_of(3).verdict().clone(), std::time::SystemTime::UNIX_EPOCH, 3).unwrap();
        assert_eq!(chunk.facts().name(), format!("{} chunk", row_of(3).facts().name()));
        let before = fs::read(&old).unwrap();
        let fault = Fault::from(append(&old, std::slice::from_ref(&chunk)).unwrap_err());
        assert!(fault.message.ends_with("lacks `kernel`, and the row is of `chunk`"), "{fault}");
        assert!(fault.remedy.unwrap().contains("monobloc flywheel merge"));
        assert_eq!(fs::read(&old).unwrap(), before);

        let merged = folder.path().join("merged.csv");
        merge(&[&old], &merged).unwrap();
        append(&merged, &[chunk]).unwrap();
        assert_eq!(kernels(&merged), ["decode", "decode", "chunk"]);
        // The same model, target and position, and another kernel.
        assert_eq!(best(&one(&merged).trials).len(), 2);
    }

    #[test]
    fn rows_follow_the_columns_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        // As a newer monobloc might leave it: other order, a column more, its own rows.
        let mut names: Vec<&str> = COLUMNS.iter().map(|column| column.name).rev().collect();
        names.insert(5, "energy_uj");
        let newer: Vec<&str> = names.iter().map(|name| if *name == "schema" { "5" } else { "1" }).collect();
        fs::write(&path, format!("\u{feff}{}\r\n{}\r\n", names.join(","), newer.join(","))).unwrap();
        append(&path, &[row_of(1)]).unwrap();
        let corpus = one(&path);
        assert_eq!(corpus.trials, [row_of(1)]);
        assert_eq!(reasons(&corpus), [(2, "written by a newer monobloc: schema 5, this one reads 4")]);

        let text = fs::read_to_string(&path).unwrap();
        // The manifest of the row is quoted and has a comma; the added column stands before it.
        let mut cells: Vec<&str> = text.lines().last().unwrap().split(',').collect();
        cells[5] = "99";
        fs::write(&path, format!("{}\n{}\n", text.lines().next().unwrap(), cells.join(","))).unwrap();
        assert_eq!(reasons(&one(&path)), [(2, "column `energy_uj` is not one of schema 4, and has a value")]);
    }

    #[test]
    fn broken_lines_are_reported_and_never_stop_the_reading() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        append(&path, &[row_of(1)]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let row = text.lines().nth(1).unwrap();
        let columns: Vec<String> = COLUMNS.map(|column| column.name.to_string()).to_vec();
        let second = row_line(&columns, &row_of(2)).unwrap();
        let mut bytes = text.clone().into_bytes();
        let lines: [Vec<u8>; 8] = [
            b"".to_vec(),
            b"1,2,3".to_vec(),
            b"\"unclosed, \"and\" odd".to_vec(),
            b"\xff\xfe".to_vec(),
            row.replacen(&format!("{SCHEMA},"), "7,", 1).into_bytes(),
            row.replacen(",30,", ",many,", 1).into_bytes(),
            row.replacen(",ok,", ",fail,", 1).into_bytes(),
            vec![b'x'; LINE_BYTES_MAX * 2 + 10],
        ];
        bytes.extend(lines.into_iter().flat_map(|line| [line, b"\n".to_vec()].concat()));
        bytes.extend_from_slice(row.replacen(",576,", ",577,", 1).as_bytes());
        bytes.extend_from_slice(b"\n");
        bytes.extend_from_slice(second.as_bytes());
        fs::write(&path, &bytes).unwrap();
        let corpus = one(&path);
        assert_eq!(corpus.trials, [row_of(1), row_of(2)]);
        let id = row_of(1).trial_id().short();
        assert_eq!(
            reasons(&corpus),
            [
                (4, "expected 75 cells, found 3"),
                (5, "expected 75 cells, found 1"),
                (6, "is not UTF-8 text"),
                (7, "written by a newer monobloc: schema 7, this one reads 4"),
                (8, "column `layers`: expected a number, found `many`"),
                (9, "column `position`: expected nothing for the verdict `fail`, found `32`"),
                (10, "is longer than 1048576 bytes"),
                (11, &format!("another row has the id {id}, with other values; the first one counts")),
            ]
        );
        assert!(corpus.broken[0].to_string().ends_with("trials.csv:4: expected 75 cells, found 3"));
    }

    #[test]
    fn merging_adds_each_row_once_and_rewrites_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, out] = ["a.csv", "b.csv", "out.csv"].map(|name| folder.path().join(name));
        append(&a, &[row_of(1), row_of(2)]).unwrap();
        append(&b, &[row_of(2), row_of(3)]).unwrap();
        fs::write(&b, fs::read_to_string(&b).unwrap() + "torn").unwrap();
        append(&out, &[row_of(3)]).unwrap();
        let before = fs::read(&out).unwrap();

        let report = merge(&[&a, &b], &out).unwrap();
        assert_eq!((report.rows_added, report.duplicates, report.broken.len()), (2, 2, 1), "{report:?}");
        assert_eq!(one(&out).trials, [row_of(3), row_of(1), row_of(2)]);
        assert!(fs::read(&out).unwrap().starts_with(&before));
        let again = merge(&[&a, &b, &out], &out).unwrap();
        assert_eq!((again.rows_added, again.duplicates), (0, 7), "the output may be an input");
        assert_eq!(Corpus::read(&[&a, &b, &out]).unwrap().trials.len(), 3);
        assert!(merge(&[folder.path().join("nowhere.csv")], &out).unwrap_err().to_string().contains("nowhere.csv"));
    }

    #[test]
    fn a_thousand_files_are_merged_each_row_once() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.csv");
        let columns = COLUMNS.map(|column| column.name.to_string());
        // Each file has a row of its own, and one that the file before has, too.
        let line = |number: u64| row_line(&columns, &row_of(number)).unwrap();
        let inputs: Vec<PathBuf> = (0..1000u64)
            .map(|at| {
                let path = folder.path().join(format!("{at}.csv"));
                fs::write(&path, header_line() + &line(at) + &line(at + 1)).unwrap();
                path
            })
            .collect();
        let report = merge(&inputs, &out).unwrap();
        assert_eq!((report.rows_added, report.duplicates, report.broken.len()), (1001, 999, 0));
        assert_eq!(one(&out).trials, (0..=1000).map(row_of).collect::<Vec<_>>());
        // A row with the id of another and other values is named, with its line.
        fs::write(&inputs[0], header_line() + &line(7).replacen(",576,", ",577,", 1)).unwrap();
        let broken = merge(&inputs[..1], &out).unwrap().broken;
        assert!(broken.len() == 1 && broken[0].line == 2, "{broken:?}");
    }

    #[test]
    fn statistics_and_best_rows() {
        let crash = trial(Verdict::Crash { detail: "x".into(), check: Some(check_figures()) }, 9);
        let trials = [trial(ok(32, 90.0), 1), trial(ok(32, 80.0), 2), trial(ok(1024, 95.0), 3), crash];
        let stats = stats(&trials);
        assert_eq!((stats.rows, stats.models, stats.candidates), (4, 1, 1));
        assert_eq!(stats.verdicts, BTreeMap::from([("ok", 3), ("crash", 1)]));
        assert_eq!(stats.utc.unwrap().0, "2026-01-31T12:00:00Z");
        let best: Vec<_> = best(&trials)
            .iter()
            .map(|best| (best.timing.position, best.timing.latency_us_p50, best.compared))
            .collect();
        assert_eq!(best, [(32, 80.0, 2), (1024, 95.0, 1)]);
    }

    #[test]
    fn the_documentation_shows_these_columns() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("flywheel/README.md");
        let page = fs::read_to_string(&path).unwrap();
        let (start, end) = ("<!-- columns -->\n", "<!-- end of columns -->");
        let (head, rest) = page.split_once(start).unwrap();
        let (table, tail) = rest.split_once(end).unwrap();
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, format!("{head}{start}{}{end}{tail}", column_table())).unwrap();
            return;
        }
        assert_eq!(table, column_table(), "BLESS=1 writes the table");
    }

    fn child(path: &Path, mode: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "flywheel::corpus::tests::child_process", "--nocapture", "--test-threads=1"]);
        command.env(CHILD, mode).env(CHILD_PATH, path).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn finish(child: Child) {
        let output = child.wait_with_output().unwrap();
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && text.contains("child did its work"), "{text}");
    }

    /// What the processes started below do; nothing in the parent.
    #[test]
    fn child_process() {
        let Ok(mode) = std::env::var(CHILD) else { return };
        let path = PathBuf::from(std::env::var_os(CHILD_PATH).unwrap());
        match mode.as_str() {
            "append" => (0..ROWS_PER_CHILD).for_each(|_| append(&path, &[row_of(fresh_nonce() >> 12)]).unwrap()),
            "full" => {
                let mut rows = 0;
                let error = loop {
                    match append(&path, &[row_of(rows)]) {
                        Ok(()) => rows += 1,
                        Err(error) => break error,
                    }
                };
                assert!(matches!(error, CorpusError::Full { .. }), "{error}");
                assert!(Fault::from(error).to_string().contains("free space"));
                let corpus = one(&path);
                assert!(
                    rows > 3 && corpus.trials.len() as u64 == rows && corpus.broken.is_empty(),
                    "{rows} {corpus:?}"
                );
                assert!(fs::read(&path).unwrap().ends_with(b"\n"));
            }
            other => panic!("unknown mode {other}"),
        }
        println!("child did its work");
    }

    #[test]
    fn eight_processes_append_without_loss() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        let children: Vec<Child> = (0..8).map(|_| child(&path, "append").spawn().unwrap()).collect();
        // A reader meanwhile sees whole rows only.
        let (mut seen, start) = (0, Instant::now());
        while seen < 8 * ROWS_PER_CHILD as usize / 2 {
            let corpus = one(&path);
            assert_eq!(corpus.broken, []);
            assert!(corpus.trials.len() >= seen && start.elapsed() < Duration::from_secs(60));
            seen = corpus.trials.len();
        }
        children.into_iter().for_each(finish);
        let corpus = one(&path);
        assert_eq!((corpus.trials.len() as u64, corpus.broken.len()), (8 * ROWS_PER_CHILD, 0));
        assert_eq!(fs::read_to_string(&path).unwrap().matches("schema,trial_id").count(), 1);
    }

    #[test]
    fn a_full_disk_takes_the_row_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trials.csv");
        // A limit on file size fails a write half way, as a full disk does. 20 blocks of 512 or 1024 bytes.
        let inner = child(&path, "full");
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 20; exec \"$0\" \"$@\""]).arg(inner.get_program());
        shell.args(inner.get_args()).env(CHILD, "full").env(CHILD_PATH, &path);
        finish(shell.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        append(&path, &[row_of(999)]).unwrap();
        let corpus = one(&path);
        assert_eq!(corpus.broken, []);
        assert_eq!(corpus.trials.last(), Some(&row_of(999)));
    }

    #[test]
    fn a_path_that_cannot_be_a_corpus_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        for (path, tier) in [(folder.path(), Tier::Input), (&file.join("trials.csv"), Tier::Environment)] {
            let fault = Fault::from(append(path, &[row_of(1)]).unwrap_err());
            assert_eq!(fault.tier, tier, "{fault}");
        }
        let read = Corpus::read(&[folder.path()]).unwrap_err().to_string();
        assert!(read.starts_with("expected a regular file, found a folder"), "{read}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_was_appended_is_read(verdicts in prop::collection::vec(verdicts(), 1..6)) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("trials.csv");
            let rows = verdicts.into_iter().zip(1..).map(|(verdict, nonce)| trial(verdict, nonce));
            let trials: Vec<Trial> = rows.collect();
            append(&path, &trials).unwrap();
            let corpus = one(&path);
            prop_assert_eq!(corpus.broken, vec![]);
            prop_assert_eq!(corpus.trials, trials);
        }

        /// Whatever bytes follow a header, the reader reports them and comes back.
        #[test]
        fn arbitrary_bytes_are_survived(bytes in prop::collection::vec(
            prop_oneof![Just(b'\n'), Just(b','), Just(b'"'), any::<u8>()], 0..400,
        )) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("trials.csv");
            fs::write(&path, [header_line().as_bytes(), &bytes].concat()).unwrap();
            prop_assert_eq!(one(&path).trials, vec![]);
            append(&path, &[row_of(1)]).unwrap();
            prop_assert_eq!(one(&path).trials, vec![row_of(1)]);
        }
    }
}
