"""Large models as lists of layer shapes, for plans on paper: nothing is built, so any size costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kfac_optim import Cholesky, Inverse, LayerSpec, Structure
from kfac_optim.distributed import Covered, Uncovered
from kfac_optim.specs import BlockDiagonal, Kept

Model = list[Covered | Uncovered]
MAX_FACTOR_DIM = 8192  # wider factors are diagonal: the optimizer's default


def resnet50(images: int = 32) -> Model:
    """Return ResNet-50 (He et al. 2016) as torchvision has it, 224 × 224 pixels, a batch of ``images`` on each rank."""
    model: Model = []

    def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> None:
        model.append(_dense(f"{name}.conv", inputs * kernel**2, outputs, images * side**2))
        model.append(_norm(f"{name}.bn", outputs))

    convolution("stem", 3, 64, 7, 112)
    inputs = 64
    for stage, (width, blocks, side) in enumerate(((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)), 1):
        for block in range(blocks):
            name, first = f"layer{stage}.{block}", block == 0
            reading = side * 2 if first and stage > 1 else side  # the 3 × 3 convolution has the stride
            convolution(f"{name}.1", inputs, width, 1, reading)
            convolution(f"{name}.2", width, width, 3, side)
            convolution(f"{name}.3", width, 4 * width, 1, side)
            if first:
                convolution(f"{name}.downsample", inputs, 4 * width, 1, side)
            inputs = 4 * width
    model.append(_dense("fc", inputs, 1000, images, bias=True))
    return model


def bert_large(tokens: int = 8 * 512) -> Model:
    """Return BERT-Large (Devlin et al. 2019): embeddings, 24 layers and the pooler, ``tokens`` on each rank."""
    width = 1024
    model: Model = [
        _embedding(f"embeddings.{n}", r, width) for n, r in (("word", 30522), ("position", 512), ("type", 2))
    ]
    model.append(_norm("embeddings.norm", width))
    for layer in range(24):
        name = f"layer.{layer}"
        model += [
            _dense(f"{name}.{part}", width, width, tokens, bias=True) for part in ("query", "key", "value", "output")
        ]
        model.append(_norm(f"{name}.norm1", width))
        model.append(_dense(f"{name}.up", width, 4 * width, tokens, bias=True))
        model.append(_dense(f"{name}.down", 4 * width, width, tokens, bias=True))
        model.append(_norm(f"{name}.norm2", width))
    model.append(_dense("pooler", width, width, tokens // 512, bias=True))
    return model


def transformer_7b(tokens: int = 4096) -> Model:
    """Return Llama 2 7B (Touvron et al. 2023), ``tokens`` on each rank."""
    width, hidden, vocabulary = 4096, 11008, 32000
    model: Model = [_embedding("embed", vocabulary, width)]
    for layer in range(32):
        name = f"layer.{layer}"
        model.append(_norm(f"{name}.norm1", width, bias=False))
        model += [_dense(f"{name}.{part}", width, width, tokens) for part in ("q", "k", "v", "o")]
        model.append(_norm(f"{name}.norm2", width, bias=False))
        model += [_dense(f"{name}.{part}", width, hidden, tokens) for part in ("gate", "up")]
        model.append(_dense(f"{name}.down", hidden, width, tokens))
    model.append(_norm("norm", width, bias=False))
    model.append(_dense("head", width, vocabulary, tokens))
    return model


def keeping(model: Sequence[Covered | Uncovered], widest: int, kept: Kept) -> Model:
    """Return ``model`` with factors that are wider than ``widest`` kept as ``kept``, others dense.

    Of a layer with two such factors and ``BlockDiagonal`` the wider one is cut, the other diagonal.
    """
    changed: Model = []
    for each in model:
        if isinstance(each, Covered) and each.spec.groups == 1:
            dims = (each.spec.in_dim, each.spec.out_dim)
            own = [kept if dim > widest else Structure.DENSE for dim in dims]
            if all(isinstance(side, BlockDiagonal) for side in own):
                own[dims.index(min(dims))] = Structure.DIAGONAL
            if each.rows == 0:  # an embedding, whose inputs are diagonal whatever is wished for
                own[0] = Structure.DIAGONAL
            each = replace(each, spec=replace(each.spec, structure=(own[0], own[1])))
        changed.append(each)
    return changed


def with_inverse(model: Sequence[Covered | Uncovered], inverse: Inverse[Any]) -> Model:
    """Return ``model`` with another representation of all its layers."""
    return [replace(each, inverse=inverse) if isinstance(each, Covered) else each for each in model]


def _dense(name: str, inputs: int, outputs: int, rows: int, *, bias: bool = False) -> Covered:
    params = ("weight", "bias") if bias else ("weight",)
    a, g = (Structure.DENSE if dim <= MAX_FACTOR_DIM else Structure.DIAGONAL for dim in (inputs + bias, outputs))
    return Covered(LayerSpec(name, params, inputs + bias, outputs, structure=(a, g)), Cholesky(), rows)


def _norm(name: str, features: int, *, bias: bool = True) -> Covered:
    params = ("weight", "bias") if bias else ("weight",)
    structure = (Structure.IDENTITY, Structure.DENSE)
    return Covered(LayerSpec(name, params, 1, len(params), groups=features, structure=structure), Cholesky())


def _embedding(name: str, rows: int, width: int) -> Covered:
    structure = (Structure.DIAGONAL, Structure.DENSE)
    return Covered(LayerSpec(name, ("weight",), rows, width, structure=structure), Cholesky())
