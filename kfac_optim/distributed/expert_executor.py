"""Experts beside shared layers: one step of both, where each rank has experts that others do not have.

What all ranks share is carried out by a `DistributedExecutor`, as without experts. What a rank has of its own is
carried out by this rank alone, or with those that hold copies of it. Both take part in one step: a vote of all ranks
says whether it is taken, and sums over the step take each shared layer and each expert once.

[Note: the loss of an expert] Let each of `P` ranks have the mean loss of `m` terms, and each expert `C` copies. Those
ranks whose tokens come to one copy are then `P/C`, and their joined loss is the mean of theirs, over `m P/C` terms. The
gradients that backward brings to an expert's output are of the sum of their losses, `P/C` times those of the joined
one. With that number of terms and that scale a copy folds what a rank of `P/C` times the examples would, and copies
share as ranks do that train a layer together.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.preconditioning import is_used
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.distributed.communication.process_groups import ranks_of
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.executor import DistributedExecutor
from kfac_optim.distributed.gradients.flow import ReplicatedGradients, sum_scalars, total_norm
from kfac_optim.distributed.gradients.undivided import DivisionCheck
from kfac_optim.distributed.optimizer_view import OptimizerView
from kfac_optim.distributed.refusals import refuse_expert_layout
from kfac_optim.step.execution import Agreement, Executor, Trained
from kfac_optim.step.roles import Gradients, LossShare, Parts, Statistics, WholeStates


class ExpertExecutor(Executor):
    """Carries out steps in which all ranks share some layers, and each has experts of its own.

    Args:
        config: the user's choices, with experts.
        optimizer: what is to be known of the optimizer.

    Attributes:
        shared: carries out the part of the layers that are the same on all ranks.
        own: carries out the part of the experts of this rank.
    """

    several = True
    sees_all_gradients = False

    def __init__(self, config: DistributedConfig, optimizer: OptimizerView) -> None:
        super().__init__()
        assert config.experts is not None, "there are experts"
        self.experts = config.experts
        self.shared = DistributedExecutor(config, optimizer)
        self.own: Executor = Executor()
        if self.experts.count > 1:
            # Which bytes go where was said of the layers that all ranks share.
            of_copies = DistributedConfig(
                group=self.experts.copies,
                timeout=config.timeout,
                sums_dtype=config.sums_dtype,
                cost=config.cost,
                observe=config.observe,
            )
            self.own = DistributedExecutor(of_copies, optimizer.without_terms())
        self._params: dict[nn.Parameter, str] = {}
        self._is_known = False
        self._in_passes = optimizer.names_loss
        self._division = DivisionCheck()
        self.statistics = ExpertStatistics(self)
        self.gradients = ExpertGradients(self)
        self.states = ExpertStates(self)

    @property
    def worker(self) -> int:  # type: ignore[override]
        return self.shared.worker

    @property
    def source(self) -> int:
        return self.shared.source

    @property
    def is_first_copy(self) -> bool:
        """Return whether sums over ranks take the experts of this rank: of copies they take the first."""
        return self.own.worker == 0

    @property
    def owners(self) -> list[int]:
        """Return the ranks that hold the experts of this rank, by their numbers among those that train together."""
        if not isinstance(self.own, DistributedExecutor):
            return [self.worker]
        everyone = ranks_of(self.shared.ranks.group)
        return [everyone.index(rank) for rank in ranks_of(self.own.ranks.group)]

    def is_own(self, param: nn.Parameter) -> bool:
        """Return whether a parameter is of an expert."""
        return param in self._params

    def of(self, block: KFACBlock) -> Executor:
        """Return what carries out the part of a block."""
        return self.own if self.is_own(block.params[0]) else self.shared

    def divided(self, blocks: Iterable[KFACBlock]) -> tuple[list[KFACBlock], list[KFACBlock]]:
        """Return the blocks that all ranks share, and those of experts."""
        parts: tuple[list[KFACBlock], list[KFACBlock]] = [], []
        for block in blocks:
            parts[self.is_own(block.params[0])].append(block)
        return parts

    def trained(self, trained: Trained) -> tuple[Trained, Trained]:
        """Return what all ranks train together, and what this rank has of its own."""
        params: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for param in trained.params:
            params[self.is_own(param)].append(param)
        both = zip(self.divided(trained.blocks), params, strict=True)
        shared, own = (trained._replace(blocks=blocks, params=some) for blocks, some in both)
        return shared, own

    # -- the model -----------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module | None) -> None:
        super().attach(model)
        if model is not None:
            self._params, self._is_known = self.experts.params(model), True
            self._division.follow(self._params)
        self.shared.attach(model)

    def begin_forward(self, model: nn.Module) -> int:
        self._division.follow(self._params)  # an expert may have been unfrozen
        return self.shared.begin_forward(model)

    def close(self) -> None:
        self.shared.close()
        self.own.close()

    def release(self) -> None:
        self.shared.release()
        self.own.release()

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        refuse_expert_layout(blocks, self._params, self.shared.wrapper)
        of_all, own = self.divided(blocks)
        for block in own:
            # An expert that had no token waits for the period, as all do: the passes of a named loss go through the
            # exchange of tokens, in which all ranks take part.
            block.waits_for_period = self._in_passes
        self.shared.check(of_all, [param for param in params if not self.is_own(param)])
        self.own.check(own, [param for param in params if self.is_own(param)])
        ranks, copies = len(ranks_of(self.shared.ranks.group)), self.experts.count
        if ranks % copies:
            raise ValueError(
                f"kfac_optim: {ranks} ranks train together, which {copies} copies of each expert do not divide. Pass "
                "Experts(copies=...) the group of one dimension of a mesh of all of them."
            )

    # -- a step --------------------------------------------------------------------------------------------------

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        if not self._is_known:
            raise RuntimeError(
                f"kfac_optim: {self.experts} names layers of a model that is not known. Build the optimizer from the "
                "model, KFACOptimizer(model, ...), or pass model=."
            )
        shared, own = self.trained(trained)
        of_all = self.shared.agree(shared, finite=finite, summed=summed, counted=counted, rescaled=rescaled)
        # On copies too the step is taken if all ranks take it.
        here = self.own.agree(own, finite=of_all.finite, summed=of_all.summed, counted=None, rescaled=rescaled)
        if of_all.finite:
            main, averages = self.shared.ranks.main, self.shared.wrapper is not None
            self._division.check(own.params, main, self._sum_over_copies, copies=self.experts.count, averages=averages)
        return of_all._replace(
            sampled={*of_all.sampled, *here.sampled},
            graded={*of_all.graded, *here.graded},
            unaccounted={*of_all.unaccounted, *here.unaccounted},
            used={*(of_all.used or ()), *(filter(is_used, own.blocks) if here.used is None else here.used)},
            restarted=[*of_all.restarted, *here.restarted],
        )

    def _sum_over_copies(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self.own.ranks.main) if isinstance(self.own, DistributedExecutor) else values

    def loss_shares(self, sampled: Sequence[KFACBlock], count: LossCount) -> tuple[list[LossShare], bool]:
        """Tell what loss the statistics are of; see [Note: the loss of an expert]. A collective."""
        main, (shared, own) = self.shared.ranks.main, self.divided(sampled)
        (of_shared,), _ = self.shared.loss_shares(shared, count)
        terms = torch.as_tensor(of_shared.terms.averaged, dtype=torch.float64, device=main.device).reshape(())
        # A rank on which nothing took statistics has counted none of its terms, which are taken to be as many.
        mine = torch.stack([terms, terms > 0, torch.full_like(terms, len(sampled))])
        total, counted, found = main.all_reduce("terms of the loss", mine).wait()
        copies = self.experts.count
        terms = total * (main.world_size / counted.clamp(min=1)) / copies
        joined = count._replace(averaged=terms if isinstance(count.averaged, Tensor) else float(terms))
        return [of_shared, LossShare(own, joined, of_shared.scale * main.world_size / copies)], bool(found > 0)

    def gradients_dropped(self) -> None:
        self._division.forget()
        self.shared.gradients_dropped()
        self.own.gradients_dropped()

    def publish(self) -> None:
        self.shared.publish()
        self.own.publish()

    def clip_grad_norm_(
        self, trained: Trained, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        shared, own = self.trained(trained)
        norm = self.shared.grad_norm(shared, norm_type)
        grads = [param.grad for param in own.params if param.grad is not None]
        main = self.shared.ranks.main
        of_experts = total_norm(grads if self.is_first_copy else [], norm_type, main, norm.dtype)
        norm = nn.utils.get_total_norm([norm.to(of_experts.device), of_experts], norm_type)
        self.shared.clip(shared, max_norm, norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        nn.utils.clip_grads_with_norm_(own.params, max_norm, norm)
        return norm

    def consolidate(self, trained: Trained, to: int | None) -> None:
        if to is not None:
            raise ValueError(
                f"kfac_optim: to={to} would leave out the experts of other ranks, whose parameters and states only "
                "they have. Call consolidate_state_dict(to=None) on all ranks, and save the state_dict() of each rank."
            )
        shared, own = self.trained(trained)
        self.shared.consolidate(shared, None)
        self.own.consolidate(own, None)

    def mean_over_examples(self, values: Tensor) -> Tensor:
        return self.shared.mean_over_examples(values)


class ExpertStatistics(Statistics):
    """Sends statistics of shared layers the way of their strategy; those of experts stay where they are."""

    def __init__(self, executor: ExpertExecutor) -> None:
        self._executor = executor

    def emitted(self, block: KFACBlock) -> None:
        self._of(block).emitted(block)

    def tell_counts(self, blocks: Sequence[KFACBlock], count: LossCount, gradient_scale: float | Tensor) -> None:
        for statistics, some in self._divided(blocks):
            statistics.tell_counts(some, count, gradient_scale)

    def settle(self) -> None:
        self._executor.shared.statistics.settle()
        self._executor.own.statistics.settle()

    def merge(self, blocks: Sequence[KFACBlock]) -> None:
        for statistics, some in self._divided(blocks):
            statistics.merge(some)

    def mark(self, blocks: Sequence[KFACBlock]) -> None:
        for statistics, some in self._divided(blocks):
            statistics.mark(some)

    def solve(self, blocks: Sequence[KFACBlock]) -> None:
        for statistics, some in self._divided(blocks):
            statistics.solve(some)

    def share(self, blocks: Sequence[KFACBlock]) -> None:
        for statistics, some in self._divided(blocks):
            statistics.share(some)

    def has_statistics(self, block: KFACBlock) -> bool:
        return self._of(block).has_statistics(block)

    def keeps(self, block: KFACBlock) -> bool:
        return self._of(block).keeps(block)

    def counters(self, block: KFACBlock) -> Mapping[str, float | Tensor]:
        return self._of(block).counters(block)

    def setbacks(self, blocks: Sequence[KFACBlock]) -> list[tuple[int, int]]:
        found: dict[KFACBlock, tuple[int, int]] = {}
        for statistics, some in self._divided(blocks):
            found |= zip(some, statistics.setbacks(some), strict=True)
        return [found[block] for block in blocks]

    def owners(self, block: KFACBlock) -> Sequence[int]:
        executor = self._executor
        if not executor.is_own(block.params[0]):
            return executor.shared.statistics.owners(block)
        return [executor.owners[number] for number in executor.own.statistics.owners(block)]

    def _of(self, block: KFACBlock) -> Statistics:
        return self._executor.of(block).statistics

    def _divided(self, blocks: Sequence[KFACBlock]) -> list[tuple[Statistics, list[KFACBlock]]]:
        """Return those of the two that have some of the blocks: where none is shared, other ranks may not be here."""
        shared, own = self._executor.divided(blocks)
        both = (self._executor.shared, shared), (self._executor.own, own)
        return [(executor.statistics, some) for executor, some in both if some]


class ExpertGradients(Gradients):
    """Leaves the gradients of experts where they are, and has those of shared layers go the way of their strategy."""

    apart = True

    def __init__(self, executor: ExpertExecutor) -> None:
        super().__init__()
        self._executor = executor
        self.stacks.goes_alone = lambda param: not executor.is_own(param)  # as experts are others on each rank

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        shared, own = self._executor.divided(blocks)
        return [*self._shared.gradients(shared), *self._own.gradients(own)]

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        grad_of = dict(zip(blocks, grads, strict=True))
        found: dict[KFACBlock, Parts] = {}
        for flow, some in zip((self._shared, self._own), self._executor.divided(blocks), strict=True):
            found |= zip(some, flow.precondition(some, [grad_of[block] for block in some]), strict=True)
        return [found[block] for block in blocks]

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        here, all_ = self._executor.divided(blocks), self._executor.divided(covered)
        for flow, some, known in zip((self._shared, self._own), here, all_, strict=True):
            found |= flow.direction({block: blocks[block] for block in some}, known)
        return found

    def whole(
        self, blocks: Sequence[KFACBlock], tensors: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[KFACBlock, Parts]]:
        return [each for flow, some in self._divided(blocks) for each in flow.whole(some, tensors)]

    def updates(self, made: Mapping[KFACBlock, Parts], blocks: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        found: dict[nn.Parameter, Tensor] = {}
        for flow, some in self._divided(blocks):
            found |= flow.updates({block: made[block] for block in some if block in made}, some)
        return found

    def as_makers_have(self, blocks: Sequence[KFACBlock], numbers: Mapping[KFACBlock, Tensor]) -> Sequence[Tensor]:
        found: dict[KFACBlock, Tensor] = {}
        for flow, some in self._divided(blocks):
            here = {block: numbers[block] for block in some if block in numbers}
            found |= zip(some, flow.as_makers_have(some, here), strict=True)
        return [found[block] for block in blocks]

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        shared = [param for param in params if not self._executor.is_own(param)]
        here = set(self._shared.owned(shared))
        return [param for param in params if self._executor.is_own(param) or param in here]

    def counts(self, param: nn.Parameter) -> bool:
        if self._executor.is_own(param):
            return self._executor.is_first_copy
        return self._executor.worker == 0 if self._is_replicated else self._shared.counts(param)

    def makes_for_sums(self, block: KFACBlock) -> bool:
        if self._executor.is_own(block.params[0]):
            return self._executor.is_first_copy
        return self._executor.worker == 0 if self._is_replicated else self._shared.makes_for_sums(block)

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        main = self._executor.shared.ranks.main
        return sum_scalars(values.to(main.device), main).to(values.device)

    def _divided(self, blocks: Iterable[KFACBlock]) -> list[tuple[Gradients, list[KFACBlock]]]:
        """Return the flows that have some of the blocks, each with these: all ranks have the same shared ones."""
        both = zip((self._shared, self._own), self._executor.divided(blocks), strict=True)
        return [(flow, some) for flow, some in both if some]

    @property
    def _shared(self) -> Gradients:
        return self._executor.shared.gradients

    @property
    def _own(self) -> Gradients:
        return self._executor.own.gradients

    @property
    def _is_replicated(self) -> bool:  # so that every rank knows sums over all shared parameters
        return isinstance(self._shared, ReplicatedGradients)


class ExpertStates(WholeStates):
    """Knows for checkpoints what this rank holds: its experts, and some of the shared layers."""

    def __init__(self, executor: ExpertExecutor) -> None:
        self._executor = executor

    def loading(self, missing: Mapping[KFACBlock, Missing]) -> None:
        shared, own = self._executor.divided(missing)
        self._executor.shared.states.loading({block: missing[block] for block in shared})
        self._executor.own.states.loading({block: missing[block] for block in own})

    def late(self, block: KFACBlock, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._executor.of(block).states.late(block, state)

    def tensors(self, block: KFACBlock) -> Any | None:
        return self._executor.of(block).states.tensors(block)

    def lacks(self, *, factors: bool) -> str | None:
        return self._executor.shared.states.lacks(factors=factors) or self._executor.own.states.lacks(factors=factors)
