"""The reference in less memory: one block, some rows of attention and some rows of logits at a time.

Blocks are what ModuleLists and ModuleDicts hold. Each is checkpointed, and its weights and gradients lie in host memory
while it does not run. Inside of blocks, float64 attention that PyTorch's function computes takes some queries at a
time: GPUs have no kernel for it that would not store all scores. The model's last linear layer, which makes the logits,
is run on some rows at a time, forward, loss and backward, so that there never are logits of the whole sequence.

What is computed is the same, in the same dtype; sums over rows are taken in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from cp_mesh._torch import checkpointing
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.tools.verify import traces
from cp_mesh.tools.verify.models import logits_of
from cp_mesh.tools.verify.step import IGNORED, Step, mean_loss
from cp_mesh.tools.verify.traces import Rows, Trace, products

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def keep_on_host(model: nn.Module, device: torch.device) -> None:
    """Have the blocks of a model in host memory, and on the device, one by one, where they run; all else is there."""
    blocks = list(blocks_of(model))
    inside = {module for parent, name in blocks for module in getattr(parent, name).modules()}
    model.to("cpu")
    for module in set(model.modules()) - inside:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for parent, name in blocks:
        run = functools.partial(_run_block, device)
        setattr(parent, name, checkpointing().checkpoint_wrapper(getattr(parent, name), checkpoint_fn=run))


def blocks_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The containers of blocks, and the blocks' names in them."""
    for name, child in module.named_children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield module, name
        else:
            yield from blocks_of(child)


def _run_block(device: torch.device, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [*block.named_parameters(), *block.named_buffers()]
        with _AttentionInRows():
            return functional_call(block, {name: tensor.to(device) for name, tensor in tensors}, args, kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


class _AttentionInRows(TorchFunctionMode):
    """PyTorch's attention in float64, in chunks of queries."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _attention_in_rows if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _attention_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    length, seen = query.shape[-2], key.shape[-2]
    rows = max(1, traces.PART // max(1, query.shape[:-2].numel() * seen))
    if rows >= length or query.dtype != torch.float64 or (is_causal and attn_mask is not None):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
    parts = []
    for first in range(0, length, rows):
        part, mask, keys = query[..., first : first + rows, :], attn_mask, slice(None)
        if is_causal:
            keys = slice(min(first + rows, seen))
            mask = torch.ones(part.shape[-2], len(range(seen)[keys]), dtype=torch.bool, device=query.device).tril(first)
        elif mask is not None and mask.shape[-2] > 1:
            mask = mask[..., first : first + rows, :]
        parts.append(
            checkpoint(
                F.scaled_dot_product_attention,
                part,
                key[..., keys, :],
                value[..., keys, :],
                mask,
                dropout_p,
                use_reentrant=False,
                **others,
            )
        )
    return torch.cat(parts, -2)


def run_in_chunks(
    step: Step, call: Callable[[nn.Module, dict[str, Any]], Any], weight: Tensor
) -> tuple[Trace, Rows, Tensor]:
    """Forward and backward of ``weight`` times the mean loss, with the last linear layer on some rows at a time.

    Returns:
        What went through the modules, the rows of the logits, and the loss.
    """
    labels = step.batch[step.labels]
    name, head = last_linear(step.model)
    rows = max(1, traces.PART // (len(labels) * head.out_features))
    trace = Trace(step.seq_len, step.positions)
    x, first = _run_to_head(step, call, name, head, rows, trace)

    valid = (labels != IGNORED).sum().clamp(min=1)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    outputs, gradients, of_x = [], [], []
    weights = [parameter for parameter in head.parameters() if parameter.requires_grad]
    of_weights = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in weights]
    for mine, theirs in zip(x.detach().split(rows, 1), labels.split(rows, 1), strict=True):
        mine.requires_grad_()
        logits = head(mine)
        share = mean_loss(logits, theirs).nan_to_num() * (theirs != IGNORED).sum() / valid * weight
        of_logits, of_mine, *others = torch.autograd.grad(share, (logits, mine, *weights))
        outputs.append(products(logits.detach(), 1))
        gradients.append(products(of_logits, 1))
        of_x.append(of_mine)
        for total, part in zip(of_weights, others, strict=True):
            total += part
        loss += share.detach()
    for parameter, total in zip(weights, of_weights, strict=True):
        parameter.grad = total.to(parameter.dtype)
    x.backward(torch.cat(of_x, 1))

    shape, whole = (*labels.shape, head.out_features), torch.arange(step.seq_len, device=x.device)
    kept, of_kept = (Rows(shape, {1: torch.cat(parts)}, whole) for parts in (outputs, gradients))
    around = ["", *accumulate(name.split("."), "{}.{}".format)]  # the model, and modules down to the last linear layer
    outputs_of = [p for p in trace.forward if p.what.startswith("output") and p.module in around]
    places = [p for p in outputs_of if trace.forward[p].shape == first.shape]
    trace.forward |= dict.fromkeys(places, kept)
    trace.backward = dict.fromkeys(places, of_kept) | trace.backward
    return trace, kept, loss


def _run_to_head(
    step: Step,
    call: Callable[[nn.Module, dict[str, Any]], Any],
    name: str,
    head: nn.Linear,
    rows: int,
    trace: Trace,
) -> tuple[Tensor, Tensor]:
    """One forward in which ``head`` takes the first rows alone: what it was given [B, S, C], and these rows' logits."""
    compute, calls = head.forward, []

    @functools.wraps(compute)
    def run_on_first_rows(x: Tensor) -> Tensor:
        with torch.no_grad():
            calls.append((x, compute(x[:, :rows])))
        return calls[-1][1]

    head.__dict__["forward"] = run_on_first_rows
    try:
        with trace.of(step.model):
            logits = logits_of(call(step.model, dict(step.batch))).nan_to_num()
    finally:
        del head.__dict__["forward"]
    if len(calls) == 1 and calls[0][0].shape[:2] == step.batch[step.labels].shape:
        x, first = calls[0]
        if torch.equal(logits, first.nan_to_num().to(logits.dtype)):
            return x, first
    expected = f"logits that {name!r}, the last nn.Linear, returns as they are"
    hint = "reference=True for whole logits, reference=False for probes alone"
    refuse("verify_model: reference in chunks", expected, "others", hint, UnsupportedError)


def last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    """The linear layer that the model has last, and its name."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        what, expected = "verify_model: reference in chunks", "a model whose logits an nn.Linear makes"
        refuse(what, expected, "none", "reference=True", UnsupportedError)
    return found[-1]
