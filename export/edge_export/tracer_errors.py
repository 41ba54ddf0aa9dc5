"""What the tracer says and raises, in one line that a user can act on."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from edge_export.errors import ExportError
from edge_export.translator import OperatorError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise what the tracer raises as ExportError, or as OperatorError where it names an operator."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the tracer raises what it likes, over many lines
        chain = _chain(error)
        text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
        if re.search(r"data.?dependent|_local_scalar_dense|\.item\(\)|bool\(\)", text, re.IGNORECASE):
            raise ExportError(
                "the forward pass branches on the values of a tensor, which a fixed program cannot: "
                "use torch.where or a mask"
            ) from error
        if "Constraints violated" in text:
            raise ExportError(
                "the forward pass branches on the size of the batch, or fixes it: the programs take any size"
            ) from error
        if match := re.search(r"(?:aten|prims|torchvision)[.:]+\w+", _innermost_first(chain)):
            raise OperatorError(match[0].replace("::", ".")) from error
        raise ExportError(f"the model cannot be traced ({(text.strip().splitlines())[0][:200]})") from error


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _innermost_first(chain: list[BaseException]) -> str:
    return "\n".join(str(link) for link in reversed(chain))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the tracer's notes."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
