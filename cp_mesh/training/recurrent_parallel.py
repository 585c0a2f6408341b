"""`RecurrentParallel`: the parallel style for modules that mix tokens by a recurrence or a causal convolution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cp_mesh._torch import untraced
from cp_mesh.call.spec import check_choice
from cp_mesh.errors import refuse
from cp_mesh.geometry.layouts import Layout
from cp_mesh.geometry.mask import Mask
from cp_mesh.mixers.kernels import KERNELS
from cp_mesh.mixers.rules import METHODS
from cp_mesh.mixers.scope import SCOPE, Scope
from cp_mesh.sequence.sharded_sequence import ShardedSequence
from cp_mesh.training.foreign_functions import FUNCTIONS, ForeignFunctions, check_convolution
from cp_mesh.training.style_helpers import Core, announced, style_of
from cp_mesh.wrap import FILE, STYLE, replaced


class RecurrentParallel(Core):
    """Makes a module mix the tokens of the whole sequence by recurrences and causal convolutions.

    The module's forward gets this rank's rows, [B, S_local, ...]. In it, and in modules below it, these calls are over
    the whole sequence, and begin anew at each document of the mask:

    - functions of `cp_mesh.mixers` without ``sequence``;
    - functions of other packages that the module's file imports by name, called in its methods and in functions of the
      file: ``chunk_gated_delta_rule``, ``fused_recurrent_gated_delta_rule``, ``chunk_kda``, ``chunk_delta_rule``,
      ``chunk_gla``, ``chunk_simple_gla`` and ``causal_conv1d`` of flash-linear-attention, ``causal_conv1d_fn``,
      ``mamba_chunk_scan_combined``, and those of Transformers. ``cu_seqlens`` must be those of the mask;
    - `nn.Conv1d` of each channel by itself, padded by W - 1 and trimmed behind: the last W - 1 columns are nan. The
      style may be given to it alone.

    Refused: a module that calls none of these, other functions of these packages, states of a cache, other
    convolutions, and a checkpoint that begins inside of the module. Recurrences written as loops are not seen:
    `cp_mesh.probe` finds them. torch.compile leaves the module out of its graph.

    Args:
        sequence: the sequence object that also shards the data.
        mask: documents, padding and length, as in `ContextParallel`; its other conditions are ignored, so both styles
            may have the same. Or a function of the module's call arguments that returns the mask.
        layout: as in `ContextParallel`.
        method, kernel: as in `cp_mesh.mixers`.

    Raises:
        ArgumentError, UnsupportedError: at application, if the mesh is wrong, the style is applied twice, or the module
            is another convolution; in the forward, for what is refused.

    Example:
        >>> plan = {"layers.*.mixer": RecurrentParallel(sequence, mask=lambda x, mask: mask)}  # doctest: +SKIP
    """

    functions = FUNCTIONS
    strict = True

    def __init__(
        self,
        sequence: ShardedSequence,
        *,
        mask: Mask | Callable[..., Mask] = Mask(causal=True),  # noqa: B008 - frozen
        layout: Callable[..., Layout] | None = None,
        method: str = "auto",
        kernel: str = "auto",
    ) -> None:
        super().__init__(sequence, mask, layout)
        check_choice("method", method, METHODS, "auto")
        check_choice("kernel", kernel, (*KERNELS,), "auto")
        self.method, self.kernel = method, kernel
        self.foreign = ForeignFunctions(self.functions, self.strict)

    def check(self, module: nn.Module, mesh: DeviceMesh, where: str = "") -> None:
        if isinstance(module, nn.Conv1d) and type(module).forward is nn.Conv1d.forward:
            check_convolution(module)
        super().check(module, mesh, where)

    @untraced
    @announced
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with functions that mix the whole sequence."""
        mask, layout = self.of_call(*args, **kwargs)
        sequence = self.sequence if layout is self.sequence.layout else replace(self.sequence, layout=layout)
        scope = Scope(sequence, mask, self.method, self.kernel)
        token = SCOPE.set(scope)
        try:
            with self.foreign.within(module, lambda part: style_of(part) is not None):
                result = self._own(module, forward)(*args, **kwargs)
        finally:
            SCOPE.reset(token)
        rules = self.foreign.rules(module) if scope.called <= {"causal_conv1d"} else set()
        if not scope.called or rules:
            found = replaced(module, STYLE)
            where = f" at {found.where}" if found is not None and found.where else ""
            hint = "apply the style to the module that calls them; a loop over tokens must become such a call"
            expected = f"a call of {', '.join(rules) or 'cp_mesh.mixers, or of a function that stands for one'}"
            got = "a convolution alone, so other code mixes the tokens" if scope.called else "none"
            refuse(f"{type(self).__name__}({type(module).__name__}{where})", f"{expected}, in its forward", got, hint)
        return result

    def _own(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a module that calls foreign functions."""
        made = self.foreign.of_class(type(module))[0].get("forward")
        if made is None:
            return forward
        before: Any = getattr(forward, "func", None)
        if before is None or before.__code__.co_filename == FILE:
            hint = "apply RecurrentParallel first, and remove what else replaced the forward"
            refuse(type(module).__name__, "the forward of its class", "another one", hint)
        return partial(made, module)
