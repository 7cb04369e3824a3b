"""The smoke mode's own parts: a tiny Qwen3-MoE with a tokenizer, made on the spot and warmed up on arithmetic.

Everything after that is the same code as a real run.
"""

from weftmoe.smoke.model import Warmup, make_model, model_config
from weftmoe.smoke.tokenizer import CHARACTERS, make_tokenizer

__all__ = ["CHARACTERS", "Warmup", "make_model", "make_tokenizer", "model_config"]
