"""Show one step of a trace: `python show.py run.jsonl 1` shows the first step."""

import json
import sys

with open(sys.argv[1]) as file:
    step = json.loads(file.readlines()[int(sys.argv[2])])["step"]
tree, path = step["drafted"]["tree"], step["accepted"]["path"]
print("node parent token  best   scores")
for node, token in enumerate(tree["token"]):
    scores = step["scored"]["logits"][node]
    best = scores.index(max(scores))
    listed = " ".join(f"{score:2}" for score in scores)
    fate = "accepted" if node in path else ""
    print(f"{node:4} {tree['parent'][node]:6} {token:5} {best:5}   {listed}   {fate}".rstrip())
print("bonus", step["accepted"]["bonus"], " emitted", *step["emitted"]["tokens"])
