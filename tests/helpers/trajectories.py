"""A pytest plugin that writes down the parameters after every step of every test, to compare two checkouts bit for bit.

Run it in both checkouts, over the same tests, and compare what it wrote:

    PYTHONPATH=tests/helpers python -m pytest -p trajectories --trajectories new.json tests/step
    cd ../old && PYTHONPATH=../new/tests/helpers python -m pytest -p trajectories --trajectories old.json tests/step
    python ../new/tests/helpers/trajectories.py old.json ../new/new.json

Steps that tests take in other processes are not seen.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.core
import pytest
import torch

from kfac_optim import KFACOptimizer

_STEPS: list[str] = []
_FOUND: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trajectories", help="the file to write the hashes to")


def pytest_configure() -> None:
    # Hypothesis seeds a test by its text and the modules of its annotations, which may have changed; here by its name.
    hypothesis.core.function_digest = lambda test: hashlib.sha384(test.__name__.encode()).digest()
    step = KFACOptimizer.step

    @functools.wraps(step)
    def noted(self: KFACOptimizer, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        digest = hashlib.sha256()
        for group in self.param_groups:
            for param in group["params"]:
                if param.device.type == "cpu" and type(param) is torch.nn.Parameter:
                    digest.update(param.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        _STEPS.append(digest.hexdigest())
        return result

    KFACOptimizer.step = noted  # type: ignore[method-assign]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _STEPS.clear()
    yield
    if _STEPS:  # by the name of the file alone, which may have moved
        name = f"{Path(str(item.path)).name}::{item.name}"
        _FOUND[name] = f"{len(_STEPS)} steps, {hashlib.sha256(''.join(_STEPS).encode()).hexdigest()[:16]}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--trajectories")
    worker = getattr(session.config, "workerinput", {}).get("workerid", "")
    if file and _FOUND:
        Path(f"{file}{worker}").write_text(json.dumps(_FOUND, indent=1, sort_keys=True))


def compare(old: dict[str, str], new: dict[str, str]) -> int:
    """Print the tests whose steps differ; return how many there are."""
    both = sorted(old.keys() & new.keys())
    differ = [name for name in both if old[name] != new[name]]
    for name in differ:
        print(f"{name}: {old[name]} → {new[name]}")
    steps = sum(int(new[name].split()[0]) for name in both)
    print(f"{len(both)} tests with {steps} steps are in both; {len(differ)} differ.")
    return len(differ)


if __name__ == "__main__":
    found = [{}, {}]
    for which, start in zip(found, sys.argv[1:3], strict=True):
        for path in Path(start).parent.glob(f"{Path(start).name}*"):
            which |= json.loads(path.read_text())
    sys.exit(bool(compare(*found)))
