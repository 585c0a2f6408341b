"""A vocabulary sharded over tp: the embedding, and logits that only the loss computes, in chunks of rows.

That costs one more matmul, and saves memory: one chunk replaces the logits [S, V / tp]. The backward also holds the
gathered rows [S, C], their gradient, and the weight's gradient in float32.

Shapes: S rows of the sequence, C features, V vocabulary, N all rows of the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_mesh._torch import constant_in_traces, resolve_group
from cp_mesh.call.spec import autocast
from cp_mesh.comm.shards import Shards
from cp_mesh.errors import refuse
from cp_mesh.tensor_parallel.colwise import column_linears
from cp_mesh.tensor_parallel.losses_in_chunks import own_index, token_losses
from cp_mesh.tensor_parallel.matmul import LinearSpec, refuse_transforms


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
    index, own = own_index(tokens, begin, len(weight), size)
    padding = None if padding_idx is None or not 0 <= padding_idx - begin < len(weight) else padding_idx - begin
    return F.embedding(index, weight, padding).masked_fill(~own[..., None], 0)


class Head:
    """This rank's part of the last linear. Not a dataclass: FSDP2 would find the weight in one and warn of a view.

    Attributes:
        weight: [tokens of this rank, C].
        bias: [tokens of this rank], or None.
        begin: the first token of this rank.
        size: V.
        group_name: of the tp group.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, begin: int, size: int, group_name: str) -> None:
        self.weight, self.bias, self.begin, self.size, self.group_name = weight, bias, begin, size, group_name

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
        return any(x is not None and x.requires_grad for x in (self.hidden, self.head.weight, self.head.bias))

    def is_like(self, other: Any) -> bool:
        """Whether both are deferred logits of the same rows and tokens, on the same ranks."""
        own, *theirs = ((x.shape, x.sharded, x.head.group_name) for x in (self, other) if isinstance(x, DeferredLogits))
        return theirs == [own]

    def check_groups(self, names: Sequence[str]) -> None:
        """Refuse a loss over groups, given by name, whose ranks do not hold distinct tokens."""
        check_ranks(self.head.group_name, names)

    @torch.no_grad()
    def whole(self) -> Tensor:
        """All logits [..., S, V], on every tp rank, without a gradient: for sampling or inspection."""
        head = self.head
        head.check()
        shards = Shards(head.size, head.group_name, "DeferredLogits.whole")
        spec, hidden = LinearSpec(self.num_rows, head.group_name, self.sharded, max(shards.sizes)), self.hidden
        (own,) = column_linears(hidden.to(head.weight.dtype), [head.weight], [head.bias], spec, ("weight", "bias"))
        return shards.gather(own.mT)().mT.contiguous()

    def losses(
        self, labels: Tensor, ignore_index: int, temperature: float = 1.0, label_smoothing: float = 0.0,
        z_loss: float = 0.0, teacher: "DeferredLogits | None" = None,
    ) -> Tensor:  # fmt: skip
        """Losses [N] for labels [N], equal on all tp ranks; as `token_losses`."""
        refuse_transforms("cross_entropy")
        head, soft = self.head, () if teacher is None else teacher.given()
        over_tp = head.begin, head.size, self.num_rows, head.group_name, self.sharded
        terms = temperature, label_smoothing, z_loss
        return token_losses(self.given(), labels, ignore_index, *terms, teacher=soft, over_tp=over_tp)

    def given(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The input of the linear, its weight and its bias, in the dtype of autocast."""
        head = self.head  # it has the dtype that hidden had before FSDP2 cast the model's output
        head.check()
        hidden, weight = autocast(self.hidden.to(head.weight.dtype), head.weight)
        return hidden, weight, None if head.bias is None else head.bias.to(weight.dtype)


def _refuse_operator(logits: DeferredLogits, *_: Any) -> NoReturn:
    hint = "loss = cp_mesh.cross_entropy(logits, labels, mesh), or logits.whole(), [..., S, V]"
    refuse("logits of VocabParallelHead", "logits as the head returned them", "an item, or arithmetic", hint)


for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv"):  # item 0 of the tuple is hidden
    setattr(DeferredLogits, f"__{_name}__", _refuse_operator)
