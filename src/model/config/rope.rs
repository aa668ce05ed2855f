//! Owns rotary parameters: from either config layout to `inv_freq`, the attention factor and the positions they cover.
//!
//! Formulas and their fp32 rounding follow `modeling_rope_utils.py` of transformers 5; a frequency one ulp off is
//! harmless at position 20 and visible at position 100 000.

use std::f64::consts::PI;

use serde_json::{Map, Value};

use crate::model::config::reader::Reader;
use crate::model::config::reason::Reason;
use crate::model::graph::Rope;

/// What a family fixes about its rotary embedding.
pub struct RopeRules {
    pub class: &'static str,
    pub head_dim: u32,
    /// Base where the config names none.
    pub theta_default: f64,
    /// Top-level key of the base in the v4 layout; `None`: the family has none for this table.
    pub theta_key: Option<&'static str>,
    pub partial: Partial,
    pub interleaved: bool,
    pub positions_max: u32,
    /// Phi-3 knows no other scaling than `longrope`, and reads the old names `su` and `yarn` as that: transformers asks every
    /// scaling of it for `short_factor` and `long_factor`.
    pub only_longrope: bool,
    /// A class with a top-level `original_max_position_embeddings` of its own (Phi-3): its default, which also
    /// overrules what the rotary parameters say.
    pub trained_default: Option<u32>,
    /// Parameters per layer type (Gemma 3): transformers looks for yarn's `truncate` beside them, not in them, so there
    /// it is always true.
    pub always_truncates: bool,
    /// Keys among the parameters that say nothing about the table of a text.
    pub without_effect: &'static [&'static str],
    /// The parameters where the config has none.
    pub absent: Option<&'static Map<String, Value>>,
    /// A class that reads `rope_scaling` nowhere, and `rope_theta` only for parameters without a base (Cohere 2 MoE).
    pub without_scaling: bool,
}

/// Whether a family rotates a part of the head.
pub enum Partial {
    /// The model code rotates whole heads whatever the config says, so only 1 is accepted.
    Whole,
    /// `default` where the config names none; `key` is its top-level name.
    Factor { key: &'static str, default: f64 },
}

/// A rotary table, and the number of positions for which it is the right one.
#[derive(Debug, Clone, PartialEq)]
pub struct ResolvedRope {
    pub rope: Rope,
    pub positions_max: u32,
    /// Why there are no more positions, where the kind of scaling ends them.
    pub note: Option<String>,
}

/// The top-level keys that [`flat`] reads, for schema tables.
pub const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// One table for all layers: `rope_theta` + `rope_scaling` (v4) or `rope_parameters` (v5).
pub fn flat(reader: &mut Reader, rules: &RopeRules) -> Option<ResolvedRope> {
    let object = match rules.without_scaling {
        true => object(reader, "rope_parameters")?.map(|map| ("rope_parameters", map)),
        false => parameters(reader)?,
    };
    if let Some(nested) = object.iter().flat_map(|(_, map)| LAYER_TYPES.iter().find(|t| map.contains_key(**t))).next() {
        return reader.refuse(Reason::BadValue {
            key: "rope_parameters".to_string(),
            expected: format!("one set of parameters (`{}` has one rotary table)", rules.class),
            found: format!("parameters per layer type, `{nested}` among them"),
        });
    }
    let (name, map) = match object {
        Some((name, map)) => (name, Some(map)),
        None => ("rope_parameters", rules.absent),
    };
    let mut theta_key = rules.theta_key;
    if rules.without_scaling && map.is_some_and(|map| map.get("rope_theta").is_some_and(|base| !base.is_null())) {
        // Reading it marks it as known: a modelled key that nothing reads is refused.
        if let Some(key) = theta_key.take() {
            reader.value(key);
        }
    }
    resolve(reader, rules, name, map, theta_key)
}

/// Gemma 3 and OLMo 3: a table for full and one for sliding layers, in this order. In the v4 layout `rope_theta` and
/// `rope_scaling` speak about full layers, the key of the sliding rules (`rope_local_base_freq`) about sliding ones.
pub fn per_layer_type(
    reader: &mut Reader,
    full: &RopeRules,
    sliding: &RopeRules,
) -> Option<(ResolvedRope, ResolvedRope)> {
    let scaling = object(reader, "rope_scaling")?;
    let Some(nested) = object(reader, "rope_parameters")? else {
        if scaling.is_some_and(|map| map.contains_key("type") && !map.contains_key("rope_type")) {
            let expected = "the kind as `rope_type` (transformers 4 reads `type` here, transformers 5 ignores it)";
            let (key, found) = ("rope_scaling.type".to_string(), "`type` alone".to_string());
            return reader.refuse(Reason::BadValue { key, expected: expected.to_string(), found });
        }
        let full = resolve(reader, full, "rope_scaling", scaling, full.theta_key);
        let sliding = resolve(reader, sliding, "rope_scaling", None, sliding.theta_key);
        return Some((full?, sliding?));
    };
    if scaling.is_some() {
        return both_given(reader);
    }
    for key in nested.keys().filter(|key| !LAYER_TYPES.contains(&key.as_str())) {
        let (key, expected) = (format!("rope_parameters.{key}"), "one set of parameters per layer type".to_string());
        reader.reasons.push(Reason::BadValue { key, expected, found: "a key that is no layer type".to_string() });
    }
    let mut one = |name: &'static str, key: &str, rules: &RopeRules| match nested.get(key) {
        None | Some(Value::Null) => resolve(reader, rules, name, None, rules.theta_key),
        Some(Value::Object(map)) => resolve(reader, rules, name, Some(map), rules.theta_key),
        Some(other) => reader.refuse(Reason::BadValue {
            key: name.to_string(),
            expected: "an object".to_string(),
            found: other.to_string(),
        }),
    };
    let full = one("rope_parameters.full_attention", "full_attention", full);
    let sliding = one("rope_parameters.sliding_attention", "sliding_attention", sliding);
    Some((full?, sliding?))
}

