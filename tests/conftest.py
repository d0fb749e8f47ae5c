"""Determinism for every test: one thread, seeded generators, the same hypothesis examples; and the quick run."""

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings


class _TorchRandom:
    """Torch's generator under hypothesis's control: every example starts from the same seed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis holds it weakly
register_random(_TORCH_RANDOM)
settings.register_profile(
    "kfac",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kfac")
torch.set_num_threads(1)


# Of a test with more cases than this the quick run takes as many, drawn once for all; the others count as slow. A test
# of several processes takes seconds, mostly to wait, and keeps one case.
_QUICK_CASES = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the quick run leaves to the full one: each test keeps some of its cases."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for name, some in cases.items():
        few = 1 if "distributed/" in name else _QUICK_CASES
        if len(some) > few:
            kept = random.Random(name).sample(range(len(some)), few)
            for number in set(range(len(some))).difference(kept):
                some[number].add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """New tensors and modules are float64 throughout a test module that asks for it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
