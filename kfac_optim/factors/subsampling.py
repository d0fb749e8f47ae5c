"""Which rows of a layer's calls make its statistics, where not all are to: a few examples, and of each a few positions.

The choice depends on the seed, the optimizer step and the number of rows alone: every backward through a call takes the
same rows, a resumed run takes those of the uninterrupted one, and no generator of the training loop is touched. Layers
with as many rows as others take the same ones, which are drawn, and sent to an accelerator, once for all of them.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kfac_optim.utils.streams import current_stream
from kfac_optim.utils.validation import check_integer


@dataclass(frozen=True, slots=True)
class Subsample:
    """Takes at most so many examples of a call, and of each at most so many positions, for the statistics of a layer.

    Second moments of some hundred rows for each column of a factor say as much as those of all. Where rows are many
    (the positions of convolutions and sequences, large batches), taking a part of them at random makes statistics
    steps cheaper; gradients are those of the whole batch as ever. `rows` bounds what early convolutions take, of which
    few examples have many positions, and leaves late ones and plain layers as they are.

    Rows are drawn without replacement, each with the same probability p, and every one stands for 1/p of them: sums
    over what was drawn, times 1/p, are those over all rows in expectation. So `G`, and the second moments of `EKFAC`,
    are unbiased; `A` is a mean, over the active rows among those drawn, and calls of one step are weighed by the rows
    they stand for. Padding is drawn as other positions are, and counts for as little. Where few positions have a
    gradient at all (a loss at one token of a sequence) a draw may have none of them, which is then no sample: there
    take examples only.

    Args:
        examples: the most examples of a call; None is all.
        positions: the most positions (time, space) of each of these; None is all. With `WeightSharing.REDUCE` and with
            `EKFAC(per_example=True)` it is refused: they square a sum over positions, of which a part, squared, is no
            unbiased estimate.
        seed: the seed of the random numbers.
        rows: no more examples than have so many positions between them, and at least one; None is no such bound.

    Raises:
        TypeError: a number is not an integer.
        ValueError: `examples`, `positions` or `rows` is below 1, or `seed` below 0.
    """

    examples: int | None = None
    positions: int | None = None
    seed: int = 0
    rows: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("examples", self.examples), ("positions", self.positions), ("rows", self.rows)):
            if most is not None:
                check_integer(f"{name} of Subsample (None is all)", most)
        check_integer("seed of Subsample", self.seed, at_least=0)

    @property
    def takes_all(self) -> bool:
        return self.examples is None and self.positions is None and self.rows is None


@dataclass(frozen=True, slots=True)
class Draw:
    """Draws rows in one step; calls of equal shape get the same rows."""

    choice: Subsample
    step: int

    def rows(self, batch: int, shared: int, device: torch.device) -> "RowSample | None":
        """Return rows of a call of `batch` examples with `shared` positions each; None where all are taken."""
        positions = min(shared, self.choice.positions or shared)
        examples = min(batch, self.choice.examples or batch)
        if self.choice.rows is not None and positions > 0:
            examples = min(examples, -(-self.choice.rows // positions))
        if (examples, positions) == (batch, shared) or batch * shared == 0:
            return None
        draw = _drawn.__wrapped__ if is_in_torch_dispatch_mode() else _drawn  # a mode may make other tensors
        stream = current_stream(device)  # another one would not wait for what is sent in this one
        return draw(int(self.choice.seed), self.step, (batch, examples), (shared, positions), device, stream)


@dataclass(frozen=True, slots=True, eq=False)
class RowSample:
    """Names some of the rows of a call.

    Attributes:
        examples: `[examples]` int64, ascending.
        positions: the positions of each example, `[examples, positions]` int64, ascending; None for all.
        weight: how many rows of the call each stands for.
    """

    examples: Tensor
    positions: Tensor | None
    weight: float

    def part(self, start: int, stop: int) -> "RowSample":
        """Return some of the examples that were drawn."""
        positions = None if self.positions is None else self.positions[start:stop]
        return replace(self, examples=self.examples[start:stop], positions=positions)

    def of(self, rows: Tensor) -> Tensor:
        """Give the sampled rows `[groups, examples, positions, d]` of `[groups, batch, shared, d]`."""
        if self.positions is None:
            return self._of_examples(rows, 1)
        return rows[:, self.examples.unsqueeze(1), self.positions]

    def of_batch(self, tensor: Tensor) -> Tensor:
        """Return the drawn examples of `[batch, ...]`, with all their positions."""
        return self._of_examples(tensor, 0)

    def _of_examples(self, tensor: Tensor, axis: int) -> Tensor:
        # In the order of the memory: of anything else torch first makes a copy, of all examples.
        axes = range(tensor.dim())
        order = sorted(axes, key=lambda each: (tensor.shape[each] > 1, tensor.stride(each)), reverse=True)
        ordered, place = tensor.permute(order), order.index(axis)
        if place == 0 and not tensor.is_cpu:  # of a few large examples `index_select` takes ten times as long (an H200)
            taken = ordered[self.examples]
        else:
            taken = ordered.index_select(place, self.examples)
        return taken.permute([order.index(each) for each in axes])


@lru_cache(maxsize=8)
def _drawn(
    seed: int, step: int, examples: tuple[int, int], positions: tuple[int, int], device: torch.device, _: Hashable
) -> RowSample:
    """Draw some of so many examples, and of each some of so many positions, given as `(all, taken)`."""
    key = hashlib.blake2b(repr((seed, step)).encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(key, "little"))
    (batch, taken), (shared, few) = examples, positions
    chosen = torch.randperm(batch, generator=generator, device="cpu")[:taken].sort().values
    places = None
    if few < shared:
        # Of numbers with 53 random bits: those of float32 would often be equal.
        keys = torch.rand(taken, shared, generator=generator, dtype=torch.float64, device="cpu")
        places = keys.topk(few, dim=1).indices.sort(dim=1).values.to(device, non_blocking=True)
    weight = (batch / taken) * (shared / few)
    return RowSample(chosen.to(device, non_blocking=True), places, weight)
