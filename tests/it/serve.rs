//! Tests the server over real connections: requests alone, together, and with bad intent.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::cli_support::{Place, copy_program, manifest_text, python_packages, without_packages};
use crate::http_client::{Reply, connect, get, post, receive, request, send};
use crate::support::fixture;

/// A running server, of the small trained model unless a test says otherwise.
pub(crate) struct Server {
    child: Child,
    pub address: SocketAddr,
    pub place: Place,
}

impl Server {
    pub fn start(arguments: &str) -> Server {
        Server::start_with(arguments, |_| {})
    }

    fn start_with(arguments: &str, change: impl FnOnce(&mut Command)) -> Server {
        Server::start_of(Place::new(), &fixture("tinystories-llama"), 256, arguments, change)
    }

    /// The same model with another chat template.
    fn start_with_template(template: &str, arguments: &str) -> Server {
        let place = Place::new();
        let checkpoint = place.checkpoint("tinystories-llama");
        let path = checkpoint.join("tokenizer_config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        config["chat_template"] = json!(template);
        std::fs::write(path, config.to_string()).unwrap();
        Server::start_of(place, &checkpoint, 1024, arguments, |_| {})
    }

    pub fn start_of(
        place: Place,
        checkpoint: &std::path::Path,
        context_max: u32,
        arguments: &str,
        change: impl FnOnce(&mut Command),
    ) -> Server {
        let text = manifest_text(&format!("path:{}", checkpoint.display()), context_max);
        Server::start_of_manifest(place, &text, arguments, change)
    }

    pub(crate) fn start_of_manifest(
        place: Place,
        text: &str,
        arguments: &str,
        change: impl FnOnce(&mut Command),
    ) -> Server {
        place.write("tiny.toml", text);
        Server::start_in(place, "tiny.toml", arguments, change)
    }

    /// Serves the model `tiny`, whose manifest or export is in `place`.
    pub(crate) fn start_in(place: Place, of: &str, arguments: &str, change: impl FnOnce(&mut Command)) -> Server {
        let mut command = place.process(&format!("serve {of} --port 0 {arguments}"));
        change(&mut command);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("serving `tiny` at http://").and_then(|address| address.parse().ok());
        let Some(address) = address else {
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("{line:?}: {said}");
        };
        let server = Server { child, address, place };
        server.until("it is healthy", |server| get(server.address, "/health").status == 200);
        server
    }

    #[track_caller]
    fn until(&self, what: &str, is: impl Fn(&Server) -> bool) {
        let begun = Instant::now();
        while !is(self) {
            assert!(begun.elapsed() < Duration::from_secs(60), "not after a minute: {what}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    pub(crate) fn ok(&self, path: &str, body: &Value) -> Value {
        let reply = post(self.address, path, body);
        assert_eq!(reply.status, 200, "{body}: {reply:?}");
        reply.json()
    }

    #[track_caller]
    fn complete(&self, body: &Value) -> Value {
        self.ok("/v1/completions", body)
    }

    pub fn metric(&self, name: &str) -> f64 {
        let page = get(self.address, "/metrics").body;
        let line = page.lines().find(|line| line.starts_with(&format!("{name}{{model_name=\"tiny\""))).expect(name);
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const PROMPT: &str = "Once upon a time, there was a little fox";

#[track_caller]
pub fn refused(reply: &Reply, status: u16, param: &str) -> Value {
    assert_eq!(reply.status, status, "{reply:?}");
    let error = reply.json()["error"].clone();
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
    assert_eq!(error["param"], if param.is_empty() { Value::Null } else { json!(param) }, "{error}");
    error
}

#[test]
fn a_completion_is_what_generate_prints() {
    let server = Server::start("");
    let generated = server.place.run("generate tiny.toml --prompt Once --max-tokens 24 --json").code(0).json();
    let body = json!({ "model": "tiny", "prompt": "Once", "max_tokens": 24, "temperature": 0 });
    let completed = server.complete(&body);
    assert_eq!(completed["object"], "text_completion");
    assert_eq!(completed["choices"][0]["text"], generated["text"]);
    let ids = generated["ids"].as_array().unwrap();
    let usage = &completed["usage"];
    assert_eq!(usage["completion_tokens"], ids.len());
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"].as_u64().unwrap() + ids.len() as u64);
    // The same prompt as ids, alone and in a list.
    let tokens = server.ok("/tokenize", &json!({ "prompt": "Once" }));
    assert_eq!(tokens["tokens"], generated["prompt_ids"]);
    assert_eq!(tokens["max_model_len"], 256);
    for prompt in [json!(tokens["tokens"]), json!([tokens["tokens"]]), json!(["Once"])] {
        let completed = server.complete(&json!({ "prompt": prompt, "max_tokens": 24, "temperature": 0 }));
        assert_eq!(completed["choices"][0]["text"], generated["text"], "{prompt}");
    }
    // A list: choices in its order.
    let both = server.complete(&json!({ "prompt": ["One day", "Once"], "max_tokens": 24, "temperature": 0, "n": 2 }));
    let texts: Vec<&Value> = both["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!((texts.len(), texts[2], texts[3]), (4, &generated["text"], &generated["text"]));
    assert_ne!(texts[0], texts[2]);
    let text = server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].clone();
    assert_eq!(text, generated["text"]);
    // A repeated prompt is found in the cache: the page is a multiple of 16 tokens.
    let long = PROMPT.repeat(3);
    let first = server.complete(&json!({ "prompt": long, "max_tokens": 4, "temperature": 0 }));
    let again = server.complete(&json!({ "prompt": long, "max_tokens": 4, "temperature": 0 }));
    assert_eq!(first["choices"], again["choices"]);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 16, "{again}");
    assert!(server.metric("vllm:prefix_cache_hits_total") >= 16.0);
}

/// The parts of a stream, put together by choice.
fn texts(reply: &Reply, of: fn(&Value) -> &Value) -> Vec<(String, String)> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut texts: Vec<(String, String)> = vec![];
    for event in reply.events() {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            texts.resize(texts.len().max(index + 1), Default::default());
            texts[index].0.push_str(of(choice).as_str().unwrap_or_default());
            texts[index].1.push_str(choice["finish_reason"].as_str().unwrap_or_default());
        }
    }
    texts
}

#[test]
fn a_stream_is_the_reply_in_parts() {
    let server = Server::start("");
    let ask = |stream: bool| {
        let mut body =
            json!({ "prompt": PROMPT, "max_tokens": 30, "temperature": 0.8, "seed": 11, "n": 3, "stop": "." });
        if stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({ "include_usage": true });
        }
        body
    };
    let whole = server.complete(&ask(false));
    let stream = post(server.address, "/v1/completions", &ask(true));
    assert_eq!(stream.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let expected: Vec<(String, String)> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| {
            (choice["text"].as_str().unwrap().to_string(), choice["finish_reason"].as_str().unwrap().to_string())
        })
        .collect();
    assert_eq!(texts(&stream, |choice| &choice["text"]), expected);
    assert!(expected.iter().all(|(text, _)| !text.contains('.')), "{expected:?}");
    assert!(expected[0].0 != expected[1].0 && expected[1].0 != expected[2].0, "each choice has noise of its own");
    let events = stream.events();
    let last = events.last().unwrap();
    assert_eq!(
        (&last["choices"], &last["usage"]["completion_tokens"]),
        (&json!([]), &whole["usage"]["completion_tokens"])
    );
    assert!(events[..events.len() - 1].iter().all(|event| event["usage"] == Value::Null));

    let chat = json!({ "model": "tiny", "messages": [
        { "role": "system", "content": "You tell stories." },
        { "role": "user", "content": [{ "type": "text", "text": "Tell me of " }, { "type": "text", "text": "a fox." }] },
    ], "max_completion_tokens": 20, "temperature": 0, "logprobs": true, "top_logprobs": 2 });
    // Parts are lines, as with vLLM and llama.cpp.
    let ids = |content: Value| {
        server.ok("/tokenize", &json!({ "messages": [{ "role": "user", "content": content }] }))["tokens"].clone()
    };
    let parts = json!([{ "type": "text", "text": "Tell me of" }, { "type": "text", "text": "a fox." }]);
    assert_eq!(ids(parts), ids(json!("Tell me of\na fox.")));
    let whole = server.ok("/v1/chat/completions", &chat);
    let choice = &whole["choices"][0];
    assert_eq!((&whole["object"], &choice["message"]["role"]), (&json!("chat.completion"), &json!("assistant")));
    let mut streamed = chat.clone();
    streamed["stream"] = json!(true);
    let stream = post(server.address, "/v1/chat/completions", &streamed);
    let (text, reason) = &texts(&stream, |choice| &choice["delta"]["content"])[0];
    assert_eq!((&json!(text), &json!(reason)), (&choice["message"]["content"], &choice["finish_reason"]));
    assert_eq!(stream.events()[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let parts = stream.events();
    let scored = parts
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default());
    assert_eq!(&Value::Array(scored.collect()), &choice["logprobs"]["content"]);
    let entries = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len() as u64, whole["usage"]["completion_tokens"].as_u64().unwrap());
    for entry in entries {
        // Greedy: the token is the most probable one.
        assert_eq!(entry["logprob"], entry["top_logprobs"][0]["logprob"], "{entry}");
        assert_eq!(
            (entry["top_logprobs"].as_array().unwrap().len(), &entry["token"]),
            (2, &entry["top_logprobs"][0]["token"])
        );
    }
}

/// The lists of ids below a name, of each choice of a stream.
fn streamed_ids(reply: &Reply, name: &str) -> Vec<Vec<Value>> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut ids: Vec<Vec<Value>> = vec![];
    for event in reply.events() {
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            ids.resize(ids.len().max(index + 1), vec![]);
            // In a chat the prompt's ids stand beside the choices.
            let list = choice[name].as_array().or_else(|| event[name].as_array()).cloned();
            assert!(list.is_some() || name != "token_ids", "{event}");
            ids[index].extend(list.unwrap_or_default());
        }
    }
    ids
}

