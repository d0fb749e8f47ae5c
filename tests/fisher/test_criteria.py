"""The criterion that an estimate names, where the loop calls it; covers fisher/criteria.py and criterion_term.py."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from helpers.plain import batch, clones, mlp
from torch import Tensor, distributions, nn
from torch.func import functional_call, hessian

from kfac_optim import Cholesky, ExactGGN, KFACOptimizer, LossTerms, MonteCarlo, TrustRegion
from kfac_optim.fisher.criterion_term import CriterionTerm
from kfac_optim.fisher.likelihoods import Categorical

# torch's own, of torch.jit, at the first forward-mode derivative of a process
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

Loss = Callable[[nn.Module, nn.Module], Tensor]


def curvature(model: nn.Module, criterion: nn.Module, loss: Loss) -> Tensor:
    """The Gauss-Newton matrix of the last layer's weight and bias, of a loss that is a function of its output only."""
    features = model[:-1]
    bare = copy.deepcopy(model)

    def of_outputs(params: dict[str, Tensor]) -> Tensor:
        class Functional(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return functional_call(bare[-1], params, (features(x),))

        return loss(Functional(), criterion)

    # The last layer is linear in its parameters: the Hessian of a convex loss of it is the Gauss-Newton matrix.
    params = {name: param.detach() for name, param in bare[-1].named_parameters()}
    blocks = hessian(of_outputs)(params)
    rows = []
    for left in ("weight", "bias"):
        size = params[left].numel()
        rows.append(torch.cat([blocks[left][right].reshape(size, -1) for right in ("weight", "bias")], 1))
    return torch.cat(rows)


def measured(loss: Loss, criterion: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    """`Σ a aᵀ ⊗ g gᵀ` of the last layer in expectation: for one example it is `A ⊗ G` exactly."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    loss(model, criterion).backward()
    optimizer.step()
    a, g = optimizer.factors()["2"]
    assert a is not None
    assert g is not None
    return model, a[0], g[0]


EXAMPLE = batch(size=1)


def one(model: nn.Module) -> Tensor:
    return model(EXAMPLE)


TARGET = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
LOSSES: dict[str, tuple[nn.Module, Loss]] = {
    "weighted twice": (nn.MSELoss(), lambda m, c: 3 * c(one(m), TARGET) + c(one(m).exp(), TARGET) * 0),
    "head outside": (nn.MSELoss(), lambda m, c: 0.5 * c(one(m) @ torch.ones(3, 2, dtype=torch.float64), TARGET[:, :2])),
    "masked": (nn.MSELoss(), lambda m, c: c(one(m)[:, :2], TARGET[:, :2])),
    "one number": (nn.MSELoss(), lambda m, c: c(one(m).sum(1), TARGET[:, 0])),
    "summed": (nn.MSELoss(reduction="sum"), lambda m, c: c(one(m), TARGET) / 7),
    "sum over several targets": (
        nn.MSELoss(reduction="sum"),
        lambda m, c: c(one(m), TARGET * torch.arange(4).view(4, 1, 1)) / 7,
    ),
    "bits": (nn.BCEWithLogitsLoss(), lambda m, c: c(one(m) * 2, TARGET.sigmoid())),
    "classes": (nn.CrossEntropyLoss(), lambda m, c: c(one(m), torch.tensor([1])) * 4),
    "classes of one example without a batch": (nn.CrossEntropyLoss(), lambda m, c: c(one(m)[0], torch.tensor(1))),
    "probabilities of classes": (nn.CrossEntropyLoss(), lambda m, c: c(one(m), TARGET.softmax(1))),
    "classes by tokens": (
        nn.CrossEntropyLoss(ignore_index=-1),
        lambda m, c: c(torch.stack([one(m), 2 * one(m), one(m)], 2), torch.tensor([[2, 0, -1]])),
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's own
@pytest.mark.parametrize("name", LOSSES)
def test_the_curvature_is_that_of_the_loss_as_it_is_written(name: str) -> None:
    criterion, loss = LOSSES[name]
    model, a, g = measured(loss, criterion)
    found = torch.kron(g, a)
    expected = curvature(model, criterion, loss)
    # Put the bias behind each row of the weight, as the block's matrix has it.
    rows = torch.cat([torch.arange(15).reshape(3, 5), torch.arange(15, 18).reshape(3, 1)], 1).flatten()
    assert_same(found, expected[rows][:, rows], rtol=1e-9)


def test_accumulation_loss_scales_and_several_calls_add_up() -> None:
    criterion = nn.MSELoss()
    x, y = batch(size=6), batch(seed=3, size=6)[:, :3]

    def train(parts: int, **options: Any) -> tuple[Tensor, Tensor]:
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion), **options)
        for some, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (criterion(model(some), wanted) / parts).backward()
        optimizer.step()
        a, g = optimizer.factors()["2"]
        assert a is not None
        assert g is not None
        return a, g

    assert_same(train(3), train(1))
    # By the model's output alone, as where the loop calls another object, it is the same for such a loss.
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(nn.MSELoss()))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert_same(train(1), optimizer.factors()["2"])


def test_terms_that_are_stated_leave_what_the_criterion_itself_weighs_them_by() -> None:
    def factors(stated: int | None) -> Any:
        criterion, model, x = nn.MSELoss(), mlp(), batch()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion))
        if stated is not None:
            optimizer.set_loss_terms(stated)
        criterion(model(x), x[:, :3]).backward()
        optimizer.step()
        return optimizer.factors()["2"]

    assert_same(factors(8), factors(None))


def test_a_factor_on_a_loss_that_another_object_computes_is_stated_by_its_terms() -> None:
    def factors(loss: nn.Module, criterion: nn.Module, stated: float | None) -> Any:
        model, x = mlp(), batch()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
        if stated is not None:
            optimizer.set_loss_terms(stated)
        (10 * loss(model(x), x[:, :3])).backward()
        optimizer.step()
        return optimizer.factors()["2"]

    criterion = nn.MSELoss()
    assert_same(factors(nn.MSELoss(), criterion, 8 * 3 / 10), factors(criterion, criterion, None))


def test_ignored_targets_count_nowhere_where_another_term_reads_the_same_logits() -> None:
    def factors(weight: float) -> Any:
        criterion, model = nn.CrossEntropyLoss(), mlp()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
        logits = model(batch())
        classes = torch.tensor([0, 1, -100, -100, -100, -100, 2, -100])
        (criterion(logits, classes) + weight * logits.logsumexp(1).square().mean()).backward()
        optimizer.step()
        return optimizer.factors()["2"][1]

    assert_same(factors(1e-12), factors(0.0))


def test_a_criterion_that_is_only_logged_changes_nothing() -> None:
    def factors(logs: bool) -> Any:
        criterion, model, x = nn.MSELoss(), mlp(), batch()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(criterion))
        output = model(x)
        if logs:
            criterion(output, x[:, :3])
            with torch.no_grad():
                criterion(model(x), x[:, :3])
        F.mse_loss(output, x[:, :3]).backward()
        optimizer.step()
        return optimizer.factors()["2"]

    assert_same(factors(True), factors(False))


def test_a_head_outside_of_a_model_whose_features_have_positions_needs_some_class_dim() -> None:
    criterion, model, x = nn.CrossEntropyLoss(), mlp(), batch(size=6).view(2, 3, 4)
    features = model[:-1]
    optimizer = KFACOptimizer(features, lr=0.0, estimate=ExactGGN(criterion))
    with pytest.raises(ValueError, match=r"either will do where the loop calls the criterion.*a head outside"):
        criterion(model[-1](features(x).mean(1)), torch.tensor([0, 2]))
    found = []
    for class_dim in (-1, 1):
        optimizer = KFACOptimizer(features, lr=0.0, estimate=ExactGGN(criterion, class_dim=class_dim))
        criterion(model[-1](features(x).mean(1)), torch.tensor([0, 2])).backward()
        optimizer.step()
        found.append(optimizer.factors()["0"])
    assert_same(*found)


def test_a_loss_of_which_the_criterion_computes_a_part_is_warned_of_once() -> None:
    criterion, model, x = nn.MSELoss(), mlp(), batch()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion))
    (criterion(model(x), x[:, :3]) + F.mse_loss(model(2 * x), x[:, :3])).backward()
    with pytest.warns(UserWarning, match="uses others without it.*LevenbergMarquardt leave them out"):
        optimizer.step()
    optimizer.zero_grad()
    (criterion(model(x), x[:, :3]) + F.mse_loss(model(2 * x), x[:, :3])).backward()
    optimizer.step()


@pytest.mark.parametrize("reversed_order", [False, True])
def test_a_target_that_depends_on_the_model_is_warned_of_when_a_backward_comes(reversed_order: bool) -> None:
    model, criterion = mlp(), nn.MSELoss()
    optimizer = KFACOptimizer(model, estimate=ExactGGN(criterion), step_size=TrustRegion())

    def loss() -> Tensor:
        one, other = model(batch()), model(batch(1))
        compared: Tensor = criterion(one.detach() if reversed_order else one, other)
        return compared

    loss()  # only logged
    with pytest.warns(UserWarning, match="a target that depends on what is trained"):
        loss().backward()
    loss().backward()  # said once
    optimizer.zero_grad()
    one = model(batch())
    criterion(one - model(batch(1)), torch.zeros_like(one)).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_one_criterion_serves_two_optimizers() -> None:
    """As in a GAN: each measures its own model, by what the criterion reads."""
    criterion, x = nn.BCEWithLogitsLoss(), batch()
    first, second = mlp(sizes=(4, 4)), mlp(seed=1, sizes=(4, 1))
    ours = [KFACOptimizer(each, lr=0.0, estimate=ExactGGN(criterion)) for each in (first, second)]
    criterion(second(first(x)), torch.ones(8, 1, dtype=torch.float64)).backward()
    for optimizer in ours:
        optimizer.step()
    logits = second(first(x))
    p = logits.sigmoid()
    grads = (p * (1 - p)).sqrt() @ second[0].weight / 8**0.5
    assert_same(ours[0].factors()["0"][1], (grads.T @ grads)[None])


def test_what_is_observed_is_a_term_like_any_other() -> None:
    criterion, model = nn.MSELoss(), mlp()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    x = batch(size=1)
    policy = distributions.Categorical(logits=model(x))
    optimizer.observe(policy, weight=2.0)
    (-2.0 * policy.log_prob(torch.tensor([1])) * 17).sum().backward()  # an advantage has no part in the Fisher matrix
    optimizer.step()
    p = model(x).softmax(1)[0].detach()
    assert_same(optimizer.factors()["2"][1], 2 * (p.diag() - torch.outer(p, p))[None])

    for scale, expected in ((torch.tensor(0.5, dtype=torch.float64), 4.0), (None, 1 / 0.7**2)):
        model = mlp()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
        output = model(x)
        spread = scale if scale is not None else torch.full_like(output, 0.7).requires_grad_() * 1
        normal = distributions.Normal(output, spread)
        if scale is None:
            with pytest.raises(ValueError, match="no result of a forward"):
                optimizer.observe(distributions.Normal(output.detach(), spread.detach().requires_grad_()))
        optimizer.observe(normal)
        normal.log_prob(torch.zeros_like(output)).mean().backward()
        optimizer.step()
        assert_same(optimizer.factors()["2"][1], expected / 3 * torch.eye(3, dtype=torch.float64)[None])
    with pytest.raises(TypeError, match=r"observe\(\) takes a tensor"):
        optimizer.observe(distributions.Poisson(model(x).exp()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="estimates that name the loss"):
        KFACOptimizer(mlp()).observe(model(x))


@pytest.mark.parametrize("is_named", [True, False])
def test_what_is_observed_and_no_part_of_the_loss_is_told_and_the_output_counts(is_named: bool) -> None:
    """The criterion reads three outputs; a square of the fourth is computed again, not from what is observed."""
    criterion, model = nn.MSELoss(), mlp(sizes=(4, 5, 4))
    other = criterion if is_named else nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    output = model(EXAMPLE)
    optimizer.observe(output[:, 3] - 1)
    (other(output[:, :3], torch.zeros(1, 3)) + (output[:, 3] - 1).square().mean()).backward()
    with pytest.warns(UserWarning, match="a tensor that backward did not come to"):
        optimizer.step()
    g = optimizer.factors()["2"][1]
    expected = [2 / 3, 2 / 3, 2 / 3, 0.0] if is_named else [0.5] * 4
    assert_same(g, torch.tensor(expected, dtype=torch.float64).diag()[None])


def test_the_output_itself_is_observed_once() -> None:
    """Also by the hook on the output of the model, which was there before."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(nn.MSELoss()))
    output = model(EXAMPLE)
    optimizer.observe(output, weight=3.0)
    (3 * output.square().mean()).backward()
    optimizer.step()
    assert_same(optimizer.factors()["2"][1], 2 * torch.eye(3, dtype=torch.float64)[None])


def observed(of: Callable[[Tensor], distributions.Distribution]) -> tuple[Tensor, Tensor]:
    """`G` of the last layer where a distribution of one example is observed, and what the model returned."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(nn.MSELoss()))
    output = model(EXAMPLE)
    distribution = of(output)
    optimizer.observe(distribution)
    distribution.log_prob(torch.ones_like(output)).mean().backward()
    optimizer.step()
    g = optimizer.factors()["2"][1]
    assert g is not None
    return g[0], output.detach()[0]


def test_bits_and_independent_numbers_are_observed() -> None:
    g, output = observed(lambda output: distributions.Bernoulli(logits=output))
    assert_same(g, (output.sigmoid() * (1 - output.sigmoid())).diag() / 3)
    g, _ = observed(lambda output: distributions.Independent(distributions.Normal(output, 0.5), 1))
    assert_same(g, 4 * torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"several scales.*\(mean - target\) / scale of the loss, with half"):
        observed(lambda output: distributions.Normal(output, torch.tensor([1.0, 2.0, 3.0])))


class MeanAndLogVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log = (mlp(seed=seed, sizes=(4, 3))[0] for seed in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.log(x)


OneOfTwo = Callable[[KFACOptimizer, nn.Module, Tensor, Tensor], Tensor]
GIVEN: dict[str, tuple[str, OneOfTwo]] = {
    "variance": ("mean", lambda _, c, mean, log: c(mean, TARGET, log.exp().detach())),
    "one variance": ("mean", lambda _, c, mean, __: c(mean, TARGET, 0.25)),
    "a variance for each row": ("mean", lambda _, c, mean, __: c(mean, TARGET, torch.tensor([0.25]))),
    "a variance that is trained": ("mean", lambda _, c, mean, __: c(mean, TARGET, nn.Parameter(torch.tensor([0.25])))),
    "mean": ("log", lambda _, c, mean, log: c(mean.detach(), TARGET, log.exp())),
    "mean that is observed": ("log", lambda o, _, mean, log: observed_loss(o, mean.detach(), (log / 2).exp())),
}


def observed_loss(optimizer: KFACOptimizer, mean: Tensor, scale: Tensor) -> Tensor:
    distribution = distributions.Normal(mean, scale)
    optimizer.observe(distribution)
    return -distribution.log_prob(TARGET).mean()


@pytest.mark.parametrize("what", GIVEN)
def test_of_a_mean_and_a_variance_one_may_be_given(what: str) -> None:
    """The model returns the logarithm of a variance, which the curvature must not be taken at as if it were one."""
    trained, loss = GIVEN[what]
    criterion, model = nn.GaussianNLLLoss(), MeanAndLogVariance()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    mean, log = model(EXAMPLE)
    loss(optimizer, criterion, mean, log).backward()
    optimizer.step()
    variance = log.detach().exp()[0] if what == "variance" else torch.full((3,), 0.25, dtype=torch.float64)
    expected = 1 / variance if trained == "mean" else torch.full_like(variance, 0.5)
    assert_same(optimizer.factors()[trained][1], expected.diag()[None] / 3)


def test_a_criterion_of_two_outputs_is_read_by_the_output_as_that_of_a_function_is() -> None:
    def factors(loss: nn.Module, estimate: nn.Module) -> Any:
        model, x = mlp(), batch()
        optimizer = KFACOptimizer(model, lr=0.0, estimate=ExactGGN(estimate))
        output = model(x)
        loss(output, output.roll(1, 0) * 2).backward()
        optimizer.step()
        return optimizer.factors()["2"]

    criterion = nn.MSELoss()
    with pytest.warns(UserWarning, match="it counts as if the target were given"):
        named = factors(criterion, criterion)
    assert_same(named, factors(nn.MSELoss(), criterion))


def test_hooks_of_dropped_optimizers_leave_the_criterion() -> None:
    criterion, model = nn.MSELoss(), mlp()
    for _ in range(3):
        optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(criterion), loss_terms=LossTerms.ELEMENTS)
        criterion(model(batch()), batch()[:, :3]).backward()
        optimizer.step()
        del optimizer
    assert len(criterion._forward_hooks) == 0


def test_a_copy_of_model_and_optimizer_measures_by_the_copied_criterion() -> None:
    criterion, model = nn.MSELoss(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=ExactGGN(criterion))
    twin, other, theirs = copy.deepcopy((model, optimizer, criterion))
    for each, its, of in ((model, optimizer, criterion), (twin, other, theirs)):
        for _ in range(3):
            its.zero_grad()
            (3 * of(each(batch()), batch()[:, :3])).backward()
            its.step()
    assert_same(clones(model.parameters()), clones(twin.parameters()), rtol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 2.0**17])
def test_a_loss_scale_that_float16_does_not_hold_weighs_a_term(scale: float) -> None:
    """It stands in the gradient of the loss, which is float32 under autocast, and the logits are float16."""
    term = CriterionTerm(Categorical(mean=True), 0, 2, (torch.randn(2, 3).half(),), torch.tensor(70_000))
    term.factor = torch.tensor(scale)
    weighed = term.weighed(torch.ones(2, 3, dtype=torch.float16))
    assert weighed.dtype == torch.float16
    assert_same(weighed.float(), torch.full((2, 3), (scale / 70_000) ** 0.5, dtype=torch.float32), rtol=1e-3)
