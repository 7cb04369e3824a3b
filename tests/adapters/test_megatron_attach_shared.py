"""An attached trainer whose FP8 experts lie in memory that an engine maps too."""

from pathlib import Path

import pytest
import torch

from weftpub.errors import ConfigError, StateError

pytestmark = pytest.mark.isolated("megatron")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    from attach_support import start

    start()


@pytest.mark.parametrize("keep", [True, False])
def test_training_and_offload_are_those_of_any_store_and_w_stays(tmp_path: Path, keep: bool) -> None:
    from attach_support import build, train

    from weftpub.memory import SharedAllocation
    from weftpub.store.shared import shared_canonical
    from weftpub_adapters.megatron.attached import attach

    folder = str(tmp_path / "meeting")
    straight, straight_opt = build("muon", "fp8")
    protected = not keep  # once each way
    shared, shared_opt = build("muon", "fp8", shared_folder=folder, shared_protected=protected)
    with attach(straight, straight_opt) as one, attach(shared, shared_opt) as other:
        with pytest.raises(ConfigError, match=f"maps it with protected={protected} already"):
            SharedAllocation.join(folder, "experts", "cpu", create=False, protected=keep)
        engine = SharedAllocation.join(folder, "experts", "cpu", create=False, protected=protected)
        train(straight, straight_opt)
        train(shared, shared_opt)
        assert one.store.sha256() == other.store.sha256()
        held = [item.tensor.data_ptr() for item in other.store.canonical()]
        assert held == [item.tensor.data_ptr() for item in shared_canonical(engine)]
        before = [item.tensor.contiguous().view(torch.uint8).clone() for item in shared_canonical(engine)]
        other.offload(keep=keep)
        for item, expected in zip(shared_canonical(engine), before, strict=True):
            assert torch.equal(item.tensor.contiguous().view(torch.uint8), expected)  # while the trainer is away
        engine.commit(1)
        engine.start_serving()
        other.reload()
        with pytest.raises(StateError, match="pause the engine first"):
            train(shared, shared_opt)
        engine.stop_serving()
        engine.admit_reading()  # one process plays both sides here, over one mapping
        engine.leave()


def test_a_folder_that_cannot_be_trusted_leaves_a_trainer_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    tmp_path.chmod(0o755)
    model, optimizer = build("muon", "fp8", shared_folder=str(tmp_path))
    with attach(model, optimizer) as attachment:
        assert "experts are not shared with the engine, publishes copy them" in caplog.text
        assert "others can enter it" in caplog.text
        train(model, optimizer)
        attachment.offload()
        attachment.reload()
