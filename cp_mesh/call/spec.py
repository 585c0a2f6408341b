"""A call of attention: `AttentionSpec`, the keywords that are no tensors, and `Call`, the spec with the tensors.

`cp_mesh.attention` makes a `Call` from its arguments; the ops, their fakes and their sharding rules read it back from
theirs. The checks of keywords, and of tensors against one another, are here, for all callers.
"""

from __future__ import annotations

import json
import math
import numbers
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cp_mesh._torch import is_batched, resolve_group
from cp_mesh.call.formats import FORMATS, Format
from cp_mesh.errors import MOST, UnsupportedError, as_int, check_int, refuse, written
from cp_mesh.geometry.layouts import LAYOUTS, Layout, ZigZag, parse_layout
from cp_mesh.geometry.mask import TENSORS, Mask
from cp_mesh.kernels import functions
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.kernels.scores import TERMS, Scores

SCORE_OPTIONS = ("softcap", *TERMS, "dropout_p", "dropout_seed")
"""Names of arguments of `cp_mesh.attention` that change the scores."""
GRADED = tuple(TERMS)
"""Tensors of the scores that can have a gradient, in the order in which the backward op returns the gradients."""
_COUNTS = ("ulysses_degree", "head_chunks")
FACTORS = ("scale", "softcap", "dropout_p")
EXECUTION = ("kernel", "method", "transport", *_COUNTS, "deterministic")
"""Keywords that choose how to compute; they change results only by rounding."""
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_PLAIN = {str, bool, int, float, type(None)}


class AttentionSpec(NamedTuple):
    """The keywords of `attention` that are no tensors, and further fields that styles and planning set.

    `make_spec` makes it from keywords, with 0 for None. `text` writes it as JSON, which `Call.read` reads.

    Attributes:
        layout, mask: the texts of their ``spec()``.
        scale: 0 stands for 1 / sqrt(D) (`with_scale`): compiled code may have D as a symbol, which a text cannot hold.
        first_head, first_batch: global indices of the first head and batch row of a local query, if scores read them.
        differentiable_lse: lse is a result that may have a gradient.
        as_inputs: results have the memory order of the inputs; else they are contiguous.
        of_root: the sequence must be the one of the `ShardedModel` in whose forward the call is.
        keeps: the method may save tensors of the forward for the backward (`Method.kept_shapes`).
        score_mod, mask_mod: handles of `cp_mesh.kernels.functions`, or "".
        sources: which ranks' keys mask_mod shows to each rank, "" for all; see `cp_mesh.geometry.survey.say_sources`.
    """

    layout: str
    mask: str
    scale: float = 0.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    first_head: int = 0
    first_batch: int = 0
    method: str = "auto"
    kernel: str = "auto"
    transport: str = "auto"
    ulysses_degree: int = 0
    head_chunks: int = 0
    deterministic: bool = False
    differentiable_lse: bool = False
    as_inputs: bool = False
    of_root: bool = False
    keeps: bool = False
    score_mod: str = ""
    mask_mod: str = ""
    sources: str = ""

    def text(self) -> str:
        """The spec as JSON, an argument of the ops."""
        # Not cached in a trace: Dynamo would warn of the cache.
        return _text(self) if torch.compiler.is_compiling() else _cached_text(self)

    def with_scale(self, head_dim: int) -> AttentionSpec:
        """The spec with a scale that is not 0."""
        return self if self.scale else self._replace(scale=1 / math.sqrt(head_dim))

    def of_plan(self) -> AttentionSpec:
        """The spec without the numbers of a score: a plan reads only whether there are any (`Scores.features`)."""
        return self._replace(scale=0.0, softcap=0.0, dropout_p=0.0)


VERSION = 2
"""Version of the JSON that the ops take. Programs that were saved with another version are refused."""


