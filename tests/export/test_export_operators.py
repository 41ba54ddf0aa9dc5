"""Layers as the train program has them, in ONNX Runtime; the oracle is torch.optim.SGD."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_oracle import Run, assert_steps_like_torch, feed_of, random_batch

from edge_export import models
from edge_export.classifier import examine
from edge_export.onnx import lower
from edge_export.programs import all_programs


class Branches(nn.Module):
    """A concatenation, and a residual sum, of branches that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 3, padding=1)
        self.right = nn.Conv2d(3, 4, 5, padding=2)
        self.head = nn.Linear(8 * 9 * 7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.left(x), self.right(x)
        return self.head(torch.cat([left + right, right.tanh()], 1).flatten(1))


class Parts(nn.Module):
    """Maps taken apart: halves, unequal parts, every second or third pixel, and pixels moved around."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 7, 3, padding=1))
        self.head = nn.Linear(6 * 5 * 3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, others = self.maps(x).split([1, 6], 1)
        first, second = others.chunk(2, 1)
        first = functional.pad(first[:, :, ::2, -6::3] * one[:, :, 0:9:2, 1:-2:2], (1, 0))
        return self.head(torch.cat([first, second.roll((2, -1), (2, 3))[:, :, 2:7, 1:4]], 1).flatten(1))


class Moments(nn.Module):
    """Maps standardised by hand, next to their spread, their lengths and their largest pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(216, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maps(x)
        variance, mean = torch.var_mean(x, (2, 3), keepdim=True, correction=0)
        pieces = [(x - mean) / (variance + 0.1).sqrt(), functional.normalize(x)[:, 0], x.norm(dim=1, p=1)]
        spread = [x.std((2, 3)), x.var((1, 2, 3))[:, None], x.norm(dim=(1, 2, 3), p=torch.inf)[:, None]]
        return self.head(torch.cat([piece.flatten(1) for piece in pieces + spread], 1))


class ChannelsLast(nn.Module):
    """LayerNorm over channels, as ConvNeXt has it, whose maps keep the channels innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Patches(nn.Module):
    """Patches of an image as words with an embedding of their places, a layer that mixes them, the mean."""

    def __init__(self, mixing: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 3, stride=3)
        self.places = nn.Embedding(6, 16)
        self.mixing = mixing
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.patches(x).flatten(2).transpose(1, 2) + self.places(torch.arange(6))
        return self.head(self.mixing(words).mean(1))


class Attention(nn.Module):
    """Attention by PyTorch's function, each word to those before it."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention, self.options = nn.Linear(16, 48), options

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(words).reshape(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, **self.options)
        return mixed.transpose(1, 2).reshape(-1, 6, 16)


class Heads(nn.Module):
    """PyTorch's own module, whose weights are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mixed, weights = self.attention(words, words, words)
        return mixed + weights @ words


NETS = {
    "padding that wraps around, mirrors, repeats and is of zeros": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="circular"),
        nn.CircularPad2d((2, 0, 1, 0)),
        nn.Conv2d(4, 4, (1, 2)),
        nn.ZeroPad2d((1, -1, 0, 2)),
        nn.Conv2d(4, 5, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(5, 5, 3, padding=1, padding_mode="replicate"),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "overlapping and padded pools": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.AvgPool2d(2, stride=1, padding=1, count_include_pad=False),
        nn.GELU(),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Linear(36, 4),
    ),
    "group and layer norm, dilation, groups": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.Sigmoid(),
        nn.Conv2d(8, 16, 3, dilation=2, padding=2),
        nn.LayerNorm([16, 7, 5]),
        nn.Tanh(),
        nn.Conv2d(16, 8, (3, 2), groups=4, stride=(2, 1)),
        nn.Flatten(),
        nn.Linear(96, 4),
    ),
    "instance norm and maps of other sizes": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.InstanceNorm2d(6, affine=True),
        nn.Upsample(size=(5, 9), mode="bilinear"),
        nn.Conv2d(6, 4, 3),
        nn.Upsample(scale_factor=(1.5, 0.7), mode="bilinear", align_corners=True),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "ReLU6 and a pool that leaves a row": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU6(), nn.Flatten(), nn.Linear(72, 4)
    ),
    "adaptive max pools that divide the map and that do not": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.AdaptiveMaxPool2d((7, 4)),
        nn.Conv2d(4, 6, 2),
        nn.AdaptiveMaxPool2d((3, 1)),
        nn.Flatten(),
        nn.Linear(18, 4),
    ),
    "branches": Branches,
    "transposed convolution": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "convolutions, norms and pools over one axis": lambda: nn.Sequential(
        nn.Flatten(2),
        nn.Conv1d(3, 8, 5, padding="same"),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 3, stride=2, padding=1, dilation=2, groups=8),
        nn.AvgPool1d(3, 2, 1),
        nn.ConvTranspose1d(8, 6, 3, 2, 1, 1),
        nn.AdaptiveMaxPool1d(5),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "disjoint pools of an image with equal pixels": lambda: nn.Sequential(
        nn.Hardtanh(-0.1, 0.1), nn.Conv2d(3, 4, (4, 2)), nn.MaxPool2d((3, 2)), nn.Flatten(), nn.LazyLinear(4)
    ),
    "local response normalisation, as in the FedAvgM paper": lambda: models.CifarCNN(4, 3, 9),
    "the mean of maps whose channels are innermost": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3), ChannelsLast(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    ),
    "parts of maps": Parts,
    "moments and norms of maps": Moments,
    "attention to what came before": lambda: Patches(Attention(is_causal=True)),
    "attention with a mask": lambda: Patches(Attention(attn_mask=torch.eye(6).roll(1, 0) + torch.eye(6) > 0)),
    "attention with biases and a scale": lambda: Patches(Attention(attn_mask=torch.randn(6, 6), scale=0.3)),
    "heads of attention": lambda: Patches(Heads()),
    "transformer block": lambda: Patches(
        nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, activation="gelu", batch_first=True)
    ),
    **{
        f"{activation.__name__}": lambda activation=activation: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), activation(), nn.Flatten(), nn.Linear(252, 4)
        )
        for activation in (
            *(nn.Hardswish, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardsigmoid, nn.PReLU),
            *(nn.SELU, nn.CELU, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.ReLU, nn.ReLU6),
        )
    },
}


@pytest.mark.parametrize("name", NETS)
def test_a_step_is_a_step_of_torch_sgd(name, run: Run):
    torch.manual_seed(3)
    model = NETS[name]()
    model(torch.zeros(2, 3, 9, 9 if isinstance(model, models.CifarCNN) else 7))  # gives lazy layers a size
    shape = (3, 9, 9) if isinstance(model, models.CifarCNN) else (3, 9, 7)
    program = lower(all_programs(examine(model, shape))["train"])
    for samples in (1, 6):
        batch = random_batch(shape, 4, samples)
        assert_steps_like_torch(run(program, feed_of(model, batch)), model, batch)


def test_dropout_with_noise_is_masking_by_hand(run: Run):
    class Masked(nn.Module):
        """The same net with the mask that the noise stands for, at p = 0.25."""

        def __init__(self, net: nn.Sequential, noise: np.ndarray) -> None:
            super().__init__()
            self.net, self.mask = net, torch.tensor((noise >= 0.25) / 0.75)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = functional.silu(self.net[1](self.net[0](x)))
            return self.net[4](hidden * self.mask.to(x.dtype))

    torch.manual_seed(4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(63, 20), nn.SiLU(), nn.Dropout(0.25), nn.Linear(20, 4))
    noise = np.random.default_rng(0).random((5, 20), np.float32)
    batch = random_batch((1, 9, 7), 4, 5)
    program = lower(all_programs(examine(net, (1, 9, 7)))["train"])
    result = run(program, feed_of(net, batch | {"noise0": noise}))
    renamed = {name.replace("new/", "new/net."): value for name, value in result.items()}
    assert_steps_like_torch(renamed, Masked(net, noise), batch)


class Depth(nn.Module):
    """Whole branches dropped, as EfficientNet's libraries do it, at p = 0.25; or by a mask."""

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.maps, self.mask, self.head = nn.Conv2d(1, 4, 3), mask, nn.Linear(140, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maps(x)
        if self.training:
            drawn = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.75) if self.mask is None else self.mask
            x = x * drawn.to(x.dtype) / 0.75
        return self.head(x.flatten(1))


def test_stochastic_depth_with_noise_is_masking_by_hand(run: Run):
    torch.manual_seed(4)
    net = Depth()
    noise = np.linspace(0, 0.9, 5, dtype=np.float32).reshape(5, 1, 1, 1)
    batch = random_batch((1, 9, 7), 4, 5)
    program = lower(all_programs(examine(net, (1, 9, 7)))["train"])
    by_hand = Depth(torch.tensor(noise >= 0.25))
    by_hand.load_state_dict(net.state_dict())
    assert_steps_like_torch(run(program, feed_of(net, batch | {"noise0": noise})), by_hand, batch)


def test_dropout_of_channels_takes_one_number_a_channel():
    net = nn.Sequential(nn.Dropout2d(0.5), nn.Dropout(0.1), nn.Flatten(), nn.Linear(63, 4))
    assert examine(net, (1, 9, 7)).noise_shapes == ((1, 1, 1), (1, 9, 7))
