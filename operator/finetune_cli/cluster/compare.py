"""`finetune compare` on a cluster: pipelines by their specs and statuses."""

import argparse
import asyncio

from finetune_cli.cluster.session import connect
from finetune_cli.comparison.compare import Run
from finetune_cli.diagnostics import UsageError
from finetune_cli.local.generations import spec_of, split_generation
from finetune_cli.output.comparison_lines import print_comparison

NO_QUESTIONS = (
    "on a cluster, the values of single questions are on the pipeline's claim"
)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    runs = asyncio.run(_runs(arguments))
    print_comparison(runs, arguments)
    return 0


async def _runs(arguments: argparse.Namespace) -> list[Run]:
    return [await _run(reference, arguments) for reference in arguments.names]


async def _run(reference: str, arguments: argparse.Namespace) -> Run:
    """Return a pipeline of the cluster. Raise UsageError if it does not exist, or for an earlier generation."""
    name, number = split_generation(reference)
    named = argparse.Namespace(**{**vars(arguments), "name": name})
    async with connect(named) as session:
        pipeline = await session.get_pipeline()
    if number is not None and number != pipeline.generation:
        raise UsageError(
            f"{reference}: a cluster keeps what was measured of the newest generation only, "
            f"which is {pipeline.generation}; give each setting a pipeline of its own"
        )
    return Run(
        reference,
        spec_of(pipeline),
        pipeline.status,
        without_questions=NO_QUESTIONS,
    )
