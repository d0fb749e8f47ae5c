"""Which inverse suits a layer, where the user leaves it to us."""

from dataclasses import dataclass
from typing import Any

from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.inverses.damped.cholesky import Cholesky
from kfac_optim.inverses.damped.low_rank import LowRank
from kfac_optim.inverses.doubly_factored import DoublyFactored
from kfac_optim.specs import LayerSpec

_SKETCH = 64  # directions of wide factors


@dataclass(frozen=True)
class AutoInverse(InverseRule):
    """Chooses for each layer the inverse that its shape asks for. It is the default.

    1. A linear layer over a flattened feature map, wider than `max_factor_dim`: `DoublyFactored` with the channels of
       the map, where C, T and out are not wider. The map must be seen: a convolution, layers that keep its channels,
       `nn.Flatten()` and the linear layer, in `nn.Sequential`s. A `flatten` in a `forward` is not; name that layer:
       `{"head": DoublyFactored(channels=256), "*": AutoInverse()}`.
    2. A layer with a dense factor at least 256 wide: `LowRank(sketch=64)`, which keeps 64 columns of such factors, and
       32 eigenvectors; narrower factors of the layer stay whole. (Where an own layer's statistics cannot be sketched,
       the wide factors are kept, and inverted along 32 eigenvectors.)
    3. Everything else: `Cholesky`. Beside a scalar or an identity, as in the 2×2 blocks of norm layers, its damping is
       exact too.

    `summary()` shows what came of it. `inverse=Cholesky()` keeps all factors whole.

    Why these rules. From a width of 256 on, the 64 columns of a sketch are at most half of the numbers and of the
    operations of statistics, and the rest is cheaper still (`benchmarks/README.md` says what a step costs). Directions
    of steps hardly differ where eigenvalues fall as those of trained networks do (figures at `LowRank`); where they do
    not, as of inputs that are white noise, name `Cholesky()`. In place of three factors the wide layer would have a
    diagonal `A`: on MNIST at 8 × 8 pixels, with a convolution of 16 channels and layers 1024-32-10, the loss after 200
    steps was 0.23 with three factors, 0.25 with a diagonal `A` and 0.19 with a dense one. Of those that use whole
    factors none is cheaper than `Cholesky` at any size, as the table shows, and where `Eigen` costs as little, for
    narrow layers and for two diagonal factors, its exact damping has not paid: with layers 64-30-30-30-10 the loss
    after 300 steps was 0.21 with `Cholesky` and 0.23 with `Eigen` and with `EKFAC`; with all factors diagonal 0.26 with
    `Cholesky` and 0.28 with `Eigen`. (`MonteCarlo`, `kl_clip` 0.03, each at the best of 3 dampings, or of 12 to 16
    pairs of damping and rate; means of two or three seeds, which are up to 0.03 apart.)

    Microseconds of a refresh and of applying it, both factors of size d, float32, one CPU core, torch 2.13, the best of
    many:

    | d | `Cholesky` | `NewtonSchulz` | `Eigen` | `EKFAC` |
    |---|---|---|---|---|
    | 2 | 374, 8 | 1152, 10 | 363, 36 | 452, 29 |
    | 8 | 377, 9 | 1200, 10 | 378, 38 | 484, 32 |
    | 32 | 414, 11 | 1296, 12 | 515, 43 | 624, 37 |
    | 128 | 914, 95 | 3987, 97 | 1894, 222 | 2229, 225 |
    | 512 | 18400, 5400 | 152000, 5400 | 44300, 11700 | 59400, 13500 |
    | 1024 | 104000, 46700 | 1220000, 46900 | 278000, 92700 | 385000, 92000 |

    Nothing has been measured on accelerators, where `NewtonSchulz` may well be the faster one from some size on: the
    rule does not look at the device.
    """

    def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
        if channels is not None and spec.in_dim > max_factor_dim:
            three = DoublyFactored(channels)
            widest = max(max(dims) for dims in three.factor_dims(spec))
            if three.refusal(spec.by_blocks()) is None and widest <= max_factor_dim:
                return three
        wide = LowRank(sketch=_SKETCH)
        sides = zip(spec.structure, (spec.in_dim, spec.out_dim), strict=True)
        sketched = (wide.kept(kept, dim) != kept and dim <= max_factor_dim for kept, dim in sides)
        return wide if any(sketched) else Cholesky()
