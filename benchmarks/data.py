"""Real data as plain tensors: scikit-learn's digits, MNIST, CIFAR-10 and tinyshakespeare.

All but digits are read through ``datasets``: by their hub name, or without a network from a folder, of images in the
hub's layout (``train-*.parquet`` and ``test-*.parquet``), of text as ``input.txt``.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks.arguments import UsageError


class DataError(UsageError):
    """The data asked for cannot be read; the message says what, where, got and remedy."""


@dataclass(frozen=True, slots=True)
class Split:
    inputs: Tensor  # [examples, ...]; of images [examples, channels, height, width], float32
    targets: Tensor  # [examples, ...]; of labels [examples], int64

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, examples: int) -> Split:
        return Split(self.inputs[:examples], self.targets[:examples])


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
    """Read 1,797 images of 8 × 8 pixels in [0, 1], split 1,437 to 360 by a fixed permutation."""
    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16.0  # the file counts ink from 0 to 16
    labels = torch.from_numpy(classes).long()
    # The file is not in random order: without the permutation its tail would be a validation set of another kind.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1437], order[1437:]
    return ImageData(Split(images[train], labels[train]), Split(images[validation], labels[validation]), _CLASSES)


def mnist(data_dir: Path | None = None) -> ImageData:
    """Read 60,000 training and 10,000 test images of 28 × 28 grey pixels in [0, 1]."""
    return _load("mnist", data_dir)


def cifar10(data_dir: Path | None = None) -> ImageData:
    """Read 50,000 training and 10,000 test images of 3 × 32 × 32 colour pixels in [0, 1]."""
    return _load("cifar10", data_dir)


@dataclass(frozen=True, slots=True)
class TextData:
    """Holds characters as numbers, ``[length]`` int64: the first nine tenths to train on, the rest to validate."""

    train: Tensor
    validation: Tensor
    vocabulary: int


def tinyshakespeare(data_dir: Path | None = None) -> TextData:
    """Read 1,115,394 characters of Shakespeare's plays, 65 different ones."""
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


def windows(text: Tensor, sizes: Iterable[int], length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw random passages ``[size, length]`` for each of ``sizes``, and the characters that follow each position.

    One seed always gives the same passages in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        passages = text[starts + torch.arange(length + 1)]
        yield passages[:, :-1], passages[:, 1:]


def batches(split: Split, batch_size: int, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw shuffled mini-batches of ``epochs`` passes, each without its incomplete last batch; see `draw`."""
    return draw(split, itertools.repeat(batch_size, epochs * (len(split) // batch_size)), seed)


def draw(split: Split, sizes: Iterable[int], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw for each of ``sizes``, at most the length of ``split``, so many examples of the shuffled split.

    The split is shuffled again when fewer examples are left of a pass than are asked for; these are left out, so that
    no batch holds an example twice. One seed always gives the same batches in the same order.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for size in sizes:
        if size > len(order):
            order = torch.randperm(len(split), generator=generator)
        batch, order = order[:size], order[size:]
        yield split.inputs[batch], split.targets[batch]


def mirror_and_shift(images: Tensor, reach: int, generator: torch.Generator) -> Tensor:
    """Mirror each of ``[batch, channels, height, width]`` or not, then shift it by up to ``reach`` pixels each way.

    What comes in from outside is 0.
    """
    count, channels, height, width = images.shape
    mirrored = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    padded = F.pad(torch.where(mirrored, images.flip(-1), images), (reach, reach, reach, reach))
    down, right = torch.randint(2 * reach + 1, (2, count, 1), generator=generator)
    rows = (down + torch.arange(height)).view(count, 1, height, 1)
    columns = (right + torch.arange(width)).view(count, 1, 1, width)
    which, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[which, channel, rows, columns]


def _load(key: str, data_dir: Path | None) -> ImageData:
    train, test = (Split(pixels.float() / 255.0, labels) for pixels, labels in _decoded(key, data_dir))
    return ImageData(train, test, _CLASSES)


@functools.lru_cache(maxsize=1)  # of problems that follow each other on the same images, one decodes them
def _decoded(key: str, data_dir: Path | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return pixels ``[examples, channels, height, width]`` uint8 and labels, for training and for validation."""
    source = _HUB_DATASETS[key]
    if data_dir is None:
        loaded = _from_hub(source.name, "its train-*.parquet and test-*.parquet files")
    else:
        loaded = datasets.load_dataset("parquet", data_files=_parquet_files(data_dir))
    return tuple(_decode(loaded[name], source, data_dir) for name in ("train", "test"))


def _from_hub(name: str, files: str, revision: str | None = None) -> Any:
    try:  # once: `datasets` would ask again and again for half a minute
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except Exception:  # each version of the hub's client has errors of its own
        datasets.config.HF_HUB_OFFLINE = True  # then only what was downloaded before is looked for
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


def _decode(rows: datasets.Dataset, source: _HubDataset, data_dir: Path | None) -> tuple[Tensor, Tensor]:
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
    pixels = torch.from_numpy(images)
    # [examples, height, width] or [examples, height, width, channels] → [examples, channels, height, width]
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(table["label"].to_numpy().copy()).long()
