"""The batch size of an evaluation that names none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.trainer.evaluation import (
    evaluate_config,
    evaluate_environment,
    load_tiny_lm,
    read_samples,
    run_evaluate,
    with_recipe,
)

from finetune_trainer.contract import Task
from finetune_trainer.evaluation import batch_size
from finetune_trainer.evaluation.batch_size import (
    available_memory,
    fitting_batch_size,
    largest_batch_size,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "request_bytes", "expected"),
    [
        (4 * GIB, GIB // 8, 8),
        (4 * GIB - 1, GIB // 8, 4),  # 7 requests fit
        (400 * GIB, GIB // 8, 32),
        (4 * GIB, GIB, 1),
        (GIB, GIB, 1),  # none fits, so one is tried
        (0, GIB, 1),
    ],
)
def test_batch_is_a_power_of_two_in_a_quarter_of_memory(
    memory: int, request_bytes: int, expected: int
) -> None:
    assert fitting_batch_size(memory, request_bytes) == expected


def write_machine(root: Path, *, available_kib: int, cgroup: str = "0::/\n") -> None:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n"
    )
    (root / "proc" / "self" / "cgroup").write_text(cgroup)


def write_cgroup(
    root: Path, path: str, limit: str, current: int, inactive_file: int = 0
) -> None:
    folder = root / "sys" / "fs" / "cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    write_machine(tmp_path, available_kib=8 * 1024**2)
    write_cgroup(tmp_path, "", str(4 * GIB), 3 * GIB)
    assert available_memory(tmp_path) == GIB


def test_page_cache_counts_as_available_memory(tmp_path: Path) -> None:
    """Reading a model fills the container's limit with page cache, which the kernel frees on demand."""
    write_machine(tmp_path, available_kib=8 * 1024**2)
    write_cgroup(tmp_path, "", str(4 * GIB), 4 * GIB, inactive_file=3 * GIB)
    assert available_memory(tmp_path) == 3 * GIB


def test_smallest_limit_above_the_process_counts(tmp_path: Path) -> None:
    write_machine(tmp_path, available_kib=8 * 1024**2, cgroup="1:cpu:/\n0::/user/job\n")
    write_cgroup(tmp_path, "user/job", "max", 0)
    write_cgroup(tmp_path, "user", str(2 * GIB), 0)
    assert available_memory(tmp_path) == 2 * GIB


@pytest.mark.parametrize("cgroup", ["", "4:memory:/job\n", "0::/\n"])
def test_memory_without_a_limit_is_that_of_the_machine(
    tmp_path: Path, cgroup: str
) -> None:
    write_machine(tmp_path, available_kib=1024, cgroup=cgroup)
    assert available_memory(tmp_path) == 1024**2


class FakeLM:
    """An lm-eval model with a token for each character, and room for 300 tokens on its GPU."""

    max_length = 100
    max_gen_toks = 256
    device = SimpleNamespace(type="cuda")

    def tokenizer(self, texts: list[str]) -> Any:
        return SimpleNamespace(input_ids=[list(text) for text in texts])

    def _detect_batch_size(self, requests: list[Any], pos: int = 0) -> int:
        _, context, continuation = requests[pos]
        return 300 // len((context + continuation)[:-1])


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("loglikelihood", [("x" * 20, "y" * 10), ("x", "y")], 10),
        ("loglikelihood_rolling", [("x" * 60,)], 5),
        (
            "loglikelihood_rolling",
            [("x" * 999,)],
            3,
        ),  # lm-eval cuts it into windows of 100
        (
            "generate_until",
            [("x" * 20, {"max_gen_toks": 10}), ("x", {"max_new_tokens": 20})],
            7,
        ),
        ("generate_until", [("x" * 20, {})], 3),
    ],
)
def test_gpu_tries_the_longest_request_of_a_kind(
    kind: str, arguments: list[Any], expected: int
) -> None:
    requests = [SimpleNamespace(args=args) for args in arguments]
    assert largest_batch_size(FakeLM(), kind, requests) == expected


@pytest.mark.usefixtures("datasets_cache")
def test_evaluation_without_batch_size_fits_the_memory(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415  imports lm_eval
    from transformers import AutoTokenizer  # noqa: PLC0415

    environment = evaluate_environment(tmp_path, tiny_model)
    tasks = (Task(name="verbs", file="tasks/verbs.yaml", limit=10),)
    of_four = evaluate_config(tiny_model, tasks=tasks, batch_size=4)
    expected = run_evaluate(of_four, environment).scores
    samples = read_samples(of_four, environment)
    texts = [
        "".join(arguments) for sample in samples for arguments in sample["arguments"]
    ]
    longest = max(
        len(tokens)
        for tokens in AutoTokenizer.from_pretrained(tiny_model)(texts).input_ids
    )

    rows: list[int] = []
    call = HFLM._model_call

    def count_rows(self: HFLM, inps: Any) -> Any:
        rows.append(len(inps))
        return call(self, inps)

    monkeypatch.setattr(HFLM, "_model_call", count_rows)
    monkeypatch.setattr(
        batch_size, "available_memory", lambda: 4 * 7 * longest * 320 * 4
    )  # room for seven
    assert (
        run_evaluate(with_recipe(of_four, batch_size=None), environment).scores
        == expected
    )
    assert max(rows) == 4


def test_lm_eval_tries_batches_of_the_longest_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, lm-eval's `auto` is called with one request, as here on a CPU: 64 rows of 7 tokens, five times."""
    import torch  # noqa: PLC0415
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415  imports lm_eval

    lm = load_tiny_lm(tiny_model)
    shapes: list[tuple[int, ...]] = []
    call = HFLM._model_call

    def record(self: HFLM, inps: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(inps.shape))
        if len(inps) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(self, inps)

    monkeypatch.setattr(HFLM, "_model_call", record)
    detected = lm._detect_batch_size([(None, [0] * 7, [0])])
    assert shapes[0] == (64, 7)
    assert shapes[-5:] == [(detected, 7)] * 5
    assert 10 <= detected <= 20
