"""The gradient of an embedding as a product with a one-hot matrix: every row is the sum of its uses."""

from __future__ import annotations

import torch
from torch import Tensor

from edge_export.errors import ExportError


def backward(
    grad_output: Tensor, indices: Tensor, rows: int, padding_index: int, scale_grad_by_freq: bool
) -> Tensor:
    """``aten.embedding_dense_backward``: [rows, E] from grad_output [..., E] and indices int64 [...].

    Raises:
        ExportError: gradients are to be scaled by how often an index occurs.
    """
    if scale_grad_by_freq:
        raise ExportError("an embedding with scale_grad_by_freq is not covered: leave it out")
    flat = indices.reshape(1, -1)
    used = torch.arange(rows, device=indices.device).unsqueeze(1) == flat
    if padding_index >= 0:
        used = used & (flat != padding_index)
    return used.to(grad_output.dtype) @ grad_output.reshape(-1, grad_output.shape[-1])
