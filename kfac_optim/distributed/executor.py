"""K-FAC on the ranks of a process group: the executor that joins plan, statistics and gradients."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kfac_optim.blocks import KFACBlock
from kfac_optim.distributed.buckets import Payload
from kfac_optim.distributed.comm import Communicator, Launch
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.ddp import OwnersHook, find_wrapper, synchronises
from kfac_optim.distributed.early import EarlyReports
from kfac_optim.distributed.gradients import GradientFlow, ReplicatedGradients, ShardedGradients
from kfac_optim.distributed.plan import Plan, PlanOptions, differences
from kfac_optim.distributed.planner import Covered, Uncovered, make_plan
from kfac_optim.distributed.statistics import StatisticsExchange
from kfac_optim.distributed.strategies import Auto, Sharded
from kfac_optim.distributed.voting import Ballot, vote
from kfac_optim.execution import Agreement, Names, SingleDevice
from kfac_optim.loss_terms import LossCount
