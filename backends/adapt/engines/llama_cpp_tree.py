"""llama.cpp's tree batch: one decode of a whole tree through the C API.

The package `llama-cpp-python` binds that API. A node of the tree is one token of a batch at its own position, and
belongs to the sequence of every leaf below it, so that it attends to the committed text and to its own path. The C API
has no verifier: the greedy walk of `GreedyTrees` chooses a leaf's sequence, and llama.cpp keeps that sequence's rows
and drops all others.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import llama_cpp
import numpy as np
import torch

from specverify.backends.adapt import exported, save_gguf
from specverify.backends.adapt.drafting import DRAFTS
from specverify.backends.adapt.export.gguf_file import ROPES
from specverify.backends.adapt.greedy_trees import GreedyTrees
from specverify.backends.base import Declaration, Unsupported
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree

OPEN_CONTEXTS = 16
"""Contexts that stay open, each with its model."""

LEAVES = 64
"""Sequences of a context, and so the most leaves of a tree."""

COLUMNS, BATCH_TOKENS = 4096, 512
"""Cells of the KV cache, of which each row of a batch takes one; and the most rows of one forward."""


class FailedCall(RuntimeError):
    """A call of the C API told an error."""


class Engine:
    """An open model with a KV cache that all sequences share."""

    def __init__(self, checkpoint: str) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        file = str(exported(save_gguf, checkpoint)).encode()
        self._model = llama_cpp.llama_model_load_from_file(file, llama_cpp.llama_model_default_params())
        if not self._model:
            raise FailedCall("llama_model_load_from_file gave no model")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = COLUMNS
        settings.n_batch = COLUMNS
        settings.n_ubatch = BATCH_TOKENS
        settings.n_seq_max = LEAVES
        settings.kv_unified = True  # a cell of the cache is of several sequences
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise FailedCall("llama_init_from_model gave no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._within: list[list[int]] = []
        self._length = 0

    def begin(self, prefix: Sequence[int]) -> None:
        """See `TreeForwards`; the prefix belongs to sequence 0."""
        llama_cpp.llama_memory_clear(self._memory, True)
        if prefix:
            self.decode(prefix, range(len(prefix)), [[0]] * len(prefix))

    def verify(self, tree: Tree, length: int) -> torch.Tensor:
        """See `TreeForwards`; each leaf has a sequence.

        Raises:
            Unsupported: for a tree of more leaves than a context has sequences.
        """
        self._within = below(tree)
        self._length = length
        if len(self._within[0]) > LEAVES:
            raise Unsupported(f"a tree of {len(self._within[0])} leaves; a context here has {LEAVES} sequences")
        self.open_leaves(len(self._within[0]))
        return self.decode(tree.token, [length + depth for depth in tree.depth], self._within)

    def keep(self, path: Sequence[int]) -> None:
        """See `TreeForwards`."""
        self.keep_leaf(self._within[path[-1]][0], self._length + len(path))

    def decode(self, tokens: Sequence[int], positions: Sequence[int], within: Sequence[Sequence[int]]) -> torch.Tensor:
        """A forward of tokens at `positions`, each in the sequences `within`: logits, float32 [tokens, vocabulary].

        Raises:
            FailedCall: llama.cpp decoded nothing.
        """
        count = len(tokens)
        batch = llama_cpp.llama_batch_init(count, 0, LEAVES)
        try:
            batch.n_tokens = count
            for row, (token, position, sequences) in enumerate(zip(tokens, positions, within, strict=True)):
                batch.token[row] = token
                batch.pos[row] = position
                batch.logits[row] = 1
                batch.n_seq_id[row] = len(sequences)
                for index, sequence in enumerate(sequences):
                    batch.seq_id[row][index] = sequence
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise FailedCall(f"llama_decode answered {status} to {count} tokens")
            rows = [llama_cpp.llama_get_logits_ith(self._context, row) for row in range(count)]
            return torch.tensor(np.stack([np.ctypeslib.as_array(row, (self._vocabulary,)) for row in rows]))
        finally:
            llama_cpp.llama_batch_free(batch)

    def open_leaves(self, leaves: int) -> None:
        """Give each of `leaves` sequences the committed text of sequence 0."""
        for leaf in range(1, leaves):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, leaf, -1, -1)

    def keep_leaf(self, leaf: int, length: int) -> None:
        """Keep the first `length` rows of the sequence `leaf` as sequence 0, and drop all others."""
        llama_cpp.llama_memory_seq_keep(self._memory, leaf)
        if leaf:
            llama_cpp.llama_memory_seq_cp(self._memory, leaf, 0, -1, -1)
            llama_cpp.llama_memory_seq_keep(self._memory, 0)
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise FailedCall(f"llama_memory_seq_rm removed nothing from row {length} on")


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop what llama.cpp logs: the C library has no setting for that."""


@lru_cache(maxsize=OPEN_CONTEXTS)
def engine(checkpoint: str) -> Engine:
    """The open engine of a checkpoint directory."""
    return Engine(checkpoint)


def below(tree: Tree) -> list[list[int]]:
    """For each node, the numbers of the leaves in its subtree; leaves are numbered in the order of their nodes."""
    leaves = [node for node in range(len(tree)) if not tree.children[node]]
    within: list[list[int]] = [[] for _ in range(len(tree))]
    for number, leaf in enumerate(leaves):
        for node in tree.path(leaf):
            within[node].append(number)
    return within


DECLARATION = Declaration(
    name="llama-cpp-tree",
    device="cpu",
    reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
    dtypes=("float32",),
    drafts=DRAFTS,
    layout_settings=(),
    max_temperature=0.0,
    stops=("max_new_tokens", "eos", "stop_tokens"),
    families=("llama", "pangu", "qwen2", "qwen3", "mistral"),
    ropes=ROPES,
    least_window=0,
    soft_caps="published",
    longest=COLUMNS - 64,
)


def open_tree() -> GreedyTrees:
    """The backend: tree speculation on llama.cpp."""
    return GreedyTrees(DECLARATION, engine)
