"""A device's labelled images: opening them, holding some out, and making a training step's arrays."""

from edge_sdk.data.dataset import ArrayDataset, Dataset, as_dataset, split_held_out
from edge_sdk.data.labels import Labelled, histogram, labels_of
from edge_sdk.data.load import load
from edge_sdk.data.npz import save_npz
from edge_sdk.data.prepare import batches, prepare

__all__ = [
    "ArrayDataset",
    "Dataset",
    "Labelled",
    "as_dataset",
    "batches",
    "histogram",
    "labels_of",
    "load",
    "prepare",
    "save_npz",
    "split_held_out",
]
