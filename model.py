"""A Llama / Qwen2 / Qwen3 decoder: its config, its layers, its weights and its tokenizer, read from and written to Hugging Face folders.

One layer, on T packed tokens of any number of sequences (no batch dimension, no padding; x [T, H]):

    q, k, v = split(W_qkv norm(x))                q [T, Hq, D], k and v [T, Hkv, D]     norm(x) = w * x / sqrt(mean(x^2) + eps)
    q, k    = rope(q), rope(k)                    rotates (x_j, x_{j+D/2}) by position * f_j         (Qwen3 norms q and k first)
    x       = x + W_o attention(q, k, v)          `attention` is the caller's: causal, paged or sparse; the model knows no cache
    x       = x + W_down (silu(gate) * up)        gate, up = split(W_gate_up norm(x))

Read:   `load_pretrained` takes a folder, a hub name, or "tiny" (assets/tiny). config.json is normalised into a `Config`, every tensor of the
        safetensors files is accounted for in both directions, and what cannot be run exactly is refused by one sentence (ValueError).
Write:  `save_pretrained` writes a folder that transformers opens with equal logits.
Text:   `Tokenizer` is tiktoken on the ranks, the split pattern and the special tokens of tokenizer.json, and the checkpoint's own chat template.

    from model import load_pretrained
    from sparse_attn import PackedCausal
    net, tok = load_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
    ids = torch.tensor(tok.chat([{"role": "user", "content": "What is 7 + 5?"}]))                       # [T]
    hidden = net(ids, torch.arange(len(ids)), PackedCausal([len(ids)]))                                 # [T, H]
    print(tok.decode(net.logits(hidden[-1:]).argmax(-1).tolist()))

Try it:  pytest tests/test_model.py tests/test_tokenizer.py
"""
import base64
import codecs
import json
import math
import os
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# Config: config.json, normalised

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_KEYS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
NOT_QUANTISED = "take the bfloat16 or float32 one it was made from"  # remedies that several refusals give
STRANGERS = "the files and config.json do not belong together"
WEIGHTS_ALONE = "load the weights alone with tokenizer=False"


@dataclass
class Config:
    """The shape of a decoder. Names are ours; `raw` is config.json as it was read, and what `save_pretrained` writes back."""
    model_type: str          # llama | qwen2 | qwen3
    vocab_size: int          # rows of the embedding, padding rows included
    hidden_size: int
    layers: int
    heads: int               # query heads
    kv_heads: int            # key/value heads: heads / kv_heads query heads share one
    head_dim: int            # need not be hidden_size / heads (Qwen3)
    intermediate: int
    rms_eps: float
    rope: dict               # rope_type, rope_theta and what the type needs
    context: int             # max_position_embeddings
    tie: bool                # the head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool            # RMS norm of each head's q and k before rope
    raw: dict


def config_from_dict(raw):
    """config.json as a dict -> Config. Raises ValueError, in one sentence, for what this decoder cannot run exactly."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported: this decoder runs {', '.join(ARCHITECTURES)} (SmolLM2 is a llama, Qwen2.5 a qwen2)")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    if missing := [k for k in needed if not raw.get(k)]:
        raise ValueError(f"config.json has no {', '.join(missing)}: copy the config that came with the weights")
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or (128 if kind == "qwen3" else raw["hidden_size"] // heads)
    windowed = kind != "llama" and raw.get("use_sliding_window") and raw.get("max_window_layers", 28) < layers
    if quantised := raw.get("quantization_config") or raw.get("compression_config"):
        raise ValueError(f"the checkpoint is quantised ({quantised.get('quant_method', 'unknown method')}): {NOT_QUANTISED}")
    if windowed and not raw.get("layer_types") or any(t != "full_attention" for t in raw.get("layer_types") or ()):
        raise ValueError("some layers use sliding-window attention, which is not supported: take a checkpoint with use_sliding_window false")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported: the MLP is gated by silu")
    if heads % kv_heads or head_dim % 2:
        raise ValueError(f"{heads} query heads must be a multiple of {kv_heads} key/value heads, and head_dim {head_dim} must be even")
    bias = kind != "qwen2" and bool(raw.get("attention_bias", False))
    return Config(kind, raw["vocab_size"], raw["hidden_size"], layers, heads, kv_heads, head_dim, intermediate=raw["intermediate_size"],
                  rms_eps=raw.get("rms_norm_eps", 1e-6), rope=rope_settings(raw), context=raw["max_position_embeddings"],
                  tie=bool(raw.get("tie_word_embeddings", False)), qkv_bias=bias or kind == "qwen2", o_bias=bias,
                  mlp_bias=kind == "llama" and bool(raw.get("mlp_bias", False)), qk_norm=kind == "qwen3", raw=raw)


def rope_settings(raw):
    """One dict from the places where configs keep rope: `rope_theta` and `rope_scaling` (old), `rope_parameters` (new, also holds theta)."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if kind not in ROPE_KEYS or any(isinstance(v, dict) for v in rope.values()):
        raise ValueError(f"rope type {kind if kind not in ROPE_KEYS else 'per layer'!r} is not supported: the known ones are {', '.join(ROPE_KEYS)}")
    rope["rope_theta"] = rope.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or raw.get("rope_theta")
    if rope["rope_theta"] is None:
        if raw["model_type"] != "llama":
            raise ValueError("config.json gives no rope_theta, neither at the top nor in rope_parameters: copy the config that came with the weights")
        print("note: config.json gives no rope_theta; 10000 is taken, as Llama-2 was trained")
        rope["rope_theta"] = 10000.0
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: every dimension of a head must be rotated")
    if lacks := [k for k in ROPE_KEYS[kind] if not rope.get(k)]:
        raise ValueError(f"rope type {kind!r} needs {', '.join(lacks)} in config.json")
    if kind in ("llama3", "yarn"):
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        rope["original_max_position_embeddings"] = original
        rope["factor"] = rope.get("factor") or raw["max_position_embeddings"] / original
    return rope


# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions

def rope_frequencies(config, dtype=torch.float32):
    """-> (f [D/2] radians per position, the factor on cos and sin, 1 except for yarn).

    default  f_j = theta^(-2j/D).   linear  f_j / factor.
    llama3   waves shorter than original/high_freq_factor are kept, longer than original/low_freq_factor divided, a ramp in between.
    yarn     (Peng et al. 2023, arXiv 2309.00071) the same by counting rotations over the original context, between beta_fast and beta_slow;
             cos and sin are scaled by 0.1 ln(factor) + 1, so that attention stays as sharp over the longer context.
    """
    r, D = config.rope, config.head_dim
    kind, theta, factor = r["rope_type"], r["rope_theta"], r.get("factor")
    f = 1.0 / theta ** (torch.arange(0, D, 2, dtype=dtype) / D)  # [D/2]
    if kind == "default":
        return f, 1.0
    if kind == "linear":
        return f / factor, 1.0
    original = r["original_max_position_embeddings"]
    if kind == "llama3":
        low, high, waves = r["low_freq_factor"], r["high_freq_factor"], original * f / (2 * math.pi)  # waves that fit the original context
        keep = ((waves - low) / (high - low)).clamp(0, 1)
        return f * keep + f / factor * (1 - keep), 1.0

    def dim(rotations):  # the (real-valued) pair that turns this often over the original context
        return D * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
    low, high = dim(r.get("beta_fast") or 32), dim(r.get("beta_slow") or 1)
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    keep = 1 - ((torch.arange(D // 2, dtype=dtype) - low) / (high - low or 0.001)).clamp(0, 1)

    def sharpness(m):
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    m, m_all = (r.get("mscale"), r.get("mscale_all_dim")) if r.get("mscale") and r.get("mscale_all_dim") else (1, 0)
    return f * keep + f / factor * (1 - keep), r.get("attention_factor") or sharpness(m) / sharpness(m_all)


def rotate(x, cos, sin):
    """x [T, heads, D] rotated: the pair (x_j, x_{j+D/2}) by the angle of cos, sin [T, 1, D]. sin carries the minus sign of its first half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# ---------------------------------------------------------------------------------------------------------------------
# The decoder

class Packed:
    """A weight's copy in oneDNN's blocked layout, and the weight's address and version when it was made."""
    made_of = copy = None

    def __deepcopy__(self, memo):
        return Packed()  # the layout is opaque; it is made again at the first use


class Linear(nn.Linear):
    """y = W x + b. Rollouts on the CPU multiply by a packed copy of W (`Decoder.pack`), which is renewed when W has changed."""
    packed = None

    def reset_parameters(self):
        pass  # weights come from a file or from random_model; drawing others first costs seconds

    def forward(self, x):
        return linear(self, x, self.weight, self.bias)


def linear(owner, x, weight, bias=None):
    """F.linear through owner.packed, where `Decoder.pack` has asked for it and no gradient is. The layout is repacked after any in-place change of W.

    A decode step multiplies few rows: it should read each weight once at memory speed. Stock matrix products repack W on every call; measured
    on two Zen 4 cores, the layers of a 135M model, ms for 1 / 3 / 8 rows: fp32 33 / 61 / 38 -> 18 / 16 / 18, bf16 15 / 15 / 18 -> 10 / 9 / 11.
    """
    if owner.packed is None or torch.is_grad_enabled() or not len(x):
        return F.linear(x, weight, bias)
    packed, now = owner.packed, (weight.data_ptr(), weight._version)
    if packed.made_of != now:
        packed.made_of, packed.copy = now, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed.copy, bias, "none", [], "")


@cache
def packs(dtype):
    """Whether torch has the private calls that `linear` makes, with their meaning, for CPU tensors of this dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        x, w, b = (torch.arange(n, dtype=torch.float32).sub(n / 2).div(n).view(shape).to(dtype) for n, shape in ((96, (3, 32)), (1024, (32, 32)), (32, (32,))))
        y = torch.ops.mkldnn._linear_pointwise(x, torch.ops.mkldnn._reorder_linear_weight(w, 8), b, "none", [], "")
        return torch.allclose(y.double(), F.linear(x.double(), w.double(), b.double()), atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


class Layer(nn.Module):
    def __init__(self, c, **at):
        super().__init__()
        H, D, eps = c.hidden_size, c.head_dim, c.rms_eps
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, D
        self.attn_norm = nn.RMSNorm(H, eps, **at)
        self.qkv = Linear(H, (c.heads + 2 * c.kv_heads) * D, bias=c.qkv_bias, **at)  # rows: all q heads, all k heads, all v heads
        self.q_norm = nn.RMSNorm(D, eps, **at) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(D, eps, **at) if c.qk_norm else None
        self.o = Linear(c.heads * D, H, bias=c.o_bias, **at)
        self.mlp_norm = nn.RMSNorm(H, eps, **at)
        self.gate_up = Linear(H, 2 * c.intermediate, bias=c.mlp_bias, **at)           # rows: gate, up
        self.down = Linear(c.intermediate, H, bias=c.mlp_bias, **at)

    def forward(self, x, cos, sin, attention):
        T, Hq, Hkv, D = len(x), self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv(self.attn_norm(x)).view(T, Hq + 2 * Hkv, D)
        qk, v = qkv[:, :Hq + Hkv], qkv[:, Hq + Hkv:]  # [T, Hq + Hkv, D], [T, Hkv, D]
        if self.q_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :Hq]), self.k_norm(qk[:, Hq:])), 1)
        qk = rotate(qk, cos, sin)  # q and k in one go
        out = attention(qk[:, :Hq], qk[:, Hq:], v)  # [T, Hq, D]
        x = x + self.o(out.reshape(T, Hq * D))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)  # [T, intermediate] each
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """`net(ids, positions, attention)` -> hidden [T, H] after the final norm; `net.logits(hidden)` -> [n, V].

    config    the Config                                  checkpointing  recompute each layer in backward (default False): less memory, one more forward
    vocab     real token ids; rows past it are padding    stop_ids       tuple: union of tokenizer, config.json and generation_config.json
    context   the longest sequence it was made for        generation     generation_config.json as a dict, or None
    """

    def __init__(self, config, dtype=torch.float32, device="cpu"):
        """The parameters are allocated, not filled: load_weights or random_model does that."""
        super().__init__()
        at, V, H = {"dtype": dtype, "device": device}, config.vocab_size, config.hidden_size
        self.config, self.context, self.vocab = config, config.context, V
        self.stop_ids, self.generation, self.checkpointing, self.packed = (), None, False, None
        self.embed = nn.Embedding(V, H, _weight=torch.empty(V, H, **at))
        self.layers = nn.ModuleList(Layer(config, **at) for _ in range(config.layers))
        self.norm = nn.RMSNorm(H, config.rms_eps, **at)
        self.head = None if config.tie else Linear(H, V, bias=False, **at)
        self._rope = None  # (frequencies, factor), on the device and in the precision that were last asked for

    def cos_sin(self, positions, like):
        """positions [T] -> cos, sin [T, 1, D] in `like`'s dtype, for `rotate`. Angles are computed in float32 (float64 for a float64 net)."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        if self._rope is None or (self._rope[0].device, self._rope[0].dtype) != (like.device, dtype):
            f, factor = rope_frequencies(self.config, dtype)
            self._rope = f.to(like.device), factor
        f, factor = self._rope
        angle = positions.to(dtype)[:, None, None] * f  # [T, 1, D/2]
        cos, sin = angle.cos() * factor, angle.sin() * factor
        return torch.cat((cos, cos), -1).to(like.dtype), torch.cat((-sin, sin), -1).to(like.dtype)

    def forward(self, ids, positions, attention, features=()):
        """ids [T], positions [T] int64 -> hidden [T, H], or (hidden, [T, n*H]) with the residual stream at the n points of `features`.

        attention(q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D] is called once a layer, in order, after rope; the scale D**-0.5, the
        mask and the cache are its business. q, k and v may be strided views. Under `checkpointing` it is called again, last layer first, in backward.
        features: 0 is the embedding, i the output of layer i, as transformers' hidden_states (but the last one comes before the final norm).
        """
        L = len(self.layers)
        if any(not 0 <= i <= L for i in features):
            raise ValueError(f"features {tuple(features)} must lie in 0..{L}: 0 is the embedding, {L} the output of the last layer")
        x = self.embed(ids)  # [T, H]
        cos, sin = self.cos_sin(positions, x)
        kept = {0: x}
        recompute = self.checkpointing and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers, 1):
            x = checkpoint(layer, x, cos, sin, attention, use_reentrant=False) if recompute else layer(x, cos, sin, attention)
            if i in features:
                kept[i] = x
        hidden = self.norm(x)
        return (hidden, torch.cat([kept[i] for i in features], -1)) if features else hidden

    def logits(self, hidden):
        """hidden [n, H] -> raw logits [n, V] in the net's dtype. Padding rows (>= self.vocab) are not masked here: spec_sample.law does it."""
        return linear(self, hidden, (self.embed if self.head is None else self.head).weight)

    def pack(self):
        """Ask for packed copies of all matrices (see `linear`): the weights' bytes once more. -> those bytes, 0 where they are of no use (CUDA, fp64).

        A copy is renewed when its weight's version has changed, but torch's fused optimizers do not count their step as a version: `unpack`, as
        `rollout` does at its end, before the weights are trained.
        """
        owners = self._packers()
        weight = owners[-1][1]
        if weight.device.type != "cpu" or not packs(weight.dtype):
            return 0
        for owner, _ in owners:
            owner.packed = owner.packed or Packed()  # made at the first use
        return sum(w.numel() * w.element_size() for _, w in owners)

    def unpack(self):
        """Free the packed copies."""
        for owner, _ in self._packers():
            owner.packed = None

    def _packers(self):
        head = self.embed if self.head is None else self.head
        return [(m, m.weight) for m in self.modules() if isinstance(m, Linear) and m is not self.head] + [(self, head.weight)]


def random_model(raw, seed=0, dtype=torch.float32, device="cpu"):
    """A decoder with fresh weights, normal(0, initializer_range) as in transformers, from a config.json dict. Equal for every dtype and device."""
    net, random = Decoder(config_from_dict(raw), dtype, device), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=random) * raw.get("initializer_range", 0.02))
            else:
                p.fill_(1.0 if "norm" in name else 0.0)  # norm weights, biases
    net.stop_ids = stop_ids(net, None)
    return net


