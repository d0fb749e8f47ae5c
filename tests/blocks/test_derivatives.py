"""Every use of a weight, at every order of differentiation; covers blocks/derivatives.py and capture/weight_uses.py."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from helpers.plain import block, clones
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from kfac_optim import (
    EKFAC,
    BlockDiagonal,
    Cholesky,
    DoublyFactored,
    ExactGGN,
    KFACOptimizer,
    LossTerms,
    SampleSpace,
    Structure,
    WeightSharing,
)
from kfac_optim.factors.example_rows import ExampleRows
from kfac_optim.factors.second_moments import on_host

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class TiedAutoencoder(nn.Module):
    """Multiplies by a bare matrix, by its transpose, and by it again."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.matrix)
        return torch.tanh(hidden @ self.matrix.T) @ self.matrix


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return 3 * super().forward(input)


class Conditioned(nn.Module):
    """Adds a row of a table for the class of each example, and parameters of several shapes."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(6, 12, bias=False), Scaled(3, 4)
        self.last = None if tied else nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.randn(4))
        self.places = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        classes = (x[..., 0] > 0).long() + (x[..., 1] > 0)
        hidden = self.first(x).unflatten(-1, (3, 4)) + self.table(classes).unsqueeze(-2) + self.places[:3]
        hidden = torch.tanh(torch.tanh(hidden).sum(-2)) + self.shift
        return F.linear(hidden.sin(), self.table.weight) if self.last is None else self.last(hidden.sin())


class Places(nn.Module):
    """Looks up, and multiplies, what is the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.first, self.last = nn.Embedding(3, 4), nn.Linear(4, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.unflatten(-1, (3, 2)) + self.first(self.places(torch.arange(3)).sin())
        return self.last(hidden.tanh().sum(-2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 6)),
        nn.Conv1d(1, 4, 3, padding="same", dilation=2),
        nn.Tanh(),
        nn.Conv1d(4, 4, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 2, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.Flatten(-2),
        nn.Linear(14, 1),
    )


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 2, 3)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(-3), nn.Linear(36, 1)
    )


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """`‖∂u/∂x‖²` of each example, in ordinary code."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return found.square().sum(1)


def slope_by_transform(transform: Callable[..., Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    def of(model: nn.Module, x: Tensor) -> Tensor:
        params = dict(model.named_parameters())
        return vmap(lambda one: transform(lambda z: functional_call(model, params, (z,)).sum())(one).square().sum())(x)

    return of


def along(model: nn.Module, x: Tensor) -> Tensor:
    """A directional derivative in forward mode, of the whole batch at once."""
    params = dict(model.named_parameters())
    return jvp(lambda z: functional_call(model, params, (z,)).sum(1), (x,), (torch.ones_like(x),))[1]


def slope_by_directions(model: nn.Module, x: Tensor) -> Tensor:
    """The same by directional derivatives of the whole batch, one for each feature."""
    params = dict(model.named_parameters())

    def push(direction: Tensor) -> Tensor:
        return jvp(lambda z: functional_call(model, params, (z,)).sum(1), (x,), (direction.expand_as(x),))[1]

    return vmap(push)(torch.eye(x.shape[1], dtype=x.dtype)).square().sum(0)


def along_each(model: nn.Module, x: Tensor) -> Tensor:
    """The same of one example after the other, in one direction for all."""
    params, ones = dict(model.named_parameters()), torch.ones_like(x[0])
    return vmap(lambda one: jvp(lambda z: functional_call(model, params, (z,)).sum(), (one,), (ones,))[1])(x)


STYLES = {
    "nested": slope,
    "reverse": slope_by_transform(jacrev),
    "forward": slope_by_transform(jacfwd),
    "jvp": along,
    "jvp of each": along_each,
    "directions": slope_by_directions,
}
OF_EACH = ("reverse", "forward", "jvp of each")
"""The styles in which `torch.vmap` runs over the examples."""
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "convolutions": convolutions,
    "images": images,
    "tied": TiedAutoencoder,
    "conditioned": Conditioned,
    "conditioned, tied": lambda: Conditioned(tied=True),
    "places": Places,
}


def jacobians(model: nn.Module, x: Tensor, style: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """The derivative of each example's residual with respect to each parameter, by `torch.func`."""

    def residual(params: dict[str, Tensor], one: Tensor) -> Tensor:
        def value(z: Tensor) -> Tensor:
            return functional_call(model, params, (z,)).sum()

        if style in (along, along_each):
            return jvp(value, (one,), (torch.ones_like(one),))[1]
        return jacrev(value)(one).square().sum()

    params = {name: param.detach() for name, param in model.named_parameters()}
    return vmap(jacrev(residual), in_dims=(None, 0))(params, x)


