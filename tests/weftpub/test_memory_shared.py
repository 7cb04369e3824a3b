"""One allocation, several processes: who makes it, who brings newcomers in, what happens when one of them dies."""

import gc
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_support import CATALOGUE, LAYOUT, Partner, mappings

from weftpub.errors import ChannelError, ConfigError, TransportError
from weftpub.memory import Catalogue, SharedAllocation, handover, joined, sharing_obstacle
from weftpub.memory.handover import Facts, HandoverServer, take
from weftpub.memory.pages import memory_file, open_pages
from weftpub.store.shared import layout_of
from weftpub.transport import offer_of, shared_exports

W13 = "layers.1.w13"


@pytest.fixture
def partner() -> Generator[Partner]:
    started = Partner()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def engine() -> Generator[Partner]:
    started = Partner()
    yield started
    started.stop()


def first_bytes(memory: SharedAllocation, count: int = 2) -> list[int]:
    return memory.tensor(W13).view(torch.uint8).reshape(-1)[:count].tolist()


@pytest.mark.parametrize("first", ["here", "there"])
def test_either_side_makes_the_memory_and_both_see_one_set_of_bytes(
    tmp_path: Path, engine: Partner, first: str
) -> None:
    if first == "there":
        there = engine("join", str(tmp_path), "experts")
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as memory:
        if first == "here":
            there = engine("join", str(tmp_path), "experts")
        assert there == (memory.id, first == "there")
        assert memory.created == (first == "here")
        address = memory.tensor(W13).data_ptr()
        engine("write", W13, 1, 77)
        memory.tensor(W13).view(torch.uint8).reshape(-1)[0] = 33
        assert engine("read", W13, 0, 2) == first_bytes(memory) == [33, 77]
        assert memory.tensor(W13).data_ptr() == address
        assert joined(memory.id) is memory
        second = CATALOGUE.by_name["layers.3.w2"].offset + LAYOUT.hidden * LAYOUT.intermediate
        assert memory.offset_of(memory.tensor("layers.3.w2")[1]) == second
        views = {"empty": torch.empty(0), "inside": memory.tensor("layers.3.w2")[1], "outside": torch.zeros(3)}
        assert shared_exports(views) == {"inside": (offer_of(memory), second)}
        assert shared_exports(views, ["another"]) == {}
        engine("leave")
    assert joined(memory.id) is None
    assert shared_exports({"outside": torch.zeros(3)}) == {}


def test_memory_outlives_its_maker_brings_in_a_third_and_is_freed_with_the_last(tmp_path: Path) -> None:
    """The trainer made the memory and was killed. The engine must go on serving from it, hand it to the trainer that
    comes back, and nothing may be left once nobody maps it."""
    maker, third = Partner(), Partner()
    try:
        allocation, _ = maker("join", str(tmp_path), "experts")
        maker("write", W13, 0, 5)
        memory = SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE)
        maker.kill()
        assert first_bytes(memory, 1) == [5]
        assert third("join", str(tmp_path), "experts", False) == (allocation, False)
        third("write", W13, 0, 6)
        assert first_bytes(memory, 1) == [6]
        kept = memory.tensor(W13)
        memory.leave()
        memory.leave()
        del memory
        assert kept.view(torch.uint8).reshape(-1)[0] == 6  # a tensor keeps the mapping
        del kept
        gc.collect()
        assert mappings() == 0
        third("leave")
        with pytest.raises(ConfigError, match="no process holds shared memory 'experts' for cpu"):
            SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE, create=False)
        assert third("mappings") == 0
        assert not list(tmp_path.glob("*.s"))
        with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as fresh:
            assert fresh.id != allocation
            assert first_bytes(fresh, 1) == [0]
    finally:
        maker.stop()
        third.stop()


