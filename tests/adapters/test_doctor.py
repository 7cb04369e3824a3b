"""The doctor: every kind of trouble is found, named with its remedy, and weighed; having no GPU is no trouble."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub import cli
from weftpub_adapters.doctor import Facts, Finding, Gpu, Wanted, gather, judge, worst
from weftpub_adapters.doctor.command import _has_delta_nets, doctor
from weftpub_adapters.doctor.cudnn import Cudnn, find_cudnns, folder_and_major
from weftpub_adapters.doctor.environment import environment_findings
from weftpub_adapters.doctor.facts import Limits, Smi, read_smi

GIB = 1 << 30
H200 = Gpu(0, "NVIDIA H200", "aa", (9, 0), 140 * GIB, GIB // 2)
SMI = Smi("GPU-aa", "580.159.04", False, 1980.0, 700.0, 700.0)

GOOD = Facts(
    python="3.12.3",
    torch="2.11.0+cu130",
    cuda="13.0",
    gpus=(H200,),
    smi=(SMI,),
    adapters={
        "megatron-core": (True, "0.19.2"),
        "transformer-engine": (True, "2.20.2"),
        "sglang": (True, "0.5.23"),
        "awex": (True, "0.9.0"),
    },
    packages={
        "triton": "3.6.0",
        "transformers": "5.17.0",
        "emerging-optimizers": "0.3.0",
        "megatron-bridge": "0.6.2",
        "torch-memory-saver": "0.0.9.post1",
        "sglang-kernel": "0.4.5",
        "math-verify": "0.9.1",
        "pyarrow": "26.0.1",
    },
    limits=Limits(memlock=None, files=1 << 20, shm=64 * GIB, ptrace_scope=1),
    ram=2000 * GIB,
    ram_free=1900 * GIB,
    out=("/data", 1000 * GIB, True),
)


def judged(wanted: Wanted | None = None, **changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in judge(replace(GOOD, **changes), wanted or Wanted())}


def levels(wanted: Wanted | None = None, **changes: Any) -> dict[str, str]:
    """Findings that are not ok."""
    return {name: f.level for name, f in judged(wanted, **changes).items() if f.level != "ok"}


def test_a_good_machine_is_well() -> None:
    assert levels(Wanted(variant="fp8", gpus=1, host_bytes=300 * GIB, need_gpu=True)) == {}


def test_whatever_is_not_ok_says_what_to_do() -> None:
    bad = Facts(
        python="3.11.9",
        torch="2.9.0",
        cuda="13.0",
        gpus=(replace(H200, capability=(8, 0), name="A100"), replace(H200, index=1, used=30 * GIB)),
        smi=(Smi("GPU-aa", "535.1", True, 1410.0, 300.0, 400.0), Smi("GPU-bb", "535.1", False, 1980.0, 400.0, 400.0)),
        adapters=dict.fromkeys(GOOD.adapters, (False, "not installed")),
        packages={},
        limits=Limits(memlock=1 << 16, files=256, shm=64 << 20, ptrace_scope=2),
        ram=64 * GIB,
        ram_free=10 * GIB,
        out=("/", 0, False),
        peers=((0, 1),),
        ipc="expandable segments",
        shared_memory="no VMM",
        port=(29500, False),
        environment={"TRITON_INTERPRET": "1", "RANK": "0", "NVTE_X": "1"},
    )
    findings = judge(bad, Wanted(variant="fp8", gpus=4, nodes=2, host_bytes=100 * GIB))
    assert worst(findings) == "fail"
    for finding in findings:
        assert finding.level != "ok", finding
        assert finding.remedy, finding
    assert {f.name for f in findings} >= {"python", "torch", "cuda", "gpus", "mig", "peer access", "port 29500"}


@pytest.mark.parametrize(
    ("wanted", "level"),
    [(Wanted(), "warn"), (Wanted(need_gpu=True), "fail"), (Wanted(gpus=8), "fail"), (Wanted(gpus=0), "warn")],
)
def test_a_machine_without_a_gpu(wanted: Wanted, level: str) -> None:
    bare = {"gpus": (), "smi": (), "adapters": {**GOOD.adapters, "transformer-engine": (False, "needs a CUDA GPU")}}
    found = judged(wanted, **bare)
    assert found["gpus"].level == level
    # It cannot be built there, and nothing asks for it: a warning sent people off to install it.
    assert found["transformer-engine"].level == "ok"
    assert worst(found.values()) == level


def test_gpus_that_torch_does_not_see() -> None:
    assert judged(gpus=())["cuda"].level == "fail"
    assert "CUDA_VISIBLE_DEVICES" in judged(gpus=())["cuda"].remedy


@pytest.mark.parametrize(
    ("variant", "level"), [("fp8", "fail"), ("bf16", "warn"), ("baseline", "warn"), (None, "warn")]
)
def test_other_gpus_than_hopper(variant: Any, level: str) -> None:
    assert judged(Wanted(variant=variant), gpus=(replace(H200, capability=(10, 0)),))["gpu 0"].level == level


def test_a_gpu_that_somebody_uses() -> None:
    assert levels(gpus=(replace(H200, used=20 * GIB),)) == {"gpu 0": "warn"}


def test_too_few_and_unequal_gpus() -> None:
    assert levels(Wanted(gpus=8)) == {"gpus": "fail"}
    both = (H200, replace(H200, index=1, name="NVIDIA H100", uuid="bb"))
    assert levels(gpus=both, nvlinks=18) == {"gpu models": "warn"}


@pytest.mark.parametrize(("driver", "level"), [("580.1", "ok"), ("575.57", "fail"), ("unknown", "ok")])
def test_the_driver_has_to_know_torchs_cuda(driver: str, level: str) -> None:
    assert judged(smi=(replace(SMI, driver=driver),))["cuda"].level == level


def test_mig_power_and_clocks() -> None:
    assert levels(smi=(replace(SMI, mig=True),)) == {"mig": "fail"}
    assert levels(smi=(replace(SMI, power_limit=500.0),)) == {"power": "warn"}
    two = (H200, replace(H200, index=1, uuid="bb"))
    slow = (SMI, replace(SMI, uuid="GPU-bb", max_clock=1200.0))
    assert levels(gpus=two, smi=slow, nvlinks=18) == {"clocks": "warn"}
    # A slow GPU that the run does not see is nobody's trouble.
    assert levels(smi=slow) == {}


def test_peers_and_links() -> None:
    two = (H200, replace(H200, index=1, uuid="bb"))
    assert levels(gpus=two, peers=((0, 1),)) == {"peer access": "warn"}
    assert levels(gpus=two, nvlinks=0) == {"peer access": "warn"}
    assert levels(gpus=two, nvlinks=18) == levels(gpus=two) == {}


def test_sharing_memory() -> None:
    assert levels(ipc="expandable segments") == {"cuda ipc": "warn"}
    assert levels(shared_memory="the driver has no VMM") == {"one allocation for both": "warn"}


def test_roles_with_environments_of_their_own() -> None:
    engine_only = {name: (name == "sglang", "x") for name in GOOD.adapters}
    assert levels(Wanted(role="engine"), adapters=engine_only) == {}
    assert set(levels(Wanted(role="trainer"), adapters=engine_only)) == {"megatron-core", "transformer-engine", "awex"}


@pytest.mark.parametrize(
    ("role", "lacks"),
    [
        ("engine", ("emerging-optimizers", "megatron-bridge", "math-verify", "pyarrow")),
        ("trainer", ("torch-memory-saver", "sglang-kernel")),
    ],
)
def test_a_role_is_not_told_to_install_the_other_ones_packages(role: Any, lacks: tuple[str, ...]) -> None:
    """An engine's environment, which must never hold Megatron, was told to install Megatron-Bridge."""
    packages = {name: version for name, version in GOOD.packages.items() if name not in lacks}
    assert levels(Wanted(role=role), packages=packages) == {}
    assert set(levels(packages=packages)) == set(lacks)


