"""Finding layers in a model: tied weights, parameters of other modules, and what is left to SGD for a reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import (
    assert_identical,
    assert_same_factors,
    batch,
    clones,
    direction,
    factors_after,
    gradient_matrix,
    layer_direction,
    linear_factors,
    mlp,
    sgd_step,
    square_loss,
    train,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer


def reasons(optimizer: KFACOptimizer) -> dict[str, str | None]:
    return {record.name: record.reason for record in optimizer.summary().parameters}


# -- tied weights ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two Linears that share a weight, used on different numbers of rows, with shared, separate or no biases."""

    def __init__(self, bias: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=bias != "none", dtype=torch.float64)
        self.second = nn.Linear(4, 4, bias=bias != "none", dtype=torch.float64)
        self.second.weight = self.first.weight
        if bias == "shared":
            self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.second(y[:3].tanh())


def run_tied(model: Tied) -> tuple[list[Tensor], list[Tensor]]:
    """One backward; the inputs of both uses and the gradients of both outputs."""
    x = batch()
    one, two = model(x)
    one.retain_grad()
    two.retain_grad()
    (one.square().sum() + two.sin().sum() / 5).backward()
    return [x, one.detach()[:3].tanh()], [one.grad, two.grad]


@pytest.mark.parametrize("bias", ["shared", "separate", "none"])
def test_tied_linears_share_a_block_that_averages_a_over_the_rows_of_both_and_sums_g(bias: str) -> None:
    model = Tied(bias)
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    before = [clones(model.first.parameters()), clones(model.second.parameters())]
    rows, gradients = run_tied(model)
    optimizer.step()
    a, g = linear_factors(torch.cat(rows), torch.cat(gradients), terms=8)
    if bias != "shared":
        a = a[:, :4, :4]
    assert_same_factors(optimizer.factors(), {"first": (a, g)})
    grad = gradient_matrix(model.first.weight.grad, model.first.bias.grad if bias == "shared" else None)
    step = 0.1 * direction(grad, a[0], g[0], 1e-3)
    torch.testing.assert_close(before[0][0] - model.first.weight, step[:, :4])
    if bias == "shared":
        torch.testing.assert_close(before[0][1] - model.first.bias, step[:, 4])
    if bias == "separate":
        for layer, start in ((model.first, before[0][1]), (model.second, before[1][1])):
            assert torch.equal(layer.bias, sgd_step(start, layer.bias.grad, 0.1))
        assert reasons(optimizer)["first.bias"] == "bias of a weight tied to other layers"
        assert reasons(optimizer)["second.bias"] == "bias of a weight tied to other layers"


def test_a_linear_tied_to_itself_equals_one_called_twice() -> None:
    class Called(nn.Module):
        def __init__(self, model: Tied) -> None:
            super().__init__()
            self.first = model.first

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y, self.first(y[:3].tanh())

    tied = factors_after(Tied("shared"), run_tied)
    assert_same_factors(tied, factors_after(Called(Tied("shared")), run_tied), rtol=0)


def test_of_tied_layers_one_without_a_backward_does_not_count() -> None:
    def first_only(model: Tied) -> None:
        square_loss(model(batch())[0]).backward()

    factors = factors_after(Tied("shared"), first_only)
    plain = Tied("shared")
    assert_same_factors(
        {"": factors["first"]}, factors_after(plain.first, lambda m: square_loss(m(batch())).backward())
    )


def test_convolutions_tied_by_their_weight_share_a_block_though_their_strides_differ() -> None:
    class Dilated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.near = nn.Conv1d(1, 2, 3, bias=False, dtype=torch.float64)
            self.far = nn.Conv1d(1, 2, 3, dilation=2, stride=2, bias=False, dtype=torch.float64)
            self.far.weight = self.near.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.near(x), self.far(x)], -1)

    x = batch(dim=9)[:, None]
    model = Dilated()
    factors = factors_after(model, lambda m: square_loss(m(x)).backward())
    output = model(x).detach().requires_grad_()
    square_loss(output).backward()
    near, far = output.grad.split([7, 3], -1)
    rows = torch.cat([x[:, 0].unfold(1, 3, 1).reshape(-1, 3), x[:, 0].unfold(1, 5, 2)[..., ::2].reshape(-1, 3)])
    gradients = torch.cat([part.transpose(1, 2).reshape(-1, 2) for part in (near, far)])
    assert_same_factors(factors, {"near": ((rows.T @ rows / len(rows))[None], (8 * gradients.T @ gradients)[None])})


