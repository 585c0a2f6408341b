"""Blocks that are checkpointed, and keep what they keep in host memory: against the plain model in float64.

Streams are simulated: there a copy ends when it is waited for and not before, and each wait is left out in turn.
`test_gradients` has the style in whole models over dp, cp and tp.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet, ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from inside import inner, room
from model import Core, DenseCore, Model, batch
from ranks import alone, group_of_one, on_ranks
from set_ups import whole_of
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cp_mesh import (
    Checkpointed,
    ContextParallel,
    ShardedModel,
    ShardedSequence,
    TiledMLP,
    UnsupportedError,
    cross_entropy,
    parallelize,
    sum_gradients,
)

copies: Any = room("host_copies")
OffloadedBlock, OffloadedTensor = inner("host_copies", "OffloadedBlock", "_OffloadedTensor")
B, S, C, LAYERS = 2, 6, 8, 4
OPTIONS = [{"offload": offload, "keep_attention": keep} for offload in (False, True) for keep in (True, False)]


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """A group of this process, for tests without ranks."""
    with group_of_one():
        yield


class Block(nn.Module):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(C), nn.Linear(C, C)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return x + F.dropout(self.linear(self.norm(x)).sin(), 0.3, self.training) * scale


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(C, C), nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, *args)
        return x


def pair(make: Callable[[], nn.Module] = Block, layers: int = LAYERS, **options: Any) -> tuple[Any, Any, Any]:
    """A model, the same with the style, and the style."""
    torch.manual_seed(0)
    plain = Net(make, layers).double()
    ours, style = copy.deepcopy(plain), Checkpointed(**options)
    return plain, parallelize(ours, alone(), {"layers.*": style}), style


def rows(seed: int = 1, S: int = S) -> Tensor:
    return torch.randn(B, S, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def step(model: nn.Module, *args: Any, x: Tensor | None = None) -> list[Tensor | None]:
    """Output, and gradients of the input and the parameters; and where the random numbers are then."""
    torch.manual_seed(3)
    x = (rows() if x is None else x).detach().requires_grad_()
    y = model(x, *args)
    y.square().sum().backward()
    return [y.detach(), x.grad, *gradients(model), torch.rand(1, dtype=torch.float64)]


def assert_same(found: list[Tensor | None], want: list[Tensor | None]) -> None:
    for x, y in zip(found, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert (x - y).abs().max() <= 1e-12 * y.abs().max()


# --- what is computed


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_outputs_gradients_and_random_numbers(options: dict[str, bool]) -> None:
    plain, ours, _ = pair(**options)
    for _ in range(2):  # gradients add up
        assert_same(step(ours), step(plain))
    for model in (plain, ours):
        model.eval()
        model.zero_grad()
    assert_same(step(ours), step(plain))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(ours(rows()), plain(rows()))
    for model in (plain, ours):  # blocks in front are frozen, and have no gradient to pass on
        model.first.requires_grad_(False)
        model.layers[:2].requires_grad_(False)
        model.zero_grad()
        model(rows()).square().sum().backward()
    assert_same(gradients(ours), gradients(plain))
    assert ours.layers[0].linear.weight.grad is None and ours.layers[3].linear.weight.grad is not None


class Many(nn.Module):
    """Many kinds of arguments and results, from keywords too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, ids: Tensor, x: Tensor, rope: Any, *, mask: Any = None, names: Any = ()) -> Any:
        cos, sin = rope["both"]
        y = self.linear(x) * cos + x.roll(1, -1) * sin + ids[..., None] * len(names)
        return {"y": y if mask is None else y * mask}, (y.sum(), None, "text"), ids


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_arguments_and_results(options: dict[str, bool]) -> None:
    plain, ours, style = pair(Many, 1, **options)
    found = []
    for model, as_keyword in ((plain, False), (ours, False), (ours, True)):
        model.zero_grad()
        x, cos = rows().requires_grad_(), rows(2).requires_grad_()
        given: Any = {"ids": torch.arange(S).expand(B, S), "x": x, "rope": {"both": (cos, rows(3))}}
        args = () if as_keyword else (given.pop("ids"), given.pop("x"), given.pop("rope"))
        out, (total, nothing, text), same = model.layers[0](*args, **given, mask=rows(4).gt(0), names=["a", "b"])
        assert (nothing, text) == (None, "text") and torch.equal(same, torch.arange(S).expand(B, S))
        (out["y"].square().sum() + total).backward()
        found.append([out["y"].detach(), x.grad, cos.grad, *gradients(model)])
        del out, total
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    assert [x.numel() for lane in style._streams.values() for x in lane.free] == [rows().nbytes] * options["offload"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_forwards(options: dict[str, bool], order: tuple[int, int]) -> None:
    """Before one backward, in two; a block that is called twice; a graph that is kept, and one that is dropped."""
    plain, ours, style = pair(**options)
    found = []
    for model in (plain, ours):
        torch.manual_seed(2)
        outs = [model(rows(seed)) for seed in (1, 2)]
        for i in order:
            (outs[i] * rows(5 + i)).sum().backward(retain_graph=True)
            if options != {"offload": False, "keep_attention": True}:  # PyTorch's selective one runs once
                outs[i].sum().backward()
        del outs
        (model(rows(3)) * model(rows(4))).sum().backward()
        model(rows(5))  # is dropped
        layer = model.layers[1]
        layer(layer(model.layers[0](rows(6)))).square().sum().backward()
        found.append([*torch.autograd.grad(model(rows(7)).square().sum(), [*model.parameters()]), *gradients(model)])
    assert_same(found[1], found[0])
    assert len(style._streams) == options["offload"]


def test_a_block_within_a_block() -> None:
    """Each has the style: the inner one's input is computed again, and goes to the host then too."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Block(), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.linear(x).cos()) * x

    plain, ours, _ = pair(Outer, offload=True)
    parallelize(ours, alone(), {"layers.*.inner": Checkpointed(offload=True)})
    for _ in range(2):
        assert_same(step(ours), step(plain))


def test_two_forwards_in_one_autocast() -> None:
    """The second would read casts of the first, which the recomputation does not."""
    grads = []
    for model in pair()[:2]:
        model.float().eval()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows().float()).square().mean() + model(-rows().float()).square().mean()
        grads.append(torch.autograd.grad(loss, [*model.parameters()]))
    torch.testing.assert_close(grads[1], grads[0], rtol=0.02, atol=1e-5)


def test_autocast_and_strides() -> None:
    """The recomputation has the dtype and the memory order of the forward, also of parts and of expanded rows."""
    seen = list[Any]()

    class Looks(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((x.shape, x.stride(), x.dtype, x.requires_grad))
            return self.linear(x)

    _, ours, _ = pair(Looks, 1, offload=True)
    ours.float()
    x = rows().float().requires_grad_()
    wide = torch.cat((x, x), -1)
    inputs = [x, x.transpose(0, 1), x[:, ::2], x[:1].expand(3, S, C), x[:, :0], wide[..., 2 : 2 + C], x.half()]
    for each in inputs:
        with torch.autocast("cpu", torch.bfloat16):
            y = ours.layers[0](each)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        first, again = seen[-2:]
        dense = each.is_contiguous() or each.transpose(0, 1).is_contiguous()
        assert first == again if dense else first[0::2] == again[0::2], each.stride()
    assert len(seen) == 2 * len(inputs)


# --- what is kept


def test_what_is_in_the_memory_of_the_device() -> None:
    """Inputs of two blocks at most, in both passes; without the option those of all."""
    for offload in (True, False):
        _, ours, _ = pair(layers=8, offload=offload, keep_attention=False)
        nears, known, most = WeakSet[Any](), list[StorageWeakRef](), [0]
        real = OffloadedTensor._copy

        def count(self: Any, *args: Any, real: Any = real, nears: Any = nears) -> None:
            nears.add(self)
            real(self, *args)

        def look(module: Any, args: Any, nears: Any = nears, known: Any = known, most: Any = most) -> None:
            known.append(StorageWeakRef(args[0].untyped_storage()))
            here = {each.cdata for each in known if not each.expired()}
            here |= {each.device_copy.untyped_storage()._cdata for each in nears if each.device_copy is not None}
            most[0] = max(most[0], len(here))

        for layer in ours.layers:
            layer.norm.register_forward_pre_hook(look)  # in the block, also in the recomputation
        with mock.patch.object(OffloadedTensor, "_copy", count):
            for _ in range(3):
                out = ours(rows())
                del known[:]
                out.square().sum().backward()
        assert most[0] == 2 if offload else most[0] >= 8, most


def test_what_nobody_took_leaves_the_device() -> None:
    """The end of one forward brings the last block of the one before, whose backward comes later or never."""
    _, ours, _ = pair(offload=True)
    outs = [ours(rows(seed)) for seed in range(3)]
    blocks = [each for each in gc.get_objects() if type(each) is OffloadedBlock]  # others may be dead proxies
    for out in (outs[1], outs[0], outs[2]):
        out.sum().backward(retain_graph=True)
        here = [block for block in blocks if any(each.device_copy is not None for each in block.tensors)]
        assert len(here) <= 1 and len(blocks) == 3 * LAYERS


def test_small_tensors_do_not_take_large_buffers() -> None:
    """Of sequences that grow, as many bytes are held as the longest takes, in whichever order blocks keep tensors."""
    for of_row in ((8192, 128, 8192), (128, 8192), (8192, 128)):
        lane = copies.CopyStream(torch.device("cpu"))
        for length in (16, 32, 64, 64, 16, 64):
            for _ in range(2):
                lane.free += [lane.buffer(length * each) for _ in range(3) for each in of_row]
        assert sum(x.numel() for x in lane.free) == 3 * 64 * sum(of_row)


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_buffers_are_used_again() -> None:
    """One for each block, those of the first step; also of sequences that grow, and without the garbage collector."""
    _, ours, style = pair(offload=True)
    with without_collection():
        for lengths, same in (((S, S), True), ((S, 2 * S), False), ((2 * S, S, 2 * S), True)):
            found = []
            for length in lengths:
                ours(rows(S=length)).sum().backward()
                (lane,) = style._streams.values()
                assert len(lane.free) == LAYERS and not any(each() for each in lane.blocks_on_device)
                found.append(sorted(x.data_ptr() for x in lane.free))
            assert not same or found[:-1] == found[1:]
            assert {x.numel() for x in lane.free} == {rows(S=max(lengths)).nbytes}
        outs = [ours(rows()) for _ in range(2)]
        assert not lane.free
        ours(rows())  # dropped, its buffers go to the next
        outs.pop().sum().backward()
        del outs
        assert len(lane.free) == 3 * LAYERS


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out, self.core = nn.Linear(C, C), nn.Linear(C, C), Core()

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, C // 2)).transpose(1, 2)
        return x + self.out(self.core(q, q, q).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.quick("False-", "'offload': True, 'keep_attention': True")
def test_what_attention_returned(options: dict[str, bool], compiled: bool) -> None:
    """It is kept, also in a compiled forward, or computed again; and it goes to the host like the input."""
    passes, calls, graphs, found = room("passes"), list[int](), list[Any](), []
    counted = mock.Mock(side_effect=lambda *args, real=passes.run_forward: calls.append(1) or real(*args))

    def backend(graph: Any, examples: Any) -> Any:
        made = lookup_backend("aot_eager")(graph, examples)
        return lambda *args: graphs.append(graph) or made(*args)

    for style in (None, Checkpointed(**options)):
        torch.manual_seed(0)
        model, sequence = Net(Attends, 2).double(), ShardedSequence(alone())
        if compiled and style is not None:
            for layer in model.layers:
                layer.forward = torch.compile(layer.forward, backend=backend)
        plan: dict[str, Any] = {"layers.*.core": ContextParallel(sequence)}
        parallelize(model, alone(), plan | ({"layers.*": style} if style else {}))
        del calls[:]
        with (
            mock.patch.object(passes, "run_forward", counted),
            mock.patch.object(room("call.known"), "run_forward", counted),
        ):
            found.append([step(model), step(model)])
    for ours, plain in zip(*found, strict=True):
        assert_same(ours, plain)
    with without_collection():  # a graph that is dropped goes at once, and what was kept with it
        assert model(rows()).requires_grad
        assert not any(each() for lane in style._streams.values() for each in lane.blocks_on_device)
    assert bool(graphs) == compiled
    assert len(calls) == 2 * (2 if options["keep_attention"] else 4)
    buffers = sorted(x.numel() for lane in style._streams.values() for x in lane.free)
    lse = B * 2 * S * 8
    per_block = [rows().nbytes] + [lse, rows().nbytes] * options["keep_attention"]
    assert buffers == (sorted(per_block * 2) if options["offload"] else [])


class Chooses(Block):
    """By a higher-order operator, which PyTorch's selective checkpoint does not take."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


def test_higher_order_operators() -> None:
    plain, ours, _ = pair(Chooses, offload=True)
    assert_same(step(ours), step(plain))


def test_compile() -> None:
    """A block whose forward was compiled before is; one with the option is left out of other graphs."""
    graphs = list[str]()

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    for offload in (True, False):
        plain, ours, _ = pair(offload=offload, keep_attention=False)
        del graphs[:]
        assert_same(step(torch.compile(ours.eval(), backend=backend)), step(plain.eval()))
        assert any("sin" in code or "wrap_body" in code for code in graphs) == (not offload)
        torch.compiler.reset()
    plain = Net().double().eval()
    ours = copy.deepcopy(plain)
    for layer in ours.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    parallelize(ours, alone(), {"layers.*": Checkpointed(offload=True)})
    assert_same(step(ours), step(plain))
    torch.compiler.reset()


# --- streams


class Event:
    def __init__(self) -> None:
        self.waited_by = list[Any]()


class Computing:
    """A stream whose work is done when it is issued, as all work on the CPU here."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def wait_event(self, event: Event) -> None:
        event.waited_by.append(self)
        if event in self.streams.copying.work and self.streams.waits():  # else a later copy was waited for
            self.streams.copying.run_until(event)


class Copying(TorchDispatchMode):
    """A stream that runs as late as it may: what it was given is done when someone waits for it.

    What it may find then instead is NaN: in a source that it did not wait for, in a target that nobody waited for, and
    in memory that was let go, which others write by then.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams, self.work, self.knows = streams, list[Any](), False

    def wait_stream(self, other: Computing) -> None:
        if self.streams.waits():
            self.knows = True

    def record_event(self) -> Event:
        self.work.append(Event())
        return self.work[-1]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert op is torch.ops.aten.copy_.default
        (to, source), near = args[:2], args[self.streams.is_host(args[0])]
        self.work.append((to.detach(), source.detach(), self.knows, ref(near)))
        self.knows = False
        if near is to:
            to.data.fill_(torch.nan)
        return to

    def run_until(self, event: Event | None) -> None:
        while self.work and (event is None or event in self.work):
            done = self.work.pop(0)
            if isinstance(done, tuple):
                to, source, knew, near = done
                if not knew or near() is None:
                    self.streams.wrong.append("a source or target that is still in use" if not knew else "let go")
                to.data.copy_(source)  # as on a GPU, nobody counts this write when it is done


class Streams:
    """In the place of `torch.cuda`. ``skips``: the number of a wait that does nothing."""

    def __init__(self, skips: int | None = None) -> None:
        self.skips, self.num_waits, self.wrong = skips, 0, list[str]()
        self.computing, self.copying, self.buffers = Computing(self), Copying(self), set[int]()

    def waits(self) -> bool:
        self.num_waits += 1
        return self.num_waits - 1 != self.skips

    def is_host(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.buffers

    def current_stream(self, device: torch.device) -> Computing:
        return self.computing

    def Stream(self, device: torch.device) -> Copying:
        return self.copying

    def stream(self, stream: Copying) -> Copying:
        return stream


@contextmanager
def simulated(skips: int | None = None) -> Iterator[Streams]:
    streams, real = Streams(skips), copies.CopyStream.buffer

    def buffer(lane: Any, size: int) -> Tensor:
        found: Tensor = real(lane, size)
        streams.buffers.add(found.data_ptr())
        return found

    with (
        mock.patch.object(copies, "streams_of", lambda device: streams),
        mock.patch.object(copies.CopyStream, "buffer", buffer),
    ):
        yield streams


def train(model: nn.Module) -> list[Tensor | None]:
    """Steps of one and of two forwards, one that is dropped in the middle, and one whose graph is kept."""
    torch.manual_seed(2)
    model.zero_grad()
    model(rows(1)).square().sum().backward()
    outs = [model(rows(seed)) for seed in (2, 3)]
    outs.pop(0).square().sum().backward()
    model(rows(4))
    outs.pop(0).square().sum().backward()
    y = model(rows(5))
    model.layers[0](model.first(rows(6)))
    y.square().sum().backward(retain_graph=True)
    last = model.layers[2].linear.weight
    torch.autograd.grad(y.sum(), last, retain_graph=True)  # brings the block before, which nobody takes
    y.cos().sum().backward()
    return gradients(model)


def sound(skips: int | None) -> tuple[bool, int, list[Tensor | None]]:
    """Whether nothing was read too early without that wait, how many waits there are, and the gradients."""
    _, ours, _ = pair(layers=3, offload=True)
    with simulated(skips) as streams, without_collection():
        found = train(ours)
        del ours
        streams.copying.run_until(None)
    return not streams.wrong, streams.num_waits, found


def test_each_wait_is_needed(full: bool) -> None:
    right, num, grads = sound(None)
    assert_same(grads, train(pair(layers=3)[0]))
    assert right and num > 40
    for skips in range(0, num, 1 if full else 4):
        right, _, found = sound(skips)
        assert not right or not all(torch.allclose(x, y, 1e-12, 0.0) for x, y in zip(found, grads, strict=True)), skips


def test_buffers_go_on_while_copies_are_under_way() -> None:
    """All copies are in one stream: the next tensor's copy into a buffer comes behind the last one out of it."""
    plain, ours, style = pair(offload=True)
    with simulated() as streams:
        for _ in range(2):
            assert_same(train(ours), train(plain))
        (lane,) = style._streams.values()
        assert lane.stream is streams.copying


def test_another_stream() -> None:
    """The backward computes in another stream than the forward: it waits, and its memory is its own."""
    _, ours, style = pair(layers=3, offload=True)
    with simulated() as streams:
        first, second = streams.computing, Computing(streams)
        x = ours.first(rows())
        kept = [OffloadedBlock("", style._streams.setdefault(x.device, copies.CopyStream(x.device))) for _ in range(3)]
        gets = [each.keep(x * i) for i, each in enumerate(kept)]
        sources = [each.tensors[0].done for each in kept]
        gets[2]()  # in the first: brings the one before
        brought = kept[1].tensors[0].done
        streams.computing = second
        assert torch.equal(gets[1](), x * 1)
        assert brought.waited_by == [first] and kept[1].tensors[0].done.waited_by == [second]
        assert all(event.waited_by == [first] for event in sources)


@pytest.mark.gpu
@pytest.mark.parametrize("keep_attention", [True, False])
def test_on_a_gpu(keep_attention: bool) -> None:
    """With slow copies: the same bits as without them, and memory of few blocks."""
    peaks, found, wide, heads = {}, {}, 1024, 8

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.core = nn.Linear(wide, wide), Core()

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x).sin().unflatten(-1, (heads, -1)).transpose(1, 2)
            return x + self.core(q, q, q).transpose(1, 2).flatten(-2)

    for offload in (False, True):
        torch.manual_seed(0)
        model, axis = nn.Sequential(*(Wide() for _ in range(16))).cuda().bfloat16(), alone()
        style = Checkpointed(offload=offload, keep_attention=keep_attention)
        core = ContextParallel(ShardedSequence(axis), deterministic=True)
        parallelize(model, axis, {"*": style, "*.core": core})
        x = torch.randn(1, 20000, wide, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with mock.patch.object(torch.cuda, "stream", slowly(torch.cuda.stream)):
            for _ in range(3):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                model(x).float().square().mean().backward()
                torch.cuda.synchronize()
                peaks[offload] = torch.cuda.max_memory_allocated() - before
        found[offload] = gradients(model)
        if offload:
            (lane,) = style._streams.values()
            kept = {x.nbytes, heads * 20000 * 4} if keep_attention else {x.nbytes}  # lse is too small to be pinned here
            assert {buffer.numel() for buffer in lane.free} == kept and all(buffer.is_pinned() for buffer in lane.free)
            assert copies.pinned_bytes() == 16 * x.nbytes * (1 + keep_attention)  # no power of two
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))
    assert peaks[False] - peaks[True] >= 10 * x.nbytes * (1 + keep_attention), peaks
    del model, style, lane
    gc.collect()
    assert not copies.pinned_bytes()


