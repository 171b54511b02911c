"""Device files are held while engines come and go, and let go afterwards; without GPUs nothing happens."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from optimizer import awake as module
from optimizer.awake import awake


def _open() -> set[str]:
    found = set()
    for name in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found.add(str(name.readlink()))
    return found


@pytest.mark.parametrize(
    ("devices", "held"),
    [((), {"nvidia0", "nvidia1", "nvidia12"}), ((1,), {"nvidia1"}), ((0, 7), {"nvidia0"}), (None, set())],
)
def test_the_files_of_the_devices_are_held_and_let_go(tmp_path, monkeypatch, devices, held):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(module, "DEVICE_FILES", tmp_path)
    with pytest.raises(ZeroDivisionError), awake(devices):
        assert {path for path in _open() if path.startswith(str(tmp_path))} == {str(tmp_path / name) for name in held}
        raise ZeroDivisionError
    assert not any(path.startswith(str(tmp_path)) for path in _open())


def test_a_machine_without_gpus_has_nothing_to_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DEVICE_FILES", tmp_path)
    with awake(()):
        pass
