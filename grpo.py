"""Tasks, data, rewards, advantages, losses: the mathematics of GRPO as pure functions on lists and tensors.

A step takes some prompts, samples G responses for each (a *group*), scores every response with a reward r that can be verified, and
turns rewards into advantages by comparing a response with its own group:

    A_i = (r_i - mean of the group) / (std of the group + 1e-4)

Every token t of response i then pushes its log-probability up or down, clipped so that one batch cannot move the policy too far:

    rho_t = exp(logp_t - old_logp_t)        loss = - sum_t w_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) / denominator

w_t corrects for tokens that were sampled from another law than the policy's (1 if they were not). The denominator is where the losses
differ, and it belongs to the whole optimizer step: pass it in, and the gradient does not depend on how the step is cut into
micro-batches or spread over ranks. Tokens are packed, [T] = the tokens of N responses one after another; masks come from lengths alone.

Try it:  python grpo.py                       why exact weights on sparse samples still miss the dense update, enumerated
         python train.py --data chain         also: chain:4, ledger, ledger:8192, questions.jsonl, rows.parquet, openai/gsm8k:main
         pytest tests/test_grpo.py
"""
import functools
import hashlib
import itertools
import json
import math
import random
import re
import runpy
import string
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import torch


# ----------------------------------------------------------------------------------------------------------------------
# built-in tasks: problems made from (seed, index), with the working written out


@dataclass
class Example:
    key: int  # the row in its data set: names the prompt in random streams, so it must be unique within a step
    messages: list  # [{"role": ..., "content": ...}, ...], as tok.chat takes them
    answer: str  # what the reward compares with; may be a whole solution that ends in "#### 4" or \boxed{4}
    columns: dict  # every column of the row, for rewards that need more than the answer
    solution: str  # a worked solution to imitate in a supervised warm-up; "" where the data has none


def chain(rng, size):
    """Up to `size` operations applied from left to right, as on a pocket calculator; running totals stay within 0..99.

    prompt "7 +5 -3 *2 = ?", solution "7+5=12\\n12-3=9\\n9*2=18\\n#### 18": 18 to 92 bytes, 54 on average, with size 10.
    """
    total = rng.randint(1, 20)
    prompt, lines = str(total), []
    for _ in range(rng.randint(2, size)):
        op, n = rng.choice("++--*"), rng.randint(1, 9) if rng.random() < 0.75 else rng.randint(10, 29)
        if op == "*":
            n = rng.randint(2, 3)
        result = total * n if op == "*" else total + n if op == "+" else total - n
        if not 0 <= result <= 99:
            op, result = ("-", total - n) if total >= 50 else ("+", total + n)
        prompt += f" {op}{n}"
        lines.append(f"{total}{op}{n}={result}")
        total = result
    return prompt + " = ?", "\n".join(lines) + f"\n#### {total}", str(total)


