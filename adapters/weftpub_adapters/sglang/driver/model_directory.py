"""The model directory that an engine starts from when its weights come from the first publish: a config that says which
modules are FP8, the tokenizer, and no weights.

    python -m weftpub_adapters.sglang.driver.model_directory SOURCE TARGET [--format fp8|bf16]

Start the engine on TARGET with `load_format="dummy"`. A process of its own is the better place: SGLang's model is built
once, without memory, to see which modules it asks its FP8 scheme about.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.checkpoint.export import COMPANION_FILES
from weftpub.errors import ConfigError, WeftpubError

__all__ = ["engine_config", "write_engine_directory"]

Format = Literal["fp8", "bf16"]


def engine_config(hf_config: Mapping[str, Any], format: Format = "fp8") -> dict[str, Any]:
    """The config.json of an engine: routed experts as `format` says, everything else in BF16.

    Raises:
        ConfigError: the architecture is not supported.
    """
    if format not in ("fp8", "bf16"):
        raise ConfigError(f"format: expected 'fp8' or 'bf16', found {format!r}")
    plain = {key: value for key, value in hf_config.items() if key not in ("quantization_config", "dtype")}
    plain["torch_dtype"] = "bfloat16"  # without it SGLang would choose float16
    if format == "bf16":
        return plain
    from weftpub_adapters.sglang.quantized import quantization_config

    return {**plain, "quantization_config": quantization_config(plain)}


def write_engine_directory(
    target: str | Path, source: str | Path, format: Format = "fp8", *, overwrite: bool = False
) -> Path:
    """Write an engine's model directory from a Hugging Face checkpoint directory, or from its config.json alone.

    Args:
        target: appears whole, or not at all.
        source: directory with config.json, and the tokenizer if requests hold text; or the config file.
        format: of the routed experts.
        overwrite: replace an existing target.

    Returns:
        the directory; give it to the engine as model_path, with load_format="dummy".

    Raises:
        ConfigError: no config.json, or an architecture that is not supported. CheckpointError: the disk fails.
    """
    path = Path(source)
    folder, file = (path, path / "config.json") if path.is_dir() else (path.parent, path)
    try:
        hf_config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a model's config.json: {error}") from error
    files = {"config.json": (json.dumps(engine_config(hf_config, format), indent=2, sort_keys=True) + "\n").encode()}
    if path.is_dir():
        files |= {name: (folder / name).read_bytes() for name in COMPANION_FILES if (folder / name).is_file()}
    with AtomicDirectory(Path(target), needed=sum(map(len, files.values())), overwrite=overwrite) as directory:
        for name, data in files.items():
            directory.write(name, [data])
    return directory.target


def main(arguments: list[str] | None = None) -> None:
    """Command line of `write_engine_directory`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=["fp8", "bf16"], default="fp8", help="of the routed experts")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(arguments)
    try:
        print(write_engine_directory(given.target, given.source, given.format, overwrite=given.overwrite))
    except WeftpubError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
