"""The receiving side: what an engine offers, the views of its live parameters, and the state machine that a publisher
talks to.
"""

from weftpub.receive.engine import EngineSide, Readiness
from weftpub.receive.receiver import Receiver
from weftpub.receive.server import ReceiverThread, serve
from weftpub.receive.views import BoundPlan, ReceiveViews
from weftpub.wire.description import EngineDescription, parameter_specs

__all__ = [
    "BoundPlan",
    "EngineDescription",
    "EngineSide",
    "Readiness",
    "ReceiveViews",
    "Receiver",
    "ReceiverThread",
    "parameter_specs",
    "serve",
]
