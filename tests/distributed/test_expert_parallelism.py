"""Experts that lie on one rank each, or on some: every step is that of one process on the joined batch."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.mixtures import EXPERTS, Mixture, weights_of
from helpers.ranks import Ranks
from helpers.training import close
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import (
    EKFAC,
    Background,
    CurvaturePropagation,
    ExactGGN,
    KFACOptimizer,
    LevenbergMarquardt,
    LineSearch,
    LossTerms,
    MonteCarlo,
    SelectedUpdates,
    Staggered,
    TrustRegion,
)
from kfac_optim.distributed import DistributedConfig, Experts, Replicated, Sharded, StatisticsWorkers
from kfac_optim.distributed.gradients import undivided
from kfac_optim.distributed.planning.strategies import Strategy

RANKS, EACH, STEPS, UPSET = 4, 6, 7, 4
UNEVEN = (3, 9, 5, 7)
CRITERION = nn.MSELoss()
OPTIONS: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.9,
    "nesterov": True,
    "damping": 0.1,
    "factor_update_period": 1,
    "inverse_update_period": 3,
}
CHOICES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fixed trust region": {"step_size": TrustRegion(), "kl_clip": 1e-3},
    "selected updates": {"step_size": SelectedUpdates(), "lr": 0.02, "nesterov": False},
    "EKFAC": {"inverse": EKFAC(), "factor_update_period": 3},
    "the named loss": {"estimate": CurvaturePropagation(CRITERION)},  # of one output, whose sign is of no account
    "in the background": {"refresh": Background(max_staleness=2, deterministic=True)},
    "seldom": {"factor_update_period": 10, "inverse_update_period": 100},  # one is measured at a step of its own
    "uneven": {},
    "clipped": {},
}


def batch(step: int) -> Tensor:
    """The examples of all ranks, `[24, 3]`; every other step two experts get no token, and one gets its first late."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(RANKS * EACH, 2, generator=generator, dtype=torch.float64)
    ids = torch.randint(EXPERTS, (len(x),), generator=generator)
    if step % 2:
        ids[(ids == 2) | (ids == 3)] = 5
    if step < 3:
        ids[ids == 7] = 0
    return torch.cat([ids.to(x.dtype).unsqueeze(1), x], 1)


def loss(output: Tensor) -> Tensor:
    found: Tensor = CRITERION(output, torch.ones_like(output))
    return found


def outputs_of(choice: str) -> int:
    return 1 if choice == "the named loss" else 2


