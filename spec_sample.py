"""Exact speculative sampling: laws, random numbers, acceptance rules, expected speed-up. Pure functions over packed, ragged batches.

A drafter said x_1..x_k, each drawn from a law q_i; one dense pass gave p_1..p_{k+1}, the laws that plain decoding would use there. Then

    rejection   x_i stands with probability min(1, p_i(x_i) / q_i(x_i)), as long as those before it stand; in place of the first that falls
                y ~ norm((p_i - q_i)+); if none falls, y ~ p_{k+1}.       min(p, q) + (1 - sum min(p, q)) norm((p - q)+) = p
    block       the same with whole prefixes: w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), w_0 = 1; the longest i whose coin is under h_i
                stands, h_i = S_i / (S_i + 1 - w_i),  S_i = sum (w_i p_{i+1} - q_{i+1})+,  h_k = w_k, and y ~ norm((w_i p_{i+1} - q_{i+1})+);
                if i = k, y ~ p_{k+1}. Never fewer tokens than rejection: a bad x_1 may be redeemed by a good x_2
    coupled     y_i = argmax(log p_i + g), drafts were argmax(log q_i + g), g Gumbel noise that depends on (seed, position, token) alone:
                x_i stands if it equals y_i. What comes out depends on p and the seed, on nothing else: plain decoding's very tokens
    greedy      temperature 0: x_i stands if it is the arg max

and all four emit exactly p, however bad q is. Packing, for k = [2, 0, 1] (row b: k_b + 1 rows of logp, k_b of logq; T = N + B):

    logp   p1 p2 p3 | p1 | p1 p2          what follows the last committed token, x_1, x_2, ...: p_i judges x_i, the last one is the bonus
    logq   q1 q2    |    | q1             drafts   x1 x2 | | x1

Sources: Leviathan 2211.17192 and Chen 2302.01318 (rejection), Sun 2403.10444 (block), Daliri 2408.07978 (coupled).
Try it:  python spec_sample.py        toy laws: what each rule accepts, and its law by enumeration
         pytest tests/test_spec_sample.py
"""
import hashlib
import itertools
import json
import math
import operator
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch

# ----------------------------------------------------------------------------------------------------------------------
# laws


def law(logits, temperature, vocab=None, top_k=0, top_p=1.0):
    """logits [n, V] -> log-probabilities [n, V], fp32 or the logits' dtype if that is wider. The one way from logits to a law: draft, target, loss.

    Ids from `vocab` on are padding and get -inf. Temperature 0: all mass on the arg max (the lowest id of equals). top_k keeps the k most
    probable (and what equals the k-th); top_p the fewest that reach mass top_p, with the token that crosses it (lower ids first among equals);
    both renormalise, 0 and 1.0 leave the law whole. Differentiable for temperature > 0. ValueError for settings that are no law.
    """
    if not temperature >= 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature}, top_k {top_k}, top_p {top_p}: they must be >= 0, >= 0 (0 keeps all) and in (0, 1] (1 keeps all)")
    wide = torch.promote_types(logits.dtype, torch.float32)
    x = logits if temperature in (0, 1) else logits.to(wide, copy=True).div_(temperature)
    if vocab is not None and vocab < x.shape[-1]:
        x = x.clone() if x is logits else x
        x[:, vocab:] = float("-inf")
    if temperature == 0:
        return torch.full_like(x, float("-inf"), dtype=wide).scatter_(1, x.argmax(-1, keepdim=True), 0.0)
    logp = x.log_softmax(-1, dtype=wide)
    if top_k and top_k < x.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(top_k, -1).values[:, -1:], float("-inf")).log_softmax(-1)
    if top_p < 1:
        p, ids = logp.detach().exp().sort(dim=-1, descending=True, stable=True)
        out = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, p.cumsum(-1) - p >= top_p)  # all before it already reach top_p
        logp = logp.masked_fill(out, float("-inf")).log_softmax(-1)
    return logp


# ----------------------------------------------------------------------------------------------------------------------
# random numbers without state: each is a hash of its name, so it does not matter who else runs, in which order, or on what

NOISE, DRAFT, COIN, FINAL = range(4)  # independent streams: a number that a draft has used never comes back as a coin or a residual


