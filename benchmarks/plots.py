"""Pictures of results that other benchmarks wrote.

    python -m benchmarks.run --json > results.json
    python -m benchmarks.plots results.json --output FOLDER

A picture a model: time of a walk from the root to a leaf against the number of choices, a line a contender, both axes
logarithmic. A line ends where a contender failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def draw(document: dict[str, Any], model: str, file: Path) -> None:
    """One picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in document["rows"]:
        if row["model"] == model and "walk_us" in row:
            lines.setdefault(row["contender"], []).append((row["choices"], row["walk_us"]))
    for contender, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=3 if contender == "trie_sampler" else 1.5)
        axes.annotate(f" {contender}", points[-1], va="center", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="choices", ylabel="microseconds from the root to a leaf")
    axes.set_title(f"{model}: computing and applying what is allowed; ours: picking")
    # Room for the names at the right.
    sizes = [row["choices"] for row in document["rows"]]
    axes.set_xlim(min(sizes) * 0.7, max(sizes) * 40)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Write a picture for each model of the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what benchmarks.run --json wrote")
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    for model in dict.fromkeys(row["model"] for row in document["rows"]):
        draw(document, model, options.output / f"walk_{model.lower()}.png")


if __name__ == "__main__":
    main()
