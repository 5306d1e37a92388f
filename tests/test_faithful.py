"""The promise: whatever is drafted, responses are the dense policy's.    pytest tests/test_faithful.py

float64 on tiny random models whose laws are far from uniform and whose sparse drafts are often wrong (a budget of one block).
"""
import argparse
import itertools
import math
from pathlib import Path

import pytest
import torch

import kv_cache
from draft import SparseSelf
from kv_cache import PagedCache
from model import load_pretrained, random_model
from scheduler import Engine, Response, Row, rollout
from spec_sample import Controller, Cost, hash64, law
from sparse_attn import PackedCausal

CONFIG = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              intermediate_size=48, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, initializer_range=0.6, hidden_act="silu", eos_token_id=1)


def tiny(vocab=12, seed=0):
    net = random_model({**CONFIG, "vocab_size": vocab}, seed, torch.float64)
    net.requires_grad_(False)
    return net


def prompts(n, length=150, vocab=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length + 7 * i,), generator=g).tolist() for i in range(n)]



def dense_logps(net, prompt, ids, temperature):
    h = net(torch.tensor(prompt + ids), torch.arange(len(prompt) + len(ids)), PackedCausal([len(prompt) + len(ids)]))
    return law(net.logits(h[len(prompt) - 1:-1]), temperature, net.vocab).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


def make(net, cache, rule, temperature, **kw):
    return SparseSelf(net, cache, "greedy" if temperature == 0 else rule, temperature, budget=1e-6, floor=48, refresh=5, **kw)


# ----------------------------------------------------------------------------------------------------------------------
# coupled: the same tokens, whatever happens around them


def coupled(net, ps, method, k, **kw):
    kw = dict(group=3, max_new_tokens=24, temperature=1.0, seed=5, verify="coupled", page=32) | kw
    drafter = (lambda n, c: make(n, c, "coupled", kw["temperature"])) if method == "s3r" else None
    return rollout(net, ps, method=method, k=k, drafter=drafter, **kw)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7])
def test_coupled_s3r_gives_the_tokens_of_ar(k):
    net, ps = tiny(), prompts(3)
    plain, _ = coupled(net, ps, "ar", 0)
    fast, stats = coupled(net, ps, "s3r", k)
    assert [r.ids for r in fast] == [r.ids for r in plain] and [r.finish for r in fast] == [r.finish for r in plain]
    assert max(abs(a - b) for x, y in zip(fast, plain) for a, b in zip(x.logps, y.logps)) < 1e-9
    assert k == 0 or 0.02 < stats["accept_rate"] < 0.98, "the test wants drafts that are sometimes wrong"


def test_coupled_does_not_depend_on_batch_order_or_pool():
    net, ps = tiny(), prompts(4)
    want = {r.key: [] for r in coupled(net, ps, "ar", 0)[0]}
    for r in coupled(net, ps, "ar", 0)[0]:
        want[r.key].append(r.ids)
    for order, pool, k in (([2, 0, 3, 1], None, 3), ([3], None, 2), ([1, 0, 2, 3], 320, 4), ([0, 1, 2, 3], 256, 2)):
        got, stats = coupled(net, [ps[i] for i in order], "s3r", k, prompt_keys=order, kv_tokens=pool)
        for r in got:
            assert r.ids == want[r.key][r.index]
        assert pool is None or stats["running"] < 12, "the small pool must have made rows wait"


def test_other_seeds_steps_and_keys_give_other_responses():
    net, ps = tiny(), prompts(1)
    base = [r.ids for r in coupled(net, ps, "ar", 0)[0]]
    assert base == [r.ids for r in coupled(net, ps, "ar", 0)[0]]
    assert len({tuple(x) for x in base}) == 3, "members of a group differ"
    for other in (dict(seed=6), dict(step=1), dict(prompt_keys=[9])):
        assert base != [r.ids for r in coupled(net, ps, "ar", 0, **other)[0]]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_same_seed_same_responses(rule):
    net, ps = tiny(), prompts(2)
    runs = [rollout(net, ps, 3, 20, k=3, verify=rule, seed=1, page=32, drafter=lambda n, c: make(n, c, rule, 1.0))[0] for _ in range(2)]
    assert [r.ids for r in runs[0]] == [r.ids for r in runs[1]]


