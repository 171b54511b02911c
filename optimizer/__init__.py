"""The loop: capture, diff, propose, apply, gate, measure, decide, write back."""
