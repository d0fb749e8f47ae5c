"""The user's choices about which rank does what, as values."""

from dataclasses import dataclass
from enum import Enum

from kfac_optim.utils.validation import check_integer, check_kind, check_number


class Placement(Enum):
    """Says what has one owner."""

    LAYERS = "layers"
    """A layer: one rank refreshes all of it. Where only one rank preconditions a layer, that is the same rank."""
    FACTORS = "factors"
    """Each factor that can be solved for apart (`Inverse.parts`), wherever there is room, and preconditioning by
    itself: balances best, and sends inverses to the ranks that precondition."""


class Statistics(Enum):
    """Says whose batch the factors are taken from."""

    ALL = "all"
    """The batches of all ranks, as for the gradient."""
    OWN = "own"
    """The batch of the rank that refreshes: an approximation by `1 / ranks` of the examples, which sends nothing."""


class Exchange(Enum):
    """Says which way numbers go between all ranks and the one that owns them."""

    DIRECT = "direct"
    """Goes in one all-to-all: each rank sends to each owner what is its own. The fewest bytes, `2(P−1)n` in all, but an
    owner moves and holds P − 1 times what it owns, so that it is for few ranks."""
    SEGMENTS = "segments"
    """Goes by a reduce-scatter into equal segments and an all-to-all of these to owners, and back by an all-to-all and
    an all-gather: `1 + 1/P` times the bytes, about the same on every rank."""


@dataclass(frozen=True)
class Replicated:
    """All-reduces gradients, as DDP does; every rank updates all parameters.

    Of P ranks w hold the inverses of a layer and precondition its gradient; the other ranks get the result (KAISA,
    Pauloski et al. 2021). w = P takes the least communication in a step, w = 1 the least memory and arithmetic. Ranks
    are cut into P/w groups of neighbours, and each group preconditions its share of the layers. Where the cost model
    knows `ranks_per_node`, groups may lie across nodes: then results stay within them.

    Words sent by all ranks in a step, for gradients of n words, factors of t packed and inverses that are sent as
    triangles: `2(P−1)n + (P−1)t/k_i + (w−1)t/k_i + (P−w)n`.

    Args:
        inverse_worker_fraction: the most that w / P may be, in (0, 1]; w is the largest divisor of P that it allows,
            at least 1: `1 / P` and all below are memory-optimal, 1 is communication-optimal.
        placement: what has one owner.
        statistics: whose batch the factors are taken from.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: the fraction is out of range.
    """

    inverse_worker_fraction: float = 1.0
    placement: Placement = Placement.LAYERS
    statistics: Statistics = Statistics.ALL

    def __post_init__(self) -> None:
        check_number("inverse_worker_fraction of Replicated", self.inverse_worker_fraction, above=0, at_most=1)
        check_kind("placement of Replicated", self.placement, Placement)
        check_kind("statistics of Replicated", self.statistics, Statistics)

    def workers(self, ranks: int) -> int:
        """Return how many of `ranks` precondition a layer."""
        most = self.inverse_worker_fraction * ranks * (1 + 1e-9)  # of 1 / ranks times ranks one is meant
        return max(number for number in divisors(ranks) if number == 1 or number <= most)


@dataclass(frozen=True)
class _OneWorker:
    """Has one rank precondition each layer."""

    placement: Placement = Placement.LAYERS
    statistics: Statistics = Statistics.ALL

    def __post_init__(self) -> None:
        check_kind(f"placement of {type(self).__name__}", self.placement, Placement)
        check_kind(f"statistics of {type(self).__name__}", self.statistics, Statistics)

    def workers(self, ranks: int) -> int:
        """Return how many of `ranks` precondition a layer."""
        return 1


@dataclass(frozen=True)
class Sharded(_OneWorker):
    """Brings each layer's gradient to one rank, which preconditions and updates; the parameters are gathered.

    As ZeRO stage 1 does with its state (Rajbhandari et al. 2020, §5.1); momentum is held by owners alone. Words sent by
    all ranks in a step: `2(P−1)n + (P−1)t/k_i`, which is plain SGD's and the factors once per refresh.

    `.grad` of parameters that other ranks own is then not the mean over ranks.

    Args:
        placement: what has one owner.
        statistics: whose batch the factors are taken from.

    Raises:
        TypeError: an argument of the wrong kind.
    """


@dataclass(frozen=True)
class FullySharded(_OneWorker):
    """Leaves rows of all parameters on each rank, which updates them as FSDP2 does; a layer's owner preconditions it.

    The rows of its gradient go to the owner and those of the direction come back. Words that all ranks send for K-FAC
    in a step, where rows are even: `2n(P−1)/P + (P−1)t/k_i`; FSDP2's own traffic comes on top. Of R copies (HSDP) one
    goes to the owner, and all get the direction: `n(1 + R − 2R/P)`.

    This is what becomes of every strategy where parameters are sharded by `fully_shard` or tensor parallelism.

    Args:
        placement: what has one owner.
        statistics: whose batch the factors are taken from.

    Raises:
        TypeError: an argument of the wrong kind.
    """


Strategy = Replicated | Sharded | FullySharded


@dataclass(frozen=True)
class Auto:
    """Takes the strategy with the shortest step by the cost model, of those that fit into memory.

    Args:
        memory_budget: bytes that K-FAC and momentum may take on the rank that needs most (`Memory.total`); None is no
            bound.
        candidates: the strategies to choose from; where two are as fast, the one that needs less memory, then the
            earlier. Empty is `Replicated` with every fraction and placement. `Sharded` has to be named here to be
            chosen: it changes what `.grad` means.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a budget below 1, or `FullySharded` among the candidates: whether parameters are sharded is not
            for it to choose.
    """

    memory_budget: int | None = None
    candidates: tuple[Strategy, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_budget is not None:
            check_integer("memory_budget of Auto (None is no bound)", self.memory_budget)
        check_kind("candidates of Auto", self.candidates, tuple)
        for each in self.candidates:
            check_strategy("each of the candidates of Auto", each)
            if isinstance(each, FullySharded):
                raise ValueError(
                    f"kfac_optim: candidates of Auto must be Replicated(...) or Sharded(...), got {each!r}. Parameters "
                    "that fully_shard has sharded are dealt with so whatever the strategy; leave it out."
                )

    @property
    def may_shard(self) -> bool:
        """Return whether `Sharded` may be chosen."""
        return any(isinstance(each, Sharded) for each in self.candidates)

    def strategies(self, ranks: int) -> tuple[Strategy, ...]:
        """Return the strategies to choose from."""
        return self.candidates or tuple(
            Replicated(number / ranks, placement) for number in reversed(divisors(ranks)) for placement in Placement
        )


def check_strategy(name: str, value: object) -> None:
    """Raise TypeError unless the value is an instance of a strategy."""
    if not isinstance(value, Strategy):
        raise TypeError(
            f"kfac_optim: {name} must be Replicated(...), Sharded(...) or FullySharded(...), got {value!r}."
        )


def divisors(number: int) -> list[int]:
    """Give the divisors of a number in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]