# ---------------------------------------------------------------------------------------------------------------------
# Weights: ours are fused (one qkv, one gate_up matrix a layer), the files' are not

STACKS = {"embed": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",), "attn_norm": ("input_layernorm",),
          "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",),
          "o": ("self_attn.o_proj",), "mlp_norm": ("post_attention_layernorm",), "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}


def file_names(net):
    """For each parameter: (its name, the tensors of a checkpoint that are stacked, row upon row, to make it: [(name, rows), ...])."""
    c = net.config
    for name, p in net.named_parameters():  # "layers.3.qkv.weight"
        *where, module, kind = name.split(".")
        parts = STACKS[module]
        rows = [c.heads * c.head_dim] + [c.kv_heads * c.head_dim] * 2 if module == "qkv" else [len(p) // len(parts)] * len(parts)
        yield name, [(".".join(["model", *where, part, kind] if where else [part, kind]), n) for part, n in zip(parts, rows)]


def open_weights(folder):
    """-> {tensor name: the open safetensors file that holds it}. One model.safetensors, or the shards that the index names."""
    from safetensors import SafetensorError, safe_open
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
    elif index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        found = sorted(f.name for f in folder.iterdir())
        raise ValueError(f"{folder} has neither model.safetensors nor its index (found: {', '.join(found[:9])}{', ...' * (len(found) > 9)}); "
                         "pickled .bin files are never opened, convert them to safetensors")
    tensors = {}
    for name in names:
        if "/" in name or not (folder / name).is_file():
            raise ValueError(f"{folder / name}, which the index names, is missing: download the checkpoint again")
        try:
            file = safe_open(folder / name, framework="pt")
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{folder / name} is truncated or no safetensors file ({e}): download it again") from None
        tensors.update(dict.fromkeys(file.keys(), file))
    return tensors


def load_weights(net, folder):
    """Fills every parameter of `net` from the files; a tensor that is missing, left over, of another shape or quantised is a ValueError."""
    tensors, table, config = open_weights(folder), dict(file_names(net)), net.config
    wanted = {name for parts in table.values() for name, _ in parts}
    spare = {name for name in tensors if name not in wanted and not name.endswith("rotary_emb.inv_freq")}  # old Llama files carry rope's table
    missing = sorted(wanted - set(tensors))
    if config.tie and "lm_head.weight" in spare and "model.embed_tokens.weight" in tensors:
        spare.remove("lm_head.weight")
        if not torch.equal(*(tensors[name].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))):
            raise ValueError(f"{folder}: config.json ties the head to the embedding, but the stored lm_head.weight differs: set tie_word_embeddings to false")
    if missing == ["lm_head.weight"]:
        raise ValueError(f"{folder}: config.json says tie_word_embeddings false, but no lm_head.weight is stored: the head is lost, or the config is wrong")
    if missing:
        raise ValueError(f"{folder}: {len(missing)} of {len(wanted)} tensors are missing, first {missing[0]}: {STRANGERS}")
    if spare:
        raise ValueError(f"{folder}: {len(spare)} tensors have no place in a {config.model_type} model, first {min(spare)}: {STRANGERS}")
    with torch.no_grad():
        for name, p in net.named_parameters():
            row = 0
            for part, rows in table[name]:
                t, shape = tensors[part].get_tensor(part), (rows, *p.shape[1:])
                if tuple(t.shape) != shape:
                    raise ValueError(f"{folder}: {part} is {list(t.shape)} where config.json asks for {list(shape)}: {STRANGERS}")
                if t.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                    raise ValueError(f"{folder}: {part} is stored as {t.dtype}, a quantised checkpoint: {NOT_QUANTISED}")
                p[row:row + rows].copy_(t)
                row += rows


