"""Where a candidate runs and what it can reach: sandbox levels, limits, the launch and what is left of it."""
