"""Every control message, as a pydantic model; JSON on the socket, nothing is ever unpickled.

A request carries the run id, the session of the publisher that sends it and a request number that its reply repeats. A
receiver refuses what does not belong to its run, to its present session or to the publish that is under way. Requests,
in the order of a publish:

    hello      a publisher introduces itself; a later one of the same run replaces an earlier one. Or a newcomer, who
               asks which epoch is the present one before it does so; or an observer, who replaces nobody and may only
               describe, status and bye
    describe   what parameters does this rank have
    probe      can you open this little buffer: finds out whether a transport works between the two processes
    set_plan   the rank's part of the plan; checked against the live parameters
    pause      stop serving
    begin      a version is coming: its checksums; views are bound to the live parameters
    chunk      memory that holds pieces; the reply means: copied, and released
    verify     all chunks were sent: post-process, compute checksums from the live parameters
    commit     every rank verified and the commit record is on disk
    resume     serve
    abort      the publish failed elsewhere
    status     where do you stand
    drop       close these allocations, they are about to be freed
    bye        the publisher leaves: close everything that is kept open
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weftpub.errors import ChannelError
from weftpub.version import EngineState
from weftpub.wire.description import EngineDescription
from weftpub.wire.identity import Identity
from weftpub.wire.offers import Offer

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Abort",
    "Begin",
    "Bye",
    "ChunkMessage",
    "Commit",
    "Describe",
    "Described",
    "Done",
    "Drop",
    "Failed",
    "Hello",
    "KnownLayout",
    "ListedLayout",
    "PackedLayout",
    "Pause",
    "Probe",
    "Reply",
    "Request",
    "Resume",
    "SetPlan",
    "Status",
    "StatusReport",
    "Verified",
    "Verify",
    "Welcome",
    "decode_reply",
    "decode_request",
    "encode",
    "layout_name",
    "plain_text",
    "request_number",
]

MAX_MESSAGE_BYTES = 64 << 20
_MAX_CHECKSUM_BYTES = 16 << 20  # two million pieces on one receiver
_MAX_ERROR = 16_000

RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NONCE = Field(pattern=r"^[0-9a-f]{16,64}$")
_DIGEST = Field(pattern=r"^[0-9a-f]{64}$")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class _Request(_Message):
    run_id: str = Field(pattern=RUN_ID_PATTERN)
    session: str = _NONCE
    request: int = Field(ge=0)


class Hello(_Request):
    """Introduce a publisher.

    Attributes:
        role: a newcomer asks for the present epoch and changes nothing, the coordinator opens a session, a sender joins
            one, an observer only asks (`describe`, `status`) and leaves whoever publishes alone.
        epoch: the coordinator's place among the publishers of the run, from 1; a session gives way only to one of a
            higher epoch. Clocks of several hosts, or one that is set back, could not tell who came later.
    """

    kind: Literal["hello"] = "hello"
    role: Literal["newcomer", "coordinator", "sender", "observer"]
    epoch: int = Field(default=0, ge=0)
    identity: Identity


class Describe(_Request):
    """Ask for the engine rank's description."""

    kind: Literal["describe"] = "describe"


class Probe(_Request):
    """Open this offer and let go of it."""

    kind: Literal["probe"] = "probe"
    offer: Offer


class SetPlan(_Request):
    """Hand over the rank's part of the plan, as `PlanPart.to_json` wrote it."""

    kind: Literal["set_plan"] = "set_plan"
    part: str


class Pause(_Request):
    """Stop serving."""

    kind: Literal["pause"] = "pause"


class Resume(_Request):
    """Serve what is committed, or the old version if nothing was written."""

    kind: Literal["resume"] = "resume"


class Status(_Request):
    """Ask where the rank stands."""

    kind: Literal["status"] = "status"


