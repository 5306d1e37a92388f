"""Train a reasoning model with GRPO: generate groups of responses, reward them, push the policy towards the better ones. Read top to bottom.

    python train.py --method s3r                                              the embedded tiny model learns arithmetic, minutes on a CPU
    python train.py --method s3r --model Qwen/Qwen3-1.7B --data openai/gsm8k:main --dtype bf16 --max-new-tokens 4096
    python train.py --method s3r --model DIR --data rows.jsonl --prompt-column question --answer-column answer
    python train.py --method sft --model tiny --from-scratch --data chain:4 --lr 2e-3 --steps 800          (how assets/tiny was made: README)
    python train.py ... --out OUT --resume                                    goes on where OUT's last checkpoint stopped, bit for bit

One step:  prompts -> scheduler.rollout -> rewards -> advantages -> loss over micro-batches -> AdamW.
    ar       plain decoding              s3r      the same law, faster: sparse drafts, dense verification
    sparse   the foil: samples from sparse attention itself, the loss corrects (which is not enough: `python grpo.py`)
    sft      supervised warm-up on worked solutions, no rollouts

OUT/metrics.jsonl (a line a step), samples.jsonl (every response), checkpoint-N/ (opens in transformers), run.json (flags, versions), cost.json.
"""
import copy
import importlib.util
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import grpo
import spec_sample
from kv_cache import PagedCache
from model import load_pretrained, read_json, save_pretrained
from scheduler import DTYPES, Flags, check_method, device_name, free_memory, measure_cost, number_or_auto, pick_device, refuse, rollout
from spec_sample import Cost
from sparse_attn import PackedCausal

# ----------------------------------------------------------------------------------------------------------------------
# flags


def flags():
    p = Flags(prog="train.py", description=__doc__)
    g = p.add_argument_group("what to train, on what")
    g.add_argument("--method", default="s3r", help="ar, s3r, sparse or sft")
    g.add_argument("--model", default="tiny", help="a folder in Hugging Face format, a hub name, or tiny (embedded)")
    g.add_argument("--from-scratch", action="store_true", help="draw the weights anew; only the config and the tokenizer come from --model")
    g.add_argument("--data", default="chain", help="chain, ledger, ledger:SIZE, FILE.jsonl, FILE.parquet, or a hub data set as owner/name:config")
    g.add_argument("--split", default="train")
    g.add_argument("--prompt-column", default=None)
    g.add_argument("--answer-column", default=None)
    g.add_argument("--system-prompt", default=None, help="put before every prompt that does not bring its own")
    g.add_argument("--reward", default="exact_answer", help="exact_answer, or FILE.py:NAME of (prompts, completions, answers, columns) -> numbers")
    g = p.add_argument_group("rollouts")
    g.add_argument("--steps", type=int, default=30)
    g.add_argument("--prompts", type=int, default=32, help="prompts a step (sft: examples)")
    g.add_argument("--group", type=int, default=8, help="responses to each prompt")
    g.add_argument("--max-new-tokens", type=int, default=128)
    g.add_argument("--temperature", type=float, default=1.0)
    g.add_argument("--top-p", type=float, default=1.0, help="refused in training: the loss would be biased by the mass that was cut off")
    g.add_argument("--top-k", type=int, default=0, help="refused in training, for the same reason")
    g.add_argument("--k", type=number_or_auto, default="auto", help="drafts a round: auto, or a number")
    g.add_argument("--budget", type=float, default=0.0625, help="share of the KV that a draft step reads")
    g.add_argument("--verify", default="rejection", help="rejection, block or coupled")
    g.add_argument("--kv-tokens", type=int, default=None, help="room of the KV pool in tokens; default: all rows' worst case, at most 40%% of free memory")
    g.add_argument("--host-kv-tokens", type=int, default=0)
    g.add_argument("--scheduler", default="kv-aware")
    g.add_argument("--cost", default=None, help="cost.json of an earlier run for --k auto; default: measured at the start")
    g = p.add_argument_group("optimisation")
    g.add_argument("--loss", default="dapo", choices=grpo.LOSSES)
    g.add_argument("--advantage-scale", default="group", choices=("group", "batch", "none"))
    g.add_argument("--epsilon", type=float, default=0.2)
    g.add_argument("--epsilon-high", type=float, default=0.28)
    g.add_argument("--kl-beta", type=float, default=0.0, help="weight of the KL to the starting policy; 0 keeps no reference model")
    g.add_argument("--old-logps", default="auto", choices=("auto", "rollout", "recompute"), help="the law that ratios are against; auto: rollout in fp32, else recompute")
    g.add_argument("--is-correction", default="auto", choices=("auto", "none", "token", "sequence", "token-mask", "sequence-mask"), help="auto: none where the rollout is exact, in fp32; else token")
    g.add_argument("--is-cap", type=float, default=2.0)
    g.add_argument("--mask-truncated", action="store_true", help="leave responses that ran into the length limit out of the loss")
    g.add_argument("--lr", type=float, default=None, help="default: 1e-4 for the tiny model, 1e-6 for others")
    g.add_argument("--lr-schedule", default="constant", choices=("constant", "linear", "cosine"))
    g.add_argument("--lr-steps", type=int, default=None, help="steps over which the schedule falls to 0; default: --steps of the first start")
    g.add_argument("--warmup", type=int, default=0, help="steps over which lr rises to --lr")
    g.add_argument("--weight-decay", type=float, default=0.0)
    g.add_argument("--beta1", type=float, default=0.9)
    g.add_argument("--beta2", type=float, default=0.99)
    g.add_argument("--grad-clip", type=float, default=1.0)
    g.add_argument("--micro-tokens", type=int, default=8192, help="packed tokens of one forward and backward pass")
    g.add_argument("--checkpointing", action="store_true", help="recompute activations in backward: less memory, about a third more time")
    g = p.add_argument_group("evaluation, output, machine")
    g.add_argument("--eval-data", default=None, help="as --data; default: a built-in task's held-out problems, nothing for files; none turns it off")
    g.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; always before the first step and after the last")
    g.add_argument("--eval-prompts", type=int, default=256)
    g.add_argument("--eval-temperature", type=float, default=1.0)
    g.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; there is always one at the end")
    g.add_argument("--out", default=None, help="a new folder; default: out/METHOD-DATE")
    g.add_argument("--resume", action="store_true", help="go on from --out's last checkpoint")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp64"), help="of rollouts and of the forward pass; weights and moments are fp32 at least")
    g.add_argument("--device", default="auto")
    g.add_argument("--wandb", default=None, metavar="PROJECT", help="also log to Weights & Biases")
    a = p.parse_args()
    if a.lr is None:
        a.lr = 1e-4 if a.model == "tiny" else 1e-6
    return a


