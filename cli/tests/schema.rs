//! As much of JSON Schema as lock.schema.json uses. A word that is not known here is an error, so nothing goes unchecked.

use serde_json::Value;

/// Whether a value is what the schema says; panics if it is not.
#[track_caller]
pub fn check(schema: &Value, value: &Value, place: &str) {
    check_at(schema, schema, value, place);
}

#[track_caller]
fn check_at(root: &Value, schema: &Value, value: &Value, place: &str) {
    for (word, wanted) in schema.as_object().expect("a schema is an object") {
        match word.as_str() {
            "$schema" | "$id" | "title" | "description" | "$defs" => {}
            "$ref" => {
                let path = wanted.as_str().and_then(|path| path.strip_prefix('#')).expect("a reference within");
                check_at(root, root.pointer(path).expect("what it refers to"), value, place);
            }
            "type" => {
                let types: Vec<&str> = match wanted {
                    Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
                    one => one.as_str().into_iter().collect(),
                };
                assert!(types.contains(&type_of(value)), "{place}: {value} is none of {types:?}");
            }
            "minimum" => assert!(value.is_null() || value.as_i64() >= wanted.as_i64(), "{place}: {value} < {wanted}"),
            "required" => {
                for name in wanted.as_array().expect("a list").iter().filter_map(Value::as_str) {
                    assert!(value.get(name).is_some(), "{place}: no {name} in {value}");
                }
            }
            "properties" => {
                for (name, inner) in value.as_object().into_iter().flatten() {
                    let known = wanted.get(name).unwrap_or_else(|| panic!("{place}: {name} is not documented"));
                    check_at(root, known, inner, &format!("{place}.{name}"));
                }
            }
            "additionalProperties" => assert_eq!(wanted, false, "only that is understood here"),
            "items" => {
                for inner in value.as_array().into_iter().flatten() {
                    check_at(root, wanted, inner, &format!("{place}[]"));
                }
            }
            other => panic!("{place}: this check does not know {other}"),
        }
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_i64() || number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
