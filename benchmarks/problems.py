"""What optimizers are compared on: data, model, loss, batches, steps, and the measure that they race for.

All is fixed here, but for what an optimizer's search space names. Training measures are read off on the first 5,000
training examples, validation measures on as many of the validation split; of text on 1,024 fixed passages each, of
CIFAR-10 on 1,000 and 2,000 images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import data
from benchmarks.curves import curves
from benchmarks.data import ImageData, Split, TextData
from benchmarks.models import (
    Autoencoder,
    CharacterLSTM,
    CharacterTransformer,
    PlainCNN,
    ResNet20,
    initialise_sparsely,
    mlp,
)
from benchmarks.training import LossFunction
from benchmarks.workloads import next_character_loss, reconstruction_loss
from kfac_optim import Estimate, LossTerms, MonteCarlo

_READ = 5000  # examples on which a measure is read off
_PASSAGES = 1024  # the same for text
_PHOTOGRAPHS = 1000, 2000  # for training and validation: with 5000 each, reading takes as long as training
_QUICK_READ = 128
_CONTEXT = 64  # characters

Batch = tuple[Tensor, Tensor]
"""``(inputs [batch, ...], targets)``."""


class Aim(Enum):
    """Which measure a target is set for. Both are means, and the lower the better."""

    TRAINING = "training"
    VALIDATION = "validation"


class Decay(Enum):
    """Of the learning rate over a run, of all optimizers alike."""

    NONE = "none"
    COSINE = "cosine"
    """To zero at the last step. How many steps that are is then part of every search space, as ``horizon``."""

    def factor(self, part: float) -> float:
        """Of the learning rate after ``part`` of the run, in [0, 1]."""
        return 1.0 if self is Decay.NONE else 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True, slots=True)
class FixedBatch:
    size: int

    @property
    def first(self) -> int:
        return self.size

    def sizes(self, examples: int) -> Iterator[int]:
        return itertools.repeat(self.size)

    def __str__(self) -> str:
        return str(self.size)


@dataclass(frozen=True, slots=True)
class GrowingBatch:
    """From ``first`` to all examples in ``steps`` steps, exponentially (Martens & Grosse 2015, section 13)."""

    first: int
    steps: int

    def sizes(self, examples: int) -> Iterator[int]:
        for step in itertools.count():
            grown = self.first * (examples / self.first) ** (step / (self.steps - 1))
            yield min(round(grown), examples)

    def __str__(self) -> str:
        return f"{self.first}, growing to all in {self.steps} steps"


@dataclass(frozen=True, slots=True)
class Examples:
    """The data of a problem.

    Attributes:
        draw: ``(batch sizes, seed) → batches`` without end; one seed always gives the same.
        count: how many examples there are to draw from.
        training: on which the training measure is read off.
        validation: on which the validation measure is read off.
        outputs: of the model: classes, characters or pixels.
        whole: all training examples as one batch, where that is possible.
    """

    draw: Callable[[Iterator[int], int], Iterator[Batch]]
    count: int
    training: Split
    validation: Split
    outputs: int
    whole: Split | None = None

    def quick(self) -> Examples:
        """The same with fewer to measure on."""
        return replace(self, training=self.training.first(_QUICK_READ), validation=self.validation.first(_QUICK_READ))


@dataclass(frozen=True, slots=True)
class Problem:
    """What to train, and how it is measured.

    Attributes:
        title: what it is, in words.
        folder: the name of its data's folder under ``--data-dir``; None where it reads none.
        load: ``(folder or None) → examples``.
        model: ``(outputs) → network``, initialised.
        small_model: a small one of the same kind, for ``--quick`` and the tests.
        loss: trained on, and the training measure; ``terms`` terms for each example and position are summed in it.
        score: the validation measure.
        units: of the two measures, in words, ``(training, validation)``.
        loss_terms: what the loss's mean runs over.
        named_loss: K-FAC's estimate that knows which loss it is.
        batch: examples in each step.
        steps: of a run.
        period: steps between two readings.
        aim: which measure the target is set for.
        floor: no target is set below it.
        decay: of the learning rate.
        weight_decay: of every optimizer that is not to tune its own.
        tunes_weight_decay: whether it is part of the search spaces.
        full_batch_steps: of an optimizer that needs all training examples in every step; None where they are too many.
    """

    title: str
    folder: str | None
    load: Callable[[Path | None], Examples]
    model: Callable[[int], nn.Module]
    small_model: Callable[[int], nn.Module]
    loss: LossFunction
    score: LossFunction
    units: tuple[str, str]
    named_loss: Estimate
    batch: FixedBatch | GrowingBatch
    steps: int
    period: int
    aim: Aim
    floor: float = 0.0
    loss_terms: LossTerms = LossTerms.EXAMPLES
    terms: int = 1
    decay: Decay = Decay.NONE
    weight_decay: float = 0.0
    tunes_weight_decay: bool = False
    full_batch_steps: int | None = None

    def lasting(self, steps: int) -> Problem:
        """The same with so many steps in a run, and at least one reading."""
        return replace(self, steps=steps, period=min(self.period, steps))

    def quick(self) -> Problem:
        """The same with a small model and few steps: shows that it runs."""
        full_batch_steps = None if self.full_batch_steps is None else 4
        return replace(
            self,
            title=f"{self.title}, made small",
            model=self.small_model,
            batch=FixedBatch(32),
            steps=20,
            period=5,
            full_batch_steps=full_batch_steps,
        )


def error_rate(logits: Tensor, labels: Tensor) -> Tensor:
    """Part of the examples ``[batch, classes]`` that are classified wrongly."""
    return (logits.argmax(-1) != labels).float().mean()


def bits_per_character(logits: Tensor, targets: Tensor) -> Tensor:
    return next_character_loss(logits, targets) / math.log(2)


def read_images(images: ImageData) -> Examples:
    """Images and their classes."""
    return Examples(
        draw=lambda sizes, seed: data.draw(images.train, sizes, seed),
        count=len(images.train),
        training=images.train.first(_READ),
        validation=images.validation.first(_READ),
        outputs=images.classes,
        whole=images.train,
    )


def read_pixels(train: Tensor, validation: Tensor) -> Examples:
    """Images ``[examples, ...]`` and themselves as ``[examples, pixels]``."""
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
    """CIFAR-10 as He et al. (2016, section 4.2) have it: normalised, in training mirrored and shifted at random.

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