fn both_given<T>(reader: &mut Reader) -> Option<T> {
    reader.refuse(Reason::Conflict {
        first: "rope_scaling".to_string(),
        second: "rope_parameters".to_string(),
        detail: "both are given and differ".to_string(),
    })
}

fn object<'a>(reader: &mut Reader<'a>, key: &'static str) -> Option<Option<&'a Map<String, Value>>> {
    match reader.value(key) {
        None => Some(None),
        Some(Value::Object(map)) => Some(Some(map).filter(|map| !map.is_empty())),
        Some(other) => reader.refuse(Reason::BadValue {
            key: key.to_string(),
            expected: "null or an object".to_string(),
            found: other.to_string(),
        }),
    }
}

fn parameters<'a>(reader: &mut Reader<'a>) -> Option<Option<(&'static str, &'a Map<String, Value>)>> {
    let scaling = object(reader, "rope_scaling")?;
    let parameters = object(reader, "rope_parameters")?;
    match (scaling, parameters) {
        (Some(a), Some(b)) if a != b => both_given(reader),
        (Some(map), _) => Some(Some(("rope_scaling", map))),
        (None, Some(map)) => Some(Some(("rope_parameters", map))),
        (None, None) => Some(None),
    }
}

/// Typed access to the inner object, with the reasons of its reader.
struct Inner<'r, 'a> {
    reader: &'r mut Reader<'a>,
    name: &'static str,
    map: Option<&'a Map<String, Value>>,
}

