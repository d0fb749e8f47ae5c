"""Failures of another K-FAC library that its users meet: what raised there, and what was silently wrong."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from helpers import oracles
from helpers.hazards.base import OPTIONS, STEPS, ByHand, Pair, Training, by_hand, hazard, plain_run
from helpers.plain import batch, direction, linear_factors, mlp, square_loss
from kfac_optim import ExponentialDecay, HyperparameterScheduler, KFACOptimizer

F64 = torch.float64


# -- what raised ---------------------------------------------------------------------------------------------------


class Activated(nn.Module):
    def __init__(self, activation: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.net, self.activation, self.in_place = mlp(1, sizes=(4, 4)), activation, in_place
        self.head = mlp(2, sizes=(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        if self.in_place:
            y += x
        else:
            y = y + x
        return self.head(self.activation(y))


@hazard("peers", nn.ReLU, nn.LeakyReLU, nn.SiLU)
def in_place_activation_after_a_layer(kind: Callable[..., nn.Module]) -> Pair:
    models = [nn.Sequential(mlp(1, sizes=(4, 6))[0], kind(inplace=i), mlp(2, sizes=(6, 3))[0]) for i in (True, False)]
    return plain_run(models[0]), by_hand(models[1])


@hazard("peers", nn.Tanh, nn.ReLU)
def in_place_residual_add_after_a_layer(activation: Callable[[], nn.Module]) -> Pair:
    return plain_run(Activated(activation(), True)), by_hand(Activated(activation(), False))


class Attention(nn.Module):
    """Self-attention, by torch's module or with its projections as linear layers."""

    def __init__(self, by_linear: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=F64)
        nn.init.normal_(attention.in_proj_bias)
        self.by_linear = by_linear
        if not by_linear:
            self.attention = attention
            return
        packed = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
        self.projections = nn.ModuleList(_linear(weight, bias) for weight, bias in packed)
        self.out = _linear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 2)).repeat_interleave(2, dim=2).mul(torch.arange(1, 5, dtype=F64))
        if not self.by_linear:
            return self.attention(x, x, x, need_weights=False)[0]
        heads = [layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in self.projections]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=F64)
    layer.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    return layer


@hazard("peers")
def multihead_attention() -> Pair:
    """Its issue 267. The packed projections share one damping in torch's module, so factors are what is compared."""
    run, plain = Training(Attention(False), lr=0.0), ByHand(Attention(True), lr=0.0, kl_clip=None)
    for i, x in enumerate(run.steps()):
        square_loss(run.model(x)).backward()
        plain.backward(square_loss(plain.model(batch(100 + i))), terms=8)
        plain.step()
    ours, theirs = run.optimizer.factors(), plain.result()["factors"]
    packed = next(pair for name, pair in ours.items() if "out_proj" not in name)
    out = next(pair for name, pair in ours.items() if "out_proj" in name)
    q, k, v = (theirs[f"projections.{i}"] for i in range(3))
    return (packed, out), ((q[0], torch.cat([q[1], k[1], v[1]])), theirs["out"])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(1, sizes=(4, 3)), mlp(2, sizes=(4, 3))

    def forward(self, x: Tensor, used: str) -> Tensor:
        return sum(branch(x) for name, branch in (("1", self.first), ("2", self.second)) if name in used)


