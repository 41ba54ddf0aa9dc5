"""A device's data in a few integers: the hash of its mean image feature (FLDG-L, arXiv 2201.12515).

Only the hash leaves the device. A frozen MobileNetV2 in the bundle gives each image's feature; the mean
over the local data is projected and cut into buckets, so that devices with similar data get near integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.data import Dataset, prepare
from edge_sdk.errors import BundleError, DataError, TensorError
from edge_sdk.examples import FROZEN_BATCH, Cancelled
from edge_sdk.manifest import Describe, Input
from edge_sdk.runtime import check_runtime
from edge_sdk.tensors import Array, TensorSpec, check, check_finite, decode

_LARGEST = 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class Hashing:
    """Locality-sensitive hashing for the Euclidean distance (Datar et al., SoCG 2004).

    Args:
        a: float64 [dims, features], drawn from the standard normal distribution, which is 2-stable.
        b: float64 [dims], drawn uniformly from [0, r).
        r: width of a bucket, above 0; 3.0 in FLDG.

    Raises:
        TensorError: the arrays do not fit one another, hold a NaN or an infinity, or r is not above 0.
    """

    a: Array
    b: Array
    r: float

    def __post_init__(self) -> None:
        shapes = {"a": self.a.shape, "b": self.a.shape[:1]}
        tensors = {"a": self.a, "b": self.b}
        check(tensors, [TensorSpec(name, shape, "float64") for name, shape in shapes.items()])
        check_finite(tensors)
        if self.a.ndim != 2:
            raise TensorError(f"the hash's tensor 'a' is {list(self.a.shape)}, expected [dims, features]")
        if not 0 < self.r < float("inf"):
            raise TensorError(f"the width r of a hash's buckets is {self.r}: it must be above 0 and finite")

    @classmethod
    def of(cls, bundle: Bundle) -> Hashing:
        """The hash that the devices of a run share.

        Raises:
            BundleError: the bundle holds no describe program, or its hash is of no use.
        """
        describe = _describe(bundle)
        try:
            tensors = decode(bundle.member(describe.lsh), describe.specs)
            return cls(tensors["a"], tensors["b"], float(tensors["r"]))
        except TensorError as error:
            raise BundleError(f"{describe.lsh}: {error}") from None

    def lsh(self, feature: Array) -> Array:
        """⌊(a·x + b) / r⌋, int64 [dims]: the same integers for the same float64 x on every machine.

        Products are rounded one by one and summed from the first feature to the last, in float64 and
        without fused multiply-add; then b is added, the sum divided by r, and the quotient floored.

        Args:
            feature: x, float64 [features].

        Raises:
            TensorError: x has another shape or dtype, or a quotient is not finite or beyond 2⁵³.
        """
        features = self.a.shape[1]
        if feature.shape != (features,) or feature.dtype != np.float64:
            raise TensorError(
                f"a feature is {feature.dtype} {list(feature.shape)}, expected float64 [{features}]"
            )
        total = np.zeros(len(self.b))
        with np.errstate(all="ignore"):
            # No dot product: BLAS sums in an order of its own, which differs between machines.
            for weights, value in zip(self.a.T, feature, strict=True):
                total += weights * value
            buckets = np.floor((total + self.b) / self.r)
        if not (np.abs(buckets) <= _LARGEST).all():
            raise TensorError("a feature is not finite, or too large for the hash's buckets")
        return buckets.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Describer:
    """Describes a device's data; :func:`open_describer` makes one.

    Attributes:
        hashing: from the mean feature to the descriptor.
    """

    hashing: Hashing
    _network: Callable[[Array], Array]
    _input: Input
    _classes: int

    def mean_feature(
        self, dataset: Dataset, indices: Array, *, cancelled: Callable[[], bool] = lambda: False
    ) -> Array:
        """Mean of the network's features over ``dataset[indices]``, float64 [features].

        Plain FLDG sends it as it is, which tells more of the data than :meth:`descriptor`. Summed in
        float64 in the order of ``indices``.

        Raises:
            DataError: no example, or one that does not fit the model.
            BundleError: the network gives no finite features of the declared size.
            Cancelled: ``cancelled()`` became true between two batches.
        """
        if len(indices) == 0:
            raise DataError("the data set holds no example to describe")
        total = np.zeros(self.hashing.a.shape[1])
        for start in range(0, len(indices), FROZEN_BATCH):
            if cancelled():
                raise Cancelled
            batch = indices[start : start + FROZEN_BATCH]
            images, _ = prepare(dataset, batch, self._input, self._classes)
            features = self._network(images)
            if features.shape != (len(images), len(total)) or not np.isfinite(features).all():
                raise BundleError("the bundle's describe program gives no finite features as declared")
            for feature in features:
                total += feature
        return total / len(indices)

    def descriptor(
        self, dataset: Dataset, indices: Array, *, cancelled: Callable[[], bool] = lambda: False
    ) -> Array:
        """Hash of :meth:`mean_feature`, int64 [dims]: what FLDG-L sends. Raises as that does."""
        return self.hashing.lsh(self.mean_feature(dataset, indices, cancelled=cancelled))


def open_describer(
    bundle: Bundle, name: str = "onnx", *, threads: int = 0, providers: Sequence[str] | None = None
) -> Describer:
    """Open the describe program of ``bundle`` in the runtime called ``name``.

    Args:
        bundle: exported with a describer.
        name: ``onnx`` or ``executorch``.
        threads: threads for one operator; 0 takes one for each physical core.
        providers: ONNX Runtime's execution providers in order of preference; the CPU by default.

    Raises:
        RuntimeUnavailableError: the runtime or a provider is not installed.
        BundleError: the bundle holds no describe program, or none for that runtime.
    """
    describe = _describe(bundle)
    check_runtime(name, providers)
    if name not in describe.programs:
        raise BundleError(f"the bundle {bundle.manifest.name!r} holds no describe program for {name}")
    program = bundle.member(describe.programs[name])
    channels, *_ = shape = bundle.manifest.input.image_shape
    shapes = shape, (describe.feature_size,)
    if name == "executorch":
        from edge_sdk.runtime import executorch

        network = executorch.open_frozen(program, "describe", *shapes, threads=threads)
    else:
        from edge_sdk.runtime import onnx

        network = onnx.open_frozen(program, "describe", *shapes, threads=threads, providers=providers)
    # The network normalises by itself: it gets whole images, in [0, 1].
    images = Input(shape, (0.0,) * channels, (1.0,) * channels)
    return Describer(Hashing.of(bundle), network, images, bundle.manifest.classes)


def _describe(bundle: Bundle) -> Describe:
    if bundle.manifest.describe is None:
        raise BundleError(
            f"the bundle {bundle.manifest.name!r} cannot describe data: export it with --describe"
        )
    return bundle.manifest.describe
