"""Turn results of weftmoe_smoke.py into a dated page.

python tests/gpu/weftmoe_smoke_page.py docs/results/PAGE.md OUT/weftmoe_smoke.json[:LABEL] [MORE.json ...]

Sections may come from several runs of the script; each row names its commit. A section that two files hold is taken
from the later one, and the page says how many checks of the earlier one failed. Sections of a file with a label
(OUT/weftmoe_smoke.json:AdamW) stand beside those without; those of a file with a plus (OUT/weftmoe_smoke.json:+), which
ran other seeds, are added to what the files before it hold. The JSON files go into a folder of the page's name, where
the picture of the train section is expected as weftmoe_smoke.png; lines of a notes.txt there are put into the page.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_files import keep, made_anew, notes

TITLES = {
    "script": "The first command of the README",
    "train": "Training",
    "kl": "KL of two steps that differ by one publish",
    "frozen": "Learning rate 0",
    "resume": "Killed or told to end, and resumed",
    "shared": "Experts in memory that trainer and engine both map",
    "two-gpus": "Two GPUs",
}
ABOUT = {
    "script": "`run.sh fp8 --smoke` with the doctor and a model of its own, before anything else was started; then "
    "`weftpub report`.",
    "train": "Rewards are means of the first and last steps of a run; differences are mean |trainer - rollout| "
    "log-probs of trained tokens, before the update.",
    "kl": "Learning rate 1e-6, the same prompts and random numbers in both steps. Runs named `-two` give each token "
    "two of eight experts, as all other runs do: where two experts are nearly equal, trainer and engine may choose "
    "differently, a few such tokens are most of the KL, and the ratio must not exceed 1.2 by more than twice its "
    "error. Runs named `-all` give each token all eight: nothing is chosen, and the bound of 1.2 must hold as it is. "
    "Over several seeds the sums of the KL are compared, by the same rule. In brackets stand standard errors; "
    "that of a ratio is computed as if the two steps had nothing in common.",
    "frozen": "Eight completions, scored by the engine after each publish; the results are compared bit by bit.",
    "resume": "Deterministic kernels; sha256 over all published tensors of each step.",
    "shared": "FP8 twice, deterministic kernels: experts copied, and experts in place.",
    "two-gpus": "FP8; the first part of a name is the trainer's layout, the second the engine's.",
}

ADDED = "+"
ALL_SEEDS = "over all seeds"  # ends the names of such checks


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run_table(rows: list[dict[str, Any]]) -> list[str]:
    """A line per run."""
    lines = [
        "| run | commit | steps | reward, first | last | difference, first | last | s a step | rollout | train "
        "| publish | ready after s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        seconds = row["seconds"]
        cells = [
            row["run"],
            row["commit"][:7],
            str(row["steps"]),
            number(row["first_reward"], ".3f"),
            number(row["last_reward"], ".3f"),
            number(row["difference_first"], ".4f"),
            number(row["difference_last"], ".4f"),
            *(number(seconds.get(phase), ".2f") for phase in ("total", "rollout", "train", "publish")),
            number(row["ready_s"], ".0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def check_table(checks: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| check | | found |", "|---|---|---|"]
    for name, check in checks.items():
        found = str(check["detail"]).splitlines()
        lines.append(f"| {name} | {'ok' if check['passed'] else '**FAILED**'} | {found[-1] if found else ''} |")
    return lines


@dataclass(frozen=True)
class Found:
    """One run of the script."""

    data: dict[str, Any]
    label: str = ""

    @property
    def commit(self) -> str:
        return self.data["commit"][:7]

    @property
    def sections(self) -> list[str]:
        """Those it ran, in the page's order; one that ended before it had a row has a check that says so."""
        ran = {row["section"] for row in self.data["rows"]}
        return [name for name in TITLES if name in ran or self.checks(name)]

    @property
    def name(self) -> str:
        """Of its raw file."""
        label = ["seeds", *map(str, self.seeds)] if self.added else self.label.lower().split()
        return "-".join([*self.sections, *label])

    @property
    def seeds(self) -> list[int]:
        return sorted({row["seed"] for row in self.data["rows"]})

    @property
    def added(self) -> bool:
        """Whether it adds to sections of earlier files."""
        return self.label == ADDED

    def checks(self, section: str) -> dict[str, dict[str, Any]]:
        """The checks of a section."""
        return {key: one for key, one in self.data["checks"].items() if key.split("/")[0].split(":")[0] == section}


