"""Stage deploy, on a laptop: the pushed model is served, asked once, and the server is stopped again."""

import json

from finetune_trainer.contract import DeployConfig, DeployResult, Environment
from finetune_trainer.contract.engines import ENGINES
from finetune_trainer.runtime.artifacts import CorruptArtifact, atomic_folder, seal, verify
from finetune_trainer.runtime.sources import fetch_model
from finetune_trainer.runtime.stage_folder import Context
from finetune_trainer.serving.server import ask, serving
from finetune_trainer.serving.verify import verified

ANSWER_CHARACTERS = 1024
ANSWER_BYTES = 2048
"""Of the answer as JSON; more would not fit into a termination message."""


def run(config: DeployConfig, context: Context) -> DeployResult:
    """Raise SourceNotFound, ServiceUnavailable or Interrupted; no server outlives the call."""
    recipe, stop = config.recipe, context.stop
    context.progress.update(step=0, total=2, note="verifying the pushed model")
    model = fetch_model(config.model.uri, config.model.revision, context.environment)
    digest = verified(model, config.digest)
    context.progress.update(note=f"starting {recipe.engine}")
    with stop.deferred(), serving(ENGINES[recipe.engine], model, stop, context.folder / "server.log") as server:
        context.progress.update(step=1, note="asking")
        answer = ask(server, recipe.prompt, recipe.max_tokens, stop)
    with atomic_folder(context.folder / "output") as folder:
        proof = {"model": digest, "prompt": recipe.prompt, "answer": answer}
        (folder / "answer.json").write_text(json.dumps(proof, indent=1))
        sealed = seal(folder)
    context.progress.update(step=2, note="stopped the server")
    return DeployResult(
        identity=config.identity,
        digest=sealed,
        url=server.url,
        answer=shortened(answer),
        seconds_to_ready=round(server.seconds_to_ready, 3),
    )


def shortened(answer: str) -> str:
    """Cut an answer for the result: a character may take up to six bytes there. The proof has the whole of it."""
    answer = answer[:ANSWER_CHARACTERS]
    while len(json.dumps(answer, ensure_ascii=False).encode()) > ANSWER_BYTES:
        answer = answer[:-1]
    return answer


def is_output_valid(_result: DeployResult, config: DeployConfig, environment: Environment) -> bool:
    """Tell whether the proof is still there; the model's own place is push's business."""
    try:
        verify(environment.stage_dir("deploy", config.identity) / "output")
    except CorruptArtifact:
        return False
    return True
