"""Start an engine's module inside the sandbox, from the candidate's own source files.

Run as `python -I -B launcher.py MODULE [ARGS...]` with the candidate's root as working directory. Puts that
root first on `sys.path`, lets only `.py` source be loaded from it (no stale or planted `.pyc`, no `.so`),
switches on the in-process probes named in HOTLOOP_PROBES, and runs MODULE as `__main__`.

Not for: judging anything. It shares a process with the candidate, so nothing it says is believed. It must
not import anything of ours: inside the sandbox there is nothing of ours but this file.
"""

import importlib.machinery
import os
import runpy
import sys

PROBES = ("nan_fill",)


class SourceOnly(importlib.machinery.SourceFileLoader):
    """Compiles the source every time: byte code next to it is never read."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def source_hook(root):
    """A path hook that serves directories below `root` and leaves all others to the usual machinery."""
    finder = importlib.machinery.FileFinder.path_hook((SourceOnly, importlib.machinery.SOURCE_SUFFIXES))

    def hook(path):
        real = os.path.realpath(path)
        if real != root and not real.startswith(root + os.sep):
            raise ImportError(f"{path} is not below {root}")
        return finder(path)

    return hook


def fill_fresh_memory_with_nan():
    """Uninitialised tensors hold NaN (floats) or the largest value (integers): reads before writes show."""
    import torch

    setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010 (unknown to type checkers)
    torch.use_deterministic_algorithms(True, warn_only=True)


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: launcher.py MODULE [ARGS...]")
    root = os.path.realpath(os.getcwd())
    sys.path_hooks.insert(0, source_hook(root))
    sys.path_importer_cache.clear()
    sys.path.insert(0, root)
    probes = [name for name in os.environ.pop("HOTLOOP_PROBES", "").split(",") if name]
    unknown = sorted(set(probes) - set(PROBES))
    if unknown:
        sys.exit(f"launcher.py: unknown probes {unknown}; known: {list(PROBES)}")
    if "nan_fill" in probes:
        fill_fresh_memory_with_nan()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
