"""What a layer family must provide, and the parts they share.

Canonical layout, used everywhere below: inputs are `[groups, batch, shared, in]`, output gradients
`[groups, batch, shared, out]`, gradient matrices `[groups, out, in]`, with the bias as the last input column.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kfac_optim.capture import CaptureWindow, LayerCall, LayerWatch
from kfac_optim.hooks import Handle
from kfac_optim.rows import gram
from kfac_optim.specs import LayerSpec, Structure, WeightSharing

M = TypeVar("M", bound=nn.Module)


class LayerStatistics(ABC):
    """Second moments of one call of a layer, computed when asked for."""

    opposed = False
    """Whether the call multiplied by the transpose of the block's matrix, so that the sides change places."""

    keeps_input = False
    """Whether further backwards through the call need its input again; it then lives until the window closes."""

    @property
    @abstractmethod
    def count(self) -> int | Tensor:
        """Rows behind the input moment: its mass. A device scalar `[]` where only the device can count them."""

    @property
    def has_input(self) -> bool:
        """Whether there is an input moment to add; none from the second backward of a call on."""
        return True

    @abstractmethod
    def input_moment(self, structure: Structure) -> Tensor:
        """`Σ a aᵀ`, `[groups, in, in]`, or its diagonal `[groups, in]`."""

    @abstractmethod
    def output_moment(self, structure: Structure) -> Tensor:
        """`Σ g gᵀ`, `[groups, out, out]`, or its diagonal `[groups, out]`."""

    @abstractmethod
    def rows(self) -> tuple[Tensor, Tensor]:
        """`a` `[groups, batch, shared, in]` and `g` `[groups, batch, shared, out]`, after weight sharing."""


