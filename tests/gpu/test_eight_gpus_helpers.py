"""The parts of eight_gpus.py that can tell a wrong number from a right one without a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import eight_gpus_limits
from eight_gpus_limits import Limits, Traffic, least_ms, traffic_of
from eight_gpus_numa import bind_to_node, cpus_of, gpu_nodes, node_count, page_nodes

from weftpub.plan import Move, Plan


def test_pages_are_found_on_a_node_of_this_machine() -> None:
    buffer = torch.ones(1 << 20)
    found = page_nodes(buffer.data_ptr(), buffer.nbytes)
    if found is None:
        pytest.skip("this kernel does not tell")
    assert set(found) <= set(range(node_count()))
    assert sum(found.values()) >= 200


def test_pages_that_nobody_touched_lie_nowhere() -> None:
    """A check that took unknown pages for local ones would pass on any machine."""
    import mmap

    memory = mmap.mmap(-1, 1 << 22)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert page_nodes(address, 1 << 22) is None


def test_nodes_and_cpus_as_the_kernel_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-6,9\n")
    assert cpus_of(1, tmp_path) == {4, 5, 6, 9}
    for name, node in (("0000:18:00.0", 0), ("0000:9a:00.0", 1), ("0000:ab:00.0", -1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(f"{node}\n")
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 00000000:18:00.0\necho 00000000:9A:00.0\necho 00000000:AB:00.0\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    assert gpu_nodes(tmp_path) == [0, 1, None]


def test_a_process_stays_where_its_gpu_is_not_known() -> None:
    before = os.sched_getaffinity(0)
    assert "not bound" in bind_to_node(None)
    assert os.sched_getaffinity(0) == before


def test_bytes_are_counted_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_gpus_limits.torch.distributed, "get_world_size", lambda: 2)

    def move(sender: int, receiver: int, nbytes: int) -> Move:
        return Move("x", sender, (0,), receiver, (0,), (nbytes,), "uint8", nbytes)

    plan = Plan((), (), (move(0, 0, 100), move(1, 1, 40), move(0, 1, 7), move(0, 1, 3), move(1, 0, 1)))
    assert traffic_of(plan) == Traffic(stays=(100, 40), leaves=(10, 1), arrives=(1, 10))


def test_the_gpu_with_most_to_do_sets_the_limit() -> None:
    traffic = Traffic(stays=(4_000_000, 8_000_000), leaves=(1_000_000, 0), arrives=(0, 1_000_000))
    limits = Limits(copy=(4000.0, 4000.0), link=(400.0, 200.0), link_alone=400.0)
    assert least_ms(traffic, limits) == pytest.approx({"copy": 0.004, "link": 0.005})
    assert least_ms(traffic, Limits((4000.0, 4000.0), None, None))["link"] == pytest.approx(0.0005)


def test_missing_gpus_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every section was started all the same, and failed after minutes with "it did not come to its end"."""
    import eight_gpus

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(eight_gpus, "prepare", lambda *_: pytest.fail("it went on"))
    monkeypatch.setattr(sys, "argv", ["eight_gpus.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        eight_gpus.main()
    assert "8 GPUs are wanted and 1 found" in capsys.readouterr().err
