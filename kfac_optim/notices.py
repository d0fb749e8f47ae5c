"""Warnings of what a training loop's user may not expect, shown at the line that led to them."""

import warnings
from collections.abc import Sequence


class Notices:
    """What is preconditioned, and what is not; what every step could repeat is said once.

    `stacklevel` counts frames as in `warnings.warn`, from the caller on.
    """

    def __init__(self) -> None:
        self.given = False

    def no_model(self, stacklevel: int) -> None:
        warnings.warn(
            "kfac_optim: nothing is preconditioned and every parameter takes the plain SGD step: no call of a "
            "module that holds the parameters was seen since the optimizer was built, as when a model has already "
            "run under torch.compile. Pass the model: KFACOptimizer(model, ...).",
            stacklevel=stacklevel + 1,
        )

    def nothing_preconditioned(self, stacklevel: int) -> None:
        warnings.warn(
            "kfac_optim: nothing is preconditioned; every parameter takes the plain SGD step. "
            "optimizer.summary() lists the reasons.",
            stacklevel=stacklevel + 1,
        )

    def unmeasured(self, reason: str, stacklevel: int) -> None:
        """Of parameters that were to be preconditioned until now."""
        warnings.warn(f"kfac_optim: {reason}; it takes the plain SGD step.", stacklevel=stacklevel + 1)

    def no_gradients(self, stacklevel: int) -> None:
        if not self.given:
            self.given = True
            warnings.warn(
                "kfac_optim: no parameter has a gradient, and no module that holds them was called since the optimizer "
                "was built. If fully_shard was, it has put others in their place: build the optimizer afterwards.",
                stacklevel=stacklevel + 1,
            )

    def unseen_layers(self, names: Sequence[str], stacklevel: int) -> None:
        if names and not self.given:
            self.given = True
            warnings.warn(
                f"kfac_optim: {len(names)} layers have gradients but no statistics and take the plain SGD step, the "
                f"first of them {names[0]!r}. Either no finite statistics came yet, or the layer was parametrized or "
                "pruned since, or its forward or backward is out of sight: torch.func, gradients from autograd.grad, "
                "a forward of its own that multiplies by something else than its weight, or, with an estimate that "
                "names the loss, torch.compile or an output that is not found. Later such steps are counted in "
                "metrics()['unpreconditioned_blocks'].",
                stacklevel=stacklevel + 1,
            )

    def few_examples(self, judges: Sequence[object], stacklevel: int) -> None:
        warnings.warn(
            f"kfac_optim: the examples by which {' and '.join(map(repr, judges))} will judge steps are few, "
            "and others at each step: steps will fit them, not the data. Use batches of thousands, or "
            "TrustRegion() and a fixed damping.",
            stacklevel=stacklevel + 1,
        )