impl<'a> Inner<'_, 'a> {
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.and_then(|map| map.get(key)).filter(|v| !v.is_null())
    }

    fn bad<T>(&mut self, key: &str, expected: &str) -> Option<T> {
        let found = self.value(key).map_or("nothing".to_string(), Value::to_string);
        let key = format!("{}.{key}", self.name);
        self.reader.refuse(Reason::BadValue { key, expected: expected.to_string(), found })
    }

    fn positive_or(&mut self, key: &str, default: f64) -> Option<f64> {
        match self.value(key) {
            None => Some(default),
            Some(v) => match v.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
                Some(x) => Some(x),
                None => self.bad(key, "a number above 0"),
            },
        }
    }

    fn positive_opt(&mut self, key: &str) -> Option<Option<f64>> {
        match self.value(key) {
            None => Some(None),
            Some(_) => self.positive_or(key, 0.0).map(Some),
        }
    }

    fn positive(&mut self, key: &str) -> Option<f64> {
        match self.value(key) {
            None => self.reader.refuse(Reason::MissingKey { key: format!("{}.{key}", self.name) }),
            Some(_) => self.positive_or(key, 0.0),
        }
    }

    /// The inner value, else the top-level one, else the default; a reason where both are given and differ.
    fn shared(&mut self, inner: &'static str, top: Option<&'static str>, default: f64) -> Option<f64> {
        let mine = self.positive_opt(inner)?;
        let theirs = match top.and_then(|key| self.reader.value(key).map(|v| (key, v))) {
            None => None,
            Some((key, v)) => match v.as_f64().filter(|x| x.is_finite() && *x > 0.0) {
                Some(x) => Some((key, x)),
                None => {
                    let expected = "a number above 0".to_string();
                    let (key, found) = (key.to_string(), v.to_string());
                    return self.reader.refuse(Reason::BadValue { key, expected, found });
                }
            },
        };
        match (mine, theirs) {
            (Some(a), Some((key, b))) if a != b => {
                let first = format!("{}.{inner}", self.name);
                self.reader.refuse(Reason::Conflict { first, second: key.to_string(), detail: format!("{a} and {b}") })
            }
            (Some(x), _) | (None, Some((_, x))) => Some(x),
            (None, None) => Some(default),
        }
    }

    fn kind(&mut self, rules: &RopeRules) -> Option<String> {
        let mut named = Vec::new();
        for key in ["rope_type", "type"] {
            match self.value(key) {
                None => {}
                Some(Value::String(kind)) => named.push(kind.clone()),
                Some(_) => return self.bad(key, "a string"),
            }
        }
        if let [a, b] = named.as_slice()
            && a != b
        {
            let (first, second) = (format!("{}.rope_type", self.name), format!("{}.type", self.name));
            return self.reader.refuse(Reason::Conflict { first, second, detail: format!("`{a}` and `{b}`") });
        }
        let kind = named.pop().unwrap_or("default".to_string());
        match (rules.only_longrope, kind.as_str()) {
            (true, "su" | "yarn") => Some("longrope".to_string()),
            (true, "default" | "longrope") | (false, _) => Some(kind),
            (true, _) => {
                let key = if self.value("rope_type").is_some() { "rope_type" } else { "type" };
                self.bad(key, &format!("default or longrope, the only kinds that `{}` has", rules.class))
            }
        }
    }

    fn factors(&mut self, key: &str, count: usize) -> Option<Vec<f32>> {
        let number = |v: &Value| v.as_f64().filter(|x| x.is_finite() && *x > 0.0).map(|x| x as f32);
        let list = self.value(key).and_then(Value::as_array).filter(|list| list.len() == count);
        match list.and_then(|list| list.iter().map(number).collect::<Option<Vec<_>>>()) {
            Some(factors) => Some(factors),
            None => self.bad(key, &format!("{count} numbers above 0, one per rotated pair")),
        }
    }
}

