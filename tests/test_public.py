"""The public surface: what each package gives, and what importing the device part costs."""

import subprocess
import sys

import edge_export
import edge_sdk
import edge_server
import edge_simulation


def test_the_public_names_are_these():
    assert edge_sdk.__all__ == [
        "ArrayDataset", "BrokerError", "Bundle", "BundleError", "Credentials", "DataError", "EdgeClient",
        "EdgeError", "Engine", "Progress", "ProtocolError", "RefusedError", "RunError",
        "RuntimeUnavailableError", "Sharing", "TensorError", "Visit", "__version__",
    ]  # fmt: skip
    assert edge_server.__all__ == ["Evaluation", "Outcome", "RoundResult", "RunConfig", "Server"]
    assert edge_export.__all__ == [
        "DescriberSettings", "ExportError", "Pipeline", "export_bundle", "inference_onnx",
    ]  # fmt: skip
    assert edge_simulation.__all__ == [
        "EmbeddedBroker", "MosquittoBroker", "Partition", "Report", "RunResult", "Simulated", "TrainTest",
        "balanced",
        "client_imbalanced", "dirichlet_hsu", "dirichlet_per_class", "iid", "load_train_test", "long_tail",
        "natural", "plot_histogram", "quantity_skew", "shards", "simulate", "summary",
        "write_report",
    ]  # fmt: skip
    for package in (edge_sdk, edge_server, edge_export, edge_simulation):
        for name in package.__all__:
            assert getattr(package, name) is not None


def test_importing_the_device_part_brings_in_its_four_dependencies_only():
    script = (
        "import sys; before = set(sys.modules); from edge_sdk import EdgeClient; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    standard = sys.stdlib_module_names
    foreign = {name for name in loaded.stdout.split() if name not in standard and not name.startswith("_")}
    # msgspec looks for typing_extensions and does without.
    assert foreign <= {"edge_sdk", "numpy", "paho", "msgspec", "safetensors", "typing_extensions"}
