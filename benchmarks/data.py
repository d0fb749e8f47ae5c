"""Real data as plain tensors: scikit-learn's digits, MNIST, CIFAR-10 and tinyshakespeare.

All but digits are read through ``datasets``: by their hub name, or without a network from a folder, of images in the
hub's layout (``train-*.parquet`` and ``test-*.parquet``), of text as ``input.txt``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor


class DataError(ValueError):
    """The data asked for cannot be read; the message says what, where, got and remedy."""


@dataclass(frozen=True, slots=True)
class Split:
    inputs: Tensor  # [examples, ...]; of images [examples, channels, height, width], float32
    targets: Tensor  # [examples, ...]; of labels [examples], int64

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class ImageData:
    train: Split
    validation: Split
    classes: int


@dataclass(frozen=True, slots=True)
class _HubDataset:
    name: str  # on the Hugging Face hub
    image_column: str
    image_mode: str  # Pillow's name: L is grey, RGB is colour


_HUB_DATASETS = {
    "mnist": _HubDataset("ylecun/mnist", "image", "L"),
    "cifar10": _HubDataset("uoft-cs/cifar10", "img", "RGB"),
}
_CLASSES = 10  # in each of the three datasets


def digits() -> ImageData:
    """1,797 images of 8 × 8 pixels in [0, 1], split 1,437 to 360 by a fixed permutation."""
    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0  # the file counts ink from 0 to 16
    labels = torch.from_numpy(classes).long()
    # The file is not in random order: without the permutation its tail would be a validation set of another kind.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1437], order[1437:]
    return ImageData(Split(images[train], labels[train]), Split(images[validation], labels[validation]), _CLASSES)


def mnist(data_dir: Path | None = None) -> ImageData:
    """60,000 training and 10,000 test images of 28 × 28 grey pixels in [0, 1]."""
    return _load("mnist", data_dir)


def cifar10(data_dir: Path | None = None) -> ImageData:
    """50,000 training and 10,000 test images of 3 × 32 × 32 colour pixels in [0, 1]."""
    return _load("cifar10", data_dir)


@dataclass(frozen=True, slots=True)
class TextData:
    """Characters as numbers, ``[length]`` int64: the first nine tenths to train on, the rest to validate."""

    train: Tensor
    validation: Tensor
    vocabulary: int


def tinyshakespeare(data_dir: Path | None = None) -> TextData:
    """1,115,394 characters of Shakespeare's plays, 65 different ones."""
    if data_dir is None:
        # The dataset's own form is a script; the hub keeps a converted copy.
        splits = _from_hub("karpathy/tiny_shakespeare", "its input.txt", revision="refs/convert/parquet")
        text = "".join(splits[name]["text"][0] for name in ("train", "validation", "test"))
    else:
        file = data_dir / "input.txt"
        if not file.is_file():
            raise DataError(f"--data-dir: no file {str(file)!r}; pass the folder of tinyshakespeare's input.txt")
        text = datasets.load_dataset("text", data_files=str(file), sample_by="document")["train"]["text"][0]
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    numbers = torch.tensor([number[character] for character in text])
    train = len(numbers) * 9 // 10
    return TextData(numbers[:train], numbers[train:], len(characters))


def windows(text: Tensor, batch_size: int, length: int, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of random passages ``[batch, length]`` and of the characters that follow each position."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        passages = text[starts + torch.arange(length + 1)]
        yield passages[:, :-1], passages[:, 1:]


def batches(split: Split, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled mini-batches of ``epochs`` passes; one seed always gives the same batches in the same order.

    The incomplete last batch of a pass is left out, so that every step sees equally many examples.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(split), generator=generator)
        for batch in torch.split(order, batch_size)[: len(split) // batch_size]:
            yield split.inputs[batch], split.targets[batch]


def _load(key: str, data_dir: Path | None) -> ImageData:
    source = _HUB_DATASETS[key]
    if data_dir is None:
        loaded = _from_hub(source.name, "its train-*.parquet and test-*.parquet files")
    else:
        loaded = datasets.load_dataset("parquet", data_files=_parquet_files(data_dir))
    train, test = (_decode(loaded[name], source, data_dir) for name in ("train", "test"))
    return ImageData(train, test, _CLASSES)


def _from_hub(name: str, files: str, revision: str | None = None) -> Any:
    try:
        return datasets.load_dataset(name, revision=revision)
    except (OSError, datasets.exceptions.DatasetNotFoundError) as error:  # no network, or no such name
        raise DataError(
            f"cannot download {name} from the Hugging Face hub: {error}. "
            f"Offline, pass --data-dir with a folder of {files}"
        ) from error


def _parquet_files(data_dir: Path) -> dict[str, list[str]]:
    if not data_dir.is_dir():
        raise DataError(f"--data-dir: no folder {str(data_dir)!r}; pass the folder that holds the parquet files")
    files = {name: sorted(map(str, data_dir.glob(f"{name}-*.parquet"))) for name in ("train", "test")}
    for name, found in files.items():
        if not found:
            held = ", ".join(sorted(path.name for path in data_dir.iterdir())[:5]) or "nothing"
            raise DataError(
                f"--data-dir: {str(data_dir)!r} has no {name}-*.parquet; it holds {held}. "
                f"Pass a folder in the hub's layout, with train-*.parquet and test-*.parquet"
            )
    return files


def _decode(rows: datasets.Dataset, source: _HubDataset, data_dir: Path | None) -> Split:
    if not {source.image_column, "label"} <= set(rows.column_names):
        raise DataError(
            f"{data_dir or source.name}: expected the columns {source.image_column!r} and 'label' of {source.name}, "
            f"got {rows.column_names}; is this another dataset's folder?"
        )
    # The encoded bytes: the library's own decoding makes one Python object per row and takes several times as long.
    encoded = rows.cast_column(source.image_column, datasets.Image(decode=False)).with_format("arrow")
    table = encoded[:]
    images = np.stack(
        [
            np.asarray(Image.open(io.BytesIO(image["bytes"])).convert(source.image_mode))
            for image in table[source.image_column].to_pylist()
        ]
    )
    pixels = torch.from_numpy(images).float() / 255.0
    # [examples, height, width] or [examples, height, width, channels] → [examples, channels, height, width]
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Split(pixels, torch.from_numpy(table["label"].to_numpy().copy()).long())