def ledger(rng, size):
    """About `size` bytes of named numbers, two or three of which are to be looked up and added: a long context for a short answer.

    prompt "aB=42;q7=17;Zd=30;...;\\nZd+aB=?", solution "Zd=30\\naB=42\\n30+42=72\\n#### 72".
    """
    signs, width = string.ascii_letters + string.digits, 2 if size < 18_000 else 3

    def name(i):  # the i-th of 52 * 62^(width - 1) names: a letter, then letters or digits
        return signs[i % 52] + "".join(signs[i // 52 // 62**j % 62] for j in range(width - 1))

    n = (size - 3 * width - 4) // (width + 4)
    names = [name(i) for i in rng.sample(range(52 * 62 ** (width - 1)), n)]
    values = [rng.randint(10, 49) for _ in names]
    picked = rng.sample(range(n), rng.randint(2, 3))
    prompt = "".join(f"{k}={v};" for k, v in zip(names, values)) + "\n" + "+".join(names[i] for i in picked) + "=?"
    lines, total = [f"{names[i]}={values[i]}" for i in picked], values[picked[0]]
    for i in picked[1:]:
        lines.append(f"{total}+{values[i]}={total + values[i]}")
        total += values[i]
    return prompt, "\n".join(lines) + f"\n#### {total}", str(total)


TASKS = {"chain": (chain, 10, 2, 64), "ledger": (ledger, 2300, 40, 1_000_000)}  # name: maker, its default size, least, greatest


@dataclass
class Task:
    """A list of Examples that stores none: task[i] is a pure function of (name, size, split, seed, i)."""
    name: str
    size: int
    split: str
    seed: int
    system_prompt: str | None = None

    def __len__(self):
        return 100_000 if self.split == "train" else 256

    def __getitem__(self, i):
        i = range(len(self))[i]  # IndexError past the end
        for draw in itertools.count():
            prompt, solution, answer = TASKS[self.name][0](random.Random(f"{self.name}/{self.size}/{self.seed}/{i}/{draw}"), self.size)
            # The text of a problem decides its split (1 in 8 is held out), so no problem is ever in both, whatever the seeds.
            if (hashlib.blake2b(prompt.encode()).digest()[0] % 8 == 0) == (self.split == "heldout"):
                columns = {"question": prompt, "solution": solution, "answer": answer}
                return Example(i, as_messages(prompt, self.system_prompt), answer, columns, solution)


# ----------------------------------------------------------------------------------------------------------------------
# data: jsonl by our own reader, parquet and hub names through `datasets`; and the order in which rows are used

PROMPTS, ANSWERS = ("prompt", "question", "problem"), ("answer", "solution", "target")  # recognised in this order when no flag names a column


def load_data(spec, split="train", prompt_column=None, answer_column=None, system_prompt=None, seed=0):
    """An indexable of Examples. Mistakes in the data are ValueErrors that name the file and the line.

    spec: "chain:4", "ledger", "ledger:8192"   a built-in task and its size; split is train or heldout, seed makes other problems
          "rows.jsonl", "rows.parquet"         a local file (a file is one split: `split` and `seed` do not matter)
          "openai/gsm8k:main"                  a hub data set, its configuration after the colon, and `split`
    The prompt column holds text or a list of messages; the answer column text or a number. GSM8K is read as it is.
    """
    name, _, option = spec.partition(":")
    if name in TASKS:
        _, size, least, greatest = TASKS[name]
        if option and not (re.fullmatch(r"[0-9]{1,9}", option) and least <= int(option) <= greatest):
            raise ValueError(f"{spec!r}: the size of task {name} is a number from {least} to {greatest}, {size} if left out")
        if split not in ("train", "heldout"):
            raise ValueError(f"task {name} has no split {split!r}: choose train or heldout")
        return Task(name, int(option or size), split, seed, system_prompt)
    if spec.endswith((".jsonl", ".json", ".parquet")) and not Path(spec).is_file():
        raise ValueError(f"{spec} is not a file: check the path given as data")
    if spec.endswith((".jsonl", ".json")):
        rows = read_jsonl(spec)
    elif spec.endswith(".parquet") or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        rows = read_rows(spec, name, option or None, split)
    else:
        raise ValueError(f"cannot tell what data {spec!r} is: give a task ({', '.join(TASKS)}), a .jsonl or .parquet file, or a hub name as owner/name:config")
    examples = [as_example(i, row, where, prompt_column, answer_column, system_prompt) for i, (where, row) in enumerate(rows)]
    if not examples:
        raise ValueError(f"{spec} holds no rows: a data set needs at least one")
    return examples


def read_jsonl(path):
    """Yield (where, row) for each line that is not blank; `where` is "file line n", for messages. Only \\n ends a line."""
    with open(path, "rb") as file:
        for n, line in enumerate(file, 1):
            where = f"{path} line {n}"
            try:
                line = line.decode("utf-8-sig").strip()
                row = json.loads(line) if line else {}
            except (ValueError, RecursionError) as error:  # ValueError: broken json, bytes that are not utf-8, numbers of over 4,300 digits
                raise ValueError(f"{where} cannot be read as json ({error}): each line must be one object") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not an object but {type(row).__name__}: write it as {{\"prompt\": ..., \"answer\": ...}}")
            if line:
                yield where, row


def read_rows(spec, name, config, split):
    """Yield (where, row) for each row of a parquet file, or of a hub data set; both need the `datasets` package (which brings pyarrow)."""
    try:
        if spec.endswith(".parquet"):
            from pyarrow import parquet
            rows = parquet.read_table(spec).to_pylist()
        else:
            from datasets import load_dataset
            rows = load_dataset(name, config, split=split)
    except ImportError as error:
        raise ValueError(f"reading {spec} needs a package ({error}): pip install datasets") from None
    except Exception as error:  # a broken file, no network, no such name, configuration or split: there is a class for each
        raise ValueError(f"{spec} cannot be read: {shown(error)}") from error
    yield from ((f"{spec} row {i}", row) for i, row in enumerate(rows))


def shown(value):
    return ascii(value)[:160]


def as_example(key, row, where, prompt_column, answer_column, system_prompt):
    """One row (a dict) as an Example; `where` names it in errors."""
    messages = as_messages(pick(row, prompt_column, PROMPTS, "prompt", where), system_prompt, where)
    answer = pick(row, answer_column, ANSWERS, "answer", where)
    if type(answer) in (int, float) and abs(answer) < math.inf:
        answer = format(Decimal(repr(answer)), "f")  # 1e-07 -> 0.0000001
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"{where}: the answer must be text or a number, not {shown(answer)}")
    solution = answer if "####" in answer else row.get("solution")
    return Example(key, messages, answer, row, solution if isinstance(solution, str) else "")


def pick(row, column, usual, what, where):
    """row[column], or the first of the usual columns where no flag names one."""
    found = [c for c in ((column,) if column else usual) if c in row]
    if not found:
        wanted = f"the {what} column {column!r}" if column else f"any {what} column ({', '.join(usual)})"
        raise ValueError(f"{where} lacks {wanted}; it has {', '.join(row) or 'none'}: name one with --{what}-column")
    return row[found[0]]


def as_messages(prompt, system_prompt=None, where="the prompt"):
    """A prompt (text, or a list of messages) as messages; the system prompt goes first unless the row brings its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: the prompt must be text or a list of messages, not {shown(prompt)}")
    for message in messages:
        role, text = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(text, str) or not text.strip() or re.search("[\ud800-\udfff]", text):
            raise ValueError(f"{where}: each message must have a `role` and a `content` of text (not blank, no half surrogate pairs), not {shown(message)}")
    return messages if messages[0]["role"] == "system" or not system_prompt else [{"role": "system", "content": system_prompt}] + messages


def batch_keys(n_rows, prompts_per_step, seed, step):
    """The rows that a step (0, 1, ...) trains on: a pure function of its arguments, so a resumed run goes on where it stopped.

    Each epoch is its own permutation, cut into whole batches (the rest, fewer than a batch, sits that epoch out): no row comes twice
    in a step, where its responses would draw the same random numbers.   batch_keys(5, 2, 0, step): steps 0, 1 are epoch 0; 2, 3 epoch 1.
    """
    if not 1 <= prompts_per_step <= n_rows:
        raise ValueError(f"{prompts_per_step} prompts a step from a data set of {n_rows} rows: ask for 1 to {n_rows}")
    epoch, batch = divmod(step, n_rows // prompts_per_step)
    return list(permutation(n_rows, seed, epoch)[batch * prompts_per_step : (batch + 1) * prompts_per_step])


@functools.lru_cache(maxsize=4)
def permutation(n, seed, epoch):
    rows = list(range(n))
    random.Random(f"rows/{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


# ----------------------------------------------------------------------------------------------------------------------
# rewards: find the final answer, read it as an exact number, compare. Linear in the length of the text; nothing is evaluated


def final_answer(text):
    r"""The final answer a text commits to, or None: what follows its last #### (to the end of that line), or is in its last balanced \boxed{...}.

    Where there are both, the one that stands later counts ("#### Step 2" may be a heading). Text without either has no final answer and
    is never searched for numbers: "the answer is not 18" earns nothing.   r"so \boxed{\frac{1}{2}}." -> r"\frac{1}{2}";  r"\boxed{\frac{1}{2}" -> None
    """
    start = max((marker.start() for marker in re.finditer(r"(?<!#)####(?!#)", text)), default=-1)
    answer = text[start + 4 :].lstrip().split("\n", 1)[0].strip() if start >= 0 else None
    open_braces = []  # (start of the \boxed or -1, start of the content) of each brace that is not closed yet
    for token in re.finditer(r"\\[\\{}]|\\boxed\s{0,8}\{|[{}]", text):  # \\, \{ and \} are text, not braces
        if token[0] == "}" and open_braces:
            box, content = open_braces.pop()
            if box > start:
                start, answer = box, text[content : token.start()].strip()
        elif token[0] == "{" or token[0].startswith(r"\boxed"):
            open_braces.append((token.start() if len(token[0]) > 1 else -1, token.end()))
    return answer or None


DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
UNIT = (r"(?:%|°\s?[CF]?|(?:mm|cm|m|km|in|ft|yd|mi|mg|g|kg|lbs?|oz|ml|l|s|sec|min|h|hrs?|mph|km/h|am|pm)\b\.?(?:\^?[23])?"
        r"|\s(?!(?:and|plus|minus|times|over|point|half|divided|squared|cubed|factorial|dozen|hundred|thousand|(?:m|b|tr)illion)(?:s|ths?)?\b)[a-z]{3,}[a-z ./-]*)")
NUMBER = re.compile(rf"(?P<sign>[-+]?)\s?(?:(?P<whole>[0-9]+)\s(?=[0-9]+\s?/))?(?P<over>{DECIMAL})(?:\s?/\s?(?P<under>-?{DECIMAL}))?\s?{UNIT}?", re.IGNORECASE)
PLAIN = str.maketrans({**dict.fromkeys("−–—‒﹣－", "-"), **dict.fromkeys("$€£¥\u00a0\u2009\u202f", " "), **dict.fromkeys("\u200b\ufeff\x00", "")})
LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r"\{,\}", ","), (r"\\%", "%"), (r"\^(?:\\circ|\{\\circ\})", "°"), (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s?\{([^{}]*)\}", r" \1"),
    (r"\\left|\\right|\\[,!;:()\[\]]|\\(?= )", ""), (r"\\[dt]frac", r"\\frac"), (r"\\frac\s?([0-9])\s?([0-9])", r" \1/\2"),
    (rf"\\frac\s?\{{\s?(-?{DECIMAL})\s?\}}\s?\{{\s?(-?{DECIMAL})\s?\}}", r" \1/\2"), (r"\s+", " "))]


def tidy(answer):
    r"""An answer without its dress: currency signs, \text{}, \( \), ** **, LaTeX spaces, closing punctuation; \frac{1}{2} becomes 1/2."""
    answer = answer.translate(PLAIN)
    for pattern, new in LATEX:
        answer = pattern.sub(new, answer)
    return answer.strip(" *_`").rstrip(" .,;:!*_`")


def number(answer):
    r"""An answer as an exact Fraction, or None if it is not a plain number.

    Read: 18, 18.00, $1,234.50, -3/4, \frac{1}{2}, 1 1/2, 004 (is 4), 50% (is 50), "18 dollars", 12cm, a minus sign in any font.
    Not read: powers and exponents (9**9**9, 1e5), sums, lists, "5x", "2 million", 1,23. Answers of over 1,000 characters are not numbers.
    """
    m = NUMBER.fullmatch(tidy(answer)) if len(answer) <= 1000 else None
    if not m:
        return None
    over, under = (Fraction(x.replace(",", "").rstrip(".")) for x in (m["over"], m["under"] or "1"))
    return None if under == 0 else (-1 if m["sign"] == "-" else 1) * (int(m["whole"] or 0) + over / under)


def same_answer(a, b):
    """Equal as exact numbers; where either is not a number, as text but for case, dress and spaces. None is never right."""
    if a is None or b is None:
        return False
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return x == y or ("%" in a) != ("%" in b) and x == (100 * y if "%" in a else y / 100)  # 50% also is 1/2
    a, b = (re.sub(r" (?![0-9])|(?<![0-9]) ", "", tidy(s).casefold()) for s in (a, b))  # "1 2" is not "12"
    return a == b != ""


def answer_reward(completion, answer):
    """1.0 if the completion's final answer equals the gold answer (whose own #### or box is looked for first), else 0.0."""
    return float(same_answer(final_answer(completion), final_answer(answer) or answer))


def exact_answer(prompts, completions, answers, columns):
    """The default reward, and the form of every other: four lists, an entry a completion (columns: the row's dict), to a list of numbers."""
    return [answer_reward(c, a) for c, a in zip(completions, answers)]


def load_reward(spec):
    """ "exact_answer", or "file.py:name": a function of one's own (prompts, completions, answers, columns) -> list of numbers."""
    file, _, name = spec.rpartition(":")
    if spec == "exact_answer":
        return exact_answer
    if not Path(file).is_file() or not callable(function := runpy.run_path(file).get(name)):
        raise ValueError(f"no reward function {spec!r}: give exact_answer, or file.py:name for a function that the file defines")
    return function


def score(reward, prompts, completions, answers, columns):
    """Rewards [N] as floats; refuses anything but one finite number a completion, and names the function."""
    name = getattr(reward, "__name__", str(reward))
    try:
        rewards = reward(prompts, completions, answers, columns)
    except KeyError as error:
        raise ValueError(f"reward {name} asks for {error}, which the data lacks: its columns are {', '.join(columns[0]) if columns else 'none'}") from error
    try:
        r = torch.as_tensor(rewards, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):  # None or text among them, or lists of unequal lengths
        r = torch.tensor(math.nan)
    if r.shape != (len(completions),) or not r.isfinite().all():
        raise ValueError(f"reward {name} returned {shown(rewards)} for {len(completions)} completions: it must return a list of one finite number each")
    return r.tolist()


# ----------------------------------------------------------------------------------------------------------------------
# advantages


def by_group(rewards, groups):
    """-> rewards as float64 [N], and the rows of each group, {id: [i, ...]}: ids tell groups apart, not the order."""
    r = torch.as_tensor(rewards, dtype=torch.float64).detach()
    groups = groups.tolist() if torch.is_tensor(groups) else list(groups)
    if r.shape != (len(groups),) or not r.isfinite().all():
        raise ValueError(f"{len(groups)} group ids for rewards {shown(r.tolist())}: give one id for each reward, and finite rewards")
    rows = {}
    for i, g in enumerate(groups):
        rows.setdefault(g, []).append(i)
    return r, rows


def advantages(rewards, groups, scale="group"):
    """How much better each response did than its group: rewards [N], group ids [N] (any hashables, in any order) -> advantages [N].

    scale: "group" divides by the group's std + 1e-4 (GRPO), "batch" by the std of all rewards + 1e-4, "none" by nothing (Dr. GRPO).
    std is the population's. Equal rewards give exactly 0, and so does a group of one, which therefore teaches nothing.
        advantages([1, 0, 0, 1], [7, 7, 7, 7])                 -> [0.9998, -0.9998, -0.9998, 0.9998]     mean .5, std .5
        advantages([1, 3, 0, 3], ["a", "b", "a", "b"], "none") -> [0.5, 0, -0.5, 0]
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"there is no advantage scale {scale!r}: choose group, batch or none")
    r, rows = by_group(rewards, groups)
    a, whole = torch.zeros_like(r), 1.0 if scale == "none" else r.std(correction=0) + 1e-4
    for i in rows.values():
        if r[i].min() < r[i].max():
            a[i] = (r[i] - r[i].mean()) / (r[i].std(correction=0) + 1e-4 if scale == "group" else whole)
    return a if torch.is_tensor(rewards) and rewards.dtype == torch.float64 else a.float()


def frac_zero_std(rewards, groups):
    """The share of groups whose rewards are all equal: they carry no signal. At 1.0 the whole step has none."""
    r, rows = by_group(rewards, groups)
    return sum((r[i] == r[i[0]]).all().item() for i in rows.values()) / max(1, len(rows))


# ----------------------------------------------------------------------------------------------------------------------
# packed tokens


def completion_index(prompt_lens, completion_lens):
    """Rows of the packed hidden states [T, H] whose logits judge the completion tokens: the token at t is predicted at t - 1.

    Sequences are packed prompt, completion, prompt, completion, ... With prompts of 2 and 1 tokens, completions of 3 and 2:
        position   0  1  2  3  4 | 5  6  7
        token      p  p  a  b  c | q  d  e         completion_index([2, 1], [3, 2]) -> [1, 2, 3, 5, 6]   for   [a, b, c, d, e]
    """
    p, c = torch.as_tensor(prompt_lens, dtype=torch.long), torch.as_tensor(completion_lens, dtype=torch.long)
    if p.shape != c.shape or (p < 1).any() or (c < 0).any():
        raise ValueError("prompt and completion lengths must pair up, and every prompt needs a token: the first completion token is judged there")
    first = (p + c).cumsum(0) - c - 1  # [N] the last prompt token of each sequence
    return per_token(first - (c.cumsum(0) - c), c) + torch.arange(int(c.sum()))  # [sum c]


def per_token(values, lengths):
    """[N] -> [T]: each value once for each token of its response.   per_token([a, b], [1, 3]) -> [a, b, b, b]"""
    return torch.repeat_interleave(values, torch.as_tensor(lengths, dtype=torch.long, device=values.device))


def per_sequence(x, lengths):
    """[T] -> [N]: the sum over the tokens of each response."""
    owner = per_token(torch.arange(len(lengths), device=x.device), lengths)
    return x.new_zeros(len(lengths)).index_add(0, owner, x)


# ----------------------------------------------------------------------------------------------------------------------
# losses, under TRL's names
#
#   dapo      sum over tokens / tokens of the step           every token counts the same              (DAPO, arXiv 2503.14476)
#   grpo      mean over tokens, sum / responses of the step  a token of a long response counts less   (DeepSeekMath, 2402.03300)
#   dr_grpo   sum over tokens / (responses x max length)     a constant: no length bias               (Dr. GRPO, 2503.20783)
#   gspo      as grpo, with one ratio for a whole response: exp(mean log-ratio of its tokens)         (GSPO, 2507.18071)

LOSSES = ("dapo", "grpo", "dr_grpo", "gspo")


def loss_denominator(loss, lengths, max_length=None, is_weights=None):
    """What these responses add to the denominator of their optimizer step: sum it over micro-batches and ranks *before* the first backward.

    Tokens whose weight is 0 (masked by `is_correction`, or by the caller) are left out, and so is a response with no token left.
    0 means that nothing is left to learn from: skip the step.
        lengths [1, 9]:  dapo 10 tokens,  grpo and gspo 2 responses,  dr_grpo 2 x max_length
    In two micro-batches [1] and [9] a dapo denominator of 10 gives each token 1/10, as in one; with 1 and 9 the lone token would weigh 9 times too much.
    """
    if loss not in LOSSES:
        raise ValueError(f"there is no loss {loss!r}: choose from {', '.join(LOSSES)}")
    if loss == "dr_grpo" and not max_length:
        raise ValueError("the dr_grpo loss divides by a constant length: give max_length, the greatest number of new tokens")
    kept = torch.as_tensor(lengths, dtype=torch.long) if is_weights is None else per_sequence((is_weights > 0).long(), lengths)  # [N] tokens that count
    return float(kept.sum() if loss == "dapo" else (kept > 0).sum() * (max_length if loss == "dr_grpo" else 1))


def policy_loss(logps, old_logps, advantages, lengths, denominator, loss="dapo", epsilon_low=0.2, epsilon_high=0.28, is_weights=None, ref_logps=None, beta=0.0):
    """The loss of one micro-batch, to be summed over the step, and the sums that `mean_stats` turns into metrics.

    logps [T] log-probabilities under the policy being trained (temperature applied), with grad; old_logps [T] under the policy that the
    ratio is against, or None for logps itself (exact when a batch is used for one update); advantages [N]; lengths [N], summing to T;
    denominator: `loss_denominator` summed over the whole step; is_weights [T] from `is_correction`; ref_logps [T] with beta > 0 adds
    beta x KL to a reference policy (the k3 estimator, never negative). For gspo epsilons of about 3e-4 and 4e-4 are usual.
    On-policy the value is near 0 by construction (advantages sum to 0 in a group); the gradient is not.
    """
    if loss not in LOSSES:
        raise ValueError(f"there is no loss {loss!r}: choose from {', '.join(LOSSES)}")
    if not denominator > 0:
        raise ValueError(f"the loss denominator is {denominator}: no token of the step counts, so skip the step")
    if int(sum(lengths)) != len(logps) or len(lengths) != len(advantages):
        raise ValueError(f"{len(lengths)} lengths that sum to {int(sum(lengths))} do not fit {len(logps)} tokens and {len(advantages)} advantages")
    logps = logps.to(torch.promote_types(logps.dtype, torch.float32))
    old_logps = logps.detach() if old_logps is None else old_logps.detach()
    weight = torch.ones_like(logps) if is_weights is None else is_weights.detach().to(logps.dtype)  # [T]
    kept = (weight > 0).to(logps.dtype)  # [T]
    kept_in = per_sequence(kept, lengths).clamp(min=1)  # [N] tokens of each response that count
    log_ratio = (logps - old_logps).clamp(-20, 20)  # [T]; past e^20 only overflow would be left
    if loss == "gspo":
        log_ratio = per_token(per_sequence(log_ratio * kept, lengths) / kept_in, lengths)  # [T], the same all over a response
    ratio, a = log_ratio.exp(), per_token(advantages.to(logps), lengths)  # [T], [T]
    token_loss = -weight * torch.minimum(ratio * a, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * a)  # [T]
    kl = torch.zeros_like(logps)
    if beta:
        gap = (ref_logps.detach() - logps).clamp(-20, 20)
        kl = gap.exp() - gap - 1
        token_loss = token_loss + beta * kl * kept
    if loss in ("grpo", "gspo"):
        token_loss = token_loss / per_token(kept_in, lengths)
    with torch.no_grad():
        sums = {
            "tokens": kept.sum(),
            "clip_ratio/low_mean": (kept * ((ratio < 1 - epsilon_low) & (a < 0))).sum(),
            "clip_ratio/high_mean": (kept * ((ratio > 1 + epsilon_high) & (a > 0))).sum(),
            "ratio/mean": (kept * ratio).sum(),
            "ratio/max": (kept * ratio).max(),
            "approx_kl": (kept * (ratio - 1 - log_ratio)).sum(),  # of the old policy to this one
            "kl": (kept * kl).sum(),  # of this one to the reference
        }
    return token_loss.sum() / denominator, sums


def mean_stats(parts):
    """The sums of all micro-batches (or ranks) of a step as means over its tokens, a dict of floats."""
    total = {k: torch.stack([p[k].double() for p in parts]) for k in parts[0]}
    tokens = total.pop("tokens").sum().clamp(min=1)
    return {k: (v.max() if k.endswith("max") else v.sum() / tokens).item() for k, v in total.items()}


def is_correction(dense_logps, sample_logps, lengths, mode="token", cap=2.0):
    """Weights [T] for tokens sampled from another law (sparse attention, another dtype) than the one being trained, and a dict of metrics.

    dense_logps, sample_logps [T]: log-probabilities of the sampled tokens under the law trained and the law sampled from. With
    w = exp(dense - sample) of a token, or the product of these over its response:
        none            1
        token           min(w, cap)                    truncated importance sampling
        sequence        min(w of the response, cap)    the exact weight of a response, but for the cap
        token-mask      w, or 0 where w > cap          0 leaves the token out of loss and denominator alike
        sequence-mask   w of the response, or 0 where it is > cap
    No mode gives the dense update in general: an advantage also depends on the other responses of its group (`group_bias_table`).
    """
    if mode not in ("none", "token", "sequence", "token-mask", "sequence-mask"):
        raise ValueError(f"there is no importance correction {mode!r}: choose none, token, sequence, token-mask or sequence-mask")
    if not cap >= 1:
        raise ValueError(f"an importance cap of {cap} would shrink or drop tokens that are on-policy: give at least 1")
    gap = dense_logps.detach().double() - sample_logps.detach().double()  # [T]
    log_w = per_token(per_sequence(gap, lengths), lengths) if mode.startswith("sequence") else gap
    w = log_w.clamp(-20, 20).exp()  # [T], never 0: a weight of 0 means masked
    metrics = {"sampling/sampling_logp_difference/mean": gap.abs().mean(), "sampling/sampling_logp_difference/max": gap.abs().max(),
               "sampling/importance_sampling_ratio/mean": w.mean(), "sampling/importance_sampling_ratio/min": w.min(),
               "sampling/importance_sampling_ratio/max": w.max(), "sampling/over_cap": (w > cap).double().mean()}  # the share that a cap or mask would touch
    w = torch.ones_like(w) if mode == "none" else w.where(w <= cap, 0.0) if mode.endswith("mask") else w.clamp(max=cap)
    return w.to(torch.promote_types(dense_logps.dtype, torch.float32)), {k: v.item() for k, v in metrics.items()}


# ----------------------------------------------------------------------------------------------------------------------
# the group bias: exact weights on sparse samples do not give the dense update


def group_update(sampled, dense, rewards, G, scale="group", weighting="none"):
    """The expected GRPO update E[(1/G) sum_i w_i A_i grad log d(y_i)] of a softmax policy d over R responses, by enumerating all R^G groups.

    sampled, dense [R]: the laws that the group is drawn from and that is trained; rewards [R]. -> update of the R logits, float64.
    weighting: "none"; "response" w_i = d(y_i) / m(y_i); "normalised" the same, divided by its mean in the group; "group" w_i = prod_j d(y_j) / m(y_j).
    """
    d, m, r = (torch.as_tensor(x, dtype=torch.float64) for x in (dense, sampled, rewards))
    y = torch.cartesian_prod(*[torch.arange(len(d))] * G).view(-1, G)  # [R^G, G] every group
    a = advantages(r[y].flatten(), torch.arange(len(y)).repeat_interleave(G), scale).view(-1, G)
    w = (d / m)[y]
    w = {"none": torch.ones_like(w), "response": w, "normalised": w / w.mean(1, keepdim=True), "group": w.prod(1, keepdim=True).expand_as(w)}[weighting]
    grads = torch.eye(len(d), dtype=torch.float64) - d  # [R, R] row y: grad of log d(y) by the logits
    return torch.einsum("n,ng,ngr->r", m[y].prod(1), w * a, grads[y]) / G


def group_bias_table():
    """How faithful each weighting is to the update that dense sampling would give: rows of (G, dense, sampled, rewards, scale, weighting, size, cosine).

    A response weight d/m puts response i itself under d, but its advantage still compares it with mates drawn from m. With a mean
    baseline alone the mates drop out on average (size 1); divided by the group's std they do not: not in size, and with three rewards
    not in direction. Only the weight of the whole group is exact, at a variance that multiplies with G. Sampling from d has neither.
    """
    binary = [(8, (0.5, 0.5), (0.3, 0.7), "none"), (8, (0.5, 0.5), (0.3, 0.7), "group"), (8, (0.2, 0.8), (0.1, 0.9), "group"),
              (8, (0.1, 0.9), (0.3, 0.7), "group"), (4, (0.1, 0.9), (0.3, 0.7), "group")]
    cases = [(G, d, m, (1.0, 0.0), scale) for G, d, m, scale in binary] + [(4, (0.40, 0.35, 0.25), (0.70, 0.20, 0.10), (0.0, 0.5, 1.0), "group")]
    rows = []
    for G, d, m, r, scale in cases:
        true = group_update(d, d, r, G, scale)
        for weighting in ("none", "response", "normalised", "group"):
            u = group_update(m, d, r, G, scale, weighting)
            rows.append((G, d, m, r, scale, weighting, (u @ true / (true @ true)).item(), torch.cosine_similarity(u, true, dim=0).item()))
    return rows


if __name__ == "__main__":
    print("The expected GRPO update when groups are sampled from m and trained towards d, against sampling from d (1.000 = faithful).\n")
    print(f"{'G':>2}  {'d':18} {'m':18} {'rewards':16} {'scale':6} {'weights':11} {'size':>6} {'cosine':>7}")
    for G, d, m, r, scale, weighting, size, cosine in group_bias_table():
        print(f"{G:2}  {str(d):18} {str(m):18} {str(r):16} {scale:6} {weighting:11} {size:6.3f} {cosine:7.3f}")
