"""The rollout engine: groups of responses, a round of drafting and verifying at a time, and the law of every response is the policy's.

A round, for the rows that are running (k = 0 is plain decoding):

    committed      ... a b c          K/V of "... a b" is in the pool, c has not been through the dense model yet
    1 draft               x1 x2 x3    the drafter's tokens, each with the law q_i that it was drawn from
    2 verify            c x1 x2 x3    one dense pass -> p_1..p_4, writes K/V of all four
    3 accept              x1 y        spec_sample.verify: x1 stands, x2 fell, y is drawn so that the law is p's
    4 cut                             at a stop token, at max_new_tokens, at the context limit
    5 truncate          c x1          K/V of what is committed but its last token, y: the invariant, after every round and for every row

Admission is on the worst case, row by row and first come first served, so that a row that has started always ends and nobody waits
for ever. A prompt is prefilled once; the members of its group share its pages and its last law, and draw their first tokens from it.

The number of drafts is chosen each round: k that maximises E[tokens | k] / seconds(k), seconds from a cost model whose constants are
measured once and kept (so that equal seeds give equal responses), E[tokens] from the acceptance of the rollout's own past.

Try it:  python scheduler.py --model tiny --prompt "7 +5 -3 = ?" --method s3r          streams an answer
         pytest tests/test_scheduler.py tests/test_faithful.py
"""
import argparse
import difflib
import math
import os
import platform
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass

import torch

from draft import SparseSelf, load_policy
from kv_cache import PagedCache
from spec_sample import Controller, Cost, hash64, law, rising, target_token, verify

METHODS = ("ar", "s3r", "sparse")
LATER = ("eagle3", "dflash", "spark-eagle3", "spark-dflash", "spark-s3r")
CHUNK = 2048    # prompt tokens in one prefill pass
REFRESH = 8     # --method sparse chooses its blocks anew after this many tokens


@dataclass
class Response:
    """One response. `ids` ends with the stop token if it stopped; `logps` are log p of the dense policy, temperature applied;
    `sample_logps` those of the law really sampled from (the same list unless method="sparse")."""
    group: int
    index: int
    prompt_ids: list
    ids: list
    logps: list
    sample_logps: list
    finish: str = ""    # "stop" or "length"
    key: object = None  # the prompt's name in random streams: its row in the data set
    text: str = ""
    reward: float = 0.0
    advantage: float = 0.0


@dataclass(eq=False)
class Row:
    """A response while it is being made."""
    response: Response
    tokens: list          # prompt and response so far
    limit: int            # tokens at which it ends by length
    seed: int
    round: int = 0        # rounds it has been through: names its random numbers, whoever else runs
    kv: object = None     # its place in the pool; None before it is admitted and after it has ended


@dataclass(eq=False)
class Group:
    rows: list
    prompt: list
    kv: object = None         # the prompt's K/V while members wait for room
    logp: object = None       # [1, V] the law after the prompt
    waiting: deque = None
    left: int = 0             # members that have not ended


