"""Static descriptions and frozen records: what a layer is, and what the reports are made of.

Nothing here holds a tensor or touches autograd, so a plan can be made from specs alone (on the meta
device, for many ranks, on paper).
"""

from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral
from typing import NamedTuple


class WeightSharing(Enum):
    """Says how the shared axis of a layer (time, space) enters the factors (Eschenhagen et al. 2023)."""

    EXPAND = "expand"
    """Every position is an example of its own; for convolutions this is KFC (Grosse & Martens 2016)."""
    REDUCE = "reduce"
    """Inputs are averaged and output gradients summed over positions (Ba et al. 2017, appendix A)."""


class Structure(Enum):
    """Says which part of a Kronecker factor is kept."""

    DENSE = "dense"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"
    """The factor is taken to be the identity and nothing is measured (`G = I` is FOOF, Benzing 2022)."""


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """Keep dense blocks along the diagonal of a wide factor; what lies outside of them is taken to be zero.

    A factor of width d is cut into `⌈d / size⌉` blocks of consecutive rows and columns, all of one width `b ≤ size` but
    the last, which may be narrower. Nothing wider is ever formed: statistics, storage and the inverse take `d · b`
    numbers in place of `d²`, refreshing `d · b²` operations in place of `d³`. A factor no wider than `size` stays
    dense. In `structure=` it stands where a `Structure` may, for one of the two factors of a layer:

        structure={"head": (Structure.DENSE, BlockDiagonal(1000)), "*": (Structure.DENSE, Structure.DENSE)}

    It is for the outputs of a layer over a large vocabulary and for inputs of some ten thousand features, where
    `Structure.DIAGONAL` would lose all correlations. Neighbours in a block should belong together: channels, places,
    frequent tokens.

    Args:
        size: the most rows of a block; from 2 on (blocks of 1 are `Structure.DIAGONAL`).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: it is below 2.
    """

    size: int = 1024

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral):
            raise TypeError(f"kfac_optim: size of BlockDiagonal must be an integer, got {self.size!r}.")
        if self.size < 2:
            raise ValueError(
                f"kfac_optim: size of BlockDiagonal must be at least 2, got {self.size!r}; blocks of 1 are "
                "Structure.DIAGONAL."
            )

    def blocks(self, dim: int) -> int:
        """Return how many blocks a factor of width `dim` has."""
        return -(-dim // self.size)

    def width(self, dim: int) -> int:
        """Give the width of all blocks but the last, of a factor of width `dim`."""
        return -(-dim // self.blocks(dim))


@dataclass(frozen=True, slots=True)
class Sketched:
    """Keep the products of a wide factor with random directions, and its trace, in place of the factor.

    Of a factor `F` `[d, d]` the products `F Ω` `[d, columns]` are kept, with directions `Ω` that depend on the two
    sizes alone (`linalg.sketch_directions`). They are linear in `F`, so that running averages, and sums over several
    processes, are taken of them as of `F` itself, and nothing of size `d²` is ever formed. `LowRank(sketch=columns)`
    asks for it, and reads leading eigenpairs off the products.

    Attributes:
        columns: how many directions.
    """

    columns: int


Kept = Structure | BlockDiagonal | Sketched
"""What is kept of one factor."""


def narrower(one: Kept, other: Kept) -> Kept:
    """Return the one of the two that keeps less; the first if they keep as much."""
    order = (Structure.IDENTITY, Structure.DIAGONAL, Sketched, BlockDiagonal, Structure.DENSE)

    def extent(kept: Kept) -> tuple[int, int]:
        if isinstance(kept, BlockDiagonal):
            return order.index(BlockDiagonal), kept.size
        if isinstance(kept, Sketched):
            return order.index(Sketched), kept.columns
        return order.index(kept), 0

    return min(one, other, key=extent)


class LossTerms(Enum):
    """Says what the mean in the loss runs over, which fixes the scale of `G` (see `KFACOptimizer`)."""

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
    """Describes one gradient matrix `[groups, out_dim, in_dim]` and its two Kronecker factors."""

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
    structure: tuple[Kept, Kept] = (Structure.DENSE, Structure.DENSE)
    """Kept structure of `(A, G)`; what a layer family asks for is the most that a user's choice can keep."""
    weight_sharing: WeightSharing = WeightSharing.EXPAND
    shared_input: bool = False
    """Whether all groups read one input, as far as was seen: they then share one `A`."""
    shared_output: bool = False
    """Whether all groups have one `G`: where they are the blocks of a `BlockDiagonal` `A`."""
    own_rows: bool = False
    """Whether groups that do not share their input have rows of their own, as experts have: each then has a mass."""
    opposed: bool = False
    """Whether some uses multiply by the transposed matrix, as an output layer tied to an embedding does."""

    @property
    def has_bias(self) -> bool:
        return len(self.params) > 1

    @property
    def masses(self) -> int:
        """Return how many masses each running average has: one, or that of each group."""
        return self.groups if self.own_rows and not (self.shared_input or self.shared_output) else 1

    def transposed(self) -> "LayerSpec":
        """Describe the matrix as an opposed use sees it: its inputs are the outputs here."""
        return replace(
            self,
            params=self.params[:1],
            in_dim=self.out_dim,
            out_dim=self.in_dim,
            structure=(self.structure[1], self.structure[0]),
            shared_input=self.shared_output,
            shared_output=self.shared_input,
        )

    def blocks(self, side: int) -> int:
        """Return into how many blocks the factor of side 0 (A) or 1 (G) is cut; 1 if it is not cut."""
        kept = self.structure[side]
        return kept.blocks((self.in_dim, self.out_dim)[side]) if isinstance(kept, BlockDiagonal) else 1

    def by_blocks(self) -> "LayerSpec":
        """Describe the matrix as inverses see it: its blocks are dense groups that share the factor of the other side.

        The gradient matrix is then `[blocks, width, in]` where `G` is cut, `[blocks, out, width]` where `A` is, with
        zeros in what the last block lacks. At most one of the two is cut, and of a layer without groups.
        """
        in_blocks, out_blocks = self.blocks(0), self.blocks(1)
        if in_blocks == out_blocks == 1:
            return self
        a, g = (Structure.DENSE if isinstance(kept, BlockDiagonal) else kept for kept in self.structure)
        return replace(
            self,
            groups=in_blocks * out_blocks,
            in_dim=-(-self.in_dim // in_blocks),
            out_dim=-(-self.out_dim // out_blocks),
            structure=(a, g),
            shared_input=out_blocks > 1,
            shared_output=in_blocks > 1,
        )

    def factors(self) -> "tuple[FactorShape, FactorShape]":
        """Return the shapes of `A` and `G`. Call it on what `by_blocks` returned."""
        sides = (
            (self.structure[0], self.shared_input, self.in_dim),
            (self.structure[1], self.shared_output, self.out_dim),
        )
        a, g = (
            FactorShape(
                Structure.DENSE if isinstance(kept, BlockDiagonal) else kept,
                1 if shared else self.groups,
                dim,
                self.masses,
            )
            for kept, shared, dim in sides
        )
        return a, g


class FactorShape(NamedTuple):
    """The shape of a factor is `[groups, dim, dim]`, whole or sketched, and `[groups, dim]` where it is diagonal."""

    structure: Structure | Sketched
    groups: int
    dim: int
    masses: int = 1
    """Masses of its running average: one, or one for each group."""

    @property
    def packed(self) -> int:
        """Return numbers of its running average as it is kept and sent: of a dense matrix one triangle."""
        if isinstance(self.structure, Sketched):
            return self.groups * (self.dim * self.structure.columns + 1)
        per_group = self.dim * (self.dim + 1) // 2 if self.structure is Structure.DENSE else self.dim
        return self.groups * per_group

    @property
    def numel(self) -> int:
        """Count the elements of the matrices, of their sketches, or of the diagonals."""
        if isinstance(self.structure, Sketched):
            return self.packed
        return self.groups * (self.dim**2 if self.structure is Structure.DENSE else self.dim)


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a part of a block's inverse that one rank recomputes as a whole: a factor, or several."""

    name: str
    """`"A"`, `"G"`; empty where the block is one part."""
    refresh: float
    """Operations of one recomputation."""
    sums: tuple[FactorShape, ...]
    """The running averages it is made of, which ranks that see different data merge, each with its mass."""
    sent: int
    """Numbers from which a rank that did not recompute it can apply it."""
    held: int
    """Numbers of its result as it is kept, flags and counts aside."""
    traces: int = 0
    """Numbers of the other part's averages that it needs, where those are merged on another rank."""
    measuring: int = 0
    """The numbers among those sent that every rank needs to take statistics."""


class Cost(NamedTuple):
    """Counts floating-point operations of one block, for plans and for the arithmetic floor."""

    refresh: float
    """One recomputation of the inverse."""
    apply: float
    """One preconditioning of the gradient."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """Describes one preconditioned block as `summary()` shows it."""

    name: str
    layer: str
    params: tuple[str, ...]
    """Fully qualified names."""
    groups: int
    shared_input: bool
    in_dim: int
    out_dim: int
    structure: tuple[Kept, Kept]
    factor_dims: tuple[tuple[int, ...], tuple[int, ...]]
    """Sizes of the matrices whose Kronecker product stands for `A` and for `G`, where that is dense."""
    weight_sharing: WeightSharing
    inverse: str
    state_bytes: int
    owners: tuple[int, ...]
    """Ranks that refresh the block, or each of its parts; 0 on one process."""
    notes: tuple[str, ...]
    measured: bool | None = None
    """Whether statistics were taken of it so far; None before the first step."""


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """Describes one parameter of the optimizer: the block that covers it, or the reason why none does."""

    name: str
    shape: tuple[int, ...] | None
    """The shape; None for a lazy parameter that has none yet."""
    block: str | None
    reason: str | None