@pytest.mark.parametrize(
    ("style", "name"),
    # Only there has each example a part of its own in what they all share.
    [(style, name) for style in STYLES for name in MODELS if name != "places" or style in OF_EACH],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_rows_of_all_uses_make_each_examples_jacobian(style: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name]().to(dtype), torch.randn(5, 6, dtype=dtype)
    criterion = nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=SampleSpace(), estimate=ExactGGN(criterion))
    expected = jacobians(model.double(), x.double(), STYLES[style])
    model.to(dtype)
    residual = STYLES[style](model, x)
    criterion(residual, torch.zeros_like(residual)).backward()
    found: dict[str, list[Tensor]] = {}
    for each in optimizer._binding.coverage.blocks:
        rows: ExampleRows = each.state._pending.terms[0, 0]
        whole = rows.jacobians() / (2 / 5) ** 0.5
        for example in range(5):
            parts = each.adapter.unpack(each.spec, whole[:, example])
            for part, name_, param in zip(parts, each.param_names, each.params, strict=True):
                found.setdefault(name_, []).append(part.reshape(param.shape))
    assert found.keys() == expected.keys()
    for each, part in found.items():
        assert_same(torch.stack(part).double(), expected[each], rtol=1e-12 if dtype is torch.float64 else 1e-5)
    optimizer.step()
    assert optimizer.metrics()["measured_parameters"] == 1


@pytest.mark.parametrize("style", STYLES)
def test_factors_are_those_of_the_jacobians_whatever_the_style(style: str) -> None:
    torch.manual_seed(0)
    model, x, criterion = linear().double(), torch.randn(5, 6, dtype=torch.float64), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    expected = jacobians(model, x, STYLES[style])
    for _ in range(2):
        optimizer.zero_grad()
        residual = STYLES[style](model, x)
        criterion(residual, torch.zeros_like(residual)).backward()
        optimizer.step()
    for name in ("0", "2", "4"):
        each = (2 / 5) ** 0.5 * expected[f"{name}.weight"]
        if f"{name}.bias" in expected:
            each = torch.cat([each, (2 / 5) ** 0.5 * expected[f"{name}.bias"].unsqueeze(2)], 2)
        left, right = (each @ each.mT).sum(0), (each.mT @ each).sum(0)
        a, g = optimizer.factors()[name]
        assert a is not None
        assert g is not None
        assert_same((a[0], g[0]), (right / right.trace(), left))


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """`∂u/∂x` of each example, in ordinary code."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return found


def in_chunks_of(size: int, *, with_value: bool = False) -> Callable[[nn.Module, Tensor], Tensor]:
    """The same of so many examples at a time; with the value added, which is a forward of its own."""

    def of(model: nn.Module, x: Tensor) -> Tensor:
        def value(one: Tensor) -> Tensor:
            return model(one).sum()

        def residual(one: Tensor) -> Tensor:
            return grad(value)(one) + value(one) if with_value else grad(value)(one)

        return vmap(residual, chunk_size=size)(x)

    return of


def factors_of_squares(
    residual: Callable[[nn.Module, Tensor], Tensor],
    inverse: Any,
    sizes: tuple[int, ...] = (5,),
    make: Callable[[], nn.Module] = linear,
    **options: Any,
) -> dict[str, Any]:
    """The factors of a loss of squares, by a call of the criterion for each of `sizes`."""
    torch.manual_seed(0)
    model, x, criterion = make().double(), torch.randn(sum(sizes), 6, dtype=torch.float64), nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=inverse, estimate=ExactGGN(criterion), **options)
    for _ in range(2):
        optimizer.zero_grad()
        parts = [residual(model, some) for some in x.split(sizes)]
        sum(criterion(part, torch.zeros_like(part)) * len(part) / len(x) for part in parts).backward()
        optimizer.step()
    return optimizer.factors()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by_vmap", [False, True])
def test_a_derivative_that_is_computed_in_chunks_has_the_factors_of_the_whole_batch(size: int, by_vmap: bool) -> None:
    def split(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([gradients(model, part) for part in x.split(size)])

    found = factors_of_squares(in_chunks_of(size) if by_vmap else split, Cholesky())
    for name, pair in factors_of_squares(gradients, Cholesky()).items():
        assert_same(found[name], pair)


def test_chunks_of_several_forwards_are_refused_with_what_to_do() -> None:
    whole = factors_of_squares(in_chunks_of(5, with_value=True), Cholesky())
    with pytest.raises(ValueError, match=r"has 5 examples, and calls .* 1, 2 rows.*leave out chunk_size.*each chunk"):
        factors_of_squares(in_chunks_of(2, with_value=True), Cholesky())
    for name, pair in factors_of_squares(in_chunks_of(5, with_value=True), Cholesky(), (2, 2, 1)).items():
        assert_same(pair, whole[name])
    with pytest.raises(RuntimeError, match=r"computed in chunks.*leave out chunk_size"):
        factors_of_squares(in_chunks_of(2), SampleSpace())
    factors_of_squares(in_chunks_of(2), SampleSpace(), (2, 2, 1))


class Halves(nn.Module):
    """Has two rows for each example, which interact behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.reshape(-1, 3)).tanh().reshape(-1, 8)).sin()