@torch.no_grad()
def measure_cost(net, rows=8, length=2048, temperature=1.0, rule="rejection", budget=0.0625, dtype=None, device="cpu", repeat=5):
    """Time real passes of `net` (the best of `repeat`, of fewer if they are slow) and split them into the constants of `Cost`: a few seconds. rows: a typical batch; length: a typical row."""
    c, device = net.config, torch.device(device)
    net.pack()
    dtype = dtype or next(net.parameters()).dtype
    token_bytes = PagedCache.bytes_per_token(c.layers, c.kv_heads, c.head_dim, dtype)
    length = max(512, min(length, net.context - 64, free_memory(device) // 8 // token_bytes // rows))
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, rows * (length + 512), dtype=dtype, device=device)
    made = []
    for b in range(rows):
        kv = cache.new(length + 64)
        made.append(Row(None, [0] * length, 0, b, kv=kv))

    def timed(f):
        times = []
        for _ in range(repeat + 1):
            if device.type == "cuda":
                torch.cuda.synchronize()
            t = time.perf_counter()
            f()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - t)
            if len(times) > 2 and sum(times) > 0.5:
                break
        return min(times[1:])

    def size(n):
        for r in made:
            if r.kv.length < n:
                cache._grow(r.kv, n)
                r.kv.length = n
            cache.truncate(r.kv, n)
            r.tokens = [0] * (n + 1)

    def passes(group, Q, score=False):
        def f():
            view = cache.dense([r.kv for r in group], [Q] * len(group), score)
            at = torch.cat([torch.arange(len(r.tokens) - 1, len(r.tokens) - 1 + Q) for r in group]).to(device)
            hidden = net(torch.zeros(Q * len(group), dtype=torch.long, device=device), at, view)
            logp = law(net.logits(hidden), temperature, net.vocab)
            if Q == 1:
                target_token(rule, logp, *(torch.zeros(len(group), dtype=torch.long, device=device),) * 3)
            for r in group:
                cache.truncate(r.kv, r.kv.length - Q)
            return view
        return f

    size(32)
    linear = {}
    for T in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512):
        B = min(T, rows)
        if T % B == 0 and T <= max(128, 5 * rows):
            linear[T] = timed(passes(made[:B], T // B))
    few, many = made[:1], made
    short = {(len(g), Q): timed(passes(g, Q)) for g in (few, many) for Q in (1, 2, 5, 9)}
    read = {Q: {0: 0.0} for Q in (1, 2, 5, 9)}
    for n in (length // 4, length):
        size(n)
        for Q in read:
            for g in (few, many):
                read[Q][len(g) * n] = max(0.0, timed(passes(g, Q)) - short[len(g), Q])
    read = {Q: rising(t) for Q, t in read.items()}
    drafter = SparseSelf(net, cache, rule, temperature, budget)
    drafts = {}
    reads = {}
    for n in (32, length):
        size(n)
        view = cache.dense([r.kv for r in made], [1] * rows, True)
        net(torch.zeros(rows, dtype=torch.long, device=device), torch.full((rows,), n, device=device), view)
        for r in made:
            cache.truncate(r.kv, n)
        score = timed(lambda: drafter._choose([[r] for r in made], [n] * rows, list(range(rows)), view, list(range(rows))))
        score += max(0.0, timed(passes(made, 5, True)) - timed(passes(made, 5)))
        reads[n] = rows * drafter.reads(n)
        for k in (1, 4):
            drafts[n, k] = timed(lambda: drafter.propose(made, [k] * rows))
        alone = timed(lambda: drafter.propose(made[:1], [1])) if n == 32 else alone
    step = {n: max(0.0, drafts[n, 4] - drafts[n, 1]) / 3 for n in (32, length)}
    once = {n: max(0.0, drafts[n, 1] - step[n]) for n in (32, length)}
    span = max(1, reads[length] - reads[32])
    size(32)
    logp = torch.randn(rows * 5, net.vocab, device=device).log_softmax(-1)
    zeros = torch.zeros(rows * 4, dtype=torch.long, device=device)
    judge = {n: timed(lambda n=n: verify(rule, logp[:5 * n], logp[:4 * n], zeros[:4 * n], zeros[:n] + 4, zeros[:n], zeros[:n], zeros[:n], want_alpha=True)) for n in (1, rows)}
    setup = max(0.0, once[32] - max(0.0, alone - linear[1])) / max(1, rows - 1)
    accept = max(0.0, judge[rows] - judge[1]) / max(1, 4 * (rows - 1))
    for r in made:
        cache.free(r.kv)
    net.unpack()
    return Cost(linear=rising(linear), read=read, score=score / (rows * length), gather=max(0.0, once[length] - once[32]) / span,
                sparse=max(0.0, step[length] - step[32]) / span, setup=setup, accept=accept,
                start=max(0.0, once[32] - rows * setup) + max(0.0, judge[1] - 4 * accept),
                made_on=dict(device=device_name(device), threads=torch.get_num_threads(), dtype=str(dtype).removeprefix("torch."), rows=rows, length=length,
                             layers=c.layers, hidden=c.hidden_size, budget=budget, torch=torch.__version__))


# ----------------------------------------------------------------------------------------------------------------------
# the engine


class Engine:
    """Rows in one pool, `step()` by `step()`. `drafter` None: plain decoding. `sparse`: the foil that samples from sparse attention itself."""

    def __init__(self, net, cache, drafter=None, controller=None, *, temperature=1.0, rule="rejection", stop_ids=(), truncation=None, sparse=False):
        self.net, self.cache, self.drafter, self.sparse = net, cache, drafter, sparse
        net.pack()
        self.controller = controller or Controller(0)
        self.temperature, self.rule, self.stop_ids = temperature, "greedy" if temperature == 0 else rule, frozenset(stop_ids)
        self.truncation = truncation or {}  # top_k, top_p
        self.features = getattr(drafter, "features", ())
        self.queue, self.rows = deque(), []
        self.view, self.view_rows = None, []  # --method sparse: the view that goes on from step to step
        self.stats = dict(tokens=0, rounds=0, row_rounds=0, decoded=0, drafted=0, judged=0, accepted=0, alpha=0.0, prefill_tokens=0,
                          s_prefill=0.0, s_draft=0.0, s_verify=0.0, s_other=0.0)
        self.k_hist = Counter()

    def law(self, hidden):
        return law(self.net.logits(hidden), self.temperature, self.net.vocab, **self.truncation)

    @property
    def busy(self):
        return bool(self.queue or self.rows)

    def tensor(self, x, dtype=torch.long):
        return torch.tensor(x, dtype=dtype, device=self.cache.device)

    # -- admission -----------------------------------------------------------------------------------------------------

    def add(self, number, prompt, seeds, max_new_tokens, key=None):
        """Queue one prompt and its group, a response for each of `seeds`. Refused if it could never run."""
        P, limit = len(prompt), min(len(prompt) + max_new_tokens, self.net.context)
        if not P:
            raise ValueError(f"prompt {number} is empty: it needs at least one token")
        if P >= self.net.context:
            raise ValueError(f"prompt {number} has {P:,} tokens and the model's context is {self.net.context:,}: shorten it, or drop it from the data")
        need = self.cache.pages_for(P) + self.cache.pages_for(limit, P)
        if need > self.cache.P:
            raise ValueError(f"prompt {number} with one response may need {need * self.cache.page:,} tokens of KV ({P:,} of prompt, {limit - P:,} new, in pages of "
                             f"{self.cache.page}) and the pool holds {self.cache.P * self.cache.page:,}: raise --kv-tokens or lower --max-new-tokens")
        rows = [Row(Response(number, i, list(prompt), [], [], [], key=key), list(prompt), limit, seed) for i, seed in enumerate(seeds)]
        self.queue.append(Group(rows, list(prompt), waiting=deque(rows), left=len(rows)))

    def _admit(self):
        """As many waiting rows, in order, as fit with their worst case: the prompt, all they may still write, pages of the prompt counted once."""
        fresh, admitted = [], []
        for group in list(self.queue):
            P, limit = len(group.prompt), group.rows[0].limit
            need = self.cache.pages_for(limit, P)  # drafts never reach past a row's last token, so k adds nothing
            if group.kv is None:
                if self.cache.pages_for(P) + need > self.cache.available():
                    break
                group.kv = self.cache.new(P)
                fresh.append(group)
            while group.waiting and need <= self.cache.available():
                row = group.waiting.popleft()
                admitted.append((group, row))
                self.cache.promised += need  # until the prompt has been prefilled and the row can be forked from it
            if group.waiting:
                break
            self.queue.popleft()
        self._prefill(fresh)
        for group, row in admitted:
            self.cache.promised -= self.cache.pages_for(row.limit, len(group.prompt))
            row.kv = self.cache.fork(group.kv, row.limit)
        for group in dict.fromkeys(group for group, _ in admitted):
            rows = [row for g, row in admitted if g is group]
            n = len(rows)
            if not group.waiting:
                self.cache.free(group.kv)
                group.kv = None
            logp = group.logp.expand(n, -1)  # [n, V]
            ids = target_token(self.rule, logp, self.tensor([r.seed for r in rows]), self.tensor([0] * n), self.tensor([len(group.prompt)] * n))
            picked = logp.gather(1, ids[:, None])[:, 0].tolist()
            if not group.waiting:
                group.logp = None
            for row, token, lp in zip(rows, ids.tolist(), picked):
                self._commit(row, [token], [lp])
                row.round = 1
                self.rows.append(row)
        return self._retire()

    def _prefill(self, groups):
        """Prompts once each: short ones packed into one pass, long ones in chunks. Their last rows choose what the first drafts read."""
        t = time.perf_counter()
        while groups:
            batch = [groups.pop(0)]
            while groups and sum(len(g.prompt) for g in batch) + len(groups[0].prompt) <= CHUNK:
                batch.append(groups.pop(0))
            lengths = [len(g.prompt) for g in batch]
            feats = []
            for a in range(0, max(lengths), CHUNK):  # more than one turn only for a prompt that is alone
                counts = [min(n, a + CHUNK) - a for n in lengths]
                last = a + CHUNK >= max(lengths)
                view = self.cache.dense([g.kv for g in batch], counts, score=last and self.drafter is not None)
                ids = self.tensor([x for g, n in zip(batch, counts) for x in g.prompt[a:a + n]])
                positions = torch.cat([torch.arange(a, a + n) for n in counts]).to(self.cache.device)
                out = self.net(ids, positions, view, self.features)
                hidden = out[0] if self.features else out
                feats += [out[1]] if self.features else []
            at = self.tensor(counts).cumsum(0) - 1  # [groups] each prompt's last packed row
            logp = self.law(hidden[at])
            for i, group in enumerate(batch):
                group.logp = logp[i:i + 1]
            if self.drafter is not None:
                self.drafter.start([group.rows for group in batch], [group.kv for group in batch], view, at, torch.cat(feats) if feats else None)
            self.stats["prefill_tokens"] += sum(lengths)
        self._clock("s_prefill", t)

    # -- a round -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self):
        """Admit, then one round for the running rows. -> responses that have ended."""
        done = self._admit() if self.queue else []
        if self.rows:
            self.stats["rounds"] += 1
            self.stats["row_rounds"] += len(self.rows)
            (self._sparse_round if self.sparse else self._round)()
            done += self._retire()
        return done

    def _round(self):
        t0 = time.perf_counter()
        rows, cache, drafter = self.rows, self.cache, self.drafter
        B = len(rows)
        want = self.controller.choose(rows, drafter, cache.page) if drafter else 0
        k = [min(want, row.limit - len(row.tokens) - 1) if want and drafter.ready(row) else 0 for row in rows]
        N = sum(k)
        self.k_hist[max(k)] += 1
        seeds, rounds = self.tensor([r.seed for r in rows]), self.tensor([r.round for r in rows])
        places = self.tensor([len(r.tokens) for r in rows])  # [B] absolute position of each row's first draft

        t1 = time.perf_counter()
        if N:
            drafting = [b for b in range(B) if k[b]]
            drafts, logq = drafter.propose([rows[b] for b in drafting], [k[b] for b in drafting])  # [N], [N, V]
            texts = drafts.tolist()
        t2 = self._clock("s_draft", t1) if N else t1

        ids, positions, n = [], [], 0
        for b, row in enumerate(rows):
            ids += [row.tokens[-1]] + (texts[n:n + k[b]] if k[b] else [])
            positions += range(len(row.tokens) - 1, len(row.tokens) + k[b])
            n += k[b]
        score = bool(want) and drafter.due(rows)
        view = cache.dense([row.kv for row in rows], [x + 1 for x in k], score)
        out = self.net(self.tensor(ids), self.tensor(positions), view, self.features)
        hidden, feats = out if self.features else (out, None)
        logp = self.law(hidden)  # [T, V]
        if N:
            verdict = verify(self.rule, logp, logq, drafts, self.tensor(k), seeds, rounds, places, want_alpha=True)
            accepted, final = verdict.accepted.tolist(), verdict.token.tolist()
            self.stats["alpha"] += float(verdict.alpha.sum())
        else:
            accepted, final = [0] * B, target_token(self.rule, logp, seeds, rounds, places).tolist()

        start, at, new, n = 0, [], [], 0  # at[b]: packed row of the last accepted token, the one that emitted the final token
        for b in range(B):
            a = accepted[b]
            new.append((texts[n:n + a] if a else []) + [final[b]])
            at.append(start + a)
            start += k[b] + 1
            n += k[b]
        emitted = torch.tensor([x for tokens in new for x in tokens], device=logp.device)
        where = torch.tensor([a - len(tokens) + 1 + i for a, tokens in zip(at, new) for i in range(len(tokens))], device=logp.device)
        lps, n = logp[where, emitted].tolist(), 0
        t3 = self._clock("s_verify", t2)

        for row, tokens in zip(rows, new):
            row.round += 1
            self._commit(row, tokens, lps[n:n + len(tokens)])
            n += len(tokens)
            cache.truncate(row.kv, len(row.tokens) - 1)
        if drafter:
            going = [b for b in range(B) if not rows[b].response.finish]
            drafter.observe([rows[b] for b in going], going, view, [at[b] for b in going], feats, logp=logp, logq=logq if N else None, drafts=drafts if N else None, k=k, accepted=accepted)
        self.stats["drafted"] += N
        self.stats["accepted"] += sum(accepted)
        self.stats["judged"] += sum(min(a + 1, x) for a, x in zip(accepted, k))
        self.controller.observe(accepted, k)
        self._clock("s_other", t3)
        self.stats["s_other"] += t1 - t0

    def _sparse_round(self):
        """The foil: one token a row straight from sparse attention, its sparse K/V kept. Blocks are chosen anew every REFRESH tokens."""
        t, rows, drafter = time.perf_counter(), self.rows, self.drafter
        if any(drafter.age(row) >= REFRESH for row in rows) and self.view is not None:
            old = {row: b for b, row in enumerate(self.view_rows) if row.kv is not None}
            drafter.rechoose(list(old), list(old.values()), self.view)
            self.view = None
        if self.view is None or self.view_rows != rows or self.view.step == self.view.steps:
            self.view, self.view_rows = drafter.view(rows, REFRESH, write=True), list(rows)
        ids, positions = self.tensor([r.tokens[-1] for r in rows]), self.tensor([len(r.tokens) - 1 for r in rows])
        logp = self.law(self.net(ids, positions, self.view))
        tokens = target_token(self.rule, logp, self.tensor([r.seed for r in rows]), self.tensor([r.round for r in rows]), positions + 1)
        lps = logp.gather(1, tokens[:, None])[:, 0].tolist()
        for row, token, lp in zip(rows, tokens.tolist(), lps):
            row.round += 1
            self._commit(row, [token], [lp])
        self.k_hist[0] += 1
        self._clock("s_verify", t)

    def _commit(self, row, tokens, logps):
        """Append what a round has decided, cut at the first stop token and at the row's limit."""
        r = row.response
        if not all(map(math.isfinite, logps)):
            raise FloatingPointError(f"the model's probabilities are not finite at position {len(row.tokens)} of prompt {r.group}: its weights have diverged, or {self.cache.dtype} is too narrow for it")
        for i, token in enumerate(tokens):
            if token in self.stop_ids:
                tokens, r.finish = tokens[:i + 1], "stop"
                break
        if not r.finish and len(row.tokens) + len(tokens) == row.limit:  # a row is never given more drafts than it has room for
            r.finish = "length"
        row.tokens += tokens
        r.ids += tokens
        r.logps += logps[:len(tokens)]
        self.stats["tokens"] += len(tokens)
        self.stats["decoded"] += len(tokens) if row.round else 0

    def _retire(self):
        done = [row for row in self.rows if row.response.finish]
        for row in done:
            self.cache.free(row.kv)
            row.kv = None
            if self.drafter:
                self.drafter.release(row)
            row.response.sample_logps = row.response.logps
        if done:
            self.rows = [row for row in self.rows if not row.response.finish]
        return [row.response for row in done]

    def _clock(self, name, since):
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stats[name] += now - since
        return now


# ----------------------------------------------------------------------------------------------------------------------
# rollout: prompts in, complete groups out


def check_method(method, verify="rejection", temperature=1.0, k="auto", budget=0.0625, scheduler="kv-aware", host_kv_tokens=0):
    """One sentence for what cannot be run, before anything is loaded."""
    if method in LATER:
        raise ValueError(f"method {method} is not built yet: choose from {', '.join(METHODS)}")
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: choose from {', '.join(METHODS)}")
    if verify not in ("rejection", "block", "coupled"):
        raise ValueError(f"there is no acceptance rule {verify!r}: choose rejection, block or coupled")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature {temperature} must be a finite number of at least 0 (0 is greedy)")
    if k != "auto" and not (isinstance(k, int) and 0 <= k <= 64):
        raise ValueError(f"k {k!r} must be auto or a whole number from 0 to 64: the drafts of a round")
    if not 0 < budget <= 1:
        raise ValueError(f"budget {budget} must be above 0 and at most 1: the share of the KV that a draft step reads")
    if scheduler == "naive" or host_kv_tokens:
        raise ValueError("offloading KV to host memory is not built yet: leave host_kv_tokens at 0 and scheduler at kv-aware; rows that do not fit wait their turn")
    if scheduler != "kv-aware":
        raise ValueError(f"there is no scheduler {scheduler!r}: choose kv-aware")


def rollout(net, prompts, group=8, max_new_tokens=256, method="s3r", temperature=1.0, seed=0, k="auto", budget=0.0625, verify="rejection",
            kv_tokens=None, host_kv_tokens=0, scheduler="kv-aware", stop_ids=None, drafter=None, prompt_keys=None, on_group=None,
            step=0, cost=None, top_k=0, top_p=1.0, page=256, on_token=None):
    """`group` responses to each prompt (a list of token ids) -> (Responses in input order, stats).

    Every response is drawn from the dense policy's law at `temperature`, whatever the method and k ("sparse" apart: the foil, whose
    .sample_logps tell the law that was sampled from). stop_ids None: the model's own; () none. kv_tokens: room of the KV pool, None for
    the worst case of all rows, at most 40% of free memory. prompt_keys name the prompts in random streams (default: their index), with
    `seed` and `step`; so a prompt keeps its responses in any batch. cost: a `Cost`, for k="auto"; None measures one. drafter: an object
    that keeps the protocol of draft.py, or a function (net, cache) that makes one; None: the method's own.
    on_group(responses) is called with each group as it ends, on_token(responses so far) after each round.
    Raises ValueError for a prompt that is empty or longer than the context or the pool.
    """
    check_method(method, verify, temperature, k, budget, scheduler, host_kv_tokens)
    if group < 1 or max_new_tokens < 1:
        raise ValueError(f"group {group} and max_new_tokens {max_new_tokens} must be at least 1")
    keys = list(range(len(prompts))) if prompt_keys is None else list(prompt_keys)
    if len(keys) != len(prompts) or len(set(keys)) != len(keys):
        raise ValueError(f"{len(keys)} prompt_keys ({len(set(keys))} different) for {len(prompts)} prompts: give each prompt a key of its own, or their responses would be the same")
    parameter = next(net.parameters())
    c, dtype, device = net.config, parameter.dtype, parameter.device
    started = time.perf_counter()
    pages = lambda P: -(-min(P + max_new_tokens, net.context) // page) - P // page  # noqa: E731  private pages of one response
    worst = sum((-(-len(p) // page) + group * pages(len(p))) * page for p in prompts)
    token_bytes = PagedCache.bytes_per_token(c.layers, c.kv_heads, c.head_dim, dtype)
    room = int(0.4 * free_memory(device)) // token_bytes
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, min(worst, room) if kv_tokens is None else kv_tokens, page=page, dtype=dtype, device=device)
    rule = "greedy" if temperature == 0 else verify
    truncation = dict(top_k=top_k, top_p=top_p)
    if method == "ar":
        drafter = None
    elif drafter is None:
        drafter = SparseSelf(net, cache, rule, temperature, budget, truncation=truncation)
    elif not hasattr(drafter, "propose"):
        drafter = drafter(net, cache)
    if method == "s3r" and k == "auto" and cost is None:
        longest = max(map(len, prompts), default=0) + max_new_tokens
        cost = measure_cost(net, min(64, max(1, len(prompts) * group)), longest, temperature, rule, budget, dtype, device)
    controller = Controller(0 if method != "s3r" else k, cost if k == "auto" and method == "s3r" else None)
    stops = net.stop_ids if stop_ids is None else stop_ids
    engine = Engine(net, cache, drafter, controller, temperature=temperature, rule=rule, stop_ids=stops, truncation=truncation, sparse=method == "sparse")
    for i, (prompt, key) in enumerate(zip(prompts, keys)):
        engine.add(i, prompt, [hash64(seed, step, key, member) for member in range(group)], max_new_tokens, key)
    groups, responses, running, t0 = {}, [], [], time.perf_counter()
    try:
        while engine.busy:
            for r in engine.step():
                groups.setdefault(r.group, []).append(r)
                responses.append(r)
                if len(groups[r.group]) == group:
                    done = sorted(groups.pop(r.group), key=lambda r: r.index)
                    if drafter:
                        drafter.end_group(r.group)
                    if on_group:
                        on_group(done)
            if engine.rows:
                running.append(len(engine.rows))
            if on_token:
                on_token([row.response for row in engine.rows])
        cache.check()
        if cache.free_pages != cache.P or cache.promised or cache.live:
            raise RuntimeError(f"the idle KV pool holds {cache.P - cache.free_pages} pages and {cache.promised} promises: rows were not freed")
        responses.sort(key=lambda r: (r.group, r.index))
        if method == "sparse":
            rescore(net, responses, temperature, truncation)
    finally:
        net.unpack()  # the weights may be trained next
    return responses, summary(engine, running, t0 - started, time.perf_counter() - t0, token_bytes)


def summary(engine, running, s_setup, seconds, token_bytes):
    """The stats of a rollout. tau: tokens a row emits per round; accept_rate: accepted / judged drafts; overlap: mean 1 - TV(p, q) over all
    drafted slots; tok_s leaves the measuring of constants out and has the prefill in it."""
    s, rounds = engine.stats, max(1, engine.stats["rounds"])
    decode = s["s_draft"] + s["s_verify"] + s["s_other"]
    return dict(tokens=s["tokens"], seconds=seconds, tok_s=s["tokens"] / max(seconds, 1e-9), decode_tok_s=s["decoded"] / max(decode, 1e-9), setup_seconds=s_setup,
                prefill_seconds=s["s_prefill"], prefill_tokens=s["prefill_tokens"], rounds=s["rounds"], tau=s["decoded"] / max(1, s["row_rounds"]),
                drafted=s["drafted"], judged=s["judged"], accepted=s["accepted"], accept_rate=s["accepted"] / s["judged"] if s["judged"] else None,
                overlap=s["alpha"] / s["drafted"] if s["drafted"] else None, k=sum(k * n for k, n in engine.k_hist.items()) / rounds,
                k_hist=dict(sorted(engine.k_hist.items())), ms_draft=1e3 * s["s_draft"] / rounds, ms_verify=1e3 * s["s_verify"] / rounds,
                ms_other=1e3 * s["s_other"] / rounds, running=sum(running) / max(1, len(running)), kv_tokens=engine.cache.P * engine.cache.page,
                kv_bytes=engine.cache.P * engine.cache.page * token_bytes, offload_bytes=0, why=engine.controller.why if not engine.stats["drafted"] else "")


@torch.no_grad()
def rescore(net, responses, temperature, truncation, tokens=8192):
    """Dense log-probabilities of responses that were sampled otherwise: .sample_logps keeps theirs, .logps becomes the policy's."""
    batch, n = [], 0
    for i, r in enumerate(responses):
        batch.append(r)
        n += len(r.prompt_ids) + len(r.ids)
        if n < tokens and i + 1 < len(responses):
            continue
        cache = PagedCache(net.config.layers, net.config.kv_heads, net.config.head_dim, sum(len(r.prompt_ids) + len(r.ids) + 256 for r in batch), dtype=next(net.parameters()).dtype,
                           device=next(net.parameters()).device)
        seqs = [cache.new(len(r.prompt_ids) + len(r.ids)) for r in batch]
        counts = [len(r.prompt_ids) + len(r.ids) for r in batch]
        hidden = net(torch.tensor([x for r in batch for x in r.prompt_ids + r.ids], device=cache.device), torch.cat([torch.arange(n) for n in counts]).to(cache.device),
                     cache.dense(seqs, counts))
        a = 0
        for r, n in zip(batch, counts):
            P = len(r.prompt_ids)
            logp = law(net.logits(hidden[a + P - 1:a + n - 1]), temperature, net.vocab, **truncation)
            r.sample_logps, r.logps = r.logps, logp.gather(1, torch.tensor(r.ids, device=logp.device)[:, None])[:, 0].tolist()
            a += n
        batch, n = [], 0


# ----------------------------------------------------------------------------------------------------------------------
# the machine, and the command line


def free_memory(device):
    """Bytes that may still be taken on `device`, a container's own limit respected."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as f:
            free = 1024 * next(int(line.split()[1]) for line in f if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as f, open("/sys/fs/cgroup/memory.current") as g:
            limit = f.read().strip()
            free = min(free, int(limit) - int(g.read())) if limit != "max" else free
    except (OSError, StopIteration, ValueError):
        pass  # not Linux, or no container: the first figure stands
    return free


def device_name(device):
    """"cuda" -> the GPU's name, "cpu" -> the processor's."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Flags(argparse.ArgumentParser):
    """argparse whose mistakes are one sentence on stderr, with the nearest name, and exit code 2."""

    def __init__(self, **kw):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kw)

    def parse_args(self, args=None, namespace=None):
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            known = [o for a in self._actions for o in a.option_strings]
            near = difflib.get_close_matches(extra[0].split("=")[0], known, 1)
            self.error(f"unknown flag {extra[0]}" + (f": did you mean {near[0]}?" if near else "; --help lists them all"))
        return found

    def error(self, message):
        sys.exit(refuse(message))


def refuse(message):
    """Say a user's mistake in one sentence; the exit code is 2."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def number_or_auto(text):
    """--k: "auto" or a whole number."""
    return text if text == "auto" else int(text)


def pick_device(name="auto"):
    """"auto" -> cuda where there is one; anything else as it is, if torch can use it."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name} is not available here (torch {torch.__version__} sees no GPU): use --device cpu")
    if not name.startswith(("cuda", "cpu")):
        raise ValueError(f"device {name} is not supported: use cpu or cuda")
    return name


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def main():
    p = Flags(prog="scheduler.py", description="Stream one answer from a model, with its speed.")
    p.add_argument("--model", default="tiny", help="a folder in Hugging Face format, a hub name, or tiny")
    p.add_argument("--prompt", default=None, help="a user's message; - reads it from stdin")
    p.add_argument("--method", default="s3r", help=", ".join(METHODS))
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--k", type=number_or_auto, default="auto", help="drafts a round: auto or a number")
    p.add_argument("--budget", type=float, default=0.0625, help="share of the KV that a draft step reads")
    p.add_argument("--verify", default="rejection", help="rejection, block or coupled")
    p.add_argument("--top-k", type=int, default=0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--kv-tokens", type=int, default=None, help="room of the KV pool; default: what the answer may need")
    p.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    p.add_argument("--device", default="auto")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    try:
        if not a.prompt:
            raise ValueError("give --prompt TEXT, or --prompt - to read it from stdin")
        check_method(a.method, a.verify, a.temperature, a.k, a.budget)
        device = pick_device(a.device)
        net, tok = load_policy(a.model, DTYPES[a.dtype], device)
        text = sys.stdin.read() if a.prompt == "-" else a.prompt
        ids = tok.chat([{"role": "user", "content": text}]) if tok.has_template else tok.encode(text)
        show, shown = tok.stream(), [0]

        def stream(rows):
            for r in rows:
                print(show([x for x in r.ids[shown[0]:] if x not in net.stop_ids]), end="", flush=True)
                shown[0] = len(r.ids)

        (answer,), stats = rollout(net, [ids], 1, a.max_new_tokens, a.method, a.temperature, a.seed, a.k, a.budget, a.verify, kv_tokens=a.kv_tokens,
                                   top_k=a.top_k, top_p=a.top_p, on_token=stream)
        stream([answer])
        print(show([], final=True), end="\n\n")
        rate = "" if stats["accept_rate"] is None else f", accepted {stats['accept_rate']:.2f} of the drafts judged"
        print(f"[{len(answer.ids)} tokens after {len(ids)} of prompt, {answer.finish}; {stats['decode_tok_s']:.1f} tok/s, tau {stats['tau']:.2f} tokens a round{rate}; "
              f"prefill {stats['prefill_seconds']:.2f} s; {a.method}, {a.dtype}, {device_name(device)}]", file=sys.stderr)
        if stats["why"] and a.method == "s3r":
            print(f"[{stats['why']}]", file=sys.stderr)
    except ValueError as e:
        return refuse(str(e))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
