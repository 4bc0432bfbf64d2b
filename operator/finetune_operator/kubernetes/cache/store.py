"""Objects of one kind, as lists, watches and answers of the API server deliver them, in any order."""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from typing_extensions import override

from finetune_operator.kubernetes import fast_json
from finetune_operator.kubernetes.translate.object import Object

NamespacedName = tuple[str, str]
"""Namespace and name of an object."""
T = TypeVar("T")
_IN_TEXT: Object = {}
"""The value of an entry that is kept as text."""
# A late answer must not bring a deleted object back.
DELETIONS_KEPT = 4096
"""Deletions that are remembered."""


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """An object, and the version that it was read from."""

    uid: str
    version: int
    value: T
    text: bytes = b""
    """The value as JSON, if the store keeps it so."""


class Store(Generic[T]):
    """Objects by namespace and name; an older version never replaces a newer one.

    The API server's resource versions are integers that grow with each write. An index maps a value to the objects that
    its function returns the value for.
    """

    def __init__(
        self, trim: Callable[[Object], T], **indexes: Callable[[T], Iterable[Hashable]]
    ) -> None:
        self._trim = trim
        self._indexes = indexes
        self.entries: dict[NamespacedName, Entry[T]] = {}
        self._deleted: OrderedDict[NamespacedName, int] = OrderedDict()
        self._index: dict[str, defaultdict[Hashable, set[NamespacedName]]] = {
            name: defaultdict(set) for name in indexes
        }

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.entries)

    def get(self, name: NamespacedName) -> T | None:
        """Return an object, or None."""
        entry = self.entries.get(name)
        return self._value(entry) if entry else None

    def select(self, index: str, value: Hashable) -> list[T]:
        """Return the objects that the index has under this value, in the order of their names."""
        return [
            self._value(self.entries[name])
            for name in sorted(self._index[index].get(value, ()))
        ]

    def is_news(self, raw: Object) -> bool:
        """Return whether the object is newer than the stored object of its name."""
        name = namespaced_name(raw)
        entry = self.entries.get(name)
        known = entry.version if entry else self._deleted.get(name, -1)
        version = version_of(raw)
        # A version that is no number cannot be compared: such an object is always stored.
        return version > known or not version

    def update(self, raw: Object) -> T:
        """Store an object that is newer than the stored object; return its trimmed form."""
        value = self._trim(raw)
        self.put(
            namespaced_name(raw),
            Entry(raw["metadata"].get("uid", ""), version_of(raw), value),
        )
        return value

    def put(self, name: NamespacedName, entry: Entry[T]) -> None:
        """Store an entry as it is."""
        self._drop(name)
        self._deleted.pop(name, None)
        self.entries[name] = self._kept(entry)
        for index, function in self._indexes.items():
            for value in function(entry.value):
                self._index[index][value].add(name)

    def clear(self) -> None:
        """Forget all objects, and that they existed: the next list is complete."""
        self.entries.clear()
        self._deleted.clear()
        for index in self._index.values():
            index.clear()

    def _kept(self, entry: Entry[T]) -> Entry[T]:
        """Return the entry in the form in which it stays in memory."""
        return entry

    def _value(self, entry: Entry[T]) -> T:
        """Return the object of an entry."""
        return entry.value

    def remove(self, name: NamespacedName, version: int = 0) -> T | None:
        """Remove an object and return it. An answer that is older than this version does not bring it back."""
        entry = self._drop(name)
        if version:
            self._deleted[name] = version
            if len(self._deleted) > DELETIONS_KEPT:
                self._deleted.popitem(last=False)
        return self._value(entry) if entry else None

    def unlisted(
        self, listed: set[NamespacedName], version: int, namespace: str | None
    ) -> Iterator[NamespacedName]:
        """Yield the stored names that a complete list of this version lacks, although the list is newer."""
        # A copy: the caller removes entries meanwhile.
        for name, entry in list(self.entries.items()):
            if (
                name not in listed
                and entry.version <= version
                and namespace in {None, name[0]}
            ):
                yield name

    def _drop(self, name: NamespacedName) -> Entry[T] | None:
        entry = self.entries.pop(name, None)
        if entry is None:
            return None
        for index, function in self._indexes.items():
            for value in function(self._value(entry)):
                names = self._index[index][value]
                names.discard(name)
                if not names:
                    del self._index[index][value]
        return entry


class TextStore(Store[Object]):
    """A store that keeps most objects as JSON text, in a third of the memory.

    Nearly all Jobs of a cluster have ended, and their pipelines are reconciled rarely. `is_text` selects them.
    """

    def __init__(
        self,
        trim: Callable[[Object], Object],
        is_text: Callable[[Object], bool],
        **indexes: Callable[[Object], Iterable[Hashable]],
    ) -> None:
        super().__init__(trim, **indexes)
        self._is_text = is_text

    @override
    def _kept(self, entry: Entry[Object]) -> Entry[Object]:
        if not self._is_text(entry.value):
            return entry
        return replace(entry, value=_IN_TEXT, text=fast_json.encode(entry.value))

    @override
    def _value(self, entry: Entry[Object]) -> Object:
        if not entry.text:
            return entry.value
        value: Object = fast_json.decode(entry.text)
        return value


def namespaced_name(raw: Object) -> NamespacedName:
    """Return the namespace and the name of an object."""
    # Many objects have the namespace: its text is kept once.
    return sys.intern(raw["metadata"]["namespace"]), raw["metadata"]["name"]


def version_of(raw: Object) -> int:
    """Return the resource version as a number; 0 if it is not a number."""
    text = str(raw["metadata"].get("resourceVersion") or "")
    if not text.isdecimal():
        return 0
    return int(text)
