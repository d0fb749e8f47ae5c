"""`nn.MultiheadAttention` against the same attention written with a Linear for each projection."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, Structure, WeightSharing
from kfac_optim.layers.attention import _NotedAttention

pytestmark = pytest.mark.usefixtures("float64")


class Inputs(Enum):
    SELF = "query, key and value are one"
    MEMORY = "key and value are one"
    THREE = "all different"


@dataclass(frozen=True)
class Case:
    """An attention layer and what it is called with; shapes are `[batch, positions, features]`."""

    inputs: Inputs
    bias: bool
    separate: bool
    queries: int
    keys: int
    batch_first: bool
    masked: bool
    need_weights: bool

    def module(self, dropout: float = 0.0) -> nn.MultiheadAttention:
        key_dims = {"kdim": 3, "vdim": 5} if self.separate else {}
        return nn.MultiheadAttention(4, 2, dropout, self.bias, batch_first=self.batch_first, **key_dims)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.randn(3, self.queries, 4)
        if self.separate:
            return query, torch.randn(3, self.keys, 3), torch.randn(3, self.keys, 5)
        if self.inputs is Inputs.SELF:
            return query, query, query
        key = torch.randn(3, self.keys, 4)
        return query, key, key if self.inputs is Inputs.MEMORY else torch.randn(3, self.keys, 4)

    def arguments(self, query: Tensor, key: Tensor) -> dict[str, object]:
        mask = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
        # Two keys stay: the scores of a single one do not matter, and what is left of their gradient is rounding.
        mask[:, 2:] = torch.rand(query.shape[1], key.shape[1] - 2) < 0.4
        return {"attn_mask": mask if self.masked else None, "need_weights": self.need_weights}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    separate = draw(st.booleans())
    inputs = Inputs.THREE if separate else draw(st.sampled_from(Inputs))
    queries, keys = draw(st.integers(2 if inputs is Inputs.SELF else 1, 4)), draw(st.integers(2, 4))
    return Case(inputs, *(draw(st.booleans()), separate, queries, keys), *(draw(st.booleans()) for _ in range(3)))


class Projections(nn.Module):
    """The same attention, one Linear for each projection."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        wide = attention.embed_dim
        weights = (
            attention.in_proj_weight.chunk(3)
            if attention.in_proj_weight is not None
            else (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        )
        biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            setattr(self, name, linear(weight, bias))
        self.out = linear(attention.out_proj.weight, attention.out_proj.bias)
        self.heads, self.wide = attention.num_heads, wide

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            projection(tensor).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection, tensor in ((self.q, query), (self.k, key), (self.v, value))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, None if mask is None else ~mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight.data.copy_(weight)
    if bias is not None:
        made.bias.data.copy_(bias)
    return made


def call(module: nn.MultiheadAttention, tensors: tuple[Tensor, Tensor, Tensor], **arguments: object) -> Tensor:
    """In the layout of the module, with `is` kept; the result `[batch, positions, features]`."""
    if module.batch_first:
        return module(*tensors, **arguments)[0]
    turned = {id(tensor): tensor.transpose(0, 1) for tensor in tensors}
    return module(*(turned[id(tensor)] for tensor in tensors), **arguments)[0].transpose(0, 1)


def loss(output: Tensor) -> Tensor:
    return output.square().sum() / len(output)


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    # Gradients of the keys may cancel to rounding, so an error is measured against 1 and not against them.
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-9, atol=1e-14)


def of_group(factors: tuple[Tensor, Tensor], index: int) -> tuple[Tensor, Tensor]:
    """`A` and `G` of query, key or value; a single `A` serves all."""
    a, g = factors
    return a[index % len(a)].unsqueeze(0), g[index : index + 1]