MAY_CHANGE = {"steps", "eval_data", "eval_every", "eval_prompts", "eval_temperature", "save_every", "device", "wandb", "resume", "out", "cost"}


def check(a):
    """Everything that can be refused before a model is loaded."""
    if a.method != "sft":
        check_method(a.method, a.verify, a.temperature, a.k, a.budget, a.scheduler, a.host_kv_tokens)
        if a.temperature == 0:
            raise ValueError("temperature 0 gives every member of a group the same response: train with a temperature above 0")
        if a.group < 2:
            raise ValueError(f"--group {a.group}: an advantage compares the responses of a group, so it needs at least 2")
    if a.top_p != 1 or a.top_k:
        raise ValueError(f"--top-p {a.top_p} --top-k {a.top_k}: training samples from the whole law, or the loss is biased by the mass that was cut off; leave them at 1 and 0")
    for name, least in dict(steps=1, prompts=1, max_new_tokens=1, micro_tokens=1, eval_prompts=1, lr=0, weight_decay=0, kl_beta=0, warmup=0, eval_every=0, save_every=0).items():
        if not least <= getattr(a, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(a, name)} must be at least {least}")
    if a.resume and not a.out:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    if a.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb needs the wandb package: pip install wandb")
    grpo.load_reward(a.reward)
    if a.cost:
        Cost.load(a.cost)


# ----------------------------------------------------------------------------------------------------------------------
# the run folder: a new one, or one to go on with


