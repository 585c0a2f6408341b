"""Models of Transformers on ranks and on one: a `Case`, what its step gives, and how far it is from the oracle's.

The oracle is the models' own code, with attention and masks of ours. Masks are what Transformers makes of the whole
batch, pair by pair; that documents do not see one another is added here, since some models (gpt-oss, BERT) forget it.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense import dense_attention
from families import IMAGE, SOUND, VIDEO, VOCABULARY, build, build_with_images
from ranks import mesh
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cp_mesh import Striped, sum_gradients
from cp_mesh.integrations.transformers import parallelize, sequence_of

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
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0 and attention_mask.dtype == torch.bool
    if indices is not None:
        attention_mask = attention_mask & torch.zeros_like(attention_mask).scatter(-1, indices[:, None].long(), True)
    out, _ = dense_attention(query, key, value, attention_mask[:, 0], scaling, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2).contiguous().to(query.dtype), None


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    kwargs |= {name: False for name in kwargs if name.startswith("allow_is_")}
    mask = sdpa_mask(*args, **kwargs)
    if _documents[0] is not None:
        ids = torch.atleast_2d(_documents[0])
        mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    return mask


def _topk(x: Tensor, k: int, dim: int = -1) -> Any:
    """Of equal scores the first, as cp_mesh picks."""
    found = x.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)))


class Wide(TorchFunctionMode):
    """Casts to float32 are to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func, args = Tensor.double, args[:1]
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})


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
    with mock.patch.object(Tensor, "topk", _topk):  # of indexers
        output = model(**batch)
    logits = output.logits
    _documents[0] = None
    loss = F.cross_entropy(logits.flatten(0, 1), shifted(model, labels).flatten(), ignore_index=-100)
    if output.get("aux_loss") is not None:  # of routers
        loss = loss + model.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return logits.detach(), loss.detach()


B, S = 2, 45
"""Not a multiple of what any layout wants, so every batch is padded."""


def batch(case: str, first: int | None = None) -> dict[str, Tensor]:
    """A whole batch; ``first``: the position of a document's first token, which is then said in every case."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (B, S), generator=numbers)
    labels = ids.roll(1, 0)  # other tokens: BERT's are not those that it sees
    labels[:, 5:9] = -100
    found = {"input_ids": ids, "labels": labels}
    if case == "packed":  # other documents in every row
        rows = [(7, 23, S - 30), (19, S - 20, 1)]
        found["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        found["position_ids"] += first or 0
    elif first is not None:
        found["position_ids"] = torch.arange(first, first + S)[None]
    if "padded" in case:
        found["attention_mask"] = torch.ones(B, S, dtype=torch.long)
        for row, kept in enumerate((40, 31)):
            end = S - kept + ("but the first" in case)  # of labels, where padding would predict the first token
            found["attention_mask"][row, slice(0, S - kept) if "left" in case else slice(kept, None)] = 0
            if case != "padded with labels":
                labels[row, slice(0, end) if "left" in case else slice(kept, None)] = -100
    return found


def pixels(family: str, number: int, tokens: int) -> dict[str, Tensor]:
    """Random images, each of so many tokens, as a family takes them."""
    side = {"got_ocr2": 32, "internvl": 16, "mistral3": 16}.get(family, 4 * int(tokens**0.5))
    shape, found = (number, 3, side, side), dict[str, Tensor]()
    if "qwen" in family:
        shape = (number * 16, 3 * 4)
        found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * number)
    elif "gemma4" in family:
        shape, at = (number, 4 * tokens, 3 * 4), torch.arange(4 * tokens)
        found["image_position_ids"] = torch.stack([at % 8, at // 8], -1).expand(number, -1, -1)
    elif family == "mistral3":
        found["image_sizes"] = torch.tensor([[side, side]] * number)
    numbers = torch.Generator().manual_seed(2)
    return found | {"pixel_values": torch.randn(shape, generator=numbers, dtype=torch.float64)}


def tokens_of(family: str) -> int:
    """Of an image; those of Gemma are longer than its window."""
    return 16 if family.startswith("gemma") else 4


def batch_with_images(family: str, case: str) -> dict[str, Tensor]:
    """Three images in two rows, each within one document and not in padding."""
    given, width = batch(case), tokens_of(family)
    ids = given["input_ids"] = given["input_ids"].clamp(max=IMAGE - 5)  # other tokens than those with a meaning
    for row, begin in ((0, 8), (1, 20), (0, 26) if "left" in case else (1, 1)):
        ids[row, begin : begin + width] = IMAGE
    given |= pixels(family, 3, width)
    if family.startswith(("qwen", "gemma")):
        given["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = (ids == IMAGE).long()
    if "qwen" in family and case == "packed":  # counted as text; and by time, height and width, in ways of their own
        counted = given["position_ids"]
        given["position_ids"] = torch.stack([counted, counted, counted // 2, counted % 5])
        if family == "qwen2_5_vl":  # where documents are said beside them
            given |= {"documents": (counted == 0).cumsum(-1), "position_ids": given["position_ids"][1:]}
    elif family == "paligemma":  # beginnings that see each other
        given["token_type_ids"] = (given.get("position_ids", torch.arange(S).expand(B, S)) >= 6).long()
    if case == "videos":  # of two frames and of one
        names = {name: name.replace("image", "video") for name in given} | {"pixel_values": "pixel_values_videos"}
        given = {names[name]: x for name, x in given.items()}
        given |= {"num_frames_per_video": torch.tensor([2, 1])} if family.startswith("gemma4") else {}
        given |= {"mm_token_type_ids": 2 * given["mm_token_type_ids"], "input_ids": ids.where(ids != IMAGE, VIDEO)}
    if case == "sounds":  # beside images
        ids[0, 30:34] = ids[1, 40:44] = SOUND
        given["input_features"] = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3)).double()
        given["input_features_mask"] = torch.ones(2, 16, dtype=torch.bool)
    return given


def documents_of(given: dict[str, Tensor]) -> Tensor | None:
    ids = given.get("position_ids")
    if ids is not None and ids.ndim == 3:
        ids = ids[0]
    return given.get("documents") if ids is None or "documents" in given else (ids == ids[0, 0]).cumsum(-1)


def kept(given: dict[str, Tensor]) -> Tensor:
    return given.get("attention_mask", torch.ones(B, S)).bool()


def apart(ours: Tensor, theirs: Tensor, least: float = 1e-12) -> float:
    """The largest difference, relative to the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item()