def _text(spec: AttentionSpec) -> str:
    # By hand, as Dynamo does not trace json.dumps. guard_scalar specializes a symbol to its number.
    fields = [f'"version": {VERSION}']
    for name, x in spec._asdict().items():
        if isinstance(x, str):
            said = x.replace("\\", "\\\\").replace('"', '\\"')
            fields.append(f'"{name}": "{said}"')
        else:
            fields.append(f'"{name}": {guard_scalar(x)!r}'.replace("True", "true").replace("False", "false"))
    return f"{{{', '.join(fields)}}}"


def _read(text: str) -> AttentionSpec:
    found = json.loads(text, strict=False) if text.startswith("{") else {"version": 1}
    if (version := found.pop("version", 1)) != VERSION:
        what = "a saved program with torch.ops.cp_mesh.attention"
        refuse(what, f"options of version {VERSION}", version, "export or compile the model anew", UnsupportedError)
    return AttentionSpec(**found)


_cached_text, _cached_spec = lru_cache(maxsize=256)(_text), lru_cache(maxsize=256)(_read)


def make_spec(
    layout: Layout = ZigZag(),  # noqa: B008 - frozen
    mask: Mask = Mask(causal=True),  # noqa: B008 - frozen
    return_lse: bool = False,
    deterministic: bool | None = None,
    graded: bool = False,
    **others: Any,
) -> AttentionSpec:
    """The spec of keywords; refuses wrong ones.

    It is cached, as checks take host time: layers with equal keywords share it. It holds no mask tensors, which differ
    in each batch.

    Args:
        graded: whether any tensor of the call needs a gradient.
        others: keywords of `attention`, and fields of `AttentionSpec`.
    """
    if type(mask) is not Mask or not isinstance(layout, Layout):
        read_keywords({"layout": layout, "mask": mask})
    fixed = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    given = layout, mask.spec(), return_lse, fixed, graded
    if not torch.compiler.is_compiling() and {*map(type, others.values())} <= _PLAIN:
        with suppress(TypeError):  # a value without a hash
            return _cached_make(*given, **others)
    return _make_spec(*given, **others)


def _make_spec(
    layout: Layout, mask: str, return_lse: bool, deterministic: bool, graded: bool, **others: Any
) -> AttentionSpec:
    others = read_keywords({"return_lse": return_lse, "deterministic": deterministic, **others})
    spec, chosen, compiling = layout.spec(), others.get("method", "auto"), torch.compiler.is_compiling()
    if (x := others.get("ulysses_degree")) is not None and chosen != "hybrid":
        got, hint = f"{x} with method={chosen!r}", "method='hybrid' takes it, or leave it out"
        refuse("ulysses_degree", "None, but with method='hybrid'", got, hint)
    if LAYOUTS.get(spec.partition(":")[0]) is not type(layout):
        hint = "the op rebuilds layouts by name: add your class to cp_mesh.geometry.layouts.LAYOUTS"
        refuse("layout", f"one of {', '.join(LAYOUTS)}", type(layout).__name__, hint)
    if not compiling and layout.tensor is None and parse_layout(spec) != layout:
        hint = 'put its integer fields into spec(), "name:1,2", and make it a frozen dataclass'
        refuse("layout", f"{layout} from its spec", parse_layout(spec), hint)
    for name in FACTORS:  # of Python, symbolic or NumPy
        x = others.get(name) or 0.0
        others[name] = float(guard_scalar(x if isinstance(x, _NUMBERS) else float(x)))
    for name in _COUNTS:
        others[name] = others.get(name) or 0
    # A trace must know the sizes of kept tensors. In compiled code it knows only those of Ulysses: in inner groups they
    # differ between ranks. DTensors keep nothing.
    others["keeps"] = graded and others.get("as_inputs", False) and (chosen == "ulysses" or not compiling)
    return AttentionSpec(spec, mask, differentiable_lse=others.pop("return_lse") and graded, **others)


_cached_make = lru_cache(maxsize=256, typed=True)(_make_spec)


