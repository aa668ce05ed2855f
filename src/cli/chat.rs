//! Owns `chat`: a conversation with a model in the chat template of its checkpoint, on a terminal or line by line.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Config, Editor};
use serde_json::json;

use super::Outcome;
use super::arguments::Chat;
use super::choosing;
use super::generate::tokens;
use super::places;
use super::printer::{Form, Printer, Special};
use super::session::{Session, Talk, choose_target, text_tokenizer};
use super::terminal::interrupt;
use crate::error::{Fault, Tier};
use crate::manifest::Manifest;
use crate::pipeline::{Runner, Tokens};
use crate::sample::{End, Request};
use crate::serve::OfChannels;
use crate::text::counted;
use crate::tokenizer::{self, Message, Prompt};

/// Longest line that is read as a message.
const LINE_BYTES_MAX: u64 = 64 << 20;
/// Lines that the editor's history keeps.
const HISTORY_LINES_MAX: usize = 1000;

const HELP: &str = "\
/help        lists the commands
/reset       forgets the conversation, but not the system prompt
/save FILE   writes the conversation as JSON
/quit        ends the chat, as Ctrl-D does
Ctrl-C stops an answer.";

pub fn chat(session: &Session, asked: &Chat) -> Result<Outcome, Fault> {
    let settings = choosing::settings(&asked.choosing)?;
    if let Some(warning) = choosing::without_effect(&asked.choosing) {
        session.terminal.say(&warning);
    }
    let given = session.given(&asked.manifest, asked.target.as_deref())?;
    let manifest = &given.manifest;
    let target = choose_target(manifest, asked.target.as_deref())?;
    choosing::refuse_on_kernels(&settings, manifest, &target)?;
    let mut words = text_tokenizer(manifest)?;
    let system: Vec<Message> = asked.system.iter().map(|system| Message::new("system", system)).collect();
    // Before the model is built: a checkpoint without a template, or whose template has no system prompt, cannot chat.
    let probe = system.iter().cloned().chain([Message::new("user", "Hello.")]).collect();
    let thinking = if asked.no_think { tokenizer::without_thinking() } else { Default::default() };
    words.encode_chat(tokenizer::Chat { settings: thinking.clone(), ..tokenizer::Chat::new(probe) })?;
    let mut ready = session.ready(&given, &target, Talk::Work, &asked.checks)?;
    words.check_vocab(ready.vocab)?;
    ready.end_also(words.end(ready.vocab)?);
    let request = settings.resolve(ready.vocab, &ready.eos)?;
    let runner = ready.runner()?;
    let mut lines = Lines::open(session.terminal.stdout_is_terminal());
    if lines.is_terminal() {
        let (name, place) = (given.model_name(), runner.place());
        session.tell(&format!("{name} ({place}); /help lists the commands, Ctrl-D ends the chat"));
    }
    let mut conversation = Conversation {
        session,
        manifest,
        max_tokens: asked.max_tokens.unwrap_or(usize::MAX),
        request,
        words,
        runner,
        first: system.len(),
        messages: system,
        thinking,
    };
    while let Some(line) = lines.next()? {
        match conversation.line(&line) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => break,
            // On a terminal the chat continues; otherwise the exit code reports the error.
            Err(fault) if fault.tier == Tier::Input && lines.is_terminal() => session.terminal.print_fault(&fault),
            Err(fault) => return Err(fault),
        }
        if session.terminal.is_closed() {
            break;
        }
    }
    Ok(Outcome::Done)
}

/// A model, and the messages so far.
struct Conversation<'a> {
    session: &'a Session,
    manifest: &'a Manifest,
    max_tokens: usize,
    request: Request,
    words: Tokens,
    runner: Runner<'a>,
    messages: Vec<Message>,
    /// Settings of the template.
    thinking: serde_json::Map<String, serde_json::Value>,
    /// Messages before the conversation: 1 with a system prompt, else 0.
    first: usize,
}

