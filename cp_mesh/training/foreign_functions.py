"""Modules of other packages call ``chunk_gated_delta_rule`` and the like: under the style they call our versions.

They do so through copies of their methods and of functions of their file, where these names are ours; the package
itself is not changed. Our versions take the sequence and the mask of the style that runs the module (`SCOPE`).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial, partialmethod, wraps
from traceback import walk_stack
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_mesh.mixers as mixers
from cp_mesh._torch import untraced
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.mask import Mask
from cp_mesh.training.style_helpers import style_of
from cp_mesh.wrap import FILE, with_names

_SAME = {
    "query": "q", "key": "k", "value": "v", "hidden_states": "x", "cache": "initial_state",
    "initial_states": "initial_state", "return_final_states": "output_final_state",
}  # fmt: skip
_HARMLESS = (
    "backend", "chunk_indices", "chunk_size", "cu_seqlens_cpu", "disable_recompute", "safe_gate",
    "state_v_first",  # no state goes in or out
)  # fmt: skip
_OTHERS = ("fla.ops.", "fla.modules.token_shift", "mamba_ssm.ops.", "causal_conv1d.")
_HELPERS = (
    "fla.ops.utils", "fla.ops.kda.gate", "fla.ops.gated_delta_rule.gate", "mamba_ssm.ops.triton.layer",
    "mamba_ssm.ops.triton.k_activations",
)  # fmt: skip
_GATED = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
_HOLD = dict.fromkeys((staticmethod, classmethod, MethodType), "__func__") | {property: "fget"}
_HOLD |= dict.fromkeys((partial, partialmethod, cached_property), "func")
"""Where objects that hold a function have it."""


def _rule(
    rule: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None,
    scale: float | None = None, use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, *, mask: Mask | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Gates of KDA and of the gated delta rule are those of `fla.ops.kda.gate`, fla-core 0.6."""
    if beta is not None and use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    if g is not None and use_gate_in_kernel:
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        decay = None if A_log is None else A_log.to(g.dtype).exp().view(-1, *[1] * (g.ndim - 3))
        if lower_bound is not None:
            g = lower_bound * F.sigmoid(g if decay is None else decay * g)
        else:
            g = -decay * F.softplus(g)  # type: ignore[operator]
    own = (q, k, v, *{"delta_rule": (beta,), "gla": (g,)}.get(rule, (g, beta)))
    return getattr(mixers, rule)(*own, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, mask=mask)[0], None


def _of_fla(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: Any = None, *,
    mask: Mask | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    out = mixers.causal_conv1d(x.to(weight.dtype), weight, bias, activation=activation, mask=mask).to(x.dtype)
    return out if residual is None else out + residual, None


def of_channels_first(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None) -> Tensor:
    """`causal_conv1d_fn` of causal-conv1d and of Transformers, on [B, D, T]."""
    return _of_fla(x.transpose(1, 2), weight, bias, activation=activation)[0].transpose(1, 2)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, dt_bias: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), *, mask: Mask | None = None,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    return mixers.ssd(x.to(wide), dt.to(wide), A, B.to(wide), C.to(wide), D=D, mask=mask)[0]


@wraps(_scan)
def _combined(**given: Any) -> Tensor:
    """As the kernel of mamba-ssm: dt in float32 before its bias, and the dtype of x."""
    x, dt = given["x"], given["dt"]
    return _scan(**given | {"dt": dt.to(torch.promote_types(dt.dtype, torch.float32))}).to(x.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d": _of_fla,
    "causal_conv1d_fn": of_channels_first,
    "mamba2_chunk_scan": _scan,
    "mamba_chunk_scan_combined": _combined,
    "chunk_delta_rule": partial(_rule, "delta_rule"),
    **dict.fromkeys(("chunk_gla", "chunk_simple_gla"), partial(_rule, "gla")),
    **dict.fromkeys(("chunk_kda", "chunk_kimi_delta_attention"), partial(_rule, "kda")),
    **dict.fromkeys(_GATED, partial(_rule, "gated_delta_rule")),
}
"""Our version of a function of another package, by its name there."""


