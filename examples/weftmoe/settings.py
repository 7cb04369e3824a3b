"""From names and overrides to one checked `Settings`: files are laid over each other, each stating only what differs.

Order, later ones win:

    base.yaml
    models/MODEL.yaml
    lengths/LENGTH.yaml
    variants/VARIANT.yaml
    pairs/VARIANT-LENGTH.yaml       where that combination differs from its parts
    optimizers/OPTIMIZER.yaml       where it is not the base's
    pairs/VARIANT-OPTIMIZER.yaml
    smoke/common.yaml, smoke/PLACE.yaml
    nodes and gpus                  parallel sizes that follow from other numbers of GPUs
    options                         what the command line says in words of its own: text, and no YAML
    overrides                       `a.b=c` from the command line

A directory instead of a model's name takes the file of its own name, if there is one, and its config.json.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from weftmoe.checks import check
from weftmoe.schema import LengthName, OptimizerName, Settings, VariantName
from weftpub.errors import ConfigError

__all__ = [
    "CONFIGS",
    "LENGTHS",
    "MODELS",
    "OPTIMIZERS",
    "VARIANTS",
    "Settings",
    "SmokePlace",
    "load",
    "read",
    "render",
    "sources",
    "write",
]

CONFIGS = Path(__file__).parent / "configs"
SmokePlace = Literal["gpu", "cpu"]

VARIANTS: tuple[str, ...] = get_args(VariantName)
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
LENGTHS = tuple(sorted(path.stem for path in (CONFIGS / "lengths").glob("*.yaml")))
MODELS = tuple(sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml")))
_DEFAULT_MODEL = "qwen3-30b-a3b"


def load(
    variant: VariantName | str,
    *,
    model: str = _DEFAULT_MODEL,
    length: LengthName | str = "8k",
    optimizer: OptimizerName | str = "muon",
    smoke: SmokePlace | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    options: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """The resolved settings of one run. A `~` at the beginning of a path is the home directory.

    Args:
        variant, length, optimizer: names of files under configs/.
        model: name of a file under configs/models, in any case, with or without its organisation; or a Hugging Face
            directory.
        smoke: the tiny run, with a GPU or without; None is a real one.
        nodes, gpus: machines, and GPUs of each: experts are dealt over those of one machine, and every machine gets one
            engine.
        options: values by key, as they are: a path of digits, or one that is called "off", stays text.
        overrides: ``a.b=c``, the value in YAML.

    Raises:
        ConfigError: an unknown name, key or value, or values that exclude each other; names the key and what works.
    """
    model = os.path.expanduser(model)
    merged: Any = OmegaConf.create({})
    for path in sources(variant, model, length, optimizer, smoke):
        merged = OmegaConf.merge(merged, _load_file(path))
    if smoke is None and Path(model).is_dir():
        merged = OmegaConf.merge(merged, {"model": _checkpoint(Path(model))})
    if nodes is not None or gpus is not None:
        merged = OmegaConf.merge(merged, _sized(merged, nodes, gpus))
    for key, value in (options or {}).items():
        OmegaConf.update(merged, key, value)
    try:
        merged = OmegaConf.merge(merged, OmegaConf.from_dotlist(_checked_form(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"overrides {list(overrides)}: {error}; write them as block.key=value") from error
    return _validated(_at_home(values))


def sources(variant: str, model: str, length: str, optimizer: str, smoke: SmokePlace | None) -> tuple[Path, ...]:
    """The files that `load` lays over each other, in order."""
    _require("variant", variant, VARIANTS)
    _require("length", length, LENGTHS)
    _require("optimizer", optimizer, OPTIMIZERS)
    name = model.rstrip("/").rpartition("/")[2].lower()
    if not Path(model).is_dir():
        if _is_path(model):
            raise ConfigError(f"model {model!r}: there is no such directory; or name one of {', '.join(MODELS)}")
        _require("model", name, MODELS)
    parts = [
        "base",
        f"models/{name}",
        f"lengths/{length}",
        f"variants/{variant}",
        f"pairs/{variant}-{length}",
        f"optimizers/{optimizer}",
        f"pairs/{variant}-{optimizer}",
    ]
    if smoke is not None:
        parts += ["smoke/common", f"smoke/{smoke}"]
    optional = ("models/", "pairs/", "optimizers/")
    paths = [CONFIGS / f"{part}.yaml" for part in parts]
    return tuple(
        path for part, path in zip(parts, paths, strict=True) if path.exists() or not part.startswith(optional)
    )


def read(path: Path) -> Settings:
    """Settings that `write` wrote; ConfigError names the file and what is wrong with it."""
    try:
        return _validated(OmegaConf.to_container(_load_file(path), resolve=True))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def render(settings: Settings) -> str:
    """The resolved settings as YAML, in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.create(settings.model_dump(mode="json")))


