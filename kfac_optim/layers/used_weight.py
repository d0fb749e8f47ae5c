"""Linear layers and convolutions whose weight is made of other parameters, preconditioned through the weight in use.

The factors are those of the weight `W` that the layer multiplies by, as if it were trained itself. Gradients of the
parameters are brought to one of `W`, preconditioned as that, and the step of `W` is brought back to the parameters
(`reparametrizations.py`). So `λ` is added to the curvature in `W`.
"""

import math
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.capture.batches import examples_of, first_tensor
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers.base import LayerAdapter, StatisticsSink, WeightBiasAdapter, own_forward, watch_of
from kfac_optim.layers.convolution.base import PatchAdapter
from kfac_optim.layers.linear import LinearAdapter
from kfac_optim.layers.reparametrizations import Reparametrization, Unseen, reparametrization_of
from kfac_optim.specs import LayerSpec, Sketched, Structure
from kfac_optim.utils.hooks import Handle, Handles, is_on

# How many recent calls are kept, each with what its weight was made of.
_KEPT = 16


@dataclass(frozen=True, slots=True)
class UsedWeightSpec(LayerSpec):
    """Describes the matrix of a weight that is made of `params`, and perhaps its bias."""

    used: LayerSpec | None = None
    """The same matrix as that of a layer which has the weight for its parameter."""

    @property
    def has_bias(self) -> bool:
        return self.used is not None and self.used.has_bias

    def of_layer(self) -> LayerSpec:
        """Return `used` with what was chosen for this."""
        assert self.used is not None
        return replace(self.used, name=self.name, structure=self.structure, weight_sharing=self.weight_sharing)


