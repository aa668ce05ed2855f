//! Owns printing of generated tokens: text as soon as it is certain, ids, or lines of JSON.

use serde_json::{Value, json};

use super::session::Session;
use crate::error::Fault;
use crate::pipeline::Tokens;
use crate::sample::Decided;
use crate::serve::OfChannels;
use crate::tokenizer::{Stopped, Thinking, certain};

/// The form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Streamed text; without a tokenizer, ids with commas between them.
    Text,
    /// Nothing yet: the output is kept for one JSON object at the end.
    Kept,
    /// For each token a line with a JSON object.
    Lines,
}

/// What becomes of special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// They are left out.
    Hidden,
    Shown,
    /// They tell what is thought and what is the answer.
    Channels,
}

impl Special {
    /// For the answer to a prompt of a chat.
    pub fn of(thinking: Thinking) -> Special {
        if matches!(thinking, Thinking::Channels(_)) { Special::Channels } else { Special::Hidden }
    }
}

/// Takes tokens as they are generated, and prints them in one form.
pub struct Printer<'a> {
    session: &'a Session,
    form: Form,
    /// `None`: ids.
    stream: Option<&'a mut Tokens>,
    /// Of a text that has channels.
    channels: Option<OfChannels>,
    /// Everything that was printed, or would have been.
    text: String,
    /// Log-probabilities of the tokens, if they were asked for.
    logprobs: Vec<Value>,
    count: usize,
    /// Texts that end the generation, and are not printed.
    stops: &'a [String],
    /// `stops` are ignored before this number of tokens.
    stops_after: usize,
    /// Text not printed yet, because it may be the beginning of one of `stops`.
    pending: String,
}

impl<'a> Printer<'a> {
    /// Begins a text whose tokens arrive one by one.
    ///
    /// # Errors
    /// A tokenizer whose process was lost.
    pub fn new(
        session: &'a Session,
        form: Form,
        mut stream: Option<&'a mut Tokens>,
        special: Special,
    ) -> Result<Printer<'a>, Fault> {
        if let Some(tokenizer) = &mut stream {
            tokenizer.stream(special == Special::Hidden)?;
        }
        Ok(Printer {
            session,
            form,
            stream,
            channels: (special == Special::Channels).then(OfChannels::begin),
            text: String::new(),
            logprobs: vec![],
            count: 0,
            stops: &[],
            stops_after: 0,
            pending: String::new(),
        })
    }

    /// Ends the text at the first of `stops` that comes after `tokens` tokens.
    pub fn stop_at(mut self, stops: &'a [String], tokens: usize) -> Printer<'a> {
        (self.stops, self.stops_after) = (stops, tokens);
        self
    }

    /// Takes one token. Returns whether it completed a text that ends the generation.
    ///
    /// # Errors
    /// An id without a text, a tokenizer past its limits of time or memory, a stdout that cannot be written.
    pub fn token(&mut self, decided: &Decided) -> Result<bool, Fault> {
        let id = decided.token;
        let piece = match &mut self.stream {
            Some(stream) => {
                let piece = stream.push(id)?;
                self.channels.as_mut().map(|channels| channels.push(&piece)).unwrap_or(piece)
            }
            None if self.form == Form::Text && self.count > 0 => format!(",{id}"),
            None if self.form == Form::Text => id.to_string(),
            None => String::new(),
        };
        self.count += 1;
        self.pending.push_str(&piece);
        let stops = if self.count > self.stops_after { self.stops } else { &[] };
        let Stopped { ready, found } = certain(&self.pending, stops);
        let piece: String = self.pending.drain(..ready).collect();
        let logprob = decided.logprob.map(|logprob| logprob_json(id, logprob, &decided.top));
        if self.form == Form::Lines {
            let mut event = json!({ "id": id });
            if self.stream.is_some() {
                event["text"] = json!(piece);
            }
            if let Some(Value::Object(fields)) = &logprob {
                fields.iter().filter(|(key, _)| *key != "id").for_each(|(key, value)| event[key] = value.clone());
            }
            self.session.terminal.print_json_line(&event)?;
        }
        self.logprobs.extend(logprob);
        self.put(&piece)?;
        Ok(found)
    }

    fn put(&mut self, piece: &str) -> Result<(), Fault> {
        self.text.push_str(piece);
        match self.form {
            Form::Text if !piece.is_empty() => self.session.terminal.print_generated(piece),
            _ => Ok(()),
        }
    }

    /// Prints the text that was held back, unless a stop text ended the generation, and ends the line.
    ///
    /// # Errors
    /// As [`Printer::token`].
    pub fn finish(mut self, stopped: bool) -> Result<Printed, Fault> {
        let mut rest = self.stream.as_mut().map(|stream| stream.finish()).transpose()?.unwrap_or_default();
        if let Some(channels) = &mut self.channels {
            rest = channels.push(&rest) + &channels.finish();
        }
        let before = self.text.len();
        if !stopped {
            self.pending.push_str(&rest);
            let stops = if self.count > self.stops_after { self.stops } else { &[] };
            let Stopped { ready, found } = certain(&self.pending, stops);
            let end = if found { ready } else { self.pending.len() };
            let piece: String = self.pending.drain(..end).collect();
            self.put(&piece)?;
        }
        if self.form == Form::Text {
            self.session.terminal.print("\n")?;
        }
        let rest = self.text.split_off(before);
        Ok(Printed { text: self.text + &rest, rest, channels: self.channels, logprobs: self.logprobs })
    }
}

/// The output of a [`Printer`].
pub struct Printed {
    /// The whole text. Without a tokenizer: the ids if they were printed as text, else empty.
    pub text: String,
    /// The end of the text, which was held back until the last token.
    pub rest: String,
    /// Of a text that has channels: its thoughts and its answer.
    pub channels: Option<OfChannels>,
    /// One JSON object for each token, if log-probabilities were asked for.
    pub logprobs: Vec<Value>,
}

/// `null` stands for the logarithm of 0, which JSON does not have.
fn logprob_json(id: u32, logprob: f64, top: &[(u32, f64)]) -> Value {
    let top: Vec<Value> = top.iter().map(|(id, logprob)| json!({ "id": id, "logprob": logprob })).collect();
    json!({ "id": id, "logprob": logprob, "top": top })
}
