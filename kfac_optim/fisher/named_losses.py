"""The likelihood behind a loss module of torch."""

from typing import Any

from torch import nn

from kfac_optim.fisher.likelihoods import Bernoulli, Categorical, Gaussian, GaussianWithVariance, Likelihood


def likelihood_of(criterion: Any, class_dim: int | None = None) -> Likelihood:
    """Return the likelihood behind a loss module of torch.

    Args:
        criterion: the loss.
        class_dim: the dimension of the logits that numbers the classes, for `nn.CrossEntropyLoss` of more than two
            dimensions.

    Raises:
        TypeError: a loss that is not known here.
        ValueError: an option of the loss that its Fisher cannot honour.
    """
    if isinstance(criterion, Likelihood):
        return criterion
    kinds = (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.GaussianNLLLoss)
    kind = next((kind for kind in kinds if type(criterion) is kind), None)
    if kind is None:
        raise TypeError(
            f"kfac_optim: the loss must be one of {', '.join(kind.__name__ for kind in kinds)}, or a Likelihood, got "
            f"{criterion!r}; with any other loss use estimate=Empirical()."
        )
    reduction = criterion.reduction
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"kfac_optim: {kind.__name__}(reduction={reduction!r}) does not say how its terms are combined. Pass "
            "the loss with reduction='mean' or 'sum', whichever your own reduction amounts to."
        )
    mean = reduction == "mean"
    for option in ("weight", "pos_weight"):
        if getattr(criterion, option, None) is not None:
            raise ValueError(
                f"kfac_optim: {kind.__name__}({option}=...) weighs terms by targets, which are not looked at; use "
                "estimate=Empirical()."
            )
    if kind is nn.CrossEntropyLoss:  # label smoothing moves the targets, not the curvature
        return Categorical(mean, class_dim)
    if class_dim is not None:
        raise ValueError(f"kfac_optim: class_dim={class_dim} was given for {kind.__name__}, which has no classes.")
    if kind is nn.MSELoss:
        return Gaussian(mean)
    return Bernoulli(mean) if isinstance(criterion, nn.BCEWithLogitsLoss) else GaussianWithVariance(mean, criterion.eps)