def summed(x: Tensor, group: Any = None) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


@dataclass(frozen=True)
class Case:
    """A step of a model.

    Attributes:
        batch: as in `batch`.
        made: builds the model of a family with an attention implementation.
        cp, dp, tp: sizes; cp of 0 has all ranks that the others leave. With dp each rank has one row of the batch.
        linears: of the plan of cp_mesh over tp; None: the plan of Transformers.
        fsdp: layers are sharded over dp and cp.
        checkpoint: layers are recomputed, by checkpoints that are reentrant or not.
        first: as in `batch`.
    """

    family: str
    batch: str = "plain"
    layout: Any = Striped()  # noqa: RUF009
    made: Any = build
    cp: int = 0
    dp: int = 1
    tp: int = 1
    linears: dict[str, Any] | None = None
    fsdp: bool = False
    checkpoint: bool | None = None
    compiled: bool = False
    first: int | None = None

    @property
    def has_images(self) -> bool:
        return self.made is build_with_images

    @property
    def given(self) -> dict[str, Tensor]:
        return batch_with_images(self.family, self.batch) if self.has_images else batch(self.batch, self.first)


Step = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Logits [B, S, V], loss and gradients, of the whole batch."""


def on_one_rank(case: Case) -> Step:
    given, model = case.given, case.made(case.family, NAME)
    # with padding to look at, Transformers looks for no documents, within which it would misplace blocks
    whole = {"attention_mask": torch.ones(B, S, dtype=torch.long)} if case.has_images else {}
    whole |= {name: x for name, x in given.items() if name != "documents"}
    logits, loss = whole_loss(model, documents_of(given), **whole)
    return logits, loss, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def over_ranks(case: Case) -> Step:
    ranks = dist.get_world_size() // case.tp
    size = case.cp or ranks // case.dp
    grid, given = mesh((ranks // size, size, case.tp), ("dp", "cp", "tp")), case.given
    data, model = grid["dp", "cp"]._flatten("data"), case.made(case.family, "eager")
    if case.tp > 1 and case.linears is None:
        shard_by_transformers(model, grid["tp"])
    options = {} if case.linears is None else {"tp": grid["tp"], "linears": case.linears}
    options |= {"data": data} if case.dp > 1 else {}
    parallelize(model, grid["cp"], layout=case.layout, gather_output=case.has_images, **options)
    layers = model.model.language_model.layers if case.has_images else getattr(model.base_model, "layers", ())
    if case.checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.checkpoint})
        assert model.is_gradient_checkpointing
    for layer in layers if case.compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    if case.fsdp:
        for layer in layers:
            fully_shard(layer, mesh=data)
        sum_gradients(fully_shard(model, mesh=data))
    place = grid["dp"].get_local_rank()
    rows = slice(place, place + 1) if case.dp > 1 else slice(None)
    with warnings.catch_warnings():
        if case.linears is not None:
            warnings.filterwarnings("error", message="FSDP2-wrapped module .* returned a view tensor")
        output = model(**{name: x[rows] for name, x in given.items()}, output_hidden_states=case.has_images or None)
    assert output.get("past_key_values") is output.get("cache") is None
    if case.has_images:
        assert output.hidden_states[0].shape[1] == S and len(output.get("image_hidden_states", range(3))) == 3
        logits = output.logits
    else:
        logits = sequence_of(model).unshard(output.logits if case.linears is None else output.logits.whole())
    every = logits.new_zeros(B, *logits.shape[1:])
    every[rows] = logits.detach()
    output.loss.backward()
    parameters, grads = dict(model.named_parameters()), dict[str, Tensor]()
    for name, x in parameters.items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        grads[name] = grad if case.fsdp else summed(grad, grid["cp"].get_group())
    if case.fsdp:
        torch.optim.SGD(parameters.values(), 0.1).step()  # before which reductions are looked at
    if case.tp > 1:
        assert sum(isinstance(x, DTensor) and x.to_local().numel() < x.numel() for x in parameters.values()) > 10
    over_dp = summed(every, grid["dp"].get_group()) if case.dp > 1 else every
    return over_dp, summed(output.loss, data.get_group() if case.dp > 1 else grid["cp"].get_group()), grads


def shard_by_transformers(model: Any, tp: Any) -> None:
    """By the plan of Transformers."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = [*dict(model.named_modules()), *(parameters := dict(model.named_parameters()))]
    plan = {name: style for name in names for key, style in model.tp_plan.items() if fnmatch(name, key)}
    for name in plan.keys() - parameters.keys():
        own = model.get_submodule(name).named_parameters(recurse=False)
        plan |= {f"{name}.{parameter}": plan[name] for parameter, _ in own}
    apply_tensor_parallelism(model, tp, plan)