def test_greedy_is_the_arg_max():
    net, ps = tiny(), prompts(2)
    fast, stats = rollout(net, ps, 1, 20, temperature=0, k=4, page=32, drafter=lambda n, c: make(n, c, "greedy", 0), stop_ids=())
    for r in fast:
        h = net(torch.tensor(r.prompt_ids + r.ids), torch.arange(len(r.prompt_ids) + 20), PackedCausal([len(r.prompt_ids) + 20]))
        assert net.logits(h[len(r.prompt_ids) - 1:-1]).argmax(-1).tolist() == r.ids


# ----------------------------------------------------------------------------------------------------------------------
# log-probabilities and K/V are those of a clean dense pass


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logps_are_the_dense_policys(rule, temperature):
    net, ps = tiny(), prompts(2)
    got, stats = rollout(net, ps, 4, 30, k=3, temperature=temperature, verify=rule, page=32, drafter=lambda n, c: make(n, c, rule, temperature))
    assert stats["accepted"] > 0
    for r in got:
        want = dense_logps(net, r.prompt_ids, r.ids, temperature)
        assert max(abs(a - b) for a, b in zip(r.logps, want)) < 1e-9
        assert r.sample_logps == r.logps and len(r.ids) == len(r.logps)


def test_pool_holds_a_clean_prefill_after_every_round():
    """Nothing that came through sparse attention survives, and the invariant kv_len == committed - 1 holds."""
    net, (p,) = tiny(), prompts(1)
    c = net.config
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, 4096, page=32, dtype=torch.float64)
    engine = Engine(net, cache, make(net, cache, "rejection", 1.0), Controller(4), stop_ids=())
    engine.add(0, p, [hash64(0, i) for i in range(3)], 40)
    while engine.busy:
        engine.step()
        cache.check()
        for row in engine.rows:
            n = row.kv.length
            assert n == len(row.tokens) - 1
            clean = PagedCache(c.layers, c.kv_heads, c.head_dim, n, page=32, dtype=torch.float64)
            s = clean.new(n)
            net(torch.tensor(row.tokens[:-1]), torch.arange(n), clean.dense([s], [n]))
            for layer in range(c.layers):
                for mine, theirs in ((cache.k, clean.k), (cache.v, clean.v)):
                    assert torch.allclose(mine[layer][:, cache.slots(row.kv, 0, n)], theirs[layer][:, clean.slots(s, 0, n)], atol=1e-11)
    assert cache.free_pages == cache.P and engine.stats["accepted"] > 0


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_budget_of_everything_is_never_refused(rule):
    """budget >= length: the draft law is the dense law, so every draft stands."""
    net, ps = tiny(), prompts(2)
    _, stats = rollout(net, ps, 3, 25, k=4, verify=rule, budget=1.0, page=32, stop_ids=())
    assert stats["accept_rate"] == 1.0 and abs(stats["overlap"] - 1) < 1e-9


def test_foil_keeps_both_laws():
    """--method sparse: sample_logps are the sparse law's (they differ), logps the dense law's."""
    net, ps = tiny(), prompts(2)
    got, _ = rollout(net, ps, 3, 30, method="sparse", page=32, drafter=lambda n, c: make(n, c, "rejection", 1.0))
    for r in got:
        want = dense_logps(net, r.prompt_ids, r.ids, 1.0)
        assert max(abs(a - b) for a, b in zip(r.logps, want)) < 1e-9
        assert max(abs(a - b) for a, b in zip(r.sample_logps, want)) > 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# the law of whole responses


def sequence_law(net, prompt, n, temperature, stop):
    """Every response of at most n tokens -> its probability under plain decoding, by enumeration."""
    laws, done = {(): 1.0}, {}
    for _ in range(n):
        heads = list(laws)
        ids = [prompt + list(h) for h in heads]
        h = net(torch.tensor([x for y in ids for x in y]), torch.cat([torch.arange(len(y)) for y in ids]), PackedCausal([len(y) for y in ids]))
        last = torch.tensor([len(y) for y in ids]).cumsum(0) - 1
        p = law(net.logits(h[last]), temperature, net.vocab).exp().tolist()
        grown = {}
        for head, row in zip(heads, p):
            for x, px in enumerate(row):
                (done if x == stop else grown)[head + (x,)] = laws[head] * px
        laws = grown
    return done | laws


