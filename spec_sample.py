"""Exact speculative sampling: laws, random numbers, acceptance rules, expected speed-up. Pure functions over packed, ragged batches.

A drafter said x_1..x_k, each drawn from a law q_i; one dense pass gave p_1..p_{k+1}, the laws that plain decoding would use there. Then

    rejection   x_i stands with probability min(1, p_i(x_i) / q_i(x_i)), as long as those before it stand; in place of the first that falls
                y ~ norm((p_i - q_i)+); if none falls, y ~ p_{k+1}.       min(p, q) + (1 - sum min(p, q)) norm((p - q)+) = p
    block       the same with whole prefixes: w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), the longest i whose coin is under h_i stands,
                    h_i = S_i / (S_i + 1 - w_i),  S_i = sum (w_i p_{i+1} - q_{i+1})+,  h_k = w_k,  and y ~ norm((w_i p_{i+1} - q_{i+1})+)
    coupled     y_i = argmax(log p_i + g), drafts were argmax(log q_i + g), g Gumbel noise that depends on (seed, position, token) alone:
                x_i stands if it equals y_i. What comes out depends on p and the seed, on nothing else: plain decoding's very tokens
    greedy      temperature 0: x_i stands if it is the arg max

and all four emit exactly p, however bad q is. Packing, for k = [2, 0, 1] (row b: k_b + 1 rows of logp, k_b of logq; T = N + B):

    logp   p1 p2 p3 | p1 | p1 p2          what follows the last committed token, x_1, x_2, ...
    logq   q1 q2    |    | q1             drafts   x1 x2 | | x1

Sources: Leviathan 2211.17192 and Chen 2302.01318 (rejection), Sun 2403.10444 (block), Daliri 2408.07978 (coupled).
Try it:  python spec_sample.py        toy laws: what each rule accepts, and its law by enumeration
         pytest tests/test_spec_sample.py
"""
import hashlib
import itertools
from dataclasses import dataclass

import torch

# ----------------------------------------------------------------------------------------------------------------------
# laws


