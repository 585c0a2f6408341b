"""The adapter of FlashAttention-4. On the CPU, a stand-in that follows the package's conventions in plain PyTorch
shows that the adapter says what it means; on a GPU the package itself is asked the same questions.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from cases import gap
from dense import dense_attention
from inside import CAUSAL, FULL, KERNELS, BackwardTile, Band, Distances, Request, Scores, Segments, room, shortfalls
from ranks import mesh
from torch import Tensor
from torch._guards import active_fake_mode

from cp_mesh import Mask, attention

flash_attn_4 = room("flash_attn_4")
flash_attn_4_package = room("flash_attn_4_package")

PAIR = flash_attn_4._forward, flash_attn_4._backward
SCALE = 0.3


# --- the question asked of a kernel: one tile, next to a second tile that holds other keys of the same queries


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile: ``num_q`` queries of ``heads``, ``num_k`` keys of ``kv_heads``, head dims of k and of v."""

    cover: Band
    num_q: int
    num_k: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int

    def allowed(self, device: torch.device) -> Tensor:
        return Distances.of(self.cover, self.num_q, self.num_k).pairs(self.num_q, self.num_k)[None].to(device)


@dataclass(frozen=True)
class Inputs:
    """Memory as the loops give it: q in [B, S, H, D] order, k and v in one packed buffer [S, B, K, D + Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def packed(num_k: int, tile: Tile, like: Tensor) -> tuple[Tensor, Tensor]:
    """Views [B, K, S, D] and [B, K, S, Dv] of rows 8.. of one buffer, which are not dense in any dim but the last."""
    buffer = like.new_full((num_k + 8, 2, tile.kv_heads, tile.dim + tile.v_dim), math.nan)
    views = buffer[8:].permute(1, 2, 0, 3)
    return views[..., : tile.dim], views[..., tile.dim :]


def draw(tile: Tile, num_k: int, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(num_k)
    like = torch.empty(0, dtype=dtype, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q = normal(2, tile.num_q + 8, tile.heads, tile.dim)[:, 8:].transpose(1, 2)
    dout = normal(2, tile.num_q, tile.heads, tile.v_dim).transpose(1, 2)
    k, v = packed(num_k, tile, like)
    k.copy_(normal(*k.shape))
    v.copy_(normal(*v.shape))
    return Inputs(q, k, v, dout)


def ask(
    forward: Callable,
    backward: Callable,
    tile: Tile,
    dtype: torch.dtype,
    device: str = "cpu",
    scale: float = SCALE,
    softcap: float | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of a kernel on the tile, and those of the dense formula.

    Gradients are those of attention over the tile's keys *and* 24 others that all queries see: the tile is given the
    out and lse of all keys. Its dq is compared with the whole dq less that of the other keys, from the formula.
    """
    own, other = draw(tile, tile.num_k, dtype, device), draw(tile, 24, dtype, device)
    allowed = tile.allowed(own.q.device)
    everything = torch.cat([allowed, allowed.new_ones(1, tile.num_q, 24)], dim=2)

    want = dict(zip(("out", "lse"), dense_attention(own.q, own.k, own.v, allowed, scale, softcap=softcap), strict=True))
    of_all = (own.q.clone(), torch.cat([own.k, other.k], 2), torch.cat([own.v, other.v], 2))
    q, k, v = (x.double().requires_grad_() for x in of_all)
    out, lse = dense_attention(q, k, v, everything, scale, softcap=softcap)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), own.dout.double())
    out, lse = out.detach(), lse.detach()
    group = tile.heads // tile.kv_heads
    other_k, other_v = (x.double().repeat_interleave(group, 1) for x in (other.k, other.v))
    x = scale * q.detach() @ other_k.mT
    tanh = torch.tanh(x / softcap) if softcap else torch.zeros_like(x)
    probs = torch.exp((softcap * tanh if softcap else x) - lse[..., None])
    dscores = own.dout.double() @ other_v.mT - (own.dout.double() * out).sum(-1, keepdim=True)
    want |= {
        "dq": dq - scale * (probs * dscores * (1 - tanh**2)) @ other_k,
        "dk": dk[:, :, : tile.num_k],
        "dv": dv[:, :, : tile.num_k],
    }

    got = dict(zip(("out", "lse"), forward(own.q, own.k, own.v, tile.cover, Scores(scale, softcap)), strict=True))
    # the row slice of a larger lse, as for the second half of a rank's queries
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.full((2, tile.heads, tile.num_q + 3), math.nan, dtype=lse_dtype, device=device)
    rows[:, :, 3:] = lse
    dk_view, dv_view = packed(tile.num_k, tile, own.q)
    question = BackwardTile(
        own.dout, own.q, own.k, own.v, out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2), rows[:, :, 3:], None,
        tile.cover, Scores(scale, softcap), dk_view, dv_view,
    )  # fmt: skip
    got |= dict(zip(("dq", "dk", "dv"), backward(question), strict=True))
    got["buffers used"] = torch.tensor([got["dk"] is dk_view, got["dv"] is dv_view])
    return got, want


