"""kfac_optim: the K-FAC optimizer for PyTorch.

The house, from the ground up; imports go only to a lower storey (within a folder also to its `base.py`, and
to that of a folder around it):

    specs, linalg, validation   L0  what a layer is; matrix functions; checks of user's numbers
    ranges                      L0  what numbers of a checkpoint may be
    text                        L0  tables and sizes as text
    autograd                    L0  what is asked of autograd; the only file on it
    dynamo                      L0  what torch.compile makes of functions of ours
    precision                   L0  autocast kept out of our arithmetic; are these numbers finite?
    loss_scale                  L0  what a GradScaler multiplied the loss by
    random_state                L0  torch's generators, put back to where they stood
    memory                      L0  tensors that give up their memory and get it back
    shards                      L0  parameters kept in shards, and what stands for them in use
    skipped                     L1  steps that are not taken, counted by the host or the device
    hooks                       L1  forward hooks and torch function modes, put on and taken off
    compiled                    L1  operators that stand in compiled graphs for layer calls
    loss_terms                  L1  how many terms the loss of a step has
    scale_probe                 L1  what gradients were multiplied by since backward
    notices                     L2  warnings of what a user may not expect
    likelihoods                 L1  losses as likelihoods, for estimates that do not look at targets
    rows                        L1  canonical rows and their second moments
    patches                     L2  what the kernel of a convolution sees at each position
    correlation                 L3  second moments of patches that are not made
    partition                   L1  wide factors in blocks along their diagonal
    sampling                    L1  which rows make the statistics, where not all do
    factors                     L1  running average of one Kronecker factor
    trust_region                L1  the KL bound on a step
    quadratic                   L1  a quadratic model along a few directions: its minimum, its judge
    levenberg_marquardt         L1  damping that follows the quadratic model's word
    finder                      L1  the model, where the optimizer was given parameters alone
    selection                   L1  module names; layers by name glob or class
    refresh                     L1  when inverses are refreshed
    calls                       L2  when a forward and a backward of a layer become statistics
    roots                       L3  the forward of the model that a layer runs in
    estimation                  L3  gradients of an estimate's own, through the graph of the training loop
    capture                     L4  the window between two steps: what hooks note, and compiled graphs tell
    functions                   L5  torch functions seen or replaced while a module's forward runs
    replay                      L5  forwards of the model run again, for the curvature of the loss
    batch_watch                 L6  are the examples few, and others at each step?
    layers/                     L6  a module's input and output gradient as second moments, one family per file
    gradient_check              L7  do the captured calls account for the whole gradient?
    damping                     L6  how λ is shared among factors
    pairs                       L7  the two factors of a block
    inverses/                   L8  accumulate, refresh (dear), apply (cheap), one representation per file
    options                     L9  the user's choices about layers
    rules                       L9  which inverse suits a layer
    blocks                      L9  layer + adapter + inverse + clock
    assembly                    L10  the block of a weight, from all the modules that use it
    functional                  L10  matrices that functions multiply by, whatever module owns them
    estimates                   L10  which output gradients count
    execution                   L10  who does the work: one device, later many
    checkpoint                  L10  block state in and out of state_dict
    checkpoint_check            L11  can the state of blocks be loaded?
    checkpoint_groups           L12  can param groups and momentum be loaded, and whose are they?
    discovery                   L11  the blocks of a model
    background                  L11  refreshes beside the training, whoever does the work
    step_size                   L11  how far a step goes
    adaptive_trust_region       L12  a trust region whose size follows what steps do
    distributed/                L12  many processes: who works on what, and what they send
    engine                      L12  one step as a pipeline
    trial                       L13  a step judged after it was taken, and taken back
    schedulers                  L11  schedules for any param-group number
    diagnostics                 L13  summary, metrics, factors
    binding                     L13  the model as the optimizer knows it: found, made into blocks, hooked
    loading                     L14  a checkpoint checked and sorted
    optimizer                   L15  KFACOptimizer: groups, hooks, checkpoints
"""

from kfac_optim.adaptive_trust_region import AdaptiveTrustRegion
from kfac_optim.diagnostics import Summary
from kfac_optim.estimates import CurvaturePropagation, Empirical, Estimate, ExactGGN, MonteCarlo
from kfac_optim.inverses import (
    EKFAC,
    Cholesky,
    DoublyFactored,
    Eigen,
    Inverse,
    InverseRule,
    LowRank,
    NewtonSchulz,
    OnlineEigen,
)
from kfac_optim.layers import DEFAULT_ADAPTERS, LayerAdapter, LayerStatistics, RowStatistics, WeightBiasAdapter
from kfac_optim.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.likelihoods import Likelihood
from kfac_optim.optimizer import KFACOptimizer
from kfac_optim.refresh import Background, Schedule, Staggered, Together
from kfac_optim.rules import AutoInverse
from kfac_optim.sampling import Subsample
from kfac_optim.schedulers import ExponentialDecay, HyperparameterScheduler
from kfac_optim.specs import BlockDiagonal, LayerSpec, LossTerms, Structure, WeightSharing
from kfac_optim.step_size import QuadraticModel, TrustRegion

__version__ = "0.1.0"

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
    "InverseRule",
    "KFACOptimizer",
    "LayerAdapter",
    "LayerSpec",
    "LayerStatistics",
    "LevenbergMarquardt",
    "Likelihood",
    "LossTerms",
    "LowRank",
    "MonteCarlo",
    "NewtonSchulz",
    "OnlineEigen",
    "QuadraticModel",
    "RowStatistics",
    "Schedule",
    "Staggered",
    "Structure",
    "Subsample",
    "Summary",
    "Together",
    "TrustRegion",
    "WeightBiasAdapter",
    "WeightSharing",
]
