"""Train a small hybrid of the shape of Qwen3.5 on packed text: three gated delta layers, then one of attention.

    torchrun --nproc-per-node 4 examples/train_hybrid.py    # on GPUs if there are four, else on CPUs

The first rank then repeats the run alone, on whole batches, and prints how far the losses differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from data import VOCAB_SIZE, Corpus, read_text, tokenize
from torch import Tensor, nn
from torch.distributed import ProcessGroup, barrier, destroy_process_group, get_rank, new_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from cp_mesh import ContextParallel, Mask, ShardedModel, ShardedSequence, cross_entropy, mixers, parallelize

DIM, HEADS, HEAD_DIM, CONV = 64, 4, 16, 4
LIMIT = 1e-4  # rounding differs by 1e-7 between orders of summation, and training lets differences grow


class GatedDelta(nn.Module):
    """A short convolution, the gated delta rule, and a gated norm; ``sequence`` says which rows are here."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self.sequence = sequence
        self.qkv, self.gate = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.decay, self.beta = nn.Linear(DIM, HEADS), nn.Linear(DIM, HEADS)
        self.conv = nn.Parameter(torch.randn(3 * DIM, CONV) / CONV)
        self.norm, self.out = nn.RMSNorm(HEAD_DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        options = {"sequence": self.sequence, "mask": mask}
        mixed = mixers.causal_conv1d(self.qkv(x), self.conv, activation="silu", **options)
        q, k, v = mixed.unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        g, beta = -F.softplus(self.decay(x)), self.beta(x).sigmoid()
        out, _ = mixers.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **options)
        return self.out(self.norm(out).flatten(2) * F.silu(self.gate(x)))


class Attention(nn.Module):
    """Without positions: the recurrent layers below tell them."""

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.norms = mixer, nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = x + self.mixer(self.norms[0](x), mask)
        return x + self.mlp(self.norms[1](x))


class Hybrid(nn.Module):
    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        kinds = [GatedDelta, GatedDelta, GatedDelta, Attention]
        self.embedding, self.norm = nn.Embedding(VOCAB_SIZE, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Block(kind(sequence)) for kind in kinds)
        self.head = nn.Linear(DIM, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def train(mesh: DeviceMesh | ProcessGroup, corpus: Corpus, steps: int, device: str) -> list[float]:
    """The loss of each step, of all tokens."""
    torch.manual_seed(0)  # the same weights on every rank
    sequence = ShardedSequence(mesh, "auto", length=corpus.seq_len)
    model = Hybrid(sequence).to(device)
    plan = {"": ShardedModel(sequence, inputs=("tokens",), positions=None)}
    plan["layers.3.mixer"] = ContextParallel(sequence, mask=lambda x, mask: mask)
    parallelize(model, sequence.mesh, plan)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps):
        batch = corpus.batch(step)
        mask = Mask(documents=batch["documents"])
        labels = sequence.for_batch(corpus.seq_len, mask).shard({"labels": batch["labels"].to(device)})["labels"]
        logits = model(batch["tokens"].to(device), mask)
        loss = cross_entropy(logits, labels, sequence.mesh)  # this rank's part
        loss.backward()
        total = loss.detach().clone()
        for x in [total, *(parameter.grad for parameter in model.parameters())]:
            torch.distributed.all_reduce(x, group=sequence.mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=256)
    given = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", 1))
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("cp",))
    corpus = Corpus(tokenize(read_text(None)), given.seq_len, 2, documents=True)
    losses = train(mesh, corpus, given.steps, device)
    alone = new_group([0])
    if get_rank() == 0:
        others = train(alone, corpus, given.steps, device)
        apart = max(abs(a - b) for a, b in zip(losses, others, strict=True))
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {size} ranks, {others[-1]:.4f} on one")
        print(f"{'SAME' if apart < LIMIT else 'DIFFERENT'}: they differ by at most {apart:.1e}", flush=True)
        assert apart < LIMIT
    barrier()
    destroy_process_group()


if __name__ == "__main__":
    main()