impl Conversation<'_> {
    /// Takes a command or a message. `Break` ends the chat.
    fn line(&mut self, line: &str) -> Result<ControlFlow<()>, Fault> {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/help" => self.session.terminal.say(HELP),
            "/quit" => return Ok(ControlFlow::Break(())),
            "/reset" => {
                self.messages.truncate(self.first);
                self.session.terminal.say("the conversation is forgotten");
            }
            "/save" => self.save(rest.trim())?,
            _ if command.starts_with('/') => {
                return Err(Fault::input(format!("no such command: `{command}`"))
                    .with_remedy("/help lists the commands; a message cannot begin with `/`"));
            }
            _ => self.turn(line)?,
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Lets the model answer a message. If it cannot, the conversation is what it was before.
    fn turn(&mut self, text: &str) -> Result<(), Fault> {
        self.messages.push(Message::new("user", text));
        match self.answer() {
            Ok(answer) => self.messages.push(answer),
            Err(fault) => {
                self.messages.pop();
                // The tokenizer's process ends if it cannot answer; start another one.
                self.words = text_tokenizer(self.manifest)?;
                return Err(fault);
            }
        }
        Ok(())
    }

    fn answer(&mut self) -> Result<Message, Fault> {
        let Conversation { session, manifest, max_tokens, request, words, runner, messages, thinking, .. } = self;
        let terminal = &session.terminal;
        let _deferred = interrupt::defer();
        let chat = tokenizer::Chat { settings: thinking.clone(), ..tokenizer::Chat::new(messages.clone()) };
        let Prompt { ids: prompt, thinking } = words.encode_chat(chat)?;
        let context_max = manifest.decode.context_max as usize;
        if prompt.len() > context_max {
            let message = format!("the conversation has {}, and `context_max` is {context_max}", tokens(prompt.len()));
            return Err(Fault::input(message)
                .with_remedy("/reset begins a new conversation; a manifest may have a larger `context_max`"));
        }
        let mut printer = Printer::new(session, Form::Text, Some(words), Special::of(thinking))?;
        runner.make_ready(&prompt, 0)?;
        let begun = Instant::now();
        let (mut first, mut last) = (None, begun);
        let (mut stopped, mut failed) = (false, None);
        let answer = runner.answer(&prompt, *max_tokens, request, &mut |decided| {
            last = Instant::now();
            first.get_or_insert(last);
            if let Err(fault) = printer.token(decided) {
                failed = Some(fault);
            }
            stopped = interrupt::asked();
            if failed.is_some() || stopped || terminal.is_closed() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if let Some(fault) = failed {
            return Err(fault);
        }
        let printed = printer.finish(false)?;
        let (count, first) = (answer.tokens.len(), first.unwrap_or(last));
        let decode_s = (last - first).as_secs_f64();
        let rate = match count > 1 && decode_s > 0.0 {
            true => format!(" at {:.0} tokens/s", (count - 1) as f64 / decode_s),
            false => String::new(),
        };
        // The last token of an answer has no place in the cache yet.
        let used = (prompt.len() + count).min(context_max);
        let ended = answer.tokens.last().is_some_and(|last| request.end(*last) == Some(End::Eos));
        let how = match (stopped, ended) {
            (true, _) => ", stopped",
            (false, true) => "",
            (false, false) if count >= *max_tokens => ", stopped at `--max-tokens`",
            (false, false) => ", stopped: the context is full, /reset begins a new conversation",
        };
        self.session.tell(&format!(
            "[{}{rate}{how}; {} of {} prompt tokens decoded in {:.0} ms; context: {used} of {context_max} tokens used, {} left]",
            tokens(count),
            prompt.len() - answer.reused,
            prompt.len(),
            (first - begun).as_secs_f64() * 1e3,
            context_max.saturating_sub(used),
        ));
        Ok(match printed.channels {
            None => Message::new("assistant", printed.text),
            Some(OfChannels { thoughts, answer, .. }) => {
                let reasoning_content = Some(thoughts).filter(|thoughts| !thoughts.is_empty());
                Message { reasoning_content, ..Message::new("assistant", answer) }
            }
        })
    }

    /// Writes the conversation to a new file.
    fn save(&self, file: &str) -> Result<(), Fault> {
        if file.is_empty() {
            return Err(Fault::input("expected `/save FILE`, found no file"));
        }
        let path = Path::new(file);
        let text = format!("{:#}\n", json!({ "messages": self.messages }));
        let mut opened =
            OpenOptions::new().write(true).create_new(true).open(path).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    Fault::input(format!("`{file}` exists")).with_remedy("name another file; nothing is overwritten")
                }
                _ => Fault::input(format!("cannot write `{file}`: {error}")).with_remedy("name another file"),
            })?;
        opened
            .write_all(text.as_bytes())
            .map_err(|error| Fault::environment(format!("cannot write `{file}`: {error}")))?;
        let count = counted(self.messages.len() as u64, "message");
        self.session.terminal.say(&format!("wrote {count} to `{file}`"));
        Ok(())
    }
}

/// Where lines come from.
enum Lines {
    /// A terminal: a line editor with the history of earlier chats.
    Editor {
        editor: Box<Editor<(), FileHistory>>,
        history: Option<PathBuf>,
    },
    Stdin,
}

impl Lines {
    /// An editor if a person types and reads. Otherwise, or if the terminal cannot have an editor, plain lines of stdin.
    fn open(is_read_by_a_person: bool) -> Lines {
        if !io::stdin().is_terminal() || !is_read_by_a_person {
            return Lines::Stdin;
        }
        let config = Config::builder().max_history_size(HISTORY_LINES_MAX).map(|config| config.auto_add_history(true));
        let editor = config.and_then(|config| Editor::with_config(config.build()));
        let Ok(mut editor) = editor else { return Lines::Stdin };
        let history = places::chat_history();
        if let Some(file) = &history {
            // There is none before the first chat, and one that cannot be read is not worth a failure.
            let _ = editor.load_history(file);
        }
        Lines::Editor { editor: Box::new(editor), history }
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Lines::Editor { .. })
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Result<Option<String>, Fault> {
        let failed = |what: &dyn std::fmt::Display| Fault::environment(format!("cannot read a message: {what}"));
        match self {
            Lines::Editor { editor, history } => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        if let Some(file) = history {
                            keep(editor, file);
                        }
                        return Ok(Some(line));
                    }
                    // Ctrl-C clears the line.
                    Err(ReadlineError::Interrupted) => {}
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(error) => return Err(failed(&error)),
                }
            },
            Lines::Stdin => {
                let mut line = vec![];
                let mut bounded = io::Read::take(io::stdin().lock(), LINE_BYTES_MAX);
                if bounded.read_until(b'\n', &mut line).map_err(|error| failed(&error))? == 0 {
                    return Ok(None);
                }
                String::from_utf8(line).map(Some).map_err(|_| Fault::input("a message on stdin is not UTF-8 text"))
            }
        }
    }
}

/// Adds the last line to the history file. An error does not end the chat.
fn keep(editor: &mut Editor<(), FileHistory>, file: &Path) {
    if let Some(folder) = file.parent() {
        let _ = fs::create_dir_all(folder);
    }
    let _ = editor.append_history(file);
}
