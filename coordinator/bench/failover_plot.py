"""The figure of `splitpoint bench failover`: what was kept before and after the loss, moment by moment."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any


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
            axes.step(at_s, [100 * kept[at] / came[at] for at in at_s], where="post", label=arm, linewidth=1.2)
        axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
        axes.axhline(100 * record["spec"]["attainment"], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"a {loss} is lost", loc="left", fontsize="medium")
        axes.set_ylabel("kept, %")
        axes.set_ylim(-3, 103)
        axes.grid(visible=True, alpha=0.3)
    panels[0].legend(fontsize="small", ncols=2, loc="lower right")
    panels[-1].set_xlabel("requests that came so many seconds after the loss")
    figure.savefig(path)
