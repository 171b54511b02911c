"""Planted-bottleneck bench: built traces with one known inefficiency of known cost each, and controls."""
