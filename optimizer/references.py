"""Other engines on the same cell, captured once in a run, for the diff: today transformers' own decode.

Not for: stored traces of other machines (reports shows those as context).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.capture import NoReference, capture_reference
from optimizer.diagnose import title
from optimizer.run import Run
from optimizer.serial import build, plain
from optimizer.services import Capture, View
from optimizer.types import Protocol

HF = "hf"


def references(run: Run, view: View, protocol: Protocol, prompts: Any, traces: Path) -> list[Capture]:
    """Captures of references, from the ledger or taken now. One that fails is named once and then left out."""
    known = [line["data"] for line in run.ledger.lines() if line["kind"] == "captured" and line["data"].get("reference")]
    if known:
        found = [build(Capture, {k: d[k] for k in Capture.__slots__ if k in d}) for d in known if d.get("traces")]
        return [_placed(run, capture) for capture in found if all((run.dir / p).is_file() for p in capture.traces)]
    view.step("capture traces: Hugging Face reference")
    want = run.request
    try:
        capture = capture_reference(want.model_dir, traces / HF, protocol.cell, prompts, want.tp, want.device, want.dtype)
    except (NoReference, OSError) as error:
        view.note(f"no Hugging Face reference: {error}")
        run.ledger.append("captured", None, {"label": HF, "reference": True, "traces": [], "why_not": str(error)})
        return []
    inside = [path.relative_to(run.dir).as_posix() for path in capture.traces]
    data = {**plain(capture), "traces": inside, "reference": True, "title": title(capture)}
    run.ledger.append("captured", None, data)
    return [capture]


def _placed(run: Run, capture: Capture) -> Capture:
    paths = tuple(run.dir / path for path in capture.traces)
    return Capture(
        capture.label, paths, capture.tp, capture.batch, capture.control_us_per_token, capture.metadata, capture.seconds
    )
