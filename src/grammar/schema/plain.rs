//! Owns keywords that llguidance does not know, or knows less exactly than their definition, where keywords that it knows say the same.
//! What is left over is refused by name.

use serde_json::{Map, Value, json};

use super::{Place, drafts, multiples, patterns};

/// Keywords whose schemas also say which members of an object, or items of a list, are evaluated.
const APPLICATORS: [&str; 11] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
];

/// The beginning of a date that the calendar has: February has its 29th in leap years only.
const DATE: &str = "(([0-9]{4}-(0[13-9]|1[0-2]))|([0-9]{4}-02-([01][0-9]|2[0-8]))|\
                    (([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29))";
/// The beginning of a time that is no leap second, which only few minutes have.
const TIME: &str = "[0-9]{2}:[0-9]{2}:[0-5]";
/// Longest name of a host, in characters (RFC 1123).
const HOST_MAX: u64 = 253;

/// Rewrites a schema and all schemas in it.
pub fn rewrite(value: &mut Value, place: Place) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| rewrite(item, place)),
        Value::Object(members) => {
            if place == Place::Schema {
                drafts::port(members);
                without_effect(members);
                names_of_properties(members);
                literal_patterns(members);
                unevaluated(members);
                formats(members);
                patterns::port(members);
            }
            for (key, value) in members.iter_mut() {
                if let Some(place) = place.of(key) {
                    rewrite(value, place);
                }
            }
            // After the schemas inside: those that it writes are final.
            if place == Place::Schema {
                multiples::port(members);
            }
        }
        _ => {}
    }
}

/// Whether a schema allows everything.
fn is_any(schema: &Value) -> bool {
    schema == &json!(true) || schema.as_object().is_some_and(Map::is_empty)
}

fn has(members: &Map<String, Value>, key: &str) -> bool {
    members.contains_key(key)
}

/// Takes keywords away that every text obeys.
fn without_effect(members: &mut Map<String, Value>) {
    let one_item = members.get("maxItems").and_then(Value::as_f64).is_some_and(|most| most <= 1.0);
    let none_needed = members.get("minContains").and_then(Value::as_f64) == Some(0.0) && !has(members, "maxContains");
    let (contains, condition) = (has(members, "contains"), has(members, "if"));
    let branches = has(members, "then") || has(members, "else");
    members.retain(|key, value| {
        let empty = value.as_object().is_some_and(Map::is_empty);
        let idle = match key.as_str() {
            "uniqueItems" => *value == json!(false) || one_item,
            "dependentRequired" | "dependentSchemas" | "dependencies" => empty,
            "propertyNames" => is_any(value) || *value == json!({ "type": "string" }),
            "unevaluatedProperties" | "unevaluatedItems" => is_any(value),
            "not" => *value == json!(false),
            "if" => !branches,
            "then" | "else" => !condition,
            "contains" => none_needed,
            "minContains" | "maxContains" => none_needed || !contains,
            _ => false,
        };
        !idle
    });
}

/// Names in a list or after a pattern, where an object has no other properties, are properties or their pattern.
fn names_of_properties(members: &mut Map<String, Value>) {
    let alone = ["properties", "patternProperties", "unevaluatedProperties"].iter().all(|key| !has(members, key));
    let Some(Value::Object(names)) = members.get("propertyNames").filter(|_| alone) else { return };
    let only = |key: &str| {
        let is_text = names.get("type").is_none_or(|kind| kind == "string");
        is_text && names.keys().all(|name| name == key || name == "type")
    };
    let value = members.get("additionalProperties").cloned().unwrap_or(json!(true));
    let (key, named) = match (names.get("enum"), names.get("pattern")) {
        (Some(Value::Array(list)), None) if only("enum") && list.iter().all(Value::is_string) => {
            let names = list.iter().filter_map(Value::as_str);
            ("properties", names.map(|name| (name.to_string(), value.clone())).collect())
        }
        (None, Some(Value::String(pattern))) if only("pattern") => {
            ("patternProperties", Map::from_iter([(pattern.clone(), value)]))
        }
        _ => return,
    };
    members.remove("propertyNames");
    members.insert(key.to_string(), Value::Object(named));
    members.insert("additionalProperties".to_string(), json!(false));
}

/// A pattern of few names is these properties. llguidance finds no text for such a pattern where all of its names are properties already.
fn literal_patterns(members: &mut Map<String, Value>) {
    let Some(Value::Object(patterns)) = members.get_mut("patternProperties") else { return };
    let literal: Vec<(Vec<String>, String)> =
        patterns.keys().filter_map(|pattern| Some((literals(pattern)?, pattern.clone()))).collect();
    let moved: Vec<(Vec<String>, Value)> =
        literal.into_iter().filter_map(|(names, pattern)| Some((names, patterns.remove(&pattern)?))).collect();
    if patterns.is_empty() {
        members.remove("patternProperties");
    }
    if moved.is_empty() {
        return;
    }
    let Value::Object(properties) = members.entry("properties").or_insert_with(|| json!({})) else { return };
    for (names, schema) in moved {
        for name in names {
            let both = match properties.get(&name) {
                Some(own) => json!({ "allOf": [own, schema] }),
                None => schema.clone(),
            };
            properties.insert(name, both);
        }
    }
}