#[test]
fn a_reply_has_the_ids_of_its_tokens_where_they_are_asked_for() {
    let server = Server::start("");
    let generated = server.place.run("generate tiny.toml --prompt Once --max-tokens 24 --json").code(0).json();
    let plain = json!({ "prompt": "Once", "max_tokens": 24, "temperature": 0 });
    let completed = server.complete(&plain);
    assert!(completed["choices"][0].get("token_ids").is_none(), "{completed}");
    let with = |body: &Value, stream: bool| {
        let mut body = body.clone();
        (body["return_token_ids"], body["stream"]) = (json!(true), json!(stream));
        body
    };
    let completed = server.complete(&with(&plain, false));
    let choice = &completed["choices"][0];
    assert_eq!((&choice["token_ids"], &choice["prompt_token_ids"]), (&generated["ids"], &generated["prompt_ids"]));
    let stream = post(server.address, "/v1/completions", &with(&plain, true));
    assert_eq!(json!(streamed_ids(&stream, "token_ids")[0]), generated["ids"]);
    assert_eq!(json!(streamed_ids(&stream, "prompt_token_ids")[0]), generated["prompt_ids"]);

    // Two prompts, two choices of each, text that is held back because a stop may begin there, and the prompt echoed in front.
    let many = json!({ "prompt": ["One day", "Once"], "max_tokens": 30, "temperature": 0.8, "seed": 3, "n": 2,
        "stop": "little", "echo": true });
    let whole = server.complete(&with(&many, false));
    let stream = post(server.address, "/v1/completions", &with(&many, true));
    let choices = whole["choices"].as_array().unwrap();
    for name in ["token_ids", "prompt_token_ids"] {
        let expected: Vec<&Value> = choices.iter().map(|choice| &choice[name]).collect();
        assert_eq!(json!(streamed_ids(&stream, name)), json!(expected), "{name}");
    }
    let tokens: usize = choices.iter().map(|choice| choice["token_ids"].as_array().unwrap().len()).sum();
    assert_eq!(whole["usage"]["completion_tokens"], tokens);
    assert_eq!(choices[3]["prompt_token_ids"], generated["prompt_ids"]);
    assert_ne!(choices[0]["prompt_token_ids"], choices[3]["prompt_token_ids"]);

    let chat =
        json!({ "messages": [{ "role": "user", "content": "A fox." }], "max_tokens": 12, "temperature": 0, "n": 2 });
    let whole = server.ok("/v1/chat/completions", &with(&chat, false));
    let prompt = server.ok("/tokenize", &json!({ "messages": chat["messages"] }))["tokens"].clone();
    assert_eq!(whole["prompt_token_ids"], prompt);
    let ids = whole["choices"][0]["token_ids"].clone();
    let detokenized = server.ok("/detokenize", &json!({ "tokens": ids }))["prompt"].clone();
    assert_eq!(detokenized, whole["choices"][0]["message"]["content"]);
    let stream = post(server.address, "/v1/chat/completions", &with(&chat, true));
    assert_eq!(json!(streamed_ids(&stream, "token_ids")), json!([ids, ids]));
    assert_eq!(json!(streamed_ids(&stream, "prompt_token_ids")), json!([prompt, prompt]));
    assert_eq!(stream.events()[0]["prompt_token_ids"], prompt);
}

