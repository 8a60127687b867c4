"""Stubs of GitHub Actions and of GitLab CI, which run the steps of a CI file as their documentation says.

A job begins with a fresh checkout. On GitHub a failed step skips all later ones but those with `if: always()`;
`actions/cache` saves in its last step, and only where the job succeeded; `actions/cache/save` saves when it is reached.
On GitLab a job stores its cache where it succeeded, or always with `when: always`.
"""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

Shell = Callable[[str], int]
"""Runs one line of a script in the checkout; its exit code."""


class Checkout:
    """A working folder that is made anew for each job, and the caches that outlive it."""

    def __init__(self, source: Path, folder: Path, store: Path) -> None:
        self._source = source
        self.folder = folder
        self._store = store

    def renew(self) -> None:
        """Replace the folder's content by the source, as a checkout on a new runner does."""
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        shutil.copytree(self._source, self.folder, dirs_exist_ok=True)

    def restore(self, prefixes: list[str], path: str) -> bool:
        """Bring back the newest cache whose key begins with one of `prefixes`, the first prefix first."""
        for prefix in prefixes:
            entries = [entry for entry in self._store.glob("*") if entry.name.startswith(prefix)]
            if entries:
                newest = max(entries, key=lambda entry: entry.stat().st_mtime_ns)
                shutil.copytree(newest, self.folder / path, dirs_exist_ok=True)
                return True
        return False

    def save(self, key: str, path: str) -> None:
        """Keep `path` under `key`; a key that exists already, or a path without anything, saves nothing."""
        if (self.folder / path).exists() and not (self._store / key).exists():
            shutil.copytree(self.folder / path, self._store / key)


def run_github(text: str, checkout: Checkout, shell: Shell, number: int) -> bool:
    """Run the only job of a workflow; whether it succeeded."""
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    checkout.renew()
    facts = {"github.run_id": f"{9000 + number}", "github.run_attempt": "1", "github.run_number": f"{number}"}
    has_failed = False
    last_steps: list[Callable[[], None]] = []
    for step in job["steps"]:
        if has_failed and step.get("if") != "always()":
            continue
        if "run" in step:
            line = _expand(step["run"], facts)
            has_failed |= shell(line.replace("$SPECVERIFY", workflow["env"]["SPECVERIFY"])) != 0
            continue
        action = step["uses"].partition("@")[0]
        options = {name: _expand(str(value), facts) for name, value in step.get("with", {}).items()}
        if action in ("actions/cache", "actions/cache/restore"):
            checkout.restore([options["key"], *options["restore-keys"].split()], options["path"])
        if action == "actions/cache/save":
            checkout.save(options["key"], options["path"])
        if action == "actions/cache":
            last_steps.append(partial(checkout.save, options["key"], options["path"]))
    if not has_failed:
        for last_step in last_steps:
            last_step()
    return not has_failed


def run_gitlab(text: str, checkout: Checkout, shell: Shell, number: int) -> bool:
    """Run the only job of a pipeline; whether it succeeded."""
    (job,) = yaml.safe_load(text).values()
    checkout.renew()
    cache = job["cache"]
    for path in cache["paths"]:
        checkout.restore([f"{cache['key']} {path.replace('/', ' ')} "], path)
    variables = {**job["variables"], "CI_PIPELINE_IID": f"{number}"}
    has_failed = False
    for line in job["script"]:
        if not has_failed:
            has_failed = shell(re.sub(r"\$(\w+)", lambda name: variables[name[1]], line)) != 0
    if not has_failed or cache.get("when") == "always":
        for path in cache["paths"]:
            checkout.save(f"{cache['key']} {path.replace('/', ' ')} {number}", path)
    return not has_failed


def _expand(text: Any, facts: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda name: facts[name[1]], text)
