"""Which forwards and backwards become statistics: each unusual loop has the factors of an equivalent plain one."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.plain import (
    Factors,
    assert_identical,
    assert_same_factors,
    batch,
    clones,
    factors_after,
    linear_factors,
    mlp,
    square_loss,
    train,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, MonteCarlo, WeightSharing
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.listeners import ForwardListener
from kfac_optim.capture.model_hooks import LayerHook, watch_root
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.layers import LinearAdapter
from kfac_optim.utils.autograd import reaches


def plain_step(model: nn.Module) -> None:
    square_loss(model(batch())).backward()


UNSEEN = r"layers? (have|has) gradients but no statistics and takes? the plain SGD step"


class Recorder:
    """Inputs and output gradients of every Linear of a model, as torch's own hooks on tensors see them."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self.rows[name], self.gradients[name] = [], []
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if not output.requires_grad:
                return
            self.rows[name].append(args[0].detach())
            at = len(self.gradients[name])
            self.gradients[name].append(torch.zeros_like(output))

            def keep(gradient: Tensor) -> None:
                self.gradients[name][at] = gradient.detach()

            output.register_hook(keep)

        return hook

    def factors(self, terms: int) -> Factors:
        """By definition, over all recorded calls and, for each, the gradient of its last backward."""
        return {
            name: linear_factors(
                torch.cat([row.reshape(-1, row.shape[-1]) for row in self.rows[name]]),
                torch.cat([gradient.reshape(-1, gradient.shape[-1]) for gradient in self.gradients[name]]),
                terms,
            )
            for name in self.rows
        }


def test_factors_equal_their_definitions_on_recorded_inputs_and_output_gradients() -> None:
    model = mlp()
    recorder = Recorder(model)
    assert_same_factors(factors_after(model, plain_step), recorder.factors(terms=8))


# -- in-place operations after a layer -------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.second = nn.Linear(4, 3, dtype=torch.float64)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.in_place:
            y += x
            y.mul_(2)
        else:
            y = (y + x) * 2
        return self.second(y)


class Activation(nn.Sequential):
    def __init__(self, in_place: bool) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 2, 3, dtype=torch.float64),
            nn.ReLU(inplace=in_place),
            nn.Flatten(),
            nn.Linear(4, 5, dtype=torch.float64),
            nn.SiLU(inplace=in_place),
            nn.Linear(5, 3, dtype=torch.float64),
            nn.Hardtanh(inplace=in_place),
        )


@pytest.mark.parametrize("make", [Residual, Activation])
def test_in_place_operations_after_a_layer_equal_the_out_of_place_ones(make: Callable[[bool], nn.Module]) -> None:
    in_place, plain = make(True), make(False)
    assert_same_factors(factors_after(in_place, plain_step), factors_after(plain, plain_step), rtol=0)


# -- forwards that leave no trace ------------------------------------------------------------------------------


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(7, size=3))
    model.train()


def forward_without_backward(model: nn.Module) -> None:
    model(batch(7, size=3))


def no_grad_forward_in_train_mode(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(7, size=3))


def inference(model: nn.Module) -> None:
    with torch.inference_mode():
        model(batch(7, size=3))


def input_gradient(model: nn.Module) -> None:
    x = batch(7, size=3).requires_grad_()
    torch.autograd.grad(square_loss(model(x)), x)


def backward_to_the_input_alone(model: nn.Module) -> None:
    x = batch(7, size=3).requires_grad_()
    square_loss(model(x)).backward(inputs=[x])


def weight_gradient_by_autograd_grad(model: nn.Module) -> None:
    torch.autograd.grad(square_loss(model(batch(7, size=3))), list(model.parameters()))


def per_example_gradients(model: nn.Module) -> None:
    params = {name: param.detach() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x[None],)).square().sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, batch(7, size=3))


def jacobian_vector_product(model: nn.Module) -> None:
    params = dict(model.named_parameters())
    tangents = {name: torch.ones_like(param) for name, param in params.items()}
    torch.func.jvp(lambda p: torch.func.functional_call(model, p, (batch(7, size=3),)), (params,), (tangents,))