#[test]
fn a_prompt_is_scored_as_perplexity_scores_it() {
    let server = Server::start("");
    let text = "The little dog ran to the park. He saw a big red ball.";
    server.place.write("text.txt", text);
    let measured = server.place.run("perplexity tiny.toml text.txt --json").code(0).json();
    let body = json!({ "prompt": text, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true });
    let reply = server.complete(&body);
    let choice = &reply["choices"][0];
    let list = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
    let (tokens, own, tops, offsets) =
        (list("tokens"), list("token_logprobs"), list("top_logprobs"), list("text_offset"));
    let count = reply["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!([tokens.len(), own.len(), tops.len(), offsets.len()], [count + 1; 4]);
    assert_eq!((&own[0], &tops[0]), (&Value::Null, &Value::Null));
    assert!(choice["text"].as_str().unwrap().starts_with(text));
    let sum: f64 = own[1..count].iter().map(|value| value.as_f64().unwrap()).sum();
    let perplexity = (-sum / (count - 1) as f64).exp();
    let expected = measured["ppl"].as_f64().unwrap();
    assert!((perplexity / expected - 1.0).abs() < 1e-4, "{perplexity} and {expected}: {measured}");
    for (own, top) in own.iter().zip(&tops).skip(1) {
        let most = top.as_object().unwrap().values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(own.as_f64().unwrap() <= most, "{own} {top}");
    }
    // As ids, in a batch, and after the same prompt left its pages: bit for bit the same.
    let ids = server.ok("/tokenize", &json!({ "prompt": text }))["tokens"].clone();
    let batch = server
        .complete(&json!({ "prompt": [ids, ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true }));
    for at in 0..2 {
        assert_eq!(batch["choices"][at]["logprobs"]["token_logprobs"], choice["logprobs"]["token_logprobs"]);
    }
    let none = server.complete(&json!({ "prompt": text, "max_tokens": 0, "echo": true }));
    assert_eq!((&none["choices"][0]["text"], &none["usage"]["completion_tokens"]), (&json!(text), &json!(0)));
}

#[test]
fn settings_of_a_request_change_its_text() {
    let server = Server::start("");
    let ids = |extra: Value| {
        let mut body = json!({ "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.complete(&body)["choices"][0].clone()
    };
    let plain = ids(json!({}));
    let tokens = |choice: &Value| choice["logprobs"]["tokens"].as_array().unwrap().clone();
    assert_eq!(tokens(&plain).len(), 40);
    let first = tokens(&plain)[0].as_str().unwrap().to_string();
    let first_id =
        server.ok("/tokenize", &json!({ "prompt": first, "add_special_tokens": false }))["tokens"][0].clone();
    let banned = ids(json!({ "logit_bias": { first_id.to_string(): -100 } }));
    assert_ne!(tokens(&banned)[0], tokens(&plain)[0]);
    let stopped = ids(json!({ "stop_token_ids": [first_id] }));
    assert_eq!((tokens(&stopped).len(), &stopped["finish_reason"]), (1, &json!("stop")));
    let later = ids(json!({ "stop_token_ids": [first_id], "min_tokens": 5 }));
    assert!(tokens(&later).len() >= 5 && tokens(&later)[..5].iter().all(|token| *token != json!(first)), "{later}");
    for changes in [
        json!({ "repetition_penalty": 3.0 }),
        json!({ "frequency_penalty": 2.0, "presence_penalty": 2.0 }),
        json!({ "temperature": 1.5, "seed": 3, "top_p": 0.99 }),
        json!({ "temperature": 1.5, "seed": 4, "top_k": 40, "min_p": 0.001 }),
    ] {
        let changed = ids(changes.clone());
        assert_ne!(tokens(&changed), tokens(&plain), "{changes}");
        assert_eq!(tokens(&changed), tokens(&ids(changes)), "the same seed gives the same tokens");
    }
    let until = ids(json!({ "max_tokens": 400, "ignore_eos": true }));
    let prompt = server.ok("/tokenize", &json!({ "prompt": PROMPT }))["count"].as_u64().unwrap() as usize;
    // The context is full: the last token needs no place in it.
    assert_eq!((tokens(&until).len(), &until["finish_reason"]), (256 - prompt + 1, &json!("length")));
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let server = Server::start("");
    let complete = |body: Value| post(server.address, "/v1/completions", &body);
    for (body, param) in [
        (json!({ "prompt": "a", "best_of": 4 }), "best_of"),
        (json!({ "prompt": "a", "suffix": "b" }), "suffix"),
        (json!({ "prompt": "a", "response_format": { "type": "grammar" } }), "response_format"),
        (json!({ "prompt": "a", "guided_json": {} }), "guided_json"),
        (json!({ "prompt": "a", "temperature": -1 }), "temperature"),
        (json!({ "prompt": "a", "top_p": 2 }), "top_p"),
        (json!({ "prompt": "a", "logprobs": 100 }), "logprobs"),
        (json!({ "prompt": { "text": "a" } }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [5000] }), "prompt"),
        (json!({ "prompt": vec![5; 300] }), "prompt"),
        (json!({ "max_tokens": 1 }), "prompt"),
        (json!({ "prompt": "a", "n": 129 }), "n"),
        (json!({ "prompt": "a", "max_tokens": 2, "min_tokens": 3 }), "min_tokens"),
        (json!({ "prompt": "a", "stop_token_ids": [5000] }), "stop_token_ids"),
        (json!({ "prompt": "a", "logit_bias": { "3": 1000 } }), "logit_bias"),
        (json!({ "prompt": "a", "stop": vec!["b"; 17] }), "stop"),
    ] {
        refused(&complete(body), 400, param);
    }
    for (path, what) in [("/v1/completions", "prompt"), ("/tokenize", "prompt"), ("/detokenize", "tokens")] {
        let missing = refused(&post(server.address, path, &json!({ "model": "gpt-4", what: [5] })), 404, "model");
        assert_eq!((&missing["code"], &missing["type"]), (&json!("model_not_found"), &json!("invalid_request_error")));
    }
    let chat = |body: Value| post(server.address, "/v1/chat/completions", &body);
    let user = json!([{ "role": "user", "content": "hi" }]);
    for (body, param) in [
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": user, "tools": [{ "type": "function" }] }), "tools[0].function"),
        (json!({ "messages": user, "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "messages": user, "web_search_options": {} }), "web_search_options"),
        (json!({ "messages": user, "service_tier": "flex" }), "service_tier"),
        (json!({ "messages": user, "reasoning_effort": "much" }), "reasoning_effort"),
        (json!({ "messages": user, "reasoning_effort": "high" }), "reasoning_effort"),
        (json!({ "messages": user, "echo": true }), "echo"),
        (json!({ "messages": user, "chat_template_kwargs": { "enable_thinking": true } }), "chat_template_kwargs"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url" }] }] }),
            "messages[0].content[type=image_url]",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }] }),
            "messages[0].content[type=image_url]",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a", "cache": 1 }] }] }),
            "messages[0].content[type=text].cache",
        ),
        (json!({ "messages": [{ "role": "user", "content": 5 }] }), "messages[0]"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content"),
        (json!({ "messages": [{ "role": "user", "content": "a ".repeat(300) }] }), "messages"),
        (json!({ "messages": [{ "role": "user", "content": "a", "audio": {} }] }), "messages[0]"),
    ] {
        refused(&chat(body), 400, param);
    }
    // Some clients send null for each field that they do not use.
    let unused = json!({
        "audio": null, "functions": null, "metadata": null, "modalities": null, "prediction": null, "reasoning_effort": null,
        "service_tier": null, "store": null, "tools": null, "verbosity": null, "web_search_options": null, "user": null,
        "messages": user, "max_tokens": 1,
    });
    assert_eq!(chat(unused).status, 200);
    let address = server.address;
    refused(&post(address, "/detokenize", &json!({ "tokens": [5000] })), 400, "tokens");
    // The reply has no path of this machine.
    let tool = json!({ "type": "function", "function": { "name": "f" } });
    let shown = refused(&chat(json!({ "messages": user, "tools": [tool] })), 400, "tools");
    assert!(!shown["message"].as_str().unwrap().contains('/'), "{shown}");
    assert_eq!(refused(&post(address, "/v1/embeddings", &json!({ "input": "a" })), 501, "")["code"], "not_implemented");
    refused(&get(address, "/v1/nothing"), 404, "");
    refused(&get(address, "/v1/completions"), 405, "");
    let no_json =
        send(address, &request("POST", "/v1/completions", "Content-Type: text/plain\r\n", r#"{"prompt":"a"}"#));
    refused(&no_json, 415, "");
    for body in ["", "{", "[]", "{\"prompt\": \"\u{0}\"}", "{\"prompt\": \"a\", \"prompt\": \"b\"}", "nul"] {
        let reply = send(address, &request("POST", "/v1/completions", "Content-Type: application/json\r\n", body));
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
    }
    // The server still works after all of them.
    let models = get(address, "/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(256)));
    assert_eq!(get(address, "/v1/models/tiny").json()["id"], "tiny");
    assert_eq!(get(address, "/v1/models/else").status, 404);
    assert_eq!(get(address, "/version").json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(get(address, "/health").status, 200);
}

/// A request that differs from every other one.
fn one_of_many(at: usize) -> Value {
    let prompts = ["Once upon a time", "The dog", "Lily saw a big red ball", "One day, a boy named Tim", "A"];
    // A few are long, so they need pages while others begin and end.
    let (times, tokens) = if at.is_multiple_of(25) { (4, 60) } else { (1, 2 + at % 7) };
    let guided = at % 10 == 7;
    let (tokens, format) = if guided { (20, "json_object") } else { (tokens, "text") };
    json!({
        "prompt": format!("{} {}", prompts[at % prompts.len()].repeat(times), at / 10),
        "max_tokens": tokens,
        "temperature": if at.is_multiple_of(3) { 0.0 } else { 0.9 },
        "seed": at,
        "logprobs": 1,
        "ignore_eos": at.is_multiple_of(2),
        "response_format": { "type": format },
        "stream": true,
    })
}

/// The compared parts of a reply: its text, its reason, and the bits of every log-probability.
fn said(reply: &Reply) -> (Vec<(String, String)>, Vec<Value>) {
    let scored =
        reply.events().iter().map(|event| event["choices"][0]["logprobs"].clone()).filter(|l| !l.is_null()).collect();
    (texts(reply, |choice| &choice["text"]), scored)
}

#[test]
fn two_hundred_streams_at_once_are_each_what_they_are_alone() {
    const STREAMS: usize = 200;
    // The cache is too small for all requests that could run.
    let server = Server::start("--cache-tokens 384 --max-batch 12");
    let alone: Vec<Reply> = (0..STREAMS).map(|at| post(server.address, "/v1/completions", &one_of_many(at))).collect();
    let begin = Barrier::new(STREAMS);
    let together: Vec<Reply> = thread::scope(|scope| {
        let ask = |at| {
            let (begin, address) = (&begin, server.address);
            scope.spawn(move || {
                begin.wait();
                post(address, "/v1/completions", &one_of_many(at))
            })
        };
        let threads: Vec<_> = (0..STREAMS).map(ask).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (at, (alone, together)) in alone.iter().zip(&together).enumerate() {
        assert_eq!(said(together), said(alone), "stream {at}");
    }
    assert_eq!((server.metric("vllm:num_requests_running"), server.metric("vllm:num_requests_waiting")), (0.0, 0.0));
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count") as usize, 2 * STREAMS);
}

fn animal() -> Value {
    json!({ "type": "json_schema", "json_schema": { "name": "animal", "strict": true, "schema": {
        "type": "object",
        "properties": {
            "kind": { "enum": ["fox", "dog"] },
            "age": { "type": "integer", "minimum": 0, "maximum": 99 },
            "name": { "type": "string", "maxLength": 9 },
            "happy": { "type": "boolean" },
        },
        "required": ["kind", "age", "name", "happy"],
        "additionalProperties": false,
    } } })
}

#[track_caller]
fn is_animal(text: &Value) {
    let animal: Value = serde_json::from_str(text.as_str().unwrap()).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert_eq!(animal.as_object().unwrap().len(), 4, "{animal}");
    assert!(["fox", "dog"].contains(&animal["kind"].as_str().unwrap()) && animal["happy"].is_boolean(), "{animal}");
    assert!(animal["age"].as_u64().unwrap() <= 99, "{animal}");
    assert!(animal["name"].as_str().unwrap().chars().count() <= 9, "{animal}");
}

#[test]
fn a_text_is_json_of_its_schema() {
    // This model fills every white space that JSON may have.
    let server = Server::start_of(Place::new(), &fixture("tinystories-llama"), 1024, "", |_| {});
    let chat = json!({
        "messages": [{ "role": "user", "content": "Tell me of an animal." }], "response_format": animal(), "n": 3,
        "seed": 5, "max_tokens": 900, "logprobs": true, "top_logprobs": 1,
    });
    let whole = server.ok("/v1/chat/completions", &chat);
    let choices = whole["choices"].as_array().unwrap();
    for choice in choices {
        is_animal(&choice["message"]["content"]);
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        let tokens = choice["logprobs"]["content"].as_array().unwrap().iter();
        let text: String = tokens.map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(choice["message"]["content"], text);
    }
    assert_ne!(choices[0]["message"], choices[1]["message"]);
    let mut streamed = chat.clone();
    streamed["stream"] = json!(true);
    let stream = texts(&post(server.address, "/v1/chat/completions", &streamed), |choice| &choice["delta"]["content"]);
    for ((text, reason), choice) in stream.iter().zip(choices) {
        assert_eq!((&json!(text), &json!(reason)), (&choice["message"]["content"], &choice["finish_reason"]));
    }
    let completion = json!({ "prompt": PROMPT, "max_tokens": 900, "temperature": 0, "response_format": animal() });
    is_animal(&server.complete(&completion)["choices"][0]["text"]);
    // Any object, and a text that is cut.
    let any = server.complete(&json!({
        "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "response_format": { "type": "json_object" }
    }));
    assert!(any["choices"][0]["text"].as_str().unwrap().starts_with('{'), "{any}");
    assert_eq!(any["choices"][0]["finish_reason"], "length");
    // A text that could continue ends when the model ends it.
    let number = json!({ "type": "json_schema", "json_schema": { "schema": { "enum": [1, 12, 123] } } });
    let body = json!({ "prompt": PROMPT, "max_tokens": 9, "seed": 1, "response_format": number });
    let text = server.complete(&body)["choices"][0]["text"].clone();
    assert!(["1", "12", "123"].contains(&text.as_str().unwrap().trim()), "{text}");
    for schema in [
        json!({ "type": "array", "uniqueItems": true }),
        json!({ "type": "string", "format": "poem" }),
        json!({ "enum": ["x".repeat(70_000)] }),
        json!({ "type": "string", "pattern": "(" }),
    ] {
        let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
        let body = json!({ "prompt": "a", "response_format": format });
        let reply = post(server.address, "/v1/completions", &body);
        refused(&reply, 400, "response_format");
    }
    assert_eq!(get(server.address, "/health").status, 200);
}

/// Shows tools, and writes calls, as Qwen's template does.
const TOOL_TEMPLATE: &str = r#"{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for tool_call in message.tool_calls %}{%- set call = tool_call.function %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

fn tools() -> Value {
    let schema = json!({
        "type": "object", "properties": { "animal": { "enum": ["fox", "dog"] }, "loud": { "type": "boolean" } },
        "required": ["animal", "loud"], "additionalProperties": false,
    });
    json!([
        { "type": "function", "function": { "name": "call", "description": "Calls.", "parameters": schema, "strict": true } },
        { "type": "function", "function": { "name": "wait" } },
    ])
}

/// The names of calls, whose arguments fit.
#[track_caller]
fn called(calls: &Value) -> Vec<String> {
    let name = |call: &Value| {
        assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{call}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        match call["function"]["name"].as_str().unwrap() {
            "call" => assert!(arguments["loud"].is_boolean() && arguments.as_object().unwrap().len() == 2, "{call}"),
            "wait" => assert_eq!(arguments, json!({})),
            other => panic!("{other}"),
        }
        call["function"]["name"].as_str().unwrap().to_string()
    };
    calls.as_array().unwrap_or_else(|| panic!("{calls}")).iter().map(name).collect()
}

#[test]
fn tools_are_called_in_the_form_of_the_template() {
    let server = Server::start_with_template(TOOL_TEMPLATE, "");
    let user = json!({ "role": "user", "content": "Call the fox." });
    let ask = |choice: Value| {
        json!({
            "messages": [user], "tools": tools(), "tool_choice": choice, "parallel_tool_calls": false, "n": 3, "seed": 4,
            "max_tokens": 600,
        })
    };
    let whole = server.ok("/v1/chat/completions", &ask(json!("required")));
    let mut names = vec![];
    for choice in whole["choices"].as_array().unwrap() {
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&Value::Null, &json!("tool_calls")));
        names.push(called(&choice["message"]["tool_calls"]));
    }
    let mut streamed = ask(json!("required"));
    streamed["stream"] = json!(true);
    let stream = post(server.address, "/v1/chat/completions", &streamed);
    let mut found: Vec<Vec<String>> = vec![vec![]; 3];
    for event in stream.events() {
        for choice in event["choices"].as_array().unwrap() {
            let calls = &choice["delta"]["tool_calls"];
            if !calls.is_null() {
                let of = &mut found[choice["index"].as_u64().unwrap() as usize];
                assert_eq!(calls[0]["index"], of.len());
                of.extend(called(calls));
            }
        }
    }
    assert_eq!(found, names);
    // One function, once.
    let named = ask(json!({ "type": "function", "function": { "name": "wait" } }));
    for choice in server.ok("/v1/chat/completions", &named)["choices"].as_array().unwrap() {
        assert_eq!(
            (called(&choice["message"]["tool_calls"]), &choice["finish_reason"]),
            (vec!["wait".to_string()], &json!("stop"))
        );
    }
    // The result of the call is sent back, and the model sees the whole conversation. It need not call a function again.
    let answer = whole["choices"][0]["message"].clone();
    let id = answer["tool_calls"][0]["id"].clone();
    let result = json!({ "role": "tool", "tool_call_id": id, "content": "It came." });
    let mut free = tools();
    free[0]["function"].as_object_mut().unwrap().remove("strict");
    // A strict function may be left alone, too.
    let strict = json!({ "messages": [user], "tools": tools(), "max_tokens": 12, "temperature": 0 });
    let reply = server.ok("/v1/chat/completions", &strict);
    assert!(reply["choices"][0]["message"]["content"].is_string(), "{reply}");
    let more = json!({ "messages": [user, answer, result], "tools": free, "max_tokens": 12, "temperature": 0 });
    let reply = server.ok("/v1/chat/completions", &more);
    assert!(reply["choices"][0]["message"]["content"].is_string(), "{reply}");
    assert!(reply["usage"]["prompt_tokens"].as_u64() > whole["usage"]["prompt_tokens"].as_u64());
    // With `none`, the model is offered no functions.
    let none = server.ok(
        "/v1/chat/completions",
        &json!({ "messages": [user], "tools": tools(), "tool_choice": "none", "max_tokens": 2 }),
    );
    let without = server.ok("/v1/chat/completions", &json!({ "messages": [user], "max_tokens": 2 }));
    assert_eq!(none["usage"]["prompt_tokens"], without["usage"]["prompt_tokens"]);
    for (field, value) in [
        ("ignore_eos", json!({ "ignore_eos": true })),
        ("response_format", json!({ "response_format": { "type": "json_object" }, "tools": free })),
        ("skip_special_tokens", json!({ "skip_special_tokens": false, "tools": free })),
        ("min_tokens", json!({ "min_tokens": 3, "tool_choice": "required" })),
    ] {
        let mut body = json!({ "messages": [user], "tools": tools() });
        body.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        refused(&post(server.address, "/v1/chat/completions", &body), 400, field);
    }
    let mut long = free.clone();
    long[0]["function"]["description"] = json!("a".repeat(100 << 10));
    let refusal = post(server.address, "/v1/chat/completions", &json!({ "messages": [user], "tools": long }));
    assert_eq!(refused(&refusal, 400, "tools")["code"], "context_length_exceeded");
    let plain = Server::start("");
    let refusal = post(plain.address, "/v1/chat/completions", &json!({ "messages": [user], "tools": free }));
    assert_eq!(refused(&refusal, 400, "tools")["code"], "unsupported_parameter");
}

#[test]
fn a_client_that_disconnects_leaves_nothing() {
    let server = Server::start("--max-batch 2 --max-waiting 3");
    let long = json!({ "prompt": PROMPT, "max_tokens": 200, "ignore_eos": true, "stream": true, "n": 1 });
    let begin = || {
        let mut stream = connect(server.address);
        let head = "Content-Type: application/json\r\n";
        stream.write_all(request("POST", "/v1/completions", head, &long.to_string()).as_bytes()).unwrap();
        stream
    };
    let streams: Vec<_> = (0..5).map(|_| begin()).collect();
    server.until("they run and wait", |server| {
        server.metric("vllm:num_requests_running") == 2.0 && server.metric("vllm:num_requests_waiting") == 3.0
    });
    let busy = post(server.address, "/v1/completions", &long);
    let error = refused(&busy, 429, "");
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("server_busy")));
    assert!(busy.header("retry-after").is_some());
    drop(streams);
    server.until("nothing runs", |server| {
        server.metric("vllm:num_requests_running") == 0.0 && server.metric("vllm:num_requests_waiting") == 0.0
    });
    assert!(server.metric("vllm:generation_tokens_total") < 800.0);
    assert_eq!(server.complete(&json!({ "prompt": PROMPT, "max_tokens": 2 }))["usage"]["completion_tokens"], 2);
}

#[test]
fn bad_clients_do_no_harm() {
    let server = Server::start("");
    let address = server.address;
    // Connections that send nothing, and some that send a little.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(maximum.map_or(4096, |most| most.min(4096))), maximum });
    let idle: Vec<_> = (0..1000).map(|_| connect(address)).collect();
    let slow: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{").unwrap();
            stream
        })
        .collect();
    assert_eq!(server.complete(&json!({ "prompt": PROMPT, "max_tokens": 2 }))["usage"]["completion_tokens"], 2);
    drop((idle, slow));
    let large = send(
        address,
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n",
    );
    assert_eq!(refused(&large, 413, "")["code"], "request_too_large");
    let many: String = (0..200).map(|i| format!("X-{i}: y\r\n")).collect();
    assert_eq!(send(address, &request("GET", "/health", &many, "")).status, 431);
    assert_eq!(send(address, &request("GET", "/health", &format!("X: {}\r\n", "y".repeat(1 << 20)), "")).status, 431);
    // A head of exactly 64 KiB is read, one that has a byte more is not.
    let head = |bytes: usize| {
        let without = request("GET", "/health", "X: \r\n", "").len();
        send(address, &request("GET", "/health", &format!("X: {}\r\n", "y".repeat(bytes - without)), ""))
    };
    assert_eq!(head(64 << 10).status, 200);
    assert_eq!(refused(&head((64 << 10) + 1), 431, "")["code"], "request_too_large");
    assert_eq!(send(address, "what is this\r\n\r\n").status, 400);
    // Deep or endless JSON is refused before it is parsed completely.
    let json =
        |body: &str| send(address, &request("POST", "/v1/completions", "Content-Type: application/json\r\n", body));
    assert_eq!(json(&format!("{{\"prompt\": {}", "[".repeat(1 << 20))).status, 400);
    assert_eq!(json(&format!("{{\"prompt\": {}1{}}}", "[".repeat(1000), "]".repeat(1000))).status, 400);
    let ids = format!("{{\"prompt\": [{}1]}}", "1,".repeat(1 << 20));
    assert_eq!(refused(&json(&ids), 400, "prompt")["code"], "context_length_exceeded");
    // Texts and lists that a tokenizer would need minutes for are refused before it is asked.
    let began = Instant::now();
    let text = format!("{{\"prompt\": \"{}\"}}", "a".repeat(15 << 20));
    assert_eq!(refused(&json(&text), 400, "prompt")["code"], "context_length_exceeded");
    let words = "\"once upon a time\",".repeat(3000);
    refused(&json(&format!("{{\"prompt\": [{words} \"\"]}}")), 400, "n");
    refused(&json(&format!("{{\"prompt\": [{}\"\"]}}", "\"\",".repeat(1 << 20))), 400, "prompt");
    refused(&json(&format!("{{\"prompt\": \"a\", \"stop\": [{}\"b\"]}}", "\"b\",".repeat(1 << 20))), 400, "stop");
    let message = json!({ "messages": [{ "role": "user", "content": "a".repeat(1 << 20) }] });
    refused(&post(address, "/v1/chat/completions", &message), 400, "messages");
    refused(&post(address, "/tokenize", &message), 400, "messages");
    refused(&post(address, "/tokenize", &json!({ "prompt": "a".repeat(2 << 20) })), 400, "prompt");
    let long = "a".repeat(1 << 20);
    let call =
        json!([{ "type": "function", "function": { "name": "f", "arguments": json!({ "a": long }).to_string() } }]);
    for message in [
        json!({ "role": long, "content": "a" }),
        json!({ "role": "tool", "name": long, "content": "a" }),
        json!({ "role": "tool", "tool_call_id": long, "content": "a" }),
        json!({ "role": "assistant", "tool_calls": call }),
    ] {
        let refusal = post(address, "/v1/chat/completions", &json!({ "messages": [message] }));
        assert_eq!(refused(&refusal, 400, "messages")["code"], "context_length_exceeded");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    // A name that is no UTF-8.
    refused(&get(address, "/v1/models/%ff"), 404, "");
    // A client that stops reading does not stop the others.
    let mut stopped = connect(address);
    let body =
        json!({ "prompt": PROMPT, "max_tokens": 200, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 4 });
    stopped
        .write_all(
            request("POST", "/v1/completions", "Content-Type: application/json\r\n", &body.to_string()).as_bytes(),
        )
        .unwrap();
    assert_eq!(server.complete(&json!({ "prompt": PROMPT, "max_tokens": 2 }))["usage"]["completion_tokens"], 2);
    drop(stopped);
    assert_eq!(get(address, "/health").status, 200);
}

#[test]
fn log_probabilities_take_bounded_memory() {
    let server = Server::start("--max-waiting 4000");
    let ask = |prompts: usize, tokens_max: u32| json!({ "prompt": vec![vec![5]; prompts], "n": 128, "max_tokens": tokens_max, "logprobs": 20, "stream": true, "ignore_eos": true });
    let all = refused(&post(server.address, "/v1/completions", &ask(13, 4000)), 400, "logprobs");
    assert!(all["message"].as_str().unwrap().contains("found up to 8910720"), "{all}");
    let scored = json!({ "prompt": vec![vec![5; 200]; 2000], "echo": true, "logprobs": 20, "max_tokens": 1 });
    refused(&post(server.address, "/v1/completions", &scored), 400, "logprobs");
    // Two that fit alone do not fit together.
    let mut first = connect(server.address);
    let head = "Content-Type: application/json\r\n";
    first.write_all(request("POST", "/v1/completions", head, &ask(10, 4000).to_string()).as_bytes()).unwrap();
    server.until("the first one runs", |server| server.metric("vllm:num_requests_running") > 0.0);
    assert_eq!(refused(&post(server.address, "/v1/completions", &ask(10, 4000)), 429, "")["code"], "server_busy");
    drop(first);
    server.until("there is room again", |server| post(server.address, "/v1/completions", &ask(1, 1)).status == 200);
}

#[test]
fn a_text_does_not_wait_for_a_schema() {
    let server = Server::start("");
    let schema = json!({ "type": "integer", "multipleOf": 999_983 });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
    let body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "response_format": format, "max_tokens": 8 });
    let ask = request("POST", "/v1/chat/completions", "Content-Type: application/json\r\n", &body.to_string());
    let mut schemas: Vec<_> = (0..3).map(|_| connect(server.address)).collect();
    for stream in &mut schemas {
        stream.write_all(ask.as_bytes()).unwrap();
    }
    // Time for the threads of texts to take them, if they do so at all.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(server.complete(&json!({ "prompt": PROMPT, "max_tokens": 2 }))["usage"]["completion_tokens"], 2);
    for stream in &mut schemas {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(
            read,
            Err(std::io::ErrorKind::WouldBlock),
            "a schema that takes seconds came before a text of two tokens"
        );
    }
}

#[test]
fn a_key_is_asked_for_where_there_is_one() {
    let server = Server::start_with("", |command| {
        command.env("MONOBLOC_API_KEY", "sesame");
    });
    let ask = |path: &str, headers: &str| send(server.address, &request("GET", path, headers, ""));
    for headers in ["", "Authorization: Bearer sesamf\r\n", "Authorization: sesame\r\n", "Authorization: Bearer \r\n"] {
        let reply = ask("/v1/models", headers);
        assert_eq!(refused(&reply, 401, "")["code"], "invalid_api_key", "{headers}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    let key = "Authorization: Bearer sesame\r\nContent-Type: application/json\r\n";
    assert_eq!((ask("/v1/models", key).status, ask("/metrics", "").status, ask("/health", "").status), (200, 401, 200));
    let body = r#"{"prompt": "a", "max_tokens": 1}"#;
    let post = |headers: &str| send(server.address, &request("POST", "/v1/completions", headers, body)).status;
    assert_eq!((post(key), post("Content-Type: application/json\r\n")), (200, 401));
}

#[test]
fn a_server_that_is_told_to_end_finishes_first() {
    let mut server = Server::start("--grace-seconds 300");
    let body = json!({ "prompt": PROMPT, "max_tokens": 150, "ignore_eos": true, "stream": true, "temperature": 0 });
    let mut open = connect(server.address);
    open.write_all(
        request("POST", "/v1/completions", "Content-Type: application/json\r\n", &body.to_string()).as_bytes(),
    )
    .unwrap();
    server.until("it runs", |server| server.metric("vllm:num_requests_running") == 1.0);
    server.signal("-TERM");
    let (text, reason) = texts(&receive(open), |choice| &choice["text"]).remove(0);
    assert!(text.len() > 150 && reason == "length", "{text}: {reason}");
    assert!(server.child.wait().unwrap().success());
    assert!(std::net::TcpStream::connect(server.address).is_err());
}

/// The processes that a server has started.
#[cfg(target_os = "linux")]
fn children(server: &Server) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.child.id())).unwrap();
    let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    let listed: String = tasks.map(|task| of(task.unwrap())).collect();
    listed.split_whitespace().map(str::to_string).collect()
}

/// An update of monobloc puts another file in the place of the program.
#[cfg(target_os = "linux")]
#[test]
fn a_server_outlives_the_file_of_its_program() {
    let place = Place::new();
    let program = place.path("program");
    copy_program(&program, "");
    let server = Server::start_of(place, &fixture("tinystories-llama"), 256, "", |command| {
        let mut same = Command::new(&program);
        same.args(command.get_args()).current_dir(command.get_current_dir().unwrap()).stdin(Stdio::null());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => same.env(name, value),
                None => same.env_remove(name),
            };
        }
        *command = same;
    });
    std::fs::remove_file(&program).unwrap();
    let chat = json!({ "messages": [{ "role": "user", "content": "Once" }], "max_tokens": 3 });
    let choice = &server.ok("/v1/chat/completions", &chat)["choices"][0];
    assert!(choice["message"]["content"].is_string(), "{choice}");
    // A tokenizer that died is started again.
    for child in children(&server) {
        assert!(Command::new("kill").args(["-KILL", &child]).status().unwrap().success());
    }
    server.until("it tokenizes again", |server| post(server.address, "/v1/chat/completions", &chat).status == 200);
}

