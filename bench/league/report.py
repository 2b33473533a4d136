"""The league's tables and pictures."""
from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from svg import COLOURS, GREY, Drawing  # noqa: E402

LEAGUES = {
    "M": "League M: in memory. A crash of the server may lose the lock",
    "F": "League F: one node that syncs to disk before it answers",
    "R": "League R: three nodes, and a majority or a replica has the lock before the answer",
}
REMARKS = {
    "M": "Hazelcast's three members are in one process here, too: its locks need them.",
    "R": "Replication of Redis is not consensus: a replica that has a lock may still not be the one that is promoted. Redlock (redsync, node-redlock) "
         "asks three independent servers. etcd, ZooKeeper, NATS and Hazelcast replicate by consensus, and survive the loss of any one node.",
}
HEADINGS = {
    "pair": "One client takes and releases a free lock",
    "eight": "Eight clients on eight locks",
    "handoff": "Sixteen clients take turns on one lock",
    "mix": "Sixteen clients on one lock, nine of ten requests for reading",
    "killed": "The holder is killed with SIGKILL",
    "paused": "The holder's process is paused",
    "cut": "The holder's host is cut off: packets vanish in both directions",
    "memory": "Memory of the servers for a waiting client, with its connection",
}
# What the picture shows: a column, and whether larger values are better.
PICTURES = {
    "pair": ("pair p50 µs", False), "eight": ("pairs/s", True), "handoff": ("owner changes/s", True), "mix": ("pairs/s", True),
    "killed": ("next holder after s", False), "paused": ("next holder after s", False), "cut": ("next holder after s", False),
    "memory": ("kB for a waiter", False),
}
Figures = dict[str, object]


class Results:
    """The results in a file, so that leagues and contenders can be measured separately."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self.rows: dict[str, dict] = {} if fresh or not path.exists() else json.loads(path.read_text())

    def add(self, league: str, question: str, title: str, pinned: bool, number: int, figures: Figures) -> None:
        key = f"{league}|{question}|{title}|{'pinned' if pinned else 'unpinned'}|{number}"
        self.rows[key] = {"figures": figures, "day": time.strftime("%d %B %Y")}
        self.path.write_text(json.dumps(self.rows, indent=1, ensure_ascii=False) + "\n")

    def find(self, league: str, question: str, title: str, pinned: bool) -> list[Figures]:
        """The passes, in order."""
        prefix = f"{league}|{question}|{title}|{'pinned' if pinned else 'unpinned'}|"
        return [self.rows[prefix + str(number)]["figures"] for number in (1, 2) if prefix + str(number) in self.rows]


def cell(value: object) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def line(figures: Figures) -> str:
    return ", ".join(f"{name} {cell(value)}" for name, value in figures.items())


def table(rows: list[tuple[str, list[Figures]]]) -> list[str]:
    """A row for each contender: the passes are divided by a slash."""
    columns = list(dict.fromkeys(name for _, passes in rows for figures in passes for name in figures if name != "failed"))
    lines = ["| contender | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for title, passes in rows:
        failures = [str(figures["failed"]) for figures in passes if "failed" in figures]
        cells = [f"{title} (**failed**: {failures[0]})" if failures else title]
        for name in columns:
            values = [cell(figures[name]) if name in figures else "–" for figures in passes]
            cells.append(values[0] if len(set(values)) == 1 and not values[0][0].isdigit() else " / ".join(values))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def picture(question: str, panels: list[tuple[str, list[tuple[str, list[Figures]]]]]) -> str:
    """Bars of the mean of the passes, a panel for each league."""
    column, more = PICTURES[question]
    left, width, row = 230, 760, 22
    height = 50 + sum(40 + row * len(rows) for _, rows in panels)
    drawing = Drawing(width, height)
    drawing.text(10, 22, HEADINGS[question], size=15, bold=True)
    drawing.text(10, 40, f"{column}: {'longer' if more else 'shorter'} bars are better. Leagues are not compared with each other.", fill=GREY)
    y = 60.0
    for league, rows in panels:
        y += 14
        drawing.text(10, y, LEAGUES[league], bold=True)
        y += 10
        means = {}
        for title, passes in rows:
            values = [figures.get(column) for figures in passes]
            numbers = [float(value) for value in values if isinstance(value, (int, float))]
            means[title] = sum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None
        largest = max((abs(mean) for mean in means.values() if mean is not None), default=1) or 1
        for title, passes in rows:
            mean = means[title]
            drawing.text(left - 8, y + 14, title, anchor="end")
            if mean is None:
                text = "failed" if any("failed" in figures for figures in passes) else str(passes[0].get(column))
                drawing.text(left, y + 14, text, fill=GREY)
            else:
                bar = max(1.0, (width - left - 90) * max(mean, 0) / largest)
                drawing.rectangle(left, y + 3, bar, row - 8, COLOURS[0] if title.startswith("Holdfast") else COLOURS[5])
                drawing.text(left + bar + 6, y + 14, cell(mean), fill=GREY)
            y += row
        y += 16
    return drawing.svg()


def sync_time(folder: Path) -> float:
    """Median time of fdatasync after 4 kB were appended, in milliseconds."""
    path, times = folder / "sync", []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for _ in range(100):
            os.write(descriptor, bytes(4096))
            begin = time.perf_counter()
            os.fdatasync(descriptor)
            times.append(time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        path.unlink()
    return sorted(times)[50] * 1000


def machine(folder: Path) -> str:
    models = [row.split(":", 1)[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name")]
    redis = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    return (f"{len(models) or os.cpu_count()} processors ({models[0] if models else platform.machine()}), Linux {platform.release()}, "
            f"Redis {redis.removeprefix('v=')}; `fdatasync` of 4 kB takes {sync_time(folder):.2f} ms (median)")


def write(results: Results, document: Path, folder: Path, notes: list[str], *, smoke: bool, titles: list[str]) -> None:
    days = sorted({row["day"] for row in results.rows.values()})
    text = [
        "# The league", "",
        f"Written by `make league`, {' and '.join(days)}. {machine(folder)}.", "",
    ]
    if smoke:
        text += ["**A smoke run: it shows that every contender works. Its figures mean nothing.**", ""]
    else:
        text += ["Two figures divided by a slash are two passes. [bench/league](../bench/league/README.md) says how each contender is used. Pinned: "
                 "servers on one core, clients on the other. Every run checked that no two clients held a lock at once.", ""]
    text += [*notes, ""] if notes else []
    text += [] if smoke else [(Path(__file__).parent / "findings.md").read_text().strip(), ""]
    images = document.parent / ("league" if smoke else "images/league")
    images.mkdir(parents=True, exist_ok=True)
    for question, heading in HEADINGS.items():
        panels = []
        tables: list[str] = []
        for league in LEAGUES:
            for pinned in (True, False):
                rows = [(title, passes) for title in titles if (passes := results.find(league, question, title, pinned))]
                if not rows:
                    continue
                if pinned:
                    panels.append((league, rows))
                tables += [f"**{LEAGUES[league]}**{'' if pinned else ' (unpinned)'}", "", *table(rows), ""]
                if pinned and league in REMARKS and (league != "M" or any(title.startswith("Hazelcast") for title, _ in rows)):
                    tables += [REMARKS[league], ""]
        if not panels:
            continue
        (images / f"{question}.svg").write_text(picture(question, panels))
        text += [f"## {heading}", "", f"![{heading}]({images.relative_to(document.parent)}/{question}.svg)", "", *tables]
    document.write_text("\n".join(text).rstrip("\n") + "\n")