def _number(x: Any) -> Any:
    """The number in a tensor, if reading it loses no gradient and does not wait for a GPU; other values unchanged."""
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or x.requires_grad or x.dtype == torch.bool:
        return x
    return x.item() if x.numel() == 1 and x.device.type == "cpu" else x


def _rules() -> tuple[tuple[str, Callable[[Any], bool], str, str], ...]:
    """The rule of each keyword: its name, a check of the value, and the expectation and hint of an error message.

    Names of kernels, methods and transports are checked where they are looked up. A function, not a constant:
    torch.compile would guard every part of a constant.
    """
    return (
        ("layout", lambda x: isinstance(x, Layout), "a Layout", "ZigZag(), Striped(), Contiguous(), Permuted(...)"),
        ("mask", lambda x: type(x) is Mask, "a Mask",
         "describe it on positions, Mask(causal=, window=, documents=, key_padding=, prefix=, blocks=);"
         " cp_mesh.batch_mask reads a mask of tokens [B, S]; any other can be bias= of 0 and -inf with"
         " Mask(causal=False)"),
        ("seq_len", lambda x: x is None or _is_int(x), "an int, tokens in the whole sequence", "or None"),
        ("scale", _is_positive, "a positive number or None",
         "multiply q by a learned or negative scale instead, and call item() on a GPU tensor"),
        ("softcap", _is_positive, "a positive number or None", "None leaves scores unbounded"),
        *((name, lambda x: x is None or (type(x) is int and 0 < x <= MOST), f"a positive int up to {MOST} or None",
           "None is automatic") for name in _COUNTS),
        ("deterministic", lambda x: x is None or isinstance(x, bool), "True, False or None",
         "None follows torch.use_deterministic_algorithms"),
        ("return_lse", lambda x: isinstance(x, bool), "True or False", "it adds a second result"),
        *((name, lambda x: isinstance(x, str), "a name", f"{name}='auto' works") for name in EXECUTION[:3]),
        ("dropout_p", lambda x: _is_number(x) and 0 <= x < 1, "a probability in [0, 1)", "dropout_p=0.0 drops nothing"),
        ("dropout_seed", lambda x: x is None or isinstance(x, Tensor) or _is_int(x), "an int or an int64 tensor",
         "round it first"),
        ("dropout_seed", lambda x: not isinstance(x, int) or 0 <= x < 2**63, "0 <= seed < 2**63",
         "take it modulo 2**63"),
    )  # fmt: skip


