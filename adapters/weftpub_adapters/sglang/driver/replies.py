"""Gives every call to an engine its own reply.

SGLang's control replies carry no number: whoever waits when one arrives takes it for his. A wait that was given up at
its deadline leaves its reply on the way, and the next call of that kind would take it: an engine would be called
flushed because it was a minute ago. So a call that has been sent is waited for to its end, whether anybody still wants
to know or not, and the next of its kind is sent only then; its own wait has a deadline as always. (A server does so by
itself: what its clients give up goes on there.)
"""

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["OwnReplies"]


class OwnReplies:
    """Serializes the calls of each kind. Used on one event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._sent: set[asyncio.Future[object]] = set()

    async def __call__[T](self, kind: str, call: Callable[[], Awaitable[T]]) -> T:
        """The reply to a call.

        Cancelled before its turn has come it is not sent; cancelled later, its reply is taken when it comes and thrown
        away.

        Args:
            kind: calls of one kind cannot be told apart by their replies.
            call: sends, and waits for the reply.
        """
        turn = self._turns.setdefault(kind, asyncio.Lock())
        await turn.acquire()
        sent = asyncio.ensure_future(call())
        self._sent.add(sent)

        def ended(_: object) -> None:
            self._sent.discard(sent)
            turn.release()
            if not sent.cancelled():
                sent.exception()  # looked at: nobody may be left to raise it to

        sent.add_done_callback(ended)
        return await asyncio.shield(sent)
