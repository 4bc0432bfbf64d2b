"""Stage deploy in a local run: serves the pushed model, sends it one prompt, and stops the server."""

import json
from contextlib import AbstractContextManager
from pathlib import Path

from finetune_trainer.contract import DeployConfig, DeployResult, Environment
from finetune_trainer.contract.engines import ENGINES, model_name
from finetune_trainer.contract.smoke_test import Question
from finetune_trainer.runtime.artifacts import (
    CorruptArtifact,
    atomic_folder,
    seal,
    verify,
)
from finetune_trainer.runtime.errors import ConfigInvalid
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.serving.server import Server, ask, check_listed, serving
from finetune_trainer.serving.verify import verify_model
from finetune_trainer.stores.model_files import fetch_published

MAX_ANSWER_CHARACTERS = 1024
# A termination message has 4,096 bytes, and the rest of the result needs room, too.
MAX_ANSWER_BYTES = 2048
"""Limit of the answer as JSON."""


def run(config: DeployConfig, context: Context) -> DeployResult:
    """Run the stage; the server is stopped in any case.

    Raise ConfigInvalid, SourceNotFound, ServiceUnavailable or Interrupted.
    """
    recipe = config.recipe
    test = recipe.smoke_test
    question = Question(test.prompt, test.max_tokens, config.conversations, test.expect)
    stop = context.stop
    context.progress.update(step=0, total=2, note="verifying the pushed model")
    model = fetch_published(config.location or config.model.uri, context.environment)
    model_digest = verify_model(model, config.digest)
    context.progress.update(note=f"starting {recipe.engine}")
    with stop.deferred(), _serving(config, model, context) as server:
        context.progress.update(step=1, note="sending the prompt")
        check_listed(server)
        answer = ask(server, question, stop)
    problem = question.problem(answer)
    if problem:
        # The same model gives the same answer, so another attempt would fail, too.
        raise ConfigInvalid(problem)
    with atomic_folder(context.folder / "output", fence=context.fence) as folder:
        output = {"model": model_digest, "prompt": test.prompt, "answer": answer}
        (folder / "answer.json").write_text(json.dumps(output, indent=1))
        digest = seal(folder)
    context.progress.update(step=2, note="stopped the server")
    return DeployResult(
        identity=config.identity,
        digest=digest,
        url=server.url,
        answer=truncate_answer(answer),
        seconds_to_ready=round(server.seconds_to_ready, 3),
    )


def _serving(
    config: DeployConfig, model: Path, context: Context
) -> AbstractContextManager[Server]:
    engine = ENGINES[config.recipe.engine]
    log = context.folder / "server.log"
    return serving(engine, model, context.stop, log, name=model_name(config.model.uri))


def truncate_answer(answer: str) -> str:
    """Truncate an answer for the result. answer.json has all of it."""
    answer = answer[:MAX_ANSWER_CHARACTERS]
    # As JSON, a character takes up to six bytes.
    while len(json.dumps(answer, ensure_ascii=False).encode()) > MAX_ANSWER_BYTES:
        answer = answer[:-1]
    return answer


def is_output_valid(
    _result: DeployResult, config: DeployConfig, environment: Environment
) -> bool:
    """Return whether the output is intact. The model itself is checked by `push`."""
    try:
        verify(environment.stage_dir("deploy", config.identity) / "output")
    except CorruptArtifact:
        return False
    return True
