"""The oracle of Transformers' models: their own code on one rank, with attention and masks of ours.

Masks are what Transformers makes of the whole batch, pair by pair; that documents do not see one another is added here,
since some models (gpt-oss, BERT) forget it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dense import dense_attention
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "dense"
_documents: list[Tensor | None] = [None]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0 and attention_mask.dtype == torch.bool
    out, _ = dense_attention(query, key, value, attention_mask[:, 0], scaling, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous().to(query.dtype), None


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {name: False for name in kwargs if name.startswith("allow_is_")}
    mask = sdpa_mask(*args, **kwargs)
    if _documents[0] is not None:
        ids = torch.atleast_2d(_documents[0])
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    return mask


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def shifted(model: Any, labels: Tensor) -> Tensor:
    """The label of every row: the next token's of a causal model, its own of BERT."""
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def whole_loss(model: Any, documents: Tensor | None = None, **batch: Any) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and the mean loss of a batch on one rank; gradients are left in the parameters."""
    labels = batch.pop("labels")
    model.config.get_text_config().use_cache = False  # with a cache Transformers looks for no documents
    _documents[0] = documents
    output = model(**batch)
    logits = output.logits
    _documents[0] = None
    loss = F.cross_entropy(logits.flatten(0, 1), shifted(model, labels).flatten(), ignore_index=-100)
    if output.get("aux_loss") is not None:  # of routers
        loss = loss + model.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return logits.detach(), loss.detach()
