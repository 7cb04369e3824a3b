"""A target model and its draft (multi-token prediction) as one model to be published to.

SGLang keeps the two in two workers and lets them share embedding and head. Here the draft is one more module of the
target, named `draft`; what it shares with the target appears once, under the target's name.
"""

import torch

__all__ = ["DRAFT", "with_draft"]

DRAFT = "draft"


def with_draft(model: torch.nn.Module, draft: torch.nn.Module | None) -> torch.nn.Module:
    """A module that holds both, for everything in this adapter that takes a model; the target itself without a draft.

    Nothing is copied: parameters are the same objects.
    """
    if draft is None:
        return model
    whole = type(type(model).__name__, (torch.nn.Module,), {})()
    for name, child in model.named_children():
        whole.add_module(name, child)
    whole.add_module(DRAFT, draft)
    whole.config = model.config
    return whole
