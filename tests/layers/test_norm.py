import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import STRUCTURES, Bias, any_loss, sizes, snapshot
from helpers.oracles import assert_same
from helpers.plain import block
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kfac_optim import DEFAULT_ADAPTERS, KFACOptimizer, LossTerms, Structure, Subsample, WeightSharing
from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.factors.second_moments import on_host
from kfac_optim.factors.subsampling import Draw
from kfac_optim.layers import norm_statistics

pytestmark = pytest.mark.usefixtures("float64")

KEPT = (Structure.DENSE, Structure.DIAGONAL)
FAMILIES = ["layer", "rms", "group", "batch", "instance"]


@dataclass(frozen=True)
class NormCase:
    """One layer and the shape of one input; features are the trailing dimensions or dimension `axis`."""

    family: str
    shape: tuple[int, ...]
    trailing: int
    """Dimensions of `normalized_shape`; 0 for the families with a channel axis."""
    batched: bool
    bias: Bias
    training: bool
    running: bool
    """Whether running statistics are kept."""
    eps: float | None
    channels_last: bool

    @property
    def axis(self) -> int:
        return 1 if self.batched else 0

    @property
    def feature_axes(self) -> tuple[int, ...]:
        ndim = len(self.shape)
        return tuple(range(ndim - self.trailing, ndim)) if self.trailing else (self.axis,)

    @property
    def examples(self) -> int:
        return self.shape[0] if self.batched else 1

    def input(self) -> Tensor:
        tensor = 1 + 2 * torch.randn(self.shape)
        if self.channels_last and not self.trailing:
            return tensor.movedim(self.axis, -1).contiguous().movedim(-1, self.axis)
        return tensor

    def module(self) -> nn.Module:
        eps = {} if self.eps is None else {"eps": self.eps}
        channels = self.shape[self.axis] if not self.trailing else 0
        space = len(self.shape) - 1 - self.batched
        if self.family == "layer":
            module: nn.Module = nn.LayerNorm(self.shape[-self.trailing :], bias=self.bias is not Bias.ABSENT, **eps)
        elif self.family == "rms":
            module = nn.RMSNorm(self.shape[-self.trailing :], **eps)
        elif self.family == "group":
            module = nn.GroupNorm(2, channels, **eps)
        elif self.family == "batch":
            kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[space]
            module = kind(channels, track_running_stats=self.running, **eps)
        else:
            kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[space - 1]
            module = kind(channels, affine=True, track_running_stats=self.running, **eps)
        for param in module.parameters():
            nn.init.normal_(param)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2.0)
        if self.bias is Bias.FROZEN and getattr(module, "bias", None) is not None:
            module.bias.requires_grad_(False)
        return module.train(self.training)


@st.composite
def norm_cases(draw: st.DrawFn, family: str | None = None) -> NormCase:
    family = family or draw(st.sampled_from(FAMILIES))
    trailing = draw(sizes(2)) if family in ("layer", "rms") else 0
    batched = True if family in ("group", "batch") else draw(st.integers(0, 3)) > 0
    if trailing:
        between = draw(st.lists(sizes(3), max_size=2)) if batched else []
        inner = [*between, *(draw(st.integers(2, 3)) for _ in range(trailing))]
    else:
        channels = 2 * draw(st.integers(2, 3)) if family == "group" else draw(sizes(3))
        space = draw(st.integers(1 if family == "instance" else 0, 3))
        inner = [channels, *(draw(st.integers(2, 3)) for _ in range(space))]
    return NormCase(
        family=family,
        shape=(*((draw(st.integers(2, 4)),) if batched else ()), *inner),
        trailing=trailing,
        batched=batched,
        bias=draw(st.sampled_from(Bias)),
        training=draw(st.booleans()),
        running=draw(st.booleans()),
        eps=draw(st.sampled_from([None, 0.1])),
        # torch 2.13 crashes (CPU) in the backward of a channels-last GroupNorm without a gradient of its bias.
        channels_last=draw(st.booleans()) and family != "group",
    )


