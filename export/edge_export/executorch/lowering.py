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
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.export import ExportedProgram, export

from edge_export import tracing
from edge_export.errors import ExportError
from edge_export.executorch.delegation import DELEGATED
from edge_export.executorch.kernels import check_kernels
from edge_export.executorch.table import LOWERED, RULES, TABLE
from edge_export.programs import Program
from edge_export.tracer_errors import one_line_errors, quiet
from edge_export.training_step import Tensors
from edge_export.verify import Step
from edge_sdk.runtime.executorch import OpenProgram
from edge_sdk.tensors import Array


def trace(program: Program) -> ExportedProgram:
    """The program in operators that ExecuTorch has, for the batch of its examples.

    Raises:
        ExportError: it depends on values in its flow of control, or cannot be traced.
    """
    with quiet(), one_line_errors():
        traced = plain_graph(program)
        with torch.no_grad():
            exported = export(_Traced(traced), tuple(program.arguments.values()), strict=False)
        # Once more: the export brings back some of what was taken apart.
        decomposed: ExportedProgram = exported.run_decompositions(LOWERED)
        _view_at_once(decomposed.graph)
        return decomposed


def plain_graph(program: Program) -> fx.GraphModule:
    """The program as a graph of the operators that the table leaves; raises what the tracer raises."""
    graph, _ = tracing.trace(program, TABLE, RULES, any_batch=False)
    _merge_constants(graph)
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


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
    # A step takes its arguments where they lie: copied into the program's memory, they would be there twice.
    planning = MemoryPlanningPass(alloc_graph_input=False)
    program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    check_kernels(program.executorch_program)
    return bytes(program.buffer)


def executorch_step(lowered: bytes, train: Program) -> Step:
    """The method ``train`` in ExecuTorch; one module for all calls, as on a device."""
    opened = OpenProgram(lowered, "train", threads=0)
    names = list(train.run(train.arguments))

    def step(arguments: Tensors) -> dict[str, Array]:
        try:
            results = opened.run("train", [arguments[name].contiguous() for name in train.arguments])
        except RuntimeError as error:
            raise ExportError(f"ExecuTorch cannot run the train program: {error}") from None
        return {name: result.numpy() for name, result in zip(names, results, strict=True)}

    return step


def _merge_constants(graph: fx.GraphModule) -> None:
    """Equal constants become one, so that what is made with them twice is made once."""
    known: list[tuple[fx.Node, Tensor]] = []
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        constant = getattr(graph, node.target)
        same = next((other for other, seen in known if _equal(seen, constant)), None)
        if same is None:
            known.append((node, constant))
        else:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _view_at_once(graph: fx.Graph) -> None:
    """Of one view after another leave the last: lowering takes as long as the square of the nodes."""
    view = torch.ops.aten.view.default
    for node in graph.nodes:
        while node.target is view and node.args[0].target is view:
            node.replace_input_with(node.args[0], node.args[0].args[0])
    graph.eliminate_dead_code()


class _Traced(nn.Module):
    """What ``torch.export`` takes."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__()
        # Not "graph", which is an attribute of what this becomes.
        self.traced = traced

    def forward(self, *tensors: Tensor) -> Any:
        return self.traced(*tensors)
