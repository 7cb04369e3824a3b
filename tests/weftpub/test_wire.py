"""What travels: manifests with their digest, bounded messages, and offers that hold no object."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from publish_world import World

import weftpub.wire.messages as m
from weftpub.errors import ChannelError, ManifestError
from weftpub.plan import cut_pieces
from weftpub.wire import CudaIpcOffer, InProcessOffer, Manifest, SharedMemoryOffer, local_identity
from weftpub.wire.identity import process_alive
from weftpub.wire.manifest import leaf_hash, manifest_digest, pack_checksums, unpack_checksums

NONCE, DIGEST = "0" * 16, "a" * 64
HEAD = {"run_id": "run", "session": NONCE, "request": 3}


def manifest(**changes: object) -> Manifest:
    base = Manifest("run", 5, NONCE, DIGEST, 1 << 20, {0: b"12345678", 1: b"abcdefghABCDEFGH"})
    return replace(base, **changes)


def test_a_manifest_lists_every_piece_with_owner_and_destination() -> None:
    plan = World(experts=2, ep=2, send_ep=2).plan()
    tables = {rank: cut_pieces(plan.for_receiver(rank), 1 << 20) for rank in plan.receivers}
    checksums = {r: pack_checksums(np.arange(len(t.pieces), dtype=np.uint64)) for r, t in tables.items()}
    entries = list(replace(manifest(), checksums=checksums).entries(tables))
    assert len(entries) == len(plan.moves)
    assert {(e.name, e.owner, e.destination, e.start, e.shape, e.dtype, e.nbytes) for e in entries} == {
        (x.name, x.send_rank, x.recv_rank, x.recv_start, x.shape, x.dtype, x.nbytes) for x in plan.moves
    }
    assert [e.checksum for e in entries if e.destination == 1] == list(range(len(tables[1].pieces)))


def test_a_manifest_reads_itself_back() -> None:
    assert Manifest.from_json(manifest().to_json()) == manifest()
    for text in ("", "[]", "{}", json.dumps({"format": 2}), manifest().to_json().replace("MTIz", "!!!!")):
        with pytest.raises(ManifestError):
            Manifest.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "other"},
        {"version": 6},
        {"nonce": "1" * 16},
        {"plan_digest": "b" * 64},
        {"limit": 1},
        {"checksums": {0: b"12345678", 1: b"abcdefghABCDEFGX"}},
        {"checksums": {0: b"12345678"}},
    ],
)
def test_the_digest_covers_everything(change: dict) -> None:
    assert manifest(**change).digest != manifest().digest


def test_a_receiver_computes_the_digest_from_its_own_part() -> None:
    whole = manifest()
    leaves = {**whole.leaves, 1: leaf_hash(b"abcdefghABCDEFGH")}
    assert manifest_digest("run", 5, NONCE, DIGEST, 1 << 20, leaves) == whole.digest


def test_checksums_keep_all_64_bits() -> None:
    values = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    assert np.array_equal(unpack_checksums(pack_checksums(values), 4), values)
    with pytest.raises(ManifestError, match="4 checksums for 3 pieces"):
        unpack_checksums(pack_checksums(values), 3)


OFFERS = (
    InProcessOffer(allocation="a", nbytes=1, keep=False, pid=7),
    SharedMemoryOffer(allocation="weftpub-0-x", nbytes=1, keep=True, name="weftpub-0-x"),
    CudaIpcOffer(allocation="a", nbytes=1, keep=True, gpu="GPU-1", handle=bytes(range(64))),
)


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.transport)
def test_offers_travel_as_plain_data(offer: object) -> None:
    message = m.ChunkMessage(
        **HEAD, version=1, nonce=NONCE, sender=0, sequence=0, offers=(offer,), layout=m.PackedLayout()
    )
    data = m.encode(message)
    json.loads(data)
    assert m.decode_request(data) == message


def test_checksums_travel_raw_behind_the_announcement() -> None:
    raw = bytes(range(256)) * 2  # line breaks and all
    fields: dict = {"run_id": "run", "session": "a" * 16, "request": 3, "version": 1, "nonce": "b" * 16}
    begin = m.Begin(plan_digest="c" * 64, limit=1, checksums=raw, leaves={0: "d" * 64}, digest="e" * 64, **fields)
    data = m.encode(begin)
    assert data.endswith(b"\n" + raw)
    assert m.decode_request(data) == begin
    assert m.request_number(data + b"x") == 3
    with pytest.raises(ChannelError, match="4 bytes behind a Verify message"):
        m.decode_request(m.encode(m.Verify(**fields)) + b"\nmore")


def test_an_offer_cannot_name_a_file_outside_the_folder() -> None:
    for name in ("../etc/passwd", "weftpub-a/../../x", "/dev/shm/weftpub-x", "other"):
        with pytest.raises(ValueError, match="name"):
            SharedMemoryOffer(allocation="a", nbytes=1, keep=True, name=name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "Invalid JSON"),
        (b"\x80\x04\x95", "Invalid JSON"),  # a pickle
        (b"{}", "Unable to extract tag"),
        (b'{"kind":"launch"}', "does not match any of the expected tags"),
        (b'{"kind":"pause","run_id":"run","session":"zz","request":1}', "session"),
        (b'{"kind":"pause","run_id":"run","session":"' + b"0" * 16 + b'","request":1,"more":1}', "Extra inputs"),
    ],
)
def test_other_data_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ChannelError, match=words):
        m.decode_request(data)


def test_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    message = m.SetPlan(**HEAD, part="x" * 2000)
    monkeypatch.setattr(m, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ChannelError, match="exceeds the limit of 1000"):
        m.encode(message)
    with pytest.raises(ChannelError, match="exceeds the limit of 1000"):
        m.decode_request(message.model_dump_json().encode())


def test_nothing_in_the_protocol_can_unpickle() -> None:
    """A peer's metadata server unpickled whatever was put to it, and ran code from it."""
    import weftpub

    root = Path(weftpub.__file__).parent
    for folder in ("channel", "wire", "transport", "receive", "publisher", "version", "plan"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            assert "import pickle" not in text, path
            assert "recv_pyobj" not in text, path
            assert "all_gather_object" not in text, path
            assert "torch.load" not in text, path


def test_a_process_is_known_by_more_than_its_number() -> None:
    here = local_identity()
    assert process_alive(here, here)
    assert not process_alive(here.model_copy(update={"pid": 2**22 - 1}), here)
    assert not process_alive(here.model_copy(update={"started": here.started - 1}), here)
    # nothing can be told about processes of other hosts and namespaces
    assert process_alive(here.model_copy(update={"pid": 2**22 - 1, "boot": "other"}), here)
    assert process_alive(here.model_copy(update={"pid": 2**22 - 1, "pid_space": "pid:[1]"}), here)
