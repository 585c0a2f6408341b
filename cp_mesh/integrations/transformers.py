"""`parallelize`: context parallelism for a model of Transformers, with what the model itself says of its attention.

The root's forward is replaced. It reads documents and padding of the *whole* batch, shifts labels, shards, and keeps
the `Batch` in a context variable while the model runs. Transformers asks `make_mask` once for every kind of mask, and
hands the answer to each layer as its attention_mask: a `Rows`, which `attend` reads. So a layer that is recomputed in
the backward sees the same object, and one that is compiled needs no context.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from cp_mesh.attention import Asked, attention, check_asked
from cp_mesh.errors import UnsupportedError, describe, refuse
from cp_mesh.forwards import STYLE, replace_forward
from cp_mesh.guard.reductions import watch_first_step
from cp_mesh.guard.watching import unwatched, watch_encoders, watched
from cp_mesh.kernels.combine import accumulation_dtype
from cp_mesh.layouts import Layout, ZigZag
from cp_mesh.loss import cross_entropy, ranks_of
from cp_mesh.masks import Mask, batch_mask, document_positions
from cp_mesh.root import ShardedModel
from cp_mesh.sequence import ROOT, Root, ShardedSequence
from cp_mesh.styles import announce, claim
from cp_mesh.trained import WAITING, Loss

NAME = "cp_mesh"
"""Of the attention implementation."""
IGNORED = -100
KINDS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
"""Kinds of layers, as configs name them, that mix rows by attention alone."""
HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")
"""How the names of classes end whose outputs are rows of the sequence."""
MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase)
_WORDS = ("mamba", "rwkv", "recurrent", "deltanet", "linearattention", "shortconv", "indexer", "ngram", "hyena")
_INPUTS = ("input_ids", "inputs_embeds", "token_type_ids")
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_TAKEN = {*_INPUTS, *_PACKED, "position_ids", "attention_mask", "documents", "labels", "shift_labels"}
_TAKEN |= {"num_items_in_batch", "output_hidden_states", "output_router_logits", "fused_lm_head"}
# Arguments of attention that change nothing about the scores, or that the mask says already.
_HARMLESS = {*_PACKED, "position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions"}
_HARMLESS |= {"output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "deterministic"}
_LAST = "_cp_mesh_sequence"


class _Unreadable(UnsupportedError, AttributeError):
    """Of an attribute of `Rows`, for which `hasattr` must be False."""


@dataclass(frozen=True)
class Rows:
    """What travels as attention_mask: all that a layer's call of attention is told beside q, k and v.

    Attributes:
        sequence: of this batch, with its length.
        mask: of the padded sequence.
        options: keywords of `cp_mesh.attention`.
        seed: int64 [1], for dropout, another in every step; layers add their index.
    """

    sequence: ShardedSequence
    mask: Mask
    options: dict[str, Any]
    seed: Tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise _Unreadable(
            describe("Transformers", "layers that hand attention_mask on", f"one that reads its {name!r}", _LEAVE)
        )

    def __getitem__(self, index: Any) -> NoReturn:
        self.__getattr__("__getitem__")


_LEAVE = "this model changes its masks itself, so it is not available"


class Said(NamedTuple):
    """What a mask function of Transformers says."""

    causal: bool
    window: int | None
    chunk: int | None


@dataclass
class Batch:
    """One forward of a root.

    Attributes:
        sequence: with the length of the batch, in its layout.
        documents, key_padding: of the whole sequence, as in `Mask`.
        positions: [B, S] or [S], where chunks are counted from.
        options, seed: as in `Rows`.
        kept: [B, S_local], 1 of tokens that are no padding; of models with a loss of routers.
        made: a `Rows` for each kind of mask.
        calls: of attention, in eager layers.
        loss, version: what the model's loss function returned, and that of the tensor.
    """

    sequence: ShardedSequence
    documents: Tensor | None
    key_padding: Tensor | None
    positions: Tensor
    options: dict[str, Any]
    seed: Tensor
    kept: Tensor | None = None
    made: dict[Said, Rows] = field(default_factory=dict)
    calls: int = 0
    loss: Tensor | None = None
    version: int = 0

    def rows(self, said: Said) -> Rows:
        if said not in self.made:
            documents = self.documents
            if said.chunk is not None:
                chunks = self.positions.div(said.chunk, rounding_mode="floor").cpu()
                chunks -= chunks.min()
                inside = chunks if documents is None else documents * (int(chunks.max()) + 1) + chunks
                documents = inside if documents is None else inside.where(documents >= 0, Mask.EXCLUDED)
            window = None if said.window is None else (said.window, 0 if said.causal else said.window)
            mask = self.sequence.mask(Mask(said.causal, window, documents, self.key_padding))
            self.made[said] = Rows(self.sequence, mask, self.options, self.seed)
        return self.made[said]


BATCH: ContextVar[Batch | None] = ContextVar("cp_mesh_transformers", default=None)


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    data: DeviceMesh | dist.ProcessGroup | None = None,
    layout: Layout | Literal["balanced"] = ZigZag(),  # noqa: B008 - frozen
    gather_output: bool = False,
    dropout_seed: int = 0,
    watch: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Make a model of Transformers take whole batches and compute with this rank's rows of them.

    Windows, chunks, softcaps, sinks, scales and dropout are those of the model. In a call

    - ``input_ids``, ``inputs_embeds``, ``token_type_ids``, ``labels`` are of the whole batch, [B, S, ...] and equal on
      all cp ranks; S may differ from call to call, and is padded as the layout needs;
    - packed documents come as ``position_ids`` that begin anew (without an ``attention_mask``, as in Transformers), as
      ``cu_seq_lens_q`` of one batch row, or as ``documents``, ids [B, S]; without ``position_ids`` the last two count
      positions in each document;
    - ``attention_mask`` [B, S] is padding;
    - ``labels`` are shifted before they are sharded where the model predicts the next token, and ``shift_labels`` are
      taken as they are. ``loss`` is this rank's share: the sum over the ranks of ``data`` is the mean over all tokens,
      or with ``num_items_in_batch`` the sum over this number. Gradients are summed too: `cp_mesh.sum_gradients`;
    - there is no cache, and logits are those of this rank's rows: `sequence_of` tells which.

    Checkpointing, compiled layers and FSDP2 come after this, and a tp plan of Transformers before.

    Args:
        model: changed in place, and its attention implementation set to "cp_mesh".
        mesh: the cp axis, as in `ShardedSequence`.
        data: the ranks that hold distinct tokens, over which the loss is a mean; None: those of ``mesh``.
        layout: of the rows; "balanced" makes one for each batch of packed documents, and is zigzag for others.
        gather_output: whole logits and hidden states on every rank, as in `ShardedModel`.
        dropout_seed: of attention's dropout, equal on all ranks. Which weights are dropped depends on it, on the
            layer, the forward, the pair of positions, and the cp group among those of ``data``.
        watch: as in `ShardedModel`.
        **options: kernel, method, transport, ulysses_degree, inner_ring_size, head_chunks, deterministic, as in
            `cp_mesh.attention`.

    Returns:
        The model.

    Raises:
        ArgumentError, UnsupportedError: here, if a layer of the model mixes rows in another way than by attention of
            AttentionInterface; in the call, of arguments and masks that cannot be read. The message names the layer,
            and the setting to change.

    Example:
        >>> model = parallelize(AutoModelForCausalLM.from_config(config), mesh["cp"])  # doctest: +SKIP
        >>> model(input_ids=tokens, labels=tokens).loss.backward()  # doctest: +SKIP
    """
    of_batch = layout == "balanced"
    if not of_batch and not isinstance(layout, Layout):
        refuse("layout", "a Layout", repr(layout), 'ZigZag(), or "balanced"')
    sequence = ShardedSequence(mesh, ZigZag() if of_batch else layout)  # type: ignore[arg-type]
    check_model(model)
    check_asked(Asked(**options))
    adapter = _Adapter(sequence, of_batch, data or sequence.mesh, gather_output, dropout_seed, watch, options, model)
    claim(model, sequence.mesh, sequence, adapter.style)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    model.set_attn_implementation(NAME)
    model.loss_function = adapter.loss
    replace_forward(model, STYLE, "cp_mesh.integrations.transformers.parallelize", adapter.run)
    if watch:
        watch_encoders(model)
    watch_first_step(model, sequence.mesh)
    return model