# -- oracles -----------------------------------------------------------------------------------------------------


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def unit_gradients(case: NormCase, module: nn.Module, features: Tensor, gradient: Tensor, sharing: WeightSharing):
    """`[rows, features, out]`: what each example, or each position of it, alone gives the parameters, by autograd."""
    module = copy.deepcopy(module)  # keeps its running statistics
    output = module(features)
    params = list(trained(module).values())
    lead = [axis for axis in range(len(case.shape)) if axis not in case.feature_axes]
    if sharing is WeightSharing.REDUCE:
        lead = lead[:1] if case.batched else []
    rows = []
    for position in itertools.product(*(range(case.shape[axis]) for axis in lead)):
        mask = torch.zeros_like(gradient)
        index: list[int | slice] = [slice(None)] * len(case.shape)
        for axis, at in zip(lead, position, strict=True):
            index[axis] = at
        mask[tuple(index)] = 1
        grads = torch.autograd.grad(output, params, gradient * mask, retain_graph=True)
        rows.append(torch.stack([part.flatten() for part in grads], dim=-1))
    return torch.stack(rows)


def backward(module: nn.Module, features: Tensor) -> Tensor:
    """Gradient with respect to the output."""
    output = module(features)
    output.retain_grad()
    any_loss(output).backward()
    assert output.grad is not None
    return output.grad


def stacked(tensors: dict[str, Tensor]) -> Tensor:
    """Weight and bias as `[features, out, 1]`."""
    return torch.stack([tensor.flatten() for tensor in tensors.values()], dim=-1).unsqueeze(-1)


# -- factors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(data=st.data(), sharing=st.sampled_from(WeightSharing), structure=st.sampled_from(STRUCTURES))
def test_the_factor_of_each_unit_is_the_second_moment_of_its_gradients(
    family: str, data: st.DataObject, sharing: WeightSharing, structure: tuple[Structure, Structure]
) -> None:
    assume(structure[1] is not Structure.IDENTITY)
    case = data.draw(norm_cases(family))
    module, features = case.module(), case.input()
    assume(trained(module).keys() >= {"weight"})
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, structure=structure)
    module_before = copy.deepcopy(module)
    gradient = backward(module, features)
    optimizer.step()
    u = unit_gradients(case, module_before, features, gradient, sharing)
    expected = case.examples * torch.einsum("nfp,nfq->fpq", u, u)
    if structure[1] is Structure.DIAGONAL:
        expected = expected.diagonal(dim1=1, dim2=2)
    a, g = optimizer.factors()[""]
    assert a is None
    assert_same(g, expected, rtol=1e-8)


@given(case=norm_cases(), sharing=st.sampled_from(WeightSharing))
def test_rows_are_the_gradients_of_each_unit_and_sum_to_the_parameters(case: NormCase, sharing: WeightSharing) -> None:
    module, features = case.module(), case.input()
    before = copy.deepcopy(module)
    gradient = backward(module, features)
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", set(trained(module)))
    spec = type(spec)(spec.name, spec.params, 1, spec.out_dim, spec.groups, spec.structure, sharing)
    call = LayerCall(features, gradient, training=case.training)
    stats = adapter.statistics(before, spec, call, torch.float64)
    a, g = stats.rows()
    assert_same(g.flatten(1, 2).transpose(0, 1), unit_gradients(case, before, features, gradient, sharing), rtol=1e-8)
    matrix = adapter.pack(spec, [param.grad for param in trained(module).values()])
    assert_same(matrix, stacked({name: param.grad for name, param in trained(module).items()}))
    assert_same(torch.einsum("xnro,xnri->xoi", g, a), matrix, rtol=1e-8)
    assert stats.count == a.shape[1] * a.shape[2]
    assert_same(stats.input_moment(Structure.DENSE), torch.full((spec.groups, 1, 1), float(stats.count)))
    for part, param in zip(adapter.unpack(spec, matrix), trained(module).values(), strict=True):
        assert torch.equal(part.reshape(param.shape), param.grad)


