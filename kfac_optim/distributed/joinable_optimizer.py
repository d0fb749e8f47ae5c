"""An optimizer may be handed to `Join([model, optimizer])` by the methods of a base class."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from kfac_optim.capture.window import CaptureWindow
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.expert_executor import ExpertExecutor
from kfac_optim.distributed.gradients.joining import Joining
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Executor
from kfac_optim.step.gate import params_of


class JoinableOptimizer(Optimizer):
    """Has what `torch.distributed.algorithms.join.Join` asks for, on ranks that may run out of examples."""

    _choices: Choices
    _executor: Executor
    _window: CaptureWindow

    def join_hook(self, **_: Any) -> JoinHook:
        """Return what `torch.distributed.algorithms.join.Join([model, optimizer])` calls where examples have run out.

        A rank that has none left takes the steps of the others with them. One backward that reduces belongs to each
        step, and what changes at each step, as a scheduled rate, has to be changed on such a rank as well.

        Raises:
            NotImplementedError: ranks have experts of their own, or steps evaluate a closure again.
        """
        if self._choices.judges:
            raise NotImplementedError(
                "kfac_optim: within Join([model, optimizer]) a rank that has run out of examples has no loss, by which "
                f"{self._choices.judges[0]!r} decides on steps. Use AdaptiveTrustRegion() and a fixed damping, or "
                "leave Join out."
            )
        if isinstance(self._executor, ExpertExecutor):
            raise NotImplementedError(
                "kfac_optim: within Join([model, optimizer]) a rank that has run out of examples would not work on the "
                "tokens that other ranks send to its experts. Leave Join out, and have all ranks take as many steps."
            )
        joining = self._joining
        return JoinHook() if joining is None else joining.hook(lambda: params_of(self.param_groups), self._shadow_step)

    def _shadow_step(self) -> None:
        # If this rank has begun a step that it will not end, the gradients of its micro-batches belong to no step.
        self._window.mark_stale()
        self.step()

    @property
    def join_device(self) -> torch.device:
        """Return the device of the parameters."""
        return params_of(self.param_groups)[0].device

    @property
    def join_process_group(self) -> Any:
        """Return the process group on which the model is wrapped."""
        return dist.group.WORLD if self._joining is None else self._joining.group()

    @property
    def _join_config(self) -> Any:
        return None if self._joining is None else self._joining.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if self._joining is not None:
            self._joining.begin(config)

    @property
    def _joining(self) -> Joining | None:
        return None if self._ranks is None else self._ranks.joining

    @property
    def _ranks(self) -> DistributedExecutor | None:
        """Return what carries out the part of the ranks that train the same layers; None on one process."""
        executor = self._executor
        if isinstance(executor, ExpertExecutor):
            return executor.shared
        return executor if isinstance(executor, DistributedExecutor) else None
