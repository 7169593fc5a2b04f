"""Names in the tables and the JSON file."""

HOST_TIME = "_host_time"  # suffix of the op in records of host times


def size_name(nbytes: int) -> str:
    """Returns a readable size of a full tensor, "-" if there is none."""
    if nbytes == 0:
        return "-"
    for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return str(nbytes)
