"""KL trust region: one scalar that bounds how far a step moves the model's predictive distribution."""

from collections.abc import Sequence

import torch
from torch import Tensor


def trust_region_scale(quadratic: Tensor, kl_clip: float) -> Tensor:
    """`ν = min(1, √(κ / (lr² ΔᵀFΔ)))` (Ba, Grosse & Martens 2017, §5), on the device.

    Args:
        quadratic: `[]`, `lr² Δᵀ∇` summed over every covered parameter; `Δᵀ∇` stands for `ΔᵀFΔ`.
        kl_clip: `κ`, positive, in nats.

    Returns:
        `[]`, in (0, 1].
    """
    # A quadratic of zero (no gradient) divides to inf and clamps to 1.
    return (kl_clip / quadratic.clamp(min=0)).sqrt().clamp(max=1)


def inner_product(left: Sequence[Tensor], right: Sequence[Tensor], device: torch.device) -> Tensor:
    """`Σ ⟨leftᵢ, rightᵢ⟩`, `[]` on `device`.

    Args:
        left: tensors of any shapes, on any devices.
        right: one for each of `left`, of the same shape, dtype and device.
        device: where the scalar lives.
    """
    products = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(left, right, strict=True)]
    if not products:
        return torch.zeros((), device=device)
    return torch.stack([product.to(device, non_blocking=True) for product in products]).sum()
