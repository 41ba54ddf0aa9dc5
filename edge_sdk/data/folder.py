"""A folder of image files, one sub-folder a class."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".pgm", ".ppm", ".tif", ".tiff"})
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""Those of the suffixes, as Pillow calls them."""
MAX_BYTES = 1 << 28
"""Of one image file."""
MAX_PIXELS = 1 << 25
"""Of one image: 33 megapixels."""
# Pixels that a byte can stand for, so that a small file cannot make us allocate much. DEFLATE makes 8256;
# where pixels are not compressed it is eight.
_MAX_EXPANSION = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class ImageFolder:
    """Image files with a label each, decoded when asked for, so that a large set needs little memory.

    Make one with :meth:`scan`.
    """

    paths: tuple[Path, ...]
    labels: Array
    class_names: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None

    @classmethod
    def scan(cls, folder: Path, *, channels: int = 3, size: tuple[int, int] | None = None) -> ImageFolder:
        """List the images of a folder; the sorted names of its sub-folders are the classes.

        Args:
            folder: holds one sub-folder a class. Hidden files and files that are no images are left out.
            channels: 1 for grey, 3 for RGB; images are converted.
            size: (height, width) in pixels to resize to, bilinear; as they are when None.

        Raises:
            DataError: no images, channels other than 1 or 3, or Pillow is missing.
        """
        _pillow()
        if channels not in (1, 3):
            raise DataError(f"image files give 1 channel (grey) or 3 (RGB), not the {channels} asked for")
        names = class_folders(folder)
        paths = [images_in(folder / name) for name in names]
        if not any(paths):
            raise DataError(f"{folder}: no images; give each class a sub-folder with its images")
        labels = np.repeat(np.arange(len(names)), [len(files) for files in paths])
        return cls(tuple(p for files in paths for p in files), labels, tuple(names), channels, size)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int, /) -> tuple[Array, int]:
        pillow = _pillow()
        path = self.paths[index]
        try:
            image = self._decoded(path, pillow)
        except Exception as error:  # Pillow's decoders document none
            raise DataError(f"example {index}: {path} is not an image that can be read ({error})") from None
        return image, int(self.labels[index])

    def _decoded(self, path: Path, pillow: ModuleType) -> Array:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"its {size} bytes are over the limit of {MAX_BYTES}")
        # From memory, where a read of more than there is allocates nothing.
        with pillow.open(io.BytesIO(path.read_bytes()), formats=FORMATS) as image:
            stored = all(tile[0] == "raw" for tile in getattr(image, "tile", ()))
            limit = min(MAX_PIXELS, size * (8 if stored else _MAX_EXPANSION))
            if image.width * image.height > limit:
                raise ValueError(f"its {image.width} x {image.height} pixels are over the limit of {limit}")
            image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size is not None:
            image = image.resize((self.size[1], self.size[0]), pillow.Resampling.BILINEAR)
        return np.array(image, np.uint8)


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the sub-folders that are not hidden."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """Sorted image files directly in ``folder``, by their suffix."""
    return sorted(
        p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != "." and p.is_file()
    )


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("image files need Pillow: pip install 'edge-sdk-fl[images]'") from None
    return Image