def test_memory_that_nobody_refers_to_leaves_by_itself(tmp_path: Path) -> None:
    memory = SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE)
    before = len(os.listdir("/proc/self/fd"))
    assert list(tmp_path.glob("*.s"))
    del memory
    gc.collect()
    assert not list(tmp_path.glob("*.s"))
    assert mappings() == 0
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize("access", [0, 1])
def test_a_write_at_the_wrong_time_is_caught_on_the_spot(tmp_path: Path, partner: Partner, access: int) -> None:
    partner("join", str(tmp_path), "experts")
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as memory:
        partner("write", W13, 0, 5)
        partner("protect", access)
        if access:
            assert partner("read", W13, 0, 1) == [5]
            assert partner.dies_of("write", W13, 0, 9) == -signal.SIGSEGV
        else:
            assert partner.dies_of("read", W13, 0, 1) == -signal.SIGSEGV
        assert first_bytes(memory, 1) == [5]


def test_memory_made_for_other_experts_is_refused_with_the_difference(tmp_path: Path) -> None:
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as memory:
        other = Catalogue(CATALOGUE.entries, {**CATALOGUE.about, "experts": [5, 4, 7]})
        with pytest.raises(ConfigError, match=r"experts: expected \[5, 4, 7\], found \[4, 5, 7\]"):
            SharedAllocation.join(tmp_path, "experts", "cpu", other)
        wider = Catalogue.pack({"a": ((4, 4), torch.float32)}, CATALOGUE.about)
        with pytest.raises(ConfigError, match=r"a: expected float32 \[4, 4\] at byte 0, found nothing"):
            SharedAllocation.join(tmp_path, "experts", "cpu", wider)
        with pytest.raises(ConfigError, match=r"layers.9.w13: not in this shared memory"):
            memory.tensor("layers.9.w13")
        assert layout_of(memory.catalogue) == LAYOUT
        with SharedAllocation.join(tmp_path, "experts", "cpu") as again:  # takes what is there
            assert again is memory  # one mapping for all parts of a process
        assert joined(memory.id) is memory
        with pytest.raises(ConfigError, match="this process maps it with protected=False already"):
            SharedAllocation.join(tmp_path, "experts", "cpu", protected=True)
    assert joined(memory.id) is None


def test_catalogue_places_tensors_apart_and_reads_back_only_what_fits() -> None:
    catalogue = Catalogue.pack({"a": ((3,), torch.float32), "b": ((2, 2), torch.float8_e4m3fn)}, {"what": 1})
    assert [(e.name, e.offset, e.nbytes) for e in catalogue.entries] == [("a", 0, 12), ("b", 512, 4)]
    text = catalogue.to_json()
    assert Catalogue.from_json(text, 516) == catalogue
    for wrong, limit in ((text, 515), (text.replace("512", "8"), 516), (text.replace("[3]", "[0]"), 516), ("{}", 9)):
        with pytest.raises(ConfigError, match="the catalogue of a shared allocation cannot be read"):
            Catalogue.from_json(wrong, limit)
    with pytest.raises(ConfigError, match="at least one tensor"):
        Catalogue.pack({})
    with pytest.raises(ConfigError, match=r"a: shape .* has no elements"):
        Catalogue.pack({"a": ((0, 3), torch.float32)})


# Who may come.


def test_folder_and_socket_are_the_owners_alone() -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket's path has 107 bytes at most
        _owners_alone(Path(short))


def _owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    with pytest.raises(ChannelError, match="others can enter it"):
        SharedAllocation.join(folder, "experts", "cpu", CATALOGUE)
    obstacle = sharing_obstacle("cpu", folder)
    assert obstacle is not None
    assert "others can enter it" in obstacle
    assert "copies the experts instead" in obstacle
    with SharedAllocation.join(tmp_path / "own", "experts", "cpu", CATALOGUE):
        assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
        (path,) = (tmp_path / "own").glob("*.s")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sharing_obstacle("cpu", tmp_path / "own") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_even_where_it_can_reach_the_socket(partner: Partner) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        SharedAllocation.join(folder, "experts", "cpu", CATALOGUE) as memory,
    ):
        (path,) = Path(folder).glob("*.s")
        os.chmod(folder, 0o777)
        os.chmod(path, 0o777)
        assert partner("other_user", str(path)) == "(b'', [])"
        assert [server.refused for server in memory._servers] == [[65534]]