def call_ours(name: str, own: Callable[..., Any], original: Any, strict: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``own`` with the arguments of a call of ``original``.

    Raises:
        UnsupportedError: on a state of a cache and, if ``strict``, on arguments that are not known.
    """
    known = inspect.signature(own).parameters
    theirs = inspect.signature(original).parameters if callable(original) else known
    theirs = known if any(x.kind is x.VAR_POSITIONAL for x in theirs.values()) else theirs
    bound = dict(zip([*theirs][: len(args)], args, strict=strict)) | kwargs
    said = {_SAME.get(key, key): x for key, x in bound.items() if key not in theirs or x is not theirs[key].default}
    for key in ("initial_state", "output_final_state"):
        state = said.pop(key, None)
        if state is not None and state is not False:
            refuse(name, "a model without a cache", f"{key} of a cache", "pass use_cache=False", UnsupportedError)
    if "mask" in known and said.get("cu_seqlens") is not None and strict:
        said["mask"] = Mask.from_cu_seqlens(said.pop("cu_seqlens").cpu())
    unknown = [key for key, x in said.items() if key not in (*known, *_HARMLESS) and x is not None and x is not False]
    if strict and unknown:
        expected = f"arguments among {', '.join((*known, 'cu_seqlens'))}"
        refuse(name, expected, unknown[0], "leave it out", UnsupportedError)
    return own(**{key: x for key, x in said.items() if key in known})


def _unknown(name: str, *_: Any, **__: Any) -> Any:
    hint = f"cp_mesh has {', '.join(FUNCTIONS)}; plain methods call them, by the names that the file imports"
    refuse("RecurrentParallel", "functions that cp_mesh has", name, hint, UnsupportedError)


def runs_alone(frame: FrameType) -> str | None:
    """The file of a frame, if it is a function of another package that mixes tokens, and not called by our kernels."""
    file = frame.f_globals.get("__name__") or ""
    if not file.startswith(_OTHERS) or file.startswith(_HELPERS):
        return None
    return None if any(x.f_globals.get("__name__") == "cp_mesh.mixers.fla" for x, _ in walk_stack(frame)) else file


def check_convolution(module: nn.Conv1d) -> None:
    """Refuse an `nn.Conv1d` that is no causal convolution of each channel."""
    (width,), channels = module.kernel_size, module.in_channels
    found = module.stride, module.dilation, module.padding, module.padding_mode
    if found != ((1,), (1,), (width - 1,), "zeros") or not channels == module.groups == module.out_channels:
        expected = "one of each channel, causal by padding: Conv1d(D, D, W, groups=D, padding=W - 1), trimmed behind"
        refuse("RecurrentParallel", expected, module, "cp_mesh.mixers.causal_conv1d in the module", UnsupportedError)


def _convolution(module: nn.Conv1d, input: Tensor) -> Tensor:
    """`nn.Conv1d.forward` on [B, D, T]: T columns, then W - 1 of nan, which callers of a causal convolution trim."""
    if module.kernel_size == (1,):
        return nn.Conv1d.forward(module, input)
    check_convolution(module)
    out = of_channels_first(input, module.weight[:, 0], module.bias)
    return F.pad(out, (0, module.kernel_size[0] - 1), value=float("nan"))


@lru_cache(maxsize=1024)
def names_read(code: CodeType, of_file: bool = True) -> frozenset[str]:
    """Names that a function reads from its file, or else from objects, with those of functions inside of it."""
    found = {x.argval for x in dis.get_instructions(code) if (x.opname == "LOAD_GLOBAL") == of_file}
    inside = (names_read(x, of_file) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(found & {*code.co_names}).union(*inside)


def _function(x: Any) -> FunctionType | None:
    """The function that a decorated one, a method of any kind, or a partial is of."""
    while type(x) in _HOLD:
        x = getattr(x, _HOLD[type(x)])
    x = inspect.unwrap(x) if callable(x) else None
    return x if isinstance(x, FunctionType) else None


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, Any, FunctionType]]:
    """Methods of a class and its bases, the class first, and their functions; not those of PyTorch and of styles."""
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, x in vars(base).items() if base is nn.Conv1d or not base.__module__.startswith("torch.nn.") else ():
            if (own := _function(x)) and name[:2] != "__" and getattr(x, "__code__", own.__code__).co_filename != FILE:
                yield name, x, own


def _reads_ours(own: FunctionType) -> bool:
    """Whether a function reads something of its file whose name begins with cp_mesh, such as a module."""
    found = (own.__globals__.get(name) for name in names_read(own.__code__))
    return any(getattr(x, "__name__", "").startswith("cp_mesh") for x in found)


def _copied(x: Any, names: dict[str, Any]) -> Any:
    """`with_names` of a function, in copies of its decorators; where there is no copy, a call is refused."""
    inside, cells = getattr(x, "__wrapped__", None), getattr(x, "__closure__", None) or ()
    if not isinstance(x, FunctionType) or (inside is not None and CellType(inside) not in cells):
        return partial(_unknown, f"those in {getattr(x, '__name__', type(x).__name__)}, a {type(x).__name__}")
    if inside is None:
        writes = any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(x))
        return partial(_unknown, f"those in {x.__name__}, which writes to its file") if writes else with_names(x, names)
    around = (CellType(_copied(inside, names)) if cell == CellType(inside) else cell for cell in cells)
    decorated = with_names(x, x.__globals__, tuple(around))
    vars(decorated).update(vars(x))
    return decorated


def not_of(part: nn.Module, far: set[str]) -> list[str]:
    return [what for what in far if not hasattr(part, what.partition(" ")[0])]


class ForeignFunctions:
    """Copies of functions and methods, for one style; those of a file and of a class are made once.

    Args:
        functions: `FUNCTIONS`, or more.
        strict: refuse arguments that are not known.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]] = FUNCTIONS, strict: bool = True) -> None:
        self.functions, self.strict = functions, strict
        self._files: dict[int, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {}
        self._classes: dict[type[nn.Module], tuple[dict[str, Any], set[str]]] = {}

    @contextmanager
    def within(self, module: nn.Module, skip: Callable[[nn.Module], bool]) -> Iterator[None]:
        """Let a module and those below run copies, but for the forward of the module itself."""
        put: list[tuple[dict[str, Any], str, Any]] = []
        for file, names, ours in self._files.values():
            names |= file | ours if ours else {}  # also what was written there since
        try:
            for part in module.modules():
                if part is not module and skip(part):
                    continue
                for name, copy in self._of_part(part, part is module).items():
                    put.append((vars(part), name, vars(part).get(name, put)))
                    vars(part)[name] = copy
            yield
        finally:
            for own, name, before in reversed(put):
                own[name] = before
                if before is put:
                    del own[name]

    def rules(self, module: nn.Module) -> set[str]:
        """Recurrences that methods of a module name, or of modules below it."""
        kinds = {type(part) for part in module.modules()}
        names = (names_read(own.__code__) for kind in kinds for *_, own in _methods(kind))
        return {name for name in FUNCTIONS.keys() & set[str]().union(*names) if "conv1d" not in name}

    def _of_part(self, part: nn.Module, is_planned: bool) -> dict[str, Any]:
        copies, far = self.of_class(type(part))
        for what in not_of(part, far):
            _unknown(f"{what}, in {type(part).__name__}")
        found = {name: MethodType(x, part) for name, x in copies.items()}
        found |= {name: x for name in vars(part) if (x := self._ours(name, vars(part)[name])) is not None}
        if is_planned:
            found.pop("forward", None)
        elif "forward" in found and "forward" in vars(part):
            hint = "remove it, or give this module a style of its own"
            refuse(type(part).__name__, "the forward of its class", "one of the instance", hint, UnsupportedError)
        return found

    def of_class(self, kind: type[nn.Module]) -> tuple[dict[str, Any], set[str]]:
        """Copies of methods that call foreign functions, and what of these are not plain calls by names of the file."""
        if kind not in self._classes:
            found, hidden = dict[str, tuple[FunctionType, Any, set[str]]](), set[str]()
            for name, x, own in reversed([*_methods(kind)]):
                if name in found and found[name][0] is not own and any(found[name][1:]):
                    hidden.add(name)
                found[name] = own, *self._copy(name, x, own)
            far = set[str]().union(*(far for *_, far in found.values()))
            for at, (own, *_) in found.items():
                above = hidden & names_read(own.__code__, of_file=False)
                far |= {f"super().{name}" for name in above if at == name or "super" in names_read(own.__code__)}
            self._classes[kind] = {name: copy for name, (_, copy, _) in found.items() if copy is not None}, far
        return self._classes[kind]

    def _copy(self, name: str, x: Any, own: FunctionType) -> tuple[Any, set[str]]:
        if own is nn.Conv1d.forward:
            return _convolution, set()
        (_, names, ours), far = self._file(own.__globals__), self._far(own)
        if names_read(own.__code__).isdisjoint(ours):
            return None, far
        plain = isinstance(x, FunctionType)
        return (_copied(x, names), far) if plain else (None, {f"those in {name}, a {type(x).__name__}"})

    def _far(self, own: FunctionType) -> set[str]:
        """Foreign functions that a function reads from other objects than its file."""
        names = names_read(own.__code__, of_file=False) & self.functions.keys()
        names = names.difference(mixers.__all__) if names and _reads_ours(own) else names
        return {f"{name} of another object" for name in names}

    def _file(self, file: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """A file, its names with our versions and with copies of functions that reach them, and these alone."""
        if id(file) not in self._files:
            names = dict(file)
            ours = {name: x for name in file if (x := self._ours(name, file[name])) is not None}
            left = ((name, file[name]) for name in file.keys() - ours if not isinstance(file[name], type))
            found = {name: own for name, x in left if (own := _function(x)) and own.__globals__ is file}
            for name, own in found.items():
                if far := self._far(own):
                    ours[name] = partial(_unknown, f"{far.pop()}, in {name}")
            while more := {name for name in found.keys() - ours if names_read(found[name].__code__) & ours.keys()}:
                ours |= {name: _copied(file[name], names) for name in more}
            names |= ours
            self._files[id(file)] = file, names, ours
        return self._files[id(file)]

    def _ours(self, name: str, value: Any) -> Any:
        """What stands for a function of this name; None: itself."""
        if isinstance(value, type | nn.Module) or not (callable(value) or value is None):
            return None
        if (where := getattr(_function(value) or value, "__module__", None) or "").startswith("cp_mesh."):
            return None
        if (own := self.functions.get(name)) is not None:
            return partial(call_ours, name, own, value, self.strict)
        is_other = self.strict and where.startswith(_OTHERS) and not where.startswith(_HELPERS)
        return partial(_unknown, name) if is_other else None


@untraced  # after a graph break in its callers Dynamo would trace this function by itself
def refuse_unplanned(root: nn.Module, traced: bool = False) -> None:
    """Refuse modules outside of `RecurrentParallel` that call foreign functions.

    With ``traced``, for code that no probe can run, also recurrent layers of PyTorch, and functions of `cp_mesh.mixers`
    that get no sequence.

    Raises:
        ArgumentError: with the name of the module.
    """
    known, inside = ForeignFunctions(), set[nn.Module]()
    for path, part in root.named_modules():
        if hasattr(style_of(part), "foreign"):
            inside.update(part.modules())
        if part in inside:
            continue
        copies, far = known.of_class(type(part))
        found = [f"{name} calls such a function" for name, copy in copies.items() if copy is not _convolution]
        found += [f"a call of {what}" for what in not_of(part, far)]
        if traced:
            found += ["which is recurrent"] * isinstance(part, nn.RNNBase)
            found += [f"a call of {name} without sequence=" for name in _without_sequence(type(part))]
        if found:
            hint = f"add {path!r}: RecurrentParallel(sequence); watch=False if its tokens are not sharded"
            expected = "every recurrence and convolution over tokens in a RecurrentParallel module"
            refuse("plan", expected, f"{path!r}, a {type(part).__name__}: {found[0]}", hint)


def _without_sequence(kind: type[nn.Module]) -> Iterator[str]:
    """Functions of `cp_mesh.mixers` that methods of a class call without the keyword ``sequence``."""
    for own in {name: own for name, _, own in reversed([*_methods(kind)])}.values():
        if not any(x == "sequence" or (isinstance(x, tuple) and "sequence" in x) for x in own.__code__.co_consts):
            names = {*mixers.__all__}
            yield from (x for x in names & names_read(own.__code__) if own.__globals__[x] is getattr(mixers, x))
            yield from names & names_read(own.__code__, of_file=False) if _reads_ours(own) else ()
