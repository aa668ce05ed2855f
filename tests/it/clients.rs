//! Tests what common clients send and expect, on models whose answers are known.

use serde_json::{Value, json};

use crate::cli_support::Place;
use crate::http_client::{Reply, get, post, request, send};
use crate::scripted::{self, CHATML, MISTRAL, TOOLS, XML_TOOLS};
use crate::serve::{Server, refused};

const CHAT: &str = "/v1/chat/completions";

/// A server of a model that answers with `script`.
fn answers(script: &[&str], template: &str) -> Server {
    let script: Vec<&[u8]> = script.iter().map(|token| token.as_bytes()).collect();
    answers_bytes(&script, template, |_, _| ())
}

fn answers_bytes(script: &[&[u8]], template: &str, change: impl FnOnce(&mut Value, &mut Value)) -> Server {
    let place = Place::new();
    let checkpoint = place.path("scripted");
    std::fs::create_dir(&checkpoint).unwrap();
    scripted::write(&checkpoint, script, template, change);
    Server::start_of(place, &checkpoint, 512, "", |_| {})
}

fn ask(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "temperature": 0, "max_tokens": 100 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn choice(server: &Server, more: Value) -> Value {
    server.ok(CHAT, &ask(more))["choices"][0].clone()
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

/// Names and arguments of the calls of a message.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| {
        let function = &call["function"];
        let arguments = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        (function["name"].as_str().unwrap().to_string(), arguments)
    };
    calls.iter().map(call).collect()
}

/// The message that a stream adds up to.
fn streamed(reply: &Reply) -> Value {
    let (mut message, mut calls) = (json!({ "content": "", "reasoning_content": "" }), vec![]);
    for event in reply.events() {
        let delta = &event["choices"][0]["delta"];
        for name in ["content", "reasoning_content"] {
            let text = message[name].as_str().unwrap().to_string() + delta[name].as_str().unwrap_or_default();
            message[name] = json!(text);
        }
        calls.extend(delta["tool_calls"].as_array().cloned().unwrap_or_default());
    }
    message["tool_calls"] = json!(calls);
    message
}

#[test]
fn a_draft_in_thoughts_is_no_call() {
    let call = |x: &str| format!("<tool_call>\n{{\"name\": \"w\", \"arguments\": {{\"x\": \"{x}\"}}}}\n</tool_call>");
    let (draft, real) = (format!("perhaps {}", call("draft")), call("real"));
    let server = answers(&["<think>", &draft, " no", "</think>", "\n\n", &real], TOOLS);
    let tools = json!([tool("w", json!({ "type": "object", "properties": { "x": { "type": "string" } } }))]);
    let whole = choice(&server, json!({ "tools": tools }));
    assert_eq!(calls(&whole["message"]), [("w".to_string(), json!({ "x": "real" }))]);
    assert_eq!(whole["finish_reason"], "tool_calls");
    // A template without such tags leaves the block in the text.
    assert_eq!(whole["message"]["content"], format!("<think>{draft} no</think>"));
    let stream = post(server.address, CHAT, &ask(json!({ "tools": tools, "stream": true })));
    assert_eq!(calls(&streamed(&stream)), calls(&whole["message"]));
}

#[test]
fn thoughts_are_split_off_where_the_template_has_tags() {
    let switch = CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% endif %}{% endif %}",
    );
    let server = answers(&["<think>", "\nIt is", " 4.\n", "</think>", "\n\nFour"], &switch);
    let message = choice(&server, json!({}))["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("\nIt is 4.\n"), &json!("\n\nFour")));
    let stream = streamed(&post(server.address, CHAT, &ask(json!({ "stream": true }))));
    assert_eq!(
        (&stream["reasoning_content"], &stream["content"]),
        (&message["reasoning_content"], &message["content"])
    );
    // All of the text was thoughts.
    let cut = choice(&server, json!({ "max_tokens": 2 }))["message"].clone();
    assert_eq!((&cut["reasoning_content"], &cut["content"]), (&json!("\nIt is"), &Value::Null));
    // The message can be sent back, and the settings change the prompt.
    let history =
        json!([{ "role": "user", "content": "Hi" }, message, { "role": "user", "content": "And?", "name": "Ann" }]);
    choice(&server, json!({ "messages": history, "max_tokens": 1 }));
    let count = |more: Value| server.ok(CHAT, &ask(more))["usage"]["prompt_tokens"].as_u64().unwrap();
    let on = count(json!({}));
    for off in [json!({ "chat_template_kwargs": { "enable_thinking": false } }), json!({ "reasoning_effort": "none" })]
    {
        assert_eq!(count(off), on + 16);
    }
    assert_eq!(count(json!({ "reasoning_effort": "high" })), on);
    let tokenized = json!({ "messages": [{ "role": "user", "content": "Hi" }], "chat_template_kwargs": { "enable_thinking": false } });
    assert_eq!(server.ok("/tokenize", &tokenized)["count"], on + 16);
    refused(
        &post(server.address, CHAT, &ask(json!({ "chat_template_kwargs": { "other": 1 } }))),
        400,
        "chat_template_kwargs",
    );
    // JSON comes after the thoughts, which are free; where the prompt has ended them, it comes at once.
    let mut json = json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "const": 5 } } } });
    let thought = choice(&server, json.clone());
    assert_eq!((json_of(&thought["message"]), &thought["finish_reason"]), (json!(5), &json!("stop")));
    assert_eq!(thought["message"]["reasoning_content"], message["reasoning_content"]);
    json["max_tokens"] = json!(2);
    let cut = choice(&server, json.clone());
    assert_eq!((&cut["message"]["reasoning_content"], &cut["finish_reason"]), (&json!("\nIt is"), &json!("length")));
    assert_eq!(cut["message"]["content"], Value::Null);
    json["chat_template_kwargs"] = json!({ "enable_thinking": false });
    let at_once = choice(&server, json)["message"].clone();
    assert_eq!((&at_once["content"], at_once.get("reasoning_content")), (&json!("5"), None));
}

