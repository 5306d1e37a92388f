"""The torch half of sparse_attn.py, and the Triton kernels, against attention in float64.    pytest tests/test_sparse_attn.py

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py), which costs about 3 ms a loop round: hence the small shapes.
With one, the same tests run the compiled kernels.
"""
import itertools

import pytest
import torch

import sparse_attn as sa
from sparse_attn import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # outputs are averages of normals, of size about 1
INF = float("inf")


def rand(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(device)


def error(got, want):
    return (got.double() - want.double()).abs().max().item()


def exact(q, k, v, mask=None):
    """Float64 softmax attention and its log-sum-exp, with no help from the code under test: q [..., R, D], k, v [..., N, D]."""
    s = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    s = s if mask is None else s + mask.double()
    return s.softmax(-1) @ v.double(), s.logsumexp(-1)


# ----------------------------------------------------------------------------------------------------------------------
# parts and their merge


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fn", [sa.attend, sa.attend_plain])
@pytest.mark.parametrize("form", ["plain", "mask", "causal"])
def test_attend_gives_average_and_log_sum_exp(fn, form, dtype):
    q, k, v = (rand(2, 3, n, 64, dtype=dtype, seed=i) for i, n in enumerate((5, 5 if form == "causal" else 40, 5 if form == "causal" else 40)))
    mask = None
    if form == "mask":
        mask = torch.zeros(2, 1, 5, 40, dtype=dtype).masked_fill(rand(2, 1, 5, 40, seed=9) > 0.5, -INF)
    out, lse = fn(q, k, v, mask, form == "causal")
    want = exact(q, k, v, torch.full((5, 5), -INF).triu(1) if form == "causal" else mask)
    assert error(out, want[0]) < TOL[dtype]
    assert error(lse, want[1]) < (1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("fn", [sa.attend, sa.attend_plain])
def test_a_row_that_sees_nothing_weighs_nothing_in_a_merge(fn):
    q, k, v = (rand(2, 3, n, 64, seed=i) for i, n in enumerate((2, 24, 24)))
    mask = torch.zeros(2, 1, 2, 24)
    mask[0, :, 1] = -INF  # row 1 of entry 0 sees nothing
    out, lse = fn(q, k, v, mask)
    assert (lse[0, :, 1] == -INF).all() and torch.isfinite(lse[1]).all() and (out[0, :, 1] == 0).all()
    both = sa.merge(torch.stack([out[:1], out[1:]], 1), torch.stack([lse[:1], lse[1:]], 1))  # [1, 3, 2, 64]
    assert torch.equal(both[:, :, 1], out[1:, :, 1])


def test_a_log_sum_exp_that_is_really_zero_stays():
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16), rand(1, 1, 2, 16)
    mask = torch.tensor([0.0, -INF])[None, None, None]  # one key with score 0: lse = log 1
    out, lse = sa.attend(q, k, v, mask)
    assert lse.item() == 0 and torch.equal(out[0, 0, 0], v[0, 0, 0])


def test_attention_over_no_keys_is_refused():
    with pytest.raises(AssertionError, match="no keys"):
        sa.attend(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 0, 16), torch.zeros(1, 1, 0, 16))


