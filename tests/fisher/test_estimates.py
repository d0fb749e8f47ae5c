"""Estimates that name the loss: against the dense generalised Gauss-Newton matrix, and without a trace in training."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.plain import assert_identical, clones
from torch import Tensor, nn

from kfac_optim import (
    CurvaturePropagation,
    Empirical,
    Estimate,
    ExactGGN,
    KFACOptimizer,
    LossTerms,
    MonteCarlo,
    WeightSharing,
)
from kfac_optim.fisher.estimates import NamedLoss
from kfac_optim.fisher.named_losses import likelihood_of

Loss = tuple[nn.Module, dict[str, Any], Callable[[Tensor], Tensor]]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(output: Tensor) -> Tensor:
    return torch.arange(output.shape[0]) % output.shape[1]


LOSSES: dict[str, Loss] = {
    "cross entropy": (nn.CrossEntropyLoss(), {}, lambda o: F.cross_entropy(o, classes(o))),
    "cross entropy, sum": (
        nn.CrossEntropyLoss(reduction="sum"),
        {},
        lambda o: F.cross_entropy(o, classes(o), reduction="sum"),
    ),
    "squares": (nn.MSELoss(), {}, lambda o: F.mse_loss(o, normal(*o.shape, seed=9))),
    "bits": (nn.BCEWithLogitsLoss(), {}, lambda o: F.binary_cross_entropy_with_logits(o, (o.detach() > 0).to(o.dtype))),
}
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def dense_ggn(model: nn.Module, x: Tensor, loss: Loss) -> Tensor:
    """`Σ Jᵀ H J / M` of all parameters, `H` by the columns that tests/test_likelihoods.py holds to autograd."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    output = model(x).detach()
    flat = torch.cat([j.reshape(output.numel(), -1) for j in jacobians.values()], dim=1)
    likelihood = likelihood_of(loss[0])
    of_example = torch.arange(len(output)).repeat_interleave(output[0].numel())
    same = (of_example[:, None] == of_example[None, :]).to(output.dtype)
    hessian = sum(torch.outer(c.flatten(), c.flatten()) * same for (c,) in likelihood.columns((output,)))
    terms = likelihood.terms((output,)) if likelihood.mean else 1
    return flat.T @ hessian @ flat / terms  # type: ignore[operator]


def dense_kfac(optimizer: KFACOptimizer, name: str) -> Tensor:
    """`G ⊗ A` with weight and bias in the order of the parameters."""
    a, g = optimizer.factors()[name]
    assert a is not None
    assert g is not None
    inputs, outputs = a.shape[-1] - 1, g.shape[-1]
    block = torch.kron(g[0], a[0]).view(outputs, inputs + 1, outputs, inputs + 1)
    weight = torch.arange(outputs * (inputs + 1)).view(outputs, inputs + 1)
    order = torch.cat([weight[:, :-1].flatten(), weight[:, -1]])
    return block.reshape(outputs * (inputs + 1), -1)[order][:, order]


