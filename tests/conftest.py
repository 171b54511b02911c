"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
_SHARED = REPO.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large reference data beside the checkout; tests that need it skip where it is absent."""
    if not _SHARED.is_dir():
        pytest.skip("reference data folder is not beside this checkout")
    return _SHARED


@pytest.fixture(scope="session")
def repo() -> Path:
    """The repository root."""
    return REPO
