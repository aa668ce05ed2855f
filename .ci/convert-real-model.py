"""Writes a Llama checkpoint in fp32 from a GGUF file: convert-real-model.py FILE FOLDER. Needs gguf and numpy.

The values are those of the stored codes. GGUF keeps rows of q and k in pairs of neighbours, and a checkpoint in halves. The tokenizer comes from
the metadata: byte-level BPE, with `tokenizer.ggml.pre` in place of a pre-tokenizer.
"""

import json
import struct
import sys
from pathlib import Path

import numpy
from gguf import GGUFReader, dequantize

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Types of tokens in GGUF that are no part of the merges: control, user-defined.
ADDED = (3, 4)


def config_of(field, tensors):
    """`field`: the value of a key."""
    assert field("general.architecture") == "llama", field("general.architecture")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        # Stored in fp32; the shortest decimal that is nearest to it.
        "rms_norm_eps": float(str(numpy.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def tensor_of(name, values, config):
    """The name and the values of a tensor as a checkpoint has them."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{WHOLE[parts[0]]}.{parts[1]}", values
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(parts[2])
    if heads:
        rows, cols = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
    return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}", values


def write_tensors(path, tensors):
    header, at = {}, 0
    for name, values in tensors:
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors:
            file.write(values.tobytes())


def tokenizer_of(field):
    assert (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")) == ("gpt2", "smollm")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": tokens[i], **flags, "special": types[i] == 3} for i in range(len(tokens)) if types[i] in ADDED]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {name: tokens[field(f"tokenizer.ggml.{key}_token_id")] for name, key in named.items()}
    config["add_bos_token"] = field("tokenizer.ggml.add_bos_token")
    config["chat_template"] = field("tokenizer.chat_template")
    return tokenizer, config


def main():
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(file)
    field = lambda key: reader.fields[key].contents()
    config = config_of(field, {tensor.name for tensor in reader.tensors})
    values = lambda tensor: numpy.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
    write_tensors(
        folder / "model.safetensors", [tensor_of(tensor.name, values(tensor), config) for tensor in reader.tensors]
    )
    tokenizer, tokenizer_config = tokenizer_of(field)
    for name, value in {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


main()
