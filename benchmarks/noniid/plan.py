"""Which runs are to be done, in what order, and what has been done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

import msgspec

from noniid.cells import Result, key_of, perform
from noniid.settings import (
    FIRST_RATE,
    FIRST_RATE_OF_FIVE,
    GRID,
    HEADLINES,
    SAME_RATE,
    SPLITS,
    STRATEGIES,
    STRONG,
    Budget,
    Run,
    run_of,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy on one split."""

    data: str
    split: str
    strategy: str
    five: bool = False

    @property
    def name(self) -> str:
        """As in the figures."""
        return f"{self.data}.{self.split}{'.five' if self.five else ''}.{self.strategy}"

    @property
    def first_rate(self) -> float:
        """Where the search for a learning rate begins."""
        if self.five:
            return FIRST_RATE_OF_FIVE[self.strategy]
        return FIRST_RATE.get(self.strategy, {}).get(self.split, 0.1)

    def run(self, rate: float, seed: int, budget: Budget) -> Run:
        """One run of the cell."""
        return run_of(self.data, self.split, self.strategy, rate, seed, budget, five=self.five)


def cells(datasets: Iterable[str], *, quick: bool) -> list[Cell]:
    """All cells, the most telling first, so that a table that is not finished says something."""
    datasets = list(datasets)
    first = [Cell(data, "alpha0", strategy, five=True) for data in datasets for strategy in STRONG]
    first += [Cell(data, split, strategy) for split, strategy in HEADLINES for data in datasets]
    first += [Cell(data, "alpha0_1", strategy) for data in datasets for strategy in STRATEGIES]
    rest = [Cell(data, split, name) for data in datasets for split in SPLITS for name in STRATEGIES]
    return list(dict.fromkeys(first if quick else first + rest))


@dataclass(slots=True)
class Plan:
    """The cells of a table, the runs that they call for, and the results so far."""

    cells: list[Cell]
    budget: Budget
    results: dict[str, Result] = field(default_factory=dict)

    def wanted(self) -> Iterator[Run]:
        """Runs that are not done yet, the most important first."""
        for cell in self.cells:
            rate = self.next_rate(cell)
            if rate is not None:
                yield cell.run(rate, 0, self.budget)
            elif (best := self.rate(cell)) is not None and self._is_headline(cell):
                for seed in range(1, self.budget.seeds):
                    run = cell.run(best, seed, self.budget)
                    if key_of(run) not in self.results:
                        yield run

    def next_rate(self, cell: Cell) -> float | None:
        """The learning rate to try next; None when a neighbour on either side is no better than the best."""
        if cell.split in SAME_RATE:
            shared = self.rate(Cell(cell.data, SAME_RATE[cell.split], cell.strategy))
            return shared if shared is not None and self._get(cell, shared) is None else None
        if self._get(cell, cell.first_rate) is None:
            return cell.first_rate
        if not self.budget.search:
            return None
        best = GRID.index(self._best(cell))
        near = [GRID[i] for i in (best + 1, best - 1) if 0 <= i < len(GRID)]
        return next((rate for rate in near if self._get(cell, rate) is None), None)

    def rate(self, cell: Cell) -> float | None:
        """The cell's best rate; None while it is searched for."""
        if self.next_rate(cell) is not None:
            return None
        if cell.split in SAME_RATE:
            shared = self.rate(Cell(cell.data, SAME_RATE[cell.split], cell.strategy))
            return shared if shared is not None and self._get(cell, shared) else None
        return self._best(cell)

    def of(self, cell: Cell) -> list[Result]:
        """The cell's results at its best rate so far, by seed; empty if there are none."""
        rate = self.rate(cell) or (self._best(cell) if self.tried(cell) else None)
        if rate is None:
            return []
        return self._all(cell, rate)

    def is_done(self, cell: Cell) -> bool:
        """Whether the cell has its rate and its seeds."""
        count = self.budget.seeds if self._is_headline(cell) else 1
        return self.rate(cell) is not None and len(self.of(cell)) >= count

    def _is_headline(self, cell: Cell) -> bool:
        return cell.five or (cell.split, cell.strategy) in HEADLINES

    def tried(self, cell: Cell) -> dict[float, float]:
        """Accuracy by learning rate: the mean over the seeds that are done, of which the first comes first.

        A rate that is best with one seed and diverges with another is so given up for the next best.
        """
        found = {}
        for rate in GRID:
            results = self._all(cell, rate)
            if results and results[0].run.seed == 0:
                found[rate] = sum(result.accuracy for result in results) / len(results)
        return found

    def _best(self, cell: Cell) -> float:
        tried = self.tried(cell)
        return max(tried, key=lambda rate: tried[rate])

    def _all(self, cell: Cell, rate: float) -> list[Result]:
        seeds = self.budget.seeds if self._is_headline(cell) else 1
        keys = [key_of(cell.run(rate, seed, self.budget)) for seed in range(seeds)]
        return [self.results[key] for key in keys if key in self.results]

    def _get(self, cell: Cell, rate: float) -> Result | None:
        return self.results.get(key_of(cell.run(rate, 0, self.budget)))


def chosen(every: Iterable[Cell], pattern: str | None) -> list[Cell]:
    """The cells whose name fits ``pattern``."""
    return [cell for cell in every if pattern is None or fnmatchcase(cell.name, pattern)]


PUBLISHED = Path(__file__).parent.parent / "results" / "noniid.runs.jsonl"
"""The runs that the published table was made from: a run with the same settings is not done again."""


def read_results(cache: Path) -> dict[str, Result]:
    """What was done before, by key. A line that was cut off when its process was killed is left out."""
    found: dict[str, Result] = {}
    files = [path for path in (PUBLISHED, cache / "results.jsonl") if path.exists()]
    for line in (line for path in files for line in path.read_bytes().splitlines()):
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError:
            continue
        found[result.key] = result
    return found


def work(
    wanted: Callable[[], Iterable[Run]],
    results: dict[str, Result],
    *,
    cache: Path,
    data_dir: Path | None,
    workers: int,
    on_result: Callable[[Result], None],
) -> None:
    """Do all runs that are wanted, ``workers`` at a time, each in a process with one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running: dict[Future[Result], Run] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        while True:
            for run in wanted():
                if len(running) < workers and run not in running.values():
                    running[pool.submit(perform, run, cache, data_dir)] = run
            if not running:
                return
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                del running[future]
                result = future.result()
                results[result.key] = result
                with (cache / "results.jsonl").open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
                on_result(result)
