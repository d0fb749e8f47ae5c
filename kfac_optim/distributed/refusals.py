"""Choices that do not go together on several processes, refused where the optimizer is built."""

from collections.abc import Mapping, Sequence

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import is_precise
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.planning.strategies import Auto, FullySharded, Replicated, Sharded
from kfac_optim.inverses.base import Inverse
from kfac_optim.specs import Sketched
from kfac_optim.step.choices import Choices
from kfac_optim.step.refresh_schedules import Background


def refuse_coarse_sketches(blocks: Sequence[KFACBlock], config: DistributedConfig) -> None:
    """Raise ValueError where sketches of wide factors would be summed from numbers that are too coarse for them."""
    if is_precise(config.sums_dtype):
        return
    for block in blocks:
        if any(isinstance(kept, Sketched) for kept in block.spec.structure):
            raise ValueError(
                f"kfac_optim: sums_dtype={config.sums_dtype} would round away small eigenvalues of the "
                f"sketched factors of layer {block.name!r}. Leave sums_dtype out, as sketches are small, or keep "
                "whole factors: "
                "inverse=Cholesky()."
            )


def check_choices(config: DistributedConfig, choices: Choices, *, in_shards: bool) -> None:
    """Raise ValueError for choices of `KFACOptimizer` that several processes cannot follow alike.

    Args:
        config: how they train.
        choices: the user's choices.
        in_shards: whether FSDP2 keeps parameters in shards.
    """
    refresh = choices.refresh
    if isinstance(refresh, Background) and not refresh.deterministic:
        raise ValueError(
            f"kfac_optim: on several processes {refresh} would take results over at steps that differ from process to "
            "process, as each finds them done at another time. Pass Background(..., deterministic=True)."
        )
    named = choices.inverse.values() if isinstance(choices.inverse, Mapping) else (choices.inverse,)
    for each in named:
        if isinstance(each, Inverse) and each.takes_rows:
            raise ValueError(
                f"kfac_optim: {each!r} solves for the residuals of one process, and there are several. Pass "
                "distributed=False to train on each rank by itself, or another inverse."
            )
    strategy = config.strategy
    candidates = (strategy.candidates or (Auto(),)) if isinstance(strategy, Auto) else (strategy,)
    fractions = [each.inverse_worker_fraction for each in candidates if isinstance(each, Replicated)]
    if not choices.step_size.preconditions and (Auto() in candidates or any(fraction < 1 for fraction in fractions)):
        raise ValueError(
            f"kfac_optim: {choices.step_size!r} makes updates of the momentum, by the inverses, on every process that "
            f"updates a layer; under {strategy} some of these have no inverses. Use "
            "DistributedConfig(strategy=Replicated()), or Sharded()."
        )
    if choices.judges and (in_shards or any(isinstance(each, (Sharded, FullySharded)) for each in candidates)):
        raise ValueError(
            f"kfac_optim: {choices.judges[0]} needs all gradients and momentum on every process, which has only a part "
            f"of them under {'FSDP2' if in_shards else strategy}. Use DistributedConfig(strategy=Replicated()), or "
            "TrustRegion() and a fixed damping."
        )
