"""The loss: each rank's share of the mean over all tokens.

Gradient contract. A rank's loss is the *sum* over its own tokens divided by the *global* number of valid tokens. So
the sum of losses over the ranks is the loss of a single device, and the sum of parameter gradients over the ranks
(dp x cp) is its gradient. Reductions are therefore plain sums; `cp_mesh.sum_gradients` sets FSDP2 to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_mesh._torch import FakeTensor, funcol
from cp_mesh.comm.agreement import capturing, is_first_here, refusing
from cp_mesh.comm.group_state import state_of
from cp_mesh.comm.groups import groups_of, ranks_of
from cp_mesh.comm.store_messages import read_error, send_error
from cp_mesh.comm.waiting import wait_for
from cp_mesh.errors import ArgumentError, RankMismatchError, UnsupportedError, refuse, typed
from cp_mesh.sequence.cuts import apart, check_loss, is_whole, waits_for_labels
from cp_mesh.sequence.losses import note_loss
from cp_mesh.tensor_parallel.vocab_parallel import DeferredLogits
from cp_mesh.training.checks.labels import check_labels
from cp_mesh.training.token_losses import Teacher, check_ids, prepare_losses


@dataclass
class _SumFacts:
    """What a rank knows beside the valid tokens of a sum over a group.

    Attributes:
        error: of this rank's labels, for the next sum.
        numbers: of the last sum, on the host: ranks with wrong labels; 0 if batches, and counts, are equal.
        ranks: of that sum.
        ready: when a GPU has copied them.
    """

    error: Exception | None = None
    numbers: Tensor | None = None
    ranks: Sequence[int] = ()
    ready: torch.cuda.Event | None = None


@typed
def cross_entropy(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    ignore_index: int = -100,
    count: int | Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1,  # integers: Dynamo would make symbols of floats here, and trace twice
    label_smoothing: float = 0,
    z_loss: float = 0,
    teacher: Teacher | None = None,
) -> Tensor:
    """Return this rank's share of the mean loss: sum over its valid tokens / number of valid tokens over ``mesh``.

    The SUM over the ranks of ``mesh`` is the mean over all tokens, however many tokens each rank holds, even none. The
    SUM of gradients is the gradient of that mean. Log the sum, not one rank's share. The backward keeps the logits and
    allocates their gradient; nothing else of their size is allocated. With ``weight`` whole logits never are in memory.

    Args:
        logits: [..., V], float64, float32, bfloat16 or float16; computed in float32 at least. Or the output of a linear
            under `VocabParallelHead`, or with ``weight`` hidden states [..., C], whose logits are computed here in
            chunks.
        labels: int64 [...], shifted before sharding. If ``ignore_index`` is not -100, also pass it as ``pad_value`` to
            `ShardedSequence.shard`.
        mesh: the ranks that hold distinct tokens, e.g. the flattened dp x cp; any number of axes, or a ProcessGroup.
        ignore_index: the label of tokens without a loss.
        count: the divisor of the sum, equal on all ranks, such as the valid tokens of several micro-batches; 0, if no
            token is valid, divides by 1. None: the valid tokens of this call over ``mesh``.
        weight, bias, temperature: of the last linear, as in `token_log_probs`. `VocabParallelHead` has its own weight
            and bias.
        label_smoothing: the share of the target that is 1 / V for each token, from 0 to 1, as in `F.cross_entropy`.
            ``temperature``, this and the next are equal on all ranks.
        z_loss: each valid token adds ``z_loss * logsumexp(logits / temperature)**2``, 1e-4 in PaLM (arXiv:2204.02311,
            section 5).
        teacher: a model whose probabilities are the targets (arXiv:1503.02531). Pass its logits [..., V], without a
            gradient, which are those of `VocabParallelHead` if the student's are; with ``weight`` a tuple of its hidden
            states [..., C'], weight [V, C'] and perhaps bias [V]. They are divided by ``temperature``, too. Of labels
            only which are valid is read then, but pass the usual ones, which a first call checks. The gradient is that
            of KL(teacher || student), without temperature**2.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 if no token of the mesh is valid.

    Raises:
        ArgumentError: on DTensors, wrong shapes, numbers out of range, a weight that FSDP2 has freed, a teacher with
            gradients, or a mesh that contains ranks that share one vocabulary; without ``count`` on every rank of
            ``mesh``, by GPUs in the next call. In the first call also if a label is outside of the vocabulary or
            labels belong to other rows than this rank's: sharded in another layout than attention, or shifted after
            sharding.
        IndexError: in later calls on the CPU, for a label outside of the vocabulary; on CUDA a device assertion.
        UnsupportedError: in a second derivative, and under transforms of torch.func.

    Example:
        >>> share = cross_entropy(hidden, labels, data, weight=head.weight, z_loss=1e-4)  # doctest: +SKIP
    """
    over_tp = logits.head.group_name if isinstance(logits, DeferredLogits) else None  # no group of the mesh
    with refusing(over_tp, (ArgumentError, UnsupportedError)):
        terms = temperature, label_smoothing, z_loss, teacher
        return _cross_entropy(logits, labels, mesh, ignore_index, count, weight, bias, *terms)


def _cross_entropy(
    logits: Tensor | DeferredLogits,
    labels: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    ignore_index: int,
    count: int | Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *options: Any,
) -> Tensor:
    try:
        if not torch.compiler.is_compiling():
            _check_count(count)
            check_loss(logits, labels)
        losses = prepare_losses("cross_entropy", logits, labels, ignore_index, weight, bias, *options)
    except (ArgumentError, UnsupportedError) as error:
        if not torch.compiler.is_compiling():
            first = all([is_first_here(group, "cross_entropy") for group in groups_of(mesh)])
            if first or count is None:  # the others wait in a sum
                _tell_of(error, mesh, logits, labels)
        raise
    vocab = logits.shape[-1] if weight is None else len(weight)
    trained = logits.requires_grad or (weight is not None and weight.requires_grad)
    trained = torch.is_grad_enabled() and (trained or (bias is not None and bias.requires_grad))
    groups = groups_of(mesh)
    if not isinstance(logits, Tensor):
        logits.check_groups([group.group_name for group in groups])
    valid = (labels != ignore_index).sum()
    # without the number of rows, which may differ between ranks; requires_grad since an evaluation may come first
    kind = "cross_entropy", len(logits.shape), vocab, ignore_index, trained
    eager = not torch.compiler.is_compiling()
    first = eager and any([is_first_here(group, *kind) for group in groups])  # a list: every group notes it
    if first or (eager and trained and not capturing() and waits_for_labels({*ranks_of(mesh)})):
        found: Exception | None = None
        try:
            found = check_labels(labels, vocab, ignore_index, {*ranks_of(mesh)}, count is not None, trained)
        except Exception as error:  # raised with the other ranks, which wait in the all-reduce
            found = error
        if found is not None:
            state_of(groups[0], _SumFacts).error = found
    if count is None or first:
        valid = _sum_over(mesh, valid, "cross_entropy", first, count if first else None)
        if first and count is not None:  # equal on all ranks now, so that all refuse it or none
            _check_count(float(count), int(valid))
    share = losses().sum()
    divisor = valid if count is None else count
    share = share / (torch.where(divisor == 0, 1, divisor) if isinstance(divisor, Tensor) else divisor or 1)
    if eager:
        note_loss(share, None if is_whole(labels) else mesh, counted=count is not None)
    return share


def _check_count(count: Any, valid: int = 0) -> None:
    """Refuse a divisor that is no number from 0 on, and 0 with valid tokens. Only first losses read a tensor."""
    is_tensor = isinstance(count, Tensor)
    good = (
        count.numel() == 1
        if is_tensor
        else isinstance(count, Real) and 0 <= float(count) < inf and bool(count or not valid)
    )
    if count is not None and not good:
        got = f"a tensor of shape {tuple(count.shape)}" if is_tensor else repr(count)
        hint = "pass valid_tokens of all micro-batches over the mesh, or leave it out"
        refuse("cross_entropy: count", f"a number above 0, the divisor of {valid or 'all'} tokens", got, hint)


def _tell_of(error: Exception, mesh: DeviceMesh | dist.ProcessGroup, *given: Any) -> None:
    """Raise the refusal of this rank with the ranks that wait in its sum of valid tokens, and send it to them."""
    groups = groups_of(mesh)
    device = torch.device("cuda" if dist.get_backend(groups[0]) == "nccl" else "cpu")
    device = next((x.device for x in given if isinstance(x, Tensor)), device)
    # all ranks have DTensors, or none
    if not (capturing() or device.type == "meta" or any(isinstance(x, DTensor) for x in given)):
        state_of(groups[0], _SumFacts).error = error
        _sum_over(mesh, torch.zeros((), dtype=torch.int64, device=device), "cross_entropy", True)


@typed
def valid_tokens(labels: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, ignore_index: int = -100) -> Tensor:
    """Count the valid labels over all ranks of ``mesh``, for the ``count`` argument of `cross_entropy`.

    Use it if one mean is computed in parts: over micro-batches of a step, or over chunks of a sequence whose logits do
    not fit together. For several label tensors, add their counts.

    Args:
        labels: int64 of any shape, the labels of this rank's rows; shapes may differ between ranks.
        mesh: the ranks that hold distinct tokens, as in `cross_entropy`.
        ignore_index: the label of tokens without a loss.

    Returns:
        An int64 scalar on the labels' device, equal on all ranks.

    Raises:
        ArgumentError: on labels that are no local int64 tensor; on the other ranks too, in this or the next sum.

    Example:
        >>> count = sum(valid_tokens(labels, data) for _, labels in micro_batches)  # doctest: +SKIP
        >>> for tokens, labels in micro_batches:  # doctest: +SKIP
        ...     cross_entropy(model(tokens), labels, data, count=count).backward()
    """
    try:
        check_ids("valid_tokens: labels", labels)
    except ArgumentError as error:
        if not torch.compiler.is_compiling():
            _tell_of(error, mesh, labels)
        raise
    return _sum_over(mesh, (labels != ignore_index).sum(), "valid_tokens")


def _sum_over(
    mesh: DeviceMesh | dist.ProcessGroup, valid: Tensor, function: str, now: bool = False, count: Any = None
) -> Tensor:
    """Sum valid tokens over all ranks; the all-reduces also find wrong labels, and batches and counts that differ.

    The host reads what they found when it does not wait for the device: ``now``, on the CPU, or in the next sum.
    """
    groups = groups_of(mesh)
    eager = not (torch.compiler.is_compiling() or isinstance(valid, FakeTensor) or valid.is_meta or capturing())
    if eager:
        own, ranks = state_of(groups[0], _SumFacts), ranks_of(mesh)
        _judge(own)
        if own.error is not None:
            send_error(f"{type(own.error).__name__}: {own.error}".removeprefix("ArgumentError: "), ranks)
        wrong, counts = torch.full_like(valid, own.error is not None), torch.zeros_like(valid)
        if count is not None:  # its bits, times a factor of the rank; the sum of factors is 0, as in `apart`
            bits = torch.as_tensor(count, dtype=torch.float64, device=valid.device).reshape(()).view(torch.int64)
            counts = bits * (ranks.index(dist.get_rank()) or -len(ranks) * (len(ranks) - 1) // 2)
        valid = torch.stack([valid, wrong, apart({*ranks}, valid.device), counts])
    for group in groups:
        summed = funcol.all_reduce(valid, "sum", group.group_name)
        valid = wait_for(summed, f"{function}: the number of valid tokens", group.group_name)
    if eager:
        valid, own.numbers, own.ranks = valid[0], valid[1:].to("cpu", non_blocking=True), ranks
        if valid.is_cuda:
            own.ready = torch.cuda.current_stream(valid.device).record_event()
        if now or not valid.is_cuda:
            _judge(own)
    return valid


def _judge(own: _SumFacts) -> None:
    """Raise on every rank what the last sum found."""
    if own.numbers is None:
        return
    if own.ready is not None:
        own.ready.synchronize()
    (wrong, differ, counts), error = own.numbers.tolist(), own.error
    own.numbers = own.ready = None
    if wrong:
        own.error = None
        raise error or ArgumentError(f"on {wrong} other ranks of the mesh: {read_error(own.ranks)}")
    if counts:
        hint = "valid_tokens gives it over all ranks of the mesh"
        refuse("cross_entropy: count", "the same on all ranks", "others on some", hint, RankMismatchError)
    if differ:
        what, got = "the same tokens and documents on all ranks of a cp group", "others on some since the last loss"
        hint = "seed data by dp rank, not by rank; check_mode() names the ranks that differ, in every call"
        refuse("batch", what, got, hint, RankMismatchError)
