"""Checks that the settings of several objectives share."""

from __future__ import annotations

import math


def check_finite(name: str, value: float) -> None:
    """ValueError when a setting is infinite or not a number."""
    if not -math.inf < value < math.inf:
        raise ValueError(f"objective_settings.{name} must be a finite number, not {value}")


def check_share(name: str, value: float, above: float | None = None) -> None:
    """ValueError unless a setting lies in [0, 1], or in (above, 1]."""
    if not (0 if above is None else above) <= value <= 1 or value == above:
        interval = "[0, 1]" if above is None else f"({above}, 1]"
        raise ValueError(f"objective_settings.{name} must lie in {interval}, not {value}")


def check_least(name: str, value: float, least: float) -> None:
    """ValueError unless a setting is finite and at least `least`."""
    check_finite(name, value)
    if not value >= least:
        raise ValueError(f"objective_settings.{name} must be at least {least}, not {value}")


def check_positive(name: str, value: float) -> None:
    """ValueError unless a setting is finite and positive."""
    check_finite(name, value)
    if not value > 0:
        raise ValueError(f"objective_settings.{name} must be positive, not {value}")