def interrupted_forward(model: nn.Module) -> None:
    """Ctrl-C, as in a notebook whose next cell trains on; torch calls no forward hooks then."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch(7, size=3))
    handle.remove()


def functional_gradient(model: nn.Module) -> None:
    copied = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    square_loss(torch.func.functional_call(model, copied, (batch(7, size=3),))).backward()


def forward_that_raises(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch(7, size=3, dim=9))


TRACELESS = [
    evaluate,
    forward_without_backward,
    no_grad_forward_in_train_mode,
    inference,
    input_gradient,
    backward_to_the_input_alone,
    weight_gradient_by_autograd_grad,
    per_example_gradients,
    jacobian_vector_product,
    functional_gradient,
    forward_that_raises,
    interrupted_forward,
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, at the first use of jvp
@pytest.mark.parametrize("between", TRACELESS)
@pytest.mark.parametrize("place", ["before", "amid", "after"])
def test_what_is_no_training_pass_leaves_no_trace(between: Callable[[nn.Module], None], place: str) -> None:
    """Before the training forward, between it and its backward, and between backward and step."""

    def run(model: nn.Module) -> None:
        if place == "before":
            between(model)
        loss = square_loss(model(batch()))
        if place == "amid":
            between(model)
        loss.backward()
        if place == "after":
            between(model)

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("alone", TRACELESS)
def test_what_is_no_training_pass_counts_nothing_by_itself(alone: Callable[[nn.Module], None]) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model)
    alone(model)
    optimizer.step()
    assert optimizer.metrics()["blocks_without_statistics"] == 2
    assert optimizer.metrics()["dropped_calls"] == 0


# -- several backwards -----------------------------------------------------------------------------------------


def two_losses(output: Tensor) -> tuple[Tensor, Tensor]:
    return square_loss(output), output.sum() / output.shape[0]


@pytest.mark.parametrize("sharing", list(WeightSharing))
@pytest.mark.parametrize("passes", [2, 3])
def test_several_backwards_through_one_forward_equal_one_backward_of_the_sum(
    sharing: WeightSharing, passes: int
) -> None:
    def apart(model: nn.Module) -> None:
        output = model(batch(dim=12).view(8, 3, 4))
        square_loss(output).backward(retain_graph=True)
        for i in range(1, passes):
            (output.sin().sum() * i / 8).backward(retain_graph=True)

    def together(model: nn.Module) -> None:
        output = model(batch(dim=12).view(8, 3, 4))
        (square_loss(output) + sum(output.sin().sum() * i / 8 for i in range(1, passes))).backward()

    options = {"weight_sharing": sharing}
    assert_same_factors(factors_after(mlp(), apart, **options), factors_after(mlp(), together, **options))


def test_several_backwards_through_a_convolution_equal_one_backward_of_the_sum() -> None:
    def apart(model: nn.Module) -> None:
        first, second = two_losses(model(batch()))
        first.backward(retain_graph=True)
        second.backward()

    def together(model: nn.Module) -> None:
        sum(two_losses(model(batch()))).backward()

    assert_same_factors(factors_after(Activation(False), apart), factors_after(Activation(False), together))


def test_backwards_of_losses_that_share_a_trunk_equal_one_backward_of_the_sum() -> None:
    """Each loss reaches its own head and both the trunk."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.two = mlp(0), mlp(1, sizes=(3, 2)), mlp(2, sizes=(3, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.trunk(x).tanh()
            return self.one(z), self.two(z)

    def apart(model: nn.Module) -> None:
        one, two = model(batch())
        square_loss(one).backward(retain_graph=True)
        (3 * square_loss(two)).backward()

    def together(model: nn.Module) -> None:
        one, two = model(batch())
        (square_loss(one) + 3 * square_loss(two)).backward()

    assert_same_factors(factors_after(Heads(), apart), factors_after(Heads(), together))


@pytest.mark.parametrize("retained", [False, True])
def test_output_gradients_are_held_only_where_another_backward_may_come(retained: bool) -> None:
    model, held = mlp(), []
    optimizer = KFACOptimizer(model, lr=0.0)
    output = model[0](batch())
    output.register_hook(lambda gradient: held.append(StorageWeakRef(gradient.untyped_storage())))
    optimizer.set_loss_terms(8)
    square_loss(model[1:](output)).backward(retain_graph=retained)
    assert held[0].expired() is not retained
    optimizer.step()
    assert held[0].expired()


class _Marked(torch.autograd.Function):
    """The identity, whose node in the graph holds something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: set[int]) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_a_graph_that_was_retained_is_freed_with_its_loss_and_not_only_by_the_step() -> None:
    model, held = mlp(), {1}
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(8)
    loss = square_loss(model[2](_Marked.apply(model[0](batch()), held)))
    loss.backward(retain_graph=True)
    mark = weakref.ref(held)
    del loss, held
    assert mark() is None
    optimizer.step()


class _Unsaved(torch.autograd.Function):
    """A product with a weight that keeps its input by itself, so that a graph that is not retained goes on working."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.held = x, weight
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.held
        return gradient @ weight, gradient.mT @ x


class _UnsavedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Unsaved.apply(x, self.weight)


class _ByModule(LinearAdapter):
    """Looks at the module, as no product with the weight is to be seen."""

    is_product = False


def test_a_further_backward_through_a_graph_that_was_not_retained_is_not_counted_but_told() -> None:
    layer = _UnsavedLinear(4, 3, bias=False, dtype=torch.float64)
    optimizer = KFACOptimizer(layer, lr=0.0, adapters={**DEFAULT_ADAPTERS, _UnsavedLinear: _ByModule()})
    output = layer(batch())
    for times in (1, 2):
        output.sum().backward()
        assert optimizer.metrics()["dropped_calls"] == times - 1
    optimizer.step()
    a, g = linear_factors(batch(), torch.ones(8, 3, dtype=torch.float64), 8)
    assert_same_factors(optimizer.factors(), {"": (a[:, :-1, :-1], g)})


def test_a_backward_with_inputs_counts_the_layers_whose_weights_it_reaches() -> None:
    def some(model: nn.Module) -> None:
        square_loss(model(batch())).backward(inputs=[model[0].weight])

    factors, plain = factors_after(mlp(), some), factors_after(mlp(), plain_step)
    assert_same_factors({"0": factors["0"]}, {"0": plain["0"]}, rtol=0)
    assert factors.keys() == {"0"}

    def all_weights(model: nn.Module) -> None:
        square_loss(model(batch())).backward(inputs=[model[0].weight, model[2].weight])

    assert_same_factors(factors_after(mlp(), all_weights), plain, rtol=0)


