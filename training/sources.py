"""Sources of a recipe's images. `SOURCES` lists them; `load_data` reads one and checks the result."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument, InvalidImage
from index.paths import IMAGE_SUFFIXES, files_below
from index.version import Version
from training.data.checks import check_measurable, warn_of_similar_names
from training.data.digits import Digits, load_digits_split
from training.data.images import Arrays, Data, Files, ImageSet
from training.data.npz import open_npz
from training.stored_embeddings import with_file_embeddings

UNREADABLE = ("refuse", "skip")
PARTS = ("train", "query", "gallery")
PART_NAMES = {*PARTS, "test", "training", "testing", "val", "valid", "validation", "dev", "eval", "evaluation"}
"""What others call the parts of a data set, in lower case."""

_log = logging.getLogger(__name__)


def load_data(source: str, root: str, unreadable: str = "refuse", stored: tuple[Path, Version] | None = None) -> Data:
    """Read a source of `SOURCES`.

    Args:
        source: its name.
        root: its folder or file, where it has one.
        unreadable: `refuse`: an image that cannot be decoded ends the training when it is read, with its path. `skip`:
            every file is decoded once up front, and those that cannot be decoded are left out, counted and logged.
        stored: a file of embeddings that go with the images, and the version that made them.

    Raises:
        InvalidArgument: an unknown name (lists the legal ones), `root` does not hold what the source needs, see
            `check_measurable`, or the embeddings are not of these images.
        InvalidVector: an embedding is not valid in its version's space.
    """
    if source not in SOURCES:
        raise InvalidArgument(f"data {source!r} is unknown; legal: {', '.join(SOURCES)}", pointer="/data")
    if unreadable not in UNREADABLE:
        raise InvalidArgument(
            f"unreadable must be one of {', '.join(UNREADABLE)}, not {unreadable!r}", pointer="/unreadable"
        )
    read, required_root = SOURCES[source]
    if required_root and not root:
        raise InvalidArgument(f"this recipe requires your data: --set root=PATH, {required_root}", pointer="/root")
    if required_root and not Path(root).exists():
        raise InvalidArgument(f"root {root} does not exist; it must be {required_root}", pointer="/root")
    data = read(Path(root))
    if stored is not None:
        data = with_file_embeddings(data, *stored)
    if unreadable == "skip":
        data = without_unreadable(data)
    check_measurable(data)
    warn_of_similar_names(data.names or ())
    return data


def without_unreadable(data: Data) -> Data:
    """Leave out the files that cannot be decoded; images in memory stay."""
    train, query = readable(data.train), readable(data.query)
    gallery = query if data.same else readable(data.gallery)
    skipped = len(data.train) - len(train) + len(data.query) - len(query)
    skipped += 0 if data.same else len(data.gallery) - len(gallery)
    return replace(data, train=train, query=query, gallery=gallery, skipped=skipped)


def readable(images: ImageSet) -> ImageSet:
    """The images that can be decoded; logs the number of the others, and the error of the first."""
    if not isinstance(images.images, Files):
        return images
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(lambda row: _decoding_error(images, row), range(len(images))))
    skipped = [error for error in errors if error]
    if not skipped:
        return images
    _log.warning("skipped %d of %d images that cannot be read; the first: %s", len(skipped), len(images), skipped[0])
    return images.take(np.flatnonzero([not error for error in errors]))


def digits_old(_: Path) -> Data:
    """100 scikit-learn digits of five classes."""
    split = load_digits_split()
    return Data(_digits(split.old_train), _digits(split.query), _digits(split.gallery))


def digits_new(_: Path) -> Data:
    """900 scikit-learn digits of ten classes."""
    split = load_digits_split()
    return Data(_digits(split.new_train), _digits(split.query), _digits(split.gallery))


def folders(root: Path) -> Data:
    """Image folders: a class is a folder below `train/`, at any depth, and so below `test/` or `query/` and `gallery/`.

    Links are followed; names that begin with a dot, and `__MACOSX`, are skipped.

    Training classes are numbered first, so that other test images do not renumber them. If `root` holds none of these
    folders, or only one that is itself a class, then it holds the classes, and a fifth of each is kept for testing.
    """
    parts = [root / part for part in ("test", *PARTS) if (root / part).is_dir()]
    if not parts or (len(parts) == 1 and _is_class_folder(parts[0])):
        return _class_folders(root)
    same = (root / "test").is_dir()
    required = ("train", "test") if same else PARTS
    if missing := [f"{part}/" for part in required if not (root / part).is_dir()]:
        lacking = "test/, or query/ and gallery/" if missing == ["query/", "gallery/"] else " and ".join(missing)
        held = ", ".join(f"{part.name}/" for part in parts)
        raise InvalidArgument(f"{root} holds {held}, but no {lacking}", pointer="/root")
    paths = {part: _files(root / part) for part in required}
    names = list(dict.fromkeys(_class_name(path, root / part) for part, found in paths.items() for path in found))
    ids = {name: label for label, name in enumerate(names)}
    train, query, *gallery = (
        _file_set([(path, ids[_class_name(path, root / part)]) for path in found]) for part, found in paths.items()
    )
    return Data(train, query, query if same else gallery[0], same, names)


def _class_folders(root: Path) -> Data:
    """Folders of classes without parts: about a fifth of each class is measured on and not trained on.

    A hash of an image's path decides, not its position: so when the folder has grown, the test images of a later
    version hold none that an older version was trained on. Except in classes that began with fewer than four images, as
    all of those are trained on; and in a few that began with four or five, if most hashes say test.
    """
    classes: dict[str, list[Path]] = {}
    for path in _files(root):
        classes.setdefault(_class_name(path, root), []).append(path)
    _refuse_parts_as_classes(root, classes)
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, paths in enumerate(classes.values()):
        test_images = _test_images(paths, root)
        for path in paths:
            (test if path in test_images else train).append((path, label))
    test_set = _file_set(test)
    return Data(_file_set(train), test_set, test_set, same=True, names=list(classes))


def _refuse_parts_as_classes(root: Path, classes: Iterable[str]) -> None:
    """Refuse parts of a data set that would be read as classes: deeper below `root`, or with names not in `PARTS`.

    Their training and test images would become classes of their own, and be trained on alike.
    """
    found: dict[str, set[str]] = {}
    for name in classes:
        above = name.split("/")[:-1]
        for depth, folder in enumerate(above):
            if folder.casefold() in PART_NAMES:
                found.setdefault("/".join(above[:depth]), set()).add(folder)
    for place, parts in found.items():
        if place and "train" in parts and parts & {"test", *PARTS[1:]}:
            raise InvalidArgument(
                f"{root} has no train/ of its own, but {root / place} holds one; give that folder as root",
                pointer="/root",
            )
        if len(parts) > 1:
            held = " and ".join(f"{part}/" for part in sorted(parts))
            raise InvalidArgument(
                f"{root / place} holds {held}, which would be read as classes; give a folder as root in which they are "
                "called train/ and test/, or query/ and gallery/",
                pointer="/root",
            )


def _test_images(paths: Sequence[Path], root: Path) -> set[Path]:
    """About a fifth of a class, at least two, so that one can find the other; none of a class of fewer than four."""
    if len(paths) < 4:
        return set()
    hashed = sorted((sha256(path.relative_to(root).as_posix().encode()).digest(), path) for path in paths)
    fifth = sum(digest[0] < 256 // 5 for digest, _ in hashed)
    return {path for _, path in hashed[: min(max(2, fifth), len(paths) - 2)]}


def arrays(path: Path) -> Data:
    """An .npz: train_images (N, H, W) or (N, H, W, 3) uint8, train_labels (N,), and the same for query and gallery."""
    with open_npz(path, "data file", "/root") as npz:
        train, query, gallery = (_array_set(npz[f"{part}_images"], npz[f"{part}_labels"], f"{part}_") for part in PARTS)
    return Data(train, query, gallery)


def cifar100(root: Path) -> Data:
    """CIFAR-100's own python format (Krizhevsky 2009): the pickled files `train`, `meta`, and `test` for both sides."""
    train, test, meta = (_unpickle(root / part) for part in ("train", "test", "meta"))
    try:
        names = [name.decode() if isinstance(name, bytes) else name for name in meta[b"fine_label_names"]]
        test_set = _cifar_set(test)
        return Data(_cifar_set(train), test_set, test_set, same=True, names=names)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise InvalidArgument(f"{root} is not CIFAR-100 in its python format: {error!r}", pointer="/root") from error


