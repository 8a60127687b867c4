"""The contract probe: whether a device obeys the rules of the emulation.

It makes the calls of every rule on a device, and compares the outcome with the rule's verdict. `specverify doctor
--probe ascend` runs it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import boolean
from specverify.backends.ascend.operators.fused_infer.latent import LATENT_DIM, ROPE_DIM
from specverify.backends.ascend.operators.rules import RULES, as_the_kernel_does
from specverify.backends.ascend.probe.calls import Arguments, arguments, operator_of
from specverify.backends.ascend.probe.examples import EXAMPLES
from specverify.backends.engine.law_device import why_no_float64

ON_THE_HOST = ("context_lens", "seq_len")
"""Tensor arguments that ATB reads on the host."""

LATENT = "npu_fused_infer_attention_score_v2"
"""The operator that computes latent rows."""

COMPARED_OPERATORS = ("npu_fused_infer_attention_score", LATENT, "npu_fusion_attention")
"""The operators whose attention of a tree is compared with float64."""

COMPLAINTS = (RuntimeError, ValueError, TypeError)
"""The exceptions with which torch and torch_npu refuse a call, by the host's checks or the schema's."""


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of one rule's calls on one operator.

    Attributes:
        rule: The rule's id, or `numbers` for the attention of an asymmetric tree compared with float64.
        operator: The operator, without namespace.
        documented: The rule's verdict, `rejects` or `undefined`; `right` for numbers.
        state: `holds`, `struck` (the device behaves otherwise), or `not run`.
        detail: What the device said or did, in one line.
    """

    rule: str
    operator: str
    documented: str
    state: str
    detail: str


@dataclass(frozen=True)
class ProbeSite:
    """The place where the calls run.

    Attributes:
        namespaces: `torch.ops`, or an object in its place.
        device: The device of the tensors.
        emulated: Whether the CPU emulation answers; its undefined calls then run as the kernel does.
        settle: Waits for the device, whose kernels report failures late.
    """

    namespaces: Any
    device: str
    emulated: bool
    settle: Callable[[], None]


def probe(site: ProbeSite) -> list[ProbeResult]:
    """Run the calls of every rule on each operator that the rule binds.

    A wrong call that reads or writes foreign memory is never run on a device; the emulation makes it harmless.
    """
    results = []
    # A device runs undefined calls by itself; the emulation refuses them unless it is told.
    with as_the_kernel_does() if site.emulated else nullcontext():
        for example in EXAMPLES:
            rule = RULES[example.rule]
            for name in rule.operators:
                if example.foreign and not site.emulated:
                    results.append(ProbeResult(rule.id, name, rule.verdict, "not run", "touches memory of others"))
                    continue
                absent = _absent(site, name)
                if absent is not None:
                    results.append(ProbeResult(rule.id, name, rule.verdict, "not run", absent))
                    continue
                right_complaint, wrong_complaint = (
                    _complaint(site, name, make()) for make in (example.right, example.wrong)
                )
                results.append(
                    ProbeResult(
                        rule.id, name, rule.verdict, *_state_and_detail(rule.verdict, right_complaint, wrong_complaint)
                    )
                )
        results += [_numbers(site, name) for name in COMPARED_OPERATORS]
        results.append(_float64(site))
    return results


def _float64(site: ProbeSite) -> ProbeResult:
    """Where exact laws are computed: either is right, since the engine asks as this does."""
    declined = why_no_float64(torch.device(site.device))
    detail = "laws are computed on the device" if declined is None else f"laws are computed on the host: {declined}"
    return ProbeResult("float64", "laws", "undefined", "holds", detail)


def _absent(site: ProbeSite, name: str) -> str | None:
    """The reason why this machine lacks the operator, in one line; an absent operator keeps no rule and breaks none."""
    try:
        operator_of(site.namespaces, name)
    except (AttributeError, OSError) as why:  # not in this torch_npu; or its library, such as NNAL's, is not installed
        return f"no such operator here: {' '.join(str(why).split())[:120]}"
    return None


