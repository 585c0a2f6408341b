"""`RecurrentParallel` on modules with recurrences and convolutions, against one rank that computes each document alone.

The functions of other packages are written anew here, with the signatures of flash-linear-attention and causal-conv1d.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from inside import room
from ranks import REFUSALS, on_ranks
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ContextParallel,
    Contiguous,
    Mask,
    RecurrentParallel,
    ShardedModel,
    ShardedSequence,
    Striped,
    ZigZag,
    cross_entropy,
    mixers,
    parallelize,
    probe,
    sum_gradients,
)

C, H, D, W, VOCABULARY, S = 12, 2, 3, 4, 17, 24
DOCUMENTS = [0] * 5 + [1] * 1 + [2] * 9 + [3] * 9
LAYOUTS = {"contiguous": Contiguous(), "zigzag": ZigZag(), "striped": Striped()}
PACKED = Mask(causal=True, documents=torch.tensor(DOCUMENTS))


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Of one document; as in fla.ops.gated_delta_rule, with the decays of fla.ops.kda too."""
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if kwargs.get("allow_neg_eigval") else 1)
    if kwargs.get("use_gate_in_kernel"):
        g = -kwargs["A_log"].exp()[:, None] * F.softplus(g + kwargs["dt_bias"].view(g.shape[2:]))
    state, out = torch.zeros(len(q), H, D, D, dtype=q.dtype), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = (decay[..., None] if decay.ndim == 3 else decay[..., None, None]) * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * (D**-0.5 if scale is None else scale))
    return torch.stack(out, 1), None


def chunk_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return chunk_gated_delta_rule(q, k, v, g, beta, **kwargs)


