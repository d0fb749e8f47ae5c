"""What happens to the model: parts frozen, skipped, copied, saved, moved to another dtype, hooked by the user."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from helpers.hazards.base import OPTIONS, STEPS, ByHand, Pair, Training, by_hand, hazard, plain_run
from helpers.plain import batch, clones, mlp, square_loss
from kfac_optim import KFACOptimizer

F32, F64 = torch.float32, torch.float64


# -- parts that do not always train ------------------------------------------------------------------------------


@hazard("models", "first layer", "last layer", "by dropping gradients")
def layer_frozen_in_mid_training_and_unfrozen(kind: str) -> Pair:
    frozen = 2 if kind == "last layer" else 0
    run, plain = Training(mlp()), ByHand(mlp())
    for i, x in enumerate(run.steps(7)):
        trains = i not in (2, 3)
        if kind == "by dropping gradients":
            square_loss(run.model(x)).backward()
            if not trains:  # the backward reached the weight, so its rows count; without a gradient it stays
                run.model[0].zero_grad()
        else:
            run.model[frozen].requires_grad_(trains)
            square_loss(run.model(x)).backward()
            plain.model[frozen].requires_grad_(trains)
        plain.backward(square_loss(plain.model(x)), terms=8)
        if not trains:
            plain.model[frozen].zero_grad()
        plain.step()
    return run.result(), plain.result()


def first_layer(model: nn.Sequential) -> list[nn.Parameter]:
    return list(model[0].parameters())


def all_but_the_head(model: nn.Sequential) -> list[nn.Parameter]:
    return list(model[:-1].parameters())


def last_bias(model: nn.Sequential) -> list[nn.Parameter]:
    return [model[-1].bias]


@hazard("models", first_layer, all_but_the_head, last_bias)
def frozen_at_construction_and_unfrozen(part: Callable[[nn.Sequential], list[nn.Parameter]]) -> Pair:
    """As if it had been added then: what was frozen has no past."""
    runs = []
    for adds in (False, True):
        model = mlp(sizes=(4, 5, 5, 3))
        late = part(model)
        for param in late:
            param.requires_grad_(False)
        given = [param for param in model.parameters() if param.requires_grad] if adds else list(model.parameters())
        run = Training(model, KFACOptimizer(given, model=model, **OPTIONS)).train(2)
        for param in late:
            param.requires_grad_(True)
        if adds:
            run.optimizer.add_param_group({"params": late})
        runs.append(run.train(4, start=2).result())
    return runs[0], runs[1]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(1, sizes=(4, 5)), mlp(2, sizes=(5, 3)), mlp(3, sizes=(5, 3))

    def forward(self, x: Tensor, right: bool = False) -> Tensor:
        x = self.trunk(x).tanh()
        return self.right(x) if right else self.left(x)


@hazard("models", "lrrlrl", "llrlll", "rlllrr")
def layers_skipped_in_some_steps(path: str) -> Pair:
    run, plain = Training(Branches()), ByHand(Branches())
    for x, side in zip(run.steps(len(path)), path, strict=True):
        square_loss(run.model(x, side == "r")).backward()
        plain.backward(square_loss(plain.model(x, side == "r")), terms=8)
        plain.step()
    return run.result(), plain.result()


class Depth(nn.Module):
    """Stochastic depth over a whole batch: residual layers are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(mlp(i, sizes=(4, 4))[0] for i in range(3)), mlp(3, sizes=(4, 3))

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        for layer in self.layers:
            if torch.rand((), generator=generator) < 0.5:
                x = x + layer(x).tanh()
        return self.head(x)


@hazard("models")
def stochastic_depth() -> Pair:
    ours, theirs = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    run = Training(Depth())
    for x in run.steps(8):
        square_loss(run.model(x, ours)).backward()
    plain = by_hand(Depth(), lambda model, x: square_loss(model(x, theirs)), batches=range(8))
    return run.result(), plain


# -- averages of weights -----------------------------------------------------------------------------------------


