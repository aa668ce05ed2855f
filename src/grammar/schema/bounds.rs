//! Owns bounds of numbers that llguidance would allow although they are excluded: a whole one, where the other bound has the same whole part.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::super::blame::Path;
use super::{GrammarError, each_schema, pointer, target};

/// Most combinations of alternatives that are looked at.
const COMBINATIONS_MAX: usize = 20_000;

/// The bounds that a number has to keep to.
#[derive(Clone, Default)]
struct Bounds {
    /// Whole numbers that are excluded: lower bounds, and upper ones.
    above: Vec<(f64, Path)>,
    below: Vec<(f64, Path)>,
    least: Vec<f64>,
    most: Vec<f64>,
}

/// Refuses an excluded whole number that llguidance would allow: between it and the other bound there is no whole number.
///
/// Bounds may come from `allOf`, from references, and from one alternative of each list of alternatives.
pub fn check(schema: &Map<String, Value>) -> Result<(), GrammarError> {
    each_schema(schema, &mut |node, path| {
        let mut choice = Choice::default();
        match choice.collect(schema, node, path) {
            true => choice.check(schema, path, &mut { COMBINATIONS_MAX }),
            false => Ok(()),
        }
    })
}

/// A schema whose alternatives are chosen up to here.
#[derive(Clone, Default)]
struct Choice {
    bounds: Bounds,
    /// Lists of alternatives of which none is chosen yet.
    lists: Vec<Vec<(Map<String, Value>, Path)>>,
    /// References that were followed.
    seen: BTreeSet<String>,
}

impl Choice {
    fn check(mut self, root: &Map<String, Value>, path: &Path, left: &mut usize) -> Result<(), GrammarError> {
        self.bounds.check()?;
        let Some(list) = self.lists.pop() else { return Ok(()) };
        list.iter().try_for_each(|(node, at)| {
            *left = left.checked_sub(1).ok_or_else(|| GrammarError::Schema {
                path: path.clone(),
                reason: format!("its alternatives have more than {COMBINATIONS_MAX} combinations of bounds"),
                remedy: "use fewer lists of alternatives with bounds of numbers",
            })?;
            let mut choice = self.clone();
            if choice.collect(root, node, at) { choice.check(root, path, left) } else { Ok(()) }
        })
    }

    /// Adds the bounds that every value of a schema keeps to. False if none of its values is a number.
    fn collect(&mut self, root: &Map<String, Value>, node: &Map<String, Value>, path: &Path) -> bool {
        let is_number = match node.get("type") {
            Some(Value::String(kind)) => kind == "number",
            Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "number"),
            _ => true,
        };
        if !is_number {
            return false;
        }
        self.bounds.add(node, path);
        for key in ["allOf", "anyOf", "oneOf"] {
            let items = node.get(key).and_then(Value::as_array).into_iter().flatten().enumerate();
            let items = items.filter_map(|(at, item)| Some((item.as_object()?, path.key(key).item(at))));
            if key == "allOf" {
                for (item, path) in items {
                    if !self.collect(root, item, &path) {
                        return false;
                    }
                }
            } else {
                let list: Vec<_> = items.map(|(item, path)| (item.clone(), path)).collect();
                // Without bounds a choice changes nothing.
                if list.iter().any(|(item, _)| has_bounds(item)) {
                    self.lists.push(list);
                }
            }
        }
        let Some(reference) = node.get("$ref").and_then(Value::as_str) else { return true };
        if self.seen.insert(reference.to_string())
            && let Some(Value::Object(inner)) = target(root, reference)
        {
            let keys = pointer(reference).unwrap_or_default();
            let path = keys.iter().fold(Path::default(), |path, key| path.key(key));
            return self.collect(root, inner, &path);
        }
        true
    }
}

