"""Kernels that start in a moment: one process imports what every notebook imports, and each kernel is a fork of it.

Importing torch and mpkit takes a processor longer than most lessons take. `offered()` makes a kernel specification
named python3 for the processes that this one starts; its program asks the server for a fork and lives as long as the
kernel. The first one starts the server, which ends with the test run. A notebook still has to import what it uses: a
name is no more in its namespace than in a fresh process. An interrupt reaches the kernel as a message.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__)
IMPORTED = (
    *("torch", "torch._dynamo", "numpy", "pandas", "matplotlib.figure", "ipywidgets", "anywidget"),
    *("IPython.core.interactiveshell", "ipykernel.kernelapp", "ipykernel.ipkernel"),
)
FOLDER = "MPKIT_FORKED_KERNELS"  # the environment variable that names where the socket is


def offered() -> dict[str, str]:
    """Environment variables with which Jupyter's programs find these kernels; {} where a process cannot be forked."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # a Mac's own libraries do not survive a fork
        return {}
    if FOLDER not in os.environ:  # the processes of one test run share a server
        folder = Path(tempfile.mkdtemp(prefix="kernels"))
        spec = folder / "kernels" / "python3"
        spec.mkdir(parents=True)
        argv = [sys.executable, "-S", str(HERE), str(folder), str(os.getpid()), "{connection_file}"]
        named = {"display_name": "Python 3 (ipykernel)", "language": "python", "interrupt_mode": "message"}
        (spec / "kernel.json").write_text(json.dumps({"argv": argv, **named}))
        os.environ[FOLDER] = str(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"JUPYTER_PATH": os.environ[FOLDER]}


# the program of the specification: it needs no package, so it starts in a moment


def ask(folder: Path, owner: int, connection_file: str) -> None:
    """Have a kernel forked with this process's streams, folder and environment; return when it has ended."""
    with connected(folder, owner) as sock:
        job = {"connection_file": connection_file, "cwd": os.getcwd(), "env": dict(os.environ)}
        text = json.dumps(job).encode()
        socket.send_fds(sock, [len(text).to_bytes(8, "big")], [0, 1, 2])
        sock.sendall(text)
        sock.recv(1)  # nothing ever comes: the end of the kernel closes the other side


def connected(folder: Path, owner: int) -> socket.socket:
    """A connection to the server of `folder`, which is started if nobody has done so."""
    import fcntl

    address = str(folder / "socket")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(address):
            command = [sys.executable, str(HERE), str(folder), str(owner)]
            with open(folder / "log", "ab") as log:
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        for _ in range(1200):
            sock = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                sock.connect(address)
                return sock
            sock.close()
            time.sleep(0.05)
    raise SystemExit("the server of kernels did not start: " + (folder / "log").read_text()[-2000:])


# the server


def serve(folder: Path, owner: int) -> None:
    """Fork a kernel for each connection until the process `owner` has ended."""
    import gc
    import signal

    import_all()
    gc.freeze()  # the garbage collector of a fork need not touch, and so copy, what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a kernel here
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen(64)
        listening.settimeout(1.0)
        while alive(owner):
            with suppress(TimeoutError):
                sock, _ = listening.accept()
                if os.fork() == 0:
                    listening.close()
                    run(sock)
                sock.close()


def import_all() -> None:
    """What notebooks import. Nothing here starts a thread: it would be missing in a fork."""
    import importlib

    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it
    import pandas

    pandas.set_option("display.max_columns", 20)  # at its import pandas asks whether it is in a kernel
    for name in IMPORTED:
        importlib.import_module(name)
    for path in sorted((HERE.parents[1] / "mpkit" / "lessons").glob("[a-z]*.py")):
        importlib.import_module(f"mpkit.lessons.{path.stem}")
    sys.path.remove(str(HERE.parent))  # a notebook sees no module of the tests


def run(sock: socket.socket) -> None:
    """Be the kernel that was asked for."""
    import signal
    import threading

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sock.settimeout(None)
    head, streams, _, _ = socket.recv_fds(sock, 8, 3)
    with sock.makefile("rb") as file:
        job = json.loads(file.read(int.from_bytes(head, "big")))
    for mine, given in enumerate(streams):
        os.dup2(given, mine)
        os.close(given)
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    tempfile.tempdir = None  # the server's is of the one who started it
    os.environ.pop("JPY_PARENT_PID", None)  # the server is the parent; the asker's end is seen below

    def end_with_the_asker() -> None:
        with suppress(OSError):
            sock.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_the_asker, daemon=True).start()
    from ipykernel.kernelapp import launch_new_instance

    sys.argv = ["ipykernel_launcher", "-f", job["connection_file"]]
    launch_new_instance()
    os._exit(0)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    # what an asker adds to the command, a level of its log say, is no matter here
    (ask if len(sys.argv) > 3 else serve)(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
