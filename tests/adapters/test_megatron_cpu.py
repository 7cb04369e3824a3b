"""The stand-ins that let Megatron run without CUDA: installed once, before Megatron, and never on a GPU machine."""

import subprocess
import sys

import pytest
import torch


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def test_a_process_that_imported_megatron_first_is_refused() -> None:
    """Its modules hold references to the real functions already."""
    if torch.cuda.is_available():
        pytest.skip("changes nothing on a machine with CUDA")
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from weftpub_demo import cpu_megatron\n"
        "try: cpu_megatron.install()\n"
        "except RuntimeError as error: print(error, cpu_megatron.installed())"
    )
    assert run(code) == "call cpu_megatron.install() before the first import of megatron False"


def test_a_gpu_machine_is_left_alone() -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: True; before = torch.cuda.current_device\n"
        "from weftpub_demo import cpu_megatron\n"
        "print(cpu_megatron.install(), cpu_megatron.installed(), torch.cuda.current_device is before)"
    )
    assert run(code) == "False False True"


@pytest.mark.isolated("megatron")
def test_installing_twice_is_installing_once() -> None:
    from megatron_support import megatron_ready

    from weftpub_demo import cpu_megatron

    megatron_ready()
    if torch.cuda.is_available():
        assert not cpu_megatron.install()
        return
    replaced = torch.cuda.current_stream
    assert cpu_megatron.install()
    assert torch.cuda.current_stream is replaced
    assert torch.cuda.current_device() == torch.device("cpu")
    assert not torch.cuda.is_available()
    assert torch.empty(2, device="cuda").device.type == "cpu"
