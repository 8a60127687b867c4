"""The package that suffix decoding imports; the stand-in looks tokens up without it."""
