"""Tasks, data, rewards, advantages and losses, against tables and naive loops.    pytest tests/test_grpo.py"""
import json
import math
import random
import re
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import grpo

DATA = Path(__file__).resolve().parent.parent / "assets" / "data"


# ----------------------------------------------------------------------------------------------------------------------
# tasks


@pytest.mark.parametrize("spec", ["chain", "chain:2", "ledger:300"])
def test_task_is_a_pure_function_and_its_solutions_are_right(spec):
    train, again, other = (grpo.load_data(spec, seed=s) for s in (0, 0, 1))
    assert [train[i] for i in (7, 3)] == [again[i] for i in (7, 3)] and train[0].messages != other[0].messages
    for i in range(200):
        e = train[i]
        assert e.key == i and e.messages == [{"role": "user", "content": e.columns["question"]}]
        assert grpo.answer_reward(e.solution, e.answer) == 1 and grpo.answer_reward(e.solution + "1", e.answer) == 0
        for a, op, b, c in re.findall(r"^(\d+)([-+*])(\d+)=(\d+)$", e.solution, re.M):
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op] == int(c)


def test_chain_applies_the_prompts_operations_from_left_to_right():
    task = grpo.load_data("chain")
    lengths = []
    for i in range(300):
        prompt, (_, *steps) = task[i].columns["question"], [None, *task[i].solution.split("\n")]
        first, *ops = prompt.removesuffix(" = ?").split(" ")
        total = int(first)
        for op, line in zip(ops, steps):
            before, total = total, {"+": total + int(op[1:]), "-": total - int(op[1:]), "*": total * int(op[1:])}[op[0]]
            assert line == f"{before}{op}={total}" and 0 <= total <= 99
        assert steps[len(ops):] == [f"#### {total}"] and 2 <= len(ops) <= 10
        lengths.append(len(task[i].solution))
    assert 18 <= min(lengths) and max(lengths) <= 100


def test_ledger_fills_its_context_and_asks_for_what_is_in_it():
    for size in (40, 2300, 20_000):
        e = grpo.load_data(f"ledger:{size}")[5]
        table, asked = e.columns["question"].split("\n")
        entries = dict(x.split("=") for x in table.rstrip(";").split(";"))
        assert len(entries) == table.count(";"), "names are unique"
        assert sum(int(entries[name]) for name in asked.removesuffix("=?").split("+")) == int(e.answer)
        assert size - 12 <= len(e.columns["question"]) <= size
    assert len(grpo.load_data("ledger")[0].columns["question"]) > 2048


def test_splits_are_disjoint_whatever_the_seeds():
    train = {task[i].messages[0]["content"] for task in (grpo.load_data("chain:2", seed=s) for s in (0, 1)) for i in range(3000)}
    held = grpo.load_data("chain:2", "heldout")
    held = [held[i].messages[0]["content"] for i in range(len(held))]
    assert len(held) == 256 and not train & set(held)
    with pytest.raises(IndexError):
        grpo.load_data("chain")[100_000]


@pytest.mark.parametrize("spec, split, words", [("chain:1", "train", "from 2 to 64"), ("chain:x", "train", "from 2 to 64"),
                                                ("ledger:2000000", "train", "40 to 1000000"),
                                                ("chain", "test", "choose train or heldout"), ("chian", "train", "cannot tell what data 'chian' is")])
def test_task_mistakes(spec, split, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        grpo.load_data(spec, split)


# ----------------------------------------------------------------------------------------------------------------------
# data


def write(path, *rows):
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows))
    return str(path)


def test_jsonl_of_any_columns(tmp_path):
    first = b"\xef\xbb\xbf" + b'{"question": "1+1?", "answer": 2, "source": "x"}'
    path = write(tmp_path / "a.jsonl", first, b"", {"question": "line\u2028separator", "answer": 0.5}, b" ")
    a, b = grpo.load_data(path)
    assert (a.key, a.messages, a.answer, a.columns["source"]) == (0, [{"role": "user", "content": "1+1?"}], "2", "x")
    assert (b.key, b.messages[0]["content"], b.answer) == (1, "line\u2028separator", "0.5")
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "own"}
    path = write(tmp_path / "b.jsonl", {"q": [user], "gold": 1e-7}, {"q": [system, user], "gold": "yes"})
    a, b = grpo.load_data(path, prompt_column="q", answer_column="gold", system_prompt="Be brief.")
    assert [m["content"] for m in a.messages] == ["Be brief.", "hi"] and a.answer == "0.0000001"
    assert [m["content"] for m in b.messages] == ["own", "hi"], "a row's own system prompt stays the only one"


