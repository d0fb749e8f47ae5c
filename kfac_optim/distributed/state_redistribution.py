"""Which rank holds what of blocks, and of momentum and the like, and bringing it to another."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from kfac_optim.blocks.block import KFACBlock, Missing
from kfac_optim.blocks.state_keys import ADAM_STEPS, AVERAGE, MOMENTUM, PREFERENCE, UPDATED
from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.consensus import largest
from kfac_optim.distributed.communication.transfer import Transfer, carry_out, leaves, nested
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.planning.strategies import Sharded
from kfac_optim.distributed.statistics.exchange import StatisticsExchange
from kfac_optim.utils.sharded_params import local

Buffer = tuple[nn.Parameter, str]
"""A parameter, and the key in its state of a tensor that changes with its updates, such as its momentum."""


class Holdings:
    """Knows what ranks hold under one plan. Methods are collectives, but for `homes` and `let_go`.

    Args:
        plan: the plan.
        params: the parameters of each covered layer and each other parameter, by its name in the plan.
        communicator: the communicator for the main line of the program.
        exchange: the exchange of statistics under the plan.
        state: returns the optimizer's state, for momentum and the like.
        earlier: `updaters` of the plan before, for those that this one leaves out: they may be trained again.

    Attributes:
        updaters: the rank that updates each parameter, and holds its momentum and the like; None where all do.
    """

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, Sequence[nn.Parameter]],
        communicator: Communicator,
        exchange: StatisticsExchange,
        state: Callable[[], MutableMapping[Any, Any]],
        earlier: Mapping[nn.Parameter, int | None],
    ) -> None:
        self._communicator = communicator
        self._exchange = exchange
        self._state = state
        sharded, shared = isinstance(plan.strategy, Sharded), plan.everywhere
        named: dict[str, int | None] = {
            layer.name: layer.owner if sharded and layer.name not in shared else None for layer in plan.layers
        }
        named |= {each.name: each.owner for each in plan.parameters}
        planned = {param: named[name] for name, held in params.items() for param in held}
        self.updaters: dict[nn.Parameter, int | None] = {**earlier, **planned}

    def homes(self, block: KFACBlock) -> set[int]:
        """Return the ranks that own any part of the block."""
        return set(self._exchange.owners(block))

    def handed_over(
        self, blocks: Sequence[KFACBlock], to: "Holdings"
    ) -> tuple[dict[KFACBlock, Any], dict[Buffer, Tensor]]:
        """Return states of these blocks and buffers that this rank is to hold under another plan."""
        self._exchange.merge(blocks)
        states = self.gathered({block: to.homes(block) for block in blocks})
        everyone = range(self._communicator.world_size)
        moves: dict[nn.Parameter, Collection[int]] = {}
        for param, updater in self.updaters.items():
            if updater is not None and param in to.updaters and (new := to.updaters[param]) != updater:
                moves[param] = everyone if new is None else [new]
        return states, self.buffers_at(moves)

    def gathered(self, targets: Mapping[KFACBlock, Collection[int]]) -> dict[KFACBlock, Any]:
        """Return whole states of blocks, as `InverseState.tensors` gives them, on the ranks that are their targets.

        What ranks have measured since must have been merged.
        """
        visitors = self._exchange.bring_home(targets)
        found = self._copied({block: (self._exchange.home(block), ranks) for block, ranks in targets.items()})
        for block in visitors:  # what came home goes again
            if block in found:
                found[block] = nested((path, tensor.clone()) for path, tensor in leaves(found[block]))
        self._exchange.send_off(visitors)
        return found

    def buffers_at(self, targets: Mapping[nn.Parameter, Collection[int]]) -> dict[Buffer, Tensor]:
        """Return buffers of parameters that one rank alone updates, on the ranks that are their targets."""
        communicator, updaters = self._communicator, self.updaters
        buffers = [(param, key) for param in targets for key in UPDATED]
        exists = [
            int(updaters[buffer[0]] == communicator.rank and self._held(buffer) is not None) for buffer in buffers
        ]
        exists = largest(communicator, exists, "momentum", [])
        return self._sent(
            {
                buffer: (updater, targets[buffer[0]])
                for buffer, there in zip(buffers, exists, strict=True)
                if there and (updater := updaters[buffer[0]]) is not None
            }
        )

    def recover(self, blocks: Sequence[KFACBlock], lost: Mapping[KFACBlock, Missing]) -> list[str]:
        """Bring what any rank has loaded to the owners that lack it; what no rank has begins anew.

        Args:
            blocks: all of them.
            lost: those of which this rank has loaded no statistics.

        Returns:
            Names of blocks that begin again from nothing though some other process had statistics of them.

        Raises:
            RuntimeError: all ranks have loaded one rank's part of sharded momentum.
        """
        self._check_parts()
        rank, ranks = self._communicator.rank, self._communicator.world_size
        everyone = range(ranks)
        homes = {block: self.homes(block) for block in blocks}
        homes_of_buffers: dict[Buffer, set[int]] = {
            (param, key): set(everyone) if updater is None else {updater}
            for param, updater in self.updaters.items()
            for key in UPDATED
        }
        words = []
        for has, wanted in (
            *((block not in lost, rank in homes[block]) for block in blocks),
            *((self._held(buffer) is not None, rank in home) for buffer, home in homes_of_buffers.items()),
        ):
            words += [-rank if has else -ranks, int(wanted and not has)]
        told = largest(self._communicator, words, "load", [block.name for block in blocks])
        sources, lacks = [-word for word in told[::2]], told[1::2]
        found = self._copied(
            {
                block: (source, homes[block])
                for block, source, is_lacking in zip(blocks, sources, lacks, strict=False)
                if is_lacking and source < ranks
            }
        )
        restarted = []
        for block, source in zip(blocks, sources, strict=False):
            if block not in lost:
                continue
            if source < ranks:
                block.clock = lost[block].clock
                # Statistics taken while nothing was known here may not be due, or lacked the results they are taken in.
                measuring = any(part.measuring for part in block.inverse.parts(block.spec.by_blocks()))
                if measuring or not block.wants_statistics():
                    block.discard()
            elif lost[block].elsewhere:
                restarted.append(block.name)
            if block in found:
                block.state.load(found[block])
        count, state = len(blocks), self._state()
        buffers = self._sent(
            {
                buffer: (source, home)
                for (buffer, home), source, is_lacking in zip(
                    homes_of_buffers.items(), sources[count:], lacks[count:], strict=True
                )
                if is_lacking and source < ranks
            }
        )
        for (param, key), tensor in buffers.items():
            state[param][key] = tensor
        return restarted

    def _check_parts(self) -> None:
        """Raise where all ranks have loaded one rank's part of momentum and averages of sharded parameters."""
        if not any(map(_is_cut, self.updaters)):
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self._communicator.device)
        for param in filter(_is_cut, self.updaters):
            for key in (MOMENTUM, AVERAGE):
                if (held := self._held((param, key))) is not None:
                    part = local(held).double()
                    sums += torch.stack([part.sum(), part.square().sum()])
        largest_first = self._communicator.all_reduce("parts", torch.cat([sums, -sums]), dist.ReduceOp.MAX).wait()
        highest, lowest = largest_first[:2], -largest_first[2:]
        if bool(highest[1] > 0) and torch.equal(highest, lowest):
            raise RuntimeError(
                "kfac_optim: all ranks have loaded the same rows of the momentum, or of the averages, of sharded "
                "parameters, those of the rank that saved them: the state_dict() of one rank has no others. Save by "
                "consolidate_state_dict(to=0) and, on all ranks, torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)), and load "
                "by set_optimizer_state_dict with broadcast_from_rank0=True; or use torch.distributed.checkpoint."
            )

    def let_go(self) -> None:
        """Drop the buffers of parameters that another rank updates: of two one would be stale."""
        for param, updater in self.updaters.items():
            if updater not in (None, self._communicator.rank):
                for key in UPDATED:
                    if self._held((param, key)) is not None:
                        del self._state()[param][key]

    def _copied(self, routes: Mapping[KFACBlock, tuple[int, Collection[int]]]) -> dict[KFACBlock, Any]:
        """Return states of blocks as a source has them, on their targets; there it is no copy on the source itself."""
        found: dict[KFACBlock, Any] = {}
        transfers = []
        for block, (source, targets) in routes.items():
            own = dict(leaves(block.state.tensors()))
            if self._communicator.rank != source:
                device = self._communicator.device if self._communicator.rank in targets else torch.device("meta")
                own = {path: torch.empty_like(tensor, device=device) for path, tensor in own.items()}
            transfers.append(Transfer(block.name, list(own.values()), source, tuple(targets)))
            if self._communicator.rank in targets:
                found[block] = nested(own.items())
        carry_out(self._communicator, transfers)
        return found

    def _sent(self, routes: Mapping[Buffer, tuple[int, Collection[int]]]) -> dict[Buffer, Tensor]:
        """Return buffers as a source has them, on their targets."""
        transfers, found = [], {}
        for number, (buffer, (source, targets)) in enumerate(routes.items()):
            held = self._held(buffer) if self._communicator.rank == source else _empty(buffer)
            assert held is not None
            transfers.append(Transfer(f"momentum {number}", [held], source, tuple(targets)))
            if self._communicator.rank in targets:
                found[buffer] = held
        carry_out(self._communicator, transfers)
        return found

    def _held(self, buffer: Buffer) -> Tensor | None:
        param, key = buffer
        state = self._state()
        held = state[param].get(key) if param in state else None
        return held if isinstance(held, Tensor) else None  # users keep notes of their own there


def _is_cut(param: nn.Parameter) -> bool:
    """Return whether ranks hold different parts of a parameter."""
    if not isinstance(param, DTensor):
        return False
    return any(isinstance(each, Shard) and param.device_mesh.size(dim) > 1 for dim, each in enumerate(param.placements))


def _empty(buffer: Buffer) -> Tensor:
    """Return what a buffer of another rank is received into."""
    param, key = buffer
    if key in (ADAM_STEPS, PREFERENCE):
        return torch.empty((), dtype=torch.float32 if key == ADAM_STEPS else param.dtype, device=param.device)
    return torch.empty_like(param)
