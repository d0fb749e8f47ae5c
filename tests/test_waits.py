"""On an accelerator the host waits for the device where it is written here, and nowhere else."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import waits

TESTS = Path(__file__).parent

FINITE = "utils.precision.all_finite: _local_scalar_dense"  # are the gradients?
SKIPPED = "step.skipped_steps.look: tolist"  # how many steps did the device skip since?
SCALE = "step.loss_scale.read_loss_scale: _local_scalar_dense"
SCALER = ": _local_scalar_dense"  # torch's own: a scaler asks whether to call the step
PROBED = "capture.scale_probe._common_factor: tolist"  # by what were the gradients multiplied since backward?
USED = "blocks.preconditioning.says_something: _local_scalar_dense"  # is any gradient not zero? The first step alone.
CHECKED = "capture.gradient_check.conclude: tolist"  # do the calls account for the gradients? The first step alone.
UNIT = "step.adaptive_trust_region.loss_unit: _local_scalar_dense"  # of the loss, which the damping is in
SETBACKS = "step.roles.setbacks: tolist"  # too many of them in a row?
HELD = "inverses.pair_inverse.has_statistics: _local_scalar_dense"  # of each block, until it has some
HELD_THREE = "inverses.doubly_factored_state.has_statistics: _local_scalar_dense"
# One for each batched call:
CHOLESKY = "linalg.cholesky._with_retries: nonzero"  # has any failed?
EIGH = (
    "linalg.eigen._try_eigh: _linalg_eigh",
    "linalg.eigen.eigendecomposition: nonzero",
    "linalg.eigen.eigendecomposition: tolist",
)
NEWTON = "inverses.damped.newton._finish: _local_scalar_dense"  # has any not converged?

DIRECTIONS = "linalg.sketches._directions: copy"  # of each width, once

EIGENBASES = {"Eigen", "EKFAC", "selected"}


def expected(name: str, step: dict[str, Any]) -> Counter[str]:
    """What the host may wait for in one step of a case of `waits.py`."""
    kind = step["kind"]
    every_step = name == "foreach"
    by_scaler = Counter({SCALER: name == "GradScaler"})
    if kind == "plain" and not every_step:
        return +by_scaler
    found = by_scaler + Counter({FINITE: 1})
    if kind != "plain":
        found[SCALE if name == "GradScaler" else PROBED] = 1
    if kind != "plain" and name not in ("fixed region", "selected"):
        found[UNIT] = 1
    if kind in ("refresh", "first"):
        if name != "no limit":
            found[SETBACKS] = 1
        if name in EIGENBASES:
            found.update(dict.fromkeys(EIGH, step["stacks"]))
        elif name in ("LowRank", "sketches"):  # two for each sketch
            found.update(dict.fromkeys(EIGH, step["wide"] + 2 * step["sketched"]))
            found[CHOLESKY] = step["stacks"] - step["wide"]
        elif name == "NewtonSchulz":
            found[NEWTON] = step["matrices"]
        else:
            found[CHOLESKY] = step["stacks"]
    if kind == "first":
        found[USED] = found[CHECKED] = 1
        found[HELD] = step["blocks"]
        if name == "sketches":
            found[DIRECTIONS] = step["sketched"]
        if name == "DoublyFactored":
            found[HELD] -= 1
            found[HELD_THREE] = 1
    elif not every_step and step["before"] == "plain":
        found[SKIPPED] = 1
    return +found


@pytest.fixture(scope="module")
def found() -> Any:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, TESTS / "helpers" / "waits.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout)


# Loops in the place of cases, of which the quick run would take some: all are of the one run of `found`.


def test_the_host_waits_for_nothing_but_what_is_written_here(found: Any) -> None:
    assert found["cases"].keys() == waits.CASES.keys()
    for name, steps in found["cases"].items():
        assert {step["kind"] for step in steps} >= {"first", "statistics", "refresh"}, name
        assert any(step["kind"] == "plain" for step in steps) or name == "LSTM", name
        for step in steps:
            assert Counter(step["waits"]) == expected(name, step), (name, step["kind"])


def test_metrics_wait_for_nothing_until_they_are_read(found: Any) -> None:
    for name, steps in found["cases"].items():
        for step in steps:
            assert (step["asked"], step["read"]) == ([], ["diagnostics.read: tolist"]), (name, step["kind"])


def test_a_step_with_a_gradient_that_is_not_finite_is_left_out_by_the_device(found: Any) -> None:
    assert found["spoilt"].keys() == set(waits.SPOILT)
    for value, step in found["spoilt"].items():
        assert not step["waited"], value
        assert step["same"] == step["skipped"] == (value != "huge"), value
        assert value == "huge" or (step["moved"] and step["once"]), f"after {value} the next step is not as any other"


def test_steps_that_the_device_leaves_out_without_end_raise_when_the_host_looks(found: Any) -> None:
    """Steps 1 to 3 are left to the device; the 4th looks, since no more than the limit are left to it."""
    assert found["without end"].startswith("4: kfac_optim: 4 steps in a row were skipped"), found["without end"]


def test_sums_over_stages_of_a_pipeline_do_not_wait_in_mid_step(found: Any) -> None:
    assert found["stages"] == []


def test_the_instrument_sees_waits_and_nothing_else(found: Any) -> None:
    for name, (_, waits_for) in waits.PROBES.items():
        assert found["probes"][name] == ([] if waits_for is None else [f": {waits_for}"]), name
