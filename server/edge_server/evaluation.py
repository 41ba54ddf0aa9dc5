"""How good a model is on the server's own labelled data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.data import Dataset
from edge_sdk.errors import DataError
from edge_sdk.examples import EVALUATION_BATCH, Examples
from edge_sdk.runtime import open_runtime
from edge_sdk.tensors import Array, Tensors


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A model's figures.

    Attributes:
        accuracy: share of right predictions, in [0, 1].
        loss: mean cross-entropy in nats.
        examples: how many images it was measured on.
        confusion: int64 [classes, classes], true class by row, predicted by column; None where only sums
            came back from devices.
    """

    accuracy: float
    loss: float
    examples: int
    confusion: Array | None = None


class Evaluator:
    """Evaluates models of one bundle on one labelled data set.

    Where the bundle has a backbone its features are computed once, here, and kept.

    Raises:
        DataError: the data set is empty, or an example does not fit the model: said now, not after the
            first round.
    """

    def __init__(self, bundle: Bundle, dataset: Dataset, *, threads: int = 0) -> None:
        if len(dataset) == 0:
            raise DataError("the evaluation data is empty: give at least one labelled image")
        self._classes, self._count = bundle.manifest.classes, len(dataset)
        self._runtime = open_runtime(bundle, threads=threads)
        self._examples = Examples(self._runtime, bundle.manifest, dataset, np.arange(len(dataset)))
        for _ in self._batches():
            pass

    def evaluate(self, weights: Tensors) -> Evaluation:
        """Predict all examples."""
        self._runtime.set_weights(weights)
        classes, loss = self._classes, 0.0
        confusion = np.zeros((classes, classes), np.int64)
        for x, y in self._batches():
            logits = self._runtime.predict(x).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            log_partition = np.log(np.exp(logits).sum(axis=1))
            loss += float((log_partition - logits[np.arange(len(y)), y]).sum())
            np.add.at(confusion, (y, logits.argmax(axis=1)), 1)
        examples = self._count
        return Evaluation(float(np.trace(confusion)) / examples, loss / examples, examples, confusion)

    def _batches(self) -> Iterator[tuple[Array, Array]]:
        for start in range(0, self._count, EVALUATION_BATCH):
            yield self._examples.take(np.arange(start, min(start + EVALUATION_BATCH, self._count)))
