"""`range_test` finds a learning rate and a damping by trial steps, and puts everything back."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.tuning import trial_steps
from kfac_optim.tuning.result import RangeTest
from kfac_optim.tuning.search import TRIALS, Start, search
from kfac_optim.tuning.undo import everything_undone, has_position
from kfac_optim.utils.dynamo import uncompiled
from kfac_optim.utils.validation import check_integer

_LEAST = 8  # steps of a trial
_HELD = 4  # a trial is judged by the last quarter of its batches
_RATES = (0.003, 0.03, 0.3)  # of steps that a trust region bounds
_RATES_OF_ADAMW = (0.001, 0.01, 0.1)


def range_test(
    optimizer: KFACOptimizer,
    loader: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    *,
    steps: int = 140,
    advance: Callable[[], object] = lambda: None,
) -> RangeTest:
    """Recommend a learning rate and a damping, from trial steps on the model where it stands, and put everything back.

        result = range_test(optimizer, loader, lambda batch: criterion(model(batch[0]), batch[1]))
        print(result)
        result.apply(optimizer)

    Up to 7 settings are trained for `steps / 7` steps each, from the same parameters, on the same batches and with the
    same random numbers: rates a factor of ten apart, then the ends of the range of rates that do equally well, then
    more and less damping. They are judged by how far they lower the loss of the last batches, each seen for the first
    time, unless the loader has fewer batches than a trial has steps. That differs from the range test of Smith (2017,
    arXiv 1506.01186), which lets the rate grow within one run, and stops where the loss rises: a trust region bounds
    the steps of K-FAC, so that the loss need not rise at any rate, and damping takes part. All that is known is what a
    few steps show; decays of the rate are for the user.

    A twin of the optimizer takes the steps, and the optimizer itself does not notice. What is put back to the bit, also
    after an error or Ctrl-C: parameters, buffers and `.grad` of the model's modules; what attributes of the modules, of
    the loader, its samplers, data sets and transforms are bound to, and what stands in those that are dicts, lists,
    deques or sets; the states of generators (of torch, `random` and NumPy) there and in tuples; in modules also tensors
    that are neither parameters nor buffers, if changed in place, not by `.data`; and the random states of torch, CUDA,
    `random` and NumPy. What else attributes hold is not looked into, such as arrays, objects of other classes, and
    containers in containers. Compiled models run uncompiled.

    Args:
        optimizer: the optimizer as training begins with it, or between two steps. It must know its model. `apply` of
            the result refuses one of which a scheduler was made, here or in the run of a checkpoint that was loaded.
        loader: what can be iterated again, as a `DataLoader`, or a list of batches; `steps / 7` batches of it are held
            in memory. An iterator is refused, unless it has `state_dict` and `load_state_dict`.
        loss_of: computes the loss of a batch as training does, `[]`, under autocast if training is, without
            `backward()`. It must leave the batch as it is. What it states by `optimizer.set_loss_terms` or
            `optimizer.observe` counts for the steps of the trials alone. Clipping of gradients, accumulation and
            schedules take no part.
        steps: how many at most, each a forward and a backward; forwards of a few batches come on top.
        advance: a function that is called after each step, for a progress bar.

    Returns:
        The recommendation. Where `step_size` is `QuadraticModel` or `LineSearch` there is no rate to find, where it is
        `SelectedUpdates` no damping, and the rate is one to begin with and to let decay.

    Raises:
        TypeError: the optimizer is none of this package; the loader is used up by reading; `loss_of` returns no loss.
        ValueError: `steps` are too few; the loader is empty; a rate is 0; losses are not finite before any step.
        RuntimeError: gradients wait for a step; the model is not known, or shows averages, or has no shapes yet.
        NotImplementedError: several ranks train the model, or a `GradScaler` was named.
    """
    model = trial_steps.check(optimizer)
    check_integer("steps of range_test", steps)
    length = steps // TRIALS
    if length < _LEAST:
        raise ValueError(f"kfac_optim: range_test needs at least {TRIALS * _LEAST} steps, got {steps}.")
    for name, function in (("loss_of", loss_of), ("advance", advance)):
        if not callable(function):
            raise TypeError(f"kfac_optim: {name} of range_test must be a function, got {function!r}.")
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise TypeError(f"kfac_optim: loader of range_test must yield batches, got {type(loader).__name__}.")
    if isinstance(loader, Iterator) and not has_position(loader):
        raise TypeError(
            f"kfac_optim: range_test would use up the batches of a {type(loader).__name__}, which cannot be iterated "
            "again. Pass the loader itself, or a list of batches: list(itertools.islice(batches, 20))."
        )
    first = optimizer.param_groups[0]
    if not float(first["lr"]) > 0:
        raise ValueError(
            f"kfac_optim: range_test multiplies the rates of all param groups alike, and lr of param group 0 is "
            f"{float(first['lr'])}. Set it above 0; call range_test before a scheduler that warms up is made."
        )
    start = _start(optimizer)
    modules = trial_steps.hooked(optimizer, model)
    trial_steps.stop_listening(optimizer)
    # Graphs hold the hooks of an optimizer, and would be compiled again for each twin.
    with everything_undone(modules, optimizer._params(), loader) as undo, uncompiled():

        def begin_again() -> None:
            undo()
            trial_steps.take_hooks_off(modules)

        trials = trial_steps.TrialSteps(
            optimizer,
            loss_of,
            loader,
            undo=begin_again,
            length=length,
            held=max(2, length // _HELD),
            advance=advance,
        )
        found = search(trials.run, start)
    return RangeTest(
        lr=found.lr,
        damping=found.damping,
        rates=found.rates,
        records=found.trials,
        steps=trials.steps,
        forwards=trials.forwards,
        learnt=found.learnt,
        finds_rate=bool(start.rates),
        before=(start.lr, start.damping),
        read_again=trials.read_again,
    )


def _start(optimizer: KFACOptimizer) -> Start:
    """Return what is to be tried of this optimizer."""
    choices, first = optimizer._choices, optimizer.param_groups[0]
    step_size = choices.step_size
    finds_its_own = step_size.needs_objective or step_size.needs_closure
    # Where layers of other inverses stand beside those that are made of rows, the region bounds the others.
    blocks = optimizer._binding.coverage.blocks
    is_exact = bool(blocks) and all(block.inverse.takes_rows for block in blocks)
    rates = _RATES_OF_ADAMW if step_size.directs_all else _RATES
    return Start(
        lr=float(first["lr"]),
        damping=float(first["damping"]),
        rates=() if finds_its_own else rates,
        has_damping=first["damping"] > 0 and not step_size.directs_all,
        bounded=not step_size.directs_all and not is_exact and first["kl_clip"] is not None,
    )