@pytest.mark.parametrize("rule, k, temperature", [("rejection", 0, 1.0), ("rejection", 1, 1.0), ("rejection", 2, 0.7), ("rejection", 3, 1.0), ("rejection", 4, 0.7),
                                                  ("block", 2, 1.0), ("block", 3, 0.7), ("block", 4, 1.0), ("coupled", 2, 1.0), ("coupled", 4, 0.7)])
def test_chi_square_of_whole_responses(rule, k, temperature):
    """4,000 responses of up to 4 tokens against the enumerated law of plain decoding. The bound is the 1 - 1e-6 quantile."""
    net, prompt, n, N = tiny(4, seed=3), prompts(1, 90, 4, seed=2)[0], 4, 4000
    expect = sequence_law(net, prompt, n, temperature, stop=1)
    assert abs(sum(expect.values()) - 1) < 1e-9
    got, stats = rollout(net, [prompt], N, n, k=k, temperature=temperature, verify=rule, seed=11, page=32, stop_ids=(1,), drafter=lambda m, c: make(m, c, rule, temperature))
    seen = {}
    for r in got:
        seen[tuple(r.ids)] = seen.get(tuple(r.ids), 0) + 1
    chi, cells, rest = 0.0, 0, [0.0, 0]
    for y, p in expect.items():
        if p * N < 5:
            rest[0] += p * N
            rest[1] += seen.get(y, 0)
        else:
            chi += (seen.get(y, 0) - p * N) ** 2 / (p * N)
            cells += 1
    if rest[0] >= 5:
        chi, cells = chi + (rest[1] - rest[0]) ** 2 / rest[0], cells + 1
    assert set(seen) <= set(expect) and cells > 10
    dof = cells - 1
    assert chi < dof * (1 - 2 / (9 * dof) + 4.75 * math.sqrt(2 / (9 * dof))) ** 3, f"chi-square {chi:.1f} at {dof} degrees of freedom"
    assert k == 0 or 0.05 < stats["accept_rate"] < 0.97


def test_sequence_law_by_enumeration():
    """The law of the first two tokens after a round with k = 2, summed over everything the drafter may say: exactly p, no sampling."""
    from spec_sample import round_law
    net, prompt = tiny(4, seed=3), prompts(1, 90, 4, seed=2)[0]
    c, V = net.config, 4
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, 2048, page=32, dtype=torch.float64)
    seq = cache.new(200)
    P = len(prompt)
    net(torch.tensor(prompt[:-1]), torch.arange(P - 1), view := cache.dense([seq], [P - 1], score=True))
    drafter = make(net, cache, "rejection", 1.0)
    row = Row(Response(0, 0, prompt, [], [], []), list(prompt), P + 9, 1, round=1, kv=seq)
    drafter.start([[row]], [seq], view, [P - 2])

    def draft_law(head):  # q for the token after prompt + head, through a fresh sparse view
        v = drafter.view([row], len(head) + 1)
        for j, x in enumerate([prompt[-1], *head]):
            h = net(torch.tensor([x]), torch.tensor([P - 1 + j]), v)
        return law(net.logits(h), 1.0, V)[0].exp()

    def dense_law(head):
        h = net(torch.tensor(prompt + list(head)), torch.arange(P + len(head)), PackedCausal([P + len(head)]))
        return law(net.logits(h[-1:]), 1.0, V)[0].exp()

    q = {h: draft_law(h) for n in (0, 1) for h in itertools.product(range(V), repeat=n)}
    p = {h: dense_law(h) for n in (0, 1, 2) for h in itertools.product(range(V), repeat=n)}
    out = round_law("rejection", p, q, 2)  # {emitted prefix: probability}, prefixes of 1 to 3 tokens
    first = torch.zeros(V, dtype=torch.float64)
    for y, w in out.items():
        first[y[0]] += w
    assert torch.allclose(first, p[()], atol=1e-12)
    pair = {}
    for y, w in out.items():  # a round that emitted one token goes on from the dense law: y_2 then has it exactly
        for x in ([y[1]] if len(y) > 1 else range(V)):
            pair[y[0], x] = pair.get((y[0], x), 0.0) + w * (1.0 if len(y) > 1 else p[y[:1]][x].item())
    for (a, b), w in pair.items():
        assert abs(w - (p[()][a] * p[(a,)][b]).item()) < 1e-12
    assert max((p[()] - q[()]).abs().max().item(), 0) > 1e-3, "the drafts' law must differ from the dense one"


