"""A vocabulary sharded over tp: the embedding, and losses without the whole logits in memory.

The loss of a row needs three numbers from each rank's part of the vocabulary: the largest logit, the sum of
exp(logit - largest), and the label's logit if the label is in this part. Logits are computed in chunks of rows, and
again in the backward. That costs one more matmul, and saves memory: one chunk replaces the logits [S, V / tp]. The
backward also holds the gathered rows [S, C], their gradient, and the weight's gradient in float32.

Shapes: S rows of the sequence, C features, V vocabulary, N all rows of the batch.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import constant_in_traces, resolve_group
from cp_mesh.call.spec import autocast
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_compiled_backward
from cp_mesh.tensor_parallel.colwise import Columns, column_linears
from cp_mesh.tensor_parallel.matmul import check_rows, graded_names, refuse_transforms

CHUNK_BYTES = 256 << 20
"""Bytes of the logits of one chunk of rows on this rank, in the accumulation dtype."""


def embed(tokens: Tensor, weight: Tensor, begin: int, size: int, padding_idx: int | None) -> Tensor:
    """Embeddings of the tokens in this rank's part of the vocabulary, else zeros: the sum over tp is the embedding.

    Args:
        tokens: int64 or int32 [..., S], equal on all tp ranks.
        weight: [tokens of this rank, C].
        begin: the first token of this rank.
        size: V.
        padding_idx: a token whose row gets no gradient.

    Returns:
        [..., S, C].

    Raises:
        IndexError: for a token outside of the whole vocabulary, on the CPU; CUDA raises a device assertion.
    """
    index, own = _own_index(tokens, begin, len(weight), size)
    padding = None if padding_idx is None or not 0 <= padding_idx - begin < len(weight) else padding_idx - begin
    return F.embedding(index, weight, padding).masked_fill(~own[..., None], 0)


def _own_index(tokens: Tensor, begin: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Indices in this rank's part of the vocabulary (0 for tokens of other ranks), and which tokens are in the part.

    Tokens outside of the vocabulary keep an index out of range, so that a lookup raises.
    """
    other = (tokens >= 0) & (tokens < size) & ((tokens < begin) | (tokens >= begin + count))
    return torch.where(other, 0, tokens - begin), ~other


class Head:
    """This rank's part of the last linear. Not a dataclass: FSDP2 would find the weight in one and warn of a view.

    Attributes:
        weight: [tokens of this rank, C].
        begin: the first token of this rank.
        size: V.
        group_name: of the tp group.
    """

    def __init__(self, weight: Tensor, begin: int, size: int, group_name: str) -> None:
        self.weight, self.begin, self.size, self.group_name = weight, begin, size, group_name

    def check(self) -> None:
        """Refuse a weight that FSDP2 has freed."""
        if not torch.compiler.is_compiling() and self.weight.untyped_storage().size() == 0:
            hint = "fully_shard the module that holds it with reshard_after_forward=False, the default of a root"
            refuse("DeferredLogits", "the weight of the last linear", "one that FSDP2 has freed", hint)


@constant_in_traces
def check_ranks(group_name: str, names: Sequence[str]) -> None:
    """Refuse a loss over a group with several ranks of one tp group: their equal labels would be counted twice."""
    tp, *groups = ({*dist.get_process_group_ranks(resolve_group(x))} for x in (group_name, *names))
    if shared := next((sorted(tp & ranks) for ranks in groups if len(tp & ranks) > 1), None):
        hint = 'leave tp out: mesh["dp", "cp"]._flatten("dp_cp")'
        refuse("cross_entropy: mesh", "ranks that hold distinct tokens", f"ranks {shared} of one tp group", hint)


