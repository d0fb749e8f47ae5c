"""`summary()`, `metrics()`, `factors()` against what can be counted and computed beside them."""

import copy
import math
import re
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plain import (
    assert_identical,
    batch,
    block,
    clones,
    gradient_matrix,
    layer_direction,
    linear_factors,
    mlp,
    refresh_steps,
    square_loss,
    train,
    trust_region,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from kfac_optim import EKFAC, Cholesky, KFACOptimizer, LineSearch, Structure, TrustRegion, WeightSharing

README = Path(__file__).parents[1] / "kfac_optim" / "README.md"


class Zoo(nn.Module):
    """One layer for every reason why a parameter may be left to SGD, and some that are preconditioned."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.bias_frozen = nn.Linear(4, 4)
        self.bias_frozen.bias.requires_grad_(False)
        self.weight_frozen = nn.Linear(4, 4)
        self.weight_frozen.weight.requires_grad_(False)
        self.slope = nn.PReLU()
        self.normed = parametrizations.orthogonal(nn.Linear(4, 4))
        self.skipped = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(1, 1, 3))
        self.lazy = nn.LazyLinear(4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.embedding = nn.Embedding(7, 4, sparse=True)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.complex = nn.Linear(4, 4, dtype=torch.cfloat)
        self.scale = nn.Parameter(torch.ones(()))


def zoo() -> tuple[Zoo, KFACOptimizer, nn.Parameter]:
    model = Zoo()
    stray = nn.Parameter(torch.ones(2))
    return model, KFACOptimizer([*model.parameters(), stray], model=model, skip_layers=["skipped"]), stray


# Parameter → part of the reason; every parameter that is not here is covered.
REASONS = {
    "bias_frozen.bias": "requires_grad is False",
    "weight_frozen.weight": "requires_grad is False",
    "weight_frozen.bias": "weight it belongs to is not trained",
    "slope.weight": "no adapter for PReLU",
    "normed.bias": "parametrized",
    "normed.parametrizations.weight.original": "no adapter for ParametrizationList",
    "skipped.0.weight": "skip_layers entry 'skipped'",
    "skipped.0.bias": "skip_layers entry 'skipped'",
    "skipped.1.weight": "skip_layers entry 'skipped'",
    "skipped.1.bias": "skip_layers entry 'skipped'",
    "lazy.weight": "weight is uninitialised: preconditioned from the step after its first forward on",
    "lazy.bias": "is uninitialised",
    "attention.bias_k": "not used by the layer's block",
    "attention.bias_v": "not used by the layer's block",
    "embedding.weight": "shared with Embedding 'embedding', which is not preconditioned",
    "complex.weight": "torch.complex64: only real floating-point parameters are preconditioned",
    "complex.bias": "torch.complex64",
    "scale": "no adapter for Zoo",
    "(unnamed)": "not a parameter of the model",
}
COVERED = {
    "plain.weight": "plain",
    "plain.bias": "plain",
    "bias_frozen.weight": "bias_frozen",
    "attention.in_proj_weight": "attention.in_proj",
    "attention.in_proj_bias": "attention.in_proj",
    "attention.out_proj.weight": "attention.out_proj",
    "attention.out_proj.bias": "attention.out_proj",
}


def test_the_summary_lists_every_parameter_once_with_its_block_or_its_reason() -> None:
    _, optimizer, _ = zoo()
    records = {record.name: record for record in optimizer.summary().parameters}
    listed = [record.name for record in optimizer.summary().parameters]
    assert sorted(listed) == sorted([*REASONS, *COVERED])
    assert {name: record.block for name, record in records.items() if record.block is not None} == COVERED
    for name, reason in REASONS.items():
        assert reason in (records[name].reason or ""), name
    assert all(record.reason is None for record in records.values() if record.block is not None)


def test_the_readme_shows_the_summary_of_its_example() -> None:
    shown = re.search(r"<!-- the summary of an example -->\n```text\n(.*?)\n```", README.read_text(), flags=re.DOTALL)
    assert shown is not None
    layers = {
        "stem": nn.Conv2d(3, 16, 3),
        "norm": nn.BatchNorm2d(16),
        "slope": nn.PReLU(),
        "pool": nn.AdaptiveAvgPool2d(2),
        "flat": nn.Flatten(),
        "head": nn.Linear(64, 10),
    }
    model = nn.Sequential(OrderedDict(layers)).to(torch.float32)
    optimizer = KFACOptimizer(model)
    model(torch.randn(8, 3, 8, 8, dtype=torch.float32)).square().sum().backward()
    optimizer.step()
    assert str(optimizer.summary()) == shown.group(1)


def test_the_printed_summary_has_a_line_for_every_parameter_and_a_line_of_sums() -> None:
    model, optimizer, _ = zoo()
    lines = str(optimizer.summary()).splitlines()
    assert len(lines) == 2 + len(REASONS) + len(COVERED) + 1
    for name in [*REASONS, *COVERED]:
        assert sum(line.split()[0] == name for line in lines if line) == 1, name
    for name, reason in REASONS.items():
        (line,) = (line for line in lines if line.split()[0] == name)
        assert "SGD" in line
        assert reason in line
    assert not any("scalar" in line for line in lines if line.startswith("lazy")), "an unknown shape is no scalar"
    total = sum(param.numel() for param in model.parameters() if not nn.parameter.is_lazy(param)) + 2
    assert lines[-1].startswith(f"4 blocks cover 116 of {total} parameters")


def test_parameters_without_a_name_are_counted_one_by_one() -> None:
    model = mlp()
    strays = [nn.Parameter(torch.zeros(7)) for _ in range(2)]
    optimizer = KFACOptimizer([*model.parameters(), *strays], model=model)
    assert "cover 43 of 57 parameters" in str(optimizer.summary())


def test_a_layer_uninitialised_at_construction_is_preconditioned_from_its_first_step_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for step in range(2):
        optimizer.zero_grad()
        loss = square_loss(model(batch(step, dtype=torch.float32)))
        if step == 0:
            twin = copy.deepcopy(model)
            reference = KFACOptimizer(twin, lr=0.1, factor_update_period=1)
        reference.zero_grad()
        square_loss(twin(batch(step, dtype=torch.float32))).backward()
        loss.backward()
        optimizer.step()
        reference.step()
        assert_identical(list(model.parameters()), list(twin.parameters()))
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
    assert [block.name for block in optimizer.summary().blocks] == ["0", "1"]


def test_the_record_of_a_block_says_sizes_structure_inverse_and_bytes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 5))
    optimizer = KFACOptimizer(
        model,
        max_factor_dim=20,
        weight_sharing={"0": WeightSharing.REDUCE},
        structure={"0": (Structure.DENSE, Structure.IDENTITY)},
        inverse=Cholesky(),
    )
    conv, linear = optimizer.summary().blocks
    assert (conv.name, conv.layer, conv.params, conv.owners) == ("0", "Conv2d", ("0.weight", "0.bias"), (0,))
    assert (conv.groups, conv.in_dim, conv.out_dim) == (2, 2 * 9 + 1, 3)
    assert conv.structure == (Structure.DENSE, Structure.IDENTITY)
    assert conv.weight_sharing is WeightSharing.REDUCE
    assert conv.inverse == "Cholesky()"
    assert (linear.in_dim, linear.out_dim, linear.groups) == (25, 5, 1)
    assert linear.structure == (Structure.DIAGONAL, Structure.DENSE)
    assert linear.notes == ("A is diagonal: 25 > max_factor_dim 20",)
    # float32 triangles and inverses, a mass for each factor, and a few counters
    assert conv.state_bytes - 4 * (2 * (19 * 20 // 2 + 19**2) + 1) in range(64)
    assert linear.state_bytes - 4 * (2 * 25 + 5 * 6 // 2 + 5**2 + 2) in range(64)
    line_conv, line_linear = str(optimizer.summary()).splitlines()[2:5:2]
    for part in ("2·19×19", "identity", "Cholesky()", "reduce", "KiB"):
        assert part in line_conv
    for part in ("diag 25", "5×5", "A is diagonal: 25 > max_factor_dim 20"):
        assert part in line_linear


def test_the_bytes_of_ekfac_are_those_of_two_bases_and_one_s_beyond_the_factors() -> None:
    (record,) = KFACOptimizer(nn.Linear(39, 30), inverse=EKFAC()).summary().blocks
    averages, bases, s = 40 * 41 // 2 + 30 * 31 // 2, 40**2 + 30**2, 40 * 30
    assert record.state_bytes - 4 * (averages + bases + s + 40 + 30) in range(128)


@pytest.mark.parametrize(("in_dim", "out_dim", "diagonal"), [(7, 8, ()), (8, 8, "A"), (7, 9, "G"), (9, 9, "AG")])
def test_only_a_factor_above_max_factor_dim_becomes_diagonal_and_it_says_so(
    in_dim: int, out_dim: int, diagonal: str
) -> None:
    """The bias column counts: 7 inputs and a bias are 8 wide."""
    model = nn.Linear(in_dim, out_dim)
    (record,) = KFACOptimizer(model, max_factor_dim=8).summary().blocks
    assert [kept is Structure.DIAGONAL for kept in record.structure] == ["A" in diagonal, "G" in diagonal]
    assert [note[:13] for note in record.notes] == [f"{side} is diagonal" for side in diagonal]


def test_tied_layers_are_listed_once_with_a_note() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    summary = KFACOptimizer(model).summary()
    assert [record.name for record in summary.parameters] == ["0.weight", "0.bias"]
    assert summary.blocks[0].notes == ("shared by 0, 2",)


def test_a_model_with_nothing_to_precondition_warns_and_points_to_the_summary() -> None:
    with pytest.warns(
        UserWarning, match=r"nothing is preconditioned.*optimizer\.summary\(\) lists the reasons"
    ) as seen:
        optimizer = KFACOptimizer(nn.PReLU(8))
    assert seen[0].filename == __file__, "the warning points at the user's line"
    assert "0 blocks cover 0 of 8 parameters" in str(optimizer.summary())


def test_a_model_skipped_on_purpose_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACOptimizer(mlp(), skip_layers=["*"])


# -- metrics -----------------------------------------------------------------------------------------------------


def directions(model: nn.Module, optimizer: KFACOptimizer, damping: float) -> tuple[Tensor, Tensor]:
    """Preconditioned and raw gradients of all layers, flat, by dense solves with the factors of now."""
    found, raw = [], []
    for name, pair in optimizer.factors().items():
        layer = model.get_submodule(name)
        found.append(layer_direction(layer, pair, damping).flatten())
        raw.append(gradient_matrix(layer.weight.grad, layer.bias.grad).flatten())
    return torch.cat(found), torch.cat(raw)


@pytest.mark.parametrize("kl_clip", [None, 1e-5, 1e5])
def test_the_measures_of_the_step_equal_their_direct_computation(kl_clip: float | None) -> None:
    model = mlp()
    periods: dict[str, Any] = {"inverse_update_period": 1, "factor_update_period": 1}
    optimizer = KFACOptimizer(model, lr=0.3, damping=0.02, kl_clip=kl_clip, step_size=TrustRegion(), **periods)
    train(model, optimizer, 3)
    metrics = optimizer.metrics()
    direction, raw = directions(model, optimizer, 0.02)
    scale = trust_region(kl_clip, (0.3, direction @ raw))
    assert (scale < 1) == (kl_clip == 1e-5)
    expected = {
        "trust_region_scale": scale,
        "momentum_scale": 1.0,
        "cosine": float(direction @ raw / direction.norm() / raw.norm()),
        "gradient_norm": float(raw.norm()),
        "direction_norm": scale * float(direction.norm()),
        "damping": 0.02,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert metrics["cosine"] < 0.99


def test_without_a_trust_region_the_length_is_that_of_the_direction() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=1.0, damping=1e6, step_size=LineSearch())  # which hides all curvature

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = square_loss(model(batch()))
        loss.backward()
        return loss

    optimizer.step(closure)
    metrics = optimizer.metrics()
    assert "trust_region_scale" not in metrics
    assert metrics["direction_norm"] == pytest.approx(metrics["gradient_norm"] / 1e6, rel=0.01)


def test_the_condition_numbers_are_the_worst_of_the_damped_factors() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, damping=0.02)
    train(model, optimizer, 1)
    worst: dict[str, float] = {"condition_A": 0.0, "condition_G": 0.0}
    for a, g in optimizer.factors().values():
        pi = math.sqrt(float(a[0].trace() / len(a[0]) / (g[0].trace() / len(g[0]))))
        for key, factor, share in (("condition_A", a[0], pi), ("condition_G", g[0], 1 / pi)):
            damped = factor + share * math.sqrt(0.02) * torch.eye(len(factor), dtype=torch.float64)
            worst[key] = max(worst[key], float(torch.linalg.cond(damped, p=1)))
    metrics = optimizer.metrics()
    assert {key: metrics[key] for key in worst} == pytest.approx(worst, rel=1e-9)


def test_blocks_are_flat_whose_damped_factors_are_nearly_multiples_of_the_identity() -> None:
    model = mlp()
    with torch.no_grad():
        model[-1].weight.mul_(1e-6)  # the gradients of the layers before it vanish
    optimizer = KFACOptimizer(model, lr=0.1, damping=0.02)
    train(model, optimizer, 1)
    conditions = []
    for a, g in optimizer.factors().values():
        pi = math.sqrt(float(a[0].trace() / len(a[0]) / (g[0].trace() / len(g[0]))))
        sides = [
            factor + share * math.sqrt(0.02) * torch.eye(len(factor)) for factor, share in ((a[0], pi), (g[0], 1 / pi))
        ]
        conditions.append(math.prod(float(torch.linalg.cond(side, p=1)) for side in sides))
    assert [condition <= 2 for condition in conditions] == [True, False]
    assert optimizer.metrics()["flat_blocks"] == 1


@pytest.mark.parametrize(("factor_period", "inverse_period"), [(1, 1), (2, 3), (3, 2), (4, 100)])
def test_the_ages_are_steps_since_the_last_fold_and_refresh(factor_period: int, inverse_period: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=factor_period, inverse_update_period=inverse_period)
    for step in range(8):
        train(model, optimizer, 1, start=step)
        metrics = optimizer.metrics()
        refreshed = refresh_steps(factor_period, inverse_period, step + 1)[-1]
        assert (metrics["factor_age"], metrics["inverse_age"]) == (step % factor_period, step - refreshed)


def test_before_the_first_step_what_is_unknown_is_absent() -> None:
    metrics = KFACOptimizer(mlp()).metrics()
    assert metrics == {
        "blocks": 2.0,
        "blocks_without_statistics": 2.0,
        "covered_parameters": 1.0,
        "measured_parameters": 0.0,
        "left_out_parameters": 0.0,
        "dropped_calls": 0.0,
        "skipped_steps": 0.0,
    }


def test_the_metrics_are_plain_floats_after_a_step() -> None:
    model = mlp(dtype=torch.bfloat16)
    optimizer = KFACOptimizer(model, lr=torch.tensor(0.1), momentum=0.9, factor_update_period=1)
    train(model, optimizer, 2)
    metrics = optimizer.metrics()
    assert {type(value) for value in metrics.values()} == {float}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.keys() == {
        *("blocks", "blocks_without_statistics", "dropped_calls", "skipped_steps"),
        *("covered_parameters", "measured_parameters", "left_out_parameters", "unpreconditioned_blocks"),
        *("trust_region_scale", "momentum_scale", "kl_clip", "cosine", "gradient_norm", "direction_norm"),
        *("damping", "factor_age", "inverse_age", "condition_A", "condition_G", "flat_blocks"),
        *("refused_statistics", "retried_refreshes", "failed_refreshes"),
    }


def test_a_step_with_gradients_but_no_statistics_counts_its_blocks_as_unpreconditioned() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = clones(model.parameters())
    with pytest.warns(UserWarning, match="2 layers have gradients but no statistics"):
        optimizer.step()
    assert optimizer.metrics()["unpreconditioned_blocks"] == 2
    assert "Statistics were taken of 0 (0%) so far." in str(optimizer.summary())
    for param, start in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, start - 0.1), "the plain step"
    train(model, optimizer, 1)
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_a_layer_without_statistics_counts_again_after_a_step_that_did_not_use_it() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    for step, gradient in enumerate((1.0, 0.0, 1.0)):
        for param in model.parameters():
            param.grad = torch.full_like(param, gradient)
        with pytest.warns(UserWarning, match="gradients but no statistics") if step == 0 else nullcontext():
            optimizer.step()
        assert optimizer.metrics()["unpreconditioned_blocks"] == 2 * gradient


def test_the_cosine_of_a_zero_gradient_is_not_a_number_and_the_step_is_none() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 1)
    for param in model.parameters():
        param.grad.zero_()
    before = clones(model.parameters())
    optimizer.step()
    assert math.isnan(optimizer.metrics()["cosine"])
    assert optimizer.metrics()["trust_region_scale"] == 1
    assert_identical(clones(model.parameters()), before)


def test_the_cosine_tells_round_curvature_from_stretched() -> None:
    """Where A and G are multiples of the identity K-FAC is SGD; where they are stretched it is not."""
    cosines = []
    for stretch in (1.0, 30.0):
        model = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.eye(4))
        x = 2 * torch.eye(4, dtype=torch.float64)
        x[:, 0] *= stretch
        optimizer = KFACOptimizer(model, lr=0.1, damping=1e-6)
        square_loss(model(x)).backward()
        optimizer.step()
        cosines.append(optimizer.metrics()["cosine"])
    assert cosines[0] == pytest.approx(1.0)
    assert cosines[1] < 0.7


# -- factors -----------------------------------------------------------------------------------------------------


def test_factors_are_the_undamped_averages_by_layer_name() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, damping=5.0, inverse_update_period=1)
    x = batch()
    hidden = model[0](x)
    hidden.retain_grad()
    output = model[2](hidden.tanh())
    output.retain_grad()
    optimizer.set_loss_terms(8)
    square_loss(output).backward()
    optimizer.step()
    factors = optimizer.factors()
    assert list(factors) == ["0", "2"]
    for name, rows, grads in (("0", x, hidden.grad), ("2", hidden.detach().tanh(), output.grad)):
        for ours, exact in zip(factors[name], linear_factors(rows, grads, 8), strict=True):
            torch.testing.assert_close(ours, exact)


def test_factors_are_copies() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    train(model, optimizer, 1)
    optimizer.factors()["0"][0].zero_()
    assert optimizer.factors()["0"][0].any()
    assert block(optimizer, "0").state.pair.a.packed.any()


def test_factors_have_the_shape_of_their_structure() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3, bias=False))
    structure: dict[Any, Any] = {
        "0": (Structure.DENSE, Structure.DIAGONAL),
        "2": (Structure.IDENTITY, Structure.DENSE),
    }
    optimizer = KFACOptimizer(model, structure=structure)
    square_loss(model(torch.randn(8, 4, 4))).backward()
    optimizer.step()
    factors = optimizer.factors()
    assert [None if f is None else tuple(f.shape) for f in factors["0"]] == [(2, 7, 7), (2, 3)]
    assert [None if f is None else tuple(f.shape) for f in factors["2"]] == [None, (1, 5, 5)]
    assert [None if f is None else tuple(f.shape) for f in factors["3"]] == [(1, 5, 5), (1, 3, 3)]
