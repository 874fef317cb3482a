"""The kind of stored content (image, text, folder, vectors), which is told by its key alone."""

from __future__ import annotations

import re

from service.store.image_store.object_store import FOLDERS, VECTOR_FILES

TEXT = ".txt"
"""The suffix of the keys of texts."""


def is_text(key: str) -> bool:
    """Whether it is the key of a text, else of an image."""
    return key.endswith(TEXT)


def is_content(key: str) -> bool:
    """Whether it is the key of an image or text: the number of a gallery, and a random number."""
    return re.fullmatch(rf"\d+/[0-9a-f]{{32}}({re.escape(TEXT)})?", key, re.ASCII) is not None


def is_folder(key: str) -> bool:
    """Whether it is the key of a folder of a version or edge."""
    return re.fullmatch(rf"{FOLDERS}(versions|edges)/.+\.zip", key) is not None


def is_vector_file(key: str) -> bool:
    """Whether it is the key of a file of vectors."""
    return re.fullmatch(rf"{VECTOR_FILES}\d+/\d+-[0-9a-f]{{16}}\.parquet", key, re.ASCII) is not None