/// The JSON that a message is.
fn json_of(message: &Value) -> Value {
    serde_json::from_str(message["content"].as_str().unwrap()).unwrap()
}

#[test]
fn a_prompt_that_begins_to_think_is_seen() {
    let open = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}");
    let server = answers(&["a", "</think>", "b"], &open);
    let message = choice(&server, json!({}))["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("a"), &json!("b")));
    // JSON begins after the block, which the prompt has begun.
    let json = json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "const": 7 } } } });
    let message = choice(&server, json)["message"].clone();
    assert_eq!((&message["reasoning_content"], json_of(&message)), (&json!("a"), json!(7)));
}

#[test]
fn a_call_ends_where_its_object_ends() {
    let close = "close </tool_call> here";
    let written = format!(
        "<tool_call>\n{{\"type\": \"function\", \"name\": \"w\", \"arguments\": {{\"x\": \"{close}\"}}}}\n</tool_call>"
    );
    let server = answers(&[&written, " and", &format!("more {written}")], TOOLS);
    let schema = json!({ "type": "object", "properties": { "x": { "const": close } }, "required": ["x"], "additionalProperties": false });
    let tools = json!([tool("w", schema)]);
    let expected = [("w".to_string(), json!({ "x": close }))];
    let both = choice(&server, json!({ "tools": tools }));
    assert_eq!(calls(&both["message"]), [expected.clone(), expected.clone()].concat());
    let one = server.ok(CHAT, &ask(json!({ "tools": tools, "parallel_tool_calls": false })));
    assert_eq!(calls(&one["choices"][0]["message"]), expected);
    assert_eq!(
        (&one["choices"][0]["finish_reason"], &one["usage"]["completion_tokens"]),
        (&json!("tool_calls"), &json!(1))
    );
    for forced in [json!("required"), json!({ "type": "function", "function": { "name": "w" } })] {
        let forced = json!({ "tools": tools, "tool_choice": forced, "parallel_tool_calls": false, "max_tokens": 300 });
        assert_eq!(calls(&choice(&server, forced)["message"]), expected);
    }
}

#[test]
fn a_strict_function_gets_arguments_of_its_schema() {
    // The model would write other arguments, and a function that is not strict gets those.
    let server = answers(
        &["Well: ", "<tool_call>\n", "{\"name\": \"w\", \"arguments\": ", "{\"y\"", ": 2}", "}", "\n</tool_call>"],
        TOOLS,
    );
    let schema = json!({ "type": "object", "properties": { "x": { "const": 1 } }, "required": ["x"], "additionalProperties": false });
    let mut tools = json!([tool("w", schema)]);
    let free = choice(&server, json!({ "tools": tools }));
    assert_eq!(calls(&free["message"]), [("w".to_string(), json!({ "y": 2 }))]);
    tools[0]["function"]["strict"] = json!(true);
    let strict = choice(&server, json!({ "tools": tools, "max_tokens": 300 }));
    assert_eq!(calls(&strict["message"]), [("w".to_string(), json!({ "x": 1 }))], "{strict}");
    assert_eq!(strict["message"]["content"], "Well:");
}

/// The parameters of the function `w` in tests of calls in tags.
fn typed() -> Value {
    json!({ "type": "object", "required": ["s"], "additionalProperties": false, "properties": {
        "s": { "type": "string" }, "n": { "type": "integer" }, "b": { "type": "boolean" }, "o": { "type": "object" },
        "z": { "anyOf": [{ "type": "string" }, { "type": "null" }] },
    } })
}

#[test]
fn calls_in_tags_have_values_of_their_schema() {
    let server = answers(
        &[
            "I look.",
            "\n\n<tool_call>\n<function=w>\n<parameter=s>\n5 </parameter> 6\n</para",
            "meter>\n<parameter=n>\n7\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=z>\nNone\n</parameter>\n",
            "<parameter=o>\n{\"a\": \"</parameter>\"}\n</parameter>\n</function>\n</tool_call>",
            "\n<function=w>\n<parameter=s>\nnull\n</parameter>\n</function>\n</tool_call>\n",
            "\n<tool_call>\n<function=other>\n</function>\n</tool_call>",
        ],
        XML_TOOLS,
    );
    let tools = json!([tool("w", typed())]);
    let first = (
        "w".to_string(),
        json!({ "s": "5 </parameter> 6", "n": 7, "b": true, "z": null, "o": { "a": "</parameter>" } }),
    );
    let expected = [first.clone(), ("w".to_string(), json!({ "s": "null" }))];
    let whole = choice(&server, json!({ "tools": tools }));
    assert_eq!(calls(&whole["message"]), expected);
    // A function that is not offered is a part of the text.
    let unknown = "I look.\n\n<tool_call>\n<function=other>\n</function>\n</tool_call>";
    assert_eq!((&whole["message"]["content"], &whole["finish_reason"]), (&json!(unknown), &json!("tool_calls")));
    let stream = streamed(&post(server.address, CHAT, &ask(json!({ "tools": tools, "stream": true }))));
    assert_eq!((calls(&stream), &stream["content"]), (expected.to_vec(), &json!(unknown)));
    let one = choice(&server, json!({ "tools": tools, "parallel_tool_calls": false }));
    assert_eq!(calls(&one["message"]), [first]);
    // A call that the limit cuts is a text.
    let cut = choice(&server, json!({ "tools": tools, "max_tokens": 3 }));
    assert_eq!((calls(&cut["message"]).len(), &cut["finish_reason"]), (0, &json!("length")));
    assert!(cut["message"]["content"].as_str().unwrap().ends_with("<parameter=z>\nNone\n</parameter>\n"), "{cut}");
}

