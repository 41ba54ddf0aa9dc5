"""What the server makes of updates: the fixed-point mean, a step of each strategy, and a chain's weights."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from vectors.plain import document, exact, float32

ROWS = ("w", "s", "n")
RULES = {"w": "mean", "s": "statistic", "n": "counter"}


def added(fact: str, exponent: int, updates: list[tuple[int, list[float]]]) -> dict[str, Any]:
    """Σ n·rint(Δ·2^e) in whole numbers, divided once: both sides of the division are float64."""
    updates = [(examples, [float32(value) for value in values]) for examples, values in updates]
    total = sum(examples for examples, _ in updates)
    columns = zip(*(values for _, values in updates), strict=True)
    sums = [
        sum(
            round(Fraction(value) * 2**exponent) * examples
            for (examples, _), value in zip(updates, column, strict=True)
        )
        for column in columns
    ]
    assert max(map(abs, sums)) < 1 << 62
    return {
        "fact": fact,
        "exponent": exponent,
        "updates": [{"examples": examples, "values": exact(values)} for examples, values in updates],
        "sums": exact(sums),
        "mean": exact([float(each) / float(2**exponent * total) for each in sums]),
    }


def means() -> list[dict[str, Any]]:
    step = 2.0**-34
    return [
        added("one device's mean is its update, rounded to a step", 34, [(7, [0.1, -0.1, 64.0, step / 4])]),
        added("halves of a step go to the even one", 34, [(1, [step / 2, 3 * step / 2, -5 * step / 2])]),
        added("weighted by examples", 34, [(1, [1.0, 0.1]), (3, [-1.0, 0.2]), (600, [1 / 3, 1e-9])]),
        added("at the largest that may be summed", 34, [(1 << 17, [64.0, -64.0])] * 10),
        added(
            "a sum beyond 53 bits is rounded, then divided", 34, [(131_069, [63.9, 5.3]), (7, [step, step])]
        ),
        added("of float32, not of float64", 40, [(3, [0.1, 1 / 3])]),
        added("coarse steps", 16, [(5, [1e-5, 65536.0, -1.5]), (2, [1e-6, -65535.996, 0.25])]),
        added("the finest steps", 62, [(1, [2.0**-149, 0.25, 0.1])]),
    ]


def precisions() -> list[dict[str, Any]]:
    """e = 61 − bound − ⌈log₂(max_examples · cohort)⌉, at most 62; below 16 there is no run."""
    vectors = []
    for bound, examples, cohort in (
        (6, 1 << 17, 10),
        (16, 1 << 17, 10),
        (6, 1, 1),
        (-20, 1, 1),
        (6, 1 << 17, 8),
        (6, (1 << 17) + 1, 8),
        (6, 1 << 32, 128),
        (6, 1 << 32, 129),
        (40, 1 << 17, 10),
    ):
        exponent = min(61 - bound - (examples * cohort - 1).bit_length(), 62)
        vectors.append(
            {
                "bound": bound,
                "max_examples": str(examples),
                "cohort": cohort,
                "exponent": exponent if exponent >= 16 else None,
            }
        )
    return vectors


def share(staleness: int) -> int:
    """⌊256/√(1 + τ)⌋ in whole numbers."""
    return max(part for part in range(257) if part * part * (1 + staleness) <= 256 * 256)


def late() -> dict[str, Any]:
    """A buffer: each update counts for a whole-numbered part of 256."""
    exponent, updates = 24, [(600, 0, [0.1, -64.0]), (30, 1, [1 / 3, 64.0]), (131_072, 9, [-0.7, 1e-6])]
    total = sum(examples for examples, _, _ in updates)
    rounded = [(n, tau, [float32(value) for value in values]) for n, tau, values in updates]
    sums = [
        sum(round(Fraction(values[i]) * 2**exponent) * n * share(tau) for n, tau, values in rounded)
        for i in range(2)
    ]
    return {
        "exponent": exponent,
        "updates": [{"examples": n, "staleness": tau, "values": exact(values)} for n, tau, values in rounded],
        "sums": exact(sums),
        "mean": exact([float(each) / float(2**exponent * 256 * total) for each in sums]),
    }


def counters() -> list[dict[str, Any]]:
    return [
        {"updates": exact(updates), "counter": "10", "next": str(10 - min(0, *updates))}
        for updates in ([-3, -7, -5], [0, 4, 9], [-(1 << 40), 0])
    ]


WEIGHTS = {"w": [1.0, -0.1, 16777216.0, 1e-8], "s": [0.5, -3.25], "n": [41]}
DELTAS = [
    {"w": [0.1, -1 / 3, 1e-9, -0.0], "s": [0.01, 1e-20], "n": [-7]},
    {"w": [-0.02, 1 / 7, 1.5, 2.0], "s": [-0.01, 3.0], "n": [-1]},
]


def moved(weights: dict[str, Any], mean: dict[str, Any], step: list[float]) -> dict[str, Any]:
    """w − step for the trainable, w − Δ for the rest: in float64, rounded once to the weight's dtype."""
    return {
        "w": [float32(w - d) for w, d in zip(weights["w"], step, strict=True)],
        "s": [float32(w - d) for w, d in zip(weights["s"], mean["s"], strict=True)],
        "n": [w - d for w, d in zip(weights["n"], mean["n"], strict=True)],
    }


