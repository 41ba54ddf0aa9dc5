"""From programs to one ``.pte``: traced like the ONNX programs, exported again, and lowered to XNNPACK.

ExecuTorch's own way to train, the joint graph, keeps convolutions and poolings whose kernels for gradients
are slow or wrong. So the whole step is traced with its gradient to plain operators first. XNNPACK gets those
of them that it computes fast with operands that change from call to call; the rest is left to ExecuTorch's
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from executorch.backends.xnnpack.partition.config import generic_node_configs as configs
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.export import ExportedProgram, export

from edge_export import tracing
from edge_export.executorch.kernels import check_kernels
from edge_export.executorch.table import TABLE
from edge_export.programs import Program
from edge_export.tracer_errors import one_line_errors, quiet
from edge_export.training_step import Tensors
from edge_export.verify import Step
from edge_sdk.runtime.executorch import OpenProgram
from edge_sdk.tensors import Array

DELEGATED: list[Any] = [
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
]
"""What XNNPACK computes. With convolutions and linear layers, which it wants constant, it would take a bias
out of the parameters without a word."""


def trace(program: Program) -> ExportedProgram:
    """The program in operators that ExecuTorch has, for the batch of its examples.

    Raises:
        ExportError: it depends on values in its flow of control, or cannot be traced.
    """
    with quiet(), one_line_errors():
        graph, _ = tracing.trace(program, TABLE, any_batch=False)
        _drop_aliases(graph.graph)
        traced = fx.GraphModule(graph, fx_graph_cse(graph.graph))
        with torch.no_grad():
            exported = export(_Traced(traced), tuple(program.arguments.values()), strict=False)
        # Once more: the export brings back some of what was taken apart.
        decomposed: ExportedProgram = exported.run_decompositions(TABLE)
        return decomposed


def lower(methods: Mapping[str, ExportedProgram]) -> bytes:
    """Write traced programs as the methods of one ``.pte``.

    A method takes its program's arguments in their order and gives the results in theirs.

    Raises:
        ExportError: an operator has no kernel in ExecuTorch's libraries for devices.
    """
    with quiet(), one_line_errors():
        edge = to_edge_transform_and_lower(
            dict(methods),
            partitioner={name: [XnnpackPartitioner(configs=DELEGATED)] for name in methods},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return _written(edge)


def lower_frozen(method: str, network: nn.Module, x: Tensor) -> bytes:
    """Write a network whose weights stay as they are as a method of a ``.pte``, for batches like ``x``.

    Here XNNPACK gets all that it takes, convolutions too: their weights are constants. Where the network has
    eight bits it computes with them. The network is in eval mode.

    Raises:
        ExportError: an operator has no kernel in ExecuTorch's libraries for devices.
    """
    with quiet(), one_line_errors(), torch.no_grad():
        exported = export(network, (x,), strict=False)
        return _written(
            to_edge_transform_and_lower({method: exported}, partitioner={method: [XnnpackPartitioner()]})
        )


def _written(edge: Any) -> bytes:
    program = edge.to_executorch()
    check_kernels(program.executorch_program)
    return bytes(program.buffer)


def executorch_step(lowered: bytes, train: Program) -> Step:
    """The method ``train`` in ExecuTorch; one module for all calls, as on a device."""
    opened = OpenProgram(lowered, "train", threads=0)
    names = list(train.run(train.arguments))

    def step(arguments: Tensors) -> dict[str, Array]:
        results = opened.run("train", [arguments[name].contiguous() for name in train.arguments])
        return {name: result.numpy() for name, result in zip(names, results, strict=True)}

    return step


def _drop_aliases(graph: fx.Graph) -> None:
    """Take out what only tells autograd something: in a table of decompositions it would tell it lies."""
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class _Traced(nn.Module):
    """What ``torch.export`` takes."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__()
        # Not "graph", which is an attribute of what this becomes.
        self.traced = traced

    def forward(self, *tensors: Tensor) -> Any:
        return self.traced(*tensors)
