"""MobileNetV2 with weights learnt on ImageNet: from a file, from torchvision's site, or at random, aloud."""

from __future__ import annotations

import hashlib
import http.client
import os
import pickle
import re
import time
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_export.errors import ExportError
from edge_export.models.mobilenet_v2 import MobileNetV2
from edge_sdk.errors import EdgeError
from edge_sdk.files import write_atomically

PUBLISHED = "https://download.pytorch.org/models/mobilenet_v2-7ebf99e0.pth"
"""torchvision's newer weights; the older ones end in ``-b0353104.pth``, by which their SHA-256 begins."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SYMMETRIC = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Mean and deviation a channel of images in [0, 1]; the second is Keras's x / 127.5 - 1 on bytes."""

_PATIENCE = 120.0
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Pretrained:
    """A network and the normalisation that its weights were learnt with.

    Attributes:
        network: for images [B, 3, H, W], normalised.
        mean: for each channel, taken off an image in [0, 1].
        std: for each channel; an image is divided by it after that.
    """

    network: MobileNetV2
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def mobilenet_v2(
    weights: str | os.PathLike[str] | None = None,
    *,
    url: str = PUBLISHED,
    timeout: float = 5.0,
    seed: int = 0,
) -> Pretrained:
    """MobileNetV2 at width 1 with the best weights at hand.

    Args:
        weights: safetensors, or a state dict as ``torch.save`` writes it (nothing but tensors is
            unpickled), with torchvision's keys, with or without ``classifier.*``. Its images are
            normalised by ImageNet's mean and deviation, or to [-1, 1] where the metadata of a safetensors
            file says ``x/127.5-1``. None takes what torchvision publishes, from PyTorch's cache if it is
            there.
        url: of the published file; the SHA-256 of its content begins as its name ends.
        timeout: seconds that its site may be silent; the whole transfer may take two minutes.
        seed: of the random weights, where the published ones cannot be had.

    Raises:
        ExportError: ``weights`` cannot be read or are not MobileNetV2's.

    Warns:
        UserWarning: the published weights cannot be had, and those returned are random.
    """
    if weights is not None:
        return _read(Path(weights))
    try:
        return _read(_published(url, timeout))
    except (OSError, http.client.HTTPException, ValueError, EdgeError) as error:
        warnings.warn(
            f"MobileNetV2 has RANDOM weights, which tell devices apart far worse: those of {url} cannot be "
            f"had ({error}). Give a file of weights (--describe-weights PATH), or export again online",
            stacklevel=2,
        )
        return random_mobilenet_v2(seed)


def random_mobilenet_v2(seed: int = 0, width: float = 1.0) -> Pretrained:
    """A network that has learnt nothing, its BatchNorms fitted to random images.

    Without that fit He's initialisation, made for training, gives features of 10⁻¹⁰ in evaluation mode.

    Args:
        seed: of the weights and the images. The global random state is left as it was.
        width: factor on all numbers of channels.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = MobileNetV2(classes=2, width=width)
        # Blots of many sizes, since the maps of plain noise have next to no variance after the strides.
        coarse = [torch.rand(8, 3, side, side) for side in (2, 4, 8, 16)]
    images = torch.cat([functional.interpolate(blots, size=(64, 64), mode="bilinear") for blots in coarse])
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        network.train().embed(images * 2 - 1)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return Pretrained(network.eval(), *SYMMETRIC)


def _read(path: Path) -> Pretrained:
    try:
        state, notes = _safetensors(path) if path.suffix == ".safetensors" else (_state_dict(path), "")
    except (OSError, safetensors.SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ExportError(f"{path}: cannot be read as weights ({line})") from None
    network = MobileNetV2(classes=2)
    features = {
        name.removeprefix("features."): t for name, t in state.items() if name.startswith("features.")
    }
    needed = {name for name in network.features.state_dict() if not name.endswith("num_batches_tracked")}
    if missing := sorted(needed - features.keys()):
        raise ExportError(f"{path}: has no tensor features.{missing[0]}: give torchvision's mobilenet_v2")
    try:
        network.features.load_state_dict(features, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ExportError(f"{path}: not MobileNetV2 at width 1 ({reason})") from None
    if not all(tensor.isfinite().all() for tensor in features.values()):
        raise ExportError(f"{path}: holds NaN or infinite weights")
    return Pretrained(network.eval(), *(SYMMETRIC if "x/127.5-1" in notes.replace(" ", "") else IMAGENET))


def _safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    with safetensors.safe_open(path, "pt") as file:
        notes = " ".join((file.metadata() or {}).values())
        return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 - not a dict


def _state_dict(path: Path) -> dict[str, Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise RuntimeError(f"holds a {type(loaded).__name__}, not a state dict")
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def _published(url: str, timeout: float) -> Path:
    """The file at ``url`` in PyTorch's cache, fetched if it is not there."""
    name = url.rsplit("/", 1)[-1]
    digest = re.search(r"-([0-9a-f]{8,64})\.\w+$", name)
    if digest is None:
        raise ValueError("its name does not end with the start of a SHA-256")
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest[1]):
        return path
    data = _fetched(url, timeout)
    if not hashlib.sha256(data).hexdigest().startswith(digest[1]):
        raise ValueError("its SHA-256 is another: the transfer was damaged")
    write_atomically(path, data)
    return path


def _fetched(url: str, timeout: float) -> bytes:
    deadline = time.monotonic() + _PATIENCE
    data = bytearray()
    with urllib.request.urlopen(url, timeout=timeout) as response:
        while chunk := response.read1(1 << 16):
            data += chunk
            if len(data) > _MAX_BYTES or time.monotonic() > deadline:
                raise ValueError(f"larger than {_MAX_BYTES} bytes, or slower than {_PATIENCE:.0f} s")
    return bytes(data)
