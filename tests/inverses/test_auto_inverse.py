"""`AutoInverse`: what it chooses, that the choice always fits, and that equal choices are one to the optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, block, clones, mlp, square_loss, train
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import (
    EKFAC,
    AutoInverse,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseAndRoot,
    InverseRule,
    KFACOptimizer,
    LayerSpec,
    LowRank,
    NewtonSchulz,
    Structure,
)

pytestmark = pytest.mark.usefixtures("float64")

DENSE, DIAGONAL, IDENTITY = Structure
ALL = [Cholesky(), DoublyFactored(4), EKFAC(), Eigen(), InverseAndRoot(), LowRank(), NewtonSchulz()]


def chosen(model: nn.Module, **options: Any) -> dict[str, str]:
    options = {"inverse": AutoInverse(), **options}
    return {each.name: each.inverse for each in KFACOptimizer(model, lr=0.1, **options).summary().blocks}


def conv_net(outputs: int = 3) -> nn.Sequential:
    """4 channels and 9 positions are flattened: the linear layer has 37 columns."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(36, outputs))


def images(n: int = 6) -> Tensor:
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def conv_train(model: nn.Module, optimizer: KFACOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        square_loss(model(images())).backward()
        optimizer.step()


# -- what it chooses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "limit", "channels", "expected"),
    [
        ((37, 3), {}, 36, 4, DoublyFactored(4)),
        ((37, 3), {}, 9, 4, DoublyFactored(4)),
        ((37, 3), {}, 37, 4, Cholesky()),  # not wider than the limit
        ((37, 3), {}, 8, 4, Cholesky()),  # 9 positions are
        ((37, 9), {}, 9, 4, DoublyFactored(4)),
        ((37, 10), {}, 9, 4, Cholesky()),  # nor may out be
        ((37, 3), {}, 36, 9, DoublyFactored(9)),
        ((37, 3), {}, 36, 5, Cholesky()),  # 36 columns are no multiple of 5
        ((37, 3), {}, 36, None, Cholesky()),
        ((37, 3), {"groups": 2}, 36, 4, Cholesky()),
        ((37, 3), {"opposed": True}, 36, 4, Cholesky()),
        ((37, 3), {"structure": (DENSE, IDENTITY)}, 36, 4, Cholesky()),
        ((37, 3), {"structure": (DENSE, DIAGONAL)}, 36, 4, Cholesky()),
        ((5, 3), {"structure": (DIAGONAL, DIAGONAL)}, 9, None, Cholesky()),
        ((5, 3), {"structure": (IDENTITY, DENSE)}, 2, None, Cholesky()),
        ((2, 1), {"groups": 64}, 9, None, Cholesky()),  # of a norm layer
        ((255, 255), {}, 8192, None, Cholesky()),
        ((256, 3), {}, 8192, None, LowRank(sketch=64)),
        ((3, 256), {}, 8192, None, LowRank(sketch=64)),
        ((512, 512), {"structure": (IDENTITY, DIAGONAL)}, 8192, None, Cholesky()),
    ],
)
def test_the_shape_decides(
    shape: tuple[int, int], options: dict[str, Any], limit: int, channels: int | None, expected: Inverse[Any]
) -> None:
    spec = LayerSpec("layer", ("weight", "bias"), *shape, **options)
    assert AutoInverse().choose(spec, limit, channels) == expected


def test_in_a_model_it_sees_what_was_flattened() -> None:
    model = nn.Sequential(*conv_net(), nn.Tanh(), nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    assert chosen(model, max_factor_dim=20) == {
        "0": "Cholesky()",
        "3": "DoublyFactored(channels=4)",
        "5": "Cholesky()",
        "6": "Cholesky()",
        "7": "Cholesky()",
    }
    assert set(chosen(model).values()) == {"Cholesky()"}  # 37 columns are few


def test_the_structure_of_the_block_is_that_which_the_choice_needs() -> None:
    for limit, structure, note in (
        (20, (DENSE, DENSE), ()),
        (8, (DIAGONAL, DENSE), ("A is diagonal: 37 > max_factor_dim 8",)),
    ):
        record = KFACOptimizer(conv_net(), inverse=AutoInverse(), max_factor_dim=limit).summary().blocks[-1]
        assert (record.structure, record.notes) == (structure, note)


def test_it_can_stand_in_a_mapping() -> None:
    by_name = {"0": NewtonSchulz(), "*": AutoInverse()}
    assert chosen(conv_net(), inverse=by_name, max_factor_dim=20) == {
        "0": repr(NewtonSchulz()),
        "3": "DoublyFactored(channels=4)",
    }


def test_a_weight_that_other_layers_use_too_is_not_doubly_factored() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = conv_net()
            self.other = nn.Linear(36, 3)
            self.other.weight, self.other.bias = self.net[3].weight, self.net[3].bias

    assert chosen(Tied(), max_factor_dim=20) == {"net.0": "Cholesky()", "net.3": "Cholesky()"}


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=4),
    structure=st.sampled_from([(left, right) for left in Structure for right in Structure if left is not IDENTITY]),
    limit=st.integers(1, 30),
)
def test_what_it_chooses_fits_and_keeps_no_matrix_above_the_limit(
    sizes: Sequence[int], structure: tuple[Structure, Structure], limit: int
) -> None:
    channels, positions, *outputs = sizes
    layers: list[nn.Module] = [nn.Conv1d(2, channels, 1), nn.Flatten()]
    width = channels * positions
    for out in outputs:
        layers += [nn.Linear(width, out), nn.Tanh()]
        width = out
    model = nn.Sequential(*layers)
    optimizer = KFACOptimizer(model, inverse=AutoInverse(), structure=structure, max_factor_dim=limit)
    square_loss(model(torch.randn(5, 2, positions))).backward()
    optimizer.step()
    for each in optimizer._binding.coverage.blocks:
        state = each.state.tensors()
        assert all(min(tensor.shape[-2:]) <= limit for tensor in tensors_in(state) if tensor.dim() == 3)