class Begin(_Request):
    """Announce a version.

    Attributes:
        limit: most bytes of a chunk; the piece table follows from it and the plan part.
        checksums: this rank's checksums, 8 bytes a piece, little-endian. They travel as they are, behind the JSON.
        leaves: receiver rank to the hash of its checksums.
        digest: of the whole manifest; the receiver computes it too.
        allow_rollback: accept a version below the one that is held.
        quiet: seconds for which the publisher may have nothing to say although it lives: its sender ranks wait for each
            other. A receiver that allows less silence by itself allows this much.
    """

    kind: Literal["begin"] = "begin"
    version: int = Field(ge=0)
    nonce: str = _NONCE
    plan_digest: str = _DIGEST
    limit: int = Field(ge=1)
    checksums: bytes = Field(default=b"", max_length=_MAX_CHECKSUM_BYTES, exclude=True)
    leaves: dict[int, str]
    digest: str = _DIGEST
    allow_rollback: bool = False
    quiet: float = Field(default=0.0, ge=0, le=86_400)


class PackedLayout(_Message):
    """The chunk's pieces lie packed in the one offered allocation, as the piece table says."""

    layout: Literal["packed"] = "packed"


class ListedLayout(_Message):
    """The pieces lie where this list says: where the sender keeps them, or in a buffer that holds only some of a chunk.

    Attributes:
        pieces: int64 indices into the receiver's piece table.
        buffers: int64 index of the offer that holds each piece.
        offsets: int64 byte offset of each piece in its allocation. All three little-endian and equally long.
    """

    layout: Literal["listed"] = "listed"
    pieces: bytes = Field(max_length=_MAX_CHECKSUM_BYTES)
    buffers: bytes = Field(max_length=_MAX_CHECKSUM_BYTES)
    offsets: bytes = Field(max_length=_MAX_CHECKSUM_BYTES)


class KnownLayout(_Message):
    """A listed layout that the receiver remembers from an earlier chunk (`Welcome.layouts`): the lists of a large model
    are hundreds of kilobytes, and the same at every publish.

    Attributes:
        digest: `layout_name` of the listed layout, with its offers if the chunk lists none.
    """

    layout: Literal["known"] = "known"
    digest: str = _DIGEST


def layout_name(layout: ListedLayout, offers: Sequence[Offer] = ()) -> str:
    """sha256 by which both sides know a listed layout, and the offers that go with it."""
    parts = [layout.pieces, layout.buffers, layout.offsets, *(offer.model_dump_json().encode() for offer in offers)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


class ChunkMessage(_Request):
    """Offer memory that holds pieces; the receiver copies, lets go of it, and then replies.

    Attributes:
        sender: sender rank.
        sequence: number of the chunk among those of this sender to this receiver, from 0. Packed chunks are numbered as
            in the piece table.
        offers: the memory; left out where a known layout stands for it too.
    """

    kind: Literal["chunk"] = "chunk"
    version: int = Field(ge=0)
    nonce: str = _NONCE
    sender: int = Field(ge=0)
    sequence: int = Field(ge=0)
    offers: tuple[Offer, ...] = Field(max_length=65_536)
    layout: Annotated[PackedLayout | ListedLayout | KnownLayout, Field(discriminator="layout")]


class Verify(_Request):
    """All chunks were sent: check everything.

    Attributes:
        sha256: also return a sha256 of every piece as it lies in the live parameters.
    """

    kind: Literal["verify"] = "verify"
    version: int = Field(ge=0)
    nonce: str = _NONCE
    sha256: bool = False


class Commit(_Request):
    """The record of `version` with this manifest digest is on disk."""

    kind: Literal["commit"] = "commit"
    version: int = Field(ge=0)
    digest: str = _DIGEST


class Abort(_Request):
    """The publish will not be completed."""

    kind: Literal["abort"] = "abort"
    reason: str = Field(max_length=_MAX_ERROR)


class Drop(_Request):
    """Close the named allocations."""

    kind: Literal["drop"] = "drop"
    allocations: tuple[str, ...] = Field(max_length=65_536)


class Bye(_Request):
    """Close every allocation that is kept open for this publisher."""

    kind: Literal["bye"] = "bye"


Request = Annotated[
    Hello
    | Describe
    | Probe
    | SetPlan
    | Pause
    | Resume
    | Status
    | Begin
    | ChunkMessage
    | Verify
    | Commit
    | Abort
    | Drop
    | Bye,
    Field(discriminator="kind"),
]


class StatusReport(_Message):
    """Where a rank stands.

    Attributes:
        version: the version that is verified, committed, held or served; None while there is none.
        digest: manifest digest of that version, "" if unknown.
        incoming: the version on its way.
        lost, reason: what a torn engine lost, and why.
        plan_digest: of the plan it was given, "" without one.
        intact: whether the live weights hold `version`.
        may_serve: whether the engine rank would compute requests if it was told to go on.
        why_not: why it would not; "" if it would.
        resting: whether it computes none at this moment, because it was paused.
    """

    state: EngineState
    version: int | None
    digest: str
    incoming: int | None
    lost: int | None
    reason: str
    plan_digest: str
    intact: bool
    may_serve: bool
    why_not: str
    resting: bool


class _Reply(_Message):
    request: int = Field(ge=0)
    status: StatusReport


class Welcome(_Reply):
    """Reply to hello: who the receiver is.

    Attributes:
        layouts: names of the listed layouts that it remembers.
        epoch: of the publisher that it listens to, 0 before the first one.
    """

    kind: Literal["welcome"] = "welcome"
    identity: Identity
    engine: str
    rank: int
    device: str
    transports: tuple[str, ...]
    layouts: tuple[str, ...] = ()
    epoch: int = Field(default=0, ge=0)


class Described(_Reply):
    """Reply to describe."""

    kind: Literal["described"] = "described"
    description: EngineDescription


class Done(_Reply):
    """The request was carried out."""

    kind: Literal["done"] = "done"


class Verified(_Reply):
    """Everything arrived unchanged.

    Attributes:
        digest: of the manifest, as the receiver computed it.
        sha256: hex digest of every piece, in the piece table's order; empty unless asked for.
    """

    kind: Literal["verified"] = "verified"
    digest: str
    sha256: tuple[str, ...] = ()


class Failed(_Reply):
    """The request failed or was refused.

    Attributes:
        error: name of the error's class; one of weftpub.errors where it comes from weftpub.
        message: its text.
    """

    kind: Literal["failed"] = "failed"
    error: str = Field(max_length=200)
    message: str = Field(max_length=_MAX_ERROR)


Reply = Annotated[Welcome | Described | Done | Verified | Failed, Field(discriminator="kind")]


class _Number(BaseModel):
    request: int = Field(ge=0)


_NUMBER: TypeAdapter[_Number] = TypeAdapter(_Number)
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
_REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)


