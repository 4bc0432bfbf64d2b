"""`finetune.Pipeline.run`: a run of this process, with stages that only count."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.cli.workspace import CliWorkspace

import finetune


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return CliWorkspace(tmp_path)


@pytest.fixture
def place():
    return {"workdir": "run", "claims": {"demo": "material"}}


def pipeline_of(workspace, **changes):
    """Return the workspace's pipeline, made in Python; `changes` are variables of train."""
    (workspace.folder / "material/base").mkdir(exist_ok=True)
    (workspace.folder / "material/data.jsonl").touch()
    if changes:
        workspace.set_env("train", **changes)
    return finetune.Pipeline("demo", workspace.manifest["spec"])


def wait_for_step(run, step):
    """Wait until the training has done a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        train = run.status.stages.get("train")
        if train and train.progress and train.progress.step >= step:
            return
        time.sleep(0.05)
    raise TimeoutError


def test_run_has_status_scores_and_card(workspace, place):
    pipeline = pipeline_of(workspace)
    actions = [stage.action for stage in pipeline.plan(**place).stages]
    assert actions == ["run"] * 5
    run = pipeline.run(**place).wait(120)
    assert run.status.phase == "Succeeded"
    assert run.scores["task"]["acc"].value == 0.9
    assert "Succeeded" in repr(run)
    assert 'srcdoc="&lt;!DOCTYPE html&gt;' in run._repr_html_()
    assert {stage.action for stage in pipeline.plan(**place).stages} == {"reuse"}
    again = finetune.get("demo", workdir=workspace.run_folder)
    assert again.status == run.status


def test_below_the_gate_is_no_failure(workspace, place):
    workspace.set_env("evaluate", SCORE="0.1")
    run = pipeline_of(workspace).run(**place).wait(120)
    assert run.status.gates_passed is False


def test_failed_stage_raises_its_error(workspace, place):
    run = pipeline_of(workspace, EXIT_AT="2:65").run(**place)
    with pytest.raises(finetune.RunFailed, match="made to fail at step 2"):
        run.wait(120)


def test_run_continues_where_the_command_line_reads_it(workspace, place):
    run = pipeline_of(workspace).run(until="train", **place).wait(120)
    assert workspace.starts("evaluate") == []
    listed = workspace.finetune_in("wait", "demo", "--workdir", "run")
    assert (listed.returncode, run.status.stages["train"].state) == (0, "Succeeded")


def test_edit_is_compared_with_the_generation_before(workspace, place):
    pipeline_of(workspace).run(**place).wait(120)
    workspace.manifest["spec"]["train"]["epochs"] = 2
    run = pipeline_of(workspace, SCORE="0.5").run(**place).wait(120)
    comparison = run.compare("run@1")
    paths = [field["path"] for field in comparison.to_json()["fields"]]
    assert "train.epochs" in paths
    assert "train.epochs" in repr(comparison)


def test_ctrl_c_stops_the_run_and_leaves_no_process(workspace, place):
    pipeline = pipeline_of(workspace, STEPS="2000", STEP_SECONDS="0.05")
    run = pipeline.run(**place)
    wait_for_step(run, 2)
    # A process that a shell started in the background ignores SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run.wait(120)
    finally:
        signal.signal(signal.SIGINT, handler)
    workspace.wait_for_processes()
    assert workspace.processes() == []
    assert run.status.stages["train"].state == "Pending"


def test_cancelled_wait_leaves_no_process(workspace, place):
    pipeline = pipeline_of(workspace, STEPS="2000", STEP_SECONDS="0.05")

    async def cancel():
        run = await pipeline.run_async(**place)
        waiting = asyncio.create_task(run.wait_async())
        await asyncio.to_thread(wait_for_step, run, 2)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        return run, waiting.cancelled()

    run, cancelled = asyncio.run(cancel())
    assert cancelled
    workspace.wait_for_processes()
    assert workspace.processes() == []
    assert run.status.phase == "Suspended"


def test_every_call_works_inside_an_event_loop(workspace, place):
    pipeline = pipeline_of(workspace)

    async def as_in_a_notebook():
        pipeline.plan(**place)
        return pipeline.run(**place).wait(120)

    assert asyncio.run(as_in_a_notebook()).status.phase == "Succeeded"


def test_end_of_python_stops_the_stage(workspace):
    pipeline = pipeline_of(workspace, STEPS="2000", STEP_SECONDS="0.05")
    pipeline.to_yaml("p.yaml")
    program = (
        "import finetune, time\n"
        "pipeline = finetune.Pipeline.from_yaml('p.yaml')\n"
        "run = pipeline.run(workdir='run', claims={'demo': 'material'})\n"
        "while not (run.status.stages.get('train') and run.status.stages['train'].progress):\n"
        "    time.sleep(0.05)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    workspace.wait_for_processes()
    assert workspace.processes() == []
    assert finetune.get("demo", workdir=workspace.run_folder).status.phase == "Stopped"


def test_missing_claim_is_an_error_before_the_run(workspace):
    pipeline = pipeline_of(workspace)
    for call in (pipeline.run, pipeline.plan):
        with pytest.raises(finetune.InvalidManifest, match="claim demo has no folder"):
            call(workdir="run")
    assert not (workspace.run_folder / "pipeline.json").exists()


def test_run_that_another_process_holds_is_refused(workspace, place):
    pipeline = pipeline_of(workspace, STEPS="2000", STEP_SECONDS="0.05")
    run = pipeline.run(**place)
    with pytest.raises(finetune.UsageError, match="another finetune run uses"):
        pipeline.run(**place)
    run.stop()
    workspace.wait_for_processes()
    assert workspace.processes() == []


def test_wait_gives_up_after_its_timeout(workspace, place):
    run = pipeline_of(workspace, STEPS="2000", STEP_SECONDS="0.05").run(**place)
    with pytest.raises(finetune.ClusterError, match=r"not finished after 0\.1 s"):
        run.wait(0.1)
    run.stop()


def test_unknown_run_is_a_usage_error(workspace):
    with pytest.raises(finetune.UsageError, match="no run"):
        finetune.get("nothing", workdir=workspace.folder / "nowhere")