/// Keys of the inner object by kind, beside the four that every kind may carry.
fn inner_keys(kind: &str) -> Option<&'static [&'static str]> {
    Some(match kind {
        "default" => &[],
        "linear" | "dynamic" => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        "yarn" => &[
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
        "longrope" => {
            &["factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"]
        }
        _ => return None,
    })
}

fn resolve<'a>(
    reader: &mut Reader<'a>,
    rules: &RopeRules,
    name: &'static str,
    map: Option<&'a Map<String, Value>>,
    theta_key: Option<&'static str>,
) -> Option<ResolvedRope> {
    let mut inner = Inner { reader, name, map };
    let theta = inner.shared("rope_theta", theta_key, rules.theta_default);
    let partial = match rules.partial {
        Partial::Whole => inner.shared("partial_rotary_factor", Some("partial_rotary_factor"), 1.0),
        Partial::Factor { key, default } => inner.shared("partial_rotary_factor", Some(key), default),
    };
    let original = match inner.reader.value("original_max_position_embeddings") {
        None => None,
        Some(v) => match v.as_u64().filter(|n| *n > 1 && *n <= u64::from(u32::MAX)) {
            Some(n) => Some(n as f64),
            None => {
                let (key, expected) = ("original_max_position_embeddings".to_string(), "a count above 1".to_string());
                return inner.reader.refuse(Reason::BadValue { key, expected, found: v.to_string() });
            }
        },
    };
    let kind = inner.kind(rules)?;
    let Some(keys) = inner_keys(&kind) else {
        let expected = "one of default, linear, dynamic, llama3, yarn, longrope";
        return inner.bad(if inner.value("rope_type").is_some() { "rope_type" } else { "type" }, expected);
    };
    for key in map.into_iter().flat_map(Map::keys) {
        let common = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        if ![keys, &common, rules.without_effect].iter().any(|known| known.contains(&key.as_str())) {
            let expected = format!("only the parameters of `{kind}`");
            let found = format!("`{key}`, which it has not");
            inner.reader.reasons.push(Reason::BadValue { key: format!("{name}.{key}"), expected, found });
        }
    }
    let (theta, partial) = (theta?, partial?);
    if matches!(rules.partial, Partial::Whole) && partial != 1.0 {
        let (key, why) = ("partial_rotary_factor".to_string(), "the model code of this family rotates whole heads");
        let (allowed, found) = ("1".to_string(), partial.to_string());
        return inner.reader.refuse(Reason::NotNeutral { key, allowed, found, why });
    }
    // `int(head_dim * partial_rotary_factor)`, in doubles as Python computes it.
    let dim = (f64::from(rules.head_dim) * partial) as u32;
    if partial > 1.0 || dim < 2 || !dim.is_multiple_of(2) {
        let expected = "an even number of rotated dimensions, at least 2 and at most the head".to_string();
        let found = format!("{dim} of {}", rules.head_dim);
        let key = "partial_rotary_factor".to_string();
        return inner.reader.refuse(Reason::BadValue { key, expected, found });
    }
    let positions = rules.positions_max;
    // A length of training that the kind needs: top level first, then inner, then the declared positions.
    let trained = |inner: &mut Inner| -> Option<f64> {
        let key = "original_max_position_embeddings";
        let (top, absent) = match (original, rules.trained_default) {
            (None, Some(default)) => (Some(f64::from(default)), ", the default of the class,"),
            (given, _) => (given, ""),
        };
        match (top, inner.positive_opt(key)?) {
            (Some(a), Some(b)) if a != b => {
                let (first, second) = (key.to_string(), format!("{name}.{key}"));
                inner.reader.refuse(Reason::Conflict { first, second, detail: format!("{a}{absent} and {b}") })
            }
            (Some(x), _) | (None, Some(x)) => Some(x),
            (None, None) => Some(f64::from(positions)),
        }
    };
    let table = |inv_freq: Vec<f32>, scale: f64, positions_max: u32| ResolvedRope {
        rope: Rope { inv_freq, scale: scale as f32, interleaved: rules.interleaved },
        positions_max,
        note: None,
    };
    Some(match kind.as_str() {
        "linear" => {
            let factor = inner.positive("factor")? as f32;
            table(inverse(&powers(theta, dim)).iter().map(|f| f / factor).collect(), 1.0, positions)
        }
        // Hunyuan: `dynamic` with an `alpha` that stretches the base, whatever the length.
        "dynamic" if inner_number(inner.map, "alpha").is_some() && rules.without_effect.contains(&"alpha") => {
            let alpha = inner.positive("alpha")?;
            if dim <= 2 {
                return inner.bad("rope_type", "more than one rotated pair under `dynamic`");
            }
            let base = theta * alpha.powf(f64::from(dim) / f64::from(dim - 2));
            table(inverse(&powers(base, dim)), 1.0, positions)
        }
        "dynamic" => {
            // The base grows once a sequence passes `max_position_embeddings`; up to there it is constant, and no
            // further position is admitted.
            let factor = inner.positive("factor")?;
            if dim <= 2 {
                return inner.bad("rope_type", "more than one rotated pair under `dynamic`");
            }
            let length = f64::from(positions);
            let stretch = (factor * length / length) - (factor - 1.0);
            let base = theta * stretch.powf(f64::from(dim) / f64::from(dim - 2));
            let note = format!(
                "`dynamic` scaling gives what comes beyond {positions} positions another base, by the length of the text; \
                 contexts up to there are supported"
            );
            ResolvedRope { note: Some(note), ..table(inverse(&powers(base, dim)), 1.0, positions) }
        }
        "llama3" => {
            let (factor, low) = (inner.positive("factor"), inner.positive("low_freq_factor"));
            let (high, trained) = (inner.positive("high_freq_factor"), trained(&mut inner));
            let (factor, low, high, trained) = (factor?, low?, high?, trained?);
            if low >= high {
                return inner.bad("high_freq_factor", "more than `low_freq_factor`");
            }
            let inv_freq = inverse(&powers(theta, dim));
            table(inv_freq.iter().map(|&f| llama3(f, factor, low, high, trained)).collect(), 1.0, positions)
        }
        "yarn" => {
            let (factor, trained) = (inner.positive("factor"), trained(&mut inner));
            let (fast, slow) = (inner.positive_or("beta_fast", 32.0), inner.positive_or("beta_slow", 1.0));
            let (mscale, all) = (inner.positive_opt("mscale"), inner.positive_opt("mscale_all_dim"));
            let attention = inner.positive_opt("attention_factor");
            let truncate = match inner.value("truncate") {
                None => Some(true),
                Some(Value::Bool(false)) if rules.always_truncates => {
                    inner.bad("truncate", "true (transformers ignores it where parameters are per layer type)")
                }
                Some(Value::Bool(truncate)) => Some(*truncate),
                Some(_) => inner.bad("truncate", "true or false"),
            };
            let (factor, trained, fast, slow, truncate) = (factor?, trained?, fast?, slow?, truncate?);
            let gain = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
            let scale = match (attention?, mscale?, all?) {
                (Some(given), _, _) => given,
                (None, Some(mscale), Some(all)) => gain(mscale) / gain(all),
                (None, _, _) => gain(1.0),
            };
            if theta <= 1.0 || fast < slow {
                return inner.bad("beta_fast", "at least `beta_slow`, and a base above 1");
            }
            table(yarn(theta, dim, factor, trained, fast, slow, truncate), scale, positions)
        }
        "longrope" => {
            let pairs = dim as usize / 2;
            let (short, long) = (inner.factors("short_factor", pairs), inner.factors("long_factor", pairs));
            let (trained, factor) = (trained(&mut inner), inner.positive_opt("factor"));
            let attention = inner.positive_opt("attention_factor");
            let (short, _, trained) = (short?, long?, trained?);
            let factor = factor?.unwrap_or(f64::from(positions) / trained);
            let scale = match attention? {
                Some(given) => given,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + factor.ln() / trained.ln()).sqrt(),
            };
            // A sequence longer than the trained length switches every position to the long factors, those already
            // in the cache included. Only the short side is admitted, by admitting no such sequence.
            let scaled: Vec<f32> = powers(theta, dim).iter().zip(&short).map(|(power, ext)| ext * power).collect();
            let limit = positions.min(trained as u32);
            let note = format!(
                "`longrope` computes a text of more than {limit} positions with its long factors, from its first position \
                 on; contexts up to there are supported"
            );
            ResolvedRope { note: Some(note), ..table(inverse(&scaled), scale, limit) }
        }
        _ => table(inverse(&powers(theta, dim)), 1.0, positions),
    })
}

