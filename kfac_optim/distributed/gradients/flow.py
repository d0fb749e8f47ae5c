"""The way of gradients to the ranks that precondition them, and of directions to the ranks that update.

`sharded_gradients.py` has that of `Sharded`, and `gradient_rows.py` that of sharded parameters.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import precondition, to_matrix, to_params
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.laid_out import LaidOut, shared
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.planning.assignment import nearest
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import preconditioned_buckets, preconditioned_name
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.factors.block_diagonal import matrix_by_blocks, matrix_of_layer
from kfac_optim.step.roles import Gradients, Parts


class GradientFlow(Gradients):
    """Brings gradients to their owners and what becomes of it back; here, where every rank has and updates all of it.

    Subclasses override what differs under one kind of strategy.
    """

    def reduce(self) -> None:
        """Bring the gradients of this step to where they are needed, if they are not there yet; a collective."""

    def forget(self) -> None:
        """Take notice that no step will use the gradients as they are."""

    def dropped(self) -> None:
        """Take notice that all gradients were dropped."""
        self.forget()

    def begin_forward(self) -> None:
        """Take notice that a forward of the model begins: by then gradients may have been dropped unseen."""

    def restore(self) -> None:
        """Undo `reduce`: give every rank all gradients that any rank has, as the owners are about to change."""

    def publish(self) -> None:
        """Share updated parameters with the ranks that did not update them; a collective."""

    def norm(self, grads: Sequence[Tensor], order: float) -> Tensor:
        """Return the norm of all gradients together, `[]`; `grads` are those of parameters that are updated here."""
        return nn.utils.get_total_norm(grads, order)


class ReplicatedGradients(GradientFlow):
    """Leaves the mean of all gradients on every rank, which updates all; some ranks precondition a layer for all.

    Args:
        plan: a plan of `Replicated`.
        communicator: the communicator for the main line of the program.
        params: the parameters of each covered layer, by its name in the plan.
    """

    def __init__(self, plan: Plan, communicator: Communicator, params: Mapping[str, Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self._communicator = communicator
        self._plan = plan
        self._workers = {layer.name: layer.workers for layer in plan.layers}
        self._all_work = all(len(workers) == plan.ranks for workers in self._workers.values())
        if not self._all_work:
            self.stacks.goes_alone = frozenset(params[name][0] for name in self._workers).__contains__
        self._layouts: dict[tuple[str, ...], LaidOut[ShareBucket]] = {}

    def precondition(self, blocks: Sequence[KFACBlock], grads: Sequence[Parts]) -> list[Parts]:
        if self._all_work:
            return super().precondition(blocks, grads)
        grad_of = dict(zip(blocks, grads, strict=True))
        made = {block: precondition(block, grad_of[block]) for block in self._worked_on(blocks)}
        matrices = self._spread(blocks, made)
        return [to_params(block, matrices[block], grad_of[block]) for block in blocks]

    def whole(
        self, blocks: Sequence[KFACBlock], tensors: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[KFACBlock, Parts]]:
        return super().whole(self._worked_on(blocks), tensors)

    def updates(self, made: Mapping[KFACBlock, Parts], blocks: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        if self._all_work:
            return super().updates(made, blocks)
        matrices = self._spread(blocks, {block: to_matrix(block, parts) for block, parts in made.items()})
        return super().updates({block: to_params(block, matrices[block], block.params) for block in blocks}, blocks)

    def as_makers_have(self, blocks: Sequence[KFACBlock], numbers: Mapping[KFACBlock, Tensor]) -> Sequence[Tensor]:
        if self._all_work:
            return super().as_makers_have(blocks, numbers)
        rank = self._communicator.rank
        first = {block: number for block, number in numbers.items() if rank == self._workers[block.name].start}
        return of_one_rank(self._communicator, blocks, first)

    def _worked_on(self, blocks: Sequence[KFACBlock]) -> list[KFACBlock]:
        """Return the blocks that this rank preconditions."""
        return [block for block in blocks if self._communicator.rank in self._workers[block.name]]

    def _spread(self, blocks: Sequence[KFACBlock], made: Mapping[KFACBlock, Tensor]) -> dict[KFACBlock, Tensor]:
        """Return the matrices of all blocks, of which some were made here; a collective."""
        rank, matrices = self._communicator.rank, dict(made)
        by_name = {block.name: block for block in blocks}
        places = {block: nearest(rank, self._workers[block.name]) for block in made}
        values = {
            preconditioned_name(block.name, places[block]): matrix_of_layer(matrix, block.spec)
            for block, matrix in made.items()
        }
        names = tuple(by_name)
        if names not in self._layouts:
            self._layouts[names] = LaidOut.of(preconditioned_buckets(self._plan, names))

        for received in shared(self._communicator, self._layouts[names], lambda _: values, at_once=False):
            for name, block in by_name.items():
                workers = self._workers[name]
                found = received.get(preconditioned_name(name, nearest(rank, workers)))
                if found is not None:
                    spec = block.spec
                    matrix = found.view(spec.groups, spec.out_dim, spec.in_dim)
                    matrices[block] = matrix_by_blocks(matrix, spec)
        return matrices


def sum_scalars(values: Tensor, communicator: Communicator) -> Tensor:
    """Sum over ranks, in float64: a rank that owns nothing has zeros of no particular dtype."""
    return communicator.all_reduce(Payload.SCALARS.value, values.double()).wait()


def of_one_rank(
    communicator: Communicator, blocks: Sequence[KFACBlock], numbers: Mapping[KFACBlock, Tensor]
) -> Sequence[Tensor]:
    """Return a number `[]` of each block, float64, which one rank has, on all; a collective."""
    nothing = torch.zeros((), dtype=torch.float64, device=communicator.device)
    return sum_scalars(
        torch.stack([numbers.get(block, nothing).to(nothing) for block in blocks]), communicator
    ).unbind()


def total_norm(grads: Sequence[Tensor], order: float, communicator: Communicator, dtype: torch.dtype) -> Tensor:
    """Give the norm of gradients of which each rank has others, `[]`; it is sent as in `sum_scalars`."""
    own = nn.utils.get_total_norm(grads, order).to(communicator.device).double()
    if math.isinf(order):
        return communicator.all_reduce("norm", own, dist.ReduceOp.MAX).wait().to(dtype)
    return (communicator.all_reduce("norm", own**order).wait() ** (1 / order)).to(dtype)