def with_norm(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


@hazard("models", "mean", "exponential")
def averaged_model(kind: str) -> Pair:
    run, plain = Training(mlp()), ByHand(mlp())
    averaging = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)} if kind == "exponential" else {}
    averaged, expected = AveragedModel(run.model, **averaging), clones(plain.model.parameters())
    for number, x in enumerate(run.steps()):
        square_loss(run.model(x)).backward()
        averaged.update_parameters(run.model)
        square_loss(averaged(x)).item()
        plain.backward(square_loss(plain.model(x)), terms=8)
        for mean, param in zip(expected, plain.model.parameters(), strict=True):
            # the update comes before the step; its first one copies
            mean.lerp_(param.detach(), 1 / (number + 1) if kind == "mean" else float(number == 0) or 0.3)
        plain.step()
    return {"run": run.result(), "mean": clones(averaged.parameters())}, {"run": plain.result(), "mean": expected}


@hazard("models")
def batch_norm_updated_for_an_averaged_model() -> Pair:
    run, twin = Training(with_norm()), Training(with_norm())
    averaged = AveragedModel(run.model)
    for x in run.steps():
        square_loss(run.model(x)).backward()
        averaged.update_parameters(run.model)
        update_bn([batch(1), batch(2)], averaged)
        update_bn([batch(1), batch(2)], run.model)
    rows = [averaged.module[0](batch(i)).detach() for i in (1, 2)]
    mean = (rows[0].mean(0) + rows[1].mean(0)) / 2
    return (
        {"run": run.result(), "mean": averaged.module[1].running_mean},
        {"run": twin.train().result(), "mean": mean},
    )


@hazard("models")
def learning_rate_of_weight_averaging() -> Pair:
    run, plain = Training(mlp()), ByHand(mlp())
    scheduler = SWALR(run.optimizer, swa_lr=0.01, anneal_epochs=2, anneal_strategy="linear")
    for i in range(STEPS):
        run.train(1, start=i)
        scheduler.step()
        plain.backward(square_loss(plain.model(batch(100 + i))), terms=8)
        plain.step()
        plain.options["lr"] = 0.01 + 0.04 * max(0.0, 1 - (i + 1) / 2)  # from 0.05, in two steps
    return run.result(), plain.result()


# -- copies ------------------------------------------------------------------------------------------------------


def by_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def by_torch_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, by_pickle, by_torch_save]
WHEN = ["new", "trained", "between forward and backward", "between backward and step"]


def _copied_at(when: str, duplicate: Callable[[Training], Any]) -> tuple[Training, Any]:
    """Four steps, with the copy made at some point of the third."""
    run = Training(mlp())
    if when == "new":
        made = duplicate(run)
        return run.train(), made
    run.train(2)
    run.optimizer.zero_grad()
    if when == "trained":
        made = duplicate(run)
    loss = square_loss(run.model(batch(102)))
    if when == "between forward and backward":
        made = duplicate(run)
    loss.backward()
    if when == "between backward and step":
        made = duplicate(run)
    run.step()
    return run.train(1, start=3), made


@hazard("models", *COPIES)
def copy_of_the_model_while_it_trains(duplicate: Callable[[Any], Any]) -> Pair:
    """The original goes on; a copy is inert, and trains as a new model does."""
    ours, plain = {}, {}
    for when in WHEN:
        run, made = _copied_at(when, lambda run: duplicate(run.model))
        square_loss(made(batch(7))).backward()
        made.zero_grad()
        fresh = mlp()
        fresh.load_state_dict(made.state_dict())
        ours[when], plain[when] = (run.result(), plain_run(made)), (by_hand(), by_hand(fresh))
    return ours, plain


@hazard("models")
def copy_of_the_model_that_goes_on_from_the_state_dict() -> Pair:
    run = Training(mlp()).train(2)
    twin = Training(copy.deepcopy(run.model))
    twin.start = run.start
    twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    twin.train(2, start=2)
    return (twin.result(), run.train(2, start=2).result()), (by_hand(), by_hand())


@hazard("models", *COPIES)
def copy_of_model_and_optimizer_together(duplicate: Callable[[Any], Any]) -> Pair:
    """Copy and original each go on as the original would have, whichever trains first."""
    ours, plain = [], []
    for copy_first in (False, True):
        run = Training(mlp()).train(2)
        run.optimizer.zero_grad()
        twin = Training(*duplicate((run.model, run.optimizer)))
        twin.start = run.start
        for each in (twin, run) if copy_first else (run, twin):
            each.train(3, start=2)
        ours += [run.result(), twin.result()]
        plain += [by_hand(batches=range(5))] * 2
    return ours, plain