def _complaint(site: ProbeSite, name: str, named_values: Arguments) -> str | None:
    """The operator's complaint in one line; None where the call runs.

    Any other exception than COMPLAINTS is a defect of this project, and is not caught.
    """
    try:
        _run(site, name, named_values)
    except COMPLAINTS as why:
        return " ".join(str(why).split())[:160] or type(why).__name__
    return None


def _run(site: ProbeSite, name: str, named_values: Arguments) -> Any:
    """Call the operator with `named_values` on the device, and wait for the result."""
    device_values = {
        key: value.to(site.device) if isinstance(value, Tensor) and key not in ON_THE_HOST else value
        for key, value in arguments(name, named_values).items()
    }
    result = operator_of(site.namespaces, name)(**device_values)
    site.settle()
    return result


def _state_and_detail(verdict: str, right_complaint: str | None, wrong_complaint: str | None) -> tuple[str, str]:
    """State and detail of a rule, from the complaints about the call that keeps it and the call that breaks it."""
    if right_complaint is not None:
        return "struck", f"the call that keeps it is refused: {right_complaint}"
    if verdict == "rejects":
        return (
            ("holds", wrong_complaint)
            if wrong_complaint is not None
            else ("struck", "the call that breaks it is taken")
        )
    return (
        ("holds", "taken, its result undefined")
        if wrong_complaint is None
        else ("struck", f"now refused: {wrong_complaint}")
    )


def _uneven_tree() -> Tensor:
    """The visibility of a tree behind nine columns, bool [6, 15]; neither causal nor symmetric."""
    parents = (0, 0, 0, 1, 1, 4)
    prefix = 9
    visible = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
    visible[:, :prefix] = True
    for row, parent in enumerate(parents):
        visible[row, prefix:] = visible[parent, prefix:] if row else False
        visible[row, prefix + row] = True
    return visible


def _numbers(site: ProbeSite, name: str) -> ProbeResult:
    """Compare the attention of an asymmetric tree with float64; a wrong mask polarity or scale is far off."""
    visible = _uneven_tree()
    rows, columns = visible.shape
    make = torch.Generator().manual_seed(5)
    latent = name == LATENT
    dim, kv_heads = (LATENT_DIM + ROPE_DIM, 1) if latent else (32, 2)
    sizes = ((2, rows), (kv_heads, columns), (kv_heads, columns))
    query, key, value = (torch.randn(1, heads, size, dim, generator=make).half() for heads, size in sizes)
    head_count: Arguments = {"head_num": 2} if name == "npu_fusion_attention" else {"num_heads": 2}
    named_values: Arguments = {"scale": dim**-0.5, "input_layout": "BNSD", **head_count}
    if latent:
        value = key[..., :LATENT_DIM].contiguous()
        tree = boolean(visible[None, :, columns - rows :])
        named_values |= {"num_key_value_heads": 1, "sparse_mode": 9, "query": query[..., :LATENT_DIM].contiguous()}
        named_values |= {"key": value, "value": value, "atten_mask": tree}
        named_values |= {
            f"{part}_rope": tensor[..., LATENT_DIM:].contiguous() for part, tensor in (("query", query), ("key", key))
        }
    else:
        named_values |= {"query": query, "key": key, "value": value, "atten_mask": boolean(visible[None, None])}
    absent = _absent(site, name)
    if absent is not None:
        return ProbeResult("numbers", name, "right", "not run", absent)
    try:
        out = _run(site, name, named_values)[0]
    except COMPLAINTS as why:
        return ProbeResult("numbers", name, "right", "struck", " ".join(str(why).split())[:160])
    scores = (query.double() @ key.double().transpose(-1, -2) * dim**-0.5).masked_fill(~visible, float("-inf"))
    error = float((out.cpu().double() - torch.softmax(scores, -1) @ value.double()).abs().max())
    # Inputs and output are float16; the bound leaves room for their rounding.
    return ProbeResult(
        "numbers", name, "right", "holds" if error < 3e-3 else "struck", f"{error:.1e} from float64 softmax"
    )
