"""Draws docs/pictures/way-of-the-data.svg: `python docs/pictures/make_way_of_the_data.py`."""

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch

plt.switch_backend("svg")
plt.rcParams.update({"svg.hashsalt": "weftpub", "font.family": "sans-serif", "svg.fonttype": "none"})

TRAINER, WIRE, ENGINE = "#dbe9f6", "#f3ead3", "#dff0dd"
BOXES = [
    # x, y, width, height, colour, title, detail
    (0.2, 3.3, 2.5, 1.2, TRAINER, "FP32 masters", "pinned CPU memory\nMuon or AdamW state"),
    (3.3, 3.3, 2.5, 1.2, TRAINER, "staging slot", "load, update, write back\non three streams"),
    (6.4, 3.3, 2.5, 1.2, TRAINER, "quantizer", "one pass: W, W^T,\nscales, checksums"),
    (9.5, 3.3, 2.5, 1.2, TRAINER, "expert store", "one generation\nW: forward, W^T: dgrad"),
    (9.5, 1.2, 2.5, 1.2, WIRE, "canonical tensors", "AWEX names\nweight, weight_scale_inv"),
    (6.4, 1.2, 2.5, 1.2, WIRE, "plan and transport", "checked before\na byte moves"),
    (3.3, 1.2, 2.5, 1.2, ENGINE, "receive views", "rebuilt from the live\nparameters each publish"),
    (0.2, 1.2, 2.5, 1.2, ENGINE, "verify, commit", "all ranks or none,\nthen serve the version"),
]
ARROWS = [((2.7, 3.9), (3.3, 3.9)), ((5.8, 3.9), (6.4, 3.9)), ((8.9, 3.9), (9.5, 3.9)), ((10.75, 3.3), (10.75, 2.4)),
          ((9.5, 1.8), (8.9, 1.8)), ((6.4, 1.8), (5.8, 1.8)), ((3.3, 1.8), (2.7, 1.8))]  # fmt: skip


def draw(path: Path) -> None:
    """Write the picture to ``path`` as SVG."""
    figure, axes = plt.subplots(figsize=(11, 4.2))
    for x, y, width, height, colour, title, detail in BOXES:
        axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.04", fc=colour, ec="#444444", lw=1))
        axes.text(x + width / 2, y + height - 0.28, title, ha="center", va="center", fontsize=11, weight="bold")
        axes.text(x + width / 2, y + 0.42, detail, ha="center", va="center", fontsize=9)
    for start, end in ARROWS:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "lw": 1.4, "color": "#444444"})
    axes.text(0.2, 4.75, "trainer (Megatron-core)", fontsize=10, color="#2b5d8a")
    axes.text(0.2, 0.75, "rollout engine (SGLang), same GPUs", fontsize=10, color="#2f6b2a")
    axes.set(xlim=(0, 12.3), ylim=(0.5, 5.0))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_name("way-of-the-data.svg"))
