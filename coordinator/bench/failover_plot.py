"""The figure of `splitpoint bench failover`: what was kept before and after the loss, moment by moment."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from coordinator.bench.failover import BIN_S


def unwritable(path: Path) -> str:
    """Why a figure could not be written there; "" where it can."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        return f"its name has to end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}"
    return "" if path.parent.is_dir() else f"there is no folder {path.parent}"


def plot(path: Path, record: dict[str, Any]) -> None:
    """A panel for each loss, a line for each arm: what was kept of each bin, all seeds together. Raises `OSError`."""
    from matplotlib.figure import Figure

    losses = record["spec"]["losses"]
    figure = Figure(figsize=(8, 3 * len(losses)), layout="constrained")
    panels = figure.subplots(len(losses), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, loss in zip(panels, losses, strict=True):
        for arm in dict.fromkeys(run["arm"] for run in record["runs"]):
            kept, came = defaultdict[float, int](int), defaultdict[float, int](int)
            for run in record["runs"]:
                if (run["arm"], run["loss"]) == (arm, loss):
                    for bin_ in run["bins"]:
                        kept[bin_["from_s"]] += bin_["kept"]
                        came[bin_["from_s"]] += bin_["came"]
            at_s = sorted(came)
            shares = [100 * kept[at] / came[at] for at in at_s]
            # The last bin is as wide as the others.
            axes.step([*at_s, at_s[-1] + BIN_S], [*shares, shares[-1]], where="post", label=arm, linewidth=1.2)
        axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
        axes.axhline(100 * record["spec"]["attainment"], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"a {loss} is lost", loc="left", fontsize="medium")
        axes.set_ylabel("kept, %")
        axes.set_ylim(-3, 103)
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small", ncols=2, loc="lower right")
    panels[-1].set_xlabel("requests that came so many seconds after the loss")
    figure.savefig(path)
