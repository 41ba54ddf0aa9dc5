"""Models that cannot be exported: each is refused in one line that names the thing."""

import pytest
import torch
from torch import Tensor, nn

from edge_export import ExportError, export_bundle

SHAPE = (3, 6, 6)


class Around(nn.Module):
    """A function between two layers that are fine."""

    def __init__(self, function) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 3, padding=1)
        self.middle = Function(function)
        self.head = nn.LazyLinear(4)
        self.head(torch.zeros(1, self.middle(torch.zeros(4, *SHAPE)).flatten(1).shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)).flatten(1))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def plain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(108, 4))


def shared() -> nn.Module:
    model = plain(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    model[1].weight = model[0].weight
    return model


def with_buffer() -> nn.Module:
    model = plain()
    model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    return model


def with_slash() -> nn.Module:
    model = plain()
    model[1].register_parameter("a/b", nn.Parameter(torch.zeros(1)))
    return model


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


REFUSED = {
    "float64": (lambda: plain().double(), r"1\.weight is float64: call model\.float\(\)"),
    "half": (lambda: plain().half(), r"1\.weight is float16"),
    "shared parameter": (shared, r"0\.weight and 1\.weight are one parameter under two names"),
    "integer buffer": (with_buffer, r"steps is a buffer of dtype int64"),
    "slash in a name": (with_slash, r"'1\.a/b' holds a '/'"),
    "cumulative BatchNorm": (
        lambda: plain(nn.BatchNorm2d(3, momentum=None)),
        r"0: BatchNorm with momentum=None",
    ),
    "BatchNorm by the batch alone": (
        lambda: plain(nn.BatchNorm2d(3, track_running_stats=False)),
        r"0: BatchNorm without running statistics predicts an image by the others",
    ),
    "InstanceNorm with running statistics": (
        lambda: plain(nn.InstanceNorm2d(3, track_running_stats=True)),
        r"0: InstanceNorm with running statistics is not covered",
    ),
    "dropout that keeps the variance": (lambda: plain(nn.AlphaDropout()), r"0: AlphaDropout is not covered"),
    "one mask for a whole batch": (
        lambda: Around(lambda x: x * torch.empty(1, 1, 1, 1).bernoulli_(0.5)),
        r"a random mask whose first axis is not the batch",
    ),
    "nothing to train": (frozen, "requires_grad=True"),
    "no linear layer": (lambda: nn.Sequential(nn.Conv2d(3, 4, 6), nn.Flatten()), "has no nn.Linear"),
    "softmax at the end": (
        lambda: nn.Sequential(plain(), nn.Softmax(1)),
        r"0\.1: something follows the last",
    ),
    "not [B, classes]": (lambda: nn.Conv2d(3, 4, 3), r"returns \[2, 4, 4, 4\] for 2 images"),
    "one class": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 1)), "of 2 classes or more"),
    "a tuple": (Pair, "returns a tuple"),
    "wrong input": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(7, 2)), "does not run on a 3x6x6 input"),
    "branch on values": (
        lambda: Around(lambda x: x if x.sum() > 0 else -x),
        "middle: .*branches on the values",
    ),
    "fixed batch": (
        lambda: Around(lambda x: x if x.shape[0] != 3 else x.reshape(3, -1)),
        "size of the batch",
    ),
    "convolution over three axes": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 3, 1), nn.Flatten(), nn.Linear(324, 4)),
        r"1: training a convolution over 3 axes \(aten\.convolution\)",
    ),
    "a frozen one, behind what trains": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 3, 1), nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 3, 1).requires_grad_(False)),
            *(nn.Flatten(), nn.Linear(324, 4)),
        ),
        "convolution over 3 axes",
    ),
    "attention with dropout": (
        lambda: nn.Sequential(
            nn.Flatten(2), nn.TransformerEncoderLayer(36, 2, dropout=0.1), nn.Flatten(), nn.Linear(108, 4)
        ),
        r"1\.self_attn: attention with dropout",
    ),
    "random numbers": (lambda: Around(lambda x: x + torch.randn_like(x)), "draws random numbers"),
    "uncovered operator": (lambda: Around(lambda x: x.cumsum(1)), r"middle: aten\.cumsum"),
    "random slopes": (lambda: plain(nn.RReLU()), "draws random numbers"),
    "mixes the batch": (lambda: Around(lambda x: x - x.mean(0)), "looks across the batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_in_one_line(case):
    make, message = REFUSED[case]
    with pytest.raises(ExportError, match=message) as caught:
        export_bundle(make(), SHAPE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 5}, "gives 4 logits"),
        ({"class_names": ["a", "b"]}, "2 names for 4 classes"),
        ({"mean": [0.5]}, "mean holds 1 values for 3 channels"),
        ({"std": [0.5, 0.5, 0.0]}, "std must be above 0"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, message):
    with pytest.raises(ExportError, match=message):
        export_bundle(plain(), SHAPE, **options)


@pytest.mark.parametrize("example", [torch.zeros(2, 3, 6, 6, dtype=torch.float64), (3, 6), (3, 0, 6)])
def test_an_example_that_is_no_float32_image_is_refused(example):
    with pytest.raises(ExportError, match="example input"):
        export_bundle(plain(), example)


def test_a_wrong_program_fails_verification_and_is_named(digits, digits_model):
    import onnx

    from edge_export.classifier import examine
    from edge_export.onnx import onnx_step
    from edge_export.verify import verify_train

    model = onnx.load_model_from_string(digits.program("onnx", "train"))
    node = next(node for node in model.graph.node if "new/conv2.bias" in node.output)
    node.output[:] = ["right"]
    model.graph.node.append(onnx.helper.make_node("Add", ["right", "loss_sum"], ["new/conv2.bias"]))
    with pytest.raises(ExportError, match=r"conv2\.bias after a step"):
        verify_train(examine(digits_model, (1, 8, 8)), onnx_step(model.SerializeToString()))
