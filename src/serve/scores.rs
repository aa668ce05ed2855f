//! Owns log-probabilities in replies, in the forms of both endpoints. They are written directly from the tokens: a reply may have
//! millions, and as JSON values they would take fifty times the memory of their text.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::desk::ScoredToken;
use super::reply::{Kind, json_text};

/// Stands for the logarithm of 0, which JSON cannot express.
const LOGPROB_MIN: f64 = -9999.0;

/// Log-probabilities of a choice, or of some of its tokens.
pub struct Scores<'a> {
    pub kind: Kind,
    /// The first token of a prompt, which has no log-probability.
    pub first: Option<&'a str>,
    /// Tokens of the prompt, and tokens after the prompt.
    pub scored: [&'a [ScoredToken]; 2],
    /// Where the first token begins in its choice's text, in characters.
    pub offset: usize,
}

impl<'a> Scores<'a> {
    fn tokens(&self) -> impl Iterator<Item = &'a ScoredToken> + use<'a> {
        self.scored.into_iter().flatten()
    }

    fn texts(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.first.into_iter().chain(self.tokens().map(|token| &*token.text))
    }

    fn offsets(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.texts().scan(self.offset, |offset, text| Some(std::mem::replace(offset, *offset + text.chars().count())))
    }

    /// The JSON for an event; `offset` is moved to the token after these.
    pub fn event(self, offset: &mut usize) -> String {
        *offset += self.texts().map(|text| text.chars().count()).sum::<usize>();
        json_text(&self)
    }
}

impl Serialize for Scores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let none = self.first.map(|_| ());
        match self.kind {
            Kind::Chat => {
                let mut map = serializer.serialize_map(Some(2))?;
                map.serialize_entry("content", &List(|| self.tokens().map(Entry::of)))?;
                map.serialize_entry("refusal", &())?;
                map.end()
            }
            Kind::Completion => {
                let own =
                    || none.map(|()| None).into_iter().chain(self.tokens().map(|token| Some(finite(token.logprob))));
                let tops = || none.map(|()| None).into_iter().chain(self.tokens().map(|token| Some(Tops(token))));
                let mut map = serializer.serialize_map(Some(4))?;
                map.serialize_entry("tokens", &List(|| self.texts()))?;
                map.serialize_entry("token_logprobs", &List(own))?;
                map.serialize_entry("top_logprobs", &List(tops))?;
                map.serialize_entry("text_offset", &List(|| self.offsets()))?;
                map.end()
            }
        }
    }
}

fn finite(logprob: f64) -> f64 {
    logprob.max(LOGPROB_MIN)
}

/// A JSON list whose values are made while it is written.
struct List<F>(F);

impl<F: Fn() -> I, I: IntoIterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// A token of a chat, with the most probable ones beside it.
#[derive(Serialize)]
struct Entry<'a> {
    token: &'a str,
    logprob: f64,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry<'a>>>,
}

impl<'a> Entry<'a> {
    fn new(token: &'a str, logprob: f64) -> Entry<'a> {
        Entry { token, logprob: finite(logprob), bytes: token.as_bytes(), top_logprobs: None }
    }

    fn of(token: &'a ScoredToken) -> Entry<'a> {
        let top = token.top.iter().map(|(text, logprob)| Entry::new(text, *logprob)).collect();
        Entry { top_logprobs: Some(top), ..Entry::new(&token.text, token.logprob) }
    }
}

/// The most probable tokens of a completion by their text, the most probable first. Of two tokens with the same text, it has the
/// more probable one. The token itself is always included.
struct Tops<'a>(&'a ScoredToken);

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ScoredToken { text, logprob, top } = self.0;
        let is_new = |at: usize, text: &str| !top[..at].iter().any(|(before, _)| **before == *text);
        let mut map = serializer.serialize_map(None)?;
        for (_, (text, logprob)) in top.iter().enumerate().filter(|(at, (text, _))| is_new(*at, text)) {
            map.serialize_entry(&**text, &finite(*logprob))?;
        }
        if is_new(top.len(), text) {
            map.serialize_entry(&**text, &finite(*logprob))?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn token(text: &str, logprob: f64, top: &[(&str, f64)]) -> ScoredToken {
        ScoredToken {
            text: text.into(),
            logprob,
            top: top.iter().map(|(text, logprob)| ((*text).into(), *logprob)).collect(),
        }
    }

    fn scores<'a>(kind: Kind, first: Option<&'a str>, scored: [&'a [ScoredToken]; 2], offset: usize) -> Scores<'a> {
        Scores { kind, first, scored, offset }
    }

    #[test]
    fn a_completion_names_each_text_once_and_counts_characters() {
        let prompt = [token("ö", -1.0, &[("a", -0.5), ("a", -0.75)])];
        let after = [token(" fox", f64::NEG_INFINITY, &[(" fox", -0.25)]), token("x", -2.0, &[])];
        let mut offset = 3;
        let text = scores(Kind::Completion, Some("Once"), [&prompt, &after], offset).event(&mut offset);
        let expected = json!({
            "tokens": ["Once", "ö", " fox", "x"],
            "token_logprobs": [null, -1.0, -9999.0, -2.0],
            "top_logprobs": [null, { "a": -0.5, "ö": -1.0 }, { " fox": -0.25 }, { "x": -2.0 }],
            "text_offset": [3, 7, 8, 12],
        });
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        assert_eq!(offset, 13);
    }

    #[test]
    fn a_chat_has_the_bytes_of_each_token() {
        let after = [token("é", -1.0, &[("é", -1.0), ("b", f64::NEG_INFINITY)])];
        let text = scores(Kind::Chat, None, [&[], &after], 0).event(&mut 0);
        let entry = json!({ "token": "é", "logprob": -1.0, "bytes": [195, 169] });
        let mut expected = entry.clone();
        expected["top_logprobs"] = json!([entry, { "token": "b", "logprob": -9999.0, "bytes": [98] }]);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({ "content": [expected], "refusal": null }));
    }
}
