"""The check that the captured calls of a block account for its whole gradient.

Backward adds `Σ g zᵀ` to the gradient of a matrix, summed over every use of it: `z` is what the matrix is multiplied by
and `g` the gradient of the product. `A` and `G` are right only if all these uses were captured. So on the first step
with statistics of a block both sides are compared: what backward adds to `.grad` on this process, before hooks on the
parameter, clipping, unscaling or a reduction over ranks; and `Σ g zᵀ` of the calls that were captured. Where they
differ, part of the gradient came by a way that nobody has seen, whatever that way is, and the block is not
preconditioned.

One difference does not count: the gradient of a penalty on the weights themselves. It has no examples behind it, and
so no part in the Fisher; it is preconditioned with the rest. The usual ones are recognised: multiples of `W`, of
`sign W` and of `W Wᵀ W`, which squares, absolute values and deviations from orthogonality give.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.layer_statistics import LayerStatistics
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.autograd import on_gradient_first, reaches
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.precision import rounding_of_products, without_autocast
from kfac_optim.utils.sharded_params import whole
from kfac_optim.utils.streams import brought

# Directions along which the two sides are compared: enough for the norm of a difference to show.
_DIRECTIONS = 4

# The relative difference that counts as none, by the dtype in which the sides are compared.
_TOLERANCE = {torch.float64: 1e-6}
_TOLERANCE_ELSEWHERE = 1e-3

# The smallest singular value, in units of the largest, of directions that count as independent.
_INDEPENDENT = 1e-5

# Rounding errors that are allowed for, in units of the coarsest dtype that took part.
_ROUNDINGS = 16


class GradientCheck:
    """Compares what backward adds to the gradients of one block with what was captured, in one step.

    The sides are matrices `[groups, out, in]`. Only their products with a few random directions `V` `[in, 4]` are kept:
    matrices that differ, differ there too with probability one, and the check takes next to no memory.

    Attributes:
        is_done: whether there is nothing left to compare.
        differs: whether the present step has shown a difference.

    Args:
        spec: the block's.
        pack: makes one matrix `[groups, out, in]` of tensors shaped like the block's parameters.
    """

    def __init__(self, spec: LayerSpec, pack: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.is_done = False
        self._spec, self._pack = spec, pack
        self._handles: list[RemovableHandle] = []
        self.reset()

    def reset(self) -> None:
        """Forget this step: its gradients were thrown away."""
        self.differs = False
        self.end()

    def end(self) -> None:
        """Let go of what this step has shown."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._params: Sequence[nn.Parameter] = ()
        self._spoilt = False
        self._directions: Tensor | None = None
        self._added: Tensor | None = None
        self._captured: Tensor | None = None
        self._size: Tensor | None = None
        self._penalties: dict[int, list[Tensor]] = {}
        self._calls = 0
        self._dtypes: set[tuple[torch.dtype, str]] = set()

    @property
    def has_begun(self) -> bool:
        """Return whether gradients are listened to."""
        return self._directions is not None

    def begin(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """Listen to what backward adds to the gradients from now on, unless that is so already.

        Args:
            params: what backward accumulates into, in the order of the block's parameters.
            dtype: the dtype in which the sides are compared.
        """
        if self._directions is not None:
            return
        self._params = tuple(params)
        for index, param in enumerate(params):
            if param.requires_grad:
                self._handles.append(on_gradient_first(param, weakly(self.add, index)))
        generator = torch.Generator("cpu").manual_seed(0)
        shape = self._spec.in_dim, _DIRECTIONS
        directions = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        self._directions = directions.to(dtype).to(params[0].device, non_blocking=True)

    def spoil(self) -> None:
        """Have this step show nothing, as part of what backward went through is not known any more."""
        self._spoilt = True

    def capture(self, stats: LayerStatistics, call: LayerCall) -> None:
        """Add one captured call, within the backward that has come to its output.

        Args:
            stats: statistics of the call.
            call: the call, with the gradient of this backward alone.
        """
        params = self._params
        # What this backward does not add to `.grad`, though the call has it, would be taken for a difference.
        reached = call.in_operator or all(map(reaches, params))
        if self._directions is None or not reached:
            self.spoil()
            return
        found = stats.gradient_along(self._directions)
        if found is None:  # the adapter does not say what its calls add
            self.end()
            self.is_done = True
            return
        product, size = found
        self._captured = product if self._captured is None else self._captured + product
        self._size = size if self._size is None else self._size + size
        self._calls += 1
        tensors = (call.gradient, *params, *([] if call.input is None else [call.input]))
        self._dtypes |= {(each.dtype, each.device.type) for each in tensors if each.is_floating_point()}

    @torch.no_grad()
    def add(self, index: int, gradient: Tensor) -> None:
        """Add what a backward brings to parameter number `index`."""
        params = self._params
        if self._directions is None or not reaches(params[index]):
            return
        if gradient.layout is not torch.strided:
            self.spoil()
            return
        kind = gradient.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):  # backward itself multiplies in the narrow dtype then
            self._dtypes.add((torch.get_autocast_dtype(kind), kind))
        with without_autocast((kind,)):
            product = self._matrix(params, index, gradient) @ self._directions
            self._added = product if self._added is None else self._added + product
            if index not in self._penalties:  # now, as a parameter kept in shards is whole within backward alone
                held = self._matrix(params, index, params[index].detach())
                along = held @ self._directions
                self._penalties[index] = [along, held.sign() @ self._directions, held @ (held.mT @ along)]

    def _matrix(self, params: Sequence[nn.Parameter], index: int, tensor: Tensor) -> Tensor:
        """Make the matrix `[groups, out, in]` of a tensor that is shaped like one parameter, the others being zero."""
        assert self._directions is not None
        dtype = self._directions.dtype
        tensors = [torch.zeros(param.shape, dtype=dtype, device=param.device) for param in params]
        tensors[index] = whole(tensor).to(dtype)
        return self._pack(tensors)

    def measures(self) -> Tensor | None:
        """Give norms of the difference, of what was added, of what was captured, and its size.

        Returns:
            `[4]`; None if the step shows nothing: one side is missing, or the step was spoilt.
        """
        if self._spoilt or self._added is None or self._captured is None or self._size is None:
            return None
        sides = self._added - self._captured, self._added, self._captured
        # In float64 also along the way: of float32 the squares of small gradients are zero.
        wide = [side.double() for side in (*sides, self._size)]
        return torch.stack([torch.linalg.vector_norm(side) for side in wide])

    def conclude(self, difference: float, added: float, captured: float, size: float) -> None:
        """Judge the step by its `measures`; one whose numbers are zero or not finite shows nothing."""
        larger = max(added, captured)
        if larger > 0 and math.isfinite(difference) and self._directions is not None and self._added is not None:
            # Where weights are cast, as under autocast, the sum over calls is taken in the narrow dtype.
            rounding = _ROUNDINGS * max(rounding_of_products(*each) for each in self._dtypes) * math.sqrt(self._calls)
            tolerance = max(_TOLERANCE.get(self._directions.dtype, _TOLERANCE_ELSEWHERE), rounding)
            # Elements of a gradient below that are lost; float16 has them where the loss is not scaled.
            lost = max(torch.finfo(dtype).smallest_normal for dtype, _ in self._dtypes)
            elements = self._added.numel() * self._spec.in_dim
            allowed = tolerance * larger + rounding * size + lost * math.sqrt(elements)
            self.differs = difference > allowed and self._unexplained() > allowed
            self.is_done = not self.differs

    def _unexplained(self) -> float:
        """Give the norm of what no penalty on the weights explains of the difference."""
        assert self._added is not None
        assert self._captured is not None
        rest = (self._added - self._captured).double().flatten()
        # One kind of penalty after the other, and not many: few elements may be the sum of as many columns by chance.
        columns = [each.double().flatten() for kind in zip(*self._penalties.values(), strict=True) for each in kind]
        basis = torch.stack(columns[: max(1, rest.numel() // 2)], dim=1)
        basis = basis / torch.linalg.vector_norm(basis, dim=0).clamp(min=torch.finfo(basis.dtype).tiny)
        turned, lengths, _ = torch.linalg.svd(basis, full_matrices=False)
        kept = turned[:, lengths > _INDEPENDENT * lengths[0]]
        return float(torch.linalg.vector_norm(rest - kept @ (kept.T @ rest)))


def conclude(checks: Iterable[GradientCheck]) -> None:
    """Judge the steps of all checks that have begun: one host synchronisation, where there is any."""
    begun = [check for check in checks if check.has_begun]
    if not begun:
        return
    measured = [(check, measures) for check in begun if (measures := check.measures()) is not None]
    if measured:
        device = measured[0][1].device
        numbers = torch.stack([brought(measures, device) for _, measures in measured]).tolist()
        for (check, _), four in zip(measured, numbers, strict=True):
            check.conclude(*four)
    for check in begun:
        check.end()
