"""Static descriptions and frozen records: what a layer is, and what the reports are made of.

Nothing here holds a tensor or touches autograd, so a plan can be made from specs alone (on the meta
device, for many ranks, on paper).
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class WeightSharing(Enum):
    """How the shared axis of a layer (time, space) enters the factors (Eschenhagen et al. 2023)."""

    EXPAND = "expand"
    """Every position is an example of its own; for convolutions this is KFC (Grosse & Martens 2016)."""
    REDUCE = "reduce"
    """Inputs are averaged and output gradients summed over positions (Ba et al. 2017, appendix A)."""


class Structure(Enum):
    """The part of a Kronecker factor that is kept."""

    DENSE = "dense"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"
    """The factor is taken to be the identity and nothing is measured (`G = I` is FOOF, Benzing 2022)."""

    def at_most(self, other: "Structure") -> "Structure":
        """The one of the two that keeps less."""
        order = list(Structure)
        return max(self, other, key=order.index)


class LossTerms(Enum):
    """What the mean in the loss runs over. It fixes the scale of `G` (see `KFACOptimizer`)."""

    EXAMPLES = "examples"
    """First dimension of the first tensor the model receives."""
    POSITIONS = "positions"
    """Elements of the model's output without its last (class) dimension."""
    ELEMENTS = "elements"
    """All elements of the model's output, as in `nn.MSELoss` and `nn.BCEWithLogitsLoss`."""
    SUM = "sum"
    """The loss is a sum, not a mean."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One gradient matrix `[groups, out_dim, in_dim]` and its two Kronecker factors."""

    name: str
    """Fully qualified name without wrapper prefixes; of several matrices of one module, each with a suffix."""
    params: tuple[str, ...]
    """Names, within the module, of the parameters packed into the matrix: a weight, then the bias as last column."""
    in_dim: int
    """Columns, the bias column included."""
    out_dim: int
    """Rows."""
    groups: int = 1
    """Independent matrices of one module: grouped convolution, query/key/value, features of a norm."""
    structure: tuple[Structure, Structure] = (Structure.DENSE, Structure.DENSE)
    """Kept structure of `(A, G)`; what a layer family asks for is the most that a user's choice can keep."""
    weight_sharing: WeightSharing = WeightSharing.EXPAND
    shared_input: bool = False
    """Whether all groups read one input, as far as was seen: they then share one `A`."""
    opposed: bool = False
    """Whether some uses multiply by the transposed matrix, as an output layer tied to an embedding does."""

    @property
    def has_bias(self) -> bool:
        return len(self.params) > 1

    def transposed(self) -> "LayerSpec":
        """As an opposed use sees the matrix: its inputs are the outputs here."""
        return replace(
            self,
            params=self.params[:1],
            in_dim=self.out_dim,
            out_dim=self.in_dim,
            structure=(self.structure[1], self.structure[0]),
        )


class Cost(NamedTuple):
    """Floating-point operations of one block, for plans and for the arithmetic floor."""

    refresh: float
    """One recomputation of the inverse."""
    apply: float
    """One preconditioning of the gradient."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One preconditioned block as `summary()` shows it."""

    name: str
    layer: str
    params: tuple[str, ...]
    """Fully qualified names."""
    groups: int
    shared_input: bool
    in_dim: int
    out_dim: int
    structure: tuple[Structure, Structure]
    weight_sharing: WeightSharing
    inverse: str
    state_bytes: int
    owner: int
    """Rank that refreshes the block; 0 on one process."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter of the optimizer: the block that covers it, or the reason why none does."""

    name: str
    shape: tuple[int, ...] | None
    """None for a lazy parameter that has none yet."""
    block: str | None
    reason: str | None