def check(got: dict[str, Tensor], want: dict[str, Tensor], buffers_used: tuple[bool, bool] = (True, True)) -> None:
    assert got["buffers used"].tolist() == list(buffers_used)
    for name, x in want.items():
        assert got[name].shape == x.shape, name
        assert gap(got[name], x) <= 1e-12, name


# --- stand-ins


class Calls(list):
    """Arguments of every call, by name; apart, of those with fake tensors, which only compile."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[str, dict]] = []

    def append(self, call: tuple[str, dict]) -> None:
        (self.compiled if active_fake_mode() else super()).append(call)

    def of(self, name: str) -> list[dict]:
        return [arguments for called, arguments in self if called == name]


def bottom_right(num_q: int, num_k: int, left: int | None, right: int | None) -> Tensor:
    """bool [num_q, num_k], said as the packages say it."""
    rows, columns = torch.arange(num_q)[:, None] + num_k - num_q, torch.arange(num_k)[None]
    keep = torch.ones(num_q, num_k, dtype=torch.bool)
    if left is not None:
        keep &= columns >= rows - left
    if right is not None:
        keep &= columns <= rows + right
    return keep


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, Dv], lse [B, H, S]) of [B, S, H, D] inputs."""
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    out, lse = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), keep[None], scale, softcap=softcap or None)
    return out.transpose(1, 2), lse


