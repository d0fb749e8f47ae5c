"""An untested torch is warned of at import, in words that say what to do."""

import warnings

import pytest
import torch

from kfac_optim.utils.tested_versions import warn_of_untested_torch


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0a0+git"])
def test_another_version_of_torch_is_warned_of(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(
        UserWarning, match=r"tested with torch 2\.13, and this is torch .*pip install \"torch==2\.13"
    ) as told:
        warn_of_untested_torch()
    assert told[0].filename == __file__


def test_the_tested_version_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.1+cu130")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested_torch()
