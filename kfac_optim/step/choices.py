"""The user's choices that are no numbers of param groups, checked and in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from kfac_optim.blocks.options import BlockOptions, LayerChoices
from kfac_optim.fisher.estimates import Estimate, ExactGGN, NamedLoss
from kfac_optim.inverses.base import Inverse
from kfac_optim.specs import LossTerms
from kfac_optim.step.averaging import IterateAverage
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.refresh_schedules import Background, Refresh, Schedule, check_refresh
from kfac_optim.step.step_size import StepSize
from kfac_optim.utils.validation import check_flag, check_integer, check_kind


@dataclass(frozen=True, kw_only=True)
class Choices(LayerChoices):
    """Holds what `KFACOptimizer` was given beside numbers: its arguments of these names, which its docstring describes.

    Attributes:
        options: those about layers, resolved.

    Raises:
        TypeError: an argument is of another kind, or needs a named loss, which `estimate` does not name.
        ValueError: a number is out of range.
    """

    step_size: StepSize
    adapt_damping: LevenbergMarquardt | None
    average: IterateAverage | None
    estimate: Estimate
    refresh: Refresh
    loss_terms: LossTerms | None
    nonfinite_limit: int | None
    include_factors: bool
    options: BlockOptions = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):  # what the user goes on to do with a mapping changes no choice
            if each.init and isinstance(given := getattr(self, each.name), Mapping):
                object.__setattr__(self, each.name, dict(given))
        check_kind("step_size", self.step_size, StepSize)
        if self.adapt_damping is not None:
            check_kind("adapt_damping", self.adapt_damping, LevenbergMarquardt)
            if self.step_size.directs_all:
                raise ValueError(
                    f"kfac_optim: adapt_damping makes steps longer and shorter by the damping, and those of "
                    f"{self.step_size!r} have one length at every damping. Drop adapt_damping, or pass "
                    "step_size=AdaptiveTrustRegion()."
                )
        if self.average is not None:
            check_kind("average (None is no average)", self.average, IterateAverage)
        if self.step_size.needs_closure and self.adapt_damping is not None:
            raise ValueError(
                f"kfac_optim: {self.step_size!r} evaluates the closure at other parameters, among which adapt_damping "
                "finds no step to judge. Drop one of the two."
            )
        check_kind("estimate", self.estimate, Estimate, "To name the loss pass MonteCarlo(criterion).")
        if self.judges and not isinstance(self.estimate, NamedLoss):
            raise TypeError(
                f"kfac_optim: {self.judges[0]} needs the curvature of the loss, and estimate={self.estimate!r} does "
                "not name it. Pass an estimate that does: estimate=MonteCarlo(criterion)."
            )
        check_refresh(self.refresh)
        if self.loss_terms is not None:
            check_kind("loss_terms", self.loss_terms, LossTerms)
            if isinstance(self.estimate, NamedLoss):
                object.__setattr__(self, "estimate", self.estimate.with_terms(self.loss_terms))
        check_flag("include_factors", self.include_factors, optional=False)
        if self.nonfinite_limit is not None:
            check_integer("nonfinite_limit (None is no limit)", self.nonfinite_limit)
        options = self.resolved(self.step_size.usual_inverse, matrices_only=self.step_size.matrices_only)
        self.step_size.check_layers(options)
        self._check_rows()
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "skip_layers", options.skip_layers)

    @property
    def loss_rule(self) -> LossTerms:
        """Tell what the mean in the loss runs over, where no loss is named that says it."""
        return LossTerms.EXAMPLES if self.loss_terms is None else self.loss_terms

    @cached_property
    def judges(self) -> list[StepSize | LevenbergMarquardt]:
        """Give the choices that evaluate the curvature of the loss."""
        judges = (self.step_size if self.step_size.needs_objective else None, self.adapt_damping)
        return [judge for judge in judges if judge is not None]

    @cached_property
    def evaluators(self) -> list[StepSize | LevenbergMarquardt]:
        """Give the choices that evaluate the model, or the curvature of its loss."""
        return self.judges + ([self.step_size] if self.step_size.needs_closure else [])

    @cached_property
    def by_rows(self) -> list[Inverse[Any]]:
        """Give the representations of the inverse, among those that are named, which are made of rows."""
        named = self.inverse.values() if isinstance(self.inverse, Mapping) else (self.inverse,)
        return [each for each in named if isinstance(each, Inverse) and each.takes_rows]

    @cached_property
    def whole(self) -> list[StepSize | LevenbergMarquardt]:
        """Give the choices that need whole parameters, and so no shards."""
        choices = (None if self.step_size.takes_shards else self.step_size, self.adapt_damping)
        return [choice for choice in choices if choice is not None]

    @property
    def schedule(self) -> Schedule:
        """Give the schedule of refreshes, wherever they are done."""
        return self.refresh.schedule if isinstance(self.refresh, Background) else self.refresh

    def _check_rows(self) -> None:
        """Refuse an estimate without residuals, where a representation of the inverse is made of them."""
        for each in self.by_rows:
            if not isinstance(self.estimate, ExactGGN):
                raise TypeError(
                    f"kfac_optim: {each!r} is made of the residuals of the loss, and estimate={self.estimate!r} does "
                    "not give them. Pass estimate=ExactGGN(criterion), with the criterion that the training loop calls."
                )
            if self.structure is not None:
                raise ValueError(
                    f"kfac_optim: {each!r} keeps no factors, and structure={self.structure!r} is theirs. Drop it."
                )

    def arguments(self) -> dict[str, Any]:
        """Give the arguments of `KFACOptimizer` by name, as it was given them."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}
