"""What the server itself reports, shown before anything is measured, and every difference from the request.

A server that runs at another TP, precision or device than was asked for would be measured as something it is not.
Not for: judging candidates (what they state about themselves is never believed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from optimizer.run import Request
from optimizer.types import Cell, Protocol

_SHOWN = (
    "engine", "dtype", "device", "tp", "attention_backend", "all_reduce_backend", "cuda_graph", "block_size",
    "num_kv_blocks", "max_model_len",
)  # fmt: skip


class Differs(Exception):
    """The server is not what was asked for; one line per difference."""


def table(request: Request, metadata: Mapping[str, Any], protocol: Protocol) -> Table:
    """Request beside the server's own words."""
    cell = protocol.cell
    asked: dict[str, object] = {
        "engine": request.target,
        "dtype": request.dtype,
        "device": request.device,
        "tp": request.tp,
        "max_model_len": f"at least {longest(protocol)}",
    }
    found = Table(title="The server reports", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for head in ("", "asked for", "reported"):
        found.add_column(head)
    found.add_row("model", f"sha256 {(request.weights_sha256 or '?')[:16]}", str(metadata.get("id", "not stated")))
    for key in _SHOWN:
        found.add_row(key, str(asked.get(key, "")), str(metadata.get(key, "not stated")))
    found.add_row("lengths", f"{cell.prompt_tokens} + {cell.new_tokens} tokens, {cell.concurrency} at a time", "")
    return found


def longest(protocol: Protocol) -> int:
    """Tokens of the longest sequence that the protocol sends."""
    cells: tuple[Cell, ...] = (protocol.cell, *protocol.guard_cells)
    return max(cell.prompt_tokens + cell.new_tokens for cell in cells)


def check(request: Request, metadata: Mapping[str, Any], protocol: Protocol) -> None:
    """Raises Differs naming every difference. What a server does not state is not a difference."""
    wrong = []
    for key, wanted in (("tp", request.tp), ("dtype", request.dtype), ("device", request.device)):
        stated = metadata.get(key)
        if stated is not None and not _same(key, stated, wanted):
            wrong.append(f"{key}: asked for {wanted}, the server runs {stated}")
    limit = metadata.get("max_model_len")
    if isinstance(limit, int) and limit < longest(protocol):
        wrong.append(f"max_model_len: {longest(protocol)} tokens are needed, the server takes {limit}")
    if wrong:
        raise Differs("; ".join(wrong))


def _same(key: str, stated: object, wanted: object) -> bool:
    text = str(stated).removeprefix("torch.")
    if key == "device":
        text = text.partition(":")[0]
    return text == str(wanted)
