//! Owns forms of older drafts, which are written as draft 2020-12 has them, and the order in which llguidance needs some keywords.

use serde_json::{Map, Value, json};

use super::super::blame::Path;
use super::GrammarError;

/// Refuses an identifier inside a schema where references are relative to it: llguidance takes them from the whole schema.
pub fn check(members: &Map<String, Value>, path: &Path) -> Result<(), GrammarError> {
    let is_base = members.get("$id").and_then(Value::as_str).is_some_and(|id| !id.starts_with('#'));
    if *path == Path::default() || !is_base || !refers(members) {
        return Ok(());
    }
    Err(GrammarError::Schema {
        path: path.key("$id"),
        reason: "references below an identifier of a part are not supported".to_string(),
        remedy: "leave the identifier out, and write the references from the beginning of the whole schema",
    })
}

fn refers(members: &Map<String, Value>) -> bool {
    fn inner(value: &Value) -> bool {
        match value {
            Value::Array(items) => items.iter().any(inner),
            Value::Object(members) => refers(members),
            _ => false,
        }
    }
    members.iter().any(|(key, value)| (key == "$ref" && value.is_string()) || inner(value))
}

/// Writes a schema in the forms of draft 2020-12.
pub fn port(members: &mut Map<String, Value>) {
    excluded(members, "exclusiveMinimum", "minimum");
    excluded(members, "exclusiveMaximum", "maximum");
    tuples(members);
    together(members);
}

/// A flag says that the bound itself is excluded.
fn excluded(members: &mut Map<String, Value>, flag: &str, bound: &str) {
    let Some(&Value::Bool(is_excluded)) = members.get(flag) else { return };
    match members.get(bound).filter(|_| is_excluded).cloned() {
        Some(value) => {
            members.shift_remove(bound);
            members.insert(flag.to_string(), value);
        }
        None => drop(members.shift_remove(flag)),
    }
}

/// A list of schemas in `items` is `prefixItems`, and `additionalItems` are then the items after them.
fn tuples(members: &mut Map<String, Value>) {
    let rest = members.shift_remove("additionalItems");
    if !members.get("items").is_some_and(Value::is_array) {
        return;
    }
    let list = members.shift_remove("items").unwrap_or_default();
    let mut tuple = Map::from_iter([("prefixItems".to_string(), list)]);
    tuple.extend(rest.map(|rest| ("items".to_string(), rest)));
    if !members.contains_key("prefixItems") {
        members.extend(tuple);
    } else if let Value::Array(all) = members.entry("allOf").or_insert_with(|| json!([])) {
        all.push(Value::Object(tuple));
    }
}

/// llguidance takes keywords up to `allOf` and its like as a schema of their own: additional properties have to know the patterns.
fn together(members: &mut Map<String, Value>) {
    if !members.contains_key("additionalProperties") {
        return;
    }
    let Some(patterns) = members.shift_remove("patternProperties") else { return };
    let rest = std::mem::take(members);
    for (key, value) in rest {
        if key == "additionalProperties" {
            members.insert("patternProperties".to_string(), patterns.clone());
        }
        members.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_older_drafts_are_those_of_2020_12() {
        for (schema, expected) in [
            (json!({ "minimum": 3, "exclusiveMinimum": true }), json!({ "exclusiveMinimum": 3 })),
            (json!({ "exclusiveMaximum": true, "maximum": 0.5 }), json!({ "exclusiveMaximum": 0.5 })),
            (json!({ "minimum": 3, "exclusiveMinimum": false }), json!({ "minimum": 3 })),
            (json!({ "exclusiveMaximum": true }), json!({})),
            (json!({ "items": [true] }), json!({ "prefixItems": [true] })),
            (json!({ "items": [true], "additionalItems": false }), json!({ "prefixItems": [true], "items": false })),
            (json!({ "items": {}, "additionalItems": false }), json!({ "items": {} })),
            (
                json!({ "prefixItems": [true], "items": [false], "additionalItems": {} }),
                json!({ "prefixItems": [true], "allOf": [{ "prefixItems": [false], "items": {} }] }),
            ),
        ] {
            let mut found = schema.clone();
            port(found.as_object_mut().unwrap());
            assert_eq!(found, expected, "{schema}");
        }
    }

    #[test]
    fn patterns_stand_directly_before_additional_properties() {
        for text in [
            r#"{"patternProperties":{"a":true},"allOf":[],"additionalProperties":false,"properties":{}}"#,
            r#"{"allOf":[],"additionalProperties":false,"properties":{},"patternProperties":{"a":true}}"#,
        ] {
            let mut found: Map<String, Value> = serde_json::from_str(text).unwrap();
            port(&mut found);
            let keys: Vec<&str> = found.keys().map(String::as_str).collect();
            assert_eq!(keys, ["allOf", "patternProperties", "additionalProperties", "properties"]);
        }
    }
}
