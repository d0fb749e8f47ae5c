"""An inverse of the user's own, which has what the guide asks for and nothing else; covers inverses/state.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.oracles import assert_same
from helpers.plain import assert_identical, batch, clones, mlp, square_loss
from torch import Tensor

from kfac_optim import Inverse, InverseState, KFACOptimizer, LayerSpec, LayerStatistics, Structure
from kfac_optim.specs import Cost, Part

pytestmark = pytest.mark.usefixtures("float64")


class TraceState(InverseState):
    """Keeps the trace of `G` as the last statistics have it, and what the gradient is multiplied by."""

    def __init__(self) -> None:
        self.trace, self.factor = torch.zeros(()), torch.ones(())
        self.pending: Tensor | None = None

    def accumulate(self, stats: LayerStatistics) -> None:
        moment = stats.output_moment(Structure.DIAGONAL).sum()
        self.pending = moment if self.pending is None else self.pending + moment

    def has_pending(self) -> bool:
        return self.pending is not None

    def discard(self) -> None:
        self.pending = None

    def has_statistics(self) -> bool:
        return bool(self.trace > 0)

    def fold(self, loss_terms: float | Tensor, decay: float, loss_scale: float | Tensor = 1.0) -> None:
        assert self.pending is not None
        self.trace.copy_(loss_terms * self.pending)
        self.pending = None

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def adopt(self, shadow: Any) -> None:
        self.factor.copy_(shadow.factor)

    def setbacks(self) -> tuple[Tensor, Tensor]:
        return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    def counters(self) -> dict[str, Tensor]:
        return {}

    def tensors(self) -> dict[str, Any]:
        return {"trace": self.trace, "factor": self.factor}

    def load(self, tensors: Mapping[str, Any]) -> None:
        self.trace.copy_(tensors["trace"])
        self.factor.copy_(tensors["factor"])


class Trace(Inverse[TraceState]):
    """Divides by the trace of `G`, and the damping."""

    def init(self, spec: LayerSpec, *, dtype: torch.dtype, device: torch.device) -> TraceState:
        return TraceState()

    def refresh(self, states: Sequence[TraceState], dampings: Sequence[float]) -> None:
        for state, damping in zip(states, dampings, strict=True):
            state.factor.copy_(1 / (state.trace + damping))

    def apply(self, state: TraceState, grad: Tensor, damping: float) -> Tensor:
        return grad * state.factor

    def flops(self, spec: LayerSpec) -> Cost:
        return Cost(0, spec.in_dim * spec.out_dim)

    def parts(self, spec: LayerSpec) -> tuple[Part, ...]:
        return (Part("", 0, (), 1, 1),)


def test_blocks_of_equal_shapes_are_preconditioned_each_by_its_own_state() -> None:
    model = mlp(sizes=(4, 4, 4))
    optimizer = KFACOptimizer(model, lr=1.0, damping=0.1, kl_clip=None, inverse=Trace())
    before, outputs = clones(model.parameters()), []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda _, __, output: (output.retain_grad(), outputs.append(output))[0])
    square_loss(model(batch())).backward()
    optimizer.step()
    for place, output in enumerate(outputs):
        trace = len(output) * output.grad.square().sum()
        for param, start in list(zip(model.parameters(), before, strict=True))[2 * place : 2 * place + 2]:
            assert_same(start - param.detach(), param.grad / (trace + 0.1))
    resumed = KFACOptimizer(mlp(sizes=(4, 4, 4)), lr=1.0, damping=0.1, kl_clip=None, inverse=Trace())
    resumed.load_state_dict(optimizer.state_dict())
    assert_identical(resumed.state_dict(), optimizer.state_dict())


SHARING: dict[str, Callable[[TraceState], Any]] = {
    "averages": lambda state: state.averages(""),
    "age": lambda state: state.age(0.9),
    "tell": lambda state: state.tell(torch.ones(1)),
    "results": lambda state: state.results(""),
}


@pytest.mark.parametrize("name", SHARING)
def test_on_several_processes_it_is_refused_where_it_cannot_be_shared(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"TraceState cannot be shared.*averages\(\), age\(\) and results\("):
        SHARING[name](TraceState())