/// The names that a pattern such as `^(a|b)$` has.
fn literals(pattern: &str) -> Option<Vec<String>> {
    let inner = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let group = inner.strip_prefix("(?:").or(inner.strip_prefix('(')).and_then(|rest| rest.strip_suffix(')'));
    let names: Vec<&str> = group.map_or(vec![inner], |group| group.split('|').collect());
    let is_plain = |name: &&str| name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | ' '));
    names.iter().all(is_plain).then(|| names.into_iter().map(str::to_string).collect())
}

/// Where no other schema evaluates members or items, those that are not evaluated are the additional ones.
fn unevaluated(members: &mut Map<String, Value>) {
    if APPLICATORS.iter().any(|key| has(members, key)) {
        return;
    }
    if let Some(rest) = members.remove("unevaluatedProperties") {
        members.entry("additionalProperties").or_insert(rest);
    }
    if has(members, "contains") {
        return;
    }
    if let Some(rest) = members.remove("unevaluatedItems") {
        members.entry("items").or_insert(rest);
    }
}

/// Formats that llguidance takes more texts for.
fn formats(members: &mut Map<String, Value>) {
    let pattern = match members.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}"),
        Some("time") => format!("^{TIME}"),
        Some("date-time") => format!("^{DATE}(-[0-9]{{2}})?[Tt]{TIME}"),
        Some("hostname") => {
            let most = members.get("maxLength").and_then(Value::as_u64).unwrap_or(HOST_MAX);
            members.insert("maxLength".to_string(), json!(most.min(HOST_MAX)));
            return;
        }
        _ => return,
    };
    if !has(members, "pattern") {
        members.insert("pattern".to_string(), json!(pattern));
    } else if let Value::Array(all) = members.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({ "pattern": pattern }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keywords_that_say_the_same_take_the_place_of_others() {
        for (schema, expected) in [
            (json!({ "uniqueItems": false, "minItems": 1 }), json!({ "minItems": 1 })),
            (json!({ "uniqueItems": true, "maxItems": 1 }), json!({ "maxItems": 1 })),
            (json!({ "uniqueItems": true, "maxItems": 2 }), json!({ "uniqueItems": true, "maxItems": 2 })),
            (json!({ "propertyNames": { "type": "string" } }), json!({})),
            (
                json!({ "propertyNames": { "type": "string", "enum": ["a", "b"] }, "additionalProperties": { "type": "null" } }),
                json!({
                    "properties": { "a": { "type": "null" }, "b": { "type": "null" } }, "additionalProperties": false
                }),
            ),
            (
                json!({ "propertyNames": { "pattern": "^x" } }),
                json!({ "patternProperties": { "^x": true }, "additionalProperties": false }),
            ),
            (json!({ "propertyNames": { "minLength": 2 } }), json!({ "propertyNames": { "minLength": 2 } })),
            (
                json!({ "properties": { "a": { "uniqueItems": false } }, "unevaluatedProperties": false }),
                json!({ "properties": { "a": {} }, "additionalProperties": false }),
            ),
            (
                json!({ "allOf": [true], "unevaluatedProperties": false }),
                json!({ "allOf": [true], "unevaluatedProperties": false }),
            ),
            (
                json!({ "prefixItems": [true], "unevaluatedItems": false }),
                json!({ "prefixItems": [true], "items": false }),
            ),
            (json!({ "if": true, "then": { "type": "null" } }), json!({ "if": true, "then": { "type": "null" } })),
            (json!({ "then": { "type": "null" }, "contains": true, "minContains": 0 }), json!({})),
            (
                json!({ "properties": { "a": { "type": "integer" } }, "patternProperties": { "^(a|b)$": { "minimum": 3 } } }),
                json!({
                    "properties": { "a": { "allOf": [{ "type": "integer" }, { "minimum": 3 }] }, "b": { "minimum": 3 } }
                }),
            ),
            (json!({ "format": "hostname", "maxLength": 400 }), json!({ "format": "hostname", "maxLength": 253 })),
            // Names and data are no keywords.
            (
                json!({ "properties": { "uniqueItems": { "const": { "uniqueItems": false } } } }),
                json!({ "properties": { "uniqueItems": { "const": { "uniqueItems": false } } } }),
            ),
        ] {
            let mut found = schema.clone();
            rewrite(&mut found, Place::Schema);
            assert_eq!(found, expected, "{schema}");
        }
    }
}