/// A number other than 0 among the parameters.
fn inner_number(map: Option<&Map<String, Value>>, key: &str) -> Option<f64> {
    map?.get(key)?.as_f64().filter(|number| *number != 0.0)
}

/// `theta ^ (2 i / dim)` for each pair, rounded to fp32 after each operation as torch does.
fn powers(theta: f64, dim: u32) -> Vec<f32> {
    let base = f64::from(theta as f32);
    (0..dim).step_by(2).map(|i| base.powf(f64::from(i as f32 / dim as f32)) as f32).collect()
}

fn inverse(powers: &[f32]) -> Vec<f32> {
    powers.iter().map(|p| 1.0 / p).collect()
}

/// Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated.
fn llama3(inv_freq: f32, factor: f64, low: f64, high: f64, trained: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / inv_freq;
    if wavelength > (trained / low) as f32 {
        inv_freq / factor as f32
    } else if wavelength < (trained / high) as f32 {
        inv_freq
    } else {
        let smooth = (trained as f32 / wavelength - low as f32) / (high - low) as f32;
        (1.0 - smooth) * inv_freq / factor as f32 + smooth * inv_freq
    }
}

/// YaRN (Peng et al. 2023): a ramp over the pairs between interpolated and original frequencies.
fn yarn(theta: f64, dim: u32, factor: f64, trained: f64, fast: f64, slow: f64, truncate: bool) -> Vec<f32> {
    let pair_of = |rotations: f64| f64::from(dim) * (trained / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (pair_of(fast), pair_of(slow));
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(f64::from(dim - 1)));
    if low == high {
        high += 0.001; // Prevents a division by zero, as the original does.
    }
    powers(theta, dim)
        .iter()
        .enumerate()
        .map(|(pair, power)| {
            let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
        })
        .collect()
}
