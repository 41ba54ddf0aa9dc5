"""Results of devices, as the server takes them in and what it does with them at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, get_args

import numpy as np

from edge_sdk.codec import Codec, Compression, unpack
from edge_sdk.description import check_description
from edge_sdk.errors import TensorError
from edge_sdk.manifest import Parameter
from edge_sdk.protocol.messages import Fact
from edge_sdk.statistics import Covariance, check_statistics, statistics_specs
from edge_sdk.tensors import check_finite, decode
from edge_sdk.tensors import encode as encode_tensors
from edge_sdk.update import check_update
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.aggregation import WeightedSum, bound_norm, plan_precision
from edge_server.calibration import pool, virtual_features
from edge_server.grouping import group
from edge_server.mediators import chains, multiples
from hostile.decoder import Decoder, vectors
from hostile.mutations import Draw, mutated_safetensors
from hostile.wire import MANIFEST

MOST = 1 << 17

_UPDATES = vectors("updates.json")
_PARAMETERS = tuple(
    Parameter(p["name"], tuple(p["shape"]), {"F32": "float32", "I64": "int64"}[p["dtype"]], p["rule"])
    for p in _UPDATES["parameters"]
)
_RULES = {p.name: p.rule for p in _PARAMETERS}
_BOUNDS = {"mean": 6, "statistic": 16, "counter": 40}


def _update(codec: Codec, compression: Compression) -> Callable[[bytes], None]:
    specs = [p.spec for p in _PARAMETERS]
    limit = sum(spec.nbytes for spec in specs) + SAFETENSORS_OVERHEAD
    precision = plan_precision(_BOUNDS, largest_total=MOST * 10)

    def read(data: bytes) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            update = unpack(data, _PARAMETERS, codec, compression, limit=limit)
        check_update(update, _RULES, _BOUNDS)
        update = bound_norm(update, _RULES, largest=10.0, over="clip")
        total = WeightedSum(specs, _RULES, precision)
        for _ in range(2):
            total.add(update, MOST)
        check_finite(total.mean().delta)
        assert all(np.abs(d).max() <= 2.0 ** _BOUNDS[_RULES[n]] for n, d in total.mean().delta.items())

    return read


def _updates(codec: str, compression: str) -> list[bytes]:
    return [
        bytes.fromhex(v["hex"])
        for name in ("read", "refused")
        for v in _UPDATES[name]
        if (v["codec"], v["compression"]) == (codec, compression)
    ]


def _in_frame(draw: Draw, data: bytes) -> bytes:
    """A sound zstd frame of a mutated file."""
    import zstandard

    with contextlib.suppress(zstandard.ZstdError):
        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 20)
    return zstandard.ZstdCompressor().compress(mutated_safetensors(draw, data))


_RANKS = {"full": 0, "diagonal": 0, "low_rank": 2}


def _statistics(covariance: Covariance) -> Callable[[bytes], None]:
    specs = statistics_specs(3, 4, covariance, _RANKS[covariance])

    def read(data: bytes) -> None:
        tensors = decode(data, specs)
        check_statistics(tensors, max_examples=MOST)
        if not tensors["count"].any():
            return
        honest = {
            name: tensor.astype(tensor.dtype) for name, tensor in _honest_statistics(covariance).items()
        }
        pooled = pool([honest, tensors, tensors], covariance=covariance)
        features, labels = virtual_features(pooled, per_class=2, balance="frequency", seed=0)
        assert np.isfinite(features).all(), "virtual features that are not finite"
        assert len(features) == len(labels)

    return read


def _honest_statistics(covariance: Covariance) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    specs = {s.name: s for s in statistics_specs(3, 4, covariance, _RANKS[covariance])}
    tensors = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
    tensors["count"][:] = [5, 1, 0]
    tensors["mean"][:2] = draw.standard_normal((2, 4))
    x = draw.standard_normal((5, 4))
    scatter = (x - x.mean(0)).T @ (x - x.mean(0))
    if covariance == "full":
        tensors["scatter"][0] = scatter[np.triu_indices(4)]
    else:
        tensors["scatter"][0] = np.diag(scatter)
    if covariance == "low_rank":
        tensors["factor"][0] = draw.standard_normal((2, 4))
    return tensors


def _description(data: bytes) -> None:
    told = check_description(data, get_args(Fact), MANIFEST, max_examples=MOST)
    for fact in {"descriptor", "feature"} & told.keys():
        group({"a": np.zeros_like(told[fact]), "b": told[fact]}, groups=2, seed=0)
    if "histogram" in told:
        wanted = multiples(told["histogram"] * 3, 0.67)
        assert all(multiple >= 1 for multiple in wanted.values())
        chains({"a": told["histogram"], "b": np.array([1, 0, 4])}, longest=2)


def _descriptions() -> list[bytes]:
    lists = vectors("statistics.json")
    told = {
        "histogram": np.array([5, 0, 7]),
        "descriptor": np.array([-1, 3]),
        "feature": np.array([0.1, -2.0, 0.0, 5.0]),
    }
    own = [encode_tensors(told), *(encode_tensors({name: tensor}) for name, tensor in told.items())]
    return own + [bytes.fromhex(v["hex"]) for v in lists["descriptions_read"] + lists["descriptions_refused"]]


def decoders() -> list[Decoder]:
    """Those of updates, statistics and descriptions; compressed ones need zstandard."""
    wrong, tensors = (TensorError,), (mutated_safetensors,)
    found = [
        Decoder(f"update_{codec}", _update(codec, "none"), _updates(codec, "none"), wrong, tensors)
        for codec in get_args(Codec)
    ]
    with contextlib.suppress(ImportError):
        import zstandard  # noqa: F401

        frames = _updates("fp32", "zstd")
        found.append(Decoder("compressed", _update("fp32", "zstd"), frames, wrong, (_in_frame,)))
    for covariance in get_args(Covariance):
        honest = [encode_tensors(_honest_statistics(covariance))]
        found.append(Decoder(f"statistics_{covariance}", _statistics(covariance), honest, wrong, tensors))
    return [*found, Decoder("description", _description, _descriptions(), wrong, tensors)]