def test_memory_is_pinned_as_long_as_it_lives() -> None:
    """No more than asked for, and let go only when all copies are done."""
    cuda, size = mock.Mock(device="cpu", **{"cudaHostRegister.return_value": 0}), 5000000
    with mock.patch.object(torch.cuda, "cudart", lambda: cuda):
        x = copies.pinned(size, cuda)
        pointer, view = x.data_ptr(), x[:10]
        assert cuda.mock_calls == [mock.call.cudaHostRegister(pointer, size, 0)] and copies.pinned_bytes() == size
        del x, view
        assert cuda.mock_calls[1:] == [mock.call.synchronize(), mock.call.cudaHostUnregister(pointer)]
        cuda.cudaHostRegister.return_value = 2
        with pytest.raises(MemoryError, match=r"cannot pin .* CUDA error 2; .* keep_attention=False"):
            copies.pinned(size, cuda)
    assert not copies.pinned_bytes()


def slowly(stream: Any) -> Any:
    """`torch.cuda.stream` that waits for some milliseconds first, in the stream."""

    @contextmanager
    def entered(which: Any) -> Iterator[None]:
        with stream(which):
            torch.cuda._sleep(5_000_000)
            yield

    return entered


# --- on ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.quick("True-2")
@on_ranks("ranks")
def test_models_on_ranks(axis: Any, options: dict[str, bool], fsdp: bool) -> None:
    """Loss and gradients of all ranks after two micro-batches."""
    plain = Model(DenseCore)
    want = []
    for given in (batch(2, 22, seed) for seed in (0, 1)):
        logits = plain(given["tokens"], torch.arange(22))
        want.append(F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten()))
        want[-1].backward()
    sequence = ShardedSequence(axis, length=22)
    model = Model(Core)
    plan: dict[str, Any] = {"": ShardedModel(sequence), "layers.*.core": ContextParallel(sequence)}
    plan |= {"layers.*": Checkpointed(**options), "layers.*.ff": TiledMLP(tiles=3)}
    parallelize(model, axis, plan)
    if fsdp:
        for part in (*model.layers, model):
            fully_shard(part, mesh=axis)
        sum_gradients(model)
    losses = []
    for given in (batch(2, 22, seed) for seed in (0, 1)):
        labels = sequence.shard({"labels": given["labels"]})["labels"]
        loss = cross_entropy(model(given["tokens"], torch.arange(22)), labels, axis)
        loss.backward()
        losses.append(loss.detach())
    grads = [whole_of(p.grad) for p in model.parameters()]
    for x in (*losses, *(() if fsdp else grads)):
        dist.all_reduce(x, group=axis.get_group())
    assert_same([*losses, *grads], [*(loss.detach() for loss in want), *gradients(plain)])


