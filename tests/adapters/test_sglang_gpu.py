"""SGLang's layers on a real GPU: memory that really goes and comes, post-processing that moves nothing, the probe."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from checkpoints import fp8_tensors
from layouts import LAYOUTS
from test_sglang_receive import bits, make_plans, publish

from weftpub_adapters.sglang import SGLangEngine, build_model

pytestmark = [pytest.mark.isolated("sglang"), pytest.mark.gpu]


@pytest.fixture(scope="module")
def engine(hf_config: dict[str, Any]) -> SGLangEngine:
    return SGLangEngine(build_model(hf_config, tp_size=2, ep_size=2, rank=1, device="cuda"))


def test_layout_and_backends_are_those_of_the_cpu_build(engine: SGLangEngine) -> None:
    """One plan serves both: on SM90 the Triton runner keeps weights and scales as they are loaded."""
    described = engine.describe()
    layout = LAYOUTS["tp2-ep2"]
    cpu = SGLangEngine(build_model(layout.config, tp_size=2, ep_size=2, rank=1)).describe()
    ours = {name: spec for name, spec in described.layout().items() if name not in described.settings["kept"]}
    theirs = {name: spec for name, spec in cpu.layout().items() if name not in cpu.settings["kept"]}
    assert ours == theirs
    assert described.settings["backends"] == {"moe_runner": "triton", "moe_a2a": "none"}
    assert described.device.startswith("GPU-")


def test_publish_through_offload_gives_the_bytes_and_frees_the_memory(engine: SGLangEngine) -> None:
    layout = LAYOUTS["tp2-ep2"]
    ranks = [SGLangEngine(build_model(layout.config, tp_size=2, ep_size=2, rank=0, device="cuda")), engine]
    plan = make_plans({"tp2-ep2": [rank.describe() for rank in ranks]})["tp2-ep2"]
    sources = {name: tensor.cuda() for name, tensor in fp8_tensors(layout.config).items()}
    weights = sum(p.untyped_storage().nbytes() for p in engine.served.model.parameters())
    before = torch.cuda.memory_allocated()
    engine.pause()
    engine.offload()
    assert before - torch.cuda.memory_allocated() >= weights * 0.99
    engine.reload()
    for version in (1, 2):
        publish(engine, 1, plan, sources, version)
        experts = engine.served.model.model.layers[1].mlp.experts
        wanted = sources["model.layers.1.mlp.experts.6.down_proj.weight"]
        assert torch.equal(bits(experts.w2_weight[2].data), bits(wanted))
        scale = sources["model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"]
        assert torch.equal(experts.w13_weight_scale_inv[1].data[4:], scale)
    assert abs(torch.cuda.memory_allocated() - before) <= weights * 0.05
    probe = engine.probe_layer(1, torch.randn(4, 256))
    assert torch.isfinite(probe.output).all()
    assert set(probe.sha256) == {f"layers.1.experts.{e}.{p}" for e in range(4, 8) for p in ("fc1", "fc2")}


SETTLED = """
import os
import sys
import torch
from torch_memory_saver import torch_memory_saver
from weftpub_adapters.sglang.plugin.hooks import _SettledSaver
torch_memory_saver.hook_mode = "torch"
with torch_memory_saver.region(tag="weights"):
    weights = torch.ones(1 << 24, device="cuda")
torch.cuda.synchronize()
torch.cuda._sleep(1 << 29)  # what the GPU is busy with
copied = weights.clone()
saver = _SettledSaver(torch_memory_saver) if sys.argv[1] == "settled" else torch_memory_saver
saver.pause("weights")
torch.cuda.synchronize()
print(int(copied.sum()), flush=True)
os._exit(0)  # the saver's allocator refuses what Python frees at its end
"""


@pytest.mark.parametrize("saver", ["settled", "bare"])
def test_copies_of_weights_end_before_the_weights_are_unmapped(saver: str) -> None:
    """The bare saver shows why: SGLang's release copies buffers and unmaps at once (sgl-project/sglang#37932)."""
    done = subprocess.run(
        [sys.executable, "-c", SETTLED, saver], capture_output=True, text=True, timeout=120, check=False
    )
    if saver == "settled":
        assert (done.returncode, done.stdout) == (0, f"{1 << 24}\n"), done.stderr
    else:
        assert "illegal memory access" in done.stderr