@hazard("models", "the optimizer first", "a scheduler too", "a found model", "unequal groups")
def copy_of_optimizer_and_model_with(kind: str) -> Pair:
    """A deep copy of the whole training state, in any order."""

    def build() -> tuple[Training, Any]:
        model = mlp()
        if kind == "a found model":
            run = Training(model, KFACOptimizer(model.parameters(), **OPTIONS))
        elif kind == "unequal groups":
            groups = [{"params": model[2].parameters(), "lr": 0.01}, {"params": model[0].parameters(), "damping": 0.5}]
            run = Training(model, KFACOptimizer(groups, model=model, **OPTIONS))
        else:
            run = Training(model)
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5) if "scheduler" in kind else None
        return run, scheduler

    def go_on(run: Training, scheduler: Any, count: int, start: int = 0) -> None:
        for i in range(start, start + count):
            run.train(1, start=i)
            if scheduler is not None:
                scheduler.step()

    whole, unbroken = build()
    go_on(whole, unbroken, 5)
    run, scheduler = build()
    go_on(run, scheduler, 2)
    run.optimizer.zero_grad()
    optimizer, model, followed = copy.deepcopy((run.optimizer, run.model, scheduler))
    twin = Training(model, optimizer)
    twin.start = run.start
    go_on(twin, followed, 3, start=2)
    go_on(run, scheduler, 3, start=2)
    return (run.result(), twin.result()), (whole.result(), whole.result())


# -- other dtypes ------------------------------------------------------------------------------------------------


def to_double(model: nn.Module) -> nn.Module:
    return model.double()


def to_bfloat16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def to_half(model: nn.Module) -> nn.Module:
    return model.half()


def _train_in_dtype(run: Training, count: int, start: int = 0) -> Training:
    dtype = next(run.model.parameters()).dtype
    for i in range(start, start + count):
        run.optimizer.zero_grad()
        square_loss(
            run.model(batch(100 + i).to(dtype)).float() if dtype.itemsize < 4 else run.model(batch(100 + i))
        ).backward()
        run.step()
    return run


@hazard("models", to_double, to_bfloat16, to_half, rtol=0)
def model_moved_to_another_dtype_after_construction(move: Callable[[nn.Module], nn.Module]) -> Pair:
    late = mlp(dtype=F32)
    run = Training(late)
    move(late)
    early = Training(move(mlp(dtype=F32)))
    run.start = early.start
    ours, plain = (_train_in_dtype(each, STEPS).result() for each in (run, early))
    dtypes = {str(factor.dtype) for pair in ours["factors"].values() for factor in pair}
    return (ours, sorted(dtypes)), (plain, ["torch.float64" if move is to_double else "torch.float32"])


@hazard("models", "without momentum", "with momentum")
def model_moved_to_float64_in_mid_training(kind: str) -> Pair:
    """Factors and inverses follow: as if they had been loaded into an optimizer of the moved model.

    Momentum buffers are those of `optim.SGD`, which leaves them in the dtype in which they began.
    """
    options = {"momentum": 0.0 if kind == "without momentum" else 0.9}
    run = Training(mlp(dtype=F32), **options)
    for i in range(2):
        run.optimizer.zero_grad()
        square_loss(run.model(batch(100 + i, dtype=F32))).backward()
        run.step()
    state, weights = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.model).double()
    run.model.double()
    moved = Training(weights, **options)
    moved.optimizer.load_state_dict(state)
    if kind == "with momentum":
        for param in weights.parameters():
            moved.optimizer.state[param]["momentum_buffer"] = moved.optimizer.state[param]["momentum_buffer"].float()
    run.start = moved.start
    return run.train(4, start=2).result(), moved.train(4, start=2).result()


# -- inputs ------------------------------------------------------------------------------------------------------


class Keyword(nn.Module):
    """Takes its tensor by name, or within a dict, and returns it in another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: dict[str, Tensor] | None = None, *, x: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.net(inputs["x"] if x is None else x)}


class NamedLayer(nn.Module):
    """Calls its layers by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](input=self.net[0](input=x).tanh())