def test_gsm8k_rows_are_read_as_they_are(tmp_path):
    gold = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,024"
    (e,) = grpo.load_data(write(tmp_path / "g.jsonl", {"question": "How many?", "answer": gold}))
    assert e.answer == e.solution == gold and grpo.answer_reward("... so \\boxed{1024}", e.answer) == 1 and grpo.answer_reward("#### 24", e.answer) == 0
    (e,) = grpo.load_data(write(tmp_path / "m.jsonl", {"problem": "How many?", "answer": "3", "solution": "It is \\boxed{3}."}))
    assert e.answer == "3" and e.solution == "It is \\boxed{3}."


GOOD = {"prompt": "1+1?", "answer": "2"}


@pytest.mark.parametrize("row, words", [
    (b'{"prompt": ', "cannot be read as json"), (b'{"prompt": "\xff"}', "cannot be read as json"), (b"[" * 100_000, "cannot be read as json"),
    (b"[1]", "not an object but list"),
    (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "cannot be read as json"), (b"null", "not an object but NoneType"),
    ({"text": "a", "answer": "b"}, "lacks any prompt column (prompt, question, problem); it has text, answer: name one with --prompt-column"),
    ({"prompt": "a"}, "lacks any answer column"), ({"prompt": "  ", "answer": "1"}, "not blank"),
    ({"prompt": "\ud800", "answer": "1"}, "half surrogate"),
    ({"prompt": [], "answer": "1"}, "text or a list of messages"), ({"prompt": ["a"], "answer": "1"}, "`role`"),
    ({"prompt": [{"role": "user"}], "answer": "1"}, "`content`"),
    ({"prompt": "a", "answer": None}, "the answer must be text or a number"), ({"prompt": "a", "answer": True}, "text or a number"),
    ({"prompt": "a", "answer": math.nan}, "text or a number"),
])
def test_bad_rows_name_file_and_line(tmp_path, row, words):
    path = write(tmp_path / "bad.jsonl", GOOD, b"", row)
    with pytest.raises(ValueError) as error:
        grpo.load_data(path)
    assert words in str(error.value) and f"{path} line 3" in str(error.value) and "\n" not in str(error.value)


def test_missing_named_column_missing_file_empty_file(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    for kwargs, words in ((dict(prompt_column="q"), "line 1 lacks the prompt column 'q'; it has prompt, answer"),
                          (dict(answer_column="gold"), "name one with --answer-column")):
        with pytest.raises(ValueError, match=words):
            grpo.load_data(path, **kwargs)
    for name in ("nowhere.jsonl", "nowhere.parquet"):
        with pytest.raises(ValueError, match=f"{name} is not a file"):
            grpo.load_data(name)
    with pytest.raises(ValueError, match="holds no rows"):
        grpo.load_data(write(tmp_path / "empty.jsonl", b"\n"))


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"},
                                                   {"prompt": [{"role": "user", "content": "1+2?"}], "solution": None}]), path)
    with pytest.raises(ValueError, match="a.parquet row 1: the answer must be"):
        grpo.load_data(str(path))
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "1+1?", "answer": 2}]), path)
    (e,) = grpo.load_data(str(path))
    assert (e.messages[0]["content"], e.answer, e.columns) == ("1+1?", "2", {"question": "1+1?", "answer": 2})
    path.write_bytes(b"PAR1 not")
    with pytest.raises(ValueError, match="a.parquet cannot be read"):
        grpo.load_data(str(path))


