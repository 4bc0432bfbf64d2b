"""Deleted Jobs whose pods no watch has shown. A pod may run: a watch may be behind another watch."""

from collections import OrderedDict
from collections.abc import Iterable

from finetune_operator.kubernetes.cache.store import NamespacedName

# A bound on the memory, whatever users delete.
CLAIMS_KEPT = 16384
"""Claims with such Jobs; the newest are kept."""
JOBS_KEPT = 16
"""Such Jobs of each claim; the newest are kept."""


class LostJobs:
    """The names of these Jobs, by claim."""

    def __init__(self) -> None:
        self._by_claim: OrderedDict[NamespacedName, tuple[str, ...]] = OrderedDict()

    def of_claim(self, claim: NamespacedName) -> tuple[str, ...]:
        """Return the Jobs that used a claim."""
        return self._by_claim.get(claim, ())

    def add(self, job: str, claims: Iterable[NamespacedName]) -> None:
        """Note a deleted Job that used these claims."""
        for claim in claims:
            jobs = (*self.of_claim(claim), job)
            self._by_claim[claim] = jobs[-JOBS_KEPT:]
        while len(self._by_claim) > CLAIMS_KEPT:
            self._by_claim.popitem(last=False)

    def forget(self, claim: NamespacedName) -> None:
        """Forget the Jobs that used a claim."""
        self._by_claim.pop(claim, None)