def stand_in_backward(
    dout, q, k, v, out, lse, scale: float, softcap: float, keep: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Writes dq, dk, dv [B, S, H, D], from the out and lse it is given."""
    assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out, dq, dk, dv))
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    tanh = torch.tanh(scores / softcap) if softcap else torch.zeros_like(scores)
    scores = softcap * tanh if softcap else scores
    probs = torch.exp(scores.masked_fill(~keep, -math.inf) - lse[..., None])
    delta = torch.einsum("bihd,bihd->bhi", dout, out)
    dscores = probs * (torch.einsum("bihd,bjhd->bhij", dout, values) - delta[..., None]) * (1 - tanh**2) * scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", dscores, keys))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", dscores, q).unflatten(2, (-1, group)).sum(3))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", probs, dout).unflatten(2, (-1, group)).sum(3))


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable) -> None:
    """Put a module of that name, and the packages around it, where import finds them."""
    flash_attn_4_package.import_once.cache_clear()
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None, is_package=True), []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, function in functions.items():
        setattr(module, key, function)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def sequences(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, num_q, num_k) -> list:
    """(rows, keys) of each sequence, as slices."""
    n = len(seqused_q)
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == n + 1 and len(seqused_k) == n
    found = []
    for begins, lens, longest, total in (
        (cu_seqlens_q.tolist(), seqused_q.tolist(), max_seqlen_q, num_q),
        (cu_seqlens_k.tolist(), seqused_k.tolist(), max_seqlen_k, num_k),
    ):
        # what the backward pads by the number of a sequence must not meet the next
        assert all(begin + length <= after for begin, length, after in zip(begins, lens, begins[1:], strict=False))
        assert max(lens) <= longest and begins[-2] + lens[-1] <= begins[-1] <= total and min(lens) > 0
        found.append([slice(begin, begin + length) for begin, length in zip(begins, lens, strict=False)])
    return list(zip(*found, strict=True))


def fa4_functions(calls: Calls) -> dict[str, Callable]:
    def window(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        if left is not None and right is not None and left < 0 and right < 0:
            left = right = None  # so the package says: both negative is no window at all
        return left, 0 if causal else right

    def forward(q, k, v, qv=None, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                max_seqlen_q=None, max_seqlen_k=None, softmax_scale, causal=False, softcap=None, window_size_left=None,
                window_size_right=None, return_lse=False, out=None, lse=None):  # fmt: skip
        calls.append(("fwd", locals()))
        left, right = window(causal, window_size_left, window_size_right)
        if cu_seqlens_q is not None:
            assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], q.shape[0])
            told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
            for rows, keys in sequences(*told, len(q), len(k)):
                keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, left, right)
                part = stand_in_forward(q[None, rows], k[None, keys], v[None, keys], softmax_scale, softcap, keep)
                out[rows], lse[:, rows] = part[0][0], part[1][0]
            return out, lse if return_lse else None, None, None, None
        keep = bottom_right(q.shape[1], k.shape[1], left, right)
        for given, result in zip((out, lse), stand_in_forward(q, k, v, softmax_scale, softcap, keep), strict=True):
            given.copy_(result)
        return out, lse if return_lse else None, None, None, None

    def backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                 window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                 max_seqlen_q=None, max_seqlen_k=None, *, deterministic=False, dq=None, dk=None,
                 dv=None):  # fmt: skip
        calls.append(("bwd", locals()))
        assert q.shape[-2] == k.shape[-2] or q.shape[-1] == v.shape[-1], "GQA backward requires equal head dims"
        dq, dk, dv = (torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
        left, right = window(causal, window_size_left, window_size_right)
        if cu_seqlens_q is not None:
            told = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
            for rows, keys in sequences(*told, len(q), len(k)):
                keep = bottom_right(rows.stop - rows.start, keys.stop - keys.start, left, right)
                ours = (dout[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows])
                grads = (dq[None, rows], dk[None, keys], dv[None, keys])
                stand_in_backward(*ours, lse[None, :, rows], softmax_scale, softcap, keep, *grads)
            return dq, dk, dv
        keep = bottom_right(q.shape[1], k.shape[1], left, right)
        stand_in_backward(dout, q, k, v, out, lse, softmax_scale, softcap, keep, dq, dk, dv)
        return dq, dk, dv

    return {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    install(monkeypatch, "flash_attn.cute.interface", **fa4_functions(calls))


@pytest.fixture(autouse=True)
def _forget_what_is_installed() -> Iterator[None]:
    yield
    flash_attn_4_package.import_once.cache_clear()


# --- on the CPU

BANDS = {
    "full": Distances(),
    "causal": Distances(0, None),
    "strict": Distances(1, None),
    "causal with older keys": Distances(-5, None),
    "rows without keys": Distances(9, None),
    "window": Distances(0, 3),
    "window around": Distances(-2, 4),
    "window before": Distances(2, 6),
    "window after": Distances(-7, -3),
    "upper triangle": Distances(None, 0),
    "last rows without keys": Distances(None, -9),
}
SHAPES = ((16, 16), (16, 11), (11, 16), (1, 16), (16, 1))
HEADS = ((2, 2), (4, 2), (3, 1))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("at", BANDS.values(), ids=BANDS)
def test_fa4_takes_every_band(fa4, calls, at, heads) -> None:
    for num_q, num_k in SHAPES:
        tile = Tile(at.band(num_q, num_k), num_q, num_k, *heads, 16, 16)
        if tile.allowed(torch.device("cpu")).any():
            check(*ask(flash_attn_4._forward, flash_attn_4._backward, tile, torch.float64))
    assert len(calls.of("fwd")) == len(calls.of("bwd")) >= 1


def test_fa4_is_told_the_fewest_bounds(fa4, calls) -> None:
    """A bound that is not there must be None: it is part of what the package compiles for."""
    cases = {(None, None): (None, None), (0, None): (None, -5), (-5, None): (None, 0), (1, 3): (8, -6)}
    for at, window in cases.items():
        tile = Tile(Distances(*at).band(11, 16), 11, 16, 2, 2, 8, 8)
        ask(flash_attn_4._forward, flash_attn_4._backward, tile, torch.float64)
        for name, arguments in calls[-2:]:
            assert (arguments["window_size_left"], arguments["window_size_right"]) == window, (at, name)
            assert arguments["causal"] is False


def test_fa4_refuses_empty_bands(fa4) -> None:
    """Both bounds negative would mean no window at all to the package."""
    tile = Tile(Distances(3, 1).band(8, 8), 8, 8, 1, 1, 8, 8)
    with pytest.raises(AssertionError, match="no empty tiles"):
        ask(flash_attn_4._forward, flash_attn_4._backward, tile, torch.float64)


@pytest.mark.parametrize(
    ("heads", "dims", "widths"),
    [
        ((2, 2), (192, 128), [(192, 128), (192, 128)]),
        ((4, 2), (192, 128), [(192, 128), (192, 192)]),
        ((2, 2), (16, 24), [(24, 24), (24, 24)]),
        ((4, 2), (24, 16), [(24, 24), (24, 24)]),
        ((4, 2), (16, 24), [(24, 24), (24, 24)]),
    ],
    ids=str,
)
def test_fa4_head_dims_that_differ(fa4, calls, heads, dims, widths) -> None:
    """Pairs of head dims for which the package has no kernel are widened with zeros."""
    tile = Tile(Distances(-2, 6).band(9, 12), 9, 12, *heads, *dims)
    used = (dims[0] == widths[1][0], dims[1] == widths[1][1])  # a buffer that is as wide as what is written
    check(*ask(flash_attn_4._forward, flash_attn_4._backward, tile, torch.float64), used)
    assert [(a["q"].shape[3], a["v"].shape[3]) for _, a in calls] == widths


@pytest.mark.parametrize("cover", [FULL, CAUSAL], ids=["full", "causal"])
def test_softcap(fa4, cover, calls) -> None:
    """It is passed in both passes, and to the stand-ins 0 is none, as to the package."""
    tile = Tile(cover, 12, 12, 4, 2, 16, 16)
    got, want = ask(*PAIR, tile, torch.float64, softcap=0.7)
    check(got, want)
    plain, _ = ask(*PAIR, tile, torch.float64)
    assert all(gap(plain[key], want[key]) > 1e-3 for key in want)
    assert [arguments["softcap"] or 0.0 for _, arguments in calls] == [0.7, 0.7, 0.0, 0.0]


def test_inputs_are_passed_as_views(fa4, calls) -> None:
    """No kernel needs a copy of q, k, v, out or dout, however they lie in memory."""
    tile, seen = Tile(CAUSAL, 12, 12, 4, 2, 16, 16), {}
    forward, backward = PAIR

    def spy(question: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        seen.update(question._asdict())
        return backward(question)

    ask(forward, spy, tile, torch.float64)
    for called, arguments in calls:
        for tensor in ("q", "k", "v") if called == "fwd" else ("q", "k", "v", "out", "dout", "dk", "dv"):
            assert arguments[tensor].data_ptr() == seen[tensor].data_ptr(), tensor
            assert arguments[tensor].stride() == seen[tensor].transpose(1, 2).stride(), tensor


def test_buffers_that_cannot_be_written(fa4) -> None:
    """None given, rows off the 16-byte grid, a start off it: the kernel's own tensors come back, and are right."""
    tile = Tile(CAUSAL, 6, 6, 2, 1, 16, 16)
    forward, backward = PAIR

    def shifted(view: Tensor) -> Tensor:
        return view.new_empty(view.numel() + 1)[1:].view(view.shape)

    def ragged(view: Tensor) -> Tensor:
        return view.new_empty(*view.shape[:-1], 17)[..., :16]

    for change in (lambda view: None, shifted, ragged):

        def with_buffers(t: BackwardTile, change=change) -> tuple[Tensor, Tensor, Tensor]:
            t = t._replace(dk=change(t.dk), dv=change(t.dv))
            dq, dk, dv = backward(t)
            assert dk is not t.dk and dv is not t.dv
            return dq, dk, dv

        check(*ask(forward, with_buffers, tile, torch.float64), buffers_used=(False, False))


REQUEST = Request("cuda", (9, 0), torch.bfloat16, frozenset({"full", "causal"}), 128, 128, False, False)


def test_an_absent_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash_attn_4_package.import_once.cache_clear()
    (lacking,) = shortfalls(flash_attn_4.FA4.capability, REQUEST)
    assert lacking.startswith("package flash_attn.cute.interface (pip install cp_mesh[flash]; ")


def test_a_package_that_is_there_is_found(fa4) -> None:
    for deterministic in (False, True):
        assert shortfalls(flash_attn_4.FA4.capability, replace(REQUEST, deterministic=deterministic)) == []


@pytest.mark.parametrize("cover", ["window", "segments"])
def test_fa4_is_deterministic_where_it_was_tried(fa4, cover: str) -> None:
    request = replace(REQUEST, covers=frozenset({"full", cover}), deterministic=True)
    assert shortfalls(flash_attn_4.FA4.capability, request) == [f"a deterministic backward of '{cover}' tiles"]


def deterministic_calls(rank: int, deterministic: bool, mask: Mask) -> list[tuple[Any, ...]]:
    """Of each backward call whether it was asked to be, and its window."""
    calls = Calls()
    options: dict[str, Any] = {"devices": ("cpu",), "dtypes": (torch.float64,), "compute_capability": (0, 0)}
    here = replace(flash_attn_4.FA4, capability=replace(flash_attn_4.FA4.capability, only_on=(), **options))
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(KERNELS, fa4=here):
        install(patch, "flash_attn.cute.interface", **fa4_functions(calls))
        q, k, v = (torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
        axis = mesh((2,), ("cp",))
        attention(q, k, v, mesh=axis, mask=mask, kernel="fa4", deterministic=deterministic).sum().backward()
    flash_attn_4_package.import_once.cache_clear()
    return [
        tuple(given[x] for x in ("deterministic", "window_size_left", "window_size_right")) for given in calls.of("bwd")
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_call_has_the_reproducible_backward(pool, deterministic: bool) -> None:
    """Of full and of causal tiles, which are those that it was tried for: any other band is a window there."""
    windows = set()
    for mask in (Mask(), Mask(length=13), Mask(causal=False, window=(None, 4))):
        for asked in pool(2).run(deterministic_calls, deterministic, mask):
            assert asked and {x[0] for x in asked} == {deterministic}
            windows |= {x[1:] for x in asked}
    assert (windows <= {(None, None), (None, 0)}) == deterministic, windows


def test_windows_and_machines() -> None:
    def lacks(**changes) -> list[str]:
        return shortfalls(replace(flash_attn_4.FA4.capability, lacking=lambda: None), replace(REQUEST, **changes))

    assert lacks(covers=frozenset({"window"})) == lacks(v_head_dim=64) == []
    assert lacks(compute_capability=(8, 0)) and lacks(compute_capability=(10, 0))


def broken(tmp_path: Path, text: str) -> None:
    """Packages whose modules hold nothing but this."""
    for package in ("flash_attn", "flash_attn/cute"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "flash_attn/cute/interface.py").write_text(text)


def run_with(path: Path, program: str) -> None:
    program = f"import sys; sys.path[:0] = [{str(path)!r}, {str(Path(__file__).parent)!r}]\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


CHOOSE = """
import torch, cp_mesh
from inside import Request, inner
choose_kernel = inner("table", "choose_kernel")
def chosen(device, capability):
    covers = frozenset({"full", "causal"})
    return choose_kernel("auto", Request(device, capability, torch.bfloat16, covers, 64, 64, False, False)).name
"""


@pytest.mark.full
def test_nothing_is_imported_for_calls_that_it_cannot_serve(tmp_path) -> None:
    broken(tmp_path, "raise SystemExit('imported')")
    run_with(tmp_path, CHOOSE + "assert chosen('cpu', (0, 0)) == 'cpu_flash' and chosen('cuda', (7, 5)) == 'reference'")


@pytest.mark.parametrize(
    "text",
    [
        "import cutlass_that_is_not_there",
        *(
            pytest.param(text, marks=pytest.mark.full)
            for text in ("raise RuntimeError('another ABI')", "def _flash_attn_fwd(q, k, v): pass")
        ),
    ],
)
@pytest.mark.full
def test_packages_that_do_not_work_are_passed_over(tmp_path, text) -> None:
    """As flash-attn 2.8.3 brings a flash_attn.cute that lacks its needs, and other parameters."""
    broken(tmp_path, text)
    run_with(tmp_path, CHOOSE + "assert chosen('cuda', (9, 0)) == 'cudnn', chosen('cuda', (9, 0))")


# --- on a GPU

GPU_BANDS = {
    **{name: BANDS[name] for name in ("full", "causal", "strict")},
    "strict with older keys": Distances(-40, None),
    "blocks of rows without keys": Distances(170, None),
    "window": Distances(0, 70),
    "window before": Distances(5, 40),
    "window after": Distances(-90, -3),
    "wide window": Distances(-100, 200),
    "upper triangle": Distances(None, 0),
    "last blocks of rows without keys": Distances(None, -170),
}
GPU_SHAPES = ((300, 300), (300, 190), (190, 301), (1, 129))


def gpu_pair() -> tuple[Callable, Callable]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here = replace(REQUEST, compute_capability=torch.cuda.get_device_capability())
    if missing := shortfalls(flash_attn_4.FA4.capability, here):
        pytest.skip(f"fa4 lacks {', '.join(missing)}")
    return PAIR


def close(got: dict[str, Tensor], want: dict[str, Tensor], what: object) -> None:
    """RMS errors of each head's blocks of 64 rows, against 2⁻⁸ of rounding in each of P, out, dS and the result."""
    assert got["buffers used"].all()
    assert torch.equal(got["lse"] == -math.inf, want["lse"] == -math.inf), what
    for name, exact in want.items():
        x = got[name].double()
        if name == "lse":
            seen = exact > -math.inf
            assert ((x - exact)[seen].abs() <= 1e-4 * (1 + exact[seen].abs())).all(), (what, name)
            continue
        assert x.isfinite().all(), (what, name)
        if name == "out":
            assert (x[want["lse"] == -math.inf] == 0).all(), what
        for part, part_exact in zip(x.split(64, 2), exact.split(64, 2), strict=True):
            error, signal = ((y.square().mean(dim=(2, 3)).sqrt()) for y in (part - part_exact, part_exact))
            assert (error <= 2**-6 * signal + 2**-8 * exact.square().mean().sqrt()).all(), (what, name)


@pytest.mark.gpu
@pytest.mark.parametrize("at", GPU_BANDS.values(), ids=GPU_BANDS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_fa4_on_gpu_takes_every_band(at, heads) -> None:
    pair = gpu_pair()
    for num_q, num_k in GPU_SHAPES:
        tile = Tile(at.band(num_q, num_k), num_q, num_k, *heads, 128, 128)
        if tile.allowed(torch.device("cpu")).any():
            close(*ask(*pair, tile, torch.bfloat16, "cuda", tile.dim**-0.5), tile)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_fa4_on_gpu_is_launched_directly(heads) -> None:
    """All kinds of a causal model, after their first call; a gradient that was spread over heads leaves no trace."""
    gpu_pair()
    blocks = torch.tensor([[b, e, b, e] for b, e in ((0, 100), (100, 500), (510, 1024))])
    q, k, v, dout = (
        torch.randn(1, 1024, n, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    scores = Scores(64**-0.5)
    for cover in (FULL, CAUSAL, Segments((blocks,), None, None), Segments((blocks,), None, 0)):
        flash_attn_4_package._compiled.clear()
        out, lse = flash_attn_4._forward(q, k, v, cover, scores)
        found = []
        for given in (dout[:, :1].expand_as(dout), dout, dout):
            found.append(flash_attn_4._backward(BackwardTile(given, q, k, v, out, lse, None, cover, scores)))
        again = flash_attn_4._forward(q, k, v, cover, scores)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
        assert all(gap(x, y.double()) <= 2**-7 for x, y in zip(found[1], found[2], strict=True))
        kept = {kind[0]: len(kernels) for kind, kernels in flash_attn_4_package._compiled.items() if kernels}
        assert kept == {"_flash_attn_fwd": 1, "_flash_attn_bwd": 3 if heads[0] == heads[1] else 5}


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (256, 256), (192, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=str)
def test_fa4_on_gpu_takes_head_dims(dims, heads) -> None:
    forward, backward = gpu_pair()
    for band in (CAUSAL, Distances(-40, 100).band(200, 200)):
        tile = Tile(band, 200, 200, *heads, *dims)
        got, want = ask(forward, backward, tile, torch.float16, "cuda", tile.dim**-0.5)
        got["buffers used"] = torch.ones(2)  # not where head dims are widened
        close(got, want, tile)


@pytest.mark.gpu
def test_softcap_on_gpu() -> None:
    pair = gpu_pair()
    for cover, num_k in ((FULL, 190), (CAUSAL, 300)):
        tile = Tile(cover, 300, num_k, 8, 2, 128, 128)
        close(*ask(*pair, tile, torch.bfloat16, "cuda", 4 * tile.dim**-0.5, softcap=3.0), tile)


@pytest.mark.gpu
def test_a_call_can_be_captured() -> None:
    """No call waits for the device or copies to it from the host, once its variant is compiled."""
    forward, backward = gpu_pair()
    tile = Tile(CAUSAL, 256, 256, 4, 2, 128, 128)
    question: dict[str, BackwardTile] = {}

    def remember(t: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        question["tile"] = t
        return backward(t)

    got, want = ask(forward, remember, tile, torch.bfloat16, "cuda", tile.dim**-0.5)
    t = question["tile"]
    t.dk.zero_(), t.dv.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward(t.q, t.k, t.v, t.cover, t.scores)
        dq, dk, dv = backward(t)
    graph.replay()
    torch.cuda.synchronize()
    captured = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "buffers used": got["buffers used"]}
    close(captured, want, "fa4")
