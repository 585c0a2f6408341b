"""`parallelize`, and the forward that it gives a model: shard the whole batch and run the model on local rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from cp_mesh._torch import COMPILED_CALL
from cp_mesh.call.spec import make_spec
from cp_mesh.comm.agreement import note_styles, refusing
from cp_mesh.comm.groups import ranks_of
from cp_mesh.errors import UnsupportedError, refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.integrations.transformers.families import Facts, check_lengths, check_model, plan_over_tp
from cp_mesh.integrations.transformers.indexed import apply as apply_indexers
from cp_mesh.integrations.transformers.inputs import COMPARED, ROWS, read, visible
from cp_mesh.integrations.transformers.latents import check_latents, leave_latents
from cp_mesh.integrations.transformers.losses import ModelLosses
from cp_mesh.integrations.transformers.masks import NAME, Batch, Said, register
from cp_mesh.integrations.transformers.mixers import apply as apply_mixers
from cp_mesh.integrations.transformers.mixers import masks_of_layers
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.checks.coverage import current_mode, suspended, watch_encoders
from cp_mesh.training.checks.gradients import watch_first_step
from cp_mesh.training.parallelize import parallelize as apply_plan
from cp_mesh.training.sharded_model import ShardedModel
from cp_mesh.wrap import INPUT, STYLE, check_module, replace_forward

_LAST = "_cp_mesh_sequence"
OF_IMAGES = ("image_outputs", "video_outputs", "image_hidden_states", "video_hidden_states", "rope_deltas")
"""Output entries, by their names in Transformers 5.24 and before, that do not hold rows of the sequence."""
_OF_TEXT = (
    *("inputs_embeds", "position_ids", "attention_mask", "use_cache", "return_dict"),
    *("output_hidden_states", "num_items_in_batch", "visual_pos_masks", "deepstack_visual_embeds"),
    *("per_layer_inputs", "output_router_logits"),
)
"""Known arguments of a text tower."""
_NOT_OVER_TP = ("inputs_embeds", "output_hidden_states", "fused_lm_head")


def parallelize(
    model: PreTrainedModel,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    data: DeviceMesh | dist.ProcessGroup | None = None,
    tp: DeviceMesh | None = None,
    linears: Mapping[str, Any] | None = None,
    layout: Layout | Literal["auto", "balanced"] = "auto",
    gather_output: bool = False,
    dropout_seed: int = 0,
    watch: bool = True,
    latent_keys: bool | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Make a model of Transformers take whole batches and compute this rank's rows of them.

    Windows, chunks, softcaps, sinks, scales and dropout are those of the model. In a call

    - ``input_ids``, ``inputs_embeds``, ``token_type_ids``, ``labels`` are of the whole batch, [B, S, ...] and equal on
      all cp ranks; S may differ from call to call, and is padded as the layout needs;
    - packed documents are given by ``position_ids`` that restart (without an ``attention_mask``, as in Transformers),
      by ``cu_seq_lens_q`` of one batch row, or by ``documents``, ids [B, S]. With the last two, ``position_ids`` may be
      left out and are counted in each document;
    - ``attention_mask`` [B, S] is padding;
    - images and their arguments are those of the whole batch: every rank encodes all images, and the text tower gets
      this rank's rows. ``position_ids`` may be [3 or 4, B, S] if the model takes such;
    - ``labels`` are shifted before they are sharded if the model predicts the next token; ``shift_labels`` are not
      shifted. ``loss`` is this rank's share: the sum over the ranks of ``data`` is the mean over all tokens, or with
      ``num_items_in_batch`` the sum divided by it. Gradients must be summed, too: `cp_mesh.sum_gradients`;
    - there is no cache, and logits are those of this rank's rows; `sequence_of` returns their sequence.

    Apply checkpointing, compilation of layers and FSDP2 after this. For tensor parallelism pass ``tp``, or apply a tp
    plan of Transformers before this.

    Args:
        model: changed in place; its attention implementation becomes "cp_mesh".
        mesh: the cp axis, as in `ShardedSequence`.
        data: the ranks that hold distinct tokens, over which the loss is a mean; None: the ranks of ``mesh``.
        tp: the tp axis, whose ranks hold the same tokens. `tensor_parallel_plan` shards linears over it, and each
            rank computes some heads. The loss is computed over shards of the vocabulary, in chunks of rows, so
            ``logits`` is an argument for `cp_mesh.cross_entropy`; ``logits.whole()`` returns logits of local rows.
        linears: with ``tp``, mode, recompute_all_gather and transport of that plan.
        layout: as in `ShardedSequence`. "auto" keeps packed documents whole where it can, and is zigzag for other
            batches; "balanced" is its older name.
        gather_output: return whole logits and hidden states on every rank, as in `ShardedModel`.
        dropout_seed: seed of attention's dropout, equal on all ranks. The dropped weights depend on the seed, the
            layer, the forward, the pair of positions, and the index of the cp group within ``data``.
        watch: as in `ShardedModel`.
        latent_keys: whether layers with MLA send their latent in place of the keys and values of all heads, as
            `cp_mesh.latent.latent_attention` does. None: where fewer numbers travel, without ``tp`` and with several
            ranks. Layers whose kv_b_proj is not a plain linear always send keys and values. Hooks, adapters and the
            like that it gets later are refused.
        **options: kernel, method, transport, ulysses_degree, head_chunks, deterministic, as in `cp_mesh.attention`.

    Returns:
        The model.

    Raises:
        ArgumentError, UnsupportedError: here, if a layer mixes rows by anything but attention of AttentionInterface, or
            with ``tp`` if the plan does not know a module or the model changes its logits; in the call, for arguments
            and masks that cannot be read. The message names the layer, and the setting to change.

    Example:
        >>> model = parallelize(AutoModelForCausalLM.from_config(config), mesh["cp"])  # doctest: +SKIP
        >>> model(input_ids=tokens, labels=tokens).loss.backward()  # doctest: +SKIP
    """
    sequence = ShardedSequence(mesh, "auto" if layout == "balanced" else layout)  # type: ignore[arg-type]
    check_model(model)
    make_spec(**options)
    facts = Facts(model)
    plan = None if tp is None else plan_over_tp(facts, model, tp, linears or {}, gather_output)
    if plan is None and linears is not None:
        refuse("parallelize: linears", "None without tp", linears, 'pass tp=mesh["tp"]')
    compared = (*COMPARED, *sorted({*facts.names} - {*COMPARED, "labels", "position_ids"})) if facts.text else COMPARED
    style = ShardedModel(sequence, inputs=compared, positions="position_ids", watch=watch)
    losses, replica = ModelLosses(data or sequence.mesh), replica_of(sequence.mesh, data or sequence.mesh)
    if tp is not None:  # tp ranks hold the same tokens, and other heads with other dropout
        if len(shared := sorted({*ranks_of(tp)} & {*ranks_of(data or sequence.mesh)})) > 1:
            hint = 'leave tp out: mesh["dp", "cp"]._flatten("dp_cp")'
            refuse("data", "ranks that hold distinct tokens", f"{shared} of one tp group", hint)
        replica = replica * tp.size() + tp.get_local_rank()
    adapter = _Adapter(facts, losses, style, gather_output, options, dropout_seed, replica, tp is not None)
    check_module("parallelize", model, STYLE)
    if plan is not None:
        apply_plan(model, tp, plan)  # type: ignore[arg-type]
    degrees = {"ulysses": sequence.cp_size, "hybrid": options.get("ulysses_degree") or sequence.ulysses_degree}
    degree = degrees.get(options.get("method", ""), 1) or sequence.cp_size
    sent = leave_latents(facts.attending, degree, latent_keys, counts=tp is None and sequence.cp_size > 1)
    note_styles(sequence.mesh.get_group(), model, {"layers that send latents": sent})
    register()
    for part in facts.attending.modules():  # a layer that was copied has a config of its own
        config: Any = getattr(part, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME
    model.loss_function = losses.of_labels
    apply_mixers(facts.attending, sequence)
    apply_indexers(facts.attending, sequence)
    if facts.text is not None:
        replace_forward(facts.text, INPUT, "cp_mesh.integrations.transformers.parallelize", adapter.run_text)
    replace_forward(model, STYLE, "cp_mesh.integrations.transformers.parallelize", adapter.run)
    if watch:
        watch_encoders(model)
    watch_first_step(model, sequence.mesh.get_group())
    return model


@dataclass(eq=False)
class _Adapter:
    """Runs instead of a parallel model's forward. ``steps`` counts forwards in training mode, for dropout seeds."""

    facts: Facts
    losses: ModelLosses
    style: ShardedModel
    gather_output: bool
    options: dict[str, Any]
    dropout_seed: int
    replica: int
    over_tp: bool
    steps: int = 0

    @property
    def sequence(self) -> ShardedSequence:
        return self.style.sequence

    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the root's forward on this rank's rows."""
        return self._run(torch.compiler.is_compiling(), module, forward, args, kwargs)

    @torch.compiler.disable(reason="compile the layers of a parallel model, not the whole")
    def _run(self, traced: bool, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with refusing(self.sequence.mesh.get_group):
            if traced:
                hint = "for layer in model.model.layers: layer.compile()"
                refuse(self.facts.name, "compiled layers", "a model compiled as a whole", hint, UnsupportedError)
            check_latents(module)
            whole = read(self.facts, args, kwargs)
            if self.over_tp and (found := [name for name in _NOT_OVER_TP if whole.get(name, False) is not False]):
                hint = "leave it out: rows are sharded over tp between the linears, and logits are never stored"
                refuse(self.facts.name, f"no {found[0]} with tp", found[0], hint, UnsupportedError)
            batch, arguments = self.shard(module, whole)
        self.style.compare({name: x for name, x in whole.items() if isinstance(x, torch.Tensor)}, batch.sequence.layout)
        of_rows = partial(self.run_on_rows, batch, module, forward, whole)
        text = None if self.facts.text is None else module.base_model.language_model
        output = self.style.run_eagerly(batch, module, of_rows, arguments, text)
        module.__dict__[_LAST] = batch.sequence
        return self._gather(batch.sequence, output) if self.gather_output else output

    def _gather(self, sequence: ShardedSequence, output: Any) -> Any:
        whole = {} if self.facts.text is None else {name: x for name, x in output.items() if name in OF_IMAGES}
        rows = type(output)(**{name: x for name, x in output.items() if name not in whole})
        return type(output)(**self.style.gather(sequence, rows), **whole)

    def run_text(self, text: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a text tower on this rank's rows of its arguments, which are of the whole batch."""
        batch, given = Batch.now(), {name: x for name, x in kwargs.items() if x is not None}
        if batch is None:
            return forward(*args, **kwargs)  # raises in `make_mask`
        for name in ("logits_to_keep", "labels"):  # `read` refuses values other than 0; labels are the head's
            given.pop(name, None)
        if unknown := [*map(type, args), *sorted(given.keys() - _OF_TEXT)]:
            hint = "it is not known whether they hold rows of the sequence; this model is not supported"
            refuse(type(text).__name__, f"arguments among {', '.join(_OF_TEXT)}", unknown, hint, UnsupportedError)
        if isinstance(padding := given.get("attention_mask"), torch.Tensor):
            if padding.ndim != 2:
                hint = "this model makes its masks itself, so it is not supported"
                refuse(type(text).__name__, "padding [B, S]", list(padding.shape), hint, UnsupportedError)
            del given["attention_mask"]  # part of the batch's mask
        if self.facts.num_mixers:  # whose masks Transformers does not ask for
            given["attention_mask"] = masks_of_layers(text, batch.attention(Said(causal=True)))
        given["use_cache"] = False  # not every model passes it on
        sequence, embeds = batch.sequence, given["inputs_embeds"]
        ids = given.get("position_ids", torch.arange(embeds.shape[1], device=embeds.device)[None])
        check_lengths(text.config, self.facts.accepted, sequence, ids.flatten(0, -2))
        for name in ("inputs_embeds", "per_layer_inputs"):
            if name in given:
                given[name] = sequence.shard({name: given[name]})[name]
        given["position_ids"] = sequence.shard({"position_ids": ids}, dim=ids.ndim - 1)["position_ids"]
        if "visual_pos_masks" in given:  # tokens to which some layers add image features, one feature row per token
            marked = given["visual_pos_masks"]
            numbers = sequence.shard(marked.flatten().cumsum(0).view_as(marked) * marked, pad_value=0)
            given["visual_pos_masks"] = here = numbers > 0
            own = numbers[here] - 1
            given["deepstack_visual_embeds"] = [features[own] for features in given["deepstack_visual_embeds"]]
        with batch.watch or nullcontext():
            return forward(**given)

    def run_on_rows(
        self, batch: Batch, module: nn.Module, forward: Callable[..., Any], whole: dict[str, Any], /, **arguments: Any
    ) -> Any:
        """Run the model's own forward and make its losses shares; refuse a model that computes other losses."""
        if fused := whole.get("fused_lm_head", False):
            forward = partial(self.losses.log_probabilities, forward, module, batch)
        has_loss = self.facts.has_loss or fused
        labels = arguments.get("labels") if has_loss else arguments.pop("labels", None)
        if self.facts.text is not None:  # the image towers attend to whole images, so only the text tower is watched
            batch.watch = current_mode()
        with suspended() if batch.watch else nullcontext():
            output = forward(**arguments)
        if labels is not None and not has_loss:
            output["loss"] = self.losses.of_labels(output["logits"], labels, None, whole.get("num_items_in_batch"))
        if batch.kept is not None:
            self.losses.of_routers(module, batch, batch.kept, output)
        compiled = any(getattr(part, COMPILED_CALL) is not None for part in module.modules())
        layers = (self.facts.layers or 0) - self.facts.num_mixers
        if batch.cores < layers and not compiled:
            got = f"{batch.cores} calls of attention in {layers} layers"
            hint = "the other layers saw only the rows of one shard; this model is not supported"
            refuse(self.facts.name, "one in every layer", got, hint, UnsupportedError)
        if labels is not None and not fused:
            self.losses.check(module, batch, output.get("loss"))
        return output

    def shard(self, module: Any, whole: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
        """Return the batch, and the model's arguments for this rank's rows."""
        config, accepted = module.config.get_text_config(), self.facts.accepted
        tokens = next(whole[name] for name in ROWS if name in whole)
        mask, counted = visible(self.facts, whole)
        sequence = self.sequence.for_batch(tokens.shape[1], mask)
        arguments = {name: whole[name] for name in ("output_hidden_states",) if name in whole}
        if self.facts.text is not None:  # `run_text` shards the arguments of the text tower
            arguments |= {name: whole[name] for name in self.facts.names if name in whole}
        else:
            check_lengths(config, accepted, sequence, whole["position_ids"])
            for name in (name for name in ROWS if name in whole):
                # under the name input_ids, the first loss would compare them with labels as next tokens
                key = name if self.facts.causal else f"{name} of no next tokens"
                arguments[name] = sequence.shard({key: whole[name]}, pad_value=0)[key]
            if "position_ids" in accepted:
                arguments["position_ids"] = sequence.shard({"position_ids": whole["position_ids"]})["position_ids"]
            if "cache_position" in accepted:
                arguments["cache_position"] = sequence.positions(device=tokens.device)
        if "use_cache" in accepted:
            arguments["use_cache"] = False
        if "shift_labels" in whole:
            arguments["labels"] = sequence.shard({"labels": whole["shift_labels"]})["labels"]
            if "num_items_in_batch" in whole and self.facts.has_loss:
                arguments["num_items_in_batch"] = whole["num_items_in_batch"]
        self.steps += module.training
        seed = sequence.dropout_seed(self.steps, self.dropout_seed, self.replica, tokens.device)
        assert sequence.seq_len is not None
        batch = Batch(sequence, sequence.seq_len, mask=mask, counted=counted, options=self.options, seed=seed)
        if self.facts.num_mixers and self.facts.text is None:
            arguments["attention_mask"] = masks_of_layers(module, batch.attention(Said(causal=True)))
        if whole.get("output_router_logits", getattr(config, "output_router_logits", False)):
            self.losses.check_router(module)
            if isinstance(arguments.get("attention_mask"), dict):  # which the model would give its routers' loss
                hint = "pass output_router_logits=False, and add a loss of routers as in docs/gradients.md"
                got = "output_router_logits=True, in a model with a mask for each kind of layer"
                refuse(self.facts.name, "no loss of routers", got, hint, UnsupportedError)
            arguments["output_router_logits"] = True
            real = whole.get("attention_mask", tokens.new_ones(tokens.shape[:2], dtype=torch.long))
            batch.kept = sequence.shard({"attention_mask": real})["attention_mask"]
        elif "output_router_logits" in whole:  # the config may say True
            arguments["output_router_logits"] = False
        return batch, arguments


def replica_of(mesh: DeviceMesh, data: DeviceMesh | dist.ProcessGroup) -> int:
    """Return the index of this rank's cp group within ``data``, ordered by first ranks; equal on tp ranks.

    Raises:
        ArgumentError: if ``data`` does not contain all ranks of the group.
    """
    ranks = data.mesh.flatten().tolist() if isinstance(data, DeviceMesh) else dist.get_process_group_ranks(data)
    own = set(ranks_of(mesh))
    if not own <= set(ranks):
        hint = 'pass the mesh of all ranks with other tokens, mesh["dp", "cp"]._flatten("dp_cp")'
        refuse("data", f"ranks {sorted(own)} of cp among its own", ranks, hint)
    places = [place for place, rank in enumerate(ranks) if rank in own]
    apart = {place - places[0] for place in places}  # the ranks of all groups have the same distances
    first, others = [], set(range(len(ranks)))
    while others:
        first.append(min(others))
        others -= {first[-1] + far for far in apart}
    return first.index(places[0])


def sequence_of(model: nn.Module) -> ShardedSequence:
    """Return the sequence of a model's last batch; ``sequence_of(model).unshard(output.logits)`` gathers the logits.

    Raises:
        ArgumentError: if the model had no forward yet.
    """
    found: ShardedSequence | None = model.__dict__.get(_LAST)
    if found is None:
        refuse("sequence_of", "a model after its first forward", type(model).__name__, "call it first")
    return found