def read_text(text: TextData) -> Examples:
    """Passages and, at each position, the character that follows."""
    training, validation = (
        Split(*next(data.windows(part, [_PASSAGES], _CONTEXT, seed=0))) for part in (text.train, text.validation)
    )
    return Examples(
        draw=lambda sizes, seed: data.windows(text.train, sizes, _CONTEXT, seed),
        count=len(text.train) - _CONTEXT,
        training=training,
        validation=validation,
        outputs=text.vocabulary,
    )


def _mnist_pixels(folder: Path | None) -> Examples:
    images = data.mnist(folder)
    return read_pixels(images.train.inputs, images.validation.inputs)


def _sparse_autoencoder(
    widths: tuple[int, ...], activation: type[nn.Module], scale: float
) -> Callable[[int], nn.Module]:
    def make(pixels: int) -> nn.Module:
        model = Autoencoder((pixels, *widths), activation)
        initialise_sparsely(model, scale=scale)
        return model

    return make


_CROSS_ENTROPY = MonteCarlo(nn.CrossEntropyLoss())
_PIXELS = MonteCarlo(nn.BCEWithLogitsLoss(), loss_terms=LossTerms.EXAMPLES)
_CHARACTERS = MonteCarlo(nn.CrossEntropyLoss(), class_dim=-1)
_NATS = ("nats", "nats")
_ERRORS = ("nats", "error rate")
_L2 = 1e-5  # Martens & Grosse (2015), section 13

