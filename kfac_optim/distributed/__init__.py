"""Many processes: who refreshes and preconditions what, and what is sent to whom.

Imports within this folder go only to a lower storey of its own:

    costs                       L0  how long operations and collectives take
    strategies                  L0  the user's choices about who does what
    layouts                     L0  what is sent together: layouts, what a rank gives, what an owner gets
    launch                      L0  which launcher started the processes, and their process group
    fsdp                        L1  gradients kept in rows, to owners and back
    calibration                 L1  the rates of a cost model, measured
    assignment                  L1  work laid on ranks, the largest first
    buckets                     L1  what is sent together, in an order that all ranks share
    comm                        L1  collectives, launched in one order on all ranks
    groups                      L2  process groups of our own
    reducer                     L2  buckets of sums, launched as their slots become ready
    prediction                  L2  seconds of a step
    plan                        L3  the frozen plan of a model
    wire                        L4  its layouts as collectives take them
    planner                     L5  its making
    config                      L5  the user's choices, as one value
    choice                      L6  whether several processes train together, and the words they compare
    refusals                    L6  choices that do not go together on several processes
    voting                      L5  what all ranks know of a step before they take it
    transfer                    L5  tensors of one rank copied to others outside of steps
    gradients                   L5  how gradients come to those that precondition and update
    gradient_rows               L6  likewise, of parameters that FSDP2 has sharded
    sharding                    L6  layers kept in parts, and which of them can be trained
    ddp                         L6  DistributedDataParallel: which ranks, the last backward, gradients to owners alone
    statistics                  L6  statistics to those that refresh, results to those that need them
    holdings                    L7  who holds what of blocks and momentum, and bringing it to another
    early                       L7  sums of statistics sent while backward goes on
    edits                       L7  were gradients changed where each rank has the mean of some alone?
    averaging                   L7  are gradients the mean over ranks, where the training loop sees to it?
    executor                    L8  all that joined, as the engine asks for it
"""

from kfac_optim.distributed.calibration import measure_costs
from kfac_optim.distributed.comm import Cause, Launch
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.costs import Collective, CostModel
from kfac_optim.distributed.launch import Launcher, ProcessPlace, find_place, initialize
from kfac_optim.distributed.plan import Plan, PlanOptions, differences
from kfac_optim.distributed.planner import Covered, Uncovered, make_plan, predict_sgd
from kfac_optim.distributed.strategies import Auto, FullySharded, Placement, Replicated, Sharded, Statistics, Strategy

__all__ = [
    "Auto",
    "Cause",
    "Collective",
    "CostModel",
    "Covered",
    "DistributedConfig",
    "FullySharded",
    "Launch",
    "Launcher",
    "Placement",
    "Plan",
    "PlanOptions",
    "ProcessPlace",
    "Replicated",
    "Sharded",
    "Statistics",
    "Strategy",
    "Uncovered",
    "differences",
    "find_place",
    "initialize",
    "make_plan",
    "measure_costs",
    "predict_sgd",
]
