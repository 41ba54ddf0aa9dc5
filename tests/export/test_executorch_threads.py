"""Several ExecuTorch programs and threads in one process: in a process of their own, as mistakes crash it."""

import os
import subprocess
import sys

import pytest
from torch import nn

from edge_export import export_bundle

OPEN = """
import sys, threading
import numpy as np
from edge_sdk import Bundle
from edge_sdk.runtime import open_runtime

bundle = Bundle.read(sys.argv[1])
images = np.random.default_rng(0).standard_normal((6, 1, 16, 16), np.float32)
def opened(threads):
    return open_runtime(bundle, "executorch", threads=threads)
"""
OTHER_THREADS = """
first = opened(threads=2)
before = first.predict(images)
second = opened(threads=1)
np.testing.assert_array_equal(second.predict(images), before)
for _ in range(20):
    np.testing.assert_array_equal(first.predict(images), before)
"""
AT_ONCE = """
expected = opened(threads=1).predict(images)
def work():
    for number in range(100):
        np.testing.assert_array_equal(opened(threads=1 + number % 2).predict(images), expected)
    done.append(True)
done = []
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
assert len(done) == 4
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    net = nn.Sequential(nn.Conv2d(1, 32, 5), nn.ReLU(), nn.Flatten(), nn.Linear(4608, 64), nn.Linear(64, 4))
    bundle = export_bundle(net, (1, 16, 16), runtimes=("executorch",), batch=6)
    bundle.write(path := tmp_path_factory.mktemp("bundle") / "net.edge")
    return path


@pytest.mark.parametrize("script", [OTHER_THREADS, AT_ONCE], ids=["other number of threads", "at once"])
def test_programs_of_one_process_leave_one_another_alone(path, script):
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}  # so that freed memory is not what it was
    ended = subprocess.run(
        [sys.executable, "-c", OPEN + script, path], env=environment, capture_output=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
