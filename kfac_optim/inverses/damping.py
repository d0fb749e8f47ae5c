"""How damping `λ` is shared out among the Kronecker factors of a block."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kfac_optim.linalg.cholesky import shift_diagonal


class Damped(NamedTuple):
    """The damped factor is `scale · F + shift · I`; both are `[groups]`."""

    scale: Tensor
    shift: Tensor

    @classmethod
    def joined(cls, parts: "Iterable[Damped]") -> "Damped":
        """Return the damping of the groups of several factors, one after the other."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    def of(self, factor: Tensor) -> Tensor:
        """Return the damped form of `F`, `[groups, d, d]`, or `[groups, d]` for a diagonal one."""
        scaled = self.scaled(factor)
        return shift_diagonal(scaled, self.shift) if factor.dim() == 3 else scaled + self.shift.unsqueeze(-1)

    def scaled(self, factor: Tensor) -> Tensor:
        """Return `F` scaled as in the damped form, without its shift."""
        return factor * self.scale.view(-1, *(1,) * (factor.dim() - 1))


def factored_tikhonov(
    traces: Sequence[Tensor], dims: Sequence[int], damping: float, *, balanced: bool = True
) -> list[Damped]:
    """Share λ by factored Tikhonov damping with the trace norm (Martens & Grosse 2015, §6.3; k factors as in kfac-jax).

    With `n_i = tr(F_i)/d_i`, factor i of k gets `λ^{1/k} n_i / (∏ n)^{1/k}` on its diagonal: for two factors
    `π√λ` and `√λ/π`, `π = √(n_A / n_G)`. If any trace is zero each gets `λ^{1/k}`.

    A 1×1 factor is a scalar and cannot share: it multiplies the first of the others, which makes the damping of
    what remains exact. With nothing but scalars their product is damped.

    Where one factor serves all groups of the other (`[1]` against `[groups]` traces), the other is taken as the
    block-diagonal matrix of its groups, which has one mean eigenvalue.

    Args:
        traces: the traces of each factor, `[groups]`.
        dims: size of each factor.
        damping: `λ`, positive.
        balanced: whether shares follow the sizes of the factors; otherwise each gets `λ^{1/k}`.
    """
    sizes = [len(trace) for trace in traces]
    if min(sizes) < max(sizes):
        means = [trace.mean(0, keepdim=True) for trace in traces]
        common = factored_tikhonov(means, dims, damping, balanced=balanced)
        return [Damped(*(part.expand(size) for part in each)) for each, size in zip(common, sizes, strict=True)]
    matrices = [i for i, dim in enumerate(dims) if dim > 1]
    carrier = matrices[0] if matrices else 0
    one, zero = torch.ones_like(traces[0]), torch.zeros_like(traces[0])
    product = one
    for i, trace in enumerate(traces):
        if i not in matrices and i != carrier:
            product = product * trace
    damped = [Damped(scale=zero, shift=one)] * len(traces)
    if not matrices:
        damped[carrier] = Damped(scale=product, shift=one * damping)
        return damped

    # A zero scalar makes the whole product zero: nothing of the other factors must remain but their share of λ.
    alive = (product > 0).to(product.dtype)
    norms = {i: traces[i] / dims[i] * (product if i == carrier else alive) for i in matrices}
    k = len(matrices)
    geometric_mean = torch.stack([norms[i] for i in matrices]).pow(1 / k).prod(0)
    for i in matrices:
        share = torch.where(geometric_mean > 0, norms[i] / geometric_mean, 1.0) if balanced else one
        damped[i] = Damped(scale=product if i == carrier else alive, shift=damping ** (1 / k) * share)
    return damped
