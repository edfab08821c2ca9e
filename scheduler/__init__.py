"""Decides. Pure Python: no torch, no ray, no clock of its own, no input or output."""