def open_run(a):
    """-> (folder, last checkpoint or None, first step, flags as first given)."""
    out = Path(a.out or f"out/{a.method}-{time.strftime('%Y%m%d-%H%M%S')}")
    now = {k: v for k, v in vars(a).items() if k not in MAY_CHANGE}
    if not a.resume:
        if out.exists() and any(out.iterdir()) if out.is_dir() else out.exists():
            raise ValueError(f"{out} exists: give --resume to go on with it, or another --out")
        a.lr_steps = a.lr_steps or a.steps
        return out, None, 0
    if not (out / "run.json").is_file():
        raise ValueError(f"{out} holds no run (run.json is missing): start it without --resume")
    before = read_json(out / "run.json")["flags"]
    a.lr_steps = a.lr_steps or before["lr_steps"]
    now["lr_steps"] = a.lr_steps
    differ = [f"--{k.replace('_', '-')} {now[k]} (was {before.get(k)})" for k in now if before.get(k) != now[k]]
    if differ:
        raise ValueError(f"{out} was started with other flags: {', '.join(differ)}; only {', '.join('--' + k.replace('_', '-') for k in sorted(MAY_CHANGE - {'resume', 'out'}))} may change")
    saved = sorted((int(p.name.split("-")[1]), p) for p in out.glob("checkpoint-*") if p.name.split("-")[1].isdigit())
    if not saved:
        raise ValueError(f"{out} holds no checkpoint to go on from: start anew in another --out")
    step, folder = saved[-1]
    if step >= a.steps:
        raise ValueError(f"{out} has {step} steps already: raise --steps {a.steps} to go on")
    for name in ("metrics.jsonl", "samples.jsonl"):  # what was written after the checkpoint will be written again
        keep_until(out / name, step)
    return out, folder, step


def keep_until(path, step):
    """Cut a .jsonl back to the lines of the steps that the checkpoint holds; a torn last line goes too."""
    if path.exists():
        with open(path) as f, open(path.with_suffix(".tmp"), "w") as g:
            for line in f:
                try:
                    if json.loads(line)["step"] > step:
                        break
                except ValueError:
                    break
                g.write(line)
        os.replace(path.with_suffix(".tmp"), path)


def save_checkpoint(out, step, net, tok, optimizer):
    """OUT/checkpoint-N: an HF folder and the optimizer's moments, under its name only once it is whole."""
    from safetensors.torch import save_file
    folder, tmp = out / f"checkpoint-{step}", out / f".checkpoint-{step}.tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    save_pretrained(net, tmp, tok)
    names = {p: n for n, p in net.named_parameters()}
    moments = {f"{names[p]}.{k}": v.contiguous() for p, s in optimizer.state.items() for k, v in s.items()}
    save_file(moments, tmp / "optimizer.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(tmp, folder)
    return folder


def load_optimizer(folder, net, optimizer):
    from safetensors.torch import load_file
    moments = load_file(folder / "optimizer.safetensors")
    for name, p in net.named_parameters():
        if f"{name}.step" in moments:
            optimizer.state[p] = {k: moments[f"{name}.{k}"].to(p.device if k != "step" else "cpu") for k in ("step", "exp_avg", "exp_avg_sq")}


# ----------------------------------------------------------------------------------------------------------------------
# log-probabilities without a [T, V] block, and the learning rate

LOGIT_BYTES = 64 << 20  # of one chunk of fp32 logits


def chunk_rows(vocab):
    return max(16, LOGIT_BYTES // (4 * vocab))


def token_logps(net, hidden, targets, temperature):
    """hidden [n, H], targets [n] -> log p [n] with grad, entropy [n] without. Logits exist a chunk of rows at a time, in backward too."""
    def some(h, t):
        logp = spec_sample.law(net.logits(h), temperature, net.vocab)  # [rows, V]
        with torch.no_grad():
            entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
        return logp.gather(1, t[:, None])[:, 0], entropy
    rows = chunk_rows(net.config.vocab_size)
    parts = [torch.utils.checkpoint.checkpoint(some, h, t, use_reentrant=False) for h, t in zip(hidden.split(rows), targets.split(rows))]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])


def packed_logps(net, pairs, temperature, autocast):
    """[(prompt ids, completion ids)] -> log p and entropy of the completions' tokens, packed [T]."""
    device = net.embed.weight.device
    P, C = [len(p) for p, _ in pairs], [len(c) for _, c in pairs]
    ids = torch.tensor([x for p, c in pairs for x in p + c], device=device)  # [T]
    positions = torch.cat([torch.arange(p + c) for p, c in zip(P, C)]).to(device)
    with autocast:
        hidden = net(ids, positions, PackedCausal([p + c for p, c in zip(P, C)]))  # [T, H]
        return token_logps(net, hidden[grpo.completion_index(P, C).to(device)], torch.tensor([x for _, c in pairs for x in c], device=device), temperature)