def plain_text(text: str, limit: int = _MAX_ERROR) -> str:
    """Text of any origin as a message can carry it: cut to `limit`, and what UTF-8 cannot say (the stray surrogates of
    a file name that is not UTF-8) replaced by question marks."""
    return text[:limit].encode(errors="replace").decode()


def encode(message: BaseModel) -> bytes:
    """A message as JSON, and behind a line break what it carries as raw bytes; ChannelError if it is larger than a peer
    would take.
    """
    data = message.model_dump_json().encode()  # line breaks in JSON text are escaped
    if isinstance(message, Begin):
        data += b"\n" + message.checksums
    if len(data) > MAX_MESSAGE_BYTES:
        raise ChannelError(
            f"a {type(message).__name__} message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}"
        )
    return data


def decode_request(data: bytes) -> Request:
    """Read a request; ChannelError, with the first fault, if it is not one."""
    text, _, raw = data.partition(b"\n")
    request = _decode(_REQUEST, text, "request", len(data))
    if not raw:
        return request
    if not isinstance(request, Begin) or len(raw) > _MAX_CHECKSUM_BYTES:
        raise ChannelError(
            f"not a request of this protocol: {len(raw)} bytes behind a {type(request).__name__} message"
        )
    return request.model_copy(update={"checksums": raw})


def request_number(data: bytes) -> int | None:
    """The request number in data that `decode_request` refused, so that it can be answered; None if there is none."""
    try:
        return _NUMBER.validate_json(data[:MAX_MESSAGE_BYTES].partition(b"\n")[0]).request
    except ValidationError:
        return None


def decode_reply(data: bytes) -> Reply:
    """Read a reply; ChannelError, with the first fault, if it is not one."""
    return _decode(_REPLY, data, "reply", len(data))


def _decode[T](adapter: TypeAdapter[T], data: bytes, what: str, nbytes: int) -> T:
    if nbytes > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a {what} of {nbytes} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ChannelError(
            f"not a {what} of this protocol: {where}: {first['msg']}; do both sides run the same release?"
        ) from None
