"""Turn results of zero_copy.py into a dated page, with the memory of a step as a picture.

    python tests/gpu/zero_copy_page.py docs/results/PAGE.md OUT/zero_copy.json [MORE.json[:section,section] ...]
        [BEFORE.json:earlier ...]

Sections may come from several runs; a section that ran in two of them is an error, so that no page picks the better one
by accident: name those to take, or mark a run as an earlier one. Of the speeds of sections that are not taken the page
says what they were. The picture and the JSON files go into a folder of the page's name; lines of a notes.txt there are
put into the page.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from result_files import keep, made_anew, notes, plain

GIB = 1 << 30
# What memory is for -> colour: the trainer's in blues, the engine's in oranges, what both map in green.
KINDS: Mapping[str, str] = {
    "experts of both": "#2e7d4f",
    "trainer: experts": "#1f4e8c",
    "trainer: W^T": "#4a7fc1",
    "trainer: other weights": "#86aede",
    "trainer: gradients": "#c4d8f2",
    "trainer: masters in flight": "#5b5fa8",
    "engine: experts": "#b5541c",
    "engine: other weights": "#e08a4f",
    "engine: cache": "#f4c9a4",
    "contexts and the rest": "#c8c8c8",
}
WAYS = (
    "other weights alone",
    "experts shared",
    "experts copied",
    "SGLang, flattened bucket",
    "SGLang, named tensors",
)

EARLIER = "earlier"  # said of a run that only tells what was measured before

# How the names of a section's checks and numbers begin; what begins like none of them is of `mechanism`.
STARTS: Mapping[str, tuple[str, ...]] = {
    "pools": ("pools",),
    "speed": (*WAYS, "at most", "wt=", "shared_minus", "copied_minus", "expert_parameters", "other_bytes"),
    "phases": ("phases, ", "link, ", "peak_bytes", "link_bytes", "shared experts"),
    "kills": ("kills",),
    "engine": ("engine",),
}


def section_of(name: str) -> str:
    """The section of a check or a number."""
    return next((section for section, starts in STARTS.items() if name.startswith(starts)), "mechanism")


def merged(sources: list[str]) -> dict[str, Any]:
    """The sections of several runs."""
    found: dict[str, Any] = {"checks": {}, "numbers": {}, "seconds": {}, "runs": [], "earlier": []}
    for source in sources:
        path, _, chosen = source.partition(":")
        data = plain(json.loads(Path(path).read_text(encoding="utf-8")))
        if chosen == EARLIER:
            found["earlier"].append(data)
            continue
        sections = set(chosen.split(",")) if chosen else set(data["seconds"])
        if "speed" in data["seconds"] and "speed" not in sections:
            found["earlier"].append(data)
        twice = found["seconds"].keys() & sections
        if twice or not sections <= data["seconds"].keys():
            raise SystemExit(f"{path} holds {', '.join(data['seconds'])}; taken before: {', '.join(twice) or 'none'}")
        seconds = {name: value for name, value in data["seconds"].items() if name in sections}
        found["runs"].append({"environment": data["environment"], "seconds": seconds, "raw": data, "chosen": chosen})
        found["seconds"] |= seconds
        for key in ("checks", "numbers"):
            found[key] |= {name: value for name, value in data[key].items() if section_of(name) in sections}
        keys = {"phases": "phases", "kills": "kills", "engine": "cycles"}
        found |= {keys[name]: data[keys[name]] for name in sections & keys.keys() if keys[name] in data}
    found["failed"] = [name for name, row in found["checks"].items() if row["passed"] is False]
    return found


def earlier_name(data: Mapping[str, Any]) -> str:
    """Of the raw file of an earlier run."""
    return f"{'-'.join(data['seconds'])}-{data['environment']['commit']}"


def earlier_section(runs: list[Mapping[str, Any]], folder: str, kept: Mapping[int, str]) -> list[str]:
    """What earlier runs of the speeds found, each with its raw file."""
    if not runs:
        return []
    lines = [
        "",
        "Earlier runs of this section:",
        "",
        "| commit | cores | experts shared | other weights alone | difference, ms | raw |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        numbers, where = run["numbers"], run["environment"]
        name = kept.get(id(run)) or earlier_name(run)
        shared, alone = (numbers[way]["median_ms"] for way in ("experts shared", "other weights alone"))
        lines.append(
            f"| {where['commit']} | {where['cpus']} | {shared:.2f} | {alone:.2f} | "
            f"{numbers['shared_minus_other_ms']:.2f} | [{name}.json]({folder}/{name}.json) |"
        )
    return lines


def speed_section(numbers: Mapping[str, Any], earlier: list[str]) -> list[str]:
    """The ways that a version can take, and W^T."""
    shared, alone = numbers["experts shared"], numbers["other weights alone"]
    extra = numbers["shared_minus_other_ms"]
    lines = [
        "",
        "## From the last update to serving",
        "",
        f"{numbers['expert_parameters'] / 1e9:.2f}e9 expert parameters (the experts of Qwen3.5-35B-A3B at expert "
        f"parallel size 8) and {numbers['other_bytes'] / 1e9:.2f} GB of other weights, from the last matrix that the "
        "quantizer wrote to 'committed, serving', with checksums on. The trainer is one process, the engine another.",
        "",
        f"**{shared['median_ms']:.2f} ms with shared experts, {extra:.2f} ms more than the copy of the other weights "
        "alone**; at most 5 ms more was asked for.",
        *earlier,
        "",
        "| | median ms | range | n | bytes copied |",
        "|---|---|---|---|---|",
    ]
    total = numbers["experts copied"]["moved_bytes"]
    for way in WAYS:
        row = numbers.get(way)
        if row is not None:
            spread = f"{row['min_ms']:.2f} to {row['max_ms']:.2f}"
            lines.append(
                f"| {way} | {row['median_ms']:.2f} | {spread} | {row['n']} | {row.get('moved_bytes', total):,} |"
            )
    phases = [name for name in shared["phases_ms"] if name != "total"]
    lines += ["", f"| ms, medians | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for name, row in (("other weights alone", alone), ("experts shared", shared), ("experts copied", None)):
        row = numbers[name] if row is None else row
        lines.append(f"| {name} | {' | '.join(f'{row["phases_ms"].get(phase, 0.0):.2f}' for phase in phases)} |")
    lines += [
        "",
        "`seal` reads the quantizer's sums and says that the generation is whole; `verify` waits for the checksums "
        "that the engine's process computes from the memory it serves, begun behind the last copy. SGLang's own update "
        "is its serializer, its IPC and its loaders (`WeightUpdater.update_weights_from_tensor`), without its server's "
        "round trips.",
        "",
        "| W^T | a step writes, ms | a backward pass has it made, ms | a reload makes it, ms | bytes |",
        "|---|---|---|---|---|",
    ]
    for wt in ("store", "rebuild"):
        row = numbers[f"wt={wt}"]
        lines.append(
            f'| `wt="{wt}"` | {row["write_ms"]:.1f} | {row["backward_ms"]:.2f} | {row["reload_ms"]:.2f} | '
            f"{row['wt_bytes']:,} |"
        )
    return lines


def phases_section(phases: Mapping[str, Any], picture: str) -> list[str]:
    """Memory by phase and bytes over the link."""
    names = list(next(iter(phases.values()))["memory"])
    lines = [
        "",
        "## Memory of a step",
        "",
        f"![GPU memory by phase]({picture})",
        "",
        "Trainer and engine on one GPU, as the GPU itself says (GiB, contexts included). The same sizes: gradient "
        "buffers in FP32 for all parameters, a cache of fixed size, no activations. Experts are quantized and "
        "published for real; no forward or backward pass runs.",
        "",
        f"| GiB | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for variant, found in phases.items():
        cells = (f"{sum(found['memory'][name].values()) / GIB:.1f}" for name in names)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    lines += [
        "",
        "Bytes between host and GPU in one step, without the optimizer's own masters and state, which cross once each "
        "way in every variant alike: the copies that were asked for, and what the GPU's PCIe counters saw.",
        "",
        "| | experts | all, to the GPU | all, to the host | counters, to the GPU | counters, to the host |",
        "|---|---|---|---|---|---|",
    ]
    for variant, found in phases.items():
        copied, seen = found["link"]["copied"], found["link"]["counters"]
        told = (f"{seen[way]:,}" if seen[way] is not None else "not told" for way in ("to_gpu", "to_host"))
        lines.append(
            f"| {variant} | {found['experts_over_link']:,} | {copied['to_gpu']:,} | {copied['to_host']:,} | "
            f"{' | '.join(told)} |"
        )
    return lines


def kills_section(kills: Mapping[str, Any]) -> list[str]:
    """Deaths at random points."""
    lines = [
        "",
        "## Deaths",
        "",
        f"Either side killed with SIGKILL at points drawn from seed {kills['seed']}, in the middle of steps of a "
        "trainer's and an engine's process. After each, what the engine serves is compared with the sum over the bytes "
        "of the version that it claims.",
        "",
        "| | killed | after ms | what was left | back in ms |",
        "|---|---|---|---|---|",
    ]
    for row in kills["rounds"]:
        lines.append(f"| {row['round']} | {row['victim']} | {row['ms']} | {row['left']} | {row['restart_ms']} |")
    return lines


def engine_section(data: Mapping[str, Any]) -> list[str]:
    """SGLang itself."""
    cycles, numbers = data["cycles"], data["numbers"]
    steps = sorted(row["s"] for row in cycles)
    deaths = sorted((int(cycle), who) for cycle, who in numbers["engine_kills"]["cycles"].items())
    lines = [
        "",
        "## SGLang",
        "",
        f"{len(cycles)} cycles of drain, release, step, publish and resume with CUDA graphs and the memory saver on, "
        f"median {steps[len(steps) // 2]:.2f} s each (sha256 of every tensor on both sides included). Killed: "
        + ", ".join(f"{who} in cycle {cycle}" for cycle, who in deaths)
        + f" (seed {numbers['engine_kills']['seed']}). An engine is up after {numbers['engine_up_s_1']} s.",
        "",
        "The plan, by its own account:",
        "",
        *(f"- {line}" for line in numbers["engine_plan"]),
        "",
        "| check | | found |",
        "|---|---|---|",
    ]
    return lines + [check_row(name.removeprefix("engine: "), row) for name, row in checks_of(data, "engine: ")]


def mechanism_section(data: Mapping[str, Any]) -> list[str]:
    """Checks of the mechanism, and what its calls cost."""
    numbers = data["numbers"]
    names = [name for name in data["checks"] if section_of(name) == "mechanism"]
    lines = [
        "",
        "## Mechanism",
        "",
        f"Preflight {numbers['preflight_ms']:.0f} ms; making the memory {numbers['join_ms']['make']:.0f} ms, joining "
        f"it {numbers['join_ms']['join']:.0f} ms; a change of a mapping's protection at most "
        f"{max(numbers['protect_ms'].values()):.2f} ms.",
        "",
        "| check | | found |",
        "|---|---|---|",
    ]
    return lines + [check_row(name, data["checks"][name]) for name in names]


def pools_section(data: Mapping[str, Any]) -> list[str]:
    """Whether the allocator lets an engine load with its experts apart."""
    lines = ["", "## The allocator's calls of a load", "", "| check | | found |", "|---|---|---|"]
    return lines + [check_row(name.removeprefix("pools, "), row) for name, row in checks_of(data, "pools, ")]


def checks_of(data: Mapping[str, Any], start: str) -> list[tuple[str, Any]]:
    """Checks of a section."""
    return [(name, row) for name, row in data["checks"].items() if name.startswith(start)]


def check_row(name: str, row: Mapping[str, Any]) -> str:
    """One check as a row of a table; a check that was not judged says so."""
    detail = "" if row["detail"] is None else str(row["detail"]).replace("|", "/").replace("\n", " ")
    detail = detail.partition(" / frame #")[0]
    if len(detail) > 300:
        detail = f"{detail[:300].rpartition(' ')[0]} ..."
    word = {True: "ok", False: "**failed**", None: "seen, not judged"}[row["passed"]]
    return f"| {name} | {word} | {detail} |"


def draw(phases: Mapping[str, Any], path: Path) -> None:
    """Stacked bars: a group for each phase, a bar for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, variants = list(next(iter(phases.values()))["memory"]), list(phases)
    figure, axes = plt.subplots(figsize=(11, 5.2), layout="constrained")
    width = 0.8 / len(variants)
    for kind, colour in KINDS.items():
        if not any(kind in found["memory"][name] for found in phases.values() for name in names):
            continue
        label: str | None = kind
        for number, variant in enumerate(variants):
            memory = phases[variant]["memory"]
            heights = [memory[name].get(kind, 0) / GIB for name in names]
            below = [
                sum(memory[name].get(k, 0) for k in list(KINDS)[: list(KINDS).index(kind)]) / GIB for name in names
            ]
            places = [group + (number - (len(variants) - 1) / 2) * width for group in range(len(names))]
            axes.bar(places, heights, width * 0.92, below, color=colour, label=label, edgecolor="white", linewidth=0.4)
            label = None
    tops: list[float] = []
    for number, variant in enumerate(variants):
        for group, name in enumerate(names):
            top = sum(phases[variant]["memory"][name].values()) / GIB
            tops.append(top)
            place = group + (number - (len(variants) - 1) / 2) * width
            axes.text(place, top, f" {variant}\n {top:.1f}", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.set_ylim(0, max(tops) * 1.32)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("GPU memory of trainer and engine, GiB")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(page: Path, results: list[str]) -> None:
    """Write the page, its picture and the raw files."""
    data = merged(results)
    where = data["runs"][0]["environment"]
    folder = page.with_suffix("")
    kept = {id(run["raw"]): "-".join(run["seconds"]) for run in data["runs"]}
    before = [one for one in data["earlier"] if id(one) not in kept]
    for run in data["runs"]:
        keep(folder, kept[id(run["raw"])], run["raw"])
    for one in before:
        keep(folder, earlier_name(one), one)
    lines = [
        f"# Experts that never move, {where.get('gpu', 'CPU')}",
        "",
        f"torch {where['torch']}, CUDA {where.get('cuda', '-')}, triton {where.get('triton', '-')}, sglang "
        f"{where.get('sglang', '-')}, {where['cpus']} cores. From `tests/gpu/zero_copy.py`: "
        + "; ".join(
            f"{', '.join(run['seconds'])} at commit {run['environment']['commit'] or 'unknown'}" for run in data["runs"]
        )
        + ".",
        "",
        "Every check passed." if not data["failed"] else "**Failed:** " + ", ".join(data["failed"]) + ".",
        *notes(folder),
    ]
    if "speed" in data["seconds"]:
        lines += speed_section(data["numbers"], earlier_section(data["earlier"], folder.name, kept))
    if "phases" in data:
        draw(data["phases"], folder / "phases.png")
        lines += phases_section(data["phases"], f"{folder.name}/phases.png")
    if "pools" in data["seconds"]:
        lines += pools_section(data)
    if "engine" in data["seconds"]:
        lines += engine_section(data)
    if "kills" in data:
        lines += kills_section(data["kills"])
    if "mechanism" in data["seconds"]:
        lines += mechanism_section(data)
    sources = [f"{'-'.join(run['seconds'])}{':' * bool(run['chosen'])}{run['chosen']}" for run in data["runs"]]
    sources += [f"{earlier_name(one)}:{EARLIER}" for one in before]
    lines += made_anew("zero_copy_page.py", page, sources)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
