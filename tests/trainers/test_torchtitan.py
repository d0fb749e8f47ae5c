"""torchtitan: its container of optimizers builds ours, and reads checkpoints into an optimizer that took no step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from kfac_optim import KFACOptimizer, TrustRegion

optimizers = pytest.importorskip("torchtitan.components.optimizer")
from kfac_optim.integrations.torchtitan import KFACOptimizersContainer  # noqa: E402 (it imports torchtitan)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def container_of(*parts: nn.Module, **arguments: Any) -> Any:
    group = optimizers.ParamGroupConfig(pattern=".*", optimizer_name="KFAC", optimizer_kwargs=OPTIONS)
    config = KFACOptimizersContainer.Config(
        implementation="for-loop", param_groups=[group], optimizer_factory_kwargs_by_name={"KFAC": arguments}
    )
    return config.build(model_parts=list(parts))


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), other.parameters(), strict=True))


def test_a_run_whose_state_was_asked_for_is_that_of_a_plain_loop() -> None:
    """The container asks for it by a step of zero gradients and zero rate, which counts nothing."""
    model, twin = network(), network()
    container = container_of(model)
    container.state_dict()
    train(model, container, 5)
    train(twin, KFACOptimizer(twin, **OPTIONS), 5)
    assert_same(model, twin)


def test_a_run_resumes_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    model, other = network(), network()
    container, fresh = container_of(model), container_of(other)
    train(model, container, 5)
    dcp.save({"model": model.state_dict(), "optimizer": container.state_dict()}, checkpoint_id=tmp_path)
    state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    for each in ((model, container), (other, fresh)):
        train(*each, 4, start=5)
    assert_same(model, other)


def test_each_part_of_the_model_has_an_optimizer_that_knows_it() -> None:
    """As the stages of a pipeline; arguments that are no numbers of groups go to the factory."""
    parts = [network(), network()]
    container = container_of(*parts, step_size=TrustRegion(), skip_layers=["0"])
    covered = [[block.name for block in each.summary().blocks] for each in container]
    assert covered == [["2", "3"]] * 2


def test_other_optimizers_are_torchtitans_own() -> None:
    groups = [
        optimizers.ParamGroupConfig(pattern="^0", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
        optimizers.ParamGroupConfig(pattern=".*", optimizer_name="KFAC", optimizer_kwargs=OPTIONS),
    ]
    model = network()
    config = KFACOptimizersContainer.Config(implementation="for-loop", param_groups=groups)
    container = config.build(model_parts=[model])
    assert [type(each) for each in container] == [torch.optim.AdamW, KFACOptimizer]
    before = model[0].weight.detach().clone()
    train(model, container, 2)
    assert not torch.equal(model[0].weight, before)
    assert container.optimizers[1].metrics()["measured_parameters"] == 1.0