def replica_of(mesh: DeviceMesh, data: DeviceMesh | dist.ProcessGroup) -> int:
    """The index of this rank's cp group among those of ``data``, by the place of their first ranks; alike over tp.

    Raises:
        ArgumentError: if ``data`` has not all ranks of the group.
    """
    ranks = data.mesh.flatten().tolist() if isinstance(data, DeviceMesh) else dist.get_process_group_ranks(data)
    own = set(ranks_of(mesh))
    if not own <= set(ranks):
        hint = 'pass the mesh of all ranks with other tokens, mesh["dp", "cp"]._flatten("dp_cp")'
        refuse("data", f"ranks {sorted(own)} of cp among its own", ranks, hint)
    places = [place for place, rank in enumerate(ranks) if rank in own]
    of_group = {place - places[0] for place in places}  # and so far apart are the ranks of every other group
    first, seen = [], set[int]()
    for place in range(len(ranks)):
        if place not in seen:
            first.append(place)
            seen |= {place + apart for apart in of_group}
    return first.index(places[0])


def sequence_of(model: nn.Module) -> ShardedSequence:
    """The sequence of the model's last batch: ``sequence_of(model).unshard(output.logits)`` are the whole logits.

    Raises:
        ArgumentError: of a model that had none.
    """
    found: ShardedSequence | None = model.__dict__.get(_LAST)
    if found is None:
        refuse("sequence_of", "a model after its first forward", type(model).__name__, "call it first")
    return found


