"""Tensors of one rank copied to others outside of steps: when owners change, and for checkpoints."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.parcels import Parcel, ShareBucket

# Elements in one collective; a transfer that is larger goes alone.
_TOGETHER = 2**22


class Transfer(NamedTuple):
    """Tensors that go from one rank to others.

    Attributes:
        name: a name for messages.
        tensors: tensors of any real dtypes, and of equal shapes on all ranks: the source's are sent, and those of
            targets are written to; on other ranks only the shapes count.
        source: rank.
        targets: ranks; the source, if it is among them, is left alone.
    """

    name: str
    tensors: Sequence[Tensor]
    source: int
    targets: Sequence[int]


@torch.no_grad()
def carry_out(communicator: Communicator, transfers: Sequence[Transfer]) -> None:
    """Carry out transfers, a few in each collective, so that they need little memory; the same on all ranks.

    Everything goes as float64, which holds all numbers of narrower dtypes, and counts up to 2^53.

    Raises:
        CollectiveError: it failed, or some rank never came.
    """
    together: list[Transfer] = []
    parcels: list[Parcel] = []
    for transfer in transfers:
        others = tuple(sorted(set(transfer.targets) - {transfer.source}))
        elements = sum(tensor.numel() for tensor in transfer.tensors)
        if not (others and elements):
            continue
        if parcels and sum(parcel.elements for parcel in parcels) + elements > _TOGETHER:
            _carry(communicator, together, parcels)
            together, parcels = [], []
        together.append(transfer)
        parcels.append(Parcel(transfer.name, elements, transfer.source, others))
    if parcels:
        _carry(communicator, together, parcels)


def _carry(communicator: Communicator, transfers: Sequence[Transfer], parcels: Sequence[Parcel]) -> None:
    bucket = ShareBucket("transfer", tuple(parcels), communicator.world_size, torch.float64)
    sent = {each.name for each in parcels if each.source == communicator.rank}
    values = {
        each.name: torch.cat([tensor.flatten().to(communicator.device, torch.float64) for tensor in each.tensors])
        for each in transfers
        if each.name in sent
    }
    received = communicator.share(bucket, values).wait()
    for name, tensors, _, _ in transfers:
        if name in received:
            for tensor, part in zip(
                tensors, torch.split(received[name], [tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))


def leaves(tensors: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Give each tensor of a nested dict, and where it stands."""
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            yield (*path, key), value
        else:
            yield from leaves(value, (*path, key))


def nested(found: Iterable[tuple[tuple[str, ...], Tensor]]) -> dict[str, Any]:
    """Put together what `leaves` took apart."""
    whole: dict[str, Any] = {}
    for (*path, last), tensor in found:
        inner = whole
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = tensor
    return whole
