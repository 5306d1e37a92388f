"""The engine: admission, stops, groups, the cost model and the choice of k, refusals.    pytest tests/test_scheduler.py"""
import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kv_cache import PagedCache
from model import load_pretrained, save_pretrained
from scheduler import Engine, measure_cost, rollout
from spec_sample import Controller, Cost, Load, between, hash64, rising
from test_faithful import make, prompts, tiny

ROOT = Path(__file__).resolve().parent.parent
COST = dict(linear={1: 1e-4, 64: 2e-4}, read={1: {0: 0.0, 1: 1e-5}, 2: {0: 0.0, 1: 1e-5}, 5: {0: 0.0, 1: 1.2e-5}, 9: {0: 0.0, 1: 1.5e-5}}, score=1e-7, gather=1e-7, sparse=1e-5, start=1e-5, setup=1e-6, accept=1e-6)


def test_complete_groups_in_input_order_and_each_once():
    net, ps, done = tiny(), prompts(5, 40), []
    got, stats = rollout(net, ps, 4, 12, k=2, page=32, kv_tokens=512, on_group=done.append)
    assert [(r.group, r.index) for r in got] == [(g, i) for g in range(5) for i in range(4)]
    assert sorted(g[0].group for g in done) == list(range(5)) and all([r.index for r in g] == [0, 1, 2, 3] for g in done)
    assert all(r.prompt_ids == ps[r.group] for r in got) and stats["tokens"] == sum(len(r.ids) for r in got)


def test_stop_and_length():
    net, ps = tiny(), prompts(3, 40)
    stop = 3
    for method, k in (("ar", 0), ("s3r", 4)):
        got, _ = rollout(net, ps, 8, 15, method=method, k=k, stop_ids=(stop,), page=32)
        assert {r.finish for r in got} == {"stop", "length"}
        for r in got:
            assert r.ids.count(stop) == (r.finish == "stop") and (r.ids[-1] == stop) == (r.finish == "stop")
            assert len(r.ids) <= 15 and (r.finish == "stop" or len(r.ids) == 15)
    got, _ = rollout(net, ps, 2, 15, k=4, stop_ids=(), page=32)
    assert all(r.finish == "length" and len(r.ids) == 15 for r in got)
    got, _ = rollout(net, ps, 2, 1, k=4, stop_ids=(), page=32)
    assert all(len(r.ids) == 1 for r in got), "max_new_tokens 1: the prompt's own law gives it"


def test_context_limit_ends_a_row():
    net, (p,) = tiny(), prompts(1, 500)
    got, _ = rollout(net, [p], 2, 100, k=4, stop_ids=(), page=32)
    assert all(len(r.ids) == net.context - 500 and r.finish == "length" for r in got)


def test_pool_is_never_overrun_and_nobody_waits_for_ever():
    """Tight pool: rows wait, the promise holds at every step, everything is given back."""
    net, ps = tiny(), prompts(4, 70)
    c = net.config
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, 7 * 32, page=32, dtype=torch.float64)
    engine = Engine(net, cache, make(net, cache, "rejection", 1.0), Controller(3), stop_ids=())
    for i, p in enumerate(ps):
        engine.add(i, p, [hash64(i, j) for j in range(3)], 20)
    done, most = [], 0
    while engine.busy:
        done += engine.step()
        most = max(most, len(engine.rows))
        cache.check()
    assert len(done) == 12 and 1 <= most < 12 and cache.free_pages == cache.P


@pytest.mark.parametrize("kw, words", [
    (dict(prompts=[[1] * 600]), "600 tokens and the model's context is 512"),
    (dict(prompts=[[]]), "empty"),
    (dict(prompts=[[1] * 100], kv_tokens=64), "the pool holds 64"),
    (dict(method="eagle3"), "not built yet"),
    (dict(method="s3"), "there is no method 's3'"),
    (dict(verify="typical"), "no acceptance rule"),
    (dict(budget=0.0), "budget 0.0"),
    (dict(k=-1), "k -1"),
    (dict(temperature=-1), "temperature -1"),
    (dict(host_kv_tokens=5), "not built yet"),
    (dict(prompt_keys=[1, 1], prompts=[[1], [2]]), "key of its own"),
    (dict(group=0), "group 0"),
])
def test_refusals_are_one_sentence(kw, words):
    kw = dict(prompts=[[1, 2]]) | kw
    with pytest.raises(ValueError, match=words) as e:
        rollout(tiny(), kw.pop("prompts"), page=32, **({"k": 2} | kw))
    assert "\n" not in str(e.value)


def test_nothing_runs_when_one_prompt_cannot():
    seen = []
    with pytest.raises(ValueError, match="prompt 1"):
        rollout(tiny(), [[1, 2], [1] * 600], 2, 4, k=0, page=32, on_group=seen.append)
    assert not seen


def test_one_prompt_group_of_one_and_unicode_keys():
    got, _ = rollout(tiny(), prompts(1, 5), 1, 5, k=0, page=32, prompt_keys=["zeile-ä"])
    assert len(got) == 1 and got[0].key == "zeile-ä"


