"""The error for the person who typed the command: shown as one line, exit code 2, no traceback."""


class UserError(Exception):
    """Bad input. The message says what is wrong, where, and what to do about it."""


def first_line(error: BaseException) -> str:
    """Another library's error, short enough to stand inside a message: its first line, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(word: str, known: list[str]) -> str:
    """A hint ` (did you mean 'x'?)` when `word` looks like one of `known`, else an empty string."""
    import difflib

    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""
