"""`gate --init`: the first profile, and the file of the CI that runs the gate."""

from pathlib import Path

from reports.writing import write_whole
from specverify.gate.profile import OWN_FILE, PROJECT_FILE, find, load
from specverify.setup.errors import UnusableInput

PROFILE = """\
# The gate before a merge: `specverify gate`. `specverify gate --schema profile` says what may stand here.
backends = ["cpu-eager"]        # your engine: ["my_engine:open_"]
cases = 200                     # drawn cases of a backend
seeds = [0]                     # the same in every run; a new one joins them each time, and is printed
ledger = "known-failures.toml"  # failures that are known and accepted: `specverify ledger add BUNDLE`
memory = ".specverify/memory"   # failures of earlier runs, tried first
paths = ["*"]                   # for --changed-since: files that can change what the engine does

[floors]                        # a run that compared less is no pass
judged = 0.9
"""

GITHUB = """\
name: speculation
on: [pull_request]
permissions: {contents: read}
jobs:
  gate:
    runs-on: ubuntu-latest      # a runner with your device
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12", cache: pip}
      - run: pip install -e path/to/specverify
      - uses: actions/cache@v4  # failures of earlier runs, tried first
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}
          restore-keys: specverify-
      - run: specverify gate --seed ${{ github.run_number }}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: specverify        # gate.html in it is the page to open
          path: .specverify
          include-hidden-files: true
"""

GITLAB = """\
speculation:
  image: python:3.12            # a runner with your device
  stage: test
  timeout: 1h
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  variables:
    PIP_CACHE_DIR: $CI_PROJECT_DIR/.cache/pip
  cache:
    key: specverify
    when: always                # a red run has found what the next one tries first
    paths: [.cache/pip, .specverify/memory]
  script:
    - pip install -e path/to/specverify
    - specverify gate --seed $CI_PIPELINE_IID
  artifacts:
    when: always
    paths: [.specverify/]         # gate.html is the page to open; without the slash GitLab exposes nothing
    expose_as: SpecVerify
    reports:
      junit: .specverify/junit.xml
      codequality: .specverify/code-quality.json
"""

PLACES = {"github": Path(".github/workflows/speculation.yml"), "gitlab": Path(".gitlab-ci.yml")}
"""The CI file of each service."""

BESIDE = Path("speculation.gitlab-ci.yml")
"""The file that is written where .gitlab-ci.yml stands already."""


def start(folder: Path, service: str) -> list[str]:
    """Write profile and CI file into `folder`, and overwrite nothing; lines that say what was done and what is next.

    Raises:
        UnusableInput: The CI file is there already.
        Unwritable: The system refuses.
    """
    place = PLACES[service]
    if service == "gitlab" and (folder / place).exists():
        place = BESIDE
    if (folder / place).exists():
        raise UnusableInput(f"{place} is there already: nothing was written")
    lines = []
    if (folder / OWN_FILE).exists() or _has_profile(folder):
        load(find(folder))  # a profile that cannot be read is told now, not in the first run
        lines.append("the profile that is here stays as it is")
    else:
        write_whole(folder / OWN_FILE, PROFILE.encode())
        lines.append(f"wrote {OWN_FILE}: name your engine under backends")
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    write_whole(folder / place, (GITHUB if service == "github" else GITLAB).encode())
    lines.append(f"wrote {place}: put the path of specverify in place of path/to/specverify")
    if place == BESIDE:
        lines.append(f"add to .gitlab-ci.yml: include: [{{local: {BESIDE}}}]")
    return [*lines, "run it here first: specverify gate"]


def _has_profile(folder: Path) -> bool:
    if not (folder / PROJECT_FILE).exists():
        return False
    try:
        find(folder)
    except UnusableInput:
        return False
    return True
