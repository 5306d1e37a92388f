"""The Triton kernels of sparse_attn.py: values against float64, and what they compile to for sm_80 and sm_90.    pytest tests/test_kernels.py

Without a GPU the values come from Triton's interpreter (about 3 ms a loop round, hence the small shapes) and the compiler runs ahead of
time: it needs no GPU, no CUDA toolkit and no C compiler. With a GPU the same value tests run the compiled kernels.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

import sparse_attn as sa  # noqa: E402
from kv_cache import PagedCache  # noqa: E402
from sparse_attn import BLOCK  # noqa: E402
from test_sparse_attn import DEVICE, TOL, Paged, error, exact, exact_sparse, rand, sparse_args, sparse_case  # noqa: E402

old_pair = triton.__version__.startswith("3.6.") and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4) and sa.INTERPRET
values = pytest.mark.skipif(old_pair, reason="Triton 3.6's interpreter cannot loop to a loaded bound with numpy 2.4 or newer")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # log2(0) = -inf is meant: a block that a row does not see
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def dense(x, **options):
    out, mass = sa.dense_paged(*x.dense_args(), **options)
    return out.cpu(), None if mass is None else mass.cpu()


# ----------------------------------------------------------------------------------------------------------------------
# dense: prefill, decoding, verification


@values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Hq,Hkv", [(2, 2), (6, 2), (4, 1), (16, 2)])  # G = 1, 3, 4, 8
def test_dense_ragged_queries(Hq, Hkv, dtype):
    x = Paged([100, 5, 32, 129, 17], Hq, Hkv, 64, 32, dtype, counts=[1, 5, 3, 2, 4])  # NaN wherever no key lies
    out, mass = dense(x, want_mass=True)
    assert out.dtype == dtype and error(out, x.exact()[0]) < TOL[dtype]
    assert error(mass, x.exact_mass()) < (1e-6 if dtype == torch.float32 else 2e-3)
    twin, twin_mass = sa.dense_paged_ref(*x.dense_args(wide=True), want_mass=True)
    assert error(out, twin) < TOL[dtype] and error(mass, twin_mass) < 2e-3


@values
@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_split_keys(parts, dtype):
    x = Paged([300, 40, 64], 6, 2, 32, 64, dtype, counts=[5, 1, 2], spare=0)  # row 1 leaves most parts empty
    out, mass = dense(x, want_mass=True, parts=parts)
    assert error(out, x.exact()[0]) < TOL[dtype] and error(mass, x.exact_mass()) < 2e-3
    assert error(out, dense(x, parts=1)[0]) < TOL[dtype]


@values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("counts,lengths", [([40, 3], [40, 80]), ([40, 40], [90, 47])])  # a prefill from nothing, and on top of cached keys
def test_dense_prefill_takes_several_query_tiles(counts, lengths, dtype):
    x = Paged(lengths, 6, 2, 32, 64, dtype, counts=counts)  # 120 folded rows: tiles of 64, one of them cut off
    out, mass = dense(x, want_mass=True)
    assert error(out, x.exact()[0]) < TOL[dtype]
    assert error(mass, x.exact_mass()) < 2e-3  # scored: the last 32 tokens only


@values
@pytest.mark.parametrize("page", [16, 48, 256])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49])
def test_dense_page_boundaries(page, length):
    x = Paged([length, 48], 2, 1, 16, page, torch.float32, counts=[1, 2])
    out, mass = dense(x, want_mass=True)
    assert error(out, x.exact()[0]) < 2e-6 and error(mass, x.exact_mass()) < 1e-6


@values
@pytest.mark.parametrize("D", [32, 80, 96, 128, 256])
def test_dense_head_sizes(D):
    for dtype in (torch.float32, torch.float16):
        x = Paged([70, 33], 4, 2, D, 32, dtype, counts=[2, 1])
        assert error(dense(x)[0], x.exact()[0]) < TOL[dtype]


@values
def test_masses_of_one_query_token_sum_to_one():
    x = Paged([100, 16, 3], 6, 2, 32, 16, torch.float32)
    mass = dense(x, want_mass=True, parts=2)[1]
    assert torch.allclose(mass.sum(-1), torch.ones(3, 2), atol=1e-5)
    assert (mass[1, :, 1:] == 0).all() and (mass[2, :, 1:] == 0).all()  # nothing past a row's end, in blocks that nobody wrote


@values
def test_masses_with_sharp_scores():
    x = Paged([200], 2, 1, 32, 64, torch.float32, counts=[2])
    x.q = x.q * 60  # almost all weight on one key: the other blocks' weights underflow, they do not turn into NaN
    out, mass = dense(x, want_mass=True, parts=2)
    assert error(out, x.exact()[0]) < 2e-5 and error(mass, x.exact_mass()) < 1e-5


@values
def test_dense_does_not_write_past_its_rows():
    x = Paged([40, 20], 3, 1, 64, 32, torch.float32, counts=[3, 1])
    q, *rest = x.dense_args()
    tail = torch.cat([q, q.new_full((2, 3, 64), 5.0)])  # two packed tokens more than cu_q speaks of
    made, empty_like = [], torch.empty_like
    try:
        torch.empty_like = lambda t, **k: made.append(t.new_full(t.shape, 9.0)) or made[-1]
        out, _ = sa.dense_paged(tail, *rest)
    finally:
        torch.empty_like = empty_like
    assert error(out[:4].cpu(), x.exact()[0]) < 2e-6 and (out[4:] == 9.0).all()


@values
def test_dense_takes_strided_queries_and_tables():
    x = Paged([40, 50], 4, 2, 32, 16, torch.float32, counts=[2, 1])
    q, k, v, table, *rest = x.dense_args()
    wide = torch.cat([q, q], 2)[:, :, :32]
    assert not wide.is_contiguous()
    out, _ = sa.dense_paged(wide, k, v, torch.cat([table, table], 1)[:, :table.shape[1]], *rest)
    assert error(out.cpu(), x.exact()[0]) < 2e-6


# ----------------------------------------------------------------------------------------------------------------------
# sparse: draft steps


@values
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Hq,Hkv", [(2, 2), (6, 2), (4, 1), (16, 2)])
def test_sparse(Hq, Hkv, dtype):
    x = Paged([150, 37, 90, 8], Hq, Hkv, 64, 32, dtype)
    case = sparse_case(x, 5)
    want = exact_sparse(x, *case)
    out = sa.sparse_paged(*sparse_args(x, *case)).cpu()
    assert out.dtype == dtype and error(out, want) < TOL[dtype]
    assert error(out, sa.sparse_paged_ref(*sparse_args(x, *case, wide=True))) < TOL[dtype]


@values
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("M", [0, 1, 20])
def test_sparse_split_and_empty_lists(parts, M):
    x = Paged([150, 33, 21], 6, 2, 32, 16, torch.float32)
    case = sparse_case(x, M, empty=(1,))  # row 1: all -1
    assert error(sa.sparse_paged(*sparse_args(x, *case), parts=parts).cpu(), exact_sparse(x, *case)) < 2e-6


@values
def test_sparse_reads_only_what_it_is_told():
    x = Paged([130], 2, 1, 32, 32, torch.float32)
    blocks, recent, ks, vs, drafted = sparse_case(x, 2)
    ks[:, :, int(drafted[0]):], vs[:, :, int(drafted[0]):] = float("nan"), float("nan")
    want = exact_sparse(x, blocks, recent, ks, vs, drafted)
    table, P, page = x.table[0], x.P, x.page
    for j in range(130 // BLOCK):  # poison each whole block that is neither listed nor recent
        if j not in blocks[0, 0].tolist() and (j + 1) * BLOCK <= int(recent[0]):
            slot = int(table[j * BLOCK // page]) * page + j * BLOCK % page
            x.k[:, slot:slot + BLOCK] = x.v[:, slot:slot + BLOCK] = float("nan")
    assert error(sa.sparse_paged(*sparse_args(x, blocks, recent, ks, vs, drafted)).cpu(), want) < 2e-6


@values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_budget_of_everything_is_dense(dtype):
    """All blocks listed, in any order: a draft step is the dense step of the same token, here the last of the row."""
    x = Paged([100, 37], 6, 2, 64, 32, dtype)
    want = dense(x)[0]
    M = 100 // BLOCK
    blocks, recent = torch.full((2, 2, M), -1, dtype=torch.int32), torch.tensor([80, 16], dtype=torch.int32)
    for b, h in ((b, h) for b in range(2) for h in range(2)):
        whole = int(recent[b]) // BLOCK
        blocks[b, h, :whole] = torch.randperm(whole, generator=torch.Generator().manual_seed(h)).int()
    # the last token's own K/V comes from the scratch, as when it is drafted
    ks, vs = (torch.stack([rows[b][:, -1:] for b in range(2)], 1) for rows in (x.K, x.V))
    x.kv_len = x.kv_len - 1
    out = sa.sparse_paged(*sparse_args(x, blocks, recent, ks, vs, torch.ones(2, dtype=torch.int32))).cpu()
    assert error(out, want) < TOL[dtype]


@values
def test_sparse_takes_slices_of_larger_batches():
    """Rows drop out of a draft at its end: the cache hands over the first n rows of everything."""
    x = Paged([90, 50, 70], 4, 2, 32, 32, torch.float32)
    case = sparse_case(x, 3)
    want = exact_sparse(x, *case)[:2]
    q, k, v, table, blocks, recent, kv_len, ks, vs, drafted, page = sparse_args(x, *case)
    out = sa.sparse_paged(q[:2], k, v, table[:2], blocks[:2], recent[:2], kv_len[:2], ks[:, :2], vs[:, :2], drafted[:2], page)
    assert error(out.cpu(), want) < 2e-6


# ----------------------------------------------------------------------------------------------------------------------
# through the cache


def life_of_two_rows(path):
    """Prefill, a fork, a prefill beside it, decoding, verification, truncation, drafting, one more pass: outputs [n, Hq, D] and masses, in order."""
    L, Hkv, D = 2, 2, 32
    cache, got = PagedCache(L, Hkv, D, 512, page=32, device=DEVICE if path == "triton" else "cpu", path=path), []

    def run(view, n):
        for layer in range(L):
            tensors = [rand(n, h, D, seed=10 * len(got) + i, device=cache.device) for i, h in enumerate((6, Hkv, Hkv))]
            got.append(view(*tensors).cpu())

    prompt = cache.new(45)
    run(cache.dense([prompt], [45]), 45)
    rows = [cache.fork(prompt, 128), cache.new(128)]
    run(cache.dense(rows, [2, 63]), 65)
    view = cache.dense(rows, [1, 1], score=True)
    run(view, 2)
    got.append(view.block_mass([0, 1], [0, 1], [48, 64]).cpu())  # [L, B, Hkv, 4]; one query token a row and whole blocks: both paths mean the same
    run(cache.dense(rows, [4, 2], score=True), 6)
    cache.truncate(rows[0], rows[0].length - 2)  # 50 and 66 tokens are left
    blocks = torch.tensor([[[1, 0], [0, 1]], [[0, -1], [1, -1]]], dtype=torch.int32, device=cache.device)  # [B, Hkv, M]
    view = cache.sparse(rows, torch.stack([blocks] * L), [32, 32], 3)
    for n in (2, 2, 1):  # the second row drops out of its last step
        run(view, n)
    run(cache.dense(rows, [3, 1]), 4)  # nothing of the drafts has stayed
    cache.check()
    return got


@values
def test_cache_views_agree_with_the_cpu_path():
    want, got = life_of_two_rows("torch"), life_of_two_rows("triton")
    assert len(want) == len(got) == 17
    for i, (a, b) in enumerate(zip(want, got)):
        assert a.shape == b.shape, i
        assert error(a, b) < 3e-6, i


@values
def test_pools_of_more_than_two_to_the_31_elements():
    """Slots whose element offset an int32 cannot hold. Memory is only touched where keys lie: one pool serves as K and V."""
    D, page = 128, 64
    last = 2 ** 31 // (D * page)  # the first page past the limit
    pool = torch.empty(1, (last + 1) * page, D, dtype=torch.float16, device=DEVICE)
    keys, q = rand(40, 1, D, dtype=torch.float16, device=DEVICE), rand(1, 2, D, dtype=torch.float16, seed=1, device=DEVICE)
    sa.write_kv(keys, keys, pool, pool, last * page + torch.arange(40, device=DEVICE))
    assert torch.equal(pool[0, last * page:last * page + 40], keys[:, 0])
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731
    want = exact(q[0].cpu(), keys[:, 0].cpu(), keys[:, 0].cpu())[0]
    assert error(sa.dense_paged(q, pool, pool, ints([last]), ints(40), ints(0, 1), page, 1)[0][0].cpu(), want) < 2e-3
    scratch = torch.zeros(1, 1, 1, D, dtype=torch.float16, device=DEVICE)
    out = sa.sparse_paged(q, pool, pool, ints([last]), ints([[0]]).view(1, 1, 1), ints(16), ints(40), scratch, scratch, ints(0), page)
    assert error(out[0].cpu(), want) < 2e-3


# ----------------------------------------------------------------------------------------------------------------------
# writing, and what is refused


@values
@pytest.mark.parametrize("Hkv,D", [(3, 64), (2, 80)])
def test_write_kv(Hkv, D):
    qkv = rand(5, 2 * Hkv, D, device=DEVICE)  # k and v as slices of one matrix
    k, v = qkv[:, :Hkv], qkv[:, Hkv:]
    pools = [torch.full((Hkv, 40, D), 9.0, device=DEVICE) for _ in "kv"]
    slots = torch.tensor([3, 39, 0, 17, 4], device=DEVICE)
    sa.write_kv(k, v, *pools, slots)
    for pool, x in zip(pools, (k, v)):
        want = torch.full_like(pool, 9.0)
        want[:, slots] = x.transpose(0, 1)
        assert torch.equal(pool, want)


@values
def test_one_sentence_for_what_the_kernels_cannot_do():
    x = Paged([20], 2, 1, 32, 16, torch.float32)
    q, k, v, *rest = x.dense_args()
    with pytest.raises(ValueError, match="float64"):
        sa.dense_paged(q.double(), k.double(), v.double(), *rest)
    with pytest.raises(ValueError, match="at most 256"):
        sa.dense_paged(q.repeat(1, 1, 16), k.repeat(1, 1, 16), v.repeat(1, 1, 16), *rest)


def test_without_triton(tmp_path):
    """The torch half imports and works where Triton is not installed; a kernel's caller hears one sentence."""
    (tmp_path / "triton.py").write_text("raise ImportError('no triton here')")
    code = ("import torch, sparse_attn as sa; x = torch.ones(3, 1, 16); print(sa.PackedCausal([3])(x, x, x).sum().item())\n"
            "try: sa.dense_paged(x, x, x, None, None, None, 16, 1)\nexcept ValueError as e: print(e)")
    root = Path(sa.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("48.0\n") and "pip install triton" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("counts", [[1, 1], [5, 5], [40, 40]])
def test_flash_attn_on_the_strided_pool(counts):
    pytest.importorskip("flash_attn")
    x = Paged([300, 770], 8, 2, 128, 256, torch.float16, counts=counts, junk=0.0)
    q, k, v, table, kv_len, *_ = x.dense_args()
    assert sa.flash_decode_available(q, 256)
    assert error(sa.flash_paged(q, k, v, table, kv_len, 256).cpu(), x.exact()[0]) < 2e-3


# ----------------------------------------------------------------------------------------------------------------------
# ahead of time: registers, spills and shared memory on sm_80 and sm_90

AOT = '''
import re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import sparse_attn as sa

POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}


def compiled(fn, args, options, sm):
    """What a launch with these arguments compiles to: specialised on alignment and ones just as the launcher does it."""
    sig, const, attrs = {}, {}, {}
    for i, p in enumerate(fn.params):
        x = args[p.name]
        if p.is_constexpr:
            sig[p.name], const[(i,)] = "constexpr", x
        elif torch.is_tensor(x):
            sig[p.name], attrs[(i,)] = POINTER[x.dtype], [["tt.divisibility", 16]]
        elif isinstance(x, float):
            sig[p.name] = "fp32"
        elif x == 1 and not p.do_not_specialize:
            sig[p.name], const[(i,)] = "constexpr", 1
        else:
            sig[p.name] = "i32"
            if x % 16 == 0 and not p.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(fn, sig, const, attrs), target=GPUTarget("cuda", sm, 32), options=options)


class Compile:
    """Stands in for a kernel: a launch is compiled for both targets and reported, not run."""
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, num_stages=3, **named):
            args = dict(zip((p.name for p in self.fn.params), args)) | named
            for sm in (80, 90):
                kernel = compiled(self.fn, args, dict(num_warps=num_warps, num_stages=num_stages), sm)
                with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
                    f.write(kernel.asm["cubin"])
                    f.flush()
                    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
                    text = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
                n = {name: int(x) for name, x in re.findall(r"(REG|STACK|LOCAL):([0-9]+)", text)}
                ptx = kernel.asm["ptx"]
                print(self.fn.__name__, case, f"R{args.get('R')}", sm, n["REG"], n["STACK"] + n["LOCAL"], kernel.metadata.shared,
                      ptx.count("mma.sync") + ptx.count("wgmma.mma_async"), ptx.count("cp.async.c"), sep=",", flush=True)
        return launch


for name in ("dense_kernel", "sparse_kernel", "merge_kernel", "mass_kernel", "write_kernel"):
    setattr(sa, name, Compile(getattr(sa, name)))
sa.INTERPRET = True  # lets tensors that are not on CUDA past `check`; nothing is interpreted

for case in sys.argv[1:]:  # dtype-D-G-Q-mass
    dtype, D, G, Q, mass = case.split("-")
    dtype, D, G, Q, B, Hkv = getattr(torch, dtype), int(D), int(G), int(Q), 2, 2
    pool, ints = torch.empty(Hkv, 1024, D, dtype=dtype), torch.ones(B, dtype=torch.int32)
    q, table = torch.empty(B * Q, Hkv * G, D, dtype=dtype), torch.zeros(B, 2, dtype=torch.int32)
    sa.dense_paged(q, pool, pool, table, ints, torch.zeros(B + 1, dtype=torch.int32), 256, Q, mass == "mass", parts=2)
    if Q == 1:
        scratch, kv = torch.empty(Hkv, B, 8, D, dtype=dtype), torch.empty(B, Hkv, D, dtype=dtype)
        sa.sparse_paged(q, pool, pool, table, torch.zeros(B, Hkv, 4, dtype=torch.int32), ints, ints, scratch, scratch, ints, 256, parts=2)
        sa.write_kv(kv, kv, pool, pool, torch.zeros(B, dtype=torch.int64))
'''


def aot(cases):
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(Path(sa.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", AOT, *cases], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split(",") for line in done.stdout.splitlines()]


QUICK = ["bfloat16-64-3-1-", "bfloat16-64-3-5-mass",                               # SmolLM2: decode and draft, verify
         "bfloat16-128-2-1-", "bfloat16-128-4-5-mass", "float16-128-4-40-mass",   # Qwen3: the same, and a prefill
         "float16-80-4-1-", "float32-64-3-5-mass"]
REST = ["bfloat16-64-3-40-mass", "bfloat16-128-8-5-mass", "bfloat16-128-4-40-", "float16-256-8-1-", "bfloat16-256-4-5-mass", "bfloat16-256-4-40-mass",
        "bfloat16-32-1-1-", "float32-64-3-1-", "float32-64-3-40-mass", "float32-128-4-1-", "float32-128-4-5-mass", "float32-128-2-40-", "float32-256-4-5-mass"]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(REST, marks=pytest.mark.slow)], ids=["main", "rest"])
def test_kernels_compile_without_spills(cases):
    """No want of registers, at most the 99 KB of shared memory of every device since sm_80, tensor cores in 16 bits; `pytest -s` prints all of it."""
    rows = aot(cases)
    print("kernel, dtype-D-G-Q-mass, R, sm, registers, spilled bytes, shared bytes, tensor-core instructions, cp.async")
    for row in rows:
        print(*row)
    # none with the triton that the README installs; up to 32 bytes are ptxas's own choice, at 80 or 128 registers of 255: it gives them up to fit one more
    # block on a multiprocessor, and another version may
    assert not [r for r in rows if int(r[5]) > (0 if sa.triton.__version__ == "3.7.1" else 32)]
    assert max(int(r[6]) for r in rows) <= 99 * 1024
    main = [r for r in rows if r[0] in ("dense_kernel", "sparse_kernel")]
    assert {r[0] for r in main} == {"dense_kernel", "sparse_kernel"} and {r[3] for r in main} == {"80", "90"}
    assert all(int(r[7]) > 0 for r in main if not r[1].startswith("float32")) and all(int(r[8]) > 0 for r in main)  # cp.async: loads overlap work
