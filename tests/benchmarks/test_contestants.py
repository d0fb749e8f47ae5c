"""Optimizers are made as their settings say, with spaces in the units of a problem's loss."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks import contestants
from benchmarks.contestants import CONTESTANTS, MuonWithAdamW
from benchmarks.problems import PROBLEMS
from benchmarks.search import points


def test_spaces_go_with_the_number_of_summed_terms() -> None:
    """Of 784 terms gradients add up to 28 times those of one."""
    for name, factor in (("SGD", 1 / 28), ("KFAC-default", 1)):
        summed, plain = (CONTESTANTS[name].box(PROBLEMS[problem])["lr"] for problem in ("mnist-b", "digits"))
        assert summed == plain.scaled(factor)


class Small(nn.Module):
    """A layer of each kind that Muon takes or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.positions = nn.Parameter(torch.randn(3, 4))
        self.kernel = nn.Conv1d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.embedding(tokens) + self.positions).mT
        out: Tensor = self.head(self.kernel(x).relu().mean(-1))
        return out


def test_muon_has_hidden_weights_as_matrices_and_adamw_the_rest() -> None:
    model, tokens = Small(), torch.randint(5, (8, 3))
    kernel = nn.Parameter(model.kernel.weight.detach().flatten(1).clone())
    others = {name: param for name, param in model.named_parameters() if name != "kernel.weight"}
    copies = {name: nn.Parameter(param.detach().clone()) for name, param in others.items()}
    muon = torch.optim.Muon([kernel], 0.02, 0.1, 0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(copies.values(), 0.02, (0.8, 0.999), weight_decay=0.1)
    optimizer = MuonWithAdamW(model, 0.02, 0.8, 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        return loss.detach()

    for step in range(3):
        optimizer.step(closure)
        kernel.grad = model.kernel.weight.grad.flatten(1).clone()  # type: ignore[union-attr]
        for name, param in others.items():
            copies[name].grad = param.grad.clone()  # type: ignore[union-attr]
        for each in (muon, adamw):
            each.param_groups[0]["lr"] = 0.02 * 0.5**step
        muon.step()
        adamw.step()
        schedule.step()
    assert torch.equal(model.kernel.weight.flatten(1), kernel)
    for name, param in others.items():
        assert torch.equal(param, copies[name]), name


def test_lbfgs_searches_along_its_line() -> None:
    """Its first trial is 1 away from where it stands, nine times beyond the minimum."""
    model = nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.1)
    optimizer = CONTESTANTS["L-BFGS"].optimizer(model, PROBLEMS["digits"], {"lr": 1.0, "history_size": 10.0})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 50 * model.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert abs(model.weight.item()) < 0.05


def test_sgd_decays_what_the_setting_or_else_the_problem_says() -> None:
    model, problem = nn.Linear(2, 2), PROBLEMS["resnet20"]
    setting = {"lr": 0.1, "one_minus_momentum": 0.25}
    (group,) = CONTESTANTS["SGD"].optimizer(model, problem, setting).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.75, True, 1e-4)
    (group,) = CONTESTANTS["SGD"].optimizer(model, problem, {**setting, "weight_decay": 0.3}).param_groups
    assert group["weight_decay"] == 0.3


def test_kfac_is_told_its_rate_and_what_the_loss_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, problem = nn.Linear(2, 2), PROBLEMS["lstm"]
    told = Mock()
    monkeypatch.setattr(contestants, "KFACOptimizer", told)
    for_all = {"momentum": 0.9, "nesterov": True, "weight_decay": problem.weight_decay}
    CONTESTANTS["KFAC-default"].optimizer(model, problem, {"lr": 0.1})
    told.assert_called_once_with(model, 0.1, loss_terms=problem.loss_terms, **for_all)
    told.reset_mock()
    CONTESTANTS["KFAC-named"].optimizer(model, problem, {"lr": 0.1})
    told.assert_called_once_with(model, 0.1, estimate=problem.named_loss, **for_all)


@pytest.mark.parametrize("name", ["digits", "lstm", "resnet20"])
def test_all_try_the_same_lengths_and_places_of_the_rate(name: str) -> None:
    problem = PROBLEMS[name]

    def tried(optimizer: str) -> list[dict[str, float]]:
        contestant = CONTESTANTS[optimizer]
        return points(contestant.box(problem), 5, 0, contestant.axes(problem))

    muon, kfac = tried("Muon"), tried("KFAC-selected")
    shared = [{key: value for key, value in each.items() if key != "one_minus_momentum"} for each in muon]
    assert shared == kfac
