"""Compares the experts of src/pipeline/torch_decode.py with a loop over pairs of a row and an expert, in fp64; run by tests/it/bench.rs.

Prints a line for each case: its name and the relative error. Needs torch, no GPU.
"""

import importlib.util
import sys

import torch

spec = importlib.util.spec_from_file_location("torch_decode", sys.argv[1])
decode = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decode)
torch.set_grad_enabled(False)

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "num_experts_per_tok": 2,
}
CASES = {
    "qwen3": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 32},
    "shared": {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "shared_expert_intermediate_size": 64},
    "sigmoid": {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "attention_bias": True},
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def values(held):
    """The matrices of all experts, by the definition of their format."""
    codes, scales = held
    if scales is None:
        return codes.double()
    table = torch.tensor(E2M1 + [-value for value in E2M1], dtype=torch.float64)
    pairs = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)
    return (pairs * torch.exp2(scales.double() - 127)).flatten(-2)


def mixture(model, layer, x):
    """The sum over the chosen experts and the shared one, row by row."""
    experts = model.shape.experts
    up, down = values(layer["up_of"]), values(layer["down_of"])
    scores = torch.nn.functional.linear(x, layer["router"], layer.get("router_bias")).double()
    scores = torch.sigmoid(scores) if experts.sigmoid else scores
    out = model.mlp(layer, x).double() if experts.shared else torch.zeros(x.shape, dtype=torch.float64)
    if experts.shared_gate:
        out *= torch.sigmoid(torch.nn.functional.linear(x, layer["shared_gate"])).double()
    for row in range(x.shape[0]):
        chosen = sorted(range(experts.count), key=lambda expert: -scores[row, expert])[: experts.top_k]
        weights = scores[row, chosen]
        weights = weights / weights.sum() if experts.sigmoid else torch.softmax(weights, 0)
        for weight, expert in zip(weights, chosen):
            h = up[expert] @ x[row].double()
            if "up_bias" in layer:
                h = h + layer["up_bias"][expert].double()
            y = down[expert] @ model.activate(h)
            if "down_bias" in layer:
                y = y + layer["down_bias"][expert].double()
            out[row] += weight * y
    return out


for name, config in CASES.items():
    shape = decode.Shape({**COMMON, **config})
    for coded in (False, True):
        # Two rows are gathered; twelve have more pairs than there are experts, so they are grouped.
        for tokens in (1, 2, 12):
            torch.manual_seed(tokens)
            model = decode.Model(torch, shape, tokens, 5, "cpu", torch.float32, tokens, coded)
            layer = model.layers[-1]
            for bias in ("router_bias", "up_bias", "down_bias"):
                if bias in layer:
                    layer[bias].normal_()
            x = torch.randn(tokens, shape.hidden)
            expected = mixture(model, layer, x)
            for model.fuses in (False, True):
                error = (model.mixture(layer, x).double() - expected).norm() / expected.norm()
                form = "grouped" if not model.gathers else "fused" if model.fuses else "gathered"
                print(f"{name} {'mxfp4' if model.coded else 'plain'} {form} {tokens} {error:.1e}")
