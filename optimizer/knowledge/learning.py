"""The loop's door to the knowledge blueprint: accepted entries go to the proposer, an attempt's lesson to a person.

Not for: the blueprint itself (blueprint.py), or deciding what enters it (review/). Gates never come here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer import state
from optimizer.knowledge import blueprint as knowledge
from optimizer.run import Request, Run


def facts(run: Run, incumbent: str | None = None) -> dict[str, Any]:
    """What an entry's scope is compared with: see knowledge.Scope. `incumbent`: a commit; the present one if left out."""
    want = run.request
    lines = run.ledger.lines()
    captured = state.captured_as(lines, incumbent or state.incumbent(lines, run.base)) or {}
    gpus = want.environment.get("gpus") or []
    return {
        "engine": want.target,
        "engine_version": version(run.repo.sources(run.base, run.target.editable)),
        "model": model_name(want),
        "tp": want.tp,
        "batch": 1,
        "mode": "graph" if (captured.get("metadata") or {}).get("cuda_graph") else "eager",
        "device": gpus[0]["name"] if gpus else f"cpu:{want.environment.get('machine', '')}",
        "dtype": want.dtype,
        "torch": want.environment.get("versions", {}).get("torch"),
    }


def version(sources: Mapping[str, str]) -> str:
    """sha256 of the sources' text: the same for every Python, which the hash of a syntax tree is not."""
    whole = hashlib.sha256()
    for path in sorted(sources):
        whole.update(f"{path}\0{sources[path]}\0".encode())
    return whole.hexdigest()


def model_name(want: Request) -> str:
    """The checkpoint's name; random weights have none, so their shape stands for it."""
    if want.weights_seed is None:
        return str(want.model.get("_name_or_path") or want.model_dir.name)
    shape = want.model
    return f"{shape.get('model_type', 'model')} {shape.get('num_hidden_layers')}x{shape.get('hidden_size')}, random weights"


def accepted(run: Run, mode: str | None = None) -> Sequence[Any]:
    """Entries that a person accepted for exactly this engine, model and machine, less those the run was to do without.

    `mode`: as if the incumbent ran so (eager, graph).
    """
    without = run.request.without_knowledge
    if "all" in without:
        return []
    seen = facts(run) | ({"mode": mode} if mode else {})
    return [e for e in knowledge.accepted(seen, run.request.knowledge or knowledge.BLUEPRINT) if e.id not in without]


def learn(run: Run, number: int | None) -> list[str]:
    """Propose what an attempt taught (None: once more what all did); returns the entries' ids.

    Raises ValueError when an entry cannot be written down.
    """
    from optimizer.knowledge import writeback  # it reads `facts` above

    return [entry.id for entry in writeback.propose_entries(run.dir, number)]