def hash64(*parts):
    """A 63-bit number from ints, strings, None and tuples of them; the same in every process, and different for ("1",), (1,) and ((1,),)."""
    def plain(x):  # NumPy's and torch's integers are ints; a float is refused
        return x if x is None or isinstance(x, str) else tuple(map(plain, x)) if isinstance(x, (tuple, list)) else operator.index(x)
    return int.from_bytes(hashlib.blake2b(ascii(plain(parts)).encode(), digest_size=8).digest(), "little") >> 1


STEP = -7046029254386353131  # 2^64 / golden ratio, as int64: sums and products of int64 tensors wrap


def mix(x):
    """In place: a bijection of int64 that looks random (the finaliser of splitmix64)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, None)):
        high = x >> shift
        x ^= high.bitwise_and_((1 << 64 - shift) - 1)  # >> copies the sign, a logical shift would not
        if factor:
            x *= factor
    return x


def uniform(seeds, purpose, rounds, index):
    """53-bit float64 in [0, 1), named by (request seed, purpose, round, index): tensors or ints that broadcast, seeds int64."""
    x = seeds
    for part in (purpose, rounds, index):
        part = part if torch.is_tensor(part) else torch.full((), part, device=x.device)  # a tensor: its product wraps, an int's would not
        x = mix(x + (part + 1) * STEP)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def gumbel(seeds, positions, V, device=None):
    """Gumbel noise [n, V] float64, named by (request seed, absolute position, token id): 52 bits, all values finite (-3.6 to 36.7)."""
    x = mix(mix(seeds + (NOISE + 1) * STEP) + (positions + 1) * STEP)[:, None] + torch.arange(1, V + 1, device=device) * STEP  # [n, V]
    x = mix(x).bitwise_right_shift_(12).bitwise_and_(0xFFFFFFFFFFFFF).double()
    return x.add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()  # the half keeps both logs away from 0


def draw_weights(w, u):
    """Inverse CDF in float64: weights [n, V] (any positive sum), u [n] in [0, 1) -> ids [n]. An id of weight 0 is never drawn."""
    c = w.cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(c, (u * c[:, -1])[:, None], right=True).clamp_(max=w.shape[1] - 1)  # the first whose sum is past u
    none = w.gather(1, ids) == 0
    if w.is_cuda or none.any():  # rounding: u * sum came out as the sum, or a parallel scan was not monotone (asking would stall a GPU)
        ids = torch.where(none, w.argmax(-1, keepdim=True), ids)
    return ids[:, 0]


def draw(logp, u):
    """logp [n, V], u [n] in [0, 1) -> ids [n]: the first whose cumulated probability is past u."""
    return draw_weights(logp.exp(), u)


def perturbed_argmax(logp, seeds, positions):
    """argmax(log p + g) [n], a draw from p. In slices: on a CPU they stay in its cache, and the noise of all rows would be the largest tensor of all."""
    step = max(1, 2 ** (24 if logp.is_cuda else 17) // logp.shape[1])
    slices = zip(logp.split(step), seeds.split(step), positions.split(step))
    return torch.cat([gumbel(s, at, x.shape[1], x.device).add_(x).argmax(-1) for x, s, at in slices])


RULES = ("rejection", "block", "coupled", "greedy")


def pick(rule, logp, seeds, purpose, rounds, index, positions):
    if rule not in RULES:
        raise ValueError(f"there is no acceptance rule {rule!r}: choose one of {', '.join(RULES)}")
    if rule == "greedy":
        return logp.argmax(-1)
    return perturbed_argmax(logp, seeds, positions) if rule == "coupled" else draw(logp, uniform(seeds, purpose, rounds, index))


def draft_token(rule, logq, seeds, rounds, index, positions):
    """How a drafter draws its `index`-th token (from 0) of a round from logq [n, V] -> ids [n]. `verify` must be handed this very logq."""
    return pick(rule, logq, seeds, DRAFT, rounds, index, positions)


def target_token(rule, logp, seeds, rounds, positions):
    """Plain decoding: logp [n, V] -> ids [n], bit for bit what `verify` emits for rows without drafts. positions [n]: where the tokens go."""
    return pick(rule, logp, seeds, FINAL, rounds, 0, positions)


# ----------------------------------------------------------------------------------------------------------------------
# acceptance


@dataclass
class Verdict:
    accepted: torch.Tensor  # [B] drafts that stand, 0..k_b
    token: torch.Tensor     # [B] the token that follows them, always emitted: accepted + 1 tokens a round
    alpha: torch.Tensor = None  # [N] sum min(p, q) = 1 - TV(p, q) of every slot as drafted, if it was asked for


def packing(k, N):
    """k [B], N = sum k -> first [B], each row's first draft; and of each draft: row [N], slot [N] within the row, at [N], the row of logp that judges it."""
    first = k.cumsum(0) - k
    row = torch.repeat_interleave(torch.arange(len(k), device=k.device), k, output_size=N)
    n = torch.arange(N, device=k.device)
    return first, row, n - first[row], n + row


