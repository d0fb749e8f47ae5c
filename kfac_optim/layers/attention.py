"""`nn.MultiheadAttention`: its projections, which torch computes by functions on the parameters and not by modules."""

import types
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture.function_modes import substitute
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.row_statistics import RowStatistics
from kfac_optim.layers.base import COMPUTED_WEIGHT, LayerAdapter, StatisticsSink, watch_of
from kfac_optim.specs import LayerSpec, Sketched, Structure
from kfac_optim.utils.autograd import no_view
from kfac_optim.utils.hooks import Handle, Handles

_PACKED = ("in_proj_weight", "in_proj_bias")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OUT = ("out_proj.weight", "out_proj.bias")


class _Use(NamedTuple):
    """Describes one linear call: the groups (query, key, value) that it made, and of what input.

    Attributes:
        shared: whether all groups read this input.
    """

    first: int
    groups: int
    shared: bool


class ProjectionStatistics(RowStatistics):
    """Inputs `[positions, batch, in]`, gradients `[positions, batch, used groups · out]`; the context is a `_Use`.

    Query, key and value are the groups of one matrix. They share one `A` until they are seen to read different inputs;
    from then on each has an `A` and rows of its own.
    """

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return layer_input.transpose(0, 1).unsqueeze(0)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        positions, batch, _ = gradient.shape
        rows = gradient.reshape(positions, batch, self._use.groups, self.spec.out_dim).permute(2, 1, 0, 3)
        return self._among_all(rows)

    @property
    def count(self) -> float | Tensor:
        count = super().count
        if self._use.shared or not self.has_input:
            return count
        count = torch.as_tensor(count, device=self.call.gradient.device)
        of_groups = count.new_zeros(self.spec.groups)
        of_groups[self._use.first : self._use.first + self._use.groups] = count
        return of_groups

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        moment = super().input_moment(structure)
        if self._use.shared:
            return moment
        return self._among_all(moment.expand(self._use.groups, *moment.shape[1:]))

    @property
    def _use(self) -> _Use:
        return _Use._make(self.call.context)

    def _among_all(self, used: Tensor) -> Tensor:
        """Return zeros for the groups that this call did not make."""
        after = self.spec.groups - self._use.first - self._use.groups
        return F.pad(used, (0, 0) * (used.dim() - 1) + (self._use.first, after))


