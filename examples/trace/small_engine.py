"""An engine in plain Python that writes what it did. It imports nothing of SpecVerify.

Its "model" is a table: row t holds the scores of each token after token t. A step drafts a tree below the last token,
verifies the tree greedily, and emits the accepted tokens and one more. `python small_engine.py run.jsonl` writes the
trace; with the word `wrong` behind it, the engine accepts the first child of the root whatever the scores say.
"""

import json
import random
import sys

VOCABULARY = 10
DRAWS = random.Random(33)
SCORES = [[DRAWS.randrange(100) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)]


def best(token):
    return SCORES[token].index(max(SCORES[token]))


def draft(root):
    """A tree of six nodes: the root, two children, and a path below the second. Node i's parent is parent[i]."""
    guess = best(root)
    second = (guess + 1) % VOCABULARY
    return {
        "parent": [0, 0, 0, 2, 3, 0],
        "token": [root, second, guess, best(guess), best(second), (guess + 2) % VOCABULARY],
    }


def verify(tree, wrong):
    """The accepted nodes from the root downwards, and the token after the last of them."""
    path = [0]
    while True:
        best_token = best(tree["token"][path[-1]])
        nodes = range(1, len(tree["token"]))
        children = [node for node in nodes if tree["parent"][node] == path[-1] and tree["token"][node] == best_token]
        if wrong and len(path) == 1:
            children = [1]
        if not children:
            return path, best_token
        path.append(children[0])


def run(prompt, max_new_tokens, wrong=False):
    """The lines of one run's trace."""
    yield {"run": {"prompt": prompt, "vocabulary": VOCABULARY, "stops": {"max_new_tokens": max_new_tokens}}}
    text, emitted, lengths, proposed = list(prompt), 0, [], 0
    while emitted < max_new_tokens:
        tree = draft(text[-1])
        path, bonus = verify(tree, wrong)
        block = [tree["token"][node] for node in path[1:]] + [bonus]
        block = block[: max_new_tokens - emitted]
        yield {
            "step": {
                "drafted": {"tree": tree},
                "scored": {"logits": [SCORES[token] for token in tree["token"]]},
                "accepted": {"path": path, "bonus": bonus},
                "emitted": {"tokens": block},
            }
        }
        text += block
        emitted += len(block)
        lengths.append(len(path) - 1)
        proposed += len(tree["token"]) - 1
    counts = {"verify_calls": len(lengths), "draft_calls": 0, "proposed": proposed, "accepted": sum(lengths)}
    counts |= {"rejected": proposed - sum(lengths), "accept_lengths": lengths}
    yield {"end": {"finish": "length", "accounting": counts}}


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        for line in run([3, 1, 4], 12, wrong="wrong" in sys.argv[2:]):
            file.write(json.dumps(line) + "\n")
