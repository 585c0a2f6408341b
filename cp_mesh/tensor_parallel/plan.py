"""`tensor_parallel_plan`: which module of a Llama gets which style over tp, by names and shapes.

It supports decoders whose linears are named as in examples/llama.py (wq, wk, wv, wo; w1, w3, w2), or as
in Transformers (q_proj ... o_proj; gate_proj, up_proj, down_proj). It refuses any other module with parameters, because
on rows or heads that are sharded over tp its gradient would be partial.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from cp_mesh._torch import Dropout
from cp_mesh.errors import UnsupportedError, refuse, typed
from cp_mesh.tensor_parallel.styles import (
    Mode,
    OverlappedColwise,
    OverlappedRowwise,
    Transport,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from cp_mesh.wrap import plain_name

_ATTENTION = ("wq", "wk", "wv", "wo"), ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")
_EMBEDDINGS, _HEADS = ("tok_embeddings", "embed_tokens"), ("output", "lm_head")
_OF_HEADS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
_BEFORE_ATTENTION = ("attention_norm", "input_layernorm")
_BEFORE = (*_BEFORE_ATTENTION, "feed_forward_norm", "ffn_norm", "pre_feedforward_layernorm")
_AFTER, _EITHER, _LAST = "post_feedforward_layernorm", "post_attention_layernorm", "norm"
"""Norms on outputs of linears, in a layer without the first the second is a norm before linears; and the last norm."""
_NUMBERS = frozenset(
    ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_kv_heads", "hidden_size")
)
"""Attributes that count all heads: attention that reads one would compute wrongly with this rank's heads."""
_HINT = "write this model's plan by hand, or use PyTorch's styles"
_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