def test_memory_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE):
        monkeypatch.setattr(handover, "peer_user", lambda _: 4242)
        with pytest.raises(ChannelError, match="user 4242 listens there"):
            SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE)


@pytest.mark.parametrize("wrong", ["text", "descriptors", "size", "seals", "header"])
def test_a_hand_over_that_is_none_is_refused(tmp_path: Path, wrong: str) -> None:
    facts = Facts(allocation="0" * 32, device="cpu", nbytes=8192)
    good = memory_file("good", 8192)
    other = memory_file("small", 4096) if wrong == "size" else os.memfd_create("loose") if wrong == "seals" else good
    path = str(tmp_path / "h.s")
    server = HandoverServer(path, facts, (other, other))
    if wrong == "text":
        server._text = b"[]"
    if wrong == "descriptors":
        server._descriptors = (other,)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        if wrong in ("text", "descriptors"):
            with pytest.raises(ChannelError, match=r"not of this release|handed over 1 descriptors"):
                take(path)
            return
        found = take(path)
        assert found is not None
        if wrong == "header":
            with pytest.raises(TransportError, match="is no header of a shared allocation"):
                SharedAllocation._open(found, torch.device("cpu"), "cpu", "experts", False)
            return
        with pytest.raises(TransportError, match="expected 8192 bytes that cannot shrink"):
            open_pages(torch.device("cpu"), found[1], facts.nbytes)
    finally:
        server.close()
    assert take(path) is None


def test_a_stopped_process_keeps_nobody_out_where_another_has_the_memory(
    tmp_path: Path, partner: Partner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_PATIENCE_S", 0.3)
    third = Partner()
    try:
        allocation, _ = third("join", str(tmp_path), "experts")
        third.hold()
        with pytest.raises(TransportError, match=r"did not hand over within 0\.3 s; is it stopped"):
            SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE)  # it may not make another one
        third.go_on()
        partner("join", str(tmp_path), "experts")
        third.hold()
        monkeypatch.setattr(handover, "_PATIENCE_S", 2.0)  # the other one must answer within it
        for _ in range(2):  # whichever socket comes first
            with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE, create=False) as memory:
                assert memory.id == allocation
        assert len(list(tmp_path.glob("*.s"))) == 2
    finally:
        third.stop()


def test_a_dead_trainers_child_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer was killed, a worker that it had forked lived on with its open socket: every newcomer connected,
    waited, and gave up."""
    monkeypatch.setattr(handover, "_PATIENCE_S", 30.0)  # longer than a test may take
    trainer = Partner()
    child = 0
    try:
        trainer("join", str(tmp_path), "experts")
        child = trainer("fork")
        trainer.kill()
        with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as fresh:
            assert fresh.created
    finally:
        trainer.stop()
        if child:
            os.kill(child, signal.SIGKILL)


def test_a_process_out_of_descriptors_answers_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that could not accept once answered nobody any more, and every newcomer waited for it in vain."""
    failing = [OSError(24, "Too many open files"), OSError(24, "Too many open files")]
    descriptors = memory_file("a", 4096), memory_file("b", 4096)
    accept = socket.socket.accept

    def sometimes(self: socket.socket) -> Any:
        if failing:
            raise failing.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    server = HandoverServer(str(tmp_path / "x.s"), Facts(allocation="0" * 32, device="cpu", nbytes=4096), descriptors)
    found = take(server.path)
    assert found is not None
    assert not failing
    server.close()
    for descriptor in (*descriptors, *found[1:]):
        os.close(descriptor)


def test_sockets_of_dead_processes_are_cleared_and_names_are_checked(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    import socket

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "experts@cpu.dead.s"))
    dead.close()
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE):
        assert not (tmp_path / "experts@cpu.dead.s").exists()
    with pytest.raises(ConfigError, match=r"name '../x'"):
        SharedAllocation.join(tmp_path, "../x", "cpu", CATALOGUE)
