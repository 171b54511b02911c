"""Cheats, faults and good patches against the engine, judged by the real gates: `python -m redteam`."""
