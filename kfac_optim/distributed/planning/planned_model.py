"""The model as a planner sees it: matrices that K-FAC preconditions, and parameters that it leaves to SGD."""

from dataclasses import dataclass
from typing import Any

from kfac_optim.inverses.base import Inverse
from kfac_optim.specs import LayerSpec
from kfac_optim.utils.validation import check_integer


@dataclass(frozen=True, slots=True)
class Covered:
    """Describes a gradient matrix that K-FAC preconditions.

    Attributes:
        spec: the spec of its layer, as its block has it.
        inverse: its representation.
        rows: examples × positions that one rank's batch gives it; 0 leaves its forward, backward and statistics out of
            the prediction, as of an embedding.
        shards: elements of its parameters that each rank holds, where they are sharded; empty is all on every rank, and
            under `FullySharded` as many on each.

    Raises:
        TypeError: `rows` is not an integer.
        ValueError: it is below 0.
    """

    spec: LayerSpec
    inverse: Inverse[Any]
    rows: int = 0
    shards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_integer(f"rows of {self.name!r}", self.rows, at_least=0)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def words(self) -> int:
        """Give the words of its gradient."""
        return self.spec.groups * self.spec.in_dim * self.spec.out_dim

    @property
    def description(self) -> str:
        """Return the shapes and choices that ranks must agree on."""
        spec = self.spec
        shape = f"{'+'.join(spec.params)} {spec.groups}×{spec.out_dim}×{spec.in_dim}"
        sides = " and ".join(str(getattr(kept, "value", kept)) for kept in spec.structure)
        shards = [f"shards {self.shards}"] if self.shards else []
        flags = [name for name in ("shared_input", "shared_output", "opposed") if getattr(spec, name)]
        return ", ".join([shape, sides, spec.weight_sharing.value, *flags, *shards, repr(self.inverse)])


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Describes a parameter that K-FAC leaves to SGD, by its fully qualified name and number of elements.

    Raises:
        TypeError: `words` is not an integer.
        ValueError: it is below 0.
    """

    name: str
    words: int

    def __post_init__(self) -> None:
        check_integer(f"words of {self.name!r}", self.words, at_least=0)
