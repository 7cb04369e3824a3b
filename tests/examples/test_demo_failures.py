"""The main job when something is broken: it must end with exit code 1 and the reason, commit nothing, leave nobody."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from demo_process import LIMIT_S, run_demo, running_demo, still_running

from weftpub_demo.report import Report

pytestmark = pytest.mark.slow


MISNAMING = """
from weftpub_demo import cpu_megatron
cpu_megatron.install()
from awex.converter.sglang_converter import SGlangToHFWeightConverter as Converter
original = Converter.convert_param
def convert_param(self, name, parameter, *args, **kwargs):
    found = original(self, name, parameter, *args, **kwargs)
    return [(hf_name.replace("up_proj", "upper_proj"), tensor) for hf_name, tensor in found]
Converter.convert_param = convert_param
"""

SWAPPING = """
from weftpub_demo import cpu_megatron
cpu_megatron.install()
from awex.converter.mcore_converter import McoreToHFWeightConverter as Converter
original = Converter.convert_param
swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
def convert_param(self, name, parameter, *args, **kwargs):
    found = original(self, name, parameter, *args, **kwargs)
    return [(".".join(swap.get(part, part) for part in hf_name.split(".")), tensor) for hf_name, tensor in found]
Converter.convert_param = convert_param
"""

FLIPPING = """
from weftpub.publisher import peers, staging
from weftpub.wire import messages
take, post, taken = staging.StagingPool.take, peers.PeerLink.post, []
def remember(self, *args):
    staged = take(self, *args)
    taken.append(staged)
    return staged
def flip(self, kind, *args, **fields):
    if kind is messages.ChunkMessage and fields["version"] == 3:
        taken[-1].buffer.tensor[1000] ^= 1
    return post(self, kind, *args, **fields)
staging.StagingPool.take, peers.PeerLink.post = remember, flip
"""


def test_names_that_awex_breaks_end_the_demo_before_anything_is_published(tmp_path: Path) -> None:
    """The names come from AWEX's own converters; were they made anywhere else, this run would pass."""
    done = run_demo(tmp_path, prelude=MISNAMING)
    assert done.code == 1
    assert done.last_line.startswith("DEMO FAILED after version 0: PlanError: ")
    assert "AWEX" in done.last_line
    assert (done.report.ok, done.report.committed_version, done.report.steps) == (False, 0, ())
    assert still_running(tmp_path) == []


def test_gate_and_up_that_awex_exchanges_are_caught_by_their_bytes(tmp_path: Path) -> None:
    """Both have one shape: names, sizes and coverage all agree, and every expert would compute nonsense.

    AWEX's names are taken, and the bytes that it gives them must be those that the store computes with under that name.
    """
    done = run_demo(tmp_path, prelude=SWAPPING)
    assert done.code == 1
    assert done.last_line.startswith("DEMO FAILED after version 0: PlanError: ")
    assert "up_proj" in done.report.error
    assert (done.report.ok, done.report.committed_version, done.report.steps) == (False, 0, ())
    assert still_running(tmp_path) == []


def test_a_bit_flipped_on_the_way_is_never_served(tmp_path: Path) -> None:
    """The third version's packed bytes change after their checksums were computed."""
    done = run_demo(tmp_path, prelude=FLIPPING)
    assert done.code == 1
    assert done.last_line.startswith("DEMO FAILED after version 2: ChecksumError")
    assert done.report.committed_version == 2
    assert [step.version for step in done.report.steps] == [1, 2]
    (record,) = (tmp_path / "demo-out").glob("committed-*.json")
    assert '"version":2' in record.read_text()
    assert still_running(tmp_path) == []


def test_a_receiver_killed_in_the_middle_is_named(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "version 2 committed" in line:
                break
        victim = next(child for child in psutil.Process(demo.pid).children() if _rank(child) == "1")
        victim.send_signal(signal.SIGKILL)
        out, _ = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 1
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert not report.ok
    assert report.committed_version < 400
    # Whoever is asking at that moment names it: the demo, or the publisher in the middle of a phase.
    named = re.match(
        r"PeerError: receiver 1 .*SIGKILL|ChannelError: .*receiver rank 1 .*its process ended", report.error
    )
    assert named, report.error
    last = out.rstrip().splitlines()[-1]
    assert last.startswith(f"DEMO FAILED after version {report.committed_version}: {report.error.partition(':')[0]}")
    assert still_running(tmp_path) == []


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_its_receivers_with_it(tmp_path: Path, number: signal.Signals) -> None:
    with running_demo(tmp_path) as demo:
        driver = psutil.Process(demo.pid)
        until = time.monotonic() + LIMIT_S
        while len(receivers := driver.children()) < 2:
            assert time.monotonic() < until, "the demo started no receivers"
            time.sleep(0.05)
        demo.send_signal(number)
        out, _ = demo.communicate(timeout=LIMIT_S)
    # A shell says 130 to both. Python ends itself by SIGINT if the signal came inside of code that an import executes.
    assert demo.returncode in (130, -signal.SIGINT)
    assert out.rstrip().splitlines()[-1] == "DEMO FAILED: interrupted; the receivers were ended"
    # One that was interrupted in the middle of being started leaves by itself, when its driver has gone.
    _, alive = psutil.wait_procs(receivers, timeout=20)
    assert alive == []


def _rank(process: psutil.Process) -> str:
    line = process.cmdline()
    return line[line.index("--rank") + 1] if "--rank" in line else ""
