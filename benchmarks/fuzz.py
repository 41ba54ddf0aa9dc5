"""Malformed input for every decoder: nothing but the documented errors, no hang, no memory beyond a limit.

    python benchmarks/fuzz.py [--inputs N] [--seed S] [--engine auto|atheris|mutations] [--json PATH]

Each decoder of ``tests/hostile`` gets the same number of inputs, made of honest ones: the golden vectors, a
small bundle, and real bundles given by ``--bundle``. Half have mutated bytes; the others stay sound (a right
checksum, JSON, a safetensors header) around what is mutated. With atheris installed (``pip install atheris``)
inputs that reach new code are kept and mutated on; without it each is made of an honest one anew, and the
same seed makes the same inputs. A decoder runs in a process of its own, so that it is told when that dies.
What no input may do: raise another error than the decoder documents, take more than 1 s of the processor,
hang for 20 s, allocate more than 64 MB beyond its own length, end the process.

Figures: ``inputs``; ``crashes``, what an input did of that, each kind counted once; ``slowest_ms`` of the
processor; ``peak_mb``, the most that one input made a decoder allocate.

``--keep DIR`` writes an input of each kind of defect; ``--replay DECODER FILE`` reads one again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import mmap
import os
import platform
import random
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

if TYPE_CHECKING:
    from hostile.decoder import Decoder

_STATE = struct.Struct("<QQdQQ")
_LENGTH = struct.Struct("<Q")
ROOM = 1 << 24
"""Bytes of the longest input that a process which dies can leave behind."""
DIED = 3
"""Processes that may die for one decoder before it is left."""


class Shared:
    """What a decoder's process tells, as it goes: it may die at any input."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, ROOM)
        self.done, self.taken, self.slowest, self.peak = 0, 0, 0.0, 0

    def begin(self, data: bytes) -> None:
        """``data`` is read now."""
        _LENGTH.pack_into(self._memory, _STATE.size, len(data))
        kept = data[: ROOM - _STATE.size - _LENGTH.size]
        start = _STATE.size + _LENGTH.size
        self._memory[start : start + len(kept)] = kept

    def end(self, taken: bool, seconds: float, allocated: int) -> None:
        """It was read."""
        self.done += 1
        self.taken += taken
        self.slowest, self.peak = max(self.slowest, seconds), max(self.peak, allocated)
        _STATE.pack_into(self._memory, 0, self.done, self.taken, self.slowest, self.peak, 0)

    def look(self) -> bytes:
        """Read what the process has told; the input that it was at."""
        self.done, self.taken, self.slowest, self.peak, _ = _STATE.unpack_from(self._memory)
        (length,) = _LENGTH.unpack_from(self._memory, _STATE.size)
        start = _STATE.size + _LENGTH.size
        return bytes(self._memory[start : start + min(length, ROOM - start)])


