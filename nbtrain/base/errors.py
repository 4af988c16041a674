"""Every exception nbtrain raises.

    NbtrainError
    ├── UsageError          what the user typed cannot be done; shown as one line
    │   ├── DeviceError     the devices asked for do not exist or are taken
    │   └── VersionMismatch a package's version is not one that a strategy can be run with; names what can be
    ├── CellSyntaxError     the cell is not Python; shown as IPython shows a cell's own syntax error
    ├── MissingName         the cell reads a name that nobody has; also a NameError
    ├── CannotTravel        an object of the notebook cannot be sent to the ranks
    ├── NotPrepared         a model is trained on several ranks without having been set up
    ├── NotSupported        this strategy cannot do that; names one that can
    ├── PoolError           the ranks could not be started or reached
    │   └── RankDied        a rank's process ended while it was needed
    └── RankError           what a rank raised, where its own exception could not be brought home;
                            otherwise the cause of the original exception

All of them survive pickling, because ranks raise them too.
"""

from __future__ import annotations

RAISED_BY = "_nbtrain_raised_by"
"""Attribute of an error that every rank raises because the code of one did: that rank."""

FROM_RANKS = "_nbtrain_from_ranks"
"""Attribute of an error that a cell has raised on ranks, which keep its frames for a debugger."""

IN_FULL = "_nbtrain_in_full"
"""Attribute of a UsageError that ranks have raised after they had taken steps: it says where, and what was kept."""


def text_of(error: BaseException) -> str:
    """What an error says. Its class may be the user's, and then its `__str__` may raise."""
    try:
        return str(error)
    except Exception:  # of the user's class
        return "<its __str__ raises>"


class NbtrainError(Exception):
    """Base of everything nbtrain raises on purpose."""


class UsageError(NbtrainError):
    """What the user typed cannot be done."""


class DeviceError(UsageError):
    """The devices asked for do not exist or are taken."""


class VersionMismatch(UsageError):
    """A package's version lacks what a strategy needs of it."""


class _Shown(NbtrainError):
    """Is shown as its `lines`, without the stack of the magic that raised it."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message, lines)
        self.message = message
        self.lines = lines

    def __str__(self) -> str:
        return self.message

    def _render_traceback_(self) -> list[str]:
        return self.lines


class CellSyntaxError(_Shown):
    """The body of the cell is not Python."""


class MissingName(_Shown, NameError):
    """The cell reads a name that neither the notebook nor a rank has; found before anything was sent."""


class CannotTravel(NbtrainError):
    """An object of the notebook cannot be sent to the ranks."""


class NotPrepared(NbtrainError):
    """A model is trained on several ranks without having been set up."""


class NotSupported(NbtrainError):
    """The chosen strategy cannot do what the cell does."""


class PoolError(NbtrainError):
    """The ranks could not be started or reached."""


class RankDied(PoolError):
    """A rank's process ended while it was needed."""


class RankError(NbtrainError):
    """What a rank raised, as text: the cause of the exception that reaches the notebook."""