/// Whether a schema has a bound of numbers, itself or through what it says of the same value.
fn has_bounds(node: &Map<String, Value>) -> bool {
    node.iter().any(|(key, value)| match (key.as_str(), value) {
        ("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "$ref", _) => true,
        ("allOf" | "anyOf" | "oneOf", Value::Array(items)) => items.iter().filter_map(Value::as_object).any(has_bounds),
        _ => false,
    })
}

impl Bounds {
    fn add(&mut self, node: &Map<String, Value>, path: &Path) {
        let number = |key: &str| node.get(key).and_then(Value::as_f64);
        let (above, below) = (number("exclusiveMinimum"), number("exclusiveMaximum"));
        self.least.extend(number("minimum").or(above));
        self.most.extend(number("maximum").or(below));
        let whole = |bound: &f64| bound.fract() == 0.0;
        self.above.extend(above.filter(whole).map(|bound| (bound, path.key("exclusiveMinimum"))));
        self.below.extend(below.filter(whole).map(|bound| (bound, path.key("exclusiveMaximum"))));
    }

    fn check(&self) -> Result<(), GrammarError> {
        // Digits are those of the size, so a bound is the nearer one to 0: lower bounds of numbers above it, upper ones of numbers below.
        let above = self.above.iter().filter(|(bound, _)| *bound >= 0.0);
        let above = above.filter(|(bound, _)| self.most.iter().any(|most| most > bound && *most < bound + 1.0));
        let below = self.below.iter().filter(|(bound, _)| *bound <= 0.0);
        let below = below.filter(|(bound, _)| self.least.iter().any(|least| least < bound && *least > bound - 1.0));
        match above.chain(below).next() {
            None => Ok(()),
            Some((bound, path)) => Err(GrammarError::Schema {
                path: path.clone(),
                reason: format!("{bound} itself cannot be excluded where the other bound is less than 1 away"),
                remedy: "use `minimum` or `maximum` with the nearest number that you allow",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_whole_number_cannot_be_excluded_beside_a_bound_with_its_whole_part() {
        for (schema, path) in [
            (json!({ "exclusiveMinimum": 0, "maximum": 0.5 }), Some("exclusiveMinimum")),
            (json!({ "type": "number", "exclusiveMinimum": 3.0, "exclusiveMaximum": 3.5 }), Some("exclusiveMinimum")),
            (json!({ "exclusiveMaximum": 0, "minimum": -0.5 }), Some("exclusiveMaximum")),
            (json!({ "exclusiveMinimum": -2.5, "exclusiveMaximum": -2 }), Some("exclusiveMaximum")),
            (
                json!({ "items": { "allOf": [{ "exclusiveMinimum": 0 }, { "maximum": 0.5 }] } }),
                Some("items.allOf[0].exclusiveMinimum"),
            ),
            (
                json!({ "$defs": { "a": { "exclusiveMinimum": 0 } }, "properties": { "x": { "$ref": "#/$defs/a", "maximum": 0.1 } } }),
                Some("$defs.a.exclusiveMinimum"),
            ),
            (
                json!({ "maximum": 0.5, "anyOf": [{ "type": "string" }, { "type": ["number", "null"], "exclusiveMinimum": 0 }] }),
                Some("anyOf[1].exclusiveMinimum"),
            ),
            (
                json!({ "allOf": [{ "anyOf": [{ "exclusiveMinimum": 0 }, { "type": "null" }] }, { "anyOf": [{}, { "maximum": 0.5 }] }] }),
                Some("allOf[0].anyOf[0].exclusiveMinimum"),
            ),
            (
                json!({ "anyOf": [{ "exclusiveMaximum": 0 }], "oneOf": [{ "minimum": -0.5 }] }),
                Some("anyOf[0].exclusiveMaximum"),
            ),
            (
                json!({ "$defs": { "a": { "exclusiveMinimum": 0 } }, "anyOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/a", "maximum": 0.1 }] }),
                Some("$defs.a.exclusiveMinimum"),
            ),
            (
                json!({ "anyOf": [{ "exclusiveMinimum": 0 }, { "maximum": 2 }], "oneOf": [{ "maximum": 1 }, { "minimum": -1 }] }),
                None,
            ),
            (json!({ "allOf": vec![json!({ "anyOf": vec![json!({ "minimum": 0 }); 12] }); 4] }), Some("")),
            (json!({ "allOf": vec![json!({ "anyOf": vec![json!({ "minLength": 1 }); 12] }); 9] }), None),
            // Whole numbers between the bounds, bounds that are allowed, other alternatives, other types, data.
            (json!({ "exclusiveMinimum": 0, "maximum": 1 }), None),
            (json!({ "exclusiveMinimum": 0 }), None),
            (json!({ "minimum": 0, "exclusiveMaximum": 0.5 }), None),
            (json!({ "exclusiveMinimum": 0.25, "maximum": 0.5 }), None),
            (json!({ "exclusiveMinimum": -1, "maximum": -0.5 }), None),
            (json!({ "exclusiveMinimum": -0.5, "maximum": 0.5 }), None),
            (json!({ "anyOf": [{ "exclusiveMinimum": 0 }, { "maximum": 0.5 }] }), None),
            (json!({ "type": "integer", "exclusiveMinimum": 0, "maximum": 0.5 }), None),
            (json!({ "const": { "exclusiveMinimum": 0, "maximum": 0.5 } }), None),
            (json!({ "$defs": { "a": { "$ref": "#/$defs/a" } }, "$ref": "#/$defs/a" }), None),
        ] {
            let found = check(schema.as_object().unwrap());
            let found = found.err().map(|error| error.to_string());
            assert_eq!(found.is_some(), path.is_some(), "{schema}: {found:?}");
            if let (Some(found), Some(path)) = (found, path) {
                let expected = if path.is_empty() { "its alternatives".to_string() } else { format!("`{path}`: ") };
                assert!(found.starts_with(&expected), "{schema}: {found}");
            }
        }
    }
}
