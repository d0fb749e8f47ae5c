"""`Sharded`: gradients go to the ranks that update, and the parameters come back to all."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.laid_out import LaidOut, shared, sums
from kfac_optim.distributed.communication.launches import InFlight
from kfac_optim.distributed.communication.layouts import Contributions, ReduceBucket
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.gradients.averaging import SAME_GRADIENTS
from kfac_optim.distributed.gradients.deliveries import Deliveries
from kfac_optim.distributed.gradients.flow import GradientFlow, sum_scalars, total_norm
from kfac_optim.distributed.gradients.kept_gradients import KeptGradients
from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.messages import (
    delivery_limit,
    gradient_buckets,
    gradient_means,
    gradient_row,
    parameter_buckets,
    sum_limit,
)
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.step.execution import Trained
from kfac_optim.step.roles import Parts


class ShardedGradients(GradientFlow):
    """Brings each layer's gradient to its owner, which updates; all parameters are gathered after the step.

    What has no owner (`Plan.everywhere`) all ranks have the mean of, precondition and update.

    Args:
        plan: a plan of `Sharded`.
        communicator: the communicator for the main line of the program.
        params: the parameters of each covered layer and each other parameter, by its name in the plan.
        delivery: the communicator for what is launched in backward; needed where gradients go by segments.

    Attributes:
        owner_of: the rank that updates a parameter, -1 where all do; those that are not trained have none.
        deliveries: brings segments of a wrapper's buckets to owners.
        kept: knows which gradients their owners have the mean of.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        params: Mapping[str, Sequence[nn.Parameter]],
        delivery: Communicator | None,
    ) -> None:
        super().__init__()
        self._communicator = communicator
        self._plan = plan
        self._params = params
        owners = {layer.name: layer.owner for layer in plan.layers}
        owners |= {each.name: -1 if each.owner is None else each.owner for each in plan.parameters}
        self._owners = owners
        self.owner_of = {param: owners[name] for name, held in params.items() for param in held}
        self._here = (communicator.rank, -1)
        self.stacks.goes_alone = frozenset(param for param, owner in self.owner_of.items() if owner < 0).__contains__
        self._layouts: dict[Any, LaidOut[Any]] = {}
        self.deliveries = None if delivery is None else Deliveries(delivery, delivery_limit(plan))
        self._rows: dict[tuple[int, torch.dtype, tuple[Tensor, ...]], OwnedRow] = {}
        self.kept = KeptGradients(self.owner_of, communicator.rank)

    def row(self, number: int, params: Sequence[Any], dtype: torch.dtype) -> OwnedRow:
        """Return how the gradients in a bucket of a wrapper go to their owners, which is laid out once.

        Args:
            number: the number of the bucket.
            params: the parameters whose gradients it has, in its order.
            dtype: the dtype of the bucket.
        """
        key = (number, dtype, tuple(params))
        if key not in self._rows:
            pieces = [(self.owner_of[param], param.numel()) for param in params]
            self._rows[key] = gradient_row(self._plan, number, pieces, dtype)
        return self._rows[key]

    def reduce(self) -> None:
        """Sum to owners what no wrapper has; their `.grad` becomes the mean."""
        waiting = self.owner_of.keys() - self.kept.brought
        names = [name for name, held in self._params.items() if not waiting.isdisjoint(held)]
        if names:
            self._sum(names, waiting)
        self.kept.keep(self.owner_of)

    def _sum(self, names: Sequence[str], waiting: Collection[nn.Parameter]) -> None:
        """Make the `.grad` of these parameters, in layers of these names, the mean on their owners."""
        had = self._take_off(waiting)
        rank, ranks = self._communicator.rank, self._communicator.world_size

        means = gradient_means(self._plan, names)
        flights = [self._summed(row, held) for row, held in means.items()]

        def give(bucket: ReduceBucket) -> Contributions:
            given = Contributions(bucket, rank, self._communicator.device)
            for slot in bucket.slots:
                if slot.owner != rank:
                    given.put(slot.name, self._flat(slot.name), 1.0)
            return given

        def take(name: str, total: Tensor) -> None:
            sizes = [param.numel() for param in self._params[name]]
            for param, others in zip(self._params[name], torch.split(total, sizes), strict=True):
                if param in waiting:
                    _average(param, others.view(param.shape), ranks)
                    _add_gradient(param, had.get(param))

        for found in sums(self._communicator, self._laid_out(gradient_buckets, names), give):
            for name in list(found):
                take(name, found.pop(name).total)  # which is held no longer when the next comes
        for held, flight in zip(means.values(), flights, strict=True):
            params = [param for name in held for param in self._params[name]]
            for param, total in zip(params, torch.split(flight.wait(), [p.numel() for p in params]), strict=True):
                if param in waiting:
                    _set_gradient(param, total.view(param.shape) / ranks)

    def forget(self) -> None:
        self.kept.end_step()

    def dropped(self) -> None:
        self.kept.forget()

    def begin_forward(self) -> None:
        # As by `model.zero_grad()`, which tells nobody.
        if self.kept and all(param.grad is None for param in self.owner_of):
            self.dropped()

    def restore(self) -> None:
        had = self._take_off(self.owner_of)
        self._gather(
            [name for name, owner in self._owners.items() if owner >= 0],  # the same on all ranks
            lambda param: had[param] if param in had else torch.zeros_like(param),
            lambda param, value: None if param in had else _add_gradient(param, value),
        )
        for param, mean in had.items():
            _add_gradient(param, mean)
        self.kept.close()

    def _take_off(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Leave in gradients what is still to be averaged; return what this rank owns of the rest."""
        found = {param: self.kept.take_off(param, param.grad) for param in params if param.grad is not None}
        return {param: mean for param, mean in found.items() if mean is not None}

    def gradients(self, blocks: Sequence[KFACBlock]) -> list[tuple[KFACBlock, Parts]]:
        return super().gradients([block for block in blocks if self._owners[block.name] in self._here])

    def owned(self, params: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        return [param for param in params if self.owner_of.get(param) in self._here]

    def counts(self, param: nn.Parameter) -> bool:
        return self._communicator.rank == max(self.owner_of[param], 0)

    def makes_for_sums(self, block: KFACBlock) -> bool:
        return all(map(self.counts, block.params))

    def publish(self) -> None:
        self._gather(self._params, lambda param: param, lambda param, value: param.detach().copy_(value))
        self.forget()

    def sum_over_updaters(self, values: Tensor) -> Tensor:
        return sum_scalars(values, self._communicator)

    def norm(self, grads: Sequence[Tensor], order: float) -> Tensor:
        others = {id(param.grad) for param in self.owner_of if not self.counts(param)}
        counted = [grad for grad in grads if id(grad) not in others]
        return total_norm(counted, order, self._communicator, self._plan.options.parameter_dtype)

    def _summed(self, row: OwnedRow, names: Sequence[str]) -> InFlight[Tensor]:
        """Sum gradients to all ranks."""
        values = torch.cat([self._flat(name).to(row.payload) for name in names])
        return self._communicator.all_reduce(row.name, values, layers=names)

    def _flat(self, name: str) -> Tensor:
        """Return the gradients of a layer's parameters, in a row."""
        return _in_a_row(
            [torch.zeros_like(param) if param.grad is None else param.grad for param in self._params[name]]
        )

    def _gather(
        self,
        names: Collection[str],
        read: Callable[[nn.Parameter], Tensor],
        write: Callable[[nn.Parameter, Tensor], object],
    ) -> None:
        """Bring what owners have of the parameters of these pieces to all other ranks."""
        rank = self._communicator.rank

        def give(bucket: ShareBucket) -> dict[str, Tensor]:
            own = [parcel.name for parcel in bucket.parcels if parcel.source == rank]
            return {name: _in_a_row([read(param).detach() for param in self._params[name]]) for name in own}

        for found in shared(self._communicator, self._laid_out(parameter_buckets, names), give):
            while found:  # what was written is held no longer when the next comes
                name, joined = found.popitem()
                params = self._params[name]
                parts = list(torch.split(joined, [param.numel() for param in params]))
                del joined
                for param in params:
                    write(param, parts.pop(0).view(param.shape))

    def _laid_out(self, layout: Callable[[Plan, Collection[str]], Any], names: Collection[str]) -> LaidOut[Any]:
        """Return the buckets of a layout for these names, which is made once."""
        key = (layout, tuple(names))
        if key not in self._layouts:
            bounds: tuple[Any, ...] = (delivery_limit(self._plan),)
            if layout is gradient_buckets:
                bounds = sum_limit(self._plan, Payload.GRADIENTS), self._plan.ranks
            self._layouts[key] = LaidOut.of(layout(self._plan, names), *bounds)
        return self._layouts[key]


def refuse_added(difference: float) -> None:
    """Raise RuntimeError where ranks have added different gradients, by their norms, to the mean that owners had."""
    if not difference <= SAME_GRADIENTS:
        raise RuntimeError(
            "kfac_optim: a backward that reduces nothing came after one that had reduced the gradients of this step, "
            "and what it has added differs from rank to rank. Under Sharded() gradients are with their owners by then, "
            "and what other ranks add would be lost. Have the last backward before step() outside of no_sync(), or all "
            "of them within it. DistributedDataParallel reduces only the first backward after a forward of the "
            "wrapper, and none after a call of model.module(...): add such losses up, and take one backward."
        )


def refuse_sparse(trained: Trained) -> None:
    """Raise NotImplementedError for a sparse gradient, which no message of `Sharded` has room for."""
    for number, param in enumerate(trained.params):
        if param.grad is not None and param.grad.layout is not torch.strided:
            name = trained.names().get(param, f"parameter {number}")
            raise NotImplementedError(
                f"kfac_optim: Sharded() brings gradients to their owners in dense messages, and that of {name!r} is "
                f"{param.grad.layout}. Make it dense (sparse=False), or use Replicated()."
            )


def refuse_complex(params: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Raise NotImplementedError for a complex parameter, by its name in the plan."""
    for name, held in params.items():
        if any(map(torch.is_complex, held)):
            raise NotImplementedError(
                f"kfac_optim: Sharded() sends gradients and parameters as real numbers, and {name!r} is "
                f"{held[0].dtype}. Make it nn.Parameter(torch.view_as_real(...)) and have the forward use "
                "torch.view_as_complex of it, or use Replicated()."
            )


def _in_a_row(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].flatten() if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def _average(param: nn.Parameter, others: Tensor, ranks: int) -> None:
    """Make the gradient, of this rank alone until now, the mean over ranks; `others` may be overwritten."""
    if param.grad is None:
        if not bool(others.any()):
            return  # no rank has one
        param.grad = torch.zeros_like(param)
    param.grad.copy_(others.add_(param.grad).div_(ranks))


def _set_gradient(param: nn.Parameter, value: Tensor) -> None:
    if param.grad is None:
        if not bool(value.any()):
            return  # the owner has none
        param.grad = torch.empty_like(param)
    param.grad.copy_(value)


def _add_gradient(param: nn.Parameter, value: Tensor | None) -> None:
    """Add to `.grad`; where there is none, zeros make none."""
    if value is None or (param.grad is None and not bool(value.any())):
        return
    param.grad = value.clone() if param.grad is None else param.grad.add_(value)