def tensors_in(nested: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in nested.values():
        found += tensors_in(value) if isinstance(value, dict) else [value]
    return found


# -- the blocks hold what was chosen, and nothing of the rule ------------------------------------------------------


def test_a_run_is_that_with_the_choices_written_out() -> None:
    by_name = {"3": DoublyFactored(4), "*": Cholesky()}
    models = [conv_net() for _ in range(2)]
    for model, inverse in zip(models, (AutoInverse(), by_name), strict=True):
        conv_train(model, KFACOptimizer(model, lr=0.1, inverse=inverse, max_factor_dim=20, factor_update_period=1), 5)
    assert_identical(*(clones(model.parameters()) for model in models))


def test_a_checkpoint_is_that_of_the_choices() -> None:
    model, twin = conv_net(), conv_net()
    optimizer = KFACOptimizer(model, lr=0.1, inverse=AutoInverse(), max_factor_dim=20, factor_update_period=1)
    conv_train(model, optimizer, 3)
    resumed = KFACOptimizer(
        twin, lr=0.1, inverse={"3": DoublyFactored(4), "0": Cholesky()}, max_factor_dim=20, factor_update_period=1
    )
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for each, run in ((model, optimizer), (twin, resumed)):
        conv_train(each, run, 3)
    assert_identical(clones(twin.parameters()), clones(model.parameters()))


def test_equal_choices_are_refreshed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    refresh = Cholesky.refresh

    def counting(self: Cholesky, states: Sequence[Any], dampings: Sequence[float]) -> None:
        calls.append(len(states))
        refresh(self, states, dampings)

    monkeypatch.setattr(Cholesky, "refresh", counting)
    model = mlp(sizes=(4, 4, 4, 4))
    train(model, KFACOptimizer(model, lr=0.1, inverse={"0": AutoInverse(), "2": AutoInverse(), "4": Cholesky()}), 1)
    assert calls == [3]


@pytest.mark.parametrize("inverse", ALL, ids=repr)
def test_inverses_are_equal_by_their_choices(inverse: Inverse[Any]) -> None:
    twin = type(inverse)(**vars(inverse))
    assert twin is not inverse
    assert twin == inverse
    assert hash(twin) == hash(inverse)
    assert [other for other in ALL if other == inverse] == [inverse]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DoublyFactored(2), DoublyFactored(3)),
        (LowRank(), LowRank(64)),
        (LowRank(), LowRank(iterations=1)),
        (NewtonSchulz(), NewtonSchulz(steps=9)),
        (NewtonSchulz(), NewtonSchulz(tolerance=0.1)),
        (NewtonSchulz(), NewtonSchulz(dtype=torch.bfloat16)),
        (LowRank(), LowRank(3)),
        (EKFAC(), EKFAC(per_example=False)),
    ],
    ids=repr,
)
def test_inverses_of_other_choices_are_not(one: Inverse[Any], other: Inverse[Any]) -> None:
    assert one != other


def test_when_the_blocks_are_made_again_their_statistics_are_kept() -> None:
    model = mlp(sizes=(4, 4, 4))
    model[2].requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, inverse=AutoInverse(), factor_update_period=1)
    train(model, optimizer, 2)
    kept = block(optimizer, "0")
    model[2].requires_grad_(True)
    train(model, optimizer, 1)
    assert {each.name for each in optimizer.summary().blocks} == {"0", "2"}
    assert block(optimizer, "0") is kept


# -- a rule of one's own -------------------------------------------------------------------------------------------


class Narrow(InverseRule):
    """Exact damping for narrow layers."""

    def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
        return Eigen() if max(spec.in_dim, spec.out_dim) < 6 else AutoInverse().choose(spec, max_factor_dim, channels)


def test_a_rule_of_ones_own_is_asked() -> None:
    model = mlp(sizes=(4, 4, 7, 3))
    assert chosen(model, inverse=Narrow()) == {"0": "Eigen()", "2": "Cholesky()", "4": "Cholesky()"}


@pytest.mark.parametrize("build", [lambda: InverseRule, lambda: AutoInverse])
def test_a_class_in_place_of_an_object_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"inverse must be an Inverse, an InverseRule or a mapping .*, got <class"):
        KFACOptimizer(mlp(), inverse=build())


def test_a_rule_is_told_what_is_wished_for_and_how_the_weight_is_used() -> None:
    class Recording(InverseRule):
        def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
            seen[spec.name] = (spec.structure, spec.opposed, max_factor_dim, channels)
            return Cholesky()

    seen: dict[str, tuple[Any, ...]] = {}
    model = nn.ModuleDict({"net": conv_net(), "tokens": nn.Embedding(8, 6), "head": nn.Linear(6, 8, bias=False)})
    model["head"].weight = model["tokens"].weight
    KFACOptimizer(model, inverse=Recording(), max_factor_dim=7, structure={"net": (DENSE, DIAGONAL)})
    assert seen == {
        "net.0": ((DENSE, DIAGONAL), False, 7, None),
        "net.3": ((DENSE, DIAGONAL), False, 7, 4),
        "tokens": ((DIAGONAL, DENSE), True, 7, None),
    }
