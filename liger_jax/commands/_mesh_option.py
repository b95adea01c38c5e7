"""The option `--mesh`: names of axes and how many devices each has."""


def mesh_option(text: str) -> dict[str, int]:
    """Reads a mesh such as "fsdp=4,tensor=2".

    Args:
        text: names and sizes, with commas between them.

    Returns:
        The sizes by their names, in the text's order.

    Raises:
        ValueError: the text is no list of sizes, or names an axis twice.

    Example:
        >>> mesh_option("fsdp=4, tensor=2")
        {'fsdp': 4, 'tensor': 2}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not (size.isascii() and size.isdecimal()) or int(size) < 1:
            raise ValueError(f"mesh={text!r} must be axes and their devices, such as fsdp=4,tensor=2.")
        if name in sizes:
            raise ValueError(f"mesh={text!r} names {name} twice. Give each axis one size.")
        sizes[name] = int(size)
    return sizes
