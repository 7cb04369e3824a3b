"""What keeps a scheduler from being idle, in words: for the driver's message when it waited in vain."""

from typing import Any

__all__ = ["doing_of"]


def doing_of(scheduler: Any) -> str:
    """What its requests do or wait for; "" if it has none.

    A request that waits for its grammar computes nothing, and still keeps SGLang from flushing: compiling may take
    minutes, and nothing that a driver does to requests ends it.
    """
    compiling = len(scheduler.grammar_manager.grammar_queue)
    batch = scheduler.running_batch
    computed = 0 if batch.is_empty() else len(batch.reqs)
    counts = (
        (compiling, "waiting for a grammar to be compiled"),
        (computed, "being computed"),
        (len(scheduler.waiting_queue), "waiting for their turn"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)
