"""How fast is it, and is that what the machine can do?  A quick check, side by side, every method from the same state.

    python bench.py                                                          --quick: the tiny model, under a minute on two cores
    python bench.py --model DIR --dtype bf16 --batch 1,8 --context 1024,7680 --methods ar,s3r
    python bench.py --model DIR --dtype bf16 --batch 8 --context 128 --methods hf,ar          against transformers' generate
    python bench.py --model DIR --acceptance --text FILE --context 4096      how often sparse drafts are accepted, over 512 positions of a text
    python bench.py --batch 1,4,16 --context 256,2048 --verify rejection,block,coupled --plot speed.png --profile
    python bench.py --predict                                                the cost model: for an H200 from its data sheet, and here against what is measured

A context is prefilled once and its pages are copied to B private rows (nothing is shared: the worst case for reading); then each method
decodes --new-tokens more from there, stop tokens ignored. Prefill is reported apart and is in no tok/s. Columns:

    tok/s      tokens of all rows per second of decoding         tau       tokens a row gains in a round: 1 for plain decoding
    accept     accepted / judged drafts                          k         drafts a round, mean
    draft, verify, other: ms a round                             attn      share of a plain dense pass that is attention
    bw         bytes that must be read (weights, KV) per second, against the machine's measured read bandwidth: 1.0 is the roofline

speed-up = tau * (ms of an ar round) / (ms of a round).  The last line of stdout is all of it as one JSON document.
"""
import contextlib
import json
import sys
import time
from pathlib import Path

import torch

import spec_sample
from draft import SparseSelf
from kv_cache import PagedCache
from model import load_pretrained
from scheduler import DTYPES, Engine, Flags, Response, Row, check_method, device_name, free_memory, measure_cost, number_or_auto, pick_device, refuse
from spec_sample import Controller, Cost, Load

QUICK = dict(batch="16", context="256,28672", new_tokens=48)
GRID = dict(batch="1,4,16", context="256,2048,7680", new_tokens=48)  # --predict
DRAFTS = (1, 2, 4, 6)


def numbers(text):
    return [int(x) for x in text.split(",")]


def flags():
    p = Flags(prog="bench.py", description=__doc__)
    p.add_argument("--quick", action="store_true", help="the default where neither --batch nor --context is given: a short and a long cell")
    p.add_argument("--model", default="tiny")
    p.add_argument("--methods", default="ar,s3r", help="ar, s3r, sparse, hf (transformers' generate), comma-separated; ar is always run")
    p.add_argument("--batch", default=None, help="rows, comma-separated")
    p.add_argument("--context", default=None, help="tokens before the first new one, comma-separated")
    p.add_argument("--new-tokens", type=int, default=None, help="tokens that each row decodes (64)")
    p.add_argument("--repeat", type=int, default=1, help="runs of each cell, methods in turn; medians are shown")
    p.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    p.add_argument("--device", default="auto")
    p.add_argument("--k", type=number_or_auto, default="auto")
    p.add_argument("--budget", type=float, default=0.0625)
    p.add_argument("--verify", default="rejection", help="the acceptance rule of s3r; several with commas between them are run side by side")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--text", default=None, help="a text file to take contexts from; default: the language reference that comes with Python")
    p.add_argument("--cost", default=None, help="cost.json for --k auto; default: measured")
    p.add_argument("--acceptance", action="store_true", help="no timing: 1 - TV of every draft slot along --text, from --context on")
    p.add_argument("--positions", type=int, default=512, help="rounds of --acceptance")
    p.add_argument("--plot", default=None, metavar="FILE.png", help="draw tok/s against batch and against context (needs matplotlib)")
    p.add_argument("--profile", action="store_true", help="one more run of each line under torch's profiler: how much of a round is Python")
    p.add_argument("--predict", action="store_true", help="speed-ups that the cost model predicts, and over --batch x --context x k those measured")
    a = p.parse_args()
    a.quick = not a.predict and (a.quick or not (a.batch or a.context))
    for name, value in (QUICK if a.quick else GRID if a.predict else dict(batch="8", context="2048", new_tokens=64)).items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    return a


