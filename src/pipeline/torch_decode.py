"""PyTorch's decode step, or its pass over a prompt, at the shapes of a config.json: the baseline `torch` of `monobloc bench`.

It answers questions on stdin, one JSON object a line, as docs/bench.md describes. A variant is an implementation and how
it is run; each is captured in one CUDA graph, so that no launch is paid for by the host:

    eager     the step below, operator by operator
    compile   the same step through torch.compile, max-autotune, the whole graph
    hf-eager, hf-compile
              transformers' own model of that config with a static cache, run in the same two ways; only where the step
              below does not know the architecture

Weights are random: the time depends on shapes and bytes. The step has nothing that a fair baseline would not have: fused qkv
and gate/up matrices, a preallocated cache of exactly the history, no dropout, no masks, arg-max at the end. A step of several
rows is one token of as many sequences, all at one position. A pass over a prompt is all its tokens at once, causal attention
(flash attention where the layer has neither a window nor a softcap), keys and values stored in the cache, and the head for the
last token alone.

Mixtures of experts have the same step, with a router, the chosen experts and a shared one. Experts are computed in one of two ways:

    gathered  for up to as many pairs of a row and an expert as there are experts: each pair reads its expert where it lies. Compiled,
              that is one fused kernel for each matrix, which reads every byte once and writes only its results
    grouped   for more pairs: rows are ordered by expert, then torch's grouped product

`compile` compiles one layer and runs it for each, because a graph of 48 layers takes minutes, and tunes with at most `CONFIGS_MAX`
configurations a product and without a descent over coordinates: a comparison takes less than two minutes. Experts in mxfp4 are decoded
in the fused kernel; grouped, they are bf16. Not modelled: groups of experts, scales of weights, partial rotation, norms over whole
projections of q and k (they are norms of heads), multipliers of Granite. A sink is one more row of the cache, a key of zeros, and a
prompt leaves it out. Which experts are chosen follows from random weights, so it is nearly uniform.

For a look without monobloc:  python3 torch_decode.py CONFIG.json WORK[,WORK] [VARIANT,...] [dtype]
where WORK is a position, ROWSxPOSITION, or a prompt's length as p512. EXPERTS=mxfp4 sets the format of experts.
"""

import json
import os
import sys
import time

STEPS_WARM = 3
# Configurations of a matrix product that are tried for a mixture: four products of a layer and the head.
CONFIGS_MAX = 8


class Refusal(Exception):
    """What is wrong, for the other side."""


# ---- the model ------------------------------------------------------------------------------------------------------

# Families whose layers are the step below; the rest is transformers' business.
PLAIN = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
}
# Mixtures whose layers are the step below.
MIXTURES = {
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "GptOssForCausalLM",
    "Glm4MoeForCausalLM",
    "Dots1ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
}


class Experts:
    """The mixture of a config.json, under the names that its families use."""

    def __init__(self, config, architecture, layers):
        def first(*keys, default=None):
            return next((config[key] for key in keys if config.get(key) is not None), default)

        self.count = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        self.top_k = first("num_experts_per_tok", "experts_per_token", "moe_k")
        if self.count is None or self.top_k is None:
            raise Refusal(f"the number of experts of `{architecture}`, or of those that a token takes, is not in the config")
        self.width = first("moe_intermediate_size", default=config["intermediate_size"])
        # Width of the shared expert; 0: there is none.
        shared = first("n_shared_experts", "moe_num_shared_experts", default=0) * self.width
        self.shared = first("shared_expert_intermediate_size", default=shared)
        self.shared_gate = architecture == "Qwen2MoeForCausalLM"
        ernie = architecture == "Ernie4_5_MoeForCausalLM"
        sigmoid = architecture in ("Glm4MoeForCausalLM", "Dots1ForCausalLM", "MiniMaxM2ForCausalLM")
        self.sigmoid = first("scoring_func", default="sigmoid" if sigmoid else "softmax") == "sigmoid"
        self.correction = sigmoid or ernie
        # gpt-oss: biases everywhere, sinks, gate and up clamped.
        self.oss = architecture == "GptOssForCausalLM"
        self.limit, self.alpha = first("swiglu_limit", default=7.0), first("swiglu_alpha", default=1.702)
        dense = set(first("mlp_only_layers", default=[]))
        begin = first("first_k_dense_replace", "moe_layer_start_index", default=1 if ernie else 0)
        every = first("decoder_sparse_step", "moe_layer_interval", default=1)
        self.of_layer = [layer >= begin and layer not in dense and (layer + 1) % every == 0 for layer in range(layers)]


