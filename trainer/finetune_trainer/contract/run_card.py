"""What a process that sends the card of a run to trackers is asked, and what it answers."""

from finetune_trainer.contract.models import ContractModel
from finetune_trainer.contract.tracking import Tracking


class CardRequest(ContractModel):
    """The card of a run that has finished."""

    tracking: Tracking
    """The trackers, with the name of the run."""
    identity: str
    """Identity of the train stage, which identifies the run in every tracker."""
    folder: str
    """Folder for the files of a tracker's library."""
    page: str
    """The card, in HTML."""
    succeeded: bool
    """Whether the run has succeeded."""


class CardAnswer(ContractModel):
    """The end of each tracker's part."""

    places: tuple[str, ...] = ()
    """Where the card is."""
    problems: tuple[str, ...] = ()
    """Why a tracker does not have the card."""
