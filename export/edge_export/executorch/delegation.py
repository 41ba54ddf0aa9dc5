"""Which operators XNNPACK computes: those that it does fast with operands that change from call to call."""

from __future__ import annotations

from typing import Any

from executorch.backends.xnnpack.partition.config import generic_node_configs as configs

LARGE = 16_384
"""Numbers from which handing an operator over pays: it costs some time on the device, and more in lowering,
which goes over the whole program for each piece that is handed over."""


def _where_it_pays(config: Any) -> Any:
    class Large(config):  # type: ignore[misc]
        def check_constraints(self, node: Any, program: Any) -> bool:
            return _work(node) >= LARGE and bool(super().check_constraints(node, program))

    return Large


def _work(node: Any) -> int:
    """Numbers that an operator gives, and for each of them those that a product adds up."""
    depth = node.args[0].meta["val"].shape[2] if "bmm" in str(node.target) else 1
    return int(node.meta["val"].numel() * depth)


DELEGATED: list[Any] = [
    _where_it_pays(config)
    for config in (
        configs.AddConfig,
        configs.BMMConfig,
        configs.CeilConfig,
        configs.ClampConfig,
        configs.DivConfig,
        configs.ExpConfig,
        configs.HardtanhConfig,
        configs.LogConfig,
        configs.MaximumConfig,
        configs.MinimumConfig,
        configs.MulConfig,
        configs.NegConfig,
        configs.PermuteConfig,
        configs.ReLUConfig,
        configs.ReciprocalSquareRootConfig,
        configs.SigmoidConfig,
        configs.SquareRootConfig,
        configs.SubConfig,
        configs.TanhConfig,
    )
]
"""For the partitioner. With convolutions and linear layers, which XNNPACK wants constant, it would take a
bias out of the parameters without a word."""
