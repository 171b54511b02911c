"""The seal: which files judge candidates, and that none of them has changed.

`gates/SEAL` holds `version N` and `sha256  path` of the import closure of the gates, `measure.py` and `accept.py`,
with the scripts they start by name. Its own sha256 is the gates digest of ledger lines, trailers and knowledge.
Not for: weights (their digest is in run.json) and not for interpreters or installed packages.
"""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEAL = ROOT / "optimizer" / "gates" / "SEAL"
PACKAGES = ("optimizer", "reports", "trace_diff")
# What the closure starts from. Scripts that are started as processes, not imported, stand here by name.
ROOTS = (
    "optimizer/measure.py",
    "optimizer/accept.py",
    "optimizer/truth/oracle_worker.py",
    "optimizer/confine/launcher.py",
    "optimizer/confine/jail.py",
)


class SealBroken(Exception):
    """A sealed file differs from what SEAL says; the message names the first one and how many."""


def digest(seal: Path = SEAL) -> str:
    """sha256 of SEAL. Raises SealBroken when there is none."""
    try:
        return hashlib.sha256(seal.read_bytes()).hexdigest()
    except OSError as error:
        raise SealBroken(f"no seal: {error}; `optimize seal --reason TEXT` writes one") from None


def version(seal: Path = SEAL) -> int:
    """N of the first line, 0 where there is no seal."""
    try:
        first = seal.read_text().split("\n", 1)[0]
    except OSError:
        return 0
    word, _, number = first.partition(" ")
    if word != "version" or not number.isdigit():
        raise SealBroken(f"{seal}: first line is {first[:40]!r}, not `version N`")
    return int(number)


def verify(root: Path = ROOT) -> None:
    """Raises SealBroken when a sealed file changed, vanished, or one that belongs to the closure is not sealed."""
    seal = root / SEAL.relative_to(ROOT)
    digest(seal)  # it must be there
    version(seal)
    wanted = dict(_entries(seal))
    found = {path: _sha256(root / path) for path in closure(root)}
    wrong = sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))
    if wrong:
        how = (
            "is not sealed"
            if wrong[0] not in wanted
            else "is gone"
            if wrong[0] not in found
            else "has changed"
        )
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise SealBroken(
            f"{wrong[0]} {how}{more}; a deliberate change is sealed by `optimize seal --reason TEXT`"
        )


def write(reason: str, root: Path = ROOT) -> int:
    """Seal the files as they are and raise the version. ValueError without a reason; returns the new version."""
    if not reason.strip():
        raise ValueError("a new seal needs a reason")
    seal = root / SEAL.relative_to(ROOT)
    number = version(seal) + 1
    lines = [f"version {number}", f"# {' '.join(reason.split())}"]
    lines += [f"{_sha256(root / path)}  {path}" for path in closure(root)]
    seal.write_text("\n".join(lines) + "\n")
    return number


def closure(root: Path = ROOT) -> tuple[str, ...]:
    """Paths, relative to the root, of every file of ours that the judging code is made of."""
    todo = [root / path for path in ROOTS] + sorted((root / "optimizer" / "gates").glob("*.py"))
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        todo += _imports(path, root)
    return tuple(sorted(str(path.relative_to(root)) for path in seen))


def _imports(path: Path, root: Path) -> list[Path]:
    """Files of ours that `path` imports anywhere in it, with the packages that hold them."""
    package = ".".join(path.relative_to(root).parts[:-1])
    return [file for name in _names(path.read_text(), package) for file in _files(name, root)]


@lru_cache(maxsize=256)
def _names(text: str, package: str) -> tuple[str, ...]:
    """Dotted names of ours that a module's text may import."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(name for name in found if name.split(".")[0] in PACKAGES)


def _files(module: str, root: Path) -> list[Path]:
    parts = module.split(".")
    found = [root.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    return [*found, root.joinpath(*parts).with_suffix(".py")]


def _entries(seal: Path) -> list[tuple[str, str]]:
    pairs = []
    for line in seal.read_text().splitlines()[1:]:
        if line and not line.startswith("#"):
            sha, _, path = line.partition("  ")
            pairs.append((path, sha))
    return pairs


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
