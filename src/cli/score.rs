//! Owns `perplexity`, `logits` and `compare`: runs a model over given tokens, and reports its logits.

mod formats;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::iter;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use serde_json::json;
use tempfile::NamedTempFile;

use super::Outcome;
use super::arguments::{Compare, Logits, Perplexity};
use super::session::{Session, Talk, choose_target, text_tokenizer};
use crate::error::Fault;
use crate::files::{folder_of, read_bytes, read_text};
use crate::goldens::{Allowed, Comparison, Goldens};
use crate::pipeline::{self, Checking, Given};
use crate::sample::{Logprobs, SampleSettings};
use crate::text::counted;
use crate::tokenizer::check_ids;

/// Largest text that is scored: some 60 million tokens, days of work.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// Largest file of goldens: some 4,000 positions of a vocabulary of 128 Ki.
const GOLDENS_BYTES_MAX: u64 = 4 << 30;

pub fn perplexity(session: &Session, asked: &Perplexity) -> Result<Outcome, Fault> {
    // Weights in other formats are made from the checkpoint, which an export does not have.
    let given = if asked.formats {
        Given::built(session.manifest(&asked.manifest, asked.target.as_deref())?)
    } else {
        session.given(&asked.manifest, asked.target.as_deref())?
    };
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    let text = read_text(&asked.file, TEXT_BYTES_MAX)?;
    let talk = if asked.json { Talk::Nothing } else { Talk::Work };
    let mut tokenizer = text_tokenizer(manifest)?;
    if asked.formats {
        let workspace = session.workspace(talk)?;
        let text = formats::Text { file: &asked.file, text: &text };
        let checking = Checking::of(asked.checks.unchecked);
        checking.warn(&workspace.report);
        let of = formats::Of { manifest, target: &target, checking };
        return formats::compare(session, &workspace, of, &mut tokenizer, &text, asked.json);
    }
    let ready = session.ready(&given, &target, talk, &asked.checks)?;
    tokenizer.check_vocab(ready.vocab)?;
    let ids = tokenizer.encode(&text, true)?;
    if ids.len() < 2 {
        let (file, count) = (asked.file.display(), ids.len());
        return Err(Fault::input(format!("expected at least 2 tokens in `{file}`, to predict one, found {count}")));
    }
    if manifest.decode.context_max < 3 {
        let context_max = manifest.decode.context_max;
        return Err(Fault::input(format!(
            "expected a `context_max` of at least 3 to read a text, found {context_max}"
        )));
    }

    let mut runner = ready.runner()?;
    let first_special = ready.bos.filter(|bos| ids.first() == Some(bos));
    let progress = ready.report().progress("tokens", ids.len() as u64);
    let mut nll = 0.0;
    let mut scored = 0;
    for window in windows(ids.len(), manifest.decode.context_max as usize, first_special.is_some()) {
        let repeated = if window.start > 0 { first_special } else { None };
        let given: Vec<u32> = repeated.into_iter().chain(ids[window].iter().copied()).collect();
        let skipped = usize::from(repeated.is_some());
        runner.logits(&given, &mut |position, logits| {
            let position = position as usize;
            progress.inc(1);
            if position >= skipped
                && let Some(&next) = given.get(position + 1)
            {
                nll -= Logprobs::of(logits, next, 0).token;
                scored += 1;
            }
        })?;
    }
    drop(progress);
    let nll = nll / f64::from(scored);
    let (ppl, count) = (nll.exp(), ids.len());
    if asked.json {
        let place = runner.place();
        session
            .terminal
            .print_json(&json!({ "nll": nll, "ppl": ppl, "tokens": count, "scored": scored, "place": place }))?;
    } else {
        session.terminal.print(&format!("nll {nll:.6}\nppl {ppl:.6}\ntokens {count}\nscored {scored}\n"))?;
        session.terminal.say(&format!("({})", runner.place()));
    }
    Ok(Outcome::Done)
}

/// The windows of `count` tokens that are read one after another. Each begins with the last token of the previous window. If
/// the text's first token is `repeated`, later windows leave room for it at their front. `context_max` is 3 or more.
fn windows(count: usize, context_max: usize, repeated: bool) -> impl Iterator<Item = Range<usize>> {
    iter::successors(Some(0..count.min(context_max)), move |last| {
        let start = last.end - 1;
        (last.end < count).then(|| start..count.min(start + context_max - usize::from(repeated)))
    })
}

