"""`.ci/readme.py` follows a page literally: variables stay, files are written, and a wrong block is told."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.measure.documents.pages import ROOT

RIGHT = """# A page

```bash
export GREETING=hello
test "$GREETING" = hello   # as in one terminal
```

<!-- file examples/words.txt -->
```text
two words
```

```console
$ cat words.txt
two words
$ echo DIFFER; echo more; false
DIFFER
...
```

```bash
pytest -n 2
```
"""


@pytest.fixture
def readme() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("readme", ROOT / ".ci" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme"] = module
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules["readme"]


def follow_text(readme: ModuleType, folder: Path, text: str) -> list[str]:
    """The lines of the script about a page of `text`."""
    page, scratch = folder / "README.md", folder / "terminal"
    page.write_text(text)
    scratch.mkdir(exist_ok=True)
    terminal = readme.Terminal(folder, dict(os.environ), scratch)
    return [line.split("s  ")[-1] for line in readme.follow(page, terminal, ("pytest",))]


def test_a_right_page_is_followed_to_its_end(readme: ModuleType, tmp_path: Path) -> None:
    assert follow_text(readme, tmp_path, RIGHT) == [
        "export GREETING=hello",
        'test "$GREETING" = hello   # as in one terminal',
        "cat words.txt",
        "echo DIFFER; echo more; false",
        "left out   pytest -n 2",
    ]
    assert (tmp_path / "words.txt").read_text() == "two words\n"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("export GREETING=hello", "export GREETING=other", "ended with 1, not 0"),
        ("\ntwo words\n$", "\nthree words\n$", "prints another text than the page shows:\ntwo words"),
        ("more; false", "more", "ended with 0, not 1"),
        ("export GREETING", "absent-command; export GREETING=1; exit 3; export GREETING", "ended with 3, not 0"),
    ],
)
def test_a_block_that_does_not_do_what_it_says_is_told(
    readme: ModuleType, tmp_path: Path, before: str, after: str, message: str
) -> None:
    assert before in RIGHT
    with pytest.raises(readme.Wrong, match=message.replace("\n", r"\n")):
        follow_text(readme, tmp_path, RIGHT.replace(before, after))