def read_json(path):
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give a folder that holds a checkpoint in Hugging Face format") from None
    except ValueError:
        raise ValueError(f"{path} is not valid JSON: download it again") from None


def stop_ids(net, tok):
    """The union of what config.json, generation_config.json and the tokenizer call the end: Llama-3's turn token stands in only one of them."""
    found = [net.config.raw.get("eos_token_id"), (net.generation or {}).get("eos_token_id"), tok and tok.eos_id]
    flat = {i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    return tuple(sorted(i for i in flat if 0 <= i < net.config.vocab_size))


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE on tiktoken
#
# tokenizer.json writes bytes as printable characters (GPT-2's map) and BPE as a list of merges; tiktoken takes bytes and ranks. They agree when the
# ids rise along the merges (checked at load) and every token is what the merges make of its own bytes, which holds for a trained vocabulary.

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {**{b: b for b in PRINTABLE}, **{256 + i: b for i, b in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}}  # code point -> byte
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_DIGITS = r"\p{N}%s|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"  # digits cut out first: blanks before one stand alone
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen one digit, Llama-3 up to 3
BLANKS = re.compile(r"\s*")
# The special tokens that follow the ranks where no JSON file lists them.
QWEN_ADDED = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|>
    <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>
    <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()  # the last four: Qwen3
LLAMA3_ADDED = """<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> <|finetune_right_pad_id|> <|step_id|>
    <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> <|image|>""".split() + [f"<|reserved_special_token_{i}|>" for i in range(2, 246)]


class Tokenizer:
    """Text <-> ids, equal to the checkpoint's own tokenizer.

    encode(text)     adds no begin or end token. The text of a special token becomes that token wherever it stands, also in what a user wrote, as in
                     `tokenizers` and transformers: strip such strings from text that you do not trust.
    decode(ids)      UTF-8; bytes that form no character become U+FFFD. One character may span several ids: to print ids as they come use stream().
    chat(messages)   [{"role": "user", "content": "..."}, ...] -> ids, by the checkpoint's jinja template, with the opening of the answer.
                     The template writes the begin token where there is one, so chat() holds exactly one; decode(chat(...)) shows what the model sees.
    vocab            last id + 1        eos_id, stop_ids    when an answer ends        has_template    whether chat() works
    """

    def __init__(self, ranks, pattern, added, nfc=False, unmerged=(), settings=None, template=None, files=None):
        """ranks {bytes: id}, earlier merges smaller. added {id: entry of tokenizer.json's added_tokens}. unmerged [(bytes, id)]: decoded, never produced."""
        import tiktoken
        self.nfc, self.settings, self.template, self.files = nfc, settings or {}, template, files or {}
        self.added = {entry["content"]: i for i, entry in added.items()}
        self.special = {i for i, entry in added.items() if entry.get("special")}
        self.vocab = max([*ranks.values(), *added, *(i for _, i in unmerged)]) + 1
        self.bytes = [b""] * self.vocab  # id -> its bytes
        for b, i in [*ranks.items(), *unmerged, *((text.encode(), i) for text, i in self.added.items())]:
            self.bytes[i] = b
        lone = {bytes([b]): self.vocab + b for b in range(256) if bytes([b]) not in ranks}  # bytes without a token: tiktoken wants one, `encode` drops it
        try:
            self.bpe = tiktoken.Encoding("checkpoint", pat_str=pattern, mergeable_ranks={**ranks, **lone}, special_tokens={})
        except ValueError as e:
            raise ValueError(f"tiktoken does not take the tokenizer's split pattern {pattern!r} ({e}): {WEIGHTS_ALONE}") from None
        self.swallow = {side: {e["content"] for e in added.values() if e.get(side)} for side in ("lstrip", "rstrip")}  # tokens that eat blanks beside them
        self.early = any_of(e["content"] for e in added.values() if not e.get("normalized"))  # looked for in the text as it is,
        self.late = any_of(e["content"] for e in added.values() if e.get("normalized"))       # and after normalisation
        eos = special_strings(self.settings).get("eos_token")
        self.eos_id = self.added.get(eos, ranks.get(eos.encode())) if eos else None
        self.stop_ids = () if self.eos_id is None else (self.eos_id,)  # load_pretrained adds what the configs say
        self.has_template = template is not None

    def encode(self, text):
        ids = []
        for piece, token in self.cut(text, self.early):
            for part, late in self.cut(unicodedata.normalize("NFC", piece) if self.nfc else piece, self.late):
                ids += self.bpe.encode_ordinary(part) + ([self.added[late]] if late else [])
            ids += [self.added[token]] if token else []
        return [i for i in ids if i < self.vocab]

    def cut(self, text, pattern):
        """"ab<s>c" -> ("ab", "<s>"), ("c", None): the text between added tokens, and the token that ends it."""
        at = 0
        for m in pattern.finditer(text):
            yield text[at:m.start()].rstrip() if m[0] in self.swallow["lstrip"] else text[at:m.start()], m[0]
            at = BLANKS.match(text, m.end()).end() if m[0] in self.swallow["rstrip"] else m.end()
        yield text[at:], None

    def decode(self, ids, skip_special=False):
        return b"".join(self.bytes[i] for i in ids if not (skip_special and i in self.special)).decode("utf-8", "replace")

    def stream(self):
        """-> a function from new ids to the text that has become whole with them; joined, its answers equal decode() of all. Call it last with final=True.

            show = tok.stream()
            for i in ids: print(show([i]), end="", flush=True)
            print(show([], final=True))
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda ids, final=False: decoder.decode(b"".join(self.bytes[i] for i in ids), final)

    def chat(self, messages, **options):
        return self.encode(self.render(messages, **options))

    def render(self, messages, add_generation_prompt=True, **options):
        """The text of a chat. options go to the template (Qwen3: enable_thinking=False)."""
        if not self.has_template:
            raise ValueError("the checkpoint has no chat template: encode a plain prompt with tok.encode, or take the model's instruct version")
        from jinja2 import TemplateError
        names = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._jinja.render({**special_strings(self.settings), **names, **options})
        except (TemplateError, TypeError) as e:  # TypeError: a content that is not text
            raise ValueError(f"the checkpoint's chat template does not take these messages: {e}") from None

    @cached_property
    def _jinja(self):
        """The template, compiled in a sandbox with what transformers offers to it: it is a stranger's program."""
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):  # {% generation %} marks the answer for trainers that mask by template; the text is the body's
            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

        def raise_exception(message):
            raise TemplateError(message)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        env.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(x, ensure_ascii=ensure_ascii, **how)  # jinja's own escapes HTML
        env.globals.update(raise_exception=raise_exception, strftime_now=lambda format: datetime.now().strftime(format))
        return env.from_string(self.template)


