"""The curvature of the loss of a step, as step sizes and damping rules ask for it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.fisher.gauss_newton import ForwardRecorder, KeptForward, gauss_newton, widest_dtype
from kfac_optim.fisher.likelihoods import Likelihood
from kfac_optim.fisher.term_curvature import OF_COMPILED


class Objective:
    """Evaluates the loss of a step's examples, as far as its curvature goes.

    Args:
        recorder: the recorder that has kept the forwards.
        likelihood: the likelihood of the loss.

    Attributes:
        loss_scale: what the training loop multiplies its loss by, which the gradients at criteria hold.
    """

    def __init__(self, recorder: ForwardRecorder, likelihood: Likelihood) -> None:
        self.loss_scale = 1.0
        self._recorder = recorder
        self._likelihood = likelihood

    @property
    def is_hooked(self) -> bool:
        """Return whether criteria have told what their terms weigh, the loss scale included."""
        return self._recorder.is_hooked

    def check(self, params: Iterable[nn.Parameter], *, before_step: bool) -> None:
        """Raise RuntimeError where the curvature along these parameters cannot be had.

        Args:
            params: the parameters that have a gradient.
            before_step: whether it will be asked for before the parameters move, and not after it alone.
        """
        if self._recorder.read and not before_step:
            raise RuntimeError(
                "kfac_optim: LevenbergMarquardt cannot predict what this step does to the loss: the criterion reads "
                "something else than the whole output of a model that was called with data, and only QuadraticModel "
                f"takes the curvature there. Pass step_size=QuadraticModel() as well. {OF_COMPILED}"
            )
        if not self.is_hooked:
            self._names(params)
        for forward in self._recorder.again if self.is_hooked else self._recorder.kept:
            forward.check_inputs()

    def curvature(
        self, at: Mapping[nn.Parameter, Tensor], directions: Sequence[Mapping[nn.Parameter, Tensor]], count: LossCount
    ) -> Tensor:
        """Return `vᵢᵀ C vⱼ` of the loss as the user wrote it, `[k, k]`.

        Args:
            at: values of the parameters.
            directions: `vᵢ`.
            count: terms of the loss.
        """
        if self.is_hooked:
            return self._at_criteria(at, directions)
        product = self._run_again(self._recorder.kept, self._names(at), at, directions)
        # A stated number may lie on another device of the model.
        return product / (count.averaged.to(product.device) if isinstance(count.averaged, Tensor) else count.averaged)

    def _at_criteria(
        self, at: Mapping[nn.Parameter, Tensor], directions: Sequence[Mapping[nn.Parameter, Tensor]]
    ) -> Tensor:
        """Return `curvature` of what criteria have read, each call weighed as the loss weighs it."""
        like = torch.zeros((), dtype=widest_dtype(at.values()), device=next(iter(at.values())).device)
        total = like.expand(len(directions), len(directions))
        for forward in self._recorder.kept:
            if forward in self._recorder.again:
                names = {param: name for name, param in forward.model.named_parameters() if param in at}
                forms = self._run_again([forward], names, at, directions)
                total = total + forms * self._recorder.again[forward].weight(forms)
        for term in self._recorder.read:
            total = total + term.forms(directions, like)
        return total / self.loss_scale

    def _run_again(
        self,
        forwards: Sequence[KeptForward],
        names: Mapping[nn.Parameter, str],
        at: Mapping[nn.Parameter, Tensor],
        directions: Sequence[Mapping[nn.Parameter, Tensor]],
    ) -> Tensor:
        named = [{names[param]: part for param, part in each.items() if param in names} for each in directions]
        return gauss_newton(forwards, self._likelihood, {name: at[param] for param, name in names.items()}, named)

    def _names(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, str]:
        kept = self._recorder.kept
        if not kept:
            raise RuntimeError(
                "kfac_optim: the curvature of the loss is asked for, but no forward of the model with a backward was "
                "seen since the last step whose output is what the loss reads: run the model through its own forward, "
                f"and name what the loss reads by outputs= of the estimate. {OF_COMPILED}"
            )
        names = {param: name for name, param in kept[0].model.named_parameters()}
        found = {param: names[param] for param in params if param in names}
        if any(each.model is not kept[0].model for each in kept) or len(found) < len(list(params)):
            raise RuntimeError(
                "kfac_optim: the curvature of the loss is asked for, but the trained parameters belong to more than "
                f"one model, or not to {type(kept[0].model).__name__}. Put them into one nn.Module and call that."
            )
        if not all(each.is_of_data for each in kept):
            raise RuntimeError(
                f"kfac_optim: the curvature of the loss is asked for, but {type(kept[0].model).__name__} was called "
                "with something that was computed from the trained parameters, such as its own output, or ran on "
                "weights that were. Name the loss by its criterion, estimate=MonteCarlo(nn.MSELoss()), and call that "
                "very object in the training loop: the curvature is then taken at what it reads."
            )
        return found
