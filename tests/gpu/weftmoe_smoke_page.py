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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratio import FLAT_BOUND, KL_BOUND, Pair, Verdict, kl_checks, kl_kinds, kl_pair
from result_files import keep, made_anew, notes

TITLES = {
    "script": "The first command of the README",
    "train": "Training",
    "kl": "KL of two steps that differ by one publish",
    "frozen": "Learning rate 0",
    "resume": "Killed or told to end, and resumed",
    "shared": "Experts in memory that trainer and engine both map",
    "two-gpus": "Two GPUs",
    "two-nodes": "Two nodes",
}
ABOUT = {
    "script": "`run.sh fp8 --smoke` with the doctor and a model of its own, before anything else was started; then "
    "`weftpub report`.",
    "train": "Rewards are means of the first and last steps of a run; differences are mean |trainer - rollout| "
    "log-probs of trained tokens, before the update. They are flat if their mean over the last third of the steps is "
    f"at most {FLAT_BOUND} x that over the first, with an interval of two errors, steps being what is drawn: a drift "
    "would add up over steps. Early runs were asked only whether it doubles.",
    "kl": "Learning rate 1e-6, the same prompts and random numbers in both steps. Runs named `-two` give each token "
    "two of eight experts, as all other runs do: where two experts are nearly equal, trainer and engine may choose "
    "differently, and a few such tokens are most of the KL. Runs named `-all` give each token all eight: nothing is "
    "chosen. What is drawn are prompts: completions of one prompt share the context of their first tokens, and the "
    "router's decision there. In round brackets stand standard errors with prompts as draws; in square brackets is "
    "Fieller's interval of the ratio, two errors to each side, from the covariance of both steps over their prompts. "
    "If it ends below 1.2 the check is ok, if it begins above 1.2 it failed, and else nothing is shown. The seeds "
    "together are the ratio of the sums of their KL. All errors are those of drawing other prompts with the same "
    "weights; what other weights would give, only other seeds say.",
    "frozen": "Eight completions, scored by the engine after each publish; the results are compared bit by bit.",
    "resume": "Deterministic kernels; sha256 over all published tensors of each step. Statistics are float64 numbers "
    "of a step's record: those before and after the update, the loss among them, sums by prompt, the norm of the "
    "gradients, the reward.",
    "shared": "FP8 twice, deterministic kernels: experts copied, and experts in place.",
    "two-gpus": "FP8; the first part of a name is the trainer's layout, the second the engine's.",
    "two-nodes": "Two GPUs of one machine stand for two nodes of one GPU each: `run.sh --nodes 2` for each, which sees "
    "its own GPU alone, with an engine of its own. FP8 is also told to end after a step, and resumed, with "
    "deterministic kernels.",
}

ADDED = "+"
OLD_ERRORS = (
    "Runs without an interval are from before prompts were taken for what is drawn: 64 prompts, with 256 completions "
    "each (`-two`) or 128 (`-all`). The errors that those runs noted took completions for independent draws, were too "
    "small, and are left out; whether the bound holds, such runs do not show."
)
OLD_FLAT, DOUBLES = "log-prob difference flat", "log-prob difference at most doubles, means of first and last steps"


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


SHOWN = {"ok": "ok", "FAIL": "**FAILED**", "not shown": "not shown"}


def verdict_of(check: Mapping[str, Any]) -> Verdict:
    """Of a check of any age: earlier ones say only whether they passed."""
    return check["verdict"] if "verdict" in check else "ok" if check["passed"] else "FAIL"


def check_table(checks: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| check | | found |", "|---|---|---|"]
    for name, check in checks.items():
        found = str(check["detail"]).splitlines()
        lines.append(f"| {name} | {SHOWN[verdict_of(check)]} | {found[-1] if found else ''} |")
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

    def noted(self, section: str) -> dict[str, dict[str, Any]]:
        """The checks of a section as the run made them."""
        return {key: one for key, one in self.data["checks"].items() if key.split("/")[0].split(":")[0] == section}

    def checks(self, section: str) -> dict[str, dict[str, Any]]:
        """The checks of a section, by the rules of this page: those of the KL are made anew from the rows, and an
        earlier, weaker check of the log-prob difference is called what it is."""
        found = self.noted(section)
        if section == "kl":
            found = {key: one for key, one in found.items() if ": KL of step 2" not in key}
            found |= kl_checks([row for row in self.data["rows"] if row["section"] == section])
        return {key.replace(OLD_FLAT, DOUBLES): one for key, one in found.items()}


def verdict(checks: Collection[dict[str, Any]]) -> str:
    """How many there are, and how many of them failed or showed nothing."""
    each = Counter(verdict_of(check) for check in checks)
    open_ = f", {each['not shown']} not shown" if each["not shown"] else ""
    return f"{len(checks)} checks, {each['FAIL']} failed{open_}"


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
    """Runs of one section as if they were one; checks over all seeds are then over those of all files."""
    if len(found) == 1:
        return found[0]
    rows = [row for one in found for row in one.data["rows"] if row["section"] == section]
    names = [row["run"] for row in rows]
    if len(set(names)) < len(names):
        raise SystemExit(f"{section}: runs of one name in several files: {', '.join(sorted(names))}")
    checks = {key: check for one in found for key, check in one.data["checks"].items()}
    return Found({**found[0].data, "rows": rows, "checks": checks}, found[0].label)


def kl_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line a run, and one for the seeds together where there are several; what an early run did not know is said."""
    lines = [
        "",
        "| run | seed | commit | prompts | tokens, both steps | KL of step 1, 1e-5 | KL of step 2, 1e-5 | ratio | |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    measured = [row for row in rows if row["kl_1"] and row["kl_2"]]
    for kind, ran in kl_kinds(measured).items():
        for row in sorted(ran, key=lambda row: row["seed"]):
            lines.append(kl_line([kind, row["seed"], row["commit"][:7]], [row]))
        if len(ran) > 1:
            lines.append(kl_line([f"**{kind}**", "all", ""], ran))
    return lines + ([] if all(kl_pair([row]) for row in measured) else ["", OLD_ERRORS])


def kl_line(names: Sequence[Any], ran: Sequence[Mapping[str, Any]]) -> str:
    """A line of that table; of several seeds the means are shown."""
    first, second = (sum(row[step] for row in ran) / len(ran) * 1e5 for step in ("kl_1", "kl_2"))
    cells = [*names, kl_prompts(ran), sum(row["trained_tokens"] for row in ran)]
    pair = kl_pair(ran)
    if pair is None:
        cells += [f"{first:.3f}", f"{second:.3f}", f"x {second / first:.3f}", "no error is known"]
    else:
        errors = (math.sqrt(v) / len(ran) * 1e5 for v in (pair.first_variance, pair.second_variance))
        cells += [f"{value:.3f} ({error:.3f})" for value, error in zip((first, second), errors, strict=True)]
        cells += [str(pair), kl_words(pair)]
    return f"| {' | '.join(map(str, cells))} |"


def kl_prompts(ran: Sequence[Mapping[str, Any]]) -> str:
    return str(sum(row["prompts"] for row in ran)) if all("prompts" in row for row in ran) else "-"


def kl_words(pair: Pair) -> str:
    """Where the bound lies."""
    words = {"ok": f"below {KL_BOUND}", "FAIL": f"above {KL_BOUND}", "not shown": f"{KL_BOUND} lies within"}
    return words[pair.verdict(KL_BOUND)]


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
            f"- An earlier run, at {found[place].commit} ({verdict(found[place].noted(key[0]).values())}), is in "
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
