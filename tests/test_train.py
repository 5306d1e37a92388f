"""The training loop: it learns, goes on bit for bit, and refuses in one sentence.    pytest tests/test_train.py"""
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo
import train
from model import load_pretrained

ROOT = Path(__file__).resolve().parent.parent
FAST = ["--prompts", "4", "--group", "4", "--max-new-tokens", "24", "--data", "chain:2", "--eval-prompts", "8", "--seed", "3"]


def run(*args):
    return subprocess.run([sys.executable, "train.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True, env=None)


def lines(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


def without_times(records):
    timed = ("seconds", "rollout/seconds", "train/seconds", "rollout/tok_s")
    return [{k: v for k, v in r.items() if k not in timed} for r in records]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four steps of s3r with k = auto, in one go."""
    out = tmp_path_factory.mktemp("runs") / "four"
    r = run("--steps", 4, "--out", out, "--save-every", 2, *FAST)
    assert r.returncode == 0, r.stderr
    return out, r


def test_a_run_leaves_what_it_promises(four):
    out, r = four
    steps = [m for m in lines(out / "metrics.jsonl") if "reward" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "entropy", "kl", "grad_norm", "sampling/sampling_logp_difference/mean",
                 "rollout/tok_s", "rollout/seconds", "train/seconds", "spec/tau", "spec/accept_rate", "spec/k", "kv/offload_bytes", "kv/running"):
        assert name in steps[-1], name
    samples = lines(out / "samples.jsonl")
    assert len(samples) == 4 * 16 and {"ids", "text", "reward", "group", "logps"} <= set(samples[0])
    assert max(m["sampling/sampling_logp_difference/mean"] for m in steps) < 1e-5, "fp32: the rollout's log-probabilities are the trainer's"
    assert {"flags", "versions"} <= set(json.loads((out / "run.json").read_text())) and json.loads((out / "cost.json").read_text())["linear"]
    for word in ("device", "memory", "KV pool", "optimizer", "done in"):
        assert word in r.stdout


def test_two_and_two_steps_are_four(four, tmp_path):
    """Resumed from a checkpoint, with what was written after it cut away: same bits, same samples."""
    whole, _ = four
    out = tmp_path / "parts"
    assert run("--steps", 2, "--out", out, "--cost", whole / "cost.json", *FAST).returncode == 0
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "reward": 9}\n{"step": 3, "rew')
    r = run("--steps", 4, "--out", out, "--resume", *FAST)
    assert r.returncode == 0, r.stderr
    a, b = (load_pretrained(x / "checkpoint-4")[0].state_dict() for x in (whole, out))
    assert all(torch.equal(a[k], b[k]) for k in a)
    for file in ("metrics.jsonl", "samples.jsonl"):
        x, y = (without_times([r for r in lines(p / file) if "eval/reward" not in r]) for p in (whole, out))
        assert x == y
    assert json.loads((out / "cost.json").read_text()) == json.loads((whole / "cost.json").read_text())
    r = run("--steps", 4, "--out", out, "--resume", *FAST)
    assert r.returncode == 2 and "raise --steps" in r.stderr
    r = run("--steps", 6, "--out", out, "--resume", *FAST, "--lr", "1e-3")
    assert r.returncode == 2 and "--lr 0.001 (was 0.0001)" in r.stderr and len(lines(out / "samples.jsonl")) == 64


def test_checkpoint_opens_in_transformers(four):
    transformers = pytest.importorskip("transformers")
    out, _ = four
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
    net, tok = load_pretrained(out / "checkpoint-4")
    ids = torch.tensor(tok.encode("7 +5 = ?"))
    from sparse_attn import PackedCausal
    with torch.no_grad():
        mine = net.logits(net(ids, torch.arange(len(ids)), PackedCausal([len(ids)])))
        assert torch.allclose(mine, theirs(ids[None]).logits[0], atol=1e-4)


@pytest.mark.parametrize("args, words", [
    (["--methd", "ar"], "did you mean --method"),
    (["--method", "eagle3"], "not built yet"),
    (["--group", "1"], "at least 2"),
    (["--top-p", "0.9"], "biased"),
    (["--temperature", "0"], "temperature"),
    (["--steps", "0"], "--steps 0"),
    (["--k", "some"], "--k"),
    (["--loss", "ppo"], "--loss"),
    (["--data", "nowhere.jsonl"], "not a file"),
    (["--data", "chian"], "cannot tell what data"),
    (["--model", "nowhere"], "is no hub name"),
    (["--reward", "nowhere.py:f"], "no reward function"),
    (["--resume"], "--resume needs --out"),
    (["--resume", "--out", "out/nowhere-at-all"], "holds no run"),
    (["--max-new-tokens", "40000"], "context of 32,768"),
    (["--kv-tokens", "64"], "the pool holds 64"),
    (["--prompts", "200000"], "100000 rows"),
    (["--cost", "nowhere.json"], "cost constants"),
    (["--device", "tpu"], "not supported"),
])
def test_mistakes_are_one_sentence(args, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", *([] if "--out" in args or "--resume" in args else ["--out", str(tmp_path / "x")]), *args])
    try:
        code = train.main()
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr().err.strip()
    assert code == 2 and words in said and len(said.splitlines()) == 1, said
    assert not (tmp_path / "x").exists()


def test_bad_data_and_weights_are_named(tmp_path, monkeypatch, capsys):
    def main(*args):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, args)])
        code = train.main()
        return code, capsys.readouterr().err.strip()
    (tmp_path / "a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    code, said = main("--data", tmp_path / "a.jsonl", "--prompts", 1)
    assert code == 2 and "a.jsonl line 2" in said
    (tmp_path / "b.jsonl").write_text('{"q": "1+1?", "answer": "2"}\n')
    code, said = main("--data", tmp_path / "b.jsonl", "--prompts", 1)
    assert code == 2 and "--prompt-column" in said and "has q, answer" in said
    bad = tmp_path / "model"
    bad.mkdir()
    for f in (ROOT / "assets/tiny").iterdir():
        (bad / f.name).write_bytes(f.read_bytes()[:f.stat().st_size - (1000 if f.suffix == ".safetensors" else 0)])
    code, said = main("--model", bad)
    assert code == 2 and "model.safetensors" in said and len(said.splitlines()) == 1
    used = tmp_path / "used"
    used.mkdir()
    (used / "x").write_text("mine")
    code, said = main("--out", used)
    assert code == 2 and "exists" in said and (used / "x").read_text() == "mine"


def test_chunked_logps_have_the_whole_blocks_value_and_gradient(monkeypatch):
    net, _ = load_pretrained("tiny", torch.float64)
    h = torch.randn(50, net.config.hidden_size, dtype=torch.float64, requires_grad=True)
    t = torch.randint(0, net.vocab, (50,))
    grads = []
    for size in (1 << 40, 1):
        monkeypatch.setattr(train, "LOGIT_BYTES", size)
        assert train.chunk_rows(net.config.vocab_size) == max(16, size // (4 * net.config.vocab_size))
        logps, entropy = train.token_logps(net, h, t, 0.7)
        grads.append((logps.detach(), entropy, *torch.autograd.grad((logps * torch.arange(50)).sum(), [h, net.embed.weight])))
    for a, b in zip(*grads):
        assert torch.allclose(a, b, atol=1e-12)
    want = torch.log_softmax(net.logits(h)[:, :net.vocab] / 0.7, -1)
    assert torch.allclose(grads[0][0], want.gather(1, t[:, None])[:, 0], atol=1e-12)
    assert torch.allclose(grads[0][1], -(want.exp() * want).sum(-1), atol=1e-12)


def test_micro_batches_do_not_change_the_gradient():
    """The loss of a step is a sum over its whole denominator: cut into micro-batches it has the same gradient."""
    import contextlib
    net, tok = load_pretrained("tiny", torch.float64)
    pairs = [(tok.encode("1 +2 = ?"), tok.encode("1+2=3\n#### 3")), (tok.encode("5 -2 +7 = ?"), tok.encode("5-2=3\n")), (tok.encode("9"), tok.encode("#### 9"))]
    adv, n = torch.tensor([1.0, -0.5, 0.3]), [len(c) for _, c in pairs]
    grads = []
    for tokens in (10_000, 1):
        net.zero_grad()
        batches = train.micro_batches(pairs, tokens)
        assert len(batches) == (1 if tokens > 1 else 3)
        for batch in batches:
            logps, _ = train.packed_logps(net, [pairs[i] for i in batch], 1.0, contextlib.nullcontext())
            loss, _ = grpo.policy_loss(logps, None, adv[batch], [n[i] for i in batch], grpo.loss_denominator("dapo", n))
            loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert torch.allclose(*grads, atol=1e-12) and grads[0].norm() > 1e-3


def test_learning_rate_schedules():
    class A:
        lr, warmup, lr_steps, lr_schedule = 1.0, 2, 12, "linear"
    assert [round(train.learning_rate(A, s), 3) for s in (0, 1, 2, 7, 12)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    A.lr_schedule = "cosine"
    assert math.isclose(train.learning_rate(A, 7), 0.5) and train.learning_rate(A, 50) == 0
    A.lr_schedule = "constant"
    assert train.learning_rate(A, 99) == 1.0


@pytest.mark.parametrize("method, extra", [("ar", []), ("sparse", []), ("s3r", ["--k", "3", "--verify", "block", "--loss", "grpo", "--kl-beta", "0.01"]), ("sft", ["--from-scratch", "--lr-schedule", "cosine"]),
                                           ("s3r", ["--dtype", "bf16", "--k", "2", "--checkpointing", "--mask-truncated", "--is-correction", "token-mask", "--weight-decay", "0.1"])])
def test_every_method_trains(method, extra, tmp_path):
    r = run("--method", method, "--steps", 2, "--out", tmp_path / "x", "--eval-data", "none", *FAST, *extra)
    assert r.returncode == 0, r.stderr
    steps = lines(tmp_path / "x" / "metrics.jsonl")
    assert len(steps) == 2 and all(math.isfinite(m["loss"]) for m in steps) and (tmp_path / "x" / "checkpoint-2" / "model.safetensors").exists()


@pytest.mark.real
def test_real_checkpoint_trains_on_questions(real_model, tmp_path):
    r = run("--model", real_model, "--method", "s3r", "--data", ROOT / "assets/data/arithmetic.jsonl", "--steps", 2, "--prompts", 2, "--group", 4, "--max-new-tokens", 48, "--k", 2, "--lr", "1e-6",
            "--out", tmp_path / "x")
    assert r.returncode == 0, r.stderr
    steps = lines(tmp_path / "x" / "metrics.jsonl")
    assert len(steps) == 2 and max(m.get("sampling/sampling_logp_difference/mean", 0) for m in steps) < 1e-4
    assert load_pretrained(tmp_path / "x" / "checkpoint-2")[0].config.layers == 30