def law(logits, temperature, vocab=None, top_k=0, top_p=1.0):
    """logits [n, V] -> log-probabilities [n, V], fp32 or the logits' dtype if that is wider. The one way from logits to a law: draft, target, loss.

    Ids from `vocab` on are padding and get -inf. Temperature 0: all mass on the arg max (the lowest id of equals). top_k, top_p cut the law
    (top_p keeps the token that crosses it) and renormalise; 0 and 1.0 leave it whole. Differentiable for temperature > 0.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocab is not None and vocab < x.shape[-1]:
        x = torch.cat([x[:, :vocab], x.new_full((len(x), x.shape[-1] - vocab), float("-inf"))], 1)
    if temperature == 0:
        return torch.full_like(x, float("-inf")).scatter_(1, x.argmax(-1, keepdim=True), 0.0)
    logp = (x if temperature == 1 else x / temperature).log_softmax(-1)
    if top_k and top_k < x.shape[-1]:
        logp = logp.masked_fill(logp < logp.topk(top_k, -1).values[:, -1:], float("-inf")).log_softmax(-1)
    if top_p < 1:
        p, ids = logp.exp().sort(-1, descending=True, stable=True)
        out = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, p.cumsum(-1) - p >= top_p)  # all before it already reach top_p
        logp = logp.masked_fill(out, float("-inf")).log_softmax(-1)
    return logp


# ----------------------------------------------------------------------------------------------------------------------
# random numbers without state: each is a hash of its name, so it does not matter who else runs, in which order, or on what

DRAFT, COIN, FINAL = 1, 2, 3  # independent streams: a number that a draft has used never comes back as a coin or a residual


def hash64(*parts):
    """A 63-bit number from ints, strings, None and tuples of them; the same in every process, and different for ("1",), (1,) and ((1,),)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def mix(x):
    """A bijection of int64 that looks random (the finaliser of splitmix64); products wrap, and >> is made logical by the mask."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


STEP = -7046029254386353131  # 2^64 / golden ratio, as int64


def uniform(seeds, purpose, rounds, index):
    """53-bit float64 in [0, 1), named by (request seed, purpose, round, index): tensors or ints that broadcast, seeds int64."""
    x = seeds
    for part in (purpose, rounds, index):
        x = mix(x + (torch.as_tensor(part, device=x.device) + 1) * STEP)  # a tensor: its products wrap
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def gumbel(seeds, positions, V, device=None):
    """Gumbel noise [n, V] float64, named by (request seed, absolute position, token id); 53 bits, finite."""
    x = mix(mix(seeds + STEP) + (positions + 1) * STEP)[:, None] + torch.arange(1, V + 1, device=device) * STEP  # [n, V]
    x = ((mix(x) >> 11) & 0x1FFFFFFFFFFFFF).double()
    return x.add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()


def draw_weights(w, u):
    """Inverse CDF in float64: weights [n, V] (any positive sum), u [n] in [0, 1) -> ids [n]. An id of weight 0 is never drawn."""
    c = w.cumsum(-1, dtype=torch.float64)
    i = torch.searchsorted(c, (u * c[:, -1])[:, None], right=True)  # the first id whose sum is past u; ids of weight 0 do not raise it
    last = torch.searchsorted(c, c[:, -1:].contiguous())            # u * sum may round up to the sum: then the last id that has weight
    return torch.minimum(i, last)[:, 0]


def draw(logp, u):
    """logp [n, V], u [n] -> ids [n]."""
    return draw_weights(logp.exp(), u)


def draft_token(rule, logq, seeds, rounds, index, positions):
    """How a drafter draws its `index`-th token of a round from logq [n, V]. The law handed to `verify` must be this very logq."""
    if rule == "greedy":
        return logq.argmax(-1)
    if rule == "coupled":
        return (logq + gumbel(seeds, positions, logq.shape[1], logq.device)).argmax(-1)
    return draw(logq, uniform(seeds, DRAFT, rounds, index))


def target_token(rule, logp, seeds, rounds, positions):
    """Plain decoding: the token that `verify` would emit for rows without drafts."""
    if rule == "greedy":
        return logp.argmax(-1)
    if rule == "coupled":
        return (logp + gumbel(seeds, positions, logp.shape[1], logp.device)).argmax(-1)
    return draw(logp, uniform(seeds, FINAL, rounds, 0))


# ----------------------------------------------------------------------------------------------------------------------
# acceptance


@dataclass
class Verdict:
    accepted: torch.Tensor  # [B] drafts that stand, 0..k_b
    token: torch.Tensor     # [B] the token that follows them, always emitted
    alpha: torch.Tensor = None  # [N] sum min(p, q) = 1 - TV(p, q) of every slot, as drafted


def odds(rule, logp, logq, drafts, k):
    """The thresholds that coins are held against -> h [B, K] (0 past k_b) and scale w [B, K + 1] (1 for rejection), float64. K = max k."""
    B, K, dev = len(k), int(k.max()), logp.device
    row = torch.repeat_interleave(torch.arange(B, device=dev), k)                   # [N] row of each draft
    slot = torch.arange(len(drafts), device=dev) - (k.cumsum(0) - k)[row]           # [N] its place in the row
    at = torch.arange(len(drafts), device=dev) + row                                # [N] its row of logp
    ratio = torch.zeros(B, K, dtype=torch.float64, device=dev)
    px, qx = (x.double().exp() for x in (logp[at, drafts], logq.gather(1, drafts[:, None])[:, 0]))
    ratio[row, slot] = torch.where(px > 0, px / qx, 0.0)  # q(x) > 0: x was drawn from it
    if rule == "rejection":
        return ratio.clamp(max=1.0), torch.ones(B, K + 1, dtype=torch.float64, device=dev)
    w = torch.ones(B, K + 1, dtype=torch.float64, device=dev)
    h = torch.zeros(B, K, dtype=torch.float64, device=dev)
    first_p, first_q = k.cumsum(0) - k + torch.arange(B, device=dev), k.cumsum(0) - k
    for i in range(1, K + 1):
        w[:, i] = (w[:, i - 1] * ratio[:, i - 1]).clamp(max=1.0)
        more = (k > i).nonzero()[:, 0]  # rows whose slot i + 1 was drafted: the rest of their mass is measured there
        if len(more):
            s = (w[more, i, None] * logp[first_p[more] + i].exp() - logq[first_q[more] + i].exp()).clamp(min=0).sum(-1, dtype=torch.float64)
            rest = s + 1 - w[more, i]
            h[more, i - 1] = torch.where(rest > 0, s / rest, 1.0)
        end = (k == i).nonzero()[:, 0]
        h[end, i - 1] = w[end, i]
    return h, w


def stands(rule, hits):
    """hits [B, K]: coin under threshold -> how many drafts stand: rejection counts up to the first miss, block up to the last hit."""
    if rule == "rejection":
        return hits.long().cumprod(1).sum(1)
    return (hits * torch.arange(1, hits.shape[1] + 1, device=hits.device)).amax(1) if hits.shape[1] else hits.sum(1)


def residual(p, q, scale=1.0):
    """(scale * p - q)+ of laws [n, V], unnormalised; where that is empty (p equals q to rounding) p itself: never 0 / 0."""
    r = (scale * p - q).clamp(min=0)
    return torch.where(r.sum(-1, keepdim=True) > 0, r, p.to(r.dtype))


def final_weights(logp, logq, k, accepted, w):
    """What the last token of each row is drawn from [B, V]: p of the bonus row if all drafts stand, else the residual where the first fell."""
    B, dev = len(k), logp.device
    first = k.cumsum(0) - k
    out = logp[first + torch.arange(B, device=dev) + accepted].exp()  # [B, V]
    fell = (accepted < k).nonzero()[:, 0]
    if len(fell):
        scale = w[fell, accepted[fell], None].to(out.dtype)
        out[fell] = residual(out[fell], logq[first[fell] + accepted[fell]].exp(), scale)
    return out


def verify(rule, logp, logq, drafts, k, seeds, rounds, positions, want_alpha=False):
    """Judge a round: logp [T, V], logq [N, V], drafts [N], packed as in the picture above; k, seeds, rounds [B]; positions [B] of each first draft."""
    B, K, dev = len(k), int(k.max()), logp.device
    row = torch.repeat_interleave(torch.arange(B, device=dev), k)
    first = k.cumsum(0) - k
    slot = torch.arange(len(drafts), device=dev) - first[row]
    alpha = torch.minimum(logp[torch.arange(len(drafts), device=dev) + row], logq).exp_().sum(-1) if want_alpha else None
    if rule in ("coupled", "greedy"):
        rows = torch.repeat_interleave(torch.arange(B, device=dev), k + 1)                                         # [T]
        place = positions[rows] + torch.arange(len(logp), device=dev) - (first + torch.arange(B, device=dev))[rows]  # [T] absolute
        y = target_token(rule, logp, seeds[rows], rounds[rows], place)                                             # [T]
        hits = torch.zeros(B, K, dtype=torch.bool, device=dev)
        hits[row, slot] = y[torch.arange(len(drafts), device=dev) + row] == drafts
        accepted = stands("rejection", hits)
        return Verdict(accepted, y[first + torch.arange(B, device=dev) + accepted], alpha)
    h, w = odds(rule, logp, logq, drafts, k)
    coins = uniform(seeds[:, None], COIN, rounds[:, None], torch.arange(K, device=dev))  # [B, K]
    accepted = stands(rule, coins < h)
    return Verdict(accepted, draw_weights(final_weights(logp, logq, k, accepted, w), uniform(seeds, FINAL, rounds, 0)), alpha)


def round_law(rule, p, q, k):
    """The law of what one round emits, by enumerating drafts and integrating over coins: p, q map each head (a tuple) to its law [V].

    -> {emitted tokens (1 to k + 1 of them): probability}, through the very `odds`, `stands` and `final_weights` that `verify` uses.
    """
    out, V = {}, len(q[()]) if k else len(p[()])
    for x in itertools.product(range(V), repeat=k):
        logq = torch.stack([q[x[:i]] for i in range(k)]).double().log() if k else torch.empty(0, V, dtype=torch.float64)
        chance = 1.0
        for i in range(k):
            chance *= q[x[:i]][x[i]].item()
        if chance == 0:
            continue
        logp = torch.stack([p[x[:i]] for i in range(k + 1)]).double().log()
        drafts, kk = torch.tensor(x, dtype=torch.long), torch.tensor([k])
        h, w = odds(rule, logp, logq, drafts, kk)
        for hits in itertools.product((False, True), repeat=k):
            pr = chance
            for hit, t in zip(hits, h[0].tolist()):
                pr *= t if hit else 1 - t
            if pr == 0:
                continue
            a = stands(rule, torch.tensor([hits]).view(1, k))
            f = final_weights(logp, logq, kk, a, w)[0]
            for y, z in enumerate((f / f.sum()).tolist()):
                if z:
                    key = x[:int(a)] + (y,)
                    out[key] = out.get(key, 0.0) + pr * z
    return out


# ----------------------------------------------------------------------------------------------------------------------
# what it brings


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
    """The k in 0..k_max with most E[tokens] per second, cost(k) = seconds of a round; `current` stays unless another is better by `margin`."""
    rate = [expected_tokens(alpha, k) / cost(k) for k in range(k_max + 1)]
    best = max(range(k_max + 1), key=rate.__getitem__)
    return best if current is None or rate[best] > (1 + margin) * rate[current] else current


def main():
    p, q = torch.tensor([0.10, 0.35, 0.25, 0.30]), torch.tensor([0.50, 0.10, 0.22, 0.18])
    overlap = torch.minimum(p, q).sum().item()
    print(f"p = {[round(x, 2) for x in p.tolist()]}, q = {[round(x, 2) for x in q.tolist()]}: rejection accepts 1 - TV = {overlap:.2f}, coupled at least {overlap / (2 - overlap):.2f}\n")
    g = torch.Generator().manual_seed(0)
    heads = [h for n in range(4) for h in itertools.product(range(3), repeat=n)]
    P, Q = ({h: torch.rand(3, generator=g, dtype=torch.float64).softmax(-1) ** 3 for h in heads} for _ in "pq")
    P, Q = ({h: x / x.sum() for h, x in d.items()} for d in (P, Q))
    for rule in ("rejection", "block"):
        out = round_law(rule, P, Q, 3)
        first = torch.zeros(3, dtype=torch.float64)
        for y, w in out.items():
            first[y[0]] += w
        print(f"{rule:10} k = 3, laws that depend on the context: emits {sum(len(y) * w for y, w in out.items()):.4f} tokens a round; max |law - p| of the first {(first - P[()]).abs().max():.1e}")
    print("\ntokens a round  " + "".join(f"k = {k:<4}" for k in range(1, 7)))
    for alpha in (0.7, 0.8, 0.9):
        print(f"acceptance {alpha:.1f}  " + "".join(f"{expected_tokens(alpha, k):<8.2f}" for k in range(1, 7)))


if __name__ == "__main__":
    main()
