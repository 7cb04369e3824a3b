"""One step that all sender ranks take together: work on every rank, a conclusion on rank 0, one outcome for all.

A rank that raises reports before it raises, so no other rank waits for it in vain; what rank 0 concludes, or fails to,
reaches everybody.
"""

import json
from collections.abc import Callable
from typing import Any

from weftpub import errors
from weftpub.errors import ChannelError, WeftpubError
from weftpub.publisher.groups import RankGroup

__all__ = ["agree", "as_data", "as_error"]


def agree(
    group: RankGroup,
    phase: str,
    seconds: float,
    work: Callable[[], Any],
    conclude: Callable[[list[Any]], Any],
    *,
    allowance: float,
) -> Any:
    """Run `work` on every rank, `conclude` on rank 0 with all results, and return its result on every rank.

    Args:
        seconds: how long rank 0 waits for each other rank after it has finished its own work.
        work, conclude: return plain data that JSON can hold.
        allowance: how long the others wait for rank 0 beyond that: what `conclude` may take.

    Raises:
        the rank's own error where it raised; on the other ranks one of the same class that names the rank.
        DeadlineError names a missing rank.
    """
    if group.size == 1:
        return conclude([work()])
    own: BaseException | None = None
    outcome: dict[str, Any]
    try:
        outcome = {"value": work()}
    except BaseException as error:  # reported to the other ranks, then raised below
        own, outcome = error, as_data(error)
    verdict: dict[str, Any] | None = None
    try:
        gathered = group.gather(json.dumps(outcome).encode(), phase, seconds)
        if gathered is not None:
            verdict = {"value": conclude(_values(gathered))}
    except BaseException as error:
        own = own or error
        verdict = as_data(error)
    data = group.broadcast(None if verdict is None else json.dumps(verdict).encode(), phase, seconds + allowance)
    if own is not None:
        raise own
    found = json.loads(data)
    if "error" in found:
        raise as_error(0, found)
    return found["value"]


def _values(gathered: list[bytes]) -> list[Any]:
    """Results of all ranks; the error of the first that failed, with the others as notes."""
    outcomes = [json.loads(data) for data in gathered]
    failed = [as_error(rank, outcome) for rank, outcome in enumerate(outcomes) if "error" in outcome]
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"also: {other}")
        raise failed[0]
    return [outcome["value"] for outcome in outcomes]


def as_data(error: BaseException) -> dict[str, Any]:
    """An error as plain data, read back by `as_error`."""
    return {"error": type(error).__name__, "message": str(error), "notes": list(getattr(error, "__notes__", ()))}


def as_error(rank: int, data: dict[str, Any]) -> WeftpubError:
    """An error of another sender rank, of the same class if it is one of weftpub's.

    Rank 0 passes on what it was told, which names its rank already.
    """
    found = getattr(errors, str(data["error"]), None)
    text = str(data["message"])
    where = "" if text.startswith("sender rank") else f"sender rank {rank}: "
    if isinstance(found, type) and issubclass(found, WeftpubError):
        error = found(f"{where}{text}")
    else:
        error = ChannelError(f"{where}{data['error']}: {text}")
    for note in data.get("notes", ()):
        error.add_note(str(note))
    return error
