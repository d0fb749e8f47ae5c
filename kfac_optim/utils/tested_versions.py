"""The versions of torch that the package was tested with."""

import re

import torch

from kfac_optim.utils.warning import warn

_TESTED = ("2.13",)


def warn_of_untested_torch() -> None:
    """Warn where torch is of a version that the package was not tested with: it relies on some private functions."""
    version = torch.__version__
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in _TESTED:
        warn(
            f"kfac_optim: the code was tested with torch {', '.join(_TESTED)}, and this is torch {version}. Another "
            "package may have moved torch. Install a tested version "
            f'(pip install "torch=={_TESTED[-1]}.*"), or run the tests.'
        )
