"""Acceptance rules, laws and random numbers. Every rule must return exactly p: by enumeration, by sampling, and against the usual mistakes.

    pytest tests/test_spec_sample.py

The mistakes are written out below (MISTAKES, SAMPLING) and each must fail the check that the real code passes.
"""
import doctest
import itertools
import math

import pytest
import torch

import spec_sample
from spec_sample import (COIN, DRAFT, FINAL, best_k, coupled_acceptance, draft_token, draw, draw_weights, expected_tokens, final_weights, gumbel, hash64, law,
                         odds, residual, round_law, sequence, speedup, stands, target_token, uniform, verify)

F64 = torch.float64
P4, Q4 = torch.tensor([.10, .35, .25, .30], dtype=F64), torch.tensor([.50, .10, .22, .18], dtype=F64)  # residual has two tokens: .625 .075 .300 of slots 1 2 3
P3, Q3 = torch.tensor([.5, .3, .2], dtype=F64), torch.tensor([.2, .5, .3], dtype=F64)
EXACT = ("rejection", "block")
RULES = EXACT + ("coupled", "greedy")


def longs(x):
    return torch.tensor(x, dtype=torch.long)


# ----------------------------------------------------------------------------------------------------------------------
# the law of a round, by enumeration


def context_laws(case, V, k):
    """-> P, Q: head -> law, for all heads of up to k tokens; each head has laws of its own."""
    g = torch.Generator().manual_seed(hash64(case, V, k) % 2**31)

    def one(zero):
        x = (torch.randn(V, generator=g, dtype=F64) * 1.5).softmax(-1)
        x[list(zero)] = 0
        return x / x.sum()

    P, Q = {}, {}
    for head in (h for n in range(k + 1) for h in itertools.product(range(V), repeat=n)):
        a, b = torch.randperm(V, generator=g)[:2].tolist()
        P[head] = one({"zeros": [a], "disjoint": range(0, V, 2), "one-hot": set(range(V)) - {a}}.get(case, []))
        Q[head] = P[head] if case == "equal" else one({"zeros": [b], "disjoint": range(1, V, 2), "one-hot": set(range(V)) - {a if len(head) % 2 else b}}.get(case, []))
    return P, Q


def gap(rule, P, Q, k):
    """Largest error of the law of the first k + 1 tokens: one round, then plain decoding for what it did not say."""
    V = len(P[()])
    error = {x: -sequence(P, x) for x in itertools.product(range(V), repeat=k + 1)}
    for said, chance in round_law(rule, P, Q, k).items():
        for rest in itertools.product(range(V), repeat=k + 1 - len(said)):
            error[said + rest] += chance * sequence(P, said + rest, len(said))
    return max(map(abs, error.values()))


def tokens(rule, P, Q, k):
    return sum(len(said) * chance for said, chance in round_law(rule, P, Q, k).items())


@pytest.mark.parametrize("V, k", [(3, 0), (3, 1), (3, 2), (3, 3), (2, 4), (4, 2)])
@pytest.mark.parametrize("case", ["random", "zeros", "equal", "disjoint", "one-hot"])
def test_a_round_emits_the_law_of_plain_decoding(case, V, k):
    P, Q = context_laws(case, V, k)
    for rule in EXACT:
        assert gap(rule, P, Q, k) < 1e-14, rule
    if case == "equal":
        assert tokens("rejection", P, Q, k) == pytest.approx(k + 1)  # nothing to reject
    if case == "disjoint":
        assert tokens("block", P, Q, k) == pytest.approx(1)
    assert tokens("block", P, Q, k) >= tokens("rejection", P, Q, k) - 1e-12


def test_four_drafts_of_three_tokens():
    P, Q = context_laws("random", 3, 4)
    assert max(gap(rule, P, Q, 4) for rule in EXACT) < 1e-14


def test_block_gains_where_a_bad_draft_is_redeemed():
    """The example of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3) at both slots. Rejection accepts 10/9 of 2, block 11/9."""
    p, q = torch.tensor([1, 2], dtype=F64) / 3, torch.tensor([2, 1], dtype=F64) / 3
    P, Q = ({h: x for n in range(3) for h in itertools.product(range(2), repeat=n)} for x in (p, q))
    assert tokens("rejection", P, Q, 2) == pytest.approx(1 + 10 / 9)
    assert tokens("block", P, Q, 2) == pytest.approx(1 + 11 / 9)


def test_block_thresholds_are_the_papers():
    """w, h of every draft of up to four, against algorithm 2 of Sun et al. written down slot by slot."""
    for case, k in itertools.product(("random", "zeros", "one-hot"), range(1, 5)):
        P, Q = context_laws(case, 3, k)
        for x in (x for x in itertools.product(range(3), repeat=k) if sequence(Q, x) > 0):
            w, h = [1.0], []
            for i in range(k):
                w.append(min(1.0, w[i] * (P[x[:i]][x[i]] / Q[x[:i]][x[i]]).item()))
            for i in range(1, k):
                S = (w[i] * P[x[:i]] - Q[x[:i]]).clamp(min=0).sum().item()
                h.append(S / (S + 1 - w[i]) if w[i] < 1 else 1.0)
            logp, logq = (torch.stack([L[x[:i]] for i in range(n)]).log() for L, n in ((P, k + 1), (Q, k)))
            mine = odds("block", logp, logq, longs(x), longs([k]))
            assert mine[0][0].tolist() == pytest.approx(h + [w[k]], abs=1e-12) and mine[1][0].tolist() == pytest.approx(w, abs=1e-12)


