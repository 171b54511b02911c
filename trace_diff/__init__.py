"""Exact accounts, side-by-side comparison and findings for torch.profiler traces of any engine."""