def in_wrapper(model: Mixture, *, divided: bool = True) -> DistributedDataParallel:
    names = [name for name, _ in model.named_parameters() if name.startswith("experts.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for param in model.of_experts_here() if divided else ():
        param.register_hook(lambda gradient: gradient / RANKS)
    return DistributedDataParallel(model)


def filled(model: Mixture) -> list[Tensor]:
    """Return the gradients of experts, zeros where there was none."""
    for param in model.of_experts_here():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    return [param.grad for param in model.of_experts_here() if param.grad is not None]


class Run:
    """Trains a mixture on this rank.

    Args:
        kind: of the mixture.
        copies: of each expert.
        strategy: of the shared layers.
        choice: of `CHOICES`.
    """

    def __init__(self, kind: str, copies: int, strategy: Strategy, choice: str) -> None:
        mesh = init_device_mesh("cpu", (copies, RANKS // copies), mesh_dim_names=("copies", "experts"))
        self.model, self.choice = Mixture(kind, mesh.get_group("experts"), outputs_of(choice)), choice
        self.ddp = in_wrapper(self.model)
        self.copies = mesh.get_group("copies") if copies > 1 else None
        config = DistributedConfig(strategy=strategy, experts=Experts(["experts"], copies=self.copies))
        self.optimizer = KFACOptimizer(self.ddp, **OPTIONS | CHOICES[choice], distributed=config)

    def train(self, first: int = 0, last: int = STEPS) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, rank = batch(step), dist.get_rank()
            if self.choice == "uneven":
                mine = x.split(UNEVEN)[rank]
                self.optimizer.set_loss_terms(len(x) / RANKS * 2)  # the mean is over elements, two an example
                (loss(self.ddp(mine)) * len(mine) * RANKS / len(x)).backward()
            else:
                loss(self.ddp(x.chunk(RANKS)[rank])).backward()
            for gradient in filled(self.model) if self.copies is not None else ():
                dist.all_reduce(gradient, group=self.copies)
            if self.choice == "clipped":
                self.optimizer.clip_grad_norm_(0.5)
            if step == UPSET and rank == 3:
                filled(self.model)[0].fill_(float("nan"))
            self.optimizer.step()

    def params(self) -> tuple[list[Tensor], Tensor]:
        return [param.detach() for param in self.model.of_others()], weights_of(self.model.of_experts_here())


def on_rank(_: int, *chosen: Any) -> tuple[list[Tensor], Tensor]:
    run = Run(*chosen)
    run.train()
    return run.params()


def alone(kind: str, copies: int, choice: str) -> tuple[list[Tensor], Tensor]:
    model = Mixture(kind, outputs=outputs_of(choice))
    options = OPTIONS | CHOICES[choice]
    if choice == "uneven":
        options["loss_terms"] = LossTerms.ELEMENTS
    optimizer = KFACOptimizer(model, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model(batch(step))).backward()
        if copies > 1:  # whose sums are never None
            filled(model)
        if choice == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step == UPSET:
            filled(model)[0].fill_(float("nan"))
        optimizer.step()
    return [param.detach() for param in model.of_others()], weights_of(model.of_experts_here())


def compare(answers: list[tuple[list[Tensor], Tensor]], copies: int, expected: tuple[list[Tensor], Tensor]) -> None:
    shared, experts = expected
    for rank, (ours, _) in enumerate(answers):
        for number, (one, other) in enumerate(zip(ours, shared, strict=True)):
            close(one, other, f"parameter {number} on rank {rank}", 1e-12)
    for first in range(0, RANKS, RANKS // copies):
        held = torch.cat([weights for _, weights in answers[first : first + RANKS // copies]])
        close(held, experts, f"experts from rank {first}", 1e-12)


@pytest.mark.parametrize("strategy", [Replicated(), Replicated(0.5), Sharded()], ids=["replicated", "half", "sharded"])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("kind", ["linear", "einsum"])
def test_ranks_with_experts_are_one_process(four_ranks: Ranks, kind: str, copies: int, strategy: Strategy) -> None:
    answers = four_ranks.run(on_rank, kind, copies, strategy, "defaults")
    compare(answers, copies, alone(kind, copies, "defaults"))


# Of experts in one parameter SelectedUpdates selects for those of one rank together.
@pytest.mark.parametrize(
    ("kind", "copies", "choice"),
    [("linear", 1, choice) for choice in list(CHOICES)[1:]]
    + [("einsum", 2, choice) for choice in list(CHOICES)[1:] if choice != "selected updates"],
)
def test_so_they_are_whatever_is_chosen(four_ranks: Ranks, kind: str, copies: int, choice: str) -> None:
    answers = four_ranks.run(on_rank, kind, copies, Sharded() if copies == 1 else Replicated(), choice)
    compare(answers, copies, alone(kind, copies, choice))


# -- checkpoints and reports -------------------------------------------------------------------------------------------


def resumed(_: int, kind: str, copies: int, strategy: Strategy) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters of a run, and those of one that goes on from what each rank has saved in the middle of it."""
    run = Run(kind, copies, strategy, "defaults")
    run.train(last=UPSET + 1)
    with pytest.warns(UserWarning, match=r"this state_dict\(\) lacks .* consolidate_state_dict"):
        run.optimizer.state_dict()
    run.optimizer.consolidate_state_dict(to=None)
    held = deepcopy(run.optimizer.state_dict())
    params = {name: param.detach().clone() for name, param in run.model.named_parameters()}
    run.train(first=UPSET + 1)
    other = Run(kind, copies, strategy, "defaults")
    other.model.load_state_dict(params)
    other.ddp(batch(0).chunk(RANKS)[dist.get_rank()])  # which shows parameters that a function multiplies by
    other.optimizer.load_state_dict(held)
    other.train(first=UPSET + 1)
    return [param.detach() for param in run.model.parameters()], [param.detach() for param in other.model.parameters()]


@pytest.mark.parametrize(("kind", "copies", "strategy"), [("linear", 1, Sharded()), ("einsum", 2, Replicated())])
def test_a_run_goes_on_from_what_each_rank_has_saved(
    four_ranks: Ranks, kind: str, copies: int, strategy: Strategy
) -> None:
    for ours, theirs in four_ranks.run(resumed, kind, copies, strategy):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def reported(_: int, copies: int) -> tuple[dict[str, tuple[int, ...]], float]:
    run = Run("linear", copies, Replicated(), "defaults")
    run.train()
    summary = run.optimizer.summary()
    assert {each.name for each in summary.parameters} == {name for name, _ in run.model.named_parameters()}
    owners = {each.name: each.owners for each in summary.blocks if each.name.startswith("experts.")}
    return owners, run.optimizer.metrics()["direction_norm"]


@pytest.mark.parametrize("copies", [1, 2])
def test_each_rank_reports_its_experts_and_the_step_of_all(four_ranks: Ranks, copies: int) -> None:
    local = EXPERTS * copies // RANKS
    answers = four_ranks.run(reported, copies)
    for rank, (owners, norm) in enumerate(answers):
        assert list(owners) == [f"experts.{number}" for number in range(local)]
        holders = range(rank % (RANKS // copies), RANKS, RANKS // copies)
        assert all(set(each) <= set(holders) for each in owners.values())
        assert norm == answers[0][1]


# -- refusals ----------------------------------------------------------------------------------------------------------


def told(function: Callable[[], Any]) -> str:
    try:
        function()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def of_choices(_: int) -> list[str]:
    model, config = in_wrapper(Mixture("linear", dist.group.WORLD)), DistributedConfig(experts=Experts(["experts"]))

    def built(**options: Any) -> str:
        return told(lambda: KFACOptimizer(model, **{"lr": 0.1, "distributed": config, **options}))

    named = MonteCarlo(CRITERION)
    optimizer = KFACOptimizer(model, lr=0.1, distributed=config)
    return [
        built(step_size=LineSearch()),
        built(estimate=named, adapt_damping=LevenbergMarquardt()),
        built(estimate=ExactGGN(CRITERION)),
        built(refresh=Staggered()),
        built(distributed=DistributedConfig(experts=Experts(["layers"]))),
        told(lambda: Experts("experts")),  # type: ignore[arg-type]
        told(lambda: Experts([])),
        told(lambda: DistributedConfig(experts=Experts(["experts"]), workers=StatisticsWorkers(1))),
        told(optimizer.consolidate_state_dict),
        told(optimizer.join_hook),
    ]


WORDS = (
    r"evaluates the whole model.*AdaptiveTrustRegion\(\)",
    r"evaluates the whole model.*AdaptiveTrustRegion\(\)",
    r"ExactGGN.*passes.*MonteCarlo",
    r"Staggered\(\) spreads.*Together\(\)",
    r"'layers' of Experts matches no module.*'first'",
    r"wrap a single one in a list",
    r"layers of Experts is empty",
    r"do not go together.*skip_layers",
    r"to=0 would leave out.*to=None",
    r"Join.*Leave Join out",
)


def test_choices_that_do_not_go_with_experts_are_refused_by_name(four_ranks: Ranks) -> None:
    for messages in four_ranks.run(of_choices):
        for message, words in zip(messages, WORDS, strict=True):
            assert re.match(f"kfac_optim: .*{words}", message), message


def test_layers_are_those_that_were_named_whatever_becomes_of_the_list() -> None:
    named = ["*.experts"]
    experts = Experts(named)
    named.append("head")
    assert experts == Experts(("*.experts",))
    assert hash(experts) == hash(Experts(["*.experts"]))


def of_layouts(rank: int) -> tuple[list[str], str]:
    """Return what is told of experts that are averaged, not divided (after one backward and two), or DTensors.

    Also what is told of the remedy for DTensors.
    """
    config = DistributedConfig(experts=Experts(["experts"]))
    averaged = DistributedDataParallel(Mixture("einsum", dist.group.WORLD))
    messages = [told(lambda: KFACOptimizer(averaged, lr=0.1, distributed=config))]
    for backwards in (1, 2):
        sums = in_wrapper(Mixture("einsum", dist.group.WORLD), divided=False)
        optimizer = KFACOptimizer(sums, lr=0.1, distributed=config)
        for number in range(backwards):
            loss(sums(batch(number).chunk(RANKS)[rank])).backward()
        messages.append(told(optimizer.step))
    model, mesh = Mixture("einsum", dist.group.WORLD), init_device_mesh("cpu", (RANKS,))
    whole = torch.randn(EXPERTS, 3, 3, dtype=torch.float64)
    model.experts.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    messages.append(told(lambda: KFACOptimizer(model, lr=0.1, distributed=config)))
    model.experts.weight = nn.Parameter(model.experts.weight.to_local())
    remedied = in_wrapper(model)
    optimizer = KFACOptimizer(remedied, lr=0.1, distributed=config)
    loss(remedied(batch(0).chunk(RANKS)[rank])).backward()
    return messages, told(optimizer.step)


def test_half_of_what_backward_brings_was_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by two ranks."""
    monkeypatch.setattr(undivided, "largest", lambda _, words, *__: words)
    ranks: Any = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    for share in (1, 2):
        check, param = undivided.DivisionCheck(), nn.Parameter(torch.ones(3))
        check.follow([param])
        param.square().sum().backward()
        assert param.grad is not None
        param.grad /= share
        said = told(partial(check.check, [param], ranks, lambda sums: sums, copies=1, averages=True))
        assert ("are those of the sum" in said) == (share == 1)


def of_divided(_: int, copies: int, divided: bool) -> str:
    """Return what is told where gradients are summed over copies, and divided in place or not."""
    mesh = init_device_mesh("cpu", (copies, RANKS // copies), mesh_dim_names=("copies", "experts"))
    model = Mixture("linear", mesh.get_group("experts"))
    experts = Experts(["experts"], copies=mesh.get_group("copies") if copies > 1 else None)
    ddp = in_wrapper(model, divided=False)
    optimizer = KFACOptimizer(ddp, lr=0.1, distributed=DistributedConfig(experts=experts))
    loss(ddp(batch(0).chunk(RANKS)[dist.get_rank()])).backward()
    for gradient in filled(model):
        if copies > 1:
            dist.all_reduce(gradient, group=mesh.get_group("copies"))
        if divided:
            gradient /= RANKS
    return told(optimizer.step)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_the_division_of_gradients_is_seen_with_copies_and_in_place(four_ranks: Ranks, copies: int) -> None:
    assert four_ranks.run(of_divided, copies, True) == ["nothing"] * RANKS
    for message in four_ranks.run(of_divided, copies, False):
        assert re.match(r"kfac_optim: the gradients of experts are those of the sum", message)


def of_unfrozen(_: int, divided: bool) -> list[str]:
    """Return what is told at each step, where experts are unfrozen before the fifth."""
    model = Mixture("linear", dist.group.WORLD)
    model.experts.requires_grad_(False)
    ddp = in_wrapper(model, divided=False)
    optimizer = KFACOptimizer(ddp, lr=0.1, distributed=DistributedConfig(experts=Experts(["experts"])))
    messages = []
    for step in range(6):
        if step == 4:
            model.experts.requires_grad_(True)
            for expert in model.of_experts_here() if divided else ():
                expert.register_hook(lambda gradient: gradient / RANKS)
        optimizer.zero_grad()
        loss(ddp(batch(step).chunk(RANKS)[dist.get_rank()])).backward()
        messages.append(told(optimizer.step))
    return messages


def test_the_division_of_gradients_is_seen_where_experts_were_frozen(four_ranks: Ranks) -> None:
    assert four_ranks.run(of_unfrozen, True) == [["nothing"] * 6] * RANKS
    for messages in four_ranks.run(of_unfrozen, False):
        assert messages[:4] == ["nothing"] * 4
        assert re.match(r"kfac_optim: the gradients of experts are those of the sum", messages[4])


def test_experts_that_lie_otherwise_are_refused_by_name(four_ranks: Ranks) -> None:
    for messages, remedied in four_ranks.run(of_layouts):
        assert re.match(r"kfac_optim: DistributedDataParallel averages the experts 'experts.weight'", messages[0])
        for message in messages[1:3]:
            assert re.match(r"kfac_optim: the gradients of experts are those of the sum .* gradient / 4", message)
        assert re.match(r"kfac_optim: the experts 'experts.weight' are DTensors.*to_local\(\)", messages[3])
        assert remedied == "nothing"
