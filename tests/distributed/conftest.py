"""Processes that all tests of a session share."""

from collections.abc import Iterator

import pytest
from helpers.ranks import Ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.stop(leaving=60.0)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop(leaving=60.0)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop(leaving=60.0)


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.stop(leaving=60.0)


@pytest.fixture(scope="session")
def two_cuda_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, cuda=True)
    yield ranks
    ranks.stop(leaving=60.0)