def test_a_backward_that_reaches_the_bias_alone_counts_nothing() -> None:
    def run(model: nn.Module) -> None:
        square_loss(model(batch())).backward(inputs=[model[0].bias, model[2].bias])

    with pytest.warns(UserWarning, match=UNSEEN):
        assert factors_after(mlp(), run) == {}


def test_an_inner_backward_that_is_a_mere_measurement_counts_nothing() -> None:
    model = mlp()
    recorder = Recorder(model)

    def run(model: nn.Module) -> None:
        x = batch().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        (square_loss(output) + square_loss(gradient)).backward()

    assert_same_factors(factors_after(model, run), recorder.factors(terms=8))


def test_a_backward_that_creates_a_graph_counts_once() -> None:
    """As for Hessian-vector products: the second pass differentiates the gradients, not the loss."""

    def run(model: nn.Module) -> None:
        grads = torch.autograd.grad(square_loss(model(batch())), list(model.parameters()), create_graph=True)
        square_loss(model(batch())).backward()
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), list(model.parameters()))

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.parametrize(
    ("forward", "zero_grad"), [(interrupted_forward, True), (forward_that_raises, True), (forward_that_raises, False)]
)
def test_accumulation_goes_on_after_a_broken_forward(forward: Callable[[nn.Module], None], zero_grad: bool) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    forward(model)
    if zero_grad:
        optimizer.zero_grad()
    for part in batch().split(2):
        (model(part).square().sum() / 16).backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step))
    call_layers(model)
    with pytest.warns(UserWarning, match="ran outside the model's own forward"):
        optimizer.step()


def test_a_second_backward_after_the_step_counts_nothing_again() -> None:
    model = mlp(sizes=(4, 3))  # whose backward does not need the weight that the step changed
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    loss = square_loss(model(batch()))
    loss.backward(retain_graph=True)
    optimizer.step()
    before = optimizer.factors()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), before, rtol=0)
    assert optimizer.metrics()["factor_age"] == 1


def test_a_forward_before_the_step_and_its_backward_after_it_count_for_the_next_step() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    loss = square_loss(model(batch()))
    optimizer.step()
    loss.backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=0)


def test_losses_whose_gradients_are_taken_apart_by_zero_grad_count_like_their_sum() -> None:
    """Gradient surgery: one forward, a backward per loss with `zero_grad()` between, the gradients put together."""

    def run(optimizer: KFACOptimizer, model: nn.Module) -> list[Tensor]:
        losses = two_losses(model(batch()))
        total = [torch.zeros_like(param) for param in model.parameters()]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            total = [sum_ + param.grad for sum_, param in zip(total, model.parameters(), strict=True)]
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        return total

    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0)
    run(optimizer, model)
    optimizer.step()
    together = factors_after(mlp(), lambda m: sum(two_losses(m(batch()))).backward())
    assert_same_factors(optimizer.factors(), together)


# -- zero_grad -------------------------------------------------------------------------------------------------


def test_zero_grad_between_forward_and_backward_drops_nothing() -> None:
    """The order of some training loops (Lightning's closure among them)."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0)
    loss = square_loss(model(batch()))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_a_backward_with_its_rows_terms_and_stated_terms(set_to_none: bool) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(1000)
    square_loss(model(batch(5, size=3))).backward()
    optimizer.zero_grad(set_to_none)
    plain_step(model)
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=0)


def test_a_step_after_zero_grad_counts_nothing() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    plain_step(model)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.metrics()["blocks_without_statistics"] == 2
    plain_step(model)
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.parametrize(
    ("stated", "discarded"),
    [
        ("before zero_grad", False),
        ("after zero_grad", False),
        ("after zero_grad", True),
        ("after the forward", False),
        ("after the forward", True),
    ],
)
def test_terms_stated_for_the_backward_to_come_count(stated: str, discarded: bool) -> None:
    """Also where `zero_grad()` threw an earlier backward away, as in every step of a GAN's discriminator."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0)
    if discarded:
        square_loss(model(batch(5, size=3))).backward()
    if stated == "before zero_grad":
        optimizer.set_loss_terms(40)
    optimizer.zero_grad()
    if stated == "after zero_grad":
        optimizer.set_loss_terms(40)
    loss = square_loss(model(batch()))
    if stated == "after the forward":
        optimizer.set_loss_terms(40)
    loss.backward()
    optimizer.step()
    assert_same_factors(optimizer.factors(), scaled_g(factors_after(mlp(), plain_step), 40 / 8))


# -- a module used several times, or not -----------------------------------------------------------------------


def test_a_module_called_twice_in_one_forward_averages_a_over_all_rows_and_sums_g() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = mlp(0, sizes=(4, 4)), mlp(1, sizes=(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x[:5]).tanh()).tanh())

    model = Twice()
    recorder = Recorder(model)
    factors = factors_after(model, lambda m: square_loss(m(batch())).backward())
    assert len(recorder.rows["layer.0"]) == 2
    assert_same_factors(factors, recorder.factors(terms=8))


def test_a_recurrent_cell_of_linears_counts_every_time_step() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = mlp(0, sizes=(7, 3))

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], 3)
            for t in range(x.shape[1]):
                h = self.cell(torch.cat([h, x[:, t]], 1)).tanh()
            return h

    model = Cell()
    recorder = Recorder(model)
    factors = factors_after(model, lambda m: square_loss(m(batch(dim=20).view(8, 5, 4))).backward())
    assert_same_factors(factors, recorder.factors(terms=8))


