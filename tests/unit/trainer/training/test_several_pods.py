"""Two pods that train together: exact whichever of them is lost, and only the first writes."""

import time
from signal import SIGKILL, SIGTERM

import peft
import pytest
from support.stores.servers import free_port
from support.trainer.metadata_servers import metadata_server
from support.trainer.rank_trainings import METHODS, PLAIN, PROCESSES
from support.trainer.training import (
    ALL,
    STEPS_OF_KILLED,
    random_kills,
    stage_folder,
    stop_code,
)

from finetune_trainer.contract import ExitCode
from finetune_trainer.runtime.machine.notices import Ec2
from finetune_trainer.stages.train import UNLIKE
from finetune_trainer.training.loop import NOTICE_OF_ANOTHER

BOTH = ["DDP", "FSDP"]
KILLED = ["LoRA", "Full, sharded"]
if ALL:
    KILLED += ["QLoRA", "DPO"]


@pytest.fixture(scope="module")
def one_process(new_training):
    return new_training(gradient_accumulation_steps=4, **PLAIN).run()


@pytest.fixture(scope="module")
def undisturbed(new_training):
    """A function that returns the digest of a training of two pods that nothing interrupts."""
    digests = {}

    def digest(parallelism):
        if parallelism not in digests:
            training = of_two_pods(new_training, parallelism)
            assert [pod.wait() for pod in training.start_pods()] == [ExitCode.DONE] * 2
            digests[parallelism] = training.digest
        return digests[parallelism]

    return digest


def of_two_pods(new_training, parallelism):
    return new_training(
        nodes=2, parallelism=parallelism, gradient_accumulation_steps=2, **PLAIN
    )


@pytest.mark.parametrize("method", KILLED)
def test_kills_of_any_pod_do_not_change_the_weights(new_training, method):
    recipe = METHODS[method] | {"nodes": 2, "max_steps": STEPS_OF_KILLED}
    calm = new_training(**recipe)
    disturbed = new_training(**recipe)
    assert [pod.wait() for pod in calm.start_pods()] == [ExitCode.DONE] * 2
    for lost, after, number in random_kills((0, 1), longest_delay=0.1):
        pods = disturbed.start_pods()
        assert pods[0].until(lambda: disturbed.step() > 0)
        time.sleep(after)
        pods[lost].kill(number)
        codes = [pod.wait() for pod in pods]
        assert (codes[lost], codes[1 - lost]) == (
            stop_code(number),
            ExitCode.INTERRUPTED,
        ), disturbed.log_of(1 - lost)
    assert [pod.wait() for pod in disturbed.start_pods()] == [ExitCode.DONE] * 2
    assert disturbed.digest == calm.digest


@pytest.mark.parametrize("parallelism", BOTH)
@pytest.mark.parametrize("number", [SIGTERM, SIGKILL])
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_pod_does_not_change_the_weights(
    new_training, undisturbed, parallelism, number, lost
):
    training = of_two_pods(new_training, parallelism)
    pods = training.start_pods()
    assert pods[0].until(lambda: training.step() > 8)
    pods[lost].kill(number)
    codes = [pod.wait() for pod in pods]
    expected = (stop_code(number), ExitCode.INTERRUPTED)
    assert (codes[lost], codes[1 - lost]) == expected, training.log
    if number == SIGTERM:  # both stop at one step, and the first saves it
        first, second = (training.message_of(rank).interruption for rank in range(2))
        assert first.saved_step == first.step == second.step > 8
    elif (
        lost == 1
    ):  # the first saves the last finished step, unless that needs what the lost one had
        stopped = training.message_of(0).interruption
        assert (
            stopped.step
            >= stopped.saved_step
            >= (6 if parallelism == "FSDP" else stopped.step)
            > 0
        )
    codes = [pod.wait() for pod in training.start_pods()]
    assert codes == [ExitCode.DONE] * 2, training.log
    assert training.digest == undisturbed(parallelism)


@pytest.mark.parametrize("parallelism", BOTH)
def test_resumed_pods_train_as_one_process_and_the_first_writes(
    new_training, one_process, parallelism
):
    """They resume from a checkpoint with the best weights so far."""
    training = of_two_pods(new_training, parallelism)
    pods = training.start_pods()
    assert pods[0].until(lambda: training.step() > 8)
    pods[1].kill()
    assert [pod.wait() for pod in pods] == [ExitCode.INTERRUPTED] * 2
    assert [pod.wait() for pod in training.start_pods()] == [ExitCode.DONE] * 2
    assert training.losses == pytest.approx(one_process.losses, abs=1e-6)
    expected = one_process.message.result.validation_loss
    assert training.message_of(0).result.validation_loss == pytest.approx(
        expected, abs=1e-6
    )
    assert training.message_of(1).result is None


def test_notice_on_another_node_saves_the_next_step(new_training):
    training = new_training(nodes=2, max_steps=4000, checkpoint={"every_steps": 5000})
    with metadata_server("EC2") as (served, base):
        served.set(Ec2.ACTION, {"action": "terminate", "time": "2030-01-01T08:22:00Z"})
        noticed = {
            "interruption_notices": "EC2",
            "metadata_endpoint": base,
            "progress_file": None,
        }
        pods = training.start_pods(second=noticed)
        assert pods[0].until(
            lambda: list(
                (stage_folder(training.workspace) / "checkpoints").glob("step-*")
            ),
            60,
        )
        pods[0].kill()
        assert [pod.wait() for pod in pods] == [ExitCode.INTERRUPTED] * 2
    assert "EC2 announces terminate" in training.log_of(1)
    assert (
        training.log_of(0).count(
            f"{NOTICE_OF_ANOTHER}: the next step boundary is saved"
        )
        == 1
    )


def test_pod_that_waits_for_another_in_vain_can_be_retried(new_training):
    training = new_training(nodes=2)
    pod = training.start_pod(0, free_port(), {}, **{f"{PROCESSES}.JOIN_SECONDS": 1.0})
    assert pod.wait() == ExitCode.UNAVAILABLE
    expected = "the 2 processes of train.nodes and train.processesPerNode have not met within 1 s"
    assert expected in training.log_of(0)


@pytest.mark.parametrize("version", [peft.__version__, "0.1"])
def test_pods_log_that_their_numeric_environments_differ(new_training, version):
    training = new_training(nodes=2, max_steps=2)
    port = free_port()
    pods = [
        training.start_pod(0, port, {}),
        training.start_pod(1, port, {}, **{"peft.__version__": version}),
    ]
    assert [pod.wait() for pod in pods] == [ExitCode.DONE] * 2
    assert [UNLIKE in training.log_of(rank) for rank in range(2)] == [
        version == "0.1"
    ] * 2
