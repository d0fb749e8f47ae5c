"""P ranks train as one process does: parameters, momentum, factors, inverses, and all ranks at the same bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Ranks
from helpers.training import (
    EMPTY,
    EVEN,
    NETS,
    UNEVEN,
    Case,
    Split,
    build,
    check,
    close,
    examples,
    on_rank,
    share,
    squares,
    wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    AutoInverse,
    Background,
    BlockDiagonal,
    Cholesky,
    DoublyFactored,
    Eigen,
    KFACOptimizer,
    LossTerms,
    LowRank,
    NewtonSchulz,
    SelectedUpdates,
    Staggered,
    Structure,
    TrustRegion,
    WeightSharing,
)
from kfac_optim.distributed import Auto, DistributedConfig, Exchange, Placement, Replicated, Sharded
from kfac_optim.distributed.planning.strategies import Strategy

FACTORS = Placement.FACTORS
DENSE, DIAGONAL, IDENTITY = Structure.DENSE, Structure.DIAGONAL, Structure.IDENTITY

WIDE = {"inverse": {"wide": DoublyFactored(2)}}
FIXED = {"momentum": 0.9, "step_size": TrustRegion(), "inverse_update_period": 1}
EACH = {"factor_update_period": 1, "inverse_update_period": 1}
RARE = {"factor_update_period": 2, "inverse_update_period": 4}
GROUPS = {"bias": {"lr": 0.02, "weight_decay": 0.1}, "hidden": {"damping": 0.3, "inverse_update_period": 4}}
SELDOM = {"factor_update_period": 1, "inverse_update_period": 50}
SELECTED = {"step_size": SelectedUpdates(), "momentum": 0.9, "weight_decay": 0.1, "inverse": None}
MOVING = (0.1, 0.15, 0.25, 0.4, 0.6, 0.3, 0.2)  # the inverses follow at each doubling and halving
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
SMALL = {"bucket_cap_mb": 1e-4}  # several buckets


def background(staleness: int, schedule: Any = None) -> dict[str, Any]:
    chosen = {} if schedule is None else {"schedule": schedule}
    return {"refresh": Background(max_staleness=staleness, deterministic=True, **chosen)}


# Every value of every choice with several values of the others, here or on four ranks; what is in no pair of them, the
# drawn cases below reach.
ON_TWO = {
    "replicated": Case(),
    "replicated, by hand": Case(wrapped=None, split=UNEVEN, options={"momentum": 0.9}),
    "one worker": Case(
        "tokens", Replicated(0.5), {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, split=EMPTY
    ),
    "factors": Case("tied", Replicated(1, FACTORS), {"kl_clip": None, **RARE}, split=UNEVEN, wrapped=VIEWS),
    "factors, one worker": Case(
        "pictures", Replicated(0.5, FACTORS), {"refresh": Staggered()}, split=EMPTY, wrapped=None
    ),
    "sharded": Case(strategy=Sharded(), options={"momentum": 0.9}, by_layer=GROUPS, split=EMPTY),
    "sharded, no wrapper": Case("tied", Sharded(), {"momentum": 0.5, "dampening": 0.1}, split=UNEVEN, wrapped=None),
    "sharded factors": Case("tokens", Sharded(FACTORS), split=EMPTY, micro=2),
    "auto": Case("feature map", Auto(), {**WIDE, "l2_in_curvature": True, "weight_decay": 0.1}, split=UNEVEN),
    "auto of one": Case("pictures", Auto(candidates=(Sharded(),)), EACH, split=UNEVEN),
    "auto of one, no wrapper": Case("mixed", Auto(candidates=(Sharded(),)), split=UNEVEN, wrapped=None),
    "eigen": Case("tokens", Sharded(FACTORS), {"inverse": Eigen(), **RARE}, split=UNEVEN, wrapped=None),
    "eigen, replicated": Case("mixed", Replicated(0.5, FACTORS), {"inverse": Eigen()}, split=EMPTY),
    "ekfac, one worker": Case("pictures", Replicated(0.5), {"inverse": EKFAC(), **EACH}, split=UNEVEN, micro=2),
    "low rank": Case("mixed", Sharded(), {"inverse": LowRank(1)}, split=UNEVEN),
    "sketches, factors": Case("tied", Replicated(0.5, FACTORS), {"inverse": LowRank(1, sketch=1)}, split=EMPTY),
    "newton": Case("mixed", Replicated(1, FACTORS), {"inverse": NewtonSchulz()}, split=EMPTY, wrapped=None),
    "eigen, factors apart": Case("tied", Replicated(0.5, FACTORS), {"inverse": Eigen(), **RARE}, split=UNEVEN),
    "eigen, sharded": Case("mixed", Sharded(), {"inverse": Eigen()}, split=UNEVEN),
    "selected": Case("mixed", Replicated(), SELECTED, split=UNEVEN),
    "selected, factors apart": Case("tied", Sharded(FACTORS), SELECTED, split=UNEVEN),
    "selected, one worker": Case("mixed", Replicated(0.5), SELECTED, split=EMPTY),
    "doubly factored": Case("feature map", Sharded(), WIDE, split=EMPTY),
    "rule": Case("tokens", Sharded(), {"inverse": AutoInverse()}, split=UNEVEN, wrapped=STATIC),
    "blocks": Case("mixed", Replicated(0.5), {"structure": (BlockDiagonal(3), DENSE)}, split=UNEVEN),
    "diagonal": Case("mixed", Sharded(), {"structure": (DIAGONAL, DENSE)}, split=EVEN),
    "identity": Case("tokens", Sharded(FACTORS), {"structure": (DENSE, IDENTITY)}, split=EMPTY),
    "reduce": Case("tokens", Replicated(0.5), {"weight_sharing": WeightSharing.REDUCE}, split=EMPTY),
    "summed loss": Case("tied", Replicated(), {"loss_terms": LossTerms.SUM, "kl_clip": None}, split=EMPTY),
    "summed loss, sharded": Case("mixed", Sharded(), {"loss_terms": LossTerms.SUM, "kl_clip": None}, split=UNEVEN),
    "stated terms": Case("mixed", Sharded(FACTORS), stated=True, split=EMPTY, micro=2),
    "scaler": Case("pictures", Replicated(0.5), split=UNEVEN, scaler="handed"),
    "micro-batches, by hand": Case("tied", Replicated(0.5), split=UNEVEN, micro=3, wrapped=None),
    "fixed region": Case("mixed", Replicated(), FIXED, split=UNEVEN),
    "background": Case("mixed", Replicated(0.5), background(2), split=UNEVEN),
    "background, at once": Case("pictures", Sharded(), background(0), split=UNEVEN),
    "damping that moves": Case("mixed", Replicated(), SELDOM, split=UNEVEN, dampings=MOVING),
    "damping that moves, sharded": Case("tokens", Sharded(FACTORS), SELDOM, split=EMPTY, dampings=MOVING),
    "damping that moves, by layer": Case("mixed", by_layer=GROUPS, split=EMPTY, dampings=MOVING),
    "damping that moves, staggered": Case(
        "mixed", Replicated(0.5), {"refresh": Staggered()}, split=EMPTY, dampings=MOVING
    ),
    "unused": Case("tied", Sharded(), split=EMPTY, wrapped=UNUSED),
    "static graph": Case("mixed", Sharded(), split=UNEVEN, wrapped=STATIC),
}

ON_FOUR = {
    "replicated": Case("tokens", split=UNEVEN),
    "half the workers": Case("mixed", Replicated(0.5), {"momentum": 0.9}, split=EMPTY),
    "factors": Case("tied", Replicated(0.5, FACTORS), {"inverse": Eigen()}, split=UNEVEN),
    "factors, one worker": Case("mixed", Replicated(0.25, FACTORS), {"inverse": NewtonSchulz()}, split=EMPTY),
    # Some ranks own no layer.
    "sharded": Case("pictures", Sharded(), {"momentum": 0.9, **RARE}, split=EMPTY),
    "sharded factors": Case(
        "feature map", Sharded(FACTORS), {**WIDE, "refresh": Staggered()}, split=UNEVEN, wrapped=None
    ),
    "ekfac": Case("mixed", Sharded(), {"inverse": EKFAC(), **EACH}, split=UNEVEN),
    "background": Case("tokens", Sharded(FACTORS), background(1, Staggered()), split=UNEVEN),
    "fixed region": Case("pictures", Sharded(), FIXED, split=UNEVEN),
    "scaler": Case("mixed", Sharded(), split=EMPTY, scaler="named", micro=2),
    "auto": Case("mixed", Auto(), by_layer=GROUPS, split=UNEVEN),
    "selected": Case("tokens", Sharded(), {**SELECTED, "nesterov": True}, split=UNEVEN, wrapped=None),
    "selected, half the workers": Case("mixed", Replicated(0.5, FACTORS), SELECTED, split=UNEVEN),
    "sketches": Case("pictures", Sharded(FACTORS), {"inverse": LowRank(1, sketch=1)}, split=EMPTY),
}

SEGMENTS = {"exchange": Exchange.SEGMENTS}

# By segments: some ranks own nothing, what owners have is uneven, gradients come in several buckets and backwards.
SEGMENTS_ON_TWO = {
    "sharded": Case("mixed", Sharded(), {"momentum": 0.9}, by_layer=GROUPS, split=EMPTY, **SEGMENTS),
    "no wrapper": Case("tied", Sharded(), split=UNEVEN, wrapped=None, **SEGMENTS),
    "views": Case("tokens", Sharded(FACTORS), split=EMPTY, micro=2, wrapped=VIEWS, **SEGMENTS),
    "replicated": Case("mixed", Replicated(), {"inverse": Eigen(), **RARE}, split=UNEVEN, **SEGMENTS),
    "one worker": Case("tied", Replicated(0.5, FACTORS), {"inverse": EKFAC(), **EACH}, split=EMPTY, **SEGMENTS),
    "auto of one": Case("pictures", Auto(candidates=(Sharded(),)), EACH, split=UNEVEN, **SEGMENTS),
}

SEGMENTS_ON_FOUR = {
    "sharded": Case("pictures", Sharded(), {"momentum": 0.9, **RARE}, split=EMPTY, wrapped=SMALL, **SEGMENTS),
    "scaler": Case("mixed", Sharded(), split=EMPTY, scaler="named", micro=2, wrapped=SMALL, **SEGMENTS),
    "unused": Case("tied", Sharded(), {"refresh": Staggered()}, split=EMPTY, wrapped=UNUSED, **SEGMENTS),
    "replicated": Case("tokens", Replicated(0.25), {"inverse": LowRank(1)}, split=UNEVEN, **SEGMENTS),
}


@pytest.mark.parametrize("name", SEGMENTS_ON_TWO)
def test_by_segments_two_ranks_end_where_one_process_does(two_ranks: Ranks, name: str) -> None:
    check(SEGMENTS_ON_TWO[name], two_ranks.run(on_rank, SEGMENTS_ON_TWO[name]))


@pytest.mark.parametrize("name", SEGMENTS_ON_FOUR)
def test_by_segments_four_ranks_end_where_one_process_does(four_ranks: Ranks, name: str) -> None:
    check(SEGMENTS_ON_FOUR[name], four_ranks.run(on_rank, SEGMENTS_ON_FOUR[name]))


@pytest.mark.slow
def test_by_segments_eight_ranks_end_where_one_process_does(eight_ranks: Ranks) -> None:
    case = Case("mixed", Sharded(), {"momentum": 0.9, **EACH}, split=EMPTY, wrapped=SMALL, steps=4, **SEGMENTS)
    check(case, eight_ranks.run(on_rank, case, timeout=300))


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_end_where_one_process_does(two_ranks: Ranks, name: str) -> None:
    check(ON_TWO[name], two_ranks.run(on_rank, ON_TWO[name]))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_end_where_one_process_does(four_ranks: Ranks, name: str) -> None:
    check(ON_FOUR[name], four_ranks.run(on_rank, ON_FOUR[name]))


def strategies_of() -> st.SearchStrategy[Strategy | Auto]:
    placed = st.sampled_from(Placement)
    replicated = st.builds(Replicated, st.sampled_from([0.25, 0.5, 1.0]), placed)
    return st.one_of(replicated, st.builds(Sharded, placed), st.just(Auto()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    strategy = draw(strategies_of())
    factor_period, inverse_period = draw(st.sampled_from([(1, 1), (1, 3), (2, 4)]))
    inverse = draw(
        st.sampled_from([Cholesky(), Eigen(), EKFAC(), LowRank(1), LowRank(1, sketch=1), NewtonSchulz(), AutoInverse()])
    )
    if isinstance(inverse, EKFAC):
        inverse_period = factor_period
    options: dict[str, Any] = {
        "inverse": inverse,
        "factor_update_period": factor_period,
        "inverse_update_period": inverse_period,
        "kl_clip": draw(st.sampled_from([None, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01])),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "factor_decay": draw(st.sampled_from([0.5, 1.0])),
    }
    weights = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    return Case(
        net=draw(st.sampled_from(sorted(NETS))),
        strategy=strategy,
        options=options,
        split=Split(tuple(weights)),
        wrapped=draw(st.sampled_from([None, {}, VIEWS, UNUSED])),
        micro=draw(st.integers(1, 2)),
        stated=draw(st.booleans()),
        steps=6,
    )


@settings(max_examples=12)
@given(case=cases())
def test_any_two_ranks_end_where_one_process_does(two_ranks: Ranks, case: Case) -> None:
    check(case, two_ranks.run(on_rank, case))


# -- what is refused ---------------------------------------------------------------------------------------------


def refusal(rank: int, case: Case) -> str:  # noqa: ARG001
    model = wrap(build(NETS[case.net]), case.wrapped)
    try:
        case.optimizer(model, **case.distributed())
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {
    "deterministic=True": Case(options={"refresh": Background()}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_choices_that_ranks_cannot_follow_alike_are_refused(two_ranks: Ranks, words: str) -> None:
    for message in two_ranks.run(refusal, REFUSED[words]):
        assert message.startswith("kfac_optim: ")
        assert words in message


def outside(rank: int) -> str:  # noqa: ARG001
    # Each rank gets a group, as torch names later groups by how many a rank has, and the names must be equal.
    first, _ = (dist.new_group([each]) for each in range(2))
    config = DistributedConfig(group=first)
    try:
        KFACOptimizer(nn.Linear(2, 2), distributed=config)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_outside_the_group_is_told_so_when_its_optimizer_is_built(two_ranks: Ranks) -> None:
    inside, message = two_ranks.run(outside)
    assert inside == ""
    assert message.startswith("kfac_optim: rank 1 is not in the group of its DistributedConfig.")


def test_a_scaler_that_is_not_named_is_found_where_ranks_see_other_gradients(two_ranks: Ranks) -> None:
    case = Case(strategy=Sharded(), scaler="handed")
    check(case, two_ranks.run(on_rank, case))


# -- names -------------------------------------------------------------------------------------------------------


NAMES = ("0", "scale", "scale")  # one that a layer has, and one twice


def beside_the_model(rank: int, strategy: Strategy | None) -> list[Tensor]:
    """Train two layers, and parameters that belong to no layer and have been given these names."""
    net = build(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    beside = [nn.Parameter(torch.zeros(2).double()) for _ in NAMES]
    groups = [list(net.named_parameters()), *([named] for named in zip(NAMES, beside, strict=True))]
    optimizer = KFACOptimizer(
        [{"params": group} for group in groups],
        lr=0.1,
        damping=0.1,
        model=net,
        distributed=False if strategy is None else DistributedConfig(strategy=strategy),
    )
    for step in range(4):
        x, y = examples(step) if strategy is None else share(examples(step), [6, 6], rank)
        optimizer.zero_grad()
        output = net(x) + sum(number * param for number, param in enumerate(beside, 1))
        squares(output, y).mean().backward()
        if isinstance(strategy, Replicated):
            for param in (*net.parameters(), *beside):
                assert param.grad is not None
                dist.all_reduce(param.grad, dist.ReduceOp.SUM)
                param.grad /= 2
        optimizer.step()
    return [param.detach() for param in (*net.parameters(), *beside)]


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_parameters_beside_the_model_may_have_names_that_are_taken(two_ranks: Ranks, strategy: Strategy) -> None:
    expected = beside_the_model(0, None)
    for found in two_ranks.run(beside_the_model, strategy):
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            close(ours, theirs, f"parameter {number}", 1e-12)