def any_of(texts):
    """A regex that finds any of the texts, the longest first, or nothing."""
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or "(?!)")


def special_strings(settings):
    """{"bos_token": "<s>", ...} as templates use them; values are strings, or dicts with their content."""
    found = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    return {f"{name}_token": v["content"] if isinstance(v, dict) else v for name, v in found.items() if v is not None}


def load_tokenizer(folder, config):
    """The folder's tokenizer, from tokenizer.json or from tiktoken ranks; None if it holds none; ValueError, in one sentence, if it is of another kind."""
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
             "merges.txt", "tokenizer.model", *sorted(f.name for f in folder.glob("*.tiktoken"))]
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    settings = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one wins
        settings.update(read_json(folder / name) if name in files else {})
    template = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {t["name"]: t["template"] for t in template}.get("default")
    about = {"settings": settings, "template": template, "files": files}
    added = {int(i): entry for i, entry in settings.get("added_tokens_decoder", {}).items()}
    if "tokenizer.json" in files:
        return tokenizer_from_json(read_json(folder / "tokenizer.json"), folder / "tokenizer.json", added, about)
    for name in files:
        if name.endswith(".tiktoken") or name == "tokenizer.model" and re.match(rb"[A-Za-z0-9+/]+=* \d+\n", files[name]):
            return tokenizer_from_ranks(files[name], folder / name, config.model_type, added, about)
    if files.keys() & {"tokenizer.model", "vocab.json"}:
        raise ValueError(f"{folder} has no tokenizer.json and no tiktoken ranks, only {', '.join(files)}; SentencePiece (Llama-2) is not supported, and "
                         f"byte-level BPE must first be saved by transformers' fast tokenizer: {WEIGHTS_ALONE}")
    return None