@on_ranks(2)
def test_dtensors_and_collectives(rank: int, axis: Any) -> None:
    """Gradients for blocks that take a DTensor, and a collective's result that nobody waited for."""
    found = list[list[Tensor | None]]()
    for style in ({}, {"": Checkpointed(offload=True)}):
        torch.manual_seed(0)
        first, second = (parallelize(nn.Linear(C, C).double(), axis, style) for _ in range(2))
        leaf = distribute_tensor(rows(), axis, [Shard(0)]).requires_grad_()
        first.weight, first.bias = (
            nn.Parameter(distribute_tensor(x.detach(), axis)) for x in (first.weight, first.bias)
        )
        y = first(leaf * 2).sin()
        assert isinstance(y, DTensor) and y.placements == (Shard(0),)
        y.sum().backward()
        x = funcol.all_reduce(rows(rank), "sum", axis.get_group())
        assert type(x) is funcol.AsyncCollectiveTensor
        second(x).sin().sum().backward()
        grads = (leaf.grad.full_tensor(), first.weight.grad.full_tensor(), second.weight.grad, second.bias.grad)
        found.append([*grads])
    assert_same(*found)


# --- refusals


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        x += 1.0
        return y * x


class Routes(Block):
    """Writes to what the graph of a choice saved, which no backward reads: plain autograd accepts this."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x * 1
        chosen = self.linear(x).softmax(-1).argmax(-1)
        x[..., 0] += chosen
        return x.sin()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_right_writes_in_place(options: dict[str, bool]) -> None:
    """Also in blocks within a block."""
    plain, ours, _ = pair(Routes, 2, **options)
    assert_same(step(ours), step(plain))
    outer = nn.Sequential(ours)
    parallelize(outer, alone(), {"0": Checkpointed(**options)})
    plain.zero_grad()
    ours.zero_grad()
    assert_same(step(outer), step(plain))


class Adds(Attends):
    """In place, to what the norm saved in this block, or to attention's output."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.norm, self.to = nn.LayerNorm(C), to

    def forward(self, x: Tensor) -> Tensor:
        if self.to == "stream":
            x = x.clone()
            x += super().forward(self.norm(x))
            return x * x
        q = self.q(x).unflatten(-1, (2, C // 2)).transpose(1, 2)
        y = self.core(q, q, q)
        y *= 2
        return x + self.out(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("to", ["stream", "attention"])
def test_writes_to_what_is_saved(options: dict[str, bool], to: str) -> None:
    """Plain autograd refuses them; PyTorch's checkpoint has wrong gradients. Also inside another checkpoint."""
    torch.manual_seed(0)
    model, sequence = Net(lambda: Adds(to), 2).double(), ShardedSequence(alone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(rows()).sum().backward()
    parallelize(model, alone(), {"layers.*": Checkpointed(**options), "layers.*.core": ContextParallel(sequence)})
    say = r"Checkpointed\(Adds at layers\.1\): expected .* got a write"
    if to == "attention" and options == {"offload": False, "keep_attention": True}:
        say = "Tensor cached during selective activation checkpoint has been mutated"  # by PyTorch
    for run in (model, parallelize(nn.Sequential(model), alone(), {"0": Checkpointed(keep_attention=False)})):
        for _ in range(2):
            with pytest.raises(RuntimeError if "cached" in say else UnsupportedError, match=say):
                run(rows()).sum().backward()


class Odd(Tensor):
    pass


def test_refusals() -> None:
    plain, ours, _ = pair(offload=True)
    with pytest.raises(UnsupportedError, match=r"with Checkpointed; name the block around it"):
        parallelize(ours, alone(), {"layers.0": Checkpointed()})
    with pytest.raises(UnsupportedError, match=r"without a style over cp, got Block with Checkpointed"):
        parallelize(ours, alone(), {"layers.0": TiledMLP(tiles=2)})
    with pytest.raises(UnsupportedError, match="cannot be pickled"):
        pickle.dumps(ours)
    assert_same(step(copy.deepcopy(ours)), step(plain))  # a copy has the style
    layer = ours.layers[0]
    for given in ((torch.arange(3),), (), (rows().to("meta"),)):
        with pytest.raises(UnsupportedError, match=r"Checkpointed\(Block at layers\.0\): expected a floating tensor"):
            layer(*given)
    with pytest.raises(UnsupportedError, match="expected a Tensor or DTensor, got Odd"):
        layer(rows().as_subclass(Odd))
    layer.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"got block\.compile\(\); block\.forward = torch\.compile"):
        layer(rows())
    torch.compiler.reset()


def test_writes_in_place() -> None:
    """To the input, while it is copied or while it is the last one's; later writes change nothing."""
    for layers in (1, 3):
        _, ours, _ = pair(Writes, layers, offload=True)
        y = ours(rows())
        with pytest.raises(UnsupportedError, match="got a write in place; write out of place"):
            y.sum().backward()
    _, ours, _ = pair(offload=True)
    scale = torch.ones(C, dtype=torch.float64)
    y = ours(rows(), scale)
    scale.mul_(2)  # an argument that stays on the device
    with pytest.raises(UnsupportedError, match=r"at layers\.3\): expected arguments that stay, got a write in place"):
        y.sum().backward()
    plain, ours, _ = pair(offload=True)
    for model in (plain, ours):
        x = model.first(rows())
        y = model.layers[1](model.layers[0](x).cos())
        if model is ours:
            x.detach().zero_()  # PyTorch would refuse this in the plain model: the copy is in the host
        torch.manual_seed(3)
        y.sum().backward()
