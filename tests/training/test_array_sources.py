"""Arrays of an .npz and CIFAR-100's pickled files as data sources: what they give, and which files are refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidArgument
from training.sources import load_data


def arrays_file(path: Path, **changes: Any) -> str:
    images, labels = np.arange(4 * 36, dtype=np.uint8).reshape(4, 6, 6), np.array([0, 0, 7, 7])
    parts = {f"{part}_{what}": x for part in ("train", "query", "gallery") for what, x in
             (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(path, **{name: x for name, x in (parts | changes).items() if x is not None})
    return str(path)


def test_arrays_keep_their_own_class_numbers(tmp_path: Path) -> None:
    data = load_data("arrays", arrays_file(tmp_path / "a.npz"))

    assert data.classes == [0, 7]
    assert np.array_equal(np.asarray(data.gallery.images[3]), np.arange(108, 144).reshape(6, 6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_labels": None}, "query_labels"),
        ({"train_images": np.zeros((4, 6, 6))}, "train_images must be uint8"),
        ({"train_images": np.zeros((4, 6, 6, 2), np.uint8)}, r"must be uint8 .N, H, W. or .N, H, W, 3., not uint8"),
        ({"train_images": np.zeros((4, 36), np.uint8)}, "must be uint8"),
        ({"gallery_labels": np.zeros(3, int)}, "gallery_labels must be one whole number for each of the 4 images"),
        ({"train_labels": np.zeros(4)}, "one whole number for each of the .*, not float64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_their_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=rf"a\.npz cannot be used: .*{message}"):
        load_data("arrays", arrays_file(tmp_path / "a.npz", **changes))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"hello"])
def test_a_file_that_holds_no_arrays_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(content)

    with pytest.raises(InvalidArgument, match=r"a\.npz cannot be used: (?!.*pickle)"):
        load_data("arrays", str(tmp_path / "a.npz"))


def test_an_array_whose_header_is_damaged_is_refused(tmp_path: Path) -> None:
    path = Path(arrays_file(tmp_path / "a.npz"))
    with zipfile.ZipFile(path) as held:
        members = {name: held.read(name) for name in held.namelist()}
    with zipfile.ZipFile(path, "w") as damaged:
        for name, content in members.items():
            damaged.writestr(name, content.replace(b"), }", b"0((("))

    with pytest.raises(InvalidArgument, match=r"a\.npz cannot be used"):
        load_data("arrays", str(path))


def test_arrays_whose_compressed_bytes_are_damaged_are_refused(tmp_path: Path) -> None:
    path = Path(arrays_file(tmp_path / "a.npz"))
    with np.load(path) as held:
        np.savez_compressed(path, **{name: np.repeat(held[name], 50, axis=0) for name in held.files})
    damaged = bytearray(path.read_bytes())
    damaged[100:160] = bytes(0x5A ^ byte for byte in damaged[100:160])
    path.write_bytes(damaged)

    with pytest.raises(InvalidArgument, match=r"a\.npz cannot be used"):
        load_data("arrays", str(path))


def cifar(folder: Path, dump: Callable[[Any], bytes] = lambda held: pickle.dumps(held, 4), **changes: Any) -> str:
    generator = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 4)):
        held = {
            b"filenames": [b"x.png"] * count,
            b"fine_labels": [row % 2 for row in range(count)],
            b"coarse_labels": [0] * count,
            b"data": generator.integers(0, 256, (count, 3072), dtype=np.uint8),
        }
        (folder / part).write_bytes(dump({**held, **changes.get(part, {})}))
    (folder / "meta").write_bytes(dump({b"fine_label_names": [b"apple", b"aquarium_fish"]}))
    return str(folder)


def test_cifar_100_is_read_in_its_own_python_format(tmp_path: Path) -> None:
    data = load_data("cifar100", cifar(tmp_path))
    stored = pickle.loads((tmp_path / "train").read_bytes())[b"data"]
    image = np.asarray(data.train.images[2])

    assert (len(data.train), len(data.query), data.same) == (6, 4, True)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.classes == ["apple", "aquarium_fish"]
    assert image.shape == (32, 32, 3)
    for row, column, channel in ((0, 0, 0), (0, 31, 1), (31, 5, 2)):
        assert image[row, column, channel] == stored[2, 1024 * channel + 32 * row + column]


class Python2(pickle._Pickler):
    """Writes strings as python 2 did when the published files were made, and arrays by numpy's old module name."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)  # type: ignore[attr-defined]

    dispatch[bytes] = save_bytes  # type: ignore[assignment]


def dump_as_python_2(held: Any) -> bytes:
    import io

    file = io.BytesIO()
    Python2(file, 2).dump(held)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def dump_of_texts(held: Any) -> bytes:
    return pickle.dumps(pickle.loads(dump_as_python_2(held), encoding="latin1"))


@pytest.mark.parametrize("dump", [dump_as_python_2, dump_of_texts])
def test_files_pickled_by_python_2_and_written_again_are_read_too(dump: Callable[[Any], bytes], tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    old = load_data("cifar100", cifar(tmp_path / "old", dump))
    new = load_data("cifar100", cifar(tmp_path / "new"))

    assert old.train.fingerprint == new.train.fingerprint
    assert old.names == new.names


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_that_calls_anything_else_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    root = cifar(tmp_path, train={b"data": Trap(tmp_path / "made")})

    with pytest.raises(InvalidArgument, match=r"train cannot be read as a CIFAR-100 file: it uses \w+\.mkdir"):
        load_data("cifar100", root)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((6, 3071), np.uint8)}, "python format"),
        ({"data": np.zeros((6, 3072))}, "must be uint8"),
        ({"data": None}, "python format"),
        ({"fine_labels": [0]}, "one whole number for each"),
        ({"fine_labels": ["a"] * 6}, "one whole number for each"),
    ],
)
def test_cifar_files_that_hold_something_else_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    root = cifar(tmp_path, train={name.encode(): value for name, value in changes.items()})

    with pytest.raises(InvalidArgument, match=message):
        load_data("cifar100", root)


@pytest.mark.parametrize("content", [None, b"", b"not a pickle", pickle.dumps([1, 2], 2), pickle.dumps({}, 2)])
def test_broken_or_missing_cifar_files_are_named(content: bytes | None, tmp_path: Path) -> None:
    root = cifar(tmp_path)
    (tmp_path / "test").unlink()
    if content is not None:
        (tmp_path / "test").write_bytes(content)

    with pytest.raises(InvalidArgument, match=r"test|fine_labels|data"):
        load_data("cifar100", root)
