"""Masks and layouts."""

from __future__ import annotations

import torch

from cp_mesh import Mask
from cp_mesh.geometry import Permuted
from refusals.calls import ARGUMENT, ROWS, UNSUPPORTED, B, Cases, S, attend, sequence

CASES: Cases = {
    "a word for causal": (ARGUMENT, "Mask|True or False for causal|'x'", lambda: attend(mask=Mask(causal="x"))),
    "an index of fractions": (ARGUMENT, "Permuted|integers|torch.float32|torch.argsort",
        lambda: attend(layout=Permuted([0.5, 1.5]))),
    "documents of a shard": (ARGUMENT, "Mask.documents|[2, 24]|(2, 6)|never sharded",
        lambda: attend(mask=Mask(documents=torch.zeros(B, ROWS, dtype=torch.int64)))),
    "documents of another batch": (ARGUMENT, "Mask.documents|[2, 24]|(3, 24)|every cp rank",
        lambda: attend(mask=Mask(documents=torch.zeros(3, S, dtype=torch.int64)))),
    "key padding of a shard": (ARGUMENT, "Mask.key_padding|[2, 24]|(6,)|original order",
        lambda: attend(mask=Mask(key_padding=torch.ones(ROWS, dtype=torch.bool)))),
    "blocks of a shard": (ARGUMENT, "Mask.blocks|[2, 24]|(2, 6)|never sharded",
        lambda: attend(mask=Mask(blocks=torch.zeros(B, ROWS, dtype=torch.int64)))),
    "a block that comes back": (UNSUPPORTED, "Mask.blocks|block 0 comes back|its own id",
        lambda: attend(mask=Mask(blocks=torch.arange(S) // 5 % 2))),
    "blocks and a causal window": (ARGUMENT, "window=(5, 0)|window=(5, None)",
        lambda: attend(mask=Mask(window=(5, 0), blocks=torch.zeros(S, dtype=torch.int64)))),
    "float documents": (ARGUMENT, "integer documents|torch.float32 (2, 24)|from_cu_seqlens",
        lambda: attend(mask=Mask(documents=torch.zeros(B, S)))),
    "additive key padding": (ARGUMENT, "bool key_padding|torch.float32|`mask == 0`",
        lambda: attend(mask=Mask(key_padding=torch.zeros(B, S)))),
    "negative window": (ARGUMENT, "window bounds >= 0|(-1, 0)|None for an unlimited side",
        lambda: attend(mask=Mask(window=(-1, 0)))),
    "window of one number": (ARGUMENT, "window=(left, right)|got 4", lambda: attend(mask=Mask(window=4))),
    "a fraction for a prefix": (ARGUMENT, "prefix|2.5", lambda: attend(mask=Mask(prefix=2.5))),
    "prefix without causal": (ARGUMENT, "prefix relaxes causal|leave prefix at 0",
        lambda: attend(mask=Mask(causal=False, prefix=3))),
    "negative prefix": (ARGUMENT, "prefix >= 0|got -1", lambda: attend(mask=Mask(prefix=-1))),
    "cu_seqlens from 1": (ARGUMENT, "from_cu_seqlens|starting at 0",
        lambda: attend(mask=Mask.from_cu_seqlens(torch.tensor([1, S])))),
    "cu_seqlens of another length": (ARGUMENT, "Mask.documents|[2, 24]|(23,)|cu_seqlens end at 24",
        lambda: attend(mask=Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))),
    "cu_seqlens of another length in a layout": (ARGUMENT, "mask.documents|24 tokens|"
        "got 23|the last entry of cu_seqlens",
        lambda: sequence(length=24).balanced(Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))),
    "cu_seqlens of another length than a padded sequence": (ARGUMENT, "Mask.documents|21, or 24 with padding|"
        "got 23|the last entry of cu_seqlens",
        lambda: sequence(length=21).mask(Mask.from_cu_seqlens(torch.tensor([0, 5, S - 1])))),
    "a tensor for a mask": (ARGUMENT, "mask|Mask|Tensor|batch_mask reads|bias= of 0 and -inf",
        lambda: attend(mask=torch.ones(S, S, dtype=torch.bool))),
    "a name for a layout": (ARGUMENT, "layout|zigzag", lambda: attend(layout="zigzag")),
    "index of another length": (ARGUMENT, "Permuted|seq_len 20|got 24|(padded) length",
        lambda: attend(layout=Permuted(range(20)))),
    "index with repeats": (ARGUMENT, "Permuted|permutation of range(seq_len)|torch.argsort",
        lambda: attend(layout=Permuted([0, 0, *range(2, S)]))),
}  # fmt: skip
