"""Losses of a parallel model as shares of this rank: label loss, routers' loss, and the log-probabilities of TRL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh._torch import times_written
from cp_mesh.comm.groups import ranks_of
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.integrations.transformers.masks import Batch
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.sequence.losses import note_loss
from cp_mesh.training.loss import cross_entropy

_ROUTER = "model.config.get_text_config().output_router_logits"


class ModelLosses:
    """The losses of a model, whose loss_function becomes `of_labels`. Copies of the model share this object.

    Attributes:
        data: the ranks over which the loss is a mean.
        shares: the divisor of the routers' loss: the number of ranks whose losses are summed.
        like_mixtral: whether the routers' loss is `balancing_loss`; None before the check.
        own_counts: whether the Trainer's num_items_in_batch is of this cp group, not of all ranks; None: no Trainer.
        compared: whether the sum of both losses was compared with the model's loss.
        gathered: whether TRL's log-probabilities are those of the whole batch; gradients of cp ranks are then summed.
    """

    def __init__(self, data: DeviceMesh | dist.ProcessGroup) -> None:
        self.data, self.shares, self.compared, self.gathered = data, len(ranks_of(data)), False, False
        self.like_mixtral: bool | None = None
        self.own_counts: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelLosses:
        return self

    def of_labels(
        self, logits: Tensor, labels: Tensor, vocab_size: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """Replace the model's loss_function: return this rank's share for labels that are already shifted."""
        if (batch := Batch.now()) is None:
            hint = "see cp_mesh.cross_entropy"
            refuse("loss_function", "a call in the forward of a parallel model", "one outside", hint)
        if self.own_counts is not None and num_items_in_batch is None:
            what = "a forward that passes the Trainer's num_items_in_batch on"
            refuse("loss_function", what, "none", "pass its **kwargs to loss_function", UnsupportedError)
        share = cross_entropy(logits, labels, self.data, count=1 if self.own_counts else num_items_in_batch)
        share = share / num_items_in_batch if self.own_counts else share
        with torch.inference_mode(False):  # inference tensors have no version counter
            batch.loss = share.clone() if share.is_inference() else share
        batch.version = times_written(batch.loss)
        return batch.loss if batch.kept is None else batch.loss.clone()  # the model adds its routers' loss in place

    def check_router(self, module: Any) -> None:
        """Refuse a model whose routers' loss differs from `balancing_loss` on an example."""
        if self.like_mixtral is None:
            files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)  # FSDP2 changes the class
            found = (getattr(file, "load_balancing_loss_func", None) for file in files)
            function = next(filter(None, found), lambda *_: torch.nan)
            logits = tuple(torch.linspace(-1, 2, 24, device="cpu").view(6, 4).roll(i, 1).sin() for i in range(2))
            kept = torch.tensor([[1, 1, 0], [1, 1, 1]], device="cpu")
            try:
                theirs = float(function(logits, 4, 2, kept))
            except Exception:  # a function with other arguments
                theirs = torch.nan
            self.like_mixtral = abs(float(balancing_loss(logits, 2, kept)) - theirs) < 1e-6
        missing = [name for name in ("num_experts_per_tok", "router_aux_loss_coef") if not hasattr(module, name)]
        if not self.like_mixtral or missing:
            what = "the load-balancing loss of Mixtral, a product of means over all rows"
            got = f"a model without {' and '.join(missing)}" if self.like_mixtral else "another loss of routers"
            refuse(type(module).__name__, what, got, f"{_ROUTER} = False", UnsupportedError)

    def of_routers(self, module: Any, batch: Batch, kept: Tensor, output: Any) -> None:
        """Replace the routers' loss of this rank's rows in ``output`` by this rank's share of the loss of all rows.

        The first call checks that the model's loss has no other terms. The result of the check is reduced in the same
        all-reduce as the loss, so that all ranks raise or none.
        """
        wrong = torch.zeros((), device="cpu")
        if compared := batch.loss is not None and not self.compared:
            known = batch.loss + module.router_aux_loss_coef * output["aux_loss"]
            wrong = ~torch.isclose(output["loss"], known, rtol=1e-4, equal_nan=True)

        def total(sums: Tensor) -> Tensor:
            nonlocal wrong
            sums, wrong = batch.sequence.all_reduce(torch.cat([sums, wrong.to(sums)[None]])).split([len(sums), 1])
            return sums

        router_logits = batch.router_logits or output["router_logits"]
        loss = balancing_loss(router_logits, module.num_experts_per_tok, kept, total)
        if compared and bool(wrong):
            hint = "pass no labels and take cp_mesh.cross_entropy of the logits"
            refuse(type(module).__name__, "the losses of labels and of routers", "one with other terms", hint)
        self.compared |= compared
        share = loss / self.shares
        if batch.loss is not None:
            output["loss"] = batch.loss = batch.loss + module.router_aux_loss_coef * share
        output["aux_loss"] = share

    def check(self, module: Any, batch: Batch, loss: Any) -> None:
        """Refuse a model loss other than the label loss; with a routers' loss, `of_routers` has compared it."""
        changed = batch.kept is None and batch.loss is not None and times_written(batch.loss) != batch.version
        if loss is not batch.loss or changed:
            hint = f"pass no labels and take cp_mesh.cross_entropy of the logits; or switch the term off, as {_ROUTER}"
            what = "the loss of the labels alone"
            refuse(type(module).__name__, what, "one with other terms", hint, UnsupportedError)

    def log_probabilities(
        self, forward: Callable[..., Any], module: Any, batch: Batch, /, *, labels: Tensor, **arguments: Any
    ) -> Any:
        """Run the forward that TRL gives to models, on labels that are already shifted.

        The returned loss, a mean over this rank's rows, is dropped: TRL's trainers sum the log-probabilities and divide
        by the tokens of all ranks. The routers' loss covers this rank's rows only, so the router logits are kept.
        """

        def keep(_: Any, args: Any, found: Any) -> None:
            batch.router_logits = found.get("router_logits") or ()

        hook = module.base_model.register_forward_hook(keep)
        try:
            output = forward(shift_labels=labels, fused_lm_head=True, **arguments)
        finally:
            hook.remove()
        note_loss(output.log_probs, self.data, output.log_probs.new_ones(()))
        found = {name: x for name, x in output.items() if name != "loss"}
        if self.gathered:  # without that of the last token, which has no next one
            found |= {name: batch.sequence.unshard(x)[:, :-1] for name, x in found.items() if x.ndim > 0}
        return type(output)(**found)


def balancing_loss(
    router_logits: tuple[Tensor, ...], top_k: int, kept: Tensor, total: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """Return the load-balancing loss of routers (arXiv:2101.03961, equations 4 to 6), over the rows of all layers.

    Args:
        router_logits: logits of each layer, [..., E], with as many rows as ``kept``.
        top_k: experts per token.
        kept: 1 for rows that count, else 0.
        total: a function that sums over ranks.
    """
    dtype = accumulation_dtype(router_logits[0].dtype)
    kept, sums = kept.reshape(-1, 1).to(dtype), torch.zeros((), dtype=dtype, device=kept.device)
    for logits in router_logits:
        weights = logits.flatten(0, -2).softmax(-1)
        hits = torch.zeros_like(weights).scatter(1, weights.topk(top_k).indices, 1)
        sums = sums + torch.cat([(x.to(dtype) * kept).sum(0) for x in (hits, weights, torch.ones_like(kept))])
    sums = total(sums)
    fractions, means = (sums[:-1] / sums[-1]).chunk(2)
    return len(fractions) * (fractions * means).sum()