#[test]
fn calls_in_tags_go_back_into_the_prompt() {
    let server = answers(&["ok"], XML_TOOLS);
    let arguments = json!({ "s": "a", "b": true, "z": null, "n": 1, "o": { "k": [1, "x"] } }).to_string();
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "w", "arguments": arguments } });
    let messages = json!([
        { "role": "user", "content": "Hi" }, { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "c1", "content": "done" },
    ]);
    let asked = json!({ "messages": messages, "tools": [tool("w", json!({}))] });
    assert_eq!(choice(&server, asked.clone())["message"]["content"], "ok");
    let ids = server.ok("/tokenize", &asked)["tokens"].clone();
    let prompt = server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].clone();
    let written = "<tool_call>\n<function=w>\n<parameter=s>\na\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n\
                   <parameter=z>\nNone\n</parameter>\n<parameter=n>\n1\n</parameter>\n\
                   <parameter=o>\n{\"k\": [1, \"x\"]}\n</parameter>\n</function>\n</tool_call><|im_end|>";
    assert!(prompt.as_str().unwrap().contains(written), "{prompt}");
}

#[test]
fn calls_in_tags_follow_a_schema_that_is_asked_for() {
    // The model would write another value, and a call without its first tag.
    let server = answers(
        &[
            "Well: ",
            "<tool_call>\n",
            "<function=w>\n<parameter=",
            "s>\nno",
            "\n</parameter>\n",
            "</function>",
            "\n</tool_call>",
        ],
        XML_TOOLS,
    );
    let schema = json!({ "type": "object", "properties": { "s": { "const": "yes" } }, "required": ["s"], "additionalProperties": false });
    let mut tools = json!([tool("w", schema)]);
    let free = choice(&server, json!({ "tools": tools }));
    assert_eq!(calls(&free["message"]), [("w".to_string(), json!({ "s": "no" }))]);
    let yes = [("w".to_string(), json!({ "s": "yes" }))];
    for forced in [json!("required"), json!({ "type": "function", "function": { "name": "w" } })] {
        let forced = json!({ "tools": tools, "tool_choice": forced, "parallel_tool_calls": false, "max_tokens": 300 });
        assert_eq!(calls(&choice(&server, forced)["message"]), yes);
    }
    tools[0]["function"]["strict"] = json!(true);
    let strict = choice(&server, json!({ "tools": tools, "max_tokens": 300, "parallel_tool_calls": false }));
    assert_eq!((calls(&strict["message"]), &strict["message"]["content"]), (yes.to_vec(), &json!("Well:")), "{strict}");
    tools[0]["function"]["parameters"]["properties"]["s"] = json!({ "type": "string", "format": "email" });
    let refusal = post(server.address, CHAT, &ask(json!({ "tools": tools })));
    let message = refused(&refusal, 400, "tools[0].function.parameters")["message"].clone();
    assert!(message.as_str().unwrap().contains("`properties.s.format`: cannot be kept to"), "{message}");
}

/// A server of a model that answers with `script`, and whose tokens of channels are special ones.
fn answers_in_channels(script: &[&str]) -> Server {
    let place = Place::new();
    let checkpoint = place.path("scripted");
    scripted::write_channels(&checkpoint, script);
    Server::start_of(place, &checkpoint, 512, "", |_| {})
}

#[test]
fn texts_of_channels_are_thoughts_answers_and_calls() {
    let thought = ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>"];
    let server =
        answers_in_channels(&[&thought[..], &["assistant<|channel|>final<|message|>Fo", "ur", "<|return|>"]].concat());
    let message = choice(&server, json!({}))["message"].clone();
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Hm."), &json!("Four")));
    let stream = streamed(&post(server.address, CHAT, &ask(json!({ "stream": true }))));
    assert_eq!((&stream["reasoning_content"], &stream["content"]), (&json!("Hm."), &json!("Four")));
    // What follows a call is no part of the text: the call ends it.
    let to = "assistant<|channel|>commentary to=functions.w ";
    let call = ["<|constrain|>", "json<|message|>{\"x\": \"<|call|>\"}", "<|call|>", "more"];
    let server = answers_in_channels(&[&thought[..], &[to], &call].concat());
    let tools = json!([tool("w", json!({ "type": "object", "properties": { "x": { "type": "string" } } }))]);
    let whole = server.ok(CHAT, &ask(json!({ "tools": tools })));
    let (message, reason) = (&whole["choices"][0]["message"], &whole["choices"][0]["finish_reason"]);
    let expected = [("w".to_string(), json!({ "x": "<|call|>" }))];
    assert_eq!(
        (calls(message), reason, &whole["usage"]["completion_tokens"]),
        (expected.to_vec(), &json!("tool_calls"), &json!(10))
    );
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Hm."), &Value::Null));
    let stream = streamed(&post(server.address, CHAT, &ask(json!({ "tools": tools, "stream": true }))));
    assert_eq!((calls(&stream), &stream["reasoning_content"]), (expected.to_vec(), &json!("Hm.")));
    // Cut, and a function that is not offered: text.
    let cut = choice(&server, json!({ "tools": tools, "max_tokens": 8 }));
    assert_eq!((calls(&cut["message"]).len(), &cut["finish_reason"]), (0, &json!("length")));
    let other = choice(&server, json!({ "tools": [tool("v", json!({}))] }))["message"].clone();
    let text =
        "<|start|>assistant<|channel|>commentary to=functions.w <|constrain|>json<|message|>{\"x\": \"<|call|>\"}";
    assert_eq!((calls(&other).len(), other["content"].as_str().unwrap().starts_with(text)), (0, true), "{other}");
    // The message goes back into the prompt, with its thoughts.
    let history = json!([{ "role": "user", "content": "Hi" }, message, { "role": "tool", "content": "9", "tool_call_id": message["tool_calls"][0]["id"] }]);
    let asked = json!({ "messages": history, "tools": [tool("w", json!({}))] });
    let ids = server.ok("/tokenize", &asked)["tokens"].clone();
    let prompt = server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].clone();
    let written = "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.w<|channel|>commentary \
                   json<|message|>{\"x\": \"<|call|>\"}<|call|>";
    assert!(prompt.as_str().unwrap().contains(written), "{prompt}");
}