class UsedWeightAdapter(LayerAdapter[nn.Module]):
    """Handles one layer.

    Args:
        layer: the adapter of the family, in which the weight is a parameter.
        module: the layer itself.
        way: how its weight is made.
    """

    in_rows = True
    owns_children = True
    expects_parametrized = True

    def __init__(self, layer: WeightBiasAdapter[Any], module: nn.Module, way: Reparametrization) -> None:
        self._layer, self._module, self._way = layer, module, way
        self._kept: OrderedDict[tuple[int, ...], tuple[Tensor, ...]] = OrderedDict()

    def refusal(self, module: nn.Module) -> str | None:
        if reparametrization_of(module) != self._way:
            return "its weight_norm or spectral_norm was changed or removed after the optimizer was built"
        return None

    def specs(self, module: nn.Module, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        names = self._way.names
        if not set(names).issubset(trained):
            return ()
        family = _family(module)
        assert family is not None
        stand_in = family.__new__(family)  # torch lets nobody copy a parametrized module
        held = {"weight": module.get_parameter(names[0]), "bias": module._parameters.get("bias")}
        stand_in.__dict__.update(vars(module), _parameters=held)
        stand_in.__dict__.pop("weight", None)  # the old ways leave what they compute there
        bias = ("bias",) if "bias" in trained else ()
        used = self._layer.spec(stand_in, name, ("weight", *bias))
        same = {field.name: getattr(used, field.name) for field in fields(LayerSpec)}
        return (UsedWeightSpec(**{**same, "params": (*names, *bias)}, used=used),)

    def capture(
        self, module: nn.Module, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink
    ) -> Handle:
        (spec,) = specs
        weight = module.get_parameter(self._way.names[0])
        watch = watch_of(weight, sink, 0, lambda call: self._statistics(spec, call, sink.dtype))
        hook = _Hook(window, watch, self._way, self._layer.unbatched_ndim(module), self._kept)
        return Handles(window.watch_calls(watch), window.hook(module, hook))

    def _statistics(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        assert isinstance(spec, UsedWeightSpec)
        stats = self._layer.statistics(self._module, spec.of_layer(), replace(call, context=()), dtype)
        return UsedWeightStatistics(stats, self, spec, self._kept.get(call.context))

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        assert isinstance(spec, UsedWeightSpec)
        made = len(self._way.names)
        weight = self._way.to_weight(self._module, tensors[:made])
        return self._layer.pack(spec.of_layer(), [weight, *tensors[made:]])

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(spec, UsedWeightSpec)
        step, *bias = self._layer.unpack(spec.of_layer(), matrix)
        shape = self._module.get_parameter(self._way.names[0]).shape
        return (*self._way.to_params(self._module, step.reshape(shape)), *bias)

    def unseen(self, spec: UsedWeightSpec, kept: Sequence[Tensor], dtype: torch.dtype) -> Unseen | None:
        """Return `Reparametrization.unseen` with matrices `[groups, out, in]`."""
        found = self._way.unseen(self._module, kept, dtype)
        if found is None:
            return None
        bias = self._module._parameters.get("bias") if spec.has_bias else None
        zeros = [] if bias is None else [torch.zeros_like(bias, dtype=dtype)]
        weight, lead = (self._layer.pack(spec.of_layer(), [each, *zeros]) for each in (found.weight, found.lead))
        return Unseen(weight, lead, found.share)


class UsedWeightStatistics(LayerStatistics):
    """Hands on the statistics of the layer, less the part of a call's gradient that never reaches the parameters.

    Args:
        stats: the statistics of the layer, as if the weight were its parameter.
        adapter: the adapter of the layer.
        spec: the block.
        kept: what `Reparametrization.keep` returned in the call; None where that is gone.
    """

    def __init__(
        self, stats: LayerStatistics, adapter: UsedWeightAdapter, spec: UsedWeightSpec, kept: Sequence[Tensor] | None
    ) -> None:
        self._stats, self._adapter, self._spec, self._kept = stats, adapter, spec, kept

    @property
    def of_call(self) -> LayerStatistics:
        return self._stats

    @property
    def term(self) -> int:
        return self._stats.term

    @property
    def keeps_input(self) -> bool:
        return self._stats.keeps_input

    @property
    def count(self) -> float | Tensor:
        return self._stats.count

    @property
    def has_input(self) -> bool:
        return self._stats.has_input

    @property
    def weight(self) -> float:
        return self._stats.weight

    def input_moment(self, structure: Structure | Sketched) -> Tensor:
        return self._stats.input_moment(structure)

    def output_moment(self, structure: Structure | Sketched) -> Tensor:
        return self._stats.output_moment(structure)

    def rows(self) -> tuple[Tensor, Tensor]:
        return self._stats.rows()

    def subsample(self, draw: Draw) -> None:
        self._stats.subsample(draw)

    def squared_gradients(
        self, a_basis: Tensor | None, g_basis: Tensor | None, *, dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        return self._stats.squared_gradients(a_basis, g_basis, dtype=dtype, per_example=per_example)

    def gradient_along(self, directions: Tensor) -> tuple[Tensor, Tensor] | None:
        found = self._stats.gradient_along(directions)
        if found is None:
            return None
        if self._kept is None:
            # What the parameters were told of this call is not known any more: this step is to show nothing.
            return found[0] * math.nan, found[1]
        unseen = self._adapter.unseen(self._spec, self._kept, directions.dtype)
        if unseen is None:
            return found
        weight, lead, share = unseen
        groups, out_dim, in_dim = weight.shape
        whole = self._stats.gradient_along(weight.reshape(groups * out_dim, in_dim).mT)
        assert whole is not None
        inner = whole[0].reshape(groups * out_dim, groups * out_dim).diagonal().sum()  # ⟨∇W, W⟩
        told = share * (found[0] - inner * (lead @ directions))
        if self._spec.has_bias:  # whose gradient does not go by the weight
            of_bias = directions.clone()
            of_bias[:-1] = 0
            bias = self._stats.gradient_along(of_bias)
            assert bias is not None
            told += (1 - share) * bias[0]
        return told, found[1]


class _Hook:
    """Notes the calls of a module. Others hold it, so it holds the window and the watch weakly."""

    def __init__(
        self,
        window: CaptureWindow,
        watch: LayerWatch,
        way: Reparametrization,
        unbatched_ndim: int,
        kept: OrderedDict[tuple[int, ...], tuple[Tensor, ...]],
    ) -> None:
        self._window, self._watch = weakref.ref(window), weakref.ref(watch)
        self._way, self._unbatched_ndim, self._kept = way, unbatched_ndim, kept

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Tensor | None:
        window, watch = self._window(), self._watch()
        # What is traced for a graph makes no statistics here.
        if window is None or watch is None or torch.compiler.is_compiling():
            return None
        if not torch.is_grad_enabled():
            window.roots.layer_without_graph()
            return None
        layer_input = first_tensor(args, kwargs)
        wanted = is_on(window.listener.mode) or watch.wanted()
        if not wanted or not isinstance(output, Tensor) or layer_input is None:
            return None
        if reparametrization_of(module) != self._way:
            return None  # which the next step leaves to SGD
        examples = examples_of(layer_input, self._unbatched_ndim)
        context, training = self._way.stamp(module), module.training
        self._kept[context] = self._way.keep(module)
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return window.note_output(watch, layer_input, output, examples=examples, training=training, context=context)


def used_weight_adapter(module: nn.Module, adapter: LayerAdapter[Any]) -> UsedWeightAdapter | None:
    """Return the adapter of a layer whose weight is made of other parameters in a way that is known; None of others."""
    if not isinstance(adapter, (LinearAdapter, PatchAdapter)):
        return None
    family = _family(module)
    if family is None or own_forward(module, family) is not None or "forward" in vars(module):
        return None
    way = reparametrization_of(module)
    return None if way is None else UsedWeightAdapter(adapter, module, way)


def _family(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch's that a module is of, below which that of a parametrized one is made."""
    families = (cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn.modules."))
    return next(families, None)
