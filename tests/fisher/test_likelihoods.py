"""Losses as likelihoods: their Hessian and Fisher against autograd, their samples against both."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import ExactGGN
from kfac_optim.fisher.likelihoods import GaussianWithScale, Likelihood
from kfac_optim.fisher.named_losses import likelihood_of

Outputs = tuple[Tensor, ...]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(7), dtype=torch.float64)


def nll_hessian(outputs: Outputs, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Of the sum of all terms, at the flattened outputs."""
    return torch.autograd.functional.hessian(loss, torch.cat([output.flatten() for output in outputs]))


def cross_entropy(shape: tuple[int, ...], class_dim: int) -> Callable[[Tensor], Tensor]:
    moved = torch.empty(shape).movedim(class_dim, 1 if len(shape) > 1 else 0)
    target = torch.zeros(moved.shape[:1] + moved.shape[2:] if len(shape) > 1 else (), dtype=torch.long)

    def loss(flat: Tensor) -> Tensor:
        logits = flat.view(shape).movedim(class_dim, 1) if len(shape) > 1 else flat
        return F.cross_entropy(logits, target, reduction="sum")

    return loss


def gaussian_fisher(outputs: Outputs) -> Tensor:
    """Of means and variances, which no Hessian at one target is: known in closed form."""
    variance = outputs[1].flatten()
    return torch.cat([1 / variance, 1 / (2 * variance.square())]).diag()


def gaussian_fisher_of_scales(outputs: Outputs) -> Tensor:
    variance = outputs[1].flatten().square()
    return torch.cat([1 / variance, 2 / variance]).diag()


