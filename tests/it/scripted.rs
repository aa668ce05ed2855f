//! Owns checkpoints with a known answer: a list of tokens, each of which leads to the next.
//!
//! The embedding is one-hot, every layer adds nothing, and the head is a shift. The list begins after the newline that ends the prompt of a
//! template, and ends with `<|im_end|>`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

pub const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                          {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
pub const TOOLS: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": \
    {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Writes calls as Qwen3-Coder and Qwen3.5 do.
pub const XML_TOOLS: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n\
    {% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n\
    {{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}\n</parameter>\n\
    {% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Writes channels and calls as gpt-oss does.
const CHANNELS: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{% if m.tool_calls %}\
    {% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
    <|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>\
    {{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
    {% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant\n{% endif %}";
/// Writes calls as templates of Mistral do, as a list or by their names.
pub const MISTRAL: [&str; 2] = [
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] [\
     {% for c in m.tool_calls %}{% if c.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}{{ (c.function | tojson)[:-1] }}, \
     \"id\": \"{{ c.id }}\"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% endif %}{{ '\n' }}{% endfor %}",
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}\
     [TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}",
];
const SPECIAL: [&str; 3] = ["<|end|>", "<|im_start|>", "<|im_end|>"];
pub const END: u32 = 258;

/// The characters that stand for bytes in a byte-level vocabulary.
fn level(bytes: &[u8]) -> String {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others: Vec<u8> = (0..=u8::MAX).filter(|byte| !printable(*byte)).collect();
    let character = |byte: &u8| match others.iter().position(|other| other == byte) {
        Some(at) => char::from_u32(256 + at as u32).unwrap(),
        None => char::from(*byte),
    };
    bytes.iter().map(character).collect()
}

/// Writes a checkpoint that answers with `script`, whose tokens differ from each other. `change` may change `config.json` and
/// `tokenizer_config.json`.
pub fn write(folder: &Path, script: &[&[u8]], template: &str, change: impl FnOnce(&mut Value, &mut Value)) {
    let mut vocab: Map<String, Value> = (0..=u8::MAX).map(|byte| (level(&[byte]), json!(byte))).collect();
    for special in SPECIAL {
        vocab.insert(special.to_string(), json!(vocab.len()));
    }
    let mut ids = vec![usize::from(b'\n')];
    for token in script {
        let (next, text) = (vocab.len(), level(token));
        ids.push(vocab.entry(text).or_insert(json!(next)).as_u64().unwrap() as usize);
    }
    ids.push(END as usize);
    let (rows, hidden) = (vocab.len(), vocab.len().div_ceil(64) * 64);
    let added = SPECIAL.map(|content| {
        json!({ "id": vocab[content], "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    });
    let bytes = |prefix: bool| json!({ "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": prefix });
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": bytes(false), "post_processor": null,
        "decoder": bytes(true),
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                   "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [] },
    });
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "vocab_size": rows, "max_position_embeddings": 512, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "bos_token_id": 256, "eos_token_id": END, "torch_dtype": "float32",
    });
    let mut of_tokenizer = json!({ "bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": template });
    change(&mut config, &mut of_tokenizer);
    for (name, value) in
        [("tokenizer.json", tokenizer), ("config.json", config), ("tokenizer_config.json", of_tokenizer)]
    {
        fs::write(folder.join(name), value.to_string()).unwrap();
    }
    write_weights(folder, rows, hidden, &ids);
}

/// Makes a folder of a checkpoint that answers with `script`, and whose tokens of channels are special ones.
pub fn write_channels(folder: &Path, script: &[&str]) {
    let special = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"];
    let others = special.iter().filter(|token| !script.contains(token));
    let script: Vec<&[u8]> = script.iter().chain(others).map(|token| token.as_bytes()).collect();
    fs::create_dir(folder).unwrap();
    write(folder, &script, CHANNELS, |_, tokenizer| tokenizer["additional_special_tokens"] = json!(special));
}

fn write_weights(folder: &Path, rows: usize, hidden: usize, ids: &[usize]) {
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut put = |name: &str, shape: &[usize], fill: f32, ones: &mut dyn Iterator<Item = (usize, usize)>| {
        let mut values = vec![fill; shape.iter().product()];
        ones.for_each(|(row, column)| values[row * shape[1] + column] = 1.0);
        tensors
            .insert(name.to_string(), (shape.to_vec(), values.iter().flat_map(|value| value.to_le_bytes()).collect()));
    };
    put("model.embed_tokens.weight", &[rows, hidden], 0.0, &mut (0..rows).map(|row| (row, row)));
    put("lm_head.weight", &[rows, hidden], 0.0, &mut ids.windows(2).map(|pair| (pair[1], pair[0])));
    put("model.norm.weight", &[hidden], 1.0, &mut std::iter::empty());
    for (name, shape) in [
        ("self_attn.q_proj", [64, hidden]),
        ("self_attn.k_proj", [32, hidden]),
        ("self_attn.v_proj", [32, hidden]),
        ("self_attn.o_proj", [hidden, 64]),
        ("mlp.gate_proj", [64, hidden]),
        ("mlp.up_proj", [64, hidden]),
        ("mlp.down_proj", [hidden, 64]),
    ] {
        put(&format!("model.layers.0.{name}.weight"), &shape, 0.0, &mut std::iter::empty());
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        put(&format!("model.layers.0.{name}.weight"), &[hidden], 1.0, &mut std::iter::empty());
    }
    let views =
        tensors.iter().map(|(name, (shape, bytes))| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Makes the model's last norm, and with it every logit, no number.
pub fn spoil(folder: &Path) {
    let path = folder.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let at = header + entries["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(path, bytes).unwrap();
}
