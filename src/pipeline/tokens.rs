//! Owns the process that a checkpoint's tokenizer runs in, and both ends of the way to it.
//!
//! A tokenizer and its chat template are programs of strangers: a template may double a string in a loop, and forty
//! normalisers may each put two letters in the place of one. The engines below count instructions at best, and no bytes. So
//! they run in a child whose memory and processor time the operating system bounds, according to the question; the parent
//! waits for no answer longer than that. A question that passes a bound ends the child, and is an error that names the file.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getpid, getppid, getrlimit, kill_process, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::line_child::NoAnswer;
use super::worker::Worker;
use crate::error::Fault;
use crate::gguf;
use crate::grammar::{Source, Vocabulary};
use crate::tokenizer::{CallForm, Chat, Message, Piece, Prompt, Specials, Stream, Tokenizer};

/// Address space of the child, before it is asked anything. A tokenizer of the largest known size, 262144 tokens and twice as
/// many merges, takes 0.6 GiB to load.
const BYTES: u64 = 2 << 30;
/// Address space for each byte of text: a token, its place and its copies take some hundred.
const BYTES_PER_BYTE: u64 = 1024;
/// Time to load a tokenizer, or to answer anything short.
const SECONDS: u64 = 60;
/// Bytes of text for which the time limit grows by a second: a hundredth of the speed of a core.
const BYTES_PER_SECOND: u64 = 32 << 10;
/// Time to compile a grammar: what people write takes milliseconds, and the table of a large vocabulary, which is made once, seconds.
const GRAMMAR_SECONDS: u64 = 15;
/// Most ids for each byte of text; tokenizers of real text make fewer.
const IDS_PER_BYTE: usize = 8;

/// What the child is asked, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "lowercase")]
enum Ask {
    Load,
    CheckVocab { vocab: u32 },
    Encode { text: String, special: bool },
    Chat { chat: Chat },
    CallForm,
    ShowsCalls,
    End { vocab: u32 },
    Config,
    Stream { skip_special: bool },
    Push { id: u32 },
    Finish,
    Texts { parts: Vec<TextPart> },
    Decode { lists: Vec<Vec<u32>>, skip_special: bool },
    Pieces { ids: Vec<u32> },
    Bytes { vocab: u32 },
    Grammar { source: Source, vocab: u32, eos: Vec<u32> },
}

/// The next ids of one of several texts that are decoded at the same time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextPart {
    /// Names the text. The first part with this number begins it.
    pub text: u64,
    pub ids: Vec<u32>,
    pub specials: Specials,
    /// The last part: what was held back comes with it, and the number is free again.
    pub ends: bool,
}

impl Ask {
    /// Bytes of text in it.
    fn bytes(&self) -> u64 {
        match self {
            Ask::Encode { text, .. } => text.len() as u64,
            Ask::Chat { chat: Chat { messages, tools, settings, .. } } => {
                let value = |value: &serde_json::Value| value.to_string().len();
                let message = |message: &Message| {
                    let thought = message.reasoning_content.as_ref().map_or(0, String::len);
                    message.content.len() + thought + message.tool_calls.iter().map(value).sum::<usize>()
                };
                let values = tools.iter().chain(settings.values());
                (messages.iter().map(message).sum::<usize>() + values.map(value).sum::<usize>()) as u64
            }
            _ => 0,
        }
    }

    /// Processor time.
    fn seconds(&self) -> u64 {
        match self {
            Ask::Grammar { .. } => GRAMMAR_SECONDS,
            _ => SECONDS + self.bytes() / BYTES_PER_SECOND,
        }
    }

    /// Wall time: a machine that is busy with other things takes longer.
    fn deadline(&self) -> Duration {
        Duration::from_secs(2 * self.seconds())
    }
}

