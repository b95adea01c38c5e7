"""What a file of data holds, by its name: prose, JSON or a table."""

import bz2
import gzip
import lzma
from collections.abc import Iterable
from pathlib import Path

JSON_LINES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
COLUMNAR = (".parquet", ".arrow")  # Apache's formats: tables by columns, with types
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_READ = {
    "Write its table as Parquet: pandas.read_feather(…).to_parquet('rows.parquet').": ".feather",
    "Unpack it first.": ".zip .tar .tgz .tbz2 .txz .7z .rar .zst",
    "Write its text to a .txt file.": ".pdf .doc .docx .odt .rtf .epub .pptx .ipynb",
    "Save its sheet as a .csv file.": ".xls .xlsx .ods",
}
KNOWN = (*JSON_LINES, *DELIMITERS, *COLUMNAR, *COMPRESSED, *" ".join(_NOT_READ.values()).split(), ".txt", ".md")


def suffix(path: Path) -> str:
    """The end of a file's name that says what it holds: in small letters, and without that of its compression."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def why_not(path: Path) -> str | None:
    """Why a file is not read, and the cure; `None` if it is read."""
    end = suffix(path)
    if end in COLUMNAR and path.suffix.lower() in COMPRESSED:
        return "is compressed as a whole, and is read by parts. Unpack it first."
    cure = next((cure for cure, ends in _NOT_READ.items() if end in ends.split()), None)
    return None if cure is None else f"is a {end} file, which is not read as it is. {cure}"


def is_rows(path: Path) -> bool:
    """Whether a file holds rows by its name, and no prose."""
    return suffix(path) in (*JSON_LINES, *DELIMITERS, *COLUMNAR)


def tell(paths: Iterable[Path]) -> None:
    """Prints which files are read as what, if they are not all of one kind."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        end = suffix(path)
        kind = "a table" if end in (*DELIMITERS, *COLUMNAR) else "JSON" if end in JSON_LINES else "prose"
        kinds.setdefault(kind, []).append(path.name)
    if len(kinds) > 1:
        named = (
            f"as {kind} {', '.join(names[:3])}{f' and {len(names) - 3:,} more' if names[3:] else ''}"
            for kind, names in kinds.items()
        )
        print(f"data: read {'; '.join(named)}")
