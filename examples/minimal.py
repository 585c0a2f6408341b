import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import cp_mesh


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)  # the same weights and batch on every rank
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = torch.distributed.init_device_mesh(device, (2,), mesh_dim_names=("cp",))
model = nn.Sequential(nn.Embedding(96, 64), Layer(), Layer(), nn.Linear(64, 96, False))
sequence = cp_mesh.ShardedSequence(mesh, length=1000)  # who holds which tokens
plan = {"": cp_mesh.ShardedModel(sequence, inputs=("input",), positions=None)}
plan["1"] = plan["2"] = cp_mesh.ContextParallel(sequence)  # the layers, by name
cp_mesh.parallelize(model.to(device), mesh, plan)
fully_shard(model, mesh=mesh)
cp_mesh.sum_gradients(model)  # not means: the loss is a sum over ranks
optimizer = torch.optim.AdamW(model.parameters())
text = torch.randint(96, (2, 1001), device=device)  # whole sequences
labels = sequence.shard({"labels": text[:, 1:]})["labels"]  # this rank's labels
loss = cp_mesh.cross_entropy(model(text[:, :-1]), labels, mesh)  # this rank's part
loss.backward()
optimizer.step()
print(f"rank {mesh.get_local_rank()}: loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