@typed
def tensor_parallel_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: Mode = "reduce_scatter",
    recompute_all_gather: bool = False,
    transport: Transport = "auto",
    use_local_output: bool = True,
) -> dict[str, ParallelStyle]:
    """The styles over tp of a Llama, or of a decoder that is built like one, for `parallelize`.

    It recognizes modules by name and shape: the Llama of ``examples/llama.py``, and Transformers
    decoders whose layers have q_proj, k_proj, v_proj and o_proj, gate_proj, up_proj and down_proj (Llama, Mistral,
    Qwen2, Qwen3 and others). Biases are sharded with their linears, norms of heads (q_norm, k_norm) get the gradients
    of all heads, and tied embeddings stay tied.

    Args:
        model: the whole, plain model, before other styles and FSDP2; it is not changed. It takes tokens [B, S], and its
            attention derives the number of heads from the projections.
        mesh: the tp axis.
        mode: of all styles, as in `OverlappedColwise`. In "reduce_scatter" norms get PyTorch's ``SequenceParallel``.
        recompute_all_gather: of all column linears, as in `OverlappedColwise`.
        transport: of all linears, as in `OverlappedColwise`.
        use_local_output: True passes plain tensors between the linears. False passes DTensors over tp, which carry the
            sequence length, so that tp need not divide it; only in mode "reduce_scatter".

    Returns:
        Styles by module name, with ``*`` for layer numbers.

    Raises:
        ArgumentError: if tp does not divide the heads, or options disagree.
        UnsupportedError: for a module that it does not support, by name: other modules with parameters, such as fused
            projections, experts and other norms; linears with a forward of their own (LoRA); dropout,
            whose random numbers would differ between tp ranks.

    Example:
        >>> parallelize(model, mesh["tp"], tensor_parallel_plan(model, mesh["tp"]))  # doctest: +SKIP
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        refuse("tensor_parallel_plan: mesh", "one axis of a DeviceMesh", mesh, 'pass mesh["tp"]')
    if mode == "all_reduce" and not use_local_output:
        hint = "DTensors between linears need mode='reduce_scatter'"
        refuse("tensor_parallel_plan: use_local_output", "True in mode 'all_reduce'", False, hint)
    columns = {"mode": mode, "recompute_all_gather": recompute_all_gather, "transport": transport}
    found = _KnownModules(model, mesh.size(), columns, {"mode": mode, "use_local_output": use_local_output})
    for path in found.modules:
        found.add_linears(path)
    if not found.widths:
        expected = " or ".join(", ".join(names) for names in _ATTENTION)
        linears = {path.rpartition(".")[2]: None for path, x in found.modules.items() if isinstance(x, nn.Linear)}
        _refuse(type(model).__name__, f"attention with linears {expected}", ", ".join(linears) or "no linears")
    for path in found.modules:
        found.add_other(path)
    for names in (_EMBEDDINGS, _HEADS):
        if len(named := [path for path in found.styles if path.rpartition(".")[2] in names]) != 1:
            _refuse(type(model).__name__, f"one module {' or '.join(names)}", named or "none")
    styles = {path: style for path, style in found.styles.items() if style is not None}
    return {".".join("*" if x.isdigit() else x for x in path.split(".")): style for path, style in styles.items()}


class _KnownModules:
    """The modules of a model that are recognized so far, by path.

    Attributes:
        styles: the style of each module; None for linears whose parent has the style, and for norms on all rows.
        head_dims: the head dim of each attention module.
        widths: the hidden size of each layer with attention.
    """

    def __init__(self, model: nn.Module, tp_size: int, columns: dict[str, Any], rows: dict[str, Any]) -> None:
        self.modules = {plain_name(path): part for path, part in model.named_modules()}
        self.tp_size, self.columns, self.rows = tp_size, columns, rows
        self.sharded, self.local = rows["mode"] == "reduce_scatter", rows["use_local_output"]
        self.styles: dict[str, ParallelStyle | None] = {}
        self.head_dims: dict[str, int] = {}
        self.widths: dict[str, int] = {}

    def add_linears(self, path: str) -> None:
        """Add the linears of an attention or feed-forward module; other modules add nothing."""
        children = {name for name, _ in self.modules[path].named_children()}
        for names in (*_ATTENTION, *_FEED_FORWARD):
            if children.isdisjoint(names):
                continue
            *read, last = names
            linears = [self._plain(f"{path}.{name}", nn.Linear) for name in names]
            if names in _ATTENTION:
                self._check_attention(path, *linears)
            elif len(sizes := {*(x.out_features for x in linears[:-1]), linears[-1].in_features}) > 1:
                _refuse(path, f"as many output features of {', '.join(read)} as {last} has inputs", sorted(sizes))
            self.styles |= {f"{path}.{name}": None for name in read} | {path: OverlappedColwise(*read, **self.columns)}
            self.styles[f"{path}.{last}"] = OverlappedRowwise(**self.rows, transport=self.columns["transport"])

    def _check_attention(self, path: str, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear) -> None:
        layer, size = path.rpartition(".")[0], getattr(self.modules[path], "head_dim", None)
        if not isinstance(size, int) or (q.out_features, k.out_features) != (o.in_features, v.out_features):
            got = f"head_dim={size} and {q.out_features}, {k.out_features}, {v.out_features}, {o.in_features} features"
            if size is None:
                _refuse(path, "an attribute head_dim of this module", "none")
            _refuse(path, "a head_dim, queries as wide as the output projection's input, keys as wide as values", got)
        code = getattr(inspect.unwrap(type(self.modules[path]).forward), "__code__", None)
        if found := sorted(_NUMBERS.intersection(() if code is None else code.co_names)):
            _refuse(path, "a forward that takes the number of heads from its projections", f"one that reads {found[0]}")
        heads = q.out_features // size, k.out_features // size
        if any(x % self.tp_size for x in heads):
            fits = next(n for n in range(self.tp_size, 0, -1) if heads[0] % n == heads[1] % n == 0)
            expected, got = f"heads that tp={self.tp_size} divides", f"{heads[0]} of queries and {heads[1]} of keys"
            refuse(f"tensor_parallel_plan: {path}", expected, got, f"tp={fits} divides them")
        if self.sharded and self.local and not self._has_weights(layer, _BEFORE_ATTENTION):
            hint = "rename it, or pass use_local_output=False: attention then gets DTensors, which carry the length"
            _refuse(path, f"a norm {' or '.join(_BEFORE_ATTENTION)} before it", "none with parameters", hint)
        self.head_dims[path], self.widths[layer] = size, q.in_features

    def add_other(self, path: str) -> None:
        """Add the style of any other module; refuses an unknown module that has parameters."""
        module, (parent, _, name) = self.modules[path], path.rpartition(".")
        options = {"dropout": module.p} if isinstance(module, Dropout) else vars(module)
        for key, p in options.items():  # attention's dropout may differ: each rank has other heads
            if "dropout" in key and not key.startswith("att") and isinstance(p, float) and p > 0:
                _refuse(path, f"{key}=0", p, "the dropout masks of tp ranks would differ")
        shapes = {tuple(x.shape) for x in module.parameters(recurse=False)}
        if not shapes or (isinstance(module, nn.Linear) and path in self.styles):
            return
        is_after = name == _AFTER or (name == _EITHER and self._has_weights(parent, [_AFTER]))
        style: ParallelStyle | None = None
        if name in _EMBEDDINGS and self._plain(path, nn.Embedding):
            style = VocabParallelEmbedding(**self.rows)
        elif name in _HEADS and self._plain(path, nn.Linear):
            style = VocabParallelHead(mode=self.rows["mode"])
        elif name in _OF_HEADS and shapes == {(self.head_dims.get(parent),)}:
            style = SequenceParallel(use_local_output=True)  # it shards dim 1, which is rows or heads
        elif name in (*_BEFORE, _AFTER, _EITHER) and shapes == {(self.widths.get(parent),)}:
            style = SequenceParallel(use_local_output=is_after and self.local) if self.sharded else None
        elif name == _LAST and parent not in self.widths and shapes <= {(x,) for x in self.widths.values()}:
            style = SequenceParallel() if self.sharded else None
        else:
            got = f"{_kind(module)} with parameters of {', '.join(map(str, sorted(shapes)))}"
            _refuse(path, "linears, norms and embeddings of a Llama, by their names", got)
        self.styles[path] = style

    def _plain(self, path: str, kind: type[_ModuleT]) -> _ModuleT:
        module = self.modules.get(path)
        if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in vars(module):
            beside = ", ".join(name for name, _ in self.modules[path.rpartition(".")[0]].named_children())
            got = f"no such module beside {beside}" if module is None else _kind(module)
            _refuse(path, f"an nn.{kind.__name__} with the forward of its class", got)
        return module

    def _has_weights(self, path: str, names: Sequence[str]) -> bool:
        children = (x for name, x in self.modules[path].named_children() if name in names)
        return any(parameter is not None for x in children for parameter in x.parameters())


def _kind(module: nn.Module) -> str:
    return f"a {type(module).__module__}.{type(module).__qualname__}"


def _refuse(path: str, expected: object, got: object, hint: str = _HINT) -> NoReturn:
    refuse(f"tensor_parallel_plan: {path or 'the model'}", expected, got, hint, UnsupportedError)
