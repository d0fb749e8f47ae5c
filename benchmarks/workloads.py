"""The training steps whose cost is measured, on synthetic data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Autoencoder, ResNet18, ResNet20, Transformer, mlp
from kfac_optim import LossTerms


@dataclass(frozen=True, slots=True)
class Workload:
    """Holds a model, a batch and a loss.

    Attributes:
        model: makes the network.
        batch: ``(examples) → (inputs, targets)``.
        loss: ``(outputs, targets) → []``.
        loss_terms: what the loss's mean runs over.
        examples: batch size.
        peer: ratio of a step of kfac_pytorch (method "inverse") to one of SGD, for each (factor, inverse) period;
            measured with this workload on 2 cores of another machine.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    loss_terms: LossTerms
    examples: int
    peer: dict[tuple[int, int], float] = field(default_factory=dict)


def reconstruction_loss(logits: Tensor, pixels: Tensor) -> Tensor:
    """Return binary cross-entropy summed over the pixels, mean over the batch; in nats. Both ``[batch, pixels]``."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(pixels)


def _images_and_themselves(examples: int) -> tuple[Tensor, Tensor]:
    pixels = torch.rand(examples, 784)
    return pixels, pixels


def _images_and_classes(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))


def _text_and_next_characters(examples: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(65, (examples, 129))
    return text[:, :-1], text[:, 1:]


def _photographs_and_classes(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 224, 224), torch.randint(1000, (examples,))


def _features_and_classes(inputs: int, classes: int, examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, inputs), torch.randint(classes, (examples,))


def _classifier(widths: Sequence[int], examples: int) -> Workload:
    return Workload(
        partial(mlp, widths, nn.Tanh),
        partial(_features_and_classes, widths[0], widths[-1]),
        F.cross_entropy,
        LossTerms.EXAMPLES,
        examples,
    )


def next_character_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all positions, in nats; ``[batch, context, vocabulary]`` and ``[batch, context]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKLOADS = {
    "autoencoder": Workload(
        Autoencoder,
        _images_and_themselves,
        reconstruction_loss,
        LossTerms.EXAMPLES,
        examples=512,
        peer={(1, 1): 6.1, (1, 10): 3.4, (10, 100): 2.2},
    ),
    "resnet20": Workload(
        ResNet20,
        _images_and_classes,
        F.cross_entropy,
        LossTerms.EXAMPLES,
        examples=128,
        peer={(1, 1): 8.8, (1, 10): 8.5, (10, 100): 1.8},
    ),
    "transformer": Workload(
        Transformer,
        _text_and_next_characters,
        next_character_loss,
        LossTerms.POSITIONS,
        examples=16,
        peer={(1, 1): 3.5, (1, 10): 2.4, (10, 100): 1.31},
    ),
    # Small layers, where launches take longer than products.
    "digits": _classifier((64, *[64] * 8, 10), examples=128),
    "narrow": _classifier([16] * 101, examples=64),
    # Layers far wider than a batch has rows.
    "wide": _classifier((3072, 64, 4), examples=32),
    "softmax": _classifier((256, 256, 3000), examples=64),
    "resnet18": Workload(ResNet18, _photographs_and_classes, F.cross_entropy, LossTerms.EXAMPLES, examples=4),
}
