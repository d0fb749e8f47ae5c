"""The problems that optimizers are compared on. All is fixed here, but for what an optimizer's search space names."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import data
from benchmarks.curves import curves
from benchmarks.examples import Examples, read_images, read_noisy, read_photographs, read_pixels, read_text, teach
from benchmarks.models import (
    Autoencoder,
    CharacterLSTM,
    CharacterTransformer,
    PlainCNN,
    ResNet20,
    UNet,
    VisionTransformer,
    mlp,
    sparse_autoencoder,
)
from benchmarks.problem import Aim, Decay, FixedBatch, GrowingBatch, Problem
from benchmarks.workloads import next_character_loss, reconstruction_loss
from kfac_optim import LossTerms, MonteCarlo

_CONTEXT = 64  # characters


def error_rate(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the part of the examples ``[batch, classes]`` that are classified wrongly."""
    return (logits.argmax(-1) != labels).float().mean()


def bits_per_character(logits: Tensor, targets: Tensor) -> Tensor:
    return next_character_loss(logits, targets) / math.log(2)


def relative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error over the mean square of the target, mean over the outputs of ``[batch, outputs]``."""
    return ((outputs - targets).square().mean(0) / targets.square().mean(0)).mean()


def _mnist_pixels(folder: Path | None) -> Examples:
    images = data.mnist(folder)
    return read_pixels(images.train.inputs, images.validation.inputs)


_CROSS_ENTROPY = MonteCarlo(nn.CrossEntropyLoss())
PIXELS = MonteCarlo(nn.BCEWithLogitsLoss(), loss_terms=LossTerms.EXAMPLES)
_CHARACTERS = MonteCarlo(nn.CrossEntropyLoss(), class_dim=-1)
_NATS = ("nats", "nats")
_ERRORS = ("nats", "error rate")
L2 = 1e-5  # Martens & Grosse (2015), section 13
TANH_SCALE = 0.5  # of sparse initial weights, which are for logistic units: tanh(x) = 2σ(2x) - 1

_MNIST_A = Problem(
    title="MNIST autoencoder 784-1000-500-250-30 and mirrored, logistic units, sparse initialisation",
    folder="mnist",
    load=_mnist_pixels,
    model=lambda pixels: sparse_autoencoder((pixels, 1000, 500, 250, 30), nn.Sigmoid, scale=1.0),
    small_model=lambda pixels: sparse_autoencoder((pixels, 20, 8), nn.Sigmoid, scale=1.0),
    loss=reconstruction_loss,
    score=reconstruction_loss,
    units=_NATS,
    named_loss=PIXELS,
    batch=FixedBatch(1000),
    steps=600,
    period=10,
    aim=Aim.TRAINING,
    terms=784,
    weight_decay=L2,
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
    load=lambda folder: read_text(data.tinyshakespeare(folder), _CONTEXT),
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
        model=lambda pixels: sparse_autoencoder((pixels, 400, 200, 100, 50, 25, 6), nn.Tanh, scale=TANH_SCALE),
        small_model=lambda pixels: sparse_autoencoder((pixels, 20, 6), nn.Tanh, scale=TANH_SCALE),
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
    "unet": Problem(
        title="MNIST denoising, U-Net of 2 levels with GroupNorm",
        folder="mnist",
        load=lambda folder: read_noisy(data.mnist(folder), deviation=0.5),
        model=lambda channels: UNet(channels),
        small_model=lambda channels: UNet(channels, width=4),
        loss=F.mse_loss,
        score=F.mse_loss,
        units=("squared error", "squared error"),
        named_loss=MonteCarlo(nn.MSELoss()),
        loss_terms=LossTerms.ELEMENTS,
        batch=FixedBatch(128),
        steps=468,  # an epoch
        period=18,
        aim=Aim.VALIDATION,
        decay=Decay.COSINE,
    ),
    "vit": replace(
        _RESNET,
        title="CIFAR-10, vision transformer of 4 layers and width 96",
        model=VisionTransformer,
        small_model=lambda classes: VisionTransformer(classes, width=8, heads=2, layers=1),
    ),
    "scales": Problem(
        title="regression on a random network, 8 outputs of sizes 0.03 to 30, 3 hidden layers of 64 tanh units",
        folder=None,
        load=lambda _: teach(torch.logspace(-1.5, 1.5, 8)),
        model=lambda outputs: mlp((20, 64, 64, 64, outputs), nn.Tanh),
        small_model=lambda outputs: mlp((20, 8, 8, outputs), nn.Tanh),
        loss=F.mse_loss,
        score=relative_error,
        units=("squared error", "relative squared error"),
        named_loss=MonteCarlo(nn.MSELoss()),
        loss_terms=LossTerms.ELEMENTS,
        batch=FixedBatch(256),
        steps=1000,
        period=20,
        aim=Aim.TRAINING,
        full_batch_steps=200,
    ),
}
