"""Choosing layers by glob or class: recursive, first match wins, and wrappers' prefixes do not matter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain import batch, square_loss
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from kfac_optim import Cholesky, KFACOptimizer, LayerSpec, Structure, WeightSharing
from kfac_optim.layers import LinearAdapter

EXPAND, REDUCE = WeightSharing.EXPAND, WeightSharing.REDUCE


class Special(nn.Linear):
    """A subclass: patterns and adapters of its base are its own."""


class Container(nn.Sequential):
    """A class of one's own to select by."""


class Net(nn.Module):
    """encoder.{0, 2.{0, 1}}, decoder.{0 (Special), conv}, head, head2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(
            nn.Linear(4, 4), nn.Tanh(), Container(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        )
        self.decoder = nn.ModuleDict({"0": Special(4, 4), "conv": nn.Conv1d(1, 1, 3, padding=1)})
        self.head = nn.Linear(4, 3)
        self.head2 = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.decoder["0"](self.encoder(x))
        x = self.decoder["conv"](x[:, None])[:, 0]
        return self.head(x) + self.head2(x)


ALL = ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0", "decoder.conv", "head", "head2"]


def covered(model: nn.Module, **options: Any) -> list[str]:
    return [block.name for block in KFACOptimizer(model, **options).summary().blocks]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ([], ALL),
        (["encoder"], ["decoder.0", "decoder.conv", "head", "head2"]),
        (["encoder.2"], ["encoder.0", "decoder.0", "decoder.conv", "head", "head2"]),
        (["encoder.2.*"], ["encoder.0", "decoder.0", "decoder.conv", "head", "head2"]),
        (["encoder.?"], ["decoder.0", "decoder.conv", "head", "head2"]),
        (["*.0"], ["encoder.2.1", "decoder.conv", "head", "head2"]),
        (["head"], ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0", "decoder.conv", "head2"]),
        (["head*"], ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0", "decoder.conv"]),
        (["head[!2]*", "head2"], None),
        (["*conv"], ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0", "head", "head2"]),
        ([nn.Conv1d], ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0", "head", "head2"]),
        ([Special], ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.conv", "head", "head2"]),
        ([nn.Linear], ["decoder.conv"]),
        ([Container], ["encoder.0", "decoder.0", "decoder.conv", "head", "head2"]),
        ([nn.Sequential], ["decoder.0", "decoder.conv", "head", "head2"]),
        ([nn.Conv1d, "encoder"], ["decoder.0", "head", "head2"]),
        (("decoder", "head2"), ["encoder.0", "encoder.2.0", "encoder.2.1", "head"]),
        ({"decoder", "head2"}, ["encoder.0", "encoder.2.0", "encoder.2.1", "head"]),
        (["*"], []),
        ([nn.Module], []),
        ([Net], []),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # every worker names it alike
)
def test_skip_layers_leaves_what_matches_and_everything_inside_to_sgd(skip: Any, left: list[str] | None) -> None:
    if left is None:
        with pytest.raises(ValueError, match=r"'head\[!2\]\*' matches no module"):
            covered(Net(), skip_layers=skip)
    else:
        assert covered(Net(), skip_layers=skip) == left


def test_globs_tell_upper_from_lower_case() -> None:
    with pytest.raises(ValueError, match="'Head' matches no module"):
        KFACOptimizer(Net(), skip_layers=["Head"])


def test_the_reason_in_the_summary_is_the_first_entry_that_matches() -> None:
    optimizer = KFACOptimizer(Net(), skip_layers=["encoder.2", nn.Sequential])
    reasons = {record.name: record.reason for record in optimizer.summary().parameters}
    assert reasons["encoder.2.0.weight"] == "skip_layers entry 'encoder.2'"
    assert reasons["encoder.0.weight"] == "skip_layers entry 'Sequential'"


@pytest.mark.parametrize(
    ("choice", "reduced"),
    [
        (REDUCE, ALL),
        ({}, []),
        ({"encoder": REDUCE}, ["encoder.0", "encoder.2.0", "encoder.2.1"]),
        ({"encoder.0": EXPAND, "encoder": REDUCE}, ["encoder.2.0", "encoder.2.1"]),
        ({"encoder": REDUCE, "encoder.0": EXPAND}, ["encoder.0", "encoder.2.0", "encoder.2.1"]),
        ({Special: EXPAND, nn.Linear: REDUCE}, ["encoder.0", "encoder.2.0", "encoder.2.1", "head", "head2"]),
        ({nn.Linear: REDUCE}, [name for name in ALL if name != "decoder.conv"]),
        ({nn.Conv1d: REDUCE, "*": EXPAND}, ["decoder.conv"]),
        ({"*": REDUCE, nn.Conv1d: EXPAND}, ALL),
        ({"encoder.2": EXPAND, Net: REDUCE}, ["encoder.0", "decoder.0", "decoder.conv", "head", "head2"]),
    ],
    ids=str,
)
def test_of_a_mapping_the_first_pattern_that_matches_a_layer_or_what_contains_it_wins(
    choice: Any, reduced: list[str]
) -> None:
    blocks = KFACOptimizer(Net(), weight_sharing=choice).summary().blocks
    assert [block.name for block in blocks if block.weight_sharing is REDUCE] == reduced


def test_structure_and_inverse_take_mappings_too_and_default_for_the_rest() -> None:
    class Named(Cholesky):
        def __repr__(self) -> str:
            return "Named()"

    foof = (Structure.DENSE, Structure.IDENTITY)
    optimizer = KFACOptimizer(Net(), structure={"head*": foof}, inverse={nn.Conv1d: Named()})
    found = {block.name: (block.structure, block.inverse) for block in optimizer.summary().blocks}
    for name, (structure, inverse) in found.items():
        assert structure == (foof if name.startswith("head") else (Structure.DENSE, Structure.DENSE))
        assert inverse == ("Named()" if name == "decoder.conv" else "Cholesky()")


# -- wrappers ----------------------------------------------------------------------------------------------------


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def inner_checkpoint(model: nn.Module) -> nn.Module:
    model.encoder = checkpoint_wrapper(model.encoder)
    return model


def data_parallel_of_compiled(model: nn.Module) -> nn.Module:
    return data_parallel(compiled(model))


WRAPPERS = [data_parallel, compiled, inner_checkpoint, data_parallel_of_compiled]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_are_those_of_the_unwrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    summary = KFACOptimizer(wrap(Net())).summary()
    assert [block.name for block in summary.blocks] == ALL
    assert [record.name for record in summary.parameters] == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("skip", ["encoder", "encoder.2.*", "head", "*.0", "decoder.conv"])
def test_patterns_mean_the_same_for_a_wrapped_model(skip: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert covered(wrap(Net()), skip_layers=[skip]) == covered(Net(), skip_layers=[skip])
    wrapped = KFACOptimizer(wrap(Net()), weight_sharing={skip: REDUCE}).summary().blocks
    plain = KFACOptimizer(Net(), weight_sharing={skip: REDUCE}).summary().blocks
    assert [block.weight_sharing for block in wrapped] == [block.weight_sharing for block in plain]


def test_a_checkpoint_of_the_plain_model_loads_into_a_wrapped_one() -> None:
    state = KFACOptimizer(Net()).state_dict()
    KFACOptimizer(data_parallel(Net())).load_state_dict(state)


def test_a_submodule_that_is_called_module_is_no_wrapper() -> None:
    """Names must stay apart: `factors()` and checkpoints go by them."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 4))
            self.add_module("0", nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("0")(self.module(x))

    model = Adapted()
    optimizer = KFACOptimizer(model)
    square_loss(model(batch(dtype=torch.float32))).backward()
    optimizer.step()
    assert len(optimizer.factors()) == len(optimizer.summary().blocks) == 2
    names = [record.name for record in optimizer.summary().parameters]
    assert len(set(names)) == len(names) == 4


# -- adapters ----------------------------------------------------------------------------------------------------


def test_a_subclass_is_found_along_its_method_resolution_order() -> None:
    class Deeper(Special):
        pass

    (block,) = KFACOptimizer(Deeper(4, 3)).summary().blocks
    assert block.layer == "Deeper"


class Traced(LinearAdapter):
    """An adapter of one's own that shows in the spec's name."""

    def specs(self, module: nn.Module, name: str, trained: Any) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(f"{spec.name}!", spec.params, spec.in_dim, spec.out_dim)
            for spec in super().specs(module, name, trained)
        )


