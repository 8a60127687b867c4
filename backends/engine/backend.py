"""The engine as a backend, on one device and with one composition of its seams."""

from collections.abc import Callable
from dataclasses import replace

import torch

from specverify.backends.base import Declaration, Live, Unsupported
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.collectives import Group
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.draft import OPENERS
from specverify.backends.engine.kept_prefills import KeptPrefills
from specverify.backends.engine.kv.lanes import PagedLanes
from specverify.backends.engine.law_device import why_no_float64
from specverify.backends.engine.model.built_in import DTYPES
from specverify.backends.engine.model.graphs import Recorder
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.play import play, serve
from specverify.backends.engine.ranks.in_step import sampling_in_step
from specverify.backends.engine.ranks.play import play_ranks, serve_ranks
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.engine.sampling.rounds import Tables
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.two_modes import in_mode
from specverify.backends.flags import Mode, mode_of
from specverify.reference.abilities import LAYOUT_SETTINGS
from specverify.reference.case import Case
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.layout import COMMITS, KINDS, PAGE_STATES
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.rules import RULES
from specverify.reference.session import ACTIONS
from specverify.reference.trace import Array, Stage, Trace


class EngineBackend:
    """The engine on `device`, a torch device, composed of the functions and classes in `seams`.

    A planted fault replaces one of the seams. With a `recorder`, each verify forward that can be recorded is recorded
    once and then replayed. A device that computes no float64 declares no such dtype, and its laws are the host's.

    Attributes:
        seams: The functions and classes of which the engine is composed.
        mixes_prefill: Whether one process prefills and takes steps, so that a forward can do both.
        copies_prefills: Whether one process prefills and takes steps in caches of ours, so that columns can be copied.
    """

    mixes_prefill = True
    copies_prefills = True

    def __init__(
        self,
        name: str,
        device: str,
        seams: Seams = SEAMS,
        dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16"),
        layouts: tuple[str, ...] = (),
        emulated: bool = False,
        recorder: Recorder | None = None,
        variant_interval: int = 1,
        soft_caps: str = "any",
        sinks: bool = True,
        indexed: bool = True,
        unequal_widths: bool = True,
        ranks: tuple[int, ...] = (1,),
    ) -> None:
        if why_no_float64(torch.device(device)) is not None:
            dtypes = tuple(dtype for dtype in dtypes if dtype != "float64")
        self._device = device
        self._stores_codes = recorder is None and not emulated and torch.device(device).type in ("cpu", "cuda")
        self.declaration = Declaration(
            name=name,
            device=torch.device(device).type,
            reveals=frozenset(Stage),
            dtypes=dtypes,
            ranks=ranks,
            bare_rows=True,
            spread=len(ranks) > 1,
            draft_ranks=len(ranks) > 1,
            drafts=tuple(OPENERS),
            tree_kinds=TREE_KINDS,
            first_tokens=FIRST_TOKENS,
            alignments=ALIGNMENTS,
            page_states=PAGE_STATES,
            commits=COMMITS,
            layouts=layouts or tuple(KINDS),
            sessions=True,
            actions=tuple(ACTIONS),
            takes_tape=True,
            max_temperature=float("inf"),
            rules=tuple(RULES),
            processes=True,
            stops=("max_new_tokens", "eos", "stop_tokens", "stop_strings", "max_length"),
            emulated=emulated,
            variant_interval=variant_interval,
            soft_caps=soft_caps,
            sinks=sinks,
            indexed=indexed,
            unequal_widths=unequal_widths,
            layout_settings=self._layout_settings(unequal_widths, seams),
            quantised=True,
            adapters=True,
            prompt_logprobs=True,
            images=True,
            draft_images=True,
        )
        self._soft_caps = soft_caps
        self._sinks = sinks
        self._indexed = indexed
        self._unequal = unequal_widths
        self.seams = seams
        self.mode = mode_of()
        self._model_cache = ModelCache(device, recorder=recorder)
        self._prefills: KeptPrefills | None = None
        # A function, because `seams` is replaced when a fault is planted in an open backend.
        self._tables = Tables(device, lambda: self.seams.sampling)

    @property
    def mode(self) -> Mode:
        """The mode of fused attention: which forwards run it; at first the mode that the environment's flags select."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        # Written-out attention computes all of these, whatever the fused attention that it replaces.
        self._mode = mode
        caps = self._soft_caps if mode.fused else "any"
        sinks = self._sinks or not mode.fused
        indexed = self._indexed or not mode.fused
        unequal = self._unequal or not mode.fused
        self.declaration = replace(
            self.declaration,
            soft_caps=caps,
            sinks=sinks,
            indexed=indexed,
            unequal_widths=unequal,
            layout_settings=self._layout_settings(unequal, self.seams),
        )

    @property
    def models(self) -> ModelCache:
        """The models that are kept open between runs."""
        return self._model_cache

    def run(self, case: Case) -> Trace:
        """Run the generation that `case` describes; see `specverify.backends.base.Backend.run`."""
        self._refuse_dtype(case)
        play_case = play if case.ranks == 1 else play_ranks
        return play_case(case, self._model_cache, in_mode(self.seams, self.mode))

    def run_variant(self, case: Case, extends: bool) -> Trace:
        """See `specverify.backends.base.SharesPrefills`."""
        if case.ranks > 1 or case.session is not None or not self.copies_prefills:
            return self.run(case)
        self._refuse_dtype(case)
        seams = in_mode(self.seams, self.mode)
        if self._prefills is None or self._prefills.seams != seams:
            self._prefills = KeptPrefills(seams)
        prefills = self._prefills
        return play(case, self._model_cache, seams, lambda request: prefills.prefill(request, extends))

    def serve(self, case: Case) -> Live:
        """Play the case's session and return it open for further actions; see `specverify.backends.base.Serving`."""
        self._refuse_dtype(case)
        serve_case = serve if case.ranks == 1 else serve_ranks
        return serve_case(case, self._model_cache, in_mode(self.seams, self.mode))

    def verify(self, verification: GivenTree, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._on_ranks(verification.ranks, lambda tables: tables.verify(verification, tape))

    def rounds(self, world: World, tape: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._on_ranks(world.ranks, lambda tables: tables.rounds(world, tape))

    def samples(self, world: World, seeds: Array) -> Blocks:
        """See `specverify.backends.base.ExactLaw`."""
        return self._on_ranks(world.ranks, lambda tables: tables.samples(world, seeds))

    def _on_ranks(self, ranks: int, ask: Callable[[Tables], Blocks]) -> Blocks:
        """The blocks that `ask` makes of tables; over several ranks, those of rank 0 when all of them answer `ask`."""
        if ranks == 1:
            return ask(self._tables)
        seams = self.seams.sampling

        def answer(group: Group) -> Blocks:
            return ask(Tables(self._device, lambda: sampling_in_step(seams, group)))

        outcomes = Meeting(ranks).run(answer)
        error = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
        if error is not None:
            raise error
        return outcomes[0].value

    def _refuse_dtype(self, case: Case) -> None:
        if case.dtype not in self.declaration.dtypes or case.dtype not in DTYPES:
            raise Unsupported(f"dtype {case.dtype}: {self.declaration.name} has {', '.join(self.declaration.dtypes)}")

    def _layout_settings(self, unequal_widths: bool, seams: Seams) -> tuple[str, ...]:
        """The settings of a KV layout.

        Latent rows need values of another width, left padding a dense mask, and a mixed batch one attention for trees
        and prompts. A recording of forwards and Ascend's operators take cells as numbers, not as codes.
        """
        dense = seams.attend is eager and not issubclass(seams.kv.lanes, PagedLanes)
        obeys = {
            "latent": unequal_widths,
            "left_pad": dense,
            "kv_dtype": self._stores_codes,
            "mixed_prefill": self.mixes_prefill and seams.prefill_attend is None,
        }
        return tuple(setting for setting in LAYOUT_SETTINGS if obeys.get(setting, True))