@given(case=cases(), sharing=st.sampled_from(WeightSharing))
def test_factors_are_those_of_a_linear_for_each_projection(case: Case, sharing: WeightSharing) -> None:
    attention = case.module()
    plain = Projections(attention)
    tensors = case.tensors()
    arguments = case.arguments(*tensors[:2])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, *tensors: Tensor) -> Tensor:
            return call(self.attention, tensors, **arguments)

    ours = KFACOptimizer(Model(), lr=0.0, weight_sharing=sharing)
    theirs = KFACOptimizer(plain, lr=0.0, weight_sharing=sharing)
    loss(ours._binding.model(*tensors)).backward()
    output = plain(*tensors, arguments["attn_mask"])
    loss(output).backward()
    ours.step()
    theirs.step()
    got, expected = ours.factors(), theirs.factors()
    assert_close(got["attention.out_proj"], expected["out"])
    for index, name in enumerate("qkv"):
        a, g = expected[name]
        if case.separate:
            inner = attention.get_parameter(f"{name}_proj_weight").shape[1]
            pair = got[f"attention.{name}_proj"]
            assert_close(pair, (a[:, :inner, :inner], g))
        else:
            # Keys that no query sees have no gradient and are no rows of the keys' A, but queries they all are.
            a = expected["q"][0] if case.inputs is Inputs.SELF else a
            assert_close(of_group(got["attention.in_proj"], index), (a, g))
            assert len(got["attention.in_proj"][0]) == (1 if case.inputs is Inputs.SELF else 3)


@given(case=cases(), seed=st.integers(0, 9))
def test_outputs_gradients_and_random_numbers_are_those_of_the_module_alone(case: Case, seed: int) -> None:
    watched = case.module(dropout=0.5)
    alone = copy.deepcopy(watched)
    optimizer = KFACOptimizer(watched, lr=0.1)
    tensors = case.tensors()
    arguments = case.arguments(*tensors[:2])
    results = []
    for module in (alone, watched):
        torch.manual_seed(seed)
        leaves = {id(tensor): tensor.clone().requires_grad_() for tensor in tensors}
        output = call(module, tuple(leaves[id(tensor)] for tensor in tensors), **arguments)
        loss(output).backward()
        grads = [param.grad for param in module.parameters()] + [leaf.grad for leaf in leaves.values()]
        results.append([output, torch.rand(1), *grads])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_extra_key_and_value_biases_and_a_zero_attention_are_torchs() -> None:
    watched = nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True)
    alone = copy.deepcopy(watched)
    optimizer = KFACOptimizer(watched, lr=0.1)
    x = torch.randn(5, 3, 4)
    for module in (watched, alone):
        loss(module(x, x, x)[0]).backward()
    for left, right in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    optimizer.step()
    reasons = {record.name: record.reason for record in optimizer.summary().parameters if record.block is None}
    assert set(reasons) == {"bias_k", "bias_v"}


def test_an_unbatched_sequence_is_one_example() -> None:
    single, batch = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    batch.load_state_dict(single.state_dict())
    x = torch.randn(5, 4)
    factors = []
    for module, tensor in ((single, x), (batch, x.unsqueeze(1))):
        optimizer = KFACOptimizer(nn.Sequential(Self(module)), lr=0.0)
        optimizer.set_loss_terms(1)
        optimizer._binding.model(tensor).square().sum().backward()
        optimizer.step()
        factors.append(optimizer.factors())
    for name, pair in factors[0].items():
        assert_same(pair, factors[1][name])


