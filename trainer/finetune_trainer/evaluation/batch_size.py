"""The batch size, unless the recipe names it: as many requests per forward pass as the memory allows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

MAX_ON_GPU = 64
MAX_ON_CPU = 32
# lm-eval computes the log probabilities in FP32, whatever the model's dtype.
LOGIT_BYTES = 4
# The softmax of the logits takes another quarter, and activations take the rest.
MEMORY_SHARE = 4
"""The logits may take the free memory divided by this."""

BatchSize = Callable[[Any, str, Sequence[Any]], int]
"""Called with the lm-eval model, the kind of its requests and the requests; returns requests per forward pass."""


def largest_batch_size(lm: Any, kind: str, requests: Sequence[Any]) -> int:
    """Return the batch size for requests of one kind, according to the longest of them.

    On a GPU, lm-eval's `auto` finds it by trying. On a CPU trying would end in the kernel's out-of-memory killer, so
    it is computed from the size of the logits.
    """
    longest = longest_request(lm, kind, requests)
    if lm.device.type == "cuda":
        # Without a request lm-eval tries the model's maximum length, which no request may have.
        return int(lm._detect_batch_size([(None, [0] * longest, [0])]))  # noqa: SLF001  lm-eval's `auto` calls it, too
    vocabulary = lm.model.config.get_text_config().vocab_size
    return fitting_batch_size(available_memory(), longest * vocabulary * LOGIT_BYTES)


def longest_request(lm: Any, kind: str, requests: Sequence[Any]) -> int:
    """Return the number of tokens of the longest request, including those to be generated."""
    # Each text once: requests of a question share most of their text.
    texts = {
        "".join(text for text in request.args if isinstance(text, str))
        for request in requests
    }
    longest = max(len(tokens) for tokens in lm.tokenizer(sorted(texts)).input_ids)
    if kind == "generate_until":
        arguments = [
            normalize_gen_kwargs(request.args[1], lm.max_gen_toks)
            for request in requests
        ]
        longest += max(argument["max_gen_toks"] for argument in arguments)
    return int(min(max(longest, 1), lm.max_length))


def fitting_batch_size(memory: int, request_bytes: int) -> int:
    """Return the largest power of two, at most 32, of requests that fit into a quarter of the memory; at least 1."""
    fitting = memory // MEMORY_SHARE // request_bytes
    return int(min(MAX_ON_CPU, 1 << max(0, fitting.bit_length() - 1)))


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still use, by the limits of its cgroups and of the machine."""
    return max(0, min([_machine_memory(root), *_cgroup_memory(root)]))


def _machine_memory(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    [available] = [line for line in lines if line.startswith("MemAvailable:")]
    # The kernel counts in kibibytes.
    return 1024 * int(available.split()[1])


def _cgroup_memory(root: Path) -> Iterator[int]:
    """Yield the free bytes below the limit of each cgroup v2 of this process; nothing without a limit."""
    for folder in _cgroups(root):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text())
                yield int(limit) - used + _reclaimable(folder)
        except (OSError, ValueError):
            # The root cgroup has no limit, and a cgroup may lack the memory controller.
            continue


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folder of this process's cgroup and those above it; in a container the mount is its own cgroup."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::"):
            folder = mount / line.removeprefix("0::").strip("/")
            for path in (folder, *folder.parents):
                if path == mount or mount in path.parents:
                    yield path


def _reclaimable(folder: Path) -> int:
    """Return the bytes of the page cache that the kernel frees first; the kubelet does not count them as used."""
    lines = (folder / "memory.stat").read_text().splitlines()
    for line in lines:
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