def test_packages_outside_of_what_was_tested() -> None:
    assert levels(packages={**GOOD.packages, "transformers": "4.57.0"}) == {"transformers": "warn"}
    assert levels(torch="2.14.1") == {"torch": "warn"}


def test_sglangs_kernels_are_looked_for_where_there_is_a_gpu() -> None:
    """The install page ends with the doctor, which had nothing to say about kernels that were forgotten."""
    without = {name: version for name, version in GOOD.packages.items() if name != "sglang-kernel"}
    assert levels(packages=without) == {"sglang-kernel": "warn"}
    assert "sglang-kernel==0.4.5" in judged(packages=without)["sglang-kernel"].remedy
    assert "sglang-kernel" not in judged(gpus=(), smi=(), packages=without)


@pytest.mark.parametrize("name", ["math-verify", "pyarrow"])
def test_what_reads_prompts_and_judges_answers_is_looked_for(name: str) -> None:
    """The doctor knew what was installed of them, and said nothing: a verifier was missed after a whole rollout."""
    without = {other: version for other, version in GOOD.packages.items() if other != name}
    assert levels(packages=without) == {name: "warn"}
    assert "pip install" in judged(packages=without)[name].remedy


def test_deepep_is_the_baselines() -> None:
    assert levels(Wanted(variant="baseline")) == {"deep-ep": "warn"}


