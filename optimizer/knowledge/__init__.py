"""The blueprint: entries, their checks, import and export, and what a run writes back."""