# ----------------------------------------------------------------------------------------------------------------------
# auto


def test_auto_with_equal_constants_gives_equal_responses():
    net, ps = tiny(), prompts(2)
    cost = Cost(linear={1: 1e-4, 64: 2e-4}, read={1: {0: 0.0, 1: 1e-5}, 2: {0: 0.0, 1: 1e-5}, 5: {0: 0.0, 1: 1.2e-5}, 9: {0: 0.0, 1: 1.5e-5}}, score=1e-7, gather=1e-7, sparse=1e-5, start=0.0, setup=1e-6, accept=1e-6)
    runs = [rollout(net, ps, 3, 30, k="auto", cost=cost, seed=2, page=32, drafter=lambda n, c: make(n, c, "rejection", 1.0)) for _ in range(2)]
    assert [r.ids for r in runs[0][0]] == [r.ids for r in runs[1][0]]
    assert max(runs[0][1]["k_hist"]) > 0, "these constants make drafting worth while"
    dear = Cost(linear={1: 1e-2, 64: 1.0}, read={1: {0: 0.0, 1: 1e-9}, 9: {0: 0.0, 1: 1e-9}}, score=1e-7, gather=1e-7, sparse=1e-5, start=0.0, setup=1e-2, accept=1e-3)
    got, stats = rollout(net, ps, 3, 30, k="auto", cost=dear, seed=2, page=32)
    assert set(stats["k_hist"]) == {0} and "k = 0" in stats["why"]


# ----------------------------------------------------------------------------------------------------------------------
# 16 bits


@pytest.mark.real
def test_bf16_products_are_as_near_to_fp32_as_the_flash_kernel(real_model, monkeypatch):
    """SmolLM2 after 2,048 tokens, two rows: the next laws, with attention by products and by the flash kernel, against fp32's. Scores rounded to bf16 add
    little to what bf16 does anyway."""
    text = Path(argparse.__file__).read_text()
    laws = {}
    for dtype, products in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        net, tok = load_pretrained(real_model, dtype)
        net.requires_grad_(False)
        ids = tok.encode(text)
        monkeypatch.setattr(kv_cache, "READ", {t: {products: (0.1, 0.01), not products: (1e9, 1e9)} for t in (torch.float32, torch.bfloat16)})
        cache = PagedCache(net.config.layers, net.config.kv_heads, net.config.head_dim, 6000, dtype=dtype)
        seqs = [cache.new(2100) for _ in range(2)]
        with torch.no_grad():
            for b, seq in enumerate(seqs):
                net(torch.tensor(ids[3000 * b:3000 * b + 2048]), torch.arange(2048), cache.dense([seq], [2048]))
            new = torch.tensor([x for b in range(2) for x in ids[3000 * b + 2048:3000 * b + 2072]])
            view = cache.dense(seqs, [24, 24])
            laws[dtype, products] = law(net.logits(net(new, torch.arange(2048, 2072).repeat(2), view)), 1.0, net.vocab).exp()
            assert {p.products for p in view.parts} == {products}
    tv = {way: (laws[way] - laws[torch.float32, False]).clamp(min=0).sum(-1).mean().item() for way in laws}
    assert tv[torch.bfloat16, False] < 0.03 and tv[torch.bfloat16, True] < 1.25 * tv[torch.bfloat16, False] + 0.002, tv