def micro_batches(pairs, tokens):
    """Indices of `pairs` in runs of at most `tokens` packed tokens (one that is longer goes alone), longest first: like lengths pad least."""
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    batches, used = [], tokens
    for i in order:
        n = len(pairs[i][0]) + len(pairs[i][1])
        if used + n > tokens:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += n
    return batches


def learning_rate(a, step):
    rise = min(1.0, (step + 1) / a.warmup) if a.warmup else 1.0
    done = min(1.0, max(0, step - a.warmup) / max(1, a.lr_steps - a.warmup))
    return a.lr * rise * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[a.lr_schedule]


# ----------------------------------------------------------------------------------------------------------------------
# the run


def run(a):
    check(a)
    out, checkpoint, first = open_run(a)
    device = pick_device(a.device)
    data = grpo.load_data(a.data, a.split, a.prompt_column, a.answer_column, a.system_prompt, a.seed)
    if a.prompts > len(data):
        raise ValueError(f"--prompts {a.prompts} from {a.data}, which has {len(data)} rows: ask for at most that many")
    builtin = a.data.split(":")[0] in grpo.TASKS
    held = None if a.eval_data == "none" else a.eval_data or (a.data if builtin else None)
    evals = held and grpo.load_data(held, "heldout" if held.split(":")[0] in grpo.TASKS else a.split, a.prompt_column, a.answer_column, a.system_prompt)
    reward = grpo.load_reward(a.reward)
    if a.method == "sft" and not data[0].solution:
        raise ValueError(f"{a.data} has no worked solutions to imitate: sft needs a `solution` column, or answers that end in #### and the number")

    # -- model: the policy's weights are fp32 (or fp64); rollouts run on a replica in --dtype, or on the policy itself where that is the same
    wide = torch.promote_types(DTYPES[a.dtype], torch.float32)
    net, tok = load_pretrained(checkpoint or a.model, wide, device, fresh=a.seed if a.from_scratch and not checkpoint else None)
    if tok is None:
        raise ValueError(f"{a.model} has no tokenizer: training needs one")
    if not tok.has_template:
        raise ValueError(f"{a.model} has no chat template: give an instruct version, or put a chat_template into its tokenizer_config.json")
    net.checkpointing = a.checkpointing
    replica = net if DTYPES[a.dtype] == wide else copy.deepcopy(net).to(DTYPES[a.dtype])
    reference = copy.deepcopy(net).requires_grad_(False) if a.kl_beta else None  # on resume: the checkpoint's start, see below
    if reference is not None and checkpoint:
        reference.load_state_dict(load_pretrained(a.model, wide, device)[0].state_dict())
    autocast = torch.autocast(device.split(":")[0], dtype=torch.bfloat16, enabled=a.dtype == "bf16")
    decay = [p for p in net.parameters() if p.dim() >= 2]
    plain = [p for p in net.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=a.weight_decay), dict(params=plain, weight_decay=0.0)], lr=a.lr, betas=(a.beta1, a.beta2))
    if checkpoint:
        load_optimizer(checkpoint, net, optimizer)

    def encode(example):
        ids = tok.chat(example.messages)
        if len(ids) + a.max_new_tokens > net.context:
            raise ValueError(f"row {example.key} of the data has a prompt of {len(ids):,} tokens; with --max-new-tokens {a.max_new_tokens:,} that is over the model's "
                             f"context of {net.context:,}: shorten it, or lower --max-new-tokens")
        return ids

    rows = sorted({key for step in range(first, min(a.steps, first + 4096 // a.prompts + 1)) for key in grpo.batch_keys(len(data), a.prompts, a.seed, step)})
    lengths = [len(encode(data[i])) for i in rows]  # what this run will use, refused before anything is generated

    # -- memory, told and refused early
    c, params = net.config, sum(p.numel() for p in net.parameters())
    token_bytes = PagedCache.bytes_per_token(c.layers, c.kv_heads, c.head_dim, DTYPES[a.dtype])
    longest = max(lengths) + a.max_new_tokens
    pool_tokens = a.kv_tokens or min(a.prompts * (max(lengths) + a.group * (a.max_new_tokens + 256)), int(0.4 * free_memory(device)) // token_bytes)
    one = -(-max(lengths) // 256) + -(-longest // 256) - max(lengths) // 256
    if a.method != "sft" and one * 256 > pool_tokens:
        raise ValueError(f"the longest prompt ({max(lengths):,} tokens) with {a.max_new_tokens:,} new ones may need {one * 256:,} tokens of KV and the pool holds "
                         f"{pool_tokens:,}: raise --kv-tokens or lower --max-new-tokens")
    acts = min(a.micro_tokens + longest, a.prompts * max(1, a.group) * longest) * c.hidden_size * wide.itemsize * (2 * c.layers if a.checkpointing else 18 * c.layers)
    memory = {"weights": params * wide.itemsize, "gradients": params * wide.itemsize, "optimizer": 2 * params * wide.itemsize, "activations (estimate)": acts,
              "logits": 3 * chunk_rows(c.vocab_size) * c.vocab_size * 4, "KV pool": 0 if a.method == "sft" else pool_tokens * token_bytes,
              "replica": 0 if replica is net else params * DTYPES[a.dtype].itemsize, "reference": params * wide.itemsize if reference is not None else 0}
    memory["packed weights"] = 0 if a.method == "sft" else replica.pack()  # while a rollout runs
    replica.unpack()
    held_now = memory["weights"] + memory["replica"] + memory["reference"]
    need, free = sum(memory.values()) - held_now, free_memory(device)
    why = {"auto": f"--device auto, {'a GPU is there' if device.startswith('cuda') else 'no GPU is there'}"}.get(a.device, f"--device {a.device}")
    print(f"device    {device} ({why}): {device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"model     {a.model}: {c.model_type}, {params / 1e6:.1f}M parameters in {str(wide)[6:]}, context {net.context:,}; rollouts and passes in {a.dtype}")
    print(f"attention {'Triton kernels' if device.startswith('cuda') else 'torch, over views of the KV pages'}")
    print(f"data      {a.data}: {len(data):,} rows; prompts of {min(lengths)} to {max(lengths)} tokens" + (f"; evaluated on {min(a.eval_prompts, len(evals))} of {held}" if evals else ""))
    print("memory    " + ", ".join(f"{k} {v / 2**20:,.0f} MiB" for k, v in memory.items() if v) + f"; {free / 2**20:,.0f} MiB free")
    if need > free:
        raise ValueError(f"this run needs about {need / 2**30:.1f} GiB more and {free / 2**30:.1f} GiB are free: lower --micro-tokens, --kv-tokens or --max-new-tokens, or give --checkpointing")

    # -- the run folder, and the constants of the cost model
    out.mkdir(parents=True, exist_ok=True)
    cost = None
    if a.method == "s3r" and a.k == "auto":
        if a.resume and not a.cost:
            cost = Cost.load(out / "cost.json")
        else:
            cost = Cost.load(a.cost) if a.cost else measure_cost(replica, min(64, a.prompts * a.group), longest, a.temperature, a.verify, a.budget, DTYPES[a.dtype], device)
        cost.save(out / "cost.json")
        print(f"cost      {cost.made_on.get('device')}: {cost} (constants in {out}/cost.json)")
    if not checkpoint:
        versions = {"python": sys.version.split()[0], "torch": torch.__version__}
        (out / "run.json").write_text(json.dumps({"flags": vars(a), "versions": versions, "device": device_name(device), "parameters": params}, indent=1))
    board = None
    if a.wandb:
        import wandb
        board = wandb.init(project=a.wandb, dir=str(out), config=vars(a), resume="allow", id=out.name)

    def log(file, **record):
        with open(out / file, "a") as f:
            f.write(json.dumps(record) + "\n")

    def generate(examples, prompts, group, temperature, seed, step, bar):
        """-> responses with text and reward, stats. Evaluation samples from the dense law whatever the method."""
        exact = a.method if a.method in ("ar", "s3r") or step is not None and a.method == "sparse" else "ar"
        with tqdm(total=len(prompts) * group, desc=bar, leave=False, disable=None) as progress:
            responses, stats = rollout(replica, prompts, group, a.max_new_tokens, exact, temperature, seed, a.k if exact == "s3r" else 0, a.budget, a.verify,
                                       kv_tokens=a.kv_tokens, prompt_keys=[e.key for e in examples], step=step, cost=cost, on_group=lambda done: progress.update(len(done)))
        for r in responses:
            r.text = tok.decode([x for x in r.ids if x not in net.stop_ids])
        of = [examples[r.group] for r in responses]
        texts = [e.messages[-1]["content"] for e in of]
        for r, x in zip(responses, grpo.score(reward, texts, [r.text for r in responses], [e.answer for e in of], [e.columns for e in of])):
            r.reward = x
        return responses, stats

    def evaluate(step):
        examples = [evals[i] for i in range(min(a.eval_prompts, len(evals)))]
        t = time.perf_counter()
        responses, _ = generate(examples, [encode(e) for e in examples], 1, a.eval_temperature, a.seed + 1, None, "eval")
        mean = sum(r.reward for r in responses) / len(responses)
        tqdm.write(f"step {step:4d}  eval reward {mean:.3f} on {len(responses)} prompts at temperature {a.eval_temperature:g}, mean length {sum(len(r.ids) for r in responses) / len(responses):.1f}  "
                   f"({time.perf_counter() - t:.1f} s)")
        log("metrics.jsonl", step=step, **{"eval/reward": mean})
        if board:
            board.log({"eval/reward": mean}, step=step)
        return mean

    # -- steps
    before = last = evaluate(0) if evals and not checkpoint else None
    said_why, started = "", time.perf_counter()
    for step in range(first, a.steps):
        t0 = time.perf_counter()
        examples = [data[i] for i in grpo.batch_keys(len(data), a.prompts, a.seed, step)]
        prompts = [encode(e) for e in examples]
        m = {}
        if a.method == "sft":
            pairs = [(p, tok.encode(e.solution) + [tok.eos_id]) for p, e in zip(prompts, examples)]
            weights = advantages = None
            denominator = sum(len(c) for _, c in pairs)
            learn = list(range(len(pairs)))
        else:
            responses, stats = generate(examples, prompts, a.group, a.temperature, a.seed, step, f"step {step + 1}")
            pairs = [(r.prompt_ids, r.ids) for r in responses]
            rewards, groups = torch.tensor([r.reward for r in responses]), [r.group for r in responses]
            advantages = grpo.advantages(rewards, groups, a.advantage_scale)
            for r, x in zip(responses, advantages.tolist()):
                r.advantage = x
            cut = [r.finish == "length" for r in responses]
            n = [len(r.ids) for r in responses]
            std = torch.stack([rewards[[i for i, g in enumerate(groups) if g == x]].std(correction=0) for x in dict.fromkeys(groups)])
            m = {"reward": rewards.mean().item(), "reward_std": std.mean().item(), "frac_reward_zero_std": grpo.frac_zero_std(rewards, groups),
                 "completions/mean_length": sum(n) / len(n), "completions/clipped_ratio": sum(cut) / len(n), "rollout/tok_s": stats["tok_s"],
                 "rollout/seconds": time.perf_counter() - t0, "rollout/tokens": stats["tokens"], "spec/tau": stats["tau"], "spec/accept_rate": stats["accept_rate"], "spec/overlap": stats["overlap"],
                 "spec/k": stats["k"], "kv/offload_bytes": 0, "kv/running": stats["running"]}
            for r in responses:
                log("samples.jsonl", step=step + 1, group=r.group, index=r.index, key=r.key, prompt_ids=r.prompt_ids, ids=r.ids, text=r.text, reward=r.reward, advantage=r.advantage,
                    finish=r.finish, logps=r.logps, **({"sample_logps": r.sample_logps} if r.sample_logps is not r.logps else {}))
            if stats["why"] and a.method == "s3r" and not said_why:
                said_why = stats["why"]
                tqdm.write(f"why       {said_why}")

            # what each token counts for, before the first backward: the denominator belongs to the whole step
            recompute = a.old_logps == "recompute" or a.old_logps == "auto" and a.dtype == "bf16"
            mode = a.is_correction if a.is_correction != "auto" else "token" if recompute or a.method == "sparse" else "none"
            old = [torch.tensor(r.logps) for r in responses]  # the policy's own log-probabilities, as the rollout's dense passes gave them
            if recompute:
                with torch.no_grad():
                    for batch in micro_batches(pairs, a.micro_tokens):
                        parts = packed_logps(net, [pairs[i] for i in batch], a.temperature, autocast)[0].cpu().split([n[i] for i in batch])
                        for i, x in zip(batch, parts):
                            old[i] = x
            w, told = grpo.is_correction(torch.cat(old), torch.cat([torch.tensor(r.sample_logps) for r in responses]), n, mode, a.is_cap)
            m |= told
            weights = [x * (not (a.mask_truncated and t)) for x, t in zip(w.split(n), cut)]
            denominator = grpo.loss_denominator(a.loss, n, a.max_new_tokens, torch.cat(weights))
            learn = [i for i, x in enumerate(advantages.tolist()) if x != 0 or a.kl_beta]  # the rest has no gradient; it stays in the denominator

        t1 = time.perf_counter()
        lr = learning_rate(a, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        sums, total, entropy, gap, tokens = [], 0.0, 0.0, 0.0, 0
        for batch in micro_batches([pairs[i] for i in learn], a.micro_tokens) if denominator > 0 else ():
            batch = [learn[i] for i in batch]
            logps, ent = packed_logps(net, [pairs[i] for i in batch], a.temperature if a.method != "sft" else 1.0, autocast)
            if a.method == "sft":
                loss = -logps.sum() / denominator
            else:
                n_b, dev = [n[i] for i in batch], logps.device
                ref = None
                if reference is not None:
                    with torch.no_grad():
                        ref = packed_logps(reference, [pairs[i] for i in batch], a.temperature, autocast)[0]
                loss, part = grpo.policy_loss(logps, torch.cat([old[i] for i in batch]).to(dev), advantages[batch].to(dev), n_b, denominator, a.loss, a.epsilon, a.epsilon_high,
                                              torch.cat([weights[i] for i in batch]).to(dev), ref, a.kl_beta)
                sums.append(part)
                gap += (logps.detach().cpu() - torch.cat([torch.tensor(responses[i].sample_logps) for i in batch])).abs().sum().item()
            loss.backward()
            total += loss.item()
            entropy += ent.sum().item()
            tokens += len(ent)
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), a.grad_clip or math.inf).item()
        skipped = "" if tokens else "nothing to learn from: every group has equal rewards" if a.method != "sft" else "no tokens"
        if not math.isfinite(norm):
            skipped = f"the gradient is not finite ({norm})"
        if not skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if replica is not net:
            refresh(replica, net)
        m |= {"loss": total, "lr": lr, "entropy": entropy / max(1, tokens), "grad_norm": norm if math.isfinite(norm) else None, "skipped": int(bool(skipped)), "train/seconds": time.perf_counter() - t1,
              "train/tokens": tokens, "seconds": time.perf_counter() - t0}
        if sums:
            m |= grpo.mean_stats(sums) | {"sampling/sampling_logp_difference/mean": gap / tokens}
        log("metrics.jsonl", step=step + 1, **m)
        if board:
            board.log(m, step=step + 1)
        if a.method == "sft":
            if step % 20 == 0 or step + 1 == a.steps:
                tqdm.write(f"step {step + 1:4d}  loss {total:.4f}  grad {norm:7.3f}  lr {lr:.1e}  {m['seconds']:.2f} s")
        else:
            tqdm.write(f"step {step + 1:4d}  reward {m['reward']:.3f}  zero-std {m['frac_reward_zero_std']:.2f}  length {m['completions/mean_length']:6.1f}  cut {m['completions/clipped_ratio']:.2f}  "
                       f"entropy {m['entropy']:.3f}  gap {m.get('sampling/sampling_logp_difference/mean', 0):.1e}  grad {norm:6.3f}  tau {m['spec/tau']:.2f}  k {m['spec/k']:.1f}  {m['rollout/tok_s']:7.0f} tok/s  "
                       f"{m['rollout/seconds']:.1f} + {m['train/seconds']:.1f} s" + (f"  skipped: {skipped}" if skipped else ""))
        if step + 1 == a.steps or a.save_every and (step + 1) % a.save_every == 0:
            saved = save_checkpoint(out, step + 1, net, tok, optimizer)
        if evals and (step + 1 == a.steps or a.eval_every and (step + 1) % a.eval_every == 0):
            last = evaluate(step + 1)
    change = f"; eval reward {before:.3f} -> {last:.3f}" if before is not None else ""
    print(f"done in {time.perf_counter() - started:.0f} s{change}; the model is in {saved}")


@torch.no_grad()
def refresh(replica, net):
    """Put the policy's weights into the rollout replica, in place."""
    for to, source in zip(replica.parameters(), net.parameters()):
        to.copy_(source)


def main():
    try:
        run(flags())
    except (ValueError, FloatingPointError, torch.OutOfMemoryError) as e:
        return refuse(str(e))
    except KeyboardInterrupt:
        print("\nstopped; what was written stands, and --resume goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
