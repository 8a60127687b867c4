"""An engine's repository whose packages have the names of ours, and how Python finds ours beside it.

Its `backends`, `reference`, `properties`, `reports` and `tests` hold other things than ours. The adapter at its root
imports all five, and refuses to generate in a process that knows ours under these names.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("backends", "reference", "properties", "reports", "tests")

PACKAGE = '"""{name} of an engine."""\n\nfrom {name}.kind import KIND\n\n__all__ = ["KIND"]\n'

ADAPTER = """
import sys
from pathlib import Path

import torch
from specverify.adapt import blackbox

import backends, properties, reference, reports, tests
import backends.kind, reports.kind

HERE = str(Path(__file__).parent)
OURS = (backends, properties, reference, reports, tests)
assert [one.KIND for one in OURS] == [f"{one.__name__} of the engine" for one in OURS]


def generate(prompt_ids, max_new_tokens, model, stops=()):
    for one in OURS:
        assert sys.modules[one.__name__] is one
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in [one.__name__ for one in OURS]:
            assert module.__file__.startswith(HERE), f"{name} is {module.__file__}"
    tokens = list(prompt_ids)
    while len(tokens) < len(prompt_ids) + max_new_tokens and not (tokens[len(prompt_ids):] and tokens[-1] in stops):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt_ids):]


def off_by_one(prompt_ids, max_new_tokens, model):
    tokens = generate(prompt_ids, max_new_tokens, model)
    return [*tokens[:-1], (tokens[-1] + 1) % model.config.vocab_size]


open_, wrong = blackbox(generate), blackbox(off_by_one)
"""


def write_repository(folder: Path) -> Path:
    """Write the repository into `folder`, which is made, and return it."""
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(PACKAGE.format(name=name))
        (folder / name / "kind.py").write_text(f'KIND = "{name} of the engine"\n')
    (folder / "adapter.py").write_text(ADAPTER)
    return folder


def installed_variables(folder: Path) -> dict[str, str]:
    """Variables under which Python finds `specverify` in `folder`, and no other folder of this checkout: as installed.

    An older editable install, or the checkout itself in PYTHONPATH, would put our root on Python's path.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "specverify").exists():
        (folder / "specverify").symlink_to(ROOT / "specverify")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [entry for entry in sys.path if entry != {str(ROOT)!r}]\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def command_file(folder: Path) -> str:
    """Our command as an installer writes it."""
    file = folder / "specverify-script.py"
    file.write_text("import sys\nfrom specverify.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    return str(file)


MODULE = [sys.executable, "-m", "specverify"]