class MultiheadAttentionAdapter(LayerAdapter[nn.MultiheadAttention]):
    """Takes a packed in-projection as one matrix of three groups, separate ones as three; and the out-projection.

    With separate weights the packed `in_proj_bias` is left to SGD, as are `bias_k` and `bias_v`.
    """

    in_rows = True
    owns_children = True

    def refusal(self, module: nn.MultiheadAttention) -> str | None:
        needed = [_PACKED[0]] if module._qkv_same_embed_dim else list(_SEPARATE)
        weights = [module.out_proj._parameters.get("weight"), *map(module._parameters.get, needed)]
        return COMPUTED_WEIGHT if any(weight is None for weight in weights) else None

    def specs(self, module: nn.MultiheadAttention, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        wide = module.embed_dim
        matrices = [(_PACKED, wide, 3), (_SEPARATE[:1], wide, 1), (_SEPARATE[1:2], module.kdim, 1)]
        matrices += [(_SEPARATE[2:], module.vdim, 1), (_OUT, wide, 1)]
        specs = []
        for names, inputs, groups in matrices:
            if names[0] in trained:
                params = tuple(local for local in names if local in trained)
                label = names[0].removesuffix("_weight").removesuffix(".weight")
                in_dim = inputs + len(params) - 1
                shared = groups > 1 and wide > 1  # numbers are damped by their own kind, group by group
                label = f"{name}.{label}".lstrip(".")
                specs.append(LayerSpec(label, params, in_dim, wide, groups, shared_input=shared, own_rows=True))
        return tuple(specs)

    def capture(
        self, module: nn.MultiheadAttention, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        watches = []
        for index, spec in enumerate(specs):
            weight = module.get_parameter(spec.params[0])
            watches.append(watch_of(weight, sink, index, partial(_statistics, sink, index, spec)))
        attention = _NotedAttention(window, watches, specs)
        return Handles(
            *map(window.watch_calls, watches),
            substitute(window, module, {F.multi_head_attention_forward: attention}, sink.wanted),
        )


def _statistics(sink: StatisticsSink, index: int, spec: LayerSpec, call: LayerCall) -> ProjectionStatistics:
    if not _Use._make(call.context).shared:
        sink.separate_inputs(index)
    return ProjectionStatistics(spec, call, sink.dtype)


class _NotedAttention:
    """Runs torch's own attention, and notes the linear calls in it.

    The functions made for it refer to each other, and so live until the garbage collector runs: window and watches are
    held weakly.
    """

    def __init__(self, window: CaptureWindow, watches: Sequence[LayerWatch], specs: Sequence[LayerSpec]) -> None:
        self._window = weakref.ref(window)
        self._watches = [weakref.ref(watch) for watch in watches]
        self._specs = specs
        self._batch: int | None = None  # of the call under way; None for a single example
        self._of_one_input = _with_linear(partial(self._linear, True), one_input=True)
        self._of_several = _with_linear(partial(self._linear, False), one_input=False)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        attention = self._of_one_input if key is query and value is query else self._of_several
        self._batch = None if query.dim() == 2 else query.shape[1]
        return attention(query, key, value, *args, **kwargs)

    def _linear(
        self, one_input: bool, layer_input: Tensor, weight: Tensor, bias: Tensor | None = None, first: int | None = None
    ) -> Tensor:
        output = F.linear(layer_input, weight, bias)
        window, (watch, spec) = self._window(), self._projection_of(weight)
        if window is None or watch is None or spec is None:
            return output
        groups = weight.shape[0] // spec.out_dim
        if first is None:
            first = 1 if groups == 2 else 0  # key and value together come after the query
        # The out-projection is handed [positions · batch, features].
        batch = self._batch or 1
        noted_input = layer_input.view(-1, batch, layer_input.shape[-1])
        viewed = output.view(-1, batch, output.shape[-1])
        use = _Use(first, groups, shared=one_input or spec.groups == 1)
        noted = window.note_output(watch, noted_input, viewed, examples=self._batch, context=use)
        return no_view(noted.view(output.shape))

    def _projection_of(self, weight: Tensor) -> tuple[LayerWatch | None, LayerSpec | None]:
        for ref, spec in zip(self._watches, self._specs, strict=True):
            watch = ref()
            # The packed weight is used whole, or in parts that are views of it.
            if watch is not None and (weight is watch.used or weight._base is watch.used):
                return watch, spec
        return None, None


def _check_padding_mask(mask: Tensor, positions: int, batch: int) -> None:
    """Run torch's check of `key_padding_mask`, whose message is made where `torch.compile` cannot follow."""
    if mask.shape != (batch, positions):
        raise AssertionError(f"Expected key_padding_mask of shape {[batch, positions]}, but got {list(mask.shape)}")


def _with_linear(linear: Callable[..., Tensor], *, one_input: bool) -> Callable[..., Any]:
    """Return `F.multi_head_attention_forward` made to call `linear` instead of `F.linear`.

    Args:
        linear: the replacement, which also gets the number of the first group that it is to make, where three are made
            one by one.
        one_input: whether query, key and value are one; it is called once for all three then, also where torch has
            given each a batch dimension of its own.
    """
    # torch's own code in a namespace of our own: so that masks, dropout and every option are torch's, in value and in
    # random numbers, and nobody else's F.linear is touched.
    namespace = {**vars(F), "linear": linear, "has_torch_function": lambda _: False}
    del namespace["__name__"]  # by which torch.compile would look for our `linear` in torch's module

    def rebuilt(name: str) -> Callable[..., Any]:
        function = getattr(F, name)
        return types.FunctionType(function.__code__, namespace, name, function.__defaults__)

    packed = rebuilt("_in_projection_packed")

    def in_projection(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if one_input:
            return packed(q, q, q, weight, bias)
        if k is v:
            return packed(q, k, v, weight, bias)
        weights, biases = weight.chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(linear(x, weights[i], biases[i], first=i) for i, x in enumerate((q, k, v)))

    namespace["_check_key_padding_mask"] = _check_padding_mask
    namespace["_in_projection"] = rebuilt("_in_projection")
    namespace["_in_projection_packed"] = in_projection
    return rebuilt("multi_head_attention_forward")
