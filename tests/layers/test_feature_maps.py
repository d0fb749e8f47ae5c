"""The channels of a flattened feature map are those that a forward shows, and are not guessed where it is not seen."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.layers.feature_maps import flattened_channels


def channels_of(model: nn.Module, layer: nn.Module) -> int | None:
    path = next(path for path, module in model.named_modules(remove_duplicate=False) if module is layer)
    return flattened_channels([module for _, module in ModuleNames(model).lineage(path)])


@st.composite
def nested(draw: st.DrawFn, modules: list[nn.Module]) -> nn.Sequential:
    """The modules in order, some of them in a Sequential of their own, or in one more inside that."""
    if len(modules) < 2 or draw(st.booleans()):
        return nn.Sequential(*modules)
    start, end = sorted(draw(st.lists(st.integers(0, len(modules)), min_size=2, max_size=2)))
    inner = draw(nested(modules[start:end])) if end - start < len(modules) else nn.Sequential(*modules[start:end])
    return nn.Sequential(*modules[:start], inner, *modules[end:])


KEEPING: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.PReLU,
    nn.Softmax2d,
    nn.Identity,
    nn.Dropout2d,
    lambda: nn.MaxPool2d(2, 1),
    lambda: nn.AdaptiveAvgPool2d((2, 3)),
    lambda: nn.ZeroPad2d(1),
    lambda: nn.Upsample(scale_factor=2),
    lambda: nn.BatchNorm2d(6),
    lambda: nn.GroupNorm(3, 6),
]


@st.composite
def conv_nets(draw: st.DrawFn) -> tuple[nn.Sequential, nn.Linear]:
    maker = draw(
        st.sampled_from(
            [nn.Conv2d(2, 6, 3), nn.Conv2d(2, 6, 3, groups=2), nn.ConvTranspose2d(2, 6, 2), nn.LazyConv2d(6, 3)]
        )
    )
    keeping = st.sampled_from(KEEPING)
    after = st.sampled_from([nn.Dropout, nn.Identity, nn.Tanh])
    front = [maker, *(build() for build in draw(st.lists(keeping, max_size=3)))]
    between = [nn.Flatten(), *(build() for build in draw(st.lists(after, max_size=2)))]
    features = nn.Sequential(*front, *between)(torch.randn(2, 2, 5, 5)).shape[1]
    layer = nn.Linear(features, 3)
    return draw(nested([nn.Conv2d(2, 2, 1), nn.ReLU(), *front, *between, layer, nn.ReLU(), nn.Linear(3, 2)])), layer


@given(built=conv_nets())
def test_they_are_those_of_the_tensor_that_is_flattened(built: tuple[nn.Sequential, nn.Linear]) -> None:
    model, layer = built
    maps: list[Tensor] = []
    flatten = next(module for module in model.modules() if isinstance(module, nn.Flatten))
    flatten.register_forward_pre_hook(lambda _, args: maps.append(args[0]))
    model(torch.randn(2, 2, 5, 5))
    assert channels_of(model, layer) == maps[0].shape[1] == 6
    last = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not layer]
    assert [channels_of(model, other) for other in last] == [None]


class Own(nn.Sequential):
    """What it does with its children is not seen from outside."""

    def forward(self, layer_input: Tensor) -> Tensor:
        return super().forward(layer_input.flip(1))


def linear_after(*before: nn.Module, container: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return container(*before, nn.Linear(12, 3))


@pytest.mark.parametrize(
    "build",
    [
        lambda: linear_after(),
        lambda: linear_after(nn.Conv1d(2, 3, 1)),  # not flattened: rows of positions
        lambda: linear_after(nn.Flatten()),
        lambda: linear_after(nn.Linear(2, 12), nn.Flatten()),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(2)),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(0)),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(1, 2)),  # may be all, or not
        lambda: linear_after(nn.Conv1d(2, 6, 1), nn.GLU(1), nn.Flatten()),
        lambda: linear_after(nn.Conv2d(2, 12, 1), nn.PixelShuffle(2), nn.Flatten()),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Unflatten(1, (3, 4))),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 12)),
        lambda: linear_after(nn.Conv1d(2, 3, 1), nn.Flatten(), container=Own),
        lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.ModuleList([nn.Linear(12, 3)])),
    ],
)
def test_where_it_is_not_seen_nothing_is_said(build: Callable[[], nn.Module]) -> None:
    model = build()
    layer = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    assert channels_of(model, layer) is None


def test_a_container_of_ones_own_without_a_forward_is_seen_through() -> None:
    class Features(nn.Sequential):
        pass

    model = nn.Sequential(Features(nn.Conv1d(2, 3, 1), nn.ReLU()), nn.Flatten(), nn.Linear(12, 3))
    assert channels_of(model, model[2]) == 3


def test_a_layer_that_runs_twice_reads_two_things() -> None:
    layer = nn.Linear(12, 12)
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), layer, layer)
    assert channels_of(model, layer) is None


def test_only_a_linear_layer_reads_a_flattened_map() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.LayerNorm(12))
    assert channels_of(model, model[2]) is None
