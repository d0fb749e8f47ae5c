"""The container of optimizers of torchtitan, which builds K-FAC optimizers as well and hands them the model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer

from kfac_optim.optimizer import KFACOptimizer


class KFACOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
    """Is torchtitan's container, in which groups of parameters may name the optimizer "KFAC".

        optimizer=KFACOptimizersContainer.Config(
            implementation="for-loop",
            param_groups=[
                ParamGroupConfig(pattern=".*", optimizer_name="KFAC", optimizer_kwargs={"lr": 0.01, "momentum": 0.9})
            ],
        )

    torchtitan knows its optimizers by a list of names, and hands none of them the model. K-FAC could find it at the
    first forward, but torchtitan reads a checkpoint before, into the state that the optimizer has by then: statistics
    and inverses have a place there only if the layers are known. `optimizer_factory_kwargs_by_name={"KFAC": {…}}` takes
    the arguments of `KFACOptimizer` that are not numbers of param groups.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Holds the settings of torchtitan's own container, unchanged."""

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Optimizer]:
        if name == "KFAC":
            return partial(_build, self.model_parts)
        factory: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        return factory


def _build(model_parts: list[nn.Module], groups: list[dict[str, Any]], **arguments: Any) -> KFACOptimizer:
    """Build the optimizer of the part of the model that holds these parameters."""
    first = groups[0]["params"][0]
    model = next(part for part in model_parts if any(param is first for param in part.parameters()))
    return KFACOptimizer(groups, model=model, **arguments)
