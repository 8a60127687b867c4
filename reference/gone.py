"""The error of an engine that cannot be asked any more, which ends a run in place of one case."""


class EngineGone(Exception):
    """The engine, or the machine behind it, cannot be reached or opened.

    It says nothing of a case: a judge passes it on, and the run ends with what was judged so far.
    """
