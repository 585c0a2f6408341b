"""Generate greedily from a Llama with its prompt and KV cache sharded over ranks, and compare with one device.

On GPUs the steps are replays of a CUDA graph.

torchrun --nproc-per-node 2 examples/generate.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from llama import Llama, LlamaConfig

from cp_mesh import Layout, ShardedSequence, ZigZag, attention
from cp_mesh.inference import ShardedCache

ZIGZAG = ZigZag()


class CachedAttention(nn.Module):
    """Attention core for generation: the first call gets this rank's shard of the prompt, later calls get one token."""

    cache: ShardedCache

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if self.cache.sequence.length and not self.cache.length:
            self.cache.prefill(k, v)
            sequence = self.cache.sequence
            return attention(q, k, v, mesh=sequence.mesh, layout=sequence.layout, seq_len=sequence.seq_len)
        self.cache.append(k, v)
        return self.cache.attend(q)


@torch.no_grad()
def generate(
    model: Llama,
    prompt: Tensor,
    num_tokens: int,
    mesh: DeviceMesh,
    layout: Layout = ZIGZAG,
    fixed: bool = False,
    graph: bool = False,
) -> Tensor:
    """Generate the most likely tokens.

    The last token of the prompt is not prefilled. It is decoded first, so that all ranks get its logits.

    Args:
        model: A Llama with `CachedAttention` as its core; the same weights on every rank.
        prompt: [B, S] int64, the same on every rank.
        num_tokens: Number of tokens to generate.
        mesh: 1-D, the cp axis.
        layout: Layout of the prompt without its last token.
        fixed: Whether caches have a fixed capacity.
        graph: Whether steps after the first one are replays of a CUDA graph; needs a fixed capacity.

    Returns:
        [B, num_tokens] int64, the same on every rank.
    """
    num_prefilled = prompt.shape[1] - 1
    sequence = ShardedSequence(mesh, layout, length=num_prefilled or None)
    for block in model.layers:
        block.attention.core.cache = ShardedCache(sequence, num_prefilled + num_tokens if fixed else None)
    if num_prefilled:
        model(sequence.shard({"tokens": prompt[:, :-1]})["tokens"], sequence.positions(device=prompt.device))
    token, position = prompt[:, -1:].clone(), torch.tensor([num_prefilled], device=prompt.device)

    def step() -> None:
        token.copy_(model(token, position).argmax(-1))
        position.add_(1)

    advance, tokens = step, []
    for i in range(num_tokens):
        if graph and i == 1:  # the first step has compiled the kernels
            advance = captured(step)
        advance()
        tokens.append(token.clone())
    return torch.cat(tokens, dim=1)


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return its replay; the capture itself does not run the step."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL threads query events during capture
        step()
    return graph.replay


@torch.no_grad()
def generate_alone(model: Llama, prompt: Tensor, num_tokens: int) -> Tensor:
    """Generate on one device without a cache, by a Llama with an ordinary core."""
    tokens = prompt
    for _ in range(num_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens[:, prompt.shape[1] :]


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    config = LlamaConfig(dim=64, num_layers=2)
    sharded, plain = Llama(config, core=CachedAttention), Llama(config)
    for model in (sharded, plain):
        model.init_weights(seed=0)
        model.to(device, torch.float32 if cuda else torch.float64)
    prompt = torch.randint(256, (1, 1000), generator=torch.Generator().manual_seed(0)).to(device)
    tokens = generate(sharded, prompt, 16, mesh, fixed=cuda, graph=cuda)
    same = torch.equal(tokens, generate_alone(plain, prompt, 16))
    held = sharded.layers[0].attention.core.cache.key.shape[2]
    print(f"rank {dist.get_rank()}: {held} of 1015 tokens cached, as one device: {same}, {tokens.tolist()}", flush=True)
    assert same
    dist.barrier()  # gloo may still hold tensors of the last collective, which Python cannot release at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
