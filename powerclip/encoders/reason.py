"""Another library's error, short enough to stand inside a message of ours."""


def reason(error: BaseException) -> str:
    """The first line of `error`, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
