//! Owns the C library: C functions that call `monobloc::embed`. `include/monobloc.h` is generated from this file.
//!
//! No panic crosses a function: it becomes `MONOBLOC_STATUS_INTERNAL`. A null pointer where a value is expected becomes `MONOBLOC_STATUS_INPUT`.

#![allow(non_camel_case_types)] // Names of C.

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::ptr;
use std::slice;

use monobloc::embed::{Facts, Model, Options, SequenceKey, StepPart, Wants};
use monobloc::error::{Fault, Tier};

/// Version of this interface. It changes if the meaning of a function or a struct changes. New functions, and new fields at the end
/// of monobloc_options, do not change it.
pub const MONOBLOC_ABI_VERSION: u32 = 1;

/// Result of a call. The numbers are the exit codes of the program.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum monobloc_status {
    /// Done.
    Ok = 0,
    /// The input has to change: a path, a manifest, an argument.
    Input = 2,
    /// The machine lacks something: a driver, a device, a file, memory.
    Machine = 3,
    /// A fault of monobloc itself.
    Internal = 70,
}

/// An open model.
pub struct monobloc_model(Model);

/// Options for opening a model. A field of 0 or NULL takes its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct monobloc_options {
    /// sizeof(monobloc_options), so that later versions can add fields.
    pub size: usize,
    /// Name of a target; NULL: the first one.
    pub target: *const c_char,
    /// Folder of the cache, for manifests; NULL: the default of the program `monobloc`.
    pub cache: *const c_char,
    /// Most sequences that are open at a time; 0: as `monobloc serve`.
    pub sequences_max: u32,
    /// Most tokens of one monobloc_step beyond one for each sequence; 0: as `monobloc serve`.
    pub chunk_max: u32,
    /// Tokens that the cache holds for all sequences together; 0: four contexts, or the value of the manifest.
    pub cache_tokens: u32,
    /// 1: runs kernels whose numbers were not compared on a device of this kind, and says so on stderr; 0: compares them first.
    pub unchecked: u32,
}

/// Which logits of a row are written.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum monobloc_logits_of {
    /// None.
    None = 0,
    /// Those after its last token.
    Last = 1,
    /// Those after each of its tokens.
    Every = 2,
}

/// A row of a step: a sequence with its next tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct monobloc_row {
    /// From monobloc_sequence_open() or monobloc_sequence_fork().
    pub sequence: u64,
    /// One for a sequence that decodes, several for a part of a prompt.
    pub tokens: *const u32,
    /// Tokens of this row.
    pub count: usize,
    /// A value of monobloc_logits_of.
    pub logits: u32,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Runs the body of a function, and keeps the message if it fails.
fn call(body: impl FnOnce() -> Result<(), Fault>) -> monobloc_status {
    let fault = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return monobloc_status::Ok,
        Ok(Err(fault)) => fault,
        Err(_) => Fault::internal("a function of the C library has panicked; the panic was printed"),
    };
    let text: Vec<u8> = fault.to_string().into_bytes().into_iter().filter(|&byte| byte != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    // At the end of a thread, its message is gone already.
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = text));
    match fault.tier {
        Tier::Input => monobloc_status::Input,
        Tier::Environment => monobloc_status::Machine,
        Tier::Internal => monobloc_status::Internal,
    }
}

fn null(name: &str) -> Fault {
    Fault::input(format!("`{name}` is NULL, expected a value"))
}

/// # Safety
/// `text` is NULL or a C string that lives during the call.
unsafe fn path(text: *const c_char) -> Option<PathBuf> {
    if text.is_null() {
        return None;
    }
    // SAFETY: it is a string of C, as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    Some(PathBuf::from(OsStr::from_bytes(text.to_bytes())))
}

/// # Safety
/// `model` is NULL, or came from [`monobloc_open`] and is not closed.
unsafe fn opened<'a>(model: *const monobloc_model) -> Result<&'a Model, Fault> {
    // SAFETY: as the caller promises.
    unsafe { model.as_ref() }.map(|model| &model.0).ok_or_else(|| null("model"))
}

/// # Safety
/// `values` has `count` values, which nothing changes meanwhile; it may be NULL if `count` is 0.
unsafe fn values<'a, T>(name: &str, values: *const T, count: usize) -> Result<&'a [T], Fault> {
    match (values.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(null(name)),
        // SAFETY: as the caller promises.
        (false, _) => Ok(unsafe { slice::from_raw_parts(values, count) }),
    }
}

