"""Engines that sample completions, behind one interface: SGLang, or a torch sampler over SGLang's real layers."""

from weftmoe.rollout.base import Published, Request, Rollout, Sample, Span, require_spans

__all__ = ["Published", "Request", "Rollout", "Sample", "Span", "require_spans"]
