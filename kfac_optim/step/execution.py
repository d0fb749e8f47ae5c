"""The executor has all ranks agree on a step, and knows what plays the roles in it; here is one process alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import has_gradient
from kfac_optim.blocks.selection import holders
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.step.roles import Gradients, LossShare, Statistics, WholeStates
from kfac_optim.step.stages import Stages
from kfac_optim.utils.joined_tensors import Joins
from kfac_optim.utils.sharded_params import Shards, is_part


class Trained(NamedTuple):
    """Holds what an optimizer trains."""

    blocks: Sequence[KFACBlock]
    """All blocks, in the order of the model."""
    params: Sequence[nn.Parameter]
    """All parameters of the param groups."""
    names: Callable[[], Mapping[nn.Parameter, str]]
    """Returns the fully qualified names of the parameters."""


class Agreement(NamedTuple):
    """Holds what all ranks know of a step as it begins."""

    finite: bool
    """Whether every gradient is finite, on every rank."""
    summed: float
    """`LossCount.summed` of the loss that the gradients are of: the mean over ranks, or the sum if they are added."""
    sampled: Collection[KFACBlock]
    """Blocks that took statistics on some rank."""
    graded: Collection[KFACBlock]
    """Blocks that have a gradient on some rank."""
    unaccounted: Collection[KFACBlock] = ()
    """Blocks of which some rank has captured only a part of the gradient."""
    terms: tuple[int, int] | None = None
    """The least and the most terms of a mean loss that a rank has counted; None if none has counted."""
    edited: bool = False
    """Whether gradients were changed in place on some rank, where each rank has the mean of some of them alone."""
    restarted: Sequence[str] = ()
    """Names of blocks whose statistics a loaded checkpoint has, but no rank; each load names them once."""
    used: Collection[KFACBlock] | None = None
    """Blocks that have a gradient that is not zero on some rank, among those without an inverse, and on the host those
    whose statistics are overdue; None where all gradients are here, to be looked at."""


class Admission(NamedTuple):
    """Admits a step that is to be taken."""

    agreement: Agreement
    loss_scale: float
    """The number that the loss was multiplied by before backward."""
    finite: Tensor | None
    """`[]` bool, whether the gradients are finite, if only the device knows; None if the host knows that they are."""
    joins: Joins
    """The gradients, joined already where the host has looked at them."""


class Executor:
    """Has all ranks agree on a step, and knows what carries out its parts; here is one rank alone.

    Attributes:
        several: whether there are other ranks.
        worker: the number of this rank, from 0.
        statistics: the role that brings statistics and inverses where they belong.
        gradients: the role that does so with gradients and directions.
        states: the role that knows what checkpoints hold.
        stages: the object that knows of other stages of a pipeline.
        sees_all_gradients: whether a gradient that is not finite anywhere is not finite here.
    """

    several = False
    worker = 0
    sees_all_gradients = True

    def __init__(self) -> None:
        self.statistics, self.gradients, self.states = Statistics(), Gradients(), WholeStates()
        self.stages = Stages()
        self._shards = Shards()

    def attach(self, model: nn.Module | None) -> None:
        """Take notice of the model; None if it is not known yet."""
        self._shards = Shards(model)

    @property
    def source(self) -> int:
        """Return the number of the first rank that sees the same examples: under tensor parallelism several do."""
        return self.worker

    def begin_forward(self, model: nn.Module) -> int:
        """Take notice that a forward of the model begins, in whatever wrapper; returns `source`."""
        return self.source

    def close(self) -> None:
        """Launch nothing any more: the optimizer is gone."""

    def release(self) -> None:
        """Leave gradients to whatever averages them, as without the optimizer."""

    def check(self, blocks: Sequence[KFACBlock], params: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that are laid out over processes as this executor cannot train them; change nothing.

        Raises:
            NotImplementedError: no executor can.
            RuntimeError: another could.
        """
        if not any(map(is_part, params)):
            return
        if sharded := [block for block in blocks if any(map(self._is_stepped_in_parts, block.params))]:
            modules = holders(name for block in sharded for name in block.param_names)
            raise RuntimeError(
                f"kfac_optim: the parameters of {sharded[0].name!r} are sharded, and no process alone can precondition "
                "their gradient. Where fully_shard keeps them, leave distributed at None, or pass a "
                "DistributedConfig(...) with the group that they are sharded over; otherwise leave the layers to SGD: "
                f"skip_layers={modules}."
            )

    def _is_stepped_in_parts(self, param: nn.Parameter) -> bool:
        """Return whether steps change a part of it; of what FSDP2 gathers, statistics alone may be taken."""
        return is_part(param) and (param.grad is not None or self._shards.of(param) is None)

    def agree(self, trained: Trained, *, finite: bool, summed: float, counted: int | None, rescaled: bool) -> Agreement:
        """Begin a step.

        Args:
            trained: what the step is about.
            finite: whether the gradients here are finite.
            summed: `LossCount.summed` of this rank.
            counted: `LossTally.counted` of this rank.
            rescaled: whether the step has divided the gradients by the loss scale, which GradScaler does unseen.

        Raises:
            RuntimeError: the ranks do not train the same model.
        """
        blocks = trained.blocks
        return Agreement(
            finite,
            summed,
            sampled={block for block in blocks if block.has_pending()},
            graded={block for block in blocks if has_gradient(block)},
            unaccounted={block for block in blocks if block.check.differs},
        )

    def agree_on_state(self, trained: Trained) -> Agreement:
        """Agree on which rank keeps what, as the state of a new optimizer is asked for and no step is taken."""
        return self.agree(trained, finite=True, summed=0, counted=None, rescaled=False)

    def loss_shares(self, sampled: Sequence[KFACBlock], count: LossCount) -> tuple[list[LossShare], bool]:
        """Tell what loss the statistics of a step are of, and whether any block took some, on any rank.

        Args:
            sampled: the blocks that did, as this rank knows it.
            count: terms of the loss of this rank.
        """
        return [LossShare(sampled, count)], bool(sampled)

    def gradients_dropped(self) -> None:
        """Take notice of `zero_grad`."""

    def publish(self) -> None:
        """Share updated parameters with the ranks that did not update them, which ends the step."""

    def clip_grad_norm_(
        self, trained: Trained, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Clip the norm of all gradients together, and return the norm before, `[]`.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`.
        """
        grads = [param.grad for param in trained.params if param.grad is not None]
        norm = self.stages.norm(nn.utils.get_total_norm(grads, norm_type), norm_type)
        self.clip(trained, max_norm, norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        return norm

    def clip(
        self, trained: Trained, max_norm: float, norm: Tensor, norm_type: float, *, error_if_nonfinite: bool
    ) -> None:
        """Scale the gradients that are updated here as `clip_grad_norm_` does, where their norm `[]` is known.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite`.
        """
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"kfac_optim: the total norm of order {norm_type} of the gradients is {float(norm)} and cannot be "
                "clipped; pass error_if_nonfinite=False to scale them all the same."
            )
        self._scale_gradients(trained.params, max_norm, norm)

    def _scale_gradients(self, params: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)

    def consolidate(self, trained: Trained, to: int | None) -> None:
        """Hold all states and momentum on rank `to` until the next step; None holds each block on one of its owners.

        Raises:
            ValueError: there is no such rank.
        """
        check_rank(to, [0])

    def mean_over_examples(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over the ranks, which see different examples, as it is taken of gradients."""
        return values


def check_rank(to: int | None, ranks: Sequence[int]) -> None:
    """Raise unless `consolidate` may be asked for rank `to`.

    Args:
        to: counted within the group.
        ranks: those of the group, as the default group counts them.

    Raises:
        ValueError: there is no such rank.
    """
    if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < len(ranks)):
        among = "" if list(ranks) == list(range(len(ranks))) else f", as counted among ranks {list(ranks)}"
        raise ValueError(f"kfac_optim: to must be a rank from 0 to {len(ranks) - 1}{among}, or None, got {to!r}.")
