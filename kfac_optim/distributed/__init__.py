"""Many processes: who refreshes and preconditions what, and what is sent to whom.

Imports within this folder go only to a lower storey of its own:

    costs                       L0  how long operations and collectives take
    strategies                  L0  the user's choices about who does what
    volumes                     L0  closed forms of what strategies send
    layouts                     L0  what is sent together: layouts, what a rank gives, what an owner gets
    launch                      L0  which launcher started the processes, and their process group
    fsdp                        L1  gradients kept in rows, to owners and back
    assignment                  L1  work laid on ranks, the largest first
    buckets                     L1  what is sent together, in an order that all ranks share
    comm                        L1  collectives in one fixed order, launched as their members become ready
    prediction                  L2  seconds of a step
    plan                        L3  the frozen plan of a model
    planner                     L4  its making
"""

from kfac_optim.distributed.costs import Collective, CostModel
from kfac_optim.distributed.plan import Plan, PlanOptions, differences
from kfac_optim.distributed.planner import Covered, Uncovered, make_plan, predict_sgd
from kfac_optim.distributed.strategies import Auto, Placement, Replicated, Sharded, Statistics, Strategy

__all__ = [
    "Auto",
    "Collective",
    "CostModel",
    "Covered",
    "Placement",
    "Plan",
    "PlanOptions",
    "Replicated",
    "Sharded",
    "Statistics",
    "Strategy",
    "Uncovered",
    "differences",
    "make_plan",
    "predict_sgd",
]
