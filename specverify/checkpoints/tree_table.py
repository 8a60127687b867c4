"""The file of a table of trees by batch size.

`dispatch learn` writes such a file, and `--draft-trees` reads it.
"""

from pathlib import Path

from specverify.reference.case_json import Validator, dotted_path, schema, shorten
from specverify.reference.draft_trees import Dispatch
from specverify.reference.files.json_types import build
from specverify.reference.malformed import Malformed
from specverify.setup.errors import UnusableInput
from specverify.setup.json_files import json_in


def table_in(path: Path) -> Dispatch:
    """The table of a file, in the form of a draft's `shape` in a case file.

    Raises:
        UnusableInput: The file cannot be read, or holds no such table.
    """
    content = json_in(path)
    case_schema = schema()
    validator = Validator({"$ref": "#/$defs/dispatch", "$defs": case_schema["$defs"]})
    wrong = next(iter(validator.iter_errors(content)), None)
    if wrong is not None:
        raise UnusableInput(f"{path}: {dotted_path(wrong.absolute_path)}: {shorten(wrong.message)}")
    try:
        table: Dispatch = build(Dispatch, content)
    except Malformed as why:
        raise UnusableInput(f"{path}: {why}") from None
    return table
