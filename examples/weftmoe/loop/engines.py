"""From settings to a rollout engine: SGLang where there are GPUs, the torch sampler where there are none."""

from pathlib import Path
from typing import Any

from weftmoe.env import role_environment
from weftmoe.loop.ranks import Place
from weftmoe.rollout import Rollout
from weftmoe.schema import Settings

__all__ = ["make_rollout"]


def make_rollout(
    settings: Settings,
    model: Path,
    hf_config: dict[str, Any],
    stops: tuple[int, ...],
    run_id: str,
    shared: str | None = None,
    *,
    resumed: int = 0,
) -> Rollout:
    """The engines of a run, one a node, not started yet. `shared`: where this node's meets the trainer to map one
    memory for the experts. `resumed`: step of the checkpoint that this start goes on from, or 0.
    """
    nodes = settings.rollout.engines
    work, form = settings.out / Place.here(nodes).named("engine"), "fp8" if settings.variant == "fp8" else "bf16"
    if settings.rollout.engine == "sampler":
        from weftmoe.rollout.torch_sampler import SamplerSettings, TorchRollout

        return TorchRollout(
            SamplerSettings(
                model=model,
                format=form,
                path=settings.publish.path,
                stops=stops,
                temperature=settings.rollout.sampling.temperature,
                top_p=settings.rollout.sampling.top_p,
                work=work,
                run_id=run_id,
                environment=role_environment(settings, "engine"),
                ready_s=settings.rollout.ready_timeout,
                generate_s=settings.rollout.generate_timeout,
                publish_s=settings.publish.deadline,
                verify_sha256=settings.publish.verify_sha256,
                staging_bytes=settings.publish.staging_mib << 20,
                bucket_bytes=settings.publish.bucket_mib << 20,
                shared=shared,
                nodes=nodes,
            )
        )
    from weftmoe.rollout.sglang import SglangRollout

    return SglangRollout(settings, model, hf_config, stops, run_id, work, shared, resumed)