def tokenizer_from_json(data, path, added, about):
    """tokenizer.json -> Tokenizer. Byte-level BPE with a known kind of split: Llama-3, Qwen, SmolLM2."""
    def steps(part, inner):
        return part[inner] if part and part["type"] == "Sequence" else [part] if part else []
    model, splits, normal = data["model"], steps(data.get("pre_tokenizer"), "pretokenizers"), steps(data.get("normalizer"), "normalizers")
    *first, byte_level = splits or [{"type": None}]
    kinds, regex = [s["type"] for s in splits], byte_level.get("use_regex", True)
    if "merges" not in model or model.get("byte_fallback") or byte_level["type"] != "ByteLevel" or any(n["type"] != "NFC" for n in normal):
        raise ValueError(f"{path} is not byte-level BPE but {model.get('type')} with {', '.join(kinds + [n['type'] for n in normal]) or 'no splitting'} "
                         f"(Llama-2's SentencePiece is such a one): {WEIGHTS_ALONE}")
    added = {**added, **{entry["id"]: entry for entry in data.get("added_tokens", [])}}
    vocab, made, last = model["vocab"], set(), -1
    for merge in model["merges"]:  # "a b" or ["a", "b"]
        i = vocab.get("".join(merge.split(" ") if isinstance(merge, str) else merge), -1)
        if i < last:
            raise ValueError(f"{path}: the ids do not rise along the merges (at {merge!r}), so ranks cannot stand for them: {WEIGHTS_ALONE}")
        made.add(last := i)
    tokens = [(text.translate(BYTE_OF).encode("latin-1", "xmlcharrefreplace"), text, i) for text, i in vocab.items() if i not in added]
    can = {i for _, text, i in tokens if len(text) == 1 or i in made}  # the others are decoded, never produced,
    unmade = [(i, text) for _, text, i in tokens if i not in can]
    if model.get("ignore_merges"):  # but where they are a whole piece; ranks say the same only of a token that no two others join to
        can |= {i for i, text in unmade if not any(text[:j] in vocab and text[j:] in vocab for j in range(1, len(text)))}
    odd = [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)] + ["add_prefix_space"] * bool(byte_level.get("add_prefix_space"))
    odd += ["single_word"] * any(e.get("single_word") for e in added.values())
    odd += [f"ignore_merges for tokens without their merges ({text!r})" for i, text in unmade if model.get("ignore_merges") and i not in can][:1]
    how = (first[0].get("behavior"), bool(first[0].get("invert"))) if first else None
    if kinds == ["ByteLevel"] and regex:
        pattern = GPT2
    elif kinds == ["Digits", "ByteLevel"] and regex:
        pattern = GPT2_DIGITS % ("" if first[0].get("individual_digits") else "+")
    elif kinds == ["Split", "ByteLevel"] and not regex and how in (("Isolated", False), ("Removed", True)) and "Regex" in first[0]["pattern"]:
        pattern = first[0]["pattern"]["Regex"]
        if how[0] == "Isolated":
            pattern = f"{pattern}|(?:(?!{pattern})[\\s\\S])+"  # what the pattern does not match is a piece too; tiktoken would lose it
    else:
        odd.append("a split by " + ", ".join(kind + str(s.get("behavior", "")) for kind, s in zip(kinds, splits)))
    if odd:
        raise ValueError(f"{path} asks for {', '.join(odd)}, which is not supported: {WEIGHTS_ALONE}")
    return Tokenizer({b: i for b, _, i in tokens if i in can}, pattern, added, bool(normal), [(b, i) for b, _, i in tokens if i not in can], **about)