def check_model(model: nn.Module) -> None:
    """Refuse a model of which some layer mixes rows otherwise than by attention that `attend` would see."""
    if not isinstance(model, PreTrainedModel):
        hint = "of a wrapper pass what it wraps, such as peft_model.base_model.model"
        refuse("parallelize", "a PreTrainedModel", type(model).__name__, hint)
    check_config(model.config, type(model).__name__)
    reason = None
    if "position_ids" not in _names(model):
        reason = "a forward without position_ids, which counts this rank's rows from 0", "it is not available"
    else:
        reason = _other_mixer(model, model.config.get_text_config())
    if reason is not None:
        _refuse_model(type(model).__name__, *reason)


def check_config(config: Any, name: str) -> None:
    """Refuse what a config says, and the name of the class of a model."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        _refuse_model(name, "attention of a decoder to an encoder", "cross-attention is not available")
    if found := [x for x in vars(config) if x.endswith(("vision_config", "audio_config", "vq_config"))]:
        got = f"{found[0]}: blocks of an image's tokens, and positions of several dims"
        _refuse_model(name, got, "use the text model alone")
    if (text := config.get_text_config()) is not config:
        _refuse_model(name, f"a {type(config).__name__}, of more than a text", "use the text model alone")
    if "mrope_section" in (getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}):
        _refuse_model(name, "mrope_section: positions of several dims", "use a text model")
    if found := sorted(set(getattr(text, "layer_types", None) or ()) - KINDS):
        _refuse_model(name, f"layer_types {', '.join(found)}", f"{', '.join(sorted(KINDS))} are available")
    if not name.endswith(HEADS):
        got = "a class whose outputs may not be rows"
        _refuse_model(name, got, f"classes named ...{', ...'.join(HEADS)} are available")


def _refuse_model(name: str, got: str, hint: str) -> NoReturn:
    refuse(f"parallelize({name})", "attention alone to mix rows", got, hint, UnsupportedError)


def _other_mixer(model: PreTrainedModel, text: Any) -> tuple[str, str] | None:
    attending = 0
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MIXERS) or any(word in kind.lower() for word in _WORDS):
            return f"{path}, a {kind}", "it mixes the rows of a shard"
        if path.rpartition(".")[2] == "pooler":
            return f"{path}, a {kind}", "it reads the first row: pass add_pooling_layer=False"
        attending += "ALL_ATTENTION_FUNCTIONS" in _used(module)
    wanted = getattr(text, "num_hidden_layers", None)
    if wanted is None or attending < wanted:
        got = f"{attending} modules that call AttentionInterface, and num_hidden_layers={wanted}"
        return got, "the others attend by code of their own, or not at all"
    return None


def _used(module: nn.Module) -> tuple[str, ...]:
    """Names that a module's forward reads, as its class wrote it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _names(model: nn.Module) -> set[str]:
    """Arguments of the model's forward, and of those that it hands its keywords on to."""
    found: set[str] = set()
    for module in (model, getattr(model, "base_model", model)):
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
        found |= {x.name for x in parameters if x.kind is not x.VAR_KEYWORD}
    return found - {"self"}


