"""The receiving side: what an engine offers, the views of its live parameters, and the state machine that a publisher
talks to.
"""

from weftpub.receive.engine import EngineDescription, EngineSide, parameter_specs

__all__ = ["EngineDescription", "EngineSide", "parameter_specs"]