def test_block_of_one_draft_is_rejection():
    P, Q = context_laws("zeros", 3, 1)
    a, b = round_law("rejection", P, Q, 1), round_law("block", P, Q, 1)
    assert a.keys() == b.keys() and all(a[x] == pytest.approx(b[x]) for x in a)


def test_acceptance_is_the_overlap():
    P, Q = {h: P4 for h in [(), (0,), (1,), (2,), (3,)]}, {(): Q4}
    out = round_law("rejection", P, Q, 1)
    assert sum(w for x, w in out.items() if len(x) == 2) == pytest.approx(0.60)
    assert residual(P4[None], Q4[None])[0].tolist() == pytest.approx([0, .25, .03, .12])


# Each mistake replaces one function of the module; what a round emits must then be off. (name, function, wrong version, rule)
real_odds, real_stands, real_final, real_residual = odds, stands, final_weights, residual


def wrong_w(update):
    """Block's thresholds with another rule for w."""
    def wrong(rule, logp, logq, drafts, k):
        h, w = real_odds(rule, logp, logq, drafts, k)
        ratio = (logp[torch.arange(len(drafts)), drafts] - logq[torch.arange(len(drafts)), drafts]).exp()  # one row at a time here
        for i, r in enumerate(ratio.tolist()):
            w[0, i + 1] = update(w[0, i].item(), r)
        for i in range(1, len(drafts)):
            S = (w[0, i] * logp[i].exp() - logq[i].exp()).clamp(min=0).sum()
            h[0, i - 1] = S / (S + 1 - w[0, i]).clamp(min=1e-30)
        if len(drafts):
            h[0, -1] = w[0, -1]
        return h.clamp(0, 1), w
    return wrong


def thresholds(change):
    def wrong(rule, *a):
        h, w = real_odds(rule, *a)
        return change(h.clone(), w), w
    return wrong


def shifted_p(rule, logp, logq, drafts, k):
    return real_odds(rule, logp.roll(-1, 0), logq, drafts, k)


def p_alone(rule, logp, logq, drafts, k):
    return logp[torch.arange(len(drafts)), drafts].exp()[None], torch.ones(1, len(drafts) + 1, dtype=F64)


def last_ratio(rule, *a):
    (h, w), (ratio, _) = real_odds("block", *a), real_odds("rejection", *a)
    return torch.cat([h[:, :-1], ratio[:, -1:]], 1), w


def bonus_row(shift):
    """The last token is drawn from another row of p when all drafts stand."""
    def wrong(logp, logq, k, accepted, w):
        out = real_final(logp, logq, k, accepted, w)
        return logp[(k + shift)[0]].exp()[None] if accepted[0] == k[0] else out
    return wrong


MISTAKES = [
    ("residual: p itself", "residual", lambda p, q, scale=1.0: p, "rejection"),
    ("residual: p without what q prefers, not p - q", "residual", lambda p, q, scale=1.0: torch.where(p > q, p, 0), "rejection"),
    ("residual: (q - p)+", "residual", lambda p, q, scale=1.0: real_residual(q, p), "rejection"),
    ("residual: softmax of the clamp", "residual", lambda p, q, scale=1.0: (p - q).clamp(min=0).softmax(-1), "rejection"),
    ("residual: p where it should have been (p - q)+, in block", "residual", lambda p, q, scale=1.0: p, "block"),
    ("bonus from the row before", "final_weights", bonus_row(-1), "rejection"),
    ("bonus from the first row", "final_weights", lambda *a: bonus_row(-int(a[2][0]))(*a), "rejection"),
    ("no residual at all: the row's p", "final_weights", lambda logp, logq, k, a, w: logp[a].exp(), "rejection"),
    ("residual of the next slot", "final_weights", lambda logp, logq, k, a, w: real_final(logp, logq.roll(-1, 0), k, a, w), "rejection"),
    ("drafts judged by the row after theirs", "odds", shifted_p, "rejection"),
    ("everything accepted", "odds", thresholds(lambda h, w: torch.ones_like(h)), "rejection"),
    ("nothing accepted, residual all the same", "odds", thresholds(lambda h, w: torch.zeros_like(h)), "rejection"),
    ("accept with p(x) instead of p(x) / q(x)", "odds", p_alone, "rejection"),
    ("first draft not judged", "odds", thresholds(lambda h, w: h.index_fill(1, longs([0]), 1.0)), "rejection"),
    ("counts all hits, also those after a miss", "stands", lambda rule, hits: hits.sum(1), "rejection"),
    ("counts to the last hit, with rejection's thresholds", "stands", lambda rule, hits: real_stands("block", hits), "rejection"),
    ("counts one hit too few", "stands", lambda rule, hits: (real_stands(rule, hits) - 1).clamp(min=0), "rejection"),
    ("block: stops at the first miss", "stands", lambda rule, hits: real_stands("rejection", hits), "block"),
    ("block: residual without w", "residual", lambda p, q, scale=1.0: real_residual(p, q), "block"),
    ("block: w not carried over from the slot before", "odds", wrong_w(lambda w, r: min(1.0, r)), "block"),
    ("block: w not cut at 1", "odds", wrong_w(lambda w, r: w * r), "block"),
    ("block: h = w", "odds", thresholds(lambda h, w: w[:, 1:]), "block"),
    ("block: last threshold 1", "odds", thresholds(lambda h, w: h.index_fill(1, longs([h.shape[1] - 1]), 1.0)), "block"),
    ("block: last threshold is the ratio, not w", "odds", last_ratio, "block"),
    ("block with rejection's thresholds", "odds", lambda rule, *a: (real_odds("rejection", *a)[0], real_odds("block", *a)[1]), "block"),
]