class _Adapter:
    """What a parallel model runs instead of its forward. Copies of the model share it, as it holds process groups."""

    def __init__(
        self,
        sequence: ShardedSequence,
        of_batch: bool,
        data: DeviceMesh | dist.ProcessGroup,
        gather_output: bool,
        dropout_seed: int,
        watch: bool,
        options: dict[str, Any],
        model: PreTrainedModel,
    ) -> None:
        self.sequence, self.of_batch, self.data, self.gather_output = sequence, of_batch, data, gather_output
        self.options, self.dropout_seed, self.steps = options, dropout_seed, 0
        self.replica = replica_of(sequence.mesh, data)
        self.balances: bool | None = None
        self.compared = False
        compared = (*_INPUTS, "attention_mask", "documents", "cu_seq_lens_q", "shift_labels")
        self.style = ShardedModel(sequence, inputs=compared, positions="position_ids", watch=watch)
        forward = inspect.unwrap(type(model).forward)
        self.names = [name for name in inspect.signature(forward).parameters if name != "self"]
        self.accepted = _names(model)
        self.causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        self.has_loss = "loss_function" in forward.__code__.co_names
        self.counted = [type(x).__name__ for x in model.modules() if "create_position_ids_from_input_ids" in _used(x)]
        self.layers = model.config.get_text_config().num_hidden_layers

    def __copy__(self) -> _Adapter:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Adapter:
        return self

    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The root's forward on this rank's rows."""
        return self.run_eagerly(torch.compiler.is_compiling(), module, forward, *args, **kwargs)

    @torch.compiler.disable(reason="compile the layers of a parallel model, not the whole")
    def run_eagerly(
        self, traced: bool, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            if traced:
                hint = "for layer in model.model.layers: layer.compile()"
                refuse(type(module).__name__, "layers that are compiled", "the whole", hint, UnsupportedError)
            given = dict(zip(self.names, args, strict=False)) | kwargs
            whole = self.read(module, {name: x for name, x in given.items() if x is not None})
            batch, arguments = self.shard(module, whole)
        except Exception as error:
            announce(self.sequence, error)
            raise
        self.style.compare(whole)
        assert batch.sequence.seq_len is not None
        root = Root(batch.sequence, batch.sequence.seq_len)
        tokens = ROOT.set(root), BATCH.set(batch)
        try:
            if fused := whole.get("fused_lm_head", False):
                forward = partial(_log_probabilities, forward, self.data)
            has_loss = self.has_loss or fused
            labels = arguments.get("labels") if has_loss else arguments.pop("labels", None)
            output = self.style.run_eagerly(root, module, forward, arguments)
            if labels is not None and not has_loss:
                output["loss"] = self.loss(output["logits"], labels, None, whole.get("num_items_in_batch"))
            if batch.kept is not None:
                self.balance(module, batch, batch.kept, output)
            self.check_output(module, batch, output, labels is not None and not fused)
        except Exception as error:
            announce(self.sequence, error)
            raise
        finally:
            ROOT.reset(tokens[0])
            BATCH.reset(tokens[1])
        module.__dict__[_LAST] = batch.sequence
        return self.style.gather(batch.sequence, output) if self.gather_output else output

    def read(self, module: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the whole batch, with labels shifted, and documents and positions where the batch tells them."""
        where = type(module).__name__
        for name, hint in _REFUSED.items():
            if isinstance(x := given.pop(name, None), Tensor) or x not in (None, False, 0):
                refuse(where, f"no {name}", x if isinstance(x, int | float | str) else type(x).__name__, hint)
        if given.pop("return_dict", True) is not True:
            refuse(where, "return_dict=True", False, "outputs are read by name")
        if unknown := sorted(given.keys() - _TAKEN):
            hint = "whether they hold rows of the sequence is not known; leave them out"
            refuse(where, f"arguments among {', '.join(sorted(_TAKEN))}", ", ".join(unknown), hint, UnsupportedError)
        tokens = [given[name] for name in _INPUTS[:2] if name in given]
        if len(tokens) != 1:
            refuse(where, "either input_ids or inputs_embeds", f"{len(tokens)} of them", "pass one, of the whole batch")
        size, device = tokens[0].shape[:2], tokens[0].device
        for name in ("attention_mask", "documents", "labels", "shift_labels", "token_type_ids"):
            if name in given and given[name].shape != size:
                hint = "pass the whole batch; a mask of pairs cannot be read, documents=ids [B, S] can"
                refuse(f"{where}: {name}", f"[B, S] = {list(size)}", list(given[name].shape), hint)
        if "position_ids" in given and (ids := given["position_ids"]).shape not in (size, (1, size[1])):
            hint = "of the whole batch; positions of several dims (mRoPE) are not available"
            refuse(f"{where}: position_ids", f"[B, S] = {list(size)}, or [1, S]", list(ids.shape), hint)
        if "labels" in given and "shift_labels" not in given:
            labels = given.pop("labels")
            given["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:] if self.causal else labels
        if (cu_seqlens := given.get("cu_seq_lens_q")) is not None:
            documents = Mask.from_cu_seqlens(cu_seqlens).documents
            if size[0] != 1 or documents is None or documents.shape[-1] != size[1]:
                refuse(f"{where}: cu_seq_lens_q", f"ends at {size[1]} in one batch row", list(size), "or documents=ids")
            given.setdefault("documents", documents[None].to(device))
        if "documents" in given:
            given.setdefault("position_ids", document_positions(given["documents"]))
        elif "position_ids" in given and "attention_mask" not in given:
            given["documents"] = batch_mask(position_ids=given["position_ids"]).documents
        if self.counted and "position_ids" not in given:
            hint = "pass position_ids of the whole batch, [B, S], as the model would count them"
            refuse(where, f"position_ids, which {self.counted[0]} counts from tokens", None, hint)
        given.setdefault("position_ids", torch.arange(size[1], device=device)[None])
        return given

    def shard(self, module: Any, whole: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        """The batch, and the model's arguments for this rank's rows."""
        positions, padding, documents = whole["position_ids"], whole.get("attention_mask"), whole.get("documents")
        length, labels, key_padding = positions.shape[1], whole.get("shift_labels"), None
        counted = positions if documents is not None else torch.arange(length, device=positions.device)
        if padding is not None:
            padding = padding.long()
            if documents is None and not bool(padding[:, 0].all()):
                counted = counted - (padding.cumsum(-1) == 0).sum(-1, keepdim=True)  # chunks begin behind left padding
            if labels is not None and bool(((labels != IGNORED) & (padding == 0)).any()):
                key_padding, of_batch = padding.bool(), Mask(documents=documents)  # rows that count see what they may
            else:
                of_batch = batch_mask(attention_mask=padding, documents=documents)
        else:
            of_batch = Mask(documents=documents)
        documents = of_batch.documents
        sequence = self.sequence.for_batch(length, of_batch if self.of_batch and documents is not None else None)
        arguments = {name: whole[name] for name in ("output_hidden_states",) if name in whole}
        for name in _INPUTS:
            if name in whole:
                # what is named input_ids is compared with labels as the next tokens
                key = name if self.causal else f"{name} of no next tokens"
                arguments[name] = sequence.shard({key: whole[name]}, pad_value=0)[key]
        self.check_lengths(module.config.get_text_config(), sequence, positions)
        arguments["position_ids"] = sequence.shard({"position_ids": positions})["position_ids"]
        if "cache_position" in self.accepted:
            arguments["cache_position"] = sequence.positions(device=positions.device)
        if "use_cache" in self.accepted:
            arguments["use_cache"] = False
        if "shift_labels" in whole:
            arguments["labels"] = sequence.shard({"labels": whole["shift_labels"]})["labels"]
            if "num_items_in_batch" in whole and self.has_loss:
                arguments["num_items_in_batch"] = whole["num_items_in_batch"]
        self.steps += module.training
        seed = sequence.dropout_seed(self.steps, self.dropout_seed, self.replica, positions.device)
        batch = Batch(sequence, documents, key_padding, counted, self.options, seed)
        if whole.get("output_router_logits", getattr(module.config.get_text_config(), "output_router_logits", False)):
            if "fused_lm_head" in whole:
                hint = "router_aux_loss_coef=0.0 in SFTConfig"
                refuse(type(module).__name__, "TRL's head without output_router_logits", True, hint, UnsupportedError)
            self.check_router(module)
            arguments["output_router_logits"] = True
            size = (*whole[next(name for name in _INPUTS if name in whole)].shape[:1], length)
            real = torch.ones(size, dtype=torch.long, device=positions.device) if padding is None else padding
            batch.kept = sequence.shard({"attention_mask": real})["attention_mask"]
        return batch, arguments

    def check_lengths(self, config: Any, sequence: ShardedSequence, positions: Tensor) -> None:
        """Refuse a length from which on the model would read another one from this rank's rows."""
        scale = getattr(config, "floor_scale", None) if getattr(config, "attn_temperature_tuning", False) else None
        if scale and positions.shape[1] >= scale and "cache_position" not in self.accepted:
            hint = "config.attn_temperature_tuning = False, or shorter batches: layers count the rows of a shard"
            refuse(
                "attn_temperature_tuning", f"fewer than {int(scale)} tokens", positions.shape[1], hint, UnsupportedError
            )
        for kind, known in _growing_ropes(config):
            assert sequence.seq_len is not None
            padded, size = F.pad(positions, (0, sequence.seq_len - positions.shape[1])), sequence.cp_size
            rows = [sequence.layout.positions(sequence.seq_len, size, rank) for rank in range(size)]
            longest = [int(padded[:, x.to(padded.device)].max()) + 1 for x in rows]
            if max(longest) > known and (kind == "dynamic" or min(longest) <= known):
                hint = "shorter documents; or layout=Striped(), where every rank has late positions"
                expected = (
                    f"{known} positions at most, or more on every rank" if kind == "longrope" else f"{known} positions"
                )
                refuse(f"rope_type={kind!r}", expected, f"{longest} on the ranks", hint, UnsupportedError)

    def loss(
        self, logits: Tensor, labels: Tensor, vocab_size: Any = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """In the place of the model's loss_function: this rank's share, of labels that are shifted already."""
        batch = BATCH.get()
        if batch is None:
            refuse(
                "loss_function", "a call in the forward of a parallel model", "one outside", "see cp_mesh.cross_entropy"
            )
        share = cross_entropy(logits, labels, self.data, ignore_index=IGNORED, count=num_items_in_batch)
        with torch.inference_mode(False):  # its version is read, which tensors of inference have not
            batch.loss = share.clone() if share.is_inference() else share
        batch.version = batch.loss._version
        return batch.loss if batch.kept is None else batch.loss.clone()  # to which the model adds its routers' loss

    def check_router(self, module: Any) -> None:
        """Refuse a model whose loss of routers is not `balancing_loss`, by an example."""
        if self.balances is None:
            files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)  # FSDP2 puts a class before it
            found = (getattr(file, "load_balancing_loss_func", None) for file in files)
            function = next(filter(None, found), lambda *_: torch.nan)
            logits = tuple(torch.linspace(-1, 2, 24).view(6, 4).roll(i, 1).sin() for i in range(2))
            kept = torch.tensor([[1, 1, 0], [1, 1, 1]])
            try:
                theirs = float(function(logits, 4, 2, kept))
            except Exception:  # of a function with other arguments
                theirs = torch.nan
            self.balances = abs(float(balancing_loss(logits, 2, kept)) - theirs) < 1e-6
        missing = [name for name in ("num_experts_per_tok", "router_aux_loss_coef") if not hasattr(module, name)]
        if not self.balances or missing:
            what = "the load-balancing loss of Mixtral, a product of means over all rows"
            got = f"a model without {' and '.join(missing)}" if self.balances else "another loss of routers"
            refuse(type(module).__name__, what, got, f"{_ROUTER} = False", UnsupportedError)

    def balance(self, module: Any, batch: Batch, kept: Tensor, output: Any) -> None:
        """The routers' loss of all rows in the place of that of this rank's rows, as a share.

        Other terms of the model's loss are looked for in its first call. Ranks tell what they found in the sum of their
        rows, so that all of them refuse or none.
        """
        known, wrong = batch.loss, None
        if known is not None and not self.compared:
            known = known + module.router_aux_loss_coef * output["aux_loss"]
            wrong = ~torch.isclose(output["loss"], known, rtol=1e-4, equal_nan=True)

        def total(sums: Tensor) -> Tensor:
            nonlocal wrong
            if wrong is None:
                return batch.sequence.all_reduce(sums)
            sums = batch.sequence.all_reduce(torch.cat([sums, wrong.to(sums)[None]]))
            wrong = sums[-1]
            return sums[:-1]

        loss = balancing_loss(output["router_logits"], module.num_experts_per_tok, kept, total)
        if wrong is not None and bool(wrong):
            hint = "pass no labels and take cp_mesh.cross_entropy of the logits"
            refuse(type(module).__name__, "the losses of labels and of routers", "one with other terms", hint)
        self.compared |= wrong is not None
        share = loss / len(ranks_of(self.data))
        if batch.loss is not None:
            output["loss"] = batch.loss = batch.loss + module.router_aux_loss_coef * share
        output["aux_loss"] = share

    def check_output(self, module: nn.Module, batch: Batch, output: Any, has_labels: bool) -> None:
        """Refuse what the model computed of this rank's rows alone, as far as its output shows it."""
        compiled = any(part._compiled_call_impl is not None for part in module.modules())
        if batch.calls < self.layers and not compiled:
            got = f"{batch.calls} calls of attention in {self.layers} layers"
            hint = "the others saw the rows of one shard; this model is not available"
            refuse(type(module).__name__, "one in every layer", got, hint, UnsupportedError)
        changed = batch.kept is None and batch.loss is not None and batch.loss._version != batch.version
        if has_labels and (output.get("loss") is not batch.loss or changed):  # of routers `balance` compared it
            hint = f"pass no labels and take cp_mesh.cross_entropy of the logits; or switch the term off, as {_ROUTER}"
            refuse(
                type(module).__name__, "the loss of the labels alone", "one with other terms", hint, UnsupportedError
            )


def _log_probabilities(
    forward: Callable[..., Any], data: DeviceMesh | dist.ProcessGroup, *, labels: Tensor, **arguments: Any
) -> Any:
    """The forward that TRL gives to models, on labels that are shifted already.

    Its loss is left out: a mean over this rank's rows. That of its trainers is a sum of the log-probabilities, divided
    by the tokens of all ranks.
    """
    output = forward(shift_labels=labels, fused_lm_head=True, **arguments)
    if WAITING and output.log_probs.requires_grad:
        loss = Loss(data)
        output.log_probs.register_hook(lambda grad: loss.begin(grad.new_ones(())))
    return type(output)(**{name: x for name, x in output.items() if name != "loss"})


def _growing_ropes(config: Any) -> Iterator[tuple[str, int]]:
    """Kinds of rotary embeddings that depend on the largest position, and the one from which on they do."""
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (told, *(x for x in told.values() if isinstance(x, dict))):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "dynamic":
            yield kind, config.max_position_embeddings
        elif kind == "longrope":
            known = rope.get("original_max_position_embeddings")
            yield kind, known or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)


def balancing_loss(
    router_logits: tuple[Tensor, ...], top_k: int, kept: Tensor, total: Callable[[Tensor], Tensor] = torch.clone
) -> Tensor:
    """The load-balancing loss of routers (arXiv:2101.03961, equations 4 to 6), over the rows of all layers.

    Args:
        router_logits: of each layer, [..., E], as many rows as there are in ``kept``.
        top_k: experts of a token.
        kept: 1 of rows that count, else 0.
        total: the sum over ranks.
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


_ROUTER = "model.config.output_router_logits"
_REFUSED = {
    "past_key_values": "a cache of this rank's rows; cp_mesh.decode reads sharded ones",
    "use_cache": "pass use_cache=False: a cache would hold this rank's rows",
    "logits_to_keep": "leave it out: the last rows of a shard are not those of the sequence",
    "output_attentions": "leave it out: weights are never held",
    "cache_position": "leave it out: pass position_ids of the whole batch",
}


def make_mask(*, mask_function: Callable[..., Any], use_vmap: bool = False, **kwargs: Any) -> Rows:
    """What `AttentionMaskInterface` asks for: once for each kind of mask in a forward.

    Args:
        mask_function: of (batch row, head, query, key); read by its name and what it closes over, not called, since
            here its indices are those of a shard.
        use_vmap: whether the model combined it with one of its own.
    """
    batch = BATCH.get()
    if batch is None:
        hint = "call the model that cp_mesh.integrations.transformers.parallelize returned, not a part of it"
        refuse("attn_implementation='cp_mesh'", "a forward of the parallel root", "another call", hint)
    if use_vmap:
        hint = "its or_mask_function or and_mask_function asks pairs of rows; the model's config must not need one"
        refuse("Transformers: mask", "one of masking_utils alone", "use_vmap=True", hint, UnsupportedError)
    return batch.rows(read_mask(mask_function))


def read_mask(mask_function: Callable[..., Any]) -> Said:
    """What a mask function made by `transformers.masking_utils` says.

    Raises:
        UnsupportedError: of one that is not in the list: the model's own, or blocks that see each other.
    """
    causal, windows, chunks = None, set(), set()
    for name, cells in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "bidirectional_mask_function":
            causal = bool(causal)
        elif name == "sliding_window_overlay":
            windows.add(cells["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            windows.add(cells["sliding_window"])
        elif name == "chunked_overlay":
            chunks.add(cells["chunk_size"])
        elif (
            name != "packed_sequence_mask_function"
        ):  # which reads positions of this rank's rows; the batch's are known
            hint = (
                "only causal, bidirectional, sliding and chunked masks are read; the model's config must ask for these"
            )
            refuse("Transformers: mask_function", "one of masking_utils", name, hint, UnsupportedError)
    if causal is None or len(windows) > 1 or len(chunks) > 1:
        refuse("Transformers: mask_function", "one window or chunk at most", (causal, windows, chunks), _LEAVE)
    return Said(causal, *(next(iter(found), None) for found in (windows, chunks)))


def _parts(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a mask function the names of its conjuncts, and what they close over."""
    inside = getattr(function, "__module__", None) == transformers.masking_utils.__name__
    name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
    if inside and name == "and_masks":
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif inside and name == "remap_positions_for_packed_sequence":
        yield from _parts(held["mask_function"])
    else:
        yield (name if inside else f"{getattr(function, '__module__', '')}.{name}"), held


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rows | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` calls in every layer.

    Args:
        query, key, value: [B, H or K, S_local, D].
        attention_mask: what `make_mask` returned.
        dropout, scaling, is_causal, sliding_window, softcap, s_aux: as Transformers passes them.

    Returns:
        [B, S_local, H, D], and no weights.
    """
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f" of layer {layer}")
    if not isinstance(attention_mask, Rows):
        hint = "this layer takes no mask of masking_utils, so what it sees is not known"
        refuse(where, "the mask of the batch", type(attention_mask).__name__, hint, UnsupportedError)
    mask = attention_mask.mask
    if unknown := sorted(name for name, x in kwargs.items() if x is not None and name not in _HARMLESS):
        hint = "what these do to the scores is not known, or is said of this rank's rows"
        refuse(where, "arguments of attention that are known", ", ".join(unknown), hint, UnsupportedError)
    if query.shape[2] != key.shape[2]:
        got = f"{query.shape[2]} queries, {key.shape[2]} keys"
        refuse(where, "self-attention", got, "a cache or cross-attention is not available", UnsupportedError)
    stated = is_causal or getattr(module, "is_causal", None)  # an argument False may mean that the mask says it
    if stated is not None and bool(stated) != mask.causal:
        refuse(f"{where}: is_causal", mask.causal, stated, "as the model's mask says; change the config")
    if (sliding_window is None) != (mask.window is None):
        got = f"{mask.window} in its mask"
        refuse(
            f"{where}: sliding_window", sliding_window, got, "say one in the config, in sliding_window or layer_types"
        )
    seed = None
    if dropout:
        if layer is None:
            refuse(where, "a layer_idx, for the seed of its dropout", None, "set attention_dropout = 0 in the config")
        seed = attention_mask.seed + layer
    if not torch.compiler.is_compiling() and (batch := BATCH.get()) is not None:
        batch.calls += 1
    sequence = attention_mask.sequence
    with unwatched() if watched() else nullcontext():
        out = attention(
            query,
            key,
            value,
            mesh=sequence.mesh,
            seq_dim=2,
            seq_len=sequence.seq_len,
            layout=sequence.layout,
            mask=mask,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            dropout_p=dropout,
            dropout_seed=seed,
            **attention_mask.options,
        )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None