@dataclass
class Told:
    """What became of one decoder's inputs."""

    name: str
    inputs: int = 0
    taken: int = 0
    slowest: float = 0.0
    peak: int = 0
    defects: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    options = _options()
    if options.replay:
        _replay(*options.replay)
        return
    engine = options.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "mutations"
    names = _ask(_names)
    names = [name for name in names if options.only is None or options.only in name]
    each, began, told = -(-options.inputs // len(names)), time.monotonic(), []
    print(f"{'decoder':21} {'inputs':>8} {'taken':>7} {'slowest ms':>11} {'peak MB':>8}  defects")
    for name in names:
        one = _fuzz(name, each, engine, options)
        told.append(one)
        print(
            f"{name:21} {one.inputs:8,} {one.taken / max(one.inputs, 1):7.1%} {one.slowest * 1e3:11.1f} "
            f"{one.peak / 1e6:8.1f}  {len(one.defects)}",
            flush=True,
        )
        for defect in one.defects:
            print(f"    {defect['where']}: {defect['defect']} ({defect['bytes']} bytes)")
    figures = {
        "inputs": sum(one.inputs for one in told),
        "crashes": sum(len(one.defects) for one in told),
        "slowest_ms": round(max(one.slowest for one in told) * 1e3, 1),
        "peak_mb": round(max(one.peak for one in told) / 1e6, 1),
    }
    print(figures)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for one in told:
            for number, defect in enumerate(one.defects):
                (options.keep / f"{one.name}-{number}").write_bytes(bytes.fromhex(defect["hex"]))
    if options.json:
        document = {
            "figures": figures,
            "engine": engine,
            "seed": options.seed,
            "seconds": round(time.monotonic() - began),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "decoders": {
                one.name: {
                    "inputs": one.inputs,
                    "taken": one.taken,
                    "slowest_ms": round(one.slowest * 1e3, 1),
                    "peak_mb": round(one.peak / 1e6, 1),
                    "defects": [{**defect, "hex": defect["hex"][:4000]} for defect in one.defects],
                }
                for one in told
            },
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(bool(figures["crashes"]))


def _fuzz(name: str, wanted: int, engine: str, options: argparse.Namespace) -> Told:
    """Run a decoder's inputs in processes of its own, until all are read or too many have died."""
    told, left, deaths = Told(name), wanted, 0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "defects"
        while left > 0 and deaths < DIED:
            shared = Shared()
            process = os.fork()
            if process == 0:
                tempfile.tempdir = folder
                work = _atheris if engine == "atheris" else _mutations
                _in_child(partial(work, name, told.inputs, left, shared, log, Path(folder), options))
            _, status = os.waitpid(process, 0)
            at = shared.look()
            told.inputs += shared.done
            told.taken += shared.taken
            told.slowest, told.peak = max(told.slowest, shared.slowest), max(told.peak, shared.peak)
            left = wanted - told.inputs
            if status and left > 0:
                deaths += 1
                told.inputs += 1
                how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
                told.defects.append(_defect(f"the process ends with {how}", f"{name} dies, {how}", at))
        if log.exists():
            told.defects += [json.loads(line) for line in log.read_text().splitlines()]
    kinds = {defect["where"]: defect for defect in reversed(told.defects)}
    told.defects = list(kinds.values())
    return told


def _in_child(work: Callable[[], None]) -> None:
    """Do ``work`` in a process that was just forked, and end it."""
    # Libraries in C complain of each input there.
    errors = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc(file=errors)
    finally:
        errors.flush()
        sys.stdout.flush()
        os._exit(status)


def _reader(decoder: Decoder, shared: Shared, log: Path) -> Callable[[bytes], None]:
    """What reads one input and notes what came of it."""
    from hostile.watch import watch

    warnings.simplefilter("ignore")
    for seed in decoder.seeds[:20]:
        # What is imported and made once is no input's fault.
        shared.begin(seed)
        with contextlib.suppress(Exception):
            decoder.read(seed)
    tracemalloc.start(1)
    seen: set[str] = set()

    def read(data: bytes) -> None:
        shared.begin(data)
        outcome = watch(decoder, data)
        if outcome.defect and outcome.where not in seen:
            seen.add(outcome.where)
            with log.open("a") as file:
                file.write(json.dumps(_defect(outcome.defect, outcome.where, data)) + "\n")
        shared.end(outcome.taken and not outcome.defect, outcome.seconds, outcome.allocated)

    return read


def _mutations(
    name: str, first: int, count: int, shared: Shared, log: Path, _folder: Path, options: argparse.Namespace
) -> None:
    """Inputs number ``first`` to ``first + count`` − 1: each has a seed of its own."""
    decoder = _decoder(name, options.bundle)
    read = _reader(decoder, shared, log)
    for number in range(first, first + count):
        read(_made(random.Random(f"{options.seed} {name} {number}"), decoder, None))


def _atheris(
    name: str, first: int, count: int, shared: Shared, log: Path, folder: Path, options: argparse.Namespace
) -> None:
    """Inputs that libFuzzer makes by what code they reach, with our mutations among its own."""
    import atheris

    with atheris.instrument_imports(include=["edge_sdk", "edge_server"], enable_loader_override=False):
        decoder = _decoder(name, options.bundle)
    read = _reader(decoder, shared, log)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(decoder.seeds):
        (corpus / f"seed{number}").write_bytes(seed)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        return _made(draw, decoder, data)[:max_size]

    arguments = [
        f"-runs={count}",
        f"-seed={options.seed + first + 1}",
        "-max_len=262144",
        "-rss_limit_mb=4096",
        "-timeout=60",
        "-verbosity=0",
        "-print_final_stats=0",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *arguments], read, custom_mutator=mutator, internal_libfuzzer=True)
    atheris.Fuzz()


def _made(draw: random.Random, decoder: Decoder, data: bytes | None) -> bytes:
    """A malformed input, of ``data`` or of an honest one."""
    from hostile.mutations import mutated

    honest = data if data is not None and draw.random() < 0.5 else draw.choice(decoder.seeds)
    if decoder.inside and draw.random() < 0.5:
        try:
            return draw.choice(decoder.inside)(draw, honest)
        except Exception:
            # It is for honest containers; libFuzzer's need not be any.
            if honest is not data:
                raise
    return mutated(draw, honest, draw.choice(decoder.seeds))


def _decoder(name: str, bundles: list[Path]) -> Decoder:
    from hostile.decoders import decoders

    (decoder,) = [decoder for decoder in decoders() if decoder.name == name]
    if name == "bundle":
        decoder.seeds.extend(path.read_bytes() for path in bundles)
    return decoder


def _names() -> list[str]:
    from hostile.decoders import decoders

    return [decoder.name for decoder in decoders()]


def _ask(question: Callable[[], list[str]]) -> list[str]:
    """Answer in another process: what is imported before a fork cannot be instrumented after it."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _in_child(lambda: os.write(writing, json.dumps(question()).encode()) and None)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    answer: list[str] = json.loads(text)
    return answer


def _replay(name: str, path: str) -> None:
    from hostile.watch import watch

    tracemalloc.start(10)
    decoder, data = _decoder(name, []), Path(path).read_bytes()
    outcome = watch(decoder, data)
    print(outcome)
    if outcome.defect:
        decoder.read(data)


def _defect(what: str, where: str, data: bytes) -> dict[str, Any]:
    return {"defect": what, "where": where, "bytes": len(data), "hex": data.hex()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, metavar="N", help="over all decoders")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--engine", choices=("auto", "atheris", "mutations"), default="auto")
    parser.add_argument("--only", metavar="NAME", help="decoders whose name holds this")
    parser.add_argument("--bundle", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--replay", nargs=2, metavar=("DECODER", "FILE"))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    # All that a process leaves behind when it dies lies there.
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as everything:
        tempfile.tempdir = everything
        main()
