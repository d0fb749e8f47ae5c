"""Numbers that are not finite: the step they spoil is as if it had not been."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.hazards.base import STEPS, Pair, Training, by_hand, hazard, plain_run
from helpers.plain import batch, block, clones, edited, mlp, square_loss

NAN, INF = float("nan"), float("inf")


def nan_loss(run: Training) -> None:
    (square_loss(run.model(batch(7))) * NAN).backward()


def infinite_loss(run: Training) -> None:
    (square_loss(run.model(batch(7))) * INF).backward()


def inf_in_one_gradient(run: Training) -> None:
    square_loss(run.model(batch(7))).backward()
    run.model[2].weight.grad[1, 2] = INF


def nan_in_the_gradient_of_a_bias(run: Training) -> None:
    square_loss(run.model(batch(7))).backward()
    run.model[0].bias.grad[-1] = NAN


def nan_batch(run: Training) -> None:
    square_loss(run.model(batch(7) * NAN)).backward()


def one_inf_in_the_input(run: Training) -> None:
    x = batch(7)
    x[3, 1] = -INF
    square_loss(run.model(x)).backward()


def nan_in_one_micro_batch(run: Training) -> None:
    for x in (batch(7), batch(8) * NAN, batch(9)):
        (square_loss(run.model(x)) / 3).backward()


def backward_that_overflows(run: Training) -> None:
    (square_loss(run.model(batch(7)) * 1e160) * 1e160).backward()


def overflow_behind_the_last_layer(run: Training) -> None:
    """The last layer's gradients are finite, those of the first are not."""
    handle = run.model[0].register_forward_hook(lambda *args: args[2].register_hook(lambda g: g / 0) and None)
    square_loss(run.model(batch(7))).backward()
    handle.remove()
    assert run.model[2].weight.grad.isfinite().all()


BAD = [
    nan_loss,
    infinite_loss,
    inf_in_one_gradient,
    nan_in_the_gradient_of_a_bias,
    nan_batch,
    one_inf_in_the_input,
    nan_in_one_micro_batch,
    backward_that_overflows,
    overflow_behind_the_last_layer,
]


def _run_with(bad: Callable[[Training], None], at: list[int], **options: Any) -> Any:
    """Four good steps, with a bad one before each of those in `at`."""
    run = Training(mlp(), **options)
    for i in range(STEPS):
        for _ in range(at.count(i)):
            run.optimizer.zero_grad()
            bad(run)
            run.optimizer.step()
        run.train(1, start=i)
    return run.result(), run.optimizer.metrics()["skipped_steps"]


@hazard("non-finite", *BAD)
def a_bad_step_at_the_start_and_in_the_middle(bad: Callable[[Training], None]) -> Pair:
    return _run_with(bad, [0, 2]), (by_hand(), 2.0)


@hazard("non-finite", (1, 1), (1, 3), (2, 3), (3, 5))
def bad_steps_move_no_period(periods: tuple[int, int]) -> Pair:
    """Statistics and refreshes come in the steps in which they would have come."""
    options = {"factor_update_period": periods[0], "inverse_update_period": periods[1]}
    skipped = [_run_with(nan_batch, [at], **options) for at in range(STEPS)]
    return skipped, [(plain_run(**options), 1.0)] * STEPS