/// Refuses a wrong size of the buffer for logits, before anything is computed.
fn check_room(expected: usize, found: usize) -> Result<(), Fault> {
    match found == expected {
        true => Ok(()),
        false => Err(Fault::input(format!("expected room for {expected} logits, found {found}"))),
    }
}

/// Writes logits into the caller's buffer.
///
/// # Safety
/// `room` has `count` values that nothing else uses; it may be NULL if `count` is 0.
unsafe fn give(logits: &[f32], room: *mut f32, count: usize) -> Result<(), Fault> {
    if logits.len() != count {
        return Err(Fault::internal(format!("{} logits were computed for room of {count}", logits.len())));
    }
    if count > 0 {
        // SAFETY: both have `count` values, and the caller's are its own.
        unsafe { ptr::copy_nonoverlapping(logits.as_ptr(), room, count) };
    }
    Ok(())
}

/// Version of the interface of this library; compare it with MONOBLOC_ABI_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn monobloc_abi_version() -> u32 {
    MONOBLOC_ABI_VERSION
}

/// Version of monobloc, as text that lives as long as the library.
#[unsafe(no_mangle)]
pub extern "C" fn monobloc_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Message of the last call that failed in this thread. It lives until the next call that fails in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn monobloc_last_error() -> *const c_char {
    let empty = c"".as_ptr();
    LAST.try_with(|last| last.try_borrow().map_or(empty, |last| last.as_ptr())).unwrap_or(empty)
}

/// Opens the folder of an export, a manifest, or a built-in model by its name. `options` may be NULL. Writes the model to
/// `model`, or NULL on a fault. Close the model with monobloc_close().
///
/// # Safety
/// `place` is a string, `options` NULL or a struct of the size that it names, whose strings are strings; `model` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_open(
    place: *const c_char,
    options: *const monobloc_options,
    model: *mut *mut monobloc_model,
) -> monobloc_status {
    call(|| {
        if model.is_null() {
            return Err(null("model"));
        }
        // SAFETY: the caller has a pointer there.
        unsafe { *model = ptr::null_mut() };
        // SAFETY: a string of C or NULL, as the caller promises.
        let place = unsafe { path(place) }.ok_or_else(|| null("place"))?;
        // SAFETY: NULL or such a struct, as the caller promises.
        let options = unsafe { read_options(options) }?;
        let opened = Box::new(monobloc_model(Model::load(Path::new(&place), options)?));
        // SAFETY: as above.
        unsafe { *model = Box::into_raw(opened) };
        Ok(())
    })
}

/// # Safety
/// As `options` of [`monobloc_open`].
unsafe fn read_options(options: *const monobloc_options) -> Result<Options, Fault> {
    if options.is_null() {
        return Ok(Options::default());
    }
    // SAFETY: the first field is there in every version.
    let size = unsafe { (*options).size };
    if size < size_of::<monobloc_options>() {
        let expected = size_of::<monobloc_options>();
        return Err(Fault::input(format!("`size` of the options is {size}, expected at least {expected}"))
            .with_remedy("set it to sizeof(monobloc_options)"));
    }
    // SAFETY: the struct has all fields of this version.
    let monobloc_options { size: _, target, cache, sequences_max, chunk_max, cache_tokens, unchecked } =
        unsafe { *options };
    if unchecked > 1 {
        return Err(Fault::input(format!("`unchecked` of the options is {unchecked}, expected 0 or 1")));
    }
    let given = |value: u32| Some(value).filter(|&value| value != 0);
    // SAFETY: strings of C or NULL, as the caller promises.
    let (target, cache) = unsafe { (path(target), path(cache)) };
    Ok(Options {
        target: target.map(|name| name.to_string_lossy().into_owned()),
        cache,
        sequences_max: given(sequences_max),
        chunk_max: given(chunk_max),
        cache_tokens: given(cache_tokens),
        unchecked: unchecked == 1,
        ..Options::default()
    })
}

/// Closes a model. NULL is no fault.
///
/// # Safety
/// `model` came from monobloc_open, is not closed, and no other call uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_close(model: *mut monobloc_model) {
    call(|| {
        if !model.is_null() {
            // SAFETY: made by `Box::into_raw`, and nothing else uses it.
            drop(unsafe { Box::from_raw(model) });
        }
        Ok(())
    });
}