class Self(nn.Module):
    """Self-attention with one argument."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("structure", [(Structure.DENSE, Structure.DENSE), (Structure.DIAGONAL, Structure.DENSE)])
def test_the_step_solves_each_projections_own_system(structure: tuple[Structure, Structure]) -> None:
    attention = nn.MultiheadAttention(4, 2)
    optimizer = KFACOptimizer(Self(attention), lr=1.0, kl_clip=None, damping=0.1, structure=structure)
    before = attention.in_proj_weight.detach().clone(), attention.in_proj_bias.detach().clone()
    loss(optimizer._binding.model(torch.randn(5, 3, 4))).backward()
    optimizer.step()
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    grad = torch.cat([weight.grad.view(3, 4, 4), bias.grad.view(3, 4, 1)], dim=-1)
    expected = oracles.solve(oracles.damped_kronecker(*optimizer.factors()["attention.in_proj"], grad, 0.1), grad)
    moved = torch.cat([(before[0] - weight).view(3, 4, 4), (before[1] - bias).view(3, 4, 1)], dim=-1)
    assert_same(moved, expected, rtol=1e-8)


def test_two_calls_of_one_layer_are_two_uses() -> None:
    attention = nn.MultiheadAttention(4, 2)
    plain = Projections(attention)
    x, y = torch.randn(3, 2, 4), torch.randn(3, 6, 4)
    ours, theirs = KFACOptimizer(attention, lr=0.0), KFACOptimizer(plain, lr=0.0)
    for optimizer in (ours, theirs):
        optimizer.set_loss_terms(3)
    (call(attention, (x, x, x)).square().sum() + call(attention, (y, y, y)).square().sum()).backward()
    (plain(x, x, x).square().sum() + plain(y, y, y).square().sum()).backward()
    ours.step()
    theirs.step()
    assert_same(ours.factors()["out_proj"], theirs.factors()["out"])
    for index, name in enumerate("qkv"):
        assert_same(of_group(ours.factors()["in_proj"], index), theirs.factors()[name])


def test_evaluation_takes_the_fast_path_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, name=name, original=original: taken.append(name) or original(*args)
        )
    model = nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), Self(nn.MultiheadAttention(4, 2, batch_first=True))
    )
    optimizer = KFACOptimizer(model, lr=0.1)
    x = torch.randn(3, 5, 4)
    with torch.no_grad():
        model.eval()(x)
    assert taken == ["_transformer_encoder_layer_fwd", "_native_multi_head_attention"]
    loss(model.train()(x)).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_steps_without_statistics_call_torchs_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = _NotedAttention.__call__
    model = Self(nn.MultiheadAttention(4, 2))
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=3)
    monkeypatch.setattr(_NotedAttention, "__call__", lambda *args, **kw: calls.append(1) or original(*args, **kw))
    counts = []
    for _ in range(4):
        calls.clear()
        optimizer.zero_grad()
        loss(model(torch.randn(3, 5, 4))).backward()
        optimizer.step()
        counts.append(len(calls))
    assert counts == [1, 0, 0, 1]
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_a_skipped_out_projection_leaves_the_rest() -> None:
    model = Self(nn.MultiheadAttention(4, 2))
    optimizer = KFACOptimizer(model, lr=0.1, skip_layers=["*.out_proj"])
    by_name = {record.name: record for record in optimizer.summary().parameters}
    assert by_name["attention.out_proj.weight"].reason == "skip_layers entry '*.out_proj'"
    assert by_name["attention.in_proj_weight"].block == "attention.in_proj"
    loss(model(torch.randn(3, 5, 4))).backward()
    optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


@pytest.mark.filterwarnings("ignore:kfac_optim. nothing is preconditioned")
@pytest.mark.parametrize("trained", ["in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_frozen_parts_are_left_alone(trained: str) -> None:
    model = Self(nn.MultiheadAttention(4, 2))
    for name, param in model.attention.named_parameters():
        param.requires_grad_(name == trained)
    optimizer = KFACOptimizer([param for param in model.parameters() if param.requires_grad], lr=0.1, model=model)
    loss(model(torch.randn(3, 5, 4))).backward()
    optimizer.step()
    blocks = [block.name for block in optimizer.summary().blocks]
    assert blocks == (
        [] if trained == "in_proj_bias" else [f"attention.{trained.removesuffix('_weight').removesuffix('.weight')}"]
    )


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_a_checkpoint_says_whether_the_inputs_are_shared(loaded: str) -> None:
    def build() -> tuple[nn.MultiheadAttention, KFACOptimizer]:
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(4, 2, batch_first=True)
        return attention, KFACOptimizer(attention, lr=0.1, momentum=0.9, factor_update_period=1)

    def train(attention: nn.MultiheadAttention, optimizer: KFACOptimizer, seeds: range) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            query, memory = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
            optimizer.zero_grad()
            loss(attention(query, memory, memory)[0]).backward()
            optimizer.step()

    straight, optimizer = build()
    train(straight, optimizer, range(3))
    weights, state = copy.deepcopy(straight.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(straight, optimizer, range(3, 6))
    resumed, optimizer = build()
    if loaded == "after":
        train(resumed, optimizer, range(1))
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(3, 6))
    for left, right in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_layer_that_is_called_by_itself_leaves_no_mode_behind() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 3)})
    optimizer = KFACOptimizer(model)
    model["attention"](*[torch.randn(5, 2, 4)] * 3)
    assert torch.overrides._get_current_function_mode() is None
    optimizer.remove_hooks()