/// What it answers, a line each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "said", rename_all = "lowercase")]
enum Said {
    Done,
    Loaded {
        chat_template: PathBuf,
    },
    Ids {
        ids: Vec<u32>,
    },
    Text {
        text: String,
    },
    Texts {
        texts: Vec<String>,
    },
    TextsEach {
        texts: Vec<Vec<String>>,
    },
    Prompt {
        prompt: Prompt,
    },
    /// Texts, and bytes as in [`Said::Bytes`].
    Pieces {
        pieces: Vec<(String, String)>,
    },
    CallForm {
        form: CallForm,
    },
    Config {
        config: serde_json::Map<String, serde_json::Value>,
    },
    /// For each token a text: each character, U+0000 to U+00FF, stands for one byte.
    Bytes {
        tokens: Vec<String>,
    },
    Fault {
        fault: Fault,
    },
}

/// The tokenizer of one checkpoint, in a process of its own.
pub struct Tokens {
    path: PathBuf,
    chat_template: PathBuf,
    /// `None`: it ended, and what it knew is gone.
    worker: Option<Worker<'static>>,
}

impl Tokens {
    /// Loads the tokenizer of the checkpoint folder `dir`. `program` runs [`serve_tokens`] on the folder that is its last
    /// argument.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; a tokenizer that takes more than its share; a program that cannot be started.
    pub fn load(program: impl Fn() -> Command + 'static, dir: &Path) -> Result<Tokens, Fault> {
        let folder = dir.to_path_buf();
        let worker = Worker::new(move || {
            let mut command = program();
            // Memory that is spent has none left for a backtrace.
            command.arg(&folder).env("RUST_BACKTRACE", "0");
            command
        });
        let path = if gguf::is_named(dir) { dir.to_path_buf() } else { dir.join("tokenizer.json") };
        let mut tokens = Tokens { chat_template: path.clone(), path, worker: Some(worker) };
        match tokens.ask(&Ask::Load)? {
            Said::Loaded { chat_template } => tokens.chat_template = chat_template,
            other => return Err(unexpected(&other)),
        }
        Ok(tokens)
    }

    /// As [`Tokenizer::check_vocab`].
    ///
    /// # Errors
    /// Its errors, and a tokenizer that takes more than its share.
    pub fn check_vocab(&mut self, vocab: u32) -> Result<(), Fault> {
        self.done(&Ask::CheckVocab { vocab })
    }

