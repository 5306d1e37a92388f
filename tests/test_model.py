"""model.py against transformers, in both directions, and what it refuses.    pytest tests/test_model.py

With a real checkpoint:    NANOROLL_REAL_MODEL=/path/to/SmolLM2-135M-Instruct pytest tests/test_model.py
"""
import copy
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from model import Config, config_from_dict, load_pretrained, random_model, rope_frequencies, save_pretrained

BASE = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=256, rms_norm_eps=1e-6, initializer_range=0.2, hidden_act="silu", eos_token_id=2, bos_token_id=1, pad_token_id=0)
LLAMA = dict(BASE, model_type="llama", rope_theta=10000.0, tie_word_embeddings=False)
QWEN2 = dict(BASE, model_type="qwen2", rope_theta=1000000.0, tie_word_embeddings=True)
QWEN3 = dict(BASE, model_type="qwen3", rope_theta=1000000.0, tie_word_embeddings=True, head_dim=32)  # 4 heads of 32 in a hidden size of 64
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

VARIANTS = {
    "llama": LLAMA,
    "llama-2, no theta": {k: v for k, v in LLAMA.items() if k != "rope_theta"},
    "llama, one kv head per head": dict(LLAMA, num_key_value_heads=None),
    "llama, head_dim, tied": dict(LLAMA, head_dim=24, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama, biases": dict(LLAMA, attention_bias=True, mlp_bias=True),
    "llama3 in rope_scaling": dict(LLAMA, rope_theta=500000.0, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "llama3 in rope_parameters": {k: v for k, v in dict(LLAMA, rope_parameters=dict(LLAMA3, rope_theta=5000.0)).items() if k != "rope_theta"},
    "linear, by its old name": dict(LLAMA, rope_scaling={"type": "linear", "factor": 4.0}),
    "linear in rope_parameters": dict(QWEN3, rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 777.0}),
    "qwen2": QWEN2,
    "qwen2, untied": dict(QWEN2, tie_word_embeddings=False, use_sliding_window=False, sliding_window=32, max_window_layers=1),
    "qwen2, default in rope_parameters": {k: v for k, v in dict(QWEN2, rope_parameters={"rope_type": "default", "rope_theta": 1234.0}).items() if k != "rope_theta"},
    "qwen2, yarn": dict(QWEN2, rope_scaling=YARN),
    "qwen2, head_dim": dict(QWEN2, head_dim=24),
    "qwen3": QWEN3,
    "qwen3, untied, biases": dict(QWEN3, tie_word_embeddings=False, attention_bias=True),
    "qwen3, yarn by its old name": dict(QWEN3, rope_theta=10000.0, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "qwen3, yarn with everything": dict(QWEN3, rope_theta=10000.0, rope_scaling=dict(YARN, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=1.3, truncate=False)),
    "qwen3, yarn with attention_factor": dict(QWEN3, rope_theta=10000.0, rope_scaling=dict(YARN, attention_factor=1.25)),
}


def causal(lengths):
    """The plainest attention there is: causal inside each of the packed sequences."""
    def attend(q, k, v):
        parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)))
        return torch.cat([F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0] for q, k, v in parts], 1).transpose(0, 1)
    return attend


def run(net, ids, positions=None):
    with torch.no_grad():
        return net.logits(net(ids, torch.arange(len(ids)) if positions is None else positions, causal([len(ids)])))


def roughen(net, seed=1):
    """Norm weights and biases away from 1 and 0, so that a lost or swapped one shows."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=random))
    return net


def tokens(n=150, vocab=96, seed=0):
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def edit_json(path, **changes):
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "remove"}))


@pytest.fixture
def folder(tmp_path):
    """An untied Llama's folder, to be damaged."""
    save_pretrained(roughen(random_model(LLAMA)), tmp_path / "m")
    return tmp_path / "m"


def refused(path, match, **options):
    """ValueError, in one sentence that says `match`."""
    with pytest.raises(ValueError, match=match) as e:
        load_pretrained(path, **options)
    assert "\n" not in str(e.value) and len(str(e.value)) < 500
    return str(e.value)


# ---------------------------------------------------------------------------------------------------------------------
# transformers as the oracle

