"""The smoke mode's own parts: a tiny model with a tokenizer, made on the spot and warmed up on arithmetic.

Everything after that is the same code as a real run. `make_model_apart` makes the model in a process of its own; it is
`model.make_model`, which this package does not load.
"""

from weftmoe.smoke.apart import make_model_apart
from weftmoe.smoke.note import Warmup
from weftmoe.smoke.tokenizer import CHARACTERS, make_tokenizer

__all__ = ["CHARACTERS", "Warmup", "make_model_apart", "make_tokenizer"]