def read_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with Python's numbers in place of NumPy's and of one-element CPU tensors; refuses wrong values."""
    found = dict(given)
    for name, x in given.items():
        if name in FACTORS:
            found[name] = _number(x)
        elif name in (*_COUNTS, "seq_len") or (name == "dropout_seed" and not isinstance(x, Tensor)):
            found[name] = as_int(x)
    for name, is_right, expected, hint in _rules():
        if name in found and not is_right(x := found[name]):
            refuse(name, expected, shown(x), hint)
    return found


def shown(x: object) -> str:
    """A value for a message: strings in quotes, and tensors without their elements."""
    if isinstance(x, Tensor):
        shown = type(x).__name__ if x.ndim or x.is_meta else f"{x.detach().as_subclass(Tensor)}"
        return f"{shown}{f' on {x.device.type}' * (not x.is_cpu)}{', which requires a gradient' * x.requires_grad}"
    return repr(x) if isinstance(x, str) else written(x)


def _is_number(x: object) -> bool:
    return type(x) in (float, int) or (
        isinstance(x, numbers.Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)
    )


def _is_positive(x: object) -> bool:
    return x is None or (_is_number(x) and 0 < x < math.inf)  # type: ignore[operator]


def _is_int(x: object) -> bool:
    return isinstance(x, int | torch.SymInt) and not isinstance(x, bool)


_NAMES = (*TENSORS, "layout_index", *TERMS, "dropout_seed")
_Named: Any = cast(Any, namedtuple)("Tensors", _NAMES, defaults=[None] * len(_NAMES))


class Tensors(_Named):
    """The tensors of a call beside q, k and v, on this rank, in the order in which the op takes them.

    They are the mask's (`geometry.mask.TENSORS`), `Layout.tensor`, one for each of `TERMS`, and the dropout seed.
    """

    __slots__ = ()

    @classmethod
    def of(cls, mask: Mask, layout: Layout, *others: Tensor | None, **named: Tensor | None) -> Tensors:
        """The tensors of a mask and a layout, and others."""
        return cls(mask.documents, mask.key_padding, mask.blocks, layout.tensor, *others, **named)


NUM_TENSORS = len(Tensors._fields)
_OTHERS = "Tensor[] captured, SymInt seq_len, int seq_dim, str group_name, str spec"
SCHEMA = f"Tensor? {', Tensor? '.join(Tensors._fields)}, {_OTHERS}"
"""The op schema of the arguments that `Call.arguments` returns."""
NUM_ARGUMENTS = NUM_TENSORS + len(_OTHERS.split(", "))


class Call(NamedTuple):
    """One call without q, k and v: the arguments that an op takes after its own tensors.

    ``seq_len``: of the whole sequence. ``captured``: the tensors that score_mod reads, then those of mask_mod.
    """

    tensors: Tensors
    seq_len: int
    seq_dim: int
    group_name: str
    options: AttentionSpec
    captured: Sequence[Tensor] = ()

    def arguments(self) -> tuple[Any, ...]:
        text = self.options.text()
        return *self.tensors, [*self.captured], self.seq_len, self.seq_dim, self.group_name, text

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> Call:
        captured, seq_len, seq_dim, group_name, text = arguments[NUM_TENSORS:]
        spec = _read(text) if torch.compiler.is_compiling() else _cached_spec(text)
        return cls(Tensors(*arguments[:NUM_TENSORS]), seq_len, seq_dim, group_name, spec, captured)

    def scores(self, q: Operand | Tensor) -> Scores:
        """The scores of this call; q in any format."""
        options, dtype = self.options.with_scale(q.shape[-1]), accumulation_dtype(q.dtype)
        return make_scores(options, self.tensors, dtype, self.captured, self.seq_len)

    @property
    def format(self) -> Format:
        return FORMATS[self.seq_dim]

    @property
    def group(self) -> dist.ProcessGroup:
        """The cp group."""
        return resolve_group(self.group_name)

    def in_callers_format(self, *results: Tensor) -> Sequence[Tensor]:
        """[B, H, S, D] results in the caller's format; contiguous unless the spec has ``as_inputs``."""
        found = results if self.seq_dim == 2 else self.format.from_bhsd(*results)
        return found if self.options.as_inputs else [x.contiguous() for x in found]


