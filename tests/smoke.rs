//! The module loads, and its commands reply.

use std::collections::HashMap;

use redis::Value;
use support::Server;

#[test]
fn module_is_loaded_by_its_name() {
    let server = Server::start();
    let mut connection = server.connect();
    let modules: Vec<HashMap<String, Value>> = redis::cmd("MODULE").arg("LIST").query(&mut connection).unwrap();
    let names: Vec<&Value> = modules.iter().filter_map(|module| module.get("name")).collect();
    assert!(names.contains(&&Value::BulkString(b"holdfast".into())), "{names:?}");
}
