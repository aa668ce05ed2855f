//! Tests that a changed config has the answer of a fresh cache: every key of the checkpoints of codes is turned, with one cache for each.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use monobloc::model::config::{graph_text, import};
use monobloc::model::graph::TensorId;
use serde_json::{Value, json};

use crate::cli_support::Place;
use crate::support::{checkpoints, fixture};

const QUANTISED: &str = "quantization_config";

/// Leaves of a value, by pointer. A list is a leaf, too.
fn leaves(at: &str, value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, inner)| leaves(&format!("{at}/{key}"), inner, out)),
        _ => out.push(at.to_string()),
    }
}

fn config_of(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap()
}

/// What the leaf of a name is set to: neighbours of its value, and what other fixtures have there.
fn turned(value: &Value, others: &BTreeSet<String>) -> Vec<Value> {
    let mut values: Vec<Value> = others.iter().map(|text| serde_json::from_str(text).unwrap()).collect();
    match value {
        Value::Bool(flag) => values.push(json!(!flag)),
        Value::Number(number) => {
            let number = number.as_f64().unwrap();
            values.extend([number + 1.0, number * 2.0, (number / 2.0).floor()].map(|n| match n.fract() == 0.0 {
                true => json!(n as i64),
                false => json!(n),
            }));
        }
        Value::Array(list) if list.iter().all(Value::is_u64) => {
            for at in 0..list.len() {
                let mut list = list.clone();
                list[at] = json!(list[at].as_u64().unwrap() + 1);
                values.push(json!(list));
            }
        }
        _ => {}
    }
    values.push(Value::Null);
    values.retain(|turned| turned != value);
    values
}

/// What the model computes, apart from how: its graph, and every value of its weights.
fn meaning(folder: &Path) -> Option<(String, Vec<u32>)> {
    let imported = import(folder).ok()?;
    let values = (0..imported.graph.tensors.len()).map(TensorId::from);
    let values = values.flat_map(|id| imported.weights.vector_f32(id)).map(f32::to_bits).collect();
    Some((graph_text(&imported.graph), values))
}

/// Logits, or why there are none.
fn answer(place: &Place, cache: &str) -> Result<Vec<u8>, String> {
    let answer = place.run(&format!("--cache {cache} logits m.toml --ids 5,9,3,17 --out logits"));
    match answer.code {
        0 => Ok(fs::read(place.path("logits")).unwrap()),
        _ => Err(answer.stderr.lines().filter(|line| line.starts_with("error: ")).collect()),
    }
}

#[test]
fn every_turned_key_has_the_answer_of_a_fresh_cache() {
    let names = checkpoints("quantised");
    // Top-level keys are in the graph, which is a part of every key: three checkpoints show it.
    let whole = ["gptq-v1-asym", "awq-g64-qwen2", "ct-fp8-block"];
    let mut others: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in &names {
        let config = config_of(name);
        let mut found = vec![];
        leaves("", &config[QUANTISED], &mut found);
        for at in found {
            let value = config[QUANTISED].pointer(&at).unwrap();
            let key = at.rsplit('/').next().unwrap().to_string();
            others.entry(key).or_default().insert(value.to_string());
        }
    }
    others.get_mut("checkpoint_format").unwrap().extend(["\"gptq\"", "\"gptq_v2\""].map(String::from));
    let turn_all = |name: &str| {
        let place = Place::new();
        let checkpoint = place.checkpoint(name);
        place.manifest(&checkpoint, 16);
        let config = config_of(name);
        let mut keys = vec![];
        leaves(&format!("/{QUANTISED}"), &config[QUANTISED], &mut keys);
        if whole.iter().any(|end| name.ends_with(end)) {
            leaves("", &config, &mut keys);
        }
        keys.sort();
        keys.dedup();
        let before = meaning(&checkpoint).unwrap();
        let expected = answer(&place, "cache");
        assert!(expected.is_ok(), "{name}: {expected:?}");
        let (mut accepted, mut moved) = (0, 0);
        for at in keys {
            let key = at.rsplit('/').next().unwrap();
            for value in turned(config.pointer(&at).unwrap(), others.get(key).unwrap_or(&BTreeSet::new())) {
                let mut changed = config.clone();
                *changed.pointer_mut(&at).unwrap() = value.clone();
                fs::write(checkpoint.join("config.json"), changed.to_string()).unwrap();
                // The import reads no cache.
                let Some(after) = meaning(&checkpoint) else { continue };
                accepted += 1;
                let found = answer(&place, "cache");
                // A key may say no more than what is refused.
                let fresh = match after == before && found == expected {
                    true => expected.clone(),
                    false => {
                        let _ = fs::remove_dir_all(place.path("fresh"));
                        answer(&place, "fresh")
                    }
                };
                assert!(found == fresh, "{name}: {at} = {value}: with the cache {found:?}, fresh {fresh:?}");
                moved += usize::from(fresh != expected);
            }
        }
        (accepted, moved)
    };
    let counts: Vec<(usize, usize)> = std::thread::scope(|scope| {
        let halves = [&names[..names.len() / 2], &names[names.len() / 2..]];
        let running =
            halves.map(|half| scope.spawn(move || half.iter().map(|name| turn_all(name)).collect::<Vec<_>>()));
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let (accepted, moved) = counts.iter().fold((0, 0), |(a, m), (accepted, moved)| (a + accepted, m + moved));
    assert!(accepted > 200 && moved > 20, "{accepted} accepted, {moved} with other logits");
}