class Branches(nn.Module):
    """One of two branches per forward, as with experts or task heads."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(1, sizes=(4, 3)), mlp(2, sizes=(4, 3))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.get_submodule(branch)(x)


@pytest.mark.parametrize("period", [1, 2])
def test_a_module_unused_in_some_steps_averages_the_steps_that_used_it_by_their_age(period: int) -> None:
    model = Branches()
    optimizer = KFACOptimizer(model, lr=0.0, factor_decay=0.5, factor_update_period=period)
    uses: dict[str, list[int]] = {"left": [], "right": []}
    for step, branch in enumerate(["left", "left", "right", "right", "left"]):
        optimizer.zero_grad()
        square_loss(model(batch(step), branch)).backward()
        optimizer.step()
        # The first use counts at once, later ones by the period.
        if not uses[branch] or step % period == 0:
            uses[branch].append(step)
    for branch, steps in uses.items():
        weights = [0.5 ** (steps[-1] - step) for step in steps]
        rows = [torch.cat([batch(step), torch.ones(8, 1, dtype=torch.float64)], 1) for step in steps]
        expected = sum(w * x.T @ x / 8 for w, x in zip(weights, rows, strict=True)) / sum(weights)
        torch.testing.assert_close(optimizer.factors()[f"{branch}.0"][0][0], expected, rtol=1e-12, atol=0)


def test_a_module_first_used_in_a_later_step_is_preconditioned_from_then_on() -> None:
    model = Branches()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=100, factor_update_period=100)
    for branch in ("left", "left", "right"):
        optimizer.zero_grad()
        square_loss(model(batch(), branch)).backward()
        optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["blocks_without_statistics"] == metrics["unpreconditioned_blocks"] == 0
    assert metrics["cosine"] < 0.999


def test_an_output_that_the_loss_does_not_use_counts_nothing() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = mlp(), mlp(1, sizes=(4, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.net(x), self.unused(x)

    factors = factors_after(Extra(), lambda m: square_loss(m(batch())[0]).backward())
    assert not any(name.startswith("unused") for name in factors)
    plain = factors_after(mlp(), plain_step)
    assert_same_factors({name: factors[f"net.{name}"] for name in plain}, plain, rtol=0)


# -- accumulation and modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2), (3, 5), (1, 7)])
def test_accumulated_micro_batches_equal_the_whole_batch(sizes: tuple[int, ...]) -> None:
    """Each micro-batch's loss is a sum divided by the size of the whole batch."""

    def run(model: nn.Module) -> None:
        for part in batch().split(sizes):
            (model(part).square().sum() / (2 * 8)).backward()

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step))


def test_two_forwards_and_one_backward_equal_the_whole_batch() -> None:
    def run(model: nn.Module) -> None:
        first, second = batch().split(4)
        ((square_loss(model(first)) + square_loss(model(second))) / 2).backward()

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step))