class Slope(nn.Module):
    """A parameter that no block covers, beside layers that blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slope = mlp(), nn.PReLU(dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.net(x))


@hazard("non-finite", NAN, INF)
def bad_gradient_of_a_parameter_that_is_left_to_sgd(value: float) -> Pair:
    run, plain = Training(Slope()), Training(Slope())
    for x in run.steps():
        square_loss(run.model(x)).backward()
        run.model.slope.weight.grad.fill_(value)
        run.optimizer.step()
        run.optimizer.zero_grad()
        square_loss(run.model(x)).backward()
    return run.result(), plain.train().result()


@hazard("non-finite", "nan", "inf")
def closure_with_a_bad_loss(kind: str) -> Pair:
    run = Training(mlp())

    def closure(factor: float, x: Tensor) -> Tensor:
        run.optimizer.zero_grad()
        loss = square_loss(run.model(x)) * factor
        loss.backward()
        return loss

    for i in range(STEPS):
        x = batch(100 + i)
        run.optimizer.step(lambda: closure(float(kind), x))  # noqa: B023
        run.step(lambda: closure(1.0, x))  # noqa: B023
    return run.result(), by_hand()


@hazard("non-finite", "by the loss", "by clipping that raises")
def users_own_guard_drops_the_step(kind: str) -> Pair:
    run = Training(mlp())
    for i in range(STEPS):
        for x in (batch(7) * NAN, batch(100 + i)):
            run.optimizer.zero_grad()
            loss = square_loss(run.model(x))
            if kind == "by the loss":
                if loss.isfinite():
                    loss.backward()
                    run.step()
                continue
            loss.backward()
            try:
                nn.utils.clip_grad_norm_(run.model.parameters(), 1e9, error_if_nonfinite=True)
            except RuntimeError:
                continue
            run.step()
    assert run.optimizer.metrics()["skipped_steps"] == 0
    return run.result(), by_hand()


# -- how long it may go on -----------------------------------------------------------------------------------------


@hazard("non-finite", 1, 3, 20)
def bad_steps_in_a_row_end_in_an_error_that_names_a_parameter(limit: int) -> Pair:
    """The last of them raises; the optimizer is as it was and can go on. 20 is the default."""
    run = Training(mlp(), **({} if limit == 20 else {"nonfinite_limit": limit}))
    for i in range(STEPS):
        for count in range(1, limit + 1):
            run.optimizer.zero_grad()
            inf_in_one_gradient(run)
            if count < limit:
                run.optimizer.step()
            else:
                with pytest.raises(RuntimeError, match=r"not finite.*'2\.weight'"):
                    run.optimizer.step()
        run.train(1, start=i)
    return (run.result(), run.optimizer.metrics()["skipped_steps"]), (by_hand(), float(STEPS * limit))


@hazard("non-finite")
def bad_steps_without_end_are_allowed_by_a_limit_of_none() -> Pair:
    return _run_with(nan_loss, [2] * 25, nonfinite_limit=None), (by_hand(), 25.0)


@hazard("non-finite")
def good_steps_start_the_count_anew() -> Pair:
    at = [i for i in range(STEPS) for _ in range(2)]
    return _run_with(nan_loss, at, nonfinite_limit=3), (by_hand(), float(2 * STEPS))


# -- statistics and inverses alone -----------------------------------------------------------------------------


@hazard("non-finite", "input", "gradient")
def statistics_that_overflow_though_gradients_do_not(side: str) -> Pair:
    """The layer's sample is refused: a step like one without statistics. Its square overflows, so it hardly moves."""
    runs = []
    for refused in (True, False):
        run = Training(mlp(sizes=(4, 3)), inverse_update_period=1)
        for i in range(STEPS):
            run.optimizer.zero_grad()
            x = batch(100 + i)
            if i != 2:
                square_loss(run.model(x)).backward()
                run.step()
                continue
            run.optimizer.param_groups[0]["factor_update_period"] = 1 if refused else 1000
            if side == "input":
                x[0, 0] = 1e155
            (run.model(x).sum() * (1e155 if side == "gradient" else 1)).backward()
            run.optimizer.step()
            run.optimizer.param_groups[0]["factor_update_period"] = 1
        runs.append((run.result(), run.optimizer.metrics()["refused_statistics"]))
    assert runs[0][1] == 1.0
    return runs[0][0], runs[1][0]


@hazard("non-finite", "A", "G")
def refresh_that_fails(side: str) -> Pair:
    """The last good inverse stays: a step like one without a refresh. No public way leads to an indefinite factor."""
    sides = []
    for failing in (True, False):
        run = Training(mlp(sizes=(4, 3)), inverse_update_period=1)
        run.train(2)
        group, pair = run.optimizer.param_groups[0], block(run.optimizer, "0").state.pair
        factor = pair.a if side == "A" else pair.g
        kept = clones([factor.packed])[0]
        group["factor_update_period"] = 1000
        group["inverse_update_period"] = 2 if failing else 1000  # the third step is number 2
        if failing:
            with edited(factor) as average:
                average[:, 0, 1] = average[:, 1, 0] = 1e6  # the trace, and with it the damping, stays
        run.train(1, start=2)
        factor.packed.copy_(kept)
        group["factor_update_period"] = group["inverse_update_period"] = 1
        run.train(2, start=3)
        sides.append((run.result(), run.optimizer.metrics()["failed_refreshes"]))
    assert sides[0][1] == 1.0
    return sides[0][0], sides[1][0]
