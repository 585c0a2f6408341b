"""`RecurrentParallel` on modules with recurrences and convolutions, against one rank that computes each document alone.

The functions of other packages are written anew here, with the signatures of flash-linear-attention and causal-conv1d.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from inside import inner, room
from ranks import mesh
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cp_mesh import (
    ArgumentError,
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
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
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Of one document; as in fla.modules.causal_conv1d."""
    rows = F.pad(x, (0, 0, W - 1, 0))
    out = sum(weight[:, j] * rows[:, j : j + x.shape[1]] for j in range(W))
    out = out if bias is None else out + bias
    out = out if activation is None else F.silu(out)
    return (out if residual is None else out + residual), None


def chunk_rwkv7(*args: Any, **kwargs: Any) -> Any:
    return args[0], None


chunk_rwkv7.__module__ = "fla.ops.rwkv7.chunk"


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


def on_one_rank(make: Callable[[], nn.Module] = Hybrid) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the mean loss, of documents that are computed alone."""
    model, (tokens, labels), logits = built(make), batch(), []
    for document in range(DOCUMENTS[-1] + 1):
        at = [i for i in range(S) if DOCUMENTS[i] == document]
        logits.append(model(tokens[:, at]))
    whole = torch.cat(logits, 1)
    F.cross_entropy(whole.flatten(0, 1), labels.flatten()).backward()
    return whole.detach(), {name: x.grad for name, x in model.named_parameters()}


def planned(
    sequence: ShardedSequence, model: nn.Module, mask: Any = PACKED, probes: bool = False, **options: Any
) -> nn.Module:
    recurrent = RecurrentParallel(sequence, mask=mask, **options)
    plan: dict[str, Any] = {f"layers.{i}.mixer": recurrent for i in (0, 2)}
    plan |= {"layers.1.mixer.core": ContextParallel(sequence, mask=PACKED), "layers.3.mixer.conv1d": recurrent}
    root = ShardedModel(sequence, positions=None, probe=probes)
    return parallelize(model, sequence.mesh, plan | {"": root})


def stepped(rank: int, size: int, layout: str, how: str, method: str) -> float:
    """The largest difference of logits and gradients from one rank."""
    axis, (tokens, labels) = mesh((size,), ("cp",)), batch()
    sequence = ShardedSequence(axis, layout=LAYOUTS[layout], length=S if layout == "striped" else None)
    model = planned(sequence, built(lambda: Hybrid("checkpoint" in how)), probes="probe" in how, method=method)
    if "compiled" in how:
        for layer in model.layers:
            layer.compile()
    if "fsdp" in how:
        for layer in model.layers:
            fully_shard(layer, mesh=axis)
        fully_shard(model, mesh=axis)
        sum_gradients(model)
    if "copied" in how:
        model = copy.deepcopy(model)
    logits = model(tokens)
    cross_entropy(logits, sequence.shard({"labels": labels})["labels"], axis).backward()
    want, want_grads = on_one_rank()
    worst = [(sequence.unshard(logits) - want).abs().max()]
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        if "fsdp" not in how:
            torch.distributed.all_reduce(grad)
        worst.append((grad - want_grads[name.replace("_orig_mod.", "")]).abs().max())
    return float(max(worst))


@pytest.mark.quick("zigzag")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_hybrid_is_that_of_one_rank(pool: Any, size: int, layout: str) -> None:
    for method in ("auto", *(["heads"] if size in (1, 2) else [])):
        assert max(pool(size).run(stepped, size, layout, "", method)) < 1e-12


@pytest.mark.parametrize("how", ["checkpoint", "fsdp", "compiled", "copied", "probe", "checkpoint fsdp compiled"])
def test_a_hybrid_with_what_trainers_do(pool: Any, how: str) -> None:
    assert max(pool(2).run(stepped, 2, "zigzag", how, "auto", timeout=120.0)) < 1e-12


class OneMixer(nn.Module):
    """A root with one layer that mixes tokens."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.mixer, self.head = nn.Embedding(VOCABULARY, C), mixer, nn.Linear(C, VOCABULARY)

    def forward(self, tokens: Tensor, **given: Any) -> Tensor:
        return self.head(self.mixer(self.embed(tokens), **given))


def of_packed_call(mixer: Mixer, x: Tensor, **options: Any) -> Tensor:
    rows, g, beta = mixer.split(x)
    q, k, v = mixer.heads(rows)
    return mixer.out(chunk_gated_delta_rule(q, k, v, g, beta.sigmoid(), **options)[0].flatten(2))


