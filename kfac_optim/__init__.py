"""kfac_optim: the K-FAC optimizer for PyTorch.

The house, from the ground up; imports go only to a lower storey (within a folder also to its `base.py`):

    specs, linalg, validation   L0  what a layer is; matrix functions; checks of user's numbers
    factors                     L1  running average of one Kronecker factor
    trust_region                L1  the KL bound on a step
    capture                     L1  when a forward and a backward become statistics; the only file on autograd
    selection                   L1  module names; layers by name glob or class
    layers/                     L2  a module's input and output gradient as second moments, one family per file
    damping                     L2  how λ is shared among factors
    inverses/                   L3  accumulate, refresh (dear), apply (cheap), one representation per file
    options                     L4  the user's choices about layers, checked against the model
    blocks                      L4  layer + adapter + inverse + clock
    discovery                   L5  the blocks of a model
    estimates                   L5  which output gradients count
    execution                   L5  who does the work: one device, later many
    checkpoint                  L5  block state in and out of state_dict
    engine                      L6  one step as a pipeline
    schedulers                  L6  schedules for any param-group number
    diagnostics                 L7  summary, metrics, factors
    optimizer                   L8  KFACOptimizer: groups, hooks, checkpoints
"""

from kfac_optim.diagnostics import Summary
from kfac_optim.estimates import Empirical, Estimate
from kfac_optim.inverses import Cholesky, Inverse
from kfac_optim.layers import DEFAULT_ADAPTERS, LayerAdapter, LayerStatistics
from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.schedulers import ExponentialDecay, HyperparameterScheduler
from kfac_optim.specs import LayerSpec, LossTerms, Structure, WeightSharing

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_ADAPTERS",
    "Cholesky",
    "Empirical",
    "Estimate",
    "ExponentialDecay",
    "HyperparameterScheduler",
    "Inverse",
    "KFACOptimizer",
    "LayerAdapter",
    "LayerSpec",
    "LayerStatistics",
    "LossTerms",
    "Structure",
    "Summary",
    "WeightSharing",
]
