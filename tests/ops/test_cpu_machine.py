"""Which kernels run, on how many threads, and that threads come and go cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.ops.cpu import CpuOps, choose_isa, count_cores, runnable_isas
from tests.ops.conftest import get_cpu
from tests.ops.op_inputs import normal, quantized


def test_every_machine_runs_the_scalar_kernels():
    assert runnable_isas()[-1] == "scalar"


def test_the_variable_forces_a_variant(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "scalar")
    assert CpuOps(num_threads=1).isa == "scalar"
    monkeypatch.delenv("OCTAVO_ISA")
    assert CpuOps(num_threads=1).isa == runnable_isas()[0]


def test_a_variant_that_cannot_run_is_refused_with_the_ones_that_can(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA", "avx9")
    with pytest.raises(ConfigError, match=r"OCTAVO_ISA is 'avx9', but there is no such variant; use one of .*scalar"):
        choose_isa()


def test_hyper_threads_count_once(tmp_path):
    for cpu in os.sched_getaffinity(0):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0-127\n")
    assert count_cores(tmp_path) == 1


def test_many_instances_and_many_callers_share_a_machine():
    """Four Python threads on one instance, beside other instances: calls are served one after the other."""
    rng = np.random.default_rng(0)
    isa = runnable_isas()[0]
    shared = get_cpu(isa, 3)
    part, x = quantized(rng, 500, 128, 4), normal(rng, 40, 128)
    weight = shared.pack_weight([part])
    expected = shared.linear(x, weight)
    failures: list[int] = []

    def call(index: int) -> None:
        own = CpuOps(isa, 2)
        own_weight = own.pack_weight([part])
        for _ in range(50):
            if not np.array_equal(shared.linear(x, weight), expected):
                failures.append(index)
            if not np.array_equal(own.linear(x[:4], own_weight), expected[:4]):
                failures.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


def test_an_interpreter_with_live_threads_ends_cleanly():
    code = (
        "import numpy as np\n"
        "from octavo.ops.cpu import CpuOps\n"
        "kept = CpuOps(num_threads=4)\n"
        "w = kept.pack_weight([np.ones((4000, 64), np.float32)])\n"
        "assert kept.linear(np.ones((50, 64), np.float32), w)[49, 3999] == 64\n"
        "CpuOps(num_threads=3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_still_computes():
    """Helpers do not survive a fork; the caller does all the work itself, and its end waits for nobody."""
    code = (
        "import os\n"
        "import numpy as np\n"
        "from octavo.ops.cpu import CpuOps\n"
        "ops = CpuOps(num_threads=4)\n"
        "w = ops.pack_weight([np.ones((4000, 64), np.float32)])\n"
        "x = np.ones((50, 64), np.float32)\n"
        "ops.linear(x, w)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert ops.linear(x, w)[49, 3999] == 64\n"
        "    raise SystemExit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_idle_pool_uses_no_processor_time():
    """Processor time of a second of idling, which is measured, not waited for: helpers sleep, so it is nearly none."""
    code = (
        "import time\n"
        "import numpy as np\n"
        "from octavo.ops.cpu import CpuOps\n"
        "ops = CpuOps(num_threads=4)\n"
        "w = ops.pack_weight([np.ones((4000, 64), np.float32)])\n"
        "ops.linear(np.ones((50, 64), np.float32), w)\n"
        "time.sleep(0.1)\n"
        "before = time.process_time()\n"
        "time.sleep(1.0)\n"
        "print(time.process_time() - before < 0.05)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
