"""The counts that a right draft of chains can have on a text, however its chains are cut.

An engine drafts up to K tokens in a step, accepts those that stand in the text, and adds a token of the target's. It
may cut a chain where a batch has no room for it, or go without one. On a given text the places where the draft's best
token stands are fixed, so that drafted and accepted tokens are sums over a path through the text.
"""

from collections import defaultdict

from specverify.reference.trace import Array, Speculated


def is_possible(hits: Array, chain: int, counts: Speculated) -> bool:
    """Whether steps with chains of at most `chain` tokens can have these counts of drafted and accepted tokens.

    Behind the last token of the text the draft may be right or wrong, and its tokens may count or not.

    Args:
        hits: Whether the draft's best token stands at each place of the text, bool [tokens].
        chain: Most drafted tokens of a step.
        counts: The counts.
    """
    num_tokens = len(hits)
    # proposed[place][accepted]: the possible numbers of drafted tokens, as bits of an int.
    proposed: list[dict[int, int]] = [defaultdict(int) for _ in range(num_tokens + 1)]
    proposed[0][0] = 1
    for start in range(num_tokens):
        room = num_tokens - start
        run = 0
        while run < min(chain, room) and hits[start + run]:
            run += 1
        for accepted, numbers in proposed[start].items():
            for length in range(chain + 1):
                added = min(length, run)
                if added < room:
                    proposed[start + added + 1][accepted + added] |= numbers << length
                else:
                    # The whole rest is accepted. Its last token may count or not, and so may drafted ones behind it.
                    for counted in range(room - 1, length + 1):
                        proposed[num_tokens][accepted + counted] |= numbers << length
    return bool(proposed[num_tokens][counts.accepted] >> counts.proposed & 1)
