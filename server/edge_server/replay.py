"""Recompute every model of a run from its log and its kept updates, and compare the bits.

This shares no arithmetic with the coordinator: sums are Python integers, and each codec and each strategy
is written here once more from its definition. Calibration alone is shared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from edge_sdk.bundle import Bundle
from edge_sdk.errors import RunError
from edge_sdk.tensors import Array, Tensors, encode, sha256
from edge_server.config import RunConfig
from edge_server.feature_statistics import calibrated
from edge_server.rows import AcceptedResult, RoundRow, RunRow
from edge_server.store import Store

_Moments = tuple[Array, Array]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One round: the model that the run recorded and the one recomputed, as SHA-256."""

    round: int
    participants: int
    recorded: str
    recomputed: str

    @property
    def same(self) -> bool:
        """Whether the bits are the same."""
        return self.recorded == self.recomputed


def replay(store: Store, run: RunRow) -> Iterator[Replayed]:
    """Recompute the rounds of ``run`` one by one, from the first whose updates are kept.

    Raises:
        RunError: the run did not keep its updates.
    """
    if not run.config.keep_updates:
        raise RunError(f"run {run.id[:12]} did not keep its updates: serve with --keep-updates to replay")
    bundle = Bundle.read(store.blob(run.bundle))
    config: dict[str, Any] = msgspec.to_builtins(run.config)
    at_rest = (np.zeros(()), np.full((), config["tau"] * config["tau"]))
    weights, moments = bundle.weights, dict.fromkeys(bundle.weights, at_rest)
    begun = False
    for row in store.rounds(run.id):
        if row.status != "aggregated" or row.model_after is None:
            continue
        if not begun and run.config.forgets:
            if row.state_before is None:
                continue
            if row.round > 1:
                weights, moments = _before(store, row, row.state_before, moments)
        begun = True
        results = store.results(row)
        if row.kind == "statistics":
            # Statistics lead to virtual features by a seeded draw, which has no second definition.
            weights = calibrated(store, row, bundle, weights, run.config)
        else:
            updates = [(r, _update(bundle, run.config, store.blob(r.hash))) for r in results]
            if row.chains:
                mine = _mediators(row, weights, updates)
                shares = [1] * len(mine)
            else:
                mine = [(update, result.examples) for result, update in updates]
                shares = [_share(config, row.round - result.round) for result, _ in updates]
            weights, moments = _step(bundle, config, row, weights, moments, mine, shares)
        participants = len({result.device for result in results})
        yield Replayed(row.round, participants, row.model_after, sha256(encode(weights)))


def _before(
    store: Store, row: RoundRow, state: str, at_rest: dict[str, _Moments]
) -> tuple[Tensors, dict[str, _Moments]]:
    """The model and the strategy's moments before a round, as the run has recorded them."""
    slots = safetensors.numpy.load(store.blob(state))
    moments = {}
    for name, (first, second) in at_rest.items():
        first = slots.get(f"velocity/{name}", slots.get(f"moment/{name}", first))
        moments[name] = first, slots.get(f"second_moment/{name}", second)
    return safetensors.numpy.load(store.blob(row.model_before)), moments


def _sent(bundle: Bundle, config: RunConfig, data: bytes) -> Tensors:
    """An update as its codec is defined: halves are widened, bytes are multiplied by their scales."""
    if config.compression == "zstd":
        import zstandard

        data = zstandard.ZstdDecompressor().decompress(data)
    sent, update = safetensors.numpy.load(data), {}
    for parameter in bundle.manifest.parameters:
        tensor = sent[parameter.name]
        if parameter.rule == "mean" and config.codec == "int8":
            scales = sent[f"scale/{parameter.name}"]
            # A channel is an index of the first axis, where there are two or more.
            by_channel = (-1,) + (1,) * (tensor.ndim - 1) if tensor.ndim > 1 else ()
            tensor = tensor.astype(np.float32) * scales.reshape(by_channel)
        update[parameter.name] = np.asarray(tensor, parameter.dtype)
    return update


def _update(bundle: Bundle, config: RunConfig, data: bytes) -> Tensors:
    """What counts of an update: where it is too long, only its direction."""
    update = _sent(bundle, config, data)
    trained = [parameter.name for parameter in bundle.manifest.trainable]
    norm = math.sqrt(math.fsum(float((update[n].astype(np.float64) ** 2).sum()) for n in trained))
    if config.max_norm and norm > config.max_norm:
        shrunk = {n: update[n] * (config.max_norm / norm) for n in trained}
        update |= {n: np.asarray(tensor.astype(np.float32)) for n, tensor in shrunk.items()}
    return update


def _mediators(
    row: RoundRow, weights: Tensors, hops: list[tuple[AcceptedResult, Tensors]]
) -> list[tuple[Tensors, int]]:
    """Each chain as one update, weighted by the examples of its devices: w − (w − Δ₁ − Δ₂ …)."""
    updates = []
    for chain in row.chains:
        mine = [(result, update) for result, update in hops if result.device in chain]
        if not mine:
            continue
        end = weights
        for _, update in mine:
            end = {name: np.asarray(tensor - update[name]) for name, tensor in end.items()}
        delta = {name: tensor - end[name] for name, tensor in weights.items()}
        counts: dict[str, int] = {}
        for result, _ in mine:
            counts.setdefault(result.device, result.examples)
        updates.append((delta, sum(counts.values())))
    return updates


