"""Shapes of large models against their known sizes, and the benchmark that plans for them."""

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import shapes
from benchmarks.__main__ import main
from kfac_optim import BlockDiagonal, Structure
from kfac_optim.distributed import Covered

DENSE, DIAGONAL = Structure.DENSE, Structure.DIAGONAL


@pytest.mark.parametrize(
    ("model", "parameters", "widest", "gigaflops"),
    [
        pytest.param(shapes.resnet50(1), 25_557_032, 4608, 2 * 4.089, id="resnet50"),
        pytest.param(shapes.bert_large(512), 335_141_888, 4097, 512 * 2 * 0.302, id="bert-large"),
        pytest.param(shapes.transformer_7b(1), 6_738_415_616, 4096, 2 * 6.607, id="7b"),
    ],
)
def test_shapes_are_those_of_the_models(model: shapes.Model, parameters: int, widest: int, gigaflops: float) -> None:
    """Parameters as published; operations of one forward of the matrix products, two for each multiply-add."""
    assert sum(each.words for each in model) == parameters
    covered = [each for each in model if isinstance(each, Covered)]
    assert max(side.dim for each in covered for side in each.spec.factors() if side.structure is DENSE) == widest
    assert len({each.name for each in model}) == len(model)
    assert sum(2 * each.rows * each.words for each in covered) == pytest.approx(gigaflops * 1e9, rel=5e-3)


def test_wide_factors_can_be_kept_otherwise() -> None:
    model = shapes.transformer_7b()
    down = next(number for number, each in enumerate(model) if each.name == "layer.0.down")
    kept = {
        (4096, DIAGONAL): (DIAGONAL, DENSE),
        (1024, DIAGONAL): (DIAGONAL, DIAGONAL),
        (1024, BlockDiagonal(1024)): (BlockDiagonal(1024), DIAGONAL),
        (16384, DIAGONAL): (DENSE, DENSE),
    }
    for (widest, wish), structure in kept.items():
        changed = shapes.keeping(model, widest, wish)
        assert changed[down].spec.structure == structure  # type: ignore[union-attr]
        assert changed[0].spec.structure[0] is DIAGONAL, "an embedding"  # type: ignore[union-attr]
        assert [each.name for each in changed] == [each.name for each in model]


def test_scaling_prints_tables_and_leaves_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "scaling --models resnet50 bert-large --ranks 64 8 --bandwidths 1e9 1e11 --flop-rates 1e14 --periods 10,100"
    words += " --counted 8"
    main([*words.split(), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    for title in ("resnet50: 100 GB/s, 100 Tflop/s", "bert-large: scaling efficiency from 8 ranks", "what lowers"):
        assert title in printed
    assert re.search(r"64 +sharded +13\.8", printed)
    report = json.loads((tmp_path / "scaling.json").read_text())
    assert "points" in report["predicted"]
    for counted in report["counted"]:
        assert counted["bytes_over_sgd"] <= 1.04 + 1 / 8
        assert counted["largest_over_mean"] <= 1.05
        assert counted["buffers"]["parameters"] <= 2 * counted["largest_bucket"]
    assert "bert-large  8" in printed
    points = report["points"]
    assert len(points) == 2 * 2 * 4 * 2
    by_key = {(p["model"], p["layout"], p["bandwidth"], p["ranks"]): p for p in points}
    for (model, layout, bandwidth, ranks), point in by_key.items():
        first = by_key[model, layout, bandwidth, 8]
        assert math.isclose(point["efficiency"], first["seconds"] / point["seconds"])
        assert point["seconds"] <= point["longest"]
        assert point["refresh_imbalance"] >= max(1.0, point["refresh_floor"]) - 1e-9
        if layout == "sharded":
            assert point["bytes_per_step"] <= (1.04 + 1 / ranks) * point["sgd_bytes_per_step"]
            assert point["memory"] < by_key[model, "COMM-OPT", bandwidth, ranks]["memory"]
    for layout in ("COMM-OPT", "MEM-OPT", "sharded"):
        slow, fast = (by_key["bert-large", layout, bandwidth, 64]["seconds"] for bandwidth in (1e9, 1e11))
        assert slow > fast
    remedies = {each["change"]: each for each in report["remedies"] if each["model"] == "resnet50"}
    as_it_is = remedies.pop("as it is")
    assert remedies["Background, over the period"]["longest"] < as_it_is["longest"]
    assert remedies["BlockDiagonal(1024) above it"]["refresh_seconds"] < 0.1 * as_it_is["refresh_seconds"]
    assert remedies["factors apart"]["refresh_seconds"] >= 0.99 * as_it_is["refresh_seconds"]
