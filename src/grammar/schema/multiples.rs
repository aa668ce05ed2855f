//! Owns `multipleOf`: llguidance has it as a whole number of 32 bits and a count of decimals, and computes with these without looking at overflows.

use serde_json::{Map, Value, json};

use super::super::blame::Path;
use super::{GrammarError, decimal, each_schema};

/// Most decimals for which a power of ten has 32 bits.
const DECIMALS_MAX: u32 = 9;
/// The types of values that are no numbers.
const OTHERS: [&str; 5] = ["null", "boolean", "string", "array", "object"];

/// `digits / 10^decimals`, with as few decimals as possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    digits: u64,
    decimals: u32,
}

impl Step {
    /// The step that a schema names, if it is above 0 and has at most 18 digits.
    fn of(value: &Value) -> Option<Step> {
        let Value::Number(number) = value else { return None };
        let (negative, digits, exponent) = decimal(&number.to_string());
        let digits: u64 = digits.parse().ok().filter(|digits| *digits > 0 && !negative)?;
        match u32::try_from(exponent) {
            Ok(zeros) => Some(Step { digits: digits.checked_mul(10u64.checked_pow(zeros)?)?, decimals: 0 }),
            Err(_) => Some(Step { digits, decimals: u32::try_from(-exponent).ok()? }),
        }
    }

    /// Whether llguidance finds every multiple with 32 bits: a remainder times 10, and a digit before the decimals.
    fn fits(self) -> bool {
        let Step { digits, decimals } = self;
        let digit = 10u64.checked_pow(decimals).filter(|_| decimals <= DECIMALS_MAX).map(|one| 9 * one);
        let most = digit.and_then(|digit| digits.checked_mul(10)?.checked_add(digit));
        most.is_some_and(|most| u32::try_from(most).is_ok())
    }

    /// As llguidance takes a number for a step: it multiplies by ten until the product is whole.
    fn read(number: f64) -> Option<Step> {
        let (mut value, mut decimals) = (number, 0);
        while value.fract() != 0.0 && decimals <= DECIMALS_MAX {
            value *= 10.0;
            decimals += 1;
        }
        let whole = value.fract() == 0.0 && value <= f64::from(u32::MAX);
        whole.then(|| Step { digits: value as u64, decimals }.shortest())
    }

    fn shortest(mut self) -> Step {
        while self.decimals > 0 && self.digits.is_multiple_of(10) {
            self.digits /= 10;
            self.decimals -= 1;
        }
        self
    }

    /// The number, or one next to it, that llguidance takes for this step: products of fp64 with ten are rounded.
    fn spelled(self) -> Option<f64> {
        const NEIGHBOURS: i64 = 16;
        let nearest = self.digits as f64 / 10f64.powi(self.decimals as i32);
        let near = (0..=NEIGHBOURS).flat_map(|far| [far, -far]);
        let near = near.map(|far| f64::from_bits(nearest.to_bits().wrapping_add_signed(far)));
        near.into_iter().find(|number| Step::read(*number) == Some(self))
    }

