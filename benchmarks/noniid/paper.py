"""The papers' own settings."""

from __future__ import annotations

from noniid.settings import Run


def paper_runs() -> list[Run]:
    """Every run of every paper that its text tells the settings of, on CIFAR-10."""
    return [*_fedavgm(), *_ccvr(), *_astraea(), *_fldg()]


def _run(name: str, split: str, model: str, devices: int, **settings: object) -> Run:
    return Run(name=name, data="cifar10", split=split, model=model, devices=devices, settings=settings)


def _fedavgm() -> list[Run]:
    """Hsu et al., arXiv 1909.06335, section 4: 10,000 rounds, weight decay .004, the best η of each cell."""
    return [
        _run(
            f"fedavgm.{split}.E{epochs}.C{part}.beta{beta}.eta{lr}",
            split,
            "hsu",
            100,
            strategy="fedavgm",
            momentum=beta,
            rounds=10_000,
            batch_size=64,
            weight_decay=0.004,
            epochs=epochs,
            participants=part,
            lr=lr,
        )
        for split in ("alpha0", "alpha0_1", "alpha100")
        for epochs in (1, 5)
        for part in (0.05, 0.1, 0.2, 0.4)
        for beta in (0.0, 0.7, 0.9, 0.97, 0.99, 0.997)
        for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
    ]


def _ccvr() -> list[Run]:
    """Luo et al., arXiv 2106.05001, section 5: 10 clients, 100 rounds, 10 local epochs, M_c up to 2,000.

    The rate and the batch are in a table of the paper that is not at hand: our reading.
    """
    return [
        _run(
            f"ccvr.alpha{alpha}.Mc{count}",
            f"per_class{alpha}",
            "ccvr",
            10,
            rounds=100,
            participants=10,
            epochs=10,
            batch_size=64,
            lr=0.01,
            virtual_features=count,
        )
        for alpha in (0.5, 0.1, 0.05)
        for count in (50, 100, 500, 1000, 2000)
    ]


def _astraea() -> list[Run]:
    """Duan et al., arXiv 1907.01132, section IV: c and γ swept, α .67 and 1, batch 50; other data."""
    return [
        _run(
            f"astraea.c{count}.gamma{longest}.alpha{alpha}",
            "longtail",
            "hsu",
            100,
            rounds=250,
            participants=count,
            chain=longest,
            augmentation=alpha,
            batch_size=50,
            lr=0.01,
        )
        for count in (10, 20, 50, 100)
        for longest in (1, 5, 10, 20)
        for alpha in (0.0, 0.67, 1.0)
    ]


def _fldg() -> list[Run]:
    """FLDG, arXiv 2201.12515: 10 groups of 100 devices, η .01, batch 50, E 5, 300 rounds."""
    return [
        _run(
            f"fldg.{split}.{selection}",
            split,
            "hsu",
            100,
            rounds=300,
            participants=10,
            epochs=5,
            batch_size=50,
            lr=0.01,
            selection=selection,
        )
        for split in ("alpha0", "alpha0_1", "iid")
        for selection in ("random", "grouped")
    ]
