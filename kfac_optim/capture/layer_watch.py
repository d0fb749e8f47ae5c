"""What the capture window asks of one layer, and is asked for it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from kfac_optim.factors.layer_call import LayerCall
from kfac_optim.utils.autograd import Node
from kfac_optim.utils.sharded_params import ShardedParameter, Shards


@dataclass(slots=True, weakref_slot=True, eq=False)
class LayerWatch:
    """Says what is asked of one layer.

    Attributes:
        weight: the parameter that a backward must reach to count.
        wanted: whether the layer's next forward should be captured.
        emit: receives each committed call; whether further backwards through it need its input again.
        discard: forgets the calls emitted since the last step.
        awaits_gradient: tells whether calls are to be handed to `verify`, and listens from now on to what backward adds
            to `.grad`. It is given the parameters of the model that are kept in shards.
        verify: receives a call with the gradient of one backward alone, to be compared with what that backward adds to
            `.grad`; None for a backward that reaches the weight through a call of which nothing is known any more.
        sharded: the weight, where it is kept in shards; the ledger tells.
        number: the number of the watch, in compiled graphs.
        node: the node of autograd that accumulates the weight's gradient, as last looked up; operators of compiled
            graphs cannot look it up.
    """

    weight: nn.Parameter
    wanted: Callable[[], bool]
    emit: Callable[[LayerCall], bool]
    discard: Callable[[], None]
    awaits_gradient: Callable[[Shards], bool]
    verify: Callable[[LayerCall | None], None]
    sharded: ShardedParameter | None = None
    number: int = field(default_factory=itertools.count().__next__)
    node: Node | None = None

    def has_lost_gradient(self) -> bool:
        """Return whether the weight has no gradient; of a sharded weight it may be on its way to other ranks."""
        return self.sharded is None and self.weight.grad is None

    @property
    def used(self) -> nn.Parameter:
        """Return what forwards use and backwards accumulate into: the weight, or what stands for it in shards."""
        gathered = None if self.sharded is None else self.sharded.gathered
        return self.weight if gathered is None else gathered


@dataclass(frozen=True, slots=True)
class WatchHandle:
    watches: list[LayerWatch]
    watch: LayerWatch
    removed: list[LayerWatch]

    def remove(self) -> None:
        if self.watch in self.watches:
            self.watches.remove(self.watch)
            self.removed.append(self.watch)
            self.watch.node = None  # which would hold its weight to the shape that it has
