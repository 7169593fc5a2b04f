"""The errors of collx. All of them are RuntimeErrors, and come from the compiled extension."""

from __future__ import annotations

from collx._extension import extension

CollectiveTimeout = extension.CollectiveTimeout
CollectiveMismatch = extension.CollectiveMismatch
CollectiveOverlap = extension.CollectiveOverlap
CommunicatorPoisoned = extension.CommunicatorPoisoned
InitError = extension.InitError

__all__ = [
    "CollectiveMismatch",
    "CollectiveOverlap",
    "CollectiveTimeout",
    "CommunicatorPoisoned",
    "InitError",
]
