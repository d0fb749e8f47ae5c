"""Forwards of the model, kept until the step so that they can be run again: for Jacobian-vector products.

Run again means with the same inputs, the same random numbers and copies of the buffers: dropout draws the mask it drew
in training, and no running mean moves. What is asked of the loss is its likelihood alone; its targets are not kept.

That is for losses that read the whole output of a model, and of a forward in which the model's own weights are all that
is trained: its inputs are data. What else a criterion reads, such as a residual that holds derivatives of the model, or
what a second model makes of the output of a first, is differentiated where it stands (`term_curvature.py`).
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from kfac_optim.capture.graph_walk import depend_on, mark_output, output_behind
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.fisher.criterion_term import CriterionTerm
from kfac_optim.fisher.likelihoods import Likelihood, Outputs
from kfac_optim.fisher.term_curvature import TermCurvature
from kfac_optim.utils.autograd import on_gradient, reaches, version
from kfac_optim.utils.dynamo import uncompiled
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.random_state import RandomState, random_state

Tangents = Mapping[str, Tensor]
"""A direction in the space of parameters, by their names in the model; those that are missing stand still."""


@dataclass(eq=False)
class KeptForward:
    """Keeps one forward of the model.

    Attributes:
        model: the model that was called, without its wrappers' hooks.
        args: its arguments, with `kwargs`, as they were before its own hooks changed them; held, not copied.
        random: the generators when it began.
        outputs_of: takes what the loss reads from what the model returns.
        reading: what `_reading` returns of the outputs, once they are there.
        used: which terms the loss used, for each of the outputs that a backward came to.
        readers: calls of the criterion that read the outputs and nothing else.
        counts: which terms count by their targets, as in `CriterionTerm`.
        is_of_data: whether neither its inputs nor the weights it ran on were computed from what is trained.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    random: RandomState
    outputs_of: Callable[[Any], Outputs]
    reading: tuple[Any, ...] = ()
    used: dict[int, Tensor] = field(default_factory=dict)
    readers: list[CriterionTerm] = field(default_factory=list)
    counts: Tensor | None = None
    is_of_data: bool = True
    _versions: list[tuple[Tensor, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._versions = [(each, version(each)) for each in self.inputs()]

    def inputs(self) -> list[Tensor]:
        """Return every tensor that the forward was called with."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def check_inputs(self) -> None:
        """Raise RuntimeError where an input was changed in place since the forward began."""
        for each, before in self._versions:
            if version(each) != before:
                raise RuntimeError(
                    f"kfac_optim: the curvature along a step is asked of {type(self.model).__name__}, whose forward is "
                    f"run again for it, and an input of shape {list(each.shape)} was changed in place since that "
                    "forward began. In the model's forward write x = x - mean for x.sub_(mean); in the training loop "
                    "change it after step()."
                )

    def counted(self, place: int) -> Tensor:
        """Return which terms of an output count: the loss has used them, and their targets are not ignored."""
        used = self.used[place]
        if self.counts is None:
            return used
        # The criterion may have read positions in another order. There, what the whole loss has used is what is known.
        counts = self.counts.reshape(used.shape).to(used.device)
        return torch.where((used | ~counts).all(), used & counts, used)

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
            return self.outputs_of(torch.func.functional_call(self.model, state, args, kwargs))

        args, kwargs = self._as_wide_as_weights()
        moving = {name: params[name] for name in tangents}
        # Where torch.compile comes to torch.func.jvp it gives up the frame around that for good, and all modules of
        # torch.nn are called in one and the same frame.
        with self.random.replayed(), _differentiable_attention(), uncompiled():
            try:
                outputs, pushed, *_ = torch.func.jvp(forward, (moving,), (dict(tangents),))
            except (NotImplementedError, RuntimeError) as error:
                raise RuntimeError(
                    f"kfac_optim: the curvature along a step is asked of {type(self.model).__name__} by torch.func.jvp,"
                    f" which failed: {error} Some fused functions (cuDNN's recurrent layers) and autograd.Functions "
                    "have no forward-mode derivative: write them out. Nor have some layers in channels_last, as "
                    "nn.GroupNorm: call model.to(memory_format=torch.contiguous_format) and pass such inputs. Autocast "
                    "is off in it: where one dtype meets weights of another, cast it in the forward. Otherwise do "
                    "without QuadraticModel and LevenbergMarquardt."
                ) from error
        return outputs, pushed

    def _as_wide_as_weights(self) -> tuple[Any, Any]:
        """Return `args` and `kwargs` for a forward without autocast, which may have been what narrowed them."""
        dtypes = [weight.dtype for weight in self.model.parameters() if weight.is_floating_point()]
        narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.bfloat16)

        def widened(leaf: Any) -> Any:
            is_number = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(narrowest) if is_number and leaf.dtype.itemsize < narrowest.itemsize else leaf

        return tree_map(widened, self.args), tree_map(widened, self.kwargs)


class ForwardRecorder:
    """Keeps the forwards that a backward goes through between two steps.

    Args:
        window: counts the loss terms of each forward; held weakly.
        likelihood: the likelihood of the loss.
        outputs_of: takes what the loss reads from what the model returns; fewer tensors where it is not there.
        terms: returns how many terms a loss that reads these outputs has.
        params: returns the parameters that are trained.

    Attributes:
        kept: the forwards that a backward has come to since the last step.
        again: those of these that are run again, each with the call of the criterion which that is for.
        read: what criteria have read since then that is no output of a forward that is run again.
        is_hooked: whether a backward has come through a criterion since then.
    """

    def __init__(
        self,
        window: CaptureWindow,
        likelihood: Likelihood,
        outputs_of: Callable[[Any], Outputs],
        terms: Callable[[Outputs], int],
        params: Callable[[], Sequence[nn.Parameter] | None],
    ) -> None:
        self.kept: list[KeptForward] = []
        self.again: dict[KeptForward, CriterionTerm] = {}
        self.read: list[TermCurvature] = []
        self.is_hooked = False
        self._params = params
        self._made: weakref.WeakSet[KeptForward] = weakref.WeakSet()
        self._window = weakref.ref(window)
        self._likelihood = likelihood
        self._outputs_of = outputs_of
        self._terms = terms
        self._begun: KeptForward | None = None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Note that a forward of the model begins; `kwargs` is None where they are not known before it ends."""
        self._begun = None
        if torch.is_grad_enabled():
            self._begun = KeptForward(model, args, kwargs, random_state(model.parameters()), self._outputs_of)

    def end(self, root: RootCall, kwargs: dict[str, Any], out: Any) -> None:
        """Note that the forward has ended; it has failed if there is no output."""
        forward, self._begun = self._begun, None
        if forward is None or out is None:
            return
        outputs = self._outputs_of(out)
        if len(outputs) != self._likelihood.outputs or not all(output.requires_grad for output in outputs):
            return
        forward.kwargs = kwargs if forward.kwargs is None else forward.kwargs
        forward.reading = _reading(self._likelihood, outputs)
        # `torch.func.functional_call` runs the model on other weights, which stand in its place for parameters here.
        given = [each for each in forward.inputs() if each.requires_grad]
        given += [weight for weight in forward.model.parameters() if weight.grad_fn is not None]
        forward.is_of_data = not depend_on(given, self._params() or ())
        terms = self._terms(outputs)
        self._made.add(forward)
        for place, output in enumerate(outputs):
            mark_output(output, (forward, place))
            on_gradient(output, weakly(self.arrive, forward, root, terms, place))

    def note_term(self, term: CriterionTerm, outputs: Outputs) -> None:
        """Note that a criterion has read `outputs`."""
        forward = self._forward_of(outputs)
        if forward is not None:
            if forward.is_of_data and forward.reading == _reading(term.likelihood, outputs):
                forward.readers.append(term)
            else:
                forward = None
        window = self._window()
        if window is not None:
            window.probe.listen()  # what criteria weigh their terms by holds the loss scale
        known = TermCurvature(term, tuple(output.detach() for output in outputs))
        for place, output in enumerate(outputs):
            if output.grad_fn is not None:  # otherwise it is given, and no backward comes to it
                on_gradient(output, weakly(self.arrive_at_term, known, forward, place, output.output_nr))

    def _forward_of(self, outputs: Outputs) -> KeptForward | None:
        """Return the forward whose outputs these are, and all that its loss would read; None where they are not."""
        said = [set(output_behind(output)) for output in outputs]
        found = [each for each in self._made if all((each, place) in marks for place, marks in enumerate(said))]
        return found[0] if len(found) == 1 else None

    def drop(self) -> None:
        """Drop the forwards: the gradients through them were thrown away, or used."""
        for term in self.read:
            term.release()
        self.kept, self.again, self.read, self.is_hooked = [], {}, [], False
        self._begun = None  # of a forward that was interrupted

    @contextmanager
    def set_aside(self) -> Iterator[Sequence[KeptForward]]:
        """Return a context in which nothing is kept at first; all that is kept now, which it gives, comes back."""
        before = self.kept, self.again, self.read, self.is_hooked
        self.kept, self.again, self.read, self.is_hooked = [], {}, [], False
        try:
            yield before[0]
        finally:
            self.kept, self.again, self.read, self.is_hooked = before

    def arrive_at_term(
        self, known: TermCurvature, forward: KeptForward | None, place: int, output_nr: int, gradient: Tensor
    ) -> None:
        """Note that a backward has come to what a criterion reads; `forward` is what it is the output of."""
        window = self._window()
        if window is None or not window.listening or known.term.factor is None:
            return
        params = [param for param in self._params() or () if param.requires_grad]
        if not any(reaches(param) for param in params):
            return
        self.is_hooked = True
        if forward is not None and (len(forward.readers) == 1 or self.again.get(forward) is known.term):
            self.again[forward] = known.term  # also if the criterion reads the outputs once more from now on
            forward.counts = known.term.counts
            return
        window.aside = True
        try:
            with window.shards.passing_within_backward():
                known.arrive(place, output_nr, gradient, params)
        finally:
            window.aside = False
        if known not in self.read:
            self.read.append(known)

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
            window.count(root)


@torch.no_grad()
def gauss_newton(
    forwards: Sequence[KeptForward], likelihood: Likelihood, params: Tangents, directions: Sequence[Tangents]
) -> Tensor:
    """Return `vᵢᵀ C vⱼ` of the sum of the terms' losses, `[k, k]`, with `C = Σ Jᵀ H J`.

    By a Jacobian-vector product for each direction (Martens & Grosse 2015, §7 and appendix C).

    Args:
        forwards: the forwards of all examples of the loss.
        likelihood: the likelihood of the loss.
        params: the parameters at which the derivative is taken.
        directions: `vᵢ`.
    """
    k = len(directions)
    device = next(iter(params.values())).device
    forms = torch.zeros(k, k, device=device, dtype=widest_dtype(params.values()))
    for forward in forwards:
        pushed = [forward.push_forward(params, direction) for direction in directions]
        for i, (outputs, left) in enumerate(pushed):
            curved = likelihood.curved(outputs, left)
            for j in range(i + 1):
                products = (
                    (u * hv * forward.counted(place).to(u.dtype)).sum(dtype=forms.dtype).to(device)
                    for place, (u, hv) in enumerate(zip(pushed[j][1], curved, strict=True))
                    if place in forward.used
                )
                forms[i, j] += torch.stack(list(products)).sum()
    return forms + forms.tril(-1).mT


def _reading(likelihood: Likelihood, outputs: Outputs) -> tuple[Any, ...]:
    """Return what is the same wherever a loss reads the same of some outputs, in whatever order and shape.

    For a loss that reads only a part of them it differs: the forward's own gradients tell which terms are used, and
    these hold what others read of the same outputs as well.
    """
    return type(likelihood), likelihood.terms(outputs), *(output.numel() for output in outputs)


def widest_dtype(params: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of sums over some parameters, at least float32."""
    dtype = torch.float32
    for param in params:
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