@pytest.mark.parametrize("choice", [Subsample(), Subsample(3), Subsample(3, 2)], ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), sharing=st.sampled_from(WeightSharing), structure=st.sampled_from(KEPT))
def test_moments_do_not_depend_on_how_many_examples_are_worked_on_at_a_time(
    family: str, choice: Subsample, data: st.DataObject, sharing: WeightSharing, structure: Structure
) -> None:
    assume(sharing is WeightSharing.EXPAND or choice.positions is None)
    case = data.draw(norm_cases(family))
    module, features = case.module(), case.input()
    adapter = DEFAULT_ADAPTERS[type(module)]
    (spec,) = adapter.specs(module, "", set(trained(module)))
    call = LayerCall(features, torch.randn(case.shape), training=case.training)
    found = []
    for in_cache in (1, 2 * features.numel() // case.examples, 2**17):
        stats = adapter.statistics(module, replace(spec, weight_sharing=sharing), call, torch.float64)
        stats.subsample(Draw(choice, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kfac_optim.factors.second_moments._IN_CACHE", in_cache)
            found.append(stats.output_moment(structure))
    _, g = stats.rows()
    expected = g.flatten(1, 2).mT @ g.flatten(1, 2)
    for moment in found:
        assert_same(moment, expected if structure is Structure.DENSE else expected.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("bias", [True, False])
def test_moments_on_an_accelerator_are_those_on_a_host(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [torch.randn(3, 4, 5) for _ in range(1 + bias)]
    expected = norm_statistics._moment(columns, Structure.DENSE)
    monkeypatch.setattr(norm_statistics, "on_host", lambda _: False)
    assert_same(norm_statistics._moment(columns, Structure.DENSE), expected)


def test_examples_may_be_drawn() -> None:
    layer = nn.LayerNorm(4).double()
    optimizer = KFACOptimizer(layer, lr=0.0, subsample=Subsample(1), factor_update_period=1)
    layer(torch.randn(6, 4, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    assert torch.linalg.matrix_rank(optimizer.factors()[""][1]).eq(1).all()


class _Mean(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.mean(1)


@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.LayerNorm(4, bias=False)])
def test_reduce_is_the_exact_empirical_fisher_of_each_unit_within_a_network(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), build(), nn.Tanh(), _Mean(), nn.Linear(4, 3))
    features, targets = torch.randn(6, 5, 3), torch.randint(3, (6,))

    def loss_of(params: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (example[None],)), target[None])

    params = {name: param.detach() for name, param in model.named_parameters()}
    each = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, features, targets)
    u = torch.stack([value for name, value in each.items() if name.startswith("1.")], dim=-1)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=WeightSharing.REDUCE)
    F.cross_entropy(model(features), targets).backward()
    optimizer.step()
    assert_same(optimizer.factors()["1"], (None, torch.einsum("nfp,nfq->fpq", u, u) / 6))


@pytest.mark.parametrize("sharing", WeightSharing)
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_several_backwards_through_one_forward_count_as_one_of_their_sum(
    family: str, sharing: WeightSharing, data: st.DataObject
) -> None:
    case = data.draw(norm_cases(family))
    module, features = case.module(), case.input()
    weights = torch.randn(3, *case.shape)
    measured = []
    for parts in (list(weights), [weights.sum(0)]):
        twin = copy.deepcopy(module)
        optimizer = KFACOptimizer(twin, lr=0.0, weight_sharing=sharing)
        output = twin(features)
        for part in parts:
            (output * part).sum().backward(retain_graph=True)
        optimizer.step()
        measured.append(optimizer.factors()[""])
    assert_same(measured[0], measured[1], rtol=1e-8)


@pytest.mark.parametrize("place", ["host", "accelerator", "accelerator, at once"])
@pytest.mark.parametrize(("build", "options"), [(nn.LayerNorm, {}), (nn.BatchNorm1d, {"subsample": Subsample(3)})])
def test_a_layer_to_which_no_gradient_comes_gives_no_sample(
    build: Callable[[int], nn.Module], options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place != "host":
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    factors = []
    for is_masked in (True, False):
        model = nn.ModuleList([nn.Linear(4, 4), build(4)])
        optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1, loss_terms=LossTerms.SUM, **options)
        for step, weight in enumerate((0.0, 1.0, 0.0, 2.0)):
            features = torch.linspace(-1, 1, 24).reshape(6, 4) ** 3 * (1 + weight)
            optimizer.zero_grad()
            loss = model[0](features).square().mean()
            if is_masked or weight > 0:
                loss = loss + weight * (model[1](features) - features).square().mean()
            loss.backward(retain_graph=place == "accelerator, at once")
            optimizer.step()
            assert block(optimizer, "1").is_ready == (step > 0)
            if step > 0:
                factors.append(optimizer.factors()["1"])
    assert_same(factors[:3], factors[3:])


@pytest.mark.parametrize("factor_dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.BatchNorm1d(4)])
def test_layers_narrower_or_wider_than_their_factors(
    build: Callable[[], nn.Module], factor_dtype: torch.dtype | None
) -> None:
    features = torch.randn(64, 4)
    features *= 1e-3  # where eps matters: torch takes that of float32 for a bfloat16 RMSNorm
    measured = []
    for dtype in (torch.bfloat16, torch.float64):
        module = build().to(dtype)
        if isinstance(module, nn.RMSNorm) and dtype is torch.float64:
            module.eps = torch.finfo(torch.float32).eps
        optimizer = KFACOptimizer(module, lr=0.0, factor_dtype=factor_dtype)
        output = module(features.bfloat16().to(dtype))
        output.backward(torch.linspace(-1, 1, 256).reshape(64, 4).bfloat16().to(dtype))
        optimizer.step()
        measured.append(optimizer.factors()[""][1])
    narrow = factor_dtype or torch.float32
    assert measured[0].dtype == narrow
    tolerance = 2e-2 if narrow is torch.bfloat16 else 1e-5
    largest = float(measured[1].abs().max())
    torch.testing.assert_close(measured[0].double(), measured[1].double(), rtol=0, atol=tolerance * largest)


def test_an_input_far_from_zero_is_standardised_before_it_is_rounded_to_the_dtype_of_the_factors() -> None:
    module, features = nn.LayerNorm(4, dtype=torch.float32), 300 + torch.randn(64, 4, dtype=torch.float32)
    measured = []
    for factor_dtype in (torch.bfloat16, torch.float32):
        optimizer = KFACOptimizer(module, lr=0.0, factor_dtype=factor_dtype)
        optimizer.zero_grad()
        module(features).square().sum().backward()
        optimizer.step()
        measured.append(optimizer.factors()[""][1].float())
    assert_same(measured[0], measured[1], rtol=1e-2)


@pytest.mark.parametrize("sharing", WeightSharing)
def test_an_empty_batch_counts_nothing(sharing: WeightSharing) -> None:
    module = nn.LayerNorm(3)
    optimizer = KFACOptimizer(module, lr=0.0, weight_sharing=sharing, factor_update_period=1)
    for features in (torch.randn(4, 2, 3), torch.randn(0, 2, 3)):
        before = optimizer.factors().get("")
        any_loss(module(features)).backward()
        optimizer.step()
    assert_same(optimizer.factors()[""], before, rtol=0)


# -- the step ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    case=norm_cases(),
    sharing=st.sampled_from(WeightSharing),
    kept=st.sampled_from([Structure.DENSE, Structure.DIAGONAL]),
    damping=st.sampled_from([1e-2, 1.0]),
)
def test_the_step_solves_the_system_of_each_unit_with_damping_added(
    case: NormCase, sharing: WeightSharing, kept: Structure, damping: float
) -> None:
    module, features = case.module(), case.input()
    optimizer = KFACOptimizer(
        module,
        lr=1.0,
        damping=damping,
        kl_clip=None,
        weight_sharing=sharing,
        structure=(Structure.DENSE, kept),
    )
    before, before_params = copy.deepcopy(module), snapshot(module)
    gradient = backward(module, features)
    optimizer.step()
    u = unit_gradients(case, before, features, gradient, sharing)
    fisher = case.examples * torch.einsum("nfp,nfq->fpq", u, u)
    if kept is Structure.DIAGONAL:
        fisher = torch.diag_embed(fisher.diagonal(dim1=1, dim2=2))
    grads = stacked({name: param.grad for name, param in trained(module).items()})
    expected = torch.linalg.solve(fisher + damping * torch.eye(fisher.shape[-1]), grads)
    moved = stacked({name: before_params[name] - param.detach() for name, param in trained(module).items()})
    assert float((moved - expected).abs().max()) < 1e-8 * float(grads.abs().max()) / damping + 1e-12
    if case.bias is Bias.FROZEN and "bias" in before_params:
        assert torch.equal(module.bias, before_params["bias"])


@pytest.mark.parametrize("mode", ["train", "eval", "tracking nothing"])
@pytest.mark.parametrize(
    "build",
    [nn.BatchNorm1d, lambda n, **options: nn.InstanceNorm1d(n, affine=True, **options)],
    ids=["batch", "instance"],
)
def test_buffers_are_those_of_plain_sgd(build: Callable[..., nn.Module], mode: str) -> None:
    ours = build(3, track_running_stats=mode != "tracking nothing").train(mode != "eval")
    theirs = copy.deepcopy(ours)
    batches = torch.randn(4, 5, 3, 6)
    for module, optimizer in (
        (ours, KFACOptimizer(ours, lr=0.1, factor_update_period=1)),
        (theirs, torch.optim.SGD(theirs.parameters(), 0.1)),
    ):
        for features in batches:
            optimizer.zero_grad()
            any_loss(module(features)).backward()
            optimizer.step()
    assert not torch.equal(ours.weight, theirs.weight)
    assert dict(ours.named_buffers()).keys() == dict(theirs.named_buffers()).keys()
    for left, right in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(left, right)


def test_the_mode_is_that_of_the_forward_not_of_the_step() -> None:
    module, features = nn.BatchNorm1d(3), 5 + torch.randn(6, 3)
    module.running_mean.fill_(1.0)
    before = copy.deepcopy(module)
    optimizer = KFACOptimizer(module, lr=0.0)
    output = module(features)
    module.eval()
    weights = torch.randn(6, 3)
    (output * weights).sum().backward()
    optimizer.step()
    case = NormCase("batch", (6, 3), 0, True, Bias.TRAINED, True, True, None, False)
    u = unit_gradients(case, before, features, weights, WeightSharing.EXPAND)
    assert_same(optimizer.factors()[""][1], 6 * torch.einsum("nfp,nfq->fpq", u, u))


def test_a_network_of_norms_trains() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 2),
        nn.GroupNorm(2, 6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.LayerNorm(24),
        nn.Linear(24, 3),
    )
    images, targets = torch.randn(12, 1, 5, 5), torch.randint(3, (12,))
    optimizer = KFACOptimizer(
        model, lr=0.3, momentum=0.9, damping=0.03, kl_clip=0.1, factor_update_period=1, inverse_update_period=10
    )
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(record.block is not None for record in optimizer.summary().parameters)
    assert losses[-1] < 0.2 * losses[0]


# -- what is left to SGD -----------------------------------------------------------------------------------------


class _Squared(nn.LayerNorm):
    """Does more with what it scales, unlike norms of channels, see `test_scale.py`."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).square()


def _weight_frozen() -> nn.Module:
    module = nn.LayerNorm(4)
    module.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        (_weight_frozen, {}, {"bias": "the weight it belongs to is not trained by this optimizer"}),
        (
            lambda: nn.LayerNorm(4),
            {"structure": {"0": (Structure.DENSE, Structure.IDENTITY)}},
            dict.fromkeys(("weight", "bias"), "structure keeps neither of its factors"),
        ),
        (
            lambda: _Squared(4),
            {},
            dict.fromkeys(("weight", "bias"), "_Squared has a forward of its own, which may not be that of LayerNorm"),
        ),
        (lambda: nn.SyncBatchNorm(4), {}, dict.fromkeys(("weight", "bias"), "no adapter for SyncBatchNorm")),
    ],
    ids=["weight frozen", "no factor", "subclass", "synchronised"],
)
def test_what_is_left_to_sgd_says_why(
    build: Callable[[], nn.Module], options: dict[str, object], expected: dict[str, str]
) -> None:
    model = nn.Sequential(build(), nn.Linear(4, 3))
    if isinstance(model[0], nn.SyncBatchNorm):
        model[0].eval()  # training needs a GPU
    optimizer = KFACOptimizer(model, lr=0.1, kl_clip=None, loss_terms=LossTerms.EXAMPLES, **options)
    records = {record.name: record for record in optimizer.summary().parameters}
    before = snapshot(model)
    any_loss(model(torch.randn(5, 4))).backward()
    optimizer.step()
    for name, reason in expected.items():
        assert (records[f"0.{name}"].block, records[f"0.{name}"].reason) == (None, reason)
        assert_same(before[f"0.{name}"] - getattr(model[0], name), 0.1 * getattr(model[0], name).grad)


def test_a_bias_without_training_is_left_out_of_the_block() -> None:
    module = nn.LayerNorm((2, 2))
    module.bias.requires_grad_(False)
    (block,) = KFACOptimizer(module).summary().blocks
    assert (block.params, block.groups, block.in_dim, block.out_dim) == (("weight",), 4, 1, 1)
    (block,) = KFACOptimizer(nn.LayerNorm((2, 2))).summary().blocks
    assert (block.params, block.groups, block.in_dim, block.out_dim) == (("weight", "bias"), 4, 1, 2)
    assert block.structure == (Structure.IDENTITY, Structure.DENSE)
