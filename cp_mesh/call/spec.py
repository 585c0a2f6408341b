"""A call of attention as one record: which tensors and options it has, and how an op carries them.

`cp_mesh.attention` makes a `Call` of what it was given; the ops, their fakes and their sharding rules read it back from
their arguments. What the tensors of a call must be to fit one another is checked here, by all who check it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh._torch import is_batched, resolve_group
from cp_mesh.call.formats import FORMATS, Format
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels import functions
from cp_mesh.kernels.scores import TERMS, Scores

SCORE_OPTIONS = ("softcap", *TERMS, "dropout_p", "dropout_seed")
"""Names of arguments of `cp_mesh.attention` that change the scores."""
GRADED = tuple(TERMS)
"""Tensors of the scores that have a gradient, in the order in which the backward op returns theirs."""


class Options(NamedTuple):
    """The static options of a call. `spec` writes them as JSON, and `Call.read` reads that.

    ``scale`` 0 is that of the head dim (`with_scale`), which compiled code may have as a symbol: a string has none.
    ``softcap`` 0 is none, ``ulysses_degree``, ``inner_ring_size`` and ``head_chunks`` 0 are automatic. ``as_inputs``:
    results lie in memory as the inputs do; else they are contiguous. ``of_root``: ``seq_len`` must be that of the
    `ShardedModel` in whose forward the call is. ``keeps``: tensors that a method made in the forward stay for the
    backward (`Method.kept_shapes`). ``score_mod`` and ``mask_mod`` are handles of `cp_mesh.kernels.functions`, or "".
    ``captured_cuts``: of what they read, which dims are cut over which groups; see `call.captures`. ``sources``:
    which of them mask_mod shows to whom, "" for all; see `cp_mesh.geometry.survey.say_sources`.
    """

    layout: str
    mask: str
    scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_head: int = 0
    first_batch: int = 0
    method: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_degree: int = 0
    inner_ring_size: int = 0
    head_chunks: int = 0
    deterministic: bool = False
    differentiable_lse: bool = False
    as_inputs: bool = False
    of_root: bool = False
    keeps: bool = False
    score_mod: str = ""
    mask_mod: str = ""
    captured_cuts: str = ""
    sources: str = ""

    def spec(self) -> str:
        # Dynamo, which keeps what it traced, warns of a cache that it looks through.
        return _text(self) if torch.compiler.is_compiling() else _kept_text(self)

    def with_scale(self, head_dim: int) -> Options:
        """The same with the scale as a number."""
        return self if self.scale else self._replace(scale=1 / math.sqrt(head_dim))


VERSION = 2
"""Of what an op is told in JSON. Programs that were saved with another one are refused."""


def _text(options: Options) -> str:
    # By hand: Dynamo traces no json.dumps. Of what it made a symbol code is compiled for the number.
    fields = [f'"version": {VERSION}']
    for name, x in options._asdict().items():
        if isinstance(x, str):
            said = x.replace("\\", "\\\\").replace('"', '\\"')
            fields.append(f'"{name}": "{said}"')
        else:
            fields.append(f'"{name}": {guard_scalar(x)!r}'.replace("True", "true").replace("False", "false"))
    return f"{{{', '.join(fields)}}}"


def _options(spec: str) -> Options:
    found = json.loads(spec, strict=False) if spec.startswith("{") else {"version": 1}
    if (version := found.pop("version", 1)) != VERSION:
        what = "a saved program with torch.ops.cp_mesh.attention"
        refuse(what, f"options of version {VERSION}", version, "export or compile the model anew", UnsupportedError)
    return Options(**found)


_kept_text, _kept_options = lru_cache(maxsize=256)(_text), lru_cache(maxsize=256)(_options)


class Tensors(NamedTuple):
    """The tensors of a call beside q, k and v, on this rank, in the order in which the op takes them."""

    documents: Tensor | None = None
    key_padding: Tensor | None = None
    blocks: Tensor | None = None
    layout_index: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    bias: Tensor | None = None
    dropout_seed: Tensor | None = None

    def are_there(self) -> bool:
        """Whether there is any."""
        for x in self:  # noqa: SIM110 - a generator would be a call for each
            if x is not None:
                return True
        return False


NUM_TENSORS = len(Tensors._fields)
_OTHERS = "Tensor[] captured, SymInt seq_len, int seq_dim, str group_name, str spec"
SCHEMA = f"Tensor? {', Tensor? '.join(Tensors._fields)}, {_OTHERS}"
"""Of what `Call.arguments` returns."""
NUM_ARGUMENTS = NUM_TENSORS + len(_OTHERS.split(", "))


class Call(NamedTuple):
    """One call, but for q, k and v: what an op takes after its own tensors.

    ``seq_len``: of the whole sequence. ``captured``: what score_mod reads, then what mask_mod does; of one that is cut
    (`Options.captured_cuts`) this rank's shard.
    """

    tensors: Tensors
    seq_len: int
    seq_dim: int
    group_name: str
    options: Options
    captured: Sequence[Tensor] = ()

    def arguments(self) -> tuple[Any, ...]:
        return (
            *self.tensors, [*self.captured], self.seq_len, self.seq_dim, self.group_name, self.options.spec()
        )  # fmt: skip

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> Call:
        captured, seq_len, seq_dim, group_name, spec = arguments[NUM_TENSORS:]
        options = _options(spec) if torch.compiler.is_compiling() else _kept_options(spec)
        return cls(Tensors(*arguments[:NUM_TENSORS]), seq_len, seq_dim, group_name, options, captured)

    @property
    def format(self) -> Format:
        return FORMATS[self.seq_dim]

    @property
    def group(self) -> dist.ProcessGroup:
        """The cp group."""
        return resolve_group(self.group_name)

    def as_asked(self, x: Tensor) -> Tensor:
        """A [B, H, S, D] result in the caller's format; keeps its memory order, or is made contiguous."""
        x = FORMATS[self.seq_dim].from_bhsd(x)
        return x if self.options.as_inputs else x.contiguous()


