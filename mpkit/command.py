"""The command `mpkit`: `mpkit SUBCOMMAND [ARGUMENTS]`. `mpkit --help` names the subcommands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from mpkit import __version__

# name -> (module:function, what it does); the function takes the arguments after the name and returns the exit status
COMMANDS: dict[str, tuple[str, str]] = {
    "lab": ("mpkit.lab:main", "copy the lessons into a folder and open JupyterLab there"),
    "check": ("mpkit.handin:main", "can a lab be handed in as it is?"),
    "info": ("mpkit.info:main", "device, versions, and what is installed"),
    "experiment": ("mpkit.experiment.command:main", "run a grid from a JSON file, or go on with it"),
    "bench": ("mpkit.bench.__main__:main", "measure what precision and boost cost on this machine"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; nothing of the others is imported.

    Args:    arguments: the words after `mpkit`; None takes those of the process.
    Returns: the exit status: 0, or 2 for an unknown subcommand, or the subcommand's own; 141, as a shell
             has it, where nobody reads any more what it prints (`mpkit info | head -1`).
    """
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would write the rest at its end
        return 141


def _run(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"mpkit {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] not in COMMANDS:
        print(f"mpkit: there is no {words[0]!r}; the subcommands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, function = COMMANDS[words[0]][0].split(":")
    status: int = getattr(import_module(module), function)(words[1:])
    return status


def usage() -> str:
    """What `mpkit --help` prints."""
    lines = "".join(f"  {name:10}  {text}\n" for name, (_, text) in COMMANDS.items())
    return f"usage: mpkit [--help] [--version] SUBCOMMAND [ARGUMENTS]\n\n{lines}\nmpkit SUBCOMMAND --help tells more."