def measured(
    model: nn.Module, x: Tensor, loss: Loss, estimate: Estimate, steps: int = 1, **options: Any
) -> KFACOptimizer:
    optimizer = KFACOptimizer(model, lr=0.0, factor_decay=1.0, estimate=estimate, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss[2](model(x)).backward()
        optimizer.step()
    return optimizer


def linear(inputs: int = 3, outputs: int = 4) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def test_the_exact_factors_of_one_layer_under_squares_are_the_whole_matrix() -> None:
    loss, model, x = LOSSES["squares"], linear(), normal(6, 3)
    optimizer = measured(model, x, loss, ExactGGN(loss[0]))
    torch.testing.assert_close(dense_kfac(optimizer, ""), dense_ggn(model, x, loss))


@losses
def test_the_exact_factors_of_a_single_example_are_the_whole_matrix_of_each_layer(loss: Loss) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = normal(1, 3)
    optimizer, dense = measured(model, x, loss, ExactGGN(loss[0])), dense_ggn(model, x, loss)
    torch.testing.assert_close(dense_kfac(optimizer, "0"), dense[:16, :16])
    torch.testing.assert_close(dense_kfac(optimizer, "2"), dense[16:, 16:])


@pytest.mark.parametrize("estimate", [MonteCarlo, CurvaturePropagation])
@losses
def test_random_estimates_come_to_the_exact_one(loss: Loss, estimate: Callable[..., Estimate]) -> None:
    """Within seven standard errors at every element of `G`, whose draws of different steps are independent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = normal(5, 3).repeat(20, 1)  # as many independent draws in one step as there are copies
    exact = measured(model, x, loss, ExactGGN(loss[0])).factors()
    optimizer = KFACOptimizer(
        model, lr=0.0, factor_decay=1e-9, estimate=estimate(loss[0]), inverse_update_period=1000, factor_update_period=1
    )
    draws: dict[str, list[Tensor]] = {"0": [], "2": []}
    for _ in range(100):
        optimizer.zero_grad()
        loss[2](model(x)).backward()
        optimizer.step()
        for name, (_, g) in optimizer.factors().items():
            assert g is not None
            draws[name].append(g)
    for name, samples in draws.items():
        stacked = torch.stack(samples)
        error = stacked.std(0) / math.sqrt(len(stacked))
        assert exact[name][1] is not None
        assert ((stacked.mean(0) - exact[name][1]).abs() <= 7 * error + 1e-9).all()
        torch.testing.assert_close(optimizer.factors()[name][0], exact[name][0])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu_(self.norm(self.first(x)))))


@pytest.mark.parametrize("estimate", [MonteCarlo, CurvaturePropagation, ExactGGN])
@pytest.mark.parametrize("by_closure", [False, True])
def test_training_goes_on_as_if_nothing_had_been_estimated(estimate: Callable[..., Estimate], by_closure: bool) -> None:
    """Gradients, buffers, dropout masks and random numbers; with a learning rate of 0, for the steps differ."""
    torch.manual_seed(0)
    model = Dropping().double()
    twin = copy.deepcopy(model)
    states = []
    for m, each in ((model, estimate(nn.CrossEntropyLoss())), (twin, Empirical())):
        optimizer = KFACOptimizer(m, lr=0.0, estimate=each, factor_update_period=1)
        torch.manual_seed(1)
        grads = []
        for i in range(3):
            x = normal(8, 4, seed=i)

            def closure(m: nn.Module = m, x: Tensor = x, optimizer: KFACOptimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(m(x), torch.arange(8) % 3)
                loss.backward()
                return loss

            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            grads.append([param.grad.clone() for param in m.parameters() if param.grad is not None])
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
        states.append((grads, m.state_dict(), torch.get_rng_state()))
    assert_identical(*states)


def test_the_estimates_are_on_the_scale_of_each_other_and_of_the_batch() -> None:
    """Every example twice, and micro-batches: the matrix is that of the mean."""
    loss, x = LOSSES["cross entropy"], normal(6, 3)
    once = measured(linear(), x, (*loss[:2], lambda o: F.cross_entropy(o, torch.arange(6) % 4)), ExactGGN(loss[0]))
    twice = measured(
        linear(),
        torch.cat([x, x]),
        (*loss[:2], lambda o: F.cross_entropy(o, torch.arange(6).repeat(2) % 4)),
        ExactGGN(loss[0]),
    )
    torch.testing.assert_close(twice.factors()[""], once.factors()[""])
    model = linear()
    parts = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(loss[0]))
    for part, target in zip(x.chunk(3), (torch.arange(6) % 4).chunk(3), strict=True):
        (F.cross_entropy(model(part), target) / 3).backward()
    parts.step()
    torch.testing.assert_close(parts.factors()[""], once.factors()[""])


def test_a_loss_that_is_put_together_otherwise_says_what_its_mean_runs_over() -> None:
    """Squares summed over the outputs of an example, averaged over examples: the sum, divided by their number."""
    x = normal(6, 3)
    summed = measured(
        linear(), x, LOSSES["squares"], ExactGGN(nn.MSELoss(reduction="sum"), loss_terms=LossTerms.EXAMPLES)
    )
    whole = measured(linear(), x, LOSSES["squares"], ExactGGN(nn.MSELoss(reduction="sum")))
    assert summed.factors()[""][1] is not None
    assert whole.factors()[""][1] is not None
    torch.testing.assert_close(summed.factors()[""][1], whole.factors()[""][1] / 6)
    told = linear()
    optimizer = KFACOptimizer(
        told, lr=0.0, estimate=ExactGGN(nn.MSELoss(reduction="sum")), loss_terms=LossTerms.EXAMPLES
    )
    LOSSES["squares"][2](told(x)).backward()
    optimizer.step()
    torch.testing.assert_close(optimizer.factors()[""], summed.factors()[""])
    mean = measured(linear(), x, LOSSES["squares"], ExactGGN(nn.MSELoss()))
    same = measured(linear(), x, LOSSES["squares"], ExactGGN(nn.MSELoss(), loss_terms=LossTerms.ELEMENTS))
    torch.testing.assert_close(mean.factors()[""], same.factors()[""])


def test_ignored_targets_are_left_out() -> None:
    model, twin, x = linear(), linear(), normal(6, 3)
    target = torch.tensor([0, -100, 2, 3, -100, 1])
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(nn.CrossEntropyLoss()))
    optimizer.set_loss_terms(4)
    F.cross_entropy(model(x), target).backward()
    optimizer.step()
    reference = KFACOptimizer(twin, lr=0.0, estimate=ExactGGN(nn.CrossEntropyLoss()))
    F.cross_entropy(twin(x[target >= 0]), target[target >= 0]).backward()
    reference.step()
    torch.testing.assert_close(optimizer.factors()[""], reference.factors()[""])


def test_several_backwards_draw_once_and_what_counts_nothing_draws_nothing() -> None:
    model, twin, x = linear(), linear(), normal(6, 3)
    optimizer, reference = (KFACOptimizer(m, lr=0.0, estimate=MonteCarlo(nn.MSELoss())) for m in (model, twin))
    with torch.no_grad():
        model(x)
    attacked = x.clone().requires_grad_()
    torch.autograd.grad(model(attacked).square().mean(), attacked)
    output = model(x)
    output[:, :2].square().sum().backward(retain_graph=True)
    output[:, 2:].square().sum().backward()
    optimizer.step()
    twin(x)  # so that the next forward is the second of the step with a graph, as above
    output = twin(x)
    # The loop's first backward says which elements the loss uses.
    output[:, :2].square().sum().backward()
    reference.step()
    torch.testing.assert_close(optimizer.factors()[""], reference.factors()[""])


@pytest.mark.parametrize("estimate", [MonteCarlo, CurvaturePropagation])
def test_a_resumed_run_draws_what_the_uninterrupted_one_does(estimate: Callable[..., Estimate]) -> None:
    def train(model: nn.Module, optimizer: KFACOptimizer, seeds: range) -> None:
        for seed in seeds:
            optimizer.zero_grad()
            F.cross_entropy(model(normal(6, 3, seed=seed)), torch.arange(6) % 4).backward()
            optimizer.step()

    model = linear()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=estimate(nn.CrossEntropyLoss()), factor_update_period=2)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    resumed = KFACOptimizer(twin, lr=0.1, estimate=estimate(nn.CrossEntropyLoss()), factor_update_period=2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    together, copied = copy.deepcopy((model, optimizer))
    for m, each in ((model, optimizer), (twin, resumed), (together, copied)):
        train(m, each, range(3, 6))
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_identical(clones(model.parameters()), clones(together.parameters()))


def test_the_seed_chooses_the_draws() -> None:
    drawn = [
        measured(linear(), normal(6, 3), LOSSES["squares"], MonteCarlo(nn.MSELoss(), seed=seed)).factors()[""][1]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_each_worker_has_draws_of_its_own() -> None:
    """Their examples are others, and so should be the noise, which their mean makes small."""
    drawn = []
    for worker in (0, 0, 1, 2):
        model = linear()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=MonteCarlo(nn.MSELoss()))
        output = model(normal(6, 3))
        optimizer._window.source = worker  # as several processes have it set by each forward
        F.mse_loss(output, normal(6, 4, seed=2)).backward()
        optimizer.step()
        drawn.append(optimizer.factors()[""][1])
    assert torch.equal(drawn[0], drawn[1])
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn[1:], 2))


def test_a_bad_seed_is_refused_with_the_estimate_that_it_is_of() -> None:
    with pytest.raises(ValueError, match="seed of MonteCarlo must be at least 0, got -1"):
        MonteCarlo(nn.MSELoss(), seed=-1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        mean, raw = self.heads(torch.tanh(self.body(x))).chunk(2, dim=-1)
        return {"ids": torch.arange(len(x)), "mean": mean, "variance": F.softplus(raw) + 0.1}


def test_means_and_variances_are_found_in_what_the_model_returns() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    twin = copy.deepcopy(model)
    criterion, x, y = nn.GaussianNLLLoss(), normal(5, 3), normal(5, 2, seed=4)
    found = []
    for m, outputs in ((model, None), (twin, lambda o: (o["mean"], o["variance"]))):
        optimizer = KFACOptimizer(m, lr=0.0, estimate=ExactGGN(criterion, outputs=outputs))
        output = m(x)
        criterion(output["mean"], y, output["variance"]).backward()
        optimizer.step()
        found.append(optimizer.factors())
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert_identical(*found)


@dataclass
class Answer:
    mean: Tensor
    rest: Tensor


class AnswerAndRest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x), x)


def test_what_the_loss_reads_is_found_in_a_dataclass() -> None:
    """As by the empirical estimate; a named loss alone needs the tensor itself."""
    found = []
    for outputs in (None, lambda answer: answer.mean):
        model = AnswerAndRest()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(nn.MSELoss(), outputs=outputs))
        F.mse_loss(model(normal(6, 3)).mean, normal(6, 4)).backward()
        optimizer.step()
        found.append(optimizer.factors()["layer"])
    assert_identical(*found)


def test_more_tensors_than_the_loss_reads_are_refused_in_the_forward() -> None:
    model, criterion = TwoHeads().double(), nn.MSELoss()
    refusing = KFACOptimizer(model, estimate=ExactGGN(criterion, outputs=lambda o: (o["mean"], o["variance"])))
    with pytest.raises(ValueError, match=r"returned 2 tensors, where MSELoss\(\) reads 1\. .* leave outputs out"):
        model(normal(6, 3))
    refusing.remove_hooks()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion))
    output = model(normal(6, 3))
    (criterion(output["mean"], normal(6, 2)) + criterion(output["variance"], normal(6, 2))).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_under_a_grad_scaler_the_factors_are_those_without() -> None:
    model, twin, x = linear(), linear(), normal(6, 3)
    optimizer, reference = (
        KFACOptimizer(m, lr=0.1, estimate=MonteCarlo(nn.MSELoss()), factor_update_period=1) for m in (model, twin)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale(F.mse_loss(model(x), normal(6, 4, seed=2))).backward()
        scaler.step(optimizer)
        scaler.update()
        F.mse_loss(twin(x), normal(6, 4, seed=2)).backward()
        reference.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_tokens_are_counted_one_by_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5)).double()
    twin, ids = copy.deepcopy(model), torch.randint(7, (3, 4))
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(nn.CrossEntropyLoss(), class_dim=-1))
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 5).backward()
    optimizer.step()
    # As a batch of tokens, which do not interact in this model.
    reference = KFACOptimizer(twin, lr=0.0, estimate=ExactGGN(nn.CrossEntropyLoss()))
    F.cross_entropy(twin(ids.flatten()), ids.flatten() % 5).backward()
    reference.step()
    torch.testing.assert_close(optimizer.factors()["1"], reference.factors()["1"])


def test_a_model_whose_output_is_not_to_be_found_takes_the_plain_step_and_says_so() -> None:
    class OnlyLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    model = OnlyLoss()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(nn.MSELoss()), loss_terms=LossTerms.EXAMPLES)
    model(normal(6, 3)).backward()
    with pytest.warns(UserWarning, match="1 layer has gradients but no statistics"):
        optimizer.step()


def test_stated_terms_that_cannot_be_true_do_not_spoil_the_averages() -> None:
    model, x = linear(), normal(6, 3)
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(nn.MSELoss()), factor_update_period=1)
    before = None
    for terms in (6.0, torch.tensor(math.nan), torch.tensor(-1.0)):
        optimizer.zero_grad()
        optimizer.set_loss_terms(terms)
        model(x).square().mean().backward()
        optimizer.step()
        before = before or optimizer.factors()
    assert_identical(optimizer.factors(), before)
    assert optimizer.metrics()["refused_statistics"] == 2


class Pooled(nn.Module):
    """A deep linear network over positions, whose output is the mean over them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean(1)


@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_the_exact_factors_of_a_deep_linear_network_are_its_blocks_each_sharing_in_its_own_setting(
    sharing: WeightSharing,
) -> None:
    """Expand where each position has a term of the loss, reduce where the output is a mean over positions."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    model = Pooled(body) if sharing is WeightSharing.REDUCE else body
    x = normal(5, 4, 3)
    loss = LOSSES["squares"]
    optimizer = measured(model, x, loss, ExactGGN(loss[0]), weight_sharing=sharing)
    dense, start = dense_ggn(model, x, loss), 0
    prefix = "body." if sharing is WeightSharing.REDUCE else ""
    for name, layer in body.named_children():
        size = sum(param.numel() for param in layer.parameters())
        block = dense[start : start + size, start : start + size]
        torch.testing.assert_close(dense_kfac(optimizer, prefix + name), block, rtol=1e-9, atol=1e-12)
        start += size


def test_expand_is_not_exact_where_the_output_is_a_mean_over_positions() -> None:
    torch.manual_seed(0)
    model = Pooled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    x, loss = normal(5, 4, 3), LOSSES["squares"]
    optimizer = measured(model, x, loss, ExactGGN(loss[0]), weight_sharing=WeightSharing.EXPAND)
    assert not torch.allclose(dense_kfac(optimizer, "body.0"), dense_ggn(model, x, loss)[:16, :16], rtol=1e-3)


class Running(nn.Module):
    """Each position's output sees the positions before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output.cumsum(1)


@pytest.mark.parametrize("sharing", list(WeightSharing))
def test_the_inputs_of_the_exact_estimate_are_those_of_all_positions_with_a_loss(sharing: WeightSharing) -> None:
    """Though each of its passes comes to some of them alone."""
    x = normal(5, 4, 3)
    used = torch.tensor([True, True, False, False])  # targets of the last two are ignored
    model = Running()
    optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(nn.MSELoss()), weight_sharing=sharing)
    model(x)[:, used].square().mean().backward()
    optimizer.step()
    rows = F.pad(x[:, used], (0, 1), value=1.0)
    rows = rows.mean(1) if sharing is WeightSharing.REDUCE else rows.flatten(0, 1)
    a, _ = optimizer.factors()["body"]
    torch.testing.assert_close(a, (rows.mT @ rows / len(rows))[None])


def test_what_the_loss_reads_is_looked_for_on_steps_with_statistics_alone() -> None:
    taken, asked = [], []

    def outputs(output: Tensor) -> Tensor:
        asked.append(len(taken))
        return output

    model, criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()
    optimizer = KFACOptimizer(model, estimate=MonteCarlo(criterion, outputs=outputs), factor_update_period=2)
    for step in range(4):
        criterion(model(torch.randn(5, 3)), torch.arange(5) % 4).backward()
        optimizer.step()
        taken.append(step)
    assert asked == [0, 2]


@pytest.mark.parametrize("estimate", [MonteCarlo, CurvaturePropagation])
def test_forwards_without_a_backward_draw_nothing(estimate: type[NamedLoss]) -> None:
    factors = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 4).double()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=estimate(nn.CrossEntropyLoss()), factor_update_period=1)
        x = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 10
        for _ in range(2):
            for part in x.split(3):
                if evaluates:
                    model(x)
                F.cross_entropy(model(part), torch.arange(len(part))).backward()
            optimizer.step()
        factors.append(optimizer.factors()[""][1])
    torch.testing.assert_close(*factors, rtol=0, atol=0)
