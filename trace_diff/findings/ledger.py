"""One account of claimed time, so that no nanosecond is promised twice.

Causes claim first, dearest first, each as the further saving of its edit on top of all edits claimed before it
(whatif); what no cause explains goes to the rules about the rest. So the sum of all claims never exceeds the
step's wall without the device time that stays. Not for: what to look for (the rules).
"""

from __future__ import annotations

from trace_diff.findings.context import Context
from trace_diff.findings.draft import Draft
from trace_diff.whatif import Edit


class Ledger:
    """Claims against one representative step. All amounts are traced ns per step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._model = context.model
        self._edit = Edit()
        self._wall = self._model.wall
        self._direct = 0.0  # claimed outside the replay
        self._busy = _device_ns(context)
        self._unedited = busy_ns(self._model.rows, self._model.dur, Edit())

    @property
    def left(self) -> float:
        """Wall that no one has claimed yet; never less than `floor`."""
        return max(min(self.floor, self._wall), self._wall - self._direct)

    @property
    def floor(self) -> float:
        """Device time that stays with all claimed edits, collectives left out; 0 where no device was traced.

        What a rank waits for is what its peer does meanwhile: claimed for both, it would eat into the peer's kernels.
        """
        return max(0.0, self._busy - (self._unedited - busy_ns(self._model.rows, self._model.dur, self._edit)))

    def alone(self, draft: Draft) -> float:
        """What the draft would save if nothing else changed."""
        if draft.edit is not None:
            return self._model.wall - self._model.wall_with(self._capped(draft.edit, Edit()))
        if draft.direct_ns is not None:
            return min(draft.direct_ns, self._model.wall)
        return self._rest(draft.rest, Edit(), self._model.wall)

    def device_part(self, draft: Draft) -> float:
        """The part of `alone` that rests on device clocks only: the edit without its host side."""
        if draft.edit is None or not draft.edit.device:
            return 0.0
        return self._model.wall - self._model.wall_with(Edit(device=draft.edit.device))

    def claim(self, draft: Draft) -> float:
        """What the draft saves on top of all earlier claims; that much is no longer available."""
        before = self.left
        if draft.edit is not None:
            self._edit = self._capped(draft.edit, self._edit)
            self._wall = min(self._wall, self._model.wall_with(self._edit))
        elif draft.direct_ns is not None:
            self._direct += min(draft.direct_ns, before)
        else:
            self._direct += min(self._rest(draft.rest, self._edit, self._wall), before)
        return max(0.0, before - self.left)

    def _rest(self, kind: str | None, edit: Edit, wall: float) -> float:
        if kind == "idle":
            return max(0.0, wall - self._direct - busy_ns(self._model.rows, self._model.dur, edit))
        if kind == "python":
            led = sum(max(0.0, ns - self._model.host_self.get(r, 0.0)) for r, ns in edit.host_cuts.items())
            return max(0.0, min(wall - self._direct, python_ns(self._context) - led))
        return 0.0

    def _capped(self, new: Edit, old: Edit) -> Edit:
        """Both edits together; no host row gives more than its own time, no device row less than zero."""
        cuts = dict(old.host_cuts)
        for row, ns in new.host_cuts.items():
            most = self._model.host_self.get(row, 0.0) + self._model.host_lead.get(row, 0.0)
            cuts[row] = min(cuts.get(row, 0.0) + ns, most)
        device = dict(old.device)
        for row, ns in new.device.items():
            device[row] = min(ns, device.get(row, ns))
        waits = old.waits | new.waits
        for row in waits:
            cuts.pop(row, None)  # a wait that is gone has no time left to cut
        return Edit(cuts, device, waits)


def _device_ns(context: Context) -> float:
    """Mean time of a step in which the device worked, collectives left out; 0 where no device was traced."""
    if not context.on_gpu:
        return 0.0
    return float(sum(ns for part, ns in context.breakdown.parts.items() if not part.startswith(("idle.", "comm."))))


def busy_ns(rows: list[int], dur: list[float], edit: Edit) -> float:
    """Device time of a step under an edit."""
    return sum(edit.device.get(r, d) for r, d in zip(rows, dur, strict=True))


def python_ns(context: Context) -> float:
    """Mean host time inside a step's annotation that is in no operator, runtime call or collective."""
    parts = context.breakdown.parts
    whole = float(parts.get("cpu.python", 0) + parts.get("unattributed", 0))
    return max(0.0, whole - context.outside_ns)
