"""Places of random draws: the stream that a draw reads, its offset there, its size, its line of code.

Two users share this notion of a place: the interception, in which draws of one place are one coin
(`specverify.backends.interception`), and a passive recorder around an engine that draws real numbers (`Recorder`).

    places.py     Position, Place, Site and Draw: the words, and what overlaps
    positions.py  position(generator): where any generator stands now; in_default(library): where a default one does
    mersenne.py   offsets on the sequences of MT19937, which torch's CPU generator, `random.Random` and
                  `numpy.random.RandomState` all are
    hooks.py      hooks on every draw of torch, NumPy and `random`, for both users
    recorder.py   Recorder: draws = Recorder().draws after `with recorder:`; overlaps(draws)

A stream is a sequence of random words, named by content: two generators with the same seed, or the same state, are on
one stream at one offset, whichever objects and libraries they belong to. On a device the stream is the seed of the
generator, and the offset is the generator's own.
"""