def test_training_in_eval_mode_is_training() -> None:
    def run(model: nn.Module) -> None:
        model.eval()
        plain_step(model)

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
def test_a_layer_frozen_after_construction_stays_and_keeps_its_factors(when: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    factors, before = optimizer.factors()["0"], clones(model[0].parameters())
    optimizer.zero_grad()
    if when == "before the forward":
        model[0].requires_grad_(False)
    loss = square_loss(model(batch()))
    model[0].requires_grad_(False)
    if when == "after the forward":
        # The graph is built: gradients still arrive, as they do under SGD; the user drops them.
        loss.backward()
        for param in model[0].parameters():
            param.grad = None
    else:
        loss.backward()
        assert model[0].weight.grad is None
    optimizer.step()
    assert_identical(clones(model[0].parameters()), before)
    if when == "before the forward":
        assert_identical(optimizer.factors()["0"], factors)
    assert optimizer.metrics()["factor_age"] <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_input_changed_in_place_before_the_backward_is_dropped_and_counted(dtype: torch.dtype) -> None:
    """Under autocast autograd keeps a cast copy of the input and lets the original be overwritten."""
    model = mlp(dtype=dtype, sizes=(4, 3))
    optimizer = KFACOptimizer(model, lr=0.1)
    x = batch(dtype=dtype)
    if dtype is torch.float64:
        output = model(x * 1)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
    x.zero_()
    square_loss(output.float()).backward()
    dropped = dtype is torch.float32
    with pytest.warns(UserWarning, match=UNSEEN) if dropped else nullcontext():
        optimizer.step()
    assert optimizer.metrics()["dropped_calls"] == dropped
    assert optimizer.metrics()["blocks_without_statistics"] == dropped


def test_a_head_on_features_of_inference_mode_is_measured_under_autocast() -> None:
    """Torch allows it, as autograd keeps a cast copy; an inference tensor has no version to compare."""
    model, twin = mlp(dtype=torch.float32, sizes=(4, 3)), mlp(dtype=torch.float32, sizes=(4, 3))
    with torch.inference_mode():
        features = batch(dtype=torch.float32) * 1

    def run(model: nn.Module, x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        square_loss(output.float()).backward()

    factors = factors_after(model, lambda m: run(m, features))
    assert_same_factors(factors, factors_after(twin, lambda m: run(m, features.clone())), rtol=0)


# -- layers out of sight -------------------------------------------------------------------------------------


def by_autograd_grad(model: nn.Module, x: Tensor) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(square_loss(model(x)), params), strict=True):
        param.grad = grad


def by_torch_func(model: nn.Module, x: Tensor) -> None:
    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.grad(lambda p: square_loss(torch.func.functional_call(model, p, (x,))))(params)
    for name, param in model.named_parameters():
        param.grad = grads[name]


@pytest.mark.parametrize("backward", [by_autograd_grad, by_torch_func])
def test_layers_whose_backward_is_out_of_sight_step_as_under_sgd_and_are_warned_of_once(
    backward: Callable[[nn.Module, Tensor], None],
) -> None:
    """Silence would leave the user with SGD at a learning rate chosen for K-FAC."""
    model, twin = mlp(), mlp()
    optimizer, reference = (
        KFACOptimizer(model, lr=0.1, factor_update_period=1),
        torch.optim.SGD(twin.parameters(), lr=0.1),
    )
    for step in range(3):
        optimizer.zero_grad()
        backward(model, batch(step))
        with pytest.warns(UserWarning, match=rf"2 {UNSEEN} \('0', '2'\)") if step == 0 else nullcontext():
            optimizer.step()
        reference.zero_grad()
        square_loss(twin(batch(step))).backward()
        reference.step()
        assert optimizer.metrics()["unpreconditioned_blocks"] == 2
    torch.testing.assert_close(clones(model.parameters()), clones(twin.parameters()), rtol=1e-12, atol=0)


def test_layers_that_the_loss_does_not_reach_are_not_warned_of() -> None:
    model = Branches()
    optimizer = KFACOptimizer(model, lr=0.1)
    square_loss(model(batch(), "left")).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


# -- activation checkpointing ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two segments, each run under `torch.utils.checkpoint`, with a head outside or inside."""

    def __init__(self, reentrant: bool | None, everything: bool = False, nested: bool = False) -> None:
        super().__init__()
        self.first, self.second = mlp(1, sizes=(4, 4)), mlp(2, sizes=(4, 4))
        self.head = mlp(3, sizes=(4, 3))
        self.reentrant, self.everything, self.nested = reentrant, everything, nested

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return self.run(self.second, x.tanh()) if self.nested else self.second(x.tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(lambda t: self.inner(self.first(t)), x)
        return self.run(self.head, x) if self.everything else self.head(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of evaluation, where none comes
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loop", ["plain", "accumulated", "two forwards", "evaluation amid", "discarded"])
def test_activation_checkpointing_equals_the_plain_run(
    reentrant: bool, everything: bool, nested: bool, loop: str
) -> None:
    def run(model: nn.Module, zero_grad: Callable[[], None]) -> None:
        # Reentrant checkpointing needs an input that requires a gradient.
        x = batch().requires_grad_()
        if loop == "discarded":
            square_loss(model(batch(9, size=3).requires_grad_())).backward()
            zero_grad()
        if loop in ("plain", "discarded"):
            square_loss(model(x)).backward()
        elif loop == "accumulated":
            for part in x.split((3, 5)):
                (model(part).square().sum() / 16).backward()
        elif loop == "two forwards":
            parts = [model(part).square().sum() for part in x.split((3, 5))]
            (sum(parts) / 16).backward()
        else:
            loss = square_loss(model(x))
            with torch.no_grad():
                model(batch(9, size=3))
            loss.backward()

    factors = []
    for model in (Checkpointed(reentrant, everything, nested), Checkpointed(None)):
        optimizer = KFACOptimizer(model, lr=0.0)
        run(model, optimizer.zero_grad)
        optimizer.step()
        factors.append(optimizer.factors())
    assert_same_factors(*factors)


# -- steps that need no statistics -----------------------------------------------------------------------------


def test_no_tensor_hook_is_set_on_steps_that_need_no_statistics() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=3)
    hooked: list[int] = []
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda *call: hooked.append(len(call[-1]._backward_hooks or {})))
    train(model, optimizer, 7)
    assert [tuple(hooked[2 * i : 2 * i + 2]) for i in range(7)] == [(1, 1) if i % 3 == 0 else (0, 0) for i in range(7)]


def test_no_tensor_hook_is_set_where_no_gradient_will_come() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model)
    outputs: list[Tensor] = []
    model[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    for run in (evaluate, no_grad_forward_in_train_mode, inference):
        run(model)
    model[0].weight.requires_grad_(False)
    assert model(batch()).requires_grad, "the bias trains"
    assert len(outputs) == 4
    assert all(not output._backward_hooks for output in outputs)
    assert optimizer.metrics()["blocks_without_statistics"] == 2


# -- loss terms ------------------------------------------------------------------------------------------------

TOKENS, CLASSES = 5, 3


def token_output(model: nn.Module) -> Tensor:
    return model(batch(dim=4 * TOKENS).view(8, TOKENS, 4))


@pytest.mark.parametrize(
    ("rule", "terms"),
    [
        (LossTerms.EXAMPLES, 8),
        (LossTerms.POSITIONS, 8 * TOKENS),
        (LossTerms.ELEMENTS, 8 * TOKENS * CLASSES),
        (LossTerms.SUM, 1),
    ],
)
def test_each_rule_scales_g_by_its_number_of_terms_and_leaves_a(rule: LossTerms, terms: int) -> None:
    """The loss is a mean over these terms, so G is `terms · Σ g gᵀ` of its gradient."""
    model = mlp()
    recorder = Recorder(model)
    factors = factors_after(model, lambda m: (token_output(m).square().sum() / terms).backward(), loss_terms=rule)
    assert_same_factors(factors, recorder.factors(terms))


@pytest.mark.parametrize(
    ("rule", "loss"),
    [
        (LossTerms.EXAMPLES, lambda output: nn.functional.cross_entropy(output, torch.zeros(8, dtype=torch.long))),
        (LossTerms.ELEMENTS, lambda output: nn.functional.mse_loss(output, torch.ones_like(output))),
        (
            LossTerms.ELEMENTS,
            lambda output: nn.functional.binary_cross_entropy_with_logits(output, torch.ones_like(output)),
        ),
        (LossTerms.SUM, lambda output: output.square().sum()),
    ],
)
def test_under_its_rule_g_is_the_mean_of_the_squares_of_per_term_gradients(
    rule: LossTerms, loss: Callable[[Tensor], Tensor]
) -> None:
    """The Fisher of a mean over M terms is (1/M) Σ of the terms' outer products, each gradient being M times g."""
    model = mlp(sizes=(4, 3))
    factors = factors_after(model, lambda m: loss(m(batch())).backward(), loss_terms=rule)
    outputs = model(batch()).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(outputs), outputs)
    per_term = gradient * (1 if rule is LossTerms.SUM else 8 * (1 if rule is LossTerms.EXAMPLES else 3))
    terms = 1 if rule is LossTerms.SUM else 8 * (1 if rule is LossTerms.EXAMPLES else 3)
    torch.testing.assert_close(factors["0"][1][0], per_term.T @ per_term / terms)


