"""A Chromium for tests of pages, and a server in a thread. Not for: what a test expects of a page."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def path() -> str:
    """The browser's executable; skips the test where there is none."""
    found = next((p for name in CHROMIUM if (p := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    return found


@contextmanager
def chromium() -> Iterator:
    """A headless browser (playwright's)."""
    pytest.importorskip("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path(), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(app, listener: socket.socket) -> Iterator[str]:
    """Serve an ASGI application from a thread; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
