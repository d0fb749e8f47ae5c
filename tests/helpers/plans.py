"""Models, strategies and options that plans are made of, as hypothesis draws them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from kfac_optim import (
    EKFAC,
    Cholesky,
    Eigen,
    Inverse,
    InverseAndRoot,
    LayerSpec,
    LowRank,
    NewtonSchulz,
    Structure,
    SumOfTerms,
)
from kfac_optim.distributed import (
    CostModel,
    Covered,
    Exchange,
    Placement,
    PlanOptions,
    Replicated,
    Sharded,
    Statistics,
    Uncovered,
)
from kfac_optim.distributed.planning import planner

DENSE, DIAGONAL, IDENTITY = Structure.DENSE, Structure.DIAGONAL, Structure.IDENTITY
COST = CostModel(flop_rate=1e12, bandwidth=1e10, latency=1e-5, solver_rate=1e11)
INVERSES: list[Inverse[Any]] = [
    Cholesky(),
    LowRank(1),
    NewtonSchulz(),
    Eigen(),
    InverseAndRoot(),
    SumOfTerms(),
    EKFAC(),
]

structures = st.sampled_from(
    [(DENSE, DENSE), (DENSE, DIAGONAL), (DIAGONAL, DENSE), (IDENTITY, DENSE), (DENSE, IDENTITY)]
)


def gpt(layers: int = 24, width: int = 1024, tokens: int = 8 * 1024) -> list[Covered | Uncovered]:
    """The linear layers of a GPT without biases, query, key and value as one."""
    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    return [
        Covered(LayerSpec(f"{layer}.{name}", ("weight",), inputs * width, outputs * width), Cholesky(), tokens)
        for layer in range(layers)
        for name, (inputs, outputs) in shapes.items()
    ]


@st.composite
def models(draw: st.DrawFn) -> list[Covered | Uncovered]:
    model: list[Covered | Uncovered] = []
    for number in range(draw(st.integers(1, 7))):
        if draw(st.integers(0, 4)) == 0:
            model.append(Uncovered(f"p{number}", draw(st.integers(1, 50))))
            continue
        layer = LayerSpec(
            f"l{number}",
            ("weight",),
            draw(st.integers(1, 9)),
            draw(st.integers(1, 9)),
            groups=draw(st.integers(1, 3)),
            structure=draw(structures),
        )
        model.append(Covered(layer, draw(st.sampled_from(INVERSES)), draw(st.integers(0, 100))))
    return model


strategies_ = st.builds(
    Replicated, st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0]), st.sampled_from(Placement), st.sampled_from(Statistics)
) | st.builds(Sharded, st.sampled_from(Placement), st.sampled_from(Statistics))
options_ = st.builds(
    PlanOptions,
    factor_update_period=st.sampled_from([1, 10]),
    inverse_update_period=st.sampled_from([1, 10, 100]),
    bucket_bytes=st.sampled_from([1, 64, 1000, 10**6]),
    sums_dtype=st.sampled_from([None, torch.bfloat16]),
    momentum=st.booleans(),
    scalars=st.sampled_from([(), (3, 1), (5,)]),
    exchange=st.sampled_from(Exchange),
)


def equal_layers(count: int, a: int, g: int, rows: int = 0) -> list[Covered | Uncovered]:
    return [Covered(LayerSpec(f"l{i}", ("weight",), a, g), Cholesky(), rows) for i in range(count)]


@contextmanager
def largest_everywhere(*, on: bool = True) -> Iterator[None]:
    """All ranks work on the largest layer, and on the largest parameter without one, however few ranks there are."""

    def largest(model: Sequence[Covered | Uncovered], *_: object) -> frozenset[str]:
        kinds = [[each for each in model if isinstance(each, kind)] for kind in (Covered, Uncovered)]
        return frozenset(max(kind, key=lambda each: (each.words, each.name)).name for kind in kinds if kind)

    with mock.patch.object(planner, "on_all_ranks", largest if on else planner.on_all_ranks):
        yield