TORCHS, SYSTEMS = Cudnn("9.19.0", "/venv/nvidia/cudnn/lib"), Cudnn("9.21.0", "/lib/x86_64-linux-gnu")


def test_gated_delta_nets_need_their_kernels_on_a_gpu() -> None:
    """The trainer's; SGLang brings its own, and without a GPU plain torch computes them."""
    with_kernels = {**GOOD.packages, "flash-linear-attention": "0.6.0", "tilelang": "0.1.15"}
    assert levels(Wanted(delta_nets=True)) == {"flash-linear-attention": "fail"}
    assert levels(Wanted(delta_nets=True), packages=with_kernels) == {}
    assert "flash-linear-attention" not in judged(Wanted(delta_nets=False))
    assert "flash-linear-attention" not in judged(Wanted(delta_nets=True, role="engine"))
    assert "flash-linear-attention" not in judged(Wanted(delta_nets=True), gpus=(), smi=())


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "level"),
    [
        ((9, 0), "3.3.1", None, "ok"),
        ((9, 0), "3.4.0", None, "warn"),
        ((9, 0), "3.6.0", None, "warn"),
        ((9, 0), "3.6.0+git1", None, "warn"),
        ((9, 0), "3.7.1", None, "ok"),
        ((9, 0), "3.6.0", "0.1.15", "ok"),
        ((10, 0), "3.6.0", None, "ok"),
    ],
)
def test_wrong_gradients_of_delta_nets_are_told(
    capability: tuple[int, int], triton: str, tilelang: str | None, level: str
) -> None:
    """Qwen3.5's first step on an H200 ended in flash-linear-attention's refusal; the doctor was content."""
    packages = {**GOOD.packages, "flash-linear-attention": "0.6.0", "triton": triton, "tilelang": tilelang}
    gpus = (replace(H200, capability=capability),)
    found = judged(Wanted(delta_nets=True), packages=packages, gpus=gpus)["flash-linear-attention"]
    assert found.level == level
    assert ("install tilelang" in found.remedy) == (level == "warn")


@pytest.mark.parametrize(
    ("model", "found"), [("Qwen/Qwen3.5-35B-A3B-Base", True), ("qwen3-30b-a3b", False), ("./none", None), (None, None)]
)
def test_a_model_says_whether_it_has_gated_delta_nets(model: str | None, found: bool | None) -> None:
    assert _has_delta_nets(model) is found


