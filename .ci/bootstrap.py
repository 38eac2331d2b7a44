"""Sets mpkit up on a machine that has only Python: `python3 .ci/bootstrap.py {setup,lab,run} [...]`.

Makes `.venv`, installs mpkit with the versions of constraints.txt, then runs what was asked. Everything is done once:
a stamp in `.venv` remembers what was installed. Uses the standard library only, and no syntax newer than Python 3.6,
so that an old Python can still say that it is too old.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
OLDEST, NEWEST = (3, 11), (3, 13)
PIP_OPTIONS = ("--disable-pip-version-check", "--progress-bar=on")
QUIET = {"fetchNews": "false", "checkForUpdates": False}
EXTRAS = {"lab": "lab", "test": "test,course,site"}
LESSONS = "mpkit-lessons"  # the reader's own copy, so that the checkout stays as it is


def fail(sentence):
    """End with one plain sentence."""
    sys.exit("mpkit: " + sentence)


def say(sentence):
    """Progress, at once."""
    print("mpkit: " + sentence, flush=True)


def dotted(version):
    """(3, 11) -> "3.11"."""
    return ".".join(map(str, version))


def usable(version):
    """Whether a (major, minor) can run mpkit."""
    return OLDEST <= tuple(version) <= NEWEST


def with_a_usable_python():
    """Go on, or start again with a newer Python of this machine, or say which one is needed."""
    if usable(sys.version_info[:2]):
        return
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        other = shutil.which(f"python3.{minor}")
        works = other and subprocess.call([other, "-c", ""], stderr=subprocess.DEVNULL) == 0
        if works:
            os.execv(other, [other, *sys.argv])
    fail(
        f"Python {dotted(OLDEST)} to {dotted(NEWEST)} is needed, and {sys.executable} is "
        f"{dotted(sys.version_info[:2])}; install one of them, or name it, as in make lab PYTHON=python3.12"
    )


def stamp(extra):
    """What an installation depends on."""
    digest = hashlib.sha256(extra.encode() + sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def installed(extra):
    """Whether `.venv` already holds this, or more than this."""
    for more in (extra, "test"):
        try:
            with open(os.path.join(VENV, "mpkit-" + more)) as file:
                if file.read() == stamp(more):
                    return True
        except OSError:
            continue
    return False


def setup(extra):
    """Make `.venv` and install mpkit[extra] into it; nothing to do when that stands already."""
    if installed(extra):
        say("everything is installed already (.venv)")
        return
    python = os.path.join(BIN, "python")
    can = f"import sys, pip; sys.exit(not {OLDEST} <= sys.version_info[:2] <= {NEWEST})"
    if not os.path.exists(python) or subprocess.call([python, "-c", can], stderr=subprocess.DEVNULL):
        say(f"making .venv with Python {dotted(sys.version_info[:2])} ...")
        try:
            import ensurepip  # noqa: F401
            import venv
        except ImportError:
            fail(
                "this Python lacks the venv module; install it (on Debian and Ubuntu: apt install "
                f"python{dotted(sys.version_info[:2])}-venv) and run the same command again"
            )
        try:
            venv.create(VENV, with_pip=True, clear=True)
        except (OSError, subprocess.CalledProcessError) as error:  # nobody may write here, or the disk is full
            fail(f".venv could not be made in {ROOT} ({error}); copy mpkit to a folder that you may write in")
    say(f"installing torch, jupyterlab and the rest ({extra}); the first time this downloads a few hundred MB ...")
    start = time.time()
    done = subprocess.call(
        [python, "-m", "pip", "install", "--quiet", *PIP_OPTIONS, "-c", "constraints.txt", "-e", f".[{EXTRAS[extra]}]"],
        cwd=ROOT,
    )
    if done != 0:
        fail(
            "pip could not install the packages (its message stands above); without a network connection, connect "
            "and run the same command again, behind a proxy set HTTPS_PROXY, and for a mirror set PIP_INDEX_URL"
        )
    quiet_lab()
    with open(os.path.join(VENV, "mpkit-" + extra), "w") as file:
        file.write(stamp(extra))
    say(f"installed in {time.time() - start:.0f} s")


def quiet_lab():
    """JupyterLab asks nobody outside: no news, no look for updates, and no question about them."""
    folder = os.path.join(VENV, "share", "jupyter", "lab", "settings")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "overrides.json"), "w") as file:
        json.dump(
            {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}, file
        )


def free(port):
    """Whether nobody listens on the port of this machine."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def port_of(arguments):
    """The port to serve on: the one asked for, or the first free one from 8888."""
    for i, word in enumerate(arguments):
        if word.split("=", 1)[0] in ("--port", "--ServerApp.port"):  # and not --port-retries
            text = word.split("=", 1)[1] if "=" in word else [*arguments, ""][i + 1]
            if not re.match("[0-9]{1,5}$", text) or not 0 < int(text) < 65536:
                fail(f"--port needs a number from 1 to 65535, got {text!r}; try make lab ARGS=--port=8899")
            if not free(int(text)):
                other = int(text) + 1
                fail(f"port {text} is taken by another program; try another, as in make lab ARGS=--port={other}")
            return []
    port = next((p for p in range(8888, 8989) if free(p)), None)
    if port is None:
        fail("ports 8888 to 8988 are all taken; free one or name another, as in make lab ARGS=--port=9999")
    if port != 8888:
        say(f"port 8888 is taken, so this uses {port}")
    return [f"--port={port}"]


def lab(arguments):
    """JupyterLab at the first lesson of a copy without results, which `mpkit lab` makes."""
    port = port_of(arguments)  # before a set-up of minutes: a wrong one is told at once
    setup("lab")
    say(f"opening JupyterLab in {LESSONS}; stop it with Ctrl-C")
    return run([os.path.join(BIN, "python"), "-m", "mpkit", "lab", LESSONS, *port, *arguments])


def run(command):
    """Run in the repository with `.venv` first on the path; the exit status."""
    environment = dict(os.environ, PATH=BIN + os.pathsep + os.environ.get("PATH", ""), VIRTUAL_ENV=VENV)
    environment.pop("PYTHONHOME", None)
    try:
        return subprocess.call(command, cwd=ROOT, env=environment)
    except KeyboardInterrupt:
        return 130


def main():
    """The command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in ("setup", "lab", "run"):
        fail("usage: bootstrap.py setup [EXTRA] | lab [ARGUMENTS OF JUPYTER LAB] | run COMMAND ...")
    what, rest = sys.argv[1], sys.argv[2:]
    if what == "setup" and rest and rest[0] not in EXTRAS:
        fail(f"there is nothing called {rest[0]} to set up; name {' or '.join(EXTRAS)}")
    with_a_usable_python()
    if what == "lab":
        return lab(rest)
    setup(rest[0] if what == "setup" and rest else "test")
    return 0 if what == "setup" else run(rest)


if __name__ == "__main__":
    sys.exit(main())