@pytest.mark.parametrize("rule", list(LossTerms))
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_rule_adds_up_over_accumulated_micro_batches(rule: LossTerms, parts: int) -> None:
    def run(model: nn.Module) -> None:
        for part in batch().chunk(parts):
            (model(part).square().sum() / 10).backward()

    whole = factors_after(mlp(), lambda m: (m(batch()).square().sum() / 10).backward(), loss_terms=rule)
    assert_same_factors(factors_after(mlp(), run, loss_terms=rule), whole)


def test_terms_are_counted_for_forwards_with_a_backward_only() -> None:
    def run(model: nn.Module) -> None:
        model(batch(1, size=100))
        plain_step(model)
        model(batch(2, size=100))

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


def scaled_g(factors: Factors, scale: float) -> Factors:
    return {name: (a, g * scale) for name, (a, g) in factors.items()}


def test_set_loss_terms_overrides_the_rule() -> None:
    def run(model: nn.Module, optimizer: KFACOptimizer) -> None:
        optimizer.set_loss_terms(40)
        plain_step(model)
        optimizer.step()

    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0)
    run(model, optimizer)
    assert_same_factors(optimizer.factors(), scaled_g(factors_after(mlp(), plain_step), 40 / 8))


def test_set_loss_terms_adds_up_over_backwards_and_lasts_until_the_step() -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model, lr=0.0, factor_decay=1e-30, factor_update_period=1
    )  # each step shows its own statistics
    for terms in (10, 30):
        optimizer.set_loss_terms(terms)
        square_loss(model(batch())).backward()
    optimizer.step()
    twice = factors_after(mlp(), lambda m: [plain_step(m) for _ in range(2)])
    assert_same_factors(optimizer.factors(), scaled_g(twice, 40 / 16))
    optimizer.zero_grad()
    plain_step(model)
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=1e-9)


def test_loss_terms_stated_in_a_step_without_statistics_are_forgotten() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=2, factor_decay=1e-30)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            optimizer.set_loss_terms(1000)
        plain_step(model)
        optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=1e-9)


SUMMED, MEAN = MonteCarlo(nn.MSELoss(reduction="sum")), MonteCarlo(nn.MSELoss())


@pytest.mark.parametrize("options", [{"loss_terms": LossTerms.SUM}, {"estimate": SUMMED}], ids=["rule", "named"])
def test_set_loss_terms_is_refused_for_a_summed_loss(options: dict[str, Any]) -> None:
    optimizer = KFACOptimizer(mlp(), **options)
    with pytest.raises(ValueError, match=r"the loss is a sum.*pass another, or drop the call"):
        optimizer.set_loss_terms(3)


def test_the_loss_that_is_named_says_whether_it_has_terms_unless_the_user_does() -> None:
    KFACOptimizer(mlp(), estimate=MEAN).set_loss_terms(3)
    with pytest.raises(ValueError, match="the loss is a sum"):
        KFACOptimizer(mlp(), loss_terms=LossTerms.SUM, estimate=MEAN).set_loss_terms(3)


def call_layers(model: nn.Module) -> None:
    square_loss(model[2](model[1](model[0](batch())))).backward()


@pytest.mark.parametrize("rule", [LossTerms.EXAMPLES, LossTerms.POSITIONS, LossTerms.ELEMENTS])
def test_layers_called_outside_the_models_forward_count_with_stated_terms(rule: LossTerms) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, loss_terms=rule)
    optimizer.set_loss_terms(8)
    call_layers(model)
    optimizer.step()
    assert_same_factors(optimizer.factors(), factors_after(mlp(), plain_step), rtol=0)


def test_layers_called_outside_the_models_forward_need_no_terms_for_a_summed_loss() -> None:
    factors = factors_after(mlp(), call_layers, loss_terms=LossTerms.SUM)
    assert_same_factors(factors, factors_after(mlp(), plain_step, loss_terms=LossTerms.SUM), rtol=0)


