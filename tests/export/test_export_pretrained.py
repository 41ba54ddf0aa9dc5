"""Where MobileNetV2's weights come from: files, a web server of our own, and what takes their place."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from edge_export import ExportError
from edge_export.models import MobileNetV2
from edge_export.pretrained import IMAGENET, SYMMETRIC, mobilenet_v2, random_mobilenet_v2


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    """A state dict as torchvision publishes it, with the classifier of ImageNet's 1,000 classes."""
    return MobileNetV2(1000).state_dict()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def features_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state.items() if n.startswith("features") and t.is_floating_point()}


def assert_holds(network: MobileNetV2, state: dict[str, torch.Tensor]) -> None:
    found = network.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in features_of(state).items())
    assert not network.training


def test_a_torch_file_with_a_classifier_is_read(tmp_path, published):
    torch.save(published, tmp_path / "w.pth")
    read = mobilenet_v2(tmp_path / "w.pth")
    assert_holds(read.network, published)
    assert (read.mean, read.std) == IMAGENET


@pytest.mark.parametrize(
    ("metadata", "normalisation"), [(None, IMAGENET), ({"source": "input is x / 127.5 - 1"}, SYMMETRIC)]
)
def test_safetensors_without_classifier_say_how_images_are_normalised(
    tmp_path, published, metadata, normalisation
):
    safetensors.torch.save_file(features_of(published), tmp_path / "w.safetensors", metadata)
    read = mobilenet_v2(tmp_path / "w.safetensors")
    assert_holds(read.network, published)
    assert (read.mean, read.std) == normalisation


class Code:
    """What a pickle runs when it is loaded: here, what makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_torch_file_is_not_run(tmp_path):
    torch.save({"features.0.0.weight": Code(tmp_path / "ran")}, tmp_path / "w.pth")
    with pytest.raises(ExportError, match=r"w\.pth: cannot be read as weights"):
        mobilenet_v2(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


def broken(name: str, state: dict[str, torch.Tensor], path: Path) -> None:
    state = dict(state)
    if name == "narrow":
        state = MobileNetV2(width=0.5).state_dict()
    elif name == "other names":
        state = {f"layer.{key}": tensor for key, tensor in state.items()}
    elif name == "not finite":
        state["features.0.0.weight"] = torch.full_like(state["features.0.0.weight"], torch.nan)
    torch.save([1, 2] if name == "a list" else state, path)
    if name == "cut":
        path.write_bytes(path.read_bytes()[:5_000])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("narrow", "not MobileNetV2 at width 1"),
        ("other names", "has no tensor features"),
        ("not finite", "NaN"),
        ("a list", "holds a list"),
        ("cut", "cannot be read"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path, published, name, message):
    broken(name, published, tmp_path / "w.pth")
    with pytest.raises(ExportError, match=message) as caught:
        mobilenet_v2(tmp_path / "w.pth")
    assert str(caught.value).count("\n") == 0


@pytest.fixture
def site(tmp_path, published) -> Iterator[tuple[http.server.HTTPServer, Path, str]]:
    """A server with one published file, the file, and the address of its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    torch.save(published, folder / "w")
    digest = hashlib.sha256((folder / "w").read_bytes()).hexdigest()
    file = (folder / "w").rename(folder / f"mobilenet_v2-{digest[:8]}.pth")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, file, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_published_weights_are_fetched_once(site, published):
    server, file, address = site
    for _ in range(2):
        assert_holds(mobilenet_v2(url=f"{address}/{file.name}").network, published)
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("there", "reason"), [(True, "SHA-256"), (False, "404")])
def test_weights_that_cannot_be_had_are_random_with_a_warning(site, there, reason):
    _, file, address = site
    if there:  # but not what its name says
        file.rename(file.with_name("mobilenet_v2-0123abcd.pth"))
    with pytest.warns(UserWarning, match=f"RANDOM weights.*{reason}"):
        made = mobilenet_v2(url=f"{address}/mobilenet_v2-0123abcd.pth", seed=3)
    assert_holds(made.network, random_mobilenet_v2(3).network.state_dict())


def test_a_site_that_does_not_answer_is_not_waited_for():
    with (
        http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as mute,
        pytest.warns(UserWarning, match="timed out"),
    ):
        mobilenet_v2(url=f"http://127.0.0.1:{mute.server_port}/w-01234567.pth", timeout=0.2)


def test_random_weights_are_seeded_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    first, again, other = (random_mobilenet_v2(seed, width=0.1).network.state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())
    assert not torch.equal(first["features.0.0.weight"], other["features.0.0.weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_random_features_are_of_the_size_that_the_hash_is_made_for():
    made = random_mobilenet_v2(0, width=0.35)
    images = torch.rand(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = made.network.embed(torch.nn.functional.interpolate(images * 2 - 1, size=(64, 64)))
    assert 0.1 < features.mean() < 10
    assert features.std(0).mean() > 0.05