def test_two_cudnns_that_do_not_fit_together() -> None:
    """A run died when it imported TransformerEngine after torch had used its cuDNN: parts of torch's were loaded, the
    others came from the system, and a symbol was missing."""
    assert levels(cudnns=(TORCHS, SYSTEMS)) == {"cudnn": "warn"}
    finding = judged(cudnns=(TORCHS, SYSTEMS))["cudnn"]
    for cudnn in (TORCHS, SYSTEMS):
        assert f"{cudnn.version}" in finding.found
        assert cudnn.folder in finding.found
    assert f"LD_LIBRARY_PATH={TORCHS.folder}" in finding.remedy


def test_cudnns_that_nobody_can_mix() -> None:
    assert levels(cudnns=(TORCHS,)) == levels(cudnns=(TORCHS, replace(SYSTEMS, version="9.19.0"))) == {}
    assert judged(cudnns=(TORCHS,))["cudnn"].found == "9.19.0"
    without_te = {**GOOD.adapters, "transformer-engine": (False, "not installed")}
    assert "cudnn" not in judged(cudnns=(TORCHS, SYSTEMS), adapters=without_te)


def test_limits() -> None:
    locked = replace(GOOD.limits, memlock=1 << 26)
    assert levels(limits=locked) == {"locked memory": "warn"}
    assert levels(Wanted(nodes=2), limits=locked, infiniband=True) == {"locked memory": "fail"}
    assert levels(Wanted(nodes=1), limits=locked, infiniband=True) == {"locked memory": "warn"}
    # Nodes without such devices were turned away, and a run on two of them without GPUs.
    assert levels(Wanted(nodes=2), limits=locked) == {"locked memory": "warn"}
    assert levels(limits=replace(GOOD.limits, files=4096)) == {"open files": "warn"}
    assert levels(limits=replace(GOOD.limits, files=256)) == {"open files": "fail"}
    assert levels(limits=replace(GOOD.limits, shm=64 << 20)) == {"/dev/shm": "warn"}
    assert levels(limits=replace(GOOD.limits, ptrace_scope=3)) == {"ptrace scope": "warn"}


@pytest.mark.parametrize(("free", "level"), [(400, "ok"), (305, "warn"), (200, "fail")])
def test_host_memory_against_what_the_run_pins(free: int, level: str) -> None:
    assert judged(Wanted(host_bytes=300 * GIB), ram_free=free * GIB)["host memory"].level == level


def test_output_and_port() -> None:
    assert levels(out=("/data", GIB, True)) == {"output": "warn"}
    assert levels(out=("/data", 1000 * GIB, False)) == {"output": "fail"}
    assert levels(port=(29500, False)) == {"port 29500": "fail"}
    assert levels(port=(29500, True)) == {}


# Environment.


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "warn"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true", "warn"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", None),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "warn"),
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "true", "warn"),
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "0", None),
        ("CUDA_VISIBLE_DEVICES", "MIG-1234", "fail"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1234", None),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0", "warn"),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1", None),
        ("NVTE_DEBUG", "1", "warn"),
        ("TRITON_INTERPRET", "1", "fail"),
        ("SGLANG_USE_CPU_ENGINE", "1", "fail"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("NCCL_P2P_DISABLE", "1", "warn"),
        ("LOCAL_RANK", "0", "warn"),
        ("HOME", "anywhere", None),
    ],
)
def test_variables(name: str, value: str, level: str | None) -> None:
    (finding,) = environment_findings({name: value}, None, gpu=True)
    assert finding.level == (level or "ok")
    assert level is None or name.rstrip("S")[:5] in finding.name + finding.found


def test_a_scale_rule_that_the_engine_does_not_share_is_fatal_for_fp8() -> None:
    """Scales of activations were powers of two in the trainer (TransformerEngine's default) and FP32 in the engine, and
    log-probs drifted apart although every weight byte agreed."""
    (finding,) = environment_findings({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}, "fp8", gpu=True)
    assert finding.level == "fail"