def odds(rule, logp, logq, drafts, k):
    """The thresholds that coins are held against -> h [B, K] (0 past k_b) and scale w [B, K + 1] (1 for rejection), float64. K = max k.

    ValueError if a draft has q(x) = 0: it was not drawn from the law that was handed over.
    """
    B, K = len(k), int(k.max())
    _, row, slot, at = packing(k, len(drafts))
    px, qx = logp[at, drafts].double().exp(), logq.gather(1, drafts[:, None])[:, 0].double().exp()
    if (qx == 0).any():
        raise ValueError("a draft has probability 0 in logq: hand verify the very law that the drafts were drawn from, same temperature and truncation")
    ratio = torch.zeros(B, K, dtype=torch.float64, device=logp.device)
    ratio[row, slot] = px / qx
    w = torch.ones(B, K + 1, dtype=torch.float64, device=logp.device)
    if rule == "rejection":
        return ratio.clamp_(max=1.0), w
    for i in range(K):
        w[:, i + 1] = (w[:, i] * ratio[:, i]).clamp(max=1.0)
    h = w[:, 1:].clone()
    on = (slot > 0).nonzero()[:, 0]  # S of the first i drafts is measured at slot i, if that was drafted
    row, i = row[on], slot[on]
    wi = w[row, i]
    S = logp[at[on]].exp_().mul_(wi[:, None].to(logp.dtype)).sub_(logq[on].exp_()).clamp_(min=0).sum(-1, dtype=torch.float64)
    h[row, i - 1] = torch.where(wi < 1, S / (S + 1 - wi), 1.0)
    return h, w


def stands(rule, hits):
    """hits [B, K]: coin under threshold -> how many drafts stand: rejection counts up to the first miss, block up to the last hit."""
    if rule == "block":
        return (hits * torch.arange(1, hits.shape[1] + 1, device=hits.device)).amax(1) if hits.shape[1] else hits.sum(1)
    return hits.long().cumprod(1).sum(1)


def residual(p, q, scale=1.0):
    """(scale * p - q)+ of laws [n, V], unnormalised; where that is empty (p equals q to rounding) p itself: never 0 / 0.

    >>> residual(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])).tolist()  # not p without the draft, not softmax of this
    [[0.30000001192092896, 0.0, 0.0]]
    """
    r = (scale * p).sub_(q).clamp_(min=0)
    return torch.where(r.sum(-1, keepdim=True) > 0, r, p)


def final_weights(logp, logq, k, accepted, w):
    """What the last token of each row is drawn from [B, V]: p of the bonus row if all drafts stand, else the residual where the first fell."""
    first = k.cumsum(0) - k
    out = logp[first + torch.arange(len(k), device=k.device) + accepted].exp_()  # [B, V]
    fell = (accepted < k).nonzero()[:, 0]
    if len(fell):
        out[fell] = residual(out[fell], logq[first[fell] + accepted[fell]].exp_(), w[fell, accepted[fell], None].to(out.dtype))
    return out


