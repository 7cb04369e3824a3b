"""The publishing side: `Publisher` puts a version into every engine, all or none; a group lets several trainer ranks
send together; an `Observer` only asks.
"""

from weftpub.channel import CurveKeys, Deadlines
from weftpub.publisher.coordinator import FailurePolicy
from weftpub.publisher.groups import RankGroup, SoloGroup, ThreadGroup, TorchGroup, barrier
from weftpub.publisher.mail import StoreMail
from weftpub.publisher.observer import Observer
from weftpub.publisher.peers import Peer
from weftpub.publisher.publisher import Publisher
from weftpub.publisher.report import EngineOutcome, PublishReport, RecoveryReport
from weftpub.publisher.sources import SourceBuffers

__all__ = [
    "CurveKeys",
    "Deadlines",
    "EngineOutcome",
    "FailurePolicy",
    "Observer",
    "Peer",
    "PublishReport",
    "Publisher",
    "RankGroup",
    "RecoveryReport",
    "SoloGroup",
    "SourceBuffers",
    "StoreMail",
    "ThreadGroup",
    "TorchGroup",
    "barrier",
]
