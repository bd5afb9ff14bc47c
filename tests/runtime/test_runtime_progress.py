import io

import pytest
from rich.console import Console

from powerclip.runtime.progress import Progress, duration, print_line, track


def log() -> Console:
    return Console(file=io.StringIO(), width=40)


def terminal() -> Console:
    return Console(file=io.StringIO(), width=160, force_terminal=True, legacy_windows=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_each_update_with_a_text_is_a_line(clock):
    console = log()
    with Progress("run", 1200, unit="step", every=0, console=console) as progress:
        clock.now = 10.0
        progress.update(300, "loss 2.3")
        progress.update(301)
    assert text_of(console) == "run  step   300/1,200  loss 2.3  eta 0:00:30\n"


def test_lines_keep_a_distance_in_time(clock):
    console = log()
    with Progress("trees", 4, unit="shards", every=10, console=console) as progress:
        for clock.now in (3.0, 20.0, 21.0, 30.0):
            progress.update(1, f"at {clock.now:.0f}")
    assert [line.split("  ")[2] for line in text_of(console).splitlines()] == ["at 20", "at 30"]


def test_without_a_distance_a_log_gets_no_line():
    console = log()
    with Progress("images", 4, console=console) as progress:
        progress.update(2, "text")
    assert text_of(console) == ""


def test_what_has_begun_counts_and_what_was_skipped_does_not(clock):
    with Progress("trees", 5, quiet=True) as progress:
        progress.skip(1)
        progress.update(1)
        assert progress.remaining is None
        clock.now = 10.0
        progress.update(2, partial=0.5)
        # 1.5 units took 10 s; 2.5 of 5 are left
        assert progress.remaining == pytest.approx(10 * 2.5 / 1.5)


def test_a_total_may_come_later(clock):
    console = terminal()
    with Progress("data", unit="images", console=console) as progress:
        progress.update(3)
        clock.now = 1.0
        progress.update(4, total=8)
    assert "images 4/8  eta 0:00:01" in text_of(console)


def test_a_terminal_shows_a_bar_and_brackets_are_no_markup():
    console = terminal()
    with Progress("[run]", 2, unit="step", console=console) as progress:
        progress.update(1, "[/loss] 3")
    assert "[run] " in text_of(console)
    assert "━" in text_of(console)
    assert "step 1/2  [/loss] 3" in text_of(console)


def test_a_bar_inside_another_one_shows_nothing():
    console, inner = terminal(), terminal()
    with Progress("outer", 2, console=console) as progress:
        assert list(track([1, 2], "inner", console=inner)) == [1, 2]
        progress.advance()
    assert "inner" not in text_of(inner)
    assert list(track([1], "after", console=inner)) == [1]
    assert "after" in text_of(inner)
    assert "1/2" in text_of(console)


def test_quiet_shows_warnings_only():
    console = terminal()
    with Progress("run", 2, quiet=True, every=0, console=console) as progress:
        progress.update(1, "text")
        progress.say("information")
        progress.warn("attention")
    assert "attention" in text_of(console)
    assert not any(word in text_of(console) for word in ("run", "text", "information"))


def test_a_bar_that_breaks_off_makes_room_for_the_next():
    console = terminal()
    with pytest.raises(ValueError, match="broken"), Progress("one", 2, console=console):
        raise ValueError("broken")
    with Progress("two", 2, console=console) as progress:
        progress.advance()
    assert "two" in text_of(console)


def test_lines_are_printed_as_they_are():
    console = log()
    print_line(console, "a [path] that is longer than the console is wide: 12345")
    assert text_of(console) == "a [path] that is longer than the console is wide: 12345\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(41.4, "0:00:41"), (3723, "1:02:03"), (47 * 3600, "47:00:00"), (3 * 86400, "3.0 days"), (1e8, "3.2 years")],
)
def test_a_duration_is_a_clock_and_from_two_days_on_words(seconds, text):
    assert duration(seconds) == text
