"""Which guards a protocol can have, before anything is timed: so that a margin stated for another name is refused at once.

Not for: their values (targets.py, measure.py) or verdicts (guards.py).
"""

from __future__ import annotations

from itertools import product

from optimizer.targets import Timed, guard_values
from optimizer.types import Protocol, Stream

_TOKENS = (2, 300)  # few and many gaps: of the target cell's two tails a run measures one
_ROUNDS = (1, 2)


def possible(protocol: Protocol) -> set[str]:
    """Names of all guards that a pair of this protocol may measure."""
    found = {"start_up_s"} if protocol.metric == "memory" else {"start_up_s", "peak_memory_bytes"}
    for cell, tokens, rounds in product((protocol.cell, *protocol.guard_cells), _TOKENS, _ROUNDS):
        stream = Stream((), (0,) * tokens, "", None, 0, tuple(range(1, tokens + 1)), None)
        found |= guard_values(Timed(cell, (stream,), (1,) * rounds), (1.0, 1.0), target=cell == protocol.cell).keys()
    return found