def verify(rule, logp, logq, drafts, k, seeds, rounds, positions, want_alpha=False):
    """Judge a round: logp [T, V], logq [N, V], drafts [N], packed as in the picture above; k, seeds, rounds [B]; positions [B] of each first draft.

    A row's numbers are named by its seed and round (coupled: seed and position), so its verdict does not depend on the rest of the batch.
    ValueError for an unknown rule, for shapes that do not fit k, and for drafts that cannot have come from logq.
    """
    B, N, dev = len(k), len(drafts), logp.device
    if len(logp) != N + B or len(logq) != N:
        raise ValueError(f"{N} drafts in {B} rows need {N + B} rows of logp and {N} of logq, not {len(logp)} and {len(logq)}: each row has one of p more, its bonus")
    _, row, slot, at = packing(k, N)
    alpha = logp[at].minimum(logq).exp_().sum(-1) if want_alpha else None  # [N]
    if rule not in ("rejection", "block"):
        start, rows, place, _ = packing(k + 1, N + B)
        y = target_token(rule, logp, seeds[rows], rounds[rows], positions[rows] + place)  # [T] what plain decoding says after each draft
        hits = torch.zeros(B, int(k.max()), dtype=torch.bool, device=dev)
        hits[row, slot] = y[at] == drafts
        accepted = stands(rule, hits)
        return Verdict(accepted, y[start + accepted], alpha)
    h, w = odds(rule, logp, logq, drafts, k)
    accepted = stands(rule, uniform(seeds[:, None], COIN, rounds[:, None], torch.arange(h.shape[1], device=dev)) < h)
    return Verdict(accepted, draw_weights(final_weights(logp, logq, k, accepted, w), uniform(seeds, FINAL, rounds, 0)), alpha)


def round_law(rule, p, q, k):
    """The law of what one round emits, by enumerating drafts and integrating over coins: p, q map each head (a tuple) to its law [V].

    -> {emitted tokens (1 to k + 1 of them): probability}, through the very `odds`, `stands` and `final_weights` that `verify` uses.
    """
    out, V = {}, len(p[()])
    for x in itertools.product(range(V), repeat=k):
        drawn = sequence(q, x)
        if drawn == 0:
            continue
        logp = torch.stack([p[x[:i]] for i in range(k + 1)]).double().log()
        logq = torch.stack([q[x[:i]] for i in range(k)] or [p[()]])[:k].double().log()
        drafts, ks = torch.tensor(x, dtype=torch.long), torch.tensor([k])
        h, w = odds(rule, logp, logq, drafts, ks)
        for hits in itertools.product((False, True), repeat=k):
            chance = drawn * math.prod(t if hit else 1 - t for hit, t in zip(hits, h[0].tolist()))
            if chance == 0:
                continue
            a = stands(rule, torch.tensor([hits], dtype=torch.bool))
            for y, z in enumerate(torch.nn.functional.normalize(final_weights(logp, logq, ks, a, w)[0], 1, 0).tolist()):
                if z:
                    out[x[:a] + (y,)] = out.get(x[:a] + (y,), 0.0) + chance * z
    return out


def sequence(p, x, start=0):
    """The probability of the tokens x[start:] after x[:start], p as above."""
    return math.prod(p[x[:i]][x[i]].item() for i in range(start, len(x)))


# ----------------------------------------------------------------------------------------------------------------------
# what a round brings


def expected_tokens(alpha, k):
    """Tokens a round emits with k drafts: (1 - a^(k+1)) / (1 - a) for one acceptance a, or 1 + a_1 + a_1 a_2 + ... for a list by slot."""
    total, stand = 1.0, 1.0
    for i in range(k):
        stand *= alpha[i] if isinstance(alpha, (list, tuple)) else alpha
        total += stand
    return total


def speedup(alpha, k, t_plain, t_draft, t_verify):
    """Over plain decoding: E[tokens] t_plain / (k t_draft + t_verify)."""
    return expected_tokens(alpha, k) * t_plain / (k * t_draft + t_verify)


def best_k(alpha, cost, k_max, current=None, margin=0.03):
    """The k in 0..k_max with most E[tokens] per second, cost(k) = seconds of a round, cost(0) of a plain one.

    `current` stays unless another k is better by `margin`: an estimate that wobbles shall not flip it every round."""
    rate = [expected_tokens(alpha, k) / cost(k) for k in range(k_max + 1)]
    best = max(range(k_max + 1), key=rate.__getitem__)
    return best if current is None or current > k_max or rate[best] > (1 + margin) * rate[current] else current


