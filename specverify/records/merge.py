"""One record made of the whole shards of a run; the others are named."""

from collections.abc import Sequence
from pathlib import Path

from reports import writing
from specverify.records.read import DIFF, MANIFEST, PROMPTS, TURNS, Fact, Record, key_of, read
from specverify.setup.errors import UnusableInput


def shard_folder(folder: Path, rank: int, world: int) -> Path:
    """The folder of a shard inside the folder of its run."""
    return folder / f"shard-{rank}-of-{world}"


def shards_in(folders: Sequence[Path]) -> list[Path]:
    """`folders`, each that holds shards replaced by these.

    Raises:
        UnusableInput: A folder has shards of runs with different numbers of ranks.
    """
    found = list[Path]()
    for folder in folders:
        inner = sorted(one for one in folder.glob("shard-*-of-*") if one.is_dir())
        if len({one.name.rpartition("-")[2] for one in inner}) > 1:
            raise UnusableInput(f"{folder}: holds shards of several numbers of ranks; name the shards of one")
        found += inner or [folder]
    return found


def merged(folders: Sequence[Path]) -> Record:
    """The whole shards among `folders` as one record, which no folder holds yet; its manifest names the missing ones.

    Records of diff have no shards: their turns are put together.

    Raises:
        UnusableInput: A record is damaged, or two belong to different runs or are the same shard.
    """
    records = [read(folder) for folder in folders if (folder / MANIFEST).exists()]
    if not records:
        raise UnusableInput(f"{', '.join(map(str, folders))}: no record of a run; was it killed before its first turn?")
    first = records[0]
    for one in records[1:]:
        if any(one.manifest[name] != first.manifest[name] for name in ("kind", "settings")):
            raise UnusableInput(f"{first.folder} and {one.folder} are parts of different runs")
    if first.manifest["kind"] == DIFF:
        manifest = {name: value for name, value in first.manifest.items() if name != "seed"}
        every = {key: turn for one in records for key, turn in one.turns.items()}
        return Record(first.folder, manifest, every, {}, sum(one.torn for one in records))
    return _of_shards(records)


def _of_shards(records: list[Record]) -> Record:
    first, at = records[0], dict[int, Record]()
    world = first.shard[1]
    for one in records:
        rank, ranks = one.shard
        if ranks != world or rank in at:
            other = at.get(rank, first)
            raise UnusableInput(f"{other.folder} and {one.folder} are not two shards of one run")
        at[rank] = one
    missing, whole = list[str](), list[Record]()
    for rank in range(world):
        if rank not in at:
            missing.append(f"shard {rank} of {world} is missing: it wrote no record")
        elif at[rank].unfinished:
            left = len(at[rank].unfinished)
            missing.append(f"shard {rank} of {world} is missing: {left} of its prompts are not finished")
        else:
            whole.append(at[rank])
    order = {way["name"]: place for place, way in enumerate(first.manifest.get("ways", ()))}
    keyed = {key_of(turn): turn for one in whole for turn in one.finished}
    keys = sorted(keyed, key=lambda key: (key[0], key[1], key[3], order.get(key[2], len(order))))
    prompts = {number: line for one in whole for number, line in one.prompts.items()}
    manifest: Fact = {**first.manifest, "missing": missing}
    manifest.pop("shard", None)
    turns = {key: keyed[key] for key in keys}
    return Record(first.folder, manifest, turns, dict(sorted(prompts.items())), sum(one.torn for one in records))


def write(record: Record, folder: Path) -> None:
    """Write a merged record into `folder`, each file whole.

    Raises:
        Unwritable: The system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise writing.Unwritable.from_os_error(folder, why) from None
    for name, lines in ((TURNS, record.turns.values()), (PROMPTS, record.prompts.values())):
        writing.write_whole(folder / name, "".join(map(writing.as_json, lines)).encode())
    # The manifest comes last: without it the folder holds no record.
    writing.write_json(folder / MANIFEST, record.manifest)
