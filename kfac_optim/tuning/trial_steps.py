"""Trial steps of a user's model, taken by a twin of the optimizer, so that the optimizer itself never notices."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_optim.fisher.estimates import NamedLoss
from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.step import averaging
from kfac_optim.tuning.search import Trial
from kfac_optim.utils.hooks import PicklableHook

LossOf = Callable[[Any], Tensor]

_HOPELESS = 2.0  # times the largest loss that is known of the untrained model: it has doubled


class TrialSteps:
    """Trains the user's model from one state again and again, on the same batches.

    Args:
        optimizer: the user's, which is left as it is.
        loss_of: computes the loss of a batch, `[]`.
        loader: the loader of the batches, which are read as they are needed and held.
        undo: puts the model and random states back, and takes hooks off.
        length: steps of a trial.
        held: how many batches at its end say what it has gained.
        advance: a function that is called after each step.

    Attributes:
        steps: how many steps were taken so far.
        forwards: how many further forwards there were, without backward.
        read_again: whether the loader has fewer batches than a trial has steps.
    """

    def __init__(
        self,
        optimizer: KFACOptimizer,
        loss_of: LossOf,
        loader: Iterable[Any],
        undo: Callable[[], None],
        *,
        length: int,
        held: int,
        advance: Callable[[], object],
    ) -> None:
        self.steps = self.forwards = 0
        self._optimizer, self._loss_of, self._undo = optimizer, loss_of, undo
        self._advance = advance
        self._params = tuple({id(param): param for param in _params(optimizer)}.values())
        self._batches, self.read_again = _read(loader, length)
        self._before = self._losses_now(self._batches[-held:])

    def run(self, lr: float, damping: float) -> Trial:
        """Train with a rate and a damping of the first param group; those of other groups keep their ratio to it."""
        losses: list[float] = []
        with self._twin_trains(lr, damping) as twin:
            for batch in self._batches:
                losses.append(self._step(twin, batch))
                self.steps += 1
                self._advance()
                # Of batches that differ in difficulty the first may be an easy one.
                known = losses[0], *self._before
                limit = max(known) + (_HOPELESS - 1) * max(map(abs, known))
                if not (math.isfinite(losses[-1]) and losses[-1] <= limit):
                    return Trial(lr, damping, tuple(losses), ())
        ends = losses[-len(self._before) :]
        gains = tuple(before - after for before, after in zip(self._before, ends, strict=True))
        return Trial(lr, damping, tuple(losses), gains)

    @contextmanager
    def _twin_trains(self, lr: float, damping: float) -> Iterator[KFACOptimizer]:
        """Return a context in which a twin with these numbers trains the model as it was at first."""
        self._undo()
        twin = _twin(self._optimizer, lr, damping)
        # A loss that states its terms, or what it reads, knows the user's optimizer alone: the twin is to hear of it.
        window, self._optimizer._window = self._optimizer._window, twin._window
        try:
            yield twin
        finally:
            self._optimizer._window = window
            twin.remove_hooks()
            stop_listening(twin)

    def _step(self, twin: KFACOptimizer, batch: Any) -> float:
        def closure() -> Any:
            # Where autocast is on around the whole test, torch keeps its casts of parameters that a step has changed.
            torch.clear_autocast_cache()
            twin.zero_grad()
            for param in self._params:
                param.grad = None
            loss = check_loss(self._loss_of(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return twin.step(closure).item()  # type: ignore[attr-defined, no-any-return]

    def _losses_now(self, batches: Sequence[Any]) -> list[float]:
        """Return the losses of the model as the user has it."""
        losses = []
        first = self._optimizer.param_groups[0]
        with self._twin_trains(float(first["lr"]), first["damping"]), torch.enable_grad():  # it may hold derivatives
            for batch in batches:
                losses.append(check_loss(self._loss_of(batch)).item())
                self.forwards += 1
        if not all(map(math.isfinite, losses)):
            raise ValueError(f"kfac_optim: range_test found losses that are not finite before any step: {losses}.")
        return losses


def check_loss(loss: Any) -> Tensor:
    """Return the loss; raise TypeError where a function of the user's returned something else."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = (
            f"a tensor {list(loss.shape)} with requires_grad={loss.requires_grad}"
            if isinstance(loss, Tensor)
            else f"{type(loss).__name__}"
        )
        raise TypeError(
            f"kfac_optim: loss_of must return the loss of a batch, a tensor of one element with a graph, got {got}. "
            "Return criterion(model(inputs), targets), without .item(), .detach() or backward()."
        )
    return loss


