"""The paged pool: its accounting under random use, and its views against plain float64 attention.    pytest tests/test_kv_cache.py"""
import random

import pytest
import torch

import kv_cache
from kv_cache import BLOCK, PagedCache
from sparse_attn import PackedCausal

L, HKV, HQ, D, PAGE = 2, 3, 6, 16, 32


def pool(tokens, dtype=torch.float64, **kw):
    return PagedCache(L, HKV, D, tokens, page=PAGE, dtype=dtype, **kw)


def qkv(n, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, h, D, generator=g, dtype=torch.float64) for h in (HQ, HKV, HKV)]


def run(cache, seqs, counts, tensors, score=False):
    """A dense pass over layers whose q, k, v are `tensors` times 1, 2, ... -> view, outputs of all layers."""
    view = cache.dense(seqs, counts, score)
    return view, [view(*(x * (1 + layer) ** 0.5 for x in tensors)) for layer in range(L)]


def reference(history, q):
    """Attention of the last len(q) tokens of one row over `history` (q, k, v of all its tokens): every layer."""
    out = []
    for layer in range(L):
        full = PackedCausal([len(history[0])])(*(x * (1 + layer) ** 0.5 for x in history))
        out.append(full[-q:])
    return out


def cat(*parts):
    return [torch.cat(x) for x in zip(*parts)]


