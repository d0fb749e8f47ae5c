"""FSDP2: rows of gradients to the owner of the whole matrix, who preconditions it, and rows of its direction back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.preconditioning import regularised
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.gradients.flow import GradientFlow, sum_scalars, total_norm
from kfac_optim.distributed.gradients.fsdp import Owned, assemble, cut, from_owners, like, parcel_name, to_owners
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.step.execution import Parts
from kfac_optim.utils.sharded_params import local


class RowGradients(GradientFlow):
    """Leaves rows of all parameters on every rank, which updates them; a layer's owner preconditions the whole.

    Args:
        plan: of `FullySharded`.
        communicator: for the main line of the program.
    """

    def __init__(self, plan: Plan, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._owners = {layer.name: layer.workers.start for layer in plan.layers}
        self._payload = plan.options.parameter_dtype
        self._ranks = dist.get_process_group_ranks(communicator.group)
        self._limit = plan.options.bucket_bytes // self._payload.itemsize

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        rank = self._communicator.rank
        values = {
            parcel_name(name, rank): local(_gradient(param, group))
            for block in blocks
            for name, param, group in zip(block.param_names, block.params, block.groups, strict=True)
        }
        pieces = self._exchange(to_owners, "rows of gradients", blocks, values)
        return [
            (block, [assemble(param, name, pieces) for name, param, _ in self._owned(block)])
            for block in blocks
            if self._owners[block.name] == rank
        ]

    def direction(self, blocks: Mapping[KFACBlock, Parts], covered: Sequence[KFACBlock]) -> dict[nn.Parameter, Tensor]:
        values: dict[str, Tensor] = {}
        for block, parts in blocks.items():
            for (name, param, _), part in zip(self._owned(block), parts, strict=True):
                values |= cut(part, param, name)
        pieces = self._exchange(from_owners, "rows of directions", covered, values)
        rank = self._communicator.rank
        return {
            param: like(sharded, pieces.get(parcel_name(name, rank), local(param)[:0]).to(param.dtype))
            for block in covered
            for param, (name, sharded, _) in zip(block.params, self._owned(block), strict=True)
            if param.grad is not None
        }

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self._communicator)

    def norm(self, grads: Sequence[Tensor], order: float) -> Tensor:
        # Of layers that are left to SGD some may lie otherwise, and be whole on each rank.
        ours = [grad for grad in grads if self._is_in_rows(grad)]
        held = [part for grad in ours if (part := local(grad)).numel()]  # no maximum of nothing
        rows = total_norm(held, order, self._communicator, self._payload)
        others = [_norm(grad, order).to(rows) for grad in grads if not self._is_in_rows(grad)]
        return nn.utils.get_total_norm([rows, *others], order)

    def _is_in_rows(self, grad: Tensor) -> bool:
        """Return whether the ranks that train together each hold a part of the gradient."""
        if not isinstance(grad, DTensor) or grad.device_mesh.ndim > 1 or not grad.placements[0].is_shard():
            return False
        return dist.get_process_group_ranks(grad.device_mesh.get_group(0)) == self._ranks

    def _owned(self, block: KFACBlock) -> list[Owned]:
        owner = self._owners[block.name]
        return [
            Owned(name, cast(DTensor, param), owner)
            for name, param in zip(block.param_names, block.params, strict=True)
        ]

    def _exchange(
        self,
        layout: Callable[[str, Sequence[Owned], int, torch.dtype], ShareBucket],
        name: str,
        blocks: Sequence[KFACBlock],
        values: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Exchange rows in buckets of about equal size, all under way at once."""
        world_size = self._communicator.world_size
        filled = _filled((owned for block in blocks for owned in self._owned(block)), self._limit)
        flights = [
            self._communicator.share(layout(f"{name} {number}", params, world_size, self._payload), values)
            for number, params in enumerate(filled)
        ]
        return {parcel: piece for flight in flights for parcel, piece in flight.wait().items()}


def _norm(grad: Tensor, order: float) -> Tensor:
    """Give the norm of a whole gradient, wherever its parts are, `[]`."""
    norm = torch.linalg.vector_norm(grad, order)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _gradient(param: nn.Parameter, group: Mapping[str, object]) -> Tensor:
    """Return the gradient of a parameter, zeros if only other parameters of the layer have one."""
    return torch.zeros_like(param) if param.grad is None else regularised(param, group)


def _filled(params: Iterable[Owned], limit: int) -> Iterator[list[Owned]]:
    """Return parameters in their order, in lists of at most `limit` elements, or of one."""
    filling: list[Owned] = []
    elements = 0
    for each in params:
        if filling and elements + each.param.numel() > limit:
            yield filling
            filling, elements = [], 0
        filling.append(each)
        elements += each.param.numel()
    if elements:
        yield filling
