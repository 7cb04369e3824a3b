"""One asyncio loop in a thread of its own: requests stay under way there while other threads pause and publish."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from weftpub.channel import Deadline
from weftpub.errors import StateError

__all__ = ["LoopThread"]

_SLICE_S = 0.2  # how often a wait looks whether the engine still exists


class LoopThread:
    """Runs an event loop until closed.

    Args:
        name: of the thread.
        loop: an existing loop that nobody runs; by default a new one.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = asyncio.new_event_loop() if loop is None else loop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call[T](
        self,
        work: Coroutine[Any, Any, T],
        *,
        peer: str,
        phase: str,
        seconds: float,
        cause: str,
        require_alive: Callable[[], None] | None = None,
    ) -> T:
        """Run a coroutine on the loop and wait for it.

        Args:
            peer, phase, seconds, cause: who is waited for, for what, how long, and what it means if it does not come.
            require_alive: looked at first and every 0.2 s; what it raises ends the wait.

        Raises:
            DeadlineError: it took too long; it is cancelled. Otherwise what the coroutine raises.
        """
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise StateError(f"{peer}: its handle is shut down; make another")
        if require_alive is not None:
            try:
                require_alive()  # some calls are answered without the workers
            except BaseException:
                work.close()
                raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = Deadline(peer, phase, seconds)
        try:
            while True:
                try:
                    return future.result(min(_SLICE_S, max(deadline.left, 0.001)))
                except concurrent.futures.TimeoutError:
                    if future.done():  # the coroutine itself raised a TimeoutError
                        raise
                    if require_alive is not None:
                        require_alive()
                    if deadline.passed:
                        raise deadline.error(cause) from None
        finally:
            future.cancel()

    def post(self, action: Callable[[], object]) -> None:
        """Have the loop call something soon."""
        self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        """Stop the loop; what still runs on it is cancelled. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=5.0))
