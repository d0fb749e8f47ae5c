"""Numbers that a user has to choose, found by trial steps on the user's own model and data.

`range_test.py` is what a user calls; `search.py` says which settings to try, `trial_steps.py` takes the steps with a
twin of the optimizer, `undo.py` puts everything back, and `result.py` is what the user gets.
"""

from kfac_optim.tuning.range_test import range_test
from kfac_optim.tuning.result import RangeTest
from kfac_optim.tuning.search import Trial

__all__ = ["RangeTest", "Trial", "range_test"]