    /// The multiples with at most these decimals.
    fn coarser(self, decimals: u32) -> Step {
        let dropped = 10u64.pow(self.decimals - decimals);
        Step { digits: self.digits / gcd(self.digits, dropped), decimals }.shortest()
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Refuses a step that llguidance would compute otherwise.
pub fn check(members: &Map<String, Value>, path: &Path) -> Result<(), GrammarError> {
    let Some(value) = members.get("multipleOf").filter(|value| value.is_number()) else { return Ok(()) };
    let refuse = |reason: String| {
        let remedy = "use one of fewer digits, or leave it out and check the number yourself";
        Err(GrammarError::Schema { path: path.key("multipleOf"), reason, remedy })
    };
    if value.as_f64().is_some_and(|value| value <= 0.0) {
        return refuse(format!("expected a number above 0, found {value}"));
    }
    match Step::of(value).filter(|step| step.fits() && step.spelled().is_some()) {
        Some(_) => Ok(()),
        None => refuse(format!("the multiples of {value} cannot be found exactly")),
    }
}

/// Writes a step so that llguidance takes it for what it is, and allows multiples without their last zeros: 0.5 where the step is 0.25.
pub fn port(members: &mut Map<String, Value>) {
    let Some(step) = members.get("multipleOf").and_then(Step::of).filter(|step| step.fits()) else { return };
    let spelled = |step: Step| step.spelled().map(Value::from);
    let Some(value) = spelled(step) else { return };
    let coarser: Vec<Step> = (1..step.decimals).map(|decimals| step.coarser(decimals)).collect();
    let is_new = |at: usize| coarser[at].decimals as usize == at + 1 && step.digits != 1;
    let steps = (0..coarser.len()).filter(|at| is_new(*at)).map(|at| coarser[at]);
    let mut sides: Vec<Value> =
        steps.filter_map(spelled).map(|step| json!({ "type": "number", "multipleOf": step })).collect();
    if sides.is_empty() || members.get("type").is_some_and(|kind| kind == "integer") {
        members.insert("multipleOf".to_string(), value);
        return;
    }
    sides.extend([json!({ "type": "number", "multipleOf": value }), json!({ "type": OTHERS })]);
    let sides = json!({ "anyOf": sides });
    match members.entry("allOf").or_insert_with(|| json!([])) {
        Value::Array(all) => all.push(sides),
        _ => return,
    }
    members.shift_remove("multipleOf");
}

/// Refuses steps whose common multiple may have too many digits. llguidance computes it where several schemas describe one number.
pub fn check_common(schema: &Map<String, Value>) -> Result<(), GrammarError> {
    each_schema(schema, &mut |node, path| {
        if !is_joined(node) {
            return Ok(());
        }
        let mut steps = vec![];
        let refers = collect(node, &mut steps);
        if refers {
            steps.clear();
            collect(schema, &mut steps);
        }
        if common(&steps).is_some_and(|common| common.checked_mul(common).is_some_and(|most| most <= u32::MAX.into()))
            || (steps.len() < 2 && !refers)
        {
            return Ok(());
        }
        Err(GrammarError::Schema {
            path: path.clone(),
            reason: "the common multiples of its `multipleOf` may have too many digits".to_string(),
            remedy: "use steps that have smaller common multiples, or fewer of them",
        })
    })
}

/// Whether several schemas describe the same value, or the same property.
fn is_joined(node: &Map<String, Value>) -> bool {
    let has = |key: &str| node.contains_key(key);
    let applied = ["anyOf", "oneOf", "$ref"].iter().filter(|key| has(key)).count();
    let idle = ["title", "description", "default", "examples", "$defs", "definitions", "$id", "$comment"];
    let others = node.keys().filter(|key| !idle.contains(&key.as_str())).count();
    has("allOf") || (applied > 0 && others > 1) || (has("properties") && has("patternProperties"))
}

/// Adds the steps of a schema, and of all schemas in it. Returns whether it has references.
fn collect(node: &Map<String, Value>, steps: &mut Vec<Step>) -> bool {
    let mut refers = false;
    let mut add = |members: &Map<String, Value>, _: &Path| {
        steps.extend(members.get("multipleOf").and_then(Value::as_f64).and_then(Step::read));
        refers |= members.contains_key("$ref");
        Ok(())
    };
    let walked = each_schema(node, &mut add);
    debug_assert!(walked.is_ok());
    refers
}

/// The least common multiple of steps, in units of the finest decimal. 1 without any.
fn common(steps: &[Step]) -> Option<u64> {
    let decimals = steps.iter().map(|step| step.decimals).max().unwrap_or(0);
    steps.iter().try_fold(1u64, |common, step| {
        let digits = step.digits.checked_mul(10u64.checked_pow(decimals - step.decimals)?)?;
        (common / gcd(common, digits)).checked_mul(digits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_taken_as_they_are_written_or_refused() {
        for (step, expected) in [
            ("0.01", Some((1, 2))),
            ("0.07", Some((7, 2))),
            ("1.1", Some((11, 1))),
            ("0.29", Some((29, 2))),
            ("2.50", Some((25, 1))),
            ("1e-8", Some((1, 8))),
            ("3e2", Some((300, 0))),
            ("429496728", Some((429_496_728, 0))),
            // Beyond 32 bits, or no step at all.
            ("429496729", None),
            ("3e9", None),
            ("1e-9", None),
            ("0.123456789", None),
            ("0", None),
            ("-2", None),
        ] {
            let members: Map<String, Value> = serde_json::from_str(&format!(r#"{{"multipleOf": {step}}}"#)).unwrap();
            assert_eq!(check(&members, &Path::default()).is_ok(), expected.is_some(), "{step}");
            let found = Step::of(&members["multipleOf"]).filter(|step| step.fits()).and_then(Step::spelled);
            let found = found.and_then(Step::read).map(|step| (step.digits, step.decimals));
            assert_eq!(found, expected, "{step}");
        }
    }

    #[test]
    fn common_multiples_beyond_32_bits_are_refused_where_schemas_meet() {
        for (schema, fits) in [
            (json!({ "allOf": [{ "multipleOf": 65537 }, { "multipleOf": 65539 }] }), false),
            (json!({ "anyOf": [{ "multipleOf": 65537 }, { "multipleOf": 65539 }] }), true),
            (json!({ "properties": { "a": { "multipleOf": 0.0001 }, "b": { "multipleOf": 100000 } } }), true),
            (json!({ "multipleOf": 65537, "anyOf": [{ "multipleOf": 65539 }] }), false),
            (json!({ "$defs": { "a": { "multipleOf": 65537 } }, "$ref": "#/$defs/a", "multipleOf": 3 }), false),
            (json!({ "$defs": { "a": { "multipleOf": 65537 } }, "$ref": "#/$defs/a" }), true),
            (json!({ "allOf": [{ "multipleOf": 65537 }, { "minimum": 3 }] }), true),
            (
                json!({ "properties": { "a": { "multipleOf": 65537 } }, "patternProperties": { "^a": { "multipleOf": 65539 } } }),
                false,
            ),
            (json!({ "allOf": [{ "multipleOf": 0.25 }, { "multipleOf": 0.3 }] }), true),
        ] {
            assert_eq!(check_common(schema.as_object().unwrap()).is_ok(), fits, "{schema}");
        }
    }
}