def test_a_linear_tied_to_a_convolution_of_another_shape_is_left_to_sgd_with_the_reason() -> None:
    model = nn.Module()
    model.linear = nn.Linear(4, 6, bias=False)
    model.conv = nn.Conv2d(4, 6, 1, groups=1, bias=False)
    model.linear.weight = nn.Parameter(torch.randn(6, 4, 1, 1).view(6, 4))
    model.conv.weight = nn.Parameter(model.linear.weight.view(6, 4, 1, 1))
    blocks = KFACOptimizer(model).summary().blocks
    assert [block.name for block in blocks] == ["linear", "conv"], "a view is another parameter"
    grouped = nn.Module()
    grouped.one, grouped.two = nn.Conv1d(2, 4, 3, groups=2), nn.Conv1d(1, 4, 3)
    grouped.two.weight = grouped.one.weight
    with pytest.warns(UserWarning, match="nothing is preconditioned"):
        optimizer = KFACOptimizer(grouped)
    of_weight, of_bias = "tied to a layer of another shape", "bias of a weight tied to other layers"
    assert reasons(optimizer) == {"one.weight": of_weight, "one.bias": of_bias, "two.bias": of_bias}


class TiedCells(nn.Module):
    """Feeds one LSTM with another, of which the input weight may be the same."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (nn.LSTM(4, 4, dtype=torch.float64) for _ in range(2))
        shared = self.one.weight_ih_l0
        self.two.weight_ih_l0 = shared if is_tied else nn.Parameter(shared.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)[0])[0]


def test_other_matrices_of_layers_that_share_one_are_blocks_as_of_layers_that_share_none() -> None:
    own = {"one.weight_hh_l0", "two.weight_hh_l0"}
    x = batch(dim=20).view(-1, 5, 4)
    tied, apart = (
        factors_after(TiedCells(is_tied=is_tied), lambda m: square_loss(m(x)).backward()) for is_tied in (True, False)
    )
    assert tied.keys() == {"one.weight_ih_l0", *own}
    assert_same_factors({name: tied[name] for name in own}, {name: apart[name] for name in own})


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.middle(self.embedding(tokens)).tanh())


def test_a_linear_tied_to_an_embedding_shares_its_block_but_for_the_bias() -> None:
    optimizer = KFACOptimizer(TiedEmbedding(), lr=0.1)
    assert [block.name for block in optimizer.summary().blocks] == ["embedding", "middle"]
    assert reasons(optimizer) == {
        "embedding.weight": None,
        "output.bias": "bias of a weight tied to other layers",
        "middle.weight": None,
        "middle.bias": None,
    }


def test_a_linear_tied_to_an_embedding_that_is_skipped_is_left_to_sgd_with_the_reason() -> None:
    model = TiedEmbedding()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-6, skip_layers=["embedding"])
    assert [block.name for block in optimizer.summary().blocks] == ["middle"]
    assert reasons(optimizer) == {
        "embedding.weight": "shared with Embedding 'embedding', which is not preconditioned",
        "output.bias": "shared with Embedding 'embedding', which is not preconditioned",
        "middle.weight": None,
        "middle.bias": None,
    }
    before = model.output.weight.detach().clone()
    square_loss(model(torch.arange(6))).backward()
    optimizer.step()
    assert torch.equal(model.output.weight, sgd_step(before, model.output.weight.grad, 0.1))


def test_a_linear_tied_to_a_skipped_one_is_left_to_sgd_with_the_reason() -> None:
    optimizer = KFACOptimizer(Tied("shared"), skip_layers=["second"])
    assert reasons(optimizer) == {
        "first.weight": "shared with Linear 'second', which is not preconditioned",
        "first.bias": "shared with Linear 'second', which is not preconditioned",
    }


def test_one_module_under_two_names_is_one_layer() -> None:
    model = nn.Module()
    model.one = nn.Linear(4, 4)
    model.two = model.one
    summary = KFACOptimizer(model).summary()
    assert [block.name for block in summary.blocks] == ["one"]
    assert [record.name for record in summary.parameters] == ["one.weight", "one.bias"]


# -- layers that cannot be measured ----------------------------------------------------------------------------


def attention(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True, dtype=torch.float64)


def test_without_an_adapter_attention_trains_under_sgd() -> None:
    """MultiheadAttention never calls its `out_proj`; the feed-forward Linears beside it are preconditioned."""
    model, twin = attention(), attention()
    linear_alone = {nn.Linear: DEFAULT_ADAPTERS[nn.Linear]}
    optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9, kl_clip=1e-4, adapters=linear_alone, factor_update_period=1)
    assert [block.name for block in optimizer.summary().blocks] == ["linear1", "linear2"]
    x = batch(dim=12).view(8, 3, 4)
    attended = list(twin.self_attn.parameters())
    reference = torch.optim.SGD(attended, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        square_loss(model(x)).backward()
        for param, source in zip(attended, model.self_attn.parameters(), strict=True):
            param.grad = source.grad.clone()
        optimizer.step()
        reference.step()
    assert_identical(clones(model.self_attn.parameters()), clones(attended))


def orthogonal(layer: nn.Linear) -> nn.Module:
    return parametrizations.orthogonal(layer)


def pruned(layer: nn.Linear) -> nn.Module:
    return prune.random_unstructured(layer, "weight", amount=0.3)


@pytest.mark.parametrize("change", [orthogonal, pruned])
def test_a_layer_whose_weight_is_computed_from_other_parameters_takes_the_steps_of_sgd(
    change: Callable[[nn.Linear], nn.Module],
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(change(nn.Linear(4, 4, dtype=torch.float64)), nn.Linear(4, 3, dtype=torch.float64))

    model = make()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=1e-6, factor_update_period=1)
    assert [block.name for block in optimizer.summary().blocks] == ["1"]
    for name, reason in reasons(optimizer).items():
        assert name.startswith("1.") or "not trained by this optimizer" not in (reason or ""), "but it is trained"
    for i in range(3):
        before = clones(model[0].parameters())
        optimizer.zero_grad()
        square_loss(model(batch(i))).backward()
        optimizer.step()
        for param, start in zip(model[0].parameters(), before, strict=True):
            assert torch.equal(param, sgd_step(start, param.grad, 0.1))


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("change", [orthogonal, pruned])
def test_a_layer_parametrized_or_pruned_after_construction_takes_the_step_of_sgd(
    change: Callable[[nn.Linear], nn.Module], steps_before: int
) -> None:
    """Torch keeps the parameter that the optimizer holds: as `parametrizations.weight.original`, as `weight_orig`."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, factor_update_period=1)
    train(model, optimizer, steps_before)
    factors = optimizer.factors().get("0")
    weight = model[0].weight
    change(model[0])
    optimizer.zero_grad()
    square_loss(model(batch())).backward()
    assert any(weight is param for param in optimizer.param_groups[0]["params"])
    before = weight.detach().clone()
    with pytest.warns(UserWarning, match="1 layer has gradients but no statistics.*parametrized or pruned since"):
        optimizer.step()
    assert torch.equal(weight, sgd_step(before, weight.grad, 0.1))
    if steps_before:
        assert_identical(optimizer.factors()["0"], factors)
    else:
        assert "0" not in optimizer.factors()


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)], ids=["linear", "norm"])
def test_a_layer_whose_bias_is_pruned_after_construction_takes_the_step_of_sgd(make: Callable[[], nn.Module]) -> None:
    """The bias is trained as `bias_orig` and masked where it is used: it is no column of the matrix any more."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)).double()
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, factor_update_period=1)
    train(model, optimizer, 2)
    prune.l1_unstructured(model[0], "bias", amount=0.5)
    optimizer.zero_grad()
    square_loss(model(batch())).backward()
    before = clones(model[0].parameters())
    with pytest.warns(UserWarning, match="1 layer has gradients but no statistics.*parametrized or pruned since"):
        optimizer.step()
    for param, start in zip(model[0].parameters(), before, strict=True):
        assert torch.equal(param, sgd_step(start, param.grad, 0.1))
    prune.remove(model[0], "bias")
    train(model, optimizer, 1)
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_a_lazy_layer_trained_first_and_given_to_the_optimizer_later_is_preconditioned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3))
    model(batch(dtype=torch.float32))
    optimizer = KFACOptimizer(model, lr=0.1)
    assert [block.name for block in optimizer.summary().blocks] == ["0"]
    square_loss(model(batch(dtype=torch.float32))).backward()
    optimizer.step()
    assert optimizer.factors()["0"][0].shape == (1, 5, 5)


def test_integer_buffers_and_quantised_parameters_do_not_disturb() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))
    model[0].register_buffer("codes", torch.zeros(3, dtype=torch.int8))
    assert [block.name for block in KFACOptimizer(model).summary().blocks] == ["0"]


# -- odd modules -------------------------------------------------------------------------------------------------


def test_a_linear_subclass_whose_forward_differs_counts_what_it_calls_with() -> None:
    """The hook sees the module's input and output, so a subclass that keeps `W x + b` is measured right."""

    class Logged(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            self.calls += 1
            return super().forward(input)

    torch.manual_seed(0)
    model, plain = Logged(4, 3, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())

    def run(model: nn.Module) -> None:
        square_loss(model(batch())).backward()

    assert_same_factors(factors_after(model, run), factors_after(plain, run), rtol=0)


def test_a_users_forward_hook_that_replaces_the_output_comes_after_ours() -> None:
    """The statistics are the layer's own: the gradient of what it put out before the user's hook."""

    def double(*call: Any) -> Tensor:
        return 2 * call[-1]

    for register_first in (True, False):
        model = mlp(sizes=(4, 3))
        if register_first:
            model[0].register_forward_hook(double)
        optimizer = KFACOptimizer(model, lr=0.0)
        if not register_first:
            model[0].register_forward_hook(double)
        square_loss(model(batch())).backward()
        optimizer.step()
        output = mlp(sizes=(4, 3))(batch()).detach().requires_grad_()
        square_loss(2 * output).backward()
        assert_same_factors(optimizer.factors(), {"0": linear_factors(batch(), output.grad, 8)})


@pytest.mark.parametrize("index", [0, 2])
def test_a_layer_with_an_extra_parameter_of_its_own_leaves_that_to_sgd(index: int) -> None:
    model = mlp()
    model[index].register_parameter("gate", nn.Parameter(torch.ones((), dtype=torch.float64)))
    model[index].register_forward_hook(lambda module, _, output: output * module.gate)
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None)
    assert reasons(optimizer)[f"{index}.gate"] == "not used by the layer's block"
    before = copy.deepcopy(model[index])
    square_loss(model(batch())).backward()
    optimizer.step()
    layer = model[index]
    assert torch.equal(layer.gate, sgd_step(before.gate, layer.gate.grad, 0.1))
    expected = layer_direction(layer, optimizer.factors()[str(index)], 1e-3)[:, :-1]
    torch.testing.assert_close(before.weight - layer.weight, 0.1 * expected)


@pytest.mark.parametrize("stepped", [0, 2])
def test_a_layer_that_is_called_twice_is_measured_at_once_after_the_model_was_moved(stepped: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)

    def step() -> None:
        optimizer.zero_grad()
        x = batch().to(model[0].weight.dtype)
        (square_loss(model(x)) + square_loss(model(x + 1))).backward()
        optimizer.step()

    for _ in range(stepped):
        step()
    model.to(torch.float32)
    step()
    assert [block.strikes for block in optimizer._binding.coverage.blocks] == [0, 0]
    assert {block.clock.folds for block in optimizer._binding.coverage.blocks} == {stepped + 1}