@pytest.mark.parametrize("name, function, wrong, rule", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_the_enumeration_catches(monkeypatch, name, function, wrong, rule):
    P, Q = context_laws("random", 5, 2)  # residuals with one token would hide some
    assert gap(rule, P, Q, 2) < 1e-14
    monkeypatch.setattr(spec_sample, function, wrong)
    assert gap(rule, P, Q, 2) > 1e-4


def test_the_mistakes_are_built_on_right_code(monkeypatch):
    P, Q = context_laws("random", 5, 2)
    monkeypatch.setattr(spec_sample, "odds", wrong_w(lambda w, r: min(1.0, w * r)))
    assert gap("block", P, Q, 2) < 1e-14


# ----------------------------------------------------------------------------------------------------------------------
# what a drafter may look at: exact laws of one position


def judged(p, q, x):
    """-> law of the emitted token, and the chance that it was accepted, after the draft x."""
    h, w = odds("rejection", p.log()[None].expand(2, -1), q.log()[None], longs([x]), longs([1]))
    f = final_weights(p.log()[None].expand(2, -1), q.log()[None], longs([1]), longs([0]), w)[0]
    h = h.item()
    return h * torch.eye(len(p), dtype=F64)[x] + (1 - h) * f / f.sum(), h


def test_drafts_may_learn_from_siblings():
    """Two responses in turns, q learns from what was emitted at a rejection in either: the joint law stays a product, acceptance rises to 269/350."""
    p0, q0 = P3, Q3
    after = torch.tensor([[.1, .6, .3], [.4, .4, .2], [.7, .1, .2]], dtype=F64)
    joint, second_accepts = {}, 0.0
    states = [(1.0, ((), ()), torch.ones(3, dtype=F64))]  # chance, what A and B have said, memory
    for turn in range(4):
        new = []
        for chance, said, memory in states:
            me = turn % 2
            q = q0 * memory / (q0 * memory).sum()
            ctx = lambda head: after[(said[me] + head)[-1]] if said[me] + head else p0  # noqa: E731
            P = {head: ctx(head) for head in [(), (0,), (1,), (2,)]}
            for out, c in round_law("rejection", P, {(): q}, 1).items():
                if turn == 1:
                    second_accepts += chance * c * (len(out) == 2)
                m = memory.clone()
                if len(out) == 1:
                    m[out[0]] *= 3
                new.append((chance * c, tuple(s + out if i == me else s for i, s in enumerate(said)), m))
        states = new
    for chance, (a, b), _ in states:
        joint[a[:2], b[:2]] = joint.get((a[:2], b[:2]), 0) + chance
    plain = {x: (p0[x[0]] * after[x[0], x[1]]).item() for x in itertools.product(range(3), repeat=2)}
    assert max(abs(w - plain[a] * plain[b]) for (a, b), w in joint.items()) < 1e-14 and len(joint) == 81
    assert second_accepts == pytest.approx(269 / 350)


def test_what_may_not_decide_whether_a_draft_is_judged():
    p, q = torch.tensor([.7, .3], dtype=F64), torch.tensor([.5, .5], dtype=F64)
    own = sum(q[x] * (judged(p, q, x)[0] if x == 0 else p) for x in range(2))  # judged if its own draft is 0
    assert own.tolist() == pytest.approx([17 / 20, 3 / 20])
    joint = sum(q[a] * q[b] * torch.outer(judged(p, q, a)[0] if b == 0 else p, judged(p, q, b)[0] if a == 0 else p) for a in range(2) for b in range(2))
    assert joint.sum(1).tolist() == pytest.approx([.7, .3])  # if the other's draft is 0: right alone, but correlated
    assert joint.flatten().tolist() == pytest.approx([41 / 80, 3 / 16, 3 / 16, 9 / 80])
    kept = torch.stack([Q3[x] * judged(P3, Q3, x)[1] for x in range(3)])  # only responses whose draft was accepted
    assert (kept / kept.sum()).tolist() == pytest.approx([2 / 7, 3 / 7, 2 / 7])


# ----------------------------------------------------------------------------------------------------------------------
# the sampled path: real streams, many seeds


def chi_square(counts, p):
    """-> z-like score of counts against p: under 5 unless something is wrong (Wilson and Hilferty). What p forbids must not occur."""
    counts, p = counts.double().flatten(), p.double().flatten()
    assert counts[p == 0].sum() == 0
    e, c = (p * counts.sum())[p > 0], counts[p > 0]
    x, d = ((c - e) ** 2 / e).sum().item(), len(e) - 1
    return ((x / d) ** (1 / 3) - (1 - 2 / (9 * d))) / math.sqrt(2 / (9 * d))


def seeds_of(n, salt=0):
    return uniform(torch.arange(n), 9, 0, salt).mul(2.0**62).long()


def decode(rule, P, Q, n, drafts_of, seeds, dtype=F64):
    """Markov laws: row V of P [V + 1, V] is the start. -> ids [B, n], drafts accepted and judged. drafts_of(round) -> k [B]; all 0 is plain decoding."""
    lp, lq, B = P.to(dtype).log(), Q.to(dtype).log(), len(seeds)
    out, length, r = torch.zeros(B, n + 8, dtype=torch.long), torch.ones(B, dtype=torch.long), 0
    zero = torch.zeros(B, dtype=torch.long)
    out[:, 0] = target_token(rule, lp[-1].expand(B, -1), seeds, zero, zero)  # the token after the prompt: round 0, position 0
    accepted = judged = 0
    while length.min() < n:
        r += 1
        k, rounds = drafts_of(r), zero + r
        prev = [out.gather(1, length[:, None] - 1)[:, 0]]
        for j in range(int(k.max())):
            prev.append(draft_token(rule, lq[prev[-1]], seeds, rounds, j, length + j))
        x = torch.stack(prev, 1)  # [B, K + 1]: last committed token, drafts
        K = torch.arange(x.shape[1])
        is_draft = (K < k[:, None])[:, :-1]
        v = verify(rule, lp[x[K <= k[:, None]]], lq[x[:, :-1][is_draft]], x[:, 1:][is_draft], k, seeds, rounds, length)
        for j in range(x.shape[1]):  # commit
            token = x[:, j + 1] if j + 1 < x.shape[1] else v.token
            token = torch.where(j < v.accepted, token, v.token)
            put = (j <= v.accepted) & (length + j < out.shape[1])
            out[put, (length + j)[put]] = token[put]
        length = (length + v.accepted + 1).clamp(max=n + 1)
        accepted, judged = accepted + v.accepted.sum().item(), judged + torch.minimum(v.accepted + 1, k).sum().item()
    return out[:, :n], accepted, judged


def markov(V, seed, zeros=True):
    g = torch.Generator().manual_seed(seed)
    P, Q = ((torch.randn(V + 1, V, generator=g, dtype=F64)).exp() for _ in "pq")
    if zeros:
        P[0, 1] = Q[1, 2] = P[2, 0] = 0
    return P / P.sum(1, keepdim=True), Q / Q.sum(1, keepdim=True)


def joint_law(P, n):
    V = P.shape[1]
    return torch.tensor([math.prod(P[a, b].item() for a, b in zip((V,) + x, x)) for x in itertools.product(range(V), repeat=n)])


def counts_of(ids, V):
    return torch.bincount((ids * V ** torch.arange(ids.shape[1] - 1, -1, -1)).sum(1), minlength=V ** ids.shape[1])


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("ks", ["0", "1", "3", "ragged"])
def test_sampled_sequences_have_the_law_of_p(rule, ks):
    P, Q = markov(3, 1)
    B, n = 60000, 4
    k = lambda r: (torch.arange(B) * 7 + r) % 4 if ks == "ragged" else torch.full((B,), int(ks))  # noqa: E731
    ids, accepted, _ = decode(rule, P, Q, n, k, seeds_of(B), torch.float32)
    assert chi_square(counts_of(ids, 3), joint_law(P, n)) < 5
    assert chi_square(counts_of(ids[:, 1:3], 3), (joint_law(P, 3).view(3, 3, 3)).sum(0)) < 5
    assert (accepted > 0) == (ks != "0")


def one_position(p, q, drafted_from, mistake=None, n=200_000):
    """Emit one token of p, n times, drafts drawn from `drafted_from`; -> frequencies. None is verify; the mistakes write the same out and err."""
    seeds, B = seeds_of(n, 5), n
    zero, one = torch.zeros(B, dtype=torch.long), torch.ones(B, dtype=torch.long)
    lp, lq = p.log().expand(B, -1), q.log().expand(B, -1)
    noise = gumbel(seeds, zero, len(p))
    x = draft_token("rejection", drafted_from.log().expand(B, -1), seeds, zero, 0, zero) if mistake != "draft noise again" else (lq + noise).argmax(1)
    if mistake is None:
        two = torch.stack([lp, lp], 1).flatten(0, 1)
        v = verify("rejection", two, lq, x, one, seeds, zero, zero)
        y = torch.where(v.accepted > 0, x, v.token)
    else:
        coin, last = uniform(seeds, COIN, zero, 0), uniform(seeds, FINAL, zero, 0)
        r = residual(p[None], q[None])
        if mistake == "residual without the draft, as for a drafter without a law":
            r = p.repeat(n, 1)
            r[torch.arange(n), x] = 0
        if mistake == "softmax of the clamp":
            r = (p - q).clamp(min=0).softmax(-1)[None]
        if mistake == "p for the residual":
            r = p[None]
        fallen = (r.log() + noise).argmax(1) if mistake == "draft noise again" else draw_weights(r.expand(B, -1).contiguous(), coin if mistake == "coin again" else last)
        y = torch.where(coin < p[x] / q[x], x, fallen)
        y = x if mistake == "everything accepted" else y
    return torch.bincount(y, minlength=len(p)) / n


def top(q, k):
    kept = torch.where(q >= q.topk(k).values[-1], q, 0)
    return kept / kept.sum()


SAMPLING = [  # p, q handed over, law really drafted from, mistake, what comes out
    (P4, Q4, Q4, "p for the residual", [.140, .240, .320, .300]),
    (P4, Q4, Q4, "draft noise again", [.100, .392, .229, .279]),
    (P4, Q4, Q4, "coin again", [.100, .3125, .2575, .330]),
    (P4, Q4, top(Q4, 1), None, [.200, .500, .060, .240]),
    (P4, Q4, Q4 ** (1 / .6) / (Q4 ** (1 / .6)).sum(), None, [.133, .378, .209, .280]),
    (P4, Q4, top(Q4, 2), None, [.139, .347, .347, .167]),
    (P4, Q4, Q4, "everything accepted", Q4.tolist()),
    (P3, Q3, Q3, "p for the residual", [.35, .39, .26]),
    (P3, Q3, Q3, "softmax of the clamp", [.3209, .3896, .2896]),
    (P3, Q3, Q3, "residual without the draft, as for a drafter without a law", [.40536, .3375, .25714]),
    (P3, Q3, top(Q3, 2), None, [.375, .375, .25]),
]


@pytest.mark.parametrize("p, q, drafted_from, mistake, expect", SAMPLING, ids=[str(m[3] or f"another law drafted, {i}") for i, m in enumerate(SAMPLING)])
def test_the_sampling_catches(p, q, drafted_from, mistake, expect):
    f = one_position(p, q, drafted_from, mistake)
    assert f.tolist() == pytest.approx(expect, abs=4e-3)
    assert chi_square(f * 200_000, p) > 20


@pytest.mark.parametrize("p, q", [(P4, Q4), (P3, Q3), (P3, P3)])
def test_the_sampling_passes_the_right_code(p, q):
    assert chi_square(one_position(p, q, q) * 200_000, p) < 5


STREAMS = {  # how `uniform` is named by mistake
    "all purposes one stream": lambda s, purpose, r, i: uniform(s, 0, r, i),
    "coin again for the last token": lambda s, purpose, r, i: uniform(s, COIN if purpose == FINAL else purpose, r, i),
    "draft's number again as coin": lambda s, purpose, r, i: uniform(s, DRAFT if purpose == COIN else purpose, r, i),
    "draft's number again for the last token": lambda s, purpose, r, i: uniform(s, DRAFT if purpose == FINAL else purpose, r, i),
    "one coin for all slots": lambda s, purpose, r, i: uniform(s, purpose, r, i * 0),
    "the same numbers each round": lambda s, purpose, r, i: uniform(s, purpose, r * 0, i),
    "the same numbers in each row": lambda s, purpose, r, i: uniform(s * 0, purpose, r, i),
}


@pytest.mark.parametrize("mistake", [None, *STREAMS])
def test_reused_numbers_show_in_sequences(monkeypatch, mistake):
    B, (P, Q) = 40000, markov(6, 3, zeros=False)  # six tokens: a residual of one token hides what drew it
    if mistake:
        monkeypatch.setattr(spec_sample, "uniform", STREAMS[mistake])
    ids, _, _ = decode("rejection", P, Q, 3, lambda r: torch.full((B,), 3), seeds_of(B, 2))
    score = chi_square(counts_of(ids, 6), joint_law(P, 3))
    assert score > 20 if mistake else score < 5


# ----------------------------------------------------------------------------------------------------------------------
# coupled and greedy


@pytest.mark.parametrize("rule", ["coupled", "greedy"])
def test_same_tokens_as_plain_decoding_for_any_drafts(rule):
    P, Q = markov(5, 2)
    B, n, seeds = 200, 12, seeds_of(200)
    plain, _, _ = decode(rule, P, Q, n, lambda r: torch.zeros(B, dtype=torch.long), seeds)
    for k in (lambda r: torch.full((B,), 1), lambda r: torch.full((B,), 4), lambda r: (torch.arange(B) * 5 + 3 * r) % 6):
        assert torch.equal(decode(rule, P, Q, n, k, seeds)[0], plain)
        assert torch.equal(decode(rule, P, P, n, k, seeds)[0], plain)
        assert torch.equal(decode(rule, P, Q, n, lambda r: k(r)[50:120], seeds[50:120])[0], plain[50:120])  # nor for other company
    if rule == "greedy":
        assert all(plain[0, i] == P[plain[0, i - 1] if i else 5].argmax() for i in range(n))
    _, accepted, judged = decode(rule, P, P, n, lambda r: torch.full((B,), 3), seeds)
    assert accepted == judged  # the drafter is the target


def test_coupled_acceptance():
    assert coupled_acceptance(P3, Q3) == pytest.approx(43 / 62)
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        p, q = ((2 * torch.randn(6, generator=g, dtype=F64)).softmax(-1) for _ in "pq")
        same = torch.minimum(p, q).sum().item()
        assert same / (2 - same) - 1e-12 <= coupled_acceptance(p, q) <= same + 1e-12
    assert coupled_acceptance(torch.tensor([1., 0]), torch.tensor([0., 1])) == 0
    n = 200_000
    seeds, zero = seeds_of(n), torch.zeros(n, dtype=torch.long)
    x, y = (target_token("coupled", d.log().expand(n, -1), seeds, zero, zero) for d in (Q3, P3))
    assert (x == y).double().mean().item() == pytest.approx(43 / 62, abs=5e-3)
    assert chi_square(torch.bincount(y, minlength=3), P3) < 5


# ----------------------------------------------------------------------------------------------------------------------
# verify: packing, company, edges


def batch(k, V=6, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = longs(k)
    B, N = len(k), int(k.sum())
    P = torch.randn(N + B, V, generator=g).to(dtype).log_softmax(-1)
    Q = torch.randn(N, V, generator=g).to(dtype).log_softmax(-1)
    return dict(logp=P, logq=Q, drafts=torch.randint(V, (N,), generator=g), k=k, seeds=seeds_of(B, seed), rounds=torch.arange(B) + 3, positions=10 * torch.arange(B) + 1)


def part(x, rows):
    """The same rows, in this order, as a batch of their own."""
    first, first_p = x["k"].cumsum(0) - x["k"], x["k"].cumsum(0) - x["k"] + torch.arange(len(x["k"]))
    n = [i for b in rows for i in range(first[b], first[b] + x["k"][b])]
    t = [i for b in rows for i in range(first_p[b], first_p[b] + x["k"][b] + 1)]
    return dict(logp=x["logp"][t], logq=x["logq"][n], drafts=x["drafts"][n], **{key: x[key][rows] for key in ("k", "seeds", "rounds", "positions")})


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("rule", RULES)
def test_company_and_order_change_nothing(rule, dtype):
    seen = set()
    for seed in range(12):
        x = batch([2, 0, 1, 4, 0, 3], dtype=dtype, seed=seed)
        before = {key: t.clone() for key, t in x.items()}
        v = verify(rule, **x, want_alpha=True)
        assert all(torch.equal(before[key], x[key]) for key in x)  # nothing is written into its inputs
        again = verify(rule, **x)
        assert torch.equal(v.accepted, again.accepted) and torch.equal(v.token, again.token) and again.alpha is None
        for rows in [[b] for b in range(6)] + [[5, 1, 3], [4, 1], [3, 2, 5, 0, 4, 1]]:
            w = verify(rule, **part(x, rows))
            assert torch.equal(w.accepted, v.accepted[rows]) and torch.equal(w.token, v.token[rows])
        plain = part(x, [1, 4])  # k = 0 is plain decoding, bit for bit
        assert torch.equal(v.token[[1, 4]], target_token(rule, plain["logp"], plain["seeds"], plain["rounds"], plain["positions"]))
        assert v.accepted.dtype == v.token.dtype == torch.long and (v.accepted >= 0).all() and (v.accepted <= x["k"]).all()
        at = [0, 1, 4, 6, 7, 8, 9, 12, 13, 14]
        assert v.alpha.tolist() == pytest.approx(torch.minimum(x["logp"][at].exp(), x["logq"].exp()).sum(1).tolist())
        seen.update(v.accepted.tolist())
    assert seen >= {0, 1, 2}


def test_each_row_judges_the_draft_after_it():
    """A target that only says 0 -> 1 -> 2 -> 3: right drafts all stand and the bonus is next; a wrong one is replaced by the right token."""
    chain = (torch.eye(5)[[1, 2, 3, 4]] + 0.0).log()
    flat = torch.full((3, 5), 0.2).log()
    for rule in RULES:
        for drafts, accepted, token in (([1, 2, 3], 3, 4), ([1, 0, 3], 1, 2), ([0, 2, 3], 0, 1), ([1, 2, 4], 2, 3)):
            for seed in range(20):
                v = verify(rule, chain, flat, longs(drafts), longs([3]), longs([seed]), longs([1]), longs([1]))
                assert (v.accepted.item(), v.token.item()) == (accepted, token), rule


def test_a_draft_that_p_forbids_never_stands(monkeypatch):
    monkeypatch.setattr(spec_sample, "uniform", lambda s, purpose, r, i: torch.zeros(torch.broadcast_shapes(s.shape, torch.as_tensor(i).shape), dtype=F64))
    p, q = torch.tensor([[.0, .4, .6], [.2, .3, .5]], dtype=F64).log(), torch.tensor([[.5, .5, .0]], dtype=F64).log()
    for rule in EXACT:
        v = verify(rule, p, q, longs([0]), longs([1]), longs([1]), longs([1]), longs([1]))
        assert (v.accepted.item(), v.token.item()) == (0, 2)  # coin 0.0 < 0 is false; with <= the forbidden token would stand
        h, _ = odds(rule, p, q, longs([0]), longs([1]))
        assert h.item() == 0.0


@pytest.mark.parametrize("rule", EXACT)
def test_equal_laws_accept_everything_and_rounding_never_breaks_the_draw(rule):
    g = torch.Generator().manual_seed(3)
    x = batch([4] * 64, V=50, seed=1)
    at = torch.arange(256) + torch.arange(256) // 4
    x["logq"] = x["logp"][at]
    x["drafts"] = draw(x["logq"], torch.rand(256, generator=g, dtype=F64))
    assert (verify(rule, **x).accepted == 4).all()
    assert residual(P3[None], P3[None]).tolist() == [P3.tolist()]  # empty residual: p, neither 0 / 0 nor token 0
    x["logq"] = x["logq"] + 3e-7 * torch.randn(256, 50, generator=g)  # equal to rounding
    h, w = odds(rule, x["logp"], x["logq"], x["drafts"], x["k"])
    assert h.isfinite().all() and (h >= 0).all() and (h <= 1).all()
    for accepted in range(5):
        f = final_weights(x["logp"], x["logq"], x["k"], torch.full((64,), accepted), w)
        assert f.isfinite().all() and (f >= 0).all() and (f.sum(1) > 0).all()


def test_errors_are_one_sentence():
    x = batch([2, 1])
    with pytest.raises(ValueError, match="no acceptance rule 'typical'.*rejection, block, coupled, greedy"):
        target_token("typical", x["logp"], *(longs([0] * 5),) * 3)
    with pytest.raises(ValueError, match="no acceptance rule"):
        verify("typical", **x)
    with pytest.raises(ValueError, match="3 drafts in 2 rows need 5 rows"):
        verify("rejection", **{**x, "logp": x["logp"][:4]})
    x["logq"][0, x["drafts"][0]] = -math.inf
    with pytest.raises(ValueError, match="the very law that the drafts were drawn from"):
        verify("block", **x)
    for bad in (dict(temperature=-1), dict(temperature=1, top_p=0), dict(temperature=1, top_p=1.5), dict(temperature=1, top_k=-1), dict(temperature=math.nan)):
        with pytest.raises(ValueError, match="they must be"):
            law(torch.zeros(1, 3), **bad)


# ----------------------------------------------------------------------------------------------------------------------
# laws


def test_law():
    x = torch.tensor([[1.0, 3.0, 2.0, 3.0, 9.0, 9.0]])
    kept = x.clone()
    for t in (1.0, 0.6):
        p = law(x, t, vocab=4).exp()
        assert torch.allclose(p[:, :4], (x[:, :4] / t).softmax(-1)) and (p[:, 4:] == 0).all()
    assert law(x, 0, vocab=4).exp().tolist() == [[0, 1, 0, 0, 0, 0]]  # of equals the lowest id
    assert law(x, 0).exp().tolist() == [[0, 0, 0, 0, 1, 0]]
    assert torch.equal(x, kept)  # not written into
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (F64, F64)):
        y = x.to(dtype)
        for t in (0, 1.0, 0.7):
            assert law(y, t, vocab=4).dtype == wide and torch.equal(y, kept.to(dtype))
            assert torch.equal(law(y, t, vocab=4), law(y.to(wide), t, vocab=4))  # no rounding before the law is wide


def test_truncation():
    logits = torch.tensor([[.4, .3, .2, .1]]).log()
    assert torch.allclose(law(logits, 1, top_k=2).exp(), torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    assert torch.allclose(law(logits, 1, top_p=0.65).exp(), torch.tensor([[4 / 7, 3 / 7, 0, 0]]))  # 0.4 < 0.65: the token that crosses stays
    assert torch.allclose(law(logits, 1, top_p=0.75).exp(), torch.tensor([[4 / 9, 3 / 9, 2 / 9, 0]]))
    assert law(logits, 1, top_p=1e-9).exp().tolist() == [[1, 0, 0, 0]]  # never empty
    for V in (4, 4096):  # of equals the lowest ids
        assert (law(torch.zeros(1, V), 1, top_p=0.5).exp() > 0).tolist() == [[True] * (V // 2) + [False] * (V // 2)]
    assert torch.allclose(law(logits, 1, top_k=3, top_p=0.5).exp(), torch.tensor([[4 / 7, 3 / 7, 0, 0]]))
    assert torch.equal(law(logits, 1, top_k=9, top_p=1.0), law(logits, 1))
    p = law(torch.randn(20, 100, generator=torch.Generator().manual_seed(0)), 0.8, vocab=90, top_p=0.9).exp()
    assert torch.allclose(p.sum(1), torch.ones(20)) and (p[:, 90:] == 0).all() and ((p > 0).sum(1) < 90).all()


def test_law_has_gradients():
    x = torch.randn(3, 7, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids = x.detach()[:, :5].argsort(-1)[:, 2:4]  # none that is cut off
    for kw in (dict(), dict(vocab=5), dict(top_k=6), dict(top_p=0.999)):
        for t in (1.0, 0.7):
            f = lambda z: law(z, t, **kw).gather(1, ids)  # noqa: E731
            assert f(x).isfinite().all() and torch.autograd.gradcheck(f, x)
    g, = torch.autograd.grad(law(x, 1.0, vocab=5).gather(1, ids).sum(), x)
    assert (g[:, 5:] == 0).all()


# ----------------------------------------------------------------------------------------------------------------------
# random numbers


def test_hashes_are_the_same_everywhere():
    parts = [(1,), ("1",), ((1,),), (1, 2), ((1, 2),), (12,), ("a", "b"), ("ab",), ("a', 'b",), (None,), ("None",), (0,), (-1,), (2**80,), ("é",), ()]
    values = [hash64(*x) for x in parts]
    assert len(set(values)) == len(values) and all(0 <= x < 2**63 for x in values)
    assert hash64(3, "gsm8k", (1, 2)) == hash64(torch.tensor(3), "gsm8k", [1, 2]) == 3346319016611678722  # in every process, for good
    with pytest.raises(TypeError):
        hash64(0.5)


def test_streams_are_pinned():
    """A change here changes every rollout: seeds would no longer name the same responses."""
    def splitmix(x):  # the reference, in Python's integers
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    step, seed = 0x9E3779B97F4A7C15, hash64(0)
    x = seed
    for part in (COIN, 7, 2):
        x = splitmix((x + (part + 1) * step) % 2**64)
    assert uniform(longs([seed]), COIN, longs([7]), 2).item() == (x >> 11) / 2**53
    x = splitmix((splitmix((seed + step) % 2**64) + (7 + 1) * step) % 2**64)
    for token in range(5):
        u = ((splitmix((x + (token + 1) * step) % 2**64) >> 12) + 0.5) / 2**52
        assert gumbel(longs([seed]), longs([7]), 5)[0, token].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


def test_uniform_is_uniform_and_streams_are_independent():
    n = 1 << 16
    i, zero = torch.arange(n), torch.zeros(n, dtype=torch.long)
    base = hash64("quality")
    by = {"seeds": uniform(base + i, DRAFT, 0, 0), "small seeds": uniform(i, COIN, 0, 0), "rounds": uniform(zero + base, COIN, i, 0), "index": uniform(zero + base, FINAL, 0, i)}
    for name, u in by.items():
        assert u.dtype == F64 and u.min() >= 0 and u.max() < 1 and len(u.unique()) == n
        assert chi_square(torch.histc(u, 256, 0, 1), torch.full((256,), 1 / 256)) < 5, name
        bits = (u * 2**53).long()[:, None] >> torch.arange(53) & 1
        assert ((bits.double().mean(0) - 0.5).abs() < 5 * 0.5 / n**0.5).all(), name  # all 53 bits
    pairs = [(by[x], by[x].roll(1)) for x in by]  # neighbours
    pairs += [(uniform(base + i, a, 3, 0), uniform(base + i, b, 3, 0)) for a, b in ((DRAFT, COIN), (COIN, FINAL), (DRAFT, FINAL))]
    pairs += [(uniform(base + i, COIN, 3, 0), uniform(base + i, COIN, *other)) for other in ((4, 0), (3, 1), (4, 1), (0, 3))]
    pairs += [(uniform(base + i, DRAFT, 0, 0), gumbel(base + i, zero, 1)[:, 0].neg().exp().neg().exp())]
    for a, b in pairs:
        assert chi_square(torch.histc((a * 16).floor() * 16 + (b * 16).floor(), 256, 0, 256), torch.full((256,), 1 / 256)) < 5
        assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 5 / n**0.5


def test_gumbel(monkeypatch):
    g = gumbel(torch.arange(40), torch.arange(40) * 3, 5000)
    assert g.dtype == F64 and g.shape == (40, 5000) and g.isfinite().all() and len(g.unique()) == g.numel()
    assert chi_square(torch.histc(g.neg().exp().neg().exp(), 200, 0, 1), torch.full((200,), 1 / 200)) < 5
    assert g.mean().item() == pytest.approx(0.5772, abs=0.02) and g.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert torch.equal(gumbel(longs([7, 3]), longs([21, 9]), 100), g[[7, 3], :100])  # of (seed, position, token), nothing else
    for a, b in ((g[:, :-1], g[:, 1:]), (g[:-1], g[1:]), (gumbel(longs([5] * 40), torch.arange(40), 5000), gumbel(longs([5] * 40), torch.arange(40) + 1, 5000).roll(1, 1))):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 5 / a.numel() ** 0.5
    for bits in (0, -1, 1 << 63 - 1):  # the extremes of the 64 bits
        monkeypatch.setattr(spec_sample, "mix", lambda x: torch.full_like(x, bits))
        assert gumbel(longs([0]), longs([0]), 3).isfinite().all()
        assert 0 <= uniform(longs([0]), COIN, 0, 0).item() < 1


def test_slices_of_the_noise_do_not_show(monkeypatch):
    V, n = 70_000, 5  # more than a slice of one row
    logp = torch.randn(n, V, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    seeds, at = seeds_of(n), torch.arange(n)
    assert torch.equal(target_token("coupled", logp, seeds, at, at), (logp + gumbel(seeds, at, V)).argmax(-1))


def test_draw():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=F64)
    u = torch.tensor([0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-53], dtype=F64)
    for dtype in (torch.float32, F64):
        assert draw(p.to(dtype).log().expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, F64):  # ids without probability, at the ends of u, and sums that are not 1
        w = torch.rand(500, 40, generator=g).to(dtype) ** 8 * (torch.rand(500, 40, generator=g) < 0.3)
        w[:, 7] += 1e-30
        for x in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0):
            ids = draw_weights(w, torch.full((500,), x, dtype=F64))
            assert (w.gather(1, ids[:, None]) > 0).all()
    n = 200_000
    assert chi_square(torch.bincount(draw(p.log().expand(n, -1), uniform(seeds_of(n), FINAL, 0, 0)), minlength=6), p) < 5


# ----------------------------------------------------------------------------------------------------------------------
# what it brings


def test_expected_tokens():
    for a in (0.0, 0.5, 0.77, 0.942):
        for k in range(9):
            assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.3, 0) == 1
    assert expected_tokens([0.9, 0.5, 0.1], 2) == pytest.approx(1 + 0.9 + 0.45)
    assert expected_tokens([0.8] * 4, 4) == pytest.approx(expected_tokens(0.8, 4))
    P, Q = ({h: x for n in range(4) for h in itertools.product(range(3), repeat=n)} for x in (P3, Q3))
    assert tokens("rejection", P, Q, 3) == pytest.approx(expected_tokens(0.7, 3))  # alpha = 0.7 at every slot
    assert speedup(0.8, 4, 1.0, 0.1, 1.2) == pytest.approx(3.3616 / 1.6)
    assert speedup(0.8, 0, 1.0, 0.1, 1.0) == 1


def test_best_k():
    cost = lambda k: 1.0 if k == 0 else 1.1 + 0.2 * k  # noqa: E731
    rate = [expected_tokens(0.8, k) / cost(k) for k in range(9)]
    best = max(range(9), key=rate.__getitem__)
    assert best_k(0.8, cost, 8) == best == 4 and best_k(0.05, cost, 8) == 0 and best_k(0.8, cost, 2) == 2
    assert best_k(0.8, cost, 8, current=3) == 3   # within 3% of the best: stay
    assert best_k(0.8, cost, 8, current=3, margin=0.0) == 4
    assert best_k(0.8, cost, 8, current=0) == 4   # the gain is worth a change
    assert best_k(0.8, cost, 2, current=5) == 2   # no longer allowed
    assert best_k([0.9, 0.9, 0.0, 0.0, 0.0, 0.0], cost, 6) == 2


def test_examples_in_docstrings():
    assert doctest.testmod(spec_sample).failed == 0
