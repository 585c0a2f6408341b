"""`clip_grad_norm`: parameters on several meshes, and on none, against PyTorch's function on one rank."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import mesh, on_ranks
from set_ups import whole_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cp_mesh import ArgumentError, clip_grad_norm

NORMS = (1.0, 2.0, 3.0, math.inf)
LARGEST = 0.5


class Model(nn.Module):
    """What a block with tensor parallelism has: matrices on dp x cp and tp, norms on dp x cp alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(3))  # its first dim leaves a rank of four without a row
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).tanh()) * self.scale.repeat(2)


def gradients_of_one() -> dict[str, Tensor]:
    """The same on every rank."""
    made = torch.Generator().manual_seed(1)
    named = Model().named_parameters()
    return {name: torch.randn(x.shape, generator=made, dtype=torch.float64) for name, x in named}


def clipped_by_torch(norm_type: float, without: tuple[str, ...] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    model = Model()
    for name, grad in gradients_of_one().items():
        if name not in without:
            model.get_parameter(name).grad = grad
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST, norm_type)
    return norm, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def spread_model() -> nn.Module:
    """Tensor parallelism by hand, then FSDP2 around the matrices and the norm, but not the scale."""
    axes = mesh((2, 2, 2), ("dp", "cp", "tp"))
    model, tp, data = Model(), axes["tp"], axes["dp", "cp"]._flatten("dp_cp")
    for linear, placements in ((model.up, (Shard(0), Shard(0))), (model.down, (Shard(1), Replicate()))):
        for name, placement in zip(("weight", "bias"), placements, strict=True):
            value = getattr(linear, name).detach()
            setattr(linear, name, nn.Parameter(distribute_tensor(value, tp, [placement])))
    fully_shard(model, mesh=data, ignored_params={model.scale})
    return model


@pytest.mark.parametrize(
    ("norm_type", "without", "foreach"),
    [*((norm, (), None) for norm in NORMS), (2.0, ("up.weight", "scale"), True)],
    ids=str,
)
@on_ranks(8)
def test_fsdp_cp_and_tp_as_on_one_rank(norm_type: float, without: tuple[str, ...], foreach: bool | None) -> None:
    model = spread_model()
    meshes = {x.device_mesh.mesh_dim_names if isinstance(x, DTensor) else None for x in model.parameters()}
    assert len(meshes) == 3, "dp x cp, dp x cp x tp, and none"
    for name, grad in gradients_of_one().items():
        parameter = model.get_parameter(name)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
            grad = grad.redistribute(placements=parameter.placements)
        parameter.grad = None if name in without else grad
    norm = clip_grad_norm(model.parameters(), LARGEST, norm_type, foreach=foreach)
    want, grads = clipped_by_torch(norm_type, without)
    assert want > 2 * LARGEST and norm.dtype == torch.float64 and norm.shape == ()
    every = [torch.empty_like(norm) for _ in range(8)]
    dist.all_gather(every, norm)
    assert all(torch.equal(norm, x) for x in every)
    torch.testing.assert_close(norm, want, rtol=1e-12, atol=0.0)
    got = {name: whole_of(x.grad) for name, x in model.named_parameters() if x.grad is not None}
    torch.testing.assert_close(got, grads, rtol=1e-12, atol=1e-15)


