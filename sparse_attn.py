"""All of nanoroll's attention: packed causal (training), dense decode and verification over pages, block-sparse decode (drafting).

One identity does most of the work. Cut the keys of a query row into parts; each part gives its own softmax average o_i and its
log-sum-exp l_i, and the whole is their average with weights softmax(l):

    o = sum_i exp(l_i - l) o_i ,   l = log sum_i exp(l_i)

So KV that lies in several runs of pages is attended to where it lies (views, never gathered copies), a prompt that a whole group
shares is read once for all of its members, and the same l_i tell which blocks of 16 keys mattered: the weight of a block is
exp(l_block - l). That weight is what S3R drafts with.

On the CPU the parts are calls of torch's flash kernel, or for long bf16 rows matrix products, over views; on CUDA they are the Triton kernels in the second half of this
file. Both sides of the seam have the same meaning and are tested against each other and against float64.

Try it:  pytest tests/test_sparse_attn.py tests/test_kernels.py
"""
import ctypes
import functools
import warnings

import torch
import torch.nn.functional as F

SCORES = 1 << 22  # attention scores that are held at once
TURN = 6  # K @ q.T, turned over, is faster than q @ K.T for more bf16 query rows than this, and for at most so many in fp32
BLOCK = 16  # keys in a selection block: the unit in which drafts choose what to read


# ----------------------------------------------------------------------------------------------------------------------
# parts of a softmax, and their merge


