"""kfac_optim: the K-FAC optimizer for PyTorch.

The package is laid out in rooms, from the ground up. A room imports only from the rows above its own, and two rooms of
one row do not import each other; `tests/test_architecture.py` holds them to it.

    utils, linalg, specs                  tools around torch; matrix functions; what a layer is, and what is kept of it
    factors, taylor                       second moments of a layer's inputs and output gradients, averaged; derivatives
                                          of a model with respect to its inputs, carried through its forward
    inverses, capture                     inverses of the factors, one kind per file; what hooks record in a step
    layers, fisher                        how each kind of layer becomes second moments; which output gradients make G
    blocks                                which layers of a model are preconditioned, their state, and checkpoints of it
    step                                  one optimizer step: statistics, refreshes, preconditioning, bounds, the update
    distributed, diagnostics, schedulers  several processes; what the optimizer reports; schedules of its numbers
    watching                              what reports of a run say, in words and drawn
    optimizer                             KFACOptimizer, which puts all of this together
    tuning                                rate and damping, found by trial steps
    integrations                          what some trainers need of us, a file for each, which nobody else imports
"""

from kfac_optim.diagnostics import Summary
from kfac_optim.factors.subsampling import Subsample
from kfac_optim.fisher.estimates import CurvaturePropagation, Empirical, Estimate, ExactGGN, MonteCarlo
from kfac_optim.fisher.likelihoods import Likelihood
from kfac_optim.inverses import (
    EKFAC,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseAndRoot,
    InverseRule,
    InverseState,
    LowRank,
    NewtonSchulz,
    SampleSpace,
    SumOfTerms,
)
from kfac_optim.inverses.auto import AutoInverse
from kfac_optim.layers import DEFAULT_ADAPTERS, LayerAdapter, LayerStatistics, RowStatistics, WeightBiasAdapter
from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.schedulers import ExponentialDecay, HyperparameterScheduler
from kfac_optim.specs import BlockDiagonal, LayerSpec, LossTerms, Structure, WeightSharing
from kfac_optim.step.adaptive_trust_region import AdaptiveTrustRegion
from kfac_optim.step.averaging import IterateAverage
from kfac_optim.step.fixed_trust_region import TrustRegion
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.line_search import LineSearch
from kfac_optim.step.quadratic_model import QuadraticModel
from kfac_optim.step.refresh_schedules import Background, Schedule, Staggered, Together
from kfac_optim.step.selected_updates import SelectedUpdates
from kfac_optim.utils.tested_versions import warn_of_untested_torch

__version__ = "0.1.0"

warn_of_untested_torch()

__all__ = [
    "DEFAULT_ADAPTERS",
    "EKFAC",
    "AdaptiveTrustRegion",
    "AutoInverse",
    "Background",
    "BlockDiagonal",
    "Cholesky",
    "CurvaturePropagation",
    "DoublyFactored",
    "Eigen",
    "Empirical",
    "Estimate",
    "ExactGGN",
    "ExponentialDecay",
    "HyperparameterScheduler",
    "Inverse",
    "InverseAndRoot",
    "InverseRule",
    "InverseState",
    "IterateAverage",
    "KFACOptimizer",
    "LayerAdapter",
    "LayerSpec",
    "LayerStatistics",
    "LevenbergMarquardt",
    "Likelihood",
    "LineSearch",
    "LossTerms",
    "LowRank",
    "MonteCarlo",
    "NewtonSchulz",
    "QuadraticModel",
    "RowStatistics",
    "SampleSpace",
    "Schedule",
    "SelectedUpdates",
    "Staggered",
    "Structure",
    "Subsample",
    "SumOfTerms",
    "Summary",
    "Together",
    "TrustRegion",
    "WeightBiasAdapter",
    "WeightSharing",
]
