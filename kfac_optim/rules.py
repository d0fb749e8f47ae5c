"""Which inverse suits a layer, where the user leaves it to us."""

from dataclasses import dataclass
from typing import Any

from kfac_optim.inverses import Cholesky, DoublyFactored, Eigen
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.specs import LayerSpec, Structure


@dataclass(frozen=True)
class AutoInverse(InverseRule):
    """For each layer the inverse that its shape asks for: `inverse=AutoInverse()`, or for some layers in a mapping.

    The first of these that holds; `summary()` shows what came of it:

    1. A linear layer over a flattened feature map, wider than `max_factor_dim`: `DoublyFactored` with the channels of
       the map, where C, T and out are not wider. (The alternative is a diagonal `A`.) The map must be seen: a
       convolution, layers that keep its channels, `nn.Flatten()` and the linear layer, in `nn.Sequential`s. A
       `flatten` in a `forward` is not; name that layer: `{"head": DoublyFactored(channels=256), "*": AutoInverse()}`.
    2. Both factors diagonal, whether `structure` or `max_factor_dim` made them so: `Eigen`, whose damping is exact.
       There is nothing to decompose, and a refresh takes as long as with `Cholesky` (0.25 ms for 512 × 512).
    3. Everything else: `Cholesky`, the 2×2 blocks of norm layers included. Beside a scalar or an identity its damping
       is as exact as that of `Eigen`.

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

    So `Cholesky` is never the dearer one there. It has not been measured on accelerators, where `NewtonSchulz` may well
    be faster from some size on: the rule does not look at the device.
    """

    def choose(self, spec: LayerSpec, max_factor_dim: int, channels: int | None) -> Inverse[Any]:
        sizes = (spec.in_dim, spec.out_dim)
        if channels is not None and spec.in_dim > max_factor_dim:
            three = DoublyFactored(channels)
            if three.refusal(spec) is None and max(three.factor_dims(spec)) <= max_factor_dim:
                return three
        kept = [
            side.at_most(Structure.DIAGONAL) if size > max_factor_dim else side
            for side, size in zip(spec.structure, sizes, strict=True)
        ]
        if kept == [Structure.DIAGONAL, Structure.DIAGONAL] and min(sizes) > 1:
            return Eigen()
        return Cholesky()
