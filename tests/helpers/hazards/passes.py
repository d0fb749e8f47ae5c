"""What a training step must not notice: other passes in its midst, steps thrown away or broken off, forked workers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

from helpers.hazards.base import STEPS, Pair, Training, by_hand, hazard
from helpers.plain import batch, mlp, square_loss

# -- passes that are no training -------------------------------------------------------------------------------


def evaluation(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(7, size=3))
    model.train()


def no_grad_in_train_mode(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7, size=3))


def inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model(batch(7, size=3))


def forward_that_is_dropped(model: nn.Module) -> None:
    model(batch(7, size=3))


def functional_call_with_other_weights(model: nn.Module) -> None:
    other = {name: (2 * param).detach().requires_grad_() for name, param in model.named_parameters()}
    square_loss(functional_call(model, other, (batch(7, size=3),))).backward()


def func_grad(model: nn.Module) -> None:
    params = {name: param.detach() for name, param in model.named_parameters()}
    torch.func.grad(lambda p: square_loss(functional_call(model, p, (batch(7, size=3),))))(params)


def vmap_of_per_example_gradients(model: nn.Module) -> None:
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return square_loss(functional_call(model, params, (x[None],)))

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, batch(7, size=3))


def gradients_by_autograd_grad(model: nn.Module) -> None:
    torch.autograd.grad(square_loss(model(batch(7, size=3))), list(model.parameters()))


def hessian_vector_product(model: nn.Module) -> None:
    params = list(model.parameters())
    gradients = torch.autograd.grad(square_loss(model(batch(7, size=3))), params, create_graph=True)
    torch.autograd.grad(sum(gradient.sum() for gradient in gradients), params)


def forward_that_raises(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch(7, size=3, dim=9))


def forward_that_is_interrupted(model: nn.Module) -> None:
    """Ctrl-C in a notebook whose next cell goes on; torch calls no forward hooks then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch(7, size=3))
    handle.remove()


PASSES = [
    evaluation,
    no_grad_in_train_mode,
    inference_mode,
    forward_that_is_dropped,
    functional_call_with_other_weights,
    func_grad,
    vmap_of_per_example_gradients,
    gradients_by_autograd_grad,
    hessian_vector_product,
    forward_that_raises,
    forward_that_is_interrupted,
]


@hazard("passes", *PASSES)
def before_forward_before_backward_and_before_step(between: Callable[[nn.Module], None]) -> Pair:
    run = Training(mlp())
    for x in run.steps():
        between(run.model)
        loss = square_loss(run.model(x))
        between(run.model)
        loss.backward()
        between(run.model)
    return run.result(), by_hand()


# -- steps that are thrown away, broken off, or taken by others ------------------------------------------------


@hazard("passes", True, False)
def zero_grad_with_set_to_none(set_to_none: bool) -> Pair:
    run = Training(mlp())
    for i in range(STEPS):
        square_loss(run.model(batch(i))).backward()
        run.optimizer.zero_grad(set_to_none)
        square_loss(run.model(batch(100 + i))).backward()
        run.step()
        run.optimizer.zero_grad(set_to_none)
    return run.result(), by_hand()


@hazard("passes", "before the forward", "before the backward", "after the step", "of the model", "by hand")
def zero_grad_placed(where: str) -> Pair:
    run = Training(mlp())
    for i in range(STEPS):
        if where == "before the forward":
            run.optimizer.zero_grad()
        loss = square_loss(run.model(batch(100 + i)))
        if where == "before the backward":
            run.optimizer.zero_grad()
        loss.backward()
        run.step()
        if where == "after the step":
            run.optimizer.zero_grad()
        elif where == "of the model":
            run.model.zero_grad()
        elif where == "by hand":
            for param in run.model.parameters():
                param.grad = None
    return run.result(), by_hand()


@hazard("passes", ArithmeticError, KeyboardInterrupt)
def exception_in_the_middle_of_a_backward(kind: type[BaseException]) -> Pair:
    """The layers behind it have committed their rows; the retry begins with zero_grad."""
    run = Training(mlp(sizes=(4, 5, 5, 3)))

    def stop(_: Tensor) -> None:
        raise kind

    for x in run.steps():
        handle = run.model[1].register_forward_hook(lambda *args: args[2].register_hook(stop) and None)
        loss = square_loss(run.model(batch(7)))
        with pytest.raises(kind):
            loss.backward()
        handle.remove()
        run.optimizer.zero_grad()
        square_loss(run.model(x)).backward()
    return run.result(), by_hand(mlp(sizes=(4, 5, 5, 3)))


@hazard("passes")
def exception_in_a_micro_batch_that_is_left_out() -> Pair:
    """No zero_grad: the good micro-batches of the step stay."""
    run = Training(mlp())
    for x in run.steps():
        square_loss(run.model(x[:4])).mul(0.5).backward()
        forward_that_raises(run.model)
        forward_that_is_interrupted(run.model)
        square_loss(run.model(x[4:])).mul(0.5).backward()
    return run.result(), by_hand()


@hazard("passes", "plain", "with evaluation", "that retries")
def closures(kind: str) -> Pair:
    run = Training(mlp())
    for i in range(STEPS):

        def closure(number: int = 100 + i) -> Tensor:
            x = batch(number)
            for last in (False, True) if kind == "that retries" else (True,):
                run.optimizer.zero_grad()
                loss = square_loss(run.model(x if last else x[:3]))
                loss.backward()
            if kind == "with evaluation":
                evaluation(run.model)
            return loss

        run.step(closure)
    return run.result(), by_hand()


@hazard("passes")
def exception_in_a_closure() -> Pair:
    run = Training(mlp())

    def broken() -> Tensor:
        square_loss(run.model(batch(7))).backward()
        raise KeyboardInterrupt

    for x in run.steps():
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.step(broken)
        run.optimizer.zero_grad()
        square_loss(run.model(x)).backward()
    return run.result(), by_hand()


class Numbered(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        return batch(100 + index)


@hazard("passes", "during training", "between forward and step")
def data_loader_workers_forked_after_construction(when: str) -> Pair:
    run = Training(mlp())
    run.optimizer.zero_grad()
    if when == "between forward and step":
        loss = square_loss(run.model(batch(100)))
        loaded = list(DataLoader(Numbered(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
        loss.backward()
        run.step()
        run.optimizer.zero_grad()
        for x in loaded[1:]:
            square_loss(run.model(x)).backward()
            run.step()
            run.optimizer.zero_grad()
    else:
        for x in DataLoader(Numbered(), batch_size=None, num_workers=1, multiprocessing_context="fork"):
            run.optimizer.zero_grad()
            square_loss(run.model(x)).backward()
            run.step()
    return run.result(), by_hand()
