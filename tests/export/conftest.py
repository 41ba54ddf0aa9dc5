"""Exports shared by the tests, and the sessions that run them."""

from functools import cache

import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch_oracle import Arrays, Depthwise, Run

from edge_export import export_bundle
from edge_export.models import DigitsCNN
from edge_sdk.bundle import Bundle

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def run() -> Run:
    """Runs an ONNX program on the arrays that it takes of those given."""

    @cache
    def session(program: bytes) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        return ort.InferenceSession(program, options, providers=["CPUExecutionProvider"])

    def run_program(program: bytes, feed: Arrays) -> Arrays:
        opened = session(program)
        names = [output.name for output in opened.get_outputs()]
        fed = {value.name: feed[value.name] for value in opened.get_inputs()}
        return dict(zip(names, opened.run(names, fed), strict=True))

    return run_program


@pytest.fixture(scope="session")
def digits_model() -> nn.Module:
    torch.manual_seed(1)
    return DigitsCNN()


@pytest.fixture(scope="session")
def digits(digits_model: nn.Module) -> Bundle:
    return export_bundle(digits_model, (1, 8, 8), mean=[0.3], std=[0.4], name="digits")


@pytest.fixture(scope="session")
def depthwise_model() -> nn.Module:
    torch.manual_seed(2)
    return Depthwise()


@pytest.fixture(scope="session")
def depthwise(depthwise_model: nn.Module) -> Bundle:
    return export_bundle(depthwise_model, torch.zeros(2, 3, 13, 11))