def tokenizer_from_ranks(data, path, model_type, added, about):
    """Lines of "base64-bytes rank" (qwen.tiktoken, Llama-3's tokenizer.model) -> Tokenizer."""
    try:
        ranks = {base64.b64decode(b): int(i) for b, i in (line.split() for line in data.splitlines() if line)}
    except ValueError:
        raise ValueError(f"{path} is not a file of tiktoken ranks (lines of base64 and a number): download it again") from None
    qwen = model_type != "llama"
    usual = (QWEN_ADDED if model_type == "qwen3" else QWEN_ADDED[:-4]) if qwen else LLAMA3_ADDED
    added = added or {len(ranks) + i: {"content": text, "special": text[:2] == "<|"} for i, text in enumerate(usual)}
    return Tokenizer(ranks, GPT4 % ("" if qwen else "{1,3}"), added, nfc=qwen, **about)


# ---------------------------------------------------------------------------------------------------------------------
# Load and save

def find_folder(path):
    """"tiny", a folder, or a hub name (downloaded, or found in the hub's cache) -> the folder."""
    folder = Path(__file__).resolve().parent / "assets" / "tiny" if str(path) == "tiny" else Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
        raise ValueError(f"{folder} is not a folder, and {str(path)!r} is no hub name (owner/name)")
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "model*.safetensors", "*.tiktoken", "tokenizer.model", "*.jinja"]))
    except ImportError:
        raise ValueError(f"{path} is not a folder, and to fetch it from the hub needs huggingface_hub: pip install huggingface_hub") from None
    except Exception as e:  # of many libraries: no network, no such name, no permission
        raise ValueError(f"{path} is not a folder, and the hub did not give it ({type(e).__name__}: {str(e).strip().splitlines()[0]})") from e