pub fn logits(session: &Session, asked: &Logits) -> Result<Outcome, Fault> {
    let ids = &asked.ids.0;
    let given = session.given(&asked.manifest, asked.target.as_deref())?;
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    let context_max = manifest.decode.context_max as usize;
    if ids.len() > context_max {
        return Err(Fault::input(format!(
            "expected at most {} (`context_max` of manifest `{}`), found {}",
            counted(context_max as u64, "id"),
            manifest.name,
            ids.len()
        ))
        .with_remedy("give fewer ids, or raise `context_max` in the manifest; `monobloc init` writes one for a model that has none"));
    }
    let ready = session.ready(&given, &target, Talk::Work, &asked.checks)?;
    let vocab = ready.vocab;
    check_ids(ids, vocab)?;
    let failed = |error: io::Error| Fault::environment(format!("cannot write `{}`: {error}", asked.out.display()));
    let mut file = Tensor::create(&asked.out, ids.len(), vocab as usize).map_err(failed)?;
    let mut runner = ready.runner()?;
    let mut written = Ok(());
    runner.logits(ids, &mut |_, row| {
        if written.is_ok() {
            written = file.row(row);
        }
    })?;
    written.and_then(|()| file.finish(&asked.out)).map_err(failed)?;
    let (place, out) = (runner.place(), asked.out.display());
    if asked.json {
        let file = asked.out.display().to_string();
        session.terminal.print_json(&json!({
            "file": file, "positions": ids.len(), "vocab": vocab, "place": place, "target": target.name,
        }))?;
        return Ok(Outcome::Done);
    }
    session.terminal.say(&format!("wrote `logits` [{}, {vocab}] to `{out}` ({place})", ids.len()));
    Ok(Outcome::Done)
}

pub fn compare(session: &Session, asked: &Compare) -> Result<Outcome, Fault> {
    let manifest = session.manifest(&asked.manifest, asked.target.as_deref())?;
    let target = choose_target(&manifest, asked.target.as_deref())?;
    let file = asked.goldens.display();
    let goldens = Goldens::parse(&read_bytes(&asked.goldens, GOLDENS_BYTES_MAX)?)
        .map_err(|error| Fault::input(format!("`{file}`: {error}")).with_remedy(GOLDENS_RULE))?;
    let (needed, context_max) = (goldens.positions_needed(), manifest.decode.context_max as usize);
    if needed > context_max {
        return Err(Fault::input(format!(
            "`{file}` needs {}, `context_max` of manifest `{}` is {context_max}",
            counted(needed as u64, "position"),
            manifest.name
        ))
        .with_remedy("raise `context_max` in the manifest; `monobloc init` writes one for a model that has none"));
    }
    let workspace = session.workspace(if asked.json { Talk::Nothing } else { Talk::Work })?;
    let checking = Checking::of(asked.checks.unchecked);
    checking.warn(&workspace.report);
    let prepared = pipeline::prepare(&workspace, &manifest, &target)?.checking(checking);
    let vocab = prepared.imported.graph.vocab;
    if goldens.vocab != vocab {
        let found = goldens.vocab;
        return Err(Fault::input(format!("expected `logits` of {vocab} tokens in `{file}`, found {found}"))
            .with_remedy("name the goldens of the manifest's own checkpoint"));
    }
    let mut runner = prepared.runner(&workspace)?;
    let mut logits = Vec::with_capacity(goldens.input_ids.len() * vocab as usize);
    runner.logits(&goldens.input_ids, &mut |_, row| logits.extend_from_slice(row))?;
    let go_on = &mut |_| ControlFlow::Continue(());
    // No token ends the text: goldens continue after it.
    let greedy =
        runner.generate(&goldens.input_ids, goldens.greedy_ids.len(), &[], &SampleSettings::greedy(), go_on)?;
    let compared = goldens.compare(&logits, &greedy, manifest.precision);
    if asked.json {
        session.terminal.print_json(&comparison_json(&compared, &runner.place()))?;
    } else {
        session.terminal.print(&format!("{compared} ({})\n", runner.place()))?;
    }
    Ok(if compared.agrees { Outcome::Done } else { Outcome::No })
}

