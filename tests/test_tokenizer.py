"""The tokenizer of model.py against `tokenizers` and transformers.    pytest tests/test_tokenizer.py

Small vocabularies are trained here in the manner of Llama-3, Qwen, SmolLM2 and GPT-2. With a real checkpoint:
NANOROLL_REAL_MODEL=/path/to/SmolLM2-135M-Instruct pytest tests/test_tokenizer.py
"""
import base64
import json
import os
import random
import re
import unicodedata
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads wait for each other on a busy machine

from model import (BYTE_OF, GPT4, LLAMA3_ADDED, QWEN_ADDED, config_from_dict, load_pretrained, load_tokenizer, random_model,  # noqa: E402
                   save_pretrained)

tokenizers = pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parent.parent
CONFIG = dict(model_type="llama", vocab_size=2000, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
              max_position_embeddings=64, rope_theta=10000.0, tie_word_embeddings=True)

TEXTS = [
    "", " ", "\n", "a", "The quick brown fox jumps over the lazy dog.", "It's WE'LL i'm they'Re 'S 's ſ's don't",
    "def f(x):\n    return [y ** 2 for y in x if y != 0]\n\n\n\tclass A:\r\n\t\tpass\r\n", "x=1;y=2;z=x+y # 3\n" * 3,
    "0 1 12 123 1234 12345 1234567 3.14159 1,000,000 ٣٤٥ ¾ Ⅷ १२३ x1y22z333", "中文分词测试，今天天气很好。日本語のテキスト、カタカナ。한국어 텍스트", "𠜎𠜱 汉字 abc",
    "👩‍👩‍👧‍👦 🇨🇭 ✊🏽 ☃️ 😀😀 a😀b", "Ünïcödé naïve café", "e\u0301a\u0308 \u212b \u1e9b\u0323 ﬁ ﷺ \u1100\u1161\u11a8", "नमस्ते दुनिया مرحبا بالعالم שלום",
    "   a  b   c    ", "\t\t \n \n\n  x\n   \n", "a \u00a0\u2003\u3000b\u200b\u200dc\ufeff", "\x00\x01\x7f\x80\xad\ufffd", "....!!!???---===", "<|im_start|> <|x|> <|", " " * 500 + "x" + " " * 500,
    "\\frac{1}{2} $x^2$ <b>bold</b> &amp; http://a.b/c?d=e_f", "<think>\nok\n</think>\n\n#### 42", "a\r\nb\rc\n\r", "1 2  3   4\n5\n\n6 \n7",
]
POOLS = ["abcXYZ", "0123456789", " \t\n\r\x0b\u00a0", "'s't're'LL", "汉字日本", "éàüñß", "😀👍🏽\u200d", "\u0301\u0327\u1161", "<|>_im", ".,;:!?()[]{}"]


def varied(n=600, seed=0):
    """The texts above, pieces of this project's own sources, and random mixtures of alphabets that a split pattern could trip over."""
    draw = random.Random(seed)
    out = list(TEXTS)
    for file in [ROOT / "README.md", *sorted(ROOT.glob("*.py"))]:
        text = file.read_text()
        out += [text[i:i + draw.randint(1, 900)] for i in range(0, min(len(text), 9000), 900)]
    out += ["".join(draw.choice(draw.choice(POOLS)) for _ in range(draw.randint(1, 40))) for _ in range(n)]
    return out + ["".join(chr(c) for c in (draw.randrange(1, 0x30000) for _ in range(8)) if not 0xd800 <= c < 0xe000) for _ in range(n)]