@pytest.mark.parametrize("size", [3, 4])
def test_examples_of_chunks_are_told_by_what_the_model_was_handed(size: int) -> None:
    def split(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([gradients(model, part) for part in x.split(size)])

    found = factors_of_squares(split, Cholesky(), make=Halves)
    for name, pair in factors_of_squares(gradients, Cholesky(), make=Halves).items():
        assert_same(found[name], pair)


@pytest.mark.parametrize("make", [linear, Halves])
def test_chunks_beside_a_value_of_the_whole_batch_are_refused_with_what_to_do(make: Callable[[], nn.Module]) -> None:
    """Those of the second model have as many rows as the batch has examples."""

    def residual(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum(1, keepdim=True) + torch.cat([gradients(model, part) for part in x.split(3)])

    with pytest.raises(ValueError, match=r"told apart by examples.*leave out chunk_size.*each chunk"):
        factors_of_squares(residual, Cholesky(), (6,), make)


class AtPoints(nn.Module):
    """Is handed points beside the examples, all of which it is computed at."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(6, 4), nn.Linear(1, 4)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return (self.branch(x) @ self.trunk(at).tanh().T).tanh().sum(1, keepdim=True)


def test_forwards_that_were_handed_the_whole_batch_are_no_chunks_where_some_layers_have_fewer_rows() -> None:
    """Two forwards of 3 points have as many rows there as the batch has examples."""
    points = torch.randn(3, 1, dtype=torch.float64)

    def residual(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, points) + gradients(partial(model, at=points), x)

    found = factors_of_squares(residual, Cholesky(), (6,), AtPoints)
    expected = factors_of_squares(residual, Cholesky(), (6,), AtPoints, skip_layers=["trunk"])
    assert_same(found["branch"], expected["branch"])


class Sequences(nn.Module):
    """Computes a function of each position, or the derivative of one by the input, in the given way."""

    def __init__(self, way: str, *, derived: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.way, self.derived = way, derived

    def each(self, x: Tensor) -> Tensor:
        if self.derived:
            return grad(lambda z: self.layer(z).tanh().square().sum())(x)
        return self.layer(x).tanh()

    def forward(self, *handed: Tensor) -> Tensor:
        x = max(handed, key=Tensor.dim)
        if self.way == "examples":
            return vmap(lambda one: self.each(one).mean(0))(x)
        if self.way == "positions":
            return vmap(self.each, in_dims=1, out_dims=1)(x).mean(1)
        return self.each(x).mean(-2)


def factors_of_sequences(
    way: str, positions: int, *, derived: bool, before: Sequence[Tensor] = (), after: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """The factors of a model that is handed 6 sequences; others `before` and `after` them, which it does not use."""
    torch.manual_seed(0)
    model, criterion = Sequences(way, derived=derived).double(), nn.MSELoss()
    options = {"estimate": ExactGGN(criterion)} if derived else {"weight_sharing": WeightSharing.REDUCE}
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1, **options)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, positions, 3, dtype=torch.float64)
        output = vmap(model)(x) if way == "outside" else model(*before, x, *after)
        criterion(output, torch.ones_like(output)).backward()
        optimizer.step()
    return optimizer.factors()


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("way", ["examples", "positions", "outside"])
def test_sequences_have_the_same_factors_whatever_vmap_runs_over(way: str, derived: bool) -> None:
    found = factors_of_sequences(way, 5, derived=derived)
    assert_same(found["layer"], factors_of_sequences("batched", 5, derived=derived)["layer"])


def test_a_vmap_that_may_run_over_examples_or_positions_is_warned_of() -> None:
    """As many positions as examples: it is taken to run over the examples."""
    with pytest.warns(UserWarning, match=r"layer 'layer' .*torch\.vmap.* 6 .*whether .*examples"):
        found = factors_of_sequences("examples", 6, derived=False)
    assert_same(found["layer"], factors_of_sequences("batched", 6, derived=False)["layer"])


def test_what_a_vmap_runs_over_is_told_by_all_that_the_model_is_handed() -> None:
    """A time comes first here."""
    found = factors_of_sequences("examples", 5, derived=True, before=[torch.ones(1)])
    assert_same(found["layer"], factors_of_sequences("batched", 5, derived=True)["layer"])


@pytest.mark.parametrize("way", ["examples", "positions"])
def test_a_model_that_is_handed_examples_and_positions_is_warned_of_and_the_first_are_the_examples(way: str) -> None:
    expected = factors_of_sequences("batched", 5, derived=True)["layer"]
    with pytest.warns(UserWarning, match=r"layer 'layer' .*cannot be told.* 6, 5.*batch first"):
        found = factors_of_sequences(way, 5, derived=True, after=[torch.ones(5)])
    assert_same(found["layer"], expected)
    with pytest.warns(UserWarning, match=r"layer 'layer' .*cannot be told.* 5, 6.*batch first"):
        factors_of_sequences(way, 5, derived=True, before=[torch.ones(5)])


def test_second_moments_of_examples_warn_of_a_vmap_that_may_run_over_either() -> None:
    model = Sequences("positions", derived=False)
    optimizer = KFACOptimizer(model, inverse=EKFAC(), factor_update_period=1)
    with pytest.warns(UserWarning, match=r"layer 'layer' .*torch\.vmap.*cannot be told"):
        model(torch.randn(6, 6, 3)).square().mean().backward()
    optimizer.step()


class OfBuffer(nn.Module):
    """Maps a layer over the examples of a buffer, and is handed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("x", torch.randn(6, 5, 3))

    def forward(self) -> Tensor:
        return vmap(lambda one: self.layer(one).tanh().mean(0))(self.x)


def test_a_model_that_is_handed_no_tensor_is_warned_of_in_these_words() -> None:
    model = OfBuffer()
    optimizer = KFACOptimizer(model, factor_update_period=1, weight_sharing=WeightSharing.REDUCE)
    with pytest.warns(UserWarning, match=r"layer 'layer' .*handed no tensor"):
        model()
    assert len(optimizer.summary().blocks) == 1


class Lookups(nn.Module):
    """Looks up a row of a table for each id of each example, in the given way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Embedding(4, 3), way

    def forward(self, ids: Tensor) -> Tensor:
        if self.way == "batched":
            return self.layer(ids).tanh().mean(1)
        of_positions = int(self.way == "positions")
        return vmap(self.layer, in_dims=of_positions, out_dims=of_positions)(ids).tanh().mean(1)


@pytest.mark.parametrize("way", ["examples", "positions"])
def test_lookups_have_the_same_factors_whatever_vmap_runs_over(way: str) -> None:
    def factors(way: str) -> Any:
        torch.manual_seed(0)
        model = Lookups(way).double()
        options = {"factor_update_period": 1, "weight_sharing": WeightSharing.REDUCE}
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(4, (6, 5))).square().mean().backward()
            optimizer.step()
        return optimizer.factors()["layer"]

    assert_same(factors(way), factors("batched"))


class FoldedHeads(nn.Module):
    """Folds two heads into the batch, and maps a layer over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        folded = x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1)
        return vmap(self.layer, in_dims=1, out_dims=1)(folded).tanh().mean(1).reshape(len(x), -1)


def test_a_batch_that_others_are_folded_into_is_not_warned_of() -> None:
    model = FoldedHeads()
    optimizer = KFACOptimizer(model, factor_update_period=1, weight_sharing=WeightSharing.REDUCE)
    for _ in range(2):
        model(torch.randn(6, 4, 6)).square().mean().backward()
        optimizer.step()


class Frames(nn.Module):
    """Convolves each frame of each example, in the given way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 3, 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "batched":
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh().mean((1, 3))
        of_frames = vmap(self.layer, in_dims=int(self.way == "frames"), out_dims=int(self.way == "frames"))
        return of_frames(x).tanh().mean((1, 3))


@pytest.mark.parametrize("way", ["examples", "frames"])
def test_convolutions_of_frames_within_vmap_count_the_rows_that_any_column_reaches(way: str) -> None:
    def factors(way: str) -> Any:
        torch.manual_seed(0)
        model, criterion = Frames(way).double(), nn.MSELoss()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
        for _ in range(2):
            optimizer.zero_grad()
            criterion(model(torch.randn(6, 4, 2, 5).double()), torch.ones(6, 3).double()).backward()
            optimizer.step()
        return optimizer.factors()["layer"]

    assert_same(factors(way), factors("batched"))


def test_terms_of_a_loss_that_differ_in_size_have_one_pair_of_factors() -> None:
    torch.manual_seed(0)
    model, criterion = linear().double(), nn.MSELoss()
    points = [torch.randn(5, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64) + 2]
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    sizes = [(2 / 5) ** 0.5, 10 * (2 / 2) ** 0.5]
    expected = [jacobians(model, x, slope)["2.weight"] * size for x, size in zip(points, sizes, strict=True)]
    for _ in range(2):
        optimizer.zero_grad()
        inside, outside = (slope(model, x) for x in points)
        loss = criterion(inside, torch.zeros_like(inside)) + criterion(10 * outside, torch.zeros_like(outside))
        loss.backward()
        optimizer.step()
    each = torch.cat(expected)
    left, right = (each @ each.mT).sum(0), (each.mT @ each).sum(0)
    a, g = optimizer.factors()["2"]
    assert a is not None
    assert g is not None
    assert_same((a[0], g[0]), (right / right.trace(), left))


@pytest.mark.parametrize("parts", [1, 2])
def test_of_a_named_loss_by_a_function_each_output_of_each_forward_has_a_row_of_its_own(parts: int) -> None:
    torch.manual_seed(0)
    model, x = linear().double(), torch.randn(6, 6, dtype=torch.float64)
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(nn.MSELoss()))
    for some in x.chunk(parts):
        ((model(some) - 1).square().mean() / parts + 0.1 * slope(model, some).mean()).backward()
    optimizer.step()
    params = {name: param.detach() for name, param in model.named_parameters()}
    rows = jacrev(lambda params: functional_call(model, params, (x,)).flatten())(params)
    each = (2 / 12) ** 0.5 * rows["2.weight"]
    left, right = (each @ each.mT).sum(0), (each.mT @ each).sum(0)
    a, g = optimizer.factors()["2"]
    assert a is not None
    assert g is not None
    assert_same((a[0], g[0]), (right / right.trace(), left))


@pytest.mark.parametrize("style", ["reverse", "forward", "directions"])
@pytest.mark.parametrize("tied", [False, True])
def test_tables_and_what_is_added_have_the_same_factors_within_torch_func(style: str, tied: bool) -> None:
    def factors(style: str) -> dict[str, Any]:
        torch.manual_seed(0)
        model, x = Conditioned(tied=tied).double(), torch.randn(5, 6, dtype=torch.float64)
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1)
        for _ in range(3):
            optimizer.zero_grad()
            STYLES[style](model, x).square().mean().backward()
            optimizer.step()
        assert optimizer.metrics()["measured_parameters"] == 1
        return optimizer.factors()

    within, ordinary = factors(style), factors("nested")
    assert within.keys() == ordinary.keys()
    for name, pair in within.items():
        assert_same(pair, ordinary[name])


def test_the_empirical_factors_and_the_second_moments_of_ekfac_are_of_the_jacobians_too() -> None:
    torch.manual_seed(0)
    model, x = linear().double(), torch.randn(5, 6, dtype=torch.float64)
    optimizer = KFACOptimizer(model, lr=0.0, inverse=EKFAC(), factor_update_period=1)
    expected = jacobians(model, x, slope)["2.weight"]
    residual = slope(model, x).detach()
    for _ in range(2):
        optimizer.zero_grad()
        slope(model, x).square().mean().backward()
        optimizer.step()
    each = 2 * residual.view(5, 1, 1) * expected / 5
    a, g = optimizer.factors()["2"]
    assert a is not None
    assert g is not None
    left, right = (each @ each.mT).sum(0), (each.mT @ each).sum(0)
    assert_same((a[0], g[0]), (right / right.trace(), 5 * left))


@pytest.mark.parametrize(("side", "width"), [(0, 4), (1, 3)])
def test_the_second_moments_of_ekfac_are_by_blocks_where_a_factor_is_cut(side: int, width: int) -> None:
    """The 7 columns are blocks of 4, the 5 rows are blocks of 3, and the last block lacks one."""
    torch.manual_seed(0)
    model, x = linear().double(), torch.randn(5, 6, dtype=torch.float64)
    dense = (Structure.DENSE, Structure.DENSE)
    cut = (BlockDiagonal(4), Structure.DENSE) if side == 0 else (Structure.DENSE, BlockDiagonal(4))
    optimizer = KFACOptimizer(model, lr=0.0, inverse=EKFAC(), structure={"0": cut, "*": dense}, factor_update_period=1)
    for _ in range(2):  # the second sample is the first in a basis
        optimizer.zero_grad()
        slope(model, x).square().mean().backward()
        optimizer.step()
    of_each = jacobians(model, x, slope)
    whole = torch.cat([of_each["0.weight"], of_each["0.bias"].unsqueeze(-1)], -1)
    each = 2 * slope(model, x).detach().view(5, 1, 1) * whole / 5
    state = block(optimizer, "0").state
    parts = F.pad(each, (0, 1) if side == 0 else (0, 0, 0, 1)).split(width, 2 - side)
    bases = [basis.expand(2, -1, -1) for basis in (state.a.basis, state.g.basis)]
    expected = [5 * (g.mT @ part @ a).square().sum(0) for part, a, g in zip(parts, *bases, strict=True)]
    assert_same(state.second_moments, torch.stack(expected))


def test_two_backwards_through_one_forward_are_one_of_their_sum() -> None:
    def factors(split: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model, x = linear().double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1)
        for _ in range(2):
            optimizer.zero_grad()
            output = model(x)
            (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            losses = [derivative.square().mean(), output.square().mean()]
            for loss in losses if split else [sum(losses)]:
                loss.backward(retain_graph=True)
            optimizer.step()
        return optimizer.factors()

    together = factors(False)
    for name, pair in factors(True).items():
        assert_same(pair, together[name])


@pytest.mark.parametrize("steps", [["penalty"] * 3, ["loss", "loss", "penalty", "loss", "penalty", "penalty"]])
def test_a_penalty_may_come_in_a_backward_behind_that_of_the_loss(steps: list[str]) -> None:
    """The first such step has no whole statistics: what the loss gave before is no part of the rows that are joined."""

    def factors(split: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = linear().double()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1, factor_decay=1e-9)
        for kind in steps:
            x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
            optimizer.zero_grad()
            output = model(x)
            losses = [output.square().mean()]
            if split:
                losses[0].backward(retain_graph=True)
            if kind == "penalty":
                (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                losses.append(derivative.square().mean())
            for loss in losses[1:] if split else [sum(losses)]:
                loss.backward()
            optimizer.step()
        return optimizer.factors()

    together = factors(False)
    for name, pair in factors(True).items():
        assert_same(pair, together[name])


def test_after_a_first_step_with_a_penalty_behind_the_loss_statistics_are_those_of_the_next_step() -> None:
    def factors(split: bool, steps: range, period: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = linear().double()
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=period)
        for step in steps:
            x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if split:
                loss.backward()
            penalty = slope(model, x).mean()
            (penalty if split else loss + penalty).backward()
            optimizer.step()
        return optimizer.factors()

    for steps, period in ((2, 10), (3, 1)):
        expected = factors(False, range(1, steps), period)
        for name, pair in factors(True, range(steps), period).items():
            assert_same(pair, expected[name])


def test_the_first_step_with_a_penalty_behind_the_loss_is_preconditioned() -> None:
    model = linear().double()
    optimizer = KFACOptimizer(model, lr=0.1)
    for _ in range(2):
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward(retain_graph=True)
        (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        derivative.square().mean().backward()
        optimizer.step()
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_uses_whose_rows_cannot_be_told_apart_by_examples_are_refused() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x).sin(), self.layer(x[:3]).tanh()])

    model = Again().double()
    optimizer, before = KFACOptimizer(model, lr=0.1, inverse=Cholesky()), clones(model.parameters())
    slope(model, torch.randn(5, 6, dtype=torch.float64)).mean().backward()
    with pytest.raises(ValueError, match=r"loss has 3 examples, and calls of layer 'layer' have 3, 5 rows"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_an_inverse_that_needs_one_row_for_each_position_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = KFACOptimizer(model, lr=0.1, inverse={"0": DoublyFactored(2)})
    slope(model, torch.randn(5, 6, dtype=torch.float64)).mean().backward()
    with pytest.raises(NotImplementedError, match=r"layer '0' is used several times.*inverse=\{layer name: …\}"):
        optimizer.step()


def test_ordinary_training_with_inputs_that_require_gradients_is_as_without() -> None:
    def train(leaf: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
        optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=2)
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(7, 1, 6, dtype=torch.float64).requires_grad_(leaf)
            model(x).square().mean().backward()
            optimizer.step()
        assert all(each.joint is None for each in optimizer._binding.coverage.blocks)
        return clones(model.parameters())

    assert_same(train(True), train(False), rtol=1e-12)


def test_other_layers_beside_derivatives_train_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            slope(model, torch.randn(9, 6, dtype=torch.float64)).square().mean().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"a part was captured.*'1'"):
        train(3)
    assert optimizer.factors().keys() == {"0", "3"}
    assert block(optimizer, "0").joint is not None


def test_of_one_example_of_rank_one_the_factors_are_exact_in_each_group() -> None:
    """A grouped convolution whose residual is linear in each group's matrix: `A ⊗ G` is its block of the GGN matrix."""
    model = nn.Sequential(nn.Unflatten(-1, (4, 1)), nn.Conv1d(4, 2, 1, groups=2, bias=False), nn.Flatten()).double()
    criterion = nn.MSELoss()
    optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), estimate=ExactGGN(criterion))
    x = torch.tensor([[1.0, 2.0, -0.5, 0.3]], dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad((model(x).square() * torch.tensor([1.0, 3.0])).sum(), x, create_graph=True)
        criterion(slope.sum(1), torch.ones(1, dtype=torch.float64)).backward()
        optimizer.step()
    a, g = optimizer.factors()["1"]
    weight = model[1].weight.detach()

    def residual(weight: Tensor) -> Tensor:
        halves = [x.detach()[0, 2 * group : 2 * group + 2] for group in range(2)]
        values = [torch.dot(w.flatten(), half) for w, half in zip(weight, halves, strict=True)]
        return sum(2 * c * v * w.sum() for c, v, w in zip((1.0, 3.0), values, weight, strict=True))

    jacobian = torch.func.jacrev(residual)(weight).reshape(2, 2)
    for group in range(2):
        block = 2 * torch.outer(jacobian[group], jacobian[group])
        torch.testing.assert_close(torch.kron(g[group], a[group]), block, rtol=1e-10, atol=1e-12)


class Heads(nn.Module):
    """Gives the outputs of the first few of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> list[Tensor]:
        return [head(x) for head in self.heads[:number]]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_layer_whose_terms_are_multiplied_by_zero_gives_no_sample(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_there:
        monkeypatch.setattr(on_host, "__code__", (lambda _: False).__code__)
    factors = []
    for is_masked in (True, False):
        torch.manual_seed(0)
        model = Heads().double()
        optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1, inverse=Cholesky(), loss_terms=LossTerms.SUM)
        first = block(optimizer, "heads.1.0")
        for step, weight in enumerate((0.0, 1.0, 0.0, 2.0)):
            optimizer.zero_grad()
            x = torch.randn(5 + step, 6, dtype=torch.float64, requires_grad=True)
            loss = torch.zeros(())
            for output, times in zip(model(x, 2 if is_masked or weight > 0 else 1), (1.0, weight), strict=False):
                (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = loss + times * (found.square().sum() + output.square().sum())
            loss.backward()
            optimizer.step()
            assert first.is_ready == (step > 0)
            if step > 0:
                assert first.joint is not None
                factors.append(first.state.factors())
        assert optimizer.metrics()["refused_statistics"] == 0
    assert_same(factors[:3], factors[3:])


class Stopped(torch.autograd.Function):
    """Gives the output of a function again, whose backward has nothing to say."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: Tensor) -> None:
        return None


def test_uses_that_no_gradient_comes_to_add_nothing() -> None:
    def gradients(stops: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = linear().double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1)
        slope(model, x.detach()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        output = model(x)
        (derivative,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.square().mean() + derivative.square().mean()
        if stops:
            loss = loss + sum(Stopped.apply(each).sum() for each in (model(x), derivative))
        loss.backward()
        optimizer.step()
        assert optimizer.metrics()["measured_parameters"] == 1
        return [param.grad for param in model.parameters()]

    assert_same(gradients(True), gradients(False), rtol=1e-14)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("penalty", [False, True])
def test_under_autocast_gradients_are_those_of_the_model_without_an_optimizer(penalty: bool, within: bool) -> None:
    """Where the products with weights are followed; the backward runs within autocast or behind it."""
    found: list[list[Tensor]] = []
    for follows in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
        optimizer = KFACOptimizer(model, lr=0.1) if follows else None
        x = torch.randn(8, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
            if penalty:
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append([param.grad for param in model.parameters()])
        if optimizer is not None:
            optimizer.step()
            assert optimizer.metrics()["measured_parameters"] == 1.0
    for plain, followed in zip(*found, strict=True):
        assert_same(followed, plain, rtol=0.05)


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv1d(3, 4, 2), nn.ConvTranspose1d(3, 4, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast_products_have_the_dtype_that_torch_gives_them(layer: nn.Module, bias: bool) -> None:
    """Also where the bias is not trained, and added to the product."""
    model = nn.Sequential(copy.deepcopy(layer))
    model[0].get_parameter("bias").requires_grad_(bias)
    x, results = torch.randn(2, 3, 6, requires_grad=True), []
    for follows in (False, True):
        optimizer = KFACOptimizer(model, lr=0.0) if follows else None
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        assert optimizer is None or optimizer._binding.coverage.blocks[0].follows_uses
        results.append(output.dtype)
    assert results == [torch.bfloat16, torch.bfloat16]


def test_a_summand_that_a_number_multiplies_is_in_the_product_all_the_same() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight, beta=0.5)

    model, x = Summed(), torch.randn(4, 6, requires_grad=True)
    expected = model(x).detach()
    optimizer = KFACOptimizer(model, lr=0.1)
    output = model(x)
    assert_same(output.detach(), expected)
    output.sum().backward()
    assert_same(model.bias.grad, torch.full((3,), 2.0))
    optimizer.step()


class TiedModules(nn.Module):
    """A table and an output layer that share their weight, each a module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(3, 4), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.first(x) + self.table((x[..., 0] > 0).long())).tanh())


def test_a_weight_that_modules_use_from_both_sides_is_copied_saved_and_built_anew_as_it_is() -> None:
    torch.manual_seed(0)
    model = TiedModules().double()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1, inverse=Cholesky())

    def train(model: nn.Module, optimizer: KFACOptimizer, steps: range) -> list[Tensor]:
        for step in steps:
            optimizer.zero_grad()
            x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            slope(model, x).square().mean().backward()
            optimizer.step()
        return clones(model.parameters())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*a part was captured")
        train(model, optimizer, range(4))
        assert block(optimizer, "table").joint is not None
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        twin = copy.deepcopy((model, optimizer))
        expected = train(model, optimizer, range(4, 7))
        assert_same(train(*twin, range(4, 7)), expected, rtol=0)
        again = TiedModules().double()
        again.load_state_dict(weights)
        resumed = KFACOptimizer(again, lr=0.01, factor_update_period=1, inverse=Cholesky())
        resumed.load_state_dict(saved)
        assert_same(train(again, resumed, range(4, 7)), expected, rtol=0)
    kept = optimizer.factors()["table"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_same(optimizer.factors()["table"], kept, rtol=0)


def test_a_block_that_is_built_anew_takes_the_derivatives_of_the_old_one() -> None:
    torch.manual_seed(0)
    model = linear().double()
    model[0].bias.requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1)

    def step() -> None:
        optimizer.zero_grad()
        slope(model, torch.randn(9, 6, dtype=torch.float64)).square().mean().backward()
        optimizer.step()

    step()
    model[0].bias.requires_grad_()
    for _ in range(3):
        step()
    assert block(optimizer, "0").params == (model[0].weight, model[0].bias)
    assert block(optimizer, "0").is_ready


class Forces(nn.Module):
    """Differentiates within its own forward, by inputs that are no leaves of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope


@pytest.mark.filterwarnings("ignore:.*gradients but no statistics:UserWarning")
def test_what_was_found_of_derivatives_is_in_copies_and_checkpoints() -> None:
    torch.manual_seed(0)
    model = Forces().double()
    optimizer = KFACOptimizer(model, lr=0.01, factor_update_period=1)

    def train(model: nn.Module, optimizer: KFACOptimizer, steps: range) -> list[Tensor]:
        for step in steps:
            optimizer.zero_grad()
            x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        return clones(model.parameters())

    train(model, optimizer, range(4))
    twin, saved = copy.deepcopy((model, optimizer)), copy.deepcopy(optimizer.state_dict())
    again = Forces().double()
    again.load_state_dict(model.state_dict())
    resumed = KFACOptimizer(again, lr=0.01, factor_update_period=1)
    resumed.load_state_dict(saved)
    expected = train(model, optimizer, range(4, 7))
    assert_same(train(*twin, range(4, 7)), expected, rtol=0)
    assert_same(train(again, resumed, range(4, 7)), expected, rtol=0)


class Mapped(nn.Module):
    """A forward that maps its layer over the examples, which are as many as the layer is wide."""

    def __init__(self, layer: nn.Module, is_mapped: bool) -> None:
        super().__init__()
        self.layer, self.is_mapped = layer, is_mapped

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.vmap(self.layer)(x) if self.is_mapped else self.layer(x)
        return output


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_a_forward_that_maps_over_its_examples_is_that_of_their_batch(kind: str, size: int) -> None:
    results = []
    for is_mapped in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(5, 5) if kind == "linear" else nn.Conv1d(5, 5, 3, padding=1)
        model, x = Mapped(layer, is_mapped), torch.randn(size, 5, *(() if kind == "linear" else (4,)))
        optimizer = KFACOptimizer(model, lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            output = model(x)
            output.square().mean().backward()
            optimizer.step()
        results.append((output, [param.grad for param in model.parameters()], optimizer.factors()))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["linear", "convolutions", "images"])
def test_points_one_by_one_without_a_batch_dimension_count_as_their_batch(name: str) -> None:
    results = []
    for alone in (False, True):
        torch.manual_seed(0)
        model, x = MODELS[name]().double(), torch.randn(3, 6, dtype=torch.float64)
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky())
        total = torch.zeros((), dtype=torch.float64)
        for points in x if alone else [x]:
            leaf = points.clone().requires_grad_()
            output = model(leaf)
            (gradient,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
            total = total + gradient.square().sum() + output.square().sum()
        (total / 3).backward()
        optimizer.step()
        results.append(optimizer.factors())
    for key, pair in results[0].items():
        assert_same(results[1][key], pair, rtol=1e-9)


class Apart(nn.Linear):
    """Adds its bias by itself."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return F.linear(input, self.weight) + self.bias


@pytest.mark.parametrize("penalty", [False, True])
def test_a_subclass_of_linear_that_adds_its_bias_apart_is_followed_as_plain(penalty: bool) -> None:
    results = []
    for first in (nn.Linear(6, 4), Apart(6, 4)):
        torch.manual_seed(0)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2)).double()
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        model[0].load_state_dict({"weight": torch.ones(4, 6), "bias": torch.zeros(4)})
        optimizer = KFACOptimizer(model, lr=0.0, inverse=Cholesky(), factor_update_period=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                optimizer.zero_grad()
                output = model(x)
                (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                (output.square().sum() + penalty * gradient.square().sum()).backward()
                optimizer.step()
        results.append(optimizer.factors())
    for name, pair in results[0].items():
        assert_same(results[1][name], pair, rtol=1e-12)
