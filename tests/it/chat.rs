//! Tests `monobloc chat`, driven line by line by a program.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::cli_support::{Answer, Place};
use crate::scripted::write_channels;
use crate::skipped;
use crate::support::fixture;

fn place(context_max: u32) -> Place {
    let place = Place::new();
    place.manifest(&fixture("tinystories-llama"), context_max);
    place
}

fn chat(place: &Place, options: &str, lines: &str) -> Answer {
    Answer::of(place.command(&format!("chat m.toml {options}")).write_stdin(lines))
}

fn messages(place: &Place, file: &str) -> Vec<(String, String)> {
    let saved: Value = serde_json::from_slice(&fs::read(place.path(file)).unwrap()).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_string();
    saved["messages"].as_array().unwrap().iter().map(|m| (text(&m["role"]), text(&m["content"]))).collect()
}

/// New tokens and all tokens of each prompt, from the status lines.
fn decoded(answer: &Answer) -> Vec<(usize, usize)> {
    let line = |line: &str| {
        let (before, _) = line.split_once(" prompt tokens decoded in ")?;
        let (new, all) = before.rsplit_once("; ")?.1.split_once(" of ")?;
        Some((new.parse().ok()?, all.parse().ok()?))
    };
    answer.stderr.lines().filter_map(line).collect()
}

/// As `serve` does, thoughts are apart from the answer, and the history has the answer.
#[test]
fn channels_are_thoughts_and_an_answer() {
    let place = Place::new();
    let thought = ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>"];
    let answer = ["assistant<|channel|>final<|message|>Fo", "ur", "<|return|>"];
    write_channels(&place.path("scripted"), &[&thought[..], &answer].concat());
    let shown = "<think>\nHm.\n</think>\n\nFour\n";
    let run = |arguments: &str| Answer::of(place.command(arguments).write_stdin("Hi\n/save c.json\n")).code(0);
    assert_eq!(run("chat scripted").stdout, shown);
    let saved: Value = serde_json::from_slice(&fs::read(place.path("c.json")).unwrap()).unwrap();
    let said = &saved["messages"][1];
    assert_eq!((&said["content"], &said["reasoning_content"]), (&json!("Four"), &json!("Hm.")));
    assert_eq!(run("generate scripted --chat Hi").stdout, shown);
    assert!(run("generate scripted --chat Hi --ignore-eos").stdout.starts_with("<|channel|>analysis<|message|>Hm."));
}

#[test]
fn a_conversation_has_turns_and_decodes_only_what_is_new() {
    let place = place(512);
    let question = "Tell me a story about a blue kite.";
    let lines = format!("{question}\n\nAnd another one?\n/save c.json\n/reset\n{question}\n/save d.json\n");
    let answer = chat(&place, "", &lines).code(0);
    let said = messages(&place, "c.json");
    let roles: Vec<&str> = said.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!((said[0].1.as_str(), said[2].1.as_str()), (question, "And another one?"));
    let forgotten = messages(&place, "d.json");
    assert_eq!(forgotten, said[..2], "after a reset, the same question has the same answer");
    assert_eq!(answer.stdout, format!("{}\n{}\n{}\n", said[1].1, said[3].1, said[1].1));

    // The first answer is that of `generate`, and the second turn decodes its own message alone.
    let alone = Answer::of(place.command("generate m.toml --max-tokens 512 --chat").arg(question)).code(0);
    assert_eq!(alone.stdout, format!("{}\n", said[1].1));
    let decoded = decoded(&answer);
    let [first, second, third] = decoded[..] else { panic!("{answer:#?}") };
    assert_eq!(first.0, first.1);
    assert!(second.1 > first.1 + 20 && second.0 < 40, "{answer:#?}");
    assert_eq!(third, (1, first.1), "all but the last token is in the cache");
    assert!(answer.stderr.contains(" of 512 tokens used, ") && answer.stderr.contains(" tokens/s"), "{answer:#?}");
}

#[test]
fn a_template_that_changes_what_was_said_costs_time_and_no_correctness() {
    let place = Place::new();
    let checkpoint = place.checkpoint("tinystories-llama");
    // This template keeps only the first word of earlier answers, and has a place for the system prompt.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}: {% if m.role == 'assistant' %}{{ m.content.split(' ')[0] }}\
                    {% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}<|im_start|>assistant: ";
    fs::write(checkpoint.join("chat_template.jinja"), template).unwrap();
    place.manifest(&checkpoint, 512);
    let options = "--system Short. --max-tokens 12";
    let answer = chat(&place, options, "One day\nA fox\n/save c.json\n").code(0);
    let said = messages(&place, "c.json");
    assert_eq!(said[0], ("system".to_string(), "Short.".to_string()));
    let decoded = decoded(&answer);
    assert!(decoded.len() == 2 && decoded[1].0 < decoded[1].1, "the beginning is still there: {answer:#?}");
    // The same prompt, as plain text in a separate process.
    let word = said[2].1.split(' ').next().unwrap();
    let text = format!(
        "<|im_start|>system: Short.<|im_end|><|im_start|>user: One day<|im_end|><|im_start|>assistant: {word}<|im_end|>\
         <|im_start|>user: A fox<|im_end|><|im_start|>assistant: "
    );
    let alone = Answer::of(place.command("generate m.toml --max-tokens 12 --raw --prompt").arg(text)).code(0);
    assert_eq!(alone.stdout, format!("{}\n", said[4].1));
}

