"""Drafters: who proposes the tokens that the dense policy then verifies.

SparseSelf (S3R, arXiv 2610.13202): the policy drafts for itself. While it verifies, full attention shows which keys matter; the next
drafts read only those, the first block and the recent tokens, a sixteenth of the KV or less:

    verify:  ################################   dense, gives every block of 16 keys its softmax weight
    draft:   #...#......##....#..........####   first block, the best blocks of each KV head, everything recent

Nothing to train, nothing to keep in step with the policy, and the verdict of the dense pass makes the result exactly the policy's.

A drafter is anything with
    features                        layers whose hidden states it wants from the dense passes (`net(..., features=...)`), () for none
    start(groups, kvs, view, at, features)   prompts have been prefilled: groups[i] lists the rows that begin with the K/V of kvs[i]
    ready(row), due(rows)           may this row be drafted for now?  should the next dense pass score its keys?
    propose(rows, k)                -> drafts [N] int64, logq [N, V]: k[b] tokens a row, packed in row order, and the laws they were drawn from
    observe(rows, which, view, at, features, **verdict)   a dense pass has judged; rows go on as its rows `which`, at = packed place of
                                    each one's last accepted token
    offload(row), restore(row), release(row), end_group(group), bytes_per_token
`rows` are the scheduler's: .kv (the pool's Seq), .tokens (prompt and response so far), .seed, .round.

Try it:  python scheduler.py --model tiny --prompt "7+5-3=?" --method s3r
"""
import math

import numpy as np
import torch

from kv_cache import BLOCK
from model import load_pretrained
from spec_sample import draft_token, law


def load_policy(name, dtype, device):
    """A policy to draw responses from and its tokenizer, which it must have: name is a folder, a hub name or "tiny". -> (net without gradients, tok).

    Here and not in the engine: drafters are made of models and may know them, the scheduler only ever calls the net that it is given.
    """
    net, tok = load_pretrained(name, dtype, device)
    if tok is None:
        raise ValueError(f"{name} has no tokenizer: give a folder with tokenizer.json")
    return net.requires_grad_(False), tok