def shown(values: dict[str, Any]) -> dict[str, Any]:
    return {name: exact(values[name]) for name in ROWS}


def averaging() -> dict[str, Any]:
    weights, steps = {**WEIGHTS, "w": [float32(w) for w in WEIGHTS["w"]]}, []
    for mean in DELTAS:
        weights = moved(weights, mean, mean["w"])
        steps.append({"mean": shown(mean), "weights": shown(weights)})
    return {"strategy": "fedavg", "settings": {}, "steps": steps}


def momentum(beta: float, rate: float, *, nesterov: bool) -> dict[str, Any]:
    """v ← βv + Δ, then w ← w − η(βv + Δ), or w − ηv without Nesterov."""
    weights, steps = {**WEIGHTS, "w": [float32(w) for w in WEIGHTS["w"]]}, []
    velocity = [0.0] * len(weights["w"])
    for mean in DELTAS:
        velocity = [beta * v + d for v, d in zip(velocity, mean["w"], strict=True)]
        ahead = [beta * v + d for v, d in zip(velocity, mean["w"], strict=True)] if nesterov else velocity
        weights = moved(weights, mean, [rate * d for d in ahead])
        steps.append({"mean": shown(mean), "weights": shown(weights), "velocity": exact(velocity)})
    settings = {"momentum": exact(beta), "learning_rate": exact(rate), "nesterov": nesterov}
    return {"strategy": "fedavgm", "settings": settings, "steps": steps}


def adam(rate: float, beta1: float, beta2: float, tau: float) -> dict[str, Any]:
    """m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)(Δ·Δ), w ← w − (ηm)/(√v + τ); v begins at τ·τ."""
    weights, steps = {**WEIGHTS, "w": [float32(w) for w in WEIGHTS["w"]]}, []
    first, second = [0.0] * len(weights["w"]), [tau * tau] * len(weights["w"])
    for mean in DELTAS:
        first = [beta1 * m + (1 - beta1) * d for m, d in zip(first, mean["w"], strict=True)]
        second = [beta2 * v + (1 - beta2) * (d * d) for v, d in zip(second, mean["w"], strict=True)]
        weights = moved(
            weights, mean, [rate * m / (math.sqrt(v) + tau) for m, v in zip(first, second, strict=True)]
        )
        moments = {"moment": exact(first), "second_moment": exact(second)}
        steps.append({"mean": shown(mean), "weights": shown(weights), **moments})
    settings = {"learning_rate": rate, "beta1": beta1, "beta2": beta2, "tau": tau}
    return {"strategy": "fedadam", "settings": {n: exact(v) for n, v in settings.items()}, "steps": steps}


def middles() -> list[dict[str, Any]]:
    """Of each coordinate's values in order, without as many at either end: their sum in order, divided."""
    vectors = []
    for rule, trim, values in (
        ("median", 0.0, [[0.1, 5.0], [-0.2, -1.0], [100.0, 0.25]]),
        ("median", 0.0, [[0.1, 5.0], [-0.2, -1.0], [100.0, 0.25], [0.3, 1 / 3]]),
        ("trimmed_mean", 0.2, [[0.1, 5.0], [-0.2, -1.0], [100.0, 0.25], [0.3, 1 / 3], [0.7, -64.0]]),
        ("trimmed_mean", 0.1, [[0.1, 5.0], [-0.2, -1.0], [100.0, 0.25]]),
    ):
        rounded = [[float32(value) for value in row] for row in values]
        count = len(rounded)
        cut = (count - 1) // 2 if rule == "median" else math.floor(trim * count)
        mean = []
        for column in zip(*rounded, strict=True):
            kept = sorted(column)[cut : count - cut]
            mean.append(sum(kept) / len(kept))
        vectors.append({"rule": rule, "trim": exact(trim), "updates": exact(rounded), "mean": exact(mean)})
    return vectors


def chains() -> list[dict[str, Any]]:
    """Each turn w ← w − Δ, and Δ of the mediator = first w − last w, rounded to float32 each time."""
    start = {"w": [float32(w) for w in WEIGHTS["w"]], "s": [float32(w) for w in WEIGHTS["s"]], "n": [41]}

    def less(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [x - y if name == "n" else float32(x - y) for x, y in zip(a[name], b[name], strict=True)]
            for name in ROWS
        }

    weights, turns = start, []
    for delta, examples in zip(DELTAS, (30, 12), strict=True):
        update = {name: [v if name == "n" else float32(v) for v in delta[name]] for name in ROWS}
        weights = less(weights, update)
        turns.append({"examples": examples, "update": shown(update), "weights": shown(weights)})
    update = less(start, weights)
    return [{"weights": shown(start), "turns": turns, "update": shown(update), "examples": 42}]


def sums() -> str:
    return document(
        {
            "precision": precisions(),
            "means": means(),
            "shares": [
                {"staleness": tau, "share": share(tau)}
                for tau in (0, 1, 2, 3, 4, 8, 9, 15, 16, 100, 255, 1000)
            ],
            "buffers": [late()],
            "middles": middles(),
            "counters": counters(),
            "weights": [shown({**WEIGHTS, "w": [float32(w) for w in WEIGHTS["w"]]})],
            "strategies": [
                averaging(),
                momentum(0.9, 1.0, nesterov=True),
                momentum(0.9, 0.3, nesterov=False),
                adam(0.01, 0.9, 0.99, 1e-3),
            ],
            "chains": chains(),
        }
    )
