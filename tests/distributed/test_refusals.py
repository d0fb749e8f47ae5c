"""Choices that do not go together on several processes: `distributed/refusals.py`, `training_group.py`."""

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, SampleSpace
from kfac_optim.distributed import Auto, DistributedConfig, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy
from kfac_optim.distributed.refusals import check_choices, refuse_coarse_sketches
from kfac_optim.distributed.training_group import TrainingGroup


def test_sums_that_are_too_coarse_for_sketches_are_refused() -> None:
    coarse = DistributedConfig(sums_dtype=torch.bfloat16)
    sketched, whole = (KFACOptimizer(nn.Linear(300, 4), inverse=inverse) for inverse in (None, Cholesky()))
    with pytest.raises(ValueError, match=r"bfloat16 would round away.*layer ''.*inverse=Cholesky\(\)"):
        refuse_coarse_sketches(sketched._binding.coverage.blocks, coarse)
    refuse_coarse_sketches(whole._binding.coverage.blocks, coarse)
    refuse_coarse_sketches(sketched._binding.coverage.blocks, DistributedConfig(sums_dtype=torch.float32))


def on_two_devices(_: int) -> str:
    group = TrainingGroup(DistributedConfig())
    try:
        group.open([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_parameters_on_several_devices_are_refused(one_rank: Ranks) -> None:
    (told,) = one_rank.run(on_two_devices)
    assert told.startswith("kfac_optim: parameters lie on cpu, meta; several processes train models on one device each")


@pytest.mark.parametrize("inverse", [SampleSpace(), {"*": SampleSpace()}], ids=["all layers", "by name"])
def test_an_inverse_in_the_space_of_residuals_is_for_one_process(inverse: Any) -> None:
    choices = KFACOptimizer(nn.Linear(3, 4), inverse=inverse, estimate=ExactGGN(nn.MSELoss()))._choices
    with pytest.raises(ValueError, match=r"SampleSpace\(.*solves for the residuals of one process"):
        check_choices(DistributedConfig(), choices, in_shards=False)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bucket_bytes": 0.5}, TypeError, "bucket_bytes of DistributedConfig must be an integer, got 0.5"),
        ({"exchange": "direct"}, TypeError, "exchange of DistributedConfig must be an Exchange"),
        ({"group": 2}, TypeError, r"group of DistributedConfig \(of a mesh it is mesh\.get_group"),
        ({"timeout": timedelta(0)}, ValueError, "timeout of DistributedConfig must be above 0, got 0:00:00"),
        ({"observe": 3}, TypeError, "must be a function of a Message, or None, got 3"),
    ],
    ids=["bytes", "exchange", "group", "timeout", "observe"],
)
def test_a_config_of_no_use_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DistributedConfig(**options)


def built_before_sharding(_: int) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = KFACOptimizer(model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(5, 4)).square().mean().backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in told]


def test_an_optimizer_that_was_built_before_its_model_was_sharded_is_warned_of(two_ranks: Ranks) -> None:
    for told in two_ranks.run(built_before_sharding):
        assert any("If fully_shard was called, it has replaced these" in each for each in told), told


def with_sparse_gradients(_: int, strategy: Strategy | Auto) -> str:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
    optimizer = KFACOptimizer(model, skip_layers=["0"], distributed=DistributedConfig(strategy=strategy))
    model(torch.arange(6)).square().mean().backward()
    try:
        optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return "trained"


def test_sparse_gradients_are_refused_where_they_have_owners(two_ranks: Ranks) -> None:
    for told in two_ranks.run(with_sparse_gradients, Sharded()):
        assert "that of '0.weight' is torch.sparse_coo. Make it dense (sparse=False), or use Replicated()" in told


def test_sparse_gradients_train_where_the_choice_falls_on_replicas(two_ranks: Ranks) -> None:
    for told in two_ranks.run(with_sparse_gradients, Auto(candidates=(Replicated(), Sharded()))):
        assert told == "trained"


class Spectral(nn.Module):
    """A Fourier layer, whose weight is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=6)


def with_complex_parameters(_: int, strategy: Strategy | Auto) -> list[torch.Tensor] | str:
    torch.manual_seed(0)  # on all ranks, whose gradients are then their mean
    model = nn.Sequential(nn.Linear(6, 6), Spectral(), nn.Linear(6, 2))
    optimizer = KFACOptimizer(model, lr=0.1, distributed=DistributedConfig(strategy=strategy))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        try:
            optimizer.step()
        except NotImplementedError as error:
            return str(error)
    return [param.detach() for param in model.parameters()]


def test_complex_parameters_are_refused_by_name_where_they_have_owners(two_ranks: Ranks) -> None:
    for told in two_ranks.run(with_complex_parameters, Sharded()):
        assert "'1.weight' is torch.complex64" in told
        assert "torch.view_as_complex of it, or use Replicated()" in told


@pytest.mark.parametrize("strategy", [Replicated(0.5), Auto(candidates=(Replicated(0.5), Sharded()))], ids=str)
def test_complex_parameters_train_beside_layers_that_one_rank_preconditions(
    two_ranks: Ranks, strategy: Strategy | Auto
) -> None:
    for ours, theirs in zip(
        two_ranks.run(with_complex_parameters, strategy),
        two_ranks.run(with_complex_parameters, Replicated()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
