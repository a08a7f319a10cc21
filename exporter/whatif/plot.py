"""Plots a comparison with Matplotlib.

Matplotlib is the optional extra `plot`: import this module only if a plot was requested.
"""

from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from exporter.text import write_instant
from exporter.whatif.account import Comparison, TimeSeries
from exporter.whatif.recording import CannotReplay


COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The palette of Okabe and Ito: distinct for people with any colour vision."""
MARKS = ("o", "s", "^", "D", "v", "P")
MAX_STEPS = 168
"""The largest number of steps in the line of VMs under cooldown."""
LAST_DRAWN = datetime(9000, 1, 1, tzinfo=UTC).timestamp()
"""The last instant that is drawn: an axis extends beyond its data, but not past the year 9999."""


def draw(comparison: Comparison, path: Path) -> None:
    """Write the plot as PNG or SVG, by the suffix; equal comparisons give equal files.

    Raises OSError or `CannotReplay`.
    """
    if comparison.ended > LAST_DRAWN:
        raise CannotReplay(
            f"--plot {path}: {write_instant(comparison.ended)} is too late for a plot"
        )
    mpl.rcParams["svg.hashsalt"] = "kubevirt-eviction-exporter"
    figure = Figure(figsize=(11, 10), layout="constrained")
    over_time, cooling, per_vm = figure.subplots(3, 1, height_ratios=(5, 3, 4))
    names = [account.contender.name for account in comparison.accounts]
    figure.suptitle(f"What would these settings have done? {', '.join(names)}", fontsize=14)
    cooling.sharex(over_time)
    _draw_evictions(over_time, comparison)
    _draw_cooling(cooling, comparison)
    _draw_migrations(per_vm, comparison)
    for axes in (over_time, cooling, per_vm):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    # The files have neither the date nor Matplotlib's version.
    is_svg = path.suffix == ".svg"
    metadata = {"Date": None, "Creator": None} if is_svg else {"Software": None}
    figure.savefig(path, dpi=110, metadata=metadata)


def _draw_evictions(axes: Axes, comparison: Comparison) -> None:
    """Over time, the total of allowed (solid) and of blocked evictions (dashed)."""
    axes.set_title("Evictions so far: allowed (solid), blocked (dashed)", loc="left")
    for number, account in enumerate(comparison.accounts):
        color, mark, width = _style(number, comparison)
        for series, line in (
            (account.allowed_over_time, "-"),
            (account.blocked_over_time, "--"),
        ):
            sums = list(accumulate(series.bins))
            axes.plot(
                _days(series),
                sums,
                line,
                color=color,
                marker=mark,
                markevery=(number * len(sums) // 20, max(len(sums) // 7, 1)),
                markersize=3.5 + width,
                linewidth=width,
                label=account.contender.name if line == "-" else None,
            )
    axes.set_ylabel("evictions")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _draw_cooling(axes: Axes, comparison: Comparison) -> None:
    """VMs under cooldown over time, as the average of each bin."""
    axes.set_title("VMs under cooldown", loc="left")
    for number, account in enumerate(comparison.accounts):
        color, _, width = _style(number, comparison)
        fine = account.cooling_over_time
        together = -(-len(fine.bins) // MAX_STEPS) or 1
        sums = [sum(fine.bins[at : at + together]) for at in range(0, len(fine.bins), together)]
        series = TimeSeries(fine.began, fine.width * together, sums)
        axes.step(
            _days(series),
            [seconds / series.width for seconds in series.bins],
            where="post",
            color=color,
            linewidth=0.6 * width,
        )
    axes.set_ylabel("VMs")
    axes.set_ylim(bottom=0)
    locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
    formatter = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
    formatter.formats[2] = "%a %d"
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(formatter)


def _draw_migrations(axes: Axes, comparison: Comparison) -> None:
    """How many VMs migrated at least N times; a line ends at the largest number of migrations."""
    axes.set_title("VMs with at least this number of migrations", loc="left")
    for number, account in enumerate(comparison.accounts):
        color, mark, width = _style(number, comparison)
        per_vm = account.migrations.per_vm
        times = sorted(per_vm)
        vms = [sum(n for moves, n in per_vm.items() if moves >= least) for least in times]
        axes.step(
            times,
            vms,
            where="pre",
            color=color,
            linewidth=width,
            marker=mark,
            markersize=2.5 + width,
        )
        if times:
            axes.annotate(
                f"{account.contender.name}: {times[-1]}",
                (times[-1], vms[-1]),
                textcoords="offset points",
                xytext=(7, 6 + 12 * number),
                color=color,
            )
    if any(account.migrations.per_vm for account in comparison.accounts):
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("migrations of one VM")
    axes.set_ylabel("VMs")


def _style(number: int, comparison: Comparison) -> tuple[str, str, float]:
    """Colour, mark and width. Earlier lines are wider, so equal later lines do not hide them."""
    width = 1.4 + 1.6 * (len(comparison.accounts) - 1 - number)
    return COLORS[number % len(COLORS)], MARKS[number % len(MARKS)], width


def _days(series: TimeSeries) -> list[float]:
    """When each bin begins, in Matplotlib's unit: days since 1970."""
    return [(series.began + number * series.width) / 86_400 for number in range(len(series.bins))]