def test_layers_called_outside_the_models_forward_for_evaluation_are_not_refused() -> None:
    def run(model: nn.Module) -> None:
        plain_step(model)
        with torch.no_grad():
            model[0](batch())
        model[0](batch())

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential, lambda m: nn.ModuleDict({"net": m})["net"]])
def test_a_model_wrapped_after_construction_is_counted_through_its_own_forward(wrap: Callable[..., nn.Module]) -> None:
    def run(model: nn.Module) -> None:
        square_loss(wrap(model)(batch())).backward()

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step), rtol=0)


def test_a_model_that_calls_itself_counts_as_one_forward() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp(1, sizes=(4, 4))

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self.layer(x if depth == 0 else self(x[:4], depth - 1)).tanh()

    model = Recursive()
    recorder = Recorder(model)
    factors = factors_after(model, lambda m: square_loss(m(batch())).backward())
    assert_same_factors(factors, recorder.factors(terms=8))


class Keyword(nn.Module):
    """Takes its tensors by keyword, inside a structure, and calls its layers with a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(sizes=(4, 3))

    def forward(self, *, inputs: dict[str, Any]) -> dict[str, Tensor]:
        return {"logits": self.net[0](input=inputs["x"])}


@pytest.mark.parametrize("rule", [LossTerms.EXAMPLES, LossTerms.POSITIONS, LossTerms.ELEMENTS])
def test_keyword_inputs_and_structured_outputs_equal_positional_ones(rule: LossTerms) -> None:
    def run(model: nn.Module) -> None:
        square_loss(model(inputs={"note": "no tensor", "x": batch()})["logits"]).backward()

    keyword = factors_after(Keyword(), run, loss_terms=rule)
    plain = factors_after(mlp(sizes=(4, 3)), plain_step, loss_terms=rule)
    assert_same_factors({"0": keyword["net.0"]}, plain, rtol=0)


def single(model: nn.Module) -> None:
    (model(batch()[0]).square().sum() / 2).backward()


def test_one_example_without_a_batch_dimension_equals_a_batch_of_one() -> None:
    def batched(model: nn.Module) -> None:
        (model(batch()[:1]).square().sum() / 2).backward()

    assert_same_factors(factors_after(mlp(), single), factors_after(mlp(), batched))


def test_examples_given_one_by_one_without_a_batch_dimension_equal_the_batch() -> None:
    def run(model: nn.Module) -> None:
        for x in batch():
            (model(x).square().sum() / 16).backward()

    assert_same_factors(factors_after(mlp(), run), factors_after(mlp(), plain_step))


def test_an_unbatched_image_equals_a_batch_of_one() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, dtype=torch.float64), nn.ReLU(), nn.Conv2d(3, 1, 2, dtype=torch.float64)
        )

    image = batch(size=2, dim=36).view(2, 6, 6)
    unbatched = factors_after(make(), lambda m: m(image).square().sum().backward())
    assert_same_factors(unbatched, factors_after(make(), lambda m: m(image[None]).square().sum().backward()))


class OnTheSide(nn.Module):
    """Takes what `pack` makes of a batch, and finds the batch in it by `unpack`."""

    def __init__(self, unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.net, self.unpack = mlp(), unpack

    def forward(self, *args: Any) -> Tensor:
        return self.net(self.unpack(*args))


def test_a_scalar_in_front_of_the_batch_is_not_the_batch() -> None:
    """A time or a noise level: it has no first dimension, so the first tensor that has one counts."""
    model = OnTheSide(lambda time, x: x * time)
    factors = factors_after(model, lambda m: square_loss(m(torch.tensor(1.0), batch())).backward())
    plain = factors_after(mlp(), plain_step)
    assert_same_factors({name: factors[f"net.{name}"] for name in plain}, plain, rtol=0)


@pytest.mark.parametrize("order", ["zero_grad first", "hooks first"])
def test_statistics_that_were_thrown_away_stay_so_without_hooks(order: str) -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    reference = KFACOptimizer(twin, lr=0.0, factor_update_period=1)
    plain_step(model)
    plain_step(twin)
    optimizer.step()
    reference.step()
    square_loss(model(1000 * batch())).backward()
    for each in (optimizer.zero_grad, optimizer.remove_hooks)[:: 1 if order == "zero_grad first" else -1]:
        each()
    plain_step(model)
    optimizer.step()
    assert_same_factors(optimizer.factors(), reference.factors(), rtol=0)


# -- copies of the model ---------------------------------------------------------------------------------------


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_averaging(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save, by_averaging])
def test_a_copy_of_the_model_is_inert_and_the_original_goes_on(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, twin = mlp(), mlp()
    optimizer = KFACOptimizer(model, lr=0.1, inverse_update_period=1, factor_update_period=1)
    train(model, optimizer, 2)
    copied = duplicate(model)
    assert_identical(clones(copied.parameters()), clones(model.parameters()))
    square_loss(copied(batch(9))).backward()
    train(model, optimizer, 2, start=2)
    train(twin, KFACOptimizer(twin, lr=0.1, inverse_update_period=1, factor_update_period=1), 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))


def test_a_copy_of_the_model_trains_with_an_optimizer_of_its_own() -> None:
    model = mlp()
    first = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    copied = copy.deepcopy(model)
    train(copied, KFACOptimizer(copied, lr=0.1, factor_update_period=1), 3)
    train(model, first, 3)
    assert_identical(clones(model.parameters()), clones(copied.parameters()))


def test_what_takes_the_place_of_hooks_in_copies_does_not_pile_up_over_generations() -> None:
    def hooks(*modules: nn.Module) -> list[int]:
        return [
            sum(map(len, (each._forward_pre_hooks, each._forward_pre_hooks_with_kwargs, each._forward_hooks)))
            + len(each._forward_hooks_with_kwargs)
            + len(each._forward_hooks_always_called)
            for each in modules
        ]

    model, criterion = mlp(), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(criterion))
    before = hooks(*model.modules(), criterion)
    for _ in range(3):
        model, criterion = copy.deepcopy((model, criterion))
        optimizer = KFACOptimizer(model, lr=0.1, estimate=MonteCarlo(criterion))
    assert hooks(*model.modules(), criterion) == before
    assert optimizer.summary().blocks


def test_a_pickled_model_does_not_need_the_package() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    for copied in (pickle.dumps(model), pickle.dumps(copy.deepcopy(model))):
        assert b"kfac_optim" not in copied
    assert optimizer.summary().blocks


# -- memory ----------------------------------------------------------------------------------------------------


def tensors_alive(size: int) -> int:
    """Tensors in this process whose first dimension is `size`: a batch, and what caches hold of other tests."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) and thing.shape[:1] == (size,) for thing in gc.get_objects())