@hazard("peers", ["1", "12", "2", "12"], ["12", "1", "1", "2"], ["1", "1", "1", "1"])
def module_unused_in_the_first_or_a_later_step(path: list[str]) -> Pair:
    run, plain = Training(Branches()), ByHand(Branches())
    for x, used in zip(run.steps(), path, strict=True):
        square_loss(run.model(x, used)).backward()
        plain.backward(square_loss(plain.model(x, used)), terms=8)
        plain.step()
    ours, theirs = run.result(), plain.result()
    if "2" not in "".join(path):  # it was never measured, and by hand its factors are empty
        theirs["factors"].pop("second.0")
    return ours, theirs


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aside = mlp(1, sizes=(4, 5)), mlp(2, sizes=(5, 3)), mlp(3, sizes=(5, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.head(x), self.aside(x)


@hazard("peers")
def output_that_the_loss_does_not_use() -> Pair:
    run = Training(TwoOutputs())
    for x in run.steps():
        square_loss(run.model(x)[0]).backward()
    plain = by_hand(TwoOutputs(), lambda model, x: square_loss(model(x)[0]))
    plain["factors"].pop("aside.0")
    return run.result(), plain


@hazard("peers", "weight and bias", "bias", "weight")
def parameter_frozen_after_construction(which: str) -> Pair:
    """A frozen bias stays put, and its column stays in the block; a frozen weight ends the layer's statistics."""
    run, plain = Training(mlp()), Training(mlp())
    for i in range(STEPS):
        x = batch(100 + i)
        if i == 2:
            for name in which.split(" and "):
                getattr(run.model[0], name).requires_grad_(False)
        run.optimizer.zero_grad()
        square_loss(run.model(x)).backward()
        run.step()
        # the same without freezing: gradients, and statistics of a frozen weight, are taken away
        plain.optimizer.zero_grad()
        first = plain.model[0]
        if i >= 2 and "weight" in which:
            hidden = F.linear(x, first.weight.detach(), first.bias if which == "weight" else first.bias.detach())
            plain.optimizer.set_loss_terms(8)
            square_loss(plain.model[2](plain.model[1](hidden))).backward()
        else:
            square_loss(plain.model(x)).backward()
            if i >= 2:
                first.bias.grad = None
        plain.optimizer.step()
    return run.result(), plain.result()


@hazard("peers")
def training_in_eval_mode() -> Pair:
    return plain_run(mlp().eval()), by_hand()


def conv(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, **options), nn.Tanh(), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.LazyLinear(3)]
    model = nn.Sequential(*layers).to(F64)
    model(torch.zeros(1, 3, 5, 6, dtype=F64))
    return model


def images(number: int) -> Tensor:
    return torch.randn(6, 3, 5, 6, generator=torch.Generator().manual_seed(number), dtype=F64)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def expanded(x: Tensor) -> Tensor:
    return x[:, :1].expand(-1, 3, -1, -1)


@hazard("peers", channels_last, transposed, strided, expanded)
def input_of_another_memory_layout(change: Callable[[Tensor], Tensor]) -> Pair:
    run, plain = Training(conv(padding=1)), Training(conv(padding=1))
    if change is channels_last:
        run.model.to(memory_format=torch.channels_last)
    for i in range(STEPS):
        x = images(i)
        for each, given in ((run, change(x)), (plain, change(x).contiguous())):
            each.optimizer.zero_grad()
            square_loss(each.model(given)).backward()
            each.step()
    return run.result(), plain.result()


@hazard("peers", "vector", "image")
def unbatched_input(kind: str) -> Pair:
    run, plain = (
        Training(mlp() if kind == "vector" else conv()[:3]),
        Training(mlp() if kind == "vector" else conv()[:3]),
    )
    for i in range(STEPS):
        x = batch(100 + i, size=1) if kind == "vector" else images(i)[:1]
        for each, given in ((run, x[0]), (plain, x)):
            each.optimizer.zero_grad()
            (each.model(given).square().sum() / 2).backward()
            each.step()
    return run.result(), plain.result()


@hazard("peers", "one layer", "every layer")
def lazy_layers_shaped_by_a_dry_run_after_construction(kind: str) -> Pair:
    plain = mlp()
    model = lazy(every=kind == "every layer")
    optimizer = KFACOptimizer(model, **OPTIONS)
    with torch.no_grad():
        model(batch())
    model.load_state_dict(plain.state_dict())
    return Training(model, optimizer).train().result(), by_hand(plain)


@hazard("peers", "one layer", "every layer")
def lazy_layers_shaped_by_the_first_training_forward(kind: str) -> Pair:
    """That very step is preconditioned, like all others."""
    model, plain = lazy(every=kind == "every layer"), mlp()
    optimizer = KFACOptimizer(model, **OPTIONS)
    loss = square_loss(model(batch(100)))
    plain.load_state_dict(model.state_dict())
    run = Training(model, optimizer)
    loss.backward()
    run.step()
    return run.train(3, start=1).result(), by_hand(plain)


def lazy(every: bool) -> nn.Sequential:
    return nn.Sequential(nn.LazyLinear(5, dtype=F64), nn.Tanh(), nn.LazyLinear(3, dtype=F64) if every else mlp()[2])


# -- what was silently wrong ---------------------------------------------------------------------------------------


@hazard("peers", {"dilation": 2}, {"dilation": (1, 2)}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"})
def convolution_with(options: dict[str, Any]) -> Pair:
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 2, 3, dtype=F64, **options), images(0)
    optimizer = KFACOptimizer(model, lr=0.0)
    square_loss(model(x)).backward()
    optimizer.step()
    rows = oracles.conv_rows(model, x)
    gradients = oracles.conv_gradient_rows(model, model(x).detach() / len(x))
    return optimizer.factors()[""], oracles.factors(rows, gradients, terms=len(x), bias=True)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(1, sizes=(4, 4)), mlp(2, sizes=(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).tanh()).tanh())


