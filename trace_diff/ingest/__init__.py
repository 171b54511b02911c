"""Kineto Chrome traces, whole or damaged, to columns. Not for: what the columns mean (windows, attribute)."""

from trace_diff.ingest.load import load
from trace_diff.ingest.many import gather, load_many
from trace_diff.ingest.reader import TraceError
from trace_diff.ingest.trace import Trace, TraceSet

__all__ = ["Trace", "TraceError", "TraceSet", "gather", "load", "load_many"]