#[cfg(target_os = "linux")]
#[test]
fn a_tokenizer_that_dies_ends_its_requests_only() {
    let server = Server::start("");
    let body = json!({ "prompt": PROMPT, "max_tokens": 150, "ignore_eos": true, "stream": true });
    let mut open = connect(server.address);
    open.write_all(
        request("POST", "/v1/completions", "Content-Type: application/json\r\n", &body.to_string()).as_bytes(),
    )
    .unwrap();
    server.until("it decodes", |server| server.metric("vllm:generation_tokens_total") > 3.0);
    for child in children(&server) {
        assert!(Command::new("kill").args(["-KILL", &child]).status().unwrap().success());
    }
    let reply = receive(open);
    let events = reply.events();
    let error = &events.last().unwrap()["error"];
    assert!(error["message"].as_str().is_some_and(|message| message.contains("tokenizer.json")), "{reply:?}");
    server.until("it answers again", |server| {
        post(server.address, "/v1/completions", &json!({ "prompt": PROMPT, "max_tokens": 2 })).status == 200
    });
}

/// Runs a script of `tests/clients` with these packages.
#[track_caller]
fn run_client(clients: &std::path::Path, script: &str, arguments: &[&str], input: &Value) {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script);
    let mut command = Command::new("python3");
    command.arg(script).args(arguments).env("PYTHONPATH", clients);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The packages, unless this machine has none and may have none.