class Calls(Mixer):
    """Calls a function of another package with more arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return of_packed_call(self, x, **self.options)


class CallsOurs(Calls):
    def forward(self, x: Tensor) -> Tensor:
        rows, g, beta = self.split(x)
        q, k, v = self.heads(rows)
        return self.out(mixers.gated_delta_rule(q, k, v, g, beta.sigmoid(), **self.options)[0].flatten(2))


class NoCall(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.split(x)[0][..., : H * D])


class ConvolutionAlone(Mixer):
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


IN_PACKAGE: dict[str, Any] = {"__name__": "fla.ops.rwkv6.chunk"}
exec("def chunk_rwkv6(rows):\n    return rows.cumsum(1)", IN_PACKAGE)
TABLE = {"rwkv6": IN_PACKAGE["chunk_rwkv6"]}


class Table(Calls):
    """Finds a function of a package where no name says so."""

    def forward(self, x: Tensor) -> Tensor:
        return of_packed_call(self, TABLE["rwkv6"](x))


class TableAlone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return TABLE["rwkv6"](x)


class ClassMethod(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(of_packed_call(self, x), self.weight[:C])

    @classmethod
    def convolve(cls, x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv1d(x, weight)[0]


class Writes(Calls):
    def forward(self, x: Tensor) -> Tensor:
        global FACTOR
        FACTOR = float(x.shape[1])
        return of_packed_call(self, x)


FACTOR = 1.0


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def twice(*args: Any, **options: Any) -> Tensor:
        return 2 * function(*args, **options)

    return twice


@doubled
def decorated_call(mixer: Mixer, x: Tensor) -> Tensor:
    return of_packed_call(mixer, x)


class Decorated(Calls):
    """With decorators, and a number of its file."""

    @doubled
    @torch.no_grad()
    def without_grad(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return decorated_call(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return FACTOR * (self.without_grad(x) + of_packed_call(self, x))


OF_MAMBA: dict[str, Any] = {"__name__": "mamba_ssm.ops.triton.layer_norm"}
exec("def rms_norm_fn(x):\n    return x / x.square().mean(-1, keepdim=True).sqrt()", OF_MAMBA)
rms_norm_fn = OF_MAMBA["rms_norm_fn"]


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
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.inner = mixer

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(rms_norm_fn(x))


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
        rows, _ = causal_conv1d(rows, self.weight)
        return self.out(elsewhere.chunk_simple_gla(*self.heads(rows), g)[0].flatten(2))


elsewhere = SimpleNamespace(chunk_simple_gla=lambda q, k, v, g: (v, None))


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


class OfCall(nn.Module):
    """Gets the mask, or the layout, of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return self.mixer(x)


OTHERS = torch.tensor([0, 7, S], dtype=torch.int32)
REFUSED: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "no call": (NoCall, True, "RecurrentParallel(NoCall at mixer): expected a call of cp_mesh.mixers"),
    "ours outside of the plan": (Mixer, False, "expected a module with RecurrentParallel"),
    "others outside of the plan": (Calls, False, "'mixer', a Calls: "),
    "a convolution outside of the plan": (Convolves, False, "a convolution of 4 over the 12 of this rank, in 'mixer"),
    "a convolution with padding around": (lambda: Convolves(padding=1), True, "causal by padding"),
    "a convolution of all channels": (lambda: Convolves(groups=1), True, "one of each channel"),
    "a convolution with holes": (lambda: Convolves(dilation=2), True, "causal by padding"),
    "a checkpoint inside": (CheckpointInside, True, "a checkpoint around the whole module"),
    "a cache": (lambda: Calls(output_final_state=True), True, "a model without a cache"),
    "a state of a cache": (lambda: Calls(initial_state=torch.zeros(2, H, D, D)), True, "a model without a cache"),
    "a function in a table": (Table, True, "one of fla.ops.rwkv6.chunk on the tokens of this rank, in 'mixer'"),
    "a function in a table outside of the plan": (TableAlone, False, "one of fla.ops.rwkv6.chunk on the tokens"),
    "a class method": (ClassMethod, True, "those in convolve, a classmethod"),
    "a function that writes to its file": (Writes, True, "forward, which writes to its file"),
    "a path of its own": (
        ConvolutionAlone,
        True,
        "a call of chunk_gated_delta_rule, in its forward, got a convolution",
    ),
    "other documents": (lambda: Calls(cu_seqlens=OTHERS), True, "the documents of the style's mask"),
    "another mask": (lambda: CallsOurs(mask=Mask()), True, "the documents of the style's mask"),
    "an argument of a kernel": (lambda: Calls(head_first=True), True, "head_first"),
    "another method": (lambda: CallsOurs(method="states"), True, "RecurrentParallel(method=, kernel=) has it"),
    "a function that we lack": (Unknown, True, "chunk_rwkv7"),
    "a function of an object": (Dotted, True, "chunk_simple_gla, which Dotted reads from another object"),
    "a forward of a base": (Inherits, True, "super().forward of Inherits"),
    "a forward of a base by name": (InheritsByName, True, "super().forward of InheritsByName"),
}


