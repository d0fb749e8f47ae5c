"""Choices that do not go together on several processes, refused where the optimizer is built."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import is_precise
from kfac_optim.blocks.selection import holders
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.planning.strategies import Auto, Exchange, FullySharded, Sharded
from kfac_optim.fisher.estimates import NamedLoss
from kfac_optim.specs import Sketched
from kfac_optim.step.choices import Choices
from kfac_optim.step.refresh_schedules import Background, Staggered
from kfac_optim.utils.sharded_params import is_part
from kfac_optim.utils.text import listed


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


def refuse_wrapper(wrapper: DistributedDataParallel, config: DistributedConfig) -> None:
    """Refuse a wrapper that does not bring all gradients to other ranks in each step."""
    for hook, state in getattr(wrapper, "_comm_hooks", ()):  # private; a wrapper that delays all messages has none
        if isinstance(state, PostLocalSGDState):
            raise RuntimeError(
                f"kfac_optim: {getattr(hook, '__name__', hook)} of this DistributedDataParallel averages gradients "
                "over all of its ranks at the first steps alone, and K-FAC needs their mean in each. Wrap the model "
                "again without this hook; or, for local SGD, with process_group= the ranks that average in each step, "
                "and average the parameters of all ranks by torch's PeriodicModelAverager."
            )
    directly = config.exchange is Exchange.DIRECT
    if isinstance(config.strategy, Sharded | Auto) and wrapper.skip_all_reduce_unused_params and not directly:
        raise RuntimeError(
            "kfac_optim: under Sharded() all ranks bring every bucket of gradients to its owner, and "
            "skip_all_reduce_unused_params of this DistributedDataParallel leaves some out. Pass "
            "DistributedConfig(exchange=Exchange.DIRECT), or use Replicated()."
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
    if choices.by_rows:
        raise ValueError(
            f"kfac_optim: {choices.by_rows[0]!r} solves for the residuals of one process, and there are several. Pass "
            "distributed=False to train on each rank by itself, or another inverse."
        )
    if config.experts is not None:
        _check_expert_choices(choices)
    strategy = config.strategy
    candidates = (strategy.candidates or (Auto(),)) if isinstance(strategy, Auto) else (strategy,)
    if choices.judges and (in_shards or any(isinstance(each, (Sharded, FullySharded)) for each in candidates)):
        raise ValueError(
            f"kfac_optim: {choices.judges[0]} needs all gradients and momentum on every process, which has only a part "
            f"of them under {'FSDP2' if in_shards else strategy}. Use DistributedConfig(strategy=Replicated()), or "
            "TrustRegion() and a fixed damping."
        )


def _check_expert_choices(choices: Choices) -> None:
    """Raise ValueError for choices that look at the whole model, of which each rank has a part."""
    if choices.evaluators:
        raise ValueError(
            f"kfac_optim: {choices.evaluators[0]!r} evaluates the whole model, and each rank has experts of its own. "
            "Use AdaptiveTrustRegion() and a fixed damping."
        )
    if isinstance(choices.estimate, NamedLoss) and choices.estimate.several:
        raise ValueError(
            f"kfac_optim: {choices.estimate!r} takes several passes of backward, as many as the layers of a rank need. "
            "With experts all ranks take part in each pass, as tokens go to experts on other ranks, and they need "
            "different numbers of passes. Pass estimate=MonteCarlo(criterion) or CurvaturePropagation(criterion), "
            "which take one."
        )
    if isinstance(choices.schedule, Staggered):
        raise ValueError(
            f"kfac_optim: {choices.refresh} spreads refreshes over all layers of the model, and each rank has experts "
            "of its own. Use Together()."
        )


def refuse_expert_layout(
    blocks: Sequence[KFACBlock], experts: Mapping[nn.Parameter, str], wrapper: DistributedDataParallel | None
) -> None:
    """Refuse parameters of experts that lie, or are averaged, otherwise than each rank's own.

    Args:
        blocks: all there are.
        experts: the parameters of experts, and their names.
        wrapper: the wrapper of the model; None: nothing is wrapped.

    Raises:
        NotImplementedError: another layout would be needed.
        RuntimeError: the wrapper averages parameters of experts.
    """
    if parts := [name for param, name in experts.items() if is_part(param)]:
        raise NotImplementedError(
            f"kfac_optim: the experts {listed(parts)} are DTensors, or pieces of them. Experts are to be parameters "
            "that hold what lies on this rank: replace each by nn.Parameter(param.to_local()) before the optimizer is "
            "built, and use it as it is where the forward calls to_local(). Or leave them to SGD: leave experts out of "
            f"DistributedConfig, with strategy=Replicated(), and pass skip_layers={holders(parts)}."
        )
    for block in blocks:
        if len({param in experts for param in block.params}) > 1:
            raise NotImplementedError(
                f"kfac_optim: of the parameters {listed(block.param_names)} of layer {block.name!r} some are of "
                "experts and some are shared by all ranks. Name all of them in Experts, or none."
            )
    if wrapper is None:
        return
    ignored = wrapper.parameters_to_ignore
    # The wrapper looks for names that hold a dot, even of what lies in the model itself.
    reduced = {
        param
        for name, module in wrapper.module.named_modules()
        for last, param in module.named_parameters(recurse=False)
        if f"{name}.{last}" not in ignored
    }
    averaged = [name for param, name in experts.items() if param in reduced]
    if averaged:
        raise RuntimeError(
            f"kfac_optim: DistributedDataParallel averages the experts {listed(averaged)}, which differ from rank "
            "to rank, and gave all ranks the first rank's when it was made. Have it ignore them, before it is made: "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name for name, _ in "
            "model.named_parameters() if ...]), and keep them in a module of their own, for it does not ignore "
            "parameters of the model itself."
        )