def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, activation: str | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Of one document; as in fla.modules.causal_conv1d."""
    rows = F.pad(x, (0, 0, W - 1, 0))
    out = sum(weight[:, j] * rows[:, j : j + x.shape[1]] for j in range(W))
    out = out if bias is None else out + bias
    out = out if activation is None else F.silu(out)
    return (out if residual is None else out + residual), None


def by_channel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
    """A function of the file between a module and what stands for others."""
    return chunk_kda(q, k, v, g, beta, **options)[0]


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.core = nn.Linear(C, 3 * H * D), nn.Linear(H * D, C), Core()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    """With functions of cp_mesh, which take what the style gives."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out = nn.Linear(C, 3 * H * D + 2 * H), nn.Linear(H * D, C)
        self.weight, self.bias = nn.Parameter(torch.empty(3 * H * D, W)), nn.Parameter(torch.empty(3 * H * D))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, g, beta = self.given(x).split([3 * H * D, H, H], -1)
        return rows, -F.softplus(g), beta

    def heads(self, rows: Tensor) -> Iterator[Tensor]:
        return (y.unflatten(-1, (H, D)) for y in rows.chunk(3, -1))

    def forward(self, x: Tensor) -> Tensor:
        rows, g, beta = self.split(x)
        rows = mixers.causal_conv1d(rows, self.weight, self.bias, activation="silu")
        q, k, v = self.heads(rows + mixers.token_shift(rows))
        out, _ = mixers.gated_delta_rule(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out(out.flatten(2))


class ByName(Mixer):
    """With functions of other packages, in a method and in a function of the file, and a module below."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.gate, self.decay = Short(), nn.Linear(C, H * D), nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * D))

    def scan(self, x: Tensor, rows: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = self.heads(rows)
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        out, _ = chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, chunk_size=64, **options)
        by_gate = self.gate(x).unflatten(-1, (H, D))
        gate = {"use_gate_in_kernel": True, "A_log": self.decay, "dt_bias": self.dt_bias}
        return out + by_channel(q, 0.1 * k, v, by_gate, beta, **options, **gate)

    def forward(self, x: Tensor) -> Tensor:
        rows, g, beta = self.split(x)
        rows, _ = causal_conv1d(rows, self.weight, self.bias, activation="silu", residual=rows)
        return self.out(self.scan(x, self.short(rows), g, beta).flatten(2))


class Short(nn.Conv1d):
    """As the ShortConvolution of flash-linear-attention: a module that is called with rows first."""

    def __init__(self) -> None:
        super().__init__(3 * H * D, 3 * H * D, W, groups=3 * H * D, padding=W - 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return causal_conv1d(x, self.weight[:, 0], self.bias, output_final_state=False)[0]


class Shifted(nn.Module):
    """With a convolution of PyTorch, trimmed in one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(C, C, W, groups=C, padding=W - 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv1d(x.transpose(1, 2))
        return F.silu(found[..., : x.shape[1]]).transpose(1, 2) + found[..., : -(W - 1)].transpose(1, 2)


class Hybrid(nn.Module):
    """tokens [B, S] to logits [B, S, VOCABULARY]."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.checkpoints = nn.Embedding(VOCABULARY, C), nn.Linear(C, VOCABULARY), checkpoints
        self.layers = nn.ModuleList(map(Layer, (Mixer(), Attention(), ByName(), Shifted())))

    def forward(self, tokens: Tensor, mask: Mask | None = None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.checkpoints else layer(x, mask)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(C), mixer

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return x + self.mixer(self.norm(x))


def in_package(name: str, where: str, body: str = "x.cumsum(1)") -> Any:
    """A function of a file of another package."""
    file: dict[str, Any] = {"__name__": where}
    exec(f"def {name}(x):\n    return {body}", file)
    return file[name]


TABLE = {"rwkv6": in_package("chunk_rwkv6", "fla.ops.rwkv6.chunk")}
chunk_rwkv7 = in_package("chunk_rwkv7", "fla.ops.rwkv7.chunk")
rms_norm_fn = in_package(
    "rms_norm_fn", "mamba_ssm.ops.triton.layer_norm", "x / x.square().mean(-1, keepdim=True).sqrt()"
)
elsewhere = SimpleNamespace(chunk_simple_gla=lambda q, k, v, g: (v, None))
FACTOR = 1.0


def built(made: Callable[[], nn.Module] = Hybrid) -> Any:
    model, random = made().double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.randn(x.shape, dtype=x.dtype, generator=random) * 0.3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S], whose labels at ends of documents are ignored."""
    tokens = torch.randint(VOCABULARY, (2, S + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[:, [i for i in range(S) if i == S - 1 or DOCUMENTS[i] != DOCUMENTS[i + 1]]] = -100
    return tokens[:, :S], labels


def rows() -> Tensor:
    return torch.randn(2, S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def by_documents(model: nn.Module, x: Tensor, *more: Any) -> Tensor:
    """What a model of one rank makes of each document alone."""
    ids = torch.tensor(DOCUMENTS)
    return torch.cat([model(x[:, ids == n], *more) for n in ids.unique()], 1)


@functools.cache
def on_one_rank() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the mean loss."""
    model, (tokens, labels) = built(), batch()
    logits = by_documents(model, tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters()}


def planned(sequence: ShardedSequence, model: nn.Module, attention: Any = PACKED, **options: Any) -> nn.Module:
    probes, recurrent = options.pop("probe", False), RecurrentParallel(sequence, **{"mask": PACKED} | options)
    plan: dict[str, Any] = {f"layers.{i}.mixer": recurrent for i in (0, 2)}
    plan |= {"layers.1.mixer.core": ContextParallel(sequence, mask=attention), "layers.3.mixer.conv1d": recurrent}
    return parallelize(model, sequence.mesh, plan | {"": ShardedModel(sequence, positions=None, probe=probes)})


def step(axis: Any, layout: str, how: str = "", method: str = "auto") -> None:
    """Logits and gradients are those of one rank."""
    tokens, labels = batch()
    sequence = ShardedSequence(axis, layout=LAYOUTS[layout], length=S if layout == "striped" else None)
    model: Any = planned(sequence, built(lambda: Hybrid("checkpoint" in how)), probe="probe" in how, method=method)
    if "compiled" in how:
        for layer in model.layers:
            layer.compile(backend="inductor" if "inductor" in how else "aot_eager")
    if "fsdp" in how:
        for layer in model.layers:
            fully_shard(layer, mesh=axis)
        fully_shard(model, mesh=axis)
        sum_gradients(model)
    if "copied" in how:
        model = copy.deepcopy(model)
    logits = (torch.compile(model, backend="eager") if how == "root" else model)(tokens)
    cross_entropy(logits, sequence.shard({"labels": labels})["labels"], axis).backward()
    want, want_grads = on_one_rank()
    assert (sequence.unshard(logits) - want).abs().max() < 1e-12
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        if "fsdp" not in how:
            dist.all_reduce(grad)
        assert (grad - want_grads[name.replace("_orig_mod.", "")]).abs().max() < 1e-12, name


@pytest.mark.quick("zigzag")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks("size")
def test_a_hybrid_is_that_of_one_rank(axis: Any, size: int, layout: str) -> None:
    for method in ("auto", "heads")[: 2 if size in (1, 2) else 1]:
        step(axis, layout, method=method)


INDUCTOR = pytest.param("checkpoint fsdp inductor compiled", marks=pytest.mark.nightly("compiled"))
TRAINERS = ["copied", "probe", "compiled", "root", "checkpoint fsdp", "checkpoint fsdp compiled", INDUCTOR]


@pytest.mark.parametrize("how", TRAINERS)
@pytest.mark.quick(without="fsdp compiled")
@on_ranks(2, timeout=120.0)
def test_a_hybrid_with_what_trainers_do(axis: Any, how: str) -> None:
    step(axis, "zigzag", how)


# Mixers that call functions of other packages, or ours, in one way each.


class Calls(Mixer):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return called(self, x, **self.options)


def called(mixer: Mixer, x: Tensor, **options: Any) -> Tensor:
    rows, g, beta = mixer.split(x)
    return mixer.out(chunk_gated_delta_rule(*mixer.heads(rows), g, beta.sigmoid(), **options)[0].flatten(2))


class CallsOurs(Calls):
    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        rows, g, beta = self.split(x)
        found, _ = mixers.gated_delta_rule(*self.heads(rows), g, beta.sigmoid(), **self.options)
        return self.out(found.flatten(2))


class NoCall(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.split(x)[0][..., : H * D])


class Scans(Mixer):
    """Takes a path of its own behind its convolution, as Mamba-2 of flash-linear-attention does on CPUs."""

    def forward(self, x: Tensor, fast: bool = False) -> Tensor:
        rows, g, beta = self.split(x)
        q, k, v = self.heads(causal_conv1d(rows, self.weight, self.bias)[0])
        out = chunk_gated_delta_rule(q, k, v, g, beta)[0] if fast else v.cumsum(1)
        return self.out(out.flatten(2))


class Loop(Mixer):
    """A recurrence that nobody sees."""

    def forward(self, x: Tensor) -> Tensor:
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = 0.5 * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)


class Recurrent(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(C, C, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Table(Calls):
    """Finds a function of a package where no name says so."""

    def forward(self, x: Tensor) -> Tensor:
        return called(self, TABLE["rwkv6"](x))


class TableAlone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["rwkv6"](x)


class ClassMethod(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(called(self, x), self.weight[:C])

    @classmethod
    def convolve(cls, x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d(x, weight)[0]


class Writes(Calls):
    def forward(self, x: Tensor) -> Tensor:
        global FACTOR
        FACTOR = float(x.shape[1])
        return called(self, x)


class CheckpointInside(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Unknown(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        rows, _ = causal_conv1d(self.split(x)[0], self.weight)
        return self.out(chunk_rwkv7(rows)[0][..., : H * D])


class Dotted(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        rows, g, _ = self.split(x)
        return self.out(elsewhere.chunk_simple_gla(*self.heads(rows), g)[0].flatten(2))


class Inherits(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(causal_conv1d(x, self.weight[:C])[0])


class InheritsByName(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return Calls.forward(self, causal_conv1d(x, self.weight[:C])[0])


class Convolves(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        given = {"kernel_size": W, "padding": W - 1, "groups": C} | options
        self.conv1d = nn.Conv1d(C, C, **given)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1d(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


class Halves(nn.Module):
    """Convolutions that are not over tokens, or not over several."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.patches = nn.Conv1d(C, C, 1), nn.Conv1d(1, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x.transpose(1, 2)).transpose(1, 2)
        return y + self.patches(y.flatten(0, 1)[:, None, :2]).sum()


class OneMixer(nn.Module):
    """A root with one layer that mixes tokens."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.mixer, self.head = nn.Embedding(VOCABULARY, C), mixer, nn.Linear(C, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixer(self.embed(tokens)))


def run_one(axis: Any, mixer: nn.Module, is_planned: bool, compiled: str = "") -> None:
    sequence = ShardedSequence(axis)
    plan: dict[str, Any] = {"": ShardedModel(sequence, positions=None)}
    plan |= {"mixer": RecurrentParallel(sequence, mask=PACKED)} if is_planned else {}
    model: Any = parallelize(OneMixer(mixer), axis, plan)
    if compiled == "block":
        model.mixer.compile(backend="eager")
    (torch.compile(model, backend="eager") if compiled == "root" else model)(batch()[0])


OTHERS = torch.tensor([0, 7, S], dtype=torch.int32)
CACHE, CAUSAL = "a model without a cache", "causal by padding"
OURS, OUTSIDE, CONVOLUTION = "without sequence=", "'mixer', a Calls: ", "a convolution of 4 over the 12 of this rank"
REFUSED: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "no call": (NoCall, True, "RecurrentParallel(NoCall at mixer): expected a call of cp_mesh.mixers"),
    "ours outside of the plan": (Mixer, False, "expected a module with RecurrentParallel"),
    "others outside of the plan": (Calls, False, OUTSIDE),
    "a convolution outside of the plan": (Convolves, False, f"{CONVOLUTION}, in 'mixer"),
    "a convolution with padding around": (lambda: Convolves(padding=1), True, CAUSAL),
    "a convolution of all channels": (lambda: Convolves(groups=1), True, "one of each channel"),
    "a convolution with holes": (lambda: Convolves(dilation=2), True, CAUSAL),
    "a checkpoint inside": (CheckpointInside, True, "a checkpoint around the whole module"),
    "a cache": (lambda: Calls(output_final_state=True), True, CACHE),
    "a state of a cache": (lambda: Calls(initial_state=torch.zeros(2, H, D, D)), True, CACHE),
    "a function in a table": (Table, True, "one of fla.ops.rwkv6.chunk on the tokens of this rank, in 'mixer'"),
    "a table outside of the plan": (TableAlone, False, "one of fla.ops.rwkv6.chunk on the tokens"),
    "a class method": (ClassMethod, True, "those in convolve, a classmethod"),
    "a function that writes to its file": (Writes, True, "forward, which writes to its file"),
    "a path of its own": (Scans, True, "a call of chunk_gated_delta_rule, in its forward, got a convolution"),
    "other documents": (lambda: Calls(cu_seqlens=OTHERS), True, "the documents of the style's mask"),
    "another mask": (lambda: CallsOurs(mask=Mask()), True, "the documents of the style's mask"),
    "an argument of a kernel": (lambda: Calls(head_first=True), True, "head_first"),
    "another method": (lambda: CallsOurs(method="states"), True, "RecurrentParallel(method=, kernel=) has it"),
    "a function that we lack": (Unknown, True, "chunk_rwkv7"),
    "a function of an object": (Dotted, True, "chunk_simple_gla of another object, in Dotted"),
    "a forward of a base": (Inherits, True, "super().forward, in Inherits"),
    "a forward of a base by name": (InheritsByName, True, "super().forward, in InheritsByName"),
}
"""A mixer, whether it is in the plan, and words of the refusal."""


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_the_style_refuses(axis: Any, name: str) -> None:
    make, is_planned, words = REFUSED[name]
    with pytest.raises(REFUSALS, match=re.escape(words)):
        run_one(axis, make(), is_planned)


COMPILED = {Mixer: OURS, Calls: OUTSIDE, Recurrent: "which is recurrent", Convolves: CONVOLUTION}


@pytest.mark.parametrize(("kind", "what"), [*((kind, "root") for kind in COMPILED), (Convolves, "block")])
@on_ranks(2)
def test_what_compiled_models_refuse(axis: Any, kind: Any, what: str) -> None:
    with pytest.raises((*REFUSALS, TorchDynamoException), match=COMPILED[kind]):
        run_one(axis, kind(), False, what)
    searched = room("foreign_functions").ForeignFunctions.of_class
    assert not _debug_get_cache_entry_list(searched.__code__)  # Dynamo traced no search


@on_ranks(2)
def test_documents_of_one_style_alone_are_refused(axis: Any) -> None:
    sequence, tokens = ShardedSequence(axis), batch()[0]
    for recurrent, attention in ((Mask(causal=True), PACKED), (PACKED, Mask(causal=True))):
        with pytest.raises(REFUSALS, match="as in that of RecurrentParallel"):
            planned(sequence, built(), attention, mask=recurrent)(tokens)
    planned(sequence, built(), mask=Mask(causal=True, documents=torch.zeros(S, dtype=torch.int64)))(tokens)


@pytest.mark.parametrize("make", [Loop, Recurrent])
@on_ranks(2)
def test_the_probe_finds_recurrences_of_other_code(axis: Any, make: Callable[[], nn.Module]) -> None:
    root = ShardedModel(ShardedSequence(axis), positions=None)
    with pytest.raises(REFUSALS, match="the same rows as on one rank"):
        probe(parallelize(built(lambda: OneMixer(make())), axis, {"": root}), {"tokens": batch()[0]})


@on_ranks(2)
def test_what_is_let_through(axis: Any) -> None:
    """What mixes no tokens, and a mask and lengths that are the style's."""
    run_one(axis, Halves(), False)
    run_one(axis, Calls(cu_seqlens=torch.tensor([0, 5, 6, 15, S], dtype=torch.int32), state_v_first=True), True)
    run_one(axis, CallsOurs(mask=Mask(documents=torch.tensor(DOCUMENTS))), True)
    # nothing is left on modules, and models without a plan call their own functions
    assert called.__globals__["causal_conv1d"] is causal_conv1d
    model = planned(ShardedSequence(axis), built())
    before = [{*vars(part)} for part in model.modules()]
    model(batch()[0])
    assert [{*vars(part)} for part in model.modules()] == before


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor:
    """Of one document; as in mamba_ssm.ops.triton.ssd_combined."""
    dt = F.softplus(dt.float() + options["dt_bias"])
    state, out = x.new_zeros(len(x), H, D, D, dtype=torch.float32), []
    for t in range(x.shape[1]):
        k, v = B[:, t].float() * dt[:, t, :, None], x[:, t].float()
        state = (dt[:, t] * A).exp()[..., None, None] * state + k[..., None] * v[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", C[:, t].float(), state))
    return torch.stack(out, 1).to(x.dtype)


class Mamba(Mixer):
    """As Mamba2 of mamba-ssm in bfloat16, whose last linear takes what the kernel returns."""

    def forward(self, x: Tensor) -> Tensor:
        rows, dt, _ = self.split(x)
        v, B, C = self.heads(rows)
        A, bias = -torch.ones(H), torch.full((H,), -4.03)
        return self.out(mamba_chunk_scan_combined(v, dt, A, B, C, 8, dt_bias=bias, dt_softplus=True).flatten(2))


class Norms(nn.Module):
    """With a function of the package that mixes no tokens, outside of the plan."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.inner = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(rms_norm_fn(x))


@on_ranks(2)
def test_a_mamba_in_bfloat16(axis: Any) -> None:
    sequence, model = ShardedSequence(axis), built(lambda: OneMixer(Norms(Mamba()))).bfloat16()
    tokens, plain = batch()[0], copy.deepcopy(model)
    plan = {"": ShardedModel(sequence, positions=None), "mixer.inner": RecurrentParallel(sequence)}
    with torch.no_grad():
        out, want = sequence.unshard(parallelize(model, axis, plan)(tokens)), plain(tokens)
    assert out.dtype == torch.bfloat16
    assert (out - want).abs().max() < 2**-8 * want.abs().max()


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twice(*args: Any, **options: Any) -> Tensor:
        return 2 * function(*args, **options)

    return twice


@doubled
def decorated_call(mixer: Mixer, x: Tensor) -> Tensor:
    return called(mixer, x)


class Decorated(Calls):
    """With decorators, and a number of its file."""

    @doubled
    @torch.no_grad()
    def without_grad(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return decorated_call(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return FACTOR * (self.without_grad(x) + called(self, x))


@on_ranks(1)
def test_decorators_and_numbers_of_a_file_stay(axis: Any) -> None:
    plain = built(Decorated)
    model = parallelize(copy.deepcopy(plain), axis, {"": RecurrentParallel(ShardedSequence(axis))})
    for factor in (1.0, 3.0):
        with mock.patch.dict(globals(), FACTOR=factor):
            torch.testing.assert_close(model(rows()), plain(rows()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["fixed", "mask", "layout"])
@on_ranks(2)
def test_what_comes_with_a_call(axis: Any, what: str) -> None:
    """Masks and layouts of a call against the same that are fixed."""
    used, given, options = ShardedSequence(axis, Contiguous()), None, dict[str, Any](mask=PACKED)
    style, model = used, built(CallsOurs)
    want = by_documents(model, rows())
    if what == "mask":
        options, given = {"mask": lambda x, given: given}, PACKED
    if what == "layout":
        used = ShardedSequence(axis, ZigZag())
        options["layout"], given = lambda x, given: given["layout"], {"layout": used.layout}
    parallelize(model, axis, {"": RecurrentParallel(style, **options)})
    assert (used.unshard(model(used.shard(rows()), given)) - want).abs().max() < 1e-12


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.__name__] * (func.namespace == "_c10d_functional")
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_method_and_kernel_are_the_styles(axis: Any) -> None:
    sequence, x = ShardedSequence(axis), torch.zeros(2, S // 2, C)
    for method, word in (("heads", "all_to_all"), ("states", "all_gather")):
        model = parallelize(CallsOurs(), axis, {"": RecurrentParallel(sequence, method=method)})
        with Collectives() as sent:
            model(x)
        assert sent.names and all(word in name or "wait" in name for name in sent.names), sent.names
    with pytest.raises(REFUSALS, match="gated_delta_rule: kernel"):
        parallelize(CallsOurs(), axis, {"": RecurrentParallel(sequence, kernel="fla")})(x)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mask": 3}, "a Mask"), ({"method": "ring"}, "auto"), ({"kernel": "cuda"}, "auto"), ({"layout": 3}, "a Layout")],
)
@on_ranks(1)
def test_options_are_checked(axis: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(REFUSALS, match=words):
        RecurrentParallel(ShardedSequence(axis), **options)


def test_a_model_of_one_rank_needs_no_plan() -> None:
    """Packed documents are those of a mask."""
    packed, alone = built(lambda: CallsOurs(mask=PACKED)), built(CallsOurs)
    assert (packed(rows()) - by_documents(alone, rows())).abs().max() < 1e-12


@on_ranks(2)
def test_what_is_refused_without_a_root(axis: Any) -> None:
    sequence, x = ShardedSequence(axis), torch.ones(2, S // 2, C, dtype=torch.float64)

    def model(*places: str) -> Any:
        styles = {place: RecurrentParallel(sequence, mask=PACKED) for place in places}
        return parallelize(built(lambda: nn.Sequential(Mixer(), Mixer())), axis, styles)

    assert model("0", "1")(x).abs().max() > 0
    with pytest.raises(REFUSALS, match="a module with RecurrentParallel"):
        model("0")(x)
    with pytest.raises(TorchDynamoException, match=OURS):
        torch.compile(model("0"), backend="eager")(x)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.ones(2 * H * D, W, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Mask, layout: Any) -> Tensor:
        y = mixers.causal_conv1d(x, self.taps).unflatten(2, (2 * H, D))
        return x + mixers.gla(y, y, y, method="auto")[0].flatten(2)


@pytest.mark.parametrize("with_layouts", [False, True])
@on_ranks(2)
def test_layers_of_a_batch_are_planned_once(axis: Any, with_layouts: bool) -> None:
    """The convolution and the recurrence of the first layer are checked; those of later layers are known."""
    rules, pieces, states = room("mixers.rules"), room("mixers.pieces"), room("mixers.states")
    sequence = ShardedSequence(axis, length=S)
    own = {"layout": lambda x, mask, layout: layout} if with_layouts else {}
    style = RecurrentParallel(sequence, mask=lambda x, mask, layout: mask, **own)
    model = parallelize(nn.ModuleList(Mixing() for _ in range(3)), axis, {"*": style}, watch=False)
    for lens in ([6, 18], [10, 2, 12]):
        mask = Mask.from_cu_seqlens(torch.tensor([0, *lens]).cumsum(0))
        batch = sequence.balanced(mask) if with_layouts else sequence
        x, made = batch.shard(torch.ones(1, S, 2 * H * D, dtype=torch.float64)), pieces._find.cache_info().misses
        checked, between = (mock.patch.object(at, name, wraps=getattr(at, name))
                            for at, name in ((rules, "_pieces"), (states, "Between")))  # fmt: skip
        with checked as checks, between as betweens:
            for layer in model:
                x = layer(x, mask, batch.layout)
        assert (checks.call_count, pieces._find.cache_info().misses - made, betweens.call_count) == (2, 1, 1)
