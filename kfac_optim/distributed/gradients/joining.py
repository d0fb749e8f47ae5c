"""Ranks that have run out of examples, within `Join([model, optimizer])` of `torch.distributed.algorithms.join`.

Such a rank shadows what the others do. DistributedDataParallel adds zeros to their gradients, and then this rank takes
each of their steps with them: it has no statistics, so that its mass is 0, but it votes, refreshes, preconditions and
updates what it owns, so that parameters, momentum and inverses stay those of all ranks. For that it needs the mean of
gradients: under `Sharded()` what it owns comes with the buckets that it shadows; otherwise a rank that goes on gives
the mean of all gradients to those that have none, which is sent as long as there are such ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import largest
from kfac_optim.distributed.gradients.wrappers import Wrappers


class Joining:
    """Knows whether ranks go on without examples, and gives them what their steps need.

    Args:
        wrappers: the wrappers of the model.
        to_owners: whether gradients may go to owners alone.
        directly: whether they go there directly, as the user says.

    Attributes:
        config: what `Join` has told the optimizer; None outside of one.
        has_run_out: whether this rank takes a step of the others, as it has no examples left.
    """

    def __init__(self, wrappers: Wrappers, *, to_owners: bool, directly: bool) -> None:
        self.config: Any = None
        self._wrappers = wrappers
        self._to_owners, self._directly = to_owners, directly
        self.has_run_out = False
        self._ended: Any = None  # what the `Join` that has ended had told the wrapper, which torch does not take back

    @property
    def is_on(self) -> bool:
        """Return whether forwards run in a `Join` that has ranks go on without examples."""
        wrapper = self._wrappers.latest
        told = None if wrapper is None or wrapper._join_config is self._ended else wrapper._join_config
        return told is not None and told.enable and not told.throw_on_early_termination

    @property
    def adds_nothing(self) -> bool:
        """Return whether this rank has run out of examples, and the mean of gradients is over such ranks as well."""
        wrapper = self._wrappers.latest
        return self.has_run_out and wrapper is not None and bool(wrapper._divide_by_initial_world_size)

    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of the wrapper; that of all ranks where none is known."""
        wrapper = self._wrappers.latest
        return dist.group.WORLD if wrapper is None else wrapper.process_group

    def hook(self, params: Callable[[], Sequence[nn.Parameter]], step: Callable[[], object]) -> JoinHook:
        """Return what `Join` calls on a rank that has run out, after the wrapper's own hook.

        Args:
            params: returns the parameters of the optimizer.
            step: takes a step.
        """
        return _StepHook(lambda: self._shadow_step(params(), step), self._end)

    def begin(self, config: Any) -> None:
        """Take notice of a `Join` that begins.

        Raises:
            RuntimeError: no wrapper is known, and on a rank without examples no forward would show it.
        """
        if config.enable and not config.throw_on_early_termination and self._wrappers.latest is None:
            raise RuntimeError(
                "kfac_optim: Join([model, optimizer]) came before the optimizer knows the DistributedDataParallel, "
                "which no forward would show it on a rank without examples: the others would wait for its steps. "
                "Build the optimizer from the wrapper, KFACOptimizer(model, ...), or pass model=model; or run one "
                "forward with gradients on all ranks before."
            )
        self.config = config

    def refuse(self, call: str, remedy: str) -> None:
        """Raise NotImplementedError within a `Join`, where not all ranks would come to a call."""
        if self.is_on and self.config is not None and self.config.enable:
            raise NotImplementedError(
                "kfac_optim: within Join([model, optimizer]) a rank that has run out of examples does not come to "
                f"{call}, for which the others would wait. {remedy} (If an exception has ended that block, call "
                "`with Join([model, optimizer], enable=False): pass` on all ranks first.)"
            )

    def check(self) -> None:
        """Look whether there is a `Join`.

        Raises:
            RuntimeError: ranks that run out of examples would take no steps, or wrong ones.
        """
        wrapper = self._wrappers.latest
        if not self.is_on or wrapper is None:
            return
        if self.config is None or not self.config.enable or self.config.is_first_joinable:
            raise RuntimeError(
                "kfac_optim: within join() of DistributedDataParallel ranks that have run out of examples take no "
                "step, and the steps of the others would wait for them. Use `with Join([model, optimizer]):` of "
                "torch.distributed.algorithms.join, the model first; or end the epoch on all ranks with the first that "
                "has run out, by join(throw_on_early_termination=True). (torch 2.13 keeps the state of a join() that "
                "was left: `with model.join(enable=False): pass` ends it.)"
            )
        if self._to_owners and not wrapper._divide_by_initial_world_size:
            raise RuntimeError(
                "kfac_optim: Sharded() divides gradients by the number of all ranks, also of those that have run out "
                "of examples: leave divide_by_initial_world_size of Join at True, or use Replicated()."
            )
        if self._to_owners and wrapper.find_unused_parameters and not self._directly:
            raise RuntimeError(
                "kfac_optim: within Join([model, optimizer]), where DistributedDataParallel has "
                "find_unused_parameters=True, gradients must go to their owners directly: pass "
                "DistributedConfig(exchange=Exchange.DIRECT)."
            )

    def give_gradients(
        self, communicator: Communicator, params: Sequence[nn.Parameter], *, whole: bool, scaled: bool
    ) -> None:
        """Give the mean of gradients to ranks that have run out of examples; a collective within a `Join`.

        Args:
            communicator: the communicator for the main line of the program.
            params: the parameters of the optimizer.
            whole: whether every rank needs all gradients.
            scaled: whether this rank has divided its gradients by a loss scale.

        Raises:
            RuntimeError: some rank has run out, and nobody divides the gradients that it owns by the loss scale.
        """
        if not self.is_on:
            return
        mine = [-1 if self.has_run_out else communicator.rank, int(self.has_run_out), int(scaled)]
        source, some, any_scaled = largest(communicator, mine, "ranks without examples", ())
        if some and not whole and any_scaled:
            raise RuntimeError(
                "kfac_optim: within Join([model, optimizer]) a rank that has run out of examples does not know the "
                "loss scale, by which it would divide the gradients that it owns under Sharded(). Train without "
                "GradScaler, as in bfloat16, or use DistributedConfig(strategy=Replicated())."
            )
        if not some:
            return
        gives = communicator.rank == source
        given = [int(gives and param.grad is not None) for param in params]
        for param, is_given in zip(params, largest(communicator, given, "which gradients", ()), strict=True):
            if not is_given and self.has_run_out:
                param.grad = None  # nobody uses it, and a bucket has zeros for it
            elif is_given and whole:
                own = param.grad if gives and param.grad is not None else torch.zeros_like(param)
                mean = communicator.all_reduce("gradient", own).wait()
                if self.has_run_out:
                    param.grad = mean

    def _end(self) -> None:
        wrapper = self._wrappers.latest
        self.config, self._ended = None, None if wrapper is None else wrapper._join_config

    def _shadow_step(self, params: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
        wrapper = self._wrappers.latest
        if wrapper is None or not wrapper.require_forward_param_sync:
            return  # the others were in a backward under `no_sync`, that no step follows
        for param in params:
            param.grad = None
        self._wrappers.take_shadowed()
        self.has_run_out = True
        try:
            step()
        finally:
            self.has_run_out = False


class _StepHook(JoinHook):
    def __init__(self, shadow: Callable[[], None], end: Callable[[], None]) -> None:
        super().__init__()
        self._shadow, self._end = shadow, end

    def main_hook(self) -> None:
        self._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end()