def _step(
    bundle: Bundle,
    config: dict[str, Any],
    row: RoundRow,
    weights: Tensors,
    moments: dict[str, _Moments],
    updates: list[tuple[Tensors, int]],
    shares: list[int],
) -> tuple[Tensors, dict[str, _Moments]]:
    new_weights, new_moments = {}, dict(moments)
    for parameter in bundle.manifest.parameters:
        name, rule = parameter.name, parameter.rule
        if rule == "counter":
            advances = [-update[name] for update, _ in updates]
            new_weights[name] = weights[name] + _advance(config, advances)
            continue
        if row.noise_seed is not None:
            delta = _noisy(bundle, config, row, name, [update[name] for update, _ in updates])
        elif config["aggregation"] == "mean":
            unit = _share(config, 0)
            delta = _mean([(update[name], n) for update, n in updates], shares, unit, row.exponents[rule])
        else:
            delta = _middle(config, [update[name] for update, _ in updates])
        step = delta
        if rule == "mean":
            step, new_moments[name] = _server_step(config, delta, moments[name])
        new_weights[name] = (weights[name].astype(np.float64) - step).astype(weights[name].dtype)
    return new_weights, new_moments


def _server_step(config: dict[str, Any], delta: Array, moments: _Moments) -> tuple[Array, _Moments]:
    """What is taken from a trainable tensor; ``momentum`` is FedAdam's β1."""
    first, second = moments
    rate, beta, beta2 = config["server_lr"], config["momentum"], config["beta2"]
    if config["strategy"] == "fedavgm":
        first = beta * first + delta
        ahead = beta * first + delta if config["nesterov"] else first
        return rate * ahead, (first, second)
    if config["strategy"] == "fedadam":
        first = beta * first + (1 - beta) * delta
        second = beta2 * second + (1 - beta2) * (delta * delta)
        return rate * first / (np.sqrt(second) + config["tau"]), (first, second)
    return delta, moments


def _advance(config: dict[str, Any], advances: list[Array]) -> Array:
    if config["aggregation"] == "mean":
        largest: Array = np.maximum.reduce([np.zeros_like(advances[0]), *advances])
        return largest
    middle: Array = np.sort(np.stack(advances), axis=0)[(len(advances) - 1) // 2]
    return np.asarray(middle)


def _noisy(bundle: Bundle, config: dict[str, Any], row: RoundRow, name: str, updates: list[Array]) -> Array:
    """(Σ round(Δ·2^e) + round(σ·g)) / (2^e · wanted), g by Box and Muller from SHAKE-256 of seed and name."""
    assert row.noise_seed is not None
    scale, shape = 2.0 ** row.exponents["mean"], updates[0].shape
    values = sum(math.prod(parameter.shape) for parameter in bundle.manifest.parameters)
    norm = config["max_norm"] * scale
    sigma = config["noise_multiplier"] * (norm * (1.0 + 2.0**-20) + math.sqrt(values))
    total = np.zeros(shape, object)
    for update in updates:
        total = total + np.rint(update.astype(np.float64) * scale).astype(object)
    words = hashlib.shake_256(row.noise_seed + name.encode()).digest(16 * total.size)
    draws = (np.frombuffer(words, "<u8") // np.uint64(2048)).astype(np.float64)
    first, second = draws[: total.size], draws[total.size :]
    root = np.sqrt(-2.0 * np.log((first + 1.0) / 2.0**53))
    normal = root * np.cos(second * (2.0 * math.pi / 2.0**53))
    total = total + np.rint(sigma * normal).astype(object).reshape(shape)
    return np.asarray(total.astype(np.float64) / (scale * row.wanted))


def _middle(config: dict[str, Any], updates: list[Array]) -> Array:
    """Each coordinate by itself: sorted, shortened at both ends, averaged."""
    rows = np.stack([update.reshape(-1) for update in updates]).astype(np.float64)
    count = len(rows)
    ends = (count - 1) // 2 if config["aggregation"] == "median" else int(config["trim"] * count)
    kept = np.sort(rows, axis=0)[ends : count - ends]
    return np.asarray(kept.mean(axis=0).reshape(updates[0].shape))


def _share(config: dict[str, Any], staleness: int) -> int:
    """What an update counts for: all, or in the buffered mode ⌊256/√(1 + τ)⌋ parts of 256."""
    return math.floor(256 / math.sqrt(1 + staleness)) if config["mode"] == "buffered" else 1


def _mean(updates: list[tuple[Array, int]], shares: list[int], unit: int, exponent: int) -> Array:
    """Σ share·n·round(Δ·2^e) in Python integers, divided once by 2^e·unit·Σ n."""
    total = np.zeros(updates[0][0].shape, object)
    for (delta, examples), share in zip(updates, shares, strict=True):
        weight = examples * share
        total = total + np.rint(np.ldexp(delta.astype(np.float64), exponent)).astype(object) * weight
    count = sum(examples for _, examples in updates)
    return np.asarray(total.astype(np.float64) / (2.0**exponent * unit * count))
