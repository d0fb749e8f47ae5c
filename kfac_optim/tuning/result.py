"""What a range test has found: numbers, words and a drawing."""

import importlib
import math
import os
from dataclasses import dataclass
from typing import Any

from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.tuning.search import Trial
from kfac_optim.utils.validation import check_kind


@dataclass(frozen=True)
class RangeTest:
    """Holds what `range_test` found and recommends.

    Attributes:
        lr: the recommended learning rate of the first param group; others keep their ratio to it.
        damping: the recommended damping of the first param group; others keep their ratio to it.
        rates: the lowest and the highest rate tried that did about as well as the best.
        records: the trials, in the order in which they were run, with the loss of each step.
        steps: how many steps were taken, each a forward and a backward.
        forwards: how many forwards were run beside them.
        learnt: whether any trial lowered the loss; if none did, `lr` and `damping` are those that were there.
        finds_rate: whether a rate was looked for; `QuadraticModel` and `LineSearch` find their own.
        before: `(lr, damping)` of the first param group.
        read_again: whether the loader has fewer batches than a trial has steps, so that batches which judge a trial had
            been trained on.
    """

    lr: float
    damping: float
    rates: tuple[float, float]
    records: tuple[Trial, ...]
    steps: int
    forwards: int
    learnt: bool
    finds_rate: bool
    before: tuple[float, float]
    read_again: bool = False

    def apply(self, optimizer: KFACOptimizer) -> None:
        """Give the optimizer the recommended rate and damping; param groups keep their ratios.

        Call it before a scheduler is made, since schedulers keep the rate that they began with.

        Raises:
            TypeError: this is no `KFACOptimizer`.
            RuntimeError: a scheduler of these numbers has been made already, or was in the run of a checkpoint that was
                loaded.
            ValueError: the rate of the first param group is not above 0, so that those of others have no ratio to it.
        """
        check_kind("what RangeTest.apply is given", optimizer, KFACOptimizer)
        for name in ("lr", "damping", "preconditioner_damping"):
            bases = [group[f"initial_{name}"] for group in optimizer.param_groups if f"initial_{name}" in group]
            if bases:
                raise RuntimeError(
                    f"kfac_optim: RangeTest.apply was called after a scheduler of {name!r} was made, or a checkpoint "
                    f"of a run that had one was loaded. Schedulers go on from the old value, {float(bases[0]):g}. Call "
                    "apply before, and make the scheduler then. Where no scheduler is left, drop the old value: "
                    f"for group in optimizer.param_groups: group.pop('initial_{name}', None)"
                )
        first = optimizer.param_groups[0]
        if not float(first["lr"]) > 0:
            raise ValueError(
                f"kfac_optim: RangeTest.apply multiplies the rates of all param groups alike, and lr of param group 0 "
                f"is {float(first['lr'])}. Set it to {self.before[0]:g}, as it was for range_test."
            )
        factors = {"lr": self.lr / float(first["lr"])}
        if first["damping"]:
            factors["damping"] = factors["preconditioner_damping"] = self.damping / first["damping"]
        for group in optimizer.param_groups:
            for name, factor in factors.items():
                if group[name] is not None:
                    group[name] = group[name] * factor

    def __str__(self) -> str:
        lines = [f"{'lr':>8}  {'damping':>8}  {'last losses':>12}  {'below the start by':>18}"]
        lines += [_row(trial) for trial in self.records]
        length = max(len(trial.losses) for trial in self.records)
        lines.append(
            f"{len(self.records)} trials of {length} steps on the same batches: {self.steps} steps, and "
            f"{self.forwards} forwards more. Everything was put back."
        )
        if self.read_again:
            lines.append(
                "The loader has fewer batches than a trial has steps, so the trials had trained on data that they are "
                "judged by: that favours high rates and little damping."
            )
        if not self.learnt:
            more = "Pass more steps, or look" if any(trial.gains for trial in self.records) else "Look"
            stays = f"No trial lowered the loss, so lr {self.lr:g} and damping {self.damping:g} stay."
            return "\n".join([*lines, f"{stays} {more} at the data and the loss."])
        return "\n".join([*lines, f"Recommended: {self._choice()}.", *self._reasons()])

    def _choice(self) -> str:
        return f"lr {self.lr:g}, damping {self.damping:g}" if self.finds_rate else f"damping {self.damping:g}"

    def _reasons(self) -> list[str]:
        """Say how sure the numbers are."""
        low, high = self.rates
        reasons = []
        if not self.finds_rate:
            reasons.append("No rate was looked for, as the step size finds its own.")
        elif low < high:
            reasons.append(f"The rate makes no difference between {low:g} and {high:g}.")
        else:
            reasons.append(f"Of the rates tried, {low:g} did better than those beside it.")
        tried = {trial.damping for trial in self.records} - {self.before[1]}
        if not tried:
            reasons.append("Damping was left as it is.")
        elif self.damping == self.before[1]:
            reasons.append(f"Damping {' or '.join(f'{each:g}' for each in sorted(tried))} did not do much better.")
        else:
            reasons.append(f"Damping {self.before[1]:g} did worse.")
        return reasons

    def plot(self, path: str | os.PathLike[str]) -> Any:
        """Draw the losses of all trials, and what each has gained, into a file.

        Args:
            path: the path of the file; its ending says which format, `.png`, `.pdf` or `.svg`.

        Returns:
            The `matplotlib.figure.Figure`, to change and save again.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            figure = importlib.import_module("matplotlib.figure").Figure((10, 4), layout="constrained")
        except ImportError as error:
            raise ImportError("kfac_optim: plot draws by matplotlib: pip install matplotlib") from error
        losses, gains = figure.subplots(1, 2)
        for trial in self.records:
            style = "-" if trial.damping == self.before[1] else "--"
            losses.plot(trial.losses, style, label=f"lr {trial.lr:g}, damping {trial.damping:g}")
        losses.set_xlabel("step")
        losses.set_ylabel("loss of the batch")
        losses.legend(fontsize="small")
        for damping in sorted({trial.damping for trial in self.records}):
            some = sorted((t for t in self.records if t.damping == damping and t.gains), key=lambda t: t.lr)
            errors = [trial.error() for trial in some]
            gains.errorbar(
                *([t.lr for t in some], [t.gain for t in some], errors), marker="o", label=f"damping {damping:g}"
            )
        if self.finds_rate:
            gains.axvspan(*self.rates, alpha=0.15)
            gains.axvline(self.lr, linestyle=":", label=f"recommended: {self._choice()}")
            gains.set_xscale("log")
        gains.set_xlabel("learning rate")
        gains.set_ylabel("fall of the loss on the last batches")
        gains.legend(fontsize="small")
        figure.savefig(path)
        return figure


def _row(trial: Trial) -> str:
    if not trial.gains:
        ended = "diverged" if not math.isfinite(trial.losses[-1]) else "doubled"
        return f"{trial.lr:>8g}  {trial.damping:>8g}  {ended:>12}"
    return f"{trial.lr:>8g}  {trial.damping:>8g}  {trial.last_loss:>12.4g}  {trial.gain:>10.4g} ± {trial.error():<.1g}"
