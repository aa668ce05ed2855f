//! Owns the extension module of the Python package: `monobloc::embed` with Python types. Users call `package/monobloc/__init__.py`.
//!
//! The GIL is released while the threads of a model work. A caller that waits checks for signals, so Ctrl-C raises
//! `KeyboardInterrupt`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use monobloc::embed::{self, Asked, Options, Piece, SequenceKey, StepPart, TokensProgram, Waiting, Wants};
use monobloc::error::{Fault, Tier};
use monobloc::sample::{Penalties, RequestSettings, SampleSettings};
use monobloc::tokenizer::Message;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

create_exception!(monobloc, Error, PyException, "An error of monobloc. `remedy` says what helps, if that is known.");
create_exception!(
    monobloc,
    InputError,
    Error,
    "The input has to change: a manifest, a checkpoint, a prompt, an argument."
);
create_exception!(
    monobloc,
    MachineError,
    Error,
    "The machine lacks something: a driver, a device, a file, disk space."
);
create_exception!(monobloc, InternalError, Error, "A fault of monobloc itself: please report it.");

/// Time between two checks for signals: too short to notice after Ctrl-C.
const LOOK: Duration = Duration::from_millis(20);

fn raised(py: Python<'_>, fault: &Fault) -> PyErr {
    let text = fault.to_string();
    let error = match fault.tier {
        Tier::Input => InputError::new_err(text),
        Tier::Environment => MachineError::new_err(text),
        Tier::Internal => InternalError::new_err(text),
    };
    match error.value(py).setattr("remedy", fault.remedy.as_deref()) {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// Waits with the GIL released.
fn wait<R: Send>(py: Python<'_>, mut waiting: Waiting<R>) -> PyResult<R> {
    loop {
        let answer;
        (waiting, answer) = py.detach(move || {
            let answer = waiting.wait_for(LOOK);
            (waiting, answer)
        });
        if let Some(answer) = answer {
            return answer.map_err(|fault| raised(py, &fault));
        }
        py.check_signals()?;
    }
}

/// Logits as bytes in Python's memory.
fn bytes<'py>(py: Python<'py>, values: &[f32]) -> PyResult<Bound<'py, PyByteArray>> {
    PyByteArray::new_with(py, size_of_val(values), |bytes| {
        for (at, value) in bytes.chunks_exact_mut(size_of::<f32>()).zip(values) {
            at.copy_from_slice(&value.to_ne_bytes());
        }
        Ok(())
    })
}

/// The arguments of `load`, besides the place of the model.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct LoadSettings {
    target: Option<String>,
    cache: Option<PathBuf>,
    sequences_max: Option<u32>,
    chunk_max: Option<u32>,
    cache_tokens: Option<u32>,
    /// Words of the command that serves the tokenizer; the checkpoint's folder is added as the last one. Empty: no tokenizer.
    tokens: Vec<String>,
    verbose: bool,
    unchecked: bool,
}

impl LoadSettings {
    fn options(self) -> Options {
        let LoadSettings { target, cache, sequences_max, chunk_max, cache_tokens, tokens, verbose, unchecked } = self;
        let tokens = tokens.split_first().map(|(program, words)| {
            let (program, words) = (program.clone(), words.to_vec());
            let start: TokensProgram = Arc::new(move || {
                let mut command = Command::new(&program);
                command.args(&words);
                command
            });
            start
        });
        Options { target, cache, sequences_max, chunk_max, cache_tokens, tokens, verbose, unchecked }
    }
}

/// The arguments of `generate`, besides the ids of the prompt.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct GenerateSettings {
    max_tokens: usize,
    temperature: f32,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: f32,
    seed: u64,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: BTreeMap<u32, f32>,
    stop_ids: Vec<u32>,
    min_tokens: u32,
    ignore_eos: bool,
    logprobs: Option<u32>,
    stop: Vec<String>,
}

impl GenerateSettings {
    fn asked(self, prompt: Vec<u32>) -> Asked {
        let GenerateSettings { max_tokens, temperature, top_k, top_p, min_p, seed, logit_bias, stop_ids, .. } = self;
        let GenerateSettings { min_tokens, ignore_eos, logprobs, stop, .. } = self;
        let penalties = Penalties {
            repetition: self.repetition_penalty,
            presence: self.presence_penalty,
            frequency: self.frequency_penalty,
        };
        let sampling = SampleSettings { temperature, top_k, top_p, seed };
        let settings =
            RequestSettings { sampling, min_p, penalties, logit_bias, stop_ids, min_tokens, ignore_eos, logprobs };
        Asked { prompt, max_tokens, settings, stop }
    }
}

/// A loaded model.
#[pyclass(frozen)]
struct Model(Arc<embed::Model>);

#[pymethods]
impl Model {
    #[new]
    fn load(py: Python<'_>, place: PathBuf, settings: LoadSettings) -> PyResult<Model> {
        let waiting = embed::Model::load_apart(place, settings.options()).map_err(|fault| raised(py, &fault))?;
        Ok(Model(Arc::new(wait(py, waiting)?)))
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.facts().name
    }

    #[getter]
    fn target(&self) -> &str {
        &self.0.facts().target
    }

    #[getter]
    fn vocab(&self) -> u32 {
        self.0.facts().vocab
    }

    #[getter]
    fn eos(&self) -> Vec<u32> {
        self.0.facts().eos.clone()
    }

    #[getter]
    fn bos(&self) -> Option<u32> {
        self.0.facts().bos
    }

    #[getter]
    fn context_max(&self) -> u32 {
        self.0.facts().context_max
    }

    #[getter]
    fn rows_max(&self) -> u32 {
        self.0.facts().rows_max
    }