# ----------------------------------------------------------------------------------------------------------------------
# the machine: a roofline card


def timed(f, device, repeat=5):
    """Median seconds of f()."""
    times = []
    for _ in range(repeat + 1):
        sync(device)
        t = time.perf_counter()
        f()
        sync(device)
        times.append(time.perf_counter() - t)
    return sorted(times[1:])[repeat // 2]


def sync(device):
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def bandwidth(device):
    """Bytes a second that a large sum reads: the roof over decoding. 512 MiB, far larger than any cache."""
    x = torch.ones(128 << 20, dtype=torch.float32, device=device)
    return x.numel() * 4 / timed(lambda: x.sum(), device)


def flops(device, dtype):
    """Multiply-adds x 2 a second of a large matrix product: the roof over prefill and training."""
    n = 8192 if device.startswith("cuda") else 1536
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in "ab")
    return 2 * n**3 / timed(lambda: a @ b, device)


# ----------------------------------------------------------------------------------------------------------------------
# a cell: one batch, one context, every method


def default_text():
    """-> name, text: English prose with code that every CPython carries, so that a number of ours can be had again elsewhere."""
    try:
        from pydoc_data.topics import topics
        return f"the language reference in Python {sys.version_info[0]}.{sys.version_info[1]}", "\n\n".join(topics[key] for key in sorted(topics))
    except ImportError:  # some distributions leave it out
        return "this project's sources", "".join(f.read_text() for f in sorted(Path(__file__).resolve().parent.glob("*.py")))