def test_hub_names_without_a_network(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            if name != "openai/gsm8k":
                raise ConnectionError("no route\nto the hub")
            assert (config, split) == ("main", "test")
            return [{"question": "1+1?", "answer": "#### 2"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert grpo.load_data("openai/gsm8k:main", "test")[0].answer == "#### 2"
    with pytest.raises(ValueError, match="no/where cannot be read: .*no route") as error:
        grpo.load_data("no/where")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="openai/gsm8k:main needs a package .*: pip install datasets"):
        grpo.load_data("openai/gsm8k:main")


def test_the_questions_that_come_with_it():
    train, held = (grpo.load_data(str(DATA / name)) for name in ("arithmetic.jsonl", "arithmetic-heldout.jsonl"))
    assert (len(train), len(held)) == (64, 32) and not {e.messages[0]["content"] for e in train} & {e.messages[0]["content"] for e in held}
    for e in train + held:
        assert e.solution == e.answer and grpo.number(grpo.final_answer(e.answer)) is not None
        a, op, b, c = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", e.answer)[-1]
        a, b = Fraction(a), Fraction(b)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op] == int(c) == grpo.number(grpo.final_answer(e.answer))


def test_batch_keys_are_pure_and_cover_each_epoch():
    keys = [grpo.batch_keys(10, 3, 5, step) for step in range(9)]
    grpo.permutation.cache_clear()
    assert [grpo.batch_keys(10, 3, 5, step) for step in (8, 2, 0)] == [keys[8], keys[2], keys[0]], "a resumed run goes on where it stopped"
    for epoch in (keys[:3], keys[3:6], keys[6:]):
        rows = sum(epoch, [])
        assert len(set(rows)) == 9 and set(rows) <= set(range(10)), "no row twice in a step or an epoch"
    assert keys[:3] != keys[3:6] and keys != [grpo.batch_keys(10, 3, 6, step) for step in range(9)]
    assert sorted(grpo.batch_keys(4, 4, 0, 7)) == [0, 1, 2, 3]
    for prompts in (0, 11):
        with pytest.raises(ValueError, match="10 rows"):
            grpo.batch_keys(10, prompts, 0, 0)


# ----------------------------------------------------------------------------------------------------------------------
# rewards


@pytest.mark.parametrize("text, answer", [
    ("#### 18", "18"), ("####18", "18"), ("a\n#### 18\nb", "18"), ("####\n18", "18"), ("#### 1\n#### 2", "2"), ("##### 18", None),
    ("### 18", None), ("####", None), ("", None),
    ("the answer is not 18", None), (r"\boxed{18}", "18"), (r"\boxed {18}", "18"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\frac{1}{2}", None), (r"\boxed{1} \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\boxed{3}}", "3"), (r"{ \boxed{3}", "3"),
    (r"} \boxed{3}", "3"), (r"\\boxed{3}", None), (r"\boxed{}", None),
    (r"#### Step 2: so \boxed{7}", "7"), (r"\boxed{7}" + "\n#### 8", "8"), ("boxed{3}", None),
])
def test_final_answer(text, answer):
    assert grpo.final_answer(text) == answer


@pytest.mark.parametrize("text, value", [
    ("18", "18"), ("18.00", "18"), ("18.", "18"), ("+18", "18"), ("004", "4"), ("-3", "-3"), ("- 3", "-3"), ("−3", "-3"), ("–3", "-3"),
    ("1,000", "1000"), ("$1,234.50", "2469/2"), ("-$5", "-5"),
    ("$-5", "-5"), ("$18$", "18"), (r"\$18", "18"), (r"$\$18$", "18"), ("€ 18", "18"), ("1/2", "1/2"), ("0.5", "1/2"), (".5", "1/2"),
    (r"\frac{1}{2}", "1/2"), (r"\dfrac{1}{2}", "1/2"), (r"\frac12", "1/2"),
    (r"-\frac{1}{2}", "-1/2"), (r"\frac{-1}{2}", "-1/2"), (r"\frac{1,000}{2.5}", "400"), ("1 1/2", "3/2"), (r"5\frac{1}{2}", "11/2"),
    ("-1 1/2", "-3/2"), ("3/-4", "-3/4"), ("50%", "50"), (r"50\%", "50"),
    ("18 dollars", "18"), (r"18\text{ dollars}", "18"), (r"5\text{cm}", "5"), ("12cm", "12"), ("12 m^2", "12"), ("5 cubic meters", "5"),
    ("**18**", "18"), ("18!", "18"), (r"\(18\)", "18"), (r"90^\circ", "90"), ("20°C", "20"),
    ("1{,}000", "1000"), (r"1\,000", "1000"), ("1e400", None), ("1e5", None), ("9**9**9", None), ("9^9", None), ("2+2", None), ("5x", None),
    ("2 xy", None), ("2 pi", None), (r"2\pi", None), ("2 million", None), ("2 thousandths", None),
    ("5 over two", None), ("5 point five", None), ("5 squared", None), ("5 overcoats", "5"),
    ("1,23", None), ("1,2,3", None), ("3, 4", None), ("5 or 6", None), ("1/0", None), ("0/5", "0"), ("--5", None), ("", None), ("abc", None),
    ("nan", None), ("inf", None), ("٣", None), ("1_000", None), ("0x10", None),
    ("1" * 1001, None), ("1" * 1000, "1" * 1000), ("3:30", None), ("1/2/3", None), ("5\n6", None), (r"\frac{x}{2}", None),
])
def test_number(text, value):
    assert grpo.number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize("completion, gold, reward", [
    ("6*3=18\n#### 18", "18", 1), ("#### 18.0", "18", 1), (r"\boxed{\frac{1}{2}}", "0.5", 1), (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}", 0),
    ("#### 1,000", "#### 1000", 1), ("18", "18", 0),
    ("not 18", "18", 0), ("#### -18", "18", 0), ("#### 0.3333", "1/3", 0), ("#### 50%", "50", 1), ("#### x + 1", "x+1", 1),
    ("#### 50%", "0.5", 1), ("#### 0.5", "50%", 1), ("#### 50%", "0.5%", 0), ("#### 50", "0.5", 0),
    ("#### 1 2", "12", 0), ("#### 1$2", "12", 0), ("#### 1 2 3", "12 3", 0), ("#### 12:30 pm", "12:30pm", 1), ("#### 5 squared", "5", 0),
    (r"\boxed{(3,4)}", "(3, 4)", 1), (r"\boxed{\text{Monday}}", "monday", 1), ("#### .", ".", 0),
    ("####", "", 0), (r"\boxed{840} and \boxed{840}", "840", 1), ("#### 9**9**9", "387420489", 0),
    ("#### 10000000000000000000001", "10000000000000000000000", 0), ("#### B.", "B", 1),
])
def test_reward(completion, gold, reward):
    assert grpo.answer_reward(completion, gold) == reward and grpo.exact_answer([""], [completion], [gold], [{}]) == [reward]


def test_rewards_take_linear_time_on_hostile_text():
    n, t = 100_000, time.process_time()
    for text in (r"\boxed{" * n, r"\boxed{1}" * n, r"\boxed" + " " * n, "{" * n + "}" * n, "#### " * n, "####\n" * n, "#" * n):
        grpo.answer_reward(text, "1")
    for answer in ("1," * n, "9" * n, " " * n + "x", "1 " + "a " * n, r"\text{" * n, r"\frac{1" * n, r"\frac{" + "1" * n, "$" * n, "." * n, "1" + "*" * n + "2"):
        grpo.answer_reward("#### " + answer, "1")
    assert time.process_time() - t < 10, "quadratic time would take minutes"
    for text in ("1," * 499, "1" * 999, "1 " * 500, "a " * 500, "1/" * 500, "1 " + "a." * 499):
        grpo.number(text)
    assert time.process_time() - t < 10, "quadratic time would take minutes"


def test_own_rewards(tmp_path):
    assert grpo.load_reward("exact_answer") is grpo.exact_answer
    file = tmp_path / "mine.py"
    file.write_text("def short(prompts, completions, answers, columns):\n    return [float(len(c) < row['limit']) for c, row in zip(completions, columns)]\n")
    short = grpo.load_reward(f"{file}:short")
    assert grpo.score(short, ["", ""], ["ab", "abcd"], ["", ""], [{"limit": 3}, {"limit": 3}]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="reward short asks for 'limit', which the data lacks: its columns are prompt, answer"):
        grpo.score(short, [""], ["ab"], [""], [GOOD])
    for spec in ("nowhere.py:f", f"{file}:long", str(file), "exact"):
        with pytest.raises(ValueError, match="no reward function"):
            grpo.load_reward(spec)


@pytest.mark.parametrize("returned", [[1.0], 1.0, None, [1.0, None], [1.0, "1"], [1.0, math.nan], [math.inf, 0], [[1], [2]], [1.0, [2.0]], "12"])
def test_rewards_of_the_wrong_form_are_refused(returned):
    def mine(*_):
        return returned
    with pytest.raises(ValueError, match="reward mine returned .* for 2 completions: it must return"):
        grpo.score(mine, ["", ""], ["", ""], ["", ""], [{}, {}])
    for good in (torch.tensor([1, 0]), [True, 0], (1.0, 0.0)):
        assert grpo.score(lambda *_: good, ["", ""], ["", ""], ["", ""], [{}, {}]) == [1.0, 0.0]


# ----------------------------------------------------------------------------------------------------------------------
# advantages


def test_advantages_by_hand():
    s = 0.5 / (0.5 + 1e-4)
    assert torch.allclose(grpo.advantages([1, 0, 0, 1], [7] * 4), torch.tensor([s, -s, -s, s]))
    assert grpo.advantages([1, 3, 0, 3], ["a", "b", "a", "b"], "none").tolist() == [0.5, 0, -0.5, 0]
    whole = torch.tensor([1.0, 3, 0, 3]).std(correction=0) + 1e-4
    assert torch.allclose(grpo.advantages([1, 3, 0, 3], ["a", "b", "a", "b"], "batch"), torch.tensor([0.5, 0, -0.5, 0]) / whole)
    assert grpo.advantages([0.1, 0.1, 0.1, 5], [0, 0, 0, 1]).tolist() == [0, 0, 0, 0], "equal rewards and groups of one: exactly 0"
    assert grpo.frac_zero_std([0.1, 0.1, 0.1, 5, 1, 2], torch.tensor([0, 0, 0, 1, 2, 2])) == pytest.approx(2 / 3)
    assert grpo.advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), [0, 0]).dtype == torch.float64


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_follow_ids_not_order(scale):
    rng = random.Random(1)
    rewards, groups = [rng.random() for _ in range(24)], [i // 4 for i in range(24)]
    want = grpo.advantages(rewards, groups, scale)
    order = rng.sample(range(24), 24)
    assert torch.allclose(grpo.advantages([rewards[i] for i in order], [groups[i] for i in order], scale), want[order], atol=1e-6)
    assert torch.allclose(want.view(6, 4).sum(1), torch.zeros(6), atol=1e-5)


@pytest.mark.parametrize("rewards, groups, scale", [([1, 2], [0], "group"), ([1, math.nan], [0, 0], "group"), ([1, 2], [0, 0], "std")])
def test_advantage_mistakes(rewards, groups, scale):
    with pytest.raises(ValueError):
        grpo.advantages(rewards, groups, scale)


# ----------------------------------------------------------------------------------------------------------------------
# packed tokens


def test_completion_index_points_at_the_row_that_predicts():
    assert grpo.completion_index([2, 1], [3, 2]).tolist() == [1, 2, 3, 5, 6]
    assert grpo.completion_index([3, 1, 2], [0, 1, 2]).tolist() == [3, 6, 7]
    p, c = [4, 1, 7], [2, 5, 1]
    ids = torch.arange(sum(p) + sum(c))  # a "model" whose row t predicts token t + 1 of the pack
    completions = torch.cat([x[a:] for x, a in zip(ids.split([a + b for a, b in zip(p, c)]), p)])
    assert torch.equal(ids[grpo.completion_index(p, c)] + 1, completions)
    for p, c in (([0], [1]), ([1, 1], [1]), ([1], [-1])):
        with pytest.raises(ValueError):
            grpo.completion_index(p, c)


def test_per_token_and_per_sequence():
    assert grpo.per_token(torch.tensor([5, 6, 7]), [1, 0, 3]).tolist() == [5, 7, 7, 7]
    assert grpo.per_sequence(torch.tensor([1.0, 2, 3, 4]), [1, 0, 3]).tolist() == [1, 0, 9]


# ----------------------------------------------------------------------------------------------------------------------
# losses

MAX = 12


def batch(seed, n=5, spread=0.3):
    """logps (leaf), old, ref, advantages, lengths, weights; float64. Ratios lie on both sides of both clips."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (n,), generator=g).tolist()
    logps, noise, noise2 = (torch.randn(sum(lengths), generator=g, dtype=torch.float64) for _ in range(3))
    weights = torch.rand(sum(lengths), generator=g, dtype=torch.float64) * 2
    weights[torch.rand(sum(lengths), generator=g) < 0.25] = 0
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    return (logps - 2).requires_grad_(), logps - 2 + spread * noise, logps - 2 + spread * noise2, advantages, lengths, weights


def naive(loss, logps, old, ref, advantages, lengths, weights, low, high, beta):
    """The loss of a whole step, one token at a time: formulas as papers print them."""
    at, total, denominator = 0, 0.0, 0.0
    for n, a in zip(lengths, advantages.tolist()):
        kept = [t for t in range(at, at + n) if weights[t] > 0]
        at += n
        if not kept:
            continue
        mean_ratio = torch.exp(sum(logps[t] - old[t] for t in kept) / len(kept))
        terms = []
        for t in kept:
            ratio = mean_ratio if loss == "gspo" else torch.exp(logps[t] - old[t])
            clipped = max(min(ratio.item(), 1 + high), 1 - low)
            objective = ratio * a if ratio.item() * a <= clipped * a else torch.tensor(clipped * a, dtype=torch.float64)
            kl = torch.exp(ref[t] - logps[t]) - (ref[t] - logps[t]) - 1
            terms.append(-weights[t] * objective + beta * kl)
        total = total + sum(terms) / (len(kept) if loss in ("grpo", "gspo") else 1)
        denominator += len(kept) if loss == "dapo" else MAX if loss == "dr_grpo" else 1
    return total / denominator


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_losses_against_naive_loops_and_any_cut(loss, beta):
    low, high = (0.05, 0.06) if loss == "gspo" else (0.2, 0.28)
    for seed in range(4):
        logps, old, ref, advantages, lengths, weights = batch(seed)
        if seed == 3:
            weights[: lengths[0]] = 0  # a response that is masked whole
        want = naive(loss, logps, old, ref, advantages, lengths, weights, low, high, beta)
        (want_grad,) = torch.autograd.grad(want, logps)
        parts = [x.split(lengths) for x in (old, ref, weights)]
        for cut in ([5], [1, 4], [2, 2, 1], [1] * 5):
            rows = list(range(5)) if cut != [2, 2, 1] else [4, 0, 3, 1, 2]  # micro-batches may take responses in any order
            batches = [rows[sum(cut[:i]) : sum(cut[: i + 1])] for i in range(len(cut))]
            denominator = sum(grpo.loss_denominator(loss, [lengths[i] for i in b], MAX, torch.cat([parts[2][i] for i in b])) for b in batches)
            value, grad, stats = 0.0, 0.0, []
            for b in batches:
                o, r, w = (torch.cat([x[i] for i in b]) for x in parts)
                x = torch.cat([logps.split(lengths)[i] for i in b])
                part, sums = grpo.policy_loss(x, o, advantages[b], [lengths[i] for i in b], denominator, loss, low, high, w, r, beta)
                stats.append(sums)
                value, grad = value + part.item(), grad + torch.autograd.grad(part, logps)[0]
            assert value == pytest.approx(want.item(), abs=1e-12) and torch.allclose(grad, want_grad, atol=1e-12)
            stats = grpo.mean_stats(stats)
            if loss != "gspo":
                kept, ratio, a = weights > 0, (logps - old).exp(), grpo.per_token(advantages, lengths)
                assert stats["clip_ratio/high_mean"] == pytest.approx(((ratio > 1 + high) & (a > 0))[kept].double().mean().item())
                assert stats["clip_ratio/low_mean"] == pytest.approx(((ratio < 1 - low) & (a < 0))[kept].double().mean().item())
                assert stats["ratio/max"] == pytest.approx(ratio[kept].max().item()) and stats["kl"] >= 0 and stats["approx_kl"] > 0
        assert want_grad[weights == 0].abs().max() == 0 or beta == 0, "a masked token has no gradient"


def test_denominators_by_hand():
    masked = torch.tensor([0.0] + [1.0] * 4 + [0.0] * 5)  # response 1 is left out whole, half of response 2
    for loss, plain, left in (("dapo", 10, 4), ("grpo", 2, 1), ("gspo", 2, 1), ("dr_grpo", 2 * MAX, MAX)):
        assert grpo.loss_denominator(loss, [1, 9], MAX) == plain and grpo.loss_denominator(loss, [1, 9], MAX, masked) == left
        assert grpo.loss_denominator(loss, [1, 9], MAX) == grpo.loss_denominator(loss, [1], MAX) + grpo.loss_denominator(loss, [9], MAX)
        assert grpo.loss_denominator(loss, [1, 9], MAX, 0 * masked) == 0


def test_long_and_short_responses_weigh_as_the_losses_say():
    logps = torch.zeros(10, dtype=torch.float64, requires_grad=True)  # lengths 1 and 9, advantage 1 each, on-policy
    for loss, short, long in (("dapo", 1 / 10, 1 / 10), ("grpo", 1 / 2, 1 / 18), ("gspo", 1 / 2, 1 / 18), ("dr_grpo", 1 / 24, 1 / 24)):
        value, _ = grpo.policy_loss(logps, None, torch.ones(2), [1, 9], grpo.loss_denominator(loss, [1, 9], MAX), loss)
        (grad,) = torch.autograd.grad(value, logps)
        assert torch.allclose(grad, -torch.tensor([short] + [long] * 9, dtype=torch.float64))


@pytest.mark.parametrize("ratio, advantage, gradient", [(1.27, 1, True), (1.29, 1, False), (0.5, 1, True), (0.81, -1, True), (0.79, -1, False),
                                                        (2.0, -1, True)])
def test_clipping_stops_a_move_that_went_far_enough_and_no_other(ratio, advantage, gradient):
    logps = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value, sums = grpo.policy_loss(logps, torch.zeros(1, dtype=torch.float64), torch.tensor([float(advantage)]), [1], 1)
    assert torch.autograd.grad(value, logps)[0].item() == pytest.approx(-ratio * advantage if gradient else 0)
    assert (sums["clip_ratio/low_mean"] + sums["clip_ratio/high_mean"]).item() == (not gradient)
    assert value.item() == pytest.approx(-advantage * (ratio if gradient else 1.28 if advantage > 0 else 0.8))


def test_gspo_clips_whole_responses_by_the_mean_log_ratio():
    old = torch.zeros(4, dtype=torch.float64)
    logps = torch.tensor([0.9, -0.8, 0.5, 0.5], dtype=torch.float64, requires_grad=True)  # means 0.05 and 0.5
    value, _ = grpo.policy_loss(logps, old, torch.ones(2), [2, 2], 2.0, "gspo", 0.2, 0.28)
    assert value.item() == pytest.approx(-(math.exp(0.05) + 1.28) / 2)
    (grad,) = torch.autograd.grad(value, logps)
    assert torch.allclose(grad, torch.tensor([-math.exp(0.05) / 4] * 2 + [0, 0], dtype=torch.float64)), "token 1 alone would be clipped, its response is not"


def test_on_policy_loss_is_the_policy_gradient_in_fp32_too():
    logps, _, _, advantages, lengths, _ = batch(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = logps.detach().to(dtype).requires_grad_()
        value, sums = grpo.policy_loss(x, None, advantages, lengths, sum(lengths))
        assert value.dtype == torch.promote_types(dtype, torch.float32) and grpo.mean_stats([sums])["ratio/mean"] == 1
        (grad,) = torch.autograd.grad(value, x)
        assert torch.allclose(grad.double(), -grpo.per_token(advantages, lengths) / sum(lengths), atol=1e-2 if dtype == torch.bfloat16 else 1e-6)


def test_loss_mistakes():
    x = torch.zeros(3)
    for args, words in (((x, None, torch.ones(1), [3], 1.0, "ppo"), "no loss 'ppo'"), ((x, None, torch.ones(1), [3], 0.0), "skip the step"),
                        ((x, None, torch.ones(1), [2], 1.0), "sum to 2"),
                        ((x, None, torch.ones(2), [3], 1.0), "2 advantages")):
        with pytest.raises(ValueError, match=words):
            grpo.policy_loss(*args)
    with pytest.raises(ValueError, match="max_length"):
        grpo.loss_denominator("dr_grpo", [3])
    with pytest.raises(ValueError, match="no loss"):
        grpo.loss_denominator("ppo", [3])


# ----------------------------------------------------------------------------------------------------------------------
# off-policy corrections


def test_is_correction_modes():
    sample = torch.zeros(5)
    dense = torch.tensor([1.5, 0.5, 3.0, 2.0, 0.1]).log()  # responses of 2 and 3 tokens: products 0.75 and 0.6
    for mode, want in (("none", [1] * 5), ("token", [1.5, 0.5, 2, 2, 0.1]), ("sequence", [0.75, 0.75, 0.6, 0.6, 0.6]),
                       ("token-mask", [1.5, 0.5, 0, 2, 0.1]),
                       ("sequence-mask", [0.75, 0.75, 0.6, 0.6, 0.6])):
        w, metrics = grpo.is_correction(dense, sample, [2, 3], mode, cap=2.0001)
        assert torch.allclose(w, torch.tensor(want, dtype=torch.float32), atol=1e-3) and w.dtype == torch.float32
        assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(-math.log(0.1))
        assert metrics["sampling/over_cap"] == pytest.approx(0 if "seq" in mode else 0.2)
    assert grpo.is_correction(dense, sample, [3, 2], "sequence")[0].tolist() == pytest.approx([2, 2, 2, 0.2, 0.2])
    assert grpo.is_correction(dense, sample, [3, 2], "sequence-mask")[0].tolist() == pytest.approx([0, 0, 0, 0.2, 0.2])
    assert grpo.is_correction(sample - 1000, sample, [5], "sequence")[0].min() > 0, "0 means masked, and nothing here is"
    assert not grpo.is_correction(dense.requires_grad_(), sample, [2, 3], "token")[0].requires_grad
    assert grpo.is_correction(dense.double(), sample.double(), [2, 3], "token")[0].dtype == torch.float64
    for mode, cap, words in (("both", 2, "no importance correction"), ("token", 0.5, "at least 1"), ("token", math.nan, "at least 1")):
        with pytest.raises(ValueError, match=words):
            grpo.is_correction(dense, sample, [2, 3], mode, cap)


# ----------------------------------------------------------------------------------------------------------------------
# the group bias


def test_group_bias_table():
    """Exact weights on samples from another law still miss the dense update once the advantage is divided by the group's std."""
    table = {(G, d[0], m[0], scale, weighting): (size, cosine) for G, d, m, _, scale, weighting, size, cosine in grpo.group_bias_table()}
    want = {(8, 0.5, 0.3, "none"): (0.840, 1.000, 0.970, 1.000), (8, 0.5, 0.3, "group"): (0.888, 1.058, 1.041, 1.000),
            (8, 0.2, 0.1, "group"): (0.621, 1.105, 1.014, 1.000),
            (8, 0.1, 0.3, "group"): (1.967, 0.843, 0.893, 1.000), (4, 0.1, 0.3, "group"): (2.256, 0.967, 1.101, 1.000),
            (4, 0.4, 0.7, "group"): (0.811, 1.008, 0.884, 1.000)}
    assert len(table) == 4 * len(want)
    for key, sizes in want.items():
        for weighting, size in zip(("none", "response", "normalised", "group"), sizes):
            assert table[(*key, weighting)][0] == pytest.approx(size, abs=1.5e-3), (key, weighting)
    assert [table[4, 0.4, 0.7, "group", w][1] for w in ("none", "response", "group")] == pytest.approx([0.923, 0.978, 1.0], abs=1.5e-3), "not even the direction"


def test_group_update_on_the_dense_law_is_the_policy_gradient():
    """Mean baseline, sampled from d itself: (G - 1) / G of the gradient of E_d[r], in closed form."""
    d, r, G = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), 3
    assert torch.allclose(grpo.group_update(d, d, r, G, "none"), d * (r - d @ r) * (G - 1) / G, atol=1e-12)