fn clients_for(test: &str) -> Option<std::path::PathBuf> {
    let folder = python_packages();
    if ["openai", "lm_eval", "llama_benchy"].iter().all(|package| folder.join(package).is_dir()) {
        return Some(folder);
    }
    without_packages(test, "Python clients");
    None
}

#[test]
fn the_openai_package_gets_what_it_expects() {
    let Some(clients) = clients_for("the_openai_package_gets_what_it_expects") else { return };
    let server = Server::start_with("", |command| {
        command.env("MONOBLOC_API_KEY", "sesame");
    });
    let base = format!("http://{}/v1", server.address);
    run_client(&clients, "openai_client.py", &[&base, "tiny", "sesame"], &Value::Null);
}

#[test]
fn lm_eval_scores_what_perplexity_scores() {
    let Some(clients) = clients_for("lm_eval_scores_what_perplexity_scores") else { return };
    let server = Server::start("");
    let stories = std::fs::read_to_string(fixture("tinystories-llama").join("heldout.txt")).unwrap();
    let score = |text: &str| {
        server.place.write("story.txt", text);
        let scored = server.place.run("perplexity tiny.toml story.txt --json").code(0).json();
        let nll = scored["nll"].as_f64().unwrap() * scored["scored"].as_f64().unwrap();
        json!([text, -nll])
    };
    // Texts that fit into one context, because programs divide longer ones differently.
    let scores: Vec<Value> = stories.split("\n\n").take(4).map(score).collect();
    server.place.write("lm-eval/empty", "");
    let folder = server.place.path("lm-eval");
    std::fs::remove_file(folder.join("empty")).unwrap();
    let base = format!("http://{}", server.address);
    run_client(&clients, "lm_eval_client.py", &[&base, "tiny", "256", folder.to_str().unwrap()], &json!(scores));
}