#[test]
fn calls_on_channels_follow_a_schema_that_is_asked_for() {
    // The model would write another value.
    let server = answers_in_channels(&[
        "<|channel|>",
        "commentary",
        " to=functions.w ",
        "<|constrain|>",
        "json",
        "<|message|>",
        "{\"y\"",
        ": 2}",
        "<|call|>",
    ]);
    let schema = json!({ "type": "object", "properties": { "x": { "const": 1 } }, "required": ["x"], "additionalProperties": false });
    let mut tools = json!([tool("w", schema)]);
    let expected = [("w".to_string(), json!({ "x": 1 }))];
    assert_eq!(calls(&choice(&server, json!({ "tools": tools }))["message"]), [("w".to_string(), json!({ "y": 2 }))]);
    let forced = choice(&server, json!({ "tools": tools, "tool_choice": "required", "max_tokens": 250 }));
    assert_eq!(calls(&forced["message"]), expected, "{forced}");
    tools[0]["function"]["strict"] = json!(true);
    let strict = choice(&server, json!({ "tools": tools, "max_tokens": 250 }));
    assert_eq!(
        (calls(&strict["message"]), &strict["message"]["content"]),
        (expected.to_vec(), &Value::Null),
        "{strict}"
    );
}

/// A server of a model that answers with `script` in a form of Mistral, whose tokens are special ones.
fn answers_of_mistral(script: &[&str], template: &str) -> Server {
    let script: Vec<&[u8]> = script.iter().map(|token| token.as_bytes()).collect();
    answers_bytes(&script, template, |_, tokenizer| {
        tokenizer["additional_special_tokens"] = json!(["[TOOL_CALLS]", "[ARGS]", "[THINK]"]);
    })
}

#[test]
fn calls_of_mistral_are_lists_or_names() {
    let tools = json!([tool("w", json!({})), tool("v", json!({}))]);
    let list = [
        "I look.",
        "[TOOL_CALLS]",
        " [{\"name\": \"w\", ",
        "\"arguments\": {\"x\": \"}]\"}}, ",
        "{\"name\": \"v\", \"arguments\": {}}]",
    ];
    let names = ["I look.", "[TOOL_CALLS]", "w", "[ARGS]", "{\"x\": ", "\"}]\"}"];
    let first = ("w".to_string(), json!({ "x": "}]" }));
    for (script, template, expected) in [
        (&list[..], MISTRAL[0], vec![first.clone(), ("v".to_string(), json!({}))]),
        (&names[..], MISTRAL[1], vec![first.clone()]),
    ] {
        let server = answers_of_mistral(script, template);
        let whole = choice(&server, json!({ "tools": tools }));
        let message = &whole["message"];
        assert_eq!((calls(message), &message["content"]), (expected.clone(), &json!("I look.")), "{whole}");
        assert_eq!(whole["finish_reason"], "tool_calls");
        let stream = streamed(&post(server.address, CHAT, &ask(json!({ "tools": tools, "stream": true }))));
        assert_eq!((calls(&stream), &stream["content"]), (expected, &json!("I look.")));
        let one = choice(&server, json!({ "tools": tools, "parallel_tool_calls": false }));
        assert_eq!(calls(&one["message"]), std::slice::from_ref(&first));
        let cut = choice(&server, json!({ "tools": tools, "max_tokens": 4 }));
        assert_eq!((calls(&cut["message"]).len(), &cut["finish_reason"]), (0, &json!("length")));
        // The message goes back as it came, and so do ids of other servers.
        let id = message["tool_calls"][0]["id"].as_str().unwrap();
        assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
        let call = json!({ "id": "call_0123456789abcdef", "type": "function", "function": { "name": "w", "arguments": "{}" } });
        for called in [message.clone(), json!({ "role": "assistant", "content": "", "tool_calls": [call] })] {
            let result = json!({ "role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "9" });
            let history = json!([{ "role": "user", "content": "Hi" }, called, result]);
            choice(&server, json!({ "messages": history, "tools": tools, "max_tokens": 1 }));
        }
    }
}

#[test]
fn calls_of_mistral_follow_a_schema_that_is_asked_for() {
    let schema = json!({ "type": "object", "properties": { "x": { "const": 1 } }, "required": ["x"], "additionalProperties": false });
    let mut tools = json!([tool("w", schema)]);
    let list = ["[TOOL_CALLS]", "[{\"name\": \"w\", ", "\"arguments\": ", "{\"y\"", ": 2}", "}]"];
    let names = ["[TOOL_CALLS]", "w", "[ARGS]", "{\"y\"", ": 2}"];
    let expected = [("w".to_string(), json!({ "x": 1 }))];
    for (script, template) in [(&list[..], MISTRAL[0]), (&names[..], MISTRAL[1])] {
        let server = answers_of_mistral(script, template);
        tools[0]["function"]["strict"] = json!(false);
        assert_eq!(
            calls(&choice(&server, json!({ "tools": tools }))["message"]),
            [("w".to_string(), json!({ "y": 2 }))]
        );
        let forced =
            json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 250 });
        assert_eq!(calls(&choice(&server, forced)["message"]), expected);
        tools[0]["function"]["strict"] = json!(true);
        let strict = choice(&server, json!({ "tools": tools, "parallel_tool_calls": false, "max_tokens": 250 }));
        assert_eq!(calls(&strict["message"]), expected, "{strict}");
    }
}