def write(settings: Settings, path: Path) -> None:
    """Write the resolved settings, replacing the file whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(render(settings), encoding="utf-8")
    part.replace(path)


def _checkpoint(directory: Path) -> dict[str, Any]:
    """The model block of a Hugging Face directory."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
    except (OSError, json.JSONDecodeError, LookupError) as error:
        raise ConfigError(f"{path}: no Hugging Face config that names its architecture: {error!r}") from error
    name = directory.absolute().name.lower()
    return {"name": name, "path": str(directory), "architecture": architecture}


def _sized(merged: Any, nodes: int | None, gpus: int | None) -> dict[str, Any]:
    """Parallel sizes for other numbers of GPUs: experts over those of one node, whose engine takes them from there."""
    nodes = merged.cluster.nodes if nodes is None else nodes
    gpus = merged.cluster.gpus if gpus is None else gpus
    if nodes < 1 or gpus < 0:
        raise ConfigError(f"nodes={nodes}, gpus={gpus}: at least one node, and no negative number of GPUs")
    ranks = max(1, gpus)
    tensor = min(merged.train.tensor, ranks)
    attention = bool(merged.rollout.dp_attention)
    return {
        "cluster": {"nodes": nodes, "gpus": gpus},
        "train": {"expert": ranks, "tensor": tensor, "sequence_parallel": tensor > 1},
        "rollout": {"engines": nodes, "tensor": ranks, "expert": ranks, "data": ranks if attention else 1},
    }


def _load_file(path: Path) -> Any:
    try:
        return OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error


def _at_home(values: Any) -> Any:
    """A shell expands `~` at the beginning of a word only, and not in `data.path=~/x`."""
    for block, key in ((values, "out"), (values.get("data"), "path"), (values.get("model"), "path")):
        if isinstance(block, dict) and isinstance(block.get(key), str):
            block[key] = os.path.expanduser(block[key])
    return values


def _checked_form(overrides: Sequence[str]) -> list[str]:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {override!r} is not of the form block.key=value")
    return list(overrides)


def _is_path(model: str) -> bool:
    """Whether a directory is meant, there or not: a mistyped one must not become the configuration of its last part."""
    return model.startswith((".", "/", "~")) or model.strip("/").count("/") > 1


def _require(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"{kind} {name!r} is unknown; choose one of {', '.join(known)}")


def _validated(values: Any) -> Settings:
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error))) from None
    check(settings)
    return settings


def _problems(error: ValidationError) -> Iterator[str]:
    known = dict(_keys(Settings))
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            last = key.rpartition(".")[2]
            close = [name for name in known if name.rpartition(".")[2] == last] or difflib.get_close_matches(key, known)
            yield f"unknown key {key}" + (f"; did you mean {close[0]}?" if close else "")
        elif item["type"] == "missing":
            yield f"{key} has no value; set it"
        else:
            yield f"{key}={item['input']!r}: {item['msg'].removeprefix('Value error, ')}"


def _keys(block: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in block.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, info
