"""The paged KV pool, and the two ways a forward pass looks at it.

    pool, per layer:  k, v [Hkv, slots, D]      head-major: neighbouring pages of a row are one contiguous matrix per head
    a page            `page` slots (256)        the unit of allocation and sharing
    a block           16 slots of a page        the unit of selection for sparse drafting

    prompt   |####|####|##..|                   pages are reference-counted: a group shares its prompt,
    member 0  ^    ^    |##aa|aaa.|             and a shared page is copied at the first write to it
    member 1  ^    ^    |##bb|b...|

`cache.dense(seqs, counts)` is prefill, plain decoding and verification: it writes K/V of its tokens and reads all of a row's.
`cache.sparse(seqs, ...)` is drafting: it reads selected blocks and recents, and its own K/V goes to a scratch that dies with it, so
nothing that came through sparse attention can survive in the pool. Both are called by the model once a layer, in order.

Memory: n tokens cost n * bytes_per_token plus at most one partly filled page a row (and the copied prompt tail).

Try it:  pytest tests/test_kv_cache.py
"""
from dataclasses import dataclass

import numpy as np
import torch

import sparse_attn as sa
from sparse_attn import BLOCK

PREFILL = 32          # more query rows than this in one row of the batch, and the causal part is a call of its own
# What a layer's attention costs, us (two Zen 4 cores, 64-wide heads; only the choice between layouts hangs on it): an attention call of the flash kernel, a
# pair of matrix products of one head, the softmax between, one chunk to merge.
CALL, PRODUCT, SOFTMAX, CHUNK = 15, 50, 30, 2
# And ns for an element of K or V that is read: once, and for each query row. False: the flash kernel, True: products. bf16 products run on the matrix units.
READ = {torch.bfloat16: {False: (0.150, 0.013), True: (0.076, 0.005)}, torch.float32: {False: (0.143, 0.010), True: (0.090, 0.017)}}


@dataclass
class Part:
    """One attention call of a plan: `n` keys in each of N chunks, read by R query rows each."""
    rows: list       # chunk i is rows[i]'s; or, where `shared`, every chunk is read by all of `rows`
    shared: bool
    products: bool   # sparse_attn.attend_products, else attend_chunks
    places: list     # [(first slot, stride, chunks)]
    n: int
    blocks: list     # [N] the logical block that each chunk starts with
    mask: object = None


class Seq:
    """A row's place in the pool: its pages in logical order and how many tokens of KV they hold."""
    __slots__ = ("pages", "length", "quota", "owned", "shared", "claim")

    def __init__(self, quota):
        self.pages, self.length = [], 0
        self.quota, self.owned = quota, 0  # private pages it may take, and has taken
        self.shared = ()                   # full prompt pages it shares with the other members of its group
        self.claim = range(0)              # pages kept free for its growth, so that it stays one run


