"""What is moved and when: how the ONNX file is written so that ONNX Runtime does it well."""

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

from edge_export.classifier import examine
from edge_export.onnx import lower
from edge_export.onnx_graph import OnnxGraph
from edge_export.programs import all_programs


class Turned(nn.Module):
    """Pixels in another order for a linear layer."""

    def __init__(self, axes: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes, self.sizes = axes, sizes
        self.head = nn.Linear(48, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.reshape(-1, *self.sizes).permute(0, *(axis + 1 for axis in self.axes))
        return self.head(turned.flatten(1))


@pytest.mark.parametrize("sizes", [(2, 3, 2, 4), (4, 1, 3, 4)])
@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_axes_are_permuted_in_moves_of_one_that_onnxruntime_does_in_blocks(axes, sizes):
    torch.manual_seed(0)
    model = Turned(axes, sizes)
    program = lower(all_programs(examine(model, (3, 4, 4)))["predict"])
    x = torch.randn(5, 3, 4, 4)
    session = ort.InferenceSession(program, providers=["CPUExecutionProvider"])
    weights = {f"weights/{name}": value.numpy() for name, value in model.state_dict().items()}
    (logits, *_) = session.run(None, {"x": x.numpy(), **weights})
    np.testing.assert_allclose(logits, model(x).detach().numpy(), atol=1e-5)
    nodes = onnx.load_model_from_string(program).graph.node
    assert all(in_blocks(list(node.attribute[0].ints)) for node in nodes if node.op_type == "Transpose")


def in_blocks(order: list[int]) -> bool:
    """Whether the innermost axis stays, or one run of axes alone changes its place."""
    starts = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1] + 1), len(order)]
    runs = [order[start:end] for start, end in itertools.pairwise(starts)]
    others = ([axis for run in runs if run != moved for axis in run] for moved in runs)
    return order[-1] == len(order) - 1 or any(rest == sorted(rest) for rest in others)


def test_onnxruntime_computes_a_mask_right_before_its_use(tmp_path):
    graph = OnnxGraph()
    negative = graph("Neg", "x")
    gradient = graph("Exp", graph("Sin", graph("Cos", negative)))
    mask = graph("HardSigmoid", negative, alpha=1e30, beta=0.0)
    example = torch.zeros(3, 4)
    model = graph.finish([("x", example, True)], [("y", graph("Mul", gradient, mask), example, True)])
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "run")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.ones((3, 4), np.float32)})
    events = json.loads(Path(session.end_profiling()).read_text())
    ran = [event["args"]["op_name"] for event in events if event["name"].endswith("_kernel_time")]
    assert ran == ["Neg", "Cos", "Sin", "Exp", "HardSigmoid", "Mul"]