class Shape:
    """What the step needs of a config.json, with the defaults of transformers' config classes."""

    def __init__(self, config):
        get = config.get
        self.architecture = (get("architectures") or ["unknown"])[0]
        gemma = self.architecture.startswith("Gemma")
        self.hidden = config["hidden_size"]
        self.intermediate = config["intermediate_size"]
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = get("num_key_value_heads") or self.heads
        self.head_dim = get("head_dim") or self.hidden // self.heads
        self.vocab = config["vocab_size"]
        self.eps = get("rms_norm_eps", 1e-6)
        rope = get("rope_parameters") or {}
        self.theta = get("rope_theta") or rope.get("rope_theta") or 10000.0
        self.experts = Experts(config, self.architecture, self.layers) if self.architecture in MIXTURES else None
        self.qkv_bias = self.architecture.startswith("Qwen2") or bool(get("attention_bias"))
        normed = ("Qwen3ForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Dots1ForCausalLM", "MiniMaxM2ForCausalLM")
        self.qk_norm = self.architecture in normed or bool(get("use_qk_norm"))
        self.sinks = self.experts is not None and self.experts.oss
        self.post_norms = gemma
        self.gelu = gemma
        self.embed_scale = self.hidden**0.5 if gemma else None
        self.scale = (get("query_pre_attn_scalar") or self.head_dim) ** -0.5 if gemma else self.head_dim**-0.5
        self.attn_softcap = get("attn_logit_softcapping") if gemma else None
        self.final_softcap = get("final_logit_softcapping") if gemma else None
        self.tied = get("tie_word_embeddings", gemma)
        slides = gemma or self.sinks or self.architecture.startswith("Mistral") or (self.experts is not None and bool(get("layer_types")))
        window = get("sliding_window") if slides else None
        types = get("layer_types")
        pattern = get("sliding_window_pattern") or (6 if self.architecture == "Gemma3ForCausalLM" else 2)

        def is_local(layer):
            if window is None:
                return False
            if types:
                return types[layer] == "sliding_attention"
            return not gemma or (layer + 1) % pattern != 0

        self.windows = [window if is_local(layer) else None for layer in range(self.layers)]