@hazard("peers")
def module_called_twice() -> Pair:
    return plain_run(Twice()), by_hand(Twice())


class Tied(nn.Module):
    """Two layers with one weight and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = mlp(1, sizes=(4, 4))[0], mlp(9, sizes=(4, 4))[0], mlp(2, sizes=(4, 3))[0]
        self.outer.weight, self.outer.bias = self.inner.weight, self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.inner(x).tanh()).tanh())


@hazard("peers")
def tied_weights() -> Pair:
    """Both layers count, as one that is called twice."""
    ours, plain = plain_run(Tied()), by_hand(Twice())
    names = {"inner.0": "inner", "head.0": "head"}
    return ours, {**plain, "factors": {names[name]: pair for name, pair in plain["factors"].items()}}


@hazard("peers")
def no_grad_forward_in_train_mode() -> Pair:
    run = Training(mlp())
    for x in run.steps():
        with torch.no_grad():
            run.model(batch(7))
        loss = square_loss(run.model(x))
        with torch.no_grad():
            run.model(batch(8))
        loss.backward()
    return run.result(), by_hand()


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=self.reentrant)


@hazard("peers", True, False)
def activation_checkpointing_with_reentrant(reentrant: bool) -> Pair:
    ours, plain = plain_run(Recomputed(reentrant)), by_hand()
    return ours, {**plain, "factors": {f"net.{name}": pair for name, pair in plain["factors"].items()}}


@hazard("peers")
def g_updated_once_under_two_backwards() -> Pair:
    run = Training(mlp())
    for x in run.steps():
        loss = square_loss(run.model(x)) / 2
        loss.backward(retain_graph=True)
        loss.backward()
    return run.result(), by_hand()


@hazard("peers")
def parametrized_layer_that_is_left_out_and_says_so() -> Pair:
    runs = []
    for skip in ((), ("2",)):
        model = mlp()
        register_parametrization(model[2], "weight", nn.Tanh())
        runs.append(Training(model, skip_layers=skip))
    reasons = {p.name: p.reason for p in runs[0].optimizer.summary().parameters if p.block is None}
    assert len(reasons) == 2
    assert "parametrized" in reasons["2.bias"]
    return runs[0].train().result(), runs[1].train().result()


@hazard("peers")
def state_dict_with_wrong_names_is_refused_and_changes_nothing() -> Pair:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp()[0], mlp()[2]

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x).tanh())

    other = Training(Other()).train()
    run = Training(mlp()).train(2)
    with pytest.raises(ValueError, match="encoder"):
        run.optimizer.load_state_dict(other.optimizer.state_dict())
    return run.train(2, start=2).result(), by_hand()


# -- precision -----------------------------------------------------------------------------------------------------


@hazard("peers", float("inf"), float("nan"))
def one_bad_gradient_under_mixed_precision(value: float) -> Pair:
    run, scaler = Training(mlp()), GradScaler("cpu", init_scale=2.0**10)
    for i in range(STEPS):
        for bad in (True, False) if i == 2 else (False,):
            run.optimizer.zero_grad()
            scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
            if bad:
                run.model[0].weight.grad[0, 0] = value
            scaler.step(run.optimizer)
            scaler.update()
    run.check()
    return run.result(), by_hand()


@hazard("peers")
def grad_scaler_of_the_present_torch() -> Pair:
    run, scaler = Training(mlp()), GradScaler("cpu", init_scale=2.0**10)
    for i in range(STEPS):
        run.optimizer.zero_grad()
        scaler.scale(square_loss(run.model(batch(100 + i)))).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.check()
    return run.result(), by_hand()


@hazard("peers", rtol=1e-5)
def bfloat16_model_with_float32_factors() -> Pair:
    model = mlp(sizes=(4, 3)).to(torch.bfloat16)
    x = batch().to(torch.bfloat16)
    run = Training(model, lr=0.0)
    square_loss(model(x).float()).backward()
    run.step()
    output = model(x).detach().requires_grad_()
    square_loss(output.float()).backward()
    return run.optimizer.factors()["0"], linear_factors(x.float(), output.grad.float(), terms=8)


@hazard("peers")
def float64_model_decomposed_in_float64() -> Pair:
    """With a damping that float32 could not see beside the factors."""
    model, x, damping = mlp(sizes=(4, 3)), batch(), 1e-12
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = KFACOptimizer(model, lr=1e-3, damping=damping, kl_clip=None)
    square_loss(model(x)).backward()
    optimizer.step()
    weight, bias = model[0].weight, model[0].bias
    a, g = linear_factors(x, (x @ start[0].T + start[1]) / 8, terms=8)
    step = -1e-3 * direction(torch.cat([weight.grad, bias.grad[:, None]], dim=1), a[0], g[0], damping)
    return (weight.detach() - start[0], bias.detach() - start[1]), (step[:, :-1], step[:, -1])


# -- schedules, checkpoints, copies --------------------------------------------------------------------------------


@hazard("peers")
def schedule_that_is_of_the_base_value_and_never_truncates_a_period_to_zero() -> Pair:
    run, plain = Training(mlp()), ByHand(mlp())
    schedules = [
        HyperparameterScheduler(run.optimizer, key, ExponentialDecay(0.5))
        for key in ("damping", "inverse_update_period")
    ]
    for i, x in enumerate(run.steps(6)):
        square_loss(run.model(x)).backward()
        for schedule in schedules:
            schedule.step()
        plain.options["damping"] = OPTIONS["damping"] * 0.5 ** (i + 1)
        plain.options["inverse_update_period"] = (2, 1, 1, 1, 1, 1)[i]  # 1.5 is rounded to even
        plain.backward(square_loss(plain.model(x)), terms=8)
        plain.step()
    return run.result(), plain.result()


@hazard("peers", 1, 2, 4, rtol=0)
def resumed_run_to_the_bit(at: int) -> Pair:
    first = Training(mlp()).train(at)
    file = io.BytesIO()
    torch.save([first.model.state_dict(), first.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    second = Training(mlp(5))
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    second.start = first.start
    return second.train(6 - at, start=at).result(), plain_run(count=6)


@hazard("peers", pickle.dumps, copy.deepcopy)
def model_pickled_or_copied_with_its_hooks(duplicate: Callable[[Any], Any]) -> Pair:
    """The copy trains under an optimizer of its own, and neither run disturbs the other."""
    run = Training(mlp()).train(2)
    made = duplicate(run.model)
    twin = Training(pickle.loads(made) if isinstance(made, bytes) else made)
    fresh = mlp()
    fresh.load_state_dict(twin.model.state_dict())
    for i in range(2, STEPS):
        for each, start in ((run, i), (twin, i - 2)):
            each.train(1, start=start)
    return (run.result(), twin.result()), (by_hand(), by_hand(fresh, batches=range(2)))


@hazard("peers")
def hooks_removed_from_the_model() -> Pair:
    """Nothing of ours is left: the model trains on under SGD, and under a new optimizer as at first."""
    model = mlp()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    optimizer = KFACOptimizer(model, **{**OPTIONS, "lr": 0.0})
    square_loss(model(batch())).backward()
    optimizer.step()
    optimizer.remove_hooks()
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    model.zero_grad()
    return plain_run(model), by_hand()