# name: (criterion, arguments, outputs, the matrix H of all terms together)
CASES: dict[str, tuple[nn.Module | Likelihood, dict[str, Any], Outputs, Callable[[Outputs], Tensor]]] = {
    "classes": (
        nn.CrossEntropyLoss(),
        {},
        (normal(3, 4),),
        lambda o: nll_hessian(o, cross_entropy((3, 4), 1)),
    ),
    "one example": (nn.CrossEntropyLoss(), {}, (normal(4),), lambda o: nll_hessian(o, cross_entropy((4,), 0))),
    "tokens": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        {"class_dim": -1},
        (normal(2, 3, 4),),
        lambda o: nll_hessian(o, cross_entropy((2, 3, 4), 2)),
    ),
    "pixels": (
        nn.CrossEntropyLoss(ignore_index=3),
        {"class_dim": 1},
        (normal(2, 3, 2, 2),),
        lambda o: nll_hessian(o, cross_entropy((2, 3, 2, 2), 1)),
    ),
    "bits": (
        nn.BCEWithLogitsLoss(),
        {},
        (normal(3, 4),),
        lambda o: nll_hessian(o, lambda f: F.binary_cross_entropy_with_logits(f, torch.ones_like(f), reduction="sum")),
    ),
    "squares": (
        nn.MSELoss(),
        {},
        (normal(3, 2, 2),),
        lambda o: nll_hessian(o, lambda f: F.mse_loss(f, torch.ones_like(f), reduction="sum")),
    ),
    "means and variances": (
        nn.GaussianNLLLoss(),
        {},
        (normal(2, 3), normal(2, 3).exp()),
        gaussian_fisher,
    ),
    "variances with a bound": (
        nn.GaussianNLLLoss(eps=1.0),
        {},
        (normal(2, 3), normal(2, 3).exp()),
        lambda o: gaussian_fisher((o[0], o[1].clamp(min=1.0))),
    ),
    "means and scales": (
        GaussianWithScale(mean=True),
        {},
        (normal(2, 3), normal(2, 3).exp()),
        gaussian_fisher_of_scales,
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def flat(gradients: tuple[Tensor | None, ...], like: Outputs) -> Tensor:
    parts = [torch.zeros_like(o) if g is None else g for g, o in zip(gradients, like, strict=True)]
    return torch.cat([part.flatten() for part in parts])


def by_examples(likelihood: Likelihood, outputs: Outputs) -> Tensor:
    """`Σ b bᵀ` over the columns, within each example; all examples of a column share it without interacting."""
    batch = outputs[0].shape[0] if outputs[0].dim() > 1 else 1
    of_example = torch.cat([torch.arange(batch).repeat_interleave(o.numel() // batch) for o in outputs])
    same = of_example[:, None] == of_example[None, :]
    columns = [flat(column, outputs) for column in likelihood.columns(outputs)]
    return torch.stack([torch.outer(column, column) * same for column in columns]).sum(0)


@cases
def test_columns_add_up_to_the_hessian(case: Any) -> None:
    criterion, options, outputs, hessian = case
    torch.testing.assert_close(by_examples(likelihood_of(criterion, **options), outputs), hessian(outputs))


@cases
def test_columns_times_what_is_solved_for_are_the_gradient_at_each_output(case: Any) -> None:
    criterion, options, outputs, _ = case
    likelihood = likelihood_of(criterion, **options)
    for place, gradient in enumerate(likelihood.sample(outputs, seeded(1))):
        solved = likelihood.solved(outputs, place, gradient)
        found = [torch.zeros_like(output) for output in outputs]
        for column, s in zip(likelihood.columns(outputs), solved.T, strict=True):
            for into, part in zip(found, column, strict=True):
                if part is not None:
                    into += part * s.view(-1, *[1] * (part.dim() - 1))
        expected = [gradient if here == place else torch.zeros_like(each) for here, each in enumerate(outputs)]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["sample", "propagate"])
@cases
def test_random_gradients_have_the_hessian_for_their_second_moment(case: Any, way: str) -> None:
    """Within seven standard errors at every element; rare events make their estimate too small now and then."""
    criterion, options, outputs, hessian = case
    likelihood, generator = likelihood_of(criterion, **options), seeded(1)
    draws = 8000
    vectors = torch.stack([flat(getattr(likelihood, way)(outputs, generator), outputs) for _ in range(draws)])
    products = vectors[:, :, None] * vectors[:, None, :]
    error = products.std(0) / math.sqrt(draws)
    expected = hessian(outputs)
    assert (vectors.mean(0).abs() <= 7 * vectors.std(0) / math.sqrt(draws)).all()
    assert ((products.mean(0) - expected).abs() <= 7 * error + 1e-12).all()


@pytest.mark.parametrize("way", ["sample", "propagate"])
@cases
def test_random_gradients_follow_their_generator_and_no_other(case: Any, way: str) -> None:
    criterion, options, outputs, _ = case
    likelihood = likelihood_of(criterion, **options)
    state = torch.get_rng_state()
    first, again, other = (flat(getattr(likelihood, way)(outputs, seeded(seed)), outputs) for seed in (3, 3, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@cases
def test_terms_are_those_of_the_mean(case: Any) -> None:
    criterion, options, outputs, _ = case
    expected = {"classes": 3, "one example": 1, "tokens": 6, "pixels": 8, "bits": 12, "squares": 12}
    name = next(name for name, each in CASES.items() if each is case)
    assert likelihood_of(criterion, **options).terms(outputs) == expected.get(name, 6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_reduction_says_whether_terms_are_averaged(reduction: str) -> None:
    assert likelihood_of(nn.MSELoss(reduction=reduction)).mean is (reduction == "mean")


def test_ignored_targets_are_seen_by_their_gradient() -> None:
    logits = normal(4, 3).requires_grad_()
    nn.CrossEntropyLoss()(logits, torch.tensor([0, -100, 2, -100])).backward()
    assert logits.grad is not None
    used = likelihood_of(nn.CrossEntropyLoss()).used(logits.grad)
    assert used.flatten().tolist() == [True, False, True, False]


@cases
def test_outputs_that_are_not_numbers_raise_nothing(case: Any) -> None:
    """The step is one to be skipped."""
    criterion, options, outputs, _ = case
    outputs = tuple(output.clone() for output in outputs)
    for output in outputs:
        output.view(-1)[0] = torch.nan
    likelihood_of(criterion, **options).sample(outputs, seeded())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@cases
def test_gradients_have_the_dtype_of_the_outputs(case: Any, dtype: torch.dtype) -> None:
    criterion, options, outputs, _ = case
    likelihood, narrow = likelihood_of(criterion, **options), tuple(output.to(dtype) for output in outputs)
    columns = next(iter(likelihood.columns(narrow)))
    for gradients in (likelihood.sample(narrow, seeded()), likelihood.propagate(narrow, seeded()), columns):
        for gradient, output in zip(gradients, outputs, strict=True):
            assert gradient is None or (gradient.dtype, gradient.shape) == (dtype, output.shape)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: likelihood_of(nn.L1Loss()), TypeError, r"must be one of CrossEntropyLoss, .*got L1Loss"),
        (lambda: likelihood_of(F.cross_entropy), TypeError, r"must be one of .*Empirical"),
        (
            lambda: likelihood_of(nn.MSELoss(reduction="none")),
            ValueError,
            r"MSELoss\(reduction='none'\) does not say how",
        ),
        (
            lambda: likelihood_of(nn.CrossEntropyLoss(weight=torch.ones(3))),
            ValueError,
            r"CrossEntropyLoss\(weight=\.\.\.\) weighs terms",
        ),
        (
            lambda: likelihood_of(nn.BCEWithLogitsLoss(pos_weight=torch.ones(3))),
            ValueError,
            r"BCEWithLogitsLoss\(pos_weight=\.\.\.\)",
        ),
        (lambda: likelihood_of(nn.MSELoss(), class_dim=1), ValueError, r"class_dim=1 was given for MSELoss"),
        (
            lambda: likelihood_of(nn.CrossEntropyLoss()).terms((normal(2, 3, 4),)),
            ValueError,
            r"output is \[2, 3, 4\].*class_dim=-1",
        ),
        (
            lambda: likelihood_of(nn.CrossEntropyLoss(), class_dim=2).terms((normal(2, 3),)),
            ValueError,
            r"has class_dim=2, and the output that it reads is \[2, 3\]",
        ),
        (
            lambda: ExactGGN(nn.CrossEntropyLoss(), class_dim="last"),  # type: ignore[arg-type]
            TypeError,
            r"class_dim of ExactGGN must be an integer, got 'last'",
        ),
        (
            lambda: ExactGGN(nn.CrossEntropyLoss(), outputs=3),  # type: ignore[arg-type]
            TypeError,
            r"outputs of ExactGGN must be a function of what the model returns, got 3",
        ),
        (
            lambda: ExactGGN(nn.CrossEntropyLoss(), outputs=lambda out: {"a": out}).outputs_of(1),  # type: ignore[arg-type,return-value]
            TypeError,
            r"outputs of ExactGGN must return a tensor, or a tuple of them, and returned \{'a'",
        ),
        (
            lambda: likelihood_of(nn.GaussianNLLLoss()).sample((normal(2, 3), normal(2, 1).exp()), seeded()),
            ValueError,
            r"a variance for each mean, got \[2, 1\] for \[2, 3\].*var.unsqueeze\(-1\).expand_as\(input\) where",
        ),
    ],
)
def test_what_the_fisher_cannot_honour_is_refused(
    build: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build()


@cases
def test_the_hessian_times_a_vector_is_that_of_the_columns(case: Any) -> None:
    criterion, options, outputs, hessian = case
    vectors = tuple(torch.randn(o.shape, generator=seeded(4), dtype=o.dtype) for o in outputs)
    product = likelihood_of(criterion, **options).curved(outputs, vectors)
    torch.testing.assert_close(flat(product, outputs), hessian(outputs) @ flat(vectors, outputs))