@pytest.mark.parametrize("seed", range(6))
def test_dense_pass_equals_full_attention(seed, monkeypatch):
    """Random groups that share prompts, random numbers of tokens, truncation in between, every way to lay out the reading: every output is plain
    attention's over the row's history."""
    rng, cache, ways = random.Random(seed), pool(96 * PAGE), set()
    layout = kv_cache.Dense._layout
    monkeypatch.setattr(kv_cache.Dense, "_layout", lambda *a, **kw: (x := layout(*a, **kw), ways.add((x[0], x[1] > PAGE, len(x[2]) > 1, len(x[3]) > 1)))[0])
    rows = []  # [seq, history]
    for g in range(3):
        P = rng.randint(1, 6 * PAGE)
        prompt, x = cache.new(P), qkv(P, 100 * seed + g)
        _, out = run(cache, [prompt], [P], x)
        for a, b in zip(out, reference(x, P)):
            assert torch.allclose(a, b, atol=1e-12)
        for _ in range(rng.randint(1, 4)):
            rows.append([cache.fork(prompt, P + 4 * PAGE), x])
        cache.free(prompt)
        cache.check()
    for turn in range(30):
        for cost in ("CALL", "PRODUCT", "SOFTMAX", "CHUNK"):
            monkeypatch.setattr(kv_cache, cost, 10 ** rng.uniform(-3, 3) * (-1 if cost == "CHUNK" and rng.random() < 0.5 else 1))  # below 0: the more chunks, the better
        monkeypatch.setattr(torch, "get_num_threads", lambda n=rng.choice([1, 2, 5, 16]): n)
        monkeypatch.setattr(kv_cache, "READ", {torch.float32: {form: (10 ** rng.uniform(-2, 1), 10 ** rng.uniform(-3, 0)) for form in (False, True)}})
        few = rng.sample(rows, rng.randint(1, len(rows)))
        kind = rng.choice(["one", "same", "ragged", "long"])
        counts = [1 if kind == "one" else 4 if kind == "same" else rng.randint(1, 5) if kind == "ragged" else rng.choice([1, 2, 40]) for _ in few]
        counts = [min(n, r[0].length + 4 * PAGE - 1 - r[0].length) for n, r in zip(counts, few)]
        fits = [(r, n) for r, n in zip(few, counts) if r[0].length + n <= len(r[0].shared) * PAGE + 4 * PAGE]
        if not fits:
            continue
        few, counts = zip(*fits)
        xs = [qkv(n, 1000 * seed + 50 * turn + i) for i, n in enumerate(counts)]
        score = rng.random() < 0.5
        view, out = run(cache, [r[0] for r in few], list(counts), cat(*xs), score)
        judges = [rng.randrange(n) for n in counts]  # the token of each row whose weights are asked for, as the last accepted one's after a verification
        at = [sum(counts[:b]) + t for b, t in enumerate(judges)]
        mass = view.block_mass(list(range(len(few))), at, [r[0].length for r in few]) if score and max(counts) <= kv_cache.PREFILL else None
        a = 0
        for b, (r, n, x) in enumerate(zip(few, counts, xs)):
            r[1] = cat(r[1], x)
            if mass is not None:
                q, k = r[1][0][len(r[1][0]) - n + judges[b]], r[1][1][:len(r[1][1]) - n + judges[b] + 1]
                for layer in range(L):
                    w = (torch.einsum("hgd,nhd->hgn", q.view(HKV, HQ // HKV, D), k) * (1 + layer) * D**-0.5).softmax(-1).mean(1)  # [Hkv, n]
                    w = torch.nn.functional.pad(w, (0, mass.shape[3] * BLOCK - w.shape[1])).view(HKV, -1, BLOCK).sum(-1)
                    assert torch.allclose(mass[layer, b], w.float(), atol=1e-6), (kind, b, judges[b])
            for got, want in zip(out, reference(r[1], n)):
                assert torch.allclose(got[a:a + n], want, atol=1e-12), (kind, n)
            a += n
        cache.check()
        for r in few:  # half of what was written is thrown away again, as after a verification
            keep = r[0].length - rng.randint(0, 2) if len(r[1][0]) > r[0].length - 2 else r[0].length
            keep = max(keep, len(r[0].shared) * PAGE)
            cache.truncate(r[0], keep)
            r[1] = [x[:keep] for x in r[1]]
        cache.check()
    assert {w[0] for w in ways} == {False, True} and len(ways) >= 5, ways
    for r in rows:
        cache.free(r[0])
    cache.check()
    assert cache.free_pages == cache.P and not cache.promised and not cache.claimed.any()


def test_shared_page_is_copied_at_the_first_write():
    cache, P = pool(16 * PAGE), PAGE + 5
    prompt, x = cache.new(P), qkv(P, 0)
    run(cache, [prompt], [P], x)
    a, b = cache.fork(prompt, P + 10), cache.fork(prompt, P + 10)
    cache.free(prompt)
    held = cache.P - cache.free_pages
    assert held == 2, "two pages hold the prompt, whoever shares it"
    run(cache, [a, b], [3, 2], cat(qkv(3, 1), qkv(2, 2)))
    assert a.pages[0] == b.pages[0] and a.pages[1] != b.pages[1]
    assert torch.equal(cache.k[0][:, cache.slots(a, 0, P)], cache.k[0][:, cache.slots(b, 0, P)])
    assert cache.P - cache.free_pages == 3, "the last one to write keeps the page that nobody else holds"
    cache.check()


def test_a_prompt_in_runs_of_different_lengths_is_read_to_its_end_only(monkeypatch):
    """Pages 0-2 and 4-5: chunks of 3 pages would be the fewest, but the second would read what is not the prompt's, unmasked."""
    monkeypatch.setattr(kv_cache, "CHUNK", 1e6)
    cache = pool(10 * PAGE)
    holes = [cache.new(PAGE) for _ in range(10)]
    run(cache, holes, [PAGE] * 10, qkv(10 * PAGE, 9))
    for i in (0, 1, 2, 4, 5, 8, 9):
        cache.free(holes[i])
    prompt, x = cache.new(5 * PAGE), qkv(5 * PAGE, 0)
    run(cache, [prompt], [5 * PAGE], x)
    assert prompt.pages == [0, 1, 2, 4, 5]
    rows = [cache.fork(prompt, 6 * PAGE) for _ in range(2)]
    new = [qkv(2, 1), qkv(2, 2)]
    _, out = run(cache, rows, [2, 2], cat(*new))
    for b in range(2):
        for got, want in zip(out, reference(cat(x, new[b]), 2)):
            assert torch.allclose(got[2 * b:2 * b + 2], want, atol=1e-12)


def test_memory_is_tokens_plus_at_most_a_page_a_row():
    cache = pool(200 * PAGE)
    rng = random.Random(0)
    rows = [cache.new(10 * PAGE) for _ in range(12)]
    for _ in range(6):
        counts = [rng.randint(1, 40) for _ in rows]
        run(cache, rows, counts, qkv(sum(counts), 7))
    assert (cache.P - cache.free_pages) * PAGE < sum(s.length + PAGE for s in rows)


def test_a_row_stays_one_run():
    """Rows that grow in turn keep to their own stretch of the pool, so that attention reads one view."""
    cache = pool(40 * PAGE)
    rows = [cache.new(4 * PAGE) for _ in range(8)]
    for i in range(8):
        run(cache, rows, [16] * 8, qkv(128, i))
    assert all(len(cache.runs(s.pages, s.length)) == 1 for s in rows)


def test_pool_refuses_what_it_has_not_got_in_one_sentence():
    cache = pool(4 * PAGE)
    cache.new(3 * PAGE)
    with pytest.raises(ValueError, match="raise --kv-tokens"):
        cache.new(2 * PAGE)
    cache.check()


def test_check_sees_a_lost_page():
    cache = pool(8 * PAGE)
    s = cache.new(PAGE)
    run(cache, [s], [5], qkv(5, 0))
    cache.refs[s.pages[0]] += 1
    with pytest.raises(AssertionError, match="reference counts"):
        cache.check()
    cache.refs[s.pages[0]] -= 1
    cache.promised += 1
    with pytest.raises(AssertionError, match="promise"):
        cache.check()


def test_random_lives_leave_nothing_behind():
    rng, cache, live = random.Random(5), pool(40 * PAGE), []
    for _ in range(300):
        if rng.random() < 0.5 and cache.available() >= 5:
            live.append(cache.new(rng.randint(1, 5 * PAGE)))
        elif live:
            s = rng.choice(live)
            room = s.quota * PAGE - s.length
            if room and rng.random() < 0.6:
                n = rng.randint(1, room)
                run(cache, [s], [n], qkv(n, 1))
            elif rng.random() < 0.5:
                cache.truncate(s, rng.randint(0, s.length))
            else:
                cache.free(s)
                live.remove(s)
        cache.check()
    for s in live:
        cache.free(s)
    cache.check()
    assert cache.free_pages == cache.P


def filled(n_rows, length, seed=3):
    cache = pool(60 * PAGE)
    seqs, xs = [cache.new(length[b] + 20) for b in range(n_rows)], [qkv(length[b], seed + b) for b in range(n_rows)]
    view, _ = run(cache, seqs, length, cat(*xs), score=True)
    return cache, seqs, xs, view


def test_block_mass_is_the_softmax_weight():
    length = [70, 33, 128]
    cache, seqs, xs, view = filled(3, length)
    mass = view.block_mass([0, 2], [69, 0], [length[0], length[2]])  # a prefill is scored from each row's last query
    for i, b in enumerate((0, 2)):
        q, k, n = xs[b][0][-1], xs[b][1], length[b] // BLOCK * BLOCK
        for layer in range(L):
            s = torch.einsum("hgd,nhd->hgn", q.view(HKV, 2, D), k[:n]) * (1 + layer) * D**-0.5
            want = s.softmax(-1).view(HKV, 2, -1, BLOCK).sum(-1).mean(1)
            assert torch.allclose(mass[layer, i, :, :n // BLOCK], want.float(), atol=1e-6)
    assert not mass[:, 0, :, length[0] // BLOCK:].any()


@pytest.mark.parametrize("write", [False, True])
def test_sparse_view_reads_what_was_chosen(write):
    """Three draft steps against softmax over exactly the chosen blocks, the recents and the drafts; the pool changes only if write=True."""
    length, steps = [100, 64, 41], 3
    cache, seqs, xs, _ = filled(3, length)
    before = [k.clone() for k in cache.k]
    recent = [80, 48, 32]
    blocks = torch.tensor([[[[0, 3], [1, 2], [0, 4]], [[0, 2], [0, 1], [1, 2]], [[0, -1], [1, -1], [0, -1]]]] * L, dtype=torch.int32)
    view = cache.sparse(seqs, blocks, torch.tensor(recent), steps, write)
    drafts = [qkv(3, 50 + j) for j in range(steps)]
    for j in range(steps):
        for layer in range(L):
            s = (1 + layer) ** 0.5
            out = view(*(x * s for x in drafts[j]))
            for b in range(3):
                for h in range(HKV):
                    pos = [p for m in blocks[layer, b, h].tolist() if m >= 0 for p in range(16 * m, 16 * m + 16)] + list(range(recent[b], length[b]))
                    k = torch.cat([xs[b][1][pos, h]] + [drafts[i][1][b:b + 1, h] for i in range(j + 1)]) * s
                    v = torch.cat([xs[b][2][pos, h]] + [drafts[i][2][b:b + 1, h] for i in range(j + 1)]) * s
                    w = ((drafts[j][0][b].view(HKV, 2, D)[h] * s) @ k.T * D**-0.5).softmax(-1)
                    assert torch.allclose(out[b].view(HKV, 2, D)[h], w @ v, atol=1e-12)
    if write:
        assert [s.length for s in seqs] == [n + steps for n in length]
        assert torch.equal(cache.k[1][:, cache.slots(seqs[0], 100, 101)][:, 0], drafts[0][1][0] * 2**0.5)
    else:
        assert all(torch.equal(a, b) for a, b in zip(before, cache.k)) and [s.length for s in seqs] == length
    cache.check()