class SparseSelf:
    """S3R's drafter. budget: share of the row's KV that a draft step may read, recents included, at least `floor` tokens.

    `recent_share` of the budget goes to the recent tokens (never under 32), the rest to the best blocks by the softmax weight that the
    last accepted query gave them, per row, layer and KV head.
    """
    features = ()
    bytes_per_token = 0  # it keeps block numbers, not KV

    def __init__(self, net, cache, rule="rejection", temperature=1.0, budget=0.0625, floor=128, recent_share=0.25, refresh=8, max_age=64, truncation=None):
        if not 0 < budget <= 1:
            raise ValueError(f"--budget {budget} must be above 0 and at most 1: the share of the KV that a draft step reads")
        self.net, self.cache, self.rule, self.temperature, self.truncation = net, cache, rule, temperature, truncation or {}
        self.budget, self.floor, self.recent_share, self.refresh, self.max_age = budget, floor, recent_share, refresh, max_age
        self.chosen = {}  # row -> (blocks [L, Hkv, M], position from which everything is read, length when they were chosen)

    def split(self, n):
        """A row of n tokens -> (position from which all is read, number of earlier blocks kept). Both follow from n alone."""
        tokens = max(self.floor, math.ceil(self.budget * n))
        recent = max(0, n - max(32, int(self.recent_share * tokens))) // BLOCK * BLOCK
        return recent, min(recent // BLOCK, -(-max(0, tokens - (n - recent)) // BLOCK))

    def reads(self, n):
        """Tokens that a draft step reads in a row of n: the cost model asks."""
        recent, keep = self.split(n)
        return keep * BLOCK + n - recent

    def start(self, groups, kvs, view, at, features=None):
        self._choose(groups, [kv.length for kv in kvs], list(range(len(kvs))), view, at)

    def observe(self, rows, which, view, at, features=None, **verdict):
        if view.scored and rows:
            self._choose([[row] for row in rows], [row.kv.length for row in rows], which, view, at)

    def rechoose(self, rows, which, view):
        """From the queries of a sparse view's last step: what --method sparse lives on."""
        self._choose([[row] for row in rows], [row.kv.length for row in rows], which, view, which)

    def _choose(self, sharing, lengths, which, view, at):
        """Block lists for the next drafts: sharing[i] lists the rows that take theirs from row which[i] of the pass, its packed token at[i]."""
        splits = [self.split(n) for n in lengths]
        most = max(keep for _, keep in splits)
        if most:
            mass = view.block_mass(which, at, lengths)  # [L, B, Hkv, N]
            mass[..., 0] = float("inf")                 # the first block, always: softmax sinks live there
            limit = torch.tensor([recent // BLOCK for recent, _ in splits], device=mass.device)  # [B] candidates end where recents begin
            mass = mass.masked_fill(torch.arange(mass.shape[-1], device=mass.device) >= limit[:, None, None], -1.0)
            best = mass.topk(most, -1).indices.int()  # [L, B, Hkv, most], best first
        for b, (rows, n, (recent, keep)) in enumerate(zip(sharing, lengths, splits)):
            blocks = best[:, b, :, :keep].sort(-1).values if keep else torch.empty(self.cache.L, self.cache.Hkv, 0, dtype=torch.int32, device=self.cache.device)
            for row in rows:
                self.chosen[row] = (blocks, recent, n)

    def age(self, row):
        """Tokens since the row's blocks were chosen."""
        return row.kv.length - self.chosen[row][2]

    def ready(self, row):
        return row in self.chosen and self.age(row) <= self.max_age

    def due(self, rows):
        """Blocks are chosen anew when a row's choice is `refresh` tokens old: all rows at once, so that one pass is scored and the next ones not."""
        return any(row not in self.chosen or self.age(row) >= self.refresh for row in rows)

    def view(self, rows, steps, write=False):
        """The cache's sparse view of the rows' chosen blocks, for `steps` tokens a row."""
        M = max(self.chosen[row][0].shape[-1] for row in rows)
        blocks = torch.full((self.cache.L, len(rows), self.cache.Hkv, M), -1, dtype=torch.int32, device=self.cache.device)
        for b, row in enumerate(rows):
            mine = self.chosen[row][0]
            blocks[:, b, :, :mine.shape[-1]] = mine
        return self.cache.sparse([row.kv for row in rows], blocks, torch.tensor([self.chosen[row][1] for row in rows]), steps, write)

    def propose(self, rows, k):
        """k[b] >= 1 drafts for each row -> drafts [N], logq [N, V], packed in row order: row b's drafts stand together."""
        dev = self.cache.device
        order = sorted(range(len(rows)), key=lambda b: -k[b])  # rows with fewer drafts come last: they drop out of the tail
        ranked, ks = [rows[b] for b in order], [k[b] for b in order]
        view = self.view(ranked, ks[0])
        ids = torch.tensor([row.tokens[-1] for row in ranked], device=dev)
        place = torch.tensor([len(row.tokens) for row in ranked], device=dev)  # [B] absolute position of the first draft
        seeds = torch.tensor([row.seed for row in ranked], device=dev)
        rounds = torch.tensor([row.round for row in ranked], device=dev)
        steps = []
        for j in range(ks[0]):
            n = sum(x > j for x in ks)  # rows still drafting
            hidden = self.net(ids[:n], place[:n] + (j - 1), view)
            logq = law(self.net.logits(hidden), self.temperature, self.net.vocab, **self.truncation)  # [n, V]
            ids = draft_token(self.rule, logq, seeds[:n], rounds[:n], j, place[:n] + j)
            steps.append((ids, logq))
        rank = np.argsort(order)
        start = np.concatenate(([0], np.cumsum([len(x) for x, _ in steps])))  # where step j's rows start in the concatenation
        pack = torch.tensor([start[j] + rank[b] for b in range(len(rows)) for j in range(k[b])], device=dev)
        return torch.cat([x for x, _ in steps])[pack], torch.cat([q for _, q in steps])[pack]

    def offload(self, row):
        """Block lists are logical positions: they stay valid wherever the row's pages come back to."""

    def restore(self, row):
        pass

    def release(self, row):
        self.chosen.pop(row, None)

    def end_group(self, group):
        pass
