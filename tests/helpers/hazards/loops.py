"""Habits of training loops: what happens between, around and in the middle of forward, backward and step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.hazards.base import OPTIONS, STEPS, ByHand, Pair, Training, by_hand, hazard, plain_run
from helpers.plain import batch, clones, mlp, square_loss
from kfac_optim import KFACOptimizer

F64 = torch.float64


# -- gradients that the user changes -------------------------------------------------------------------------------


def by_norm(params: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.05)


def by_value(params: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(params, 0.02)


def by_norm_without_torch(params: list[nn.Parameter]) -> None:
    norm = sum(float(param.grad.square().sum()) for param in params) ** 0.5
    assert norm > 0.05
    for param in params:
        param.grad *= 0.05 / (norm + 1e-6)


def by_value_without_torch(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad[param.grad > 0.02] = 0.02
        param.grad[param.grad < -0.02] = -0.02


@hazard("loops", by_norm, by_value)
def clipping(clip: Callable[[list[nn.Parameter]], None]) -> Pair:
    run = Training(mlp())
    for x in run.steps():
        square_loss(run.model(x)).backward()
        clip(list(run.model.parameters()))
    return run.result(), by_hand(edit=by_norm_without_torch if clip is by_norm else by_value_without_torch)


def halve_gradient(param: Tensor) -> None:
    param.grad *= 0.5


@hazard("loops", "of a tensor", "after accumulation")
def gradient_hooks_of_the_user_on_a_weight(kind: str) -> Pair:
    run = Training(mlp())
    weight = run.model[0].weight
    if kind == "of a tensor":
        weight.register_hook(lambda gradient: gradient * 0.5)
    else:
        weight.register_post_accumulate_grad_hook(halve_gradient)
    return run.train().result(), by_hand(edit=lambda params: halve_gradient(params[0]))


# -- several forwards, losses and backwards per step -----------------------------------------------------------


@hazard("loops", (4, 4), (3, 3, 2), (1, 7))
def accumulation_with_a_partial_last_group(sizes: tuple[int, ...]) -> Pair:
    run = Training(mlp())
    for x in run.steps():
        for part in x.split(sizes):
            (run.model(part).square().sum() / (2 * len(x))).backward()
    return run.result(), by_hand()


@hazard("loops")
def an_epoch_whose_last_group_of_micro_batches_is_short_and_is_divided_as_if_it_were_full() -> Pair:
    run, plain, micro = Training(mlp()), ByHand(mlp()), 3
    for first in range(0, 8, micro):  # eight micro-batches: groups of 3, 3 and 2
        group = [batch(100 + i, size=4) for i in range(first, min(first + micro, 8))]
        for x in group:
            (square_loss(run.model(x)) / micro).backward()
        run.step()
        run.optimizer.zero_grad()
        x = torch.cat(group)
        plain.backward(square_loss(plain.model(x)) * len(group) / micro, terms=len(x))
        plain.step()
    return run.result(), plain.result()


def mean_of_outputs(output: Tensor) -> Tensor:
    return output.sin().sum() / len(output)


def both_losses(output: Tensor) -> Tensor:
    return square_loss(output) + mean_of_outputs(output)


@hazard("loops", "one sum", "one forward", "two forwards", "retain graph in the last too")
def two_losses(kind: str) -> Pair:
    run = Training(mlp())
    for x in run.steps():
        output = run.model(x)
        first, second = square_loss(output), mean_of_outputs(output)
        if kind == "one sum":
            both_losses(output).backward()
        elif kind == "two forwards":  # two passes over a batch: twice the rows, as in the plain run
            first.backward()
            mean_of_outputs(run.model(x)).backward()
        else:
            first.backward(retain_graph=True)
            second.backward(retain_graph=kind != "one forward")
    if kind != "two forwards":
        return run.result(), by_hand(forward=lambda model, x: both_losses(model(x)))
    plain = ByHand(mlp())
    for i in range(STEPS):
        x = batch(100 + i)
        loss = square_loss(plain.model(x)) + mean_of_outputs(plain.model(x))
        plain.backward(loss, terms=16)  # the rule adds up forwards, as for accumulation
        plain.step()
    return run.result(), plain.result()


@hazard("loops")
def the_same_loss_backpropagated_twice() -> Pair:
    run = Training(mlp())
    for x in run.steps():
        loss = square_loss(run.model(x))
        loss.backward(retain_graph=True)
        loss.backward()
    return run.result(), by_hand(forward=lambda model, x: 2 * square_loss(model(x)))


@hazard("loops")
def graphs_of_all_steps_kept_alive() -> Pair:
    """As by a list of losses that were not detached, retained for a later look."""
    run, kept = Training(mlp()), []
    for x in run.steps():
        kept.append(square_loss(run.model(x)))
        kept[-1].backward(retain_graph=True)
    return run.result(), by_hand()


class Heads(nn.Module):
    """A trunk with two heads: the forward of a multi-task model."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(1, sizes=(4, 5)), mlp(2, sizes=(5, 3)), mlp(3, sizes=(5, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.left(x), self.right(x)


