"""``edge-sdk export``: a model to a bundle, or a bundle to an inference-only ONNX file."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edge_export.errors import ExportError
from edge_export.progress import shown
from edge_sdk.bundle import Bundle
from edge_sdk.cli import Command
from edge_sdk.data import Dataset, load
from edge_sdk.errors import EdgeError
from edge_sdk.files import write_atomically
from edge_sdk.manifest import Input, Option, Pipeline
from edge_sdk.runtime import RUNTIMES

if TYPE_CHECKING:
    from torch import nn

    from edge_export.describe import DescriberSettings

_EXTRA = "pip install 'edge-sdk-fl[export]'"


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODULE:CALLABLE", help="gives the nn.Module to export")
    parser.add_argument(
        "--inference", type=Path, metavar="F.edge", help="write this bundle's model as plain ONNX"
    )
    parser.add_argument("--input", metavar="CxHxW", help="shape of one image, 1x28x28 say")
    parser.add_argument("--classes", type=int, metavar="N", help="number of classes")
    parser.add_argument("--weights", type=Path, metavar="F.safetensors", help="load these weights first")
    parser.add_argument(
        "--runtime", default="onnx", help="of onnx, executorch: what to export for (default: onnx)"
    )
    parser.add_argument(
        "--batch", type=int, default=32, metavar="N", help="examples in a step of ExecuTorch (default: 32)"
    )
    parser.add_argument("--name", help="of the bundle (default: the model's class name)")
    parser.add_argument("--mean", metavar="a,b,c", help="for each channel, of images in [0, 1] (default: 0)")
    parser.add_argument("--std", metavar="a,b,c", help="for each channel, of images in [0, 1] (default: 1)")
    parser.add_argument(
        "--crop-from", metavar="HxW", help="size of the data set's images, --input being cut out of them"
    )
    parser.add_argument("--flip", action="store_true", help="mirror half of the images in training")
    parser.add_argument("--standardise", action="store_true", help="each image: mean 0, deviation 1")
    parser.add_argument(
        "--options", default="", metavar="a,b", help="of momentum, proximal, clipping: what devices may use"
    )
    parser.add_argument(
        "--head-only", metavar="MODULE", help="what devices train, classifier say; the rest is frozen"
    )
    parser.add_argument(
        "--int8", type=Path, metavar="DATA", help="with --head-only: eight bits, calibrated by these images"
    )
    parser.add_argument("--describe", action="store_true", help="let devices be grouped by their data")
    parser.add_argument(
        "--describe-weights", metavar="PATH", help="of MobileNetV2 (default: torchvision's, from its site)"
    )
    parser.add_argument("--describe-dims", type=int, metavar="N", help="integers a descriptor (default: 32)")
    parser.add_argument("--describe-size", type=int, metavar="PX", help="pixels a side (default: 96)")
    parser.add_argument("--lsh-width", type=float, metavar="R", help="of the hash's buckets (default: 3.0)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")


def _run(options: argparse.Namespace) -> int:
    if (options.model is None) == (options.inference is None):
        raise EdgeError("give either MODULE:CALLABLE or --inference F.edge")
    try:
        if options.inference is not None:
            _write_inference(options.inference, options.output)
        else:
            _write_bundle(options)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {"torch", "onnx", "onnxruntime"}:
            raise
        raise EdgeError(f"edge-sdk export needs {error.name}, which is not installed: {_EXTRA}") from None
    return 0


def _write_inference(source: Path, output: Path) -> None:
    from edge_export.inference import inference_onnx

    data = inference_onnx(Bundle.read(source))
    write_atomically(output, data)
    print(f"{output}: {len(data)} bytes, input x in [0, 1], output logits")


def _write_bundle(options: argparse.Namespace) -> None:
    if options.input is None or options.classes is None:
        raise EdgeError("an export needs --input CxHxW and --classes N")
    runtimes = options.runtime.split(",")
    if not set(runtimes) <= set(RUNTIMES):
        raise EdgeError(f"--runtime {options.runtime}: take of {', '.join(RUNTIMES)}")
    shape = _shape(options.input)
    mean, std = _numbers("--mean", options.mean), _numbers("--std", options.std)
    pipeline = _pipeline(options, shape)

    from edge_export.bundle import export_bundle

    describe = _describer(options)
    if options.int8 is not None and options.head_only is None:
        raise EdgeError("--int8 is for a frozen part of the model: give --head-only MODULE too")

    model = _load_model(options.model)
    if options.weights is not None:
        _load_weights(model, options.weights)
    print(f"exporting {options.model}", file=sys.stderr)
    with shown():
        bundle = export_bundle(
            model,
            shape,
            classes=options.classes,
            name=options.name,
            mean=mean,
            std=std,
            pipeline=pipeline,
            head_only=options.head_only,
            calibration=_calibration(options, shape, pipeline),
            options=cast(list[Option], [option for option in options.options.split(",") if option]),
            describe=describe,
            runtimes=runtimes,
            batch=options.batch,
        )
    bundle.write(options.output)
    print(f"{options.output}: {bundle.manifest.name}, {len(bundle.data)} bytes, sha256 {bundle.sha256}")


def _pipeline(options: argparse.Namespace, shape: tuple[int, int, int]) -> Pipeline | None:
    if not (options.crop_from or options.flip or options.standardise):
        return None
    _, height, width = shape
    if options.crop_from is not None:
        try:
            height, width = (int(part) for part in options.crop_from.lower().split("x"))
        except ValueError:
            raise EdgeError(f"--crop-from {options.crop_from!r} is not HxW, 32x32 say") from None
    return Pipeline((height, width), flip=options.flip, standardise=options.standardise)


def _calibration(
    options: argparse.Namespace, shape: tuple[int, int, int], pipeline: Pipeline | None
) -> Dataset | None:
    if options.int8 is None:
        return None
    # Mean and deviation do not matter to how image files are read.
    return load(options.int8, input=Input(shape, (), (), pipeline))


def _describer(options: argparse.Namespace) -> DescriberSettings | None:
    from edge_export.describe import DescriberSettings

    given = {
        "weights": options.describe_weights,
        "dims": options.describe_dims,
        "size": options.describe_size,
        "width": options.lsh_width,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given and not options.describe:
        raise EdgeError("--describe-weights, -dims, -size and --lsh-width need --describe")
    return DescriberSettings(**given) if options.describe else None


def _load_model(target: str) -> nn.Module:
    from torch import nn

    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise EdgeError(f"{target!r} is not MODULE:CALLABLE, edge_export.models:DigitsCNN say")
    # The command lies in a bin folder; python -m would have the current one on its path.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise EdgeError(f"importing {module_name} failed: {error.name} is not installed") from None
        raise EdgeError(f"there is no module {module_name!r} in the current directory or installed") from None
    except Exception as error:  # whatever a user's module may raise
        raise EdgeError(f"importing {module_name} failed ({type(error).__name__}: {error})") from error
    made = getattr(module, attribute, None)
    if made is None:
        raise EdgeError(f"{module_name} has no {attribute!r}")
    if not isinstance(made, nn.Module) and callable(made):
        try:
            made = made()
        except Exception as error:  # whatever a user's function may raise
            raise EdgeError(f"{target}() failed ({type(error).__name__}: {error})") from error
    if not isinstance(made, nn.Module):
        raise EdgeError(f"{target} gives a {type(made).__name__}, not an nn.Module")
    return made


def _load_weights(model: nn.Module, path: Path) -> None:
    import safetensors
    import safetensors.torch

    try:
        model.load_state_dict(safetensors.torch.load_file(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise EdgeError(f"{path} cannot be read as safetensors ({error})") from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise EdgeError(f"{path} does not fit the model: {reason}") from None


def _shape(text: str) -> tuple[int, int, int]:
    try:
        channels, height, width = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise EdgeError(f"--input {text!r} is not CxHxW, 1x28x28 say") from None
    if min(channels, height, width) < 1:
        raise ExportError(f"--input {text}: each extent must be above 0")
    return channels, height, width


def _numbers(option: str, text: str | None) -> Sequence[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise EdgeError(f"{option} {text!r} is not numbers with commas, 0.5,0.5,0.5 say") from None


EXPORT = Command(
    help="turn a PyTorch model into a bundle, or a bundle into ONNX", configure=_configure, run=_run
)
