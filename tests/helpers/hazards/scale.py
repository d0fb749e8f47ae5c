"""The scale of the loss: what its mean runs over, and what is masked out, each by the definition of its Fisher."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import oracles
from helpers.hazards.base import STEPS, ByHand, Pair, Training, by_hand, hazard
from helpers.plain import batch, mlp, square_loss
from kfac_optim import KFACOptimizer, LossTerms

F64 = torch.float64
IGNORED = -100


def measured(
    model: nn.Module, loss: Callable[[], Tensor], terms: float | Tensor | None = None, **options: object
) -> Pair:
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    if terms is not None:
        optimizer.set_loss_terms(terms)
    loss().backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    return optimizer.factors()


def defined(
    model: nn.Module, x: Tensor, losses: Callable[[Tensor], Tensor], weights: Tensor | None = None, total: bool = False
) -> dict[str, tuple[Tensor, Tensor]]:
    """The Fisher of `Σ w ℓ / Σ w` for terms ℓ that each depend on one row: `G = Σ w² s sᵀ / Σ w²`, s the slope of ℓ.

    Args:
        model: of linear layers.
        x: its input, `[*, in]`.
        losses: from the output, `[*, out]`, to one loss per row, `[rows]`.
        weights: of the terms, `[rows]`; rows without any are no rows of `A`.
        total: whether the loss is the sum instead, with `G = Σ s sᵀ`.
    """
    run = ByHand(model)
    unreduced = losses(model(x)).flatten()
    squares = torch.ones_like(unreduced) if weights is None else weights.flatten().to(F64).square()
    calls = [call for layer in run.layers.values() for call in layer.calls]
    slopes = torch.autograd.grad(unreduced.sum(), [output for _, output in calls])
    factors = {}
    for name, (rows, _), slope in zip(run.layers, calls, slopes, strict=True):
        a = F.pad(rows.flatten(0, -2)[squares > 0], (0, 1), value=1.0)
        s = slope.flatten(0, -2)
        g = s.T @ (squares[:, None] * s)
        factors[name] = ((a.T @ a / len(a))[None], (g if total else g / squares.sum())[None])
    return factors


def labels(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(5))


def tokens() -> Tensor:
    return batch(3, size=24).reshape(4, 6, 4)


# -- plain means and sums ----------------------------------------------------------------------------------------


@hazard("scale", "mean", "sum", "mean of a duplicated batch", "times a constant")
def loss_over_examples(kind: str) -> Pair:
    x, y = batch(), labels(8)
    model, twin = mlp(), mlp()
    by_definition = defined(twin, x, lambda out: F.cross_entropy(out, y, reduction="none"), total=kind == "sum")
    if kind == "mean":
        return measured(model, lambda: F.cross_entropy(model(x), y)), by_definition
    if kind == "sum":
        loss = lambda: F.cross_entropy(model(x), y, reduction="sum")  # noqa: E731
        return measured(model, loss, loss_terms=LossTerms.SUM), by_definition
    if kind == "times a constant":
        ours = measured(model, lambda: 3 * F.cross_entropy(model(x), y))
        return ours, {name: (a, 9 * g) for name, (a, g) in by_definition.items()}
    twice = torch.cat([x, x])
    return measured(model, lambda: F.cross_entropy(model(twice), torch.cat([y, y]))), by_definition


@hazard("scale", "by the rule", "stated")
def mean_over_tokens(kind: str) -> Pair:
    x, y = tokens(), labels(4, 6)
    model, twin = mlp(), mlp()
    options = {"loss_terms": LossTerms.POSITIONS} if kind == "by the rule" else {"terms": 24}
    ours = measured(model, lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), **options)
    return ours, defined(twin, x, lambda out: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none"))


@hazard("scale", F.mse_loss, F.binary_cross_entropy_with_logits, F.huber_loss)
def mean_over_elements(loss: Callable[..., Tensor]) -> Pair:
    """`G = M Σ g gᵀ` with M the elements; for one output that is the mean over terms as well."""
    ours, plain = {}, {}
    for outputs in (1, 3):
        model, twin = mlp(sizes=(4, 5, outputs)), mlp(sizes=(4, 5, outputs))
        x, y = batch(), (batch(9, dim=outputs) > 0).to(F64)
        ours[outputs] = measured(model, lambda: loss(model(x), y), loss_terms=LossTerms.ELEMENTS)  # noqa: B023
        if outputs == 1:
            plain[outputs] = defined(twin, x, lambda out: loss(out, y, reduction="none"))  # noqa: B023
        else:
            run = ByHand(twin)
            run.backward(loss(twin(x), y), terms=24)
            plain[outputs] = run.fold()
    return ours, plain


# -- terms that weigh differently, or nothing --------------------------------------------------------------------


@hazard("scale", "tokens", "examples")
def ignored_targets(kind: str) -> Pair:
    x = tokens() if kind == "tokens" else batch(size=24)
    y = labels(24)
    y[::5] = y[3] = IGNORED
    kept = y != IGNORED
    model, twin = mlp(), mlp()
    ours = measured(model, lambda: F.cross_entropy(model(x).reshape(-1, 3), y), terms=int(kept.sum()))
    losses = lambda out: F.cross_entropy(out.reshape(-1, 3), y, reduction="none")  # noqa: E731
    return ours, defined(twin, x, losses, weights=kept)


CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.5], dtype=F64)


@hazard("scale", "number", "tensor", "with ignored targets")
def class_weights_stated_by_their_effective_number(kind: str) -> Pair:
    x, y = batch(size=24), labels(24)
    if kind == "with ignored targets":
        y[::5] = IGNORED
    kept = y != IGNORED
    weights = torch.where(kept, CLASS_WEIGHTS[y.clamp(min=0)], 0.0)
    terms = weights.sum().square() / weights.square().sum()
    model, twin = mlp(), mlp()
    ours = measured(
        model,
        lambda: F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS),
        terms=terms if kind == "tensor" else float(terms),
    )
    return ours, defined(twin, x, lambda out: F.cross_entropy(out, y, reduction="none"), weights=weights)


@hazard("scale")
def example_weights_stated_by_their_effective_number() -> Pair:
    x, y, weights = batch(), labels(8), batch(4, size=8, dim=1)[:, 0].abs()
    weights[2] = 0.0
    terms = float(weights.sum().square() / weights.square().sum())
    model, twin = mlp(), mlp()

    def loss() -> Tensor:
        return (weights * F.cross_entropy(model(x), y, reduction="none")).sum() / weights.sum()

    ours = measured(model, loss, terms)
    return ours, defined(twin, x, lambda out: F.cross_entropy(out, y, reduction="none"), weights=weights)


LENGTHS = [(6, 2, 4, 1), (3, 3, 6, 6), (1, 1, 1, 1), (5, 6, 2, 3)]


@hazard("scale", "zeros", "rubbish", "accumulated", "as an example that counts nothing")
def padded_sequences(padding: str) -> Pair:
    """Training on padded sequences under a mask equals training on the tokens alone."""
    run, plain = Training(mlp()), ByHand(mlp())
    for i, x in enumerate(run.steps(size=24)):
        sequences = x.reshape(4, 6, 4)
        mask = torch.arange(6) < torch.tensor(LENGTHS[i])[:, None]
        real = sequences[mask]
        padded = sequences * mask[..., None] if padding == "zeros" else sequences
        if padding == "as an example that counts nothing":
            padded, mask = torch.cat([padded, padded[:1]]), torch.cat([mask, torch.zeros(1, 6, dtype=torch.bool)])
        groups = 2 if padding == "accumulated" else 1
        for part, kept in zip(padded.chunk(groups), mask.chunk(groups), strict=True):
            run.optimizer.set_loss_terms(int(kept.sum()))
            losses = run.model(part).square().sum(-1) / 2
            ((losses * kept).sum() / mask.sum()).backward()
        plain.backward(square_loss(plain.model(real)), terms=len(real))
        plain.step()
    return run.result(), plain.result()


@hazard("scale", "indexed", "multiplied")
def examples_left_out_of_the_loss(how: str) -> Pair:
    """Semi-supervised batches, hard-example mining: some examples have no loss."""
    run, plain = Training(mlp()), ByHand(mlp())
    for i, x in enumerate(run.steps()):
        kept = torch.arange(8) % 3 != i % 3
        run.optimizer.set_loss_terms(int(kept.sum()))
        output = run.model(x)
        chosen = output[kept] if how == "indexed" else output * kept[:, None]
        (chosen.square().sum() / (2 * kept.sum())).backward()
        plain.backward(square_loss(plain.model(x[kept])), terms=int(kept.sum()))
        plain.step()
    return run.result(), plain.result()


@hazard("scale")
def masked_positions_of_a_convolution() -> Pair:
    torch.manual_seed(0)
    model = nn.Conv1d(3, 2, 3, padding=1, dtype=F64)
    x = torch.randn(4, 3, 6, dtype=F64)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    terms = int(mask.sum())

    def loss() -> Tensor:
        return (model(x).square().sum(1) * mask).sum() / (2 * terms)

    output = model(x).detach()
    patches = oracles.conv_rows(model, x)[0][mask]  # [rows, in]
    a = F.pad(patches, (0, 1), value=1.0)
    g = output.transpose(1, 2)[mask]
    return measured(model, loss, terms)[""], ((a.T @ a / terms)[None], (g.T @ g / terms)[None])


@hazard("scale")
def sum_over_examples_that_is_trained_on() -> Pair:
    """A summed loss is not averaged away: `G` is the Fisher of the sum."""
    run = Training(mlp(), loss_terms=LossTerms.SUM, kl_clip=None)
    for x in run.steps():
        (8 * square_loss(run.model(x))).backward()
    plain = ByHand(mlp(), kl_clip=None)
    for i in range(STEPS):
        plain.backward(8 * square_loss(plain.model(batch(100 + i))), terms=1)
        plain.step()
    return run.result(), plain.result()


@hazard("scale", 1, 2, 4)
def batch_repeated(times: int) -> Pair:
    """`λ` means the same at every batch size, and so do the steps."""
    run = Training(mlp())
    for x in run.steps():
        square_loss(run.model(torch.cat([x] * times))).backward()
    return run.result(), by_hand()
