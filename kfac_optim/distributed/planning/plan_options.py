"""Numbers that a plan depends on, and the sizes of what ranks tell each other."""

import math
from dataclasses import dataclass

import torch

from kfac_optim.distributed.planning.buckets import Payload
from kfac_optim.distributed.planning.strategies import Exchange
from kfac_optim.utils.validation import check_dtype, check_flag, check_integer, check_kind

# Words of a vote: whether a gradient is not finite, and whether one was edited, and, each twice, fingerprints of what
# this rank trains, of its arguments and of its gradients, terms of the loss that it has counted, and a fingerprint of
# arguments that are tensors.
VOTE_WORDS = 12

# Marks of a vote are filled up to a multiple of this. Where ranks step several optimizers in different orders, votes
# about different models meet: of one size they tell what differs, while gloo ends the process over two sizes.
_MARKS = 128

# Of `InverseState.counters` the ones that ranks share at refreshes, for metrics: the ones with a side are known to the
# owner of that part alone.
TOLD_COUNTERS = (
    "condition_A",
    "condition_G",
    "cutoff_A",
    "cutoff_G",
    "failed_refreshes",
    "fallback_inverses",
    "refused_statistics",
    "retried_refreshes",
    "substituted_statistics",
)

# Words of the status of one layer.
STATUS_WORDS = 3 + len(TOLD_COUNTERS)


def vote_marks(layers: int, buckets: int) -> int:
    """Return words of a vote that are about the plan, besides `VOTE_WORDS`.

    One for each layer says whether it has a gradient, and statistics; one for each bucket of factor sums, whether it
    goes again; the last, how far statistics workers are; the rest is zeros.

    Args:
        layers: how many; 0 where there is no plan yet.
        buckets: how many buckets of factor sums there are.
    """
    return _MARKS * max(1, math.ceil((layers + buckets + 1) / _MARKS))


@dataclass(frozen=True)
class PlanOptions:
    """Holds the numbers that a plan depends on, and that all ranks must share.

    Args:
        factor_update_period: steps between statistics.
        inverse_update_period: steps between refreshes, once the averages are no longer young, with a constant damping.
        bucket_bytes: the most that is sent together, except that a tensor is never cut; DDP's default.
        parameter_dtype: the dtype of parameters and gradients, in which they are sent.
        factor_dtype: the dtype of the running averages; inverses are kept and sent in it, and in float32 at least.
        sums_dtype: the dtype in which factor sums are sent; None is `factor_dtype`.
        gradient_dtype: the dtype in which gradients are sent to owners; None is `parameter_dtype`.
        momentum: whether there is a momentum buffer for each parameter.
        scalars: how many numbers each sum over parameters has that every step takes, over ranks too but under
            `Replicated`: three for the trust region with one param group, and one for its momentum.
        exchange: the way between all ranks and owners, where the numbers are for all ranks; None is the one that is
            quicker for the slowest rank, for each payload.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number below 1, or a dtype that is no floating one with the range of float32.
    """

    factor_update_period: int = 10
    inverse_update_period: int = 100
    bucket_bytes: int = 25 * 2**20
    parameter_dtype: torch.dtype = torch.float32
    factor_dtype: torch.dtype = torch.float32
    sums_dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None
    momentum: bool = True
    scalars: tuple[int, ...] = (3, 1)
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        for name in ("factor_update_period", "inverse_update_period", "bucket_bytes"):
            check_integer(f"{name} of PlanOptions", getattr(self, name))
        check_kind("parameter_dtype of PlanOptions", self.parameter_dtype, torch.dtype)
        check_kind("factor_dtype of PlanOptions", self.factor_dtype, torch.dtype)
        for name in ("factor_dtype", "sums_dtype", "gradient_dtype"):
            check_dtype(f"{name} of PlanOptions", getattr(self, name))
        check_flag("momentum of PlanOptions", self.momentum, optional=False)
        if self.exchange is not None:
            check_kind("exchange of PlanOptions", self.exchange, Exchange)
        check_kind("scalars of PlanOptions", self.scalars, tuple)
        for number in self.scalars:
            check_integer("each of the scalars of PlanOptions", number)

    @property
    def sent_dtype(self) -> torch.dtype:
        """Give the dtype of factor sums as they are sent."""
        return self.sums_dtype or self.factor_dtype

    @property
    def mass_words(self) -> int:
        """Return words of `sent_dtype` that the mass of a factor sum takes: it is not rounded to less than float32."""
        return torch.promote_types(self.sent_dtype, torch.float32).itemsize // self.sent_dtype.itemsize

    @property
    def inverse_dtype(self) -> torch.dtype:
        """Give the dtype of inverses."""
        return torch.promote_types(self.factor_dtype, torch.float32)

    def itemsize(self, payload: Payload) -> int:
        """Return bytes of a word of each kind of bucket."""
        if payload.is_control:
            return torch.int64.itemsize  # and float64's
        if payload is Payload.SUMS:
            return self.sent_dtype.itemsize
        if payload is Payload.GRADIENTS:
            return (self.gradient_dtype or self.parameter_dtype).itemsize
        return (self.inverse_dtype if payload is Payload.INVERSES else self.parameter_dtype).itemsize

    def bucket_words(self, payload: Payload) -> int:
        """Return the most words of a bucket that holds more than one item; every item of control goes alone."""
        if payload.is_control:
            return 0
        return self.bucket_bytes // self.itemsize(payload)