def verdict(checks: Collection[dict[str, Any]]) -> str:
    return f"{len(checks)} checks, {sum(not check['passed'] for check in checks)} failed"


def keep_all(found: Sequence[Found], folder: Path) -> dict[int, str]:
    """The names under which runs were kept, by their place; an older one of the same name gets its commit's."""
    left = Counter(one.name for one in found)
    names: dict[int, str] = {}
    for place, one in enumerate(found):
        left[one.name] -= 1
        names[place] = f"{one.name}-{one.commit}" if left[one.name] else one.name
        keep(folder, names[place], one.data)
    return names


def measured_table(measured: dict[str, dict[str, Any]]) -> list[str]:
    """Memory and the parts of a publish, one column a run."""
    rows: dict[str, dict[str, str]] = {}
    for run, kinds in measured.items():
        for name, nbytes in kinds["memory"].items():
            rows.setdefault(f"{name}, bytes", {})[run] = f"{nbytes:,}"
        for name, ms in kinds["publish_ms"].items():
            rows.setdefault(f"publish: {name}, ms", {})[run] = f"{ms:.2f}"
    lines = ["", f"| measured | {' | '.join(measured)} |", "|---" * (len(measured) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(row.get(run, '-') for run in measured)} |" for name, row in rows.items()]


def together(section: str, found: Sequence[Found]) -> Found:
    """Runs of one section as if they were one. Checks over all seeds are of one file's seeds: they are made anew, by
    the rule of single seeds."""
    if len(found) == 1:
        return found[0]
    rows = [row for one in found for row in one.data["rows"] if row["section"] == section]
    names = [row["run"] for row in rows]
    if len(set(names)) < len(names):
        raise SystemExit(f"{section}: runs of one name in several files: {', '.join(sorted(names))}")
    checks = {key: check for one in found for key, check in one.checks(section).items() if not key.endswith(ALL_SEEDS)}
    for kind, (before, after) in pooled(rows).items() if section == "kl" else ():
        ratio, error = ratio_of(before, after)
        detail = f"x {ratio:.3f}, error at most {error:.3f}, {len(kl_kinds(rows)[kind])} seeds"
        allowed, words = (2 * error, "within its error, ") if kind.endswith("-two") else (0.0, "")
        checks[f"kl/{kind}: KL of step 2 at most 1.2 x step 1, {words}{ALL_SEEDS}"] = {
            "passed": ratio - allowed <= 1.2,
            "detail": detail,
        }
    return Found({**found[0].data, "rows": rows, "checks": checks}, found[0].label)


type Measured = tuple[float, float]  # a value and its standard error


def kl_kinds(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Variant and experts a token (fp8-two) to the runs with a KL, one a seed."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kl_1"] and row["kl_2"]:
            kinds.setdefault(row["run"].removeprefix("kl-").partition("-seed-")[0], []).append(row)
    return kinds


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[Measured, Measured]]:
    """The sums over the seeds of the KL of steps 1 and 2, of what has several seeds."""
    return {
        kind: (
            (sum(row["kl_1"] for row in ran), math.hypot(*(row["kl_1_error"] for row in ran))),
            (sum(row["kl_2"] for row in ran), math.hypot(*(row["kl_2_error"] for row in ran))),
        )
        for kind, ran in kl_kinds(rows).items()
        if len(ran) > 1
    }


def ratio_of(before: Measured, after: Measured) -> Measured:
    """The second over the first, with an error as if the two had nothing in common."""
    ratio = after[0] / before[0]
    return ratio, ratio * math.hypot(before[1] / before[0], after[1] / after[0])


