"""Turn results of eight_gpus.py into a dated page.

python tests/gpu/eight_gpus_page.py docs/results/PAGE.md OUT/eight_gpus.json [...]

Several files are runs of different sections; of a section that is in several the last one counts. A page of fewer than
eight GPUs says so, and what therefore did not run. The JSON files go into a folder of the page's name; lines of a
notes.txt there are put into the page.
"""

import json
import sys
from pathlib import Path
from typing import Any

from eight_gpus import REFERENCE, SECTIONS
from eight_gpus_config import CONFIGURATIONS
from result_files import keep, made_anew, notes

_ALL = 8
_WORDS = {1: "one", 2: "two", 4: "four"}
_PHASES = ("checksum", "hello", "begin", "transfer", "verify", "record", "commit", "others", "total")
_GB = 1e9


def reduced(run: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """What a run on fewer GPUs than the script is for says nothing about; nothing for a run on all of them."""
    where, settings = run["environment"], run["settings"]
    ranks, tensor = where["ranks"], settings["tensor"]
    lines: list[str] = []
    if where["gpus"] and ranks < _ALL:
        count = _WORDS.get(ranks, str(ranks))
        experts = settings["shape"]["experts"] // ranks
        lines += [
            "",
            f"**This is the script for eight GPUs on {count}: TP{tensor} x DP{ranks // tensor}, EP{ranks}, with "
            f"{experts} experts a GPU as on eight. Eight GPUs were not available.** Not run therefore:",
            "",
            f"- the trainer as TP2 x DP4, EP8, with {_ALL * REFERENCE['experts_per_rank']} experts: exchanges of "
            f"tokens and gradients among more than {count} GPUs"
            + ("" if ranks > tensor else ", and sums of dense gradients over data-parallel ranks"),
            "- engines of DP8/EP8 with DP attention and of TP8/EP8 without",
            "- copies and links of eight GPUs at once: what is said here of limits and shares holds for "
            f"{count}, and the host's memory may bind eight where it does not bind {count}",
        ]
    missing = [name for name in SECTIONS if name not in sections]
    if missing:
        lines += ["", f"Sections of the script that are not on this page: {', '.join(missing)}."]
    if settings.get("node_count") == 1:
        lines += ["", "The host shows one NUMA node, so that checks of pages on the GPU's node cannot fail here."]
    return lines


def environments(runs: list[dict[str, Any]]) -> list[str]:
    """Where each run took place."""
    lines = ["", "| sections | ranks | commit | versions |", "|---|---|---|---|"]
    for run in runs:
        where = run["environment"]
        sections = ", ".join(f"{name} ({found['seconds']:.0f} s)" for name, found in run["sections"].items())
        versions = ", ".join(f"{k} {v}" for k, v in where.items() if k not in ("commit", "gpus", "ranks", "cpus"))
        lines.append(f"| {sections} | {where['ranks']} | {where['commit'][:12]} | {versions} |")
    return lines


def checks(name: str, section: dict[str, Any]) -> list[str]:
    """One line a check, one column a rank: what a rank found stands there if it is not the same everywhere."""
    rows = section["rows"]
    names = list(dict.fromkeys(check for row in rows for check in row["checks"]))
    lines = [
        "",
        f"| {name} | {' | '.join(f'rank {row["rank"]}' for row in rows)} | found |",
        "|---" * (len(rows) + 2) + "|",
    ]
    for check in names:
        found = [row["checks"].get(check) for row in rows]
        cells = ["-" if one is None else {True: "ok", False: "**failed**", None: "?"}[one["passed"]] for one in found]
        details = list(dict.fromkeys(str(one["detail"]) for one in found if one and one["detail"] is not None))
        shown = details[0] if details else ""
        if len(details) > 1:
            shown += f" (rank {rows[0]['rank']})"
        lines.append(f"| {check} | {' | '.join(cells)} | {shown.replace('|', '/')} |")
    return lines


def publishes(section: dict[str, Any]) -> list[str]:
    """Limits, traffic and phases, as rank 0 saw them."""
    first = section["rows"][0]
    if "limits" not in first:
        return []
    limits = first["limits"]
    link = limits["link"]
    lines = [
        "",
        f"Measured in the same run, all ranks at once: device copies read and write {min(limits['copy']):.0f} to "
        f"{max(limits['copy']):.0f} GB/s"
        + (f", each GPU sends {min(link):.0f} to {max(link):.0f} GB/s to the next one" if link else "")
        + (f" ({limits['link_alone']:.0f} GB/s one alone)." if limits["link_alone"] else "."),
    ]
    for layout in ("dp", "tp"):
        if f"{layout}_packed" not in first:
            continue
        traffic = first[f"{layout}_traffic"]
        sent, got = max(zip(traffic["leaves"], traffic["arrives"], strict=True), key=max)
        packed, cold = first[f"{layout}_packed"], first[f"{layout}_first_ms"]
        what = "DP attention" if layout == "dp" else "Tensor parallel"
        lines += [
            "",
            f"{what}: {packed['bytes'] / _GB:.3f} GB in all; at most {max(traffic['stays']) / _GB:.3f} stay on a GPU, "
            f"and the one with most to do sends {sent / _GB:.3f} over its link and gets {got / _GB:.3f}. At the limits "
            f"the copies take {packed['least_ms']['copy']:.2f} ms, the links {packed['least_ms']['link']:.2f} ms. The "
            "first publish, which plans, maps memory and compares the sha256 of every tensor, takes "
            f"{cold['total']:.0f} ms ({cold['sha256']:.0f} of them sha256); the medians are of {packed['publishes']} "
            "later ones each, with checksums.",
            "",
            f"| ms, medians | {' | '.join(_PHASES)} | copies, links at their limits: of the transfer | of all |",
            "|---" * (len(_PHASES) + 3) + "|",
        ]
        for way in ("packed", "in_place"):
            row = first[f"{layout}_{way}"]
            cells = [f"{row['ms'].get(phase, 0.0):.2f}" for phase in _PHASES]
            shares = [
                ", ".join(f"{row['share_of_limits'][phase][limit]:.3f}" for limit in ("copy", "link"))
                for phase in ("transfer", "total")
            ]
            lines.append(f"| {way.replace('_', ' ')} | {' | '.join([*cells, *shares])} |")
    return lines


def staging(section: dict[str, Any]) -> list[str]:
    """Ceilings and steps, as rank 0 gathered them."""
    first = section["rows"][0]
    if "ceilings_gb_s" not in first:
        return []
    lines = [
        "",
        "A step moves the masters and states of one layer's experts to each GPU and back. Its limit is what all GPUs "
        "copy both ways at once; that was measured by copies of 1 GiB, and a share may come out a little above 1.",
        "",
        "| pinned copies, GB/s | rank 0 alone | all ranks |",
        "|---|---|---|",
    ]
    for kind, found in first["ceilings_gb_s"].items():
        lines.append(f"| {kind} | {found['rank 0 alone']:.1f} | {found['all']:.1f} |")
    lines += [
        "",
        "| steps of all ranks at once | slots | GB/s | share of all copying both ways | of one copying alone |",
        "|---|---|---|---|---|",
    ]
    for name in ("muon", "adamw"):
        for row in first.get(name, ()):
            shares = f"{row['share_of_all_copying']:.3f} | {row['share_of_one_alone']:.3f}"
            lines.append(f"| {name} | {row['slots']} | {row['gb_s']:.1f} | {shares} |")
    return lines


def training(section: dict[str, Any]) -> list[str]:
    """What the configurations are, and how long each took on rank 0, checks included."""
    seconds = section["rows"][0].get("seconds", {})
    lines = [
        "",
        "| configuration | optimizer | experts | flat buffers move by | s, checks included |",
        "|---" * 5 + "|",
    ]
    for name, spent in seconds.items():
        optimizer, variant, way = CONFIGURATIONS[name]
        lines.append(f"| {name} | {optimizer} | {variant} | {way} | {spent:.1f} |")
    return lines if seconds else []


def main(page: Path, results: list[Path]) -> None:
    """Write the page."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    found = {name: section for run in runs for name, section in run["sections"].items()}
    sections = {name: found[name] for name in (*SECTIONS, *found) if name in found}
    folder = page.with_suffix("")
    failed = sum(len(row["failed"]) for found in sections.values() for row in found["rows"])
    count = sum(len(row["checks"]) for found in sections.values() for row in found["rows"])
    where, sizes = runs[-1]["environment"], runs[-1]["settings"]["shape"]
    device = f"{where['gpus']} x {where.get('gpu', 'GPU')}" if where["gpus"] else f"{where['ranks']} processes, no GPU"
    lines = [
        f"# The whole path on one host, {device}",
        "",
        "Made by `tests/gpu/eight_gpus_page.py` from `tests/gpu/eight_gpus.py`: hidden "
        f"{sizes['hidden']}, intermediate {sizes['intermediate']}, {sizes['experts']} experts, top-k {sizes['top_k']}, "
        f"{sizes['layers']} layers ({runs[-1]['settings']['publish_layers']} in `publish`), {sizes['tokens']} tokens a "
        f"rank, TP{runs[-1]['settings']['tensor']}, EP{where['ranks']}, full recomputation.",
        "",
        f"{count} checks over all ranks, {failed} failed.",
        *reduced(runs[-1], sections),
        *notes(folder),
        *environments(runs),
    ]
    for name, found in sections.items():
        lines += ["", f"## {name.capitalize()}"]
        lines += {"train": training, "publish": publishes, "staging": staging}.get(name, lambda _: [])(found)
        lines += checks(name, found)
    for run in runs:
        keep(folder, "-".join(run["sections"]), run)
    lines += made_anew("eight_gpus_page.py", page, ("-".join(run["sections"]) for run in runs))
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
