"""The languages of grammars, by derivatives of expressions, byte by byte."""

from specverify.reference.oracle.language.legal import LegalTokens, is_closed, legal_after

__all__ = ["LegalTokens", "is_closed", "legal_after"]