#[test]
fn a_function_without_parameters_gets_an_empty_object() {
    let server = answers(&["a"], TOOLS);
    for tool in [tool("now", json!({})), json!({ "type": "function", "function": { "name": "now" } })] {
        let forced = json!({ "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1, "seed": 1 });
        assert_eq!(calls(&choice(&server, forced)["message"]), [("now".to_string(), json!({}))]);
    }
    let text = json!({ "tools": [tool("now", json!({ "type": "string" }))], "tool_choice": "required" });
    refused(&post(server.address, CHAT, &ask(text)), 400, "tools[0].function.parameters");
}

#[test]
fn earlier_messages_may_be_as_clients_keep_them() {
    let server = answers(&["ok"], TOOLS);
    let call = |arguments: Value| {
        json!({ "role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null, "function_call": null, "reasoning": "hm",
                "tool_calls": [{ "id": "c1", "type": "function", "index": 0, "function": { "name": "now", "arguments": arguments } }] })
    };
    let history = |call: Value| {
        let result = json!({ "role": "tool", "tool_call_id": "c1", "content": [{ "type": "text", "text": "9:00", "cache_control": { "type": "ephemeral" } }] });
        json!({ "messages": [{ "role": "user", "content": "Time?" }, call, result] })
    };
    for arguments in [json!(""), json!("{}"), json!("null"), Value::Null, json!({})] {
        assert_eq!(choice(&server, history(call(arguments)))["message"]["content"], "ok");
    }
    // Arguments show in the same way, however they were sent, also without a type and with what a client made of them.
    let shown = |body: Value| {
        let ids = server.ok("/tokenize", &body)["tokens"].clone();
        server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].as_str().unwrap().to_string()
    };
    let expected = "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"zone\": \"é\", \"at\": 1.0}}\n</tool_call>";
    let mut parsed = call(json!({ "zone": "é", "at": 1.0 }));
    parsed["parsed"] = json!({ "x": [1] });
    parsed["tool_calls"][0]["function"]["parsed_arguments"] = json!({ "at": 1 });
    parsed["tool_calls"][0].as_object_mut().unwrap().remove("type");
    for call in [call(json!("{\"zone\": \"\\u00e9\", \"at\": 1.0}")), parsed] {
        let shown = shown(history(call));
        assert!(shown.contains(expected), "{shown}");
    }
    for (arguments, param) in [
        (json!([1]), "messages[1].tool_calls[0].function.arguments"),
        (json!("[1]"), "messages[1].tool_calls[0].function.arguments"),
        (json!(5), "messages[1].tool_calls[0].function.arguments"),
    ] {
        refused(&post(server.address, CHAT, &ask(history(call(arguments)))), 400, param);
    }
    // A message that cannot be read is named.
    for (message, expected) in [
        (
            json!({ "role": "user", "content": 5 }),
            "`messages[1]`: invalid type: integer `5`, expected a text or a list of parts",
        ),
        (
            json!({ "role": "user", "content": ["a"] }),
            "`messages[1]`: item 0: invalid type: string \"a\", expected a part",
        ),
        (json!({ "role": "user", "content": "a", "x": 1 }), "`messages[1]`: unknown field `x`, expected one of `role`"),
        (json!("a"), "`messages[1]`: invalid type: string \"a\", expected an object"),
    ] {
        let error = refused(&post(server.address, CHAT, &ask(history(message))), 400, "messages[1]");
        assert!(error["message"].as_str().unwrap().starts_with(expected), "{error}");
    }
    let huge = post(server.address, CHAT, &ask(history(call(json!("{\"n\": 123456789012345678901234567890}")))));
    let error = refused(&huge, 400, "messages[1].tool_calls[0].function.arguments");
    assert!(error["message"].as_str().unwrap().contains("123456789012345678901234567890"), "{error}");
    // A template that shows no calls refuses them, also where ids are counted.
    let plain = answers(&["ok"], CHATML);
    for path in [CHAT, "/tokenize"] {
        let mut body = history(call(json!("{}")));
        body["add_generation_prompt"] = json!(true);
        assert_eq!(refused(&post(plain.address, path, &body), 400, "messages")["code"], "unsupported_parameter");
    }
}

#[test]
fn a_template_for_tools_is_used_where_there_are_tools() {
    let named = json!([{ "name": "default", "template": CHATML }, { "name": "tool_use", "template": TOOLS }]);
    let script: [&[u8]; 2] = [b"<tool_call>\n{\"name\": \"w\", \"arguments\": {}}", b"\n</tool_call>"];
    let server = answers_bytes(&script, CHATML, |_, tokenizer| tokenizer["chat_template"] = named);
    let called = choice(&server, json!({ "tools": [tool("w", json!({ "type": "object", "properties": {} }))] }));
    assert_eq!(calls(&called["message"]), [("w".to_string(), json!({}))]);
}

#[test]
fn bytes_of_parts_put_together_are_the_character() {
    let emoji = "\u{1F600}".as_bytes();
    let server = answers_bytes(&[b"a ", &emoji[..1], &emoji[1..3], &emoji[3..], b" b"], CHATML, |_, _| ());
    let choice = choice(&server, json!({ "logprobs": true, "top_logprobs": 1, "max_tokens": 5 }));
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let bytes = |of: &dyn Fn(&Value) -> Value| {
        let bytes = tokens.iter().flat_map(|token| of(token)["bytes"].as_array().unwrap().clone());
        String::from_utf8(bytes.map(|byte| byte.as_u64().unwrap() as u8).collect()).unwrap()
    };
    assert_eq!(bytes(&|token| token.clone()), "a \u{1F600} b");
    assert_eq!(bytes(&|token| token["top_logprobs"][0].clone()), "a \u{1F600} b");
    assert_eq!(choice["message"]["content"], "a \u{1F600} b");
}

#[test]
fn the_tokenizers_end_ends_a_text() {
    for (config_eos, generation) in [(Value::Null, None), (json!(scripted::END), Some(json!({ "eos_token_id": 256 })))]
    {
        let place = Place::new();
        let checkpoint = place.path("scripted");
        std::fs::create_dir(&checkpoint).unwrap();
        scripted::write(&checkpoint, &[b"Hello", b" world"], CHATML, |config, _| config["eos_token_id"] = config_eos);
        if let Some(generation) = generation {
            std::fs::write(checkpoint.join("generation_config.json"), generation.to_string()).unwrap();
        }
        place.manifest(&checkpoint, 512);
        let generated = place.run("generate m.toml --chat Hi --max-tokens 12 --json").code(0).json();
        assert_eq!((&generated["text"], &generated["stop"]), (&json!("Hello world"), &json!("eos")));
        let server = Server::start_of(place, &checkpoint, 512, "", |_| {});
        let choice = choice(&server, json!({ "max_tokens": 12 }));
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("Hello world"), &json!("stop")));
    }
}