@hazard("models", "by keyword", "in a dict", "layers by keyword")
def inputs_passed(kind: str) -> Pair:
    run = Training(NamedLayer() if kind == "layers by keyword" else Keyword())
    for x in run.steps():
        if kind == "layers by keyword":
            output = run.model(x)
        else:
            output = (run.model(x=x) if kind == "by keyword" else run.model({"x": x}))["logits"]
        square_loss(output).backward()
    ours, plain = run.result(), by_hand()
    return ours, {**plain, "factors": {f"net.{name}": pair for name, pair in plain["factors"].items()}}


# -- hooks of the user's own -------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """What the hooks below make of `mlp()`, written into its forward."""

    def __init__(self, change_input: bool, change_output: bool, backward: bool) -> None:
        super().__init__()
        self.net, self.changes = mlp(), (change_input, change_output, backward)

    def forward(self, x: Tensor) -> Tensor:
        change_input, change_output, backward = self.changes
        x = self.net[0](2 * x if change_input else x)
        x = (3 * x if change_output else x).tanh()
        if backward:  # the gradient that leaves the last layer is halved
            x = x / 2 + x.detach() / 2
        return self.net[2](x)


@hazard(
    "models",
    *[(kind, when) for kind in ("input", "output", "backward", "gradients seen") for when in ("before", "after")],
)
def user_hooks(variant: tuple[str, str]) -> Pair:
    """That change a layer's input, its output or the gradient it hands on, set before or after construction."""
    kind, when = variant
    model, seen = mlp(), []

    def hook() -> None:
        if kind == "input":
            model[0].register_forward_pre_hook(lambda _, args: (2 * args[0],))
        elif kind == "output":
            model[0].register_forward_hook(lambda *args: 3 * args[2])
        elif kind == "backward":
            model[2].register_full_backward_hook(lambda *args: (args[1][0] / 2,))
        else:
            for module in model.modules():
                module.register_full_backward_hook(lambda *args: seen.append(args[2][0]))
                module.register_full_backward_pre_hook(lambda *args: seen.append(args[1][0]))

    if when == "before":
        hook()
    run = Training(model)
    if when == "after":
        hook()
    for x in run.steps():
        square_loss(run.model(x.requires_grad_())).backward()
    ours = run.result()
    assert len(seen) == (8 * STEPS if kind == "gradients seen" else 0)
    plain = by_hand(Wrapped(kind == "input", kind == "output", kind == "backward"))
    return ours, {**plain, "factors": {name[4:]: pair for name, pair in plain["factors"].items()}}


class Chain(nn.Module):
    def __init__(self, tripled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv1d(1, 3, 2, dtype=F64), nn.Linear(9, 3, dtype=F64)
        self.tripled = tripled

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x[:, None])
        return self.head((3 * x if self.tripled else x).tanh().flatten(1))


@hazard("models", "before", "after")
def user_hook_on_a_convolution_set(when: str) -> Pair:
    """The output that counts is the layer's own, whichever hook was there first."""
    model = Chain(tripled=False)

    def hook() -> None:
        model.conv.register_forward_hook(lambda *args: 3 * args[2])

    if when == "before":
        hook()
    run = Training(model)
    if when == "after":
        hook()
    return run.train().result(), plain_run(Chain(tripled=True))


# -- modules under several names -----------------------------------------------------------------------------------


@hazard("models", "used once", "used twice")
def module_registered_twice(kind: str) -> Pair:
    def build() -> nn.Sequential:
        model = mlp(sizes=(4, 4, 3))
        if kind == "used twice":
            model.insert(2, model[0])
            model.insert(3, nn.Tanh())
        else:
            model[1].alias = model[0]
        return model

    return plain_run(build()), by_hand(build())


@hazard("models", "of the last", "of the middle", "of all")
def optimizer_built_anew_on_the_same_model(which: str) -> Pair:
    """As in a notebook cell that is run again: the old optimizer, dropped or kept, does not disturb the new one."""
    model, kept = mlp(), []
    for i in range(3):
        optimizer = KFACOptimizer(model, **{**OPTIONS, "lr": 0.0})
        square_loss(model(batch(i))).backward()
        if which == "of all" or (which == "of the middle") == (i == 1):
            kept.append(optimizer)
    model.zero_grad()
    return plain_run(model), by_hand()


@hazard("models", "positional", "by name")
def parameters_given_without_the_model(kind: str) -> Pair:
    model = mlp()
    given = model.parameters() if kind == "positional" else model.named_parameters()
    return Training(model, KFACOptimizer(given, **OPTIONS)).train().result(), by_hand()
