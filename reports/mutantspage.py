"""What `bench mutants` found: the score, what the numbers come to, and every survivor with its line."""

from typing import Any

from reports.values import clean, plural


def mutants_page(figures: dict[str, Any]) -> str:
    """The page; the figures are those of `specverify.mutants.figures_of`."""
    judged = figures["caught"] + figures["survived"]
    lines = [
        f"bench mutants --of {figures['of']}: {figures['caught']} of {judged} caught, {figures['score']:.1%} "
        f"(goal {figures['goal']:.0%})",
        f"  sample {figures['sample']} of {figures['population']}, seed {figures['seed']}; "
        f"{figures['equivalent']} known to be equivalent; {sum(figures['not_run'].values())} not run here",
        f"  caught at: {_counts(figures['caught_at'])}",
        f"  caught as: {_counts(figures['caught_how'])}",
        f"  left out by rule: {_counts(figures['skipped'])}",
    ]
    lines += [f"  not run: {count} × {why}" for why, count in figures["not_run"].items()]
    if figures["not_judged"] or figures["not_finished"]:
        lines.append(
            f"  NOT FINISHED: {plural(figures['not_judged'], 'mutant')} not judged, "
            f"{figures['not_finished']} survived what there was time for"
        )
    lines += [f"  THE CLEAN ENGINE DIFFERS: {clean(one)}" for one in figures["clean_findings"]]
    lines += [f"  RECORD FITS NO LINE: {clean(one)}" for one in figures["idle_records"]]
    lines += [f"  caught by {name}: {count}" for name, count in list(figures["caught_by"].items())[:12]]
    for one in figures["survivors"]:
        lines.append(f"survived {one['id']} in {one['within'] or 'the module'} ({one['stage']}, {one['judged']} cases, "
                     f"{one['differing']} differ)")  # fmt: skip
        lines += [f"  - {clean(one['before'])}", f"  + {clean(one['after'])}"]
    return "\n".join(lines)


def _counts(of: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of.items()) or "none"
