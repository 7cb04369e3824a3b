"""Publish FP8 MoE weights: one set of bytes for trainer and rollout engine."""

__version__ = "0.1.0"

__all__ = ["__version__"]