def attend(q, k, v, mask=None, causal=False):
    """Softmax attention of q [B, H, R, D] over k, v [B, H, N, D] -> out [B, H, R, D], lse [B, H, R] (natural log, fp32 or fp64).

    `mask` [B|1, 1, R, N] is added to the scaled scores; a row that it hides everything from gets out 0 and lse -inf, which `merge` counts
    as nothing. N must be at least 1. B and H may be any strided views (a stride of 0 shares the keys). torch's private CPU kernel is used
    because SDPA's public form does not return the log-sum-exp.
    """
    assert k.shape[-2] > 0, "attention over no keys"
    if q.device.type != "cpu" or not CPU_FLASH:
        return attend_plain(q, k, v, mask, causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
    if mask is not None and bool((lse == 0).any()):  # the kernel's lse of a row that sees nothing is 0; few real ones are, so the mask is rarely read
        lse = lse.masked_fill((mask == float("-inf")).all(-1), float("-inf"))
    return out, lse


def attend_plain(q, k, v, mask=None, causal=False):
    """`attend` spelled out in matrix products: the meaning of the fast path, and its stand-in where there is no CPU kernel."""
    wide = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5  # [B, H, R, N]
    if mask is not None:
        s = s + mask
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    lse = s.logsumexp(-1)  # [B, H, R]
    return (torch.exp(s - lse.clamp(min=torch.finfo(wide).min)[..., None]) @ v.to(wide)).to(q.dtype), lse


def _probe():
    """Whether torch has the private kernel that `attend` calls, with the meaning that it relies on. Asked once, at import."""
    q, mask = torch.ones(1, 1, 2, 16), torch.tensor([[0.0, 0.0], [float("-inf")] * 2])[None, None]
    try:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True, attn_mask=None)
        want = attend_plain(q, q, q, causal=True)
        blind, zero = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, False, attn_mask=mask)
        return torch.allclose(out, want[0], atol=1e-5) and torch.allclose(lse, want[1], atol=1e-5) and bool((blind[..., 1, :] == 0).all() and zero[..., 1] == 0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


CPU_FLASH = _probe()
if not CPU_FLASH:
    warnings.warn(f"torch {torch.__version__} has no CPU flash kernel that returns the log-sum-exp; CPU attention runs as plain matrix products, which is slower")


def merge(outs, lses):
    """Join the parts of each row: outs [B, P, H, R, D], lses [B, P, H, R] (-inf: an empty part) -> [B, H, R, D]."""
    w = lses.softmax(1)  # [B, P, H, R]
    return (outs * w[..., None].to(outs.dtype)).sum(1) if outs.dtype == w.dtype else (outs.to(w.dtype) * w[..., None]).sum(1).to(outs.dtype)


def attend_chunks(q, k, v, places, n, masks=None):
    """Attention to many chunks of the pool where they lie: every chunk is n slots, and has R query rows of its own.

    q [N, Hkv, R, D]; k, v [Hkv, slots, D]; places (first slot, stride, m): m chunks, `stride` slots apart, N in all; masks: one for each place, None or
    [m, 1, R, n]. -> out [N, Hkv, R, D], lse [N, Hkv, R].
    """
    outs, i = [], 0
    for (slot, stride, m), mask in zip(places, masks or [None] * len(places)):
        kc, vc = (x.as_strided((m, x.shape[0], n, x.shape[2]), (stride * x.shape[2], x.shape[1] * x.shape[2], x.shape[2], 1), x.storage_offset() + slot * x.shape[2]) for x in (k, v))
        outs.append(attend(q[i:i + m], kc, vc, mask))
        i += m
    return outs[0] if len(outs) == 1 else tuple(torch.cat(x) for x in zip(*outs))


def attend_products(q, k, v, places, n, mask=None, want_lse=True, mass=None):
    """`attend_chunks` in matrix products: faster over long chunks, in bf16 always, in fp32 for few rows.

    Scores and weights are rounded to q's dtype, as in transformers' eager attention: in bf16 that makes SmolLM2's next-token law 0.017 (TV) from its law in
    fp32 at 2K tokens, where the flash kernel's fp32 scores make it 0.014 (tests/test_faithful.py).

    Places have stride n here (bf16 products copy what is not contiguous); mask: None, or (chunks with hidden keys [A], first such key c, what is added to
    the scores of keys c.. [A, R, n - c], rows that see nothing of a chunk [N, R] or None). mass [Hkv, N, R, n / BLOCK] is filled with the softmax weights of
    blocks within their chunk: what S3R selects by.
    """
    (N, H, R, D), turn = q.shape, (q.shape[2] > TURN) == (q.dtype == torch.bfloat16)
    out, lse = q.new_empty(H, N, R, D), q.new_empty(H, N, R, dtype=torch.promote_types(q.dtype, torch.float32)) if want_lse else None
    s, p = q.new_empty(N, R, n), q.new_empty(N, R, n)  # a head at a time: the scores of all would take more memory than the keys
    turned = q.new_empty(N, n, R) if turn else None
    for h in range(H):
        i = 0
        for slot, _, m in places:
            qh, kh = q[i:i + m, h], k[h, slot:slot + m * n].view(m, n, D)
            if turn:  # K as the left operand streams through at memory speed
                torch.baddbmm(turned[i:i + m], kh, qh.transpose(1, 2), beta=0, alpha=D ** -0.5, out=turned[i:i + m])
            else:
                torch.baddbmm(s[i:i + m], qh, kh.transpose(1, 2), beta=0, alpha=D ** -0.5, out=s[i:i + m])
            i += m
        if turn:
            s.copy_(turned.transpose(1, 2))
        if mask is not None:
            if len(mask[0]) == N:
                s[..., mask[1]:] += mask[2]
            else:
                s[mask[0], :, mask[1]:] += mask[2]
        torch.softmax(s, -1, out=p)
        if want_lse:
            lse[h] = s.amax(-1).to(lse.dtype) - p.amax(-1).to(lse.dtype).log()  # at the largest score: lse = s - log p
        if mass is not None:
            torch.sum(p.view(N, R, n // BLOCK, BLOCK), -1, out=mass[h])
        i = 0
        for slot, _, m in places:
            torch.bmm(p[i:i + m], v[h, slot:slot + m * n].view(m, n, D), out=out[h, i:i + m])
            i += m
    if not want_lse:
        return out.transpose(0, 1), None
    if mask is not None and mask[3] is not None:
        lse.masked_fill_(mask[3], float("-inf"))
    return out.transpose(0, 1), lse.transpose(0, 1)


def attend_compact(q, k, v, mask):
    """Attention of one token a row to its own short buffer: q [B, Hq, D]; k, v [B, Hkv, N, D] contiguous; mask [B, N] is added -> [B, Hq, D]."""
    (B, Hq, D), (_, H, N, _) = q.shape, k.shape
    s = torch.baddbmm(mask[:, None, None].expand(-1, H, Hq // H, -1).reshape(B * H, Hq // H, N), q.reshape(B * H, Hq // H, D), k.view(B * H, N, D).transpose(1, 2), alpha=D ** -0.5)
    return torch.bmm(torch.softmax(s, -1), v.view(B * H, N, D)).view(B, Hq, D)


@functools.cache
def keep_freed_memory():
    """Ask glibc to keep what is freed for the next call (up to 512 MiB) instead of giving it back to the system. -> whether it will.

    A round makes tensors of megabytes, [T, V] laws and attention scores, and new memory costs a page fault every 4 KB: the log-softmax of 40 rows over a
    vocabulary of 49K took 23 ms on a virtual machine, and takes 0.5 ms in memory that the process has kept.
    """
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(-3, 32 << 20) and libc.mallopt(-1, 512 << 20))  # M_MMAP_THRESHOLD (32 MiB is the most it takes), M_TRIM_THRESHOLD
    except (AttributeError, OSError, TypeError):
        return False  # another C library: nothing to ask


def fold(q, B, Hkv):
    """q [B*Q, Hq, D] -> [B, Hkv, G*Q, D]: the G query heads of a KV head become rows, so that K and V are read once for all of them."""
    Hq, D = q.shape[1:]
    Q, G = q.shape[0] // B, Hq // Hkv
    return q.view(B, Q, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(B, Hkv, G * Q, D)


def unfold(o, Q):
    """Inverse of `fold`: [B, Hkv, G*Q, D] -> [B*Q, Hq, D]."""
    B, Hkv, GQ, D = o.shape
    return o.view(B, Hkv, GQ // Q, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, Hkv * (GQ // Q), D)


def causal_self(q, k, v):
    """Causal attention of one sequence to itself: q [n, Hq, D], k, v [n, Hkv, D] -> out [1, Hkv, G*n, D], lse [1, Hkv, G*n] (folded rows).

    The G heads of a group ride in the batch dimension with a stride-0 view of K and V: grouped-query attention without a copy.
    """
    n, Hq, D = q.shape
    Hkv = k.shape[1]
    G = Hq // Hkv
    q = q.view(n, Hkv, G, D).permute(2, 1, 0, 3)  # [G, Hkv, n, D]
    k, v = (x.transpose(0, 1).expand(G, -1, -1, -1) for x in (k, v))  # [G, Hkv, n, D], stride 0 over G
    o, lse = attend(q, k, v, causal=True)
    return o.transpose(0, 1).reshape(1, Hkv, G * n, D), lse.transpose(0, 1).reshape(1, Hkv, G * n)


# ----------------------------------------------------------------------------------------------------------------------
# training and scoring: packed causal attention, no cache


class PackedCausal:
    """Causal attention inside each of several packed sequences: PackedCausal([3, 2]) for T = 5 tokens, two sequences.

    Sequences of like length are padded into one batch; padding stands on the right, where a causal row cannot see it, so no mask is
    needed and no probability changes. Differentiable. Works for any number of layers and calls.
    """

    def __init__(self, lengths, waste=0.25):
        assert all(n > 0 for n in lengths), "a packed sequence needs at least one token"
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        start = [0]
        for n in lengths:
            start.append(start[-1] + n)
        self.T, self.buckets, i = start[-1], [], 0
        while i < len(order):  # a bucket takes the next sequences as long as at most `waste` of it is padding
            longest, used, j = lengths[order[i]], 0, i
            while j < len(order) and (used + lengths[order[j]]) >= (1 - waste) * longest * (j - i + 1):
                used += lengths[order[j]]
                j += 1
            rows = order[i:j]
            pad = torch.stack([(start[r] + torch.arange(longest)).clamp(max=start[r] + lengths[r] - 1) for r in rows])  # [B, n]
            real = torch.stack([torch.arange(longest) < lengths[r] for r in rows])  # [B, n]
            self.buckets.append((pad, real, len(rows) == 1))
            i = j
        where = torch.empty(self.T, dtype=torch.long)  # place of each packed token in the concatenated buckets
        where[torch.cat([pad[real] for pad, real, _ in self.buckets])] = torch.arange(self.T)
        self.where = None if len(self.buckets) == 1 and torch.equal(where, torch.arange(self.T)) else where

    def __call__(self, q, k, v):
        (T, Hq, D), Hkv = q.shape, k.shape[1]
        assert T == self.T, f"{T} tokens for sequences of {self.T}"
        G, outs = Hq // Hkv, []
        for pad, real, single in self.buckets:
            B, n = pad.shape
            if single:
                qb, kb, vb = (x[pad[0, 0]:pad[0, 0] + n] for x in (q, k, v))
            else:
                qb, kb, vb = (x[pad.to(x.device).view(-1)] for x in (q, k, v))
            qb = qb.view(B, n, Hkv, G, D).permute(3, 0, 2, 1, 4)  # [G, B, Hkv, n, D]
            kb, vb = (x.view(B, n, Hkv, D).transpose(1, 2).expand(G, -1, -1, -1, -1) for x in (kb, vb))
            o = F.scaled_dot_product_attention(*(x.reshape(G * B, Hkv, n, D) if B > 1 else x[:, 0] for x in (qb, kb, vb)), is_causal=True)
            o = o.view(G, B, Hkv, n, D).permute(1, 3, 2, 0, 4).reshape(B * n, Hq, D)
            outs.append(o if single else o[real.to(o.device).view(-1)])
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.where is None else out[self.where.to(out.device)]


# ----------------------------------------------------------------------------------------------------------------------
# how much each block mattered (CPU; the Triton dense kernel yields it on the way)


def block_mass(q, k_runs, out):
    """Softmax weight of each block of BLOCK keys for one row, mean over its J query rows and the G heads of a KV head.

    q [J, Hq, D]; k_runs: views [Hkv, n_i, D] in logical order, each n_i a multiple of BLOCK; out [Hkv, >= sum n_i / BLOCK] is written.
    K is the left operand of the product: it streams through once at memory speed however few query rows there are.
    """
    J, Hq, D = q.shape
    Hkv = k_runs[0].shape[0]
    rows = q.view(J, Hkv, Hq // Hkv, D).permute(1, 3, 2, 0).reshape(Hkv, D, -1)  # [Hkv, D, G*J]
    parts = [torch.bmm(k, rows) for k in k_runs]  # [Hkv, n_i, G*J]
    s = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).to(torch.promote_types(q.dtype, torch.float32)) * D ** -0.5
    s = torch.exp(s - s.amax(1, keepdim=True)).view(Hkv, s.shape[1] // BLOCK, BLOCK, -1).sum(2)  # [Hkv, n/BLOCK, G*J]
    out[:, :s.shape[1]] = (s / s.sum(1, keepdim=True)).mean(-1)


# ----------------------------------------------------------------------------------------------------------------------
# CUDA: attention over pages in Triton. The meaning first, in plain torch; then the kernels; then the calls that kv_cache.py makes
#
#     q, out          [T, Hq, D]            packed tokens; query head h reads KV head h // G, G = Hq / Hkv
#     k_pool, v_pool  [Hkv, slots, D]       head-major; page p is the slots p * page .. (p + 1) * page - 1
#     page_table      [B, P] int32          pages of each row in logical order: key i lies in slot table[i // page] * page + i % page
#     kv_len          [B] int32             keys of each row
#     cu_q            [B + 1] int32         row b's queries are the packed tokens cu_q[b] .. cu_q[b + 1] - 1: the *last* tokens of its kv_len

SCORED = 32  # at most so many of a row's last query tokens are scored: all of a verification, only the end of a prefill


def row_keys(pool, table, n, page):
    """The first n keys (or values) of one row, gathered: [Hkv, n, D]."""
    pos = torch.arange(n, device=pool.device)
    return pool[:, table.long()[pos // page] * page + pos % page]


def dense_paged_ref(q, k_pool, v_pool, page_table, kv_len, cu_q, page, max_q, want_mass=False):
    """What `dense_paged` means, row by row in plain torch, in fp32 or the inputs' own fp64."""
    Hkv, D = k_pool.shape[0], q.shape[2]
    G, wide = q.shape[1] // Hkv, torch.promote_types(q.dtype, torch.float32)
    out, blocks = torch.empty_like(q), page_table.shape[1] * page // BLOCK
    mass = torch.zeros(len(kv_len), Hkv, blocks, dtype=wide, device=q.device) if want_mass else None
    for b, n in enumerate(kv_len.tolist()):
        at = slice(int(cu_q[b]), int(cu_q[b + 1]))
        Q = at.stop - at.start
        k, v = (row_keys(x, page_table[b], n, page).to(wide) for x in (k_pool, v_pool))  # [Hkv, n, D]
        qb = q[at].to(wide).view(Q, Hkv, G, D).permute(1, 2, 0, 3)  # [Hkv, G, Q, D]
        seen = torch.arange(n, device=q.device) <= torch.arange(n - Q, n, device=q.device)[:, None]  # [Q, n]
        w = (qb @ k[:, None].transpose(-1, -2) * D ** -0.5).masked_fill(~seen, float("-inf")).softmax(-1)  # [Hkv, G, Q, n]
        out[at] = (w @ v[:, None]).permute(2, 0, 1, 3).reshape(Q, Hkv * G, D).to(q.dtype)
        if want_mass:
            w, seen = w[:, :, -SCORED:], seen[-SCORED:]  # [Hkv, G, J, n], [J, n]
            for j in range(-(-n // BLOCK)):
                sees = seen[:, j * BLOCK]  # [J]: a query row sees a block if it sees its first key
                mass[b, :, j] = w[:, :, sees, j * BLOCK:(j + 1) * BLOCK].sum(-1).mean((1, 2))
    return out, mass


def sparse_paged_ref(q, k_pool, v_pool, page_table, blocks, recent_start, kv_len, k_scratch, v_scratch, scratch_len, page):
    """What `sparse_paged` means, row by row in plain torch, in fp32 or the inputs' own fp64."""
    (B, Hq, D), Hkv = q.shape, k_pool.shape[0]
    G, wide, out = Hq // Hkv, torch.promote_types(q.dtype, torch.float32), torch.empty_like(q)
    for b in range(B):
        n, recent, drafted = int(kv_len[b]), int(recent_start[b]), int(scratch_len[b])
        ks, vs = (row_keys(x, page_table[b], n, page) for x in (k_pool, v_pool))  # [Hkv, n, D]
        for h in range(Hkv):
            listed = [i for j in blocks[b, h].tolist() if j >= 0 for i in range(j * BLOCK, (j + 1) * BLOCK)]
            at = torch.tensor(listed + list(range(recent, n)), dtype=torch.long, device=q.device)
            k, v = (torch.cat([x[h, at], s[h, b, :drafted]]).to(wide) for x, s in ((ks, k_scratch), (vs, v_scratch)))  # [keys, D]
            w = (q[b, h * G:(h + 1) * G].to(wide) @ k.T * D ** -0.5).softmax(-1)  # [G, keys]
            out[b, h * G:(h + 1) * G] = (w @ v).to(q.dtype)
    return out


# ----------------------------------------------------------------------------------------------------------------------
# the kernels
#
# One program takes one KV head of one row: the G query heads of its group and its Q query tokens are folded into one tile of R rows
# (row r is token r // G, head r % G), so a tile of N keys is read once for all of them. That is what makes verification of k + 1 tokens
# cost about as much as decoding one. Where rows and KV heads are too few to fill the machine, the keys are split over programs as well
# (flash-decoding), and `merge_kernel` joins the parts by the identity at the top of this file.
#
# Exponentials are base 2 (one instruction). Minus infinity is the finite NEG where two of them may be subtracted. Offsets into pools are
# int64: slots * D passes 2^31 at 16.7 million tokens of D = 128, and a program's keys lie at a 64-bit base plus a small 32-bit tile.

try:
    import triton
    import triton.language as tl
    TRITON, INTERPRET = True, triton.knobs.runtime.interpret
except ImportError:  # a CPU box: everything above works, and the calls below say what is missing
    from types import SimpleNamespace
    TRITON, INTERPRET = False, False
    triton, tl = SimpleNamespace(jit=lambda fn=None, **_: fn or (lambda f: f)), SimpleNamespace(constexpr=lambda x: x)

NEG = tl.constexpr(-1e30)
UPCAST = tl.constexpr(INTERPRET)  # the interpreter keeps bf16 as integers and would multiply their bit patterns


@triton.jit
def cover(keep, D: tl.constexpr, DP: tl.constexpr):
    """The mask of a tile [rows, DP]: the rows in `keep`, and the D real columns of DP. No column is masked where D is a power of two."""
    return keep[:, None] if D == DP else keep[:, None] & (tl.arange(0, DP) < D)[None, :]


@triton.jit
def online_softmax(q, k, v, seen, top, total, acc, scale):
    """One more tile of keys k, v [N, D] for R running softmaxes: q [R, D], seen [R, N]; top, total [R], acc [R, D] -> 2^(score - top) [R, N], those three."""
    if UPCAST:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))  # [R, N], in bits
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    fade = tl.exp2(top - new)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return p, new, total * fade + tl.sum(p, 1), acc


@triton.jit
def store_part(OUT, LSE, at, rows, part, real, top, total, acc, D: tl.constexpr, DP: tl.constexpr):
    """Write one part's average and log2-sum-exp for the query rows `at` of [parts, rows]; a part that saw nothing leaves only lse = -inf."""
    at = part.to(tl.int64) * rows + at
    any_key = total > 0
    tl.store(LSE + at, tl.where(any_key, top + tl.log2(total), float("-inf")), mask=real)
    o = acc / tl.where(any_key, total, 1.0)[:, None]
    tl.store(OUT + at[:, None] * D + tl.arange(0, DP)[None, :], o, mask=cover(real & any_key, D, DP))


@triton.jit(do_not_specialize=["rows", "chunk", "tiles", "table_stride", "blocks", "W"])
def dense_kernel(Q, K, V, TABLE, KV_LEN, CU_Q, OUT, LSE, BLOCK_LSE, scale, rows, chunk, tiles, head_stride, table_stride, blocks, W,
                 MASS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
                 N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (B * tiles, Hkv, parts): R query rows of row b against the keys of one part. MASS: also each block's lse for the last W tokens.

    The members of a group stand side by side in the grid, so that all but the first find their shared prompt in the L2 cache.
    """
    b, tile, head, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1), tl.program_id(2)
    first, n, Hq = tl.load(CU_Q + b), tl.load(KV_LEN + b), tl.num_programs(1) * G
    nq = tl.load(CU_Q + b + 1) - first
    if tile * R >= nq * G:  # a row with fewer query tokens than the longest
        return
    r, d = tile * R + tl.arange(0, R), tl.arange(0, DP)
    t, h = r // G, head * G + r % G  # [R] token in the row, query head
    real, pos = t < nq, n - nq + t   # pos: where the token stands, the last key that it sees
    at = (first + t).to(tl.int64) * Hq + h  # [R] row of q and out seen as [T * Hq, D]
    q = tl.load(Q + at[:, None] * D + d[None, :], mask=cover(real, D, DP), other=0.0)  # [R, D]
    top, total, acc = tl.full([R], NEG, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, DP], tl.float32)

    i = tl.arange(0, N)
    lo = part * chunk
    hi = tl.minimum(tl.minimum(lo + chunk, n), n - nq + (tile * R + R - 1) // G + 1)
    K += head.to(tl.int64) * head_stride
    V += head.to(tl.int64) * head_stride
    for start in range(lo, hi, N):  # N divides the page: a tile lies in one
        base = (tl.load(TABLE + b * table_stride + start // PAGE).to(tl.int64) * PAGE + start % PAGE) * D
        key = start + i
        tile_at, inside = i[:, None] * D + d[None, :], cover(key < hi, D, DP)
        k = tl.load(K + base + tile_at, mask=inside, other=0.0)  # [N, D]
        v = tl.load(V + base + tile_at, mask=inside, other=0.0)
        p, top, total, acc = online_softmax(q, k, v, key[None, :] <= pos[:, None], top, total, acc, scale)
        if MASS:
            w = W - nq + t  # [R] place among the scored tokens
            block = start // BLOCK + tl.arange(0, N // BLOCK)
            lse = top[:, None] + tl.log2(tl.sum(tl.reshape(p, [R, N // BLOCK, BLOCK]), 2))  # [R, N/BLOCK]
            row = (b.to(tl.int64) * W + w) * Hq + h  # [R] of [B, W, Hq]
            tl.store(BLOCK_LSE + row[:, None] * blocks + block[None, :], lse, mask=(real & (w >= 0))[:, None] & (block * BLOCK < hi)[None, :])
    store_part(OUT, LSE, at, rows, part, real, top, total, acc, D, DP)


@triton.jit(do_not_specialize=["M", "rows", "table_stride", "list_row", "list_head"])
def sparse_kernel(Q, K, V, TABLE, LISTS, RECENT, KV_LEN, KS, VS, DRAFTED, OUT, LSE, scale, M, rows, head_stride, table_stride, list_row, list_head,
                  scratch_head, scratch_row, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, R: tl.constexpr,
                  N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (B, Hkv, parts): the G query heads of one token against listed blocks, recents and scratch; each part takes its share of the first two."""
    b, head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    r, d, i = tl.arange(0, R), tl.arange(0, DP), tl.arange(0, N)
    real, at = r < G, (b * tl.num_programs(1) + head) * G + r
    q = tl.load(Q + at[:, None] * D + d[None, :], mask=cover(real, D, DP), other=0.0)  # [R, D]
    top, total, acc = tl.full([R], NEG, tl.float32), tl.zeros([R], tl.float32), tl.zeros([R, DP], tl.float32)
    K += head.to(tl.int64) * head_stride
    V += head.to(tl.int64) * head_stride
    TABLE += b * table_stride

    LISTS += b * list_row + head * list_head
    share = tl.cdiv(tl.cdiv(M, parts), N // BLOCK) * (N // BLOCK)
    end = tl.minimum(part * share + share, M)
    for j in range(part * share, end, N // BLOCK):  # 1. listed blocks, N / BLOCK of them at a time
        block = tl.load(LISTS + j + i // BLOCK, mask=j + i // BLOCK < end, other=-1)  # [N]
        key = block * BLOCK + i % BLOCK
        slot = tl.load(TABLE + key // PAGE, mask=block >= 0, other=0).to(tl.int64) * PAGE + key % PAGE
        where, inside = slot[:, None] * D + d[None, :], cover(block >= 0, D, DP)
        k, v = tl.load(K + where, mask=inside, other=0.0), tl.load(V + where, mask=inside, other=0.0)  # [N, D]
        _, top, total, acc = online_softmax(q, k, v, (block >= 0)[None, :], top, total, acc, scale)

    recent, n = tl.load(RECENT + b), tl.load(KV_LEN + b)
    share = tl.cdiv(tl.cdiv(n - recent, parts), N) * N
    end = tl.minimum(recent + part * share + share, n)
    for start in range(recent + part * share, end, N):  # 2. recents
        key = start + i
        slot = tl.load(TABLE + key // PAGE, mask=key < end, other=0).to(tl.int64) * PAGE + key % PAGE
        where, inside = slot[:, None] * D + d[None, :], cover(key < end, D, DP)
        k, v = tl.load(K + where, mask=inside, other=0.0), tl.load(V + where, mask=inside, other=0.0)
        _, top, total, acc = online_softmax(q, k, v, (key < end)[None, :], top, total, acc, scale)

    if part == parts - 1:  # 3. what this round has drafted, the token itself included
        drafted = tl.load(DRAFTED + b)
        base = head.to(tl.int64) * scratch_head + b.to(tl.int64) * scratch_row
        for start in range(0, drafted, N):
            key = start + i
            where, inside = base + key[:, None] * D + d[None, :], cover(key < drafted, D, DP)
            k, v = tl.load(KS + where, mask=inside, other=0.0), tl.load(VS + where, mask=inside, other=0.0)
            _, top, total, acc = online_softmax(q, k, v, (key < drafted)[None, :], top, total, acc, scale)
    store_part(OUT, LSE, at, rows, part, real, top, total, acc, D, DP)


@triton.jit(do_not_specialize=["rows", "parts"])
def merge_kernel(PART, PART_LSE, OUT, LSE, rows, parts, P: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Grid (rows,): o = sum_i 2^(l_i - l) o_i over PART [parts, rows, D], PART_LSE [parts, rows] (-inf: that part saw nothing)."""
    row, i, d = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, DP)
    lse = tl.load(PART_LSE + i.to(tl.int64) * rows + row, mask=i < parts, other=float("-inf"))  # [P]
    top = tl.max(lse, 0)
    w = tl.exp2(lse - top)
    o = tl.load(PART + (i.to(tl.int64) * rows + row)[:, None] * D + d[None, :], mask=cover(lse > float("-inf"), D, DP), other=0.0)  # [P, D]
    total = tl.sum(w, 0)
    tl.store(OUT + row * D + d, tl.sum(o * w[:, None], 0) / total, mask=d < D)
    tl.store(LSE + row, top + tl.log2(total))


@triton.jit(do_not_specialize=["blocks", "W"])
def mass_kernel(BLOCK_LSE, LSE, KV_LEN, CU_Q, OUT, blocks, W, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (B, Hkv, blocks / N): mean over the scored tokens that see a block, and over G heads, of 2^(block's lse - query row's lse)."""
    b, head, Hq = tl.program_id(0), tl.program_id(1), tl.num_programs(1) * G
    block = tl.program_id(2) * N + tl.arange(0, N)  # [N]
    first, n = tl.load(CU_Q + b), tl.load(KV_LEN + b)
    nq = tl.load(CU_Q + b + 1) - first
    scored, acc = tl.minimum(nq, W), tl.zeros([N], tl.float32)
    for r0 in range(0, scored * G, R):
        r = r0 + tl.arange(0, R)
        t, h = nq - scored + r // G, head * G + r % G  # [R] token in the row, query head
        lse = tl.load(LSE + (first + t).to(tl.int64) * Hq + h, mask=t < nq, other=0.0)
        row = (b.to(tl.int64) * W + W - nq + t) * Hq + h
        sees = (t < nq)[:, None] & (block[None, :] * BLOCK <= (n - nq + t)[:, None])  # [R, N]; nothing was written where it does not
        acc += tl.sum(tl.exp2(tl.load(BLOCK_LSE + row[:, None] * blocks + block[None, :], mask=sees, other=float("-inf")) - lse[:, None]), 0)
    count = tl.minimum(scored, n - block * BLOCK)  # scored tokens that see the block
    mass = tl.where(count > 0, acc / tl.maximum(count * G, 1), 0.0)
    tl.store(OUT + (b.to(tl.int64) * tl.num_programs(1) + head) * blocks + block, mass, mask=block < blocks)


@triton.jit(do_not_specialize=["k_row", "v_row"])
def write_kernel(K, V, K_POOL, V_POOL, SLOTS, k_row, v_row, head_stride, H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Grid (T,): the keys and values [H, D] of one token into its slot of the pools."""
    t, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, HP), tl.arange(0, DP)
    here, there = h[:, None] * D + d[None, :], h.to(tl.int64)[:, None] * head_stride + tl.load(SLOTS + t) * D + d[None, :]
    inside = cover(h < H, D, DP)
    tl.store(K_POOL + there, tl.load(K + t * k_row + here, mask=inside), mask=inside)
    tl.store(V_POOL + there, tl.load(V + t * v_row + here, mask=inside), mask=inside)


# ----------------------------------------------------------------------------------------------------------------------
# the calls

PARTS = 64  # most parts that a row's keys are split into: what merge_kernel holds at once


def config(D, dtype, rows, page, most=64):
    """Kernel constants for `rows` folded query rows: dict(R, N, DP), num_warps, num_stages.

    Fixed, not autotuned: row counts and lengths change every round and would set off a new search. R is the least power of two from 16
    (tl.dot's minimum) that holds the rows, up to `most`. N keys a tile keep the loads long, as far as registers and shared memory allow
    (tests/test_kernels.py compiles these for sm_80 and sm_90 and looks for spills), and N must divide the page: short pages are slower.
    """
    DP, R = (max(16, triton.next_power_of_2(x)) for x in (D, rows))  # other head sizes are padded to a power of two by masks
    if dtype == torch.float32:  # exact products have no tensor cores: they are unrolled into FMAs, whose operands fill the registers
        R, N, warps, stages = min(R, most // 4 if DP == 128 else most // 2), 32 if DP <= 64 else 16, 8, 2
    else:
        R, N, warps, stages = min(R, most), 64 if DP <= 128 else 32, 4 if DP * min(R, most) <= 4096 else 8, 3 if DP <= 128 else 2
    return dict(R=R, N=min(N, page & -page), DP=DP), warps, stages


def split(programs, keys, device, forced=None, longest=None):
    """(parts, keys in a part) that give the machine about two programs per multiprocessor, each with at least 256 keys.

    `longest`: no part longer than this, so that one long row among short ones is not left to a single program.
    """
    want = 1 if device.type == "cpu" else -(-2 * torch.cuda.get_device_properties(device).multi_processor_count // programs)
    want = forced or min(max(want, -(-keys // longest) if longest else 1), max(1, keys // 256), PARTS)
    chunk = -(-keys // (want * 64)) * 64
    return max(1, -(-keys // chunk)) if chunk else 1, max(chunk, 64)


def check(q, k_pool, page=BLOCK):
    """One sentence for what the kernels cannot do."""
    if not TRITON:
        raise ValueError("cache path 'triton' needs the package triton, which is not installed: pip install triton, or use path 'torch'")
    if q.device.type != "cuda" and not INTERPRET:
        raise ValueError(f"Triton kernels need CUDA tensors and q is on {q.device}: use path 'torch', or set TRITON_INTERPRET=1 before the first import of sparse_attn")
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16) or q.dtype != k_pool.dtype:
        raise ValueError(f"the Triton kernels take q and KV of one dtype, fp32, fp16 or bf16, not {q.dtype} and {k_pool.dtype}: use path 'torch'")
    if q.shape[2] > 256 or page % BLOCK:
        raise ValueError(f"the Triton kernels take heads of at most 256 and pages of whole blocks of {BLOCK}, not D {q.shape[2]} and page {page}")


def write_kv(k, v, k_pool, v_pool, slots):
    """Put k, v [T, Hkv, D] into the pools at slots [T] int64, all of them different."""
    check(k, k_pool)
    T, H, D = k.shape
    k, v = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (k, v))  # a slice of the fused qkv matrix is taken as it lies
    write_kernel[(T,)](k, v, k_pool, v_pool, slots, k.stride(0), v.stride(0), k_pool.stride(0), H=H, HP=triton.next_power_of_2(H), D=D, DP=triton.next_power_of_2(D))


def copy_pages(k_pools, v_pools, src, dst, page):
    """Copy the pages src[i] -> dst[i] (lists or int64 tensors) in every layer's pools; no page may be in both."""
    for pool in (*k_pools, *v_pools):
        pages = pool.view(pool.shape[0], -1, page, pool.shape[2])  # [Hkv, pages, page, D]
        pages[:, dst] = pages[:, src]


@functools.cache
def flash_attn():
    """flash-attn's paged call, or None. Never required; where it is installed, dense passes that want no masses go through it."""
    try:
        from flash_attn import flash_attn_with_kvcache  # the function decides: flash-attn 4 leaves an empty package of that name
        return flash_attn_with_kvcache
    except ImportError:
        return None


FLASH_REFUSED = set()  # (dtype, D, page) that flash-attn has turned down: our kernel serves them


def flash_decode_available(q, page):
    return (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and page % 256 == 0 and q.shape[2] % 8 == 0
            and (q.dtype, q.shape[2], page) not in FLASH_REFUSED and flash_attn() is not None)


def flash_paged(q, k_pool, v_pool, page_table, kv_len, page):
    """`dense_paged` of equally many query tokens a row through flash-attn, on the head-major pool as it lies; raises RuntimeError if refused."""
    (T, Hq, D), B, Hkv = q.shape, page_table.shape[0], k_pool.shape[0]
    k, v = (x.view(Hkv, -1, page, D).permute(1, 2, 0, 3) for x in (k_pool, v_pool))  # [pages, page, Hkv, D], a view
    return flash_attn()(q.reshape(B, T // B, Hq, D), k, v, cache_seqlens=kv_len, block_table=page_table, causal=True).reshape(T, Hq, D)


def dense_paged(q, k_pool, v_pool, page_table, kv_len, cu_q, page, max_q, want_mass=False, parts=None):
    """Prefill, decoding and verification: causal attention of each row's last tokens to all of its keys (names: the top of this part).

    max_q: most query tokens in a row. Every row needs 1 <= cu_q[b+1] - cu_q[b] <= kv_len[b]. `parts` forces a split (tests); nothing here
    waits for the device. Returns out [T, Hq, D] and, if want_mass, mass [B, Hkv, P * page / BLOCK] fp32: the softmax weight of each block of
    16 keys, mean over the row's last SCORED query tokens that see it and over the G heads; 0 past the row's end.
    (Flash-decoding: Dao et al. 2023; selection by verification's own weights: SparseSpec, arXiv 2512.01278.)
    """
    check(q, k_pool, page)
    (T, Hq, D), (B, P), Hkv = q.shape, page_table.shape, k_pool.shape[0]
    if not want_mass and parts is None and T == B * max_q and flash_decode_available(q, page):
        try:
            return flash_paged(q, k_pool, v_pool, page_table, kv_len, page), None
        except RuntimeError as why:
            FLASH_REFUSED.add((q.dtype, D, page))
            warnings.warn(f"flash-attn refuses pages of {page} with heads of {D} in {q.dtype}, so nanoroll's own kernel takes over: {why}")
    q, G, dev = q.contiguous(), Hq // Hkv, q.device
    size, warps, stages = config(D, q.dtype, max_q * G, page)
    n_tiles = -(-max_q * G // size["R"])
    S, chunk = split(B * n_tiles * Hkv, P * page, dev, parts, longest=4096 if n_tiles == 1 else None)
    blocks, W = P * page // BLOCK, min(max_q, SCORED) if want_mass else 0
    out, lse = torch.empty_like(q), torch.empty(T * Hq, dtype=torch.float32, device=dev)
    part, part_lse = (out, lse) if S == 1 else (torch.empty(S, T, Hq, D, dtype=torch.float32, device=dev), torch.empty(S, T * Hq, dtype=torch.float32, device=dev))
    block_lse = torch.empty(B, W, Hq, blocks, dtype=torch.float32, device=dev) if W else lse
    dense_kernel[(B * n_tiles, Hkv, S)](
        q, k_pool, v_pool, page_table, kv_len, cu_q, part, part_lse, block_lse, D ** -0.5 * 1.4426950408889634, T * Hq, chunk, n_tiles,
        k_pool.stride(0), page_table.stride(0), blocks, W, MASS=want_mass, G=G, D=D, PAGE=page, BLOCK=BLOCK, **size, num_warps=warps, num_stages=stages)
    if S > 1:
        merge_kernel[(T * Hq,)](part, part_lse, out, lse, T * Hq, S, P=PARTS, D=D, DP=size["DP"])
    if not want_mass:
        return out, None
    mass = torch.empty(B, Hkv, blocks, dtype=torch.float32, device=dev)
    mass_kernel[(B, Hkv, -(-blocks // 64))](block_lse, lse, kv_len, cu_q, mass, blocks, W, G=G, R=16, N=64, BLOCK=BLOCK)
    return out, mass


def sparse_paged(q, k_pool, v_pool, page_table, blocks, recent_start, kv_len, k_scratch, v_scratch, scratch_len, page, parts=None):
    """A draft step: one query token a row, q [B, Hq, D] -> out [B, Hq, D], over three kinds of keys:

        blocks [B, Hkv, M] int32         listed logical blocks of the row, for each KV head; -1 = none; all below recent_start / BLOCK
        recent_start, kv_len [B]         every key from recent_start to kv_len
        k_scratch, v_scratch [Hkv, B, S, D], scratch_len [B]: the first scratch_len of them, drafted this round (the query's own included)

    A key must not be in two of them, and a row needs at least one key. M may be 0.
    """
    check(q, k_pool, page)
    (B, Hq, D), Hkv, M = q.shape, k_pool.shape[0], blocks.shape[2]
    assert k_scratch.stride() == v_scratch.stride() and k_scratch.stride()[2:] == (D, 1) and (M == 0 or blocks.stride(2) == 1)
    q, G = q.contiguous(), Hq // Hkv
    size, warps, stages = config(D, q.dtype, G, page, most=1024)  # one tile must hold the whole group
    S, _ = split(B * Hkv, max(M * BLOCK, 1), q.device, parts)
    out, lse = torch.empty_like(q), torch.empty(B * Hq, dtype=torch.float32, device=q.device)
    part, part_lse = (out, lse) if S == 1 else (torch.empty(S, B, Hq, D, dtype=torch.float32, device=q.device), torch.empty(S, B * Hq, dtype=torch.float32, device=q.device))
    sparse_kernel[(B, Hkv, S)](
        q, k_pool, v_pool, page_table, blocks, recent_start, kv_len, k_scratch, v_scratch, scratch_len, part, part_lse,
        D ** -0.5 * 1.4426950408889634, M, B * Hq, k_pool.stride(0), page_table.stride(0), blocks.stride(0), blocks.stride(1),
        k_scratch.stride(0), k_scratch.stride(1), G=G, D=D, PAGE=page, BLOCK=BLOCK, **size, num_warps=warps, num_stages=stages)
    if S > 1:
        merge_kernel[(B * Hq,)](part, part_lse, out, lse, B * Hq, S, P=PARTS, D=D, DP=size["DP"])
    return out