class PagedCache:
    """KV of many rows in one pool. `tokens` is rounded up to whole pages. path: "torch" (CPU views) or "triton"."""

    def __init__(self, layers, kv_heads, head_dim, tokens, page=256, dtype=torch.float32, device="cpu", path=None):
        if page % BLOCK:
            raise ValueError(f"page {page} must be a multiple of the selection block, {BLOCK}")
        self.L, self.Hkv, self.D, self.page = layers, kv_heads, head_dim, page
        self.P = -(-tokens // page)
        self.dtype, self.device = dtype, torch.device(device)
        self.path = path or ("triton" if self.device.type == "cuda" else "torch")
        if self.device.type == "cpu":
            sa.keep_freed_memory()
        shape = (kv_heads, (self.P + 1) * page, head_dim)  # one page more than is ever given out: reads may run past a row's end
        self.k, self.v = (list(torch.zeros(layers, *shape, dtype=dtype, device=device)) for _ in "kv")
        self.refs = np.zeros(self.P, dtype=np.int64)
        self.claimed = np.zeros(self.P, dtype=bool)
        self.free_pages, self.promised = self.P, 0  # promised: pages that live rows may still take
        self.live, self.taken, self.given_back = set(), 0, 0
        self.compact = None

    @staticmethod
    def bytes_per_token(layers, kv_heads, head_dim, dtype):
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    # -- allocation ----------------------------------------------------------------------------------------------------

    def pages_for(self, tokens, shared_tokens=0):
        """Private pages of a row of `tokens` whose first `shared_tokens` are a shared prompt (its partly filled page is copied)."""
        return -(-tokens // self.page) - shared_tokens // self.page

    def available(self):
        """Pages that are neither held nor promised to a live row."""
        return self.free_pages - self.promised

    def new(self, tokens):
        """A row that will hold at most `tokens`."""
        return self._admit(Seq(self.pages_for(tokens)))

    def fork(self, seq, tokens):
        """A row that starts with all of `seq`'s KV, shared, and will hold at most `tokens`."""
        child = Seq(self.pages_for(tokens, seq.length))
        child.pages, child.length = list(seq.pages), seq.length
        child.shared = tuple(seq.pages[:seq.length // self.page])
        self.refs[child.pages] += 1
        return self._admit(child)

    def copy(self, seq, tokens):
        """A row with a private physical copy of `seq`'s KV."""
        child = self.new(tokens)
        self._grow(child, seq.length)
        for i in range(len(seq.pages)):
            self._copy_page(seq.pages[i], child.pages[i])
        child.length = seq.length
        return child

    def _admit(self, seq):
        if seq.quota > self.available():
            raise ValueError(f"the KV pool has {self.available() * self.page} tokens to spare and the row may need {seq.quota * self.page}; "
                             "raise --kv-tokens or lower --max-new-tokens")
        self.promised += seq.quota
        self.live.add(seq)
        # placement: the first stretch that nobody holds or has claimed and that fits all of the row, so that it can stay one run
        first, lengths = self._stretches((self.refs == 0) & ~self.claimed)
        fits = np.flatnonzero(lengths >= seq.quota)
        if seq.quota and len(fits):
            seq.claim = range(int(first[fits[0]]), int(first[fits[0]]) + seq.quota)
            self.claimed[seq.claim.start:seq.claim.stop] = True
        return seq

    @staticmethod
    def _stretches(good):
        """Starts and lengths of the runs of True: [0,1,1,0,1] -> [1, 4], [2, 1]."""
        edge = np.flatnonzero(np.diff(np.concatenate(([0], good.astype(np.int8), [0]))))
        return edge[::2], edge[1::2] - edge[::2]

    def _take(self, seq):
        """One free page for `seq`: right after its last page if that may be had, else in its claim, else where most free space follows."""
        nxt = seq.pages[-1] + 1 if seq.pages else -1
        if 0 <= nxt < self.P and self.refs[nxt] == 0 and (nxt in seq.claim or not self.claimed[nxt]):
            p = nxt
        else:
            p = next((p for p in seq.claim if self.refs[p] == 0), None)
            if p is None:
                free = self.refs == 0
                first, lengths = self._stretches(free & ~self.claimed)
                if not len(first):
                    first, lengths = self._stretches(free)
                p = int(first[lengths.argmax()])
        assert self.refs[p] == 0 and seq.owned < seq.quota, "a row outgrew what was promised to it"
        self.refs[p] = 1
        seq.owned += 1
        self.free_pages -= 1
        self.promised -= 1
        self.taken += 1
        return p

    def _drop(self, seq, p):
        self.refs[p] -= 1
        if self.refs[p] == 0:
            self.free_pages += 1
            self.given_back += 1

    def _copy_page(self, src, dst):
        a, b = src * self.page, dst * self.page
        for pool in (*self.k, *self.v):
            pool[:, b:b + self.page] = pool[:, a:a + self.page]

    def _grow(self, seq, length):
        """Pages for `length` tokens; the page that the next token goes to becomes private (copied at the first write)."""
        i = seq.length // self.page
        if i < len(seq.pages) and length > seq.length and self.refs[seq.pages[i]] > 1:
            old, seq.pages[i] = seq.pages[i], None
            tail, seq.pages = seq.pages[i + 1:], seq.pages[:i]
            seq.pages.append(self._take(seq))
            seq.pages += tail
            self._copy_page(old, seq.pages[i])
            self._drop(seq, old)
        while len(seq.pages) * self.page < length:
            seq.pages.append(self._take(seq))

    def truncate(self, seq, length):
        """Forget all but the first `length` tokens; whole pages past them go back."""
        assert 0 <= length <= seq.length, f"cannot truncate {seq.length} tokens to {length}"
        seq.length = length
        keep = -(-length // self.page)
        for p in seq.pages[keep:]:
            self._drop(seq, p)
            seq.owned -= 1
            self.promised += 1
        del seq.pages[keep:]

    def free(self, seq):
        for p in seq.pages:
            self._drop(seq, p)
        self.promised -= seq.quota - seq.owned
        self.claimed[seq.claim.start:seq.claim.stop] = False
        self.live.remove(seq)
        seq.pages, seq.length = [], 0

    def check(self):
        """Every page is counted once: raises AssertionError that says what differs."""
        refs = np.zeros(self.P, dtype=np.int64)
        for s in self.live:
            np.add.at(refs, np.array(s.pages, dtype=np.int64), 1)
            assert len(s.pages) >= -(-s.length // self.page), f"{s.length} tokens in {len(s.pages)} pages of {self.page}"
        assert (refs == self.refs).all(), f"reference counts differ at pages {np.flatnonzero(refs != self.refs)[:8].tolist()}"
        assert self.free_pages == int((refs == 0).sum()), f"{self.free_pages} pages are said to be free, {int((refs == 0).sum())} are"
        assert self.promised == sum(s.quota - s.owned for s in self.live), "the promise count differs from the live rows' promises"
        assert self.available() >= 0, "more pages are promised than free"
        assert self.taken - self.given_back == self.P - self.free_pages, f"{self.taken} pages taken, {self.given_back} given back, {self.P - self.free_pages} held"

    # -- where things are ----------------------------------------------------------------------------------------------

    def slots(self, seq, a, b):
        """Pool slots of the positions a..b-1 of a row: int64 [b - a]."""
        pos = torch.arange(a, b)
        return torch.tensor(seq.pages)[pos // self.page] * self.page + pos % self.page

    def runs(self, pages, tokens):
        """(first slot, slots) of each contiguous run of the first `tokens` of `pages`: pages [4, 5, 9] -> two runs."""
        out = []
        for p in pages:
            n = min(self.page, tokens)
            if n <= 0:
                break
            if out and out[-1][0] + out[-1][1] == p * self.page:
                out[-1][1] += n
            else:
                out.append([p * self.page, n])
            tokens -= n
        return out

    def page_table(self, seqs):
        """Pages of each row: int32 [B, most pages], 0 past the end."""
        table = np.zeros((len(seqs), max(len(s.pages) for s in seqs)), dtype=np.int32)
        for b, s in enumerate(seqs):
            table[b, :len(s.pages)] = s.pages
        return torch.from_numpy(table).to(self.device)

    # -- the two views -------------------------------------------------------------------------------------------------

    def dense(self, seqs, counts, score=False):
        """For one forward pass over counts[b] >= 1 new tokens of each row, packed in order; the rows are that much longer afterwards.

        score=True prepares `view.block_mass` (what the next drafts read is chosen by it): the CPU keeps each layer's queries, of a
        prefill only every row's last one; the Triton kernel writes the masses on its way.
        """
        return Dense(self, seqs, counts, score)

    def sparse(self, seqs, blocks, recent, steps, write=False):
        """For `steps` drafted tokens a row, one at a time, in rows that only ever drop out at the end of the batch.

        blocks [L, B, Hkv, M] int32: selected logical blocks, -1 = none, all below recent[b] // BLOCK; recent [B]: every position from
        recent[b] (a multiple of BLOCK) is read. write=True also puts the K/V into the pool: direct sparse sampling, never drafting.
        """
        return Sparse(self, seqs, blocks, recent, steps, write)


class Dense:
    """Attention of a dense pass: `view(q, k, v)` for layers 0, 1, ... in order. See PagedCache.dense."""

    def __init__(self, cache, seqs, counts, score):
        self.c, self.layer, self.B, self.seqs = cache, 0, len(seqs), seqs
        self.past = [s.length for s in seqs]
        slots = []
        for s, n in zip(seqs, counts):
            cache._grow(s, s.length + n)
            slots.append(cache.slots(s, s.length, s.length + n) if n > 1 else torch.tensor([s.pages[s.length // cache.page] * cache.page + s.length % cache.page]))
            s.length += n
        self.slots = torch.cat(slots).to(cache.device)  # [T] where each token's K/V goes
        self.counts, self.Q = counts, max(counts)
        self.last = torch.tensor(np.cumsum(counts) - 1)  # [B] each row's last packed token
        self.scored, self.mass = score, [None] * cache.L if score else None
        if cache.path == "triton":
            self.table = cache.page_table(seqs)
            self.kv_len = torch.tensor([s.length for s in seqs], dtype=torch.int32, device=cache.device)
            self.cu_q = torch.tensor(np.concatenate(([0], np.cumsum(counts))), dtype=torch.int32, device=cache.device)
            return
        self.even = all(n == self.Q for n in counts)
        if not self.even and self.Q <= PREFILL:  # pad the shorter rows by repeating their last token, and drop those rows again
            start = np.concatenate(([0], np.cumsum(counts)))[:-1]
            j = np.minimum(np.arange(self.Q)[None], np.array(counts)[:, None] - 1)
            self.pad = torch.from_numpy(start[:, None] + j).view(-1)  # [B*Q] packed token
            self.unpad = torch.from_numpy(np.flatnonzero((np.arange(self.Q)[None] < np.array(counts)[:, None]).ravel()))  # [T]
        if self.Q > PREFILL:  # row by row: the runs of what each already holds
            self.past_runs = [cache.runs(s.pages, past) for s, past in zip(seqs, self.past)]

    # The plan: a list of attention calls, each giving entries [n, Hkv, G*Q, D], and a table that says which entries make up each row.

    def _plan(self, seqs, G):
        c, page, R = self.c, self.c.page, G * self.Q
        groups = {}  # rows that share prompt pages read them once, in one call
        for b, s in enumerate(seqs):
            if s.shared:
                groups.setdefault(s.shared, []).append(b)
        lead = [0] * self.B  # leading pages that a group call covers
        self.parts, entries, n = [], [[] for _ in seqs], 0
        for pages, rows in groups.items():
            if len(rows) > 1:
                products, size, places, owned = self._layout([(first, m, 0, m * page, 0) for first, m in self._page_runs(pages)], R * len(rows), exact=True)
                self.parts.append(Part(rows, True, products, places, size, [at // BLOCK for _, at, _ in owned]))
                for i in range(len(owned)):
                    for j, b in enumerate(rows):
                        entries[b].append(n + i * len(rows) + j)
                n += len(owned) * len(rows)
                for b in rows:
                    lead[b] = len(pages)

        runs = []  # (first page, pages, position of the first slot, tokens, row)
        for b, s in enumerate(seqs):
            at = lead[b] * page
            for first, m in self._page_runs(s.pages[lead[b]:-(-s.length // page)]):
                runs.append((first, m, at, min(m * page, s.length - at), b))
                at += m * page
        products, size, places, owned = self._layout(sorted(runs), R)
        row, start, stop = np.array(owned).T  # [N] each: the row of a chunk, the position of its first slot, where its run ends
        for i, b in enumerate(row):
            entries[b].append(n + i)
        n += len(row)
        past = np.array(self.past)[row]
        limit = np.minimum(past[:, None] + np.arange(self.Q), stop[:, None] - 1)  # [N, Q] last visible position
        self.parts.append(Part(row.tolist(), False, products, places, size, (start // BLOCK).tolist(), self._hidden(limit - start[:, None], products, places, size, G)))
        most = max(len(e) for e in entries)
        self.plain = most == 1 and [e[0] for e in entries] == list(range(n))  # every row is one entry, in order: nothing to merge
        self.ragged = any(len(e) < most for e in entries)
        self.table = torch.tensor([e + [n] * (most - len(e)) for e in entries])  # [B, parts]; entry n is the empty one
        self.owner = torch.tensor([b for p in self.parts for b in (p.rows * len(p.blocks) if p.shared else p.rows)])  # [n] whose entry it is

    @staticmethod
    def _page_runs(pages):
        """Contiguous runs: pages [4, 5, 9] -> [[4, 2], [9, 1]]."""
        out = []
        for p in pages:
            if out and out[-1][0] + out[-1][1] == p:
                out[-1][1] += 1
            else:
                out.append([p, 1])
        return out

    def _layout(self, runs, R, exact=False):
        """How R query rows read runs (first page, pages, position, tokens, row), in order of place: cut into chunks of one size, by flash calls or by products.

        -> (products?, slots of a chunk, places [(first slot, stride, chunks)], [(row, first position, end of its run's positions)] of each chunk).
        Large chunks mean few calls and few parts to merge, small ones little that is read in vain: a run's last chunk may reach past its end, where keys are
        masked. Rows of one run each that lie equally far apart, as a rollout's do, are one call. exact: nothing may be read past a run's end. A scored pass goes by products: only they have each key's weight.
        """
        c, page, best, threads = self.c, self.c.page, None, torch.get_num_threads()
        first, pages, _, tokens, _ = np.array(runs).T
        longest, gap = int(pages.max()), int(np.diff(first).max()) if len(runs) > 1 else 0
        sizes = {longest, -(-longest // threads), *(1 << i for i in range(longest.bit_length()))}
        for products in (True,) if self.scored else (False, True):
            once, each = READ[torch.bfloat16 if c.dtype.itemsize == 2 else torch.float32][products]
            for size in sorted(sizes | {gap} if products and gap > longest else sizes):
                m = -(-pages // size)  # chunks of each run
                if (first + m * size).max() > c.P + 1 or exact and (pages % size).any():
                    continue
                n = int(tokens.max()) if m.max() == 1 and not products else size * page
                step = np.diff(first)
                if products:
                    stretches = 1 + int((step != m[:-1] * size).sum())
                else:
                    stretches = 1 + int((np.diff(step) != 0).sum()) if m.max() == 1 else len(runs)
                N = int(m.sum())
                read = 2 * n * c.D * (c.Hkv * (-(-N // threads) * threads) if products else -(-N * c.Hkv // threads) * threads)  # elements; a thread that has no chunk waits
                cost = read * (once + each * R) / 1000 + N * CHUNK * (m.max() > 1) + stretches * (PRODUCT * c.Hkv if products else CALL) + SOFTMAX * products
                if best is None or cost < best[0]:
                    best = cost, products, size, n
        _, products, size, n = best
        places, owned = [], []
        for first, pages, at, tokens, row in runs:
            for i in range(-(-pages // size)):
                slot = (first + i * size) * page
                last = places[-1] if places else None
                if last and (slot == last[0] + last[1] * last[2] or last[2] == 1 and not products):
                    places[-1] = last[0], (slot - last[0]) // last[2], last[2] + 1
                else:
                    places.append((slot, n, 1))
                owned.append((row, at + i * size * page, at + tokens))
        return products, n, places, owned

    def _hidden(self, limit, products, places, n, G):
        """The masks of chunks of n keys whose query token j may see keys 0..limit[:, j]: see `attend_chunks` and `attend_products`."""
        at = np.flatnonzero(limit[:, 0] < n - 1)
        if not len(at):
            return None
        c = max(0, int(limit[at, 0].min()) + 1) if products else 0
        hide = torch.from_numpy(np.arange(c, n) > np.tile(limit[at], (1, G))[:, :, None])  # [A, G*Q, n - c]
        if products:
            blind = torch.from_numpy(np.tile(limit < 0, (1, G)))  # [N, G*Q]: they see nothing, which a softmax cannot say; any weights do, they count for nothing
            hide &= ~blind[torch.from_numpy(at)][..., None]
            return torch.from_numpy(at), c, torch.zeros(hide.shape, dtype=self.c.dtype).masked_fill_(hide, float("-inf")), blind if bool(blind.any()) else None
        mask = torch.zeros(len(limit), 1, *hide.shape[1:], dtype=self.c.dtype)
        mask[torch.from_numpy(at), 0] = torch.zeros(hide.shape, dtype=self.c.dtype).masked_fill_(hide, float("-inf"))
        i, masks = 0, []
        for _, _, m in places:
            masks.append(mask[i:i + m] if bool((limit[i:i + m, 0] < n - 1).any()) else None)
            i += m
        return masks

    def __call__(self, q, k, v):
        c, layer = self.c, self.layer
        self.layer = (layer + 1) % c.L
        K, V = c.k[layer], c.v[layer]  # [Hkv, slots, D]
        if c.path == "triton":
            sa.write_kv(k, v, K, V, self.slots)
            out, mass = sa.dense_paged(q, K, V, self.table, self.kv_len, self.cu_q, c.page, self.Q, want_mass=self.scored)
            if self.scored:
                self.mass[layer] = mass
            return out
        K.index_copy_(1, self.slots, k.transpose(0, 1))
        V.index_copy_(1, self.slots, v.transpose(0, 1))
        if self.Q > PREFILL:
            if self.scored:
                self.mass[layer] = q[self.last]  # of a prefill only the last queries judge: later, in block_mass
            return self._prefill(q, k, v, K, V)
        Q, B, G = self.Q, self.B, q.shape[1] // c.Hkv
        if layer == 0:
            self._plan(self.seqs, G)
        f = sa.fold(q if self.even else q[self.pad], B, c.Hkv)  # [B, Hkv, G*Q, D]
        outs, lses, masses = [], [], []
        for p in self.parts:
            N = len(p.blocks)
            if p.shared:  # a group's prompt
                part = f[p.rows].transpose(0, 1).reshape(1, c.Hkv, -1, c.D).expand(N, -1, -1, -1)  # [N, Hkv, rows * G*Q, D]
            else:
                part = f if p.rows == list(range(B)) else f[p.rows]  # [N, Hkv, G*Q, D]
            if p.products:
                mass = part.new_empty(c.Hkv, N, part.shape[2], p.n // BLOCK) if self.scored else None
                o, lse = sa.attend_products(part, K, V, p.places, p.n, p.mask, not self.plain, mass)
                masses.append(mass)
            else:
                o, lse = sa.attend_chunks(part, K, V, p.places, p.n, p.mask)
            if p.shared:
                o, lse = (x.unflatten(2, (len(p.rows), G * Q)).transpose(1, 2).flatten(0, 1) for x in (o, lse))  # [N*rows, Hkv, GQ, D], [N*rows, Hkv, GQ]
            outs.append(o)
            lses.append(lse)
        o = outs[0] if len(outs) == 1 else torch.cat(outs)
        if not self.plain:
            lse = lses[0] if len(lses) == 1 else torch.cat(lses)
            if self.ragged:  # the empty entry
                o, lse = torch.cat([o, o.new_zeros(1, *o.shape[1:])]), torch.cat([lse, lse.new_full((1, *lse.shape[1:]), float("-inf"))])
            parts = lse[self.table]  # [B, parts, Hkv, GQ]
            o = sa.merge(o[self.table], parts)
        if self.scored:
            share = None if self.plain else torch.exp(lse[:len(self.owner)] - parts.logsumexp(1)[self.owner])  # [entries, Hkv, GQ] of a row's whole weight
            self.mass[layer] = self._masses(masses, share, G)
        o = sa.unfold(o, Q)
        return o if self.even else o[self.unpad]

    def _masses(self, masses, share, G):
        """Weights of blocks within their chunks [Hkv, N, R, n / BLOCK] -> in their rows, mean over G: [entries, Hkv, Q, n / BLOCK] of each part."""
        out, a = [], 0
        for p, mass in zip(self.parts, masses):
            if p.shared:
                mass = mass.unflatten(2, (len(p.rows), -1)).flatten(1, 2)  # [Hkv, N*rows, GQ, n / BLOCK]
            if share is not None:
                mass = mass * share[a:a + mass.shape[1]].transpose(0, 1)[..., None]
            a += mass.shape[1]
            out.append(mass.unflatten(2, (G, self.Q)).mean(2, dtype=torch.float32).transpose(0, 1))
        return out

    def block_mass(self, which, at, lengths):
        """Softmax weight of each block of 16 keys in the rows `which` of this pass, seen from their packed tokens `at`, below `lengths`.

        -> [L, len(which), Hkv, N] fp32, N = blocks of the longest; 0 past a row's own. The Triton kernel's masses are means over all of
        a row's query tokens instead (they come for free): those of refused drafts count too.
        """
        c, blocks = self.c, [-(-n // BLOCK) for n in lengths]
        if c.path == "triton":
            return torch.stack([m[which][..., :max(blocks)].float() for m in self.mass])
        if self.Q > PREFILL:
            return _block_mass(c, self.mass, [self.seqs[b] for b in which], which, lengths)
        out = torch.zeros(c.L, len(which), c.Hkv, max(blocks))
        start = np.concatenate(([0], np.cumsum(self.counts)))
        masses = [torch.stack(layers) for layers in zip(*self.mass)]  # [L, entries, Hkv, Q, n / BLOCK] of each part
        for i, (b, t) in enumerate(zip(which, at)):
            for p, mass in zip(self.parts, masses):
                for e, first in [(j * len(p.rows) + p.rows.index(b), x) for j, x in enumerate(p.blocks) if b in p.rows] if p.shared else [(j, x) for j, x in enumerate(p.blocks) if p.rows[j] == b]:
                    n = min(mass.shape[-1], blocks[i] - first)
                    if n > 0:
                        out[:, i, :, first:first + n] = mass[:, e, :, int(t) - start[b], :n]
        return out

    def _prefill(self, q, k, v, K, V):
        """Long rows, one after another: causal among the new tokens, merged with what the row already holds."""
        c, outs, a = self.c, [], 0
        for b, n in enumerate(self.counts):
            qb, kb, vb = (x[a:a + n] for x in (q, k, v))
            o, lse = sa.causal_self(qb, kb, vb)
            if self.past_runs[b]:
                f = sa.fold(qb, 1, c.Hkv)
                parts = [sa.attend(f, *(x[None, :, start:start + length] for x in (K, V))) for start, length in self.past_runs[b]]
                o = sa.merge(torch.stack([o] + [p[0] for p in parts], 1), torch.stack([lse] + [p[1] for p in parts], 1))
            outs.append(sa.unfold(o, n))
            a += n
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def _block_mass(cache, q, seqs, at, lengths):
    """q: per layer [T, Hq, D]; row b is judged by the query q[layer][at[b]] -> [L, B, Hkv, N]."""
    mass = torch.zeros(cache.L, len(seqs), cache.Hkv, max(-(-n // BLOCK) for n in lengths), device=cache.device)
    for b, (seq, n) in enumerate(zip(seqs, lengths)):
        if n >= BLOCK:
            runs = cache.runs(seq.pages, n // BLOCK * BLOCK)
            for layer in range(cache.L):
                sa.block_mass(q[layer][at[b]:at[b] + 1], [cache.k[layer][:, a:a + m] for a, m in runs], mass[layer, b])
    return mass


class Sparse:
    """Attention of draft steps: one token a row and call. See PagedCache.sparse.

    CPU: the selected blocks and the recents are gathered once into one compact buffer a layer, and drafted K/V is appended there:
        [ selected blocks | recent blocks (the last one partly valid) | drafts 0..steps-1 ]
    CUDA: the kernel follows the index list, and drafted K/V lies in a scratch of `steps` slots a row.
    """

    def __init__(self, cache, seqs, blocks, recent, steps, write):
        self.c, self.layer, self.step, self.seqs, self.write, self.steps = cache, 0, 0, seqs, write, steps
        self.q = [None] * cache.L if write else None
        c, (L, B, Hkv, M) = cache, blocks.shape
        per = c.page // BLOCK  # blocks in a page
        table = c.page_table(seqs).long()  # [B, pages]
        length = torch.tensor([s.length for s in seqs], device=c.device)  # [B]
        recent = torch.as_tensor(recent, device=c.device)  # [B]
        self.length = length
        if c.path == "triton":
            self.blocks, self.recent, self.table = blocks, recent.int(), table.int()
            self.kv_len, self.filled = length.int(), torch.zeros(B, dtype=torch.int32, device=c.device)
            self.scratch = [[torch.zeros(Hkv, B, steps, c.D, dtype=c.dtype, device=c.device) for _ in "kv"] for _ in range(L)]
            return
        R = int((-(-length // BLOCK) - recent // BLOCK).max()) if B else 0  # recent blocks, of the row with most of them
        X = -(-steps // BLOCK)                                             # blocks' worth of room for drafts
        N = M + R + X
        self.S = (M + R) * BLOCK  # where the drafts start
        mine = (recent // BLOCK)[:, None] + torch.arange(R)  # [B, R] logical blocks
        first = torch.zeros(B, X, dtype=torch.long)          # the room for drafts is filled with any block; it is overwritten
        logical = torch.cat([blocks.long().clamp(min=0), mine[None, :, None].expand(L, B, Hkv, R), first[None, :, None].expand(L, B, Hkv, X)], 3)
        logical = logical.clamp(max=table.shape[1] * per - 1)  # a row with fewer recent blocks than R: masked below
        place = table.gather(1, (logical // per).permute(1, 0, 2, 3).reshape(B, -1)).view(B, L, Hkv, N).transpose(0, 1) * per + logical % per
        place = place + torch.arange(Hkv)[:, None] * ((c.P + 1) * per)  # [L, B, Hkv, N] block of the pool seen as [Hkv * blocks, BLOCK * D]
        self.place = place.reshape(L, -1)
        seen = torch.zeros(B, N * BLOCK, dtype=torch.bool)  # what of it a draft may see; what is drafted comes in step by step
        seen[:, :M * BLOCK] = (blocks[0, :, 0] >= 0).repeat_interleave(BLOCK, 1)
        seen[:, M * BLOCK:self.S] = ((mine * BLOCK)[:, :, None] + torch.arange(BLOCK)).view(B, -1) < length[:, None]
        self.mask = torch.zeros(seen.shape, dtype=c.dtype).masked_fill_(~seen, float("-inf"))  # [B, N * BLOCK]
        shape = (B, Hkv, N * BLOCK, c.D)
        need = B * Hkv * N * BLOCK * c.D
        if c.compact is None or c.compact[0][0].numel() < need:  # kept between rounds: fresh memory costs a page fault a 4 KB
            c.compact = [[torch.empty(need, dtype=c.dtype) for _ in "kv"] for _ in range(L)]
        self.buf = []
        for layer in range(L):
            pair = []
            for pool, room in zip((c.k[layer], c.v[layer]), c.compact[layer]):
                flat = room[:need].view(-1, BLOCK * c.D)
                torch.index_select(pool.view(-1, BLOCK * c.D), 0, self.place[layer], out=flat)
                pair.append(flat.view(shape))
            self.buf.append(pair)

    def __call__(self, q, k, v):
        c, layer, n = self.c, self.layer, q.shape[0]  # n rows are still drafting
        self.layer = (layer + 1) % c.L
        if self.write and layer == 0:
            for s in self.seqs[:n]:
                c._grow(s, s.length + 1)
            self.slots = torch.tensor([s.pages[s.length // c.page] * c.page + s.length % c.page for s in self.seqs[:n]], device=c.device)
            for s in self.seqs[:n]:
                s.length += 1
        if self.write:
            c.k[layer].index_copy_(1, self.slots, k.transpose(0, 1))
            c.v[layer].index_copy_(1, self.slots, v.transpose(0, 1))
            self.q[layer] = q
        if c.path == "triton":
            ks, vs = self.scratch[layer]
            ks[:, :n, self.step], vs[:, :n, self.step] = k.transpose(0, 1), v.transpose(0, 1)
            if layer == 0:
                self.filled += 1
            out = sa.sparse_paged(q, c.k[layer], c.v[layer], self.table[:n], self.blocks[layer, :n], self.recent[:n], self.kv_len[:n], ks[:, :n], vs[:, :n], self.filled[:n], c.page)
        else:
            kb, vb = self.buf[layer]
            kb[:n, :, self.S + self.step], vb[:n, :, self.S + self.step] = k, v
            if layer == 0:
                self.mask[:, self.S + self.step] = 0
            out = sa.attend_compact(q, kb[:n], vb[:n], self.mask[:n])
        if self.layer == 0:
            self.step += 1
        return out

    def block_mass(self, which, at, lengths):
        """As Dense.block_mass, from the queries of the last step (`at` = which: one token a row)."""
        return _block_mass(self.c, self.q, [self.seqs[b] for b in which], at, lengths)
