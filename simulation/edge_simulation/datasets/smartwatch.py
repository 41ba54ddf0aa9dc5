"""Shoulder exercises under a smartwatch: a data set that people divide by themselves."""

from __future__ import annotations

import numpy as np

from edge_sdk.data import ArrayDataset
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.datasets.train_test import TrainTest

WINDOW = 100
"""Two seconds at 50 Hz."""
TRAIN_STEP = WINDOW // 2
TEST_FRACTION = 0.2


def smartwatch() -> TrainTest:
    """Windows of ten people's seven exercises (Burns et al., arXiv 1802.01489), from the package seglearn.

    140 recordings, one a person, exercise and side, of about 20 repetitions on six axes: acceleration and
    rotation. The last fifth of each recording is the test's: later repetitions by the same people, as a
    fleet meets them. Windows are two seconds long; those of the training overlap by half, and none reaches
    over the cut. Each axis is standardised by the mean and deviation of all training recordings.

    ``people`` holds the number, 1 to 10, of whoever wore the watch, for
    :func:`edge_simulation.partition.natural`.

    Returns:
        Images float32 ``[N, 1, 100, 6]``: to a model a picture of six channels, 1 high and 100 wide.

    Raises:
        DataError: seglearn, or pandas which it needs and does not ask for, is not installed.
    """
    try:
        # The file in it is a pickle, so its own loader is the one to open it.
        from seglearn.datasets import load_watch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise DataError(
            f"smartwatch comes with seglearn: pip install 'edge-sdk-fl[smartwatch]' ({error})"
        ) from None
    watch = load_watch()  # type: ignore[no-untyped-call]
    recordings = [np.asarray(recording, np.float64) for recording in watch["X"]]
    cuts = [round(len(recording) * (1 - TEST_FRACTION)) for recording in recordings]
    before = np.concatenate([recording[:cut] for recording, cut in zip(recordings, cuts, strict=True)])
    mean, deviation = before.mean(axis=0), before.std(axis=0)
    scaled = [((recording - mean) / deviation).astype(np.float32) for recording in recordings]
    train = [_windows(each[:cut], TRAIN_STEP) for each, cut in zip(scaled, cuts, strict=True)]
    test = [_windows(each[cut:], WINDOW) for each, cut in zip(scaled, cuts, strict=True)]
    labels, subjects = (np.asarray(watch[key], np.int64) for key in ("y", "subject"))
    names = tuple(str(name) for name in watch["y_labels"])
    return TrainTest(
        "smartwatch",
        ArrayDataset(np.concatenate(train), _repeated(labels, train)),
        ArrayDataset(np.concatenate(test), _repeated(labels, test)),
        len(names),
        names,
        people=_repeated(subjects, train),
    )


def _windows(recording: Array, step: int) -> Array:
    """Float32 ``[n, 1, WINDOW, axes]`` of float32 ``[time, axes]``."""
    if len(recording) < WINDOW:
        return np.empty((0, 1, WINDOW, recording.shape[1]), np.float32)
    views = np.lib.stride_tricks.sliding_window_view(recording, WINDOW, axis=0)[::step]
    windows: Array = views.transpose(0, 2, 1)[:, None]
    return windows


def _repeated(values: Array, windows: list[Array]) -> Array:
    return np.repeat(values, [len(each) for each in windows])
