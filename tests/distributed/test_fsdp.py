"""Rows of gradients to the owners of whole matrices and back."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from kfac_optim.distributed.communication.collectives import Communicator
from kfac_optim.distributed.communication.parcels import ShareBucket
from kfac_optim.distributed.gradients.fsdp import Owned, assemble, cut, from_owners, held_by, to_owners
from kfac_optim.distributed.gradients.grid import Grid
from kfac_optim.utils.sharded_params import like, local

SHAPES = [(4, 3), (8, 2, 2), (5, 3), (1, 3), (3,), (0, 2), (4,), (7, 1)]
CPU = torch.device("cpu")


def grid(*mesh: int) -> Grid:
    ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
    return Grid(ranks, ranks)


def on_paper(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensor:
    """A parameter without numbers, as rank 0 sees it; no process group is needed."""
    ranks = torch.arange(torch.Size(mesh).numel()).view(mesh)
    device_mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    own = torch.empty(shape, device="meta").chunk(mesh[-1])[0] if shape[0] else torch.empty(shape, device="meta")
    return DTensor.from_local(
        own, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
    )


@given(
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=2).flatmap(
        lambda rest: st.integers(0, 17).map(lambda rows: (rows, *rest))
    ),
    ranks=st.integers(1, 9),
    replicas=st.sampled_from([None, 1, 2]),
)
def test_rows_are_those_of_torch_chunk(shape: tuple[int, ...], ranks: int, replicas: int | None) -> None:
    mesh = (ranks,) if replicas is None else (replicas, ranks)
    param = on_paper(shape, mesh, (Replicate(),) * (len(mesh) - 1) + (Shard(0),))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    chunks = list(whole.chunk(ranks)) if len(whole) else []
    chunks += [whole[:0]] * (ranks - len(chunks))
    for rank in range(torch.Size(mesh).numel()):
        part, chunk = held_by(rank, param, "weight", grid(*mesh)), chunks[rank % ranks]
        assert torch.equal(whole[:0] if part is None else whole[part.box], chunk)
        assert (0 if part is None else part.elements) == chunk.numel()


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5),
    ranks=st.integers(1, 5),
    data=st.data(),
)
def test_a_bucket_there_and_back_on_paper(shapes: list[tuple[int, int]], ranks: int, data: st.DataObject) -> None:
    params = [
        Owned(f"layer{i}.weight", on_paper(shape, (ranks,), (Shard(0),)), data.draw(st.integers(0, ranks - 1)))
        for i, shape in enumerate(shapes)
    ]
    there, back = to_owners("there", params, grid(ranks)), from_owners("back", params, grid(ranks))
    assert [(p.name, p.elements, p.source, *p.targets) for p in there.parcels] == [
        (p.name, p.elements, *p.targets, p.source) for p in back.parcels
    ]
    assert all(parcel.elements for parcel in there.parcels)
    for name, param, owner in params:
        whole = torch.randn(param.shape)
        pieces = cut(whole, param, name, grid(ranks))
        own = {parcel.name: parcel for parcel in there.parcels if parcel.name in pieces}
        assert own.keys() == pieces.keys()
        assert all(parcel.targets == (owner,) for parcel in own.values())
        assert sum(parcel.elements for parcel in own.values()) == whole.numel()
        assert torch.equal(
            assemble(param, name, {key: piece.flatten() for key, piece in pieces.items()}, grid(ranks)), whole
        )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_closed_form(ranks: int) -> None:
    """`2 n (P - 1) / P` words there and back over all ranks, the same for each where each owns as much."""
    params = [Owned(str(i), on_paper((8 * ranks, 3), (ranks,), (Shard(0),)), i % ranks) for i in range(2 * ranks)]
    elements = sum(param.numel() for _, param, _ in params)
    buckets: list[ShareBucket] = [to_owners("there", params, grid(ranks)), from_owners("back", params, grid(ranks))]
    sent = [sum(each.sent_bytes for bucket in buckets for each in bucket.messages(rank)) for rank in range(ranks)]
    assert sum(sent) * ranks == 2 * elements * (ranks - 1) * 4
    assert len(set(sent)) == 1


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((2,), (Partial(),)), ((2, 2), (_StridedShard(0, split_factor=4), Shard(0))), ((4,), (Shard(0),))],
    ids=str,
)
def test_other_layouts_are_refused_by_name(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    """The last is on a mesh that is not the grid's."""
    param = on_paper((4, 4), mesh, placements)
    with pytest.raises(NotImplementedError, match=r"kfac_optim: 'head\.weight' is laid out as .*skip_layers"):
        to_owners("there", [Owned("head.weight", param, 0)], grid(*mesh) if mesh != (4,) else grid(2, 2))


def of_round_trip(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
    grads = {f"p{i}": distribute_tensor(whole, mesh, [Shard(0)]) for i, whole in enumerate(wholes)}
    params = [Owned(name, grad, i % world_size) for i, (name, grad) in enumerate(grads.items())]
    timeout = timedelta(seconds=30)
    communicator = Communicator(dist.new_group(timeout=timeout), CPU, timeout)
    there, back = to_owners("there", params, grid(world_size)), from_owners("back", params, grid(world_size))
    pieces = communicator.share(there, {f"{name}[{rank}]": local(grad) for name, grad in grads.items()}).wait()
    directions: dict[str, Tensor] = {}
    for (name, param, owner), whole in zip(params, wholes, strict=True):
        if owner == rank:
            gradient = assemble(param, name, pieces, grid(world_size))
            assert torch.equal(gradient, whole)
            directions |= cut(2 * gradient, param, name, grid(world_size))
    received = communicator.share(back, directions).wait()
    for (name, param, _), whole in zip(params, wholes, strict=True):
        own = received.get(f"{name}[{rank}]", torch.empty(0))
        direction = like(param, own)
        assert (direction.placements, direction.shape, direction.stride()) == (
            param.placements,
            param.shape,
            param.stride(),
        )
        assert torch.equal(local(direction), 2 * local(param))
        assert torch.equal(direction.full_tensor(), 2 * whole)
    dist.destroy_process_group(communicator.group)


def test_a_round_trip_on_two_ranks(two_ranks: Ranks) -> None:
    two_ranks.run(of_round_trip, 2)


def test_a_round_trip_on_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(of_round_trip, 4)


def of_layouts(rank: int, hybrid: bool) -> None:
    """Shards as `fully_shard` makes them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(1, 6))
    wholes = [param.detach().clone() for param in model.parameters()]
    fully_shard(model, mesh=mesh)
    for param, whole in zip(model.parameters(), wholes, strict=True):
        assert isinstance(param, DTensor)
        own = held_by(rank, param, "weight", grid(2, 2) if hybrid else grid(4))
        assert torch.equal(local(param), whole[:0] if own is None else whole[own.box])
    assert local(wholes[0]) is wholes[0]


@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_rows_are_those_of_fully_shard(four_ranks: Ranks, hybrid: bool) -> None:
    four_ranks.run(of_layouts, hybrid)
