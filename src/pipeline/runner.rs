//! Owns `Runner`: a prepared model that decodes, on the CPU or on a device, with one interface.

use std::hint;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use crate::codegen::emit::Trace;
use crate::cuda::driver::Device;
use crate::cuda::session::{Session, SessionError};
use crate::error::Fault;
use crate::interp::{Input, Interp, Options};
use crate::sample::SampleSettings;

use super::chain::Host;
use super::execute::{self, load_session};
use super::{Prepared, Workspace};

/// Between two looks at the tokens of a running launch: well below the time of a token that a person sees.
const POLL: Duration = Duration::from_micros(200);

/// End-of-sequence ids that a kernel takes; where there are more, the host alone looks for them.
const EOS_MAX: usize = crate::codegen::abi::EOS_MAX;

/// Executes a prepared model: the interpreter for `cpu`, the kernel for a CUDA target whose device is here.
pub struct Runner {
    place: String,
    context_max: u32,
    vocab: u32,
    on: On,
}

enum On {
    Cpu(Box<Interp>),
    Device { session: Box<Session>, steps_max: u32 },
}

impl Prepared {
    /// Packs the weights and loads what executes them.
    ///
    /// # Errors
    /// No device of the target's kind, no compiler and no cubin, too little memory.
    pub fn runner(&self, workspace: &Workspace) -> Result<Runner, Fault> {
        let schedule = self.validated.schedule();
        let host = Host::new(workspace);
        let chain = self.chain(workspace, &host);
        let (context_max, vocab) = (schedule.program.context_max, self.imported.graph.vocab);
        let Some(found) = host.device(&self.target)? else {
            let interp = Interp::new(schedule, chain.pack()?, Options::fast())?;
            let place = format!("cpu interpreter on {} threads", execute::host().threads);
            return Ok(Runner { place, context_max, vocab, on: On::Cpu(Box::new(interp)) });
        };
        let cubin = chain.cubin()?.ok_or_else(|| Fault::internal("a target with a kernel has no cubin"))?;
        let pack = chain.pack()?;
        let device = Device::open(found.ordinal)?;
        let steps_max = self.manifest.decode.steps_per_launch;
        let session = load_session(workspace, &device, &self.validated, &cubin.bytes, &pack, Trace::Off, steps_max)?;
        let place = format!("{} (device {})", found.name, found.ordinal);
        Ok(Runner { place, context_max, vocab, on: On::Device { session: Box::new(session), steps_max } })
    }
}

impl Runner {
    /// Where it runs, for the user: `cpu interpreter on 2 threads`, `NVIDIA H200 (device 0)`.
    pub fn place(&self) -> String {
        self.place.clone()
    }

    /// Positions that the cache has room for.
    pub fn context_max(&self) -> u32 {
        self.context_max
    }

    /// Logits of one position.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Logits after each of `ids` from position 0, whatever the model would have chosen: `on_row(position, logits)`,
    /// `logits` of `[vocab]`.
    ///
    /// # Errors
    /// More ids than the context has positions; an id outside the vocabulary.
    pub fn logits(&mut self, ids: &[u32], on_row: &mut dyn FnMut(u32, &[f32])) -> Result<(), Fault> {
        self.check_ids(ids)?;
        match &mut self.on {
            On::Cpu(interp) => {
                interp.reset();
                let inputs: Vec<Input> = ids.iter().copied().map(Input::Token).collect();
                let mut row = vec![];
                interp.launch(&inputs, |step| {
                    step.logits.copy_to(&mut row);
                    on_row(step.position, &row);
                    ControlFlow::Continue(())
                })?;
            }
            On::Device { session, steps_max } => {
                session.start(ids, &[])?;
                let mut position = 0;
                while (position as usize) < ids.len() {
                    let steps = (*steps_max).min(ids.len() as u32 - position);
                    session.run(position, steps, true)?;
                    let logits = session.logits(steps)?;
                    for (at, row) in (position..).zip(logits.chunks_exact(self.vocab.max(1) as usize)) {
                        on_row(at, row);
                    }
                    position += steps;
                }
            }
        }
        Ok(())
    }

