"""Real data arrive as plain tensors, from a dependency or from a folder in the hub's layout."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from PIL import Image
from torch import Tensor

from benchmarks import data
from benchmarks.data import DataError, Split


def encoded(value: int | tuple[int, int, int]) -> dict[str, object]:
    """A 28 × 28 image of one shade of grey, or a 32 × 32 one of one colour, as the hub stores it."""
    buffer = io.BytesIO()
    image = Image.new("L", (28, 28), value) if isinstance(value, int) else Image.new("RGB", (32, 32), value)
    image.save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write_parquet(folder: Path, name: str, shades: list[int], column: str = "image") -> None:
    rows = {column: [encoded(shade) for shade in shades], "label": [shade % 10 for shade in shades]}
    Dataset.from_dict(rows).to_parquet(folder / f"{name}-00000-of-00001.parquet")


def test_digits_are_split_once_and_for_all() -> None:
    images = data.digits()
    assert images.train.inputs.shape == (1437, 1, 8, 8)
    assert images.validation.inputs.shape == (360, 1, 8, 8)
    assert images.train.inputs.min() == 0
    assert images.train.inputs.max() == 1
    assert torch.equal(images.train.targets, data.digits().train.targets)
    assert set(images.validation.targets.tolist()) == set(range(10))


def test_mnist_is_read_from_a_folder_in_the_hubs_layout(tmp_path: Path) -> None:
    write_parquet(tmp_path, "train", [0, 51, 255])
    write_parquet(tmp_path, "test", [102])
    images = data.mnist(tmp_path)
    assert images.train.inputs.shape == (3, 1, 28, 28)
    torch.testing.assert_close(images.train.inputs[:, 0, 0, 0], torch.tensor([0.0, 0.2, 1.0]))
    assert images.train.targets.tolist() == [0, 1, 5]
    torch.testing.assert_close(images.validation.inputs[:, 0, 3, 4], torch.tensor([0.4]))


def test_images_are_decoded_once_and_no_change_of_theirs_reaches_the_next_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path, name, [255])
    data.mnist(tmp_path).train.inputs.zero_()
    monkeypatch.setattr(data, "_decode", lambda *_: pytest.fail("decoded again"))
    assert data.mnist(tmp_path).train.inputs.max() == 1


def test_cifar10_is_read_in_colour_with_channels_first(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = {"img": [encoded((255, 51, 0))], "label": [7]}
        Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}-00000-of-00001.parquet")
    images = data.cifar10(tmp_path)
    assert images.train.inputs.shape == (1, 3, 32, 32)
    torch.testing.assert_close(images.train.inputs[0, :, 5, 6], torch.tensor([1.0, 0.2, 0.0]))
    assert images.validation.targets.tolist() == [7]


def test_a_folder_that_is_not_there_or_lacks_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere.*pass the folder"):
        data.mnist(tmp_path / "nowhere")
    write_parquet(tmp_path, "train", [1])
    with pytest.raises(DataError, match=r"has no test-\*.parquet; it holds train-00000"):
        data.mnist(tmp_path)


def test_a_folder_of_another_dataset_is_refused(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path, name, [1], column="picture")
    with pytest.raises(DataError, match=r"expected the columns 'image' and 'label'.*got \['picture', 'label'\]"):
        data.mnist(tmp_path)


def test_batches_are_a_permutation_and_depend_on_the_seed_alone() -> None:
    split = Split(torch.arange(10.0), torch.arange(10))
    first, again, other = (torch.cat([targets for _, targets in data.batches(split, 3, 2, seed)]) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first) == 18  # three whole batches in each of two epochs
    assert len(set(first[:9].tolist())) == 9


def test_tinyshakespeare_is_read_as_numbers_of_characters_and_split_once(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("abca\n\nbca c" * 2)
    text = data.tinyshakespeare(tmp_path)
    assert text.vocabulary == 5
    numbers = torch.cat([text.train, text.validation])
    assert len(text.train) == 19
    assert "".join("\n abc"[int(number)] for number in numbers) == "abca\n\nbca c" * 2
    with pytest.raises(DataError, match=r"no file .*input\.txt.*pass the folder"):
        data.tinyshakespeare(tmp_path / "nowhere")


def test_windows_pair_each_character_with_the_next() -> None:
    first, again = ([*data.windows(torch.arange(50), [4] * 3, 7, seed)] for seed in (0, 0))
    assert len(first) == 3
    for (inputs, targets), (same, _) in zip(first, again, strict=True):
        assert inputs.shape == (4, 7)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, same)


def candidates(image: Tensor, reach: int) -> Iterator[Tensor]:
    """Every mirroring and shift of ``[channels, height, width]``."""
    _, height, width = image.shape
    for mirrored in (image, image.flip(-1)):
        padded = F.pad(mirrored, (reach,) * 4)
        for down, right in itertools.product(range(2 * reach + 1), repeat=2):
            yield padded[:, down : down + height, right : right + width]


def test_images_are_mirrored_and_shifted() -> None:
    images = torch.rand(60, 2, 4, 5)
    moved, again, other = (data.mirror_and_shift(images, 1, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(moved, again)
    assert not torch.equal(moved, other)
    seen = set()
    for image, result in zip(images, moved, strict=True):
        (which,) = [number for number, each in enumerate(candidates(image, 1)) if torch.equal(each, result)]
        seen.add(which)
    assert len(seen) > 12, "of 18 ways, most are taken by 60 images"


def test_batches_of_growing_size_hold_no_example_twice() -> None:
    split = Split(torch.arange(10.0), torch.arange(10))
    sizes = [3, 4, 5, 10, 2]
    drawn = [targets.tolist() for _, targets in data.draw(split, sizes, seed=0)]
    assert [len(batch) for batch in drawn] == sizes
    assert all(len(set(batch)) == len(batch) for batch in drawn)
    assert not set(drawn[0]) & set(drawn[1]), "of one pass"


def test_without_a_network_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def unreachable(_: huggingface_hub.HfApi, name: str, **_options: object) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot download ylecun/mnist .* pass --data-dir"):
        data.mnist()
    assert asked == ["ylecun/mnist"]