/// Remedy for a file of goldens with the wrong content.
const GOLDENS_RULE: &str = "`monobloc compare --help` says what a file of goldens holds";

fn comparison_json(compared: &Comparison, place: &str) -> serde_json::Value {
    let Comparison { positions, largest, error_rel_l2, allowed, steps, steps_sure, steps_equal, agrees } = compared;
    let (error_abs_allowed, error_rel_l2_allowed) = match allowed {
        Allowed::Abs(limit) => (Some(limit), None),
        Allowed::RelL2(limit) => (None, Some(limit)),
    };
    json!({
        "agrees": agrees,
        "positions": positions,
        "error_abs_max": largest.abs(),
        "error_abs_allowed": error_abs_allowed,
        "error_rel_l2": error_rel_l2,
        "error_rel_l2_allowed": error_rel_l2_allowed,
        "largest": {
            "position": largest.position, "token": largest.token, "expected": largest.expected, "found": largest.found,
        },
        "greedy": { "steps": steps, "steps_sure": steps_sure, "steps_equal": steps_equal },
        "place": place,
    })
}

/// A safetensors file of one fp32 tensor, written row by row: the logits of a long text do not fit in memory. Format:
/// <https://github.com/huggingface/safetensors#format>.
struct Tensor {
    file: BufWriter<Sink>,
}

enum Sink {
    /// A regular file: it gets its name only when it is complete.
    Whole(NamedTempFile),
    /// A pipe or a device, written directly: a rename would replace it by a file.
    Direct(File),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sink::Whole(file) => file.write(bytes),
            Sink::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sink::Whole(file) => file.flush(),
            Sink::Direct(file) => file.flush(),
        }
    }
}

impl Tensor {
    fn create(path: &Path, rows: usize, cols: usize) -> io::Result<Tensor> {
        let bytes = rows as u64 * cols as u64 * size_of::<f32>() as u64;
        let mut header =
            json!({ "logits": { "dtype": "F32", "shape": [rows, cols], "data_offsets": [0, bytes] } }).to_string();
        // Padded, so that the values are aligned.
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let is_special = fs::metadata(path).is_ok_and(|there| !there.is_file());
        let sink = match is_special {
            true => Sink::Direct(OpenOptions::new().write(true).open(path)?),
            false => Sink::Whole(new_file_in(&folder_of(path))?),
        };
        let mut file = BufWriter::new(sink);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        Ok(Tensor { file })
    }

    fn row(&mut self, values: &[f32]) -> io::Result<()> {
        values.iter().try_for_each(|value| self.file.write_all(&value.to_le_bytes()))
    }

    fn finish(self, path: &Path) -> io::Result<()> {
        match self.file.into_inner().map_err(io::IntoInnerError::into_error)? {
            Sink::Whole(file) => file.persist(path).map(|_| ()).map_err(|error| error.error),
            Sink::Direct(_) => Ok(()),
        }
    }
}

/// A temporary file with the permissions that the user's umask gives, instead of access for the owner alone.
fn new_file_in(folder: &Path) -> io::Result<NamedTempFile> {
    tempfile::Builder::new().make_in(folder, |path| File::create_new(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    #[test]
    fn windows_score_every_token_once() {
        for (count, context_max, repeated) in
            [(2, 3, true), (10, 10, false), (11, 10, true), (100, 3, true), (100, 7, false)]
        {
            let mut scored = vec![0; count];
            for window in windows(count, context_max, repeated) {
                assert!(window.len() + usize::from(repeated && window.start > 0) <= context_max);
                window.skip(1).for_each(|i| scored[i] += 1);
            }
            assert_eq!(scored[0], 0, "nothing predicts the first token");
            assert!(scored[1..].iter().all(|&times| times == 1), "{count} {context_max} {repeated}: {scored:?}");
        }
    }

    #[test]
    fn rows_become_a_tensor_that_others_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("l.safetensors");
        let mut file = Tensor::create(&path, 2, 3).unwrap();
        file.row(&[1.0, 2.0, 3.0]).unwrap();
        assert!(!path.exists());
        file.row(&[4.0, 5.0, 6.0]).unwrap();
        file.finish(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [2, 3]);
        assert_eq!(logits.data()[20..], 6f32.to_le_bytes());
    }
}