class RowStatistics(LayerStatistics):
    """Statistics of a layer whose output is `W a` at each position; families say what `a` and `g` are.

    Args:
        spec: the layer.
        call: the call, in the layout of the module.
        dtype: of the moments, and of the products that make them.
    """

    def __init__(self, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> None:
        self.spec = spec
        self.call = call
        self.dtype = dtype

    @abstractmethod
    def input_rows(self, layer_input: Tensor) -> Tensor:
        """Canonical `a` without the bias column, `[groups, batch, shared, in]`."""

    @abstractmethod
    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Canonical `g`, `[groups, batch, shared, out]`."""

    @property
    def has_input(self) -> bool:
        return self.call.input is not None and self.call.input.numel() > 0

    @property
    def count(self) -> int | Tensor:
        if self.call.input is None:
            return 0
        _, batch, shared, _ = self.gradient_rows(self.call.gradient).shape
        return batch * shared if self.spec.weight_sharing is WeightSharing.EXPAND else batch

    def input_moment(self, structure: Structure) -> Tensor:
        return gram(self._shared_inputs(), structure)

    def output_moment(self, structure: Structure) -> Tensor:
        moment = gram(self._shared_gradients(self.call.gradient), structure)
        if self.call.earlier is not None:
            moment -= gram(self._shared_gradients(self.call.earlier), structure)
        return moment

    def rows(self) -> tuple[Tensor, Tensor]:
        return self._shared_inputs(), self._shared_gradients(self.call.gradient)

    def _shared_inputs(self) -> Tensor:
        assert self.call.input is not None, "the input was released after the first backward"
        a = self.input_rows(self.call.input.to(self.dtype))
        if self.spec.weight_sharing is WeightSharing.REDUCE:
            a = a.mean(2, keepdim=True)
        if self.spec.has_bias:
            a = torch.cat([a, a.new_ones(()).expand(*a.shape[:-1], 1)], dim=-1)
        return a

    def _shared_gradients(self, gradient: Tensor) -> Tensor:
        g = self.gradient_rows(gradient.to(self.dtype))
        return g.sum(2, keepdim=True) if self.spec.weight_sharing is WeightSharing.REDUCE else g


class StatisticsSink(Protocol):
    """Where an adapter's statistics go."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the moments. It follows the model when that is moved to another dtype."""

    def wanted(self) -> bool:
        """Whether the next forward should be captured."""

    def emit(self, index: int, stats: LayerStatistics) -> bool:
        """Take the statistics of spec number `index` at once; `LayerStatistics.keeps_input` of them."""

    def discard(self) -> None:
        """Forget what was emitted since the last step."""

    def separate_inputs(self, index: int) -> None:
        """Told of a call in which the groups of spec number `index` read different inputs."""


class LayerAdapter(ABC, Generic[M]):
    """How one family of modules takes part in K-FAC.

    An own layer needs an adapter passed in `KFACOptimizer(adapters={**DEFAULT_ADAPTERS, MyLayer: MyAdapter()})`;
    subclasses of a module are found along its method resolution order.
    """

    transposes: bool | None = None
    """Whether the matrix is the weight's transpose; None where it is neither the weight nor that."""

    owns_children = False
    """Whether the specs also take in parameters of the module's children, which are then no layers of their own."""

    @abstractmethod
    def refusal(self, module: M) -> str | None:
        """Why this very module cannot be preconditioned, or None when it can."""

    @abstractmethod
    def specs(self, module: M, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        """The matrices of `module`, empty when its weight is not trained.

        Args:
            module: the layer.
            name: its fully qualified name.
            trained: names, within the module, of the parameters that the optimizer trains.
        """

    @abstractmethod
    def capture(
        self,
        module: M,
        specs: Sequence[LayerSpec],
        window: CaptureWindow,
        sink: StatisticsSink,
    ) -> Handle:
        """Hand `sink` the statistics of every call of `module` that a backward reaches.

        Args:
            module: the layer.
            specs: those of what `specs()` gave that are preconditioned, with the structure and weight sharing chosen
                by the user; the sink counts in this sequence.
            window: where to listen.
            sink: takes the statistics.
        """

    def pack(self, spec: LayerSpec, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors shaped like the parameters of `spec` as one matrix `[groups, out, in]`.

        As it stands, for a weight `[groups · out, *in]` and perhaps a bias `[groups · out]`.
        """
        columns = [tensor.reshape(spec.groups, spec.out_dim, -1) for tensor in tensors]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def unpack(self, spec: LayerSpec, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `pack`, up to a final reshape to each parameter's shape."""
        return (matrix[..., :-1], matrix[..., -1]) if spec.has_bias else (matrix,)


class WeightBiasAdapter(LayerAdapter[M]):
    """A module with one `weight` `[out, in/groups, *kernel]`, an optional `bias` `[out]`, and one output."""

    is_product = False
    """Whether the forward is a product with the weight, such as `functional.py` sees."""

    @abstractmethod
    def unbatched_ndim(self, module: M) -> int:
        """Dimensions of an input that has no batch dimension."""

    @abstractmethod
    def statistics(self, module: M, spec: LayerSpec, call: LayerCall, dtype: torch.dtype) -> LayerStatistics:
        """Moments of one call."""

    def groups(self, module: M) -> int:
        """Independent matrices that the weight is made of."""
        return 1

    def refusal(self, module: M) -> str | None:
        if not isinstance(module._parameters.get("weight"), nn.Parameter):
            return "the layer's weight is computed from other parameters (pruning, weight_norm, …)"
        return None

    def specs(self, module: M, name: str, trained: Collection[str]) -> tuple[LayerSpec, ...]:
        params = weight_and_bias(trained)
        if not params:
            return ()
        groups = self.groups(module)
        weight = module.get_parameter("weight")
        return (
            LayerSpec(
                name=name,
                params=params,
                in_dim=math.prod(weight.shape[1:]) + len(params) - 1,
                out_dim=weight.shape[0] // groups,
                groups=groups,
            ),
        )

    def capture(
        self,
        module: M,
        specs: Sequence[LayerSpec],
        window: CaptureWindow,
        sink: StatisticsSink,
    ) -> Handle:
        (spec,) = specs
        watch = LayerWatch(
            weight=module.get_parameter("weight"),
            unbatched_ndim=self.unbatched_ndim(module),
            wanted=sink.wanted,
            emit=lambda call: sink.emit(0, self.statistics(module, spec, call, sink.dtype)),
            discard=sink.discard,
            is_product=self.is_product,
        )
        return window.watch_layer(module, watch)


def weight_and_bias(trained: Collection[str]) -> tuple[str, ...]:
    """Of a weight and its bias those that are trained; none without the weight."""
    return tuple(name for name in ("weight", "bias") if name in trained) if "weight" in trained else ()


def own_forward(module: nn.Module, family: type[nn.Module]) -> str | None:
    """A reason to refuse a subclass of `family` whose forward may be another function of its input."""
    if type(module).forward is family.forward:
        return None
    return f"{type(module).__name__} has a forward of its own, which may not be that of {family.__name__}"


Adapters = Mapping[type[nn.Module], LayerAdapter[Any]]


def find_adapter(module: nn.Module, adapters: Adapters) -> LayerAdapter[Any] | None:
    """The adapter of the nearest class in the module's method resolution order."""
    return next((adapters[cls] for cls in type(module).__mro__ if cls in adapters), None)