KINDS = {  # pre-tokenizer, normalizer, ignore_merges, added tokens
    "llama3": ([("Split", GPT4 % "{1,3}")], False, True, LLAMA3_ADDED[:12]),
    "qwen": ([("Split", GPT4 % "")], True, False, QWEN_ADDED),
    "smollm2": ([("Digits", True)], False, False, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "gpt2": ([], False, False, ["<|endoftext|>"]),
    "digits together": ([("Digits", False)], False, False, ["<|endoftext|>"]),
    "partial split": ([("Split", r"\p{L}+|\p{N}")], False, False, ["<|endoftext|>"]),  # leaves text between its matches
}


def build(kind, size=1200):
    """A `tokenizers` Tokenizer of this kind, trained on the varied texts. SmolLM2's lacks some bytes, as the real one does."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
    split, nfc, ignore_merges, added = KINDS[kind]
    tk = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(arg), "isolated") if name == "Split" else pre_tokenizers.Digits(individual_digits=arg) for name, arg in split]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not (split and split[0][0] == "Split"))
    tk.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tk.decoder = decoders.ByteLevel()
    if nfc:
        tk.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "smollm2":
        alphabet = [c for c in alphabet if BYTE_OF[ord(c)] not in (0x00, 0x01, 0xc0, 0xf5, 0xff)]
    corpus = [t for t in varied(100, seed=1) if kind != "smollm2" or not set("\x00\x01") & set(t)]
    tk.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tk.add_tokens([AddedToken(t, special=t[:2] == "<|", normalized=False) for t in added])
    return tk


@pytest.fixture(scope="module")
def oracles():
    """{kind: Tokenizer of `tokenizers`}, trained once."""
    return {kind: build(kind) for kind in KINDS}


def write(folder, oracle, **settings):
    folder.mkdir(exist_ok=True)
    oracle.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return folder


def read(folder, model_type="llama"):
    return load_tokenizer(folder, config_from_dict(dict(CONFIG, model_type=model_type)))


def edit(folder, change):
    data = json.loads((folder / "tokenizer.json").read_text())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))


def refused(folder, match):
    with pytest.raises(ValueError, match=match) as e:
        read(folder)
    assert "\n" not in str(e.value) and "tokenizer=False" in str(e.value)  # the remedy


def same(tok, oracle, texts):
    for text in texts:
        ids, want = tok.encode(text), oracle.encode(text, add_special_tokens=False).ids
        assert ids == want, (text, ids, want)


# ---------------------------------------------------------------------------------------------------------------------
# ids

@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_tokenizers(kind, oracles, tmp_path):
    tok = read(write(tmp_path / "t", oracles[kind]))
    assert tok.vocab == oracles[kind].get_vocab_size()
    texts = varied()
    same(tok, oracles[kind], texts)
    if kind != "smollm2":  # which has no token for some bytes and drops them
        for text in texts:
            assert tok.decode(tok.encode(text)) == (unicodedata.normalize("NFC", text) if kind == "qwen" else text)
    assert any(len(tok.bytes[i]) > 3 for i in tok.encode(TEXTS[4]))  # merges happen at all


@pytest.mark.parametrize("kind", ["llama3", "qwen", "smollm2"])
def test_ids_equal_tokenizers_on_anything(kind, oracles, tmp_path):
    hypothesis = pytest.importorskip("hypothesis")
    tok = read(write(tmp_path / "t", oracles[kind]))

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.text(max_size=60))
    def check(text):
        same(tok, oracles[kind], [text])
    check()


def test_a_token_that_no_merge_makes(oracles, tmp_path):
    """It is decoded, never produced; Llama-3's ignore_merges takes it as a whole piece, never inside one. Ranks cannot say that of a token that two others join to."""
    texts = [" return", "a return", " returns", "qzx", "aqzx", "qzxq", *varied(50)]
    for kind in ("gpt2", "llama3"):
        folder = write(tmp_path / kind, oracles[kind])
        edit(folder, lambda d: d["model"].update(merges=[m for m in d["model"]["merges"] if "".join(m) != "\u0120return"]))
        other = write(tmp_path / f"{kind}-whole", oracles[kind])  # no two tokens join to qzx: neither qz nor zx is one
        edit(other, lambda d: (d["model"]["vocab"].update(qzx=max(d["model"]["vocab"].values()) + 500)))
        same(read(other), tokenizers.Tokenizer.from_file(str(other / "tokenizer.json")), texts)
    tok, i = read(tmp_path / "gpt2"), oracles["gpt2"].token_to_id("\u0120return")
    same(tok, tokenizers.Tokenizer.from_file(str(tmp_path / "gpt2" / "tokenizer.json")), texts)
    assert tok.decode([i]) == " return" and i not in tok.encode(" return")
    assert len(read(tmp_path / "llama3-whole").encode("qzx")) == 1 < len(read(tmp_path / "gpt2-whole").encode("qzx"))
    refused(tmp_path / "llama3", "ignore_merges for tokens without their merges")


def test_the_normaliser_is_the_checkpoints_own(oracles, tmp_path):
    """Qwen composes e + accent to one character before it looks for tokens; Llama-3 must not."""
    qwen, llama = (read(write(tmp_path / kind, oracles[kind])) for kind in ("qwen", "llama3"))
    assert qwen.encode("cafe\u0301") == qwen.encode("caf\u00e9") and qwen.decode(qwen.encode("cafe\u0301")) == "caf\u00e9"
    assert llama.encode("cafe\u0301") != llama.encode("caf\u00e9") and llama.decode(llama.encode("cafe\u0301")) == "cafe\u0301"


def test_digits_are_cut_as_the_checkpoint_cuts_them(oracles, tmp_path):
    pieces = {kind: [tok.decode([i]) for i in tok.encode("12345")] for kind in KINDS for tok in [read(write(tmp_path / kind, oracles[kind]))]}
    assert pieces["qwen"] == pieces["smollm2"] == list("12345")
    assert len(pieces["llama3"]) < 5 and all(len(p) <= 3 for p in pieces["llama3"])


def test_special_tokens_in_text(oracles, tmp_path):
    for kind in ("llama3", "qwen", "smollm2"):
        tok, names = read(write(tmp_path / kind, oracles[kind])), KINDS[kind][3]
        texts = ["".join(names), " ".join(names), f"a{names[0]}b", f"{names[1]}\n 12{names[0]}{names[0]} x", names[0][:-1] + names[1], f"e\u0301{names[2]}\u0301"]
        same(tok, oracles[kind], texts)
        assert tok.encode("".join(names)) == list(range(tok.vocab - len(names), tok.vocab))
        assert tok.decode(tok.encode(f"a{names[0]}b"), skip_special=True) == "ab" and tok.decode(tok.encode(f"a{names[0]}b")) == f"a{names[0]}b"


def test_added_tokens_that_eat_blanks_or_wait_for_the_normaliser(oracles, tmp_path):
    oracle = tokenizers.Tokenizer.from_str(oracles["qwen"].to_str())
    added = [tokenizers.AddedToken("<L>", lstrip=True), tokenizers.AddedToken("<R>", rstrip=True), tokenizers.AddedToken("<B>", lstrip=True, rstrip=True),
             tokenizers.AddedToken("\u00e9\u00e9", normalized=True), tokenizers.AddedToken("<think>er", normalized=False)]
    oracle.add_tokens(added)
    tok = read(write(tmp_path / "t", oracle))
    same(tok, oracle, ["a  <L>  b", "a  <R>  b", "a \n<B>\t b", "<R>  <L>", "<L> <L>", "<R> <R> ", "  <B>", "e\u0301e\u0301x", "\u00e9\u00e9", "<think>er<think>"])


def test_a_long_run_of_anything(oracles, tmp_path):
    for kind in ("llama3", "qwen", "smollm2"):
        tok = read(write(tmp_path / kind, oracles[kind]))
        for text in (" " * 20000, "\n" * 20000, "a" * 20000, "!" * 20000, "7" * 2000, "😀" * 5000):
            assert tok.decode(tok.encode(text)) == text


@pytest.mark.real
def test_smollm2_equals_tokenizers(real_model):
    net, tok = load_pretrained(real_model, fresh=0)
    oracle = tokenizers.Tokenizer.from_file(f"{real_model}/tokenizer.json")
    same(tok, oracle, varied(3000))
    assert (tok.vocab, tok.stop_ids, tok.eos_id) == (49152, (2,), 2)


# ---------------------------------------------------------------------------------------------------------------------
# ranks files

def ranks_of(oracle, added):
    vocab = {text: i for text, i in oracle.get_vocab().items() if text not in added}
    return {text.translate(BYTE_OF).encode("latin-1"): i for text, i in vocab.items()}


@pytest.mark.parametrize("kind, file, model_type", [("qwen", "qwen.tiktoken", "qwen3"), ("llama3", "tokenizer.model", "llama")])
def test_ranks_give_the_same_ids_as_the_json(kind, file, model_type, tmp_path, oracles):
    names = KINDS[kind][3]
    ranks = ranks_of(oracles[kind], names)
    (tmp_path / file).write_bytes(b"".join(base64.b64encode(b) + b" %d\n" % i for b, i in sorted(ranks.items(), key=lambda x: x[1])))
    tok = read(tmp_path, model_type)
    same(tok, oracles[kind], varied(200))
    assert tok.encode("".join(names)) == list(range(len(ranks), len(ranks) + len(names)))  # the usual special tokens follow the ranks
    assert tok.vocab == len(ranks) + (256 if kind == "llama3" else 26) and not tok.has_template


def test_ranks_with_their_own_list_of_special_tokens(tmp_path, oracles):
    ranks = ranks_of(oracles["qwen"], QWEN_ADDED)
    lines = [base64.b64encode(b) + b" %d" % i for b, i in ranks.items()]
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join(lines))
    own = {"2000": {"content": "<|one|>", "special": True}, "2007": {"content": "<|two|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": own, "eos_token": "<|two|>"}))
    tok = read(tmp_path, "qwen2")
    assert tok.encode("<|two|><|one|>") == [2007, 2000] and tok.eos_id == 2007 and tok.vocab == 2008 and tok.decode([2007, 2003]) == "<|two|>"
    assert len(tok.encode("<|im_end|>")) > 1  # not one of this checkpoint's
    (tmp_path / "qwen.tiktoken").write_bytes(b"\n".join([*lines, b"rubbish"]))
    with pytest.raises(ValueError, match="not a file of tiktoken ranks"):
        read(tmp_path, "qwen2")


