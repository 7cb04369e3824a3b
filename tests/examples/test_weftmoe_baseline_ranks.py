"""The baseline on two ranks of a CPU: Megatron as it is, each rank with half of the experts, gathers whole tensors in
several buckets, which SGLang's own loader puts into its real layers.
"""

import os
import subprocess
import sys

import pytest
from test_weftmoe_loop_run import ROOT, SMALL

from weftmoe import settings as composed
from weftmoe.env import role_environment
from weftmoe.telemetry import read_log
from weftmoe.telemetry.log import LoggedRun

STEPS = 2
# One layer of four experts: embedding and head, q, k, v and o, three matrices an expert, router, four norms of the
# layer and one at the end.
TENSORS = 2 + 4 + 4 * 3 + 1 + 4 + 1
ELEMENTS = 2 * 512 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 4 * 3 * 128 * 128 + 4 * 128 + 2 * 128 + 2 * 32 + 128

# Buckets are set in MiB, and all of this model is smaller. Processes that judge answers import this file, too.
RANK = """
import sys
if __name__ == "__main__":
    from weftmoe import worker
    from weftmoe.rollout import torch_sampler
    make = torch_sampler.make_buckets
    torch_sampler.make_buckets = lambda shards, **more: make(shards, **{**more, "most": 100_000})
    sys.exit(worker.main(sys.argv[1:]))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LoggedRun:
    out = tmp_path_factory.mktemp("baseline")
    # Answers may all be wrong, and give no gradient: decay moves the weights then.
    ranks = ["cluster.cpu_ranks=2", "train.expert=2", "optimizer.lr=2e-3", "optimizer.weight_decay=100"]
    overrides = [f"out={out}", f"steps={STEPS}", "checkpoint.save=2", *SMALL, *ranks]
    settings = composed.load("baseline", smoke="cpu", overrides=overrides)
    (out / "rank.py").write_text(RANK, encoding="utf-8")
    path = out / "settings.yaml"
    composed.write(settings, path)
    folders = [str(ROOT / part) for part in ("", "kernels", "adapters", "examples")]
    base = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts=0", str(out / "rank.py"), str(path)],
        env=role_environment(settings, "trainer", base),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"WEFTMOE OK steps={STEPS} version={STEPS} " in done.stdout
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    return read_log(out)


def test_each_step_serves_what_the_ranks_trained(run: LoggedRun) -> None:
    """All bytes were compared: each rank's own with what it gathered, both ranks' buckets, and SGLang's parameters with
    what was loaded."""
    assert [(step.served_version, step.published_version) for step in run.steps] == [(0, 1), (1, 2)]
    for step in run.steps:
        check = step.byte_check
        assert (check.method, check.matched, check.pieces) == ("checksum", True, TENSORS)
        assert check.bytes == 2 * ELEMENTS


def test_weights_that_did_not_arrive_would_show(run: LoggedRun) -> None:
    for step in run.steps:
        assert step.after is not None
        assert step.before["difference_abs_mean"] < 0.02
        assert step.after["difference_abs_mean"] > 5 * step.before["difference_abs_mean"]