def nothing_kept(q: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The empty tensors that the forward returns after out and lse if it keeps none (`AttentionSpec.keeps`)."""
    return q.new_empty(0), q.new_empty(0), lse.new_empty(0)


class Operand(NamedTuple):
    """The metadata of a [B, H, S, D] tensor that planning reads."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def seed_tensor(seed: Any, device: torch.device | str) -> Tensor:
    """The seed as an int64 tensor; a number is filled in on the device, without a synchronizing copy."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)


def is_autocast(device_type: str) -> bool:
    """Whether autocast is on for a device type; False for "meta", for which PyTorch would raise."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the autocast dtype; fp64 is not cast, as in `F.scaled_dot_product_attention`."""
    if not is_autocast(tensors[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def make_scores(
    options: AttentionSpec, tensors: Tensors, dtype: torch.dtype, captured: Sequence[Tensor] = (),
    seq_len: int = Scores.seq_len,
) -> Scores:  # fmt: skip
    """The `Scores` of a call, for its passes; ``dtype`` is the accumulation dtype."""
    seed, cast = tensors.dropout_seed, dict[str, Any]()
    for name, term in TERMS.items():
        x = getattr(tensors, name)
        cast[name] = x if x is None or term.broadcasts else x.to(dtype).contiguous()
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


def check_sizes(what: str, hint: str, most: int = MOST, **sizes: Any) -> None:
    """Refuse sizes that are no ints from 1 to ``most``."""
    for name, size in sizes.items():
        check_int(f"{what}: {name}", size, 1, most, hint)


def check_choice(what: str, got: str, allowed: tuple[str, ...], nearest: str) -> None:
    """Refuse a name that is not in ``allowed``."""
    if got not in allowed:
        close = get_close_matches(str(got).lower().replace("-", "_"), allowed, 1, cutoff=0.8)
        refuse(what, f"one of {', '.join(allowed)}", repr(got), f"{what}={[*close, nearest][0]!r} works")


def check_dense(**tensors: Any) -> None:
    """Refuse arguments that are no tensors, or nested, sparse or vmapped ones; the keywords are their names."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            refuse(name, "a tensor", type(x).__name__, "use torch.as_tensor")
        if x.is_nested:
            hint = "pass its packed sequences, x.values(), and mask=Mask.from_cu_seqlens(x.offsets())"
            refuse(name, "a dense tensor", "a nested one", hint, UnsupportedError)
        if x.layout != torch.strided:
            refuse(name, "a dense tensor", f"one in the layout {x.layout}", "x.to_dense() makes one", UnsupportedError)
        if not torch.compiler.is_compiling() and is_batched(x):
            hint = "call it once without vmap, with the mapped dim flattened into the batch, x.flatten(0, 1)"
            refuse(name, "no transform of torch.func", "a tensor under torch.func.vmap", hint, UnsupportedError)


def check_tensors(q: Operand | Tensor, k: Operand | Tensor, v: Operand | Tensor, *, decoding: bool = False) -> None:
    """Check shapes, dtypes, devices of [B, H, S, D] tensors, local or global; ``decoding``: q may have fewer rows."""
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
            "pass seq_dim=1 for [B, S, H, D]; cp_mesh.inference.decode takes few queries; leave cross-attention out of "
            "the plan, with keys replicated over cp"
        )
        got = q.shape[2], k.shape[2]
        refuse("q and k", "equal sequence lengths (self-attention)", got, hint, UnsupportedError)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        hint = "each kv head serves an equal number of consecutive query heads"
        refuse("heads", "query heads that are a multiple of kv heads", f"{q.shape[1]} and {k.shape[1]}", hint)
    if q.shape[3] != k.shape[3]:
        refuse("q and k", "one head dim", (q.shape[3], k.shape[3]), "only v's may differ")


def check_scores(q: Tensor | Operand, tensors: Tensors, seq_len: int) -> None:
    """Check shapes, dtypes and devices of the scores' tensors against this rank's q [B, H, S_local, D]."""
    of_q = {"batch": q.shape[0], "heads": q.shape[1], "rows": q.shape[2], "keys": seq_len}
    for name, term in TERMS.items():
        if (x := getattr(tensors, name)) is None:
            continue
        dims = term.sizes(of_q)
        fits = x.ndim == len(dims) and all(size in allowed for size, allowed in zip(x.shape, dims, strict=True))
        if not fits or not x.is_floating_point():
            words = ", ".join(" or ".join(map(str, allowed)) for allowed in dims)
            expected = f"floating point, shape [{words}] with the query heads on this rank"
            hint = "with heads or rows sharded, pass each rank the ones that it holds"
            refuse(name, expected, f"{x.dtype} {tuple(x.shape)}", hint)
    seed = tensors.dropout_seed
    if seed is not None and (seed.ndim > 1 or seed.numel() not in (1, 2) or seed.dtype != torch.int64):
        hint = "torch.tensor([seed, offset])"
        refuse("dropout_seed", "int64 [1] or [2]", f"{seed.dtype} {tuple(seed.shape)}", hint)
    for name in (*TERMS, "dropout_seed"):
        if (x := getattr(tensors, name)) is not None and x.device != q.device:
            refuse(name, f"a tensor on {q.device}", x.device, "move it there")
