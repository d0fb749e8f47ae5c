"""Which executor an optimizer has, and what carries out its refreshes; what it does for statistics workers."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.distributed import choice
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.expert_executor import ExpertExecutor
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.planning.strategies import Replicated, Statistics
from kfac_optim.distributed.serving.trainers import RoundRefresher, TrainingExecutor
from kfac_optim.distributed.serving.workers import OrderedRefresher, Service, ServingExecutor
from kfac_optim.step.background_refresh import BackgroundRefresher
from kfac_optim.step.choices import Choices
from kfac_optim.step.execution import Executor
from kfac_optim.step.loss_scale import ScalerSource
from kfac_optim.step.refresh_schedules import Background, Refresh
from kfac_optim.step.refresher import Refresher


def executor_of(
    optimizer: Optimizer,
    config: DistributedConfig,
    choices: Choices,
    window: CaptureWindow,
) -> DistributedExecutor | ExpertExecutor:
    """Return the executor of an optimizer; with statistics workers it depends on what this rank does.

    Args:
        optimizer: the optimizer; its groups and state are asked for at each step.
        config: the user's choices about processes.
        choices: all others of the user.
        window: counts the terms of the loss.

    Raises:
        ValueError: choices do not go together with statistics workers.
    """
    described = choice.described(choices.arguments())
    view = OptimizerView(weakref.ref(optimizer), choices.step_size, described, window, choices.estimate)
    if config.experts is not None:
        return ExpertExecutor(config, view)
    if (workers := config.workers) is None:
        return DistributedExecutor(config, view)
    _check_choices(config, choices)
    role = workers.role()
    # Among ranks that train none sends statistics; among workers all do.
    strategy = Replicated(statistics=Statistics.ALL if role.serves else Statistics.OWN)
    config = replace(config, strategy=strategy, group=role.group, overlap=False, workers=None)
    kind = ServingExecutor if role.serves else TrainingExecutor
    return kind(config, view, choice=workers, role=role)


def refresher_of(executor: Executor, refresh: Refresh) -> Refresher:
    """Return what carries out the refreshes of an optimizer."""
    if isinstance(executor, TrainingExecutor):
        return RoundRefresher(executor)
    if isinstance(executor, ServingExecutor):
        return OrderedRefresher(executor)
    return BackgroundRefresher(executor, refresh) if isinstance(refresh, Background) else Refresher(executor)


def serve(
    optimizer: Any,
    executor: Executor,
    binding: ModelBinding,
    window: CaptureWindow,
    scaler: ScalerSource,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
) -> int:
    """Do what `KFACOptimizer.serve` says."""
    if not isinstance(executor, ServingExecutor):
        raise RuntimeError(
            "kfac_optim: serve() is for statistics workers, and this rank is none. Pass "
            "distributed=DistributedConfig(workers=StatisticsWorkers(...)) on all ranks, and call it where "
            "role().serves."
        )
    if binding.model is None:
        raise RuntimeError(
            f"kfac_optim: {executor.choice!r} receives the parameters of the model, which is not known. Build the "
            "optimizer from the model, KFACOptimizer(model, ...), or pass model=."
        )

    def blocks() -> Sequence[KFACBlock]:
        return binding.coverage.blocks

    optimizer.train()  # the checkpoint may be of a model that held averages, and the first order replaces them anyway
    return Service(optimizer, executor, blocks, window, binding.model, scaler).run(batches, loss_of)


def dismiss(executor: Executor) -> None:
    """Do what `KFACOptimizer.dismiss_workers` says."""
    if isinstance(executor, ServingExecutor):
        raise RuntimeError(
            f"kfac_optim: rank {dist.get_rank()} is a statistics worker; dismiss_workers() is for the ranks that train."
        )
    if isinstance(executor, TrainingExecutor):
        executor.dismiss()


def _check_choices(config: DistributedConfig, choices: Choices) -> None:
    """Raise ValueError for choices that need statistics or refreshes where the training goes on."""
    if isinstance(choices.refresh, Background):
        raise ValueError(
            f"kfac_optim: {config.workers} refreshes beside the training already, and so does "
            f"refresh={choices.refresh}. Leave one of them out."
        )
    if choices.step_size.needs_closure:
        raise ValueError(
            f"kfac_optim: {choices.step_size!r} evaluates the closure of a step at other parameters, and on a "
            f"worker of {config.workers} no step has one. Use AdaptiveTrustRegion(), or leave workers out."
        )
    if choices.judges:
        raise ValueError(
            f"kfac_optim: {choices.judges[0]!r} looks at the curvature of the loss, or takes steps back, which asks "
            f"for inverses at once; with {config.workers} they come later. Use AdaptiveTrustRegion() and a fixed "
            "damping, or leave workers out."
        )
