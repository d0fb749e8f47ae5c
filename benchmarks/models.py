"""The networks of the benchmarks, with torch's default initialisation but where ``initialise_sparsely`` is called."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(widths: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Make a network that flattens ``[batch, ...]``: ``widths[0]`` inputs to ``widths[-1]`` outputs, not normalised."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


class Autoencoder(nn.Module):
    """Encodes and decodes pixels, fully connected (Hinton & Salakhutdinov 2006): a linear code, logits out.

    The decoder mirrors the encoder: ``widths`` runs from the pixels to the code. Units are those of ``activation``;
    in the paper they are logistic.
    """

    def __init__(
        self, widths: Sequence[int] = (784, 1000, 500, 250, 30), activation: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        self.encoder = mlp(widths, activation)
        self.decoder = mlp(widths[::-1], activation)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, ...]`` pixels to ``[batch, widths[0]]`` logits of the pixels."""
        logits: Tensor = self.decoder(self.encoder(images))
        return logits


@torch.no_grad()
def initialise_sparsely(model: nn.Module, inputs: int = 15, scale: float = 1.0) -> None:
    """Initialise sparsely (Martens 2010, section 5): each unit of a linear layer gets ``inputs`` weights.

    They are normal with standard deviation ``scale``, at random places; all other weights and the biases are 0. However
    wide the layer below, what reaches a unit then has the same spread, and units differ much in what they see.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            kept = min(inputs, layer.in_features)
            places = torch.rand_like(layer.weight).topk(kept, dim=1).indices  # [out, kept]
            layer.weight.zero_().scatter_(1, places, scale * torch.randn(layer.out_features, kept))
            layer.bias.zero_()


def sparse_autoencoder(widths: Sequence[int], activation: type[nn.Module], scale: float) -> Autoencoder:
    """Make an autoencoder whose first weights are sparse, of standard deviation ``scale``."""
    model = Autoencoder(widths, activation)
    initialise_sparsely(model, scale=scale)
    return model


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool) -> None:
        super().__init__()

        def normalisation() -> nn.Module:
            return nn.BatchNorm2d(outputs) if batch_norm else nn.Identity()

        # A normalisation right after a convolution makes its bias idle.
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not batch_norm)
        self.norm1 = normalisation()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=not batch_norm)
        self.norm2 = normalisation()
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        # Option A of the paper: subsample, and fill the new channels with zeros; no parameters.
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(residual + shortcut)


class ResNet20(nn.Module):
    """Classifies images of CIFAR by 20 layers (He et al. 2016, arXiv 1512.03385, section 4.2), option A shortcuts."""

    def __init__(self, classes: int = 10, batch_norm: bool = True, blocks: int = 3) -> None:
        """Make ``blocks`` residual blocks in each of the three stages; 3 make 20 layers."""
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=not batch_norm)
        self.norm = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        stages = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        self.blocks = nn.Sequential(
            *(
                _ResidualBlock(inputs if first else outputs, outputs, stride if first else 1, batch_norm)
                for inputs, outputs, stride in stages
                for first in (True, *[False] * (blocks - 1))
            )
        )
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 3, height, width]`` to ``[batch, classes]`` logits."""
        features = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class PlainCNN(nn.Sequential):
    """Classifies by 3 × 3 convolutions with biases and ReLU, no shortcuts or normalisation: ``depth`` for each width.

    The first of each width but the first has stride 2; the mean over all places goes to a linear output layer.
    """

    def __init__(self, classes: int = 10, widths: Sequence[int] = (32, 64, 128), depth: int = 3) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise((3, *widths)):
            for inner in range(depth):
                stride = 2 if layers and inner == 0 else 1
                layers += [nn.Conv2d(outputs if inner else inputs, outputs, 3, stride, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class UNet(nn.Module):
    """Denoises images (Ronneberger et al. 2015): two levels of convolutions with GroupNorm, and one below them.

    Each level passes its feature map over to the same level of the way up.
    """

    def __init__(self, channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self._level(channels, width), self._level(width, 2 * width)
        self.bottom = self._level(2 * width, 4 * width)
        self.widen2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = self._level(4 * width, 2 * width)
        self.widen1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up1 = self._level(2 * width, width)
        self.head = nn.Conv2d(width, channels, 1)

    @staticmethod
    def _level(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, channels, height, width]``, sides that 4 divides, to the noiseless images of that shape."""
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        up = self.widen2(self.bottom(F.max_pool2d(second, 2)))
        up = self.widen1(self.up2(torch.cat([second, up], 1)))
        clean: Tensor = self.head(self.up1(torch.cat([first, up], 1)))
        return clean


class VisionTransformer(nn.Module):
    """Classifies images by torch's own encoder layers over patches (Dosovitskiy et al. 2021), the mean of all read."""

    def __init__(self, classes: int, width: int = 96, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(8 * 8, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 3, height, width]``, sides of 32 or less, to ``[batch, classes]`` logits."""
        x = self.patches(images).flatten(2).mT
        x = x + self.positions[: x.shape[1]]
        logits: Tensor = self.head(self.encoder(x).mean(1))
        return logits


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return option B of the paper: a projection where the shape changes."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Sequential):
    """Classifies images of ImageNet by 18 layers (He et al. 2016): ``[batch, 3, height, width]`` to logits."""

    def __init__(self, classes: int = 1000) -> None:
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        super().__init__(
            *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(_BasicBlock(inputs, outputs, outputs // inputs) for inputs, outputs in itertools.pairwise(widths)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)),
        )


class ResNet50(nn.Module):
    """Classifies images of ImageNet by 50 layers (He et al. 2016), with the stride in the 3 × 3 convolutions.

    ``width`` is that of the first stage, ``blocks`` are those of each stage: smaller ones are for tests.
    """

    def __init__(self, classes: int = 1000, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stages.append(_Bottleneck(inputs, width << stage, 2 if stage > 0 and block == 0 else 1))
                inputs = 4 * (width << stage)
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``[batch, 3, height, width]`` to ``[batch, classes]`` logits."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images)), inplace=True), 3, 2, 1)
        logits: Tensor = self.head(self.stages(x).mean(dim=(2, 3)))
        return logits


class CharacterTransformer(nn.Module):
    """Models language causally, by torch's own encoder layers (pre-norm)."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, context]`` int64 to ``[batch, context, vocabulary]`` logits of each next token."""
        x = self.tokens(tokens) + self.positions
        logits: Tensor = self.head(self.encoder(x, mask=self.mask, is_causal=True))
        return logits


class CharacterLSTM(nn.Module):
    """Models language by one embedding, ``layers`` LSTM layers and a linear output layer."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, tokens]`` int64 to ``[batch, tokens, vocabulary]`` logits of each next token."""
        logits: Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return logits


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            OrderedDict(up=nn.Linear(width, hidden), activation=nn.GELU(), down=nn.Linear(hidden, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (  # [batch, heads, tokens, width / heads]
            projection(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        refined: Tensor = self.feedforward(self.norm2(x))
        return x + refined


class Transformer(nn.Module):
    """Models language by a pre-norm decoder; q, k, v and out are four linear layers.

    ``tied`` has the output layer share the matrix of the token embedding, without a bias, as GPT-2 does.
    """

    def __init__(
        self,
        vocabulary: int = 65,
        context: int = 128,
        width: int = 256,
        hidden: int = 1024,
        heads: int = 4,
        layers: int = 4,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(context, width))
        self.blocks = nn.Sequential(*(_TransformerBlock(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            nn.init.normal_(self.tokens.weight, std=width**-0.5)  # so that logits begin near 1
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``[batch, tokens]`` int64 to ``[batch, tokens, vocabulary]`` logits of each next token."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