/// Logits of a position; all token ids are below it. 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL, or came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_vocab(model: *const monobloc_model) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { fact(model, |facts| facts.vocab) }
}

/// Most positions of a sequence. 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL, or came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_context_max(model: *const monobloc_model) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { fact(model, |facts| facts.context_max) }
}

/// Most tokens of one step. 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL, or came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_rows_max(model: *const monobloc_model) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { fact(model, |facts| facts.rows_max) }
}

/// Most sequences that are open at a time. 0 if `model` is NULL.
///
/// # Safety
/// `model` is NULL, or came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequences_max(model: *const monobloc_model) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { fact(model, |facts| facts.sequences_max) }
}

/// Whether a token ends a text. False if `model` is NULL.
///
/// # Safety
/// `model` is NULL, or came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_is_eos(model: *const monobloc_model, token: u32) -> bool {
    // SAFETY: as the caller promises.
    unsafe { fact(model, |facts| u32::from(facts.eos.contains(&token))) == 1 }
}

/// # Safety
/// As [`opened`].
unsafe fn fact(model: *const monobloc_model, fact: impl FnOnce(&Facts) -> u32) -> u32 {
    // SAFETY: as the caller promises.
    unsafe { opened(model) }.map_or(0, |model| fact(model.facts()))
}

/// Opens a sequence without tokens, and writes its name to `sequence`. Names are never used again.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `sequence` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequence_open(model: *const monobloc_model, sequence: *mut u64) -> monobloc_status {
    call(|| {
        // SAFETY: as the caller promises.
        let model = unsafe { opened(model) }?;
        // SAFETY: as the caller promises.
        unsafe { name(sequence, |key| model.open(key).wait()) }
    })
}

/// Opens a sequence with the tokens of `from`, and writes its name to `fork`. Both share the full pages of the cache; tokens after
/// the last full page are computed again.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `fork` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequence_fork(
    model: *const monobloc_model,
    from: u64,
    fork: *mut u64,
) -> monobloc_status {
    call(|| {
        // SAFETY: as the caller promises.
        let model = unsafe { opened(model) }?;
        // SAFETY: as the caller promises.
        unsafe { name(fork, |key| model.fork(SequenceKey(from), key).wait()) }
    })
}

/// Opens a sequence with a new name, and writes the name.
///
/// # Safety
/// `sequence` is NULL or can be written.
unsafe fn name(sequence: *mut u64, open: impl FnOnce(SequenceKey) -> Result<(), Fault>) -> Result<(), Fault> {
    if sequence.is_null() {
        return Err(null("sequence"));
    }
    let key = SequenceKey::unique();
    open(key)?;
    // SAFETY: as the caller promises.
    unsafe { *sequence = key.0 };
    Ok(())
}

/// Writes the number of tokens of a sequence to `length`.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `length` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequence_length(
    model: *const monobloc_model,
    sequence: u64,
    length: *mut u32,
) -> monobloc_status {
    call(|| {
        if length.is_null() {
            return Err(null("length"));
        }
        // SAFETY: as the caller promises.
        let found = unsafe { opened(model) }?.length(SequenceKey(sequence)).wait()?;
        // SAFETY: as the caller promises.
        unsafe { *length = found };
        Ok(())
    })
}

/// Removes the tokens of a sequence from `length` on.
///
/// # Safety
/// `model` came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequence_truncate(
    model: *const monobloc_model,
    sequence: u64,
    length: u32,
) -> monobloc_status {
    // SAFETY: as the caller promises.
    call(|| unsafe { opened(model) }?.truncate(SequenceKey(sequence), length as usize).wait())
}

/// Ends a sequence and frees its part of the cache. One that is not open is no fault.
///
/// # Safety
/// `model` came from monobloc_open and is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_sequence_free(model: *const monobloc_model, sequence: u64) -> monobloc_status {
    // SAFETY: as the caller promises.
    call(|| unsafe { opened(model) }?.free(SequenceKey(sequence)).wait())
}