def test_attend_without_the_private_kernel(monkeypatch):
    q, k, v = (rand(2, 3, n, 32, seed=i) for i, n in enumerate((4, 20, 20)))
    fast = sa.attend(q, k, v)
    monkeypatch.setattr(sa, "CPU_FLASH", False)
    slow = sa.attend(q, k, v)
    assert error(fast[0], slow[0]) < 1e-5 and error(fast[1], slow[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_cut_of_the_keys_merges_to_the_whole(dtype):
    q, k, v = (rand(1, 2, n, 64, dtype=dtype, seed=i) for i, n in enumerate((3, 50, 50)))
    parts = [sa.attend(q, k[:, :, a:b], v[:, :, a:b]) for a, b in ((0, 1), (1, 17), (17, 50))]
    parts.append((torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -INF)))  # an empty one
    out = sa.merge(*(torch.stack(x, 1) for x in zip(*parts)))
    assert out.dtype == dtype and error(out, exact(q, k, v)[0]) < 2 * TOL[dtype]


def test_fold_makes_group_heads_rows_and_unfold_undoes_it():
    q = rand(2 * 3, 8, 16)  # B = 2, Q = 3, Hq = 8, Hkv = 2: G = 4
    f = sa.fold(q, 2, 2)
    assert f.shape == (2, 2, 12, 16) and torch.equal(f[1, 1, 2 * 3 + 1], q[3 + 1, 4 + 2])  # row b=1, head 4+2, token 1
    assert torch.equal(sa.unfold(f, 3), q)


@pytest.mark.parametrize("Hq,Hkv", [(3, 3), (9, 3), (8, 1)])
def test_causal_self(Hq, Hkv):
    q, k, v = rand(7, Hq, 32), rand(7, Hkv, 32, seed=1), rand(7, Hkv, 32, seed=2)
    o, lse = sa.causal_self(q, k, v)
    kk, vv = (x.repeat_interleave(Hq // Hkv, 1).transpose(0, 1) for x in (k, v))
    want = exact(q.transpose(0, 1), kk, vv, torch.full((7, 7), -INF).triu(1))
    assert error(sa.unfold(o, 7), want[0].transpose(0, 1)) < 2e-6
    assert error(lse.reshape(Hq, 7), want[1]) < 1e-5


# ----------------------------------------------------------------------------------------------------------------------
# packed causal attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [6], [3, 2], [2, 9, 1, 8, 2, 30], [5] * 4])
@pytest.mark.parametrize("Hq,Hkv", [(4, 4), (6, 2)])
def test_packed_causal_is_each_sequence_alone(lengths, Hq, Hkv, dtype):
    T = sum(lengths)
    q, k, v = rand(T, Hq, 16, dtype=dtype), rand(T, Hkv, 16, dtype=dtype, seed=1), rand(T, Hkv, 16, dtype=dtype, seed=2)
    attention = sa.PackedCausal(lengths)
    out, a = attention(q, k, v), 0
    assert torch.equal(out, attention(q, k, v))  # one object serves every layer
    for n in lengths:
        kk, vv = (x[a:a + n].repeat_interleave(Hq // Hkv, 1).transpose(0, 1) for x in (k, v))
        want = exact(q[a:a + n].transpose(0, 1), kk, vv, torch.full((n, n), -INF).triu(1))[0].transpose(0, 1)
        assert error(out[a:a + n], want) < TOL[dtype]
        a += n


def test_packed_causal_gradients_are_right_and_stay_inside_a_sequence():
    q, k, v = (rand(7, 2, 4, dtype=torch.float64, seed=i).requires_grad_() for i in range(3))
    assert torch.autograd.gradcheck(lambda *x: sa.PackedCausal([3, 4])(*x), (q, k, v))
    sa.PackedCausal([3, 4])(q, k, v)[:3].sum().backward()
    assert all((x.grad[3:] == 0).all() for x in (q, k, v))


def test_packed_causal_refuses_another_number_of_tokens():
    with pytest.raises(AssertionError, match="6 tokens for sequences of 5"):
        sa.PackedCausal([3, 2])(*(torch.zeros(6, 1, 16) for _ in range(3)))


# ----------------------------------------------------------------------------------------------------------------------
# block masses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_block_mass_is_the_mean_softmax_weight(dtype):
    Hkv, G, D, J = 2, 3, 64, 2
    q = (rand(J, Hkv * G, D) * 3).to(dtype)
    runs = [rand(Hkv, n, D, dtype=dtype, seed=n) for n in (16, 48, 32)]
    out = torch.full((Hkv, 8), 7.0)
    sa.block_mass(q, runs, out)
    k = torch.cat(runs, 1).double()  # [Hkv, 96, D]
    w = torch.einsum("jhgd,hnd->hgjn", q.double().view(J, Hkv, G, D), k).div(D ** 0.5).softmax(-1)
    want = w.view(Hkv, G, J, 6, BLOCK).sum(-1).mean((1, 2))
    assert error(out[:, :6], want) < (1e-6 if dtype == torch.float32 else 3e-2)  # 16-bit scores are rounded before the softmax
    assert torch.allclose(out[:, :6].sum(1), torch.ones(Hkv)) and (out[:, 6:] == 7).all()


@pytest.mark.parametrize("R", [3, 15])
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_products_are_attention(R, dtype, tol):
    """Every form of the products (few and many query rows, hidden keys, two places) against plain softmax in float64: output, log-sum-exp, masses of blocks."""
    torch.manual_seed(0)
    N, H, n, D = 3, 2, 64, 16
    pool_k, pool_v = (torch.randn(H, 6 * n, D, dtype=torch.float64).to(dtype) for _ in "kv")
    q = torch.randn(N, H, R, D, dtype=torch.float64).to(dtype)
    hidden = torch.zeros(2, R, n - 50, dtype=dtype)  # chunks 0 and 2 hide keys from 50 on, later rows fewer of them
    for j in range(R):
        hidden[:, j, j // 3:] = float("-inf")
    blind = torch.zeros(N, R, dtype=torch.bool)
    blind[2, 0] = True
    mass = torch.empty(H, N, R, n // 16, dtype=dtype)
    out, lse = sa.attend_products(q, pool_k, pool_v, [(0, n, 2), (4 * n, n, 1)], n, (torch.tensor([0, 2]), 50, hidden, blind), mass=mass)
    for i, slot in enumerate((0, n, 4 * n)):
        mask = torch.zeros(R, n, dtype=torch.float64)
        if i != 1:
            mask[:, 50:] = hidden[i // 2].double()
        s = q[i].double() @ pool_k[:, slot:slot + n].double().transpose(1, 2) * D**-0.5 + mask
        assert torch.allclose(out[i].double(), s.softmax(-1) @ pool_v[:, slot:slot + n].double(), atol=tol)
        assert torch.allclose(mass[:, i].double(), s.softmax(-1).view(H, R, -1, 16).sum(-1), atol=tol)
        seen = ~blind[i]
        assert torch.allclose(lse[i][:, seen].double(), s.logsumexp(-1)[:, seen], atol=tol) and (lse[i][:, ~seen] == float("-inf")).all()
    assert torch.equal(sa.attend_products(q, pool_k, pool_v, [(0, n, 2), (4 * n, n, 1)], n, (torch.tensor([0, 2]), 50, hidden, blind), want_lse=False)[0], out)


@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_compact_attention(dtype, tol):
    torch.manual_seed(0)
    B, H, G, N, D = 3, 2, 3, 48, 16
    q, k, v = (torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((B, H * G, D), (B, H, N, D), (B, H, N, D)))
    mask = torch.zeros(B, N, dtype=dtype)
    mask[1, 40:], mask[2, :7] = float("-inf"), float("-inf")
    want = sa.attend_plain(q.view(B, H, G, D).double(), k.double(), v.double(), mask[:, None, None].double())[0]
    assert torch.allclose(sa.attend_compact(q, k, v, mask).double(), want.view(B, H * G, D), atol=tol)


def test_block_mass_survives_large_scores():
    q, k, out = torch.full((1, 1, 16), 100.0), rand(1, 32, 16) * 100, torch.zeros(1, 2)
    sa.block_mass(q, [k], out)
    assert torch.isfinite(out).all() and abs(out.sum().item() - 1) < 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# the pool's torch twins, against attention over keys gathered by hand


class Paged:
    """A pool with shuffled pages: every slot that no row owns, and everything past a row's end, is `junk`."""

    def __init__(self, lengths, Hq, Hkv, D, page, dtype, counts=None, spare=1, junk=float("nan"), seed=0):
        B, self.P = len(lengths), max(-(-n // page) for n in lengths) + spare
        self.page, self.lengths, self.counts = page, lengths, counts or [1] * B
        order = torch.randperm(B * self.P, generator=torch.Generator().manual_seed(seed)).view(B, self.P)
        self.k, self.v = (torch.full((Hkv, B * self.P * page, D), junk, dtype=dtype) for _ in "kv")
        self.K, self.V = ([rand(Hkv, n, D, dtype=dtype, seed=100 * s + b) for b, n in enumerate(lengths)] for s in (1, 2))  # logical order
        for b, n in enumerate(lengths):
            pos = torch.arange(n)
            slot = order[b][pos // page] * page + pos % page
            self.k[:, slot], self.v[:, slot] = self.K[b], self.V[b]
        self.q = rand(sum(self.counts), Hq, D, dtype=dtype, seed=7)
        self.G, self.order = Hq // Hkv, order
        used = torch.tensor([-(-n // page) for n in lengths])[:, None] > torch.arange(self.P)
        self.table = torch.where(used, order, 0).int()  # 0 past a row's end, as the cache gives it
        self.kv_len = torch.tensor(lengths, dtype=torch.int32)
        self.cu_q = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32)

    def dense_args(self, wide=False):
        up = (lambda x: x.double()) if wide else (lambda x: x.to(DEVICE))
        where = "cpu" if wide else DEVICE
        return up(self.q), up(self.k), up(self.v), self.table.to(where), self.kv_len.to(where), self.cu_q.to(where), self.page, max(self.counts)

    def exact(self):
        """Float64 outputs [T, Hq, D], and per row the softmax weights [Hq, Q, n]."""
        outs, weights, a = [], [], 0
        for n, Q, K, V in zip(self.lengths, self.counts, self.K, self.V):
            q = self.q[a:a + Q].double().transpose(0, 1)  # [Hq, Q, D]
            k, v = (x.double().repeat_interleave(self.G, 0) for x in (K, V))
            s = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(torch.arange(n) > torch.arange(n - Q, n)[:, None], -INF)
            weights.append(s.softmax(-1))
            outs.append((weights[-1] @ v).transpose(0, 1))
            a += Q
        return torch.cat(outs), weights

    def exact_mass(self):
        _, weights = self.exact()
        mass = torch.zeros(len(self.lengths), self.k.shape[0], self.P * self.page // BLOCK, dtype=torch.float64)
        for b, (n, Q, w) in enumerate(zip(self.lengths, self.counts, weights)):
            for h, j in itertools.product(range(mass.shape[1]), range(-(-n // BLOCK))):
                rows = [t for t in range(max(0, Q - sa.SCORED), Q) if n - Q + t >= j * BLOCK]
                mass[b, h, j] = w[h * self.G:(h + 1) * self.G, rows, j * BLOCK:(j + 1) * BLOCK].sum(-1).mean()
        return mass


def test_dense_twin():
    x = Paged([33, 5, 64], 6, 2, 32, 16, torch.float32, counts=[4, 5, 1])
    out, mass = sa.dense_paged_ref(*x.dense_args(wide=True), want_mass=True)
    assert error(out, x.exact()[0]) < 1e-12 and error(mass, x.exact_mass()) < 1e-12


def sparse_case(x, M, S=4, seed=3, empty=()):
    """Random distinct blocks for every (row, KV head) of `x`, some entries -1; recents from a block boundary; 1 to S drafted tokens."""
    g, B, Hkv, D = torch.Generator().manual_seed(seed), len(x.lengths), x.k.shape[0], x.k.shape[2]
    recent = torch.tensor([max(0, n - 20) // BLOCK * BLOCK for n in x.lengths], dtype=torch.int32)
    blocks = torch.full((B, Hkv, M), -1, dtype=torch.int32)
    for b, h in itertools.product(range(B), range(Hkv)):
        if b not in empty:
            some = torch.randperm(int(recent[b]) // BLOCK, generator=g)[:M].int()
            blocks[b, h, torch.randperm(M, generator=g)[:len(some)]] = some  # the -1 may lie anywhere
    ks, vs = (rand(Hkv, B, S, D, dtype=x.k.dtype, seed=seed + i) for i in (1, 2))
    return blocks, recent, ks, vs, torch.tensor([1 + b % S for b in range(B)], dtype=torch.int32)


def exact_sparse(x, blocks, recent, ks, vs, drafted):
    out = torch.zeros_like(x.q, dtype=torch.float64)
    for b, h in itertools.product(range(len(x.lengths)), range(x.k.shape[0])):
        keep = torch.zeros(x.lengths[b], dtype=torch.bool)
        keep[recent[b]:] = True
        for j in blocks[b, h].tolist():
            if j >= 0:
                keep[j * BLOCK:(j + 1) * BLOCK] = True
        k, v = (torch.cat([a[b][h, keep], s[h, b, :drafted[b]]]) for a, s in ((x.K, ks), (x.V, vs)))
        heads = slice(h * x.G, (h + 1) * x.G)
        out[b, heads] = exact(x.q[b, heads], k, v)[0]
    return out


def sparse_args(x, blocks, recent, ks, vs, drafted, wide=False):
    to = (lambda t: t.double() if t.is_floating_point() else t) if wide else (lambda t: t.to(DEVICE))
    return (*(to(t) for t in (x.q, x.k, x.v, x.table, blocks, recent, x.kv_len, ks, vs, drafted)), x.page)


def test_sparse_twin():
    x = Paged([70, 17, 130], 6, 2, 32, 32, torch.float32)
    case = sparse_case(x, 3)
    assert error(sa.sparse_paged_ref(*sparse_args(x, *case, wide=True)), exact_sparse(x, *case)) < 1e-12


def test_copy_pages():
    k, v = [[rand(2, 5 * 16, 8, seed=s + i) for i in range(3)] for s in (0, 10)]
    before = [x.clone() for x in (*k, *v)]
    sa.copy_pages(k, v, [0, 3], torch.tensor([4, 1]), 16)
    for x, old in zip((*k, *v), before):
        assert torch.equal(x[:, 64:], old[:, :16]) and torch.equal(x[:, 16:32], old[:, 48:64])
        assert torch.equal(x[:, :16], old[:, :16]) and torch.equal(x[:, 32:64], old[:, 32:64])
