"""Forwards of the model, kept until the step so that they can be run again: for Jacobian-vector products.

Run again means with the same inputs, the same random numbers and copies of the buffers: dropout draws the mask it drew
in training, and no running mean moves. What is asked of the loss is its likelihood alone; its targets are not kept.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from kfac_optim.capture.loss_terms import LossCount, RootCall
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.likelihoods import Likelihood, Outputs
from kfac_optim.utils.autograd import on_gradient, reaches
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.random_state import RandomState, random_state

Tangents = Mapping[str, Tensor]
"""A direction in the space of parameters, by their names in the model; those that are missing stand still."""


@dataclass(eq=False)
class KeptForward:
    """Keeps one forward of the model.

    Attributes:
        model: that was called, without its wrappers' hooks.
        args: it was called with, as `kwargs`; held, not copied.
        random: the generators when it began.
        outputs_of: takes what the loss reads from what the model returns.
        used: which terms the loss used, for each of the outputs that a backward came to.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: RandomState
    outputs_of: Callable[[Any], Outputs]
    used: dict[int, Tensor] = field(default_factory=dict)

    def inputs(self) -> list[Tensor]:
        """Return every tensor that the forward was called with."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def push_forward(self, params: Tangents, tangents: Tangents) -> tuple[Outputs, Outputs]:
        """Return the outputs at `params`, and their derivative along `tangents`.

        Raises:
            RuntimeError: a function in the model's forward has no forward-mode derivative.
        """
        still = {name: param for name, param in params.items() if name not in tangents}

        def forward(moving: dict[str, Tensor]) -> Outputs:
            # Copies made in here may be changed in place, as running means are.
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            state = {**buffers, **still, **moving}
            return self.outputs_of(torch.func.functional_call(self.model, state, self.args, dict(self.kwargs)))

        moving = {name: params[name] for name in tangents}
        with self.random.replayed(), _differentiable_attention():
            try:
                outputs, pushed, *_ = torch.func.jvp(forward, (moving,), (dict(tangents),))
            except (NotImplementedError, RuntimeError) as error:
                raise RuntimeError(
                    f"kfac_optim: the curvature along a step is asked of {type(self.model).__name__} by torch.func.jvp,"
                    f" which failed: {error} Some fused functions (cuDNN's recurrent layers) and autograd.Functions "
                    "have no forward-mode derivative: write them out, or do without QuadraticModel and "
                    "LevenbergMarquardt."
                ) from error
        return outputs, pushed


class ForwardRecorder:
    """Keeps the forwards that a backward goes through between two steps.

    Args:
        window: counts the loss terms of each forward; held weakly.
        likelihood: of the loss.
        outputs_of: takes what the loss reads from what the model returns; fewer tensors where it is not there.
        terms: of a loss that reads these outputs.

    Attributes:
        kept: since the last step.
    """

    def __init__(
        self,
        window: CaptureWindow,
        likelihood: Likelihood,
        outputs_of: Callable[[Any], Outputs],
        terms: Callable[[Outputs], int],
    ) -> None:
        self.kept: list[KeptForward] = []
        self._window = weakref.ref(window)
        self._likelihood = likelihood
        self._outputs_of = outputs_of
        self._terms = terms
        self._begun: RandomState | None = None

    def begin(self, model: nn.Module) -> None:
        """Note that a forward of the model begins."""
        self._begun = random_state(model.parameters()) if torch.is_grad_enabled() else None

    def end(self, root: RootCall, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note that the forward has ended; it has failed if there is no output."""
        random, self._begun = self._begun, None
        if random is None or out is None:
            return
        outputs = self._outputs_of(out)
        if len(outputs) != self._likelihood.outputs or not all(output.requires_grad for output in outputs):
            return
        forward = KeptForward(model, args, kwargs, random, self._outputs_of)
        terms = self._terms(outputs)
        for place, output in enumerate(outputs):
            on_gradient(output, weakly(self.arrive, forward, root, terms, place))

    def drop(self) -> None:
        """Drop the forwards: the gradients through them were thrown away, or used."""
        self.kept = []

    def arrive(self, forward: KeptForward, root: RootCall, terms: int, place: int, gradient: Tensor) -> None:
        """Note that a backward has come to an output of `forward`; it counts if it goes on into the parameters."""
        if not any(reaches(param) for param in forward.model.parameters()):
            return
        used = self._likelihood.used(gradient)
        before = forward.used.get(place)
        forward.used[place] = used if before is None else used | before
        if forward not in self.kept:
            self.kept.append(forward)
        window = self._window()
        if window is not None and window.listening:
            root.terms = terms
            window.tally.count(root)


