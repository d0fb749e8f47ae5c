"""kfac_optim: the K-FAC optimizer for PyTorch.

The house, from the ground up; imports go only to a lower storey (within a folder also to its `base.py`):

    specs, linalg, validation   L0  what a layer is; matrix functions; checks of user's numbers
    factors                     L1  running average of one Kronecker factor
    trust_region                L1  the KL bound on a step
    capture                     L1  when a forward and a backward become statistics; the only file on autograd
    selection                   L1  module names; layers by name glob or class
    functions                   L2  torch functions seen or replaced while a module's forward runs
    layers/                     L3  a module's input and output gradient as second moments, one family per file
    damping                     L3  how λ is shared among factors
    inverses/                   L4  accumulate, refresh (dear), apply (cheap), one representation per file
    options                     L5  the user's choices about layers, checked against the model
    blocks                      L5  layer + adapter + inverse + clock
    discovery                   L6  the blocks of a model
    estimates                   L6  which output gradients count
    execution                   L6  who does the work: one device, later many
    checkpoint                  L6  block state in and out of state_dict
    engine                      L7  one step as a pipeline
    schedulers                  L7  schedules for any param-group number
    diagnostics                 L8  summary, metrics, factors
    optimizer                   L9  KFACOptimizer: groups, hooks, checkpoints
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
