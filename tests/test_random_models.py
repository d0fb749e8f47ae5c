"""Random architectures: the factors of every layer against per-example Jacobians by torch.func, in float64.

Stages are drawn with what they share. Each has its module's forward, and a second one written out on tensors, in which
every product adds a zero of its own, `z = W a + ε`. The derivative of an example's loss with respect to `ε`, by
`vmap(grad)`, makes the rows of `G`, whatever the library captures, and the `a` of that forward the rows of `A`. Where a
weight is used several times, rows of `A` are averaged over all uses and those of `G` summed; uses from the other side
are pooled by their mean eigenvalues, as `tests/blocks/test_functional.py` derives.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same, with_ones
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from kfac_optim import KFACOptimizer, WeightSharing

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, LENGTH, EXPERTS = 3, 4, 2


@dataclass
class Tape:
    """What one example's forward writes down: the zeros that products add, and their inputs."""

    zeros: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def key(self, block: str, side: str) -> str:
        self.counts[block] += 1
        return f"{block} {side} {self.counts[block]}"

    def product(
        self,
        block: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        side: str = "own",
        key: str | None = None,
    ) -> Tensor:
        """`x Wᵀ + b + ε`; `weight` is `[out, in]` as it is used here. Keys before an `@` are one use, step by step."""
        key = key or self.key(block, side)
        output = F.linear(x, weight, bias)
        self.inputs[key] = with_ones(x, bias is not None)
        return output + self.zeros.get(key, torch.zeros_like(output))

    def elementwise(self, block: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x ∘ w + b + ε`, a block for each feature."""
        key = self.key(block, "feature")
        output = x * weight if bias is None else x * weight + bias
        self.inputs[key] = torch.stack([x] if bias is None else [x, torch.ones_like(x)], dim=-1)
        return output + self.zeros.get(key, torch.zeros_like(output))


class Stage(nn.Module):
    """`[batch, LENGTH, WIDTH]` to the same; `blocks` names what it has, within itself."""

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        """The same of one example, `[LENGTH, WIDTH]`, on the tape."""
        raise NotImplementedError


class Dense(Stage):
    def __init__(self, bias: bool, calls: int) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH, bias=bias), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.layer(x).tanh()
        return x

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = tape.product(f"{at}.layer", x, self.layer.weight, self.layer.bias).tanh()
        return x


class Tied(Stage):
    """A layer, and its weight again: as it is, transposed, or both."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.ways = nn.Linear(WIDTH, WIDTH + 1, bias=False), ways

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        for way in self.ways:
            x = {"@": lambda x: x @ self.layer.weight, "F.linear": lambda x: F.linear(x, self.layer.weight.T)}[way](x)
            x = self.layer(x.tanh()).tanh()
        return x[..., :WIDTH]

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        x = tape.product(f"{at}.layer", x, self.layer.weight).tanh()
        for _ in self.ways:
            x = tape.product(f"{at}.layer", x, self.layer.weight.T, side="other")
            x = tape.product(f"{at}.layer", x.tanh(), self.layer.weight).tanh()
        return x[..., :WIDTH]


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda x, w: x @ w.T,
    "F.linear": F.linear,
    "matmul": lambda x, w: torch.matmul(x, w.mT),
    "einsum": lambda x, w: torch.einsum("...i,oi->...o", x, w),
}


class Functional(Stage):
    def __init__(self, way: str, calls: int) -> None:
        super().__init__()
        self.weight, self.way, self.calls = nn.Parameter(torch.randn(WIDTH, WIDTH)), way, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = PRODUCTS[self.way](x, self.weight).tanh()
        return x

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = tape.product(at, x, self.weight).tanh()
        return x


class Norm(Stage):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = kind(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).tanh()

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        bias = getattr(self.norm, "bias", None)
        normal = F.rms_norm(x, (WIDTH,)) if bias is None else F.layer_norm(x, (WIDTH,))
        return tape.elementwise(f"{at}.norm", normal, self.norm.weight, bias).tanh()


class Recurrent(Stage):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        for layer in range(self.rnn.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            of = {name: getattr(self.rnn, f"{name}_l{layer}") for name in names}
            by_input = tape.product(f"{at}.rnn.weight_ih_l{layer}", x, of["weight_ih"], of["bias_ih"])
            state, outputs = torch.zeros_like(x[0]), []
            block = f"{at}.rnn.weight_hh_l{layer}"
            key = tape.key(block, "own")
            for step, token in enumerate(by_input):
                state = (token + tape.product(block, state, of["weight_hh"], of["bias_hh"], key=f"{key}@{step}")).tanh()
                outputs.append(state)
            x = torch.stack(outputs)
        return x


class Experts(Stage):
    """Each takes all positions, by a slice of one parameter or all at once."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "einsum":
            return torch.einsum("bti,eoi->ebto", x, self.weight).tanh().sum(0)
        if self.way == "bmm":
            rows = x.flatten(0, 1).expand(EXPERTS, -1, -1)
            return torch.bmm(rows, self.weight.mT).tanh().sum(0).view(x.shape)
        return F.linear(x, self.weight[0]).tanh() + F.linear(x, self.weight[1]).tanh()

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        if self.way == "einsum":  # all outputs of one input are one layer's
            both = tape.product(at, x, self.weight.flatten(0, 1))
            return both.tanh().unflatten(-1, (EXPERTS, WIDTH)).sum(-2)
        side = "flat" if self.way == "bmm" else "own"
        products = [tape.product(f"{at} expert {i}", x, self.weight[i], side=side) for i in range(EXPERTS)]
        return torch.stack(products).tanh().sum(0)


class Conv(Stage):
    """Over positions; `A` sees the patch of each."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT.tanh()

    def plain(self, at: str, tape: Tape, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 1, 1))
        patches = torch.stack([padded[i : i + LENGTH] for i in range(3)], dim=-1)  # [positions, channels, taps]
        outputs = []
        for group, (weight, bias) in enumerate(
            zip(self.conv.weight.chunk(self.conv.groups), self.conv.bias.chunk(self.conv.groups), strict=True)
        ):
            rows = patches.chunk(self.conv.groups, 1)[group].flatten(1)
            outputs.append(tape.product(f"{at}.conv expert {group}", rows, weight.flatten(1), bias))
        return torch.cat(outputs, -1).tanh()


STAGES = st.one_of(
    st.builds(Dense, st.booleans(), st.integers(1, 3)),
    st.builds(Tied, st.lists(st.sampled_from(["@", "F.linear"]), min_size=1, max_size=2).map(tuple)),
    st.builds(Functional, st.sampled_from(list(PRODUCTS)), st.integers(1, 2)),
    st.builds(Norm, st.sampled_from([nn.LayerNorm, nn.RMSNorm])),
    st.builds(Recurrent, st.integers(1, 2)),
    st.builds(Experts, st.sampled_from(["slices", "einsum", "bmm"])),
    st.builds(Conv, st.sampled_from([1, WIDTH])),
)


class Model(nn.Sequential):
    """Stages one after another, some of them again; a residual sum around those that `skips` names."""

    def __init__(self, stages: list[Stage], order: list[int], skips: list[bool]) -> None:
        super().__init__(*stages)
        self.order = [i % len(stages) for i in order] or list(range(len(stages)))
        self.order += [i for i in range(len(stages)) if i not in self.order]
        self.skips = skips

    def steps(self) -> Iterator[tuple[int, bool]]:
        yield from zip(self.order, itertools.chain(self.skips, itertools.repeat(False)), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        for i, skip in self.steps():
            x = self[i](x) + x if skip else self[i](x)
        return x

    def plain(self, tape: Tape, x: Tensor) -> Tensor:
        for i, skip in self.steps():
            y = self[i].plain(str(i), tape, x)
            x = y + x if skip else y
        return x


MODELS = st.builds(
    Model,
    st.lists(STAGES, min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.booleans(), max_size=6),
)


def loss_of(output: Tensor, aim: Tensor) -> Tensor:
    """Of one example."""
    return ((output - aim).square() / 2 + output * aim).sum()


def rows_of(model: Model, x: Tensor, aims: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """`(a, g)` of each product, `[batch, positions, …]`, `g` by the derivative of each example's own loss."""
    shapes = Tape()
    seen: dict[str, Tensor] = {}
    original = shapes.zeros

    class Shapes(dict[str, Tensor]):
        def get(self, key: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
            assert default is not None
            seen[key] = default
            return default

    shapes.zeros = Shapes(original)
    model.plain(shapes, x[0])

    def loss(zeros: dict[str, Tensor], one: Tensor, aim: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tape = Tape(zeros)
        return loss_of(model.plain(tape, one), aim), tape.inputs

    zeros = {key: torch.zeros(len(x), *zero.shape) for key, zero in seen.items()}
    gradients, inputs = vmap(grad(loss, has_aux=True))(zeros, x, aims)
    return {key: (inputs[key].detach(), gradients[key].detach()) for key in zeros}


def uses_of(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Rows of each use, `[batch, positions, …]`, steps in a row put together."""
    steps: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for key, (a, g) in pairs.items():
        use, _, step = key.partition("@")
        steps[use].append((a.unsqueeze(1), g.unsqueeze(1)) if step else (a, g))
    return {
        use: (torch.cat([a for a, _ in some], 1), torch.cat([g for _, g in some], 1)) for use, some in steps.items()
    }


def block_rows(a: Tensor, g: Tensor, sharing: WeightSharing) -> tuple[Tensor, Tensor]:
    """Rows that count, `[n, …]`: of positions, or, reduced, of examples."""
    if sharing is WeightSharing.REDUCE:
        return a.mean(1), g.sum(1)
    return a.flatten(0, 1), g.flatten(0, 1)


def moments(uses: list[tuple[Tensor, Tensor]], examples: int, sharing: WeightSharing) -> tuple[Tensor, Tensor]:
    """`A` and `G` of the uses of one side; the mean over examples of what `g` is of each."""
    rows = [block_rows(a, g, sharing) for a, g in uses]
    a, g = (torch.cat([pair[i] for pair in rows]) for i in range(2))
    a = a[(g != 0).any(-1)]
    return a.mT @ a / len(a), g.mT @ g / examples


def mean(matrix: Tensor) -> Tensor:
    return matrix.trace() / len(matrix)


def expected(model: Model, x: Tensor, aims: Tensor, sharing: WeightSharing) -> dict[str, tuple[Tensor | None, Tensor]]:
    """The factors of each block, by name."""
    by_block: defaultdict[str, dict[str, list[tuple[Tensor, Tensor]]]] = defaultdict(lambda: defaultdict(list))
    for key, pair in uses_of(rows_of(model, x, aims)).items():
        block, side, _ = key.rsplit(" ", 2)
        by_block[block][side].append(pair)
    found: dict[str, tuple[Tensor | None, Tensor]] = {}
    grouped: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for block, sides in by_block.items():
        if "feature" in sides:
            found[block] = None, features(sides["feature"], len(x), sharing)
            continue
        if "flat" in sides:  # whose call has not shown which rows belong to one example
            a, g = moments(sides["flat"], len(x), WeightSharing.EXPAND)
        else:
            a, g = moments(sides["own"], len(x), sharing)
        if "other" in sides:  # its A is of outputs, its G of inputs
            q, p = moments(sides["other"], len(x), sharing)
            s = [mean(a) * mean(g), mean(p) * mean(q)]
            a, g = (
                (s[0] * a / mean(a) + s[1] * p / mean(p)) / sum(s),
                s[0] * g / mean(g) + s[1] * q / mean(q),
            )
        name, _, expert = block.partition(" expert ")
        if expert:
            grouped[name].append((a, g))
        else:
            found[block] = a[None], g[None]
    for name, pairs in grouped.items():
        found[name] = torch.stack([a for a, _ in pairs]), torch.stack([g for _, g in pairs])
    return found


def features(uses: list[tuple[Tensor, Tensor]], examples: int, sharing: WeightSharing) -> Tensor:
    """The block of each feature, `[WIDTH, n, n]`: of positions one by one, or, reduced, of their sum; uses add up."""
    blocks = []
    for a, g in uses:
        each = a * g.unsqueeze(-1)  # [batch, positions, WIDTH, n]
        rows = each.sum(1) if sharing is WeightSharing.REDUCE else each.flatten(0, 1)
        blocks.append(torch.einsum("bfc,bfd->fcd", rows, rows) / examples)
    return torch.stack(blocks).sum(0)


def check(model: Model, sharing: WeightSharing) -> None:
    x, aims = torch.randn(2, 3, LENGTH, WIDTH)
    optimizer = KFACOptimizer(model, lr=0.0, weight_sharing=sharing)
    loss = sum(loss_of(*pair) for pair in zip(model(x), aims, strict=True)) / len(x)
    loss.backward()
    optimizer.step()
    found, wanted = optimizer.factors(), expected(model, x, aims, sharing)
    assert found.keys() == wanted.keys()
    for name, (a, g) in wanted.items():
        assert_same(found[name][0], a)
        assert_same(found[name][1], g)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(MODELS, st.sampled_from(WeightSharing))
def test_factors_of_random_models_are_those_of_per_example_jacobians(model: Model, sharing: WeightSharing) -> None:
    check(model, sharing)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(MODELS, st.sampled_from(WeightSharing))
def test_factors_of_many_random_models_are_those_of_per_example_jacobians(model: Model, sharing: WeightSharing) -> None:
    for stage in model:
        event(type(stage).__name__)
    check(model, sharing)
