"""The arithmetic floor of K-FAC: the operations that its plain formulas ask for, whatever the code around them costs.

For a layer with N rows (examples × positions), in floating-point operations:

    forward and backward   6 · N · in · out
    statistics             N · (in² + out²)            two Gram matrices, the symmetric half counted once
    application            2 · in · out · (in + out)   two matrix products, in every step
    refresh                in³ + out³                  two inverses

``in`` counts the bias column. Code may go below this floor, for example by not unfolding a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.arguments import Periods


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Describes a call of a layer: ``groups`` gradient matrices ``[out_dim, in_dim]``, with ``rows`` rows each."""

    rows: int
    in_dim: int
    out_dim: int
    groups: int = 1

    @property
    def statistics(self) -> int:
        return self.groups * self.rows * (self.in_dim**2 + self.out_dim**2)

    @property
    def application(self) -> int:
        return self.groups * 2 * self.in_dim * self.out_dim * (self.in_dim + self.out_dim)

    @property
    def refresh(self) -> int:
        return self.groups * (self.in_dim**3 + self.out_dim**3)


def overhead(layers: Sequence[LayerWork], periods: Periods) -> float:
    """Return the floating-point operations that K-FAC adds to a training step, averaged over the periods."""
    return sum(
        layer.statistics / periods.factor + layer.application + layer.refresh / periods.inverse for layer in layers
    )


@torch.no_grad()
def observe(model: nn.Module, inputs: Tensor) -> list[LayerWork]:
    """Return the linear and convolution layers that ``model(inputs)`` runs, in order, with their numbers of rows."""
    layers: list[LayerWork] = []

    def record(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            in_dim, out_dim, groups = layer.in_features, layer.out_features, 1
        elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            groups = layer.groups
            in_dim = layer.in_channels // groups * math.prod(layer.kernel_size)
            out_dim = layer.out_channels // groups
        else:
            return
        rows = output.numel() // (out_dim * groups)
        layers.append(LayerWork(rows, in_dim + (layer.bias is not None), out_dim, groups))

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return layers
