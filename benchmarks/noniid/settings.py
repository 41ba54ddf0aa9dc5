"""What is compared: data, splits, strategies, and the budget that all of them share."""

from __future__ import annotations

from typing import Any

import msgspec

DATA = ("fashion", "cifar10")
SPLITS = ("alpha0_1", "alpha0", "longtail", "iid", "alpha100")
ALPHAS = {"alpha0": 0.0, "alpha0_1": 0.1, "alpha100": 100.0}
TAIL = 50
"""Examples of the largest class over those of the smallest, of the split ``longtail``."""
DIVERGENCE = 0.55
"""Mean KL divergence to uniform of the devices' labels before the tail is cut, as in Astraea's fleets."""
DEVICES = 100
DESCRIBED = 24
"""Images of a device that its descriptor is the mean of: all 500 would be an hour of MobileNetV2."""

GRID = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Learning rates. A strategy starts at one of them and moves to a neighbour while that is better."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"strategy": "fedprox", "proximal": 0.1},
    "fedavgm": {"strategy": "fedavgm", "momentum": 0.9},
    "fldg_l": {"selection": "grouped"},
    "astraea": {"chain": 5, "augmentation": 0.67},
    "full": {
        "strategy": "fedavgm",
        "momentum": 0.9,
        "selection": "grouped",
        "chain": 5,
        "augmentation": 0.67,
    },
}
"""``fedavgm_ccvr`` is ``fedavgm`` calibrated after its last round, and ``full`` is calibrated too."""
COLUMNS = ("fedavg", "fedprox", "fedavgm", "fldg_l", "astraea", "fedavgm_ccvr", "full")
STRONG = {"fedavg": {}, "fedavgm": {"strategy": "fedavgm", "momentum": 0.97}}
"""With five devices a round."""

FIRST_RATE = {
    "fedavg": {"alpha0": 0.03},
    "fedprox": {"alpha0": 0.03},
    "fldg_l": {"alpha0": 0.03},
    "astraea": {"alpha0": 0.03, "alpha0_1": 0.03},
    "fedavgm": {"alpha0": 0.003, "alpha0_1": 0.01, "iid": 0.03, "longtail": 0.03},
    "full": {"alpha0": 0.003, "alpha0_1": 0.01, "iid": 0.03, "longtail": 0.03},
}
"""Where the search begins; 0.1 for what is not named."""
FIRST_RATE_OF_FIVE = {"fedavg": 0.1, "fedavgm": 0.001}
SAME_RATE = {"alpha100": "iid"}
"""Splits that take the rates of another one."""

HEADLINES = (("longtail", "fedavg"), ("longtail", "astraea"), ("iid", "fedavg"), ("alpha0_1", "full"))
"""Cells of three seeds, beside the two with five devices a round."""
SEEDS = 3


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What every run may use: local steps of all devices together. Where no device trains more than its
    own examples, and so in all cells but the augmented ones, as many bytes go up and down."""

    batch: int = 50
    steps: dict[str, int]
    steps_of_five: dict[str, int]
    seeds: int = SEEDS
    search: bool = True


FULL = Budget(
    steps={"fashion": 14_400, "cifar10": 20_000}, steps_of_five={"fashion": 48_000, "cifar10": 75_000}
)
QUICK = Budget(steps={"fashion": 7_200}, steps_of_five={"fashion": 16_000}, seeds=1, search=False)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One training run. The same run gives the same figures, and is done once.

    Attributes:
        name: data, split, devices a round where they are not ten, strategy: for people.
        settings: of the :class:`edge_server.RunConfig`, but ``rounds``.
        steps: local steps in all, from which the rounds follow; 0 where ``settings`` has them.
        described: whether the result is calibrated, and on real features too.
    """

    name: str
    data: str
    split: str
    model: str = "small"
    devices: int = DEVICES
    seed: int = 0
    steps: int = 0
    settings: dict[str, Any] = {}


def run_of(
    data: str, split: str, strategy: str, lr: float, seed: int, budget: Budget, *, five: bool = False
) -> Run:
    """A run of the table, with ten devices a round or with five."""
    return Run(
        name=f"{data}.{split}{'.five' if five else ''}.{strategy}",
        data=data,
        split=split,
        seed=seed,
        steps=(budget.steps_of_five if five else budget.steps)[data],
        settings={
            "participants": 5 if five else 10,
            "batch_size": budget.batch,
            "lr": lr,
            **(STRONG if five else STRATEGIES)[strategy],
        },
    )