@on_ranks(2)
def test_every_entry_counts_once(rank: int) -> None:
    """Norms of gradients of ones in each placement and of partial sums, empty, on one rank alone, and with a nan."""
    axes, norms = mesh((2,), ("tp",)), []
    for placement, given in ((Replicate(), Replicate()), (Shard(0), Shard(0)), (Replicate(), Partial())):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), axes, [placement]))
        local = torch.ones(2, 4) if placement == Shard(0) else torch.ones(4, 4)
        parameter.grad = DTensor.from_local(local, axes, [given])
        norms.append(float(clip_grad_norm(parameter, 1e9)))
    uneven = nn.Parameter(distribute_tensor(torch.zeros(1, 4), axes, [Shard(0)]))  # no row on the second rank
    uneven.grad = distribute_tensor(torch.full((1, 4), 3.0), axes, [Shard(0)])
    norms.append(float(clip_grad_norm([uneven], 1e9, math.inf)))
    unused = nn.Parameter(distribute_tensor(torch.zeros(4, 4), axes, [Shard(0)]))
    if rank == 0:
        unused.grad = distribute_tensor(torch.ones(4, 4), axes, [Shard(0)], src_data_rank=None)
    norms.append(float(clip_grad_norm([unused], 1e9)))
    broken = nn.Parameter(distribute_tensor(torch.zeros(4, 4), axes, [Shard(0)]))
    broken.grad = DTensor.from_local(torch.full((2, 4), math.nan if rank == 0 else 1.0), axes, [Shard(0)])
    norms += [float(clip_grad_norm([broken], 1e9, norm_type)) for norm_type in (2.0, math.inf)]
    assert norms[:5] == pytest.approx([4.0, 4.0, 8.0, 3.0, math.sqrt(8)])
    assert all(math.isnan(norm) for norm in norms[5:]), "nan of one rank is nan on all"


@on_ranks(2)
def test_error_if_nonfinite_raises_on_every_rank_and_scales_nothing(rank: int) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh((2,), ("dp",)), [Shard(0)]))
    local = torch.full((2,), 1.0 if rank else math.inf)
    parameter.grad = DTensor.from_local(local.clone(), parameter.device_mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="finite norm, got inf"):
        clip_grad_norm([parameter], 0.1, error_if_nonfinite=True)
    assert torch.equal(parameter.grad.to_local(), local)


@pytest.mark.parametrize(
    ("norm_type", "dtype"), [*((norm, torch.float64) for norm in NORMS), (2.0, torch.float32), (3.0, torch.bfloat16)]
)
def test_plain_parameters_as_in_pytorch(norm_type: float, dtype: torch.dtype) -> None:
    parameters, others = ([nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for _ in range(3)] for _ in range(2))
    for i, (parameter, other) in enumerate(zip(parameters, others, strict=True)):
        parameter.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(i)).to(dtype)
        other.grad = parameter.grad.clone()
    norm = clip_grad_norm(iter(parameters), LARGEST, norm_type)
    want = nn.utils.clip_grad_norm_(others, LARGEST, norm_type)
    rtol = max(1e-12, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(norm, want.to(norm.dtype), rtol=rtol, atol=0.0)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=rtol, atol=0.0)


def test_small_gradients_stay_as_they_are_and_half_precision_is_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(300, dtype=torch.float16))
    parameter.grad = torch.full((300,), 1000.0, dtype=torch.float16)
    assert float(clip_grad_norm(parameter, math.inf)) == pytest.approx(1000 * math.sqrt(300))  # 1e6 is none of float16
    before = parameter.grad.clone()
    clip_grad_norm(parameter, 1e6)
    assert torch.equal(parameter.grad, before)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_foreach_takes_all_in_one_call(foreach: bool | None) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert float(clip_grad_norm(parameters, 1.0, foreach=foreach)) == pytest.approx(math.sqrt(6))
    names = {event.name for event in profile.events()}
    assert ("aten::_foreach_norm" in names, "aten::_foreach_mul_" in names) == (foreach is True,) * 2


def test_no_gradient_at_all() -> None:
    for given in ([], [nn.Parameter(torch.ones(2))]):
        for norm_type in (2.0, math.inf):
            norm = clip_grad_norm(given, 1.0, norm_type, error_if_nonfinite=True)
            assert torch.equal(norm, torch.zeros(()))


@pytest.mark.parametrize(("name", "value"), [("max_norm", -1.0), ("max_norm", math.nan), ("norm_type", 0.0)])
def test_refused(name: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"clip_grad_norm: {name}: expected"):
        clip_grad_norm([nn.Parameter(torch.ones(2))], **{"max_norm": 1.0, name: value})