def check(optimizer: KFACOptimizer) -> nn.Module:
    """Return the optimizer's model; refuse by name what trial steps cannot be taken of."""
    if not isinstance(optimizer, KFACOptimizer):
        raise TypeError(f"kfac_optim: range_test takes a KFACOptimizer, got {type(optimizer).__name__}.")
    if "_binding" not in vars(optimizer):  # of a class that Fabric makes of the optimizer's
        raise TypeError(
            f"kfac_optim: range_test got a {type(optimizer).__name__}, which wraps the optimizer. Pass what it wraps: "
            "optimizer.optimizer."
        )
    model = optimizer._binding.model
    if optimizer._executor.several:
        raise NotImplementedError(
            "kfac_optim: range_test takes its steps on one process, and this optimizer is one of several ranks. Run it "
            "in a script of its own without a process group, with the batches of all ranks joined, and pass its result "
            "to all."
        )
    if any(group["maximize"] for group in optimizer.param_groups):
        raise ValueError(
            "kfac_optim: range_test looks for the setting that lowers the loss, and this optimizer has maximize=True. "
            "Have loss_of return the negative, and build the optimizer without maximize."
        )
    if model is None:
        raise RuntimeError(
            "kfac_optim: range_test must know the model that it is to restore, and this optimizer has not met it yet. "
            "Pass the model: KFACOptimizer(model, ...), or model=model beside param groups."
        )
    if (scaler := optimizer._scaler.named) is not None and scaler.is_enabled():
        raise NotImplementedError(
            "kfac_optim: range_test does not scale the loss, and this optimizer was given grad_scaler. Test an "
            "optimizer without one, under torch.autocast with bfloat16."
        )
    if averaging.shows_averages(optimizer.state):
        raise RuntimeError(
            "kfac_optim: range_test was called while the model holds the averages of its parameters. Call "
            "optimizer.train() before."
        )
    if optimizer._binding.released:
        raise RuntimeError(
            "kfac_optim: range_test needs statistics, and remove_hooks() has ended them. Build another optimizer for "
            "it."
        )
    pending = any(block.has_pending() for block in optimizer._binding.coverage.blocks)
    if pending and not optimizer._window.is_stale():
        raise RuntimeError(
            "kfac_optim: range_test was called between backward() and step(). Call it before the first step, or after "
            "a step and zero_grad()."
        )
    if lazy := [name for name, param in model.named_parameters() if is_lazy(param)]:
        raise RuntimeError(
            f"kfac_optim: range_test cannot restore {lazy[0]!r}, which gets its shape at the first forward. Run a "
            "forward of the model before."
        )
    return model


def take_hooks_off(modules: Iterable[nn.Module]) -> None:
    """Take this package's hooks off the modules; whoever undoes everything puts them back."""
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if isinstance(hook, PicklableHook)]:
                del hooks[number]


def stop_listening(optimizer: KFACOptimizer) -> None:
    """Take off the parameters what a forward has put on them to hear of its backward; the next one puts it on again."""
    for block in optimizer._binding.coverage.blocks:
        block.check.reset()
    optimizer._window.probe.end()


def hooked(optimizer: KFACOptimizer, model: nn.Module) -> list[nn.Module]:
    """Return the modules that the optimizer has hooks on: those of the model, and the criterion that it was told."""
    estimate = optimizer._choices.estimate
    criterion = estimate.criterion if isinstance(estimate, NamedLoss) else None
    return [*model.modules(), *(criterion.modules() if isinstance(criterion, nn.Module) else ())]


def _params(optimizer: KFACOptimizer) -> Iterator[nn.Parameter]:
    """Return the parameters of the optimizer and of its model."""
    yield from optimizer._params()
    if optimizer._binding.model is not None:
        yield from optimizer._binding.model.parameters()


def _twin(optimizer: KFACOptimizer, lr: float, damping: float) -> KFACOptimizer:
    """Return an optimizer of the same parameters in the same state, with other numbers."""
    rebuild, (kind, model, groups, numbers, choices, state, *rest) = optimizer.__reduce__()
    # Choices are immutable, and a criterion that is called must be the very one that is named.
    same = [*_params(optimizer), *([] if model is None else [model])]
    memo = {id(each): each for each in same}
    groups, state, rest = copy.deepcopy((groups, state, rest), memo)
    first = groups[0]
    factors = {"lr": lr / float(first["lr"]), "damping": damping / first["damping"] if first["damping"] else 1.0}
    for group in groups:
        group["lr"] = group["lr"] * factors["lr"]
        for name in ("damping", "preconditioner_damping"):
            if group[name] is not None:
                group[name] = group[name] * factors["damping"]
    first["lr"] = lr if not isinstance(first["lr"], Tensor) else first["lr"].fill_(lr)
    first["damping"] = damping
    with warnings.catch_warnings():  # they were given when the user's optimizer was built
        warnings.simplefilter("ignore")
        twin: KFACOptimizer = rebuild(kind, model, groups, numbers, choices, state, *rest)
    twin._memory.silence()  # what it would say of the rate is not of the user's
    return twin


def _read(loader: Iterable[Any], count: int) -> tuple[list[Any], bool]:
    """Return so many batches, and whether the loader was begun again for them when it ended."""
    batches: list[Any] = []
    before = 0
    while len(batches) < count:
        before = len(batches)
        for batch in loader:
            batches.append(batch)
            if len(batches) == count:
                break
        if len(batches) == before:
            raise ValueError("kfac_optim: the loader that range_test was given yields no batch.")
    return batches, before > 0