# ---------------------------------------------------------------------------------------------------------------------
# text

def test_streaming_prints_whole_characters_and_loses_none(oracles, tmp_path):
    tok = read(write(tmp_path / "t", oracles["gpt2"]))
    for text in TEXTS:
        for step in (1, 2, 5):
            ids, show = tok.encode(text), tok.stream()
            parts = [show(ids[i:i + step]) for i in range(0, len(ids), step)] + [show([], final=True)]
            assert "".join(parts) == tok.decode(ids) == text and all("\ufffd" not in p or "\ufffd" in text for p in parts)
    ids = tok.encode("\U0001f9ff")  # four bytes, several ids
    show = tok.stream()
    assert len(ids) > 1 and [show([i]) for i in ids] == [""] * (len(ids) - 1) + ["\U0001f9ff"]
    show = tok.stream()
    assert show(ids[:-1]) == "" and show([], final=True) == tok.decode(ids[:-1]) == "\ufffd"  # cut short: said, once


def test_the_tiny_tokenizer_is_bytes(tmp_path):
    net, tok = load_pretrained("tiny")
    oracle = tokenizers.Tokenizer.from_file(str(ROOT / "assets" / "tiny" / "tokenizer.json"))
    same(tok, oracle, varied(100))
    assert tok.encode("é7") == [*"é7".encode()] and tok.vocab == 259 == net.vocab and tok.stop_ids == (258,)
    assert tok.decode(tok.chat([{"role": "user", "content": "7 + 5"}])) == "<|im_start|>u\n7 + 5<|im_end|><|im_start|>a\n"