def context_ids(tok, net, text, n):
    """n token ids of a text, repeated where it is shorter; without a tokenizer pseudo-random ids."""
    if tok is None:
        return [int(x) for x in torch.randint(0, net.vocab, (n,), generator=torch.Generator().manual_seed(0))]
    ids = tok.encode(text)
    return (ids * (n // len(ids) + 1))[:n]


class Cell:
    """A prefilled context and `batch` private copies of it."""

    def __init__(self, net, ids, batch, new_tokens, a):
        c, p = net.config, next(net.parameters())
        self.net, self.ids, self.batch, self.new, self.a = net, ids, batch, new_tokens, a
        self.slack = 16  # rounds before the clock starts
        tokens = len(ids) + new_tokens + self.slack + 16
        need = PagedCache.bytes_per_token(c.layers, c.kv_heads, c.head_dim, p.dtype) * (batch * (tokens + 256) + len(ids) + 256)
        if need > 0.8 * free_memory(p.device):
            raise ValueError(f"batch {batch} at context {len(ids):,} needs {need / 2**30:.1f} GiB of KV and {free_memory(p.device) / 2**30:.1f} GiB are free: make one of them smaller")
        if tokens > net.context:
            raise ValueError(f"context {len(ids):,} with {new_tokens} new tokens is over the model's limit of {net.context:,}: use at most {net.context - new_tokens - 32:,}")
        self.tokens = tokens
        self.cache = PagedCache(c.layers, c.kv_heads, c.head_dim, batch * (tokens + 256) + len(ids) + 256, dtype=p.dtype, device=p.device)
        self.base, t = self.cache.new(len(ids)), time.perf_counter()
        with torch.no_grad():
            for start in range(0, len(ids), 2048):
                part = ids[start:start + 2048]
                self.view = self.cache.dense([self.base], [len(part)], score=True)
                hidden = net(torch.tensor(part, device=p.device), torch.arange(start, start + len(part), device=p.device), self.view)
            self.at = [len(part) - 1]
            self.first = spec_sample.law(net.logits(hidden[-1:]), a.temperature, net.vocab)
        sync(str(p.device))
        self.prefill = time.perf_counter() - t

    @torch.no_grad()
    def run(self, method, cost=None, k=None, rule=None, profile=False):
        """Decode from the prefilled state, with k drafts a round and the rule given (None: as the flags say) -> dict of what was seen."""
        net, cache, a, B = self.net, self.cache, self.a, self.batch
        k = a.k if k is None else k
        rule = "greedy" if a.temperature == 0 else rule or a.verify
        drafter = SparseSelf(net, cache, rule, a.temperature, a.budget) if method != "ar" else None
        controller = Controller(k if method == "s3r" and k != "auto" else 0, cost if method == "s3r" and k == "auto" else None)
        engine = Engine(net, cache, drafter, controller, temperature=a.temperature, rule=rule, sparse=method == "sparse")
        seeds = torch.tensor([spec_sample.hash64(a.seed, "bench", b) for b in range(B)], device=cache.device)
        zero = torch.zeros(B, dtype=torch.long, device=cache.device)
        first = spec_sample.target_token(rule, self.first.expand(B, -1), seeds, zero, zero + len(self.ids)).tolist()
        for b in range(B):
            row = Row(Response(0, b, self.ids, [first[b]], [0.0], []), self.ids + [first[b]], len(self.ids) + self.tokens, int(seeds[b]), round=1, kv=cache.copy(self.base, self.tokens))
            engine.rows.append(row)
        if drafter:
            drafter.start([engine.rows], [self.base], self.view, self.at)
        for _ in range(2):
            engine.step()
        for key in engine.stats:
            engine.stats[key] = 0
        engine.k_hist.clear()
        goal = B * self.new
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if profile else contextlib.nullcontext() as prof:
            while engine.stats["tokens"] < goal and all(len(r.tokens) < r.kv.length + 2 and r.kv.length + 12 < self.tokens for r in engine.rows):
                engine.step()
        s = engine.stats
        seconds = s["s_draft"] + s["s_verify"] + s["s_other"]
        longest = max(r.kv.length for r in engine.rows)
        for row in engine.rows:
            cache.free(row.kv)
        k = sum(x * n for x, n in engine.k_hist.items()) / max(1, s["rounds"])
        weights = sum(p.numel() * p.element_size() for p in net.parameters())
        kv = PagedCache.bytes_per_token(cache.L, cache.Hkv, cache.D, cache.dtype)
        reads = drafter.reads(longest) if drafter else 0
        dense = 0 if method == "sparse" else 1
        step_bytes = (dense + (k if dense else 1)) * weights + B * kv * (dense * longest + (k if dense else 1) * reads)
        ops = 1e-6 * sum(e.self_cpu_time_total for e in prof.key_averages()) if profile else None  # s in torch's operators, dispatch included
        return dict(method=method, rule=rule, ms_python=1e3 * (seconds - ops) / s["rounds"] if profile else None, batch=B, context=len(self.ids), tok_s=s["tokens"] / seconds, tau=s["decoded"] / max(1, s["row_rounds"]), rounds=s["rounds"],
                    accept_rate=s["accepted"] / s["judged"] if s["judged"] else None, overlap=s["alpha"] / s["drafted"] if s["drafted"] else None, k=k,
                    ms_draft=1e3 * s["s_draft"] / s["rounds"], ms_verify=1e3 * s["s_verify"] / s["rounds"], ms_other=1e3 * s["s_other"] / s["rounds"],
                    gb_s=step_bytes * s["rounds"] / seconds / 1e9, seconds=seconds, why=controller.why if method == "s3r" and not s["drafted"] else "")

    @torch.no_grad()
    def attention_share(self):
        """Attention's share of a plain dense pass: the pass at this context against the same pass over rows of 16 tokens."""
        cache, net, dev = self.cache, self.net, self.cache.device
        shares = []
        for n in (16, len(self.ids)):
            seqs = [cache.copy(self.base, self.tokens) for _ in range(self.batch)]
            for s in seqs:
                cache.truncate(s, min(n, len(self.ids) - 1))

            def one():
                net.logits(net(torch.zeros(self.batch, dtype=torch.long, device=dev), torch.full((self.batch,), seqs[0].length, device=dev), cache.dense(seqs, [1] * self.batch)))
                for s in seqs:
                    cache.truncate(s, s.length - 1)
            shares.append(timed(one, str(dev), 3))
            for s in seqs:
                cache.free(s)
        return max(0.0, 1 - shares[0] / shares[1])


def hf_generate(path, ids, batch, new_tokens, dtype, temperature, device):
    """transformers' generate on the same rows: seconds for new_tokens - 1 decode steps, its prefill taken off."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("method hf needs transformers: pip install transformers") from None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).to(device).eval()
    x = torch.tensor([ids] * batch, device=device)

    def generate(n):
        sync(device)
        t = time.perf_counter()
        with torch.no_grad():
            model.generate(x, attention_mask=torch.ones_like(x), do_sample=temperature > 0, temperature=temperature or None, top_k=0, top_p=1.0, max_new_tokens=n, min_new_tokens=n, pad_token_id=0)
        sync(device)
        return time.perf_counter() - t
    generate(4)
    prefill = sorted(generate(1) for _ in range(3))[1]
    seconds = generate(new_tokens) - prefill
    return dict(method="hf", rule="", ms_python=None, batch=batch, context=len(ids), tok_s=batch * (new_tokens - 1) / seconds, tau=1.0, accept_rate=None, overlap=None, k=0.0,
                ms_draft=0.0, ms_verify=1e3 * seconds / (new_tokens - 1), ms_other=0.0, gb_s=0.0, seconds=seconds, why="")


# ----------------------------------------------------------------------------------------------------------------------
# acceptance along a text


@torch.no_grad()
def acceptance(net, ids, start, positions, k=4, budget=0.0625, temperature=1.0, stride=4, seed=0, **options):
    """1 - TV(p, q) of every draft slot, at `positions` places of a text: [positions, k].

    The row stands at the text's first start + stride * i tokens; k tokens are drafted through sparse attention and judged by a dense pass
    (every slot, as drafted, also past a refusal); then the text's own next `stride` tokens are committed. Blocks are chosen as in a
    rollout: from the last dense pass's queries, when they are `refresh` tokens old.
    """
    p = next(net.parameters())
    c, dev = net.config, p.device
    last = start + stride * positions
    cache = PagedCache(c.layers, c.kv_heads, c.head_dim, last + 64 + 256, dtype=p.dtype, device=dev)
    drafter = SparseSelf(net, cache, "rejection", temperature, budget, **options)
    row = Row(None, list(ids[:start]), last, seed, round=1, kv=cache.new(last + 64))
    for a in range(0, start - 1, 2048):
        part = ids[a:min(a + 2048, start - 1)]
        view = cache.dense([row.kv], [len(part)], score=True)
        net(torch.tensor(part, device=dev), torch.arange(a, a + len(part), device=dev), view)
    drafter.start([[row]], [row.kv], view, [len(part) - 1])
    seen = torch.zeros(positions, k, dtype=torch.float64)
    for i in range(positions):
        n = start + stride * i
        drafts, logq = drafter.propose([row], [k])
        view = cache.dense([row.kv], [k + 1])
        hidden = net(torch.cat([torch.tensor(row.tokens[-1:], device=dev), drafts]), torch.arange(n - 1, n + k, device=dev), view)
        logp = spec_sample.law(net.logits(hidden[:k]), temperature, net.vocab)
        seen[i] = torch.minimum(logp.exp(), logq.exp()).sum(-1)
        cache.truncate(row.kv, n - 1)
        score = drafter.due([row])  # now the text itself
        view = cache.dense([row.kv], [stride], score)
        net(torch.tensor(row.tokens[-1:] + list(ids[n:n + stride - 1]), device=dev), torch.arange(n - 1, n - 1 + stride, device=dev), view)
        row.tokens += ids[n:n + stride]
        row.round += 1
        drafter.observe([row], [0], view, [stride - 1])
    return seen


# ----------------------------------------------------------------------------------------------------------------------
# the cost model: what a data sheet promises, and what this machine does
#
#     T(k) = max(bytes / bandwidth, operations / peak) + overhead        of a dense pass over k + 1 tokens a row, all rows
#     bytes = weights + B * S * KV of a token       operations = 2 * B * (k + 1) * (weights + 2 * attention heads' width * S)
#     D    = the same of one token a row that reads budget * S of the KV
#     speed-up(k) = E[tokens | k] * T(0) / (T(k) + k * D)

#         layers hidden intermediate heads kv_heads head_dim vocabulary
QWEN3 = {"Qwen3-0.6B": (28, 1024, 3072, 16, 8, 128, 151936), "Qwen3-1.7B": (28, 2048, 6144, 16, 8, 128, 151936), "Qwen3-4B": (36, 2560, 9728, 32, 8, 128, 151936),
         "Qwen3-8B": (36, 4096, 12288, 32, 8, 128, 151936), "Qwen3-14B": (40, 5120, 17408, 40, 8, 128, 151936)}
H200 = dict(bandwidth=0.8 * 4.8e12, peak=0.6 * 989e12, memory=0.9 * 141e9)  # published rates, and the share of them that good kernels reach


def roofline(shape, machine, B, S, k, reads=None, overhead=0.0):
    """Seconds of a pass over B rows of S tokens, k + 1 new tokens each, in 16 bits; `reads`: tokens of KV that it reads of each row (None: all)."""
    layers, H, inter, heads, kv_heads, D, V = shape
    weights = layers * (H * D * (heads + 2 * kv_heads) + heads * D * H + 3 * H * inter) + V * H  # that a pass reads: of the embedding a row a token, of the head all
    n = S if reads is None else reads
    size = 2 * weights + B * n * 4 * layers * kv_heads * D
    work = 2 * B * (k + 1) * (weights + 2 * layers * heads * D * n)
    return max(size / machine["bandwidth"], work / machine["peak"]) + overhead


def predicted(shape, machine, B, S, k, alpha, budget=0.0625, floor=128, overhead=0.0):
    """Speed-up of S3R over plain decoding with k drafts a round, each accepted with chance alpha. None: weights and KV do not fit."""
    layers, H, inter, heads, kv_heads, D, V = shape
    weights = layers * (H * D * (heads + 2 * kv_heads) + heads * D * H + 3 * H * inter) + V * H
    if 2 * weights + B * S * 4 * layers * kv_heads * D > machine["memory"]:
        return None
    plain, verify = (roofline(shape, machine, B, S, j, overhead=overhead) for j in (0, k))
    return spec_sample.expected_tokens(alpha, k) * plain / (verify + k * roofline(shape, machine, B, S, 0, min(S, max(floor, budget * S)), overhead))


def data_sheet(a, alpha=0.87, overhead=0.5e-3):
    """Print what an H200 should give: the best k's speed-up for each model, batch and context."""
    batches, contexts = (1, 8, 32, 128), (1024, 4096, 16384, 32768)
    best = lambda shape, B, S: max(((predicted(shape, H200, B, S, k, alpha, a.budget, overhead=overhead) or 0, k) for k in range(17)))  # noqa: E731
    print(f"predicted for one H200, bf16 (80% of 4.8 TB/s, 60% of 989 TFLOP/s, {1e3 * overhead:g} ms a pass for launches), budget {a.budget:.2%}, {alpha} of the drafts accepted: speed-up (best k)\n")
    print(f"{'model':>11} {'batch':>5}" + "".join(f"{S // 1024:>9}K" for S in contexts) + "   s3r wins from")
    rows = []
    for name, shape in QWEN3.items():
        for B in batches:
            cells = [best(shape, B, S) for S in contexts]
            fits = [S for S in range(128, 131072, 128) if predicted(shape, H200, B, S, 1, alpha, a.budget)]
            cross = next((S for S in fits if best(shape, B, S)[0] >= 1.05), None)
            print(f"{name:>11} {B:5}" + "".join(f"{x:6.2f} ({k:1})" if x else f"{'-':>10}" for x, k in cells) + f"   {cross:,}" * bool(cross))
            rows += [dict(model=name, batch=B, context=S, speedup=x or None, k=k) for S, (x, k) in zip(contexts, cells)]
    print("- : weights and KV are over 90% of 141 GB. Wins from: the context at which the best k is 1.05 times as fast. Not measured: no GPU has run this yet.\n")
    return rows


def fit(cell, cost, k, alpha):
    """Speed-up that `cost` predicts for a cell."""
    n = len(cell.ids) + cell.new // 2
    load = Load(cell.batch, cell.batch * n, [], cell.batch * n, cell.batch * SparseSelf(cell.net, cell.cache, budget=cell.a.budget).reads(n), 8)
    return spec_sample.expected_tokens(alpha, k) * cost.round(0, load) / cost.round(k, load)


def predict(a, net, tok, text, batches, contexts, device):
    """Measured against predicted over a grid -> rows. Each speed-up is the median over --repeat of a run against the `ar` run of its own turn."""
    contexts = [min(n, net.context - a.new_tokens - 64) for n in contexts]
    cost = Cost.load(a.cost) if a.cost else measure_cost(net, max(batches), max(contexts), a.temperature, a.verify, a.budget, DTYPES[a.dtype], device)
    print(f"cost     {cost}\n")
    print(f"{'batch':>5} {'context':>7} {'k':>4} {'accept':>6} {'tau':>5} {'measured':>8} {'predicted':>9} {'error':>6}")
    rows, median = [], lambda x: sorted(x)[len(x) // 2]  # noqa: E731
    for context in contexts:
        for batch in batches:
            cell = Cell(net, context_ids(tok, net, text, context), batch, a.new_tokens, a)
            turns = [{k: cell.run("s3r" if k else "ar", cost, k) for k in (0, *DRAFTS, "auto")} for _ in range(a.repeat)]
            for k in (*DRAFTS, "auto"):
                r = dict(turns[0][k])
                pairs = [t[k]["tok_s"] / t[0]["tok_s"] for t in turns]
                judged = [t[k]["accept_rate"] for t in turns if t[k]["accept_rate"] is not None]
                alpha = sum(judged) / len(judged) if judged else 0.0
                guess = fit(cell, cost, k, alpha) if k != "auto" else None
                r |= dict(k=k, mean_k=r["k"], accept_rate=alpha if judged else None, speedup=median(pairs), pairs=pairs, predicted=guess, error=guess and guess / median(pairs) - 1)
                rows.append(r)
                print(f"{batch:5} {context:7} {k:>4} {alpha:6.2f} {r['tau']:5.2f} {r['speedup']:8.2f} " + (f"{guess:9.2f} {r['error']:+6.0%}" if guess else f"  mean k {r['mean_k']:.1f}, pairs " + " ".join(f"{x:.2f}" for x in pairs)), flush=True)
            del cell
    fixed = [r for r in rows if r["k"] != "auto"]
    print(f"\n{sum(abs(r['error']) <= 0.15 for r in fixed)} of {len(fixed)} predictions within 15% of what was measured")
    for r in rows:
        if r["k"] == "auto":
            best = max(1.0, *(x["speedup"] for x in fixed if (x["batch"], x["context"]) == (r["batch"], r["context"])))
            r["of_best"] = r["speedup"] / best
    auto = [r for r in rows if r["k"] == "auto"]
    print(f"--k auto against ar: at least {min(r['speedup'] for r in auto):.2f}; against the best of all k here, plain included: at least {min(r['of_best'] for r in auto):.2f}, mean {sum(r['of_best'] for r in auto) / len(auto):.2f}")
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# growth


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot
    return pyplot


def plot(rows, path, title):
    """tok/s of each method against batch (a line a context) and against context (a line a batch)."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for ax, x, other in zip(axes, ("batch", "context"), ("context", "batch")):
        for i, n in enumerate(sorted({r[other] for r in rows})):
            for method, style in zip(dict.fromkeys((r["method"], r["rule"]) for r in rows), ("--o", "-s", ":^", "-.v", "-x")):
                points = sorted((r[x], r["tok_s"]) for r in rows if r[other] == n and (r["method"], r["rule"]) == method)
                ax.plot(*zip(*points), style, color=f"C{i}", label=f"{' '.join(method) if method[0] == 's3r' else method[0]}, {other} {n:,}")
        ax.set(xscale="log", yscale="log", xlabel=x, ylabel="tokens a second")
        ax.legend(fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    print(f"plot     {path}")


# ----------------------------------------------------------------------------------------------------------------------
# the command


def run(a):
    methods = ["ar"] + [m for m in a.methods.split(",") if m != "ar"]
    for m in methods:
        for rule in a.verify.split(",") if m != "hf" else ():
            check_method(m, rule, a.temperature, a.k, a.budget)
    if a.plot:
        pyplot()
    try:
        batches, contexts = numbers(a.batch), numbers(a.context)
    except ValueError:
        raise ValueError(f"--batch {a.batch} --context {a.context} must be whole numbers with commas between them") from None
    if min(batches + contexts + [a.new_tokens, a.repeat, a.positions]) < 1 or min(contexts) < 2:
        raise ValueError("--batch, --new-tokens, --repeat and --positions must be at least 1, --context at least 2")
    device = pick_device(a.device)
    if a.text and not Path(a.text).is_file():
        raise ValueError(f"{a.text} is not a file: give a text to take contexts from")
    sheet = data_sheet(a) if a.predict else None
    name, text = (a.text, Path(a.text).read_text(errors="replace")) if a.text else default_text()
    rules, a.verify = a.verify.split(","), a.verify.split(",")[0]
    net, tok = load_pretrained(a.model, DTYPES[a.dtype], device)
    net.requires_grad_(False)
    c = net.config
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    kv = PagedCache.bytes_per_token(c.layers, c.kv_heads, c.head_dim, DTYPES[a.dtype])
    machine = dict(device=device_name(device), threads=torch.get_num_threads(), torch=torch.__version__, model=a.model, dtype=a.dtype, temperature=a.temperature)
    if a.acceptance:
        n, k = contexts[0], 4 if a.k == "auto" else a.k
        ids = tok.encode(text)
        if len(ids) < n + 4 * a.positions or n + 4 * a.positions > net.context:
            raise ValueError(f"{name} has {len(ids):,} tokens and the model a context of {net.context:,}; --context {n} with --positions {a.positions} walks {n + 4 * a.positions:,}: make one smaller")
        seen = acceptance(net, ids, n, a.positions, k, a.budget, a.temperature, seed=a.seed)
        print(f"{a.model} {a.dtype}, {name}, tokens {n:,} to {n + 4 * a.positions:,}, temperature {a.temperature:g}, budget {a.budget:.2%}: 1 - TV of slot "
              + ", ".join(f"{i + 1}: {x:.3f}" for i, x in enumerate(seen.mean(0).tolist())) + f"; all {seen.mean():.4f} +- {seen.std() / seen.numel() ** 0.5:.4f}")
        print(json.dumps({**machine, "text": name, "context": n, "positions": a.positions, "k": k, "budget": a.budget, "acceptance": seen.mean().item(), "by_slot": seen.mean(0).tolist()}))
        return
    roof, peak = bandwidth(device), flops(device, DTYPES[a.dtype])
    print(f"machine  {machine['device']}, {machine['threads']} threads, torch {torch.__version__}: reads {roof / 1e9:.1f} GB/s, {peak / 1e9:,.0f} GFLOP/s in {a.dtype}")
    print(f"model    {a.model}: {weights / 2**20:.1f} MiB of weights, {kv / 1024:.1f} KiB of KV a token: at {weights // kv:,} tokens of KV in all rows together a step reads as much KV as weights")
    print(f"text     {name}; temperature {a.temperature:g}, budget {a.budget:.2%}, rule {', '.join(rules)}\n")
    if not a.predict:
        print(f"{'method':>13} {'batch':>5} {'context':>7} {'tok/s':>8} {'speedup':>7} {'tau':>5} {'accept':>6} {'1-TV':>5} {'k':>4} {'draft':>8} {'verify':>8} {'other':>7} {'attn':>5} {'bw':>5}")
    if a.predict:
        rows = predict(a, net, tok, text, batches, contexts, device)
        print()
        print(json.dumps({**machine, "bandwidth_gb_s": roof / 1e9, "gflop_s": peak / 1e9, "text": name, "rows": rows, "h200": sheet}))
        return
    rows, cost = [], Cost.load(a.cost) if a.cost else None
    for context in contexts:
        for batch in batches:
            cell = Cell(net, context_ids(tok, net, text, context), batch, a.new_tokens, a)
            if "s3r" in methods and a.k == "auto" and not a.cost:
                cost = measure_cost(net, batch, context + a.new_tokens, a.temperature, a.verify, a.budget, DTYPES[a.dtype], device)
            share = cell.attention_share()
            lines = [(m, rule) for m in methods for rule in (rules if m == "s3r" else rules[:1])]
            runs = {line: [] for line in lines}
            for _ in range(a.repeat):
                for m, rule in lines:
                    runs[m, rule].append(cell.run(m, cost, rule=rule) if m != "hf" else hf_generate(a.model, cell.ids, batch, a.new_tokens, a.dtype, a.temperature, device))
            for m, rule in lines:
                r = sorted(runs[m, rule], key=lambda r: r["tok_s"])[a.repeat // 2]
                plain = sorted(x["tok_s"] for x in runs["ar", rules[0]])[a.repeat // 2]
                r |= dict(speedup=r["tok_s"] / plain, attention_share=share, bandwidth_fraction=1e9 * r.pop("gb_s") / roof, prefill_seconds=cell.prefill)
                f = lambda x: "-" if x is None else f"{x:.2f}"  # noqa: E731
                name = m if m != "s3r" or len(rules) == 1 else f"s3r {rule}"
                print(f"{name:>13} {batch:5} {context:7} {r['tok_s']:8.1f} {r['speedup']:7.2f} {r['tau']:5.2f} {f(r['accept_rate']):>6} {f(r['overlap']):>5} {r['k']:4.1f} {r['ms_draft']:8.1f} "
                      f"{r['ms_verify']:8.1f} {r['ms_other']:7.1f} {share:5.2f} {r['bandwidth_fraction']:5.2f}" + (f"   {r['why']}" if r["why"] else ""), flush=True)
                if a.profile and m != "hf":
                    x = cell.run(m, cost, rule=rule, profile=True)
                    r["ms_python"] = x["ms_python"]
                    print(f"{'':>13} under the profiler a round takes {1e3 * x['seconds'] / x['rounds']:.1f} ms, {x['ms_python']:.1f} of them outside torch's operators")
                rows.append(r)
            print(f"        prefill of {context:,} tokens: {cell.prefill:.2f} s, once")
            del cell
    if a.plot:
        plot(rows, a.plot, f"{a.model} {a.dtype}, {machine['device']}")
    print()
    print(json.dumps({**machine, "bandwidth_gb_s": roof / 1e9, "gflop_s": peak / 1e9, "text": name, "rows": rows}))


def main():
    try:
        run(flags())
    except ValueError as e:
        return refuse(str(e))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
