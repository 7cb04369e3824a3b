"""Prompts with ground truths: the DAPO-Math-17k file as published, generated arithmetic in the same schema, and the
order in which a run draws them.
"""

from weftmoe.data.arithmetic import arithmetic_rows, write_arithmetic
from weftmoe.data.prompts import Prompt, PromptSet, read_prompts
from weftmoe.data.sampler import PromptSampler

__all__ = ["Prompt", "PromptSampler", "PromptSet", "arithmetic_rows", "read_prompts", "write_arithmetic"]
