"""One record made of the whole shards of a run; the others are named."""

from collections.abc import Sequence
from pathlib import Path

from specverify.records.read import DIFF, MANIFEST, PROMPTS, TURNS, Fact, Record, key_of, read
from specverify.reports import writing
from specverify.setup.errors import UnusableInput
from specverify.setup.files import make_folder


def shard_folder(folder: Path, rank: int, world: int) -> Path:
    """The folder of a shard inside the folder of its run."""
    return folder / f"shard-{rank}-of-{world}"


def shards_in(folders: Sequence[Path]) -> list[Path]:
    """`folders`, each that holds shards replaced by these.

    Raises:
        UnusableInput: A folder has shards of runs with different numbers of ranks.
    """
    shards = list[Path]()
    for folder in folders:
        inner = sorted(path for path in folder.glob("shard-*-of-*") if path.is_dir())
        if len({path.name.rpartition("-")[2] for path in inner}) > 1:
            raise UnusableInput(f"{folder}: holds shards of several numbers of ranks; name the shards of one")
        shards += inner or [folder]
    return shards


def merge_records(folders: Sequence[Path]) -> Record:
    """The whole shards among `folders` as one record, which no folder holds yet; its manifest names the missing ones.

    Records of diff have no shards: their turns are put together.

    Raises:
        UnusableInput: A record is damaged, or two belong to different runs or are the same shard.
    """
    records = [read(folder) for folder in folders if (folder / MANIFEST).exists()]
    if not records:
        raise UnusableInput(f"{', '.join(map(str, folders))}: no record of a run; was it killed before its first turn?")
    first = records[0]
    for record in records[1:]:
        if any(record.manifest[name] != first.manifest[name] for name in ("kind", "settings")):
            raise UnusableInput(f"{first.folder} and {record.folder} are parts of different runs")
    if first.manifest["kind"] == DIFF:
        manifest = {name: value for name, value in first.manifest.items() if name != "seed"}
        every = {key: turn for record in records for key, turn in record.turns.items()}
        return Record(first.folder, manifest, every, {}, sum(record.torn for record in records))
    return _merge_shards(records)


def _merge_shards(records: list[Record]) -> Record:
    first = records[0]
    record_of_rank = dict[int, Record]()
    world = first.shard[1]
    for record in records:
        rank, ranks = record.shard
        if ranks != world or rank in record_of_rank:
            same_rank = record_of_rank.get(rank, first)
            raise UnusableInput(f"{same_rank.folder} and {record.folder} are not two shards of one run")
        record_of_rank[rank] = record
    missing = list[str]()
    whole_shards = list[Record]()
    for rank in range(world):
        if rank not in record_of_rank:
            missing.append(f"shard {rank} of {world} is missing: it wrote no record")
        elif record_of_rank[rank].unfinished_prompts:
            num_unfinished = len(record_of_rank[rank].unfinished_prompts)
            missing.append(f"shard {rank} of {world} is missing: {num_unfinished} of its prompts are not finished")
        else:
            whole_shards.append(record_of_rank[rank])
    order = {way["name"]: place for place, way in enumerate(first.manifest.get("ways", ()))}
    keyed = {key_of(turn): turn for shard in whole_shards for turn in shard.finished_turns}
    keys = sorted(keyed, key=lambda key: (key[0], key[1], key[3], order.get(key[2], len(order))))
    prompts = {number: line for shard in whole_shards for number, line in shard.prompts.items()}
    manifest: Fact = {**first.manifest, "missing": missing}
    manifest.pop("shard", None)
    turns = {key: keyed[key] for key in keys}
    return Record(first.folder, manifest, turns, dict(sorted(prompts.items())), sum(shard.torn for shard in records))


def write(record: Record, folder: Path) -> None:
    """Write a merged record into `folder`, each file whole.

    Raises:
        Unwritable: The system refuses.
    """
    make_folder(folder)
    for name, lines in ((TURNS, record.turns.values()), (PROMPTS, record.prompts.values())):
        writing.write_whole(folder / name, "".join(map(writing.as_json, lines)).encode())
    # The manifest comes last: without it the folder holds no record.
    writing.write_json(folder / MANIFEST, record.manifest)
