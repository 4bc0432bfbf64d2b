"""`finetune suspend`: stop a pipeline on a cluster for a while."""

from finetune_cli.wishes import wish

DESCRIPTION = """\
Stop what is running, as an eviction would, and start nothing until `finetune resume` (spec.suspend). NAME is a
pipeline on a cluster; with -n or --context a FILE names it too.
"""

register = wish(
    "suspend",
    "stop a pipeline on a cluster for a while",
    DESCRIPTION,
    "Ctrl-C in `finetune run` stops it, and running it again goes on",
)
