"""The kernels that the notebook tests run on: as good as fresh ones, and gone when they should be."""

import os
import subprocess
import sys

import pytest
from forked_kernels import FOLDER, alive, offered
from support import ROOT, answer, printed, until

pytestmark = pytest.mark.skipif(not offered(), reason="processes cannot be forked here")


def test_it_is_a_fresh_process_in_the_folder_and_environment_of_its_asker(kernel, tmp_path):
    _, client = kernel
    assert answer(client, "torch") == "NameError"
    assert answer(client, "import os; os.getcwd()") == repr(str(tmp_path))
    assert answer(client, "os.environ['ONLY_HERE']") == "'seen'"
    assert answer(client, "import mpkit; mpkit.__file__") == repr(str(ROOT / "mpkit" / "__init__.py"))
    assert answer(client, "import matplotlib; 'inline' in matplotlib.get_backend()") == "True"
    assert answer(client, "import support") == "ModuleNotFoundError"
    assert answer(client, "import pandas; pandas.get_option('display.max_columns')") == "20"
    assert answer(client, "import sys; print('out'); print('err', file=sys.stderr)") == "out\n err"


def test_it_can_be_interrupted_and_ends_with_its_asker(kernel):
    manager, client = kernel
    process = int(answer(client, "import os; os.getpid()"))
    # one long sleep would be slept to its end if the signal came between the print and the call
    client.execute("import time; print('begun', flush=True)\nwhile True: time.sleep(0.05)")
    printed(client, "begun")
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=30)["content"]["ename"] == "KeyboardInterrupt"
    manager.provisioner.process.kill()
    until(lambda: not alive(process))


def test_the_server_ends_with_the_test_run():
    code = (
        "import sys, subprocess, time, os; sys.path.insert(0, sys.argv[1]); import forked_kernels as f\n"
        "path = f.offered()['JUPYTER_PATH']; f.connected(f.Path(path), os.getpid()).close(); print(path)"
    )
    environment = {k: v for k, v in os.environ.items() if k != FOLDER}
    command = [sys.executable, "-c", code, str(ROOT / "tests")]
    path = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert not os.path.exists(path)
    until(lambda: path not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout)