def of_one(rank: int, name: str, compiled: str = "") -> None:
    make, is_planned, _ = (COMPILED if compiled else REFUSED)[name]
    sequence, model = ShardedSequence(mesh((2,), ("cp",))), OneMixer(make())
    plan: dict[str, Any] = {"": ShardedModel(sequence, positions=None)}
    plan |= {"mixer": RecurrentParallel(sequence, mask=PACKED)} if is_planned else {}
    model = parallelize(model, sequence.mesh, plan)
    if compiled == "block":
        model.mixer.compile(backend="eager")
    torch.compile(model, backend="eager")(batch()[0]) if compiled == "root" else model(batch()[0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_style_refuses(pool: Any, name: str) -> None:
    errors = pool(2).run_expecting_error(of_one, name, timeout=30.0)
    assert all(error is not None and REFUSED[name][2] in error.message for error in errors), errors


def unlike_styles(rank: int, recurrent: Mask, attention: Mask) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    plan: dict[str, Any] = {f"layers.{i}.mixer": RecurrentParallel(sequence, mask=recurrent) for i in (0, 2)}
    plan |= {"layers.1.mixer.core": ContextParallel(sequence, mask=attention)}
    plan |= {
        "layers.3.mixer.conv1d": RecurrentParallel(sequence, mask=recurrent),
        "": ShardedModel(sequence, positions=None),
    }
    parallelize(built(), sequence.mesh, plan)(batch()[0])


def test_documents_of_one_style_alone_are_refused(pool: Any) -> None:
    for masks in ((Mask(causal=True), PACKED), (PACKED, Mask(causal=True))):
        errors = pool(2).run_expecting_error(unlike_styles, *masks, timeout=30.0)
        assert all("as in that of RecurrentParallel" in error.message for error in errors), errors
    pool(2).run(unlike_styles, Mask(causal=True, documents=torch.zeros(S, dtype=torch.int64)), PACKED)


COMPILED: dict[str, tuple[Callable[[], nn.Module], bool, str]] = {
    "ours outside of the plan": (Mixer, False, "without sequence="),
    "others outside of the plan": (Calls, False, "'mixer', a Calls: "),
    "a recurrent layer": (Recurrent, False, "which is recurrent"),
    "a convolution": (Convolves, False, "a convolution of 4 over the 12 of this rank"),
}


@pytest.mark.parametrize(("name", "what"), [*((name, "root") for name in COMPILED), ("a convolution", "block")])
def test_what_compiled_models_refuse(pool: Any, name: str, what: str) -> None:
    errors = pool(2).run_expecting_error(of_one, name, what, timeout=60.0)
    assert all(error is not None and COMPILED[name][2] in error.message for error in errors), errors


def test_dynamo_leaves_the_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks each name of a model's file for an attribute, which for ClassVar is an internal error of Dynamo 2.14."""
    monkeypatch.setitem(globals(), "imported", ClassVar)
    search = room("stand_ins")
    with pytest.raises(ArgumentError, match=r"expected every recurrence.* got 'mixer', a Calls: "):
        torch.compile(lambda: search.refuse_unplanned(OneMixer(Calls())), backend="eager")()
    assert not _debug_get_cache_entry_list(search.StandIns.of_class.__code__)


def probed(rank: int, make: Callable[[], nn.Module]) -> None:
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = parallelize(built(lambda: OneMixer(make())), sequence.mesh, {"": ShardedModel(sequence, positions=None)})
    probe(model, {"tokens": batch()[0]})


@pytest.mark.parametrize("make", [Loop, Recurrent])
def test_the_probe_finds_recurrences_of_other_code(pool: Any, make: Callable[[], nn.Module]) -> None:
    errors = pool(2).run_expecting_error(probed, make, timeout=60.0)
    assert all("the same rows as on one rank" in error.message for error in errors), errors


def let_through(rank: int) -> None:
    """What mixes no tokens, and a mask and lengths that are the style's."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    root: Any = ShardedModel(sequence, positions=None)
    parallelize(OneMixer(Halves()), sequence.mesh, {"": root})(batch()[0])
    lengths = torch.tensor([0, 5, 6, 15, S], dtype=torch.int32)
    for made in (
        Calls(cu_seqlens=lengths),
        Calls(state_v_first=True),
        CallsOurs(mask=Mask(documents=torch.tensor(DOCUMENTS))),
    ):
        plan = {"": ShardedModel(sequence, positions=None), "mixer": RecurrentParallel(sequence, mask=PACKED)}
        parallelize(OneMixer(made), sequence.mesh, plan)(batch()[0])
    # nothing is left on modules, and models without a plan call their own functions
    assert chunk_gated_delta_rule.__globals__["causal_conv1d"] is causal_conv1d
    model = planned(sequence, built())
    before = [{*vars(part)} for part in model.modules()]
    model(batch()[0])
    assert [{*vars(part)} for part in model.modules()] == before


def test_what_is_let_through(pool: Any) -> None:
    pool(2).run(let_through)


def of_mamba(rank: int) -> float:
    """In bfloat16, with a function of the package that mixes no tokens outside of the plan."""
    sequence, model = ShardedSequence(mesh((2,), ("cp",))), built(lambda: OneMixer(Norms(Mamba()))).bfloat16()
    tokens, plain = batch()[0], copy.deepcopy(model)
    plan = {"": ShardedModel(sequence, positions=None), "mixer.inner": RecurrentParallel(sequence)}
    with torch.no_grad():
        out, want = sequence.unshard(parallelize(model, sequence.mesh, plan)(tokens)), plain(tokens)
    assert out.dtype == torch.bfloat16
    return float((out - want).abs().max() / want.abs().max())


def test_a_mamba_in_bfloat16(pool: Any) -> None:
    assert max(pool(2).run(of_mamba)) < 2**-8


def with_decorators(rank: int) -> float:
    global FACTOR
    sequence, x = ShardedSequence(mesh((1,), ("cp",))), torch.ones(2, S, C, dtype=torch.float64)
    plain = built(Decorated)
    model, worst = parallelize(copy.deepcopy(plain), sequence.mesh, {"": RecurrentParallel(sequence)}), 0.0
    try:
        for factor in (1.0, 3.0):
            FACTOR = factor
            want = plain(x).detach()
            worst = max(worst, float((model(x).detach() - want).abs().max() / want.abs().max()))
    finally:
        FACTOR = 1.0
    return worst


def test_decorators_and_numbers_of_a_file_stay(pool: Any) -> None:
    assert max(pool(1).run(with_decorators)) < 1e-12


def of_call(rank: int, what: str) -> float:
    """Masks and layouts that come with the call, and methods, against the same that are fixed."""
    axis, tokens = mesh((2,), ("cp",)), batch()[0]
    sequence, other = ShardedSequence(axis, Contiguous()), ShardedSequence(axis, ZigZag())
    model = built(OfCall).double()
    x = torch.randn(2, S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    plain = [model(x[:, [i for i in range(S) if DOCUMENTS[i] == n]], None) for n in range(DOCUMENTS[-1] + 1)]
    options: dict[str, Any] = {"mask": PACKED}
    given, used = None, sequence
    if what == "mask":
        options, given = {"mask": lambda x, given: given}, PACKED
    if what == "layout":
        options |= {"layout": lambda x, given: given["layout"]}
        given, used = {"layout": other.layout}, other
    parallelize(model, axis, {"": RecurrentParallel(sequence, **options)})
    rows = used.shard(x)
    assert tokens.shape[1] == S
    return float((used.unshard(model(rows, given)) - torch.cat(plain, 1)).abs().max())


@pytest.mark.parametrize("what", ["fixed", "mask", "layout"])
def test_what_comes_with_a_call(pool: Any, what: str) -> None:
    assert max(pool(2).run(of_call, what)) < 1e-12


def told(rank: int) -> list[tuple[str, str]]:
    """Method and kernel of a call in the style."""
    found: list[tuple[str, str]] = []
    scope = inner("scope", "Scope")

    class Seen(Mixer):
        def forward(self, x: Tensor) -> Tensor:
            now: Any = inner("scope", "SCOPE").get()
            assert isinstance(now, scope)
            found.append((now.method, now.kernel))
            return super().forward(x)

    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model = parallelize(Seen(), sequence.mesh, {"": RecurrentParallel(sequence, method="heads", kernel="reference")})
    with Collectives() as sent:
        model(torch.zeros(2, S // 2, C))
    assert any("all_to_all" in name for name in sent.names), sent.names
    return found


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.__name__] * (func.namespace == "_c10d_functional")
        return func(*args, **(kwargs or {}))


def test_method_and_kernel_are_the_styles(pool: Any) -> None:
    assert pool(2).run(told) == [[("heads", "reference")]] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mask": 3}, "a Mask"), ({"method": "ring"}, "auto"), ({"kernel": "cuda"}, "auto"), ({"layout": 3}, "a Layout")],
)
def test_options_are_checked(pool: Any, options: dict[str, Any], words: str) -> None:
    errors = pool(1).run_expecting_error(made_with, options)
    assert all(words in error.message for error in errors), errors


def made_with(rank: int, options: dict[str, Any]) -> None:
    RecurrentParallel(ShardedSequence(mesh((1,), ("cp",))), **options)


def test_a_model_of_one_rank_needs_no_plan() -> None:
    """Packed documents are those of a mask."""
    x = torch.randn(2, S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    model = built(lambda: CallsOurs(mask=PACKED))
    alone: Any = built(CallsOurs)
    parts = [alone(x[:, [i for i in range(S) if DOCUMENTS[i] == n]]) for n in range(DOCUMENTS[-1] + 1)]
    assert (model(x) - torch.cat(parts, 1)).abs().max() < 1e-12


def compiled_root(rank: int) -> float:
    """A root that is compiled as a whole, with a plan for all that mixes tokens."""
    sequence = ShardedSequence(mesh((2,), ("cp",)))
    model: Any = torch.compile(planned(sequence, built()), backend="eager")
    want, _ = on_one_rank()
    return float((sequence.unshard(model(batch()[0])) - want).abs().max())


def test_a_compiled_root(pool: Any) -> None:
    assert max(pool(2).run(compiled_root, timeout=120.0)) < 1e-12


def without_a_root(rank: int, is_planned: bool, compiled: bool = False) -> float:
    sequence, x = ShardedSequence(mesh((2,), ("cp",))), torch.ones(2, S // 2, C, dtype=torch.float64)
    model = built(lambda: nn.Sequential(Mixer(), Mixer()))
    places = "01" if is_planned else "0"
    parallelize(model, sequence.mesh, {place: RecurrentParallel(sequence, mask=PACKED) for place in places})
    return float((torch.compile(model, backend="eager") if compiled else model)(x).abs().max())


def test_what_is_refused_without_a_root(pool: Any) -> None:
    assert max(pool(2).run(without_a_root, True)) > 0
    errors = pool(2).run_expecting_error(without_a_root, False, timeout=30.0)
    assert all("a module with RecurrentParallel" in error.message for error in errors), errors
    errors = pool(2).run_expecting_error(without_a_root, False, True, timeout=60.0)
    assert all("without sequence=" in error.message for error in errors), errors


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.ones(2 * H * D, W, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Mask, layout: Any) -> Tensor:
        y = mixers.causal_conv1d(x, self.taps).unflatten(2, (2 * H, D))
        return x + mixers.gla(y, y, y, method="auto")[0].flatten(2)


def plans_of_batches(rank: int, with_layouts: bool) -> list[tuple[int, int, int]]:
    """Of two batches: calls that were checked, pieces and passes between them that were made, over three layers."""
    rules, pieces, states, found = room("mixers.rules"), room("mixers.pieces"), room("mixers.states"), []
    axis = mesh((2,), ("cp",))
    sequence = ShardedSequence(axis, length=S)
    own = {"layout": lambda x, mask, layout: layout} if with_layouts else {}
    style = RecurrentParallel(sequence, mask=lambda x, mask, layout: mask, **own)
    model = parallelize(nn.ModuleList(Mixing() for _ in range(3)), axis, {"*": style}, watch=False)
    for lens in ([6, 18], [10, 2, 12]):
        mask = Mask.from_cu_seqlens(torch.tensor([0, *lens]).cumsum(0))
        batch = sequence.balanced(mask) if with_layouts else sequence
        x, made = batch.shard(torch.ones(1, S, 2 * H * D, dtype=torch.float64)), pieces._find.cache_info().misses
        wraps = [
            mock.patch.object(at, name, wraps=getattr(at, name))
            for at, name in ((rules, "_pieces"), (states, "Between"))
        ]
        with wraps[0] as checked, wraps[1] as between:
            for layer in model:
                x = layer(x, mask, batch.layout)
        found.append((checked.call_count, pieces._find.cache_info().misses - made, between.call_count))
    return found


@pytest.mark.parametrize("with_layouts", [False, True])
def test_layers_of_a_batch_are_planned_once(pool: Any, with_layouts: bool) -> None:
    """The convolution and the recurrence of the first layer are checked; those of later layers are known."""
    assert pool(2).run(plans_of_batches, with_layouts) == [[(2, 1, 1)] * 2] * 2
