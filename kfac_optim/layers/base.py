"""What a layer family must provide, and the parts that families share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.model_hooks import LayerHook
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.hooks import Handle, Handles
from kfac_optim.utils.sharded_params import Shards

M = TypeVar("M", bound=nn.Module)


COMPUTED_WEIGHT = "the layer's weight is computed from other parameters (pruning, weight_norm, …)"
"""Why a module is refused whose weight is no parameter."""


class StatisticsSink(Protocol):
    """A sink is where an adapter's statistics go."""

    @property
    def dtype(self) -> torch.dtype:
        """Give the dtype of the moments, which follows the model when it is moved to another dtype."""

    def wanted(self) -> bool:
        """Return whether the next forward should be captured."""

    def emit(self, index: int, stats: LayerStatistics) -> bool:
        """Take the statistics of spec number `index` at once; `LayerStatistics.keeps_input` of them."""

    def awaits_gradient(self, index: int, shards: Shards) -> bool:
        """Tell whether calls of spec number `index` go to `verify`, as `LayerWatch.awaits_gradient` does."""

    def verify(self, index: int, call: LayerCall | None, statistics: Callable[[LayerCall], LayerStatistics]) -> None:
        """Compare one call with what the backward that is running adds to `.grad`.

        Args:
            index: number of the spec.
            call: the call, with the gradient of this backward alone; None where it is not known any more.
            statistics: makes those of a call.
        """

    def discard(self) -> None:
        """Forget what was emitted since the last step."""

    def separate_inputs(self, index: int) -> None:
        """Note a call in which the groups of spec number `index` read different inputs."""


def watch_of(
    weight: nn.Parameter, sink: StatisticsSink, index: int, statistics: Callable[[LayerCall], LayerStatistics]
) -> LayerWatch:
    """Make the watch of one matrix, whose calls go to a sink.

    Args:
        weight: the parameter that a backward must reach to count.
        sink: takes the statistics.
        index: number of the spec there.
        statistics: makes them of a call.
    """
    return LayerWatch(
        weight=weight,
        wanted=sink.wanted,
        emit=lambda call: sink.emit(index, statistics(call)),
        discard=sink.discard,
        awaits_gradient=lambda shards: sink.awaits_gradient(index, shards),
        verify=lambda call: sink.verify(index, call, statistics),
    )


