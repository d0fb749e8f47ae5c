"""The data of a problem: batches without end, and what its measures are read off on.

Training measures are read off on the first 5,000 training examples, validation measures on as many of the validation
split; of text on 1,024 fixed passages each, of CIFAR-10 on 1,000 and 2,000 images, of noisy images on 1,000 each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import data
from benchmarks.data import ImageData, Split, TextData

_READ = 5000  # examples on which a measure is read off
_PASSAGES = 1024  # the same for text
_PHOTOGRAPHS = 1000, 2000  # for training and validation: with 5000 each, reading takes as long as training
_NOISY = 1000
_TAUGHT = 20_000  # examples that a teacher makes
_QUICK_READ = 128

Batch = tuple[Tensor, Tensor]
"""Holds ``(inputs [batch, ...], targets)``."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Holds the data of a problem.

    Attributes:
        draw: ``(batch sizes, seed) → batches`` without end; one seed always gives the same.
        count: how many examples there are to draw from.
        training: the examples on which the training measure is read off.
        validation: the examples on which the validation measure is read off.
        outputs: how many outputs the model has: classes, characters or pixels.
        whole: all training examples as one batch, where that is possible.
    """

    draw: Callable[[Iterator[int], int], Iterator[Batch]]
    count: int
    training: Split
    validation: Split
    outputs: int
    whole: Split | None = None

    def quick(self) -> Examples:
        """Return the same with fewer to measure on."""
        return replace(self, training=self.training.first(_QUICK_READ), validation=self.validation.first(_QUICK_READ))


def read_images(images: ImageData) -> Examples:
    """Return images and their classes."""
    return Examples(
        draw=lambda sizes, seed: data.draw(images.train, sizes, seed),
        count=len(images.train),
        training=images.train.first(_READ),
        validation=images.validation.first(_READ),
        outputs=images.classes,
        whole=images.train,
    )


def read_pixels(train: Tensor, validation: Tensor) -> Examples:
    """Return images ``[examples, ...]`` and themselves as ``[examples, pixels]``."""
    splits = [Split(pixels, pixels) for pixels in (train.flatten(1), validation.flatten(1))]
    return Examples(
        draw=lambda sizes, seed: data.draw(splits[0], sizes, seed),
        count=len(train),
        training=splits[0].first(_READ),
        validation=splits[1].first(_READ),
        outputs=splits[0].targets.shape[1],
        whole=splits[0],
    )


def read_photographs(images: ImageData) -> Examples:
    """Return CIFAR-10 as He et al. (2016, section 4.2) have it: normalised, mirrored and shifted in training.

    Images are channels last, and so are all feature maps after them: convolutions are a quarter faster so on a CPU.
    """
    mean = images.train.inputs.mean(dim=(0, 2, 3), keepdim=True)
    deviation = images.train.inputs.std(dim=(0, 2, 3), keepdim=True)
    train, validation = (
        Split(_channels_last((split.inputs - mean) / deviation), split.targets)
        for split in (images.train, images.validation)
    )

    def draw(sizes: Iterator[int], seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for inputs, targets in data.draw(train, sizes, seed):
            yield _channels_last(data.mirror_and_shift(inputs, 4, generator)), targets

    training, validated = _PHOTOGRAPHS
    return Examples(draw, len(train), train.first(training), validation.first(validated), images.classes)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def read_noisy(images: ImageData, deviation: float) -> Examples:
    """Return images with normal noise of that standard deviation, which is new in each batch, and those without it."""

    def noisy(clean: Tensor, generator: torch.Generator) -> Tensor:
        return clean + deviation * torch.randn(clean.shape, generator=generator)

    def draw(sizes: Iterator[int], seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for clean, _ in data.draw(images.train, sizes, seed):
            yield noisy(clean, generator), clean

    generator = torch.Generator().manual_seed(0)
    training, validation = (
        Split(noisy(clean, generator), clean)
        for clean in (split.inputs[:_NOISY] for split in (images.train, images.validation))
    )
    return Examples(draw, len(images.train), training, validation, outputs=1)


def teach(scales: Tensor) -> Examples:
    """Return random inputs, and what a random two-layer network makes of them, each output multiplied by its scale."""
    generator = torch.Generator().manual_seed(0)
    inputs, hidden = 20, 50

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    first, second = normal(inputs, hidden) / inputs**0.5, normal(hidden, len(scales)) / hidden**0.5
    points = normal(_TAUGHT + _READ, inputs)
    targets = (2 * points @ first).tanh() @ second * scales
    train, validation = Split(points[:_TAUGHT], targets[:_TAUGHT]), Split(points[_TAUGHT:], targets[_TAUGHT:])
    return Examples(
        draw=lambda sizes, seed: data.draw(train, sizes, seed),
        count=_TAUGHT,
        training=train.first(_READ),
        validation=validation,
        outputs=len(scales),
        whole=train,
    )


def read_text(text: TextData, length: int) -> Examples:
    """Return passages of ``length`` characters and, at each position, the character that follows."""
    training, validation = (
        Split(*next(data.windows(part, [_PASSAGES], length, seed=0))) for part in (text.train, text.validation)
    )
    return Examples(
        draw=lambda sizes, seed: data.windows(text.train, sizes, length, seed),
        count=len(text.train) - length,
        training=training,
        validation=validation,
        outputs=text.vocabulary,
    )