@hazard("loops", "two backwards", "one backward", "both under one scale of uncertainty")
def tasks_that_share_a_trunk(kind: str) -> Pair:
    scale = 0.3 if "uncertainty" in kind else 1.0
    run = Training(Heads())
    for x in run.steps():
        left, right = run.model(x)
        if kind == "two backwards":
            square_loss(left).backward(retain_graph=True)
            mean_of_outputs(right).backward()
        else:
            (scale * (square_loss(left) + mean_of_outputs(right))).backward()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        left, right = model(x)
        return scale * (square_loss(left) + mean_of_outputs(right))

    return run.result(), by_hand(Heads(), loss)


@hazard("loops", "one forward over both", "two forwards")
def pairs_of_inputs_through_one_network(kind: str) -> Pair:
    """A siamese loss over 8 pairs: two forwards in one term, so the number of terms must be stated."""

    def contrast(left: Tensor, right: Tensor) -> Tensor:
        return (left - right).square().sum() / (2 * len(left))

    run, plain = Training(mlp()), ByHand(mlp())
    for i, x in enumerate(run.steps()):
        other = batch(50 + i)
        run.optimizer.set_loss_terms(8)
        if kind == "two forwards":
            contrast(run.model(x), run.model(other)).backward()
        else:
            contrast(*run.model(torch.cat([x, other])).chunk(2)).backward()
        plain.backward(contrast(plain.model(x), plain.model(other)), terms=8)
        plain.step()
    return run.result(), plain.result()


# -- gradients with respect to inputs ------------------------------------------------------------------------------


def by_autograd_grad(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = square_loss) -> Tensor:
    x = x.clone().requires_grad_()
    return (x + 0.1 * torch.autograd.grad(loss(model(x)), x)[0].sign()).detach()


