"""Keeps out of the demo's output what the systems below say to their own developers: that Apex is not there, that a
class will be replaced, that no GPU was found. A newcomer took such lines for the demo's trouble. Errors are said.
"""

import logging
import warnings

__all__ = ["hush"]

_LOGGERS = ("megatron", "torch.utils.cpp_extension")


def hush() -> None:
    """Leave out warnings of Megatron-core and of compiling other people's modules; call it before they are imported."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