_MNIST_A = Problem(
    title="MNIST autoencoder 784-1000-500-250-30 and mirrored, logistic units, sparse initialisation",
    folder="mnist",
    load=_mnist_pixels,
    model=_sparse_autoencoder((1000, 500, 250, 30), nn.Sigmoid, scale=1.0),
    small_model=_sparse_autoencoder((20, 8), nn.Sigmoid, scale=1.0),
    loss=reconstruction_loss,
    score=reconstruction_loss,
    units=_NATS,
    named_loss=_PIXELS,
    batch=FixedBatch(1000),
    steps=600,
    period=10,
    aim=Aim.TRAINING,
    terms=784,
    weight_decay=_L2,
    full_batch_steps=60,
)
_RESNET = Problem(
    title="CIFAR-10, ResNet-20 with BatchNorm",
    folder="cifar10",
    load=lambda folder: read_photographs(data.cifar10(folder)),
    model=lambda classes: ResNet20(classes),
    small_model=lambda classes: ResNet20(classes, blocks=1),
    loss=F.cross_entropy,
    score=error_rate,
    units=_ERRORS,
    named_loss=_CROSS_ENTROPY,
    batch=FixedBatch(128),
    steps=1560,  # 4 epochs
    period=30,
    aim=Aim.VALIDATION,
    decay=Decay.COSINE,
    weight_decay=1e-4,  # of He et al. (2016)
    tunes_weight_decay=True,
)
_TRANSFORMER = Problem(
    title="tinyshakespeare, character transformer of 2 layers and width 128",
    folder="tinyshakespeare",
    load=lambda folder: read_text(data.tinyshakespeare(folder)),
    model=lambda characters: CharacterTransformer(characters, _CONTEXT, width=128, heads=4, layers=2),
    small_model=lambda characters: CharacterTransformer(characters, _CONTEXT, width=8, heads=2, layers=1),
    loss=next_character_loss,
    score=bits_per_character,
    units=("nats", "bits per character"),
    named_loss=_CHARACTERS,
    loss_terms=LossTerms.POSITIONS,
    batch=FixedBatch(32),
    steps=1000,
    period=25,
    aim=Aim.VALIDATION,
    decay=Decay.COSINE,
)
_DIGITS = Problem(
    title="digits, 8 hidden layers of 64 tanh units",
    folder=None,
    load=lambda _: read_images(data.digits()),
    model=lambda classes: mlp((64, *[64] * 8, classes), nn.Tanh),
    small_model=lambda classes: mlp((64, 8, 8, classes), nn.Tanh),
    loss=F.cross_entropy,
    score=error_rate,
    units=_ERRORS,
    named_loss=_CROSS_ENTROPY,
    batch=FixedBatch(128),
    steps=550,  # 50 epochs
    period=5,
    aim=Aim.TRAINING,
    floor=0.01,  # far below it, optimizers race for how certain the network is of images that it knows by heart
    full_batch_steps=550,
)

PROBLEMS = {
    "digits": _DIGITS,
    "mnist-a": _MNIST_A,
    "mnist-a-growing": replace(
        _MNIST_A,
        title=f"{_MNIST_A.title}, growing batches",
        batch=GrowingBatch(first=1000, steps=500),
        steps=500,
    ),
    "mnist-b": replace(
        _MNIST_A,
        title="MNIST autoencoder 784-1000-500-250-30 and mirrored, ReLU units, default initialisation",
        model=lambda pixels: Autoencoder((pixels, 1000, 500, 250, 30)),
        small_model=lambda pixels: Autoencoder((pixels, 20, 8)),
    ),
    "curves": replace(
        _MNIST_A,
        title="CURVES autoencoder 784-400-200-100-50-25-6 and mirrored, tanh units, sparse initialisation",
        folder=None,
        load=lambda _: read_pixels(curves(20_000, seed=0).inputs, curves(10_000, seed=1).inputs),
        model=_sparse_autoencoder((400, 200, 100, 50, 25, 6), nn.Tanh, scale=0.5),  # tanh(x) = 2σ(2x) - 1
        small_model=_sparse_autoencoder((20, 6), nn.Tanh, scale=0.5),
        full_batch_steps=100,
    ),
    "mnist-mlp": replace(
        _DIGITS,
        title="MNIST, 12 hidden layers of 64 tanh units",
        folder="mnist",
        load=lambda folder: read_images(data.mnist(folder)),
        model=lambda classes: mlp((784, *[64] * 12, classes), nn.Tanh),
        small_model=lambda classes: mlp((784, 8, 8, classes), nn.Tanh),
        batch=FixedBatch(512),
        steps=468,  # 4 epochs
        period=6,
        full_batch_steps=100,
    ),
    "resnet20": _RESNET,
    "resnet20-plain": replace(
        _RESNET,
        title="CIFAR-10, ResNet-20 without BatchNorm",
        model=lambda classes: ResNet20(classes, batch_norm=False),
        small_model=lambda classes: ResNet20(classes, batch_norm=False, blocks=1),
    ),
    "cnn": replace(
        _RESNET,
        title="CIFAR-10, plain CNN of 9 convolutions",
        model=lambda classes: PlainCNN(classes),
        small_model=lambda classes: PlainCNN(classes, widths=(4, 8), depth=1),
    ),
    "transformer": _TRANSFORMER,
    "lstm": replace(
        _TRANSFORMER,
        title="tinyshakespeare, character LSTM of 1 layer and width 128",
        model=lambda characters: CharacterLSTM(characters, width=128, layers=1),
        small_model=lambda characters: CharacterLSTM(characters, width=8, layers=1),
    ),
}
