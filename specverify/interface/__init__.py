"""The Python interface: `diff`, `judge`, `replay` and `law`, on which commands of these names stand.

Engines are names, as the option `--backend` takes them, or Python objects: a factory such as `open_`, a function from a
prompt to tokens, a backend. Results say whether the engine agrees, list its failures, and give JSON and a page:

    from specverify import diff

    result = diff("my_engine:open_", cases=50)
    assert result.agrees, result.page()
"""

from specverify.interface.diffing import diff
from specverify.interface.judging import judge, replay
from specverify.interface.laws import law
from specverify.interface.progress import Progressed
from specverify.interface.results import DiffResult, JudgeResult, LawResult, Replay

__all__ = ["DiffResult", "JudgeResult", "LawResult", "Progressed", "Replay", "diff", "judge", "law", "replay"]