def coupled_acceptance(p, q):
    """Exact chance that the arg maxes of log p + g and log q + g are the same token, laws [V]: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    x = ((p > 0) & (q > 0)).nonzero()  # [n, 1] tokens that both can say
    return (1 / torch.maximum(p / p[x], q / q[x]).sum(-1)).sum().item()


# ----------------------------------------------------------------------------------------------------------------------
# what it costs, and so how many drafts

MAX_K = 8  # the most that `auto` considers


def between(table, x):
    """Piecewise linear through a dict of points, lowest first: between({1: 10, 3: 20}, 2) -> 15. Past the last point in proportion to x (6 -> 40), before the first constant."""
    xs = list(table)
    if x <= xs[0] or x >= xs[-1]:
        return table[xs[0]] if x <= xs[0] else table[xs[-1]] * x / xs[-1]
    i = bisect_left(xs, x)
    a, b = xs[i - 1], xs[i]
    return table[a] + (table[b] - table[a]) * (x - a) / (b - a)


def rising(table):
    """A clock only ever errs upwards: no point may cost more than a later one. rising({1: 5, 2: 9, 4: 7}) -> {1: 5, 2: 7, 4: 7}."""
    low, out = float("inf"), {}
    for x in sorted(table, reverse=True):
        low = out[x] = min(low, table[x])
    return dict(sorted(out.items()))


def points(d):
    """A table as JSON has it, {"8": s}, in the order that `between` wants."""
    return {int(x): d[x] for x in sorted(d, key=int)}


@dataclass
class Cost:
    """Seconds, as a sum of parts that are measured in a few seconds (`measure_cost`) and written down with the run.

        dense pass   linear(T) + read(KV, query tokens of a row)      T packed tokens, KV in tokens
        draft        start + setup * B + blocks read * gather  +  k * (linear(B) + blocks read * sparse)
        scoring      KV * score / rounds between scores
    """
    linear: dict   # T -> s: a pass of T tokens with next to no KV, its law and the choice of tokens
    read: dict     # Q -> {tokens of KV: s}, for Q query tokens a row at once
    score: float   # s per token of KV
    gather: float  # s per token chosen
    sparse: float  # s per token read by a draft step
    start: float   # s per drafting round
    setup: float   # s per row and drafting round
    accept: float  # s per drafted token judged
    made_on: dict = field(default_factory=dict)

    def dense(self, T, shapes):
        return between(self.linear, T) + sum(between({q: between(t, n) for q, t in self.read.items()}, Q) for n, Q in shapes)

    def round(self, k, load):
        """Seconds of a round with k drafts in each row of `load`."""
        B = load.rows
        seconds = self.dense(B * (k + 1), [(load.own, k + 1)] + [(n, (k + 1) * sharers) for n, sharers in load.shared])
        if k:
            seconds += self.start + B * self.setup + load.reads * self.gather + k * (between(self.linear, B) + load.reads * self.sparse)
            seconds += load.total * self.score * min(1.0, (k + 1) / load.refresh) + B * k * self.accept
        return seconds

    def __str__(self):
        each = ", ".join(f"{1e9 * max(t.values()) / max(t):.0f} for {Q} quer{'ies' if Q > 1 else 'y'}" for Q, t in self.read.items())
        return f"a pass of {min(self.linear)} token{'s' * (min(self.linear) > 1)} {1e3 * min(self.linear.values()):.2f} ms, of {max(self.linear)} {1e3 * max(self.linear.values()):.2f} ms; KV, ns a token: {each}, {1e9 * self.sparse:.0f} in a draft step"

    def save(self, path):
        with open(path, "w") as f:
            json.dump(asdict(self), f, indent=1)

    @staticmethod
    def load(path):
        try:
            with open(path) as f:
                d = json.load(f)
            return Cost(linear=points(d.pop("linear")), read={int(Q): points(t) for Q, t in d.pop("read").items()}, **d)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as e:
            raise ValueError(f"{path} cannot be read as cost constants ({e}); give a cost.json that a run has written, or none to measure them again") from None


@dataclass
class Load:
    """What the rows of a round hold, in tokens of KV."""
    rows: int
    own: int      # in pages that one row alone reads
    shared: list  # [(tokens, rows that share them)]: a prompt is read once for all of its members
    total: int    # as each row sees it
    reads: int    # that a draft step reads
    refresh: int  # tokens between scores

    @staticmethod
    def of(rows, drafter, page):
        sharers = Counter(row.kv.shared for row in rows)
        shared = [(len(pages) * page, n) for pages, n in sharers.items() if pages and n > 1]
        total = sum(row.kv.length for row in rows)
        return Load(len(rows), total - sum(n * tokens for tokens, n in shared), shared, total, sum(drafter.reads(row.kv.length) for row in rows), drafter.refresh)


class Controller:
    """The number of drafts, from the cost model and the acceptance of past rounds: a pure function of the rollout's own past.

    Acceptance is pooled over rows: accepted / judged drafts, in an average that forgets over about `memory` drafts and holds `weight` imagined ones of
    acceptance `prior`. While k = 0 nothing is learnt and what was fades, by half every 64 tokens of a row: a bad patch is not for ever, and what it takes to
    see that it lasts is a round or two.
    """

    def __init__(self, k, cost=None, prior=0.8, weight=8, memory=128):
        self.fixed, self.cost, self.prior, self.weight, self.memory = k, cost, prior, weight, memory
        self.good, self.seen = 0.0, 0.0  # accepted, judged
        self.k, self.why = (k if cost is None else None), ""
        self.asked, self.pause = 0, 0  # rows of the last choice, rounds for which k = 0 stands

    @property
    def alpha(self):
        return (self.good + self.prior * self.weight) / (self.seen + self.weight)

    def choose(self, rows, drafter, page):
        if self.cost is None:
            return self.fixed
        if self.k == 0 and len(rows) == self.asked and self.pause:  # nothing is learnt while k = 0, and short rounds feel the asking
            self.pause -= 1
            return 0
        self.asked, self.pause = len(rows), 7
        load = Load.of(rows, drafter, page)
        seconds = [self.cost.round(k, load) for k in range(MAX_K + 1)]
        self.k = best_k(self.alpha, lambda k: seconds[k], MAX_K, current=self.k)
        if self.k == 0:
            gains = [expected_tokens(self.alpha, k) * seconds[0] / seconds[k] for k in range(1, MAX_K + 1)]
            self.why = (f"k = 0, plain decoding: {len(rows)} rows of {max(row.kv.length for row in rows)} tokens take {1e3 * seconds[0]:.1f} ms a token, and at "
                        f"acceptance {self.alpha:.2f} the best draft length would be {max(gains):.2f} times as fast")
        return self.k

    def observe(self, accepted, drafted):
        """accepted [B], drafted [B]: a row's first rejected draft has been judged too, what follows it has not."""
        for a, k in zip(accepted, drafted):
            if k:
                self.good += a
                self.seen += min(a + 1, k)
        keep = 1.0 if any(drafted) else 0.5 ** (1 / 64)
        keep = min(keep, self.memory / max(1.0, self.seen))
        self.good, self.seen = keep * self.good, keep * self.seen


