"""Fixtures of several unit tests."""

from __future__ import annotations

import pytest

from mpkit.optimizers import base


@pytest.fixture(params=["on a device", "at hand"])
def flags(request, monkeypatch) -> str:
    """A CPU reads `found_inf`, which waits for nothing there; a device decides for itself, here played by the CPU."""
    if request.param == "on a device":
        monkeypatch.setattr(base, "AT_HAND", frozenset())
    return request.param
