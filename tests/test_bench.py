"""The bench: its table, its JSON line, its acceptance walk.    pytest tests/test_bench.py"""
import argparse
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
from model import load_pretrained

ROOT = Path(__file__).resolve().parent.parent


def run(*args):
    return subprocess.run([sys.executable, "bench.py", *map(str, args)], cwd=ROOT, capture_output=True, text=True)


def test_table_and_json():
    r = run("--batch", "2", "--context", "40,300", "--new-tokens", "8", "--methods", "ar,s3r,sparse", "--k", "2")
    assert r.returncode == 0, r.stderr
    doc = json.loads(r.stdout.splitlines()[-1])
    assert {"device", "model", "bandwidth_gb_s", "rows"} <= set(doc) and len(doc["rows"]) == 6
    for row in doc["rows"]:
        assert {"method", "batch", "context", "tok_s", "speedup", "tau", "accept_rate", "k", "ms_draft", "ms_verify", "ms_other", "attention_share", "bandwidth_fraction"} <= set(row)
        assert row["tok_s"] > 0 and (row["method"] != "ar" or row["speedup"] == 1.0) and (row["method"] != "s3r" or row["tau"] > 1)


def test_rules_side_by_side_and_profile():
    r = run("--batch", "2", "--context", "64", "--new-tokens", "8", "--k", "2", "--verify", "rejection,block,coupled", "--profile")
    assert r.returncode == 0, r.stderr
    rows = json.loads(r.stdout.splitlines()[-1])["rows"]
    assert [(x["method"], x["rule"]) for x in rows] == [("ar", "rejection"), ("s3r", "rejection"), ("s3r", "block"), ("s3r", "coupled")]
    assert all(x["ms_python"] > 0 for x in rows) and "s3r coupled" in r.stdout


def test_plot_is_drawn_or_refused(tmp_path):
    r = run("--batch", "1,2", "--context", "32", "--new-tokens", "4", "--k", "1", "--plot", tmp_path / "x.png")
    try:
        import matplotlib  # noqa: F401
        assert r.returncode == 0 and (tmp_path / "x.png").stat().st_size > 10_000
    except ImportError:
        assert r.returncode == 2 and "pip install matplotlib" in r.stderr


@pytest.mark.parametrize("model, B, S, want", [("Qwen3-1.7B", 8, 4096, 1.43), ("Qwen3-1.7B", 32, 16384, 3.96), ("Qwen3-1.7B", 1, 1024, 0.82), ("Qwen3-8B", 32, 16384, 2.62),
                                               ("Qwen3-8B", 8, 32768, 1.95), ("Qwen3-8B", 128, 1024, 0.92)])
def test_roofline_of_an_h200(model, B, S, want):
    """Worked out elsewhere: 8 drafts, 7.16 tokens a round, a twentieth of the KV read, no launch costs."""
    shape, of = bench.QWEN3[model], lambda k, reads=None: bench.roofline(bench.QWEN3[model], bench.H200, B, S, k, reads)
    assert abs(7.16 * of(0) / (of(8) + 8 * of(0, max(128, 0.05 * S))) / want - 1) < 0.05
    alpha = next(a / 1000 for a in range(1000) if bench.spec_sample.expected_tokens(a / 1000, 8) >= 7.16)
    assert abs(bench.predicted(shape, bench.H200, B, S, 8, alpha, 0.05) / want - 1) < 0.05
    assert bench.predicted(shape, bench.H200, 128, 32768, 8, alpha) is None, "that KV is more than there is memory"


def test_prediction_is_held_against_measurement():
    r = run("--predict", "--batch", "2", "--context", "64", "--new-tokens", "8")
    assert r.returncode == 0, r.stderr
    doc = json.loads(r.stdout.splitlines()[-1])
    assert {x["k"] for x in doc["rows"]} == {*bench.DRAFTS, "auto"} and len(doc["h200"]) == 80 and "predictions within 15%" in r.stdout
    assert all(x["predicted"] > 0 and abs(x["predicted"] / x["speedup"] - 1 - x["error"]) < 1e-9 for x in doc["rows"] if x["k"] != "auto")


def test_acceptance_is_one_where_drafts_read_everything():
    net, tok = load_pretrained("tiny", torch.float64)
    net.requires_grad_(False)
    ids = tok.encode("the quick brown fox jumps over the lazy dog " * 20)
    assert bench.acceptance(net, ids, 200, 5, budget=1.0).min() > 1 - 1e-9
    seen = bench.acceptance(net, ids, 400, 5, budget=1e-6, floor=32)
    assert seen.shape == (5, 4) and seen.max() < 1 - 1e-9


@pytest.mark.parametrize("args, words", [(["--batch", "x"], "whole numbers"), (["--context", "40000"], "limit of 32,768"), (["--methods", "eagle3"], "not built yet"),
                                         (["--text", "nowhere.txt"], "not a file"), (["--bacth", "1"], "did you mean --batch"), (["--batch", "0"], "at least 1"), (["--verify", "rejection,hope"], "acceptance rule")])
def test_mistakes_are_one_sentence(args, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *args])
    try:
        code = bench.main()
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr().err.strip()
    assert code == 2 and words in said and len(said.splitlines()) == 1, said


@pytest.mark.real
def test_acceptance_on_a_real_checkpoint(real_model):
    """4K tokens of context, a sixteenth of it read: about 0.86 of the drafts would be accepted (README), far more than by the nearest tokens alone."""
    net, tok = load_pretrained(real_model, torch.bfloat16)
    net.requires_grad_(False)
    ids = tok.encode(inspect.getsource(argparse))  # a text that our own edits do not change
    chosen, nearest = (float(bench.acceptance(net, ids, 4096, 32, recent_share=share).mean()) for share in (0.25, 1.0))  # measured 0.857 and 0.623, +-0.02
    assert chosen > 0.78 and chosen > nearest + 0.1, (chosen, nearest)
