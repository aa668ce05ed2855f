//! Owns typed access to `config.json`: every key that is read is recorded, every bad value becomes a reason.
//!
//! A bad value also yields a harmless stand-in, so that reading continues and finds the other reasons. The caller checks
//! `reasons` before it trusts the values.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::model::config::reason::Reason;

// Limits far above every published model, and small enough that byte counts of whole models and caches stay inside
// 64 bits whatever a hostile config says.
/// Largest width of anything but the vocabulary.
pub const EXTENT_MAX: u32 = 1 << 20;
pub const VOCAB_MAX: u32 = 1 << 24;
pub const POSITIONS_MAX: u32 = 1 << 27;
/// Largest number of layers accepted; bounds what a hostile config can make the importer allocate.
pub const LAYERS_MAX: u32 = 4096;

/// The top-level object under question.
pub struct Reader<'a> {
    map: &'a Map<String, Value>,
    asked: BTreeSet<&'static str>,
    pub reasons: Vec<Reason>,
}

/// The difference that decides defaults: transformers gives an absent key its class default, a null one `None`.
pub enum Answer<T> {
    Absent,
    Null,
    Is(T),
}

impl<'a> Reader<'a> {
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Reader { map, asked: BTreeSet::new(), reasons: Vec::new() }
    }

    /// Keys that the importer has read.
    pub fn asked(&self) -> &BTreeSet<&'static str> {
        &self.asked
    }

    /// The value of a key, null included.
    pub fn given(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.insert(key);
        self.map.get(key)
    }

    /// The value of a key; null counts as absent.
    pub fn value(&mut self, key: &'static str) -> Option<&'a Value> {
        self.asked.insert(key);
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn refuse<T>(&mut self, reason: Reason) -> Option<T> {
        self.reasons.push(reason);
        None
    }

    fn bad(&mut self, key: &str, expected: impl Into<String>) {
        let found = self.map.get(key).map_or("nothing".to_string(), Value::to_string);
        self.reasons.push(Reason::BadValue { key: key.to_string(), expected: expected.into(), found });
    }

    fn answer<T>(&mut self, key: &'static str, expected: &str, read: impl Fn(&Value) -> Option<T>) -> Answer<T> {
        self.asked.insert(key);
        match self.map.get(key) {
            None => Answer::Absent,
            Some(Value::Null) => Answer::Null,
            Some(value) => read(value).map(Answer::Is).unwrap_or_else(|| {
                self.bad(key, expected);
                Answer::Absent
            }),
        }
    }

    fn with_default<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        default: T,
        read: impl Fn(&Value) -> Option<T>,
    ) -> T {
        match self.answer(key, expected, read) {
            Answer::Is(value) => value,
            Answer::Absent => default,
            Answer::Null => {
                self.bad(key, expected);
                default
            }
        }
    }

    /// A count in `1..=max` that has to be given.
    pub fn count_required(&mut self, key: &'static str, max: u32) -> u32 {
        if !self.map.contains_key(key) {
            self.reasons.push(Reason::MissingKey { key: key.to_string() });
        }
        self.count(key, 1, max)
    }

    /// A count in `1..=max`.
    pub fn count(&mut self, key: &'static str, default: u32, max: u32) -> u32 {
        self.with_default(key, &format!("a count from 1 to {max}"), default, |v| count_of(v, max))
    }

    /// A count for which null means none.
    pub fn count_or_null(&mut self, key: &'static str) -> Answer<u32> {
        self.answer(key, &format!("null or a count from 1 to {EXTENT_MAX}"), |v| count_of(v, EXTENT_MAX))
    }

    /// A whole number, 0 included.
    pub fn index(&mut self, key: &'static str, default: u64) -> u64 {
        self.with_default(key, "a whole number", default, Value::as_u64)
    }

    /// A finite number above zero.
    pub fn positive(&mut self, key: &'static str, default: f64) -> f64 {
        self.with_default(key, "a number above 0", default, positive_of)
    }

    /// A finite number above zero for which null means none.
    pub fn positive_or_null(&mut self, key: &'static str) -> Answer<f64> {
        self.answer(key, "null or a number above 0", positive_of)
    }

    /// A list of `N` finite numbers above zero; all 1 where it is absent or null.
    pub fn factors<const N: usize>(&mut self, key: &'static str) -> [f32; N] {
        let expected = format!("null or a list of {N} numbers above 0");
        let read = |value: &Value| -> Option<[f32; N]> {
            let list: Option<Vec<f32>> = value.as_array()?.iter().map(|x| Some(positive_of(x)? as f32)).collect();
            list?.try_into().ok()
        };
        match self.answer(key, &expected, read) {
            Answer::Is(factors) => factors,
            Answer::Absent | Answer::Null => [1.0; N],
        }
    }

    pub fn flag(&mut self, key: &'static str, default: bool) -> bool {
        self.with_default(key, "true or false", default, Value::as_bool)
    }

    pub fn text(&mut self, key: &'static str, default: &str) -> String {
        self.with_default(key, "a string", default.to_string(), |v| v.as_str().map(str::to_string))
    }

    /// The index of the value in `words`; the first where the key is absent.
    pub fn one_of<const N: usize>(&mut self, key: &'static str, words: [&'static str; N]) -> usize {
        let expected = format!("one of {words:?}");
        self.with_default(key, &expected, 0, |v| words.iter().position(|word| v.as_str() == Some(word)))
    }

    /// For each layer the index of its word in `words`; `None` where the key is absent or null.
    pub fn layer_words(&mut self, key: &'static str, layers: u32, words: &[&'static str]) -> Option<Vec<usize>> {
        let expected = format!("{layers} entries, each one of {words:?}");
        self.layer_list(key, layers, &expected, |v| words.iter().position(|word| v.as_str() == Some(word)))
    }

    /// One 0 or 1 per layer; `None` where the key is absent or null.
    pub fn layer_bits(&mut self, key: &'static str, layers: u32) -> Option<Vec<bool>> {
        let bit = |v: &Value| v.as_bool().or(v.as_u64().filter(|n| *n <= 1).map(|n| n == 1));
        self.layer_list(key, layers, &format!("{layers} entries, each 0 or 1"), bit)
    }

    /// Numbers of layers; none where the key is absent or null.
    pub fn layer_indices(&mut self, key: &'static str) -> Vec<u64> {
        let Some(value) = self.value(key) else { return vec![] };
        let read = value.as_array().and_then(|list| list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>());
        read.unwrap_or_else(|| {
            self.bad(key, "a list of whole numbers");
            vec![]
        })
    }

    /// A count that has two names; `default` where neither is given, or required.
    pub fn count_of_two(&mut self, names: [&'static str; 2], default: Option<u32>, max: u32) -> u32 {
        let [first, second] = names;
        let given = names.map(|name| self.value(name));
        if let [Some(a), Some(b)] = given
            && a != b
        {
            let (first, second) = (first.to_string(), second.to_string());
            self.reasons.push(Reason::Conflict { first, second, detail: format!("{a} and {b}") });
        }
        let name = if given[0].is_none() && given[1].is_some() { second } else { first };
        match default {
            Some(default) => self.count(name, default, max),
            None => self.count_required(name, max),
        }
    }

    fn layer_list<T>(
        &mut self,
        key: &'static str,
        layers: u32,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Option<Vec<T>> {
        let list = self.value(key)?.as_array().filter(|list| list.len() == layers as usize);
        let read = list.and_then(|list| list.iter().map(read).collect());
        if read.is_none() {
            self.bad(key, expected);
        }
        read
    }
}

fn count_of(value: &Value, max: u32) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=max).contains(n))
}

/// Positive and finite also as fp32, which is what the graph holds: an `eps` of 1e-58 would be none.
fn positive_of(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| (*x as f32).is_finite() && *x as f32 > 0.0)
}
