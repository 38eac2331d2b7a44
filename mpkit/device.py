"""Which device to compute on, and what it can do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

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
        if device.type != "cuda":
            torch.ones(1, device=device).item()
        elif (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there are {torch.cuda.device_count()} CUDA devices")
    except Exception as error:  # each kind of device has its own for "not here", and meta holds no number
        need = "a device that can compute here, such as cpu, cuda or cuda:1"
        raise ValueError(f"MPKIT_DEVICE must name {need}, got {name!r}; unset it or set it to cpu") from error
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
    device = default_device() if device is None else as_device(device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"{_cpu_name()}, {torch.get_num_threads()} thread(s)"
    cuda = str(torch.version.cuda or "none")
    return {"device": name, "python": platform.python_version(), "torch": torch.__version__, "cuda": cuda}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return named[1].strip() if named else platform.processor() or platform.machine()
