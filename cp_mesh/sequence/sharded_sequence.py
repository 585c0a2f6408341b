"""`ShardedSequence`: one object gives the data, the positions, the style and the labels, so that they cannot disagree.

Labels are shifted before the sequence is sharded: the token after a shard's last row is on another rank.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import FakeTensor, MappingKey, funcol, tree_map_with_path
from cp_mesh.comm.agreement import compare
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.groups import as_mesh, flat, is_cp_axis
from cp_mesh.comm.shards import gather, scatter_sum
from cp_mesh.comm.waiting import wait_for
from cp_mesh.errors import as_int, check_int, refuse, typed
from cp_mesh.geometry.host_tensors import lasting
from cp_mesh.geometry.layouts import Contiguous, Layout, ZigZag, same
from cp_mesh.geometry.mask import EXCLUDED, NONE, TENSORS, Mask
from cp_mesh.sequence.auto import OPEN, PLAIN, is_by_batch, layout_of
from cp_mesh.sequence.cuts import TOKENS, Cuts, check_output, is_cut, note_cut

WHOLE = ("documents", "blocks", "key_padding", "cu_seqlens")
"""Names of leaves that `ShardedSequence.shard` does not shard: masks read them by position, on every rank."""
IGNORED = -100
"""The label of tokens that the loss ignores."""
PADDING = {
    **dict.fromkeys(("labels", "label", "targets", "target"), IGNORED),
    **dict.fromkeys((*TOKENS, "token_type_ids", "positions", "position_ids", "attention_mask", "key_padding"), 0),
    **dict.fromkeys(("documents", "blocks"), EXCLUDED),
}
"""Padding values for leaves with these names. Floating-point leaves with other names are padded with 0."""
MOST_LENGTHS = 16
"""Lengths for which a sequence caches the positions of its rows."""


@dataclass(frozen=True)
class ShardedSequence:
    """A sequence sharded over one mesh axis in a layout.

    Args:
        mesh: the 1-D mesh of the cp axis, or its ProcessGroup, from which a mesh is made; or a 2-D mesh of an outer and
            an inner axis whose names begin with "cp", which is flattened.
        layout: which positions each rank holds, `ZigZag()` by default. "auto": each batch has its own, that of
            `balanced` if its mask has several documents in a row, else zigzag. `for_batch` returns the sequence of a
            batch, for its labels and outputs, and a `ShardedModel` finds the mask itself; without a batch, nothing can
            be sharded.
        length: tokens in the whole sequence. Needed if it is not a multiple of ``layout.multiple(cp_size)``: it is then
            padded, or with ``pad=False`` sharded unequally. None: any multiple, read from the tensors.
        pad: pad the sequence at its end to a multiple, so that shards are equal.
        ulysses_degree: the default for ``ContextParallel(sequence, method="hybrid")``. None: for a 2-D mesh the size of
            its second axis.

    Raises:
        ArgumentError: if the mesh is none of these.

    Example:
        >>> sequence = ShardedSequence(mesh["cp"], ZigZag())  # doctest: +SKIP
        >>> batch = sequence.shard({"tokens": tokens, "labels": labels})  # [B, S] -> [B, S/cp]  # doctest: +SKIP
        >>> positions = sequence.positions(tokens.shape[1])  # [S/cp], for the rotary embedding  # doctest: +SKIP
    """

    mesh: DeviceMesh
    layout: Layout = field(default_factory=ZigZag)  # Dynamo of PyTorch 2.11 traces no `replace` beside an object here
    length: int | None = None
    pad: bool = True
    ulysses_degree: int | None = None

    _positions: ClassVar[dict[Any, Tensor]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", as_mesh(self.mesh))
        object.__setattr__(self, "_positions", {})  # of `_rows`; no field, as FSDP2 rebuilds objects from fields
        object.__setattr__(self, "ulysses_degree", as_int(self.ulysses_degree))
        if not isinstance(self.mesh, DeviceMesh) or not is_cp_axis(self.mesh):
            hint = 'pass the cp axis alone, mesh["cp"], or two axes with such names, mesh["cp_ring", "cp_ulysses"]'
            refuse("ShardedSequence.mesh", 'a 1-D DeviceMesh, or a 2-D one of axes "cp..."', self.mesh, hint)
        if self.mesh.ndim == 2:
            inner = self.mesh.size(1)
            if self.ulysses_degree not in (None, inner):
                expected = f"{inner}, as the mesh's second axis has"
                refuse("ShardedSequence.ulysses_degree", expected, self.ulysses_degree, "leave it out")
            object.__setattr__(self, "ulysses_degree", inner)
            object.__setattr__(self, "mesh", flat(self.mesh))
        if self.layout == "auto":
            object.__setattr__(self, "layout", OPEN)
        if not isinstance(self.layout, Layout):
            got = repr(self.layout) if isinstance(self.layout, str) else self.layout
            refuse("ShardedSequence.layout", 'a Layout or "auto"', got, "pass an instance: ZigZag(), with parentheses")
        if self.length is not None:
            length = check_int("ShardedSequence.length", self.length, most=NONE, hint="None leaves it open")
            object.__setattr__(self, "length", length)

    @property
    def cp_size(self) -> int:
        return self.mesh.size()

    @property
    def cp_rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def seq_len(self) -> int | None:
        """Tokens in the whole sequence with padding, or None if it is read from the tensors."""
        return None if self.length is None else self._sharded_len(self.length)

    def seq_len_in(self, layout: Layout) -> int | None:
        """Return `seq_len` for another ``layout``."""
        return None if self.length is None else self._sharded_len(self.length, layout)

    @typed
    def for_batch(self, length: int, mask: Mask | None = None) -> ShardedSequence:
        """Return this sequence for one batch that has its own length, or also its own layout.

        Batches of equal length give equal sequences, which share cached plans; only the latest plans are kept.

        Args:
            length: tokens of the batch, without padding.
            mask: the mask of the batch without padding, as `cp_mesh.batch_mask` makes it, for layout="auto"; another
                layout stays.

        Raises:
            ArgumentError: on a length below 1, or a mask as in `balanced`.

        Example:
            >>> batch = sequence.for_batch(tokens.shape[1], mask)  # doctest: +SKIP
            >>> rows = batch.shard({"tokens": tokens, "labels": labels})  # doctest: +SKIP
        """
        length = check_int("for_batch: length", length, most=NONE, hint="pass tokens.shape[1]")
        return replace(self, length=length).of_mask(mask)

    def of_mask(self, mask: Mask | None) -> ShardedSequence:
        """Return this sequence in the layout that a mask has, or under layout="auto" in that of the mask's batch."""
        documents = None if mask is None else mask.documents
        layout = (mask and mask.layout) or (PLAIN if is_by_batch(self.layout) else self.layout)
        if layout is PLAIN and mask is not None and documents is not None and mask.layout is None:
            length = self.length or documents.shape[-1]
            layout = layout_of(mask, documents, (length, self.pad, self.cp_size), lambda x: self.balanced(x).layout)
        return self if layout is self.layout else replace(self, layout=layout)

    def balanced(self, mask: Mask) -> ShardedSequence:
        """Return this sequence in the layout that `cp_mesh.balance` makes for one batch's mask.

        Args:
            mask: positions and documents of the sequence without padding.

        Raises:
            ArgumentError, UnsupportedError: as in `cp_mesh.balance`, and without both documents and ``length``.

        Example:
            >>> packed = sequence.balanced(Mask(documents=documents))  # doctest: +SKIP
            >>> labels = packed.shard({"labels": labels})["labels"]  # doctest: +SKIP
            >>> logits = model(tokens, mask=Mask(documents=documents), layout=packed.layout)  # doctest: +SKIP
        """
        from cp_mesh.geometry.balance import balance

        even = replace(self, layout=Contiguous())  # padded as the new layout will be
        mask, seq_len = even.mask(mask), even.seq_len
        if seq_len is None:
            if mask.documents is None:
                refuse("balanced", "documents, or a sequence with a length", None, "set length=")
            seq_len = even._sharded_len(mask.documents.shape[-1])
        return replace(self, layout=balance(mask, seq_len, self.cp_size))

    @typed
    def shard(self, tree: Any, dim: int = 1, *, pad_value: int | None = None) -> Any:
        """Return this rank's rows of every tensor of a pytree.

        Args:
            tree: tensors of the *whole* sequence, equal on every cp rank, at ``length`` or already padded. Keys decide:
                documents, blocks, key_padding and cu_seqlens stay whole; labels and targets are padded with -100;
                tokens, input_ids, positions, position_ids and attention_mask with 0. Labels of a stream that every rank
                holds become padding on all ranks but the first, so that they count once.
            dim: the sequence dim of all tensors that are sharded.
            pad_value: padding of the sharded tensors, in place of `PADDING`. Needed to pad an integer tensor with
                another key, or with none: 0 would be a valid label.

        Returns:
            The same pytree; sharded tensors have ``layout.shard_len`` rows along ``dim``, padding included, in layout
            order. A model that gets them returns its rows in that order too.

        Raises:
            ArgumentError: on a DTensor, or a leaf that is neither a tensor nor a plain value; a length that does not
                fit; padding of an integer tensor with an unknown key without ``pad_value``.
        """
        return tree_map_with_path(lambda path, leaf: self._shard_leaf(path, leaf, dim, pad_value), tree)

    @typed
    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor in original order, without padding, on every rank.

        Differentiable: the gradient of this rank's rows is the *sum* over ranks of their gradients of the whole, as
        the gradient contract requires. If every rank computes the same loss from the whole, use `gather`.

        Args:
            x: this rank's rows, [..., shard_len, ...].
            dim: the sequence dim.
        """
        return self._unshard(x, dim, 1.0)

    @typed
    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Do `unshard` for a loss that every rank computes alike from the whole: gradients are the *mean* over ranks.

        The sum over ranks of parameter gradients is then the gradient of one such loss.

        Args:
            x: this rank's rows, [..., shard_len, ...].
            dim: the sequence dim.
        """
        return self._unshard(x, dim, 1.0 / self.cp_size)

    def _unshard(self, x: Tensor, dim: int, scale: float) -> Tensor:
        what = "unshard" if scale == 1 else "gather"
        seq_len = self.len_of_local(x.shape[dim])
        if not torch.compiler.is_compiling():
            self._check_layout(what, x, seq_len)
        shape = list(x.shape)
        shape[dim] = -1
        self._agree(what, x, f"{shape} of {seq_len} in {self.layout.spec()}")
        whole = _Unshard.apply(x, dim, self, seq_len, scale)
        if scale != 1 and not torch.compiler.is_compiling():  # `gather`: all ranks compute the loss alike
            state_of(self.mesh.get_group(), Cuts).gathered = self.length or whole.shape[dim]
        return whole if self.length is None else whole.narrow(dim, 0, self.length)

    def _check_layout(self, what: str, x: Tensor, seq_len: int) -> None:
        """Refuse rows of another layout: in a root's forward that of its batch, else that of outputs of models."""
        root, group = ROOT.get(), self.mesh.get_group()
        if root is not None and root.differs(self.layout, seq_len, group.group_name):
            hint = "in a root's forward pass the sequence of its batch, sequence.for_batch(length, mask)"
            refuse(f"{what}: layout", f"{root.sequence.layout.spec()}, of the root's batch", self.layout.spec(), hint)
        if root is None or not same(root.sequence.layout, self.layout):
            check_output(what, x, self.layout, group)

    @typed
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the cp ranks, on every rank: for losses that are not sums over tokens.

        Differentiable, as the gradient contract requires: the gradient is the *sum* over ranks of the gradients of the
        result. So a loss that all ranks compute alike from it must be divided by the number of ranks whose local losses
        are summed, as for the load-balancing loss of a router in ``docs/gradients.md``.

        Args:
            x: of one shape on all cp ranks, such as sums over this rank's rows.
        """
        self._agree("all_reduce", x, str(tuple(x.shape)))
        return cast(Tensor, _AllReduce.apply(x, self.mesh.get_group().group_name))

    def _agree(self, what: str, x: Tensor, shape: str) -> None:
        """Compare a first call over the ranks."""
        if not torch.compiler.is_compiling() and not isinstance(x, FakeTensor):
            graded = str(torch.is_grad_enabled() and x.requires_grad)
            kind = {"call": what, "shape": shape, "dtype": str(x.dtype), "requires_grad": graded}
            compare(self.mesh.get_group(), (*kind.values(),), lambda: kind)

    def dropout_seed(
        self, step: int, seed: int = 0, replica: int = 0, device: torch.device | str | None = None
    ) -> Tensor:
        """Return a seed for attention's dropout, equal on all ranks of this cp group without communication.

        It differs by step, and by replica, whose tokens differ. Pass it to the model with the batch, so that
        recomputation uses the same seed, and let each layer add its number: ``seed + layer``.

        Args:
            step: the number of the forward, counted alike on all ranks; a resumed run must continue the count.
            seed: of the run.
            replica: the index of the data-parallel replica, such as ``mesh["dp"].get_local_rank()``: equal on all cp
                and tp ranks that hold the same tokens.
            device: where; None: the CPU.

        Returns:
            int64 [1], for ``dropout_seed`` of `cp_mesh.attention` and of ``ContextParallel(scores=...)``.
        """
        given = {"seed": seed, "replica": replica, "step": step}
        key = repr(tuple(check_int(f"dropout_seed: {name}", x, -(2**63), 2**63) for name, x in given.items())).encode()
        return torch.tensor([int.from_bytes(hashlib.sha256(key).digest()[:7])], device=device or "cpu")

    @typed
    def positions(self, seq_len: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """Return the global positions of this rank's rows, for the rotary embedding: int64 [shard_len].

        Args:
            seq_len: tokens in the whole sequence; None: ``length``.
            device: where; None: the CPU.
        """
        length = self.length if seq_len is None else seq_len
        if length is None:
            refuse("seq_len", "the length of the whole sequence", None, "or set length=")
        if self.length is not None and length not in (self.length, self.seq_len):
            refuse("seq_len", f"{self.length}, this sequence's length", length, "leave it out")
        return self._rows(self._sharded_len(length), device).clone()

    def _rows(self, seq_len: int, device: torch.device | str | None) -> Tensor:
        """Return the positions of this rank's rows, cached for a few lengths: each tensor of a batch needs them."""
        if torch.compiler.is_compiling():
            return self.layout.positions(seq_len, self.cp_size, self.cp_rank).to(device)
        if (rows := self._positions.get((seq_len, device))) is None:
            with lasting():
                rows = self.layout.positions(seq_len, self.cp_size, self.cp_rank).to(device)
            if not isinstance(rows, FakeTensor) and len(self._positions) < MOST_LENGTHS:
                self._positions[seq_len, device] = rows
        return rows

    def mask(self, mask: Mask, layout: Layout | None = None) -> Mask:
        """Return the mask of the padded sequence: tensors padded, and padding keys hidden if a query could see them.

        It has this sequence's layout, if that is the layout of one batch.

        Args:
            mask: of the sequence without padding, or with it.
            layout: decides the padding; None: the sequence's own.
        """
        if layout is None and (self.layout.tensor is not None or self.layout is PLAIN):
            mask = replace(mask, layout=self.layout)
        seq_len = self.seq_len_in(self.layout if layout is None else layout)
        if self.length is None or seq_len == self.length:
            return mask
        padded: dict[str, Any] = {}
        for name in TENSORS:
            if (x := getattr(mask, name)) is None:
                continue
            if x.shape[-1] not in (self.length, seq_len):
                hint = "pass it whole" + "; the last entry of cu_seqlens is its length" * (name == "documents")
                refuse(f"Mask.{name}: length", f"{self.length}, or {seq_len} with padding", x.shape[-1], hint)
            padded[name] = self._pad(x, -1, PADDING[name], seq_len)
        hidden = not mask.causal or mask.prefix > self.length  # a causal query never sees the padding after it
        length = min(self.length, self.length if mask.length is None else mask.length) if hidden else mask.length
        return replace(mask, length=length, **padded)

    def _sharded_len(self, length: int, layout: Layout | None = None) -> int:
        multiple = (self.layout if layout is None else layout).multiple(self.cp_size)
        if length % multiple == 0 or (not self.pad and length == self.length):
            return length
        if self.length is None:
            hint = f"ShardedSequence(..., length={length}) pads it, and with pad=False shards it unequally; "
            hint += "if lengths change, pad batches at their end, labels with -100"
            refuse("sequence length", f"a multiple of {multiple}", length, hint)
        return -(-length // multiple) * multiple

    def len_of_local(self, local_len: int) -> int:
        """Return the length of the whole sequence, with padding, for the number of this rank's rows."""
        seq_len = local_len * self.cp_size if self.length is None else self._sharded_len(self.length)
        if local_len != (expected := self.layout.shard_len(seq_len, self.cp_size, self.cp_rank)):
            refuse("local rows", expected, local_len, "shard with this ShardedSequence, or set its length")
        return seq_len

    def _pad(self, x: Tensor, dim: int, value: int, seq_len: int | None) -> Tensor:
        if x.dtype == torch.uint8 and value == EXCLUDED:  # it has no negative value
            x = x.to(torch.int16)
        if self.length is None or seq_len is None or x.shape[dim] == seq_len:
            return x
        if x.shape[dim] != self.length:
            expected = self.length if self.length == seq_len else f"{self.length}, or {seq_len} with padding"
            hint = "pass the whole sequence, and shard it once; if lengths change, leave length= out, and pad batches"
            refuse(f"length of dim {dim}", expected, x.shape[dim], hint)
        shape = list(x.shape)
        shape[dim] = seq_len - self.length
        return torch.cat([x, x.new_full(shape, value)], dim=dim)

    def _shard_leaf(self, path: tuple, leaf: Any, dim: int, pad_value: int | None) -> Any:
        name = path[-1].key if path and isinstance(path[-1], MappingKey) else None
        what = f"shard({name or ''})"
        if not isinstance(leaf, Tensor):
            if leaf is None or isinstance(leaf, bool | int | float | str):
                return leaf
            refuse(what, "tensors and plain values", type(leaf).__name__, "convert it to tensors")
        if isinstance(leaf, DTensor):
            refuse(what, "local tensors", "a DTensor", "use full_tensor()")
        if not torch.compiler.is_compiling() and is_cut(leaf, self.mesh.get_group()):
            got, hint = "rows that shard has returned", "shard once; pass whole tensors to a ShardedModel"
            refuse(what, "a tensor of the whole sequence", got, hint)
        if name == "cu_seqlens":
            return self._pad_cu_seqlens(leaf)
        if name in WHOLE:
            return self._pad(leaf, -1, PADDING[str(name)], self.seq_len)
        if leaf.ndim <= dim:
            refuse(what, f"a sequence dim {dim}", tuple(leaf.shape), "pass dim=, or expand it")
        seq_len = self._sharded_len(leaf.shape[dim] if self.length is None else self.length)
        padding = PADDING.get(str(name)) if pad_value is None else pad_value
        if padding is None and seq_len != leaf.shape[dim] and not leaf.is_floating_point():
            hint = f"pad_value=-100 for labels, 0 for tokens; or one of the names {', '.join(PADDING)}; or pad=False"
            refuse(what, "a pad_value for an integer tensor", None, hint)
        whole = self._pad(leaf, dim, padding or 0, seq_len)
        rows = whole.index_select(dim, self._rows(seq_len, leaf.device))
        if not torch.compiler.is_compiling() and self.cp_size > 1:
            group, labels = self.mesh.get_group(), padding == IGNORED
            note_cut(str(name), leaf, self.layout, seq_len, group, rows, dim, labels)
        return rows

    def _pad_cu_seqlens(self, cu_seqlens: Tensor) -> Tensor:
        """Add the padding as a document of its own."""
        end = int(cu_seqlens[-1])
        if self.length is None or end == self.seq_len:
            return cu_seqlens
        if end != self.length:
            refuse("cu_seqlens", f"an end at length {self.length}", end, "let the documents cover the sequence")
        return torch.cat([cu_seqlens, cu_seqlens.new_tensor([self.seq_len])])


@dataclass
class Root:
    """A `ShardedModel` whose forward is running.

    Attributes:
        sequence: its sequence, in the layout of the batch.
        seq_len: tokens of the sequence, with padding.
        packed: by the name of a style, whether its mask has documents.
    """

    sequence: ShardedSequence
    seq_len: int
    packed: dict[str, bool] = field(default_factory=dict)

    def differs(self, layout: Layout, seq_len: int, group_name: str) -> bool:
        """Whether a call takes rows of a batch that has its own layout for those of another one."""
        own = self.sequence
        if own.layout.tensor is None or seq_len != self.seq_len or own.mesh.get_group().group_name != group_name:
            return False
        return not same(own.layout, layout)


ROOT: ContextVar[Root | None] = ContextVar("cp_mesh_root", default=None)
"""The innermost root whose forward runs in eager mode; torch.compile cannot trace it."""


class _AllReduce(torch.autograd.Function):
    """Sum over ranks, in forward and backward: the total loss is the sum over ranks, and each uses the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return _sum(x, group_name, "all_reduce: a sum of other ranks")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group_name, "all_reduce: gradients of other ranks"), None


def _sum(x: Tensor, group_name: str, what: str) -> Tensor:
    return wait_for(funcol.all_reduce(x.contiguous(), "sum", group_name), what, group_name)


class _Unshard(torch.autograd.Function):
    """All-gather of shards that may be unequal, and un-permutation; backward sums ``scale`` times the gradients over
    ranks and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sequence: ShardedSequence, seq_len: int, scale: float) -> Tensor:
        layout, size, ctx.group_name = sequence.layout, sequence.cp_size, sequence.mesh.get_group().group_name
        lens = [layout.shard_len(seq_len, size, rank) for rank in range(size)]
        inverse = layout.inverse(seq_len, size).to(x.device)
        ctx.save_for_backward(inverse)
        ctx.dim, ctx.lens, ctx.rank, ctx.scale = dim, lens, sequence.cp_rank, scale
        return gather(x, dim, lens, inverse, ctx.group_name, "unshard")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (inverse,) = ctx.saved_tensors
        own = scatter_sum(grad, ctx.dim, ctx.lens, inverse, ctx.rank, ctx.group_name, "unshard")
        return own if ctx.scale == 1 else own * ctx.scale, None, None, None, None
