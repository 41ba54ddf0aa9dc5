"""What a device tells of its data: class statistics, label histograms, and descriptions that are refused."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from vectors.plain import Tensor, document, exact, float32, safetensors, shown, tensor

TOLERANCE = "1e-12"
LARGE = 3.4028234663852886e38
CLASSES, MOST = 3, 1000
# Class 1 has one example, class 2 none.
FEATURES = [
    ([1.0, 0.0], 0),
    ([3.0, 4.0], 0),
    ([0.1, -7.0], 1),
    ([1000000.0, 1000000.25], 0),
    ([999999.0, 1000000.5], 0),
]
OF_THREE = [([1.0, 2.0, 3.0], 2), ([0.0, 4.0, 8.0], 2), ([5.0, 5.0, 5.5], 2)]


def moments(features: list[list[float]]) -> tuple[list[Fraction], list[list[Fraction]]]:
    """The mean and the scatter about it, without rounding."""
    size = len(features[0])
    mean = [sum((Fraction(x[i]) for x in features), Fraction()) / len(features) for i in range(size)]
    apart = [[Fraction(x[i]) - mean[i] for i in range(size)] for x in features]
    scatter = [
        [sum((row[i] * row[j] for row in apart), Fraction()) for j in range(size)] for i in range(size)
    ]
    return mean, scatter


def statistics(
    fact: str,
    covariance: str,
    examples: list[tuple[list[float], int]],
    *,
    withhold_below: int = 0,
) -> dict[str, Any]:
    size = len(examples[0][0])
    counts, means, scatters = [], [], []
    for label in range(CLASSES):
        own = [[float32(value) for value in x] for x, of in examples if of == label]
        told = own if len(own) >= withhold_below else []
        zero = [[Fraction()] * size for _ in range(size)]
        mean, scatter = moments(told) if told else (zero[0], zero)
        upper = [scatter[i][j] for i in range(size) for j in range(i, size)]
        counts.append(len(told))
        means.append([float(value) for value in mean])
        kept = upper if covariance == "full" else [scatter[i][i] for i in range(size)]
        scatters.append([float(value) for value in kept])
    return {
        "fact": fact,
        "covariance": covariance,
        "withhold_below": withhold_below,
        "features": [exact([float32(value) for value in x]) for x, _ in examples],
        "labels": [label for _, label in examples],
        "count": exact(counts),
        "mean": exact(means),
        "scatter": exact(scatters),
        "tolerance": TOLERANCE,
    }


def low_rank() -> dict[str, Any]:
    """Deviations along (1, 1, 0) and (1, −1, 0): S has the eigenvalues 9, 1 and 0."""
    examples = [([2.5, 3.5, 7.0], 0), ([-0.5, 0.5, 7.0], 0), ([1.5, 1.5, 7.0], 0), ([0.5, 2.5, 7.0], 0)]
    vector = statistics("the rest's diagonal beside the largest eigenpair", "low_rank", examples)
    nothing = ["0x0.0p+0"] * 6
    return {
        **vector,
        "rank": 1,
        "scatter": [exact([0.5, 0.5, 0.0]), nothing[:3], nothing[:3]],
        # The sign of a row of F is free: FᵀF, the upper triangle row by row.
        "squared_factor": [exact([4.5, 4.5, 0.0, 4.5, 0.0, 0.0]), nothing, nothing],
    }


def _statistics_file(**changes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "count": tensor("I64", [2], [2, 1]),
        "mean": tensor("F64", [2, 2], [2.0, 2.0, 0.5, 0.25]),
        "scatter": tensor("F64", [2, 3], [2.0, 4.0, 8.0, 0.0, 0.0, 0.0]),
    }
    return {**tensors, **changes}


def files_refused() -> list[dict[str, Any]]:
    """Full statistics of two classes of two features each that cannot be, and why."""
    scatter = [2.0, 4.0, 8.0, 0.0, 0.0, 0.0]

    def counts(*values: int) -> dict[str, Tensor]:
        return _statistics_file(count=tensor("I64", [2], values))

    def means(*values: float) -> dict[str, Tensor]:
        return _statistics_file(mean=tensor("F64", [2, 2], values))

    def scatters(*values: float) -> dict[str, Tensor]:
        return _statistics_file(scatter=tensor("F64", [2, 3], [*values, *scatter[len(values) :]]))

    cases = [
        ("count", "a count below 0", counts(-1, 1)),
        ("count", "more than the most", counts(MOST, 1)),
        ("count", "more than the most, where 64 bits wrap", counts((1 << 63) - 1, (1 << 63) - 1)),
        ("alone", "a mean without an example", counts(2, 0)),
        ("alone", "a scatter of one example", counts(1, 1)),
        ("finite", "a mean of NaN", means(math.nan, 2.0, 0.5, 0.25)),
        ("finite", "a scatter of inf", scatters(2.0, math.inf)),
        ("range", "a mean beyond float32", means(2.0 * LARGE, 2.0, 0.5, 0.25)),
        ("range", "a scatter beyond what two features can have", scatters(2.0, 4.0, 2.1 * LARGE * LARGE)),
        ("variance", "a variance below 0", scatters(-1e-300)),
        ("definite", "not positive semi-definite", scatters(2.0, 4.001)),
        ("definite", "a covariance without a variance", scatters(0.0, 4.0)),
        ("tensors", "another size", _statistics_file(scatter=tensor("F64", [2, 2], scatter[:4]))),
        ("tensors", "float32", _statistics_file(mean=tensor("F32", [2, 2], [2.0, 2.0, 0.5, 0.25]))),
    ]
    return [{"why": why, "fact": fact, "hex": safetensors(file).hex()} for why, fact, file in cases]


def histograms() -> list[dict[str, Any]]:
    vectors = []
    for labels, copies, below in (
        ([0, 0, 2, 2, 2], [], 0),
        ([0, 0, 2, 2, 2], [], 3),
        ([0, 0, 2, 2, 2], [0, 0, 2], 3),
        ([0] * 5 + [1] * 4, [1] * 9, 5),
        ([], [], 5),
    ):
        own = [labels.count(label) for label in range(CLASSES)]
        counts = [
            count + copies.count(label) if count and count >= below else 0 for label, count in enumerate(own)
        ]
        vectors.append(
            {
                "classes": CLASSES,
                "labels": labels,
                "copies": copies,
                "withhold_below": below,
                "histogram": exact(counts),
            }
        )
    return vectors


def descriptions() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of a bundle of 3 classes, 2 dims and 4 features, for a server that wants all three."""
    histogram = tensor("I64", [3], [5, 0, MOST - 5])
    descriptor = tensor("I64", [2], [-(1 << 53), 1 << 53])
    feature = tensor("F64", [4], [0.1, -(2.0**53), 0.0, 5e-324])
    read: list[tuple[str, dict[str, Tensor]]] = [
        ("all that was wanted", {"histogram": histogram, "descriptor": descriptor, "feature": feature}),
        ("what is shared of it", {"descriptor": descriptor}),
    ]
    wrong: list[tuple[str, str, dict[str, Tensor]]] = [
        ("tensors", "nothing", {}),
        ("tensors", "what nobody asked for", {"histogram": histogram, "labels": histogram}),
        ("tensors", "another length", {"descriptor": tensor("I64", [3], [0, 0, 0])}),
        ("tensors", "another dtype", {"histogram": tensor("F64", [3], [5.0, 0.0, 1.0])}),
        ("count", "a count below 0", {"histogram": tensor("I64", [3], [5, -1, 1])}),
        ("count", "more than the most", {"histogram": tensor("I64", [3], [5, 1, MOST - 5])}),
        ("count", "more than the most, where 64 bits wrap", {"histogram": ("I64", [3], [(1 << 63) - 1] * 3)}),
        ("finite", "NaN", {"feature": tensor("F64", [4], [math.nan, 0.0, 0.0, 0.0])}),
        ("range", "an integer beyond 2^53", {"descriptor": tensor("I64", [2], [0, (1 << 53) + 2])}),
        ("range", "the least integer", {"descriptor": tensor("I64", [2], [0, -(1 << 63)])}),
        ("range", "a feature beyond 2^53", {"feature": tensor("F64", [4], [2.0**53 + 2, 0.0, 0.0, 0.0])}),
    ]
    taken = [{"fact": fact, "hex": safetensors(file).hex(), "read": shown(file)} for fact, file in read]
    refused = [{"why": why, "fact": fact, "hex": safetensors(file).hex()} for why, fact, file in wrong]
    return taken, refused


def told() -> str:
    taken, refused = descriptions()
    return document(
        {
            "statistics": [
                statistics("the triangle row by row", "full", FEATURES[:3]),
                statistics("means far from 0 lose nothing", "full", FEATURES),
                statistics("variances alone", "diagonal", FEATURES),
                statistics("a class of one is withheld", "full", FEATURES, withhold_below=2),
                statistics("three features", "full", OF_THREE),
                low_rank(),
            ],
            "statistics_limits": [{"classes": 2, "features": 2, "covariance": "full", "max_examples": MOST}],
            "statistics_read": [{"fact": "as specified", "hex": safetensors(_statistics_file()).hex()}],
            "statistics_refused": files_refused(),
            "histograms": histograms(),
            "descriptions_limits": [{"classes": 3, "dims": 2, "features": 4, "max_examples": MOST}],
            "descriptions_read": taken,
            "descriptions_refused": refused,
        }
    )
