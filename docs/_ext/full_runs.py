"""Runs examples in full, and stores what they print and draw for the site: `make guides`.

    python docs/_ext/full_runs.py               # every example: some hours, most of them for dcgan
    python docs/_ext/full_runs.py text sweep    # two of them

The results are committed under `docs/results`, so that building the site needs no full run.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
EXAMPLES = ROOT / "examples"
RESULTS = DOCS / "results"
PRINTED, ABOUT = "printed.txt", "about.json"
# Examples with packages that the environment of the site need not have.
FURTHER_PACKAGES = {"finetune": ("keras_hub",)}
DOCSTRING = re.compile(r'\A""".*?"""', re.DOTALL)
# Gloo prints its lines piece by piece, so that threads and processes cut the lines of each other.
REST_OF_GLOO = re.compile(
    r"(\[\d+\] |\d+| is connected to | peer ranks\. |"
    r"Expected number of connected peer ranks is : )+"
)


def scripts() -> list[pathlib.Path]:
    """Returns the examples."""
    return sorted(EXAMPLES.glob("[a-z]*.py"))


def missing_packages(script: pathlib.Path) -> list[str]:
    """Returns the further packages of an example that are not installed."""
    packages = FURTHER_PACKAGES.get(script.stem, ())
    return [name for name in packages if importlib.util.find_spec(name) is None]


def run(script: pathlib.Path, output: pathlib.Path, *options: str) -> str:
    """Returns what a terminal shows after a run of an example.

    Args:
      script: The example.
      output: The folder for its pictures and files.
      *options: Such as ``--quick``.

    Raises:
      RuntimeError: The example failed.
    """
    command = [sys.executable, str(script), *options, "--output", str(output)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{script.name} {' '.join(options)} failed\n{done.stderr}")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", done.stdout)  # colors
    lines = [line.rpartition("\r")[2] for line in text.splitlines()]  # bars are written over
    return "\n".join(without_gloo(lines)).strip().replace(str(output), "examples/output")


def without_gloo(lines: list[str]) -> list[str]:
    """Returns the lines without those of Gloo, which connects processes on CPUs."""
    if not any("[Gloo]" in line for line in lines):
        return lines
    return [x for x in lines if "[Gloo]" not in x and not REST_OF_GLOO.fullmatch(x)]


def code_digest(script: pathlib.Path) -> str:
    """Returns a digest of an example's code, without its prose and comments."""
    code = DOCSTRING.sub("", script.read_text()).splitlines()
    lines = [line for line in code if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def store(script: pathlib.Path) -> None:
    """Runs an example in full, and replaces its stored results."""
    is_busy = os.getloadavg()[0] > 0.5
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder)
        printed = run(script, output)
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "minutes": round((time.perf_counter() - begun) / 60, 1),
            "cores": len(os.sched_getaffinity(0)),
            "processor": _processor(),
            "machine_was_busy": is_busy,
            "versions": {
                name: importlib.metadata.version(name) for name in ("functrain", "jax", "keras")
            },
            "code": code_digest(script),
        }
        target = RESULTS / script.stem
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for picture in _pictures(output):
            shutil.copy(picture, target)
        (target / PRINTED).write_text(printed + "\n")
        (target / ABOUT).write_text(json.dumps(about, indent=2) + "\n")


def _pictures(output: pathlib.Path) -> list[pathlib.Path]:
    """Returns the pictures of a run; of a numbered series, such as one an epoch, the last."""
    series = {re.sub(r"\d+", "", path.name): path for path in sorted(output.rglob("*.png"))}
    return list(series.values())


def _processor() -> str:
    """Returns the name of the processor."""
    with open("/proc/cpuinfo") as file:
        names = re.findall(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
    return names[0] if names else platform.machine()


def main() -> None:
    """Runs the examples that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [script.stem for script in scripts()]
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(names))
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"expected names of examples, {', '.join(names)}, got {sorted(unknown)}")
    for name in chosen:
        if missing := missing_packages(EXAMPLES / f"{name}.py"):
            print(f"{name} is left out: it needs {', '.join(missing)}", flush=True)
            continue
        print(f"{name} ...", flush=True)
        store(EXAMPLES / f"{name}.py")


if __name__ == "__main__":
    main()
