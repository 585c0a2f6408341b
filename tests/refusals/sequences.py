"""Sequences, and losses of them."""

from __future__ import annotations

from collections import UserDict

import torch
from torch.distributed.tensor import Shard

import cp_mesh
from cp_mesh import Mask, ShardedSequence
from refusals.calls import ARGUMENT, ROWS, B, Cases, S, cp, cp_of_two_axes, cp_tp, place, random, sequence

CASES: Cases = {
    "sequence over two axes": (ARGUMENT, 'ShardedSequence.mesh|1-D DeviceMesh|mesh["cp"]',
        lambda: ShardedSequence(cp_tp())),
    "sequence of another degree than its mesh": (ARGUMENT, "ShardedSequence.ulysses_degree|"
        "2, as the mesh's second axis has, got 4|leave it out",
        lambda: ShardedSequence(cp_of_two_axes(), ulysses_degree=4)),
    "sequence without mesh": (ARGUMENT, "ShardedSequence.mesh|1-D DeviceMesh|None", lambda: ShardedSequence(None)),
    "empty sequence": (ARGUMENT, "ShardedSequence.length|an int of 1 to|got 0", lambda: sequence(length=0)),
    "length that does not divide": (ARGUMENT, "sequence length|multiple of 8|got 21|length=21) pads",
        lambda: sequence().shard({"tokens": torch.zeros(B, 21)})),
    "length other than the sequence's": (ARGUMENT, "length|21, or 24 with padding|got 20",
        lambda: sequence(length=21).shard({"tokens": torch.zeros(B, 20)})),
    "unequal length other than the sequence's": (ARGUMENT, "length|21|got 24",
        lambda: sequence(length=21, pad=False).shard({"tokens": torch.zeros(B, 24)})),
    "cu_seqlens other than the sequence's": (ARGUMENT, "cu_seqlens|21|20",
        lambda: sequence(length=21).shard({"cu_seqlens": torch.tensor([0, 5, 20])})),
    "documents other than the sequence's": (ARGUMENT, "length|21, or 24 with padding|got 20",
        lambda: sequence(length=21).mask(Mask(documents=torch.zeros(B, 20, dtype=torch.int64)))),
    "shard of a DTensor": (ARGUMENT, "shard(tokens)|local tensors|DTensor|full_tensor()",
        lambda: sequence().shard({"tokens": place((B, S), cp(), Shard(1))})),
    "a leaf that is no tensor": (ARGUMENT, "shard(tokens)|ndarray",
        lambda: sequence().shard({"tokens": torch.zeros(B, S).numpy()})),
    "a container that hides tensors": (ARGUMENT, "UserDict",
        lambda: sequence().shard(UserDict(tokens=torch.zeros(B, S)))),
    "leaf without a sequence": (ARGUMENT, "shard(scale)|a sequence dim 1|(24,)|pass dim=",
        lambda: sequence().shard({"scale": torch.zeros(S)})),
    "unshard of other rows": (ARGUMENT, "local rows|expected 6|got 5|shard with this ShardedSequence",
        lambda: sequence(length=21).unshard(random(B, 5))),
    "positions of no length": (ARGUMENT, "seq_len|length of the whole sequence|length=",
        lambda: sequence().positions()),
    "labels of other logits": (ARGUMENT, "labels|shape (2, 6)|got (2, 24)|shard both",
        lambda: cp_mesh.cross_entropy(random(B, ROWS, 7), torch.zeros(B, S, dtype=torch.int64), cp())),
}  # fmt: skip