@pytest.mark.parametrize(
    ("adapters", "names"),
    [
        ({nn.Linear: Traced()}, ["encoder.0!", "encoder.2.0!", "encoder.2.1!", "decoder.0!", "head!", "head2!"]),
        ({Special: Traced()}, ["decoder.0!"]),
        (
            {nn.Linear: LinearAdapter(), Special: Traced()},
            ["encoder.0", "encoder.2.0", "encoder.2.1", "decoder.0!", "head", "head2"],
        ),
    ],
)
def test_the_adapter_of_the_nearest_class_is_used_and_classes_without_one_are_left_to_sgd(
    adapters: Any, names: list[str]
) -> None:
    assert covered(Net(), adapters=adapters) == names


def test_an_adapter_of_ones_own_makes_a_layer_of_ones_own_precondition_like_a_linear() -> None:
    class Scaled(nn.Module):
        """`2 (W x) + b` without inheriting from nn.Linear."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model, linear = Scaled(), nn.Linear(4, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(model.weight)
    ours = KFACOptimizer(model, lr=0.1, adapters={Scaled: LinearAdapter()})
    theirs = KFACOptimizer(linear, lr=0.1)
    for optimizer, owner in ((ours, model), (theirs, linear)):
        square_loss(owner(batch())).backward()
        optimizer.step()
    assert torch.equal(model.weight, linear.weight)
    assert not torch.allclose(model.weight, torch.ones(3, 4, dtype=torch.float64) - 0.1 * model.weight.grad)


class Mutable(Cholesky):
    """Has no hash."""

    __hash__ = None  # type: ignore[assignment]


class Tied(nn.Module):
    """A module that goes by two names, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Embedding(6, 4)
        self.encoder = nn.ModuleDict({"embed": self.shared})
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.shared.weight


def test_a_choice_by_the_second_name_of_a_module_is_refused_with_its_first() -> None:
    with pytest.raises(ValueError, match=r"matches no module. 'encoder.embed' goes by its first name, 'shared'"):
        KFACOptimizer(Tied(), skip_layers=["encoder.embed"])


def test_a_choice_for_either_user_of_a_weight_is_one_for_the_weight() -> None:
    (block,) = KFACOptimizer(Tied(), inverse={"head": Cholesky()}).summary().blocks
    assert block.inverse == "Cholesky()"
    with pytest.raises(TypeError, match=r"cannot be hashed.*Declare Mutable as @dataclass\(frozen=True\)"):
        KFACOptimizer(Tied(), inverse=Mutable())