/// Appends `count` tokens to a sequence, in as many steps as needed. Writes the logits after the last one; `logits_count` is the
/// vocabulary. If `logits` is NULL, nothing is written.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `tokens` has `count` values; `logits` is NULL or has room for `logits_count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_prefill(
    model: *const monobloc_model,
    sequence: u64,
    tokens: *const u32,
    count: usize,
    logits: *mut f32,
    logits_count: usize,
) -> monobloc_status {
    call(|| {
        // SAFETY: as the caller promises.
        let (model, tokens) = unsafe { (opened(model)?, values("tokens", tokens, count)?) };
        if !logits.is_null() {
            check_room(model.facts().vocab as usize, logits_count)?;
        }
        let found = model.prefill(SequenceKey(sequence), tokens.to_vec()).wait()?;
        if logits.is_null() {
            return Ok(());
        }
        // SAFETY: the caller has room for as many.
        unsafe { give(&found, logits, logits_count) }
    })
}

/// Runs one step of several sequences, each with its next tokens; a sequence has one row. All rows together have at most
/// monobloc_rows_max() tokens. Writes the logits that the rows want, one after another; `logits_count` is their number times the
/// vocabulary. If the call fails with MONOBLOC_STATUS_INPUT, no sequence has changed. After any other failure all sequences are gone.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `rows` has `count` values, each with `count` tokens; `logits` has room
/// for `logits_count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_step(
    model: *const monobloc_model,
    rows: *const monobloc_row,
    count: usize,
    logits: *mut f32,
    logits_count: usize,
) -> monobloc_status {
    call(|| {
        // SAFETY: as the caller promises.
        let (model, rows) = unsafe { (opened(model)?, values("rows", rows, count)?) };
        // SAFETY: as the caller promises.
        let parts = rows.iter().map(|row| unsafe { part(row) }).collect::<Result<Vec<StepPart>, Fault>>()?;
        let wanted: usize = parts.iter().map(wanted).sum();
        check_room(wanted * model.facts().vocab as usize, logits_count)?;
        if wanted > 0 && logits.is_null() {
            return Err(null("logits"));
        }
        let found = model.step(parts).wait()?;
        // SAFETY: the caller has room for as many.
        unsafe { give(&found, logits, logits_count) }
    })
}

/// # Safety
/// `tokens` of the row has `count` values.
unsafe fn part(row: &monobloc_row) -> Result<StepPart, Fault> {
    let monobloc_row { sequence, tokens, count, logits } = *row;
    let wants = match logits {
        0 => Wants::Nothing,
        1 => Wants::Last,
        2 => Wants::Every,
        other => {
            return Err(Fault::input(format!("`logits` of a row is {other}, expected 0 to 2"))
                .with_remedy("take a value of monobloc_logits_of"));
        }
    };
    // SAFETY: as the caller promises.
    let tokens = unsafe { values("tokens", tokens, count) }?;
    Ok(StepPart { sequence: SequenceKey(sequence), tokens: tokens.to_vec(), wants })
}

/// Number of positions whose logits a part wants.
fn wanted(part: &StepPart) -> usize {
    match part.wants {
        Wants::Nothing => 0,
        Wants::Last => 1,
        Wants::Every => part.tokens.len(),
    }
}

/// Writes the logits after each of `count` tokens, which begin at position 0: `count` rows of the vocabulary. No sequence is changed.
///
/// # Safety
/// `model` came from monobloc_open and is not closed; `tokens` has `count` values; `logits` has room for `logits_count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn monobloc_logits(
    model: *const monobloc_model,
    tokens: *const u32,
    count: usize,
    logits: *mut f32,
    logits_count: usize,
) -> monobloc_status {
    call(|| {
        // SAFETY: as the caller promises.
        let (model, tokens) = unsafe { (opened(model)?, values("tokens", tokens, count)?) };
        check_room(tokens.len() * model.facts().vocab as usize, logits_count)?;
        if logits_count > 0 && logits.is_null() {
            return Err(null("logits"));
        }
        let found = model.logits(tokens.to_vec()).wait()?;
        // SAFETY: the caller has room for as many.
        unsafe { give(&found, logits, logits_count) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_status_with_a_message() {
        assert_eq!(call(|| panic!("a test of a panic")), monobloc_status::Internal);
        // SAFETY: a string of this thread.
        let said = unsafe { CStr::from_ptr(monobloc_last_error()) }.to_str().expect("text");
        assert!(said.contains("panicked"), "{said}");
        assert_eq!(call(|| Err(Fault::input("a\0b").with_remedy("c"))), monobloc_status::Input);
        // SAFETY: as above.
        assert_eq!(unsafe { CStr::from_ptr(monobloc_last_error()) }.to_str(), Ok("ab\n  help: c"));
    }
}