#[test]
fn a_load_generator_gets_every_token() {
    let Some(clients) = clients_for("a_load_generator_gets_every_token") else { return };
    // Its prompts, in the chat template and with its own words around them, have to leave room for the answer.
    let server = Server::start_of(Place::new(), &fixture("tinystories-llama"), 1024, "", |_| {});
    let (base, checkpoint) = (format!("http://{}", server.address), fixture("tinystories-llama"));
    let (book, folder) = (checkpoint.join("heldout.txt"), server.place.path("benchy"));
    std::fs::create_dir(&folder).unwrap();
    let arguments = [&*base, "tiny", checkpoint.to_str().unwrap(), book.to_str().unwrap(), folder.to_str().unwrap()];
    run_client(&clients, "llama_benchy_client.py", &arguments, &Value::Null);
}

#[test]
fn the_page_is_whole_and_asks_for_nothing_else() {
    let server = Server::start_with("", |command| {
        command.env("MONOBLOC_API_KEY", "sesame");
    });
    let page = get(server.address, "/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(page.header("content-security-policy").is_some() && page.body.contains("content=\"default-src 'none';"));
    for other in ["src=", "href=", "@import", "url(", "http:", "https:"] {
        assert!(!page.body.contains(other), "{other}");
    }
}

#[test]
fn the_tokenizer_tells_its_tokens() {
    let server = Server::start_with("", |command| {
        command.env("MONOBLOC_API_KEY", "sesame");
    });
    assert_eq!(get(server.address, "/tokenizer_info").status, 401);
    let headers = "Authorization: Bearer sesame\r\n";
    let info = send(server.address, &request("GET", "/tokenizer_info", headers, "")).json();
    assert_eq!((&info["bos_token"], &info["eos_token"]), (&json!("<|begin_of_text|>"), &json!("<|end_of_text|>")));
    assert!(info["chat_template"].as_str().unwrap().contains("add_generation_prompt"));
}

