"""Let an agent outside this process propose: put the question in the run's mailbox and wait for the answer.

Not for: what the agent sees and how it is reached (mcp_server.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from optimizer.types import Series

from .base import Declined, ProposeContext
from .mailbox import Mailbox


class External:
    """`wait_s`: how long one attempt waits for an agent before the proposer gives up."""

    name = "mcp"

    def __init__(self, wait_s: float = 3600.0, poll_s: float = 0.3, clock: Callable[[], float] = time.monotonic) -> None:
        self.wait_s, self.poll_s, self.clock = wait_s, poll_s, clock

    def propose(self, ctx: ProposeContext) -> Series | Declined:
        """The agent's series, or a decline when none comes in time, the run is stopped, or the agent declines."""
        if ctx.exchanges is None:
            return Declined(self.name, why="no run folder to wait in")
        box = Mailbox(ctx.exchanges.parent)
        number = ctx.attempt if ctx.attempt is not None else len(ctx.history) + 1
        left = self.wait_s if ctx.budget.seconds is None else min(self.wait_s, ctx.budget.seconds)
        deadline = self.clock() + left
        box.ask(number, ctx)
        try:
            while (answer := box.answer(number)) is None:
                if ctx.stopped is not None and ctx.stopped():
                    return Declined(self.name, why="the run was asked to stop", final=False)
                if self.clock() >= deadline:
                    return Declined(self.name, why=f"no agent answered within {left:.0f} s (`optimize mcp` connects one)")
                time.sleep(self.poll_s)
        finally:
            box.close(number)
        return answer