def kl_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a run, and one for the seeds together where there are several."""
    lines = [
        "",
        "| run | seed | commit | tokens, both steps | KL of step 1, 1e-5 | KL of step 2, 1e-5 | ratio | |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    sums = pooled(rows)
    for kind, ran in kl_kinds(rows).items():
        for row in sorted(ran, key=lambda row: row["seed"]):
            steps = (row["kl_1"], row["kl_1_error"]), (row["kl_2"], row["kl_2_error"])
            lines.append(kl_line([kind, row["seed"], row["commit"][:7], row["trained_tokens"]], *steps, 1))
        if kind in sums:
            tokens = sum(row["trained_tokens"] for row in ran)
            lines.append(kl_line([f"**{kind}**", "all", "", tokens], *sums[kind], len(ran)))
    return lines


def kl_line(names: Sequence[Any], before: Measured, after: Measured, seeds: int) -> str:
    """A line of that table, with the verdict that two errors allow; of several seeds the means are shown."""
    ratio, error = ratio_of(before, after)
    shown = (f"{value / seeds * 1e5:.3f} ({spread / seeds * 1e5:.3f})" for value, spread in (before, after))
    below, above = (ratio + 2 * error <= 1.2, ratio - 2 * error > 1.2)
    verdict = "below 1.2" if below else "above 1.2" if above else "1.2 lies within two errors"
    return f"| {' | '.join(map(str, names))} | {' | '.join(shown)} | {ratio:.3f} ({error:.3f}) | {verdict} |"


def section(name: str, one: Found, earlier: list[str]) -> list[str]:
    rows = [row for row in one.data["rows"] if row["section"] == name]
    said = dict.fromkeys(note for row in rows for note in row["notes"] if "prompts from" not in note)
    listed = [*(f"- {note}" for note in said), *earlier]
    measured = one.data.get("measured", {}) if name == "shared" else {}
    return [
        f"## {TITLES[name]}{f', {one.label}' if one.label else ''}",
        "",
        ABOUT[name],
        *(kl_table(rows) if name == "kl" else []),
        "",
        *run_table(rows),
        "",
        *check_table(one.checks(name)),
        *(measured_table(measured) if measured else []),
        *(["", *listed] if listed else []),
        "",
    ]


def main(page: Path, results: list[str]) -> None:
    """Write the page; a section that two results hold is taken from the later one."""
    found = [
        Found(json.loads(Path(path).read_text(encoding="utf-8")), label)
        for path, _, label in (result.partition(":") for result in results)
    ]
    folder = page.with_suffix("")
    names = keep_all(found, folder)
    runs: dict[tuple[str, str], list[list[int]]] = {}  # section and label to its runs, and to what was added to each
    for place, one in enumerate(found):
        for name in one.sections:
            if one.added and (name, "") not in runs:
                raise SystemExit(f"{results[place]}: no file before it holds the section {name}")
            if one.added:
                runs[name, ""][-1].append(place)
            else:
                runs.setdefault((name, one.label), []).append([place])
    ordered = sorted(runs, key=lambda key: (list(TITLES).index(key[0]), key[1]))
    taken = {key: together(key[0], [found[place] for place in runs[key][-1]]) for key in ordered}
    checks = [check for key in ordered for check in taken[key].checks(key[0]).values()]
    where = taken[ordered[0]].data["environment"]
    picture = folder / "weftmoe_smoke.png"
    lines = [
        f"# weftmoe's smoke, {where.get('gpu', 'CPU')}",
        "",
        "Made by `tests/gpu/weftmoe_smoke_page.py` from runs of `tests/gpu/weftmoe_smoke.py`. "
        + ", ".join(f"{name} {version}" for name, version in where.items() if name != "gpu")
        + ".",
        "",
        f"{verdict(checks)}. Runs were processes side by side on the same GPUs: their seconds say how the machine was "
        "shared, not how fast one is.",
        *notes(folder),
        "",
    ]
    for key in ordered:
        before = [place for places in runs[key][:-1] for place in places]
        earlier = [
            f"- An earlier run, at {found[place].commit} ({verdict(found[place].checks(key[0]).values())}), is in "
            f"[{names[place]}.json]({folder.name}/{names[place]}.json)."
            for place in before
        ]
        lines += section(key[0], taken[key], earlier)
    if picture.is_file():
        lines += [f"![curves of the training runs]({picture.relative_to(page.parent)})", ""]
    sources = (f"{names[place]}:{one.label}" if one.label else names[place] for place, one in enumerate(found))
    lines = [*lines[:-1], *made_anew("weftmoe_smoke_page.py", page, sources)]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