#[test]
fn logits_that_are_no_numbers_end_with_an_error() {
    let place = Place::new();
    let checkpoint = place.path("scripted");
    std::fs::create_dir(&checkpoint).unwrap();
    scripted::write(&checkpoint, &[b"a", b"bb"], CHATML, |_, _| ());
    scripted::spoil(&checkpoint);
    place.manifest(&checkpoint, 64);
    place
        .run("generate m.toml --prompt x")
        .refused(&["tensor `model.norm.weight` has the weight NaN in row 0, column 0"]);
    for options in [
        "--prompt x",
        "--chat x",
        "--prompt x --lookup 2",
        "--prompt x --temperature 1",
        "--prompt x --logprobs 1 --json",
    ] {
        let answer = place.run(&format!("generate m.toml --unchecked --max-tokens 4 {options}"));
        assert!(
            answer.code == 70 && answer.stderr.contains("at least one number above -inf"),
            "{options}: {answer:#?}"
        );
    }
    let mut command = place.command("chat m.toml --unchecked");
    let said = command.write_stdin("Hi\n").assert().code(70);
    assert!(said.get_output().stdout.is_empty());
}

#[test]
fn thinking_is_turned_off_on_the_command_line() {
    let place = Place::new();
    let checkpoint = place.path("scripted");
    std::fs::create_dir(&checkpoint).unwrap();
    let switch = CHATML.replace(
        "assistant\n{% endif %}",
        "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>\n{% else %}<think>\n{% endif %}{% endif %}",
    );
    scripted::write(&checkpoint, &[b"ok"], &switch, |_, _| ());
    place.manifest(&checkpoint, 512);
    let ids = |options: &str| {
        let answer = place.run(&format!("generate m.toml --chat Hi --max-tokens 1 --json {options}")).code(0).json();
        answer["prompt_ids"].as_array().unwrap().len()
    };
    assert_eq!(ids("--no-think"), ids("") + "</think>".len());
    let chat = place.command("chat m.toml --no-think").write_stdin("Hi\n").assert().code(0);
    assert_eq!(String::from_utf8_lossy(&chat.get_output().stdout), "ok\n");
    // A template without the setting does not know what is asked of it; one that cannot think does it anyway.
    scripted::write(&checkpoint, &[b"ok"], &CHATML.replace("{% for m", "{# </think> #}{% for m"), |_, _| ());
    place.run("generate m.toml --chat Hi --no-think").refused(&["reads no `enable_thinking`"]);
}

