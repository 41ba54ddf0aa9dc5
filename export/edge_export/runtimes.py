"""A bundle's programs for each runtime: lowered, and held against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import ModuleType
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from edge_export.classifier import Classifier
from edge_export.errors import ExportError
from edge_export.onnx import lower, onnx_step
from edge_export.programs import all_programs
from edge_export.progress import progress
from edge_export.provenance import module_of, running_modules
from edge_export.translator import OperatorError
from edge_export.verify import verify_train
from edge_sdk.examples import FROZEN_BATCH
from edge_sdk.manifest import Option, Programs
from edge_sdk.tensors import Array

_P = TypeVar("_P")
_T = TypeVar("_T")
Exported: TypeAlias = tuple[Programs, dict[str, bytes]]
"""What the manifest says of a runtime, and the members that it names."""

ONNX = Programs(
    train="onnx/train.onnx",
    evaluate="onnx/evaluate.onnx",
    predict="onnx/predict.onnx",
    embed="onnx/embed.onnx",
)
EXECUTORCH = "executorch/programs.pte"


def for_onnx(classifier: Classifier, options: Collection[Option], seed: int) -> Exported:
    """Programs for ONNX Runtime, for batches of any size; ExportError if they are not as PyTorch."""
    members = {}
    for name, program in all_programs(classifier, options).items():
        progress.info("ONNX: %s", name)
        members[getattr(ONNX, name)] = _naming(classifier, lower, program)
    progress.info("ONNX: a step is held against PyTorch")
    verify_train(classifier, onnx_step(members[ONNX.train]), seed, options)
    return ONNX, members


def for_executorch(classifier: Classifier, options: Collection[Option], seed: int, batch: int) -> Exported:
    """Programs for ExecuTorch, for ``batch`` examples.

    Raises:
        ExportError: ExecuTorch is not installed, the batch is empty, an operator has no kernel, or a second
            batch does not give what PyTorch gives.
    """
    if batch < 1:
        raise ExportError(f"ExecuTorch programs for {batch} examples a batch: give 1 or more")
    lowering = _executorch()
    made, traced = all_programs(classifier, options, batch), {}
    for name, program in made.items():
        progress.info("ExecuTorch: %s", name)
        traced[name] = _naming(classifier, lowering.trace, program)
    progress.info("ExecuTorch: all four are lowered, which takes minutes for a deep network")
    lowered = _naming(classifier, lowering.lower, traced)
    progress.info("ExecuTorch: two steps are held against PyTorch")
    step = lowering.executorch_step(lowered, made["train"])
    # What is wrong in a kernel may show in the second call only.
    verify_train(classifier, step, seed, options, batches=((batch, 0), (batch, batch // 3)))
    return Programs(EXECUTORCH, EXECUTORCH, EXECUTORCH, EXECUTORCH), {EXECUTORCH: lowered}


def frozen_executorch(
    method: str, network: nn.Module, takes: tuple[int, ...], gives: tuple[int, ...]
) -> tuple[bytes, Callable[[Array], Array]]:
    """A network whose weights stay as they are, as a program for ExecuTorch with one method.

    Args:
        method: by which devices call it.
        network: in eval mode, from one tensor to one.
        takes: shape of one image; a batch has ``FROZEN_BATCH`` of them.
        gives: shape of its features.

    Returns:
        The program, and what runs it.
    """
    lowered: bytes = _executorch().lower_frozen(method, network, torch.zeros(FROZEN_BATCH, *takes))
    from edge_sdk.runtime.executorch import open_frozen

    return lowered, open_frozen(lowered, method, takes, gives)


def _executorch() -> ModuleType:
    try:
        from edge_export.executorch import lowering
    except ImportError as error:
        raise ExportError(
            f"ExecuTorch cannot be imported ({error}): pip install 'edge-sdk-fl[export,executorch]'"
        ) from None
    return lowering


def _naming(classifier: Classifier, make: Callable[[_P], _T], program: _P) -> _T:
    """What ``make`` gives for ``program``; its errors say in which module they arise."""
    with running_modules(classifier.model) as stack:
        try:
            return make(program)
        except OperatorError as error:
            path, cause = module_of(classifier, error.operator), error
        except ExportError as error:
            path, cause = stack[-1] if stack else None, error  # type: ignore[assignment]
    raise ExportError(f"{path}: {cause}" if path else str(cause)) from cause
