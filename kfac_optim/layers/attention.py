"""`nn.MultiheadAttention`: its projections, which torch computes by functions on the parameters and not by modules."""

import types
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim.capture import CaptureWindow, LayerCall, LayerWatch
from kfac_optim.functions import substitute
from kfac_optim.hooks import Handle, Handles
from kfac_optim.layers.base import LayerAdapter, RowStatistics, StatisticsSink
from kfac_optim.specs import LayerSpec, Structure, WeightSharing

_PACKED = ("in_proj_weight", "in_proj_bias")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_OUT = ("out_proj.weight", "out_proj.bias")


class _Use(NamedTuple):
    """One linear call: the groups (query, key, value) that it made, and of what input.

    Attributes:
        shared: whether all groups read this input.
        mass: what a row of the input weighs; each group's rows come to as much as the queries'.
    """

    first: int
    groups: int
    shared: bool
    mass: float


class ProjectionStatistics(RowStatistics):
    """Inputs `[positions, batch, in]`, gradients `[positions, batch, used groups · out]`; the context is a `_Use`.

    Query, key and value are the groups of one matrix. They share one `A` until they are seen to read different inputs;
    then each has that of its own.
    """

    def input_rows(self, layer_input: Tensor) -> Tensor:
        return layer_input.transpose(0, 1).unsqueeze(0)

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        positions, batch, _ = gradient.shape
        rows = gradient.reshape(positions, batch, self._use.groups, self.spec.out_dim).permute(2, 1, 0, 3)
        return self._among_all(rows)

    @property
    def has_input(self) -> bool:
        return super().has_input and (self._use.first == 0 or not self._use.shared)

    @property
    def count(self) -> int | Tensor:
        return super().count if self._use.first == 0 else 0  # one number for all groups

    def input_moment(self, structure: Structure) -> Tensor:
        moment = super().input_moment(structure)
        if self._use.shared:
            return moment
        if self.spec.weight_sharing is WeightSharing.EXPAND:
            moment *= self._use.mass
        return self._among_all(moment.expand(self._use.groups, *moment.shape[1:]))

    @property
    def _use(self) -> _Use:
        use: _Use = self.call.context
        return use

    def _among_all(self, used: Tensor) -> Tensor:
        """Zeros for the groups that this call did not make."""
        after = self.spec.groups - self._use.first - self._use.groups
        return F.pad(used, (0, 0) * (used.dim() - 1) + (self._use.first, after))


class MultiheadAttentionAdapter(LayerAdapter[nn.MultiheadAttention]):
    """Packed in-projection as one matrix of three groups, separate ones as three; and the out-projection.

    With separate weights the packed `in_proj_bias` is left to SGD, as are `bias_k` and `bias_v`.
    """

    owns_children = True

    def refusal(self, module: nn.MultiheadAttention) -> str | None:
        weights = dict(module.named_parameters())
        needed = [_OUT[0]] + ([_PACKED[0]] if module._qkv_same_embed_dim else list(_SEPARATE))
        if any(weight not in weights for weight in needed):
            return "the layer's weight is computed from other parameters (pruning, weight_norm, …)"
        return None

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
                specs.append(LayerSpec(label, params, in_dim, wide, groups, shared_input=shared))
        return tuple(specs)

    def capture(
        self,
        module: nn.MultiheadAttention,
        specs: Sequence[LayerSpec],
        window: CaptureWindow,
        sink: StatisticsSink,
    ) -> Handle:
        projections = []
        for index, spec in enumerate(specs):
            watch = LayerWatch(
                weight=module.get_parameter(spec.params[0]),
                wanted=sink.wanted,
                emit=partial(_emit, sink, index, spec),
                discard=sink.discard,
            )
            projections.append(_Projection(watch, spec, partial(sink.separate_inputs, index)))
        attention = _NotedAttention(window, projections)
        return Handles(
            *(window.watch_calls(projection.watch) for projection in projections),
            substitute(window, module, {F.multi_head_attention_forward: attention}, sink.wanted),
        )


class _Projection(NamedTuple):
    watch: LayerWatch
    spec: LayerSpec
    separate_inputs: Callable[[], None]


def _emit(sink: StatisticsSink, index: int, spec: LayerSpec, call: LayerCall) -> bool:
    return sink.emit(index, ProjectionStatistics(spec, call, sink.dtype))


class _NotedAttention:
    """torch's own attention, with the linear calls in it noted."""

    def __init__(self, window: CaptureWindow, projections: Sequence[_Projection]) -> None:
        self._window = window
        self._projections = {id(projection.watch.weight): projection for projection in projections}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        one_input = key is query and value is query
        unbatched = query.dim() == 2
        batch = 1 if unbatched else query.shape[1]

        def linear(layer_input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            output = F.linear(layer_input, weight, bias)
            # The packed weight is used whole, or in parts that are views of it.
            projection = self._projections.get(id(weight)) or self._projections.get(id(weight._base))
            if projection is None:
                return output
            # The out-projection is handed [positions · batch, features].
            noted_input, noted = (tensor.view(-1, batch, tensor.shape[-1]) for tensor in (layer_input, output))
            spec, whole = projection.spec, projection.watch.weight
            use = _Use(
                first=(weight.storage_offset() - whole.storage_offset()) // (whole[0].numel() * spec.out_dim),
                groups=weight.shape[0] // spec.out_dim,
                shared=one_input or spec.groups == 1,
                mass=query.shape[0] / noted_input.shape[0],
            )
            if not use.shared:
                projection.separate_inputs()
            self._window.note(projection.watch, noted_input, noted, unbatched=unbatched, context=use)
            return noted.view(output.shape)

        return _with_linear(linear)(query, key, value, *args, **kwargs)


def _with_linear(linear: Callable[..., Tensor]) -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, calling `linear` in the place of `F.linear`."""
    # torch's own code in a namespace of our own: so that masks, dropout and every option are torch's, in value and in
    # random numbers, and nobody else's F.linear is touched.
    namespace = {**vars(F), "linear": linear, "has_torch_function": lambda _: False}
    for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward"):
        function = getattr(F, name)
        namespace[name] = types.FunctionType(function.__code__, namespace, name, function.__defaults__)
    attention: Callable[..., Any] = namespace["multi_head_attention_forward"]
    return attention