def test_variables_of_gpus_do_not_matter_without_one() -> None:
    found = environment_findings({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}, None, gpu=False)
    assert [finding.level for finding in found] == ["ok"]


def test_two_names_of_one_setting() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}
    (finding,) = environment_findings(both, None, gpu=True)
    assert finding.found == "both are set"


# Looking.


def test_nvidia_smi_is_read_whatever_it_says() -> None:
    text = "GPU-aa, 580.1, Disabled, 1980, 700.00, 700.00\nGPU-bb, 580.1, [N/A], [N/A], [N/A], 700\nan error\n"
    first, second = read_smi(text)
    assert first == Smi("GPU-aa", "580.1", False, 1980.0, 700.0, 700.0)
    assert (second.mig, second.max_clock, second.power_limit) == (False, None, None)
    assert read_smi(None) == ()


def test_a_process_knows_where_its_cudnn_is_from() -> None:
    line = "7f5c2b0e4000-7f5c2b0e7000 r--p 00000000 fe:00 2371914                    "
    assert folder_and_major([line, f"{line}/a/libcudnn_graph.so.9", f"{line}/a b/libcudnn.so.9.1.0"]) == ("/a b", "9")
    assert folder_and_major([line, f"{line}/a/libcuda.so.1"]) is None


def test_a_second_cudnn_on_the_loaders_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch is not asked for its version: it would load a part, and this process could not load TransformerEngine.
    place = folder_and_major(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    if place is None:
        pytest.skip("this torch has no cuDNN")
    folder, major = place
    part = f"libcudnn_graph.so.{major}"
    monkeypatch.setenv("LD_LIBRARY_PATH", folder)
    (own,) = find_cudnns()
    assert Path(own.folder).samefile(folder)
    assert own.version.startswith(f"{major}.")
    (tmp_path / part).write_bytes((Path(folder) / part).read_bytes())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert find_cudnns() == (own, Cudnn(own.version, str(tmp_path)))


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = gather(tmp_path / "not" / "there", {"A": "1"}, port=0)
    assert facts.out == (str(tmp_path), facts.out[1], True)
    assert facts.ram >= facts.ram_free > 0
    assert facts.port == (0, True)
    assert facts.environment == {"A": "1"}
    assert set(facts.adapters) == set(GOOD.adapters)


def test_the_command_prints_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {"doctor": doctor}
    code = cli.run(["doctor", "--out", str(tmp_path), "--json"], commands=commands)
    report = json.loads(capsys.readouterr().out)
    assert (report["level"] == "fail") == (code == 1)
    assert {"name", "level", "found", "expected", "remedy"} == set(report["findings"][0])
    assert cli.run(["doctor", "--gpus", "64", "--out", str(tmp_path)], commands=commands) == 1
    out = capsys.readouterr().out
    assert cli.run(["doctor", "--port", "99999"], commands=commands) == 2, "it was an OverflowError"
    assert "fail gpus" in out
    assert "doctor: a run would fail" in out


@pytest.mark.gpu
def test_a_gpu_machine_is_seen_as_it_is(tmp_path: Path) -> None:
    facts = gather(tmp_path, {})
    assert len(facts.gpus) == torch.cuda.device_count()
    assert {gpu.capability for gpu in facts.gpus} == {torch.cuda.get_device_capability(0)}
    assert all(0 <= gpu.used < gpu.total for gpu in facts.gpus)
    # torch names GPUs as nvidia-smi does, where there is one.
    shown = {row.uuid.removeprefix("GPU-") for row in facts.smi}
    assert not shown or {gpu.uuid.removeprefix("GPU-") for gpu in facts.gpus} <= shown
    assert facts.ipc is None
    findings = {finding.name: finding for finding in judge(facts, Wanted(need_gpu=True))}
    assert findings["gpus"].level == findings["cuda"].level == "ok"