@pytest.mark.parametrize("keep_loss", [False, True])
def test_after_the_step_no_activation_or_output_gradient_is_alive(keep_loss: bool) -> None:
    """Even while the user holds the loss, and so the graph's nodes, for logging."""
    before = tensors_alive(17)
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    x = batch(size=17)
    loss = square_loss(model(x))
    loss.backward()
    optimizer.step()
    if not keep_loss:
        del loss
    assert tensors_alive(17) == before + 1, "x itself"
    del x
    assert tensors_alive(17) == before


def test_a_forward_without_a_backward_is_freed_with_its_output() -> None:
    before = tensors_alive(19)
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    x = batch(size=19)
    output = model(x)
    reference = weakref.ref(x)
    del x, output
    assert tensors_alive(19) == before
    assert reference() is None
    assert optimizer.metrics()["blocks_without_statistics"] == 2


def test_the_input_of_a_layer_is_freed_by_the_backward_and_not_only_by_the_step() -> None:
    model = mlp(sizes=(4, 23, 3))
    optimizer = KFACOptimizer(model, lr=0.1)
    inputs: list[weakref.ref[Tensor]] = []
    model[2].register_forward_hook(lambda *call: inputs.append(weakref.ref(call[1][0])))
    square_loss(model(batch())).backward()
    gc.collect()
    assert [reference() for reference in inputs] == [None]
    optimizer.step()


# -- the private question to autograd --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulates", "to", "expected"),
    [
        (True, None, True),
        (True, "w", True),
        (True, "x", False),
        (False, "x", False),
        (False, "w", False),
        (False, "xw", False),
    ],
)
def test_autograd_tells_whether_a_backward_accumulates_into_a_weight(
    accumulates: bool, to: str | None, expected: bool
) -> None:
    """`torch._C._will_engine_execute_node` is private: this test says first when torch changes it."""
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    answers: list[bool] = []
    output = weight * x
    output.register_hook(lambda _: answers.append(reaches(weight)))
    inputs = None if to is None else [{"w": weight, "x": x}[name] for name in to]
    if accumulates:
        output.sum().backward(inputs=inputs)
    else:
        torch.autograd.grad(output.sum(), inputs)
    assert answers == [expected]


def test_a_layer_that_the_loss_does_not_use_is_looked_at_by_period_alone_until_it_is_used() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.late, self.share = mlp(), mlp(1), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.always(x) + self.share * self.late(x)

    model = Net()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=10)
    wanted = []
    for step in range(30):
        optimizer.zero_grad()
        model.share = float(step >= 24)
        square_loss(model(batch(step))).backward()
        wanted.append(optimizer._binding.coverage.blocks[2].wants_statistics())
        optimizer.step()
    assert [step for step, each in enumerate(wanted) if each] == [0, 1, 2, 10, 20, 25]
    assert "late.0" in optimizer.factors()


# -- a listener ------------------------------------------------------------------------------------------------


class Listener(ForwardListener):
    """Has forwards run in a mode, or not, and notes nothing."""

    def __init__(self, begins: bool) -> None:
        self.mode, self._begins = BaseTorchFunctionMode(), begins

    def begin_forward(self) -> bool:
        return self._begins or super().begin_forward()


@pytest.mark.parametrize(("begins", "is_product", "calls"), [(True, True, 1), (True, False, 1), (False, True, 0)])
def test_calls_that_a_listener_does_not_note_are_noted_at_the_layer_unless_it_wants_to_hear_nothing(
    begins: bool, is_product: bool, calls: int
) -> None:
    window, model, seen = CaptureWindow(LossTerms.EXAMPLES), mlp(), []

    def emit(call: LayerCall) -> bool:
        seen.append(call)
        return False

    watch = LayerWatch(model[0].weight, lambda: True, emit, lambda: None, lambda _: False, lambda _: None)
    window.listener, window.listening = Listener(begins), True
    watch_root(window, model)
    window.watch_calls(watch)
    window.hook(model[0], LayerHook(window, model[0], watch, -1, is_product=is_product))
    x = batch()
    model(x).sum().backward()
    assert len(seen) == calls
    for call in seen:
        assert_identical(call.input, x)
