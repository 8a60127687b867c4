"""The options of the command `law`; the work is done in `specverify.laws`."""

from typing import Any

import click

from specverify.reference.oracle.tree_growth import STOPS
from specverify.reference.rules import DRAWS, RULES


@click.command()
@click.argument("rule", required=False, type=click.Choice(list(RULES)))
@click.option("--p", metavar="P,P,…", help="The target's probabilities at every context: 0.6,0.4 or 3/5,2/5.")
@click.option("--q", metavar="Q,Q,…", help="The draft's (default for both: a pair designed to tell rules apart).")
@click.option("--draws", type=click.Choice(DRAWS), help="How siblings are named (default: as RULE was published).")
@click.option("--siblings", type=click.IntRange(1, 31), help="Children of each node.")
@click.option("--depth", type=click.IntRange(1, 31), help="Levels below the root.")
@click.option("--tree", metavar="N,N,…", help="Parents of the nodes; node 0 is the root, its own parent: 0,0,0,1,1.")
@click.option("--tokens", metavar="T,T,…", help="Tokens of the nodes, the root's first, in place of drafting any.")
@click.option("--threshold-single", metavar="X", help="target-only: accept where p(x) reaches it (default 1).")
@click.option("--threshold-acc", metavar="X", help="target-only: divides the covered mass (default 1).")
@click.option("--epsilon", metavar="X", help="typical: the hard threshold (default 0.3).")
@click.option("--delta", metavar="X", help="typical: the factor of exp(-entropy) (default 0.09).")
@click.option("--weight", metavar="X", help="ensemble: the share of p in the mixture that accepts (default 0.7).")
@click.option("--entropy", metavar="X", help="fly: the least entropy, in nats, of a lifted rejection (default 1).")
@click.option("--window", metavar="N", help="fly: the accepted nodes behind a lifted rejection (default 1).")
@click.option("--acceptance-rate", metavar="X", help="synthetic: the probability of each node (default 0.8).")
@click.option("--world", metavar="FILE.json", help="Tree, thresholds, and target and draft after each path.")
@click.option("--stop-below", metavar="X", help="The draft goes on while its probability reaches X.")
@click.option("--stop", type=click.Choice(STOPS), help="What X is compared with (default: the draft's best, before).")
@click.option("--soft-q", is_flag=True, help="With top-k: hand over the soft q, as if tokens had been drawn from it.")
@click.option("--rule", "user_rule", metavar="pkg.module:function", help="A rule of your own in place of RULE.")
@click.option("--torch", metavar="pkg.module:function", help="A whole sampler in torch, each draw of it forked.")
@click.option("--claims-lossless", is_flag=True, help="With --rule, --torch: exit 1 unless it is lossless.")
@click.option("--table", is_flag=True, help="All built-in rules, all kinds of draft, on a standard set of worlds.")
@click.option("--picture", is_flag=True, help="Bars of the first token's law, and of the worst context's.")
@click.option("--max-runs", type=click.IntRange(min=1), help="Runs of the rule before a world counts as too large.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the result as one JSON object.")
@click.option("--html", "html_file", metavar="FILE", help="Write the law as one HTML page, with bars.")
def law(*, json_file: str | None, html_file: str | None, **options: Any) -> int:
    """Enumerate the exact law of an acceptance rule, and hold it against the target's.

    Exit 1 where a rule that declares to be lossless in this setting is not; a rule that is lossy as declared is fine.
    """
    from specverify.laws import command
    from specverify.setup.files import Outputs

    return command.law(command.Options(**options), Outputs(json_file, html_file))