def differences(case: Case, found: Step, wanted: Step, least: float) -> dict[str, float]:
    """Of logits, loss and the worst gradient; ``least``: a share of the largest gradient that small ones have at least.

    Some, as of biases of keys, are only rounding.
    """
    real, (logits, loss, grads), (whole, whole_loss, whole_grads) = kept(case.given), found, wanted
    assert len(whole_grads) > 5 and whole_grads.keys() <= grads.keys()
    towers = (
        bool(x.any()) for name, x in whole_grads.items() if not name.startswith(("model.language_model", "lm_head"))
    )
    assert not case.has_images or sum(towers) > 5
    largest = max(x.abs().max().item() for x in whole_grads.values())
    worst = max(apart(grads[name], x, least * largest) for name, x in whole_grads.items())
    return {"logits": apart(logits[real], whole[real]), "loss": apart(loss, whole_loss), "gradient": worst}


def compare(rank: int, *cases: Case) -> list[tuple[Case, dict[str, float]]]:
    """How far cases are from the oracle."""
    least = {"bert": 1e-9}  # its biases of keys have gradients of rounding alone
    found = []
    for x in cases:  # Gemma 4 pools patches in float32, Qwen3.5 normalises
        with Wide() if x.has_images and x.family.startswith(("gemma4", "qwen3_5")) else nullcontext():
            found.append((x, differences(x, over_ranks(x), on_one_rank(x), least.get(x.family, 1e-12))))
    return found
