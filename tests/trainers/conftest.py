"""Names the versions of the trainers in the head of the report, and keeps two processes for all tests here."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
from helpers.ranks import Ranks

TOOLS = ("accelerate", "lightning", "transformers")


def pytest_report_header() -> str:
    return "trainers: " + ", ".join(f"{tool} {_version(tool)}" for tool in TOOLS)


def _version(tool: str) -> str:
    try:
        return version(tool)
    except PackageNotFoundError:
        return "is missing"


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()
