"""`finetune cancel`: stop a pipeline on a cluster for good."""

from finetune_cli.wishes import wish

DESCRIPTION = """\
Stop what is running, as an eviction would, and start nothing more until `finetune retry`. NAME is a pipeline on a
cluster; with -n or --context a FILE names it too.
"""

register = wish(
    "cancel",
    "stop a pipeline on a cluster for good",
    DESCRIPTION,
    "Ctrl-C in `finetune run` stops it",
)
