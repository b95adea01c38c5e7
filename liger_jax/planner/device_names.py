"""Devices by the names that people type, such as "RTX 4090" or "8xh100-80gb", and memory by numbers such as "24GiB"."""

import difflib
import re

from liger_jax.pallas_kernels.devices import GIB, GPUS, TPUS

ANY_GPU = "gpu"  # one of which only its memory is known
LEAST_MEMORY, MOST_MEMORY = 2 * GIB, 2**50
_UNITS = {"": GIB, "g": GIB, "gib": GIB, "gb": 10**9, "m": 2**20, "mib": 2**20, "mb": 10**6}
# Words that a seller's name has, and that distinguish no cards of the table.
_WORDS = (
    "nvidia geforce tesla quadro gpu generation blackwell workstation server edition "
    "sxm sxm2 sxm3 sxm4 sxm5 sxm6 hbm2 hbm2e hbm3 hbm3e pci pcie gddr6 gddr6x gddr7 google tpu"
).split()
_OTHER_TPU_NAMES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v6lite": "v6e",
    "trillium": "v6e",
    "ironwood": "tpu7x",
    "v7x": "tpu7x",
}
_LAPTOP = re.compile(r"laptop|mobile|max-?q")


def known_as(name: str) -> tuple[str, str]:
    """A device's key in `GPUS` or `TPUS`, or `ANY_GPU`, and how many there are or their topology.

    `name`: such as "h200", "RTX 4090", "a100-80gb:8", "8xh100" or "v5e:8x8". Where the memory is not named, and cards
    of this name differ in it, the one with less is taken.
    """
    typed, _, size = name.strip().lower().partition(":")
    if (several := re.fullmatch(r"(\d+) ?x ?(?=[a-z\d])(.+)", typed)) and not size:
        size, typed = several.groups()
    if typed in GPUS or typed in TPUS or typed == ANY_GPU:
        return typed, size
    chip, gigabytes = _chip_and_memory(typed)
    rows = [] if _LAPTOP.search(typed) else _rows_of(chip)
    if not rows and chip in _tpus():
        return _tpus()[chip], size
    keys = [row for row in rows if gigabytes is None or _has(row, gigabytes)]
    if rows and not keys:  # "h100-94gb" is the one of another form
        keys = [key for key in GPUS if _chip_of(key).startswith(chip) and _has(key, gigabytes)]
    if keys:
        return min(keys, key=lambda row: GPUS[row].memory_bytes), size
    raise ValueError(_unknown(name, typed, chip, rows))


def others_with_that_name(key: str, name: str) -> list[str]:
    """The rows that a name could also mean, which differ in memory."""
    typed = name.strip().lower().partition(":")[0]
    chip, gigabytes = _chip_and_memory(re.sub(r"^\d+ ?x ?(?=[a-z])", "", typed))
    return [] if gigabytes is not None or typed == key else [row for row in _rows_of(chip) if row != key]


def memory_in_bytes(text: str) -> int:
    """Reads "24GiB", "24564MiB" or "25.8GB" (a billion bytes each); a number alone is GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([gm]?(?:ib|b)?)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"memory={text!r} must be a number of GiB, GB or MiB, such as '24GiB'.")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not LEAST_MEMORY <= size <= MOST_MEMORY:
        raise ValueError(f"memory={text!r} must be from 2GiB to {MOST_MEMORY // GIB}GiB: what a device has.")
    return size


def _chip_and_memory(typed: str) -> tuple[str, int | None]:
    """The name without separators, sellers' words and memory, and the memory."""
    words = [word for word in re.split(r"[\s_/-]+", typed) if word]
    memory = [match for word in words if (match := re.fullmatch(r"(\d+)(g|gb|gib)", word))]
    numbers = [int(match[1]) for match in memory]
    kept = [word for word in words if not re.fullmatch(r"\d+(g|gb|gib)", word) and word not in ("gb", "gib")]
    last = kept[-1] if kept else ""
    if not numbers and len(kept) > 1 and last.isdecimal() and _rows_of(_joined(kept[:-1])):  # "a100-80"
        numbers, kept = [int(last)], kept[:-1]
    return _joined(kept), numbers[0] if numbers else None


def _joined(words: list[str]) -> str:
    with_form = "".join(word for word in words if word not in _WORDS or word == "pcie")
    return with_form if _rows_of(with_form) else "".join(word for word in words if word not in _WORDS)


def _rows_of(chip: str) -> list[str]:
    """The rows of a chip, "rtx4060ti" or "4060ti"."""
    return [key for key in GPUS if chip and chip in (own_chip := _chip_of(key), own_chip.removeprefix("rtx"))]


def _chip_of(key: str) -> str:
    return re.sub(r"-\d+g$", "", key).replace("-", "")


def _has(key: str, gigabytes: int) -> bool:
    """Whether sellers give the row's card this memory: the driver reports up to 8 % less, in GiB."""
    return 0.91 * gigabytes <= GPUS[key].memory_bytes / GIB <= 1.01 * gigabytes


def _tpus() -> dict[str, str]:
    return {name.removeprefix("tpu"): name for name in TPUS} | _OTHER_TPU_NAMES


def _unknown(name: str, typed: str, chip: str, rows: list[str]) -> str:
    by_number = "Or give its memory in place of it: memory='24GiB'."
    if _LAPTOP.search(typed):
        return (
            f"device={name!r}: a laptop's card has another chip than the desktop's of its name. Tell its memory "
            "in place of it: memory='16GiB'."
        )
    if rows:
        sizes = " or ".join(f"{GPUS[row].memory_bytes / GIB:.0f} GiB ({row})" for row in rows)
        return f"device={name!r}: this card has {sizes}. For another memory pass memory='24GiB' beside {rows[0]!r}."
    if (match := re.fullmatch(r"(.*?)(\d+)", chip)) and (tpu := _tpus().get(match[1])):
        return (
            f"device={name!r}: TPUs are named by the topology of their chips, such as '{tpu}:{TPUS[tpu].smallest}', "
            f"and '{tpu}' alone is one device."
        )
    numbers = re.findall(r"\d+", chip)
    alike = [key for key in GPUS if re.findall(r"\d+", _chip_of(key)) == numbers]
    near = difflib.get_close_matches(chip, alike, n=3)
    near = near or difflib.get_close_matches(chip, GPUS, n=3, cutoff=0.85)  # a digit is missing, as in "rtx409"
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"GPUs: {', '.join(GPUS)}, with a number as in"
    hint += "" if near else f" 'h200:8'; TPUs: {', '.join(TPUS)}, with a topology as in 'v5e:8x8'."
    return f"device={name!r} is unknown. {hint} {by_number}"
