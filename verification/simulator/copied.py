"""A copy of the source tree in which `inject` and `mutants` change, build and simulate the module."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "target/injected"
FINDING = re.compile(r"seed (\d+), (\w+), after (\d+) commands in \d+ runs and [\d.]+ s:\n  (.*?)\n\n(.*)", re.S)
SIMULATED = ["--profile", "simulation", "-p", "simulator"]
NOT_FOUND = "not found"


class Copy:
    def __init__(self, name):
        self.tree, self.build = SCRATCH / name, SCRATCH / f"{name}.build"
        self.patched, self.unpatched = self.build / "simulation/simulate", SCRATCH / f"{name}.simulate"
        self.script = SCRATCH / f"{name}.script"


def copy_tree(copy):
    """Updates the copy of the tree. Equal files are not written, so that cargo compiles only what has changed."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        source, target = ROOT / name, copy.tree / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(source.stat().st_mode)
    for left in (copy.tree / "src").rglob("*.rs"):
        if str(left.relative_to(copy.tree)) not in names:
            left.unlink()


def cargo(copy, command, *what, limit=0):
    """Runs cargo. Kills it with all of its processes after `limit` seconds, unless that is 0."""
    # Incremental builds with less optimization take seconds instead of half a minute.
    less = {"CARGO_TARGET_DIR": str(copy.build), "CARGO_INCREMENTAL": "1", "CARGO_PROFILE_SIMULATION_OPT_LEVEL": "1"}
    less |= {"CARGO_PROFILE_SIMULATION_CODEGEN_UNITS": "256", "CARGO_PROFILE_SIMULATION_LTO": "off"}
    run = ["timeout", "--kill-after", "5", str(limit), "cargo", command, "--quiet", "--locked", *what]
    return subprocess.run(run, cwd=copy.tree, env={**os.environ, **less}, capture_output=True, text=True, check=False)


def build(copy):
    built = cargo(copy, "build", *SIMULATED, "--bin", "simulate")
    if built.returncode != 0:
        sys.exit(built.stderr)


def build_unpatched(copy):
    copy_tree(copy)
    build(copy)
    shutil.copy(copy.patched, copy.unpatched)


def apply(copy, patch, *options):
    # git must not find the repository around the copy, because the patch's paths are relative to the copy.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(SCRATCH)}
    subprocess.run(["git", "apply", *options, str(patch)], cwd=copy.tree, check=True, env=alone)


def breaks_unpatched(copy, generation, script):
    copy.script.write_text(script)
    played = subprocess.run([copy.unpatched, "--play", copy.script, generation], stdout=subprocess.DEVNULL, check=False)
    return played.returncode != 0


def look_for(copy, minutes):
    """Runs the simulator until a run shows the change of the module. Returns the violated rule, the seed and the seconds."""
    begin, seed = time.monotonic(), 1
    while (left := minutes * 60 - (time.monotonic() - begin)) > 0:
        run = [copy.patched, "--seed", str(seed), "--minutes", f"{left / 60:.4f}"]
        try:
            # A run that does not end does not count as found: it violates no invariant.
            ended = subprocess.run(run, capture_output=True, text=True, timeout=left + 30, check=False)
        except subprocess.TimeoutExpired:
            return NOT_FOUND + ": a run does not end", "", time.monotonic() - begin
        if ended.returncode < 0:
            return NOT_FOUND + ": a run ends the simulator", "", time.monotonic() - begin
        finding = FINDING.match(ended.stdout)
        if finding is None:
            break
        if not breaks_unpatched(copy, finding[2], finding[5]):
            return finding[4].split(": ")[0], finding[1], time.monotonic() - begin
        seed = int(finding[1]) + 1
    return NOT_FOUND, "", time.monotonic() - begin
