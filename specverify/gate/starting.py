"""`gate --init`: the first profile, and the file of the CI that runs the gate."""

from pathlib import Path

from specverify.gate.profile import OWN_FILE, PROJECT_FILE, find, load
from specverify.reports.writing import write_whole
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
env:
  SPECVERIFY: SOURCE
jobs:
  gate:
    runs-on: ubuntu-latest      # a runner with your device
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12", cache: pip}
      - run: pip install "$SPECVERIFY"
      - uses: actions/cache/restore@v4  # failures of earlier runs, tried first
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}-${{ github.run_attempt }}
          restore-keys: specverify-
      - run: specverify gate --seed ${{ github.run_number }}
      - uses: actions/cache/save@v4
        if: always()            # a red run has found what the next one tries first
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}-${{ github.run_attempt }}
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
    SPECVERIFY: SOURCE
    PIP_CACHE_DIR: $CI_PROJECT_DIR/.cache/pip
  cache:
    key: specverify
    when: always                # a red run has found what the next one tries first
    paths: [.cache/pip, .specverify/memory]
  script:
    - pip install "$SPECVERIFY"
    - specverify gate --seed $CI_PIPELINE_IID
  artifacts:
    when: always
    paths: [.specverify/]         # gate.html is the page to open; without the slash GitLab exposes nothing
    expose_as: SpecVerify
    reports:
      junit: .specverify/junit.xml
      codequality: .specverify/code-quality.json
"""

GITHUB_SHARDS = """\
name: speculation
on: [pull_request]
permissions: {contents: read}
env:
  SPECVERIFY: SOURCE
jobs:
  shard:
    runs-on: ubuntu-latest      # runners with your device
    timeout-minutes: 60
    strategy:
      fail-fast: false
      matrix: {shard: [NUMBERS]}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12", cache: pip}
      - run: pip install "$SPECVERIFY"
      - uses: actions/cache/restore@v4  # failures of earlier runs, tried first
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}-${{ github.run_attempt }}
          restore-keys: specverify-
      - run: specverify gate --seed ${{ github.run_number }} --shard ${{ matrix.shard }}/COUNT
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: shard-${{ matrix.shard }}
          path: .specverify
          include-hidden-files: true
  gate:                         # the one to require: it applies floors, and a shard that is missing is no pass
    needs: shard
    if: always()
    runs-on: ubuntu-latest
    timeout-minutes: 15
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12", cache: pip}
      - run: pip install "$SPECVERIFY"
      - uses: actions/cache/restore@v4
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}-${{ github.run_attempt }}
          restore-keys: specverify-
      - uses: actions/download-artifact@v4
        with: {pattern: shard-*, path: shards}
      - run: specverify gate --merge shards/*
      - uses: actions/cache/save@v4
        if: always()            # a red run has found what the next one tries first
        with:
          path: .specverify/memory
          key: specverify-${{ github.run_id }}-${{ github.run_attempt }}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: specverify
          path: .specverify
          include-hidden-files: true
"""

GITLAB_SHARDS = """\
speculation-shard:
  image: python:3.12            # runners with your device
  stage: test
  timeout: 1h
  parallel: COUNT
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  variables:
    SPECVERIFY: SOURCE
    PIP_CACHE_DIR: $CI_PROJECT_DIR/.cache/pip
  cache:
    key: specverify
    policy: pull
    paths: [.cache/pip, .specverify/memory]
  allow_failure: true           # the job below decides, with all shards before it
  script:
    - pip install "$SPECVERIFY"
    - specverify gate --seed $CI_PIPELINE_IID --shard $CI_NODE_INDEX/$CI_NODE_TOTAL --report shards/$CI_NODE_INDEX
  artifacts:
    when: always
    paths: [shards]

speculation:                    # applies floors; a shard that is missing is no pass
  image: python:3.12
  stage: test
  needs: [speculation-shard]
  rules:
    - if: $CI_PIPELINE_SOURCE == "merge_request_event"
      when: always
  variables:
    SPECVERIFY: SOURCE
    PIP_CACHE_DIR: $CI_PROJECT_DIR/.cache/pip
  cache:
    key: specverify
    when: always                # a red run has found what the next one tries first
    paths: [.cache/pip, .specverify/memory]
  script:
    - pip install "$SPECVERIFY"
    - specverify gate --merge shards/*
  artifacts:
    when: always
    paths: [.specverify]
    reports:
      junit: .specverify/junit.xml
      codequality: .specverify/code-quality.json
"""

SOURCE = "git+https://github.com/OWNER/specverify@v0.1.0"
"""What CI files give to pip: a repository at a tag. OWNER stands for whoever publishes it."""

PLACES = {"github": Path(".github/workflows/speculation.yml"), "gitlab": Path(".gitlab-ci.yml")}
"""The CI file of each service."""

INCLUDED_FILE = Path("speculation.gitlab-ci.yml")
"""The file that is written where .gitlab-ci.yml stands already."""


def ci_file(service: str, shards: int = 1) -> str:
    """The CI file of a service: one job, or with several shards a job for each and one that merges their reports."""
    if shards == 1:
        text = GITHUB if service == "github" else GITLAB
    else:
        text = GITHUB_SHARDS if service == "github" else GITLAB_SHARDS
    text = text.replace("SPECVERIFY: SOURCE", f"SPECVERIFY: {SOURCE}")
    return text.replace("NUMBERS", ", ".join(map(str, range(1, shards + 1)))).replace("COUNT", str(shards))


def start(folder: Path, service: str, shards: int = 1) -> list[str]:
    """Write profile and CI file into `folder`, and overwrite nothing; lines that say what was done and what is next.

    Raises:
        UnusableInput: The CI file is there already.
        Unwritable: The system refuses.
    """
    place = PLACES[service]
    if service == "gitlab" and (folder / place).exists():
        place = INCLUDED_FILE
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
    write_whole(folder / place, ci_file(service, shards).encode())
    lines.append(f"wrote {place}: name in its variable SPECVERIFY what pip installs, a git URL at a tag or a path")
    if place == INCLUDED_FILE:
        lines.append(f"add to .gitlab-ci.yml: include: [{{local: {INCLUDED_FILE}}}]")
    return [*lines, "run it here first: specverify gate"]


def _has_profile(folder: Path) -> bool:
    if not (folder / PROJECT_FILE).exists():
        return False
    try:
        find(folder)
    except UnusableInput:
        return False
    return True
