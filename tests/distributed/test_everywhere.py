"""Layers without an owner under `Sharded`: all ranks precondition and update them, and train as one process does."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.plans import largest_everywhere
from helpers.ranks import Ranks
from helpers.training import EMPTY, UNEVEN, Case, Mixed, build, check, examples, on_rank, squares, wrap
from torch import Tensor, nn

from kfac_optim import EKFAC, KFACOptimizer, SelectedUpdates, TrustRegion
from kfac_optim.distributed import DistributedConfig, Exchange, Placement, Sharded

FACTORS = Placement.FACTORS
GROUPS = {"bias": {"lr": 0.02, "weight_decay": 0.1}, "hidden": {"damping": 0.3, "inverse_update_period": 4}}
FIXED = {"momentum": 0.9, "step_size": TrustRegion(), "inverse_update_period": 1, "weight_decay": 0.1}
SELECTED = {"step_size": SelectedUpdates(), "momentum": 0.9, "weight_decay": 0.1, "inverse": None}
VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 1e-4}
SEGMENTS = {"exchange": Exchange.SEGMENTS}

ON_TWO = {
    "groups": Case("mixed", Sharded(), {"momentum": 0.9}, by_layer=GROUPS, split=EMPTY),
    "no wrapper": Case("tied", Sharded(FACTORS), {"momentum": 0.5, "dampening": 0.1}, split=UNEVEN, wrapped=None),
    "fixed region, views": Case("tokens", Sharded(), FIXED, split=EMPTY, micro=2, wrapped=VIEWS, **SEGMENTS),
    "ekfac": Case("mixed", Sharded(), {"inverse": EKFAC(), "inverse_update_period": 1}, split=EMPTY, **SEGMENTS),
}

ON_FOUR = {
    "several buckets": Case("pictures", Sharded(), {"momentum": 0.9}, split=EMPTY, wrapped=SMALL, **SEGMENTS),
    "scaler": Case("mixed", Sharded(), split=EMPTY, scaler="named", micro=2, wrapped=SMALL, **SEGMENTS),
    "directly": Case("tokens", Sharded(), FIXED, split=UNEVEN, wrapped=SMALL),
    "no wrapper": Case("mixed", Sharded(), SELECTED, split=UNEVEN, wrapped=None, **SEGMENTS),
}


def with_largest_everywhere(rank: int, case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    with largest_everywhere():
        return on_rank(rank, case)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_end_where_one_process_does(two_ranks: Ranks, name: str) -> None:
    check(ON_TWO[name], two_ranks.run(with_largest_everywhere, ON_TWO[name]))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_end_where_one_process_does(four_ranks: Ranks, name: str) -> None:
    check(ON_FOUR[name], four_ranks.run(with_largest_everywhere, ON_FOUR[name]))


def clipped(rank: int, order: float) -> tuple[float, list[Tensor], frozenset[str], int]:
    """The norm, what the gradients of parameters that are here became, and how many momentum buffers are here."""
    model = build(Mixed)
    net = wrap(model, {})
    optimizer = KFACOptimizer(net, lr=0.1, momentum=0.9, distributed=DistributedConfig(Sharded()))
    with largest_everywhere():
        x, y = examples(0)
        share = slice(rank * len(x) // dist.get_world_size(), (rank + 1) * len(x) // dist.get_world_size())
        squares(net(x[share]), y[share]).mean().backward()
        norm = float(optimizer.clip_grad_norm_(0.1, order))
        plan = optimizer.plan()
        assert plan is not None
        kept = [
            param.grad
            for name, param in model.named_parameters()
            if name.rpartition(".")[0] in plan.everywhere and param.grad is not None
        ]
        optimizer.step()
    held = sum("momentum_buffer" in optimizer.state[param] for param in model.parameters())
    return norm, kept, plan.everywhere, held


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_norms_count_what_all_ranks_have_once(four_ranks: Ranks, order: float) -> None:
    model = build(Mixed)
    squares(model(examples(0)[0]), examples(0)[1]).mean().backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1, order))
    answers = four_ranks.run(clipped, order)
    for norm, kept, everywhere, _ in answers:
        assert norm == pytest.approx(expected, rel=1e-12)
        assert everywhere
        means = [p.grad for n, p in model.named_parameters() if n.rpartition(".")[0] in everywhere]
        for one, other in zip(kept, means, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    total = len(list(model.parameters()))
    assert sum(held for *_, held in answers) > total, "momentum of a layer that has no owner is on every rank"
