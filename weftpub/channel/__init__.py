"""The control channel: who may speak, bounded messages, and a deadline on every wait.

ZeroMQ below, plain data above.
"""

from weftpub.channel.address import CurveKeys, unix_address
from weftpub.channel.client import ChannelClient, wait_any
from weftpub.channel.deadlines import Deadline, Deadlines
from weftpub.channel.server import ChannelServer

__all__ = ["ChannelClient", "ChannelServer", "CurveKeys", "Deadline", "Deadlines", "unix_address", "wait_any"]