def load_pretrained(path, dtype=torch.float32, device="cpu", tokenizer=True, fresh=None):
    """-> (net, tok): a folder in Hugging Face format, a hub name, or "tiny". tok is None, and a line says so, if the folder has no tokenizer.

    A tokenizer that cannot be run exactly (Llama-2's SentencePiece) is a ValueError; tokenizer=False then loads the weights alone. fresh: a seed to draw
    new weights from. Every refusal is a ValueError of one sentence. Nothing is unpickled, and no code of the checkpoint runs.
    """
    folder = find_folder(path)
    raw = read_json(folder / "config.json")
    config = config_from_dict(raw)
    architecture = ARCHITECTURES[config.model_type]
    if architecture not in (raw.get("architectures") or [architecture]):
        raise ValueError(f"architecture {raw['architectures'][0]!r} is not supported: a {config.model_type} checkpoint must be a {architecture}")
    tok = load_tokenizer(folder, config) if tokenizer else None
    net = Decoder(config, dtype, device) if fresh is None else random_model(raw, fresh, dtype, device)
    if fresh is None:
        load_weights(net, folder)
    if (folder / "generation_config.json").exists():
        net.generation = read_json(folder / "generation_config.json")
    net.stop_ids = stop_ids(net, tok)
    if tok is not None:
        net.vocab, tok.stop_ids = min(tok.vocab, config.vocab_size), net.stop_ids
    elif tokenizer:
        print(f"note: {folder} has no tokenizer; prompts must be token ids")
    return net, tok


def save_pretrained(net, path, tok=None, state=None, shard_bytes=5_000_000_000):
    """Writes a folder that transformers opens with equal logits: config.json, model.safetensors (or shards of at most `shard_bytes` and their index),
    generation_config.json, and the tokenizer's files byte for byte. Each file gets its name only when it is whole, config.json last.

    state: {parameter name: whole tensor}, where the parameters are spread over ranks; default the net's own.
    """
    from safetensors.torch import save_file
    net, folder = getattr(net, "_orig_mod", net), Path(path)  # torch.compile's wrapper would put its name into every key
    state = dict(net.named_parameters()) if state is None else state
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, how):
        how(folder / f".{name}.tmp")
        os.replace(folder / f".{name}.tmp", folder / name)

    shards, size, total = [[]], 0, 0  # lists of (tensor name, parameter name, first row, rows)
    for name, parts in file_names(net):
        row, row_bytes = 0, state[name][0].numel() * state[name].element_size()
        for part, rows in parts:
            if shards[-1] and size + rows * row_bytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append((part, name, row, rows))
            size, total, row = size + rows * row_bytes, total + rows * row_bytes, row + rows
    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards):
        tensors = {part: state[name].detach()[row:row + rows].cpu().contiguous() for part, name, row, rows in shard}
        write(file, lambda tmp: save_file(tensors, tmp, metadata={"format": "pt"}))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {part: file for file, shard in zip(files, shards) for part, *_ in shard}}
        files.append("model.safetensors.index.json")
        write(files[-1], lambda tmp: tmp.write_text(json.dumps(index, indent=1)))
    for old in folder.glob("model*.safetensors*"):  # of an earlier save with another number of shards
        if old.name not in files and re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", old.name):
            old.unlink()
    for name, data in (tok.files if tok is not None else {}).items():
        write(name, lambda tmp: tmp.write_bytes(data))
    generation = net.generation or ({"eos_token_id": list(net.stop_ids)} if net.stop_ids else None)
    if generation:
        write("generation_config.json", lambda tmp: tmp.write_text(json.dumps(generation, indent=1)))
    raw = {"architectures": [ARCHITECTURES[net.config.model_type]], **net.config.raw}
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    write("config.json", lambda tmp: tmp.write_text(json.dumps(raw, indent=1)))
