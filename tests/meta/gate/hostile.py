"""Hostile strings, of a fixed seed: markup, control codes, bidirectional marks, workflow commands, a megabyte."""

import random

PARTS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</code></pre><h1>x</h1>", "&lt;b&gt;", "&#60;b&#62;",
    "\x1b[31mred\x1b[0m", "\x1b]8;;http://x\x07link\x1b]8;;\x07", "\x9b31m", "\x07\x08\x0b", "\x00",
    "\r", "\r\n", "\n\n",
    "\u202eevil\u202c", "\u2066x\u2069", "\u200b", "\ufeff", "\u2028", "\u2029", "\ud800", "\udfff", "\ufffe",
    "```", "````\n# x\n````", "~~~", "`", "|", "\\|", "](http://x)", "![x](http://x/y.png)", "[x]: http://x", "**x**",
    "__x__", "# heading", "- item", "> quote", "| a | b |\n|---|---|", "---", "===", "<!--", "-->", "<![CDATA[", "]]>",
    "<?xml", "<!DOCTYPE x>", "@all", "@here", "#1", "!1", "http://x", "www.x.y", ":+1:", "$x$", "$$", "\\(",
    "::error::x", "\n::set-output name=a::b", "\n  ::add-mask::x", "##[group]x", "%0A::error::x", "%25", "::", "'", '"',
    "[[ATTACHMENT|/etc/passwd]]", "A" * 300, "\u0301" * 50, "🏳️‍🌈", "\t",
)  # fmt: skip
"""What a hostile string is made of."""


def strings(count: int = 200, seed: int = 2026) -> list[str]:
    """`count` strings of one to five parts; the last one has a megabyte."""
    dice = random.Random(seed)
    texts = ["".join(dice.choices(PARTS, k=dice.randint(1, 5))) for _ in range(count - 1)]
    return [*texts, "".join(dice.choices(PARTS, k=40)) + "<b>x`|\n" * 150_000]
