"""The arithmetic floor against operations counted by hand, and the models against their papers."""

import pytest
import torch
from torch import nn

from benchmarks import floor
from benchmarks.arguments import Periods
from benchmarks.floor import LayerWork
from benchmarks.models import Autoencoder, PlainCNN, ResNet20, Transformer, initialise_sparsely, mlp


def test_the_operations_of_a_layer_are_those_of_the_formulas() -> None:
    layer = LayerWork(rows=8, in_dim=3, out_dim=2)
    assert layer.statistics == 8 * (9 + 4)
    assert layer.application == 2 * 3 * 2 * (3 + 2)
    assert layer.refresh == 27 + 8


def test_the_overhead_is_amortised_over_the_periods() -> None:
    layer = LayerWork(rows=8, in_dim=3, out_dim=2)
    assert floor.overhead([layer], Periods(2, 7)) == 104 / 2 + 60 + 35 / 7
    assert floor.overhead([layer, layer], Periods(1, 1)) == 2 * (104 + 60 + 35)


def test_layers_are_observed_with_their_rows_and_bias_columns() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, groups=2, padding=1, bias=False), nn.Flatten(), nn.Linear(6 * 25, 4), nn.ReLU()
    )
    assert floor.observe(model, torch.zeros(7, 2, 5, 5)) == [
        LayerWork(rows=7 * 25, in_dim=9, out_dim=3, groups=2),
        LayerWork(rows=7, in_dim=151, out_dim=4),
    ]


@pytest.mark.parametrize(
    ("model", "inputs", "shape", "parameters"),
    [
        pytest.param(ResNet20(), torch.zeros(2, 3, 32, 32), (2, 10), 269_722, id="resnet20"),
        pytest.param(PlainCNN(), torch.zeros(2, 3, 32, 32), (2, 10), 482_058, id="cnn"),
        pytest.param(Autoencoder(), torch.zeros(2, 784), (2, 784), 2_837_314, id="autoencoder"),
        pytest.param(Transformer(), torch.zeros(2, 128, dtype=torch.long), (2, 128, 65), None, id="transformer"),
        pytest.param(mlp((4, 3, 2), nn.Tanh), torch.zeros(5, 2, 2), (5, 2), 4 * 3 + 3 + 3 * 2 + 2, id="mlp"),
    ],
)
def test_models_have_the_shapes_of_their_papers(
    model: nn.Module, inputs: torch.Tensor, shape: tuple[int, ...], parameters: int | None
) -> None:
    assert model(inputs).shape == shape
    if parameters is not None:
        assert sum(param.numel() for param in model.parameters()) == parameters


def test_the_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = Transformer()
    text = torch.randint(65, (1, 128))
    changed = text.clone()
    changed[0, 64:] = (changed[0, 64:] + 1) % 65
    torch.testing.assert_close(model(text)[:, :64], model(changed)[:, :64])


def test_sparse_initialisation_gives_each_unit_as_many_normal_weights() -> None:
    model = mlp((400, 300, 6, 20), nn.Tanh)
    initialise_sparsely(model, scale=0.5)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, inputs in zip(layers, (15, 15, 6), strict=True):
        assert torch.equal(layer.weight.count_nonzero(dim=1), torch.full((layer.out_features,), inputs))
        assert layer.bias.count_nonzero() == 0
    weight = layers[0].weight.detach()
    weights = weight[weight != 0]  # 4,500
    assert weights.std() == pytest.approx(0.5, rel=0.05)
    assert weights.mean() == pytest.approx(0, abs=0.03)
    used = weight.count_nonzero(dim=0)  # 4,500 weights spread over 400 inputs: 11.25 each
    assert used.min() >= 1
    assert used.max() <= 30