SOURCES: Mapping[str, tuple[Callable[[Path], Data], str]] = {
    "digits_old": (digits_old, ""),
    "digits_new": (digits_new, ""),
    "folders": (
        folders,
        "a folder with <class>/<image>, or train/<class>/<image> and test/ or query/ and gallery/ in the same way",
    ),
    "arrays": (arrays, "an .npz file with train_images, train_labels, and the same for query and gallery"),
    "cifar100": (cifar100, "the folder cifar-100-python with the files train, test and meta"),
}
"""Name -> the function that reads `root`, and what `root` must be, "" if it is not used."""


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, numbers, strings and their containers only: a pickle can name any function to be called."""

    def find_class(self, module: str, name: str) -> Any:
        """The functions that rebuild a numpy array, and no others."""
        legal = {
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in legal:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not legal in a CIFAR file")
        return legal[module, name]


def _unpickle(path: Path) -> Mapping[bytes, Any]:
    try:
        with path.open("rb") as file:
            content = ArrayUnpickler(file, encoding="bytes").load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise InvalidArgument(f"{path} cannot be read as a CIFAR-100 file: {error}", pointer="/root") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} has no dictionary, so it is not a CIFAR-100 file", pointer="/root")
    # Keys are bytes in the original files, and text in files that Python 3 wrote again.
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


def _cifar_set(content: Mapping[bytes, Any]) -> ImageSet:
    pixels_N3072 = np.asarray(content[b"data"])
    images = pixels_N3072.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return _array_set(np.ascontiguousarray(images), np.asarray(content[b"fine_labels"]))


def _file_set(labelled: Sequence[tuple[Path, int]]) -> ImageSet:
    return ImageSet(Files([path for path, _ in labelled]), np.array([label for _, label in labelled], np.int64))


def _digits(part: Digits) -> ImageSet:
    return _array_set(part.images, part.labels)


def _array_set(images: NDArray[np.uint8], labels: NDArray[np.int64], prefix: str = "") -> ImageSet:
    """Images and labels of arrays; their names begin with `prefix`, for errors."""
    if images.dtype != np.uint8 or images.shape[3:] not in {(), (3,)} or images.ndim < 3:
        raise ValueError(f"{prefix}images must be uint8 (N, H, W) or (N, H, W, 3), not {images.dtype} {images.shape}")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels):
        raise ValueError(
            f"{prefix}labels must be one whole number for each of the {len(images)} images, "
            f"not {labels.dtype} {labels.shape}"
        )
    return ImageSet(Arrays(images), labels.astype(np.int64))


def _files(root: Path) -> list[Path]:
    paths = sorted(
        _checked_name(path) for path in files_below(root, IMAGE_SUFFIXES, pointer="/root") if path.parent != root
    )
    if not paths:
        raise InvalidArgument(f"{root} has no <class>/<image> files", pointer="/root")
    return paths


def _checked_name(path: Path) -> Path:
    """The path, refused if it is not UTF-8, as neither a card nor a message could hold it."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = str(path).encode(errors="backslashreplace").decode()
        raise InvalidArgument(f"the name of {shown} is not UTF-8; rename it", pointer="/root") from error
    return path


def _is_class_folder(folder: Path) -> bool:
    """Whether it holds images, and no folders of them."""
    return all(path.parent == folder for path in files_below(folder, IMAGE_SUFFIXES, pointer="/root"))


def _class_name(path: Path, part: Path) -> str:
    return path.parent.relative_to(part).as_posix()


def _decoding_error(images: ImageSet, row: int) -> str:
    """Why an image cannot be decoded; "" if it can."""
    try:
        images.images[row]
    except InvalidImage as error:
        return str(error)
    return ""
