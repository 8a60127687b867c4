"""The languages of grammars, by derivatives of expressions, byte by byte."""

from reference.oracle.language.legal import Legal, closed, legal_after

__all__ = ["Legal", "closed", "legal_after"]