def main():
    print("chance to stand   p                         q                         rejection  coupled  (at least)")
    for name, p, q in (("far apart", [0.10, 0.35, 0.25, 0.30], [0.50, 0.10, 0.22, 0.18]), ("closer", [0.5, 0.3, 0.2], [0.2, 0.5, 0.3])):
        text = "".join(f"{' '.join(f'{x:.2f}' for x in d):26}" for d in (p, q))
        p, q = torch.tensor(p), torch.tensor(q)
        same = torch.minimum(p, q).sum().item()  # 1 - TV
        print(f"  {name:16}{text}{same:<11.3f}{coupled_acceptance(p, q):<9.3f}{same / (2 - same):.3f}")
    g = torch.Generator().manual_seed(0)
    heads = [h for n in range(4) for h in itertools.product(range(3), repeat=n)]
    P, Q = ({h: torch.randn(3, generator=g, dtype=torch.float64).softmax(-1) for h in heads} for _ in "pq")
    print("\none round of 3 drafts, p and q depend on what was said before; by enumeration of all drafts and coins")
    for rule in ("rejection", "block"):
        out = round_law(rule, P, Q, 3)
        gap = {x: -sequence(P, x) for x in itertools.product(range(3), repeat=4)}
        for said, chance in out.items():
            for rest in itertools.product(range(3), repeat=4 - len(said)):  # what the round did not say, plain decoding says
                gap[said + rest] += chance * sequence(P, said + rest, len(said))
        tokens = sum(len(said) * chance for said, chance in out.items())
        print(f"  {rule:16}{tokens:.3f} tokens; over the {len(gap)} sequences of 4, max |law - p| = {max(map(abs, gap.values())):.1e}")
    print("\ntokens a round    " + "".join(f"k = {k:<4}" for k in range(1, 7)))
    for alpha in (0.7, 0.8, 0.9):
        print(f"  acceptance {alpha:.1f}  " + "".join(f"{expected_tokens(alpha, k):<8.2f}" for k in range(1, 7)))


if __name__ == "__main__":
    main()