class Objective:
    """Evaluates the loss of a step's examples, as far as its curvature goes.

    Args:
        recorder: has kept the forwards.
        likelihood: of the loss.
    """

    def __init__(self, recorder: ForwardRecorder, likelihood: Likelihood) -> None:
        self._recorder = recorder
        self._likelihood = likelihood

    def check(self, params: Iterable[nn.Parameter]) -> None:
        """Raise RuntimeError where the curvature along these parameters cannot be had."""
        self._names(params)

    def curvature(
        self, at: Mapping[nn.Parameter, Tensor], directions: Sequence[Mapping[nn.Parameter, Tensor]], count: LossCount
    ) -> Tensor:
        """Return `vᵢᵀ C vⱼ` of the loss as the user wrote it, `[k, k]`.

        Args:
            at: values of the parameters.
            directions: `vᵢ`.
            count: terms of the loss.
        """
        names = self._names(at)
        named = [{names[param]: part for param, part in direction.items()} for direction in directions]
        values = {names[param]: value for param, value in at.items()}
        product = gauss_newton(self._recorder.kept, self._likelihood, values, named)
        # A stated number may lie on another device of the model.
        return product / (count.averaged.to(product.device) if isinstance(count.averaged, Tensor) else count.averaged)

    def _names(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, str]:
        kept = self._recorder.kept
        if not kept:
            raise RuntimeError(
                "kfac_optim: the curvature of the loss is asked for, but no forward of the model with a backward was "
                "seen since the last step whose output is what the loss reads: run the model through its own forward "
                "(not under torch.compile), and name what the loss reads by outputs= of the estimate."
            )
        names = {param: name for name, param in kept[0].model.named_parameters()}
        found = {param: names[param] for param in params if param in names}
        if any(each.model is not kept[0].model for each in kept) or len(found) < len(list(params)):
            raise RuntimeError(
                "kfac_optim: the curvature of the loss is asked for, but the trained parameters belong to more than "
                f"one model, or not to {type(kept[0].model).__name__}. Put them into one nn.Module and call that."
            )
        return found


@torch.no_grad()
def gauss_newton(
    forwards: Sequence[KeptForward], likelihood: Likelihood, params: Tangents, directions: Sequence[Tangents]
) -> Tensor:
    """Return `vᵢᵀ C vⱼ` of the sum of the terms' losses, `[k, k]`, with `C = Σ Jᵀ H J`.

    By a Jacobian-vector product for each direction (Martens & Grosse 2015, §7 and appendix C).

    Args:
        forwards: of all examples of the loss.
        likelihood: of the loss.
        params: where the derivative is taken.
        directions: `vᵢ`.
    """
    k = len(directions)
    device = next(iter(params.values())).device
    forms = torch.zeros(k, k, device=device, dtype=_dtype(params))
    for forward in forwards:
        pushed = [forward.push_forward(params, direction) for direction in directions]
        for i, (outputs, left) in enumerate(pushed):
            curved = likelihood.curved(outputs, left)
            for j in range(i + 1):
                products = (
                    (u * hv * forward.used[place].to(u.dtype)).sum(dtype=forms.dtype).to(device)
                    for place, (u, hv) in enumerate(zip(pushed[j][1], curved, strict=True))
                    if place in forward.used
                )
                forms[i, j] += torch.stack(list(products)).sum()
    return forms + forms.tril(-1).mT


def _dtype(params: Tangents) -> torch.dtype:
    dtype = torch.float32
    for param in params.values():
        dtype = torch.promote_types(dtype, param.dtype)
    return dtype


def _differentiable_attention() -> ExitStack:
    """Return a context without the fused attention kernels, which have no forward-mode derivative."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit, at the first jvp of a process
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    if torch.backends.mha.get_fastpath_enabled():
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, True)
    return stack