    /// Continues `prompt` with at most `max_tokens` tokens, and at most as many as the context has room for; stops after
    /// the first of `eos`, which is part of the result. `on_token` sees each token as soon as it is decided.
    ///
    /// # Errors
    /// An empty prompt, a prompt longer than the context, an id outside the vocabulary, sampling settings out of range.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        eos: &[u32],
        sampling: &SampleSettings,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, Fault> {
        let sampler = sampling.resolve()?;
        self.check_ids(prompt)?;
        if prompt.is_empty() {
            return Err(Fault::input("the prompt has no token, expected at least one")
                .with_remedy("name a token with `--ids`, or write a prompt"));
        }
        // The last token needs no position of its own: nothing is decoded after it.
        let count = max_tokens.min(self.context_max as usize - prompt.len() + 1);
        if count == 0 {
            return Ok(vec![]);
        }
        let mut tell = |token: u32| {
            let stop = on_token(token).is_break() || eos.contains(&token);
            if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        match &mut self.on {
            On::Cpu(interp) if sampler.is_greedy() => Ok(interp.greedy(prompt, count, tell)?),
            On::Cpu(interp) => {
                let mut fault = None;
                let mut stopped = false;
                let mut position = prompt.len() as u32;
                let tokens = interp.generate(prompt, count, |logits| {
                    if stopped {
                        return None;
                    }
                    let chosen = sampler.choose(logits, position);
                    position += 1;
                    match chosen {
                        Ok(token) => {
                            stopped = tell(token).is_break();
                            Some(token)
                        }
                        Err(error) => {
                            fault = Some(error);
                            None
                        }
                    }
                })?;
                fault.map_or(Ok(tokens), |error| Err(error.into()))
            }
            On::Device { session, steps_max } => {
                session.sample(sampler);
                Ok(decide_on_device(session, *steps_max, prompt, count, eos, &mut tell)?)
            }
        }
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Fault> {
        let context_max = self.context_max;
        if ids.len() > context_max as usize {
            let message = format!("the prompt has {} tokens, `context_max` is {context_max}", ids.len());
            return Err(Fault::input(message).with_remedy("raise `decode.context_max` or shorten the prompt"));
        }
        match ids.iter().find(|&&id| id >= self.vocab) {
            Some(id) => Err(Fault::input(format!("token {id} is not below the vocabulary of {}", self.vocab))),
            None => Ok(()),
        }
    }
}

/// Lets the device choose, and tells each token while the launch that decided it still runs.
fn decide_on_device(
    session: &mut Session,
    steps_max: u32,
    prompt: &[u32],
    count: usize,
    eos: &[u32],
    tell: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>, SessionError> {
    session.start(prompt, if eos.len() <= EOS_MAX { eos } else { &[] })?;
    let last = (prompt.len() + count - 1) as u32;
    let mut tokens = vec![];
    let mut position = 0;
    while position < last {
        let steps = steps_max.min(last - position);
        // The kernel selects and reports the token after its last step as well.
        let timeout_ms = session.launch(position, steps, false)?;
        let mut stopped = false;
        let mut catch_up = |session: &Session, tokens: &mut Vec<u32>| -> Result<(), SessionError> {
            let decided = session.decided()?;
            while !stopped && prompt.len() + tokens.len() < decided as usize {
                let token = session.token((prompt.len() + tokens.len()) as u32)?;
                tokens.push(token);
                stopped = tell(token).is_break();
            }
            Ok(())
        };
        // A launch that hangs ends by its own deadline; `finish` tells why.
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        while Instant::now() < deadline {
            catch_up(session, &mut tokens)?;
            if session.decided()? >= position + steps || session.is_done()? {
                break;
            }
            // A person waits for the first token, and a sleep would be longer than the launch takes to begin.
            if tokens.is_empty() { hint::spin_loop() } else { thread::sleep(POLL) }
        }
        session.finish(timeout_ms)?;
        catch_up(session, &mut tokens)?;
        if stopped {
            return Ok(tokens);
        }
        position += steps;
    }
    Ok(tokens)
}
