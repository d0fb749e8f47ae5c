"""FSDP2 and the like: parts of gradients to the owner of the matrix, which preconditions, and of its direction back."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.gradients.flow import GradientFlow, of_one_rank, sum_scalars, total_norm
from kfac_optim.distributed.gradients.fsdp import Owned, assemble, cut, from_owners, held_by, parcel_name, to_owners
from kfac_optim.distributed.gradients.grid import Grid
from kfac_optim.distributed.planning.buckets import Item, fill
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.step.roles import Parts
from kfac_optim.utils.sharded_params import like, local


class RowGradients(GradientFlow):
    """Leaves parts of all parameters on the ranks, which update them; a layer's owner preconditions the whole.

    Args:
        plan: a plan of `FullySharded`.
        communicator: the communicator for the main line of the program.
        grid: the ranks, and which of them hold what.
    """

    def __init__(self, plan: Plan, communicator: Communicator, grid: Grid) -> None:
        super().__init__()
        self._communicator = communicator
        self._grid = grid
        self._owners = {layer.name: layer.workers.start for layer in plan.layers}
        self._payload = plan.options.parameter_dtype
        self._limit = plan.options.bucket_bytes // self._payload.itemsize

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        params = [pair for block in blocks for pair in zip(block.params, block.groups, strict=True)]
        parts = {param: local(regularised(param, group)) for param, group in params if param.grad is not None}
        return self._brought("rows of gradients", blocks, parts)

    def whole(
        self, blocks: Sequence[KFACBlock], tensors: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[KFACBlock, Parts]]:
        return self._brought("rows of momentum", blocks, tensors)

    def as_makers_have(self, blocks: Sequence[KFACBlock], numbers: Mapping[KFACBlock, Tensor]) -> Sequence[Tensor]:
        return of_one_rank(self._communicator, blocks, numbers)

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        values: dict[str, Tensor] = {}
        for block, parts in blocks.items():
            for (name, param, _), whole in zip(self._owned(block), parts, strict=True):
                values |= cut(whole, param, name, self._grid)
        pieces = self._exchange(from_owners, "rows of directions", covered, values)
        rank, found = self._communicator.rank, {}
        for block in covered:
            for param, name in zip(block.params, block.param_names, strict=True):
                if param.grad is not None:
                    part = held_by(rank, param, name, self._grid)
                    piece = local(param).detach().flatten()[:0] if part is None else pieces[parcel_name(name, part)]
                    found[param] = like(param, piece.to(param.dtype))
        return found

    def counts(self, param: nn.Parameter) -> bool:
        return self._grid.counts(param, self._communicator.rank)

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self._communicator)

    def norm(self, grads: Sequence[Tensor], order: float) -> Tensor:
        # Of layers that are left to SGD some may lie otherwise.
        def is_ours(grad: Tensor) -> bool:
            # Tensor parallelism leaves some as sums whose parts are on several ranks.
            is_partial = isinstance(grad, DTensor) and any(each.is_partial() for each in grad.placements)
            return self._grid.placements(grad) is not None and not is_partial

        ours = [grad for grad in grads if is_ours(grad)]
        counted = [grad for grad in ours if self._grid.counts(grad, self._communicator.rank)]
        held = [part for grad in counted if (part := local(grad)).numel()]  # no maximum of nothing
        rows = total_norm(held, order, self._communicator, self._payload)
        others = [_norm(grad, order).to(rows) for grad in grads if not is_ours(grad)]
        return nn.utils.get_total_norm([rows, *others], order)

    def _brought(
        self, name: str, blocks: Sequence[KFACBlock], tensors: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[KFACBlock, Parts]]:
        """Bring parts of tensors to the owners of blocks; return the blocks that are owned here, with the whole.

        Args:
            name: says what the tensors are.
            blocks: the same on all ranks.
            tensors: this rank's parts, by parameter; where there is none it is zero.
        """
        rank = self._communicator.rank
        values = {
            parcel_name(of, part): local(torch.zeros_like(param)) if (held := tensors.get(param)) is None else held
            for block in blocks
            for of, param in zip(block.param_names, block.params, strict=True)
            if (part := held_by(rank, param, of, self._grid)) is not None
        }
        pieces = self._exchange(to_owners, name, blocks, values)
        return [
            (block, [assemble(param, of, pieces, self._grid) for of, param, _ in self._owned(block)])
            for block in blocks
            if self._owners[block.name] == rank
        ]

    def _owned(self, block: KFACBlock) -> list[Owned]:
        owner = self._owners[block.name]
        return [Owned(name, param, owner) for name, param in zip(block.param_names, block.params, strict=True)]

    def _exchange(
        self,
        layout: Callable[[str, Sequence[Owned], Grid, torch.dtype], ShareBucket],
        name: str,
        blocks: Sequence[KFACBlock],
        values: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Exchange rows in buckets of about equal size, all under way at once."""
        owned = {each.name: each for block in blocks for each in self._owned(block)}
        items = [Item(each.name, each.param.numel(), each.owner, 0) for each in owned.values()]
        flights = []
        for number, together in enumerate(fill(items, self._limit)):
            bucket = layout(f"{name} {number}", [owned[item.name] for item in together], self._grid, self._payload)
            flights.append(self._communicator.share(bucket, values))
        return {parcel: piece for flight in flights for parcel, piece in flight.wait().items()}


def _norm(grad: Tensor, order: float) -> Tensor:
    """Give the norm of a whole gradient, wherever its parts are, `[]`."""
    norm = torch.linalg.vector_norm(grad, order)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
