"""Which device to compute on, and what it can do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from mpkit.arguments import check_kind

__all__ = ["as_device", "default_device", "describe"]


def default_device() -> torch.device:
    """The device of the lessons: `MPKIT_DEVICE` when set, else the first CUDA device, else the CPU.

    Raises:  ValueError if `MPKIT_DEVICE` names no device, or one that this machine lacks.
    """
    name = os.environ.get("MPKIT_DEVICE", "").strip()
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"MPKIT_DEVICE must name a device such as cpu, cuda or cuda:1, got {name!r}") from error
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"MPKIT_DEVICE={name} needs a CUDA device that this machine lacks "
                f"({torch.cuda.device_count()} found); unset it or set MPKIT_DEVICE=cpu"
            )
    elif device.type != "cpu":
        try:
            torch.ones(1, device=device).item()
        except Exception as error:  # each kind of device has its own for "not here", and meta holds no number
            raise ValueError(f"MPKIT_DEVICE={name} cannot compute here; unset it or set MPKIT_DEVICE=cpu") from error
    return device


def as_device(device: torch.device | str | int) -> torch.device:
    """A device, or what torch takes for the name of one.

    Raises:  TypeError for another kind; ValueError for what names no device.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be one such as cpu, cuda or cuda:1, got {device!r}") from error


def describe(device: torch.device | None = None) -> dict[str, str]:
    """What a measurement must state: device name and the versions of Python, torch and CUDA."""
    check_kind("device", device, torch.device, "a torch.device", optional=True)
    device = default_device() if device is None else device
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"{_cpu_name()}, {torch.get_num_threads()} thread(s)"
    cuda = str(torch.version.cuda or "none")
    return {"device": name, "python": platform.python_version(), "torch": torch.__version__, "cuda": cuda}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