# ---------------------------------------------------------------------------------------------------------------------
# chat templates

LLAMA3_TEMPLATE = """{{- bos_token }}
{% if messages %}
    {% set blank_lines_and_indents = "belong to the blocks, not to the text" %}
{% endif %}
{%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
QWEN_TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and not(message.content.startswith('<tool_response>')) %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{{- ns.last }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
CHATS = [
    [{"role": "user", "content": "What is 7 + 5?"}],
    [{"role": "system", "content": "  Be brief. "}, {"role": "user", "content": "<b>&amp; 'quotes' \"é\" 中文 e\u0301"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"}, {"role": "user", "content": "c\n"}],
]


@pytest.mark.parametrize("kind, template, settings", [
    ("llama3", LLAMA3_TEMPLATE, {"bos_token": "<|begin_of_text|>", "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>", "lstrip": False, "rstrip": False,
                                                                                     "normalized": False, "single_word": False, "special": True}}),
    ("qwen", QWEN_TEMPLATE, {"eos_token": "<|im_end|>", "bos_token": None}),
])
@pytest.mark.parametrize("where", ["json", "jinja", "list"])
def test_chats_equal_transformers(kind, template, settings, where, oracles, tmp_path):
    transformers = pytest.importorskip("transformers")
    held = {"json": {"chat_template": template}, "list": {"chat_template": [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]}}
    write(tmp_path, oracles[kind], **settings, **held.get(where, {"chat_template": "the file beside it wins"}))
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template)
    tok, theirs = read(tmp_path), transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tok.has_template
    for chat in CHATS:
        for options in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}, {"tools": [{"name": "f", "é<": [1, "x"]}]}):
            want = theirs.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": True, **options})
            assert tok.render(chat, **options) == want
            ids = tok.chat(chat, **options)
            assert ids == theirs(want, add_special_tokens=False)["input_ids"]
            if kind == "llama3":
                assert ids.count(tok.added["<|begin_of_text|>"]) == 1 and ids[0] == tok.added["<|begin_of_text|>"]


@pytest.mark.real
def test_smollm2_chats_equal_transformers(real_model):
    transformers = pytest.importorskip("transformers")
    _, tok = load_pretrained(real_model, fresh=0)
    theirs = transformers.AutoTokenizer.from_pretrained(real_model)
    for chat in CHATS:
        assert tok.chat(chat) == theirs(theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), add_special_tokens=False)["input_ids"]


def test_templates_are_strangers_programs(oracles, tmp_path):
    for template, match in (("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|not safe|undefined"), ("{{ messages.append(1) }}", "safe"),
                            ("{% for m in messages %}", "end of template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
                            ("{{ messages[0]['content'] + 1 }}", "str")):
        tok = read(write(tmp_path, oracles["gpt2"], chat_template=template))
        with pytest.raises(ValueError, match=f"chat template does not take these messages.*({match})"):
            tok.chat(CHATS[0])
    tok = read(write(tmp_path, oracles["gpt2"]))
    with pytest.raises(ValueError, match="no chat template"):
        tok.chat(CHATS[0])
    assert not tok.has_template


# ---------------------------------------------------------------------------------------------------------------------
# folders

def test_stop_ids_are_the_union_and_vocab_the_last_id(oracles, tmp_path, capsys):
    """Llama-3-Instruct's turn token stands in generation_config only; Qwen2.5-base's config and tokenizer name different ends."""
    save_pretrained(random_model(dict(CONFIG, eos_token_id=7)), tmp_path)
    net, tok = load_pretrained(tmp_path)
    assert tok is None and net.vocab == 2000 and net.stop_ids == (7,) and "no tokenizer" in capsys.readouterr().out
    write(tmp_path, oracles["qwen"], eos_token="<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 5000]}))  # 5000 is not in the vocabulary
    net, tok = load_pretrained(tmp_path)
    end = oracles["qwen"].token_to_id("<|im_end|>")
    assert net.stop_ids == tok.stop_ids == tuple(sorted((7, 9, end))) and tok.eos_id == end
    assert net.vocab == tok.vocab == oracles["qwen"].get_vocab_size() < net.config.vocab_size
    net, tok = load_pretrained(tmp_path, tokenizer=False)
    assert tok is None and net.vocab == 2000 and net.stop_ids == (7, 9) and capsys.readouterr().out == ""


def test_saving_keeps_the_tokenizers_files_byte_for_byte(oracles, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_pretrained(random_model(dict(CONFIG, eos_token_id=7)), tmp_path / "a")
    write(tmp_path / "a", oracles["smollm2"], eos_token="<|im_end|>", unk_token="<|endoftext|>")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    net, tok = load_pretrained(tmp_path / "a")
    save_pretrained(net, tmp_path / "b", tok)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    again, theirs = load_pretrained(tmp_path / "b")[1], transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert again.encode(TEXTS[6]) == tok.encode(TEXTS[6]) == theirs(TEXTS[6], add_special_tokens=False)["input_ids"]
    assert again.stop_ids == tok.stop_ids and theirs.eos_token_id == tok.eos_id and again.chat(CHATS[0]) == tok.chat(CHATS[0])


def test_llama_2_loads_without_its_sentencepiece_and_says_so(tmp_path):
    save_pretrained(random_model(CONFIG), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    refused(tmp_path, "tokenizer.model; SentencePiece .Llama-2. is not supported")
    net, tok = load_pretrained(tmp_path, tokenizer=False)
    assert tok is None and net.config.model_type == "llama"
    tk = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>"))
    tk.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    write(tmp_path, tk)
    refused(tmp_path, "not byte-level BPE but BPE with Prepend, Replace .Llama-2")


@pytest.mark.parametrize("change, match", [
    (lambda d: d.update(model={"type": "WordPiece", "vocab": {"a": 0}}), "not byte-level BPE but WordPiece"),
    (lambda d: d.update(pre_tokenizer=None), "no splitting"),
    (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "with Whitespace"),
    (lambda d: d.update(normalizer={"type": "Lowercase"}), "with ByteLevel, Lowercase"),
    (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "asks for add_prefix_space"),
    (lambda d: d["pre_tokenizer"].update(use_regex=False), "a split by ByteLevel"),
    (lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, d["pre_tokenizer"]]}), "PunctuationIsolated, ByteLevel"),
    (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (lambda d: d["added_tokens"][0].update(single_word=True), "single_word"),
    (lambda d: d["model"]["merges"].reverse(), "the ids do not rise along the merges"),
    (lambda d: d["model"]["merges"].append(["q", "\u0120zz"]), "the ids do not rise along the merges"),
    (lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"},
                                                                            {"type": "ByteLevel", "use_regex": False}]}), "does not take the tokenizer's split pattern"),
])
def test_tokenizers_that_are_refused(change, match, oracles, tmp_path):
    edit(write(tmp_path, oracles["gpt2"]), change)
    refused(tmp_path, match)


def test_old_and_new_spellings_of_merges_are_the_same(oracles, tmp_path):
    new = read(write(tmp_path, oracles["gpt2"]))
    edit(tmp_path, lambda d: d["model"].update(merges=[m if isinstance(m, str) else " ".join(m) for m in d["model"]["merges"]]))
    assert re.search(r'"merges": \["\S+ \S+"', (tmp_path / "tokenizer.json").read_text())
    assert all(read(tmp_path).encode(t) == new.encode(t) for t in TEXTS)