class LayerAdapter(ABC, Generic[M]):
    """Says how one family of modules takes part in K-FAC.

    Your own layer needs an adapter, passed as `KFACOptimizer(adapters={**DEFAULT_ADAPTERS, MyLayer: MyAdapter()})`. A
    subclass gets the adapter of the nearest class in its method resolution order.
    """

    transposes: bool | None = None
    """Whether the matrix is the weight's transpose; None where it is neither the weight nor that."""

    in_rows = False
    """Whether its statistics are `RowStatistics`, or know as those do of factors in blocks and of some rows only.

    `BlockDiagonal` factors and `Subsample` are refused elsewhere."""

    may_be_cut = False
    """Whether ranks may hold columns of its input `[…, in]` and its output `[…, out]`, as in tensor parallelism."""

    routes_rows = False
    """Whether the data decide which groups get rows, as of experts, so that ranks have to tell each other."""

    owns_children = False
    """Whether the specs also take in parameters of the module's children, which are then no layers of their own."""

    has_matrix = True
    """Whether its weight maps inputs to outputs, by a matrix; that of a norm layer scales each feature."""

    expects_parametrized = False
    """Whether the module's parametrizations are known to the adapter; others have the module refused."""

    def adds_bias_itself(self, module: M) -> bool:
        """Return whether the module, if its product with the weight is seen, adds its bias apart from that."""
        return False

    @abstractmethod
    def refusal(self, module: M) -> str | None:
        """Return why this very module cannot be preconditioned; None if it can. Every step asks."""

    @abstractmethod
    def specs(self, module: M, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        """Return the matrices of `module`, empty when its weight is not trained.

        Args:
            module: the layer.
            name: its fully qualified name.
            trained: names, within the module, of the parameters that the optimizer trains.
        """

    @abstractmethod
    def capture(self, module: M, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink) -> Handle:
        """Hand `sink` the statistics of every call of `module` that a backward reaches.

        Args:
            module: the layer.
            specs: those of what `specs()` gave that are preconditioned, with the structure and weight sharing chosen
                by the user; the sink counts in this sequence.
            window: the window that is to note its calls.
            sink: takes the statistics.
        """

    packs_several = False
    """Whether `pack` and `unpack` take the parameters of several equal layers, each stacked, as those of one layer with
    so many times the groups."""

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors shaped like the parameters of `spec` as one matrix `[groups, out, in]`.

        As it stands, for a weight `[groups · out, *in]` and perhaps a bias `[groups · out]`.
        """
        columns = [tensor.reshape(spec.groups, spec.out_dim, -1) for tensor in tensors]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        """Undo `pack`, up to a final reshape to each parameter's shape."""
        return (matrix[..., :-1], matrix[..., -1]) if spec.has_bias else (matrix,)


class WeightBiasAdapter(LayerAdapter[M]):
    """Handles a module with one `weight` `[out, in/groups, *kernel]`, an optional `bias` `[out]`, and one output."""

    is_product = False
    """Whether the forward is a product with the weight, such as `blocks/functional.py` sees."""

    @abstractmethod
    def unbatched_ndim(self, module: M) -> int:
        """Return how many dimensions an input without a batch dimension has."""

    @abstractmethod
    def statistics(self, module: M, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        """Return the moments of one call."""

    def groups(self, module: M) -> int:
        """Return how many independent matrices the weight is made of."""
        return 1

    def refusal(self, module: M) -> str | None:
        if not isinstance(module._parameters.get("weight"), nn.Parameter):
            return COMPUTED_WEIGHT
        return None

    def specs(self, module: M, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        params = weight_and_bias(trained)
        return (self.spec(module, name, params),) if params else ()

    def spec(self, module: M, name: str, params: tuple[str, ...]) -> LayerSpec:
        """Return the one spec; `params` are the weight and, where it is trained, the bias."""
        groups, weight = self.groups(module), module.get_parameter("weight")
        in_dim = math.prod(weight.shape[1:]) + len(params) - 1
        return LayerSpec(name, params, in_dim, weight.shape[0] // groups, groups)

    def capture(self, module: M, specs: Sequence[LayerSpec], window: CaptureWindow, sink: StatisticsSink) -> Handle:
        watch = self._watch(module, specs, sink)
        hook = LayerHook(window, module, watch, self.unbatched_ndim(module), is_product=self.is_product)
        return Handles(window.watch_calls(watch), window.hook(module, hook))

    def _watch(self, module: M, specs: Sequence[LayerSpec], sink: StatisticsSink) -> LayerWatch:
        """Return what is asked of the layer, whoever notes its calls."""
        (spec,) = specs
        weight = module.get_parameter(spec.params[0])
        return watch_of(weight, sink, 0, lambda call: self.statistics(module, spec, call, sink.dtype))


def weight_and_bias(trained: Collection[str]) -> tuple[str, ...]:
    """Name those of a weight and its bias that are trained; none without the weight."""
    return tuple(name for name in ("weight", "bias") if name in trained) if "weight" in trained else ()


def own_forward(module: nn.Module, family: type[nn.Module]) -> str | None:
    """Return a reason to refuse a subclass of `family` whose forward may be another function of its input."""
    if type(module).forward is family.forward:
        return None
    return f"{type(module).__name__} has a forward of its own, which may not be that of {family.__name__}"


Adapters = Mapping[type[nn.Module], LayerAdapter[Any]]


def find_adapter(module: nn.Module, adapters: Adapters) -> LayerAdapter[Any] | None:
    """Return the adapter of the nearest class in the module's method resolution order."""
    return next((adapters[cls] for cls in type(module).__mro__ if cls in adapters), None)