#[test]
fn offsets_of_an_echo_lead_into_the_text() {
    let server = Server::start("");
    for stream in [false, true] {
        let body = json!({ "prompt": "Once upon a time, 日 fox", "echo": true, "logprobs": 0, "max_tokens": 4, "temperature": 0, "stream": stream });
        let reply = post(server.address, "/v1/completions", &body);
        let events = if stream { reply.events() } else { vec![reply.json()] };
        let (mut text, mut tokens, mut offsets) = (String::new(), vec![], vec![]);
        for choice in events.iter().map(|event| &event["choices"][0]) {
            text += choice["text"].as_str().unwrap();
            tokens.extend(choice["logprobs"]["tokens"].as_array().cloned().unwrap_or_default());
            offsets.extend(choice["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default());
        }
        let characters: Vec<char> = text.chars().collect();
        assert!(tokens.len() > 10 && tokens.len() == offsets.len());
        let mut whole = 0;
        for (token, offset) in tokens.iter().zip(&offsets) {
            let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
            // Special tokens are not in the text, and parts of a character begin where it does.
            if !token.starts_with("<|") && !token.contains('\u{FFFD}') {
                let found: String = characters[offset..].iter().take(token.chars().count()).collect();
                assert_eq!(found, token);
                whole += 1;
            }
        }
        assert!(whole > 8, "{tokens:?}");
    }
}

#[test]
fn cached_tokens_are_a_part_of_the_prompt() {
    let server = Server::start("");
    let long = "Tell me of a fox and a bear who went to the river to fish, and of the boat they built. ".repeat(2);
    let ask = |n: u32| json!({ "prompt": [long, "Once"], "max_tokens": 1, "n": n });
    server.ok("/v1/completions", &ask(1));
    let usage = server.ok("/v1/completions", &ask(4))["usage"].clone();
    let (cached, prompt) = (usage["prompt_tokens_details"]["cached_tokens"].as_u64(), usage["prompt_tokens"].as_u64());
    assert!(cached > Some(0) && cached <= prompt, "{usage}");
}

#[test]
fn a_request_is_answered_under_the_servers_own_name() {
    let server = Server::start("--allow-host box.example --allow-origin https://chat.example");
    let ask = |head: &str| send(server.address, &format!("GET /v1/models HTTP/1.1\r\nConnection: close\r\n{head}\r\n"));
    let port = server.address.port();
    for host in [&format!("localhost:{port}"), "127.0.0.1", "[::1]:80", "box.example:1"] {
        assert_eq!(ask(&format!("Host: {host}\r\n")).status, 200, "{host}");
    }
    assert_eq!(refused(&ask(&format!("Host: pages.example:{port}\r\n")), 403, "")["code"], "host_not_allowed");
    for heads in ["", "Host: localhost\r\nHost: localhost\r\n"] {
        refused(&ask(heads), 400, "");
    }
    let old = send(server.address, "GET /health HTTP/1.0\r\n\r\n");
    assert_eq!(old.status, 200);
    // Pages of other sites.
    let origin = |reply: &Reply| reply.header("access-control-allow-origin").map(str::to_string);
    let allowed = ask("Host: localhost\r\nOrigin: https://chat.example\r\n");
    assert_eq!((allowed.status, origin(&allowed).as_deref()), (200, Some("https://chat.example")));
    assert_eq!(origin(&ask("Host: localhost\r\nOrigin: https://pages.example\r\n")), None);
    let preflight = |origin: &str| {
        let head = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n"
        );
        send(server.address, &request("OPTIONS", CHAT, &head, ""))
    };
    let answer = preflight("https://chat.example");
    assert_eq!((answer.status, answer.header("access-control-allow-methods")), (204, Some("GET, POST")));
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization,content-type"));
    let other = preflight("https://pages.example");
    assert_eq!((other.status, origin(&other)), (405, None));
    assert_eq!(get(server.address, "/health").header("access-control-allow-origin"), None);
}

#[test]
fn what_is_no_plain_json_is_told_what_is_expected() {
    let server = Server::start("");
    let body = r#"{"prompt": "Once", "max_tokens": 1}"#;
    let coded = |coding: &str| {
        let head = format!("Content-Type: application/json\r\nContent-Encoding: {coding}\r\n");
        send(server.address, &request("POST", "/v1/completions", &head, body)).status
    };
    assert_eq!([coded("gzip"), coded("zstd"), coded("identity")], [415, 415, 200]);
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let sent_as = |transfer: &str| {
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
        let request = format!("{head}Transfer-Encoding: {transfer}\r\n\r\n{chunked}");
        send(server.address, &request).status
    };
    assert_eq!([sent_as("gzip, chunked"), sent_as("chunked")], [501, 200]);
    for (more, param, expected) in [
        (json!({ "stop": 5 }), "stop", "expected a text or a list of texts"),
        (
            json!({ "tool_choice": 5 }),
            "tool_choice",
            "expected `none`, `auto`, `required` or an object that names a function",
        ),
        (json!({ "tool_choice": {} }), "tool_choice", "missing field `type`"),
        (json!({ "response_format": 5 }), "response_format", "expected an object"),
        (json!({ "stream": true, "stream_options": 5 }), "stream_options", "expected an object"),
        (json!({ "tools": [5] }), "tools[0]", "expected an object"),
        (json!({ "messages": [5] }), "messages[0]", "expected an object"),
        (json!({ "chat_template_kwargs": 5 }), "chat_template_kwargs", "expected an object"),
        (json!({ "logit_bias": 5 }), "logit_bias", "expected an object"),
    ] {
        let error = refused(&post(server.address, CHAT, &ask(more.clone())), 400, param);
        assert!(error["message"].as_str().unwrap().contains(expected), "{more}: {error}");
    }
    let schema =
        |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } });
    let exact = server.ok(CHAT, &ask(schema(json!({ "const": 9007199254740991u64 }))));
    assert_eq!(exact["choices"][0]["message"]["content"], "9007199254740991");
    let error = refused(
        &post(server.address, CHAT, &ask(schema(json!({ "const": 1234567890123456789u64 })))),
        400,
        "response_format",
    );
    assert!(
        error["message"].as_str().unwrap().contains("the number 1234567890123456789 cannot be kept exactly"),
        "{error}"
    );
}