class DeferredLogits(NamedTuple):
    """Logits that `cp_mesh.cross_entropy` computes in chunks; what a linear under `VocabParallelHead` returns.

    FSDP2 searches the outputs of a model for tensors, and finds only ``hidden`` here.

    Attributes:
        hidden: the input of the linear, [..., rows of this rank, C], or all rows [..., S, C] if it is not sharded.
        head: the linear.
        num_rows: S.
        sharded: True if each tp rank has its own rows of the input.
    """

    hidden: Tensor
    head: Head
    num_rows: int
    sharded: bool

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"logits of VocabParallelHead have no {name!r}: they are computed in cp_mesh.cross_entropy(logits, labels, "
            "mesh), or by logits.whole(), [..., S, V]"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits, [..., S, V]."""
        return (*self.hidden.shape[:-2], self.num_rows, self.head.size)

    @property
    def requires_grad(self) -> bool:
        return self.hidden.requires_grad or self.head.weight.requires_grad

    def check_groups(self, names: Sequence[str]) -> None:
        """Refuse a loss over groups, given by name, whose ranks do not hold distinct tokens."""
        check_ranks(self.head.group_name, names)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """All logits [..., S, V], on every tp rank, without a gradient: for sampling or inspection."""
        head = self.head
        head.check()
        shards = Shards(head.size, head.group_name, "DeferredLogits.whole")
        call = Columns(self.num_rows, head.group_name, self.sharded, max(shards.sizes), "auto", recompute=True)
        names = "weight", "bias"
        (own,) = column_linears(self.hidden.to(head.weight.dtype), [head.weight], [None], call, names)
        return shards.gather(own.mT)().mT.contiguous()

    def losses(self, labels: Tensor, ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        """Losses [N] for labels [N], int64, equal on all tp ranks; float32 or float64, and 0 for ignored tokens."""
        refuse_transforms("cross_entropy")
        head = self.head  # it has the dtype that hidden had before FSDP2 cast the model's output
        head.check()
        hidden, weight = autocast(self.hidden.to(head.weight.dtype), head.weight)
        call = head.begin, head.size, self.num_rows, head.group_name, self.sharded, ignore_index
        graded = graded_names(["input", "weight"], [hidden, weight])
        losses: Tensor = _HeadLosses.apply(hidden, weight, labels, graded, (label_smoothing, z_loss), *call)
        return losses


def _refuse_operator(logits: DeferredLogits, *_: Any) -> NoReturn:
    hint = "loss = cp_mesh.cross_entropy(logits, labels, mesh), or logits.whole(), [..., S, V]"
    refuse("logits of VocabParallelHead", "logits as the head returned them", "an item, or arithmetic", hint)


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv"):  # item 0 of the tuple is hidden
    setattr(DeferredLogits, f"__{_name}__", _refuse_operator)


def _chunks(rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows and their logits [rows, V of this rank], in the accumulation dtype; callers may write to them."""
    dtype = accumulation_dtype(rows.dtype)
    step = max(1, CHUNK_BYTES // (len(weight) * dtype.itemsize))
    for begin in range(0, len(rows), step):
        of_chunk = slice(begin, min(begin + step, len(rows)))
        yield of_chunk, (rows[of_chunk] @ weight.t()).to(dtype)


def add_terms(x: Tensor, largest: Tensor, sums: Tensor, size: int, label_smoothing: float, z_loss: float) -> None:
    """Add the gradients of z-loss and of smoothed labels to ``x``, sums * softmax of logits, in place.

    Args:
        x: [rows, V of this rank].
        largest, sums: [rows, 1], of all ranks: the log-sum-exp is largest + log(sums).
        size: V.
    """
    if z_loss:
        x.mul_(1 + 2 * z_loss * (largest + sums.log()))
    if label_smoothing:
        x.sub_(label_smoothing / size * sums)


def _gathered(hidden: Tensor, num_rows: int, group_name: str, sharded: bool) -> Tensor:
    """The input of all rows, [N, C]."""
    whole = Shards(num_rows, group_name, "cross_entropy").gather(hidden)() if sharded else hidden
    return whole.reshape(-1, whole.shape[-1])


@torch.library.custom_op("cp_mesh::head_losses", mutates_args=())
def _head_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    begin: int,
    size: int,
    num_rows: int,
    group_name: str,
    sharded: bool,
    ignore_index: int,
    graded: str,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [N]; and for each row, [N, 1], the largest logit of all ranks and the sum of exp(logit - largest)."""
    # at least the kind in training/loss.py
    kind = size, ignore_index, hidden.requires_grad, weight.requires_grad, label_smoothing > 0, z_loss > 0
    alike = {"labels": labels, "label_smoothing and z_loss": torch.tensor([label_smoothing, z_loss], device="cpu")}
    options: dict[str, Any] = {"graded": graded, "alike": alike}
    check_rows("cross_entropy", hidden, num_rows, group_name, sharded, *kind, **options)
    rows, counts = _gathered(hidden, num_rows, group_name, sharded), labels != ignore_index
    index, own = _own_index(labels.where(counts, begin), begin, len(weight), size)
    found = rows.new_empty((3, len(rows), 1), dtype=accumulation_dtype(rows.dtype))
    for of_chunk, x in _chunks(rows, weight):
        largest, sums, target = found[:, of_chunk]
        target.copy_(x.gather(1, index[of_chunk, None]).masked_fill_(~own[of_chunk, None], 0))
        if label_smoothing:
            target.mul_(1 - label_smoothing).add_(x.sum(1, keepdim=True), alpha=label_smoothing / size)
        torch.amax(x, 1, keepdim=True, out=largest)
        torch.sum(x.sub_(largest).exp_(), 1, keepdim=True, out=sums)
    tp_size = resolve_group(group_name).size()
    every = Shards(3 * tp_size, group_name, "cross_entropy").gather(found.flatten(1))().view(tp_size, 3, -1, 1)
    largest = every[:, 0].amax(0)
    sums = (every[:, 1] * (every[:, 0] - largest).exp()).sum(0)
    losses = (sums.log() - (every[:, 2].sum(0) - largest)).squeeze(1)
    if z_loss:
        losses += z_loss * (largest + sums.log()).squeeze(1).square()
    return losses.where(counts, 0), largest, sums


@torch.library.custom_op("cp_mesh::head_losses_backward", mutates_args=())
def _head_losses_backward(
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    largest: Tensor,
    sums: Tensor,
    wants: Sequence[bool],
    begin: int,
    size: int,
    num_rows: int,
    group_name: str,
    sharded: bool,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> list[Tensor]:
    """The wanted gradients of the input and of the weight, each rounded once to the tensor's dtype."""
    note_compiled_backward()
    rows, counts = _gathered(hidden, num_rows, group_name, sharded), labels != ignore_index
    index, own = _own_index(labels.where(counts, begin), begin, len(weight), size)
    index, scale = index[:, None], dlosses.where(counts, 0)[:, None] / sums
    at_label = (label_smoothing - 1) * sums.where(own[:, None], 0)
    dhidden, dweight = torch.empty_like(rows) if wants[0] else None, None
    if wants[1]:
        dweight = torch.zeros_like(weight, dtype=sums.dtype, memory_format=torch.contiguous_format)
    for of_chunk, x in _chunks(rows, weight):
        x.sub_(largest[of_chunk]).exp_()
        add_terms(x, largest[of_chunk], sums[of_chunk], size, label_smoothing, z_loss)
        x.scatter_add_(1, index[of_chunk], at_label[of_chunk])
        dlogits = x.mul_(scale[of_chunk]).to(rows.dtype)
        if dhidden is not None:
            torch.mm(dlogits, weight, out=dhidden[of_chunk])
        if dweight is not None:
            dweight += dlogits.t() @ rows[of_chunk]
    grads = []
    if dhidden is not None:
        shards = Shards(num_rows, group_name, "backward of cross_entropy")
        dhidden = dhidden.view(*hidden.shape[:-2], num_rows, hidden.shape[-1])
        grads.append((shards.scatter_sum(dhidden) if sharded else shards.all_sum(dhidden))())
    return grads if dweight is None else [*grads, dweight.to(weight.dtype)]


@_head_losses.register_fake
def _(hidden, weight, labels, *_):  # type: ignore[no-untyped-def]
    row = hidden.new_empty((labels.shape[0], 1), dtype=accumulation_dtype(hidden.dtype))
    return row.new_empty(labels.shape), row, torch.empty_like(row)


@_head_losses_backward.register_fake
def _(dlosses, hidden, weight, labels, largest, sums, wants, *_):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x, wanted in zip((hidden, weight), wants, strict=True) if wanted]


def _refuse_second_backward(ctx: Any, *_: Any) -> None:
    raise UnsupportedError("cp_mesh.cross_entropy has no second derivative: use F.cross_entropy on logits.float()")


_head_losses_backward.register_autograd(_refuse_second_backward)


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, graded: str, terms: tuple[float, float], *call: Any
    ) -> Tensor:
        losses, *of_rows = _head_losses(hidden, weight, labels, *call, graded, *terms)
        ctx.save_for_backward(hidden, weight, labels, *of_rows)
        ctx.call = *call, *terms
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Any, ...]:
        wants = list(ctx.needs_input_grad[:2])
        found = iter(_head_losses_backward(dlosses, *ctx.saved_tensors, wants, *ctx.call))
        return *(next(found) if wanted else None for wanted in wants), *[None] * (1 + len(ctx.call))
