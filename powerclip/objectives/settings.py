"""Checks that the settings of several objectives share."""

from __future__ import annotations


def check_share(name: str, value: float, above: float | None = None) -> None:
    """ValueError unless a setting lies in [0, 1], or in (above, 1]."""
    if not (0 if above is None else above) <= value <= 1 or value == above:
        interval = "[0, 1]" if above is None else f"({above}, 1]"
        raise ValueError(f"objective_settings.{name} must lie in {interval}, not {value}")


def check_least(name: str, value: float, least: float) -> None:
    """ValueError unless a setting is at least `least`."""
    if not value >= least:
        raise ValueError(f"objective_settings.{name} must be at least {least}, not {value}")


def check_positive(name: str, value: float) -> None:
    """ValueError unless a setting is positive."""
    if not value > 0:
        raise ValueError(f"objective_settings.{name} must be positive, not {value}")