#[test]
fn a_schema_is_refused_with_the_path_of_its_part_and_a_remedy() {
    let server = answers(&["ok"], TOOLS);
    let schema = |part: Value| {
        json!({ "type": "object", "additionalProperties": false, "required": ["date"],
                "properties": { "name": { "type": "string" }, "date": part } })
    };
    let format =
        |part| ask(json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema(part) } } }));
    for (part, expected) in [
        (
            json!({ "type": "string", "pattern": "^(?!0)[0-9]+$" }),
            "`properties.date.pattern`: look-around, including look-ahead and look-behind, is not supported; write the pattern in another way, or \
             leave it out and check the text yourself",
        ),
        (
            json!({ "type": "array", "items": { "uniqueItems": true, "type": "array" } }),
            "`properties.date.items.uniqueItems`: this keyword is not supported; leave it out, and check the JSON yourself",
        ),
        (
            json!({ "anyOf": [{ "type": "null" }, { "minimum": 5, "maximum": 2, "type": "integer" }], "enum": [3] }),
            "`properties.date.",
        ),
        (json!({ "multipleOf": 0.1 }), "`properties.date.multipleOf`: the number"),
        (
            json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 0.5 }),
            "`properties.date.exclusiveMinimum`: 0 itself cannot be excluded where the other bound is less than 1 away; use `minimum`",
        ),
    ] {
        // The number is written with all its digits.
        let body = format(part.clone()).to_string().replace("\"multipleOf\":0.1", "\"multipleOf\":0.10000000000000001");
        let head = "Content-Type: application/json\r\n";
        let reply = send(server.address, &request("POST", CHAT, head, &body));
        let error = refused(&reply, 400, "response_format");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("`response_format`: {expected}")), "{part}: {message}");
    }
    // The second function is the one that is wrong.
    let tools = |part| json!([tool("v", json!({})), tool("w", schema(part))]);
    let bad = tools(json!({ "type": "string", "pattern": "(a)\\1" }));
    let body = ask(json!({ "tools": bad, "tool_choice": "required" }));
    let error = refused(&post(server.address, CHAT, &body), 400, "tools[1].function.parameters");
    let expected = "`tools[1].function.parameters`: `properties.date.pattern`: backreferences are not supported; write the pattern";
    assert!(error["message"].as_str().unwrap().starts_with(expected), "{error}");
    // Calls in tags hold texts to less.
    let server = answers(&["ok"], XML_TOOLS);
    let body = ask(json!({ "tools": tools(json!({ "type": "string", "format": "date" })), "tool_choice": "required" }));
    let error = refused(&post(server.address, CHAT, &body), 400, "tools[1].function.parameters");
    let expected =
        "`tools[1].function.parameters`: `properties.date.format`: cannot be kept to in the form of this model's calls";
    assert!(error["message"].as_str().unwrap().starts_with(expected), "{error}");
}

#[test]
fn json_that_is_asked_for_is_the_answer_on_its_channel() {
    let read = |text: &Value| serde_json::from_str::<Value>(text.as_str().unwrap()).unwrap();
    let schema = json!({ "type": "object", "properties": { "x": { "const": 1 } }, "required": ["x"], "additionalProperties": false });
    let format = json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } });
    let mut without_a = format.clone();
    without_a["logit_bias"] = json!({ "97": -100 });
    let both = |server: &Server, more: Value| {
        let mut body = ask(more);
        body["max_tokens"] = json!(400);
        let whole = server.ok(CHAT, &body)["choices"][0].clone();
        body["stream"] = json!(true);
        let stream = streamed(&post(server.address, CHAT, &body));
        let thoughts = whole["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(
            (&stream["content"], stream["reasoning_content"].as_str().unwrap()),
            (&whole["message"]["content"], thoughts)
        );
        assert_eq!(whole["finish_reason"], "stop", "{whole}");
        whole["message"].clone()
    };
    // The model would answer with another number.
    let server = answers_in_channels(&["<|channel|>", "final", "<|message|>", "{\"x\": 2", "}", "<|return|>"]);
    assert_eq!(read(&both(&server, format.clone())["content"]), json!({ "x": 1 }));
    assert_eq!(
        read(&both(&server, json!({ "response_format": { "type": "json_object" } }))["content"]),
        json!({ "x": 2 })
    );
    // A model that would answer at once, without a channel. Without the letter `a` it cannot spell `analysis`.
    let server = answers_in_channels(&["{\"x\"", ": 1", "}", "<|return|>"]);
    assert_eq!(read(&both(&server, without_a)["content"]), json!({ "x": 1 }));
    // What a grammar cannot keep to is named here, too.
    let schema = json!({ "properties": { "a": { "type": "string", "pattern": "(?<=a)b" } } });
    let body = ask(json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } }));
    let error = refused(&post(server.address, CHAT, &body), 400, "response_format");
    assert!(
        error["message"].as_str().unwrap().starts_with("`response_format`: `properties.a.pattern`: look-around"),
        "{error}"
    );
}
