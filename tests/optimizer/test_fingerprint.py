"""Timings of two machines are never compared, and one machine stays itself."""

from __future__ import annotations

import os

from optimizer import fingerprint as module


def test_memory_that_grows_leaves_the_machine_what_it_is_and_other_cores_do_not(monkeypatch):
    first = module.fingerprint("cpu", "none")
    monkeypatch.setattr(module, "_memory", lambda: 1 << 50)
    grown = module.fingerprint("cpu", "none")
    assert grown["hash"] == first["hash"] and grown["now"]["memory_bytes"] == 1 << 50
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(977)))
    assert module.fingerprint("cpu", "none")["hash"] != first["hash"]
