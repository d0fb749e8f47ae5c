"""Choices that do not go together on several processes, refused where the optimizer is built."""

from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.planning.strategies import Auto, FullySharded, Placement, Sharded
from kfac_optim.step.fixed_trust_region import TrustRegion
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.refresh_schedules import Background, Refresh
from kfac_optim.step.step_size import StepSize


def check_choices(
    config: DistributedConfig,
    *,
    refresh: Refresh,
    step_size: StepSize,
    adapt_damping: LevenbergMarquardt | None,
    in_shards: bool,
) -> None:
    """Raise ValueError for choices of `KFACOptimizer` that several processes cannot follow alike.

    Args:
        config: how they train.
        refresh: as of the optimizer.
        step_size: the choice of the optimizer.
        adapt_damping: the choice of the optimizer.
        in_shards: whether FSDP2 keeps parameters in shards.
    """
    if isinstance(refresh, Background) and not refresh.deterministic:
        raise ValueError(
            f"kfac_optim: on several processes {refresh} would take results over at steps that differ from process to "
            "process, as each finds them done at another time. Pass Background(..., deterministic=True)."
        )
    strategy = config.strategy
    candidates = (strategy.candidates or (Auto(),)) if isinstance(strategy, Auto) else (strategy,)
    judges = [each for each in (step_size if step_size.needs_objective else None, adapt_damping) if each is not None]
    if judges and (in_shards or any(isinstance(each, (Sharded, FullySharded)) for each in candidates)):
        raise ValueError(
            f"kfac_optim: {judges[0]} needs all gradients and momentum on every process, which has only a part of them "
            f"under {'FSDP2' if in_shards else strategy}. Use DistributedConfig(strategy=Replicated()), or "
            "TrustRegion() and a fixed damping."
        )
    apart = any(isinstance(each, Auto) or each.placement is Placement.FACTORS for each in candidates)
    if isinstance(step_size, TrustRegion) and step_size.after_momentum and (in_shards or apart):
        raise ValueError(
            f"kfac_optim: {step_size} needs both factors of a layer and its momentum on one process, and under "
            f"{'FSDP2' if in_shards else strategy} they may be on several. Use "
            "DistributedConfig(strategy=Replicated()) or Sharded(), with Placement.LAYERS, or TrustRegion()."
        )
