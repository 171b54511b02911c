"""Benchmarks of the optimiser itself: run from the repository root as `python -m benchmarks.NAME`."""