#[test]
fn what_cannot_be_answered_is_refused_by_name() {
    let place = place(64);
    chat(&place, "", "/nope\n").refused(&["no such command: `/nope`", "/help"]);
    chat(&place, "", "/save\n").refused(&["expected `/save FILE`"]);
    chat(&place, "", "/save m.toml\n").refused(&["`m.toml` exists"]);
    let long = format!("{}\n", "a kite and ".repeat(60));
    chat(&place, "", &long).refused(&["`context_max` is 64", "/reset"]);
    let full = chat(&place, "", "Tell me a story about a kite.\n").code(0).stderr;
    assert!(full.contains("the context is full") && full.contains("64 of 64 tokens used, 0 left"), "{full}");
    chat(&place, "--temperature -1", "").refused(&["temperature"]);
    assert!(chat(&place, "", "/help\n/quit\nnot read\n").code(0).stderr.contains("/save FILE"));
    assert_eq!(chat(&place, "", "").code(0).stdout, "");
    let bare = Place::new();
    bare.manifest(&fixture("families/llama-gqa"), 64);
    chat(&bare, "", "Hello\n").refused(&["tokenizer.json", "`monobloc generate --ids` needs none"]);
}

#[test]
fn lines_typed_on_a_terminal_are_kept_for_the_next_chat() {
    let name = "lines_typed_on_a_terminal_are_kept_for_the_next_chat";
    let has_script = Command::new("script").arg("--version").output().is_ok_and(|output| output.status.success());
    if !has_script {
        return skipped(name, "script", "`script` of util-linux gives a command a terminal");
    }
    let place = place(64);
    let typed = |lines: &[&str]| {
        let line = format!("{} chat m.toml", env!("CARGO_BIN_EXE_monobloc"));
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(place.path("")).env("TERM", "xterm");
        command.env("MONOBLOC_CACHE_DIR", "cache").env("XDG_STATE_HOME", place.path("state"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut seen = vec![];
        for line in lines {
            // The editor shows its prompt before it reads.
            let shown = seen.len();
            while !String::from_utf8_lossy(&seen[shown..]).contains("> ") {
                let mut byte = [0];
                stdout.read_exact(&mut byte).unwrap();
                seen.push(byte[0]);
            }
            stdin.write_all(line.as_bytes()).unwrap();
        }
        drop(stdin);
        stdout.read_to_end(&mut seen).unwrap();
        assert!(child.wait().unwrap().success());
        String::from_utf8_lossy(&seen).into_owned()
    };
    assert!(typed(&["/help\r", "/nope\r", "/quit\r"]).contains("no such command: `/nope`"), "a person types on");
    let kept = fs::read_to_string(place.path("state/monobloc/chat-history")).unwrap();
    assert!(["/help", "/nope", "/quit"].iter().all(|line| kept.lines().any(|kept| kept == *line)), "{kept}");
    // The key for the previous line, three times: `/help`; then once: `/quit`.
    assert!(typed(&["\x1b[A\x1b[A\x1b[A\r", "/quit\r"]).contains("/save FILE"));
}

#[test]
fn an_interrupt_stops_the_answer_and_not_the_chat() {
    let place = place(2048);
    place.run("build m.toml").code(0);
    // Long enough to be interrupted, with any answer of the model.
    let mut child = place
        .process("chat m.toml --min-tokens 1900 --max-tokens 1900")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut wait_for = |words: &str| {
        let mut line = String::new();
        while !line.contains(words) {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "expected `{words}`");
        }
    };
    let interrupt = format!("kill -INT {}", child.id());
    for (turn, question) in ["Tell me a story.", "And another one."].into_iter().enumerate() {
        writeln!(stdin, "{question}").unwrap();
        let mut first = [0];
        stdout.read_exact(&mut first).unwrap();
        assert!(Command::new("sh").args(["-c", &interrupt]).status().unwrap().success());
        wait_for(", stopped; ");
        let file = format!("{turn}.json");
        writeln!(stdin, "/save {file}").unwrap();
        wait_for("wrote ");
        // The text until the interrupt is a part of the conversation, and is all that was printed.
        let said = messages(&place, &file);
        let (role, answer) = said.last().unwrap();
        assert_eq!((said.len(), role.as_str()), (2 * turn + 2, "assistant"));
        assert!(answer.len() < 6000, "{answer}");
        let mut rest = vec![0; answer.len()];
        stdout.read_exact(&mut rest).unwrap();
        assert_eq!([&first[..], &rest[..]].concat(), format!("{answer}\n").as_bytes());
    }
    drop(stdin);
    let mut rest = vec![];
    stdout.read_to_end(&mut rest).unwrap();
    assert_eq!((child.wait().unwrap().code(), rest.len()), (Some(0), 0));
}
