//! The part of JSON Schema that lock.schema.json uses. An unknown keyword is an error, so nothing is left unchecked.

use serde_json::Value;

/// Checks a value against a schema. Panics if it does not match.
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
                assert!(types.contains(&type_of(value)), "{place}: {value} is not one of {types:?}");
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
            "additionalProperties" => assert_eq!(wanted, false, "only `false` is supported"),
            "items" => {
                for inner in value.as_array().into_iter().flatten() {
                    check_at(root, wanted, inner, &format!("{place}[]"));
                }
            }
            other => panic!("{place}: unsupported keyword {other}"),
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
