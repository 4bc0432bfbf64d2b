"""`finetune plan`: what `finetune run` would do, and why."""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from rich.console import Console

from finetune_cli.commands import Commands
from finetune_cli.forecast import forecast, without_effect
from finetune_cli.laptop import Laptop
from finetune_cli.manifest import read
from finetune_cli.places import add_places, claims, workdir_for

DESCRIPTION = """\
Say for every stage whether it would be run, resumed, reused or skipped, and why. Nothing is written or started.
"""

STYLES = {"reuse": "green", "run": "cyan", "resume": "yellow", "skip": "dim", "stay": "red"}


def register(commands: Commands) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("plan", help="say what would run and why", description=DESCRIPTION)
    parser.add_argument("file", type=Path, metavar="FILE", help="the manifest")
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast."""
    manifest = read(arguments.file)
    workdir = workdir_for(manifest, arguments.workdir)
    with tempfile.TemporaryDirectory() as links:
        laptop = Laptop.look_at(manifest, workdir, Path(links))
        known = {link.name: link.resolve() for link in (workdir / "claims").glob("*") if link.is_dir()}
        laptop.cluster.folders.mount(known | claims(arguments.claim))
        laptop.check_claims()
        laptop.check_places()
        stages = asyncio.run(forecast(laptop))
    unused = without_effect(manifest.spec)
    if arguments.json:
        print(json.dumps({"stages": [vars(stage) for stage in stages], "withoutEffectHere": unused}, indent=1))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for stage in stages:
        style = STYLES[stage.doing]
        console.print(f"[{style}]{stage.doing:<6}[/{style}] [bold]{stage.stage:<9}[/bold]", end=" ")
        console.print(stage.why, markup=False)
    if unused:
        console.print(f"without effect on a laptop: {', '.join(unused)}", style="dim", markup=False)
    return 0