def test_between_is_piecewise_linear():
    assert between({1: 10.0, 3: 20.0}, 2) == 15 and between({1: 10.0, 3: 20.0}, 6) == 40 and between({4: 1.0}, 3) == 1
    assert rising({1: 5, 2: 9, 4: 7}) == {1: 5, 2: 7, 4: 7}, "a cost that falls as more is done would make work look free"


def test_cost_model_and_choice_of_k(tmp_path):
    cost = Cost(**COST)
    long = Load(rows=8, own=8 * 8000, shared=[], total=8 * 8000, reads=8 * 500, refresh=8)
    short = Load(rows=8, own=8 * 50, shared=[], total=8 * 50, reads=8 * 50, refresh=8)
    assert cost.round(4, long) < 2 * cost.round(0, long) and cost.round(4, short) > 4 * cost.round(0, short)
    shared = Load(rows=8, own=0, shared=[(8000, 8)], total=8 * 8000, reads=8 * 500, refresh=8)
    assert cost.round(0, shared) < cost.round(0, long), "a shared prompt is read once"
    cost.save(tmp_path / "cost.json")
    assert Cost.load(tmp_path / "cost.json") == cost
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as cost constants"):
        Cost.load(tmp_path / "bad.json")


def test_measured_constants_are_sane():
    cost = measure_cost(tiny(), rows=4, length=300, repeat=1)
    assert all(x > 0 for x in cost.linear.values()) and all(x >= 0 for t in cost.read.values() for x in t.values()) and cost.setup >= 0 and cost.sparse >= 0
    assert cost.made_on["layers"] == 2 and cost.made_on["device"] and "1 query" in str(cost)


def test_controller_learns_and_forgets():
    c = Controller("auto", Cost(**COST))
    for _ in range(200):
        c.observe([0] * 8, [4] * 8)
    assert c.alpha < 0.05
    for _ in range(64):
        c.observe([0] * 8, [0] * 8)
    assert c.alpha < 0.2, "what was learnt is not forgotten at once"
    for _ in range(448):
        c.observe([0] * 8, [0] * 8)
    assert c.alpha > 0.7, "nor for ever"
    c.observe([0] * 8, [1] * 8)
    assert c.alpha < 0.45, "one round of eight rows tells that nothing has changed"
    for _ in range(200):
        c.observe([4] * 8, [4] * 8)
    assert c.alpha > 0.95


def test_controller_asks_seldom_while_it_drafts_nothing(monkeypatch):
    rows = [types.SimpleNamespace(kv=types.SimpleNamespace(shared=(), length=40))] * 2
    asked, of = [], Load.of
    monkeypatch.setattr(Load, "of", lambda *a: asked.append(len(a[0])) or of(*a))
    c = Controller("auto", Cost(**COST | dict(read={1: {0: 0.0, 1: 0.0}}, start=1.0)))
    drafter = types.SimpleNamespace(reads=lambda n: n, refresh=8)
    assert [c.choose(rows, drafter, 16) for _ in range(16)] == [0] * 16 and len(asked) == 2
    c.choose(rows[:1], drafter, 16)
    assert asked == [2, 2, 1], "another number of rows is another question"


def test_imports_run_one_way():
    """Also those inside functions: the engine knows drafters, the cache and sampling, and no model."""
    draft, scheduler = {"spec_sample", "kv_cache", "model"}, {"draft", "kv_cache", "spec_sample"}
    every = {"spec_sample", "sparse_attn", "model", "kv_cache", "draft", "scheduler", "grpo"}
    may = dict(spec_sample=set(), sparse_attn=set(), model=set(), kv_cache={"sparse_attn"}, draft=draft, scheduler=scheduler, grpo=set(), train=every, bench=every)
    for name, allowed in may.items():
        nodes = list(ast.walk(ast.parse((ROOT / f"{name}.py").read_text())))
        found = {a.name for x in nodes if isinstance(x, ast.Import) for a in x.names} | {x.module for x in nodes if isinstance(x, ast.ImportFrom)}
        assert not (found & set(may)) - allowed, f"{name}.py imports {sorted((found & set(may)) - allowed)}"


def test_command_line_streams_and_refuses(tmp_path):
    def run(*args):
        return subprocess.run([sys.executable, "scheduler.py", *args], cwd=ROOT, capture_output=True, text=True)
    r = run("--prompt", "7 +5 -3 = ?", "--max-new-tokens", "20", "--k", "2")
    assert r.returncode == 0 and r.stdout.strip() and "tok/s" in r.stderr and "tau" in r.stderr
    save_pretrained(load_pretrained("tiny")[0], tmp_path)
    for args, words in ((("--promt", "x"), "did you mean --prompt"), (("--prompt", "x", "--model", str(tmp_path)), "has no tokenizer"), (("--prompt", "x", "--method", "dflash"), "not built yet"), (("--prompt", "x", "--model", "nowhere"), "is not a folder"),
                        (("--prompt", "x", "--device", "cuda:9"), "not available") if not torch.cuda.is_available() else (("--prompt", "x", "--device", "tpu"), "not supported")):
        r = run(*args)
        assert r.returncode == 2 and words in r.stderr and len(r.stderr.strip().splitlines()) == 1, r.stderr
