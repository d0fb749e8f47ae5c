"""Many processes: which rank refreshes and preconditions what, and what is sent where.

The folder is laid out in rooms like the package, and by the same rule:

    communication                       what is sent together, collectives on it, process groups, votes
    launch, planning                    the launcher of the processes; which rank works on what, and what that costs
    statistics_workers, experts         which ranks only measure and refresh, and which layers each rank has of its
                                        own: the choices, and what they make of a rank
    config                              the user's choices, as one value
    choice, training_group, refusals    what ranks compare, which ranks train, which choices do not go together
    gradients, statistics               gradients to owners and back; statistics to owners, and inverses from them
    optimizer_view                      what those below are shown of the optimizer
    state_redistribution                which rank holds what of blocks and momentum, and bringing it to another rank
    plan_agreement, state_transfer      one plan on all ranks; states for a new plan and for checkpoints
    stages                              one trust region over the stages of a pipeline
    executor                            all of this together, as the engine asks for it
    expert_executor                     the same where each rank has experts of its own beside what all ranks share
    joinable_optimizer                  what `Join` asks of an optimizer, where ranks run out of examples
    serving                             the same where there are statistics workers: orders to them, and answers
"""

from kfac_optim.distributed.communication.launches import CollectiveError
from kfac_optim.distributed.communication.message import Collective, Message
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.experts import Experts
from kfac_optim.distributed.launch import Launcher, ProcessPlace, find_place, initialize
from kfac_optim.distributed.planning.calibration import measure_costs
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.plain_sgd import predict_sgd
from kfac_optim.distributed.planning.plan import Plan, differences
from kfac_optim.distributed.planning.plan_options import PlanOptions
from kfac_optim.distributed.planning.planned_model import Covered, Uncovered
from kfac_optim.distributed.planning.planner import make_plan
from kfac_optim.distributed.planning.strategies import (
    Auto,
    Exchange,
    FullySharded,
    Placement,
    Replicated,
    Sharded,
    Statistics,
    Strategy,
)
from kfac_optim.distributed.statistics_workers import Role, StatisticsWorkers

__all__ = [
    "Auto",
    "Collective",
    "CollectiveError",
    "CostModel",
    "Covered",
    "DistributedConfig",
    "Exchange",
    "Experts",
    "FullySharded",
    "Launcher",
    "Message",
    "Placement",
    "Plan",
    "PlanOptions",
    "ProcessPlace",
    "Replicated",
    "Role",
    "Sharded",
    "Statistics",
    "StatisticsWorkers",
    "Strategy",
    "Uncovered",
    "differences",
    "find_place",
    "initialize",
    "make_plan",
    "measure_costs",
    "predict_sgd",
]
