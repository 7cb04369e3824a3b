"""A receiver's end of the driver's remote control (`weftpub_demo.peer` states the protocol).

The reading thread starts before anything heavy is imported: when the driver is gone, the process leaves at once,
whatever its main thread is doing.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Control", "Handler"]

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Control:
    """Requests come from standard input, answers go to standard output; whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # libraries that print must not be taken for answers
        self._number: int | None = None
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def serve(self, handlers: Mapping[str, Handler]) -> None:
        """Answer requests, one at a time, for as long as the process lives."""
        while True:
            request = self._requests.get()
            self._number, do = request.pop("id"), request.pop("do")
            try:
                answer: dict[str, Any] = {"ok": True, **handlers[do](request)}
            except Exception as error:  # the driver judges every failure: it gets the reason, the log the traceback
                traceback.print_exc()
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            self._say(answer)

    def progress(self, **fields: Any) -> None:
        """From a handler: tell the driver how far the request is."""
        self._say({"progress": fields})

    def _say(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps({"id": self._number, **answer}) + "\n")
        self._answers.flush()

    def _read(self) -> None:
        for line in sys.stdin:
            self._requests.put(json.loads(line))
        os._exit(0)