def in_three_projected_steps(model: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        x = by_autograd_grad(model, x)
    return x


def by_backward_to_the_input(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    square_loss(model(x)).backward(inputs=[x])
    return (x + 0.1 * x.grad.sign()).detach()


def by_backward_through_frozen_weights(model: nn.Module, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    x = by_backward_to_the_input(model, x)
    model.requires_grad_(True)
    return x


def by_a_whole_backward_and_zero_grad(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    square_loss(model(x)).backward()
    return (x + 0.1 * x.grad.sign()).detach()


@hazard(
    "loops",
    by_autograd_grad,
    in_three_projected_steps,
    by_backward_to_the_input,
    by_backward_through_frozen_weights,
    by_a_whole_backward_and_zero_grad,
)
def adversarial_inputs(attack: Callable[[nn.Module, Tensor], Tensor]) -> Pair:
    run = Training(mlp())
    for x in run.steps():
        attacked = attack(run.model, x)
        if attack is by_a_whole_backward_and_zero_grad:
            run.optimizer.zero_grad()
        square_loss(run.model(attacked)).backward()
    plain = ByHand(mlp())
    for i in range(STEPS):
        x, times = batch(100 + i), 3 if attack is in_three_projected_steps else 1
        copied = mlp()
        copied.load_state_dict(plain.model.state_dict())
        for _ in range(times):
            x = by_autograd_grad(copied, x)
        plain.backward(square_loss(plain.model(x)), terms=8)
        plain.step()
    return run.result(), plain.result()


# -- several optimizers --------------------------------------------------------------------------------------------


def judge(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    return (model(real).square().sum() + (model(fake) - 1).square().sum()) / 16


@hazard("loops", "zero_grad before each backward", "discriminator frozen for the generator", "zero_grad after its step")
def generator_trained_through_a_discriminator(kind: str) -> Pair:
    """Each has an optimizer; the generator's backward also fills the discriminator's gradients and statistics."""

    def models() -> tuple[nn.Module, nn.Module]:
        return mlp(1, sizes=(4, 5, 4)), mlp(2, sizes=(4, 5, 2))

    generator, discriminator = (Training(model) for model in models())
    for i in range(STEPS):
        real, noise = batch(100 + i), batch(200 + i)
        if kind != "zero_grad after its step":
            discriminator.optimizer.zero_grad()
        judge(discriminator.model, real, generator.model(noise).detach()).backward()
        discriminator.step()
        if kind == "zero_grad after its step":
            discriminator.optimizer.zero_grad()
        generator.optimizer.zero_grad()
        if kind == "discriminator frozen for the generator":
            discriminator.model.requires_grad_(False)
        square_loss(discriminator.model(generator.model(noise))).backward()
        discriminator.model.requires_grad_(True)
        generator.step()
        if kind == "zero_grad after its step":
            discriminator.optimizer.zero_grad()

    plain_generator, plain_discriminator = (ByHand(model) for model in models())
    for i in range(STEPS):
        real, noise = batch(100 + i), batch(200 + i)
        with torch.no_grad():
            fake = plain_generator.model(noise)
        plain_discriminator.backward(judge(plain_discriminator.model, real, fake), terms=16)
        plain_discriminator.step()
        copied = models()[1].requires_grad_(False)
        copied.load_state_dict(plain_discriminator.model.state_dict())
        plain_generator.backward(square_loss(copied(plain_generator.model(noise))), terms=8)
        plain_generator.step()
    ours = generator.result(), discriminator.result()
    return ours, (plain_generator.result(), plain_discriminator.result())


@hazard("loops", "in the same iteration", "in turns")
def halves_of_a_model_under_two_optimizers(kind: str) -> Pair:
    def halves(model: nn.Module) -> list[KFACOptimizer]:
        return [KFACOptimizer(model[i].parameters(), model=model, **{**OPTIONS, "kl_clip": None}) for i in (0, 2)]

    model = mlp()
    start, optimizers = clones(model.parameters()), halves(model)
    plain = ByHand(mlp(), kl_clip=None)
    for i in range(STEPS):
        trained = [0, 1] if kind == "in the same iteration" else [i % 2]
        for optimizer in optimizers:
            optimizer.zero_grad()
        square_loss(model(batch(100 + i))).backward()
        for which in trained:
            optimizers[which].step()
            assert optimizers[which].metrics()["unpreconditioned_blocks"] == 0
        plain.model[0].requires_grad_(0 in trained)
        plain.model[2].requires_grad_(1 in trained)
        plain.backward(square_loss(plain.model(batch(100 + i))), terms=8)
        plain.step()
    moved = [end.detach() - begin for end, begin in zip(model.parameters(), start, strict=True)]
    ours = {"moved": moved, "factors": optimizers[0].factors() | optimizers[1].factors()}
    if kind == "in the same iteration":
        return ours, plain.result()
    # By hand the average ages by the steps of both; each optimizer counts its own.
    return {"moved": moved}, {"moved": _in_turns()}


def _in_turns() -> list[Tensor]:
    """Each half with a clock of its own: two runs that lend each other their weights."""
    model = mlp()
    start = clones(model.parameters())
    halves = [ByHand(mlp(), kl_clip=None) for _ in range(2)]
    for i in range(STEPS):
        run = halves[i % 2]
        run.model.load_state_dict(model.state_dict())
        run.model[0].requires_grad_(i % 2 == 0)
        run.model[2].requires_grad_(i % 2 == 1)
        run.backward(square_loss(run.model(batch(100 + i))), terms=8)
        run.step()
        model.load_state_dict(run.model.state_dict())
    return [end.detach() - begin for end, begin in zip(model.parameters(), start, strict=True)]


# -- recomputed activations ------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two segments and a head, as they are (None) or recomputed in backward."""

    def __init__(self, reentrant: bool | None, nested: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = mlp(1, sizes=(4, 4)), mlp(2, sizes=(4, 4)), mlp(3, sizes=(4, 3))
        self.reentrant, self.nested = reentrant, nested

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x) if self.reentrant is None else checkpoint(function, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return self.run(self.second, x.tanh()) if self.nested else self.second(x.tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(lambda t: self.inner(self.first(t)), x.requires_grad_()).tanh())


@hazard("loops", (False, False), (False, True), (True, False), (True, True))
def activation_checkpointing_reentrant_or_not_and_nested_or_not(kind: tuple[bool, bool]) -> Pair:
    return plain_run(Checkpointed(*kind)), by_hand(Checkpointed(None))


@hazard("loops", False, True)
def activation_checkpointing_with_accumulation_and_evaluation_amid(reentrant: bool) -> Pair:
    run = Training(Checkpointed(reentrant))
    for x in run.steps():
        for part in x.split((3, 5)):
            loss = run.model(part).square().sum() / 16
            with torch.no_grad():
                run.model(batch(7, size=2))
            loss.backward()
    return run.result(), by_hand(Checkpointed(None))