def nothing_kept(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward returns after out and lse where nothing is kept for the backward (`Options.keeps`)."""
    return q.new_empty(0), q.new_empty(0), lse.new_empty(0)


class Operand(NamedTuple):
    """What planning reads of a [B, H, S, D] tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def seed_tensor(seed: Any, device: torch.device | str) -> Tensor:
    """int64; of a number, by a fill on the device, which waits for nothing."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for a device, also of the kind "meta", which PyTorch refuses to tell."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the autocast dtype, as `F.scaled_dot_product_attention` casts them: not fp64."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # as in `is_autocast`, with no call
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def make_scores(
    options: Options,
    tensors: Tensors,
    dtype: torch.dtype,
    captured: Sequence[Tensor] = (),
    seq_len: int = Scores.seq_len,
) -> Scores:
    """What the passes are told of the scores; ``dtype`` is the accumulation dtype."""
    seed = tensors.dropout_seed
    cast: dict[str, Any] = {
        name: x if x is None or TERMS[name].broadcasts else x.to(dtype).contiguous()
        for name, x in ((name, getattr(tensors, name)) for name in TERMS)
    }
    return Scores(
        options.scale,
        options.softcap or None,
        dropout_p=options.dropout_p,
        dropout_seed=None if seed is None else torch.nn.functional.pad(seed.reshape(-1), (0, 2 - seed.numel())),
        first_head=options.first_head,
        first_batch=options.first_batch,
        score_mod=functions.find(options.score_mod),
        mask_mod=functions.find(options.mask_mod),
        captured=tuple(x.to(torch.promote_types(x.dtype, dtype)) if x.is_floating_point() else x for x in captured),
        in_order=options.deterministic,
        seq_len=seq_len,
        **cast,
    )


def check_choice(what: str, got: str, allowed: tuple[str, ...], nearest: str) -> None:
    """Refuse a name that is none of those allowed."""
    if got not in allowed:
        close = get_close_matches(got.lower().replace("-", "_"), allowed, 1, cutoff=0.8)
        refuse(what, f"one of {', '.join(allowed)}", repr(got), f"{what}={[*close, nearest][0]!r} works")


def check_dense(**tensors: Any) -> None:
    """Refuse what is no tensor, or one whose elements do not lie in memory as those of q, k and v do; by name."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            refuse(name, "a tensor", type(x).__name__, "use torch.as_tensor")
        if x.is_nested:
            hint = "lay its sequences one after the other, x.values(), and say Mask.from_cu_seqlens(x.offsets())"
            refuse(name, "a dense tensor", "a nested one", hint, UnsupportedError)
        if x.layout != torch.strided:
            refuse(name, "a dense tensor", f"one in the layout {x.layout}", "x.to_dense() makes one", UnsupportedError)
        if not torch.compiler.is_compiling() and is_batched(x):
            hint = "call it once for all, with the mapped dim flattened into the batch, x.flatten(0, 1)"
            refuse(name, "no transform of torch.func", "a tensor under torch.func.vmap", hint, UnsupportedError)


def check_tensors(q: Operand | Tensor, k: Operand | Tensor, v: Operand | Tensor, *, decoding: bool = False) -> None:
    """Shapes, dtypes and devices of [B, H, S, D] tensors, local or global; ``decoding``: q has other rows than k."""
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        refuse("q, k, v", "one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", "cast them to a common dtype")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        refuse("q, k, v", "float64, float32, bfloat16 or float16", q.dtype, "cast them to bfloat16")
    if len({q.device, k.device, v.device}) > 1:
        refuse("q, k, v", "one device", f"{q.device}, {k.device}, {v.device}", "move them to one device")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        refuse("q, k, v", "one batch size", (q.shape[0], k.shape[0], v.shape[0]), "expand the smaller batch")
    if k.shape[1:3] != v.shape[1:3]:
        both = tuple(k.shape), tuple(v.shape)
        refuse("k and v", "equal heads and lengths", both, "only the head dim may differ")
    if q.shape[2] != k.shape[2] and not decoding:
        hint = (
            "pass seq_dim=1 for [B, S, H, D]; cp_mesh.decode takes few queries; leave cross-attention out of the plan,"
            " with keys replicated over cp"
        )
        got = q.shape[2], k.shape[2]
        refuse("q and k", "equal sequence lengths (self-attention)", got, hint, UnsupportedError)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        hint = "each kv head serves an equal number of consecutive query heads"
        refuse("heads", "query heads that are a multiple of kv heads", f"{q.shape[1]} and {k.shape[1]}", hint)
    if q.shape[3] != k.shape[3]:
        refuse("q and k", "one head dim", (q.shape[3], k.shape[3]), "only v's may differ")


def check_scores(q: Tensor | Operand, tensors: Tensors, seq_len: int) -> None:
    """Shapes, dtypes and devices of the scores' tensors against those of this rank's q [B, H, S_local, D]."""
    of_q = {"batch": q.shape[0], "heads": q.shape[1], "rows": q.shape[2], "keys": seq_len}
    for name, term in TERMS.items():
        if (x := getattr(tensors, name)) is None:
            continue
        dims = term.sizes(of_q)
        fits = x.ndim == len(dims) and all(
            size in allowed if allowed else size % 2 for size, allowed in zip(x.shape, dims, strict=True)
        )
        if not fits or not x.is_floating_point():
            words = ", ".join(" or ".join(map(str, allowed)) or "odd" for allowed in dims)
            expected = f"floating point, shape [{words}] with the query heads on this rank"
            hint = "with heads or rows sharded, give each rank those that it holds"
            refuse(name, expected, f"{x.dtype} {tuple(x.shape)}", hint)
    seed = tensors.dropout_seed
    if seed is not None and (seed.ndim > 1 or seed.numel() not in (1, 2) or seed.dtype != torch.int64):
        hint = "torch.tensor([seed, offset])"
        refuse("dropout_seed", "int64 [1] or [2]", f"{seed.dtype} {tuple(seed.shape)}", hint)
    for name in (*TERMS, "dropout_seed"):
        if (x := getattr(tensors, name)) is not None and x.device != q.device:
            refuse(name, f"a tensor on {q.device}", x.device, "move it there")