    /// As [`Tokenizer::encode`].
    ///
    /// # Errors
    /// Its errors, and a tokenizer that takes more than its share.
    pub fn encode(&mut self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Fault> {
        self.ids(&Ask::Encode { text: text.to_string(), special: add_special_tokens })
    }

    /// As [`Tokenizer::encode_chat`].
    ///
    /// # Errors
    /// Its errors, and a template or tokenizer that takes more than its share.
    pub fn encode_chat(&mut self, chat: Chat) -> Result<Prompt, Fault> {
        match self.ask(&Ask::Chat { chat })? {
            Said::Prompt { prompt } => Ok(prompt),
            other => Err(unexpected(&other)),
        }
    }

    /// As [`Tokenizer::shows_calls`].
    ///
    /// # Errors
    /// Its errors, and a template that takes more than its share.
    pub fn shows_calls(&mut self) -> Result<(), Fault> {
        self.done(&Ask::ShowsCalls)
    }

    /// As [`Tokenizer::end`]: one id, or none.
    ///
    /// # Errors
    /// A process that was lost.
    pub fn end(&mut self, vocab: u32) -> Result<Vec<u32>, Fault> {
        self.ids(&Ask::End { vocab })
    }

    /// As [`Tokenizer::call_form`].
    ///
    /// # Errors
    /// Its errors, and a template that takes more than its share.
    pub fn call_form(&mut self) -> Result<CallForm, Fault> {
        match self.ask(&Ask::CallForm)? {
            Said::CallForm { form } => Ok(form),
            other => Err(unexpected(&other)),
        }
    }

    /// As [`Tokenizer::config`].
    ///
    /// # Errors
    /// A process that was lost.
    pub fn config(&mut self) -> Result<serde_json::Map<String, serde_json::Value>, Fault> {
        match self.ask(&Ask::Config)? {
            Said::Config { config } => Ok(config),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins the text of ids that come one by one, as [`Tokenizer::stream`]; until [`Tokens::finish`] nothing else is asked.
    ///
    /// # Errors
    /// A process that was lost.
    pub fn stream(&mut self, skip_special: bool) -> Result<(), Fault> {
        self.done(&Ask::Stream { skip_special })
    }

    /// Takes the next id and returns the text that became certain.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`], and a tokenizer that takes more than its share.
    pub fn push(&mut self, id: u32) -> Result<String, Fault> {
        self.text(&Ask::Push { id })
    }

    /// Ends the text and returns what was held back.
    ///
    /// # Errors
    /// As [`Tokens::push`].
    pub fn finish(&mut self) -> Result<String, Fault> {
        self.text(&Ask::Finish)
    }

    /// Takes the next ids of several texts; for each part the text that became certain after each of its ids, and after its end
    /// where it ends one. As [`Tokens::push`] for one text; many texts share one question, which costs as much as one id.
    ///
    /// # Errors
    /// As [`Tokens::push`]; all texts are lost with it.
    pub fn texts(&mut self, parts: Vec<TextPart>) -> Result<Vec<Vec<String>>, Fault> {
        match self.ask(&Ask::Texts { parts })? {
            Said::TextsEach { texts } => Ok(texts),
            other => Err(unexpected(&other)),
        }
    }

    /// Text of each list of ids.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`], and a tokenizer that takes more than its share.
    pub fn decode(&mut self, lists: Vec<Vec<u32>>, skip_special: bool) -> Result<Vec<String>, Fault> {
        self.ask_texts(&Ask::Decode { lists, skip_special })
    }

    /// Each id as it stands inside of a text, special tokens too.
    ///
    /// # Errors
    /// As [`Tokens::decode`].
    pub fn pieces(&mut self, ids: Vec<u32>) -> Result<Vec<Piece>, Fault> {
        match self.ask(&Ask::Pieces { ids })? {
            Said::Pieces { pieces } => {
                let piece = |(text, bytes): (String, String)| Ok(Piece { text, bytes: of_latin(&bytes)? });
                pieces.into_iter().map(piece).collect()
            }
            other => Err(unexpected(&other)),
        }
    }

    /// As [`Tokenizer::token_bytes`].
    ///
    /// # Errors
    /// Its errors, and a tokenizer that takes more than its share.
    pub fn token_bytes(&mut self, vocab: u32) -> Result<Vec<Vec<u8>>, Fault> {
        match self.ask(&Ask::Bytes { vocab })? {
            Said::Bytes { tokens } => tokens.iter().map(|token| of_latin(token)).collect(),
            other => Err(unexpected(&other)),
        }
    }

    /// Compiles a grammar for this tokenizer in its process, and forgets it: what compiles there takes no more here.
    ///
    /// # Errors
    /// As [`Tokenizer::token_bytes`] and [`Vocabulary::compile`]; a grammar that takes more than its share.
    pub fn check_grammar(&mut self, source: &Source, vocab: u32, eos: &[u32]) -> Result<(), Fault> {
        self.done(&Ask::Grammar { source: source.clone(), vocab, eos: eos.to_vec() })
    }

    /// The folder of its checkpoint.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Whether its process has ended: it answers nothing any more.
    pub fn is_lost(&self) -> bool {
        self.worker.is_none()
    }

    fn ask_texts(&mut self, ask: &Ask) -> Result<Vec<String>, Fault> {
        match self.ask(ask)? {
            Said::Texts { texts } => Ok(texts),
            other => Err(unexpected(&other)),
        }
    }

    fn done(&mut self, ask: &Ask) -> Result<(), Fault> {
        match self.ask(ask)? {
            Said::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn ids(&mut self, ask: &Ask) -> Result<Vec<u32>, Fault> {
        match self.ask(ask)? {
            Said::Ids { ids } => Ok(ids),
            other => Err(unexpected(&other)),
        }
    }

    fn text(&mut self, ask: &Ask) -> Result<String, Fault> {
        match self.ask(ask)? {
            Said::Text { text } => Ok(text),
            other => Err(unexpected(&other)),
        }
    }

    fn ask(&mut self, ask: &Ask) -> Result<Said, Fault> {
        let mut worker =
            self.worker.take().ok_or_else(|| Fault::internal("a tokenizer is asked whose process has ended"))?;
        let line = serde_json::to_string(ask).map_err(|error| Fault::internal(format!("no JSON: {error}")))?;
        match worker.exchange(&line, ask.deadline(), &|| false)? {
            Ok(line) => {
                let said = serde_json::from_str(&line)
                    .map_err(|error| Fault::internal(format!("a tokenizer's process answered nonsense: {error}")))?;
                // A refusal does not end the process.
                self.worker = Some(worker);
                match said {
                    Said::Fault { fault } => Err(fault),
                    said => Ok(said),
                }
            }
            Err(NoAnswer::Late(after)) => Err(self.spent(ask, &format!("takes more than {} s", after.as_secs()))),
            Err(NoAnswer::Died(how)) => Err(self.spent(ask, &verdict(ask, &how))),
            Err(NoAnswer::Interrupted) => Err(Fault::internal("a tokenizer was interrupted without an interrupt")),
        }
    }

    /// The fault of a question during which the child ended.
    fn spent(&self, ask: &Ask, what: &str) -> Fault {
        if let Ask::Grammar { .. } = ask {
            return Fault::input(format!("what is asked of the text {what}")).with_remedy("ask for something simpler");
        }
        let (path, by_ids) = match ask {
            Ask::Chat { .. } | Ask::CallForm | Ask::ShowsCalls => {
                (&self.chat_template, "give a plain prompt, which no template is run for")
            }
            _ => (&self.path, "pass token ids with `--ids`, which works without a tokenizer"),
        };
        Fault::input(format!("`{}` {what}", path.display())).with_remedy(format!(
            "it is not for its users that a checkpoint's file does this: do not trust it, or {by_ids}"
        ))
    }
}

/// The fault of a tokenizer whose child process has ended.
fn verdict(ask: &Ask, how: &str) -> String {
    let gib = (BYTES + ask.bytes() * BYTES_PER_BYTE) >> 30;
    if how.contains("memory allocation of") {
        format!("takes more than {gib} GiB of memory for {} bytes of text", ask.bytes())
    } else if how.contains(&format!("signal {}", rustix::process::Signal::XCPU.as_raw())) {
        format!("takes more than {} s for {} bytes of text", ask.seconds(), ask.bytes())
    } else {
        format!("ends the process that reads it: {how}")
    }
}

fn unexpected(said: &Said) -> Fault {
    Fault::internal(format!("a tokenizer's process answered what was not asked: {said:?}"))
}

/// Answers what is asked of the tokenizer in `dir`, a line each, until there is no more.
///
/// For a process of its own: it bounds the memory, the processor time and the wall time of the process that it runs in, and
/// ends it when its parent has ended.
///
/// # Errors
/// A system that bounds no process; lines that are no question; an output without a reader.
pub fn serve_tokens(
    dir: &Path,
    lines: impl Iterator<Item = io::Result<String>>,
    mut output: impl Write,
) -> Result<(), Fault> {
    let watch = Watch::start();
    let mut asks = lines.map(|line| {
        let line = line.map_err(|error| Fault::environment(format!("cannot read what is asked: {error}")))?;
        let ask: Ask = serde_json::from_str(&line).map_err(|error| {
            let line: String = line.chars().take(80).collect();
            Fault::input(format!("`{line}` asks nothing: {error}"))
                .with_remedy("this command is started by those that read text")
        })?;
        bound(&ask)?;
        watch.begin(&ask);
        Ok::<Ask, Fault>(ask)
    });
    let mut say = |said: Result<Said, Fault>| {
        let said = said.unwrap_or_else(|fault| Said::Fault { fault });
        let line = serde_json::to_string(&said).map_err(|error| Fault::internal(format!("no JSON: {error}")))?;
        watch.rest();
        writeln!(output, "{line}")
            .and_then(|()| output.flush())
            .map_err(|error| Fault::environment(format!("cannot write an answer: {error}")))
    };
    // A tokenizer may allocate for ever before it is there: bounded from the first byte of its files on.
    bound(&Ask::Load)?;
    watch.begin(&Ask::Load);
    let tokenizer = match Tokenizer::load(dir) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return say(Err(error.into())),
    };
    let mut texts = BTreeMap::new();
    let mut vocabulary: Option<Vocabulary> = None;
    while let Some(ask) = asks.next().transpose()? {
        let text_bytes = ask.bytes() as usize;
        let few = |ids: Vec<u32>| {
            let most = IDS_PER_BYTE * text_bytes + 4096;
            if ids.len() <= most {
                return Ok(Said::Ids { ids });
            }
            let message = format!("expected at most {most} tokens for {text_bytes} bytes of text, found {}", ids.len());
            Err(Fault::input(message).with_remedy("pass token ids with `--ids`, which works without a tokenizer"))
        };
        match ask {
            Ask::Load => {
                let chat_template = tokenizer.chat_template_path().to_path_buf();
                say(Ok(Said::Loaded { chat_template }))?;
            }
            Ask::CheckVocab { vocab } => say(tokenizer.check_vocab(vocab).map(|()| Said::Done).map_err(Fault::from))?,
            Ask::Encode { text, special } => say(tokenizer.encode(&text, special).map_err(Fault::from).and_then(few))?,
            Ask::Config => say(Ok(Said::Config { config: tokenizer.config() }))?,
            Ask::CallForm => {
                say(tokenizer.call_form().map(|form| Said::CallForm { form }).map_err(Fault::from))?;
            }
            Ask::ShowsCalls => say(tokenizer.shows_calls().map(|()| Said::Done).map_err(Fault::from))?,
            Ask::End { vocab } => say(Ok(Said::Ids { ids: tokenizer.end(vocab).into_iter().collect() }))?,
            Ask::Chat { chat } => {
                // A template may write more than it was given, and is bounded by itself.
                let prompt = tokenizer.encode_chat(&chat);
                say(prompt.map(|prompt| Said::Prompt { prompt }).map_err(Fault::from))?;
            }
            Ask::Stream { skip_special } => {
                say(Ok(Said::Done))?;
                let mut stream = tokenizer.stream(Specials::of(skip_special));
                let text = loop {
                    match asks.next().transpose()? {
                        Some(Ask::Push { id }) => {
                            say(stream.push(id).map(|text| Said::Text { text }).map_err(Fault::from))?;
                        }
                        Some(Ask::Finish) => break stream.finish(),
                        _ => return Ok(()),
                    }
                };
                say(text.map(|text| Said::Text { text }).map_err(Fault::from))?;
            }
            Ask::Texts { parts } => {
                let said: Result<Vec<_>, Fault> =
                    parts.into_iter().map(|part| next_text(&tokenizer, &mut texts, part)).collect();
                say(said.map(|texts| Said::TextsEach { texts }))?;
            }
            Ask::Decode { lists, skip_special } => {
                let text = |ids: &Vec<u32>| tokenizer.decode(ids, skip_special).map_err(Fault::from);
                say(lists.iter().map(text).collect::<Result<_, _>>().map(|texts| Said::Texts { texts }))?;
            }
            Ask::Bytes { vocab } => {
                let tokens = tokenizer.token_bytes(vocab).map_err(Fault::from);
                say(tokens.map(|tokens| Said::Bytes { tokens: tokens.into_iter().map(to_latin).collect() }))?;
            }
            Ask::Grammar { source, vocab, eos } => {
                let compiled = compile(&tokenizer, &mut vocabulary, &source, vocab, &eos);
                say(compiled.map(|()| Said::Done))?;
            }
            Ask::Pieces { ids } => {
                let piece = |&id: &u32| {
                    let Piece { text, bytes } = tokenizer.piece(id)?;
                    Ok::<_, Fault>((text, to_latin(bytes)))
                };
                say(ids.iter().map(piece).collect::<Result<_, _>>().map(|pieces| Said::Pieces { pieces }))?;
            }
            Ask::Push { .. } | Ask::Finish => return Err(Fault::internal("no text was begun")),
        }
    }
    Ok(())
}

/// Bytes as characters U+0000 to U+00FF.
fn to_latin(bytes: Vec<u8>) -> String {
    bytes.into_iter().map(char::from).collect()
}

fn of_latin(text: &str) -> Result<Vec<u8>, Fault> {
    let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
    bytes.map_err(|_| Fault::internal("a tokenizer's process answered bytes that are none"))
}

/// Compiles a grammar over the bytes of a tokenizer's tokens, which are found once: a process has one model.
fn compile(
    tokenizer: &Tokenizer,
    vocabulary: &mut Option<Vocabulary>,
    source: &Source,
    vocab: u32,
    eos: &[u32],
) -> Result<(), Fault> {
    let made = match vocabulary.take() {
        Some(made) => made,
        None => Vocabulary::new(&tokenizer.token_bytes(vocab)?, eos)?,
    };
    let compiled = made.compile(source);
    *vocabulary = Some(made);
    Ok(compiled.map(|_| ())?)
}

/// The text that became certain after each id of a part, and after its end.
fn next_text<'a>(
    tokenizer: &'a Tokenizer,
    texts: &mut BTreeMap<u64, Stream<'a>>,
    part: TextPart,
) -> Result<Vec<String>, Fault> {
    let TextPart { text, ids, specials, ends } = part;
    let stream = texts.entry(text).or_insert_with(|| tokenizer.stream(specials));
    let mut said = ids.into_iter().map(|id| stream.push(id)).collect::<Result<Vec<String>, _>>()?;
    if ends && let Some(stream) = texts.remove(&text) {
        said.push(stream.finish()?);
    }
    Ok(said)
}

/// Ends this process when its parent is gone, or when an answer takes longer than the parent would wait. The limit of processor
/// time does not end a read that blocks, and a parent that was killed cannot end its child.
struct Watch {
    started: Instant,
    /// Milliseconds after `started` at which the process ends; [`Watch::RESTING`] while nothing is asked.
    due_ms: Arc<AtomicU64>,
}

impl Watch {
    const RESTING: u64 = u64::MAX;
    /// Pause between two looks.
    const LOOK: Duration = Duration::from_millis(200);
    /// How much later than the parent's deadline: the parent has the better message.
    const GRACE: Duration = Duration::from_secs(5);

    fn start() -> Watch {
        let watch = Watch { started: Instant::now(), due_ms: Arc::new(AtomicU64::new(Self::RESTING)) };
        let (started, due_ms, parent) = (watch.started, Arc::clone(&watch.due_ms), getppid());
        thread::spawn(move || {
            loop {
                thread::sleep(Self::LOOK);
                let late = started.elapsed().as_millis() as u64 > due_ms.load(Ordering::Relaxed);
                if late || getppid() != parent {
                    let _ = kill_process(getpid(), Signal::KILL);
                }
            }
        });
        watch
    }

    fn begin(&self, ask: &Ask) {
        let due = self.started.elapsed() + ask.deadline() + Self::GRACE;
        self.due_ms.store(due.as_millis() as u64, Ordering::Relaxed);
    }

    fn rest(&self) {
        self.due_ms.store(Self::RESTING, Ordering::Relaxed);
    }
}

/// Bounds what this process may take to answer.
fn bound(ask: &Ask) -> Result<(), Fault> {
    let limit = |resource, most: u64| {
        let Rlimit { maximum, .. } = getrlimit(resource);
        let current = Some(maximum.map_or(most, |maximum| most.min(maximum)));
        setrlimit(resource, Rlimit { current, maximum }).map_err(|error| {
            Fault::environment(format!("cannot bound what a tokenizer takes: {error}"))
                .with_remedy("pass token ids with `--ids`, which works without a tokenizer")
        })
    };
    let used = u64::try_from(clock_gettime(ClockId::ProcessCPUTime).tv_sec).unwrap_or(0);
    limit(Resource::Cpu, used + ask.seconds())?;
    limit(Resource::As, BYTES.saturating_add(ask.bytes().saturating_mul(BYTES_PER_BYTE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Tier;

    /// A program of the shell in place of a tokenizer's.
    fn shell(script: &'static str) -> Result<Tokens, Fault> {
        let program = move || {
            let mut command = Command::new("sh");
            command.args(["-c", script, "sh"]);
            command
        };
        Tokens::load(program, Path::new("checkpoint"))
    }

    const LOADED: &str = r#"read ask; echo '{"said":"loaded","chat_template":"checkpoint/chat.jinja"}'; "#;

    #[test]
    fn whatever_ends_a_tokenizer_names_its_file() {
        for (script, expected) in [
            (
                "echo memory allocation of 5 bytes failed >&2; kill -ABRT $$",
                "takes more than 2 GiB of memory for 0 bytes",
            ),
            ("kill -XCPU $$", "takes more than 60 s for 0 bytes of text"),
            ("kill -SEGV $$", "ends the process that reads it: the child process was killed by signal 11"),
        ] {
            let fault = shell(script).err().expect(script);
            assert!(fault.message.contains(expected), "{script}: {fault}");
            assert!(fault.message.starts_with("`checkpoint/tokenizer.json`"), "{fault}");
            assert_eq!(fault.tier, Tier::Input);
            assert!(fault.remedy.is_some_and(|remedy| remedy.contains("`--ids`")));
        }
    }

    #[test]
    fn a_chat_names_its_template_and_a_lost_process_is_not_asked_again() {
        let script: String = LOADED.to_string() + "read ask; kill -XCPU $$";
        let mut tokens = shell(script.leak()).expect("loaded");
        let fault = tokens.encode_chat(Chat::new(vec![Message::new("user", "abc")])).expect_err("it ended");
        assert!(fault.message.starts_with("`checkpoint/chat.jinja` takes more than 60 s for 3 bytes"), "{fault}");
        assert!(fault.remedy.is_some_and(|remedy| remedy.contains("plain prompt")));
        assert_eq!(tokens.encode("a", true).expect_err("it is gone").tier, Tier::Internal);
    }

    #[test]
    fn what_a_child_answers_is_believed_if_it_answers_what_was_asked() {
        let fault = r#"{"said":"fault","fault":{"tier":"input","message":"m","remedy":"r"}}"#;
        let script: String = LOADED.to_string() + "read ask; echo '" + fault + "'";
        let told = shell(script.leak()).expect("loaded").encode("a", true).expect_err("a fault");
        assert_eq!(told, Fault::input("m").with_remedy("r"));
        for answer in [r#"{"said":"done"}"#, "surprise"] {
            let script: String = LOADED.to_string() + "read ask; echo '" + answer + "'";
            let told = shell(script.leak()).expect("loaded").encode("a", true).expect_err("nonsense");
            assert_eq!(told.tier, Tier::Internal, "{answer}");
        }
    }
}