#[test]
fn each_request_has_a_line_of_the_log() {
    let mut server = Server::start("--log json");
    server.ok(
        "/v1/completions",
        &json!({ "prompt": "Once upon", "max_tokens": 5, "temperature": 0, "ignore_eos": true }),
    );
    assert_eq!(post(server.address, "/v1/completions", &json!({ "prompt": 3.5 })).status, 400);
    server.ok("/tokenize", &json!({ "prompt": "Once" }));
    server.signal("-TERM");
    let mut said = String::new();
    server.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(server.child.wait().unwrap().code(), Some(0), "{said}");
    let entries = said.lines().filter(|line| line.starts_with('{'));
    let entries: Vec<Value> = entries.map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |path: &str| entries.iter().filter(move |entry| entry["path"] == path).collect::<Vec<_>>();
    let [done, refused] = of("/v1/completions")[..] else { panic!("{said}") };
    assert_eq!(
        (&done["status"], &done["completion_tokens"], &done["complete"]),
        (&json!(200), &json!(5), &json!(true))
    );
    assert!(done["prompt_tokens"].as_u64().unwrap() > 1 && done["took_s"].as_f64().unwrap() > 0.0, "{done}");
    assert_eq!(refused["status"], 400);
    assert!(refused["error"].as_str().unwrap().contains("`prompt`"), "{refused}");
    assert_eq!(of("/tokenize")[0]["prompt_tokens"], Value::Null);
    assert!(said.contains("ready after "), "{said}");
    let last = said.lines().last().unwrap();
    assert!(
        last.starts_with("served 1 text in ") && last.ends_with(", 5 tokens generated; 1 request refused"),
        "{last}"
    );
}

#[test]
fn the_page_reads_no_html_of_a_model() {
    let server = Server::start("");
    let page = get(server.address, "/").body;
    for way in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function("] {
        assert!(!page.contains(way), "{way}");
    }
    assert!(page.contains("markdown(said)") && page.contains("id=\"temperature\""));
    assert!(page.contains("delta.reasoning_content") && page.contains("The answer is empty."));
}