@pytest.mark.parametrize("name", VARIANTS)
def test_reads_what_transformers_writes(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**copy.deepcopy(VARIANTS[name]))  # it writes into the dicts it is given
    torch.manual_seed(0)
    theirs = roughen(transformers.AutoModelForCausalLM.from_config(config)).eval()
    theirs.save_pretrained(tmp_path)
    net, tok = load_pretrained(tmp_path)
    ids = tokens()
    with torch.no_grad():
        want = theirs(ids[None], output_hidden_states=True)
    assert tok is None and want.logits.std() > 0.3
    torch.testing.assert_close(run(net, ids), want.logits[0], rtol=0, atol=1e-4)
    with torch.no_grad():
        hidden, features = net(ids, torch.arange(len(ids)), causal([len(ids)]), features=(0, 1))
    torch.testing.assert_close(features, torch.cat([want.hidden_states[0][0], want.hidden_states[1][0]], -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(hidden, want.hidden_states[-1][0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_what_is_written(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    net = roughen(random_model(VARIANTS[name], seed=3))
    save_pretrained(net, tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ids = tokens(seed=1)
    with torch.no_grad():
        torch.testing.assert_close(run(net, ids), theirs.eval()(ids[None]).logits[0], rtol=0, atol=1e-4)
    again, _ = load_pretrained(tmp_path)
    assert torch.equal(run(again, ids), run(net, ids)) and again.config == config_from_dict(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.real
def test_smollm2_equals_transformers(real_model, tmp_path):
    transformers = pytest.importorskip("transformers")
    net, tok = load_pretrained(real_model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    ids = torch.tensor(tok.encode("The quick brown fox jumps over the lazy dog. def f(x):\n    return x + 1\n\nWhat is 17 * 23? " * 8))
    with torch.no_grad():
        torch.testing.assert_close(run(net, ids), theirs(ids[None]).logits[0], rtol=0, atol=1e-4)
    assert net.vocab == 49152 and net.stop_ids == (2,) and net.context == 8192
    save_pretrained(net, tmp_path, tok)
    written, read = load_file(tmp_path / "model.safetensors"), load_file(f"{real_model}/model.safetensors")
    assert written.keys() == read.keys() and all(torch.equal(written[k], read[k]) for k in read)
    assert (tmp_path / "tokenizer.json").exists() and json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"


# ---------------------------------------------------------------------------------------------------------------------
# the forward pass

@pytest.mark.parametrize("raw", [LLAMA, QWEN2, QWEN3, VARIANTS["qwen3, yarn with everything"]], ids=["llama", "qwen2", "qwen3", "yarn"])
def test_float64_packing_and_shift(raw):
    """In float64: packed sequences equal single ones, rope sees only differences of positions, and float32 is the same function."""
    net = roughen(random_model(raw, dtype=torch.float64))
    a, b = tokens(20), tokens(33, seed=5)
    with torch.no_grad():
        hidden = net(torch.cat((a, b)), torch.cat((torch.arange(20), torch.arange(33))), causal([20, 33]))
        logits = net.logits(hidden)
    assert hidden.dtype == logits.dtype == torch.float64 and hidden.shape == (53, 64) and logits.shape == (53, 96)
    torch.testing.assert_close(logits, torch.cat((run(net, a), run(net, b))), rtol=0, atol=1e-12)
    torch.testing.assert_close(run(net, b, torch.arange(33) + 100), run(net, b), rtol=0, atol=1e-9)
    assert (run(net, b, torch.arange(33) * 2) - run(net, b)).abs().max() > 1e-3
    narrow = roughen(random_model(raw))
    torch.testing.assert_close(run(narrow, b).double(), run(net, b), rtol=0, atol=1e-4)
    half = random_model(raw, dtype=torch.bfloat16)
    assert run(half, b).dtype == torch.bfloat16 and run(half, b).isfinite().all()


def test_attention_is_called_once_a_layer_with_the_shapes_that_are_promised():
    net, seen = random_model(QWEN3), []

    def attend(q, k, v):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return q
    hidden, features = net(tokens(7), torch.arange(7), attend, features=(2, 0))
    assert seen == [((7, 4, 32), (7, 2, 32), (7, 2, 32))] * 2
    assert hidden.shape == (7, 64) and features.shape == (7, 128)
    assert torch.equal(features[:, 64:], net.embed.weight[tokens(7)]) and torch.equal(net.norm(features[:, :64]), hidden)
    with pytest.raises(ValueError, match="0..2"):
        net(tokens(7), torch.arange(7), attend, features=(3,))


def test_checkpointing_changes_no_gradient():
    nets = [roughen(random_model(QWEN3, dtype=torch.float64)) for _ in range(2)]
    nets[1].checkpointing, calls = True, [0, 0]
    for i, net in enumerate(nets):
        def attend(q, k, v):
            calls[i] += 1
            return causal([9])(q, k, v)
        hidden, features = net(tokens(9), torch.arange(9), attend, features=(1,))
        (net.logits(hidden).logsumexp(-1).sum() + features.square().sum()).backward()
    assert calls == [2, 4]  # the layers ran a second time
    for p, q in zip(*(net.parameters() for net in nets)):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def test_random_models_are_equal_for_equal_seeds():
    a, b, c = random_model(LLAMA, seed=1), random_model(LLAMA, seed=1, dtype=torch.float64), random_model(LLAMA, seed=2)
    assert all(torch.equal(p.double(), q) for p, q in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.embed.weight, c.embed.weight) and a.stop_ids == (2,) and a.vocab == 96


# ---------------------------------------------------------------------------------------------------------------------
# rope

def frequencies(**changes):
    raw = {**LLAMA, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 131072, **changes}
    return rope_frequencies(config_from_dict({k: v for k, v in raw.items() if v != "remove"}), torch.float64)


def test_llama3_divides_the_slow_waves_only():
    scaling = dict(LLAMA3, factor=32.0, original_max_position_embeddings=8192)
    plain, _ = frequencies(rope_theta=500000.0)
    scaled, factor = frequencies(rope_theta=500000.0, rope_scaling=scaling)
    assert factor == 1.0 and torch.equal(scaled[:15], plain[:15]) and torch.allclose(scaled[-14:], plain[-14:] / 32, rtol=1e-12)
    assert all(plain[i] / 32 < scaled[i] < plain[i] for i in (15, 16, 17))
    assert not torch.allclose(scaled, frequencies(rope_theta=500000.0, rope_scaling=dict(scaling, factor=8.0))[0])


def test_theta_is_read_from_every_place_and_never_guessed(capsys):
    old, _ = frequencies(rope_theta=1000000.0)
    for new in (dict(rope_theta="remove", rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
                dict(rope_theta="remove", rope_parameters={"rope_theta": 1000000}),
                dict(rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})):
        assert torch.equal(frequencies(**new)[0], old)
    linear, _ = frequencies(rope_theta="remove", rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 1000000.0})
    assert torch.equal(linear, old / 2) and capsys.readouterr().out == ""
    assert torch.equal(frequencies(rope_theta="remove")[0], frequencies(rope_theta=10000.0)[0]) and "10000" in capsys.readouterr().out
    with pytest.raises(ValueError, match="rope_theta"):
        config_from_dict({k: v for k, v in QWEN3.items() if k != "rope_theta"})


def test_yarn_scale_and_its_ends():
    f, scale = frequencies(rope_scaling=dict(YARN, factor=32.0, original_max_position_embeddings=4096))
    plain, _ = frequencies()
    assert scale == pytest.approx(0.1 * math.log(32) + 1) and f[0] == plain[0] and f[-1] == pytest.approx(plain[-1].item() / 32)
    assert frequencies(rope_scaling=dict(YARN, factor=32.0, attention_factor=1.5))[1] == 1.5


# ---------------------------------------------------------------------------------------------------------------------
# what is refused, by one sentence

@pytest.mark.parametrize("changes, match", [
    (dict(model_type="mixtral"), "mixtral.*llama, qwen2, qwen3"),
    (dict(model_type="qwen3_moe"), "qwen3_moe"),
    (dict(model_type="remove"), "None is not supported"),
    (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'.*default, linear, llama3, yarn"),
    (dict(rope_scaling={"type": "longrope", "short_factor": [1.0]}), "longrope"),
    (dict(rope_scaling={"rope_type": "linear"}), "factor"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor, high_freq_factor"),
    (dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}), "per layer"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised .gptq"),
    (dict(model_type="qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1), "sliding-window"),
    (dict(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]), "sliding-window"),
    (dict(hidden_act="gelu"), "gelu"),
    (dict(num_key_value_heads=3), "multiple of 3"),
    (dict(hidden_size="remove"), "hidden_size"),
])
def test_configs_that_are_refused(folder, changes, match):
    edit_json(folder / "config.json", **changes)
    (folder / "model.safetensors").unlink()  # the refusal comes before the weights are looked at
    refused(folder, match)


def test_a_window_that_no_layer_uses_is_no_window():
    assert config_from_dict(dict(QWEN2, use_sliding_window=True, max_window_layers=2)).layers == 2
    assert config_from_dict(dict(QWEN2, use_sliding_window=False, sliding_window=8, max_window_layers=0)).layers == 2


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_weight_is_accounted_for_in_both_directions(folder):
    whole = load_file(folder / "model.safetensors")
    for name in whole:  # any tensor that is lost is missed, by name
        save_file({k: v for k, v in whole.items() if k != name}, folder / "model.safetensors")
        refused(folder, "no lm_head.weight" if name == "lm_head.weight" else f"1 of {len(whole)} tensors are missing, first {name}")
    save_file({**whole, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64), "extra": torch.zeros(1)}, folder / "model.safetensors")
    refused(folder, "2 tensors have no place in a llama model, first extra")
    save_file({**whole, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, folder / "model.safetensors")
    load_pretrained(folder)  # old Llama files carry rope's table, which the config gives as well
    save_file({**whole, "model.norm.weight": torch.zeros(65)}, folder / "model.safetensors")
    refused(folder, r"model.norm.weight is \[65\] where config.json asks for \[64\]")
    swapped = dict(whole)  # right in sum, wrong apart: 64 + 32 + 32 rows of q, k, v
    a, b = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    swapped[a], swapped[b] = whole[b], whole[a]
    save_file(swapped, folder / "model.safetensors")
    refused(folder, r"q_proj.weight is \[32, 64\]")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        save_file({**whole, b: whole[b].to(dtype)}, folder / "model.safetensors")
        refused(folder, "quantised")


def test_heads_tied_untied_and_missing(folder, tmp_path):
    refused_text = "config.json says tie_word_embeddings false, but no lm_head.weight"
    tied = tmp_path / "tied"
    save_pretrained(random_model(dict(LLAMA, tie_word_embeddings=True)), tied)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    net, _ = load_pretrained(tied)
    assert net.head is None
    damage(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))  # stored all the same
    assert torch.equal(run(load_pretrained(tied)[0], tokens()), run(net, tokens()))
    damage(tied, lambda t: t["lm_head.weight"].add_(1))  # two different heads: which is meant?
    refused(tied, "ties the head to the embedding, but")
    damage(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, refused_text)
    edit_json(folder / "config.json", tie_word_embeddings="remove")  # absent means untied
    refused(folder, refused_text)


def test_files_that_are_missing_truncated_or_pickled(folder, tmp_path, monkeypatch):
    weights = (folder / "model.safetensors").read_bytes()
    for size in (0, 4, 100, len(weights) // 2, len(weights) - 1):
        (folder / "model.safetensors").write_bytes(weights[:size])
        refused(folder, "model.safetensors is truncated")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, "config.json, pytorch_model.bin.*pickled .bin files are never opened")
    (folder / "config.json").write_text("{")
    refused(folder, "not valid JSON")
    (folder / "config.json").unlink()
    refused(folder, "config.json does not exist")
    refused(tmp_path / "nowhere", "is not a folder, and .* is no hub name")


def test_hub_names(folder, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(folder))
    load_pretrained("Qwen/Qwen3-0.6B")
    assert asked[0][0] == "Qwen/Qwen3-0.6B" and not any(".bin" in p or ".py" in p for p in asked[0][1])

    def offline(*_, **__):
        raise OSError("no route to host\nand a long tale")
    monkeypatch.setattr(hub, "snapshot_download", offline)
    refused("Qwen/Qwen3-0.6B", "the hub did not give it .*no route to host")


# ---------------------------------------------------------------------------------------------------------------------
# saving

def test_shards_and_their_index(tmp_path):
    transformers = pytest.importorskip("transformers")
    net, ids = roughen(random_model(LLAMA)), tokens()
    save_pretrained(net, tmp_path)
    save_pretrained(net, tmp_path, shard_bytes=40_000)  # over the single file, which must not survive to be read instead
    files = sorted(f.name for f in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors" and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in net.parameters())
    assert all((tmp_path / f).stat().st_size < 45_000 for f in files)
    assert torch.equal(run(load_pretrained(tmp_path)[0], ids), run(net, ids))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids[None]).logits[0]
    torch.testing.assert_close(theirs, run(net, ids), rtol=0, atol=1e-4)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(tmp_path / files[1], moved / files[1])
    refused(tmp_path, f"{files[1]}, which the index names, is missing")
    (tmp_path / files[1]).write_bytes((moved / files[1]).read_bytes()[:-1])
    refused(tmp_path, f"{files[1]} is truncated")
    save_pretrained(net, tmp_path)  # and back to one
    assert [f.name for f in tmp_path.glob("model*")] == ["model.safetensors"] and not list(tmp_path.glob(".*"))


def test_an_index_that_leads_out_of_the_folder_is_refused(folder):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    refused(folder, "missing")


def test_the_config_goes_round_and_the_dtype_is_the_saved_one(folder, tmp_path):
    edit_json(folder / "config.json", something_else={"kept": True}, torch_dtype="float32")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [7, 9]}))
    net, _ = load_pretrained(folder, dtype=torch.bfloat16)
    assert net.stop_ids == (2, 7, 9) and net.embed.weight.dtype == torch.bfloat16 and isinstance(net.config, Config)
    save_pretrained(net, tmp_path / "again")
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert raw == {**net.config.raw, "torch_dtype": "bfloat16"} and raw["something_else"] == {"kept": True}
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == {"temperature": 0.6, "eos_token_id": [7, 9]}
    again, _ = load_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters()))
    edit_json(folder / "config.json", torch_dtype="remove", dtype="float32")
    save_pretrained(load_pretrained(folder, dtype=torch.float64)[0], tmp_path / "wide")
    raw = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert raw["dtype"] == "float64" and "torch_dtype" not in raw


def test_compiled_and_gathered_weights_are_saved_under_plain_names(folder, tmp_path):
    net, _ = load_pretrained(folder)
    save_pretrained(torch.compile(net), tmp_path / "compiled")
    state = {name: p.detach() + 1 for name, p in net.named_parameters()}
    save_pretrained(net, tmp_path / "gathered", state=state)
    read, compiled, gathered = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "compiled", tmp_path / "gathered"))
    assert read.keys() == compiled.keys() == gathered.keys()
    assert all(torch.equal(read[k], compiled[k]) and torch.equal(read[k] + 1, gathered[k]) for k in read)


def test_a_save_that_fails_leaves_the_old_files_whole(folder, monkeypatch):
    import safetensors.torch
    net, _ = load_pretrained(folder)
    before = {f.name: f.read_bytes() for f in folder.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise OSError("no space left on device")
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError):
        save_pretrained(net, folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir() if not f.name.startswith(".")} == before


# ---------------------------------------------------------------------------------------------------------------------
# the embedded model

def test_tiny():
    net, tok = load_pretrained("tiny")
    assert net.config.model_type == "qwen3" and net.vocab == tok.vocab <= net.config.vocab_size and net.stop_ids == tok.stop_ids != ()
    ids = torch.tensor(tok.chat([{"role": "user", "content": "What is 7 + 5?"}]))
    assert run(net, ids).isfinite().all() and ids.max() < net.vocab
    fresh, _ = load_pretrained("tiny", fresh=3)
    assert torch.equal(fresh.embed.weight, random_model(net.config.raw, 3).embed.weight) and fresh.vocab == net.vocab and fresh.stop_ids == net.stop_ids


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("tie", (False, True))
def test_packed_weights_follow_the_weights(dtype, tie):
    """Rollouts multiply by packed copies: the same products, and never a stale one, whatever changed the weights; training never sees them."""
    import model
    from sparse_attn import PackedCausal
    net = model.random_model({**VARIANTS["qwen2"], "tie_word_embeddings": tie}, dtype=dtype)
    n, tol = 7, {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 0}[dtype]
    ids, positions = torch.arange(n) % net.vocab, torch.arange(n)

    def logits():
        return net.logits(net(ids, positions, PackedCausal([n])))

    def agree():
        with torch.no_grad():
            got = logits()
        want = logits()  # with gradients: the plain product
        assert want.requires_grad and (got - want).abs().max() <= tol * want.abs().max()
        return want.detach()

    plain = agree()
    assert net.pack() == (0 if dtype == torch.float64 or not model.packs(dtype) else sum(p.numel() * p.element_size() for name, p in net.named_parameters() if p.dim() == 2 and (tie or "embed" not in name)))
    assert torch.equal(agree(), plain)
    for how in ({}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **how)
        logits().float().pow(2).sum().backward()
        if how.get("fused"):
            net.unpack()
            assert net.packed is None and net.layers[0].qkv.packed is None
        optimizer.step()
        net.pack()
        assert not torch.equal(agree(), plain)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    agree()
    net.load_state_dict(other.state_dict())
    agree()
    for p in net.parameters():
        p.data = p.data * 0.5
    agree()