class Model:
    """Weights, the cache and the layers that a step and a pass over a prompt share."""

    def __init__(self, torch, shape, batch, history, device, dtype, tokens, coded=False):
        """A cache of `history` positions for each of `batch` sequences, or of as many as the layer's window has, for steps of `tokens`
        tokens. `coded`: experts are mxfp4 where they are gathered."""
        self.torch, self.shape, self.batch, self.dtype = torch, shape, batch, dtype
        experts = shape.experts
        self.gathers = experts is not None and tokens * experts.top_k <= experts.count
        # Fused sums only where a compiler fuses them.
        self.fuses = False
        self.coded = coded and self.gathers
        hidden, dim = shape.hidden, shape.head_dim
        heads, kv_heads = shape.heads, shape.kv_heads

        def matrix(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5

        def ones(size):
            return torch.ones(size, device=device, dtype=dtype)

        def bias(rows):
            return torch.zeros(rows, device=device, dtype=dtype)

        def of_experts(rows, columns):
            if self.coded:
                codes = torch.randint(0, 256, (experts.count, rows, columns // 32, 16), device=device, dtype=torch.uint8)
                scales = torch.full((experts.count, rows, columns // 32, 1), 127 - 4, device=device, dtype=torch.uint8)
                return codes, scales
            held = torch.empty(experts.count, rows, columns, device=device, dtype=dtype)
            return held.normal_(0, columns**-0.5), None

        def mlp(width):
            return {"gate_up": matrix(2 * width, hidden), "down": matrix(hidden, width)}

        def feed(layer):
            if experts is None or not experts.of_layer[layer]:
                return mlp(shape.intermediate)
            feed = {
                "router": matrix(experts.count, hidden),
                "up_of": of_experts(2 * experts.width, hidden),
                "down_of": of_experts(hidden, experts.width),
            }
            if experts.correction:
                feed["correction"] = torch.zeros(experts.count, device=device)
            if experts.oss:
                feed["router_bias"], feed["o_bias"] = bias(experts.count), bias(hidden)
                feed["up_bias"] = torch.zeros(experts.count, 2 * experts.width, device=device, dtype=dtype)
                feed["down_bias"] = torch.zeros(experts.count, hidden, device=device, dtype=dtype)
            if experts.shared:
                feed.update(mlp(experts.shared))
                if experts.shared_gate:
                    feed["shared_gate"] = matrix(1, hidden)
            return feed

        self.embedding = matrix(shape.vocab, hidden)
        self.head = self.embedding if shape.tied else matrix(shape.vocab, hidden)
        self.final_norm = ones(hidden)
        self.layers = []
        for index, window in enumerate(shape.windows):
            rows = history if window is None else min(history, window)
            # The row of a sink comes first, and no step writes it.
            kept = rows + 1 if shape.sinks else rows
            self.layers.append(
                {
                    "qkv": matrix((heads + 2 * kv_heads) * dim, hidden),
                    "bias": bias((heads + 2 * kv_heads) * dim) if shape.qkv_bias else None,
                    "o": matrix(hidden, heads * dim),
                    **feed(index),
                    "norms": [ones(hidden) for _ in range(4)],
                    "q_norm": ones(dim),
                    "k_norm": ones(dim),
                    "keys": torch.randn(batch, kv_heads, kept, dim, device=device, dtype=dtype),
                    "values": torch.randn(batch, kv_heads, kept, dim, device=device, dtype=dtype),
                    "window": window,
                    # The row that a step writes: the last one, also of a window, whose ring has come round to it.
                    "row": torch.tensor([kept - 1], device=device),
                }
            )
            if shape.sinks:
                self.layers[-1]["keys"][:, :, 0] = 0
                self.layers[-1]["values"][:, :, 0] = 0
        self.frequencies = shape.theta ** (-torch.arange(0, dim, 2, device=device).float() / dim)

    def norm(self, x, weight):
        return self.torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def run(self, tokens, positions, attend, last=False):
        """Arg-max after each of `tokens`, or after the `last` one. `positions` is one for all tokens, or one for each.

        `attend` gets the layer and its q, k, v as (tokens, heads, dim), and returns (tokens, heads * dim)."""
        x, cos, sin = self.begin(tokens, positions)
        for layer in self.layers:
            x = self.layer(layer, x, cos, sin, attend)
        return self.end(x[-1:] if last else x)

    def compile(self, **options):
        """Compiles the parts of `run`, the layer once for all layers that are alike."""
        compiled = lambda part: self.torch.compile(part, fullgraph=True, dynamic=False, options=options)
        self.fuses = True
        self.begin, self.layer, self.end = compiled(self.begin), compiled(self.layer), compiled(self.end)

    def begin(self, tokens, positions):
        torch, shape = self.torch, self.shape
        x = self.embedding[tokens]
        if shape.embed_scale is not None:
            x = x * shape.embed_scale
        angle = positions[:, None] * self.frequencies
        cos = torch.cat([angle.cos()] * 2, -1).to(self.dtype).unsqueeze(1)
        sin = torch.cat([angle.sin()] * 2, -1).to(self.dtype).unsqueeze(1)
        return x, cos, sin

    def layer(self, layer, x, cos, sin, attend):
        torch, shape, norm = self.torch, self.shape, self.norm
        linear = torch.nn.functional.linear
        dim, heads, kv_heads = shape.head_dim, shape.heads, shape.kv_heads

        def rotate(t):
            return t * cos + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin

        norms = layer["norms"]
        y = linear(norm(x, norms[0]), layer["qkv"], layer["bias"]).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = y[:, :heads], y[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
        if shape.qk_norm:
            q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
        y = linear(attend(layer, rotate(q), rotate(k), v), layer["o"], layer.get("o_bias"))
        x = x + (norm(y, norms[2]) if shape.post_norms else y)
        y = norm(x, norms[1])
        y = self.mixture(layer, y) if "router" in layer else self.mlp(layer, y)
        return x + (norm(y, norms[3]) if shape.post_norms else y)

    def mlp(self, layer, x):
        functional = self.torch.nn.functional
        gate, up = functional.linear(x, layer["gate_up"]).chunk(2, -1)
        act = functional.gelu(gate, approximate="tanh") if self.shape.gelu else functional.silu(gate)
        return functional.linear(act * up, layer["down"])

    def end(self, x):
        torch, shape = self.torch, self.shape
        logits = torch.nn.functional.linear(self.norm(x, self.final_norm), self.head)
        if shape.final_softcap is not None:
            logits = torch.tanh(logits / shape.final_softcap) * shape.final_softcap
        return logits.argmax(-1)

    # ---- experts: rows are T, chosen experts of a row K, hidden H, width of an expert W --------------------------------

    def mixture(self, layer, x):
        """The weighted sum of the chosen experts of each row of x (T, H), and the shared expert."""
        torch, experts = self.torch, self.shape.experts
        scores = torch.nn.functional.linear(x, layer["router"], layer.get("router_bias")).float()
        if experts.sigmoid:
            scores = torch.sigmoid(scores)
        ranked = scores + layer["correction"] if experts.correction else scores
        chosen = torch.topk(ranked, experts.top_k, -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if experts.sigmoid else torch.softmax(weights, -1)
        products = self.gathered if self.gathers else self.grouped
        y = (products(layer, x, chosen) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
        if experts.shared:
            shared = self.mlp(layer, x)
            if experts.shared_gate:
                shared = shared * torch.sigmoid(torch.nn.functional.linear(x, layer["shared_gate"]))
            y = y + shared
        return y

    def activate(self, h):
        """(.., 2W) to (.., W)"""
        torch, experts = self.torch, self.shape.experts
        gate, up = h.chunk(2, -1)
        if experts.oss:
            gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))
        return torch.nn.functional.silu(gate) * up

    def gathered(self, layer, x, chosen):
        """(T, K, H): each pair of a row and an expert reads the matrix of the expert."""
        h = self.chosen_product(layer["up_of"], chosen, x.unsqueeze(1))
        if "up_bias" in layer:
            h = h + layer["up_bias"][chosen]
        y = self.chosen_product(layer["down_of"], chosen, self.activate(h))
        return y + layer["down_bias"][chosen] if "down_bias" in layer else y

    def chosen_product(self, held, chosen, x):
        """The matrices `held` (E, N, C) of the experts `chosen` (T, K) times x (T, K or 1, C): (T, K, N)."""
        codes, scales = held
        if scales is None:
            own = codes[chosen]
            if self.fuses:
                return (own * x.unsqueeze(2)).sum(-1)
            return (own @ x.unsqueeze(-1)).squeeze(-1)
        # (T, K, N, C / 32, 16): the pairs of a group of 32, and the scale of the group.
        codes, scales = codes[chosen].to(self.torch.int16), scales[chosen].to(self.torch.int16)
        even, odd = x.unflatten(-1, (-1, 16, 2)).unsqueeze(2).unbind(-1)
        scale = (scales << 7).view(self.torch.bfloat16).to(x.dtype)
        own = (self.decoded(codes & 15, x.dtype) * even + self.decoded(codes >> 4, x.dtype) * odd) * scale
        return own.float().sum((-1, -2)).to(x.dtype)

    def decoded(self, codes, dtype):
        """Values of e2m1: its bits, moved, are those of a bf16, times 2^-126."""
        bits = (codes & 8) << 12 | (codes & 7) << 6
        return bits.view(self.torch.bfloat16).to(dtype) * 2.0**126

    def grouped(self, layer, x, chosen):
        """(T, K, H): rows ordered by expert, one product for each expert that has any."""
        torch, experts = self.torch, self.shape.experts
        flat = chosen.flatten()
        order = torch.argsort(flat, stable=True)
        ids = torch.arange(experts.count, device=x.device)
        ends = (flat.unsqueeze(1) == ids).sum(0).cumsum(0).to(torch.int32)
        product = lambda rows, held: torch._grouped_mm(rows, held[0].transpose(1, 2), offs=ends)
        h = product(x.repeat_interleave(experts.top_k, 0)[order], layer["up_of"])
        if "up_bias" in layer:
            h = h + layer["up_bias"][flat[order]]
        y = product(self.activate(h), layer["down_of"])
        if "down_bias" in layer:
            y = y + layer["down_bias"][flat[order]]
        return torch.empty_like(y).index_copy_(0, order, y).unflatten(0, chosen.shape)


def softcapped(torch, shape, q, keys, values, mask=None):
    """Attention with a softcap, operator by operator; q is (batch, heads, queries, dim)."""
    batch, heads, queries, dim = q.shape
    grouped = q.reshape(batch, shape.kv_heads, heads // shape.kv_heads * queries, dim)
    scores = torch.tanh(grouped @ keys.transpose(-1, -2) * (shape.scale / shape.attn_softcap)) * shape.attn_softcap
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat(heads // shape.kv_heads, 1), float("-inf"))
    return (torch.softmax(scores.float(), -1).to(values.dtype) @ values).view(batch, heads, queries, dim)


def plain_step(torch, shape, position, rows, device, dtype, coded=False):
    """One decode step of `rows` sequences at `position`, with a cache of exactly the rows that each layer may look at; and its model."""
    model = Model(torch, shape, rows, position + 1, device, dtype, rows, coded)
    tokens = torch.arange(17, 17 + rows, device=device) % shape.vocab
    at = torch.tensor([float(position)], device=device)

    def attend(layer, q, k, v):
        layer["keys"].index_copy_(2, layer["row"], k.unsqueeze(2))
        layer["values"].index_copy_(2, layer["row"], v.unsqueeze(2))
        q = q.unsqueeze(2)
        if shape.attn_softcap is None:
            grouped = shape.heads != shape.kv_heads
            attention = torch.nn.functional.scaled_dot_product_attention
            o = attention(q, layer["keys"], layer["values"], scale=shape.scale, enable_gqa=grouped)
        else:
            o = softcapped(torch, shape, q, layer["keys"], layer["values"])
        return o.reshape(rows, -1)

    return model, lambda: model.run(tokens, at, attend)


def plain_prompt(torch, shape, length, device, dtype):
    """All `length` tokens of a prompt at once, the token after it; and the model."""
    model = Model(torch, shape, 1, length, device, dtype, length)
    tokens = torch.arange(17, 17 + length, device=device) % shape.vocab
    at = torch.arange(length, device=device).float()
    ago = at[:, None] - at[None, :]
    masks = {window: (ago >= 0) & (ago < window) for window in shape.windows if window is not None and window < length}
    causal = (ago >= 0) if shape.attn_softcap is not None else None

    def attend(layer, q, k, v):
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        kept = layer["keys"].shape[2]
        if shape.sinks:
            # The row of the sink stays; attention over the prompt leaves it out.
            layer["keys"][:, :, 1:].copy_(k[:, :, length + 1 - kept :])
            layer["values"][:, :, 1:].copy_(v[:, :, length + 1 - kept :])
        else:
            layer["keys"].copy_(k[:, :, length - kept :])
            layer["values"].copy_(v[:, :, length - kept :])
        mask = masks.get(layer["window"])
        if shape.attn_softcap is None:
            attention = torch.nn.functional.scaled_dot_product_attention
            grouped = shape.heads != shape.kv_heads
            o = attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=grouped)
        else:
            o = softcapped(torch, shape, q, k, v, causal if mask is None else mask)
        return o.squeeze(0).transpose(0, 1).reshape(length, -1)

    return model, lambda: model.run(tokens, at, attend, last=True)


def transformers_model(torch, config_path, device, dtype):
    """transformers' own model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(config_path)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(torch.float32)
    return transformers, config, model


def transformers_run(torch, config_path, position, rows, length, device, dtype):
    """One step of transformers' own model with a static cache; or, with `length`, its pass over a prompt."""
    transformers, config, model = transformers_model(torch, config_path, device, dtype)
    room = length or position + 1
    cache = transformers.StaticCache(config=config, max_batch_size=rows, max_cache_len=room, device=device, dtype=dtype)
    tokens = torch.full((rows, length or 1), 17 % config.vocab_size, device=device)
    at = torch.arange(length, device=device) if length else torch.tensor([position], device=device)

    def run():
        out = model(tokens, past_key_values=cache, cache_position=at, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1)

    return run


# ---- the questions --------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self):
        import torch

        torch.set_grad_enabled(False)
        self.torch = torch
        self.run = None

    def open(self, config, dtype, context_max=None, experts=None, **_):
        torch = self.torch
        if not torch.cuda.is_available() and os.environ.get("MONOBLOC_TORCH_CPU") != "1":
            raise Refusal("torch sees no CUDA device; MONOBLOC_TORCH_CPU=1 times it on the CPU")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.config_path = config
        with open(config) as file:
            self.shape = Shape(json.load(file))
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.coded = experts == "mxfp4"
        plain = self.shape.architecture in PLAIN or self.shape.experts is not None
        where = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU"
        variants = ["eager", "compile"] if plain else ["hf-eager", "hf-compile"]
        return {"name": f"torch {torch.__version__} on {where}", "variants": variants}

    def prepare(self, variant, position=0, rows=1, prompt=None, **_):
        torch = self.torch
        # The graph of the last variant holds its memory.
        self.run = None
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = None
        if variant.startswith("hf-"):
            step = transformers_run(torch, self.config_path, position, rows, prompt, self.device, self.dtype)
        elif prompt:
            model, step = plain_prompt(torch, self.shape, prompt, self.device, self.dtype)
        else:
            model, step = plain_step(torch, self.shape, position, rows, self.device, self.dtype, self.coded)
        if variant == "compile" and self.shape.experts is not None:
            torch._inductor.config.test_configs.max_mm_configs = CONFIGS_MAX
            model.compile(max_autotune=self.device == "cuda")
        elif variant.endswith("compile"):
            step = torch.compile(step, mode="max-autotune-no-cudagraphs", fullgraph=not variant.startswith("hf-"))
        self.run = self.capture(step) if self.device == "cuda" else step
        for _ in range(STEPS_WARM):
            self.run()
        return {}

    def capture(self, step):
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(STEPS_WARM):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def time(self, steps, **_):
        if self.run is None:
            raise Refusal("nothing was prepared")
        if self.device == "cpu":
            begun = time.perf_counter()
            for _ in range(steps):
                self.run()
            return {"us_per_step": (time.perf_counter() - begun) * 1e6 / steps}
        torch = self.torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return {"us_per_step": begin.elapsed_time(end) * 1e3 / steps}


def answer(bench, question):
    try:
        what = question.pop("do", None)
        if what not in ("open", "prepare", "time"):
            raise Refusal(f"expected `open`, `prepare` or `time`, found `{what}`")
        return getattr(bench, what)(**question)
    except Exception as error:  # whatever it is, the other side should hear of it
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:500]}


def serve():
    # What libraries print must not be taken for an answer.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = None
    for line in sys.stdin:
        try:
            bench = bench or Bench()
            reply = answer(bench, json.loads(line))
        except ImportError as error:
            reply = {"error": f"{error}; install torch in the environment of `python3`"}
        print(json.dumps(reply), file=out, flush=True)


def work(text):
    """What a word of the command line asks for, as `prepare` takes it."""
    if text.startswith("p"):
        return {"prompt": int(text[1:])}
    rows, _, position = text.rpartition("x")
    return {"position": int(position), "rows": int(rows or 1)}


def look(config, works, variants=None, dtype="bf16"):
    bench = Bench()
    opened = bench.open(config, dtype, experts=os.environ.get("EXPERTS"))
    print(json.dumps(opened), flush=True)
    for what in works.split(","):
        for variant in variants.split(",") if variants else opened["variants"]:
            begun = time.perf_counter()
            row = {"variant": variant, **work(what)}
            row.update(answer(bench, {"do": "prepare", "variant": variant, **work(what)}))
            row["prepare_s"] = round(time.perf_counter() - begun, 1)
            if "error" not in row:
                steps = 1 if "prompt" in row else 32
                samples = sorted(bench.time(steps)["us_per_step"] for _ in range(15))
                row["us_per_step_p50"] = samples[7]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        look(*sys.argv[1:])
    else:
        serve()