    #[getter]
    fn sequences_max(&self) -> u32 {
        self.0.facts().sequences_max
    }

    #[getter]
    fn has_tokenizer(&self) -> bool {
        self.0.facts().has_tokenizer
    }

    fn encode(&self, py: Python<'_>, text: &str, special: bool) -> PyResult<Vec<u32>> {
        wait(py, self.0.encode(text, special))
    }

    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        wait(py, self.0.decode(ids, skip_special))
    }

    /// `messages`: pairs of role and content.
    fn encode_chat(&self, py: Python<'_>, messages: Vec<(String, String)>, reply: bool) -> PyResult<Vec<u32>> {
        let messages = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        wait(py, self.0.encode_chat(messages, reply))
    }

    fn generate(&self, prompt: Vec<u32>, settings: GenerateSettings) -> Stream {
        Stream(Mutex::new(Some(self.0.generate(settings.asked(prompt)))))
    }

    /// fp32 values `[ids, vocab]`, as bytes.
    fn logits<'py>(&self, py: Python<'py>, ids: Vec<u32>) -> PyResult<Bound<'py, PyByteArray>> {
        bytes(py, &wait(py, self.0.logits(ids))?)
    }

    fn sequence(&self, py: Python<'_>) -> PyResult<Sequence> {
        let sequence = Sequence { model: self.0.clone(), key: SequenceKey::unique() };
        wait(py, self.0.open(sequence.key))?;
        Ok(sequence)
    }

    /// `parts`: sequence, its next tokens, and which logits are wanted: 0 none, 1 those after the last token, 2 those after each.
    /// fp32 values `[wanted, vocab]`, as bytes.
    fn step<'py>(
        &self,
        py: Python<'py>,
        parts: Vec<(PyRef<'py, Sequence>, Vec<u32>, u8)>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        let part = |(sequence, tokens, wants): (PyRef<'py, Sequence>, Vec<u32>, u8)| {
            let wants = [Wants::Nothing, Wants::Last, Wants::Every][usize::from(wants.min(2))];
            StepPart { sequence: sequence.key, tokens, wants }
        };
        let parts = parts.into_iter().map(part).collect();
        bytes(py, &wait(py, self.0.step(parts))?)
    }
}

/// A sequence of steps. It is freed when it is no longer referenced.
#[pyclass(frozen)]
struct Sequence {
    model: Arc<embed::Model>,
    key: SequenceKey,
}

#[pymethods]
impl Sequence {
    fn length(&self, py: Python<'_>) -> PyResult<u32> {
        wait(py, self.model.length(self.key))
    }

    /// fp32 values `[vocab]`, as bytes.
    fn prefill<'py>(&self, py: Python<'py>, tokens: Vec<u32>) -> PyResult<Bound<'py, PyByteArray>> {
        bytes(py, &wait(py, self.model.prefill(self.key, tokens))?)
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Sequence> {
        let fork = Sequence { model: self.model.clone(), key: SequenceKey::unique() };
        wait(py, self.model.fork(self.key, fork.key))?;
        Ok(fork)
    }

    fn truncate(&self, py: Python<'_>, length: usize) -> PyResult<()> {
        wait(py, self.model.truncate(self.key, length))
    }

    fn free(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, self.model.free(self.key))
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // The answer is not awaited: a sequence that was freed before is no fault.
        drop(self.model.free(self.key));
    }
}

/// A running generation; `None` once it is closed.
#[pyclass(frozen)]
struct Stream(Mutex<Option<embed::Stream>>);

/// Id, text, log-probability, and the most probable ids with their log-probabilities.
type PieceOfPython = (Option<u32>, String, Option<f64>, Vec<(u32, f64)>);

impl Stream {
    /// Works with the stream. The GIL is released first: a thread that holds it may wait for the stream's lock.
    fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut Option<embed::Stream>) -> R + Send) -> R {
        py.detach(|| work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

#[pymethods]
impl Stream {
    /// The next piece; `None`: the generation has ended.
    fn next(&self, py: Python<'_>) -> PyResult<Option<PieceOfPython>> {
        loop {
            match self.with(py, |stream| stream.as_mut().map_or(Some(Ok(None)), |stream| stream.next_for(LOOK))) {
                Some(Ok(piece)) => {
                    return Ok(piece.map(|Piece { token, text }| match token {
                        Some(decided) => (Some(decided.token), text, decided.logprob, decided.top),
                        None => (None, text, None, vec![]),
                    }));
                }
                Some(Err(fault)) => return Err(raised(py, &fault)),
                None => py.check_signals()?,
            }
        }
    }

    /// Why it ended: `eos`, `stop` or `length`; `None` while it runs, and if it was closed before.
    fn end(&self, py: Python<'_>) -> Option<&'static str> {
        self.with(py, |stream| stream.as_ref().and_then(embed::Stream::end).map(embed::Stop::name))
    }

    /// Stops the generation.
    fn close(&self, py: Python<'_>) {
        self.with(py, |stream| {
            if stream.as_ref().is_some_and(|stream| stream.end().is_none()) {
                *stream = None;
            }
        });
    }
}

/// Serves the tokenizer of a folder to the parent process, until that closes stdin.
#[pyfunction]
fn serve_tokens(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    let served =
        py.detach(|| monobloc::pipeline::serve_tokens(&folder, std::io::stdin().lines(), std::io::stdout().lock()));
    served.map_err(|fault| raised(py, &fault))
}

#[pymodule]
mod _monobloc {
    #[pymodule_export]
    use super::{Error, InputError, InternalError, MachineError, Model, Sequence, Stream, serve_tokens};

    #[pymodule_export]
    #[allow(non_upper_case_globals)] // A name of Python.
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
